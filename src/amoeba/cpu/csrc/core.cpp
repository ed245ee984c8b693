// The CPU core: matrix products over sorted rows, all experts of a pass in one job list, in fp32.
//
// Decoding also reads bf16 weights. Compiled on first use for the machine it runs on (see build.py). Vectors are GCC/Clang vector extensions, so one source
// serves AVX-512, AVX2 and NEON. Plain C interface at the end of the file; the caller has checked dtypes, shapes, strides.
//
// The weights are the large operand and are used once per pass for the few rows of each expert (tens to hundreds), so no
// product packs or transposes them more than a plain copy costs:
//   weight rows contiguous along the summed dimension -> weights are broadcast, the transposed rows are the vectors
//   weight rows contiguous along the output dimension -> weights are the vectors, the rows are broadcast
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 4;  // 32 registers: 6 x 4 accumulators, 4 vectors, a broadcast
#elif defined(__AVX__)
constexpr int LANES = 8, VECTORS = 2;   // 16 registers: 6 x 2 accumulators
#else
constexpr int LANES = 4, VECTORS = 4;   // NEON: 32 registers
#endif
constexpr int TILE_ROWS = 6;
constexpr int TILE_COLUMNS = LANES * VECTORS;
constexpr int64_t SUM_BLOCK = 256;      // of the summed dimension: a packed panel of 128 x 64 stays in the L1 cache
constexpr int64_t RIGHT_BLOCK = 512;    // columns of a gradient whose packed right side stays in the L2 cache
constexpr int64_t ROW_BLOCK = 4 * TILE_COLUMNS;

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

inline Vector load(const float* p) { return *reinterpret_cast<const Vector*>(p); }
inline void store(float* p, Vector v) { *reinterpret_cast<Vector*>(p) = v; }

struct Buffer {  // grows, never shrinks, one per thread
  float* data = nullptr;
  size_t size = 0;
  float* get(size_t count) {
    if (count > size) {
      std::free(data);
      size = (count + 1023) / 1024 * 1024;
      data = static_cast<float*>(std::aligned_alloc(64, size * sizeof(float)));
      if (!data) std::abort();
    }
    return data;
  }
  ~Buffer() { std::free(data); }
};
thread_local Buffer packed_rows, packed_weights, tile_sums;

// c (rows x vectors) = [c +] a (rows x depth) . b (depth x vectors); a at any strides, b and c contiguous along a vector.
template <int R, int V>
void tile(int64_t depth, const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step, float* c,
          int64_t c_row, bool add) {
  Vector sum[R][V];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) sum[i][j] = add ? load(c + i * c_row + j * LANES) : Vector{};
  for (int64_t k = 0; k < depth; ++k) {
    Vector right[V];
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) right[j] = load(b + j * LANES);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const Vector left = a[i * a_row] - Vector{};
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

template <int V>
Tile tile_of_rows(int64_t rows) {
  switch (rows) {
    case 1: return tile<1, V>;
    case 2: return tile<2, V>;
    case 3: return tile<3, V>;
    case 4: return tile<4, V>;
    case 5: return tile<5, V>;
    default: return tile<6, V>;
  }
}

Tile tile_for(int64_t rows, int64_t vectors) {
  switch (vectors) {
    case 1: return tile_of_rows<1>(rows);
    case 2: return tile_of_rows<2>(rows);
#if !defined(__AVX__) || defined(__AVX512F__)
    case 3: return tile_of_rows<3>(rows);
    case 4: return tile_of_rows<4>(rows);
#endif
    default: std::abort();
  }
}

