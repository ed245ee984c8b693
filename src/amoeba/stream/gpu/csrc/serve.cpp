// Waits for a request of the GPU (kernels/expert_request.py) and calls the copies that answer it, within two microseconds.
// fast_path.py prepares what is read here and writes down afterwards what was done. CUDA's driver is called by pointers,
// so that compiling takes no toolkit.
//
// Where the CPU may compute experts too (host_compute.py), a request's misses are split: some are moved and the GPU waits
// for them, the CPU computes the others (compute.h), and while the link has little to do, some of these are promoted:
// moved too, for the next pass. What was just used is hotter than who leaves for it, whichever policy says so.
#include "compute.h"
#include "ranking.h"

using namespace amoeba;

namespace {

struct Layer {
  int64_t may_leave;        // experts that are there; 0: nothing is prepared
  const int32_t* slot_of;   // of each expert that is there
  const uint64_t* blob_of;  // of each expert: its address in host memory, 0: it is not there
  int64_t parts;            // of an expert; of each:
  const uint64_t* stack;    //   where those of all slots begin
  const uint64_t* size;     //   bytes
  const uint64_t* offset;   //   where it begins in a blob
  Order order;
  const int8_t* kept;  // of each expert: whether it leaves without a copy to host memory
  Blobs blobs;
};

enum Miss { ON_CPU = 1, AUTO = 2 };

struct Compute {
  Computer* computer;
  int64_t miss;
  double move_seconds;     // of one byte
  int64_t tokens, top_k;   // of this request
  const float* x;          // what the GPU has handed over (kernels/expert_request.py)
  const int64_t* expert;
  const float* weight;
  const int32_t* arrived;
  float* y;
  int32_t* word;
};

// Experts on their way up to which another is promoted: with 0 the link is idle at times. In replays of a synthetic trace
// (25 % of 128 experts, 0.2 ms to move one, 0.075 to compute it) a layer took 184 us with 1, 194 with 0, 181 where up to
// three may be on their way; 330 with all moved, 466 with all computed.
constexpr int64_t MOST_AHEAD = 1;
// what an answer says (kernels/expert_request.py)
constexpr int32_t MOVED = 1, PROMOTED = 2, COMPUTES = 4, LEFT = -1, COMPUTED = -2, LATER = 1 << 24;

struct Attributes {  // CUmemcpyAttributes
  int32_t source_order, source_place[2], target_place[2];
  uint32_t flags;
};

struct Calls {
  int (*to_device)(uint64_t target, uint64_t source, uint64_t size, uint64_t stream);
  int (*write_word)(uint64_t stream, uint64_t place, uint32_t value, unsigned flags);
  // all copies of a request in one call; null where the driver does not have it
  int (*to_device_at_once)(const uint64_t* targets, const uint64_t* sources, const uint64_t* sizes, uint64_t count,
                           const Attributes* attributes, const uint64_t* first, uint64_t attributes_count,
                           uint64_t stream);
  uint64_t stream, word;
  uint64_t least_at_once;  // bytes of each
};

constexpr int64_t MOST_COPIES = 64;                       // in one call
constexpr int INVALID_VALUE = 1, NOT_SUPPORTED = 801;  // errors of CUDA's driver

// Collects copies, and calls them one by one or at once.
class Copies {
 public:
  Copies(Calls* calls, const Layer* layer, int64_t experts) : calls_(calls) {
    at_once_ = calls->to_device_at_once != nullptr && experts * layer->parts <= MOST_COPIES;
    for (int64_t part = 0; part < layer->parts; ++part)
      at_once_ = at_once_ && layer->size[part] >= calls->least_at_once;
  }
  int add(uint64_t target, uint64_t source, uint64_t size) {
    if (!at_once_) return calls_->to_device(target, source, size, calls_->stream);
    targets_[count_] = target, sources_[count_] = source, sizes_[count_] = size;
    ++count_;
    return 0;
  }
  int call() {
    if (count_ == 0) return 0;
    const Attributes in_order{1, {0, 0}, {0, 0}, 0};  // sources are read when the stream comes to them
    const uint64_t first = 0;
    int code = calls_->to_device_at_once(targets_, sources_, sizes_, count_, &in_order, &first, 1, calls_->stream);
    if (code != INVALID_VALUE && code != NOT_SUPPORTED) return code;
    calls_->to_device_at_once = nullptr;  // this device does not do it: one by one, now and from now on
    code = 0;
    for (uint64_t n = 0; n < count_ && code == 0; ++n)
      code = calls_->to_device(targets_[n], sources_[n], sizes_[n], calls_->stream);
    return code;
  }

