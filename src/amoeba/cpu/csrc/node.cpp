// The C interface of the worker pool and of one NUMA node's passes; the caller checked its tensors.
#include "checksum.h"
#include "factors.h"
#include "passes.h"

using namespace amoeba;

#pragma GCC visibility push(default)  // also of those that take what is hidden
extern "C" {

int amoeba_prefer_memory_of(int node) { return prefer_memory_of(node); }
int amoeba_move_memory_to(int node, void* data, int64_t bytes) { return move_memory_to(node, data, bytes); }

void* amoeba_pool_new(int threads, const int32_t* cores, int memory_node) {
  return new Pool(threads, cores, memory_node);
}
void* amoeba_pool_borrow(Parallel parallel, int threads) { return new Pool(parallel, threads); }
void amoeba_pool_borrow_as_many(void* pool, int threads) { static_cast<Pool*>(pool)->borrow(threads); }
void amoeba_pool_delete(void* pool) { delete static_cast<Pool*>(pool); }

void amoeba_node_forward(void* pool, const Node* node, const Batch* batch, float* y) {
  Pool& workers = *static_cast<Pool*>(pool);
  const std::lock_guard<std::mutex> lock(workers.busy);
  Run(workers, *node, *batch).forward(y);
}

// y of the rows (bf16) that each slot points to, which is -1 for none; only sizes and weights of the batch are read.
void amoeba_node_combine(void* pool, const Node* node, const Batch* batch, int32_t* slot_row, const uint16_t* rows,
                         float* y) {
  Pool& workers = *static_cast<Pool*>(pool);
  const std::lock_guard<std::mutex> lock(workers.busy);
  Run(workers, *node, *batch).combine_rows(slot_row, rows, y);
}

void amoeba_node_backward(void* pool, const Node* node, const Batch* batch, const Gradients* gradients) {
  Pool& workers = *static_cast<Pool*>(pool);
  const std::lock_guard<std::mutex> lock(workers.busy);
  Run(workers, *node, *batch).backward(*gradients);
}

// Scratch of the pool; pointers of batch that are not null are memory of the caller's.
int64_t amoeba_node_workspace(const Node* node, const Batch* batch, int backward) {
  const auto bytes = backward ? bytes_of<BackwardMemory> : bytes_of<ForwardMemory>;
  return int64_t(whole_pages(bytes(*node, *batch)));
}

// What one thread's own buffers grow to at most in passes of this many slots.
int64_t amoeba_node_thread_bytes(const Node* node, int64_t slots, int backward) {
  const Node& n = *node;
  const int64_t padded = round_up(slots, TILE), ranks = std::max(n.low_width(), n.down_low_width());
  int64_t rows = 0;
  for (const int64_t depth : {n.hidden, n.intermediate, backward ? n.width : 0}) {
    const int64_t tiles = tiles_of(depth, n.int8 ? Int8::PER_WORD : Bf16::PER_WORD);
    rows = std::max(rows, std::min(rows_of_job(std::max<int64_t>(1, tiles)), padded) * tiles * TILE);
  }
  size_t bytes = whole_pages(rows * sizeof(uint32_t)) + whole_pages(PARTIAL_BYTES);
  if (ranks) bytes += whole_pages(std::min(ROW_BLOCK, padded) * ranks * sizeof(uint16_t));
  if (ranks && backward) bytes += whole_pages((padded + PANEL) * ranks * sizeof(uint16_t)) + whole_pages(WIDE_BYTES);
  return int64_t(bytes);
}

// Into the eight matrices of the node that have data.
void amoeba_node_pack_factors(void* pool, const Node* node, const Factors* factors) {
  Pool& workers = *static_cast<Pool*>(pool);
  const std::lock_guard<std::mutex> lock(workers.busy);
  workers.run(2 * node->experts, [&](int64_t i) {
    if (i % 2 ? node->down_a.data != nullptr : node->up_a.data != nullptr)
      (i % 2 ? pack_down_factors : pack_up_factors)(*node, *factors, i / 2);
  });
}

// sums[factor][expert]. data[factor] holds bytes[factor] per expert, without gaps.
void amoeba_factor_checksums(void* pool, int64_t factors, int64_t experts, const char* const* data,
                             const int64_t* bytes, uint64_t* sums) {
  Pool& workers = *static_cast<Pool*>(pool);
  const std::lock_guard<std::mutex> lock(workers.busy);
  workers.run(factors * experts, [&](int64_t i) {
    const int64_t f = i / experts, e = i % experts;
    sums[i] = checksum(data[f] + e * bytes[f], bytes[f]);
  });
}

// Whether the experts that a slot names have these sums.
int amoeba_factors_have(void* pool, int64_t factors, int64_t experts, const char* const* data, const int64_t* bytes,
                        const int64_t* slots, int64_t slot_count, const uint64_t* sums) {
  Pool& workers = *static_cast<Pool*>(pool);
  const std::lock_guard<std::mutex> lock(workers.busy);
  std::vector<int64_t> named;
  std::vector<bool> met(size_t(experts), false);
  for (int64_t s = 0; s < slot_count; ++s) {
    const int64_t e = slots[s];
    if (e < 0 || e >= experts || met[size_t(e)]) continue;
    met[size_t(e)] = true;
    named.push_back(e);
  }
  std::atomic<bool> same{true};
  workers.run(factors * int64_t(named.size()), [&](int64_t i) {
    const int64_t f = i % factors, e = named[size_t(i / factors)];
    if (checksum(data[f] + e * bytes[f], bytes[f]) != sums[f * experts + e]) same.store(false, std::memory_order_relaxed);
  });
  return same.load(std::memory_order_relaxed);
}

}  // extern "C"
#pragma GCC visibility pop
