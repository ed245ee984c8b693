// Products of a weight matrix with a few rows in fp32, for a decode step: every weight is read once from memory, where it
// lies, in whatever form it has.
//
// Weights of whole numbers (int8 in tiles, e2m1 with scales of 32, with AVX-512 ggml's blocks) meet rows in fixed point
// of 16 bits, as two planes of 8 bits, where the CPU has dot products of bytes: that rounds a row to 1.5e-5 of its
// largest number, far below what bf16 does, and costs little time beyond that of reading the weights. Elsewhere weights
// become floats.
//
// Each result is summed by one thread in an order of its own, so it does not depend on how many threads there are.
#pragma once
#include "block_products.h"
#include "core_decode.h"
#include "packed_layout.h"

#if defined(AMOEBA_AVX512_VNNI)
#define AMOEBA_BYTE_DOTS 1
#elif defined(AMOEBA_SDOT)
#define AMOEBA_BYTE_DOTS 1
#endif

#if defined(AMOEBA_AVX512_VNNI) && defined(__AVX512VBMI__)
#define AMOEBA_E4M3_PAIRS 1
#endif

namespace [[gnu::visibility("hidden")]] amoeba {

// COLUMNS: contiguous along the output, read by exact steps alone; `stride_row` is from one summed number to the next.
enum MatrixKind : int64_t {
  ROWS_F32, ROWS_BF16, ROWS_E4M3, ROWS_E2M1, ROWS_BLOCKS, TILES_BF16, TILES_INT8, COLUMNS_F32, COLUMNS_BF16
};

struct StepMatrix {  // (experts, out, in); the order of `CStepMatrix` in step.py
  int64_t kind, out, in;
  const void* data;              // null: there is none
  int64_t stride_e, stride_row;  // of rows, in elements
  const float* scale;            // of int8: of each output
  const int32_t* sum;            // of int8: of each output's weights
  const void* bias;              // (experts, out), contiguous along out, may be null
  int64_t bias_bf16, bias_stride;
  Coding coding;
  int64_t rank;  // of LoRA factors, a multiple of LORA_RANKS, or 0: B (A x) is added, see `adapted_products`
  const float *lora_a, *lora_b;  // (experts, rank, in), and (experts, out, rank) with the scaling in it
  // Of an exact step, whose factors have any rank and no scaling in them. parts: 0: PEFT's layer; 1: experts'; 2: of gate
  // and of up, whose A lie one below the other. half: what PEFT's factors give is rounded to bf16.
  int64_t lora_parts, lora_half;
  double lora_scale;
};

// Rows of fp32, and what the products make of them beforehand.
struct Planes {
  int8_t *high = nullptr, *low = nullptr;  // of each row `stride` bytes
  int32_t* fix = nullptr;                  // of e2m1 with AVX-512, an eighth as many
  float* scale = nullptr;                  // of each row
  float* sums = nullptr;                   // of ggml's blocks: of each four columns
};
struct StepRows {
  const float* x = nullptr;
  int64_t stride = 0, count = 0, length = 0;
  int64_t plane_stride = 0;
  float* pairs = nullptr;  // for bf16: of each 2 LANES numbers the even ones, then the odd ones; `plane_stride` a row
  float* spread = nullptr;  // for e4m3 with AVX-512, `plane_stride` a row
  Planes tiles, blocks;  // in the order of columns, for int8; in that of the nibbles, for e2m1
  Planes ggml;           // in the order of columns
};

constexpr int64_t PLANE_UNIT = 256;
constexpr int64_t LORA_RANKS = 16;
// Bytes by which weights are fetched ahead, in the order of memory, which the hardware's own prefetching follows: e2m1
// 15 GB/s, and 9 with each row's own line of the rows that come next (one busy core of a Xeon, 2026-11-18).
constexpr int64_t AHEAD = 8192;

// The bytes of scales: powers of two (E8M0), or e4m3.
inline bool powers_of_two(const Coding& coding) { return coding.scale_values[127] == 1.0f; }

inline bool by_blocks([[maybe_unused]] const StepMatrix& m) {
#if defined(AMOEBA_AVX512_VNNI)
  const int64_t shift = m.coding.column.shift;
  return m.kind == ROWS_E2M1 && m.coding.scale_values && shift == (powers_of_two(m.coding) ? 5 : 4);
#elif defined(AMOEBA_BYTE_DOTS)
  return m.kind == ROWS_E2M1 && m.coding.column.shift == 5 && m.coding.scale_values;
#else
  return false;
#endif
}
inline bool by_ggml([[maybe_unused]] const StepMatrix& m) {
#ifdef AMOEBA_AVX512_VNNI
  return m.kind == ROWS_BLOCKS && m.coding.element != NF4_;  // whose numbers are no whole ones
#else
  return false;
#endif
}
inline bool by_spread([[maybe_unused]] const StepMatrix& m) {
#ifdef AMOEBA_E4M3_PAIRS
  return m.kind == ROWS_E4M3 && m.coding.column.shift >= 5;
#else
  return false;
#endif
}
inline bool by_planes([[maybe_unused]] const StepMatrix& m) {
#ifdef AMOEBA_BYTE_DOTS
  return m.kind == TILES_INT8;
#else
  return false;
#endif
}

// Calls run(j, r, how many weight rows from j on, how many rows from r on), the latter two as constants.
template <int64_t ROWS, class Run>
inline void by_groups(int64_t from, int64_t to, int64_t count, const Run& run) {
  const auto rows = [&](int64_t j, auto width) {
    for (int64_t r = 0; r < count; r += ROWS) {
      const int64_t left = std::min(ROWS, count - r);
      if constexpr (ROWS == 1) run(j, r, width, std::integral_constant<int, 1>());
      else if constexpr (ROWS == 2) left == 1 ? run(j, r, width, std::integral_constant<int, 1>())
                                              : run(j, r, width, std::integral_constant<int, 2>());
      else with_count(left, [&](auto at_once) { run(j, r, width, at_once); });
    }
  };
  int64_t j = from;
  for (; j + WEIGHT_ROWS <= to; j += WEIGHT_ROWS) rows(j, std::integral_constant<int, WEIGHT_ROWS>());
  for (; j < to; ++j) rows(j, std::integral_constant<int, 1>());
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

// For e4m3: of each 64 columns the even ones of 8 of each 16, the odd ones of these, and the same of the other 8.
inline void prepare_spread([[maybe_unused]] StepRows& rows) {
#ifdef AMOEBA_E4M3_PAIRS
  for (int64_t r = 0; r < rows.count; ++r)
    for (int64_t k = 0; k < rows.plane_stride; ++k)
      rows.spread[r * rows.plane_stride + k / 64 * 64 + k / 8 % 2 * 32 + k % 2 * 16 + k / 16 % 4 * 4 + k / 2 % 4] =
          rows.x[r * rows.stride + k];
#endif
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

// For 128 columns the even ones, then the odd ones; NEON: for each 32.
inline void in_order_of_nibbles(const int16_t* whole, int64_t padded, int16_t* out) {
#ifdef AMOEBA_AVX512_VNNI
  for (int64_t k = 0; k < padded; k += 128)
    for (int64_t i = 0; i < 64; ++i) {
      out[k + i] = whole[k + 2 * i];
      out[k + 64 + i] = whole[k + 2 * i + 1];
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
#ifdef AMOEBA_AVX512_VNNI
    for (int64_t i = 0; i < padded / 8; ++i) {  // weights are read with 12 added
      int32_t sum = 0;
      for (int64_t k = 8 * i; k < 8 * i + 8; ++k) sum += whole[k];
      rows.blocks.fix[r * padded / 8 + i] = -12 * sum;
    }
#endif
  }
#endif
}
inline void prepare_ggml([[maybe_unused]] StepRows& rows, [[maybe_unused]] int16_t* whole) {
#ifdef AMOEBA_AVX512_VNNI
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t padded = rows.plane_stride;
    rows.ggml.scale[r] = to_planes(rows.x + r * rows.stride, rows.length, padded, whole);
    split(whole, padded, 0, rows.ggml.high + r * padded, rows.ggml.low + r * padded);
    float* sums = rows.ggml.sums + r * padded / 4;
    for (int64_t i = 0; i < padded / 4; ++i) {
      const int16_t* four = whole + 4 * i;
      sums[i] = float(four[0] + four[1] + four[2] + four[3]);
    }
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

#if defined(AMOEBA_AVX512_VNNI)
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

// ------------------------------------------------------------------------------------ e2m1, a scale for each 32 columns
// (E8M0), or with AVX-512 for each 16 (e4m3).

#ifdef AMOEBA_BYTE_DOTS
// out[j][r] = <w_j, row which[r]> without the row's scale, for W rows of a weight. Codes stand for twice what they mean.
#ifdef AMOEBA_AVX512_VNNI
// The scales of 128 columns, each in the lanes whose sums it multiplies. e4m3: 2^-8 of it.
template <bool POWERS>
inline __m512 scales_of(const uint8_t* p, __mmask16& invalid) {
  if constexpr (POWERS) {  // a NaN, which is 255, becomes an infinity: the caller looks into that
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    const __m512i upper = _mm512_set_epi32(0x03ffffff, 0x03ffffff, 0x03ffffff, 0x03ffffff, 0x02ffffff, 0x02ffffff,
                                           0x02ffffff, 0x02ffffff, 0x01ffffff, 0x01ffffff, 0x01ffffff, 0x01ffffff,
                                           0x00ffffff, 0x00ffffff, 0x00ffffff, 0x00ffffff);
    const __m512i bits = _mm512_srli_epi32(_mm512_shuffle_epi8(_mm512_set1_epi32(bytes), upper), 1);
    return _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x00400000)));  // 0 stands for 2^-127
  } else {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    invalid |= _mm_testn_epi8_mask(_mm_add_epi8(bytes, _mm_set1_epi8(1)), _mm_set1_epi8(0x7f)) & 255;
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(bytes, bytes)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(int16_t(0xbfff))));
  }
}

