// Forward and backward of one NUMA node's experts: each is one call, a few lists of jobs one after another.
//
//   forward   sort | low = c x Aᵀ | h, a | low = c a Aᵀ | rows = a W2ᵀ | y = sum of weight . row
//   backward  (h again, where it was not saved) | c dy B | dA' = dy W2: ds, a, dh | c dh B | dx rows = dh W1 and the
//             gradients of the factors | sums of dx rows and of ds | gradients of the weights, where they are asked for
//
// Rows between the phases are bf16, sums fp32 until they are activated; every sum has one order, whatever the number of
// threads.
#pragma once
#include "node_products.h"
#include "pool.h"
#include "thin_gradient.h"
#include "weight_gradient.h"

namespace [[gnu::visibility("hidden")]] amoeba {

constexpr int64_t LOW_ROWS = 64;   // of a job of the low-rank products: they have one panel and nothing to cut
constexpr int64_t ALONE = 1 << 16; // additions that are not worth calling the other threads

// What a pass takes of the pool's scratch.
struct ForwardMemory {
  int32_t *map, *token;
  float* sums;
  uint16_t *h, *low, *a, *down_low, *rows;
  ForwardMemory(Pieces& pieces, const Node& n, const Batch& b) {
    const int64_t slots = b.slots();
    map = pieces.take_unless(b.map, RowMap::size(n.experts, slots));
    token = pieces.take<int32_t>(slots);
    sums = n.activates_later() ? pieces.take<float>(slots * n.width) : nullptr;
    h = b.h;
    low = pieces.take_unless(b.low, slots * n.low_width());
    a = pieces.take<uint16_t>(slots * n.intermediate);
    down_low = pieces.take_unless(b.down_low, slots * n.down_low_width());
    rows = pieces.take<uint16_t>(slots * n.hidden);
  }
};

struct BackwardMemory {
  int32_t *map, *token;
  uint16_t *h, *low, *a, *down_low, *dlow, *down_dlow, *dh, *rows;
  float *sums, *ds;
  BackwardMemory(Pieces& pieces, const Node& n, const Batch& b) {
    const int64_t slots = b.slots();
    map = pieces.take_unless(b.map, RowMap::size(n.experts, slots));
    token = pieces.take<int32_t>(slots);
    sums = n.activates_later() && !b.h ? pieces.take<float>(slots * n.width) : nullptr;
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

template <class Memory>
size_t bytes_of(const Node& node, const Batch& batch) {
  Pieces count(nullptr);
  Memory(count, node, batch);
  return count.used();
}

class Run {
 public:
  Run(Pool& pool, const Node& node, const Batch& batch) : pool_(pool), node_(node), batch_(batch) {}

  void forward(float* y) {
    const auto m = memory<ForwardMemory>();
    sort(m.map, m.token, true);
    up(m.sums, m.h, m.low, m.a);
    low(node_.down_a, Input{m.a, node_.intermediate}, m.down_low);
    multiply(product(node_.down, node_.down_b, m.down_low), Input{m.a, node_.intermediate},
             RowsEpilogue<uint16_t>{{}, {m.rows, node_.hidden, owned_, true}, node_.down_bias});
    combine(m.rows, batch_.weight, y);
  }

  // The last step of forward alone, for rows that several calls computed.
  void combine_rows(int32_t* slot_row, const uint16_t* rows, float* y) {
    map_.slot_row = slot_row;
    combine(rows, batch_.weight, y);
  }

  void backward(const Gradients& g) {
    const auto m = memory<BackwardMemory>();
    const int64_t I = node_.intermediate, J = node_.width, H = node_.hidden;
    sort(m.map, m.token, !batch_.map);
    if (!batch_.h) {
      up(m.sums, m.h, m.low, m.a);
      // now, as in forward: from the next product on, a is that of h in bf16
      if (!batch_.down_low && g.down_b) low(node_.down_a, Input{m.a, I}, m.down_low);
    } else if (!batch_.low && (g.gate_b || g.up_b)) {
      low(node_.up_a, Input{batch_.x, batch_.x_stride, token_}, m.low);
    }
    const Input dy{g.dy, g.dy_stride, token_};
    low(node_.down_b_transposed, dy, m.down_dlow);
    multiply(product(node_.down_transposed, node_.down_a_transposed, m.down_dlow), dy,
             DownEpilogue{node_, m.h, batch_.weight, map_.order, {m.a, I, owned_, false}, {m.dh, J, owned_, false}, m.ds,
                        batch_.slots()});
    if (batch_.h && !batch_.down_low && g.down_b) low(node_.down_a, Input{m.a, I}, m.down_low);
    low(node_.up_b_transposed, Input{m.dh, J}, m.dlow);

    ThinProduct up_a, up_b, down_a, down_b;
    up_a.thin = m.dlow, up_b.thin = m.low, down_a.thin = m.down_dlow, down_b.thin = m.down_low;
    for (ThinProduct* p : {&up_a, &up_b}) p->thin_stride = node_.low_width(), p->ranks = node_.ranks();
    for (ThinProduct* p : {&down_a, &down_b})
      p->thin_stride = node_.down_low_width(), p->ranks = node_.down_ranks(), p->row_scale = batch_.weight;
    up_a.reads(batch_.x, batch_.x_stride, H, true), up_b.reads(m.dh, J, J, false);
    down_a.reads(m.a, I, I, false), down_b.reads(g.dy, g.dy_stride, H, true);
    up_a.gives(g.gate_a, node_.gate_rank, g.up_a, node_.up_rank);
    node_.activation.gated ? up_b.gives(g.gate_b, node_.gate_rank, g.up_b, node_.up_rank)
                           : up_b.gives(g.up_b, node_.up_rank);
    down_a.gives(g.down_a, node_.down_rank), down_b.gives(g.down_b, node_.down_rank);
    up_b.by_column = down_b.by_column = true;
    up_b.halves = node_.activation.gated, up_b.interleaved = node_.activation.interleaved;
    up_backward(g.x != nullptr, m.dh, m.dlow, m.rows, {up_a, up_b, down_a, down_b});

    if (g.x) combine(m.rows, nullptr, g.x);
    if (g.weight) weight_gradient(g, m.ds);
    if (g.gate_up.data || g.down.data || g.gate_up_bias || g.down_bias) weight_gradients(g, m);
  }

 private:
  template <class Memory>
  Memory memory() {
    Pieces pieces(pool_.scratch.get(bytes_of<Memory>(node_, batch_)));
    return Memory(pieces, node_, batch_);
  }

  void sort(int32_t* memory, int32_t* token, bool anew) {
    map_ = RowMap::in(memory, node_.experts, batch_.slots());
    if (anew) map_.sort(node_.experts, batch_.slots(), batch_.expert);
    owned_ = map_.first[node_.experts];
    token_ = token;
    for (int64_t r = 0; r < owned_; ++r) token[r] = int32_t(map_.order[r] / batch_.top_k);
  }

  Product product(const PackedMatrix& matrix, const PackedMatrix& update, const uint16_t* low_rows) const {
    Product p;
    p.weights = matrix.weights(node_.int8);
    if (update.data) p.update = {update.weights(false), low_rows};
    p.path = Path(node_.path);
    p.int8 = node_.int8;
    p.units = p.weights.panels();
    return p;
  }

  template <class Epilogue>
  void multiply(const Product& p, const Input& input, const Epilogue& epilogue, int64_t most_rows = ROW_BLOCK) {
    const std::vector<Job> jobs = list_jobs(p, node_.experts, map_.first, pool_.threads(), most_rows);
    pool_.run(int64_t(jobs.size()), [&](int64_t i) { run_job(p, jobs[i], input, epilogue); });
  }

  // out = scaling . rows . factor
  void low(const PackedMatrix& factor, const Input& input, uint16_t* out) {
    if (!factor.data) return;
    Product p;
    p.weights = factor.weights(false);
    p.path = Path(node_.path);
    p.units = p.weights.panels();
    multiply(p, input, LowRankEpilogue{{}, {out, p.units * PANEL, owned_, false}, node_.scaling}, LOW_ROWS);
  }

  // h where it is asked for, and a; `sums` where gate and up do not come at the same time.
  void up(float* sums, uint16_t* h, uint16_t* low_rows, uint16_t* a) {
    const int64_t I = node_.intermediate, J = node_.width;
    const Input x{batch_.x, batch_.x_stride, token_};
    low(node_.up_a, x, low_rows);
    Product p = product(node_.gate_up, node_.up_b, low_rows);
    if (!node_.activates_later()) {
      if (node_.has_paired_panels()) p.second = p.units /= 2;
      multiply(p, x, UpEpilogue{{}, node_, {h, J, owned_, true}, {a, I, owned_, false}});
      return;
    }
    multiply(p, x, RowsEpilogue<float>{{}, {sums, J, owned_, false}, node_.gate_up_bias});
    in_blocks(owned_, J, [&](int64_t from, int64_t to) {
      for (int64_t r = from; r < to; ++r) {
        const float* row = sums + r * J;
        for (int64_t j = 0; h && j < J; j += TILE) store_some(h + r * J + j, load_some(row + j, J - j), J - j);
        for (int64_t i = 0; i < I; i += TILE) {
          const Floats16 value = activate<false>(load_some(row + i, I - i), load_some(row + I + i, I - i), node_.activation);
          store_some(a + r * I + i, value, I - i);
        }
      }
    });
  }

  // dx rows and the gradients of the factors in one list: the small jobs fill the gaps that the large ones leave.
  void up_backward(bool wants_x, const uint16_t* dh, const uint16_t* dlow, uint16_t* rows,
                   const std::vector<ThinProduct>& products) {
    const Product p = product(node_.gate_up_transposed, node_.up_a_transposed, dlow);
    const SortedRows sorted{map_.first, map_.order, token_};
    std::vector<Job> jobs;
    if (wants_x) jobs = list_jobs(p, node_.experts, map_.first, pool_.threads());
    const std::vector<GradientJob> thin_jobs = list_thin_jobs(products, node_.experts, map_.first, pool_.threads());
    const RowsEpilogue<uint16_t> epilogue{{}, {rows, node_.hidden, owned_, true}, nullptr};
    const int64_t large = int64_t(jobs.size());
    pool_.run(large + int64_t(thin_jobs.size()), [&](int64_t i) {
      if (i < large) return run_job(p, jobs[i], Input{dh, node_.width}, epilogue);
      const GradientJob& job = thin_jobs[i - large];
      const ThinProduct& thin = products[job.product];
      with_way<Bf16>(Path(node_.path), thin.ranks, [&](auto way) { run_thin<decltype(way)>(thin, sorted, job); });
    });
  }

  void weight_gradients(const Gradients& g, const BackwardMemory& m) {
    const SortedRows sorted{map_.first, map_.order, token_};
    const WideRows x{batch_.x, batch_.x_stride, node_.hidden, true}, dh{m.dh, node_.width, node_.width, false};
    const WideRows dy{g.dy, g.dy_stride, node_.hidden, true}, a{m.a, node_.intermediate, node_.intermediate, false};
    const std::vector<WeightGradient> products = {gradient_into(g.gate_up, dh, x, nullptr),
                                                  gradient_into(g.down, dy, a, batch_.weight)};
    const std::vector<GradientJob> jobs = list_gradient_jobs(products, node_.experts, map_.first, pool_.threads());
    pool_.run(int64_t(jobs.size()), [&](int64_t i) {
      with_way<Bf16>(Path(node_.path), PANEL, [&](auto way) {
        run_weight_gradient<decltype(way)>(products[jobs[i].product], sorted, jobs[i]);
      });
    });
    ColumnSums up{dh, g.gate_up_bias}, down{dy, g.down_bias};
    down.rows.row_scale = batch_.weight;
    for (const ColumnSums& sums : {up, down})
      if (sums.out) pool_.run(node_.experts, [&](int64_t e) { run_column_sums(sums, sorted, e); });
  }

  // Whichever of out and in is contiguous in the target is right; the routing weight goes with left.
  WeightGradient gradient_into(const WeightTarget& target, WideRows out, WideRows in, const float* row_scale) const {
    const bool plain = target.stride_in == 1;
    WeightGradient g{plain ? out : in, plain ? in : out, target.data, target.stride_e,
                     plain ? target.stride_out : target.stride_in};
    g.left.row_scale = row_scale;
    const bool whole_lines = uintptr_t(g.out) % 64 == 0 && g.stride_e % PANEL == 0 && g.stride_row % PANEL == 0 &&
                             g.right.columns % PANEL == 0;
    const int64_t bytes = node_.experts * g.left.columns * g.right.columns * int64_t(sizeof(uint16_t));
    g.stream = whole_lines && bytes >= RowsOut::STREAM_BYTES;
    return g;
  }

  // Rows from `from` to `to` of count, each about `cost` additions.
  template <class Block>
  void in_blocks(int64_t count, int64_t cost, const Block& block) {
    const int64_t blocks = count * cost < ALONE ? 1 : std::min<int64_t>(count, 8 * pool_.threads());
    pool_.run(blocks, [&](int64_t b) { block(count * b / blocks, count * (b + 1) / blocks); });
  }

  // out[t] = sum over k of weight . row; without weights, of the rows themselves
  void combine(const uint16_t* rows, const float* weight, float* out) {
    const int64_t H = node_.hidden, K = batch_.top_k, parts = batch_.tokens < pool_.threads() ? ceil_div(H, 256) : 1;
    const int64_t wide = round_up(ceil_div(H, parts), TILE);
    in_blocks(batch_.tokens * parts, wide * K, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        const int64_t t = i / parts, begin = i % parts * wide, end = std::min(H, begin + wide);
        for (int64_t c = begin; c < end; c += TILE) {
          Floats16 sum = {};
          for (int64_t k = 0; k < K; ++k) {
            const int32_t row = map_.slot_row[t * K + k];
            if (row < 0) continue;
            const Floats16 value = load_some(rows + row * H + c, end - c);
            sum += weight ? weight[t * K + k] * value : value;
          }
          store_some(out + t * H + c, sum, end - c);
        }
      }
    });
  }

  // ds of each slot: its panels' parts, and what the bias of down gives.
  void weight_gradient(const Gradients& g, const float* ds) {
    const int64_t slots = batch_.slots(), H = node_.hidden, panels = panels_of(node_.intermediate);
    in_blocks(slots, panels + (node_.down_bias ? H : 0), [&](int64_t from, int64_t to) {
      for (int64_t slot = from; slot < to; ++slot) {
        const int32_t row = map_.slot_row[slot];
        float sum = 0;
        for (int64_t i = 0; row >= 0 && i < panels; ++i) sum += ds[i * slots + row];
        if (row >= 0 && node_.down_bias) {
          const uint16_t* dy = g.dy + slot / batch_.top_k * g.dy_stride;
          const float* bias = node_.down_bias + batch_.expert[slot] * H;
          Floats16 product = {};
          for (int64_t c = 0; c < H; c += TILE) product += load_some(dy + c, H - c) * load_some(bias + c, H - c);
          sum += total(product);
        }
        g.weight[slot] = sum;
      }
    });
  }

  Pool& pool_;
  const Node& node_;
  const Batch& batch_;
  RowMap map_;
  const int32_t* token_ = nullptr;
  int64_t owned_ = 0;
};

}  // namespace amoeba
