#include "memory.h"

#include <sys/mman.h>

#include <new>

namespace hr {

Memory::Memory(size_t bytes) {
  constexpr size_t kHugePage = 2u << 20;
  bytes_ = bytes ? (bytes + kHugePage - 1) / kHugePage * kHugePage : kHugePage;
  void* data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    bytes_ = 0;
    throw std::bad_alloc();
  }
#if defined(MADV_HUGEPAGE)
  madvise(data, bytes_, MADV_HUGEPAGE);
#endif
  data_ = (uint8_t*)data;
}

Memory::~Memory() {
  if (data_) munmap(data_, bytes_);
}

}  // namespace hr
