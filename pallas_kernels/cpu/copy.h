// Copies of what is needed later, or far more of it than caches hold: past the caches, where the CPU
// has such stores. Half of a copy's work is otherwise to read what it overwrites; twice as fast, it
// takes half as much of a core from compute (docs/explanation/transfers.md has the measurement).
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
// Sanitizers see memcpy, not these stores.
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define MOEJAX_STREAMS 4
#include <emmintrin.h>
#endif

namespace moejax {

// Below this a copy's bytes may still be in a core's cache when they are read: memcpy.
constexpr int64_t kPastCaches = 256 << 10;

#ifdef MOEJAX_STREAMS
// The most bytes of each of the streams that are written side by side: one alone is a third slower.
constexpr int64_t kStream = 64 << 10;

inline void copy(uint8_t* to, const uint8_t* from, int64_t n) {
  constexpr int64_t kLine = 64;
  if (n >= kPastCaches) {
    const int64_t head = -(int64_t)(reinterpret_cast<uintptr_t>(to) % kLine) & (kLine - 1);
    std::memcpy(to, from, (size_t)head);
    to += head, from += head, n -= head;
    while (const int64_t stream = std::min(kStream, n / MOEJAX_STREAMS / kLine * kLine)) {
      for (int64_t line = 0; line < stream; line += kLine) {
        for (int64_t i = 0; i < MOEJAX_STREAMS; i++) {
          const auto* in = reinterpret_cast<const __m128i*>(from + i * stream + line);
          auto* out = reinterpret_cast<__m128i*>(to + i * stream + line);
          const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
          const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
          _mm_stream_si128(out, a), _mm_stream_si128(out + 1, b);
          _mm_stream_si128(out + 2, c), _mm_stream_si128(out + 3, d);
        }
      }
      to += MOEJAX_STREAMS * stream, from += MOEJAX_STREAMS * stream, n -= MOEJAX_STREAMS * stream;
    }
    _mm_sfence();  // before whatever says that the bytes are there
  }
  std::memcpy(to, from, (size_t)n);
}
#undef MOEJAX_STREAMS
#else
inline void copy(uint8_t* to, const uint8_t* from, int64_t n) { std::memcpy(to, from, (size_t)n); }
#endif

}  // namespace moejax
