"""Programs of which the last one adds up what all made (pallas_kernels.triton.is_last)."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton import interpreted, is_last, triton_call
from tests.ptx.parse import Fault
from tests.ptx.program import interpret

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


def case():
    x = np.random.default_rng(0).integers(-9, 9, (ROWS, PROGRAMS, WIDTH)).astype(np.float32)
    return dict(x=x, counters=np.zeros(ROWS, np.int32)), 2 * x.sum(1)[:, ::-1]


def test_pallas_interpreter():
    inputs, want = case()
    with interpreted():
        got, counters = jax.jit(twice_the_sum)(**inputs)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(counters, 0)


@pytest.mark.aot
@pytest.mark.parametrize("card", ["h200", "rtx4090"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_last_one_reads_what_all_made(card, seed):
    check_sums(card=card, launch={"seed": seed})


def check_sums(**options):
    inputs, want = case()
    got, counters = interpret(twice_the_sum, ("counters",), **options)(**inputs)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(counters, 0)  # for the next launch


def without_one_barrier(place: int) -> Callable[[str], str]:
    def edit(ptx: str) -> str:
        parts = re.split(r"bar\.sync\s+0;", ptx)
        assert len(parts) > place + 1
        joined = ["bar.sync 0;"] * (len(parts) - 1)
        joined[place] = ""
        return "".join(a + b for a, b in zip(parts, [*joined, ""], strict=True))

    return edit


@pytest.mark.aot
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without_one_barrier(0), "reads what another thread wrote.*race"),
        (without_one_barrier(1), "race"),
        (lambda ptx: ptx.replace("acq_rel", "relaxed"), "unknown instruction atom.*relaxed"),
        (lambda ptx: re.sub(rf", {PROGRAMS - 1};", f", {PROGRAMS - 2};", ptx), "race"),
        (lambda ptx: re.sub(rf", {PROGRAMS - 1};", f", {PROGRAMS};", ptx), "AssertionError"),
    ],
    ids=["no barrier before", "no barrier behind", "relaxed", "one too early", "never"],
)
def test_finds(edit, message):
    with pytest.raises((Fault, AssertionError)) as found:
        check_sums(edit=edit)
    assert re.search(message, f"{type(found.value).__name__}: {found.value}")
