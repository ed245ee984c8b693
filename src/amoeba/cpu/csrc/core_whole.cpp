// Products of sorted rows with e2m1 and ggml's blocks in whole numbers, by AVX-512 with VNNI: rows in fixed point of 16
// bits, with a scale for each 256 columns, and codes as 16 bits, too, whose pairs one instruction multiplies and adds up.
//
// Lanes are rows: of sixteen rows the pairs of one place lie together, and a weight's pair goes to all of them. So no
// weight is transposed. A row's result does not depend on other rows.
#include "block_products.h"
#include "core_products.h"
#include "interleave.h"

using namespace amoeba;

namespace {

#ifdef AMOEBA_AVX512_VNNI
constexpr int64_t CHUNK = 256;            // columns with one scale of a row; a multiple of all blocks
constexpr int64_t CHUNK_PAIRS = CHUNK / 2;
constexpr int64_t LINE_ROWS = 16;         // rows in a vector
constexpr int64_t MOST_ROWS = 64;         // of an expert, at once: a chunk of them stays in the L1 cache, all in the L2
constexpr int WEIGHTS = 12;               // rows of a weight that are unpacked together
constexpr int64_t WEIGHT_BLOCK = 4 * WEIGHTS;
constexpr float MOST = 32512;

thread_local Buffer<int32_t> row_pairs;
thread_local Buffer<float> row_scales, row_sums, block_sums;

// Sixteen rows of an expert: [chunk][pair][row], and for each chunk scales, and sums of its groups, as [group][row].
struct Line {
  const int32_t* pairs;
  const float *scales, *sums;
};

// WEIGHTS rows of a weight, 256 columns of each: scale . q, or scale . q + offset, for each group of columns.
struct Unpacked {
  alignas(64) int16_t q[WEIGHTS][CHUNK];
  alignas(64) float scale[WEIGHTS][16], offset[WEIGHTS][16];
};

// x = scale . whole; of numbers that are not finite the scale is NaN.
float to_whole(const float* x, int64_t n, int16_t* whole) {
  __m512i most = _mm512_setzero_si512();
  alignas(64) float padded[CHUNK] = {};
  std::memcpy(padded, x, size_t(n) * sizeof(float));
  for (int64_t i = 0; i < CHUNK; i += 16)
    most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_load_si512(padded + i), _mm512_set1_epi32(0x7fffffff)));
  const uint32_t largest = _mm512_reduce_max_epu32(most);
  const bool finite = largest < 0x7f800000u;
  const float scale = finite ? float_of(largest) / MOST : 0, inverse = scale > 1e-30f ? 1 / scale : 0;
  for (int64_t i = 0; i < CHUNK; i += 16) {
    const __m512 scaled = _mm512_mul_ps(_mm512_load_ps(padded + i), _mm512_set1_ps(inverse));
    const __m512i rounded = finite ? _mm512_cvtps_epi32(scaled) : _mm512_setzero_si512();
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(whole + i), _mm512_cvtepi32_epi16(rounded));
  }
  return finite ? (inverse > 0 ? scale : 0) : float_of(0x7fc00000u);
}

template <int GROUP_COLUMNS>
void pack_line(const RowSource& rows, int64_t first, int64_t count, int64_t depth, int32_t* pairs, float* scales,
               float* sums) {
  constexpr int64_t GROUPS = CHUNK / GROUP_COLUMNS;
  alignas(64) int16_t lines[LINE_ROWS][CHUNK];
  for (int64_t k = 0; k < depth; k += CHUNK, pairs += CHUNK_PAIRS * LINE_ROWS, scales += LINE_ROWS,
               sums += GROUPS * LINE_ROWS) {
    for (int64_t r = 0; r < LINE_ROWS; ++r) {
      if (r < count)
        scales[r] = to_whole(rows[first + r] + k, std::min(CHUNK, depth - k), lines[r]);
      else
        scales[r] = 0, std::memset(lines[r], 0, sizeof(lines[r]));
      for (int64_t g = 0; g < GROUPS; ++g) {
        int32_t sum = 0;
        for (int64_t i = 0; i < GROUP_COLUMNS; ++i) sum += lines[r][g * GROUP_COLUMNS + i];
        sums[g * LINE_ROWS + r] = float(sum);
      }
    }
    for (int64_t i = 0; i < CHUNK_PAIRS / TILE; ++i)
      transpose_tile([&](int64_t r) { return lines[r] + 2 * i * TILE; },
                     reinterpret_cast<uint32_t*>(pairs + i * TILE * LINE_ROWS));
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
  static constexpr int GROUP_COLUMNS = Block::GROUP_COLUMNS;
  static constexpr bool OFFSET = Block::ZERO == 0;
  static constexpr int64_t UNIT = Block::COLUMNS == 64 ? 32 : 256, CHUNK_BYTES = CHUNK / UNIT * Block::BYTES;
  static int64_t row_bytes(int64_t depth) { return ceil_div(depth, UNIT) * Block::BYTES; }

  static void unpack(const Stored&, int64_t, int64_t, const uint8_t* p, int16_t* q, float* scale, float* offset) {
    const __mmask16 starts = GROUP_COLUMNS == 32 ? 0x0101 : 0x1111;  // of a lane's four columns a group begins with
    for (int64_t k = 0; k < CHUNK; k += Block::COLUMNS, p += Block::COLUMNS == 64 ? 2 * Block::BYTES : Block::BYTES) {
      const Block block(p);
#pragma GCC unroll 4
      for (int quarter = 0; quarter < Block::COLUMNS / 64; ++quarter, q += 64, scale += 64 / GROUP_COLUMNS) {
        const Codes64 codes = block.at(p, quarter);
        const __m512i zero = _mm512_set1_epi16(int16_t(Block::ZERO));
        const __m512i first = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(codes.q));
        const __m512i last = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(codes.q, 1));
        _mm512_store_si512(q, _mm512_sub_epi16(first, zero));
        _mm512_store_si512(q + 32, _mm512_sub_epi16(last, zero));
        _mm_storeu_ps(scale, _mm512_castps512_ps128(_mm512_maskz_compress_ps(starts, codes.scale)));
        if (!OFFSET) continue;
        _mm_storeu_ps(offset, _mm512_castps512_ps128(_mm512_maskz_compress_ps(starts, codes.offset)));
        offset += 64 / GROUP_COLUMNS;
      }
    }
  }
};

