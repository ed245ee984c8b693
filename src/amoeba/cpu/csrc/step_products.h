// Products of a weight matrix with a few rows in fp32, for a decode step: every weight is read once from memory, where it
// lies, in whatever form it has.
//
// Weights of whole numbers (int8 in tiles, e2m1 with scales of 32) meet rows in fixed point of 16 bits, as two planes of
// 8 bits, where the CPU has dot products of bytes: that rounds a row to 1.5e-5 of its largest number, far below what
// bf16 does, and costs no time beyond that of reading the weights. Elsewhere weights become floats.
//
// Each result is summed by one thread in an order of its own, so it does not depend on how many threads there are.
#pragma once
#include "core_decode.h"
#include "packed_layout.h"

#if defined(AMOEBA_AVX512)
#define AMOEBA_BYTE_DOTS 1
#elif defined(AMOEBA_SDOT)
#define AMOEBA_BYTE_DOTS 1
#endif

namespace [[gnu::visibility("hidden")]] amoeba {

enum MatrixKind : int64_t { ROWS_F32, ROWS_BF16, ROWS_E4M3, ROWS_E2M1, TILES_BF16, TILES_INT8 };

struct StepMatrix {  // (experts, out, in); the order of `CStepMatrix` in step_library.py
  int64_t kind, out, in;
  const void* data;              // null: there is none
  int64_t stride_e, stride_row;  // of rows, in elements
  const float* scale;            // of int8: of each output
  const int32_t* sum;            // of int8: of each output's weights
  const float* bias;             // (experts, out), may be null
  Coding coding;
};

// Rows of fp32, and what the products make of them beforehand.
struct Planes {
  int8_t *high = nullptr, *low = nullptr;  // of each row `stride` bytes
  int32_t* fix = nullptr;                  // of e2m1 with AVX-512, a quarter as many
  float* scale = nullptr;                  // of each row
};
struct StepRows {
  const float* x = nullptr;
  int64_t stride = 0, count = 0, length = 0;
  int64_t plane_stride = 0;
  float* pairs = nullptr;  // for bf16: of each 2 LANES numbers the even ones, then the odd ones; `plane_stride` a row
  Planes tiles, blocks;  // in the order of columns, for int8; in that of the nibbles, for e2m1
};

constexpr int64_t PLANE_UNIT = 64;

inline bool by_blocks(const StepMatrix& m) {
#ifdef AMOEBA_BYTE_DOTS
  return m.kind == ROWS_E2M1 && m.coding.column.shift == 5 && m.coding.scale_values;
#else
  return false;
#endif
}
inline bool by_planes(const StepMatrix& m) {
#ifdef AMOEBA_BYTE_DOTS
  return m.kind == TILES_INT8;
#else
  return false;
#endif
}

inline void prepare_pairs(StepRows& rows) {
  for (int64_t r = 0; r < rows.count; ++r) {
    const float* x = rows.x + r * rows.stride;
    float* out = rows.pairs + r * rows.plane_stride;
    for (int64_t k = 0; k + 2 * LANES <= rows.length; k += 2 * LANES)
      for (int64_t i = 0; i < LANES; ++i) {
        out[k + i] = x[k + 2 * i];
        out[k + LANES + i] = x[k + 2 * i + 1];
      }
  }
}

#ifdef AMOEBA_BYTE_DOTS
constexpr float MOST = 32512;  // 127 * 256: the upper plane is at most 127

inline float largest_in(const float* x, int64_t n) {
  Floats most{};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const Floats value = load<LANES>(x + i), size = select(value < 0.0f, -value, value);
    most = select(size > most, size, most);
  }
  float largest = 0;
  for (int lane = 0; lane < LANES; ++lane) largest = std::max(largest, most[lane]);
  for (; i < n; ++i) largest = std::max(largest, std::abs(x[i]));
  return largest;
}

