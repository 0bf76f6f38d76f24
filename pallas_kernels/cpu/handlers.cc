// The ops as XLA calls them (jax.ffi): checks of what could be read out of bounds, then the op.
// Shapes are static and checked against each other here; addresses and ids come from tables, and
// the ops check them before they read.
#include <vector>

#include "pallas_kernels/cpu/binding.h"
#include "pallas_kernels/expert_ffn/cpu.h"
#include "pallas_kernels/fill/cpu.h"
#include "pallas_kernels/head_linear/cpu.h"
#include "pallas_kernels/linear/cpu.h"
#include "pallas_kernels/move/cpu.h"
#include "pallas_kernels/paged_attention/cpu.h"

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

std::string linear(const Call& call, Any x, Any w, Int layer, Any bias, Int tiles,
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
  multiply(call.pool, call.k, &p, 1);
  clear_after(*y, p.tokens * p.outputs, p.out_type);
  return "";
}

std::string head_linear(const Call& call, Any x, Any w, Int layer, Int tiles, int64_t row_tile,
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
  if (transposed) {
    HeadProducts p = {type, tokens, heads, rows, columns, first, count, weights};
    p.x = x.untyped_data(), p.y = y->untyped_data();
    multiply_transposed(call.pool, call.k, p);
  } else {
    Product p = {};
    p.type = p.out_type = type, p.tokens = tokens, p.inputs = inputs, p.outputs = outputs;
    p.x_stride = heads * inputs, p.y_stride = heads * outputs;
    std::vector<Product> products(heads, p);
    for (int64_t h = 0; h < heads; h++) {
      products[h].x = at(x.untyped_data(), h * inputs, type);
      products[h].w = at(weights, (h * rows + first) * columns, type);
      products[h].y = at(y->untyped_data(), h * outputs, type);
    }
    multiply(call.pool, call.k, products.data(), heads);
  }
  clear_after(*y, tokens * heads * outputs, type);
  return "";
}

// ---- expert_ffn

constexpr int64_t kFields = 13;  // of a format: pallas_kernels/expert_ffn/cpu.py writes them

