// Products of sorted rows with frozen weights that were packed once, in bf16 or int8, all experts in one job list.
//
// One layout serves every instruction set. A word is 32 bits of the summed dimension: two bf16 or four int8. A tile is
// 16 words x 16 columns (1 KiB: one AMX register, or sixteen AVX-512 registers), a panel is 32 columns:
//   weights  [expert][panel][tile of depth][half of the panel][word][column]
//   rows     [16 rows][tile of depth][row][word]          (packed per job, gathered on the way, zeros past the depth)
// int8 rows are stored as q + 128 without sign, for VPDPBUSD and TDPBUSD; 128 . (sum of weights) is taken off again.
// Paths: AMX tiles; AVX-512 dot products; plain vector extensions (AVX2, NEON, ...). The caller checked its tensors.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__AVX512F__) || defined(__AMX_TILE__)
#include <immintrin.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define AMOEBA_AVX512 1
#endif
#if defined(AMOEBA_AVX512) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define AMOEBA_AMX 1
#endif

namespace {

enum Path { GENERIC, AVX512, AMX };  // the order of `Path` in packed.py

constexpr int64_t TILE = 16;                 // rows, words or columns of a tile
constexpr int64_t TILE_WORDS = TILE * TILE;
constexpr int64_t PANEL = 2 * TILE;          // columns that are summed at once
constexpr int64_t ROW_BYTES = 1 << 20;       // packed rows of a job: half of a 2 MiB L2 cache, beside two panels
constexpr int64_t ROW_BLOCK = 512;           // and never more rows than this
constexpr size_t HUGE_PAGE = 2 << 20;
constexpr int64_t JOBS_PER_THREAD = 4;
constexpr int64_t SMALLEST_JOB = 4;          // panels
constexpr int64_t STREAM_BYTES = 8 << 20;    // an output larger than this has left the L2 cache before it is read again

// Up to FEW_ROWS rows an expert's weights come faster through dot products than through tiles. One core, 2048 x 1536,
// GB/s of weights by dots / by tiles: bf16 29/26 at 1 row, 21/25 at 4, 11/25 at 8; int8 30/25 at 1, 27/24 at 8, 17/23
// at 16 (Xeon, family 6 model 207, 2026-11-15).
struct Bf16 {
  using Element = uint16_t;
  using Sum = float;
  static constexpr int64_t PER_WORD = 2, FEW_ROWS = 2;
};
struct Int8 {
  using Element = int8_t;
  using Sum = int32_t;
  static constexpr int64_t PER_WORD = 4, FEW_ROWS = 8;
};

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline float widen(uint16_t half) { return float_of(uint32_t(half) << 16); }
inline float widen(float value) { return value; }
inline uint16_t round_to_bf16(float value) {  // to nearest even; a NaN stays one
  const uint32_t bits = bits_of(value), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (bits & 0x7fffffff) > 0x7f800000 ? uint16_t(0x7fc0) : uint16_t(rounded);
}
inline void put(float& out, float value) { out = value; }
inline void put(uint16_t& out, float value) { out = round_to_bf16(value); }

void ask_for_huge_pages(void* data, int64_t bytes) {  // fewer misses of the TLB; a wish, so no error
#ifdef __linux__
  const uintptr_t begin = (uintptr_t(data) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  const uintptr_t end = (uintptr_t(data) + bytes) / HUGE_PAGE * HUGE_PAGE;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

template <class T>
struct Buffer {  // grows, never shrinks, one per thread
  T* data = nullptr;
  size_t size = 0;
  T* get(size_t count) {
    if (count > size) {
      std::free(data);
      const size_t page = count * sizeof(T) < HUGE_PAGE / 4 ? 4096 : HUGE_PAGE;
      const size_t bytes = (count * sizeof(T) + page - 1) / page * page;
      size = bytes / sizeof(T);
      data = static_cast<T*>(std::aligned_alloc(page, bytes));
      if (!data) std::abort();
      ask_for_huge_pages(data, int64_t(bytes));
    }
    return data;
  }
  ~Buffer() { std::free(data); }
};
thread_local Buffer<uint32_t> row_words;
thread_local Buffer<float> row_floats, row_scales;

inline int64_t tiles_of(int64_t depth, int64_t per_word) { return (depth + TILE * per_word - 1) / (TILE * per_word); }

template <class Job>
void run_jobs(int64_t count, [[maybe_unused]] int threads, const Job& job) {
  std::atomic<int64_t> next{0};
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1 && count > 1)
#endif
  for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) job(i);
}

// ---------------------------------------------------------------------------------------------------------- weights

// Position of (column, k) within a packed expert, in elements.
template <class Kind>
inline int64_t position(int64_t column, int64_t k, int64_t tiles) {
  constexpr int64_t P = Kind::PER_WORD;
  const int64_t word = k / P, tile = (column / PANEL * tiles + word / TILE) * 2 + column % PANEL / TILE;
  return (tile * TILE_WORDS + word % TILE * TILE + column % TILE) * P + k % P;
}

// value(column, k) -> one packed expert, zeros in the padding.
template <class Kind, class Value>
void pack_expert(int64_t columns, int64_t depth, typename Kind::Element* packed, const Value& value) {
  const int64_t tiles = tiles_of(depth, Kind::PER_WORD), block = TILE * Kind::PER_WORD;
  for (int64_t n0 = 0; n0 < columns; n0 += PANEL)
    for (int64_t k0 = 0; k0 < depth; k0 += block)
      for (int64_t n = n0; n < n0 + PANEL; ++n)
        for (int64_t k = k0; k < k0 + block; ++k)
          packed[position<Kind>(n, k, tiles)] = n < columns && k < depth ? value(n, k) : 0;
}

template <class Source>
void pack_bf16(int64_t columns, int64_t depth, const Source* weight, int64_t row, int64_t step, uint16_t* packed) {
  pack_expert<Bf16>(columns, depth, packed, [&](int64_t n, int64_t k) {
    uint16_t value;
    put(value, widen(weight[n * row + k * step]));
    return value;
  });
}

// Symmetric, one scale per column (an output channel of the weight).
template <class Source>
void pack_int8(int64_t columns, int64_t depth, const Source* weight, int64_t row, int64_t step, int8_t* packed,
               float* scale, int32_t* sum) {
  for (int64_t n = 0; n < columns; ++n) {
    float largest = 0;
    for (int64_t k = 0; k < depth; ++k) largest = std::max(largest, std::abs(widen(weight[n * row + k * step])));
    scale[n] = largest > 1e-30f ? largest / 127 : 0;
    sum[n] = 0;
  }
  pack_expert<Int8>(columns, depth, packed, [&](int64_t n, int64_t k) {
    const float inverse = scale[n] > 0 ? 1 / scale[n] : 0;
    const auto q = int8_t(int(widen(weight[n * row + k * step]) * inverse + 128.5f) - 128);
    sum[n] += q;
    return q;
  });
}

// ------------------------------------------------------------------------------------------------------------- rows

struct Pass {
  const uint32_t* weights;
  const float* weight_scale;  // int8: of each column
  const int32_t* weight_sum;  // int8: of each column
  const float* depth_scale;   // int8, transposed: of each summed element, taken into the rows; else null
  int64_t depth, columns, tiles, panels;
  const uint16_t* rows;
  int64_t row_stride;
  const int64_t* index;
  void* out;
  int64_t out_stride;
  bool out_is_float;
  Path path;
  bool stream;  // write whole cache lines past the caches

