// What happens between the two projections, sixteen values at once, with its slope.
#pragma once
#include <limits>
#include <type_traits>

#include "vectors.h"

namespace [[gnu::visibility("hidden")]] amoeba {

enum ActivationKind { SILU, GELU, GELU_TANH, RELU, RELU2 };  // the numbers of node_library.py

struct Activation {
  int32_t kind, gated, interleaved;
  float alpha, limit, up_shift;
};

// e^x within 1e-5 of the truth where that is a normal number (bf16 has steps of 4e-3); a NaN stays one.
inline Floats16 quick_exponential(Floats16 x) {
#ifdef __AVX512F__
  const __m512 power = (__m512)(x * 1.44269504f), whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT);
  const Floats16 rest = (Floats16)power - (Floats16)whole;
#else
  x = select(x > splat(88.7f), splat(88.7f), x);
  x = select(x < splat(-87.3f), splat(-87.3f), x);
  const Floats16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats16 power = x * 1.44269504f, shifted = power + magic, rest = power - (shifted - magic);
#endif
  Floats16 p = splat(1.3333558e-3f);  // 2^rest, from its series, the last terms fitted
  p = p * rest + 9.6181291e-3f;
  p = p * rest + 5.5504109e-2f;
  p = p * rest + 2.4022651e-1f;
  p = p * rest + 6.9314718e-1f;
  p = p * rest + 1.0f;
#ifdef __AVX512F__
  return (Floats16)_mm512_scalef_ps((__m512)p, whole);
#else
  return p * (Floats16)((((Integers16)shifted - (Integers16)magic) + 127) << 23);
#endif
}

inline Floats16 sigmoid(Floats16 x) {
#ifdef __AVX512F__
  // The bound keeps the sum finite, which the correction of the guess needs; as the second operand, a NaN gets through.
  const Floats16 sum = 1.0f + quick_exponential((Floats16)_mm512_min_ps(_mm512_set1_ps(88), (__m512)-x));
  const Floats16 guess = (Floats16)_mm512_rcp14_ps((__m512)sum);
  return guess * (2.0f - sum * guess);
#else
  return 1.0f / (1.0f + quick_exponential(-x));
#endif
}

template <class Function>
inline Floats16 each(Floats16 x, const Function& function) {
  for (int i = 0; i < 16; ++i) x[i] = function(x[i]);
  return x;
}

struct ValueAndSlope {
  Floats16 value, slope;
};

// act(z) and its derivative; z is clamped already. ONLY_SILU: known before, so that no other kind is in the loop.
template <bool ONLY_SILU>
inline ValueAndSlope act(Floats16 z, const Activation& a) {
  constexpr float ROOT_HALF = 0.70710678f, ROOT_2_PI = 0.79788456f, CUBIC = 0.044715f;
  switch (ONLY_SILU ? SILU : a.kind) {
    case SILU: {
      const Floats16 s = sigmoid(a.alpha * z);
      return {z * s, s * (1.0f + a.alpha * z * (1.0f - s))};
    }
    case GELU: {
      const Floats16 phi = 0.5f + 0.5f * each(z * ROOT_HALF, [](float x) { return std::erf(x); });
      return {z * phi, phi + z * quick_exponential(-0.5f * z * z) * (0.5f * ROOT_2_PI)};
    }
    case GELU_TANH: {
      const Floats16 inner = ROOT_2_PI * (z + CUBIC * z * z * z), s = sigmoid(2.0f * inner);  // (1 + tanh) / 2
      return {z * s, s + 2.0f * z * s * (1.0f - s) * (ROOT_2_PI * (1.0f + 3 * CUBIC * z * z))};
    }
    // compared in this order a NaN stays one, and -infinity becomes 0
    case RELU: return {select(z <= Floats16{}, Floats16{}, z), select(z > Floats16{}, splat(1), Floats16{})};
    case RELU2: return {select(z <= Floats16{}, Floats16{}, z * z), select(z > Floats16{}, 2.0f * z, Floats16{})};
    default: {  // a kind that is in the enumeration alone must not pass for another
      const Floats16 unknown = splat(std::numeric_limits<float>::quiet_NaN());
      return {unknown, unknown};
    }
  }
}

inline Floats16 at_most(Floats16 x, float limit) { return select(x > splat(limit), splat(limit), x); }
inline Floats16 at_least(Floats16 x, float limit) { return select(x < splat(limit), splat(limit), x); }

template <bool ONLY_SILU>
inline Floats16 activate(Floats16 gate, Floats16 up, const Activation& a) {
  const Floats16 z = at_most(gate, a.limit);
  if (!a.gated) return act<ONLY_SILU>(z, a).value;
  return act<ONLY_SILU>(z, a).value * (at_least(at_most(up, a.limit), -a.limit) + a.up_shift);
}

struct Slopes {
  Floats16 a, dgate, dup;  // the activation and what it passes on of a unit gradient
};

template <bool ONLY_SILU>
inline Slopes activate_backward(Floats16 gate, Floats16 up, const Activation& a) {
  const ValueAndSlope of_gate = act<ONLY_SILU>(at_most(gate, a.limit), a);
  const Floats16 gate_slope = select(gate > splat(a.limit), Floats16{}, of_gate.slope);
  if (!a.gated) return {of_gate.value, gate_slope, Floats16{}};
  const Floats16 factor = at_least(at_most(up, a.limit), -a.limit) + a.up_shift;
  const Integers16 clamped = (up > splat(a.limit)) | (up < splat(-a.limit));
  return {of_gate.value * factor, gate_slope * factor, select(clamped, Floats16{}, of_gate.value)};
}

// Calls with whether the activation is silu, as a constant.
template <class Call>
inline void with_kind(const Activation& a, const Call& call) {
  a.kind == SILU ? call(std::true_type{}) : call(std::false_type{});
}

}  // namespace amoeba
