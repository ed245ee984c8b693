// A product of sorted rows with packed weights, cut into jobs; what becomes of the sums is the epilogue's.
//
//   Product p;                                                   // its weights, the update that joins them, the path
//   for each job of list_jobs(p, ...): run_job(p, job, input, epilogue)
//
// epilogue(job, unit, r, rows, first, second): first.at(i, half) and second.at(i, half) are the sums of row r + i;
// epilogue.prefetch(unit, r, prefetches) names the lines that it will read or write then;
// Epilogue::OF_INT8_TOO is false where the weights are never int8.
// A unit is one panel of columns, or two that belong together (gate and up).
#pragma once
#include "stored.h"
#include "sums.h"

namespace [[gnu::visibility("hidden")]] amoeba {

// Of the L2 cache: packed rows and twice the panels of a unit, for a chunk of the depth; half of 2 MiB. With 16 threads,
// 7168 x 4096 in bf16 and 64 rows per expert took 58 ms in chunks of half this size and 80 without; 2048 x 1536 with 128
// rows fits as it is, and chunks cost it a tenth (Xeon, family 6 model 207, 2026-11-15, runs some minutes apart).
constexpr int64_t CHUNK_BYTES = 1 << 20;
constexpr int64_t PARTIAL_BYTES = 128 << 10;   // and of the sums that wait for the next chunk
constexpr int64_t ROW_BLOCK = 512;             // rows of a job at most
constexpr int64_t DEEP_ROWS = 1 << 20;         // bytes of the rows of a job, above which they are
constexpr int64_t DEEP_ROW_BLOCK = 256;        // no more than this
constexpr int64_t JOBS_PER_THREAD = 12;
constexpr int64_t STORED_UNITS = 4;            // of stored weights that are packed at once, at most,
constexpr int64_t STORED_BYTES = 256 << 10;    // and their bytes

struct Weights {
  const uint32_t* data = nullptr;
  const float* column_scale = nullptr;  // int8: of each column
  const int32_t* sum = nullptr;         // int8: of each column
  const float* depth_scale = nullptr;   // int8, transposed: of each summed element, taken into the rows; else null
  int64_t depth = 0, columns = 0, tiles = 0;
  Stored stored;                        // instead of data

  int64_t panels() const { return panels_of(columns); }
  const uint32_t* panel(int64_t expert, int64_t i) const {
    return data + (expert * panels() + i) * tiles * 2 * TILE_WORDS;
  }
};

// A low-rank update of the sums: rows of `low` (bf16, whole tiles of depth, zeros past its own) times `weights` (bf16).
struct Update {
  Weights weights;
  const uint16_t* low = nullptr;

