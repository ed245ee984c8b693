// Weights as the caller stores them, packed panel by panel by the job that reads them: nothing of it is kept.
#pragma once
#include "block_products.h"
#include "interleave.h"
#include <type_traits>

namespace [[gnu::visibility("hidden")]] amoeba {

struct Stored {  // (expert, column, k) in bf16, or in codes if their coding has scales; data is null where weights are packed
  const void* data = nullptr;
  int64_t stride_e = 0, stride_column = 0, stride_k = 0;
  bool turned = false;  // codes whose rows are the depth, and lie together along the columns
  Coding coding;
};

// Some panels of one expert that lie beside each other, packed at once: where the columns of one k lie together, that
// reads whole runs of them.
class StoredPanels {
 public:
  StoredPanels(const Stored& stored, int64_t expert, int64_t panel, int64_t panels, int64_t columns, int64_t depth)
      : from_(static_cast<const uint16_t*>(stored.data) + expert * stored.stride_e + panel * PANEL * stored.stride_column),
        column_(stored.stride_column), k_(stored.stride_k), panels_(panels), width_(columns - panel * PANEL),
        depth_(depth) {}

  // The tiles of depth from `first` on: [panel][tile][half][word][column], zeros past the columns and the depth.
  void pack(int64_t first, int64_t tiles, uint32_t* out, int64_t panel_words) const {
    for (int64_t t = first; t < first + tiles; ++t, out += 2 * TILE_WORDS) {
      const int64_t k = t * PANEL, count = std::min(PANEL, depth_ - k);
      if (k_ == 1)
        for (int64_t i = 0; i < 2 * panels_; ++i)
          by_columns(i * TILE, k, count, out + i / 2 * panel_words + i % 2 * TILE_WORDS);
      else
        for (int64_t w = 0; w < TILE; ++w)
          for (int64_t i = 0; i < panels_; ++i)
            by_depth(i * PANEL, k + 2 * w, count - 2 * w, out + i * panel_words + w * TILE);
    }
  }

 private:
  // Half a panel, of which each column's words lie together.
  void by_columns(int64_t column, int64_t k, int64_t count, uint32_t* out) const {
    const uint16_t* from = from_ + column * column_ + k;
    if (count == PANEL && column + TILE <= width_)
      return transpose_tile([&](int64_t c) { return from + c * column_; }, out);
    alignas(64) uint16_t lines[TILE][PANEL] = {};
    for (int64_t c = 0; c < std::min(TILE, width_ - column); ++c)
      std::memcpy(lines[c], from + c * column_, count * sizeof(uint16_t));
    transpose_tile([&](int64_t c) { return lines[c]; }, out);
  }

  // A panel's words of k and k + 1; the columns of one k lie together, or nothing does.
  void by_depth(int64_t column, int64_t k, int64_t count, uint32_t* out) const {
    const uint16_t* from = from_ + column * column_ + k * k_;
    if (column_ == 1 && count >= 2 && column + PANEL <= width_)
      return pack_pair(from, from + k_, out, out + TILE_WORDS);
    alignas(64) uint16_t lines[2][PANEL] = {};
    for (int64_t j = 0; j < std::min<int64_t>(2, count); ++j)
      for (int64_t c = 0; c < std::min(PANEL, width_ - column); ++c) lines[j][c] = from[j * k_ + c * column_];
    pack_pair(lines[0], lines[1], out, out + TILE_WORDS);
  }

  const uint16_t* from_;
  int64_t column_, k_, panels_, width_, depth_;
};

// The same of codes: each weight is code . scale, rounded to bf16. stride_e and that of a row are bytes.
template <class Element>
class CodedPanels {
 public:
  CodedPanels(const Stored& stored, int64_t expert, int64_t panel, int64_t panels, int64_t columns, int64_t depth)
      : codes_(static_cast<const uint8_t*>(stored.data) + expert * stored.stride_e),
        row_(stored.turned ? stored.stride_k : stored.stride_column), turned_(stored.turned), coding_(stored.coding),
        expert_(expert), panel_(panel), panels_(panels), columns_(columns), depth_(depth) {}

