#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>

namespace headrace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kChunk = 32 << 20;    // of an arena: address space, memory only where it is written
constexpr size_t kPieceAlign = 4096;

Memory::Memory(size_t bytes) {
  if (bytes == 0) return;
  size_ = bytes >= kHugePage ? (bytes + kHugePage - 1) / kHugePage * kHugePage : bytes;
  // The kernel aligns mappings to pages only; a huge page needs its own alignment, so ask for more and give back.
  const size_t spare = bytes >= kHugePage ? kHugePage : 0;
  void* mapped =
      mmap(nullptr, size_ + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(mapped);
  if (spare == 0) return;
  const size_t lead = (kHugePage - reinterpret_cast<uintptr_t>(data_) % kHugePage) % kHugePage;
  if (lead > 0) munmap(data_, lead);
  if (spare > lead) munmap(data_ + lead + size_, spare - lead);
  data_ += lead;
  madvise(data_, size_, MADV_HUGEPAGE);
}

Memory::~Memory() {
  if (data_ != nullptr) munmap(data_, size_);
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Piece Arena::take(size_t bytes) {
  bytes = (bytes + kPieceAlign - 1) / kPieceAlign * kPieceAlign;
  if (chunk_ == nullptr || used_ + bytes > chunk_->size()) {
    chunk_ = std::make_shared<Memory>(std::max(bytes, kChunk));
    used_ = 0;
  }
  Piece piece = {chunk_, chunk_->data() + used_};
  used_ += bytes;
  return piece;
}

}  // namespace headrace
