// Products of bfloat16 by AMX tiles: compiled for CPUs that have them and run where Linux lets a
// process use them (select.cc). The other kernels of such a CPU are avx512bf16's.
//
// Contract 1: TDPBF16PS adds to each result, for 32 elements of its sum, the sum of the 16 products
// of even elements plus that of the odd ones. No result knows how many rows or tokens a tile has, so
// few tokens and many have one order, and there is one way to multiply any number of them.
#include <immintrin.h>
#include <string.h>

#include "kernels.h"

namespace moejax {
namespace {

constexpr int64_t kSide = 16;        // rows of a tile, and its columns of 32 bits
constexpr int64_t kChunk = 32;       // elements of a sum that a tile has
constexpr int64_t kTile = 1024;      // bytes of a tile
constexpr int64_t kBlock = 2 * kSide;  // rows, and tokens, of four tiles of results
constexpr int64_t kDepth = 2048;     // elements of a sum for which tokens are turned at once
constexpr int64_t kColumns = 256;    // of rows that are added, as pairs in the first cache
constexpr int64_t kFar = 512;        // bytes of a row that are asked for before they are read

// The compiler's own forms of the first three do not say that they read and write memory.
#define LOAD_TILE(tile, base, stride)                                                 \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void*)(base)),     \
                   "r"((int64_t)(stride)) : "memory")
#define STORE_TILE(tile, base, stride)                                                \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"((void*)(base)),       \
                   "r"((int64_t)(stride)) : "memory")
#define CONFIGURE(tiles) __asm__ volatile("ldtilecfg %0" ::"m"(tiles) : "memory")

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Rows of the eight tiles, and their bytes.
struct alignas(64) Tiles {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int first, int count, int64_t rows_, int64_t bytes_) {
    for (int i = first; i < first + count; i++) {
      rows[i] = (uint8_t)rows_, bytes[i] = (uint16_t)bytes_;
    }
  }
};

