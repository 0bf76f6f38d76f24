// Rows of codes multiplied as they are decoded, by AVX-512-BF16: a part of kernels.cc. Sums have the
// terms and the order of `decode` with `dots` or `add`, so their bits.
#pragma once

namespace moejax {
namespace {

constexpr int64_t kRowScales = 256;  // groups of a row, at most
constexpr int64_t kBlockScales = 256;  // columns of down^T whose scales are widened at once

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
template <Codes kind, bool two>
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

  INLINE __m512i get(const State& s, __m512i codes, __m512i highs) const {
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

// Kinds with scales of 16 weights, as files have them: only these are compiled so.
constexpr bool may_be_two(Codes kind) { return kind == Codes::Int6 || kind == Codes::E2M1; }

// How rows of gate or up are passed: in stretches of columns that have one plane of codes and one of
// upper bits, and in those in spans that share scales.
struct Passes {
  int64_t stretch, span, groups;  // groups: of a row
  bool two;
  Passes(const Format& f, const Coding& c)
      : stretch(f.hidden * (highs_of(c.kind) ? highs_of(c.kind) : bits_of(c.kind)) / 16),
        span(c.group == L ? 2 * L : least(c.group, stretch)),
        groups((f.hidden + c.group - 1) / c.group),
        two(c.group == L) {}
  bool fit(const Coding& c) const {
    const bool known = !two || may_be_two(c.kind);
    const bool whole = c.group <= stretch ? stretch % c.group == 0 : c.group % stretch == 0;
    return known && whole && stretch % (2 * L) == 0 && span % (2 * L) == 0 && groups <= kRowScales;
  }
};

template <Codes kind, bool two, int T, int R>
INLINE void pass_rows(const Format& f, const Coding& c, const Passes& p, const uint16_t* const* codes,
                      const uint16_t* const* highs, const float* scales, const float* shifts,
                      const float* const* x, vf (&total)[T][R]) {
  constexpr int bits = bits_of(kind), planes = 16 / bits;
  const int64_t size = f.hidden * bits / 16;
  for (int64_t begin = 0, s = 0; begin < f.hidden; begin += p.stretch, s++) {
    const int64_t plane = begin / size;
    const Blocks<kind, two> blocks(plane, s, c.product == Rounding::F16);
    const auto add = [&](const auto& state, int r, int64_t at) {
      const int64_t here = at - plane * size, line = at / (2 * L);
      // The next rows' lines, evenly.
      if (line % planes == 0) soon(codes[r] + R * size + line / planes * 2 * L);
      const __m512i upper = highs_of(kind) ? (__m512i)load<vu>(highs[r] + at - begin) : __m512i{};
      const __m512i weights = blocks.get(state, (__m512i)load<vu>(codes[r] + here), upper);
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) {
        total[t][r] = (vf)_mm512_dpbf16_ps((__m512)total[t][r], (__m512bh)weights,
                                           (__m512bh)load<vu>((const uint16_t*)x[t] + at));
      }
    };
    const auto state_of = [&](int r, int64_t group) {
      return blocks.set(scales + r * p.groups + group, shifts + r * p.groups + group);
    };
    if (two || p.span == 2 * L) {  // scales of one block each: none waits in a register
      for (int64_t at = begin; at < begin + p.stretch; at += 2 * L) {
        const int64_t group = two ? at / L : at / c.group;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) add(state_of(r, group), r, at);
      }
      continue;
    }
    for (int64_t at = begin; at < begin + p.stretch;) {
      typename Blocks<kind, two>::State state[R];
      const int64_t group = at / c.group, end = at + p.span;
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) state[r] = state_of(r, group);
      for (; at < end; at += 2 * L) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) add(state[r], r, at);
      }
    }
  }
}