// x = scale . (256 high + low), both with sign; zeros up to `padded`. A row that is not finite has the scale NaN.
inline float to_planes(const float* x, int64_t n, int64_t padded, int16_t* whole) {
  const float largest = largest_in(x, n);
  Floats zeros{};  // of finite numbers the products with zero add up to zero
  float zero = 0;
  const float scale = largest > 1e-30f ? largest / MOST : 0, inverse = scale > 0 ? 1 / scale : 0;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const Floats value = load<LANES>(x + i) * inverse;
    zeros += value * 0.0f;
    const Integers rounded = __builtin_convertvector((value + 12582912.0f) - 12582912.0f, Integers);
    using Shorts = typename VectorOf<int16_t, LANES>::Type;
    *reinterpret_cast<typename VectorOf<int16_t, LANES>::Anywhere*>(whole + i) =
        __builtin_convertvector(rounded, Shorts);
  }
  for (; i < n; ++i) {
    zero += x[i] * 0.0f;
    whole[i] = int16_t(std::lrintf(x[i] * inverse));
  }
  std::memset(whole + n, 0, size_t(padded - n) * sizeof(int16_t));
  return scale + zero + total(zeros);
}

inline void split(const int16_t* whole, int64_t padded, int8_t offset, int8_t* high, int8_t* low) {
  using Shorts = VectorOf<int16_t, 16>::Type;
  using Bytes = VectorOf<int8_t, 16>::Type;
  for (int64_t i = 0; i < padded; i += 16) {
    const Shorts value = load_as<int16_t, 16>(whole + i), lower = (Shorts)(value << 8) >> 8;
    const Bytes l = __builtin_convertvector(lower, Bytes);
    const Bytes h = __builtin_convertvector((Shorts)((Shorts)(value - lower) >> 8), Bytes);
    *reinterpret_cast<VectorOf<int8_t, 16>::Anywhere*>(low + i) = l ^ offset;
    *reinterpret_cast<VectorOf<int8_t, 16>::Anywhere*>(high + i) = h ^ offset;
  }
}

// For 64 columns the even ones of both blocks of 32, then the odd ones; NEON: of one block after the other.
inline void in_order_of_nibbles(const int16_t* whole, int64_t padded, int16_t* out) {
#ifdef AMOEBA_AVX512
  for (int64_t k = 0; k < padded; k += 64)
    for (int64_t i = 0; i < 32; ++i) {
      out[k + i] = whole[k + 2 * i];
      out[k + 32 + i] = whole[k + 2 * i + 1];
    }
#else
  for (int64_t k = 0; k < padded; k += 32) {
    const int16x8x2_t first = vld2q_s16(whole + k), last = vld2q_s16(whole + k + 16);
    vst1q_s16(out + k, first.val[0]);
    vst1q_s16(out + k + 8, last.val[0]);
    vst1q_s16(out + k + 16, first.val[1]);
    vst1q_s16(out + k + 24, last.val[1]);
  }
#endif
}
#endif

// whole: scratch of two rows of int16.
inline void prepare_tiles([[maybe_unused]] StepRows& rows, [[maybe_unused]] int16_t* whole) {
#ifdef AMOEBA_BYTE_DOTS
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t padded = rows.plane_stride;
    rows.tiles.scale[r] = to_planes(rows.x + r * rows.stride, rows.length, padded, whole);
    split(whole, padded, ROW_OFFSET ? int8_t(-128) : int8_t(0), rows.tiles.high + r * padded,
          rows.tiles.low + r * padded);
  }
#endif
}
inline void prepare_blocks([[maybe_unused]] StepRows& rows, [[maybe_unused]] int16_t* whole) {
#ifdef AMOEBA_BYTE_DOTS
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t padded = rows.plane_stride;
    int16_t* ordered = whole + padded;
    rows.blocks.scale[r] = to_planes(rows.x + r * rows.stride, rows.length, padded, whole);
    in_order_of_nibbles(whole, padded, ordered);
    split(ordered, padded, 0, rows.blocks.high + r * padded, rows.blocks.low + r * padded);
#ifdef AMOEBA_AVX512
    for (int64_t i = 0; i < padded / 4; ++i)  // weights are read with 12 added
      rows.blocks.fix[r * padded / 4 + i] = -12 * (int32_t(ordered[4 * i]) + ordered[4 * i + 1] + ordered[4 * i + 2] +
                                                   ordered[4 * i + 3]);
#endif
  }
