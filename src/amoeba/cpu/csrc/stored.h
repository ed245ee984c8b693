// Weights as the caller stores them, packed panel by panel by the job that reads them: nothing of it is kept.
#pragma once
#include "interleave.h"

namespace {

struct Stored {  // (expert, column, k) in bf16; data is null where the weights are packed
  const uint16_t* data = nullptr;
  int64_t stride_e = 0, stride_column = 0, stride_k = 0;
};

// The tiles of depth from `first` on of a panel: [tile][half][word][column], zeros past the columns and the depth.
class StoredPanel {
 public:
  StoredPanel(const Stored& stored, int64_t expert, int64_t panel, int64_t columns, int64_t depth)
      : from_(stored.data + expert * stored.stride_e + panel * PANEL * stored.stride_column),
        column_(stored.stride_column), k_(stored.stride_k), width_(std::min(PANEL, columns - panel * PANEL)),
        depth_(depth) {}

  void pack(int64_t first, int64_t tiles, uint32_t* out) const {
    for (int64_t t = first; t < first + tiles; ++t, out += 2 * TILE_WORDS) {
      const int64_t k = t * PANEL, count = std::min(PANEL, depth_ - k);
      if (k_ == 1)
        by_columns(k, count, out);
      else
        by_depth(k, count, out);
    }
  }

 private:
  // A column's words lie together.
  void by_columns(int64_t k, int64_t count, uint32_t* out) const {
    for (int64_t half = 0; half < 2; ++half, out += TILE_WORDS) {
      const int64_t column = half * TILE;
      if (count == PANEL && column + TILE <= width_) {
        turn_tile([&](int64_t c) {
          const uint16_t* line = from_ + (column + c) * column_ + k;
          __builtin_prefetch(line + PANEL * column_, 0, 2);
          return line;
        }, out);
        continue;
      }
      alignas(64) uint16_t lines[TILE][PANEL] = {};
      for (int64_t c = 0; c < std::min(TILE, width_ - column); ++c)
        std::memcpy(lines[c], from_ + (column + c) * column_ + k, count * sizeof(uint16_t));
      turn_tile([&](int64_t c) { return lines[c]; }, out);
    }
  }

  // The columns of one k lie together, or nothing does.
  void by_depth(int64_t k, int64_t count, uint32_t* out) const {
    for (int64_t w = 0; w < TILE; ++w, out += TILE) {
      alignas(64) uint16_t lines[2][PANEL] = {};
      const uint16_t* ready[2] = {lines[0], lines[1]};
      for (int64_t j = 0; j < 2 && 2 * w + j < count; ++j) {
        const uint16_t* line = from_ + (k + 2 * w + j) * k_;
        __builtin_prefetch(line + PANEL * column_, 0, 2);
        if (column_ == 1 && width_ == PANEL)
          ready[j] = line;
        else
          for (int64_t c = 0; c < width_; ++c) lines[j][c] = line[c * column_];
      }
      pack_pair(ready[0], ready[1], out, out + TILE_WORDS);
    }
  }

  const uint16_t* from_;
  int64_t column_, k_, width_, depth_;
};

}  // namespace
