// The ops as XLA calls them (jax.ffi): checks of what could be read out of bounds, then the op.
// Shapes are static and checked against each other here; addresses and ids come from tables, and
// the ops check them before they read.
#include <cstring>
#include <string>
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
  const int64_t rows = std::max<int64_t>(*tiles.typed_data(), 0) * row_tile;
  return std::min(rows, tokens);
}

ffi::Error linear(ffi::ThreadPool threads, Any x, Any w, Int layer, Any bias, Int tiles,
                  int64_t row_tile, ffi::Result<Any> y) {
  Product p = {};
  if (x.dimensions().size() != 2 || w.dimensions().size() != 3) return invalid("linear: ranks");
  const int64_t tokens = x.dimensions()[0], layers = w.dimensions()[0];
  p.inputs = x.dimensions()[1], p.outputs = w.dimensions()[1];
  p.tokens = needed(tiles, row_tile, tokens);
  const bool biased = bias.element_count();
  if (!type_of(x.element_type(), p.type) || !type_of(y->element_type(), p.out_type) ||
      w.element_type() != x.element_type() || bias.element_type() != x.element_type()) {
    return invalid("linear: dtypes");
  }
  if (w.dimensions()[2] != p.inputs || !is(*y, {tokens, p.outputs}) ||
      (biased && !is(bias, {layers, p.outputs}))) {
    return invalid("linear: shapes");
  }
  const int64_t index = *layer.typed_data();
  if (index < 0 || index >= layers) return invalid("linear: layer " + std::to_string(index));
  p.x = x.untyped_data(), p.x_stride = p.inputs, p.y_stride = p.outputs;
  p.w = at(w.untyped_data(), index * p.outputs * p.inputs, p.type);
  p.bias = biased ? at(bias.untyped_data(), index * p.outputs, p.type) : nullptr;
  p.y = y->untyped_data();
  return run(threads, [&](Pool& pool, const Kernels& kernels) {
    multiply(pool, kernels, &p, 1);
    const int64_t done = p.tokens * p.outputs * size_of(p.out_type);
    std::memset(static_cast<char*>(p.y) + done, 0, y->size_bytes() - done);
    return std::string();
  });
}