#endif
}

// ---------------------------------------------------------------------------------------------------------- tiles

// out (32) = one panel of bf16 tiles . x, which is padded with zeros to whole tiles.
inline void panel_bf16(const uint32_t* words, int64_t tiles, const float* x, float* out) {
  constexpr int VECTORS = PANEL / LANES, PARTS = LANES == 4 ? 1 : 2;
  constexpr int64_t AHEAD = 4 * 512;
  Floats sum[PARTS][VECTORS] = {};
  for (int64_t t = 0; t < tiles; ++t, words += 2 * TILE_WORDS, x += 2 * TILE) {
    for (int half = 0; half < 2; ++half) {
      const uint32_t* p = words + half * TILE_WORDS;
#pragma GCC unroll 4
      for (int w = 0; w < TILE; ++w) {
        __builtin_prefetch(p + w * TILE + AHEAD);
#pragma GCC unroll 4
        for (int v = 0; v < TILE / LANES; ++v) {
          const Words pair = load_as<uint32_t, LANES>(p + w * TILE + v * LANES);
          Floats& at = sum[w % PARTS][half * (TILE / LANES) + v];
          at += (Floats)(pair << 16) * x[2 * w];
          at += (Floats)(pair & 0xffff0000u) * x[2 * w + 1];
        }
      }
    }
  }
  for (int v = 0; v < VECTORS; ++v) {
    Floats all = sum[0][v];
    for (int part = 1; part < PARTS; ++part) all += sum[part][v];
    store(out + v * LANES, all);
  }
}

