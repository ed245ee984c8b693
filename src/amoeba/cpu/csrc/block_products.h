// Products of ggml's blocks with rows in planes of bytes, by AVX-512 with VNNI: of 64 columns at once the whole numbers,
// without sign, of which a lane of 32 bits holds four with one scale; GROUP_COLUMNS have the same. A number is
// scale . (q - ZERO), or scale . q + offset.
#pragma once
#include "codes.h"

#ifdef AMOEBA_AVX512_VNNI
namespace [[gnu::visibility("hidden")]] amoeba {

struct Codes64 {
  __m512i q;
  __m512 scale, offset;  // offset: of blocks without ZERO
};

// The lower half of the lanes from one word, the upper half from the other.
template <class First, class Last>
constexpr __m512i lanes_of(First first, Last last) {
  return (__m512i)(Integers16){first, first, first, first, first, first, first, first,
                               last,  last,  last,  last,  last,  last,  last,  last};
}
inline __m512i both_halves(const uint8_t* p) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512i bits(__m512i bytes, __m512i left, char mask) {
  return _mm512_and_si512(_mm512_rolv_epi32(bytes, left), _mm512_set1_epi8(mask));
}
// One number in fp16 of each of two blocks.
inline __m512 halves_of(const uint8_t* first, const uint8_t* last) {
  int16_t a, b;
  std::memcpy(&a, first, 2), std::memcpy(&b, last, 2);
  return _mm512_cvtph_ps(_mm256_mask_set1_epi16(_mm256_set1_epi16(a), 0xff00, b));
}

// One number in fp16 of each of eight blocks of 32.
template <int64_t BYTES>
inline void halves_of_eight(const uint8_t* p, float* scale) {
  alignas(16) uint16_t halves[8];
  for (int i = 0; i < 8; ++i) std::memcpy(halves + i, p + i * BYTES, 2);
  _mm256_storeu_ps(scale, _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(halves))));
}

// Of 32 numbers: 64 columns are two blocks.
struct BytesOf64 {
  static constexpr int64_t BYTES = Q8_0::BYTES, COLUMNS = 64;
  static constexpr int GROUP_COLUMNS = 32;
  static constexpr float ZERO = 128;
  explicit BytesOf64(const uint8_t*) {}
  static void scales_of_256(const uint8_t* p, float* scale, float*) { halves_of_eight<BYTES>(p, scale); }
  Codes64 at(const uint8_t* p, int) const {
    const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 2)));
    const auto* last = reinterpret_cast<const __m256i*>(p + BYTES + 2);
    const __m512i q = _mm512_inserti64x4(first, _mm256_loadu_si256(last), 1);
    return {_mm512_xor_si512(q, _mm512_set1_epi8(-128)), halves_of(p, p + BYTES), __m512{}};
  }
};

template <int64_t FIRST, int LEAST, bool FIFTH, bool OFFSET>
struct NibblesOf64 {
  static constexpr int64_t BYTES = FIRST + 16, COLUMNS = 64;
  static constexpr int GROUP_COLUMNS = 32;
  static constexpr float ZERO = LEAST;
  explicit NibblesOf64(const uint8_t*) {}
  static void scales_of_256(const uint8_t* p, float* scale, float* offset) {
    halves_of_eight<BYTES>(p, scale);
    if (OFFSET) halves_of_eight<BYTES>(p + 2, offset);
  }
  Codes64 at(const uint8_t* p, int) const {
    const auto sixteen = [](const uint8_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); };
    const __m512i bytes = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(sixteen(p + FIRST)), 0xff00,
                                                      sixteen(p + BYTES + FIRST));
    const __m512i right = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4);
    __m512i q = _mm512_and_si512(_mm512_srlv_epi64(bytes, right), _mm512_set1_epi8(15));
    if (FIFTH) {
      uint32_t first, last;
      std::memcpy(&first, p + FIRST - 4, 4), std::memcpy(&last, p + BYTES + FIRST - 4, 4);
      q = _mm512_mask_add_epi8(q, uint64_t(last) << 32 | first, q, _mm512_set1_epi8(16));
    }
    return {q, halves_of(p, p + BYTES), OFFSET ? halves_of(p + 2, p + BYTES + 2) : __m512{}};
  }
};

// The sixteen numbers of a block's table for 64 columns: of two groups, or of four half groups, from `first` on.
inline __m512 of_groups(__m512 table, int first) {
  return _mm512_permutexvar_ps(lanes_of(first, first + 1), table);
}
inline __m512 of_halves(__m512 table, int first) {
  const __m512i lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return _mm512_permutexvar_ps(_mm512_add_epi32(lane, _mm512_set1_epi32(first)), table);
}

