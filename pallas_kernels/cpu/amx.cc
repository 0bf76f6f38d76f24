// Products of bfloat16 by AMX tiles: compiled for CPUs that have them and run where Linux lets a
// process use them (select.cc). The other kernels of such a CPU are avx512bf16's.
//
// Contract 1: TDPBF16PS adds to each result, for 32 elements of its sum, the sum of the 16 products
// of even elements plus that of the odd ones. No result knows how many rows or tokens a tile has, so
// few tokens and many have one order, and there is one way to multiply any number of them.
#include "decoders.h"
#include "tiles_amx.h"

namespace moejax {
// Of kernels.cc: products of codes by tiles of bytes.
void integer_dots_by_tiles(const Format& f, const uint16_t* record, int matrix, int64_t first, int64_t rows,
                           const float* const* x, int64_t tokens, float* y, int64_t stride, float* scratch);
void integer_columns_by_tiles(const Format& f, const uint16_t* record, int64_t column, int64_t n, const float* const* h,
                              int64_t tokens, float* const* y, float* scratch, const uint16_t* next);
namespace {

constexpr int64_t kSide = 16;        // rows of a tile, and its columns of 32 bits
constexpr int64_t kChunk = 32;       // elements of a sum that a tile has
constexpr int64_t kTile = 1024;      // bytes of a tile
constexpr int64_t kSquare = 2 * kSide; // rows, and tokens, of four tiles of results
constexpr int64_t kDepth = 2048;     // elements of a sum for which tokens are turned at once
constexpr int64_t kColumns = 256;    // of rows that are added, as pairs in the first cache
constexpr int64_t kMeanwhile = 4;    // rows of codes that are decoded between two products
constexpr int64_t kFar = 512;        // bytes of a row that are asked for before they are read

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

// Asks for `count` lines of a region from its line `first` on; null: of nothing. Towards the first cache: what is asked
// for towards the second one alone comes no sooner. Inlined always: GCC leaves calls of a function out that does
// nothing else.
INLINE void lines_soon(const uint16_t* region, int64_t first, int64_t count) {
  if (!region) return;
  for (int64_t i = 0; i < count; i++) soon(region + (first + i) * kChunk, true);
}

// 16 rows of codes of gate or up as tiles. A block of kPart elements of each is decoded four rows at a
// time, between the products of the block before, which wait for each other. The rows after these are
// asked for meanwhile, evenly, in the order of memory.
template <Codes kind>
struct Coded {
  static constexpr bool exact = kind == Codes::Lossless12;
  static constexpr int bits = kind == Codes::Int4 ? 4 : 8;
  const Format& f;
  int64_t to, ready = -1, count;
  const uint16_t *codes, *extra, *table[kSide], *next, *next_extra;
  alignas(64) uint16_t blocks[2][kSide * kPart];

  Coded(const Format& format, const uint16_t* record, int matrix, int64_t first, int64_t offset,
        int64_t rows, int64_t end)
      : f(format), to(end), count(least(rows - offset, kSide)) {
    const int64_t row = first + offset;
    const int64_t size = f.hidden * bits / 16, more = exact ? f.hidden / 4 : f.hidden / kPart;
    const auto codes_at = [&](int m, int64_t r) { return record + f.matrix[m].codes * f.hidden + r * size; };
    const auto extra_at = [&](int m, int64_t r) { return record + f.matrix[m].extra * f.hidden + r * more; };
    codes = codes_at(matrix, row), extra = extra_at(matrix, row);
    for (int64_t i = 0; i < kSide; i++) {
      const int64_t block = (row + least(i, count - 1)) / kBlock;
      table[i] = record + f.tables * f.hidden + (matrix * f.blocks + block) * (1 + f.escapes);
    }
    // Up's rows come after gate's; who reads what comes after those is not known.
    const bool more_rows = offset + kSide < rows;
    next = next_extra = nullptr;
    if (more_rows) next = codes + kSide * size, next_extra = extra + kSide * more;
    else if (matrix == GATE) next = codes_at(UP, first), next_extra = extra_at(UP, first);
  }

