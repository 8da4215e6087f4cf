// Large anonymous memory: page-aligned, zero, in huge pages where the kernel grants them (4 KiB pages cost a third of
// the bandwidth of a weight stream).
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace headrace {

class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes);  // throws std::bad_alloc
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  template <typename T>
  T* as() const { return reinterpret_cast<T*>(data_); }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// A piece of shared memory.
struct Piece {
  std::shared_ptr<Memory> owner;
  uint8_t* data = nullptr;
};

// Hands out pieces of large Memory, aligned to pages. Most weights of a small model are smaller than a huge page: each in
// a mapping of its own they would all live in 4 KiB pages. Nothing is taken back before the last piece of a chunk goes.
class Arena {
 public:
  Piece take(size_t bytes);  // throws std::bad_alloc

 private:
  std::shared_ptr<Memory> chunk_;
  size_t used_ = 0;
};

}  // namespace headrace
