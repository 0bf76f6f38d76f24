#include <algorithm>
#include <cstring>

#include "pallas_kernels/cpu/buffer.h"
#include "pallas_kernels/cpu/state_pages.h"

namespace moejax {
namespace {

constexpr int64_t kColumns = 256;  // of a task, at most

// Some columns of the convolution, of every token.
struct Columns {
  const Kernels& k;
  const ShortConv& c;
  const int64_t first, count;
  Buffer<float> buffer;
  float *last, *taps, *x, *mixed, *ones;
  Buffer<char> narrow;

  Columns(const Kernels& kernels, const ShortConv& conv, int64_t begin, int64_t end)
      : k(kernels), c(conv), first(begin), count(end - begin), buffer((2 * c.taps + 3) * count),
        narrow(count * sizeof(float)) {
    last = buffer.get(), taps = last + c.taps * count, x = taps + c.taps * count;
    mixed = x + count, ones = mixed + count;
    std::fill_n(ones, count, 1.0f);
    for (int64_t tap = 0; tap < c.taps; tap++) {
      for (int64_t i = 0; i < count; i++) {  // the newest token's first
        taps[tap * count + i] = c.weights[(first + i) * c.taps + c.taps - 1 - tap];
      }
    }
  }
  int64_t element(int64_t tap) const { return (tap * c.width + first) * size_of(c.type) / 2; }
  void begin(const int32_t* pages, bool zeros) {
    if (zeros) std::fill_n(last, c.taps * count, 0.0f);
    for (int64_t tap = 0; tap < c.taps - 1 && !zeros; tap++) {
      load(c.states, pages, element(tap), count * size_of(c.type) / 2, narrow.get());
      k.widen(c.type, narrow.get(), count, last + tap * count);
    }
  }
  void end(const int32_t* pages) {
    for (int64_t tap = 0; tap < c.taps - 1; tap++) {
      k.narrow(c.type, last + tap * count, count, narrow.get());
      store(c.states, pages, element(tap), count * size_of(c.type) / 2, narrow.get());
    }
  }
  void advance(int64_t row, int64_t end) {
    for (; row < end; row++) mix(row);
  }
  void mix(int64_t row) {
    k.widen(c.type, at(c.x, row * c.width + first, c.type), count, x);
    for (int64_t i = 0; i < count; i++) mixed[i] = x[i] * taps[i];
    for (int64_t tap = 1; tap < c.taps; tap++) {
      const float *old = last + (tap - 1) * count, *weight = taps + tap * count;
      for (int64_t i = 0; i < count; i++) mixed[i] += old[i] * weight[i];
    }
    std::memmove(last + count, last, (c.taps - 1) * count * sizeof(float));
    std::copy_n(x, count, last);
    for (int64_t i = 0; i < count; i++) mixed[i] += c.bias[first + i];
    void* out = at(c.out, row * c.width + first, c.type);
    k.narrow(c.type, mixed, count, out);
    if (!c.silu) return;
    k.widen(c.type, out, count, mixed);
    k.activate(SILU, 0, 0, mixed, ones, count);
    k.narrow(c.type, mixed, count, out);
  }
};

}  // namespace

void short_conv(Pool& pool, const Kernels& k, const ShortConv& c) {
  check(c.states);
  parallel_rows(pool, c.width, kColumns, c.states.tokens() * c.width * c.taps,
                [&](int64_t first, int64_t last) {
                  Columns columns(k, c, first, last);
                  advance_runs(c.states, columns);
                });
}

}  // namespace moejax
