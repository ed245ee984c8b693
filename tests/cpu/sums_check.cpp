// Compares the sums of packed rows and columns with plain loops: int8 to the bit, with the bytes that saturate first;
// bf16 within 1e-5. And each code with the number that it stands for, and with bf16's of its product with a scale.
// Built by tests/cpu/test_sums.py for several instruction sets. It includes the headers, so that a
// build for another architecture needs nothing but its compiler:
//   aarch64-linux-gnu-g++ -std=c++17 -O2 -static -march=armv8.2-a+dotprod tests/cpu/sums_check.cpp -o check
//   qemu-aarch64-static ./check
#include "../../src/amoeba/cpu/csrc/core_decode.h"
#include "../../src/amoeba/cpu/csrc/pack.h"
#include "../../src/amoeba/cpu/csrc/product.h"

#include <cstdio>
#include <random>

using namespace amoeba;

static std::mt19937 generator(0);
static double worst = 0;

[[noreturn]] static void fail(const char* what, int64_t rows, int64_t row, int64_t column, double got, double truth) {
  std::printf("%s, %d rows: row %d, column %d is %.9g instead of %.9g\n", what, int(rows), int(row), int(column), got,
              truth);
  std::exit(1);
}

static void compare(const char* what, int64_t rows, int64_t r, int64_t c, int32_t got, double truth, double) {
  if (got != truth) fail(what, rows, r, c, got, truth);
}
static void compare(const char* what, int64_t rows, int64_t r, int64_t c, float got, double truth, double size) {
  const double error = std::abs(got - truth) / size;
  worst = std::max(worst, error);
  if (!(error < 1e-5)) fail(what, rows, r, c, got, truth);
}

static uint32_t random_word(Bf16) {
  std::normal_distribution<float> normal;
  return round_to_bf16(normal(generator)) | uint32_t(round_to_bf16(normal(generator))) << 16;
}
static uint32_t random_word(Int8) {  // half of them the largest: 255 . -127 and 255 . 127 side by side
  const uint32_t extreme[] = {0x81818181, 0x7f7f7f7f, 0x817f817f, 0x7f7f8181, 0xffffffff, 0xff00ff00, 0x80808080};
  return generator() % 2 ? extreme[generator() % 7] : uint32_t(generator());
}

// Element q of a word of a row and of a column.
static double of_row(Bf16, uint32_t word, int q) { return widen(uint16_t(word >> 16 * q)); }
static double of_column(Bf16, uint32_t word, int q) { return widen(uint16_t(word >> 16 * q)); }
static double of_row(Int8, uint32_t word, int q) {
  return ROW_OFFSET ? double(uint8_t(word >> 8 * q)) : double(int8_t(word >> 8 * q));
}
static double of_column(Int8, uint32_t word, int q) { return int8_t(word >> 8 * q); }

template <class Kind>
struct Operands {
  Buffer<uint32_t> rows, columns;
  Stretch stretch;
  explicit Operands(int64_t tiles) {
    const int64_t row_words = 2 * tiles * TILE_WORDS, column_words = 2 * tiles * TILE_WORDS;
    uint32_t *a = rows.get(row_words + 1), *b = columns.get(column_words + 1);
    for (int64_t i = 0; i < row_words; ++i) a[i] = random_word(Kind());
    for (int64_t i = 0; i < column_words; ++i) b[i] = random_word(Kind());
    stretch = {a, tiles * TILE_WORDS, b, tiles};
  }
  void add(int64_t r, int64_t c, double& sum, double& size) const {
    for (int64_t t = 0; t < stretch.tiles; ++t)
      for (int64_t w = 0; w < TILE; ++w)
        for (int q = 0; q < Kind::PER_WORD; ++q) {
          const uint32_t row = stretch.rows[r / TILE * stretch.row_tile + t * TILE_WORDS + r % TILE * TILE + w];
          const uint32_t column = stretch.columns[(2 * t + c / TILE) * TILE_WORDS + w * TILE + c % TILE];
          const double product = of_row(Kind(), row, q) * of_column(Kind(), column, q);
          sum += product, size += std::abs(product);
        }
  }
};