// Codes into their values, by the lower four bits of each byte.
inline __m512i values_of_nibbles(__m512i bytes) {
  const __m512i values =
      _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
#ifdef __AVX512VBMI__
  return _mm512_permutexvar_epi8(bytes, values);
#else
  return _mm512_shuffle_epi8(values, _mm512_and_si512(bytes, _mm512_set1_epi8(15)));
#endif
}

template <bool POWERS, int W, int R>
inline void block_dots(const uint8_t* w, int64_t w_row, const RowScales* scales, int64_t n, const Planes& planes,
                       int64_t stride, const int64_t* which, float out[][4]) {
  constexpr int64_t COLUMNS = POWERS ? 32 : 16;
  const __m512i shift_by_8 = _mm512_set1_epi32(256);
  __m512 sum[W][R] = {};
  __mmask16 invalid = 0;
  const auto add = [&](int j, int64_t k, __m512i codes, __m512 scale) {
    const __m512i even = values_of_nibbles(codes), odd = values_of_nibbles(_mm512_srli_epi16(codes, 4));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const int64_t at = which[r] * stride + k;
      __m512i all = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even, _mm512_loadu_si512(planes.high + at));
      all = _mm512_dpbusd_epi32(all, odd, _mm512_loadu_si512(planes.high + at + 64));
      // at most 24384, so that its lower half is all of it
      all = _mm512_dpwssd_epi32(_mm512_loadu_si512(planes.fix + at / 8), all, shift_by_8);
      all = _mm512_dpbusd_epi32(all, even, _mm512_loadu_si512(planes.low + at));
      all = _mm512_dpbusd_epi32(all, odd, _mm512_loadu_si512(planes.low + at + 64));
      sum[j][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(all), scale, sum[j][r]);
    }
  };
  int64_t k = 0;
  for (; k + 128 <= n; k += 128)
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) {
      _mm_prefetch(reinterpret_cast<const char*>(w + AHEAD + W * (k / 2) + j * 64), _MM_HINT_T0);
      add(j, k, _mm512_loadu_si512(w + j * w_row + k / 2),
          scales_of<POWERS>(static_cast<const uint8_t*>(scales[j].data) + k / COLUMNS, invalid));
    }
  const int64_t blocks = ceil_div(n, COLUMNS), left = blocks - k / COLUMNS;
  if (left > 0)
    for (int j = 0; j < W; ++j) {
      alignas(64) uint8_t codes[64] = {}, bytes[8] = {};
      std::memcpy(codes, w + j * w_row + k / 2, size_t(left * COLUMNS / 2));
      std::memcpy(bytes, static_cast<const uint8_t*>(scales[j].data) + k / COLUMNS, size_t(left));
      add(j, k, _mm512_load_si512(codes), scales_of<POWERS>(bytes, invalid));
    }
  for (int j = 0; j < W; ++j)
    for (int r = 0; r < R; ++r) {
      out[j][r] = total((Floats16)sum[j][r]) * ((POWERS ? 0.5f : 128.0f) * scales[j].whole);
      if (invalid || !std::isfinite(out[j][r]))
        for (int64_t i = 0; i < blocks; ++i)
          if (std::isnan(scales[j].without_whole(i))) out[j][r] = std::numeric_limits<float>::quiet_NaN();
    }
}
#else
template <bool, int W, int>
inline void block_dots(const uint8_t* w, int64_t w_row, const RowScales* scales, int64_t n, const Planes& planes,
                       int64_t stride, const int64_t* which, float out[][4]) {
  const int8_t *high = planes.high + which[0] * stride, *low = planes.low + which[0] * stride;
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
      for (int j = 0; j < W; ++j) __builtin_prefetch(w + (W + j) * w_row + b * 16, 0, 2);
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
  for (int j = 0; j < W; ++j) out[j][0] = total((Floats)sum[j]) * (0.5f * scales[j].whole);
}
#endif

