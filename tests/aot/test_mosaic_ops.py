"""Kernels of Mosaic GPU, compiled for cards: they fit and copy nothing, their PTX does what the
contracts of their ops say, and what is taken out of it is found.

Each card has a process of its own: Mosaic gives ptxas the architecture of the first card that a
process compiled for. The older jax of .ci/run has no such kernels; the newer runs no slow tests."""

import re
import subprocess
import sys

import pytest

from pallas_kernels.mosaic import why_not_mosaic
from tests.aot.aot_h200 import CARDS
from tests.aot.cards import (
    MODELS,
    STEPS,
    check_call,
    compile_step,
    named,
    start_checks,
    step_programs,
)
from tests.aot.ptxas import assemble
from tests.moejax.step.test_constant_memory import nbytes

pytestmark = pytest.mark.aot

RUN = ("h200", "a100", "rtx5060ti")
"""Cards whose PTX runs here: wgmma and TMA; mma.sync and cp.async; mma.sync and TMA. The others'
is that of one of them."""

WAITS = {
    "h200": r"(?s)\{\s*\.reg \.pred\s+P1;.*?DONE:\s*\}",  # plgpu.barrier_wait
    "a100": r"cp\.async\.wait_group[^;]*;",
    "rtx5060ti": r"(?s)\{\s*\.reg \.pred\s+P1;.*?DONE:\s*\}",
}

OPS = {
    "expert_ffn": "expert_ffn 2304x2048 silu top 8 tokens 192 rows 64.*",
    "linear": "linear 5120x2048 rows 64 bias False out bfloat16 bfloat16",
    "rms_norm": "rms_norm 2048 bfloat16",
}
"""Op → the name of a check of Qwen3-30B-A3B's size."""

RECORD_BYTES = 3 * 768 * 2048 * 2

if not why_not_mosaic():

    def told(repository, card: str, *what: str) -> str:
        command = [sys.executable, "-m", __name__, card, *what]
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @pytest.mark.parametrize(
        "card",
        [pytest.param(card, marks=[pytest.mark.nightly] * (card not in RUN)) for card in CARDS],
    )
    def test_kernels_compile_for_a_card_and_agree(card, repository):
        said = told(repository, card, "compile", *["run"] * (card in RUN[:2]))
        assert re.findall(r"^compiled: (\w+)", said, re.MULTILINE) == list(OPS)
        if card in RUN[:2]:
            check_contracts(said)

    @pytest.mark.nightly
    def test_contracts(repository):
        check_contracts(told(repository, RUN[2], "run"))

    def check_contracts(said: str) -> None:
        assert re.findall(r"^agrees: (\w+)", said, re.MULTILINE) == list(OPS)
        found = re.findall(r"^without its wait: (\w+): (.*)", said, re.MULTILINE)
        assert [op for op, _ in found] == [op for op in OPS if op != "rms_norm"]  # it has none
        assert all("was not waited for" in said for _, said in found), found

    @pytest.mark.nightly
    @pytest.mark.parametrize("card", ["h200", "rtx4090"])
    def test_steps_copy_nothing(card, repository):
        assert len(told(repository, card, "steps").splitlines()) == 2


def compile_ops(card: str) -> None:
    """Compiles a check of each op; a kernel that is not as it should be is an AssertionError."""
    from tests.ptx.program import compile_program

    for op, name in OPS.items():
        check = named(start_checks(card, MODELS[0], **{op: "mosaic"}), name)
        options = dict(check_call(check))
        given = options.pop("fn"), *options.pop("args")
        program = compile_program(card, *given, **options)
        modules = [module for module, _ in program.mosaic.values()]
        assert modules and program.compiled
        for kernel in (kernel for module in modules for kernel in assemble(module)):
            assert kernel.spill_bytes == 0 and kernel.registers <= 255, kernel
        text = "".join(modules)
        assert ("wgmma.mma_async" in text) == (op != "rms_norm" and card == "h200")
        assert ("mma.sync" in text) == (op != "rms_norm" and card != "h200")
        assert program.compiled.copies() == []
        sizes = [size for _, size in program.compiled.host_copies()]
        assert sizes == [RECORD_BYTES] * (op == "expert_ffn")  # one of an expert without a cell
        print(f"compiled: {op}")


def compile_steps(card: str) -> None:
    """Compiles a decode step and a prefill step with every op of OPS."""
    programs = step_programs(card, MODELS[0], **dict.fromkeys(OPS, "mosaic"), fill_ffn="xla")
    logits = 16 * 151936 * 4  # decode's, cut out of a tile of 64 rows
    for key in (STEPS[0], STEPS[2]):
        compiled, _ = compile_step(card, programs, key)
        assert [size for _, size in compiled.copies() if size != logits] == []
        assert {size for _, size in compiled.host_copies()} == {RECORD_BYTES}
        assert compiled.memory.alias_bytes == nbytes((programs.arena, programs.tables))
        assert compiled.kernels().count("mosaic_gpu_v2") >= 11
        print(key)


def run_ops(card: str) -> None:
    """Runs one spec of each op, then again without its waits."""
    from tests.pallas_kernels.contract import takes
    from tests.pallas_kernels.ops.contracts import CONTRACTS
    from tests.ptx.parse import Fault
    from tests.ptx.program import patched

    lacked = False

    def without_wait(ptx: str) -> str:
        nonlocal lacked
        edited, count = re.subn(WAITS[card], "", ptx)
        lacked |= count > 0
        return edited

    for contract in sorted((c for c in CONTRACTS if c.name in OPS), key=lambda c: c.name):
        spec = next(spec for spec in contract.specs if takes("mosaic", spec))
        module = sys.modules[contract.check.__module__]
        with patched(module, card=card):
            contract.run(spec, "mosaic", examples=1)
        print(f"agrees: {contract.name}", flush=True)
        lacked, said = False, "nothing was found"
        try:
            with patched(module, card=card, edit=without_wait):
                contract.run(spec, "mosaic", examples=1)
        except Fault as fault:
            said = " ".join(str(fault).split())
        if lacked:
            print(f"without its wait: {contract.name}: {said}", flush=True)


if __name__ == "__main__":
    _, card, *parts = sys.argv
    for part in parts:
        {"compile": compile_ops, "steps": compile_steps, "run": run_ops}[part](card)
