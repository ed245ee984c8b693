// The part of the CPU core that reads codes.
#include "core_codes.h"
#include "core_decode.h"

using namespace amoeba;

#pragma GCC visibility push(default)  // also of those that take what is hidden
extern "C" {

AMOEBA_DECODE(amoeba_decode_e4m3, CodedMatrix<E4m3>)
AMOEBA_DECODE(amoeba_decode_e2m1, CodedMatrix<E2m1>)
AMOEBA_DECODE(amoeba_decode_blocks, BlocksMatrix)

// out (rows, columns) = code . scale in fp32, rounded to what out is.
#define AMOEBA_DEQUANTISE(NAME, Number)                                                                               \
  void NAME(const uint8_t* codes, int64_t row_bytes, const Coding* coding, int64_t expert, int64_t rows,              \
            int64_t columns, Number* out, int threads) {                                                              \
    with_element(coding->element, [&](auto element) {                                                                 \
      dequantise<decltype(element)>(codes, row_bytes, *coding, expert, rows, columns, out, threads);                  \
    });                                                                                                               \
  }
AMOEBA_DEQUANTISE(amoeba_dequantise_f32, float)
AMOEBA_DEQUANTISE(amoeba_dequantise_bf16, uint16_t)

}  // extern "C"
#pragma GCC visibility pop
