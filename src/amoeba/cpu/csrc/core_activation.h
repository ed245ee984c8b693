// What the fp32 core computes between the two projections, to the precision of fp32.
#pragma once
#include "activation.h"

namespace amoeba {
namespace {

// exp by reduction to [-ln2/2, ln2/2] and a polynomial of degree 6; relative error below 2e-7.
inline Floats exponential(Floats x) {
  x = select(x > 88.0f, Floats{} + 88.0f, x);
  x = select(x < -87.0f, Floats{} - 87.0f, x);
  const Floats n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;  // rounds to the nearest integer
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (Floats)((__builtin_convertvector(n, Integers) + 127) << 23);
}

struct Swiglu {  // gate and up concatenated; alpha, limit and up_shift as in config.Activation
  float alpha, limit, up_shift;
  bool clamped;

  struct Values {
    Floats gate, up, sigmoid, value;
  };
  Values at(const float* gate_row, const float* up_row, int64_t i) const {
    Values v{load<LANES>(gate_row + i), load<LANES>(up_row + i), {}, {}};
    if (clamped) {
      v.gate = select(v.gate > limit, Floats{} + limit, v.gate);
      v.up = select(v.up > limit, Floats{} + limit, select(v.up < -limit, Floats{} - limit, v.up));
    }
    v.up += up_shift;
    v.sigmoid = 1.0f / (1.0f + exponential(v.gate * -alpha));
    v.value = v.gate * v.sigmoid;
    return v;
  }
};

inline float act(float z, int kind, float alpha) {
  switch (kind) {
    case SILU: return z / (1.0f + std::exp(-alpha * z));
    case GELU: return 0.5f * z * (1.0f + std::erf(z * 0.70710678118654752f));
    case GELU_TANH: return 0.5f * z * (1.0f + std::tanh(0.79788456080286536f * (z + 0.044715f * z * z * z)));
    case RELU: return z <= 0 ? 0 : z;  // in this order a NaN stays one
    case RELU2: return z <= 0 ? 0 : z * z;
    default: return std::numeric_limits<float>::quiet_NaN();  // as in activation.h
  }
}

}  // namespace
}  // namespace amoeba
