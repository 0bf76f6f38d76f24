#pragma once
#include <algorithm>
#include <cstdint>

namespace moejax {

// pallas_kernels/plan/victim.py: log2 of x ≥ 1 in units of 2^-12, linear between powers of two.
inline int64_t log2_fixed(int64_t x) {
  x = std::max<int64_t>(x, 1);
  const int exponent = 63 - __builtin_clzll(x);
  const int64_t rest = x - (int64_t{1} << exponent);
  return exponent * 4096 + (exponent > 12 ? rest >> (exponent - 12) : rest << (12 - exponent));
}

}  // namespace moejax
