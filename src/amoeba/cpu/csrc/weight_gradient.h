// Gradients of the weights: leftᵀ . right, summed over the rows of each expert in fp32 and rounded once to bf16.
//
// The rows are the depth: left is transposed into packed rows, one per column of left, right becomes panels of pairs of
// rows, and the sums are those of every other product. Jobs are blocks of left's columns of one expert; no two of them
// write to the same memory.
#pragma once
#include "interleave.h"
#include "sums.h"

namespace [[gnu::visibility("hidden")]] amoeba {

struct WeightGradient {
  WideRows left, right;
  uint16_t* out = nullptr;  // (E, columns of left, columns of right), contiguous along the last; null: not asked for
  int64_t stride_e = 0, stride_row = 0;
  bool stream = false;      // past the caches, where all lines are whole
};

struct ColumnSums {  // of each expert's rows
  WideRows rows;
  float* out = nullptr;  // (E, columns); null: not asked for
};

constexpr int64_t RIGHT_PANELS = 8;          // panels of right that are packed together: 512 bytes of every row
constexpr int64_t LEFT_PANELS = 8;           // of a job at most
constexpr int64_t LEFT_BYTES = 1 << 20;      // of the packed left side of a job
constexpr int64_t GRADIENT_JOBS_PER_THREAD = 8;
inline thread_local Buffer<uint32_t> left_pairs, left_words, right_words;
inline thread_local Buffer<float> gradient_sums;

// [panel][16 columns][tile of rows][column][pair of rows]
inline void pack_left(const WideRows& left, const SortedRows& s, int64_t start, int64_t rows, const GradientJob& job,
                      uint32_t* out) {
  const int64_t tiles = ceil_div(rows, PANEL);
  uint32_t* pairs = left_pairs.get(tiles * 2 * TILE_WORDS);
  for (int64_t i = 0; i < job.panels; ++i) {
    pack_pairs(left, s, start, rows, job.first_panel + i, 1, pairs);
    for (int64_t half = 0; half < 2; ++half)
      for (int64_t t = 0; t < tiles; ++t, out += TILE_WORDS) {
        const uint32_t* tile = pairs + (2 * t + half) * TILE_WORDS;
        transpose_tile([&](int64_t w) { return tile + w * TILE; }, out);
      }
  }
}

template <class Way>
void run_weight_gradient(const WeightGradient& g, const SortedRows& s, const GradientJob& job) {
  const int64_t start = s.first[job.expert], rows = s.first[job.expert + 1] - start;
  const int64_t first = job.first_panel * PANEL, end = std::min(g.left.columns, first + job.panels * PANEL);
  uint16_t* out = g.out + job.expert * g.stride_e;
  if (!rows) {
    for (int64_t r = first; r < end; ++r) std::memset(out + r * g.stride_row, 0, g.right.columns * sizeof(uint16_t));
    return;
  }
  const typename Way::Registers registers;
  (void)registers;
  const int64_t chunk_tiles = DEPTH_ROWS / PANEL, right_panels = panels_of(g.right.columns);
  const bool one_chunk = rows <= DEPTH_ROWS;
  uint32_t* left = left_words.get(ceil_div(rows, PANEL) * job.panels * 2 * TILE_WORDS);
  uint32_t* right = right_words.get(RIGHT_PANELS * std::min(ceil_div(rows, PANEL), chunk_tiles) * 2 * TILE_WORDS);
  float* sums = gradient_sums.get((one_chunk ? 1 : job.panels * RIGHT_PANELS) * PANEL * PANEL);
  const auto left_chunk = [&](int64_t n) { return left + n / PANEL * job.panels * 2 * TILE_WORDS; };
  for (int64_t n = 0; n < rows; n += DEPTH_ROWS)
    pack_left(g.left, s, start + n, std::min(DEPTH_ROWS, rows - n), job, left_chunk(n));
  for (int64_t panel = 0; panel < right_panels; panel += RIGHT_PANELS) {
    const int64_t group = std::min(RIGHT_PANELS, right_panels - panel);
    for (int64_t n = 0; n < rows; n += DEPTH_ROWS) {
      const int64_t count = std::min(DEPTH_ROWS, rows - n), tiles = ceil_div(count, PANEL);
      pack_pairs(g.right, s, start + n, count, panel, group, right);
      for (int64_t i = 0; i < job.panels; ++i)
        for (int64_t j = 0; j < group; ++j) {
          const int64_t row = first + i * PANEL, column = (panel + j) * PANEL, height = std::min(PANEL, end - row);
          float* sum = sums + (one_chunk ? 0 : (i * RIGHT_PANELS + j) * PANEL * PANEL);
          const Stretch whole{left_chunk(n) + i * tiles * 2 * TILE_WORDS, tiles * TILE_WORDS,
                              right + j * tiles * 2 * TILE_WORDS, tiles};
          Way::template multiply<Bf16>(Depth{whole, {}, nullptr, 0, n > 0}, height, sum);
          if (n + count < rows) continue;
          for (int64_t r = 0; r < height; ++r)
            store_panel(out + (row + r) * g.stride_row + column, load(sum + r * PANEL), load(sum + r * PANEL + TILE),
                        std::min(PANEL, g.right.columns - column), g.stream);
        }
    }
  }
  end_of_streaming();
}

inline void run_column_sums(const ColumnSums& sums, const SortedRows& s, int64_t expert) {
  const WideRows& rows = sums.rows;
  float* out = sums.out + expert * rows.columns;
  std::fill(out, out + rows.columns, 0.0f);
  for (int64_t n = s.first[expert]; n < s.first[expert + 1]; ++n) {
    const uint16_t* row = rows.data + (rows.by_token ? s.token[n] : n) * rows.stride;
    const float scale = rows.row_scale ? rows.row_scale[s.order[n]] : 1;
    for (int64_t c = 0; c < rows.columns; c += TILE) {
      const int64_t count = rows.columns - c;
      store_some(out + c, load_some(out + c, count) + scale * load_some(row + c, count), count);
    }
  }
}

inline std::vector<GradientJob> list_gradient_jobs(const std::vector<WeightGradient>& products, int64_t experts,
                                                   const int32_t* first, int threads) {
  std::vector<std::pair<int64_t, GradientJob>> jobs;  // with what they cost
  const auto cost = [&](const WeightGradient& g, int64_t e) {  // of a panel of left; an idle expert's is written too
    return std::max<int64_t>(first[e + 1] - first[e], PANEL) * panels_of(g.right.columns);
  };
  int64_t whole = 0;
  for (const WeightGradient& g : products)
    for (int64_t e = 0; g.out && e < experts; ++e) whole += cost(g, e) * panels_of(g.left.columns);
  const int64_t fair = std::max<int64_t>(1, whole / (threads * GRADIENT_JOBS_PER_THREAD));
  for (size_t i = 0; i < products.size(); ++i)
    for (int64_t e = 0; products[i].out && e < experts; ++e) {
      const int64_t panels = panels_of(products[i].left.columns), each = cost(products[i], e);
      const int64_t tile_bytes = ceil_div(first[e + 1] - first[e], PANEL) * 2 * TILE_WORDS * int64_t(sizeof(uint32_t));
      const int64_t fitting = LEFT_BYTES / std::max<int64_t>(1, tile_bytes);
      const int64_t width = std::clamp<int64_t>(std::min(fitting, fair / each), 1, LEFT_PANELS);
      for (int64_t panel = 0; panel < panels; panel += width) {
        const int64_t count = std::min(width, panels - panel);
        jobs.push_back({each * count, {int64_t(i), e, panel, count}});
      }
    }
  // The long jobs first, so that the threads end together.
  std::stable_sort(jobs.begin(), jobs.end(), [](const auto& l, const auto& r) { return l.first > r.first; });
  std::vector<GradientJob> found;
  found.reserve(jobs.size());
  for (const auto& job : jobs) found.push_back(job.second);
  return found;
}

}  // namespace amoeba
