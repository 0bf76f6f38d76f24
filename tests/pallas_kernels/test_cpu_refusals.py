"""What the native ops of a layer refuse: layers, owners and places that are not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.memory.tables import empty_tables
from pallas_kernels import kv_write, latent_write, linear, plan, rms_norm, route
from pallas_kernels.kv_write import KVPage
from pallas_kernels.state_pages import Sequences
from tests.pallas_kernels.contract import NATIVE
from tests.pallas_kernels.ops import gated_delta

pytestmark = NATIVE

ERRORS = (ValueError, jax.errors.JaxRuntimeError)
"""Which of them a handler's refusal becomes is jax's choice."""

PAGES = {"kv_write": KVPage(4, 1, 8), "latent_write": KVPage(4, 1, 8, latent=4)}


def write(op, page, place, position=3):
    """Writes a token's KV to an arena of 32 KV rows."""
    arena = jnp.zeros((16, 16), jnp.uint16)
    positions, pages = jnp.array([position], jnp.int32), jnp.array([place], jnp.int32)
    places = kv_write.KVPlaces(positions, pages, 0)
    options = kv_write.WriteOptions(page, 1.0, 1e-6, op == "latent_write", "cpu")
    if op == "kv_write":
        qkv, frequencies = jnp.ones((1, 24), jnp.bfloat16), jnp.ones(4)
        heads = kv_write.ProjectedHeads(qkv, None, None, 0, frequencies)
        return kv_write.kv_write(heads, arena, places, options)
    kv, norm = jnp.ones((1, 8), jnp.bfloat16), jnp.ones((1, 4), jnp.bfloat16)
    q_rope = jnp.ones((1, 2, 4), jnp.bfloat16)
    heads = latent_write.LatentHeads(kv, norm, 0, q_rope, jnp.ones(2))
    return latent_write.latent_write(heads, arena, places, options)


@pytest.mark.parametrize("op", PAGES)
def test_a_place_outside_of_the_arena_is_not_written(op):
    page = PAGES[op]
    last = 32 - page.block_size * page.rows_per_token
    _, arena = write(op, page, last)
    assert np.any(np.asarray(arena).reshape(32, 8)[-1])
    message = rf"{op}: token 0 at position 3 of page {last + 1} is not in the arena"
    with pytest.raises(ERRORS, match=message):
        jax.block_until_ready(write(op, page, last + 1))
    with pytest.raises(ERRORS, match="at position -1 of page 0 is not in the arena"):
        jax.block_until_ready(write(op, page, 0, position=-1))


def test_a_state_outside_of_the_arena_is_not_advanced():
    spec = gated_delta.Spec((3,), "float32")
    inputs, arena, pages = gated_delta.case(spec, 0)
    zero = np.zeros(1, np.int32)
    for page in (-1, 10**6):
        where = Sequences(np.full_like(pages, page), zero, zero, zero + 3, np.int32(1))
        with pytest.raises(ERRORS, match="gated_delta: state pages of run 0 are not in the arena"):
            jax.block_until_ready(gated_delta.run(spec, "cpu", inputs, arena, where))


def test_an_owner_that_is_no_expert_is_refused():
    tables = empty_tables(1, 4, 2)
    active = jnp.ones(4, bool)
    tables = tables._replace(owner=jnp.array([[0, 4]], jnp.int32))
    with pytest.raises(ERRORS, match="plan: cell 1 has the owner 4"):
        jax.block_until_ready(plan.plan(tables, 0, active, implementation="cpu"))
    for layer in (-1, 1):
        with pytest.raises(ERRORS, match=f"plan: layer {layer}"):
            jax.block_until_ready(plan.plan(tables, layer, active, implementation="cpu"))


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_is_not_there_is_not_read(layer):
    x, weights = jnp.ones((1, 8)), jnp.ones((2, 8))
    with pytest.raises(ERRORS, match=f"rms_norm: layer {layer}"):
        jax.block_until_ready(rms_norm.rms_norm(x, weights, layer, 1e-6, implementation="cpu"))
    options = linear.LinearOptions(implementation="cpu")
    with pytest.raises(ERRORS, match=f"linear: layer {layer}"):
        jax.block_until_ready(linear.linear(x, jnp.ones((2, 3, 8)), layer, None, options))
    logits, valid, correction = jnp.ones((1, 4)), jnp.ones(1, bool), jnp.ones((2, 4))
    given = dict(rule=route.RouteRule(2), implementation="cpu")
    with pytest.raises(ERRORS, match=f"route: layer {layer}"):
        jax.block_until_ready(route.route(logits, valid, correction, layer, **given))
