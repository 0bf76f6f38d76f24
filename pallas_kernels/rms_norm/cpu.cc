#include "pallas_kernels/cpu/buffer.h"
#include "pallas_kernels/cpu/ops.h"

namespace moejax {

void rms_norm(Pool& pool, const Kernels& k, Type type, const void* x, const void* weight,
              int64_t rows, int64_t width, float eps, void* out) {
  constexpr int64_t kRowsOfTask = 16;
  Buffer<float> scale(width);
  k.widen(type, weight, width, scale.get());
  parallel_rows(pool, rows, kRowsOfTask, rows * width, [&](int64_t first, int64_t last) {
    Buffer<float> row(width);
    for (int64_t r = first; r < last; r++) {
      k.widen(type, at(x, r * width, type), width, row.get());
      char* to = at(out, r * width, type);
      k.norm(type, scale.get(), width, eps, row.get(), to);
      k.narrow(type, row.get(), width, to);
    }
  });
}

}  // namespace moejax
