"""The checks that a kernel has to pass on a device before a model runs; interpreted here."""

import dataclasses
import json
import math
import re
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import OPS, resolve_ops
from pallas_kernels.expert_ffn import ClampedSwiGLU
from pallas_kernels.gated_delta import DeltaShape
from pallas_kernels.mosaic import why_not_mosaic
from pallas_kernels.rms_norm import api, reference
from pallas_kernels.route import RouteRule
from pallas_kernels.selective_scan import ScanShape
from pallas_kernels.triton import interpreted
from pallas_kernels.verification import (
    NOT_CHECKED,
    CannotCheck,
    Job,
    ModelShape,
    Unverified,
    checks,
    current,
    load_table,
    outcomes,
    require_verified,
    run_checks,
    table,
    unverified,
    why_no_kernels,
)
from pallas_kernels.verification.apart import outcomes_apart
from pallas_kernels.verification.check import StateShape, make_check, prepare
from tests.pallas_kernels.faulty_checks import make_checks, toy_job

SMALL = ModelShape(
    hidden=64,
    width=32,
    experts=8,
    rule=RouteRule(2, normalize=True),
    heads=4,
    kv_heads=2,
    head_dim=32,
    products=(
        (256, 64, True, "bfloat16"),
        (64, 128, True, "bfloat16"),
        (8, 64, False, "float32"),
        (96, 64, False, "float32"),
        (64, 48, False, "bfloat16"),
    ),
    block_size=16,
    window=None,
    activation="silu",
    dtype="bfloat16",
    vocabulary=96,
    states=(
        StateShape("gated_delta", (DeltaShape(1, 2, 16, 16, 4), True)),
        StateShape("gated_delta", (DeltaShape(2, 2, 16, 8, 4, each=True), False)),
        StateShape("selective_scan", (ScanShape(2, 16, 1, 16), (0.0, math.inf))),
        StateShape("short_conv", (40, 3, True)),
    ),
    state_page=(16, 32),
)


@pytest.fixture(autouse=True)
def interpreter():
    with interpreted():
        yield


WIDE = 1 << 17
"""Instead of 4 GiB: enough for records and pages to lie behind something."""


def small_checks(shape=SMALL, **ops):
    wanted = resolve_ops(dict.fromkeys(resolve_names(), "xla") | ops, dtype="bfloat16")
    return checks(shape, wanted, WIDE)


def resolve_names():
    """Ops that have a kernel."""
    return [op for op, names in OPS.items() if "pallas" in names]


@pytest.mark.nightly
@pytest.mark.slow
def test_every_kernel_passes_its_checks():
    found = small_checks(**dict.fromkeys(resolve_names(), "pallas"))
    found += small_checks(dataclasses.replace(SMALL, norm="layer_norm"), layer_norm="pallas")
    found += small_checks(LATENT, latent_write="pallas", head_linear="pallas")
    assert len({check.key for check in found}) == len(found)
    assert {check.op for check in found} == set(resolve_names())
    wide = {check.op for check in found if "offsets 64" in check.key}
    paged = {"kv_write", "latent_write", "paged_attention"}
    paged |= {"gated_delta", "selective_scan", "short_conv"}
    assert wide == {"fill", "stage", "move", "expert_ffn", "fill_ffn"} | paged
    device = jax.devices()[0]
    errors = {check.key: (check.error(device), check.tolerance) for check in found}
    assert {key: e for key, (e, most) in errors.items() if not e <= most} == {}
    # Rounded results differ a little: a check that compared a kernel with itself would not.
    assert any(error > 0 for error, _ in errors.values())


RECORD_OPS = ("fill", "stage", "move", "expert_ffn")
VERSIONS = (("dense", "lossless12"), ("int4", "int4"), ("int2", "int2"))


def test_other_versions_are_other_kernels():
    wanted = dict.fromkeys(RECORD_OPS, "pallas")
    dense = {check.key for check in small_checks(**wanted)}
    found = small_checks(dataclasses.replace(SMALL, versions=VERSIONS), **wanted)
    assert len({check.key for check in found} - dense) == len(found) == len(dense)
    keys = [check.key for check in found if check.op == "fill"]
    assert keys == [
        f"fill 96x64 lossless12 to dense, int4, int2{wide} uint16" for wide in ("", " offsets 64")
    ]


def test_versions_that_are_filled_by_a_kernel_alone_are_not_checked_together():
    wanted = {"fill_ffn": "pallas"}
    assert len(small_checks(**wanted)) == 8
    assert small_checks(dataclasses.replace(SMALL, versions=VERSIONS), **wanted) == []
    coded = dataclasses.replace(SMALL, versions=VERSIONS[1:])
    assert len(small_checks(coded, **wanted)) == 8


