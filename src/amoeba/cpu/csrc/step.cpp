// A decode step: the next token of each row through all layers of a decoder, in one call and without Python.
//
// B rows · H hidden · Q query heads · G key and value heads · D of a head · L slots of the cache · K experts per token
//
// All threads go through the same phases, between which they wait for each other; what a phase needs of the one before
// and is cheap (norms, the choice of experts, fixed point, the A of LoRA factors) each thread computes for itself. Per layer:
//
//   1 norm; queries, keys and values      3 output projection, added to x       5 experts: gate, up, activation
//   2 head norms, rotation, attention     4 norm; logits of the router          6 experts: down, weighted, added to x
//
// Latent attention (MLA) caches a normed latent of R numbers and a rotated key of P, which all heads share. Queries are
// multiplied into the latents' space, and what attention takes of the latents out of it (`attend_latent`); low-rank
// queries are a phase between 1 and 2.
//
// Experts that are streamed lie in slots. Where some that a layer needs are in none, a call ends before its experts, the
// caller brings some or all of them, and a call with `resumes` goes on from there.
//
// Numbers between the weights are fp32. A result is computed by one thread in an order of its own.
#include "step_model.h"

#include <memory>

using namespace amoeba;

namespace {

struct Slot {
  int64_t expert, row;
  float weight;
  int64_t place;  // where the expert lies among the weights; -1: nowhere
  size_t number = 0;  // of a streamed layer's
};

// What one thread has for itself.
struct Private {
  Buffer<float> normed, pairs, spread, sums, scores, head_values, low, latent;
  Buffer<int8_t> planes;
  Buffer<int16_t> whole;
  Buffer<int32_t> fixes;
  Buffer<float> scales, choice;
  std::vector<Slot> slots, all_slots;
  std::vector<int64_t> which;
};

inline void normalise(const float* x, int64_t n, const StepNorm& norm, float* out) {
  Floats sum{};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) sum += load<LANES>(x + i) * load<LANES>(x + i);
  float squares = total(sum);
  for (; i < n; ++i) squares += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(squares / float(n) + float(norm.eps));
  for (i = 0; i + LANES <= n; i += LANES)
    store(out + i, load<LANES>(x + i) * factor * load<LANES>(norm.weight + i));
  for (; i < n; ++i) out[i] = x[i] * factor * norm.weight[i];
}

class Stepper {
 public:
  Stepper(const StepModel& model, int threads) : m(model), threads_(threads), own_(size_t(threads)) {
    for (int64_t i = 0; i < m.layer_count; ++i) {
      const StepLayer& layer = m.layers[i];
      const int64_t top_k = layer.router.weight.data ? layer.router.top_k : 0;
      const int64_t of_layer = m.rows * (top_k * padded(layer.experts.intermediate) + padded(layer.shared.intermediate));
      most_activations_ = std::max(most_activations_, of_layer);
      most_experts_ = std::max(most_experts_, layer.router.weight.out);
      keys_ = std::max(keys_, layer.keys.out);
      low_queries_ = std::max(low_queries_, layer.low_queries.out);
    }
    queries_ = padded(m.query_heads * m.head_size);
    low_.resize(size_t(m.rows * low_queries_));
    x_.resize(size_t(m.rows * m.hidden));
    projected_.resize(size_t(m.rows * (queries_ + 2 * keys_)));
    attended_.resize(size_t(m.rows * queries_));
    logits_.resize(size_t(m.rows * std::max<int64_t>(1, most_experts_)));
    activations_.resize(size_t(most_activations_));
  }

  // The layer whose experts are not all there, or that behind the last.
  int64_t run(const StepCall& call) {
    stopped_ = call.last_layer;
    float* x = call.x ? call.x : x_.data();
    in_threads(threads_, [&](int self, int team) { thread(call, x, self, team); });
    if (stopped_ == call.last_layer) choose_largest(call, m.rows, m.vocabulary);
    return stopped_;
  }

 private:
  static int64_t padded(int64_t n) { return round_up(n, PLANE_UNIT); }

