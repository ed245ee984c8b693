// Sums of up to 32 packed rows with one panel of 32 columns, in three ways: AMX tiles, AVX-512 dot products, plain
// vectors of whatever the machine has (arithmetic.h: AVX-512 without bf16, AVX2, NEON, ...). A way has
//
//   Way::multiply<Kind>(depth, rows, sums)      // sums (32 x 32) are written where there are rows
//
// and an object of type Way::Registers lives around its use.
#pragma once
#include "arithmetic.h"

namespace [[gnu::visibility("hidden")]] amoeba {

// Packed rows against packed columns over some tiles of depth.
struct Stretch {
  const uint32_t* rows = nullptr;
  int64_t row_tile = 0;  // words from sixteen rows to the next sixteen
  const uint32_t* columns = nullptr;
  int64_t tiles = 0;
};

// A line of each row that is wanted when the sums are there.
struct Prefetch {
  const void* first;
  int64_t stride;  // bytes from row to row
  bool to_write;
};

struct Prefetches {
  static constexpr int MOST = 5;
  Prefetch of[MOST];
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
// are summed, `lines` cache lines from `ahead` on are prefetched in every step of depth.
struct Depth {
  Stretch whole, update;
  const uint32_t* ahead = nullptr;
  int64_t lines = 0;
  bool add = false;  // to what the sums are already
  const Prefetches* prefetches = nullptr;  // of each row
};

// ------------------------------------------------------------------------- plain vectors and AVX-512 dot products

// R rows and COLUMNS columns, whose sums stay in registers.
template <int R, int COLUMNS, class Arithmetic>
struct VectorBlock {
  using Vector = typename Arithmetic::Vector;
  static constexpr int COUNT = COLUMNS / LANES;
  static constexpr int64_t AHEAD = 4 * 512;  // words: 8 KiB of weights are prefetched, past the page

  template <class Sum>
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
        const typename Arithmetic::template Rows<R> rows(a);
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
    typename Arithmetic::Columns columns[COUNT];
#pragma GCC unroll 8
    for (int v = 0; v < COUNT; ++v) {
      const uint32_t* p = words + v * LANES / TILE * TILE_WORDS + (w + W) * TILE + v * LANES % TILE;
      if (v * LANES % TILE == 0) __builtin_prefetch(p + AHEAD);
      columns[v] = typename Arithmetic::Columns(p);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < COUNT; ++v) sum[r][v] = Arithmetic::template add<W, R>(sum[r][v], rows, r, w, columns[v]);
  }
};

template <template <class> class ArithmeticOf>
struct InVectors {
  struct Registers {};
  static constexpr bool AHEAD = false;
  template <class Kind>
  static void multiply(const Depth& depth, int64_t rows, typename Kind::Sum* sums) {
    for (int64_t r = 0; r < rows; r += ROWS) step<ROWS, Kind>(depth, r, rows - r, sums);
  }

 private:
  static constexpr int ROWS = LANES == 16 ? 8 : 4;       // at once; steps of so many do not cross a tile of rows
  static constexpr int MOST_SUMS = LANES == 8 ? 8 : 16;  // half of the registers: AVX2 has 16, AVX-512 and NEON have 32

  template <int R, class Kind>
  static void step(const Depth& depth, int64_t first, int64_t left, typename Kind::Sum* sums) {
    if constexpr (R > 1)
      if (left < R) return step<R - 1, Kind>(depth, first, left, sums);
    constexpr int COLUMNS = R * PANEL / LANES <= MOST_SUMS ? PANEL : TILE;
    for (int column = 0; column < PANEL; column += COLUMNS)
      VectorBlock<R, COLUMNS, ArithmeticOf<Kind>>::run(depth, first, column, sums + first * PANEL + column);
  }
};
using Plain = InVectors<PlainArithmetic>;
#ifdef AMOEBA_AVX512
using Dots = InVectors<DotArithmetic>;
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
    const int64_t rows_per_step = depth.prefetches ? ceil_div(rows, std::max<int64_t>(1, depth.whole.tiles)) : 0;
    int64_t fetched = 0;
    for (const Stretch* stretch : {&depth.whole, &depth.update}) {
      const uint32_t *a = stretch->rows, *b = stretch->columns;
      const int64_t next_rows = stretch->row_tile;
      for (int64_t t = 0; t < stretch->tiles; ++t, a += TILE_WORDS, b += 2 * TILE_WORDS, ahead += 2 * TILE_WORDS) {
        for (int64_t i = 0; i < depth.lines; ++i)
          _mm_prefetch(reinterpret_cast<const char*>(ahead + i * TILE), _MM_HINT_T1);
        for (int64_t i = 0; i < rows_per_step && fetched < rows; ++i) depth.prefetches->fetch(fetched++);
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