// x: of T tokens; y: of `tokens`.
template <Codes kind, bool two, int T>
void rows_of_codes(const Format& f, const uint16_t* record, int matrix, int64_t first, int64_t count,
                   const float* const* x, int64_t tokens, float* y, int64_t stride) {
  constexpr int R = 4;
  const Coding& c = f.matrix[matrix];
  const Passes p(f, c);
  const int64_t size = f.hidden * bits_of(kind) / 16, high_size = f.hidden * highs_of(kind) / 16;
  const bool lines_follow = c.across == 1 && (!c.super || p.groups % c.super == 0);
  float scales[R * kRowScales], shifts[R * kRowScales];
  for (int64_t r = 0; r < count; r += R) {
    const int64_t mine = least(R, count - r);
    const uint16_t *codes[R], *highs[R];
    for (int64_t i = 0; i < R; i++) {
      const int64_t row = first + r + least(i, mine - 1);  // the last, where there are no more
      codes[i] = record + c.codes * f.hidden + row * size;
      highs[i] = record + c.highs * f.hidden + row * high_size;
      if (lines_follow && mine == R) continue;
      float *scale = scales + i * p.groups, *shift = shifts + i * p.groups;
      groups_of(f, record, matrix, row / c.across, 0, p.groups, scale, shift);
    }
    if (lines_follow && mine == R) groups_of(f, record, matrix, first + r, 0, R * p.groups, scales, shifts);
    vf total[T][R] = {};
    pass_rows<kind, two, T, R>(f, c, p, codes, highs, scales, shifts, x, total);
    for (int64_t t = 0; t < tokens; t++) {
      for (int64_t i = 0; i < mine; i++) y[t * stride + r + i] = sum(total[t][i]);
    }
  }
}

// f(T) of the numbers of tokens that are compiled. Three are four, of which the last is there twice: a
// product costs little beside what decodes its weights.
template <class F>
INLINE void some_tokens(int64_t tokens, F f) {
  if (tokens == 1) return f(Constant<int, 1>());
  if (tokens == 2) return f(Constant<int, 2>());
  f(Constant<int, kTokens>());
}
template <class P>
struct Each {
  P of[kTokens];
  Each(const P* all, int64_t tokens) {
    for (int64_t t = 0; t < kTokens; t++) of[t] = all[least(t, tokens - 1)];
  }
};

// f(kind) of the kinds that are multiplied as they are decoded; false: of none.
template <class F>
INLINE bool with_kind(Codes kind, F f) {
  switch (kind) {
    case Codes::Int8: f(Constant<Codes, Codes::Int8>()); return true;
    case Codes::Int4: f(Constant<Codes, Codes::Int4>()); return true;
    case Codes::E4M3: f(Constant<Codes, Codes::E4M3>()); return true;
    case Codes::E2M1: f(Constant<Codes, Codes::E2M1>()); return true;
    case Codes::IQ4: f(Constant<Codes, Codes::IQ4>()); return true;
    case Codes::Zero8: f(Constant<Codes, Codes::Zero8>()); return true;
    case Codes::Zero4: f(Constant<Codes, Codes::Zero4>()); return true;
    case Codes::Min4: f(Constant<Codes, Codes::Min4>()); return true;
    case Codes::Min5: f(Constant<Codes, Codes::Min5>()); return true;
    case Codes::Int5: f(Constant<Codes, Codes::Int5>()); return true;
    case Codes::Int6: f(Constant<Codes, Codes::Int6>()); return true;
    default: return false;
  }
}

void encoded_dots(const Format& f, const uint16_t* record, int matrix, int64_t first, int64_t rows,
                  const float* const* x, int64_t tokens, float* y, int64_t stride) {
  const Coding& c = f.matrix[matrix];
  const bool two = c.group == L;
  with_kind(c.kind, [&](auto kind) {
    constexpr Codes codes = decltype(kind)::value;
    some_tokens(tokens, [&](auto t) {
      const Each<const float*> all(x, tokens);
      if constexpr (may_be_two(codes)) {
        if (two) return rows_of_codes<codes, true, t.value>(f, record, matrix, first, rows, all.of, tokens, y, stride);
      }
      rows_of_codes<codes, false, t.value>(f, record, matrix, first, rows, all.of, tokens, y, stride);
    });
  });
}

// ---- down^T

// How a product of code and scale becomes bfloat16: it is; it is short (rounded); by conversion, from
// float16 or not.
enum class Narrowing { None, Short, Any, Half };

Narrowing narrowing_of(const Coding& c) {
  const bool few_bits = c.kind != Codes::E4M3 && c.kind != Codes::Zero8 && c.kind != Codes::Int6 &&
                        c.kind != Codes::Min4 && c.kind != Codes::Min5;
  if (c.product == Rounding::F16) return Narrowing::Half;
  if (few_bits && c.scale == ScaleType::E8M0) return Narrowing::None;
  return few_bits && c.scale <= ScaleType::BF16 ? Narrowing::Short : Narrowing::Any;
}

// Of a kind, as files have it; records of other ones are decoded before their products.
template <Codes kind>
constexpr bool may_be(Narrowing how) {
  switch (kind) {
    case Codes::E2M1: return how == Narrowing::None || how == Narrowing::Any;
    case Codes::IQ4: case Codes::Int5: return how == Narrowing::Short;
    case Codes::Int8: case Codes::Int4: case Codes::Zero4: return how != Narrowing::None;
    case Codes::Zero8: return how == Narrowing::Any || how == Narrowing::Half;
    default: return how == Narrowing::Any;
  }
}

