// Runs random programs on a pool and checks that every chunk ran once, after all chunks of earlier phases. Built with
// the thread sanitizer by test_pool.py. Arguments: threads, runs, spin.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "pool.h"

using headrace::Pool;
using headrace::Program;

struct RandomProgram : Program {
  explicit RandomProgram(unsigned seed) {
    std::mt19937 random(seed);
    const int phases = random() % 40;
    for (int i = 0; i < phases; ++i) {
      counts.push_back(random() % 4 == 0 ? 0 : random() % 3 == 0 ? 1 : 2 + random() % 30);
      ran.emplace_back(counts.back());
    }
    plain.resize(phases + 1);
  }
  int32_t num_phases() const override { return static_cast<int32_t>(counts.size()); }
  int32_t num_chunks(int32_t phase) const override { return counts[phase]; }
  void run_chunk(int32_t phase, int32_t chunk, int worker) override {
    if (phase < current.load()) fail("a chunk of a phase that was over");
    current.store(phase);
    for (int32_t before = 0; before < phase; ++before) {
      for (const auto& count : ran[before]) {
        if (count.load() != 1) fail("a phase began before the one before it was done");
      }
      total += plain[before];  // written without synchronisation by an earlier phase: the sanitizer watches
    }
    if (chunk == 0) plain[phase] = phase + worker;
    if (chunk % 7 == 3) std::this_thread::yield();
    ++ran[phase][chunk];
  }
  static void fail(const char* what) {
    std::printf("%s\n", what);
    std::exit(1);
  }
  struct Counts : std::vector<std::atomic<int>> {
    explicit Counts(int n) : std::vector<std::atomic<int>>(n) {}
  };
  std::vector<int32_t> counts;
  std::vector<Counts> ran;
  std::vector<int> plain;
  std::atomic<int> current{0};
  std::atomic<int64_t> total{0};
};

int main(int, char** argv) {
  const int threads = std::atoi(argv[1]), runs = std::atoi(argv[2]);
  Pool pool(threads, std::atoi(argv[3]) != 0);
  for (int run = 0; run < runs; ++run) {
    const auto program = std::make_unique<RandomProgram>(run);  // freed at once: a late worker must not miss it
    pool.run(*program);
    for (size_t phase = 0; phase < program->counts.size(); ++phase) {
      for (const auto& count : program->ran[phase]) {
        if (count.load() != 1) RandomProgram::fail("a chunk did not run exactly once");
      }
    }
  }
  std::printf("ok\n");
}
