// A few tokens through all of their layer in one call; weights in fp32, bf16 or codes, read where they lie.
#pragma once
#include <type_traits>

#include "codes.h"
#include "core_activation.h"
#ifdef _OPENMP
#include <omp.h>
#endif

namespace amoeba {
namespace {

constexpr int WEIGHT_ROWS = 4;  // rows of a weight that one pass over the input rows serves

// out[j][r] = <w_j, rows[r]> for W rows of a weight and R input rows at once, with the same bits for every W and R: the
// number of threads decides which is taken. next: the W rows that come after these,
// fetched meanwhile: a row is a page or less, at whose end the hardware's own prefetching begins anew.
template <int W, int R, class Weight>
inline void dots(const Weight* w, const Weight* next, int64_t w_row, const float* const* rows, int64_t n,
                 float out[][4]) {
  constexpr int64_t LINE = 64 / sizeof(Weight);
  Floats sum[W][R] = {};
  int64_t k = 0;
  for (; k + LANES <= n; k += LANES) {
    if (LANES >= LINE || k % LINE == 0) {
#pragma GCC unroll 4
      for (int j = 0; j < W; ++j) __builtin_prefetch(next + j * w_row + k, 0, 2);
    }
    Floats right[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) right[r] = load<LANES>(rows[r] + k);
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) {
      const Floats left = load<LANES>(w + j * w_row + k);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[j][r] = multiply_add(left, right[r], sum[j][r]);
    }
  }
  for (int j = 0; j < W; ++j)
    for (int r = 0; r < R; ++r) {
      float product = total(sum[j][r]);
      for (int64_t i = k; i < n; ++i) product = multiply_add(widen(w[j * w_row + i]), rows[r][i], product);
      out[j][r] = product;
    }
}

// The same of codes, 32 columns at a time, whose sum is multiplied by their scale: nothing of a weight is rounded. With
// HALVES each sixteen have a scale of their own. scales: those of each of the W rows, for one block after the other.
// A row's codes meet all input rows before the next row's do, so that sums and numbers have registers enough.
template <class Element, bool HALVES, int W, int R>
[[gnu::noinline]] void coded_dots(const uint8_t* w, const uint8_t* next, int64_t w_row, const RowScales* scales,
                                  const ScaleAxis& axis, const float* const* rows, int64_t n, float out[][4]) {
  constexpr int VECTORS = CODES / LANES;
  Floats sum[W][R] = {};
  const auto add = [&](int j, const Numbers& first, const Numbers& last, float scale, float last_scale,
                       const auto& right) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const float* x = right(r);
      Floats part = first.at[0] * load<LANES>(x);
#pragma GCC unroll 4
      for (int v = 1; v < VECTORS; ++v) part += first.at[v] * load<LANES>(x + v * LANES);
      if (HALVES) {
        sum[j][r] += part * scale;
        part = last.at[0] * load<LANES>(x + CODES);
      } else {
        part += last.at[0] * load<LANES>(x + CODES);
      }
#pragma GCC unroll 4
      for (int v = 1; v < VECTORS; ++v) part += last.at[v] * load<LANES>(x + CODES + v * LANES);
      sum[j][r] += part * last_scale;
    }
  };
  int64_t k = 0;
  for (; k + 2 * CODES <= n; k += 2 * CODES) {
    const int64_t at = axis.at(k), last_at = HALVES ? axis.at(k + CODES) : at;
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) {
      const uint8_t* p = w + j * w_row + Element::bytes(k);
      if (Element::bytes(k) % 64 == 0) __builtin_prefetch(next + j * w_row + Element::bytes(k), 0, 2);
      add(j, Element::load(p), Element::load(p + Element::bytes(CODES)), scales[j].without_whole(at),
          scales[j].without_whole(last_at), [&](int r) { return rows[r] + k; });
    }
  }
  if (const int64_t left = n - k; left > 0) {
    const int64_t at = axis.at(k), last_at = left > CODES ? axis.at(k + CODES) : at;
    alignas(64) float x[R][2 * CODES] = {};
    for (int r = 0; r < R; ++r) std::memcpy(x[r], rows[r] + k, size_t(left) * sizeof(float));
    for (int j = 0; j < W; ++j) {
      const uint8_t* row = w + j * w_row;
      const Numbers last = left > CODES ? load_codes<Element>(row, k + CODES, left - CODES) : Numbers{};
      add(j, load_codes<Element>(row, k, left), last, scales[j].without_whole(at), scales[j].without_whole(last_at),
          [&](int r) { return x[r]; });
    }
  }
  for (int j = 0; j < W; ++j)
    for (int r = 0; r < R; ++r) out[j][r] = total(sum[j][r]) * scales[j].whole;
}

