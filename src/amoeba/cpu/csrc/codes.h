// Weights in codes with a scale for each block: eight or four bits a number in memory, made numbers as they are read.
//
// An element says what a code stands for: a sign, some bits of exponent and some of mantissa, always exact in bf16.
// Codes of four bits lie two to a byte, the first in the low bits, and fill whole blocks. Blocks are powers of two of
// at least sixteen columns, so sixteen codes of a row that begin at a multiple of sixteen have one scale.
#pragma once
#include "blocks.h"

namespace [[gnu::visibility("hidden")]] amoeba {

// Which scale belongs to a row or a column. The rows of gate_up may be two parts, each with blocks of its own.
struct ScaleAxis {  // the order of `CScaleAxis` in codes.py
  int64_t shift, part, part_blocks, stride;  // log2 of the block; length of the first part, and its blocks
  int64_t at(int64_t i) const { return (i < part ? i >> shift : part_blocks + ((i - part) >> shift)) * stride; }
};

// The scales of one row of blocks: floats, or bytes that stand for some, all times one number.
struct RowScales {
  const void* data;
  const float* values;  // of the 256 bytes; null where data is floats
  float whole;
  float without_whole(int64_t i) const {
    return *(values ? values + static_cast<const uint8_t*>(data)[i] : static_cast<const float*>(data) + i);
  }
  float at(int64_t i) const { return without_whole(i) * whole; }
};

// From Q8_0 on, blocks that have their scales among their numbers.
enum ElementKind : int64_t { E4M3, E2M1, Q8_0_, Q5_0_, Q5_1_, Q4_0_, Q4_1_, Q6_K_, Q5_K_, Q4_K_, Q3_K_, Q2_K_, NF4_ };

inline Unpack unpack_of(int64_t kind) {
  constexpr Unpack ALL[] = {unpack<Q8_0>, unpack<Q5_0>, unpack<Q5_1>, unpack<Q4_0>, unpack<Q4_1>, unpack<Q6_K>,
                            unpack<Q5_K>, unpack<Q4_K>, unpack<Q3_K>, unpack<Q2_K>, unpack<Nf4>};
  return kind < Q8_0_ ? nullptr : ALL[kind - Q8_0_];
}

struct Coding {                          // the order of `CCoding`
  int64_t element = E4M3;                // ElementKind
  const void* scales = nullptr;          // null where there are no codes
  const float* scale_values = nullptr;   // what a byte stands for, where scales are bytes
  const float* matrix_scale = nullptr;   // one of each expert, by which its scales are multiplied; may be null
  int64_t stride_e = 0;                  // of scales
  int64_t matrix_stride_e = 0;           // of matrix_scale: experts of a store lie apart
  ScaleAxis row = {}, column = {};

