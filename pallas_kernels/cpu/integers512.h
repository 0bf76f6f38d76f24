// Products of integers with AVX-512 and VNNI, where VPDPBUSD adds four products of bytes to 32 bits:
// included by integers.h, whose functions of the same names do the same for AVX2. Without VNNI, only a few
// tokens' rows of codes with upper bits are multiplied here.
#pragma once
#ifdef __AMX_INT8__
#include "tiles_amx.h"
#endif

namespace moejax {
namespace {

typedef __m512i v64;

// What is known of codes when this is compiled.
template <int bits_, bool listed_, bool highs_>
struct WideKind {
  static constexpr int bits = bits_, planes = 16 / bits_, fields = 8 / bits_;
  static constexpr int depth = 4;
  static constexpr bool listed = listed_, highs = highs_, wide = true;
};

// f(WideKind) of the ways there are.
template <class F>
INLINE void with_wide_kind(const Integers& as, F f) {
  if (as.bits == 8) return f(WideKind<8, false, false>());
  if (as.bits == 2) return f(WideKind<2, true, false>());
  if (as.list) return f(WideKind<4, true, false>());
  if (as.highs) return f(WideKind<4, false, true>());
  f(WideKind<4, false, false>());
}

struct Raised {
  uint8_t of[16];
  constexpr Raised() : of() {
    for (int i = 0; i < 16; i++) of[i] = (uint8_t)(kLevels[i] + 128);
  }
};
constexpr Raised kRaised;

// Signed bytes, which IQ4 has, as bytes without a sign: 128 more, as their zero is.
INLINE Integers without_signs(Integers as) {
  if (as.negative) as.list = kRaised.of, as.negative = false, as.zero = 128;
  return as;
}

// How bytes become codes: a table of 16, and how far up the upper bits lie.
struct Reader {
  v64 table, mask;
  __m128i down;
  INLINE Reader(const Integers& as, int64_t multiple) : table{}, mask(_mm512_set1_epi8((char)(((1 << as.highs) - 1) * 0x11))) {
    if (as.list) table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)as.list));
    set(as, multiple);
  }
  INLINE void set(const Integers& as, int64_t multiple) { down = _mm_cvtsi32_si128(as.highs * (int)multiple); }
  INLINE v64 lowered(v64 highs) const { return _mm512_srl_epi16(highs, down); }
  // highs: lowered.
  template <class K>
  INLINE void fields(v64 bytes, v64 highs, v64* out) const {
    if constexpr (K::bits == 8) {
      out[0] = bytes;
      return;
    }
    const v64 low = _mm512_set1_epi8((1 << K::bits) - 1);
    if constexpr (K::highs) {  // four bits apart those of both fields
      const v64 both = _mm512_and_si512(highs, mask);
      out[0] = _mm512_ternarylogic_epi64(low, bytes, _mm512_slli_epi16(both, 4), 0xca);  // a ? b : c
      out[1] = _mm512_ternarylogic_epi64(low, _mm512_srli_epi16(bytes, 4), both, 0xca);
      return;
    }
#pragma GCC unroll 4
    for (int f = 0; f < K::fields; f++) {
      out[f] = _mm512_and_si512(f ? _mm512_srli_epi16(bytes, K::bits * f) : bytes, low);
      if (K::listed) out[f] = _mm512_shuffle_epi8(table, out[f]);
    }
  }
};

// Of each eight elements the lower bytes, then the upper ones.
INLINE v64 lower_then_upper(v64 elements) {
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  return _mm512_shuffle_epi8(elements, _mm512_broadcast_i32x4(order));
}

// ---- a few tokens: units' sums of a row

// Of lanes of 128 bits: the even lanes of both vectors, or the odd ones.
INLINE v64 every_other(v64 a, v64 b, bool odd) {
  return (v64)(odd ? _mm512_shuffle_ps((__m512)a, (__m512)b, 0xdd) : _mm512_shuffle_ps((__m512)a, (__m512)b, 0x88));
}

// Elements that are multiplied a quarter of each 16 at a time, so that no sum of 16 crosses lanes of 32 bits.
constexpr int64_t kQuartered = 128;

// Vectors of quarters have one of each group of 16 in a lane of 32 bits: in order, those of the lower bytes and then
// those of the upper ones; without VBMI, as lower_then_upper and every_other leave them.
#ifdef __AVX512VBMI__
INLINE v64 in_order(v64 quarters) { return quarters; }
INLINE v64 as_quarters(v64 ordered) { return ordered; }
#else
INLINE v64 in_order(v64 quarters) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 2, 6, 8, 12, 10, 14, 1, 5, 3, 7, 9, 13, 11, 15), quarters);
}
INLINE v64 as_quarters(v64 ordered) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 8, 2, 10, 1, 9, 3, 11, 4, 12, 6, 14, 5, 13, 7, 15), ordered);
}
#endif

// kQuartered elements, or the first 32 · count and zeros: vector i has the quarters i, as as_quarters orders them.
INLINE void quarters_of(const uint16_t* elements, int64_t count, v64 (&out)[4]) {
  v64 v[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) v[i] = i < count ? _mm512_loadu_si512(elements + 32 * i) : v64{};
#ifdef __AVX512VBMI__
  struct Order {
    uint8_t of[2][64];
    constexpr Order() : of() {
      for (int i = 0; i < 128; i++) {
        const int half = i / 64, upper = i / 32 % 2, quarter = 2 * half + i / 8 % 2, element = i / 4 % 2 * 16 + quarter * 4 + i % 4;
        of[half][i % 64] = (uint8_t)(i / 16 % 2 * 64 + 2 * element + upper);
      }
    }
  };
  static constexpr Order kOrder;
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const v64 order = _mm512_loadu_si512(kOrder.of[i]);
    const v64 a = _mm512_permutex2var_epi8(v[0], order, v[2]), b = _mm512_permutex2var_epi8(v[1], order, v[3]);
    out[2 * i] = _mm512_unpacklo_epi64(a, b), out[2 * i + 1] = _mm512_unpackhi_epi64(a, b);
  }
#else
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) v[i] = lower_then_upper(v[i]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const v64 a = every_other(v[0], v[1], i), b = every_other(v[2], v[3], i);
    out[i] = _mm512_shuffle_i32x4(a, b, 0x88), out[2 + i] = _mm512_shuffle_i32x4(a, b, 0xdd);
  }
