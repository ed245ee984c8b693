// What every file of the fp32 core shares: vectors, as wide as the machine has them, and what SwiGLU computes.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

// Values are aligned as the machine wants them; what lies in memory of others need not be.
typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
typedef float Anywhere __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

inline Vector load(const float* p) { return *reinterpret_cast<const Anywhere*>(p); }
inline void store(float* p, Vector v) { *reinterpret_cast<Anywhere*>(p) = v; }

inline float sum_lanes(Vector v) {
  float lanes[LANES];
  std::memcpy(lanes, &v, sizeof(lanes));
  for (int width = LANES / 2; width; width /= 2)  // pairwise, so that the compiler halves the vector each time
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t))));

inline Vector pick(Integers mask, Vector yes, Vector no) { return mask ? yes : no; }

// exp by reduction to [-ln2/2, ln2/2] and a polynomial of degree 6; relative error below 2e-7.
inline Vector exponential(Vector x) {
  x = pick(x > 88.0f, Vector{} + 88.0f, x);
  x = pick(x < -87.0f, Vector{} - 87.0f, x);
  const Vector n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;  // rounds to the nearest integer
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Integers power = (__builtin_convertvector(n, Integers) + 127) << 23;
  Vector scale;
  std::memcpy(&scale, &power, sizeof(scale));
  return p * scale;
}

struct Swiglu {  // gate and up concatenated; alpha, limit and up_shift as in config.Activation
  float alpha, limit, up_shift;
  bool clamped;

  struct Values {
    Vector gate, up, sigmoid, value;
  };
  Values at(const float* gate_row, const float* up_row, int64_t i) const {
    Values v{load(gate_row + i), load(up_row + i), {}, {}};
    if (clamped) {
      v.gate = pick(v.gate > limit, Vector{} + limit, v.gate);
      v.up = pick(v.up > limit, Vector{} + limit, pick(v.up < -limit, Vector{} - limit, v.up));
    }
    v.up += up_shift;
    v.sigmoid = 1.0f / (1.0f + exponential(v.gate * -alpha));
    v.value = v.gate * v.sigmoid;
    return v;
  }
};

}  // namespace
