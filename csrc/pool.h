// The thread pool of the compute path. The caller is worker 0; a step enters once and leaves once.
//
// Waiting is a bounded spin, then a futex: a pool that spins without limit is a hundred times slower when the machine is
// shared or under a CPU quota. A worker that the kernel takes away costs its current chunk, because work is handed out
// in chunks by atomic counters (the caller's), never by fixed shares.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace headrace {

class Pool {
 public:
  typedef void (*Job)(void* context, int worker);

  // `spin`: whether waiting may burn cycles at all; false where threads outnumber processors.
  Pool(int threads, bool spin);
  ~Pool();
  Pool(const Pool&) = delete;

  int threads() const { return threads_; }

  // Runs job(context, worker) on every worker and returns when all have. One caller at a time.
  void run(Job job, void* context);

  // Inside a job: waits until every worker is here. The last to arrive runs `completion` before it lets the others go.
  template <typename F>
  void barrier(F&& completion) {
    const uint32_t epoch = released_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      completion();
      wake(released_);
    } else {
      wait(released_, epoch);
    }
  }

 private:
  void work(int worker);
  void wait(std::atomic<uint32_t>& word, uint32_t old);  // until word != old
  void wake(std::atomic<uint32_t>& word);                // ++word, and whoever waits for it

  const int threads_;
  const int64_t spin_ns_;
  std::vector<std::thread> workers_;
  Job job_ = nullptr;
  void* context_ = nullptr;
  bool closing_ = false;
  alignas(64) std::atomic<uint32_t> started_{0};
  alignas(64) std::atomic<uint32_t> released_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> sleepers_{0};
};

int64_t now_ns();

}  // namespace headrace
