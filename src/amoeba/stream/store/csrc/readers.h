// Threads that read ranges of files in pieces.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace amoeba {

// Of each part once, by the thread that ended it; is_there: false where something of the range could not be read.
using Told = std::function<void(int64_t begin, int64_t bytes, bool is_there)>;

struct Request {
  int file;
  int64_t offset, bytes;  // of the file
  char* target;
  int64_t piece, part;  // bytes of a read, and of what is told; a part is whole pieces
  Told told;            // may be empty
  std::unique_ptr<std::atomic<int64_t>[]> of_part;  // bytes of each part that are still to come
  std::atomic<int64_t> next{0};                     // nobody has begun with the bytes from here on
  std::atomic<int> error{0};
  int64_t left;  // pieces that have not ended, and threads that look for one
  bool is_queued = true;

  Request(int file, int64_t offset, int64_t bytes, char* target, int64_t piece, int64_t part, Told told)
      : file(file), offset(offset), bytes(bytes), target(target), piece(piece), part(part), told(std::move(told)) {
    const int64_t parts = (bytes + part - 1) / part;
    of_part = std::make_unique<std::atomic<int64_t>[]>(parts);
    for (int64_t n = 0; n < parts; ++n) of_part[n] = std::min(part, bytes - n * part);
    left = pieces();
  }

  int64_t pieces() const { return (bytes + piece - 1) / piece; }

  // Reads a piece that nobody has begun with; false where there is none left.
  bool read_one() {
    const int64_t begin = next.fetch_add(piece);
    if (begin >= bytes) return false;
    const int64_t end = std::min(begin + piece, bytes);
    for (int64_t at = begin; at < end && error.load() == 0;) {
      const ssize_t got = pread(file, target + at, end - at, offset + at);
      if (got > 0) at += got;
      else if (got == 0) error = ENODATA;
      else if (errno != EINTR) error = errno;
    }
    const int64_t number = begin / part, whole = std::min(part, bytes - number * part);
    const bool is_whole = of_part[number].fetch_sub(end - begin) == end - begin;
    if (is_whole && told) told(number * part, whole, error.load() == 0);
    return true;
  }
};

class Readers {
 public:
  explicit Readers(int threads) {
    for (int n = 0; n < threads; ++n) threads_.emplace_back([this] { work(); });
  }
  ~Readers() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    there_is_work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Reads begin; the request has to live until `wait` returns.
  void begin(Request& request) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(&request);
    }
    // as many as have something to do: to wake all of them takes longer than the first read
    for (int64_t n = std::min<int64_t>(request.pieces(), threads_.size()); n > 0; --n) there_is_work_.notify_one();
  }

  // Its error, or 0; nobody writes to its memory any more.
  int wait(Request& request) {
    std::unique_lock<std::mutex> lock(mutex_);
    ended_.wait(lock, [&] { return request.left == 0; });
    drop(request);
    return request.error;
  }

  // The calling thread reads too.
  int read(Request& request) {
    begin(request);
    while (request.read_one()) end_piece(request);
    return wait(request);
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      there_is_work_.wait(lock, [this] { return ends_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Request& request = *queue_.front();
      if (request.next.load() >= request.bytes) {
        drop(request);
        continue;
      }
      ++request.left;  // it lives for as long as somebody is left
      lock.unlock();
      const bool has_read = request.read_one();
      lock.lock();
      if ((request.left -= has_read ? 2 : 1) == 0) ended_.notify_all();
    }
  }
  void end_piece(Request& request) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--request.left == 0) ended_.notify_all();
  }
  void drop(Request& request) {
    if (!request.is_queued) return;
    request.is_queued = false;
    queue_.erase(std::find(queue_.begin(), queue_.end(), &request));
  }

  std::mutex mutex_;
  std::condition_variable there_is_work_, ended_;
  std::deque<Request*> queue_;
  bool ends_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace amoeba
