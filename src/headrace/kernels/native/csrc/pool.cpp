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

// Spins briefly, then lets others run: a member that lost its core to another process must not burn the rest.
template <class Ready>
void spin_until(Ready ready) {
  for (int i = 0; !ready(); i++) {
    if (i < 2000)
      relax();
    else
      std::this_thread::yield();
  }
}

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

void Pool::barrier() {
  if (size_ == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
  } else {
    spin_until([&] { return phase_.load(std::memory_order_acquire) != phase; });
  }
}

void Pool::run(const std::function<void(int)>& work) {
  work_ = &work;
  run_.fetch_add(1, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst)) {
    { std::lock_guard<std::mutex> lock(mutex_); }  // a member between its last look and its sleep is let through first
    wake_.notify_all();
  }
  work(0);
  barrier();
}

void Pool::member(int rank) {
  for (uint64_t seen = 0;;) {
    const auto is_next = [&] { return run_.load(std::memory_order_seq_cst) != seen || stopping_.load(); };
    for (int i = 0; i < 20000 && !is_next(); i++) relax();
    if (!is_next()) {
      std::unique_lock<std::mutex> lock(mutex_);
      sleeping_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, is_next);
      sleeping_.fetch_sub(1, std::memory_order_seq_cst);
    }
    if (stopping_) return;
    seen++;
    (*work_)(rank);
    barrier();
  }
}

}  // namespace hr
