// Matrices of experts into the order of the tiles (see packed_layout.h), zeros in the padding.
#pragma once
#include "interleave.h"

namespace [[gnu::visibility("hidden")]] amoeba {

// line(column, first k, count, out): `count` elements of a column into a zeroed line; one packed expert of such lines.
template <class Kind, class Line>
void pack_expert(int64_t columns, int64_t depth, typename Kind::Element* packed, const Line& line) {
  constexpr int64_t STEP = TILE * Kind::PER_WORD;
  const int64_t tiles = tiles_of(depth, Kind::PER_WORD);
  auto* words = reinterpret_cast<uint32_t*>(packed);
  for (int64_t panel = 0; panel < panels_of(columns); ++panel)
    for (int64_t t = 0; t < tiles; ++t)
      for (int64_t half = 0; half < 2; ++half, words += TILE_WORDS)
        for (int64_t c = 0; c < TILE; ++c) {
          const int64_t column = panel * PANEL + half * TILE + c;
          alignas(64) typename Kind::Element values[STEP] = {};
          if (column < columns) line(column, t * STEP, std::min(STEP, depth - t * STEP), values);
          put_column(values, c, words);
        }
}

inline void copy_bf16(const uint16_t* source, int64_t count, uint16_t* out) {
  std::memcpy(out, source, count * sizeof(uint16_t));
}
inline void copy_bf16(const float* source, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; i += TILE) store_some(out + i, load_some(source + i, count - i), count - i);
}

template <class Source>
void pack_bf16(int64_t columns, int64_t depth, const Source* weight, int64_t row, int64_t step, uint16_t* packed) {
  pack_expert<Bf16>(columns, depth, packed, [&](int64_t n, int64_t k, int64_t count, uint16_t* out) {
    const Source* source = weight + n * row + k * step;
    if (step == 1) return copy_bf16(source, count, out);
    for (int64_t i = 0; i < count; ++i) out[i] = round_to_bf16(widen(source[i * step]));
  });
}

// The largest of |values|; NaN where one of them is NaN or infinite, which a comparison alone would pass over.
template <class Source>
float largest_of(const Source* values, int64_t count, int64_t step) {
  float largest = 0, zero = 0;  // of finite numbers the products with zero add up to zero
  int64_t i = 0;
  if (step == 1) {
    Floats16 most = {}, zeros = {};
    for (; i + TILE <= count; i += TILE) {
      const Floats16 value = load(values + i), size = select(value < Floats16{}, -value, value);
      most = select(size > most, size, most);
      zeros += value * 0.0f;
    }
    for (int lane = 0; lane < TILE; ++lane) {
      largest = std::max(largest, most[lane]);
      zero += zeros[lane];
    }
  }
  for (; i < count; ++i) {
    const float value = widen(values[i * step]);
    largest = std::max(largest, std::abs(value));
    zero += value * 0.0f;
  }
  return largest + zero;
}

// Symmetric, one scale per column (an output channel of the weight): NaN where the column has no finite one. Nothing is
// packed then, and the caller refuses the weight.
template <class Source>
void pack_int8(int64_t columns, int64_t depth, const Source* weight, int64_t row, int64_t step, int8_t* packed,
               float* scale, int32_t* sum) {
  std::vector<float> inverse(columns);
  for (int64_t n = 0; n < columns; ++n) {
    const float largest = largest_of(weight + n * row, depth, step);
    scale[n] = largest > 1e-30f || std::isnan(largest) ? largest / 127 : 0;
    inverse[n] = scale[n] > 0 ? 1 / scale[n] : 0;
    sum[n] = 0;
  }
  if (std::any_of(scale, scale + columns, [](float s) { return std::isnan(s); })) return;
  pack_expert<Int8>(columns, depth, packed, [&](int64_t n, int64_t k, int64_t count, int8_t* out) {
    const Source* source = weight + n * row + k * step;
    int32_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int q = int(widen(source[i * step]) * inverse[n] + 128.5f) - 128;
      out[i] = int8_t(q);
      total += q;
    }
    sum[n] += total;
  });
}

// One packed expert of (columns, depth) into that of (depth, columns): a panel's tile is a tile's panel.
inline void transpose_bf16(int64_t columns, int64_t depth, const uint32_t* source, uint32_t* out) {
  const int64_t panels = panels_of(columns), tiles = tiles_of(depth, Bf16::PER_WORD);
  for (int64_t panel = 0; panel < panels; ++panel)
    for (int64_t t = 0; t < tiles; ++t) {
      const uint32_t* from = source + (panel * tiles + t) * 2 * TILE_WORDS;
      uint32_t* to = out + (t * panels + panel) * 2 * TILE_WORDS;
      for (int64_t half = 0; half < 2; ++half)
        for (int64_t w = 0; w < TILE; ++w, from += TILE) {
          uint32_t* target = to + (w / 8 * TILE + half * 8) * TILE + 2 * w % TILE;
          for (int64_t c = 0; c < TILE; c += 2, target += TILE) {
            target[0] = (from[c] & 0xffff) | from[c + 1] << 16;
            target[1] = from[c] >> 16 | (from[c + 1] & 0xffff0000u);
          }
        }
    }
}

// The same for four elements to a word; sum (depth) is that of each new column.
inline void transpose_int8(int64_t columns, int64_t depth, const uint32_t* source, uint32_t* out, int32_t* sum) {
  constexpr int64_t P = Int8::PER_WORD, STEP = TILE * P;
  const int64_t panels = panels_of(columns), tiles = tiles_of(depth, P);
  const int64_t new_tiles = tiles_of(columns, P);
  std::memset(out, 0, packed_words(depth, columns, P) * sizeof(uint32_t));
  std::fill(sum, sum + depth, 0);
  for (int64_t panel = 0; panel < panels; ++panel)
    for (int64_t t = 0; t < tiles; ++t) {
      const uint32_t* from = source + (panel * tiles + t) * 2 * TILE_WORDS;
      for (int64_t half = 0; half < 2; ++half)
        for (int64_t w = 0; w < TILE; ++w, from += TILE) {
          const int64_t n = panel * PANEL + half * TILE;
          for (int64_t k = t * STEP + w * P; k < std::min(depth, t * STEP + (w + 1) * P); ++k) {
            const int64_t shift = 8 * (k % P), tile = (k / PANEL * new_tiles + n / STEP) * 2 + k % PANEL / TILE;
            uint32_t* target = out + (tile * TILE + n % STEP / P) * TILE + k % TILE;
            int32_t total = 0;
            for (int64_t c = 0; c < TILE; c += P, target += TILE) {
              uint32_t word = 0;
              for (int64_t i = 0; i < P; ++i) {
                const uint32_t q = from[c + i] >> shift & 255;
                word |= q << 8 * i;
                total += int8_t(q);
              }
              *target = word;
            }
            sum[k] += total;
          }
        }
    }
}

}  // namespace amoeba
