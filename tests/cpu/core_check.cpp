// Compares the CPU core with plain loops in double, over awkward sizes. Built by tests/cpu/test_core.py for several
// instruction sets; prints the worst relative error and fails above 1e-5. It includes the source, so that a build for
// another architecture needs nothing but its compiler:
//   aarch64-linux-gnu-g++ -std=c++17 -O3 -static tests/cpu/core_check.cpp -o check && qemu-aarch64-static ./check
#include "../../src/amoeba/cpu/csrc/core.cpp"

#include <cstdio>
#include <limits>
#include <random>
#include <vector>

using Values = std::vector<float>;
static std::mt19937 generator(0);
static double worst = 0;

static Values normal(size_t count) {
  std::normal_distribution<float> distribution;
  Values values(count);
  for (auto& v : values) v = distribution(generator);
  return values;
}

static void compare(const char* what, const Values& got, const std::vector<double>& truth) {
  double error = 0, norm = 1e-30;
  for (size_t i = 0; i < truth.size(); ++i) {
    error += (got[i] - truth[i]) * (got[i] - truth[i]);
    norm += truth[i] * truth[i];
  }
  const double relative = std::sqrt(error / norm);
  worst = std::max(worst, relative);
  if (!(relative < 1e-5)) {
    std::printf("%s: relative error %g\n", what, relative);
    std::exit(1);
  }
}

static void check_products(const std::vector<int32_t>& offs, int64_t depth, int64_t columns, bool summed_contiguous) {
  const int64_t experts = offs.size(), rows = offs.back(), sources = rows + 3;
  const Values x = normal(sources * depth), w = normal(experts * depth * columns), bias = normal(experts * columns);
  std::vector<int64_t> index(rows);
  for (auto& i : index) i = generator() % sources;
  const int64_t w_k = summed_contiguous ? 1 : columns, w_n = summed_contiguous ? depth : 1;
  Values out(rows * columns, std::numeric_limits<float>::quiet_NaN());
  amoeba_rows_f32(experts, offs.data(), x.data(), depth, index.data(), w.data(), depth * columns, w_k, w_n, bias.data(),
                  depth, columns, out.data(), columns, 2);
  std::vector<double> truth(rows * columns);
  Values gradient(experts * depth * columns, std::numeric_limits<float>::quiet_NaN());
  std::vector<double> gradient_truth(experts * depth * columns);
  for (int64_t e = 0; e < experts; ++e)
    for (int64_t r = start_of(offs.data(), e); r < offs[e]; ++r)
      for (int64_t n = 0; n < columns; ++n) {
        double sum = bias[e * columns + n];
        for (int64_t k = 0; k < depth; ++k) {
          const double left = x[index[r] * depth + k];
          sum += left * w[e * depth * columns + k * w_k + n * w_n];
          gradient_truth[(e * depth + k) * columns + n] += left * out[r * columns + n];
        }
        truth[r * columns + n] = sum;
      }
  compare("rows", out, truth);
  amoeba_weight_gradient_f32(experts, offs.data(), x.data(), depth, index.data(), depth, out.data(), columns, nullptr,
                             columns, gradient.data(), depth * columns, columns, 2);
  compare("weight gradient", gradient, gradient_truth);
}

static void check_swiglu(int64_t rows, int64_t intermediate, float limit) {
  const Values h = normal(rows * 2 * intermediate), scale = normal(rows), da = normal(rows * intermediate);
  Values a(rows * intermediate), dh(h.size()), scaled(a.size()), ds(rows);
  const double alpha = 1.702, shift = 1.0;
  amoeba_swiglu_f32(rows, intermediate, h.data(), scale.data(), alpha, limit, shift, a.data(), 2);
  amoeba_swiglu_backward_f32(rows, intermediate, da.data(), h.data(), scale.data(), alpha, limit, shift, dh.data(),
                             scaled.data(), ds.data(), 2);
  std::vector<double> a_truth(a.size()), dh_truth(h.size()), ds_truth(rows);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < intermediate; ++i) {
      const double gate = h[r * 2 * intermediate + i], up = h[r * 2 * intermediate + intermediate + i], s = scale[r];
      const double g = std::min<double>(gate, limit), u = std::max<double>(-limit, std::min<double>(up, limit)) + shift;
      const double sigmoid = 1 / (1 + std::exp(-alpha * g)), grad = da[r * intermediate + i];
      a_truth[r * intermediate + i] = s * g * sigmoid * u;
      ds_truth[r] += grad * g * sigmoid * u;
      dh_truth[r * 2 * intermediate + i] = gate > limit ? 0 : s * grad * u * sigmoid * (1 + alpha * g * (1 - sigmoid));
      dh_truth[r * 2 * intermediate + intermediate + i] = std::abs(up) > limit ? 0 : s * grad * g * sigmoid;
    }
  compare("swiglu", a, a_truth);
  compare("scaled a", scaled, a_truth);
  compare("dh", dh, dh_truth);
  compare("ds", ds, ds_truth);
}

int main() {
  const std::vector<std::vector<int32_t>> layouts = {{1}, {0, 0, 5, 5, 12, 80}, {63, 63, 199}, {70, 333}, {0, 7, 600}};
  for (const auto& offs : layouts)
    for (const auto &[depth, columns] : {std::pair{1, 1}, {3, 17}, {40, 64}, {257, 96}, {300, 131}})
      for (const bool summed_contiguous : {true, false}) check_products(offs, depth, columns, summed_contiguous);
  check_products({5, 70}, 20, 530, true);  // more columns than one block of a gradient
  for (const float limit : {std::numeric_limits<float>::infinity(), 0.7f})
    for (const int64_t rows : {1, 33, 100}) check_swiglu(rows, 3 * LANES, limit);
  std::printf("%d lanes, worst relative error %.1e\n", LANES, worst);
}
