"""The native queue of transfers, alone and beside expert_ffn, and the library's threads, under
random use without jax, and mistakes that this finds: waits left out, cells that are there too
early, two writers.

tests/pallas_kernels/{transfers,experts,workers}_check.cc are the programs.
"""

import os
import subprocess

import pytest

from pallas_kernels.cpu import build
from tests.conftest import REPOSITORY
from tests.faults import FAULTS

pytestmark = pytest.mark.slow

FLAGS = ("-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Werror", "-I", str(REPOSITORY))
FLAGS += ("-DMOEJAX_ISA=portable", "-DMOEJAX_LANES=4", "-ffp-contract=fast", "-fno-math-errno")
FLAGS += (FAULTS, "-Wno-psabi", "-Wno-unknown-pragmas", "-Wno-unused")
FLAGS += ("-DMOEJAX_X86",) if os.uname().machine == "x86_64" else ()

NATIVE_OPS, CHECKS = REPOSITORY / "pallas_kernels", REPOSITORY / "tests/pallas_kernels"
EXPERTS, QUEUE = NATIVE_OPS / "expert_ffn/cpu.cc", build.HERE / "transfer_queue.cc"
TRANSFERS = (
    CHECKS / "transfers_check.cc",
    QUEUE,
    *(build.HERE / f"{name}.cc" for name in ("checksums", "gguf", "transpose")),
)
BESIDE_EXPERTS = (
    *(CHECKS / "experts_check.cc", EXPERTS, QUEUE, build.HERE / "kernels.cc"),
    *(NATIVE_OPS / op / "cpu.cc" for op in ("fill", "records")),
    *(
        build.HERE / f"{name}.cc"
        for name in (
            *("supply", "arena", "arrivals", "transfer_calls"),
            *("checksums", "gguf", "transpose"),
        )
    ),
)
WORKERS = CHECKS / "workers_check.cc", build.HERE / "workers.cc"

MUTANTS = {
    "threads that sleep are not woken": (
        *(WORKERS, WORKERS[1], "wakes = ++queued_ > looking_ && asleep_;"),
        "wakes = ++queued_ < 0;",
    ),
    "threads stay off their waker's core": (
        *(WORKERS, WORKERS[1], "      me.cores.widen();\n", ""),
    ),
    "threads compute by their own modes": (
        *(WORKERS, WORKERS[1], "      set_float_mode(work->mode);\n", ""),
    ),
    "work is left to threads that the system refused": (
        *(WORKERS, WORKERS[1], "  if (started_ == 0) std::rethrow_exception(refusal_);\n", ""),
    ),
    "the entry flips before the last byte": (
        *(TRANSFERS, QUEUE, "  note(TransferEvent::START,"),
        "  if (transfer->next == transfer->chunks.size() && transfer->request.entry) {\n"
        "    __atomic_store_n((int32_t*)transfer->request.entry, transfer->request.value, 3);\n"
        "  }\n"
        "  note(TransferEvent::START,",
    ),
    "two writers of a cell": (
        *(TRANSFERS, QUEUE),
        "if (found != cells_.end() && !settled(found->second->state)) {",
        "if (false) {",
    ),
    "an op does not wait for its cell": (
        *(TRANSFERS, QUEUE, "  wait_as_op(held, *transfer, part);\n", ""),
    ),
    "demands wait for others": (
        *(TRANSFERS, QUEUE, "return {request.cause != 0, request", "return {false, request"),
    ),
    "down is not waited for": (
        *(BESIDE_EXPERTS, EXPERTS, "  if (!arrived(work, e, DOWN)) return;\n", ""),
    ),
    "a hit is computed before its cell is filled": (
        *(BESIDE_EXPERTS, EXPERTS),
        "    else if (ticket) flying",
        "    else if (ticket < -9) flying",
    ),
    "what failed ahead of need is not tried again": (
        *(BESIDE_EXPERTS, EXPERTS),
        "if (e->failed && queue.retry(e->cell)) {",
        "if (false) {",
    ),
}
"""Name → sources of a check, the one with the mistake, what is right there, and the mistake."""


def compiled(folder, sources, *flags):
    jobs = [
        subprocess.Popen([*build.find_compiler(), *FLAGS, *flags, "-c", s, "-o", folder / f"{i}.o"])
        for i, s in enumerate(sources)
    ]
    assert [job.wait() for job in jobs] == [0] * len(jobs)
    program, objects = folder / "check", [folder / f"{i}.o" for i in range(len(jobs))]
    command = [*build.find_compiler(), "-pthread", *flags, *objects, "-o", program]
    subprocess.run(command, check=True)
    return program


def run(program, sources, seed, rounds):
    files = [f"{program}.data"] if sources is TRANSFERS else []
    command = [program, str(seed), str(rounds), *files]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize(
    ("sources", "sanitizer", "rounds"),
    [
        pytest.param(TRANSFERS, "thread", 12, id="transfers"),
        pytest.param(WORKERS, "thread", 12, id="workers"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly, id=f"{name}-{case[1]}")
            for name, case in (
                ("transfers", (TRANSFERS, "thread", 100)),
                ("transfers", (TRANSFERS, "address,undefined", 100)),
                ("experts", (BESIDE_EXPERTS, "thread", 10)),
                ("experts", (BESIDE_EXPERTS, "address,undefined", 10)),
            )
        ),
    ],
)
def test_random_use_is_clean(sources, sanitizer, rounds, tmp_path):
    flags = f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"
    program = compiled(tmp_path, sources, *flags)
    for seed in range(1, 2 + rounds // 50):
        result = run(program, sources, seed, rounds)
        assert result.returncode == 0, result.stdout + result.stderr[-3000:]
        assert result.stdout.startswith("ok ")


@pytest.mark.nightly  # a test of the checks
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mistakes_are_found(mutant, tmp_path):
    sources, source, right, wrong = MUTANTS[mutant]
    text = source.read_text()
    assert text.count(right) == 1
    (tmp_path / "mutant.cc").write_text(text.replace(right, wrong))
    changed = [tmp_path / "mutant.cc" if each == source else each for each in sources]
    program = compiled(tmp_path, changed)
    rounds = 100 if sources is TRANSFERS else 10
    # A signal would end it without the mistake too.
    assert any(run(program, sources, seed, rounds).returncode > 0 for seed in range(5))
