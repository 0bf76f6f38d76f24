// The ops as XLA calls them (jax.ffi): checks of what could be read out of bounds, then the op.
// Shapes are static and checked against each other here; addresses and ids come from tables, and
// the ops check them before they read.
#include "pallas_kernels/cpu/binding.h"

namespace moejax {
namespace {

// ---- linear

// Rows of whole tiles that are needed, at most `tokens`.
int64_t needed(Int tiles, int64_t row_tile, int64_t tokens) {
  return std::min(std::max<int64_t>(*tiles.typed_data(), 0) * row_tile, tokens);
}

// Zeros behind the first values of a result.
void clear_after(Any& result, int64_t values, Type type) {
  char* end = at(result.untyped_data(), values, type);
  std::memset(end, 0, result.size_bytes() - values * size_of(type));
}

void linear(const Call& call, Any x, Any w, Int layer, Any bias, Int tiles,
            int64_t row_tile, ffi::Result<Any> y) {
  Size tokens, inputs, layers, outputs;
  const bool biased = bias.element_count();
  need(is(x, {tokens, inputs}) && is(w, {layers, outputs, inputs}) && is(*y, {tokens, outputs}) &&
           (!biased || is(bias, {layers, outputs})),
       "shapes");
  Product p = {};
  p.type = type_of({x, w, bias}), p.out_type = type_of({*y});
  p.tokens = needed(tiles, row_tile, tokens), p.inputs = inputs, p.outputs = outputs;
  const int64_t index = layer_of(layer, layers);
  p.x = x.untyped_data(), p.x_stride = p.inputs, p.y_stride = p.outputs;
  p.w = at(w.untyped_data(), index * p.outputs * p.inputs, p.type);
  p.bias = biased ? at(bias.untyped_data(), index * p.outputs, p.type) : nullptr;
  p.y = y->untyped_data();
  multiply(call.pool, call.k, {p});
  clear_after(*y, p.tokens * p.outputs, p.out_type);
}

void head_linear(const Call& call, Any x, Any w, Int layer, Int tiles, int64_t row_tile,
                 int64_t first, int64_t transposed, ffi::Result<Any> y) {
  Size all, heads, inputs, outputs, layers, rows, columns;
  need(is(x, {all, heads, inputs}) && is(w, {layers, heads, rows, columns}) &&
           is(*y, {all, heads, outputs}),
       "shapes");
  const int64_t tokens = needed(tiles, row_tile, all), count = transposed ? inputs : outputs;
  need((transposed ? outputs : inputs) == columns && first >= 0 && first + count <= rows, "shapes");
  const Type type = type_of({x, w, *y});
  const char* weights =
      at(w.untyped_data(), layer_of(layer, layers) * heads * rows * columns, type);
  const Product p = {type, type, tokens, inputs, outputs, heads * inputs, heads * outputs};
  std::vector<Product> products(heads, p);
  for (int64_t h = 0; h < heads; h++) {
    products[h].x = at(x.untyped_data(), h * inputs, type);
    products[h].w = at(weights, (h * rows + first) * columns, type);
    products[h].y = at(y->untyped_data(), h * outputs, type);
  }
  if (heads) (transposed ? multiply_transposed : multiply)(call.pool, call.k, products);
  clear_after(*y, tokens * heads * outputs, type);
}

// ---- expert_ffn, and linear from codes

constexpr int64_t kFields = 52;  // of a format: pallas_kernels/records/cpu.py writes them

Format format_of(const int64_t* field, int64_t hidden, int64_t width, Type type) {
  Format f = {};
  f.hidden = hidden, f.width = width, f.type = type;
  f.rows = field[0], f.blocks = field[1], f.escapes = field[2], f.tables = field[3];
  const int64_t* of = field + 4;
  for (Coding& c : f.matrix) {
    c.kind = static_cast<Codes>(of[0]), c.scale = static_cast<ScaleType>(of[1]);
    c.product = static_cast<Rounding>(of[2]), c.group = of[3], c.across = of[4];
    c.codes = of[5], c.extra = of[6], c.highs = of[7], c.shifts = of[8], c.super = of[9];
    c.supers = of[10], c.min_supers = of[11], c.whole = static_cast<Whole>(of[12]);
    c.global = of[13], c.unit = of[14], of += 15;
  }
  std::copy(of, of + 3, f.bias);
  return f;
}

// parts: of each layer, the numbers of a part's format, of its first element and of its rows.
void linear_codes(const Call& call, Any x, ffi::Buffer<ffi::U16, 1> elements, Int layer, Any bias,
                  Int tiles, int64_t row_tile, int64_t layers, Numbers formats, Numbers parts,
                  ffi::Result<Any> y) {
  Size tokens, inputs, outputs;
  const bool biased = bias.element_count();
  need(is(x, {tokens, inputs}) && is(*y, {tokens, outputs}) && layers > 0 &&
           (!biased || is(bias, {layers, outputs})) && formats.size() % kFields == 0 &&
           parts.size() % (3 * layers) == 0,
       "shapes");
  Product p = {};
  p.type = type_of({x, bias}), p.out_type = type_of({*y});
  need(p.type != Type::F16, "dtypes");
  p.tokens = needed(tiles, row_tile, tokens), p.inputs = inputs, p.outputs = outputs;
  p.x = x.untyped_data(), p.x_stride = p.inputs, p.y = y->untyped_data(), p.y_stride = p.outputs;
  const int64_t index = layer_of(layer, layers), count = static_cast<int64_t>(parts.size()) / (3 * layers);
  p.bias = biased ? at(bias.untyped_data(), index * p.outputs, p.type) : nullptr;
  std::vector<CodedRows> w;
  int64_t rows = 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t* part = parts.begin() + 3 * (index * count + i);
    need(part[0] >= 0 && part[0] < static_cast<int64_t>(formats.size()) / kFields && part[2] > 0,
         "formats");
    const Format format = format_of(formats.begin() + kFields * part[0], inputs, part[2], p.type);
    need(part[1] >= 0 && format.rows > 0 &&
             part[1] + format.rows * inputs <= static_cast<int64_t>(elements.element_count()),
         "the elements");
    w.push_back({format, elements.typed_data() + part[1]});
    rows += part[2];
  }
  need(rows == outputs, "shapes");
  multiply_codes(call.pool, call.k, p, w);
  clear_after(*y, p.tokens * p.outputs, p.out_type);
}

// A store uint16[L, E, rows, D], or of records in files int32[4], these sizes: then there is no
// memory (cpu/file_records.py).
const uint16_t* store_of(const Any& store, Size (&sizes)[4]) {
  if (store.element_type() == ffi::DataType::U16 &&
      is(store, {sizes[0], sizes[1], sizes[2], sizes[3]})) {
    return static_cast<const uint16_t*>(store.untyped_data());
  }
  need(store.element_type() == ffi::DataType::S32 && is(store, {4}), "the shape of a store");
  for (int i = 0; i < 4; i++) sizes[i] = {static_cast<const int32_t*>(store.untyped_data())[i]};
  return nullptr;
}

// The arena with the versions of a call and their stores; places: of their layers.
Records records_of(const Arena& arena, const ffi::RemainingArgs& stores, Numbers formats,
                   Numbers places, int64_t width, Type type) {
  const int64_t count = static_cast<int64_t>(stores.size());
  need(count && formats.size() == static_cast<size_t>(2 * kFields * count) &&
           places.size() % count == 0,
       "formats");
  const int64_t layers = static_cast<int64_t>(places.size()) / count;
  Records all = {arena.data, arena.rows, arena.hidden, {}, arena.supply()};
  for (int64_t v = 0; v < count; v++) {
    const auto store = stores.get<Any>(v);
    if (!store) throw Refused(store.error().message());
    const int64_t *fields = formats.begin() + 2 * kFields * v, *place = places.begin() + layers * v;
    Size sizes[4];
    const uint16_t* memory = store_of(*store, sizes);
    const Format cell = format_of(fields, arena.hidden, width, type);
    const Format held = format_of(fields + kFields, arena.hidden, width, type);
    need(sizes[2] == held.rows && sizes[3] == arena.hidden, "the shape of a store");
    all.versions.push_back({cell, held, memory, sizes[0], sizes[1], {place, place + layers}});
  }
  return all;
}

void expert_ffn(const Call& call, Floats given, Any x, Ints ids, Any memory, Int layer, Ints address,
                Ints version, Ints active, Int active_count, ffi::RemainingArgs stores,
                int64_t activation, float limit, float alpha, int64_t width, Numbers formats,
                Numbers places, int64_t most_threads, ffi::Result<Floats> y) {
  Size tokens, hidden, top_k, layers, experts;
  const Arena arena(memory);
  need(is(x, {tokens, hidden}) && is(ids, {tokens, top_k}) && is(address, {layers, experts}) &&
           is(version, {layers, experts}) && arena.hidden == hidden &&
           given.element_count() == static_cast<size_t>(tokens * top_k * hidden) &&
           y->element_count() == given.element_count() &&
           places.size() == layers * stores.size(),
       "shapes");
  Experts c = {type_of({x}), tokens, top_k, width, layers, experts,
               static_cast<Activation>(activation)};
  c.x = x.untyped_data(), c.ids = ids.typed_data(), c.layer = *layer.typed_data();
  c.records = records_of(arena, stores, formats, places, width, c.type);
  for (const auto& mine : c.records.versions) need(mine.experts == experts, "the shape of a store");
  c.address = address.typed_data(), c.version = version.typed_data(), c.writes = arena.writes();
  c.active = active.typed_data(), c.active_count = used(active_count, active.element_count());
  c.y = changed(given, y), c.limit = limit, c.alpha = alpha;
  PartOfPool pool(call.pool, most_threads);
  run_experts(pool, call.k, c);
}

// ---- fill and what else moves records and pages

void fill_cells(const Call& call, Any memory, Int layer, Ints expert, Ints row, Ints version,
                Int count, ffi::RemainingArgs stores, int64_t width, Numbers formats,
                Numbers places, int64_t ahead, ffi::Result<Any> written) {
  const Arena arena(memory, *written);
  Size listed;
  need(is(expert, {listed}) && is(row, {listed}) && is(version, {listed}), "shapes");
  // Only lossless12 is decoded on the way, which holds bfloat16.
  fill(call.pool, call.k,
       {records_of(arena, stores, formats, places, width, Type::BF16), *layer.typed_data(),
        expert.typed_data(), row.typed_data(), version.typed_data(), used(count, listed),
        ahead != 0});
}

// Rows of `width` elements of the arena as it is: those of cells, or of KV.
struct Rows {
  uint16_t* data;
  int64_t width, count;

