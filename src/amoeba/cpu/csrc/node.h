// The experts of one NUMA node and one pass over them, as the ctypes structures of node_library.py: fields in the same
// order.
#pragma once
#include "activation.h"
#include "product.h"
#include "row_map.h"

namespace [[gnu::visibility("hidden")]] amoeba {

struct PackedMatrix {  // data is null where there is none
  const void* data;
  const float* column_scale;
  const int32_t* sum;
  const float* depth_scale;
  int64_t columns, depth;
  int32_t stored;  // data is the weight itself, at these strides
  int64_t stride_e, stride_column, stride_k;
  int32_t turned;  // of codes: see Stored
  Coding coding;

  Weights weights(bool int8) const {
    if (stored)
      return {nullptr, nullptr, nullptr, nullptr, depth, columns, tiles_of(depth, Bf16::PER_WORD),
              {data, stride_e, stride_column, stride_k, turned != 0, coding}};
    const int64_t per_word = int8 ? Int8::PER_WORD : Bf16::PER_WORD;
    return {static_cast<const uint32_t*>(data), column_scale, sum, depth_scale, depth, columns,
            data ? tiles_of(depth, per_word) : 0, {}};
  }
};

struct Node {
  int32_t path, int8;
  int64_t experts, hidden, intermediate, width;
  Activation activation;
  PackedMatrix gate_up, down, gate_up_transposed, down_transposed;
  const float *gate_up_bias, *down_bias;
  // LoRA in bf16; `up` is that of gate and up together, their ranks side by side
  PackedMatrix up_a, up_b, up_b_transposed, up_a_transposed, down_a, down_b, down_b_transposed, down_a_transposed;
  int64_t gate_rank, up_rank, down_rank;
  float scaling;

  int64_t ranks() const { return up_a.data ? gate_rank + up_rank : 0; }
  int64_t down_ranks() const { return down_a.data ? down_rank : 0; }
  int64_t low_width() const { return round_up(ranks(), PANEL); }
  int64_t down_low_width() const { return round_up(down_ranks(), PANEL); }
  // Gate and up of the same columns are panels that lie a fixed number of panels apart.
  bool has_paired_panels() const { return activation.gated && !activation.interleaved && intermediate % PANEL == 0; }
  // Neither that nor both in one panel: h is written first and activated then.
  bool activates_later() const { return activation.gated && !activation.interleaved && intermediate % PANEL; }
};

struct Batch {
  int64_t tokens, top_k;
  const uint16_t* x;
  int64_t x_stride;
  const int64_t* expert;  // (T, K)
  const float* weight;    // (T, K)
  // saved for backward, or null
  int32_t* map;           // RowMap
  uint16_t* h;            // (N, J)
  uint16_t* low;          // (N, low_width) c x Aᵀ of gate and up
  uint16_t* down_low;     // (N, down_low_width) c a Aᵀ of down

  int64_t slots() const { return tokens * top_k; }
};

struct WeightTarget {  // (E, out, in) in bf16, one of the inner strides is 1; data is null where it is not asked for
  uint16_t* data;
  int64_t stride_e, stride_out, stride_in;
};

struct Gradients {  // fp32 but those of the weights; null where it is not asked for
  const uint16_t* dy;
  int64_t dy_stride;
  float *x, *weight;
  float *gate_a, *gate_b, *up_a, *up_b, *down_a, *down_b;
  WeightTarget gate_up, down;
  float *gate_up_bias, *down_bias;
};

// Pieces of one block of memory; with a null base it only counts.
class Pieces {
 public:
  explicit Pieces(char* base) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (size_t(count) * sizeof(T) + 127) / 64 * 64;
    return piece;
  }
  template <class T>
  T* take_unless(T* given, int64_t count) { return given ? given : take<T>(count); }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

}  // namespace amoeba
