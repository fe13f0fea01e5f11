// Chooses the kernels by what the processor has, once; tests may force others of those it can run.
#include <atomic>
#include <string>
#include <vector>

#include "kernels.h"

namespace hr {
namespace {
std::atomic<const Kernels*> forced{nullptr};

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
#endif

// What this processor can run, the best one first.
const std::vector<const Kernels*>& usable() {
  static const std::vector<const Kernels*> all = [] {
    std::vector<const Kernels*> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
#if defined(HR_HAS_AVX512)
    if (has_avx512()) found.push_back(avx512_kernels());
#endif
#if defined(HR_HAS_AVX2)
    if (has_avx2()) found.push_back(avx2_kernels());
#endif
#endif
    found.push_back(portable_kernels());
    return found;
  }();
  return all;
}
}  // namespace

const Kernels* best_kernels() {
  static const Kernels* best = usable().front();
  const Kernels* other = forced.load();
  return other ? other : best;
}

bool force_kernels(const std::string& name) {
  if (name.empty()) {
    forced = nullptr;
    return true;
  }
  for (const Kernels* kernels : usable())
    if (name == kernels->name) {
      forced = kernels;
      return true;
    }
  return false;
}

}  // namespace hr