ffi::Error head_linear(ffi::ThreadPool threads, Any x, Any w, Int layer, Int tiles,
                       int64_t row_tile, int64_t first, int64_t transposed, ffi::Result<Any> y) {
  if (x.dimensions().size() != 3 || w.dimensions().size() != 4 || y->dimensions().size() != 3) {
    return invalid("head_linear: ranks");
  }
  const int64_t all = x.dimensions()[0], heads = x.dimensions()[1], inputs = x.dimensions()[2];
  const int64_t rows = w.dimensions()[2], columns = w.dimensions()[3], outputs = y->dimensions()[2];
  const int64_t tokens = needed(tiles, row_tile, all), count = transposed ? inputs : outputs;
  Type type;
  if (!type_of(x.element_type(), type) || w.element_type() != x.element_type() ||
      y->element_type() != x.element_type()) {
    return invalid("head_linear: dtypes");
  }
  if (w.dimensions()[1] != heads || (transposed ? outputs : inputs) != columns || first < 0 ||
      first + count > rows || !is(*y, {all, heads, outputs})) {
    return invalid("head_linear: shapes");
  }
  const int64_t index = *layer.typed_data();
  if (index < 0 || index >= w.dimensions()[0]) {
    return invalid("head_linear: layer " + std::to_string(index));
  }
  const char* weights = at(w.untyped_data(), index * heads * rows * columns, type);
  char* out = static_cast<char*>(y->untyped_data());
  return run(threads, [&](Pool& pool, const Kernels& kernels) {
    if (transposed) {
      HeadProducts p = {type, tokens, heads, rows, columns, first, count, weights};
      p.x = x.untyped_data(), p.y = out;
      multiply_transposed(pool, kernels, p);
    } else {
      Product p = {};
      p.type = p.out_type = type, p.tokens = tokens, p.inputs = inputs, p.outputs = outputs;
      p.x_stride = heads * inputs, p.y_stride = heads * outputs;
      std::vector<Product> products(heads, p);
      for (int64_t h = 0; h < heads; h++) {
        products[h].x = at(x.untyped_data(), h * inputs, type);
        products[h].w = at(weights, (h * rows + first) * columns, type);
        products[h].y = const_cast<char*>(at(out, h * outputs, type));
      }
      multiply(pool, kernels, products.data(), heads);
    }
    const int64_t done = tokens * heads * outputs * size_of(type);
    std::memset(out + done, 0, y->size_bytes() - done);
    return std::string();
  });
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
bool store_of(const Any& store, int64_t* sizes, const uint16_t*& records) {
  const auto dims = store.dimensions();
  if (store.element_type() == ffi::DataType::U16 && dims.size() == 4) {
    std::copy(dims.begin(), dims.end(), sizes);
    records = static_cast<const uint16_t*>(store.untyped_data());
    return true;
  }
  if (store.element_type() != ffi::DataType::S32 || !is(store, {4})) return false;
  std::copy_n(static_cast<const int32_t*>(store.untyped_data()), 4, sizes);
  return true;
}

// The versions of a call and their stores; places: of their layers. Returns what is wrong.
std::string versions_of(const ffi::RemainingArgs& stores, Numbers formats, Numbers places,
                        int64_t hidden, int64_t width, Type type,
                        std::vector<StoredVersion>& versions) {
  const int64_t count = static_cast<int64_t>(stores.size());
  if (!count || static_cast<int64_t>(formats.size()) != 2 * kFields * count ||
      places.size() % stores.size()) {
    return "formats";
  }
  const int64_t layers = static_cast<int64_t>(places.size()) / count;
  versions.resize(count);
  for (int64_t v = 0; v < count; v++) {
    const auto store = stores.get<Any>(v);
    if (!store) return store.error().message();
    int64_t sizes[4];
    const uint16_t* records = nullptr;
    if (!store_of(*store, sizes, records)) return "the shape of a store";
    const int64_t* fields = formats.begin() + 2 * kFields * v;
    StoredVersion& mine = versions[v];
    mine.cell = format_of(fields, hidden, width, type);
    mine.held = format_of(fields + kFields, hidden, width, type);
    mine.store = records, mine.layers = sizes[0], mine.experts = sizes[1];
    mine.places.assign(places.begin() + layers * v, places.begin() + layers * (v + 1));
    if (sizes[2] != mine.held.rows || sizes[3] != hidden) return "the shape of a store";
  }
  return "";
}

ffi::Error expert_ffn(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> given, Any x, Ints ids,
                      Any memory, Int layer, Ints address, Ints version,
                      Ints active, Int active_count, ffi::RemainingArgs stores, int64_t activation,
                      int64_t width, Numbers formats, Numbers places, int64_t most_threads,
                      ffi::Result<ffi::Buffer<ffi::F32>> y) {
  Experts c = {};
  if (x.dimensions().size() != 2 || ids.dimensions().size() != 2 ||
      address.dimensions().size() != 2) {
    return invalid("expert_ffn: ranks");
  }
  c.tokens = x.dimensions()[0], c.hidden = x.dimensions()[1], c.top_k = ids.dimensions()[1];
  c.layers = address.dimensions()[0], c.experts = address.dimensions()[1];
  c.width = width, c.activation = static_cast<Activation>(activation);
  const Arena arena(memory);
  if (!arena.wrong.empty()) return invalid("expert_ffn: " + arena.wrong);
  c.arena_rows = arena.rows;
  c.version_count = static_cast<int64_t>(stores.size());
  if (!type_of(x.element_type(), c.type)) return invalid("expert_ffn: dtypes");
  if (!is(ids, {c.tokens, c.top_k}) || !is(version, {c.layers, c.experts}) ||
      given.element_count() != static_cast<size_t>(c.tokens * c.top_k * c.hidden) ||
      y->element_count() != given.element_count() || arena.hidden != c.hidden ||
      static_cast<int64_t>(places.size()) != c.layers * c.version_count) {
    return invalid("expert_ffn: shapes");
  }
  std::vector<StoredVersion> versions;
  const std::string wrong =
      versions_of(stores, formats, places, c.hidden, width, c.type, versions);
  if (!wrong.empty()) return invalid("expert_ffn: " + wrong);
  for (const StoredVersion& mine : versions) {
    if (mine.experts != c.experts) return invalid("expert_ffn: the shape of a store");
  }
  c.x = x.untyped_data(), c.ids = ids.typed_data(), c.arena = arena.data;
  c.versions = versions.data(), c.layer = *layer.typed_data();
  c.address = address.typed_data(), c.version = version.typed_data();
  c.active = active.typed_data();
  const int64_t listed = static_cast<int64_t>(active.element_count());
  c.active_count = std::min<int64_t>(std::max(*active_count.typed_data(), 0), listed);
  c.y = y->typed_data();
  c.supply = arena.supply(), c.writes = arena.writes();
  if (given.typed_data() != c.y) std::memcpy(c.y, given.typed_data(), given.size_bytes());
  return run(threads, [&](Pool& all, const Kernels& kernels) {
    PartOfPool pool(all, most_threads);
    const std::string wrong = run_experts(pool, kernels, c);
    return wrong.empty() ? wrong : "expert_ffn: " + wrong;
  });
}

// ---- fill and what else moves records and pages

ffi::Error fill_cells(ffi::ThreadPool threads, Any memory, Int layer, Ints expert, Ints row,
                      Ints version, Int count, ffi::RemainingArgs stores, int64_t width,
                      Numbers formats, Numbers places, int64_t ahead, ffi::Result<Any> written) {
  const Arena arena(memory, *written);
  if (!arena.wrong.empty()) return invalid("fill: " + arena.wrong);
  const int64_t listed = static_cast<int64_t>(expert.element_count());
  if (!is(expert, {listed}) || !is(row, {listed}) || !is(version, {listed})) {
    return invalid("fill: shapes");
  }
  Fills f = {};
  // Only lossless12 is decoded on the way, which holds bfloat16.
  const std::string wrong =
      versions_of(stores, formats, places, arena.hidden, width, Type::BF16, f.versions);
  if (!wrong.empty()) return invalid("fill: " + wrong);
  f.arena = arena.data, f.arena_rows = arena.rows, f.hidden = arena.hidden;
  f.layer = *layer.typed_data(), f.expert = expert.typed_data(), f.row = row.typed_data();
  f.version = version.typed_data();
  f.count = std::min<int64_t>(std::max(*count.typed_data(), 0), listed);
  f.supply = arena.supply(), f.ahead = ahead != 0;
  return run(threads, [&](Pool& pool, const Kernels& kernels) {
    const std::string wrong = fill(pool, kernels, f);
    return wrong.empty() ? wrong : "fill: " + wrong;
  });
}

// Packed residents into dense cells, by the queue: pallas_kernels/fill/unpack.py. Rows of the arena
// that are not there are an error, before anything is queued.
ffi::Error unpack_cells(Any memory, Int layer, Ints expert, Ints source, Ints row, Int count,
                        int64_t width, Numbers packed, ffi::Result<Any> written) {
  const Arena arena(memory, *written);
  if (!arena.wrong.empty()) return invalid("unpack: " + arena.wrong);
  const int64_t listed = static_cast<int64_t>(expert.element_count());
  if (!is(source, {listed}) || !is(row, {listed}) || packed.size() != kFields) {
    return invalid("unpack: shapes");
  }
  if (!arena.supply() || !select_kernels()) return invalid("unpack: there is no queue");
  const Format format = format_of(packed.begin(), arena.hidden, width, Type::BF16);
  const int64_t n = std::min<int64_t>(std::max(*count.typed_data(), 0), listed);
  for (int64_t i = 0; i < n; i++) {
    const int64_t from = source.typed_data()[i], to = row.typed_data()[i];
    if (from < 0 || from > arena.rows - format.rows || to < 0 || to > arena.rows - 3 * width) {
      return invalid("unpack: entry " + std::to_string(i) + " goes from row " + std::to_string(from) +
                     " to row " + std::to_string(to) + " of an arena of " +
                     std::to_string(arena.rows) + " rows");
    }
  }
  for (int64_t i = 0; i < n; i++) {
    const int64_t from = source.typed_data()[i], to = row.typed_data()[i];
    arena.supply()->unpack(format, *layer.typed_data(), expert.typed_data()[i],
                           arena.data + from * arena.hidden, to, arena.data + to * arena.hidden);
  }
  return ffi::Error::Success();
}

// Waits until nothing flies into the arena; failed: 1 where the cell from that row on is not what
// was to come.
ffi::Error drain(Any memory, Ints cell_row, ffi::Result<Any> written, ffi::Result<Ints> failed) {
  const Arena arena(memory, *written);
  if (!arena.wrong.empty()) return invalid("drain: " + arena.wrong);
  const size_t count = cell_row.element_count();
  if (failed->element_count() != count) return invalid("drain: shapes");
  std::set<int64_t> cells;
  if (arena.supply()) cells = arena.supply()->queue->drain();
  for (size_t i = 0; i < count; i++) {
    failed->typed_data()[i] = cells.count(cell_row.typed_data()[i]);
  }
  return ffi::Error::Success();
}

// Rows of `width` elements of the arena as it is: those of cells, or of KV.
Rows rows_of(const Arena& arena, int64_t width) {
  return {arena.data, width, arena.rows * arena.hidden / width};
}

ffi::Error move_rows(ffi::ThreadPool threads, Any memory, Ints source, Ints target, Ints rows,
                     int64_t width, ffi::Result<Any> written) {
  const Arena arena(memory, *written);
  if (!arena.wrong.empty()) return invalid("move: " + arena.wrong);
  const int64_t listed = static_cast<int64_t>(source.element_count());
  if (width < 1 || !is(source, {listed}) || !is(target, {listed}) || !is(rows, {listed})) {
    return invalid("move: shapes");
  }
  return run(threads, [&](Pool& pool, const Kernels&) {
    const std::string wrong = move(pool, rows_of(arena, width), source.typed_data(),
                                   target.typed_data(), rows.typed_data(), listed);
    return wrong.empty() ? wrong : "move: " + wrong;
  });
}

ffi::Error read_rows(ffi::ThreadPool threads, Any memory, Ints first, int64_t width, int64_t rows,
                     ffi::RemainingRets pages) {
  const Arena arena(memory);
  if (!arena.wrong.empty()) return invalid("read: " + arena.wrong);
  const int64_t count = static_cast<int64_t>(pages.size());
  if (width < 1 || !is(first, {count})) return invalid("read: shapes");
  std::vector<uint16_t*> to(count);
  for (int64_t i = 0; i < count; i++) {
    auto page = pages.get<ffi::Buffer<ffi::U16, 1>>(i);
    if (!page || !is(**page, {rows * width})) return invalid("read: the shape of a result");
    to[i] = (*page)->typed_data();
  }
  return run(threads, [&](Pool& pool, const Kernels&) {
    const std::string wrong = read(pool, rows_of(arena, width), first.typed_data(), rows, to);
    return wrong.empty() ? wrong : "read: " + wrong;
  });
}

ffi::Error write_rows(ffi::ThreadPool threads, Any memory, Ints first, Int count,
                      ffi::RemainingArgs pages, int64_t width, int64_t rows,
                      ffi::Result<Any> written) {
  const Arena arena(memory, *written);
  if (!arena.wrong.empty()) return invalid("write: " + arena.wrong);
  const int64_t listed = static_cast<int64_t>(pages.size());
  if (width < 1 || !is(first, {listed})) return invalid("write: shapes");
  std::vector<const uint16_t*> from(std::min<int64_t>(std::max(*count.typed_data(), 0), listed));
  for (size_t i = 0; i < from.size(); i++) {
    const auto page = pages.get<ffi::Buffer<ffi::U16, 1>>(i);
    if (!page || !is(*page, {rows * width})) return invalid("write: the shape of a page");
    from[i] = page->typed_data();
  }
  return run(threads, [&](Pool& pool, const Kernels&) {
    const std::string wrong = write(pool, rows_of(arena, width), first.typed_data(), rows, from);
    return wrong.empty() ? wrong : "write: " + wrong;
  });
}

// ---- paged_attention

// What decode and prefill share. Returns what is wrong.
std::string attention_of(const Any& q, const Arena& arena, const Ints& table,
                         Int layer, Numbers page, int64_t window, float scale, Any& out,
                         Attention& c) {
  if (!arena.wrong.empty()) return "paged_attention: " + arena.wrong;
  if (page.size() != 4 || q.dimensions().size() != 3 || table.dimensions().size() != 2) {
    return "paged_attention: ranks";
  }
  c.block_size = page[0], c.kv_heads = page[1], c.head_dim = page[2], c.latent = page[3];
  c.heads = q.dimensions()[1], c.window = window, c.scale = scale;
  if (!type_of(q.element_type(), c.type) || out.element_type() != q.element_type()) {
    return "paged_attention: dtypes";
  }
  const int64_t value_dim = c.latent ? c.latent : c.head_dim;
  if (c.block_size < 1 || c.kv_heads < 1 || q.dimensions()[2] != c.head_dim ||
      c.heads % c.kv_heads || value_dim > c.head_dim || (c.latent && c.kv_heads != 1) ||
      !is(out, {q.dimensions()[0], c.heads * value_dim})) {
    return "paged_attention: shapes";
  }
  c.q = q.untyped_data(), c.arena = arena.data;
  c.kv_rows = arena.bytes() / (c.head_dim * size_of(c.type));
  c.block_table = table.typed_data(), c.layer = *layer.typed_data();
  c.sequences = table.dimensions()[0], c.blocks = table.dimensions()[1];
  c.out = out.untyped_data();
  return "";
}

ffi::Error attended(ffi::ThreadPool& threads, const Attention& c, Any& out,
                    const std::vector<Queries>& queries) {
  return run(threads, [&](Pool& pool, const Kernels& kernels) {
    std::memset(c.out, 0, out.size_bytes());  // rows without a query
    const std::string wrong = attend(pool, kernels, c, queries);
    return wrong.empty() ? wrong : "paged_attention: " + wrong;
  });
}

ffi::Error decode_attention(ffi::ThreadPool threads, Any q, Any memory, Ints table,
                            Ints lengths, Int layer, Numbers page, int64_t window, float scale,
                            ffi::Result<Any> out) {
  Attention c = {};
  const Arena arena(memory);
  const std::string wrong = attention_of(q, arena, table, layer, page, window, scale, *out, c);
  if (!wrong.empty()) return invalid(wrong);
  const int64_t rows = q.dimensions()[0];
  if (c.sequences != rows || !is(lengths, {rows})) return invalid("paged_attention: lengths");
  std::vector<Queries> queries;
  for (int64_t t = 0; t < rows; t++) {
    const int64_t length = lengths.typed_data()[t];
    if (length > 0) queries.push_back({t, 1, t, length - 1});
  }
  return attended(threads, c, *out, queries);
}

ffi::Error prefill_attention(ffi::ThreadPool threads, Any q, Any memory, Ints table,
                             Ints row, Ints start, Ints length, Int count, Int layer,
                             Numbers page, int64_t window, float scale, ffi::Result<Any> out) {
  Attention c = {};
  const Arena arena(memory);
  const std::string wrong = attention_of(q, arena, table, layer, page, window, scale, *out, c);
  if (!wrong.empty()) return invalid(wrong);
  const int64_t chunks = static_cast<int64_t>(row.element_count());
  if (chunks < 1 || q.dimensions()[0] % chunks || !is(row, {chunks}) || !is(start, {chunks}) ||
      !is(length, {chunks})) {
    return invalid("paged_attention: chunks");
  }
  const int64_t size = q.dimensions()[0] / chunks;
  std::vector<Queries> queries;
  for (int64_t i = 0; i < std::min<int64_t>(*count.typed_data(), chunks); i++) {
    const int64_t tokens = length.typed_data()[i];
    if (tokens < 1 || tokens > size) {
      return invalid("paged_attention: a chunk of " + std::to_string(tokens) + " tokens");
    }
    queries.push_back({i * size, tokens, row.typed_data()[i], start.typed_data()[i]});
  }
  return attended(threads, c, *out, queries);
}

}  // namespace

