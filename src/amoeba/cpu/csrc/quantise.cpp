// A matrix to codes with a scale for each block, bit for bit as precision/quantised.py does it with torch. The caller
// checked its tensors.
//
// Numbers are divided by their scale, never multiplied by its rounded reciprocal; those of powers of two are exact.
#include <limits>
#include <vector>

#include "jobs.h"
#include "vectors.h"

using namespace amoeba;

namespace {

constexpr uint32_t INFINITE = 0x7f800000;
constexpr float SMALLEST_NORMAL = 0x1p-126f;
constexpr int64_t JOB_ROWS = 16;
constexpr int CLOSEST[2] = {2, 6};  // as in precision/quantised.py

enum ScaleKind { FP32, E8M0, E4M3_OF_MATRIX };  // the order of `_SCALES` in cpu/quantise.py

using Bytes16 = VectorOf<uint8_t, 16>::Type;

// Codes of a sign, an exponent and MANTISSA bits, saturating, ties to even. Below 2^(1 - BIAS) they count the last bit
// of what begins with 2^(23 - MANTISSA + 1 - BIAS).
template <int MANTISSA, int BIAS, int SIGN, int LARGEST>
struct Element {
  static constexpr float largest = LARGEST;
  static Words codes(Floats values) {
    constexpr int SHIFT = 23 - MANTISSA;
    constexpr uint32_t BITS_OF_ONE = uint32_t(127 + SHIFT + 1 - BIAS) << 23;
    constexpr float ONE_BIT = float(1 << (SHIFT + 1 - BIAS)), SMALLEST = 2.0f / float(1 << BIAS);
    const Words bits = (Words)values;
    const Floats unsaturated = (Floats)(bits & 0x7fffffff);
    const Floats size = select(unsaturated < largest, unsaturated, Floats{} + largest);
    const Words size_bits = (Words)size;
    const Words normal = ((size_bits + ((1u << (SHIFT - 1)) - 1) + (size_bits >> SHIFT & 1)) >> SHIFT) -
                           (uint32_t(127 - BIAS) << MANTISSA);
    const Words small = (Words)(size + ONE_BIT) - BITS_OF_ONE;
    return select(size < SMALLEST, small, normal) | (bits >> 31 << SIGN);
  }
  // What the code of a number stands for, without the sign.
  static Floats rounded(Floats values) {
    constexpr int SHIFT = 23 - MANTISSA;
    constexpr float ONE_BIT = float(1 << (SHIFT + 1 - BIAS)), SMALLEST = 2.0f / float(1 << BIAS);
    const Floats unsaturated = (Floats)((Words)values & 0x7fffffff);
    const Floats size = select(unsaturated < largest, unsaturated, Floats{} + largest);
    const Words size_bits = (Words)size;
    const Words normal = (size_bits + ((1u << (SHIFT - 1)) - 1) + (size_bits >> SHIFT & 1)) >> SHIFT << SHIFT;
    return select(size < SMALLEST, (size + ONE_BIT) - ONE_BIT, (Floats)normal);
  }
};
using E4m3 = Element<3, 7, 7, 448>;
using E2m1 = Element<1, 1, 3, 6>;

float e4m3_value(uint8_t code) {  // not negative, no NaN
  return code < 8 ? float(code) * 0x1p-9f : float_of((uint32_t(code) << 20) + (120u << 23));
}

struct Codes16 {  // in registers of the machine: what is wider than one, compilers take apart
  Words at[16 / LANES];
};

inline Bytes16 narrow(const Codes16& codes) {
#if defined(__AVX512F__)
  return (Bytes16)_mm512_cvtepi32_epi8((__m512i)codes.at[0]);
#elif defined(__ARM_NEON)
  const auto pair = [&](int i) {
    return vcombine_u16(vmovn_u32((uint32x4_t)codes.at[i]), vmovn_u32((uint32x4_t)codes.at[i + 1]));
  };
  return (Bytes16)vcombine_u8(vmovn_u16(pair(0)), vmovn_u16(pair(2)));
#else
  Bytes16 bytes;
  for (int i = 0; i < 16; ++i) bytes[i] = uint8_t(codes.at[i / LANES][i % LANES]);
  return bytes;
#endif
}

template <class Source>
struct Matrix {
  const Source* data;
  int64_t rows, columns, stride;
  const Source* row(int64_t i) const { return data + i * stride; }
};

// The largest of `count` numbers without their signs, as the bits of a float.
inline uint32_t largest_bits(const uint16_t* p, int64_t count) {
  uint16_t found = 0;
  for (int64_t i = 0; i < count; ++i) found = std::max<uint16_t>(found, p[i] & 0x7fff);
  return uint32_t(found) << 16;
}
inline uint32_t largest_bits(const float* p, int64_t count) {
  uint32_t found = 0;
  for (int64_t i = 0; i < count; ++i) found = std::max(found, bits_of(p[i]) & 0x7fffffff);
  return found;
}

// A block of a row: `count` numbers, up to COLUMNS. Codes of four bits lie two to a byte and fill it.
template <class Coded, int COLUMNS, class Source, class Scaled>
inline void encode(const Source* from, int64_t count, uint8_t* out, const Scaled& scaled) {
  for (int begin = 0; begin < COLUMNS; begin += 16) {
    const int64_t left = count - begin;
    Source cut[16] = {};
    if (left < 16 && left > 0) std::memcpy(cut, from + begin, size_t(left) * sizeof(Source));
    const Source* numbers = left < 16 ? cut : from + begin;
    Codes16 codes;
    for (int i = 0; i < 16 / LANES; ++i) codes.at[i] = Coded::codes(scaled(load<LANES>(numbers + i * LANES)));
    if constexpr (std::is_same_v<Coded, E2m1>) {
      const Bytes16 bytes = narrow(codes);
      uint64_t pairs[2];
      std::memcpy(pairs, &bytes, sizeof(pairs));
      for (int half = 0; half < 2; ++half) {  // 0x0b0a -> 0xba, then the bytes together
        uint64_t each = (pairs[half] | pairs[half] >> 4) & 0x00ff00ff00ff00ff;
        each = (each | each >> 8) & 0x0000ffff0000ffff;
        const auto packed = uint32_t(each | each >> 16);
        std::memcpy(out + begin / 2 + 4 * half, &packed, sizeof(packed));
      }
    } else if (left > 0) {
      const Bytes16 bytes = narrow(codes);
      std::memcpy(out + begin, &bytes, size_t(std::min<int64_t>(left, 16)));
    }
  }
}

// Squared error of a block in units of its scale, added up by halves as torch does it: in the same order everywhere.
template <class Coded, int COLUMNS, class Source, class Scaled>
inline float squared_error(const Source* from, int64_t count, const Scaled& scaled) {
  Source cut[COLUMNS] = {};
  if (count < COLUMNS) std::memcpy(cut, from, size_t(count) * sizeof(Source));
  const Source* numbers = count < COLUMNS ? cut : from;
  alignas(64) float squares[COLUMNS];
  for (int i = 0; i < COLUMNS; i += LANES) {
    const Floats value = scaled(load<LANES>(numbers + i)), size = (Floats)((Words)value & 0x7fffffff);
    const Floats wrong = size - Coded::rounded(value), square = wrong * wrong;
    std::memcpy(squares + i, &square, sizeof(square));
  }
  asm volatile("" : : "r"(squares) : "memory");  // no sum is fused with a square, which would round once less
  for (int half = COLUMNS / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) squares[i] += squares[i + half];
  return squares[0];
}

// What a block of `COLUMNS` columns takes of a row of codes.
template <class Coded, int COLUMNS>
constexpr int64_t block_bytes() {
  return std::is_same_v<Coded, E2m1> ? COLUMNS / 2 : COLUMNS;
}

struct Out {
  uint8_t* data;
  int64_t stored;  // bytes of a row
  void* scales;
  int64_t across;  // scales of a row
};

// Blocks of 1 x COLUMNS, scales e8m0. closest: twice the scale where the error is less.
template <class Coded, int COLUMNS, class Source>
bool rows_by_powers(const Matrix<Source>& matrix, const Out& out, bool closest, int threads) {
  constexpr int EXPONENT = std::is_same_v<Coded, E2m1> ? 2 : 8;
  std::atomic<bool> finite{true};
  run_jobs(ceil_div(matrix.rows, JOB_ROWS), threads, [&](int64_t job) {
    uint32_t most = 0;
    for (int64_t i = job * JOB_ROWS; i < std::min(matrix.rows, (job + 1) * JOB_ROWS); ++i) {
      uint8_t* codes = out.data + i * out.stored;
      uint8_t* scales = static_cast<uint8_t*>(out.scales) + i * out.across;
      for (int64_t b = 0; b < out.across; ++b, codes += block_bytes<Coded, COLUMNS>()) {
        const Source* from = matrix.row(i) + b * COLUMNS;
        const int64_t count = std::min<int64_t>(COLUMNS, matrix.columns - b * COLUMNS);
        const uint32_t bits = count == COLUMNS ? largest_bits(from, COLUMNS) : largest_bits(from, count);
        most = std::max(most, bits);
        uint32_t scale = std::max(int(bits >> 23) - EXPONENT, 0);
        const auto inverse_of = [](uint32_t code) { return float_of((254 - std::min(code, 253u)) << 23); };
        if (closest && scale && bits < INFINITE) {
          const auto error = [&](float inverse) {
            return squared_error<Coded, COLUMNS>(from, count, [inverse](Floats value) { return value * inverse; });
          };
          scale += error(inverse_of(scale + 1)) * 4 < error(inverse_of(scale));
        }
        scales[b] = uint8_t(scale);
        const float inverse = inverse_of(scale);
        encode<Coded, COLUMNS>(from, count, codes, [inverse](Floats value) { return value * inverse; });
      }
    }
    if (most >= INFINITE) finite = false;
  });
  return finite;
}

// Blocks of 1 x COLUMNS, scales e4m3 times one number of the matrix. closest: of the scales from CLOSEST[0] codes below
// to CLOSEST[1] above, the one with the least error.
template <class Coded, int COLUMNS, class Source>
bool rows_by_e4m3(const Matrix<Source>& matrix, const Out& out, float* matrix_scale, bool closest, int threads) {
  std::vector<uint32_t> largest(size_t(matrix.rows * out.across));
  std::vector<uint32_t> of_jobs(size_t(ceil_div(matrix.rows, JOB_ROWS)));
  const auto each_row = [&](int64_t job, const auto& run) {
    for (int64_t i = job * JOB_ROWS; i < std::min(matrix.rows, (job + 1) * JOB_ROWS); ++i)
      for (int64_t b = 0; b < out.across; ++b)
        run(i, b, matrix.row(i) + b * COLUMNS, std::min<int64_t>(COLUMNS, matrix.columns - b * COLUMNS));
  };
  run_jobs(int64_t(of_jobs.size()), threads, [&](int64_t job) {
    uint32_t most = 0;
    each_row(job, [&](int64_t i, int64_t b, const Source* from, int64_t count) {
      const uint32_t bits = count == COLUMNS ? largest_bits(from, COLUMNS) : largest_bits(from, count);
      largest[size_t(i * out.across + b)] = bits;
      most = std::max(most, bits);
    });
    of_jobs[size_t(job)] = most;
  });
  const uint32_t most = *std::max_element(of_jobs.begin(), of_jobs.end());
  if (most >= INFINITE) return false;
  const float whole = most ? std::max(float_of(most) / (Coded::largest * E4m3::largest), SMALLEST_NORMAL) : 1.0f;
  *matrix_scale = whole;
  run_jobs(int64_t(of_jobs.size()), threads, [&](int64_t job) {
    each_row(job, [&](int64_t i, int64_t b, const Source* from, int64_t count) {
      const float quotient = float_of(largest[size_t(i * out.across + b)]) / Coded::largest;
      auto scale = uint8_t(E4m3::codes(Floats{} + quotient / whole)[0]);
      if (closest && scale) {
        const auto error = [&](uint8_t code) {
          const float size = e4m3_value(code), value = size * whole;
          return squared_error<Coded, COLUMNS>(from, count, [value](Floats number) { return number / value; }) *
                 (size * size);
        };
        float least = error(scale);
        const int first = scale;
        for (int code = std::max(first - CLOSEST[0], 1); code <= std::min(first + CLOSEST[1], 126); ++code) {
          const float found = error(uint8_t(code));
          if (found < least) least = found, scale = uint8_t(code);
        }
      }
      static_cast<uint8_t*>(out.scales)[i * out.across + b] = scale;
      float value = e4m3_value(scale) * whole;
      if (value == 0) value = std::numeric_limits<float>::infinity();  // such a block is zeros, whatever its codes
      uint8_t* codes = out.data + i * out.stored + b * block_bytes<Coded, COLUMNS>();
      encode<Coded, COLUMNS>(from, count, codes, [value](Floats number) { return number / value; });
    });
  });
  return true;
}

// Blocks of block_rows x 128 of e4m3, scales fp32. No block reaches from one of the parts into the next.
template <class Source>
bool blocks_by_fp32(const Matrix<Source>& matrix, int64_t parts, int64_t block_rows, const Out& out, int threads) {
  constexpr int COLUMNS = 128;
  const int64_t of_part = matrix.rows / parts, down = ceil_div(of_part, block_rows);
  std::atomic<bool> finite{true};
  run_jobs(parts * down, threads, [&](int64_t job) {
    const int64_t begin = job / down * of_part + job % down * block_rows;
    const int64_t end = std::min(begin + block_rows, (job / down + 1) * of_part);
    for (int64_t b = 0; b < out.across; ++b) {
      const int64_t first = b * COLUMNS, count = std::min<int64_t>(COLUMNS, matrix.columns - first);
      uint32_t bits = 0;
      for (int64_t i = begin; i < end; ++i) bits = std::max(bits, largest_bits(matrix.row(i) + first, count));
      if (bits >= INFINITE) finite = false;
      const float scale = bits ? std::max(float_of(bits) / E4m3::largest, SMALLEST_NORMAL) : 1.0f;
      static_cast<float*>(out.scales)[job * out.across + b] = scale;
      for (int64_t i = begin; i < end; ++i)
        encode<E4m3, COLUMNS>(matrix.row(i) + first, count, out.data + i * out.stored + first,
                              [scale](Floats value) { return value / scale; });
    }
  });
  return finite;
}

template <class Source>
int quantise(const Matrix<Source>& matrix, int element_bits, int scale, int64_t parts, int64_t block_rows,
             const Out& out, float* matrix_scale, bool closest, int threads) {
  if (scale == FP32) return blocks_by_fp32(matrix, parts, block_rows, out, threads);
  if (scale == E4M3_OF_MATRIX) return rows_by_e4m3<E2m1, 16>(matrix, out, matrix_scale, closest, threads);
  if (element_bits == 4) return rows_by_powers<E2m1, 32>(matrix, out, closest, threads);
  return rows_by_powers<E4m3, 32>(matrix, out, false, threads);
}

}  // namespace

extern "C" {

// Whether all numbers are finite; where not, what was written is nothing.
int amoeba_quantise(int is_float, int64_t rows, int64_t columns, int64_t stride, const void* matrix, int element_bits,
                    int scale, int64_t parts, int64_t block_rows, uint8_t* data, int64_t stored, void* scales,
                    int64_t across, float* matrix_scale, int closest, int threads) {
  const Out out{data, stored, scales, across};
  const auto run = [&](const auto* source) {
    return quantise(Matrix<std::decay_t<decltype(*source)>>{source, rows, columns, stride}, element_bits, scale, parts,
                    block_rows, out, matrix_scale, closest, threads);
  };
  return is_float ? run(static_cast<const float*>(matrix)) : run(static_cast<const uint16_t*>(matrix));
}

}  // extern "C"
