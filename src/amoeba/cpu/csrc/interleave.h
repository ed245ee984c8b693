// Rows of bf16 into words: pairs of rows interleaved, and tiles of sixteen by sixteen words transposed.
#pragma once
#include "packed_layout.h"

namespace [[gnu::visibility("hidden")]] amoeba {

constexpr int64_t DEPTH_ROWS = 512;  // rows of a gradient's depth that are packed at a time

struct SortedRows {  // as in RowMap, and the token of each row
  const int32_t *first, *order, *token;
};

struct GradientJob {  // some panels of one expert's gradient
  int64_t product, expert, first_panel, panels;
};

// Rows that are the depth of a product, a pair of them to a word.
struct WideRows {
  const uint16_t* data = nullptr;
  int64_t stride = 0, columns = 0;
  bool by_token = false;             // read by token, else by row
  const float* row_scale = nullptr;  // of each slot, or null
};

// Columns 0-15 and 16-31 of two rows, in pairs.
inline void pack_pair(const uint16_t* even, const uint16_t* odd, uint32_t* left, uint32_t* right) {
#ifdef AMOEBA_AVX512_VNNI
  alignas(64) static constexpr uint16_t LOW[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                   8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(LOW), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
  _mm512_store_si512(left, _mm512_permutex2var_epi16(a, low, b));
  _mm512_store_si512(right, _mm512_permutex2var_epi16(a, high, b));
#else
  for (int64_t c = 0; c < TILE; ++c) {
    left[c] = even[c] | uint32_t(odd[c]) << 16;
    right[c] = even[TILE + c] | uint32_t(odd[TILE + c]) << 16;
  }
#endif
}

// Rows start .. start + rows as [panel][tile of rows][half][pair of rows][column], zeros up to whole tiles.
inline void pack_pairs(const WideRows& wide, const SortedRows& s, int64_t start, int64_t rows, int64_t panel,
                       int64_t panels, uint32_t* out) {
  const int64_t tiles = ceil_div(rows, PANEL);
  alignas(64) static const uint16_t nothing[PANEL] = {};
  const auto row = [&](int64_t n) -> const uint16_t* {
    return n < rows ? wide.data + (wide.by_token ? s.token[start + n] : start + n) * wide.stride : nullptr;
  };
  for (int64_t n = 0; n < tiles * PANEL; n += 2) {
    const uint16_t* pair[2] = {row(n), row(n + 1)};
    uint32_t* words = out + (n / PANEL * 2 * TILE + n / 2 % TILE) * TILE;
    for (int64_t i = 0; i < panels; ++i, words += tiles * 2 * TILE_WORDS) {
      const int64_t column = (panel + i) * PANEL, width = std::min(PANEL, wide.columns - column);
      alignas(64) uint16_t changed[2][PANEL];
      const uint16_t* ready[2];
      for (int64_t j = 0; j < 2; ++j) {
        ready[j] = pair[j] ? pair[j] + column : nothing;
        if (!pair[j] || (width == PANEL && !wide.row_scale)) continue;
        const float scale = wide.row_scale ? wide.row_scale[s.order[start + n + j]] : 1;
        if (width == PANEL)
          store_panel(changed[j], scale * load(ready[j]), scale * load(ready[j] + TILE), PANEL, false);
        else
          store_panel(changed[j], scale * load_some(ready[j], width), scale * load_some(ready[j] + TILE, width - TILE),
                      PANEL, false);
        ready[j] = changed[j];
      }
      pack_pair(ready[0], ready[1], words, words + TILE_WORDS);
    }
  }
}

// Sixteen words that lie together, as bf16 do or better aligned, into column c of a tile.
inline void put_column(const void* line, int64_t c, uint32_t* tile) {
  const Words16 words = (Words16)load_as<uint16_t, 2 * TILE>(line);
#pragma GCC unroll 16
  for (int w = 0; w < TILE; ++w) tile[w * TILE + c] = words[w];
}

#ifdef AMOEBA_AVX512_VNNI
// Sixteen lines of sixteen words, transposed in registers.
inline void transpose_lines(__m512i line[TILE]) {
  __m512i t[TILE];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(line[i], line[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(line[i], line[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    line[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    line[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    line[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    line[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(line[i], line[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(line[i], line[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(line[i + 8], line[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(line[i + 8], line[i + 12], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    line[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    line[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}
#endif

// out[w][c] = word w of line(c), which are sixteen words that lie together.
template <class Line>
inline void transpose_tile(const Line& line, uint32_t* out) {
#ifdef AMOEBA_AVX512_VNNI
  __m512i words[TILE];
#pragma GCC unroll 16
  for (int c = 0; c < TILE; ++c) words[c] = _mm512_loadu_si512(line(c));
  transpose_lines(words);
#pragma GCC unroll 16
  for (int w = 0; w < TILE; ++w) _mm512_store_si512(out + w * TILE, words[w]);
#else
  for (int64_t c = 0; c < TILE; ++c) put_column(line(c), c, out);
#endif
}

}  // namespace amoeba
