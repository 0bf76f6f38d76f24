#include "pallas_kernels/rms_norm/cpu.h"

#include <algorithm>
#include <cmath>

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

void norm_row(const Kernels& k, Type type, const float* weight, int64_t n, float eps, float* x,
              void* scratch) {
  // Eight sums in double: one order, whatever the instruction set, and no error that counts.
  double part[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; j++) part[j] += static_cast<double>(x[i + j]) * x[i + j];
  }
  for (; i < n; i++) part[i % 8] += static_cast<double>(x[i]) * x[i];
  double total = 0;
  for (double value : part) total += value;
  const float scale = static_cast<float>(1 / std::sqrt(total / static_cast<double>(n) + eps));
  for (i = 0; i < n; i++) x[i] *= scale;
  round_row(k, type, n, x, scratch);
  for (i = 0; i < n; i++) x[i] *= weight[i];
  round_row(k, type, n, x, scratch);
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
      norm_row(k, type, scale.get(), width, eps, row.get(), to);
      if (type == Type::F32) k.narrow(type, row.get(), width, to);
    }
  });
}

}  // namespace moejax