#if defined(AMOEBA_AVX512)
// Both planes of a row with one panel of int8 tiles; the offset of the rows is still in the sums.
inline void panel_int8(const uint32_t* words, int64_t tiles, const int8_t* high, const int8_t* low, int32_t* upper,
                       int32_t* lower) {
  __m512i sum[2][2][2] = {};  // [plane][half][even and odd words]
  const auto* h = reinterpret_cast<const int32_t*>(high);
  const auto* l = reinterpret_cast<const int32_t*>(low);
  for (int64_t t = 0; t < tiles; ++t, words += 2 * TILE_WORDS, h += TILE, l += TILE)
#pragma GCC unroll 16
    for (int w = 0; w < TILE; ++w) {
      const __m512i x_high = _mm512_set1_epi32(h[w]), x_low = _mm512_set1_epi32(l[w]);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const uint32_t* p = words + half * TILE_WORDS + w * TILE;
        _mm_prefetch(reinterpret_cast<const char*>(p + 4 * 512), _MM_HINT_T0);
        const __m512i columns = _mm512_loadu_si512(p);
        sum[0][half][w % 2] = _mm512_dpbusd_epi32(sum[0][half][w % 2], x_high, columns);
        sum[1][half][w % 2] = _mm512_dpbusd_epi32(sum[1][half][w % 2], x_low, columns);
      }
    }
  for (int half = 0; half < 2; ++half) {
    _mm512_storeu_si512(upper + half * TILE, _mm512_add_epi32(sum[0][half][0], sum[0][half][1]));
    _mm512_storeu_si512(lower + half * TILE, _mm512_add_epi32(sum[1][half][0], sum[1][half][1]));
  }
}
#elif defined(AMOEBA_SDOT)
inline void panel_int8(const uint32_t* words, int64_t tiles, const int8_t* high, const int8_t* low, int32_t* upper,
                       int32_t* lower) {
  int32x4_t sum[2][8];
  for (auto& plane : sum)
    for (auto& each : plane) each = vdupq_n_s32(0);
  for (int64_t t = 0; t < tiles; ++t, words += 2 * TILE_WORDS, high += 4 * TILE, low += 4 * TILE)
    for (int w = 0; w < TILE; w += 4) {
      const int8x16_t x_high = vld1q_s8(high + 4 * w), x_low = vld1q_s8(low + 4 * w);
#define AMOEBA_WORD(W)                                                                           \
  for (int half = 0; half < 2; ++half) {                                                         \
    const auto* p = reinterpret_cast<const int8_t*>(words + half * TILE_WORDS + (w + W) * TILE); \
    __builtin_prefetch(p + 16 * 512);                                                            \
    for (int v = 0; v < 4; ++v) {                                                                \
      const int8x16_t columns = vld1q_s8(p + 16 * v);                                            \
      sum[0][4 * half + v] = vdotq_laneq_s32(sum[0][4 * half + v], columns, x_high, W);          \
      sum[1][4 * half + v] = vdotq_laneq_s32(sum[1][4 * half + v], columns, x_low, W);           \
    }                                                                                            \
  }
      AMOEBA_WORD(0) AMOEBA_WORD(1) AMOEBA_WORD(2) AMOEBA_WORD(3)
#undef AMOEBA_WORD
    }
  for (int v = 0; v < 8; ++v) {
    vst1q_s32(upper + 4 * v, sum[0][v]);
    vst1q_s32(lower + 4 * v, sum[1][v]);
  }
}
#else
// In floats: each weight is exact.
inline void panel_int8_in_floats(const uint32_t* words, int64_t tiles, const float* x, float* out) {
  constexpr int VECTORS = PANEL / LANES;
  Floats sum[VECTORS] = {};
  for (int64_t t = 0; t < tiles; ++t, words += 2 * TILE_WORDS, x += 4 * TILE)
    for (int half = 0; half < 2; ++half)
      for (int w = 0; w < TILE; ++w) {
        const uint32_t* p = words + half * TILE_WORDS + w * TILE;
        __builtin_prefetch(p + 4 * 512);
#pragma GCC unroll 4
        for (int v = 0; v < TILE / LANES; ++v) {
          const Words four = load_as<uint32_t, LANES>(p + v * LANES);
          Floats& at = sum[half * (TILE / LANES) + v];
#pragma GCC unroll 4
          for (int b = 0; b < 4; ++b)
            at += __builtin_convertvector((Integers)(four << (24 - 8 * b)) >> 24, Floats) * x[4 * w + b];
        }
      }
  for (int v = 0; v < VECTORS; ++v) store(out + v * LANES, sum[v]);
}
#endif

// --------------------------------------------------------------------------------- e2m1, a scale for each 32 columns

