// Attention of rows of queries over a span of keys of bfloat16, by AMX: included by amx.cc.
//
// A tile has 16 keys, as they lie in memory, and up to 16 queries, turned once a task. Keys are the rows of
// scores and queries their lanes, so a query's largest score and sum need no sums of lanes. Weights turn back
// and multiply tiles of values, whose keys lie side by side in pairs.
//
// Contract 1: a row's bits depend on that row alone, not on how many rows a call has. Of values that are not
// finite see tiles.h.
#pragma once
#include "seen.h"

namespace moejax {
namespace {

constexpr int64_t kKeyTiles = kSpan / kSide;
constexpr int64_t kWeightTiles = kSpan / kChunk;
// Rows that read keys where they lie, at most. More read a copy: keys that lie whole pages apart share a few
// sets of the first cache.
constexpr int64_t kInPlace = 2 * kSide;

INLINE int64_t chunks_of(int64_t n) { return (n + kChunk - 1) / kChunk; }
INLINE __mmask32 elements_at(int64_t at, int64_t n) {
  return n - at >= kChunk ? 0xffffffffu : (1u << (n - at)) - 1;
}

void pack_queries(Type type, const void* const* rows, int64_t count, int64_t n, float* out) {
  if (type != Type::BF16) return kernels_avx512bf16.pack_queries(type, rows, count, n, out);
  for (int64_t first = 0; first < count; first += kSide) {
    char* tiles = (char*)(out + first * padded(n));
    for (int64_t at = 0; at < n; at += kChunk, tiles += kTile) {
      alignas(64) __m512i words[kSide];
      const void* of[kSide];
      const int64_t mine = least(kSide, count - first);
      for (int64_t i = 0; i < mine; i++) {
        words[i] = _mm512_maskz_loadu_epi16(elements_at(at, n), (const uint16_t*)rows[first + i] + at);
        of[i] = words + i;
      }
      turn(of, 0, mine, *(__m512i(*)[kSide])tiles);
    }
  }
}

// The keys of a span as tiles.
struct KeyTiles {
  struct Side {
    const char* rows;  // null: they are in the panel
    int64_t stride;
  } sides[kKeyTiles];
  char* panel;  // [side][chunk]
  int64_t chunks;

  KeyTiles(const AttendedSpan& s, char* memory, bool copied) : panel(memory), chunks(chunks_of(s.head_dim)) {
    for (int64_t t = 0; t < kKeyTiles; t++) {
      const int64_t first = t * kSide;
      const char* const* keys = s.tokens + first;
      Side& side = sides[t] = {nullptr, 0};
      if (!copied && s.from <= first && s.to >= first + kSide && s.head_dim % kChunk == 0) {
        side = {keys[0] + s.key, keys[1] - keys[0]};
        for (int64_t i = 2; i < kSide; i++) {
          if (keys[i] - keys[i - 1] != side.stride) side.rows = nullptr;
        }
      }
      if (!side.rows) copy(s, first);
    }
  }

  void copy(const AttendedSpan& s, int64_t first) {
    for (int64_t i = 0; i < kSide; i++) {
      const int64_t key = first + i;
      const bool there = key >= s.from && key < s.to;
      char* out = panel + first / kSide * chunks * kTile + i * 64;
      for (int64_t at = 0; at < s.head_dim; at += kChunk, out += kTile) {
        __m512i words = _mm512_setzero_si512();
        if (there) words = _mm512_maskz_loadu_epi16(elements_at(at, s.head_dim), s.tokens[key] + s.key + at * 2);
        _mm512_store_si512(out, words);
      }
    }
  }