#endif
}

// Four products of bytes onto the sums in each lane of 32 bits; without VNNI, of bytes whose products fit into words.
INLINE v64 add_bytes(v64 sums, v64 codes, v64 by) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(sums, codes, by);
#else
  return _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_maddubs_epi16(codes, by), _mm512_set1_epi16(1)));
#endif
}

// The same of quarters i. Without VNNI, `open` has sums of words, as long as these fit.
template <class K>
INLINE void add_quarter(int i, v64 codes, v64 by, v64& sums, [[maybe_unused]] v64& open) {
#ifdef __AVX512VNNI__
  sums = add_bytes(sums, codes, by);
#else
  constexpr int most = K::sums;
  const v64 products = _mm512_maddubs_epi16(codes, by);
  open = i % most ? _mm512_add_epi16(open, products) : products;
  if (i % most == most - 1 || i == 3) sums = _mm512_add_epi32(sums, _mm512_madd_epi16(open, _mm512_set1_epi16(1)));
#endif
}

// Bytes of n numbers in that order: of each kQuartered elements, and what is taken away from their sums.
template <class K>
constexpr int64_t kQuarters = (256 + 64) * K::fields;
template <class K>
INLINE int64_t room_of_quarters(int64_t n) {
  constexpr int64_t most = kQuartered * K::planes;
  return (n + most - 1) / most * kQuarters<K>;
}

// Numbers in that order, of each quarter a vector of each field; then, of each field, their sums times −zero. 128 bytes
// behind q may be read; they are multiplied by zeros.
template <class K>
void order_quarters(const Integers& as, const int8_t* q, int64_t n, int8_t* out) {
  constexpr int F = K::fields;
  const v64 first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const v64 order[] = {first, _mm512_add_epi32(first, _mm512_set1_epi32(2))}, zero = _mm512_set1_epi8((char)(int)as.zero);
  const int64_t size = n / K::planes;
  for (int64_t at = 0; at < size; at += kQuartered, out += kQuarters<K>) {
    v64 zeros[F] = {};
    for (int i = 0; i < 4; i++) {
      for (int f = 0; f < F; f++) {
        v64 planes[2];
        for (int p = 0; p < 2; p++) {
          const int8_t* mine = q + (f + p * F) * size + at;
          planes[p] = _mm512_permutex2var_epi32(_mm512_loadu_si512(mine), order[i / 2], _mm512_loadu_si512(mine + 64));
        }
        const v64 even = _mm512_shuffle_i32x4(planes[0], planes[1], 0x44), odd = _mm512_shuffle_i32x4(planes[0], planes[1], 0xee);
        const v64 mine = as_quarters(i % 2 ? odd : even);
        _mm512_storeu_si512(out + 64 * (F * i + f), mine);
        zeros[f] = add_bytes(zeros[f], zero, mine);
      }
    }
    for (int f = 0; f < F; f++) _mm512_storeu_si512(out + 64 * (4 * F + f), _mm512_sub_epi32(v64{}, zeros[f]));
  }
}

// To out[t · room + unit], of units of 32 or 16 elements of each plane, for T tokens, zeros taken away. numbers: as
// order_quarters has them. A row's upper bits are a multiple of kQuartered elements.
template <class K, int unit, int T>
void wide_row_sums(const Integers& as, const IntegerRow& row, const int8_t* const* numbers, int64_t room, int32_t* out) {
  constexpr int F = K::fields;
  const int64_t size = row.n / K::planes, units = size / unit, high_size = K::highs ? row.high_size : size;
  const Reader reader(as, 1);  // upper bits are lowered once for each further multiple
  for (int64_t high_at = 0; high_at < high_size; high_at += kQuartered) {
    v64 highs[4] = {};
    if (K::highs) quarters_of(row.highs + high_at, 4, highs);
    for (int64_t at = high_at; at < size; at += high_size) {
      const int64_t count = K::highs ? 4 : least(4, (size - at) / 32), ordered = at / kQuartered * kQuarters<K>;
      v64 bytes[4], sums[T][F], open[T][F];
      quarters_of(row.codes + at, count, bytes);
#pragma GCC unroll 3
      for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
        for (int f = 0; f < F; f++) sums[t][f] = _mm512_loadu_si512(numbers[t] + ordered + 64 * (4 * F + f));
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        v64 codes[F];
        soon(row.next + at + 32 * i), soon(row.codes + at + kNearElements + 32 * i, true);
        if (K::highs && at == high_at) soon(row.next_highs + at + 32 * i);
        else if (K::highs) highs[i] = reader.lowered(highs[i]);
        reader.fields<K>(bytes[i], highs[i], codes);
#pragma GCC unroll 3
        for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
          for (int f = 0; f < F; f++) {
            const v64 by = _mm512_loadu_si512(numbers[t] + ordered + 64 * (F * i + f));
            add_quarter<K>(i, codes[f], by, sums[t][f], open[t][f]);
          }
        }
      }
#pragma GCC unroll 3
      for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
        for (int f = 0; f < F; f++) {
          int32_t *mine = out + t * room + f * units + at / unit, *other = mine + F * units;
          const v64 all = in_order(sums[t][f]);
          if (unit == 16) {
            const __mmask8 some = (__mmask8)((1 << 2 * count) - 1);
            _mm256_mask_storeu_epi32(mine, some, _mm512_castsi512_si256(all));
            _mm256_mask_storeu_epi32(other, some, _mm512_extracti64x4_epi64(all, 1));
          } else {  // neighbours are of one unit
            const __mmask8 some = (__mmask8)((1 << count) - 1);
            const v32 both = _mm512_cvtepi64_epi32(_mm512_add_epi32(all, _mm512_srli_epi64(all, 32)));
            _mm_mask_storeu_epi32(mine, some, _mm256_castsi256_si128(both));
            _mm_mask_storeu_epi32(other, some, _mm256_extracti128_si256(both, 1));
          }
        }
      }
    }
  }
}

#ifdef __AVX512VNNI__
// ---- up to kSideBySide tokens and codes of 2 to 6 bits: kOutputs rows of gate or up side by side in lanes, so
// that no sum crosses them

