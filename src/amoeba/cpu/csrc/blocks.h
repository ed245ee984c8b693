// Blocks (precision/blocks.py): a row is a run of them, each with its scales among its numbers, as GGUF files have ggml's.
// 32 numbers are made at once, a group: scale . q, or scale . q + offset.
#pragma once
#include "vectors.h"

namespace [[gnu::visibility("hidden")]] amoeba {

constexpr int GROUP = 32;

// LANES bytes that lie together, each in a word.
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

inline Floats numbers_in(Words q) { return __builtin_convertvector((Integers)q, Floats); }

// The lowest bit of each lane is that of its own number, from `first` on.
inline Words bits_from(uint32_t bits, int first) {
  Words found;
  for (int lane = 0; lane < LANES; ++lane) found[lane] = bits >> (first + lane) & 1;
  return found;
}

inline float half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, sizeof(half));
#if defined(__F16C__)
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
#else
  const uint32_t size = half & 0x7fff, sign = uint32_t(half & 0x8000) << 16;
  if (size < 0x400) return float_of(bits_of(float(size) * 0x1p-24f) | sign);
  return float_of((size << 13) + (size < 0x7c00 ? 112u << 23 : 224u << 23) | sign);
#endif
}

struct Q8_0 {
  static constexpr int64_t NUMBERS = 32, BYTES = 34;
  static void group(const uint8_t* block, int, float* out) {
    const float scale = half_at(block);
    for (int i = 0; i < GROUP; i += LANES)
      store(out + i, __builtin_convertvector((Integers)(load_bytes(block + 2 + i) << 24) >> 24, Floats) * scale);
  }
};

// Nibbles after `FIRST` bytes, minus `ZERO`, with a fifth bit in the four bytes before them and an offset, or without.
template <int64_t FIRST, int ZERO, bool FIFTH, bool OFFSET>
struct Nibbles {
  static constexpr int64_t NUMBERS = 32, BYTES = FIRST + 16;
  static void group(const uint8_t* block, int, float* out) {
    const float scale = half_at(block), offset = OFFSET ? half_at(block + 2) : 0.0f;
    uint32_t high = 0;
    if (FIFTH) std::memcpy(&high, block + FIRST - 4, sizeof(high));
    for (int i = 0; i < 16; i += LANES) {
      const Words bytes = load_bytes(block + FIRST + i);
      Words low = bytes & 15, upper = bytes >> 4;
      if (FIFTH) low |= bits_from(high, i) << 4, upper |= bits_from(high, i + 16) << 4;
      store(out + i, numbers_in(low - ZERO) * scale + offset);
      store(out + i + 16, numbers_in(upper - ZERO) * scale + offset);
    }
  }
};
using Q4_0 = Nibbles<2, 8, false, false>;
using Q4_1 = Nibbles<4, 0, false, true>;
using Q5_0 = Nibbles<6, 16, true, false>;
using Q5_1 = Nibbles<8, 0, true, true>;

// Scale and offset of one of eight groups, 6 bits each.
inline std::pair<float, float> scale_and_offset(const uint8_t* block, int group) {
  const uint8_t* p = block + 4;
  const int at = group & 3;
  int scale = p[at] & 63, least = p[4 + at] & 63;
  if (group >= 4) {
    scale = (p[8 + at] & 15) | (p[at] >> 6) << 4;
    least = p[8 + at] >> 4 | (p[4 + at] >> 6) << 4;
  }
  return {half_at(block) * float(scale), -(half_at(block + 2) * float(least))};
}

template <bool FIFTH>
struct FourOrFive {
  static constexpr int64_t NUMBERS = 256, BYTES = FIFTH ? 176 : 144;
  static void group(const uint8_t* block, int group, float* out) {
    const auto [scale, offset] = scale_and_offset(block, group);
    const uint8_t *low = block + (FIFTH ? 48 : 16) + group / 2 * 32, *high = block + 16;
    const int shift = group % 2 * 4;
    for (int i = 0; i < GROUP; i += LANES) {
      Words q = load_bytes(low + i) >> shift & 15;
      if (FIFTH) q |= (load_bytes(high + i) >> group & 1) << 4;
      store(out + i, numbers_in(q) * scale + offset);
    }
  }
};
using Q4_K = FourOrFive<false>;
using Q5_K = FourOrFive<true>;

