#include "pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <stdexcept>

namespace headrace {
namespace {

constexpr uint32_t kIdle = UINT32_MAX;  // no phase is open
constexpr int64_t kSpinNs = 50'000;     // longer than any wait of a step whose workers all run
constexpr int kSpinsPerLook = 32;       // pauses between looks at the clock

void pause() {
#if defined(__x86_64__)
  asm volatile("pause" ::: "memory");
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  static_assert(sizeof(word) == 4, "a futex is 32 bits");
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

}  // namespace

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

Pool::Pool(int threads, bool spin)
    : threads_(threads), spin_ns_(spin ? kSpinNs : 0), slots_(new Slot[kMaxPhases]), state_(kIdle) {
  for (int worker = 1; worker < threads; ++worker) workers_.emplace_back(&Pool::work, this, worker);
}

Pool::~Pool() {
  closing_.store(true);
  notify();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(Program& program) {
  const int32_t phases = program.num_phases();
  if (phases > kMaxPhases) throw std::length_error("a program of more phases than the pool has slots");
  ++epoch_;
  program_ = &program;
  phase_ns_.assign(phases, 0);
  for (int32_t phase = 0; phase < phases; ++phase) {
    // The epoch first: who reads the new count finds that its claim is of another epoch.
    slots_[phase].claim.store(epoch_ << 32);
    slots_[phase].done.store(0, std::memory_order_relaxed);
    slots_[phase].count.store(program.num_chunks(phase));
  }
  last_ns_ = now_ns();
  advance(-1, 0);
  take_part(0);
}

void Pool::work(int worker) {
  while (!closing_.load()) take_part(worker);
}

// Worker 0 stays until its run is over, the others until the pool closes.
void Pool::take_part(int worker) {
  for (;;) {
    const uint32_t signal = signal_.load(std::memory_order_acquire);
    const uint64_t state = state_.load(std::memory_order_acquire);
    const bool idle = static_cast<uint32_t>(state) == kIdle;
    if ((idle && worker == 0) || closing_.load(std::memory_order_relaxed)) return;
    if (idle || !help(state, worker)) wait(signal);
  }
}

// Runs chunks of the open phase while there are any. True where it was the last to finish: then it opened the next.
bool Pool::help(uint64_t state, int worker) {
  const int32_t phase = static_cast<int32_t>(state);
  Slot* slot = &slots_[phase];
  int32_t finished = 0;
  for (int32_t chunk; claim(slot, state >> 32, &chunk); ++finished) program_->run_chunk(phase, chunk, worker);
  if (finished == 0) return false;
  if (slot->done.fetch_add(finished, std::memory_order_acq_rel) + finished < slot->count.load()) return false;
  advance(phase, worker);
  return true;
}

bool Pool::claim(Slot* slot, uint64_t epoch, int32_t* chunk) {
  uint64_t word = slot->claim.load();
  while (word >> 32 == epoch) {
    *chunk = static_cast<int32_t>(word);
    if (*chunk >= slot->count.load()) return false;
    if (slot->claim.compare_exchange_weak(word, word + 1)) return true;
  }
  return false;
}

// `phase` is done: runs what follows in single chunks, then opens the next that is worth sharing.
void Pool::advance(int32_t phase, int worker) {
  const int32_t phases = program_->num_phases();
  for (;;) {
    if (phase >= 0) {
      const int64_t ns = now_ns();
      phase_ns_[phase] = ns - last_ns_;
      last_ns_ = ns;
    }
    do ++phase;
    while (phase < phases && slots_[phase].count.load(std::memory_order_relaxed) == 0);
    if (phase >= phases || slots_[phase].count.load(std::memory_order_relaxed) > 1) break;
    program_->run_chunk(phase, 0, worker);
  }
  state_.store(epoch_ << 32 | (phase < phases ? static_cast<uint32_t>(phase) : kIdle), std::memory_order_release);
  notify();
}

// A sleeper announces itself before it asks the kernel to compare the word; a waker changes the word before it looks
// for sleepers. Both in sequentially consistent order, so at least one of them sees the other.
void Pool::wait(uint32_t signal) {
  const int64_t until = spin_ns_ > 0 ? now_ns() + spin_ns_ : 0;
  while (spin_ns_ > 0) {
    for (int i = 0; i < kSpinsPerLook; ++i) {
      if (signal_.load(std::memory_order_acquire) != signal) return;
      pause();
    }
    if (now_ns() > until) break;
  }
  sleepers_.fetch_add(1);
  while (signal_.load() == signal) futex(signal_, FUTEX_WAIT, signal);
  sleepers_.fetch_sub(1);
}

void Pool::notify() {
  signal_.fetch_add(1);
  if (sleepers_.load() > 0) futex(signal_, FUTEX_WAKE, INT32_MAX);
}

}  // namespace headrace
