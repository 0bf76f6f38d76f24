// Vectors, and how the codes of a record (pallas_kernels/records/reference.py has the meaning)
// become weights: included by the sources that are compiled for an instruction set, with
// MOEJAX_LANES the floats of a vector. Vectors are the compiler's own (GCC and Clang). Everything
// here has internal linkage, as there.
#pragma once
#include <string.h>

#include "kernels.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

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
// Two numbers, one in each half of the lanes.
INLINE vf in_halves(const float* two) {
  vi lane;
  for (int i = 0; i < L; i++) lane[i] = i;
  return lane < (int)L / 2 ? splat(two[0]) : splat(two[1]);
}
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

// The product as it is, which a compiler may not make part of an fma: of a · b + c · d either product
// may be, and each number of tokens had its own bits.
template <class V>
INLINE V unfused(V product) {
#if defined(__x86_64__)
  if constexpr (sizeof(V) <= __BIGGEST_ALIGNMENT__) asm("" : "+x"(product));
  else asm("" : "+m"(product));  // wider than a register
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#else
  asm("" : "+m"(product));
#endif
  return product;
}

// exp(x) / 2^n for the whole number n nearest to x / ln 2 (Cephes expf).
INLINE vf exponential_over(vf x, vf n) {
  vf r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * (r * r) + (r + 1.0f);
}

// ---- what is known when a call begins, as constants of templates

template <class T, T constant>
struct Constant {
  static constexpr T value = constant;
};

// f(first) … f(last), of n; of a greater n: the last.
template <int first, int last, class F>
INLINE auto chosen(int64_t n, F f) {
  if constexpr (first < last) {
    if (n > first) return chosen<first + 1, last>(n, f);
  }
  return f(Constant<int, first>());
}