MOEJAX_EXPORT const char* moejax_cpu_sources() { return MOEJAX_SOURCES; }
MOEJAX_EXPORT const char* moejax_cpu_isa() {
  const Kernels* kernels = select_kernels();
  return kernels ? kernels->name : "";
}
MOEJAX_EXPORT const char* moejax_cpu_isa_error() { return select_error(); }

MOEJAX_HANDLER(moejax_cpu_linear, linear,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Any>()
                   .Arg<Any>()
                   .Arg<Int>()
                   .Arg<Any>()
                   .Arg<Int>()
                   .Attr<int64_t>("row_tile")
                   .Ret<Any>())

MOEJAX_HANDLER(moejax_cpu_head_linear, head_linear,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Any>()
                   .Arg<Any>()
                   .Arg<Int>()
                   .Arg<Int>()
                   .Attr<int64_t>("row_tile")
                   .Attr<int64_t>("first")
                   .Attr<int64_t>("transposed")
                   .Ret<Any>())

MOEJAX_HANDLER(moejax_cpu_expert_ffn, expert_ffn,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<ffi::Buffer<ffi::F32>>()
                   .Arg<Any>()
                   .Arg<Ints>()
                   .Arg<Any>()
                   .Arg<Int>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Int>()
                   .RemainingArgs()
                   .Attr<int64_t>("activation")
                   .Attr<int64_t>("width")
                   .Attr<Numbers>("formats")
                   .Attr<Numbers>("places")
                   .Attr<int64_t>("threads")
                   .Ret<ffi::Buffer<ffi::F32>>())