// Columns [first, first + width) of a product, width <= TILE_COLUMNS, for all `rows` rows of a. A width that is no
// multiple of the vector goes through `scratch` so that nothing beside it is touched.
void column_block(int64_t rows, int64_t width, int64_t depth, const float* a, int64_t a_row, int64_t a_step,
                  const float* b, int64_t b_step, float* c, int64_t c_row, bool add) {
  const int64_t vectors = (width + LANES - 1) / LANES;
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

struct RowSource {  // row r of a matrix whose rows are picked by an index, or lie one after another without one
  const float* data;
  int64_t stride;
  const int64_t* index;
  const float* operator[](int64_t r) const { return data + (index ? index[r] : r) * stride; }
};

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
int64_t pack_panel(const RowSource& rows, int64_t first_k, int64_t depth, int64_t column, int64_t width, float* packed) {
  const int64_t padded = (width + LANES - 1) / LANES * LANES;
  for (int64_t k = 0; k < depth; ++k) {
    const float* source = rows[first_k + k] + column;
    float* out = packed + k * padded;
    int64_t j = 0;
    for (; j + LANES <= width; j += LANES) store(out + j, load(source + j));
    for (; j < width; ++j) out[j] = source[j];
    for (; j < padded; ++j) out[j] = 0;
  }
  return padded;
}

struct Product {  // one expert's part of: out = rows . matrix (+ bias)
  RowSource rows;
  const float* matrix;
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
void rows_times_broadcast_weights(const Product& p, int64_t first_row, int64_t row_count, int64_t first_column,
                                  int64_t columns) {
  for (int64_t r0 = 0; r0 < row_count; r0 += TILE_COLUMNS) {
    const int64_t count = std::min<int64_t>(TILE_COLUMNS, row_count - r0);
    const int64_t padded = (count + LANES - 1) / LANES * LANES;
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
void rows_times_vector_weights(const Product& p, int64_t first_row, int64_t row_count, int64_t first_column,
                               int64_t columns) {
  const RowSource weights{p.matrix, p.matrix_k, nullptr};
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
                       (width + LANES - 1) / LANES * LANES, gradient + o * gradient_row + super + n0, gradient_row,
                       r0 > 0);
        }
      }
    }
  }
}

template <class Job>
void run_jobs(int64_t count, int threads, const Job& job) {
  std::atomic<int64_t> next{0};
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1 && count > 1)
#endif
  for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) job(i);
}

struct Chunks {  // how many column chunks to cut each expert into, so that every thread finds work
  int64_t width, per_expert;
  Chunks(int64_t columns, int64_t experts, int threads, int64_t unit) {
    const int64_t wanted = threads <= 1 ? 1 : std::max<int64_t>(1, 6 * threads / std::max<int64_t>(1, experts));
    width = std::max(unit, ((columns + wanted - 1) / wanted + unit - 1) / unit * unit);
    per_expert = (columns + width - 1) / width;
  }
};

inline int64_t start_of(const int32_t* offs, int64_t e) { return e ? offs[e - 1] : 0; }

inline float sum_lanes(Vector v) {
  float lanes[LANES];
  std::memcpy(lanes, &v, sizeof(lanes));
  for (int width = LANES / 2; width; width /= 2)  // pairwise, so that the compiler halves the vector each time
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

struct Bf16 {  // the upper half of a float
  uint16_t bits;
  operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
  }
};
typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t)), aligned(2), may_alias));
typedef uint32_t Words __attribute__((vector_size(LANES * sizeof(uint32_t))));

inline Vector load(const Bf16* p) {
  const Words wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(p), Words) << 16;
  Vector value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

constexpr int WEIGHT_ROWS = 4;  // rows of a weight that one pass over the input rows serves

// out[j][r] = <w_j, rows[r]> for W rows of a weight and R input rows at once.
template <int W, int R, class Weight>
inline void dots(const Weight* w, int64_t w_row, const float* const* rows, int64_t n, float out[][4]) {
  Vector sum[W][R] = {};
  int64_t k = 0;
  for (; k + LANES <= n; k += LANES) {
    Vector right[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) right[r] = load(rows[r] + k);
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) {
      const Vector left = load(w + j * w_row + k);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[j][r] += left * right[r];
    }
  }
  for (int j = 0; j < W; ++j)
    for (int r = 0; r < R; ++r) {
      float total = sum_lanes(sum[j][r]);
      for (int64_t i = k; i < n; ++i) total += float(w[j * w_row + i]) * rows[r][i];
      out[j][r] = total;
    }
}

template <int W, class Weight>
inline void dots(int64_t count, const Weight* w, int64_t w_row, const float* const* rows, int64_t n, float out[][4]) {
  switch (count) {
    case 1: return dots<W, 1>(w, w_row, rows, n, out);
    case 2: return dots<W, 2>(w, w_row, rows, n, out);
    case 3: return dots<W, 3>(w, w_row, rows, n, out);
    default: return dots<W, 4>(w, w_row, rows, n, out);
  }
}

// Calls take(j, products of weight row j with each of the `count` rows) for every j in [from, to).
template <class Weight, class Take>
inline void each_weight_row(const Weight* w, int64_t w_row, int64_t from, int64_t to, int64_t count,
                            const float* const* rows, int64_t n, const Take& take) {
  float products[WEIGHT_ROWS][4];
  int64_t j = from;
  for (; j + WEIGHT_ROWS <= to; j += WEIGHT_ROWS) {
    dots<WEIGHT_ROWS>(count, w + j * w_row, w_row, rows, n, products);
    for (int i = 0; i < WEIGHT_ROWS; ++i) take(j + i, products[i]);
  }
  for (; j < to; ++j) {
    dots<1>(count, w + j * w_row, w_row, rows, n, products);
    take(j, products[0]);
  }
}

typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t))));

inline Vector pick(Integers mask, Vector yes, Vector no) { return mask ? yes : no; }

// exp by reduction to [-ln2/2, ln2/2] and a polynomial of degree 6; relative error below 2e-7.
inline Vector exponential(Vector x) {
  x = pick(x > 88.0f, Vector{} + 88.0f, x);
  x = pick(x < -87.0f, Vector{} - 87.0f, x);
  const Vector n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;  // rounds to the nearest integer
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Integers power = (__builtin_convertvector(n, Integers) + 127) << 23;
  Vector scale;
  std::memcpy(&scale, &power, sizeof(scale));
  return p * scale;
}

struct Swiglu {  // gate and up concatenated; alpha, limit and up_shift as in config.Activation
  float alpha, limit, up_shift;
  bool clamped;

  struct Values {
    Vector gate, up, sigmoid, value;
  };
  Values at(const float* gate_row, const float* up_row, int64_t i) const {
    Values v{load(gate_row + i), load(up_row + i), {}, {}};
    if (clamped) {
      v.gate = pick(v.gate > limit, Vector{} + limit, v.gate);
      v.up = pick(v.up > limit, Vector{} + limit, pick(v.up < -limit, Vector{} - limit, v.up));
    }
    v.up += up_shift;
    v.sigmoid = 1.0f / (1.0f + exponential(v.gate * -alpha));
    v.value = v.gate * v.sigmoid;
    return v;
  }
};

enum Kind { SILU, GELU, GELU_TANH, RELU, RELU2 };

inline float act(float z, int kind, float alpha) {
  switch (kind) {
    case SILU: return z / (1.0f + std::exp(-alpha * z));
    case GELU: return 0.5f * z * (1.0f + std::erf(z * 0.70710678118654752f));
    case GELU_TANH: return 0.5f * z * (1.0f + std::tanh(0.79788456080286536f * (z + 0.044715f * z * z * z)));
    case RELU: return z > 0 ? z : 0;
    default: return z > 0 ? z * z : 0;
  }
}