  int64_t width() const { return weights.tiles * PANEL; }
};

struct Product {
  Weights weights;
  Update update;
  Path path = GENERIC;
  bool int8 = false;
  int64_t units = 0;
  int64_t second = 0;  // panels from the first of a unit to its second; 0: it has none
};

// Rows in bf16, sorted by expert as they lie or by their tokens.
struct Input {
  const uint16_t* rows;
  int64_t stride;
  const int32_t* token = nullptr;
  const uint16_t* row(int64_t r) const { return rows + (token ? token[r] : r) * stride; }
};

struct PrefetchesNothing {
  void prefetch(int64_t, int64_t, Prefetches&) const {}
};

struct Job {
  int64_t expert, first_row, rows, first_unit, units;
};

inline thread_local Buffer<uint32_t> row_words, update_words, panel_words;
inline thread_local Buffer<float> row_floats, row_scales;
inline thread_local Buffer<uint32_t> partial_sums;

// ------------------------------------------------------------------------------------------------------------- rows

// One row into its place among sixteen; `out` is its first word, its words of the next tile lie TILE_WORDS further.
inline void pack_row(const uint16_t* row, int64_t depth, int64_t tiles, uint32_t* out) {
  constexpr int64_t STEP = TILE * Bf16::PER_WORD;
  const int64_t whole = depth / STEP;
  for (int64_t t = 0; t < whole; ++t) std::memcpy(out + t * TILE_WORDS, row + t * STEP, TILE * sizeof(uint32_t));
  if (whole < tiles) {
    uint16_t last[STEP] = {};
    std::memcpy(last, row + whole * STEP, (depth - whole * STEP) * sizeof(uint16_t));
    std::memcpy(out + whole * TILE_WORDS, last, sizeof(last));
  }
}

inline void pack_row_int8(const uint16_t* row, int64_t depth, int64_t tiles, const float* depth_scale, uint32_t* out,
                          float* scale) {
  constexpr int64_t STEP = TILE * Int8::PER_WORD;
  float* values = row_floats.get(tiles * STEP);
  uint32_t largest = 0;  // compared as integers: a NaN is the largest of all and is not lost
  if (depth_scale)
    for (int64_t k = 0; k < depth; ++k) values[k] = widen(row[k]) * depth_scale[k];
  else
    for (int64_t k = 0; k < depth; ++k) values[k] = widen(row[k]);
  for (int64_t k = 0; k < depth; ++k) largest = std::max(largest, bits_of(values[k]) & 0x7fffffff);
  std::fill(values + depth, values + tiles * STEP, 0.0f);
  const bool nothing = largest < bits_of(1e-30f), infinite = largest >= 0x7f800000;
  if (infinite) std::fill(values, values + depth, 0.0f);  // int8 has no NaN and no infinity: the scale is NaN instead
  const float inverse = nothing || infinite ? 0 : 127 / float_of(largest);
  *scale = nothing ? 0 : infinite ? float_of(0x7fc00000) : float_of(largest) / 127;
  for (int64_t t = 0; t < tiles; ++t) {
    uint8_t q[STEP];
    for (int64_t k = 0; k < STEP; ++k) q[k] = uint8_t(int(values[t * STEP + k] * inverse + 128.5f) - 128 + ROW_OFFSET);
    std::memcpy(out + t * TILE_WORDS, q, sizeof(q));
  }
}

// pack(r, out) for every row, zeros up to a whole tile of rows.
template <class Pack>
uint32_t* pack_tiles(Buffer<uint32_t>& buffer, int64_t rows, int64_t tiles, const Pack& pack) {
  const int64_t padded = round_up(rows, TILE);
  uint32_t* packed = buffer.get(padded * tiles * TILE);
  for (int64_t r = 0; r < padded; ++r) {
    uint32_t* out = packed + r / TILE * tiles * TILE_WORDS + r % TILE * TILE;
    if (r < rows)
      pack(r, out);
    else
      for (int64_t t = 0; t < tiles; ++t) std::memset(out + t * TILE_WORDS, 0, TILE * sizeof(uint32_t));
  }
  return packed;
}

// ------------------------------------------------------------------------------------------------------------- sums

// The sums of up to 32 rows of one panel, as fp32 for the epilogue.
template <class Kind>
struct PanelSums;

template <>
struct PanelSums<Bf16> {
  float* sums;
  int64_t width;
  void of_panel(const Product& p, int64_t, int64_t panel) {
    width = std::min(PANEL, p.weights.columns - panel * PANEL);
  }
  void of_rows(const float*) {}
  Floats16 at(int64_t r, int half) const { return load(sums + r * PANEL + half * TILE); }
};

template <>
struct PanelSums<Int8> {
  int32_t* sums;
  alignas(64) float update[PANEL * PANEL];
  alignas(64) float column_scale[PANEL];
  alignas(64) int32_t offset[PANEL];
  const float* row_scale;
  bool updated;
  int64_t width;
  void of_panel(const Product& p, int64_t expert, int64_t panel) {
    width = std::min(PANEL, p.weights.columns - panel * PANEL);
    updated = p.update.weights.tiles > 0;
    const int64_t first = expert * p.weights.columns + panel * PANEL;
    for (int64_t n = 0; n < PANEL; ++n) {
      column_scale[n] = n >= width ? 0 : p.weights.column_scale ? p.weights.column_scale[first + n] : 1;
      offset[n] = n >= width ? 0 : ROW_OFFSET * p.weights.sum[first + n];
    }
  }
  void of_rows(const float* scales) { row_scale = scales; }
  Floats16 at(int64_t r, int half) const {
    const int64_t i = r * PANEL + half * TILE;
    const Integers16 sum = load_as<int32_t, TILE>(sums + i) - load_as<int32_t, TILE>(offset + half * TILE);
    const Floats16 scale = row_scale[r] * load(column_scale + half * TILE);
    const Floats16 scaled = __builtin_convertvector(sum, Floats16) * scale;
    return updated ? scaled + load(update + i) : scaled;
  }
};

inline void fetch_lines(const uint32_t* first, int64_t lines) {
  for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(first + i * TILE, 0, 2);
}

// Where the packed rows of a job are too many for the L2 cache, they are taken in chunks of their depth, and the partial
// sums of a few units wait for the next chunk: so each weight is read once for all rows.
struct DepthChunks {
  int64_t count, tiles, group;
  DepthChunks(const Product& p, const Job& job) {
    const int64_t row_tiles = ceil_div(job.rows, TILE), blocks = ceil_div(job.rows, PANEL);
    const int64_t panels = p.second ? 2 : 1;
    const int64_t tile_bytes = TILE_WORDS * int64_t(sizeof(uint32_t)) * (row_tiles + 2 * 2 * panels);
    count = ceil_div(p.weights.tiles, std::max<int64_t>(1, CHUNK_BYTES / tile_bytes));
    tiles = ceil_div(p.weights.tiles, count);
    count = ceil_div(p.weights.tiles, tiles);
    const int64_t unit_bytes = blocks * panels * PANEL * PANEL * int64_t(sizeof(uint32_t));
    group = count == 1 ? 1 : std::clamp<int64_t>(PARTIAL_BYTES / unit_bytes, 1, job.units);
  }
};

// While a block of rows is summed, its share of the panel that follows comes into the L2 cache: else the first block
// of every panel waits for memory (0.9 instead of 1.18 TFLOP/s at 128 rows).
template <class Kind, class Way, class Epilogue>
void run_units(const Product& p, const Job& job, const uint32_t* rows, const uint32_t* low, const float* scales,
               const Epilogue& epilogue) {
  using Sum = typename Kind::Sum;
  const typename Way::Registers registers;
  (void)registers;
  DepthChunks chunks(p, job);
  const int64_t row_tile = p.weights.tiles * TILE_WORDS, low_tile = p.update.weights.tiles * TILE_WORDS;
  const int64_t blocks = ceil_div(job.rows, PANEL), end = job.first_unit + job.units, step_lines = 2 * TILE;
  const int panels = p.second ? 2 : 1;
  const auto chunk_of = [&](int64_t unit, int64_t chunk, int which) {
    return p.weights.panel(job.expert, unit + which * p.second) + chunk * chunks.tiles * 2 * TILE_WORDS;
  };
  const bool stored = p.weights.stored.data != nullptr;
  const int64_t chunk_words = chunks.tiles * 2 * TILE_WORDS, unit_bytes = panels * chunk_words * int64_t(sizeof(uint32_t));
  const int64_t most_units = std::min(STORED_UNITS, chunks.count == 1 ? job.units : chunks.group);
  const int64_t at_once = stored ? std::clamp<int64_t>(STORED_BYTES / unit_bytes, 1, most_units) : 1;
  uint32_t* packed = stored ? panel_words.get(panels * at_once * chunk_words) : nullptr;
  if (chunks.count == 1) chunks.group = at_once;
  auto* memory = reinterpret_cast<Sum*>(partial_sums.get(chunks.group * blocks * panels * PANEL * PANEL));
  PanelSums<Kind> sums[2];
  Prefetches prefetches;
  for (int64_t group = job.first_unit; group < end; group += chunks.group) {
    const int64_t group_end = std::min(end, group + chunks.group);
    for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
      const bool last = chunk + 1 == chunks.count;
      const int64_t first_tile = chunk * chunks.tiles, tiles = std::min(chunks.tiles, p.weights.tiles - first_tile);
      for (int64_t unit = group; unit < group_end; ++unit) {
        // what comes after this unit
        const bool turn = unit + 1 == group_end;
        const int64_t next_unit = turn && !last ? group : unit + 1, next_chunk = turn ? (last ? 0 : chunk + 1) : chunk;
        const int64_t place = (unit - group) % at_once;
        for (int which = 0; stored && place == 0 && which < panels; ++which)
          pack_stored(p.weights.stored, job.expert, unit + which * p.second, std::min(at_once, group_end - unit),
                      p.weights.columns, p.weights.depth, first_tile, tiles, packed + which * at_once * chunk_words,
                      chunk_words);
        if (last)
          for (int which = 0; which < panels; ++which)
            sums[which].of_panel(p, job.expert, unit + which * p.second);
        for (int64_t i = 0; i < blocks; ++i) {
          const int64_t count = std::min(PANEL, job.rows - i * PANEL);
          const int64_t from = step_lines * i / blocks, share = step_lines * (i + 1) / blocks - from;
          const int64_t lines = Way::AHEAD && !stored && next_unit < end ? share : 0;
          for (int which = 0; which < panels; ++which) {
            PanelSums<Kind>& out = sums[which];
            const int64_t slot = chunks.count == 1 ? 0 : (unit - group) * blocks + i;
            out.sums = memory + (slot * panels + which) * PANEL * PANEL;
            out.of_rows(scales + i * PANEL);
            const uint32_t* a = rows + 2 * i * row_tile + first_tile * TILE_WORDS;
            const uint32_t* ahead = lines ? chunk_of(next_unit, next_chunk, which) + from * TILE : nullptr;
            const uint32_t* columns = stored ? packed + (which * at_once + place) * chunk_words : chunk_of(unit, chunk, which);
            Depth depth{{a, row_tile, columns, tiles}, {}, ahead, lines, chunk > 0};
            Stretch update;
            if (low && last)
              update = {low + 2 * i * low_tile, low_tile, p.update.weights.panel(job.expert, unit + which * p.second),
                        p.update.weights.tiles};
            if (Way::AHEAD && last && which + 1 == panels) {
              prefetches.count = 0;
              epilogue.prefetch(unit, job.first_row + i * PANEL, prefetches);
              depth.prefetches = prefetches.count ? &prefetches : nullptr;
            }
            if constexpr (std::is_same_v<Kind, Bf16>) depth.update = update;
            Way::template multiply<Kind>(depth, count, out.sums);
            if constexpr (std::is_same_v<Kind, Int8>)
              if (update.tiles) Way::template multiply<Bf16>(Depth{update, {}, nullptr, 0, false}, count, out.update);
          }
          if (last) epilogue(job, unit, job.first_row + i * PANEL, count, sums[0], sums[1]);
        }
      }
    }
  }
}

