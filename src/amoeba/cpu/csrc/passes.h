// Forward and backward of one node's packed experts: each is one call, a few lists of jobs one after another.
//
//   forward   sort | low = c x Aᵀ | h, a | low = c a Aᵀ | rows = a W2ᵀ | y = sum of weight . row
//   backward  (h again, where it was not kept) | c dy B | dA' = dy W2: ds, a, dh | c dh B | dx rows = dh W1 and the
//             gradients of the factors | sums of dx rows and of ds
//
// Rows between the phases are bf16, sums fp32; every sum has one order, whatever the number of threads.
#pragma once
#include "node.h"
#include "thin_gradient.h"

namespace {

enum Phase {  // the names in node.py
  SORT, LOW_UP, UP, ACTIVATE, LOW_DOWN, DOWN, COMBINE,
  BACK_LOW_DOWN, BACK_DOWN, BACK_LOW_UP, BACK_UP, BACK_COMBINE,
};

constexpr int64_t LOW_ROWS = 64;              // of a job of the low-rank products: they have one panel and nothing to cut
constexpr int64_t STREAM_BYTES = 8 << 20;     // an output larger than this has left the L2 cache before it is read again
constexpr int64_t ALONE = 1 << 16;            // additions that are not worth calling the other threads

// What a pass takes of the pool's scratch.
struct ForwardMemory {
  int32_t *map, *token;
  uint16_t *h, *low, *a, *down_low, *rows;
  ForwardMemory(Pieces& pieces, const Node& n, const Batch& b) {
    const int64_t slots = b.slots();
    map = pieces.take_unless(b.map, RowMap::size(n.experts, slots));
    token = pieces.take<int32_t>(slots);
    h = n.activates_later() ? pieces.take_unless(b.h, slots * n.width) : b.h;
    low = pieces.take_unless(b.low, slots * n.low_width());
    a = pieces.take<uint16_t>(slots * n.intermediate);
    down_low = pieces.take_unless(b.down_low, slots * n.down_low_width());
    rows = pieces.take<uint16_t>(slots * n.hidden);
  }
};

struct BackwardMemory {
  int32_t* token;
  uint16_t *h, *low, *a, *down_low, *dlow, *down_dlow, *dh, *rows;
  float* ds;
  BackwardMemory(Pieces& pieces, const Node& n, const Batch& b) {
    const int64_t slots = b.slots();
    token = pieces.take<int32_t>(slots);
    h = pieces.take_unless(b.h, slots * n.width);
    low = pieces.take_unless(b.low, slots * n.low_width());
    a = pieces.take<uint16_t>(slots * n.intermediate);
    down_low = pieces.take_unless(b.down_low, slots * n.down_low_width());
    dlow = pieces.take<uint16_t>(slots * n.low_width());
    down_dlow = pieces.take<uint16_t>(slots * n.down_low_width());
    dh = pieces.take<uint16_t>(slots * n.width);
    rows = pieces.take<uint16_t>(slots * n.hidden);
    ds = pieces.take<float>(slots * panels_of(n.intermediate));
  }
};

inline auto rows_of(const uint16_t* rows, int64_t width) {
  return [rows, width](int64_t r) { return rows + r * width; };
}

template <class Memory>
size_t bytes_of(const Node& node, const Batch& batch) {
  Pieces count(nullptr);
  Memory(count, node, batch);
  return count.used();
}

class Run {
 public:
  Run(Pool& pool, const Node& node, const Batch& batch) : pool_(pool), node_(node), batch_(batch), clock_(pool) {}

  void forward(float* y) {
    const auto m = pieces<ForwardMemory>();
    sort(m.map, m.token, true);
    up(m.h, m.low, m.a);
    low(LOW_DOWN, node_.down_a, rows_of(m.a, node_.intermediate), m.down_low);
    multiply_down(m.a, m.down_low, m.rows);
    combine(m.rows, y);
    clock_.end_of(COMBINE);
  }

