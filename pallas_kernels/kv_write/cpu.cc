#include "pallas_kernels/kv_write/cpu.h"

#include <cmath>
#include <cstring>

#include "pallas_kernels/cpu/buffer.h"
#include "pallas_kernels/rms_norm/cpu.h"

namespace moejax {
namespace {

constexpr int64_t kTokensOfTask = 8;

}  // namespace

std::string check_pages(const Pages& p) {
  for (int64_t t = 0; t < p.tokens; t++) {
    if (p.pages[t] < 0) continue;
    const int64_t first = p.pages[t] + (p.layer * p.block_size + p.positions[t] % p.block_size) *
                                           p.rows_per_token;
    if (p.positions[t] < 0 || p.layer < 0 || first + p.rows_per_token > p.kv_rows) {
      return "token " + std::to_string(t) + " at position " + std::to_string(p.positions[t]) +
             " of page " + std::to_string(p.pages[t]) + " is not in the arena";
    }
  }
  return "";
}

void angles(const Kernels& k, const Pages& p, int64_t t, float* cosine, float* sine,
            void* scratch) {
  const float position = static_cast<float>(p.positions[t]);
  for (int64_t i = 0; i < p.half; i++) {
    const float angle = position * p.frequencies[i];
    cosine[i] = std::cos(angle) * p.factor, sine[i] = std::sin(angle) * p.factor;
  }
  round_row(k, p.type, p.half, cosine, scratch);
  round_row(k, p.type, p.half, sine, scratch);
}

void turn(const Kernels& k, Type type, float* x, const float* cosine, const float* sine,
          int64_t half, float* scratch) {
  float *own = scratch, *other = scratch + 2 * half;
  for (int64_t i = 0; i < half; i++) {
    own[i] = x[i] * cosine[i], own[half + i] = x[half + i] * cosine[i];
    other[i] = -x[half + i] * sine[i], other[half + i] = x[i] * sine[i];
  }
  // Products are rounded as transformers' are; x is free for it.
  round_row(k, type, 2 * half, own, x);
  round_row(k, type, 2 * half, other, x);
  for (int64_t i = 0; i < 2 * half; i++) x[i] = own[i] + other[i];
}

std::string kv_write(Pool& pool, const Kernels& k, const Pages& p, const Heads& h) {
  const std::string wrong = check_pages(p);
  if (!wrong.empty()) return wrong;
  const int64_t hd = p.head_dim, bytes = hd * size_of(p.type);
  Buffer<float> norms(2 * hd);
  if (h.q_norm) {
    k.widen(p.type, h.q_norm, hd, norms.get());
    k.widen(p.type, h.k_norm, hd, norms.get() + hd);
  }
  const int64_t all = h.heads + 2 * h.kv_heads;
  const int64_t work = p.tokens * all * hd * 4;
  parallel_rows(pool, p.tokens, kTokensOfTask, work, [&](int64_t first, int64_t last) {
    Buffer<float> buffer(5 * hd);
    float *x = buffer.get(), *cosine = x + hd, *sine = x + 2 * hd, *scratch = x + 3 * hd;
    for (int64_t t = first; t < last; t++) {
      const char* from = static_cast<const char*>(h.qkv) + t * all * bytes;
      char* q = static_cast<char*>(h.q) + t * h.heads * bytes;
      char* row = p.row(t);
      if (!row) {  // padding
        std::memset(q, 0, h.heads * bytes);
        continue;
      }
      angles(k, p, t, cosine, sine, scratch);
      for (int64_t i = 0; i < h.heads + h.kv_heads; i++) {
        k.widen(p.type, from + i * bytes, hd, x);
        const float* weight = norms.get() + (i < h.heads ? 0 : hd);
        if (h.q_norm) k.norm(p.type, weight, hd, p.eps, x, scratch);
        turn(k, p.type, x, cosine, sine, p.half, scratch);
        k.narrow(p.type, x, hd, i < h.heads ? q + i * bytes : row + (i - h.heads) * bytes);
      }
      const int64_t values = h.heads + h.kv_heads;
      std::memcpy(row + h.kv_heads * bytes, from + values * bytes, h.kv_heads * bytes);
    }
  });
  return "";
}

}  // namespace moejax
