// Products over the sorted rows of one expert, and sums of outer products, in fp32.
//
// The weights are the large operand and are used once per pass for the few rows of each expert (tens to hundreds), so no
// product packs or transposes them more than a plain copy costs:
//   weight rows contiguous along the summed dimension -> weights are broadcast, the transposed rows are the vectors
//   weight rows contiguous along the output dimension -> weights are the vectors, the rows are broadcast
#pragma once
#include "jobs.h"
#include "memory.h"
#include "vectors.h"

namespace amoeba {
namespace {

constexpr int VECTORS = LANES == 8 ? 2 : 4;  // 6 x 4 sums in 32 registers (AVX-512, NEON), 6 x 2 in 16 (AVX)
constexpr int TILE_ROWS = 6;
constexpr int TILE_COLUMNS = LANES * VECTORS;
constexpr int64_t SUM_BLOCK = 256;      // of the summed dimension: a packed panel of 128 x 64 stays in the L1 cache
constexpr int64_t RIGHT_BLOCK = 512;    // columns of a gradient whose packed right side stays in the L2 cache
constexpr int64_t ROW_BLOCK = 4 * TILE_COLUMNS;

thread_local Buffer<float> packed_rows, packed_weights, tile_sums;

// c (rows x vectors) = [c +] a (rows x depth) . b (depth x vectors); a at any strides, b and c contiguous along a vector.
template <int R, int V>
void tile(int64_t depth, const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step, float* c,
          int64_t c_row, bool add) {
  Floats sum[R][V];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) sum[i][j] = add ? load<LANES>(c + i * c_row + j * LANES) : Floats{};
  for (int64_t k = 0; k < depth; ++k) {
    Floats right[V];
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) right[j] = load<LANES>(b + j * LANES);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const Floats left = a[i * a_row] - Floats{};
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) sum[i][j] += left * right[j];
    }
    a += a_step;
    b += b_step;
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) store(c + i * c_row + j * LANES, sum[i][j]);
}

using Tile = void (*)(int64_t, const float*, int64_t, int64_t, const float*, int64_t, float*, int64_t, bool);

template <int R = TILE_ROWS, int V = VECTORS>
Tile tile_for(int64_t rows, int64_t vectors) {
  if constexpr (R > 1)
    if (rows < R) return tile_for<R - 1, V>(rows, vectors);
  if constexpr (V > 1)
    if (vectors < V) return tile_for<R, V - 1>(rows, vectors);
  return tile<R, V>;
}

// Columns [first, first + width) of a product, width <= TILE_COLUMNS, for all `rows` rows of a. A width that is no
// multiple of the vector goes through `scratch` so that nothing beside it is touched.
void column_block(int64_t rows, int64_t width, int64_t depth, const float* a, int64_t a_row, int64_t a_step,
                  const float* b, int64_t b_step, float* c, int64_t c_row, bool add) {
  const int64_t vectors = ceil_div(width, LANES);
  const bool whole = width % LANES == 0;
  alignas(64) float scratch[TILE_ROWS * TILE_COLUMNS];
  for (int64_t i = 0; i < rows; i += TILE_ROWS) {
    const int64_t count = std::min<int64_t>(TILE_ROWS, rows - i);
    const Tile kernel = tile_for(count, vectors);
    float* out = c + i * c_row;
    if (whole) {
      kernel(depth, a + i * a_row, a_row, a_step, b, b_step, out, c_row, add);
      continue;
    }
    if (add)
      for (int64_t r = 0; r < count; ++r) std::memcpy(scratch + r * TILE_COLUMNS, out + r * c_row, width * sizeof(float));
    kernel(depth, a + i * a_row, a_row, a_step, b, b_step, scratch, TILE_COLUMNS, add);
    for (int64_t r = 0; r < count; ++r) std::memcpy(out + r * c_row, scratch + r * TILE_COLUMNS, width * sizeof(float));
  }
}

template <class Element>
struct RowsOf {  // row r of a matrix whose rows are picked by an index, or lie one after another without one
  const Element* data;
  int64_t stride;
  const int64_t* index;
  const Element* operator[](int64_t r) const { return data + (index ? index[r] : r) * stride; }
};
using RowSource = RowsOf<float>;