  void backward(const Gradients& g) {
    const auto m = pieces<BackwardMemory>();
    sort(batch_.map, m.token, false);
    if (!batch_.h) up(m.h, m.low, m.a);
    const auto dy = [&](int64_t r) { return g.dy + int64_t(token_[r]) * g.dy_stride; };
    low(BACK_LOW_DOWN, node_.down_b_transposed, dy, m.down_dlow);
    down_backward(dy, m.h, m.down_dlow, m.a, m.dh, m.ds);
    if (!batch_.h && g.down_b) low(LOW_DOWN, node_.down_a, rows_of(m.a, node_.intermediate), m.down_low);
    low(BACK_LOW_UP, node_.up_b_transposed, rows_of(m.dh, node_.width), m.dlow);
    const bool gated = node_.activation.gated;
    up_backward(g, m.dh, m.dlow, m.rows, {
        {m.dlow, node_.low_width(), node_.ranks(), nullptr, batch_.x, batch_.x_stride, node_.hidden, true,
         g.gate_a, g.up_a, node_.gate_rank, node_.up_rank, false, false, false},
        {m.low, node_.low_width(), node_.ranks(), nullptr, m.dh, node_.width, node_.width, false,
         gated ? g.gate_b : g.up_b, gated ? g.up_b : nullptr, gated ? node_.gate_rank : node_.up_rank, node_.up_rank,
         true, gated, node_.activation.interleaved != 0},
        {m.down_dlow, node_.down_low_width(), node_.down_ranks(), batch_.weight, m.a, node_.intermediate,
         node_.intermediate, false, g.down_a, nullptr, node_.down_rank, 0, false, false, false},
        {m.down_low, node_.down_low_width(), node_.down_ranks(), batch_.weight, g.dy, g.dy_stride, node_.hidden, true,
         g.down_b, nullptr, node_.down_rank, 0, true, false, false},
    });
    if (g.x) combine(m.rows, g.x, nullptr);
    if (g.weight) weight_gradient(g, m.ds);
    clock_.end_of(BACK_COMBINE);
  }

 private:
  template <class Memory>
  Memory pieces() {
    Pieces memory(pool_.scratch.get(bytes_of<Memory>(node_, batch_)));
    return Memory(memory, node_, batch_);
  }

  void sort(int32_t* memory, int32_t* token, bool anew) {
    map_ = RowMap::in(memory, node_.experts, batch_.slots());
    if (anew) map_.sort(node_.experts, batch_.slots(), batch_.expert);
    owned_ = map_.first[node_.experts];
    token_ = token;
    for (int64_t r = 0; r < owned_; ++r) token[r] = int32_t(map_.order[r] / batch_.top_k);
    clock_.end_of(SORT);
  }

  template <class Row, class Finish>
  void multiply(const Product& p, bool int8, int64_t most_rows, const Row& row, const Finish& finish) {
    const std::vector<Job> jobs = list_jobs(p, node_.experts, map_.first, pool_.threads(), most_rows);
    pool_.run(int64_t(jobs.size()), [&](int64_t i) { run_one(p, int8, jobs[i], row, finish); });
  }

  template <class Row, class Finish>
  static void run_one(const Product& p, bool int8, const Job& job, const Row& row, const Finish& finish) {
    int8 ? run_job<Int8>(p, job, row, finish) : run_job<Bf16>(p, job, row, finish);
    end_of_streaming();
  }

  Product product(const PackedMatrix& matrix, const PackedMatrix& update, const uint16_t* low) const {
    Product p;
    p.weights = matrix.weights(node_.int8);
    if (update.data) p.update = {update.weights(false), low};
    p.path = Path(node_.path);
    p.units = p.weights.panels();
    return p;
  }

  // out = scaling . rows . factor, with zeros up to whole panels.
  template <class Row>
  void low(Phase phase, const PackedMatrix& factor, const Row& row, uint16_t* out) {
    if (!factor.data) return;
    Product p;
    p.weights = factor.weights(false);
    p.path = Path(node_.path);
    p.units = p.weights.panels();
    const int64_t stride = p.units * PANEL;
    const float scaling = node_.scaling;
    multiply(p, false, LOW_ROWS, row, [=](const Job&, int64_t unit, int64_t r, int64_t rows, const auto& sums, const auto&) {
      for (int64_t i = 0; i < rows; ++i)
        store_panel(out + (r + i) * stride + unit * PANEL, scaling * sums.at(i, 0), scaling * sums.at(i, 1), PANEL, false);
    });
    clock_.end_of(phase);
  }