// A few tokens through their experts, weights read where they lie and once per expert:
// y_t = sum_k s . (act(x W1^T + b1 + added) W2^T + b2). h and a are scratch of tokens * top_k rows, order of as many ints;
// added, rows of h that each slot gets on top, may be null.
// Weights are contiguous along the summed dimension.
template <class Weight>
void decode(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden, int64_t intermediate,
                       int64_t width, const float* x, int64_t x_stride, const int64_t* expert, const float* scale,
                       const Weight* gate_up, int64_t gate_up_e, int64_t gate_up_row, const float* gate_up_bias,
                       const float* added, const Weight* down, int64_t down_e, int64_t down_row, const float* down_bias, int kind,
                       int interleaved, float alpha, float limit, float up_shift, float* h, float* a, int64_t* order,
                       float* y, int threads) {
  const bool gated = width != intermediate;
  const Swiglu swiglu{alpha, limit, up_shift, std::isfinite(limit)};
  int64_t slots = 0;
  for (int64_t slot = 0; slot < tokens * top_k; ++slot)
    if (expert[slot] >= 0 && expert[slot] < experts) order[slots++] = slot;
  std::stable_sort(order, order + slots, [&](int64_t l, int64_t r) { return expert[l] < expert[r]; });

  // Calls visit(first, count) for up to four slots of one expert at a time.
  const auto each_group = [&](auto&& visit) {
    for (int64_t i = 0, next; i < slots; i = next) {
      for (next = i + 1; next < slots && next < i + 4 && expert[order[next]] == expert[order[i]];) ++next;
      visit(order + i, next - i);
    }
  };
  // Threads own fixed shares of the rows of a weight, so that each streams contiguous memory.
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
  {
#ifdef _OPENMP
    const int64_t self = omp_get_thread_num(), team = omp_get_num_threads();
#else
    const int64_t self = 0, team = 1;
#endif
    const int64_t lo = intermediate * self / team, hi = intermediate * (self + 1) / team;
    each_group([&](const int64_t* slot, int64_t count) {
      const int64_t e = expert[*slot];
      const Weight* w = gate_up + e * gate_up_e;
      const float* b = gate_up_bias ? gate_up_bias + e * width : nullptr;
      const float* rows[4];
      for (int64_t r = 0; r < count; ++r) rows[r] = x + slot[r] / top_k * x_stride;
      const auto project = [&](int64_t from, int64_t to) {
        each_weight_row(w, gate_up_row, from, to, count, rows, hidden, [&](int64_t j, const float* products) {
          for (int64_t r = 0; r < count; ++r) {
            const int64_t i = slot[r] * width + j;
            h[i] = products[r] + (b ? b[j] : 0.0f) + (added ? added[i] : 0.0f);
          }
        });
      };
      if (!gated) {
        project(lo, hi);
      } else if (interleaved) {
        project(2 * lo, 2 * hi);
      } else {
        project(lo, hi);
        project(lo + intermediate, hi + intermediate);
      }
      for (int64_t r = 0; r < count; ++r) {
        const float* mine = h + slot[r] * width;
        int64_t i = lo;
        if (gated && !interleaved && kind == SILU)
          for (; i + LANES <= hi; i += LANES) {
            const auto v = swiglu.at(mine, mine + intermediate, i);
            store(a + slot[r] * intermediate + i, v.value * v.up);
          }
        for (; i < hi; ++i) {
          float value = act(std::min(mine[gated && interleaved ? 2 * i : i], limit), kind, alpha);
          if (gated) {
            const float up = mine[interleaved ? 2 * i + 1 : i + intermediate];
            value *= std::min(std::max(up, -limit), limit) + up_shift;
          }
          a[slot[r] * intermediate + i] = value;
        }
      }
    });
#ifdef _OPENMP
#pragma omp barrier
#endif
    const int64_t first = hidden * self / team, last = hidden * (self + 1) / team;
    for (int64_t t = 0; t < tokens; ++t) std::memset(y + t * hidden + first, 0, (last - first) * sizeof(float));
    each_group([&](const int64_t* slot, int64_t count) {
      const int64_t e = expert[*slot];
      const Weight* w = down + e * down_e;
      const float* b = down_bias ? down_bias + e * hidden : nullptr;
      const float* rows[4];
      for (int64_t r = 0; r < count; ++r) rows[r] = a + slot[r] * intermediate;
      each_weight_row(w, down_row, first, last, count, rows, intermediate, [&](int64_t n, const float* products) {
        for (int64_t r = 0; r < count; ++r)
          y[slot[r] / top_k * hidden + n] += scale[slot[r]] * (products[r] + (b ? b[n] : 0.0f));
      });
    });
  }
}

}  // namespace

