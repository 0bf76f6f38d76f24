#include <algorithm>
#include <cmath>
#include <cstring>

#include "pallas_kernels/cpu/buffer.h"
#include "pallas_kernels/cpu/state_pages.h"

namespace moejax {
namespace {

constexpr float kEps = 1e-6f;

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

void make_unit(float* x, int64_t n, float factor) {
  float part[8] = {}, sum = 0;
  for (int64_t i = 0; i < n; i++) part[i % 8] += x[i] * x[i];
  for (float each : part) sum += each;
  const float scale = factor / std::sqrt(sum + kEps);
  for (int64_t i = 0; i < n; i++) x[i] *= scale;
}

// A key head with its value heads: its own part of the state, of the columns of qkv and of out.
struct Group {
  const Kernels& k;
  const Delta& d;
  const int64_t group, heads, values, columns, wide, matrix, decays, apart;
  struct Part { int64_t column, count; } parts[3];  // of q, k and v in a row of qkv
  Buffer<float> buffer;
  float *state, *last, *taps, *x, *ones, *scratch;
  float* operands;  // of each token q, k, v, what each head keeps, and its rate
  Buffer<char> narrow;

  Group(const Kernels& kernels, const Delta& delta, int64_t number)
      : k(kernels), d(delta), group(number), heads(d.value_heads / d.key_heads),
        values(heads * d.value_dim), columns(2 * d.key_dim + values),
        wide(2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim),
        matrix(d.key_dim * d.value_dim), decays(d.each ? d.key_dim : 1),
        apart(columns + heads * (decays + 1)),
        parts{{group * d.key_dim, d.key_dim},
              {(d.key_heads + group) * d.key_dim, d.key_dim},
              {2 * d.key_heads * d.key_dim + group * values, values}},
        buffer(heads * matrix + 2 * d.taps * columns + 2 * columns + kDeltaScratch * d.key_dim +
               kRunTokens * apart),
        narrow(columns * sizeof(float)) {
    state = buffer.get(), last = state + heads * matrix, taps = last + d.taps * columns;
    x = taps + d.taps * columns, ones = x + columns, scratch = ones + columns;
    operands = scratch + kDeltaScratch * d.key_dim;
    std::fill_n(ones, columns, 1.0f);
    each_part([&](int64_t i, const Part& part) {
      for (int64_t tap = 0; tap < d.taps; tap++) {
        for (int64_t c = 0; c < part.count; c++) {  // the newest token's first
          taps[tap * columns + i + c] = d.conv[(part.column + c) * d.taps + d.taps - 1 - tap];
        }
      }
    });
  }
  // f(where it begins among the group's columns, part).
  template <class F>
  void each_part(const F& f) const {
    int64_t i = 0;
    for (const Part& part : parts) f(i, part), i += part.count;
  }
  void round(float* values_, int64_t n) {
    if (d.type == Type::F32) return;
    k.narrow(d.type, values_, n, narrow.get());
    k.widen(d.type, narrow.get(), n, values_);
  }

  // Elements of the layer's state.
  int64_t matrices() const { return 2 * group * heads * matrix; }
  int64_t input(int64_t tap, const Part& part) const {
    return 2 * d.value_heads * matrix + (tap * wide + part.column) * size_of(d.type) / 2;
  }
  void begin(const int32_t* pages, bool zeros) {
    if (zeros) {
      std::fill_n(state, heads * matrix + d.taps * columns, 0.0f);
      return;
    }
    load(d.states, pages, matrices(), 2 * heads * matrix, state);
    for (int64_t tap = 0; tap < d.taps - 1; tap++) {
      each_part([&](int64_t i, const Part& part) {
        load(d.states, pages, input(tap, part), part.count * size_of(d.type) / 2, narrow.get());
        k.widen(d.type, narrow.get(), part.count, last + tap * columns + i);
      });
    }
  }
  void end(const int32_t* pages) {
    store(d.states, pages, matrices(), 2 * heads * matrix, state);
    for (int64_t tap = 0; tap < d.taps - 1; tap++) {
      each_part([&](int64_t i, const Part& part) {
        k.narrow(d.type, last + tap * columns + i, part.count, narrow.get());
        store(d.states, pages, input(tap, part), part.count * size_of(d.type) / 2, narrow.get());
      });
    }
  }

  void mix(int64_t row, float* mixed) {
    each_part([&](int64_t i, const Part& part) {
      k.widen(d.type, at(d.qkv, row * wide + part.column, d.type), part.count, x + i);
    });
    for (int64_t c = 0; c < columns; c++) mixed[c] = x[c] * taps[c];
    for (int64_t tap = 1; tap < d.taps; tap++) {
      const float *old = last + (tap - 1) * columns, *weight = taps + tap * columns;
      for (int64_t c = 0; c < columns; c++) mixed[c] += old[c] * weight[c];
    }
    std::memmove(last + columns, last, (d.taps - 1) * columns * sizeof(float));
    std::copy_n(x, columns, last);
    round(mixed, columns);
    k.activate(SILU, 0, 0, mixed, ones, columns);
    round(mixed, columns);
    make_unit(mixed, d.key_dim, 1 / std::sqrt(static_cast<float>(d.key_dim)));
    make_unit(mixed + d.key_dim, d.key_dim, 1);
  }
  void gate(int64_t row, float* kept) {
    for (int64_t head = group * heads; head < (group + 1) * heads; head++, kept += decays + 1) {
      const int64_t at_head = row * d.value_heads + head;
      k.widen(d.type, at(d.beta, at_head, d.type), 1, kept + decays);
      k.widen(d.type, at(d.decay, at_head * decays, d.type), decays, kept);
      const float rate = std::exp(d.a_log[head]), *bias = d.dt_bias + head * decays;
      for (int64_t i = 0; i < decays; i++) kept[i] = std::exp(-rate * softplus(kept[i] + bias[i]));
      kept[decays] = sigmoid(kept[decays]);
    }
  }
  void advance(int64_t row, int64_t end) {
    for (; row < end; row += kRunTokens) {
      const int64_t tokens = std::min(end - row, kRunTokens);
      for (int64_t t = 0; t < tokens; t++) {
        mix(row + t, operands + t * apart);
        gate(row + t, operands + t * apart + columns);
      }
      DeltaTokens each = {tokens, apart, d.key_dim, d.each};
      each.q = operands, each.key = operands + d.key_dim;
      for (int64_t e = 0; e < heads; e++) {
        float* v = operands + 2 * d.key_dim + e * d.value_dim;
        each.kept = operands + columns + e * (decays + 1), each.rate = each.kept + decays;
        k.delta(state + e * matrix, d.value_dim, each, v, scratch);
        for (int64_t t = 0; t < tokens; t++) {
          const int64_t to = ((row + t) * d.value_heads + group * heads + e) * d.value_dim;
          k.narrow(d.type, v + t * apart, d.value_dim, at(d.out, to, d.type));
        }
      }
    }
  }
};

}  // namespace

void gated_delta(Pool& pool, const Kernels& k, const Delta& d) {
  check(d.states);
  const int64_t work = 4 * d.states.tokens() * d.value_heads * d.key_dim * d.value_dim;
  parallel(pool, d.key_heads, work, [&](int64_t number) {
    Group group(k, d, number);
    advance_runs(d.states, group);
  });
}

}  // namespace moejax
