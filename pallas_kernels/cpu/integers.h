// Products of integers: the codes of records with numbers of 8 bits (pallas_kernels/records/integers.py
// has the meaning). Sums of integers are exact, so only the order of the sum over units decides bits:
// it is one for every instruction set and every number of tokens. Included by kernels.cc.
#pragma once

namespace moejax {
namespace {

typedef uint16_t v16 __attribute__((vector_size(32)));
constexpr int64_t W = MOEJAX_LANES < 8 ? MOEJAX_LANES : 8;
typedef float vw __attribute__((vector_size(MOEJAX_LANES < 8 ? 4 * MOEJAX_LANES : 32)));
typedef int32_t wi __attribute__((vector_size(MOEJAX_LANES < 8 ? 4 * MOEJAX_LANES : 32)));

constexpr int64_t kUnitLanes = 8;  // sums over units, which are added pairwise at the end
static int64_t lanes_of(int64_t n) { return (n + kUnitLanes - 1) / kUnitLanes * kUnitLanes; }

// n numbers in `quantized_size(n)` floats: their integers, and scale and sum of each unit of 32 and 16,
// zeros behind the last one.
struct Quantized {
  int16_t* q;
  float* scale[2];
  int32_t* sum[2];
  INLINE Quantized(const float* memory, int64_t n) : q((int16_t*)memory) {
    float* next = (float*)memory + n / 2;
    for (int i = 0; i < 2; i++) {
      const int64_t count = lanes_of(n / (i ? 16 : 32));
      scale[i] = next, sum[i] = (int32_t*)(next + count), next += 2 * count;
    }
  }
};

void quantize(const float* x, int64_t n, float* out) {
  const Quantized to(out, n);
  memset(out + n / 2, 0, (quantized_size(n) - n / 2) * sizeof *out);
  for (int64_t g = 0; g < n / 32; g++, x += 32) {
    uint32_t top = 0;
    for (int i = 0; i < 32; i++) {
      const uint32_t size = as_bits(x[i]) & 0x7fffffff;
      top = size > top ? size : top;
    }
    const float largest = as_float(top);
    to.scale[0][g] = to.scale[1][2 * g] = to.scale[1][2 * g + 1] = largest * (1 / 127.0f);
    int16_t* q = to.q + 32 * g;
    if (top >= 0x7f800000 || largest < 0x1p-100f) {
      memset(q, 0, 32 * sizeof *q);
      continue;
    }
    const vf inverse = splat(127 / largest), magic = splat(12582912.0f);  // rounds to even
    for (int i = 0; i < 32; i += L) {
      const vi whole = (vi)(unfused(load<vf>(x + i) * inverse) + magic) - (vi)magic;
      for (int64_t j = 0; j < L; j++) q[i + j] = (int16_t)whole[j];
    }
    int32_t halves[2] = {};
    for (int i = 0; i < 32; i++) halves[i / 16] += q[i];
    memcpy(to.sum[1] + 2 * g, halves, sizeof halves);
    to.sum[0][g] = halves[0] + halves[1];
  }
}

constexpr bool has_integers(Codes kind) {
  return kind != Codes::Dense && kind != Codes::Lossless12 && kind != Codes::E4M3;
}
// The integer that means 0, where it is one for all groups.
constexpr int zero_integer(Codes kind) { return kind == Codes::Int2 ? 0 : (int)zero_of(kind); }
// What an integer is multiplied with, beside its scale.
constexpr float factor_of(Codes kind) { return kind == Codes::Int2 || kind == Codes::E2M1 ? 0.5f : 1; }
constexpr bool is_listed(Codes kind) { return kind == Codes::E2M1 || kind == Codes::IQ4; }

template <Codes kind>
struct Listed {
  alignas(16) uint8_t of[16];  // 128 more, so that they are positive
  constexpr Listed() : of() {
    for (int i = 0; i < 16; i++) of[i] = (uint8_t)(128 + (int)(value_of(kind, i) / factor_of(kind)));
  }
};
template <Codes kind>
constexpr Listed<kind> kListed;

// Codes in the lanes → integers.
template <Codes kind>
INLINE v16 integers_of(v16 codes) {
  if constexpr (kind == Codes::Int2) return codes + codes - (uint16_t)3;
  if constexpr (is_listed(kind)) {
#ifdef __AVX2__
    const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)kListed<kind>.of));
    return (v16)_mm256_shuffle_epi8(table, (__m256i)(codes | (uint16_t)0x8000)) - (uint16_t)128;
#else
    for (int i = 0; i < 16; i++) codes[i] = (uint16_t)(kListed<kind>.of[codes[i]] - 128);
#endif
  }
  return codes;
}

