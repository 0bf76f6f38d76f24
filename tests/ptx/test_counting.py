"""Programs of which the last one adds up what all made (pallas_kernels.triton.is_last)."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton import is_last, triton_call
from tests.ptx.parse import Fault
from tests.ptx.program import interpret

pytestmark = pytest.mark.aot

ROWS, PROGRAMS, WIDTH = 3, 7, 128


def twice_the_sum(x, counters):
    """[ROWS, WIDTH], mirrored, so that each thread reads what others wrote; and the counters."""
    parts = jax.ShapeDtypeStruct(x.shape, x.dtype)
    sums = jax.ShapeDtypeStruct((ROWS, WIDTH), x.dtype)
    return triton_call(
        kernel,
        name="twice_the_sum",
        grid=(ROWS, PROGRAMS),
        out_shape=(parts, sums, jax.ShapeDtypeStruct(counters.shape, counters.dtype)),
        num_warps=4,
        num_stages=1,
        aliases={1: 2},
    )(x, counters)[1:]


def kernel(x, _, parts, out, counters):
    row, program, column = pl.program_id(0), pl.program_id(1), jnp.arange(WIDTH)
    plgpu.store(parts.at[row, program, column], 2 * plgpu.load(x.at[row, program, column]))

    @pl.when(is_last(counters, (row,), PROGRAMS))
    def _():
        def add(other, total):
            return total + plgpu.load(parts.at[row, other, WIDTH - 1 - column])

        total = jax.lax.fori_loop(0, PROGRAMS, add, jnp.zeros(WIDTH, jnp.float32))
        plgpu.store(out.at[row, column], total)


def check(run):
    x = np.random.default_rng(0).integers(-9, 9, (ROWS, PROGRAMS, WIDTH)).astype(np.float32)
    got, counters = run(x=x, counters=np.zeros(ROWS, np.int32))
    np.testing.assert_array_equal(got, 2 * x.sum(1)[:, ::-1])
    np.testing.assert_array_equal(counters, 0)  # for the next launch


def test_the_last_one_reads_what_all_made():
    check(interpret(twice_the_sum, ("counters",)))


def without_barrier(place):
    def edit(ptx):
        parts = re.split(r"bar\.sync\s+0;", ptx)
        joined = ["bar.sync 0;"] * (len(parts) - 1) + [""]
        joined[place] = ""
        return "".join(a + b for a, b in zip(parts, joined, strict=True))

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without_barrier(0), "reads what another thread wrote.*race"),
        (without_barrier(1), "race"),
        (lambda ptx: ptx.replace("acq_rel", "relaxed"), "unknown instruction atom.*relaxed"),
        (lambda ptx: re.sub(rf", {PROGRAMS - 1};", f", {PROGRAMS - 2};", ptx), "race"),
        (lambda ptx: re.sub(rf", {PROGRAMS - 1};", f", {PROGRAMS};", ptx), "AssertionError"),
    ],
    ids=["no barrier before", "no barrier behind", "relaxed", "one too early", "never"],
)
def test_finds(edit, message):
    with pytest.raises((Fault, AssertionError)) as found:
        check(interpret(twice_the_sum, ("counters",), edit=edit))
    assert re.search(message, f"{type(found.value).__name__}: {found.value}")