template <class Kind, class Way>
static void check_sums(const char* what) {
  using Sum = typename Kind::Sum;
  const typename Way::Registers registers;
  (void)registers;
  for (const int64_t tiles : {1, 5})
    for (const int64_t update_tiles : {0, 1})
      for (const bool add : {false, true}) {
        const Operands<Kind> whole(tiles), update(update_tiles);
        for (int64_t rows = 1; rows <= PANEL; ++rows) {
          alignas(64) Sum sums[PANEL * PANEL];
          std::fill(sums, sums + PANEL * PANEL, Sum(3));
          Way::template multiply<Kind>(Depth{whole.stretch, update.stretch, nullptr, 0, add}, rows, sums);
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < PANEL; ++c) {
              double truth = add ? 3 : 0, size = 1;
              whole.add(r, c, truth, size);
              update.add(r, c, truth, size);
              compare(what, rows, r, c, sums[r * PANEL + c], truth, size);
            }
        }
      }
}

struct IntoFloats : PrefetchesNothing {
  static constexpr bool OF_INT8_TOO = true;
  float* out;
  int64_t stride;
  template <class Sums>
  void operator()(const Job&, int64_t unit, int64_t row, int64_t rows, const Sums& sums, const Sums&) const {
    for (int64_t r = 0; r < rows; ++r)
      store_panel(out + (row + r) * stride + unit * PANEL, sums.at(r, 0), sums.at(r, 1), sums.width, false);
  }
};

// From the weights to the finished numbers. Integers up to 127, and 127 in every row and channel: all scales are one.
static void check_int8_product(Path path, const char* what, int64_t rows, int64_t columns, int64_t depth) {
  std::vector<uint16_t> x(rows * depth), w(columns * depth);
  for (auto& v : x) v = round_to_bf16(float(int(generator() % 255) - 127));
  for (auto& v : w) v = round_to_bf16(float(int(generator() % 255) - 127));
  for (int64_t r = 0; r < rows; ++r) x[r * depth + r % depth] = round_to_bf16(r % 2 ? 127.0f : -127.0f);
  for (int64_t n = 0; n < columns; ++n) w[n * depth + n % depth] = round_to_bf16(n % 2 ? -127.0f : 127.0f);
  Buffer<int8_t> packed;
  std::vector<float> scale(columns), out(rows * columns);
  std::vector<int32_t> sum(columns);
  pack_int8(columns, depth, w.data(), depth, 1, packed.get(packed_words(columns, depth, Int8::PER_WORD) * Int8::PER_WORD), scale.data(),
            sum.data());
  Product p;
  p.weights = {reinterpret_cast<uint32_t*>(packed.data), scale.data(), sum.data(), nullptr, depth, columns,
               tiles_of(depth, Int8::PER_WORD), {}};
  p.path = path, p.int8 = true, p.units = p.weights.panels();
  run_job(p, Job{0, 0, rows, 0, p.units}, Input{x.data(), depth}, IntoFloats{{}, out.data(), columns});
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < columns; ++n) {
      int32_t truth = 0;
      for (int64_t k = 0; k < depth; ++k) truth += int32_t(widen(x[r * depth + k])) * int32_t(widen(w[n * depth + k]));
      if (out[r * columns + n] != float(truth)) fail(what, rows, r, n, out[r * columns + n], truth);
    }
}

static void check_path(Path path, const char* what) {
  for (const int64_t rows : {1, 2, 3, 31, 70})
    for (const auto& [columns, depth] : {std::pair{1, 1}, {33, 65}, {63, 199}, {96, 760}})
      check_int8_product(path, what, rows, columns, depth);
}