// Row r's share of the first panels of a job, prefetched while its rows are packed.
inline void fetch_share(const Product& p, const Job& job, int64_t r) {
  const int64_t lines = p.weights.tiles * 2 * TILE, from = lines * r / job.rows, to = lines * (r + 1) / job.rows;
  for (int which = 0; which < (p.second ? 2 : 1); ++which)
    fetch_lines(p.weights.panel(job.expert, job.first_unit + which * p.second) + from * TILE, to - from);
}

template <class Kind, class Epilogue>
void run_job_of(const Product& p, const Job& job, const Input& input, const Epilogue& epilogue) {
  float* scales = row_scales.get(job.rows + PANEL);
  const Weights& w = p.weights;
  const float* depth_scale = w.depth_scale ? w.depth_scale + job.expert * w.depth : nullptr;
  const uint32_t* rows = pack_tiles(row_words, job.rows, w.tiles, [&](int64_t r, uint32_t* out) {
    if (p.path == AMX && job.rows > Kind::FEW_ROWS && w.data) fetch_share(p, job, r);
    if constexpr (std::is_same_v<Kind, Bf16>)
      pack_row(input.row(job.first_row + r), w.depth, w.tiles, out);
    else
      pack_row_int8(input.row(job.first_row + r), w.depth, w.tiles, depth_scale, out, scales + r);
  });
  const uint32_t* low = nullptr;
  if (p.update.weights.tiles) {
    const int64_t width = p.update.width(), tiles = p.update.weights.tiles;
    low = pack_tiles(update_words, job.rows, tiles, [&](int64_t r, uint32_t* out) {
      pack_row(p.update.low + (job.first_row + r) * width, width, tiles, out);
    });
  }
  with_way<Kind>(p.path, job.rows, [&](auto way) {
    run_units<Kind, decltype(way)>(p, job, rows, low, scales, epilogue);
  });
}

