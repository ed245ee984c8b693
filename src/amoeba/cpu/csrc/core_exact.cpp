// Products whose sums have one order, whatever the number of rows, columns and threads: for exact mode.
//
//   weights contiguous along the output      in the order of the summed dimension, so that zeros in the rows add nothing
//   weights contiguous along it, both bf16   AMX tiles: 32 numbers at a time, the even and the odd ones apart
//   other such weights                       `dots`
#include "core_decode.h"
#include "core_products.h"
#include "exact.h"
#include "sums.h"

using namespace amoeba;

namespace {

constexpr int BLOCK_ROWS = LANES == 8 ? 2 : 6;  // whose sums with WEIGHT_ROWS weights stay in registers

#ifndef __clang__
template <int HALF>
struct Halves {  // of each stretch of two halves, in one vector and then in another
  alignas(64) int32_t lower[LANES], upper[LANES];
  constexpr Halves() : lower(), upper() {
    for (int i = 0; i < LANES; ++i) {
      lower[i] = i / HALF * 2 * HALF + i % HALF;
      upper[i] = lower[i] + HALF;
    }
  }
};

template <int HALF>
inline void add_halves(Floats* sums) {
  static constexpr Halves<HALF> halves;
  const Integers lower = load_as<int32_t, LANES>(halves.lower), upper = load_as<int32_t, LANES>(halves.upper);
#pragma GCC unroll 8
  for (int i = 0; i < HALF; ++i) {
    const Floats first = sums[2 * i], second = sums[2 * i + 1];
    sums[i] = __builtin_shuffle(first, second, lower) + __builtin_shuffle(first, second, upper);
  }
  if constexpr (HALF > 1) add_halves<HALF / 2>(sums);
}
#endif

// The `total` of each of LANES vectors, side by side.
inline Floats totals(const Floats* sums) {
  Floats found[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) found[i] = sums[i];
#ifdef __clang__
  for (int i = 0; i < LANES; ++i) found[0][i] = total(sums[i]);
#else
  add_halves<LANES / 2>(found);
#endif
  return found[0];
}

// `dots` of WEIGHT_ROWS weights and R rows, whose results lie next to each other.
template <int R, class Weight>
void block_of_dots(const Weight* w, int64_t w_row, const float* const* rows, int64_t n, float* out, int64_t out_row) {
  constexpr int W = WEIGHT_ROWS, ALL = (R * W + LANES - 1) / LANES * LANES;
  Floats sum[ALL] = {};
  int64_t k = 0;
  for (; k + LANES <= n; k += LANES) {
    Floats left[W];
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) left[j] = load<LANES>(w + j * w_row + k);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Floats right = load<LANES>(rows[r] + k);
#pragma GCC unroll 4
      for (int j = 0; j < W; ++j) sum[r * W + j] = multiply_add(left[j], right, sum[r * W + j]);
    }
  }
  float found[ALL];
#pragma GCC unroll 6
  for (int i = 0; i < ALL; i += LANES) store(found + i, totals(sum + i));
  if (k == n) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) std::memcpy(out + r * out_row, found + r * W, W * sizeof(float));
    return;
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < W; ++j) {
      float product = found[r * W + j];
      for (int64_t i = k; i < n; ++i) product = multiply_add(widen(w[j * w_row + i]), rows[r][i], product);
      out[r * out_row + j] = product;
    }
}

template <class Weight>
using BlockOfDots = void (*)(const Weight*, int64_t, const float* const*, int64_t, float*, int64_t);

template <class Weight, int R = BLOCK_ROWS>
BlockOfDots<Weight> block_for(int64_t rows) {
  if constexpr (R > 1)
    if (rows < R) return block_for<Weight, R - 1>(rows);
  return block_of_dots<R, Weight>;
}