  // h where it is asked for, and a.
  void up(uint16_t* h, uint16_t* low_rows, uint16_t* a) {
    const auto x = [&](int64_t r) { return batch_.x + int64_t(token_[r]) * batch_.x_stride; };
    low(LOW_UP, node_.up_a, x, low_rows);
    Product p = product(node_.gate_up, node_.up_b, low_rows);
    if (node_.has_paired_panels()) {
      p.units /= 2;
      p.second = p.units;
    }
    multiply(p, node_.int8, ROW_BLOCK, x, [&](const Job& job, int64_t unit, int64_t r, int64_t rows, const auto& first, const auto& second) {
      with_kind(node_.activation, [&](auto only_silu) {
        finish_up<only_silu>(p.second, job.expert, unit, r, rows, first, second, h, a);
      });
    });
    clock_.end_of(UP);
    if (!node_.activates_later()) return;
    const int64_t I = node_.intermediate, J = node_.width;
    in_blocks(owned_, J, [&](int64_t from, int64_t to) {
      for (int64_t r = from; r < to; ++r)
        for (int64_t i = 0; i < I; i += TILE) {
          const V gate = load_some(h + r * J + i, I - i), up = load_some(h + r * J + I + i, I - i);
          store_some(a + r * I + i, activate<false>(gate, up, node_.activation), I - i);
        }
    });
    clock_.end_of(ACTIVATE);
  }

  template <bool ONLY_SILU, class Sums>
  void finish_up(int64_t second_panel, int64_t expert, int64_t unit, int64_t r, int64_t rows, const Sums& first,
                 const Sums& second, uint16_t* h, uint16_t* a) const {
    const int64_t I = node_.intermediate, J = node_.width, column = unit * PANEL, width = first.width;
    const Activation& activation = node_.activation;
    const bool stream = h && !node_.activates_later() && streams(h, J);
    V bias[2][2] = {};
    if (node_.gate_up_bias)
      for (int which = 0; which <= (second_panel ? 1 : 0); ++which)
        for (int half = 0; half < 2; ++half)
          bias[which][half] = load_some(node_.gate_up_bias + expert * J + column + which * I + half * TILE, width - half * TILE);
    for (int64_t i = 0; i < rows; ++i) {
      uint16_t* h_row = h ? h + (r + i) * J + column : nullptr;
      uint16_t* a_row = a + (r + i) * I;
      V left = first.at(i, 0) + bias[0][0], right = first.at(i, 1) + bias[0][1];
      if (h_row) store_panel(h_row, left, right, width, stream);
      if (second_panel) {
        const V up_left = second.at(i, 0) + bias[1][0], up_right = second.at(i, 1) + bias[1][1];
        if (h_row) store_panel(h_row + I, up_left, up_right, width, stream);
        left = activate<ONLY_SILU>(left, up_left, activation), right = activate<ONLY_SILU>(right, up_right, activation);
        store_panel(a_row + column, left, right, width, false);
      } else if (activation.interleaved) {
        alignas(64) float z[PANEL], gate[TILE], up[TILE];
        store(z, left), store(z + TILE, right);
        for (int64_t k = 0; k < TILE; ++k) gate[k] = z[2 * k], up[k] = z[2 * k + 1];
        store_some(a_row + column / 2, activate<ONLY_SILU>(load(gate), load(up), activation), width / 2);
      } else if (!activation.gated) {
        store_panel(a_row + column, activate<ONLY_SILU>(left, left, activation), activate<ONLY_SILU>(right, right, activation), width, false);
      }
    }
  }

  // Whole lines of rows this wide are written past the caches, where there are many.
  bool streams(const uint16_t* rows, int64_t width) const {
    return uintptr_t(rows) % 64 == 0 && width % PANEL == 0 && owned_ * width * int64_t(sizeof(uint16_t)) >= STREAM_BYTES;
  }

