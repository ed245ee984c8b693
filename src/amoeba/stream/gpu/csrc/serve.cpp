// Waits for a question of the GPU (kernels/ask.py) and calls the copies that answer it, within two microseconds, where
// Python takes fifteen. fast_path.py prepares what is read here and writes down afterwards what was done. CUDA's driver is
// called by pointers, so that compiling takes no toolkit.
#include <atomic>
#include <cstdint>

namespace {

struct Layer {
  const int32_t* leave;     // experts, the first to leave comes first
  int64_t leave_count;      // 0: nothing is prepared
  const int32_t* slot_of;   // of each expert that is there
  const uint64_t* blob_of;  // of each expert: its address in host memory, 0: it is not there
  int64_t parts;            // of an expert; of each:
  const uint64_t* stack;    //   where those of all slots begin
  const uint64_t* size;     //   bytes
  const uint64_t* offset;   //   where it begins in a blob
};

struct Attributes {  // CUmemcpyAttributes
  int32_t source_order, source_place[2], target_place[2];
  uint32_t flags;
};

struct Calls {
  int (*to_device)(uint64_t target, uint64_t source, uint64_t size, uint64_t stream);
  int (*write_word)(uint64_t stream, uint64_t place, uint32_t value, unsigned flags);
  // all copies of a question in one call; null where the driver does not have it
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

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

extern "C" {

// row: missing, asked, serial, then ids, the missing ones first. answer: serial, count, `most` experts, their slots.
int amoeba_serve(const int32_t* row, int32_t* answer, int64_t most, int32_t serial, int64_t looks, const Layer* layer,
                 Calls* calls) {
  const volatile int32_t* arrived = row + 2;
  for (; looks > 0 && *arrived != serial; --looks) pause();
  if (*arrived != serial) return NOT_THERE;
  std::atomic_thread_fence(std::memory_order_acquire);
  const int64_t missing = row[0], there = row[1] - missing;
  const int32_t *comes = row + 3, *stays = row + 3 + missing;
  int32_t *experts = answer + 2, *slots = answer + 2 + most;
  if (missing == 0 || layer->leave_count < missing) return NOT_SERVED;
  for (int64_t n = 0; n < missing; ++n)
    if (layer->blob_of[comes[n]] == 0) return NOT_SERVED;
  int64_t left = 0;
  for (int64_t n = 0; n < layer->leave_count && left < missing; ++n)
    if (!is_among(layer->leave[n], stays, there)) experts[left++] = layer->leave[n];
  if (left < missing) return NOT_SERVED;
  Copies copies(calls, layer, missing);
  for (int64_t n = 0; n < missing; ++n) {  // the last that leaves makes room for the first that comes
    const int32_t slot = layer->slot_of[experts[missing - 1 - n]];
    const uint64_t blob = layer->blob_of[comes[n]];
    for (int64_t part = 0; part < layer->parts; ++part) {
      const uint64_t size = layer->size[part];
      const uint64_t target = layer->stack[part] + slot * size;
      if (const int code = copies.add(target, blob + layer->offset[part], size)) return -code;
    }
    slots[n] = -1;
    experts[missing + n] = comes[n];
    slots[missing + n] = slot;
  }
  if (const int code = copies.call()) return -code;
  answer[1] = static_cast<int32_t>(2 * missing);
  answer[0] = serial;
  std::atomic_thread_fence(std::memory_order_release);
  if (const int code = calls->write_word(calls->stream, calls->word, serial, 0)) return -code;
  return SERVED;
}
}