static float number_of(E4m3, const uint8_t* row, int k) {
  const int code = row[k], exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return float_of(0x7fc00000);
  const float size = exponent ? std::ldexp(1.0f + float(mantissa) / 8, exponent - 7) : std::ldexp(float(mantissa), -9);
  return code & 0x80 ? -size : size;
}
static float number_of(E2m1, const uint8_t* row, int k) {
  const float size[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const int code = row[k / 2] >> k % 2 * 4;
  return code & 8 ? -size[code & 7] : size[code & 7];
}

template <class Element>
static void check_codes(const char* what) {
  alignas(64) uint8_t codes[256 + CODES];
  for (int i = 0; i < 256 + CODES; ++i) codes[i] = uint8_t(i);
  for (int first = 0; first < 256; ++first)
    for (const int k : {0, int(CODES) / 2 * (first % 2 + 1)})
      for (const int count : {1, 5, int(CODES)})
        for (const float scale : {1.0f, 0.3f, 0x1p127f, 0x1p-127f}) {
          if (first + Element::bytes(k + CODES) > 256 + CODES) continue;
          float wide[CODES] = {};
          uint16_t narrow[CODES] = {};
          store_some_scaled<Element>(wide, load_codes<Element>(codes + first, k, count), scale, count);
          store_some_scaled<Element>(narrow, load_codes<Element>(codes + first, k, count), scale, count);
          for (int i = 0; i < CODES; ++i) {
            const float truth = i < count ? number_of(Element(), codes + first, k + i) * scale : 0;
            const bool same = std::isnan(truth) ? std::isnan(wide[i]) : bits_of(wide[i]) == bits_of(truth);
            if (!same) fail(what, count, first, i, wide[i], truth);
            // bf16 instructions take what is below the smallest normal number for 0
            const bool rounded = std::isnan(truth) ? std::isnan(widen(narrow[i])) : narrow[i] == round_to_bf16(truth);
            if (scale >= 0.3f && !rounded) fail(what, count, first, i, widen(narrow[i]), truth);
          }
        }
}

// Few rows with some rows of codes, whose scales are bytes.
template <class Element>
static void check_coded_dots(const char* what, int64_t shift, int64_t n) {
  const int64_t blocks = ceil_div(n, int64_t(1) << shift), columns = blocks << shift, stride = Element::bytes(columns);
  std::vector<uint8_t> codes(WEIGHT_ROWS * stride), scales(WEIGHT_ROWS * blocks);
  for (auto& code : codes) code = uint8_t(generator() % 0x7f);  // no NaN
  for (auto& scale : scales) scale = uint8_t(generator());
  float values[256], whole = 0.3f, x[4][300], out[WEIGHT_ROWS][4];
  for (int i = 0; i < 256; ++i) values[i] = std::ldexp(1.0f, i % 7 - 3);
  for (auto& row : x)
    for (auto& value : row) value = std::normal_distribution<float>()(generator);
  const float* rows[4] = {x[0], x[1], x[2], x[3]};
  const ScaleAxis down{0, WEIGHT_ROWS, WEIGHT_ROWS, blocks}, across{shift, n, blocks, 1};
  const Coding coding{0, scales.data(), values, &whole, 0, 0, down, across};
  const auto matrix = CodedMatrix<Element>::of(codes.data(), 0, stride, &coding);
  for (int64_t count = 1; count <= 4; ++count)
    for (const bool one : {false, true}) {
      if (one)
        for (int64_t j = 0; j < WEIGHT_ROWS; ++j) matrix.template dots<1>(0, j, j, count, rows, n, out + j);
      else
        matrix.template dots<WEIGHT_ROWS>(0, 0, 0, count, rows, n, out);
      for (int64_t j = 0; j < WEIGHT_ROWS; ++j)
        for (int64_t r = 0; r < count; ++r) {
          double truth = 0, size = 1e-30;
          for (int64_t k = 0; k < n; ++k) {
            const double scale = values[scales[j * blocks + (k >> shift)]] * whole;
            const double product = number_of(Element(), codes.data() + j * stride, int(k)) * scale * x[r][k];
            truth += product, size += std::abs(product);
          }
          compare(what, count, r, j, out[j][r], truth, size);
        }
    }
}

int main() {
  check_codes<E4m3>("e4m3");
  check_codes<E2m1>("e2m1");
  for (const int64_t shift : {4, 5, 7})
    for (const int64_t n : {1, 15, 16, 17, 31, 32, 33, 48, 63, 64, 199, 300}) {
      check_coded_dots<E4m3>("sums of e4m3", shift, n);
      check_coded_dots<E2m1>("sums of e2m1", shift, n);
    }
  check_sums<Bf16, Plain>("plain bf16");
  check_sums<Int8, Plain>("plain int8");
  check_path(GENERIC, "plain int8 product");
#ifdef AMOEBA_AVX512
  check_sums<Bf16, Dots>("AVX-512 bf16");
  check_sums<Int8, Dots>("AVX-512 int8");
  check_path(AVX512, "AVX-512 int8 product");
#endif
  std::printf("%d lanes, offset %d, worst error of bf16 %.1e\n", LANES, ROW_OFFSET, worst);
}
