"""Single layers on arrays, where no checkpoint is needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.checkpoints.random_model import abstract_params
from moejax.models.config import parse_config
from moejax.models.layers import Decoder
from moejax.step.context import StepContext
from moejax.step.parts import decode_tokens
from pallas_kernels import resolve_ops
from pallas_kernels.kv_write import KVPage
from tests.moejax.models.families import config_of


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_clipped_keys_and_values_are_clipped_after_their_norms(heads):
    fields = {"num_attention_heads": heads, "num_key_value_heads": 1, "num_hidden_layers": 1}
    config = parse_config(
        config_of("OlmoeForCausalLM", clip_qkv=0.5, dtype="float32", **fields),
    )
    leaves, tree = jax.tree.flatten(abstract_params(config))
    draws = [jax.random.normal(jax.random.key(i), leaf.shape) for i, leaf in enumerate(leaves)]
    ops, page = resolve_ops(), KVPage(16, 1, config.head_dim)
    stack = Decoder(config, jax.tree.unflatten(tree, draws), ops).runs[0]
    rows = jnp.arange(4)
    context = StepContext(stores=(), ops=ops, activation=config.hidden_act, row_tile=4, page=page)
    tokens = decode_tokens(rows * 0, jnp.zeros((4, 4), int) + 32 * rows[:, None], context)
    arena = jnp.zeros((128 * config.head_dim // 32, 64), jnp.uint16)
    _, arena, *_ = stack.attend(jnp.int32(0), draws[0][:4], arena, tokens, page)
    written = np.asarray(arena).view(np.float32)
    assert np.abs(written).max() == 0.5
