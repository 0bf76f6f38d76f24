#include "pallas_kernels/rms_norm/cpu.h"

#include "pallas_kernels/cpu/buffer.h"

namespace moejax {
namespace {

constexpr int64_t kRowsOfTask = 16;

}  // namespace

void round_row(const Kernels& k, Type type, int64_t n, float* x, void* scratch) {
  if (type == Type::F32) return;
  k.narrow(type, x, n, scratch);
  k.widen(type, scratch, n, x);
}

void rms_norm(Pool& pool, const Kernels& k, Type type, const void* x, const void* weight,
              int64_t rows, int64_t width, float eps, void* out) {
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
