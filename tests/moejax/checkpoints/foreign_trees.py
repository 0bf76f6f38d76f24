"""The same weights as trees of other programs, built from the tensors of a Hugging Face checkpoint,
independently of the name maps that read them back."""

from __future__ import annotations

import json

import numpy as np
import orbax.checkpoint as ocp


def nested(flat):
    tree = {}
    for path, value in flat.items():
        *folders, last = path.split("/")
        at = tree
        for folder in folders:
            at = at.setdefault(folder, {})
        at[last] = value
    return tree


def save(directory, tree, config, **options):
    with ocp.PyTreeCheckpointer(**options) as checkpointer:
        checkpointer.save(directory, tree)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def stack(tensors, layers, suffix, make, axis=1):
    return np.stack([make(tensors[f"model.layers.{i}.{suffix}"]) for i in layers], axis)


def stack_experts(tensors, layers, experts, name):
    """[E, L, in, out] of tensors [out, in]."""
    return np.stack(
        [
            np.stack([tensors[f"model.layers.{i}.{name.format(e)}"].T for i in layers])
            for e in range(experts)
        ]
    )


def maxtext_attention(tensors, layers, heads, kv_heads, query=1.0):
    """MaxText's scanned leaves of grouped-query attention, axis 1 over layers."""

    def kernel(count, scale=1.0):
        return lambda w: (
            (w.astype(np.float32) * scale).astype(w.dtype).T.reshape(w.shape[1], count, -1)
        )

    def of(suffix, make):
        return stack(tensors, layers, suffix, make)

    def same(scale):
        return scale

    def out(w):
        return w.T.reshape(heads, -1, w.shape[0])

    return {
        "pre_self_attention_layer_norm/scale": of("input_layernorm.weight", same),
        "post_self_attention_layer_norm/scale": of("post_attention_layernorm.weight", same),
        "self_attention/query/kernel": of("self_attn.q_proj.weight", kernel(heads, query)),
        "self_attention/key/kernel": of("self_attn.k_proj.weight", kernel(kv_heads)),
        "self_attention/value/kernel": of("self_attn.v_proj.weight", kernel(kv_heads)),
        "self_attention/out/kernel": of("self_attn.o_proj.weight", out),
    }


def maxtext_ends(tensors, padding=0):
    embed = np.pad(tensors["model.embed_tokens.weight"], [(0, padding), (0, 0)])
    return {
        "token_embedder/embedding": embed,
        "decoder/decoder_norm/scale": tensors["model.norm.weight"],
        "decoder/logits_dense/kernel": tensors["lm_head.weight"].T,
    }


def maxtext_qwen3(tensors, config, padding=0):
    layers, experts = range(config["num_hidden_layers"]), config["num_experts"]
    in_layers = maxtext_attention(tensors, layers, 4, 2) | {
        "self_attention/query_norm/scale": stack(
            tensors, layers, "self_attn.q_norm.weight", lambda w: w
        ),
        "self_attention/key_norm/scale": stack(
            tensors, layers, "self_attn.k_norm.weight", lambda w: w
        ),
        "moe_block/gate/kernel": stack(tensors, layers, "mlp.gate.weight", lambda w: w.T),
    }
    for leaf, name in (("wi_0", "gate_proj"), ("wi_1", "up_proj"), ("wo", "down_proj")):
        in_layers[f"moe_block/{leaf}"] = stack_experts(
            tensors, layers, experts, f"mlp.experts.{{}}.{name}.weight"
        )
    flat = maxtext_ends(tensors, padding)
    flat |= {f"decoder/layers/{leaf}": value for leaf, value in in_layers.items()}
    return nested({f"params/params/{leaf}": value for leaf, value in flat.items()})


def maxtext_mixtral(tensors, config):
    layers, experts = range(config["num_hidden_layers"]), config["num_local_experts"]
    in_layers = maxtext_attention(tensors, layers, 4, 2, query=config["head_dim"] ** -0.5)
    in_layers["MoeBlock_0/gate/kernel"] = stack(
        tensors, layers, "block_sparse_moe.gate.weight", lambda w: w.T
    )
    for leaf, name in (("wi_0", "w1"), ("wi_1", "w3"), ("wo", "w2")):
        in_layers[f"MoeBlock_0/{leaf}"] = stack_experts(
            tensors, layers, experts, f"block_sparse_moe.experts.{{}}.{name}.weight"
        )
    flat = maxtext_ends(tensors)
    flat |= {f"decoder/layers/{leaf}": value for leaf, value in in_layers.items()}
    return nested({f"params/{leaf}": value for leaf, value in flat.items()})


