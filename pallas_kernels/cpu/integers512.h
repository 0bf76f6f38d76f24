// Products of integers with AVX-512 and VNNI, where VPDPBUSD adds four products of bytes to 32 bits:
// included by integers.h, whose functions of the same names do the same for AVX2.
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

// How bytes become codes: a table of 16, and where the upper bits lie (Place).
struct Reader {
  v64 table, mask;
  __m128i up, down;
  INLINE Reader(const Integers& as, int64_t multiple) : table{} {
    if (as.list) table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)as.list));
    set(as, multiple);
  }
  INLINE void set(const Integers& as, int64_t multiple) {
    up = _mm_cvtsi32_si128(4 - as.highs * (int)multiple), down = _mm_cvtsi32_si128(as.highs * (int)multiple);
    mask = _mm512_set1_epi8((char)(((1 << as.highs) - 1) << 4));
  }
  template <class K>
  INLINE void fields(v64 bytes, v64 highs, v64* out) const {
    if constexpr (K::bits == 8) {
      out[0] = bytes;
      return;
    }
#pragma GCC unroll 4
    for (int f = 0; f < K::fields; f++) {
      const v64 placed = f ? _mm512_srli_epi16(bytes, K::bits * f) : bytes;
      out[f] = _mm512_and_si512(placed, _mm512_set1_epi8((1 << K::bits) - 1));
      if (K::listed) out[f] = _mm512_shuffle_epi8(table, out[f]);
      if (!K::highs) continue;
      const v64 upper = f ? _mm512_srl_epi16(highs, down) : _mm512_sll_epi16(highs, up);
      out[f] = _mm512_ternarylogic_epi64(out[f], upper, mask, 0xf8);  // a | (b & c)
    }
  }
};

// Of each eight elements the lower bytes, then the upper ones.
INLINE v64 lower_then_upper(v64 elements) {
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  return _mm512_shuffle_epi8(elements, _mm512_broadcast_i32x4(order));
}

// ---- a few tokens: units' sums of a row

// Numbers in the order in which a row's codes are multiplied: for each 32 elements and field, of each
// eight the lower bytes' numbers, then the upper ones'.
template <class K>
void order_widely(const int8_t* q, int64_t n, int8_t* out) {
  const int64_t size = n / K::planes;
  for (int64_t at = 0; at < size; at += 32) {
    for (int f = 0; f < K::fields; f++) {
      const int8_t *lower = q + f * size + at, *upper = q + (f + K::fields) * size + at;
      for (int i = 0; i < 32; i += 8, out += 16) memcpy(out, lower + i, 8), memcpy(out + 8, upper + i, 8);
    }
  }
}

// Of lanes of 128 bits: the even lanes of both vectors, or the odd ones.
INLINE v64 every_other(v64 a, v64 b, bool odd) {
  return (v64)(odd ? _mm512_shuffle_ps((__m512)a, (__m512)b, 0xdd) : _mm512_shuffle_ps((__m512)a, (__m512)b, 0x88));
}

