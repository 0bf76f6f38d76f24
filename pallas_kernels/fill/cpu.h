// Records of one layer, from their stores into cells.
#pragma once
#include <string>
#include <vector>

#include "pallas_kernels/cpu/pool.h"
#include "pallas_kernels/cpu/supply.h"
#include "pallas_kernels/records/cpu.h"

namespace moejax {

// The operands of pallas_kernels/fill/api.py. Cells of the list do not overlap.
struct Fills {
  uint16_t* arena;  // [arena_rows, hidden]
  int64_t arena_rows, hidden, layer;
  std::vector<StoredVersion> versions;
  const int32_t *expert, *row, *version;  // [count]
  int64_t count;
  Supply* supply;  // null: records are copied here
  bool ahead;      // of need: nothing waits for them yet
};

// Empty, or what is wrong with an entry; then nothing was written. With a supply records are queued,
// and come beside what follows; those that are decoded on the way are written here also then.
std::string fill(Pool& pool, const Kernels& kernels, const Fills& call);

}  // namespace moejax
