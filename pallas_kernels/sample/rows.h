// A row of logits on its way to a token: included by kernels.cc, once for each instruction set.
//
// Nothing depends on other rows. Sums of masses are whole numbers of 2^-40, so they have no order.
#pragma once

namespace moejax {
namespace {

constexpr uint32_t kNowhere = 0x7fffffff;   // distance of what is not kept; farther than infinity
constexpr uint32_t kInfinite = 0x7f800000;
constexpr float kMinus = -__builtin_inff();
constexpr int64_t kBlockOfRow = 1024;       // distances and masses that stay in the first cache

INLINE vi lanes_of_row() {
  vi lane;
  for (int i = 0; i < L; i++) lane[i] = i;
  return lane;
}

INLINE bool any_of(vi mask) {
#if defined(__AVX512F__) && MOEJAX_LANES == 16
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX2__) && MOEJAX_LANES == 8
  return _mm256_movemask_ps((__m256)mask);
#else
  int found = 0;
  for (int i = 0; i < L; i++) found |= mask[i];
  return found;
#endif
}

// Values of the lanes of a mask, and their places from `place` on, behind `listed` others.
INLINE void list_lanes(vi mask, vf value, int64_t place, float* values, uint32_t* places, int64_t& listed) {
#if defined(__AVX512F__) && MOEJAX_LANES == 16
  const __mmask16 some = _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
  store(values + listed, (vf)_mm512_maskz_compress_ps(some, (__m512)value));
  store(places + listed, (vu)_mm512_maskz_compress_epi32(some, (__m512i)(lanes_of_row() + (int32_t)place)));
  listed += __builtin_popcount(some);
#else
  if (!any_of(mask)) return;
  for (int j = 0; j < L; j++) {
    values[listed] = value[j], places[listed] = (uint32_t)(place + j);
    listed -= mask[j];
  }
#endif
}

// Values [i, i + L) of a row; −inf behind its end.
INLINE vf row_at(const float* x, int64_t i, int64_t n) {
  if (i + L <= n) return load<vf>(x + i);
  float end[L];
  for (int64_t j = 0; j < L; j++) end[j] = i + j < n ? x[i + j] : kMinus;
  return load<vf>(end);
}

// The largest value; NaN if there is any.
float peak_of(const float* x, int64_t n) {
  vf top = splat(kMinus), more = top;
  vi odd = {};
  int64_t i = 0;
  for (; i + 2 * L <= n; i += 2 * L) {
    const vf a = load<vf>(x + i), b = load<vf>(x + i + L);
    top = a > top ? a : top, more = b > more ? b : more;
    odd |= (a != a) | (b != b);
  }
  for (; i < n; i += L) {
    const vf a = row_at(x, i, n);
    top = a > top ? a : top, odd |= a != a;
  }
  float best = kMinus;
  for (int j = 0; j < L; j++) {
    best = top[j] > best ? top[j] : best;
    best = more[j] > best ? more[j] : best;
  }
  return any_of(odd) ? __builtin_nanf("") : best;
}

int64_t first_of(const float* x, int64_t n, float value) {
  for (int64_t i = 0; i < n; i += L) {
    if (!any_of(row_at(x, i, n) == splat(value))) continue;
    for (int64_t j = i; j < n && j < i + L; j++) {
      if (x[j] == value) return j;
    }
  }
  return n - 1;  // of NaN, the last one
}

// Cephes logf of x > 0 that is not subnormal.
INLINE vf logarithm(vf x) {
  const vu bits = (vu)x;
  vf m = as_float((bits & 0x7fffffu) | 0x3f000000u);
  const vi low = m < splat(0.707106781f);
  const vf e = __builtin_convertvector((vi)(bits >> 23) - 126 + low, vf);
  m = (low ? m + m : m) - 1.0f;
  const vf z = m * m;
  vf p = splat(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  p = p * m * z + e * -2.12194440e-4f - z * 0.5f;
  return m + p + e * 0.693359375f;
}

template <int bits>
INLINE vu rotated(vu x) {
#if defined(__AVX512F__) && MOEJAX_LANES == 16
  return (vu)_mm512_rol_epi32((__m512i)x, bits);
#else
  return (x << bits) | (x >> (32 - bits));
#endif
}

template <int a, int b, int c, int d>
INLINE void mix(vu& x, vu& y) {
  x += y, y = rotated<a>(y) ^ x;
  x += y, y = rotated<b>(y) ^ x;
  x += y, y = rotated<c>(y) ^ x;
  x += y, y = rotated<d>(y) ^ x;
}

// Threefry-2x32 of counters below 2^32 (Salmon et al. 2011), both halves as one: what jax.random
// draws for the counters' places.
INLINE vu random_bits(vu counter, const uint32_t* key) {
  const uint32_t a = key[0], b = key[1], c = a ^ b ^ 0x1bd11bdau;
  vu x = vu{} + a, y = counter + b;
  mix<13, 15, 26, 6>(x, y);
  x += b, y += c + 1;
  mix<17, 29, 16, 24>(x, y);
  x += c, y += a + 2;
  mix<13, 15, 26, 6>(x, y);
  x += a, y += b + 3;
  mix<17, 29, 16, 24>(x, y);
  x += b, y += c + 4;
  mix<13, 15, 26, 6>(x, y);
  x += c, y += a + 5;
  return x ^ y;
}

// Gumbel noise of random bits, to some units in the last place of what jax.random.gumbel makes of
// them.
INLINE vf noise_of(vu bits) {
  vf u = as_float((bits >> 9) | 0x3f800000u) - 1.0f;
  u = u < splat(1.17549435e-38f) ? splat(1.17549435e-38f) : u;
  return -logarithm(-logarithm(u));
}
constexpr float kMostNoise = 15.95f;

// The tokens that may have the largest value, in ascending order: those within more than values
// differ from those of another logarithm.
struct Likely {
  int64_t count = 0;
  float best = kMinus, bar = kMinus;
  struct Token {
    float value, scaled;
    uint32_t bits;
    int32_t id;
  } token[4 * kCandidates];

  void add(const Token& one) {
    if (one.value > best) {
      best = one.value;
      bar = best - 2e-5f - (best < 0 ? -best : best) * 1e-6f;
    }
    if (count == 4 * kCandidates) thin(2 * kCandidates);
    token[count++] = one;
  }

  // Drops those below the bar, and of tokens that are equal in all but their place all but the first;
  // then the least until there are `most`.
  void thin(int64_t most) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
      bool drop = token[i].value < bar;
      for (int64_t j = 0; j < kept && !drop; j++) {
        drop = token[j].bits == token[i].bits && token[j].scaled == token[i].scaled;
      }
      if (!drop) token[kept++] = token[i];
    }
    for (count = kept; count > most; count--) {
      int64_t least_of = 0;
      for (int64_t i = 1; i < count; i++) {
        if (token[i].value <= token[least_of].value) least_of = i;
      }
      memmove(token + least_of, token + least_of + 1, (count - 1 - least_of) * sizeof(Token));
    }
  }
};

