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

// Tokens by the first bits of their distance: how many, and their mass.
struct Buckets {
  static constexpr int kBits = 11;
  uint64_t mass[2][1 << kBits];
  uint32_t count[2][1 << kBits];
};
static_assert(sizeof(Buckets) == kBucketBytes, "scratch of DrawnRow");

INLINE uint64_t whole(float mass) { return (uint64_t)(int64_t)(mass * 0x1p40f); }

// Where the search over a row's distances is.
struct Found {
  uint32_t distance;
  uint64_t mass;  // of all tokens up to it
};

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

  void fill_buckets() const {
    memset(buckets, 0, sizeof *buckets);
    float mass[kBlockOfRow];
    for (int64_t first = 0; first < n; first += kBlockOfRow) {
      const int64_t last = least(first + kBlockOfRow, n);
      for (int64_t i = first; i < last; i += L) {
        const vf s = scaled(i);
        store(distance + i, distance_of(s, i));
        store(mass + i - first, exponential(s));
      }
      for (int64_t i = first; i < last; i++) {
        const uint32_t bucket = distance[i] >> (31 - Buckets::kBits);
        buckets->mass[i % 2][bucket] += whole(mass[i - first]);
        buckets->count[i % 2][bucket]++;
      }
    }
  }

  // The smallest distance up to which there are `target` tokens, or that mass of them, of those up to
  // a limit; infinity if there is less.
  template <bool counts>
  Found farthest(double target, uint32_t limit) const {
    constexpr int kShift = 31 - Buckets::kBits, kMore = kShift / 2;
    if (target <= 0) return {0, 0};
    uint64_t count = 0, mass = 0;
    uint32_t bucket = 0;
    const uint32_t end = limit >> kShift;
    for (;; bucket++) {
      const uint64_t more = buckets->count[0][bucket] + buckets->count[1][bucket];
      const uint64_t heavier = buckets->mass[0][bucket] + buckets->mass[1][bucket];
      const bool reached = (double)(counts ? count + more : mass + heavier) >= target;
      if (reached || bucket == end) break;
      count += more, mass += heavier;
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
      uint64_t counted[1 << kMore] = {}, massed[1 << kMore] = {};
      for (int64_t i = 0; i < listed; i += L) {
        float held[L];
        store(held, exponential(-as_float(load<vu>(list + i))));
        for (int64_t j = i; j < i + L && j < listed; j++) {
          if (list[j] >> (shift + kMore) != prefix) continue;
          counted[(list[j] >> shift) % (1 << kMore)]++;
          massed[(list[j] >> shift) % (1 << kMore)] += whole(held[j - i]);
        }
      }
      uint32_t next = 0;
      for (;; next++) {
        if (next == 1 << kMore) return {kInfinite, mass};  // all of them
        if ((double)(counts ? count + counted[next] : mass + massed[next]) >= target) break;
        count += counted[next], mass += massed[next];
      }
      if (shift == 0) mass += massed[next];
      prefix = prefix << kMore | next;
    }
    return {prefix, mass};
  }

  // The largest distance that top-k and top-p keep.
  uint32_t last(int64_t top_k, float top_p) const {
    fill_buckets();
    Found found = {kInfinite, 0};
    for (uint32_t b = 0; b <= kInfinite >> (31 - Buckets::kBits); b++) {
      found.mass += buckets->mass[0][b] + buckets->mass[1][b];
    }
    if (top_k > 0) found = farthest<true>((double)least(top_k, n), kInfinite);
    if (top_p >= 1) return found.distance;
    const uint32_t by_p = farthest<false>((double)top_p * (double)found.mass, found.distance).distance;
    return by_p < found.distance ? by_p : found.distance;
  }

  void draw(uint32_t farthest, bool stored, const uint32_t* key, Likely& likely) const {
    const vu lane = (vu)lanes_of_row();
    for (int64_t i = 0; i < n; i += L) {
      if (stored && !any_of(load<vu>(distance + i) <= farthest)) continue;
      const vf s = scaled(i);
      const vi kept = distance_of(s, i) <= farthest;
      if (!any_of(kept & (s + kMostNoise > likely.bar))) continue;
      const vu bits = random_bits(lane + (uint32_t)i, key);
      const vf value = s + noise_of(bits);
      if (!any_of(kept & (value > likely.bar))) continue;
      for (int64_t j = 0; j < L; j++) {
        if (kept[j] && value[j] > likely.bar) {
          likely.add({value[j], s[j], bits[j], (int32_t)(i + j)});
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
