// Attention of rows of queries over a span of keys: included by kernels.cc, once for each instruction
// set. A key is read where it lies, by whole vectors, and multiplied by blocks of rows; then lanes are
// rows, which share the softmax, and of values columns. A word is a pair of bfloat16 where a processor
// multiplies pairs, else a float.
//
// Contract 1: a score is the sum of a vector's lanes, each of which has the words of a key in ascending
// order; a mass adds keys in halves; a column of a result is one sum over the words of the span's keys.
// What a row does not see has the weight 0, or is not there if a value is not finite, so no result knows
// how many rows share a block.
#pragma once
#include "seen.h"

namespace moejax {
namespace {

// Sums in flight hide the latency of a multiplication: 12 of 16 registers, or 16 of 32.
constexpr int kTileRows = 4;
#if MOEJAX_LANES == 16
constexpr int kTileVectors = 4;
#elif MOEJAX_LANES == 8
constexpr int kTileVectors = 3;
#else
constexpr int kTileVectors = 2;
#endif
constexpr int64_t kAttendedRows = 64;
constexpr int kBlockRows = L < 8 ? L : 8;  // whose scores are summed at once, at most
// Rows that meet values where they lie, and keys. Of AVX2, six rows make 12 sums of two vectors: with eight sums in
// flight each waits for the one before.
constexpr int kPlaceRows = L == 8 ? 6 : 8;
// Keys whose vectors are summed together by AVX2: between products their shuffles take the multipliers' turns.
constexpr int64_t kScored = 16;

template <Type kind>
constexpr bool in_pairs() {
#ifdef __AVX512BF16__
  return kind == Type::BF16;
#else
  return false;
#endif
}

// Steps of an Ahead, for one line each, so that eight rows ask evenly for as many lines as keys and values of 128
// columns have: half while there are scores, an eighth while they are softened, and the rest with the values.
constexpr int64_t score_steps(int64_t scores) { return scores / 2; }
constexpr int64_t soften_steps(int64_t scores) { return scores / 8; }
constexpr int64_t kValueSteps = 3;

// Words of values between kValueSteps. A word has a block of 2 · L columns, of one key or of two.
template <bool pairs>
constexpr int64_t words_of_steps() { return 64 / L / (pairs ? 2 : 1); }

template <bool pairs>
INLINE vf add_words(vf total, vu a, vu b) {
#ifdef __AVX512BF16__
  if constexpr (pairs) return (vf)_mm512_dpbf16_ps((__m512)total, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
#endif
  return total + as_float(a) * as_float(b);
}

// Weights [block][word][R rows].
template <int R, int64_t count>
struct Weights {
  static constexpr int64_t words = count;
  const uint32_t* bits;
  INLINE Weights from(int64_t row) const { return {bits + row / R * R * words + row % R}; }
  INLINE vu get(int64_t row, int64_t u) const { return (vu)splat(as_float(bits[u * R + row])); }
};

// What products multiply, [word][vector][L]: get(u, w) gives the C vectors of word u.
struct Panel {
  const uint32_t* words;
  int64_t vectors;
  template <int C>
  INLINE void get(int64_t u, vu* w) const {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) w[c] = load<vu>(words + (u * vectors + c) * L);
  }
};

// out[t][lane] += Σ_u a[t][u] · b[u][lane], u ascending, for T rows and C vectors of lanes. Not inlined, as
// score_rows: among others, sums do not stay in registers, and decode attention of AVX2 took 1.26 times as long.
template <bool pairs, int T, int C, class Rows, class Words>
__attribute__((noinline)) void product(const Rows& a, const Words& b, float* out, int64_t stride, Ahead& ahead) {
  vf total[T][C];
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) total[t][c] = load<vf>(out + t * stride + c * L);
  }
  constexpr int64_t some = words_of_steps<pairs>();
  for (int64_t first = 0; first < Rows::words; first += some) {
    ahead.step<kValueSteps>();
#pragma GCC unroll 4
    for (int64_t u = first; u < first + some; u++) {
      vu w[C];
      b.template get<C>(u, w);
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) total[t][c] = add_words<pairs>(total[t][c], w[c], a.get(t, u));
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(out + t * stride + c * L, total[t][c]);
  }
}

// Rows [first, last), T at once.
template <bool pairs, int T, int C, class Rows, class Words>
void products(int64_t first, int64_t last, const Rows& a, const Words& b, float* out, int64_t stride, Ahead& ahead) {
  for (int64_t row = first; row < last; row += T) {
    chosen<1, T>(last - row, [&](auto count) {
      product<pairs, count.value, C>(a.from(row), b, out + row * stride, stride, ahead);
    });
  }
}