// The integers of a plane of 16 elements, with their upper bits, high_shift bits up, of others.
template <Codes kind, int plane>
INLINE v16 integers_at(v16 elements, const uint16_t* highs, int high_shift) {
  constexpr int bits = bits_of(kind);
  v16 codes = elements >> (uint16_t)(bits * plane);
  if constexpr (bits * (plane + 1) < 16) codes = codes & (uint16_t)((1 << bits) - 1);
  if constexpr (highs_of(kind) > 0) {
    const v16 upper = (load<v16>(highs) >> (uint16_t)high_shift) & (uint16_t)((1 << highs_of(kind)) - 1);
    codes = codes | (upper << (uint16_t)bits);
  }
  return integers_of<kind>(codes);
}

// Integers of a row of gate or up within one plane, or decoded ones.
template <Codes kind, int plane>
struct PlaneIntegers {
  const uint16_t *codes, *highs;
  int high_shift;
  INLINE v16 get(int64_t at) const {
    return integers_at<kind, plane>(load<v16>(codes + at), highs + at, high_shift);
  }
};
struct DecodedIntegers {
  const int16_t* integers;
  INLINE v16 get(int64_t at) const { return load<v16>(integers + at); }
};

#ifdef __AVX2__
// Products of integers of 16 bits, two of each lane, onto a sum.
INLINE __m256i add_products(__m256i sum, __m256i a, __m256i b) {
#ifdef __AVX512VNNI__
  return _mm256_dpwssd_epi32(sum, a, b);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}
#endif

// Sums of products for each `step` of n integers, 16 or 32, whole ones.
template <int step, class Source>
INLINE void step_sums(const Source& s, const int16_t* q, int64_t n, int32_t* out) {
#ifdef __AVX2__
  const auto of_step = [&](int64_t at) {
    const __m256i half = _mm256_madd_epi16((__m256i)s.get(at), load<__m256i>(q + at));
    return step == 16 ? half : add_products(half, (__m256i)s.get(at + 16), load<__m256i>(q + at + 16));
  };
  for (int64_t at = 0; at < n; at += 8 * step, out += 8) {
    __m256i v[8];
    if (at + 8 * step <= n) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) v[i] = of_step(at + i * step);
    } else {
      for (int i = 0; i < 8; i++) v[i] = at + i * step < n ? of_step(at + i * step) : __m256i{};
    }
    const __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    const __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
    const __m256i all = _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20),
                                         _mm256_permute2x128_si256(a, b, 0x31));
    _mm256_storeu_si256((__m256i*)out, all);  // there is room behind the last one
  }
#else
  for (int64_t at = 0; at < n; at += step) {
    int32_t sum = 0;
    for (int64_t i = at; i < at + step; i += 16) {
      int16_t integers[16];
      store(integers, s.get(i));
      for (int j = 0; j < 16; j++) sum += integers[j] * q[i + j];
    }
    *out++ = sum;
  }
#endif
}

// f(source, first, n) for the parts of a row of gate or up that lie in one plane.
template <Codes kind, class F>
INLINE void each_plane(const Format& f, const uint16_t* record, const Coding& c, int64_t row, F use) {
  constexpr int bits = bits_of(kind), more = highs_of(kind);
  const int64_t size = f.hidden * bits / 16, high_size = more ? f.hidden * more / 16 : f.hidden;
  const uint16_t* codes = record + c.codes * f.hidden + row * size;
  const uint16_t* highs = record + c.highs * f.hidden + row * high_size;
  const int64_t n = least(size, high_size);
  for (int64_t at = 0; at < f.hidden; at += n) {
    const int64_t plane = at / size, high_plane = at / high_size;
    chosen<0, 16 / bits - 1>(plane, [&](auto p) {
      use(PlaneIntegers<kind, p.value>{codes + at - plane * size, highs + at - high_plane * high_size,
                                       more * (int)high_plane}, at, n);
    });
  }
}

// One after the other, where planes do not begin at whole vectors.
template <Codes kind>
int integer_at(const uint16_t* codes, int64_t plane, const uint16_t* highs, int64_t high_plane) {
  int code = (*codes >> (bits_of(kind) * plane)) & ((1 << bits_of(kind)) - 1);
  if (highs_of(kind)) {
    code |= ((*highs >> (highs_of(kind) * high_plane)) & ((1 << highs_of(kind)) - 1)) << bits_of(kind);
  }
  if (kind == Codes::Int2) return 2 * code - 3;
  return is_listed(kind) ? kListed<is_listed(kind) ? kind : Codes::IQ4>.of[code & 15] - 128 : code;
}

