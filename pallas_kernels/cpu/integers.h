// Products of integers: the codes of records with numbers of 8 bits (pallas_kernels/records/integers.py
// has the meaning). Sums of integers are exact, so only the order of the sum over units decides bits:
// it is one for every instruction set and every number of tokens. Included by kernels.cc.
//
// Codes are brought into bytes once for all tokens, and multiplied there: what depends on a kind is
// only how it gets there, so that no product is compiled for each of them.
#pragma once

namespace moejax {
namespace {

constexpr int64_t W = MOEJAX_LANES < 8 ? MOEJAX_LANES : 8;
typedef float vw __attribute__((vector_size(MOEJAX_LANES < 8 ? 4 * MOEJAX_LANES : 32)));
typedef int32_t wi __attribute__((vector_size(MOEJAX_LANES < 8 ? 4 * MOEJAX_LANES : 32)));
typedef int8_t vb __attribute__((vector_size(MOEJAX_LANES)));

constexpr int64_t kUnitLanes = 8;  // sums over units, which are added pairwise at the end
static int64_t lanes_of(int64_t n) { return (n + kUnitLanes - 1) / kUnitLanes * kUnitLanes; }

// n numbers in `quantized_size(n)` floats: their integers, and scale and sum of each unit of 32 and 16,
// zeros behind the last one.
struct Quantized {
  int8_t* q;
  float* scale[2];
  int32_t* sum[2];
  INLINE Quantized(const float* memory, int64_t n) : q((int8_t*)memory) {
    float* next = (float*)memory + n / 4;
    for (int i = 0; i < 2; i++) {
      const int64_t count = lanes_of(n / (i ? 16 : 32));
      scale[i] = next, sum[i] = (int32_t*)(next + count), next += 2 * count;
    }
  }
};

void quantize(const float* x, int64_t n, float* out) {
  const Quantized to(out, n);
  memset(out + n / 4, 0, (quantized_size(n) - n / 4) * sizeof *out);
  for (int64_t g = 0; g < n / 32; g++, x += 32) {
    uint32_t top = 0;
    for (int i = 0; i < 32; i++) {
      const uint32_t size = as_bits(x[i]) & 0x7fffffff;
      top = size > top ? size : top;
    }
    const float largest = as_float(top);
    to.scale[0][g] = to.scale[1][2 * g] = to.scale[1][2 * g + 1] = largest * (1 / 127.0f);
    int8_t* q = to.q + 32 * g;
    if (top >= 0x7f800000 || largest < 0x1p-100f) {
      memset(q, 0, 32 * sizeof *q);
      continue;
    }
    const vf inverse = splat(127 / largest), magic = splat(12582912.0f);  // rounds to even
    for (int i = 0; i < 32; i += L) {
      const vi whole = (vi)(unfused(load<vf>(x + i) * inverse) + magic) - (vi)magic;
      store(q + i, __builtin_convertvector(whole, vb));
    }
    int32_t halves[2] = {};
    for (int i = 0; i < 32; i++) halves[i / 16] += q[i];
    memcpy(to.sum[1] + 2 * g, halves, sizeof halves);
    to.sum[0][g] = halves[0] + halves[1];
  }
}

// How codes of a kind are multiplied: as bytes, whose integer is the byte less `zero`, and less the
// group's zero where it has one.
struct Integers {
  int bits, highs;      // of a code
  const uint8_t* list;  // bytes of 16 codes; null: a code is its byte
  bool small;           // bytes are unsigned, at most 63; otherwise signed
  int zero;
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
  Integers as = {bits_of(kind), highs_of(kind), nullptr, bits_of(kind) < 8, (int)zero_of(kind), 1, shift_of(kind)};
  if (as.bits == 8) as.zero -= 128;  // bytes are codes less 128
  if (kind == Codes::Int2) as.list = kListed<Codes::Int2>.of, as.zero = 3, as.factor = 0.5f;
  if (kind == Codes::E2M1) as.list = kListed<Codes::E2M1>.of, as.zero = 12, as.factor = 0.5f;
  if (kind == Codes::IQ4) as.list = kListed<Codes::IQ4>.of, as.zero = 0, as.small = false;
  return as;
}

// ---- codes → bytes, any number of them

// Of a plane of n elements.
void bytes_of(const Integers& as, const uint16_t* codes, int64_t plane, int64_t n, uint8_t* out) {
  const int shift = as.bits * (int)plane, mask = (1 << as.bits) - 1, flip = as.bits == 8 ? 128 : 0;
  if (as.list) {
    for (int64_t i = 0; i < n; i++) out[i] = as.list[(codes[i] >> shift) & mask];
  } else {
    for (int64_t i = 0; i < n; i++) out[i] = (uint8_t)(((codes[i] >> shift) & mask) ^ flip);
  }
}

// Their upper bits, of a plane of n elements of those.
void add_highs(const Integers& as, const uint16_t* highs, int64_t plane, int64_t n, uint8_t* out) {
  const int shift = as.highs * (int)plane, mask = (1 << as.highs) - 1;
  for (int64_t i = 0; i < n; i++) out[i] |= (uint8_t)(((highs[i] >> shift) & mask) << as.bits);
}

// ---- codes → bytes, by vectors

#ifdef __AVX2__
typedef __m256i v32;

// 16 bytes for each half.
INLINE v32 listed(const Integers& as) {
  return as.list ? _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)as.list)) : v32{};
}

