// Products of integers: the codes of records with numbers of 8 bits (pallas_kernels/records/integers.py
// has the meaning). Sums of integers are exact, so only the order of the sum over units decides bits:
// it is one for every instruction set and every number of tokens. Included by kernels.cc.
//
// Codes are multiplied as bytes or words, in whatever order they leave their elements:
// numbers are brought into the same order once. What makes an integer of a byte is taken away from a
// unit's sum, in float32, which holds all of these numbers exactly.
#pragma once

namespace moejax {
namespace {

constexpr int64_t W = MOEJAX_LANES < 8 ? MOEJAX_LANES : 8;
typedef float vw __attribute__((vector_size(MOEJAX_LANES < 8 ? 4 * MOEJAX_LANES : 32)));
typedef int32_t wi __attribute__((vector_size(MOEJAX_LANES < 8 ? 4 * MOEJAX_LANES : 32)));
typedef int16_t v16 __attribute__((vector_size(2 * MOEJAX_LANES)));
typedef int8_t vb __attribute__((vector_size(MOEJAX_LANES)));

static int64_t lanes_of(int64_t n) { return (n + kUnitLanes - 1) / kUnitLanes * kUnitLanes; }

// n numbers in `quantized_size(n)` floats: their integers as bytes and words, and scale and sum of each
// unit of 32 and 16, zeros behind the last one.
struct Quantized {
  int8_t* q;
  int16_t* words;
  float *scale[2], *sum[2];
  INLINE Quantized(const float* memory, int64_t n) : q((int8_t*)memory), words((int16_t*)(q + n)) {
    float* next = (float*)(words + n);
    for (int i = 0; i < 2; i++) {
      const int64_t count = lanes_of(n / (i ? 16 : 32));
      scale[i] = next, sum[i] = next + count, next += 2 * count;
    }
  }
};

void quantize(const float* x, int64_t n, float* out) {
  const Quantized to(out, n);
  memset(to.scale[0], 0, (char*)(out + quantized_size(n)) - (char*)to.scale[0]);
  for (int64_t g = 0; g < n / 32; g++, x += 32) {
    uint32_t top = 0;
    for (int i = 0; i < 32; i++) {
      const uint32_t size = as_bits(x[i]) & 0x7fffffff;
      top = size > top ? size : top;
    }
    const float largest = as_float(top);
    to.scale[0][g] = to.scale[1][2 * g] = to.scale[1][2 * g + 1] = largest * (1 / 127.0f);
    int8_t* q = to.q + 32 * g;
    int16_t* words = to.words + 32 * g;
    if (top >= 0x7f800000 || largest < 0x1p-100f) {
      memset(q, 0, 32 * sizeof *q), memset(words, 0, 32 * sizeof *words);
      continue;
    }
    const vf inverse = splat(127 / largest), magic = splat(12582912.0f);  // rounds to even
    for (int i = 0; i < 32; i += L) {
      const vi whole = (vi)(unfused(load<vf>(x + i) * inverse) + magic) - (vi)magic;
      store(q + i, __builtin_convertvector(whole, vb)), store(words + i, __builtin_convertvector(whole, v16));
    }
    int32_t halves[2] = {};
    for (int i = 0; i < 32; i++) halves[i / 16] += q[i];
    to.sum[1][2 * g] = (float)halves[0], to.sum[1][2 * g + 1] = (float)halves[1];
    to.sum[0][g] = (float)(halves[0] + halves[1]);
  }
}

// How codes of a kind are multiplied: as bytes, whose integer is the byte less `zero`, and less the
// group's zero where it has one.
struct Integers {
  int bits, highs;      // of a code
  const uint8_t* list;  // bytes of 16 codes; null: a code is its byte
  bool negative;        // bytes are signed
  float zero;
  float factor;         // of an integer, beside its scale
  Shift shift;
};

template <Codes kind>
struct Listed {
  uint8_t of[16];
  constexpr Listed() : of() {
    for (int i = 0; i < 16 && i < codes_in(kind); i++) {
      if (kind == Codes::Int2) of[i] = (uint8_t)(2 * i);
      else of[i] = (uint8_t)(int)(kind == Codes::E2M1 ? 2 * value_of(kind, i) + 12 : value_of(kind, i));
    }
  }
};
template <Codes kind>
constexpr Listed<kind> kListed;

Integers integers_of(Codes kind) {
  Integers as = {bits_of(kind), highs_of(kind), nullptr, false, zero_of(kind), 1, shift_of(kind)};
  if (kind == Codes::Int2) as.list = kListed<Codes::Int2>.of, as.zero = 3, as.factor = 0.5f;
  if (kind == Codes::E2M1) as.list = kListed<Codes::E2M1>.of, as.zero = 12, as.factor = 0.5f;
  if (kind == Codes::IQ4) as.list = kListed<Codes::IQ4>.of, as.zero = 0, as.negative = true;
  return as;
}

// Scales of n units, as integers want them.
void times_factor(const Integers& as, int64_t n, float* scale) {
  if (as.factor == 1) return;
  for (int64_t i = 0; i < n; i++) scale[i] *= as.factor;
}

// ---- codes → bytes, any number of them

// Of a plane of n elements.
void bytes_of(const Integers& as, const uint16_t* codes, int64_t plane, int64_t n, uint8_t* out) {
  const int shift = as.bits * (int)plane, mask = (1 << as.bits) - 1;
  if (as.list) {
    for (int64_t i = 0; i < n; i++) out[i] = as.list[(codes[i] >> shift) & mask];
  } else {
    for (int64_t i = 0; i < n; i++) out[i] = (uint8_t)((codes[i] >> shift) & mask);
  }
}

// Their upper bits, of a plane of n elements of those.
void add_highs(const Integers& as, const uint16_t* highs, int64_t plane, int64_t n, uint8_t* out) {
  const int shift = as.highs * (int)plane, mask = (1 << as.highs) - 1;
  for (int64_t i = 0; i < n; i++) out[i] |= (uint8_t)(((highs[i] >> shift) & mask) << as.bits);
}

// A row of gate or up.
struct IntegerRow {
  const uint16_t *codes, *highs;
  int64_t n, size, high_size;         // weights; elements of codes and of upper bits
  const uint16_t *next, *next_highs;  // of a row that is asked for meanwhile
  // The row behind it.
  INLINE void advance() { codes += size, highs += high_size, next += size, next_highs += high_size; }
};

#ifdef __AVX2__
// ---- codes → bytes, by vectors
typedef __m256i v32;

template <class T>
INLINE T* whole_line(T* p) { return (T*)(((uintptr_t)p + 63) / 64 * 64); }

// What is known of codes when this is compiled. sums: of so many products of four bytes and numbers fit
// into two words; 0: bytes are signed. Codes of 8 bits are multiplied as words, or as signed bytes.
template <int bits_, int sums_, bool listed_ = false, bool highs_ = false>
struct Kind {
  static constexpr int bits = bits_, sums = sums_, planes = 16 / bits_;
  static constexpr bool words = bits_ == 8 && sums_, listed = listed_, highs = highs_, wide = false;
  static constexpr int fields = words ? 2 : 8 / bits_;  // what a vector of elements gives
  static constexpr int depth = words ? 2 : 4;           // numbers of a lane of 32 bits
};

// f(Kind) of the ways there are.
template <class F>
INLINE void with_kind(const Integers& as, F f) {
  if (as.bits == 8) return f(Kind<8, 8>());
  if (as.bits == 2) return f(Kind<2, 8, true>());
  if (as.negative) return f(Kind<4, 0, true>());
  if (as.list) return f(Kind<4, 4, true>());  // 4 · 4 · 24 · 127 is less than 2^16
  if (as.highs) return f(Kind<4, 2, false, true>());
  f(Kind<4, 8>());
}

// 16 bytes for each half.
INLINE v32 listed(const Integers& as) {
  return as.list ? _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)as.list)) : v32{};
}

// Not through memory, where GCC keeps what memcpy has written.
INLINE v32 loaded(const uint16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }

// Where the upper bits of elements lie whose codes are multiples of the upper bits' own elements away.
struct Place {
  __m128i up, down;
  v32 mask;
  INLINE Place(int highs, int64_t multiple)
      : up(_mm_cvtsi32_si128(4 - highs * (int)multiple)), down(_mm_cvtsi32_si128(highs * (int)multiple)),
        mask(_mm256_set1_epi8((char)(((1 << highs) - 1) << 4))) {}
};

// The fields of bytes of elements, and of the upper bits of these: codes of 2 and 4 bits in bytes, of 8
// in words, or less 128.
template <class K>
INLINE void fields_of(v32 bytes, v32 highs, const Place& place, v32 table, v32* out) {
  if constexpr (K::words) {
    out[0] = _mm256_and_si256(bytes, _mm256_set1_epi16(0xff)), out[1] = _mm256_srli_epi16(bytes, 8);
    return;
  }
  if constexpr (K::bits == 8) {
    out[0] = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
    return;
  }
#pragma GCC unroll 4
  for (int f = 0; f < K::fields; f++) {
    const v32 placed = f ? _mm256_srli_epi16(bytes, K::bits * f) : bytes;
    out[f] = _mm256_and_si256(placed, _mm256_set1_epi8((1 << K::bits) - 1));
    if (K::listed) out[f] = _mm256_shuffle_epi8(table, out[f]);
    if (!K::highs) continue;
    const v32 upper = f ? _mm256_srl_epi16(highs, place.down) : _mm256_sll_epi16(highs, place.up);
    out[f] = _mm256_or_si256(out[f], _mm256_and_si256(upper, place.mask));
  }
}

// The lower bytes of each eight elements, then their upper ones.
INLINE v32 lower_then_upper(v32 elements) {
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  return _mm256_shuffle_epi8(elements, _mm256_broadcastsi128_si256(order));
}