// f(kind, n) with 1 ≤ n ≤ last.
template <int last, class F>
INLINE void chosen(Type kind, int64_t n, F f) {
  chosen<1, last>(n, [&](auto count) {
    if (kind == Type::BF16) f(Constant<Type, Type::BF16>(), count);
    else f(Constant<Type, Type::F32>(), count);
  });
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

// Without denormals of float32, which XLA's threads take for zeros.
INLINE float wide_f16(uint16_t h) {
  uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13;
  float value = as_float(magnitude + (112u << 23));
  if (magnitude < 0x400u << 13) value = as_float(magnitude | (113u << 23)) - 0x1p-14f;
  if (magnitude >= 0x7c00u << 13) value = as_float(magnitude | 0x7f800000);
  return as_float(as_bits(value) | (uint32_t)(h & 0x8000) << 16);
}

struct Pair {
  vf first, second;
};

// ---- records (pallas_kernels/records/reference.py has the meaning)

constexpr int64_t kBlock = 32;    // rows that share a base exponent in lossless12
constexpr uint32_t kEscape = 15;  // the code of a weight that the table has
constexpr int64_t kPart = 128;    // weights decoded at once outside of whole vectors

constexpr int bits_of(Codes kind) {
  if (kind == Codes::Int8 || kind == Codes::E4M3 || kind == Codes::Zero8) return 8;
  return kind == Codes::Int2 ? 2 : 4;
}

// Bits of a code above those of bits_of, which lie apart.
constexpr int highs_of(Codes kind) {
  return kind == Codes::Int6 ? 2 : kind == Codes::Int5 || kind == Codes::Min5 ? 1 : 0;
}

// The code that means 0, of integers.
constexpr float zero_of(Codes kind) {
  if (kind == Codes::Int8) return 128;
  if (kind == Codes::Int5 || kind == Codes::Int6) return kind == Codes::Int5 ? 16 : 32;
  return kind == Codes::Int4 ? 8 : kind == Codes::Int2 ? 1.5f : 0;
}

// Integers whose code times scale may be exact and short (short_weights).
constexpr bool is_plain(Codes kind) {
  return kind == Codes::Int8 || kind == Codes::Int4 || kind == Codes::Int2;
}
constexpr bool is_int(Codes kind) {
  return kind != Codes::E4M3 && kind != Codes::E2M1 && kind != Codes::IQ4;
}

// What a group has beside its scale.
enum class Shift { None, Zero, Minimum };
constexpr Shift shift_of(Codes kind) {
  if (kind == Codes::Zero8 || kind == Codes::Zero4) return Shift::Zero;
  return kind == Codes::Min4 || kind == Codes::Min5 ? Shift::Minimum : Shift::None;
}

// Of IQ4's codes.
constexpr int kLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// What a code means before its scale.
constexpr float value_of(Codes kind, int code) {
  if (is_int(kind)) return (float)code - zero_of(kind);
  if (kind == Codes::IQ4) return (float)kLevels[code];
  const int fractions = kind == Codes::E4M3 ? 3 : 1, all = bits_of(kind) - 1;
  const int exponent = (code & ((1 << all) - 1)) >> fractions;
  float value = (float)((code & ((1 << fractions) - 1)) + (exponent ? 1 << fractions : 0));
  for (int i = 1; i < exponent; i++) value *= 2;
  value *= kind == Codes::E4M3 ? 0x1p-9f : 0.5f;
  return code >> all ? -value : value;
}

// How many codes there are.
constexpr int codes_in(Codes kind) { return 1 << (bits_of(kind) + highs_of(kind)); }

template <Codes kind>
struct Values {
  float of[codes_in(kind)];
  constexpr Values() : of() {
    for (int i = 0; i < codes_in(kind); i++) of[i] = value_of(kind, i);
  }
};
template <Codes kind>
constexpr Values<kind> kValues;

// The values of codes first, first + step … in the lanes of a vector, from the beginning again behind
// the last one.
template <Codes kind, int first, int step>
struct Lanes {
  alignas(64) float of[MOEJAX_LANES];
  constexpr Lanes() : of() {
    for (int i = 0; i < MOEJAX_LANES; i++) of[i] = value_of(kind, (first + i * step) % codes_in(kind));
  }
};
template <Codes kind, int first, int step>
constexpr Lanes<kind, first, step> kLanes;

// Whether weights are exact in float32 and have at most 8 + 11 bits.
INLINE bool short_weights(const Coding& c) {
  return c.scale == ScaleType::F16 && c.product != Rounding::F16;
}

// Whether every matrix has one kind, and rows of gate and up are whole parts, each of one plane and
// one scale.
INLINE bool multiplied_in_parts(const Format& f) {
  const Codes kind = f.matrix[GATE].kind;
  if (f.type != Type::BF16 || f.hidden % (4 * kPart)) return false;
  for (const Coding& c : f.matrix) {
    const bool ints = is_plain(kind) && kind != Codes::Int2;
    const bool known = ints && short_weights(c) && c.across == 1;
    if (c.kind != kind || !(known || kind == Codes::Lossless12)) return false;
  }
  return kind == Codes::Lossless12 ||
         (f.matrix[GATE].group == kPart && f.matrix[UP].group == kPart);
}

// Rounded to bfloat16's 8 bits, to nearest even, in two operations: v - 2^16 v has 24 bits, which end where v's
// first 8 do, so it rounds v there, and adding 2^16 v leaves that. Products are exact, fused or not. For numbers
// below 2^111 that are no denormals.
INLINE vf rounded(vf v) { return v * 0x1p16f + (v - v * 0x1p16f); }

// What makes codes weights: a factor, and what their zero is then, negative.
struct Scale {
  vf factor, zero;
};

INLINE float scale_f16(uint16_t h) {
#ifdef __F16C__
  return _cvtsh_ss(h);
#else
  return wide_f16(h);
#endif
}

template <Codes kind>
INLINE Scale scale_of(float scale) {
  return {splat(scale), splat(scale * -zero_of(kind))};
}

// A weight is exact before it is rounded: 8 bits of code and 11 of scale.
INLINE vf weights_of(vf codes, vf factor, vf zero) { return rounded(codes * factor + zero); }

// Codes of some bits from `bit` of each lane on.
template <int bits, int bit>
INLINE vf codes_of(vu lanes) {
  const vu codes = bit + bits == 32 ? lanes >> bit : (lanes >> bit) & ((1u << bits) - 1);
  return __builtin_convertvector((vi)codes, vf);
}

// Values before their scale, scaled, with a zero or a minimum where a kind has one. A zero's distance
// is exact; so is a product to which a minimum is added, so that it is rounded once, fused or not.
template <Codes kind>
INLINE vf scaled_of(vf values, vf scale, vf shift) {
  if constexpr (shift_of(kind) == Shift::Zero) return (values - shift) * scale;
  if constexpr (shift_of(kind) == Shift::Minimum) return values * scale + shift;
  return values * scale;
}

// Rounded to float16, and still float32.
INLINE vf through_f16(vf v) {
#if defined(__AVX512F__) && MOEJAX_LANES == 16
  return (vf)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__) && MOEJAX_LANES == 8
  return (vf)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int64_t i = 0; i < L; i++) v[i] = wide_f16(f16(v[i]));
  return v;