  void pack(int64_t first, int64_t tiles, uint32_t* out, int64_t panel_words) const {
    for (int64_t t = first; t < first + tiles; ++t, out += 2 * TILE_WORDS) {
#ifdef AMOEBA_AVX512_VNNI
      if (coding_.element != NF4_ && !turned_ && t % AT_ONCE == 0 &&
          std::min((first + tiles) * PANEL, depth_) >= (t + AT_ONCE) * PANEL) {
        for (int64_t i = 0; i < panels_; ++i) many_by_columns(t, panel_ + i, out + i * panel_words);
        t += AT_ONCE - 1, out += (AT_ONCE - 1) * 2 * TILE_WORDS;
        continue;
      }
#endif
      for (int64_t i = 0; i < panels_; ++i)
        turned_ ? by_depth(t, panel_ + i, out + i * panel_words) : by_columns(t, panel_ + i, out + i * panel_words);
    }
  }

 private:
#ifdef AMOEBA_AVX512_VNNI
  static constexpr int64_t AT_ONCE = 256 / PANEL;  // tiles

  // As `by_columns`, of 256 numbers of each row. A row's next bytes are fetched ahead: of tiles alone each row gives a
  // few bytes at a time, of more rows than the hardware follows.
  void many_by_columns(int64_t t, int64_t panel, uint32_t* out) const {
    if (coding_.element < Q8_0_) {
      const auto unpack = [&](int64_t row, const uint8_t* p, uint16_t* line) {
        const RowScales scales = coding_.of_row(expert_, row);
        for (int64_t k = t * PANEL, i = 0; i < 256; k += PANEL, i += PANEL) {
          const float first = scales.at(coding_.column.at(k));
          const float second = coding_.column.shift > 4 ? first : scales.at(coding_.column.at(k + CODES));
          unpack_panel(p + Element::bytes(i), first, second, line + i);
        }
      };
      return many_by_columns(t, panel, Element::bytes(256), unpack, out);
    }
    with_blocks(coding_.element, [&](auto block) {
      using Block = typename decltype(block)::Type;
      constexpr int64_t STEP = 256 / (Block::COLUMNS == 64 ? 32 : 256) * Block::BYTES;
      const auto unpack = [](int64_t, const uint8_t* p, uint16_t* line) { unpack_256<Block>(p, line); };
      many_by_columns(t, panel, STEP, unpack, out);
    });
  }

  template <class UnpackRow>
  void many_by_columns(int64_t t, int64_t panel, int64_t step, const UnpackRow& unpack, uint32_t* out) const {
    alignas(64) uint16_t lines[TILE][256];
    const int64_t start = t / AT_ONCE * step;
    // what comes next of a row, or of the one in its place in the panels that come next
    const int64_t next = (t + 2 * AT_ONCE) * PANEL > depth_ ? panels_ * PANEL * row_ - start : step;
    for (int64_t half = 0; half < 2; ++half) {
      for (int64_t c = 0, row = panel * PANEL + half * TILE; c < TILE; ++c, ++row) {
        const uint8_t* p = codes_ + row * row_ + start;
        for (int64_t line = 0; line < step; line += 64) __builtin_prefetch(p + next + line);
        row < columns_ ? unpack(row, p, lines[c]) : (void)std::memset(lines[c], 0, sizeof(lines[c]));
      }
      for (int64_t i = 0; i < AT_ONCE; ++i)
        transpose_tile([&](int64_t c) { return lines[c] + i * PANEL; }, out + (2 * i + half) * TILE_WORDS);
    }
  }