  const uint16_t* row(int64_t r) const { return rows + (index ? index[r] : r) * row_stride; }
  const uint32_t* panel(int64_t expert, int64_t i) const {
    return weights + (expert * panels + i) * tiles * 2 * TILE_WORDS;
  }
};

struct Job {
  int64_t expert, first_row, rows, first_panel, panels;
};

// One row into its place among sixteen; `out` is its first word, its words of the next tile lie TILE_WORDS further.
void pack_row(const Pass& p, const uint16_t* row, uint32_t* out, float*, Bf16) {
  constexpr int64_t STEP = TILE * Bf16::PER_WORD;
  const int64_t whole = p.depth / STEP;
  for (int64_t t = 0; t < whole; ++t) std::memcpy(out + t * TILE_WORDS, row + t * STEP, TILE * sizeof(uint32_t));
  if (whole < p.tiles) {
    uint16_t last[STEP] = {};
    std::memcpy(last, row + whole * STEP, (p.depth - whole * STEP) * sizeof(uint16_t));
    std::memcpy(out + whole * TILE_WORDS, last, sizeof(last));
  }
}

void pack_row(const Pass& p, const uint16_t* row, uint32_t* out, float* scale, Int8) {
  constexpr int64_t STEP = TILE * Int8::PER_WORD;
  float* values = row_floats.get(p.tiles * STEP);
  uint32_t largest = 0;  // compared as integers: a NaN is the largest of all and is not lost
  if (p.depth_scale)
    for (int64_t k = 0; k < p.depth; ++k) values[k] = widen(row[k]) * p.depth_scale[k];
  else
    for (int64_t k = 0; k < p.depth; ++k) values[k] = widen(row[k]);
  for (int64_t k = 0; k < p.depth; ++k) largest = std::max(largest, bits_of(values[k]) & 0x7fffffff);
  std::fill(values + p.depth, values + p.tiles * STEP, 0.0f);
  const bool nothing = largest < bits_of(1e-30f);
  const float inverse = nothing ? 0 : 127 / float_of(largest);
  *scale = nothing ? 0 : float_of(largest) / 127;
  for (int64_t t = 0; t < p.tiles; ++t) {
    uint8_t q[STEP];
    for (int64_t k = 0; k < STEP; ++k) q[k] = uint8_t(int(values[t * STEP + k] * inverse + 128.5f));
    std::memcpy(out + t * TILE_WORDS, q, sizeof(q));
  }
}

template <class Kind>
uint32_t* pack_rows(const Pass& p, const Job& job, const float* depth_scale, float* scales) {
  const int64_t row_tile = p.tiles * TILE_WORDS, padded = (job.rows + TILE - 1) / TILE * TILE;
  uint32_t* packed = row_words.get(padded * p.tiles * TILE);
  Pass of_expert = p;
  of_expert.depth_scale = depth_scale;
  for (int64_t r = 0; r < padded; ++r) {
    uint32_t* out = packed + r / TILE * row_tile + r % TILE * TILE;
    if (r < job.rows)
      pack_row(of_expert, p.row(job.first_row + r), out, scales + r, Kind{});
    else
      for (int64_t t = 0; t < p.tiles; ++t) std::memset(out + t * TILE_WORDS, 0, TILE * sizeof(uint32_t));
  }
  return packed;
}

// ------------------------------------------------------------------------------------------- sums: plain vectors

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Floats __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

inline Floats add_word(Floats sum, uint32_t a, Words b) {
  const Floats low = (Floats)(b << 16), high = (Floats)(b & 0xffff0000u);
  return sum + low * float_of(a << 16) + high * float_of(a & 0xffff0000u);
}
inline Integers add_word(Integers sum, uint32_t a, Words b) {
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) sum += ((Integers)(b << (24 - 8 * q)) >> 24) * int32_t(a >> (8 * q) & 255);
  return sum;
}

