// Matrices of experts into the order of the tiles (see words.h), zeros in the padding.
#pragma once
#include "words.h"

namespace {

// Position of (column, k) within a packed expert, in elements.
template <class Kind>
inline int64_t position(int64_t column, int64_t k, int64_t tiles) {
  constexpr int64_t P = Kind::PER_WORD;
  const int64_t word = k / P, tile = (column / PANEL * tiles + word / TILE) * 2 + column % PANEL / TILE;
  return (tile * TILE_WORDS + word % TILE * TILE + column % TILE) * P + k % P;
}

template <class Kind>
inline int64_t packed_elements(int64_t columns, int64_t depth) {
  return panels_of(columns) * tiles_of(depth, Kind::PER_WORD) * 2 * TILE_WORDS * Kind::PER_WORD;
}

// value(column, k) -> one packed expert.
template <class Kind, class Value>
void pack_expert(int64_t columns, int64_t depth, typename Kind::Element* packed, const Value& value) {
  const int64_t tiles = tiles_of(depth, Kind::PER_WORD), block = TILE * Kind::PER_WORD;
  for (int64_t n0 = 0; n0 < columns; n0 += PANEL)
    for (int64_t k0 = 0; k0 < depth; k0 += block)
      for (int64_t n = n0; n < n0 + PANEL; ++n)
        for (int64_t k = k0; k < k0 + block; ++k)
          packed[position<Kind>(n, k, tiles)] = n < columns && k < depth ? value(n, k) : 0;
}

template <class Source>
void pack_bf16(int64_t columns, int64_t depth, const Source* weight, int64_t row, int64_t step, uint16_t* packed) {
  pack_expert<Bf16>(columns, depth, packed, [&](int64_t n, int64_t k) {
    uint16_t value;
    put(value, widen(weight[n * row + k * step]));
    return value;
  });
}

// Symmetric, one scale per column (an output channel of the weight).
template <class Source>
void pack_int8(int64_t columns, int64_t depth, const Source* weight, int64_t row, int64_t step, int8_t* packed,
               float* scale, int32_t* sum) {
  for (int64_t n = 0; n < columns; ++n) {
    float largest = 0;
    for (int64_t k = 0; k < depth; ++k) largest = std::max(largest, std::abs(widen(weight[n * row + k * step])));
    scale[n] = largest > 1e-30f ? largest / 127 : 0;
    sum[n] = 0;
  }
  pack_expert<Int8>(columns, depth, packed, [&](int64_t n, int64_t k) {
    const float inverse = scale[n] > 0 ? 1 / scale[n] : 0;
    const auto q = int8_t(int(widen(weight[n * row + k * step]) * inverse + 128.5f) - 128);
    sum[n] += q;
    return q;
  });
}

}  // namespace
