"""Kernels of Mosaic GPU: the interpreter runs one of jax's own, in which every kind of barrier is,
and finds what is taken out of it."""

import functools
import re
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from tests.ptx.parse import Fault
from tests.ptx.program import compiled_call

pytestmark = [pytest.mark.aot, pytest.mark.slow]

ROWS, COLUMNS, DEPTH = 128, 256, 192
GIVEN = tuple(
    np.random.default_rng(0).normal(size=shape).astype(ml_dtypes.bfloat16)
    for shape in ((ROWS, DEPTH), (DEPTH, COLUMNS))
)


@functools.cache
def product():
    """jax's product for an H200: a warpgroup fetches tiles, two multiply them and store the result;
    two programs make two tiles each."""
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as template

    config = template.TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2)
    with mock.patch.object(template, "get_num_sms", return_value=2):
        return compiled_call(
            "h200",
            lambda given: template.matmul(*given, None, config),
            (GIVEN,),
            donated=lambda path: False,
            on_host=lambda path: False,
        )


def run(edit=lambda ptx: ptx) -> str:
    """What is wrong with the product of an edited kernel."""
    x, y = (one.astype(np.float32) for one in GIVEN)
    try:
        got, _ = product().run(GIVEN, launch={"most": 20_000}, edit=edit)
    except Fault as fault:
        return str(fault)
    exact = np.allclose(got.astype(np.float32), x @ y, rtol=1e-2, atol=0.1)
    return "" if exact else "wrong values"


def test_a_product_by_three_warpgroups():
    assert run() == ""


WAIT = r"(?s)\{\s*\.reg \.pred\s+P1;.*?DONE:\s*\}"
"""plgpu.barrier_wait."""
ARRIVE = r"(@%p\d+ )?mbarrier\.arrive\.(release\.cta\.)?shared(::cta)?\.b64[^;]*;"
MISSING = {
    "the consumers' wait for a tile": (WAIT, -1, "", "copy writes that was not waited for"),
    "the wait for a tile that is free": (WAIT, 2, "", "race"),
    "the consumers' arrival": (ARRIVE, 0, "", "wait at a barrier that others never reach"),
    "the wait for products": (r"wgmma\.wait_group[^;]*;", 0, "", "a product reads.*race"),
    "the fence before a store": (r"fence\.proxy\.async[^;]*;", 0, "", "fence.proxy.async"),
    "the last wait for stores": (r"cp\.async\.bulk\.wait[^;]*;", -1, "", "ends while"),
    "the barriers' initial counts": (
        *(r"(mbarrier\.init\S* \[[^\]]*\], )%r\d+;", 0, r"\g<1>512;"),
        "wait at a barrier that others never reach",
    ),
    "the barrier behind their making": (r"(?s)bar\.sync\s+0;(.*?)bar\.sync\s+0;", 0, r"\1", "race"),
}
"""What is taken out of the kernel: pattern, its number, what stays, what is said then."""


@pytest.mark.parametrize("name", MISSING)
def test_finds_that_it_lacks(name):
    pattern, number, by, said = MISSING[name]

    def edit(ptx: str) -> str:
        where = list(re.finditer(pattern, ptx))[number]
        return ptx[: where.start()] + where.expand(by) + ptx[where.end() :]

    message = run(edit)
    assert re.search(said, message, re.DOTALL), f"{name}: {message or 'nothing was found'}"
