#include "pallas_kernels/latent_write/cpu.h"

#include <algorithm>
#include <cstring>

#include "pallas_kernels/cpu/buffer.h"
#include "pallas_kernels/rms_norm/cpu.h"

namespace moejax {
namespace {

constexpr int64_t kTokensOfTask = 8;

// Values 2i first, then values 2i + 1. scratch: 2 · half floats.
void halves(float* x, int64_t half, float* scratch) {
  std::copy_n(x, 2 * half, scratch);
  for (int64_t i = 0; i < half; i++) x[i] = scratch[2 * i], x[half + i] = scratch[2 * i + 1];
}

}  // namespace

std::string latent_write(Pool& pool, const Kernels& k, const Pages& p, const Latent& l) {
  const std::string wrong = check_pages(p);
  if (!wrong.empty()) return wrong;
  const int64_t size = size_of(p.type), hd = p.head_dim, rope = 2 * p.half;
  Buffer<float> norm(l.latent);
  k.widen(p.type, l.norm, l.latent, norm.get());
  const int64_t work = p.tokens * (hd + l.heads * rope) * 4;
  parallel_rows(pool, p.tokens, kTokensOfTask, work, [&](int64_t first, int64_t last) {
    Buffer<float> buffer(5 * hd);
    float *x = buffer.get(), *cosine = x + hd, *sine = x + 2 * hd, *scratch = x + 3 * hd;
    const auto turned = [&](const void* from, void* to) {
      k.widen(p.type, from, rope, x);
      if (l.interleave) halves(x, p.half, scratch);
      turn(k, p.type, x, cosine, sine, p.half, scratch);
      k.narrow(p.type, x, rope, to);
    };
    for (int64_t t = first; t < last; t++) {
      const int64_t queries = t * l.heads * rope * size;
      char *row = p.row(t), *out = static_cast<char*>(l.out) + queries;
      if (!row) {  // padding
        std::memset(out, 0, l.heads * rope * size);
        continue;
      }
      angles(k, p, t, cosine, sine, scratch);
      const char* from = static_cast<const char*>(l.kv) + t * hd * size;
      k.widen(p.type, from, l.latent, x);
      k.norm(p.type, norm.get(), l.latent, p.eps, x, scratch);
      k.narrow(p.type, x, l.latent, row);
      turned(from + l.latent * size, row + l.latent * size);
      const char* q = static_cast<const char*>(l.q_rope) + queries;
      for (int64_t i = 0; i < l.heads; i++) turned(q + i * rope * size, out + i * rope * size);
    }
  });
  return "";
}

}  // namespace moejax