// Four rows of 16 elements: in lanes of 32 bits their lower bytes, and the upper ones, of columns 0–3
// and 8–11, then of the others.
INLINE void turn_rows(const uint16_t* rows, int64_t apart, v32* lower, v32* upper) {
  v32 row[4];
  for (int i = 0; i < 4; i++) row[i] = load<v32>(rows + i * apart);
  const v32 low = _mm256_set1_epi16(0xff);
  const v32 even[] = {_mm256_unpacklo_epi16(row[0], row[2]), _mm256_unpackhi_epi16(row[0], row[2])};
  const v32 odd[] = {_mm256_unpacklo_epi16(row[1], row[3]), _mm256_unpackhi_epi16(row[1], row[3])};
  for (int k = 0; k < 2; k++) {
    lower[k] = _mm256_or_si256(_mm256_and_si256(even[k], low), _mm256_slli_epi16(odd[k], 8));
    upper[k] = _mm256_or_si256(_mm256_srli_epi16(even[k], 8), _mm256_andnot_si256(low, odd[k]));
  }
}

// Rows of elements of down^T, and of the upper bits. A reference to it would be read anew after each store of sums.
struct DownRows {
  const uint16_t *codes, *highs;
  int64_t apart;
};

// Of a band of which nothing has been asked for before: its lines of columns `at` and on.
constexpr int64_t kNear = 128;
INLINE void ask_for_columns(const DownRows& rows, bool highs, int64_t step, int64_t at, int64_t n) {
  for (int64_t i = 0; i < step; i++) {
    for (int64_t j = at; j < n; j += 32) {
      soon(rows.codes + i * rows.apart + j);
      if (highs) soon(rows.highs + i * rows.apart + j);
    }
  }
}

// Four rows of 16 columns, as lanes of 32 bits for each column, in turn_rows' order: of each plane two
// vectors; words have those of two rows, then those of the other two.
template <class K>
INLINE void turned(const DownRows& e, const Place& place, v32 table, v32 (*out)[2]) {
  if constexpr (K::words) {
    for (int i = 0; i < 4; i += 2) {
      const v32 a = load<v32>(e.codes + i * e.apart), b = load<v32>(e.codes + (i + 1) * e.apart);
      const v32 both[] = {_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)};
      for (int k = 0; k < 2; k++) {
        v32 fields[2];
        fields_of<K>(both[k], v32{}, place, table, fields);
        out[i][k] = fields[0], out[i + 1][k] = fields[1];
      }
    }
    return;
  }
  v32 bytes[2][2], highs[2][2] = {};
  turn_rows(e.codes, e.apart, bytes[0], bytes[1]);
  if (K::highs) turn_rows(e.highs, e.apart, highs[0], highs[1]);
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++) {
      v32 fields[K::fields];
      fields_of<K>(bytes[half][k], highs[half][k], place, table, fields);
#pragma GCC unroll 4
      for (int f = 0; f < K::fields; f++) out[half * K::fields + f][k] = fields[f];
    }
  }
}
template <class K>
constexpr int kTurned = K::words ? 4 : K::planes;

INLINE v32 ones() { return _mm256_set1_epi16(1); }

// Sums of products in each lane of 32 bits, onto others.
template <class K>
INLINE v32 add_products(v32 sums, v32 codes, v32 q) {
  if (!K::words && !K::sums) q = _mm256_sign_epi8(q, codes), codes = _mm256_abs_epi8(codes);
  if (!K::words) codes = _mm256_maddubs_epi16(codes, q), q = ones();
  return _mm256_add_epi32(sums, _mm256_madd_epi16(codes, q));
}

// Two vectors' columns in their order, of turn_rows' one.
INLINE void in_order(v32 (&v)[2]) {
  const v32 first = _mm256_permute2x128_si256(v[0], v[1], 0x20);
  v[1] = _mm256_permute2x128_si256(v[0], v[1], 0x31), v[0] = first;
}

// ---- a few tokens: units' sums of a row

// Codes so far ahead are asked for towards the first cache. Without it, the same instructions for 4-bit rows on a Zen 4
// take 26 or 30 ps a weight from memory, by where they lie in the library.
constexpr int64_t kNearElements = 256;

// Numbers in the order in which a row's codes are multiplied: for each 16 elements and field, of eight
// the lower bytes' numbers and the upper ones', then of the others.
template <class K>
void order_numbers(const int8_t* q, int64_t n, int8_t* out) {
  const int64_t size = n / K::planes;
  for (int64_t at = 0; at < size; at += 16) {
    for (int f = 0; f < K::fields; f++, out += 32) {
      const __m128i lower = load<__m128i>(q + f * size + at), upper = load<__m128i>(q + (f + K::fields) * size + at);
      store(out, _mm_unpacklo_epi64(lower, upper)), store(out + 16, _mm_unpackhi_epi64(lower, upper));
    }
  }
}

// The first n lanes.
INLINE void store_lanes(int32_t* out, int64_t n, v32 v) {
  if (n >= 8) return store(out, v);
  const v32 lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  _mm256_maskstore_epi32(out, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lanes), v);
}

// Eight vectors whose halves have two lanes of one unit and two of another one: their sums.
INLINE void add_up(const v32* v, v32 (&out)[2]) {
  v32 pairs[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) pairs[i] = _mm256_hadd_epi32(v[2 * i], v[2 * i + 1]);
  v32 four[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    four[i] = _mm256_add_epi32(_mm256_permute2x128_si256(pairs[i], pairs[i + 2], 0x20),
                               _mm256_permute2x128_si256(pairs[i], pairs[i + 2], 0x31));
  }
  const __m256 a = (__m256)four[0], b = (__m256)four[1];
  out[0] = (v32)_mm256_shuffle_ps(a, b, 0x88), out[1] = (v32)_mm256_shuffle_ps(a, b, 0xdd);
}

// Words of two steps, whose halves have four words of one unit and four of another one: two words of
// each unit, of the first step, then of the second one.
INLINE v32 pack_steps(v32 first, v32 second) {
  const __m256 a = (__m256)first, b = (__m256)second;
  return _mm256_add_epi16((v32)_mm256_shuffle_ps(a, b, 0x88), (v32)_mm256_shuffle_ps(a, b, 0xdd));
}

// Four vectors of packed steps: of eight steps the first units' sums, then the others'. fit: the words of
// both halves may be added.
template <bool fit>
INLINE void add_packed(const v32* v, v32 (&out)[2]) {
  __m256 both[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const v32 low = _mm256_permute2x128_si256(v[i], v[i + 2], 0x20), high = _mm256_permute2x128_si256(v[i], v[i + 2], 0x31);
    if (fit) both[i] = (__m256)_mm256_madd_epi16(_mm256_add_epi16(low, high), ones());
    else both[i] = (__m256)_mm256_add_epi32(low, high);
  }
  out[0] = (v32)_mm256_shuffle_ps(both[0], both[1], 0x88), out[1] = (v32)_mm256_shuffle_ps(both[0], both[1], 0xdd);
}

// To out[t · room + unit], of units of E elements of each plane, for T tokens and `rows` rows, whose sums lie `apart`.
// numbers: as order_numbers has them.
template <class K, int E, int T>
void row_sums(const Integers& as, const IntegerRow& start, int64_t rows, const int8_t* const* numbers, int64_t room,
              int64_t apart, int32_t* out) {
  // A copy made for the call would be read by vectors right after its numbers are written: 4% of the time of 4-bit rows.
  IntegerRow row = start;
  constexpr int F = K::fields;                        // pairs of planes
  constexpr bool small = K::sums;                     // a unit's products fit into eight words
  constexpr bool fit = K::sums >= (E == 32 ? 8 : 4);  // into two words
  constexpr int parts = small ? 4 : 8;
  const int64_t steps = row.n / K::planes / E;
  const v32 table = listed(as);
  Place place(as.highs, 0);
  int64_t high_at, multiple, first;
  // Eight steps, or the last ones: sums of all eight stay in registers.
  const auto sum = [&](auto whole) __attribute__((always_inline)) {
    const int64_t count = decltype(whole)::value ? 8 : least(8, steps - first);
#pragma GCC unroll 8
    for (int64_t i = 0; i < count * E; i += 32) {
      const int64_t at = first * E + i;
      soon(row.next + at);
      soon(row.codes + at + kNearElements, true);
      if (K::highs && at < row.high_size) soon(row.next_highs + at);
    }
    v32 part[T][F][parts];
#pragma GCC unroll 4
    for (int64_t i = 0; i < count; i += 2) {
      v32 two[2][T][F] = {};  // halves have two lanes of one unit and two of another one
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++) {
        const int64_t at = (first + i + j) * E;
        if (i + j == count) break;
        if (K::highs && high_at == row.high_size) high_at = 0, place = Place(as.highs, ++multiple);
        v32 codes[E / 16][F];
#pragma GCC unroll 2
        for (int k = 0; k < E / 16; k++) {
          const v32 highs = K::highs ? lower_then_upper(load<v32>(row.highs + high_at + 16 * k)) : v32{};
          fields_of<K>(lower_then_upper(load<v32>(row.codes + at + 16 * k)), highs, place, table, codes[k]);
        }
        high_at += E;
#pragma GCC unroll 3
        for (int t = 0; t < T; t++) {
          const int8_t* q = numbers[t] + at * K::planes;
#pragma GCC unroll 4
          for (int f = 0; f < F; f++) {
            const v32 one = load<v32>(q + 32 * f), other = load<v32>(q + 32 * (F * (E / 16 - 1) + f));
            if (small) {
              v32 sums = _mm256_maddubs_epi16(codes[0][f], one);
              if (E == 32) sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes[E / 16 - 1][f], other));
              two[j][t][f] = sums;
            } else {
              two[j][t][f] = add_products<K>(v32{}, codes[0][f], one);
              if (E == 32) two[j][t][f] = add_products<K>(two[j][t][f], codes[E / 16 - 1][f], other);
            }
          }
        }
      }
#pragma GCC unroll 3
      for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
        for (int f = 0; f < F; f++) {
          if constexpr (small) {
            const v32 packed = pack_steps(two[0][t][f], two[1][t][f]);
            part[t][f][i / 2] = fit ? packed : _mm256_madd_epi16(packed, ones());
          } else part[t][f][i] = two[0][t][f], part[t][f][i + 1] = two[1][t][f];
        }
      }
    }