template <class Sum>
struct VectorOf;
template <>
struct VectorOf<float> { using type = Floats; };
template <>
struct VectorOf<int32_t> { using type = Integers; };

struct Plain {
  static constexpr int ROWS = 4;  // with 16 columns in 4 NEON, 2 AVX or 1 AVX-512 registers: at most 16 sums
  template <int R, class Sum>
  static void sums(const uint32_t* a, const uint32_t* b, int64_t tiles, Sum* out) {
    using Vector = typename VectorOf<Sum>::type;
    constexpr int V = TILE / LANES;
    for (int half = 0; half < 2; ++half) {
      Vector sum[R][V] = {};
      for (int64_t t = 0; t < tiles; ++t)
        for (int64_t w = 0; w < TILE; ++w) {
          const uint32_t* words = b + (2 * t + half) * TILE_WORDS + w * TILE;
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) {
            const Words right = *reinterpret_cast<const Words*>(words + v * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sum[r][v] = add_word(sum[r][v], a[t * TILE_WORDS + r * TILE + w], right);
          }
        }
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v)
          *reinterpret_cast<Vector*>(out + r * PANEL + half * TILE + v * LANES) = sum[r][v];
    }
  }
};

// --------------------------------------------------------------------------------------- sums: AVX-512 dot products