  // (rows, H) in bf16 at rows of the sorted order, with a bias or without.
  auto to_rows(uint16_t* out, const float* bias) const {
    const int64_t H = node_.hidden;
    const bool stream = streams(out, H);
    return [=](const Job& job, int64_t unit, int64_t r, int64_t rows, const auto& sums, const auto&) {
      V left = {}, right = {};
      const int64_t column = unit * PANEL;
      if (bias) {
        left = load_some(bias + job.expert * H + column, sums.width);
        right = load_some(bias + job.expert * H + column + TILE, sums.width - TILE);
      }
      for (int64_t i = 0; i < rows; ++i)
        store_panel(out + (r + i) * H + column, sums.at(i, 0) + left, sums.at(i, 1) + right, sums.width, stream);
    };
  }

  void multiply_down(const uint16_t* a, const uint16_t* low_rows, uint16_t* rows) {
    multiply(product(node_.down, node_.down_b, low_rows), node_.int8, ROW_BLOCK, rows_of(a, node_.intermediate),
             to_rows(rows, node_.down_bias));
    clock_.end_of(DOWN);
  }

  // Rows from `from` to `to` of count, each about `cost` additions.
  template <class Block>
  void in_blocks(int64_t count, int64_t cost, const Block& block) {
    const int64_t blocks = count * cost < ALONE ? 1 : std::min<int64_t>(count, 8 * pool_.threads());
    pool_.run(blocks, [&](int64_t b) { block(count * b / blocks, count * (b + 1) / blocks); });
  }

