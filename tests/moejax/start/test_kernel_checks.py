"""Which kernels a start checks, and what runs where they were not found right."""

import dataclasses
import functools
import re

import jax
import pytest

import tests.pallas_kernels.cpu_lowerings  # noqa: F401  (what the interpreter lacks)
from moejax import LLM, SamplingParams
from moejax.cache import checked_folder
from moejax.checkpoints.random_model import shape
from moejax.errors import UserError
from moejax.evaluate.gpu_check import VERSIONS, shape_checks
from moejax.models.config import parse_config
from moejax.start import build, kernels, whole_step
from moejax.start.decide.shapes import decodes_in_buckets, step_shapes
from moejax.start.kernels import choose_kernels, known_outcomes, start_checks
from moejax.start.whole_step import step_checks
from moejax.step.step_parts import StepSpec
from pallas_kernels import OPS, dispatch, resolve_ops
from pallas_kernels.triton import interpreted
from pallas_kernels.verification import NOT_CHECKED, current, run_checks, table
from tests.moejax.models.families import config_of
from tests.pallas_kernels.faulty_checks import start_job, step_job

CPU = jax.devices()[0]

GiB = 1 << 30


def steps(name="qwen3-30b-a3b", rows=64, layers=None, bucketed=True, **ops):
    config = shape(name, layers)
    layout = config.slot_layout(itemsize=2)
    limits = {"max_model_len": 1024, "max_num_batched_tokens": 512}
    buckets = {"bucketed": bucketed, "prefill_bucketed": bucketed}
    shapes = step_shapes(layout, rows=rows, waves=1, **limits, **buckets, kernels=True)
    chosen = resolve_ops(ops or "auto", platform="gpu", dtype="bfloat16")
    return StepSpec("gpu", "", "device", chosen, config, "bfloat16", layout, shapes)


def test_a_start_needs_what_it_runs(repository):
    """Qwen3-30B-A3B's store is beyond 4 GiB: so are the kernels that read it. Pages say how many
    checks that is, and how many `moejax check-gpu` makes."""
    needed = start_checks(steps(), 24 * GiB)
    page = (repository / "docs/how-to/gpu.md").read_text()
    counts = re.search(
        r"A start of Qwen3-30B-A3B needs (\d+).*\smakes (\d+),.*\sfirst (\d+)", page, re.S
    )
    made = shape_checks(["qwen3-30b-a3b"], ["bfloat16"])
    dense = shape_checks(["qwen3-30b-a3b"], ["bfloat16"], versions=VERSIONS[:1])
    assert [*map(int, counts.groups())] == [len(needed), len(made), len(dense)]
    assert {check.key for check in needed} <= {check.key for check in dense}
    results = (repository / "docs/research/benchmarks.md").read_text()
    assert f"{len(needed)} of {len(needed)} within tolerance" in results
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


# ---- a CPU whose kernels run only after checks, interpreted

