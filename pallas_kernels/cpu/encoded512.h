// Weights of rows of codes by AVX-512-BF16: a part of encoded.h.
#pragma once

namespace moejax {
namespace {

typedef __m512i RowWeights;  // of 2·L columns of a row, as bfloat16

INLINE vf add_products(vf total, RowWeights weights, const float* x, int64_t at) {
  return (vf)_mm512_dpbf16_ps((__m512)total, (__m512bh)weights, (__m512bh)load<vu>((const uint16_t*)x + at));
}

// 2·L bfloat16 as the floats of the first and of the second half.
INLINE Pair widened(__m512i both) {
  vu lane;
  for (int i = 0; i < L; i++) lane[i] = (uint32_t)i << 16;
  const __mmask32 upper = 0xaaaaaaaa;
  return {(vf)_mm512_maskz_permutexvar_epi16(upper, (__m512i)lane, both),
          (vf)_mm512_maskz_permutexvar_epi16(upper, (__m512i)(lane + ((uint32_t)L << 16)), both)};
}

// What has the weights of blocks of a plane of gate or up; two: the halves of a block of 2·L weights
// have scales of their own. A State has a row's scales.
template <Codes kind, bool two, Narrowing>
struct Blocks {
  static constexpr bool looked_up = bits_of(kind) + highs_of(kind) <= (two ? 4 : 5);
  static constexpr bool in_two = kind == Codes::Int6;  // values are looked up in two tables
  using Decoder = std::conditional_t<looked_up || in_two, Index<kind>, Numbers<kind>>;
  struct State {
    __m512i table;
    vf scale[2], shift[2];
  };
  const Decoder decoder;
  const bool half;
  __m512i values[2];
  INLINE Blocks(int64_t plane, int64_t high_plane, bool through) : decoder(plane, high_plane), half(through) {
    if constexpr (in_two) {
      values[0] = narrowed(load<vf>(kLanes<kind, 0, 1>.of), load<vf>(kLanes<kind, L, 1>.of));
      values[1] = narrowed(load<vf>(kLanes<kind, 2 * L, 1>.of), load<vf>(kLanes<kind, 3 * L, 1>.of));
    }
  }

  // scale, shift: of the group, or of two.
  INLINE State set(const float* scale, const float* shift) const {
    constexpr bool shifts = shift_of(kind) != Shift::None;
    State s;
    s.scale[0] = splat(scale[0]), s.scale[1] = two ? splat(scale[1]) : s.scale[0];
    s.shift[0] = shifts ? splat(shift[0]) : vf{}, s.shift[1] = shifts && two ? splat(shift[1]) : s.shift[0];
    if constexpr (!looked_up) {
      if constexpr (!in_two) {
        for (vf& one : s.scale) one = one * Numbers<kind>::less;
      }
      // Exact: 9 bits and 11 (has_plane).
      if constexpr (kind == Codes::Int8) {
        for (int i = 0; i < 2; i++) s.shift[i] = decoder.zero * s.scale[i];
      }
      return s;
    }
    const bool one = !two && codes_in(kind) <= L;
    vf low = scaled_of<kind>(load<vf>(kLanes<kind, 0, 1>.of), s.scale[0], s.shift[0]);
    vf high = low;
    if (!one) high = scaled_of<kind>(load<vf>(kLanes<kind, two ? 0 : L, 1>.of), s.scale[1], s.shift[1]);
    if (__builtin_expect(half, 0)) low = through_f16(low), high = through_f16(high);
    s.table = narrowed(low, high);
    return s;
  }

