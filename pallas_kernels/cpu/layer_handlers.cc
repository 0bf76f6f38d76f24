// The small ops of a layer as XLA calls them: as handlers.cc.
#include "pallas_kernels/combine/cpu.h"
#include "pallas_kernels/cpu/binding.h"
#include "pallas_kernels/kv_write/cpu.h"
#include "pallas_kernels/latent_write/cpu.h"
#include "pallas_kernels/plan/cpu.h"
#include "pallas_kernels/rms_norm/cpu.h"
#include "pallas_kernels/route/cpu.h"

namespace moejax {
namespace {

std::string rms_norm_rows(const Call& call, Any x, Any weights, Int layer, float eps,
                          ffi::Result<Any> out) {
  Size rows, width, layers;
  need(is(x, {rows, width}) && is(weights, {layers, width}) && is(*out, {rows, width}), "shapes");
  const Type type = type_of({x, weights, *out});
  const char* weight = at(weights.untyped_data(), layer_of(layer, layers) * width, type);
  rms_norm(call.pool, call.k, type, x.untyped_data(), weight, rows, width, eps,
           out->untyped_data());
  return "";
}

std::string combine_experts(const Call& call, Any residual, Floats y, Floats weights,
                            ffi::Result<Any> out) {
  Size tokens, width, top_k;
  need(is(residual, {tokens, width}) && is(weights, {tokens, top_k}) && top_k > 0 &&
           is(y, {tokens, top_k, width}) && is(*out, {tokens, width}),
       "shapes");
  combine(call.pool, call.k, type_of({residual, *out}), residual.untyped_data(), y.typed_data(),
          weights.typed_data(), tokens, top_k, width, out->untyped_data());
  return "";
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

std::string route_tokens(const Call& call, Floats logits, Flags valid, Floats correction,
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
  return "";
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

std::string write_heads(const Call& call, Any qkv, Any q_norm, Any k_norm, Int stack_layer,
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
  return kv_write(call.pool, call.k, p, h);
}

std::string write_latent(const Call& call, Any kv, Any norm, Int stack_layer, Any q_rope,
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
  return latent_write(call.pool, call.k, p, l);
}

bool are(std::initializer_list<Ints> tables, std::initializer_list<Dimension> dims) {
  return std::all_of(tables.begin(), tables.end(), [&](const Ints& one) { return is(one, dims); });
}

using IntsOut = ffi::Result<Ints>;
using IntOut = ffi::Result<Int>;

std::string plan_layer(const Call&, Ints cell_row, Ints cell_version, Ints owner, Ints last_used,
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
  Plan p = {layers, cells, experts, *layer.typed_data()};
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
  return plan(p);
}

}  // namespace

MOEJAX_HANDLER(rms_norm, rms_norm_rows, "eps")
MOEJAX_HANDLER(combine, combine_experts)
MOEJAX_HANDLER(route, route_tokens, "counts", "scale", "jitter")
MOEJAX_HANDLER(kv_write, write_heads, "page", "factor", "eps")
MOEJAX_HANDLER(latent_write, write_latent, "page", "factor", "eps", "interleave")
MOEJAX_HANDLER(plan, plan_layer)

}  // namespace moejax