  void thread(const StepCall& call, float* x, int self, int team) {
    Private& own = own_[size_t(self)];
    if (call.tokens) embed(call, x, self, team);
    barrier_.wait(team);
    for (int64_t i = call.first_layer; i < call.last_layer; ++i) {
      const StepLayer& layer = m.layers[i];
      const bool resumed = call.resumes && i == call.first_layer;
      if (!resumed) {
        project(layer, x, own, self, team);
        barrier_.wait(team);
        if (layer.low_queries.data) {
          project_low_queries(layer, own, self, team);
          barrier_.wait(team);
        }
        attend(layer, call, own, self, team);
        barrier_.wait(team);
        add_attended(layer, x, own, self, team);
        barrier_.wait(team);
      }
      StepRows normed = norm_rows(x, layer.before_experts, own);
      prepare(normed, {&layer.router.weight, &layer.experts.gate_up, &layer.shared.gate_up}, own);
      if (layer.router.weight.data && !resumed) {
        route(layer, normed, own, self, team);
        barrier_.wait(team);
      }
      choose(layer, normed, own);
      if (resumed) {
        if (!compute_some(layer, normed, x, own, self, team)) {
          if (self == 0) stopped_ = i;
          return;
        }
        continue;
      }
      if (layer.slot_of) {
        if (self == 0) note_chosen(layer, own);
        if (lacks_some(own)) {
          if (self == 0) {
            stopped_ = i;
            computed_.assign(own.slots.size(), false);
            parts_.resize(own.slots.size() * size_t(m.hidden));
          }
          return;
        }
      }
      up(layer, normed, own, self, team);
      barrier_.wait(team);
      down(layer, own, self, team, [&](const Slot& slot, int64_t j, float value) {
        x[slot.row * m.hidden + j] += slot.weight * float(layer.residual) * value;
      });
      barrier_.wait(team);
    }
    if (call.logits) {
      StepRows normed = norm_rows(x, m.norm, own);
      prepare(normed, {&m.head}, own);
      each_unit(m.head.out, self, team, [&](int64_t from, int64_t to) {
        of_all_rows(m.head, from, to, normed, own, [&](int64_t j, int64_t r, float value) {
          call.logits[r * m.vocabulary + j] = value * float(m.logits_scale);
        });
      });
    }
  }

  void embed(const StepCall& call, float* x, int self, int team) const {
    each_unit(m.hidden, self, team, [&](int64_t from, int64_t to) {
      for (int64_t r = 0; r < m.rows; ++r)
        embed_row(m, call.tokens[r], from, to, x + r * m.hidden,
                  [&](float value) { return float(m.embedding_scale) * value; });
    });
  }

  StepRows norm_rows(const float* x, const StepNorm& norm, Private& own) const {
    const int64_t stride = padded(m.hidden);
    float* out = own.normed.get(size_t(m.rows * stride));
    for (int64_t r = 0; r < m.rows; ++r) {
      normalise(x + r * m.hidden, m.hidden, norm, out + r * stride);
      std::fill(out + r * stride + m.hidden, out + (r + 1) * stride, 0.0f);
    }
    return rows_of(out, stride, m.rows, m.hidden);
  }

  static StepRows rows_of(const float* x, int64_t stride, int64_t count, int64_t length) {
    StepRows rows;
    rows.x = x, rows.stride = stride, rows.count = count, rows.length = length, rows.plane_stride = padded(length);
    return rows;
  }

  // What the matrices need of the rows beyond fp32, in memory that the next call of it takes.
  void prepare(StepRows& rows, std::initializer_list<const StepMatrix*> matrices, Private& own) const {
    bool tiles = false, blocks = false, ggml = false, pairs = false, spread = false;
    for (const StepMatrix* matrix : matrices) {
      pairs |= matrix->data && matrix->kind == ROWS_BF16;
      tiles |= matrix->data && by_planes(*matrix);
      blocks |= matrix->data && by_blocks(*matrix);
      ggml |= matrix->data && by_ggml(*matrix);
      spread |= matrix->data && by_spread(*matrix);
    }
    if (pairs) {
      rows.pairs = own.pairs.get(size_t(rows.count * rows.plane_stride));
      prepare_pairs(rows);
    }
    if (spread) {
      rows.spread = own.spread.get(size_t(rows.count * rows.plane_stride));
      prepare_spread(rows);
    }
    if (!tiles && !blocks && !ggml) return;
    const int64_t size = rows.count * rows.plane_stride;
    int8_t* planes = own.planes.get(size_t(6 * size));
    float* scales = own.scales.get(size_t(3 * rows.count));
    int16_t* whole = own.whole.get(size_t(2 * rows.plane_stride));
    if (tiles) {
      rows.tiles = {planes, planes + size, nullptr, scales};
      prepare_tiles(rows, whole);
    }
    if (blocks) {
      rows.blocks = {planes + 2 * size, planes + 3 * size, own.fixes.get(size_t(size / 8)), scales + rows.count};
      prepare_blocks(rows, whole);
    }
    if (ggml) {
      rows.ggml = {planes + 4 * size, planes + 5 * size, nullptr, scales + 2 * rows.count,
                   own.sums.get(size_t(size / 4))};
      prepare_ggml(rows, whole);
    }
  }