  Rows(const Arena& arena, int64_t width) : data(arena.data), width(width) {
    need(width > 0, "shapes");
    count = arena.rows * arena.hidden / width;
  }
  uint16_t* at(int64_t row, int64_t rows) const {
    if (row >= 0 && rows >= 0 && row <= count - rows) return data + row * width;
    throw Refused(std::to_string(rows) + " rows from " + std::to_string(row) +
                  " on are not among " + std::to_string(count));
  }
};

// Packed residents into dense cells, by the queue: pallas_kernels/fill/unpack.py. Rows of the arena
// that are not there are an error, before anything is queued.
void unpack_cells(const Call&, Any memory, Int layer, Ints expert, Ints source, Ints row, Int count,
                  int64_t width, Numbers packed, ffi::Result<Any> written) {
  const Arena arena(memory, *written);
  Size listed;
  need(is(expert, {listed}) && is(source, {listed}) && is(row, {listed}) &&
           packed.size() == kFields,
       "shapes");
  need(arena.supply(), "there is no queue");
  const Format format = format_of(packed.begin(), arena.hidden, width, Type::BF16);
  const Rows rows(arena, arena.hidden);
  std::vector<Copy> records;
  for (int64_t i = 0; i < used(count, listed); i++) {
    records.push_back({rows.at(source.typed_data()[i], format.rows),
                       rows.at(row.typed_data()[i], 3 * width), 0});
  }
  for (size_t i = 0; i < records.size(); i++) {
    arena.supply()->unpack(format, *layer.typed_data(), expert.typed_data()[i], records[i].from,
                           row.typed_data()[i], records[i].to);
  }
}

// Waits until nothing flies into the arena; failed: 1 where the cell from that row on is not what
// was to come.
void drain(const Call&, Any memory, Ints cell_row, ffi::Result<Any> written,
           ffi::Result<Ints> failed) {
  const Arena arena(memory, *written);
  const size_t count = cell_row.element_count();
  need(failed->element_count() == count, "shapes");
  std::set<int64_t> cells;
  if (arena.supply()) cells = arena.supply()->queue->drain();
  for (size_t i = 0; i < count; i++) {
    failed->typed_data()[i] = cells.count(cell_row.typed_data()[i]);
  }
}

// rows[i] rows from row source[i] to row target[i]; 0: the entry is skipped. Entries may repeat.
void move_rows(const Call& call, Any memory, Ints source, Ints target, Ints rows, int64_t width,
               ffi::Result<Any> written) {
  const Arena arena(memory, *written);
  Size listed;
  need(is(source, {listed}) && is(target, {listed}) && is(rows, {listed}), "shapes");
  const Rows all(arena, width);
  std::vector<Copy> copies;
  std::set<int64_t> targets;  // two threads must not write one place
  for (int64_t i = 0; i < listed; i++) {
    const int64_t from = source.typed_data()[i], to = target.typed_data()[i];
    const int64_t count = rows.typed_data()[i];
    if (!count) continue;
    const Copy copy = {all.at(from, count), all.at(to, count), count * width};
    if (targets.insert(to).second) copies.push_back(copy);
  }
  copy_all(call.pool, copies);
}

using Page = ffi::Buffer<ffi::U16, 1>;

// `rows` rows from row first[i] on to pages[i].
void read_rows(const Call& call, Any memory, Ints first, int64_t width, int64_t rows,
               ffi::RemainingRets pages) {
  const Arena arena(memory);
  need(is(first, {static_cast<int64_t>(pages.size())}), "shapes");
  const Rows all(arena, width);
  std::vector<Copy> copies;
  for (size_t i = 0; i < pages.size(); i++) {
    auto page = pages.get<Page>(i);
    need(page && is(**page, {rows * width}), "the shape of a result");
    copies.push_back({all.at(first.typed_data()[i], rows), (*page)->typed_data(), rows * width});
  }
  copy_all(call.pool, copies);
}

// And from pages[i] to them; entries may repeat.
void write_rows(const Call& call, Any memory, Ints first, Int count, ffi::RemainingArgs pages,
                int64_t width, int64_t rows, ffi::Result<Any> written) {
  const Arena arena(memory, *written);
  need(is(first, {static_cast<int64_t>(pages.size())}), "shapes");
  const Rows all(arena, width);
  std::vector<Copy> copies;
  std::set<int64_t> targets;
  for (int64_t i = 0; i < used(count, pages.size()); i++) {
    const auto page = pages.get<Page>(i);
    need(page && is(*page, {rows * width}), "the shape of a page");
    const int64_t to = first.typed_data()[i];
    const Copy copy = {page->typed_data(), all.at(to, rows), rows * width};
    if (targets.insert(to).second) copies.push_back(copy);
  }
  copy_all(call.pool, copies);
}

// ---- paged_attention

// What decode and prefill share.
Attention attention_of(const Any& q, const Arena& arena, const Ints& table, Int layer, Floats sinks,
                       Ints windows, Int index, Numbers page, float scale, Any& out) {
  Size rows, heads, sequences, blocks;
  need(page.size() == 4, "page");
  Attention c = {};
  c.block_size = page[0], c.kv_heads = page[1], c.head_dim = page[2], c.latent = page[3];
  c.scale = scale, c.type = type_of({q, out});
  const int64_t value_dim = c.latent ? c.latent : c.head_dim;
  need(c.block_size > 0 && c.kv_heads > 0 && is(q, {rows, heads, c.head_dim}) &&
           is(table, {sequences, blocks}) && heads % c.kv_heads == 0 && value_dim <= c.head_dim &&
           (!c.latent || c.kv_heads == 1) && is(out, {rows, heads * value_dim}),
       "shapes");
  c.heads = heads, c.sequences = sequences, c.blocks = blocks;
  c.q = q.untyped_data(), c.arena = arena.data, c.out = out.untyped_data();
  c.kv_rows = arena.bytes() / (c.head_dim * size_of(c.type));
  c.block_table = table.typed_data(), c.layer = *layer.typed_data();
  Size layers;
  if (sinks.element_count()) {
    need(is(sinks, {layers, heads}), "sinks");
    c.sinks = sinks.typed_data() + layer_of(index, layers) * c.heads;
  }
  if (windows.element_count()) {
    need(is(windows, {layers}), "windows");
    c.window = windows.typed_data()[layer_of(index, layers)];
    need(c.window > 0, "a window");
  }
  return c;
}

void attended(const Call& call, const Attention& c, Any& out, const std::vector<Queries>& queries) {
  clear_after(out, 0, c.type);  // rows without a query
  attend(call.pool, call.k, c, queries);
}

void decode_attention(const Call& call, Any q, Any memory, Ints table, Ints lengths,
                      Int layer, Floats sinks, Ints windows, Int index, Numbers page, float scale,
                      ffi::Result<Any> out) {
  const Arena arena(memory);
  Attention c = attention_of(q, arena, table, layer, sinks, windows, index, page, scale, *out);
  c.split = kDecodeSplit;
  const int64_t rows = q.dimensions()[0];
  need(c.sequences == rows && is(lengths, {rows}), "lengths");
  std::vector<Queries> queries;
  for (int64_t t = 0; t < rows; t++) {
    const int64_t length = lengths.typed_data()[t];
    if (length > 0) queries.push_back({t, 1, t, length - 1});
  }
  attended(call, c, *out, queries);
}

void prefill_attention(const Call& call, Any q, Any memory, Ints table, Ints row, Ints start,
                       Ints length, Int count, Int layer, Floats sinks, Ints windows, Int index,
                       Numbers page, float scale, ffi::Result<Any> out) {
  const Arena arena(memory);
  const Attention c =
      attention_of(q, arena, table, layer, sinks, windows, index, page, scale, *out);
  Size chunks;
  need(is(row, {chunks}) && is(start, {chunks}) && is(length, {chunks}) && chunks > 0 &&
           q.dimensions()[0] % chunks == 0,
       "chunks");
  const int64_t size = q.dimensions()[0] / chunks;
  std::vector<Queries> queries;
  for (int64_t i = 0; i < used(count, chunks); i++) {
    const int64_t tokens = length.typed_data()[i];
    if (tokens < 1 || tokens > size) {
      throw Refused("a chunk of " + std::to_string(tokens) + " tokens");
    }
    queries.push_back({i * size, tokens, row.typed_data()[i], start.typed_data()[i]});
  }
  attended(call, c, *out, queries);
}

// ---- a layer's small ops

void rms_norm_rows(const Call& call, Any x, Any weights, Int layer, float eps,
                   ffi::Result<Any> out) {
  Size rows, width, layers;
  need(is(x, {rows, width}) && is(weights, {layers, width}) && is(*out, {rows, width}), "shapes");
  const Type type = type_of({x, weights, *out});
  const char* weight = at(weights.untyped_data(), layer_of(layer, layers) * width, type);
  rms_norm(call.pool, call.k, type, x.untyped_data(), weight, rows, width, eps,
           out->untyped_data());
}

void combine_experts(const Call& call, Any residual, Floats y, Floats weights,
                     ffi::Result<Any> out) {
  Size tokens, width, top_k;
  need(is(residual, {tokens, width}) && is(weights, {tokens, top_k}) && top_k > 0 &&
           is(y, {tokens, top_k, width}) && is(*out, {tokens, width}),
       "shapes");
  combine(call.pool, call.k, type_of({residual, *out}), residual.untyped_data(), y.typed_data(),
          weights.typed_data(), tokens, top_k, width, out->untyped_data());
}

// Whether experts can be chosen by the rule: RouteRule.check's, since reads depend on it.
bool fits(const Rule& rule, int64_t experts) {
  if (rule.groups < 1 || rule.top_groups < 1 || rule.top_groups > rule.groups ||
      experts % rule.groups || rule.top_k < 1 || rule.top_k > experts) {
    return false;
  }
  const int64_t size = experts / rule.groups;
  const bool grouped = rule.top_groups < rule.groups;
  return (!grouped || rule.group_best <= size) && rule.top_k <= rule.top_groups * size &&
         (rule.scoring != Scoring::Sparsemixer || rule.top_k == 2);
}

void route_tokens(const Call& call, Floats logits, Flags valid, Floats correction,
                  Int layer, Numbers counts, float scale, float jitter,
                  ffi::Result<Ints> ids, ffi::Result<Floats> weights) {
  Size tokens, experts, layers;
  need(is(logits, {tokens, experts}) && counts.size() == 6, "shapes");
  Rule rule = {};
  rule.scoring = static_cast<Scoring>(counts[0]), rule.top_k = counts[1];
  rule.groups = counts[2], rule.top_groups = counts[3], rule.group_best = counts[4];
  rule.normalize = counts[5], rule.scale = scale, rule.jitter = jitter;
  need(fits(rule, experts), "the rule does not fit");
  const bool corrected = correction.element_count();
  need(is(valid, {tokens}) && is(*ids, {tokens, rule.top_k}) &&
           is(*weights, {tokens, rule.top_k}) && (!corrected || is(correction, {layers, experts})),
       "shapes");
  const float* added =
      corrected ? correction.typed_data() + layer_of(layer, layers) * experts : nullptr;
  route(call.pool, rule, logits.typed_data(), valid.typed_data(), added, tokens, experts,
        ids->typed_data(), weights->typed_data());
}

// What both writers of KV have in common.
Pages pages_of(Numbers page, const Ints& positions, const Floats& frequencies, const Arena& arena,
               const Ints& pages, Int layer, float factor, float eps, int64_t tokens, Type type) {
  Size half;
  need(page.size() == 4 && page[0] > 0 && page[1] > 0 && page[2] > 0, "page");
  need(is(positions, {tokens}) && is(pages, {tokens}) && is(frequencies, {half}), "shapes");
  Pages p = {};
  p.type = type, p.tokens = tokens, p.block_size = page[0], p.head_dim = page[2];
  p.rows_per_token = page[3] ? 1 : 2 * page[1];
  p.arena = arena.data, p.kv_rows = arena.bytes() / (p.head_dim * size_of(type));
  p.positions = positions.typed_data(), p.pages = pages.typed_data(), p.layer = *layer.typed_data();
  OpSpan::layer(p.layer);
  p.frequencies = frequencies.typed_data(), p.half = half, p.factor = factor, p.eps = eps;
  return p;
}

// The runs of an op that advances states of `elements` elements a layer.
StateRuns runs_of(const Arena& arena, int64_t tokens, int64_t elements, const Ints& pages,
                  const Ints& read, const Ints& copy, const Ints& start, const Ints& skip,
                  const Ints& length, Int count, Int layer, Numbers page) {
  Size runs, state_pages;
  need(page.size() == 4 && is(pages, {runs, state_pages}) && is(read, {runs, state_pages}) &&
           is(copy, {runs, state_pages}) && is(start, {runs}) && is(skip, {runs}) &&
           is(length, {runs}) && runs > 0 && tokens % runs == 0,
       "shapes");
  need(page[0] > 0 && page[1] > 0 && page[2] > 0 && page[3] >= 0, "shapes");
  StateRuns s = {};
  s.page_rows = page[0], s.row_elements = page[1], s.layer_rows = page[2], s.first_row = page[3];
  s.layer = *layer.typed_data(), s.state_pages = state_pages;
  OpSpan::layer(s.layer);
  need((s.layer_rows - s.first_row) * s.row_elements >= elements && s.layer >= 0 &&
           (s.layer + 1) * s.layer_rows <= s.state_pages * s.page_rows,
       "the state's pages");
  s.runs = used(count, runs), s.run_tokens = tokens / runs;
  s.arena = arena.data, s.kv_rows = arena.rows * arena.hidden / s.row_elements;
  s.pages = pages.typed_data(), s.read = read.typed_data(), s.copy = copy.typed_data();
  s.start = start.typed_data(), s.skip = skip.typed_data(), s.length = length.typed_data();
  return s;
}

void advance_delta(const Call& call, Any qkv, Any beta, Any decay, Floats conv, Floats a_log,
                   Floats dt_bias, Any memory, Ints pages, Ints read, Ints copy, Ints start,
                   Ints skip, Ints length, Int count, Int layer, Numbers shape, Numbers page,
                   ffi::Result<Any> out, ffi::Result<Any> written) {
  const Arena arena(memory, *written);
  need(shape.size() == 6, "shapes");
  for (int i = 0; i < 5; i++) need(shape[i] > 0, "shapes");
  Delta d = {};
  d.type = type_of({qkv, beta, decay, *out});
  d.key_heads = shape[0], d.value_heads = shape[1], d.key_dim = shape[2], d.value_dim = shape[3];
  d.taps = shape[4], d.each = shape[5];
  const int64_t decays = d.value_heads * (d.each ? d.key_dim : 1);
  const int64_t columns = 2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim;
  Size tokens;
  need(d.value_heads % d.key_heads == 0 && is(qkv, {tokens, columns}) &&
           is(beta, {tokens, d.value_heads}) && is(decay, {tokens, decays}) &&
           is(conv, {columns, d.taps}) && is(a_log, {d.value_heads}) &&
           is(dt_bias, {decays}) && is(*out, {tokens, d.value_heads * d.value_dim}),
       "shapes");
  const int64_t elements = 2 * d.value_heads * d.key_dim * d.value_dim +
                           (d.taps - 1) * columns * size_of(d.type) / 2;
  d.states = runs_of(arena, tokens, elements, pages, read, copy, start, skip, length, count, layer,
                     page);
  d.qkv = qkv.untyped_data(), d.beta = beta.untyped_data(), d.decay = decay.untyped_data();
  d.conv = conv.typed_data(), d.a_log = a_log.typed_data(), d.dt_bias = dt_bias.typed_data();
  d.out = out->untyped_data();
  clear_after(*out, 0, d.type);  // rows without a new token
  gated_delta(call.pool, call.k, d);
}

void advance_conv(const Call& call, Any x, Floats weights, Floats bias, Any memory, Ints pages,
                  Ints read, Ints copy, Ints start, Ints skip, Ints length, Int count, Int layer,
                  Numbers page, int64_t silu, ffi::Result<Any> out, ffi::Result<Any> written) {
  const Arena arena(memory, *written);
  Size tokens, width, taps;
  need(is(x, {tokens, width}) && is(weights, {width, taps}) && is(bias, {width}) &&
           is(*out, {tokens, width}) && taps > 0,
       "shapes");
  ShortConv c = {};
  c.type = type_of({x, *out}), c.width = width, c.taps = taps;
  const int64_t elements = (taps - 1) * width * size_of(c.type) / 2;
  c.states = runs_of(arena, tokens, elements, pages, read, copy, start, skip, length, count, layer,
                     page);
  c.x = x.untyped_data(), c.weights = weights.typed_data(), c.out = out->untyped_data();
  c.bias = bias.typed_data(), c.silu = silu;
  clear_after(*out, 0, c.type);
  short_conv(call.pool, call.k, c);
}

void advance_scan(const Call& call, Any xbc, Any dt, Floats a_log, Floats dt_bias, Floats skip_in,
                  Any memory, Ints pages, Ints read, Ints copy, Ints start, Ints skip, Ints length,
                  Int count, Int layer, Numbers shape, float least, float most, Numbers page,
                  ffi::Result<Any> out, ffi::Result<Any> written) {
  const Arena arena(memory, *written);
  need(shape.size() == 5, "shapes");
  for (int i = 0; i < 4; i++) need(shape[i] > 0, "shapes");
  Scan s = {};
  s.type = type_of({xbc, dt, *out}), s.least = least, s.most = most;
  s.heads = shape[0], s.values = shape[1], s.groups = shape[2], s.keys = shape[3];
  s.each = shape[4];
  const int64_t columns = s.heads * s.values, rates = s.rates();
  Size tokens;
  need(s.heads % s.groups == 0 && is(xbc, {tokens, columns + 2 * s.groups * s.keys}) &&
           is(dt, {tokens, rates}) && (s.each ? is(a_log, {rates, s.keys}) : is(a_log, {rates})) &&
           is(dt_bias, {rates}) && is(skip_in, {rates}) && is(*out, {tokens, columns}),
       "shapes");
  s.states = runs_of(arena, tokens, 2 * columns * s.keys, pages, read, copy, start, skip, length,
                     count, layer, page);
  s.xbc = xbc.untyped_data(), s.dt = dt.untyped_data(), s.out = out->untyped_data();
  s.a_log = a_log.typed_data(), s.dt_bias = dt_bias.typed_data(), s.skip = skip_in.typed_data();
  clear_after(*out, 0, s.type);
  selective_scan(call.pool, call.k, s);
}

void write_heads(const Call& call, Any qkv, Any q_norm, Any k_norm, Int stack_layer,
                 Ints positions, Floats frequencies, Any memory, Ints pages, Int layer,
                 Numbers page, float factor, float eps, ffi::Result<Any> q,
                 ffi::Result<Any> written) {
  Size tokens, values, heads, layers;
  const Arena arena(memory, *written);
  const Type type = type_of({qkv, q_norm, k_norm, *q});
  need(is(qkv, {tokens, values}), "shapes");
  const Pages p = pages_of(page, positions, frequencies, arena, pages, layer, factor, eps, tokens,
                           type);
  const int64_t kv_heads = page[1];
  const bool normed = q_norm.element_count();
  need(!page[3] && 2 * p.half == p.head_dim && is(*q, {tokens, heads, p.head_dim}) &&
           values == (heads + 2 * kv_heads) * p.head_dim && is(q_norm, {layers, p.head_dim}) &&
           is(k_norm, {layers, p.head_dim}),
       "shapes");
  Heads h = {heads, kv_heads, qkv.untyped_data(), nullptr, nullptr, q->untyped_data()};
  if (normed) {
    const int64_t first = layer_of(stack_layer, layers) * p.head_dim;
    h.q_norm = at(q_norm.untyped_data(), first, type);
    h.k_norm = at(k_norm.untyped_data(), first, type);
  }
  kv_write(call.pool, call.k, p, h);
}

void write_latent(const Call& call, Any kv, Any norm, Int stack_layer, Any q_rope,
                  Ints positions, Floats frequencies, Any memory, Ints pages, Int layer,
                  Numbers page, float factor, float eps, int64_t interleave,
                  ffi::Result<Any> out, ffi::Result<Any> written) {
  Size tokens, values, heads, layers, latent;
  const Arena arena(memory, *written);
  const Type type = type_of({kv, norm, q_rope, *out});
  need(is(kv, {tokens, values}), "shapes");
  const Pages p = pages_of(page, positions, frequencies, arena, pages, layer, factor, eps, tokens,
                           type);
  const int64_t rope = 2 * p.half;
  need(page[3] > 0 && page[1] == 1 && is(norm, {layers, latent}) && latent == page[3] &&
           latent + rope == p.head_dim && values == p.head_dim &&
           is(q_rope, {tokens, heads, rope}) && is(*out, {tokens, heads, rope}),
       "shapes");
  Latent l = {};
  l.latent = latent, l.heads = heads, l.interleave = interleave;
  l.norm = at(norm.untyped_data(), layer_of(stack_layer, layers) * latent, type);
  l.kv = kv.untyped_data(), l.q_rope = q_rope.untyped_data(), l.out = out->untyped_data();
  latent_write(call.pool, call.k, p, l);
}

bool are(std::initializer_list<Ints> tables, std::initializer_list<Dimension> dims) {
  return std::all_of(tables.begin(), tables.end(), [&](const Ints& one) { return is(one, dims); });
}

using IntsOut = ffi::Result<Ints>;
using IntOut = ffi::Result<Int>;

void plan_layer(const Call&, Ints cell_row, Ints cell_version, Ints owner, Ints last_used,
                Ints address, Ints version, Ints frequency, Ints fill_version, Ints prior,
                Ints clock, Ints weights, Int layer, Flags due, IntsOut owner_out,
                IntsOut last_used_out, IntsOut address_out, IntsOut version_out,
                IntsOut frequency_out, IntsOut clock_out, IntsOut active,
                IntsOut fill_expert, IntsOut fill_row, IntsOut fill_list_version,
                IntOut active_count, IntOut fill_count, IntOut hits, IntOut read_through) {
  Size layers, cells, experts;
  need(are({cell_row, cell_version, owner, last_used, *owner_out, *last_used_out},
           {layers, cells}) &&
           are({address, version, frequency, fill_version, prior, *address_out, *version_out,
                *frequency_out},
               {layers, experts}) &&
           are({clock, *clock_out}, {layers}) && are({weights}, {3}) && is(due, {experts}) &&
           are({*active, *fill_expert, *fill_row, *fill_list_version}, {experts}),
       "shapes");
  plan({layers, cells, experts, *layer.typed_data(), cell_row.typed_data(),
        cell_version.typed_data(), changed(owner, owner_out), changed(last_used, last_used_out),
        changed(address, address_out), changed(version, version_out),
        changed(frequency, frequency_out), fill_version.typed_data(), prior.typed_data(),
        changed(clock, clock_out), weights.typed_data(), due.typed_data(), active->typed_data(),
        fill_expert->typed_data(), fill_row->typed_data(), fill_list_version->typed_data(),
        active_count->typed_data(), fill_count->typed_data(), hits->typed_data(),
        read_through->typed_data()});
}

void draw_tokens(const Call& call, Floats logits, Flags wanted, Floats temperature, Ints top_k,
                 Floats top_p, Words far, Words keys, IntsOut ids, ffi::Result<Floats> scaled,
                 ffi::Result<Words> bits) {
  Size rows, vocabulary;
  need(is(logits, {rows, vocabulary}) && is(wanted, {rows}) && is(temperature, {rows}) &&
           is(top_k, {rows}) && is(top_p, {rows}) && is(far, {rows}) && is(keys, {rows, 2}) &&
           is(*ids, {rows, kCandidates}) && is(*scaled, {rows, kCandidates}) &&
           is(*bits, {rows, kCandidates}) && vocabulary > 0 && vocabulary < 1 << 24,
       "shapes");
  std::memset(ids->typed_data(), 0, ids->size_bytes());
  std::memset(scaled->typed_data(), 0, scaled->size_bytes());
  std::memset(bits->typed_data(), 0, bits->size_bytes());
  draw(call.pool, call.k,
       {rows, vocabulary, logits.typed_data(), wanted.typed_data(), temperature.typed_data(),
        top_p.typed_data(), top_k.typed_data(), far.typed_data(), keys.typed_data(),
        ids->typed_data(), scaled->typed_data(), bits->typed_data()});
}

void choose_tokens(const Call& call, Floats logits, Ints tokens, Flags update, IntsOut out) {
  Size rows, vocabulary, all;
  need(is(logits, {rows, vocabulary}) && is(tokens, {all}) && is(update, {rows}) &&
           is(*out, {all}) && rows <= all && vocabulary > 0,
       "shapes");
  choose_likeliest(call.pool, {rows, vocabulary, logits.typed_data(), update.typed_data(),
                               changed(tokens, out)});
}

void rank_tokens(const Call& call, Floats logits, Ints tokens, ffi::Result<Floats> chosen,
                 IntsOut ranks, IntsOut top_ids, ffi::Result<Floats> top) {
  Size rows, vocabulary, most;
  need(is(logits, {rows, vocabulary}) && is(tokens, {rows}) && is(*chosen, {rows}) &&
           is(*ranks, {rows}) && is(*top_ids, {rows, most}) && is(*top, {rows, most}) &&
           most <= vocabulary,
       "shapes");
  std::memset(chosen->typed_data(), 0, chosen->size_bytes());
  std::memset(ranks->typed_data(), 0, ranks->size_bytes());
  std::memset(top_ids->typed_data(), 0, top_ids->size_bytes());
  std::memset(top->typed_data(), 0, top->size_bytes());
  rank(call.pool, call.k,
       {rows, vocabulary, most, logits.typed_data(), tokens.typed_data(), chosen->typed_data(),
        top->typed_data(), ranks->typed_data(), top_ids->typed_data()});
}

}  // namespace

