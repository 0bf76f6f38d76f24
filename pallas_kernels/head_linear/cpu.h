// One product per head with a part of its weights, read where they lie.
#pragma once
#include "pallas_kernels/cpu/kernels.h"
#include "pallas_kernels/cpu/pool.h"

namespace moejax {

struct HeadProducts {
  Type type;
  int64_t tokens, heads;
  int64_t rows, columns;  // of a head's weights
  int64_t first, count;   // of its rows, those that are used
  const void* w;          // the layer's, [heads, rows, columns]
  const void* x;          // [tokens, heads, count]
  void* y;                // [tokens, heads, columns]
};

// y[t, h] = x[t, h] · w[h, first … first + count): a sum over rows, which no lane of w crosses.
// Rows are added up in ascending order, whatever the number of tokens.
void multiply_transposed(Pool& pool, const Kernels& kernels, const HeadProducts& products);

}  // namespace moejax