  static void each_row_list(Private& own, int64_t count) {
    own.which.resize(size_t(count));
    for (int64_t r = 0; r < count; ++r) own.which[size_t(r)] = r;
  }

  // Of a matrix that is no expert's.
  static void of_all_rows(const StepMatrix& matrix, int64_t from, int64_t to, const StepRows& rows, Private& own,
                          const Sink& take) {
    each_row_list(own, rows.count);
    const int64_t* which = own.which.data();
    const float* low = low_rank(matrix, 0, rows, which, rows.count, own.low);
    adapted_products(matrix, 0, 0, from, to, rows, which, rows.count, low, take);
  }

  void project(const StepLayer& layer, const float* x, Private& own, int self, int team) {
    StepRows normed = norm_rows(x, layer.before_attention, own);
    const bool low = layer.low_queries.data;
    const StepMatrix* parts[3] = {low ? &layer.low_queries : &layer.queries, &layer.keys, &layer.values};
    prepare(normed, {parts[0], parts[1], parts[2]}, own);
    const int64_t stride = queries_ + 2 * keys_;
    const int64_t starts[3] = {0, queries_, queries_ + keys_};
    each_projected(parts, self, team, [&](int i, int64_t from, int64_t to) {
      const auto take = [&](int64_t j, int64_t r, float value) {
        if (low && i == 0) {
          low_[size_t(r * low_queries_ + j)] = value;
          return;
        }
        const float clipped = std::min(std::max(value, float(-layer.clip)), float(layer.clip));
        // behind a norm it is clipped there
        projected_[size_t(r * stride + starts[i] + j)] = i < 2 && layer.head_norm ? value : clipped;
      };
      of_all_rows(*parts[i], from, to, normed, own, take);
    });
  }

  void project_low_queries(const StepLayer& layer, Private& own, int self, int team) {
    const int64_t length = layer.low_queries.out, stride = padded(length);
    float* out = own.normed.get(size_t(m.rows * stride));
    for (int64_t r = 0; r < m.rows; ++r) {
      normalise(low_.data() + r * low_queries_, length, layer.query_norm, out + r * stride);
      std::fill(out + r * stride + length, out + (r + 1) * stride, 0.0f);
    }
    StepRows rows = rows_of(out, stride, m.rows, length);
    prepare(rows, {&layer.queries}, own);
    each_unit(layer.queries.out, self, team, [&](int64_t from, int64_t to) {
      of_all_rows(layer.queries, from, to, rows, own, [&](int64_t j, int64_t r, float value) {
        projected_[size_t(r * (queries_ + 2 * keys_) + j)] = value;
      });
    });
  }

  // One head: normed, clipped, rotated. all: of the row, for a norm over it.
  void finish_head(const StepLayer& layer, const StepNorm& norm, const float* all, int64_t width, int64_t head,
                   int64_t position, float* out) const {
    const int64_t size = m.head_size;
    const float* in = all + head * size;
    if (layer.head_norm == OF_HEADS) {
      normalise(in, size, norm, out);
    } else if (layer.head_norm == OF_ROWS) {
      Floats sum{};
      int64_t i = 0;
      for (; i + LANES <= width; i += LANES) sum += load<LANES>(all + i) * load<LANES>(all + i);
      float squares = total(sum);
      for (; i < width; ++i) squares += all[i] * all[i];
      const float factor = 1.0f / std::sqrt(squares / float(width) + float(norm.eps));
      for (i = 0; i < size; ++i) out[i] = in[i] * factor * norm.weight[head * size + i];
    } else {
      std::copy(in, in + size, out);
    }
    if (layer.head_norm && std::isfinite(layer.clip))
      for (int64_t i = 0; i < size; ++i) out[i] = std::min(std::max(out[i], float(-layer.clip)), float(layer.clip));
    rotate(layer, out, position, out);
  }

