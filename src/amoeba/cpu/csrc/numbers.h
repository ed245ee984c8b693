// Scalars that every file of the core shares: bf16, which is the upper half of a float, and whole multiples.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace [[gnu::visibility("hidden")]] amoeba {

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

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace amoeba