// 2·L elements of a row from `at` on: one vector of bfloat16, or two of floats.
template <Type kind>
INLINE void words_of(const void* row, int64_t at, int64_t n, vu* out) {
  if constexpr (kind == Type::BF16) {
    if (at + 2 * L <= n) out[0] = load<vu>((const uint16_t*)row + at);
    else out[0] = load<vu>(End<kind>(row, at, n).bytes);
  } else {
    const Pair pair = pair_of<kind>(row, at, n);
    out[0] = (vu)pair.first, out[1] = (vu)pair.second;
  }
}

// Vectors of the next tile, of those that are left: no tile of one behind a whole one.
INLINE int64_t tile_of(int64_t left) {
  return kTileVectors > 2 && left == kTileVectors + 1 ? kTileVectors - 1 : least(left, kTileVectors);
}

// The sums of the lanes of L vectors, all in one order.
INLINE vf sums_of(const vf* from) {
#if defined(__AVX512F__) && MOEJAX_LANES == 16
  vf v[8];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    v[i / 2] = (vf)_mm512_unpacklo_ps((__m512)from[i], (__m512)from[i + 1]) +
               (vf)_mm512_unpackhi_ps((__m512)from[i], (__m512)from[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    v[i / 2] = (vf)_mm512_unpacklo_pd((__m512d)v[i], (__m512d)v[i + 1]) +
               (vf)_mm512_unpackhi_pd((__m512d)v[i], (__m512d)v[i + 1]);
  }
  const auto halves = [](vf a, vf b) {
    return (vf)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x88) + (vf)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xdd);
  };
  return halves(halves(v[0], v[1]), halves(v[2], v[3]));
#elif defined(__AVX2__) && MOEJAX_LANES == 8
  const auto pair = [](vf a, vf b) __attribute__((always_inline)) {
    return (vf)_mm256_blend_ps((__m256)a, (__m256)b, 0xcc) + (vf)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x4e);
  };
  const auto quad = [&](int i) __attribute__((always_inline)) {
    const __m256 a = (__m256)pair(from[i], from[i + 1]), b = (__m256)pair(from[i + 2], from[i + 3]);
    return (__m256)((vf)_mm256_shuffle_ps(a, b, 0x88) + (vf)_mm256_shuffle_ps(a, b, 0xdd));
  };
  const __m256 a = quad(0), b = quad(4);
  return (vf)_mm256_blend_ps(a, b, 0xf0) + (vf)_mm256_permute2f128_ps(a, b, 0x21);
#else
  vf sums;
  for (int i = 0; i < L; i++) sums[i] = sum(from[i]);
  return sums;
#endif
}

// Copies keys, and zeros for those that are not set and behind their ends.
template <Type kind>
void copy_keys(const AttendedSpan& s, const char** keys) {
  uint32_t* out = s.scratch;
  for (int64_t key = 0; key < kSpan; key++) {
    keys[key] = (const char*)out;
    for (int64_t at = 0; at < s.head_dim; at += 2 * L) {
      vu words[2] = {};
      if (key >= s.from && key < s.to) words_of<kind>(s.tokens[key] + s.key, at, s.head_dim, words);
      for (int part = 0; part < (kind == Type::BF16 ? 1 : 2); part++, out += L) store(out, words[part]);
    }
  }
}