ON_GPU = {**dict.fromkeys(OPS, "xla"), "rms_norm": "auto", "combine": "auto"}


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    monkeypatch.setitem(dispatch.AUTO, "cpu", ("pallas", "xla"))
    monkeypatch.setattr(build, "are_checked", lambda device: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known_outcomes.cache_clear()
    with interpreted():
        yield
    known_outcomes.cache_clear()


@pytest.fixture
def faulty(gpu, monkeypatch):
    """faulty(fault): kernels with it, in the processes of checks too."""
    for module in (kernels, whole_step):
        monkeypatch.setattr(module, "start_checks", start_job)
    monkeypatch.setattr(whole_step, "kernel_job", start_job)
    monkeypatch.setattr(kernels, "kernel_job", start_job)
    monkeypatch.setattr(whole_step, "step_checks", step_job)
    monkeypatch.setattr(whole_step, "run_checks", functools.partial(run_checks, patience=10))
    return functools.partial(monkeypatch.setenv, "FAULT")


def text_and_ops(**options):
    """The text of a start, its ops that are auto, and its KernelChoice. The checks behind it have
    ended."""
    options = {
        "ops": ON_GPU,
        "dtype": "bfloat16",
        "max_model_len": 256,
        "max_num_seqs": 1,
        **options,
    }
    with LLM("demo", progress=False, **options) as llm:
        (output,) = llm.generate("The old house", SamplingParams(max_tokens=4, temperature=0))
        checks, kernels = whole_step._running, llm.plan.kernels
        if checks is not None:
            checks.join()
        ops = llm.stats()["ops"]
        return output.outputs[0].text, [ops["rms_norm"], ops["combine"]], kernels


FAULTS = {
    "wrong": "it deviates by inf",
    "raises": "does not run on cpu .*no such instruction",
    "crashes": r"ends its process on cpu \(SIGSEGV",
    "aborts": r"ends its process on cpu \(SIGABRT",  # as a compiler does
    "hangs": r"ends its process on cpu \(it hangs",
    "poisons": None,  # every check behind it fails in its process, and passes in a new one
    "lacks memory": NOT_CHECKED,
}


TWINS = "wrong", "raises", "aborts"
"""Faults that other tests meet: test_a_start_runs_what_was_found_right,
test_a_kernel_that_fails_is_named and test_kernels_whose_step_crashes_do_not_run."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=[pytest.mark.nightly] * (f in TWINS)) for f in FAULTS],
)
def test_text_comes_whatever_a_kernel_does(faulty, caplog, fault):
    faulty(fault)
    text, ops, kernels = text_and_ops()
    assert text and ops == [f"xla: {NOT_CHECKED}"] * 2
    first, second = next(m for m in caplog.messages if "in XLA" in m).split("\n")
    assert first == f"in XLA, not as kernels: rms_norm, combine; {NOT_CHECKED}"
    assert second == "the checks run beside this process and count from the next start"
    # What the next start does.
    known = current(CPU, checked_folder())
    then = choose_kernels(kernels.specify, kernels.asked, known, kernels.arena_bytes)
    wanted = {"rms_norm"} if FAULTS[fault] else set()
    assert {*then.declined} == wanted and then.tried.ops.combine == "pallas"
    assert not wanted or re.search(FAULTS[fault], then.declined["rms_norm"])
    assert table.left_over(CPU.device_kind, checked_folder()) == (fault == "lacks memory")


@pytest.mark.slow
def test_a_start_runs_what_was_found_right(faulty, caplog):
    faulty("wrong")
    before, _, _ = text_and_ops()
    caplog.clear()
    assert text_and_ops()[1] == [f"xla: {NOT_CHECKED}"] * 2  # as the process began
    known_outcomes.cache_clear()
    text, (norm, combine), _ = text_and_ops()
    assert text == before and combine == "pallas" and norm.startswith("xla: the kernel for rms")
    first, second = caplog.messages[-1].split("\n")
    assert first.startswith("in XLA, not as kernels: rms_norm; the kernel for rms_norm toy 3")
    assert second == "moejax check-gpu tries again; please report it"
    # Named, it is refused.
    with pytest.raises(UserError, match=r"rms_norm toy 3 .* use ops=rms_norm=xla and report it"):
        text_and_ops(ops={**ON_GPU, "rms_norm": "pallas"})


@pytest.mark.slow
def test_kernels_whose_step_crashes_do_not_run(faulty, monkeypatch):
    faulty("")
    monkeypatch.setenv("STEP_FAULT", "aborts")
    _, _, kernels = text_and_ops()
    known = current(CPU, checked_folder())
    then = choose_kernels(kernels.specify, kernels.asked, known, kernels.arena_bytes)
    assert {*then.declined} == {"rms_norm", "combine"}
    assert all("SIGABRT" in why for why in then.declined.values())
    assert not then.waiting


@pytest.mark.slow
def test_memory_is_left_until_the_whole_step_was_checked(faulty, monkeypatch):
    faulty("")

    def ended(*_):
        raise ValueError("the process ends before the step is checked")

    monkeypatch.setattr(whole_step, "step_checks", ended)
    text_and_ops()
    assert len(current(CPU, checked_folder())) > 1
    assert table.left_over(CPU.device_kind, checked_folder()) == 1


IN_XLA = resolve_ops("xla", dtype="bfloat16")


@pytest.mark.slow
def test_a_whole_step_is_checked():
    of = steps("demo", 8, linear="xla")
    (check,) = step_checks(of.config, of.dtype, of.ops)
    assert check.config.num_hidden_layers == 2 and check.key.startswith("step 16 experts 128x128")
    assert dataclasses.replace(check, ops=IN_XLA).prepare(CPU).error() == 0.0


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["DeepseekV3", "GptOss", "Qwen3Next"])
def test_a_whole_step_of_other_families(family):
    config = parse_config(config_of(f"{family}ForCausalLM"), family)
    (check,) = step_checks(config, "bfloat16", IN_XLA)
    kinds = [config.layer_kinds, config.moe_layers]
    assert [set(of or ()) for of in kinds] == [
        set(of or ()) for of in (check.config.layer_kinds, check.config.moe_layers)
    ]
    assert check.prepare(CPU).error() == 0.0
