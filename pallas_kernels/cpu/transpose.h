// Rows that become columns.
#pragma once
#include <cstdint>

namespace moejax {

// Writes n rows, `stride` bytes apart, of `width` numbers of `item` bytes (2 or 4) as columns first …
// first + n − 1 of a matrix whose rows have `height` numbers, at `to`.
void transpose(const uint8_t* rows, int64_t n, int64_t stride, int64_t width, int64_t item,
               uint8_t* to, int64_t first, int64_t height);

}  // namespace moejax