OF_GPT_OSS = dataclasses.replace(
    SMALL,
    width=96,
    versions=(("fp4-32-e8m0", "fp4-32-e8m0"),),
    biases=True,
    activation=ClampedSwiGLU(7.0, 1.702),
)
OTHERS = (
    *((op, dataclasses.replace(SMALL, versions=VERSIONS)) for op in RECORD_OPS),
    *((op, OF_GPT_OSS) for op in ("expert_ffn", "fill_ffn")),
    *((op, dataclasses.replace(SMALL, gated=False)) for op in ("expert_ffn", "fill_ffn")),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "shape"),
    [
        pytest.param(*each, id=f"{each[0]}-{n}", marks=[pytest.mark.nightly] * (each[0] != "move"))
        for n, each in enumerate(OTHERS)
    ],
)
def test_kernels_of_other_experts_pass_their_checks(op, shape):
    few = [check for check in small_checks(shape, **{op: "pallas"}) if "offsets" not in check.key]
    few = [check for check in few if "tokens 32" not in check.key and "tokens 64" not in check.key]
    errors = {check.key: (check.error(jax.devices()[0]), check.tolerance) for check in few}
    assert errors and {key: e for key, (e, most) in errors.items() if not e <= most} == {}


def test_only_kernels_that_would_run_are_checked():
    assert {check.op for check in small_checks(route="pallas", fill="pallas")} == {"route", "fill"}
    assert small_checks() == []


LATENT = dataclasses.replace(
    SMALL, kv_heads=1, head_dim=24, latent=16, up_projection=(16, 8), interleave=True
)


def toy_checks(count, run=None, arena=False):
    """Checks that take no kernel: of operands i, optionally of an arena that changes in place."""

    def doubled(name, *args):
        x = args[-1]
        return (args[0].at[0].set(x), x * 2) if arena else x * 2

    made = {"arena": lambda: jnp.zeros(4096, jnp.uint16)} if arena else {}
    return [
        make_check(
            "fill", f"toy {i}", "uint16", lambda i=i: (jnp.uint16(i),), run or doubled, **made
        )
        for i in range(count)
    ]


def test_checks_compile_at_once_and_run_in_order():
    """Four threads wait for each other while they trace; only one check runs at a time."""
    barrier, device = threading.Barrier(4, timeout=60), jax.devices()[0]

    def run(name, x):
        if name == "pallas":
            barrier.wait()
        return x

    wanted = toy_checks(8, run)
    found = [outcome.key for outcome in outcomes(wanted, device, 4) if outcome.error == 0]
    assert found == [check.key for check in wanted]


def test_the_arena_is_donated_and_compared():
    device = jax.devices()[0]
    (check,) = toy_checks(1, arena=True)
    for name in ("pallas", "xla"):
        memory = prepare(check, device).programs[name].memory_analysis()
        assert memory.alias_size_in_bytes == 2 * 4096
    assert check.error(device) == 0

    def wrong(name, arena, x):
        return arena.at[1].set(7 if name == "pallas" else 0), x

    (check,) = toy_checks(1, wrong, arena=True)
    assert check.error(device) == float("inf")
    unseen = dataclasses.replace(check, seen=lambda arena: arena[2:])
    assert unseen.error(device) == 0


def test_mosaic_kernels_have_checks_of_their_own():
    product = 128, 128, False, "bfloat16"
    shape = dataclasses.replace(SMALL, hidden=128, width=128, products=(product,))
    wanted = dict.fromkeys(("rms_norm", "linear", "expert_ffn"), "mosaic")
    if why_not_mosaic():
        with pytest.raises(ValueError, match=r"need jax 0.12 or newer, and this is jax 0\.1[01]"):
            small_checks(shape, **wanted)
        return
    found = small_checks(shape, **wanted)
    assert all(check.key.endswith(" bfloat16 mosaic") for check in found)
    assert [check.op for check in found[:4]] == ["linear"] * 3 + ["rms_norm"]
    assert {check.op for check in found[4:]} == {"expert_ffn"}
    error = found[3].error(jax.devices()[0])
    assert 0 <= error <= found[3].tolerance


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (lambda x, *_: reference.rms_norm(x, *_).at[5, 7].multiply(1.1), "is wrong on .* by "),
        (lambda x, *_: x * jnp.nan, ".* deviates by inf"),
        (lambda *_: 1 / 0, r"does not run on .*division by zero"),
    ],
)
def test_a_kernel_that_fails_is_named(monkeypatch, kernel, why):
    monkeypatch.setitem(api.IMPLEMENTATIONS, "pallas", kernel)
    (outcome,) = outcomes(small_checks(rms_norm="pallas"), jax.devices()[0])
    assert outcome.failed and re.search(f"rms_norm 64 bfloat16 {why}", outcome.why)