// Tokens by the first bits of their distance: how many, or their mass.
struct Buckets {
  static constexpr int kBits = 11, kShift = 31 - kBits;
  uint64_t of[2][1 << kBits];  // neighbours would wait for each other
  INLINE uint64_t in(uint32_t bucket) const { return of[0][bucket] + of[1][bucket]; }
};
static_assert(sizeof(Buckets) == kBucketBytes, "scratch of DrawnRow");

INLINE uint64_t whole(float mass) { return (uint64_t)(int64_t)(mass * 0x1p40f); }

struct LogitsRow {
  const float* x;
  int64_t n;
  float peak, inverse;  // of the temperature
  uint32_t far;         // the largest distance that min_p keeps
  uint32_t *distance, *list;  // [n and a vector more]
  Buckets* buckets;

  INLINE vf scaled(int64_t i) const { return (row_at(x, i, n) - peak) * inverse; }
  INLINE vu distance_of(vf scaled, int64_t i) const {
    vu d = (vu)scaled & 0x7fffffffu;
    d = d > far ? vu{} + kNowhere : d;
    if (i + L > n) d = lanes_of_row() >= (int32_t)(n - i) ? vu{} + kNowhere : d;
    return d;
  }

  void store_distances() const {
    for (int64_t i = 0; i < n; i += L) store(distance + i, distance_of(scaled(i), i));
  }

