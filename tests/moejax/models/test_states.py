"""Bytes of a sequence's state and of a token's KV, as published architectures say; states that
prompts share."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from moejax import LLM, SamplingParams
from moejax.models.config import parse_config
from moejax.step.step_parts import arena_ops
from tests.moejax.models.families import write_checkpoint

GRANITE = {
    "model_type": "granitemoehybrid",
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    "mamba_n_heads": 128,
    "mamba_d_state": 128,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "intermediate_size": 768,
}
NEMOTRON = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
KIMI = {
    "model_type": "kimi_linear",
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [i for i in range(1, 27) if i % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}
LAYERS = {  # (layers with state, bytes of one in bfloat16), bytes of a token's KV
    "Granite 4.0 H Small": (GRANITE, (36, 128 * 64 * 128 * 4 + 3 * (8192 + 2 * 128) * 2), 16_384),
    "Jamba v0.1": ({"model_type": "jamba"}, (28, 8192 * 16 * 4 + 3 * 8192 * 2), 16_384),
    "Nemotron 3 Nano": (
        {"model_type": "nemotron_h", "hidden_size": 2688, "num_key_value_heads": 2}
        | {"hybrid_override_pattern": NEMOTRON, "mamba_num_heads": 64},
        (23, 64 * 64 * 128 * 4 + 3 * (4096 + 2 * 8 * 128) * 2),
        6_144,
    ),
    "Kimi Linear 48B": (KIMI, (20, 32 * 128 * 128 * 4 + 3 * 3 * 4096 * 2), 7 * 576 * 2),
    "Qwen3.6 35B": (
        {"model_type": "qwen3_5_moe_text"},
        (30, 32 * 128 * 128 * 4 + 3 * 8192 * 2),
        20_480,
    ),
}


@pytest.mark.parametrize(("fields", "states", "token"), LAYERS.values(), ids=LAYERS)
def test_bytes_of_a_sequence(fields, states, token):
    config = parse_config(fields)
    count, each = states
    assert len(config.state_layers) == count and config.state is not None
    parts = config.state.state("bfloat16")
    arrays = [array for part in parts for array in part]
    assert sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in arrays) == each
    page = config.slot_layout(2).page
    assert page.nbytes == page.block_size * token
    # Each op's part of a layer ends with a row, and the state with a page.
    padding = page.state_pages * page.nbytes - count * each
    assert 0 <= padding < page.nbytes + count * len(parts) * 2 * page.row_elements


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["Qwen3NextForCausalLM", "NemotronHForCausalLM"])
def test_a_shared_prefix_is_read_once(family, tmp_path):
    """Questions about a document of 3,000 tokens compute what follows its last whole chunk."""
    rng = np.random.default_rng(0)
    prefix, *rest = (rng.integers(1, 512, n).tolist() for n in (3000, 30, 70, 130))
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompts = [prefix, *([*prefix, *words] for words in rest)]
    directory = write_checkpoint(tmp_path, family, max_position_embeddings=4096)
    found = []
    for shares in (True, False):
        options = {"max_model_len": 3328, "max_num_seqs": 2, "max_num_batched_tokens": 256}
        with LLM(directory, enable_prefix_caching=shares, progress=False, **options) as llm:
            outputs = [llm.generate(prompt, params)[0] for prompt in prompts]
            found.append([output.outputs[0].token_ids for output in outputs])
            hits = llm.stats()["kv"]["prefix_hit_tokens"]
            assert hits == (len(rest) * (3000 // 64 * 64) if shares else 0)
    assert found[0] == found[1]


def test_ops_that_write_states():
    """The native library owns an arena only if each of these is native."""
    assert arena_ops(parse_config(GRANITE))[:3] == ("selective_scan", "short_conv", "kv_write")
