// Who leaves first, by what the policy remembers (stream/cache/slot_table.py): the same order to the last bit, in about a
// microsecond, so that it need not be found out ahead.
#pragma once
#include <cstdint>
#include <limits>
#include <vector>

namespace amoeba {
namespace {

struct Order {
  const int64_t* now;
  const double* uses;
  const int64_t* last;
  const int32_t* expert_in;  // of each place a layer has; below 0: nobody
  int64_t places;
};

inline double worth(const Order& order, int32_t expert) {
  const int64_t age = *order.now + 1 - order.last[expert];
  return order.uses[expert] / double(age * age);
}

// The first `wanted` of those that `may` leave; of equals, the one in the first place. Fewer where there are no more.
template <class May>
int64_t first_to_leave(const Order& order, int64_t wanted, const May& may, int32_t* found) {
  static thread_local std::vector<double> worths;
  constexpr double NEVER = std::numeric_limits<double>::infinity();
  worths.assign(order.places, NEVER);
  for (int64_t place = 0; place < order.places; ++place) {
    const int32_t expert = order.expert_in[place];
    if (expert >= 0 && may(expert)) worths[place] = worth(order, expert);
  }
  for (int64_t n = 0; n < wanted; ++n) {
    int64_t first = -1;
    for (int64_t place = 0; place < order.places; ++place)
      if (worths[place] < (first < 0 ? NEVER : worths[first])) first = place;
    if (first < 0) return n;
    found[n] = order.expert_in[first];
    worths[first] = NEVER;
  }
  return wanted;
}

}  // namespace
}  // namespace amoeba