template <bool FIFTH>
struct FourOrFiveOf256 {
  static constexpr int64_t BYTES = FourOrFive<FIFTH>::BYTES, COLUMNS = 256;
  static constexpr int GROUP_COLUMNS = 32;
  static constexpr float ZERO = 0;
  __m512 table;  // eight scales, then eight offsets
  explicit FourOrFiveOf256(const uint8_t* block) {
    uint32_t word[3];
    std::memcpy(word, block + 4, 12);
    const uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x30303030;
    const __m128i bytes = _mm_setr_epi32(int(word[0] & six), int((word[2] & four) | (word[0] >> 2 & two)),
                                         int(word[1] & six), int((word[2] >> 4 & four) | (word[1] >> 2 & two)));
    const __m512 whole = _mm512_mask_sub_ps(halves_of(block, block + 2), 0xff00, __m512{}, halves_of(block, block + 2));
    table = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), whole);
  }
  static void scales_of_256(const uint8_t* p, float* scale, float* offset) {
    const FourOrFiveOf256 block(p);
    _mm256_storeu_ps(scale, _mm512_castps512_ps256(block.table));
    _mm256_storeu_ps(offset, _mm512_extractf32x8_ps(block.table, 1));
  }
  Codes64 at(const uint8_t* block, int quarter) const {
    const uint8_t* low = block + (FIFTH ? 48 : 16) + quarter * 32;
    __m512i q = bits(both_halves(low), lanes_of(0, 28), 15);
    if (FIFTH) {
      const int left = 36 - 2 * quarter;
      q = _mm512_or_si512(q, bits(both_halves(block + 16), lanes_of(left, left - 1), 16));
    }
    return {q, of_groups(table, 2 * quarter), of_groups(table, 8 + 2 * quarter)};
  }
};

struct SixOf256 {
  static constexpr int64_t BYTES = Q6_K::BYTES, COLUMNS = 256;
  static constexpr int GROUP_COLUMNS = 16;
  static constexpr float ZERO = 32;
  __m512 table;
  explicit SixOf256(const uint8_t* block) {
    const __m128i scales = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 192));
    table = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(scales)), _mm512_set1_ps(half_at(block + 208)));
  }
  static void scales_of_256(const uint8_t* p, float* scale, float*) { _mm512_storeu_ps(scale, SixOf256(p).table); }
  Codes64 at(const uint8_t* block, int quarter) const {
    const __m512i low = _mm512_loadu_si512(block + quarter / 2 * 64);
    const int left = 36 - quarter % 2 * 4;
    const __m512i high = bits(both_halves(block + 128 + quarter / 2 * 32), lanes_of(left, left - 2), 48);
    const __m512i q = bits(low, lanes_of(left - 4, left - 4), 15);
    return {_mm512_or_si512(q, high), of_halves(table, 4 * quarter), __m512{}};
  }
};

struct ThreeOf256 {
  static constexpr int64_t BYTES = Q3_K::BYTES, COLUMNS = 256;
  static constexpr int GROUP_COLUMNS = 16;
  static constexpr float ZERO = 4;
  __m512 table;
  explicit ThreeOf256(const uint8_t* block) {
    uint32_t word[3];
    std::memcpy(word, block + 96, 12);
    const uint32_t four = 0x0f0f0f0f, two = 0x30303030;
    const __m128i bytes = _mm_setr_epi32(
        int((word[0] & four) | (word[2] << 4 & two)), int((word[1] & four) | (word[2] << 2 & two)),
        int((word[0] >> 4 & four) | (word[2] & two)), int((word[1] >> 4 & four) | (word[2] >> 2 & two)));
    const __m512i scales = _mm512_sub_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(32));
    table = _mm512_mul_ps(_mm512_cvtepi32_ps(scales), _mm512_set1_ps(half_at(block + 108)));
  }
  static void scales_of_256(const uint8_t* p, float* scale, float*) { _mm512_storeu_ps(scale, ThreeOf256(p).table); }
  Codes64 at(const uint8_t* block, int quarter) const {
    const int low = 32 - quarter % 2 * 4, high = 34 - 2 * quarter;
    const __m512i q = bits(both_halves(block + 32 + quarter / 2 * 32), lanes_of(low, low - 2), 3);
    const __m512i upper = bits(both_halves(block), lanes_of(high, high - 1), 4);
    return {_mm512_or_si512(q, upper), of_halves(table, 4 * quarter), __m512{}};
  }
};

struct TwoOf256 {
  static constexpr int64_t BYTES = Q2_K::BYTES, COLUMNS = 256;
  static constexpr int GROUP_COLUMNS = 16;
  static constexpr float ZERO = 0;
  __m512 table, offsets;
  explicit TwoOf256(const uint8_t* block) {
    const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block)));
    const auto times = [&](__m512i part, float whole) {
      return _mm512_mul_ps(_mm512_cvtepi32_ps(part), _mm512_set1_ps(whole));
    };
    table = times(_mm512_and_si512(both, _mm512_set1_epi32(15)), half_at(block + 80));
    offsets = times(_mm512_srli_epi32(both, 4), -half_at(block + 82));
  }
  static void scales_of_256(const uint8_t* p, float* scale, float* offset) {
    const TwoOf256 block(p);
    _mm512_storeu_ps(scale, block.table), _mm512_storeu_ps(offset, block.offsets);
  }
  Codes64 at(const uint8_t* block, int quarter) const {
    const int left = 32 - quarter % 2 * 4;
    return {bits(both_halves(block + 16 + quarter / 2 * 32), lanes_of(left, left - 2), 3),
            of_halves(table, 4 * quarter), of_halves(offsets, 4 * quarter)};
  }
};