// One plane of the bytes of elements, the lower or the upper ones. plane: counted from the byte's first.
template <int bits, bool list>
INLINE v32 plane_of(v32 bytes, int plane, v32 table) {
  if (bits == 8) return _mm256_xor_si256(bytes, _mm256_set1_epi8((char)128));
  if (plane) bytes = _mm256_srli_epi16(bytes, bits * plane);
  bytes = _mm256_and_si256(bytes, _mm256_set1_epi8((1 << bits) - 1));
  return list ? _mm256_shuffle_epi8(table, bytes) : bytes;
}

// The lower bytes of 32 elements, and the upper ones.
INLINE void split(const uint16_t* elements, v32 (&halves)[2]) {
  const v32 a = load<v32>(elements), b = load<v32>(elements + 16), low = _mm256_set1_epi16(0xff);
  halves[0] = _mm256_packus_epi16(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
  halves[1] = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
  for (v32& half : halves) half = _mm256_permute4x64_epi64(half, 0xd8);
}

// A row of n integers. later: what is asked for meanwhile, as long.
template <int bits, bool list>
void row_bytes(const Integers& as, const uint16_t* codes, int64_t n, const uint16_t* later, uint8_t* out) {
  constexpr int planes = 16 / bits;
  const int64_t size = n / planes;
  const v32 table = listed(as);
  for (int64_t i = 0; i < size; i += 32) {
    const int64_t at = least(i, size - 32);  // again, what the last ones have of those before
    v32 halves[2];
    soon(later + i);
    split(codes + at, halves);
#pragma GCC unroll 8
    for (int p = 0; p < planes; p++) {
      store(out + at + p * size, plane_of<bits, list>(halves[p * bits / 8], p % (8 / bits), table));
    }
  }
}

template <int more>
void row_highs(const uint16_t* highs, int64_t n, uint8_t* out) {
  constexpr int planes = 16 / more;
  const int64_t size = n / planes;
  const v32 mask = _mm256_set1_epi8(((1 << more) - 1) << 4);
  for (int64_t i = 0; i < size; i += 32) {
    const int64_t at = least(i, size - 32);
    v32 halves[2];
    split(highs + at, halves);
#pragma GCC unroll 16
    for (int p = 0; p < planes; p++) {
      const int shift = p * more % 8 - 4;
      const v32 half = halves[p * more / 8];
      const v32 placed = shift > 0 ? _mm256_srli_epi16(half, shift) : _mm256_slli_epi16(half, -shift);
      uint8_t* mine = out + at + p * size;
      store(mine, _mm256_or_si256(load<v32>(mine), _mm256_and_si256(placed, mask)));
    }
  }
}

// Four rows of 16 elements: in lanes of 32 bits their lower bytes, and the upper ones, of columns 0–3
// and 8–11, then of the others.
INLINE void turn_rows(const uint16_t* rows, int64_t apart, v32 (&lower)[2], v32 (&upper)[2]) {
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

// Where the bytes of rows of elements go: of each plane, of each four rows, the vectors of turn_rows.
struct Turned {
  uint8_t* out;
  int64_t planes_apart, fours_apart;
};

// Of 16 columns of `rows` rows of elements, all planes.
template <int bits, bool list>
void turned_bytes(const Integers& as, const uint16_t* codes, int64_t apart, int64_t rows, Turned to) {
  constexpr int planes = 16 / bits;
  const v32 table = listed(as);
  for (int64_t i = 0; i < rows; i += 4, to.out += to.fours_apart) {
    v32 bytes[2][2];
    turn_rows(codes + i * apart, apart, bytes[0], bytes[1]);
#pragma GCC unroll 8
    for (int p = 0; p < planes; p++) {
      for (int k = 0; k < 2; k++) {
        store(to.out + p * to.planes_apart + 32 * k, plane_of<bits, list>(bytes[p * bits / 8][k], p % (8 / bits), table));
      }
    }
  }
}

// Their upper bits, which are one plane of their own elements.
void turned_highs(const Integers& as, const uint16_t* highs, int64_t apart, int64_t plane, int64_t rows, Turned to) {
  const int place = as.highs * (int)plane;
  const __m128i shift = _mm_cvtsi32_si128(place % 8);
  const v32 mask = _mm256_set1_epi8((char)((1 << as.highs) - 1));
  for (int64_t i = 0; i < rows; i += 4, to.out += to.fours_apart) {
    v32 bytes[2][2];
    turn_rows(highs + i * apart, apart, bytes[0], bytes[1]);
    for (int k = 0; k < 2; k++) {
      const v32 placed = _mm256_and_si256(_mm256_srl_epi16(place < 8 ? bytes[0][k] : bytes[1][k], shift), mask);
      store(to.out + 32 * k, _mm256_or_si256(load<v32>(to.out + 32 * k), _mm256_slli_epi16(placed, 4)));
    }
  }
}

// f(bits, list) of the ways there are.
template <class F>
INLINE void with_bytes(const Integers& as, F f) {
  if (as.bits == 8) return f(Constant<int, 8>(), Constant<bool, false>());
  if (as.bits == 2) return f(Constant<int, 2>(), Constant<bool, true>());
  if (as.list) return f(Constant<int, 4>(), Constant<bool, true>());
  f(Constant<int, 4>(), Constant<bool, false>());
}

// ---- bytes times numbers

// Sums of four products in each lane, onto others.
template <bool small>
INLINE v32 add_products(v32 sum, v32 bytes, v32 q) {
  if (!small) q = _mm256_sign_epi8(q, bytes), bytes = _mm256_abs_epi8(bytes);
#ifdef __AVX512VNNI__
  return _mm256_dpbusd_epi32(sum, bytes, q);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(bytes, q), _mm256_set1_epi16(1)));
#endif
}

