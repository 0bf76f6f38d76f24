// What rows of queries see of a span of keys, and what they ask for: included by tiles.h and amx.h.
#pragma once

namespace moejax {
namespace {

// Whether no value of a span is infinite or NaN.
template <Type kind>
bool is_finite(const AttendedSpan& s) {
  for (int64_t key = s.from; key < s.to; key++) {
    const char* const value = s.tokens[key] + s.value;
    for (int64_t i = 0; i < s.value_dim; i++) {
      const uint32_t bits = kind == Type::BF16 ? (uint32_t)((const uint16_t*)value)[i] << 16
                                               : ((const uint32_t*)value)[i];
      if ((bits & 0x7f800000u) == 0x7f800000u) return false;
    }
  }
  return true;
}

// Whether all rows see all keys of the span.
INLINE bool seen_by_all(const AttendedSpan& s) {
  for (int64_t i = 0; i < s.rows; i++) {
    if (s.first[i] > s.from || s.end[i] < s.to) return false;
  }
  return true;
}

// Asks for lines that come next, some at each step and evenly: of many at once the processor forgets some.
struct Ahead {
  const void* const* rows;
  const char *line = nullptr, *stop = nullptr;
  const char* straight = nullptr;  // stop, if each step asks for one line
  int64_t left, bytes, each;
  Ahead(const AttendedSpan& s, int64_t steps) : rows(s.next), left(s.next_count), bytes(s.next_bytes) {
    each = (left * ((bytes + 63) / 64) + steps - 1) / steps;
    begin();
  }
  void begin() {
    if (left-- > 0) line = (const char*)*rows++, stop = line + bytes;
    else each = 0;  // and the loop ends
    straight = each == 1 ? stop : line;
  }
  template <int64_t count = 1>
  INLINE void step() {
    if (__builtin_expect(straight - line > 64 * count, 1)) {  // a loop's counting takes the multipliers' turns
#pragma GCC unroll 16
      for (int64_t i = 0; i < count; i++) __builtin_prefetch(line + 64 * i);
      line += 64 * count;
      return;
    }
    for (int64_t i = 0; i < count * each; i++) {
      __builtin_prefetch(line);
      line += 64;
      if (__builtin_expect(line >= stop, 0)) begin();
    }
  }
};

}  // namespace
}  // namespace moejax
