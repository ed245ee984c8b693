// One expert's codes as a matrix of numbers.
#pragma once
#include "codes.h"
#include "jobs.h"

namespace amoeba {
namespace {

// Rows [first, last) of one expert to `out`, where the first of them begins. row_bytes: from one row of codes to the next.
template <class Element, class Number>
void dequantise_some(const uint8_t* codes, int64_t row_bytes, const Coding& coding, int64_t expert, int64_t first,
                     int64_t last, int64_t columns, Number* out) {
  const Unpack unpack = unpack_of(coding.element);
  for (int64_t r = first; r < last; ++r, out += columns) {
    if (unpack) {
      for (int64_t k = 0; k < columns; k += GROUP) {
        float numbers[GROUP];
        unpack(codes + r * row_bytes, k, GROUP, numbers);
        round_some(numbers, std::min<int64_t>(GROUP, columns - k), out + k);
      }
      continue;
    }
    const RowScales scales = coding.of_row(expert, r);
    for (int64_t k = 0; k < columns; k += CODES) {
      const Numbers numbers = load_codes<Element>(codes + r * row_bytes, k, columns - k);
      store_some_scaled<Element>(out + k, numbers, scales.at(coding.column.at(k)), columns - k);
    }
  }
}

template <class Element, class Number>
void dequantise(const uint8_t* codes, int64_t row_bytes, const Coding& coding, int64_t expert, int64_t rows,
                int64_t columns, Number* out, int threads) {
  constexpr int64_t STEP = 32;  // rows of a job
  run_jobs(ceil_div(rows, STEP), threads, [&](int64_t job) {
    const int64_t first = job * STEP;
    dequantise_some<Element>(codes, row_bytes, coding, expert, first, std::min(rows, first + STEP), columns,
                             out + first * columns);
  });
}

}  // namespace
}  // namespace amoeba