// The same of two vectors.
template <bool small>
INLINE v32 add_products(v32 sum, const v32 (&bytes)[2], const v32 (&q)[2]) {
#ifndef __AVX512VNNI__
  if (small) {  // 4 · 63 · 127 is less than 2^15
    const v32 both = _mm256_add_epi16(_mm256_maddubs_epi16(bytes[0], q[0]), _mm256_maddubs_epi16(bytes[1], q[1]));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(both, _mm256_set1_epi16(1)));
  }
#endif
  return add_products<small>(add_products<small>(sum, bytes[0], q[0]), bytes[1], q[1]);
}
#endif

// Sums of products for each `unit` of n integers, 16 or 32, an even number of units of 16; there is room
// behind the last one.
template <bool small, int unit>
void unit_sums(const uint8_t* bytes, const int8_t* q, int64_t n, int32_t* out) {
#ifdef __AVX2__
  constexpr int vectors = unit / 4;  // of eight units
  const auto sums_at = [=](int64_t at) { return add_products<small>(v32{}, load<v32>(bytes + at), load<v32>(q + at)); };
  int64_t at = 0;
  for (; at + 32 * vectors <= n; at += 32 * vectors, out += 8) {
    v32 v[vectors];
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++) v[i] = sums_at(at + 32 * i);
    const v32 a = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    if constexpr (unit == 16) {
      store(out, _mm256_permutevar8x32_epi32(a, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    } else {
      const v32 b = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
      store(out, _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31)));
    }
  }
  memset(out, 0, 8 * sizeof *out);
  for (; at < n; at += 32) {
    int32_t lanes[8], halves[2] = {};
    store(lanes, sums_at(at));
    for (int i = 0; i < 8; i++) halves[i / 4] += lanes[i];
    if (unit == 16) *out++ = halves[0], *out++ = halves[1];
    else *out++ = halves[0] + halves[1];
  }
#else
  for (int64_t at = 0; at < n; at += unit) {
    int32_t sum = 0;
    for (int64_t i = at; i < at + unit; i++) sum += (small ? bytes[i] : (int8_t)bytes[i]) * q[i];
    *out++ = sum;
  }
#endif
}