#ifdef AMOEBA_AVX512
inline __m512 add_word(__m512 sum, uint32_t a, __m512i b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(int(a)), (__m512bh)b);
}
inline __m512i add_word(__m512i sum, uint32_t a, __m512i b) {
  return _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(int(a)), b);
}
inline void store(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
inline void store(int32_t* p, __m512i v) { _mm512_storeu_si512(p, v); }

struct Dots {
  static constexpr int ROWS = 8;              // 8 x 2 sums: each weight that is read serves 8 rows
  static constexpr int64_t AHEAD = 4 * 512;   // words: 8 KiB of weights are under way, past the page
  template <int R, class Sum>
  static void sums(const uint32_t* a, const uint32_t* b, int64_t tiles, Sum* out) {
    using Vector = decltype(add_word(std::declval<std::conditional_t<std::is_same_v<Sum, float>, __m512, __m512i>>(),
                                     0u, __m512i{}));
    Vector sum[R][2] = {};
    for (int64_t t = 0; t < tiles; ++t)
      for (int64_t w = 0; w < TILE; ++w) {
        const uint32_t* words = b + 2 * t * TILE_WORDS + w * TILE;
        _mm_prefetch(reinterpret_cast<const char*>(words + AHEAD), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(words + AHEAD + TILE_WORDS), _MM_HINT_T0);
        const __m512i left = _mm512_load_si512(words), right = _mm512_load_si512(words + TILE_WORDS);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const uint32_t word = a[t * TILE_WORDS + r * TILE + w];
          sum[r][0] = add_word(sum[r][0], word, left);
          sum[r][1] = add_word(sum[r][1], word, right);
        }
      }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      store(out + r * PANEL, sum[r][0]);
      store(out + r * PANEL + TILE, sum[r][1]);
    }
  }
};
#endif

// Rows in steps that do not cross a tile of rows.
template <class Way, int R, class Sum>
void sums_of_rows(int64_t rows, const uint32_t* a, const uint32_t* b, int64_t tiles, Sum* out) {
  if constexpr (R > 1)
    if (rows < R) return sums_of_rows<Way, R - 1>(rows, a, b, tiles, out);
  Way::template sums<R>(a, b, tiles, out);
}

template <class Way, class Sum>
void sums_by_rows(const uint32_t* a, int64_t rows, const uint32_t* b, int64_t tiles, Sum* sums) {
  for (int64_t r = 0; r < rows; r += Way::ROWS)
    sums_of_rows<Way, Way::ROWS>(std::min<int64_t>(Way::ROWS, rows - r),
                                 a + r / TILE * tiles * TILE_WORDS + r % TILE * TILE, b, tiles, sums + r * PANEL);
}

// -------------------------------------------------------------------------------------------------------------- out

inline float finished(float sum, float, const float*, const int32_t*, int64_t) { return sum; }
inline float finished(int32_t sum, float row_scale, const float* scale, const int32_t* weight_sum, int64_t n) {
  return float(sum - 128 * weight_sum[n]) * (scale ? row_scale * scale[n] : row_scale);
}

#ifdef AMOEBA_AVX512
// Whole lines are not read before they are written: 1.2 instead of 1.03 TFLOP/s (256 rows, 2048 x 1536, one core).
template <class Out>
inline void write_panel_row(Out* out, const Out* values, bool stream) {
  for (size_t i = 0; i < PANEL * sizeof(Out); i += 64) {
    const __m512i line = _mm512_load_si512(reinterpret_cast<const char*>(values) + i);
    char* target = reinterpret_cast<char*>(out) + i;
    stream ? _mm512_stream_si512(reinterpret_cast<__m512i*>(target), line) : _mm512_storeu_si512(target, line);
  }
}
inline void end_of_streaming() { _mm_sfence(); }
#else
template <class Out>
inline void write_panel_row(Out* out, const Out* values, bool) { std::memcpy(out, values, PANEL * sizeof(Out)); }
inline void end_of_streaming() {}
#endif

// Scales, rounds and writes the sums of up to 32 rows of a panel.
template <class Out, class Sum>
void finish(const Pass& p, const Job& job, int64_t panel, int64_t row, const float* scales, const Sum* sums) {
  const int64_t column = panel * PANEL, first = job.expert * p.columns + column;
  const int64_t rows = std::min(PANEL, job.rows - row), width = std::min(PANEL, p.columns - column);
  const float* column_scale = p.weight_scale ? p.weight_scale + first : nullptr;
  const int32_t* weight_sum = p.weight_sum ? p.weight_sum + first : nullptr;
  Out* out = static_cast<Out*>(p.out) + (job.first_row + row) * p.out_stride + column;
  for (int64_t r = 0; r < rows; ++r, sums += PANEL, out += p.out_stride) {
    const float scale = scales[row + r];
    alignas(64) Out values[PANEL];
    if (width == PANEL) {
      for (int64_t n = 0; n < PANEL; ++n) put(values[n], finished(sums[n], scale, column_scale, weight_sum, n));
      write_panel_row(out, values, p.stream);
    } else {
      for (int64_t n = 0; n < width; ++n) put(out[n], finished(sums[n], scale, column_scale, weight_sum, n));
    }
  }
}

