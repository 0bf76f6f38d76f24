"""plan's kernel compiled for an H200 at the sizes of real models."""

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.plan import Tables, plan, plan_routed
from pallas_kernels.plan.record import record_size
from tests.aot.models import MODELS
from tests.aot.ptxas import compile_kernels

pytestmark = pytest.mark.aot

Array = jax.ShapeDtypeStruct


def tables_of(layers, cells, experts):
    """Shapes of the tables."""
    of_cells, of_experts = (Array((layers, n), jnp.int32) for n in (cells, experts))
    one, weights = (Array((n,), jnp.int32) for n in (layers, 3))
    return Tables(*[of_cells] * 4, *[of_experts] * 5, one, weights)


def nbytes(tables):
    return sum(4 * table.size for table in tables)


def stores_follow_loads(kernel):
    """No load from global memory comes after a store to it, and a barrier lies between: threads
    read what other threads of the program write."""
    loads, barriers, stores = (
        [found.start() for found in re.finditer(rf"\b{word}\b", kernel.ptx)]
        for word in (r"ld\.global", r"bar\.sync|barrier\.sync", r"st\.global")
    )
    return any(max(loads) < barrier < min(stores) for barrier in barriers)


SIZES = {
    **{name: (model.layers, model.experts, model.experts) for name, model in MODELS.items()},
    "60 experts": (24, 60, 60),
    "512 experts, 70 cells": (48, 70, 512),
}


ALWAYS = ("512 experts, 70 cells",)


@pytest.mark.parametrize("rows", [16, pytest.param(64, marks=pytest.mark.nightly)])
def test_routed_at_a_real_size(rows):
    """As in a decode step: tables and records in place, and no launch but the kernel and the
    loop's index and condition."""
    layers, experts, top_k = 48, 128, 8

    def steps(tables, records, ids, weights):
        def layer(carry, i):
            tables, records = carry
            tables, records, work = plan_routed(
                tables, i, ids, weights, records, implementation="pallas"
            )
            return (tables, records), work.fill_count

        return jax.lax.scan(layer, (tables, records), jnp.arange(layers))

    tables = tables_of(layers, experts, experts)
    records = Array((layers, record_size(rows * top_k, experts)), jnp.int32)
    routing = Array((rows, top_k), jnp.int32), Array((rows, top_k), jnp.float32)
    program, kernels = compile_kernels(steps, tables, records, *routing, donate_argnums=(0, 1))
    assert program.memory.alias_bytes == nbytes(tables) + 4 * records.size
    assert program.copies(4 * layers * experts) == []
    assert kernels["plan"].spill_bytes == 0 and kernels["plan"].registers <= 128


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.nightly] * (n not in ALWAYS)) for n in SIZES],
)
def test_real_sizes(name):
    """Inside a scan over the layers, as in a step."""
    layers, cells, experts = SIZES[name]

    def steps(tables, active):
        def layer(tables, i):
            return plan(tables, i, active[i], implementation="pallas")

        return jax.lax.scan(layer, tables, jnp.arange(layers))

    tables = tables_of(layers, cells, experts)
    program, kernels = compile_kernels(
        steps, tables, Array((layers, experts), bool), donate_argnums=0
    )
    assert program.kernels().count("plan") == 1
    assert program.memory.alias_bytes == nbytes(tables)
    assert program.copies(4 * layers * min(cells, experts)) == []
    kernel = kernels["plan"]
    assert kernel.spill_bytes == 0
    assert kernel.registers <= 128 and kernel.shared_bytes <= 4 * 1024
    assert stores_follow_loads(kernel)