// lane[u mod 8] += sum · scale · scale of x, and += minimum · …, units ascending; then pairwise.
template <Shift how>
float sum_of_units(const int32_t* sums, int zero, const float* scale, const float* shift, const float* x_scale,
                   const int32_t* x_sum, int64_t units) {
  vw lane[kUnitLanes / W] = {};
  for (int64_t u = 0; u < units; u += kUnitLanes) {
#pragma GCC unroll 2
    for (int64_t k = 0; k < kUnitLanes / W; k++) {
      const int64_t at = u + k * W;
      const wi of_x = load<wi>(x_sum + at);
      const vw by = load<vw>(x_scale + at);
      wi zeros = zero - wi{};
      if (how == Shift::Zero) zeros += __builtin_convertvector(load<vw>(shift + at), wi);
      const wi whole = load<wi>(sums + at) - of_x * zeros;
      lane[k] += unfused(__builtin_convertvector(whole, vw) * (load<vw>(scale + at) * by));
      if (how != Shift::Minimum) continue;
      lane[k] += unfused(__builtin_convertvector(of_x, vw) * (load<vw>(shift + at) * by));
    }
  }
  float all[kUnitLanes];
  memcpy(all, lane, sizeof all);
  for (int64_t half = kUnitLanes / 2; half; half /= 2) {
    for (int64_t i = 0; i < half; i++) all[i] += all[i + half];
  }
  return all[0];
}

#ifdef __AVX2__
// ---- many tokens: outputs side by side in lanes, so that no sum crosses them

constexpr int64_t kMany = kTokens;  // for which a block is worth it
constexpr int64_t kOutputs = 16;    // of a block

// The bytes of each four numbers of the sum, as turn_rows has them, and scales and shifts of each unit,
// `apart` from each other.
struct IntegerBlock {
  const uint8_t* bytes;
  const float *scale, *shift;
  int64_t apart, n, unit;
  int zero;
};

// out[t · kOutputs · kUnitLanes + i] for up to kIntegerTokens tokens; what is behind is scratch.
template <bool small, Shift how>
void multiply_block(const IntegerBlock& b, const float* const* x, int64_t tokens, float* out) {
  constexpr int64_t all = kOutputs * kUnitLanes;
  const bool sixteen = b.unit == 16;
  const int8_t* q[kIntegerTokens + 1];
  const float* x_scale[kIntegerTokens];
  const int32_t* x_sum[kIntegerTokens];
  for (int64_t t = 0; t < tokens; t++) {
    const Quantized to(x[t], b.n);
    q[t] = q[t + 1] = to.q, x_scale[t] = to.scale[sixteen], x_sum[t] = to.sum[sixteen];
  }
  memset(out, 0, tokens * all * sizeof *out);
  for (int64_t u = 0; u < b.n / b.unit; u++) {
    const uint8_t* bytes = b.bytes + u * b.unit * kOutputs;
    vw scale[2], shift[2] = {};
    wi zeros[2];
    for (int k = 0; k < 2; k++) {
      scale[k] = load<vw>(b.scale + u * b.apart + 8 * k), zeros[k] = b.zero - wi{};
      if (how != Shift::None) shift[k] = load<vw>(b.shift + u * b.apart + 8 * k);
      if (how == Shift::Zero) zeros[k] += __builtin_convertvector(shift[k], wi);
    }
    for (int64_t first = 0; first < tokens; first += 2) {  // of an odd one the last is there twice
      v32 sums[2][2] = {};
      for (int64_t i = 0; i < b.unit; i += 8) {
        v32 factors[2][2];
        for (int t = 0; t < 2; t++) {
          int32_t four[2];
          memcpy(four, q[first + t] + u * b.unit + i, sizeof four);
          factors[t][0] = _mm256_set1_epi32(four[0]), factors[t][1] = _mm256_set1_epi32(four[1]);
        }
        for (int k = 0; k < 2; k++) {
          const uint8_t* mine = bytes + i * kOutputs + 32 * k;
          const v32 both[] = {load<v32>(mine), load<v32>(mine + 4 * kOutputs)};
          for (int t = 0; t < 2; t++) sums[t][k] = add_products<small>(sums[t][k], both, factors[t]);
        }
      }
      for (int64_t t = first; t < least(first + 2, tokens); t++) {
        const v32(&mine)[2] = sums[t - first];
        const wi whole[] = {(wi)_mm256_permute2x128_si256(mine[0], mine[1], 0x20),
                            (wi)_mm256_permute2x128_si256(mine[0], mine[1], 0x31)};
        const float by = x_scale[t][u];
        const int32_t of_x = x_sum[t][u];
        float* lane = out + t * all + u % kUnitLanes * kOutputs;
        for (int k = 0; k < 2; k++) {
          vw total = load<vw>(lane + 8 * k);
          total += unfused(__builtin_convertvector(whole[k] - of_x * zeros[k], vw) * (scale[k] * by));
          if (how == Shift::Minimum) total += unfused((float)of_x * (shift[k] * by));
          store(lane + 8 * k, total);
        }
      }
    }
  }
  for (int64_t t = 0; t < tokens; t++, out += all) {
    for (int64_t half = all / 2; half >= kOutputs; half /= 2) {
      for (int64_t i = 0; i < half; i++) out[i] += out[i + half];
    }
  }
}

