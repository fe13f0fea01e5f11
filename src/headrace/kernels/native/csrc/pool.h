// A fixed team of threads that runs one function at a time, each member with its own rank, and meets at cheap barriers.
// The caller is rank 0. Between runs the others spin for a moment, then sleep.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace hr {

class Pool {
 public:
  explicit Pool(int num_threads, bool pin);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }
  // Runs work(rank) on every member and returns when all have ended. Not re-entrant.
  void run(const std::function<void(int)>& work);
  // Waits until every member has come here. To be called by all members from inside run().
  void barrier();

 private:
  void member(int rank);

  const int size_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  alignas(64) std::atomic<uint64_t> run_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<int> sleeping_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace hr
