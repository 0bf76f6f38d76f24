// The sum of a token's experts.
#pragma once
#include "pallas_kernels/cpu/kernels.h"
#include "pallas_kernels/cpu/pool.h"

namespace moejax {

// out[t] = residual[t] + Σ_k weights[t, k] · y[t, k], k ascending, rounded once. residual and out
// are [tokens, width] of `type`, y is float[tokens, top_k, width], weights float[tokens, top_k].
void combine(Pool& pool, const Kernels& kernels, Type type, const void* residual, const float* y,
             const float* weights, int64_t tokens, int64_t top_k, int64_t width, void* out);

}  // namespace moejax