void multiply_block(const Integers& as, const IntegerBlock& b, const float* const* x, int64_t tokens, float* out) {
  const auto with = [&](auto small) {
    constexpr bool is = decltype(small)::value;
    if (as.shift == Shift::None) return multiply_block<is, Shift::None>(b, x, tokens, out);
    if (as.shift == Shift::Zero) return multiply_block<is, Shift::Zero>(b, x, tokens, out);
    multiply_block<is, Shift::Minimum>(b, x, tokens, out);
  };
  if (as.small) with(Constant<bool, true>());
  else with(Constant<bool, false>());
}

// 16 rows of n bytes, `apart` from each other, as a block has them.
void turn_bytes(const uint8_t* rows, int64_t apart, int64_t n, uint8_t* out) {
  for (int64_t at = 0; at < n; at += 16, out += 16 * kOutputs) {
    for (int k = 0; k < 2; k++) {
      v32 row[4];
      for (int i = 0; i < 4; i++) {
        const uint8_t* mine = rows + (4 * k + i) * apart + at;
        row[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(mine)), load<__m128i>(mine + 8 * apart), 1);
      }
      const v32 even[] = {_mm256_unpacklo_epi32(row[0], row[1]), _mm256_unpacklo_epi32(row[2], row[3])};
      const v32 odd[] = {_mm256_unpackhi_epi32(row[0], row[1]), _mm256_unpackhi_epi32(row[2], row[3])};
      store(out + 32 * k, _mm256_unpacklo_epi64(even[0], even[1]));
      store(out + 32 * k + 64, _mm256_unpackhi_epi64(even[0], even[1]));
      store(out + 32 * k + 128, _mm256_unpacklo_epi64(odd[0], odd[1]));
      store(out + 32 * k + 192, _mm256_unpackhi_epi64(odd[0], odd[1]));
    }
  }
}
#endif

// ---- gate and up

// Scales and shifts of a row's units, zeros behind them. raw: room for those of groups.
void units_of(const Format& f, const uint16_t* record, int matrix, const Integers& as, int64_t row, float* scale,
              float* shift, float* raw) {
  const Coding& c = f.matrix[matrix];
  const int64_t groups = (f.hidden + c.group - 1) / c.group, units = f.hidden / c.unit, each = c.group / c.unit;
  const bool shifts = as.shift != Shift::None;
  groups_of(f, record, matrix, row / c.across, 0, groups, each == 1 ? scale : raw, each == 1 ? shift : raw + groups);
  for (int64_t u = 0; each > 1 && u < units; u++) {
    scale[u] = raw[u / each];
    if (shifts) shift[u] = raw[groups + u / each];
  }
  for (int64_t u = 0; as.factor != 1 && u < units; u++) scale[u] *= as.factor;
  for (int64_t u = units; u < lanes_of(units); u++) scale[u] = shift[u] = 0;
}

constexpr int64_t kRowsAhead = 4;

// A row of gate or up.
void row_integers(const Format& f, const uint16_t* record, const Coding& c, const Integers& as, int64_t row,
                  uint8_t* out) {
  const int64_t n = f.hidden, size = n * as.bits / 16, high_size = n * as.highs / 16;
  const uint16_t *codes = record + c.codes * n + row * size, *highs = record + c.highs * n + row * high_size;
#ifdef __AVX2__
  const bool by_vectors = size >= 32, highs_too = high_size >= 32;
  if (by_vectors) {
    with_bytes(as, [&](auto bits, auto list) {
      row_bytes<bits.value, list.value>(as, codes, n, codes + kRowsAhead * size, out);
    });
  }
  if (highs_too) (as.highs == 1 ? row_highs<1> : row_highs<2>)(highs, n, out);
#else
  constexpr bool by_vectors = false, highs_too = false;
#endif
  for (int64_t p = 0; !by_vectors && p < 16 / as.bits; p++) bytes_of(as, codes, p, size, out + p * size);
  if (!as.highs || highs_too) return;
  for (int64_t p = 0; p < 16 / as.highs; p++) add_highs(as, highs, p, high_size, out + p * high_size);
}

