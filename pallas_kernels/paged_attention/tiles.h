// Attention of rows of queries over a span of keys: included by kernels.cc, once for each instruction
// set. Keys are turned, so that lanes are keys, and each word of a query meets all of them; of values
// lanes are columns. A word is a pair of bfloat16 where a processor multiplies pairs, else a float.
//
// Contract 1: a score is one sum over the words of a key in ascending order, a column of a result one
// over the words of the span's keys. What a row does not see has the weight 0, or is not there if a
// value is not finite, so no result knows how many rows share a tile.
#pragma once

namespace moejax {
namespace {

constexpr int kTileRows = 4;
#if MOEJAX_LANES == 16
constexpr int kTileVectors = 4;
#else
constexpr int kTileVectors = 2;
#endif

template <Type kind>
constexpr bool in_pairs() {
#ifdef __AVX512BF16__
  return kind == Type::BF16;
#else
  return false;
#endif
}

template <bool pairs>
INLINE vf add_word(vf total, vu w, uint32_t word) {
#ifdef __AVX512BF16__
  if constexpr (pairs) {
    return (vf)_mm512_dpbf16_ps((__m512)total, (__m512bh)(__m512i)w,
                                (__m512bh)_mm512_set1_epi32((int)word));
  }
#endif
  return total + as_float(w) * splat(as_float(word));
}

// Asks for lines of rows [at, end), some at each step.
struct Ahead {
  const void* const* rows;
  int64_t at, end, bytes, each, place = 0;
  Ahead(const void* const* all, int64_t first, int64_t last, int64_t size, int64_t steps)
      : rows(all), at(first), end(all ? last : first), bytes(size),
        each(((last - first) * ((size + 63) / 64) + steps - 1) / steps) {}
  INLINE void step() {
    if (at == end) return;
    for (int64_t i = 0; i < each && at < end; i++) {
      __builtin_prefetch((const char*)rows[at] + place, 0, 2);
      place += 64;
      if (place >= bytes) place = 0, at++;
    }
  }
};

// out[t][lane] += Σ_u a[t][u] · b[u][lane], u ascending, for T rows and C vectors of lanes.
template <bool pairs, int T, int C>
INLINE void product(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                    int64_t words, float* out, int64_t stride, bool onto, Ahead& ahead) {
  vf total[T][C];
  for (int t = 0; t < T; t++) {
    for (int c = 0; c < C; c++) total[t][c] = onto ? load<vf>(out + t * stride + c * L) : vf{};
  }
  for (int64_t u = 0; u < words; u++, b += b_stride) {
    ahead.step();
    vu w[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) w[c] = load<vu>(b + c * L);
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) total[t][c] = add_word<pairs>(total[t][c], w[c], a[t * a_stride + u]);
    }
  }
  for (int t = 0; t < T; t++) {
    for (int c = 0; c < C; c++) store(out + t * stride + c * L, total[t][c]);
  }
}

template <bool pairs>
void products(int64_t rows, const uint32_t* a, int64_t a_stride, const uint32_t* b,
              int64_t b_stride, int64_t words, int64_t lanes, float* out, int64_t stride, bool onto,
              Ahead& ahead) {
  for (int64_t t = 0; t < rows; t += kTileRows) {
    chosen<1, kTileRows>(rows - t, [&](auto count) {
      constexpr int T = count.value;
      int64_t at = 0;
      for (; at + kTileVectors * L <= lanes; at += kTileVectors * L) {
        product<pairs, T, kTileVectors>(a + t * a_stride, a_stride, b + at, b_stride, words,
                                        out + t * stride + at, stride, onto, ahead);
      }
      for (; at < lanes; at += L) {
        product<pairs, T, 1>(a + t * a_stride, a_stride, b + at, b_stride, words,
                             out + t * stride + at, stride, onto, ahead);
      }
    });
  }
}

// L vectors of words, turned.
INLINE void turn(vu* v) {
#if defined(__AVX512F__) && MOEJAX_LANES == 16
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
  for (int s = 1; s < 16; s *= 2) {
    const __mmask16 high = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(s));
    const __m512i first = _mm512_mask_add_epi32(lane, high, lane, _mm512_set1_epi32(16 - s));
    const __m512i second =
        _mm512_mask_add_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(s)), high, lane, _mm512_set1_epi32(16));
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      if (i & s) continue;
      const __m512i a = (__m512i)v[i], b = (__m512i)v[i + s];
      v[i] = (vu)_mm512_permutex2var_epi32(a, first, b);
      v[i + s] = (vu)_mm512_permutex2var_epi32(a, second, b);
    }
  }
