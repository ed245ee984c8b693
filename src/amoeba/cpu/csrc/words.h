// What every file of the packed products shares: numbers, tiles, memory.
//
// One layout serves every instruction set. A word is 32 bits of the summed dimension: two bf16 or four int8. A tile is
// 16 words x 16 columns (1 KiB: one AMX register, or sixteen AVX-512 registers), a panel is 32 columns:
//   weights  [expert][panel][tile of depth][half of the panel][word][column]
//   rows     [16 rows][tile of depth][row][word]          (packed per job, gathered on the way, zeros past the depth)
// int8 rows are stored as q + ROW_OFFSET; ROW_OFFSET . (sum of weights) is taken off again.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>
#ifdef __SSE2__
#include <immintrin.h>
#endif
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define AMOEBA_AVX512 1
#endif
#if defined(AMOEBA_AVX512) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define AMOEBA_AMX 1
#endif
#if defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define AMOEBA_SDOT 1
#endif

namespace [[gnu::visibility("hidden")]] amoeba {

enum Path { GENERIC, AVX512, AMX };  // the order of `Path` in packed.py

constexpr int64_t TILE = 16;                 // rows, words or columns of a tile
constexpr int64_t TILE_WORDS = TILE * TILE;
constexpr int64_t PANEL = 2 * TILE;          // columns that are summed at once
constexpr size_t HUGE_PAGE = 2 << 20;
#ifdef AMOEBA_SDOT
constexpr int ROW_OFFSET = 0;    // SDOT takes both sides with sign
#else
constexpr int ROW_OFFSET = 128;  // VPDPBUSD and TDPBUSD take rows without sign
#endif

// Up to FEW_ROWS rows an expert's weights come faster through dot products than through tiles. One core, 2048 x 1536,
// GB/s of weights by dots / by tiles: bf16 29/26 at 1 row, 21/25 at 4, 11/25 at 8; int8 30/25 at 1, 27/24 at 8, 17/23
// at 16 (Xeon, family 6 model 207, 2026-11-15).
struct Bf16 {
  using Element = uint16_t;
  using Sum = float;
  static constexpr int64_t PER_WORD = 2, FEW_ROWS = 2;
};
struct Int8 {
  using Element = int8_t;
  using Sum = int32_t;
  static constexpr int64_t PER_WORD = 4, FEW_ROWS = 8;
};

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline float widen(uint16_t half) { return float_of(uint32_t(half) << 16); }
inline float widen(float value) { return value; }
inline uint16_t round_to_bf16(float value) {  // to nearest even; a NaN stays one
  const uint32_t bits = bits_of(value), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (bits & 0x7fffffff) > 0x7f800000 ? uint16_t(0x7fc0) : uint16_t(rounded);
}
inline void put(float& out, float value) { out = value; }
inline void put(uint16_t& out, float value) { out = round_to_bf16(value); }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t tiles_of(int64_t depth, int64_t per_word) { return ceil_div(depth, TILE * per_word); }
inline int64_t panels_of(int64_t columns) { return ceil_div(columns, PANEL); }

inline void ask_for_huge_pages(void* data, int64_t bytes) {  // fewer misses of the TLB; a wish, so no error
#ifdef __linux__
  const uintptr_t begin = (uintptr_t(data) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  const uintptr_t end = (uintptr_t(data) + bytes) / HUGE_PAGE * HUGE_PAGE;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

inline size_t whole_pages(size_t bytes) {
  const size_t page = bytes < HUGE_PAGE / 4 ? 4096 : HUGE_PAGE;
  return (bytes + page - 1) / page * page;
}

template <class T>
struct Buffer {  // grows, never shrinks
  T* data = nullptr;
  size_t size = 0;
  T* get(size_t count) {
    if (count > size) {
      std::free(data);
      const size_t bytes = whole_pages(count * sizeof(T));
      size = bytes / sizeof(T);
      data = static_cast<T*>(std::aligned_alloc(bytes < HUGE_PAGE ? 4096 : HUGE_PAGE, bytes));
      if (!data) std::abort();
      ask_for_huge_pages(data, int64_t(bytes));
    }
    return data;
  }
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data); }
};

// ---------------------------------------------------------------- sixteen floats at once, whatever the machine's width

typedef float V __attribute__((vector_size(64), aligned(64), may_alias));
typedef int32_t VI __attribute__((vector_size(64), aligned(64), may_alias));
typedef float VU __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t VIU __attribute__((vector_size(64), aligned(4), may_alias));

inline V splat(float value) { return V{} + value; }
inline V select(VI mask, V yes, V no) { return mask ? yes : no; }
inline V load(const float* p) { return *reinterpret_cast<const VU*>(p); }
inline void store(float* p, V v) { *reinterpret_cast<VU*>(p) = v; }

#ifdef AMOEBA_AVX512
inline V load(const uint16_t* p) {
  return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
}
inline void store(uint16_t* p, V v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)v));
}
inline float total(V v) { return _mm512_reduce_add_ps((__m512)v); }
#else
typedef uint32_t VW __attribute__((vector_size(64), aligned(64), may_alias));
typedef uint16_t VHU __attribute__((vector_size(32), aligned(2), may_alias));
inline V load(const uint16_t* p) { return (V)(__builtin_convertvector(*reinterpret_cast<const VHU*>(p), VW) << 16); }
inline void store(uint16_t* p, V v) {  // as round_to_bf16
  const VW bits = (VW)v, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const VW halves = (bits & 0x7fffffff) > 0x7f800000 ? VW{} + 0x7fc0 : rounded;
  *reinterpret_cast<VHU*>(p) = __builtin_convertvector(halves, VHU);
}
inline float total(V v) {
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; ++i) v[i] += v[i + step];
  return v[0];
}
#endif

