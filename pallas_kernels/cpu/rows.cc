// Products of a few rows with a matrix, on the calling thread: for policies that are asked while a
// step waits.
#include <cstdint>
#include <cstring>

#ifdef MOEJAX_X86
#include <immintrin.h>
#endif

#define MOEJAX_EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE inline __attribute__((always_inline))

namespace moejax {
namespace {

constexpr int kRows = 8;  // of weights, between which sums stay in registers

struct Half {
  uint16_t bits;
};

INLINE float wide(float w) { return w; }

// Finite float16, without denormals of float32, which XLA's threads take for zeros.
INLINE float wide(Half h) {
  const uint32_t magnitude = (uint32_t)(h.bits & 0x7fff) << 13;
  const uint32_t bits = magnitude + (magnitude < 0x400u << 13 ? 113u << 23 : 112u << 23);
  float value;
  std::memcpy(&value, &bits, 4);
  if (magnitude < 0x400u << 13) value -= 0x1p-14f;
  return h.bits & 0x8000 ? -value : value;
}

// y[e] += Σ_i a[i] · w[i, e] for `count` rows of weights, one by one in their order, as numpy's
// einsum sums, from column `first` on.
template <class W>
INLINE void add_rows(const float* a, int64_t count, const W* w, int64_t first, int64_t columns,
                     float* __restrict y) {
  for (int64_t i = 0; i < count; i++) {
    for (int64_t e = first; e < columns; e++) y[e] = y[e] + a[i] * wide(w[i * columns + e]);
  }
}

#ifdef MOEJAX_X86
#define AVX2 __attribute__((target("avx2,f16c")))

AVX2 INLINE __m256 wide8(const float* w) { return _mm256_loadu_ps(w); }
AVX2 INLINE __m256 wide8(const Half* w) { return _mm256_cvtph_ps(_mm_loadu_si128((__m128i*)w)); }

template <class W>
AVX2 void multiply_avx2(const float* x, int64_t rows, int64_t inner, const W* w, int64_t columns,
                        float* out) {
  for (int64_t d = 0; d < inner; d += kRows) {
    const W* from = w + d * columns;
    int64_t e = 0;
    for (; d + kRows <= inner && e + 8 <= columns; e += 8) {
      // The next rows, in the order of memory: streams of one row each are too short for the
      // processor to foresee (125 instead of 195 us for a network of LLaPor).
      for (size_t i = 0; i < sizeof(W); i++) {
        __builtin_prefetch((const char*)(from + kRows * (columns + e)) + 64 * i);
      }
      __m256 weights[kRows];
      for (int i = 0; i < kRows; i++) weights[i] = wide8(from + i * columns + e);
      for (int64_t n = 0; n < rows; n++) {
        const float* a = x + n * inner + d;
        __m256 sum = _mm256_loadu_ps(out + n * columns + e);
        for (int i = 0; i < kRows; i++) {
          sum = _mm256_add_ps(sum, _mm256_mul_ps(_mm256_set1_ps(a[i]), weights[i]));
        }
        _mm256_storeu_ps(out + n * columns + e, sum);
      }
    }
    for (int64_t n = 0; n < rows; n++) {
      add_rows(x + n * inner + d, inner - d < kRows ? inner - d : kRows, from, e, columns,
               out + n * columns);
    }
  }
}
#endif

// The sums of all columns are in the first cache, and each row of weights is read once, in the order
// of memory.
template <class W>
void multiply(const float* x, int64_t rows, int64_t inner, const W* w, int64_t columns,
              float* out) {
  std::memset(out, 0, rows * columns * sizeof(float));
#ifdef MOEJAX_X86
  // Every processor with AVX2 has F16C, of which older clangs do not know.
  if (__builtin_cpu_supports("avx2")) {
    return multiply_avx2(x, rows, inner, w, columns, out);
  }
#endif
  for (int64_t d = 0; d < inner; d += kRows) {
    for (int64_t n = 0; n < rows; n++) {
      add_rows(x + n * inner + d, inner - d < kRows ? inner - d : kRows, w + d * columns, 0,
               columns, out + n * columns);
    }
  }
}

}  // namespace
}  // namespace moejax

// out[n, e] = Σ_d x[n, d] · w[d, e], of contiguous arrays. halves: whether w is float16, finite.
MOEJAX_EXPORT void moejax_multiply_rows(const float* x, int64_t rows, int64_t inner, const void* w,
                                        int64_t columns, float* out, int64_t halves) {
  using moejax::Half;
  if (halves) return moejax::multiply(x, rows, inner, (const Half*)w, columns, out);
  moejax::multiply(x, rows, inner, (const float*)w, columns, out);
}
