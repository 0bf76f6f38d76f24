#include "pallas_kernels/cpu/transpose.h"

#include <algorithm>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace moejax {
namespace {

// In strips of columns whose lines stay in the first cache.
template <typename Item>
void transpose_items(const uint8_t* rows, int64_t n, int64_t stride, int64_t begin, int64_t width,
                     uint8_t* to, int64_t first, int64_t height) {
  constexpr int64_t kStrip = 64 / sizeof(Item);
  auto* const out = reinterpret_cast<Item*>(to);
  for (int64_t strip = begin; strip < width; strip += kStrip) {
    for (int64_t c = strip; c < std::min(strip + kStrip, width); c++) {
      for (int64_t i = 0; i < n; i++) {
        std::memcpy(out + c * height + first + i, rows + i * stride + c * (int64_t)sizeof(Item),
                    sizeof(Item));
      }
    }
  }
}

#ifdef __SSE2__
// Eight rows of eight numbers.
inline void transpose_block(const uint8_t* from, int64_t stride, uint16_t* to, int64_t height) {
  __m128i a[8], b[8];
  for (int i = 0; i < 8; i++) a[i] = _mm_loadu_si128((const __m128i*)(from + i * stride));
  for (int i = 0; i < 4; i++) {
    b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    for (int j = 0; j < 2; j++) {
      a[4 * i + 2 * j] = _mm_unpacklo_epi32(b[4 * i + j], b[4 * i + 2 + j]);
      a[4 * i + 2 * j + 1] = _mm_unpackhi_epi32(b[4 * i + j], b[4 * i + 2 + j]);
    }
  }
  for (int j = 0; j < 4; j++) {
    _mm_storeu_si128((__m128i*)(to + 2 * j * height), _mm_unpacklo_epi64(a[j], a[4 + j]));
    _mm_storeu_si128((__m128i*)(to + (2 * j + 1) * height), _mm_unpackhi_epi64(a[j], a[4 + j]));
  }
}

// 32 rows of a line each. Lines of the result may lie in one set of the first cache, 4 KiB apart: they
// are made in a tile and written once, past the caches.
inline void transpose_lines(const uint8_t* from, int64_t stride, uint16_t* to, int64_t height) {
  alignas(64) uint16_t tile[32 * 32];
  for (int i = 0; i < 32; i += 8) {
    for (int c = 0; c < 32; c += 8) {
      transpose_block(from + i * stride + 2 * c, stride, tile + 32 * c + i, 32);
    }
  }
  for (int c = 0; c < 32; c++) {
    auto* const line = reinterpret_cast<__m128i*>(to + c * height);
    const auto* const made = reinterpret_cast<const __m128i*>(tile + 32 * c);
    for (int k = 0; k < 4; k++) _mm_stream_si128(line + k, _mm_load_si128(made + k));
  }
}
#endif

}  // namespace

void transpose(const uint8_t* rows, int64_t n, int64_t stride, int64_t width, int64_t item,
               uint8_t* to, int64_t first, int64_t height) {
  if (item == 4) return transpose_items<uint32_t>(rows, n, stride, 0, width, to, first, height);
  int64_t whole = 0, i = 0;
#ifdef __SSE2__
  constexpr int64_t kStrip = 32;  // a line of each row
  auto* const out = reinterpret_cast<uint16_t*>(to) + first;
  whole = width / 8 * 8;
  const int64_t blocks = n / 8 * 8;
  // Whole lines where both sides have them.
  const bool lines = ((uintptr_t)out | (uint64_t)(2 * height)) % 64 == 0;
  for (int64_t strip = 0; strip < whole; strip += kStrip) {
    i = 0;
    if (lines && strip + kStrip <= whole) {
      for (; i + kStrip <= blocks; i += kStrip) {
        transpose_lines(rows + i * stride + 2 * strip, stride, out + strip * height + i, height);
      }
    }
    for (; i < blocks; i += 8) {
      for (int64_t c = strip; c < std::min(strip + kStrip, whole); c += 8) {
        transpose_block(rows + i * stride + 2 * c, stride, out + c * height + i, height);
      }
    }
  }
  i = blocks;
  _mm_sfence();
#endif
  if (whole && i < n) {
    transpose_items<uint16_t>(rows + i * stride, n - i, stride, 0, whole, to, first + i, height);
  }
  transpose_items<uint16_t>(rows, n, stride, whole, width, to, first, height);
}

}  // namespace moejax

extern "C" __attribute__((visibility("default"))) void moejax_transpose(
    const uint8_t* rows, int64_t n, int64_t stride, int64_t width, int64_t item, uint8_t* to,
    int64_t height) {
  moejax::transpose(rows, n, stride, width, item, to, 0, height);
}
