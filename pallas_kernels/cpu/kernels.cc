// Compiled once for each instruction set, with MOEJAX_ISA its name and MOEJAX_LANES the floats of a
// vector. Vectors are the compiler's own (GCC and Clang), so that every instruction set runs the
// same source; only the two instructions that have no such form are intrinsics.
//
// Everything here has internal linkage and no header with inline functions is included, but for
// kernels.h: a function compiled for AVX-512 must never be the linker's choice for other callers.
#include <math.h>
#include <unistd.h>

#include <type_traits>

#include "decoders.h"

#define MOEJAX_JOIN_(a, b) a##b
#define MOEJAX_JOIN(a, b) MOEJAX_JOIN_(a, b)
#define MOEJAX_TEXT_(a) #a
#define MOEJAX_TEXT(a) MOEJAX_TEXT_(a)

namespace moejax {
namespace {

template <int N>
struct Floats {
  typedef float type __attribute__((vector_size(4 * N)));
};

// Pairwise halves: one order for every sum.
template <class V, class F>
INLINE float joined(V v, const F& join) {
  constexpr int n = sizeof(V) / 4;
  if constexpr (n == 4) {
    return join(join(v[0], v[2]), join(v[1], v[3]));
  } else {
    typename Floats<n / 2>::type half[2];
    memcpy(half, &v, sizeof v);
    return joined(join(half[0], half[1]), join);
  }
}

INLINE float sum(vf v) {
  return joined(v, [](auto a, auto b) { return a + b; });
}

void widen(Type type, const void* in, int64_t n, float* out) {
  if (type == Type::F32) {
    memcpy(out, in, n * 4);
    return;
  }
  const uint16_t* p = (const uint16_t*)in;
  if (type == Type::BF16) {
    for (int64_t i = 0; i < n; i++) out[i] = as_float((uint32_t)p[i] << 16);
    return;
  }
  int64_t vectors = 0;
#ifdef __F16C__
  vectors = n / 8 * 8;
  for (int64_t i = 0; i < vectors; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + i))));
  }
#endif
  for (int64_t i = vectors; i < n; i++) out[i] = wide_f16(p[i]);
}

void narrow(Type type, const float* in, int64_t n, void* out) {
  uint16_t* p = (uint16_t*)out;
  if (type == Type::F32) memcpy(out, in, n * 4);
  if (type == Type::BF16) {
    for (int64_t i = 0; i < n; i++) p[i] = bf16(in[i]);
  }
  if (type == Type::F16) {
    for (int64_t i = 0; i < n; i++) p[i] = f16(in[i]);
  }
}

// x[i] = round(x[i] · factor_of(i))
template <class Factor>
INLINE void scaled(Type type, float* x, int64_t n, void* scratch, Factor factor_of) {
  if (type == Type::BF16) {
    for (int64_t i = 0; i < n; i++) x[i] = as_float((uint32_t)bf16(x[i] * factor_of(i)) << 16);
    return;
  }
  for (int64_t i = 0; i < n; i++) x[i] *= factor_of(i);
  if (type == Type::F32) return;
  narrow(type, x, n, scratch);
  widen(type, scratch, n, x);
}

void norm(Type type, const float* weight, int64_t n, float eps, float* x, void* scratch) {
  // Eight sums in double: one order, whatever the instruction set, and no error that counts.
  double part[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; j++) part[j] += (double)x[i + j] * x[i + j];
  }
  for (; i < n; i++) part[i % 8] += (double)x[i] * x[i];
  double total = 0;
  for (int j = 0; j < 8; j++) total += part[j];
  const float scale = (float)(1 / sqrt(total / (double)n + eps));
  scaled(type, x, n, scratch, [scale](int64_t) { return scale; });
  scaled(type, x, n, scratch, [weight](int64_t at) { return weight[at]; });
}

// ---- operands of 2·L weights at a time

// bfloat16 weights are read as 32-bit pairs: L even ones, L odd ones. Packed x has the same order,
// so no lane ever moves.
template <Type kind>
INLINE Pair weights(const void* w, int64_t at) {
  if (kind == Type::F32) {
    const float* p = (const float*)w + at;
    return {load<vf>(p), load<vf>(p + L)};
  }
  vu both = load<vu>((const uint16_t*)w + at);
  return {as_float(both << 16), as_float(both & 0xffff0000u)};
}

// The end of a row, completed with zeros: nothing is read behind it.
template <Type kind>
struct End {
  char bytes[2 * L * 4];
  INLINE End(const void* w, int64_t at, int64_t n) {
    const int64_t size = kind == Type::BF16 ? 2 : 4;
    memset(bytes, 0, sizeof bytes);
    memcpy(bytes, (const char*)w + at * size, (n - at) * size);
  }
};

template <Type kind>
INLINE Pair pair_of(const void* w, int64_t at, int64_t n) {
  if (at + 2 * L <= n) return weights<kind>(w, at);
  const End<kind> end(w, at, n);
  return weights<kind>(end.bytes, 0);
}

void pack(Type type, const void* x, int64_t n, float* out) {
  if (kind_of(type) == Type::F32) {
    widen(type, x, n, out);
    memset(out + n, 0, (padded(n) - n) * 4);
    return;
  }
#ifdef __AVX512BF16__
  memcpy(out, x, n * 2);
  memset((uint16_t*)out + n, 0, (2 * padded(n) - n) * 2);
#else
  int64_t at = 0;
  for (; at < n; at += 2 * L) {
    const Pair pair = pair_of<Type::BF16>(x, at, n);
    store(out + at, pair.first), store(out + at + L, pair.second);
  }
  for (; at < padded(n); at += L) store(out + at, vf{});
#endif
}

template <Type kind>
INLINE vf multiply(vf total, const void* w, int64_t at, const float* x, int64_t x_at) {
#ifdef __AVX512BF16__
  if (kind == Type::BF16) {
    const void *p = (const uint16_t*)w + at, *q = (const uint16_t*)x + x_at;
    return (vf)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_loadu_si512(p),
                                (__m512bh)_mm512_loadu_si512(q));
  }
#endif
  Pair pair = weights<kind>(w, at);
  total = total + pair.first * load<vf>(x + x_at);
  return total + pair.second * load<vf>(x + x_at + L);
}

// ---- dots

// Elements of a sum that all rows of a call pass before the next ones, so that the operands of
// several tokens stay near. Sums wait in memory meanwhile: no bit depends on it. Shorter ones make
// streams of weights that end before the processor has begun to fetch ahead of them.
constexpr int64_t kDepth = 2048;
constexpr int64_t kGroup = 48;  // rows whose sums wait

// Whether rows that are soon read are asked for towards the first cache. One of 32 KiB has often lost them
// again by then: two cores of a Zen 4 read 28 to 30 GB/s by way of the second one, 17 to 24 by the first.
bool asked_near() {
#ifdef _SC_LEVEL1_DCACHE_SIZE  // of glibc alone
  static const bool large = sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 << 10;
  return large;
#else
  return false;
#endif
}

#ifdef __AVX512BF16__
// Each operand is loaded once: two cores of a Zen 4 load one vector a cycle and multiply as many, and took 1.4 times
// as long where each product loaded the token's.
template <int T, int R>
INLINE void multiply_pairs(const void* const* w, const float* const* x, int64_t at, vf (&total)[T][R]) {
  __m512bh rows[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) rows[r] = (__m512bh)load<vu>((const uint16_t*)w[r] + at);
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) {
    const __m512bh token = (__m512bh)load<vu>((const uint16_t*)x[t] + at);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) total[t][r] = (vf)_mm512_dpbf16_ps((__m512)total[t][r], rows[r], token);
  }
}
#endif

// coming: R rows to ask for meanwhile, or null.
template <Type kind, int T, int R>
INLINE void tile(const void* const* w, const float* const* x, int64_t from, int64_t to, int64_t n,
                 float* sums, float* y, int64_t stride, const void* const* coming, bool near) {
  constexpr int64_t size = kind == Type::BF16 ? 2 : 4, step = 2 * L * size;
  // Rows that follow each other are asked for one after the other: two cores of a Zen 5 then read 64 GB/s instead of
  // 59 by AVX2.
  const bool straight = R * step % 64 == 0 && coming &&
                        (const char*)coming[R - 1] - (const char*)coming[0] == (R - 1) * n * size;
  vf total[T][R];
  for (int t = 0; t < T; t++) {
    for (int r = 0; r < R; r++) total[t][r] = from ? load<vf>(sums + (t * R + r) * L) : vf{};
  }
  int64_t at = from;
  for (; at + 2 * L <= to; at += 2 * L) {
    if (straight) {
      for (int64_t i = 0; i < R * step; i += 64) soon((const char*)coming[0] + R * at * size + i, near);
    } else if (coming) {
      for (int r = 0; r < R; r++) soon((const char*)coming[r] + at * size, near);
    }
#ifdef __AVX512BF16__
    if constexpr (kind == Type::BF16) {
      multiply_pairs(w, x, at, total);
      continue;
    }
#endif
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) total[t][r] = multiply<kind>(total[t][r], w[r], at, x[t], at);
    }
  }
  if (to < n) {
    for (int t = 0; t < T; t++) {
      for (int r = 0; r < R; r++) store(sums + (t * R + r) * L, total[t][r]);
    }
    return;
  }
  if (at < n) {
    for (int r = 0; r < R; r++) {
      End<kind> end(w[r], at, n);
      for (int t = 0; t < T; t++) total[t][r] = multiply<kind>(total[t][r], end.bytes, 0, x[t], at);
    }
  }
  for (int t = 0; t < T; t++) {
    for (int r = 0; r < R; r++) y[t * stride + r] = sum(total[t][r]);
  }
}

