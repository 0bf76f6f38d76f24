// Attention over pages, of single queries (decode) and of chunks of them (prefill).
#pragma once
#include <string>
#include <vector>

#include "pallas_kernels/cpu/kernels.h"
#include "pallas_kernels/cpu/pool.h"

namespace moejax {

// What both have in common; pallas_kernels/paged_attention/api.py has the meaning.
struct Attention {
  Type type;
  int64_t heads, kv_heads, head_dim, block_size;
  int64_t latent;       // 0: keys and values are rows of their own
  int64_t window;       // 0: none
  float scale;
  const void* q;        // [rows, heads, head_dim]
  const uint16_t* arena;
  int64_t kv_rows;      // rows of head_dim in the arena
  const int32_t* block_table;
  int64_t sequences, blocks;
  int64_t layer;
  void* out;            // [rows, heads · value_dim]
};

// Rows [first, first + count) of q are one sequence's queries at positions `position` and on.
struct Queries {
  int64_t first, count, sequence, position;
};

// Writes the results of these queries, nothing else. Empty, or what is wrong with a table's entry:
// then nothing was read or written by it.
std::string attend(Pool& pool, const Kernels& kernels, const Attention& call,
                   const std::vector<Queries>& queries);

}  // namespace moejax