#pragma GCC unroll 3
    for (int t = 0; t < T; t++) {
#pragma GCC unroll 4
      for (int f = 0; f < F; f++) {
        v32 sums[2];
        if constexpr (small) add_packed<fit>(part[t][f], sums);
        else add_up(part[t][f], sums);
        int32_t* mine = out + t * room + f * steps + first;
        store_lanes(mine, count, sums[0]), store_lanes(mine + F * steps, count, sums[1]);
      }
    }
  };
  for (; rows; rows--, row.advance(), out += apart) {
    first = high_at = multiple = 0;
    if (K::highs) place = Place(as.highs, 0);
    if constexpr (T == 1) {
      for (; first + 8 <= steps; first += 8) sum(Constant<bool, true>());
    }
    for (; first < steps; first += 8) sum(Constant<bool, false>());
  }
}
#endif

// Sums of products for each `unit` of n bytes.
void unit_sums(const Integers& as, const uint8_t* bytes, const int8_t* q, int64_t n, int64_t unit, int32_t* out) {
  for (int64_t at = 0; at < n; at += unit) {
    int32_t sum = 0;
    if (as.negative) {
      // With VNNI, GCC 12 multiplies (int8_t)bytes[i] without its sign.
      const int8_t* mine = (const int8_t*)bytes;
      for (int64_t i = at; i < at + unit; i++) sum += mine[i] * q[i];
    } else {
      for (int64_t i = at; i < at + unit; i++) sum += bytes[i] * q[i];
    }
    *out++ = sum;
  }
}

// Scales or minimums as a record has them: bytes, of which `each` share a number.
template <class Byte, int64_t each>
struct SharedScales {
  const Byte* bytes;
  const float* numbers;
  SharedScales operator+(uint64_t i) const { return {bytes + i, numbers + i / each}; }
};
using Scales4 = SharedScales<uint8_t, 8>;  // of Q4_K
using Scales6 = SharedScales<int8_t, 16>;  // of Q6_K

// The same of down's columns, each of which has its number, a float16.
template <class Byte, bool negative = false>
struct ScaledBytes {
  const Byte* bytes;
  const uint16_t* numbers;
  ScaledBytes operator+(int64_t i) const { return {bytes + i, numbers + i}; }
};

// Whether scales, and minimums, can be used as a record has them.
bool as_they_lie(const Coding& c, const Integers& as, Shift shift, ScaleType scale) {
  const bool plain = c.group == c.unit && c.across == 1 && c.whole == Whole::None && as.factor == 1;
  return plain && as.shift == shift && c.scale == scale;
}

// A vector V of scales.
template <class V>
INLINE V scales_at(const float* p) { return load<V>(p); }
#ifdef __F16C__
template <class V>
INLINE V scales_at(const uint16_t* p) {  // float16
#ifdef __AVX512F__
  if constexpr (sizeof(V) == 64) return (V)_mm512_cvtph_ps(load<__m256i>(p));
  else
#endif
  return (V)_mm256_cvtph_ps(load<__m128i>(p));
}
template <class V, class Byte>
INLINE V bytes_at(const Byte* p) {
  constexpr bool positive = std::is_unsigned<Byte>::value;
#ifdef __AVX512F__
  if constexpr (sizeof(V) == 64) {
    const __m128i some = load<__m128i>(p);
    return __builtin_convertvector((vi)(positive ? _mm512_cvtepu8_epi32(some) : _mm512_cvtepi8_epi32(some)), V);
  } else
#endif
  return (V)eight_bytes(positive, p);
}
template <class V, class Byte, int64_t each>
INLINE V scales_at(const SharedScales<Byte, each>& p) {
  static_assert(sizeof(V) <= 4 * each);
  return bytes_at<V>(p.bytes) * *p.numbers;
}
template <class V, class Byte, bool negative>
INLINE V scales_at(const ScaledBytes<Byte, negative>& p) {
  const V number = scales_at<V>(p.numbers);
  return bytes_at<V>(p.bytes) * (negative ? -number : number);
}
#endif

// Of a vector of 16 its first or second half; another one is its own.
template <int half>
INLINE vw half_of(vw v) { return v; }
#ifdef __AVX512F__
template <int half>
INLINE vw half_of(vf v) { return (vw)_mm512_extractf32x8_ps((__m512)v, half); }
#endif

// y[r] of R rows, whose sums and scales lie `apart` and `scales_apart`: lane[u mod 8] += sum · scale ·
// scale of x, and += minimum · …, units ascending; then pairwise. Rows side by side, since each one's
// sums wait for each other. zeros: they were not taken from sums before.
template <Shift how, bool zeros, int R, class S>
INLINE void sum_units(const int32_t* sums, int64_t apart, float zero, S scale, S shift, int64_t scales_apart,
                      const float* x_scale, const float* x_sum, int64_t units, float* y) {
  vw lane[R][kUnitLanes / W];  // `= {}` would be a call, or `rep stos`
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
    for (vw& mine : lane[r]) mine = vw{};
  }
  // The units of a vector.
  const auto add = [&](auto none, auto integers, int64_t at) {
    using V = decltype(none);
    const V of_x = load<V>(x_sum + at), by = load<V>(x_scale + at);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      V whole = __builtin_convertvector(load<decltype(integers)>(sums + r * apart + at), V), minimum = {};
      if (how == Shift::Zero) whole -= of_x * (zero + scales_at<V>(shift + (r * scales_apart + at)));
      if (how == Shift::None && zeros) whole -= of_x * zero;
      const V term = unfused(whole * (scales_at<V>(scale + (r * scales_apart + at)) * by));
      if (how == Shift::Minimum) minimum = unfused(of_x * (scales_at<V>(shift + (r * scales_apart + at)) * by));
      vw& mine = lane[r][at / W % (kUnitLanes / W)];
      const auto add_half = [&](auto half) {
        mine += half_of<decltype(half)::value>(term);
        if (how == Shift::Minimum) mine += half_of<decltype(half)::value>(minimum);
      };
      add_half(Constant<int, 0>());
      if constexpr (sizeof(V) > sizeof(vw)) add_half(Constant<int, 1>());
    }
  };
  int64_t u = 0;
#ifdef __AVX512F__
  if constexpr (!std::is_same<S, Scales4>::value) {  // eight of which share a number: in a longer vector 1.5 times the time
    for (; u + L <= units; u += L) add(vf{}, vi{}, u);
  }
#endif
  for (; u < units; u += kUnitLanes) {
#pragma GCC unroll 2
    for (int64_t k = 0; k < kUnitLanes / W; k++) add(vw{}, wi{}, u + k * W);
  }
  for (int r = 0; r < R; r++) {
    float all[kUnitLanes];
    memcpy(all, lane[r], sizeof all);
    for (int64_t half = kUnitLanes / 2; half; half /= 2) {
      for (int64_t i = 0; i < half; i++) all[i] += all[i + half];
    }
    y[r] = all[0];
  }
}

template <Shift how, bool zeros, class S>
void sum_units_of_rows(int64_t rows, const int32_t* sums, int64_t apart, float zero, S scale, S shift,
                       int64_t scales_apart, const float* x_scale, const float* x_sum,
                       int64_t units, float* y) {
  if (rows == kRowsAtOnce) {
    return sum_units<how, zeros, kRowsAtOnce, S>(sums, apart, zero, scale, shift, scales_apart, x_scale, x_sum, units, y);
  }
  for (int64_t r = 0; r < rows; r++) {
    const int64_t i = r * scales_apart;
    sum_units<how, zeros, 1, S>(sums + r * apart, 0, zero, scale + i, shift + i, 0, x_scale, x_sum, units, y + r);
  }
}

#ifdef __AVX2__
// ---- many tokens: outputs side by side in lanes, so that no sum crosses them

constexpr int64_t kMany = kFew + 1;  // for which a block is worth it

// Lanes of kOutputs outputs for each two or four numbers of the sum, and scales and shifts of each unit,
// `apart` from each other.
// `next` codes and upper bits are asked for meanwhile, so many lines of each with every unit.
struct IntegerBlock {
  const int32_t* lanes;
  const float *scale, *shift;
  int64_t apart, n, unit;
  const uint16_t* next[2];
  int64_t lines[2];
};

#if defined(__AVX512BW__) && MOEJAX_LANES == 16
}  // namespace
}  // namespace moejax
#include "integers512.h"
namespace moejax {
namespace {
#endif

// T tokens of a unit, whose numbers are q: sums, of each eight outputs.
template <class K, int T>
INLINE void unit_of_block(const int32_t* lanes, int64_t unit, const int32_t* const* q, v32 (&sums)[T][2]) {
  constexpr bool small = !K::words && K::sums;
  v32 open[T][2] = {};  // of words, where products fit
  for (int t = 0; t < T; t++) sums[t][0] = sums[t][1] = v32{};
  const auto close = [&] {
    for (int t = 0; t < T; t++) {
      for (int k = 0; k < 2; k++) {
        sums[t][k] = _mm256_add_epi32(sums[t][k], _mm256_madd_epi16(open[t][k], ones())), open[t][k] = v32{};
      }
    }
  };
  constexpr int most = K::sums ? K::sums : 1, steps = 16 / K::depth;
  for (int64_t d = 0; d < unit / K::depth; d += steps, lanes += steps * kOutputs) {
#pragma GCC unroll 8
    for (int i = 0; i < steps; i++) {
      const v32 codes[] = {load<v32>(lanes + i * kOutputs), load<v32>(lanes + i * kOutputs + 8)};
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) {
        const v32 factors = _mm256_set1_epi32(q[t][d + i]);
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
          if (small) open[t][k] = unfused(_mm256_add_epi16(open[t][k], _mm256_maddubs_epi16(codes[k], factors)));
          else sums[t][k] = unfused(add_products<K>(sums[t][k], codes[k], factors));
        }
      }
      if (small && K::sums < 8 && i % most == most - 1) close();
    }
  }
  if (small && K::sums == 8) close();
}

