// A decode step with the bits of exact mode: those that transformers' modules get with the operators of ops/exact.py.
//
// B rows · H hidden · Q query heads · G key and value heads · D of a head · K experts per token
//
// The phases of step.cpp, without what those have to be fast elsewhere. Each operator of the modules has its own line
// here: products have the order of core_exact.cpp, keys are added up one after the other, experts in the order of the
// router's choice, and what a module would give in bf16 is rounded (`of_model`). `apart` keeps the compiler from
// contracting a product and a sum that are two operators.
#include "core_codes.h"
#include "core_products.h"
#include "exact.h"
#include "step_model.h"

using namespace amoeba;

namespace {

#if defined(__SSE2__)
inline float apart(float v) { asm("" : "+x"(v)); return v; }
#elif defined(__aarch64__)
inline float apart(float v) { asm("" : "+w"(v)); return v; }
#else
inline float apart(float v) { asm("" : "+m"(v)); return v; }
#endif

struct ExactSlot {
  int64_t expert, row, place;  // place: of the row, then of the router's choice
  float weight;
};

struct ExactPrivate {
  Buffer<float> normed, squares, head_values, scores, low, gathered, products, h, choice;
  Buffer<uint16_t> halves;
  std::vector<ExactSlot> slots;
  std::vector<const float*> rows;
};

class ExactStepper {
 public:
  ExactStepper(const StepModel& model, int threads) : m(model), threads_(threads), own_(size_t(threads)) {
    int64_t activations = 1, results = 0, most_experts = 1;
    for (int64_t i = 0; i < m.layer_count; ++i) {
      const StepLayer& layer = m.layers[i];
      const int64_t top_k = layer.router.weight.data ? layer.router.top_k : 0;
      activations = std::max(activations, m.rows * (top_k * layer.experts.intermediate + layer.shared.intermediate));
      results = std::max(results, m.rows * (top_k + 1));
      most_experts = std::max(most_experts, layer.router.weight.out);
      keys_ = std::max(keys_, layer.keys.out);
    }
    queries_ = m.query_heads * m.head_size;
    x_.resize(size_t(m.rows * m.hidden));
    projected_.resize(size_t(m.rows * (queries_ + 2 * keys_)));
    attended_.resize(size_t(m.rows * queries_));
    logits_.resize(size_t(m.rows * most_experts));
    activations_.resize(size_t(activations));
    results_.resize(size_t(results * m.hidden));
  }

  void run(const StepCall& call) {
    float* x = call.x ? call.x : x_.data();
    in_threads(threads_, [&](int self, int team) { thread(call, x, self, team); });
    choose_largest(call, m.rows, m.vocabulary);
  }

 private:
  float of_model(float value) const { return m.half ? widen(round_to_bf16(value)) : value; }

  void thread(const StepCall& call, float* x, int self, int team) {
    ExactPrivate& own = own_[size_t(self)];
    if (call.tokens) embed(call, x, self, team);
    barrier_.wait(team);
    for (int64_t i = call.first_layer; i < call.last_layer; ++i) {
      const StepLayer& layer = m.layers[i];
      project(layer, x, own, self, team);
      barrier_.wait(team);
      attend(layer, call, own, self, team);
      barrier_.wait(team);
      rows_at(attended_.data(), queries_, m.rows, own);
      each_unit(m.hidden, self, team, [&](int64_t from, int64_t to) {
        linear(layer.output, from, to, m.rows, own,
               [&](int64_t j, int64_t r, float value) { add(layer, x[r * m.hidden + j], value); });
      });
      barrier_.wait(team);
      norm_rows(x, layer.before_experts, own);
      if (layer.router.weight.data) {
        const StepMatrix& weight = layer.router.weight;
        each_unit(weight.out, self, team, [&](int64_t from, int64_t to) {
          const auto take = [&](int64_t j, int64_t r, float value) { logits_[size_t(r * weight.out + j)] = value; };
          if (m.rounds_logits) return linear(weight, from, to, m.rows, own, take);
          products(weight, 0, from, to, own.rows.data(), m.rows, own, [&](int64_t j, int64_t r, float value) {
            take(j, r, weight.bias ? apart(value) + bias_of(weight, 0, j) : value);
          });
        });
        barrier_.wait(team);
      }
      choose(layer, own);
      up(layer, own, self, team);
      barrier_.wait(team);
      down(layer, x, own, self, team);
      barrier_.wait(team);
    }
    if (call.logits) {
      norm_rows(x, m.norm, own);
      each_unit(m.head.out, self, team, [&](int64_t from, int64_t to) {
        linear(m.head, from, to, m.rows, own,
               [&](int64_t j, int64_t r, float value) { call.logits[r * m.vocabulary + j] = value; });
      });
    }
  }