// Scores [key][row] of T of R rows of queries with keys of whole vectors, K at once: those of a span, or of kScored
// keys as vectors whose lanes are to be summed.
template <Type kind, int K, int T, int R, class Score>
__attribute__((noinline)) void score_rows(const AttendedSpan& s, const char* const* tokens, const float* q,
                                          Score* scores, Ahead& ahead) {
  constexpr bool summed = std::is_same_v<Score, float>;
  static_assert(!summed || (K * T == L && T == R));
  constexpr int words = in_pairs<kind>() ? 1 : 2;  // vectors of 2 · L elements
  constexpr int held = L == 8 ? 1 : words;         // in registers, of which AVX2 has 16
  const int64_t width = s.q_width;
  for (int64_t first = 0; first < (summed ? kSpan : kScored); first += K, tokens += K, scores += K * R) {
    ahead.step<score_steps(K * T)>();
    vf total[K * T] = {};
    for (int64_t at = 0; at < s.head_dim; at += 2 * L) {
#pragma GCC unroll 2
      for (int from = 0; from < words; from += held) {
        const auto key = [&](int64_t k, int part) __attribute__((always_inline)) {
          const char* const row = tokens[k] + s.key;
          if (kind == Type::F32) return load<vu>((const float*)row + at + part * L);
          const vu both = load<vu>((const uint16_t*)row + at);
          return words == 1 ? both : part ? both & 0xffff0000u : both << 16;
        };
        // Loaded once: a compiler would make the load a part of each multiplication, and cores load no more vectors
        // than they multiply. AVX-512 took 1.08 times as long.
        const float* row = q + (words == 1 ? at / 2 : at);
        const auto query = [&](int part) __attribute__((always_inline)) {
          const vf word = load<vf>(row + part * L);
          return (vu)(words == 1 ? word : unfused(word));
        };
        // Rows or keys, of which there are fewer, stay in registers.
        if constexpr (T < K) {
          vu rows[T][held];
#pragma GCC unroll 16
          for (int r = 0; r < T; r++, row += width) {
#pragma GCC unroll 2
            for (int i = 0; i < held; i++) rows[r][i] = query(from + i);
          }
#pragma GCC unroll 16
          for (int k = 0; k < K; k++) {
#pragma GCC unroll 2
            for (int i = 0; i < held; i++) {
              const vu word = key(k, from + i);
#pragma GCC unroll 16
              for (int r = 0; r < T; r++) total[k * T + r] = add_words<words == 1>(total[k * T + r], word, rows[r][i]);
            }
          }
        } else {
          vu held_keys[K][held];
#pragma GCC unroll 16
          for (int k = 0; k < K; k++) {
#pragma GCC unroll 2
            for (int i = 0; i < held; i++) held_keys[k][i] = key(k, from + i);
          }
#pragma GCC unroll 16
          for (int r = 0; r < T; r++, row += width) {
#pragma GCC unroll 2
            for (int i = 0; i < held; i++) {
              const vu word = query(from + i);
#pragma GCC unroll 16
              for (int k = 0; k < K; k++) {
                total[k * T + r] = add_words<words == 1>(total[k * T + r], held_keys[k][i], word);
              }
            }
          }
        }
      }
    }
    if constexpr (summed) {
      store(scores, sums_of(total));
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < K * T; i++) scores[i / T * R + i % T] = total[i];
    }
  }
}

// Scores [key][row] of R rows.
template <Type kind, int R>
INLINE void score(const AttendedSpan& s, const float* q, float* scores, Ahead& ahead) {
  if constexpr (R > kPlaceRows) {
    constexpr int rest = R - kPlaceRows;
    for (int64_t first = 0; first < kSpan; first += kScored) {
      vf sums[kScored * R];
      score_rows<kind, 2, kPlaceRows, R>(s, s.tokens + first, q, sums, ahead);
      score_rows<kind, L / rest, rest, R>(s, s.tokens + first, q + kPlaceRows * s.q_width, sums + kPlaceRows, ahead);
      for (int64_t i = 0; i < kScored * R; i += L, scores += L) store(scores, sums_of(sums + i));
    }
  } else {
    score_rows<kind, L / R, R, R>(s, s.tokens, q, scores, ahead);
  }
}

// Pairs of the elements of two rows of bfloat16: of each 8 columns the first four in out[0].
INLINE void join_rows(vu a, vu b, vu* out) {
#ifdef __AVX512BF16__
  out[0] = (vu)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
  out[1] = (vu)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
#endif
}

// Word u of keys with 2·L columns from `at` on, in the order of totals. whole: all keys are set, and columns
// are whole vectors.
template <Type kind, bool whole>
INLINE void value_words(const AttendedSpan& s, int64_t u, int64_t at, vu* out) {
  const auto row = [&](int64_t key, vu* out) __attribute__((always_inline)) {
    out[0] = out[1] = vu{};
    if (whole || (key >= s.from && key < s.to)) {
      words_of<kind>(s.tokens[key] + s.value, at, whole ? at + 2 * L : s.value_dim, out);
    }
  };
  if constexpr (in_pairs<kind>()) {
    vu a[2], b[2];
    row(2 * u, a), row(2 * u + 1, b);
    join_rows(a[0], b[0], out);
  } else {
    row(u, out);
    if (kind == Type::BF16) out[1] = out[0] & 0xffff0000u, out[0] = out[0] << 16;
  }
}

