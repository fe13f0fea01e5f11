#include "limits.h"

#include <algorithm>
#include <chrono>

#include "kernels.h"

namespace hr {
namespace {

template <class Work>
double best_seconds(Pool& pool, Work work) {
  double best = 1e9;
  for (int round = 0; round < 5; round++) {
    const auto begin = std::chrono::steady_clock::now();
    pool.for_each(pool.size(), work);
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

}  // namespace

Limits measure_limits(Pool& pool) {
  constexpr size_t kShare = 128u << 20;  // per thread: beyond the caches that a core has to itself
  constexpr int kSteps = 2000000;
  Memory memory(kShare * pool.size(), true);
  std::fill(memory.data(), memory.data() + memory.bytes(), (uint8_t)1);
  const Kernels& kernels = *best_kernels();
  std::vector<float> sink(pool.size() * 16);
  const double read_s = best_seconds(pool, [&](int rank) {
    sink[rank * 16] += kernels.sum_bytes((const float*)(memory.data() + rank * kShare), kShare / sizeof(float));
  });
  const double burst_s = best_seconds(pool, [&](int rank) { sink[rank * 16] += kernels.int8_burst(kSteps); });
  return {(double)kShare * pool.size() / read_s, (double)kSteps * kInt8OpsPerStep * pool.size() / burst_s};
}

}  // namespace hr
