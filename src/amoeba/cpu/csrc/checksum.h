// What a piece of memory holds, in 64 bits: every word times an odd number that depends on its place, summed. One changed
// word is always seen, any other change but for one in 2^64.
#pragma once
#include "numbers.h"

namespace [[gnu::visibility("hidden")]] amoeba {

inline uint64_t checksum(const char* data, int64_t bytes) {
  constexpr uint64_t ODD = 0x9e3779b97f4a7c15u;  // word i is multiplied by ODD . (2 i + 1)
  const int64_t words = bytes / 8;
  uint64_t sum = 0;
  for (int64_t i = 0; i < words; ++i) {
    uint64_t word;
    std::memcpy(&word, data + 8 * i, 8);
    sum += word * (ODD + 2 * ODD * uint64_t(i));
  }
  uint64_t rest = 0;
  std::memcpy(&rest, data + 8 * words, size_t(bytes - 8 * words));
  return sum + rest * (ODD + 2 * ODD * uint64_t(words));
}

}  // namespace amoeba
