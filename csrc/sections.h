// Reading packed weights from a file into memory, and the checksums that say whether they are what was written.
//
// A section of a file is checked in pieces of kCheckedBytes. Whichever worker takes a piece reads it and hashes it while
// it is in its cache, so checking costs next to nothing, and it is the first to touch those pages. Knows no file format.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "pool.h"

namespace headrace {

constexpr int64_t kCheckedBytes = 1 << 20;

// Of accidents, not of malice: any change inside one aligned 8-byte word is always seen, others but for one in 2^64.
uint64_t checksum(const uint8_t* data, size_t bytes);

// A range of an open file, where it goes, and the checksums of its pieces; only the last piece may be shorter.
struct Section {
  uint8_t* data;
  int64_t bytes;
  int64_t offset;
  std::vector<uint64_t> sums;
};

// Reads all sections over all workers of a pool.
class ReadProgram : public Program {
 public:
  ReadProgram(int fd, std::vector<Section> sections);
  int32_t num_phases() const override { return 1; }
  int32_t num_chunks(int32_t) const override { return static_cast<int32_t>(pieces_.size()); }
  void run_chunk(int32_t, int32_t chunk, int) override;
  // After the run: whether every piece of that section was read and had its checksum.
  bool is_sound(size_t section) const { return !broken_[section].load(); }

 private:
  struct Piece {
    int32_t section;
    int32_t index;
  };
  const int fd_;
  const std::vector<Section> sections_;
  std::vector<Piece> pieces_;
  std::unique_ptr<std::atomic<bool>[]> broken_;
};

}  // namespace headrace
