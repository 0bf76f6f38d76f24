#include <algorithm>
#include <cmath>

#include "pallas_kernels/cpu/buffer.h"
#include "pallas_kernels/cpu/state_pages.h"

namespace moejax {
namespace {

// A head: its own part of the state, of the columns of x and of out.
struct Head {
  const Kernels& k;
  const Scan& s;
  const int64_t head, group, matrix, columns, steps, apart;
  Buffer<float> buffer;
  float *state, *rates, *kept, *out;
  float* operands;  // of each token x, dt · x, B, C, and what is kept, or time steps

  Head(const Kernels& kernels, const Scan& scan, int64_t number)
      : k(kernels), s(scan), head(number), group(number / (s.heads / s.groups)),
        matrix(s.keys * s.values), columns(s.heads * s.values + 2 * s.groups * s.keys),
        steps(s.each ? s.values : 1), apart(2 * s.values + 2 * s.keys + steps),
        buffer(3 * matrix + s.values + kRunTokens * apart) {
    state = buffer.get(), rates = state + matrix, kept = rates + matrix, out = kept + matrix;
    operands = out + s.values;
    if (!s.each) {
      rates[0] = -std::exp(s.a_log[head]);
      return;
    }
    const float* of_head = s.a_log + head * matrix;  // [values, keys]
    for (int64_t i = 0; i < s.keys; i++) {
      for (int64_t c = 0; c < s.values; c++) rates[i * s.values + c] = of_head[c * s.keys + i];
    }
    k.exponentials(rates, 0, matrix);
    for (int64_t i = 0; i < matrix; i++) rates[i] = -rates[i];
  }

  void begin(const int32_t* pages, bool zeros) {
    if (zeros) std::fill_n(state, matrix, 0.0f);
    else load(s.states, pages, 2 * head * matrix, 2 * matrix, state);
  }
  void end(const int32_t* pages) { store(s.states, pages, 2 * head * matrix, 2 * matrix, state); }
  void read_token(int64_t row, float* x) {
    const int64_t from = row * columns, shared = s.heads * s.values + group * s.keys;
    float *scaled = x + s.values, *key = scaled + s.values, *dt = key + 2 * s.keys;
    k.widen(s.type, at(s.xbc, from + head * s.values, s.type), s.values, x);
    k.widen(s.type, at(s.xbc, from + shared, s.type), s.keys, key);
    k.widen(s.type, at(s.xbc, from + shared + s.groups * s.keys, s.type), s.keys, key + s.keys);
    k.widen(s.type, at(s.dt, row * s.rates() + head * steps, s.type), steps, dt);
    const float* bias = s.dt_bias + head * steps;
    for (int64_t c = 0; c < steps; c++) {
      dt[c] = std::min(std::max(softplus(dt[c] + bias[c]), s.least), s.most);
    }
    for (int64_t c = 0; c < s.values; c++) scaled[c] = x[c] * dt[s.each ? c : 0];
    if (!s.each) dt[0] = std::exp(rates[0] * dt[0]);
  }
  // Of Mamba, whose exponentials are as many as the state has numbers.
  void advance_each(float* x) {
    float *scaled = x + s.values, *key = scaled + s.values;
    const float* dt = key + 2 * s.keys;
    for (int64_t i = 0; i < s.keys; i++) {
      for (int64_t c = 0; c < s.values; c++) kept[i * s.values + c] = rates[i * s.values + c] * dt[c];
    }
    k.exponentials(kept, 0, matrix);
    k.scan_each(state, s.keys, s.values, kept, key, scaled, key + s.keys, out);
    std::copy_n(out, s.values, scaled);
  }
  void advance(int64_t row, int64_t end) {
    const float* skip = s.skip + head * steps;
    float *scaled = operands + s.values, *key = scaled + s.values;
    for (; row < end; row += kRunTokens) {
      const int64_t tokens = std::min(end - row, kRunTokens);
      for (int64_t t = 0; t < tokens; t++) {
        read_token(row + t, operands + t * apart);
        if (s.each) advance_each(operands + t * apart);
      }
      if (!s.each) {
        k.scan(state, s.values, {tokens, apart, s.keys, key + 2 * s.keys, key, key + s.keys}, scaled);
      }
      for (int64_t t = 0; t < tokens; t++) {
        const float* x = operands + t * apart;
        for (int64_t c = 0; c < s.values; c++) out[c] = scaled[t * apart + c] + skip[s.each ? c : 0] * x[c];
        k.narrow(s.type, out, s.values, at(s.out, ((row + t) * s.heads + head) * s.values, s.type));
      }
    }
  }
};

}  // namespace

void selective_scan(Pool& pool, const Kernels& k, const Scan& s) {
  check(s.states);
  const int64_t work = 3 * s.states.tokens() * s.heads * s.values * s.keys;
  parallel(pool, s.heads, work, [&](int64_t number) {
    Head head(k, s, number);
    advance_runs(s.states, head);
  });
}

}  // namespace moejax
