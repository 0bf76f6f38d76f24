#include "pallas_kernels/rms_norm/cpu.h"

#include <algorithm>

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
  const int64_t bytes = width * size_of(type);
  const int64_t tasks = (rows + kRowsOfTask - 1) / kRowsOfTask;
  parallel(pool, tasks, rows * width, [&](int64_t task) {
    Buffer<float> row(width);
    const int64_t last = std::min(rows, (task + 1) * kRowsOfTask);
    for (int64_t r = task * kRowsOfTask; r < last; r++) {
      k.widen(type, static_cast<const char*>(x) + r * bytes, width, row.get());
      char* to = static_cast<char*>(out) + r * bytes;
      k.norm(type, scale.get(), width, eps, row.get(), to);
      k.narrow(type, row.get(), width, to);
    }
  });
}

}  // namespace moejax
