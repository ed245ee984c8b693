// Products of sorted rows with e2m1 and ggml's blocks in whole numbers, by AVX-512 with VNNI: rows in 8 bits, with a scale
// for each 32 columns, and the codes, four of which one instruction multiplies and adds up.
//
// Lanes are rows: of sixteen rows the fours of one place lie together, and a weight's four go to all of them. So no
// weight is transposed. A row's result does not depend on other rows.
#include "block_products.h"
#include "core_products.h"
#include "interleave.h"

using namespace amoeba;

namespace {

#ifdef AMOEBA_AVX512_VNNI
constexpr int64_t CHUNK = 256;  // columns that are unpacked together; a multiple of all blocks
constexpr int64_t SCALED = 32;  // columns with one scale of a row
constexpr int64_t CHUNK_FOURS = CHUNK / 4, CHUNK_SCALES = CHUNK / SCALED;
constexpr int64_t LINE_ROWS = 16;  // rows in a vector
constexpr int64_t MOST_ROWS = 256, LEAST_ROWS = 64;  // of an expert, at once: as many as fit into
constexpr int64_t ROWS_BYTES = 512 << 10;            // half of an L2 cache of 1 MiB
constexpr int WEIGHTS = 12;                          // rows of a weight that are unpacked together
constexpr int64_t WEIGHT_BLOCK = 4 * WEIGHTS;

thread_local Buffer<char> row_lines;
thread_local Buffer<float> block_sums;

// All rows, each as `stride` bytes with a scale for each 32 columns, zeros past its end.
struct ByteRows {
  const int8_t* q;
  const float* scale;
  int64_t stride;
  const int64_t* index;
  int64_t at(int64_t r) const { return index ? index[r] : r; }
};

// Sixteen rows, 256 columns of each: fours of columns, scales, and for each group of a weight's columns what a sum of
// products starts with, -ZERO times the row's sum there; or that sum itself, scaled, for weights with offsets.
template <class Codes>
struct alignas(64) RowChunk {
  static constexpr int64_t GROUPS = CHUNK / Codes::GROUP_COLUMNS;
  int32_t fours[CHUNK_FOURS][LINE_ROWS];
  float scale[CHUNK_SCALES][LINE_ROWS];
  std::conditional_t<Codes::OFFSET, float, int32_t> sum[GROUPS][LINE_ROWS];
};

// WEIGHTS rows of a weight, 256 columns of each: scale . (q - ZERO), or scale . q + offset, for each group of columns.
struct Unpacked {
  alignas(64) uint8_t q[WEIGHTS][CHUNK];
  alignas(64) float scale[WEIGHTS][16], offset[WEIGHTS][16];
};

// x = scale . whole for each 32 columns; of numbers that are not finite the scale is NaN.
void round_row(const float* x, int64_t depth, int8_t* whole, float* scale) {
  const auto some = [&](int64_t k) {
    const __mmask16 there = depth - k >= 16 ? 0xffff : depth > k ? (1u << (depth - k)) - 1 : 0;
    return _mm512_maskz_loadu_ps(there, x + k);
  };
  const auto store = [&](int64_t k, __m512 scaled) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(whole + k), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(scaled)));
  };
  for (int64_t k = 0; k < round_up(depth, CHUNK); k += SCALED, ++scale) {
    const __m512 first = some(k), last = some(k + 16);
    const __m512 sizes = _mm512_castsi512_ps(
        _mm512_max_epu32(_mm512_castps_si512(_mm512_abs_ps(first)), _mm512_castps_si512(_mm512_abs_ps(last))));
    const uint32_t largest = _mm512_reduce_max_epu32(_mm512_castps_si512(sizes));
    const bool finite = largest < 0x7f800000u, nothing = largest < bits_of(1e-30f);
    *scale = nothing ? 0 : finite ? float_of(largest) / 127 : float_of(0x7fc00000u);
    const __m512 inverse = _mm512_set1_ps(nothing ? 0 : 127 / float_of(largest));
    store(k, finite ? _mm512_mul_ps(first, inverse) : __m512{});
    store(k + 16, finite ? _mm512_mul_ps(last, inverse) : __m512{});
  }
}