void integer_dots(const Format& f, const uint16_t* record, int matrix, int64_t first, int64_t rows,
                  const float* const* x, int64_t tokens, float* y, int64_t stride, float* scratch) {
  const Coding& c = f.matrix[matrix];
  const Integers as = integers_of(c.kind);
  const int64_t n = f.hidden, units = n / c.unit, room = lanes_of(n / 16) + 8;
  int32_t* sums = (int32_t*)scratch;
  float *scale = scratch + room, *shift = scale + room, *raw = shift + room;
  uint8_t* bytes = (uint8_t*)(raw + 2 * room);
#ifdef __AVX2__
  if (tokens >= kMany) {
    uint8_t *own = (uint8_t*)(scratch + n + 128), *block = own + kOutputs * n;
    float *scales = (float*)(block + kOutputs * n), *shifts = scales + units * kOutputs, *out = shifts + units * kOutputs;
    for (int64_t r = 0; r < rows; r += kOutputs) {
      for (int64_t i = 0; i < kOutputs; i++) {
        const int64_t row = first + least(r + i, rows - 1);
        units_of(f, record, matrix, as, row, scale, shift, raw);
        row_integers(f, record, c, as, row, own + i * n);
        for (int64_t u = 0; u < units; u++) scales[u * kOutputs + i] = scale[u], shifts[u * kOutputs + i] = shift[u];
      }
      turn_bytes(own, n, n, block);
      const IntegerBlock all = {block, scales, shifts, kOutputs, n, c.unit, as.zero};
      for (int64_t t0 = 0; t0 < tokens; t0 += kIntegerTokens) {
        const int64_t count = least(kIntegerTokens, tokens - t0);
        multiply_block(as, all, x + t0, count, out);
        for (int64_t t = 0; t < count; t++) {
          for (int64_t i = 0; i < least(kOutputs, rows - r); i++) y[(t0 + t) * stride + r + i] = out[t * kOutputs * kUnitLanes + i];
        }
      }
    }
    return;
  }
#endif
  const bool sixteen = c.unit == 16;
  const auto multiply = as.small ? sixteen ? unit_sums<true, 16> : unit_sums<true, 32>
                                 : sixteen ? unit_sums<false, 16> : unit_sums<false, 32>;
  const auto add = as.shift == Shift::None ? sum_of_units<Shift::None>
                   : as.shift == Shift::Zero ? sum_of_units<Shift::Zero> : sum_of_units<Shift::Minimum>;
  for (int64_t r = 0; r < rows; r++) {
    units_of(f, record, matrix, as, first + r, scale, shift, raw);
    row_integers(f, record, c, as, first + r, bytes);
    for (int64_t t = 0; t < tokens; t++) {
      const Quantized to(x[t], n);
      multiply(bytes, to.q, n, sums);
      y[t * stride + r] = add(sums, as.zero, scale, shift, to.scale[sixteen], to.sum[sixteen], units);
    }
  }
}

// ---- down^T: lanes are columns

#ifdef __AVX2__
constexpr int64_t kTileColumns = 32;  // whole lines of memory
constexpr int64_t kMostTileRows = 32;     // at most

// Sums of products for `rows` rows of a plane of a tile and each of its columns.
template <bool small>
void tile_sums(const uint8_t* bytes, const int8_t* q, int64_t rows, int32_t* out) {
  v32 sums[4] = {};
  for (int64_t i = 0; i < rows; i += 8, bytes += 8 * kTileColumns) {
    int32_t four[2];
    memcpy(four, q + i, sizeof four);
    const v32 factors[] = {_mm256_set1_epi32(four[0]), _mm256_set1_epi32(four[1])};
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      const v32 both[] = {load<v32>(bytes + 32 * k), load<v32>(bytes + 32 * (k + 4))};
      sums[k] = add_products<small>(sums[k], both, factors);
    }
  }
  for (int k = 0; k < 4; k += 2) {
    store(out + 8 * k, _mm256_permute2x128_si256(sums[k], sums[k + 1], 0x20));
    store(out + 8 * k + 8, _mm256_permute2x128_si256(sums[k], sums[k + 1], 0x31));
  }
}
#endif

