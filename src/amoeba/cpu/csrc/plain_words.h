// The arithmetic of the plain-vector way: one word of a row meets LANES words of columns, by what the compiler was told
// the CPU has.
//
//   int8   VPDPBUSD (VNNI), SDOT (NEON), else two products of 16-bit halves (x86), else widened to 32 bits
//   bf16   BFDOT (NEON), else fp32
//
// Arithmetic<float> (bf16) and Arithmetic<int32_t> (int8) have
//   Vector                          LANES sums
//   Rows<R>(words)                  the 16 words of each of R rows, as the products want them
//   Columns(words)                  LANES words of columns, made ready once for all rows
//   add<W>(sum, rows, r, w, columns)   with word w + W of row r; w is a multiple of 4, for loads of four words
// The sums of int8 are the same on all of them to the bit. VPMADDUBSW is not among them: its sums of two saturate.
#pragma once
#include "words.h"

namespace [[gnu::visibility("hidden")]] amoeba {

#if defined(__AVX512BW__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef int16_t Shorts __attribute__((vector_size(LANES * 4)));
typedef uint32_t Anywhere __attribute__((vector_size(LANES * 4), aligned(4), may_alias));  // in memory, not as a value

inline Words load_words(const uint32_t* p) { return *reinterpret_cast<const Anywhere*>(p); }

template <class Sum>
struct Arithmetic;

// --------------------------------------------------------------------------------------------- words cut into halves

// Of a tile of rows: the halves of each word lie apart, so that they are loaded into all lanes as they are.
template <class Split, int R>
struct SplitRows {
  alignas(64) uint32_t half[2][R][TILE];
  explicit SplitRows(const uint32_t* words) {
    for (int r = 0; r < R; ++r)
      for (int w = 0; w < TILE; ++w) {
        half[0][r][w] = Split::first(words[r * TILE + w]);
        half[1][r][w] = Split::second(words[r * TILE + w]);
      }
  }
};

struct FloatArithmetic {
  using Vector = Floats;
  static uint32_t first(uint32_t word) { return word << 16; }
  static uint32_t second(uint32_t word) { return word & 0xffff0000u; }
  template <int R>
  using Rows = SplitRows<FloatArithmetic, R>;
  struct Columns {
    Floats first, second;
    Columns() = default;
    explicit Columns(const uint32_t* p) {
      const Words words = load_words(p);
      first = (Floats)(words << 16), second = (Floats)(words & 0xffff0000u);
    }
  };
  template <int W, int R>
  static Floats add(Floats sum, const Rows<R>& rows, int r, int w, const Columns& columns) {
    return sum + columns.first * float_of(rows.half[0][r][w + W]) + columns.second * float_of(rows.half[1][r][w + W]);
  }
};

#ifdef __SSE2__
// A word's even bytes and its odd ones as 16 bits each, multiplied and added in pairs: exact in 32 bits.
struct ShortArithmetic {
  using Vector = Integers;
  static uint32_t first(uint32_t word) { return word & 0x00ff00ffu; }
  static uint32_t second(uint32_t word) { return word >> 8 & 0x00ff00ffu; }
  template <int R>
  using Rows = SplitRows<ShortArithmetic, R>;
  struct Columns {
    Shorts first, second;
    Columns() = default;
    explicit Columns(const uint32_t* p) {
      const Shorts words = (Shorts)load_words(p);
      first = words << 8 >> 8, second = words >> 8;
    }
  };
  template <int W, int R>
  static Integers add(Integers sum, const Rows<R>& rows, int r, int w, const Columns& columns) {
    return sum + (pairs(rows.half[0][r][w + W], columns.first) + pairs(rows.half[1][r][w + W], columns.second));
  }