template <class Sum>
void finish_block(const Pass& p, const Job& job, int64_t panel, int64_t row, const float* scales, const Sum* sums) {
  if (p.out_is_float)
    finish<float>(p, job, panel, row, scales, sums);
  else
    finish<uint16_t>(p, job, panel, row, scales, sums);
}

// ------------------------------------------------------------------------------------------------- a job, row by row

template <class Kind, class Way>
void run_by_rows(const Pass& p, const Job& job, const uint32_t* a, const float* scales) {
  const int64_t row_tile = p.tiles * TILE_WORDS;
  alignas(64) typename Kind::Sum sums[PANEL * PANEL];
  for (int64_t panel = job.first_panel; panel < job.first_panel + job.panels; ++panel) {
    const uint32_t* b = p.panel(job.expert, panel);
    for (int64_t r = 0; r < job.rows; r += PANEL) {
      sums_by_rows<Way>(a + r / TILE * row_tile, std::min(PANEL, job.rows - r), b, p.tiles, sums);
      finish_block(p, job, panel, r, scales, sums);
    }
  }
}

// ------------------------------------------------------------------------------------------------ a job in AMX tiles

#ifdef AMOEBA_AMX
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

struct Tiles {  // eight registers of tiles, all full, for as long as this lives
  Tiles() {
    static const TileShapes shapes;
    _tile_loadconfig(&shapes);
  }
  ~Tiles() { _tile_release(); }
};

#define AMOEBA_DOT(SUM, A, B)                                       \
  if constexpr (std::is_same_v<Kind, Bf16>) _tile_dpbf16ps(SUM, A, B); \
  else _tile_dpbusd(SUM, A, B)

// sums (16 or 32 rows x 32 columns): tiles 0-3, rows in 4 and 5, weights in 6 and 7. `lines` cache lines from `ahead`
// of every step of depth are fetched meanwhile.
template <class Kind, bool BOTH>
void sums_of_tiles(const uint32_t* a, int64_t next_rows, const uint32_t* b, int64_t tiles, const uint32_t* ahead,
                   int64_t lines, typename Kind::Sum* sums) {
  constexpr int64_t STRIDE = TILE * sizeof(uint32_t), SUM_STRIDE = PANEL * sizeof(uint32_t);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t t = 0; t < tiles; ++t, a += TILE_WORDS, b += 2 * TILE_WORDS, ahead += 2 * TILE_WORDS) {
    for (int64_t i = 0; i < lines; ++i) _mm_prefetch(reinterpret_cast<const char*>(ahead + i * TILE), _MM_HINT_T1);
    _tile_loadd(4, a, STRIDE);
    _tile_loadd(6, b, STRIDE);
    _tile_loadd(7, b + TILE_WORDS, STRIDE);
    AMOEBA_DOT(0, 4, 6);
    AMOEBA_DOT(1, 4, 7);
    if constexpr (BOTH) {
      _tile_loadd(5, a + next_rows, STRIDE);
      AMOEBA_DOT(2, 5, 6);
      AMOEBA_DOT(3, 5, 7);
    }
  }
  _tile_stored(0, sums, SUM_STRIDE);
  _tile_stored(1, sums + TILE, SUM_STRIDE);
  if constexpr (BOTH) {
    _tile_stored(2, sums + TILE * PANEL, SUM_STRIDE);
    _tile_stored(3, sums + TILE * PANEL + TILE, SUM_STRIDE);
  }
}