struct Q6_K {
  static constexpr int64_t NUMBERS = 256, BYTES = 210;
  static void group(const uint8_t* block, int group, float* out) {
    const int quarter = group % 4;
    const uint8_t *low = block + group / 4 * 64 + quarter % 2 * 32, *high = block + 128 + group / 4 * 32;
    const uint8_t* scales = block + 192 + 2 * group;
    const float whole = half_at(block + 208);
    const int shift = quarter / 2 * 4;
    for (int half = 0; half < 2; ++half) {
      const float scale = whole * float(int8_t(scales[half]));
      for (int i = 16 * half; i < 16 * half + 16; i += LANES) {
        const Words q = (load_bytes(low + i) >> shift & 15) | (load_bytes(high + i) >> 2 * quarter & 3) << 4;
        store(out + i, numbers_in(q - 32) * scale);
      }
    }
  }
};

struct Q3_K {
  static constexpr int64_t NUMBERS = 256, BYTES = 110;
  static void group(const uint8_t* block, int group, float* out) {
    const uint8_t *low = block + 32 + group / 4 * 32, *scales = block + 96;
    const float whole = half_at(block + 108);
    for (int half = 0; half < 2; ++half) {
      const int at = 2 * group + half, fine = scales[at % 8] >> at / 8 * 4 & 15, coarse = scales[8 + at % 4] >> at / 4 * 2 & 3;
      const float scale = whole * float((fine | coarse << 4) - 32);
      for (int i = 16 * half; i < 16 * half + 16; i += LANES) {
        const Words q = (load_bytes(low + i) >> group % 4 * 2 & 3) + (load_bytes(block + i) >> group & 1) * 4;
        store(out + i, numbers_in(q - 4) * scale);
      }
    }
  }
};

struct Q2_K {
  static constexpr int64_t NUMBERS = 256, BYTES = 84;
  static void group(const uint8_t* block, int group, float* out) {
    const uint8_t* low = block + 16 + group / 4 * 32;
    for (int half = 0; half < 2; ++half) {
      const int both = block[2 * group + half];
      const float scale = half_at(block + 80) * float(both & 15), offset = -(half_at(block + 82) * float(both >> 4));
      for (int i = 16 * half; i < 16 * half + 16; i += LANES)
        store(out + i, numbers_in(load_bytes(low + i) >> group % 4 * 2 & 3) * scale + offset);
    }
  }
};

// The numbers of codes in words, of which the upper bits may be any.
inline Floats nf4_of(Words codes) {
  alignas(64) static constexpr float NUMBERS[16] = {
      -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
      -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
      0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
#if defined(__AVX512F__)
  return (Floats)_mm512_permutexvar_ps((__m512i)codes, _mm512_load_ps(NUMBERS));
#elif defined(__AVX2__)
  const __m256 below = _mm256_permutevar8x32_ps(_mm256_load_ps(NUMBERS), (__m256i)codes);
  const __m256 above = _mm256_permutevar8x32_ps(_mm256_load_ps(NUMBERS + 8), (__m256i)codes);
  return (Floats)_mm256_blendv_ps(below, above, _mm256_castsi256_ps((__m256i)(codes << 28)));
#else
  Floats found;
  for (int lane = 0; lane < LANES; ++lane) found[lane] = NUMBERS[codes[lane] & 15];
  return found;
#endif
}

struct Nf4 {  // a scale, then low nibbles of the first group and high ones of the second
  static constexpr int64_t NUMBERS = 64, BYTES = 36;
  static void group(const uint8_t* block, int group, float* out) {
    float scale;
    std::memcpy(&scale, block, sizeof(scale));
    for (int i = 0; i < GROUP; i += LANES) store(out + i, nf4_of(load_bytes(block + 4 + i) >> 4 * group) * scale);
  }
};

// The numbers of a row from column k on, both multiples of a group.
using Unpack = void (*)(const uint8_t* row, int64_t k, int64_t count, float* out);

template <class Block>
void unpack(const uint8_t* row, int64_t k, int64_t count, float* out) {
  for (int64_t end = k + count; k < end; k += GROUP, out += GROUP)
    Block::group(row + k / Block::NUMBERS * Block::BYTES, int(k % Block::NUMBERS / GROUP), out);
}

}  // namespace amoeba
