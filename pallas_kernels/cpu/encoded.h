// Rows of codes multiplied as they are decoded (Kernels::takes): a part of kernels.cc. Sums have the terms and the order of
// `decode` with `dots` or `add`, so their bits.
#pragma once

namespace moejax {
namespace {

#ifdef __AVX512BF16__
constexpr bool kConverts = true;  // whether an instruction makes numbers bfloat16
#else
constexpr bool kConverts = false;
#endif
constexpr int64_t kLine = 32;  // elements of a cache line
constexpr int64_t kRowScales = 256;  // groups of a row, at most
constexpr int64_t kBlockScales = 256;  // columns of down^T whose scales are widened at once
constexpr int64_t kElements = 32;  // rows of elements of one call of `encoded_add`

// How a product of code and scale becomes bfloat16: it is; by two operations (rounded); by conversion, from
// float16 or not.
enum class Narrowing { None, Short, Any, Half };

Narrowing narrowing_of(const Coding& c) {
  const bool few_bits = c.kind != Codes::E4M3 && c.kind != Codes::Zero8 && c.kind != Codes::Int6 &&
                        c.kind != Codes::Min4 && c.kind != Codes::Min5;
  if (c.product == Rounding::F16) return Narrowing::Half;
  if (few_bits && c.scale == ScaleType::E8M0) return Narrowing::None;
  if (kConverts) return few_bits && c.scale <= ScaleType::BF16 ? Narrowing::Short : Narrowing::Any;
  // Where products are exact, and finite.
  const int more = !c.super ? 0 : c.scale == ScaleType::I8 ? 7 : 8;
  const bool exact = bits_of(c.kind) + highs_of(c.kind) + 11 + more <= 24;
  const bool halves = c.super || c.scale == ScaleType::F16;
  return exact && halves && c.kind != Codes::E4M3 ? Narrowing::Short : Narrowing::Any;
}

// Of a kind, as files have it; records of other ones are decoded before their products.
template <Codes kind>
constexpr bool may_be(Narrowing how) {
  switch (kind) {
    case Codes::E2M1: return how == Narrowing::None || how == Narrowing::Any;
    case Codes::IQ4: case Codes::Int5: return how == Narrowing::Short;
    case Codes::Int8: case Codes::Int4: case Codes::Zero4: return how != Narrowing::None;
    case Codes::Zero8: return how != Narrowing::None && (how != Narrowing::Short || !kConverts);
    case Codes::E4M3: return how == Narrowing::Any;
    default: return how == (kConverts ? Narrowing::Any : Narrowing::Short);
  }
}

template <Codes kind, class F>
INLINE void with_narrowing(Narrowing how, F f) {
  const auto with = [&](auto narrowing) {
    if constexpr (may_be<kind>(decltype(narrowing)::value)) f(narrowing);
  };
  switch (how) {
    case Narrowing::None: return with(Constant<Narrowing, Narrowing::None>());
    case Narrowing::Short: return with(Constant<Narrowing, Narrowing::Short>());
    case Narrowing::Any: return with(Constant<Narrowing, Narrowing::Any>());
    case Narrowing::Half: return with(Constant<Narrowing, Narrowing::Half>());
  }
}

// The even and the odd ones of 2·L numbers.
INLINE Pair parted(Pair p) {
#if defined(__AVX512F__) && MOEJAX_LANES == 16
  const vi even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  return {(vf)_mm512_permutex2var_ps((__m512)p.first, (__m512i)even, (__m512)p.second),
          (vf)_mm512_permutex2var_ps((__m512)p.first, (__m512i)(even + 1), (__m512)p.second)};
#elif defined(__AVX2__) && MOEJAX_LANES == 8
  const __m256 even = _mm256_shuffle_ps((__m256)p.first, (__m256)p.second, 0x88);
  const __m256 odd = _mm256_shuffle_ps((__m256)p.first, (__m256)p.second, 0xdd);
  return {(vf)_mm256_permute4x64_pd((__m256d)even, 0xd8), (vf)_mm256_permute4x64_pd((__m256d)odd, 0xd8)};
#else
  Pair both;
  for (int64_t i = 0; i < L; i++) {
    const vf from = 2 * i < L ? p.first : p.second;
    both.first[i] = from[2 * i % L], both.second[i] = from[2 * i % L + 1];
  }
  return both;
#endif
}

}  // namespace
}  // namespace moejax
#ifdef __AVX512BF16__
#include "encoded512.h"
#else
#include "encoded_floats.h"
#endif
namespace moejax {
namespace {

// Kinds with scales of 16 weights, as files have them: only these are compiled so.
constexpr bool may_be_two(Codes kind) { return L == 16 && (kind == Codes::Int6 || kind == Codes::E2M1); }

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

template <Codes kind, bool two, Narrowing how, int T, int R>
INLINE void pass_rows(const Format& f, const Coding& c, const Passes& p, const uint16_t* const* codes,
                      const uint16_t* const* highs, const float* scales, const float* shifts,
                      const float* const* x, vf (&total)[T][R]) {
  constexpr int bits = bits_of(kind), planes = 16 / bits;
  const int64_t size = f.hidden * bits / 16;
  for (int64_t begin = 0, s = 0; begin < f.hidden; begin += p.stretch, s++) {
    const int64_t plane = begin / size;
    const Blocks<kind, two, how> blocks(plane, s, c.product == Rounding::F16);
    const auto add = [&](const auto& state, int r, int64_t at) {
      const RowWeights weights = blocks.get(state, codes[r] + at - plane * size, highs[r] + at - begin);
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) total[t][r] = add_products(total[t][r], weights, x[t], at);
    };
    int64_t group = begin / c.group;
    const auto state_of = [&](int r) {
      return blocks.set(scales + r * p.groups + group, shifts + r * p.groups + group);
    };
    // Asks for the next rows' lines, evenly. GCC drops a call of a function that does nothing else, so it is inlined.
    const auto ask = [&](int64_t at) __attribute__((always_inline)) {
      if (at % (kLine * planes)) return;
      for (int r = 0; r < R; r++) soon(codes[r] + R * size + at / planes);
    };
    if (two || p.span == 2 * L) {  // scales of one block each: none waits in a register
      for (int64_t at = begin; at < begin + p.stretch; at += 2 * L, group += two ? 2 : 1) {
        ask(at);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) add(state_of(r), r, at);
      }
      continue;
    }
    for (int64_t at = begin; at < begin + p.stretch; group++) {
      typename Blocks<kind, two, how>::State state[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) state[r] = state_of(r);
      for (const int64_t end = at + p.span; at < end; at += 2 * L) {
        ask(at);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) add(state[r], r, at);
      }
    }
  }
}