// Numbers in the order in which rows side by side are multiplied: for each 32 elements and field, of each
// eight the lower bytes' numbers, then the upper ones'.
template <class K>
void order_widely(const int8_t* q, int64_t n, int8_t* out) {
  const int64_t size = n / K::planes;
  for (int64_t at = 0; at < size; at += 32) {
    for (int f = 0; f < K::fields; f++, out += 64) {
      const v64 lower = _mm512_castsi256_si512(load<v32>(q + f * size + at));
      const v64 upper = _mm512_castsi256_si512(load<v32>(q + (f + K::fields) * size + at));
      _mm512_storeu_si512(out, _mm512_permutex2var_epi64(lower, _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), upper));
    }
  }
}

// Sums of neighbours: lanes of 128 bits of two vectors have two lanes of a plane and two of another
// one; then one of each, of the first vector and of the second.
INLINE v64 add_pairs(v64 a, v64 b) {
  return _mm512_add_epi32(every_other(a, b, false), every_other(a, b, true));
}

// kOutputs rows of n elements. x86 has most of their places in an address; a list of them takes 4% of the time.
struct Rows {
  const uint16_t* first;
  int64_t odd[4];  // 1, 3, 5, 7 rows
  INLINE Rows(const uint16_t* first, int64_t n) : first(first), odd{n, 3 * n, 5 * n, 7 * n} {
    asm("" : "+r"(odd[1]), "+r"(odd[2]), "+r"(odd[3]));  // else they are computed anew
  }
  INLINE const uint16_t* row(int r, int64_t at) const {
    const int twos = __builtin_ctz(r % 8 | 8);
    return first + at + r / 8 * 8 * odd[0] + (r % 8 ? odd[(r % 8 >> twos) / 2] << twos : 0);
  }
};

// 32 elements of each fourth row from r on, from `at` on: vector i has in its lanes of 128 bits eight of each row, as
// lower_then_upper has them.
INLINE void fourths_of(const Rows& rows, int r, int64_t at, v64 (&out)[4]) {
  struct Order {
    uint8_t of[2][64];
    constexpr Order() : of() {
      for (int i = 0; i < 128; i++) of[i / 64][i % 64] = (uint8_t)(i / 32 % 2 * 64 + i / 64 * 32 + i / 16 % 2 * 16 + 2 * (i % 8) + i / 8 % 2);
    }
  };
  static constexpr Order kOrder;
  v64 v[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) v[i] = _mm512_loadu_si512(rows.row(r + 4 * i, at));
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const v64 order = _mm512_loadu_si512(kOrder.of[i]);
    const v64 a = _mm512_permutex2var_epi8(v[0], order, v[1]), b = _mm512_permutex2var_epi8(v[2], order, v[3]);
    out[2 * i] = _mm512_shuffle_i32x4(a, b, 0x88), out[2 * i + 1] = _mm512_shuffle_i32x4(a, b, 0xdd);
  }
}

// Memory that is asked for, some lines at a time: a core waits for a few dozen at once, and memory idles where it
// asks for none. Codes of a Zen 5 come 1.15 times as fast where all steps of the sums ask as where one does; those of a
// Zen 4 come 0.94 times as fast where they are asked for once more, shortly before their use. A first cache of 32 KB
// (Zen 4) does not hold it, which takes 1.75 times as long; by one of 48 KB (Zen 5) two cores take 0.94 of the time.
struct PrefetchList {
  const char* next[6];
  int64_t lines[6], some;
  int part, parts;
  bool near;
  void add(const void* first, int64_t bytes) { next[parts] = (const char*)first, lines[parts++] = (bytes + 63) / 64; }
  // All of it in so many calls.
  void spread(int64_t calls) {
    some = calls - 1;
    for (int i = 0; i < parts; i++) some += lines[i];
    some /= calls;
  }
  INLINE void ask() {
    for (int64_t left = some; left && part < parts; part += !lines[part]) {
      const int64_t n = least(left, lines[part]);
      left -= n, lines[part] -= n;
      const char *first = next[part], *end = first + 64 * n;
      for (next[part] = end; first < end; first += 64) soon(first, near);
    }
  }
};

// To out[(t · units + unit) · kOutputs + row] of units of 32 or 16 elements of each plane, for T tokens. x: the
// numbers, as order_widely has them.
template <class K, int unit, int T>
void side_by_side_sums(const Integers& as, const uint16_t* codes_of, const uint16_t* highs_of, int64_t n,
                       int64_t high_size, PrefetchList& ahead, const int8_t* const* x, int32_t* out) {
  constexpr int F = K::fields, P = K::planes, U = 32 / unit;
  // Codes of 4 bits that stand above others need not be shifted: they are 16 times as large, and so are their sums.
  constexpr bool scaled = K::bits == 4 && !K::listed && !K::highs;
  const int64_t size = n / P, units = n / unit;
  const Rows rows(codes_of, size), high_rows(highs_of, high_size);
  Reader reader(as, 0);
  int64_t high_at = 0, multiple = 0;
  for (int64_t at = 0; at < size; at += 32, high_at += 32) {
    ahead.ask();
    if (K::highs && high_at == high_size) high_at = 0, reader.set(as, ++multiple);
    v64 pair[2][U][T][F];  // of fourths: in lanes of 128 bits of each one a sum of the lower and one of the upper bytes
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      v64 sums[2][U][T][F] = {};
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++) {
        if (T > 2) asm volatile("" ::: "memory");  // else GCC keeps all numbers on the stack
        v64 bytes[4], highs[4] = {};
        fourths_of(rows, 2 * half + j, at, bytes);
        if (K::highs) fourths_of(high_rows, 2 * half + j, high_at, highs);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          v64 codes[F];
          if constexpr (scaled) {
            codes[0] = _mm512_and_si512(bytes[i], _mm512_set1_epi8(15));
            codes[1] = _mm512_and_si512(bytes[i], _mm512_set1_epi8(-16));
          } else {
            reader.fields<K>(bytes[i], reader.lowered(highs[i]), codes);
          }
#pragma GCC unroll 4
          for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
            for (int f = 0; f < F; f++) {
              v64& mine = sums[j][i * U / 4][t][f];
              const __m128i numbers = load<__m128i>(x[t] + at * P + 64 * f + 16 * i);
              mine = _mm512_dpbusd_epi32(mine, codes[f], _mm512_broadcast_i32x4(numbers));
            }
          }
        }
      }
