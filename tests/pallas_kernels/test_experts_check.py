"""expert_ffn beside the queue of transfers under random use, without jax, and mistakes that this
finds: waits left out, a hit computed before its cell is filled, a cell that is there too early."""

import functools
from pathlib import Path

import pytest

from pallas_kernels.cpu import build
from tests.conftest import REPOSITORY
from tests.pallas_kernels.test_transfers_check import FLAGS, run

NATIVE_OPS = REPOSITORY / "pallas_kernels"
CHECK = REPOSITORY / "tests" / "pallas_kernels" / "experts_check.cc"
EXPERTS, QUEUE = NATIVE_OPS / "expert_ffn" / "cpu.cc", build.HERE / "transfer_queue.cc"
SOURCES = (
    *(CHECK, EXPERTS, QUEUE, *(NATIVE_OPS / op / "cpu.cc" for op in ("fill", "records"))),
    build.HERE / "kernels.cc",
    *(build.HERE / f"{name}.cc" for name in ("supply", "arena", "transfer_calls", "checksums")),
)
PORTABLE = ("-DMOEJAX_ISA=portable", "-DMOEJAX_LANES=4", "-ffp-contract=fast", "-fno-math-errno")

MUTANTS = {
    "gate is not waited for": (EXPERTS, "  if (!arrived(work, e, GATE)) return;\n", ""),
    "up is not waited for": (EXPERTS, "  if (!arrived(work, e, UP)) return;\n", ""),
    "down is not waited for": (EXPERTS, "  if (!arrived(work, e, DOWN)) return;\n", ""),
    "a hit is computed before its cell is filled": (
        *(EXPERTS, "    else if (ticket) flying", "    else if (ticket < -9) flying"),
    ),
    "a cell counts as there with its last chunk's begin": (
        QUEUE,
        "  note(TransferEvent::START,",
        "  if (transfer->next == transfer->chunks.size()) {\n"
        "    cells_.erase(transfer->request.cell);\n"
        "    concerns_ = (int64_t)cells_.size();\n"
        "  }\n"
        "  note(TransferEvent::START,",
    ),
    "what failed ahead of need is not tried again": (
        *(EXPERTS, "if (e->failed && queue.retry(e->cell)) {", "if (false) {"),
    ),
    "it is tried again, and computed no more": (
        EXPERTS,
        "        e->failed = false;\n        continue;\n",
        "        e->failed = false;\n",
    ),
    "a buffer is filled again while it is read": (
        EXPERTS,
        "    compute(pool, work, group);\n",
        "    if (!through.empty() && group[0]->buffer >= 0) {\n"
        "      supply.bring_into_buffer(0, work.call.layer, through[0]->id, group[0]->buffer);\n"
        "    }\n"
        "    compute(pool, work, group);\n",
    ),
}


@functools.cache
def compiled(folder: Path, source: Path, *flags: str) -> str:
    """The object of a source, compiled once."""
    made = folder / f"{source.parent.name}_{source.stem}.o"
    command = [build.find_compiler(), *FLAGS, *PORTABLE, "-Wno-psabi", "-Wno-unknown-pragmas"]
    build._run([*command, *flags, "-c", str(source), "-o", str(made)])
    return str(made)


def linked(folder: Path, objects, *flags: str) -> Path:
    program = folder / "check"
    build._run([build.find_compiler(), "-pthread", *flags, *objects, "-o", str(program)])
    return program


def check(program: Path, seed: int, rounds: int):
    return run(program, seed, rounds, files=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("experts-check")


@pytest.mark.slow
@pytest.mark.nightly  # test_transfers.py has the same in an engine
@pytest.mark.parametrize("sanitizer", ["", "address,undefined", "thread"])
def test_experts_that_come_by_a_queue_have_the_same_sums(sanitizer, folder, tmp_path):
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all") if sanitizer else ()
    into = tmp_path if sanitizer else folder
    program = linked(into, [compiled(into, source, *flags) for source in SOURCES], *flags)
    for seed in range(3):
        result = check(program, seed, 10)
        assert result.returncode == 0, result.stdout + result.stderr[-3000:]
        assert result.stdout.startswith("ok ") and " 0 " not in result.stdout


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mistakes_are_found(mutant, folder, tmp_path):
    source, right, wrong = MUTANTS[mutant]
    text = source.read_text()
    assert text.count(right) == 1
    (tmp_path / "mutant.cc").write_text(text.replace(right, wrong))
    objects = [compiled(folder, other) for other in SOURCES if other != source]
    objects.append(compiled(tmp_path, tmp_path / "mutant.cc", "-Wno-unused"))
    program = linked(tmp_path, objects)
    assert any(check(program, seed, 10).returncode for seed in range(5))
