// The kernels for avx2; CMakeLists.txt gives this file its instruction set.
#define HR_ISA hr_avx2
#include "simd_avx2.h"

#include "kernels_impl.h"

namespace hr {
const Kernels* avx2_kernels() {
  static const Kernels table = HR_ISA::make_table("avx2");
  return &table;
}
}  // namespace hr