// Calls with the number of rows, one to four, as a constant.
template <class Call>
inline void with_count(int64_t count, const Call& call) {
  switch (count) {
    case 1: return call(std::integral_constant<int, 1>{});
    case 2: return call(std::integral_constant<int, 2>{});
    case 3: return call(std::integral_constant<int, 3>{});
    default: return call(std::integral_constant<int, 4>{});
  }
}

// A weight (expert, row, k), contiguous along k: dots<W> of its rows j .. j + W with `count` rows; next: as above.
template <class Weight>
struct PlainMatrix {
  using Element = Weight;
  const Weight* data;
  int64_t stride_e, stride_row;
  static PlainMatrix of(const Weight* data, int64_t stride_e, int64_t stride_row, const Coding*) {
    return {data, stride_e, stride_row};
  }

  template <int W>
  void dots(int64_t e, int64_t j, int64_t next, int64_t count, const float* const* rows, int64_t n,
            float out[][4]) const {
    const Weight* w = data + e * stride_e;
    with_count(count, [&](auto r) {
      amoeba::dots<W, r>(w + j * stride_row, w + next * stride_row, stride_row, rows, n, out);
    });
  }
};

template <class Codes>
struct CodedMatrix {
  using Element = uint8_t;
  const uint8_t* data;
  int64_t stride_e, stride_row;
  Coding coding;
  static CodedMatrix of(const uint8_t* data, int64_t stride_e, int64_t stride_row, const Coding* coding) {
    return {data, stride_e, stride_row, *coding};
  }

  template <int W>
  void dots(int64_t e, int64_t j, int64_t next, int64_t count, const float* const* rows, int64_t n,
            float out[][4]) const {
    const uint8_t* w = data + e * stride_e;
    RowScales scales[W];
    for (int i = 0; i < W; ++i) scales[i] = coding.of_row(e, j + i);
    const auto run = [&](auto r, int64_t first, float(*into)[4]) {
      auto* const dots = coding.column.shift == 4 ? coded_dots<Codes, true, W, r> : coded_dots<Codes, false, W, r>;
      dots(w + j * stride_row, w + next * stride_row, stride_row, scales, coding.column, rows + first, n, into);
    };
    if constexpr (W > 1) return with_count(count, [&](auto r) { run(r, 0, out); });
    for (int64_t r = 0; r < count; ++r) {  // the few rows at the end of a share
      float product[1][4];
      run(std::integral_constant<int, 1>{}, r, product);
      out[0][r] = product[0][0];
    }
  }
};

// Blocks: some columns of the rows are made numbers, and these multiplied, until the row ends.
// The same of nf4, in registers: a block's 64 numbers meet each row before their scale does. n: whole blocks.
template <int W, int R>
[[gnu::noinline]] void nf4_dots(const uint8_t* w, int64_t w_row, const float* const* rows, int64_t n, float out[][4]) {
  Floats sum[W][R] = {};
  for (int64_t k = 0; k < n; k += Nf4::NUMBERS, w += Nf4::BYTES)
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) {
      const uint8_t* block = w + j * w_row;
      Floats part[R] = {};
#pragma GCC unroll 8
      for (int i = 0; i < GROUP; i += LANES) {
        const Words codes = load_bytes(block + 4 + i);
        const Floats low = nf4_of(codes), high = nf4_of(codes >> 4);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          part[r] += low * load<LANES>(rows[r] + k + i);
          part[r] += high * load<LANES>(rows[r] + k + GROUP + i);
        }
      }
      float scale;
      std::memcpy(&scale, block, sizeof(scale));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[j][r] += part[r] * scale;
    }
  for (int j = 0; j < W; ++j)
    for (int r = 0; r < R; ++r) out[j][r] = total(sum[j][r]);
}

struct BlocksMatrix {
  using Element = uint8_t;
  static constexpr int64_t COLUMNS = 512;  // at once: a multiple of all blocks, whose numbers stay in the first cache
  const uint8_t* data;
  int64_t stride_e, stride_row;
  Unpack unpack;
  static BlocksMatrix of(const uint8_t* data, int64_t stride_e, int64_t stride_row, const Coding* coding) {
    return {data, stride_e, stride_row, unpack_of(coding->element)};
  }