  void embed(const StepCall& call, float* x, int self, int team) const {
    const float scale = float(m.embedding_scale);
    each_unit(m.hidden, self, team, [&](int64_t from, int64_t to) {
      for (int64_t r = 0; r < m.rows; ++r)
        embed_row(m, call.tokens[r], from, to, x + r * m.hidden,
                  [&](float value) { return scale == 1.0f ? value : of_model(value * scale); });
    });
  }

  void add(const StepLayer& layer, float& x, float value) const {
    if (layer.residual != 1.0) value = of_model(value * float(layer.residual));
    x = of_model(x + apart(value));
  }

  // ------------------------------------------------------------------------------------------------------- norms

  float norm_factor(const float* x, int64_t n, const StepNorm& norm, ExactPrivate& own) const {
    float* squares = own.squares.get(size_t(n));
    for (int64_t i = 0; i < n; ++i) squares[i] = x[i] * x[i];
    return 1.0f / std::sqrt(apart(exact_sum(squares, n) / float(n)) + float(norm.eps));
  }

  void scale_normed(const float* x, int64_t n, float factor, const float* weight, float* out) const {
    if (!m.half) {
      for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor * weight[i];
      return;
    }
    for (int64_t i = 0; i < n; ++i) {
      const float normed = x[i] * factor;
      out[i] = of_model((m.norm_rounds_first ? of_model(normed) : normed) * weight[i]);
    }
  }

  // The rows that products read from now on.
  void norm_rows(const float* x, const StepNorm& norm, ExactPrivate& own) const {
    float* out = own.normed.get(size_t(m.rows * m.hidden));
    for (int64_t r = 0; r < m.rows; ++r) {
      const float* row = x + r * m.hidden;
      scale_normed(row, m.hidden, norm_factor(row, m.hidden, norm, own), norm.weight, out + r * m.hidden);
    }
    rows_at(out, m.hidden, m.rows, own);
  }

  static void rows_at(const float* x, int64_t stride, int64_t count, ExactPrivate& own) {
    own.rows.resize(size_t(count));
    for (int64_t r = 0; r < count; ++r) own.rows[size_t(r)] = x + r * stride;
  }

  // ---------------------------------------------------------------------------------------------------- products

  // Calls take(j, r, <weight row j of expert e, row r>) for j in [from, to), in fp32.
  template <class Take>
  void products(const StepMatrix& w, int64_t e, int64_t from, int64_t to, const float* const* rows, int64_t count,
                ExactPrivate& own, const Take& take) const {
    switch (w.kind) {
      case ROWS_F32: return by_rows(plain<float>(w), e, from, to, rows, count, w.in, take);
      case ROWS_BF16: return by_rows(plain<uint16_t>(w), e, from, to, rows, count, w.in, take);
      case COLUMNS_F32: return by_columns<float>(w, e, from, to, rows, count, own, take);
      case COLUMNS_BF16: return by_columns<uint16_t>(w, e, from, to, rows, count, own, take);
      default: return by_codes(w, e, from, to, rows, count, own, take);
    }
  }

  template <class Weight>
  static PlainMatrix<Weight> plain(const StepMatrix& w) {
    return {static_cast<const Weight*>(w.data), w.stride_e, w.stride_row};
  }

  // Some weights at a time, so that all rows meet them while they are near.
  template <class Matrix, class Take>
  static void by_rows(const Matrix& w, int64_t e, int64_t from, int64_t to, const float* const* rows, int64_t count,
                      int64_t depth, const Take& take) {
    constexpr int64_t AT_ONCE = 8 * WEIGHT_ROWS;
    for (int64_t j = from; j < to; j += AT_ONCE) {
      const int64_t end = std::min(to, j + AT_ONCE), after = end < to ? end : j;
      for (int64_t r = 0; r < count; r += 4) {
        const int64_t some = std::min<int64_t>(4, count - r);
        each_weight_row(w, e, j, end, r + 4 < count ? j : after, some, rows + r, depth,
                        [&](int64_t n, const float* sums) {
                          for (int64_t i = 0; i < some; ++i) take(n, r + i, sums[i]);
                        });
      }
    }
  }