  INLINE const char* tile(int64_t side, int64_t chunk, int64_t& stride) const {
    if (sides[side].rows) {
      stride = sides[side].stride;
      return sides[side].rows + chunk * 64;
    }
    stride = 64;
    return panel + (side * chunks + chunk) * kTile;
  }
};

// scores[key][query] of turned queries, as many as tiles 0 to 3 and 5 have. Lines of a key follow each other.
void score(const KeyTiles& keys, const char* q, float* scores, int64_t apart, Ahead& ahead) {
#define SCORE(side)                                    \
  _tile_zero(side);                                    \
  for (int64_t c = 0; c < keys.chunks; c++) {          \
    int64_t stride;                                    \
    const char* tile = keys.tile(side, c, stride);     \
    LOAD_TILE(5, q + c * kTile, 64);                   \
    LOAD_TILE(4, tile, stride);                        \
    _tile_dpbf16ps(side, 4, 5);                        \
    ahead.step();                                      \
  }                                                    \
  STORE_TILE(side, (char*)scores + side * kSide * apart, apart)
  SCORE(0);
  SCORE(1);
  SCORE(2);
  SCORE(3);
#undef SCORE
}

// exp(x) of x that are not much greater than 0; of −∞ it is 0.
INLINE vf weight_of(vf x) {
  x = (vf)_mm512_max_ps((__m512)splat(-110.0f), (__m512)x);  // NaN stays
  const vf n = (vf)_mm512_roundscale_ps((__m512)(x * 1.44269504f), 0);
  return (vf)_mm512_scalef_ps((__m512)exponential_over(x, n), (__m512)n);
}

// Scores [key][query] of up to 16 rows become weights [query][key], two tiles; the rows' results so far shrink
// where their largest score grows.
__attribute__((noinline)) void soften(const AttendedSpan& s, int64_t row, int64_t count, float* scores, char* weights,
                                      Ahead& ahead) {
  const __mmask16 rows = (__mmask16)((1u << count) - 1);
  const vf none = splat(-__builtin_inff());
  const vf before = (vf)_mm512_mask_loadu_ps((__m512)none, rows, s.top + row);
  const vi first = (vi)_mm512_maskz_loadu_epi32(rows, s.first + row);
  const vi end = (vi)_mm512_maskz_loadu_epi32(rows, s.end + row);
  const bool whole = !_mm512_cmpgt_epi32_mask((__m512i)first, _mm512_setzero_si512()) &&
                     !_mm512_mask_cmplt_epi32_mask(rows, (__m512i)end, _mm512_set1_epi32(kSpan));
  vf best = before;
  for (int32_t key = 0; key < kSpan; key++) {
    vf x = unfused(load<vf>(scores + key * kSide) * s.scale);
    if (!whole) x = ((first <= key) & (end > key)) ? x : none;
    best = (vf)_mm512_max_ps((__m512)x, (__m512)best);
    store(scores + key * kSide, x);
  }
  const vf safe = best == none ? vf{} : best;
  alignas(64) __m512i pairs[kWeightTiles][kSide];
  vf sums[kSide] = {};
  for (int64_t i = 0; i < kSide; i += 2) {
    for (int64_t t = 0; t < kKeyTiles; t++) {
      const float* at = scores + (t * kSide + i) * kSide;
      const vf even = weight_of(load<vf>(at) - safe), odd = weight_of(load<vf>(at + kSide) - safe);
      sums[i] = sums[i] + even, sums[i + 1] = sums[i + 1] + odd;
      pairs[t / 2][t % 2 * (kSide / 2) + i / 2] = side_by_side(even, odd);
      ahead.step();
    }
  }
  for (int64_t half = kSide / 2; half; half /= 2) {
    for (int64_t i = 0; i < half; i++) sums[i] = sums[i] + sums[i + half];
  }
  for (int64_t t = 0; t < kWeightTiles; t++) {
    const void* of[kSide];
    for (int64_t i = 0; i < kSide; i++) of[i] = &pairs[t][i];
    turn(of, 0, kSide, *(__m512i(*)[kSide])(weights + t * kTile));
  }
  vf mass = (vf)_mm512_maskz_loadu_ps(rows, s.mass + row);
  uint32_t grown = _mm512_mask_cmpneq_ps_mask(rows, (__m512)best, (__m512)before);
  if (grown) {
    const vf shrink = weight_of(before - safe);
    mass = unfused(mass * shrink);
    _mm512_mask_storeu_ps(s.top + row, rows, (__m512)best);
    for (; grown; grown &= grown - 1) {
      const int64_t i = __builtin_ctz(grown);
      float* total = s.total + (row + i) * s.width;
      for (int64_t at = 0; at < s.width; at += L) store(total + at, load<vf>(total + at) * shrink[i]);
    }
  }
  _mm512_mask_storeu_ps(s.mass + row, rows, (__m512)(mass + sums[0]));
}

// The same of one row, whose scores lie side by side.
__attribute__((noinline)) void soften_one(const AttendedSpan& s, int64_t row, const float* scores, char* weights,
                                          Ahead& ahead) {
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const vf none = splat(-__builtin_inff());
  const float before = s.top[row];
  vf x[kKeyTiles], best = splat(before);
  for (int t = 0; t < kKeyTiles; t++) {
    const vi key = lane + t * (int32_t)kSide;
    x[t] = unfused(load<vf>(scores + t * kSide) * s.scale);
    x[t] = ((key >= s.first[row]) & (key < s.end[row])) ? x[t] : none;
    best = (vf)_mm512_max_ps((__m512)x[t], (__m512)best);
  }
  const float top = _mm512_reduce_max_ps((__m512)best), safe = top == -__builtin_inff() ? 0 : top;
  vf sums = {};
  for (int t = 0; t < kKeyTiles; t++) {
    x[t] = weight_of(x[t] - safe), sums = sums + x[t];
    for (int64_t i = 0; i < kSpan / 2 / kKeyTiles; i++) ahead.step();
  }
  for (int t = 0; t < kWeightTiles; t++) {
    _mm512_store_si512(weights + t * kTile, narrowed(x[2 * t], x[2 * t + 1]));
  }
  float mass = s.mass[row];
  if (top != before) {
    const float shrink = weight_of(splat(before - safe))[0];
    float* total = s.total + row * s.width;
    for (int64_t at = 0; at < s.width; at += L) store(total + at, load<vf>(total + at) * shrink);
    mass = unfused(mass * shrink), s.top[row] = top;
  }
  s.mass[row] = mass + _mm512_reduce_add_ps((__m512)sums);  // in halves, as above
}

// panel[columns][half of the keys][pair of keys]: tiles of 16 columns, in the order of tiles.h's totals.
void lay_values(const AttendedSpan& s, int64_t from, int64_t to, char* panel, Ahead& ahead) {
  const auto row = [&](int64_t key, int64_t at) {
    if (key < from || key >= to) return _mm512_setzero_si512();
    return _mm512_maskz_loadu_epi16(elements_at(at, s.value_dim), s.tokens[key] + s.value + at * 2);
  };
  for (int64_t key = 0; key < kSpan; key += 2) {
    char* out = panel + key / kChunk * kTile + key % kChunk / 2 * 64;
    for (int64_t at = 0; at < s.value_dim; at += kChunk, out += 2 * kWeightTiles * kTile) {
      const __m512i a = row(key, at), b = row(key + 1, at);
      _mm512_store_si512(out, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(out + kWeightTiles * kTile, _mm512_unpackhi_epi16(a, b));
    }
    ahead.step();
  }
}

// Adds weighted values to the totals of as many rows as tiles 6 and 7 have.
void add_values(const AttendedSpan& s, int64_t row, const char* weights, const char* panel) {
  const int64_t tiles = 2 * chunks_of(s.value_dim), apart = s.width * 4;
  float* total = s.total + row * s.width;
  for (int64_t i = 0; i < tiles; i++, total += kSide, panel += kWeightTiles * kTile) {
    LOAD_TILE(6, total, apart);
    LOAD_TILE(7, weights, 64);
    LOAD_TILE(4, panel, 64);
    _tile_dpbf16ps(6, 7, 4);
    LOAD_TILE(7, weights + kTile, 64);
    LOAD_TILE(4, panel + kTile, 64);
    _tile_dpbf16ps(6, 7, 4);
    STORE_TILE(6, total, apart);
  }
}

int64_t attended_rows(Type type) { return type == Type::BF16 ? 256 : kernels_avx512bf16.attended_rows(type); }

void attend(const AttendedSpan& s) {
  if (s.type != Type::BF16) return kernels_avx512bf16.attend(s);
  const int64_t groups = (s.rows + kSide - 1) / kSide;
  char *key_panel = (char*)s.scratch, *value_panel = key_panel + chunks_of(s.head_dim) * kKeyTiles * kTile;
  Ahead ahead(s, kSpan / 2 + groups * (kSpan / 2 + kKeyTiles * chunks_of(s.head_dim)));
  const bool alone = !seen_by_all(s) && !is_finite<Type::BF16>(s);
  const KeyTiles keys(s, key_panel, s.rows > kInPlace);
  if (!alone) lay_values(s, s.from, s.to, value_panel, ahead);
  const bool one = s.rows == 1;
  int64_t configured = 0;
  const auto configure = [&](int64_t rows) {
    if (rows == configured) return;
    Tiles tiles;
    tiles.set(0, 6, kSide, 64), tiles.set(6, 2, configured = rows, 64);
    if (one) tiles.set(0, 4, kSide, 4), tiles.set(5, 1, kSide, 4);
    CONFIGURE(tiles);
  };
  for (int64_t row = 0; row < s.rows; row += kSide) {
    const int64_t count = least(kSide, s.rows - row);
    alignas(64) float scores[kSpan * kSide];
    alignas(64) char weights[kWeightTiles * kTile];  // of half of the keys each
    configure(alone ? 1 : count);
    score(keys, (const char*)(s.q + row * s.q_width), scores, one ? 4 : 64, ahead);
    if (one) soften_one(s, row, scores, weights, ahead);
    else soften(s, row, count, scores, weights, ahead);
    if (!alone) {
      add_values(s, row, weights, value_panel);
      continue;
    }
    for (int64_t i = 0; i < count; i++) {
      lay_values(s, s.first[row + i], s.end[row + i], value_panel, ahead);
      add_values(s, row + i, weights + i * 64, value_panel);
    }
  }
  _tile_release();
}

}  // namespace
}  // namespace moejax