#pragma GCC unroll 2
      for (int u = 0; u < U; u++) {
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
          for (int f = 0; f < F; f++) pair[half][u][t][f] = add_pairs(sums[0][u][t][f], sums[1][u][t][f]);
        }
      }
    }
#pragma GCC unroll 2
    for (int u = 0; u < U; u++) {
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
        for (int f = 0; f < F; f++) {
          const v64 &a = pair[0][u][t][f], &b = pair[1][u][t][f];
          v64 lower = every_other(a, b, false), upper = every_other(a, b, true);
          if (scaled && f) lower = _mm512_srai_epi32(lower, 4), upper = _mm512_srai_epi32(upper, 4);
          int32_t* mine = out + (t * units + (f * size + at) / unit + u) * kOutputs;
          _mm512_storeu_si512(mine, lower), _mm512_storeu_si512(mine + F * size / unit * kOutputs, upper);
        }
      }
    }
  }
}

// How scales, and shifts but zeros, of kOutputs rows lie side by side, those of a unit after each other: float32,
// float16, or bytes as a record has them, of each row four in a lane, beside a number that several share or as powers
// of two. Unknown ones are float32 that units_of reads; zeros are float32.
enum class Beside { Floats, Halves, Unsigned, Signed, Powers, Unknown };

struct SideBySide {
  float *numbers, *supers;
  int shift;     // 2^shift units have one of the supers
  float factor;  // of supers, Floats and Powers
};

// Of unit u + j, j < kUnitLanes and u a multiple of kUnitLanes.
template <Beside how>
INLINE vf number_of(const SideBySide& s, int64_t u, int j) {
  if constexpr (how == Beside::Floats) return load<vf>(s.numbers + (u + j) * kOutputs);
  if constexpr (how == Beside::Halves) return (vf)_mm512_cvtph_ps(load<v32>(s.numbers + (u + j) * kOutputs / 2));
  const vu four = load<vu>(s.numbers + u * kOutputs / 4 + j / 4 * kOutputs);
  const vu byte = how == Beside::Signed ? (vu)((vi)(four << (24 - 8 * (j % 4))) >> 24) : (four >> (8 * (j % 4))) & 255u;
  if constexpr (how == Beside::Powers) return as_float(byte == vu{} ? vu{} + (1u << 22) : byte << 23) * s.factor;
  const vf super = load<vf>(s.supers + (u >> s.shift) * kOutputs);
  if constexpr (how == Beside::Signed) return __builtin_convertvector((vi)byte, vf) * super;
  // (2^23 + byte) · super − 2^23 · super, of which the last is the same for all of them.
  return (vf)_mm512_fmsub_ps((__m512)(byte | 0x4b000000u), (__m512)super, (__m512)(0x1p23f * super));
}

// f(at, four vectors) of 16 bytes from `at` on of each of kOutputs lines of `size` bytes, a multiple of 2, that follow
// each other: vector i has four of a line in each lane.
template <class F>
INLINE void turn_lines(const void* lines, int64_t size, F f) {
  const auto turn = [&](int64_t at, auto whole) {
    const __mmask8 some = (__mmask8)(decltype(whole)::value ? 255 : (1 << (size - at) / 2) - 1);
    const auto line = [&](int64_t r) {
      const __m128i* mine = (const __m128i*)((const char*)lines + r * size + at);
      return decltype(whole)::value ? _mm_loadu_si128(mine) : _mm_maskz_loadu_epi16(some, mine);
    };
    v64 v[4], pairs[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const v32 low = _mm256_inserti128_si256(_mm256_castsi128_si256(line(i)), line(i + 4), 1);
      const v32 high = _mm256_inserti128_si256(_mm256_castsi128_si256(line(i + 8)), line(i + 12), 1);
      v[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      pairs[i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), pairs[i + 2] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      v[2 * i] = _mm512_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]);
      v[2 * i + 1] = _mm512_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]);
    }
    f(at, v);
  };
  int64_t at = 0;
  for (; at + 16 <= size; at += 16) turn(at, Constant<bool, true>());
  if (at < size) turn(at, Constant<bool, false>());
}

// f(i, kOutputs float16 of the number i and as many of the next one) of n float16 a line; behind the last are zeros.
template <class F>
INLINE void each_half(const void* lines, int64_t n, F f) {
  const v64 parted = (v64)(vh{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                              1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
  turn_lines(lines, 2 * n, [&](int64_t at, const v64 (&v)[4]) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) f(at / 2 + 2 * i, _mm512_permutexvar_epi16(parted, v[i]));
  });
}

// How those of GGUF files, MXFP4 and GPTQ are read: of one dtype, along whole rows.
Beside beside_of(const Format& f, const Coding& c, const Integers& as) {
  const int64_t groups = f.hidden / c.group, super = c.super;
  const bool own = c.group == c.unit;
  if (f.hidden % c.group || c.across > 1 || c.whole != Whole::None || groups % 2) return Beside::Unknown;
  if (super) {
    if (!own || groups % super || super % kUnitLanes || super & (super - 1)) return Beside::Unknown;
    if (c.scale == ScaleType::U8 && as.shift == Shift::Minimum) return Beside::Unsigned;
    return c.scale == ScaleType::I8 && as.shift == Shift::None ? Beside::Signed : Beside::Unknown;
  }
  if (c.scale == ScaleType::F16) return own && as.factor == 1 ? Beside::Halves : Beside::Floats;
  return c.scale == ScaleType::E8M0 && own && as.shift == Shift::None ? Beside::Powers : Beside::Unknown;
}