  template <class Weight, class Take>
  static void by_columns(const StepMatrix& w, int64_t e, int64_t from, int64_t to, const float* const* rows,
                         int64_t count, ExactPrivate& own, const Take& take) {
    const int64_t width = to - from;
    float *gathered = own.gathered.get(size_t(count * w.in)), *out = own.products.get(size_t(count * width));
    for (int64_t r = 0; r < count; ++r) std::copy_n(rows[r], w.in, gathered + r * w.in);
    const Weight* matrix = static_cast<const Weight*>(w.data) + e * w.stride_e + from;
    const ExpertProduct<Weight> all{{gathered, w.in, nullptr}, matrix, w.stride_row, 1, nullptr, out, width, w.in};
    rows_times_vector_weights(all, 0, count, 0, width);
    for (int64_t r = 0; r < count; ++r)
      for (int64_t j = 0; j < width; ++j) take(from + j, r, out[r * width + j]);
  }

  // A few rows of codes become numbers, as exact mode dequantises them.
  template <class Take>
  void by_codes(const StepMatrix& w, int64_t e, int64_t from, int64_t to, const float* const* rows, int64_t count,
                ExactPrivate& own, const Take& take) const {
    constexpr int64_t AT_ONCE = WEIGHT_ROWS;
    for (int64_t j = from; j < to; j += AT_ONCE) {
      const int64_t some = std::min(AT_ONCE, to - j);
      const auto met = [&](int64_t n, int64_t r, float value) { take(j + n, r, value); };
      if (m.rounds_experts) {
        uint16_t* numbers = own.halves.get(size_t(AT_ONCE * w.in));
        dequantise_rows(w, e, j, some, numbers);
        by_rows(PlainMatrix<uint16_t>{numbers, 0, w.in}, 0, 0, some, rows, count, w.in, met);
      } else {
        float* numbers = own.products.get(size_t(AT_ONCE * w.in));
        dequantise_rows(w, e, j, some, numbers);
        by_rows(PlainMatrix<float>{numbers, 0, w.in}, 0, 0, some, rows, count, w.in, met);
      }
    }
  }

  template <class Number>
  static void dequantise_rows(const StepMatrix& w, int64_t e, int64_t first, int64_t count, Number* out) {
    Coding coding = w.coding;
    const auto* codes = static_cast<const uint8_t*>(w.data) + e * w.stride_e;
    with_element(coding.element, [&](auto element) {
      dequantise_some<decltype(element)>(codes, w.stride_row, coding, e, first, first + count, w.in, out);
    });
  }

  // A x of expert e, of each row `width` numbers; null without factors.
  const float* low_rank(const StepMatrix& w, int64_t e, const float* const* rows, int64_t count,
                        ExactPrivate& own) const {
    if (!w.rank) return nullptr;
    const int64_t width = w.rank * std::max<int64_t>(1, w.lora_parts);
    const PlainMatrix<float> a{w.lora_a, width * w.in, w.in};
    float* low = own.low.get(size_t(count * width));
    const float scale = w.lora_parts ? float(w.lora_scale) : 1.0f;
    const bool half = w.lora_parts ? m.half : w.lora_half;
    by_rows(a, e, 0, width, rows, count, w.in, [&](int64_t j, int64_t r, float value) {
      value = rounded_if(half, value);
      low[r * width + j] = scale == 1.0f ? value : rounded_if(half, value * scale);
    });
    return low;
  }

  static float rounded_if(bool half, float value) { return half ? widen(round_to_bf16(value)) : value; }

  // What the factors add to row j of expert e, before it is rounded with what it is added to. part: 1 for up's A.
  float low_rank_row(const StepMatrix& w, int64_t e, int64_t j, int64_t part, const float* low, int64_t r) const {
    const float* mine = low + r * w.rank * std::max<int64_t>(1, w.lora_parts) + part * w.rank;
    const float* b = w.lora_b + (e * w.out + j) * w.rank;
    float sum[1][4];
    dots<1, 1>(b, b, w.rank, &mine, w.rank, sum);
    return sum[0][0];
  }