#endif
}

// bfloat16 in the upper half of each lane of finite numbers, zeros below it.
INLINE vu upper_bf16(vf v) {
  const vu u = (vu)v;
  return (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
}

// The values of some bits from `bit` of each lane on, before their scale. A float of few bits is put
// where float32 has exponent and fraction; of those without an exponent, whose fraction then counts
// half too little, twice the number less the power of two is right, and less than the number.
// highs: the upper bits of each lane's code, above its others.
template <Codes kind, int bit>
INLINE vf values_of(vu lanes, vu highs) {
  constexpr int bits = bits_of(kind);
  if constexpr (highs_of(kind) > 0) {
    const vu low = (lanes >> bit) & ((1u << bits) - 1);
    return __builtin_convertvector((vi)(low | highs), vf) - zero_of(kind);
  }
  if constexpr (is_int(kind)) return codes_of<bits, bit>(lanes) - zero_of(kind);
  if constexpr (kind == Codes::IQ4) {
    vf levels;
    for (int i = 0; i < L; i++) levels[i] = kValues<kind>.of[(lanes[i] >> bit) & 15];
    return levels;
  }
  constexpr int fractions = kind == Codes::E4M3 ? 3 : 1, least_exponent = kind == Codes::E4M3 ? -7 : -1;
  constexpr int shift = 23 - fractions - bit;
  constexpr uint32_t mask = ((1u << (bits - 1)) - 1) << (23 - fractions);
  const vu placed = shift >= 0 ? lanes << (shift >= 0 ? shift : 0) : lanes >> (shift < 0 ? -shift : 0);
  const vu sign = (lanes << (32 - bits - bit)) & 0x80000000u;
  const vf number = as_float((placed & mask) + ((127u + least_exponent) << 23));
  const vf twice = number * 2.0f - as_float((128u + least_exponent) << 23);
  return as_float((vu)(twice < number ? twice : number) | sign);
}

typedef uint16_t vh __attribute__((vector_size(4 * MOEJAX_LANES)));
INLINE vh splat16(uint16_t x) { return x - vh{}; }

// Rows that `decode` asks for ahead, as it goes: evenly, since memory answers at one rate. Each
// element is passed once for each of its planes, and asked for at one of them.
constexpr int64_t kSoonIn = 8, kSoonDown = 2;

// Asks for p's line, towards the second cache or the first one; what lies behind a record is not read.
INLINE void soon(const void* p, bool near = false) {
  if (near) __builtin_prefetch(p, 0, 3);
  else __builtin_prefetch(p, 0, 2);
}

#if defined(__AVX512BW__) && MOEJAX_LANES == 16
// Codes of a plane at the lowest bits of elements, with their upper bits of another plane; what is
// above them is of other codes.
template <Codes kind>
struct Index {
  static constexpr int bits = bits_of(kind);
  __m512i shift, high_shift;
  INLINE explicit Index(int64_t plane, int64_t high_plane)
      : shift(_mm512_set1_epi16((short)(bits * plane))),
        high_shift(_mm512_set1_epi16((short)(highs_of(kind) * high_plane))) {}
  INLINE __m512i get(__m512i codes, __m512i highs) const {
    const __m512i low = _mm512_srlv_epi16(codes, shift);
    if constexpr (highs_of(kind) == 0) return low;
    const __m512i high = _mm512_slli_epi16(_mm512_srlv_epi16(highs, high_shift), bits);
    const __m512i lowest = _mm512_set1_epi16((1 << bits) - 1);
    return _mm512_ternarylogic_epi64(lowest, low, high, 0xca);  // of low where lowest has ones
  }
};

// 2·L weights of a plane that share a scale, in their order.
template <Codes kind>
struct Plane {
  // The weights that the scale gives are a table of VPERMW: it looks at five bits of an index, so the
  // weights of fewer bits are there several times and nothing above a code has to be cut off.
  const Index<kind> index;
  __m512i table;
  INLINE explicit Plane(int64_t plane, int64_t high_plane) : index(plane, high_plane) {}
  // shift: of the group's zero or minimum. half: products are rounded to float16 at first.
  INLINE void set(vf scale, vf shift, bool half) {
    const auto weights = [=](const float* values) {
      const vf all = scaled_of<kind>(load<vf>(values), scale, shift);
      return half ? through_f16(all) : all;
    };
#ifdef __AVX512BF16__
    const vf low = weights(kLanes<kind, 0, 1>.of);
    const vf high = codes_in(kind) > L ? weights(kLanes<kind, L, 1>.of) : low;
    table = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
    const vf even = weights(kLanes<kind, 0, 2>.of), odd = weights(kLanes<kind, 1, 2>.of);
    table = (__m512i)((upper_bf16(even) >> 16) | upper_bf16(odd));
#endif
  }
  INLINE __m512i get(__m512i codes, __m512i highs) const {
    return _mm512_permutexvar_epi16(index.get(codes, highs), table);
  }
};

#ifdef __AVX512BF16__
// Codes of a plane as numbers, without a conversion: they are the last bits of the fraction of a power
// of two, which is taken away again, and their zero with it. Fewer than 8 bits stay where they lie in
// an element; whole bytes are brought there by VPERMB.
template <Codes kind>
struct Numbers {
  static constexpr int bits = bits_of(kind);
  vu mask, power;
  __m512i first, second;  // of VPERMB
  vf zero;
  INLINE explicit Numbers(int64_t plane, int64_t) {
    const uint32_t bit = bits == 8 ? 8 : (uint32_t)(bits * plane), exponent = (127 + 23 - bit) << 23;
    mask = (((1u << bits) - 1) << bit) - vu{}, power = exponent - vu{};
    zero = splat(as_float(exponent) + (float)(int)zero_of(kind));
    vu lanes;
    for (int i = 0; i < L; i++) lanes[i] = (uint32_t)(2 * i) << 8;
    lanes = lanes + ((uint32_t)plane << 8);
    first = (__m512i)lanes, second = (__m512i)(lanes + 0x2000u);
  }
  INLINE Pair get(__m512i codes) const {
    if constexpr (bits == 8) {
      const __m512i into = (__m512i)power;
      return {(vf)_mm512_mask_permutexvar_epi8(into, 0x2222222222222222, first, codes),
              (vf)_mm512_mask_permutexvar_epi8(into, 0x2222222222222222, second, codes)};
    }
    const vu a = (vu)_mm512_cvtepu16_epi32(_mm512_castsi512_si256(codes));
    const vu b = (vu)_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(codes, 1));
    return {as_float((a & mask) | power), as_float((b & mask) | power)};
  }
  // Before their scale, and `less` times less.
  static constexpr float less = 1;
  INLINE Pair values(__m512i codes, __m512i) const {
    Pair pair = get(codes);
    pair = {pair.first - zero, pair.second - zero};
    if (bits == 2) pair = {pair.first - 0.5f, pair.second - 0.5f};
    return pair;
  }
};