// The first `count` (up to 16) only; what is not loaded is 0. Of fewer than 16 there are few, so that is not inlined.
template <class T>
[[gnu::noinline]] V load_part(const T* p, int64_t count) {
  alignas(64) T values[TILE] = {};
  if (count > 0) std::memcpy(values, p, count * sizeof(T));
  return load(values);
}
template <class T>
[[gnu::noinline]] void store_part(T* p, const V& v, int64_t count) {
  alignas(64) T values[TILE];
  store(values, v);
  if (count > 0) std::memcpy(p, values, count * sizeof(T));
}
template <class T>
inline V load_some(const T* p, int64_t count) { return count >= TILE ? load(p) : load_part(p, count); }
template <class T>
inline void store_some(T* p, V v, int64_t count) { count >= TILE ? store(p, v) : store_part(p, v, count); }

// A row of a panel; whole lines may be written past the caches, so that they are not read before.
inline void store_panel(float* p, V left, V right, int64_t width, bool stream) {
#ifdef AMOEBA_AVX512
  if (stream) {
    _mm512_stream_ps(p, (__m512)left);
    return _mm512_stream_ps(p + TILE, (__m512)right);
  }
#else
  (void)stream;
#endif
  store_some(p, left, width);
  store_some(p + TILE, right, width - TILE);
}
inline void store_panel(uint16_t* p, V left, V right, int64_t width, bool stream) {
#ifdef AMOEBA_AVX512
  const __m512i line = (__m512i)_mm512_cvtne2ps_pbh((__m512)right, (__m512)left);
  if (stream) return _mm512_stream_si512(reinterpret_cast<__m512i*>(p), line);
  if (width >= PANEL) return _mm512_storeu_si512(p, line);
#else
  (void)stream;
#endif
  store_some(p, left, width);
  store_some(p + TILE, right, width - TILE);
}
inline void end_of_streaming() {
#ifdef AMOEBA_AVX512
  _mm_sfence();
#endif
}

}  // namespace amoeba