  // Of tokens up to a limit.
  template <bool counts>
  void fill_buckets(uint32_t limit) const {
    memset(buckets, 0, sizeof *buckets);
    for (int64_t i = 0; i < n; i += L) {
      const vu d = load<vu>(distance + i);
      if (!any_of(d <= limit)) continue;
      float mass[L];
      if (!counts) store(mass, exponential(-as_float(d)));
      for (int64_t j = 0; j < L; j++) {
        if (distance[i + j] > limit) continue;  // or behind the row's end
        buckets->of[j % 2][distance[i + j] >> Buckets::kShift] += counts ? 1 : whole(mass[j]);
      }
    }
  }

  // The smallest distance up to which there are `target` tokens, or that mass of them, of those up to
  // a limit, which are in the buckets; infinity if there is less.
  template <bool counts>
  uint32_t farthest(double target, uint32_t limit) const {
    constexpr int kShift = Buckets::kShift, kMore = kShift / 2;
    if (target <= 0) return 0;
    uint64_t sum = 0;
    uint32_t bucket = 0;
    for (const uint32_t end = limit >> kShift; bucket < end; bucket++) {
      if ((double)(sum + buckets->in(bucket)) >= target) break;
      sum += buckets->in(bucket);
    }
    int64_t listed = 0;
    for (int64_t i = 0; i < n; i += L) {
      const vu d = load<vu>(distance + i);
      const vi here = (d >> kShift) == bucket;
      if (!any_of(here)) continue;
      for (int64_t j = i; j < i + L && j < n; j++) {
        list[listed] = distance[j];
        listed += distance[j] >> kShift == bucket && distance[j] <= limit;
      }
    }
    uint32_t prefix = bucket;
    for (int shift = kMore; shift >= 0; shift -= kMore) {
      uint64_t found[1 << kMore] = {};
      for (int64_t i = 0; i < listed; i += L) {
        float held[L];
        if (!counts) store(held, exponential(-as_float(load<vu>(list + i))));
        for (int64_t j = i; j < i + L && j < listed; j++) {
          if (list[j] >> (shift + kMore) != prefix) continue;
          found[(list[j] >> shift) % (1 << kMore)] += counts ? 1 : whole(held[j - i]);
        }
      }
      uint32_t next = 0;
      for (;; next++) {
        if (next == 1 << kMore) return kInfinite;  // all of them
        if ((double)(sum + found[next]) >= target) break;
        sum += found[next];
      }
      prefix = prefix << kMore | next;
    }
    return prefix;
  }

  // The largest distance that top-k and top-p keep.
  uint32_t last(int64_t top_k, float top_p) const {
    store_distances();
    uint32_t limit = kInfinite;
    if (top_k > 0) {
      fill_buckets<true>(limit);
      limit = farthest<true>((double)least(top_k, n), limit);
    }
    if (top_p >= 1) return limit;
    fill_buckets<false>(limit);
    uint64_t mass = 0;
    for (uint32_t b = 0; b <= limit >> Buckets::kShift; b++) mass += buckets->in(b);
    return least(limit, farthest<false>((double)top_p * (double)mass, limit));
  }

