// The C interface of the worker pool and of one node's passes; the caller checked its tensors.
#include "pack.h"
#include "passes.h"

namespace {

struct Factor {  // (E, rows, columns) at any strides, bf16 or fp32; data is null where there is none
  const void* data;
  int32_t is_float;
  int64_t stride_e, stride_row, stride_column;

  float at(int64_t e, int64_t row, int64_t column) const {
    const int64_t i = e * stride_e + row * stride_row + column * stride_column;
    return is_float ? static_cast<const float*>(data)[i] : widen(static_cast<const uint16_t*>(data)[i]);
  }
};

struct Factors {
  Factor gate_a, gate_b, up_a, up_b, down_a, down_b;
};

// gate's A above up's: (gate_rank + up_rank, H)
float joined_a(const Node& n, const Factors& f, int64_t e, int64_t rank, int64_t h) {
  return rank < n.gate_rank ? f.gate_a.at(e, rank, h) : f.up_a.at(e, rank - n.gate_rank, h);
}
// gate's B and up's B on their own rows and ranks, zeros elsewhere: (J, gate_rank + up_rank)
float joined_b(const Node& n, const Factors& f, int64_t e, int64_t j, int64_t rank) {
  const bool interleaved = n.activation.interleaved;
  const bool is_gate = n.activation.gated && (interleaved ? j % 2 == 0 : j < n.intermediate);
  const int64_t i = interleaved ? j / 2 : j % n.intermediate;
  if (is_gate != (rank < n.gate_rank)) return 0;
  return is_gate ? f.gate_b.at(e, i, rank) : f.up_b.at(e, i, rank - n.gate_rank);
}

template <class Value>
void pack_factor(const PackedMatrix& matrix, int64_t expert, const Value& value) {
  auto* packed = static_cast<uint16_t*>(const_cast<void*>(matrix.data));
  packed += expert * packed_elements<Bf16>(matrix.columns, matrix.depth);
  pack_expert<Bf16>(matrix.columns, matrix.depth, packed,
                    [&](int64_t n, int64_t k) { return round_to_bf16(value(n, k)); });
}

}  // namespace

extern "C" {

void* amoeba_pool_new(int threads, const int32_t* cores) { return new Pool(threads, cores); }
void amoeba_pool_delete(void* pool) { delete static_cast<Pool*>(pool); }
void amoeba_pool_phase_seconds(void* pool, double* out) {
  std::copy_n(static_cast<Pool*>(pool)->phase_seconds, Pool::PHASES, out);
}

void amoeba_node_forward(void* pool, const Node* node, const Batch* batch, float* y) {
  Pool& workers = *static_cast<Pool*>(pool);
  const std::lock_guard<std::mutex> lock(workers.busy);
  Run(workers, *node, *batch).forward(y);
}

void amoeba_node_backward(void* pool, const Node* node, const Batch* batch, const Gradients* gradients) {
  Pool& workers = *static_cast<Pool*>(pool);
  const std::lock_guard<std::mutex> lock(workers.busy);
  Run(workers, *node, *batch).backward(*gradients);
}

// Scratch of the pool; pointers of batch that are not null are memory of the caller's.
int64_t amoeba_node_workspace(const Node* node, const Batch* batch, int backward) {
  return int64_t(whole_pages(backward ? bytes_of<BackwardMemory>(*node, *batch) : bytes_of<ForwardMemory>(*node, *batch)));
}

// Into the eight matrices of the node that have data.
void amoeba_node_pack_factors(void* pool, const Node* node, const Factors* factors) {
  Pool& workers = *static_cast<Pool*>(pool);
  const std::lock_guard<std::mutex> lock(workers.busy);
  const Node& n = *node;
  const Factors& f = *factors;
  constexpr int64_t MATRICES = 8;
  workers.run(n.experts * MATRICES, [&](int64_t i) {
    const int64_t e = i / MATRICES;
    switch (n.up_a.data || i % MATRICES > 3 ? i % MATRICES : -1) {
      case 0: return pack_factor(n.up_a, e, [&](int64_t r, int64_t h) { return joined_a(n, f, e, r, h); });
      case 1: return pack_factor(n.up_b, e, [&](int64_t j, int64_t r) { return joined_b(n, f, e, j, r); });
      case 2: return pack_factor(n.up_b_transposed, e, [&](int64_t r, int64_t j) { return joined_b(n, f, e, j, r); });
      case 3: return pack_factor(n.up_a_transposed, e, [&](int64_t h, int64_t r) { return joined_a(n, f, e, r, h); });
    }
    switch (n.down_a.data ? i % MATRICES : -1) {
      case 4: return pack_factor(n.down_a, e, [&](int64_t r, int64_t c) { return f.down_a.at(e, r, c); });
      case 5: return pack_factor(n.down_b, e, [&](int64_t h, int64_t r) { return f.down_b.at(e, h, r); });
      case 6: return pack_factor(n.down_b_transposed, e, [&](int64_t r, int64_t h) { return f.down_b.at(e, h, r); });
      case 7: return pack_factor(n.down_a_transposed, e, [&](int64_t c, int64_t r) { return f.down_a.at(e, r, c); });
    }
  });
}

}  // extern "C"