// Rows [first, first + count), up to sixteen, into `line`.
template <class Codes>
void pack_line(const ByteRows& rows, int64_t first, int64_t count, RowChunk<Codes>* line) {
  alignas(64) static const int8_t nothing[CHUNK] = {};
  for (int64_t k = 0; k < rows.stride; k += CHUNK, ++line) {
    const int8_t* from[LINE_ROWS];
    for (int64_t r = 0; r < LINE_ROWS; ++r) {
      const int64_t row = r < count ? rows.at(first + r) : 0;
      from[r] = r < count ? rows.q + row * rows.stride + k : nothing;
      const float* scales = rows.scale + (row * rows.stride + k) / SCALED;
      for (int64_t i = 0; i < CHUNK_SCALES; ++i) line->scale[i][r] = r < count ? scales[i] : 0;
    }
    for (int64_t i = 0; i < CHUNK / 64; ++i)
      transpose_tile([&](int64_t r) { return from[r] + 64 * i; },
                     reinterpret_cast<uint32_t*>(line->fours[i * TILE]));
    for (int64_t g = 0; g < line->GROUPS; ++g) {
      constexpr int64_t FOURS = Codes::GROUP_COLUMNS / 4;
      __m512i sum = _mm512_setzero_si512();
      for (int64_t i = 0; i < FOURS; ++i)
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), _mm512_load_si512(line->fours[g * FOURS + i]));
      if constexpr (Codes::OFFSET)
        _mm512_store_ps(line->sum[g], _mm512_mul_ps(_mm512_cvtepi32_ps(sum),
                                                    _mm512_load_ps(line->scale[g * Codes::GROUP_COLUMNS / SCALED])));
      else
        _mm512_store_si512(line->sum[g], _mm512_mullo_epi32(sum, _mm512_set1_epi32(-Codes::ZERO)));
    }
  }
}

// One expert's weight as it is stored.
struct Stored {
  const uint8_t* codes;
  int64_t stride_row, depth, expert;
  const Coding& coding;
};

// What unpacks 256 columns of a row, GROUP_COLUMNS with one scale; `p` are its bytes, zeros past the end of the row.
template <class Block>
struct OfBlocks {
  static constexpr int GROUP_COLUMNS = Block::GROUP_COLUMNS, ZERO = int(Block::ZERO);
  static constexpr bool OFFSET = Block::ZERO == 0;
  static constexpr int64_t UNIT = Block::COLUMNS == 64 ? 32 : 256, CHUNK_BYTES = CHUNK / UNIT * Block::BYTES;
  static int64_t row_bytes(int64_t depth) { return ceil_div(depth, UNIT) * Block::BYTES; }

  static void unpack(const Stored&, int64_t, int64_t, const uint8_t* p, uint8_t* q, float* scale, float* offset) {
    Block::scales_of_256(p, scale, offset);
    for (int64_t k = 0; k < CHUNK; k += Block::COLUMNS, p += Block::COLUMNS == 64 ? 2 * Block::BYTES : Block::BYTES) {
      const Block block(p);
#pragma GCC unroll 4
      for (int quarter = 0; quarter < Block::COLUMNS / 64; ++quarter, q += 64)
        _mm512_store_si512(q, block.at(p, quarter).q);
    }
  }
};

template <int GROUP_COLUMNS_>
struct OfE2m1 {  // as twice what they mean
  static constexpr int GROUP_COLUMNS = GROUP_COLUMNS_, ZERO = 12;
  static constexpr bool OFFSET = false;
  static constexpr int64_t CHUNK_BYTES = CHUNK / 2;
  static int64_t row_bytes(int64_t depth) { return round_up(depth, GROUP_COLUMNS) / 2; }

  static void unpack(const Stored& weight, int64_t row, int64_t first, const uint8_t* p, uint8_t* q, float* scale,
                     float*) {
    const __m512i values = _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    for (int64_t k = 0; k < CHUNK; k += 64) {
      const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + k / 2)));
      const __m512i both = _mm512_or_si512(bytes, _mm512_slli_epi16(bytes, 4));
      _mm512_store_si512(q + k, _mm512_shuffle_epi8(values, _mm512_and_si512(both, _mm512_set1_epi8(15))));
    }
    const RowScales scales = weight.coding.of_row(weight.expert, row);
    for (int64_t k = 0; k < CHUNK; k += GROUP_COLUMNS)
      *scale++ = first + k < weight.depth ? 0.5f * scales.at(weight.coding.column.at(first + k)) : 0;
  }
};

