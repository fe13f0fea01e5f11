#include "pool.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hr {
namespace {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

constexpr int kSpins = 300;  // some ten microseconds: longer than a share takes

void pin_to_core(std::thread& thread, int index) {
#if defined(__linux__)
  cpu_set_t allowed, one;
  if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
    if (CPU_ISSET(cpu, &allowed) && index-- == 0) {
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      pthread_setaffinity_np(thread.native_handle(), sizeof one, &one);
      return;
    }
#else
  (void)thread, (void)index;
#endif
}

}  // namespace

// The order matters: whoever sees the new number of units also sees that the slot belongs to a new generation.
void Slot::open(uint32_t generation, int units, int share) {
  const uint64_t none = (uint64_t)generation << 32;
  taken_.store(none, std::memory_order_release);
  done_.store(none, std::memory_order_release);
  share_.store(share, std::memory_order_release);
  units_.store(units, std::memory_order_release);
}

// Spins a little, then lets others run: the member that holds the last share may need this very core. (Sleeping here, for
// the system to move that member over, was measured and is far worse: each of some 500 slots of a step pays the wake-up.)
bool Slot::wait(uint32_t generation, int units) const {
  const uint64_t all = (uint64_t)generation << 32 | (uint32_t)units;
  for (int i = 0;; i++) {
    const uint64_t seen = done_.load(std::memory_order_acquire);
    if (seen == all) return true;
    if ((uint32_t)(seen >> 32) != generation) return false;
    if (i < kSpins)
      relax();
    else
      std::this_thread::yield();
  }
}

Pool::Pool(int num_threads, bool pin) : size_(num_threads) {
  for (int rank = 1; rank < size_; rank++) {
    threads_.emplace_back([this, rank] { member(rank); });
    if (pin) pin_to_core(threads_.back(), rank);
  }
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Pool::run(Job& job) {
  const uint32_t generation = generation_.load() + 1;
  job.open(generation);
  job_ = &job;
  generation_ = generation;
  if (sleeping_) {
    { std::lock_guard<std::mutex> lock(mutex_); }  // a member between its last look and its sleep is let through first
    wake_.notify_all();
  }
  job.help(0, generation);
}

void Pool::for_each(int units, const std::function<void(int)>& work) {
  // A member that is late reads neither: it cannot take a share.
  loop_.units = units;
  loop_.work = &work;
  run(loop_);
}

void Pool::Loop::help(int, uint32_t generation) {
  slot_.help(generation, [this](int begin, int end) {
    for (int unit = begin; unit < end; unit++) (*work)(unit);
  });
}

void Pool::settle() {
  job_ = nullptr;
  while (inside_.load()) std::this_thread::yield();
}

void Pool::member(int rank) {
  for (uint32_t seen = 0;;) {
    for (int i = 0; i < 2000 && !is_next(seen); i++) relax();
    if (!is_next(seen)) {
      std::unique_lock<std::mutex> lock(mutex_);
      sleeping_++;
      wake_.wait(lock, [&] { return is_next(seen); });
      sleeping_--;
    }
    if (stopping_) return;
    inside_++;
    seen = generation_;
    if (Job* job = job_) job->help(rank, seen);
    inside_--;
  }
}

}  // namespace hr
