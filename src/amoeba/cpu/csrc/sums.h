// Sums of up to 32 packed rows with one panel of 32 columns, in three ways: AMX tiles, AVX-512 dot products, plain
// vectors of whatever the machine has (plain_words.h: AVX-512 without bf16, AVX2, NEON, ...). A way has
//
//   Way::multiply<Kind>(depth, rows, sums)      // sums (32 x 32) are written where there are rows
//
// and an object of type Way::Registers lives around its use.
#pragma once
#include "plain_words.h"

namespace [[gnu::visibility("hidden")]] amoeba {

// Packed rows against packed columns over some tiles of depth.
struct Stretch {
  const uint32_t* rows = nullptr;
  int64_t row_tile = 0;  // words from sixteen rows to the next sixteen
  const uint32_t* columns = nullptr;
  int64_t tiles = 0;
};

// A line of each row that is wanted when the sums are there.
struct Touch {
  const void* first;
  int64_t stride;  // bytes from row to row
  bool to_write;
};

struct Touches {
  static constexpr int MOST = 5;
  Touch of[MOST];
  int count = 0;

  template <class T>
  void add(T* first, int64_t stride) {
    of[count++] = {first, stride * int64_t(sizeof(T)), !std::is_const_v<T>};
  }
  void fetch(int64_t row) const {
    for (int i = 0; i < count; ++i) {
      const char* line = static_cast<const char*>(of[i].first) + row * of[i].stride;
      of[i].to_write ? __builtin_prefetch(line, 1, 2) : __builtin_prefetch(line, 0, 2);
    }
  }
};

// The whole depth, and then the depth of a second pair of matrices (bf16): a low-rank update is joined so. While they
// are summed, `lines` cache lines from `ahead` on come nearer in every step of depth.
struct Depth {
  Stretch whole, update;
  const uint32_t* ahead = nullptr;
  int64_t lines = 0;
  bool add = false;  // to what the sums are already
  const Touches* touches = nullptr;  // of the rows, which come nearer too
};

// ------------------------------------------------------------------------------------------------- plain vectors

struct PlainRows {
  static constexpr int ROWS = LANES == 16 ? 8 : 4;
  static constexpr int MOST_SUMS = LANES == 8 ? 8 : 16;  // half of the registers: AVX2 has 16, AVX-512 and NEON have 32
  static constexpr int64_t AHEAD = 4 * 512;              // words: 8 KiB of weights are under way, past the page

  template <int R, class Sum>
  static void sums(const Depth& depth, int64_t first, Sum* out) {
    constexpr int COLUMNS = R * PANEL / LANES <= MOST_SUMS ? PANEL : TILE;
    for (int column = 0; column < PANEL; column += COLUMNS)
      Block<R, COLUMNS, Sum>::run(depth, first, column, out + first * PANEL + column);
  }

 private:
  template <int R, int COLUMNS, class Sum>
  struct Block {
    using Of = Arithmetic<Sum>;
    using Vector = typename Of::Vector;
    static constexpr int COUNT = COLUMNS / LANES;