template <int GROUP_COLUMNS_>
struct OfE2m1 {  // as twice what they mean
  static constexpr int GROUP_COLUMNS = GROUP_COLUMNS_;
  static constexpr bool OFFSET = false;
  static constexpr int64_t CHUNK_BYTES = CHUNK / 2;
  static int64_t row_bytes(int64_t depth) { return round_up(depth, GROUP_COLUMNS) / 2; }

  static void unpack(const Stored& weight, int64_t row, int64_t first, const uint8_t* p, int16_t* q, float* scale,
                     float*) {
    const __m512i values = _mm512_broadcast_i64x4(
        _mm256_setr_epi16(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    for (int64_t k = 0; k < CHUNK; k += 32) {
      const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + k / 2)));
      const __m512i both = _mm512_or_si512(_mm512_and_si512(bytes, _mm512_set1_epi32(15)),
                                           _mm512_slli_epi32(_mm512_srli_epi32(bytes, 4), 16));
      _mm512_store_si512(q + k, _mm512_permutexvar_epi16(both, values));
    }
    const RowScales scales = weight.coding.of_row(weight.expert, row);
    for (int64_t k = 0; k < CHUNK; k += GROUP_COLUMNS)
      *scale++ = first + k < weight.depth ? 0.5f * scales.at(weight.coding.column.at(first + k)) : 0;
  }
};

// sums[j][line][row] (+)= <row j of the weight, row>, W rows of the weight from j on with L lines, in one chunk.
template <int GROUP_COLUMNS, bool OFFSET, int W, int L>
[[gnu::noinline]] void multiply_chunk(const Unpacked& weight, int64_t j, const Line* lines, int64_t chunk, float* sums,
                                      int64_t stride) {
  constexpr int64_t GROUPS = CHUNK / GROUP_COLUMNS, PAIRS = GROUP_COLUMNS / 2;
  __m512 all[W][L] = {};
  const int32_t* x = lines[0].pairs + chunk * CHUNK_PAIRS * LINE_ROWS;
  const int64_t next_line = L > 1 ? lines[L - 1].pairs - lines[0].pairs : 0;
  const int16_t* q = weight.q[j];
  for (int64_t g = 0; g < GROUPS; ++g) {
    __m512i whole[W][L] = {};
    for (int64_t k = 0; k < PAIRS; k += 4, q += 8, x += 4 * LINE_ROWS)
#pragma GCC unroll 4
      for (int some = 0; some < 4; ++some) {
        __m512i pairs[L];
#pragma GCC unroll 2
        for (int l = 0; l < L; ++l) pairs[l] = _mm512_loadu_si512(x + l * next_line + some * LINE_ROWS);
#pragma GCC unroll 12
        for (int i = 0; i < W; ++i) {
          int32_t pair;
          std::memcpy(&pair, q + i * CHUNK + 2 * some, sizeof(pair));
#pragma GCC unroll 2
          for (int l = 0; l < L; ++l)
            whole[i][l] = _mm512_dpwssd_epi32(whole[i][l], pairs[l], _mm512_set1_epi32(pair));
        }
      }
#pragma GCC unroll 12
    for (int i = 0; i < W; ++i)
#pragma GCC unroll 2
      for (int l = 0; l < L; ++l) {
        all[i][l] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[i][l]), _mm512_set1_ps(weight.scale[j + i][g]), all[i][l]);
        if (OFFSET)
          all[i][l] = _mm512_fmadd_ps(_mm512_loadu_ps(lines[l].sums + (chunk * GROUPS + g) * LINE_ROWS),
                                      _mm512_set1_ps(weight.offset[j + i][g]), all[i][l]);
      }
  }
