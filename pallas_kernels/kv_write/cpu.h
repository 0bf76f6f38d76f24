// Rotated queries, and keys and values in their pages.
#pragma once
#include <string>

#include "pallas_kernels/cpu/kernels.h"
#include "pallas_kernels/cpu/pool.h"

namespace moejax {

// Where tokens' KV rows lie, as pallas_kernels/kv_write/api.py says.
struct Pages {
  Type type;
  int64_t tokens;
  int64_t head_dim, block_size, rows_per_token;
  uint16_t* arena;
  int64_t kv_rows;             // rows of head_dim in the arena
  const int32_t *positions, *pages;
  int64_t layer;               // of a page
  const float* frequencies;    // of half the values that turn
  int64_t half;
  float factor, eps;           // of cosine and sine; of the norms

  // Where token t's first row lies; null: it has none.
  char* row(int64_t t) const {
    if (pages[t] < 0) return nullptr;
    const int64_t first = pages[t] + layer * block_size * rows_per_token +
                          positions[t] % block_size * rows_per_token;
    return reinterpret_cast<char*>(arena) + first * head_dim * size_of(type);
  }
};

// Empty, or which token's place is none.
std::string check_pages(const Pages& pages);

// Cosine and sine of a token's angles, [half] each, rounded to the dtype as transformers does.
void angles(const Kernels& kernels, const Pages& pages, int64_t token, float* cosine, float* sine,
            void* scratch);

// Turns value i of x[0 … 2 · half) together with value half + i. scratch: 4 · half floats.
void turn(const Kernels& kernels, Type type, float* x, const float* cosine, const float* sine,
          int64_t half, float* scratch);

struct Heads {
  int64_t heads, kv_heads;
  const void* qkv;                  // [tokens, heads + 2 · kv_heads, head_dim]
  const void *q_norm, *k_norm;      // [head_dim], or null
  void* q;                          // [tokens, heads, head_dim]
};

// Empty, or what is wrong; then nothing was written.
std::string kv_write(Pool& pool, const Kernels& kernels, const Pages& pages, const Heads& heads);

}  // namespace moejax
