// Vectors of the compiler's own extension (GCC, Clang), so that one source serves every instruction set, in two widths:
//   LANES floats   one register: sums that have to stay in registers
//   16 floats      one row of a tile, in however many registers the machine needs
#pragma once
#include "numbers.h"
#ifdef __SSE2__
#include <immintrin.h>
#endif
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif

// Dot products of bytes, and then of bf16, in 512 bits.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define AMOEBA_AVX512_VNNI 1
#endif
#if defined(AMOEBA_AVX512_VNNI) && defined(__AVX512BF16__)
#define AMOEBA_AVX512 1
#endif

namespace [[gnu::visibility("hidden")]] amoeba {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

template <class T, int N>
struct VectorOf {
  typedef T Type __attribute__((vector_size(N * sizeof(T)), may_alias));
  typedef T Anywhere __attribute__((vector_size(N * sizeof(T)), aligned(alignof(T)), may_alias));  // in memory
};
template <int N>
using FloatsOf = typename VectorOf<float, N>::Type;
using Floats = FloatsOf<LANES>;
using Integers = VectorOf<int32_t, LANES>::Type;
using Words = VectorOf<uint32_t, LANES>::Type;
using Floats16 = FloatsOf<16>;
using Integers16 = VectorOf<int32_t, 16>::Type;
using Words16 = VectorOf<uint32_t, 16>::Type;

template <class Mask, class Vector>
inline Vector select(Mask mask, Vector yes, Vector no) { return mask ? yes : no; }

template <class T, int N>
inline typename VectorOf<T, N>::Type load_as(const void* p) {
  return *static_cast<const typename VectorOf<T, N>::Anywhere*>(p);
}
template <int N = 16>
inline FloatsOf<N> load(const float* p) { return load_as<float, N>(p); }
template <int N = 16>
inline FloatsOf<N> load(const uint16_t* p) {  // bf16
#ifdef __AVX512F__
  if constexpr (N == 16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return (FloatsOf<N>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
  }
#endif
  using Wide = typename VectorOf<uint32_t, N>::Type;
  return (FloatsOf<N>)(__builtin_convertvector(load_as<uint16_t, N>(p), Wide) << 16);
}
template <class Vector>
inline void store(float* p, Vector v) {
  *reinterpret_cast<typename VectorOf<float, sizeof(Vector) / sizeof(float)>::Anywhere*>(p) = v;
}
inline VectorOf<uint16_t, 16>::Type halves_of(Floats16 v) {  // as round_to_bf16
  using Halves = VectorOf<uint16_t, 16>::Type;
#ifdef AMOEBA_AVX512
  return (Halves)_mm512_cvtneps_pbh((__m512)v);
#else
  const Words16 bits = (Words16)v, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return __builtin_convertvector(select((bits & 0x7fffffff) > 0x7f800000, Words16{} + 0x7fc0, rounded), Halves);
#endif
}
inline void store(uint16_t* p, Floats16 v) { *reinterpret_cast<VectorOf<uint16_t, 16>::Anywhere*>(p) = halves_of(v); }

// The first `count` (up to 16) only; what is not loaded is 0. Of fewer than 16 there are few, so that is not inlined.
template <class T>
[[gnu::noinline]] Floats16 load_part(const T* p, int64_t count) {
  alignas(64) T values[16] = {};
  if (count > 0) std::memcpy(values, p, count * sizeof(T));
  return load(values);
}
template <class T>
[[gnu::noinline]] void store_part(T* p, const Floats16& v, int64_t count) {
  alignas(64) T values[16];
  store(values, v);
  if (count > 0) std::memcpy(p, values, count * sizeof(T));
}
template <class T>
inline Floats16 load_some(const T* p, int64_t count) { return count >= 16 ? load(p) : load_part(p, count); }
template <class T>
inline void store_some(T* p, Floats16 v, int64_t count) { count >= 16 ? store(p, v) : store_part(p, v, count); }

// a . b + sum, rounded once where the CPU can, in whatever form it is compiled: of what is not written so, a compiler
// rounds the products of some forms and not those of others.
inline float multiply_add(float a, float b, float sum) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, sum);
#else
  return a * b + sum;
#endif
}
inline Floats multiply_add(Floats a, Floats b, Floats sum) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_FMA)
  return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + sum;
#endif
}

inline Floats16 splat(float value) { return Floats16{} + value; }

// The sum of all lanes: the upper half is added to the lower, again and again.
template <class Vector>
inline float total(Vector v) {
  constexpr int HALF = sizeof(Vector) / sizeof(float) / 2;
  if constexpr (HALF == 1) {
    return v[0] + v[1];
  } else {
    FloatsOf<HALF> half[2];
    std::memcpy(half, &v, sizeof(v));
    return total(half[0] + half[1]);
  }
}

}  // namespace amoeba
