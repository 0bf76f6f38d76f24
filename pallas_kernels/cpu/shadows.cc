// Residents under several evictions that see the same references: host_offload's Shadows.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "pallas_kernels/plan/log2.h"

#define MOEJAX_EXPORT extern "C" __attribute__((visibility("default")))

// Shadows.follow of `places` shadows: a step's ids [rows, layers, top_k]. Returns 0, or 1 for ids that
// name no expert, where nothing is changed.
//
// before: bool [places, layers, experts], of which `after` is a copy that changes, as held [places,
//   layers], last_used and frequency [layers, experts] do. misses: [places].
// weights: [2] of each eviction, large enough that a key has `bits` + 24 bits below it.
// other, here: [places], bool [places, layers, experts], or null.
MOEJAX_EXPORT int64_t moejax_follow_shadows(const int16_t* ids, int64_t rows, int64_t top_k,
                                            int64_t places, int64_t layers, int64_t experts,
                                            const int64_t* weights, const int64_t* eviction,
                                            const int64_t* cells, const int64_t* other,
                                            const uint8_t* here, int64_t clock, int64_t ages,
                                            const uint8_t* before, uint8_t* after, int64_t* held,
                                            int64_t* last_used, int64_t* frequency,
                                            int64_t* misses) {
  using namespace moejax;
  const int bits = 64 - __builtin_clzll(experts);
  const int64_t mask = (int64_t{1} << bits) - 1;  // of a key, the expert
  std::vector<uint8_t> active(experts);
  std::vector<int64_t> order(experts);
  for (int64_t i = 0; i < rows * layers * top_k; i++) {
    if (ids[i] < 0 || ids[i] >= experts) return 1;
  }
  std::fill_n(misses, places, 0);
  for (int64_t l = 0; l < layers; l++) {
    std::fill(active.begin(), active.end(), 0);
    for (int64_t row = 0; row < rows; row++) {
      for (int64_t i = 0; i < top_k; i++) active[ids[(row * layers + l) * top_k + i]] = 1;
    }
    int64_t *used = last_used + l * experts, *often = frequency + l * experts;
    for (int64_t p = 0; p < places; p++) {
      const int64_t at = p * layers + l, first = at * experts;
      const uint8_t* mine = before + first;
      const uint8_t* also = other ? before + (other[p] * layers + l) * experts : mine;
      int64_t room = cells[at], missed = 0, taken = 0;
      for (int64_t e = 0; e < experts; e++) room -= active[e] & mine[e];
      for (int64_t e = 0; e < experts; e++) {
        if (!active[e] || mine[e] || also[e] || (here && !here[first + e])) continue;
        missed++;
        if (taken < room) taken++, after[first + e] = 1;  // the others are read through
      }
      misses[p] += missed;
      const int64_t victims = std::max<int64_t>(taken + held[at] - cells[at], 0);
      held[at] += taken - victims;
      if (!victims) continue;
      const int64_t* weight = weights + 2 * eviction[p];
      int64_t count = 0;
      for (int64_t e = 0; e < experts; e++) {
        if (!mine[e] || active[e]) continue;
        const int64_t age = clock - used[e];
        const int64_t worth = weight[1] * log2_fixed(often[e] + 1) - weight[0] * log2_fixed(age);
        order[count++] = worth + (std::max<int64_t>(ages - age, 0) << bits) + e;
      }
      std::nth_element(order.begin(), order.begin() + victims - 1, order.begin() + count);
      for (int64_t i = 0; i < victims; i++) after[first + (order[i] & mask)] = 0;
    }
    for (int64_t e = 0; e < experts; e++) {
      if (active[e]) used[e] = clock, often[e]++;
    }
  }
  return 0;
}
