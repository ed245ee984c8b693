// Epilogues of a NUMA node's products, each called for up to 32 sorted rows from `r` on and one unit of columns.
#pragma once
#include "node.h"

namespace [[gnu::visibility("hidden")]] amoeba {

// Rows that are written a panel at a time; where there are many, past the caches.
template <class T>
struct RowsOf {
  T* data = nullptr;
  int64_t width = 0;
  bool stream = false;

  static constexpr int64_t STREAM_BYTES = 8 << 20;  // more than this has left the L2 cache before it is read again

  RowsOf() = default;
  RowsOf(T* rows, int64_t row_width, int64_t count, bool may_stream) : data(rows), width(row_width) {
    const bool whole_lines = uintptr_t(rows) % 64 == 0 && row_width % PANEL == 0;
    stream = may_stream && whole_lines && count * row_width * int64_t(sizeof(T)) >= STREAM_BYTES;
  }
  void prefetch(int64_t row, int64_t column, Prefetches& prefetches) const {
    if (!stream) prefetches.add(data + row * width + column, width);
  }
  void put(int64_t row, int64_t column, Floats16 left, Floats16 right, int64_t count) const {
    store_panel(data + row * width + column, left, right, count, stream);
  }
};
using RowsOut = RowsOf<uint16_t>;

// Two halves of a panel of an fp32 vector per expert, or zeros.
struct Bias {
  Floats16 left = {}, right = {};
  Bias(const float* bias, int64_t width, int64_t expert, int64_t column, int64_t count) {
    if (!bias) return;
    left = load_some(bias + expert * width + column, count);
    right = load_some(bias + expert * width + column + TILE, count - TILE);
  }
};

// scaling . sums, with zeros up to whole panels
struct LowRankEpilogue : PrefetchesNothing {
  static constexpr bool OF_INT8_TOO = false;
  RowsOut out;
  float scaling;

  template <class Sums>
  void operator()(const Job&, int64_t unit, int64_t r, int64_t rows, const Sums& sums, const Sums&) const {
    for (int64_t i = 0; i < rows; ++i)
      out.put(r + i, unit * PANEL, scaling * sums.at(i, 0), scaling * sums.at(i, 1), PANEL);
  }
};

// sums + bias
template <class T>
struct RowsEpilogue : PrefetchesNothing {
  static constexpr bool OF_INT8_TOO = true;
  RowsOf<T> out;
  const float* bias;

  template <class Sums>
  void operator()(const Job& job, int64_t unit, int64_t r, int64_t rows, const Sums& sums, const Sums&) const {
    const int64_t column = unit * PANEL;
    const Bias b(bias, out.width, job.expert, column, sums.width);
    for (int64_t i = 0; i < rows; ++i)
      out.put(r + i, column, sums.at(i, 0) + b.left, sums.at(i, 1) + b.right, sums.width);
  }
};

// h = sums + bias where it is asked for, and a = act(h), of the sums before they are rounded to bf16
struct UpEpilogue : PrefetchesNothing {
  static constexpr bool OF_INT8_TOO = true;
  const Node& node;
  RowsOut h, a;

  template <class Sums>
  void operator()(const Job& job, int64_t unit, int64_t r, int64_t rows, const Sums& first, const Sums& second) const {
    with_kind(node.activation, [&](auto only_silu) {
      if (node.has_paired_panels())
        pairs<only_silu>(job.expert, unit * PANEL, r, rows, first, second);
      else
        panel<only_silu>(job.expert, unit * PANEL, r, rows, first);
    });
  }

 private:
  // Gate and up in two panels.
  template <bool ONLY_SILU, class Sums>
  void pairs(int64_t expert, int64_t column, int64_t r, int64_t rows, const Sums& first, const Sums& second) const {
    const int64_t I = node.intermediate, width = first.width;
    const Bias gate_bias(node.gate_up_bias, node.width, expert, column, width);
    const Bias up_bias(node.gate_up_bias, node.width, expert, I + column, width);
    for (int64_t i = 0; i < rows; ++i) {
      const Floats16 gate[2] = {first.at(i, 0) + gate_bias.left, first.at(i, 1) + gate_bias.right};
      const Floats16 up[2] = {second.at(i, 0) + up_bias.left, second.at(i, 1) + up_bias.right};
      if (h.data) {
        h.put(r + i, column, gate[0], gate[1], width);
        h.put(r + i, I + column, up[0], up[1], width);
      }
      a.put(r + i, column, activate<ONLY_SILU>(gate[0], up[0], node.activation),
            activate<ONLY_SILU>(gate[1], up[1], node.activation), width);
    }
  }