// 16-bit integers as float32.
INLINE Pair as_floats(__m512i integers) {
  const __m512i first = _mm512_cvtepi16_epi32(_mm512_castsi512_si256(integers));
  const __m512i second = _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(integers, 1));
  return {(vf)_mm512_cvtepi32_ps(first), (vf)_mm512_cvtepi32_ps(second)};
}

// Codes in two parts.
template <Codes kind>
struct Split {
  static constexpr float less = 1;
  const Index<kind> index;
  INLINE explicit Split(int64_t plane, int64_t high_plane) : index(plane, high_plane) {}
  INLINE Pair values(__m512i codes, __m512i highs) const {
    const __m512i cut = _mm512_set1_epi16(codes_in(kind) - 1), zero = _mm512_set1_epi16((short)zero_of(kind));
    return as_floats(_mm512_sub_epi16(_mm512_and_si512(index.get(codes, highs), cut), zero));
  }
};
template <>
struct Numbers<Codes::Int5> : Split<Codes::Int5> { using Split::Split; };
template <>
struct Numbers<Codes::Min5> : Split<Codes::Min5> { using Split::Split; };
template <>
struct Numbers<Codes::Int6> : Split<Codes::Int6> { using Split::Split; };

// float16 has e4m3's exponent and fraction as its own last bits, and another power of two.
template <>
struct Numbers<Codes::E4M3> {
  static constexpr float less = 0x1p8f;
  __m128i shift;
  INLINE explicit Numbers(int64_t plane, int64_t) : shift(_mm_cvtsi32_si128(plane ? 0 : 8)) {}
  INLINE Pair values(__m512i codes, __m512i) const {
    const __m512i cut = _mm512_set1_epi16((short)0xbf80);
    const __m512i half = _mm512_and_si512(_mm512_srai_epi16(_mm512_sll_epi16(codes, shift), 1), cut);
    return {(vf)_mm512_cvtph_ps(_mm512_castsi512_si256(half)),
            (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1))};
  }
};