template <Type kind, int T, int R>
void rows_of(const void* const* w, int64_t rows, const float* const* x, int64_t n, float* y,
             int64_t stride, const void* const* next) {
  float sums[T * kGroup * L];
  const int64_t depth = T == 1 ? n : kDepth;  // one token's operands always stay
  constexpr int64_t ahead = R == 1 ? 2 : kAhead;  // rows until one that is asked for is read
  static_assert(ahead <= kAhead);
  const bool near = asked_near();
  // Of single rows, as one token's pass, the processor itself fetches ahead: asked for nothing, two cores of a Zen 4
  // take 0.85 of the time, or 0.96 without products of bfloat16. Rows side by side, as AVX2 needs them, then take 1.3.
  const bool asks = next && (R > 1 || near);
  const auto row_at = [=](int64_t i) { return i < rows ? w[i] : next[i - rows]; };
  for (int64_t first = 0; first < rows; first += kGroup) {
    const int64_t last = least(first + kGroup, rows);
    for (int64_t from = 0; from == 0 || from < n; from += depth) {
      const int64_t to = least(from + depth, n);
      int64_t r = first;
      for (; r + R <= last; r += R) {
        const void* coming[R];
        for (int i = 0; asks && i < R; i++) coming[i] = row_at(r + ahead + i);
        tile<kind, T, R>(w + r, x, from, to, n, sums + (r - first) * T * L, y + r, stride,
                         asks ? coming : nullptr, near);
      }
      for (; r < last; r++) {
        tile<kind, T, 1>(w + r, x, from, to, n, sums + (r - first) * T * L, y + r, stride, nullptr, near);
      }
    }
  }
}

// Rows at once, for 1 to kTokens tokens: so few that sums stay in the registers, 16 of 8 lanes. Of 16
// lanes there is room for more rows, but each is a stream of memory, and few are read faster than
// many: of one token, a core of a Zen 5 reads 26 GB/s in eight rows side by side, 33 in two and 37 in one.
#if MOEJAX_LANES == 16
constexpr int kTile[kTokens] = {1, 2, 4, 4};
#else
constexpr int kTile[kTokens] = {2, 4, 4, 3};
#endif

#ifdef __AVX512BF16__
// Products of pairs take half the time: memory decides longer, and eight tokens pass at once. More pass six by
// six, since of 24 sums those of six and four load the fewest operands.
constexpr int64_t kPassed = 8;
constexpr int kPairTile[kPassed] = {1, 2, 3, 3, 4, 4, 3, 3};
int64_t tokens_at_once(Type kind, int64_t tokens) {
  if (kind == Type::F32) return kTokens;
  return tokens > kPassed ? 6 : kPassed;
}
#else
int64_t tokens_at_once(Type, int64_t) { return kTokens; }
#endif

void dots(Type kind, const void* const* w, int64_t rows, const float* const* x, int64_t tokens,
          int64_t n, float* y, int64_t stride, const void* const* next) {
#ifdef __AVX512BF16__
  if (kind == Type::BF16) {
    return chosen<1, kPassed>(tokens, [=](auto t) {
      rows_of<Type::BF16, t.value, kPairTile[t.value - 1]>(w, rows, x, n, y, stride, next);
    });
  }
#endif
  chosen<kTokens>(kind, tokens, [=](auto k, auto t) {
    rows_of<k.value, t.value, kTile[t.value - 1]>(w, rows, x, n, y, stride, next);
  });
}

// ---- add

// Rows [first, last) of C blocks of 2·L columns of T tokens at once, so that several sums are in flight.
// pair_at(i, c): row i of a block.
template <int T, int C, class Pairs>
INLINE void add_block(Pairs pair_at, int64_t first, int64_t last, const float* const* h, int64_t at,
                      float* const* total) {
  vf sums[T][C][2];
  for (int t = 0; t < T; t++) {
    for (int c = 0; c < C; c++) {
      sums[t][c][0] = load<vf>(total[t] + at + 2 * L * c);
      sums[t][c][1] = load<vf>(total[t] + at + 2 * L * c + L);
    }
  }
  for (int64_t i = first; i < last; i++) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      const Pair pair = pair_at(i, c);
#pragma GCC unroll 6
      for (int t = 0; t < T; t++) {
        const vf factor = splat(h[t][i]);
        sums[t][c][0] = sums[t][c][0] + factor * pair.first;
        sums[t][c][1] = sums[t][c][1] + factor * pair.second;
      }
    }
  }
  for (int t = 0; t < T; t++) {
    for (int c = 0; c < C; c++) {
      store(total[t] + at + 2 * L * c, sums[t][c][0]);
      store(total[t] + at + 2 * L * c + L, sums[t][c][1]);
    }
  }
}

// K rows are read side by side. expert_ffn's down has its rows in four quarters, so four of them are
// the next rows of four streams, which the processor itself fetches ahead. With more than two tokens
// sums take longer than it looks ahead, so the next K rows are asked for.
template <Type kind, int T>
void add_of(const void* const* w, int64_t rows, const float* const* h, int64_t n, float* const* total) {
  constexpr int C = T == 1 ? 4 : T == 2 || L == 16 ? 2 : 1;
  constexpr int64_t K = T == kTokens ? 2 : 4, size = kind == Type::BF16 ? 2 : 4;
  const bool near = asked_near();
  constexpr bool fetched = T > 2;
  const int64_t apart = fetched && rows > 4 ? (const char*)w[4] - (const char*)w[0] : 0;
  for (int64_t first = 0; first < rows; first += K) {
    const int64_t last = least(first + K, rows);
    int64_t at = 0;
    const auto whole = [w, &at](int64_t i, int c) { return weights<kind>(w[i], at + 2 * L * c); };
    if (last - first == K) {
      const char* coming[K];
      for (int64_t i = 0; apart && i < K; i++) {
        const int64_t row = last + i;
        coming[i] = row < rows ? (const char*)w[row] : (const char*)w[row - 4] + apart;
      }
      for (; at + 2 * L * C <= n; at += 2 * L * C) {
        for (int64_t i = 0; apart && i < K; i++) {
          for (int64_t c = 0; c < 2 * L * C * size; c += 64) soon(coming[i] + at * size + c, near);
        }
        add_block<T, C>(whole, first, first + K, h, at, total);
      }
    }
    for (; at + 2 * L <= n; at += 2 * L) add_block<T, 1>(whole, first, last, h, at, total);
    const auto end = [=](int64_t i, int) { return pair_of<kind>(w[i], at, n); };
    if (at < n) add_block<T, 1>(end, first, last, h, at, total);
  }
}

void add(Type kind, const void* const* w, int64_t rows, const float* const* h, int64_t tokens,
         int64_t n, float* const* total) {
  chosen<kTokens>(kind, tokens,
                  [=](auto k, auto t) { add_of<k.value, t.value>(w, rows, h, n, total); });
}

// ---- many tokens: blocks of weights as float32, side by side, for all of them

// Registers hold the sums of kManyTokens × kManyRows; a panel of rows, kDepth long, stays in the
// second cache while kOpen tokens pass it.
#if MOEJAX_LANES == 16
constexpr int kManyRows = 6;
#else
constexpr int kManyRows = 3;
#endif
constexpr int kManyTokens = 4;
constexpr int64_t kPanel = 12;
constexpr int64_t kOpen = 128;

template <int T>
INLINE void many_tile(const float* panel, const float* const* x, int64_t from, int64_t steps, bool first,
                      float* sums) {
  constexpr int R = kManyRows;
  vf total[T][R];
  for (int t = 0; t < T; t++) {
    for (int r = 0; r < R; r++) {
      total[t][r] = first ? vf{} : load<vf>(sums + (t * kPanel + r) * L);
    }
  }
  for (int64_t i = 0; i < steps; i++, panel += 2 * L * R) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      vf w[R];
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) w[r] = load<vf>(panel + (half * R + r) * L);
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) {
        const vf operand = load<vf>(x[t] + from + (2 * i + half) * L);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) total[t][r] = total[t][r] + w[r] * operand;
      }
    }
  }
  for (int t = 0; t < T; t++) {
    for (int r = 0; r < R; r++) store(sums + (t * kPanel + r) * L, total[t][r]);
  }
}