// lane[u mod 8] += sum · scale · scale of x, and += minimum · …, units ascending; then pairwise.
template <Codes kind>
INLINE float sum_of_units(const int32_t* sums, const float* scale, const float* shift, const float* x_scale,
                          const int32_t* x_sum, int64_t units) {
  vw lane[kUnitLanes / W] = {};
  for (int64_t u = 0; u < units; u += kUnitLanes) {
#pragma GCC unroll 2
    for (int64_t k = 0; k < kUnitLanes / W; k++) {
      const int64_t at = u + k * W;
      const wi of_x = load<wi>(x_sum + at);
      const vw by = load<vw>(x_scale + at);
      wi whole = load<wi>(sums + at);
      if (shift_of(kind) == Shift::Zero) whole -= of_x * __builtin_convertvector(load<vw>(shift + at), wi);
      else if (zero_integer(kind)) whole -= of_x * zero_integer(kind);
      lane[k] += unfused(__builtin_convertvector(whole, vw) * (load<vw>(scale + at) * by));
      if (shift_of(kind) != Shift::Minimum) continue;
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

// Scales and shifts of a row's units, zeros behind them. raw: room for those of groups.
template <Codes kind>
INLINE void units_of(const Format& f, const uint16_t* record, int matrix, int64_t row, float* scale,
                     float* shift, float* raw) {
  const Coding& c = f.matrix[matrix];
  const int64_t groups = (f.hidden + c.group - 1) / c.group, units = f.hidden / c.unit, each = c.group / c.unit;
  const bool shifts = shift_of(kind) != Shift::None;
  groups_of(f, record, matrix, row / c.across, 0, groups, each == 1 ? scale : raw, each == 1 ? shift : raw + groups);
  for (int64_t u = 0; each > 1 && u < units; u++) {
    scale[u] = raw[u / each];
    if (shifts) shift[u] = raw[groups + u / each];
  }
  for (int64_t u = 0; factor_of(kind) != 1 && u < units; u++) scale[u] *= factor_of(kind);
  for (int64_t u = units; u < lanes_of(units); u++) scale[u] = shift[u] = 0;
}

constexpr int64_t kRowsAhead = 4;
constexpr int64_t kDecodedOnce = 3;  // of as many tokens a row is decoded before its products

template <Codes kind>
void integer_rows(const Format& f, const uint16_t* record, int matrix, int64_t first, int64_t rows,
                  const float* const* x, int64_t tokens, float* y, int64_t stride, float* scratch) {
  const Coding& c = f.matrix[matrix];
  const int64_t n = f.hidden, units = n / c.unit, room = lanes_of(n / 16) + 8;
  int32_t* sums = (int32_t*)scratch;
  float *scale = scratch + room, *shift = scale + room, *raw = shift + room;
  int16_t* integers = (int16_t*)(raw + 2 * room);
  const int64_t part = n * (highs_of(kind) ? highs_of(kind) : bits_of(kind)) / 16;
  const bool vectors = part % 16 == 0 && n % 16 == 0;
  const bool decoded = !vectors || tokens >= kDecodedOnce;
  const bool halved = c.unit == 32 && !decoded && part % 32;  // a unit lies in two planes
  const bool wide = c.unit == 32 && !halved;
  for (int64_t r = 0; r < rows; r++) {
    units_of<kind>(f, record, matrix, first + r, scale, shift, raw);
    if (vectors && decoded) {
      each_plane<kind>(f, record, c, first + r, [&](auto source, int64_t at, int64_t count) {
        for (int64_t i = 0; i < count; i += 16) store(integers + at + i, source.get(i));
      });
    } else if (decoded) {
      const int64_t size = n * bits_of(kind) / 16, high_size = highs_of(kind) ? n * highs_of(kind) / 16 : n;
      const uint16_t *codes = record + c.codes * n + (first + r) * size, *highs = record + c.highs * n + (first + r) * high_size;
      for (int64_t i = 0; i < n; i++) {
        integers[i] = (int16_t)integer_at<kind>(codes + i % size, i / size, highs + i % high_size, i / high_size);
      }
    }
    const uint16_t* later = record + c.codes * n + (first + r + kRowsAhead) * n * bits_of(kind) / 16;
    const auto ask = [&](int64_t at, int64_t count) {
      for (int64_t i = at * bits_of(kind) / 16; i < (at + count) * bits_of(kind) / 16; i += 32) soon(later + i);
    };
    for (int64_t t = 0; t < tokens; t++) {
      const Quantized to(x[t], n);
      const auto add = [&](auto source, int64_t at, int64_t count) {
        // A row is passed once for each plane, and comes from memory the first time: evenly.
        if (!decoded && t == 0) ask(at, count);
        if (wide) step_sums<32>(source, to.q + at, count, sums + at / 32);
        else step_sums<16>(source, to.q + at, count, sums + at / 16);
      };
      if (decoded) add(DecodedIntegers{integers}, 0, n);
      else each_plane<kind>(f, record, c, first + r, add);
      for (int64_t u = 0; halved && u < units; u++) sums[u] = sums[2 * u] + sums[2 * u + 1];
      const int by = c.unit == 16;
      y[t * stride + r] = sum_of_units<kind>(sums, scale, shift, to.scale[by], to.sum[by], units);
    }
  }
}

// f(kind) of a kind that has integers.
template <class F>
INLINE void with_integers(Codes kind, F f) {
  switch (kind) {
    case Codes::Int8: return f(Constant<Codes, Codes::Int8>());
    case Codes::Int4: return f(Constant<Codes, Codes::Int4>());
    case Codes::Int2: return f(Constant<Codes, Codes::Int2>());
    case Codes::E2M1: return f(Constant<Codes, Codes::E2M1>());
    case Codes::IQ4: return f(Constant<Codes, Codes::IQ4>());
    case Codes::Zero8: return f(Constant<Codes, Codes::Zero8>());
    case Codes::Zero4: return f(Constant<Codes, Codes::Zero4>());
    case Codes::Min4: return f(Constant<Codes, Codes::Min4>());
    case Codes::Min5: return f(Constant<Codes, Codes::Min5>());
    case Codes::Int5: return f(Constant<Codes, Codes::Int5>());
    case Codes::Int6: return f(Constant<Codes, Codes::Int6>());
    default: return;
  }
}

void integer_dots(const Format& f, const uint16_t* record, int matrix, int64_t first, int64_t rows,
                  const float* const* x, int64_t tokens, float* y, int64_t stride, float* scratch) {
  with_integers(f.matrix[matrix].kind, [&](auto kind) {
    integer_rows<decltype(kind)::value>(f, record, matrix, first, rows, x, tokens, y, stride, scratch);
  });
}

// ---- down^T: lanes are columns

template <int first, int last, class F>
INLINE void each_of(F f) {
  if constexpr (first < last) {
    f(Constant<int, first>());
    each_of<first + 1, last>(f);
  }
}

// Sums of products for each `step` rows and each of n columns, to out[t][row / step][column], `room`
// apart.
template <Codes kind>
void column_sums(const Format& f, const uint16_t* record, int64_t column, int64_t n, int64_t step,
                 const float* const* h, int64_t tokens, int64_t room, int32_t* out) {
  constexpr int bits = bits_of(kind), planes = 16 / bits, more = highs_of(kind), high_planes = more ? 16 / more : 1;
  const Coding& c = f.matrix[DOWN];
  const int64_t width = f.width, size = (width + planes - 1) / planes, high_size = (width + high_planes - 1) / high_planes;
  const int64_t steps = width / step;
  const uint16_t *codes = record + c.codes * f.hidden + column, *highs = record + c.highs * f.hidden + column;
#ifdef __AVX2__
  if (n % 16 == 0 && width % planes == 0 && size % step == 0 && (!more || (width % high_planes == 0 && high_size % step == 0))) {
    for (int64_t row = 0; row < size; row += step) {
      for (int64_t at = 0; at < n; at += 16) {
        for (int64_t t = 0; t < tokens; t++) {
          const int16_t* q = Quantized(h[t], width).q + row;
          __m256i sums[planes][2] = {};
          for (int64_t i = 0; i < step; i += 2) {
            const uint16_t *even = codes + (row + i) * f.hidden + at, *odd = even + f.hidden;
            if (t == 0 && at % 32 == 0) soon(even + step * f.hidden), soon(odd + step * f.hidden);
            const __m256i a = (__m256i)load<v16>(even), b = (__m256i)load<v16>(odd);
            const v16 both[2] = {(v16)_mm256_unpacklo_epi16(a, b), (v16)_mm256_unpackhi_epi16(a, b)};
            each_of<0, planes>([&](auto plane) {
              constexpr int j = plane.value;
              int32_t pair;
              memcpy(&pair, q + j * size + i, sizeof pair);
              const __m256i factors = _mm256_set1_epi32(pair);
              uint16_t upper[2][16];
              int high_shift = 0;
              if constexpr (more > 0) {
                const int64_t mine = row + j * size + i;
                const uint16_t* high = highs + mine % high_size * f.hidden + at;
                const __m256i a = (__m256i)load<v16>(high), b = (__m256i)load<v16>(high + f.hidden);
                store(upper[0], _mm256_unpacklo_epi16(a, b)), store(upper[1], _mm256_unpackhi_epi16(a, b));
                high_shift = more * (int)(mine / high_size);
              }
#pragma GCC unroll 2
              for (int k = 0; k < 2; k++) {
                const v16 integers = integers_at<kind, j>(both[k], upper[k], high_shift);
                sums[j][k] = add_products(sums[j][k], (__m256i)integers, factors);
              }
            });
          }
          each_of<0, planes>([&](auto plane) {
            int32_t* mine = out + (t * steps + (row + plane.value * size) / step) * room + at;
            const __m256i low = sums[plane.value][0], high = sums[plane.value][1];
            store(mine, _mm256_permute2x128_si256(low, high, 0x20));
            store(mine + 8, _mm256_permute2x128_si256(low, high, 0x31));
          });
        }
      }
    }
    return;
  }
#endif
  memset(out, 0, tokens * steps * room * sizeof *out);
  for (int64_t r = 0; r < width; r++) {
    const uint16_t *mine = codes + r % size * f.hidden, *high = highs + r % high_size * f.hidden;
    for (int64_t i = 0; i < n; i++) {
      const int integer = integer_at<kind>(mine + i, r / size, more ? high + i : high, r / high_size);
      for (int64_t t = 0; t < tokens; t++) {
        out[(t * steps + r / step) * room + i] += integer * Quantized(h[t], width).q[r];
      }
    }
  }
}

template <Codes kind>
void integer_sums(const Format& f, const uint16_t* record, int64_t column, int64_t n, const float* const* h,
                  int64_t tokens, float* const* y, float* scratch) {
  const Coding& c = f.matrix[DOWN];
  constexpr int planes = 16 / bits_of(kind), high_planes = highs_of(kind) ? 16 / highs_of(kind) : 1;
  const int64_t room = lanes_of(n), units = f.width / c.unit, part = f.width / (planes > high_planes ? planes : high_planes);
  const int64_t step = c.unit == 32 && part % 32 == 0 ? 32 : 16, twice = c.unit / step;
  float *scale = scratch, *shift = scale + room, *lanes = shift + room;
  int32_t* sums = (int32_t*)(lanes + tokens * kUnitLanes * room);
  memset(scratch, 0, (2 + tokens * kUnitLanes) * room * sizeof *scratch);
  column_sums<kind>(f, record, column, n, step, h, tokens, room, sums);
  for (int64_t u = 0; u < units; u++) {
    if (u * c.unit % c.group == 0) {
      column_scales(f, record, u * c.unit / c.group, column, n, scale, shift);
      for (int64_t i = 0; factor_of(kind) != 1 && i < n; i++) scale[i] *= factor_of(kind);
    }
    for (int64_t t = 0; t < tokens; t++) {
      const Quantized to(h[t], f.width);
      const float by = to.scale[c.unit == 16][u];
      const int32_t of_h = to.sum[c.unit == 16][u];
      const int32_t* mine = sums + (t * units + u) * twice * room;
      float* lane = lanes + (t * kUnitLanes + u % kUnitLanes) * room;
      for (int64_t i = 0; i < room; i += W) {
        wi whole = load<wi>(mine + i);
        if (twice == 2) whole += load<wi>(mine + room + i);
        if (shift_of(kind) == Shift::Zero) whole -= of_h * __builtin_convertvector(load<vw>(shift + i), wi);
        else whole -= of_h * zero_integer(kind);
        vw total = load<vw>(lane + i);
        total += unfused(__builtin_convertvector(whole, vw) * (load<vw>(scale + i) * by));
        if (shift_of(kind) == Shift::Minimum) total += unfused((float)of_h * (load<vw>(shift + i) * by));
        store(lane + i, total);
      }
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

void integer_columns(const Format& f, const uint16_t* record, int64_t column, int64_t n, const float* const* h,
                     int64_t tokens, float* const* y, float* scratch) {
  with_integers(f.matrix[DOWN].kind, [&](auto kind) {
    integer_sums<decltype(kind)::value>(f, record, column, n, h, tokens, y, scratch);
  });
}

}  // namespace
}  // namespace moejax