#pragma GCC unroll 12
  for (int i = 0; i < W; ++i)
#pragma GCC unroll 2
    for (int l = 0; l < L; ++l) {
      float* out = sums + (j + i) * stride + l * LINE_ROWS;
      const __m512 before = chunk ? _mm512_loadu_ps(out) : _mm512_setzero_ps();
      const __m512 scale = _mm512_loadu_ps(lines[l].scales + chunk * LINE_ROWS);
      _mm512_storeu_ps(out, _mm512_fmadd_ps(all[i][l], scale, before));
    }
}

struct WholeProduct {  // one expert's part of: out = rows . matrixᵀ (+ bias)
  RowSource rows;
  Stored weight;
  const float* bias;
  float* out;
  int64_t out_stride;
};

// Rows [first_row, first_row + count) of one expert, up to MOST_ROWS, with `columns` rows of its weight.
template <class Codes>
void multiply_rows(const WholeProduct& p, int64_t first_row, int64_t count, int64_t first_column, int64_t columns) {
  constexpr int GROUP_COLUMNS = Codes::GROUP_COLUMNS;
  constexpr bool OFFSET = Codes::OFFSET;
  constexpr int64_t GROUPS = CHUNK / GROUP_COLUMNS, CHUNK_BYTES = Codes::CHUNK_BYTES;
  const int64_t depth = p.weight.depth, stride = p.weight.stride_row, row_bytes = Codes::row_bytes(depth);
  const int64_t chunks = ceil_div(depth, CHUNK), many = ceil_div(count, LINE_ROWS), padded = many * LINE_ROWS;
  int32_t* pairs = row_pairs.get(size_t(padded * chunks * CHUNK_PAIRS));
  float *scales = row_scales.get(size_t(padded * chunks)), *group_sums = row_sums.get(size_t(padded * chunks * GROUPS));
  Line lines[MOST_ROWS / LINE_ROWS];
  for (int64_t l = 0; l < many; ++l) {
    const int64_t at = l * LINE_ROWS * chunks;
    pack_line<GROUP_COLUMNS>(p.rows, first_row + l * LINE_ROWS, std::min(LINE_ROWS, count - l * LINE_ROWS), depth,
                             pairs + at * CHUNK_PAIRS, scales + at, group_sums + at * GROUPS);
    lines[l] = {pairs + at * CHUNK_PAIRS, scales + at, group_sums + at * GROUPS};
  }
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
        int64_t l = 0;
        for (; l + 2 <= many; l += 2)
          for (int half = 0; half < WEIGHTS; half += WEIGHTS / 2)
            multiply_chunk<GROUP_COLUMNS, OFFSET, WEIGHTS / 2, 2>(unpacked, half, lines + l, chunk,
                                                                  into + l * LINE_ROWS, padded);
        if (l < many)
          multiply_chunk<GROUP_COLUMNS, OFFSET, WEIGHTS, 1>(unpacked, 0, lines + l, chunk, into + l * LINE_ROWS,
                                                            padded);
      }
    const int64_t column = first_column + n;
    store_transposed(sums, padded, width, count, p.bias ? p.bias + column : nullptr,
                     p.out + first_row * p.out_stride + column, p.out_stride);
  }
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
void amoeba_rows_whole(int64_t experts, const int32_t* offs, const float* rows, int64_t row_stride, const int64_t* index,
                       const uint8_t* codes, int64_t stride_e, int64_t stride_row, const Coding* coding,
                       const float* bias, int64_t depth, int64_t columns, float* out, int64_t out_stride, int threads) {
  const ColumnCuts cuts(columns, experts, threads, WEIGHT_BLOCK);
  with_codes(*coding, [&](auto kind) {
    run_jobs(experts * cuts.per_expert, threads, [&](int64_t job) {
      const int64_t e = job / cuts.per_expert, first = job % cuts.per_expert * cuts.width;
      const WholeProduct p{{rows, row_stride, index}, {codes + e * stride_e, stride_row, depth, e, *coding},
                           bias ? bias + e * columns : nullptr, out, out_stride};
      for (int64_t r = start_of(offs, e); r < offs[e]; r += MOST_ROWS)
        multiply_rows<decltype(kind)>(p, r, std::min<int64_t>(MOST_ROWS, offs[e] - r), first,
                                      std::min(cuts.width, columns - first));
    });
  });
}
#else
void amoeba_rows_whole() {}
#endif

}  // extern "C"
#pragma GCC visibility pop