// Weights contiguous along the summed dimension: each result is one of `dots`, whatever the number of rows and columns.
// Many rows meet a few weights while these are near.
template <class Weight>
void rows_times_dots(const ExpertProduct<Weight>& p, int64_t first_row, int64_t row_count, int64_t first_column,
                     int64_t columns) {
  constexpr int64_t FEW = 4, PANEL_ROWS = 8 * WEIGHT_ROWS;
  const PlainMatrix<Weight> weights{p.matrix, 0, p.matrix_n};
  const int64_t last = first_column + columns, end = first_row + row_count;
  const float* rows[BLOCK_ROWS > FEW ? BLOCK_ROWS : FEW];
  const auto by_weights = [&](int64_t from, int64_t to) {
    for (int64_t r = first_row; r < end; r += FEW) {
      const int64_t count = std::min(FEW, end - r);
      for (int64_t i = 0; i < count; ++i) rows[i] = p.rows[r + i];
      each_weight_row(weights, 0, from, to, std::min(to, last - 1), count, rows, p.depth,
                      [&](int64_t n, const float* products) {
                        for (int64_t i = 0; i < count; ++i) p.out[(r + i) * p.out_stride + n] = products[i];
                      });
    }
  };
  if (row_count <= FEW) return by_weights(first_column, last);
  const int64_t whole = first_column + columns / WEIGHT_ROWS * WEIGHT_ROWS;
  for (int64_t n = first_column; n < whole; n += PANEL_ROWS)
    for (int64_t r = first_row; r < end; r += BLOCK_ROWS) {
      const int64_t count = std::min<int64_t>(BLOCK_ROWS, end - r);
      for (int64_t i = 0; i < count; ++i) rows[i] = p.rows[r + i];
      const BlockOfDots<Weight> block = block_for<Weight>(count);
      for (int64_t j = n; j < std::min(whole, n + PANEL_ROWS); j += WEIGHT_ROWS)
        block(p.matrix + j * p.matrix_n, p.matrix_n, rows, p.depth, p.out + r * p.out_stride + j, p.out_stride);
    }
  by_weights(whole, last);
}

template <class Weight>
void exact_rows(int64_t experts, const int32_t* offs, const float* rows, int64_t row_stride, const Weight* matrix,
                int64_t matrix_e, int64_t matrix_k, int64_t matrix_n, int64_t depth, int64_t columns, float* out,
                int64_t out_stride, int threads) {
  const ExpertProduct<Weight> all{{rows, row_stride, nullptr}, matrix, matrix_k, matrix_n, nullptr, out, out_stride, depth};
  each_part(experts, offs, all, matrix_e, columns, threads, [&](const ExpertProduct<Weight>& p, auto... part) {
    matrix_n == 1 ? rows_times_vector_weights(p, part...) : rows_times_dots(p, part...);
  });
}

#ifdef AMOEBA_AMX
constexpr int64_t TILE_DEPTH = 2 * TILE;    // numbers of bf16 in a line of a tile
constexpr int64_t FEW_GROUPS = 2;           // of sixteen rows: for so few, weights are read where they lie
thread_local Buffer<uint32_t> weight_tiles, tail_tiles;
thread_local Buffer<uint32_t> row_groups;  // of the caller, for all threads

// Sixteen rows of an expert, or what is left of them: their words as the second operand of a tile product wants them.
struct RowGroup {
  int64_t e, first, count;
};

void pack_group(const RowGroup& group, const float* rows, int64_t row_stride, int64_t depth, int64_t tiles, uint32_t* out) {
  if (group.count < TILE) std::memset(out, 0, tiles * TILE_WORDS * sizeof(uint32_t));
  for (int64_t r = 0; r < group.count; ++r) {
    const float* row = rows + (group.first + r) * row_stride;
    for (int64_t t = 0; t < tiles; ++t) {
      alignas(64) uint16_t line[TILE_DEPTH];
      const int64_t left = depth - t * TILE_DEPTH;
      store(line, load_some(row + t * TILE_DEPTH, left));
      store(line + TILE, load_some(row + t * TILE_DEPTH + TILE, left - TILE));
      uint32_t words[TILE];
      std::memcpy(words, line, sizeof(line));
      for (int64_t w = 0; w < TILE; ++w) out[t * TILE_WORDS + w * TILE + r] = words[w];
    }
  }
}

