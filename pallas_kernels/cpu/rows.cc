// Products of a few rows with a matrix, networks of a few rows, and searches of expert maps, on the
// calling thread: for policies that are asked while a step waits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#ifdef MOEJAX_X86
#include <immintrin.h>

#include "pallas_kernels/cpu/instruction_sets.h"
#endif

#define MOEJAX_EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE inline __attribute__((always_inline))

namespace moejax {
namespace {

// Bytes. One stream of weights, fetched this far ahead, takes least where they come from memory: 1.3
// ms for LLaPor's of six layers, and rows eight by eight 1.9.
constexpr int kAhead = 4096;
constexpr float kNone = -3;  // a score below every cosine

enum Form : int64_t { kPlain, kGelu, kRelu, kSigmoid };

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

// y[e] += a · w[e], from column `first` on.
template <class W>
INLINE void add_row(float a, const W* w, int64_t first, int64_t columns, float* __restrict y) {
  for (int64_t e = first; e < columns; e++) y[e] = y[e] + a * wide(w[e]);
}

INLINE bool is_used(const float* x, int64_t rows, int64_t inner) {
  for (int64_t n = 0; n < rows; n++) {
    if (x[n * inner] != 0) return true;
  }
  return false;
}

// exp, with a relative error of 2^-22, in a form that compilers vectorize.
INLINE float exp_of(float x) {
  x = x < -87 ? -87 : x > 88 ? 88 : x;
  const float rounder = 12582912;
  const float n = (x * 1.44269504f + rounder) - rounder;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const int32_t bits = ((int32_t)n + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return (p * r * r + r + 1) * scale;
}

INLINE void finish(float* __restrict y, const float* bias, int64_t columns, int64_t form) {
  if (bias) {
    for (int64_t e = 0; e < columns; e++) y[e] += bias[e];
  }
  if (form == kGelu) {  // by its tanh
    for (int64_t e = 0; e < columns; e++) {
      const float x = y[e], u = 0.7978845608f * (x + 0.044715f * x * x * x);
      y[e] = x / (1 + exp_of(-2 * u));
    }
  } else if (form == kRelu) {
    for (int64_t e = 0; e < columns; e++) y[e] = y[e] > 0 ? y[e] : 0;
  } else if (form == kSigmoid) {
    for (int64_t e = 0; e < columns; e++) y[e] = 1 / (1 + exp_of(-y[e]));
  }
}

// Each row's sums over rows of weights one by one in their order, as numpy's einsum sums. Rows of
// weights that every row multiplies by 0 are not read. The others are read in the order of memory,
// and all sums are in the first cache.
struct Plain {
  template <class W>
  static void multiply(const float* x, int64_t rows, int64_t inner, const W* w, int64_t columns,
                       float* out, const float* bias, int64_t form) {
    std::memset(out, 0, rows * columns * sizeof(float));
    for (int64_t d = 0; d < inner; d++) {
      if (!is_used(x + d, rows, inner)) continue;
      for (int64_t n = 0; n < rows; n++) {
        add_row(x[n * inner + d], w + d * columns, 0, columns, out + n * columns);
      }
    }
    for (int64_t n = 0; n < rows; n++) finish(out + n * columns, bias, columns, form);
  }

  static float dot(const float* a, const float* b, int64_t size) {
    float sum = 0;
    for (int64_t i = 0; i < size; i++) sum += a[i] * b[i];
    return sum;
  }
};

#ifdef MOEJAX_X86
#define AVX2 __attribute__((target("avx2,f16c")))

AVX2 INLINE __m256 wide8(const float* w) { return _mm256_loadu_ps(w); }
AVX2 INLINE __m256 wide8(const Half* w) { return _mm256_cvtph_ps(_mm_loadu_si128((__m128i*)w)); }

struct Avx2 {
  template <class W>
  AVX2 static void multiply(const float* x, int64_t rows, int64_t inner, const W* w,
                            int64_t columns, float* out, const float* bias, int64_t form) {
    std::memset(out, 0, rows * columns * sizeof(float));
    for (int64_t d = 0; d < inner; d++) {
      if (!is_used(x + d, rows, inner)) continue;
      const W* from = w + d * columns;
      int64_t e = 0;
      for (; e + 8 <= columns; e += 8) {
        if (e % (64 / sizeof(W)) == 0) __builtin_prefetch((const char*)(from + e) + kAhead);
        const __m256 weights = wide8(from + e);
        for (int64_t n = 0; n < rows; n++) {
          float* y = out + n * columns + e;
          const __m256 product = _mm256_mul_ps(_mm256_set1_ps(x[n * inner + d]), weights);
          _mm256_storeu_ps(y, _mm256_add_ps(_mm256_loadu_ps(y), product));
        }
      }
      for (int64_t n = 0; n < rows; n++) {
        add_row(x[n * inner + d], from, e, columns, out + n * columns);
      }
    }
    for (int64_t n = 0; n < rows; n++) finish(out + n * columns, bias, columns, form);
  }

  AVX2 static float dot(const float* a, const float* b, int64_t size) {
    __m256 sums = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) {
      sums = _mm256_add_ps(sums, _mm256_mul_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i)));
    }
    float each[8], sum = 0;
    _mm256_storeu_ps(each, sums);
    for (float one : each) sum += one;
    for (; i < size; i++) sum += a[i] * b[i];
    return sum;
  }
};
#endif

