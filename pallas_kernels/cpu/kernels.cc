// Compiled once for each instruction set, with MOEJAX_ISA its name and MOEJAX_LANES the floats of a
// vector. Vectors are the compiler's own (GCC and Clang), so that every instruction set runs the
// same source; only the two instructions that have no such form are intrinsics.
//
// Everything here has internal linkage and no header with inline functions is included, but for
// kernels.h: a function compiled for AVX-512 must never be the linker's choice for other callers.
#include <math.h>
#include <string.h>

#include "kernels.h"
#if defined(__F16C__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#define MOEJAX_JOIN_(a, b) a##b
#define MOEJAX_JOIN(a, b) MOEJAX_JOIN_(a, b)
#define MOEJAX_TEXT_(a) #a
#define MOEJAX_TEXT(a) MOEJAX_TEXT_(a)
#define INLINE inline __attribute__((always_inline))

// Products of pairs of bfloat16 (VDPBF16PS), or the same arithmetic's shape for tests of the code
// around it on machines without the instruction (MOEJAX_PAIRS=1: float32 products and sums).
#if defined(__AVX512BF16__) && !defined(MOEJAX_PAIRS)
#define MOEJAX_PAIRS 2
#elif !defined(MOEJAX_PAIRS)
#define MOEJAX_PAIRS 0
#endif

namespace moejax {
namespace {

constexpr int64_t L = MOEJAX_LANES;
typedef float vf __attribute__((vector_size(4 * MOEJAX_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * MOEJAX_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * MOEJAX_LANES)));

template <class V>
INLINE V load(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
INLINE void store(void* p, V v) {
  memcpy(p, &v, sizeof v);
}
INLINE vf splat(float x) { return x - vf{}; }  // not + 0, which is not free
INLINE vf as_float(vu v) { return (vf)v; }
INLINE float as_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
INLINE uint32_t as_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Pairwise halves: one order for every sum.
INLINE float sum(vf v) {
  float lanes[L];
  store(lanes, v);
  for (int64_t half = L / 2; half; half /= 2) {
    for (int64_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// ---- numbers

INLINE uint16_t bf16(float f) {
  uint32_t u = as_bits(f), even = u + 0x7fff + ((u >> 16) & 1);
  return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : even >> 16);
}

INLINE uint16_t f16(float f) {
  uint32_t u = as_bits(f), sign = (u >> 16) & 0x8000;
  u &= 0x7fffffff;
  if (u >= 0x47800000) return (uint16_t)(sign | (u > 0x7f800000 ? 0x7e00 : 0x7c00));
  // Below 2^-14 the step is 2^-24, which is that of float32 between 0.5 and 1.
  if (u < 0x38800000) return (uint16_t)(sign | (as_bits(as_float(u) + 0.5f) - 0x3f000000));
  return (uint16_t)(sign | ((u - 0x38000000 + 0xfff + ((u >> 13) & 1)) >> 13));
}

INLINE float wide_f16(uint16_t h) {
  uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13;
  float value = as_float(magnitude) * 0x1p112f;
  if (magnitude >= 0x7c00u << 13) value = as_float(magnitude | 0x7f800000);
  return as_float(as_bits(value) | (uint32_t)(h & 0x8000) << 16);
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
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + i))));
  }
#endif
  for (; i < n; i++) out[i] = wide_f16(p[i]);
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

// ---- operands of 2·L weights at a time

// bfloat16 weights are read as 32-bit pairs: L even ones, L odd ones. Packed x has the same order,
// so no lane ever moves.
void pack(Type type, const void* x, int64_t n, float* out) {
  if (kind_of(type) == Type::F32) {
    widen(type, x, n, out);
    memset(out + n, 0, (padded(n) - n) * 4);
    return;
  }
  const uint16_t* p = (const uint16_t*)x;
#if MOEJAX_PAIRS
  memcpy(out, p, n * 2);
  memset((uint16_t*)out + n, 0, (2 * padded(n) - n) * 2);
#else
  for (int64_t at = 0; at < padded(n); at += 2 * L) {
    for (int64_t i = 0; i < L; i++) {
      int64_t even = at + 2 * i;
      out[at + i] = even < n ? as_float((uint32_t)p[even] << 16) : 0;
      out[at + L + i] = even + 1 < n ? as_float((uint32_t)p[even + 1] << 16) : 0;
    }
  }
#endif
}

struct Pair {
  vf first, second;
};

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
INLINE vf multiply(vf total, const void* w, int64_t at, const float* x, int64_t x_at) {
#if MOEJAX_PAIRS
  if (kind == Type::BF16) {
    const uint16_t* p = (const uint16_t*)w + at;
    const uint16_t* q = (const uint16_t*)x + x_at;
#if MOEJAX_PAIRS == 2
    return (vf)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_loadu_si512(p),
                                (__m512bh)_mm512_loadu_si512(q));
#else
    vu a = load<vu>(p), b = load<vu>(q);
    total = total + as_float(a & 0xffff0000u) * as_float(b & 0xffff0000u);
    return total + as_float(a << 16) * as_float(b << 16);
#endif
  }
#endif
  Pair pair = weights<kind>(w, at);
  total = total + pair.first * load<vf>(x + x_at);
  return total + pair.second * load<vf>(x + x_at + L);
}