extern "C" {

int amoeba_lanes() { return LANES; }

// out[rows of e] = rows_of(e) . matrix_e (+ bias_e), for every expert; rows past offs[experts-1] are left as they are.
void amoeba_rows_f32(int64_t experts, const int32_t* offs, const float* rows, int64_t row_stride, const int64_t* index,
                     const float* matrix, int64_t matrix_e, int64_t matrix_k, int64_t matrix_n, const float* bias,
                     int64_t depth, int64_t columns, float* out, int64_t out_stride, int threads) {
  const Chunks chunks(columns, experts, threads, TILE_COLUMNS);
  run_jobs(experts * chunks.per_expert, threads, [&](int64_t job) {
    const int64_t e = job / chunks.per_expert, first = job % chunks.per_expert * chunks.width;
    const int64_t start = start_of(offs, e), end = offs[e], width = std::min(chunks.width, columns - first);
    const Product product{{rows, row_stride, index}, matrix + e * matrix_e, matrix_k, matrix_n,
                          bias ? bias + e * columns : nullptr, out, out_stride, depth};
    for (int64_t r = start; r < end; r += ROW_BLOCK) {
      const int64_t count = std::min<int64_t>(ROW_BLOCK, end - r);
      if (matrix_k == 1)
        rows_times_broadcast_weights(product, r, count, first, width);
      else
        rows_times_vector_weights(product, r, count, first, width);
    }
  });
}

// gradient_e = sum over the rows of e of left^T right, contiguous along right; zeros for an expert without rows.
void amoeba_weight_gradient_f32(int64_t experts, const int32_t* offs, const float* left, int64_t left_stride,
                                const int64_t* left_index, int64_t left_columns, const float* right,
                                int64_t right_stride, const int64_t* right_index, int64_t right_columns,
                                float* gradient, int64_t gradient_e, int64_t gradient_row, int threads) {
  const Chunks chunks(left_columns, experts, threads, 8 * TILE_ROWS);
  run_jobs(experts * chunks.per_expert, threads, [&](int64_t job) {
    const int64_t e = job / chunks.per_expert, first = job % chunks.per_expert * chunks.width;
    const int64_t start = start_of(offs, e), end = offs[e], width = std::min(chunks.width, left_columns - first);
    float* out = gradient + e * gradient_e;
    if (start == end) {
      for (int64_t i = first; i < first + width; ++i)
        std::memset(out + i * gradient_row, 0, right_columns * sizeof(float));
      return;
    }
    sum_of_outer_products({left, left_stride, left_index}, {right, right_stride, right_index}, start, end - start,
                          first, width, right_columns, out, gradient_row);
  });
}

// a = scale . swiglu(h), row by row; intermediate is a multiple of the vector.
void amoeba_swiglu_f32(int64_t rows, int64_t intermediate, const float* h, const float* scale, float alpha, float limit,
                       float up_shift, float* a, int threads) {
  const Swiglu swiglu{alpha, limit, up_shift, std::isfinite(limit)};
  constexpr int64_t STEP = 32;
  run_jobs((rows + STEP - 1) / STEP, threads, [&](int64_t job) {
    for (int64_t r = job * STEP; r < std::min(rows, (job + 1) * STEP); ++r) {
      const float *gate = h + r * 2 * intermediate, *up = gate + intermediate;
      for (int64_t i = 0; i < intermediate; i += LANES) {
        const auto v = swiglu.at(gate, up, i);
        store(a + r * intermediate + i, v.value * v.up * scale[r]);
      }
    }
  });
}

// From dA' (no scale in it yet): dh, scale . a (if wanted) and ds = <dA', a>, in one pass over the rows.
void amoeba_swiglu_backward_f32(int64_t rows, int64_t intermediate, const float* da, const float* h, const float* scale,
                                float alpha, float limit, float up_shift, float* dh, float* scaled_a, float* ds,
                                int threads) {
  const Swiglu swiglu{alpha, limit, up_shift, std::isfinite(limit)};
  constexpr int64_t STEP = 32;
  run_jobs((rows + STEP - 1) / STEP, threads, [&](int64_t job) {
    for (int64_t r = job * STEP; r < std::min(rows, (job + 1) * STEP); ++r) {
      const float *gate = h + r * 2 * intermediate, *up = gate + intermediate, *grad = da + r * intermediate;
      float *dgate = dh + r * 2 * intermediate, *dup = dgate + intermediate;
      Vector total{};
      for (int64_t i = 0; i < intermediate; i += LANES) {
        const auto v = swiglu.at(gate, up, i);
        const Vector a = v.value * v.up, g = load(grad + i), scaled = g * scale[r];
        const Vector slope = v.sigmoid * (1.0f + alpha * v.gate * (1.0f - v.sigmoid));
        Vector dg = scaled * v.up * slope, du = scaled * v.value;
        if (swiglu.clamped) {
          const Vector raw = load(up + i);
          dg = pick(load(gate + i) > limit, Vector{}, dg);
          du = pick((raw > limit) | (raw < -limit), Vector{}, du);
        }
        store(dgate + i, dg);
        store(dup + i, du);
        total += g * a;
        if (scaled_a) store(scaled_a + r * intermediate + i, a * scale[r]);
      }
      ds[r] = sum_lanes(total);
    }
  });
}

#define AMOEBA_DECODE(NAME, Weight)                                                                                   \
  void NAME(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden, int64_t intermediate, int64_t width,      \
            const float* x, int64_t x_stride, const int64_t* expert, const float* scale, const Weight* gate_up,       \
            int64_t gate_up_e, int64_t gate_up_row, const float* gate_up_bias, const float* added, const Weight* down, \
            int64_t down_e, int64_t down_row, const float* down_bias, int kind, int interleaved, float alpha,         \
            float limit, float up_shift, float* h, float* a, int64_t* order, float* y, int threads) {                 \
    decode<Weight>(tokens, top_k, experts, hidden, intermediate, width, x, x_stride, expert, scale, gate_up,          \
                   gate_up_e, gate_up_row, gate_up_bias, added, down, down_e, down_row, down_bias, kind, interleaved, \
                   alpha, limit, up_shift, h, a, order, y, threads);                                                  \
  }
AMOEBA_DECODE(amoeba_decode_f32, float)
AMOEBA_DECODE(amoeba_decode_bf16, Bf16)

}  // extern "C"
