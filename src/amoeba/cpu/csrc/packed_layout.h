// The layout of packed weights and rows, one for every instruction set.
//
// A word is 32 bits of the summed dimension: two bf16 or four int8. A tile is 16 words x 16 columns (1 KiB: one AMX
// register, or sixteen AVX-512 registers), a panel is 32 columns:
//   weights  [expert][panel][tile of depth][half of the panel][word][column]
//   rows     [16 rows][tile of depth][row][word]          (packed per job, gathered on the way, zeros past the depth)
// int8 rows are stored as q + ROW_OFFSET; ROW_OFFSET . (sum of weights) is taken off again.
#pragma once
#include <type_traits>
#include <utility>
#include <vector>

#include "memory.h"
#include "vectors.h"

#if defined(AMOEBA_AVX512) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define AMOEBA_AMX 1
#endif
#if defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define AMOEBA_SDOT 1
#endif

namespace [[gnu::visibility("hidden")]] amoeba {

enum Path { GENERIC, AVX512, AMX };  // the order of `Path` in weights.py

constexpr int64_t TILE = 16;                 // rows, words or columns of a tile
constexpr int64_t TILE_WORDS = TILE * TILE;
constexpr int64_t PANEL = 2 * TILE;          // columns that are summed at once
#ifdef AMOEBA_SDOT
constexpr int ROW_OFFSET = 0;    // SDOT takes both sides with sign
#else
constexpr int ROW_OFFSET = 128;  // VPDPBUSD and TDPBUSD take rows without sign
#endif

// Up to FEW_ROWS rows an expert's weights come faster through dot products than through tiles. One core, 2048 x 1536,
// GB/s of weights by dots / by tiles: bf16 29/26 at 1 row, 21/25 at 4, 11/25 at 8; int8 30/25 at 1, 27/24 at 8, 17/23
// at 16 (Xeon, family 6 model 207, 2026-11-15).
struct Bf16 {
  using Element = uint16_t;
  using Sum = float;
  static constexpr int64_t PER_WORD = 2, FEW_ROWS = 2;
};
struct Int8 {
  using Element = int8_t;
  using Sum = int32_t;
  static constexpr int64_t PER_WORD = 4, FEW_ROWS = 8;
};

inline int64_t tiles_of(int64_t depth, int64_t per_word) { return ceil_div(depth, TILE * per_word); }
inline int64_t panels_of(int64_t columns) { return ceil_div(columns, PANEL); }
inline int64_t packed_words(int64_t columns, int64_t depth, int64_t per_word) {  // of one expert
  return panels_of(columns) * tiles_of(depth, per_word) * 2 * TILE_WORDS;
}

// A row of a panel; whole lines may be written past the caches, so that they are not read before.
inline void store_panel(float* p, Floats16 left, Floats16 right, int64_t width, [[maybe_unused]] bool stream) {
#ifdef AMOEBA_AVX512
  if (stream) {
    _mm512_stream_ps(p, (__m512)left);
    return _mm512_stream_ps(p + TILE, (__m512)right);
  }
#endif
  store_some(p, left, width);
  store_some(p + TILE, right, width - TILE);
}
inline void store_panel(uint16_t* p, Floats16 left, Floats16 right, int64_t width, [[maybe_unused]] bool stream) {
#ifdef AMOEBA_AVX512
  const __m512i line = (__m512i)_mm512_cvtne2ps_pbh((__m512)right, (__m512)left);
  if (stream) return _mm512_stream_si512(reinterpret_cast<__m512i*>(p), line);
  if (width >= PANEL) return _mm512_storeu_si512(p, line);
#endif
  store_some(p, left, width);
  store_some(p + TILE, right, width - TILE);
}
inline void end_of_streaming() {
#ifdef AMOEBA_AVX512
  _mm_sfence();
#endif
}

}  // namespace amoeba