  static float bias_of(const StepMatrix& w, int64_t e, int64_t j) {
    const int64_t at = e * w.bias_stride + j;
    return w.bias_bf16 ? widen(static_cast<const uint16_t*>(w.bias)[at]) : static_cast<const float*>(w.bias)[at];
  }

  // A linear layer of all rows, perhaps one that PEFT adapts.
  template <class Take>
  void linear(const StepMatrix& w, int64_t from, int64_t to, int64_t count, ExactPrivate& own, const Take& take) const {
    const float* const* rows = own.rows.data();
    const float* low = low_rank(w, 0, rows, count, own);
    products(w, 0, from, to, rows, count, own, [&](int64_t j, int64_t r, float value) {
      value = of_model(w.bias ? apart(value) + bias_of(w, 0, j) : value);
      if (low) {
        float more = rounded_if(w.lora_half, low_rank_row(w, 0, j, 0, low, r));
        more = rounded_if(w.lora_half, more * float(w.lora_scale));
        value = of_model(value + apart(more));
      }
      take(j, r, value);
    });
  }

  // --------------------------------------------------------------------------------------------------- attention

  void project(const StepLayer& layer, const float* x, ExactPrivate& own, int self, int team) {
    norm_rows(x, layer.before_attention, own);
    const StepMatrix* parts[3] = {&layer.queries, &layer.keys, &layer.values};
    const int64_t stride = queries_ + 2 * keys_, starts[3] = {0, queries_, queries_ + keys_};
    each_projected(parts, self, team, [&](int i, int64_t from, int64_t to) {
      linear(*parts[i], from, to, m.rows, own,
             [&](int64_t j, int64_t r, float value) { projected_[size_t(r * stride + starts[i] + j)] = value; });
    });
  }

  // One head: normed, rotated. all: of the row, for a norm over it.
  void finish_head(const StepLayer& layer, const StepNorm& norm, const float* all, int64_t width, int64_t head,
                   int64_t position, ExactPrivate& own, float* out) const {
    const int64_t size = m.head_size;
    const float* in = all + head * size;
    if (layer.head_norm == OF_HEADS) {
      scale_normed(in, size, norm_factor(in, size, norm, own), norm.weight, out);
    } else if (layer.head_norm == OF_ROWS) {
      scale_normed(in, size, norm_factor(all, width, norm, own), norm.weight + head * size, out);
    } else {
      std::copy(in, in + size, out);
    }
    const int64_t half = layer.rotated / 2;
    const float *cos = layer.cos + position * half, *sin = layer.sin + position * half;
    const bool pairs = m.rotation == PAIRS;
    for (int64_t i = 0; i < (m.rotation ? half : 0); ++i) {
      float &first = out[pairs ? 2 * i : i], &second = out[pairs ? 2 * i + 1 : i + half];
      const float a = first, b = second;
      first = of_model(of_model(apart(a * cos[i])) - of_model(apart(b * sin[i])));
      second = of_model(of_model(apart(b * cos[i])) + of_model(apart(a * sin[i])));
    }
  }

  void attend(const StepLayer& layer, const StepCall& call, ExactPrivate& own, int self, int team) {
    each_head_group(m, self, team, [&](auto... where) {
      layer.cache_bf16 ? attend_heads<uint16_t>(layer, call, own, where...)
                       : attend_heads<float>(layer, call, own, where...);
    });
  }

  static void keep(float value, float& place) { place = value; }
  static void keep(float value, uint16_t& place) { place = round_to_bf16(value); }

