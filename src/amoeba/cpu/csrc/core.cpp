// The CPU core: matrix products over sorted rows, all experts of a pass in one job list, in fp32; decoding also reads
// bf16 weights, and codes (core_coded.cpp). Products with one order of summation are in core_exact.cpp.
//
// Compiled on first use for the machine it runs on (see build.py). Vectors are GCC/Clang vector extensions, so one source
// serves AVX-512, AVX2 and NEON. The caller has checked dtypes, shapes, strides.
#include "core_decode.h"
#include "core_products.h"

using namespace amoeba;

#pragma GCC visibility push(default)  // also of those that take what is hidden
extern "C" {

int amoeba_lanes() { return LANES; }

// out[rows of e] = rows_of(e) . matrix_e (+ bias_e), for every expert; rows past offs[experts-1] are left as they are.
void amoeba_rows_f32(int64_t experts, const int32_t* offs, const float* rows, int64_t row_stride, const int64_t* index,
                     const float* matrix, int64_t matrix_e, int64_t matrix_k, int64_t matrix_n, const float* bias,
                     int64_t depth, int64_t columns, float* out, int64_t out_stride, int threads) {
  const ExpertProduct<float> all{{rows, row_stride, index}, matrix, matrix_k, matrix_n, bias, out, out_stride, depth};
  each_part(experts, offs, all, matrix_e, columns, threads, [&](const ExpertProduct<float>& p, auto... part) {
    matrix_k == 1 ? rows_times_broadcast_weights(p, part...) : rows_times_vector_weights(p, part...);
  });
}

// gradient_e = sum over the rows of e of left^T right, contiguous along right; zeros for an expert without rows.
void amoeba_weight_gradient_f32(int64_t experts, const int32_t* offs, const float* left, int64_t left_stride,
                                const int64_t* left_index, int64_t left_columns, const float* right,
                                int64_t right_stride, const int64_t* right_index, int64_t right_columns,
                                float* gradient, int64_t gradient_e, int64_t gradient_row, int threads) {
  const ColumnCuts cuts(left_columns, experts, threads, 8 * TILE_ROWS);
  run_jobs(experts * cuts.per_expert, threads, [&](int64_t job) {
    const int64_t e = job / cuts.per_expert, first = job % cuts.per_expert * cuts.width;
    const int64_t start = start_of(offs, e), end = offs[e], width = std::min(cuts.width, left_columns - first);
    float* out = gradient + e * gradient_e;
    if (start == end) {
      for (int64_t i = first; i < first + width; ++i)
        std::memset(out + i * gradient_row, 0, right_columns * sizeof(float));
      return;
    }
    sum_of_outer_products({left, left_stride, left_index}, {right, right_stride, right_index}, start, end - start,
                          first, width, right_columns, out, gradient_row);
  });
}

// a = scale . swiglu(h), row by row; intermediate is a multiple of the vector.
void amoeba_swiglu_f32(int64_t rows, int64_t intermediate, const float* h, const float* scale, float alpha, float limit,
                       float up_shift, float* a, int threads) {
  const Swiglu swiglu{alpha, limit, up_shift, std::isfinite(limit)};
  constexpr int64_t STEP = 32;
  run_jobs(ceil_div(rows, STEP), threads, [&](int64_t job) {
    for (int64_t r = job * STEP; r < std::min(rows, (job + 1) * STEP); ++r) {
      const float *gate = h + r * 2 * intermediate, *up = gate + intermediate;
      for (int64_t i = 0; i < intermediate; i += LANES) {
        const auto v = swiglu.at(gate, up, i);
        store(a + r * intermediate + i, v.value * v.up * scale[r]);
      }
    }
  });
}

// From dA' (no scale in it yet): dh, scale . a (if wanted) and ds = <dA', a>, in one pass over the rows.
void amoeba_swiglu_backward_f32(int64_t rows, int64_t intermediate, const float* da, const float* h, const float* scale,
                                float alpha, float limit, float up_shift, float* dh, float* scaled_a, float* ds,
                                int threads) {
  const Swiglu swiglu{alpha, limit, up_shift, std::isfinite(limit)};
  constexpr int64_t STEP = 32;
  run_jobs(ceil_div(rows, STEP), threads, [&](int64_t job) {
    for (int64_t r = job * STEP; r < std::min(rows, (job + 1) * STEP); ++r) {
      const float *gate = h + r * 2 * intermediate, *up = gate + intermediate, *grad = da + r * intermediate;
      float *dgate = dh + r * 2 * intermediate, *dup = dgate + intermediate;
      Floats sum{};
      for (int64_t i = 0; i < intermediate; i += LANES) {
        const auto v = swiglu.at(gate, up, i);
        const Floats a = v.value * v.up, g = load<LANES>(grad + i), scaled = g * scale[r];
        const Floats slope = v.sigmoid * (1.0f + alpha * v.gate * (1.0f - v.sigmoid));
        Floats dg = scaled * v.up * slope, du = scaled * v.value;
        if (swiglu.clamped) {
          const Floats raw = load<LANES>(up + i);
          dg = select(load<LANES>(gate + i) > limit, Floats{}, dg);
          du = select((raw > limit) | (raw < -limit), Floats{}, du);
        }
        store(dgate + i, dg);
        store(dup + i, du);
        sum += g * a;
        if (scaled_a) store(scaled_a + r * intermediate + i, a * scale[r]);
      }
      ds[r] = total(sum);
    }
  });
}

// out = (weight + shift) . x / (root of the mean square of the row's x), row by row.
void amoeba_rms_norm_f32(int64_t rows, int64_t length, const float* x, const float* weight, float eps, float shift,
                         float* out, int threads) {
  const int64_t whole = length / LANES * LANES, step = ceil_div(16384, length);
  run_jobs(ceil_div(rows, step), threads, [&](int64_t job) {
    for (int64_t r = job * step; r < std::min(rows, (job + 1) * step); ++r) {
      const float* from = x + r * length;
      Floats squares[4] = {};
      int64_t i = 0;
      for (; i + 4 * LANES <= length; i += 4 * LANES)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          const Floats some = load<LANES>(from + i + j * LANES);
          squares[j] += some * some;
        }
      float sum = total((squares[0] + squares[1]) + (squares[2] + squares[3]));
      for (; i < length; ++i) sum += from[i] * from[i];
      const float scale = 1.0f / std::sqrt(sum / float(length) + eps);
      float* into = out + r * length;
      for (i = 0; i < whole; i += LANES)
        store(into + i, (load<LANES>(weight + i) + shift) * (load<LANES>(from + i) * scale));
      for (; i < length; ++i) into[i] = (weight[i] + shift) * (from[i] * scale);
    }
  });
}

AMOEBA_DECODE(amoeba_decode_f32, PlainMatrix<float>)
AMOEBA_DECODE(amoeba_decode_bf16, PlainMatrix<uint16_t>)

void amoeba_sum_decoded(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden, const int64_t* expert,
                        const float* scale, const float* rows, int64_t row_stride, int64_t* order, float* y) {
  sum_decoded(tokens, top_k, experts, hidden, expert, scale, rows, row_stride, order, y);
}

}  // extern "C"
#pragma GCC visibility pop
