#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "pallas_kernels/cpu/buffer.h"
#include "pallas_kernels/cpu/ops.h"

namespace moejax {
namespace {

constexpr int64_t kOpenRows = 64;     // (query, head) rows of a task, at most
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Shape {
  int64_t groups, value_dim, rows_per_token, rows_per_layer, size;
  Type kind;
};

Shape shape_of(const Attention& c) {
  const int64_t per_token = c.latent ? 1 : 2 * c.kv_heads;
  return {c.heads / c.kv_heads,      c.latent ? c.latent : c.head_dim, per_token,
          per_token * c.block_size, size_of(c.type),                  kind_of(c.type)};
}

// The first position that a query at `position` looks at.
int64_t first_seen(const Attention& c, int64_t position) {
  return c.window ? std::max<int64_t>(position - c.window + 1, 0) : 0;
}

void check(const Attention& c, const Shape& s, const Queries& q) {
  if (q.sequence < 0 || q.sequence >= c.sequences) {
    throw Refused("there is no sequence " + std::to_string(q.sequence));
  }
  const int64_t last = q.position + q.count - 1;
  if (q.position < 0 || last >= c.blocks * c.block_size) {
    throw Refused("position " + std::to_string(q.position < 0 ? q.position : last) + " is not in " +
                  std::to_string(c.blocks) + " blocks of " + std::to_string(c.block_size) +
                  " tokens");
  }
  for (int64_t b = first_seen(c, q.position) / c.block_size; b <= last / c.block_size; b++) {
    const int64_t page = c.block_table[q.sequence * c.blocks + b];
    if (page < 0 || c.layer < 0 || page + (c.layer + 1) * s.rows_per_layer > c.kv_rows) {
      throw Refused("block " + std::to_string(b) + " of sequence " + std::to_string(q.sequence) +
                    " has address " + std::to_string(page) + " in " + std::to_string(c.kv_rows) +
                    " rows");
    }
  }
}

// The rows that a task computes: of each of `heads` KV heads from `kv_head` on, `count`
// (query, head) pairs from `first` on. Heads of a token lie side by side, so that a span of several
// passes memory's pages once.
struct Task {
  Queries queries;
  int64_t kv_head, heads, first, count;
};

// One span for the rows of a task.
struct Span {
  const void *keys[kSpan], *values[kSpan];
  int64_t from, to;  // those that are set
  std::unique_ptr<Buffer<float>> wide;  // of float16 rows
};

void look_up(const Kernels& k, const Attention& c, const Shape& s, const Task& task, int64_t head,
             int64_t start, int64_t from, int64_t to, Span& span) {
  const bool widened = c.type == Type::F16;
  span.from = from, span.to = to;
  if (widened && !span.wide) span.wide = std::make_unique<Buffer<float>>(2 * kSpan * c.head_dim);
  for (int64_t i = from; i < to;) {
    const int64_t block = (start + i) / c.block_size, within = (start + i) % c.block_size;
    const int64_t page = c.block_table[task.queries.sequence * c.blocks + block];
    const int64_t row = page + c.layer * s.rows_per_layer + within * s.rows_per_token + head;
    const int64_t row_size = c.head_dim * s.size, step = s.rows_per_token * row_size;
    const char* key = reinterpret_cast<const char*>(c.arena) + row * row_size;
    const char* value = key + (c.latent ? 0 : c.kv_heads) * row_size;
    const int64_t stop = std::min(to, i + c.block_size - within);
    for (; i < stop; i++, key += step, value += step) {
      span.keys[i] = key, span.values[i] = value;
      if (!widened) continue;
      float *wide_key = &(*span.wide)[2 * i * c.head_dim], *wide_value = wide_key + c.head_dim;
      k.widen(c.type, key, c.head_dim, wide_key);
      k.widen(c.type, value, s.value_dim, wide_value);
      span.keys[i] = wide_key, span.values[i] = wide_value;
    }
  }
}

void compute(const Kernels& k, const Attention& c, const Shape& s, const Task& task) {
  const int64_t q_width = padded(c.head_dim), width = padded(s.value_dim);
  const int64_t n = task.heads * task.count;
  Buffer<float> q(n * q_width), total(n * width), numbers(2 * n), result(s.value_dim);
  Buffer<uint32_t> scratch(kSpan * (q_width + width));
  Buffer<int32_t> seen(2 * task.count);
  float *top = numbers.get(), *mass = top + n;
  std::fill(total.get(), total.get() + n * width, 0.0f);
  std::fill(top, top + n, kNone);
  std::fill(mass, mass + n, 0.0f);
  // (row of q, head) of a row, position of a pair.
  const auto head_of = [&](int64_t i) {
    const int64_t pair = task.first + i % task.count;
    return (task.queries.first + pair / s.groups) * c.heads +
           (task.kv_head + i / task.count) * s.groups + pair % s.groups;
  };
  const auto position_of = [&](int64_t pair) {
    return task.queries.position + (task.first + pair) / s.groups;
  };
  for (int64_t i = 0; i < n; i++) {
    const char* row = static_cast<const char*>(c.q) + head_of(i) * c.head_dim * s.size;
    k.pack(c.type, row, c.head_dim, q.get() + i * q_width);
  }
  Span spans[2];
  const int64_t earliest = first_seen(c, position_of(0)), last = position_of(task.count - 1);
  // Spans are passed one after the other, each by all heads.
  const int64_t first_span = earliest / kSpan, spans_seen = last / kSpan - first_span + 1;
  const auto look = [&](int64_t turn) {
    const int64_t start = (first_span + turn / task.heads) * kSpan;
    const int64_t from = std::max<int64_t>(earliest - start, 0);
    const int64_t to = std::min(last + 1 - start, kSpan);
    look_up(k, c, s, task, task.kv_head + turn % task.heads, start, from, to, spans[turn % 2]);
  };
  look(0);
  const int64_t turns = spans_seen * task.heads;
  for (int64_t turn = 0; turn < turns; turn++) {
    const Span &span = spans[turn % 2], &next = spans[(turn + 1) % 2];
    AttendedSpan a = {};
    a.type = c.type, a.head_dim = c.head_dim, a.value_dim = s.value_dim, a.scale = c.scale;
    a.keys = span.keys, a.values = span.values, a.from = span.from, a.to = span.to;
    if (turn + 1 < turns) look(turn + 1);
    if (turn + 1 < turns && c.type != Type::F16) {  // widened rows have been read
      // Latent values are a part of keys.
      a.next_keys = next.keys, a.next_values = c.latent ? nullptr : next.values;
      a.next_from = next.from, a.next_to = next.to;
    }
    const int64_t start = (first_span + turn / task.heads) * kSpan;
    for (int64_t i = 0; i < task.count; i++) {
      const int64_t position = position_of(i);
      seen[i] = std::max<int64_t>(first_seen(c, position) - start, 0);
      seen[task.count + i] = std::min(position + 1 - start, kSpan);
    }
    const int64_t row = turn % task.heads * task.count;  // the head's first
    a.rows = task.count, a.first = seen.get(), a.end = seen.get() + task.count;
    a.q = q.get() + row * q_width, a.total = total.get() + row * width;
    a.q_width = q_width, a.width = width, a.top = top + row, a.mass = mass + row;
    a.scratch = scratch.get();
    k.attend(a);
  }
  for (int64_t i = 0; i < n; i++) {
    k.unpack(s.kind, total.get() + i * width, s.value_dim, result.get());
    float sum = mass[i];
    if (c.sinks) {
      float sink = c.sinks[head_of(i) % c.heads];
      k.exponentials(&sink, top[i] == kNone ? 0 : top[i], 1);
      sum += sink;
    }
    if (sum == 0) sum = 1;
    // Weights of 0 may have turned −0 to 0: which rows share a tile must not show.
    for (int64_t j = 0; j < s.value_dim; j++) result[j] = result[j] / sum + 0.0f;
    char* out = static_cast<char*>(c.out) + head_of(i) * s.value_dim * s.size;
    k.narrow(c.type, result.get(), s.value_dim, out);
  }
}

}  // namespace

void attend(Pool& pool, const Kernels& k, const Attention& c,
            const std::vector<Queries>& queries) {
  const Shape s = shape_of(c);
  std::vector<Task> tasks;
  int64_t work = 0;
  // KV heads of a task, and rows: fewer where threads would wait for the last one.
  const int64_t pairs = c.kv_heads * static_cast<int64_t>(queries.size());
  const int64_t wanted = 2 * pool.threads();
  const int64_t most = std::clamp<int64_t>(pairs / wanted, 1, c.kv_heads);
  for (const Queries& q : queries) {
    check(c, s, q);
    work += (q.position + q.count - first_seen(c, q.position)) * q.count * c.heads * c.head_dim;
    const int64_t all = q.count * s.groups;
    int64_t open = kOpenRows;
    while (open > kTokens && pairs * ((all + open - 1) / open) < wanted) open /= 2;
    const int64_t together = std::clamp<int64_t>(open / all, 1, most);
    for (int64_t head = 0; head < c.kv_heads; head += together) {
      const int64_t heads = std::min(together, c.kv_heads - head);
      for (int64_t first = 0; first < all; first += open) {
        tasks.push_back({q, head, heads, first, std::min(open, all - first)});
      }
    }
  }
  parallel(pool, static_cast<int64_t>(tasks.size()), work,
           [&](int64_t i) { compute(k, c, s, tasks[i]); });
}

}  // namespace moejax