// out[t · kOutputs · kUnitLanes + i] for up to kBlockTokens tokens, with room for an even number.
template <class K, bool minimum>
void multiply_narrow_block(const Integers& as, const IntegerBlock& b, const float* const* x, int64_t tokens,
                           float* out) {
  constexpr int64_t all = kOutputs * kUnitLanes;
  const bool sixteen = b.unit == 16;
  const int32_t* q[kBlockTokens + 1];
  const float *x_scale[kBlockTokens + 1], *x_sum[kBlockTokens + 1];
  for (int64_t t = 0; t < tokens + tokens % 2; t++) {  // of an odd number the last one is there twice
    const Quantized to(x[least(t, tokens - 1)], b.n);
    q[t] = K::words ? (const int32_t*)to.words : (const int32_t*)to.q;
    x_scale[t] = to.scale[sixteen], x_sum[t] = to.sum[sixteen];
  }
  memset(out, 0, (tokens + tokens % 2) * all * sizeof *out);
  for (int64_t u = 0; u < b.n / b.unit; u++) {
    for (int part = 0; part < 2; part++) {
      for (int64_t i = u * b.lines[part]; i < (u + 1) * b.lines[part]; i++) soon(b.next[part] + 32 * i);
    }
    const int32_t* lanes = b.lanes + u * b.unit / K::depth * kOutputs;
    vw scale[2], shift[2] = {}, zeros[2];
    for (int k = 0; k < 2; k++) {
      scale[k] = load<vw>(b.scale + u * b.apart + 8 * k), zeros[k] = as.zero - vw{};
      if (as.shift != Shift::None) shift[k] = load<vw>(b.shift + u * b.apart + 8 * k);
      if (as.shift == Shift::Zero) zeros[k] += shift[k];
    }
    const auto add = [&](int64_t t, auto count) {
      constexpr int T = decltype(count)::value;
      const int32_t* mine[T];
      for (int i = 0; i < T; i++) mine[i] = q[t + i] + u * b.unit / K::depth;
      v32 sums[T][2];
      unit_of_block<K, T>(lanes, b.unit, mine, sums);
#pragma GCC unroll 4
      for (int i = 0; i < T; i++) {
        const float by = x_scale[t + i][u], of_x = x_sum[t + i][u];
        float* lane = out + (t + i) * all + u % kUnitLanes * kOutputs;
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
          vw total = load<vw>(lane + 8 * k);
          const vw whole = __builtin_convertvector((wi)sums[i][k], vw) - of_x * zeros[k];
          total += unfused(whole * (scale[k] * by));
          if (minimum) total += unfused(of_x * (shift[k] * by));
          store(lane + 8 * k, total);
        }
      }
    };
    int64_t t = 0;
    for (; t + 4 <= tokens; t += 4) add(t, Constant<int, 4>());
    for (; t < tokens; t += 2) add(t, Constant<int, 2>());
  }
  for (int64_t t = 0; t < tokens; t++, out += all) {
    for (int64_t half = all / 2; half >= kOutputs; half /= 2) {
      for (int64_t i = 0; i < half; i++) out[i] += out[i + half];
    }
  }
}

// As either kind has it. numbers: x as tiles want it, where there are tiles.
template <class K, bool tiles>
void multiply_block(const Integers& as, const IntegerBlock& b, const float* const* x, [[maybe_unused]] const float* numbers,
                    int64_t tokens, float* out) {
#ifdef __AMX_INT8__
  if constexpr (K::wide && tiles) {
    if (tokens >= kTileTokens) return multiply_tiles(as, b, numbers, out);
  }
#endif
#ifdef __AVX512VNNI__
  if constexpr (K::wide) return multiply_wide_block(as, b, x, tokens, out);
  else
#endif
  if constexpr (!K::listed && !K::words) {  // others have no minimums
    (as.shift == Shift::Minimum ? multiply_narrow_block<K, true> : multiply_narrow_block<K, false>)(as, b, x, tokens, out);
  } else {
    multiply_narrow_block<K, false>(as, b, x, tokens, out);
  }
}

// x as multiply_tiles wants it.
template <class K>
void to_tiles([[maybe_unused]] const float* const* x, [[maybe_unused]] int64_t tokens, [[maybe_unused]] int64_t n,
              [[maybe_unused]] int64_t unit, [[maybe_unused]] float* out) {
#ifdef __AMX_INT8__
  if constexpr (K::wide) {
    configure_tiles(unit);
    for (int64_t t = 0; t + kTileTokens <= tokens; t += kBlockTokens) {
      numbers_of_tiles(x + t, least(kBlockTokens, tokens - t), n, unit, out + t * room_of_tiles(n));
    }
  }
#endif
}