 private:
  static Integers pairs(uint32_t word, Shorts columns) {
    const Words words = Words{} + word;
#if defined(__AVX512BW__)
    return (Integers)_mm512_madd_epi16((__m512i)words, (__m512i)columns);
#elif defined(__AVX2__)
    return (Integers)_mm256_madd_epi16((__m256i)words, (__m256i)columns);
#else
    return (Integers)_mm_madd_epi16((__m128i)words, (__m128i)columns);
#endif
  }
};
#endif

// --------------------------------------------------------------------------------------------------- words as they are

// For instructions that take a row's word whole.
template <int R>
struct WholeRows {
  const uint32_t* words;
  explicit WholeRows(const uint32_t* p) : words(p) {}
  const uint32_t* at(int r, int w) const { return words + r * TILE + w; }
};

struct WideningArithmetic {
  using Vector = Integers;
  template <int R>
  using Rows = WholeRows<R>;
  struct Columns {
    Integers byte[4];
    Columns() = default;
    explicit Columns(const uint32_t* p) {
      const Words words = load_words(p);
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) byte[q] = (Integers)(words << (24 - 8 * q)) >> 24;
    }
  };
  template <int W, int R>
  static Integers add(Integers sum, const Rows<R>& rows, int r, int w, const Columns& columns) {
    const uint32_t word = *rows.at(r, w + W);
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) sum += columns.byte[q] * int32_t(word >> 8 * q & 255);
    return sum;
  }
};

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
struct VnniArithmetic {
  using Vector = Integers;
  template <int R>
  using Rows = WholeRows<R>;
  struct Columns {
    Words words;
    Columns() = default;
    explicit Columns(const uint32_t* p) : words(load_words(p)) {}
  };
  template <int W, int R>
  static Integers add(Integers sum, const Rows<R>& rows, int r, int w, const Columns& columns) {
    const Words word = Words{} + *rows.at(r, w + W);
#ifdef __AVX512VNNI__
    return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)word, (__m512i)columns.words);
#else
    return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)word, (__m256i)columns.words);
#endif
  }
};
#endif

#ifdef AMOEBA_SDOT
struct SdotArithmetic {  // rows and columns with sign: ROW_OFFSET is 0
  using Vector = int32x4_t;
  template <int R>
  using Rows = WholeRows<R>;
  struct Columns {
    int8x16_t words;
    Columns() = default;
    explicit Columns(const uint32_t* p) : words(vreinterpretq_s8_u32(vld1q_u32(p))) {}
  };
  template <int W, int R>
  static Vector add(Vector sum, const Rows<R>& rows, int r, int w, const Columns& columns) {
    return vdotq_laneq_s32(sum, columns.words, vreinterpretq_s8_u32(vld1q_u32(rows.at(r, w))), W);
  }
};
#endif

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
struct BfdotArithmetic {
  using Vector = float32x4_t;
  template <int R>
  using Rows = WholeRows<R>;
  struct Columns {
    bfloat16x8_t words;
    Columns() = default;
    explicit Columns(const uint32_t* p) : words(vreinterpretq_bf16_u32(vld1q_u32(p))) {}
  };
  template <int W, int R>
  static Vector add(Vector sum, const Rows<R>& rows, int r, int w, const Columns& columns) {
    return vbfdotq_laneq_f32(sum, columns.words, vreinterpretq_bf16_u32(vld1q_u32(rows.at(r, w))), W);
  }
};
#endif

// ------------------------------------------------------------------------------------------------------ what is taken

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
template <>
struct Arithmetic<float> : BfdotArithmetic {};
#else
template <>
struct Arithmetic<float> : FloatArithmetic {};
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
template <>
struct Arithmetic<int32_t> : VnniArithmetic {};
#elif defined(__SSE2__)
template <>
struct Arithmetic<int32_t> : ShortArithmetic {};
#elif defined(AMOEBA_SDOT)
template <>
struct Arithmetic<int32_t> : SdotArithmetic {};
#else
template <>
struct Arithmetic<int32_t> : WideningArithmetic {};
#endif

}  // namespace amoeba