// Sums of products for each `step` rows and each of n columns, to out[t][row / step][column], `room`
// apart.
void column_sums(const Format& f, const uint16_t* record, const Integers& as, int64_t column, int64_t n, int64_t step,
                 const float* const* h, int64_t tokens, int64_t room, int32_t* out) {
  const int64_t planes = 16 / as.bits, high_planes = as.highs ? 16 / as.highs : 1, apart = f.hidden;
  const Coding& c = f.matrix[DOWN];
  const int64_t width = f.width, size = (width + planes - 1) / planes, high_size = (width + high_planes - 1) / high_planes;
  const int64_t steps = width / step;
  const uint16_t *codes = record + c.codes * apart + column, *highs = record + c.highs * apart + column;
#ifdef __AVX2__
  const bool whole = width % planes == 0 && size % step == 0, high = width % high_planes == 0 && high_size % step == 0;
  if (n % kTileColumns == 0 && whole && (!as.highs || high)) {
    alignas(32) uint8_t tile[8 * kMostTileRows * kTileColumns];
    for (int64_t row = 0; row < size; row += step) {
      // The next rows of these columns, or the first ones of those behind them.
      const uint16_t* later = codes + (row + step < size ? (row + step) * apart : n);
      for (int64_t at = 0; at < n; at += kTileColumns) {
        for (int64_t i = 0; i < step; i++) soon(later + i * apart + at);
        for (int64_t half = 0; half < 2; half++) {
          const int64_t mine = at + 16 * half;
          const auto to = [&](int64_t plane) {
            return Turned{tile + plane * step * kTileColumns + 64 * half, step * kTileColumns, 4 * kTileColumns};
          };
          with_bytes(as, [&](auto bits, auto list) {
            turned_bytes<bits.value, list.value>(as, codes + row * apart + mine, apart, step, to(0));
          });
          for (int64_t p = 0; as.highs && p < planes; p++) {
            const int64_t r = row + p * size;
            turned_highs(as, highs + r % high_size * apart + mine, apart, r / high_size, step, to(p));
          }
        }
        for (int64_t p = 0; p < planes; p++) {
          const int64_t mine = row + p * size;
          for (int64_t t = 0; t < tokens; t++) {
            const int8_t* q = Quantized(h[t], width).q + mine;
            (as.small ? tile_sums<true> : tile_sums<false>)(tile + p * step * kTileColumns, q, step,
                                                            out + (t * steps + mine / step) * room + at);
          }
        }
      }
    }
    return;
  }
#endif
  memset(out, 0, tokens * steps * room * sizeof *out);
  uint8_t bytes[kIntegerColumns];
  for (int64_t r = 0; r < width; r++) {
    bytes_of(as, codes + r % size * apart, r / size, n, bytes);
    if (as.highs) add_highs(as, highs + r % high_size * apart, r / high_size, n, bytes);
    for (int64_t t = 0; t < tokens; t++) {
      const int32_t q = Quantized(h[t], width).q[r];
      int32_t* mine = out + (t * steps + r / step) * room;
      if (as.small) {
        for (int64_t i = 0; i < n; i++) mine[i] += bytes[i] * q;
      } else {
        for (int64_t i = 0; i < n; i++) mine[i] += (int8_t)bytes[i] * q;
      }
    }
  }
}

// Asks for down's scales of n columns, and for what groups have beside them: their lines lie rows apart,
// where no processor looks ahead.
void ask_for_scales(const Format& f, const uint16_t* record, int64_t column, int64_t n) {
  const Coding& c = f.matrix[DOWN];
  if (c.across > 1) return;
  const auto ask = [&](int64_t part, int64_t size) {
    const char* first = (const char*)(record + part * f.hidden) + column * size;
    for (int64_t row = 0; row < f.width; row += c.group, first += f.hidden * size) {
      for (int64_t i = 0; i < n * size; i += 64) soon((const uint16_t*)(first + i));
    }
  };
  const int64_t size = c.scale == ScaleType::F32 ? 4 : c.scale <= ScaleType::BF16 ? 2 : 1;
  ask(c.extra, size);
  if (has_shifts(c.kind)) ask(c.shifts, shift_of(c.kind) == Shift::Zero ? 1 : size);
}

// The terms of a unit of rows, onto their sum's lane of n columns. twice: another half of the unit's
// sums, or null.
template <Shift how>
void add_unit(const int32_t* sums, const int32_t* twice, int zero, const float* scale, const float* shift, float by,
              int32_t of_h, int64_t n, float* lane) {
  for (int64_t i = 0; i < n; i += W) {
    wi whole = load<wi>(sums + i);
    if (twice) whole += load<wi>(twice + i);
    if (how == Shift::Zero) whole -= of_h * (zero + __builtin_convertvector(load<vw>(shift + i), wi));
    else whole -= of_h * zero;
    vw total = load<vw>(lane + i);
    total += unfused(__builtin_convertvector(whole, vw) * (load<vw>(scale + i) * by));
    if (how == Shift::Minimum) total += unfused((float)of_h * (load<vw>(shift + i) * by));
    store(lane + i, total);
  }
}

