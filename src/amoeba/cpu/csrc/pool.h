// Worker threads that wait for the next list of jobs: a while spinning, then asleep. Or no threads of its own: those of
// an OpenMP runtime that is loaded already, which would else spin on the same cores after their last work.
//
//   pool.run(count, [&](int64_t i) { ... });    // the caller works too; returns when all jobs are done
//
// A list is open as soon as its ticket is stored and done when its last job is: no thread has to have come by, so a
// thread that the system holds back delays only its own job. One list at a time; `busy` is held over a call.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "packed_layout.h"
#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

namespace [[gnu::visibility("hidden")]] amoeba {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// GOMP_parallel: calls the function in so many threads, one of them the caller's, and returns when all have returned.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

class Pool {
 public:
  std::mutex busy;
  Buffer<char> scratch;  // of the call that holds `busy`

  // cores[0] is the caller's, who is not pinned; the others each get a thread. Null: none is pinned.
  // memory_node: the NUMA node of the workers' memory; negative: wherever the system puts it.
  // awake: how long a worker spins after its last job.
  Pool(int threads, const int32_t* cores, int memory_node = -1,
       std::chrono::microseconds awake = std::chrono::microseconds(200))
      : awake_(awake) {
    for (int i = 1; i < threads; ++i) {
      workers_.emplace_back([this, memory_node] {
        prefer_memory_of(memory_node);
        work();
      });
      if (cores) pin(workers_.back(), cores[i]);
    }
  }

  Pool(Parallel parallel, int threads) : parallel_(parallel), borrowed_(threads) {}

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int threads() const { return parallel_ ? borrowed_ : int(workers_.size()) + 1; }
  void borrow(int threads) { borrowed_ = threads; }

  template <class Job>
  void run(int64_t count, const Job& job) {
    if (count <= 0) return;
    if (threads() == 1 || count == 1) {
      for (int64_t i = 0; i < count; ++i) job(i);
      return;
    }
    call_ = [](const void* context, int64_t i) { (*static_cast<const Job*>(context))(i); };
    context_ = &job;
    count_ = count;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(epoch << 32 | uint64_t(NONE_LEFT + count), std::memory_order_seq_cst);
    if (parallel_) {
      parallel_([](void* pool) { static_cast<Pool*>(pool)->take_jobs(); }, this, unsigned(borrowed_), 0);
      return;
    }
    if (asleep_.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    take_jobs();
    for (int64_t spins = 0; done_.load(std::memory_order_acquire) < count; ++spins)
      spins < PATIENT_SPINS ? relax() : std::this_thread::yield();
  }

 private:
  static constexpr int64_t NONE_LEFT = 1 << 30;   // the low half of a ticket counts down to this, and may pass it
  static constexpr int64_t PATIENT_SPINS = 20000;

  void take_jobs() {
    for (;;) {
      const uint64_t ticket = ticket_.fetch_sub(1, std::memory_order_acq_rel);
      const int64_t left = int64_t(ticket & 0xffffffffu) - NONE_LEFT;
      if (left <= 0) return;
      // A job that was taken keeps its list open, so what follows belongs to it.
      call_(context_, count_ - left);
      done_.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  void work() {
    uint64_t seen = 0;
    while (wait_for_another(seen)) take_jobs();
  }

  bool wait_for_another(uint64_t& seen) {
    const auto fresh = [&] { return ticket_.load(std::memory_order_seq_cst) >> 32 != seen; };
    const auto began = std::chrono::steady_clock::now();
    for (int spins = 1; !fresh(); ++spins) {
      relax();
      if (spins % 256 == 0 && std::chrono::steady_clock::now() - began > awake_) {
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return stop_ || fresh(); });
        asleep_.fetch_sub(1, std::memory_order_seq_cst);
        if (stop_) return false;
      }
    }
    seen = ticket_.load(std::memory_order_relaxed) >> 32;
    return true;
  }

  static void pin(std::thread& worker, int core) {
#ifdef __linux__
    if (core < 0 || core >= CPU_SETSIZE) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    // where it is refused, the thread goes where the system puts it
    pthread_setaffinity_np(worker.native_handle(), sizeof(set), &set);
#else
    (void)worker, (void)core;
#endif
  }

  const Parallel parallel_ = nullptr;
  const std::chrono::microseconds awake_{0};
  int borrowed_ = 0;
  alignas(64) std::atomic<uint64_t> ticket_{NONE_LEFT};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int> asleep_{0};
  void (*call_)(const void*, int64_t) = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0;
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace amoeba