// Rows [0, rows) of a panel for tokens ≤ kOpen.
template <Type kind>
void many_dots(const void* const* w, int64_t rows, const float* const* x, int64_t tokens, int64_t n,
               float* y, int64_t stride) {
  constexpr int R = kManyRows;
  alignas(64) float panel[kPanel * kDepth], sums[kOpen * kPanel * L];
  const int64_t groups = (rows + R - 1) / R;
  for (int64_t from = 0; from == 0 || from < n; from += kDepth) {
    const int64_t steps = (least(n - from, kDepth) + 2 * L - 1) / (2 * L);
    for (int64_t g = 0; g < groups; g++) {
      for (int64_t i = 0; i < steps; i++) {
        float* out = panel + (g * steps + i) * 2 * L * R;
        for (int64_t r = 0; r < R; r++) {
          const void* row = w[least(g * R + r, rows - 1)];  // more than there are: not looked at
          const Pair pair = pair_of<kind>(row, from + i * 2 * L, n);
          store(out + r * L, pair.first), store(out + (R + r) * L, pair.second);
        }
      }
    }
    for (int64_t t = 0; t < tokens; t += kManyTokens) {
      for (int64_t g = 0; g < groups; g++) {
        const float* mine = panel + g * steps * 2 * L * R;
        float* open = sums + (t * kPanel + g * R) * L;
        chosen<1, kManyTokens>(tokens - t, [=](auto count) {
          many_tile<count.value>(mine, x + t, from, steps, !from, open);
        });
      }
    }
  }
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t r = 0; r < rows; r++) y[t * stride + r] = sum(load<vf>(sums + (t * kPanel + r) * L));
  }
}

// Rows of weights side by side for the sums of many tokens.
template <Type kind>
void many_add(const void* const* w, int64_t rows, const float* const* h, int64_t tokens, int64_t n,
              float* const* total) {
  constexpr int64_t kColumns = 4;  // blocks of columns packed at once, so that whole lines are read
  alignas(64) float panel[kColumns][kManyAdded * 2 * L];
  const int64_t size = kind == Type::BF16 ? 2 : 4;
  for (int64_t first = 0; first < n; first += kColumns * 2 * L) {
    for (int64_t i = 0; i < rows; i++) {
      __builtin_prefetch((const char*)w[i] + (first + kColumns * 2 * L) * size);
      for (int64_t c = 0; c < kColumns && first + c * 2 * L < n; c++) {
        const Pair pair = pair_of<kind>(w[i], first + c * 2 * L, n);
        store(&panel[c][i * 2 * L], pair.first), store(&panel[c][i * 2 * L + L], pair.second);
      }
    }
    for (int64_t c = 0; c < kColumns && first + c * 2 * L < n; c++) {
      const int64_t at = first + c * 2 * L;
      const float* mine = panel[c];
      const auto panelled = [mine](int64_t i, int) -> Pair {
        return {load<vf>(mine + 2 * L * i), load<vf>(mine + 2 * L * i + L)};
      };
      for (int64_t t = 0; t < tokens; t += 6) {
        chosen<1, 6>(tokens - t, [=](auto count) {
          add_block<count.value, 1>(panelled, 0, rows, h + t, at, total + t);
        });
      }
    }
  }
}

// f(first, count) of parts of at most `most` tokens, as many each as may be: few take nearly as long.
template <class F>
INLINE void share_evenly(int64_t tokens, int64_t most, F f) {
  const int64_t parts = (tokens + most - 1) / most;
  for (int64_t i = 0; i < parts; i++) {
    const int64_t first = i * tokens / parts;
    f(first, (i + 1) * tokens / parts - first);
  }
}

#ifdef __AVX512BF16__
// Products of pairs of rows, twice as fast: VDPBF16PS adds the product of the upper halves of its lanes, rounds, and
// adds that of the lower ones. These are the bits of two sums of float32 unless a number is subnormal, which it takes
// for zero: where totals are multiples of 2^-126 (`coarse`), none is if all factors are 0 or at least 2^-56.
constexpr uint32_t kSmallest = (127 - 56) << 23;
constexpr int64_t kPairs = kManyAdded / 2;

// 4·L columns of T tokens.
template <int T>
INLINE void add_pairs(const vu (*panel)[4], const uint32_t (*h)[kPairs], int64_t pairs, float* total, int64_t apart) {
  vf sums[T][4];
  for (int t = 0; t < T; t++) {
    for (int c = 0; c < 4; c++) sums[t][c] = load<vf>(total + t * apart + c * L);
  }
  for (int64_t i = 0; i < pairs; i++) {
#pragma GCC unroll 6
    for (int t = 0; t < T; t++) {
      const __m512bh factor = (__m512bh)_mm512_set1_epi32((int)h[t][i]);
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) {
        sums[t][c] = (vf)_mm512_dpbf16_ps((__m512)sums[t][c], (__m512bh)panel[i][c], factor);
      }
    }
  }
  for (int t = 0; t < T; t++) {
    for (int c = 0; c < 4; c++) store(total + t * apart + c * L, sums[t][c]);
  }
}

// `many_add` of an even number of rows, up to the first column of a block with small factors, which it returns.
int64_t many_pairs(const void* const* w, int64_t rows, const float* const* h, int64_t tokens, int64_t n,
                   float* const* total) {
  constexpr int64_t kColumns = 8 * L, kOpenTokens = 6;
  alignas(64) uint32_t factors[kAddedTokens][kPairs];
  alignas(64) vu panel[2][kPairs][4];
  const __m512i one = _mm512_set1_epi32(1), one16 = _mm512_set1_epi16(1);
  __m512i least_h = _mm512_set1_epi32(-1);  // numbers without a sign, less 1, so that 0 is the largest
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t i = 0; i < rows; i += L) {
      const __m512i h16 = load_first((const uint16_t*)(h[t] + i), 2 * (rows - i));
      least_h = _mm512_min_epu32(least_h, _mm512_sub_epi32(_mm512_slli_epi32(h16, 1), one));
      const __m512i pairs = _mm512_srli_epi64(h16, 48) | (h16 & _mm512_set1_epi64(0xffff0000));
      _mm256_store_si256((__m256i*)&factors[t][i / 2], _mm512_cvtepi64_epi32(pairs));
    }
  }
  if (rows % 2 || _mm512_cmplt_epu32_mask(least_h, _mm512_set1_epi32(2 * kSmallest - 1))) return 0;
  const int64_t apart = total[1] - total[0];
  // The next call's rows, where they follow in the order of four quarters (expert_ffn/cpu.cc).
  const int64_t next = rows > 4 ? ((const uint16_t*)w[4] - (const uint16_t*)w[0]) * (kManyAdded / 4) : 0;
  const bool near = asked_near();
  for (int64_t first = 0; first < n; first += kColumns) {
    __m512i least_w = _mm512_set1_epi16(-1);
    for (int64_t i = 0; i < rows; i += 2) {
      for (int64_t c = 0; c < 4; c++) {
        const int64_t at = first + c * 2 * L, over = at + kColumns - n;
        vu row[2];
        for (int j = 0; j < 2; j++) {
          const uint16_t* mine = (const uint16_t*)w[i + j];
          row[j] = at < n ? (vu)load_first(mine + at, n - at) : vu{};
          soon(mine + (over < 0 ? at + kColumns : next + over), near);
          least_w = _mm512_min_epu16(least_w, _mm512_sub_epi16(_mm512_slli_epi16((__m512i)row[j], 1), one16));
        }
        vu* pair = &panel[c / 2][i / 2][c % 2 * 2];
        pair[0] = (row[0] << 16) | (row[1] & 0xffff), pair[1] = (row[0] & 0xffff0000u) | (row[1] >> 16);
      }
    }
    if (_mm512_cmplt_epu16_mask(least_w, _mm512_set1_epi16((2 * kSmallest >> 16) - 1))) return first;
    for (int64_t c = 0; c < 2 && first + c * 4 * L < n; c++) {
      share_evenly(tokens, kOpenTokens, [&](int64_t t, int64_t count) {
        float* onto = total[t] + first + c * 4 * L;
        chosen<1, kOpenTokens>(count, [&](auto count) {
          add_pairs<count.value>(panel[c], factors + t, rows / 2, onto, apart);
        });
      });
    }
  }
  return n;
}
#endif

// Tokens of whom more are worth a block of packed weights. A Zen 4 multiplies pairs at twice the rate of floats; two
// cores of a Zen 5, told by its first cache, took 1.15 to 1.2 times as long for eight tokens where two made a block.
#ifdef __AVX512BF16__
int64_t few(Type kind) { return kind == Type::BF16 && !asked_near() ? 1 : 8; }
#else
int64_t few(Type) { return 8; }
#endif
int64_t rows_of_task(Type) { return 4 * kPanel; }

void dots_of_many(Type kind, const void* const* w, int64_t rows, const float* const* x,
                  int64_t tokens, int64_t n, float* y, int64_t stride, const void* const* next) {
#ifdef __AVX512BF16__
  // Sums of products of pairs have another order: they have no panels of float32.
  const bool panels = tokens > few(kind) && kind == Type::F32;
#else
  const bool panels = tokens > few(kind);
#endif
  const int64_t most = panels ? kOpen : tokens_at_once(kind, tokens), step = panels ? kPanel : rows;
  for (int64_t r = 0; r < rows; r += step) {
    const int64_t mine = least(step, rows - r);
    share_evenly(tokens, most, [&](int64_t t, int64_t count) {
      float* out = y + t * stride + r;
      if (!panels) dots(kind, w, mine, x + t, count, n, out, stride, t ? nullptr : next);
      else if (kind == Type::BF16) many_dots<Type::BF16>(w + r, mine, x + t, count, n, out, stride);
      else many_dots<Type::F32>(w + r, mine, x + t, count, n, out, stride);
    });
  }
}