# ---- in processes of their own

CPU = jax.devices()[0]


def toy_keys(*numbers):
    return [f"fill toy {number} uint16" for number in numbers]


def table_of(folder):
    return load_table(folder / table.file_name(CPU.device_kind))


def test_what_was_checked_is_not_checked_again(tmp_path, monkeypatch):
    """Nor is anything imported from the working directory."""
    (tmp_path / "numpy.py").write_text("raise SystemExit('another numpy')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path)])  # as that of a command
    job, kept = toy_job(5), []
    wanted = job.checks()
    ran = require_verified(
        job, wanted, CPU, tmp_path, lambda _: kept.append(len(table_of(tmp_path)))
    )
    assert ran == 5 and kept == [1, 2, 3, 4, 5]  # whoever is killed loses the check that runs
    assert require_verified(job, wanted, CPU, tmp_path) == 0
    path = tmp_path / table.file_name(CPU.device_kind)
    assert table.left_over(CPU.device_kind, tmp_path) == 0
    written = json.loads(path.read_text())
    assert written["jax"] == jax.__version__ and written["device"] == CPU.device_kind
    # Another source of the kernel is another kernel, and so is another driver.
    for number, field in enumerate(("source", "runtime")):
        written["checks"][wanted[number].key][field] = "0" * 16
    path.write_text(json.dumps(written))
    assert unverified(wanted, current(CPU, tmp_path)) == toy_keys(0, 1)


@pytest.mark.nightly  # starts of tests/moejax/start/test_kernel_checks.py meet the same faults
def test_a_fault_is_that_of_one_check():
    """Whatever a kernel does, every other one is checked."""
    faults = {"wrong": 1, "raises": 3, "poisons": 4, "aborts": 6, "crashes": 8, "hangs": 9}
    job = toy_job(12, **faults)
    found = {o.key: o for o in outcomes_apart(job, toy_keys(*range(12)), CPU, 2, patience=8)}
    assert [*sorted(found)] == sorted(toy_keys(*range(12)))
    faults.pop("poisons")  # its own numbers are right, and so are the others' without it
    assert {o.key for o in found.values() if o.failed} == {*toy_keys(*faults.values())}
    said = [found[key].why for key in toy_keys(*faults.values())]
    parts = "deviates by inf", "no such instruction", "(SIGABRT", "(SIGSEGV", "(it hangs)"
    assert all(part in why for part, why in zip(parts, said, strict=True))


@pytest.mark.slow
def test_failures_are_remembered_and_come_last(tmp_path):
    job = toy_job(4, wrong=0, **{"lacks memory": 1})
    wanted = job.checks()
    for _ in run_checks(job, toy_keys(0, 1, 2), CPU, tmp_path):
        pass
    known = current(CPU, tmp_path)
    assert {*known} == {*toy_keys(0, 2)}  # no memory is no fault of a kernel
    assert unverified(wanted, known) == toy_keys(1, 3, 0)
    assert "is wrong on cpu" in why_no_kernels(wanted, known)["fill"]
    assert why_no_kernels(wanted[1:], known) == {"fill": NOT_CHECKED}
    assert table.left_over(CPU.device_kind, tmp_path) == 1
    with pytest.raises(Unverified, match=r"is wrong on cpu .*; use ops=fill=xla and report it"):
        require_verified(job, wanted[:1], CPU, tmp_path)


def test_two_starts_keep_the_checks_of_both(tmp_path):
    path, entry = tmp_path / "table.json", table.Entry(0.0, "source", "runtime")

    def keep(start):
        for number in range(40):
            table._keep(path, CPU, f"{start} {number}", entry, 0)

    threads = [threading.Thread(target=keep, args=(start,)) for start in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(load_table(path)) == 80


def test_processes_that_do_not_start_are_no_fault_of_a_kernel(tmp_path):
    job = Job(make_checks, (1, {}, "fill", "an argument too many"))
    with pytest.raises(CannotCheck, match="no check can start: exit status 1, TypeError"):
        [*outcomes_apart(job, toy_keys(0), CPU)]


def test_a_damaged_table_says_which_file(tmp_path):
    (tmp_path / table.file_name(CPU.device_kind)).write_text('{"checks": {"a": {}}}')
    with pytest.raises(ValueError, match=r"is not a table of checked kernels .* delete it"):
        current(CPU, tmp_path)


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path, caplog, monkeypatch):
    (tmp_path / "file").write_text("")
    here = lambda job, keys, *_: outcomes(job.checks(), CPU)  # noqa: E731
    monkeypatch.setattr(table, "outcomes_apart", here)
    job = toy_job(1)
    assert require_verified(job, job.checks(), CPU, tmp_path / "file") == 1
    assert "no check is remembered" in caplog.text