// map_store.distributions of a row, which returns map_store.squares_of it.
int32_t distribute(const float* said, int64_t size, float* row) {
  int32_t sum = 0, squares = 0;
  for (int64_t i = 0; i < size; i++) sum += (int32_t)std::rint(said[i] * 1048576.0f);
  const float scale = sum > 0 ? 2147483648.0f / (float)sum : 0;
  for (int64_t i = 0; i < size; i++) {
    const float whole = std::rint(said[i] * scale);
    row[i] = whole * (1 / 2048.0f);
    squares += (int32_t)whole * (int32_t)whole;
  }
  return squares;
}

// map_store.unit_rows of a row.
void make_unit(const float* said, int64_t size, float* row) {
  float largest = 0;
  for (int64_t i = 0; i < size; i++) largest = std::max(largest, std::fabs(said[i]));
  const float coarse = largest > 0 ? 256 / largest : 0;
  int32_t squares = 0;
  for (int64_t i = 0; i < size; i++) {
    const auto whole = (int32_t)std::rint(said[i] * coarse);
    squares += whole * whole;
  }
  const float length = largest * std::sqrt((float)squares), scale = length > 0 ? 524288 / length : 0;
  for (int64_t i = 0; i < size; i++) row[i] = std::rint(said[i] * scale) * (1 / 2048.0f);
}

// See moejax_nearest_maps.
template <class Arch>
void find_nearest(const float* x, int64_t rows, int64_t inner, const float* kept, int64_t count,
                  int32_t* products, int32_t* squares, const float* lengths, const float* filled,
                  int64_t* place, float* score) {
  std::vector<float> row(inner);
  for (int64_t n = 0; n < rows; n++) {
    float root = 0;
    if (products) {
      squares[n] += distribute(x + n * inner, inner, row.data());
      root = std::sqrt((float)squares[n]);
    } else {
      make_unit(x + n * inner, inner, row.data());
    }
    const float* mine = row.data();
    place[n] = 0, score[n] = -INFINITY;
    for (int64_t c = 0; c < count; c++) {
      float found = Arch::dot(mine, kept + c * inner, inner);
      if (products) {
        int32_t& product = products[n * count + c];
        product += (int32_t)(found * 4194304.0f);
        const float both = root * lengths[c];
        found = both > 0 ? (float)product / both : 0;
      }
      if (!(filled[c] > 0)) found = kNone;
      if (found > score[n]) place[n] = c, score[n] = found;
    }
  }
}

template <class W>
void multiply(const float* x, int64_t rows, int64_t inner, const W* w, int64_t columns, float* out,
              const float* bias, int64_t form) {
#ifdef MOEJAX_X86
  if (features().avx2) {
    return Avx2::multiply(x, rows, inner, w, columns, out, bias, form);
  }
#endif
  Plain::multiply(x, rows, inner, w, columns, out, bias, form);
}

// A product and what follows, with float16 weights.
struct Linear {
  const Half* weights;
  const float* bias;

  void operator()(const float* x, int64_t rows, int64_t inner, int64_t columns, float* out,
                  int64_t form) const {
    multiply(x, rows, inner, weights, columns, out, bias, form);
  }
};