void add_of_many(Type kind, const void* const* w, int64_t rows, const float* const* h, int64_t tokens, int64_t n,
                 float* const* total, bool* coarse) {
  if (tokens <= few(kind)) {
    for (int64_t t = 0; t < tokens; t += kTokens) {
      add(kind, w, rows, h + t, least(kTokens, tokens - t), n, total + t);
    }
    return;
  }
#ifdef __AVX512BF16__
  if (kind == Type::BF16 && *coarse) {
    const int64_t done = many_pairs(w, rows, h, tokens, n, total);
    if (done == n) return;
    *coarse = false;
    const void* left[kManyAdded];
    float* onto[kAddedTokens];
    for (int64_t i = 0; i < rows; i++) left[i] = (const uint16_t*)w[i] + done;
    for (int64_t t = 0; t < tokens; t++) onto[t] = total[t] + done;
    return many_add<Type::BF16>(left, rows, h, tokens, n - done, onto);
  }
#endif
  if (kind == Type::BF16) return many_add<Type::BF16>(w, rows, h, tokens, n, total);
  many_add<Type::F32>(w, rows, h, tokens, n, total);
}

void unpack(Type kind, const float* total, int64_t n, float* out) {
  if (kind == Type::F32) {
    memcpy(out, total, n * 4);
    return;
  }
  for (int64_t at = 0; at < n; at += 2 * L) {
    float both[2 * L];
    for (int64_t i = 0; i < L; i++) both[2 * i] = total[at + i], both[2 * i + 1] = total[at + L + i];
    memcpy(out + at, both, least(2 * L, n - at) * 4);
  }
}

// n numbers of a part from its number `first` on.
void numbers_of(ScaleType type, const uint16_t* part, int64_t first, int64_t n, float* out) {
  if (type == ScaleType::F16) return widen(Type::F16, part + first, n, out);
  if (type == ScaleType::BF16) return widen(Type::BF16, part + first, n, out);
  if (type == ScaleType::F32) return widen(Type::F32, part + 2 * first, n, out);
  const uint8_t* bytes = (const uint8_t*)part + first;
  if (type == ScaleType::U8) {
    for (int64_t i = 0; i < n; i++) out[i] = (float)bytes[i];
  }
  if (type == ScaleType::I8) {
    for (int64_t i = 0; i < n; i++) out[i] = (float)(int8_t)bytes[i];
  }
  if (type == ScaleType::E4M3) {
    for (int64_t i = 0; i < n; i++) out[i] = kValues<Codes::E4M3>.of[bytes[i]];
  }
  if (type != ScaleType::E8M0) return;
  for (int64_t i = 0; i < n; i++) {
    out[i] = as_float(bytes[i] ? (uint32_t)bytes[i] << 23 : 1u << 22);
  }
}

bool has_shifts(Codes kind) { return kind >= Codes::Zero8 && kind <= Codes::Min5; }

constexpr int64_t kScales = 256;  // widened at once

// x[i] *= the float16 that numbers from `first` on of a line share: of gate and up one for
// `super` numbers that follow each other, of down one for each column of `super` lines.
void times_supers(const Format& f, const uint16_t* record, int matrix, int64_t part, int64_t line,
                  int64_t length, int64_t first, int64_t n, float sign, float* x) {
  const int64_t super = f.matrix[matrix].super;
  const uint16_t* supers = record + part * f.hidden;
  if (matrix == DOWN) {
    for (int64_t at = 0; at < n; at += kScales) {
      float own[kScales];
      const int64_t count = least(kScales, n - at);
      numbers_of(ScaleType::F16, supers, line / super * length + first + at, count, own);
      for (int64_t i = 0; i < count; i++) x[at + i] *= sign * own[i];
    }
    return;
  }
  supers += line * ((length + super - 1) / super);
  int64_t number = first / super, at = first;
  for (const int64_t end = first + n; at < end; number++) {
    const int64_t stop = least(end, (number + 1) * super);
    const float own = sign * scale_f16(supers[number]);
    for (; at + 8 <= stop; at += 8) {
      for (int i = 0; i < 8; i++) x[at - first + i] *= own;
    }
    for (; at < stop; at++) x[at - first] *= own;
  }
}

#ifdef __AVX2__
// Eight numbers that are bytes.
INLINE __m256 eight_bytes(bool positive, const void* bytes) {
  const __m128i some = _mm_loadl_epi64((const __m128i*)bytes);
  return _mm256_cvtepi32_ps(positive ? _mm256_cvtepu8_epi32(some) : _mm256_cvtepi8_epi32(some));
}

// The same, times others.
INLINE __m256 times_bytes(bool positive, const uint8_t* bytes, __m256 others) {
  return _mm256_mul_ps(eight_bytes(positive, bytes), others);
}

// The same of numbers that are bytes, as many times `super`, a multiple of 8.
void supers_of(bool positive, const uint8_t* bytes, const uint16_t* supers, int64_t super, int64_t n, float sign,
               float* out) {
  float own[kScales];
  for (int64_t first = 0, count; first < n / super; first += count) {
    count = least(kScales, n / super - first);
    widen(Type::F16, supers + first, count, own);
    for (int64_t i = 0; i < count; i++) own[i] *= sign;
    const auto multiply = [&](bool known, int64_t each) {
#pragma GCC unroll 4
      for (int64_t i = 0; i < count; i++, bytes += each, out += each) {
        const __m256 same = _mm256_broadcast_ss(own + i);
        for (int64_t k = 0; k < each; k += 8) _mm256_storeu_ps(out + k, times_bytes(known, bytes + k, same));
      }
    };
    if (positive && super == 8) multiply(true, 8);
    else multiply(positive, super);
  }
}

// Of numbers with a float16 each, a multiple of 8 of them.
void each_super_of(bool positive, const uint8_t* bytes, const uint16_t* supers, int64_t n, float sign, float* out) {
  for (int64_t i = 0; i < n; i += 8) {
    const __m256 own = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(supers + i)));
    _mm256_storeu_ps(out + i, times_bytes(positive, bytes + i, _mm256_mul_ps(_mm256_set1_ps(sign), own)));
  }
}
#endif

#if defined(__AVX512BW__) && MOEJAX_LANES == 16
// Whole vectors of bytes times the float16 that `super` of them share, 8 or 16: scales or, negative,
// minimums, of lines that follow each other.
void supers_of(const Coding& c, const uint16_t* record, int64_t hidden, bool mins, int64_t at, int64_t n,
               float* out) {
  const uint8_t* bytes = (const uint8_t*)(record + (mins ? c.shifts : c.extra) * hidden) + at;
  const uint16_t* supers = record + (mins ? c.min_supers : c.supers) * hidden + at / c.super;
  const vi halves = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1}, first = c.super == 8 ? halves : vi{};
  const int step = (int)(L / c.super);
  for (int64_t i = 0; i < n; supers += L) {
    const int64_t end = least(n, i + L * c.super);
    const __m256i some = _mm256_maskz_loadu_epi16((__mmask16)first_of((end - i) / c.super), supers);
    vf own = (vf)_mm512_cvtph_ps(some);
    if (mins) own = -own;
    for (vi place = first; i < end; i += L, place += step) {
      const __m128i raw = _mm_loadu_si128((const __m128i*)(bytes + i));
      const bool positive = c.scale == ScaleType::U8;
      const vi numbers = (vi)(positive ? _mm512_cvtepu8_epi32(raw) : _mm512_cvtepi8_epi32(raw));
      const vf times = (vf)_mm512_permutexvar_ps((__m512i)place, (__m512)own);
      store(out + i, __builtin_convertvector(numbers, vf) * times);
    }
  }
}
#endif

