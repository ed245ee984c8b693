// One expert's codes as a matrix of numbers.
#pragma once
#include "codes.h"
#include "jobs.h"

namespace amoeba {
namespace {

// row_bytes: from one row of codes to the next.
template <class Element, class Number>
void dequantise(const uint8_t* codes, int64_t row_bytes, const Coding& coding, int64_t expert, int64_t rows,
                int64_t columns, Number* out, int threads) {
  constexpr int64_t STEP = 32;  // rows of a job
  const Unpack unpack = unpack_of(coding.element);
  run_jobs(ceil_div(rows, STEP), threads, [&](int64_t job) {
    for (int64_t r = job * STEP; r < std::min(rows, (job + 1) * STEP); ++r) {
      if (unpack) {
        for (int64_t k = 0; k < columns; k += GROUP) {
          float numbers[GROUP];
          unpack(codes + r * row_bytes, k, GROUP, numbers);
          round_some(numbers, std::min<int64_t>(GROUP, columns - k), out + r * columns + k);
        }
        continue;
      }
      const RowScales scales = coding.of_row(expert, r);
      for (int64_t k = 0; k < columns; k += CODES) {
        const Numbers numbers = load_codes<Element>(codes + r * row_bytes, k, columns - k);
        store_some_scaled<Element>(out + r * columns + k, numbers, scales.at(coding.column.at(k)), columns - k);
      }
    }
  });
}

}  // namespace
}  // namespace amoeba
