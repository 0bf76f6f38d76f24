#include <algorithm>
#include <deque>
#include <limits>

#include "pallas_kernels/cpu/buffer.h"
#include "pallas_kernels/cpu/ops.h"

namespace moejax {
namespace {

constexpr int64_t kDecoded = 16;   // rows decoded at once for one or two tokens: they stay near
constexpr int64_t kColumns = 2048;     // columns of down in a task of few tokens, at most: long streams
constexpr int64_t kManyColumns = 512;  // of many, and at least: their sums stay in the second cache
constexpr int64_t kManyTokens = 8;     // of an expert: more are many
constexpr int64_t kSums = kAddedTokens;  // tokens whose sums are open while rows of down pass

constexpr int64_t kHere = std::numeric_limits<int64_t>::max();

struct Expert {
  const uint16_t* record;
  const Format* format;
  int64_t first, tokens;  // its (token, slot) pairs in Work::pairs
  int64_t id, number;     // of the version
  bool through;           // has no cell
  int64_t cell;           // that the queue fills; kHere: the record is there
  int64_t buffer;         // of the supply; -1: none
  mutable bool failed;    // the record did not come
};

using Group = std::vector<const Expert*>;

struct Work {
  const Kernels& k;
  const Experts& call;
  Type kind;
  std::vector<Expert> experts;
  Awaited awaited;             // of them
  std::vector<int64_t> idle;   // cells of active experts without tokens
  std::vector<int32_t> pairs;  // by expert
  int64_t x_width, h_width;
  float *x, *h;  // packed tokens; hidden values of the pairs, in the order of down's sum
  int64_t whole_width;
  float* whole;  // quantized tokens, of matrices with a unit
};

// down^T's rows are summed in this order: rows r, r + I/4, r + I/2, r + 3·I/4 follow each other, so
// that versions that keep codes of such rows in one element pass their memory once, and all versions
// of a shape have one order.
int64_t row_of_place(int64_t place, int64_t width) {
  return width % 4 ? place : place / 4 + place % 4 * (width / 4);
}
int64_t place_of_row(int64_t row, int64_t width) {
  return width % 4 ? row : row % (width / 4) * 4 + row / (width / 4);
}

// An active expert, and where its record is: in its cell or the store.
Expert found(const Experts& c, int64_t e) {
  const int64_t entry = c.layer * c.experts + e, address = c.address[entry];
  const std::string name = "expert " + std::to_string(e) + " of layer " + std::to_string(c.layer);
  Expert out = {};
  out.id = e, out.number = c.records.versions.size() == 1 ? 0 : c.version[entry];
  out.through = address < 0, out.cell = address, out.buffer = -1;
  const StoredVersion& version = c.records.version(out.number, name);
  out.format = out.through ? &version.held : &version.cell;
  out.record = out.through ? c.records.stored(out.number, c.layer, e, false, name)
                           : c.records.cell(version, address, name);
  return out;
}

// The active experts that have tokens, and their pairs, and the cells of the others.
void gather(Work& work) {
  const Experts& c = work.call;
  const int64_t count = c.tokens * c.top_k;
  if (c.layer < 0 || c.layer >= c.layers) {
    throw Refused("there is no layer " + std::to_string(c.layer));
  }
  std::vector<int64_t> first(c.experts + 2);
  for (int64_t i = 0; i < count; i++) {
    if (c.ids[i] < 0 || c.ids[i] > c.experts) {
      throw Refused("there is no expert " + std::to_string(c.ids[i]));
    }
    first[c.ids[i] + 1]++;
  }
  for (int64_t e = 0; e <= c.experts; e++) first[e + 1] += first[e];
  work.pairs.resize(count);
  std::vector<int64_t> next(first.begin(), first.end() - 1);
  for (int64_t i = 0; i < count; i++) work.pairs[next[c.ids[i]]++] = static_cast<int32_t>(i);
  for (int64_t i = 0; i < c.active_count; i++) {
    const int64_t e = c.active[i];
    if (e < 0 || e >= c.experts || (i && e <= c.active[i - 1])) {
      throw Refused("the list of active experts is not ascending and below " +
                    std::to_string(c.experts));
    }
    Expert expert = found(c, e);
    expert.first = first[e], expert.tokens = first[e + 1] - first[e];
    if (expert.tokens) {
      work.experts.push_back(expert);
      if (expert.through) work.awaited.add(expert.record);
    } else if (!expert.through) work.idle.push_back(expert.cell);
  }
  work.awaited.wait();
}

// Whether rows of an encoded expert are multiplied as they are decoded; else blocks of them are
// decoded into the cache, for all tokens that follow.
bool as_they_are_decoded(const Work& work, const Expert& e) {
  return e.tokens <= work.k.takes(*e.format);
}

bool has_units(const Format& f) { return f.matrix[GATE].unit || f.matrix[UP].unit; }

// y[t · kMostRows + r]: rows [first, first + rows) of gate or up for an expert's tokens, whose packed
// operands are x.
void products(const Work& work, const Expert& e, int matrix, int64_t first, int64_t rows,
              const float* const* x, float* y) {
  const int64_t hidden = work.call.records.hidden, size = size_of(work.kind);
  if (e.format->matrix[matrix].unit) {
    std::vector<const float*> whole(e.tokens);
    for (int64_t t = 0; t < e.tokens; t++) whole[t] = work.whole + (x[t] - work.x) / work.x_width * work.whole_width;
    Buffer<float> scratch(integer_scratch(hidden, e.tokens));
    return work.k.integer_dots(*e.format, e.record, matrix, first, rows, whole.data(), e.tokens, y, kMostRows,
                               scratch.get());
  }
  if (as_they_are_decoded(work, e)) {
    return work.k.encoded_dots(*e.format, e.record, matrix, first, rows, x, e.tokens, y, kMostRows);
  }
  const bool decoded = !row_of(*e.format, e.record, matrix, first);
  // Kernels that know one way put a call's tokens in order once, but for one token.
  const bool one_way = !work.k.few(work.kind);
  const int64_t near = one_way ? kDecoded : kDecoded / 2;
  if (decoded && e.tokens <= (one_way ? 1 : 2) && rows > near) {
    for (int64_t r = 0; r < rows; r += near) {
      products(work, e, matrix, first + r, std::min(near, rows - r), x, y + r);
    }
    return;
  }
  Buffer<char> scratch(decoded ? rows * hidden * size : 0);
  const void *w[kMostRows], *next[kAhead];
  for (int64_t i = 0; i < kAhead; i++) {
    next[i] = row_of(*e.format, e.record, matrix, std::min(first + rows + i, work.call.width - 1));
  }
  for (int64_t r = 0; r < rows; r++) {
    w[r] = row_of(*e.format, e.record, matrix, first + r);
    if (w[r]) continue;
    char* place = scratch.get() + r * hidden * size;
    work.k.decode(*e.format, e.record, matrix, first + r, 0, hidden, nullptr, place);
    w[r] = place;
  }
  work.k.dots_of_many(work.kind, w, rows, x, e.tokens, hidden, y, kMostRows, decoded ? nullptr : next);
}

// Returns when a matrix of an expert's record is there; false: it did not come.
bool arrived(const Work& work, const Expert& e, int matrix) {
  if (e.cell == kHere) return true;
  const Supply& supply = *work.call.records.supply;
  const int64_t part = std::min<int64_t>(matrix, supply.parts(e.number) - 1);
  if (supply.queue->wait_cell(e.cell, part) == TransferState::DONE) return true;
  __atomic_store_n(&e.failed, true, __ATOMIC_RELAXED);
  return false;
}

// Onto `count` results of a matrix from `first` on, their biases, if it has any.
void add_biases(const Work& work, const Expert& e, int matrix, int64_t first, int64_t count, float* y) {
  const int64_t part = e.format->bias[matrix];
  if (!part) return;
  Buffer<float> bias(count);
  const uint16_t* biases = e.record + part * work.call.records.hidden;
  work.k.widen(work.call.type, at(biases, first, work.call.type), count, bias.get());
  for (int64_t i = 0; i < count; i++) y[i] += bias[i];
}

// h = act(gate(x)) · up(x), rounded to the run's dtype, of rows [first, last) for an expert's tokens.
void gate_up(const Work& work, const Expert& e, int64_t first, int64_t last) {
  const Experts& c = work.call;
  const int64_t rows = last - first;
  Buffer<float> gate(e.tokens * kMostRows), up(e.tokens * kMostRows);
  std::vector<const float*> x(e.tokens);
  for (int64_t t = 0; t < e.tokens; t++) {
    x[t] = work.x + work.pairs[e.first + t] / c.top_k * work.x_width;
  }
  if (e.format->bias[GATE] && !arrived(work, e, DOWN)) return;  // biases come last
  if (!arrived(work, e, GATE)) return;
  const bool gated = has_gate(*e.format);
  products(work, e, gated ? GATE : UP, first, rows, x.data(), gate.get());
  if (gated) {
    if (!arrived(work, e, UP)) return;
    products(work, e, UP, first, rows, x.data(), up.get());
  } else {
    std::copy(gate.get(), gate.get() + e.tokens * kMostRows, up.get());
  }
  for (int64_t t = 0; t < e.tokens; t++) {
    float *mine = &gate[t * kMostRows], rounded[kMostRows];
    add_biases(work, e, GATE, first, rows, mine);
    add_biases(work, e, UP, first, rows, &up[t * kMostRows]);
    work.k.activate(c.activation, c.limit, c.alpha, mine, &up[t * kMostRows], rows);
    work.k.narrow(c.type, mine, rows, rounded);
    work.k.widen(c.type, rounded, rows, mine);
    float* h = work.h + (e.first + t) * work.h_width;
    const bool in_order = e.format->matrix[DOWN].unit || c.width % 4;
    const int64_t step = in_order ? 1 : 4, quarter = c.width / step;
    for (int64_t r = 0, count; r < rows; r += count) {
      count = std::min(rows - r, quarter - (first + r) % quarter);
      float* place = h + (in_order ? first + r : place_of_row(first + r, c.width));
      for (int64_t i = 0; i < count; i++) place[i * step] = mine[r + i];
    }
  }
}

// Columns of down^T: what a task adds up.
struct Columns {
  const Expert& expert;
  int64_t first, count;  // columns
  const float* scales;   // of them
  char* scratch;         // kManyAdded decoded rows of them
};

// The sums of tokens [token, token + count) of an expert, onto which rows from `place` on are added.
struct Sums {
  const float* h[kSums];
  float* total[kSums];
  Sums(const Work& work, const Columns& c, int64_t token, int64_t count, int64_t place, float* sums) {
    for (int64_t i = 0; i < count; i++) {
      h[i] = work.h + (c.expert.first + token + i) * work.h_width + place;
      total[i] = sums + i * padded(c.count);
    }
  }
};

// Adds a record's rows in blocks, each to all of the tokens.
void add_rows(const Work& work, const Columns& c, int64_t token, int64_t tokens, float* sums) {
  const Expert& e = c.expert;
  const int64_t size = size_of(work.kind), width = work.call.width;
  const int64_t step = tokens > work.k.few(work.kind) ? kManyAdded : kRows;
  bool coarse = true;
  for (int64_t place = 0; place < width; place += step) {
    const int64_t rows = std::min(step, width - place);
    const void* w[kManyAdded];
    for (int64_t i = 0; i < rows; i++) {
      const int64_t row = row_of_place(place + i, width);
      if (const void* whole = row_of(*e.format, e.record, DOWN, row)) {
        w[i] = at(whole, c.first, work.kind);
        continue;
      }
      char* decoded = c.scratch + i * c.count * size;
      work.k.decode(*e.format, e.record, DOWN, row, c.first, c.count, c.scales, decoded);
      w[i] = decoded;
    }
    const Sums s(work, c, token, tokens, place, sums);
    work.k.add_of_many(work.kind, w, rows, s.h, tokens, c.count, s.total, &coarse);
  }
}

// The same for few tokens, without a block in between.
void add_encoded(const Work& work, const Columns& c, int64_t tokens, float* sums) {
  const int64_t quarter = work.call.width / 4, step = work.k.elements;
  for (int64_t row = 0; row < quarter; row += step) {
    const Sums s(work, c, 0, tokens, 4 * row, sums);
    work.k.encoded_add(*c.expert.format, c.expert.record, row, std::min(step, quarter - row),
                       c.first, c.count, c.scales, s.h, tokens, s.total);
  }
}

// The same where h is quantized and codes are multiplied as they are. next: see Kernels::integer_columns.
void down_of_integers(const Work& work, const Expert& e, int64_t first, int64_t count, const uint16_t* next) {
  const Experts& c = work.call;
  const int64_t size = quantized_size(c.width);
  const int64_t most = std::min(kIntegerTokens, e.tokens), columns = integer_columns_of(most);
  Buffer<float> quantized(most * size), scratch(integer_columns_scratch(c.width, columns, most));
  for (int64_t t0 = 0; t0 < e.tokens; t0 += most) {
    const int64_t tokens = std::min(most, e.tokens - t0);
    const float* h[kIntegerTokens];
    for (int64_t t = 0; t < tokens; t++) {
      work.k.quantize(work.h + (e.first + t0 + t) * work.h_width, c.width, &quantized[t * size]);
      h[t] = &quantized[t * size];
    }
    for (int64_t at = first; at < first + count; at += columns) {
      const int64_t n = std::min(columns, first + count - at);
      float* y[kIntegerTokens];
      for (int64_t t = 0; t < tokens; t++) y[t] = c.y + work.pairs[e.first + t0 + t] * c.records.hidden + at;
      const uint16_t* then = at + columns < first + count ? e.record + at + columns : next;
      work.k.integer_columns(*e.format, e.record, at, n, h, tokens, y, scratch.get(), then);
      for (int64_t t = 0; t < tokens; t++) add_biases(work, e, DOWN, at, n, y[t]);
    }
  }
}

// y = h · down^T, columns [first, first + count), for an expert's tokens. next: see Kernels::integer_columns.
void down(const Work& work, const Expert& e, int64_t first, int64_t count, const uint16_t* next) {
  const Experts& c = work.call;
  if (!arrived(work, e, DOWN)) return;
  if (e.format->matrix[DOWN].unit) return down_of_integers(work, e, first, count, next);
  const int64_t width = padded(count);
  const int64_t open = (std::min(kSums, e.tokens) + kTokenGroup - 1) / kTokenGroup * kTokenGroup;
  Buffer<float> sums(open * width);
  const bool encoded = as_they_are_decoded(work, e), decoded = !encoded && !row_of(*e.format, e.record, DOWN, 0);
  const bool scaled = decoded || (encoded && work.k.scales_ahead);
  Buffer<char> scratch(decoded ? kManyAdded * count * size_of(work.kind) : 0);
  const int64_t group = std::max<int64_t>(e.format->matrix[DOWN].group, 1);
  Buffer<float> scales(scaled ? (c.width + group - 1) / group * 2 * width : 0);
  if (scaled) work.k.down_scales(*e.format, e.record, first, count, scales.get());
  const Columns columns = {e, first, count, scales.get(), scratch.get()};
  for (int64_t t0 = 0; t0 < e.tokens; t0 += kSums) {
    const int64_t tokens = std::min(kSums, e.tokens - t0);
    std::fill(sums.get(), sums.get() + tokens * width, 0.0f);
    if (encoded) add_encoded(work, columns, tokens, sums.get());
    else add_rows(work, columns, t0, tokens, sums.get());
    for (int64_t t = 0; t < tokens; t++) {
      const int64_t pair = work.pairs[e.first + t0 + t];
      float* out = c.y + pair * c.records.hidden + first;
      work.k.unpack(work.kind, &sums[t * width], count, out);
      add_biases(work, e, DOWN, first, count, out);
    }
  }
}

// Columns of down in a task. No bit depends on it.
int64_t columns_of(const Work& work, int64_t active, int64_t threads) {
  const int64_t hidden = work.call.records.hidden;
  if (work.call.tokens * work.call.top_k > static_cast<int64_t>(work.experts.size()) * kManyTokens) {
    return kManyColumns;
  }
  int64_t columns = kColumns;
  // Shorter where threads would wait for the last task.
  while (columns > kManyColumns && active * ((hidden + columns - 1) / columns) < 4 * threads) {
    columns /= 2;
  }
  return columns;
}

// Rows of gate and up in a task. No bit depends on it. Codes that are multiplied as they are ask for their
// next rows within a task: in longer ones a core of a Zen 5 gets those of 4 and 6 bits 1.1 to 1.2 times as fast.
int64_t rows_of(const Work& work, const Group& group, int64_t threads) {
  const int64_t long_tasks = static_cast<int64_t>(group.size()) * ((work.call.width + kMostRows - 1) / kMostRows);
  for (const Expert* e : group) {
    const bool codes = e->format->matrix[GATE].unit && e->format->matrix[UP].unit;
    if (!codes || long_tasks < 4 * threads) return work.k.rows_of_task(work.kind);
  }
  return kMostRows;
}

// Some of the experts, from x to y.
void compute(Pool& pool, const Work& work, const Group& group) {
  const Experts& c = work.call;
  const int64_t active = static_cast<int64_t>(group.size());
  const int64_t rows = rows_of(work, group, pool.threads());
  const int64_t blocks = (c.width + rows - 1) / rows;
  const int64_t multiplications = active * c.width * c.records.hidden;
  parallel(pool, active * blocks, 2 * multiplications, [&](int64_t i) {
    const int64_t first = i % blocks * rows;
    gate_up(work, *group[i / blocks], first, std::min(first + rows, c.width));
  });
  const int64_t columns = columns_of(work, active, pool.threads());
  const int64_t parts = (c.records.hidden + columns - 1) / columns;
  parallel(pool, active * parts, multiplications, [&](int64_t i) {
    const int64_t first = i % parts * columns, then = (i + 1) % parts * columns;
    const Expert &e = *group[i / parts], &other = *group[std::min(i + 1, active * parts - 1) / parts];
    const bool last = i + 1 == active * parts || other.format != e.format;
    down(work, e, first, std::min(columns, c.records.hidden - first), last ? nullptr : other.record + then);
  });
}

// What the step has of an expert whose record did not come.
void give_up(const Work& work, const Expert& e) {
  const Experts& c = work.call;
  for (int64_t t = 0; t < e.tokens; t++) {
    float* row = c.y + work.pairs[e.first + t] * c.records.hidden;
    std::fill(row, row + c.records.hidden, 0.0f);
  }
  c.records.supply->failed({static_cast<int32_t>(c.layer), static_cast<int32_t>(e.id), c.writes,
                    c.records.supply->queue->failure_of(e.cell)});
}

// All experts as their records come: first those that are there, then whose have come meanwhile, or
// who is next. Records without a cell pass through the supply's buffers.
void compute_as_they_come(Pool& pool, Work& work) {
  Supply& supply = *work.call.records.supply;
  const std::lock_guard<std::mutex> lock(supply.reading);
  TransferQueue& queue = *supply.queue;
  Group group;
  std::deque<Expert*> through;
  std::vector<std::pair<int64_t, Expert*>> flying;  // by ticket: about as they will come
  for (Expert& e : work.experts) {
    const int64_t ticket = e.through ? 0 : queue.demand(e.cell);
    if (e.through) through.push_back(&e);
    else if (ticket) flying.push_back({ticket, &e});
    else e.cell = kHere, group.push_back(&e);
  }
  std::sort(flying.begin(), flying.end());
  std::vector<int64_t> free;
  for (int64_t i = 0; i < supply.buffers(); i++) free.push_back(i);
  while (!group.empty() || !flying.empty() || !through.empty()) {
    for (; !free.empty() && !through.empty(); free.pop_back(), through.pop_front()) {
      Expert& e = *through.front();
      e.buffer = free.back(), e.cell = Supply::buffer_cell(e.buffer);
      e.record = supply.bring_into_buffer(e.number, work.call.layer, e.id, e.buffer);
      flying.push_back({queue.demand(e.cell), &e});
    }
    if (group.empty()) {
      for (const auto& [ticket, e] : flying) {
        if (!queue.flies(e->cell)) group.push_back(e);
      }
      if (group.empty()) group.push_back(flying.front().second);
    }
    compute(pool, work, group);
    for (const Expert* e : group) {
      if (e->failed && queue.retry(e->cell)) {  // as it was in `flying`, but for the ticket
        e->failed = false;
        continue;
      }
      if (e->failed) give_up(work, *e);
      if (e->buffer >= 0) free.push_back(e->buffer);
      const auto mine = [e](const auto& other) { return other.second == e; };
      flying.erase(std::remove_if(flying.begin(), flying.end(), mine), flying.end());
    }
    group.clear();
  }
}

// Packs the tokens and computes all experts.
void compute_all(Pool& pool, Work& work) {
  const Experts& c = work.call;
  const Kernels& k = work.k;
  bool units = false;
  for (const Expert& e : work.experts) units |= has_units(*e.format);
  work.whole_width = units ? quantized_size(c.records.hidden) : 0;
  Buffer<float> x(c.tokens * work.x_width), h(c.tokens * c.top_k * work.h_width), whole(c.tokens * work.whole_width);
  work.x = x.get(), work.h = h.get(), work.whole = whole.get();
  constexpr int64_t kRowsOfX = 16;
  const int64_t numbers = c.tokens * c.records.hidden;
  parallel_rows(pool, c.tokens, kRowsOfX, numbers, [&](int64_t first, int64_t last) {
    Buffer<float> wide(units ? c.records.hidden : 0);
    for (int64_t t = first; t < last; t++) {
      const void* row = at(c.x, t * c.records.hidden, c.type);
      k.pack(c.type, row, c.records.hidden, work.x + t * work.x_width);
      if (!units) continue;
      k.widen(c.type, row, c.records.hidden, wide.get());
      k.quantize(wide.get(), c.records.hidden, work.whole + t * work.whole_width);
    }
  });
  if (c.records.supply) return compute_as_they_come(pool, work);
  Group all;
  for (Expert& e : work.experts) e.cell = kHere, all.push_back(&e);
  compute(pool, work, all);
}

}  // namespace

void run_experts(Pool& pool, const Kernels& k, const Experts& c) {
  Work work = {k, c, kind_of(c.type), {}, {}, {}, {}, apart(c.records.hidden), apart(c.width), nullptr, nullptr, 0, nullptr};
  gather(work);
  if (!work.experts.empty()) compute_all(pool, work);
  // Who lists an expert wants its record there, so that it can give the cell to another one without
  // taking back what is on its way. One that did not come is asked for by nobody here.
  for (const int64_t cell : work.idle) {
    if (c.records.supply) c.records.supply->queue->wait_cell(cell, -1);
  }
}

}  // namespace moejax
