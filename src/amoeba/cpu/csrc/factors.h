// LoRA factors of one expert into the order of the tiles, two ways each: rank as columns and rank as depth.
#pragma once
#include "node.h"

namespace [[gnu::visibility("hidden")]] amoeba {

struct Factor {  // (E, rows, columns) at any strides, bf16 or fp32; data is null where there is none
  const void* data;
  int32_t is_float;
  int64_t stride_e, stride_row, stride_column;

  // out[i] = expert e at (row, i), or with `transposed` at (i, row), in bf16 at steps of `step`
  void line(int64_t e, int64_t row, int64_t count, bool transposed, uint16_t* out, int64_t step) const {
    const int64_t along = transposed ? stride_row : stride_column, across = transposed ? stride_column : stride_row;
    const auto copy = [&](const auto* source) {
      source += e * stride_e + row * across;
      if (along == 1 && step == 1) {
        int64_t i = 0;
        for (; i + TILE <= count; i += TILE) store(out + i, load(source + i));
        for (; i < count; ++i) out[i] = round_to_bf16(widen(source[i]));
      } else {
        for (int64_t i = 0; i < count; ++i) out[i * step] = round_to_bf16(widen(source[i * along]));
      }
    };
    is_float ? copy(static_cast<const float*>(data)) : copy(static_cast<const uint16_t*>(data));
  }
};

struct Factors {
  Factor gate_a, gate_b, up_a, up_b, down_a, down_b;
};

// Into those matrices of the node that have data; compiled in node_factors.cpp.
void pack_up_factors(const Node& n, const Factors& f, int64_t e);
void pack_down_factors(const Node& n, const Factors& f, int64_t e);

}  // namespace amoeba
