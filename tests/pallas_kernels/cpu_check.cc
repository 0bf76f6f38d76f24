// The native CPU ops over random shapes against plain double sums, without jax, for sanitizers:
// every operand lies in an allocation of exactly its size. Arguments: a seed and a number of rounds.
// Prints "ok" and the instruction sets that ran; anything else is a failure.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "pallas_kernels/cpu/arena.h"
#include "pallas_kernels/cpu/ops.h"

using namespace moejax;

#ifdef MOEJAX_STAND_INS
namespace moejax {
extern const Kernels kernels_wide;  // of AVX-512's shapes, compiled for any CPU
}
#endif

namespace {

std::mt19937 rng;

int64_t pick(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(rng);
}
float normal() { return std::normal_distribution<float>()(rng); }

// Threads of its own for each helper; joined at the end, so that late helpers run too.
struct Threads : Pool {
  std::vector<std::thread> started;
  int64_t threads() const override { return 3; }
  int64_t small_work() const override { return 0; }
  void schedule(void (*run)(void*), void* data) override { started.emplace_back(run, data); }
  ~Threads() override {
    for (auto& thread : started) thread.join();
  }
};

[[noreturn]] void fail(const std::string& what) {
  std::printf("%s\n", what.c_str());
  std::exit(1);
}

void expect(bool right, const std::string& what) {
  if (!right) fail(what);
}

// Whether an op refuses its operands.
template <class Op>
bool refused(Op op) {
  try {
    op();
  } catch (const Refused&) {
    return true;
  }
  return false;
}

// ---- values of a dtype, by plain arithmetic

float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

double value(Type type, const char* p, int64_t i) {
  if (type == Type::F32) {
    float f;
    std::memcpy(&f, p + 4 * i, 4);
    return f;
  }
  uint16_t h;
  std::memcpy(&h, p + 2 * i, 2);
  if (type == Type::BF16) return bits_to_float((uint32_t)h << 16);
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  const double size = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
  return h & 0x8000 ? -size : size;
}

// Rounded to nearest even by the kernels' own function, whose result is checked here.
std::vector<char> rounded(const Kernels& k, Type type, const std::vector<float>& in) {
  std::vector<char> out(in.size() * size_of(type));
  if (in.empty()) return out;
  k.narrow(type, in.data(), (int64_t)in.size(), out.data());
  const double ulp = type == Type::F32 ? 0 : type == Type::BF16 ? 1.0 / 256 : 1.0 / 2048;
  for (size_t i = 0; i < in.size(); i++) {
    const double error = std::fabs(value(type, out.data(), i) - in[i]);
    if (!(error <= ulp * std::fabs(in[i]) + 3e-8)) {
      fail("narrow: " + std::to_string((int)type) + " " + std::to_string(in[i]));
    }
  }
  return out;
}

std::vector<char> draw(const Kernels& k, Type type, int64_t n, float scale = 1) {
  std::vector<float> values(n);
  for (float& v : values) v = scale * normal();
  return rounded(k, type, values);
}

// size: of a sum of terms with random signs, the root of their squares: a sum that is small by
// chance has the rounding errors of its terms, and those grow with the width.
void near(Type type, double got, double want, const std::string& what, double size = 0) {
  const double tolerance = type == Type::F32 ? 1e-5 : type == Type::BF16 ? 1e-2 : 2e-3;
  if (!(std::fabs(got - want) <= tolerance * (1 + std::max(std::fabs(want), size)))) {
    fail(what + ": " + std::to_string(got) + ", not " + std::to_string(want));
  }
}

Type any_type() { return static_cast<Type>(pick(0, 2)); }

// ---- linear

void check_linear(const Kernels& k) {
  Threads pool;
  const Type type = any_type(), out = any_type();
  const int64_t tokens = pick(0, 20), inputs = pick(1, 300), outputs = pick(1, 130);
  const auto x = draw(k, type, tokens * inputs);
  const auto w = draw(k, type, outputs * inputs, 1 / std::sqrt((float)inputs));
  const auto bias = draw(k, type, outputs);
  std::vector<char> y(tokens * outputs * size_of(out));
  const Product p = {type,   out,      tokens,   inputs,      outputs, inputs,
                     outputs, x.data(), w.data(), bias.data(), y.data()};
  multiply(pool, k, {p});
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t r = 0; r < outputs; r++) {
      double want = value(type, bias.data(), r);
      for (int64_t i = 0; i < inputs; i++) {
        want += value(type, x.data(), t * inputs + i) * value(type, w.data(), r * inputs + i);
      }
      near(out, value(out, y.data(), t * outputs + r), want, "linear");
    }
  }
}

void check_head_linear(const Kernels& k) {
  Threads pool;
  const int64_t tokens = pick(0, 20), heads = pick(1, 4), rows = pick(1, 60), columns = pick(1, 150);
  const int64_t first = pick(0, rows - 1), count = pick(1, rows - first);
  const Type type = any_type();
  const auto w = draw(k, type, heads * rows * columns, 0.2f);
  const auto x = draw(k, type, tokens * heads * count);
  std::vector<char> y(tokens * heads * columns * size_of(type));
  std::vector<Product> products(
      heads, {type, type, tokens, count, columns, heads * count, heads * columns});
  for (int64_t h = 0; h < heads; h++) {
    products[h].w = at(w.data(), (h * rows + first) * columns, type);
    products[h].x = at(x.data(), h * count, type);
    products[h].y = at(static_cast<void*>(y.data()), h * columns, type);
  }
  multiply_transposed(pool, k, products);
  for (int64_t i = 0; i < tokens * heads; i++) {
    for (int64_t c = 0; c < columns; c++) {
      double want = 0;
      for (int64_t r = 0; r < count; r++) {
        const int64_t row = i % heads * rows + first + r;
        want += value(type, x.data(), i * count + r) * value(type, w.data(), row * columns + c);
      }
      near(type, value(type, y.data(), i * columns + c), want, "head_linear");
    }
  }
}

// ---- a layer's small ops

void check_rows(const Kernels& k) {
  Threads pool;
  const Type type = any_type();
  const int64_t rows = pick(0, 40), width = pick(1, 200), top_k = pick(1, 4);
  const auto x = draw(k, type, rows * width), weight = draw(k, type, width);
  std::vector<char> out(x.size());
  rms_norm(pool, k, type, x.data(), weight.data(), rows, width, 1e-6f, out.data());
  std::vector<float> y(rows * top_k * width), weights(rows * top_k);
  for (float& v : y) v = normal();
  for (float& v : weights) v = normal();
  std::vector<char> sums(x.size());
  combine(pool, k, type, x.data(), y.data(), weights.data(), rows, top_k, width, sums.data());
  for (int64_t i = 0; i < rows * width; i++) {
    const int64_t t = i / width, c = i % width;
    double squares = 0, sum = value(type, x.data(), i);
    for (int64_t j = 0; j < width; j++) squares += std::pow(value(type, x.data(), t * width + j), 2);
    const double normed = value(type, x.data(), i) / std::sqrt(squares / width + 1e-6);
    near(type, value(type, out.data(), i), normed * value(type, weight.data(), c), "rms_norm");
    for (int64_t j = 0; j < top_k; j++) sum += y[(t * top_k + j) * width + c] * weights[t * top_k + j];
    near(type, value(type, sums.data(), i), sum, "combine");
  }
}