  // Gate and up interleaved, or no gate.
  template <bool ONLY_SILU, class Sums>
  void panel(int64_t expert, int64_t column, int64_t r, int64_t rows, const Sums& sums) const {
    const Activation& activation = node.activation;
    const Bias bias(node.gate_up_bias, node.width, expert, column, sums.width);
    for (int64_t i = 0; i < rows; ++i) {
      const Floats16 left = sums.at(i, 0) + bias.left, right = sums.at(i, 1) + bias.right;
      if (h.data) h.put(r + i, column, left, right, sums.width);
      if (activation.interleaved) {
        alignas(64) float z[PANEL], gate[TILE], up[TILE];
        store(z, left), store(z + TILE, right);
        for (int64_t k = 0; k < TILE; ++k) gate[k] = z[2 * k], up[k] = z[2 * k + 1];
        const Floats16 value = activate<ONLY_SILU>(load(gate), load(up), activation);
        store_some(a.data + (r + i) * a.width + column / 2, value, sums.width / 2);
      } else {
        a.put(r + i, column, activate<ONLY_SILU>(left, left, activation),
              activate<ONLY_SILU>(right, right, activation), sums.width);
      }
    }
  }
};

// From dA', in which there is no routing weight yet: ds = <dA', a> of each panel, a, and dh with the weight.
struct DownEpilogue {
  static constexpr bool OF_INT8_TOO = true;
  const Node& node;
  const uint16_t* h;
  const float* weight;   // of each slot
  const int32_t* order;  // row -> slot
  RowsOut a, dh;
  float* ds;             // (panels, slots)
  int64_t slots;

  // h comes from memory here, and what is written from other caches. One core, 128 rows of 768 x 2048: 11.2 instead of
  // 12.7 ms for bf16, 7.5 instead of 9.6 for int8 (16 experts; Xeon, family 6 model 207, 2026-11-15).
  void prefetch(int64_t unit, int64_t r, Prefetches& prefetches) const {
    const bool halves = node.activation.gated && !node.activation.interleaved;
    const int64_t column = unit * PANEL * (node.activation.interleaved ? 2 : 1);
    for (int64_t c = column; c < node.width; c += node.intermediate) {
      prefetches.add(h + r * node.width + c, node.width);
      dh.prefetch(r, c, prefetches);
      if (!halves) break;
    }
    a.prefetch(r, unit * PANEL, prefetches);
  }

  template <class Sums>
  void operator()(const Job&, int64_t unit, int64_t r, int64_t rows, const Sums& sums, const Sums&) const {
    with_kind(node.activation, [&](auto only_silu) { panel<only_silu>(unit, r, rows, sums); });
  }

 private:
  template <bool ONLY_SILU, class Sums>
  void panel(int64_t unit, int64_t r, int64_t rows, const Sums& sums) const {
    const Activation& activation = node.activation;
    const int64_t I = node.intermediate, column = unit * PANEL, width = sums.width;
    const int64_t first = activation.interleaved ? 2 * column : column;
    for (int64_t row = r; row < r + rows; ++row) {
      const uint16_t* h_row = h + row * node.width + first;
      uint16_t* dh_row = dh.data + row * node.width + first;
      const float scale = weight[order[row]];
      Floats16 product[2], values[2], dgate[2], dup[2];
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const int64_t skip = half * TILE, count = width - skip;
        Floats16 gate, up = {};
        if (activation.interleaved) {
          read_interleaved(h_row + 2 * skip, count, gate, up);
        } else {
          gate = load_some(h_row + skip, count);
          if (activation.gated) up = load_some(h_row + I + skip, count);
        }
        const Slopes slopes = activate_backward<ONLY_SILU>(gate, up, activation);
        const Floats16 da = sums.at(row - r, half);
        values[half] = slopes.a;
        product[half] = da * slopes.a;
        dgate[half] = scale * da * slopes.dgate, dup[half] = scale * da * slopes.dup;
        if (activation.interleaved) write_interleaved(dh_row + 2 * skip, count, dgate[half], dup[half]);
      }
      ds[unit * slots + row] = total(product[0] + product[1]);
      a.put(row, column, values[0], values[1], width);
      if (activation.interleaved) continue;
      dh.put(row, column, dgate[0], dgate[1], width);
      if (activation.gated) dh.put(row, I + column, dup[0], dup[1], width);
    }
  }

  static void read_interleaved(const uint16_t* h, int64_t count, Floats16& gate, Floats16& up) {
    for (int64_t k = 0; k < TILE; ++k) {
      gate[k] = k < count ? widen(h[2 * k]) : 0;
      up[k] = k < count ? widen(h[2 * k + 1]) : 0;
    }
  }
  static void write_interleaved(uint16_t* dh, int64_t count, Floats16 dgate, Floats16 dup) {
    for (int64_t k = 0; k < std::min(TILE, count); ++k) {
      dh[2 * k] = round_to_bf16(dgate[k]);
      dh[2 * k + 1] = round_to_bf16(dup[k]);
    }
  }
};

}  // namespace amoeba