// Lane i of eight vectors, in vector i.
INLINE void turn(v32 (&v)[8]) {
  v32 two[8], four[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    two[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]), two[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++) {
      four[i + 2 * k] = _mm256_unpacklo_epi64(two[i + k], two[i + 2 + k]);
      four[i + 2 * k + 1] = _mm256_unpackhi_epi64(two[i + k], two[i + 2 + k]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    v[i] = _mm256_permute2x128_si256(four[i], four[i + 4], 0x20);
    v[i + 4] = _mm256_permute2x128_si256(four[i], four[i + 4], 0x31);
  }
}

// Eight rows as a block has them.
template <class K>
void turn_codes(const Integers& as, const IntegerRow* rows, int32_t* out) {
  const int64_t size = rows->n / K::planes;
  const v32 table = listed(as);
  int64_t high_at = 0, multiple = 0;
  Place place(as.highs, 0);
  for (int64_t at = 0; at < size; at += 16, high_at += 16) {
    if (K::highs && high_at == rows->high_size) high_at = 0, place = Place(as.highs, ++multiple);
    v32 codes[K::fields][8];
    for (int r = 0; r < 8; r++) {
      const v32 elements = load<v32>(rows[r].codes + at);
      const v32 highs = K::highs ? lower_then_upper(load<v32>(rows[r].highs + high_at)) : v32{};
      v32 fields[K::fields];
      fields_of<K>(K::words ? elements : lower_then_upper(elements), highs, place, table, fields);
      for (int f = 0; f < K::fields; f++) codes[f][r] = fields[f];
    }
    for (int f = 0; f < K::fields; f++) {
      turn(codes[f]);
      for (int i = 0; i < 8; i++) {
        const int64_t plane = K::words || i % 4 < 2 ? f : f + K::fields, lane = K::words ? i : i / 4 * 2 + i % 2;
        store(out + ((plane * size + at) / K::depth + lane) * kOutputs, codes[f][i]);
      }
    }
  }
}

// Numbers of rows i to i + 8 of `rows` rows of n, the last one for those behind it, as a block has them.
void turn_scales(const float* numbers, int64_t n, int64_t i, int64_t rows, float* out) {
  for (int64_t u = 0; u < n; u += 8) {
    v32 v[8];
    for (int64_t j = 0; j < 8; j++) v[j] = load<v32>(numbers + least(i + j, rows - 1) * n + u);
    turn(v);
    for (int64_t j = 0; j < 8; j++) store(out + (u + j) * kOutputs, v[j]);
  }
}

// kOutputs rows' codes, scales and shifts as a block has them; `rows` of them there are.
template <class K>
void turn_rows(const Integers& as, const IntegerRow* all, const float* scale, const float* shift, int64_t apart,
               int64_t rows, int32_t* lanes, float* scales, float* shifts) {
#ifdef __AVX512VNNI__
  if constexpr (K::wide) return turn_wide_rows<K>(as, all, scale, shift, apart, rows, lanes, scales, shifts);
  else
#endif
  for (int64_t i = 0; i < kOutputs; i += 8) {
    turn_codes<K>(as, all + i, lanes + i);
    turn_scales(scale, apart, i, rows, scales + i);
    if (as.shift != Shift::None) turn_scales(shift, apart, i, rows, shifts + i);
  }
}
#endif

// ---- gate and up

constexpr int64_t kScaledRows = 16;  // whose scales are widened at once
constexpr int64_t kElementsAhead = 4096;  // of rows of codes, that are asked for

// Scales and shifts of the units of rows, lanes_of(units) apart, zeros behind them. raw: room for those
// of a row's groups.
void units_of(const Format& f, const uint16_t* record, int matrix, const Integers& as, int64_t row, int64_t rows,
              float* scale, float* shift, float* raw) {
  const Coding& c = f.matrix[matrix];
  const int64_t groups = (f.hidden + c.group - 1) / c.group, units = f.hidden / c.unit, each = c.group / c.unit;
  const int64_t apart = lanes_of(units);
  if (each == 1 && c.across == 1 && units == apart && (!c.super || groups % c.super == 0)) {
    groups_of(f, record, matrix, row, 0, rows * groups, scale, shift);
    return times_factor(as, rows * groups, scale);
  }
  for (int64_t r = 0; r < rows; r++, scale += apart, shift += apart) {
    groups_of(f, record, matrix, (row + r) / c.across, 0, groups, raw, raw + groups);
    for (int64_t g = 0, u = 0; g < groups; g++) {
      for (int64_t stop = least(u + each, units); u < stop; u++) scale[u] = raw[g], shift[u] = raw[groups + g];
    }
    times_factor(as, units, scale);
    for (int64_t u = units; u < apart; u++) scale[u] = shift[u] = 0;
  }
}

constexpr int64_t kBlockAhead = 24;  // rows that are asked for

// f(first row, bytes of a number, groups that share one) of what groups have beside their codes.
template <class F>
INLINE void each_scale(const Coding& c, F f) {
  const int64_t size = c.scale == ScaleType::F32 ? 4 : c.scale <= ScaleType::BF16 ? 2 : 1;
  f(c.extra, size, 1);
  if (has_shifts(c.kind)) f(c.shifts, shift_of(c.kind) == Shift::Zero ? 1 : size, 1);
  if (c.super) f(c.supers, 2, c.super);
  if (c.super && shift_of(c.kind) == Shift::Minimum) f(c.min_supers, 2, c.super);
}

// Bytes of rows' scales, and of what they have beside them, which follow each other.
struct RowScales {
  const char* first[4];
  int64_t bytes[4];
  int parts = 0;
  RowScales(const Format& f, const uint16_t* record, const Coding& c) {
    if (c.across > 1) return;
    const int64_t groups = (f.hidden + c.group - 1) / c.group;
    each_scale(c, [&](int64_t part, int64_t size, int64_t share) {
      first[parts] = (const char*)(record + part * f.hidden), bytes[parts++] = (groups + share - 1) / share * size;
    });
  }
  INLINE void ask(int64_t row, int64_t rows) const {
    for (int i = 0; i < parts; i++) {
      const char *mine = first[i] + row * bytes[i], *end = mine + rows * bytes[i];
      for (; mine < end; mine += 64) soon(mine);
    }
  }
};

IntegerRow row_at(const Format& f, const uint16_t* record, const Coding& c, const Integers& as, int64_t row) {
  const int64_t n = f.hidden, size = n * as.bits / 16, high_size = n * as.highs / 16;
  const uint16_t* codes = record + c.codes * n + row * size;
  return {codes, record + c.highs * n + row * high_size, n, size, high_size, codes, codes};
}

// tiles: the CPU multiplies tiles of bytes.
template <bool tiles>
void integer_dots_of(const Format& f, const uint16_t* record, int matrix, int64_t first, int64_t rows,
                     const float* const* x, int64_t tokens, float* y, int64_t stride, float* scratch) {
  const Coding& c = f.matrix[matrix];
  const Integers as = integers_of(c.kind);
  const int64_t n = f.hidden, size = n * as.bits / 16, high_size = n * as.highs / 16;
  const int64_t units = n / c.unit, apart = lanes_of(units), room = lanes_of(n / 16) + 8;
  const bool sixteen = c.unit == 16;
  float *scale = scratch, *shift = scale + kScaledRows * room, *raw = shift + kScaledRows * room;
  int32_t* sums = (int32_t*)(raw + 2 * room);
  typedef const float* Floats;
#ifdef __F16C__
  // Scales that are used as the record has them: float16 that follow each other, or SharedScales.
  const bool halves = as_they_lie(c, as, Shift::None, ScaleType::F16) && !c.super && units % kUnitLanes == 0;
  const bool shared4 = as_they_lie(c, as, Shift::Minimum, ScaleType::U8) && c.super == 8 && units % 8 == 0;
  const bool shared6 = as_they_lie(c, as, Shift::None, ScaleType::I8) && c.super == 16 && units % 16 == 0;
#else
  constexpr bool halves = false, shared4 = false, shared6 = false;
#endif
  // sum(row, rows, apart): of all tokens, to `sums` and on. zeros: see sum_units.
  const int64_t at_once = tokens <= kFew ? kRowsAtOnce : 1;
  const auto few_rows_at_once = [&](const Integers& as, auto zeros, auto sum) {
    constexpr bool Z = decltype(zeros)::value;
    const auto add = as.shift == Shift::None ? sum_units_of_rows<Shift::None, Z, Floats>
                     : as.shift == Shift::Zero ? sum_units_of_rows<Shift::Zero, Z, Floats> : sum_units_of_rows<Shift::Minimum, Z, Floats>;
    // Behind gate's rows are up's, where tasks have both.
    const Coding& up = f.matrix[UP];
    const bool both = matrix == GATE && up.kind == c.kind;
    const RowScales beside(f, record, c), beside_up(f, record, up);
    const IntegerRow start = row_at(f, record, c, as, first), behind = row_at(f, record, up, as, first);
    const int64_t ahead = (kElementsAhead + size - 1) / size;
    for (int64_t i = 0; i < least(ahead, rows) * size; i += 32) soon(start.codes + i);
    for (int64_t i = 0; i < least(ahead, rows) * high_size; i += 32) soon(start.highs + i);
    beside.ask(first, least(kScaledRows, rows));
    for (int64_t r = 0; r < rows; r += at_once) {
      const int64_t i = r % kScaledRows * apart, count = least(at_once, rows - r);
      if (const int64_t some = least(kScaledRows, rows - r); !i && (shared4 || shared6)) {
        const int64_t at = (first + r) * units / c.super, count = some * units / c.super;
        widen(Type::F16, record + c.supers * n + at, count, scale);
        if (shared4) widen(Type::F16, record + c.min_supers * n + at, count, shift);
        for (int64_t k = 0; shared4 && k < count; k++) shift[k] = -shift[k];
      } else if (!i && !halves) {
        units_of(f, record, matrix, as, first + r, some, scale, shift, raw);
      }
      if (const int64_t later = r + kScaledRows; later < rows || (!both && first + later < f.width)) {
        beside.ask(first + later, count);
      } else if (both && later < rows + kScaledRows) {
        beside_up.ask(first + later - rows, count);
      }
      IntegerRow row = start;
      row.codes += r * size, row.highs += r * high_size;
      const bool over = both && r + ahead >= rows;
      const int64_t next = over ? least(r + ahead - rows, rows - 1) : r + ahead;
      row.next = (over ? behind : start).codes + next * size;
      row.next_highs = (over ? behind : start).highs + next * high_size;
      sum(row, count, tokens * room);
      for (int64_t t = 0; t < tokens; t++) {
        const Quantized to(x[t], n);
        const auto with = [&](auto sum_up, auto scales, auto shifts) {
          sum_up(count, sums + t * room, tokens * room, Z ? as.zero : 0, scales, shifts, apart, to.scale[sixteen],
                 to.sum[sixteen], units, y + t * stride + r);
        };
#ifdef __F16C__
        const uint16_t *own = record + c.extra * n, *own_shifts = record + c.shifts * n;
        const int64_t at = (first + r) * units;
        const auto scales4 = [=](const uint16_t* bytes, const float* numbers) {
          return Scales4{(const uint8_t*)bytes + at - i, numbers} + i;
        };
        const Scales6 scales6 = Scales6{(const int8_t*)own + at - i, scale} + i;
        if (halves) with(sum_units_of_rows<Shift::None, Z, const uint16_t*>, own + at, own);
        else if (shared4) with(sum_units_of_rows<Shift::Minimum, Z, Scales4>, scales4(own, scale), scales4(own_shifts, shift));
        else if (shared6) with(sum_units_of_rows<Shift::None, Z, Scales6>, scales6, scales6);
        else
#endif
        with(add, (Floats)scale + i, (Floats)shift + i);
      }
    }
  };
#ifdef __AVX2__
  const auto blocks_of_rows = [&](const Integers& as, auto kind) {
    using K = decltype(kind);
    float *scales = (float*)sums, *shifts = scales + apart * kOutputs, *out = shifts + apart * kOutputs;
    int32_t* lanes = whole_line((int32_t*)(out + kBlockTokens * kOutputs * kUnitLanes));
    float* numbers = whole_line((float*)(lanes + kOutputs * n / K::depth));
    if constexpr (tiles) to_tiles<K>(x, tokens, n, c.unit, numbers);
    const RowScales beside(f, record, c);
    for (int64_t r = 0; r < rows; r += kOutputs) {
      const int64_t mine = least(kOutputs, rows - r);
      units_of(f, record, matrix, as, first + r, mine, scale, shift, raw);
      IntegerRow all[kOutputs];
      for (int64_t i = 0; i < kOutputs; i++) all[i] = row_at(f, record, c, as, first + r + least(i, mine - 1));
      turn_rows<K>(as, all, scale, shift, apart, mine, lanes, scales, shifts);
      IntegerBlock block = {lanes, scales, shifts, kOutputs, n, c.unit, {}, {}};
      if (r + kOutputs < rows) {
        const IntegerRow next = row_at(f, record, c, as, first + r + kOutputs);
        block.next[0] = next.codes, block.next[1] = next.highs;
        block.lines[0] = kOutputs * size / (32 * units), block.lines[1] = kOutputs * high_size / (32 * units);
        beside.ask(first + r + kOutputs, least(kOutputs, rows - r - kOutputs));
      }
      for (int64_t t0 = 0; t0 < tokens; t0 += kBlockTokens, block.lines[0] = block.lines[1] = 0) {
        const int64_t count = least(kBlockTokens, tokens - t0);
        multiply_block<K, tiles>(as, block, x + t0, numbers + t0 * room_of_tiles(n), count, out);
        for (int64_t t = 0; t < count; t++) memcpy(y + (t0 + t) * stride + r, out + t * kOutputs * kUnitLanes, mine * sizeof *y);
      }
    }
  };
#if defined(__AVX512BW__) && MOEJAX_LANES == 16
  const auto few_by_quarters = [&](const Integers& as, auto kind) {
    using K = decltype(kind);
    const int8_t* numbers[kFew];
    int8_t* ordered = whole_line((int8_t*)(sums + at_once * tokens * room));
    for (int64_t t = 0; t < tokens; t++, ordered += room_of_quarters<K>(n)) {
      order_quarters<K>(as, Quantized(x[t], n).q, n, ordered);
      numbers[t] = ordered;
    }
    chosen<1, kFew>(tokens, [&](auto some) {
      constexpr int T = decltype(some)::value;
      few_rows_at_once(as, Constant<bool, false>(), [&](IntegerRow row, int64_t rows, int64_t apart) {
        for (int64_t r = 0; r < rows; r++, row.advance()) {
          (sixteen ? wide_row_sums<K, 16, T> : wide_row_sums<K, 32, T>)(as, row, numbers, room, sums + r * apart);
        }
      });
    });
  };
#endif
#ifdef __AVX512VNNI__
  // Two cores of a Zen 5 get 4-bit codes from memory 1.1 to 1.2 times as fast for one to three tokens as by
  // wide_row_sums, and 4- and 6-bit ones 1.1 to 1.5 times for four to eight as in blocks; 6-bit ones of fewer at 0.8 (Zen 4: 0.98).
  const auto rows_side_by_side = [&](const Integers& as, auto kind) {
    using K = decltype(kind);
    float* numbers = whole_line((float*)sums);
    const int super = c.super ? __builtin_ctzll(c.super) : 0;
    const SideBySide scales = {numbers, scale, super, as.factor}, shifts = {numbers + apart * kOutputs, shift, super, super ? -1.0f : 1};
    int32_t* open = (int32_t*)(numbers + 2 * apart * kOutputs);
    int8_t* ordered = whole_line((int8_t*)(open + least(tokens, kAtOnce) * units * kOutputs));
    for (int64_t t = 0; t < tokens; t++) order_widely<K>(Quantized(x[t], n).q, n, ordered + t * n);
    const Beside beside = beside_of(f, c, as);
    decltype(&units_side_by_side<Beside::Floats>) read;
    decltype(&sum_side_by_side<Shift::None, Beside::Floats>) sum;
    with_ways(as.shift, beside, [&](auto how, auto scale) {
      constexpr Beside mine = decltype(scale)::value;
      read = units_side_by_side<mine>, sum = sum_side_by_side<decltype(how)::value, mine>;
    });
    // kOutputs rows that are asked for in so many calls.
    const auto rows_ahead = [&](const Coding& c, int64_t row, int64_t calls) {
      PrefetchList ahead = {};
      ahead.near = asked_near();
      if (c.kind != f.matrix[matrix].kind || row >= f.width) return ahead;
      const int64_t count = least(kOutputs, f.width - row);
      const auto add = [&](int64_t part, int64_t bytes) {
        ahead.add((const char*)(record + part * n) + row * bytes, count * bytes);
      };
      if (c.across == 1) {
        each_scale(c, [&](int64_t part, int64_t size, int64_t share) { add(part, n / c.group / share * size); });
      }
      add(c.codes, 2 * size);
      if (K::highs) add(c.highs, 2 * high_size);
      ahead.spread(calls);
      return ahead;
    };
    rows_ahead(c, first, 1).ask();
    // Behind gate's rows are up's, and then gate's next ones.
    const bool alone = f.matrix[GATE].codes == f.matrix[UP].codes;
    const Coding& other = f.matrix[alone ? matrix : matrix == GATE ? UP : GATE];
    const int64_t calls = (tokens + kAtOnce - 1) / kAtOnce * (size / 32) + (tokens + 1) / 2 * (units / kUnitLanes);
    for (int64_t r = 0; r < rows; r += kOutputs) {
      // The last ones of a matrix end with it.
      const int64_t row = least(first + r, f.width - kOutputs), before = first + r - row;
      const __mmask16 mine = (__mmask16)(((1 << least(kOutputs, rows - r)) - 1) << before);
      const IntegerRow all = row_at(f, record, c, as, row);
      PrefetchList ahead = r + kOutputs < rows ? rows_ahead(c, first + r + kOutputs, calls)
                                        : rows_ahead(other, !alone && matrix == GATE ? first : first + rows, calls);
      if (beside == Beside::Unknown) {
        units_of(f, record, matrix, as, row, kOutputs, scale, shift, raw);
        turn_wide_scales(scale, apart, kOutputs, scales.numbers);
        if (as.shift != Shift::None) turn_wide_scales(shift, apart, kOutputs, shifts.numbers);
      } else {
        read(f, record, c, as.shift, row, scales, shifts);
      }
      for (int64_t t0 = 0; t0 < tokens; t0 += kAtOnce) {
        const int64_t count = least(kAtOnce, tokens - t0);
        const int8_t* q[kAtOnce];
        for (int64_t t = 0; t < count; t++) q[t] = ordered + (t0 + t) * n;
        chosen<1, kAtOnce>(count, [&](auto some) {
          constexpr int T = decltype(some)::value;
          (sixteen ? side_by_side_sums<K, 16, T> : side_by_side_sums<K, 32, T>)(as, all.codes, all.highs, n, high_size, ahead, q, open);
        });
        sum(open, as.zero, scales, shifts, x + t0, n, sixteen, units, mine, count, ahead, y + t0 * stride + r - before, stride);
      }
    }
  };
  // One token's rows of 8 bits take 0.55 to 0.75 of AVX2's time on a Zen 4. On a Zen 5, AVX2 had read them faster from
  // memory (22 GB/s instead of 19), when their scales were widened before.
  if (size % 32 == 0 && high_size % 32 == 0 && f.width >= kOutputs) {
    return with_wide_kind(as, [&, as = without_signs(as)](auto kind) {
      using K = decltype(kind);
      if constexpr (K::bits < 8) {
        const bool quartered = K::highs && high_size % kQuartered == 0;
        if (tokens <= kSideBySide && (!quartered || tokens >= kMany)) return rows_side_by_side(as, kind);
      }
      if constexpr (K::bits == 8 || K::highs) {
        if (tokens < kMany) return few_by_quarters(as, kind);
      }
      blocks_of_rows(as, kind);
    });
  }
#endif
  if (size % 16 == 0 && high_size % 16 == 0) {
    // Of codes of six bits, the products of 32 numbers do not fit into row_sums' words.
    const bool whole = !sixteen && size % 32 == 0 && high_size % 32 == 0 && as.bits + as.highs != 6;
    const auto few = [&](const Integers& as, auto kind) {
      using K = decltype(kind);
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__) && MOEJAX_LANES == 16
      // A Zen 4's Q6_K takes 0.85 of row_sums' time; codes without upper bits take more.
      if constexpr (K::highs) {
        if (high_size % kQuartered == 0) return few_by_quarters(as, kind);
      }
#endif
      const int8_t* numbers[kFew];
      int8_t* ordered = (int8_t*)(sums + at_once * tokens * room);
      for (int64_t t = 0; t < tokens; t++, ordered += n) {
        order_numbers<K>(Quantized(x[t], n).q, n, ordered);
        numbers[t] = ordered;
      }
      chosen<1, kFew>(tokens, [&](auto some) {
        constexpr int T = decltype(some)::value;
        few_rows_at_once(as, Constant<bool, true>(), [&](const IntegerRow& row, int64_t rows, int64_t apart) {
          (whole ? row_sums<K, 32, T> : row_sums<K, 16, T>)(as, row, rows, numbers, room, apart, sums);
          for (int64_t i = 0; i < rows * T && !sixteen && !whole; i++) {
            int32_t* mine = sums + i * room;  // rows lie T of them apart
            for (int64_t u = 0; u < units; u++) mine[u] = mine[2 * u] + mine[2 * u + 1];
          }
        });
      });
    };
    if (tokens < kMany && as.bits == 8) {  // from memory, signed bytes take 0.9 of words' time
      Integers less = as;
      less.zero -= 128;
      return few(less, Kind<8, 0>());
    }
    return with_kind(as, [&](auto kind) {
      if constexpr (!decltype(kind)::words) {
        if (tokens < kMany) return few(as, kind);
      }
      blocks_of_rows(as, kind);
    });
  }
#endif
  uint8_t* bytes = (uint8_t*)(sums + at_once * tokens * room);
  few_rows_at_once(as, Constant<bool, true>(), [&](IntegerRow row, int64_t rows, int64_t apart) {
    for (int64_t r = 0; r < rows; r++, row.advance()) {
      for (int64_t p = 0; p < 16 / as.bits; p++) bytes_of(as, row.codes, p, size, bytes + p * size);
      for (int64_t p = 0; as.highs && p < 16 / as.highs; p++) add_highs(as, row.highs, p, high_size, bytes + p * high_size);
      for (int64_t t = 0; t < tokens; t++) unit_sums(as, bytes, Quantized(x[t], n).q, n, c.unit, sums + r * apart + t * room);
    }
  });
}