void check_route() {
  Threads pool;
  Rule rule = {};
  rule.scoring = static_cast<Scoring>(pick(0, 2)), rule.scale = 1;
  const bool mixer = rule.scoring == Scoring::Sparsemixer;
  rule.groups = mixer ? 1 : pick(1, 4), rule.top_groups = pick(1, rule.groups);
  const int64_t size = pick(2, 9), experts = rule.groups * size, tokens = pick(0, 40);
  rule.group_best = pick(1, 2), rule.top_k = mixer ? 2 : pick(1, rule.top_groups * size);
  rule.normalize = !mixer, rule.jitter = mixer ? 0.1f : 0;
  std::vector<float> logits(tokens * experts), correction(experts), weights(tokens * rule.top_k);
  for (float& v : logits) v = normal();
  for (float& v : correction) v = normal();
  if (!logits.empty() && pick(0, 1)) logits[0] = NAN;
  std::unique_ptr<bool[]> valid(new bool[tokens]);
  for (int64_t t = 0; t < tokens; t++) valid[t] = pick(0, 3);
  std::vector<int32_t> ids(tokens * rule.top_k);
  const float* added = mixer || pick(0, 1) ? nullptr : correction.data();
  route(pool, rule, logits.data(), valid.get(), added, tokens, experts, ids.data(), weights.data());
  for (int64_t t = 0; t < tokens; t++) {
    double total = 0;
    for (int64_t j = 0; j < rule.top_k; j++) {
      const int32_t id = ids[t * rule.top_k + j];
      expect(valid[t] ? id >= 0 && id < experts : id == experts, "route: an expert");
      expect(!valid[t] || !j || id > ids[t * rule.top_k + j - 1], "route: not ascending");
      total += weights[t * rule.top_k + j];
    }
    if (valid[t] && !mixer && !std::isnan(total)) near(Type::F32, total, 1, "route");
  }
}

void check_writes(const Kernels& k) {
  Threads pool;
  Pages p = {};
  Heads h = {};
  p.type = any_type(), p.tokens = pick(1, 20), p.half = pick(1, 20), p.head_dim = 2 * p.half;
  p.block_size = 16, h.kv_heads = pick(1, 3), h.heads = h.kv_heads * pick(1, 3);
  p.rows_per_token = 2 * h.kv_heads, p.layer = pick(0, 1), p.factor = 1, p.eps = 1e-6f;
  const int64_t page = 2 * p.block_size * p.rows_per_token;
  p.kv_rows = p.tokens * page;
  std::vector<uint16_t> arena(p.kv_rows * p.head_dim * size_of(p.type) / 2, 0x7fff);
  std::vector<int32_t> positions(p.tokens), pages(p.tokens);
  for (int64_t t = 0; t < p.tokens; t++) {
    pages[t] = (int32_t)(pick(0, 3) ? t * page : -1), positions[t] = (int32_t)pick(0, 999);
  }
  std::vector<float> frequencies(p.half, 0.5f);
  const int64_t all = h.heads + 2 * h.kv_heads;
  const auto qkv = draw(k, p.type, p.tokens * all * p.head_dim);
  const auto norm = draw(k, p.type, p.head_dim);
  std::vector<char> q(p.tokens * h.heads * p.head_dim * size_of(p.type));
  p.arena = arena.data(), p.positions = positions.data(), p.pages = pages.data();
  p.frequencies = frequencies.data(), h.qkv = qkv.data(), h.q = q.data();
  if (pick(0, 1)) h.q_norm = h.k_norm = norm.data();
  kv_write(pool, k, p, h);
  const int64_t bytes = p.head_dim * size_of(p.type);
  for (int64_t t = 0; t < p.tokens; t++) {
    if (p.row(t) >= 0) {
      const char* row = at(static_cast<void*>(p.arena), p.row(t) * p.head_dim, p.type);
      const char* values = qkv.data() + (t * all + h.heads + h.kv_heads) * bytes;
      for (int64_t head = 0; head < h.kv_heads; head++) {
        const char* const value = row + (h.kv_heads + head) * p.block_size * bytes;
        expect(!std::memcmp(value, values + head * bytes, bytes), "kv_write: values");
      }
    }
  }
  pages[0] = (int32_t)p.kv_rows;
  expect(refused([&] { kv_write(pool, k, p, h); }), "a page behind the arena");

  // Latent rows in the same arena: one of head_dim a token, of which `latent` are normed.
  if (p.half < 2) return;
  Latent l = {};
  l.latent = 2 * pick(1, p.half - 1), l.heads = pick(1, 4), l.interleave = pick(0, 1);
  p.half -= l.latent / 2, p.rows_per_token = 1, pages[0] = 0;
  const auto q_rope = draw(k, p.type, p.tokens * l.heads * 2 * p.half);
  std::vector<char> out(q_rope.size());
  l.kv = qkv.data(), l.norm = norm.data(), l.q_rope = q_rope.data(), l.out = out.data();
  latent_write(pool, k, p, l);
}

void check_plan() {
  Plan p = {};
  p.layers = 2, p.cells = pick(0, 12), p.experts = pick(1, 12), p.layer = pick(0, 1);
  const auto ints = [](int64_t n, int64_t low, int64_t high) {
    std::vector<int32_t> values(n);
    for (auto& v : values) v = (int32_t)pick(low, high);
    return values;
  };
  const int64_t cells = 2 * p.cells, experts = 2 * p.experts;
  auto cell_row = ints(cells, -1, 0), cell_version = ints(cells, 0, 1), last_used = ints(cells, 0, 9);
  std::vector<int32_t> owner(cells, -1), address(experts, -1);
  for (int64_t i = 0; i < cells; i++) {
    if (cell_row[i] < 0) continue;
    cell_row[i] = (int32_t)i;
    const int64_t e = pick(0, p.experts - 1) + i / p.cells * p.experts;
    if (address[e] < 0 && pick(0, 1)) owner[i] = (int32_t)(e % p.experts), address[e] = (int32_t)i;
  }
  auto version = ints(experts, 0, 1), frequency = ints(experts, 0, 99), prior = ints(experts, -9, 9);
  auto fill_version = ints(experts, -2, 1), clock = ints(2, 9, 99), weights = ints(3, -3, 3);
  std::vector<std::vector<int32_t>> lists(4, std::vector<int32_t>(p.experts));
  int32_t counts[4];
  std::unique_ptr<bool[]> due(new bool[p.experts]);
  int64_t active = 0;
  for (int64_t e = 0; e < p.experts; e++) active += due[e] = pick(0, 1);
  p.cell_row = cell_row.data(), p.cell_version = cell_version.data(), p.owner = owner.data();
  p.last_used = last_used.data(), p.address = address.data(), p.version = version.data();
  p.frequency = frequency.data(), p.fill_version = fill_version.data(), p.prior = prior.data();
  p.clock = clock.data(), p.weights = weights.data(), p.due = due.get();
  p.active = lists[0].data(), p.fill_expert = lists[1].data(), p.fill_row = lists[2].data();
  p.fill_list_version = lists[3].data(), p.active_count = counts, p.fill_count = counts + 1;
  p.hits = counts + 2, p.read_through = counts + 3;
  plan(p);
  expect(counts[0] == active && active == counts[1] + counts[2] + counts[3], "plan: counts");
  for (int64_t i = 0; i < cells; i++) {
    const int64_t at = owner[i] + (p.cells ? i / p.cells : 0) * p.experts;
    expect(owner[i] < 0 || address[at] == cell_row[i], "plan: an owner whose address is elsewhere");
  }
  p.layer = 2;
  expect(refused([&] { plan(p); }), "a layer that is not there");
}