    [[gnu::noinline]]  // one copy for all products: node.cpp compiles in 26 s instead of 37 (haswell, 2026-11-15)
    static void run(const Depth& depth, int64_t first, int column, Sum* out) {
      Vector sum[R][COUNT] = {};
      if (depth.add)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
          for (int v = 0; v < COUNT; ++v) std::memcpy(&sum[r][v], out + r * PANEL + v * LANES, sizeof(Vector));
      for (const Stretch* stretch : {&depth.whole, &depth.update}) {
        const uint32_t* a = stretch->rows + first / TILE * stretch->row_tile + first % TILE * TILE;
        const uint32_t* b = stretch->columns + column / TILE * TILE_WORDS;
        for (int64_t t = 0; t < stretch->tiles; ++t, a += TILE_WORDS, b += 2 * TILE_WORDS) {
          const typename Of::template Rows<R> rows(a);
          for (int w = 0; w < TILE; w += 4) {
            add<0>(sum, rows, w, b), add<1>(sum, rows, w, b), add<2>(sum, rows, w, b), add<3>(sum, rows, w, b);
          }
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; ++v) std::memcpy(out + r * PANEL + v * LANES, &sum[r][v], sizeof(Vector));
    }

    template <int W, class Rows>
    [[gnu::always_inline]] static void add(Vector (&sum)[R][COUNT], const Rows& rows, int w, const uint32_t* words) {
#ifdef __aarch64__
      asm volatile("" ::: "memory");  // else GCC loads later words meanwhile, and sums leave the registers
#endif
      typename Of::Columns columns[COUNT];
#pragma GCC unroll 8
      for (int v = 0; v < COUNT; ++v) {
        const uint32_t* p = words + v * LANES / TILE * TILE_WORDS + (w + W) * TILE + v * LANES % TILE;
        if (v * LANES % TILE == 0) __builtin_prefetch(p + AHEAD);
        columns[v] = typename Of::Columns(p);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; ++v) sum[r][v] = Of::template add<W, R>(sum[r][v], rows, r, w, columns[v]);
    }
  };
};

// ------------------------------------------------------------------------------------------- AVX-512 dot products

#ifdef AMOEBA_AVX512
inline __m512 add_word(__m512 sum, uint32_t a, __m512i b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(int(a)), (__m512bh)b);
}
inline __m512i add_word(__m512i sum, uint32_t a, __m512i b) {
  return _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(int(a)), b);
}
inline void store_sum(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
inline void store_sum(int32_t* p, __m512i v) { _mm512_storeu_si512(p, v); }
inline void load_sum(__m512& v, const float* p) { v = _mm512_loadu_ps(p); }
inline void load_sum(__m512i& v, const int32_t* p) { v = _mm512_loadu_si512(p); }
template <class Sum>
struct RegisterOf;
template <>
struct RegisterOf<float> { using type = __m512; };
template <>
struct RegisterOf<int32_t> { using type = __m512i; };

struct DotRows {
  static constexpr int ROWS = 8;              // 8 x 2 sums: each weight that is read serves 8 rows
  static constexpr int64_t AHEAD = 4 * 512;   // words: 8 KiB of weights are under way, past the page
  template <int R, class Sum>
  static void sums(const Depth& depth, int64_t first, Sum* out) {
    using Vector = typename RegisterOf<Sum>::type;
    Vector sum[R][2] = {};
    if (depth.add)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        load_sum(sum[r][0], out + (first + r) * PANEL);
        load_sum(sum[r][1], out + (first + r) * PANEL + TILE);
      }
    for (const Stretch* stretch : {&depth.whole, &depth.update}) {
      const uint32_t* a = stretch->rows + first / TILE * stretch->row_tile + first % TILE * TILE;
      const uint32_t* b = stretch->columns;
      for (int64_t t = 0; t < stretch->tiles; ++t)
        for (int64_t w = 0; w < TILE; ++w) {
          const uint32_t* words = b + 2 * t * TILE_WORDS + w * TILE;
          _mm_prefetch(reinterpret_cast<const char*>(words + AHEAD), _MM_HINT_T0);
          _mm_prefetch(reinterpret_cast<const char*>(words + AHEAD + TILE_WORDS), _MM_HINT_T0);
          const __m512i left = _mm512_load_si512(words), right = _mm512_load_si512(words + TILE_WORDS);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const uint32_t word = a[t * TILE_WORDS + r * TILE + w];
            sum[r][0] = add_word(sum[r][0], word, left);
            sum[r][1] = add_word(sum[r][1], word, right);
          }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      store_sum(out + (first + r) * PANEL, sum[r][0]);
      store_sum(out + (first + r) * PANEL + TILE, sum[r][1]);
    }
  }
};
#endif

// Rows in steps that do not cross a tile of rows.
template <class Rows>
struct ByRows {
  struct Registers {};
  static constexpr bool AHEAD = false;
  template <class Kind>
  static void multiply(const Depth& depth, int64_t rows, typename Kind::Sum* sums) {
    for (int64_t r = 0; r < rows; r += Rows::ROWS) step<Rows::ROWS>(depth, r, rows - r, sums);
  }

 private:
  template <int R, class Sum>
  static void step(const Depth& depth, int64_t first, int64_t left, Sum* sums) {
    if constexpr (R > 1)
      if (left < R) return step<R - 1>(depth, first, left, sums);
    Rows::template sums<R>(depth, first, sums);
  }
};
using Plain = ByRows<PlainRows>;
#ifdef AMOEBA_AVX512
using Dots = ByRows<DotRows>;
#endif

