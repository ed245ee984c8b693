// A list of jobs over OpenMP's threads, each of which takes the next when it is free; without OpenMP one after another.
#pragma once
#include <atomic>
#include <cstdint>

namespace [[gnu::visibility("hidden")]] amoeba {

template <class Job>
void run_jobs(int64_t count, [[maybe_unused]] int threads, const Job& job) {
  std::atomic<int64_t> next{0};
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1 && count > 1)
#endif
  for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) job(i);
}

}  // namespace amoeba
