// Large memory for weights and KV: mapped, zero, and backed only where it is touched.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace hr {

class Memory {
 public:
  Memory() = default;
  // Huge pages save address translation where all of it is read in every step, and waste memory where little is used.
  Memory(size_t bytes, bool wants_huge_pages);
  Memory(Memory&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Memory();
  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

// Gives the whole pages inside a range of private memory back; they are zero when they are touched again.
void give_back(void* start, size_t bytes);

// Hands out pieces of large memory, so that many small weights share huge pages. A piece lives as long as somebody holds it.
class Arena {
 public:
  std::shared_ptr<Memory> take(size_t bytes, uint8_t** data);

 private:
  std::shared_ptr<Memory> current_;
  size_t used_ = 0;
};

}  // namespace hr