  template <class Number>
  void attend_heads(const StepLayer& layer, const StepCall& call, ExactPrivate& own, int64_t r, int64_t g, int64_t head,
                    int64_t heads, bool writes) {
    const int64_t size = m.head_size, stride = queries_ + 2 * keys_, slot = call.first[r] + call.position[r];
    const int64_t oldest = oldest_seen(layer, call, r), seen = slot - oldest;  // before the token's own
    const int64_t room = round_up(seen + 1, 16);
    const float* row = projected_.data() + r * stride;
    float* values = own.head_values.get(size_t((MOST_HEADS + 3) * size));
    const float* queries[MOST_HEADS];
    for (int64_t i = 0; i < heads; ++i) {
      finish_head(layer, layer.query_norm, row, queries_, head + i, call.position[r], own, values + i * size);
      queries[i] = values + i * size;
    }
    float* key = values + MOST_HEADS * size;
    finish_head(layer, layer.key_norm, row + queries_, keys_, g, call.position[r], own, key);
    const float* value = row + queries_ + keys_ + g * size;
    auto *own_key = reinterpret_cast<Number*>(key + size), *own_value = reinterpret_cast<Number*>(key + 2 * size);
    for (int64_t i = 0; i < size; ++i) keep(key[i], own_key[i]), keep(value[i], own_value[i]);
    const int64_t start = r * layer.cache_row + g * layer.cache_head;
    auto *keys = static_cast<Number*>(layer.key_cache) + start, *cached = static_cast<Number*>(layer.value_cache) + start;
    if (writes) {
      std::copy_n(own_key, size, keys + slot * size);
      std::copy_n(own_value, size, cached + slot * size);
    }
    float* scores = own.scores.get(size_t(MOST_HEADS * room));
    score<false>(keys + oldest * size, own_key, seen, size, queries, heads, scores, room);
    for (int64_t h = 0; h < heads; ++h) {
      float* mine = scores + h * room;
      const float sink = layer.sinks ? layer.sinks[head + h] : 0;
      float most = layer.sinks ? sink : -std::numeric_limits<float>::infinity();
      for (int64_t s = 0; s <= seen; ++s) {
        mine[s] *= float(layer.scale);
        most = std::max(most, mine[s]);
      }
      for (int64_t s = 0; s <= seen; ++s) mine[s] -= most;
      exact_values(EXACT_EXP, mine, seen + 1, mine);
      float of_sink[1] = {sink - most};
      if (layer.sinks) exact_values(EXACT_EXP, of_sink, 1, of_sink);
      weigh(mine, layer.sinks ? of_sink : nullptr, cached + oldest * size, own_value, seen, size,
            attended_.data() + r * queries_ + (head + h) * size);
    }
  }

  // out = (sum of share . value, one key after the other) / (sum of the shares)
  template <class Number>
  void weigh(const float* share, const float* of_sink, const Number* cached, const Number* own_value, int64_t seen,
             int64_t size, float* out) const {
    constexpr int AT_ONCE = 4;
    float all = 0;
    for (int64_t s = 0; s <= seen; ++s) all += share[s];
    if (of_sink) all += *of_sink;
    if (all == 0) all = 1;
    int64_t i = 0;
    for (; i + AT_ONCE * LANES <= size; i += AT_ONCE * LANES)
      weigh_some<AT_ONCE>(share, cached + i, own_value + i, seen, size, out + i);
    for (; i + LANES <= size; i += LANES) weigh_some<1>(share, cached + i, own_value + i, seen, size, out + i);
    for (; i < size; ++i) {
      float sum = 0;
      for (int64_t s = 0; s <= seen; ++s) sum += share[s] * widen(s == seen ? own_value[i] : cached[s * size + i]);
      out[i] = sum;
    }
    for (i = 0; i < size; ++i) out[i] = of_model(out[i] / all);
  }
  template <int COUNT, class Number>
  static void weigh_some(const float* share, const Number* cached, const Number* own_value, int64_t seen, int64_t size,
                         float* out) {
    Floats sum[COUNT] = {};
    for (int64_t s = 0; s <= seen; ++s) {
      const Number* row = s == seen ? own_value : cached + s * size;
#pragma GCC unroll 4
      for (int v = 0; v < COUNT; ++v) sum[v] += load<LANES>(row + v * LANES) * share[s];
    }
    for (int v = 0; v < COUNT; ++v) store(out + v * LANES, sum[v]);
  }

  // ----------------------------------------------------------------------------------------------------- experts

  // The experts of every row, by number and then row; shared ones last.
  void choose(const StepLayer& layer, ExactPrivate& own) {
    own.slots.clear();
    const StepRouter& router = layer.router;
    const int64_t top_k = router.weight.data ? router.top_k : 0;
    if (top_k) {
      for (int64_t r = 0; r < m.rows; ++r) choose_of(router, logits_.data() + r * router.weight.out, r, own);
      std::stable_sort(own.slots.begin(), own.slots.end(),
                       [](const ExactSlot& a, const ExactSlot& b) { return a.expert < b.expert; });
    }
    if (layer.shared.down.data)
      for (int64_t r = 0; r < m.rows; ++r) own.slots.push_back({-1, r, top_k, 1.0f});
  }