#ifdef AMOEBA_AVX512_VNNI
constexpr int64_t BLOCK_ROWS = 4;  // rows that meet a weight's codes at once
#else
constexpr int64_t BLOCK_ROWS = 1;
#endif

template <class Take>
void each_block_row(const StepMatrix& m, int64_t e, int64_t from, int64_t to, const StepRows& rows,
                    const int64_t* which, int64_t count, const Take& take) {
  const uint8_t* w = static_cast<const uint8_t*>(m.data) + e * m.stride_e;
  const bool powers = powers_of_two(m.coding);
  by_groups<BLOCK_ROWS>(from, to, count, [&](int64_t j, int64_t r, auto width, auto at_once) {
    constexpr int W = decltype(width)::value, R = decltype(at_once)::value;
    RowScales scales[W];
    for (int i = 0; i < W; ++i) scales[i] = m.coding.of_row(e, j + i);
    float out[W][4];
    const uint8_t* p = w + j * m.stride_row;
    powers ? block_dots<true, W, R>(p, m.stride_row, scales, m.in, rows.blocks, rows.plane_stride, which + r, out)
           : block_dots<false, W, R>(p, m.stride_row, scales, m.in, rows.blocks, rows.plane_stride, which + r, out);
    for (int i = 0; i < W; ++i)
      for (int s = 0; s < R; ++s) take(j + i, r + s, out[i][s] * rows.blocks.scale[which[r + s]]);
  });
}
#endif

