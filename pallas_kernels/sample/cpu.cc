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

}  // namespace moejax
