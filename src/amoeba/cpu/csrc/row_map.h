// The permutation of routed slots (token t, choice k) into rows that are sorted by expert, stable in the slot.
#pragma once
#include "packed_layout.h"

namespace [[gnu::visibility("hidden")]] amoeba {

struct RowMap {
  int32_t* first = nullptr;     // (E + 1) the rows of expert e are first[e] .. first[e + 1]
  int32_t* order = nullptr;     // (N) sorted row -> slot t K + k
  int32_t* slot_row = nullptr;  // (N) slot -> sorted row, -1 where its expert id is a sentinel, outside [0, E)

  static int64_t size(int64_t experts, int64_t slots) { return experts + 1 + 2 * slots; }
  static RowMap in(int32_t* memory, int64_t experts, int64_t slots) {
    return {memory, memory + experts + 1, memory + experts + 1 + slots};
  }

  void sort(int64_t experts, int64_t slots, const int64_t* expert) const {
    std::fill(first, first + experts + 1, 0);
    const auto owned = [&](int64_t e) { return uint64_t(e) < uint64_t(experts); };
    for (int64_t i = 0; i < slots; ++i)
      if (owned(expert[i])) ++first[expert[i] + 1];
    for (int64_t e = 0; e < experts; ++e) first[e + 1] += first[e];
    for (int64_t i = 0; i < slots; ++i) {
      slot_row[i] = owned(expert[i]) ? first[expert[i]]++ : -1;
      if (slot_row[i] >= 0) order[slot_row[i]] = int32_t(i);
    }
    for (int64_t e = experts; e > 0; --e) first[e] = first[e - 1];
    first[0] = 0;
  }
};

}  // namespace amoeba
