// States of sequences in pages of the arena, as pallas_kernels/state_pages.py lays them out.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "pallas_kernels/cpu/ops.h"

namespace moejax {

// Tokens whose operands are made before a state goes through them.
constexpr int64_t kRunTokens = 32;

inline float softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))); }

// Refuses runs whose tokens or pages are not there.
inline void check(const StateRuns& s) {
  const auto all_there = [&](const int32_t* pages) {
    return std::all_of(pages, pages + s.state_pages, [&](int64_t row) {
      return row >= 0 && row <= s.kv_rows - s.page_rows;
    });
  };
  for (int64_t n = 0; n < s.runs; n++) {
    const int64_t first = n * s.state_pages;
    if (s.skip[n] < 0 || s.length[n] > s.run_tokens) {
      throw Refused("tokens of run " + std::to_string(n) + " are not there");
    }
    if (s.skip[n] >= s.length[n]) continue;
    if (all_there(s.pages + first) && (s.is_new(n) || all_there(s.read + first)) &&
        (s.copy[first] < 0 || all_there(s.copy + first))) {
      continue;
    }
    throw Refused("state pages of run " + std::to_string(n) + " are not in the arena");
  }
}

// f(where, done, count) of the pieces of `count` elements of this op's part of the layer's state.
template <class F>
void each_piece(const StateRuns& s, const int32_t* pages, int64_t element, int64_t count,
                const F& f) {
  for (int64_t done = 0; done < count;) {
    const int64_t row =
        s.layer * s.layer_rows + s.first_row + (element + done) / s.row_elements;
    const int64_t within = row % s.page_rows * s.row_elements + (element + done) % s.row_elements;
    const int64_t here = std::min(count - done, s.page_rows * s.row_elements - within);
    f(s.arena + pages[row / s.page_rows] * s.row_elements + within, done, here);
    done += here;
  }
}
inline void load(const StateRuns& s, const int32_t* pages, int64_t element, int64_t count, void* to) {
  each_piece(s, pages, element, count, [&](const uint16_t* from, int64_t done, int64_t here) {
    std::memcpy(static_cast<uint16_t*>(to) + done, from, 2 * here);
  });
}
inline void store(const StateRuns& s, const int32_t* pages, int64_t element, int64_t count,
                  const void* from) {
  each_piece(s, pages, element, count, [&](uint16_t* to, int64_t done, int64_t here) {
    std::memcpy(to, static_cast<const uint16_t*>(from) + done, 2 * here);
  });
}

// Advances the states of all runs, in order, with a part of the state that no other thread has:
// begin(pages, is new), advance(rows [first, last) of its tokens), end(pages).
template <class Part>
void advance_runs(const StateRuns& s, Part& part) {
  for (int64_t n = 0; n < s.runs; n++) {
    if (s.skip[n] >= s.length[n]) continue;
    const int64_t first = n * s.state_pages;
    part.begin(s.read + first, s.is_new(n));
    part.advance(n * s.run_tokens + s.skip[n], n * s.run_tokens + s.length[n]);
    part.end(s.pages + first);
    if (s.copy[first] >= 0) part.end(s.copy + first);
  }
}

}  // namespace moejax
