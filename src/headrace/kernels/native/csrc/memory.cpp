#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <new>

namespace hr {

#if defined(__SANITIZE_ADDRESS__)
// From the heap and not a byte more, so that the sanitizer sees who reads past the end.
Memory::Memory(size_t bytes, bool) : bytes_(bytes) {
  void* data = nullptr;
  if (posix_memalign(&data, 64, bytes)) throw std::bad_alloc();
  data_ = (uint8_t*)std::memset(data, 0, bytes);
}

Memory::~Memory() { std::free(data_); }
#else
Memory::Memory(size_t bytes, bool wants_huge_pages) {
  constexpr size_t kHugePage = 2u << 20;
  bytes_ = bytes ? (bytes + kHugePage - 1) / kHugePage * kHugePage : kHugePage;
  void* data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    bytes_ = 0;
    throw std::bad_alloc();
  }
#if defined(MADV_HUGEPAGE)
  if (wants_huge_pages) madvise(data, bytes_, MADV_HUGEPAGE);
#else
  (void)wants_huge_pages;
#endif
  data_ = (uint8_t*)data;
}

Memory::~Memory() {
  if (data_) munmap(data_, bytes_);
}
#endif

void give_back(void* start, size_t bytes) {
#if !defined(__SANITIZE_ADDRESS__)
  static const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  const uintptr_t first = ((uintptr_t)start + page - 1) / page * page, last = ((uintptr_t)start + bytes) / page * page;
  if (first < last) madvise((void*)first, last - first, MADV_DONTNEED);
#else
  (void)start, (void)bytes;
#endif
}

std::shared_ptr<Memory> Arena::take(size_t bytes, uint8_t** data) {
#if defined(__SANITIZE_ADDRESS__)
  constexpr size_t kPiece = 0;  // each in a memory of its own, with guards around it
#else
  constexpr size_t kPiece = 16u << 20;
#endif
  bytes = (bytes + 63) / 64 * 64;
  if (!current_ || used_ + bytes > current_->bytes()) {
    current_ = std::make_shared<Memory>(bytes > kPiece ? bytes : kPiece, true);
    used_ = 0;
  }
  *data = current_->data() + used_;
  used_ += bytes;
  // Weights that leave before their neighbours (an expert that has moved) give their pages back at once.
  return {current_.get(), [piece = current_, start = *data, bytes](Memory*) { give_back(start, bytes); }};
}

}  // namespace hr