// packed[k][r] = rows[r][first_k + k], zeros up to `padded` rows.
void pack_transposed(const RowSource& rows, int64_t first, int64_t count, int64_t padded, int64_t first_k, int64_t depth,
                     float* packed) {
  constexpr int64_t STEP = 16;
  for (int64_t r = 0; r < padded; r += STEP) {
    const float* source[STEP];
    const int64_t here = std::min(STEP, padded - r);
    static const float zeros[SUM_BLOCK] = {};
    for (int64_t i = 0; i < here; ++i) source[i] = r + i < count ? rows[first + r + i] + first_k : zeros;
    if (here == STEP) {
      for (int64_t k = 0; k < depth; ++k) {
        float* out = packed + k * padded + r;
#pragma GCC unroll 16
        for (int64_t i = 0; i < STEP; ++i) out[i] = source[i][k];
      }
    } else {
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t i = 0; i < here; ++i) packed[k * padded + r + i] = source[i][k];
    }
  }
}

// packed[k][0 .. width) = rows[first_k + k][column ...], zero-padded to whole vectors; returns the row length.
template <class Element>
int64_t pack_panel(const RowsOf<Element>& rows, int64_t first_k, int64_t depth, int64_t column, int64_t width,
                   float* packed) {
  const int64_t padded = round_up(width, LANES);
  for (int64_t k = 0; k < depth; ++k) {
    const Element* source = rows[first_k + k] + column;
    float* out = packed + k * padded;
    int64_t j = 0;
    for (; j + LANES <= width; j += LANES) store(out + j, load<LANES>(source + j));
    for (; j < width; ++j) out[j] = widen(source[j]);
    for (; j < padded; ++j) out[j] = 0;
  }
  return padded;
}

template <class Weight>
struct ExpertProduct {  // one expert's part of: out = rows . matrix (+ bias)
  RowSource rows;
  const Weight* matrix;
  int64_t matrix_k, matrix_n;  // strides along the summed and the output dimension; one of them is 1
  const float* bias;
  float* out;
  int64_t out_stride, depth;
};

// out[r][n] = sums[n][r] (+ bias[n]), in blocks that stay in the L1 cache.
void store_transposed(const float* sums, int64_t padded, int64_t columns, int64_t rows, const float* bias, float* out,
                      int64_t out_stride) {
  constexpr int64_t STEP = 16;
  int64_t n = 0;
  for (; n + STEP <= columns; n += STEP) {
    float offset[STEP] = {};
    if (bias) std::memcpy(offset, bias + n, sizeof(offset));
    for (int64_t r = 0; r < rows; ++r) {
      const float* source = sums + n * padded + r;
      float* target = out + r * out_stride + n;
#pragma GCC unroll 16
      for (int64_t i = 0; i < STEP; ++i) target[i] = source[i * padded] + offset[i];
    }
  }
  for (; n < columns; ++n)
    for (int64_t r = 0; r < rows; ++r) out[r * out_stride + n] = sums[n * padded + r] + (bias ? bias[n] : 0.0f);
}

// Weights contiguous along the summed dimension: out^T = W . rows^T, tile by tile, transposed on the way out.
void rows_times_broadcast_weights(const ExpertProduct<float>& p, int64_t first_row, int64_t row_count, int64_t first_column,
                                  int64_t columns) {
  for (int64_t r0 = 0; r0 < row_count; r0 += TILE_COLUMNS) {
    const int64_t count = std::min<int64_t>(TILE_COLUMNS, row_count - r0);
    const int64_t padded = round_up(count, LANES);
    float* sums = tile_sums.get(columns * padded);
    for (int64_t k0 = 0; k0 < p.depth; k0 += SUM_BLOCK) {
      const int64_t depth = std::min(SUM_BLOCK, p.depth - k0);
      float* packed = packed_rows.get(depth * padded);
      pack_transposed(p.rows, first_row + r0, count, padded, k0, depth, packed);
      column_block(columns, padded, depth, p.matrix + first_column * p.matrix_n + k0, p.matrix_n, 1, packed, padded,
                   sums, padded, k0 > 0);
    }
    float* out = p.out + (first_row + r0) * p.out_stride + first_column;
    store_transposed(sums, padded, columns, count, p.bias ? p.bias + first_column : nullptr, out, p.out_stride);
  }
}

