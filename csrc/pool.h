// The thread pool of the compute path, and how it runs a program of phases.
//
// A phase is a number of chunks that need no order; the next phase begins when every chunk is done. Nobody waits for a
// thread, only for work: a worker that the kernel has taken away holds up the others by the one chunk it may hold, and
// when it comes back it goes on where the program now is. That matters where the pool shares its processors, with the
// HTTP server to begin with. Whoever finishes a phase runs the single-chunk phases that follow, then opens the next.
//
// Waiting is a bounded spin, then a futex: a pool that spins without limit is a hundred times slower on a shared
// machine or under a CPU quota. The caller is worker 0.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace headrace {

int64_t now_ns();  // monotonic

class Program {
 public:
  virtual ~Program() = default;
  virtual int32_t num_phases() const = 0;
  virtual int32_t num_chunks(int32_t phase) const = 0;  // constant during a run; 0: nothing to do
  virtual void run_chunk(int32_t phase, int32_t chunk, int worker) = 0;
};

class Pool {
 public:
  static constexpr int32_t kMaxPhases = 1 << 14;

  // `spin`: whether waiting may burn cycles at all; false where threads outnumber processors.
  Pool(int threads, bool spin);
  ~Pool();
  Pool(const Pool&) = delete;

  int threads() const { return threads_; }

  // Runs all phases and returns when the last is done. One caller at a time; at most kMaxPhases.
  void run(Program& program);

  // Nanoseconds of each phase of the last run.
  const std::vector<int64_t>& phase_ns() const { return phase_ns_; }

 private:
  // `claim` is (epoch << 32 | next chunk). A worker that slept through the end of a run still holds the old epoch, so
  // it can take nothing from a later one; that is why slots are never freed.
  struct alignas(64) Slot {
    std::atomic<uint64_t> claim{0};
    std::atomic<int32_t> count{0};
    std::atomic<int32_t> done{0};
  };

  void work(int worker);
  void take_part(int worker);
  bool help(uint64_t state, int worker);
  bool claim(Slot* slot, uint64_t epoch, int32_t* chunk);
  void advance(int32_t phase, int worker);
  void wait(uint32_t signal);
  void notify();

  const int threads_;
  const int64_t spin_ns_;
  std::vector<std::thread> workers_;
  std::unique_ptr<Slot[]> slots_;
  Program* program_ = nullptr;
  uint64_t epoch_ = 0;
  int64_t last_ns_ = 0;
  std::vector<int64_t> phase_ns_;
  std::atomic<bool> closing_{false};
  alignas(64) std::atomic<uint64_t> state_;      // epoch << 32 | phase that is open
  alignas(64) std::atomic<uint32_t> signal_{0};  // counts changes of state_: what waiters wait for
  alignas(64) std::atomic<int> sleepers_{0};
};

}  // namespace headrace