// Scales and shifts of kOutputs rows, from `row` on, side by side.
template <Beside how>
void units_side_by_side(const Format& f, const uint16_t* record, const Coding& c, Shift shift, int64_t row,
                        const SideBySide& scales, const SideBySide& shifts) {
  const int64_t groups = f.hidden / c.group, each = c.group / c.unit;
  const auto lines = [&](int64_t part, int64_t bytes) { return (const char*)(record + part * f.hidden) + row * bytes; };
  // Number i of n, for as many units.
  const auto put = [](int64_t i, int64_t n, int64_t each, vf v, float* out) {
    for (int64_t u = i * each; i < n && u < (i + 1) * each; u++) store(out + u * kOutputs, v);
  };
  const auto widen = [&](int64_t part, int64_t n, int64_t each, float factor, float* out) {
    each_half(lines(part, 2 * n), n, [&](int64_t i, v64 both) {
      put(i, n, each, (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(both)) * factor, out);
      put(i + 1, n, each, (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(both, 1)) * factor, out);
    });
  };
  const auto read = [&](int64_t part, int64_t supers, const SideBySide& to) {
    if (how == Beside::Floats) return widen(part, groups, each, to.factor, to.numbers);
    if (how == Beside::Halves) {
      return each_half(lines(part, 2 * groups), groups, [&](int64_t g, v64 both) { store(to.numbers + g * kOutputs / 2, both); });
    }
    turn_lines(lines(part, groups), groups, [&](int64_t at, const v64 (&v)[4]) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) store(to.numbers + (at / 4 + i) * kOutputs, v[i]);
    });
    if (how != Beside::Powers) widen(supers, groups / c.super, 1, to.factor, to.supers);
  };
  read(c.extra, c.supers, scales);
  if (shift == Shift::Minimum) read(c.shifts, c.min_supers, shifts);
  if (shift != Shift::Zero) return;
  turn_lines(lines(c.shifts, groups), groups, [&](int64_t at, const v64 (&v)[4]) {
    for (int i = 0; i < 16; i++) {
      const vu byte = ((vu)v[i / 4] >> (8 * (i % 4))) & 255u;
      put(at + i, groups, each, __builtin_convertvector((vi)byte, vf), shifts.numbers);
    }
  });
}

// y[t · stride + row] of `rows` of kOutputs rows and up to kAtOnce tokens, whose sums lie side by side: as sum_units.
template <Shift how, Beside scale>
void sum_side_by_side(const int32_t* sums, float zero, const SideBySide& scales, const SideBySide& shifts,
                      const float* const* x, int64_t n, bool sixteen, int64_t units, __mmask16 rows, int64_t tokens,
                      PrefetchList& ahead, float* y, int64_t stride) {
  chosen<1, kAtOnce>(tokens, [&](auto some) {
    constexpr int T = decltype(some)::value, J = T > 2 ? kUnitLanes / 2 : kUnitLanes;  // 16 sums in registers
    const float *x_scale[T], *x_sum[T];
    for (int t = 0; t < T; t++) {
      const Quantized to(x[t], n);
      x_scale[t] = to.scale[sixteen], x_sum[t] = to.sum[sixteen];
    }
    vf lane[T][kUnitLanes] = {};
    const auto add = [&](int64_t u, int j) __attribute__((always_inline)) {
      const vf by = number_of<scale>(scales, u, j);
      vf shift = {}, zeros = zero - vf{};
      if (how != Shift::None) shift = number_of<how == Shift::Zero ? Beside::Floats : scale>(shifts, u, j);
      if (how == Shift::Zero) zeros += shift;
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) {
        vf whole = __builtin_convertvector(load<vi>(sums + (t * units + u + j) * kOutputs), vf);
        if (how != Shift::Minimum) whole -= x_sum[t][u + j] * zeros;  // else zeros are 0
        lane[t][j] += unfused(whole * (by * x_scale[t][u + j]));
        if (how == Shift::Minimum) lane[t][j] += unfused(x_sum[t][u + j] * (shift * x_scale[t][u + j]));
      }
    };
    const auto add_lanes = [&](auto from) __attribute__((always_inline)) {
      constexpr int first = decltype(from)::value;
      int64_t u = 0;
      for (; u + kUnitLanes <= units; u += kUnitLanes) {
        ahead.ask();
#pragma GCC unroll 8
        for (int j = first; j < first + J; j++) add(u, j);
      }
#pragma GCC unroll 8
      for (int j = first; j < first + J; j++) {
        if (u + j < units) add(u, j);
      }
    };
    add_lanes(Constant<int, 0>());
    if constexpr (J < kUnitLanes) add_lanes(Constant<int, J>());
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
      for (int half = kUnitLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 4
        for (int j = 0; j < half; j++) lane[t][j] += lane[t][j + half];
      }
      _mm512_mask_storeu_ps(y + t * stride, rows, (__m512)lane[t][0]);
    }
  });
}

// f(Shift, Beside) of the ways there are, as constants.
template <class F>
INLINE void with_ways(Shift how, Beside scale, F f) {
  if (scale == Beside::Unsigned) return f(Constant<Shift, Shift::Minimum>(), Constant<Beside, Beside::Unsigned>());
  if (scale == Beside::Signed) return f(Constant<Shift, Shift::None>(), Constant<Beside, Beside::Signed>());
  if (scale == Beside::Powers) return f(Constant<Shift, Shift::None>(), Constant<Beside, Beside::Powers>());
  const auto numbers = [&](auto shift) {
    if (scale == Beside::Halves) f(shift, Constant<Beside, Beside::Halves>());
    else f(shift, Constant<Beside, Beside::Floats>());
  };
  if (how == Shift::None) numbers(Constant<Shift, Shift::None>());
  else if (how == Shift::Zero) numbers(Constant<Shift, Shift::Zero>());
  else numbers(Constant<Shift, Shift::Minimum>());
}

// ---- down^T: bands of rows

// Four rows of 32 elements: in lanes of 32 bits the lower bytes of a column and the upper ones.
INLINE void four_rows(const uint16_t* rows, int64_t apart, __mmask32 columns, v64 (&out)[4]) {
  v64 row[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) row[i] = _mm512_maskz_loadu_epi16(columns, rows + i * apart);
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++) {
    const v64 a = k ? _mm512_unpackhi_epi8(row[0], row[1]) : _mm512_unpacklo_epi8(row[0], row[1]);
    const v64 b = k ? _mm512_unpackhi_epi8(row[2], row[3]) : _mm512_unpacklo_epi8(row[2], row[3]);
    out[2 * k] = _mm512_unpacklo_epi16(a, b), out[2 * k + 1] = _mm512_unpackhi_epi16(a, b);
  }
}

