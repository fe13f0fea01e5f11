// The kernels for avx512; CMakeLists.txt gives this file its instruction set.
#define HR_ISA hr_avx512
#include "simd_avx512.h"

#include "kernels_impl.h"

namespace hr {
const Kernels* avx512_kernels() {
  static const Kernels table = HR_ISA::make_table("avx512");
  return &table;
}
}  // namespace hr
