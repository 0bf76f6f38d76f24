// Matrices that are blocks of a GGUF file, and biases of its float32 values, and where their codes and
// scales belong in a record.
#pragma once
#include <cstdint>

namespace moejax {

// As pallas_kernels/cpu/gguf.py passes it. Fields are codes, highs, scales, supers, mins, min_supers.
struct BlockMatrix {
  int64_t kind, rows, width;
  int64_t bytes;                  // of its blocks
  int64_t down;                   // whether the record has it transposed; of biases nothing
  int64_t places[6], sizes[6];    // of its fields: bytes from the record's begin, and how many
};

// Puts the blocks uint8[rows, blocks, bytes of a block] into the record, and zeros behind them in
// each field. Returns 0, or 1 + the first field that has too few bytes, or -1 for a width that has
// no whole blocks.
int put_blocks(const BlockMatrix& matrix, const uint8_t* raw, uint8_t* record);

// What is infinite or NaN of what put_blocks has put there; null: nothing.
const char* wrong_numbers(const BlockMatrix& matrix, const uint8_t* record);

}  // namespace moejax