// ------------------------------------------------------------------------------------------------- e4m3 with AVX-512

#ifdef AMOEBA_E4M3_PAIRS
// e4m3 as bf16, by tables of 128 codes.
struct Bf16OfE4m3 {
  alignas(64) uint8_t upper[128], lower[128];
  Bf16OfE4m3() {
    for (int code = 0; code < 128; ++code) {
      const int exponent = code >> 3, mantissa = code & 7;
      const float value = std::ldexp(float(exponent ? mantissa + 8 : mantissa), (exponent ? exponent : 1) - 10);
      const uint16_t bits = code == 127 ? 0x7fc0 : round_to_bf16(value);
      upper[code] = uint8_t(bits >> 8), lower[code] = uint8_t(bits);
    }
  }
};

template <int W, int R>
inline void byte_dots(const uint8_t* w, int64_t w_row, const RowScales* scales, const ScaleAxis& axis, int64_t n,
                      const float* spread, int64_t stride, const int64_t* which, float out[][4]) {
  static const Bf16OfE4m3 table;
  const __m512i upper[2] = {_mm512_load_si512(table.upper), _mm512_load_si512(table.upper + 64)};
  const __m512i lower[2] = {_mm512_load_si512(table.lower), _mm512_load_si512(table.lower + 64)};
  const __m512i sign = _mm512_set1_epi8(-128);
  Floats sum[W][R] = {};
  const auto add = [&](int j, int64_t k, int64_t last, __m512i codes) {
    const __m512i low = _mm512_permutex2var_epi8(lower[0], codes, lower[1]);
    const __m512i size = _mm512_permutex2var_epi8(upper[0], codes, upper[1]);
    const __m512i high = _mm512_ternarylogic_epi32(size, codes, sign, 0xf8);  // size | (codes & sign)
    const Words first = (Words)_mm512_unpacklo_epi8(low, high), second = (Words)_mm512_unpackhi_epi8(low, high);
    const __m512 scale = _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(scales[j].without_whole(axis.at(k))),
                                              _mm512_set1_ps(scales[j].without_whole(axis.at(last))));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const float* x = spread + which[r] * stride + k;
      Floats all = (Floats)(first << 16) * load(x);
      all += (Floats)(first & 0xffff0000u) * load(x + 16);
      all += (Floats)(second << 16) * load(x + 32);
      all += (Floats)(second & 0xffff0000u) * load(x + 48);
      sum[j][r] += all * (Floats)scale;
    }
  };
  int64_t k = 0;
  for (; k + 64 <= n; k += 64)
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) {
      _mm_prefetch(reinterpret_cast<const char*>(w + AHEAD + W * k + j * 64), _MM_HINT_T0);
      add(j, k, k + 32, _mm512_loadu_si512(w + j * w_row + k));
    }
  if (k < n)
    for (int j = 0; j < W; ++j) {
      alignas(64) uint8_t codes[64] = {};
      std::memcpy(codes, w + j * w_row + k, size_t(n - k));
      add(j, k, k + 32 < n ? k + 32 : k, _mm512_load_si512(codes));
    }
  for (int j = 0; j < W; ++j)
    for (int r = 0; r < R; ++r) out[j][r] = total(sum[j][r]) * scales[j].whole;
}

