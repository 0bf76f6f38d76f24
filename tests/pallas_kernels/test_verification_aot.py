"""The checks of a start at Qwen3-30B-A3B, compiled for an H200: how long, and no copies."""

import functools
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from resource import RUSAGE_CHILDREN, RUSAGE_SELF

import jax
import pytest

from moejax.checkpoints.random_model import shape
from moejax.start import kernels
from moejax.start.decide.shapes import step_shapes
from moejax.step.parts import StepSpec
from pallas_kernels import resolve_ops
from pallas_kernels.verification.check import IMPLEMENTATIONS, argument_shapes
from pallas_kernels.verification.checks import WIDE_BYTES
from tests.aot.aot_h200 import compile_for_h200

pytestmark = pytest.mark.aot

THREADS = 2
"""Of the machine that tests run on."""


@functools.cache
def start_checks():
    """Key → check, of those that a start at full size needs: 64 sequences, dense bfloat16 experts,
    an arena of 24 GiB."""
    config = shape("qwen3-30b-a3b")
    layout = config.slot_layout(itemsize=2)
    limits = dict(rows=64, max_model_len=4096, max_num_batched_tokens=8192, waves=8)
    ops = resolve_ops("auto", platform="gpu", dtype="bfloat16")
    shapes = step_shapes(layout, **limits, bucketed=True)
    steps = StepSpec("NVIDIA H200", "", "device", ops, config, "bfloat16", layout, shapes)
    needed, _ = kernels.start_checks(steps, 24 << 30)
    return {check.key: check for check in needed}


def programs(check):
    """Program → (function, arguments, which are donated, which are in pinned memory), all that
    Prepared has but what makes records and looks at a result."""
    args = argument_shapes(check)
    donated = () if check.arena is None else (0,)
    host = () if check.stores is None else (len(donated),)
    found = {"operands": (check.operands, (), (), ())}
    if check.arena is not None:
        found["arena"] = (check.arena, (), (), ())
        found["seen"] = (check.seen, args[:1], (), ())
    for name in IMPLEMENTATIONS:
        found[name] = (functools.partial(check.run, name), args, donated, host)
    return found


def compiled(check):
    """Program → what came out, of a check, and the seconds it took."""
    began, found = time.perf_counter(), {}
    for name, (function, args, donated, host) in programs(check).items():
        found[name] = compile_for_h200(function, *args, donate_argnums=donated, host_argnums=host)
    return found, time.perf_counter() - began


def nothing_is_copied(check, found):
    """No program of a check has a second arena: none that changes one copies it, none that makes
    one makes two, none that reads one copies what it reads."""
    arrays = [a for a in jax.tree.leaves(argument_shapes(check)) if a.size * 2 >= WIDE_BYTES // 2]
    least = min([a.size * a.dtype.itemsize for a in arrays], default=64 << 20)
    for name, program in found.items():
        assert not program.copies(min_bytes=min(least // 2, 64 << 20)), (check.key, name)
        assert not program.host_copies(min_bytes=64 << 20), (check.key, name)
    if check.arena is not None:
        arena = argument_shapes(check)[0]
        for name in IMPLEMENTATIONS:
            assert found[name].memory.alias_bytes >= arena.size * 2, (check.key, name)
    if check.wide:
        for name, program in found.items():
            assert program.memory.temp_bytes < WIDE_BYTES // 8, (check.key, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "op", ["fill", *(pytest.param(op, marks=pytest.mark.nightly) for op in ("move", "kv_write"))]
)
def test_no_operand_of_a_check_is_copied(op):
    """An arena beyond 4 GiB; test_a_start… has all."""
    (check,) = (c for c in start_checks().values() if c.op == op and c.wide)
    nothing_is_copied(check, compiled(check)[0])


@pytest.mark.nightly
def test_a_copy_would_be_found():
    """The same check with its arena undonated."""
    (check,) = (c for c in start_checks().values() if c.op == "fill" and c.wide)
    function, args, _, host = programs(check)["pallas"]
    kept = compile_for_h200(function, *args, host_argnums=host)
    with pytest.raises(AssertionError):
        nothing_is_copied(check, dict.fromkeys(IMPLEMENTATIONS, kept))


@pytest.mark.nightly
def test_a_start_compiles_its_checks_in_time():
    """Those that a start with an arena beyond 4 GiB needs, in parallel as `outcomes` compiles them;
    -s prints the figures. Counted in seconds of processors, as a busy machine's clock says more
    about the others."""
    every = start_checks()
    began, worked = time.perf_counter(), processor_seconds()
    with ThreadPoolExecutor(THREADS) as pool:
        found = dict(zip(every, pool.map(compiled, every.values()), strict=True))
    wall, worked = time.perf_counter() - began, processor_seconds() - worked
    print(f"\n{len(every)} checks, {THREADS} threads: {wall:.1f} s, {worked:.1f} s of processors")
    for key, (_, seconds) in sorted(found.items(), key=lambda item: -item[1][1])[:8]:
        print(f"{seconds:5.1f} s  {key}")
    for key, (programs_of, _) in found.items():
        nothing_is_copied(every[key], programs_of)
    assert len(every) == 66
    assert worked < 8 * 60  # of eight processors; machines with such a GPU have more


def processor_seconds():
    """What this process and those that it started have used."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (RUSAGE_SELF, RUSAGE_CHILDREN))
