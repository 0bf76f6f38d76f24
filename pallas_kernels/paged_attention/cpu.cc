#include <algorithm>
#include <cmath>
#include <limits>

#include "pallas_kernels/cpu/buffer.h"
#include "pallas_kernels/cpu/ops.h"

namespace moejax {
namespace {

// Memory gives most where it is read straight on, and a page has the keys of its heads, then their values: so a task
// asks for those of so many heads together, while it computes as many before them.
constexpr int64_t kTogether = 4;
// Groups of fewer heads that are asked for before they are read: one head would come too late for a fast core.
constexpr int64_t kAhead = 2;
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Shape {
  int64_t groups, value_dim, rows_per_layer, size;
  int64_t row_size, head_size;  // bytes of a key; of a block's keys of one head
  Type kind;
};

Shape shape_of(const Attention& c) {
  const int64_t rows_per_token = c.latent ? 1 : 2 * c.kv_heads, size = size_of(c.type), row_size = c.head_dim * size;
  return {c.heads / c.kv_heads, c.latent ? c.latent : c.head_dim, rows_per_token * c.block_size, size,
          row_size, c.block_size * row_size, kind_of(c.type)};
}

// The first position that a query at `position` looks at.
int64_t first_seen(const Attention& c, int64_t position) {
  return c.window ? std::max<int64_t>(position - c.window + 1, 0) : 0;
}

int64_t split_of(const Attention& c, int64_t span) { return c.split ? span / c.split : 0; }

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
// (query, head) pairs from `first` on, over spans [begin, end).
struct Task {
  Queries queries;
  int64_t kv_head, heads, first, count;
  int64_t begin, end;
  float* parts;  // sums of all heads, one split after the other; null: the task has all splits
};

int64_t size_of_sums(int64_t rows, int64_t width) { return rows * (width + 2); }

// Of rows from `first` on, in the memory of `rows`.
AttendedSums sums_at(float* memory, int64_t rows, int64_t width, int64_t first = 0) {
  float* top = memory + rows * width;
  return {memory + first * width, top + first, top + rows + first};
}

void clear(const AttendedSums& sums, int64_t rows, int64_t width) {
  std::fill(sums.total, sums.total + rows * width, 0.0f);
  std::fill(sums.top, sums.top + rows, kNone);
  std::fill(sums.mass, sums.mass + rows, 0.0f);
}

// Writes the results of rows; row_of(i) is theirs among (query, head) pairs.
template <class F>
void write(const Kernels& k, const Attention& c, const Shape& s, const AttendedSums& sums, int64_t rows,
           int64_t width, const F& row_of) {
  Buffer<float> result(s.value_dim);
  for (int64_t i = 0; i < rows; i++) {
    const int64_t row = row_of(i);
    k.attended(s.kind, sums.total + i * width, s.value_dim, result.get());
    float sum = sums.mass[i];
    if (c.sinks) {
      float sink = c.sinks[row % c.heads];
      k.exponentials(&sink, sums.top[i] == kNone ? 0 : sums.top[i], 1);
      sum += sink;
    }
    if (sum == 0) sum = 1;
    // Weights of 0 may have turned −0 to 0: which rows share a tile must not show.
    for (int64_t j = 0; j < s.value_dim; j++) result[j] = result[j] / sum + 0.0f;
    k.narrow(c.type, result.get(), s.value_dim, static_cast<char*>(c.out) + row * s.value_dim * s.size);
  }
}

// The tokens that rows of a task see of a span, counted from the span's first.
struct Seen {
  int64_t start, from, to;
};

Seen seen_of(const Attention& c, const Shape& s, const Task& task, int64_t span) {
  const int64_t start = span * kSpan, first = task.queries.position + task.first / s.groups;
  const int64_t last = task.queries.position + (task.first + task.count - 1) / s.groups;
  return {start, std::max<int64_t>(first_seen(c, first) - start, 0), std::min(last + 1 - start, kSpan)};
}

// A span of tokens.
struct Span {
  Seen seen;
  const char* tokens[kSpan];  // keys of those that are seen, of the first KV head
};

void look_up(const Attention& c, const Shape& s, const Task& task, int64_t number, Span& span) {
  const Seen seen = span.seen = seen_of(c, s, task, number);
  for (int64_t i = seen.from; i < seen.to;) {
    const int64_t block = (seen.start + i) / c.block_size, within = (seen.start + i) % c.block_size;
    const int64_t page = c.block_table[task.queries.sequence * c.blocks + block];
    const char* token = reinterpret_cast<const char*>(c.arena) +
                        (page + c.layer * s.rows_per_layer + within) * s.row_size;
    const int64_t stop = std::min(seen.to, i + c.block_size - within);
    for (; i < stop; i++, token += s.row_size) span.tokens[i] = token;
  }
}

// What a task reads of a span for some KV heads, as it lies: a piece of each block, as long as the longest.
struct Pieces {
  const void* begin[2 * kTogether * kSpan];
  int64_t count = 0, bytes = 0;

