#include "pallas_kernels/linear/cpu.h"

#include <algorithm>

#include "pallas_kernels/cpu/buffer.h"

namespace moejax {
namespace {

constexpr int64_t kMost = 128;         // tokens at once

// Outputs [first, last) of all tokens. x: packed rows, `width` floats each.
void block(const Kernels& k, const Product& p, const float* x, int64_t width, int64_t first,
           int64_t last) {
  const Type kind = kind_of(p.type);
  const int64_t rows = last - first;
  const void *w[kMostRows], *next[kMostRows];
  Buffer<float> wide(p.type == Type::F16 ? rows * p.inputs : 0);
  for (int64_t r = 0; r < rows; r++) {
    w[r] = at(p.w, (first + r) * p.inputs, p.type);
    // What the call after this one reads; the last rows of the matrix name themselves again.
    next[r] = at(p.w, std::min(first + r + kAhead, p.outputs - 1) * p.inputs, p.type);
    if (p.type == Type::F16) {
      k.widen(p.type, w[r], p.inputs, &wide[r * p.inputs]);
      w[r] = &wide[r * p.inputs];
    }
  }
  float bias[kMostRows];
  if (p.bias) k.widen(p.type, at(p.bias, first, p.type), rows, bias);
  float y[kMost * kMostRows];
  for (int64_t t = 0; t < p.tokens; t += kMost) {
    const int64_t tokens = std::min(kMost, p.tokens - t);
    const float* operands[kMost];
    for (int64_t i = 0; i < tokens; i++) operands[i] = x + (t + i) * width;
    if (p.tokens > k.few(kind)) {
      k.dots_of_many(kind, w, rows, operands, tokens, p.inputs, y, kMostRows);
    } else {
      for (int64_t i = 0; i < tokens; i += kTokens) {
        const bool fetch = i == 0 && p.type != Type::F16;
        k.dots(kind, w, rows, operands + i, std::min(kTokens, tokens - i), p.inputs,
               y + i * kMostRows, kMostRows, fetch ? next : nullptr);
      }
    }
    for (int64_t i = 0; i < tokens; i++) {
      float* row = y + i * kMostRows;
      for (int64_t r = 0; p.bias && r < rows; r++) row[r] += bias[r];
      const int64_t place = (t + i) * p.y_stride + first;
      k.narrow(p.out_type, row, rows, at(p.y, place, p.out_type));
    }
  }
}

}  // namespace

void multiply(Pool& pool, const Kernels& k, const Product* products, int64_t count) {
  const int64_t tokens = products->tokens, width = apart(products->inputs);
  if (!tokens || !count) return;
  Buffer<float> x(count * tokens * width);
  constexpr int64_t kRowsOfX = 16;
  const int64_t parts = (tokens + kRowsOfX - 1) / kRowsOfX;
  const auto pack = [&](int64_t i) {
    const Product& p = products[i / parts];
    const int64_t first = i % parts * kRowsOfX, last = std::min(first + kRowsOfX, tokens);
    for (int64_t t = first; t < last; t++) {
      k.pack(p.type, at(p.x, t * p.x_stride, p.type), p.inputs,
             &x[(i / parts * tokens + t) * width]);
    }
  };
  parallel(pool, count * parts, count * tokens * width, pack);
  const int64_t rows = k.rows_of_task(kind_of(products->type));
  const int64_t blocks = (products->outputs + rows - 1) / rows;
  const int64_t work = count * tokens * width * products->outputs;
  parallel(pool, count * blocks, work, [&](int64_t i) {
    const Product& p = products[i / blocks];
    const int64_t first = i % blocks * rows;
    block(k, p, &x[i / blocks * tokens * width], width, first,
          std::min(first + rows, p.outputs));
  });
}

}  // namespace moejax
