// Experts that a request misses, computed by the CPU where they lie in host memory, while the thread that serves goes
// on: by threads of its own that spin between requests, since those of OpenMP fall asleep, and wake too late.
#pragma once
#include "../../../cpu/csrc/core_decode.h"
#include "../../../cpu/csrc/pool.h"

namespace amoeba {
namespace {

// Of a layer: blobs of experts in host memory, one after another.
struct Blobs {
  uint64_t first, bytes, number_bytes, count;  // number_bytes: 2 for bf16, 4 for fp32
  uint64_t gate_up_offset, down_offset;
  int64_t hidden, intermediate, width, kind;
  float alpha, limit, up_shift;
};

class Computer {
 public:
  explicit Computer(int threads) : pool_(threads, nullptr, -1, AWAKE), worker_([this] { work(); }) {}
  ~Computer() {
    wait();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    worker_.join();
  }

  // Of one expert, up to four rows; 0: not known yet.
  double seconds() const { return seconds_.load(std::memory_order_relaxed); }
  // What is never measured again is believed less and less.
  void not_asked() { seconds_.store(seconds() * 0.99, std::memory_order_relaxed); }

  // Copies that a request called, and how many of all are still on their way when those of another have arrived.
  void called(int32_t serial, int64_t experts) { calls_.push_back({serial, experts}); }
  int64_t ahead(int32_t arrived) {
    const auto has_arrived = [&](const Call& call) { return int32_t(uint32_t(arrived) - uint32_t(call.serial)) >= 0; };
    calls_.erase(std::remove_if(calls_.begin(), calls_.end(), has_arrived), calls_.end());
    int64_t experts = 0;
    for (const Call& call : calls_) experts += call.experts;
    return experts;
  }

  void wait() const {
    while (busy_.load(std::memory_order_acquire)) relax();
  }

  // blob: of each of tokens * top_k ids, the number of its blob, or -1 where it is not to be computed.
  void begin(const Blobs& blobs, int64_t tokens, int64_t top_k, const float* x, const int64_t* blob,
             const int64_t* key, const float* scale, int64_t passes, float* y, int32_t* word, int32_t serial) {
    wait();
    const int64_t slots = tokens * top_k;
    blobs_ = blobs, tokens_ = tokens, top_k_ = top_k, x_ = x, y_ = y, word_ = word, serial_ = serial, passes_ = passes;
    blob_.assign(blob, blob + slots), key_.assign(key, key + slots), scale_.assign(scale, scale + slots);
    order_.resize(slots), h_.resize(slots * blobs.width), a_.resize(slots * blobs.intermediate);
    busy_.store(true, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst)) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
  }

 private:
  static constexpr auto AWAKE = std::chrono::milliseconds(2);
  static constexpr int64_t SHARES = 2;  // for each thread: where one is held back, others take over

  void work() {
    while (wait_for_job()) {
      const auto began = std::chrono::steady_clock::now();
      blobs_.number_bytes == 2 ? compute<uint16_t>() : compute<float>();
      std::atomic_thread_fence(std::memory_order_release);
      *static_cast<volatile int32_t*>(word_) = serial_;
      note(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() / double(passes_));
      busy_.store(false, std::memory_order_release);
    }
  }

  template <class Weight>
  void compute() {
    const Blobs& b = blobs_;
    const int64_t stride = int64_t(b.bytes / sizeof(Weight));
    const auto* gate_up = reinterpret_cast<const Weight*>(b.first + b.gate_up_offset);
    const auto* down = reinterpret_cast<const Weight*>(b.first + b.down_offset);
    Decoding<PlainMatrix<Weight>> decoding{
        tokens_, top_k_, int64_t(b.count), b.hidden, b.intermediate, b.width, x_, b.hidden, blob_.data(), key_.data(),
        scale_.data(), {gate_up, stride, b.hidden}, nullptr, nullptr, {down, stride, b.intermediate}, nullptr,
        int(b.kind), 0, b.alpha, b.limit, b.up_shift, h_.data(), a_.data(), order_.data(), y_};
    decoding.sort();
    const int64_t shares = SHARES * pool_.threads();
    pool_.run(shares, [&](int64_t share) { decoding.up_share(share, shares); });
    pool_.run(shares, [&](int64_t share) { decoding.down_share(share, shares); });
  }

  void note(double seconds) {
    if (jobs_++ == 0) return;  // threads began
    const double before = this->seconds();
    seconds_.store(before == 0 ? seconds : before + (seconds - before) / 8, std::memory_order_relaxed);
  }

  bool wait_for_job() {
    const auto began = std::chrono::steady_clock::now();
    for (int spins = 1; !busy_.load(std::memory_order_acquire); ++spins) {
      relax();
      if (spins % 256 == 0 && std::chrono::steady_clock::now() - began > AWAKE) {
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_.store(true, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return stop_ || busy_.load(std::memory_order_seq_cst); });
        asleep_.store(false, std::memory_order_seq_cst);
        if (stop_) return false;
      }
    }
    return true;
  }

  struct Call {
    int32_t serial;
    int64_t experts;
  };

  Pool pool_;
  std::vector<Call> calls_;  // that have not arrived; of the thread that serves
  Blobs blobs_{};
  int64_t tokens_ = 0, top_k_ = 0, passes_ = 1, jobs_ = 0;
  const float* x_ = nullptr;
  float* y_ = nullptr;
  int32_t* word_ = nullptr;
  int32_t serial_ = 0;
  std::vector<int64_t> blob_, key_, order_;
  std::vector<float> scale_, h_, a_;
  std::atomic<bool> busy_{false}, asleep_{false};
  std::atomic<double> seconds_{0};
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread worker_;
};

// How many of `missing` experts to move, so that link and CPU are done as early as can be: the link moves one after
// another, behind `ahead` others.
inline int64_t moved_of(int64_t missing, int64_t ahead, double move_seconds, double compute_seconds) {
  int64_t best = 0;
  double least = double(missing) * compute_seconds;
  for (int64_t moved = 1; moved <= missing; ++moved) {
    const double moving = double(ahead + moved) * move_seconds, computing = double(missing - moved) * compute_seconds;
    const double taken = moving > computing ? moving : computing;
    if (taken < least) least = taken, best = moved;
  }
  return best;
}

}  // namespace
}  // namespace amoeba