// While a block of rows is summed, its share of the next panel comes into the L2 cache: else the first block of every
// panel waits for memory (0.9 instead of 1.18 TFLOP/s at 128 rows).
template <class Kind>
void run_by_tiles(const Pass& p, const Job& job, const uint32_t* a, const float* scales) {
  const Tiles registers;
  alignas(64) typename Kind::Sum sums[PANEL * PANEL];
  const int64_t row_tile = p.tiles * TILE_WORDS, blocks = (job.rows + PANEL - 1) / PANEL, step_lines = 2 * TILE;
  const int64_t end = job.first_panel + job.panels;
  asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
  for (int64_t panel = job.first_panel; panel < end; ++panel) {
    const uint32_t* b = p.panel(job.expert, panel);
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t first = step_lines * i / blocks, share = step_lines * (i + 1) / blocks - first;
      const int64_t lines = panel + 1 < end ? share : 0;
      const uint32_t *left = a + 2 * i * row_tile, *ahead = b + 2 * row_tile + first * TILE;
      if (job.rows - i * PANEL > TILE)
        sums_of_tiles<Kind, true>(left, row_tile, b, p.tiles, ahead, lines, sums);
      else
        sums_of_tiles<Kind, false>(left, row_tile, b, p.tiles, ahead, lines, sums);
      finish_block(p, job, panel, i * PANEL, scales, sums);
    }
  }
}
#endif

template <class Kind>
void run_job(const Pass& p, const Job& job) {
  float* scales = row_scales.get(job.rows);
  const float* depth_scale = p.depth_scale ? p.depth_scale + job.expert * p.depth : nullptr;
  const uint32_t* a = pack_rows<Kind>(p, job, depth_scale, scales);
#ifdef AMOEBA_AMX
  if (p.path == AMX && job.rows > Kind::FEW_ROWS) return run_by_tiles<Kind>(p, job, a, scales);
#endif
#ifdef AMOEBA_AVX512
  if (p.path != GENERIC) return run_by_rows<Kind, Dots>(p, job, a, scales);
#endif
  run_by_rows<Kind, Plain>(p, job, a, scales);
}

// Blocks of rows whose packed form stays in the L2 cache, cut along the columns too where there are few of them.
std::vector<Job> list_jobs(const Pass& p, int64_t experts, const int32_t* offs, int threads) {
  const int64_t fitting = ROW_BYTES / (p.tiles * TILE * int64_t(sizeof(uint32_t))) / PANEL * PANEL;
  const int64_t most = std::clamp(fitting, PANEL, ROW_BLOCK);
  std::vector<Job> blocks, jobs;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t start = e ? offs[e - 1] : 0, count = offs[e] - start, parts = (count + most - 1) / most;
    if (count <= 0) continue;
    const int64_t size = ((count + parts - 1) / parts + PANEL - 1) / PANEL * PANEL;
    for (int64_t r = 0; r < count; r += size) blocks.push_back({e, start + r, std::min(size, count - r), 0, p.panels});
  }
  const int64_t wanted = threads > 1 ? JOBS_PER_THREAD * threads : 1;
  const int64_t cuts = blocks.empty() ? 1 : (wanted + int64_t(blocks.size()) - 1) / int64_t(blocks.size());
  const int64_t width = std::max(SMALLEST_JOB, (p.panels + cuts - 1) / cuts);
  for (const Job& block : blocks)
    for (int64_t panel = 0; panel < p.panels; panel += width)
      jobs.push_back({block.expert, block.first_row, block.rows, panel, std::min(width, p.panels - panel)});
  // The long jobs first, so that the threads end together.
  std::stable_sort(jobs.begin(), jobs.end(),
                   [](const Job& l, const Job& r) { return l.rows * l.panels > r.rows * r.panels; });
  return jobs;
}

template <class Kind>
void multiply(Pass p, int64_t experts, const int32_t* offs, int threads) {
  p.tiles = tiles_of(p.depth, Kind::PER_WORD);
  p.panels = (p.columns + PANEL - 1) / PANEL;
  const int64_t element = p.out_is_float ? sizeof(float) : sizeof(uint16_t);
  p.stream = uintptr_t(p.out) % 64 == 0 && p.out_stride * element % 64 == 0 &&
             offs[experts - 1] * p.columns * element >= STREAM_BYTES;
  const std::vector<Job> jobs = list_jobs(p, experts, offs, threads);
  run_jobs(int64_t(jobs.size()), threads, [&](int64_t i) {
    run_job<Kind>(p, jobs[i]);
    if (p.stream) end_of_streaming();
  });
}

}  // namespace