// Four vectors in four_rows' order: of 16 columns and of the next ones, of the lower bytes' plane, then
// of the upper ones'.
INLINE void by_plane(const v64 (&v)[4], v64 (&out)[2][2]) {
  const v64 first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
#pragma GCC unroll 2
  for (int p = 0; p < 2; p++) {
    const v64 a = every_other(v[0], v[1], p), b = every_other(v[2], v[3], p);
    out[p][0] = _mm512_permutex2var_epi64(a, first, b), out[p][1] = _mm512_permutex2var_epi64(a, second, b);
  }
}

// Of any number of columns: rows of `out` have room for a multiple of 16. Where codes have upper bits, four rows pass at
// once, as many as the first cache has ways with those: all of a band's took 1.06 of the time of Q6_K's down on a Zen 4.
template <class K, int T>
void band_sums(const Integers& as, DownRows rows, int64_t multiple, int64_t step, int64_t n, int64_t ahead,
               int64_t highs_ahead, bool cold, const Quantized* h, int64_t row, int64_t size, int32_t* const* out) {
  constexpr int F = K::fields, P = K::planes;
  alignas(64) int64_t factors[8][T][F][8];  // of each four rows
  for (int64_t j = 0; j < step / 4; j++) {
    for (int t = 0; t < T; t++) {
      for (int f = 0; f < F; f++) {
        const int8_t* q = h[t].q + f * size + row + 4 * j;
        const uint64_t both = load<uint32_t>(q) | (uint64_t)load<uint32_t>(q + F * size) << 32;
        _mm512_store_si512(factors[j][t][f], _mm512_set1_epi64((int64_t)both));
      }
    }
  }
  const Reader reader(as, multiple);
  const int64_t lines = (n + 31) / 32;  // of a row
  int64_t asked = 0, next = 0;
  const bool near = asked_near();
  // Of 32 columns from `at` on: four rows, and all rows' sums.
  const auto add = [&](int64_t j, int64_t at, v64 (&sums)[T][F][4]) __attribute__((always_inline)) {
    for (int i = 0; i < 4; i++, next += 32) {  // row by row, as band_sums of AVX2
      if (asked++ == lines) asked = 1, next += rows.apart - 32 * lines;
      soon(rows.codes + ahead + next, near);
      if (K::highs && highs_ahead) soon(rows.highs + highs_ahead + next, near);
    }
    const __mmask32 columns = first_of(n - at);
    v64 four[4], highs[4] = {};
    four_rows(rows.codes + 4 * j * rows.apart + at, rows.apart, columns, four);
    if (K::highs) four_rows(rows.highs + 4 * j * rows.apart + at, rows.apart, columns, highs);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      v64 codes[F];
      reader.fields<K>(four[k], reader.lowered(highs[k]), codes);
#pragma GCC unroll 4
      for (int f = 0; f < F; f++) {
#pragma GCC unroll 3
        for (int t = 0; t < T; t++) {
          v64& mine = sums[t][f][k];
          mine = _mm512_dpbusd_epi32(j ? mine : v64{}, codes[f], _mm512_load_si512(factors[j][t][f]));
        }
      }
    }
  };
  const auto put = [&](int64_t at, const v64 (&sums)[T][F][4]) __attribute__((always_inline)) {
#pragma GCC unroll 3
    for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
      for (int f = 0; f < F; f++) {
        v64 found[2][2];
        by_plane(sums[t][f], found);
        for (int p = 0; p < 2; p++) {
          int32_t* mine = out[t * P + f + p * F] + at;
          _mm512_storeu_si512(mine, found[p][0]);
          if (n - at > 16) _mm512_storeu_si512(mine + 16, found[p][1]);
        }
      }
    }
  };
  if (cold) ask_for_columns(rows, K::highs, step, 0, least(n, kNear));
  // Few sums stay in registers while all rows pass, of one line each.
  constexpr bool few = !K::highs && T * F <= 2;
  constexpr int64_t most = few ? 32 : 512 / (T * F) / 32 * 32;  // columns
  for (int64_t first = 0; first < n; first += most) {
    v64 open[most / 32][T][F][4];
    const int64_t behind = least(n, first + most);
    if (cold) ask_for_columns(rows, K::highs, step, first + kNear, least(n, behind + kNear));
    if constexpr (few) {
      for (int64_t j = 0; j < step / 4; j++) add(j, first, open[0]);
      put(first, open[0]);
      continue;
    }
    for (int64_t j = 0; j < step / 4; j++) {
      for (int64_t at = first; at < behind; at += 32) add(j, at, open[(at - first) / 32]);
    }
    for (int64_t at = first; at < behind; at += 32) put(at, open[(at - first) / 32]);
  }
}

// ---- many tokens: see IntegerBlock; lanes are of four numbers

constexpr int64_t kTokensOfUnit = 8;

#ifdef __AMX_INT8__
// Tokens of a block from which on tiles are faster.
constexpr int64_t kTileTokens = 13;

INLINE void release_tiles() { __asm__ volatile("tilerelease" ::); }

// Numbers of up to kBlockTokens tokens as tiles want them: of each unit the tokens' numbers, scales and sums, zeros
// of tokens that are not there. In kBlockTokens · room_of_tiles(n) floats, or fewer.
INLINE int64_t floats_of_unit(int64_t unit) { return kBlockTokens * (unit / 4 + 2); }
void numbers_of_tiles(const float* const* x, int64_t tokens, int64_t n, int64_t unit, float* out) {
  const int64_t apart = floats_of_unit(unit), units = n / unit;
  memset(out, 0, tokens < kBlockTokens ? units * apart * sizeof *out : 0);
  for (int64_t t = 0; t < tokens; t++) {
    const Quantized to(x[t], n);
    const float *scale = to.scale[unit == 16], *sum = to.sum[unit == 16];
    float* mine = out;
    for (int64_t u = 0; u < units; u++, mine += apart) {
      char* q = (char*)mine + t * unit;
      if (unit == 16) store(q, load<__m128i>(to.q + u * 16));
      else store(q, load<v32>(to.q + u * 32));
      float* of_unit = mine + kBlockTokens * unit / 4 + t;
      of_unit[0] = scale[u], of_unit[kBlockTokens] = sum[u];
    }
  }
}

