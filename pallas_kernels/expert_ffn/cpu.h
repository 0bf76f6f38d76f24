// The experts of a layer, read where their records lie.
#pragma once
#include <string>

#include "pallas_kernels/cpu/kernels.h"
#include "pallas_kernels/cpu/pool.h"
#include "pallas_kernels/cpu/supply.h"
#include "pallas_kernels/records/cpu.h"

namespace moejax {

// The operands of pallas_kernels/expert_ffn/api.py, dense in C order.
struct Experts {
  Type type;
  int64_t tokens, top_k, hidden, width, layers, experts;
  Activation activation;
  const void* x;
  const int32_t* ids;
  const uint16_t* arena;
  int64_t arena_rows;
  const StoredVersion* versions;
  int64_t version_count;
  int64_t layer;
  const int32_t *address, *version;  // [layers, experts]
  const int32_t* active;
  int64_t active_count;
  float* y;  // [tokens · top_k, hidden]; rows of experts that are not active are left alone
  Supply* supply;   // null: every record lies where it is read
  uint32_t writes;  // of the arena, so far
};

// With a supply, experts are computed as their records come. One whose record does not is zeros, and
// said to the supply. Empty, or what is wrong with a table's entry: then nothing was read or written by it.
std::string run_experts(Pool& pool, const Kernels& kernels, const Experts& call);

}  // namespace moejax