// Columns of values from one on where they lie.
template <Type kind>
struct InPlace {
  const AttendedSpan& span;
  int64_t at;
  template <int C>
  INLINE void get(int64_t u, vu* w) const {
#pragma GCC unroll 2
    for (int c = 0; c < C; c += 2) value_words<kind, true>(span, u, at + c * L, w + c);
  }
};

// panel[word of keys][column] of L · vectors columns from one on.
template <Type kind, bool whole>
void lay_values(const AttendedSpan& s, int64_t first, int64_t vectors, uint32_t* panel) {
  for (int64_t u = 0; u < kSpan / (in_pairs<kind>() ? 2 : 1); u++) {
    for (int64_t at = first; at < first + vectors * L; at += 2 * L, panel += 2 * L) {
      vu words[2];
      value_words<kind, whole>(s, u, at, words);
      store(panel, words[0]), store(panel + L, words[1]);
    }
  }
}

// Numbers of R rows, in all lanes of a row: lanes i, i + R and so on are row i's.
template <int R>
INLINE vf lanes_of(const float* rows) {
#if defined(__AVX512F__) && MOEJAX_LANES == 16
  if constexpr (2 * R == L) return (vf)_mm512_broadcast_f32x8(_mm256_loadu_ps(rows));
#endif
  float lanes[L];
  for (int64_t i = 0; i < L; i++) lanes[i] = rows[i % R];
  return load<vf>(lanes);
}

// Joins lanes of a row, in halves, in all of them.
template <int R, class F>
INLINE vf join_lanes(vf v, const F& join) {
#if defined(__AVX512F__) && MOEJAX_LANES == 16
  if constexpr (2 * R == L) {  // in registers: what was stored in parts is late as a whole vector
    const __m512 joined = (__m512)join(v, (vf)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e));
    return (vf)_mm512_shuffle_f32x4(joined, joined, 0x44);
  }
#endif
  float lanes[L];
  store(lanes, v);
  for (int64_t half = L / 2; half >= R; half /= 2) {
    for (int64_t i = 0; i < half; i++) lanes[i] = join(lanes[i], lanes[i + half]);
  }
  return lanes_of<R>(lanes);
}

// Scales scores [key][row] of R rows from one on; those of keys that a row does not see become −∞. Gives
// a row's largest score, of `top` and these.
template <int R>
INLINE vf scale_scores(const AttendedSpan& s, int64_t row, bool whole, float* scores, vf top, Ahead& ahead) {
  constexpr int64_t K = L / R, chains = 4;
  const int64_t count = least(R, s.rows - row);
  vi key = {}, first = {}, end = {};
  for (int64_t i = 0; !whole && i < L; i++) {
    key[i] = (int32_t)(i / R);
    if (i % R < count) first[i] = s.first[row + i % R], end[i] = s.end[row + i % R];
  }
  vf best[chains];
  for (vf& b : best) b = top;
  for (int64_t i = 0; i < kSpan * R; i += chains * L) {
    ahead.step<soften_steps(chains * L) / 2>();
#pragma GCC unroll 4
    for (int64_t j = 0; j < chains; j++, key += (int32_t)K) {
      vf seen = unfused(load<vf>(scores + i + j * L) * s.scale);
      if (!whole) seen = ((key >= first) & (key < end)) ? seen : splat(-__builtin_inff());
      best[j] = seen > best[j] ? seen : best[j];
      store(scores + i + j * L, seen);
    }
  }
  const auto greater = [](auto a, auto b) { return b > a ? b : a; };
  return join_lanes<R>(greater(greater(best[0], best[1]), greater(best[2], best[3])), greater);
}