  // In place, but for PAIRS_TO_HALVES.
  void rotate(const StepLayer& layer, const float* in, int64_t position, float* out) const {
    const int64_t half = layer.rotated / 2;
    const float *cos = layer.cos + position * half, *sin = layer.sin + position * half;
    const bool pairs = m.rotation != HALVES, to_pairs = m.rotation == PAIRS;
    for (int64_t i = 0; i < (m.rotation ? half : 0); ++i) {
      const float a = in[pairs ? 2 * i : i], b = in[pairs ? 2 * i + 1 : i + half];
      out[to_pairs ? 2 * i : i] = a * cos[i] - b * sin[i];
      out[to_pairs ? 2 * i + 1 : i + half] = b * cos[i] + a * sin[i];
    }
  }

  void attend(const StepLayer& layer, const StepCall& call, Private& own, int self, int team) {
    if (layer.to_latents.data) {
      const int64_t at_once = heads_at_once(m.query_heads / m.key_heads, 1, team);
      layer.cache_bf16 ? attend_latent<uint16_t>(layer, call, own, at_once, self, team)
                       : attend_latent<float>(layer, call, own, at_once, self, team);
      return;
    }
    each_head_group(m, self, team, [&](auto... where) {
      layer.cache_bf16 ? attend_heads<uint16_t>(layer, call, own, where...)
                       : attend_heads<float>(layer, call, own, where...);
    });
  }

  template <class Number>
  void attend_heads(const StepLayer& layer, const StepCall& call, Private& own, int64_t r, int64_t g, int64_t head,
                    int64_t heads, bool writes) {
    const int64_t size = m.head_size, stride = queries_ + 2 * keys_, slot = call.first[r] + call.position[r];
    const int64_t oldest = oldest_seen(layer, call, r), seen = slot - oldest;  // before the token's own
    const float* row = projected_.data() + r * stride;
    float* values = own.head_values.get(size_t((MOST_HEADS + 2) * size));
    const float* queries[MOST_HEADS];
    for (int64_t i = 0; i < heads; ++i) {
      finish_head(layer, layer.query_norm, row, m.query_heads * size, head + i, call.position[r], values + i * size);
      queries[i] = values + i * size;
    }
    float* key = values + MOST_HEADS * size;
    auto* own_key = reinterpret_cast<Number*>(key + size);  // as the cache has it
    finish_head(layer, layer.key_norm, row + queries_, keys_, g, call.position[r], key);
    const int64_t start = r * layer.cache_row + g * layer.cache_head;
    auto *keys = static_cast<Number*>(layer.key_cache) + start, *cached = static_cast<Number*>(layer.value_cache) + start;
    const float* value = row + queries_ + keys_ + g * size;
    for (int64_t i = 0; i < size; ++i) own_key[i] = rounded<Number>(key[i]);
    if (writes)
      for (int64_t i = 0; i < size; ++i) {
        keys[slot * size + i] = own_key[i];
        cached[slot * size + i] = rounded<Number>(value[i]);
      }
    const int64_t room = round_up(seen + 1, 16);
    float* scores = own.scores.get(size_t(MOST_HEADS * room));
    score<false>(keys + oldest * size, own_key, seen, size, queries, heads, scores, room);
    for (int64_t h = 0; h < heads; ++h) {
      float* mine = scores + h * room;
      const float factor = shares(layer, head + h, seen, room, mine);
      weigh(mine, factor, cached + oldest * size, seen, size, value, attended_.data() + r * queries_ + (head + h) * size);
    }
  }

  template <class Number>
  static Number rounded(float number) {
    if constexpr (std::is_same_v<Number, float>) return number;
    else return round_to_bf16(number);
  }

  // exp(score - the largest), and by what that is to be multiplied.
  static float shares(const StepLayer& layer, int64_t head, int64_t seen, int64_t room, float* mine) {
    const float scale = float(layer.scale), sink = layer.sinks ? layer.sinks[head] : 0;
    float largest = layer.sinks ? sink : -std::numeric_limits<float>::infinity();
    for (int64_t s = 0; s <= seen; ++s) {
      mine[s] *= scale;
      largest = std::max(largest, mine[s]);
    }
    for (int64_t s = seen + 1; s < room; ++s) mine[s] = -std::numeric_limits<float>::infinity();
    Floats sums{};
    for (int64_t s = 0; s < room; s += LANES) {
      Floats share = exponential(load<LANES>(mine + s) - largest);
      if (s + LANES > seen + 1)
        for (int i = 0; i < LANES; ++i)
          if (s + i > seen) share[i] = 0;
      store(mine + s, share);
      sums += share;
    }
    return 1.0f / (total(sums) + (layer.sinks ? std::exp(sink - largest) : 0));
  }