// out[j][r] = <w_j, row which[r]> for W rows of blocks, but for the rows' scales. sums: of each four columns of a row.
template <class Block, int W, int R>
[[gnu::noinline]] void ggml_dots(const uint8_t* w, int64_t w_row, int64_t n, const int8_t* high, const int8_t* low,
                                 const float* sums, int64_t stride, const int64_t* which, float out[][4]) {
  constexpr int64_t AHEAD = 8192, STEP = Block::COLUMNS == 64 ? 2 * Block::BYTES : Block::BYTES;
  __m512 sum[W][R] = {}, shift[W][R] = {};
  const auto add = [&](int j, int64_t k, const uint8_t* p) {
    const Block block(p);
#pragma GCC unroll 4
    for (int quarter = 0; quarter < Block::COLUMNS / 64; ++quarter) {
      const Codes64 codes = block.at(p, quarter);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const int64_t at = which[r] * stride + k + 64 * quarter;
        __m512i all = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes.q, _mm512_loadu_si512(high + at));
        all = _mm512_dpbusd_epi32(_mm512_slli_epi32(all, 8), codes.q, _mm512_loadu_si512(low + at));
        sum[j][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(all), codes.scale, sum[j][r]);
        const __m512 columns = _mm512_loadu_ps(sums + at / 4);
        shift[j][r] = _mm512_fmadd_ps(columns, Block::ZERO ? codes.scale : codes.offset, shift[j][r]);
      }
    }
  };
  int64_t k = 0;
  const uint8_t* p = w;
  const int64_t whole = round_up(n, Block::COLUMNS == 64 ? 32 : 256);  // what there is in memory
  for (const uint8_t* ahead = w + AHEAD; k + Block::COLUMNS <= whole; k += Block::COLUMNS, p += STEP)
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j, ahead += STEP) {
      for (int64_t line = 0; line < STEP; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(ahead + line), _MM_HINT_T0);
      add(j, k, p + j * w_row);
    }
  if (k < whole)  // one block of 32
    for (int j = 0; j < W; ++j) {
      uint8_t last[STEP] = {};
      std::memcpy(last, p + j * w_row, size_t(Block::BYTES));
      add(j, k, last);
    }
  for (int j = 0; j < W; ++j)
    for (int r = 0; r < R; ++r) {
      const float shifted = total((Floats16)shift[j][r]);
      out[j][r] = total((Floats16)sum[j][r]) + (Block::ZERO ? -Block::ZERO * shifted : shifted);
    }
}

// 256 numbers of a row, from the start of a block on, in bf16.
template <class Block>
inline void unpack_256(const uint8_t* p, uint16_t* out) {
  for (int64_t k = 0; k < 256; k += Block::COLUMNS, p += Block::COLUMNS == 64 ? 2 * Block::BYTES : Block::BYTES) {
    const Block block(p);
#pragma GCC unroll 4
    for (int quarter = 0; quarter < Block::COLUMNS / 64; ++quarter, out += 64) {
      const Codes64 codes = block.at(p, quarter);
      alignas(64) uint8_t bytes[64];
      _mm512_store_si512(bytes, codes.q);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const Floats q = numbers_in(load_bytes(bytes + 16 * i)) - Block::ZERO;
        const Floats numbers = q * (Floats)of_halves(codes.scale, 4 * i);
        store(out + 16 * i, Block::ZERO ? numbers : numbers + (Floats)of_halves(codes.offset, 4 * i));
      }
    }
  }
}

template <class Type_>
struct Blocks {
  using Type = Type_;
};
// Calls with the blocks of a kind.
template <class Call>
inline void with_blocks(int64_t kind, const Call& call) {
  switch (kind) {
    case Q8_0_: return call(Blocks<BytesOf64>());
    case Q5_0_: return call(Blocks<NibblesOf64<6, 16, true, false>>());
    case Q5_1_: return call(Blocks<NibblesOf64<8, 0, true, true>>());
    case Q4_0_: return call(Blocks<NibblesOf64<2, 8, false, false>>());
    case Q4_1_: return call(Blocks<NibblesOf64<4, 0, false, true>>());
    case Q6_K_: return call(Blocks<SixOf256>());
    case Q5_K_: return call(Blocks<FourOrFiveOf256<true>>());
    case Q4_K_: return call(Blocks<FourOrFiveOf256<false>>());
    case Q3_K_: return call(Blocks<ThreeOf256>());
    default: return call(Blocks<TwoOf256>());
  }
}

}  // namespace amoeba
#endif