void integer_dots(const Format& f, const uint16_t* record, int matrix, int64_t first, int64_t rows,
                  const float* const* x, int64_t tokens, float* y, int64_t stride, float* scratch) {
  integer_dots_of<false>(f, record, matrix, first, rows, x, tokens, y, stride, scratch);
}

// ---- down^T: lanes are columns

#ifdef __AVX2__
// Whether bands of `step` rows end with their planes, of codes and of upper bits.
bool whole_bands(const Format& f, const Integers& as, int64_t step) {
  const int64_t part = step * (16 / as.bits), high_part = as.highs ? step * (16 / as.highs) : 1;
  return f.width % part == 0 && f.width % high_part == 0;
}

#ifndef __AVX512VNNI__
template <class F>
INLINE void with_kind_of_columns(const Integers& as, F f) { with_kind(as, f); }

// Sums of products of `step` rows of each plane, 16 or 32, and n columns, a multiple of 16: to
// out[t · planes + p] for T tokens. R rows pass at once, with their upper bits' rows as many as the first cache
// has ways (twice as many: 1.2 to 1.5 times the time), with the sums of 16 or 32 columns in registers. What lies
// `ahead` of rows, and of their upper bits (no upper bits: 0), is asked for meanwhile, row by row: column by
// column took up to twice the time.
template <class K, int T>
void band_sums(const Integers& as, DownRows rows, int64_t multiple, int64_t step, int64_t n, int64_t ahead,
               int64_t highs_ahead, bool cold, const Quantized* h, int64_t row, int64_t size, int32_t* const* out) {
  constexpr int P = K::planes, F = K::fields;  // a vector has planes f and f + F side by side, or words of f
  constexpr int R = K::highs ? 4 : 8;
  constexpr int most = K::sums ? K::sums : 1;   // products of pairs that fit into words
  constexpr int some = K::words || most > R / 2 ? R / 2 : most;
  alignas(32) v32 factors[16][T][F];            // of each two rows
  for (int64_t j = 0; j < step / 2; j++) {
    for (int t = 0; t < T; t++) {
      for (int f = 0; f < F; f++) {
        const int64_t at = f * size + row + 2 * j;
        if (K::words) {
          factors[j][t][f] = _mm256_set1_epi32(load<int32_t>(h[t].words + at));
        } else {
          const uint32_t low = load<uint16_t>(h[t].q + at), high = load<uint16_t>(h[t].q + at + F * size);
          factors[j][t][f] = _mm256_set1_epi32((int)(low | high << 16));
        }
      }
    }
  }
  const v32 table = listed(as);
  const Place place(as.highs, multiple);
  int64_t group = 0;
  const int64_t lines = n / 32;
  int64_t asked = 0, next = 0;  // lines of a row; elements
  const auto block = [&](int64_t at, auto columns) {
    constexpr int C = decltype(columns)::value;
    v32 sums[T][C][2][F][2];
    const bool again = group, last = group + R == step;
#pragma GCC unroll 4
    for (int first = 0; first < R / 2; first += some) {
      v32 open[T][C][2][F] = {};
#pragma GCC unroll 4
      for (int i = first; i < first + some; i++) {
        const int64_t j = group / 2 + i;
        const uint16_t* one = rows.codes + 2 * j * rows.apart + at;
#pragma GCC unroll 2
        for (int c = 0; c < C; c++, next += 32) {
          if (asked++ == lines) asked = 1, next += rows.apart - 32 * lines;
          soon(rows.codes + ahead + next);
          if (K::highs && highs_ahead) soon(rows.highs + highs_ahead + next);
        }
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) {
          const v32 a = loaded(one + 16 * c), b = loaded(one + rows.apart + 16 * c);
          v32 both[2], highs[2] = {};
          if (K::words) both[0] = _mm256_unpacklo_epi16(a, b), both[1] = _mm256_unpackhi_epi16(a, b);
          else both[0] = _mm256_unpacklo_epi8(a, b), both[1] = _mm256_unpackhi_epi8(a, b);
          if (K::highs) {
            const uint16_t* upper = rows.highs + 2 * j * rows.apart + at + 16 * c;
            const v32 of_a = loaded(upper), of_b = loaded(upper + rows.apart);
            highs[0] = _mm256_unpacklo_epi8(of_a, of_b), highs[1] = _mm256_unpackhi_epi8(of_a, of_b);
          }
#pragma GCC unroll 2
          for (int k = 0; k < 2; k++) {
            v32 codes[F];
            fields_of<K>(both[k], highs[k], place, table, codes);
#pragma GCC unroll 4
            for (int f = 0; f < F; f++) {
              const v32 positive = K::words || K::sums ? codes[f] : _mm256_abs_epi8(codes[f]);
#pragma GCC unroll 3
              for (int t = 0; t < T; t++) {
                const v32 by = factors[j][t][f];
                v32& mine = open[t][c][k][f];
                // One after the other: sums that wait for each other in a tree have no room in registers.
                if (K::words) mine = unfused(add_products<K>(mine, codes[f], by));
                else if (K::sums) mine = unfused(_mm256_add_epi16(mine, _mm256_maddubs_epi16(positive, by)));
                else mine = _mm256_add_epi16(mine, _mm256_maddubs_epi16(positive, _mm256_sign_epi8(by, codes[f])));
              }
            }
          }
        }
      }
#pragma GCC unroll 3
      for (int t = 0; t < T; t++) {
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) {
#pragma GCC unroll 2
          for (int k = 0; k < 2; k++) {
#pragma GCC unroll 4
            for (int f = 0; f < F; f++) {
              const v32 mine = open[t][c][k][f];
              v32(&sum)[2] = sums[t][c][k][f];
              if (K::words) {
                sum[0] = mine;
                continue;
              }
              const v32 lower = _mm256_madd_epi16(mine, _mm256_set1_epi32(1)), upper = _mm256_srai_epi32(mine, 16);
              sum[0] = first ? _mm256_add_epi32(sum[0], lower) : lower;
              sum[1] = first ? _mm256_add_epi32(sum[1], upper) : upper;
            }
          }
        }
      }
    }
