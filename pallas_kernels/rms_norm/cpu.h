// Root mean square norms of rows.
#pragma once
#include "pallas_kernels/cpu/kernels.h"
#include "pallas_kernels/cpu/pool.h"

namespace moejax {

// Rounds x[0 … n) to `type`. scratch: n values of it.
void round_row(const Kernels& kernels, Type type, int64_t n, float* x, void* scratch);

// x and out are [rows, width], weight is [width], all of `type`.
void rms_norm(Pool& pool, const Kernels& kernels, Type type, const void* x, const void* weight,
              int64_t rows, int64_t width, float eps, void* out);

}  // namespace moejax