  template <int byte_plane, int code_plane>
  INLINE void decode_exact(int64_t at, int64_t r0, uint16_t* out) {
    const int64_t two = f.hidden / 2, four = f.hidden / 4;
    for (int64_t r = r0; r < r0 + kMeanwhile; r++, out += kPart) {
      const int64_t row = least(r, count - 1);
      const uint16_t *bytes = codes + row * two + at - byte_plane * two;
      const uint16_t *second = extra + row * four + at - code_plane * four;
      const vh base = splat16((uint16_t)(table[r][0] << 7));
      vh most = {};
#pragma GCC unroll 4
      for (int64_t i = 0; i < kPart; i += 2 * L) {
        store(out + i, exact_of<byte_plane, code_plane>(load<vh>(bytes + i), load<vh>(second + i),
                                                        base, most));
      }
      lines_soon(next, (at / kPart * kSide + r) * 2, 2);
      lines_soon(next_extra, at / kPart * kSide + r, 1);
      if (__builtin_expect(!any(most, kEscaped), 1)) continue;
      exact_plane<byte_plane, code_plane>(bytes, second, kPart, table[r], f.escapes, out, bytes,
                                          second);
    }
  }

  INLINE void decode(int64_t at, int64_t r0) {
    uint16_t* out = blocks[at / kPart % 2] + r0 * kPart;
    if constexpr (exact) {
      return chosen<0, 3>(at / (f.hidden / 4), [&](auto plane) {
        decode_exact<plane.value / 2, plane.value>(at, r0, out);
      });
    }
    const int64_t size = f.hidden * bits / 16, plane = at / size, groups = f.hidden / kPart;
    Plane<kind> weights(plane, 0);
    for (int64_t r = r0; r < r0 + kMeanwhile; r++, out += kPart) {
      const int64_t row = least(r, count - 1);
      const uint16_t* mine = codes + row * size + at - plane * size;
      weights.set(splat(scale_f16(extra[row * groups + at / kPart])), vf{}, false);
#pragma GCC unroll 4
      for (int64_t i = 0; i < kPart; i += 2 * L) store(out + i, weights.get((__m512i)load<vu>(mine + i), __m512i{}));
      lines_soon(next, (at / kPart * kSide + r) * bits / 4, bits / 4);
    }
  }

