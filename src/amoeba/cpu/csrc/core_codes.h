// One expert's codes as a matrix of numbers.
#pragma once
#include "codes.h"
#include "jobs.h"

namespace amoeba {
namespace {

template <class Number>
void dequantise(const uint8_t* codes, const Scales& scales, int64_t expert, int64_t rows, int64_t columns, Number* out,
                int threads) {
  constexpr int64_t STEP = 32;  // rows of a job
  run_jobs(ceil_div(rows, STEP), threads, [&](int64_t job) {
    for (int64_t r = job * STEP; r < std::min(rows, (job + 1) * STEP); ++r) {
      const float* of_row = scales.of_row(expert, r);
      for (int64_t k = 0; k < columns; k += CODES) {
        const float scale = CODES_ARE_OVER * of_row[scales.column.at(k)];
        const Numbers numbers = load_some_codes(codes + r * columns + k, columns - k);
        store_some_scaled(out + r * columns + k, numbers, scale, columns - k);
      }
    }
  });
}

}  // namespace
}  // namespace amoeba