  RowScales of_row(int64_t expert, int64_t i) const {
    const int64_t start = expert * stride_e + row.at(i);
    if (!scale_values) return {static_cast<const float*>(scales) + start, nullptr, 1.0f};
    const float whole = matrix_scale ? matrix_scale[expert * matrix_stride_e] : 1.0f;
    return {static_cast<const uint8_t*>(scales) + start, scale_values, whole};
  }
};

constexpr int64_t CODES = 16;  // that are read at once

// What sixteen codes stand for, in registers of the machine: sixteen floats at once would go through memory where they
// are several.
struct Numbers {
  Floats at[CODES / LANES];
};

// Codes in words, by arithmetic. With an exponent of 0 a number is mantissa . 2^(1 - BIAS - MANTISSA). No number here
// is below what a float holds, whether or not those are flushed.
template <int EXPONENT, int MANTISSA, int BIAS>
inline Floats numbers_of(Words codes) {
  constexpr int SIGN = EXPONENT + MANTISSA;
  const Words size = codes & ((1 << SIGN) - 1);
  const Floats small = __builtin_convertvector((Integers)size, Floats) * (1.0f / float(1 << (BIAS + MANTISSA - 1)));
  const Words bits = select(size < (1 << MANTISSA), (Words)small, (size << (23 - MANTISSA)) + ((127u - BIAS) << 23));
  return (Floats)(bits | (codes >> SIGN & 1) << 31);
}

#if defined(__aarch64__) && defined(__ARM_NEON) && !defined(AMOEBA_PLAIN_CODES)
#define AMOEBA_READS_BY_NEON 1
// The upper two bytes of a float, seeeeeee and emmm0000, are made apart, sixteen to an instruction.
inline Numbers floats_of_upper_bytes(uint8x16_t low, uint8x16_t high) {
  const uint16x8_t first = vreinterpretq_u16_u8(vzip1q_u8(low, high));
  const uint16x8_t last = vreinterpretq_u16_u8(vzip2q_u8(low, high));
  const uint16x8_t zero = vdupq_n_u16(0);
  return {{(Floats)vzip1q_u16(zero, first), (Floats)vzip2q_u16(zero, first), (Floats)vzip1q_u16(zero, last),
           (Floats)vzip2q_u16(zero, last)}};
}
#endif

struct E4m3 {  // 0x7f and 0xff are NaN
  static constexpr int64_t bytes(int64_t codes) { return codes; }
#ifdef AMOEBA_READS_BY_NEON
  // The first sixteen codes, of which eight have an exponent of 0, are looked up. One core makes 3.3 billion numbers a
  // second so in sums with one row, and 3.8 billion of e2m1 (Neoverse-N1, 2026-11-17, by a script); by way of half
  // precision, whose conversion takes two cycles, 2.9 billion.
  static Numbers load(const uint8_t* p) {
    const uint8x16_t first_high = {0,    0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c,
                                   0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c};
    const uint8x16_t first_low = {0,    0,    0x80, 0xc0, 0,    0x20, 0x40, 0x60,
                                  0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0};
    const uint8x16_t codes = vld1q_u8(p), size = vandq_u8(codes, vdupq_n_u8(0x7f));
    const uint8x16_t low = vqtbx1q_u8(vshlq_n_u8(codes, 4), first_low, size);
    const uint8x16_t large = vqtbx1q_u8(vaddq_u8(vshrq_n_u8(size, 4), vdupq_n_u8(60)), first_high, size);
    const uint8x16_t high = vorrq_u8(vbslq_u8(vdupq_n_u8(0x80), codes, large), vceqq_u8(size, vdupq_n_u8(0x7f)));
    return floats_of_upper_bytes(low, high);
  }
#elif defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__))
  // As half precision, s0eeeemm m0000000, whose bias is 8 larger; its conversion flushes nothing. 0x7f is then 1.875.
  static Numbers load(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(int16_t(0xbfff)));
    Numbers found;
#ifdef __AVX512F__
    const __m512 small = _mm512_cvtph_ps(halves);
    const __mmask16 number = _mm512_cmp_ps_mask(_mm512_abs_ps(small), _mm512_set1_ps(1.875f), _CMP_NEQ_OQ);
    found.at[0] = (Floats)_mm512_mask_mul_ps((__m512)(Words{} + 0x7fc00000u), number, small, _mm512_set1_ps(256.0f));
#else
    const __m128i half[2] = {_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)};
    for (int i = 0; i < 2; ++i) {
      const Floats small = (Floats)_mm256_cvtph_ps(half[i]);
      const Words nan = (Words)((Words)((Words)small & 0x7fffffffu) == 0x3ff00000u);
      found.at[i] = (Floats)((Words)(small * 256.0f) | nan);
    }
#endif
    return found;
  }
#else
  static Numbers load(const uint8_t* p) {
    Numbers found;
#pragma GCC unroll 4
    for (int i = 0; i < CODES / LANES; ++i) {
      const Words codes = load_bytes(p + i * LANES);
      const Words bits = (Words)numbers_of<4, 3, 7>(codes);
      found.at[i] = (Floats)select((codes & 0x7f) == 0x7f, bits | 0x7fc00000u, bits);
    }
    return found;
  }
#endif
  // Only the first `count`, fewer than sixteen; what is not loaded is 0.
  static Numbers load_some(const uint8_t* p, int64_t count) {
    alignas(16) uint8_t codes[CODES] = {};
    std::memcpy(codes, p, size_t(count));
    return load(codes);
  }
};