MOEJAX_HANDLER(moejax_cpu_fill, fill_cells,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Any>()
                   .Arg<Int>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Int>()
                   .RemainingArgs()
                   .Attr<int64_t>("width")
                   .Attr<Numbers>("formats")
                   .Attr<Numbers>("places")
                   .Attr<int64_t>("ahead")
                   .Ret<Any>())

MOEJAX_HANDLER(moejax_cpu_unpack, unpack_cells,
               ffi::Ffi::Bind()
                   .Arg<Any>()
                   .Arg<Int>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Int>()
                   .Attr<int64_t>("width")
                   .Attr<Numbers>("packed")
                   .Ret<Any>())

MOEJAX_HANDLER(moejax_cpu_drain, drain,
               ffi::Ffi::Bind().Arg<Any>().Arg<Ints>().Ret<Any>().Ret<Ints>())

MOEJAX_HANDLER(moejax_cpu_move, move_rows,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Any>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Attr<int64_t>("width")
                   .Ret<Any>())

MOEJAX_HANDLER(moejax_cpu_read, read_rows,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Any>()
                   .Arg<Ints>()
                   .Attr<int64_t>("width")
                   .Attr<int64_t>("rows")
                   .RemainingRets())

MOEJAX_HANDLER(moejax_cpu_write, write_rows,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Any>()
                   .Arg<Ints>()
                   .Arg<Int>()
                   .RemainingArgs()
                   .Attr<int64_t>("width")
                   .Attr<int64_t>("rows")
                   .Ret<Any>())

MOEJAX_HANDLER(moejax_cpu_decode_attention, decode_attention,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Any>()
                   .Arg<Any>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Int>()
                   .Attr<Numbers>("page")
                   .Attr<int64_t>("window")
                   .Attr<float>("scale")
                   .Ret<Any>())

MOEJAX_HANDLER(moejax_cpu_prefill_attention, prefill_attention,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Any>()
                   .Arg<Any>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Int>()
                   .Arg<Int>()
                   .Attr<Numbers>("page")
                   .Attr<int64_t>("window")
                   .Attr<float>("scale")
                   .Ret<Any>())

}  // namespace moejax
