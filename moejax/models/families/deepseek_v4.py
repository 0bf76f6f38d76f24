"""DeepSeek-V4: several residual streams (hyper-connections, arXiv:2512.24880), attention to a
window and to compressed entries, experts that a table of token ids chooses in the first layers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from moejax.models.attention.compressed import CompressedAttention
from moejax.models.family import Family, Fields, Parts, router_params
from moejax.models.model_config import LayerKind, ModelConfig, Streams
from moejax.models.rope import Rope, parse_rope, rotary_part
from pallas_kernels.expert_ffn import ClampedSwiGLU

SLIDING, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_RATIOS = {0: SLIDING, 4: SPARSE, 128: HEAVY}
"""compress_ratios' numbers, and the layer_types that they mean."""


def parse(fields: Fields) -> ModelConfig:
    """DeepseekV4Config's fields and defaults."""
    for name, value in (
        *(("hidden_act", "silu"), ("num_key_value_heads", 1), ("n_shared_experts", 1)),
        *(("attention_bias", False), ("mlp_bias", False), ("norm_topk_prob", True)),
        ("topk_method", "noaux_tc"),
    ):
        fields.only(name, value)
    fields.only("scoring_func", "sqrtsoftplus", "sigmoid")
    layers = fields.integer("num_hidden_layers", 43)
    longest = fields.integer("max_position_embeddings", 1_048_576)
    heads = fields.heads(64, 1, hidden=4096, head_dim=512)
    groups = fields.integer("o_groups", 8)
    if heads["num_attention_heads"] % groups:
        raise fields.refuse(
            f"num_attention_heads ({heads['num_attention_heads']}) must be a multiple of o_groups "
            f"({groups})"
        )
    types, ropes = _layer_types(fields, layers), _ropes(fields, longest)
    rates = _rates(fields)
    window = fields.integer("sliding_window", 128)
    common: dict[str, Any] = dict(
        q_lora_rank=fields.integer("q_lora_rank", 1024),
        rotary=_rotary(fields, heads["head_dim"]),
        groups=groups,
        o_lora_rank=fields.integer("o_lora_rank", 1024),
        window=window,
        width=heads["head_dim"],
    )
    kinds = {
        SLIDING: CompressedAttention(**common),
        HEAVY: CompressedAttention(**common, rate=rates[HEAVY]),
        SPARSE: CompressedAttention(
            **common,
            rate=rates[SPARSE],
            overlaps=True,
            index_topk=fields.integer("index_topk", 512),
            index_n_heads=fields.integer("index_n_heads", 64),
            index_head_dim=fields.integer("index_head_dim", 128, least=common["rotary"]),
        ),
    }
    kinds = _share_pages({kind: kinds[kind] for kind in dict.fromkeys(types)})
    hashed = _hashed(fields, layers)
    width = "moe_intermediate_size"
    if not fields.has(width):  # transformers takes this one, too
        width = "intermediate_size"
    width = fields.integer(width, 2048)
    swiglu = ClampedSwiGLU(fields.factor("swiglu_limit", 10.0), alpha=1.0, shift=0.0)
    own = {name: heads[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    experts = fields.experts("n_routed_experts", "num_local_experts", 256)
    # What entries are made of is in the rows of a window's tokens.
    rows = [(1 + kinds[kind].overlaps) * kinds[kind].rate for kind in types]
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **heads,
        attention=kinds[types[0]],
        layer_kinds=tuple(
            LayerKind(attention=kinds[kind], rope=ropes[kind == SLIDING], hashed=by_table, **own)
            for kind, by_table in zip(types, hashed, strict=True)
        ),
        intermediate_size=width,
        moe_intermediate_size=width,
        shared_width=width,
        **fields.routing(experts, 6),
        norm_topk_prob=True,
        scoring_func=fields.raw.get("scoring_func") or "sqrtsoftplus",
        routed_scaling_factor=fields.factor("routed_scaling_factor", 1.5),
        moe_layers=(True,) * layers,
        attention_bias=False,
        sliding_window=max(window, *rows),
        swiglu=swiglu,
        shared_swiglu=swiglu,
        routes_apart=True,
        streams=Streams(
            fields.integer("hc_mult", 4),
            fields.integer("hc_sinkhorn_iters", 20),
            fields.number("hc_eps", 1e-6),
        ),
        **fields.decoder(
            eps=1e-6, max_positions=1_048_576, vocabulary=129_280, eos=1, rope=ropes[True]
        ),
    )


def _share_pages(kinds: dict[str, CompressedAttention]) -> dict[str, CompressedAttention]:
    """The kinds with equal rows of entries, which divide the rows of tokens if some such do."""
    least = max(kind.least_values for kind in kinds.values())
    step = math.gcd(*(kind.columns for kind in kinds.values()))
    fitting = (values for values in range(max(least, 1), step + 1) if step % values == 0)
    values = next(fitting, least)
    return {
        name: dataclasses.replace(kind, entry_values=values if kind.rate else 0)
        for name, kind in kinds.items()
    }


def _layer_types(fields: Fields, layers: int) -> list[str]:
    """layer_types, or compress_ratios, of which later ones are of layers that predict further
    tokens, or the default."""
    types, ratios = fields.raw.get("layer_types"), fields.raw.get("compress_ratios")
    if types is None and ratios is not None:
        known = isinstance(ratios, list) and len(ratios) >= layers
        if not known or not all(type(r) is int and r in _RATIOS for r in ratios):
            raise fields.refuse(
                f"compress_ratios must be {', '.join(map(str, _RATIOS))} for each of {layers} "
                f"layers, not {ratios!r}"
            )
        types = [_RATIOS[ratio] for ratio in ratios]
    if types is None:
        types = [HEAVY if i < 2 or i % 2 == 0 else SPARSE for i in range(layers)]
    if isinstance(types, list):
        types = types[:layers]
    given = Fields({**fields.raw, "layer_types": types}, fields.source)
    kinds = {kind: kind for kind in (SLIDING, SPARSE, HEAVY)}
    found = given.of_layers("layer_types", layers, kinds)
    assert found is not None
    return [*found]


def _hashed(fields: Fields, layers: int) -> tuple[bool, ...]:
    """For each layer, whether a table chooses its experts."""
    first = fields.integer("num_hash_layers", 3, least=0)
    known = {"hash_moe": True, "moe": False}
    found = fields.of_layers("mlp_layer_types", layers, known)
    return tuple(i < first for i in range(layers)) if found is None else found


def _rates(fields: Fields) -> dict[str, int]:
    given = fields.raw.get("compress_rates") or {}
    if not isinstance(given, dict):
        raise fields.refuse(f"compress_rates must be an object, not {given!r}")
    rates = Fields(given, f"{fields.source}: compress_rates")
    found = {}
    for kind, older, default in (
        (SPARSE, "compress_rate_csa", 4),
        (HEAVY, "compress_rate_hca", 128),
    ):
        rate = rates.integer(kind, default)
        found[kind] = fields.integer(older, None) if fields.has(older) else rate
    return found


def _ropes(fields: Fields, longest: int) -> tuple[Rope, Rope]:
    """The rope of layers with entries, and of those without."""
    tables = _tables(fields)
    ropes = []
    for name in ("compress", "main"):
        raw = {"rope_parameters": tables[name]}
        ropes.append(parse_rope(raw, longest, f"{fields.source}: {name}", partial=True))
    return ropes[0], ropes[1]


def _tables(fields: Fields) -> dict[str, dict[str, Any]]:
    given = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise fields.refuse(f"rope_parameters must be an object, not {given!r}")
    if all(isinstance(given.get(name), dict) for name in ("main", "compress")):
        return given
    scaling = {k: v for k, v in given.items() if k not in ("main", "compress", "rope_theta")}
    scaling["rope_theta"] = fields.factor("compress_rope_theta", 160_000.0)
    if "yarn" in (scaling.get("rope_type"), scaling.get("type")):
        scaling.setdefault("attention_factor", 1.0)
    return {"main": {"rope_theta": fields.factor("rope_theta", 10_000.0)}, "compress": scaling}


def _rotary(fields: Fields, head_dim: int) -> int:
    """Values of a head that are rotated."""
    default = 64 / 512
    if fields.has("qk_rope_head_dim"):
        default = fields.integer("qk_rope_head_dim", None, least=2) / head_dim
    tables = _tables(fields)
    widths = set()
    for name in ("main", "compress"):
        raw = {"rope_parameters": tables[name]}
        if fields.has("partial_rotary_factor"):
            raw["partial_rotary_factor"] = fields.raw["partial_rotary_factor"]
        widths.add(int(head_dim * rotary_part(raw, fields.source, default)))
    width = widths.pop()
    if widths or width < 2 or width % 2:
        raise fields.refuse(
            f"partial_rotary_factor of head_dim {head_dim} must leave one even number of values to "
            f"rotate, not {sorted({width, *widths})}"
        )
    return width


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    kind, hidden, width = config.attention, config.hidden_size, config.head_dim
    assert isinstance(kind, CompressedAttention) and config.streams is not None
    heads, rank, count = config.num_attention_heads, kind.q_lora_rank, config.streams.count
    outputs, factors = kind.groups * kind.o_lora_rank, (2 + count) * count
    rows: Parts = (("attn.wkv.weight", (width, hidden)),)
    params: dict[str, Parts] = {
        "input_norm": (("attn_norm.weight", (hidden,)),),
        "post_norm": (("ffn_norm.weight", (hidden,)),),
        "q_a": (("attn.wq_a.weight", (rank, hidden)),),
        "q_a_norm": (("attn.q_norm.weight", (rank,)),),
        "q_b": (("attn.wq_b.weight", (heads * width, rank)),),
        "kv_norm": (("attn.norm.weight", (width,)),),
        "sinks": (("attn.attn_sink", (heads,)),),
        "o_a": (("attn.wo_a.weight", (outputs, heads * width // kind.groups)),),
        "o": (("attn.wo_b.weight", (hidden, outputs)),),
    }
    for key, name in (("attention", "attn"), ("mlp", "ffn")):
        params[f"{key}_streams"] = ((f"hc_{name}_fn", (factors, count * hidden)),)
        params[f"{key}_base"] = ((f"hc_{name}_base", (factors,)),)
        params[f"{key}_scale"] = ((f"hc_{name}_scale", (3,)),)
    places = ("entry", "attn.compressor."), ("index", "attn.indexer.compressor.")
    for (key, name), size in zip(places, kind.parts, strict=False):
        both = (1 + kind.overlaps) * size
        rows += tuple((f"{name}{part}.weight", (both, hidden)) for part in ("wkv", "wgate"))
        params[f"{key}_bias"] = ((f"{name}ape", (kind.rate, both)),)
        params[f"{key}_norm"] = ((f"{name}norm.weight", (size,)),)
    params["kv"] = rows
    if kind.index_topk:
        count, size = kind.index_n_heads, kind.index_head_dim
        params["index_q"] = (("attn.indexer.wq_b.weight", (count * size, rank)),)
        params["index_weights"] = (("attn.indexer.weights_proj.weight", (count, hidden)),)
    params |= router_params(config, "ffn.gate.weight")
    if config.hashed:
        table = config.vocab_size, config.num_experts_per_tok
        params["expert_of_token"] = (("ffn.gate.tid2eid", table),)
    else:
        params["correction"] = (("ffn.gate.bias", (config.num_experts,)),)
    shared, size = "ffn.shared_experts.", config.shared_width
    params["shared_gate_up"] = tuple((f"{shared}{m}.weight", (size, hidden)) for m in ("w1", "w3"))
    params["shared_down"] = ((f"{shared}w2.weight", (hidden, size)),)
    return params


_WIDE = {f"{part}_{name}" for part in ("attention", "mlp", "head") for name in ("streams", "base")}

FAMILY = Family(
    "DeepseekV4ForCausalLM",
    "deepseek_v4",
    parse,
    layer_params,
    experts="ffn.experts.",
    matrices=("w1", "w3", "w2"),
    wide_params=frozenset(
        {"correction", "sinks", "entry_bias", "index_bias", "expert_of_token", *_WIDE}
        | {f"{part}_scale" for part in ("attention", "mlp", "head")}
    ),
    ignores=lambda config, name: name.startswith("mtp."),
    renamed=(
        ("layers.", "model.layers."),
        ("embed.", "model.embed_tokens."),
        ("head.", "lm_head."),
        ("norm.", "model.norm."),
        ("hc_head_", "model.hc_head.hc_"),
    ),
)