// Values from a table of bfloat16, which is exact.
template <Codes kind>
struct Looked {
  static constexpr float less = 1;
  Plane<kind> plane;
  INLINE explicit Looked(int64_t number, int64_t) : plane(number, 0) { plane.set(splat(1), vf{}, false); }
  INLINE Pair values(__m512i codes, __m512i highs) const {
    const __m512i both = plane.get(codes, highs);
    return {(vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(both)), 16),
            (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1)), 16)};
  }
};

template <>
struct Numbers<Codes::E2M1> : Looked<Codes::E2M1> { using Looked::Looked; };
template <>
struct Numbers<Codes::IQ4> : Looked<Codes::IQ4> { using Looked::Looked; };

INLINE __m512i narrowed(vf first, vf second) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

// Weights by arithmetic: of more codes than a table has.
template <Codes kind>
struct Computed {
  const Numbers<kind> numbers;
  vf scale, shift;
  bool half;
  INLINE explicit Computed(int64_t plane, int64_t high_plane) : numbers(plane, high_plane) {}
  INLINE void set(vf same, vf and_shift, bool through) {
    scale = same * Numbers<kind>::less, shift = and_shift, half = through;
  }
  INLINE __m512i get(__m512i codes, __m512i highs) const {
    Pair pair = numbers.values(codes, highs);
    pair = {scaled_of<kind>(pair.first, scale, shift), scaled_of<kind>(pair.second, scale, shift)};
    if (half) pair = {through_f16(pair.first), through_f16(pair.second)};
    return narrowed(pair.first, pair.second);
  }
};
template <>
struct Plane<Codes::E4M3> : Computed<Codes::E4M3> { using Computed::Computed; };
template <>
struct Plane<Codes::Zero8> : Computed<Codes::Zero8> { using Computed::Computed; };
template <>
struct Plane<Codes::Int6> : Computed<Codes::Int6> { using Computed::Computed; };

template <>
struct Plane<Codes::Int8> {
  const Numbers<Codes::Int8> numbers;
  vf scale, zero;
  INLINE explicit Plane(int64_t plane, int64_t) : numbers(plane, 0) {}
  INLINE void set(vf same, vf, bool) { scale = same, zero = numbers.zero * same; }  // exact: 9 bits and 11
  INLINE __m512i get(__m512i codes, __m512i) const {
    const Pair pair = numbers.get(codes);
    return narrowed((vf)_mm512_fmsub_ps((__m512)pair.first, (__m512)scale, (__m512)zero),
                    (vf)_mm512_fmsub_ps((__m512)pair.second, (__m512)scale, (__m512)zero));
  }
};

constexpr int kWidest = 8;
#else
constexpr int kWidest = 4;  // bits of codes that have a Plane
#endif

#endif

#if defined(__AVX512BW__) && MOEJAX_LANES == 16
// The first n of 2·L elements, no others being read or written.
INLINE __mmask32 first_of(int64_t n) { return n >= 2 * L ? ~0u : (1u << n) - 1; }
INLINE __m512i load_first(const uint16_t* p, int64_t n) {
  return _mm512_maskz_loadu_epi16(first_of(n), p);
}
INLINE void store_first(uint16_t* p, int64_t n, __m512i v) {
  _mm512_mask_storeu_epi16(p, first_of(n), v);
}
#endif

// Whether one of 2·L lanes has a value.
INLINE bool any(vh v, uint16_t value) {
  const vh same = (vh)(v == value);
#if defined(__AVX512BW__) && MOEJAX_LANES == 16
  return _mm512_cmpeq_epi16_mask((__m512i)v, _mm512_set1_epi16((short)value));
#elif defined(__AVX2__) && MOEJAX_LANES == 8
  return !_mm256_testz_si256((__m256i)same, (__m256i)same);
#endif
  uint64_t lanes[L / 2], all = 0;
  store(lanes, same);
  for (uint64_t lane : lanes) all |= lane;
  return all;
}