struct E2m1 {  // 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
  static constexpr int64_t bytes(int64_t codes) { return codes / 2; }
  static Numbers load(const uint8_t* p) {
#ifdef AMOEBA_READS_BY_NEON
    const uint8x16_t upper = {0,    0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                              0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
    const uint8x16_t lower = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
    const uint8x16_t pairs = vcombine_u8(vld1_u8(p), vdup_n_u8(0));
    const uint8x16_t codes = vandq_u8(vzip1q_u8(pairs, vshrq_n_u8(pairs, 4)), vdupq_n_u8(15));
    return floats_of_upper_bytes(vqtbl1q_u8(lower, codes), vqtbl1q_u8(upper, codes));
#elif defined(__AVX512F__)
    const __m512 values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
#ifdef __AVX512VBMI__
    // the eight bytes in each lane of 64 bits: in lane i the lower word begins with bit 8 i, the upper with 8 i + 4
    const __m512i first = _mm512_setr_epi64(0x400000000, 0xc00000008, 0x1400000010, 0x1c00000018, 0x2400000020,
                                            0x2c00000028, 0x3400000030, 0x3c00000038);
    const __m512i codes = _mm512_multishift_epi64_epi8(first, _mm512_set1_epi64(load_word<int64_t>(p)));
#else
    const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m512i halves = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set1_epi32(load_word<int32_t>(p))),
                                              _mm256_set1_epi32(load_word<int32_t>(p + 4)), 1);
    const __m512i codes = _mm512_srlv_epi32(halves, shifts);
#endif
    return {{(Floats)_mm512_permutexvar_ps(codes, values)}};  // by the lowest four bits
#elif defined(__AVX2__)
    const __m256 values = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    Numbers found;
    for (int i = 0; i < CODES / LANES; ++i) {
      const __m256i codes = _mm256_srlv_epi32(_mm256_set1_epi32(load_word<int32_t>(p + 4 * i)), shifts);
      const __m256 size = _mm256_permutevar8x32_ps(values, codes);  // by the lowest three bits
      found.at[i] = (Floats)((Words)size | (Words)codes << 28 & 0x80000000u);
    }
    return found;
#else
    Numbers found;
    for (int i = 0; i < CODES / LANES; ++i) {
      Words codes;
      for (int lane = 0; lane < LANES; ++lane) codes[lane] = p[(i * LANES + lane) / 2] >> 4 * (lane % 2);
      found.at[i] = numbers_of<2, 1, 1>(codes);
    }
    return found;
#endif
  }
  // The rest of a block follows in memory.
  static Numbers load_some(const uint8_t* p, int64_t) { return load(p); }

 private:
  template <class Word>
  static Word load_word(const uint8_t* p) {
    Word word;
    std::memcpy(&word, p, sizeof(word));
    return word;
  }
};

// Calls with the element of a kind.
template <class Call>
inline void with_element(int64_t kind, const Call& call) { kind == E2M1 ? call(E2m1()) : call(E4m3()); }

// The numbers from column k of a row on, of which `count` are left: up to sixteen.
template <class Element>
inline Numbers load_codes(const uint8_t* row, int64_t k, int64_t count) {
  const uint8_t* p = row + Element::bytes(k);
  return count >= CODES ? Element::load(p) : Element::load_some(p, count);
}

// The numbers times a scale, each product rounded once; in bf16 again, as by round_to_bf16.
template <class Element>
inline void store_scaled(float* p, const Numbers& numbers, float scale) {
#pragma GCC unroll 4
  for (int i = 0; i < CODES / LANES; ++i) store(p + i * LANES, numbers.at[i] * scale);
}
template <class Element>
inline void store_scaled(uint16_t* p, const Numbers& numbers, float scale) {
  if constexpr (LANES == CODES) {
    Floats16 scaled;
    const Floats only = numbers.at[0] * scale;
    std::memcpy(&scaled, &only, sizeof(scaled));
    return store(p, scaled);
  }
#pragma GCC unroll 4
  for (int i = 0; i < CODES / LANES; ++i) {
    const Words bits = (Words)(numbers.at[i] * scale), rounded = bits + 0x7fff + (bits >> 16 & 1);
    const Words kept = select((bits & 0x7fffffff) > 0x7f800000, Words{} + 0x7fc00000u, rounded);
#if defined(__aarch64__) && defined(__ARM_NEON)
    vst1_u16(p + i * LANES, vshrn_n_u32((uint32x4_t)kept, 16));
#else
    for (int lane = 0; lane < LANES; ++lane) p[i * LANES + lane] = uint16_t(kept[lane] >> 16);
#endif
  }
}
// Numbers as they are, or rounded to bf16.
inline void round_some(const float* numbers, int64_t count, float* out) {
  std::memcpy(out, numbers, size_t(count) * sizeof(float));
}
inline void round_some(const float* numbers, int64_t count, uint16_t* out) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) store(out + i, load(numbers + i));
  for (; i < count; ++i) out[i] = round_to_bf16(numbers[i]);
}

template <class Element, class Number>
inline void store_some_scaled(Number* p, const Numbers& numbers, float scale, int64_t count) {
  if (count >= CODES) return store_scaled<Element>(p, numbers, scale);
  alignas(64) Number values[CODES];
  store_scaled<Element>(values, numbers, scale);
  std::memcpy(p, values, size_t(count) * sizeof(Number));
}

}  // namespace amoeba
