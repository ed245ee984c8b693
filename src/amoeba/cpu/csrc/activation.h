// What happens between the two projections, sixteen values at once, with its slope.
#pragma once
#include "words.h"

namespace {

enum ActivationKind { SILU, GELU, GELU_TANH, RELU, RELU2 };  // the order of ActivationKind in config.py

struct Activation {
  int32_t kind, gated, interleaved;
  float alpha, limit, up_shift;
};

// e^x within 2e-7 of the truth where it is neither 0 nor infinite.
inline V exponential(V x) {
  x = select(x > splat(88.7f), splat(88.7f), x);
  x = select(x < splat(-87.3f), splat(-87.3f), x);
  const V magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const V shifted = x * 1.44269504f + magic, whole = shifted - magic;
  const V rest = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
  V p = splat(1.9875691e-4f);
  p = p * rest + 1.3981999e-3f;
  p = p * rest + 8.3334519e-3f;
  p = p * rest + 4.1665796e-2f;
  p = p * rest + 1.6666665e-1f;
  p = p * rest + 0.5f;
  p = p * rest * rest + rest + 1.0f;
  const VI power = (((VI)shifted - (VI)magic) + 127) << 23;
  return p * (V)power;
}

inline V reciprocal(V x) {
#ifdef __AVX512F__
  const V guess = (V)_mm512_rcp14_ps((__m512)x);
  return guess * (2.0f - x * guess);
#else
  return 1.0f / x;
#endif
}

inline V sigmoid(V x) { return reciprocal(1.0f + exponential(-x)); }

template <class Function>
inline V each(V x, const Function& function) {
  for (int i = 0; i < 16; ++i) x[i] = function(x[i]);
  return x;
}

struct ValueAndSlope {
  V value, slope;
};

// act(z) and its derivative; z is clamped already.
inline ValueAndSlope act(V z, const Activation& a) {
  constexpr float ROOT_HALF = 0.70710678f, ROOT_2_PI = 0.79788456f, CUBIC = 0.044715f;
  switch (a.kind) {
    case SILU: {
      const V s = sigmoid(a.alpha * z);
      return {z * s, s * (1.0f + a.alpha * z * (1.0f - s))};
    }
    case GELU: {
      const V phi = 0.5f + 0.5f * each(z * ROOT_HALF, [](float x) { return std::erf(x); });
      return {z * phi, phi + z * exponential(-0.5f * z * z) * (0.5f * ROOT_2_PI)};
    }
    case GELU_TANH: {
      const V inner = ROOT_2_PI * (z + CUBIC * z * z * z), s = sigmoid(2.0f * inner);  // (1 + tanh) / 2
      return {z * s, s + 2.0f * z * s * (1.0f - s) * (ROOT_2_PI * (1.0f + 3 * CUBIC * z * z))};
    }
    case RELU: {
      const VI on = z > V{};
      return {select(on, z, V{} * z), select(on, splat(1), V{})};
    }
    default: {
      const VI on = z > V{};
      return {select(on, z * z, V{} * z), select(on, 2.0f * z, V{})};
    }
  }
}

inline V at_most(V x, float limit) { return select(x > splat(limit), splat(limit), x); }
inline V at_least(V x, float limit) { return select(x < splat(limit), splat(limit), x); }

inline V activate(V gate, V up, const Activation& a) {
  const V z = at_most(gate, a.limit);
  if (!a.gated) return act(z, a).value;
  return act(z, a).value * (at_least(at_most(up, a.limit), -a.limit) + a.up_shift);
}

struct Slopes {
  V a, dgate, dup;  // the activation and what it passes on of a unit gradient
};

inline Slopes activate_backward(V gate, V up, const Activation& a) {
  const ValueAndSlope of_gate = act(at_most(gate, a.limit), a);
  const V gate_slope = select(gate > splat(a.limit), V{}, of_gate.slope);
  if (!a.gated) return {of_gate.value, gate_slope, V{}};
  const V factor = at_least(at_most(up, a.limit), -a.limit) + a.up_shift;
  const VI clamped = (up > splat(a.limit)) | (up < splat(-a.limit));
  return {of_gate.value * factor, gate_slope * factor, select(clamped, V{}, of_gate.value)};
}

}  // namespace
