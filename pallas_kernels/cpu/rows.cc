// Products of a few rows with a matrix, on the calling thread: for policies that are asked while a
// step waits.
#include <cstdint>
#include <cstring>

#define MOEJAX_EXPORT extern "C" __attribute__((visibility("default")))

namespace moejax {
namespace {

// Inlined, so that it is compiled for the instruction set of its caller. The sums of all columns are
// in the first cache, and each row of weights is read once, in the order of memory.
inline __attribute__((always_inline)) void multiply(const float* x, int64_t rows, int64_t inner,
                                                    const float* __restrict w, int64_t columns,
                                                    float* __restrict out) {
  std::memset(out, 0, rows * columns * sizeof(float));
  int64_t d = 0;
  for (; d + 4 <= inner; d += 4) {
    const float* w0 = w + d * columns;
    for (int64_t n = 0; n < rows; n++) {
      const float* a = x + n * inner + d;
      const float a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3];
      float* __restrict y = out + n * columns;
      for (int64_t e = 0; e < columns; e++) {
        float sum = y[e];  // one by one, in the order of the rows of weights, as numpy's einsum does
        sum = sum + a0 * w0[e];
        sum = sum + a1 * w0[columns + e];
        sum = sum + a2 * w0[2 * columns + e];
        sum = sum + a3 * w0[3 * columns + e];
        y[e] = sum;
      }
    }
  }
  for (; d < inner; d++) {
    for (int64_t n = 0; n < rows; n++) {
      const float a = x[n * inner + d];
      for (int64_t e = 0; e < columns; e++) out[n * columns + e] += a * w[d * columns + e];
    }
  }
}

#ifdef MOEJAX_X86
__attribute__((target("avx2"))) void multiply_avx2(const float* x, int64_t rows, int64_t inner,
                                                   const float* w, int64_t columns, float* out) {
  multiply(x, rows, inner, w, columns, out);
}
#endif

}  // namespace
}  // namespace moejax

// out[n, e] = Σ_d x[n, d] · w[d, e], of contiguous arrays.
MOEJAX_EXPORT void moejax_multiply_rows(const float* x, int64_t rows, int64_t inner,
                                        const float* w, int64_t columns, float* out) {
#ifdef MOEJAX_X86
  if (__builtin_cpu_supports("avx2")) {
    return moejax::multiply_avx2(x, rows, inner, w, columns, out);
  }
#endif
  moejax::multiply(x, rows, inner, w, columns, out);
}