// Scales, and zeros or minimums where there are any, of the groups from `first` on of a line: a row
// of gate or up (or `across` of them), or a group of down's rows.
void groups_of(const Format& f, const uint16_t* record, int matrix, int64_t line, int64_t first,
               int64_t n, float* scale, float* shift) {
  const Coding& c = f.matrix[matrix];
  const int64_t along = matrix == DOWN ? c.across : c.group;
  const int64_t length = (f.hidden + along - 1) / along, at = line * length + first;
#ifdef __AVX2__
  const bool bytes = c.scale == ScaleType::U8 || c.scale == ScaleType::I8;
  const bool whole = bytes && c.super % 8 == 0 && matrix != DOWN && c.super && length % c.super == 0;
#endif
#if defined(__AVX512BW__) && MOEJAX_LANES == 16
  if (whole && c.super <= 16 && at % L == 0 && n % L == 0) {
    supers_of(c, record, f.hidden, false, at, n, scale);
    if (has_shifts(c.kind)) supers_of(c, record, f.hidden, true, at, n, shift);
    return;
  }
#endif
#ifdef __AVX2__
  const bool each = bytes && c.super && matrix == DOWN && n % 8 == 0;
  if (each || (whole && at % c.super == 0 && n % c.super == 0)) {
    const auto read = [&](int64_t part, int64_t supers, float sign, float* out) {
      const uint8_t* all = (const uint8_t*)(record + part * f.hidden) + at;
      const uint16_t* mine = record + supers * f.hidden;
      const bool positive = c.scale == ScaleType::U8;
      if (each) each_super_of(positive, all, mine + line / c.super * length + first, n, sign, out);
      else supers_of(positive, all, mine + at / c.super, c.super, n, sign, out);
    };
    read(c.extra, c.supers, 1, scale);
    if (has_shifts(c.kind)) read(c.shifts, c.min_supers, -1, shift);
    return;
  }
#endif
  numbers_of(c.scale, record + c.extra * f.hidden, at, n, scale);
  if (c.super) times_supers(f, record, matrix, c.supers, line, length, first, n, 1, scale);
  if (c.whole != Whole::None) {
    float one;
    memcpy(&one, record + c.global * f.hidden, sizeof one);
    for (int64_t i = 0; i < n; i++) scale[i] = c.whole == Whole::Times ? scale[i] * one : scale[i] / one;
  }
  if (!has_shifts(c.kind)) return;
  const bool zeros = c.kind == Codes::Zero8 || c.kind == Codes::Zero4;
  numbers_of(zeros ? ScaleType::U8 : c.scale, record + c.shifts * f.hidden, at, n, shift);
  if (!c.super) return;
  times_supers(f, record, matrix, c.min_supers, line, length, first, n, -1, shift);
}

// Elements of codes, and of their upper bits, each with the plane that is meant.
struct Elements {
  const uint16_t* codes;
  int64_t plane;
  const uint16_t* highs;
  int64_t high_plane;
  Elements from(int64_t at) const { return {codes + at, plane, highs + at, high_plane}; }
};

// Vectors of four floats are not compiled for each plane.
constexpr bool kPlaneAtRunTime = L < 8;

// 2·L bfloat16 weights from each 2·L elements: even ones and odd ones are the halves of 32-bit lanes,
// before and after. scales(at, odd): of even or of odd ones. quick: (code − zero) · scale is exact
// and short (short_weights), and scales are as scale_of has them; else their zeros are a group's zero
// or minimum.
template <Codes kind, int plane, bool quick, class Scales>
INLINE int64_t pairs_of(Elements c, int64_t n, bool half, Scales scales, uint16_t* out) {
  constexpr int bits = bits_of(kind);
  int64_t at = 0;
  for (; at + 2 * L <= n; at += 2 * L) {
    vu both = load<vu>(c.codes + at);
    if (kPlaneAtRunTime) both = both >> (uint32_t)(bits * c.plane);
    const Scale first = scales(at, 0), second = scales(at, 1);
    if constexpr (quick) {
      const vf even = weights_of(codes_of<bits, bits * plane>(both), first.factor, first.zero);
      const vf odd = weights_of(codes_of<bits, 16 + bits * plane>(both), second.factor, second.zero);
      store(out + at, ((vu)even >> 16) | (vu)odd);
    } else {
      vu low = {}, high = {};
      if constexpr (highs_of(kind) > 0) {
        const vu highs = load<vu>(c.highs + at) >> (uint32_t)(highs_of(kind) * c.high_plane);
        constexpr uint32_t mask = (1u << highs_of(kind)) - 1;
        low = (highs & mask) << bits, high = ((highs >> 16) & mask) << bits;
      }
      vf even = scaled_of<kind>(values_of<kind, bits * plane>(both, low), first.factor, first.zero);
      vf odd = scaled_of<kind>(values_of<kind, 16 + bits * plane>(both, high), second.factor, second.zero);
      if (half) even = through_f16(even), odd = through_f16(odd);
      store(out + at, (upper_bf16(even) >> 16) | upper_bf16(odd));
    }
  }
  return at;
}

// Whether the weights of a format are multiplied and rounded at once.
template <Codes kind>
INLINE bool is_quick(const Coding& c) {
  return is_plain(kind) && short_weights(c);
}

// Returns how many of the n weights were whole vectors.
template <Codes kind, class Scales>
INLINE int64_t pairs(const Coding& c, Elements e, int64_t n, Scales scales, uint16_t* out) {
  const bool half = c.product == Rounding::F16;
  return chosen<0, kPlaneAtRunTime ? 0 : 16 / bits_of(kind) - 1>(e.plane, [=, &c](auto p) {
    if constexpr (is_plain(kind)) {
      if (is_quick<kind>(c)) return pairs_of<kind, p.value, true>(e, n, half, scales, out);
    }
    return pairs_of<kind, p.value, false>(e, n, half, scales, out);
  });
}

// The same one by one, in any dtype. scale: of each weight, or of all where step is 0; shift too.
template <Codes kind>
__attribute__((noinline)) void singles(const Coding& c, Type type, Elements e, int64_t n,
                                       const float* scale, const float* shift, int64_t step, void* out,
                                       int64_t at) {
  constexpr int bits = bits_of(kind), more = highs_of(kind);
  for (int64_t i = 0; i < n; i++) {
    int32_t code = (e.codes[i] >> (bits * e.plane)) & ((1 << bits) - 1);
    if (more) code |= ((e.highs[i] >> (more * e.high_plane)) & ((1 << more) - 1)) << bits;
    float weight = kValues<kind>.of[code];
    if (shift_of(kind) == Shift::Zero) weight -= shift[i * step];
    weight *= scale[i * step];
    if (shift_of(kind) == Shift::Minimum) weight += shift[i * step];
    if (c.product == Rounding::F16) weight = wide_f16(f16(weight));
    if (c.product == Rounding::BF16) weight = as_float((uint32_t)bf16(weight) << 16);
    if (type == Type::BF16) ((uint16_t*)out)[at + i] = bf16(weight);
    if (type == Type::F32) ((float*)out)[at + i] = weight;
    if (type == Type::F16) ((float*)out)[at + i] = wide_f16(f16(weight));
  }
}

// Whole vectors of the same as float32, also where they are rounded to float16. scales(at): of L weights,
// with their zeros or minimums.
template <Codes kind, int plane, class Scales>
INLINE int64_t floats_of(const Coding& c, Type type, Elements e, int64_t n, Scales scales, float* out) {
  typedef uint16_t elements __attribute__((vector_size(2 * MOEJAX_LANES)));
  constexpr int bits = bits_of(kind), more = highs_of(kind);
  int64_t at = 0;
  for (; at + L <= n; at += L) {
    vu lanes = __builtin_convertvector(load<elements>(e.codes + at), vu), highs = {};
    if (kPlaneAtRunTime) lanes = lanes >> (uint32_t)(bits * e.plane);
    if constexpr (more > 0) {
      highs = __builtin_convertvector(load<elements>(e.highs + at), vu) >> (uint32_t)(more * e.high_plane);
      highs = (highs & ((1u << more) - 1)) << bits;
    }
    const Scale by = scales(at);
    vf weights = scaled_of<kind>(values_of<kind, bits * plane>(lanes, highs), by.factor, by.zero);
    if (c.product == Rounding::F16) weights = through_f16(weights);
    if (c.product == Rounding::BF16) weights = as_float(upper_bf16(weights));
    if (type == Type::F16) weights = through_f16(weights);
    store(out + at, weights);
  }
  return at;
}

template <Codes kind, class Scales>
INLINE int64_t floats(const Coding& c, Type type, Elements e, int64_t n, Scales scales, float* out) {
  return chosen<0, kPlaneAtRunTime ? 0 : 16 / bits_of(kind) - 1>(e.plane, [=, &c](auto p) {
    return floats_of<kind, p.value>(c, type, e, n, scales, out);
  });
}

#if defined(__AVX2__) && MOEJAX_LANES == 8
// The 16 weights that a scale gives, as tables of their lower and their upper bytes for VPSHUFB.
struct Table {
  __m256i low, high;
};

template <Codes kind>
INLINE Table table_of(float scale, float shift, bool half) {
  alignas(64) static constexpr float values[2][8] = {
      {value_of(kind, 0), value_of(kind, 1), value_of(kind, 2), value_of(kind, 3), value_of(kind, 8),
       value_of(kind, 9), value_of(kind, 10), value_of(kind, 11)},
      {value_of(kind, 4), value_of(kind, 5), value_of(kind, 6), value_of(kind, 7), value_of(kind, 12),
       value_of(kind, 13), value_of(kind, 14), value_of(kind, 15)}};
  vf first = scaled_of<kind>(load<vf>(values[0]), splat(scale), splat(shift));
  vf second = scaled_of<kind>(load<vf>(values[1]), splat(scale), splat(shift));
  if (half) first = through_f16(first), second = through_f16(second);
  const vu both = (upper_bf16(first) >> 16) | upper_bf16(second);
  const __m256i bytes = _mm256_shuffle_epi8(
      (__m256i)both, _mm256_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15, 0, 4, 8,
                                      12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15));
  return {_mm256_permute4x64_epi64(bytes, 0x88), _mm256_permute4x64_epi64(bytes, 0xdd)};
}

