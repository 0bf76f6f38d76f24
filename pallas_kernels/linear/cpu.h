// Products of rows with a matrix: linear, and head_linear one head after the other.
#pragma once
#include "pallas_kernels/cpu/kernels.h"
#include "pallas_kernels/cpu/pool.h"

namespace moejax {

// y[t] = x[t] · wᵀ + bias for t < tokens: x [tokens, inputs], w [outputs, inputs], both of `type`;
// rows of x and y lie x_stride and y_stride elements apart; bias: null or [outputs] of `type`.
struct Product {
  Type type, out_type;
  int64_t tokens, inputs, outputs, x_stride, y_stride;
  const void *x, *w, *bias;
  void* y;
};

// Products of the same shape, as many as `count`.
void multiply(Pool& pool, const Kernels& kernels, const Product* products, int64_t count);

}  // namespace moejax