#pragma GCC unroll 3
    for (int t = 0; t < T; t++) {
#pragma GCC unroll 2
      for (int c = 0; c < C; c++) {
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
          int32_t* mine = out[t * P + p] + at + 16 * c;
          v32 found[] = {sums[t][c][0][p % F][p / F], sums[t][c][1][p % F][p / F]};
          for (int k = 0; again && k < 2; k++) found[k] = _mm256_add_epi32(found[k], load<v32>(mine + 8 * k));
          if (last) in_order(found);
          store(mine, found[0]), store(mine + 8, found[1]);
        }
      }
    }
  };
  if (cold) ask_for_columns(rows, K::highs, step, 0, least(n, 4 * kNear));
  for (; group < step; group += R) {
    int64_t at = 0;
    if constexpr (T * F == 2 && !K::highs) {
      for (; at + 32 <= n; at += 32) block(at, Constant<int, 2>());
    }
    for (; at < n; at += 16) block(at, Constant<int, 1>());
  }
}

// Elements of four rows of down^T and of `blocks` · kOutputs columns, as blocks have them, which lie
// `apart` lanes from each other; a plane has `size` of them.
template <class K>
void turn_columns(const Integers& as, const DownRows& rows, int64_t multiple, int64_t blocks, int64_t size, int64_t apart,
                  int32_t* lanes) {
  const v32 table = listed(as);
  const Place place(as.highs, multiple);
  for (int64_t k = 0; k < blocks; k++) {
    v32 four[kTurned<K>][2];
    turned<K>({rows.codes + k * kOutputs, rows.highs + k * kOutputs, rows.apart}, place, table, four);
    for (int j = 0; j < kTurned<K>; j++) {
      int32_t* mine = lanes + k * apart + j % K::planes * size + j / K::planes * kOutputs;
      in_order(four[j]);
      store(mine, four[j][0]), store(mine + 8, four[j][1]);
    }
  }
}
#endif
#endif

// Sums of products for each `step` rows and each of n columns, of rows `first` and each `every` further
// ones, counted in steps: to out[t][number][column], `room` apart. next: see Kernels::integer_columns.
void column_sums(const Format& f, const uint16_t* record, const Integers& as, int64_t column, int64_t n, int64_t step,
                 int64_t first, int64_t every, const float* const* h, int64_t tokens, const uint16_t* next, int64_t room,
                 int32_t* out) {
  const int64_t planes = 16 / as.bits, high_planes = as.highs ? 16 / as.highs : 1, apart = f.hidden;
  const Coding& c = f.matrix[DOWN];
  const int64_t width = f.width, size = (width + planes - 1) / planes, high_size = (width + high_planes - 1) / high_planes;
  const int64_t steps = width / step / every;
  const uint16_t *codes = record + c.codes * apart + column, *highs = record + c.highs * apart + column;
  int64_t done = 0;  // columns
#ifdef __AVX2__
  if (whole_bands(f, as, step)) {
    static_assert(kFew == 3);
    const Quantized to[kFew] = {{h[0], width}, {h[least(1, tokens - 1)], width}, {h[tokens - 1], width}};
#ifdef __AVX512VNNI__
    done = n;
#else
    done = n / 16 * 16;
#endif
    with_kind_of_columns(as, [&](auto kind) {
      using K = decltype(kind);
      chosen<1, kFew>(tokens, [&](auto some) {
        for (int64_t row = first * step; row < size; row += every * step) {
          int32_t* own[kFew * K::planes];
          for (int64_t j = 0; j < tokens * planes; j++) {
            own[j] = out + (j / planes * steps + (j % planes * size + row) / step / every) * room;
          }
          // The next rows: of these, of the next call, or what `next` begins with; else these once more.
          const int64_t at = row + every * step < size ? row + every * step : first + 1 < every ? (first + 1) * step : -1;
          const int64_t high_row = as.highs ? row % high_size : 0, beside = next ? next - (record + column) : 0;
          const int64_t ahead = at >= 0 ? (at - row) * apart : next ? beside - row * apart : 0;
          int64_t highs_ahead = 0;
          if (as.highs) highs_ahead = at >= 0 ? (at % high_size - high_row) * apart : next ? beside - high_row * apart : 0;
          const int64_t multiple = as.highs ? row / high_size : 0;
          const DownRows rows = {codes + row * apart, highs + high_row * apart, apart};
          band_sums<K, decltype(some)::value>(as, rows, multiple, step, done, ahead, highs_ahead, row == 0, to, row, size, own);
        }
      });
    });
  }
#endif
  if (done == n) return;
  uint8_t bytes[kIntegerColumns];
  for (int64_t j = 0; j < tokens * steps; j++) memset(out + j * room + done, 0, (n - done) * sizeof *out);
  for (int64_t r = 0; r < width; r++) {
    if (r / step % every != first) continue;
    bytes_of(as, codes + r % size * apart + done, r / size, n - done, bytes);
    if (as.highs) add_highs(as, highs + r % high_size * apart + done, r / high_size, n - done, bytes);
    for (int64_t t = 0; t < tokens; t++) {
      const int32_t q = Quantized(h[t], width).q[r];
      int32_t* mine = out + (t * steps + r / step / every) * room + done;
      if (as.negative) {
        for (int64_t i = 0; i < n - done; i++) mine[i] += (int8_t)bytes[i] * q;
      } else {
        for (int64_t i = 0; i < n - done; i++) mine[i] += bytes[i] * q;
      }
    }
  }
}

// Asks for down's scales of n columns and of units `first` and each `every` further ones, and for what
// groups have beside them: their lines lie rows apart, where no processor looks ahead.
void ask_for_scales(const Format& f, const uint16_t* record, int64_t column, int64_t n, int64_t first, int64_t every) {
  const Coding& c = f.matrix[DOWN];
  if (c.across > 1) return;
  each_scale(c, [&](int64_t part, int64_t size, int64_t share) {
    const int64_t units = c.group / c.unit * share;  // of a line
    for (int64_t u = first; u < f.width / c.unit; u += every) {
      if (u % units) continue;  // a line is asked for with its first one
      const char* mine = (const char*)(record + part * f.hidden) + (u / units * f.hidden + column) * size;
      for (int64_t i = 0; i < n * size; i += 64) soon(mine + i);
    }
  });
}

// Sums of a lane's units of rows and of n columns, `apart` from each other, and what is known of these units' numbers.
struct LaneSums {
  const int32_t* sums;
  int64_t apart, half;  // half: so far behind them are other halves of the units' sums, or 0
  float zero;
  const float *by, *of_h;  // of each kUnitLanes-th unit
  int64_t units, n;
};

// A lane of columns: from +0 on the terms of its units, in order. scales(k): of its k-th unit. Lanes come in order and are
// added pairwise on their way: the lanes 4 and 6 to lane 0, 5 to lane 1, and 7 to all of them.
template <Shift how, class Scales, class Shifts>
void sum_lane(const LaneSums& s, Scales scales, Shifts shifts, int64_t lane, float* lanes, int64_t room) {
  const auto block = [&](int64_t at, auto vectors) {
    constexpr int C = decltype(vectors)::value;
    vf total[C] = {};
    for (int64_t k = 0; k < s.units; k++) {
      const float by = s.by[k * kUnitLanes], of_h = s.of_h[k * kUnitLanes];
      const auto scale = scales(k) + at;
      const auto shift = shifts(k) + at;
      const int32_t* sums = s.sums + k * s.apart + at;
#pragma GCC unroll 4
      for (int i = 0; i < C; i++) {
        vi all = load<vi>(sums + i * L);
        if (s.half) all += load<vi>(sums + s.half + i * L);
        vf zeros = splat(s.zero), whole = __builtin_convertvector(all, vf);
        if (how == Shift::Zero) zeros += scales_at<vf>(shift + i * L);
        if (how != Shift::Minimum) whole -= of_h * zeros;  // else they are 0
        total[i] += unfused(whole * (scales_at<vf>(scale + i * L) * by));
        if (how == Shift::Minimum) total[i] += unfused(of_h * (scales_at<vf>(shift + i * L) * by));
      }
    }
    const auto earlier = [&](int64_t lane, int i) { return load<vf>(lanes + lane * room + at + i * L); };
#pragma GCC unroll 4
    for (int i = 0; i < C; i++) {
      if (lane == 4 || lane == 5) total[i] += earlier(lane - 4, i);
      if (lane == 6) total[i] = earlier(0, i) + (earlier(2, i) + total[i]);
      if (lane == 7) total[i] = earlier(0, i) + (earlier(1, i) + (earlier(3, i) + total[i]));
      store(lanes + (lane < 4 ? lane : lane == 5) * room + at + i * L, total[i]);
    }
  };
  int64_t at = 0;
  for (; at + 4 * L <= s.n; at += 4 * L) block(at, Constant<int, 4>());
  for (; at < s.n; at += L) block(at, Constant<int, 1>());
}

