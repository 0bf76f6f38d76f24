#include <algorithm>

#include "pallas_kernels/cpu/buffer.h"
#include "pallas_kernels/cpu/ops.h"

namespace moejax {
namespace {

constexpr int64_t kMost = 128;         // tokens at once
constexpr int64_t kRowsOfX = 16;       // of a task
constexpr int64_t kIntegerRows = 96;   // of a task that multiplies codes: the next ones are asked for within it
constexpr int64_t kDecoded = 16;       // rows of codes decoded at once for few tokens

// Elements `place` and on of weights, widened into `wide` where kernels do not take them as they are.
const void* row_at(const Kernels& k, const Product& p, int64_t place, int64_t n, float* wide) {
  const void* row = at(p.w, place, p.type);
  if (p.type != Type::F16) return row;
  k.widen(p.type, row, n, wide);
  return wide;
}

// Where a block of rows of w puts its results: outputs [first, first + rows) of all tokens. x: packed
// rows, `width` floats each. dots(operands, tokens, y): the block's products, kMostRows apart.
template <class Dots>
void outputs_of(const Kernels& k, const Product& p, const float* x, int64_t width, int64_t first,
                int64_t rows, const Dots& dots) {
  float bias[kMostRows];
  if (p.bias) k.widen(p.type, at(p.bias, first, p.type), rows, bias);
  float y[kMost * kMostRows];
  for (int64_t t = 0; t < p.tokens; t += kMost) {
    const int64_t tokens = std::min(kMost, p.tokens - t);
    const float* operands[kMost];
    for (int64_t i = 0; i < tokens; i++) operands[i] = x + (t + i) * width;
    dots(operands, tokens, y);
    for (int64_t i = 0; i < tokens; i++) {
      float* row = y + i * kMostRows;
      for (int64_t r = 0; p.bias && r < rows; r++) row[r] += bias[r];
      const int64_t place = (t + i) * p.y_stride + first;
      k.narrow(p.out_type, row, rows, at(p.y, place, p.out_type));
    }
  }
}

// Outputs [first, last) of all tokens.
void block(const Kernels& k, const Product& p, const float* x, int64_t width, int64_t first,
           int64_t last) {
  const int64_t rows = last - first;
  const void *w[kMostRows], *next[kAhead];
  Buffer<float> wide(p.type == Type::F16 ? rows * p.inputs : 0);
  for (int64_t r = 0; r < rows; r++) {
    w[r] = row_at(k, p, (first + r) * p.inputs, p.inputs, wide.get() + r * p.inputs);
  }
  for (int64_t i = 0; i < kAhead; i++) {
    next[i] = at(p.w, std::min(last + i, p.outputs - 1) * p.inputs, p.type);
  }
  outputs_of(k, p, x, width, first, rows, [&](const float* const* operands, int64_t tokens, float* y) {
    k.dots_of_many(kind_of(p.type), w, rows, operands, tokens, p.inputs, y, kMostRows,
                   p.type == Type::F16 ? nullptr : next);
  });
}

// A block of rows in codes: [first, last) of the part, which are outputs from `output` on.
void block_of_codes(const Kernels& k, const Product& p, const CodedRows& part, const float* x,
                    int64_t width, int64_t first, int64_t last, int64_t output) {
  const int64_t rows = last - first, size = size_of(p.type);
  if (part.format.matrix[UP].unit) {
    Buffer<float> scratch(integer_scratch(p.inputs, p.tokens));
    return outputs_of(k, p, x, width, output, rows,
                      [&](const float* const* operands, int64_t tokens, float* y) {
                        k.integer_dots(part.format, part.record, UP, first, rows, operands, tokens, y,
                                       kMostRows, scratch.get());
                      });
  }
  // Decoding twice takes less time than a copy of the decoded rows.
  const int64_t few = k.takes(part.format);
  if (p.tokens <= 2 * few) {
    return outputs_of(k, p, x, width, output, rows,
                      [&](const float* const* operands, int64_t tokens, float* y) {
                        for (int64_t t = 0; t < tokens; t += few) {
                          k.encoded_dots(part.format, part.record, UP, first, rows, operands + t,
                                         std::min(few, tokens - t), y + t * kMostRows, kMostRows);
                        }
                      });
  }
  // Of few tokens, a few rows at once: what was decoded stays near.
  const int64_t most = p.tokens <= k.few(kind_of(p.type)) ? kDecoded : rows;
  Buffer<char> decoded(most * p.inputs * size);
  for (int64_t done = 0; done < rows; done += most) {
    const int64_t mine = std::min(most, rows - done);
    const void* w[kMostRows];
    for (int64_t r = 0; r < mine; r++) {
      w[r] = row_of(part.format, part.record, UP, first + done + r);
      if (w[r]) continue;
      char* place = decoded.get() + r * p.inputs * size;
      k.decode(part.format, part.record, UP, first + done + r, 0, p.inputs, nullptr, place);
      w[r] = place;
    }
    outputs_of(k, p, x, width, output + done, mine, [&](const float* const* operands, int64_t tokens, float* y) {
      k.dots_of_many(kind_of(p.type), w, mine, operands, tokens, p.inputs, y, kMostRows, nullptr);
    });
  }
}

// Tokens [first, last), at most kTokens, of a product with w [inputs, outputs].
void sums(const Kernels& k, const Product& p, int64_t first, int64_t last, float* x, float* total,
          float* wide) {
  const Type kind = kind_of(p.type);
  const int64_t width = padded(p.outputs), depth = padded(p.inputs), tokens = last - first;
  float* totals[kTokens];
  std::fill_n(total, tokens * width, 0.0f);
  for (int64_t t = 0; t < tokens; t++) {
    totals[t] = total + t * width;
    k.widen(p.type, at(p.x, (first + t) * p.x_stride, p.type), p.inputs, x + t * depth);
  }
  for (int64_t i = 0; i < p.inputs; i += kRows) {
    const int64_t rows = std::min(kRows, p.inputs - i);
    const void* w[kRows];
    const float* h[kTokens];
    for (int64_t r = 0; r < rows; r++) {
      w[r] = row_at(k, p, (i + r) * p.outputs, p.outputs, wide + r * width);
    }
    for (int64_t t = 0; t < tokens; t++) h[t] = x + t * depth + i;
    k.add(kind, w, rows, h, tokens, p.outputs, totals);
  }
  for (int64_t t = 0; t < tokens; t++) {
    k.unpack(kind, totals[t], p.outputs, wide);
    k.narrow(p.type, wide, p.outputs, at(p.y, (first + t) * p.y_stride, p.type));
  }
}

}  // namespace

namespace {

// The tokens of all products, packed into x: rows `width` floats apart.
void pack_tokens(Pool& pool, const Kernels& k, const std::vector<Product>& products, int64_t width, float* x) {
  const int64_t count = static_cast<int64_t>(products.size()), tokens = products[0].tokens;
  const int64_t parts = (tokens + kRowsOfX - 1) / kRowsOfX;
  parallel(pool, count * parts, count * tokens * width, [&](int64_t i) {
    const Product& p = products[i / parts];
    const int64_t first = i % parts * kRowsOfX, last = std::min(first + kRowsOfX, tokens);
    for (int64_t t = first; t < last; t++) {
      k.pack(p.type, at(p.x, t * p.x_stride, p.type), p.inputs,
             x + (i / parts * tokens + t) * width);
    }
  });
}

}  // namespace

void multiply(Pool& pool, const Kernels& k, const std::vector<Product>& products) {
  const Product& one = products[0];
  const int64_t count = static_cast<int64_t>(products.size());
  const int64_t tokens = one.tokens, width = apart(one.inputs);
  Buffer<float> x(count * tokens * width);
  pack_tokens(pool, k, products, width, x.get());
  const int64_t rows = k.rows_of_task(kind_of(one.type));
  const int64_t blocks = tokens ? (one.outputs + rows - 1) / rows : 0;
  parallel(pool, count * blocks, count * tokens * width * one.outputs, [&](int64_t i) {
    const int64_t first = i % blocks * rows;
    block(k, products[i / blocks], &x[i / blocks * tokens * width], width, first,
          std::min(first + rows, one.outputs));
  });
}

void multiply_codes(Pool& pool, const Kernels& k, const Product& p, const std::vector<CodedRows>& w) {
  const int64_t width = apart(p.inputs);
  bool units = false, floats = false;
  for (const CodedRows& part : w) (part.format.matrix[UP].unit ? units : floats) = true;
  const int64_t whole_width = units ? quantized_size(p.inputs) : 0;
  Buffer<float> x(floats ? p.tokens * width : 0), whole(p.tokens * whole_width);
  if (floats) pack_tokens(pool, k, {p}, width, x.get());
  if (units) {
    parallel_rows(pool, p.tokens, kRowsOfX, p.tokens * p.inputs, [&](int64_t first, int64_t last) {
      Buffer<float> wide(p.inputs);
      for (int64_t t = first; t < last; t++) {
        k.widen(p.type, at(p.x, t * p.x_stride, p.type), p.inputs, wide.get());
        k.quantize(wide.get(), p.inputs, &whole[t * whole_width]);
      }
    });
  }
  struct Task {
    const CodedRows* part;
    int64_t first, last, output;
  };
  std::vector<Task> tasks;
  int64_t output = 0;
  for (const CodedRows& part : w) {
    const int64_t step = part.format.matrix[UP].unit ? kIntegerRows : k.rows_of_task(kind_of(p.type));
    for (int64_t first = 0; p.tokens && first < part.format.width; first += step) {
      tasks.push_back({&part, first, std::min(first + step, part.format.width), output + first});
    }
    output += part.format.width;
  }
  parallel(pool, static_cast<int64_t>(tasks.size()), p.tokens * width * p.outputs, [&](int64_t i) {
    const Task& task = tasks[i];
    const bool of_units = task.part->format.matrix[UP].unit;
    block_of_codes(k, p, *task.part, of_units ? whole.get() : x.get(), of_units ? whole_width : width, task.first,
                   task.last, task.output);
  });
}

void multiply_transposed(Pool& pool, const Kernels& k, const std::vector<Product>& products) {
  const Product& one = products[0];
  const int64_t count = static_cast<int64_t>(products.size()), width = padded(one.outputs);
  const int64_t parts = (one.tokens + kRowsOfX - 1) / kRowsOfX;
  parallel(pool, count * parts, count * one.tokens * one.inputs * one.outputs, [&](int64_t task) {
    Buffer<float> x(kTokens * padded(one.inputs)), total(kTokens * width), wide(kRows * width);
    const int64_t first = task % parts * kRowsOfX, last = std::min(one.tokens, first + kRowsOfX);
    for (int64_t t = first; t < last; t += kTokens) {
      sums(k, products[task / parts], t, std::min(t + kTokens, last), x.get(), total.get(),
           wide.get());
    }
  });
}

}  // namespace moejax
