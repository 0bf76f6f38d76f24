// The small ops of a layer as XLA calls them: as handlers.cc.
#include <cstring>

#include "pallas_kernels/combine/cpu.h"
#include "pallas_kernels/cpu/binding.h"
#include "pallas_kernels/kv_write/cpu.h"
#include "pallas_kernels/latent_write/cpu.h"
#include "pallas_kernels/plan/cpu.h"
#include "pallas_kernels/rms_norm/cpu.h"
#include "pallas_kernels/route/cpu.h"

namespace moejax {
namespace {

using Floats = ffi::Buffer<ffi::F32>;
using Flags = ffi::Buffer<ffi::PRED>;

ffi::Error wrong_layer(const char* op, int64_t layer) {
  return invalid(std::string(op) + ": layer " + std::to_string(layer));
}

ffi::Error rms_norm_rows(ffi::ThreadPool threads, Any x, Any weights, Int layer, float eps,
                         ffi::Result<Any> out) {
  Type type;
  if (x.dimensions().size() != 2 || weights.dimensions().size() != 2) {
    return invalid("rms_norm: ranks");
  }
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  const int64_t layers = weights.dimensions()[0], index = *layer.typed_data();
  if (!type_of(x.element_type(), type) || weights.element_type() != x.element_type() ||
      out->element_type() != x.element_type()) {
    return invalid("rms_norm: dtypes");
  }
  if (weights.dimensions()[1] != width || !is(*out, {rows, width})) {
    return invalid("rms_norm: shapes");
  }
  if (index < 0 || index >= layers) return wrong_layer("rms_norm", index);
  return run(threads, [&](Pool& pool, const Kernels& kernels) {
    const char* weight = at(weights.untyped_data(), index * width, type);
    rms_norm(pool, kernels, type, x.untyped_data(), weight, rows, width, eps, out->untyped_data());
    return std::string();
  });
}

ffi::Error combine_experts(ffi::ThreadPool threads, Any residual, Floats y, Floats weights,
                           ffi::Result<Any> out) {
  Type type;
  if (residual.dimensions().size() != 2 || weights.dimensions().size() != 2) {
    return invalid("combine: ranks");
  }
  const int64_t tokens = residual.dimensions()[0], width = residual.dimensions()[1];
  const int64_t top_k = weights.dimensions()[1];
  if (!type_of(residual.element_type(), type) || out->element_type() != residual.element_type()) {
    return invalid("combine: dtypes");
  }
  if (!is(y, {tokens, top_k, width}) || !is(weights, {tokens, top_k}) ||
      top_k < 1 || !is(*out, {tokens, width})) {
    return invalid("combine: shapes");
  }
  return run(threads, [&](Pool& pool, const Kernels& kernels) {
    combine(pool, kernels, type, residual.untyped_data(), y.typed_data(), weights.typed_data(),
            tokens, top_k, width, out->untyped_data());
    return std::string();
  });
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

ffi::Error route_tokens(ffi::ThreadPool threads, Floats logits, Flags valid, Floats correction,
                        Int layer, Numbers counts, float scale, float jitter,
                        ffi::Result<Ints> ids, ffi::Result<Floats> weights) {
  if (logits.dimensions().size() != 2 || counts.size() != 6) return invalid("route: ranks");
  const int64_t tokens = logits.dimensions()[0], experts = logits.dimensions()[1];
  Rule rule = {};
  rule.scoring = static_cast<Scoring>(counts[0]), rule.top_k = counts[1];
  rule.groups = counts[2], rule.top_groups = counts[3], rule.group_best = counts[4];
  rule.normalize = counts[5], rule.scale = scale, rule.jitter = jitter;
  if (!fits(rule, experts)) return invalid("route: the rule does not fit");
  const bool corrected = correction.element_count();
  if (!is(valid, {tokens}) || !is(*ids, {tokens, rule.top_k}) ||
      !is(*weights, {tokens, rule.top_k}) ||
      (corrected && (correction.dimensions().size() != 2 || correction.dimensions()[1] != experts))) {
    return invalid("route: shapes");
  }
  const int64_t index = *layer.typed_data();
  if (corrected && (index < 0 || index >= correction.dimensions()[0])) {
    return wrong_layer("route", index);
  }
  return run(threads, [&](Pool& pool, const Kernels&) {
    const float* added = corrected ? correction.typed_data() + index * experts : nullptr;
    route(pool, rule, logits.typed_data(), valid.typed_data(), added, tokens, experts,
          ids->typed_data(), weights->typed_data());
    return std::string();
  });
}

// What both writers of KV have in common. Returns what is wrong.
std::string pages_of(Numbers page, const Ints& positions, const Floats& frequencies,
                     const Arena& arena, const Ints& pages, Int layer, float factor, float eps,
                     int64_t tokens, Type type, Pages& p) {
  if (page.size() != 4 || page[0] < 1 || page[1] < 1 || page[2] < 1) return "page";
  p.type = type, p.tokens = tokens, p.block_size = page[0], p.head_dim = page[2];
  p.rows_per_token = page[3] ? 1 : 2 * page[1];
  if (!is(positions, {tokens}) || !is(pages, {tokens}) || frequencies.dimensions().size() != 1) {
    return "shapes";
  }
  if (!arena.wrong.empty()) return arena.wrong;
  p.arena = arena.data, p.kv_rows = arena.bytes() / (p.head_dim * size_of(type));
  p.positions = positions.typed_data(), p.pages = pages.typed_data(), p.layer = *layer.typed_data();
  OpSpan::layer(p.layer);
  p.frequencies = frequencies.typed_data(), p.half = frequencies.dimensions()[0];
  p.factor = factor, p.eps = eps;
  return "";
}

ffi::Error write_heads(ffi::ThreadPool threads, Any qkv, Any q_norm, Any k_norm, Int stack_layer,
                       Ints positions, Floats frequencies, Any memory, Ints pages, Int layer,
                       Numbers page, float factor, float eps, ffi::Result<Any> q,
                       ffi::Result<Any> written) {
  Type type;
  Heads h = {};
  Pages p = {};
  if (qkv.dimensions().size() != 2 || q->dimensions().size() != 3) return invalid("kv_write: ranks");
  const auto dtype = qkv.element_type();
  if (!type_of(dtype, type) || q->element_type() != dtype || q_norm.element_type() != dtype ||
      k_norm.element_type() != dtype) {
    return invalid("kv_write: dtypes");
  }
  const Arena arena(memory, *written);
  const std::string wrong = pages_of(page, positions, frequencies, arena, pages, layer, factor, eps,
                                     qkv.dimensions()[0], type, p);
  if (!wrong.empty()) return invalid("kv_write: " + wrong);
  h.heads = q->dimensions()[1], h.kv_heads = page[1];
  const bool normed = q_norm.element_count();
  const int64_t layers = normed ? q_norm.dimensions()[0] : 0;
  if (page[3] || 2 * p.half != p.head_dim || !is(*q, {p.tokens, h.heads, p.head_dim}) ||
      !is(qkv, {p.tokens, (h.heads + 2 * h.kv_heads) * p.head_dim}) ||
      !is(q_norm, {layers, p.head_dim}) || !is(k_norm, {layers, p.head_dim})) {
    return invalid("kv_write: shapes");
  }
  const int64_t index = *stack_layer.typed_data();
  if (normed && (index < 0 || index >= layers)) return wrong_layer("kv_write", index);
  h.qkv = qkv.untyped_data(), h.q = q->untyped_data();
  h.q_norm = normed ? at(q_norm.untyped_data(), index * p.head_dim, type) : nullptr;
  h.k_norm = normed ? at(k_norm.untyped_data(), index * p.head_dim, type) : nullptr;
  return run(threads, [&](Pool& pool, const Kernels& kernels) {
    const std::string wrong = kv_write(pool, kernels, p, h);
    return wrong.empty() ? wrong : "kv_write: " + wrong;
  });
}

ffi::Error write_latent(ffi::ThreadPool threads, Any kv, Any norm, Int stack_layer, Any q_rope,
                        Ints positions, Floats frequencies, Any memory, Ints pages, Int layer,
                        Numbers page, float factor, float eps, int64_t interleave,
                        ffi::Result<Any> out, ffi::Result<Any> written) {
  Type type;
  Latent l = {};
  Pages p = {};
  if (kv.dimensions().size() != 2 || norm.dimensions().size() != 2 ||
      q_rope.dimensions().size() != 3) {
    return invalid("latent_write: ranks");
  }
  const auto dtype = kv.element_type();
  if (!type_of(dtype, type) || norm.element_type() != dtype || q_rope.element_type() != dtype ||
      out->element_type() != dtype) {
    return invalid("latent_write: dtypes");
  }
  const Arena arena(memory, *written);
  const std::string wrong = pages_of(page, positions, frequencies, arena, pages, layer, factor, eps,
                                     kv.dimensions()[0], type, p);
  if (!wrong.empty()) return invalid("latent_write: " + wrong);
  l.latent = page[3], l.heads = q_rope.dimensions()[1], l.interleave = interleave;
  const int64_t rope = 2 * p.half;
  if (l.latent < 1 || page[1] != 1 || l.latent + rope != p.head_dim ||
      !is(kv, {p.tokens, p.head_dim}) || norm.dimensions()[1] != l.latent ||
      !is(q_rope, {p.tokens, l.heads, rope}) || !is(*out, {p.tokens, l.heads, rope})) {
    return invalid("latent_write: shapes");
  }
  const int64_t index = *stack_layer.typed_data();
  if (index < 0 || index >= norm.dimensions()[0]) return wrong_layer("latent_write", index);
  l.kv = kv.untyped_data(), l.norm = at(norm.untyped_data(), index * l.latent, type);
  l.q_rope = q_rope.untyped_data(), l.out = out->untyped_data();
  return run(threads, [&](Pool& pool, const Kernels& kernels) {
    const std::string wrong = latent_write(pool, kernels, p, l);
    return wrong.empty() ? wrong : "latent_write: " + wrong;
  });
}

// A table that is changed: the result's memory, with what the operand holds.
int32_t* changed(const Ints& given, ffi::Result<Ints>& result) {
  if (given.typed_data() != result->typed_data()) {
    std::memcpy(result->typed_data(), given.typed_data(), given.size_bytes());
  }
  return result->typed_data();
}

using IntsOut = ffi::Result<Ints>;
using IntOut = ffi::Result<Int>;

ffi::Error plan_layer(Ints cell_row, Ints cell_version, Ints owner, Ints last_used, Ints address,
                      Ints version, Ints frequency, Ints fill_version, Ints prior, Ints clock,
                      Ints weights, Int layer, Flags due, IntsOut owner_out, IntsOut last_used_out,
                      IntsOut address_out, IntsOut version_out, IntsOut frequency_out,
                      IntsOut clock_out, IntsOut active, IntsOut fill_expert, IntsOut fill_row,
                      IntsOut fill_list_version, IntOut active_count, IntOut fill_count,
                      IntOut hits, IntOut read_through) {
  if (cell_row.dimensions().size() != 2 || address.dimensions().size() != 2) {
    return invalid("plan: ranks");
  }
  Plan p = {};
  p.layers = cell_row.dimensions()[0], p.cells = cell_row.dimensions()[1];
  p.experts = address.dimensions()[1], p.layer = *layer.typed_data();
  using All = std::initializer_list<const Ints*>;
  const auto shaped = [](All all, std::initializer_list<int64_t> dims) {
    return std::all_of(all.begin(), all.end(), [&](const Ints* one) { return is(*one, dims); });
  };
  if (!shaped({&cell_version, &owner, &last_used}, {p.layers, p.cells}) ||
      !shaped({&address, &version, &frequency, &fill_version, &prior}, {p.layers, p.experts}) ||
      !shaped({&*owner_out, &*last_used_out}, {p.layers, p.cells}) ||
      !shaped({&*address_out, &*version_out, &*frequency_out}, {p.layers, p.experts}) ||
      !shaped({&clock, &*clock_out}, {p.layers}) || !is(weights, {3}) ||
      !is(due, {p.experts}) ||
      !shaped({&*active, &*fill_expert, &*fill_row, &*fill_list_version}, {p.experts})) {
    return invalid("plan: shapes");
  }
  p.cell_row = cell_row.typed_data(), p.cell_version = cell_version.typed_data();
  p.fill_version = fill_version.typed_data(), p.prior = prior.typed_data();
  p.weights = weights.typed_data(), p.due = due.typed_data();
  p.owner = changed(owner, owner_out), p.last_used = changed(last_used, last_used_out);
  p.address = changed(address, address_out), p.version = changed(version, version_out);
  p.frequency = changed(frequency, frequency_out), p.clock = changed(clock, clock_out);
  p.active = active->typed_data(), p.fill_expert = fill_expert->typed_data();
  p.fill_row = fill_row->typed_data(), p.fill_list_version = fill_list_version->typed_data();
  p.active_count = active_count->typed_data(), p.fill_count = fill_count->typed_data();
  p.hits = hits->typed_data(), p.read_through = read_through->typed_data();
  try {
    const std::string wrong = plan(p);
    return wrong.empty() ? ffi::Error::Success() : invalid("plan: " + wrong);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

}  // namespace

MOEJAX_HANDLER(moejax_cpu_rms_norm, rms_norm_rows,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Any>()
                   .Arg<Any>()
                   .Arg<Int>()
                   .Attr<float>("eps")
                   .Ret<Any>())

MOEJAX_HANDLER(moejax_cpu_combine, combine_experts,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Any>()
                   .Arg<Floats>()
                   .Arg<Floats>()
                   .Ret<Any>())

MOEJAX_HANDLER(moejax_cpu_route, route_tokens,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Floats>()
                   .Arg<Flags>()
                   .Arg<Floats>()
                   .Arg<Int>()
                   .Attr<Numbers>("counts")
                   .Attr<float>("scale")
                   .Attr<float>("jitter")
                   .Ret<Ints>()
                   .Ret<Floats>())

MOEJAX_HANDLER(moejax_cpu_kv_write, write_heads,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Any>()
                   .Arg<Any>()
                   .Arg<Any>()
                   .Arg<Int>()
                   .Arg<Ints>()
                   .Arg<Floats>()
                   .Arg<Any>()
                   .Arg<Ints>()
                   .Arg<Int>()
                   .Attr<Numbers>("page")
                   .Attr<float>("factor")
                   .Attr<float>("eps")
                   .Ret<Any>()
                   .Ret<Any>())

MOEJAX_HANDLER(moejax_cpu_latent_write, write_latent,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Any>()
                   .Arg<Any>()
                   .Arg<Int>()
                   .Arg<Any>()
                   .Arg<Ints>()
                   .Arg<Floats>()
                   .Arg<Any>()
                   .Arg<Ints>()
                   .Arg<Int>()
                   .Attr<Numbers>("page")
                   .Attr<float>("factor")
                   .Attr<float>("eps")
                   .Attr<int64_t>("interleave")
                   .Ret<Any>()
                   .Ret<Any>())

MOEJAX_HANDLER(moejax_cpu_plan, plan_layer,
               ffi::Ffi::Bind()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Ints>()
                   .Arg<Int>()
                   .Arg<Flags>()
                   .Ret<Ints>()
                   .Ret<Ints>()
                   .Ret<Ints>()
                   .Ret<Ints>()
                   .Ret<Ints>()
                   .Ret<Ints>()
                   .Ret<Ints>()
                   .Ret<Ints>()
                   .Ret<Ints>()
                   .Ret<Ints>()
                   .Ret<Int>()
                   .Ret<Int>()
                   .Ret<Int>()
                   .Ret<Int>())

}  // namespace moejax