template <class Take>
void each_byte_row(const StepMatrix& m, int64_t e, int64_t from, int64_t to, const StepRows& rows, const int64_t* which,
                   int64_t count, const Take& take) {
  const uint8_t* w = static_cast<const uint8_t*>(m.data) + e * m.stride_e;
  by_groups<4>(from, to, count, [&](int64_t j, int64_t r, auto width, auto at_once) {
    constexpr int W = decltype(width)::value, R = decltype(at_once)::value;
    RowScales scales[W];
    for (int i = 0; i < W; ++i) scales[i] = m.coding.of_row(e, j + i);
    float out[W][4];
    byte_dots<W, R>(w + j * m.stride_row, m.stride_row, scales, m.coding.column, m.in, rows.spread, rows.plane_stride,
                    which + r, out);
    for (int i = 0; i < W; ++i)
      for (int s = 0; s < R; ++s) take(j + i, r + s, out[i][s]);
  });
}
#endif

// ---------------------------------------------------------------------------------------------------- rows of bf16

// out[j][r] = <w_j, row which[r]> for W rows of a weight: a word holds two numbers, the upper of which only needs a mask.
template <int W, int R>
inline void pair_dots(const uint16_t* w, int64_t w_row, const StepRows& rows, const int64_t* which, int64_t n,
                      float out[][4]) {
  constexpr int64_t STEP = 2 * LANES, LINE = 32;
  Floats even[W][R] = {}, odd[W][R] = {};
  int64_t k = 0;
  for (; k + STEP <= n; k += STEP) {
    if (STEP >= LINE || k % LINE == 0)
#pragma GCC unroll 4
      for (int j = 0; j < W; ++j) __builtin_prefetch(w + (W + j) * w_row + k, 0, 2);
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) {
      const Words words = (Words)load_as<uint32_t, LANES>(reinterpret_cast<const uint32_t*>(w + j * w_row + k));
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
        const float* x = rows.pairs + which[r] * rows.plane_stride + k;
        even[j][r] += (Floats)(words << 16) * load<LANES>(x);
        odd[j][r] += (Floats)(words & 0xffff0000u) * load<LANES>(x + LANES);
      }
    }
  }
  for (int j = 0; j < W; ++j)
    for (int r = 0; r < R; ++r) {
      float product = total(even[j][r] + odd[j][r]);
      for (int64_t i = k; i < n; ++i) product += widen(w[j * w_row + i]) * rows.x[which[r] * rows.stride + i];
      out[j][r] = product;
    }
}

template <class Take>
void each_pair_row(const StepMatrix& m, int64_t e, int64_t from, int64_t to, const StepRows& rows,
                   const int64_t* which, int64_t count, const Take& take) {
  const uint16_t* w = static_cast<const uint16_t*>(m.data) + e * m.stride_e;
  by_groups<2>(from, to, count, [&](int64_t j, int64_t r, auto width, auto at_once) {
    constexpr int W = decltype(width)::value, R = decltype(at_once)::value;
    float out[W][4];
    pair_dots<W, R>(w + j * m.stride_row, m.stride_row, rows, which + r, m.in, out);
    for (int i = 0; i < W; ++i)
      for (int s = 0; s < R; ++s) take(j + i, r + s, out[i][s]);
  });
}