extern "C" {

// The best path that was compiled in.
int amoeba_packed_best_path() {
#if defined(AMOEBA_AMX)
  return AMX;
#elif defined(AMOEBA_AVX512)
  return AVX512;
#else
  return GENERIC;
#endif
}

// Linux gives a process the tile registers only when it asks: 0, or the errno of the refusal.
int amoeba_request_amx() {
#ifdef AMOEBA_AMX
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 ? 0 : errno;
#else
  return ENOSYS;
#endif
}

// Bytes of one packed expert.
int64_t amoeba_packed_bytes(int int8, int64_t columns, int64_t depth) {
  const int64_t panels = (columns + PANEL - 1) / PANEL;
  return panels * tiles_of(depth, int8 ? Int8::PER_WORD : Bf16::PER_WORD) * 2 * TILE_WORDS * int64_t(sizeof(uint32_t));
}

// weight[e][column][k] at any strides, fp32 or bf16. scale and sum (experts x columns) are written for int8 only.
void amoeba_pack(int int8, int is_float, int64_t experts, int64_t columns, int64_t depth, const void* weight,
                 int64_t stride_e, int64_t stride_column, int64_t stride_k, void* packed, float* scale, int32_t* sum,
                 int threads) {
  const int64_t bytes = amoeba_packed_bytes(int8, columns, depth);
  ask_for_huge_pages(packed, experts * bytes);
  run_jobs(experts, threads, [&](int64_t e) {
    const auto pack = [&](const auto* source) {
      source += e * stride_e;
      char* out = static_cast<char*>(packed) + e * bytes;
      if (int8)
        pack_int8(columns, depth, source, stride_column, stride_k, reinterpret_cast<int8_t*>(out), scale + e * columns,
                  sum + e * columns);
      else
        pack_bf16(columns, depth, source, stride_column, stride_k, reinterpret_cast<uint16_t*>(out));
    };
    if (is_float)
      pack(static_cast<const float*>(weight));
    else
      pack(static_cast<const uint16_t*>(weight));
  });
}

// The same values packed for the product along the other dimension; sum (experts x depth) is written for int8 only.
void amoeba_pack_transposed(int int8, int64_t experts, int64_t columns, int64_t depth, const void* packed,
                            void* transposed, int32_t* sum, int threads) {
  const int64_t from = amoeba_packed_bytes(int8, columns, depth), to = amoeba_packed_bytes(int8, depth, columns);
  ask_for_huge_pages(transposed, experts * to);
  run_jobs(experts, threads, [&](int64_t e) {
    const char* source = static_cast<const char*>(packed) + e * from;
    char* out = static_cast<char*>(transposed) + e * to;
    if (int8) {
      const auto* values = reinterpret_cast<const int8_t*>(source);
      const int64_t tiles = tiles_of(depth, Int8::PER_WORD);
      int32_t* sums = sum + e * depth;
      std::fill(sums, sums + depth, 0);
      pack_expert<Int8>(depth, columns, reinterpret_cast<int8_t*>(out), [&](int64_t n, int64_t k) {
        const int8_t q = values[position<Int8>(k, n, tiles)];
        sums[n] += q;
        return q;
      });
    } else {
      const auto* values = reinterpret_cast<const uint16_t*>(source);
      const int64_t tiles = tiles_of(depth, Bf16::PER_WORD);
      pack_expert<Bf16>(depth, columns, reinterpret_cast<uint16_t*>(out),
                        [&](int64_t n, int64_t k) { return values[position<Bf16>(k, n, tiles)]; });
    }
  });
}

// out[rows of e] = rows_of(e) . packed_e; rows past offs[experts-1] are neither read nor written.
void amoeba_packed_rows(int path, int int8, int64_t experts, const int32_t* offs, const uint16_t* rows,
                        int64_t row_stride, const int64_t* index, const void* packed, const float* weight_scale,
                        const int32_t* weight_sum, const float* depth_scale, int64_t depth, int64_t columns, void* out,
                        int64_t out_stride, int out_is_float, int threads) {
  const Pass pass{static_cast<const uint32_t*>(packed), weight_scale, weight_sum, depth_scale, depth, columns, 0, 0,
                  rows, row_stride, index, out, out_stride, out_is_float != 0, Path(path), false};
  if (int8)
    multiply<Int8>(pass, experts, offs, threads);
  else
    multiply<Bf16>(pass, experts, offs, threads);
}

}  // extern "C"
