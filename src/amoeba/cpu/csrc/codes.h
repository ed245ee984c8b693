// Weights in e4m3 with a scale in fp32 for each block: one byte a number in memory, made numbers as they are read.
//
// A code has a sign, four bits of exponent with a bias of 7 and three of mantissa; 0x7f and 0xff are NaN. Each number is
// exact in bf16. Blocks are powers of two of at least sixteen columns, so sixteen codes of a row that begin at a multiple
// of sixteen have one scale.
#pragma once
#include "vectors.h"

namespace [[gnu::visibility("hidden")]] amoeba {

// Which scale belongs to a row or a column. The rows of gate_up may be two parts, each with blocks of its own.
struct ScaleAxis {  // the order of `CScaleAxis` in codes.py
  int64_t shift, part, part_blocks, stride;  // log2 of the block; length of the first part, and its blocks
  int64_t at(int64_t i) const { return (i < part ? i >> shift : part_blocks + ((i - part) >> shift)) * stride; }
};

struct Scales {  // the order of `CScales`
  const float* data = nullptr;
  int64_t stride_e = 0;
  ScaleAxis row = {}, column = {};
  const float* of_row(int64_t expert, int64_t i) const { return data + expert * stride_e + row.at(i); }
};

constexpr int64_t CODES = 16;            // that are read at once
constexpr float CODES_ARE_OVER = 256.0f;  // read as half precision, whose bias is 15, they are 2^8 times too small

// LANES codes that lie together, each in a word.
inline Words load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  Words words;
  for (int i = 0; i < LANES; ++i) words[i] = p[i];
  return words;
#endif
}

// What sixteen codes stand for over CODES_ARE_OVER, in registers of the machine: sixteen floats at once would go through
// memory where they are several.
struct Numbers {
  Floats at[CODES / LANES];
};
inline Numbers load_codes(const uint8_t* p) {
#if defined(__aarch64__) && defined(__ARM_NEON) && !defined(AMOEBA_PLAIN_CODES)
  // The two bytes of a half are made apart, sixteen codes to an instruction: s0eeeemm and m0000000. One core decodes 3.0
  // billion codes a second so, 2.3 billion numbers in bf16 (Neoverse-N1, 2026-11-17).
  const uint8x16_t codes = vld1q_u8(p), low = vshlq_n_u8(codes, 7);
  const uint8x16_t shifted = vreinterpretq_u8_s8(vshrq_n_s8(vreinterpretq_s8_u8(codes), 1));
  const uint8x16_t nan = vceqq_u8(vshlq_n_u8(codes, 1), vdupq_n_u8(0xfe));
  const uint8x16_t high = vorrq_u8(vandq_u8(shifted, vdupq_n_u8(0xbf)), vandq_u8(nan, vdupq_n_u8(0x7e)));
  const float16x8_t half[2] = {vreinterpretq_f16_u8(vzip1q_u8(low, high)), vreinterpretq_f16_u8(vzip2q_u8(low, high))};
  return {{(Floats)vcvt_f32_f16(vget_low_f16(half[0])), (Floats)vcvt_high_f32_f16(half[0]),
           (Floats)vcvt_f32_f16(vget_low_f16(half[1])), (Floats)vcvt_high_f32_f16(half[1])}};
#else
  // Below 8 the exponent is 0: m . 2^-9. No number here is below what a float holds, whether or not those are flushed.
  Numbers found;
#pragma GCC unroll 4
  for (int i = 0; i < CODES / LANES; ++i) {
    const Words codes = load_bytes(p + i * LANES), size = codes & 0x7f;
    const Floats small = __builtin_convertvector((Integers)size, Floats) * 0x1p-17f;
    Words bits = select(size < 8, (Words)small, (size << 20) + (112u << 23));
    bits = select(size == 0x7f, Words{} + 0x7fc00000u, bits);
    found.at[i] = (Floats)(bits | (codes & 0x80) << 24);
  }
  return found;
#endif
}

// Only the first `count`, up to sixteen; what is not loaded is 0.
inline Numbers load_some_codes(const uint8_t* p, int64_t count) {
  if (count >= CODES) return load_codes(p);
  alignas(16) uint8_t codes[CODES] = {};
  if (count > 0) std::memcpy(codes, p, size_t(count));
  return load_codes(codes);
}

// The numbers times a scale, which has CODES_ARE_OVER in it; in bf16 rounded as round_to_bf16.
inline void store_scaled(float* p, const Numbers& numbers, float scale) {
#pragma GCC unroll 4
  for (int i = 0; i < CODES / LANES; ++i) store(p + i * LANES, numbers.at[i] * scale);
}
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
template <class Number>
inline void store_some_scaled(Number* p, const Numbers& numbers, float scale, int64_t count) {
  if (count >= CODES) return store_scaled(p, numbers, scale);
  alignas(64) Number values[CODES];
  store_scaled(values, numbers, scale);
  if (count > 0) std::memcpy(p, values, size_t(count) * sizeof(Number));
}

}  // namespace amoeba