  // Some heads at a time, each with the latents of all rows: the two matrices of a head are read by one thread, once.
  template <class Number>
  void attend_latent(const StepLayer& layer, const StepCall& call, Private& own, int64_t at_once, int self, int team) {
    const int64_t rank = layer.to_latents.out, plain = layer.to_latents.in, turned = layer.keys.out - rank;
    const int64_t tasks = ceil_div(m.query_heads, at_once), stride = queries_ + 2 * keys_, wide = padded(rank);
    if (self >= tasks) return;
    float* plain_queries = own.latent.get(size_t(m.rows * (padded(plain) + 2 * (rank + turned) + at_once * (rank + wide)) +
                                                 at_once * turned));
    float *key = plain_queries + m.rows * padded(plain), *queries = key + m.rows * (rank + turned);
    float *found = queries + m.rows * at_once * rank, *turned_queries = found + m.rows * at_once * wide;
    auto* own_key = reinterpret_cast<Number*>(turned_queries + at_once * turned);  // as the cache has it
    for (int64_t r = 0; r < m.rows; ++r) {
      const float* row = projected_.data() + r * stride + queries_;
      const int64_t at = r * (rank + turned), slot = call.first[r] + call.position[r];
      normalise(row, rank, layer.key_norm, key + at);
      rotate(layer, row + rank, call.position[r], key + at + rank);
      for (int64_t i = 0; i < rank + turned; ++i) own_key[at + i] = rounded<Number>(key[at + i]);
      if (self == 0) {
        std::copy(own_key + at, own_key + at + rank, static_cast<Number*>(layer.key_cache) + r * layer.cache_row + slot * rank);
        std::copy(own_key + at + rank, own_key + at + rank + turned, turned_keys<Number>(layer, r, rank, turned) + slot * turned);
      }
    }
    each_row_list(own, m.rows);
    for (int64_t task = self; task < tasks; task += team) {
      const int64_t head = task * at_once, heads = std::min(at_once, m.query_heads - head);
      for (int64_t h = 0; h < heads; ++h) {
        std::fill(plain_queries, plain_queries + m.rows * padded(plain), 0.0f);
        for (int64_t r = 0; r < m.rows; ++r)
          std::copy_n(projected_.data() + r * stride + (head + h) * m.head_size, plain, plain_queries + r * padded(plain));
        StepRows rows = rows_of(plain_queries, padded(plain), m.rows, plain);
        prepare(rows, {&layer.to_latents}, own);
        products(layer.to_latents, head + h, 0, rank, rows, own.which.data(), m.rows,
                 [&](int64_t j, int64_t r, float value) { queries[(r * at_once + h) * rank + j] = value; });
      }
      for (int64_t r = 0; r < m.rows; ++r) {
        const int64_t oldest = oldest_seen(layer, call, r), seen = call.first[r] + call.position[r] - oldest;
        const int64_t room = round_up(seen + 1, 16), at = r * (rank + turned);
        const float *to_latents[MOST_HEADS], *to_turned[MOST_HEADS];
        for (int64_t h = 0; h < heads; ++h) {
          to_latents[h] = queries + (r * at_once + h) * rank;
          to_turned[h] = turned_queries + h * turned;
          rotate(layer, projected_.data() + r * stride + (head + h) * m.head_size + plain, call.position[r],
                 turned_queries + h * turned);
        }
        float* scores = own.scores.get(size_t(MOST_HEADS * room));
        const Number* latents = static_cast<Number*>(layer.key_cache) + r * layer.cache_row + oldest * rank;
        const Number* turned_from = turned_keys<Number>(layer, r, rank, turned) + oldest * turned;
        score<false>(latents, own_key + at, seen, rank, to_latents, heads, scores, room);
        score<true>(turned_from, own_key + at + rank, seen, turned, to_turned, heads, scores, room);
        for (int64_t h = 0; h < heads; ++h) {
          const float factor = shares(layer, head + h, seen, room, scores + h * room);
          float* out = found + (h * m.rows + r) * wide;
          weigh(scores + h * room, factor, latents, seen, rank, key + at, out);
          std::fill(out + rank, out + wide, 0.0f);
        }
      }
      for (int64_t h = 0; h < heads; ++h) {
        StepRows rows = rows_of(found + h * m.rows * wide, wide, m.rows, rank);
        prepare(rows, {&layer.from_latents}, own);
        const int64_t size = layer.from_latents.out;
        products(layer.from_latents, head + h, 0, size, rows, own.which.data(), m.rows,
                 [&](int64_t j, int64_t r, float value) { attended_[size_t(r * queries_ + (head + h) * size + j)] = value; });
      }
    }
  }

