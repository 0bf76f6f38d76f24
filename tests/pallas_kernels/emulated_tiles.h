// AMX's tiles by plain code, for machines without AMX: the compiler's -include puts this before cpu/amx.cc.
// What AMX refuses is a trap. Denormals are not flushed to zero, as AMX flushes them.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "pallas_kernels/cpu/tiles_amx.h"

namespace moejax {
namespace {

struct EmulatedTiles {
  int rows[8], bytes[8];
  char memory[8][16][64];

  void configure(const Tiles& tiles) {
    memset(this, 0, sizeof *this);
    for (int i = 0; i < 8; i++) rows[i] = tiles.rows[i], bytes[i] = tiles.bytes[i];
  }
  void need(bool right) const {
    if (!right) __builtin_trap();
  }
  void zero(int tile) {
    need(rows[tile]);
    memset(memory[tile], 0, sizeof memory[tile]);
  }
  void load(int tile, const void* base, int64_t stride) {
    zero(tile);
    for (int i = 0; i < rows[tile]; i++) memcpy(memory[tile][i], (const char*)base + i * stride, bytes[tile]);
  }
  void store(int tile, void* base, int64_t stride) const {
    need(rows[tile]);
    for (int i = 0; i < rows[tile]; i++) memcpy((char*)base + i * stride, memory[tile][i], bytes[tile]);
  }

  float element(int tile, int row, int i) const {
    uint16_t bits;
    memcpy(&bits, memory[tile][row] + 2 * i, 2);
    const uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
  }
  // In the order of Intel's description of TDPBF16PS.
  void multiply(int total, int a, int b) {
    need(rows[total] && rows[a] == rows[total] && bytes[a] == 4 * rows[b] && bytes[b] == bytes[total]);
    for (int i = 0; i < rows[total]; i++) {
      for (int n = 0; n < bytes[total] / 4; n++) {
        float even = 0, odd = 0, sum;
        for (int k = 0; k < rows[b]; k++) {
          even = __builtin_fmaf(element(a, i, 2 * k), element(b, k, 2 * n), even);
          odd = __builtin_fmaf(element(a, i, 2 * k + 1), element(b, k, 2 * n + 1), odd);
        }
        memcpy(&sum, memory[total][i] + 4 * n, 4);
        sum += even + odd;
        memcpy(memory[total][i] + 4 * n, &sum, 4);
      }
    }
  }
};
thread_local EmulatedTiles emulated;

}  // namespace
}  // namespace moejax

#undef LOAD_TILE
#undef STORE_TILE
#undef CONFIGURE
#undef _tile_zero
#undef _tile_release
#undef _tile_dpbf16ps
#define LOAD_TILE(tile, base, stride) emulated.load(tile, base, stride)
#define STORE_TILE(tile, base, stride) emulated.store(tile, base, stride)
#define CONFIGURE(tiles) emulated.configure(tiles)
#define _tile_zero(tile) emulated.zero(tile)
#define _tile_release() emulated.configure({})
#define _tile_dpbf16ps(total, a, b) emulated.multiply(total, a, b)