def maxtext_deepseek(tensors, config):
    """Layer 0 dense, the others MoE."""
    heads, flat = config["num_attention_heads"], maxtext_ends(tensors)

    def kernel(w):
        return w.T

    def per_head(w):
        return w.T.reshape(w.shape[1], heads, -1)

    def same(w):
        return w

    for name, layers in (("dense_layers", range(1)), ("moe_layers", range(1, 3))):
        leaves = {
            "pre_self_attention_layer_norm/scale": ("input_layernorm.weight", same),
            "post_self_attention_layer_norm/scale": ("post_attention_layernorm.weight", same),
            "self_attention/wq_a/kernel": ("self_attn.q_a_proj.weight", kernel),
            "self_attention/q_norm/scale": ("self_attn.q_a_layernorm.weight", same),
            "self_attention/wq_b/kernel": ("self_attn.q_b_proj.weight", per_head),
            "self_attention/wkv_a/kernel": ("self_attn.kv_a_proj_with_mqa.weight", kernel),
            "self_attention/kv_norm/scale": ("self_attn.kv_a_layernorm.weight", same),
            "self_attention/wkv_b/kernel": ("self_attn.kv_b_proj.weight", per_head),
            "self_attention/out/kernel": (
                "self_attn.o_proj.weight",
                lambda w: w.T.reshape(heads, -1, w.shape[0]),
            ),
        }
        dense, moe = "mlp/", "DeepSeekMoeBlock_0/"
        for leaf, matrix in (("wi_0", "gate_proj"), ("wi_1", "up_proj"), ("wo", "down_proj")):
            if name == "dense_layers":
                leaves[f"{dense}{leaf}/kernel"] = (f"mlp.{matrix}.weight", kernel)
            else:
                leaves[f"{moe}shared_experts/{leaf}/kernel"] = (
                    f"mlp.shared_experts.{matrix}.weight",
                    kernel,
                )
                flat[f"decoder/{name}/{moe}MoeBlock_0/{leaf}"] = stack_experts(
                    tensors, layers, 4, f"mlp.experts.{{}}.{matrix}.weight"
                )
        if name == "moe_layers":
            leaves[f"{moe}MoeBlock_0/gate/kernel"] = ("mlp.gate.weight", kernel)
            leaves[f"{moe}MoeBlock_0/gate/bias"] = ("mlp.gate.e_score_correction_bias", same)
        for leaf, (suffix, make) in leaves.items():
            flat[f"decoder/{name}/{leaf}"] = stack(tensors, layers, suffix, make)
    return nested({f"params/params/{leaf}": value for leaf, value in flat.items()})


def nnx_qwen3(tensors, config):
    flat = {
        "embed/embedding": tensors["model.embed_tokens.weight"],
        "norm/scale": tensors["model.norm.weight"],
        "lm_head/kernel": tensors["lm_head.weight"].T,
    }
    for i in range(config["num_hidden_layers"]):
        of = {n.removeprefix(f"model.layers.{i}."): t for n, t in tensors.items()}
        qkv = np.concatenate([of[f"self_attn.{h}_proj.weight"] for h in "qkv"])
        experts = [
            [of[f"mlp.experts.{e}.{m}_proj.weight"].T for m in ("gate", "up", "down")]
            for e in range(config["num_experts"])
        ]
        flat |= {
            f"layers/{i}/input_norm/scale": of["input_layernorm.weight"],
            f"layers/{i}/post_norm/scale": of["post_attention_layernorm.weight"],
            f"layers/{i}/attention/qkv/kernel": qkv.T,
            f"layers/{i}/attention/q_norm/scale": of["self_attn.q_norm.weight"],
            f"layers/{i}/attention/k_norm/scale": of["self_attn.k_norm.weight"],
            f"layers/{i}/attention/out/kernel": of["self_attn.o_proj.weight"].T,
            f"layers/{i}/moe/router/kernel": of["mlp.gate.weight"].T,
            f"layers/{i}/moe/gate_up": np.stack([np.hstack(e[:2]) for e in experts]),
            f"layers/{i}/moe/down": np.stack([e[2] for e in experts]),
        }
    return nested({f"model/{leaf}/value": value for leaf, value in flat.items()})


def write_map(directory, raw):
    path = directory / "map.json"
    path.write_text(json.dumps(raw))
    return path


HF = [  # every tensor under its own name, with slashes
    {"leaf": "model/embed_tokens/weight", "tensor": "model.embed_tokens.weight"},
    {"leaf": "model/norm/weight", "tensor": "model.norm.weight"},
    {"leaf": "lm_head/weight", "tensor": "lm_head.weight"},
    *(
        {
            "leaf": "model/layers/{layer}/" + suffix.replace(".", "/"),
            "tensor": "model.layers.{layer}." + suffix,
        }
        for suffix in (
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
            *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
            *(f"self_attn.{name}_norm.weight" for name in "qk"),
            "mlp.gate.weight",
        )
    ),
]
EXPERTS = [
    {
        "leaf": f"model/layers/{{layer}}/mlp/experts/{{expert}}/{name}/weight",
        "tensor": f"model.layers.{{layer}}.mlp.experts.{{expert}}.{name}.weight",
    }
    for name in ("gate_proj", "up_proj", "down_proj")
]


def hf_tree(tensors):
    return nested({name.replace(".", "/"): value for name, value in tensors.items()})
