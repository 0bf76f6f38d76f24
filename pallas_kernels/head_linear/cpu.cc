#include "pallas_kernels/head_linear/cpu.h"

#include <algorithm>

#include "pallas_kernels/cpu/buffer.h"

namespace moejax {
namespace {

constexpr int64_t kTokensOfTask = 16;

// Tokens [t0, t0 + tokens) of one head, at most kTokens. `wide`: kRows rows of weights, for those
// that must be widened.
void some_tokens(const Kernels& k, const HeadProducts& p, int64_t head, int64_t t0, int64_t tokens,
                 float* x, float* total, float* wide) {
  const Type kind = kind_of(p.type);
  const int64_t width = padded(p.columns), depth = padded(p.count);
  float* totals[kTokens];
  std::fill_n(total, tokens * width, 0.0f);
  for (int64_t t = 0; t < tokens; t++) {
    totals[t] = total + t * width;
    const int64_t place = ((t0 + t) * p.heads + head) * p.count;
    k.widen(p.type, at(p.x, place, p.type), p.count, x + t * depth);
  }
  const char* weights = at(p.w, (head * p.rows + p.first) * p.columns, p.type);
  for (int64_t i = 0; i < p.count; i += kRows) {
    const int64_t rows = std::min(kRows, p.count - i);
    const void* w[kRows];
    const float* h[kTokens];
    for (int64_t r = 0; r < rows; r++) {
      w[r] = at(weights, (i + r) * p.columns, p.type);
      if (p.type == Type::F16) {
        k.widen(p.type, w[r], p.columns, wide + r * width);
        w[r] = wide + r * width;
      }
    }
    for (int64_t t = 0; t < tokens; t++) h[t] = x + t * depth + i;
    k.add(kind, w, rows, h, tokens, p.columns, totals);
  }
  for (int64_t t = 0; t < tokens; t++) {
    k.unpack(kind, totals[t], p.columns, wide);
    const int64_t place = ((t0 + t) * p.heads + head) * p.columns;
    k.narrow(p.type, wide, p.columns, at(p.y, place, p.type));
  }
}

}  // namespace

void multiply_transposed(Pool& pool, const Kernels& k, const HeadProducts& p) {
  const int64_t parts = (p.tokens + kTokensOfTask - 1) / kTokensOfTask;
  parallel(pool, p.heads * parts, p.heads * p.tokens * p.count * p.columns, [&](int64_t task) {
    const int64_t width = padded(p.columns);
    Buffer<float> x(kTokens * padded(p.count)), total(kTokens * width), wide(kRows * width);
    const int64_t head = task / parts, first = task % parts * kTokensOfTask;
    const int64_t last = std::min(p.tokens, first + kTokensOfTask);
    for (int64_t t = first; t < last; t += kTokens) {
      const int64_t tokens = std::min(kTokens, last - t);
      some_tokens(k, p, head, t, tokens, x.get(), total.get(), wide.get());
    }
  });
}

}  // namespace moejax