// sums[j][line][row] (+)= <row j of the weight, row>, W rows of the weight from j on with L lines, in one chunk.
template <class Codes, int W, int L>
[[gnu::noinline]] void multiply_chunk(const Unpacked& weight, int64_t j, const RowChunk<Codes>* x, int64_t next_line,
                                      bool add, float* sums, int64_t stride) {
  constexpr int64_t FOURS = Codes::GROUP_COLUMNS / 4;
  __m512 all[W][L];
#pragma GCC unroll 12
  for (int i = 0; i < W; ++i)
#pragma GCC unroll 2
    for (int l = 0; l < L; ++l) all[i][l] = add ? _mm512_loadu_ps(sums + (j + i) * stride + l * LINE_ROWS) : __m512{};
  const uint8_t* q = weight.q[j];
  for (int64_t g = 0; g < x->GROUPS; ++g) {
    __m512i whole[W][L];
#pragma GCC unroll 12
    for (int i = 0; i < W; ++i)
#pragma GCC unroll 2
      for (int l = 0; l < L; ++l)
        whole[i][l] = Codes::OFFSET ? _mm512_setzero_si512() : _mm512_load_si512(x[l * next_line].sum[g]);
    for (int64_t k = 0; k < FOURS; k += 4, q += 16)
#pragma GCC unroll 4
      for (int some = 0; some < 4; ++some) {
        __m512i fours[L];
#pragma GCC unroll 2
        for (int l = 0; l < L; ++l) fours[l] = _mm512_load_si512(x[l * next_line].fours[g * FOURS + k + some]);
#pragma GCC unroll 12
        for (int i = 0; i < W; ++i) {
          int32_t four;
          std::memcpy(&four, q + i * CHUNK + 4 * some, sizeof(four));
#pragma GCC unroll 2
          for (int l = 0; l < L; ++l)
            whole[i][l] = _mm512_dpbusd_epi32(whole[i][l], _mm512_set1_epi32(four), fours[l]);
        }
      }
#pragma GCC unroll 2
    for (int l = 0; l < L; ++l) {
      const __m512 scale = _mm512_load_ps(x[l * next_line].scale[g * Codes::GROUP_COLUMNS / SCALED]);
#pragma GCC unroll 12
      for (int i = 0; i < W; ++i) {
        const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(whole[i][l]), scale);
        all[i][l] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(weight.scale[j + i][g]), all[i][l]);
        if constexpr (Codes::OFFSET)
          all[i][l] = _mm512_fmadd_ps(_mm512_load_ps(x[l * next_line].sum[g]),
                                      _mm512_set1_ps(weight.offset[j + i][g]), all[i][l]);
      }
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < W; ++i)
#pragma GCC unroll 2
    for (int l = 0; l < L; ++l) _mm512_storeu_ps(sums + (j + i) * stride + l * LINE_ROWS, all[i][l]);
}

struct WholeProduct {  // one expert's part of: out = rows . matrixᵀ (+ bias)
  ByteRows rows;
  Stored weight;
  const float* bias;
  float* out;
  int64_t out_stride;
};

// out[r][n] = sums[n][r] (+ bias[n]).
void store_sums(const float* sums, int64_t padded, int64_t columns, int64_t rows, const float* bias, float* out,
                int64_t out_stride) {
  int64_t n = 0;
  for (; n + TILE <= columns; n += TILE) {
    const __m512 offset = bias ? _mm512_loadu_ps(bias + n) : __m512{};
    for (int64_t r = 0; r < rows; r += TILE) {
      alignas(64) uint32_t turned[TILE][TILE];
      transpose_tile([&](int64_t c) { return sums + (n + c) * padded + r; }, turned[0]);
      for (int64_t i = 0; i < std::min(TILE, rows - r); ++i)
        _mm512_storeu_ps(out + (r + i) * out_stride + n, _mm512_add_ps(_mm512_load_ps(turned[i]), offset));
    }
  }
  store_transposed(sums + n * padded, padded, columns - n, rows, bias ? bias + n : nullptr, out + n, out_stride);
}

// Rows [first_row, first_row + count) of one expert with `columns` rows of its weight.
template <class Codes>
void multiply_rows(const WholeProduct& p, int64_t first_row, int64_t count, int64_t first_column, int64_t columns) {
  using Chunk = RowChunk<Codes>;
  constexpr int64_t CHUNK_BYTES = Codes::CHUNK_BYTES;
  const int64_t depth = p.weight.depth, stride = p.weight.stride_row, row_bytes = Codes::row_bytes(depth);
  const int64_t chunks = ceil_div(depth, CHUNK), many = ceil_div(count, LINE_ROWS), padded = many * LINE_ROWS;
  auto* lines = reinterpret_cast<Chunk*>(row_lines.get(size_t(many * chunks) * sizeof(Chunk)));
  for (int64_t l = 0; l < many; ++l)
    pack_line<Codes>(p.rows, first_row + l * LINE_ROWS, std::min(LINE_ROWS, count - l * LINE_ROWS), lines + l * chunks);
  float* sums = block_sums.get(size_t(WEIGHT_BLOCK * padded));
  Unpacked unpacked;
  for (int64_t n = 0; n < columns; n += WEIGHT_BLOCK) {
    const int64_t width = std::min(WEIGHT_BLOCK, columns - n);
    for (int64_t chunk = 0; chunk < chunks; ++chunk)
      for (int64_t j = 0; j < width; j += WEIGHTS) {
        for (int64_t i = 0; i < std::min<int64_t>(WEIGHTS, width - j); ++i) {
          const int64_t row = first_column + n + j + i;
          const uint8_t* from = p.weight.codes + row * stride + chunk * CHUNK_BYTES;
          for (int64_t line = 0; line < CHUNK_BYTES; line += 64)
            __builtin_prefetch(from + WEIGHT_BLOCK * stride + line, 0, 2);
          alignas(64) uint8_t rest[CHUNK_BYTES];
          if (const int64_t left = row_bytes - chunk * CHUNK_BYTES; left < CHUNK_BYTES) {
            std::memset(rest, 0, sizeof(rest)), std::memcpy(rest, from, size_t(left));
            from = rest;
          }
          Codes::unpack(p.weight, row, chunk * CHUNK, from, unpacked.q[i], unpacked.scale[i], unpacked.offset[i]);
        }
        float* into = sums + j * padded;
        const Chunk* x = lines + chunk;
        int64_t l = 0;
        for (; l + 2 <= many; l += 2)
          for (int half = 0; half < WEIGHTS; half += WEIGHTS / 2)
            multiply_chunk<Codes, WEIGHTS / 2, 2>(unpacked, half, x + l * chunks, chunks, chunk > 0,
                                                  into + l * LINE_ROWS, padded);
        if (l < many)
          multiply_chunk<Codes, WEIGHTS, 1>(unpacked, 0, x + l * chunks, chunks, chunk > 0, into + l * LINE_ROWS,
                                            padded);
      }
    const int64_t column = first_column + n;
    store_sums(sums, padded, width, count, p.bias ? p.bias + column : nullptr,
               p.out + first_row * p.out_stride + column, p.out_stride);
  }
}

