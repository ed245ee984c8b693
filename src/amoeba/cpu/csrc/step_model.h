// What a decode step is told of a model, a cache and a call, and what step.cpp and step_exact.cpp do alike: how threads
// divide the work and wait for each other, scores of attention, the choice of experts.
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

// Calls run(number of the thread, how many there are) in each thread.
template <class Run>
inline void in_threads([[maybe_unused]] int threads, const Run& run) {
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1)
  run(omp_get_thread_num(), omp_get_num_threads());
#else
  run(0, 1);
#endif
}

// A thread's share of `count` results, in whole units.
template <class Visit>
inline void each_unit(int64_t count, int self, int team, const Visit& visit) {
  const int64_t units = ceil_div(count, UNIT), from = units * self / team * UNIT;
  const int64_t to = std::min(count, units * (self + 1) / team * UNIT);
  if (from < to) visit(from, to);
}

// A thread's share of queries, keys and values together: visit(which, from, to).
template <class Visit>
inline void each_projected(const StepMatrix* const* parts, int self, int team, const Visit& visit) {
  int64_t units[4] = {0};
  for (int i = 0; i < 3; ++i) units[i + 1] = units[i] + ceil_div(parts[i]->out, UNIT);
  const int64_t begin = units[3] * self / team, end = units[3] * (self + 1) / team;
  for (int i = 0; i < 3; ++i) {
    const int64_t from = std::max(begin, units[i]) - units[i], to = std::min(end, units[i + 1]) - units[i];
    if (from < to) visit(i, from * UNIT, std::min(to * UNIT, parts[i]->out));
  }
}

// Heads of a group that a thread computes at once: fewer where some threads would have nothing to do.
inline int64_t heads_at_once(int64_t of_group, int64_t groups, int team) {
  int64_t at_once = std::min(of_group, MOST_HEADS);
  while (at_once > 1 && groups * ceil_div(of_group, at_once) < 2 * team) --at_once;
  return at_once;
}

// A thread's share of attention: visit(row, group, its first head, heads, whether it writes the token's key).
template <class Visit>
inline void each_head_group(const StepModel& m, int self, int team, const Visit& visit) {
  const int64_t of_group = m.query_heads / m.key_heads, at_once = heads_at_once(of_group, m.rows * m.key_heads, team);
  const int64_t parts = ceil_div(of_group, at_once), tasks = m.rows * m.key_heads * parts;
  for (int64_t task = self; task < tasks; task += team) {
    const int64_t r = task / parts / m.key_heads, g = task / parts % m.key_heads, part = task % parts;
    visit(r, g, g * of_group + part * at_once, std::min(at_once, of_group - part * at_once), part == 0);
  }
}

// The first slot that a row's token looks at.
inline int64_t oldest_seen(const StepLayer& layer, const StepCall& call, int64_t r) {
  const int64_t slot = call.first[r] + call.position[r];
  return layer.window ? std::max(call.first[r], slot - layer.window + 1) : call.first[r];
}

// <key, query> of the cached keys and the token's own, for each head, or added to what there is.
template <bool ADD, class Number>
inline void score(const Number* keys, const Number* own_key, int64_t seen, int64_t size, const float* const* queries,
                  int64_t heads, float* scores, int64_t room) {
  float found[WEIGHT_ROWS][4];
  with_count(heads, [&](auto count) {
    const auto take = [&](int64_t s, int i) {
      for (int h = 0; h < count; ++h) {
        float& at = scores[h * room + s + i];
        at = ADD ? at + found[i][h] : found[i][h];
      }
    };
    int64_t s = 0;
    const Number* from = keys;
    for (; s + WEIGHT_ROWS <= seen; s += WEIGHT_ROWS) {
      const Number* next = s + 2 * WEIGHT_ROWS <= seen ? from + WEIGHT_ROWS * size : from;
      dots<WEIGHT_ROWS, count>(from, next, size, queries, size, found);
      from = from + WEIGHT_ROWS * size;
      for (int i = 0; i < WEIGHT_ROWS; ++i) take(s, i);
    }
    for (; s <= seen; ++s, from += size) {
      const Number* each = s == seen ? own_key : from;
      dots<1, count>(each, each, size, queries, size, found);
      take(s, 0);
    }
  });
}

// The first of the largest that are not taken.
inline int64_t largest_left(const float* rank, int64_t count, const std::vector<bool>& taken) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i)
    if (!taken[size_t(i)] && (best < 0 || rank[i] > rank[best])) best = i;
  return best;
}

// Only experts of the best groups keep their rank. group: room for a number of each group.
inline void keep_best_groups(const StepRouter& router, float* rank, float* group) {
  if (router.n_group <= 1) return;
  constexpr float NEVER = -std::numeric_limits<float>::infinity();
  const int64_t experts = router.weight.out, size = experts / router.n_group;
  for (int64_t n = 0; n < router.n_group; ++n) {
    float first = NEVER, second = NEVER;
    for (int64_t e = n * size; e < (n + 1) * size; ++e) {
      if (rank[e] > first) second = first, first = rank[e];
      else second = std::max(second, rank[e]);
    }
    group[n] = router.group_score == TOP2_SUM ? first + second : first;
  }
  std::vector<bool> kept(size_t(router.n_group), false);
  for (int64_t i = 0; i < router.topk_group; ++i) kept[size_t(largest_left(group, router.n_group, kept))] = true;
  for (int64_t e = 0; e < experts; ++e)
    if (!kept[size_t(e / size)]) rank[e] = NEVER;
}

// Calls visit(first slot, how many have the same expert, that one's matrices, where their activations begin), of which
// each slot takes width(matrices).
template <class Slots, class Width, class Visit>
inline void each_expert(const StepLayer& layer, const Slots& slots, const Width& width, const Visit& visit) {
  int64_t start = 0;
  for (size_t i = 0, next; i < slots.size(); i = next) {
    for (next = i + 1; next < slots.size() && slots[next].expert == slots[i].expert;) ++next;
    const StepExperts& experts = slots[i].expert < 0 ? layer.shared : layer.experts;
    visit(i, int64_t(next - i), experts, start);
    start += int64_t(next - i) * width(experts);
  }
}

// A thread's share of all experts' units of activations: the same, and from which of its units to which.
template <class Slots, class Width, class Visit>
inline void each_expert_unit(const StepLayer& layer, const Slots& slots, const Width& width, int self, int team,
                             const Visit& visit) {
  int64_t units = 0, passed = 0;
  each_expert(layer, slots, width, [&](size_t, int64_t, const StepExperts& experts, int64_t) {
    units += ceil_div(experts.intermediate, UNIT);
  });
  const int64_t begin = units * self / team, end = units * (self + 1) / team;
  each_expert(layer, slots, width, [&](size_t first, int64_t count, const StepExperts& experts, int64_t start) {
    const int64_t mine = ceil_div(experts.intermediate, UNIT);
    const int64_t from = std::max(begin, passed) - passed, to = std::min(end, passed + mine) - passed;
    passed += mine;
    if (from < to) visit(first, count, experts, start, from, to);
  });
}

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
