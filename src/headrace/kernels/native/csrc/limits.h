// What this machine could do at best, measured with the kernels' own instructions: the figures that benchmarks are held against.
#pragma once
#include "pool.h"

namespace hr {

struct Limits {
  double read_bytes_per_s;  // from memory, all threads together
  double int8_ops_per_s;    // multiplications and additions of the 8-bit dot product
};

Limits measure_limits(Pool& pool);

}  // namespace hr