  template <class Number>
  static Number* turned_keys(const StepLayer& layer, int64_t row, int64_t rank, int64_t turned) {
    return static_cast<Number*>(layer.value_cache) + row * (layer.cache_row / rank * turned);
  }

  // out = factor . (sum of share . cached value, and the last share . the token's own)
  template <class Number>
  static void weigh(const float* share, float factor, const Number* cached, int64_t seen, int64_t size,
                    const float* value, float* out) {
    constexpr int AT_ONCE = 8;
    int64_t i = 0;
    for (; i + AT_ONCE * LANES <= size; i += AT_ONCE * LANES) weigh_some<AT_ONCE>(share, factor, cached, seen, size, value, out, i);
    for (; i + LANES <= size; i += LANES) weigh_some<1>(share, factor, cached, seen, size, value, out, i);
    for (; i < size; ++i) {
      float sum = 0;
      for (int64_t s = 0; s < seen; ++s) sum += share[s] * widen(cached[s * size + i]);
      out[i] = (sum + share[seen] * widen(rounded<Number>(value[i]))) * factor;
    }
  }
  template <int COUNT, class Number>
  static void weigh_some(const float* share, float factor, const Number* cached, int64_t seen, int64_t size,
                         const float* value, float* out, int64_t first) {
    Floats sum[COUNT] = {};
    for (int64_t s = 0; s < seen; ++s) {
      const Number* row = cached + s * size + first;
#pragma GCC unroll 8
      for (int v = 0; v < COUNT; ++v) sum[v] += load<LANES>(row + v * LANES) * share[s];
    }
    for (int v = 0; v < COUNT; ++v) {
      Floats mine;
      for (int i = 0; i < LANES; ++i) mine[i] = widen(rounded<Number>(value[first + v * LANES + i]));
      store(out + first + v * LANES, (sum[v] + mine * share[seen]) * factor);
    }
  }

  void add_attended(const StepLayer& layer, float* x, Private& own, int self, int team) {
    StepRows rows = rows_of(attended_.data(), queries_, m.rows, layer.output.in);
    prepare(rows, {&layer.output}, own);
    each_unit(m.hidden, self, team, [&](int64_t from, int64_t to) {
      of_all_rows(layer.output, from, to, rows, own, [&](int64_t j, int64_t r, float value) {
        x[r * m.hidden + j] += float(layer.residual) * value;
      });
    });
  }

  void route(const StepLayer& layer, const StepRows& normed, Private& own, int self, int team) {
    const StepMatrix& weight = layer.router.weight;
    const int64_t each = ceil_div(weight.out, int64_t(team)), aligned = round_up(each, WEIGHT_ROWS);
    const int64_t from = std::min(weight.out, aligned * self), to = std::min(weight.out, aligned * (self + 1));
    const auto take = [&](int64_t j, int64_t r, float value) { logits_[size_t(r * weight.out + j)] = value; };
    if (from < to) of_all_rows(weight, from, to, normed, own, take);
  }

  // The experts of every row by number, then row: the order in which they are added up.
  void choose(const StepLayer& layer, const StepRows& normed, Private& own) {
    own.slots.clear();
    const StepRouter& router = layer.router;
    if (router.weight.data) {
      const int64_t experts = router.weight.out;
      float* score = own.choice.get(size_t(3 * experts));
      for (int64_t r = 0; r < m.rows; ++r) choose_of(router, logits_.data() + r * experts, r, score, own.slots);
      std::stable_sort(own.slots.begin(), own.slots.end(),
                       [](const Slot& a, const Slot& b) { return a.expert < b.expert; });
      if (layer.slot_of)
        for (Slot& slot : own.slots) slot.place = layer.slot_of[slot.expert];
    }
    if (layer.shared.down.data)
      for (int64_t r = 0; r < m.rows; ++r) {
        float weight = 1;
        if (layer.shared_gate) {
          Floats sum{};
          int64_t i = 0;
          const float* x = normed.x + r * normed.stride;
          for (; i + LANES <= m.hidden; i += LANES) sum += load<LANES>(x + i) * load<LANES>(layer.shared_gate + i);
          float logit = total(sum);
          for (; i < m.hidden; ++i) logit += x[i] * layer.shared_gate[i];
          weight = 1.0f / (1.0f + std::exp(-logit));
        }
        own.slots.push_back({-1, r, weight, 0});
      }
  }