  INLINE RowWeights get(const State& s, const uint16_t* in, const uint16_t* in_highs) const {
    const __m512i codes = (__m512i)load<vu>(in), highs = highs_of(kind) ? (__m512i)load<vu>(in_highs) : __m512i{};
    if constexpr (looked_up) {
      __m512i index = decoder.get(codes, highs);
      if (two) {
        const __m512i lowest = _mm512_set1_epi16(L - 1);
        const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(L), 1);
        index = _mm512_ternarylogic_epi64(lowest, index, second, 0xca);
      }
      return _mm512_permutexvar_epi16(index, s.table);
    } else if constexpr (kind == Codes::Int8) {
      const Pair pair = decoder.get(codes);
      return narrowed((vf)_mm512_fmsub_ps((__m512)pair.first, (__m512)s.scale[0], (__m512)s.shift[0]),
                      (vf)_mm512_fmsub_ps((__m512)pair.second, (__m512)s.scale[1], (__m512)s.shift[1]));
    } else if constexpr (in_two) {
      const Pair pair = widened(_mm512_permutex2var_epi16(values[0], decoder.get(codes, highs), values[1]));
      return narrowed(pair.first * s.scale[0], pair.second * s.scale[1]);
    } else {
      const Pair pair = decoder.values(codes, highs);
      return narrowed(scaled_of<kind>(pair.first, s.scale[0], s.shift[0]),
                      scaled_of<kind>(pair.second, s.scale[1], s.shift[1]));
    }
  }
};

INLINE Pair joined(Pair p) {
  const vi first = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  return {(vf)_mm512_permutex2var_ps((__m512)p.first, (__m512i)first, (__m512)p.second),
          (vf)_mm512_permutex2var_ps((__m512)p.first, (__m512i)(first + 8), (__m512)p.second)};
}

// Values of 2·L columns before their scale: even and odd ones where they are looked up, else the first
// half and the second one.
template <Codes kind>
struct ColumnValues {
  static constexpr bool looked_up = bits_of(kind) == 4;
  using Decoder = std::conditional_t<looked_up, Index<kind>, Numbers<kind>>;
  static constexpr float less = looked_up ? 1 : Numbers<kind>::less;
  const Decoder decoder;
  __m512i table[2];
  INLINE static Pair in_order(Pair columns) { return looked_up ? parted(columns) : columns; }
  INLINE static Pair sums_of(Pair totals) { return looked_up ? totals : joined(totals); }
  INLINE static Pair totals_of(Pair sums) { return looked_up ? sums : parted(sums); }
  INLINE ColumnValues(int64_t plane, int64_t high_plane) : decoder(plane, high_plane) {
    if constexpr (looked_up) {
      constexpr int more = codes_in(kind) > L ? L : 0;
      table[0] = narrowed(load<vf>(kLanes<kind, 0, 1>.of), load<vf>(kLanes<kind, more, 1>.of));
      if (codes_in(kind) > 2 * L) {
        table[1] = narrowed(load<vf>(kLanes<kind, 2 * L, 1>.of), load<vf>(kLanes<kind, 3 * L, 1>.of));
      }
    }
  }
  INLINE Pair get(const uint16_t* in, const uint16_t* in_highs) const {
    const __m512i codes = (__m512i)load<vu>(in), highs = highs_of(kind) ? (__m512i)load<vu>(in_highs) : __m512i{};
    if constexpr (looked_up) {
      const __m512i index = decoder.get(codes, highs);
      const vu both = (vu)(codes_in(kind) > 2 * L ? _mm512_permutex2var_epi16(table[0], index, table[1])
                                                  : _mm512_permutexvar_epi16(index, table[0]));
      return {as_float(both << 16), as_float(both & 0xffff0000u)};
    } else {
      return decoder.values(codes, highs);
    }
  }
};

template <Codes kind, Narrowing>
INLINE void prepare(vf&, vf&) {}

// Weights from values, as float32.
template <Codes kind, Narrowing how>
INLINE Pair rounded_weights(Pair value, Pair scale, Pair shift) {
  Pair p = {scaled_of<kind>(value.first, scale.first, shift.first),
            scaled_of<kind>(value.second, scale.second, shift.second)};
  if constexpr (how == Narrowing::None) return p;
  if constexpr (how == Narrowing::Short) return {rounded(p.first), rounded(p.second)};
  if constexpr (how == Narrowing::Half) p = {through_f16(p.first), through_f16(p.second)};
  return widened(narrowed(p.first, p.second));
}

}  // namespace
}  // namespace moejax