// Scores [key][row] of R rows become weights [word][row]. Gives their sums.
template <Type kind, int R>
INLINE vf weigh(Type type, vf top, float* scores, uint32_t* weights, Ahead& ahead) {
  constexpr int64_t all = kSpan * R, part = all / 4;
  void* const out = in_pairs<kind>() || type == Type::F16 ? (void*)scores : weights;
  vf sums[part / L];
  for (int64_t i = 0; i < part; i += L) {
    ahead.step<soften_steps(4 * L) / 2>();
    vf p[4];
#pragma GCC unroll 4
    for (int64_t j = 0; j < 4; j++) {
      p[j] = exponential_of_less(load<vf>(scores + i + j * part) - top);
      const vu bits = (vu)p[j], even = bits + 0x7fffu + ((bits >> 16) & 1u);
      store((float*)out + i + j * part, kind == Type::BF16 ? as_float(even & 0xffff0000u) : p[j]);
    }
    sums[i / L] = (p[0] + p[2]) + (p[1] + p[3]);
  }
  for (int64_t half = part / L / 2; half; half /= 2) {
    for (int64_t i = 0; i < half; i++) sums[i] = sums[i] + sums[i + half];
  }
  if (type == Type::F16) {
    uint16_t rounded[all];
    narrow(type, scores, all, rounded);
    widen(type, rounded, all, scores);
    memcpy(weights, scores, all * 4);
  }
  for (int64_t u = 0; in_pairs<kind>() && u < kSpan / 2; u++) {
    for (int64_t r = 0; r < R; r++) {
      weights[u * R + r] = as_bits(scores[2 * u * R + r]) >> 16 | as_bits(scores[(2 * u + 1) * R + r]);
    }
  }
  return join_lanes<R>(sums[0], [](auto a, auto b) { return a + b; });
}

// Scores [key][row] of R rows from one on become weights [word][row]; the rows' results so far shrink where
// their largest score grows.
template <Type kind, int R>
INLINE void soften(const AttendedSpan& s, int64_t row, bool whole, float* scores, uint32_t* weights, Ahead& ahead) {
  const int64_t count = least(R, s.rows - row);
  const auto lanes = [&](const float* rows) __attribute__((always_inline)) {
    if (count == R) return lanes_of<R>(rows + row);
    float some[R] = {};
    memcpy(some, rows + row, count * 4);
    return lanes_of<R>(some);
  };
  const auto keep = [&](vf of, float* rows) __attribute__((always_inline)) {
    // One store, of a size that is known, is all that the next span's load waits for.
    if (count == R) memcpy(rows + row, &of, R * 4);
    else memcpy(rows + row, &of, count * 4);
  };
  const vf before = lanes(s.top), top = scale_scores<R>(s, row, whole, scores, before, ahead);
  const vf safe = top == -__builtin_inff() ? vf{} : top;
  const vf more = weigh<kind, R>(s.type, safe, scores, weights, ahead);
  const vf shrink = top == before ? splat(1) : exponential_of_less(before - safe);
  keep(top, s.top), keep(unfused(lanes(s.mass) * shrink) + more, s.mass);
  for (int64_t i = 0; i < count; i++) {
    if (shrink[i] == 1) continue;
    float* total = s.total + (row + i) * s.width;
    for (int64_t at = 0; at < s.width; at += L) store(total + at, load<vf>(total + at) * shrink[i]);
  }
}

// R rows of a block. A panel has a tile or two of vectors: it stays in the first cache while all rows pass.
template <Type kind, int R>
void attend_rows(const AttendedSpan& s) {
  constexpr bool pairs = in_pairs<kind>();
  constexpr int64_t words = pairs ? kSpan / 2 : kSpan, block = 2 * L;
  const int64_t columns = (s.value_dim + block - 1) / block * block;
  const bool set = s.from == 0 && s.to == kSpan, whole_keys = set && s.head_dim % block == 0;
  const bool whole_values = set && columns == s.value_dim;
  // 0 times such a value is NaN: rows must not meet values that they do not see.
  const bool all = seen_by_all(s), alone = !all && !is_finite<kind>(s);
  const bool in_place = whole_values && !alone && s.rows <= R;
  const int64_t blocks = (s.rows + R - 1) / R, tile_rows = (s.rows + kTileRows - 1) / kTileRows;
  const int64_t tiles = in_place ? columns / block : tile_rows * (columns / L / kTileVectors);
  const int64_t scores_all = blocks * kSpan * R;
  Ahead ahead(s, score_steps(scores_all) + soften_steps(scores_all) +
                     tiles * words / words_of_steps<pairs>() * kValueSteps);
  const char* copied[kSpan];
  AttendedSpan copy;
  if (!whole_keys) copy_keys<kind>(s, copied), copy = s, copy.tokens = copied, copy.key = 0;
  const AttendedSpan& keys = whole_keys ? s : copy;
  uint32_t weights[kAttendedRows * words];
  for (int64_t row = 0; row < s.rows; row += R) {
    alignas(64) float scores[kSpan * R];
    score<kind, R>(keys, s.q + row * s.q_width, scores, ahead);
    soften<kind, R>(s, row, set && all, scores, weights + row * words, ahead);
  }
  const Weights<R, words> p = {weights};
  if (in_place) {
    for (int64_t at = 0; at < columns; at += block) {
      const InPlace<kind> values = {s, at};
      const int64_t last = least(s.rows, kPlaceRows);
      products<pairs, R < kPlaceRows ? R : kPlaceRows, 2>(0, last, p, values, s.total + at, s.width, ahead);
    }
    if constexpr (R > kPlaceRows) {  // few rows: more columns at once
      constexpr int first = kPlaceRows, rest = R - first;
      for (int64_t at = 0; at < columns; at += 2 * block) {
        const InPlace<kind> values = {s, at};
        if (at + block == columns) products<pairs, rest, 2>(first, s.rows, p, values, s.total + at, s.width, ahead);
        else products<pairs, rest, 4>(first, s.rows, p, values, s.total + at, s.width, ahead);
      }
    }
    return;
  }
  const int64_t rows = alone ? 1 : s.rows;
  for (int64_t row = 0; row < s.rows; row += rows) {
    AttendedSpan seen = s;
    if (alone) seen.from = s.first[row], seen.to = s.end[row];
    for (int64_t at = 0, vectors; at < columns; at += vectors * L) {
      vectors = least(2 * kTileVectors, (columns - at) / L);
      if (whole_values && !alone) lay_values<kind, true>(seen, at, vectors, s.scratch);
      else lay_values<kind, false>(seen, at, vectors, s.scratch);
      for (int64_t v = 0, some; v < vectors; v += some) {
        some = tile_of(vectors - v);
        chosen<1, kTileVectors>(some, [&](auto count) {
          const Panel panel = {s.scratch + v * L, vectors};
          products<pairs, R < kTileRows ? R : kTileRows, count.value>(row, row + rows, p, panel, s.total + at + v * L,
                                                                     s.width, ahead);
        });
      }
    }
  }
}