  static bool lacks_some(const Private& own) {
    return std::any_of(own.slots.begin(), own.slots.end(), [](const Slot& slot) { return slot.place < 0; });
  }

  static void note_chosen(const StepLayer& layer, const Private& own) {
    int64_t* to = layer.chosen;
    for (const Slot& slot : own.slots)
      if (slot.expert >= 0) *to++ = slot.expert;
  }

  // Those of a layer's experts that are there and were not yet. With the last ones all are added up, in the order of
  // experts that are all there: true.
  bool compute_some(const StepLayer& layer, const StepRows& normed, float* x, Private& own, int self, int team) {
    for (size_t i = 0; i < own.slots.size(); ++i) own.slots[i].number = i;
    own.all_slots = own.slots;
    const auto is_left = [&](const Slot& slot) { return slot.place < 0 && !computed_[slot.number]; };
    const bool complete = std::none_of(own.slots.begin(), own.slots.end(), is_left);
    const auto is_other = [&](const Slot& slot) { return slot.place < 0 || computed_[slot.number]; };
    own.slots.erase(std::remove_if(own.slots.begin(), own.slots.end(), is_other), own.slots.end());
    up(layer, normed, own, self, team);
    barrier_.wait(team);
    down(layer, own, self, team, [&](const Slot& slot, int64_t j, float value) {
      parts_[slot.number * size_t(m.hidden) + size_t(j)] = value;
    });
    if (self == 0)
      for (const Slot& slot : own.slots) computed_[slot.number] = true;
    barrier_.wait(team);
    if (!complete) return false;
    each_unit(m.hidden, self, team, [&](int64_t from, int64_t to) {
      for (const Slot& slot : own.all_slots)
        for (int64_t j = from; j < to; ++j)
          x[slot.row * m.hidden + j] +=
              slot.weight * float(layer.residual) * parts_[slot.number * size_t(m.hidden) + size_t(j)];
    });
    barrier_.wait(team);
    return true;
  }

  static void choose_of(const StepRouter& router, const float* logits, int64_t row, float* score,
                        std::vector<Slot>& slots) {
    const int64_t experts = router.weight.out;
    float *rank = score + experts, *group = rank + experts;
    const float largest = *std::max_element(logits, logits + experts);
    float all = 0;
    for (int64_t e = 0; e < experts; ++e) {
      score[e] = router.score == SIGMOID ? 1.0f / (1.0f + std::exp(-logits[e])) : std::exp(logits[e] - largest);
      all += score[e];
    }
    if (router.score == SOFTMAX)
      for (int64_t e = 0; e < experts; ++e) score[e] /= all;
    for (int64_t e = 0; e < experts; ++e) {
      rank[e] = router.score == SIGMOID ? score[e] : logits[e];
      if (router.n_group > 1 && router.score == SOFTMAX) rank[e] = score[e];
      if (router.selection_bias) rank[e] = score[e] + router.selection_bias[e];
    }
    keep_best_groups(router, rank, group);
    std::vector<bool> taken(size_t(experts), false);
    const size_t begin = slots.size();
    float chosen = 0;
    for (int64_t k = 0; k < router.top_k; ++k) {
      const int64_t best = largest_left(rank, experts, taken);
      taken[size_t(best)] = true;
      slots.push_back({best, row, score[best], best});
      chosen += score[best];
    }
    const bool divide = router.score == TOPK_SOFTMAX || router.renormalize;
    const float floor = router.score == SIGMOID ? 1e-20f : 0;
    const float factor = float(router.scaling_factor) / (divide ? chosen + floor : 1.0f);
    for (size_t i = begin; i < slots.size(); ++i) slots[i].weight *= factor;
  }

  static int64_t width_of(const StepExperts& experts) { return padded(experts.intermediate); }

  void up(const StepLayer& layer, const StepRows& normed, Private& own, int self, int team) {
    const auto share = [&](size_t first, int64_t count, const StepExperts& experts, int64_t start, int64_t from,
                           int64_t to) {
      const int64_t e = std::max<int64_t>(0, own.slots[first].expert), place = own.slots[first].place;
      own.which.resize(size_t(count));
      for (int64_t r = 0; r < count; ++r) own.which[size_t(r)] = own.slots[first + size_t(r)].row;
      const float* low = low_rank(experts.gate_up, e, normed, own.which.data(), count, own.low);
      // a few units at a time, so that all rows meet them while they are near
      for (int64_t unit = from; unit < to; ++unit)
        activate_unit(experts, place, e, unit * UNIT, std::min(experts.intermediate, (unit + 1) * UNIT), normed, own, count,
                      low, activations_.data() + start);
    };
    each_expert_unit(layer, own.slots, width_of, self, team, share);
  }

