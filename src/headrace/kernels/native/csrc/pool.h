// A fixed team of threads that works through jobs together. A job is a row of slots; a slot is a number of independent units
// that any member takes in shares, and it is over when all its units are done, whoever did them. Nobody ever waits for a
// member that holds no share: on a machine with other work, one that has lost its core is simply not missed, and when it
// comes back it catches up or finds that the job has passed.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace hr {

// Units of work. `taken` and `done` carry the job's generation in their upper half, so that a member which is still inside
// an older job can neither take a share of the new one nor take its end for the end of its own.
class Slot {
 public:
  // By the member that opens the job, before anybody may help.
  void open(uint32_t generation, int units, int share);

  // Takes shares until none is left, then waits for those of others. False: the generation has passed.
  template <class Work>
  bool help(uint32_t generation, Work work);

 private:
  bool wait(uint32_t generation, int units) const;

  alignas(64) std::atomic<uint64_t> taken_{0};
  std::atomic<int> units_{0}, share_{1};
  alignas(64) std::atomic<uint64_t> done_{0};
};

class Job {
 public:
  virtual void open(uint32_t generation) = 0;
  virtual void help(int rank, uint32_t generation) = 0;  // returns when the job is over

 protected:
  ~Job() = default;
};

class Pool {
 public:
  Pool(int num_threads, bool pin);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }
  // Runs a job to its end; the caller is rank 0. One at a time.
  void run(Job& job);
  // Calls work(unit) for each unit in [0, units).
  void for_each(int units, const std::function<void(int)>& work);
  // Waits until no member is inside a job any more: before one is destroyed.
  void settle();

 private:
  class Loop : public Job {
   public:
    void open(uint32_t generation) override { slot_.open(generation, units, 1); }
    void help(int rank, uint32_t generation) override;
    int units = 0;
    const std::function<void(int)>* work = nullptr;

   private:
    Slot slot_;
  };

  void member(int rank);
  bool is_next(uint32_t seen) const { return generation_.load() != seen || stopping_.load(); }

  const int size_;
  Loop loop_;
  std::atomic<Job*> job_{nullptr};
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<int> inside_{0};    // members that may be looking at a job
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

template <class Work>
bool Slot::help(uint32_t generation, Work work) {
  const int units = units_.load(std::memory_order_acquire), share = share_.load(std::memory_order_relaxed);
  uint64_t seen = taken_.load(std::memory_order_acquire);
  for (;;) {
    if ((uint32_t)(seen >> 32) != generation) return false;
    const int begin = (int)(uint32_t)seen;
    if (begin >= units) return wait(generation, units);
    const int count = units - begin < share ? units - begin : share;
    if (!taken_.compare_exchange_weak(seen, seen + (uint64_t)count, std::memory_order_acq_rel)) continue;
    work(begin, begin + count);
    done_.fetch_add((uint64_t)count, std::memory_order_acq_rel);
    seen = taken_.load(std::memory_order_acquire);
  }
}

}  // namespace hr
