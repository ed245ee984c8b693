// Compares to the bit the sums of exact mode and of a decode step in all forms in which they are compiled: a row alone and
// among others, a weight alone and among others. Built by tests/cpu/test_core.py.
#include "../../src/amoeba/cpu/csrc/core_exact.cpp"

#include <cstdio>
#include <random>

static std::vector<float> normal(int64_t count) {
  static std::mt19937 generator(0);
  std::normal_distribution<float> distribution;
  std::vector<float> values(count);
  for (float& value : values) value = distribution(generator);
  return values;
}

static void compare(const char* what, int64_t depth, int rows, float got, float expected) {
  if (bits_of(got) == bits_of(expected)) return;
  std::printf("%s, depth %d: among %d rows %.9g, alone %.9g\n", what, int(depth), rows, got, expected);
  std::exit(1);
}

// The weight is (columns, depth), or with `transposed` (depth, columns).
static void check_rows(int64_t depth, int64_t columns, bool transposed) {
  constexpr int32_t ROWS = 13;
  const std::vector<float> x = normal(ROWS * depth), w = normal(columns * depth);
  std::vector<float> alone(columns), all(ROWS * columns);
  const auto multiply = [&](const float* rows, int32_t count, float* out) {
    amoeba_exact_rows_f32(1, &count, rows, depth, w.data(), 0, transposed ? columns : 1, transposed ? 1 : depth, depth,
                          columns, out, columns, 1);
  };
  for (int32_t count = 1; count <= ROWS; ++count) {
    multiply(x.data(), count, all.data());
    for (int32_t r = 0; r < count; ++r) {
      multiply(x.data() + r * depth, 1, alone.data());
      for (int64_t n = 0; n < columns; ++n)
        compare(transposed ? "weights along the output" : "weights along the sum", depth, count, all[r * columns + n],
                alone[n]);
    }
  }
}

template <int W, int R>
static void check_dots(int64_t depth) {
  const std::vector<float> x = normal(R * depth), numbers = normal(W * depth);
  std::vector<uint16_t> w(W * depth);
  for (size_t i = 0; i < w.size(); ++i) w[i] = round_to_bf16(numbers[i]);
  const float* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = x.data() + r * depth;
  float all[W][4], alone[1][4];
  dots<W, R>(w.data(), w.data(), depth, rows, depth, all);
  for (int j = 0; j < W; ++j)
    for (int r = 0; r < R; ++r) {
      dots<1, 1>(w.data() + j * depth, w.data(), depth, rows + r, depth, alone);
      compare("dots", depth, R, all[j][r], alone[0][0]);
    }
}

int main() {
  for (const int64_t depth : {1, 8, 15, 63, 199}) {
    check_dots<1, 2>(depth), check_dots<1, 3>(depth), check_dots<1, 4>(depth);
    check_dots<4, 1>(depth), check_dots<4, 2>(depth), check_dots<4, 3>(depth), check_dots<4, 4>(depth);
    for (const int64_t columns : {1, 6, 31, 70}) check_rows(depth, columns, false), check_rows(depth, columns, true);
  }
  std::printf("the same bits\n");
}
