"""AMX's kernels beside plain double sums, also where a machine has no AMX: emulated_tiles.h has its
tiles. The kernels use AVX-512-BF16 besides, so a machine without that only compiles them.

tests/pallas_kernels/cpu_check.cc is the program.
"""

import subprocess

import pytest

from pallas_kernels.cpu import build
from tests.conftest import REPOSITORY
from tests.pallas_kernels.test_cpu_build import SHARED, sets_of_linux

pytestmark = pytest.mark.slow

CHECKS, ATTENTION = REPOSITORY / "tests/pallas_kernels", build.HERE.parent / "paged_attention"

MISTAKES = {
    "keys in front of a window are seen": (
        "x = ((first <= key) & (end > key)) ? x : none;",
        "x = (end > key) ? x : none;",
    ),
    "the mass of earlier spans does not shrink": ("mass = unfused(mass * shrink);", ""),
}
"""Name → what is right in amx.h of attention, and the mistake."""


def results(folder, *first):
    """The exit code and the output of the program; what the compiler is told first, of amx.cc.
    None: a compiler for other processors."""
    compiler, kept = build.find_compiler(), build.kept()
    units = build.translation_units(compiler)
    if "amx.o" not in units:
        return None
    shared = {f"cpu_{name}.o" for name in SHARED}
    others = {
        name: told
        for name, told in units.items()
        if name in shared or name.startswith("kernels_") or name.endswith("_cpu.o")
    }
    # Whose accesses to memory are checked: instructions of tiles hide theirs from sanitizers.
    tiles = "-O1", "-fsanitize=address", "-include", str(CHECKS / "emulated_tiles.h")
    check = "-O1", "-DMOEJAX_EMULATED_TILES", str(CHECKS / "cpu_check.cc")
    new = {
        "check.o": [*units["cpu_select.o"][:-1], *check],
        "amx.o": [*first, *units["amx.o"], *tiles],
        **({} if kept else others),
    }
    objects = build.compile_units(compiler, new, folder)
    objects += [kept / name for name in others] if kept else []
    program = str(folder / "check")
    command = [*compiler, "-fsanitize=address", "-pthread", *map(str, objects), "-o", program]
    subprocess.run(command, check=True)
    done = subprocess.run([program, "1", "40"], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr[-3000:]


def test_kernels_of_tiles_are_right(tmp_path):
    here = "avx512bf16" in sets_of_linux()
    assert results(tmp_path) in (None, (0, "ok amx\n" if here else "ok\n"))


@pytest.mark.nightly  # a test of the checks
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake, tmp_path):
    (right, wrong), text = MISTAKES[mistake], (ATTENTION / "amx.h").read_text()
    assert text.count(right) == 1
    mutant = tmp_path / "pallas_kernels/paged_attention/amx.h"
    mutant.parent.mkdir(parents=True)
    mutant.write_text(text.replace(right, wrong))
    found = results(tmp_path, "-I", str(tmp_path), "-I", str(ATTENTION))
    if found and "avx512bf16" in sets_of_linux():
        assert found[0] == 1 and found[1].startswith("paged_attention: ")
