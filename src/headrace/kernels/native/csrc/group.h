// The ranks of one model on one host: memory that all of them map, a barrier, and a mailbox from rank 0 to the others.
// What a rank computes for all, it writes where the others read it; so collectives are a barrier and no copy.
//
//   | control | mailbox 0 | mailbox 1 | logits | heap: buffers of the step, at the same places on every rank | moves |
//
// The file is sparse: memory is taken where it is touched. A rank that dies never reaches the barrier, so whoever notices
// calls fail(): every wait then ends at once, and what has been computed is worth nothing.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace hr {

class Group {
 public:
  static constexpr size_t kMailbox = size_t(1) << 30, kLogits = size_t(16) << 30, kHeap = size_t(256) << 30;
  static constexpr size_t kMoves = size_t(1) << 30;
  static constexpr size_t kControl = 4096;
  static constexpr size_t kBytes = kControl + 2 * kMailbox + kLogits + kHeap + kMoves;

  // Maps the file, which must have kBytes; the descriptor may be closed afterwards.
  Group(int descriptor, int rank, int size);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  uint8_t* mailbox(uint32_t number) const { return base_ + kControl + (number & 1) * kMailbox; }
  // Gives back what lies behind the first `bytes` of the logits, once they have needed more.
  void trim_logits(size_t bytes, size_t used);
  float* logits() const { return (float*)(base_ + kControl + 2 * kMailbox); }
  uint8_t* heap() const { return base_ + kControl + 2 * kMailbox + kLogits; }
  // For weights on their way from rank to rank, beside the steps.
  uint8_t* moves() const { return heap() + kHeap; }

  // Returns when all ranks have come; false when one has failed.
  bool barrier();
  // Rank 0: what it wrote into the next mailbox is there for the others. Every rank must be done with the one before.
  void post();
  // Waits for the mailbox after number `seen`; its number, or `seen` when the time is over or the group has failed.
  uint32_t wait(uint32_t seen, double most_s);
  uint32_t posted() const;
  void fail();
  bool has_failed() const;

 private:
  struct Control;
  template <class Ready>
  void sleep_until(std::atomic<uint32_t>& word, uint32_t old, double most_s, Ready ready);
  void wake(std::atomic<uint32_t>& word);

  uint8_t* base_;
  Control* control_;
  const int rank_, size_;
  bool has_own_core_;
};

}  // namespace hr
