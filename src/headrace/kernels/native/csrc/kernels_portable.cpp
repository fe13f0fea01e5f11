// The kernels for portable; CMakeLists.txt gives this file its instruction set.
#define HR_ISA hr_portable
#include "simd_portable.h"

#include "kernels_impl.h"

namespace hr {
const Kernels* portable_kernels() {
  static const Kernels table = HR_ISA::make_table("portable");
  return &table;
}
}  // namespace hr