void few_columns(const Format& f, const uint16_t* record, const Integers& as, int64_t column, int64_t n,
                 const float* const* h, int64_t tokens, float* const* y, float* scratch) {
  const Coding& c = f.matrix[DOWN];
  const int64_t planes = 16 / as.bits, high_planes = as.highs ? 16 / as.highs : 1;
  const int64_t room = lanes_of(n), units = f.width / c.unit, part = f.width / (planes > high_planes ? planes : high_planes);
  const int64_t step = c.unit == 32 && part % 32 == 0 ? 32 : 16, twice = c.unit / step;
  float *scale = scratch, *shift = scale + room, *lanes = shift + room;
  int32_t* sums = (int32_t*)(lanes + tokens * kUnitLanes * room);
  memset(scratch, 0, (2 + tokens * kUnitLanes) * room * sizeof *scratch);
  const auto add = as.shift == Shift::None ? add_unit<Shift::None>
                   : as.shift == Shift::Zero ? add_unit<Shift::Zero> : add_unit<Shift::Minimum>;
  ask_for_scales(f, record, column, n);
  column_sums(f, record, as, column, n, step, h, tokens, room, sums);
  for (int64_t u = 0; u < units; u++) {
    if (u * c.unit % c.group == 0) {
      column_scales(f, record, u * c.unit / c.group, column, n, scale, shift);
      for (int64_t i = 0; as.factor != 1 && i < n; i++) scale[i] *= as.factor;
    }
    for (int64_t t = 0; t < tokens; t++) {
      const Quantized to(h[t], f.width);
      const int32_t* mine = sums + (t * units + u) * twice * room;
      add(mine, twice == 2 ? mine + room : nullptr, as.zero, scale, shift, to.scale[c.unit == 16][u],
          to.sum[c.unit == 16][u], room, lanes + (t * kUnitLanes + u % kUnitLanes) * room);
    }
  }
  for (int64_t t = 0; t < tokens; t++) {
    float* lane = lanes + t * kUnitLanes * room;
    for (int64_t half = kUnitLanes / 2; half; half /= 2) {
      for (int64_t i = 0; i < half * room; i++) lane[i] += lane[i + half * room];
    }
    memcpy(y[t], lane, n * sizeof *lane);
  }
}

#ifdef __AVX2__
// Whether columns of down^T can be a block of many tokens.
bool is_block(const Format& f, const Integers& as, int64_t n) {
  const int64_t planes = 16 / as.bits, high_planes = as.highs ? 16 / as.highs : 1;
  return n % kOutputs == 0 && f.width % (4 * planes) == 0 && f.width % (4 * high_planes) == 0;
}

void blocks_of_columns(const Format& f, const uint16_t* record, const Integers& as, int64_t column, int64_t n,
                       const float* const* h, int64_t tokens, float* const* y, float* scratch) {
  const Coding& c = f.matrix[DOWN];
  const int64_t width = f.width, units = width / c.unit, size = width * as.bits / 16, high_size = width * as.highs / 16;
  float *scales = scratch, *shifts = scales + units * n, *out = shifts + units * n;
  uint8_t* bytes = (uint8_t*)(out + kIntegerTokens * kOutputs * kUnitLanes);
  for (int64_t u = 0; u < units; u++) {
    float *scale = scales + u * n, *shift = shifts + u * n;
    column_scales(f, record, u * c.unit / c.group, column, n, scale, shift);
    for (int64_t i = 0; as.factor != 1 && i < n; i++) scale[i] *= as.factor;
  }
  for (int64_t at = 0; at < n; at += kOutputs) {
    const uint16_t *codes = record + c.codes * f.hidden + column + at, *highs = record + c.highs * f.hidden + column + at;
    const auto to = [&](int64_t row) { return Turned{bytes + row * kOutputs, size * kOutputs, 4 * kOutputs}; };
    with_bytes(as, [&](auto bits, auto list) {
      turned_bytes<bits.value, list.value>(as, codes, f.hidden, size, to(0));
    });
    for (int64_t p = 0; as.highs && p < 16 / as.highs; p++) turned_highs(as, highs, f.hidden, p, high_size, to(p * high_size));
    const IntegerBlock block = {bytes, scales + at, shifts + at, n, width, c.unit, as.zero};
    multiply_block(as, block, h, tokens, out);
    for (int64_t t = 0; t < tokens; t++) memcpy(y[t] + at, out + t * kOutputs * kUnitLanes, kOutputs * sizeof *out);
  }
}
#endif

void integer_columns(const Format& f, const uint16_t* record, int64_t column, int64_t n, const float* const* h,
                     int64_t tokens, float* const* y, float* scratch) {
  const Integers as = integers_of(f.matrix[DOWN].kind);
#ifdef __AVX2__
  if (tokens >= kMany && is_block(f, as, n)) {
    return blocks_of_columns(f, record, as, column, n, h, tokens, y, scratch);
  }
#endif
  for (int64_t t = 0; t < tokens; t += kTokens) {
    few_columns(f, record, as, column, n, h + t, least(kTokens, tokens - t), y + t, scratch);
  }
}

}  // namespace
}  // namespace moejax
