// What a decode step is told of a model, a cache and a call, and how its threads wait for each other.
//
// B rows · H hidden · Q query heads · D of a head · L slots of the cache · K experts per token · V vocabulary
#pragma once
#include "pool.h"
#include "step_products.h"

namespace [[gnu::visibility("hidden")]] amoeba {

enum HeadNorm : int64_t { NO_NORM, OF_HEADS, OF_ROWS };
enum Rotation : int64_t { NO_ROTATION, HALVES, PAIRS, PAIRS_TO_HALVES };
enum Score : int64_t { SOFTMAX, SIGMOID, TOPK_SOFTMAX };
enum GroupScore : int64_t { TOP2_SUM, LARGEST };

struct StepNorm {
  const float* weight;  // null: there is none
  double eps;
};

struct StepExperts {  // the order of `CStepExperts`
  StepMatrix gate_up, down;
  int64_t intermediate, kind, gated, interleaved;
  double alpha, limit, up_shift;
};

struct StepRouter {
  StepMatrix weight;
  int64_t top_k, score, renormalize, n_group, topk_group, group_score;
  double scaling_factor;
  const float* selection_bias;
};

struct StepLayer {  // the order of `CStepLayer`
  StepNorm before_attention, before_experts;
  StepMatrix queries, keys, values, output;
  // Of latent attention: q_a, absent or before `queries`, with query_norm; keys are latent and rotated key; for each head
  // what takes a query to the latents (R, head_size - P), and what takes these to its values.
  StepMatrix low_queries, to_latents, from_latents;
  StepNorm query_norm, key_norm;
  int64_t head_norm;
  double clip, scale;
  const float *cos, *sin;  // (positions, rotated / 2)
  int64_t rotated;
  int64_t window;      // 0: none
  const float* sinks;  // (Q), may be null
  void *key_cache, *value_cache;
  int64_t cache_bf16, cache_row, cache_head;  // strides, in elements; slots are D apart
  StepRouter router;   // without a weight: no experts
  StepExperts experts, shared;  // shared: of every token; may be absent
  const float* shared_gate;     // (H), may be null
  const int64_t* slot_of;       // of streamed experts: (E), -1: in none; null: all are there
  int64_t* chosen;              // (B, K) by number, of streamed experts: what the router chose
  double residual;  // what attention and the block give is multiplied by it
};

struct StepModel {  // the order of `CStepModel`
  int64_t rows, hidden, vocabulary, query_heads, key_heads, head_size, length;
  int64_t layer_count;
  const StepLayer* layers;
  StepMatrix embedding;
  int64_t rotation;
  StepNorm norm;
  StepMatrix head;
  double embedding_scale, logits_scale;
  // Of an exact step: whether results are bf16, and, where they are, whether normed rows are rounded before they meet
  // the weight, and whether the logits and weights of routers and dequantised experts are rounded.
  int64_t half, norm_rounds_first, rounds_logits, rounds_routing, rounds_experts;
};

struct StepCall {  // the order of `CStepCall`
  const int64_t *tokens;          // (B), or null: x holds what enters the first layer
  const int64_t *position, *first;  // (B): for the rotation, and the first slot that is seen
  int64_t first_layer, last_layer;
  int64_t resumes;  // the first layer from its experts on, those that are there and were not yet
  float *x, *logits;              // (B, H); (B, V) or null
  int64_t* chosen;                // (B) or null: gets the first of the largest logits of each row
};

// Numbers [from, to) of a row of the embedding, `from` at the start of a group, times `scale`.
template <class Round>
inline void embed_row(const StepModel& m, int64_t token, int64_t from, int64_t to, float* out, const Round& round) {
  const int64_t start = token * m.embedding.stride_row;
  if (const Unpack unpack = m.embedding.kind == ROWS_BLOCKS ? unpack_of(m.embedding.coding.element) : nullptr) {
    for (int64_t i = from; i < to; i += GROUP) {
      float numbers[GROUP];
      unpack(static_cast<const uint8_t*>(m.embedding.data) + start, i, GROUP, numbers);
      for (int64_t j = 0; j < std::min<int64_t>(GROUP, to - i); ++j) out[i + j] = round(numbers[j]);
    }
  } else if (m.embedding.kind == ROWS_BF16) {
    for (int64_t i = from; i < to; ++i) out[i] = round(widen(static_cast<const uint16_t*>(m.embedding.data)[start + i]));
  } else {
    for (int64_t i = from; i < to; ++i) out[i] = round(static_cast<const float*>(m.embedding.data)[start + i]);
  }
}

// NaN counts as the largest.
inline int64_t first_of_largest(const float* x, int64_t count) {
  constexpr int64_t BLOCK = 256;
  int64_t best = 0;
  float largest = -std::numeric_limits<float>::infinity();
  for (int64_t from = 0; from < count; from += BLOCK) {
    const int64_t end = std::min(count, from + BLOCK);
    Floats most = Floats{} + largest, zeros{};
    int64_t i = from;
    for (; i + LANES <= end; i += LANES) {
      const Floats value = load<LANES>(x + i);
      most = select(value > most, value, most);
      zeros += value * 0.0f;
    }
    bool exceeds = i < end || std::isnan(total(zeros));
    for (int lane = 0; lane < LANES; ++lane) exceeds |= most[lane] > largest;
    if (!exceeds) continue;
    for (i = from; i < end; ++i) {
      if (std::isnan(x[i])) return i;
      if (x[i] > largest) largest = x[i], best = i;
    }
  }
  return best;
}

inline void choose_largest(const StepCall& call, int64_t rows, int64_t vocabulary) {
  if (!call.chosen || !call.logits) return;
  for (int64_t r = 0; r < rows; ++r) call.chosen[r] = first_of_largest(call.logits + r * vocabulary, vocabulary);
}

constexpr int64_t UNIT = PANEL;  // results that are divided over the threads together
constexpr int64_t MOST_HEADS = 4;  // of one group that read the same keys at once

struct Barrier {
  alignas(64) std::atomic<int> waiting{0};
  alignas(64) std::atomic<int> turn{0};

  void wait(int team) {
    const int mine = turn.load(std::memory_order_relaxed);
    if (waiting.fetch_add(1, std::memory_order_acq_rel) == team - 1) {
      waiting.store(0, std::memory_order_relaxed);
      turn.store(mine + 1, std::memory_order_release);
      return;
    }
    for (int64_t spins = 0; turn.load(std::memory_order_acquire) == mine; ++spins)
      spins < 4000 ? relax() : std::this_thread::yield();
  }
};

}  // namespace amoeba