  // out[t] = sum over k of weight . row, or of the rows themselves
  void combine(const uint16_t* rows, float* out) { combine(rows, out, batch_.weight); }
  void combine(const uint16_t* rows, float* out, const float* weight) {
    const int64_t H = node_.hidden, K = batch_.top_k, parts = batch_.tokens < pool_.threads() ? ceil_div(H, 256) : 1;
    const int64_t wide = ceil_div(ceil_div(H, parts), TILE) * TILE;
    in_blocks(batch_.tokens * parts, wide * K, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        const int64_t t = i / parts, begin = i % parts * wide, end = std::min(H, begin + wide);
        for (int64_t c = begin; c < end; c += TILE) {
          V sum = {};
          for (int64_t k = 0; k < K; ++k) {
            const int32_t row = map_.slot_row[t * K + k];
            if (row < 0) continue;
            const V value = load_some(rows + row * H + c, end - c);
            sum += weight ? weight[t * K + k] * value : value;
          }
          store_some(out + t * H + c, sum, end - c);
        }
      }
    });
  }

  // From dA' = dy W2, which has no weight in it yet: ds = <dA', a> of each panel, a, dh.
  template <class Row>
  void down_backward(const Row& dy, const uint16_t* h, const uint16_t* dlow, uint16_t* a, uint16_t* dh, float* ds) {
    const Product p = product(node_.down_transposed, node_.down_a_transposed, dlow);
    multiply(p, node_.int8, ROW_BLOCK, dy, [=](const Job&, int64_t unit, int64_t r, int64_t rows, const auto& sums, const auto&) {
      with_kind(node_.activation, [&](auto only_silu) { finish_da<only_silu>(unit, r, rows, sums, h, a, dh, ds); });
    });
    clock_.end_of(BACK_DOWN);
  }

  template <bool ONLY_SILU, class Sums>
  void finish_da(int64_t unit, int64_t r, int64_t rows, const Sums& sums, const uint16_t* h, uint16_t* a, uint16_t* dh,
                 float* ds) const {
    const int64_t I = node_.intermediate, J = node_.width, slots = batch_.slots();
    const Activation& activation = node_.activation;
    const int64_t column = unit * PANEL, width = sums.width;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = r + i;
      const uint16_t* h_row = h + row * J + node_.gate_column(column);
      uint16_t* dh_row = dh + row * J + node_.gate_column(column);
      const float weight = batch_.weight[map_.order[row]];
      V product[2], values[2], dgate[2], dup[2];
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const int64_t skip = half * TILE, count = width - skip;
        V gate, up = {};
        if (activation.interleaved) {
          read_in_turns(h_row + 2 * skip, count, gate, up);
        } else {
          gate = load_some(h_row + skip, count);
          if (activation.gated) up = load_some(h_row + I + skip, count);
        }
        const Slopes slopes = activate_backward<ONLY_SILU>(gate, up, activation);
        const V da = sums.at(i, half);
        values[half] = slopes.a;
        product[half] = da * slopes.a;
        dgate[half] = weight * da * slopes.dgate, dup[half] = weight * da * slopes.dup;
        if (activation.interleaved) write_in_turns(dh_row + 2 * skip, count, dgate[half], dup[half]);
      }
      ds[unit * slots + row] = total(product[0] + product[1]);
      store_panel(a + row * I + column, values[0], values[1], width, false);
      if (activation.interleaved) continue;
      store_panel(dh_row, dgate[0], dgate[1], width, false);
      if (activation.gated) store_panel(dh_row + I, dup[0], dup[1], width, false);
    }
  }

  static void read_in_turns(const uint16_t* h, int64_t count, V& gate, V& up) {
    for (int64_t k = 0; k < TILE; ++k) {
      gate[k] = k < count ? widen(h[2 * k]) : 0;
      up[k] = k < count ? widen(h[2 * k + 1]) : 0;
    }
  }
  static void write_in_turns(uint16_t* dh, int64_t count, V dgate, V dup) {
    for (int64_t k = 0; k < std::min(TILE, count); ++k) {
      dh[2 * k] = round_to_bf16(dgate[k]);
      dh[2 * k + 1] = round_to_bf16(dup[k]);
    }
  }

  // dx rows and the gradients of the factors in one list: the small jobs fill the gaps that the large ones leave.
  void up_backward(const Gradients& g, const uint16_t* dh, const uint16_t* dlow, uint16_t* rows,
                   const std::vector<ThinProduct>& products) {
    const Product p = product(node_.gate_up_transposed, node_.up_a_transposed, dlow);
    const SortedRows sorted{map_.first, map_.order, token_};
    std::vector<Job> jobs;
    if (g.x) jobs = list_jobs(p, node_.experts, map_.first, pool_.threads(), ROW_BLOCK);
    std::vector<ThinJob> thin_jobs;
    list_thin_jobs(products.data(), int64_t(products.size()), node_.experts, map_.first, pool_.threads(), thin_jobs);
    const auto finish = to_rows(rows, nullptr);
    const auto row = rows_of(dh, node_.width);
    const int64_t large = int64_t(jobs.size());
    pool_.run(large + int64_t(thin_jobs.size()), [&](int64_t i) {
      if (i < large) return run_one(p, node_.int8, jobs[i], row, finish);
      const ThinJob& job = thin_jobs[i - large];
      const ThinProduct& thin = products[job.product];
      with_way<Bf16>(Path(node_.path), thin.ranks, [&](auto way) { run_thin<decltype(way)>(thin, sorted, job); });
    });
    clock_.end_of(BACK_UP);
  }

  void weight_gradient(const Gradients& g, const float* ds) {
    const int64_t slots = batch_.slots(), H = node_.hidden, panels = panels_of(node_.intermediate);
    in_blocks(slots, panels + (node_.down_bias ? H : 0), [&](int64_t from, int64_t to) {
      for (int64_t slot = from; slot < to; ++slot) {
        const int32_t row = map_.slot_row[slot];
        float sum = 0;
        if (row >= 0) {
          for (int64_t i = 0; i < panels; ++i) sum += ds[i * slots + row];
          if (node_.down_bias) {
            const uint16_t* dy = g.dy + slot / batch_.top_k * g.dy_stride;
            const float* bias = node_.down_bias + batch_.expert[slot] * H;
            V product = {};
            for (int64_t c = 0; c < H; c += TILE) product += load_some(dy + c, H - c) * load_some(bias + c, H - c);
            sum += total(product);
          }
        }
        g.weight[slot] = sum;
      }
    });
  }

  Pool& pool_;
  const Node& node_;
  const Batch& batch_;
  PhaseClock clock_;
  RowMap map_;
  const int32_t* token_ = nullptr;
  int64_t owned_ = 0;
};

}  // namespace