MOEJAX_EXPORT const char* moejax_cpu_sources() { return MOEJAX_SOURCES; }
MOEJAX_EXPORT const char* moejax_cpu_isa() {
  const Kernels* kernels = select_kernels();
  return kernels ? kernels->name : "";
}
MOEJAX_EXPORT const char* moejax_cpu_isa_error() { return select_error(); }

MOEJAX_HANDLER(linear, linear, "row_tile")
MOEJAX_HANDLER(linear_codes, linear_codes, "row_tile", "layers", "formats", "parts")
MOEJAX_HANDLER(head_linear, head_linear, "row_tile", "first", "transposed")
MOEJAX_HANDLER(expert_ffn, expert_ffn, "activation", "limit", "alpha", "width", "formats", "places", "threads")
MOEJAX_HANDLER(gated_delta, advance_delta, "shape", "page")
MOEJAX_HANDLER(short_conv, advance_conv, "page", "silu")
MOEJAX_HANDLER(selective_scan, advance_scan, "shape", "least", "most", "page")
MOEJAX_HANDLER(fill, fill_cells, "width", "formats", "places", "ahead")
MOEJAX_HANDLER(unpack, unpack_cells, "width", "packed")
MOEJAX_HANDLER(drain, drain)
MOEJAX_HANDLER(move, move_rows, "width")
MOEJAX_HANDLER(read, read_rows, "width", "rows")
MOEJAX_HANDLER(write, write_rows, "width", "rows")
MOEJAX_HANDLER(decode_attention, decode_attention, "page", "scale")
MOEJAX_HANDLER(prefill_attention, prefill_attention, "page", "scale")
MOEJAX_HANDLER(rms_norm, rms_norm_rows, "eps")
MOEJAX_HANDLER(combine, combine_experts)
MOEJAX_HANDLER(route, route_tokens, "counts", "scale", "jitter")
MOEJAX_HANDLER(kv_write, write_heads, "page", "factor", "eps")
MOEJAX_HANDLER(latent_write, write_latent, "page", "factor", "eps", "interleave")
MOEJAX_HANDLER(plan, plan_layer)
MOEJAX_HANDLER(draw, draw_tokens)
MOEJAX_HANDLER(rank, rank_tokens)
MOEJAX_HANDLER(likeliest, choose_tokens)

}  // namespace moejax