// Sums of a later split are added to those of rows. Not inlined: one code, one order of roundings.
__attribute__((noinline)) void fold(int64_t rows, int64_t width, const AttendedSums& onto,
                                    const AttendedSums& more) {
  for (int64_t first = 0, count; first < rows; first += count) {
    count = least(L, rows - first);
    float kept[2 * L] = {}, *added = kept + L;
    for (int64_t i = 0; i < count; i++) {
      float& top = onto.top[first + i];
      const float mine = top, other = more.top[first + i];
      top = other > mine ? other : mine;
      const float safe = top == -__builtin_inff() ? 0 : top;
      kept[i] = mine - safe, added[i] = other - safe;
    }
    store(kept, exponential(load<vf>(kept))), store(added, exponential(load<vf>(added)));
    for (int64_t i = 0; i < count; i++) {
      float* total = onto.total + (first + i) * width;
      const float *others = more.total + (first + i) * width, a = kept[i], b = added[i];
      for (int64_t at = 0; at < width; at += L) {
        store(total + at, unfused(load<vf>(total + at) * a) + load<vf>(others + at) * b);
      }
      float& mass = onto.mass[first + i];
      mass = unfused(mass * a) + more.mass[first + i] * b;
    }
  }
}

// A row's total in the order of columns.
void attended(Type kind, const float* total, int64_t n, float* out) {
  if (kind != Type::BF16 || !in_pairs<Type::BF16>()) return unpack(kind, total, n, out);
  for (int64_t c = 0; c < n; c++) {
    const int64_t at = c / (2 * L) * (2 * L), i = c - at;
    out[c] = total[at + i / 8 * 4 + i % 4 + i / 4 % 2 * L];
  }
}

void pack_queries(Type type, const void* const* rows, int64_t count, int64_t n, float* out) {
  const int64_t width = padded(n), whole = (count + kBlockRows - 1) / kBlockRows * kBlockRows;
  for (int64_t i = 0; i < count; i++) pack(type, rows[i], n, out + i * width);
  memset(out + count * width, 0, (whole - count) * width * 4);
}

template <Type kind>
void attend_as(const AttendedSpan& s) {
  if (s.rows == 1) attend_rows<kind, 1>(s);
  else if (s.rows == 2) attend_rows<kind, 2>(s);
  else if (s.rows <= 4) attend_rows<kind, 4>(s);
  else attend_rows<kind, kBlockRows>(s);
}

int64_t attended_rows(Type) { return kAttendedRows; }

void attend(const AttendedSpan& s) {
  if (kind_of(s.type) == Type::BF16) attend_as<Type::BF16>(s);
  else attend_as<Type::F32>(s);
}

}  // namespace
}  // namespace moejax