// Sums of tokens in the tiles 0 and 1, their numbers in 2 and 3, lanes of codes in 4 and 5.
INLINE void configure_tiles(int64_t unit) {
  Tiles tiles;
  tiles.set(0, 2, kBlockTokens, 64), tiles.set(2, 2, kBlockTokens, unit), tiles.set(4, 2, unit / 4, 64);
  CONFIGURE(tiles);
}

#define MULTIPLY_TILES(sums, with_numbers, with_lanes, out)                                     \
  __asm__ volatile("tilezero %%tmm" #sums ::);                                                  \
  LOAD_TILE(with_numbers, mine, unit);                                                          \
  LOAD_TILE(with_lanes, lanes, 64);                                                             \
  __asm__ volatile("tdpbsud %%tmm" #with_lanes ", %%tmm" #with_numbers ", %%tmm" #sums ::);     \
  STORE_TILE(sums, out, 64)

// As multiply_wide_block, of kBlockTokens tokens, whose numbers are as numbers_of_tiles has them.
template <Shift how>
void multiply_tiles(const Integers& as, const IntegerBlock& b, const float* numbers, float* out) {
  static_assert(kOutputs == L);
  constexpr int64_t all = kOutputs * kUnitLanes;
  alignas(64) int32_t found[2][kBlockTokens * kOutputs];
  const int64_t unit = b.unit, units = b.n / unit, apart = floats_of_unit(unit);
  const auto multiply = [&](int64_t u, int64_t turn) {
    const int32_t* lanes = b.lanes + u * unit / 4 * kOutputs;
    const float* mine = numbers + u * apart;
    if (turn % 2) {
      MULTIPLY_TILES(1, 3, 5, found[1]);
    } else {
      MULTIPLY_TILES(0, 2, 4, found[0]);
    }
  };
  // Units of a lane after each other, so that its totals stay in registers.
  int64_t turn = 0;
  multiply(0, 0);
  for (int64_t lane = 0; lane < kUnitLanes; lane++) {
    vf total[kBlockTokens] = {};
    for (int64_t u = lane; u < units; u += kUnitLanes, turn++) {
      const int64_t later = u + kUnitLanes, next = later < units ? later : lane + 1;
      if (next < units && (next == later || next < kUnitLanes)) multiply(next, turn + 1);
      for (int part = 0; part < 2; part++) {
        for (int64_t i = u * b.lines[part]; i < (u + 1) * b.lines[part]; i++) soon(b.next[part] + 32 * i);
      }
      const vf scale = load<vf>(b.scale + u * b.apart), shift = how == Shift::None ? vf{} : load<vf>(b.shift + u * b.apart);
      const vf zeros = how == Shift::Zero ? as.zero + shift : as.zero - vf{};
      const float *by = numbers + u * apart + kBlockTokens * unit / 4, *of_x = by + kBlockTokens;
      const int32_t* mine = found[turn % 2];
#pragma GCC unroll 16
      for (int t = 0; t < kBlockTokens; t++) {
        vf whole = __builtin_convertvector(load<vi>(mine + t * kOutputs), vf);
        if (how != Shift::Minimum) whole -= of_x[t] * zeros;  // else zeros are 0
        total[t] += unfused(whole * (scale * by[t]));
        if (how == Shift::Minimum) total[t] += unfused(of_x[t] * (shift * by[t]));
      }
    }
#pragma GCC unroll 16
    for (int t = 0; t < kBlockTokens; t++) store(out + t * all + lane * kOutputs, total[t]);
  }
  for (int64_t t = 0; t < kBlockTokens; t++, out += all) {
    for (int64_t half = all / 2; half >= kOutputs; half /= 2) {
      for (int64_t i = 0; i < half; i += L) store(out + i, load<vf>(out + i) + load<vf>(out + half + i));
    }
  }
}

INLINE void multiply_tiles(const Integers& as, const IntegerBlock& b, const float* numbers, float* out) {
  if (as.shift == Shift::None) multiply_tiles<Shift::None>(as, b, numbers, out);
  else if (as.shift == Shift::Zero) multiply_tiles<Shift::Zero>(as, b, numbers, out);
  else multiply_tiles<Shift::Minimum>(as, b, numbers, out);
}
#endif

// out[t · kOutputs · kUnitLanes + i] for up to kBlockTokens tokens.
template <bool minimum>
void multiply_wide_block(const Integers& as, const IntegerBlock& b, const float* const* x, int64_t tokens, float* out) {
  static_assert(kOutputs == L);
  constexpr int64_t all = kOutputs * kUnitLanes;
  const bool sixteen = b.unit == 16;
  const int32_t* q[kBlockTokens];
  const float *x_scale[kBlockTokens], *x_sum[kBlockTokens];
  for (int64_t t = 0; t < tokens; t++) {
    const Quantized to(x[t], b.n);
    q[t] = (const int32_t*)to.q, x_scale[t] = to.scale[sixteen], x_sum[t] = to.sum[sixteen];
  }
  memset(out, 0, tokens * all * sizeof *out);
  for (int64_t u = 0; u < b.n / b.unit; u++) {
    for (int part = 0; part < 2; part++) {
      for (int64_t i = u * b.lines[part]; i < (u + 1) * b.lines[part]; i++) soon(b.next[part] + 32 * i);
    }
    const int64_t steps = b.unit / 4;
    const int32_t* lanes = b.lanes + u * steps * kOutputs;
    const vf scale = load<vf>(b.scale + u * b.apart);
    vf shift = {}, zeros = as.zero - vf{};
    if (as.shift != Shift::None) shift = load<vf>(b.shift + u * b.apart);
    if (as.shift == Shift::Zero) zeros += shift;
    const auto add = [&](int64_t t, auto count) {
      constexpr int T = decltype(count)::value;
      v64 sums[T];
#pragma GCC unroll 8
      for (int i = 0; i < T; i++) sums[i] = v64{};
      for (int64_t d = 0; d < steps; d += 4) {
#pragma GCC unroll 4
        for (int e = 0; e < 4; e++) {
          const v64 codes = _mm512_loadu_si512(lanes + (d + e) * kOutputs);
#pragma GCC unroll 8
          for (int i = 0; i < T; i++) {
            sums[i] = _mm512_dpbusd_epi32(sums[i], codes, _mm512_set1_epi32(q[t + i][u * steps + d + e]));
          }
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < T; i++) {
        const float by = x_scale[t + i][u], of_x = x_sum[t + i][u];
        float* lane = out + (t + i) * all + u % kUnitLanes * kOutputs;
        vf total = load<vf>(lane);
        const vf whole = __builtin_convertvector((vi)sums[i], vf) - of_x * zeros;
        total += unfused(whole * (scale * by));
        if (minimum) total += unfused(of_x * (shift * by));
        store(lane, total);
      }
    };
    int64_t t = 0;
    for (; t + kTokensOfUnit <= tokens; t += kTokensOfUnit) add(t, Constant<int, kTokensOfUnit>());
    for (; t + 4 <= tokens; t += 4) add(t, Constant<int, 4>());
    for (; t < tokens; t++) add(t, Constant<int, 1>());
  }
  for (int64_t t = 0; t < tokens; t++, out += all) {
    for (int64_t half = all / 2; half >= kOutputs; half /= 2) {
      for (int64_t i = 0; i < half; i++) out[i] += out[i + half];
    }
  }
}

INLINE void multiply_wide_block(const Integers& as, const IntegerBlock& b, const float* const* x, int64_t tokens,
                                float* out) {
  if (as.shift == Shift::Minimum) multiply_wide_block<true>(as, b, x, tokens, out);
  else multiply_wide_block<false>(as, b, x, tokens, out);
}

// Lane i of sixteen vectors, in vector i.
INLINE void turn(v64 (&v)[16]) {
  v64 a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  // b[i + j]: words j, 4 + j, 8 + j and 12 + j of rows i to i + 3.
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]), b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {  // of each two 128 bits the first, or the second
      const auto half = [&](int i) {
        return odd ? _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd) : _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
      };
      const v64 upper = half(j), lower = half(8 + j);
      v[4 * odd + j] = _mm512_shuffle_i32x4(upper, lower, 0x88);
      v[4 * odd + 8 + j] = _mm512_shuffle_i32x4(upper, lower, 0xdd);
    }
  }
}

