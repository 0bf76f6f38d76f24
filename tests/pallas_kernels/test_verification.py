"""The checks that a kernel has to pass on a device before a model runs; interpreted here."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import resolve_ops
from pallas_kernels.rms_norm import api, reference
from pallas_kernels.triton import interpreted
from pallas_kernels.verification import (
    ModelShape,
    Unverified,
    checks,
    load_table,
    require_verified,
    table,
)

SMALL = ModelShape(
    hidden=64,
    width=32,
    experts=8,
    top_k=2,
    normalize=True,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocabulary=96,
    dense_width=48,
    bias=True,
    block_size=16,
    window=None,
    activation="silu",
    dtype="bfloat16",
)


@pytest.fixture(autouse=True)
def interpreter():
    with interpreted():
        yield


def small_checks(**ops):
    wanted = resolve_ops(dict.fromkeys(resolve_names(), "xla") | ops, dtype="bfloat16")
    return checks(SMALL, wanted, jax.devices()[0])


def resolve_names():
    return [f.name for f in dataclasses.fields(resolve_ops())]


def test_every_kernel_passes_its_checks():
    found = checks(SMALL, resolve_ops("pallas", dtype="bfloat16"), jax.devices()[0])
    assert len({check.key for check in found}) == len(found)
    assert {check.op for check in found} == set(resolve_names())
    errors = {check.key: (check.error(), check.tolerance) for check in found}
    assert {key: e for key, (e, most) in errors.items() if not e <= most} == {}
    # Rounded results differ a little: a check that compared a kernel with itself would not.
    assert any(error > 0 for error, _ in errors.values())


def test_only_kernels_that_would_run_are_checked():
    assert {check.op for check in small_checks(route="pallas", fill="pallas")} == {"route", "fill"}
    assert small_checks() == []


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
    # Another source of the kernel is another kernel.
    written["checks"][wanted[0].key]["source"] = "0" * 16
    path.write_text(json.dumps(written))
    assert require_verified(wanted, device, tmp_path) == 1


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
