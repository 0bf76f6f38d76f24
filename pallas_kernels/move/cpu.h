// Rows of the arena copied within it, out of it and into it: cells, and pages of KV.
#pragma once
#include <string>
#include <vector>

#include "pallas_kernels/cpu/pool.h"

namespace moejax {

// Memory as rows of `width` elements.
struct Rows {
  uint16_t* data;
  int64_t width, count;
};

// Each returns empty, or which place is none; then nothing was written.

// rows[i] rows from row source[i] to row target[i]; 0: the entry is skipped. Targets overlap neither
// each other nor a source, but entries may repeat.
std::string move(Pool& pool, const Rows& memory, const int32_t* source, const int32_t* target,
                 const int32_t* rows, int64_t entries);

// `rows` rows from row first[i] on to to[i], and from from[i] to them; entries may repeat.
std::string read(Pool& pool, const Rows& memory, const int32_t* first, int64_t rows,
                 const std::vector<uint16_t*>& to);
std::string write(Pool& pool, const Rows& memory, const int32_t* first, int64_t rows,
                  const std::vector<const uint16_t*>& from);

}  // namespace moejax