// Calls f with each of the 2·L lanes that have a value.
template <class F>
INLINE void each_lane(vh v, uint16_t value, F f) {
#if defined(__AVX512BW__) && MOEJAX_LANES == 16
  uint32_t left = _mm512_cmpeq_epi16_mask((__m512i)v, _mm512_set1_epi16((short)value));
  for (; left; left &= left - 1) f(__builtin_ctz(left));
#elif defined(__AVX2__) && MOEJAX_LANES == 8
  const uint32_t bytes = (uint32_t)_mm256_movemask_epi8((__m256i)(v == value));
  for (uint32_t left = bytes & 0x55555555u; left; left &= left - 1) f(__builtin_ctz(left) / 2);
#else
  uint16_t lanes[2 * L];
  store(lanes, v);
  for (int64_t i = 0; i < 2 * L; i++) {
    if (lanes[i] == value) f(i);
  }
#endif
}

// Where code 15 lies when codes are brought to the lowest bits of the exponent.
constexpr uint16_t kEscaped = kEscape << 7;

// 2·L weights of a byte (sign and mantissa) and a code (base − exponent) each, both planes of
// elements; base: in place. `most` gathers the codes in place, so that escapes are seen later.
template <int byte_plane, int code_plane>
INLINE vh exact_of(vh bytes, vh codes, vh base, vh& most) {
#if defined(__AVX512BW__) && MOEJAX_LANES == 16
  constexpr uint64_t one = byte_plane * 0x0101010101010101u, at = 0x0606040402020000u + one;
  const vh twice = (vh)_mm512_shuffle_epi8(
      (__m512i)bytes, _mm512_broadcast_i32x4(_mm_set_epi64x(at + 0x0808080808080808, at)));
  const vh fraction = twice & (uint16_t)0x807f;
#elif defined(__AVX2__) && MOEJAX_LANES == 8
  constexpr char p = byte_plane;
  const vh twice = (vh)_mm256_shuffle_epi8(
      (__m256i)bytes,
      _mm256_setr_epi8(p, p, 2 + p, 2 + p, 4 + p, 4 + p, 6 + p, 6 + p, 8 + p, 8 + p, 10 + p, 10 + p,
                       12 + p, 12 + p, 14 + p, 14 + p, p, p, 2 + p, 2 + p, 4 + p, 4 + p, 6 + p,
                       6 + p, 8 + p, 8 + p, 10 + p, 10 + p, 12 + p, 12 + p, 14 + p, 14 + p));
  const vh fraction = twice & (uint16_t)0x807f;
#else
  const vh fraction = byte_plane ? (bytes & (uint16_t)0x8000) | ((bytes >> 8) & (uint16_t)0x7f)
                                 : ((bytes << 8) & (uint16_t)0x8000) | (bytes & (uint16_t)0x7f);
#endif
  constexpr int shift = 7 - 4 * code_plane;
  const vh code = (shift > 0 ? codes << (shift > 0 ? shift : 0) : codes >> (shift > 0 ? 0 : -shift)) &
                  kEscaped;
  most = code > most ? code : most;
  return fraction | (base - code);
}

// n such weights.
template <int byte_plane, int code_plane>
INLINE void exact_plane(const uint16_t* bytes, const uint16_t* codes, int64_t n,
                        const uint16_t* table, int64_t escapes, uint16_t* out,
                        const uint16_t* next_bytes, const uint16_t* next_codes) {
  const uint16_t base = table[0];
  const auto listed = [=](int64_t j) {
    return table[1 + least((bytes[j] >> (8 * byte_plane)) & 0xff, escapes - 1)];
  };
  int64_t i = 0;
  for (; i + 2 * L <= n; i += 2 * L) {
    vh most = {};
    soon(next_bytes + i / 2), soon(next_codes + i / 4);
    store(out + i, exact_of<byte_plane, code_plane>(load<vh>(bytes + i), load<vh>(codes + i),
                                                    splat16((uint16_t)(base << 7)), most));
    if (__builtin_expect(!any(most, kEscaped), 1)) continue;
    each_lane(most, kEscaped, [=](int64_t j) { out[i + j] = listed(i + j); });
  }
  for (; i < n; i++) {
    const uint32_t byte = (bytes[i] >> (8 * byte_plane)) & 0xff;
    const uint32_t code = (codes[i] >> (4 * code_plane)) & 15;
    const uint32_t value = ((byte & 0x80) << 8) | (byte & 0x7f) | ((base - code) << 7);
    out[i] = code == kEscape ? listed(i) : (uint16_t)value;
  }
}

}  // namespace
}  // namespace moejax
