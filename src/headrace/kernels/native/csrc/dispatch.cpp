// Chooses the kernels by what the processor has, once; tests may force one.
#include <atomic>
#include <string>

#include "kernels.h"

namespace hr {
namespace {
std::atomic<const Kernels*> forced{nullptr};

const Kernels* choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(HR_HAS_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    return avx512_kernels();
#endif
#if defined(HR_HAS_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return avx2_kernels();
#endif
#endif
  return portable_kernels();
}
}  // namespace

const Kernels* best_kernels() {
  static const Kernels* best = choose();
  const Kernels* other = forced.load();
  return other ? other : best;
}

bool force_kernels(const std::string& name) {
  const std::string best = choose()->name;
  if (name.empty()) {
    forced = nullptr;
    return true;
  }
  if (name == "portable") {
    forced = portable_kernels();
    return true;
  }
#if defined(HR_HAS_AVX2)
  if (name == "avx2" && best != "portable") {
    forced = avx2_kernels();
    return true;
  }
#endif
  if (name == best) {
    forced = nullptr;
    return true;
  }
  return false;
}

}  // namespace hr