// A layer's network of host_offload/policies/prefetch/llapor.py, as pallas_kernels/cpu/rows.py
// fills it in.
struct Network {
  int64_t inputs, components, experts, width, deep;
  const float* mean;
  Linear basis, input, output, inner1, inner2, gate;
};

}  // namespace
}  // namespace moejax

// out[n, e] = form(Σ_d x[n, d] · w[d, e] + bias[e]), of contiguous arrays.
// halves: whether w is float16, finite. bias: float32, or null.
MOEJAX_EXPORT void moejax_multiply_rows(const float* x, int64_t rows, int64_t inner, const void* w,
                                        int64_t columns, float* out, int64_t halves,
                                        const float* bias, int64_t form) {
  using moejax::Half;
  if (halves) {
    return moejax::multiply(x, rows, inner, (const Half*)w, columns, out, bias, form);
  }
  moejax::multiply(x, rows, inner, (const float*)w, columns, out, bias, form);
}

// Scores [rows, experts] by a layer's network (llapor.scores).
// input: float16 [rows, inputs]; what is beyond float16 counts as its largest number.
// ids, weights: [rows, chosen], the experts that each row chose.
// best: the `most` experts of the only row with the largest scores, of equal ones the first.
MOEJAX_EXPORT void moejax_run_network(const moejax::Network* net, const uint16_t* input,
                                      int64_t rows, const int16_t* ids, const float* weights,
                                      int64_t chosen, float* scores, int64_t* best, int64_t most) {
  using namespace moejax;
  const int64_t inputs = net->inputs, components = net->components, experts = net->experts;
  const int64_t width = net->width, joined = components + experts;
  std::vector<float> work(rows * (inputs + components + joined + 4 * width));
  float* x = work.data();
  float *pca = x + rows * inputs, *z = pca + rows * components, *a = z + rows * joined;
  float *b = a + rows * width, *c = b + rows * width, *gate = c + rows * width;
  for (int64_t n = 0; n < rows; n++) {
    for (int64_t d = 0; d < inputs; d++) {
      const float value = wide(Half{input[n * inputs + d]});
      x[n * inputs + d] = std::min(std::max(value, -65504.0f), 65504.0f) - net->mean[d];
    }
  }
  net->basis(x, rows, inputs, components, pca, kPlain);
  for (int64_t n = 0; n < rows; n++) {
    std::memcpy(z + n * joined, pca + n * components, components * sizeof(float));
    float* marks = z + n * joined + components;  // zeros so far
    for (int64_t i = 0; i < chosen; i++) marks[ids[n * chosen + i]] = weights[n * chosen + i];
  }
  net->input(z, rows, joined, width, a, kGelu);
  if (net->deep) {
    net->inner1(a, rows, width, width, b, kGelu);
    net->inner2(b, rows, width, width, c, kGelu);
    net->gate(pca, rows, components, width, gate, kSigmoid);
    for (int64_t i = 0; i < rows * width; i++) {
      const float more = c[i] * gate[i];
      a[i] = a[i] + more;
    }
  }
  net->output(a, rows, width, experts, scores, kPlain);
  if (!best) return;
  std::vector<int64_t> order(experts);
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + most, order.end(), [&](int64_t i, int64_t j) {
    return scores[i] != scores[j] ? scores[i] > scores[j] : i < j;
  });
  std::copy_n(order.begin(), most, best);
}

// The place of a store of expert maps (map_store.py) with the largest score for each row of x
// [rows, inner], of equal ones the first. Sums of products are exact in any order.
// score: the dot product of x, scaled to length 1, and a row of kept [count, inner]. With products [rows, count] and
//   squares [rows] (units of 2^-22) of the layers so far, x are a layer's probabilities, which are
//   added to both, and the score is the cosine by the lengths [count].
// filled: [count], not above 0 where a place is empty.
MOEJAX_EXPORT void moejax_nearest_maps(const float* x, int64_t rows, int64_t inner,
                                       const float* kept, int64_t count, int32_t* products,
                                       int32_t* squares, const float* lengths, const float* filled,
                                       int64_t* place, float* score) {
  using namespace moejax;
#ifdef MOEJAX_X86
  if (features().avx2) {
    return find_nearest<Avx2>(x, rows, inner, kept, count, products, squares, lengths, filled,
                              place, score);
  }
#endif
  find_nearest<Plain>(x, rows, inner, kept, count, products, squares, lengths, filled, place,
                      score);
}
