"""The checks that a kernel has to pass on a device before a model runs; interpreted here."""

import dataclasses
import json
import threading

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import OPS, resolve_ops
from pallas_kernels.rms_norm import api, reference
from pallas_kernels.route import RouteRule
from pallas_kernels.triton import interpreted
from pallas_kernels.verification import (
    ModelShape,
    Unverified,
    checks,
    load_table,
    outcomes,
    require_verified,
    table,
)
from pallas_kernels.verification.check import IMPLEMENTATIONS, make_check, prepare

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


@pytest.mark.slow
@pytest.mark.parametrize(
    "op",
    ["move", *(pytest.param(op, marks=pytest.mark.nightly) for op in RECORD_OPS if op != "move")],
)
def test_kernels_of_other_versions_pass_their_checks(op):
    shape = dataclasses.replace(SMALL, versions=VERSIONS)
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


def test_what_was_checked_is_not_checked_again(tmp_path):
    wanted, device, ran = small_checks(rms_norm="pallas"), jax.devices()[0], []

    def report(check, error):
        ran.append(check.key)

    assert require_verified(wanted, device, tmp_path, report) == len(wanted) == len(ran)
    assert require_verified(wanted, device, tmp_path, report) == 0
    path = tmp_path / table.file_name(device)
    assert load_table(path)[wanted[0].key].error <= wanted[0].tolerance
    written = json.loads(path.read_text())
    assert written["jax"] == jax.__version__ and written["device"] == device.device_kind
    # Another source of the kernel is another kernel, and so is another driver.
    for field in ("source", "runtime"):
        written["checks"][wanted[0].key][field] = "0" * 16
        path.write_text(json.dumps(written))
        assert require_verified(wanted, device, tmp_path) == 1
        written = json.loads(path.read_text())


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


def test_each_check_is_kept_before_the_next_one_ends(tmp_path):
    """Whoever is killed loses the check that runs."""
    wanted, device = toy_checks(5), jax.devices()[0]
    path, kept = tmp_path / table.file_name(device), []
    require_verified(wanted, device, tmp_path, lambda *_: kept.append(len(load_table(path))), 3)
    assert kept == [1, 2, 3, 4, 5]


def test_checks_compile_at_once_and_run_in_order():
    """Four threads wait for each other while they trace; only one check runs at a time."""
    barrier, device = threading.Barrier(4, timeout=60), jax.devices()[0]

    def run(name, x):
        if name == "pallas":
            barrier.wait()
        return x

    wanted = toy_checks(8, run)
    assert [check for check, error in outcomes(wanted, device, 4) if error == 0] == wanted


def test_a_check_that_fails_stops_no_other():
    def broken(name, x):
        if name == "pallas":
            raise RuntimeError("no such instruction")
        return x

    wanted = [*toy_checks(1), *toy_checks(1, broken), *toy_checks(1)]
    found = [result for _, result in outcomes(wanted, jax.devices()[0], 2)]
    assert found[0] == found[2] == 0
    assert isinstance(found[1], Unverified) and "no such instruction" in str(found[1])


def test_the_arena_is_donated_and_compared():
    device = jax.devices()[0]
    (check,) = toy_checks(1, arena=True)
    for name in IMPLEMENTATIONS:
        memory = prepare(check, device).programs[name].memory_analysis()
        assert memory.alias_size_in_bytes == 2 * 4096
    assert check.error(device) == 0

    def wrong(name, arena, x):
        return arena.at[1].set(7 if name == "pallas" else 0), x

    (check,) = toy_checks(1, wrong, arena=True)
    assert check.error(device) == float("inf")
    unseen = dataclasses.replace(check, seen=lambda arena: arena[2:])
    assert unseen.error(device) == 0


def test_a_wrong_kernel_is_refused_by_name(tmp_path, monkeypatch):
    def wrong(x, weights, layer, eps):
        return reference.rms_norm(x, weights, layer, eps).at[5, 7].multiply(1.1)

    monkeypatch.setitem(api.IMPLEMENTATIONS, "pallas", wrong)
    wanted = small_checks(rms_norm="pallas")
    with pytest.raises(
        Unverified, match=r"rms_norm 64 bfloat16 is wrong on .*use ops=rms_norm=xla"
    ):
        require_verified(wanted, jax.devices()[0], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_kernel_that_gives_nan_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(api.IMPLEMENTATIONS, "pallas", lambda x, *_: x * jnp.nan)
    with pytest.raises(Unverified, match="deviates by inf"):
        require_verified(small_checks(rms_norm="pallas"), jax.devices()[0], tmp_path)


def test_a_damaged_table_says_which_file(tmp_path):
    path = tmp_path / table.file_name(jax.devices()[0])
    path.write_text('{"checks": {"a": {}}}')
    with pytest.raises(ValueError, match=r"is not a table of checked kernels .* delete it"):
        require_verified(small_checks(rms_norm="pallas"), jax.devices()[0], tmp_path)


def test_a_kernel_that_does_not_compile_is_refused_by_name(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("Shared memory size limit exceeded")

    monkeypatch.setitem(api.IMPLEMENTATIONS, "pallas", broken)
    message = r"rms_norm 64 bfloat16 does not run on .*Shared memory.*use ops=rms_norm=xla"
    with pytest.raises(Unverified, match=message):
        require_verified(small_checks(rms_norm="pallas"), jax.devices()[0], tmp_path)


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert require_verified(small_checks(rms_norm="pallas"), jax.devices()[0], tmp_path / "file")
    assert "checked at every start" in caplog.text