  void draw(uint32_t farthest, bool stored, const uint32_t* key, Likely& likely) const {
    float near[kBlockOfRow + L];
    uint32_t id[kBlockOfRow + L];
    for (int64_t first = 0; first < n; first += kBlockOfRow) {
      // Few tokens are so near that noise could make them the largest; random bits are for those alone.
      int64_t listed = 0;
      for (int64_t i = first; i < least(first + kBlockOfRow, n); i += L) {
        if (stored && !any_of(load<vu>(distance + i) <= farthest)) continue;
        const vf s = scaled(i);
        list_lanes((distance_of(s, i) <= farthest) & (s + kMostNoise > likely.bar), s, i, near, id, listed);
      }
      store(near + listed, splat(kMinus)), store(id + listed, vu{});
      for (int64_t i = 0; i < listed; i += L) {
        const vf s = load<vf>(near + i);
        const vu bits = random_bits(load<vu>(id + i), key);
        const vf value = s + noise_of(bits);
        if (!any_of(value > likely.bar)) continue;
        for (int64_t j = 0; j < L; j++) {
          if (value[j] > likely.bar) likely.add({value[j], s[j], bits[j], (int32_t)id[i + j]});
        }
      }
    }
    likely.thin(kCandidates);
  }
};

void draw_row(const DrawnRow& r) {
  for (int64_t i = 0; i < kCandidates; i++) r.id[i] = 0, r.scaled[i] = kMinus, r.bits[i] = 0;
  const float peak = peak_of(r.logits, r.n);
  r.scaled[0] = 0;
  if (r.temperature == 0) {
    r.id[0] = (int32_t)first_of(r.logits, r.n, peak);
    return;
  }
  if (!(peak - peak == 0)) return;  // nothing can be drawn: token 0
  const bool truncates = r.top_k > 0 || r.top_p < 1;
  const LogitsRow row = {r.logits, r.n, peak, 1 / r.temperature, r.far, r.distance, r.list, (Buckets*)r.buckets};
  const uint32_t farthest = truncates ? row.last(r.top_k, r.top_p) : kInfinite;
  Likely likely;
  row.draw(farthest, truncates, r.key, likely);
  for (int64_t i = 0; i < likely.count; i++) {
    r.id[i] = likely.token[i].id;
    r.scaled[i] = likely.token[i].scaled;
    r.bits[i] = likely.token[i].bits;
  }
}

void rank_row(const RankedRow& r) {
  const float *x = r.logits, peak = peak_of(x, r.n), chosen = x[r.token];
  // The sums of a block's lanes in float32, of blocks in float64: one order.
  double total = 0;
  int64_t before = 0, listed = 0;
  for (int64_t first = 0; first < r.n; first += kBlockOfRow) {
    vf part = {};
    vi more = {};
    for (int64_t i = first; i < least(first + kBlockOfRow, r.n); i += L) {
      const vf v = row_at(x, i, r.n);
      part = part + exponential(v - peak);
      const vi id = lanes_of_row() + (int32_t)i;
      more -= (v > chosen) | ((v == chosen) & (id < r.token));
      // A later one that equals the last of the list does not come before it.
      if (r.most == 0 || (listed == r.most && !any_of(v > splat(r.top[listed - 1])))) continue;
      for (int64_t j = i; j < i + L && j < r.n; j++) {
        if (listed == r.most && !(x[j] > r.top[listed - 1])) continue;
        int64_t place = listed < r.most ? listed++ : listed - 1;
        for (; place > 0 && x[j] > r.top[place - 1]; place--) {
          r.top[place] = r.top[place - 1], r.top_ids[place] = r.top_ids[place - 1];
        }
        r.top[place] = x[j], r.top_ids[place] = (int32_t)j;
      }
    }
    total += sum(part);
    for (int j = 0; j < L; j++) before += more[j];
  }
  const float log_total = peak + (float)__builtin_log(total);
  *r.chosen = chosen - log_total;
  *r.rank = (int32_t)before + 1;
  for (int64_t i = 0; i < r.most; i++) r.top[i] -= log_total;
}

}  // namespace
}  // namespace moejax