#ifdef AMOEBA_BYTE_DOTS
// out[j] = <w_j, row> without the row's scale, for W rows of a weight. Codes stand for twice what they mean.
#ifdef AMOEBA_AVX512
template <int W>
inline void block_dots(const uint8_t* w, const uint8_t* next, int64_t w_row, const RowScales* scales, int64_t n,
                       const int8_t* high, const int8_t* low, const int32_t* fix, float* out) {
  const __m512i values = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512 sum[W] = {};
  const int64_t blocks = ceil_div(n, 32);
  for (int64_t b = 0; b < blocks; b += 2, high += 64, low += 64, fix += 16) {
    const __m512i x_high = _mm512_loadu_si512(high), x_low = _mm512_loadu_si512(low);
    const __m512i offset = _mm512_loadu_si512(fix);
    const bool both = b + 1 < blocks;
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) {
      const uint8_t* p = w + j * w_row + b * 16;
      if (b % 4 == 0) _mm_prefetch(reinterpret_cast<const char*>(next + j * w_row + b * 16), _MM_HINT_T1);
      const __m256i pairs = both ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                                 : _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
      const __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(pairs), _mm256_srli_epi16(pairs, 4), 1);
      const __m512i weights = _mm512_shuffle_epi8(values, _mm512_and_si512(codes, nibble));
      const __m512i upper = _mm512_dpbusd_epi32(_mm512_setzero_si512(), weights, x_high);
      const __m512i all = _mm512_dpbusd_epi32(_mm512_add_epi32(_mm512_slli_epi32(upper, 8), offset), weights, x_low);
      const __m512 first = _mm512_set1_ps(scales[j].without_whole(b));
      const __m512 scale =
          _mm512_mask_blend_ps(0xf0f0, first, _mm512_set1_ps(both ? scales[j].without_whole(b + 1) : 0.0f));
      sum[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(all), scale, sum[j]);
    }
  }
  for (int j = 0; j < W; ++j) out[j] = total((Floats16)sum[j]) * (0.5f * scales[j].whole);
}
#else
template <int W>
inline void block_dots(const uint8_t* w, const uint8_t* next, int64_t w_row, const RowScales* scales, int64_t n,
                       const int8_t* high, const int8_t* low, const int32_t*, float* out) {
  const int8x16_t values = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const uint8x16_t nibble = vdupq_n_u8(15);
  // 1.5 . 2^23, to whose bits an integer below 2^22 is added: then only a difference is left of the conversion to float
  const float32x4_t magic = vdupq_n_f32(12582912.0f);
  const int32x4_t begin = vshrq_n_s32(vreinterpretq_s32_f32(magic), 8);
  float32x4_t sum[W];
  const uint8_t* bytes[W];
  const float* of_byte = scales[0].values;
  for (int j = 0; j < W; ++j) {
    sum[j] = vdupq_n_f32(0);
    bytes[j] = static_cast<const uint8_t*>(scales[j].data);
  }
  const int64_t blocks = ceil_div(n, 32);
  for (int64_t b = 0; b < blocks; ++b, high += 32, low += 32) {
    const int8x16_t even_high = vld1q_s8(high), odd_high = vld1q_s8(high + 16);
    const int8x16_t even_low = vld1q_s8(low), odd_low = vld1q_s8(low + 16);
    if (b % 4 == 0)
#pragma GCC unroll 4
      for (int j = 0; j < W; ++j) __builtin_prefetch(next + j * w_row + b * 16, 0, 2);
    int8x16_t even[W], odd[W];
    int32x4_t all[W];
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) {
      const uint8x16_t pairs = vld1q_u8(w + j * w_row + b * 16);
      even[j] = vqtbl1q_s8(values, vandq_u8(pairs, nibble));
      odd[j] = vqtbl1q_s8(values, vshrq_n_u8(pairs, 4));
    }
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) all[j] = vdotq_s32(begin, even[j], even_high);
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) all[j] = vshlq_n_s32(vdotq_s32(all[j], odd[j], odd_high), 8);
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) all[j] = vdotq_s32(all[j], even[j], even_low);
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) all[j] = vdotq_s32(all[j], odd[j], odd_low);
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j)
      sum[j] = vfmaq_n_f32(sum[j], vsubq_f32(vreinterpretq_f32_s32(all[j]), magic), of_byte[bytes[j][b]]);
  }
  for (int j = 0; j < W; ++j) out[j] = total((Floats)sum[j]) * (0.5f * scales[j].whole);
}
#endif

template <class Take>
void each_block_row(const StepMatrix& m, int64_t e, int64_t from, int64_t to, const StepRows& rows,
                    const int64_t* which, int64_t count, const Take& take) {
  const uint8_t* w = static_cast<const uint8_t*>(m.data) + e * m.stride_e;
  const auto run = [&](int64_t j, auto width) {
    RowScales scales[width];
    for (int i = 0; i < width; ++i) scales[i] = m.coding.of_row(e, j + i);
    const int64_t next = j + 2 * width <= to ? j + width : j;
    for (int64_t r = 0; r < count; ++r) {
      float out[width];
      const int64_t at = which[r] * rows.plane_stride;
      block_dots<width>(w + j * m.stride_row, w + next * m.stride_row, m.stride_row, scales, m.in,
                        rows.blocks.high + at, rows.blocks.low + at, rows.blocks.fix + at / 4, out);
      for (int i = 0; i < width; ++i) take(j + i, r, out[i] * rows.blocks.scale[which[r]]);
    }
  };
  int64_t j = from;
  for (; j + WEIGHT_ROWS <= to; j += WEIGHT_ROWS) run(j, std::integral_constant<int, WEIGHT_ROWS>{});
  for (; j < to; ++j) run(j, std::integral_constant<int, 1>{});
}
#endif