// Sums of 32 rows of a weight with up to 32 rows: [weight row][row]. Whole tiles of depth lie at `weights`, and what is
// left of it in `tail`; next: the weight rows that come after these, or null.
void tile_sums_of(const uint16_t* weights, int64_t w_row, int64_t w_step, int64_t whole, const uint32_t* tail,
                  const uint16_t* next, const uint32_t* first, const uint32_t* second, float* sums) {
  constexpr int64_t LINE = TILE * sizeof(uint32_t), SUMS = PANEL * sizeof(float);
  asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const auto step = [&](const void* upper, const void* lower, int64_t stride) __attribute__((always_inline)) {
    _tile_loadd(4, upper, stride);
    _tile_loadd(5, lower, stride);
    _tile_loadd(6, first, LINE);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    first += TILE_WORDS;
    if (second) {
      _tile_loadd(7, second, LINE);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
      second += TILE_WORDS;
    }
  };
  for (int64_t t = 0; t < whole; ++t) {
    if (next)
      for (int64_t i = 0; i < PANEL; ++i) __builtin_prefetch(next + i * w_row + t * TILE_DEPTH, 0, 2);
    const uint16_t* at = weights + t * w_step;
    step(at, at + TILE * w_row, w_row * sizeof(uint16_t));
  }
  if (tail) step(tail, tail + TILE_WORDS, LINE);
  _tile_stored(0, sums, SUMS);
  _tile_stored(2, sums + TILE * PANEL, SUMS);
  if (second) {
    _tile_stored(1, sums + TILE, SUMS);
    _tile_stored(3, sums + TILE * PANEL + TILE, SUMS);
  }
  asm volatile("" ::: "memory");
}

// Tiles [first, tiles) of the depth of `width` weight rows, with zeros around them.
void copy_tiles(const uint16_t* weights, int64_t w_row, int64_t width, int64_t depth, int64_t first, int64_t tiles,
                uint32_t* out) {
  for (int64_t t = first; t < tiles; ++t)
    for (int64_t j = 0; j < PANEL; ++j, out += TILE) {
      const int64_t count = j < width ? std::min(TILE_DEPTH, depth - t * TILE_DEPTH) : 0;
      if (count < TILE_DEPTH) std::memset(out, 0, TILE_DEPTH * sizeof(uint16_t));
      std::memcpy(out, weights + j * w_row + t * TILE_DEPTH, count * sizeof(uint16_t));
    }
}

