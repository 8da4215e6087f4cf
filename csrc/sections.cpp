#include "sections.h"

#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace headrace {
namespace {

constexpr uint64_t kWord = 0x9e3779b97f4a7c15;  // odd, so that multiplying by them loses nothing
constexpr uint64_t kState = 0xd6e8feb86659fd93;
constexpr int kLanes = 8;  // chains side by side: one alone would wait for its multiplications

// Both are multiplied, so that no simple change of a later word makes up for one of an earlier word.
uint64_t mix(uint64_t state, uint64_t word) {
  const uint64_t x = state ^ word * kWord;
  return (x << 29 | x >> 35) * kState;
}

uint64_t load(const uint8_t* p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}

bool read_all(int fd, uint8_t* to, int64_t bytes, int64_t offset) {
  while (bytes > 0) {
    const ssize_t count = pread(fd, to, bytes, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    to += count;
    offset += count;
    bytes -= count;
  }
  return true;
}

}  // namespace

uint64_t checksum(const uint8_t* data, size_t bytes) {
  uint64_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = kState * (i + 1);
  size_t at = 0;
  for (; at + 8 * kLanes <= bytes; at += 8 * kLanes) {
    for (int i = 0; i < kLanes; ++i) lanes[i] = mix(lanes[i], load(data + at + 8 * i));
  }
  uint64_t all = mix(kWord, bytes);
  for (; at < bytes; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, data + at, std::min<size_t>(8, bytes - at));
    all = mix(all, word);
  }
  for (int i = 0; i < kLanes; ++i) all = mix(all, lanes[i] ^ lanes[i] >> 32);
  return all ^ all >> 32;
}

ReadProgram::ReadProgram(int fd, std::vector<Section> sections)
    : fd_(fd), sections_(std::move(sections)), broken_(new std::atomic<bool>[sections_.size()]) {
  for (size_t i = 0; i < sections_.size(); ++i) {
    const Section& section = sections_[i];
    const int64_t count = (section.bytes + kCheckedBytes - 1) / kCheckedBytes;
    broken_[i].store(static_cast<int64_t>(section.sums.size()) != count);
    if (broken_[i].load()) continue;
    for (int32_t k = 0; k < count; ++k) pieces_.push_back({static_cast<int32_t>(i), k});
  }
}

void ReadProgram::run_chunk(int32_t, int32_t chunk, int) {
  const Piece piece = pieces_[chunk];
  const Section& section = sections_[piece.section];
  const int64_t begin = piece.index * kCheckedBytes, bytes = std::min(kCheckedBytes, section.bytes - begin);
  if (!read_all(fd_, section.data + begin, bytes, section.offset + begin) ||
      checksum(section.data + begin, bytes) != section.sums[piece.index]) {
    broken_[piece.section].store(true);
  }
}

}  // namespace headrace
