// The Python face of profiling: what records are, and the yardsticks that they are held to.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "bindings.h"
#include "tape.h"

namespace headrace {
namespace {

constexpr int kChunksPerThread = 8;
constexpr int kRepeats = 20;
constexpr int64_t kReadBytes = 256 << 20;  // far more than a cache holds
constexpr int64_t kRounds = 100'000;       // of products in a chunk: about a millisecond

// Chunks of filling (kind -2), reading (kind -1) or products.
struct PeakProgram : Program {
  int32_t num_phases() const override { return 1; }
  int32_t num_chunks(int32_t) const override { return chunks; }
  void run_chunk(int32_t, int32_t chunk, int) override {
    uint8_t* const data = memory.data() + chunk * chunk_bytes;
    if (kind == -2) std::fill_n(data, chunk_bytes, uint8_t{1});
    else if (kind == -1) kernels->peak_read(data, chunk_bytes);
    else kernels->peak_products(kind, kRounds);
  }
  const KernelTable* kernels;
  int32_t kind, chunks;
  int64_t chunk_bytes;
  Memory memory;
};

// The best of some runs of all workers: operations (or bytes) a second; 0 where there is no such instruction.
double measure_peak(Pool& pool, const std::string& isa, const std::string& kind) {
  const char* const kinds[] = {"int8", "bf16", "fp32"};
  const auto found = std::find(std::begin(kinds), std::end(kinds), kind);
  require(found != std::end(kinds) || kind == "read", "kind: not read, int8, bf16 or fp32");
  PeakProgram program;
  program.kernels = find_kernels(isa);
  program.kind = kind == "read" ? -1 : static_cast<int32_t>(found - kinds);
  program.chunks = pool.threads() * kChunksPerThread;
  program.chunk_bytes = kReadBytes / program.chunks / 1024 * 1024;
  nb::gil_scoped_release released;
  int64_t work = program.chunk_bytes;
  if (program.kind < 0) {
    program.memory = Memory(kReadBytes);
    program.kind = -2;  // pages that exist, near the threads that fill them
    pool.run(program);
    program.kind = -1;
  } else {
    work = program.kernels->peak_products(program.kind, 1) * kRounds;
  }
  if (work == 0) return 0.0;
  int64_t best = INT64_MAX;
  for (int i = 0; i < kRepeats; ++i) {
    pool.run(program);
    best = std::min(best, pool.phase_ns()[0]);
  }
  return static_cast<double>(work) * program.chunks * 1e9 / static_cast<double>(std::max<int64_t>(best, 1));
}

// Two threads pass a cache line to and fro; each gives up at the deadline, since the other may not be running.
class LineExchange {
 public:
  // Nanoseconds of one way in the fastest of many rounds; 0 where the threads never ran at the same time.
  double measure() {
    deadline_ = now_ns() + kPatienceNs;
    int64_t best = INT64_MAX;
    std::thread other([this] { pass(1, nullptr); });
    pass(0, &best);
    other.join();
    return best == INT64_MAX ? 0.0 : static_cast<double>(best) / (2 * kRound);
  }

 private:
  static constexpr int kRounds = 200, kRound = 50;  // exchanges of a round: a few microseconds
  static constexpr int64_t kPatienceNs = 200'000'000;

  void pass(uint32_t side, int64_t* best) {
    for (uint32_t round = 0; round < kRounds; ++round) {
      const int64_t started = now_ns();
      for (uint32_t i = 0; i < kRound; ++i) {
        const uint32_t mine = 2 * (round * kRound + i) + side;
        for (int spins = 1; word_.load(std::memory_order_acquire) != mine; ++spins) {
          if (spins % 4096 == 0 && now_ns() > deadline_) return;
        }
        word_.store(mine + 1, std::memory_order_release);
      }
      if (best != nullptr && round > 0) *best = std::min(*best, now_ns() - started);
    }
  }

  int64_t deadline_ = 0;
  alignas(64) std::atomic<uint32_t> word_{0};
};

}  // namespace

void bind_profile(nb::module_& m) {
  m.def("measure_peak", &measure_peak, nb::arg("pool"), nb::arg("isa"), nb::arg("kind"),
        "What all workers reach at most: bytes a second read from memory (kind \"read\"), or operations a second\n"
        "(\"int8\", \"bf16\", \"fp32\"; 0.0 where the instruction set has no such product). Raises ValueError.");
  m.def("measure_line_ns", [] {
    nb::gil_scoped_release released;
    return LineExchange().measure();
  }, "Nanoseconds until a core sees what another one wrote; 0.0 where two threads never run at the same time. On virtual\n"
     "machines it changes whenever the host moves a processor.");
  nb::class_<RecordInfo>(m, "RecordInfo", "What a record of a tape is and does; counts are of one row.")
      .def_ro("kind", &RecordInfo::kind)
      .def_ro("label", &RecordInfo::label)
      .def_ro("phase", &RecordInfo::phase)
      .def_ro("output_rows", &RecordInfo::output_rows)
      .def_ro("group", &RecordInfo::group)
      .def_ro("n", &RecordInfo::n)
      .def_ro("k", &RecordInfo::k)
      .def_ro("weight_bytes", &RecordInfo::weight_bytes)
      .def_ro("row_bytes", &RecordInfo::row_bytes)
      .def_ro("row_ops", &RecordInfo::row_ops)
      .def_ro("weight", &RecordInfo::weight);
}

}  // namespace headrace