template <class Epilogue>
void run_job(const Product& p, const Job& job, const Input& input, const Epilogue& epilogue) {
  if constexpr (Epilogue::OF_INT8_TOO) {
    p.int8 ? run_job_of<Int8>(p, job, input, epilogue) : run_job_of<Bf16>(p, job, input, epilogue);
  } else {
    run_job_of<Bf16>(p, job, input, epilogue);
  }
  end_of_streaming();
}

// ------------------------------------------------------------------------------------------------------------- jobs

// Rows of a job at most; a multiple of a panel.
inline int64_t rows_of_job(int64_t tiles) {
  const int64_t fitting = DEEP_ROWS / (tiles * TILE * int64_t(sizeof(uint32_t))) / PANEL * PANEL;
  return std::clamp(fitting, DEEP_ROW_BLOCK, ROW_BLOCK);
}

// Blocks of rows, cut along the columns too where there are few of them.
// first[e] .. first[e + 1] are the rows of expert e.
inline std::vector<Job> list_jobs(const Product& p, int64_t experts, const int32_t* first, int threads,
                                  int64_t most_rows = ROW_BLOCK) {
  const int64_t most = std::min(most_rows, rows_of_job(p.weights.tiles));
  std::vector<Job> blocks, jobs;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t start = first[e], count = first[e + 1] - start, parts = ceil_div(count, most);
    if (count <= 0) continue;
    const int64_t size = round_up(ceil_div(count, parts), PANEL);
    for (int64_t r = 0; r < count; r += size) blocks.push_back({e, start + r, std::min(size, count - r), 0, p.units});
  }
  const int64_t wanted = threads > 1 ? JOBS_PER_THREAD * threads : 1;
  const int64_t cuts = blocks.empty() ? 1 : ceil_div(wanted, int64_t(blocks.size()));
  const int64_t width = ceil_div(p.units, cuts);
  jobs.reserve(blocks.size() * cuts);
  for (const Job& block : blocks)
    for (int64_t unit = 0; unit < p.units; unit += width)
      jobs.push_back({block.expert, block.first_row, block.rows, unit, std::min(width, p.units - unit)});
  // The long jobs first, so that the threads end together.
  std::stable_sort(jobs.begin(), jobs.end(),
                   [](const Job& l, const Job& r) { return l.rows * l.units > r.rows * r.units; });
  return jobs;
}

}  // namespace amoeba
