// Instructions of AMX: included by amx.cc and integers512.h.
#pragma once

// The compiler's own forms of the first three do not say that they read and write memory.
#define LOAD_TILE(tile, base, stride)                                                 \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void*)(base)),     \
                   "r"((int64_t)(stride)) : "memory")
#define STORE_TILE(tile, base, stride)                                                \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"((void*)(base)),       \
                   "r"((int64_t)(stride)) : "memory")
#define CONFIGURE(tiles) __asm__ volatile("ldtilecfg %0" ::"m"(tiles) : "memory")

namespace moejax {
namespace {

// Rows of the eight tiles, and their bytes.
struct alignas(64) Tiles {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int first, int count, int64_t rows_, int64_t bytes_) {
    for (int i = first; i < first + count; i++) {
      rows[i] = (uint8_t)rows_, bytes[i] = (uint16_t)bytes_;
    }
  }
};

}  // namespace
}  // namespace moejax