  void choose_of(const StepRouter& router, const float* logits, int64_t row, ExactPrivate& own) const {
    const int64_t experts = router.weight.out, top_k = router.top_k;
    float *score = own.choice.get(size_t(3 * experts + 2 * top_k)), *rank = score + experts, *group = rank + experts;
    float* weight = group + experts;
    if (router.score == SIGMOID) exact_values(EXACT_SIGMOID, logits, experts, score);
    else if (router.score == SOFTMAX) softmax(logits, experts, score);
    else std::copy_n(logits, experts, score);
    for (int64_t e = 0; e < experts; ++e) rank[e] = router.selection_bias ? score[e] + router.selection_bias[e] : score[e];
    keep_best_groups(router, rank, group);
    std::vector<bool> taken(size_t(experts), false);
    const size_t begin = own.slots.size();
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t best = largest_left(rank, experts, taken);
      taken[size_t(best)] = true;
      own.slots.push_back({best, row, k, 0});
      weight[k] = score[best];
    }
    if (router.score == TOPK_SOFTMAX) {
      softmax(weight, top_k, weight);
    } else if (router.renormalize) {
      const float all = exact_sum(weight, top_k) + (router.score == SIGMOID ? 1e-20f : 0.0f);
      for (int64_t k = 0; k < top_k; ++k) weight[k] /= all;
    }
    for (int64_t k = 0; k < top_k; ++k) {
      const float scaled = router.scaling_factor == 1.0 ? weight[k] : weight[k] * float(router.scaling_factor);
      own.slots[begin + size_t(k)].weight = rounded_if(m.rounds_routing, scaled);
    }
  }

  // In place, too.
  static void softmax(const float* x, int64_t count, float* out) {
    const float most = *std::max_element(x, x + count);
    for (int64_t i = 0; i < count; ++i) out[i] = x[i] - most;
    exact_values(EXACT_EXP, out, count, out);
    const float all = exact_sum(out, count);
    for (int64_t i = 0; i < count; ++i) out[i] /= all;
  }

  static int64_t width_of(const StepExperts& experts) { return experts.intermediate; }

  // Behind `norm_rows`, whose rows it reads.
  void up(const StepLayer& layer, ExactPrivate& own, int self, int team) {
    const auto share = [&](size_t first, int64_t count, const StepExperts& experts, int64_t start, int64_t from,
                           int64_t to) {
      const int64_t e = std::max<int64_t>(0, own.slots[first].expert);
      own.rows.resize(size_t(count));
      for (int64_t r = 0; r < count; ++r)
        own.rows[size_t(r)] = own.normed.data + own.slots[first + size_t(r)].row * m.hidden;
      const float* low = low_rank(experts.gate_up, e, own.rows.data(), count, own);
      for (int64_t unit = from; unit < to; ++unit)
        activate(experts, e, unit * UNIT, std::min(experts.intermediate, (unit + 1) * UNIT), own, first, count, low,
                 activations_.data() + start);
    };
    each_expert_unit(layer, own.slots, width_of, self, team, share);
  }