 private:
  Calls* calls_;
  bool at_once_;
  uint64_t count_ = 0, targets_[MOST_COPIES], sources_[MOST_COPIES], sizes_[MOST_COPIES];
};

enum { NOT_THERE = 0, NOT_SERVED = 1, SERVED = 2 };  // of fast_path.py; below 0: minus the error of a call

bool is_among(int32_t expert, const int32_t* experts, int64_t count) {
  for (int64_t n = 0; n < count; ++n)
    if (experts[n] == expert) return true;
  return false;
}

// So many experts that leave, none of which stays, and each of which has a copy in host memory or needs none; or fewer.
int64_t who_leaves(const Layer& layer, int64_t wanted, const int32_t* stays, int64_t there, int32_t* found) {
  const auto may = [&](int32_t expert) { return !is_among(expert, stays, there); };
  const int64_t first = first_to_leave(layer.order, wanted, may, found);
  int64_t count = 0;
  while (count < first && layer.kept[found[count]] != 0) ++count;
  return count;
}

// Weights pass by once for four rows.
int64_t passes_of(const Compute& compute, const int32_t* experts, int64_t count) {
  int64_t passes = 0;
  for (int64_t n = 0; n < count; ++n) {
    int64_t rows = 0;
    for (int64_t i = 0; i < compute.tokens * compute.top_k; ++i) rows += compute.expert[i] == experts[n];
    passes += (rows + 3) / 4;
  }
  return passes;
}

void begin_computing(const Compute& compute, const Layer& layer, const int32_t* experts, int64_t count,
                     int32_t serial) {
  static thread_local std::vector<int64_t> blob;
  blob.clear();
  for (int64_t i = 0; i < compute.tokens * compute.top_k; ++i) {
    const int64_t expert = compute.expert[i];
    const bool mine = expert >= 0 && expert <= INT32_MAX && is_among(int32_t(expert), experts, count);
    blob.push_back(mine ? int64_t((layer.blob_of[expert] - layer.blobs.first) / layer.blobs.bytes) : -1);
  }
  compute.computer->begin(layer.blobs, compute.tokens, compute.top_k, compute.x, blob.data(), compute.expert,
                          compute.weight, passes_of(compute, experts, count), compute.y, compute.word, serial);
}

}  // namespace

extern "C" {

// row: missing, asked, serial, then ids, the missing ones first. answer: serial, count, what it is about, `most` experts,
// their slots. compute: null where every miss is moved.
int amoeba_serve(const int32_t* row, int32_t* answer, int64_t most, int32_t serial, int64_t looks, const Layer* layer,
                 Calls* calls, Compute* compute) {
  const volatile int32_t* arrived = row + 2;
  for (; looks > 0 && *arrived != serial; --looks) relax();
  if (*arrived != serial) return NOT_THERE;
  std::atomic_thread_fence(std::memory_order_acquire);
  const int64_t missing = row[0], there = row[1] - missing;
  const int32_t* stays = row + 3 + missing;
  int32_t *experts = answer + 3, *slots = answer + 3 + most;
  if (missing == 0 || layer->may_leave < (compute ? 1 : missing)) return NOT_SERVED;
  static thread_local std::vector<int32_t> comes;
  comes.clear();
  const int64_t turn = compute ? uint32_t(serial) % missing : 0;  // so that each is the first at times
  for (int64_t n = 0; n < missing; ++n) comes.push_back(row[3 + (n + turn) % missing]);
  for (const int32_t expert : comes)
    if (layer->blob_of[expert] == 0) return NOT_SERVED;

  int64_t moved = missing, promoted = 0;
  if (compute) {
    const bool is_auto = compute->miss == AUTO;
    const double of_one = double(passes_of(*compute, comes.data(), missing)) / double(missing);
    const double computing = compute->computer->seconds() * of_one;
    const int64_t ahead = compute->computer->ahead(*compute->arrived);
    moved = is_auto ? moved_of(missing, ahead, compute->move_seconds * double(layer->blobs.bytes), computing) : 0;
    promoted = is_auto && moved == 0 && ahead <= MOST_AHEAD;
    if (moved == missing) compute->computer->not_asked();
  }
  const int64_t left = who_leaves(*layer, moved + promoted, stays, there, experts);
  if (left < moved) return NOT_SERVED;
  promoted = left - moved;
  const int64_t computed = missing - moved;
  if (computed) begin_computing(*compute, *layer, comes.data() + moved, computed, serial);

  Copies copies(calls, layer, left);
  for (int64_t n = 0; n < left; ++n) {  // the last that leaves makes room for the first that comes
    const int32_t slot = layer->slot_of[experts[left - 1 - n]];
    const uint64_t blob = layer->blob_of[comes[n]];
    for (int64_t part = 0; part < layer->parts; ++part) {
      const uint64_t size = layer->size[part];
      const uint64_t target = layer->stack[part] + slot * size;
      if (const int code = copies.add(target, blob + layer->offset[part], size)) return -code;
    }
    slots[n] = LEFT;
    experts[left + n] = comes[n];
    slots[left + n] = n < moved ? slot : LATER + slot;
  }
  if (const int code = copies.call()) return -code;
  for (int64_t n = left; n < missing; ++n) experts[left + n] = comes[n], slots[left + n] = COMPUTED;
  answer[1] = static_cast<int32_t>(left + missing);
  answer[2] = (moved ? MOVED : 0) | (promoted ? PROMOTED : 0) | (computed ? COMPUTES : 0);
  std::atomic_thread_fence(std::memory_order_release);
  *static_cast<volatile int32_t*>(answer) = serial;
  std::atomic_thread_fence(std::memory_order_release);
  if (left == 0) return SERVED;
  if (compute) compute->computer->called(serial, left);
  if (const int code = calls->write_word(calls->stream, calls->word, serial, 0)) return -code;
  return SERVED;
}

// As a request's answer has it; all may leave but those that stay.
int64_t amoeba_first_to_leave(const Order* order, int64_t wanted, const int32_t* stays, int64_t there, int32_t* found) {
  return first_to_leave(*order, wanted, [&](int32_t expert) { return !is_among(expert, stays, there); }, found);
}

void* amoeba_computer_new(int threads) { return new Computer(threads); }
void amoeba_computer_wait(const void* computer) { static_cast<const Computer*>(computer)->wait(); }
double amoeba_computer_seconds(const void* computer) { return static_cast<const Computer*>(computer)->seconds(); }
void amoeba_computer_delete(void* computer) { delete static_cast<Computer*>(computer); }

int64_t amoeba_moved_of(int64_t missing, int64_t ahead, double move_seconds, double compute_seconds) {
  return moved_of(missing, ahead, move_seconds, compute_seconds);
}
}