#ifdef AMOEBA_AVX512_VNNI
template <class Take>
void each_ggml_row(const StepMatrix& m, int64_t e, int64_t from, int64_t to, const StepRows& rows,
                   const int64_t* which, int64_t count, const Take& take) {
  const uint8_t* w = static_cast<const uint8_t*>(m.data) + e * m.stride_e;
  with_blocks(m.coding.element, [&](auto block) {
    by_groups<2>(from, to, count, [&](int64_t j, int64_t r, auto width, auto at_once) {
      constexpr int W = decltype(width)::value, R = decltype(at_once)::value;
      float out[W][4];
      ggml_dots<typename decltype(block)::Type, W, R>(w + j * m.stride_row, m.stride_row, m.in, rows.ggml.high,
                                                      rows.ggml.low, rows.ggml.sums, rows.plane_stride, which + r, out);
      for (int i = 0; i < W; ++i)
        for (int s = 0; s < R; ++s) take(j + i, r + s, out[i][s] * rows.ggml.scale[which[r + s]]);
    });
  });
}
#endif

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
  const auto* wide = static_cast<const float*>(m.bias) + (m.bias ? e * m.bias_stride : 0);
  const auto* half = static_cast<const uint16_t*>(m.bias) + (m.bias ? e * m.bias_stride : 0);
  const auto take = [&](int64_t j, int64_t r, float value) {
    given(j, r, m.bias ? value + (m.bias_bf16 ? widen(half[j]) : wide[j]) : value);
  };
  switch (m.kind) {
    case ROWS_F32: return each_plain_row<PlainMatrix<float>>(m, e, from, to, rows, which, count, take);
    case ROWS_BF16: return each_pair_row(m, e, from, to, rows, which, count, take);
    case ROWS_E4M3:
#ifdef AMOEBA_E4M3_PAIRS
      if (by_spread(m)) return each_byte_row(m, e, from, to, rows, which, count, take);
#endif
      return each_plain_row<CodedMatrix<E4m3>>(m, e, from, to, rows, which, count, take);
    case ROWS_E2M1:
#ifdef AMOEBA_BYTE_DOTS
      if (by_blocks(m)) return each_block_row(m, e, from, to, rows, which, count, take);
#endif
      return each_plain_row<CodedMatrix<E2m1>>(m, e, from, to, rows, which, count, take);
    case ROWS_BLOCKS:
#ifdef AMOEBA_AVX512_VNNI
      if (by_ggml(m)) return each_ggml_row(m, e, from, to, rows, which, count, take);
#endif
      return each_plain_row<BlocksMatrix>(m, e, from, to, rows, which, count, take);
    default: return each_tile_row(m, e, from, to, rows, which, count, take);
  }
}

// A x of expert e, (count, rank), into `low`; null without factors.
inline const float* low_rank(const StepMatrix& m, int64_t e, const StepRows& rows, const int64_t* which, int64_t count,
                             Buffer<float>& low) {
  if (!m.rank) return nullptr;
  StepMatrix a{};
  a.kind = ROWS_F32, a.out = m.rank, a.in = m.in, a.data = m.lora_a;
  a.stride_e = m.rank * m.in, a.stride_row = m.in;
  float* out = low.get(size_t(count * m.rank));
  products(a, e, 0, m.rank, rows, which, count, [&](int64_t j, int64_t r, float value) { out[r * m.rank + j] = value; });
  return out;
}

// As `products` with what lies at `place`, and B of expert e times what `low_rank` gave.
inline void adapted_products(const StepMatrix& m, int64_t place, int64_t e, int64_t from, int64_t to,
                             const StepRows& rows, const int64_t* which, int64_t count, const float* low,
                             const Sink& take) {
  static_assert(LORA_RANKS % LANES == 0);
  if (!low) return products(m, place, from, to, rows, which, count, take);
  const float* b = m.lora_b + e * m.out * m.rank;
  products(m, place, from, to, rows, which, count, [&](int64_t j, int64_t r, float value) {
    Floats sum{};
    for (int64_t k = 0; k < m.rank; k += LANES) sum += load<LANES>(b + j * m.rank + k) * load<LANES>(low + r * m.rank + k);
    take(j, r, value + total(sum));
  });
}

}  // namespace amoeba