// Weights contiguous along the output dimension: they are the vectors.
template <class Weight>
void rows_times_vector_weights(const ExpertProduct<Weight>& p, int64_t first_row, int64_t row_count, int64_t first_column,
                               int64_t columns) {
  const RowsOf<Weight> weights{p.matrix, p.matrix_k, nullptr};
  for (int64_t n0 = 0; n0 < columns; n0 += TILE_COLUMNS) {
    const int64_t width = std::min<int64_t>(TILE_COLUMNS, columns - n0), column = first_column + n0;
    for (int64_t k0 = 0; k0 < p.depth; k0 += SUM_BLOCK) {
      const int64_t depth = std::min(SUM_BLOCK, p.depth - k0);
      float* panel = packed_weights.get(depth * TILE_COLUMNS);
      const int64_t step = pack_panel(weights, k0, depth, column, width, panel);
      if (!p.rows.index) {
        column_block(row_count, width, depth, p.rows[first_row] + k0, p.rows.stride, 1, panel, step,
                     p.out + first_row * p.out_stride + column, p.out_stride, k0 > 0);
      } else {
        for (int64_t r = 0; r < row_count; ++r)
          column_block(1, width, depth, p.rows[first_row + r] + k0, 0, 1, panel, step,
                       p.out + (first_row + r) * p.out_stride + column, p.out_stride, k0 > 0);
      }
    }
    if (p.bias)
      for (int64_t r = 0; r < row_count; ++r) {
        float* out = p.out + (first_row + r) * p.out_stride + column;
        for (int64_t n = 0; n < width; ++n) out[n] += p.bias[column + n];
      }
  }
}

// gradient (columns of left x columns of right) = sum over rows of left[row]^T right[row]; gradient contiguous along right.
// Written in long runs of its rows: it is the largest thing that the whole backward writes.
void sum_of_outer_products(const RowSource& left, const RowSource& right, int64_t first_row, int64_t row_count,
                           int64_t first_left, int64_t left_columns, int64_t right_columns, float* gradient,
                           int64_t gradient_row) {
  for (int64_t super = 0; super < right_columns; super += RIGHT_BLOCK) {
    const int64_t columns = std::min(RIGHT_BLOCK, right_columns - super);
    for (int64_t r0 = 0; r0 < row_count; r0 += SUM_BLOCK) {
      const int64_t depth = std::min(SUM_BLOCK, row_count - r0);
      float* vectors = packed_weights.get(depth * (columns + TILE_COLUMNS));
      for (int64_t n0 = 0; n0 < columns; n0 += TILE_COLUMNS)
        pack_panel(right, first_row + r0, depth, super + n0, std::min<int64_t>(TILE_COLUMNS, columns - n0),
                   vectors + n0 * depth);
      for (int64_t o = first_left; o < first_left + left_columns; o += TILE_ROWS) {
        const int64_t count = std::min<int64_t>(TILE_ROWS, first_left + left_columns - o);
        float* scalars = packed_rows.get(depth * TILE_ROWS);
        for (int64_t r = 0; r < depth; ++r) {
          const float* source = left[first_row + r0 + r] + o;
          for (int64_t i = 0; i < count; ++i) scalars[r * TILE_ROWS + i] = source[i];
        }
        for (int64_t n0 = 0; n0 < columns; n0 += TILE_COLUMNS) {
          const int64_t width = std::min<int64_t>(TILE_COLUMNS, columns - n0);
          column_block(count, width, depth, scalars, 1, TILE_ROWS, vectors + n0 * depth,
                       round_up(width, LANES), gradient + o * gradient_row + super + n0, gradient_row,
                       r0 > 0);
        }
      }
    }
  }
}

struct ColumnCuts {  // how many column chunks to cut each expert into, so that every thread finds work
  int64_t width, per_expert;
  ColumnCuts(int64_t columns, int64_t experts, int threads, int64_t unit) {
    const int64_t wanted = threads <= 1 ? 1 : std::max<int64_t>(1, 6 * threads / std::max<int64_t>(1, experts));
    width = std::max(unit, round_up(ceil_div(columns, wanted), unit));
    per_expert = ceil_div(columns, width);
  }
};

inline int64_t start_of(const int32_t* offs, int64_t e) { return e ? offs[e - 1] : 0; }

// Calls visit(product, first row, rows, first column, columns), of one expert each, in parallel.
template <class Weight, class Visit>
void each_part(int64_t experts, const int32_t* offs, const ExpertProduct<Weight>& all, int64_t matrix_e,
               int64_t columns, int threads, const Visit& visit) {
  const ColumnCuts cuts(columns, experts, threads, TILE_COLUMNS);
  run_jobs(experts * cuts.per_expert, threads, [&](int64_t job) {
    const int64_t e = job / cuts.per_expert, first = job % cuts.per_expert * cuts.width;
    ExpertProduct<Weight> product = all;
    product.matrix += e * matrix_e;
    if (all.bias) product.bias += e * columns;
    for (int64_t r = start_of(offs, e); r < offs[e]; r += ROW_BLOCK)
      visit(product, r, std::min<int64_t>(ROW_BLOCK, offs[e] - r), first, std::min(cuts.width, columns - first));
  });
}

}  // namespace
}  // namespace amoeba
