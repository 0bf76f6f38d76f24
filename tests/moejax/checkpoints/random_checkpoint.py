"""Small checkpoints of random weights, and the comparison of what was loaded with them."""

import json

import jax
import numpy as np
from safetensors.numpy import save_file

from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.checkpoints.tensors import expected_tensors
from moejax.models.config import parse_config
from tests.host_offload.memory.dense_records import record_of

BF16 = NUMPY_DTYPES["bfloat16"]
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 20,
    "moe_intermediate_size": 8,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1, 2],
    "dtype": "bfloat16",
}
HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"
UP = "model.layers.3.mlp.experts.2.up_proj.weight"


def random_tensors(config, dtype=BF16, found=()):
    rng = np.random.default_rng(7)
    places = expected_tensors(parse_config(config), found)
    return {name: rng.normal(size=place.shape).astype(dtype) for name, place in places.items()}


def write(directory, tensors, config=CONFIG, shards=1, index=None):
    """A checkpoint directory; with shards > 1, tensor i goes to shard i % shards."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    owner = {name: f"part-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    for file in set(owner.values()):
        save_file({n: t for n, t in tensors.items() if owner[n] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {**owner, **(index or {})}})
    )
    return directory


def assert_loaded(loaded, tensors, config):
    """Params and store hold exactly the tensors, converted to the run's dtype."""
    parsed, dtype = parse_config(config), NUMPY_DTYPES[loaded.dtype]

    def stack(layers, *suffixes):
        return np.stack(
            [np.concatenate([tensors[f"model.layers.{i}.{s}"] for s in suffixes]) for i in layers]
        )

    def attention(layers):
        parts = {
            "input_norm": ["input_layernorm.weight"],
            "post_norm": ["post_attention_layernorm.weight"],
            "qkv": [f"self_attn.{h}_proj.weight" for h in "qkv"],
            "o": ["self_attn.o_proj.weight"],
            "q_norm": ["self_attn.q_norm.weight"],
            "k_norm": ["self_attn.k_norm.weight"],
        }
        if parsed.attention_bias:
            parts |= {
                "qkv_bias": [f"self_attn.{h}_proj.bias" for h in "qkv"],
                "o_bias": ["self_attn.o_proj.bias"],
            }
        return {key: stack(layers, *suffixes) for key, suffixes in parts.items()}

    expected = {"embed": tensors[EMBED], "final_norm": tensors["model.norm.weight"], "runs": []}
    if not parsed.tie_word_embeddings:
        expected["lm_head"] = tensors[HEAD]
    for run in parsed.runs:
        layers = range(run.start, run.start + run.count)
        mlp = (
            {"router": stack(layers, "mlp.gate.weight")}
            if run.moe
            else {
                "gate_up": stack(layers, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
                "down": stack(layers, "mlp.down_proj.weight"),
            }
        )
        expected["runs"].append(attention(layers) | mlp)
    assert jax.tree.structure(loaded.params) == jax.tree.structure(expected)
    for found, wanted in zip(
        jax.tree.leaves(loaded.params), jax.tree.leaves(expected), strict=True
    ):
        assert isinstance(found, jax.Array) and found.committed and found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found), wanted.astype(dtype))

    store = np.asarray(loaded.store.arrays["dense"])
    assert loaded.store.layouts["dense"] == loaded.layout
    moe = [i for i, is_moe in enumerate(parsed.moe_layers) if is_moe]
    assert store.shape == (len(moe), parsed.num_experts, loaded.layout.rows, parsed.hidden_size)
    for layer, i in enumerate(moe):
        for e in range(parsed.num_experts):
            prefix = f"model.layers.{i}.mlp.experts.{e}."
            gate, up, down = (tensors[f"{prefix}{m}_proj.weight"] for m in ("gate", "up", "down"))
            np.testing.assert_array_equal(store[layer, e], record_of(gate, up, down, dtype))


def stacked(tensors, layer, experts):
    """The same tensors with one layer's experts stacked, as transformers 5 keeps them in memory."""
    tensors, prefix = dict(tensors), f"model.layers.{layer}.mlp.experts."
    parts = {
        m: [tensors.pop(f"{prefix}{e}.{m}_proj.weight") for e in range(experts)]
        for m in ("gate", "up", "down")
    }
    tensors[prefix + "gate_up_proj"] = np.concatenate(
        [np.stack(parts["gate"]), np.stack(parts["up"])], axis=1
    )
    tensors[prefix + "down_proj"] = np.stack(parts["down"])
    return tensors
