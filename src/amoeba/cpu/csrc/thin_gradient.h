// Gradients of low-rank factors: thinᵀ . wide, summed over the rows of each expert in fp32.
//
// thin (N, up to some tens of ranks) and wide (N, columns) are bf16. The rows are the depth here: thin is transposed
// into packed rows, one per rank, wide becomes panels of pairs of rows, and the sums are those of every other product.
#pragma once
#include "interleave.h"
#include "sums.h"

namespace [[gnu::visibility("hidden")]] amoeba {

struct ThinProduct {
  const uint16_t* thin = nullptr;
  int64_t thin_stride = 0, ranks = 0;
  const float* row_scale = nullptr;  // of each slot, taken into thin; or null
  WideRows wide;

  // The ranks are those of two factors, one after the other (or of one: second_ranks = 0); null: not asked for.
  float *first = nullptr, *second = nullptr;
  int64_t first_ranks = 0, second_ranks = 0;
  // (E, ranks, columns), or with by_column (E, columns, ranks); then, with halves, the even columns (interleaved) or
  // the first half of them belong to the first factor and the others to the second.
  bool by_column = false, halves = false, interleaved = false;

  bool wanted() const { return first || second; }
  void reads(const uint16_t* rows, int64_t stride, int64_t width, bool of_token) {
    wide = {rows, stride, width, of_token};
  }
  void gives(float* out, int64_t out_ranks, float* other = nullptr, int64_t other_ranks = 0) {
    first = out, first_ranks = out_ranks, second = other, second_ranks = other_ranks;
  }
};

constexpr int64_t WIDE_PANELS = 4;  // packed together: 256 bytes of every row
constexpr int64_t WIDE_BYTES = WIDE_PANELS * DEPTH_ROWS / PANEL * 2 * TILE_WORDS * int64_t(sizeof(uint32_t));
inline thread_local Buffer<uint32_t> thin_words, wide_words;
inline thread_local Buffer<float> thin_sums;

inline uint32_t pair_of(float low, float high) {
  return uint32_t(round_to_bf16(low)) | uint32_t(round_to_bf16(high)) << 16;
}

// [16 ranks][tile of rows][rank][pair of rows]
inline void pack_thin(const ThinProduct& p, const SortedRows& s, int64_t start, int64_t rows, uint32_t* out) {
  const int64_t tiles = ceil_div(rows, PANEL), padded = round_up(p.ranks, TILE);
  const auto value = [&](int64_t n, int64_t r) {
    if (n >= rows || r >= p.ranks) return 0.0f;
    const float thin = widen(p.thin[(start + n) * p.thin_stride + r]);
    return p.row_scale ? thin * p.row_scale[s.order[start + n]] : thin;
  };
  for (int64_t r = 0; r < padded; ++r)
    for (int64_t t = 0; t < tiles; ++t)
      for (int64_t w = 0; w < TILE; ++w)
        out[((r / TILE * tiles + t) * TILE + r % TILE) * TILE + w] =
            pair_of(value(t * PANEL + 2 * w, r), value(t * PANEL + 2 * w + 1, r));
}

// sums: (32 ranks from `rank` on, 32 columns of the panel)
inline void store_gradient(const ThinProduct& p, int64_t expert, int64_t panel, int64_t rank, const float* sums) {
  const int64_t column = panel * PANEL, width = std::min(PANEL, p.wide.columns - column);
  const int64_t count = std::min(PANEL, p.ranks - rank);
  if (!p.by_column) {
    for (int64_t r = 0; r < count; ++r, sums += PANEL) {
      const bool is_second = rank + r >= p.first_ranks;
      float* out = is_second ? p.second : p.first;
      if (!out) continue;
      const int64_t row = is_second ? expert * p.second_ranks - p.first_ranks : expert * p.first_ranks;
      std::memcpy(out + (row + rank + r) * p.wide.columns + column, sums, width * sizeof(float));
    }
    return;
  }
  const int64_t half = p.halves ? p.wide.columns / 2 : p.wide.columns;
  for (int64_t c = column; c < column + width; ++c) {
    const bool is_second = p.halves && (p.interleaved ? c % 2 : c >= half);
    const int64_t i = !p.halves ? c : p.interleaved ? c / 2 : c % half;
    float* out = is_second ? p.second : p.first;
    if (!out) continue;
    const int64_t ranks = is_second ? p.second_ranks : p.first_ranks, skip = is_second ? p.first_ranks : 0;
    const int64_t from = std::max<int64_t>(0, rank - skip), to = std::min(ranks, rank + count - skip);
    out += (expert * half + i) * ranks;
    for (int64_t r = from; r < to; ++r) out[r] = sums[(r + skip - rank) * PANEL + c - column];
  }
}

template <class Way>
void run_thin(const ThinProduct& p, const SortedRows& s, const GradientJob& job) {
  const typename Way::Registers registers;
  (void)registers;
  const int64_t start = s.first[job.expert], rows = s.first[job.expert + 1] - start;
  const int64_t padded = round_up(p.ranks, PANEL), group = WIDE_PANELS;
  uint32_t* thin = thin_words.get((ceil_div(rows, PANEL) + 1) * TILE * padded);
  uint32_t* wide = wide_words.get(group * std::min(ceil_div(rows, PANEL) + 1, DEPTH_ROWS / PANEL) * 2 * TILE_WORDS);
  float* sums = thin_sums.get(group * padded * PANEL);
  const auto chunk_of = [&](int64_t n) { return thin + n / 2 * padded; };
  for (int64_t n = 0; n < rows; n += DEPTH_ROWS)
    pack_thin(p, s, start + n, std::min(DEPTH_ROWS, rows - n), chunk_of(n));
  for (int64_t g = 0; g < job.panels; g += group) {
    const int64_t panel = job.first_panel + g, panels = std::min(group, job.panels - g);
    std::fill(sums, sums + group * padded * PANEL, 0.0f);
    for (int64_t n = 0; n < rows; n += DEPTH_ROWS) {
      const int64_t count = std::min(DEPTH_ROWS, rows - n), tiles = ceil_div(count, PANEL);
      pack_pairs(p.wide, s, start + n, count, panel, panels, wide);
      for (int64_t rank = 0; rank < p.ranks; rank += PANEL)
        for (int64_t i = 0; i < panels; ++i) {
          const int64_t ranks = std::min(PANEL, p.ranks - rank);
          const Stretch whole{chunk_of(n) + rank * tiles * TILE, tiles * TILE_WORDS, wide + i * tiles * 2 * TILE_WORDS,
                              tiles};
          float* sum = sums + (rank / PANEL * group + i) * PANEL * PANEL;
          Way::template multiply<Bf16>(Depth{whole, {}, nullptr, 0, true}, ranks, sum);
        }
    }
    for (int64_t rank = 0; rank < p.ranks; rank += PANEL)
      for (int64_t i = 0; i < panels; ++i)
        store_gradient(p, job.expert, panel + i, rank, sums + (rank / PANEL * group + i) * PANEL * PANEL);
  }
}

// Experts with many rows are cut along the columns.
inline std::vector<GradientJob> list_thin_jobs(const std::vector<ThinProduct>& products, int64_t experts,
                                           const int32_t* first, int threads) {
  const auto count = int64_t(products.size());
  std::vector<GradientJob> jobs;
  int64_t whole = 0;
  for (int64_t i = 0; i < count; ++i)
    if (products[i].wanted()) whole += panels_of(products[i].wide.columns) * first[experts];
  const int64_t fair = std::max<int64_t>(1, whole / (threads * 8));
  for (int64_t i = 0; i < count; ++i) {
    if (!products[i].wanted()) continue;
    const int64_t panels = panels_of(products[i].wide.columns);
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t cuts = std::clamp<int64_t>(ceil_div(panels * (first[e + 1] - first[e]), fair), 1, panels);
      const int64_t width = round_up(ceil_div(panels, cuts), WIDE_PANELS);
      for (int64_t panel = 0; panel < panels; panel += width)
        jobs.push_back({i, e, panel, std::min(width, panels - panel)});
    }
  }
  return jobs;
}

}  // namespace amoeba