void few_columns(const Format& f, const uint16_t* record, const Integers& as, int64_t column, int64_t n,
                 const float* const* h, int64_t tokens, float* const* y, float* scratch, const uint16_t* next) {
  const Coding& c = f.matrix[DOWN];
  const int64_t planes = 16 / as.bits, high_planes = as.highs ? 16 / as.highs : 1, apart = f.hidden;
  const int64_t room = sums_apart(n), units = f.width / c.unit, part = f.width / (planes > high_planes ? planes : high_planes);
  const int64_t step = c.unit == 32 && part % 32 == 0 ? 32 : 16, twice = c.unit / step;
  const int64_t most = (units + kUnitLanes - 1) / kUnitLanes;  // units of a lane
  float *lanes = scratch, *scale = lanes + tokens * kUnitLanes / 2 * room, *shift = scale + most * room;
  int32_t* sums = (int32_t*)(shift + most * room);
  int64_t every = 1;
#ifdef __AVX2__
  // Where all planes' units of a band have one lane, that lane's are summed at once: sums of all units of
  // so many columns would not stay near.
  if (twice == 1 && whole_bands(f, as, step) && units / planes % kUnitLanes == 0) every = kUnitLanes;
#endif
#ifdef __F16C__
  const bool vectors = n % L == 0, supers = vectors && c.super >= kUnitLanes && !(c.super & (c.super - 1));
  const bool halves = vectors && as_they_lie(c, as, Shift::None, ScaleType::F16) && !c.super;
  const bool positive = supers && as_they_lie(c, as, Shift::Minimum, ScaleType::U8);
  const bool negative = supers && as_they_lie(c, as, Shift::None, ScaleType::I8);
#else
  constexpr bool halves = false, positive = false, negative = false;
#endif
  const bool as_they_are = halves || positive || negative;  // scales: else they are widened
  for (int64_t lane = 0; lane < kUnitLanes; lane++) {
    if (!lane) ask_for_scales(f, record, column, n, lane, every);
    if (lane + 1 < every) ask_for_scales(f, record, column, n, lane + 1, every);
    if (lane < every) column_sums(f, record, as, column, n, step, lane, every, h, tokens, next, room, sums);
    const int64_t count = (units - lane + kUnitLanes - 1) / kUnitLanes;
    for (int64_t k = 0; !as_they_are && k < count; k++) {
      column_scales(f, record, (lane + k * kUnitLanes) * c.unit / c.group, column, n, scale + k * room, shift + k * room);
      times_factor(as, n, scale + k * room);
    }
    for (int64_t t = 0; t < tokens; t++) {
      const Quantized to(h[t], f.width);
      const int32_t* mine = sums + (t * (units / every) + (every == 1 ? lane : 0)) * twice * room;
      const LaneSums all = {mine, kUnitLanes / every * twice * room, twice == 2 ? room : 0, as.zero,
                            to.scale[c.unit == 16] + lane, to.sum[c.unit == 16] + lane, count, lanes_of(n)};
      const auto with = [&](auto how, auto scales, auto shifts) {
        sum_lane<decltype(how)::value>(all, scales, shifts, lane, lanes + t * kUnitLanes / 2 * room, room);
      };
      const Constant<Shift, Shift::None> none;
      const Constant<Shift, Shift::Minimum> minimum;
      const auto widened = [=](int64_t k) { return scale + k * room; };
      const auto widened_shift = [=](int64_t k) { return shift + k * room; };
#ifdef __F16C__
      const int64_t first = lane * apart + column;
      const auto bytes = [&](auto scaled, int64_t part, int64_t supers) {
        scaled.bytes = (decltype(scaled.bytes))(record + part * apart) + first, scaled.numbers = record + supers * apart + column;
        const int shared = __builtin_ctzll(c.super / kUnitLanes);
        return [=](int64_t k) {
          return decltype(scaled){scaled.bytes + k * kUnitLanes * apart, scaled.numbers + (k >> shared) * apart};
        };
      };
      if (halves) {
        const auto own = [=](int64_t k) { return record + (c.extra + k * kUnitLanes) * apart + first; };
        with(none, own, own);
      } else if (positive) {
        with(minimum, bytes(ScaledBytes<uint8_t>(), c.extra, c.supers), bytes(ScaledBytes<uint8_t, true>(), c.shifts, c.min_supers));
      } else if (negative) {
        const auto own = bytes(ScaledBytes<int8_t>(), c.extra, c.supers);
        with(none, own, own);
      } else
#endif
      if (as.shift == Shift::None) with(none, widened, widened);
      else if (as.shift == Shift::Minimum) with(minimum, widened, widened_shift);
      else with(Constant<Shift, Shift::Zero>(), widened, widened_shift);
    }
  }
  for (int64_t t = 0; t < tokens; t++) memcpy(y[t], lanes + t * kUnitLanes / 2 * room, n * sizeof *lanes);
}

#ifdef __AVX2__
// Whether columns of down^T can be a block of many tokens.
bool is_block(const Format& f, const Integers& as, int64_t n) {
  const int64_t planes = 16 / as.bits, high_planes = as.highs ? 16 / as.highs : 1;
  return n % kOutputs == 0 && f.width % (4 * planes) == 0 && f.width % (4 * high_planes) == 0;
}

template <bool tiles>
void blocks_of_columns(const Format& f, const uint16_t* record, const Integers& as, int64_t column, int64_t n,
                       const float* const* h, int64_t tokens, float* const* y, float* scratch) {
  const Coding& c = f.matrix[DOWN];
  const int64_t width = f.width, units = width / c.unit, size = width * as.bits / 16, high_size = width * as.highs / 16;
  float *scales = scratch, *shifts = scales + units * n, *out = shifts + units * n;
  int32_t* lanes = whole_line((int32_t*)(out + kBlockTokens * kOutputs * kUnitLanes));
  for (int64_t u = 0; u < units; u++) {
    float *scale = scales + u * n, *shift = shifts + u * n;
    column_scales(f, record, u * c.unit / c.group, column, n, scale, shift);
    times_factor(as, n, scale);
  }
  with_kind_of_columns(as, [&](auto kind) {
    using K = decltype(kind);
    constexpr int64_t depth = K::depth;
    const int64_t size_of_block = width / depth * kOutputs + 48;  // not in the same sets of the caches
    float* numbers = whole_line((float*)(lanes + kBlocks * size_of_block));
    if constexpr (tiles) to_tiles<K>(h, tokens, width, c.unit, numbers);
    // Whole lines of memory at once: rows lie so far apart that they would not stay for another pass.
    for (int64_t at = 0; at < n; at += kBlocks * kOutputs) {
      const int64_t blocks = least(kBlocks, (n - at) / kOutputs);
      const uint16_t *codes = record + c.codes * f.hidden + column + at, *highs = record + c.highs * f.hidden + column + at;
      for (int64_t row = 0; row < size; row += 4, codes += 4 * f.hidden) {
        const int64_t high_row = as.highs ? row % high_size : 0, multiple = as.highs ? row / high_size : 0;
        for (int64_t k = 0; k < blocks; k += 2) {
          for (int64_t i = 0; i < 4; i++) soon(codes + (kBlockAhead + i) * f.hidden + k * kOutputs);
        }
        const DownRows rows = {codes, highs + high_row * f.hidden, f.hidden};
        turn_columns<K>(as, rows, multiple, blocks, size / depth * kOutputs, size_of_block, lanes + row / depth * kOutputs);
      }
      for (int64_t k = 0; k < blocks; k++) {
        const int64_t mine = at + k * kOutputs;
        const IntegerBlock block = {lanes + k * size_of_block, scales + mine, shifts + mine, n, width, c.unit, {}, {}};
        for (int64_t t0 = 0; t0 < tokens; t0 += kBlockTokens) {
          const int64_t count = least(kBlockTokens, tokens - t0);
          multiply_block<K, tiles>(as, block, h + t0, numbers + t0 * room_of_tiles(width), count, out);
          for (int64_t t = 0; t < count; t++) memcpy(y[t0 + t] + mine, out + t * kOutputs * kUnitLanes, kOutputs * sizeof *out);
        }
      }
    }
  });
}
#endif

template <bool tiles>
void integer_columns_of(const Format& f, const uint16_t* record, int64_t column, int64_t n, const float* const* h,
                        int64_t tokens, float* const* y, float* scratch, const uint16_t* next) {
  Integers as = integers_of(f.matrix[DOWN].kind);
#ifdef __AVX512VNNI__
  as = without_signs(as);
#endif
#ifdef __AVX2__
  if (tokens >= kMany && is_block(f, as, n)) {
    return blocks_of_columns<tiles>(f, record, as, column, n, h, tokens, y, scratch);
  }
#endif
  for (int64_t t = 0; t < tokens; t += kFew) {
    few_columns(f, record, as, column, n, h + t, least(kFew, tokens - t), y + t, scratch, next);
  }
}

void integer_columns(const Format& f, const uint16_t* record, int64_t column, int64_t n, const float* const* h,
                     int64_t tokens, float* const* y, float* scratch, const uint16_t* next) {
  integer_columns_of<false>(f, record, column, n, h, tokens, y, scratch, next);
}

}  // namespace
}  // namespace moejax
