#include <algorithm>
#include <limits>

#include "pallas_kernels/cpu/buffer.h"
#include "pallas_kernels/cpu/ops.h"

namespace moejax {

void draw(Pool& pool, const Kernels& k, const Draws& d) {
  parallel(pool, d.rows, d.rows * d.vocabulary * 8, [&](int64_t r) {
    if (!d.wanted[r]) return;
    const int64_t n = d.vocabulary, out = r * kCandidates;
    DrawnRow row = {};
    row.logits = d.logits + r * n, row.n = n, row.key = d.keys + 2 * r;
    row.temperature = d.temperature[r], row.top_p = d.top_p[r], row.top_k = d.top_k[r];
    row.far = d.far[r];
    row.id = d.ids + out, row.scaled = d.scaled + out, row.bits = d.bits + out;
    const bool truncates = row.temperature != 0 && (row.top_k > 0 || row.top_p < 1);
    Buffer<uint32_t> scratch(truncates ? 2 * (n + kPad) : 0);
    Buffer<char> buckets(truncates ? kBucketBytes : 0);
    row.distance = scratch.get(), row.list = scratch.get() + n + kPad, row.buckets = buckets.get();
    k.draw(row);
  });
}

void rank(Pool& pool, const Kernels& k, const Ranks& d) {
  parallel(pool, d.rows, d.rows * d.vocabulary * 8, [&](int64_t r) {
    const int32_t token = d.tokens[r];
    if (token < 0 || token >= d.vocabulary) return;
    k.rank({d.logits + r * d.vocabulary, d.vocabulary, d.most, token, d.chosen + r, d.rank + r,
            d.top_ids + r * d.most, d.top + r * d.most});
  });
}

namespace {

// The first of the largest; the last one of a row with NaN.
int64_t likeliest(const float* x, int64_t n) {
  constexpr int64_t kLanes = 16;  // that the compiler makes vectors of
  float best[kLanes];
  bool nan = false;
  std::fill(best, best + kLanes, -std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    int unordered = 0;
    for (int64_t j = 0; j < kLanes; j++) {
      best[j] = x[i + j] > best[j] ? x[i + j] : best[j];
      unordered |= x[i + j] != x[i + j];
    }
    nan |= unordered;
  }
  float top = *std::max_element(best, best + kLanes);
  for (; i < n; i++) {
    top = std::max(top, x[i]);
    nan |= x[i] != x[i];
  }
  return nan ? n - 1 : std::find(x, x + n, top) - x;
}

}  // namespace

void choose_likeliest(Pool& pool, const Greedy& g) {
  parallel(pool, g.rows, g.rows * g.vocabulary * 2, [&](int64_t r) {
    if (g.update[r]) g.tokens[r] = (int32_t)likeliest(g.logits + r * g.vocabulary, g.vocabulary);
  });
}

}  // namespace moejax
