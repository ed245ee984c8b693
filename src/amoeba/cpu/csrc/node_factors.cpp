#include "factors.h"

#include "interleave.h"

namespace amoeba {

// A factor as a matrix of one line per rank, zeros up to whole panels both ways.
class Lines {
 public:
  Lines(Buffer<uint16_t>& buffer, int64_t ranks, int64_t length)
      : ranks_(ranks), stride_(round_up(length, PANEL)), padded_(round_up(ranks, PANEL)) {
    values_ = buffer.get(padded_ * stride_);
    std::memset(values_, 0, padded_ * stride_ * sizeof(uint16_t));
  }
  uint16_t* line(int64_t rank) { return values_ + rank * stride_; }

  // Ranks are the columns, their lines the depth.
  void as_columns(const PackedMatrix& out, int64_t expert) const {
    uint32_t* words = words_of(out, expert);
    const int64_t tiles = stride_ / PANEL, stride = stride_ / 2;
    const auto* source = reinterpret_cast<const uint32_t*>(values_);
    for (int64_t rank = 0; rank < padded_; rank += PANEL)
      for (int64_t t = 0; t < tiles; ++t)
        for (int64_t half = 0; half < 2; ++half, words += TILE_WORDS) {
          const uint32_t* from = source + (rank + half * TILE) * stride + t * TILE;
          if (rank + half * TILE < ranks_)
            transpose_tile([&](int64_t r) { return from + r * stride; }, words);
          else
            std::memset(words, 0, TILE_WORDS * sizeof(uint32_t));
        }
  }

  // Ranks are the depth, two of them to a word.
  void as_depth(const PackedMatrix& out, int64_t expert) const {
    uint32_t* words = words_of(out, expert);
    for (int64_t column = 0; column < stride_; column += PANEL)
      for (int64_t rank = 0; rank < padded_; rank += PANEL, words += 2 * TILE_WORDS)
        for (int64_t w = 0; w < TILE; ++w) {
          const uint16_t* even = values_ + (rank + 2 * w) * stride_ + column;
          pack_pair(even, even + stride_, words + w * TILE, words + TILE_WORDS + w * TILE);
        }
  }

 private:
  static uint32_t* words_of(const PackedMatrix& out, int64_t expert) {
    auto* packed = static_cast<uint32_t*>(const_cast<void*>(out.data));
    return packed + expert * packed_words(out.columns, out.depth, Bf16::PER_WORD);
  }
  uint16_t* values_;
  int64_t ranks_, stride_, padded_;
};

thread_local Buffer<uint16_t> factor_lines;

// gate's A above up's; and gate's B and up's B, each on its own ranks and on its own rows of gate_up, zeros elsewhere
void pack_up_factors(const Node& n, const Factors& f, int64_t e) {
  Lines a(factor_lines, n.ranks(), n.hidden);
  for (int64_t r = 0; r < n.ranks(); ++r)
    r < n.gate_rank ? f.gate_a.line(e, r, n.hidden, false, a.line(r), 1)
                    : f.up_a.line(e, r - n.gate_rank, n.hidden, false, a.line(r), 1);
  a.as_columns(n.up_a, e);
  a.as_depth(n.up_a_transposed, e);
  Lines b(factor_lines, n.ranks(), n.width);
  const int64_t I = n.intermediate, step = n.activation.interleaved ? 2 : 1;
  const int64_t up_starts = !n.activation.gated ? 0 : n.activation.interleaved ? 1 : I;
  for (int64_t r = 0; r < n.ranks(); ++r)
    r < n.gate_rank ? f.gate_b.line(e, r, I, true, b.line(r), step)
                    : f.up_b.line(e, r - n.gate_rank, I, true, b.line(r) + up_starts, step);
  b.as_depth(n.up_b, e);
  b.as_columns(n.up_b_transposed, e);
}

void pack_down_factors(const Node& n, const Factors& f, int64_t e) {
  Lines a(factor_lines, n.down_rank, n.intermediate);
  for (int64_t r = 0; r < n.down_rank; ++r) f.down_a.line(e, r, n.intermediate, false, a.line(r), 1);
  a.as_columns(n.down_a, e);
  a.as_depth(n.down_a_transposed, e);
  Lines b(factor_lines, n.down_rank, n.hidden);
  for (int64_t r = 0; r < n.down_rank; ++r) f.down_b.line(e, r, n.hidden, true, b.line(r), 1);
  b.as_depth(n.down_b, e);
  b.as_columns(n.down_b_transposed, e);
}

}  // namespace amoeba