Format format_of(const int64_t* field, int64_t hidden, int64_t width, Type type) {
  Format f = {};
  f.version = static_cast<Version>(field[0]);
  f.rows = field[1], f.hidden = hidden, f.width = width, f.type = type;
  f.group_in = field[2], f.group_out = field[3], f.blocks = field[4], f.escapes = field[5];
  for (int m = 0; m < 3; m++) f.codes[m] = field[6 + m], f.extra[m] = field[9 + m];
  f.tables = field[12];
  return f;
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

// The versions of a call and their stores; places: of their layers.
std::vector<StoredVersion> versions_of(const ffi::RemainingArgs& stores, Numbers formats,
                                       Numbers places, int64_t hidden, int64_t width, Type type) {
  const int64_t count = static_cast<int64_t>(stores.size());
  need(count && formats.size() == static_cast<size_t>(2 * kFields * count) &&
           places.size() % count == 0,
       "formats");
  const int64_t layers = static_cast<int64_t>(places.size()) / count;
  std::vector<StoredVersion> versions(count);
  for (int64_t v = 0; v < count; v++) {
    const auto store = stores.get<Any>(v);
    if (!store) throw Refused(store.error().message());
    const int64_t* fields = formats.begin() + 2 * kFields * v;
    Size sizes[4];
    StoredVersion& mine = versions[v];
    mine.store = store_of(*store, sizes), mine.layers = sizes[0], mine.experts = sizes[1];
    mine.cell = format_of(fields, hidden, width, type);
    mine.held = format_of(fields + kFields, hidden, width, type);
    mine.places.assign(places.begin() + layers * v, places.begin() + layers * (v + 1));
    need(sizes[2] == mine.held.rows && sizes[3] == hidden, "the shape of a store");
  }
  return versions;
}

std::string expert_ffn(const Call& call, Floats given, Any x, Ints ids, Any memory, Int layer,
                       Ints address, Ints version, Ints active, Int active_count,
                       ffi::RemainingArgs stores, int64_t activation, int64_t width,
                       Numbers formats, Numbers places, int64_t most_threads,
                       ffi::Result<Floats> y) {
  Size tokens, hidden, top_k, layers, experts;
  const Arena arena(memory);
  need(is(x, {tokens, hidden}) && is(ids, {tokens, top_k}) && is(address, {layers, experts}) &&
           is(version, {layers, experts}) && arena.hidden == hidden &&
           given.element_count() == static_cast<size_t>(tokens * top_k * hidden) &&
           y->element_count() == given.element_count() &&
           places.size() == layers * stores.size(),
       "shapes");
  Experts c = {};
  c.type = type_of({x}), c.activation = static_cast<Activation>(activation);
  c.tokens = tokens, c.hidden = hidden, c.top_k = top_k, c.width = width;
  c.layers = layers, c.experts = experts;
  const auto versions = versions_of(stores, formats, places, hidden, width, c.type);
  for (const StoredVersion& mine : versions) need(mine.experts == experts, "the shape of a store");
  c.versions = versions.data(), c.version_count = static_cast<int64_t>(versions.size());
  c.x = x.untyped_data(), c.ids = ids.typed_data(), c.layer = *layer.typed_data();
  c.arena = arena.data, c.arena_rows = arena.rows;
  c.supply = arena.supply(), c.writes = arena.writes();
  c.address = address.typed_data(), c.version = version.typed_data();
  c.active = active.typed_data(), c.active_count = used(active_count, active.element_count());
  c.y = changed(given, y);
  PartOfPool pool(call.pool, most_threads);
  return run_experts(pool, call.k, c);
}

// ---- fill and what else moves records and pages

std::string fill_cells(const Call& call, Any memory, Int layer, Ints expert, Ints row,
                       Ints version, Int count, ffi::RemainingArgs stores, int64_t width,
                       Numbers formats, Numbers places, int64_t ahead, ffi::Result<Any> written) {
  const Arena arena(memory, *written);
  Size listed;
  need(is(expert, {listed}) && is(row, {listed}) && is(version, {listed}), "shapes");
  Fills f = {};
  // Only lossless12 is decoded on the way, which holds bfloat16.
  f.versions = versions_of(stores, formats, places, arena.hidden, width, Type::BF16);
  f.arena = arena.data, f.arena_rows = arena.rows, f.hidden = arena.hidden;
  f.layer = *layer.typed_data(), f.expert = expert.typed_data(), f.row = row.typed_data();
  f.version = version.typed_data(), f.count = used(count, listed);
  f.supply = arena.supply(), f.ahead = ahead != 0;
  return fill(call.pool, call.k, f);
}

// Packed residents into dense cells, by the queue: pallas_kernels/fill/unpack.py. Rows of the arena
// that are not there are an error, before anything is queued.
std::string unpack_cells(const Call&, Any memory, Int layer, Ints expert, Ints source, Ints row,
                         Int count, int64_t width, Numbers packed, ffi::Result<Any> written) {
  const Arena arena(memory, *written);
  Size listed;
  need(is(expert, {listed}) && is(source, {listed}) && is(row, {listed}) &&
           packed.size() == kFields,
       "shapes");
  need(arena.supply(), "there is no queue");
  const Format format = format_of(packed.begin(), arena.hidden, width, Type::BF16);
  const int64_t n = used(count, listed);
  for (int64_t i = 0; i < n; i++) {
    const int64_t from = source.typed_data()[i], to = row.typed_data()[i];
    if (from < 0 || from > arena.rows - format.rows || to < 0 || to > arena.rows - 3 * width) {
      return "entry " + std::to_string(i) + " goes from row " + std::to_string(from) + " to row " +
             std::to_string(to) + " of an arena of " + std::to_string(arena.rows) + " rows";
    }
  }
  for (int64_t i = 0; i < n; i++) {
    const int64_t from = source.typed_data()[i], to = row.typed_data()[i];
    arena.supply()->unpack(format, *layer.typed_data(), expert.typed_data()[i],
                           arena.data + from * arena.hidden, to, arena.data + to * arena.hidden);
  }
  return "";
}

// Waits until nothing flies into the arena; failed: 1 where the cell from that row on is not what
// was to come.
std::string drain(const Call&, Any memory, Ints cell_row, ffi::Result<Any> written,
                  ffi::Result<Ints> failed) {
  const Arena arena(memory, *written);
  const size_t count = cell_row.element_count();
  need(failed->element_count() == count, "shapes");
  std::set<int64_t> cells;
  if (arena.supply()) cells = arena.supply()->queue->drain();
  for (size_t i = 0; i < count; i++) {
    failed->typed_data()[i] = cells.count(cell_row.typed_data()[i]);
  }
  return "";
}

// Rows of `width` elements of the arena as it is: those of cells, or of KV.
Rows rows_of(const Arena& arena, int64_t width) {
  need(width > 0, "shapes");
  return {arena.data, width, arena.rows * arena.hidden / width};
}

std::string move_rows(const Call& call, Any memory, Ints source, Ints target, Ints rows,
                      int64_t width, ffi::Result<Any> written) {
  const Arena arena(memory, *written);
  Size listed;
  need(is(source, {listed}) && is(target, {listed}) && is(rows, {listed}), "shapes");
  return move(call.pool, rows_of(arena, width), source.typed_data(), target.typed_data(),
              rows.typed_data(), listed);
}

using Page = ffi::Buffer<ffi::U16, 1>;

std::string read_rows(const Call& call, Any memory, Ints first, int64_t width, int64_t rows,
                      ffi::RemainingRets pages) {
  const Arena arena(memory);
  std::vector<uint16_t*> to(pages.size());
  need(is(first, {static_cast<int64_t>(to.size())}), "shapes");
  for (size_t i = 0; i < to.size(); i++) {
    auto page = pages.get<Page>(i);
    need(page && is(**page, {rows * width}), "the shape of a result");
    to[i] = (*page)->typed_data();
  }
  return read(call.pool, rows_of(arena, width), first.typed_data(), rows, to);
}

std::string write_rows(const Call& call, Any memory, Ints first, Int count,
                       ffi::RemainingArgs pages, int64_t width, int64_t rows,
                       ffi::Result<Any> written) {
  const Arena arena(memory, *written);
  std::vector<const uint16_t*> from(used(count, pages.size()));
  need(is(first, {static_cast<int64_t>(pages.size())}), "shapes");
  for (size_t i = 0; i < from.size(); i++) {
    const auto page = pages.get<Page>(i);
    need(page && is(*page, {rows * width}), "the shape of a page");
    from[i] = page->typed_data();
  }
  return write(call.pool, rows_of(arena, width), first.typed_data(), rows, from);
}

// ---- paged_attention

// What decode and prefill share.
Attention attention_of(const Any& q, const Arena& arena, const Ints& table, Int layer, Numbers page,
                       int64_t window, float scale, Any& out) {
  Size rows, heads, sequences, blocks;
  need(page.size() == 4, "page");
  Attention c = {};
  c.block_size = page[0], c.kv_heads = page[1], c.head_dim = page[2], c.latent = page[3];
  c.window = window, c.scale = scale, c.type = type_of({q, out});
  const int64_t value_dim = c.latent ? c.latent : c.head_dim;
  need(c.block_size > 0 && c.kv_heads > 0 && is(q, {rows, heads, c.head_dim}) &&
           is(table, {sequences, blocks}) && heads % c.kv_heads == 0 && value_dim <= c.head_dim &&
           (!c.latent || c.kv_heads == 1) && is(out, {rows, heads * value_dim}),
       "shapes");
  c.heads = heads, c.sequences = sequences, c.blocks = blocks;
  c.q = q.untyped_data(), c.arena = arena.data, c.out = out.untyped_data();
  c.kv_rows = arena.bytes() / (c.head_dim * size_of(c.type));
  c.block_table = table.typed_data(), c.layer = *layer.typed_data();
  return c;
}

std::string attended(const Call& call, const Attention& c, Any& out,
                     const std::vector<Queries>& queries) {
  clear_after(out, 0, c.type);  // rows without a query
  return attend(call.pool, call.k, c, queries);
}

std::string decode_attention(const Call& call, Any q, Any memory, Ints table, Ints lengths,
                             Int layer, Numbers page, int64_t window, float scale,
                             ffi::Result<Any> out) {
  const Arena arena(memory);
  const Attention c = attention_of(q, arena, table, layer, page, window, scale, *out);
  const int64_t rows = q.dimensions()[0];
  need(c.sequences == rows && is(lengths, {rows}), "lengths");
  std::vector<Queries> queries;
  for (int64_t t = 0; t < rows; t++) {
    const int64_t length = lengths.typed_data()[t];
    if (length > 0) queries.push_back({t, 1, t, length - 1});
  }
  return attended(call, c, *out, queries);
}

std::string prefill_attention(const Call& call, Any q, Any memory, Ints table, Ints row, Ints start,
                              Ints length, Int count, Int layer, Numbers page, int64_t window,
                              float scale, ffi::Result<Any> out) {
  const Arena arena(memory);
  const Attention c = attention_of(q, arena, table, layer, page, window, scale, *out);
  Size chunks;
  need(is(row, {chunks}) && is(start, {chunks}) && is(length, {chunks}) && chunks > 0 &&
           q.dimensions()[0] % chunks == 0,
       "chunks");
  const int64_t size = q.dimensions()[0] / chunks;
  std::vector<Queries> queries;
  for (int64_t i = 0; i < used(count, chunks); i++) {
    const int64_t tokens = length.typed_data()[i];
    if (tokens < 1 || tokens > size) return "a chunk of " + std::to_string(tokens) + " tokens";
    queries.push_back({i * size, tokens, row.typed_data()[i], start.typed_data()[i]});
  }
  return attended(call, c, *out, queries);
}

}  // namespace

MOEJAX_EXPORT const char* moejax_cpu_sources() { return MOEJAX_SOURCES; }
MOEJAX_EXPORT const char* moejax_cpu_isa() {
  const Kernels* kernels = select_kernels();
  return kernels ? kernels->name : "";
}
MOEJAX_EXPORT const char* moejax_cpu_isa_error() { return select_error(); }

MOEJAX_HANDLER(linear, linear, "row_tile")
MOEJAX_HANDLER(head_linear, head_linear, "row_tile", "first", "transposed")
MOEJAX_HANDLER(expert_ffn, expert_ffn, "activation", "width", "formats", "places", "threads")
MOEJAX_HANDLER(fill, fill_cells, "width", "formats", "places", "ahead")
MOEJAX_HANDLER(unpack, unpack_cells, "width", "packed")
MOEJAX_HANDLER(drain, drain)
MOEJAX_HANDLER(move, move_rows, "width")
MOEJAX_HANDLER(read, read_rows, "width", "rows")
MOEJAX_HANDLER(write, write_rows, "width", "rows")
MOEJAX_HANDLER(decode_attention, decode_attention, "page", "window", "scale")
MOEJAX_HANDLER(prefill_attention, prefill_attention, "page", "window", "scale")

}  // namespace moejax