  template <int W>
  void dots(int64_t e, int64_t j, int64_t next, int64_t count, const float* const* rows, int64_t n,
            float out[][4]) const {
    alignas(64) float numbers[W][COLUMNS];
    const uint8_t* w = data + e * stride_e;
    for (int i = 0; i < W; ++i)
      for (int64_t at = 0; at < stride_row; at += 64) __builtin_prefetch(w + (next + i) * stride_row + at, 0, 2);
    if (unpack == amoeba::unpack<Nf4> && n % Nf4::NUMBERS == 0)
      return with_count(count, [&](auto r) { nf4_dots<W, r>(w + j * stride_row, stride_row, rows, n, out); });
    for (int i = 0; i < W; ++i) std::fill_n(out[i], 4, 0.0f);
    for (int64_t k = 0; k < n; k += COLUMNS) {
      const int64_t some = std::min(COLUMNS, n - k);
      for (int i = 0; i < W; ++i) unpack(w + (j + i) * stride_row, k, round_up(some, GROUP), numbers[i]);
      const float* right[4];
      for (int64_t r = 0; r < count; ++r) right[r] = rows[r] + k;
      with_count(count, [&](auto r) {
        float part[W][4];
        amoeba::dots<W, r>(numbers[0], numbers[0], COLUMNS, right, some, part);
        for (int i = 0; i < W; ++i)
          for (int l = 0; l < r; ++l) out[i][l] += part[i][l];
      });
    }
  }
};

// Calls take(j, products of weight row j with each of the `count` rows) for every j in [from, to). after: the row that
// the caller reads next.
template <class Matrix, class Take>
inline void each_weight_row(const Matrix& w, int64_t e, int64_t from, int64_t to, int64_t after, int64_t count,
                            const float* const* rows, int64_t n, const Take& take) {
  float products[WEIGHT_ROWS][4];
  int64_t j = from;
  for (; j + WEIGHT_ROWS <= to; j += WEIGHT_ROWS) {
    const int64_t next = j + WEIGHT_ROWS < to ? j + WEIGHT_ROWS : after;
    w.template dots<WEIGHT_ROWS>(e, j, next, count, rows, n, products);
    for (int i = 0; i < WEIGHT_ROWS; ++i) take(j + i, products[i]);
  }
  for (; j < to; ++j) {
    w.template dots<1>(e, j, j, count, rows, n, products);
    take(j, products[0]);
  }
}

// Slots that have an expert here, by their keys; returns how many.
inline int64_t sort_slots(int64_t count, int64_t experts, const int64_t* expert, const int64_t* key, int64_t* order) {
  int64_t slots = 0;
  for (int64_t slot = 0; slot < count; ++slot)
    if (expert[slot] >= 0 && expert[slot] < experts) order[slots++] = slot;
  std::stable_sort(order, order + slots, [&](int64_t l, int64_t r) { return key[l] < key[r]; });
  return slots;
}

// The sums of `decode` alone, added up in its order and in its way, where its experts came in several calls: rows are
// what those gave for slots that were tokens of weight 1.
inline void sum_decoded(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden, const int64_t* expert,
                        const float* scale, const float* rows, int64_t row_stride, int64_t* order, float* y) {
  const int64_t slots = sort_slots(tokens * top_k, experts, expert, expert, order);
  std::memset(y, 0, tokens * hidden * sizeof(float));
  for (int64_t i = 0; i < slots; ++i) {
    const int64_t slot = order[i];
    const float* row = rows + slot * row_stride;
    float* sum = y + slot / top_k * hidden;
    for (int64_t n = 0; n < hidden; ++n) sum[n] += scale[slot] * row[n];
  }
}

// A few tokens through their experts, weights read where they lie and once per expert:
// y_t = sum_k s . (act(x W1^T + b1 + added) W2^T + b2). h and a are scratch of tokens * top_k rows, order of as many ints;
// added, rows of h that each slot gets on top, may be null. So may key, other numbers of the experts, in whose order
// they are added up.
// Weights are contiguous along the summed dimension.
//
// In two parts, each cut into fixed shares of the rows of a weight, so that each share streams contiguous memory: all of
// `up`, then all of `down`.
template <class Matrix>
struct Decoding {
  int64_t tokens, top_k, experts, hidden, intermediate, width;
  const float* x;
  int64_t x_stride;
  const int64_t *expert, *key;
  const float* scale;
  Matrix gate_up;
  const float *gate_up_bias, *added;
  Matrix down;
  const float* down_bias;
  int kind, interleaved;
  float alpha, limit, up_shift;
  float *h, *a;
  int64_t* order;
  float* y;
  int64_t slots = 0;

