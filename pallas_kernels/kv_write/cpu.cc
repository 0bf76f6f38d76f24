#include <algorithm>
#include <cmath>
#include <cstring>

#include "pallas_kernels/cpu/buffer.h"
#include "pallas_kernels/cpu/ops.h"

namespace moejax {
namespace {

constexpr int64_t kTokensOfTask = 8;

// Values of one token after the other.
struct Token {
  const Kernels& k;
  const Pages& p;
  Buffer<float> buffer;
  float *x, *cosine, *sine, *scratch;

  Token(const Kernels& kernels, const Pages& pages)
      : k(kernels), p(pages), buffer(5 * p.head_dim), x(buffer.get()) {
    cosine = x + p.head_dim, sine = cosine + p.head_dim, scratch = sine + p.head_dim;
  }
  void round(int64_t n, float* values, void* free) const {
    if (p.type == Type::F32) return;
    k.narrow(p.type, values, n, free);
    k.widen(p.type, free, n, values);
  }
  // Cosine and sine of its angles, rounded to the dtype as transformers does.
  void place(int64_t t) const {
    const float position = static_cast<float>(p.positions[t]);
    for (int64_t i = 0; i < p.half; i++) {
      const float angle = position * p.frequencies[i];
      cosine[i] = std::cos(angle) * p.factor, sine[i] = std::sin(angle) * p.factor;
    }
    round(p.half, cosine, scratch);
    round(p.half, sine, scratch);
  }
  // Turns value i of x together with value half + i.
  void turn() const {
    float *own = scratch, *other = scratch + 2 * p.half;
    for (int64_t i = 0; i < p.half; i++) {
      own[i] = x[i] * cosine[i], own[p.half + i] = x[p.half + i] * cosine[i];
      other[i] = -x[p.half + i] * sine[i], other[p.half + i] = x[i] * sine[i];
    }
    // Products are rounded as transformers' are; x is free for it.
    round(2 * p.half, own, x);
    round(2 * p.half, other, x);
    for (int64_t i = 0; i < 2 * p.half; i++) x[i] = own[i] + other[i];
  }
};

// f(token, t, row, queries) of those that have a row in the arena. Queries, `values` of a token from
// `out` on, are zeros for the others.
template <class F>
void each_token(Pool& pool, const Kernels& k, const Pages& p, void* out, int64_t values,
                int64_t work, const F& f) {
  for (int64_t t = 0; t < p.tokens; t++) {
    if (p.pages[t] < 0) continue;
    if (p.positions[t] < 0 || p.layer < 0 || p.row(t) + (p.rows_per_token - 1) * p.block_size >= p.kv_rows) {
      throw Refused("token " + std::to_string(t) + " at position " + std::to_string(p.positions[t]) +
                    " of page " + std::to_string(p.pages[t]) + " is not in the arena");
    }
  }
  parallel_rows(pool, p.tokens, kTokensOfTask, p.tokens * work, [&](int64_t first, int64_t last) {
    const Token token(k, p);
    for (int64_t t = first; t < last; t++) {
      char* queries = at(out, t * values, p.type);
      if (p.row(t) < 0) {  // padding
        std::memset(queries, 0, values * size_of(p.type));
        continue;
      }
      token.place(t);
      f(token, t, at(static_cast<void*>(p.arena), p.row(t) * p.head_dim, p.type), queries);
    }
  });
}

// Values 2i first, then values 2i + 1. scratch: 2 · half floats.
void halves(float* x, int64_t half, float* scratch) {
  std::copy_n(x, 2 * half, scratch);
  for (int64_t i = 0; i < half; i++) x[i] = scratch[2 * i], x[half + i] = scratch[2 * i + 1];
}

}  // namespace

void kv_write(Pool& pool, const Kernels& k, const Pages& p, const Heads& h) {
  const int64_t hd = p.head_dim, bytes = hd * size_of(p.type), apart = p.block_size * bytes;
  Buffer<float> norms(2 * hd);
  if (h.q_norm) {
    k.widen(p.type, h.q_norm, hd, norms.get());
    k.widen(p.type, h.k_norm, hd, norms.get() + hd);
  }
  const int64_t turned = h.heads + h.kv_heads, all = turned + h.kv_heads;
  const auto write = [&](const Token& token, int64_t t, char* row, char* q) {
    const char* from = static_cast<const char*>(h.qkv) + t * all * bytes;
    for (int64_t i = 0; i < turned; i++) {
      k.widen(p.type, from + i * bytes, hd, token.x);
      const float* weight = norms.get() + (i < h.heads ? 0 : hd);
      if (h.q_norm) k.norm(p.type, weight, hd, p.eps, token.x, token.scratch);
      token.turn();
      k.narrow(p.type, token.x, hd, i < h.heads ? q + i * bytes : row + (i - h.heads) * apart);
    }
    for (int64_t i = turned; i < all; i++) std::memcpy(row + (i - h.heads) * apart, from + i * bytes, bytes);
  };
  each_token(pool, k, p, h.q, h.heads * hd, all * hd * 4, write);
}

void latent_write(Pool& pool, const Kernels& k, const Pages& p, const Latent& l) {
  const int64_t rope = 2 * p.half;
  Buffer<float> norm(l.latent);
  k.widen(p.type, l.norm, l.latent, norm.get());
  const auto write = [&](const Token& token, int64_t t, char* row, char* out) {
    const auto turned = [&](const void* from, int64_t place, void* to) {
      k.widen(p.type, at(from, place, p.type), rope, token.x);
      if (l.interleave) halves(token.x, p.half, token.scratch);
      token.turn();
      k.narrow(p.type, token.x, rope, to);
    };
    k.widen(p.type, at(l.kv, t * p.head_dim, p.type), l.latent, token.x);
    k.norm(p.type, norm.get(), l.latent, p.eps, token.x, token.scratch);
    k.narrow(p.type, token.x, l.latent, row);
    turned(l.kv, t * p.head_dim + l.latent, row + l.latent * size_of(p.type));
    for (int64_t i = 0; i < l.heads; i++) {
      turned(l.q_rope, (t * l.heads + i) * rope, out + i * rope * size_of(p.type));
    }
  };
  each_token(pool, k, p, l.out, l.heads * rope, (p.head_dim + l.heads * rope) * 4, write);
}

}  // namespace moejax