  const void* tile(int64_t at, int64_t, int64_t& step) {
    step = kPart * 2;
    if (ready < 0) {
      for (int64_t r = 0; r < kSide; r += kMeanwhile) decode(at, r);
      ready = at;
    }
    const int64_t block = at / kPart * kPart;
    if (block + kPart < to) decode(block + kPart, at % kPart / kChunk * kMeanwhile);
    return blocks[at / kPart % 2] + at % kPart;
  }
  void fetch(int64_t, int64_t, int64_t) const {}
};

// Sums over elements [from, to) of n, of 16 rows with up to 16 tokens, whose operands lie `step` bytes
// apart, results too. They are added to results.
template <class Source>
void few_tokens(Source& rows, int64_t from, int64_t to, int64_t n, const char* operands, int64_t step,
                float* results) {
  int64_t apart;
  LOAD_TILE(0, results, step);
  for (int64_t at = from; at < to; at += kChunk, operands += kSide * step) {
    rows.fetch(at, from, to);
    const void* weights = rows.tile(at, n, apart);
    LOAD_TILE(4, weights, apart);
    LOAD_TILE(6, operands, step);
    _tile_dpbf16ps(0, 4, 6);
  }
  STORE_TILE(0, results, step);
}

// The same of 32 rows with up to 32 tokens; where from is 0 results are new.
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

// y[t · stride + r] of up to 16 tokens. source(r, from, to): 16 rows from r on, whose elements
// [from, to) are wanted.
template <class Source>
INLINE void dots_of_few(const Source& source, int64_t rows, const float* const* x, int64_t tokens,
                        int64_t n, float* y, int64_t stride) {
  alignas(64) char turned[kDepth / kChunk * kTile];
  alignas(64) float results[kMostRows / kSide][kSide * kSide] = {};
  const int64_t step = tokens == 1 ? 4 : 64;  // one token's pairs lie side by side as they are
  Tiles tiles;
  tiles.set(0, 4, kSide, step), tiles.set(4, 2, kSide, 64), tiles.set(6, 2, kSide, step);
  CONFIGURE(tiles);
  const int64_t depth = tokens == 1 ? n : kDepth;
  for (int64_t from = 0; from < n; from += depth) {
    const int64_t to = least(from + depth, n);
    const char* operands = turned;
    if (tokens == 1) operands = (const char*)x[0] + from * 2;
    else turn_tokens(x, tokens, from, to, turned);
    for (int64_t r = 0; r < rows; r += kSide) {
      auto mine = source(r, from, to);
      few_tokens(mine, from, to, n, operands, step, results[r / kSide]);
    }
  }
  for (int64_t r = 0; r < rows; r += kSide) {
    if (tokens == 1) memcpy(y + r, results[r / kSide], least(kSide, rows - r) * 4);
    else put(results[r / kSide], rows - r, tokens, y + r, stride);
  }
}

// The same of up to 32 tokens.
void dots_of_more(const void* const* w, int64_t rows, const float* const* x, int64_t tokens,
                  int64_t n, float* y, int64_t stride, bool fetch) {
  alignas(64) char turned[2][kDepth / kChunk * kTile];
  alignas(64) Results results[kMostRows / kSquare];
  Tiles tiles;
  tiles.set(0, 8, kSide, 64);
  CONFIGURE(tiles);
  for (int64_t from = 0; from < n; from += kDepth) {
    const int64_t to = least(from + kDepth, n);
    turn_tokens(x, kSide, from, to, turned[0]);
    turn_tokens(x + kSide, tokens - kSide, from, to, turned[1]);
    for (int64_t r = 0; r < rows; r += kSquare) {
      Rows low(w + r, rows - r, kSquare), high(w + r + kSide, rows - r - kSide, kSquare);
      many_tokens(low, high, from, to, n, turned[0], turned[1], fetch, results[r / kSquare]);
    }
  }
  for (int64_t r = 0; r < rows; r += kSide) {
    const auto& mine = results[r / kSquare][r / kSide % 2];
    put(mine[0], rows - r, kSide, y + r, stride);
    put(mine[1], rows - r, tokens - kSide, y + r + kSide * stride, stride);
  }
}

void dots_of_many(Type kind, const void* const* w, int64_t rows, const float* const* x,
                  int64_t tokens, int64_t n, float* y, int64_t stride, const void* const* next) {
  if (kind == Type::F32) {
    return kernels_avx512bf16.dots_of_many(kind, w, rows, x, tokens, n, y, stride, next);
  }
  for (int64_t t = 0; t < tokens; t += kSquare) {
    const int64_t count = least(kSquare, tokens - t);
    float* out = y + t * stride;
    if (count > kSide) {
      dots_of_more(w, rows, x + t, count, n, out, stride, t == 0);
      continue;
    }
    const auto source = [=](int64_t r, int64_t, int64_t) { return Rows(w + r, rows - r, kSide); };
    dots_of_few(source, rows, x + t, count, n, out, stride);
  }
  _tile_release();
}

// f(kind) of those that are multiplied as they are decoded.
template <class F>
INLINE void chosen(Codes kind, F f) {
  if (kind == Codes::Int8) f(Constant<Codes, Codes::Int8>());
  else if (kind == Codes::Int4) f(Constant<Codes, Codes::Int4>());
  else f(Constant<Codes, Codes::Lossless12>());
}

// Rows of codes for few tokens: decoded on the way to the tiles.
void encoded_dots(const Format& f, const uint16_t* record, int matrix, int64_t first, int64_t rows,
                  const float* const* x, int64_t tokens, float* y, int64_t stride) {
  chosen(f.matrix[GATE].kind, [&](auto kind) {
    const auto source = [&](int64_t r, int64_t, int64_t to) {
      return Coded<decltype(kind)::value>(f, record, matrix, first, r, rows, to);
    };
    dots_of_few(source, rows, x, tokens, f.hidden, y, stride);
  });
  _tile_release();
}

// Rows a and b as pairs: of even columns and of odd ones.
INLINE void put_pair(__m512i a, __m512i b, char* even, char* odd) {
  const __mmask32 upper = 0xaaaaaaaa;
  _mm512_store_si512(even, _mm512_mask_blend_epi16(upper, a, _mm512_slli_epi32(b, 16)));
  _mm512_store_si512(odd, _mm512_mask_blend_epi16(upper, _mm512_srli_epi32(a, 16), b));
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
  put_pair(row[0], row[1], even + i * 32, odd + i * 32);
}

// h as bfloat16, which it is: [16 tokens][half of the rows].
typedef uint16_t Factors[2][kSide * kChunk];
void factors_of(const float* const* h, int64_t tokens, int64_t rows, Factors* out) {
  memset(out, 0, (tokens + kSide - 1) / kSide * sizeof *out);
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t i = 0; i < rows; i++) {
      uint16_t* half = out[t / kSide][i / kChunk];
      half[t % kSide * kChunk + i % kChunk] = (uint16_t)(as_bits(h[t][i]) >> 16);
    }
  }
}