  void set(const Attention& c, const Shape& s, const Span& span, int64_t first, int64_t heads) {
    const auto [start, from, to] = span.seen;
    count = 0, bytes = std::min(c.block_size, to - from) * s.row_size;
    for (int64_t part = 0; part < (c.latent ? 1 : 2); part++) {  // keys, then values
      for (int64_t head = first + part * c.kv_heads, stop = head + heads; head < stop; head++) {
        for (int64_t i = from; i < to; i += c.block_size - (start + i) % c.block_size) {
          begin[count++] = span.tokens[i] + head * s.head_size;
        }
      }
    }
  }
};

// Keys and values of float16, as floats.
struct Wide {
  Buffer<float> memory;
  const char* tokens[kSpan];

  explicit Wide(int64_t head_dim) : memory(2 * kSpan * head_dim) {}

  void set(const Kernels& k, AttendedSpan& a) {
    for (int64_t i = a.from; i < a.to; i++) {
      float *key = &memory[2 * i * a.head_dim], *value = key + a.head_dim;
      k.widen(a.type, a.tokens[i] + a.key, a.head_dim, key), k.widen(a.type, a.tokens[i] + a.value, a.value_dim, value);
      tokens[i] = reinterpret_cast<const char*>(key);
    }
    a.tokens = tokens, a.key = 0, a.value = a.head_dim * sizeof(float);
  }
};

void compute(const Kernels& k, const Attention& c, const Shape& s, const Task& task) {
  const int64_t q_width = padded(c.head_dim), width = padded(s.value_dim);
  // Of a head, with room for whole groups of rows.
  const int64_t q_size = (task.count + kTokenGroup - 1) / kTokenGroup * kTokenGroup * q_width;
  const int64_t n = task.heads * task.count, size = size_of_sums(n, width);
  const int64_t first_split = split_of(c, first_seen(c, task.queries.position) / kSpan);
  const bool several = split_of(c, task.begin) < split_of(c, task.end - 1);
  Buffer<float> q(task.heads * q_size), own(task.parts ? 0 : several ? 2 * size : size);
  Buffer<uint32_t> scratch(kSpan * (q_width + width));
  Buffer<int32_t> seen(2 * task.count);
  Buffer<int64_t> positions(task.count);
  for (int64_t i = 0; i < task.count; i++) positions[i] = task.queries.position + (task.first + i) / s.groups;
  // (row of q, head) of a row, position of a pair.
  const auto head_of = [&](int64_t i) {
    const int64_t pair = task.first + i % task.count;
    return (task.queries.first + pair / s.groups) * c.heads +
           (task.kv_head + i / task.count) * s.groups + pair % s.groups;
  };
  Buffer<const void*> queries(task.count);
  for (int64_t head = 0; head < task.heads; head++) {
    for (int64_t i = 0; i < task.count; i++) {
      queries[i] = at(c.q, head_of(head * task.count + i) * c.head_dim, c.type);
    }
    k.pack_queries(c.type, queries.get(), task.count, c.head_dim, q.get() + head * q_size);
  }
  const AttendedSums all = sums_at(own.get(), n, width);
  AttendedSums sums = all;
  // Groups of heads, as even as can be, one span's after the other's.
  const int64_t groups = (task.heads + kTogether - 1) / kTogether, together = (task.heads + groups - 1) / groups;
  const auto heads_of = [&](int64_t first) { return std::min(together, task.heads - first); };
  Span spans[kAhead + 1];
  // The next group: its span and its first head. A thread's next task begins where this one ends.
  const int64_t stop = task.parts ? task.queries.position / kSpan + 1 : task.end;
  int64_t next = task.begin, next_first = 0;
  Pieces ahead;
  const auto find_next = [&] {
    ahead.count = 0;
    if (next >= stop) return;
    Span& span = spans[next % (kAhead + 1)];
    if (next_first == 0) look_up(c, s, task, next, span);
    ahead.set(c, s, span, task.kv_head + next_first, heads_of(next_first));
    next_first += together;
    if (next_first >= task.heads) next++, next_first = 0;
  };
  for (int64_t group = 0; group < (together < kTogether ? kAhead : 1); group++) {
    find_next();
    for (int64_t i = 0; i < ahead.count; i++) {
      for (int64_t at = 0; at < ahead.bytes; at += 64) {
        __builtin_prefetch(static_cast<const char*>(ahead.begin[i]) + at);
      }
    }
  }
  const int64_t apart = c.latent ? 0 : c.kv_heads * s.head_size;  // a token's key and its value
  Wide wide(c.type == Type::F16 ? c.head_dim : 0);
  AttendedSpan a = {};
  a.type = c.type, a.head_dim = c.head_dim, a.value_dim = s.value_dim, a.scale = c.scale;
  a.rows = task.count, a.first = seen.get(), a.end = seen.get() + task.count;
  a.q_width = q_width, a.width = width, a.scratch = scratch.get();
  for (int64_t number = task.begin; number < task.end; number++) {
    const int64_t split = split_of(c, number);
    const bool starts = number == task.begin || split > split_of(c, number - 1);
    if (starts && task.parts) {
      float* memory = task.parts + (split - first_split) * size_of_sums(c.heads, width);
      sums = sums_at(memory, c.heads, width, head_of(0) % c.heads);
    } else if (starts && number > task.begin) {
      if (sums.total != all.total) k.fold(n, width, all, sums);
      sums = sums_at(own.get() + size, n, width);
    }
    if (starts) clear(sums, n, width);
    const Span& span = spans[number % (kAhead + 1)];
    a.from = span.seen.from, a.to = span.seen.to;
    for (int64_t i = 0; i < task.count; i++) {
      seen[i] = std::max<int64_t>(first_seen(c, positions[i]) - span.seen.start, 0);
      seen[task.count + i] = std::min(positions[i] + 1 - span.seen.start, kSpan);
    }
    for (int64_t first = 0; first < task.heads; first += together) {
      find_next();
      for (int64_t part = 0, parts = heads_of(first); part < parts; part++) {
        const int64_t head = first + part, row = head * task.count;
        const int64_t from = ahead.count * part / parts, to = ahead.count * (part + 1) / parts;
        a.next = ahead.begin + from, a.next_count = to - from, a.next_bytes = ahead.bytes;
        a.tokens = span.tokens, a.key = (task.kv_head + head) * s.head_size, a.value = a.key + apart;
        if (c.type == Type::F16) wide.set(k, a);
        a.q = q.get() + head * q_size, a.total = sums.total + row * width;
        a.top = sums.top + row, a.mass = sums.mass + row;
        k.attend(a);
      }
    }
  }
  if (task.parts) return;
  if (sums.total != all.total) k.fold(n, width, all, sums);
  write(k, c, s, all, n, width, head_of);
}

}  // namespace

void attend(Pool& pool, const Kernels& k, const Attention& c,
            const std::vector<Queries>& queries) {
  const Shape s = shape_of(c);
  const int64_t width = padded(s.value_dim), size = size_of_sums(c.heads, width);
  const auto first_split = [&](const Queries& q) { return split_of(c, first_seen(c, q.position) / kSpan); };
  // Splits are tasks of their own where a query is alone: rows of several tokens are tasks enough.
  const auto splits_of = [&](const Queries& q) {
    return q.count > 1 ? 1 : split_of(c, q.position / kSpan) - first_split(q) + 1;
  };
  int64_t work = 0, splits = 0;
  for (const Queries& q : queries) {
    check(c, s, q);
    work += (q.position + q.count - first_seen(c, q.position)) * q.count * c.heads * c.head_dim;
    splits += splits_of(q);
  }
  // KV heads of a task, splits and rows: fewer where threads would wait for the last one.
  const int64_t wanted = 2 * pool.threads(), pairs = c.kv_heads * splits;
  const int64_t most = std::clamp<int64_t>(pairs / wanted, 1, c.kv_heads);
  const int64_t even = (c.kv_heads + most - 1) / most, run = (splits - 1) / (2 * wanted) + 1;
  int64_t parted = 0;
  for (const Queries& q : queries) parted += splits_of(q) > run ? splits_of(q) : 0;
  Buffer<float> parts(parted * size);
  float* sums = parts.get();
  std::vector<Task> tasks, folds;
  for (const Queries& q : queries) {
    const int64_t all = q.count * s.groups;
    int64_t open = k.attended_rows(c.type);
    while (open > kTokens && pairs * ((all + open - 1) / open) < wanted) open /= 2;
    const int64_t together = std::clamp<int64_t>(open / all, 1, (c.kv_heads + even - 1) / even);
    const bool apart = splits_of(q) > run;
    for (int64_t first = 0; first < all; first += open) {
      const int64_t count = std::min(open, all - first);
      const int64_t begin = first_seen(c, q.position + first / s.groups) / kSpan;
      const int64_t end = (q.position + (first + count - 1) / s.groups) / kSpan + 1;
      for (int64_t from = begin, to; from < end; from = to) {
        to = apart ? std::min(end, (split_of(c, from) + run) * c.split) : end;
        for (int64_t head = 0; head < c.kv_heads; head += together) {
          const int64_t heads = std::min(together, c.kv_heads - head);
          tasks.push_back({q, head, heads, first, count, from, to, apart ? sums : nullptr});
        }
      }
    }
    if (!apart) continue;
    for (int64_t head = 0; head < c.kv_heads; head++) {
      folds.push_back({q, head, 1, 0, s.groups, first_split(q), first_split(q) + splits_of(q), sums});
    }
    sums += splits_of(q) * size;
  }
  parallel(pool, static_cast<int64_t>(tasks.size()), work, [&](int64_t i) { compute(k, c, s, tasks[i]); });
  parallel(pool, static_cast<int64_t>(folds.size()), parted * c.heads * width, [&](int64_t i) {
    const Task& t = folds[i];
    const int64_t head = t.kv_head * s.groups;
    const AttendedSums all = sums_at(t.parts, c.heads, width, head);
    for (int64_t split = 1; split < t.end - t.begin; split++) {
      k.fold(s.groups, width, all, sums_at(t.parts + split * size, c.heads, width, head));
    }
    write(k, c, s, all, s.groups, width, [&](int64_t j) { return t.queries.first * c.heads + head + j; });
  });
}

}  // namespace moejax