// ---- expert_ffn

int64_t up_to(int64_t n, int64_t parts) { return (n + parts - 1) / parts; }

bool scaled(Codes kind) { return kind != Codes::Dense && kind != Codes::Lossless12; }

int bits_of(Codes kind) {
  if (kind == Codes::Int8 || kind == Codes::E4M3 || kind == Codes::Zero8) return 8;
  return kind == Codes::Int2 ? 2 : 4;
}
int highs_of(Codes kind) {
  return kind == Codes::Int6 ? 2 : kind == Codes::Int5 || kind == Codes::Min5 ? 1 : 0;
}
bool has_zeros(Codes kind) { return kind == Codes::Zero8 || kind == Codes::Zero4; }
bool has_minimums(Codes kind) { return kind == Codes::Min4 || kind == Codes::Min5; }
constexpr int kKinds = 14;

// The numbers of pallas_kernels/records/format.py.
// others: up and down may be of another kind.
Format format(Codes kind, int64_t hidden, int64_t width, Type type, bool others = false) {
  Format f = {};
  f.hidden = hidden, f.width = width, f.type = type, f.blocks = up_to(width, 32);
  const auto group = [](int64_t n) { return n % 128 == 0 ? 128 : n % 64 == 0 ? 64 : 32; };
  const bool foreign = scaled(kind) && pick(0, 1);  // as checkpoints have it
  others &= kind != Codes::Lossless12 && pick(0, 1);
  for (Coding& c : f.matrix) {
    do c.kind = others ? static_cast<Codes>(pick(0, kKinds - 1)) : kind;
    while (others && c.kind == Codes::Lossless12);
    c.group = group(&c == f.matrix + DOWN ? width : hidden), c.across = 1;
    if (!foreign) continue;
    c.group = 16 * pick(1, 9), c.across = pick(0, 1) ? 1 : pick(2, 40);
    // With zeros, scales have no other number beside them (records/encoding.py).
    c.scale = static_cast<ScaleType>(pick(0, has_zeros(c.kind) ? 3 : 6)), c.product = static_cast<Rounding>(pick(0, 2));
    if (c.scale == ScaleType::U8 || c.scale == ScaleType::I8) c.super = pick(1, 9), c.across = 1;
    if (c.scale == ScaleType::E4M3) c.whole = static_cast<Whole>(pick(0, 2));
  }
  for (Coding& c : f.matrix) {
    // A product to which a minimum is added is exact.
    const bool exact = c.scale == ScaleType::F16 || c.super;
    if (has_minimums(c.kind) && !exact) c.scale = ScaleType::F16, c.whole = Whole::None;
  }
  int64_t entries = 32;
  while (entries < 256 && entries < 32 * hidden / 256) entries *= 2;
  f.escapes = entries - 1;
  int64_t next = 0;
  const auto part = [&](int64_t rows) {
    next += rows;
    return next - rows;
  };
  for (Coding& c : f.matrix) {
    const int64_t planes = 16 / (scaled(c.kind) ? bits_of(c.kind) : 8);
    c.codes = part(c.kind == Codes::Dense ? width * size_of(type) / 2 : up_to(width, planes));
  }
  for (Coding& c : f.matrix) {
    const int64_t size = c.scale == ScaleType::F32 ? 4 : c.scale < ScaleType::E8M0 ? 2 : 1;
    const bool down = &c == f.matrix + DOWN;
    const int64_t along = down ? width : hidden, other = down ? hidden : width;
    const int64_t scales = up_to(along, c.group) * up_to(other, c.across);
    if (c.kind == Codes::Lossless12) c.extra = part(up_to(width, 4));
    if (!scaled(c.kind)) continue;
    c.extra = part(up_to(scales * size, 2 * hidden));
    if (highs_of(c.kind)) c.highs = part(up_to(width * highs_of(c.kind), 16));
    if (has_zeros(c.kind)) c.shifts = part(up_to(scales, 2 * hidden));
    if (has_minimums(c.kind)) c.shifts = part(up_to(scales * size, 2 * hidden));
    const int64_t supers = c.super ? up_to(up_to(along, c.group), c.super) * other : 0;
    if (supers) c.supers = part(up_to(supers, hidden)), c.min_supers = part(up_to(supers, hidden));
    if (c.whole != Whole::None) c.global = part(up_to(2, hidden));
  }
  if (kind == Codes::Lossless12) f.tables = part(up_to(3 * f.blocks * (1 + f.escapes), hidden));
  f.rows = next + next % 2;
  return f;
}

std::vector<uint16_t> record_of(const Kernels& k, const Format& f) {
  std::vector<uint16_t> record(f.rows * f.hidden);
  for (auto& element : record) element = (uint16_t)pick(0, 0xffff);
  if (f.matrix[GATE].kind == Codes::Lossless12) {
    for (int64_t b = 0; b < 3 * f.blocks; b++) {
      uint16_t* table = &record[f.tables * f.hidden + b * (1 + f.escapes)];
      for (int64_t i = 0; i <= f.escapes; i++) table[i] = (uint16_t)(i ? 0x3c00 + i : 124);
    }
    return record;
  }
  for (int m : {GATE, UP, DOWN}) {
    const Coding& c = f.matrix[m];
    if (c.kind == Codes::Dense) {
      const auto weights = draw(k, f.type, f.width * f.hidden, 0.1f);
      std::memcpy(&record[c.codes * f.hidden], weights.data(), weights.size());
      continue;
    }
    std::vector<int64_t> edges = {f.rows};
    for (const Coding& d : f.matrix) {
      for (int64_t edge : {d.codes, d.extra, d.highs, d.shifts, d.supers, d.min_supers, d.global}) {
        edges.push_back(edge);
      }
    }
    const auto fill = [&](int64_t row, const auto& drawn) {
      int64_t end = f.rows;
      for (int64_t edge : edges) if (edge > row) end = std::min(end, edge);
      for (int64_t i = row * f.hidden; i < end * f.hidden; i++) record[i] = drawn(i - row * f.hidden);
    };
    const auto bytes = [](auto one) { return (uint16_t)(one() << 8 | one()); };
    const auto scale = [&](int64_t i) -> uint16_t {
      // 2^-13 to 2^-12; in pairs of float32, and in bytes, about so, but for those below supers.
      if (c.scale == ScaleType::BF16 || (c.scale == ScaleType::F32 && i % 2)) return (uint16_t)(0x3900 + pick(0, 127));
      if (c.scale == ScaleType::E8M0) return bytes([] { return 0x73 - pick(0, 1); });
      if (c.scale == ScaleType::E4M3) return bytes([] { return pick(1, 0x20); });
      if (c.scale == ScaleType::U8) return bytes([] { return pick(0, 63); });
      if (c.scale == ScaleType::I8) return bytes([] { return pick(0, 255); });
      return (uint16_t)(0x0800 + pick(0, 1023));
    };
    fill(c.extra, scale);
    if (has_minimums(c.kind)) fill(c.shifts, scale);
    if (has_zeros(c.kind)) fill(c.shifts, [&](int64_t) { return bytes([&] { return pick(0, (1 << bits_of(c.kind)) - 1); }); });
    for (int64_t row : {c.supers, c.min_supers}) {
      if (c.super) fill(row, [](int64_t) { return (uint16_t)(0x0200 + pick(0, 1023)); });
    }
    const float one = c.whole == Whole::Times ? 0.011f : 90.0f;
    if (c.whole != Whole::None) std::memcpy(&record[c.global * f.hidden], &one, sizeof one);
  }
  return record;
}

