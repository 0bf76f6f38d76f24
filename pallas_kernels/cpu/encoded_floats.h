// Weights of rows of codes as float32: a part of encoded.h, for instruction sets without products of bfloat16.
#pragma once

namespace moejax {
namespace {

typedef Pair RowWeights;  // of 2·L columns of a row: the even and the odd ones

INLINE vf add_products(vf total, RowWeights weights, const float* x, int64_t at) {
  total = total + weights.first * load<vf>(x + at);
  return total + weights.second * load<vf>(x + at + L);
}

// Whether values of codes lie in one vector, where they are looked up.
#if defined(__AVX512F__) && MOEJAX_LANES == 16
template <Codes kind>
constexpr bool kInVector = codes_in(kind) == 16;
INLINE vf looked_up(vf table, vu lanes) { return (vf)_mm512_permutexvar_ps((__m512i)lanes, (__m512)table); }
#else
template <Codes kind>
constexpr bool kInVector = false;
INLINE vf looked_up(vf table, vu) { return table; }
#endif

// The values of 16 codes, in this unit.
template <Codes kind>
struct Bytes {
  static constexpr float unit = kind == Codes::E2M1 ? 0.5f : 1;
  int8_t of[16];
  constexpr Bytes() : of() {
    for (int i = 0; i < 16; i++) of[i] = (int8_t)(value_of(kind, i) / unit);
  }
};
template <Codes kind>
constexpr Bytes<kind> kBytes;

// Values of a plane of elements: even and odd ones. Those of integers are codes, from which no zero was taken.
template <Codes kind>
struct ColumnValues {
  static constexpr float less = 1;
  static constexpr uint32_t bits = bits_of(kind), more = highs_of(kind);
  vu shift, high_shift;
  INLINE ColumnValues(int64_t plane, int64_t high_plane)
      : shift((uint32_t)(bits * plane) - vu{}), high_shift((uint32_t)(more * high_plane) - vu{}) {}

  INLINE static Pair in_order(Pair columns) { return parted(columns); }
  INLINE static Pair sums_of(Pair totals) { return totals; }
  INLINE static Pair totals_of(Pair sums) { return sums; }

  // Of the first L codes.
  INLINE static vf all() { return load<vf>(kLanes<kind, 0, 1>.of) + zero_of(kind); }

  // Codes at the lowest bits of elements; what is above them is of other codes.
  INLINE vu lanes(const uint16_t* codes) const { return load<vu>(codes) >> shift; }

  INLINE Pair get(const uint16_t* codes, const uint16_t* highs) const {
    vu both = lanes(codes);
    if constexpr (kInVector<kind>) return {looked_up(all(), both), looked_up(all(), both >> 16)};
#if defined(__AVX2__) && MOEJAX_LANES == 8
    if constexpr (kind == Codes::E2M1 || kind == Codes::IQ4) {  // as whole numbers of 8 bits
      constexpr float unit = Bytes<kind>::unit;
      const __m256i table = _mm256_broadcastsi128_si256(load<__m128i>(kBytes<kind>.of));
      const vi bytes = (vi)_mm256_shuffle_epi8(table, (__m256i)(both & 0x000f000fu));
      return {__builtin_convertvector((bytes << 24) >> 24, vf) * unit,
              __builtin_convertvector((bytes << 8) >> 24, vf) * unit};
    }
#endif
    if constexpr (!is_int(kind)) return {values_of<kind, 0>(both, vu{}), values_of<kind, 16>(both, vu{})};
    both = both & ((1u << bits) - 1) * 0x10001u;
    if constexpr (more > 0) both |= ((load<vu>(highs) >> high_shift) & ((1u << more) - 1) * 0x10001u) << bits;
    return {__builtin_convertvector((vi)(both & 0xffffu), vf), __builtin_convertvector((vi)(both >> 16), vf)};
  }
};

// Whether products of codes and scales are exact, so that a zero's is taken from a code's.
constexpr bool is_exact(Narrowing how) { return how == Narrowing::None || how == Narrowing::Short; }

// A shift as weight_of wants it.
template <Codes kind, Narrowing how>
INLINE void prepare(vf& scale, vf& shift) {
  if (!is_exact(how)) return;
  if (shift_of(kind) == Shift::Zero) shift = -shift * scale;
  if (shift_of(kind) == Shift::None) shift = -zero_of(kind) * scale;
}

template <Codes kind, Narrowing how>
INLINE vf weight_of(vf value, vf scale, vf shift) {
  if constexpr (is_exact(how)) {
    const vf weight = zero_of(kind) || shift_of(kind) != Shift::None ? value * scale + shift : value * scale;
    return how == Narrowing::Short ? rounded(weight) : weight;
  }
  vf weight = scaled_of<kind>(value - zero_of(kind), scale, shift);
  if (how == Narrowing::Half) weight = through_f16(weight);
  return as_float(upper_bf16(weight));
}

template <Codes kind, Narrowing how>
INLINE Pair rounded_weights(Pair value, Pair scale, Pair shift) {
  return {weight_of<kind, how>(value.first, scale.first, shift.first),
          weight_of<kind, how>(value.second, scale.second, shift.second)};
}

// What has the weights of blocks of a plane of gate or up; two: the halves of a block have scales of their
// own. A State has a row's scales.
template <Codes kind, bool two, Narrowing how>
struct Blocks {
  static constexpr bool has_table = kInVector<kind> && !two;
  struct State {
    vf scale, shift, table;
  };
  const ColumnValues<kind> values;
  INLINE Blocks(int64_t plane, int64_t high_plane, bool) : values(plane, high_plane) {}

  INLINE static vf of_lanes(const float* numbers) { return two ? in_halves(numbers) : splat(*numbers); }
  INLINE State set(const float* scale, const float* shift) const {
    State s = {of_lanes(scale), shift_of(kind) == Shift::None ? vf{} : of_lanes(shift), vf{}};
    prepare<kind, how>(s.scale, s.shift);
    if constexpr (has_table) s.table = weight_of<kind, how>(values.all(), s.scale, s.shift);
    return s;
  }
  INLINE RowWeights get(const State& s, const uint16_t* codes, const uint16_t* highs) const {
    if constexpr (has_table) {
      const vu both = values.lanes(codes);
      return {looked_up(s.table, both), looked_up(s.table, both >> 16)};
    }
    const Pair scale = {s.scale, s.scale}, shift = {s.shift, s.shift};
    return rounded_weights<kind, how>(values.get(codes, highs), scale, shift);
  }
};

}  // namespace
}  // namespace moejax
