// Ranges of files that go on to a device, piece by piece as they are read, by the threads that read: none of them needs
// Python's lock, and who waits on the device is told by the last of them.
//
//   begin   reads begin; where the bytes will go need not be known yet
//   open    where they go, and the word to be written behind all copies: what was read until now is copied by the caller
//   wait    for the reads; a word is written if all of them succeeded and every call did
#pragma once
#include <chrono>

#include "readers.h"

namespace amoeba {

// As CUDA's driver has them.
struct Onward {
  int (*enter)(uint64_t context);  // for threads that have not called it yet; may be null
  int (*copy)(uint64_t target, uint64_t source, uint64_t bytes, uint64_t stream);
  int (*write)(uint64_t stream, uint64_t place, uint32_t value, unsigned flags);
  uint64_t context, stream;
};

struct Target {  // of some bytes of a load
  int64_t load, begin, bytes;
  uint64_t address;
};

// Nanoseconds of the clock that Python's perf_counter_ns is.
struct Times {
  std::atomic<int64_t> begun{0}, first{0}, last{0}, called{0};  // the last piece was there; the word was called for
};

class Loads {
 public:
  Loads(Readers& readers, const Onward& onward) : readers_(readers), onward_(onward) {}

  void begin(int file, int64_t offset, int64_t bytes, char* memory, int64_t piece) {
    if (requests_.empty()) times.begun = now();
    const int64_t number = requests_.size();
    requests_.push_back(std::make_unique<Request>(
        file, offset, bytes, memory, piece, piece,
        [this, number](int64_t at, int64_t size, bool is_there) { landed({number, at, size}, is_there); }));
    left_ += requests_.back()->pieces();
    readers_.begin(*requests_.back());
  }

  // place: of the word; 0: none is written.
  void open(const Target* targets, int64_t count, uint64_t place, uint32_t value) {
    targets_.assign(targets, targets + count);
    place_ = place, value_ = value;
    std::vector<Piece> here;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      here.swap(waiting_);
      is_open_ = true;
    }
    for (const Piece& piece : here) go_on(piece);
    end_one();
  }

  void cancel() {
    for (auto& request : requests_) request->error = ECANCELED;
  }

  // errors: of each read. The error of a copy or of the word, or 0.
  int wait(int* errors) {
    for (auto& request : requests_) *errors++ = readers_.wait(*request);
    return code_;
  }

  Times times;

 private:
  struct Piece {
    int64_t load, begin, bytes;
  };

  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  void landed(const Piece& piece, bool is_there) {
    const int64_t at = now();
    int64_t none = 0;
    times.first.compare_exchange_strong(none, at);
    for (int64_t last = times.last; last < at && !times.last.compare_exchange_weak(last, at);) {
    }
    if (!is_there) {
      has_failed_ = true;
      end_one();
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!is_open_) {
        waiting_.push_back(piece);
        return;
      }
    }
    go_on(piece);
  }

  void go_on(const Piece& piece) {
    if (enter()) {
      const Request& request = *requests_[piece.load];
      const int64_t end = piece.begin + piece.bytes;
      for (const Target& target : targets_) {
        const int64_t first = std::max(piece.begin, target.begin), last = std::min(end, target.begin + target.bytes);
        if (target.load != piece.load || first >= last) continue;
        const auto source = reinterpret_cast<uint64_t>(request.target + first);
        note(onward_.copy(target.address + (first - target.begin), source, last - first, onward_.stream));
      }
    }
    end_one();
  }

  // Of the pieces, and of the caller who opens: the last calls for the word, behind everybody's copies.
  void end_one() {
    if (left_.fetch_sub(1) != 1) return;
    if (place_ != 0 && !has_failed_ && enter()) note(onward_.write(onward_.stream, place_, value_, 0));
    times.called = now();
  }

  bool enter() {
    static thread_local uint64_t entered = 0;
    if (onward_.enter == nullptr || entered == onward_.context) return !has_failed_;
    note(onward_.enter(onward_.context));
    if (!has_failed_) entered = onward_.context;
    return !has_failed_;
  }

  void note(int code) {
    if (code == 0) return;
    int none = 0;
    code_.compare_exchange_strong(none, code);
    has_failed_ = true;
  }

  Readers& readers_;
  const Onward onward_;
  std::vector<std::unique_ptr<Request>> requests_;
  std::vector<Target> targets_;
  std::vector<Piece> waiting_;  // read before it was known where they go
  std::mutex mutex_;
  bool is_open_ = false;
  uint64_t place_ = 0;
  uint32_t value_ = 0;
  std::atomic<int64_t> left_{1};
  std::atomic<bool> has_failed_{false};
  std::atomic<int> code_{0};
};

}  // namespace amoeba