// Values of 2·L columns before their scale: even and odd ones where they are looked up, else the first
// half and the second one.
template <Codes kind>
struct ColumnValues {
  static constexpr bool looked_up = bits_of(kind) == 4;
  using Decoder = std::conditional_t<looked_up, Index<kind>, Numbers<kind>>;
  const Decoder decoder;
  __m512i table[2];
  INLINE ColumnValues(int64_t plane, int64_t high_plane) : decoder(plane, high_plane) {
    if constexpr (looked_up) {
      constexpr int more = codes_in(kind) > L ? L : 0;
      table[0] = narrowed(load<vf>(kLanes<kind, 0, 1>.of), load<vf>(kLanes<kind, more, 1>.of));
      if (codes_in(kind) > 2 * L) {
        table[1] = narrowed(load<vf>(kLanes<kind, 2 * L, 1>.of), load<vf>(kLanes<kind, 3 * L, 1>.of));
      }
    }
  }
  INLINE Pair get(__m512i codes, __m512i highs) const {
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

// The even and the odd ones of 2·L numbers, and back.
INLINE Pair parted(Pair p) {
  const vi even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  return {(vf)_mm512_permutex2var_ps((__m512)p.first, (__m512i)even, (__m512)p.second),
          (vf)_mm512_permutex2var_ps((__m512)p.first, (__m512i)(even + 1), (__m512)p.second)};
}
INLINE Pair joined(Pair p) {
  const vi first = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  return {(vf)_mm512_permutex2var_ps((__m512)p.first, (__m512i)first, (__m512)p.second),
          (vf)_mm512_permutex2var_ps((__m512)p.first, (__m512i)(first + 8), (__m512)p.second)};
}

template <Narrowing how>
INLINE Pair narrowed_and_back(Pair p) {
  if constexpr (how == Narrowing::None) return p;
  if constexpr (how == Narrowing::Short) return {rounded(p.first), rounded(p.second)};
  if constexpr (how == Narrowing::Half) p = {through_f16(p.first), through_f16(p.second)};
  return widened(narrowed(p.first, p.second));
}

// Rows of elements [first, end) of each quarter, which have one scale a quarter and column, onto the
// sums of columns [at, at + 2·L). scale, shift: of those columns, by quarter.
template <Codes kind, Narrowing how, int T>
INLINE void pass_columns(const Format& f, const ColumnValues<kind> (&values)[4],
                         const uint16_t* const (&codes)[4], const uint16_t* const (&highs)[4], int64_t rows,
                         int64_t ahead, const Pair (&scale)[4], const Pair (&shift)[4],
                         const float* const* h, int64_t place, vf (&sums)[T][2]) {
  for (int64_t i = 0; i < rows; i++) {
    soon(codes[0] + i * f.hidden + ahead);
    if (bits_of(kind) == 8) soon(codes[1] + i * f.hidden + ahead);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const __m512i upper = highs_of(kind) ? (__m512i)load<vu>(highs[j] + i * f.hidden) : __m512i{};
      const Pair value = values[j].get((__m512i)load<vu>(codes[j] + i * f.hidden), upper);
      const Pair weight = narrowed_and_back<how>({scaled_of<kind>(value.first, scale[j].first, shift[j].first),
                                                  scaled_of<kind>(value.second, scale[j].second, shift[j].second)});
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) {
        const vf factor = splat(h[t][place + 4 * i + j]);
        sums[t][0] = sums[t][0] + factor * weight.first;
        sums[t][1] = sums[t][1] + factor * weight.second;
      }
    }
  }
}