void add_of_many(Type kind, const void* const* w, int64_t rows, const float* const* h,
                 int64_t tokens, int64_t n, float* const* total, bool* coarse) {
  if (kind == Type::F32) return kernels_avx512bf16.add_of_many(kind, w, rows, h, tokens, n, total, coarse);
  static_assert(kManyAdded == 2 * kChunk, "two tiles of rows a call");
  alignas(64) Factors factors[kAddedTokens / kSide];
  alignas(64) char pairs[kColumns / kChunk * 4 * kTile];
  const int64_t groups = (tokens + kSide - 1) / kSide;
  factors_of(h, tokens, rows, factors);
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

// What 32 columns of a call's codes of down^T are decoded with, by quarter of its rows.
struct Scales {
  vf even[4], odd[4], zero_even[4], zero_odd[4];
  vh base[4];
};

// 16 weights of a row and of another one, in turn.
INLINE __m512i side_by_side(vf first, vf second) {
  alignas(64) static constexpr uint16_t order[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(order), narrowed(first, second));
}

// The weights of 32 columns of 16 rows of elements of down^T as pairs of rows: tiles of even columns
// and of odd ones, for the first 32 places of the sum and for the others.
template <Codes kind>
struct CodedDown {
  static constexpr bool exact = kind == Codes::Lossless12;
  static constexpr int bits = kind == Codes::Int4 ? 4 : 8;
  const Format& f;
  const uint16_t *codes, *others, *extra, *table[4];
  const float* scale[4];
  int64_t lines;  // of a row of a call
  bool last;

  CodedDown(const Format& format, const uint16_t* record, int64_t first, int64_t column, int64_t n,
            const float* scales)
      : f(format), lines(n / kChunk) {
    const int64_t quarter = f.width / 4;
    codes = record + (f.matrix[DOWN].codes + first) * f.hidden + column;
    others = codes + quarter * f.hidden;
    extra = record + (f.matrix[DOWN].extra + first) * f.hidden + column;
    last = first + kSide >= quarter;
    for (int64_t j = 0; j < 4; j++) {
      const int64_t row = first + j * quarter;
      scale[j] = scales + row / f.matrix[DOWN].group * 2 * padded(n);
      table[j] = record + f.tables * f.hidden + (DOWN * f.blocks + row / kBlock) * (1 + f.escapes);
    }
  }

  // Rows of quarters j and j + 1, whose codes are brought to 8 bits from a lane's end, or to 12.
  template <int j>
  INLINE void put_codes(__m512i a, __m512i b, const vf (&scale)[4], const vf (&zero)[4],
                        char* out) const {
    constexpr int second = bits == 4 ? 12 : 8;
    const vf low = (vf)_mm512_fmsub_ps(number_at<8>(a), (__m512)scale[j], (__m512)zero[j]);
    const vf high = (vf)_mm512_fmsub_ps(number_at<second>(b), (__m512)scale[j + 1], (__m512)zero[j + 1]);
    _mm512_store_si512(out, side_by_side(low, high));
  }

  // As float32, and 2^(23 − bit) more.
  template <int bit>
  INLINE __m512 number_at(__m512i lanes) const {
    const __m512i cut = _mm512_set1_epi32(((1 << bits) - 1) << bit);
    const __m512i power = _mm512_set1_epi32((127 + 23 - bit) << 23);
    return (__m512)_mm512_ternarylogic_epi32(lanes, cut, power, 0xea);  // (lanes & cut) | power
  }

  INLINE void decode_row(int64_t place, const Scales& s, char* out) const {
    const __m512i a = _mm512_loadu_si512(codes + place);
    const __m512i b = bits == 4 ? a : _mm512_loadu_si512(others + place);
    put_codes<0>(_mm512_slli_epi32(a, 8), _mm512_slli_epi32(b, 8), s.even, s.zero_even, out);
    put_codes<0>(_mm512_srli_epi32(a, 8), _mm512_srli_epi32(b, 8), s.odd, s.zero_odd, out + kTile);
    put_codes<2>(a, b, s.even, s.zero_even, out + 64);
    put_codes<2>(_mm512_srli_epi32(a, 16), _mm512_srli_epi32(b, 16), s.odd, s.zero_odd,
                 out + 64 + kTile);
  }

  INLINE void decode_exact(int64_t place, const vh (&base)[4], char* out) const {
    const uint16_t *p = codes + place, *q = others + place, *c = extra + place;
    const vh even = load<vh>(p), odd = load<vh>(q), all = load<vh>(c);
    vh most = {};
    vh w[4] = {exact_of<0, 0>(even, all, base[0], most), exact_of<0, 1>(odd, all, base[1], most),
               exact_of<1, 2>(even, all, base[2], most), exact_of<1, 3>(odd, all, base[3], most)};
    if (__builtin_expect(any(most, kEscaped), 0)) {
      uint16_t escaped[4][2 * L];
      exact_plane<0, 0>(p, c, 2 * L, table[0], f.escapes, escaped[0], p, c);
      exact_plane<0, 1>(q, c, 2 * L, table[1], f.escapes, escaped[1], p, c);
      exact_plane<1, 2>(p, c, 2 * L, table[2], f.escapes, escaped[2], p, c);
      exact_plane<1, 3>(q, c, 2 * L, table[3], f.escapes, escaped[3], p, c);
      memcpy(w, escaped, sizeof w);
    }
    put_pair((__m512i)w[0], (__m512i)w[1], out, out + kTile);
    put_pair((__m512i)w[2], (__m512i)w[3], out + 64, out + 64 + kTile);
  }

  INLINE Scales scales_at(int64_t at) const {
    Scales s;
    for (int j = 0; j < 4; j++) {
      if constexpr (exact) {
        s.base[j] = splat16((uint16_t)(table[j][0] << 7));
        continue;
      }
      const vi even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
      const __m512 low = _mm512_loadu_ps(scale[j] + at), high = _mm512_loadu_ps(scale[j] + at + L);
      s.even[j] = (vf)_mm512_permutex2var_ps(low, (__m512i)even, high);
      s.odd[j] = (vf)_mm512_permutex2var_ps(low, (__m512i)(even + 1), high);
      const float zero = zero_of(kind) + (bits == 4 && j % 2 ? 0x1p11f : 0x1p15f);
      s.zero_even[j] = s.even[j] * zero, s.zero_odd[j] = s.odd[j] * zero;  // exact: 13 bits and 11
    }
    return s;
  }

  INLINE void decode(int64_t at, int64_t first, const Scales& s, char* out) const {
    // The next call's rows, a line for each row of this one, as they lie in memory.
    const int64_t line = at / kChunk * kSide;
    const int64_t ahead = (kSide + line / lines) * f.hidden + line % lines * kChunk;
    out += first / 8 * 2 * kTile;
    for (int64_t i = first; i < first + kSide / 2; i++, out += 128) {
      if (!last) {
        soon(codes + ahead + i * kChunk, true);
        if (bits == 8) soon(others + ahead + i * kChunk, true);
        if (exact) soon(extra + ahead + i * kChunk, true);
      }
      if constexpr (exact) decode_exact(i * f.hidden + at, s.base, out);
      else decode_row(i * f.hidden + at, s, out);
    }
  }
};

template <Codes kind>
void coded_add(const Format& f, const uint16_t* record, int64_t first, int64_t column, int64_t n,
               const float* scales, const float* const* h, int64_t tokens, float* const* total) {
  alignas(64) Factors factors;
  alignas(64) char pairs[4 * kTile];
  factors_of(h, tokens, kManyAdded, &factors);
  Tiles tiles;
  tiles.set(0, 4, tokens, 64), tiles.set(4, 4, kSide, 64);
  CONFIGURE(tiles);
  const int64_t apart = tokens > 1 ? (total[1] - total[0]) * 4 : 64;
  const CodedDown<kind> weights(f, record, first, column, n, scales);
  LOAD_TILE(2, factors[0], 64);
  LOAD_TILE(3, factors[1], 64);
  Scales scales_here = weights.scales_at(0);
  weights.decode(0, 0, scales_here, pairs);
  weights.decode(0, kSide / 2, scales_here, pairs);
  // Half of a block's rows are decoded between the products of the other half.
  for (int64_t at = 0; at < n; at += kChunk) {
    float* out = total[0] + at;
    LOAD_TILE(0, out, apart);
    LOAD_TILE(1, out + kSide, apart);
    LOAD_TILE(4, pairs, 64);
    LOAD_TILE(5, pairs + kTile, 64);
    _tile_dpbf16ps(0, 2, 4);
    _tile_dpbf16ps(1, 2, 5);
    const bool more = at + kChunk < n;
    if (more) scales_here = weights.scales_at(at + kChunk);
    if (more) weights.decode(at + kChunk, 0, scales_here, pairs);
    LOAD_TILE(6, pairs + 2 * kTile, 64);
    LOAD_TILE(7, pairs + 3 * kTile, 64);
    _tile_dpbf16ps(0, 3, 6);
    _tile_dpbf16ps(1, 3, 7);
    STORE_TILE(0, out, apart);
    STORE_TILE(1, out + kSide, apart);
    if (more) weights.decode(at + kChunk, kSide / 2, scales_here, pairs);
  }
  _tile_release();
}

void encoded_add(const Format& f, const uint16_t* record, int64_t first, int64_t, int64_t column,
                 int64_t n, const float* scales, const float* const* h, int64_t tokens,
                 float* const* total) {
  chosen(f.matrix[GATE].kind, [&](auto kind) {
    coded_add<decltype(kind)::value>(f, record, first, column, n, scales, h, tokens, total);
  });
}

// Whole tiles of rows, whose scales and tables are then one; and of columns.
int64_t takes(const Format& f) { return multiplied_in_parts(f) && f.width % (4 * kSide) == 0 ? kSide : 0; }

int64_t few(Type kind) { return kind == Type::BF16 ? 0 : kernels_avx512bf16.few(kind); }
int64_t rows_of_task(Type kind) {
  return kind == Type::BF16 ? kMostRows : kernels_avx512bf16.rows_of_task(kind);
}

}  // namespace
}  // namespace moejax
#include "pallas_kernels/paged_attention/amx.h"
namespace moejax {

const Kernels& kernels_amx() {
  static const Kernels table = [] {
    Kernels k = kernels_avx512bf16;
    k.name = "amx", k.few = few, k.rows_of_task = rows_of_task, k.elements = kSide, k.scales_ahead = true;
    k.dots_of_many = dots_of_many, k.add_of_many = add_of_many;
    k.takes = takes, k.encoded_dots = encoded_dots, k.encoded_add = encoded_add;
    k.attended_rows = attended_rows, k.pack_queries = pack_queries, k.attend = attend;
    k.integer_dots = integer_dots_by_tiles, k.integer_columns = integer_columns_by_tiles;
    return k;
  }();
  return table;
}

}  // namespace moejax
