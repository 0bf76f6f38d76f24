// What rows of queries see of a span of keys: included by tiles.h and amx.h.
#pragma once

namespace moejax {
namespace {

// Whether no value of a span is infinite or NaN.
template <Type kind>
bool is_finite(const AttendedSpan& s) {
  for (int64_t key = s.from; key < s.to; key++) {
    for (int64_t i = 0; i < s.value_dim; i++) {
      const uint32_t bits = kind == Type::BF16 ? (uint32_t)((const uint16_t*)s.values[key])[i] << 16
                                               : ((const uint32_t*)s.values[key])[i];
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

}  // namespace
}  // namespace moejax