// ---------------------------------------------------------------------------------------------------- rows of bf16

// out[j] = <w_j, row> for W rows of a weight: a word holds two numbers, the upper of which only needs a mask.
template <int W>
inline void pair_dots(const uint16_t* w, const uint16_t* next, int64_t w_row, const float* x, const float* pairs,
                      int64_t n, float* out) {
  constexpr int64_t STEP = 2 * LANES, LINE = 32;
  Floats even[W] = {}, odd[W] = {};
  int64_t k = 0;
  for (; k + STEP <= n; k += STEP) {
    const Floats x_even = load<LANES>(pairs + k), x_odd = load<LANES>(pairs + k + LANES);
    if (STEP >= LINE || k % LINE == 0)
#pragma GCC unroll 4
      for (int j = 0; j < W; ++j) __builtin_prefetch(next + j * w_row + k, 0, 2);
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) {
      const Words words = (Words)load_as<uint32_t, LANES>(reinterpret_cast<const uint32_t*>(w + j * w_row + k));
      even[j] += (Floats)(words << 16) * x_even;
      odd[j] += (Floats)(words & 0xffff0000u) * x_odd;
    }
  }
  for (int j = 0; j < W; ++j) {
    float product = total(even[j] + odd[j]);
    for (int64_t i = k; i < n; ++i) product += widen(w[j * w_row + i]) * x[i];
    out[j] = product;
  }
}

template <class Take>
void each_pair_row(const StepMatrix& m, int64_t e, int64_t from, int64_t to, const StepRows& rows,
                   const int64_t* which, int64_t count, const Take& take) {
  const uint16_t* w = static_cast<const uint16_t*>(m.data) + e * m.stride_e;
  const auto run = [&](int64_t j, auto width) {
    const int64_t next = j + 2 * width <= to ? j + width : j;
    for (int64_t r = 0; r < count; ++r) {
      float out[width];
      pair_dots<width>(w + j * m.stride_row, w + next * m.stride_row, m.stride_row, rows.x + which[r] * rows.stride,
                       rows.pairs + which[r] * rows.plane_stride, m.in, out);
      for (int i = 0; i < width; ++i) take(j + i, r, out[i]);
    }
  };
  int64_t j = from;
  for (; j + WEIGHT_ROWS <= to; j += WEIGHT_ROWS) run(j, std::integral_constant<int, WEIGHT_ROWS>{});
  for (; j < to; ++j) run(j, std::integral_constant<int, 1>{});
}

// --------------------------------------------------------------------------------------------------------- all kinds