// ---- dots

// Elements of a sum that all rows of a call pass before the next ones, so that the operands of
// several tokens stay in the first cache. Sums wait in memory meanwhile: no bit depends on it.
constexpr int64_t kDepth = 512;
constexpr int64_t kGroup = 48;  // rows whose sums wait

template <Type kind, int T, int R>
INLINE void tile(const void* const* w, const float* const* x, int64_t from, int64_t to, int64_t n,
                 float* sums, float* y, int64_t stride, const void* const* next) {
  const int64_t size = kind == Type::BF16 ? 2 : 4;
  vf total[T][R];
  for (int t = 0; t < T; t++) {
    for (int r = 0; r < R; r++) total[t][r] = from ? load<vf>(sums + (t * R + r) * L) : vf{};
  }
  int64_t at = from;
  for (; at + 2 * L <= to; at += 2 * L) {
    if (next) {
      for (int r = 0; r < R; r++) __builtin_prefetch((const char*)next[r] + at * size, 0, 2);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
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
  for (int64_t first = 0; first < rows; first += kGroup) {
    const int64_t last = least(first + kGroup, rows);
    for (int64_t from = 0; from == 0 || from < n; from += depth) {
      const int64_t to = least(from + depth, n);
      int64_t r = first;
      for (; r + R <= last; r += R) {
        tile<kind, T, R>(w + r, x, from, to, n, sums + (r - first) * T * L, y + r, stride,
                         next ? next + r : next);
      }
      for (; r < last; r++) {
        tile<kind, T, 1>(w + r, x, from, to, n, sums + (r - first) * T * L, y + r, stride, nullptr);
      }
    }
  }
}

// Sums in flight fill the registers: 16, or 32 with AVX-512.
#if MOEJAX_LANES == 16
constexpr int kTile[kTokens] = {8, 8, 6, 5};
#else
constexpr int kTile[kTokens] = {8, 5, 4, 3};
#endif

template <Type kind>
INLINE void dots_of(const void* const* w, int64_t rows, const float* const* x, int64_t tokens,
                    int64_t n, float* y, int64_t stride, const void* const* next) {
  switch (tokens) {
    case 1: return rows_of<kind, 1, kTile[0]>(w, rows, x, n, y, stride, next);
    case 2: return rows_of<kind, 2, kTile[1]>(w, rows, x, n, y, stride, next);
    case 3: return rows_of<kind, 3, kTile[2]>(w, rows, x, n, y, stride, next);
    default: return rows_of<kind, 4, kTile[3]>(w, rows, x, n, y, stride, next);
  }
}

void dots(Type kind, const void* const* w, int64_t rows, const float* const* x, int64_t tokens,
          int64_t n, float* y, int64_t stride, const void* const* next) {
  if (kind == Type::BF16) return dots_of<Type::BF16>(w, rows, x, tokens, n, y, stride, next);
  dots_of<Type::F32>(w, rows, x, tokens, n, y, stride, next);
}

// ---- add

// C blocks of 2·L columns of T tokens at once, so that several sums are in flight.
template <Type kind, int T, int C>
INLINE void add_block(const void* const* w, int64_t rows, const float* const* h, int64_t at,
                      int64_t from, float* const* total) {
  vf sums[T][C][2];
  for (int t = 0; t < T; t++) {
    for (int c = 0; c < C; c++) {
      sums[t][c][0] = load<vf>(total[t] + at + 2 * L * c);
      sums[t][c][1] = load<vf>(total[t] + at + 2 * L * c + L);
    }
  }
  for (int64_t i = 0; i < rows; i++) {
    vf factor[T];
    for (int t = 0; t < T; t++) factor[t] = splat(h[t][i]);
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      Pair pair = weights<kind>(w[i], from + 2 * L * c);
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) {
        sums[t][c][0] = sums[t][c][0] + factor[t] * pair.first;
        sums[t][c][1] = sums[t][c][1] + factor[t] * pair.second;
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

template <Type kind, int T>
void add_of(const void* const* w, int64_t rows, const float* const* h, int64_t n,
            float* const* total) {
  constexpr int C = T == 1 ? 4 : T == 2 ? 2 : 1;
  int64_t at = 0;
  for (; at + 2 * L * C <= n; at += 2 * L * C) add_block<kind, T, C>(w, rows, h, at, at, total);
  for (; at + 2 * L <= n; at += 2 * L) add_block<kind, T, 1>(w, rows, h, at, at, total);
  if (at == n) return;
  char bytes[kRows][2 * L * 4];
  const void* ends[kRows];
  for (int64_t i = 0; i < rows; i++) {
    End<kind> end(w[i], at, n);
    memcpy(bytes[i], end.bytes, sizeof end.bytes);
    ends[i] = bytes[i];
  }
  add_block<kind, T, 1>(ends, rows, h, at, 0, total);
}

template <Type kind>
INLINE void add_tokens(const void* const* w, int64_t rows, const float* const* h, int64_t tokens,
                       int64_t n, float* const* total) {
  switch (tokens) {
    case 1: return add_of<kind, 1>(w, rows, h, n, total);
    case 2: return add_of<kind, 2>(w, rows, h, n, total);
    case 3: return add_of<kind, 3>(w, rows, h, n, total);
    default: return add_of<kind, 4>(w, rows, h, n, total);
  }
}

void add(Type kind, const void* const* w, int64_t rows, const float* const* h, int64_t tokens,
         int64_t n, float* const* total) {
  if (kind == Type::BF16) return add_tokens<Type::BF16>(w, rows, h, tokens, n, total);
  add_tokens<Type::F32>(w, rows, h, tokens, n, total);
}

void unpack(Type kind, const float* total, int64_t n, float* out) {
  if (kind == Type::F32) {
    memcpy(out, total, n * 4);
    return;
  }
  for (int64_t c = 0; c < n; c++) {
    int64_t at = c / (2 * L) * (2 * L), i = c - at;
    out[c] = total[at + i / 2 + (i % 2) * L];
  }
}

// ---- records (pallas_kernels/records/reference.py has the meaning)

constexpr int64_t kBlock = 32;    // rows that share a base exponent in lossless12
constexpr uint32_t kEscape = 15;  // the code of a weight that the table has
constexpr int64_t kPart = 128;    // weights decoded at once outside of whole vectors

template <int bits>
constexpr float zero_of() {
  return bits == 2 ? 1.5f : (float)(1 << (bits - 1));
}

template <int bits>
INLINE vf code_of(vu elements, int shift) {
  vu code = (elements >> shift) & (uint32_t)((1 << bits) - 1);
  return __builtin_convertvector((vi)code, vf);
}

INLINE vu even_bf16(vf f) {  // in the upper half; never a NaN, since scales are finite
  vu u = (vu)f;
  return u + 0x7fffu + ((u >> 16) & 1u);
}

// 2·L bfloat16 weights, (code − zero) · scale, exact in float32 and then rounded once, from 2·L
// elements: even ones and odd ones are the halves of 32-bit lanes, before and after.
template <int bits>
INLINE void pairs(const uint16_t* codes, int plane, vf even_scale, vf odd_scale, uint16_t* out) {
  const float zero = zero_of<bits>();
  vu both = load<vu>(codes);
  vf even = code_of<bits>(both, bits * plane) * even_scale - zero * even_scale;
  vf odd = code_of<bits>(both, 16 + bits * plane) * odd_scale - zero * odd_scale;
  store(out, (even_bf16(even) >> 16) | (even_bf16(odd) & 0xffff0000u));
}

// The same one by one, in any dtype. scale: of each weight, or of all where step is 0.
template <int bits>
INLINE void singles(Type type, const uint16_t* codes, int plane, int64_t n, const float* scale,
                    int64_t step, void* out, int64_t at) {
  for (int64_t i = 0; i < n; i++) {
    const int32_t code = (codes[i] >> (bits * plane)) & ((1 << bits) - 1);
    const float weight = ((float)code - zero_of<bits>()) * scale[i * step];
    if (type == Type::BF16) ((uint16_t*)out)[at + i] = bf16(weight);
    if (type == Type::F32) ((float*)out)[at + i] = weight;
    if (type == Type::F16) ((float*)out)[at + i] = wide_f16(f16(weight));
  }
}

// gate and up: element e of a row holds the codes of columns e + j · D/P.
template <int bits>
void decode_in(const Format& f, const uint16_t* record, int matrix, int64_t row, int64_t first,
               int64_t count, void* out) {
  constexpr int64_t planes = 16 / bits;
  const int64_t size = f.hidden / planes, end = first + count;
  const int64_t groups = (f.hidden + f.group_in - 1) / f.group_in;
  const uint16_t* codes = record + f.codes[matrix] * f.hidden + row * size;
  const uint16_t* scales = record + f.extra[matrix] * f.hidden + row * groups;
  for (int64_t at = first; at < end;) {
    const int64_t plane = at / size, group = at / f.group_in;
    const int64_t stop = least(least(end, (plane + 1) * size), (group + 1) * f.group_in);
    const float scale = wide_f16(scales[group]);
    const uint16_t* mine = codes - plane * size;
    if (f.type == Type::BF16) {
      for (; at + 2 * L <= stop; at += 2 * L) {
        pairs<bits>(mine + at, (int)plane, splat(scale), splat(scale), (uint16_t*)out + at - first);
      }
    }
    singles<bits>(f.type, mine + at, (int)plane, stop - at, &scale, 0, out, at - first);
    at = stop;
  }
}

// down^T: element (r, c) holds the codes of rows r + j · J of column c, J = ⌈I/P⌉.
template <int bits>
void decode_down(const Format& f, const uint16_t* record, int64_t row, int64_t first, int64_t count,
                 const float* scales, void* out) {
  constexpr int64_t planes = 16 / bits;
  const int64_t size = (f.width + planes - 1) / planes, plane = row / size;
  const uint16_t* codes = record + (f.codes[DOWN] + row - plane * size) * f.hidden + first;
  const float* scale = scales + row / f.group_out * padded(count);
  int64_t at = 0;
  if (f.type == Type::BF16) {
    for (; at + 2 * L <= count; at += 2 * L) {
      pairs<bits>(codes + at, (int)plane, load<vf>(scale + at), load<vf>(scale + at + L),
                  (uint16_t*)out + at);
    }
  }
  singles<bits>(f.type, codes + at, (int)plane, count - at, scale + at, 1, out, at);
}

void down_scales(const Format& f, const uint16_t* record, int64_t first, int64_t count,
                 float* out) {
  if (f.version == Version::Dense || f.version == Version::Lossless12) return;
  for (int64_t row = 0; row * f.group_out < f.width; row++) {
    float* mine = out + row * padded(count);
    widen(Type::F16, record + (f.extra[DOWN] + row) * f.hidden + first, count, mine);
    if (f.type != Type::BF16) continue;
    for (int64_t at = 0; at + 2 * L <= count; at += 2 * L) {
      float part[2 * L];
      memcpy(part, mine + at, sizeof part);
      for (int64_t i = 0; i < L; i++) mine[at + i] = part[2 * i], mine[at + L + i] = part[2 * i + 1];
    }
  }
}

typedef uint16_t vh __attribute__((vector_size(4 * MOEJAX_LANES)));

// n weights of a byte (sign and mantissa) and a code (base − exponent) each, both planes of elements.
INLINE void exact(const uint16_t* bytes, int byte_plane, const uint16_t* codes, int code_plane,
                  int64_t n, const uint16_t* table, int64_t escapes, uint16_t* out) {
  const uint16_t base = table[0];
  const int byte_shift = 8 * byte_plane, code_shift = 4 * code_plane;
  vh escaped = {};
  int64_t i = 0;
  for (; i + 2 * L <= n; i += 2 * L) {
    vh byte = load<vh>(bytes + i) >> byte_shift, code = (load<vh>(codes + i) >> code_shift) & 15;
    escaped |= (vh)(code == kEscape);
    store(out + i, ((byte & 0x80) << 8) | (byte & 0x7f) | ((base - code) << 7));
  }
  uint16_t any = 0, lanes[2 * L];
  store(lanes, escaped);
  for (uint16_t lane : lanes) any |= lane;
  for (int64_t j = any ? 0 : i; j < n; j++) {
    const uint32_t byte = (bytes[j] >> byte_shift) & 0xff, code = (codes[j] >> code_shift) & 15;
    const uint32_t value = ((byte & 0x80) << 8) | (byte & 0x7f) | ((base - code) << 7);
    out[j] = code == kEscape ? table[1 + least(byte, escapes - 1)] : (uint16_t)value;
  }
}

void decode_lossless(const Format& f, const uint16_t* record, int matrix, int64_t row,
                     int64_t first, int64_t count, uint16_t* out) {
  const uint16_t* bytes = record + f.codes[matrix] * f.hidden;
  const uint16_t* codes = record + f.extra[matrix] * f.hidden;
  const uint16_t* table = record + f.tables * f.hidden +
                          (matrix * f.blocks + row / kBlock) * (1 + f.escapes);
  // A part at a time: an escape has its part looked through again.
  if (matrix == DOWN) {
    const int64_t two = (f.width + 1) / 2, four = (f.width + 3) / 4;
    bytes += row % two * f.hidden + first;
    codes += row % four * f.hidden + first;
    for (int64_t at = 0; at < count; at += kPart) {
      exact(bytes + at, (int)(row / two), codes + at, (int)(row / four), least(kPart, count - at),
            table, f.escapes, out + at);
    }
    return;
  }
  const int64_t two = f.hidden / 2, four = f.hidden / 4, end = first + count;
  for (int64_t at = first; at < end;) {
    const int64_t stop = least(least(end, (at / four + 1) * four), at + kPart);
    exact(bytes + row * two + at % two, (int)(at / two), codes + row * four + at % four,
          (int)(at / four), stop - at, table, f.escapes, out + at - first);
    at = stop;
  }
}

template <int bits>
INLINE void decode_int(const Format& f, const uint16_t* record, int matrix, int64_t row,
                       int64_t first, int64_t count, const float* scales, void* out) {
  if (matrix == DOWN) return decode_down<bits>(f, record, row, first, count, scales, out);
  decode_in<bits>(f, record, matrix, row, first, count, out);
}

void decode(const Format& f, const uint16_t* record, int matrix, int64_t row, int64_t first,
            int64_t count, const float* scales, void* out) {
  switch (f.version) {
    case Version::Int8: return decode_int<8>(f, record, matrix, row, first, count, scales, out);
    case Version::Int4: return decode_int<4>(f, record, matrix, row, first, count, scales, out);
    case Version::Int2: return decode_int<2>(f, record, matrix, row, first, count, scales, out);
    case Version::Lossless12:
      return decode_lossless(f, record, matrix, row, first, count, (uint16_t*)out);
    case Version::Dense: break;
  }
  const int64_t size = size_of(f.type);
  const char* weights = (const char*)record + ((matrix * f.width + row) * f.hidden + first) * size;
  if (f.type == Type::F16) return widen(f.type, weights, count, (float*)out);
  memcpy(out, weights, count * size);
}

// ---- functions

// Cephes expf: 2^n · p(r), |r| ≤ ln 2 / 2; below −87.3 it is 0.
INLINE vf exponential(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to a whole number
  vi tiny = x < splat(-87.3f);
  x = x > splat(88.3f) ? splat(88.3f) : x;
  x = tiny ? splat(-87.3f) : x;
  vf shifted = x * 1.44269504f + magic;
  vf n = shifted - magic;
  vf r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  vu exponent = ((vu)shifted - (vu)magic + 127u) << 23;
  return tiny ? vf{} : p * as_float(exponent);
}

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

void activate(int activation, float* gate, const float* up, int64_t n) {
  switch (activation) {
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

void exponentials(float* x, float top, int64_t n) {
  each(x, nullptr, n, [top](vf v, vf) { return exponential(v - top); });
}

}  // namespace

extern const Kernels MOEJAX_JOIN(kernels_, MOEJAX_ISA);
const Kernels MOEJAX_JOIN(kernels_, MOEJAX_ISA) = {
    MOEJAX_TEXT(MOEJAX_ISA), pack, dots, add, unpack, decode, down_scales, widen, narrow, activate, exponentials,
};

}  // namespace moejax