#elif defined(__AVX2__) && MOEJAX_LANES == 8
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44), b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    v[i] = (vu)_mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    v[i + 4] = (vu)_mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
#else
  vu out[L] = {};
  for (int64_t i = 0; i < L; i++) {
    for (int64_t j = 0; j < L; j++) out[j][i] = v[i][j];
  }
  for (int64_t i = 0; i < L; i++) v[i] = out[i];
#endif
}

// Words [at, at + 2·L elements) of a row as vectors: one of pairs, or two of floats.
template <Type kind>
INLINE void words_of(const void* row, int64_t at, int64_t n, vu* out) {
  if constexpr (in_pairs<kind>()) {
    if (at + 2 * L <= n) out[0] = load<vu>((const uint16_t*)row + at);
    else out[0] = load<vu>(End<kind>(row, at, n).bytes);
  } else {
    const Pair pair = pair_of<kind>(row, at, n);
    out[0] = (vu)pair.first, out[1] = (vu)pair.second;
  }
}

// panel[word][key] of a span. Returns how many words a key has.
template <Type kind>
int64_t turn_keys(const AttendedSpan& s, uint32_t* panel) {
  constexpr int parts = in_pairs<kind>() ? 1 : 2;
  int64_t word = 0;
  for (int64_t at = 0; at < s.head_dim; at += 2 * L, word += parts * L) {
    for (int64_t key = 0; key < kSpan; key += L) {
      vu v[2][L];
      for (int64_t i = 0; i < L; i++) {
        vu mine[2] = {};
        if (key + i >= s.from && key + i < s.to) words_of<kind>(s.keys[key + i], at, s.head_dim, mine);
        for (int part = 0; part < parts; part++) v[part][i] = mine[part];
      }
      for (int part = 0; part < parts; part++) {
        turn(v[part]);
        for (int64_t i = 0; i < L; i++) store(panel + (word + part * L + i) * kSpan + key, v[part][i]);
      }
    }
  }
  return word;
}

// panel[word of keys][column], the columns in the order of totals.
template <Type kind>
void lay_values(const AttendedSpan& s, int64_t columns, uint32_t* panel) {
  const auto row = [&](int64_t key, int64_t at, vu* out) {
    out[0] = out[1] = vu{};
    if (key >= s.from && key < s.to) words_of<kind>(s.values[key], at, s.value_dim, out);
  };
  constexpr int step = in_pairs<kind>() ? 2 : 1;
  for (int64_t key = 0; key < kSpan; key += step, panel += columns) {
    for (int64_t at = 0; at < columns; at += 2 * L) {
      vu a[2], b[2];
      row(key, at, a);
      if constexpr (in_pairs<kind>()) {
        row(key + 1, at, b);
        store(panel + at, (a[0] & 0xffffu) | (b[0] << 16));
        store(panel + at + L, (a[0] >> 16) | (b[0] & 0xffff0000u));
      } else {
        store(panel + at, a[0]), store(panel + at + L, a[1]);
      }
    }
  }
}

// Whether no bfloat16 (pairs) or float of a panel is infinite or NaN.
template <bool pairs>
bool is_finite(const uint32_t* panel, int64_t words) {
  constexpr uint32_t low = 0x7f80u, high = 0x7f800000u;
  for (int64_t i = 0; i < words; i++) {
    if ((panel[i] & high) == high || (pairs && (panel[i] & low) == low)) return false;
  }
  return true;
}

// Whether all rows see all keys of the span.
INLINE bool seen_by_all(const AttendedSpan& s) {
  for (int64_t i = 0; i < s.rows; i++) {
    if (s.first[i] > s.from || s.end[i] < s.to) return false;
  }
  return true;
}

typedef uint16_t vs __attribute__((vector_size(2 * MOEJAX_LANES)));