template <Codes kind, Narrowing how, int T>
void columns_of_codes(const Format& f, const uint16_t* record, int64_t first, int64_t rows, int64_t column,
                      int64_t n, const float* const* h, float* const* total) {
  constexpr bool looked_up = ColumnValues<kind>::looked_up;
  constexpr int64_t planes = 16 / bits_of(kind), high_planes = highs_of(kind) ? 16 / highs_of(kind) : 1;
  const Coding& c = f.matrix[DOWN];
  const int64_t quarter = f.width / 4, size = f.width / planes, high_size = f.width / high_planes;
  for (int64_t begin = first, end; begin < first + rows; begin = end) {
    end = first + rows;
    for (int64_t j = 0; j < 4; j++) {
      const int64_t row = begin + j * quarter;
      end = least(end, begin + c.group - row % c.group);
      if (highs_of(kind)) end = least(end, begin + high_size - row % high_size);
    }
    const auto of = [&](int64_t j) {
      const int64_t row = begin + j * quarter;
      return ColumnValues<kind>(row / size, row / high_size);
    };
    const ColumnValues<kind> values[4] = {of(0), of(1), of(2), of(3)};
    for (int64_t start = 0; start < n; start += kBlockScales) {
      const int64_t count = least(kBlockScales, n - start);
      float scales[4][kBlockScales], shifts[4][kBlockScales];
      for (int64_t j = 0; j < 4; j++) {
        column_scales(f, record, (begin + j * quarter) / c.group, column + start, count, scales[j], shifts[j]);
      }
      for (int64_t i = 0; i < count; i += 2 * L) {
        const int64_t at = start + i;
        Pair scale[4], shift[4];
        const uint16_t *codes[4], *highs[4];
        for (int j = 0; j < 4; j++) {
          const int64_t row = begin + j * quarter;
          codes[j] = record + (c.codes + row % size) * f.hidden + column + at;
          highs[j] = record + (c.highs + row % high_size) * f.hidden + column + at;
          float times = 1;
          if constexpr (!looked_up) times = Numbers<kind>::less;
          if (how == Narrowing::Short) times *= 0x1p16f;
          scale[j] = {load<vf>(scales[j] + i) * times, load<vf>(scales[j] + i + L) * times};
          if (looked_up) scale[j] = parted(scale[j]);
          shift[j] = Pair{};
          if (shift_of(kind) == Shift::None) continue;
          shift[j] = {load<vf>(shifts[j] + i), load<vf>(shifts[j] + i + L)};
          if (looked_up) shift[j] = parted(shift[j]);
        }
        vf sums[T][2];
        for (int t = 0; t < T; t++) {
          Pair p = {load<vf>(total[t] + at), load<vf>(total[t] + at + L)};
          if (!looked_up) p = joined(p);
          sums[t][0] = p.first, sums[t][1] = p.second;
        }
        // Columns behind these, or the next rows' first ones.
        const int64_t far = at + kBlockScales < n ? kBlockScales : rows * f.hidden + kBlockScales - n;
        pass_columns<kind, how, T>(f, values, codes, highs, end - begin, far, scale, shift, h,
                                   4 * (begin - first), sums);
        for (int t = 0; t < T; t++) {
          Pair p = {sums[t][0], sums[t][1]};
          if (!looked_up) p = parted(p);
          store(total[t] + at, p.first), store(total[t] + at + L, p.second);
        }
      }
    }
  }
}

void encoded_add(const Format& f, const uint16_t* record, int64_t first, int64_t rows, int64_t column,
                 int64_t n, const float*, const float* const* h, int64_t tokens, float* const* total) {
  const Narrowing how = narrowing_of(f.matrix[DOWN]);
  with_kind(f.matrix[DOWN].kind, [&](auto kind) {
    constexpr Codes codes = decltype(kind)::value;
    some_tokens(tokens, [&](auto t) {
      const Each<const float*> all(h, tokens);
      const Each<float*> totals(total, tokens);
      const auto with = [&](auto narrowing) {
        constexpr Narrowing mine = decltype(narrowing)::value;
        if constexpr (may_be<codes>(mine)) {
          columns_of_codes<codes, mine, t.value>(f, record, first, rows, column, n, all.of, totals.of);
        }
      };
      switch (how) {
        case Narrowing::None: return with(Constant<Narrowing, Narrowing::None>());
        case Narrowing::Short: return with(Constant<Narrowing, Narrowing::Short>());
        case Narrowing::Any: return with(Constant<Narrowing, Narrowing::Any>());
        case Narrowing::Half: return with(Constant<Narrowing, Narrowing::Half>());
      }
    });
  });
}

int64_t takes(const Format& f) {
  if (f.type != Type::BF16 || f.hidden % kPad || f.width % 4) return 0;
  for (const Coding& c : f.matrix) {
    bool known = false;
    with_kind(c.kind, [&](auto kind) {
      constexpr Codes codes = decltype(kind)::value;
      known = has_plane<codes>(c, f.type) && may_be<codes>(narrowing_of(c));
      const bool table = bits_of(codes) + highs_of(codes) <= 5;
      if (c.product == Rounding::F16 && !table) known = false;
      if (&c == f.matrix + DOWN) known &= f.width * highs_of(codes) % 16 == 0;
      else known &= Passes(f, c).fit(c);
    });
    if (!known) return 0;
  }
  return kTokens;
}

}  // namespace
}  // namespace moejax
