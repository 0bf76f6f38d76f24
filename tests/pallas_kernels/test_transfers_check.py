"""The native queue of transfers under random use, without jax, and mistakes that this finds."""

import subprocess
from pathlib import Path

import pytest

from pallas_kernels.cpu import build
from tests.conftest import REPOSITORY
from tests.faults import FAULTS

X86 = "-DMOEJAX_X86" if "x86_64" in build._run([build.find_compiler(), "-dumpmachine"]) else "-DARM"
FLAGS = (
    *("-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Werror", "-I", str(REPOSITORY), X86),
    FAULTS,
)
QUEUE = build.HERE / "transfer_queue.cc"
CHECK = REPOSITORY / "tests" / "pallas_kernels" / "transfers_check.cc"

MUTANTS = {
    "the entry flips before the last byte": (
        "  note(TransferEvent::START,",
        "  if (transfer->next == transfer->chunks.size() && transfer->request.entry) {\n"
        "    __atomic_store_n((int32_t*)transfer->request.entry, transfer->request.value, 3);\n"
        "  }\n"
        "  note(TransferEvent::START,",
    ),
    "two writers of a cell": (
        "if (found != cells_.end() && !settled(found->second->state)) {",
        "if (false) {",
    ),
    "a wait is left out": (
        "  if (settled(transfer.state)) return true;\n",
        "  return part < 99;\n",
    ),
    "a part is there with its first chunk": (
        "  return !transfer.left[(size_t)part] && !(last",
        "  return transfer.ended[0] && !(last",
    ),
    "an op does not wait for its cell": (
        "  wait_as_op(held, *transfer, part);\n",
        "",
    ),
    "a cell is filled again while it is written": (
        "    wait_as_op(held, *writer, -1);\n",
        "    break;\n",
    ),
    "demands wait for others": ("return {request.cause != 0, request", "return {false, request"),
    "what has begun is cancelled": (
        "found->second->state != TransferState::WAITING) return false;",
        "settled(found->second->state)) return false;",
    ),
    "who is done early settles for all": (
        "  if (--transfer.under_way || transfer.next < transfer.chunks.size()) return;",
        "  if (--transfer.under_way < 0 || transfer.next < transfer.chunks.size()) return;",
    ),
}


def compiled(folder: Path, sources, *flags, into="check"):
    program = folder / into
    jobs = [
        subprocess.Popen([build.find_compiler(), *FLAGS, *flags, "-c", s, "-o", folder / f"{i}.o"])
        for i, s in enumerate(sources)
    ]
    assert [job.wait() for job in jobs] == [0] * len(jobs)
    objects = [folder / f"{i}.o" for i in range(len(jobs))]
    build._run([build.find_compiler(), *FLAGS, *flags, *map(str, objects), "-o", str(program)])
    return program


def run(program, seed, rounds, *, files=True):
    command = [program, str(seed), str(rounds), *([f"{program}.data"] if files else [])]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


@pytest.mark.slow
def test_random_use_is_clean_under_the_thread_sanitizer(tmp_path):
    program = compiled(tmp_path, [CHECK, QUEUE, build.HERE / "checksums.cc"], "-fsanitize=thread")
    result = run(program, 1, 12)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert result.stdout.startswith("ok ")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_long_random_use_is_clean(sanitizer, tmp_path):
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    program = compiled(tmp_path, [CHECK, QUEUE, build.HERE / "checksums.cc"], *flags)
    for seed in range(2, 6):
        result = run(program, seed, 100)
        assert result.returncode == 0, result.stdout + result.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mistakes_are_found(mutant, tmp_path):
    right, wrong = MUTANTS[mutant]
    text = QUEUE.read_text()
    assert text.count(right) == 1
    (tmp_path / "mutant.cc").write_text(text.replace(right, wrong))
    sources = [CHECK, tmp_path / "mutant.cc", build.HERE / "checksums.cc"]
    program = compiled(tmp_path, sources, "-Wno-unused")
    assert any(run(program, seed, 100).returncode for seed in range(3))