double weight(const Kernels& k, const Format& f, const uint16_t* r, int matrix, int64_t i,
              int64_t c) {
  const Coding& m = f.matrix[matrix];
  if (m.kind == Codes::Dense) {
    return value(f.type, (const char*)(r + m.codes * f.hidden), i * f.hidden + c);
  }
  const auto code = [&](int64_t first, int bits) {
    const int64_t planes = 16 / bits;
    const int64_t size = matrix == DOWN ? up_to(f.width, planes) : f.hidden / planes;
    const int64_t along = matrix == DOWN ? i : c;
    const int64_t row = first * f.hidden;
    const int64_t place =
        matrix == DOWN ? along % size * f.hidden + c : i * size + along % size;
    return (r[row + place] >> (bits * (along / size))) & ((1 << bits) - 1);
  };
  if (m.kind == Codes::Lossless12) {
    const uint16_t* table = r + f.tables * f.hidden + (matrix * f.blocks + i / 32) * (1 + f.escapes);
    const int byte = code(m.codes, 8), exponent = code(m.extra, 4);
    uint32_t bits = ((byte & 0x80) << 8) | (byte & 0x7f) | ((table[0] - exponent) << 7);
    if (exponent == 15) bits = table[1 + std::min<int64_t>(byte, f.escapes - 1)];
    return bits_to_float(bits << 16);
  }
  const int bits = bits_of(m.kind), highs = highs_of(m.kind);
  int n = code(m.codes, bits);
  if (highs) n += code(m.highs, highs) << bits;
  double number = n - (bits == 2 ? 1.5 : 1 << (bits + highs - 1));
  constexpr int levels[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  if (m.kind == Codes::IQ4) number = levels[n];
  if (m.kind == Codes::E4M3 || m.kind == Codes::E2M1) {
    const int fractions = bits == 8 ? 3 : 1, exponent = (n & ((1 << (bits - 1)) - 1)) >> fractions;
    const double fraction = (n & ((1 << fractions) - 1)) / (double)(1 << fractions);
    number = std::ldexp(exponent ? 1 + fraction : fraction, std::max(exponent, 1) - (bits == 8 ? 7 : 1));
    if (n >> (bits - 1)) number = -number;
  }
  const int64_t reduced = matrix == DOWN ? i : c, other = matrix == DOWN ? c : i;
  const int64_t place = matrix == DOWN
                            ? i / m.group * up_to(f.hidden, m.across) + other / m.across
                            : other / m.across * up_to(f.hidden, m.group) + reduced / m.group;
  const auto float8 = [](int b) {
    const double small = std::ldexp((b & 7) + (b & 0x78 ? 8 : 0), std::max((b >> 3) & 15, 1) - 10);
    return b >> 7 ? -small : small;
  };
  const auto group = [&](int64_t part) -> double {
    const char* numbers = (const char*)(r + part * f.hidden);
    const int byte = (uint8_t)numbers[place];
    if (m.scale == ScaleType::E8M0) return std::ldexp(1, byte - 127);
    if (m.scale == ScaleType::E4M3) return float8(byte);
    if (m.scale == ScaleType::U8) return byte;
    if (m.scale == ScaleType::I8) return (int8_t)byte;
    return value(m.scale == ScaleType::F16 ? Type::F16 : m.scale == ScaleType::BF16 ? Type::BF16 : Type::F32, numbers, place);
  };
  const auto super = [&](int64_t part) {
    const int64_t first = reduced / m.group / m.super, groups = up_to(matrix == DOWN ? f.width : f.hidden, m.group);
    return value(Type::F16, (const char*)(r + part * f.hidden),
                 matrix == DOWN ? first * f.hidden + other : other * up_to(groups, m.super) + first);
  };
  double scale = group(m.extra), added = 0;
  if (m.super) scale *= super(m.supers);
  if (m.whole != Whole::None) {
    float one;
    std::memcpy(&one, r + m.global * f.hidden, sizeof one);
    scale = m.whole == Whole::Times ? (float)scale * one : (float)scale / one;
  }
  if (has_zeros(m.kind)) number = n - ((const uint8_t*)(r + m.shifts * f.hidden))[place];
  if (has_minimums(m.kind)) number = n, added = group(m.shifts) * (m.super ? -super(m.min_supers) : 1);
  std::vector<float> once = {(float)((float)(number * scale) + (float)added)};
  const auto round = [&](Type type) { once[0] = (float)value(type, rounded(k, type, once).data(), 0); };
  if (m.product != Rounding::Whole) round(m.product == Rounding::F16 ? Type::F16 : Type::BF16);
  round(f.type);
  return once[0];
}

void check_experts(const Kernels& k) {
  Threads pool;
  const Type type = any_type();
  const int64_t experts = pick(1, 5), layers = 2, tokens = pick(1, 20), top_k = pick(1, experts);
  // Whole parts of 512 weights, which are multiplied as they are decoded, or any.
  const int64_t hidden = pick(0, 2) ? 16 * pick(1, 20) : 512 * pick(1, 2);
  const int64_t even = pick(0, 1) ? 4 * pick(1, 30) : 64;
  const int64_t width = pick(0, 1) ? even : pick(1, 90);
  std::vector<StoredVersion> versions(pick(1, 2));
  std::vector<std::vector<uint16_t>> stores, records;
  for (auto& v : versions) {
    do v.cell = v.held = format(static_cast<Codes>(pick(0, kKinds - 1)), hidden, width, type, true);
    while (type != Type::BF16 && v.cell.matrix[GATE].kind == Codes::Lossless12);
    v.layers = layers, v.experts = experts;
    stores.emplace_back(layers * experts * v.held.rows * hidden, 0xffff);
    v.store = stores.back().data();
  }
  std::vector<uint16_t> arena;
  std::vector<int32_t> address(layers * experts, -1), version(layers * experts, 0), active;
  const int64_t layer = pick(0, layers - 1);
  for (int64_t e = 0; e < experts; e++) {
    const int64_t number = pick(0, (int64_t)versions.size() - 1), at = layer * experts + e;
    const Format& f = versions[number].cell;
    records.push_back(record_of(k, f));
    version[at] = (int32_t)number;
    if (pick(0, 1)) {
      address[at] = (int32_t)(arena.size() / hidden);
      arena.insert(arena.end(), records.back().begin(), records.back().end());
    } else {
      std::copy(records.back().begin(), records.back().end(),
                stores[number].begin() + at * f.rows * hidden);
    }
    if (pick(0, 4)) active.push_back((int32_t)e);
  }
  std::vector<int32_t> ids(tokens * top_k);
  for (auto& id : ids) id = (int32_t)pick(0, experts);
  const auto x = draw(k, type, tokens * hidden);
  std::vector<float> y(tokens * top_k * hidden, 55);
  arena.shrink_to_fit();
  Experts c = {type, tokens, top_k, width, layers, experts, SILU, x.data(), ids.data(),
               {arena.data(), (int64_t)arena.size() / hidden, hidden, versions, nullptr}, layer,
               address.data(), version.data(), active.data(), (int64_t)active.size(), y.data(), 0};
  run_experts(pool, k, c);
  for (int64_t pair = 0; pair < tokens * top_k; pair++) {
    const int32_t e = ids[pair];
    const float* got = &y[pair * hidden];
    if (std::find(active.begin(), active.end(), e) == active.end()) {
      for (int64_t i = 0; i < hidden; i++) expect(got[i] == 55, "a row of no active expert");
      continue;
    }
    const Format& f = versions[version[layer * experts + e]].cell;
    const uint16_t* r = records[e].data();
    std::vector<double> want(hidden), squares(hidden);
    for (int64_t i = 0; i < width; i++) {
      double gate = 0, up = 0;
      for (int64_t d = 0; d < hidden; d++) {
        const double v = value(type, x.data(), pair / top_k * hidden + d);
        gate += v * weight(k, f, r, GATE, i, d), up += v * weight(k, f, r, UP, i, d);
      }
      const std::vector<float> h = {(float)(gate / (1 + std::exp(-gate)) * up)};
      const double exact = value(type, rounded(k, type, h).data(), 0);
      for (int64_t d = 0; d < hidden; d++) {
        const double term = exact * weight(k, f, r, DOWN, i, d);
        want[d] += term, squares[d] += term * term;
      }
    }
    const std::string what = std::string("expert_ffn by ") + k.name + ", type " +
                             std::to_string((int)type) + ", version " +
                             std::to_string((int)f.matrix[GATE].kind) + ", " + std::to_string(hidden) + " x " +
                             std::to_string(width);
    for (int64_t d = 0; d < hidden; d++) {
      near(type, got[d], want[d], what, std::sqrt(squares[d]));
    }
  }
  // What would read elsewhere is refused.
  std::vector<int32_t> wrong = address;
  for (auto& a : wrong) a = (int32_t)(arena.size() / hidden);
  c.address = wrong.data();
  const auto run = [&] { run_experts(pool, k, c); };
  if (!active.empty()) expect(refused(run), "an address behind the arena");
  ids[0] = (int32_t)experts + 1;
  expect(refused(run), "an expert that is not there");
}

// Sums of many tokens have the bits of sums of few, also where terms are too small for a normal number.
void check_sums(const Kernels& k) {
  const Type type = pick(0, 3) ? Type::BF16 : Type::F32;
  if (!k.few(type)) return;
  const int64_t n = pick(1, 300), width = padded(n), tokens = k.few(type) + pick(1, 20);
  std::vector<float> few(tokens * width), many((tokens + kTokenGroup) * width);
  bool coarse = true;
  for (int64_t block = pick(1, 4); block > 0; block--) {
    const int64_t rows = block > 1 ? kManyAdded : pick(1, kManyAdded);
    // Terms of about 1, the smallest for which pairs are multiplied, or smaller ones.
    const int size = pick(0, 2), small = size == 0 ? 0 : size == 1 ? 112 : (int)pick(113, 150);
    const int of_h = size == 1 ? 56 : (int)pick(0, small);
    const auto drawn = [&](int64_t count, int exponent) {
      std::vector<float> values(count);
      for (float& v : values) v = std::ldexp((float)pick(128, 255) * (float)pick(-1, 1), -7 - exponent);
      return rounded(k, type, values);
    };
    const auto w = drawn(rows * n, small - of_h), factor = drawn(tokens * rows, of_h);
    std::vector<float> h(tokens * rows);
    for (size_t i = 0; i < h.size(); i++) h[i] = (float)value(type, factor.data(), (int64_t)i);
    std::vector<const void*> row(rows);
    for (int64_t i = 0; i < rows; i++) row[i] = at((const void*)w.data(), i * n, type);
    std::vector<float*> onto(tokens);
    std::vector<const float*> factors(tokens);
    for (int64_t t = 0; t < tokens; t++) onto[t] = &many[t * width], factors[t] = &h[t * rows];
    k.add_of_many(type, row.data(), rows, factors.data(), tokens, n, onto.data(), &coarse);
    for (int64_t t = 0; t < tokens; t++) {
      float* mine = &few[t * width];
      for (int64_t i = 0; i < rows; i += kRows) {
        const float* next = factors[t] + i;
        k.add(type, &row[i], std::min(kRows, rows - i), &next, 1, n, &mine);
      }
    }
  }
  for (int64_t t = 0; t < tokens; t++) {
    std::vector<float> want(n), got(n);
    k.unpack(type, &few[t * width], n, want.data());
    k.unpack(type, &many[t * width], n, got.data());
    expect(!std::memcmp(got.data(), want.data(), n * 4), std::string("add_of_many by ") + k.name + ": other bits");
  }
}

// Any part of a row of any format has exactly the weights that its text says.
void check_decode(const Kernels& k) {
  const Type type = any_type();
  const int64_t hidden = 16 * pick(1, 45), width = pick(1, 200);
  Format f;
  do f = format(static_cast<Codes>(pick(1, kKinds - 1)), hidden, width, type);
  while (type != Type::BF16 && f.matrix[GATE].kind == Codes::Lossless12);
  const auto record = record_of(k, f);
  const Type kind = kind_of(type);
  for (int matrix : {GATE, UP, DOWN}) {
    const int64_t first = pick(0, hidden - 1), count = pick(1, hidden - first), row = pick(0, width - 1);
    std::vector<float> scales(up_to(width, f.matrix[DOWN].group) * 2 * padded(count));
    std::vector<char> out(count * size_of(kind));
    k.down_scales(f, record.data(), first, count, scales.data());
    k.decode(f, record.data(), matrix, row, first, count, scales.data(), out.data());
    for (int64_t i = 0; i < count; i++) {
      const double want = weight(k, f, record.data(), matrix, row, first + i);
      const Coding& c = f.matrix[matrix];
      expect(value(kind, out.data(), i) == want,
             std::string("decode by ") + k.name + ": another weight, version " + std::to_string((int)c.kind) +
                 ", scales " + std::to_string((int)c.scale) + ", product " + std::to_string((int)c.product) +
                 ", type " + std::to_string((int)type) + ": " + std::to_string(value(kind, out.data(), i)) + ", not " + std::to_string(want));
    }
  }
}

// A token alone, whose experts' rows are multiplied as they are decoded, has the bits that it has
// among 20, for which rows are decoded first.
void check_encoded(const Kernels& k) {
  Threads pool;
  const int64_t hidden = 512 * pick(1, 5), width = 64 * pick(1, 3), tokens = 20;
  StoredVersion v = {};
  v.cell = format(static_cast<Codes>(pick(1, kKinds - 1)), hidden, width, Type::BF16);
  const bool integers = pick(0, 1);
  for (Coding& c : v.cell.matrix) {
    const bool whole = integers && scaled(c.kind) && c.kind != Codes::E4M3;
    c.unit = !whole ? 0 : c.group % 32 ? 16 : 32;
  }
  v.held = v.cell;
  v.layers = v.experts = 1;
  const auto record = record_of(k, v.cell);
  v.store = record.data();
  const int32_t address = -1, version = 0, active = 0;
  const std::vector<int32_t> ids(tokens, 0);
  const auto x = draw(k, Type::BF16, tokens * hidden);
  const auto run = [&](int64_t first, int64_t count) {
    std::vector<float> y(count * hidden);
    run_experts(pool, k, {Type::BF16, count, 1, width, 1, 1, SILU, x.data() + 2 * first * hidden,
                          ids.data(), {nullptr, 0, hidden, {v}, nullptr}, 0, &address, &version,
                          &active, 1, y.data(), 0});
    return y;
  };
  const auto all = run(0, tokens);
  for (int64_t t = 0, count; t < tokens; t += count) {
    count = std::min(pick(1, 17), tokens - t);
    const auto mine = run(t, count);
    expect(!std::memcmp(mine.data(), &all[t * hidden], mine.size() * 4),
           std::string("expert_ffn by ") + k.name + ": other bits for " + std::to_string(count) + " tokens of codes " +
               std::to_string((int)v.cell.matrix[0].kind) + (integers ? ", integers" : ""));
  }
}

// ---- products with weights in codes

// Rows in codes have the bits of the same rows decoded.
void check_coded(const Kernels& k) {
  Threads pool;
  const Type type = pick(0, 1) ? Type::BF16 : Type::F32, out = any_type();
  const int64_t tokens = pick(0, 40), inputs = pick(0, 1) ? 16 * pick(1, 30) : 512 * pick(1, 2);
  std::vector<std::vector<uint16_t>> records;
  std::vector<CodedRows> parts;
  int64_t outputs = 0;
  for (int64_t left = pick(1, 3); left; left--) {
    Format f;
    do f = format(static_cast<Codes>(pick(0, kKinds - 1)), inputs, pick(1, 90), type);
    while (type != Type::BF16 && f.matrix[UP].kind == Codes::Lossless12);
    records.push_back(record_of(k, f));
    parts.push_back({f, records.back().data()});
    outputs += f.width;
  }
  std::vector<char> w(outputs * inputs * size_of(type));
  char* row = w.data();
  for (const CodedRows& part : parts) {
    for (int64_t r = 0; r < part.format.width; r++, row += inputs * size_of(type)) {
      if (const void* dense = row_of(part.format, part.record, UP, r)) {
        std::memcpy(row, dense, inputs * size_of(type));
      } else {
        k.decode(part.format, part.record, UP, r, 0, inputs, nullptr, row);
      }
    }
  }
  const auto x = draw(k, type, tokens * inputs), bias = draw(k, type, outputs);
  std::vector<char> y(tokens * outputs * size_of(out)), of_codes(y.size());
  Product p = {type,    out,      tokens,   inputs,      outputs, inputs,
               outputs, x.data(), w.data(), bias.data(), y.data()};
  multiply(pool, k, {p});
  p.w = nullptr, p.y = of_codes.data();
  multiply_codes(pool, k, p, parts);
  expect(y == of_codes, "linear: weights in codes have other bits");
}

// ---- paged_attention

void check_attention(const Kernels& k) {
  Threads pool;
  Attention c = {};
  c.type = any_type();
  c.kv_heads = pick(1, 3), c.heads = c.kv_heads * pick(1, 9);
  c.head_dim = pick(0, 1) ? pick(1, 70) : 32 * pick(1, 2);  // whole vectors are read where they lie
  if (c.kv_heads == 1 && pick(0, 1)) c.latent = pick(1, c.head_dim);
  c.block_size = 16 << pick(0, 2), c.window = pick(0, 1) ? pick(1, 90) : 0, c.scale = 0.3f;
  c.blocks = pick(1, 192 / c.block_size), c.sequences = 1, c.split = pick(0, 2);
  const int64_t value_dim = c.latent ? c.latent : c.head_dim;
  const int64_t to_value = c.latent ? 0 : c.kv_heads * c.block_size;  // rows from a key
  const int64_t per_layer = c.latent ? c.block_size : 2 * to_value;
  const int64_t length = pick(1, c.blocks * c.block_size), count = pick(1, std::min<int64_t>(length, 70));
  c.layer = pick(0, 1);
  c.kv_rows = 2 * c.blocks * per_layer;
  std::vector<int32_t> table(c.blocks);
  for (int64_t b = 0; b < c.blocks; b++) table[b] = (int32_t)(2 * (c.blocks - 1 - b) * per_layer);
  const auto arena = draw(k, c.type, c.kv_rows * c.head_dim);
  std::vector<uint16_t> memory(arena.size() / 2);
  std::memcpy(memory.data(), arena.data(), arena.size());
  const auto q = draw(k, c.type, count * c.heads * c.head_dim);
  std::vector<char> out(count * c.heads * value_dim * size_of(c.type));
  c.arena = memory.data(), c.q = q.data(), c.out = out.data(), c.block_table = table.data();
  const auto run = [&] { attend(pool, k, c, {{0, count, 0, length - count}}); };
  run();
  for (int64_t t = 0; t < count; t++) {
    const int64_t position = length - count + t;
    const int64_t from = c.window ? std::max<int64_t>(position - c.window + 1, 0) : 0;
    for (int64_t head = 0; head < c.heads; head++) {
      const auto row = [&](int64_t i) {
        return table[i / c.block_size] + c.layer * per_layer + i % c.block_size +
               head / (c.heads / c.kv_heads) * c.block_size;
      };
      double mass = 0, top = -1e30;
      std::vector<double> scores, want(value_dim);
      for (int64_t i = from; i <= position; i++) {
        double score = 0;
        for (int64_t d = 0; d < c.head_dim; d++) {
          score += value(c.type, q.data(), (t * c.heads + head) * c.head_dim + d) *
                   value(c.type, arena.data(), row(i) * c.head_dim + d);
        }
        scores.push_back(score * 0.3f);
        top = std::max(top, scores.back());
      }
      for (int64_t i = from; i <= position; i++) {
        const double p = std::exp(scores[i - from] - top);
        mass += p;
        for (int64_t d = 0; d < value_dim; d++) {
          want[d] += p * value(c.type, arena.data(), (row(i) + to_value) * c.head_dim + d);
        }
      }
      for (int64_t d = 0; d < value_dim; d++) {
        const double got = value(c.type, out.data(), (t * c.heads + head) * value_dim + d);
        near(c.type, got, want[d] / mass, "paged_attention");
      }
    }
  }
  const std::vector<char> all = out;
  const int64_t size = c.heads * value_dim * size_of(c.type);
  std::fill(out.begin(), out.end(), 0);
  attend(pool, k, c, {{count - 1, 1, 0, length - 1}});
  expect(std::equal(all.end() - size, all.end(), out.end() - size), "paged_attention: a lone query has other bits");
  table[0] = (int32_t)(c.kv_rows - per_layer * c.layer);
  if (!c.window) expect(refused(run), "an address");
}

// ---- sample

void check_sample(const Kernels& k) {
  Threads pool;
  const int64_t rows = pick(0, 4), n = pick(1, 3000), most = pick(0, std::min<int64_t>(n, 20));
  std::vector<float> logits(rows * n), temperature(rows), top_p(rows);
  std::vector<int32_t> top_k(rows), tokens(rows), ids(rows * kCandidates, -7);
  std::vector<uint32_t> far(rows), keys(2 * rows), bits(rows * kCandidates);
  std::vector<float> scaled(rows * kCandidates), chosen(rows), top(rows * most);
  std::vector<int32_t> ranks(rows, -7), top_ids(rows * most);
  const auto wanted = std::make_unique<bool[]>(rows);
  for (float& v : logits) v = pick(0, 9) ? 3 * normal() : 1.5f;  // some are equal
  for (int64_t r = 0; r < rows; r++) {
    wanted[r] = pick(0, 4), temperature[r] = pick(0, 2) ? 0.1f * pick(1, 20) : 0;
    top_p[r] = pick(0, 1) ? 1 : 0.1f * pick(0, 9), top_k[r] = pick(0, 1) ? 0 : (int32_t)pick(1, n + 2);
    far[r] = pick(0, 1) ? 0x7f800000 : 0x40000000, tokens[r] = (int32_t)pick(-1, n);
    keys[2 * r] = (uint32_t)pick(0, 1 << 30), keys[2 * r + 1] = (uint32_t)pick(0, 1 << 30);
    if (!pick(0, 7)) logits[r * n + pick(0, n - 1)] = pick(0, 1) ? NAN : INFINITY;
  }
  draw(pool, k, {rows, n, logits.data(), wanted.get(), temperature.data(), top_p.data(), top_k.data(),
                 far.data(), keys.data(), ids.data(), scaled.data(), bits.data()});
  rank(pool, k, {rows, n, most, logits.data(), tokens.data(), chosen.data(), top.data(), ranks.data(),
                 top_ids.data()});
  for (int64_t r = 0; r < rows; r++) {
    const float* x = &logits[r * n];
    const bool finite = std::all_of(x, x + n, [](float v) { return std::isfinite(v); });
    const auto before = [&](int64_t i) {  // tokens likelier than i
      return std::count_if(x, x + n, [&](float v) { return v > x[i]; });
    };
    if (!wanted[r]) expect(ids[r * kCandidates] == -7, "sample: a row that nobody wants");
    for (int64_t c = 0; wanted[r] && finite && c < kCandidates; c++) {
      const int64_t i = r * kCandidates + c;
      if (std::isinf(scaled[i])) continue;
      expect(ids[i] >= 0 && ids[i] < n, "sample: a token that is not there");
      const int64_t kept = temperature[r] == 0 ? 1 : top_k[r] ? top_k[r] : n;
      expect(before(ids[i]) < kept, "sample: a token below top_k");
    }
    if (tokens[r] < 0 || tokens[r] >= n) {
      expect(ranks[r] == -7, "logprobs: a row of none");
    } else if (finite) {
      const int64_t same = std::count(x, x + tokens[r], x[tokens[r]]);
      expect(ranks[r] == 1 + before(tokens[r]) + same, "logprobs: rank");
      for (int64_t c = 0; c < most; c++) {
        expect(before(top_ids[r * most + c]) <= c, "logprobs: the likeliest");
      }
    }
  }
}

// ---- states

// One call over a sequence's tokens and two calls leave the same bits, in its pages and in their copy.
// elements: of a layer's state. run(states, out) is the op; out has row_bytes a token.
template <class Op>
void check_split(const char* name, int64_t tokens, int64_t elements, int64_t row_bytes, const Op& run) {
  StateRuns s = {};
  s.runs = 1, s.run_tokens = tokens, s.row_elements = 2 * pick(1, 40), s.page_rows = pick(1, 50);
  s.first_row = pick(0, 3), s.layer = pick(0, 1);
  s.layer_rows = s.first_row + up_to(elements, s.row_elements) + pick(0, 2);
  s.state_pages = up_to(2 * s.layer_rows, s.page_rows), s.kv_rows = 2 * s.state_pages * s.page_rows;
  std::vector<int32_t> pages(s.state_pages), copy(s.state_pages);
  for (int64_t i = 0; i < s.state_pages; i++) {
    pages[i] = (int32_t)((2 * i + 1) * s.page_rows), copy[i] = (int32_t)(2 * i * s.page_rows);
  }
  const std::vector<int32_t> none(s.state_pages, -1);
  s.pages = s.read = pages.data();
  const auto result = [&](std::vector<int32_t> ends) {
    std::vector<uint16_t> arena(s.kv_rows * s.row_elements, 0x1234);
    std::vector<char> out(tokens * row_bytes);
    int32_t start = 0, skip = 0;
    for (int32_t end : ends) {
      s.arena = arena.data(), s.start = &start, s.skip = &skip, s.length = &end;
      s.copy = end == tokens ? copy.data() : none.data();
      run(s, out.data());
      skip = end;
    }
    return std::make_pair(arena, out);
  };
  const int32_t all = (int32_t)tokens;
  const auto whole = result({all});
  expect(whole == result({(int32_t)pick(0, tokens), all}), std::string(name) + ": a split changes bits");
  for (int64_t i = 0; i < s.state_pages; i++) {
    const auto page = whole.first.begin() + pages[i] * s.row_elements;
    const auto twin = whole.first.begin() + copy[i] * s.row_elements;
    expect(std::equal(page, page + s.page_rows * s.row_elements, twin), std::string(name) + ": a copy");
  }
  pages[0] = (int32_t)s.kv_rows;
  expect(refused([&] { result({all}); }), std::string(name) + ": a page behind the arena");
}

void check_states(const Kernels& k) {
  Threads pool;
  const Type type = any_type();
  const int64_t tokens = pick(1, 70), size = size_of(type);
  {
    Delta d = {};
    d.type = type, d.key_heads = pick(1, 3), d.value_heads = d.key_heads * pick(1, 3);
    d.key_dim = pick(1, 40), d.value_dim = 2 * pick(1, 30), d.taps = pick(2, 4), d.each = pick(0, 1);
    const int64_t keys = 2 * d.key_heads * d.key_dim, values = d.value_heads * d.value_dim;
    const int64_t decays = d.value_heads * (d.each ? d.key_dim : 1);
    const auto qkv = draw(k, type, tokens * (keys + values));
    const auto beta = draw(k, type, tokens * d.value_heads), decay = draw(k, type, tokens * decays);
    std::vector<float> conv((keys + values) * d.taps, 0.4f), rates(d.value_heads), bias(decays, 0.1f);
    d.qkv = qkv.data(), d.beta = beta.data(), d.decay = decay.data();
    d.conv = conv.data(), d.a_log = rates.data(), d.dt_bias = bias.data();
    const int64_t inputs = up_to((d.taps - 1) * (keys + values) * size, 2);
    check_split("gated_delta", tokens, 2 * d.value_heads * d.key_dim * d.value_dim + inputs,
                values * size, [&](const StateRuns& states, void* out) {
                  d.states = states, d.out = out;
                  gated_delta(pool, k, d);
                });
  }
  {
    ShortConv c = {};
    c.type = type, c.width = pick(1, 600), c.taps = pick(2, 5), c.silu = pick(0, 1);
    const auto x = draw(k, type, tokens * c.width);
    std::vector<float> weights(c.width * c.taps, 0.3f), bias(c.width, 0.2f);
    c.x = x.data(), c.weights = weights.data(), c.bias = bias.data();
    check_split("short_conv", tokens, up_to((c.taps - 1) * c.width * size, 2), c.width * size,
                [&](const StateRuns& states, void* out) {
                  c.states = states, c.out = out;
                  short_conv(pool, k, c);
                });
  }
  Scan s = {};
  s.type = type, s.groups = pick(1, 2), s.heads = s.groups * pick(1, 3), s.values = pick(1, 40);
  s.keys = pick(1, 40), s.each = pick(0, 1), s.least = 0, s.most = 3;
  const auto xbc = draw(k, type, tokens * (s.heads * s.values + 2 * s.groups * s.keys));
  const auto dt = draw(k, type, tokens * s.rates());
  std::vector<float> rates(s.rates() * (s.each ? s.keys : 1), 0.2f), rest(s.rates(), 0.1f);
  s.xbc = xbc.data(), s.dt = dt.data(), s.a_log = rates.data(), s.dt_bias = s.skip = rest.data();
  check_split("selective_scan", tokens, 2 * s.heads * s.values * s.keys, s.heads * s.values * size,
              [&](const StateRuns& states, void* out) {
                s.states = states, s.out = out;
                selective_scan(pool, k, s);
              });
}

// Records into cells, and cells to other rows.
void check_copies(const Kernels& k) {
  Threads pool;
  const int64_t layers = 2, experts = pick(1, 4), rows = pick(1, 300), cells = experts + 2;
  const int64_t hidden = pick(1, 700), record = rows * hidden;
  std::vector<uint16_t> arena(cells * record, 0x7fff), store(layers * experts * record);
  for (auto& value : store) value = (uint16_t)pick(0, 0x7ffe);
  StoredVersion v = {};
  v.cell.rows = v.held.rows = rows, v.store = store.data(), v.layers = layers;
  v.experts = experts, v.places = {0, 1};
  Fills f = {{arena.data(), cells * rows, hidden, {v}, nullptr}, pick(0, layers - 1)};
  f.count = pick(0, experts);
  std::vector<int32_t> expert(f.count), row(f.count), version(f.count);
  for (int64_t i = 0; i < f.count; i++) expert[i] = (int32_t)i, row[i] = (int32_t)(i * rows);
  f.expert = expert.data(), f.row = row.data(), f.version = version.data();
  fill(pool, k, f);
  for (int64_t i = 0; i < cells; i++) {
    const uint16_t* want = store.data() + (f.layer * experts + i) * record;
    const bool same = !std::memcmp(&arena[i * record], want, i < f.count ? record * 2 : 0);
    expect(same && (i < f.count || arena[i * record] == 0x7fff), "fill: bytes");
  }
  std::vector<uint16_t> page(record);
  uint16_t* last = &arena[(cells - 1) * record];
  copy_all(pool, {{&arena[0], last, record}, {&arena[0], page.data(), record}, {&arena[0], last, 0}});
  expect(!std::memcmp(&arena[0], last, record * 2), "copies: the last cell");
  expect(!std::memcmp(&arena[0], page.data(), record * 2), "copies: a page");
  if (!f.count) return;
  row[0] = (int32_t)(cells * rows - rows + 1);
  expect(refused([&] { fill(pool, k, f); }), "a cell behind the arena");
}

// Readers of one arena beside a writer: each sees what it was told to see, or is refused.
void check_arena() {
  OwnedArena arena(100, 10);
  expect(!(reinterpret_cast<uintptr_t>(arena.data) % (2 << 20)), "an arena's address");
  std::atomic<int> wrong{0}, reads{0}, done{0};
  const auto reader = [&] {
    while (!done || !reads) {
      const uint32_t writes = arena.writes();
      if (!arena.begin_read(writes).empty()) continue;
      for (int i = 0; i < 1000; i++) wrong += arena.data[i] != (uint16_t)writes;
      reads++;
      arena.end_read();
    }
  };
  std::thread first(reader), second(reader);
  for (int written = 0; written < 50;) {
    if (!arena.begin_write(arena.writes()).empty()) continue;
    for (int i = 0; i < 1000; i++) arena.data[i]++;
    arena.end_write(), written++;
  }
  done = 1;
  first.join(), second.join();
  expect(!wrong && arena.writes() == 50, "an arena's order");
  expect(arena.begin_read(50).empty() && !arena.begin_write(50).empty(), "a write beside a read");
  arena.end_read();
  expect(arena.begin_write(50).empty() && !arena.begin_read(50).empty(), "a read beside a write");
  expect(!arena.begin_write(50).empty() && arena.end_write() == 51, "two writers");
  expect(!arena.begin_read(50).empty() && !arena.begin_write(52).empty(), "another token");
  expect(!find_arena(12345), "an arena that is not there");
}

// What a task throws reaches the caller, when no other task runs any more.
void check_errors() {
  std::atomic<int> ran{0};
  bool caught = false;
  Threads pool;
  try {
    parallel(pool, 50, 0, [&](int64_t i) {
      ran++;
      if (i % 10 == 5) throw std::runtime_error("a task");
    });
  } catch (const std::runtime_error&) {
    caught = true;
  }
  expect(caught && ran == 50, "an error in a task");
}

}  // namespace