// ------------------------------------------------------------------------------------------------------ AMX tiles

#ifdef AMOEBA_AMX
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

#define AMOEBA_DOT(SUM, A, B)                                          \
  if constexpr (std::is_same_v<Kind, Bf16>) _tile_dpbf16ps(SUM, A, B); \
  else _tile_dpbusd(SUM, A, B)

struct Tiles {
  struct Registers {  // eight registers of tiles, all full, for as long as this lives
    Registers() {
      static const TileShapes shapes;
      _tile_loadconfig(&shapes);
      asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
    }
    ~Registers() { _tile_release(); }
  };
  static constexpr bool AHEAD = true;

  template <class Kind>
  static void multiply(const Depth& depth, int64_t rows, typename Kind::Sum* sums) {
    asm volatile("" ::: "memory");
    rows > TILE ? blocks<Kind, true>(depth, rows, sums) : blocks<Kind, false>(depth, rows, sums);
  }

 private:
  // 16 or 32 rows x 32 columns: sums in tiles 0-3, rows in 4 and 5, weights in 6 and 7
  template <class Kind, bool BOTH>
  static void blocks(const Depth& depth, int64_t rows, typename Kind::Sum* sums) {
    constexpr int64_t STRIDE = TILE * sizeof(uint32_t), SUM_STRIDE = PANEL * sizeof(uint32_t);
    if (depth.add) {
      _tile_loadd(0, sums, SUM_STRIDE);
      _tile_loadd(1, sums + TILE, SUM_STRIDE);
      if constexpr (BOTH) {
        _tile_loadd(2, sums + TILE * PANEL, SUM_STRIDE);
        _tile_loadd(3, sums + TILE * PANEL + TILE, SUM_STRIDE);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    const uint32_t* ahead = depth.ahead;
    const int64_t rows_per_step = depth.touches ? ceil_div(rows, std::max<int64_t>(1, depth.whole.tiles)) : 0;
    int64_t touched = 0;
    for (const Stretch* stretch : {&depth.whole, &depth.update}) {
      const uint32_t *a = stretch->rows, *b = stretch->columns;
      const int64_t next_rows = stretch->row_tile;
      for (int64_t t = 0; t < stretch->tiles; ++t, a += TILE_WORDS, b += 2 * TILE_WORDS, ahead += 2 * TILE_WORDS) {
        for (int64_t i = 0; i < depth.lines; ++i)
          _mm_prefetch(reinterpret_cast<const char*>(ahead + i * TILE), _MM_HINT_T1);
        for (int64_t i = 0; i < rows_per_step && touched < rows; ++i) depth.touches->fetch(touched++);
        _tile_loadd(4, a, STRIDE);
        _tile_loadd(6, b, STRIDE);
        _tile_loadd(7, b + TILE_WORDS, STRIDE);
        AMOEBA_DOT(0, 4, 6);
        AMOEBA_DOT(1, 4, 7);
        if constexpr (BOTH) {
          _tile_loadd(5, a + next_rows, STRIDE);
          AMOEBA_DOT(2, 5, 6);
          AMOEBA_DOT(3, 5, 7);
        }
      }
    }
    _tile_stored(0, sums, SUM_STRIDE);
    _tile_stored(1, sums + TILE, SUM_STRIDE);
    if constexpr (BOTH) {
      _tile_stored(2, sums + TILE * PANEL, SUM_STRIDE);
      _tile_stored(3, sums + TILE * PANEL + TILE, SUM_STRIDE);
    }
  }
};
#undef AMOEBA_DOT
#endif

// Calls with the way that a path takes for this many rows.
template <class Kind, class Call>
void with_way(Path path, int64_t rows, const Call& call) {
#ifdef AMOEBA_AMX
  if (path == AMX && rows > Kind::FEW_ROWS) return call(Tiles{});
#endif
#ifdef AMOEBA_AVX512
  if (path != GENERIC) return call(Dots{});
#endif
  (void)path, (void)rows;
  call(Plain{});
}

}  // namespace amoeba