// kOutputs rows of codes as a block has them.
template <class K>
void turn_wide_codes(const Integers& as, const IntegerRow* rows, int32_t* out) {
  const int64_t size = rows->n / K::planes;
  Reader reader(as, 0);
  int64_t high_at = 0, multiple = 0;
  for (int64_t at = 0; at < size; at += 32, high_at += 32) {
    if (K::highs && high_at == rows->high_size) high_at = 0, reader.set(as, ++multiple);
    v64 codes[K::fields][kOutputs];
#pragma GCC unroll 16
    for (int r = 0; r < kOutputs; r++) {
      const v64 highs = K::highs ? reader.lowered(lower_then_upper(_mm512_loadu_si512(rows[r].highs + high_at))) : v64{};
      v64 fields[K::fields];
      reader.fields<K>(lower_then_upper(_mm512_loadu_si512(rows[r].codes + at)), highs, fields);
#pragma GCC unroll 4
      for (int f = 0; f < K::fields; f++) codes[f][r] = fields[f];
    }
#pragma GCC unroll 4
    for (int f = 0; f < K::fields; f++) {
      turn(codes[f]);
#pragma GCC unroll 16
      for (int i = 0; i < kOutputs; i++) {
        const int64_t plane = i % 4 < 2 ? f : f + K::fields;
        _mm512_storeu_si512(out + ((plane * size + at) / 4 + i / 4 * 2 + i % 2) * kOutputs, codes[f][i]);
      }
    }
  }
}

// Numbers of kOutputs rows of n, the last one for those behind `rows`, as a block has them.
void turn_wide_scales(const float* numbers, int64_t n, int64_t rows, float* out) {
  for (int64_t u = 0; u < n; u += 16) {  // n is a multiple of 8
    v64 v[kOutputs];
    const __mmask16 some = (__mmask16)(n - u < 16 ? 0xff : 0xffff);
    for (int64_t j = 0; j < kOutputs; j++) v[j] = _mm512_maskz_loadu_epi32(some, numbers + least(j, rows - 1) * n + u);
    turn(v);
    for (int64_t j = 0; j < least(16, n - u); j++) _mm512_storeu_si512(out + (u + j) * kOutputs, v[j]);
  }
}

// As turn_rows.
template <class K>
void turn_wide_rows(const Integers& as, const IntegerRow* all, const float* scale, const float* shift, int64_t apart,
                    int64_t rows, int32_t* lanes, float* scales, float* shifts) {
  turn_wide_codes<K>(as, all, lanes);
  turn_wide_scales(scale, apart, rows, scales);
  if (as.shift != Shift::None) turn_wide_scales(shift, apart, rows, shifts);
}

template <class F>
INLINE void with_kind_of_columns(const Integers& as, F f) { with_wide_kind(as, f); }

// Elements of four rows of down^T and of `blocks` · kOutputs columns, as blocks have them, which lie
// `apart` lanes from each other; a plane has `size` of them.
template <class K>
void turn_columns(const Integers& as, const DownRows& rows, int64_t multiple, int64_t blocks, int64_t size, int64_t apart,
                  int32_t* lanes) {
  const Reader reader(as, multiple);
  for (int64_t k = 0; k < blocks; k += 2) {
    const __mmask32 columns = first_of((blocks - k) * kOutputs);
    v64 four[4], highs[4] = {}, codes[K::fields][4];
    four_rows(rows.codes + k * kOutputs, rows.apart, columns, four);
    if (K::highs) four_rows(rows.highs + k * kOutputs, rows.apart, columns, highs);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      v64 fields[K::fields];
      reader.fields<K>(four[i], reader.lowered(highs[i]), fields);
#pragma GCC unroll 4
      for (int f = 0; f < K::fields; f++) codes[f][i] = fields[f];
    }
#pragma GCC unroll 4
    for (int f = 0; f < K::fields; f++) {
      v64 found[2][2];
      by_plane(codes[f], found);
      for (int p = 0; p < 2; p++) {
        int32_t* mine = lanes + k * apart + (f + p * K::fields) * size;
        _mm512_storeu_si512(mine, found[p][0]);
        if (k + 1 < blocks) _mm512_storeu_si512(mine + apart, found[p][1]);
      }
    }
  }
}

#endif

}  // namespace
}  // namespace moejax
