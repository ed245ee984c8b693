// The arithmetic of sums in vectors: one word of a row meets LANES words of columns, by what the compiler was told the
// CPU has.
//
//   plain int8   VPDPBUSD (VNNI), SDOT (NEON), else two products of 16-bit halves (x86), else widened to 32 bits
//   plain bf16   BFDOT (NEON), else fp32
//   dots         VPDPBUSD and VDPBF16PS
//
// An arithmetic has
//   Vector                          LANES sums
//   Rows<R>(words)                  the 16 words of each of R rows, as the products want them
//   Columns(words)                  LANES words of columns, made ready once for all rows
//   add<W>(sum, rows, r, w, columns)   with word w + W of row r; w is a multiple of 4, for loads of four words
// The sums of int8 are the same on all of them to the bit. VPMADDUBSW is not among them: its sums of two saturate.
#pragma once
#include "packed_layout.h"

namespace [[gnu::visibility("hidden")]] amoeba {

using Shorts = VectorOf<int16_t, 2 * LANES>::Type;
inline Words load_words(const uint32_t* p) { return load_as<uint32_t, LANES>(p); }

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
#if defined(__AVX512BW__)
    return (Integers)_mm512_madd_epi16(_mm512_set1_epi32(int(word)), (__m512i)columns);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (Integers)_mm256_madd_epi16(_mm256_set1_epi32(int(word)), (__m256i)columns);
#else  // integers are narrower than floats where AVX comes without AVX2, or AVX-512 without its BW
    __m128i part[LANES / 4];
    std::memcpy(part, &columns, sizeof(part));
    for (__m128i& sums : part) sums = _mm_madd_epi16(_mm_set1_epi32(int(word)), sums);
    Integers sums;
    std::memcpy(&sums, part, sizeof(part));
    return sums;
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
struct WholeColumns {
  Words words;
  WholeColumns() = default;
  explicit WholeColumns(const uint32_t* p) : words(load_words(p)) {}
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
  using Columns = WholeColumns;
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

#ifdef AMOEBA_AVX512
struct VdpArithmetic {
  using Vector = Floats;
  template <int R>
  using Rows = WholeRows<R>;
  using Columns = WholeColumns;
  template <int W, int R>
  static Floats add(Floats sum, const Rows<R>& rows, int r, int w, const Columns& columns) {
    const Words word = Words{} + *rows.at(r, w + W);
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)word, (__m512bh)columns.words);
  }
};
#endif

#ifdef AMOEBA_SDOT
struct SdotArithmetic {  // rows and columns with sign: ROW_OFFSET is 0
  using Vector = int32x4_t;
  template <int R>
  using Rows = WholeRows<R>;
  using Columns = WholeColumns;
  template <int W, int R>
  static Vector add(Vector sum, const Rows<R>& rows, int r, int w, const Columns& columns) {
    return vdotq_laneq_s32(sum, (int8x16_t)columns.words, (int8x16_t)load_words(rows.at(r, w)), W);
  }
};
#endif

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
struct BfdotArithmetic {
  using Vector = float32x4_t;
  template <int R>
  using Rows = WholeRows<R>;
  using Columns = WholeColumns;
  template <int W, int R>
  static Vector add(Vector sum, const Rows<R>& rows, int r, int w, const Columns& columns) {
    return vbfdotq_laneq_f32(sum, (bfloat16x8_t)columns.words, (bfloat16x8_t)load_words(rows.at(r, w)), W);
  }
};
#endif

// ------------------------------------------------------------------------------------------------------ what is taken

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
using PlainInt8 = VnniArithmetic;
#elif defined(__SSE2__)
using PlainInt8 = ShortArithmetic;
#elif defined(AMOEBA_SDOT)
using PlainInt8 = SdotArithmetic;
#else
using PlainInt8 = WideningArithmetic;
#endif
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
using PlainBf16 = BfdotArithmetic;
#else
using PlainBf16 = FloatArithmetic;
#endif

template <class Kind>
using PlainArithmetic = std::conditional_t<std::is_same_v<Kind, Bf16>, PlainBf16, PlainInt8>;
#ifdef AMOEBA_AVX512
template <class Kind>
using DotArithmetic = std::conditional_t<std::is_same_v<Kind, Bf16>, VdpArithmetic, PlainInt8>;
#endif

}  // namespace amoeba
