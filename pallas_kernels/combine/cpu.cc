#include <algorithm>

#include "pallas_kernels/cpu/buffer.h"
#include "pallas_kernels/cpu/ops.h"

namespace moejax {

void combine(Pool& pool, const Kernels& k, Type type, const void* residual, const float* y,
             const float* weights, int64_t tokens, int64_t top_k, int64_t width, void* out) {
  constexpr int64_t kRowsOfTask = 8;
  const int64_t work = tokens * top_k * width;
  parallel_rows(pool, tokens, kRowsOfTask, work, [&](int64_t first, int64_t last) {
    Buffer<float> buffer(2 * width);
    float *total = buffer.get(), *x = total + width;
    for (int64_t t = first; t < last; t++) {
      std::fill(total, total + width, 0.0f);
      for (int64_t slot = 0; slot < top_k; slot++) {
        const float weight = weights[t * top_k + slot];
        // As padding has: most rows of a small batch. What is there is not read, NaN or not.
        if (weight == 0) continue;
        const float* row = y + (t * top_k + slot) * width;
        for (int64_t c = 0; c < width; c++) total[c] += row[c] * weight;
      }
      k.widen(type, at(residual, t * width, type), width, x);
      for (int64_t c = 0; c < width; c++) total[c] += x[c];
      k.narrow(type, total, width, at(out, t * width, type));
    }
  });
}

}  // namespace moejax