void exact_tiles(int64_t experts, const int32_t* offs, const float* rows, int64_t row_stride, const uint16_t* matrix,
                 int64_t matrix_e, int64_t matrix_n, int64_t depth, int64_t columns, float* out, int64_t out_stride,
                 int threads) {
  const int64_t tiles = ceil_div(depth, TILE_DEPTH), whole = depth / TILE_DEPTH;
  std::vector<RowGroup> groups;
  std::vector<int64_t> first_group(experts + 1);
  for (int64_t e = 0; e < experts; ++e) {
    for (int64_t r = start_of(offs, e); r < offs[e]; r += TILE)
      groups.push_back({e, r, std::min<int64_t>(TILE, offs[e] - r)});
    first_group[e + 1] = int64_t(groups.size());
  }
  uint32_t* packed = row_groups.get(groups.size() * tiles * TILE_WORDS);
  run_jobs(int64_t(groups.size()), threads, [&](int64_t i) {
    pack_group(groups[i], rows, row_stride, depth, tiles, packed + i * tiles * TILE_WORDS);
  });
  const ColumnCuts cuts(columns, experts, threads, PANEL);
  run_jobs(experts * cuts.per_expert, threads, [&](int64_t job) {
    const int64_t e = job / cuts.per_expert, begin = first_group[e], end = first_group[e + 1];
    if (begin == end) return;
    const int64_t from = job % cuts.per_expert * cuts.width, to = std::min(columns, from + cuts.width);
    const Tiles::Registers registers;
    alignas(64) float sums[PANEL * PANEL];
    for (int64_t n = from; n < to; n += PANEL) {
      const int64_t width = std::min(PANEL, to - n);
      const uint16_t *panel = matrix + e * matrix_e + n * matrix_n, *weights = panel;
      const bool copied = end - begin > FEW_GROUPS || width < PANEL;
      uint32_t* tail = nullptr;
      if (copied) {
        uint32_t* own = weight_tiles.get(tiles * 2 * TILE_WORDS);
        copy_tiles(panel, matrix_n, width, depth, 0, tiles, own);
        weights = reinterpret_cast<const uint16_t*>(own);
      } else if (whole < tiles) {
        tail = tail_tiles.get(2 * TILE_WORDS);
        copy_tiles(panel, matrix_n, width, depth, whole, tiles, tail);
      }
      const bool prefetches = !copied && n + 2 * PANEL <= to;
      for (int64_t i = begin; i < end; i += 2) {
        const bool both = i + 1 < end;
        const uint32_t* first = packed + i * tiles * TILE_WORDS;
        tile_sums_of(weights, copied ? TILE_DEPTH : matrix_n, copied ? PANEL * TILE_DEPTH : TILE_DEPTH,
                     copied ? tiles : whole, tail, prefetches ? panel + PANEL * matrix_n : nullptr, first,
                     both ? first + tiles * TILE_WORDS : nullptr, sums);
        for (int64_t g = i; g < i + 1 + both; ++g)
          store_transposed(sums + (g - i) * TILE, PANEL, width, groups[g].count, nullptr,
                           out + groups[g].first * out_stride + n, out_stride);
      }
    }
  });
}
#endif

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// As amoeba_rows_f32, without bias.
void amoeba_exact_rows_f32(int64_t experts, const int32_t* offs, const float* rows, int64_t row_stride,
                           const float* matrix, int64_t matrix_e, int64_t matrix_k, int64_t matrix_n, int64_t depth,
                           int64_t columns, float* out, int64_t out_stride, int threads) {
  exact_rows(experts, offs, rows, row_stride, matrix, matrix_e, matrix_k, matrix_n, depth, columns, out, out_stride,
             threads);
}

// in_tiles: the rows are bf16 in fp32, and this process may use AMX.
void amoeba_exact_rows_bf16(int64_t experts, const int32_t* offs, const float* rows, int64_t row_stride,
                            const uint16_t* matrix, int64_t matrix_e, int64_t matrix_k, int64_t matrix_n, int64_t depth,
                            int64_t columns, float* out, int64_t out_stride, int threads,
                            [[maybe_unused]] int in_tiles) {
#ifdef AMOEBA_AMX
  if (in_tiles && matrix_n != 1)
    return exact_tiles(experts, offs, rows, row_stride, matrix, matrix_e, matrix_n, depth, columns, out, out_stride,
                       threads);
#endif
  exact_rows(experts, offs, rows, row_stride, matrix, matrix_e, matrix_k, matrix_n, depth, columns, out, out_stride,
             threads);
}

// out[r] = the sum of row r.
void amoeba_exact_row_sums(int64_t rows, int64_t length, const float* x, float* out, int threads) {
  constexpr int64_t AT_ONCE = 64;
  run_jobs(ceil_div(rows, AT_ONCE), threads, [&](int64_t job) {
    for (int64_t r = job * AT_ONCE; r < std::min(rows, (job + 1) * AT_ONCE); ++r) out[r] = exact_sum(x + r * length, length);
  });
}

// out[i] = function(x[i]), by the numbers of `ExactFunction`.
void amoeba_exact_values(int function, int64_t count, const float* x, float* out, int threads) {
  constexpr int64_t AT_ONCE = 1 << 14;
  run_jobs(ceil_div(count, AT_ONCE), threads, [&](int64_t job) {
    const int64_t from = job * AT_ONCE;
    exact_values(ExactFunction(function), x + from, std::min(AT_ONCE, count - from), out + from);
  });
}

}  // extern "C"
#pragma GCC visibility pop
