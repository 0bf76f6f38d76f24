// A token's latent KV in its page, and its rotated queries.
#pragma once
#include <string>

#include "pallas_kernels/kv_write/cpu.h"

namespace moejax {

struct Latent {
  int64_t heads, latent;
  bool interleave;
  const void* kv;      // [tokens, head_dim]
  const void* norm;    // [latent]
  const void* q_rope;  // [tokens, heads, head_dim − latent]
  void* out;           // as q_rope
};

// Empty, or what is wrong; then nothing was written.
std::string latent_write(Pool& pool, const Kernels& kernels, const Pages& pages,
                         const Latent& latent);

}  // namespace moejax