// x: of T tokens; y: of `tokens`.
template <Codes kind, bool two, Narrowing how, int T>
void rows_of_codes(const Format& f, const uint16_t* record, int matrix, int64_t first, int64_t count,
                   const float* const* x, int64_t tokens, float* y, int64_t stride) {
  constexpr int R = L == 16 || T == 1 ? 4 : 2;  // whose sums have room in registers
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
    pass_rows<kind, two, how, T, R>(f, c, p, codes, highs, scales, shifts, x, total);
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
  with_kind(c.kind, [&](auto kind) {
    constexpr Codes codes = decltype(kind)::value;
    some_tokens(tokens, [&](auto t) {
      const Each<const float*> all(x, tokens);
      const auto with = [&](auto how) {
        constexpr Narrowing mine = decltype(how)::value;
        if constexpr (may_be_two(codes)) {
          if (c.group == L) {
            return rows_of_codes<codes, true, mine, t.value>(f, record, matrix, first, rows, all.of, tokens, y, stride);
          }
        }
        rows_of_codes<codes, false, mine, t.value>(f, record, matrix, first, rows, all.of, tokens, y, stride);
      };
      if constexpr (kConverts) with(Constant<Narrowing, Narrowing::Any>());
      else with_narrowing<codes>(narrowing_of(c), with);
    });
  });
}

// ---- down^T

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
      const Pair value = values[j].get(codes[j] + i * f.hidden, highs[j] + i * f.hidden);
      const Pair weight = rounded_weights<kind, how>(value, scale[j], shift[j]);
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
  using Values = ColumnValues<kind>;
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
          scale[j] = Values::in_order({load<vf>(scales[j] + i), load<vf>(scales[j] + i + L)});
          scale[j] = {scale[j].first * Values::less, scale[j].second * Values::less};
          shift[j] = Pair{};
          if (shift_of(kind) != Shift::None) {
            shift[j] = Values::in_order({load<vf>(shifts[j] + i), load<vf>(shifts[j] + i + L)});
          }
          prepare<kind, how>(scale[j].first, shift[j].first);
          prepare<kind, how>(scale[j].second, shift[j].second);
        }
        vf sums[T][2];
        for (int t = 0; t < T; t++) {
          const Pair p = Values::sums_of({load<vf>(total[t] + at), load<vf>(total[t] + at + L)});
          sums[t][0] = p.first, sums[t][1] = p.second;
        }
        // Columns behind these, or the next rows' first ones.
        const int64_t far = at + kBlockScales < n ? kBlockScales : rows * f.hidden + kBlockScales - n;
        pass_columns<kind, how, T>(f, values, codes, highs, end - begin, far, scale, shift, h,
                                   4 * (begin - first), sums);
        for (int t = 0; t < T; t++) {
          const Pair p = Values::totals_of({sums[t][0], sums[t][1]});
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
      with_narrowing<codes>(how, [&](auto narrowing) {
        constexpr Narrowing mine = decltype(narrowing)::value;
        columns_of_codes<codes, mine, t.value>(f, record, first, rows, column, n, all.of, totals.of);
      });
    });
  });
}

int64_t takes(const Format& f) {
  if (f.type != Type::BF16 || f.hidden % kPad || f.width % 4) return 0;
  for (const Coding& c : f.matrix) {
    bool known = false;
    with_kind(c.kind, [&](auto kind) {
      constexpr Codes codes = decltype(kind)::value;
      known = may_be<codes>(narrowing_of(c));
#ifdef __AVX512BF16__
      known &= has_plane<codes>(c, f.type);
      const bool table = bits_of(codes) + highs_of(codes) <= 5;
      if (c.product == Rounding::F16 && !table) known = false;
#endif
      if (&c == f.matrix + DOWN) known &= f.width * highs_of(codes) % 16 == 0;
      else known &= Passes(f, c).fit(c);
    });
    if (!known) return 0;
  }
  return kTokens;
}

}  // namespace
}  // namespace moejax