template <class Take>
void each_tile_row(const StepMatrix& m, int64_t e, int64_t from, int64_t to, const StepRows& rows,
                   const int64_t* which, int64_t count, const Take& take) {
  const bool int8 = m.kind == TILES_INT8;
  const int64_t per_word = int8 ? 4 : 2, tiles = tiles_of(m.in, per_word);
  const uint32_t* words = static_cast<const uint32_t*>(m.data) + e * packed_words(m.out, m.in, per_word);
  alignas(64) float out[PANEL];
  for (int64_t panel = from / PANEL; panel * PANEL < to; ++panel) {
    const uint32_t* p = words + panel * tiles * 2 * TILE_WORDS;
    const int64_t begin = std::max(from, panel * PANEL), end = std::min(to, (panel + 1) * PANEL);
    for (int64_t r = 0; r < count; ++r) {
      if (!int8) {
        panel_bf16(p, tiles, rows.x + which[r] * rows.stride, out);
      } else {
        const int64_t first = e * m.out + panel * PANEL;
#ifdef AMOEBA_BYTE_DOTS
        alignas(64) int32_t upper[PANEL], lower[PANEL];
        const int64_t at = which[r] * rows.plane_stride;
        panel_int8(p, tiles, rows.tiles.high + at, rows.tiles.low + at, upper, lower);
        for (int64_t c = begin - panel * PANEL; c < end - panel * PANEL; ++c) {
          const int32_t off = ROW_OFFSET * m.sum[first + c];
          out[c] = (float(upper[c] - off) * 256.0f + float(lower[c] - off)) * m.scale[first + c] *
                   rows.tiles.scale[which[r]];
        }
#else
        panel_int8_in_floats(p, tiles, rows.x + which[r] * rows.stride, out);
        for (int64_t c = begin - panel * PANEL; c < end - panel * PANEL; ++c) out[c] *= m.scale[first + c];
#endif
      }
      for (int64_t j = begin; j < end; ++j) take(j, r, out[j - panel * PANEL]);
    }
  }
}

template <class Matrix, class Take>
void each_plain_row(const StepMatrix& m, int64_t e, int64_t from, int64_t to, const StepRows& rows,
                    const int64_t* which, int64_t count, const Take& take) {
  using Element = typename Matrix::Element;
  const Matrix w = Matrix::of(static_cast<const Element*>(m.data), m.stride_e, m.stride_row, &m.coding);
  for (int64_t first = 0; first < count; first += 4) {
    const int64_t some = std::min<int64_t>(4, count - first);
    const float* x[4];
    for (int64_t r = 0; r < some; ++r) x[r] = rows.x + which[first + r] * rows.stride;
    each_weight_row(w, e, from, to, from, some, x, m.in, [&](int64_t j, const float* products) {
      for (int64_t r = 0; r < some; ++r) take(j, first + r, products[r]);
    });
  }
}

// What is called with each result: any function of (j, r, value), behind a pointer, so that the products are compiled
// once and not for every caller.
class Sink {
 public:
  template <class Function>
  Sink(const Function& function)
      : function_(&function), call_([](const void* f, int64_t j, int64_t r, float value) {
          (*static_cast<const Function*>(f))(j, r, value);
        }) {}
  void operator()(int64_t j, int64_t r, float value) const { call_(function_, j, r, value); }

 private:
  const void* function_;
  void (*call_)(const void*, int64_t, int64_t, float);
};

// Calls take(j, r, <row j of expert e, row which[r]> + bias) for j in [from, to) and r below count. Rows are padded with
// zeros to a multiple of PLANE_UNIT.
inline void products(const StepMatrix& m, int64_t e, int64_t from, int64_t to, const StepRows& rows,
                     const int64_t* which, int64_t count, const Sink& given) {
  const float* bias = m.bias ? m.bias + e * m.out : nullptr;
  const auto take = [&](int64_t j, int64_t r, float value) { given(j, r, bias ? value + bias[j] : value); };
  switch (m.kind) {
    case ROWS_F32: return each_plain_row<PlainMatrix<float>>(m, e, from, to, rows, which, count, take);
    case ROWS_BF16: return each_pair_row(m, e, from, to, rows, which, count, take);
    case ROWS_E4M3: return each_plain_row<CodedMatrix<E4m3>>(m, e, from, to, rows, which, count, take);
    case ROWS_E2M1:
#ifdef AMOEBA_BYTE_DOTS
      if (by_blocks(m)) return each_block_row(m, e, from, to, rows, which, count, take);
#endif
      return each_plain_row<CodedMatrix<E2m1>>(m, e, from, to, rows, which, count, take);
    default: return each_tile_row(m, e, from, to, rows, which, count, take);
  }
}

}  // namespace amoeba
