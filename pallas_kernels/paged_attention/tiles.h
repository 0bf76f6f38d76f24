// Attention of rows of queries over a span of keys: included by kernels.cc, once for each instruction
// set. Keys are turned, so that lanes are keys, and each word of a query meets all of them; of values
// lanes are columns. A word is a pair of bfloat16 where a processor multiplies pairs, else a float.
//
// Contract 1: a score is one sum over the words of a key in ascending order, a column of a result one
// over the words of the span's keys. What a row does not see has the weight 0, or is not there if a
// value is not finite, so no result knows how many rows share a tile.
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
constexpr int64_t kFewRows = 8;  // that pass a panel at once
constexpr int64_t kFewWidth = 128;  // numbers of a query that the compiler counts on then
constexpr int kStep = 4;  // words that a tile passes between two steps of an Ahead
// While a row's scores become weights, and while some keys of few rows turn.
constexpr int kSoftenSteps = 2, kTurnSteps = 4;

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

// Asks for lines of rows, some at each step of products with panels in the first cache. That cache has room
// for few requests: of more, as while keys turn, the processor forgets some.
struct Ahead {
  const void* const* rows;
  int64_t at = 0, end, bytes, each, place = 0;
  Ahead(const void* const* all, int64_t count, int64_t size, int64_t steps)
      : rows(all), end(count), bytes(size), each((count * ((size + 63) / 64) + steps - 1) / steps) {}
  INLINE void ask() {
    __builtin_prefetch((const char*)rows[at] + place, 0, 3);
    place += 64;
    if (place >= bytes) place = 0, at++;
  }
  INLINE void step() {
    if (at == end) return;
    for (int64_t i = 0; i < each && at < end; i++) ask();
  }
  // A kStep-th of a step.
  INLINE void step(int64_t part) {
    for (int64_t i = part; i < each && at < end; i += kStep) ask();
  }
};

// What products multiply, [word][vector][L]: get(u, w) gives the C vectors of word u, at most `most`; `rows`
// pass at once. few: rows, so that memory is the limit, and is asked for a few lines at a time.
template <bool few>
struct Panel {
  static constexpr int most = few ? 2 : kTileVectors, rows = few ? kFewRows : kTileRows;
  static constexpr bool fine = few;
  const uint32_t* words;
  int64_t vectors;
  INLINE Panel from(int64_t vector) const { return {words + vector * L, vectors}; }
  template <int C>
  INLINE void get(int64_t u, vu* w) const {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) w[c] = load<vu>(words + (u * vectors + c) * L);
  }
};

// a [row][word], words [0, to) of which count.
struct Factors {
  const uint32_t* words;
  int64_t to, stride;
};

// With a stride that the compiler knows: eight rows need one register then.
template <int64_t size>
struct Dense {
  const uint32_t* words;
  int64_t to;
  static constexpr int64_t stride = size;
};

// out[t][lane] += Σ_u a[t][u] · b[u][lane], u ascending, for T rows and C vectors of lanes.
template <bool pairs, int T, int C, class Rows, class Words>
INLINE void product(const Rows& a, int64_t row, const Words& b, float* out, int64_t stride, bool onto,
                    Ahead& ahead) {
  const uint32_t* words = a.words + row * a.stride;
  const int64_t a_stride = a.stride, to = a.to;
  vf total[T][C];
  for (int t = 0; t < T; t++) {
    for (int c = 0; c < C; c++) total[t][c] = onto ? load<vf>(out + t * stride + c * L) : vf{};
  }
  const auto add = [&](int64_t u) __attribute__((always_inline)) {
    vu w[C];
    b.template get<C>(u, w);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) total[t][c] = add_word<pairs>(total[t][c], w[c], words[t * a_stride + u]);
    }
  };
  int64_t u = 0;
  for (; u + kStep <= to; u += kStep) {
    if (!Words::fine) ahead.step();
#pragma GCC unroll 4
    for (int i = 0; i < kStep; i++) {
      if (Words::fine) ahead.step(i);
      add(u + i);
    }
  }
  for (; u < to; u++) add(u);
  for (int t = 0; t < T; t++) {
    for (int c = 0; c < C; c++) store(out + t * stride + c * L, total[t][c]);
  }
}

// Vectors of the next tile, of those that are left: no tile of one behind a whole one.
INLINE int64_t tile_of(int64_t left, int64_t most) {
  return most > 2 && left == most + 1 ? most - 1 : least(left, most);
}

// Steps of an Ahead while some rows pass some lanes.
template <class Words>
INLINE int64_t steps_of(int64_t rows, int64_t words, int64_t lanes) {
  const int64_t tiles = (lanes / L + Words::most - 1) / Words::most;
  return (rows + Words::rows - 1) / Words::rows * tiles * (words / kStep);
}