// Sums of neighbours: lanes of 128 bits of two vectors have two lanes of a plane and two of another
// one; then one of each, of the first vector and of the second.
INLINE v64 add_pairs(v64 a, v64 b) {
  return _mm512_add_epi32(every_other(a, b, false), every_other(a, b, true));
}
// Of lanes of 128 bits: the sums of the first vector's two pairs, then of the second one's.
INLINE v64 add_quarters(v64 a, v64 b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

// To out[t · room + unit], of units of 32 or 16 elements of each plane, for T tokens. numbers: as
// order_widely has them.
template <class K, int unit, int T>
void wide_row_sums(const Integers& as, const IntegerRow& row, const int8_t* const* numbers, int64_t room, int32_t* out) {
  constexpr int F = K::fields, S = unit / 4;  // steps of 32 elements that give eight units of each plane
  const int64_t size = row.n / K::planes, units = size / unit;
  const v64 order = unit == 32 ? _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)
                               : _mm512_setr_epi32(0, 4, 2, 6, 8, 12, 10, 14, 1, 5, 3, 7, 9, 13, 11, 15);
  Reader reader(as, 0);
  int64_t high_at = 0, multiple = 0;
  for (int64_t first = 0; first < size; first += 32 * S) {
    const int64_t count = least(S, (size - first) / 32);
    const auto step = [&](int i, v64 (&sums)[T][F]) {
      const int64_t at = first + 32 * i;
      if (i >= count) {
#pragma GCC unroll 3
        for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
          for (int f = 0; f < F; f++) sums[t][f] = v64{};
        }
        return;
      }
      soon(row.next + at);
      if (K::highs && at < row.high_size) soon(row.next_highs + at);
      if (K::highs && high_at == row.high_size) high_at = 0, reader.set(as, ++multiple);
      v64 codes[F];
      const v64 highs = K::highs ? lower_then_upper(_mm512_loadu_si512(row.highs + high_at)) : v64{};
      reader.fields<K>(lower_then_upper(_mm512_loadu_si512(row.codes + at)), highs, codes);
      high_at += 32;
#pragma GCC unroll 3
      for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
        for (int f = 0; f < F; f++) {
          sums[t][f] = _mm512_dpbusd_epi32(v64{}, codes[f], _mm512_loadu_si512(numbers[t] + at * K::planes + 64 * f));
        }
      }
    };
    v64 half[2][T][F];
#pragma GCC unroll 2
    for (int h = 0; h < S / 4; h++) {
      v64 pair[2][T][F];
#pragma GCC unroll 2
      for (int p = 0; p < 2; p++) {
        v64 one[T][F], other[T][F];
        step(4 * h + 2 * p, one), step(4 * h + 2 * p + 1, other);
#pragma GCC unroll 3
        for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
          for (int f = 0; f < F; f++) pair[p][t][f] = add_pairs(one[t][f], other[t][f]);
        }
      }
#pragma GCC unroll 3
      for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
        for (int f = 0; f < F; f++) half[h][t][f] = add_quarters(pair[0][t][f], pair[1][t][f]);
      }
    }
#pragma GCC unroll 3
    for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
      for (int f = 0; f < F; f++) {
        const v64 all = S == 8 ? add_quarters(half[0][t][f], half[S / 8][t][f]) : half[0][t][f];
        const v64 sums = _mm512_permutexvar_epi32(order, all);
        int32_t* mine = out + t * room + f * units + first / unit;
        const __mmask8 some = (__mmask8)(count == S ? 0xff : (1 << 32 / unit * count) - 1);
        _mm256_mask_storeu_epi32(mine, some, _mm512_castsi512_si256(sums));
        _mm256_mask_storeu_epi32(mine + F * units, some, _mm512_extracti64x4_epi64(sums, 1));
      }
    }
  }
}

// ---- up to kSideBySide tokens and codes of 2 to 6 bits: kOutputs rows of gate or up side by side in lanes, so
// that no sum crosses them

// 32 elements of each fourth of 16 rows, from `at` on: vector i has in its lanes of 128 bits eight of each row, as
// lower_then_upper has them.
INLINE void fourths_of(const uint16_t* const* rows, int64_t at, v64 (&out)[4]) {
  v64 v[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++) v[r] = lower_then_upper(_mm512_loadu_si512(rows[4 * r] + at));
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2) {
    const v64 a = i ? _mm512_shuffle_i32x4(v[0], v[1], 0xee) : _mm512_shuffle_i32x4(v[0], v[1], 0x44);
    const v64 b = i ? _mm512_shuffle_i32x4(v[2], v[3], 0xee) : _mm512_shuffle_i32x4(v[2], v[3], 0x44);
    out[i] = _mm512_shuffle_i32x4(a, b, 0x88), out[i + 1] = _mm512_shuffle_i32x4(a, b, 0xdd);
  }
}

// Memory that is asked for, some lines at a time: a core waits for a few dozen at once, and memory idles where it
// asks for none. Codes of a Zen 5 come 1.15 times as fast where all steps of the sums ask as where one does.
struct PrefetchList {
  const char* next[6];
  int64_t lines[6], some;
  int part, parts;
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
      for (const char* end = next[part] + 64 * n; next[part] < end; next[part] += 64) {
        soon((const uint16_t*)next[part]);
      }
    }
  }
};