  void activate_unit(const StepExperts& experts, int64_t place, int64_t e, int64_t from, int64_t to,
                     const StepRows& normed, Private& own, int64_t count, const float* low, float* out) const {
    const int64_t stride = padded(experts.intermediate), width = to - from;
    float* h = own.scores.get(size_t(count * 2 * UNIT));  // gate, then up, of each row
    const int64_t* which = own.which.data();
    const auto into = [&](int64_t first, int64_t at) {
      return [=](int64_t j, int64_t r, float value) { h[r * 2 * UNIT + at + (j - first)] = value; };
    };
    const auto of_rows = [&](int64_t first, int64_t last, const Sink& take) {
      adapted_products(experts.gate_up, place, e, first, last, normed, which, count, low, take);
    };
    if (!experts.gated) {
      of_rows(from, to, into(from, 0));
    } else if (experts.interleaved) {
      of_rows(2 * from, 2 * to, [&](int64_t j, int64_t r, float value) {
        h[r * 2 * UNIT + j % 2 * UNIT + (j / 2 - from)] = value;
      });
    } else {
      const int64_t other = experts.intermediate;
      of_rows(from, to, into(from, 0));
      of_rows(other + from, other + to, into(other + from, UNIT));
    }
    const Swiglu swiglu{float(experts.alpha), float(experts.limit), float(experts.up_shift),
                        std::isfinite(experts.limit)};
    for (int64_t r = 0; r < count; ++r) {
      const float *gate = h + r * 2 * UNIT, *up = gate + UNIT;
      float* target = out + r * stride + from;
      int64_t i = 0;
      if (experts.gated && experts.kind == SILU)
        for (; i + LANES <= width; i += LANES) {
          const auto v = swiglu.at(gate, up, i);
          store(target + i, v.value * v.up);
        }
      for (; i < width; ++i) {
        float value = act(std::min(gate[i], swiglu.limit), int(experts.kind), swiglu.alpha);
        if (experts.gated) value *= std::min(std::max(up[i], -swiglu.limit), swiglu.limit) + swiglu.up_shift;
        target[i] = value;
      }
      if (to == experts.intermediate) std::fill(out + r * stride + to, out + (r + 1) * stride, 0.0f);
    }
  }

  // Calls take(slot, j, value) with each result.
  template <class Take>
  void down(const StepLayer& layer, Private& own, int self, int team, const Take& take) {
    const auto of_expert = [&](size_t first, int64_t count, const StepExperts& experts, int64_t start) {
      StepRows rows = rows_of(activations_.data() + start, padded(experts.intermediate), count, experts.intermediate);
      prepare(rows, {&experts.down}, own);
      each_row_list(own, count);
      const int64_t e = std::max<int64_t>(0, own.slots[first].expert), *which = own.which.data();
      const float* low = low_rank(experts.down, e, rows, which, count, own.low);
      each_unit(m.hidden, self, team, [&](int64_t from, int64_t to) {
        adapted_products(experts.down, own.slots[first].place, e, from, to, rows, which, count, low,
                         [&](int64_t j, int64_t r, float value) { take(own.slots[first + size_t(r)], j, value); });
      });
    };
    each_expert(layer, own.slots, width_of, of_expert);
  }

  const StepModel m;
  const int threads_;
  int64_t most_activations_ = 1, most_experts_ = 0, queries_ = 0, keys_ = 0, low_queries_ = 0;
  int64_t stopped_ = 0;
  std::vector<bool> computed_;  // of a layer that waits for experts: whether parts_ has the result of a slot
  std::vector<float> x_, parts_, low_, projected_, attended_, logits_, activations_;
  std::vector<Private> own_;
  Barrier barrier_;
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// What the model points to has to outlive it.
void* amoeba_step_new(const StepModel* model, int threads) { return new Stepper(*model, threads); }
void amoeba_step_delete(void* step) { delete static_cast<Stepper*>(step); }
int64_t amoeba_step_run(void* step, const StepCall* call) { return static_cast<Stepper*>(step)->run(*call); }

}  // extern "C"
#pragma GCC visibility pop
