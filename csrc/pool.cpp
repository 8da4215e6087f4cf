#include "pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace headrace {
namespace {

constexpr int64_t kSpinNs = 50'000;  // longer than any wait of a step whose workers all run
constexpr int kSpinsPerLook = 32;    // pauses between looks at the clock

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

Pool::Pool(int threads, bool spin) : threads_(threads), spin_ns_(spin ? kSpinNs : 0) {
  for (int worker = 1; worker < threads; ++worker) workers_.emplace_back(&Pool::work, this, worker);
}

Pool::~Pool() {
  closing_ = true;
  wake(started_);
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(Job job, void* context) {
  job_ = job;
  context_ = context;
  if (threads_ > 1) wake(started_);
  job(context, 0);
  barrier([] {});
}

void Pool::work(int worker) {
  for (uint32_t epoch = 0;; ++epoch) {
    wait(started_, epoch);
    if (closing_) return;
    job_(context_, worker);
    barrier([] {});
  }
}

// A sleeper announces itself before it asks the kernel to compare the word; a waker changes the word before it looks for
// sleepers. Both in sequentially consistent order, so at least one of them sees the other.
void Pool::wait(std::atomic<uint32_t>& word, uint32_t old) {
  const int64_t until = spin_ns_ > 0 ? now_ns() + spin_ns_ : 0;
  while (spin_ns_ > 0) {
    for (int i = 0; i < kSpinsPerLook; ++i) {
      if (word.load(std::memory_order_acquire) != old) return;
      pause();
    }
    if (now_ns() > until) break;
  }
  sleepers_.fetch_add(1);
  while (word.load() == old) futex(word, FUTEX_WAIT, old);
  sleepers_.fetch_sub(1);
}

void Pool::wake(std::atomic<uint32_t>& word) {
  word.fetch_add(1);
  if (sleepers_.load() > 0) futex(word, FUTEX_WAKE, INT32_MAX);
}

}  // namespace headrace