  void activate(const StepExperts& experts, int64_t e, int64_t from, int64_t to, ExactPrivate& own, size_t slot,
                int64_t count, const float* low, float* out) const {
    const StepMatrix& w = experts.gate_up;
    const int64_t other = experts.intermediate, width = to - from, room = 2 * UNIT;
    const bool is_shared = own.slots[slot].expert < 0;
    float* h = own.h.get(size_t(count * room));  // gate, then up, of each row
    const auto take = [&](int64_t j, int64_t r, float value) {
      value = of_model(w.bias ? apart(value) + bias_of(w, e, j) : value);
      const int64_t part = experts.interleaved ? j % 2 : j >= other, i = experts.interleaved ? j / 2 : j - part * other;
      if (low) {
        float more = low_rank_row(w, e, j, w.lora_parts == 2 ? part : 0, low, r);
        if (is_shared) more = rounded_if(w.lora_half, more) * float(w.lora_scale);
        value = of_model(apart(is_shared ? rounded_if(w.lora_half, more) : more) + value);
      }
      h[r * room + part * UNIT + i - from] = value;
    };
    const float* const* rows = own.rows.data();
    if (experts.interleaved) {
      products(w, e, 2 * from, 2 * to, rows, count, own, take);
    } else {
      products(w, e, from, to, rows, count, own, take);
      products(w, e, other + from, other + to, rows, count, own, take);
    }
    const Swiglu swiglu{float(experts.alpha), float(experts.limit), float(experts.up_shift), std::isfinite(experts.limit)};
    for (int64_t r = 0; r < count; ++r) {
      const float *gate = h + r * room, *up = gate + UNIT;
      float* target = out + r * other + from;
      if (is_shared) {
        float value[UNIT];
        exact_values(EXACT_SILU, gate, width, value);
        for (int64_t i = 0; i < width; ++i) target[i] = of_model(of_model(value[i]) * up[i]);
        continue;
      }
      float value[UNIT];
      for (int64_t i = 0; i < width; i += LANES) {
        const auto v = swiglu.at(gate, up, i);
        store(value + i, v.value * v.up * own.slots[slot + size_t(r)].weight);
      }
      for (int64_t i = 0; i < width; ++i) target[i] = of_model(value[i]);
    }
  }

  void down(const StepLayer& layer, float* x, ExactPrivate& own, int self, int team) {
    const int64_t top_k = layer.router.weight.data ? layer.router.top_k : 0, each = top_k + 1;
    const int64_t units = ceil_div(m.hidden, UNIT), from = units * self / team * UNIT;
    const int64_t to = std::min(m.hidden, units * (self + 1) / team * UNIT);
    if (from >= to) return;
    const auto of_expert = [&](size_t first, int64_t count, const StepExperts& experts, int64_t start) {
      const StepMatrix& w = experts.down;
      const ExactSlot* slots = own.slots.data() + first;
      const int64_t e = std::max<int64_t>(0, slots->expert);
      rows_at(activations_.data() + start, experts.intermediate, count, own);
      const auto result = [&](int64_t j, int64_t r) -> float& {
        return results_[size_t((slots[r].row * each + slots[r].place) * m.hidden + j)];
      };
      if (slots->expert < 0) {
        linear(w, from, to, count, own, [&](int64_t j, int64_t r, float value) { result(j, r) = value; });
        return;
      }
      const float* low = low_rank(w, e, own.rows.data(), count, own);
      products(w, e, from, to, own.rows.data(), count, own, [&](int64_t j, int64_t r, float value) {
        value = of_model(value);
        if (low) value = of_model(apart(low_rank_row(w, e, j, 0, low, r)) + value);
        if (w.bias) value = of_model(value + apart(of_model(of_model(slots[r].weight) * bias_of(w, e, j))));
        result(j, r) = value;
      });
    };
    each_expert(layer, own.slots, width_of, of_expert);
    for (int64_t r = 0; r < m.rows; ++r)
      for (int64_t j = from; j < to; ++j) {
        const float* mine = results_.data() + r * each * m.hidden + j;
        float sum = 0;
        for (int64_t k = 0; k < top_k; ++k) sum += mine[k * m.hidden];
        sum = of_model(sum);
        if (layer.shared.down.data) sum = top_k ? of_model(sum + mine[top_k * m.hidden]) : mine[0];
        add(layer, x[r * m.hidden + j], sum);
      }
  }

  const StepModel m;
  const int threads_;
  int64_t queries_ = 0, keys_ = 0;
  std::vector<float> x_, projected_, attended_, logits_, activations_, results_;
  std::vector<ExactPrivate> own_;
  Barrier barrier_;
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// As those of step.cpp, for models that are computed exactly: linear layers in their own rows, no experts in slots.
void* amoeba_exact_step_new(const StepModel* model, int threads) { return new ExactStepper(*model, threads); }
void amoeba_exact_step_delete(void* step) { delete static_cast<ExactStepper*>(step); }
int64_t amoeba_exact_step_run(void* step, const StepCall* call) {
  static_cast<ExactStepper*>(step)->run(*call);
  return call->last_layer;
}

}  // extern "C"
#pragma GCC visibility pop
