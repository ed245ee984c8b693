// What exact mode computes of single numbers and of rows, the same way in training and in a decode step.
#pragma once
#include "core_activation.h"

namespace amoeba {
namespace {

enum ExactFunction { EXACT_EXP, EXACT_SIGMOID, EXACT_SILU, EXACT_RSQRT };  // the numbers of core.py

// e^x; 0 below -86.5, where results get close to what a float holds.
inline Floats exact_exponential(Floats x) {
  const Floats bounded = select(x > 88.5f, Floats{} + 88.5f, select(x < -86.5f, Floats{} - 86.5f, x));
  const Floats n = (bounded * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  const Floats r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  p = p * 2.0f * (Floats)((__builtin_convertvector(n, Integers) + 126) << 23);  // n may be 128
  p = select(x < -86.5f, Floats{}, p);
  return select(x > 88.5f, Floats{} + std::numeric_limits<float>::infinity(), p);
}

inline Floats exact_root_reciprocal(Floats x) {
  for (int i = 0; i < LANES; ++i) x[i] = 1.0f / std::sqrt(x[i]);
  return x;
}

inline Floats exact_value(ExactFunction function, Floats x) {
  switch (function) {
    case EXACT_EXP: return exact_exponential(x);
    case EXACT_SIGMOID: return 1.0f / (1.0f + exponential(-x));
    case EXACT_SILU: return x * (1.0f / (1.0f + exponential(-x)));
    default: return exact_root_reciprocal(x);
  }
}

// out[i] = function(x[i]); in place, too.
[[gnu::noinline]] inline void exact_values(ExactFunction function, const float* x, int64_t count, float* out) {
  const auto run = [&](auto kind) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, exact_value(kind, load<LANES>(x + i)));
    if (i == count) return;
    alignas(64) float rest[LANES] = {};
    std::memcpy(rest, x + i, size_t(count - i) * sizeof(float));
    store(rest, exact_value(kind, load<LANES>(rest)));
    std::memcpy(out + i, rest, size_t(count - i) * sizeof(float));
  };
  switch (function) {
    case EXACT_EXP: return run(std::integral_constant<ExactFunction, EXACT_EXP>{});
    case EXACT_SIGMOID: return run(std::integral_constant<ExactFunction, EXACT_SIGMOID>{});
    case EXACT_SILU: return run(std::integral_constant<ExactFunction, EXACT_SILU>{});
    default: return run(std::integral_constant<ExactFunction, EXACT_RSQRT>{});
  }
}

[[gnu::noinline]] inline float exact_sum(const float* row, int64_t length) {
  constexpr int64_t STEP = 4 * LANES;
  Floats sum[4] = {};
  int64_t k = 0;
  for (; k + STEP <= length; k += STEP)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) sum[v] += load<LANES>(row + k + v * LANES);
  float rest = total((sum[0] + sum[1]) + (sum[2] + sum[3]));
  for (; k < length; ++k) rest += row[k];
  return rest;
}

}  // namespace
}  // namespace amoeba