// Some vectors of lanes, and all rows.
template <bool pairs, class Rows, class Words>
void products(int64_t rows, const Rows& a, const Words& b, int64_t vectors, float* out, int64_t stride,
              bool onto, Ahead& ahead) {
  for (int64_t v = 0, tile; v < vectors; v += tile) {
    tile = tile_of(vectors - v, Words::most);
    chosen<1, Words::most>(tile, [&](auto lanes) {
      constexpr int C = lanes.value;
      for (int64_t t = 0; t < rows; t += Words::rows) {
        chosen<1, Words::rows>(rows - t, [&](auto count) {
          product<pairs, count.value, C>(a, t, b.from(v), out + t * stride + v * L, stride, onto, ahead);
        });
      }
    });
  }
}

// L vectors of words, turned: lane i of all, in vector i.
template <class V>
INLINE void turn(V* v) {
#if defined(__AVX512F__) && MOEJAX_LANES == 16
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32((__m512i)v[i], (__m512i)v[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32((__m512i)v[i], (__m512i)v[i + 1]);
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
      const __m512i upper = half(j), lower = half(8 + j);
      v[4 * odd + j] = (V)_mm512_shuffle_i32x4(upper, lower, 0x88);
      v[4 * odd + 8 + j] = (V)_mm512_shuffle_i32x4(upper, lower, 0xdd);
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
    v[i] = (V)_mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    v[i + 4] = (V)_mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
#else
  vu out[L] = {};
  for (int64_t i = 0; i < L; i++) {
    for (int64_t j = 0; j < L; j++) out[j][i] = v[i][j];
  }
  for (int64_t i = 0; i < L; i++) v[i] = out[i];
#endif
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

// panel[word][key] of L · vectors keys of a span, from one on. whole: all keys are set, and their words
// are whole vectors.
template <Type kind, bool whole>
void turn_keys(const AttendedSpan& s, int64_t first, int64_t vectors, uint32_t* panel, Ahead& ahead) {
  constexpr int parts = kind == Type::BF16 ? 1 : 2;
  for (int64_t key = first; key < first + vectors * L; key += L) {
    const void* rows[L];
    for (int64_t i = 0; i < L; i++) {
      rows[i] = whole || (key + i >= s.from && key + i < s.to) ? s.keys[key + i] : nullptr;
    }
    uint32_t* out = panel + key - first;
    for (int64_t at = 0; at < s.head_dim; at += 2 * L) {
      vu v[2][L];
      if (s.rows < kTileRows) {  // most of the time goes here
        for (int i = 0; i < kTurnSteps; i++) ahead.step();
      }
      for (int64_t i = 0; i < L; i++) {
        vu mine[2] = {};
        if (whole || rows[i]) words_of<kind>(rows[i], at, whole ? at + 2 * L : s.head_dim, mine);
        for (int part = 0; part < parts; part++) v[part][i] = mine[part];
      }
      for (int part = 0; part < parts; part++) {
        turn(v[part]);
        if constexpr (kind == Type::BF16 && !in_pairs<kind>()) {
          // Parted behind the turn: half the turns.
          for (int64_t i = 0; i < L; i++) {
            store(out + i * vectors * L, v[part][i] << 16);
            store(out + (L + i) * vectors * L, v[part][i] & 0xffff0000u);
          }
          out += 2 * L * vectors * L;
        } else {
          for (int64_t i = 0; i < L; i++, out += vectors * L) store(out, v[part][i]);
        }
      }
    }
  }
}

// Pairs of the elements of two rows of bfloat16: of each 8 columns the first four in out[0].
INLINE void join_rows(vu a, vu b, vu* out) {
#ifdef __AVX512BF16__
  out[0] = (vu)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
  out[1] = (vu)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
#endif
}

// panel[word of keys][column] of L · vectors columns from one on, in the order of totals. whole: all keys
// are set, and columns are whole vectors.
template <Type kind, bool whole>
void lay_values(const AttendedSpan& s, int64_t first, int64_t vectors, uint32_t* panel) {
  const auto row = [&](int64_t key, int64_t at, vu* out) {
    out[0] = out[1] = vu{};
    if (whole || (key >= s.from && key < s.to)) {
      words_of<kind>(s.values[key], at, whole ? at + 2 * L : s.value_dim, out);
    }
  };
  for (int64_t key = 0; key < kSpan; key += in_pairs<kind>() ? 2 : 1) {
    for (int64_t at = first; at < first + vectors * L; at += 2 * L, panel += 2 * L) {
      vu a[2], b[2];
      row(key, at, a);
      if constexpr (in_pairs<kind>()) {
        row(key + 1, at, b);
        join_rows(a[0], b[0], a);
      } else if constexpr (kind == Type::BF16) {
        a[1] = a[0] & 0xffff0000u, a[0] = a[0] << 16;
      }
      store(panel, a[0]), store(panel + L, a[1]);
    }
  }
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
  const bool whole = first <= 0 && end >= kSpan;
  for (int64_t i = 0; i < kSpan; i += L) {
    const vi key = lane + (int32_t)i;
    vf seen = load<vf>(scores + i) * s.scale;
    if (!whole) seen = ((key >= first) & (key < end)) ? seen : splat(-__builtin_inff());
    best = seen > best ? seen : best;
    store(scores + i, seen);
  }
  const float top = joined(best, [](auto a, auto b) { return b > a ? b : a; });
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

// A panel has a tile or two of vectors: it stays in the first cache while all rows pass.
template <Type kind>
void attend_as(const AttendedSpan& s) {
  constexpr bool pairs = in_pairs<kind>();
  constexpr int64_t kAtOnce = 64;
  constexpr int64_t weights = pairs ? kSpan / 2 : kSpan;  // words
  const auto whole = [](int64_t n) { return (n + 2 * L - 1) / (2 * L) * (2 * L); };
  const int64_t columns = whole(s.value_dim), words = whole(s.head_dim) / (pairs ? 2 : 1);
  const bool set = s.from == 0 && s.to == kSpan, whole_keys = set && s.head_dim % (2 * L) == 0;
  const bool whole_values = set && columns == s.value_dim;
  const bool few = pairs && s.rows <= kFewRows, few_wide = few && s.q_width == kFewWidth;
  const auto steps_with = [&](int64_t words, int64_t lanes, bool few) {
    return few ? steps_of<Panel<true>>(s.rows, words, lanes) : steps_of<Panel<false>>(s.rows, words, lanes);
  };
  const int64_t turned = s.rows < kTileRows ? kSpan / L * (whole(s.head_dim) / (2 * L)) * kTurnSteps : 0;
  const int64_t steps = turned + s.rows * kSoftenSteps + steps_with(words, kSpan, few_wide) +
                        steps_with(weights, columns, few);
  Ahead ahead(s.next, s.next_count, s.next_bytes, steps);
  alignas(64) float scores[kAtOnce * kSpan];
  // 0 times such a value is NaN: rows must not meet values that they do not see.
  const bool alone = !seen_by_all(s) && !is_finite<kind>(s);
  const int64_t at_once = alone ? 1 : kAtOnce;
  for (int64_t row = 0; row < s.rows; row += at_once) {
    const int64_t count = least(at_once, s.rows - row);
    const uint32_t* q = (const uint32_t*)(s.q + row * s.q_width);
    for (int64_t key = 0, vectors; key < kSpan; key += vectors * L) {
      vectors = tile_of((kSpan - key) / L, kTileVectors);
      if (whole_keys) turn_keys<kind, true>(s, key, vectors, s.scratch, ahead);
      else turn_keys<kind, false>(s, key, vectors, s.scratch, ahead);
      float* out = scores + key;
      if constexpr (pairs) {
        if (few_wide) {
          const Panel<true> panel = {s.scratch, vectors};
          products<pairs>(count, Dense<kFewWidth>{q, words}, panel, vectors, out, kSpan, false, ahead);
          continue;
        }
      }
      const Panel<false> panel = {s.scratch, vectors};
      products<pairs>(count, Factors{q, words, s.q_width}, panel, vectors, out, kSpan, false, ahead);
    }
    for (int64_t i = 0; i < count; i++) {
      for (int j = 0; j < kSoftenSteps; j++) ahead.step();
      if (s.first[row + i] < s.end[row + i]) soften<pairs>(s, row + i, scores + i * kSpan);
      else memset(scores + i * kSpan, 0, kSpan * 4);
    }
    float* total = s.total + row * s.width;
    const Dense<kSpan> p = {(const uint32_t*)scores, weights};
    AttendedSpan seen = s;
    if (alone) seen.from = s.first[row], seen.to = s.end[row];
    for (int64_t at = 0, vectors; at < columns; at += vectors * L) {
      vectors = least(2 * kTileVectors, (columns - at) / L);
      if (whole_values && !alone) lay_values<kind, true>(seen, at, vectors, s.scratch);
      else lay_values<kind, false>(seen, at, vectors, s.scratch);
      const auto multiply_values = [&](auto panel) {
        products<pairs>(count, p, panel, vectors, total + at, s.width, true, ahead);
      };
      if (few) multiply_values(Panel<pairs>{s.scratch, vectors});
      else multiply_values(Panel<false>{s.scratch, vectors});
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
  for (int64_t i = 0; i < count; i++) pack(type, rows[i], n, out + i * padded(n));
}

void attend(const AttendedSpan& s) {
  if (kind_of(s.type) == Type::BF16) attend_as<Type::BF16>(s);
  else attend_as<Type::F32>(s);
}

}  // namespace
}  // namespace moejax
