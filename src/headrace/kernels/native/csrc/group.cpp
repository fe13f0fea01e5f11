#include "group.h"

#include <sys/mman.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#endif

#include <chrono>
#include <climits>
#include <ctime>
#include <new>
#include <thread>

namespace hr {
namespace {

constexpr int kSpins = 4000;          // about 50 microseconds: longer than ranks usually wait for one another
constexpr double kForEver = 1e9;
constexpr long kLook = 100'000'000L;  // nanoseconds after which a sleeper looks around, should a wake-up be lost

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#if defined(__linux__)
int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
}

void kernel_sleep(std::atomic<uint32_t>& word, uint32_t old) {
  const timespec look{0, kLook};
  syscall(SYS_futex, &word, FUTEX_WAIT, old, &look, nullptr, 0);
}

void kernel_wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
#else
int usable_cores() { return (int)std::thread::hardware_concurrency(); }

void kernel_sleep(std::atomic<uint32_t>&, uint32_t) {
  const timespec nap{0, 50'000};
  nanosleep(&nap, nullptr);
}

void kernel_wake(std::atomic<uint32_t>&) {}
#endif

}  // namespace

struct Group::Control {
  alignas(64) std::atomic<uint32_t> arrived;
  alignas(64) std::atomic<uint32_t> generation;  // of the barrier
  alignas(64) std::atomic<uint32_t> posted;      // number of the newest mailbox
  alignas(64) std::atomic<uint32_t> sleepers;
  alignas(64) std::atomic<uint32_t> failed;
};

Group::Group(int descriptor, int rank, int size) : rank_(rank), size_(size), has_own_core_(usable_cores() >= size) {
  void* data = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  base_ = (uint8_t*)data;
  control_ = (Control*)data;  // zero from the start, which is what all of its fields begin with
  static_assert(sizeof(Control) <= kControl && std::atomic<uint32_t>::is_always_lock_free);
}

Group::~Group() { munmap(base_, kBytes); }

void Group::trim_logits(size_t bytes, size_t used) {
#if defined(__linux__)
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), first = (bytes + page - 1) / page * page;
  if (first < used) madvise((uint8_t*)logits() + first, used - first, MADV_REMOVE);
#else
  (void)bytes, (void)used;
#endif
}

bool Group::barrier() {
  Control& c = *control_;
  const uint32_t generation = c.generation.load(std::memory_order_acquire);
  if (c.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == (uint32_t)size_) {
    c.arrived.store(0, std::memory_order_relaxed);
    c.generation.store(generation + 1, std::memory_order_seq_cst);
    wake(c.generation);
  } else {
    sleep_until(c.generation, generation, kForEver, [&] { return c.generation.load(std::memory_order_acquire) != generation; });
  }
  return !has_failed();
}

uint32_t Group::posted() const { return control_->posted.load(std::memory_order_acquire); }

void Group::post() {
  control_->posted.fetch_add(1, std::memory_order_seq_cst);
  wake(control_->posted);
}

uint32_t Group::wait(uint32_t seen, double most_s) {
  sleep_until(control_->posted, seen, most_s, [&] { return posted() != seen; });
  return has_failed() ? seen : posted();
}

void Group::fail() {
  control_->failed.store(1, std::memory_order_seq_cst);
  wake(control_->generation);
  wake(control_->posted);
}

bool Group::has_failed() const { return control_->failed.load(std::memory_order_acquire) != 0; }

// Looks for a while, then sleeps in the kernel. Ranks that share a core sleep at once: whom they wait for needs it.
template <class Ready>
void Group::sleep_until(std::atomic<uint32_t>& word, uint32_t old, double most_s, Ready ready) {
  for (int i = has_own_core_ ? 0 : kSpins; i < kSpins; i++) {
    if (ready() || has_failed()) return;
    relax();
  }
  const auto start = std::chrono::steady_clock::now();
  while (!ready() && !has_failed()) {
    if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() >= most_s) return;
    control_->sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (!ready() && !has_failed()) kernel_sleep(word, old);
    control_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
}

void Group::wake(std::atomic<uint32_t>& word) {
  if (control_->sleepers.load(std::memory_order_seq_cst)) kernel_wake(word);
}

}  // namespace hr