// A row's scores become weights, as words; its result so far shrinks where the largest grows.
template <bool pairs>
INLINE void soften(const AttendedSpan& s, int64_t row, float* scores) {
  const int32_t first = s.first[row], end = s.end[row];
  vi lane;
  for (int i = 0; i < L; i++) lane[i] = i;
  const float before = s.top[row];
  vf best = splat(before), part = {};
  for (int64_t i = 0; i < kSpan; i += L) {
    const vi key = lane + (int32_t)i;
    const vf score = load<vf>(scores + i) * s.scale;
    const vf seen = (key >= first) & (key < end) ? score : splat(-__builtin_inff());
    best = seen > best ? seen : best;
    store(scores + i, seen);
  }
  float top = best[0];
  for (int i = 1; i < L; i++) top = best[i] > top ? best[i] : top;
  const float safe = top == -__builtin_inff() ? 0 : top;
  for (int64_t i = 0; i < kSpan; i += L) {
    const vf p = exponential(load<vf>(scores + i) - safe);
    part = part + p;
    if (s.type == Type::BF16) {
      const vu bits = (vu)p, even = bits + 0x7fffu + ((bits >> 16) & 1u);
      if constexpr (pairs) store((uint16_t*)scores + i, __builtin_convertvector(even >> 16, vs));
      else store(scores + i, as_float(even & 0xffff0000u));
    } else {
      store(scores + i, p);
    }
  }
  if (s.type == Type::F16) {
    uint16_t rounded[kSpan];
    narrow(s.type, scores, kSpan, rounded);
    widen(s.type, rounded, kSpan, scores);
  }
  if (top != before) {
    const float shrink = exponential(splat(before - safe))[0];
    float* total = s.total + row * s.width;
    for (int64_t i = 0; i < s.width; i += L) store(total + i, load<vf>(total + i) * shrink);
    s.mass[row] *= shrink, s.top[row] = top;
  }
  s.mass[row] += sum(part);
}

template <Type kind>
void attend_as(const AttendedSpan& s) {
  constexpr bool pairs = in_pairs<kind>();
  constexpr int64_t kAtOnce = 16, size = kind == Type::BF16 ? 2 : 4;
  const int64_t columns = (s.value_dim + 2 * L - 1) / (2 * L) * (2 * L);
  uint32_t *keys = s.scratch, *values = keys + kSpan * padded(s.head_dim);
  const int64_t words = turn_keys<kind>(s, keys);
  lay_values<kind>(s, columns, values);
  const int64_t tiles = (s.rows + kTileRows - 1) / kTileRows;
  Ahead next_keys(s.next_keys, s.next_from, s.next_to, s.head_dim * size,
                  tiles * words * (kSpan / (kTileVectors * L)));
  Ahead next_values(s.next_values, s.next_from, s.next_to, s.value_dim * size,
                    tiles * (pairs ? kSpan / 2 : kSpan) * ((columns + kTileVectors * L - 1) / (kTileVectors * L)));
  alignas(64) float scores[kAtOnce * kSpan];
  // 0 times such a value is NaN: rows must not meet values that they do not see.
  const bool alone = !seen_by_all(s) && !is_finite<pairs>(values, (pairs ? kSpan / 2 : kSpan) * columns);
  const int64_t at_once = alone ? 1 : kAtOnce;
  for (int64_t row = 0; row < s.rows; row += at_once) {
    const int64_t count = least(at_once, s.rows - row);
    if (alone) {
      AttendedSpan own = s;
      own.from = s.first[row], own.to = s.end[row];
      lay_values<kind>(own, columns, values);
    }
    products<pairs>(count, (const uint32_t*)(s.q + row * s.q_width), s.q_width, keys, kSpan, words,
                    kSpan, scores, kSpan, false, next_keys);
    for (int64_t i = 0; i < count; i++) {
      if (s.first[row + i] < s.end[row + i]) soften<pairs>(s, row + i, scores + i * kSpan);
      else memset(scores + i * kSpan, 0, kSpan * 4);
    }
    products<pairs>(count, (const uint32_t*)scores, kSpan, values, columns,
                    pairs ? kSpan / 2 : kSpan, columns, s.total + row * s.width, s.width, true,
                    next_values);
  }
}

void attend(const AttendedSpan& s) {
  if (kind_of(s.type) == Type::BF16) attend_as<Type::BF16>(s);
  else attend_as<Type::F32>(s);
}

}  // namespace
}  // namespace moejax