  void sort() { slots = sort_slots(tokens * top_k, experts, expert, key ? key : expert, order); }

  void up_share(int64_t self, int64_t team) const {
    const bool gated = width != intermediate;
    const Swiglu swiglu{alpha, limit, up_shift, std::isfinite(limit)};
    const int64_t lo = intermediate * self / team, hi = intermediate * (self + 1) / team;
    each_group([&](const int64_t* slot, int64_t count) {
      const int64_t e = expert[*slot];
      const float* b = gate_up_bias ? gate_up_bias + e * width : nullptr;
      const float* rows[4];
      for (int64_t r = 0; r < count; ++r) rows[r] = x + slot[r] / top_k * x_stride;
      const auto project = [&](int64_t from, int64_t to, int64_t after) {
        each_weight_row(gate_up, e, from, to, after, count, rows, hidden, [&](int64_t j, const float* products) {
          for (int64_t r = 0; r < count; ++r) {
            const int64_t i = slot[r] * width + j;
            h[i] = products[r] + (b ? b[j] : 0.0f) + (added ? added[i] : 0.0f);
          }
        });
      };
      if (!gated) {
        project(lo, hi, lo);
      } else if (interleaved) {
        project(2 * lo, 2 * hi, 2 * lo);
      } else {
        project(lo, hi, lo + intermediate);
        project(lo + intermediate, hi + intermediate, lo + intermediate);
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
  }

  void down_share(int64_t self, int64_t team) const {
    const int64_t first = hidden * self / team, last = hidden * (self + 1) / team;
    for (int64_t t = 0; t < tokens; ++t) std::memset(y + t * hidden + first, 0, (last - first) * sizeof(float));
    each_group([&](const int64_t* slot, int64_t count) {
      const int64_t e = expert[*slot];
      const float* b = down_bias ? down_bias + e * hidden : nullptr;
      const float* rows[4];
      for (int64_t r = 0; r < count; ++r) rows[r] = a + slot[r] * intermediate;
      each_weight_row(down, e, first, last, first, count, rows, intermediate, [&](int64_t n, const float* products) {
        for (int64_t r = 0; r < count; ++r)
          y[slot[r] / top_k * hidden + n] += scale[slot[r]] * (products[r] + (b ? b[n] : 0.0f));
      });
    });
  }

 private:
  // Calls visit(first, count) for up to four slots of one expert at a time.
  template <class Visit>
  void each_group(const Visit& visit) const {
    for (int64_t i = 0, next; i < slots; i = next) {
      for (next = i + 1; next < slots && next < i + 4 && expert[order[next]] == expert[order[i]];) ++next;
      visit(order + i, next - i);
    }
  }
};

// All of it, by OpenMP's threads.
template <class Matrix>
void decode(Decoding<Matrix> decoding, [[maybe_unused]] int threads) {
  decoding.sort();
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
  {
#ifdef _OPENMP
    const int64_t self = omp_get_thread_num(), team = omp_get_num_threads();
#else
    const int64_t self = 0, team = 1;
#endif
    decoding.up_share(self, team);
#ifdef _OPENMP
#pragma omp barrier
#endif
    decoding.down_share(self, team);
  }
}

}  // namespace
}  // namespace amoeba

// A function of the library. coding: that of codes, else null.
#define AMOEBA_DECODE(NAME, Matrix)                                                                                   \
  void NAME(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden, int64_t intermediate, int64_t width,      \
            const float* x, int64_t x_stride, const int64_t* expert, const int64_t* key, const float* scale,          \
            const Matrix::Element* gate_up, int64_t gate_up_e, int64_t gate_up_row, const Coding* gate_up_coding,     \
            const float* gate_up_bias, const float* added, const Matrix::Element* down, int64_t down_e,               \
            int64_t down_row, const Coding* down_coding, const float* down_bias, int kind, int interleaved,           \
            float alpha, float limit, float up_shift, float* h, float* a, int64_t* order, float* y, int threads) {    \
    decode<Matrix>({tokens, top_k, experts, hidden, intermediate, width, x, x_stride, expert, key, scale,             \
                    Matrix::of(gate_up, gate_up_e, gate_up_row, gate_up_coding), gate_up_bias, added,                 \
                    Matrix::of(down, down_e, down_row, down_coding), down_bias, kind, interleaved, alpha, limit,      \
                    up_shift, h, a, order, y},                                                                        \
                   threads);                                                                                          \
  }