  // 32 numbers, sixteen with each scale.
  static void unpack_panel(const uint8_t* p, float first, float second, uint16_t* out) {
    if constexpr (std::is_same_v<Element, E2m1>) {  // looked up among the sixteen numbers that a scale makes of the codes
      const __m512 values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
      const auto with = [&](float scale) { return (__m256i)halves_of((Floats16)(values * _mm512_set1_ps(scale))); };
      const __m256i lower = with(first), upper = second == first ? lower : with(second);
      const __m512i numbers = _mm512_inserti64x4(_mm512_castsi256_si512(lower), upper, 1);
      const __m512i of_upper = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(0x00100010), 1);
      // words of a byte each: the first code in the lower half, the second in the upper
      const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
      const __m512i pairs = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
      const __m512i place = _mm512_or_si512(_mm512_and_si512(pairs, _mm512_set1_epi32(0x000F000F)), of_upper);
      _mm512_storeu_si512(out, _mm512_permutexvar_epi16(place, numbers));
    } else {
      store_some_scaled<Element>(out, Element::load(p), first, CODES);
      store_some_scaled<Element>(out + CODES, Element::load(p + Element::bytes(CODES)), second, CODES);
    }
  }
#endif

  // Rows of codes are columns of the product.
  void by_columns(int64_t t, int64_t panel, uint32_t* out) const {
    alignas(64) uint16_t lines[TILE][PANEL];
    for (int64_t half = 0; half < 2; ++half, out += TILE_WORDS) {
      for (int64_t c = 0; c < TILE; ++c)
        read(panel * PANEL + half * TILE + c, columns_, t * PANEL, depth_, lines[c]);
      transpose_tile([&](int64_t c) { return lines[c]; }, out);
    }
  }

  // Rows of codes are the depth.
  void by_depth(int64_t t, int64_t panel, uint32_t* out) const {
    alignas(64) uint16_t lines[2][PANEL];
    for (int64_t w = 0; w < TILE; ++w, out += TILE) {
      for (int64_t j = 0; j < 2; ++j) read(t * PANEL + 2 * w + j, depth_, panel * PANEL, columns_, lines[j]);
      pack_pair(lines[0], lines[1], out, out + TILE_WORDS);
    }
  }

  // 32 numbers of a row from `first` on, zeros past the rows and past the end of a row.
  void read(int64_t row, int64_t rows, int64_t first, int64_t length, uint16_t* out) const {
    if (const Unpack unpack = unpack_of(coding_.element)) {
      const int64_t count = row < rows ? std::clamp<int64_t>(length - first, 0, PANEL) : 0;
      float numbers[PANEL];
      if (count) unpack(codes_ + row * row_, first, PANEL, numbers);
      round_some(numbers, count, out);
      return std::memset(out + count, 0, size_t(PANEL - count) * sizeof(uint16_t)), void();
    }
    for (int64_t k = first; k < first + PANEL; k += CODES, out += CODES) {
      const int64_t count = row < rows ? length - k : 0;
      if (count < CODES) std::memset(out, 0, CODES * sizeof(uint16_t));
      if (count <= 0) continue;
      const float scale = coding_.of_row(expert_, row).at(coding_.column.at(k));
      store_some_scaled<Element>(out, load_codes<Element>(codes_ + row * row_, k, count), scale, count);
    }
  }

  const uint8_t* codes_;
  int64_t row_;
  bool turned_;
  const Coding& coding_;
  int64_t expert_, panel_, panels_, columns_, depth_;
};

[[gnu::noinline]] inline void pack_stored(const Stored& stored, int64_t expert, int64_t panel, int64_t panels,
                                          int64_t columns, int64_t depth, int64_t first, int64_t tiles, uint32_t* out,
                                          int64_t panel_words) {
  if (!stored.coding.scales)
    return StoredPanels(stored, expert, panel, panels, columns, depth).pack(first, tiles, out, panel_words);
  with_element(stored.coding.element, [&](auto element) {
    CodedPanels<decltype(element)>(stored, expert, panel, panels, columns, depth).pack(first, tiles, out, panel_words);
  });
}

}  // namespace amoeba
