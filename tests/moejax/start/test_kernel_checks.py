"""Which kernels a start checks."""

import dataclasses

import jax
import pytest

from moejax.checkpoints.random_model import shape
from moejax.errors import UserError
from moejax.start import kernels
from moejax.start.decide.shapes import decodes_in_buckets, step_shapes
from moejax.start.kernels import start_checks, verify_kernels
from moejax.step.step_parts import StepSpec
from pallas_kernels import resolve_ops
from pallas_kernels.rms_norm import api
from pallas_kernels.triton import interpreted

GiB = 1 << 30


def steps(name="qwen3-30b-a3b", rows=64, layers=None, bucketed=True, **ops):
    config = shape(name, layers)
    layout = config.slot_layout(itemsize=2)
    limits = {"max_model_len": 1024, "max_num_batched_tokens": 512}
    shapes = step_shapes(layout, rows=rows, waves=1, **limits, bucketed=bucketed, kernels=True)
    chosen = resolve_ops(ops or "auto", platform="gpu", dtype="bfloat16")
    return StepSpec("gpu", "", "device", chosen, config, "bfloat16", layout, shapes)


def test_a_start_needs_what_it_runs():
    """Qwen3-30B-A3B's store is beyond 4 GiB: so are the kernels that read it."""
    needed = start_checks(steps(), 24 * GiB)
    assert len(needed) == 66
    # A smaller arena: what reads both is checked at either width, what reads pages at one.
    needed = start_checks(steps(), 2 * GiB)
    assert {check.op for check in needed if check.wide} == {
        *("fill", "stage", "expert_ffn", "fill_ffn")
    }


@pytest.mark.parametrize("rows", [1, 7, 17])
def test_experts_of_steps_without_buckets_are_checked(rows):
    """Where another op's product is XLA's, decode is of one number of rows."""
    of = steps(rows=rows, bucketed=False, linear="xla")
    assert of.ops.expert_ffn == "pallas" and not decodes_in_buckets(of.config, of.ops)
    needed = start_checks(of, 24 * GiB)
    (run,) = of.shapes.buckets
    assert run >= rows
    for op in ("expert_ffn", "fill_ffn"):
        assert any(run in check.rows for check in needed if check.op == op)


@dataclasses.dataclass
class Gpu:
    """The CPU in the place of a GPU."""

    platform: str = "gpu"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Checks that are made run on the CPU, interpreted, and are kept in a folder."""
    cpu, ran = jax.devices()[0], []
    require = kernels.require_verified

    def required(wanted, device, cache, report=None, threads=None):
        ran.append([check.key for check in wanted])
        return require(wanted, cpu, cache, report, threads)

    monkeypatch.setattr(kernels, "require_verified", required)
    monkeypatch.setattr(kernels, "cache_root", lambda: tmp_path)
    with interpreted():
        yield ran


NORMS = dict.fromkeys(("rms_norm", "route"), "pallas")


def of_norms(name="demo"):
    ops = dict.fromkeys(steps().ops.chosen(), "xla") | NORMS
    return steps(name, **ops)


@pytest.mark.slow
def test_only_what_is_needed_is_checked_before(gpu):
    verify_kernels(of_norms(), Gpu(), GiB)
    ((first, second),) = gpu
    assert first.startswith("rms_norm") and second.startswith("route")
    verify_kernels(of_norms(), jax.devices()[0], GiB)  # no GPU, no check
    assert len(gpu) == 1


def test_what_is_wrong_is_refused_before(gpu, monkeypatch):
    monkeypatch.setitem(api.IMPLEMENTATIONS, "pallas", lambda x, *_: x)
    with pytest.raises(UserError, match=r"rms_norm 128 bfloat16 .* use ops=rms_norm=xla"):
        verify_kernels(of_norms(), Gpu(), GiB)