// The weights of elements, 4·L at once: codes are brought together as bytes, two vectors of elements in one,
// looked up, and their lower and upper bytes put side by side again, which undoes the order.
template <int plane>
INLINE int64_t looked_up(const uint16_t* codes, int64_t n, Table table, uint16_t* out) {
  int64_t at = 0;
  for (; at + 4 * L <= n; at += 4 * L) {
    __m256i a = _mm256_loadu_si256((const __m256i*)(codes + at));
    __m256i b = _mm256_loadu_si256((const __m256i*)(codes + at + 2 * L));
    if (plane < 2) {
      const __m256i mask = _mm256_set1_epi16(plane ? 0xf0 : 0x0f);
      a = _mm256_and_si256(a, mask), b = _mm256_and_si256(b, mask);
    } else {
      constexpr int shift = plane == 2 ? 8 : 12;
      a = _mm256_srli_epi16(a, shift), b = _mm256_srli_epi16(b, shift);
    }
    __m256i code = _mm256_packus_epi16(a, b);
    if (plane == 1) code = _mm256_srli_epi16(code, 4);
    if (plane == 2) code = _mm256_and_si256(code, _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(table.low, code);
    const __m256i high = _mm256_shuffle_epi8(table.high, code);
    store(out + at, _mm256_unpacklo_epi8(low, high)), store(out + at + 2 * L, _mm256_unpackhi_epi8(low, high));
  }
  return at;
}
#endif

// Some weights of a row of gate or up, in one plane.
struct Stretch {
  Elements elements;
  int64_t first, n;  // first: within its group
  const float *scales, *shifts;  // of its groups
};

#if defined(__AVX512BW__) && MOEJAX_LANES == 16
// Whether a Plane has the weights.
template <Codes kind>
INLINE bool has_plane(const Coding& c, Type type) {
  const bool short_scale = c.scale <= ScaleType::BF16 || c.scale == ScaleType::E8M0;
  if (kind == Codes::Int8 && (!short_scale || c.product == Rounding::F16)) return false;
  return type == Type::BF16;
}

// next: where the line is that is asked for at the first of the weights.
template <Codes kind>
INLINE void decode_planes(const Coding& c, const Stretch& s, const uint16_t* next, uint16_t* out) {
  constexpr int bits = bits_of(kind);
  const bool half = c.product == Rounding::F16;
  Plane<kind> weights(s.elements.plane, s.elements.high_plane);
  const float *scale = s.scales, *shift = s.shifts;
  const uint16_t *codes = s.elements.codes, *highs = s.elements.highs;
  for (int64_t i = 0, stop = c.group - s.first; i < s.n; stop += c.group) {
    weights.set(splat(*scale++), shift_of(kind) == Shift::None ? vf{} : splat(*shift++), half);
    stop = least(stop, s.n);
    const auto put = [&](int64_t at) {
      const __m512i more = highs_of(kind) ? (__m512i)load<vu>(highs + at) : __m512i{};
      store(out + at, weights.get((__m512i)load<vu>(codes + at), more));
    };
    for (; i + kPart <= stop; i += kPart) {
#pragma GCC unroll 4
      for (int64_t j = 0; j < kPart; j += 2 * L) {
        if (j * bits % 512 == 0) soon(next + (i + j) * bits / 16);
        put(i + j);
      }
    }
    for (; i + 2 * L <= stop; i += 2 * L) {
      if (i * bits % 512 < 2 * L * bits) soon(next + i * bits / 16);
      put(i);
    }
    if (i < stop) {
      const __m512i more = highs_of(kind) ? load_first(highs + i, stop - i) : __m512i{};
      store_first(out + i, stop - i, weights.get(load_first(codes + i, stop - i), more));
    }
    i = stop;
  }
}
#endif

// Whole vectors of a row that share a scale; returns their weights.
template <Codes kind>
INLINE int64_t group_of(const Coding& c, Elements e, int64_t n, float scale, float shift, uint16_t* out) {
  int64_t at = 0;
#if defined(__AVX2__) && MOEJAX_LANES == 8
  if constexpr (codes_in(kind) == 16) {
    const Table table = table_of<kind>(scale, shift, c.product == Rounding::F16);
    at = chosen<0, 3>(e.plane, [=](auto p) { return looked_up<p.value>(e.codes, n, table, out); });
  }
#endif
  const Scale same = is_quick<kind>(c) ? scale_of<kind>(scale) : Scale{splat(scale), splat(shift)};
  return at + pairs<kind>(c, e.from(at), n - at, [same](int64_t, int) { return same; }, out + at);
}

// gate and up: element e of a row holds the codes of columns e + j · D/P.
template <Codes kind>
void decode_in(const Format& f, const uint16_t* record, int matrix, int64_t row, int64_t first,
               int64_t count, void* out) {
  const int64_t size = f.hidden * bits_of(kind) / 16, end = first + count;
  const Coding& c = f.matrix[matrix];
  const int64_t line = c.across == 1 ? row : row / c.across;
  const uint16_t* codes = record + c.codes * f.hidden + row * size;
  constexpr int more = highs_of(kind);
  const int64_t high_size = more ? f.hidden * more / 16 : f.hidden;  // of a plane of upper bits
  const uint16_t* highs = record + c.highs * f.hidden + row * high_size;
  float scale[kScales], shift[kScales];
  for (int64_t at = first; at < end;) {
    const int64_t group = at / c.group, begin = group * c.group;
    const int64_t plane = at / size, high_plane = at / high_size;
    int64_t stop = least(least(end, (plane + 1) * size), begin + kScales * c.group);
    if (more) stop = least(stop, (high_plane + 1) * high_size);
    const int64_t count = (stop - begin + c.group - 1) / c.group;
    groups_of(f, record, matrix, line, group, count, scale, shift);
    const Elements e = {codes + at - plane * size, plane, highs + at - high_plane * high_size, high_plane};
    const Stretch s = {e, at - begin, stop - at, scale, shift};
    const int64_t place = at - first;
    at = stop;
#if defined(__AVX512BW__) && MOEJAX_LANES == 16
    if constexpr (bits_of(kind) + highs_of(kind) <= kWidest) {
      if (has_plane<kind>(c, f.type)) {
        const uint16_t* next = codes + kSoonIn * size + (first + place) * bits_of(kind) / 16;
        decode_planes<kind>(c, s, next, (uint16_t*)out + place);
        continue;
      }
    }
#endif
    int64_t i = 0, g = 0;
    if constexpr (kind == Codes::Int6) {
      if (f.type == Type::BF16 && c.group == L && s.first == 0) {  // vectors of two groups
        const auto scales = [&](int64_t at, int) -> Scale { return {in_halves(scale + at / L), vf{}}; };
        i = pairs<kind>(c, e, s.n, scales, (uint16_t*)out + place), g = i / L;
      }
    }
    for (int64_t last = (g + 1) * c.group - s.first; i < s.n; last += c.group, g++) {
      last = least(last, s.n);
      if (f.type == Type::BF16) {
        uint16_t* to = (uint16_t*)out + place + i;
        i += group_of<kind>(c, e.from(i), last - i, scale[g], shift[g], to);
      } else {
        const Scale same = {splat(scale[g]), shift_of(kind) == Shift::None ? vf{} : splat(shift[g])};
        const auto scales = [same](int64_t) { return same; };
        i += floats<kind>(c, f.type, e.from(i), last - i, scales, (float*)out + place + i);
      }
      if (i < last) {
        singles<kind>(c, f.type, e.from(i), last - i, scale + g, shift + g, 0, out, place + i);
      }
      i = last;
    }
  }
}

// Of even or of odd ones of 2·L columns, from what `down_scales` gave.
INLINE Scale scale_at(const float* scales, int64_t at, int odd) {
  const float* mine = scales + 2 * at + odd * L;
  return {load<vf>(mine), load<vf>(mine + 2 * L)};
}

// down^T: element (r, c) holds the codes of rows r + j · J of column c, J = ⌈I/P⌉.
template <Codes kind>
void decode_down(const Format& f, const uint16_t* record, int64_t row, int64_t first, int64_t count,
                 const float* scales, void* out) {
  constexpr int64_t bits = bits_of(kind), planes = 16 / bits;
  const int64_t size = (f.width + planes - 1) / planes, plane = row / size;
  const Coding& c = f.matrix[DOWN];
  const uint16_t* codes = record + (c.codes + row - plane * size) * f.hidden + first;
  constexpr int64_t more = highs_of(kind), high_planes = more ? 16 / more : 1;
  const int64_t high_size = (f.width + high_planes - 1) / high_planes, high_plane = row / high_size;
  const uint16_t* highs = record + (c.highs + row - high_plane * high_size) * f.hidden + first;
  const Elements e = {codes, plane, highs, high_plane};
  const float* scale = scales + row / c.group * 2 * padded(count);
  int64_t at = 0;
#if defined(__AVX512BF16__) && MOEJAX_LANES == 16
  const bool half = c.product == Rounding::F16;
  if (f.type == Type::BF16) {
    const Numbers<kind> numbers(plane, high_plane);
    const float* shift = scale + padded(count);
    const uint16_t* next = codes + kSoonDown * f.hidden + plane * count / planes;
    const auto weights = [&](__m512i codes, __m512i highs) {
      Pair pair = numbers.values(codes, highs);
      const bool shifts = shift_of(kind) != Shift::None;
      const vf first = shifts ? load<vf>(shift + at) : vf{}, second = shifts ? load<vf>(shift + at + L) : vf{};
      pair = {scaled_of<kind>(pair.first, load<vf>(scale + at), first),
              scaled_of<kind>(pair.second, load<vf>(scale + at + L), second)};
      if (half) pair = {through_f16(pair.first), through_f16(pair.second)};
      return narrowed(pair.first, pair.second);
    };
    for (; at + 2 * L <= count; at += 2 * L) {
      soon(next + at * bits / 16);
      const __m512i upper = more ? (__m512i)load<vu>(highs + at) : __m512i{};
      store((uint16_t*)out + at, weights((__m512i)load<vu>(codes + at), upper));
    }
    if (at == count) return;
    const __m512i upper = more ? load_first(highs + at, count - at) : __m512i{};
    return store_first((uint16_t*)out + at, count - at, weights(load_first(codes + at, count - at), upper));
  }
#else
  if (f.type == Type::BF16) {
    const auto scales = [scale](int64_t i, int odd) { return scale_at(scale, i, odd); };
    at = pairs<kind>(c, e, count, scales, (uint16_t*)out);
  }
#endif
  if (f.type != Type::BF16) {
    const auto scales = [=](int64_t i) -> Scale {
      return {load<vf>(scale + i), shift_of(kind) == Shift::None ? vf{} : load<vf>(scale + padded(count) + i)};
    };
    at = floats<kind>(c, f.type, e, count, scales, (float*)out);
  }
  // The columns behind whole vectors: see down_scales.
  const float* rest = scale + (f.type == Type::BF16 ? 2 * at : at);
  const float* shift = rest + (f.type == Type::BF16 ? 2 * L : padded(count));
  singles<kind>(c, f.type, e.from(at), count - at, rest, shift, 1, out, at);
}

// Of `count` columns from `first` on, of a group of rows.
void column_scales(const Format& f, const uint16_t* record, int64_t group, int64_t first, int64_t count,
                   float* scale, float* shift) {
  const int64_t across = f.matrix[DOWN].across;
  if (across == 1) return groups_of(f, record, DOWN, group, first, count, scale, shift);
  for (int64_t at = 0; at < count;) {
    const int64_t block = (first + at) / across;
    const int64_t stop = least(count, (block + 1) * across - first);
    float same[2] = {};
    groups_of(f, record, DOWN, group, block, 1, same, same + 1);
    for (; at < stop; at++) scale[at] = same[0], shift[at] = same[1];
  }
}

void down_scales(const Format& f, const uint16_t* record, int64_t first, int64_t count,
                 float* out) {
  const Coding& c = f.matrix[DOWN];
  if (c.kind == Codes::Dense || c.kind == Codes::Lossless12) return;
  for (int64_t group = 0; group * c.group < f.width; group++) {
    float* mine = out + group * 2 * padded(count);
#if defined(__AVX512BF16__) && MOEJAX_LANES == 16
    column_scales(f, record, group, first, count, mine, mine + padded(count));
    if (c.kind != Codes::E4M3 || f.type != Type::BF16) continue;
    for (int64_t i = 0; i < count; i++) mine[i] *= Numbers<Codes::E4M3>::less;
#else
    if (f.type != Type::BF16) {
      column_scales(f, record, group, first, count, mine, mine + padded(count));
      continue;
    }
    // Whole vectors as `scale_at` reads them; the columns behind them have plain scales, and 2·L
    // floats on their zeros or minimums.
    const float zero = -zero_of(c.kind);
    for (int64_t start = 0; start < count; start += kScales) {
      float scale[kScales], shift[kScales];
      const int64_t n = least(kScales, count - start);
      column_scales(f, record, group, first + start, n, scale, shift);
      int64_t at = 0;
      for (; at + 2 * L <= n; at += 2 * L, mine += 4 * L) {
        vf even, odd, even_zero, odd_zero;
        for (int i = 0; i < L; i++) even[i] = scale[at + 2 * i], odd[i] = scale[at + 2 * i + 1];
        even_zero = even * zero, odd_zero = odd * zero;
        for (int i = 0; i < L && has_shifts(c.kind); i++) {
          even_zero[i] = shift[at + 2 * i], odd_zero[i] = shift[at + 2 * i + 1];
        }
        store(mine, even), store(mine + L, odd);
        store(mine + 2 * L, even_zero), store(mine + 3 * L, odd_zero);
      }
      memcpy(mine, scale + at, (n - at) * sizeof *mine);
      if (has_shifts(c.kind)) memcpy(mine + 2 * L, shift + at, (n - at) * sizeof *mine);
    }
#endif
  }
}

INLINE void exact(const uint16_t* bytes, int64_t byte_plane, const uint16_t* codes,
                  int64_t code_plane, int64_t n, const uint16_t* table, int64_t escapes,
                  uint16_t* out, const uint16_t* next_bytes, const uint16_t* next_codes) {
  // The half of a matrix that a byte's plane is holds two quarters, or parts of three.
  chosen<0, 3>(code_plane, [=](auto c) {
    constexpr int plane = c.value;
    constexpr int low = plane / 2, high = plane > 0;
    if (byte_plane == low) {
      exact_plane<low, plane>(bytes, codes, n, table, escapes, out, next_bytes, next_codes);
    } else {
      exact_plane<high, plane>(bytes, codes, n, table, escapes, out, next_bytes, next_codes);
    }
  });
}

void decode_lossless(const Format& f, const uint16_t* record, int matrix, int64_t row,
                     int64_t first, int64_t count, uint16_t* out) {
  const uint16_t* bytes = record + f.matrix[matrix].codes * f.hidden;
  const uint16_t* codes = record + f.matrix[matrix].extra * f.hidden;
  const uint16_t* table = record + f.tables * f.hidden +
                          (matrix * f.blocks + row / kBlock) * (1 + f.escapes);
  if (matrix == DOWN) {
    const int64_t two = (f.width + 1) / 2, four = (f.width + 3) / 4;
    bytes += row % two * f.hidden + first;
    codes += row % four * f.hidden + first;
    return exact(bytes, row / two, codes, row / four, count, table, f.escapes, out,
                 bytes + kSoonDown * f.hidden + row / two * count / 2,
                 codes + kSoonDown * f.hidden + row / four * count / 4);
  }
  const int64_t two = f.hidden / 2, four = f.hidden / 4, end = first + count;
  for (int64_t at = first; at < end;) {
    const int64_t stop = least(end, (at / four + 1) * four);
    exact(bytes + row * two + at % two, at / two, codes + row * four + at % four, at / four,
          stop - at, table, f.escapes, out + at - first, bytes + (row + kSoonIn) * two + at / 2, codes + (row + kSoonIn) * four + at / 4);
    at = stop;
  }
}

template <Codes kind>
INLINE void decode_scaled(const Format& f, const uint16_t* record, int matrix, int64_t row,
                          int64_t first, int64_t count, const float* scales, void* out) {
  if (matrix == DOWN) return decode_down<kind>(f, record, row, first, count, scales, out);
  decode_in<kind>(f, record, matrix, row, first, count, out);
}

void decode(const Format& f, const uint16_t* record, int matrix, int64_t row, int64_t first,
            int64_t count, const float* scales, void* out) {
  const auto scaled = [=, &f](auto kind) {
    decode_scaled<decltype(kind)::value>(f, record, matrix, row, first, count, scales, out);
  };
  switch (f.matrix[matrix].kind) {
    case Codes::Int8: return scaled(Constant<Codes, Codes::Int8>());
    case Codes::Int4: return scaled(Constant<Codes, Codes::Int4>());
    case Codes::Int2: return scaled(Constant<Codes, Codes::Int2>());
    case Codes::E4M3: return scaled(Constant<Codes, Codes::E4M3>());
    case Codes::E2M1: return scaled(Constant<Codes, Codes::E2M1>());
    case Codes::IQ4: return scaled(Constant<Codes, Codes::IQ4>());
    case Codes::Zero8: return scaled(Constant<Codes, Codes::Zero8>());
    case Codes::Zero4: return scaled(Constant<Codes, Codes::Zero4>());
    case Codes::Min4: return scaled(Constant<Codes, Codes::Min4>());
    case Codes::Min5: return scaled(Constant<Codes, Codes::Min5>());
    case Codes::Int5: return scaled(Constant<Codes, Codes::Int5>());
    case Codes::Int6: return scaled(Constant<Codes, Codes::Int6>());
    case Codes::Lossless12:
      return decode_lossless(f, record, matrix, row, first, count, (uint16_t*)out);
    case Codes::Dense: break;
  }
  const int64_t size = size_of(f.type);
  const char* weights = (const char*)(record + f.matrix[matrix].codes * f.hidden) +
                        (row * f.hidden + first) * size;
  if (f.type == Type::F16) return widen(f.type, weights, count, (float*)out);
  memcpy(out, weights, count * size);
}

}  // namespace
}  // namespace moejax
#include "encoded.h"
namespace moejax {
namespace {

// ---- functions

// exp(x) of x up to 88.3; below −87.3 it is 0.
INLINE vf exponential_of_less(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to a whole number
  const vf shifted = x * 1.44269504f + magic, p = exponential_over(x, shifted - magic);
  const vu exponent = ((vu)shifted - (vu)magic + 127u) << 23;
  return x < splat(-87.3f) ? vf{} : p * as_float(exponent);
}

// exp(x); of x above 88.3 that of 88.3.
INLINE vf exponential(vf x) { return exponential_of_less(x > splat(88.3f) ? splat(88.3f) : x); }

template <class F>
INLINE void each(float* x, const float* y, int64_t n, F f) {
  int64_t i = 0;
  for (; i + L <= n; i += L) store(x + i, f(load<vf>(x + i), y ? load<vf>(y + i) : vf{}));
  if (i == n) return;
  float ends[2][L] = {};
  memcpy(ends[0], x + i, (n - i) * 4);
  if (y) memcpy(ends[1], y + i, (n - i) * 4);
  vf last = f(load<vf>(ends[0]), load<vf>(ends[1]));
  memcpy(x + i, &last, (n - i) * 4);
}

void activate(int activation, float limit, float alpha, float* gate, const float* up, int64_t n) {
  switch (activation) {
    case CLAMPED_SWIGLU: {
      const vf most = splat(limit), least = -most;
      return each(gate, up, n, [=](vf g, vf u) {
        g = g > most ? most : g;
        u = u > most ? most : u < least ? least : u;
        return (u + 1.0f) * (g / (1.0f + exponential(-(g * alpha))));
      });
    }
    case SILU:
      return each(gate, up, n, [](vf g, vf u) { return g / (1.0f + exponential(-g)) * u; });
    case RELU:
      return each(gate, up, n, [](vf g, vf u) { return (g < vf{} ? vf{} : g) * u; });
    case GELU:
      for (int64_t i = 0; i < n; i++) {
        gate[i] = 0.5f * gate[i] * (1.0f + erff(gate[i] * 0.70710678f)) * up[i];
      }
      return;
    default:
      for (int64_t i = 0; i < n; i++) {
        float x = gate[i], inner = 0.79788456f * (x + 0.044715f * x * x * x);
        gate[i] = 0.5f * x * (1.0f + tanhf(inner)) * up[i];
      }
  }
}

// W · lanes of V columns of a head's state, whose rows lie `apart` floats from each other. What a
// token writes, the next one's decay reads while it is in registers: a row is touched once a token.
template <class V, int W>
INLINE void delta_columns(float* s, int64_t apart, const DeltaTokens& d, float* v) {
  constexpr int64_t lanes = sizeof(V) / 4;
  const float *kept = d.kept, *key = d.key, *q = d.q, *rate = d.rate;
  V error[W] = {};
  for (int64_t i = 0; i < d.keys; i++) {
    for (int w = 0; w < W; w++) {
      float* at = s + i * apart + w * lanes;
      const V row = load<V>(at) * kept[i * d.decays];
      store(at, row);
      error[w] += row * key[i];
    }
  }
  for (int64_t t = 1; t <= d.tokens; t++) {
    V out[W] = {}, next[W] = {};
    for (int w = 0; w < W; w++) error[w] = *rate * (load<V>(v + w * lanes) - error[w]);
    if (t == d.tokens) {
      for (int64_t i = 0; i < d.keys; i++) {
        for (int w = 0; w < W; w++) {
          float* at = s + i * apart + w * lanes;
          V row = load<V>(at);
          row += key[i] * error[w];
          out[w] += row * q[i];
          store(at, row);
        }
      }
    } else {
      const float *next_kept = kept + d.apart, *next_key = key + d.apart;
      for (int64_t i = 0; i < d.keys; i++) {
        for (int w = 0; w < W; w++) {
          float* at = s + i * apart + w * lanes;
          V row = load<V>(at);
          row += key[i] * error[w];
          out[w] += row * q[i];
          row *= next_kept[i * d.decays];
          store(at, row);
          next[w] += row * next_key[i];
        }
      }
    }
    for (int w = 0; w < W; w++) store(v + w * lanes, out[w]), error[w] = next[w];
    kept += d.apart, key += d.apart, q += d.apart, rate += d.apart, v += d.apart;
  }
}

void delta(float* s, int64_t values, const DeltaTokens& d, float* v, float* scratch) {
  int64_t c = 0;
  for (; c + 2 * L <= values; c += 2 * L) {
    if (d.tokens == 1) {
      delta_columns<vf, 2>(s + c, values, d, v + c);
      continue;
    }
    // Rows that lie a power of two apart would share a few sets of the first cache.
    for (int64_t i = 0; i < d.keys; i++) memcpy(scratch + i * 2 * L, s + i * values + c, 8 * L);
    delta_columns<vf, 2>(scratch, 2 * L, d, v + c);
    for (int64_t i = 0; i < d.keys; i++) memcpy(s + i * values + c, scratch + i * 2 * L, 8 * L);
  }
  for (; c < values; c++) delta_columns<float, 1>(s + c, values, d, v + c);
}

// `count` tokens of some columns of a head's state, a row read and written once for all of them.
template <class V, int count>
INLINE void scan_columns(float* s, int64_t values, const ScanTokens& t, float* x) {
  V in[count], out[count] = {};
  for (int j = 0; j < count; j++) in[j] = load<V>(x + j * t.apart);
  for (int64_t i = 0; i < t.keys; i++) {
    V row = load<V>(s + i * values);
    for (int j = 0; j < count; j++) {
      row = unfused(row * t.kept[j * t.apart]);
      row += t.key[j * t.apart + i] * in[j];
      out[j] += row * t.read[j * t.apart + i];
    }
    store(s + i * values, row);
  }
  for (int j = 0; j < count; j++) store(x + j * t.apart, out[j]);
}

template <int count>
INLINE void scan_tokens(float* s, int64_t values, const ScanTokens& t, float* x) {
  int64_t c = 0;
  for (; c + L <= values; c += L) scan_columns<vf, count>(s + c, values, t, x + c);
  for (; c < values; c++) scan_columns<float, count>(s + c, values, t, x + c);
}

void scan(float* s, int64_t values, ScanTokens t, float* x) {
  const auto pass = [&](int64_t count) {
    t.kept += count * t.apart, t.key += count * t.apart, t.read += count * t.apart;
    x += count * t.apart, t.tokens -= count;
  };
  for (; t.tokens >= 8; pass(8)) scan_tokens<8>(s, values, t, x);
  for (; t.tokens > 0; pass(1)) scan_tokens<1>(s, values, t, x);
}

void scan_each(float* __restrict s, int64_t keys, int64_t values, const float* __restrict kept,
               const float* __restrict key, const float* __restrict x,
               const float* __restrict read, float* __restrict out) {
  for (int64_t c = 0; c < values; c++) out[c] = 0;
  for (int64_t i = 0; i < keys; i++) {
    float* __restrict row = s + i * values;
    const float* __restrict of_row = kept + i * values;
    for (int64_t c = 0; c < values; c++) row[c] *= of_row[c];
    for (int64_t c = 0; c < values; c++) row[c] += key[i] * x[c], out[c] += row[c] * read[i];
  }
}

void exponentials(float* x, float top, int64_t n) {
  each(x, nullptr, n, [top](vf v, vf) { return exponential(v - top); });
}

}  // namespace
}  // namespace moejax
#include "pallas_kernels/paged_attention/tiles.h"
#include "pallas_kernels/sample/rows.h"
#include "integers.h"
#ifdef MOEJAX_ISA  // else a test's program has the functions alone
namespace moejax {

extern const Kernels MOEJAX_JOIN(kernels_, MOEJAX_ISA);
const Kernels MOEJAX_JOIN(kernels_, MOEJAX_ISA) = {
    MOEJAX_TEXT(MOEJAX_ISA), few, rows_of_task, pack, dots, dots_of_many, add, add_of_many, unpack,
    decode, down_scales, takes, encoded_dots, encoded_add, kElements, false, quantize, integer_dots,
    integer_columns, widen, narrow, norm, activate,
    delta, scan, scan_each, exponentials, attended_rows, pack_queries, attend, fold, attended, draw_row, rank_row,
};

#ifdef __AMX_INT8__
void integer_dots_by_tiles(const Format& f, const uint16_t* record, int matrix, int64_t first, int64_t rows,
                           const float* const* x, int64_t tokens, float* y, int64_t stride, float* scratch) {
  integer_dots_of<true>(f, record, matrix, first, rows, x, tokens, y, stride, scratch);
  release_tiles();
}
void integer_columns_by_tiles(const Format& f, const uint16_t* record, int64_t column, int64_t n, const float* const* h,
                              int64_t tokens, float* const* y, float* scratch, const uint16_t* next) {
  integer_columns_of<true>(f, record, column, n, h, tokens, y, scratch, next);
  release_tiles();
}
#endif

}  // namespace moejax
#endif