int main(int argc, char** argv) {
  expect(argc == 3, "usage: cpu_check SEED ROUNDS");
  check_errors();
  check_arena();
  std::vector<const Kernels*> tables;
#ifdef MOEJAX_STAND_INS
  tables = {&kernels_wide};
#endif
#ifdef MOEJAX_EMULATED_TILES  // these alone; their products of integers are in another unit
  Kernels tiles = kernels_amx();
  tiles.integer_dots = kernels_avx512bf16.integer_dots;
  tiles.integer_columns = kernels_avx512bf16.integer_columns;
  if (kernels_named("avx512bf16")) tables = {&tiles};
#else
  for (const char* name : {"portable", "avx2", "avx512", "avx512bf16", "amx"}) {
    if (const Kernels* kernels = kernels_named(name)) tables.push_back(kernels);
  }
#endif
  std::string ran;
  for (const Kernels* kernels : tables) {
    rng.seed((unsigned)std::atoi(argv[1]));
    for (int i = 0; i < std::atoi(argv[2]); i++) {
      check_linear(*kernels);
      check_sums(*kernels);
      check_decode(*kernels);
      check_experts(*kernels);
      check_encoded(*kernels);
      check_coded(*kernels);
      check_sample(*kernels);
      check_states(*kernels);
      check_attention(*kernels);
      check_head_linear(*kernels);
      check_rows(*kernels);
      check_route();
      check_writes(*kernels);
      check_plan();
      check_copies(*kernels);
    }
    ran += std::string(" ") + kernels->name;
  }
  std::printf("ok%s\n", ran.c_str());
}