// The lines of kOutputs rows of n elements, or of the rows behind them, that are read three steps later, towards the
// first cache. One of 32 KB (Zen 4) would not hold what PrefetchList asks for, which therefore goes to the second. A
// core of a Zen 5 (48 KB) got 38 GB/s of 4-bit codes with all of it asked for towards the first, 27 towards the second;
// with both it was not measured.
INLINE void ask_near(const uint16_t* const* rows, int64_t at, int64_t n) {
  const int64_t later = at + 3 * 32, near = later < n ? later : later + (kOutputs - 1) * n;
#pragma GCC unroll 16
  for (int r = 0; r < kOutputs; r++) __builtin_prefetch(rows[r] + near, 0, 3);
}

// To out[(t · units + unit) · kOutputs + row] of units of 32 or 16 elements of each plane, for T tokens. x: the
// numbers, as order_widely has them.
template <class K, int unit, int T>
void side_by_side_sums(const Integers& as, const uint16_t* const* rows, const uint16_t* const* highs_of, int64_t n,
                       int64_t high_size, PrefetchList& ahead, const int8_t* const* x, int32_t* out) {
  constexpr int F = K::fields, P = K::planes, U = 32 / unit;
  // Codes of 4 bits that stand above others need not be shifted: they are 16 times as large, and so are their sums.
  constexpr bool scaled = K::bits == 4 && !K::listed && !K::highs;
  const int64_t size = n / P, units = n / unit;
  Reader reader(as, 0);
  int64_t high_at = 0, multiple = 0;
  for (int64_t at = 0; at < size; at += 32, high_at += 32) {
    ahead.ask();
    ask_near(rows, at, size);
    if (K::highs && high_at == high_size) high_at = 0, reader.set(as, ++multiple);
    if (K::highs) ask_near(highs_of, high_at, high_size);
    v64 pair[2][U][T][F];  // of fourths: in lanes of 128 bits of each one a sum of the lower and one of the upper bytes
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      v64 sums[2][U][T][F] = {};
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++) {
        v64 bytes[4], highs[4] = {};
        fourths_of(rows + 2 * half + j, at, bytes);
        if (K::highs) fourths_of(highs_of + 2 * half + j, high_at, highs);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          v64 codes[F];
          if constexpr (scaled) {
            codes[0] = _mm512_and_si512(bytes[i], _mm512_set1_epi8(15));
            codes[1] = _mm512_and_si512(bytes[i], _mm512_set1_epi8(-16));
          } else {
            reader.fields<K>(bytes[i], highs[i], codes);
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

// Bytes of each of kOutputs lines that follow each other, at most 64 of each: vector i has four of a line in
// each lane. The last of `count` lines is there for those behind it.
INLINE void turned_lines(const char* lines, int64_t size, int64_t at, int64_t count, v64 (&out)[kOutputs]) {
  const __mmask64 some = size - at >= 64 ? ~0ull : (1ull << (size - at)) - 1;
#pragma GCC unroll 16
  for (int r = 0; r < kOutputs; r++) out[r] = _mm512_maskz_loadu_epi8(some, lines + least(r, count - 1) * size + at);
  turn(out);
}

// f(i, lane of kOutputs numbers) of n float16 a line, or of n bytes, which are a multiple of 4.
template <class F>
INLINE void each_half(const uint16_t* lines, int64_t n, int64_t count, PrefetchList& ahead, F f) {
  const v64 parted = (v64)(vh{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                              1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
  for (int64_t at = 0; at < n; at += 32) {
    v64 v[kOutputs];
    ahead.ask();
    turned_lines((const char*)lines, 2 * n, 2 * at, count, v);
#pragma GCC unroll 16
    for (int i = 0; i < kOutputs; i++) {
      if (at + 2 * i >= n) break;
      const v64 both = _mm512_permutexvar_epi16(parted, v[i]);
      f(at + 2 * i, (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(both)));
      if (at + 2 * i + 1 < n) f(at + 2 * i + 1, (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(both, 1)));
    }
  }
}
template <class F>
INLINE void each_byte(const uint8_t* lines, int64_t n, int64_t count, PrefetchList& ahead, F f) {
  for (int64_t at = 0; at < n; at += 64) {
    v64 v[kOutputs];
    ahead.ask();
    turned_lines((const char*)lines, n, at, count, v);
#pragma GCC unroll 16
    for (int i = 0; i < kOutputs; i++) {
      if (at + 4 * i >= n) break;
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) f(at + 4 * i + j, ((vu)v[i] >> (8 * j)) & 0xffu);
    }
  }
}

// Of scales as GGUF files and MXFP4 have them: of one dtype, along whole rows.
bool is_known(const Format& f, const Coding& c) {
  const int64_t groups = f.hidden / c.group, super = c.super;
  const bool bytes = c.scale == ScaleType::U8 || c.scale == ScaleType::I8;
  const bool known = super ? bytes : c.scale == ScaleType::F16 || c.scale == ScaleType::E8M0;
  const bool whole = f.hidden % c.group == 0 && c.across == 1 && c.whole == Whole::None && groups % 4 == 0;
  return known && whole && (!super || (groups % super == 0 && super % 8 == 0 && !(super & (super - 1))));
}

// Scales and shifts of kOutputs rows side by side, from `row` on, of which there are `count`: of each unit
// `scales[unit · kOutputs + row]`. supers: room for two numbers a unit.
void units_side_by_side(const Format& f, const uint16_t* record, const Coding& c, const Integers& as, int64_t row,
                        int64_t count, PrefetchList& ahead, float* scales, float* shifts, float* supers) {
  const int64_t groups = f.hidden / c.group, each = c.group / c.unit, super = c.super ? c.super : groups;
  const int shift = __builtin_ctzll(super);
  const auto bytes_of = [&](int64_t part) { return (const uint8_t*)(record + part * f.hidden) + row * groups; };
  const auto halves_of = [&](int64_t part, int64_t n) { return record + part * f.hidden + row * n; };
  const auto times_supers = [&](int64_t numbers, int64_t of_supers, float factor, float* out) {
    const int64_t n = groups / super;
    each_half(halves_of(of_supers, n), n, count, ahead, [&](int64_t i, vf v) { store(supers + i * kOutputs, v * factor); });
    const auto with = [&](auto is_positive) {
      each_byte(bytes_of(numbers), groups, count, ahead, [&](int64_t g, vu v) {
        const vi number = decltype(is_positive)::value ? (vi)v : (vi)(v << 24) >> 24;
        store(out + g * kOutputs, __builtin_convertvector(number, vf) * load<vf>(supers + (g >> shift) * kOutputs));
      });
    };
    if (c.scale == ScaleType::U8) with(Constant<bool, true>());
    else with(Constant<bool, false>());
  };
  if (c.super) {
    times_supers(c.extra, c.supers, as.factor, scales);
    if (as.shift == Shift::Minimum) times_supers(c.shifts, c.min_supers, -1, shifts);
  } else if (c.scale == ScaleType::F16) {
    const auto put = [&](int64_t g, vf v) { store(scales + g * kOutputs, v * as.factor); };
    each_half(halves_of(c.extra, groups), groups, count, ahead, put);
    if (as.shift == Shift::Minimum) {
      const auto put_shift = [&](int64_t g, vf v) { store(shifts + g * kOutputs, v); };
      each_half(halves_of(c.shifts, groups), groups, count, ahead, put_shift);
    }
  } else {
    each_byte(bytes_of(c.extra), groups, count, ahead, [&](int64_t g, vu v) {
      const vu number = v == vu{} ? (vu{} + (1u << 22)) : v << 23;
      store(scales + g * kOutputs, as_float(number) * as.factor);
    });
  }
  if (as.shift == Shift::Zero) {
    each_byte(bytes_of(c.shifts), groups, count, ahead, [&](int64_t g, vu v) { store(shifts + g * kOutputs, __builtin_convertvector((vi)v, vf)); });
  }
  for (int64_t g = groups - 1; each > 1 && g >= 0; g--) {  // backwards: in place
    const vf scale = load<vf>(scales + g * kOutputs), zero = as.shift == Shift::None ? vf{} : load<vf>(shifts + g * kOutputs);
    for (int64_t u = g * each; u < (g + 1) * each; u++) {
      store(scales + u * kOutputs, scale);
      if (as.shift != Shift::None) store(shifts + u * kOutputs, zero);
    }
  }
}

// y[row] of kOutputs rows, whose sums, scales and shifts lie side by side: as sum_units.
template <Shift how>
INLINE void sum_side_by_side(const int32_t* sums, float zero, const float* scale, const float* shift,
                           const float* x_scale, const float* x_sum, int64_t units, int64_t rows, PrefetchList& ahead,
                           float* y) {
  vf lane[kUnitLanes] = {};
  const auto add = [&](int64_t u, vf& mine) {
    vf zeros = zero - vf{};
    if (how == Shift::Zero) zeros += load<vf>(shift + u * kOutputs);
    vf whole = __builtin_convertvector(load<vi>(sums + u * kOutputs), vf);
    if (how != Shift::Minimum) whole -= x_sum[u] * zeros;  // else zeros are 0
    mine += unfused(whole * (load<vf>(scale + u * kOutputs) * x_scale[u]));
    if (how == Shift::Minimum) mine += unfused(x_sum[u] * (load<vf>(shift + u * kOutputs) * x_scale[u]));
  };
  int64_t u = 0;
  for (; u + kUnitLanes <= units; u += kUnitLanes) {
    ahead.ask();
#pragma GCC unroll 8
    for (int j = 0; j < kUnitLanes; j++) add(u + j, lane[j]);
  }
#pragma GCC unroll 8
  for (int j = 0; j < kUnitLanes; j++) {
    if (u + j < units) add(u + j, lane[j]);
  }
#pragma GCC unroll 4
  for (int half = kUnitLanes / 2; half; half /= 2) {
#pragma GCC unroll 4
    for (int j = 0; j < half; j++) lane[j] += lane[j + half];
  }
  _mm512_mask_storeu_ps(y, (__mmask16)((1u << rows) - 1), (__m512)lane[0]);
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

// Of any number of columns: rows of `out` have room for a multiple of 16.
template <class K, int T>
void band_sums(const Integers& as, const DownRows& rows, int64_t multiple, int64_t step, int64_t n, int64_t ahead,
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
  if (cold) ask_for_columns(rows, K::highs, step, 0, least(n, kNear));
  for (int64_t at = 0; at < n; at += 32) {
    if (cold) ask_for_columns(rows, K::highs, step, at + kNear, least(n, at + kNear + 32));
    const __mmask32 columns = first_of(n - at);
    v64 sums[T][F][4];
#pragma GCC unroll 3
    for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
      for (int f = 0; f < F; f++) sums[t][f][0] = sums[t][f][1] = sums[t][f][2] = sums[t][f][3] = v64{};
    }
    for (int64_t j = 0; j < step / 4; j++) {
      for (int i = 0; i < 4; i++, next += 32) {  // row by row, as band_sums of AVX2
        if (asked++ == lines) asked = 1, next += rows.apart - 32 * lines;
        soon(rows.codes + ahead + next);
        if (K::highs && highs_ahead) soon(rows.highs + highs_ahead + next);
      }
      v64 four[4], highs[4] = {};
      four_rows(rows.codes + 4 * j * rows.apart + at, rows.apart, columns, four);
      if (K::highs) four_rows(rows.highs + 4 * j * rows.apart + at, rows.apart, columns, highs);
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) {
        v64 codes[F];
        reader.fields<K>(four[k], highs[k], codes);
#pragma GCC unroll 4
        for (int f = 0; f < F; f++) {
#pragma GCC unroll 3
          for (int t = 0; t < T; t++) {
            sums[t][f][k] = _mm512_dpbusd_epi32(sums[t][f][k], codes[f], _mm512_load_si512(factors[j][t][f]));
          }
        }
      }
    }
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
      const v64 highs = K::highs ? lower_then_upper(_mm512_loadu_si512(rows[r].highs + high_at)) : v64{};
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
      reader.fields<K>(four[i], highs[i], fields);
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

}  // namespace
}  // namespace moejax