// 16 rows of 16 numbers of 32 bits, turned; rows from `count` on are zeros.
void turn(const void* const* rows, int64_t offset, int64_t count, __m512i (&out)[kSide]) {
  __m512i a[kSide], b[kSide];
  for (int64_t i = 0; i < kSide; i++) {
    a[i] = i < count ? _mm512_loadu_si512((const char*)rows[i] + offset) : _mm512_setzero_si512();
  }
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    out[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
    out[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
    out[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
    out[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
  }
}

// Pairs of elements [from, to) of up to 16 tokens, side by side, as tiles. Packed tokens have zeros
// behind their last element.
void turn_tokens(const float* const* x, int64_t tokens, int64_t from, int64_t to, char* out) {
  for (int64_t at = from; at < to; at += kChunk, out += kTile) {
    __m512i turned[kSide];
    turn((const void* const*)x, at * 2, tokens, turned);
    for (int64_t i = 0; i < kSide; i++) _mm512_store_si512(out + i * 64, turned[i]);
  }
}

// 16 rows of weights as tiles: read where they lie, or copied and completed with zeros.
struct Rows {
  const void *const* w, *const* next;
  int64_t count, ahead, stride = 0;  // bytes between rows; 0: not always the same
  alignas(64) char copy[kTile];

  // distance: rows to those that are read after these.
  Rows(const void* const* rows, int64_t left, int64_t distance)
      : w(rows), next(rows + distance), count(least(left, kSide)) {
    ahead = least(count, left > distance ? left - distance : 0);
    if (!ahead) next = rows, ahead = count;
    if (count < kSide) return;
    stride = (const char*)w[1] - (const char*)w[0];
    for (int64_t i = 2; i < kSide; i++) {
      if ((const char*)w[i] - (const char*)w[i - 1] != stride) stride = 0;
    }
  }
  const void* tile(int64_t at, int64_t n, int64_t& step) {
    if (stride && at + kChunk <= n) {
      step = stride;
      return (const char*)w[0] + at * 2;
    }
    step = 64;
    memset(copy, 0, sizeof copy);
    for (int64_t i = 0; i < count; i++) {
      memcpy(copy + i * 64, (const char*)w[i] + at * 2, least(kChunk, n - at) * 2);
    }
    return copy;
  }
  // Asks for what is read soon: of these rows, and at their end of those that are `ahead` of them.
  void fetch(int64_t at, int64_t from, int64_t to) const {
    const int64_t place = at * 2 + kFar, over = place - to * 2;
    const void* const* rows = over < 0 ? w : next;
    const int64_t offset = over < 0 ? place : from * 2 + over;
    for (int64_t i = 0; i < ahead; i++) __builtin_prefetch((const char*)rows[i] + offset);
  }
};

// A tile of results for each half of 32 rows and of 32 tokens.
typedef float Results[2][2][kSide * kSide];

// Sums over elements [from, to) of n, of 16 rows with up to 16 tokens, whose operands lie `step` bytes
// apart, results too. They are added to results unless from is 0.
void few_tokens(Rows& rows, int64_t from, int64_t to, int64_t n, const char* operands, int64_t step,
                float* results) {
  int64_t apart;
  if (from) {
    LOAD_TILE(0, results, step);
  } else {
    _tile_zero(0);
  }
  for (int64_t at = from; at < to; at += kChunk, operands += kSide * step) {
    rows.fetch(at, from, to);
    const void* weights = rows.tile(at, n, apart);
    LOAD_TILE(4, weights, apart);
    LOAD_TILE(6, operands, step);
    _tile_dpbf16ps(0, 4, 6);
  }
  STORE_TILE(0, results, step);
}

// The same of 32 rows with up to 32 tokens.
void many_tokens(Rows& low, Rows& high, int64_t from, int64_t to, int64_t n, const char* first,
                 const char* second, bool fetch, Results& results) {
  int64_t apart;
  if (from) {
    LOAD_TILE(0, results[0][0], 64);
    LOAD_TILE(1, results[0][1], 64);
    LOAD_TILE(2, results[1][0], 64);
    LOAD_TILE(3, results[1][1], 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t at = from; at < to; at += kChunk, first += kTile, second += kTile) {
    if (fetch) low.fetch(at, from, to), high.fetch(at, from, to);
    const void* weights = low.tile(at, n, apart);
    LOAD_TILE(4, weights, apart);
    LOAD_TILE(6, first, 64);
    LOAD_TILE(7, second, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    weights = high.tile(at, n, apart);
    LOAD_TILE(5, weights, apart);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  STORE_TILE(0, results[0][0], 64);
  STORE_TILE(1, results[0][1], 64);
  STORE_TILE(2, results[1][0], 64);
  STORE_TILE(3, results[1][1], 64);
}

// y[t · stride + r] of a tile of results.
void put(const float* results, int64_t rows, int64_t tokens, float* y, int64_t stride) {
  if (rows <= 0) return;
  const void* lines[kSide];
  for (int64_t r = 0; r < kSide; r++) lines[r] = results + r * kSide;
  __m512i turned[kSide];
  turn(lines, 0, kSide, turned);
  const __mmask16 mask = (__mmask16)((1u << least(rows, kSide)) - 1);
  for (int64_t t = 0; t < tokens; t++) _mm512_mask_storeu_epi32(y + t * stride, mask, turned[t]);
}

void dots_of_many(Type kind, const void* const* w, int64_t rows, const float* const* x,
                  int64_t tokens, int64_t n, float* y, int64_t stride) {
  if (kind == Type::F32) {
    return kernels_avx512bf16.dots_of_many(kind, w, rows, x, tokens, n, y, stride);
  }
  alignas(64) char turned[2][kDepth / kChunk * kTile];
  alignas(64) Results results[kMostRows / kBlock];
  for (int64_t t = 0; t < tokens; t += kBlock) {
    const int64_t count = least(kBlock, tokens - t), few = least(count, kSide);
    const int64_t step = count == 1 ? 4 : 64;  // one token's pairs lie side by side as they are
    Tiles tiles;
    tiles.set(0, 4, kSide, step), tiles.set(4, 2, kSide, 64), tiles.set(6, 2, kSide, step);
    CONFIGURE(tiles);
    for (int64_t from = 0; from < n; from += kDepth) {
      const int64_t to = least(from + kDepth, n);
      const char* operands = turned[0];
      if (count == 1) operands = (const char*)x[t] + from * 2;
      else turn_tokens(x + t, few, from, to, turned[0]);
      if (count > kSide) turn_tokens(x + t + kSide, count - kSide, from, to, turned[1]);
      for (int64_t r = 0; r < rows; r += kBlock) {
        const int64_t distance = count > kSide ? kBlock : kSide;
        Rows low(w + r, rows - r, distance), high(w + r + kSide, rows - r - kSide, distance);
        Results& mine = results[r / kBlock];
        if (count > kSide) {
          many_tokens(low, high, from, to, n, operands, turned[1], t == 0, mine);
        } else {
          few_tokens(low, from, to, n, operands, step, mine[0][0]);
          if (high.count > 0) few_tokens(high, from, to, n, operands, step, mine[1][0]);
        }
      }
    }
    for (int64_t r = 0; r < rows; r += kSide) {
      float* out = y + t * stride + r;
      const auto& mine = results[r / kBlock][r / kSide % 2];
      if (count == 1) {
        memcpy(out, mine[0], least(kSide, rows - r) * 4);
        continue;
      }
      put(mine[0], rows - r, few, out, stride);
      put(mine[1], rows - r, count - few, out + kSide * stride, stride);
    }
  }
  _tile_release();
}

// 32 columns of rows i and i + 1 as pairs: of even columns and of odd ones, as `unpack` wants them.
// ahead: bytes to what is asked for.
void pair_rows(const void* const* w, int64_t i, int64_t rows, int64_t at, __mmask32 columns,
               int64_t ahead, char* even, char* odd) {
  __m512i row[2];
  for (int j = 0; j < 2; j++) {
    row[j] = _mm512_setzero_si512();
    if (i + j >= rows) continue;
    const char* place = (const char*)w[i + j] + at * 2;
    row[j] = _mm512_maskz_loadu_epi16(columns, place);
    __builtin_prefetch(place + ahead);
  }
  const __mmask32 upper = 0xaaaaaaaa;
  const __m512i first = _mm512_mask_blend_epi16(upper, row[0], _mm512_slli_epi32(row[1], 16));
  const __m512i second = _mm512_mask_blend_epi16(upper, _mm512_srli_epi32(row[0], 16), row[1]);
  _mm512_store_si512(even + i * 32, first), _mm512_store_si512(odd + i * 32, second);
}

void add_of_many(Type kind, const void* const* w, int64_t rows, const float* const* h,
                 int64_t tokens, int64_t n, float* const* total) {
  if (kind == Type::F32) return kernels_avx512bf16.add_of_many(kind, w, rows, h, tokens, n, total);
  static_assert(kManyAdded == 2 * kChunk, "two tiles of rows a call");
  // h as bfloat16, which it is: [16 tokens][half of the rows].
  alignas(64) uint16_t factors[kAddedTokens / kSide][2][kSide * kChunk];
  alignas(64) char pairs[kColumns / kChunk * 4 * kTile];
  const int64_t groups = (tokens + kSide - 1) / kSide;
  memset(factors, 0, groups * sizeof factors[0]);
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t i = 0; i < rows; i++) {
      uint32_t bits;
      memcpy(&bits, h[t] + i, 4);
      factors[t / kSide][i / kChunk][t % kSide * kChunk + i % kChunk] = (uint16_t)(bits >> 16);
    }
  }
  Tiles tiles;
  tiles.set(0, 4, least(tokens, kSide), 64), tiles.set(4, 4, kSide, 64);
  CONFIGURE(tiles);
  const int64_t apart = tokens > 1 ? (total[1] - total[0]) * 4 : 64;
  const bool two = rows > kChunk;
  // The next call's rows, where they follow in the order of four quarters (expert_ffn/cpu.cc).
  const int64_t next = rows > 4 ? ((const char*)w[4] - (const char*)w[0]) * (kManyAdded / 4) : 0;
  for (int64_t first = 0; first < n; first += kColumns) {
    const int64_t end = least(first + kColumns, n);
    for (int64_t i = 0; i < (two ? kManyAdded : kChunk); i += 2) {
      char* place = pairs;
      for (int64_t at = first; at < end; at += kChunk, place += 4 * kTile) {
        const __mmask32 columns = n - at >= kChunk ? 0xffffffffu : (1u << (n - at)) - 1;
        const int64_t over = at * 2 + kFar - n * 2;
        pair_rows(w, i, rows, at, columns, over < 0 ? kFar : next + kFar - n * 2, place, place + 2 * kTile);
      }
    }
    const char* place = pairs;
    for (int64_t at = first; at < end; at += kChunk, place += 4 * kTile) {
      LOAD_TILE(4, place, 64);
      LOAD_TILE(5, place + 2 * kTile, 64);
      if (two) {
        LOAD_TILE(6, place + kTile, 64);
        LOAD_TILE(7, place + 3 * kTile, 64);
      }
      for (int64_t g = 0; g < groups; g++) {
        float* out = total[g * kSide] + at;
        LOAD_TILE(0, out, apart);
        LOAD_TILE(1, out + kSide, apart);
        LOAD_TILE(2, factors[g][0], 64);
        _tile_dpbf16ps(0, 2, 4);
        _tile_dpbf16ps(1, 2, 5);
        if (two) {
          LOAD_TILE(3, factors[g][1], 64);
          _tile_dpbf16ps(0, 3, 6);
          _tile_dpbf16ps(1, 3, 7);
        }
        STORE_TILE(0, out, apart);
        STORE_TILE(1, out + kSide, apart);
      }
    }
  }
  _tile_release();
}

int64_t few(Type kind) { return kind == Type::BF16 ? 0 : kernels_avx512bf16.few(kind); }
int64_t rows_of_task(Type kind) {
  return kind == Type::BF16 ? kMostRows : kernels_avx512bf16.rows_of_task(kind);
}

}  // namespace

extern const Tiled tiled_amx;
const Tiled tiled_amx = {dots_of_many, add_of_many, few, rows_of_task};

}  // namespace moejax