// All of one expert's rows with some columns, as many at once as stay in the L2 cache.
template <class Codes>
void multiply_expert(const WholeProduct& p, int64_t first_row, int64_t end, int64_t first_column, int64_t columns) {
  const int64_t line_bytes = ceil_div(p.weight.depth, CHUNK) * int64_t(sizeof(RowChunk<Codes>));
  const int64_t most = std::clamp(ROWS_BYTES / line_bytes * LINE_ROWS, LEAST_ROWS, MOST_ROWS);
  for (int64_t r = first_row; r < end; r += most)
    multiply_rows<Codes>(p, r, std::min(most, end - r), first_column, columns);
}

template <class Call>
void with_codes(const Coding& coding, const Call& call) {
  if (coding.element == E2M1) return coding.column.shift == 5 ? call(OfE2m1<32>()) : call(OfE2m1<16>());
  with_blocks(coding.element, [&](auto block) { call(OfBlocks<typename decltype(block)::Type>()); });
}
#endif

}  // namespace

#pragma GCC visibility push(default)  // also of those that take what is hidden
extern "C" {

int amoeba_multiplies_whole() {
#ifdef AMOEBA_AVX512_VNNI
  return 1;
#else
  return 0;
#endif
}

// out[rows of e] = rows_of(e) . matrix_eᵀ (+ bias_e), for every expert; rows past offs[experts-1] are left as they are.
// Of e2m1 with scales of 16 or 32 columns in bytes, and of ggml's blocks.
#ifdef AMOEBA_AVX512_VNNI
void amoeba_rows_whole(int64_t experts, const int32_t* offs, int64_t row_count, const float* rows, int64_t row_stride,
                       const int64_t* index, const uint8_t* codes, int64_t stride_e, int64_t stride_row,
                       const Coding* coding, const float* bias, int64_t depth, int64_t columns, float* out,
                       int64_t out_stride, int threads) {
  const int64_t width = round_up(depth, CHUNK), some = 16;
  Buffer<int8_t> bytes;
  Buffer<float> scales;
  int8_t* q = bytes.get(size_t(row_count * width));
  float* scale = scales.get(size_t(row_count * width / SCALED));
  run_jobs(ceil_div(row_count, some), threads, [&](int64_t job) {
    for (int64_t r = job * some; r < std::min(row_count, (job + 1) * some); ++r)
      round_row(rows + r * row_stride, depth, q + r * width, scale + r * width / SCALED);
  });
  const ColumnCuts cuts(columns, experts, threads, WEIGHT_BLOCK);
  with_codes(*coding, [&](auto kind) {
    run_jobs(experts * cuts.per_expert, threads, [&](int64_t job) {
      const int64_t e = job / cuts.per_expert, first = job % cuts.per_expert * cuts.width;
      const WholeProduct p{{q, scale, width, index}, {codes + e * stride_e, stride_row, depth, e, *coding},
                           bias ? bias + e * columns : nullptr, out, out_stride};
      multiply_expert<decltype(kind)>(p, start_of(offs, e), offs[e], first, std::min(cuts.width, columns - first));
    });
  });
}
#else
void amoeba_rows_whole() {}
#endif

}  // extern "C"
#pragma GCC visibility pop
