"""Compiles the native CPU ops: ``python -m pallas_kernels.cpu``.

setup.py runs this file by its path, before anything of this package can be imported, so it imports
nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = "libmoejax_cpu.so"
COMMAND = "python -m pallas_kernels.cpu"
MOST_KEPT = 4
"""Libraries in the user's cache."""
COMPILERS = ("c++", "g++", "clang++")
"""Compilers to look for on PATH if CXX names none."""

FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wno-psabi"),
    # A sum's bits must not depend on which of its multiplications the compiler fuses.
    *("-ffp-contract=fast", "-fno-math-errno", "-Wno-unknown-pragmas"),
)

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (
    *(*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    # GCC 12's own header of AVX-512 is "used uninitialized".
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
)

_TILES = ("-mamx-tile", "-mamx-int8")  # which no compiler uses by itself

PORTABLE: dict[str, tuple[int, tuple[str, ...]]] = {"portable": (4, ())}
X86: dict[str, tuple[int, tuple[str, ...]]] = {
    "avx2": (8, _AVX2),
    "avx512": (16, _AVX512),
    "avx512bf16": (16, (*_AVX512, "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni", *_TILES)),
}
"""Instruction set → (floats in a vector, flags of the compiler)."""
AMX = (*X86["avx512bf16"][1], "-DMOEJAX_LANES=16", "-mamx-bf16")
"""Flags of the kernels that multiply tiles (AMX), beside those of avx512bf16."""


class BuildError(Exception):
    """The library could not be compiled; the message says why."""


def sources() -> tuple[Path, ...]:
    """Our C++ sources and headers, without XLA's headers."""
    return tuple(sorted(p for ext in ("cc", "h") for p in HERE.parent.glob(f"*/*.{ext}")))


def digest() -> str:
    """A digest of the sources. A library carries the digest of the sources that it was compiled
    from."""
    total = hashlib.sha256()
    for path in (*sources(), Path(__file__)):
        total.update(path.relative_to(HERE.parent).as_posix().encode() + path.read_bytes())
    return total.hexdigest()[:16]


def find_compiler() -> list[str]:
    """The command of the C++ compiler. CXX may have arguments, such as "ccache g++". Raises
    BuildError if there is no compiler."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        program, *arguments = shlex.split(name) or [""]
        if found := shutil.which(program):
            return [found, *arguments]
    raise BuildError(f"no C++ compiler found ({wanted or ', '.join(COMPILERS)})")


def _machine(compiler: Sequence[str]) -> str:
    """The processor that a compiler compiles for, as os.uname names it."""
    # zig 0.17 does not dump a target with a version of libc.
    pairs = itertools.pairwise(compiler)
    told = [after for word, after in pairs if word.lstrip("-") == "target"]
    name = (told[-1] if told else _run([*compiler, "-dumpmachine"])).split("-")[0]
    return {"amd64": "x86_64", "native": os.uname().machine}.get(name, name)


def _is_for_here(compiler: Sequence[str]) -> bool:
    """Whether what a compiler compiles is for this processor and system: one that is told a target,
    such as zig for an older libc, compiles for others."""
    targets = [word for word in compiler if word.lstrip("-").startswith("target")]
    return not targets and _machine(compiler) == os.uname().machine


def translation_units(compiler: Sequence[str]) -> dict[str, list[str]]:
    """Object file → the compiler's arguments, those that take longest first."""
    x86 = _machine(compiler) == "x86_64"
    include = ["-I", str(HERE.parent.parent), "-I", str(HERE)]
    define = ["-DMOEJAX_X86"] if x86 else []
    define.append(f'-DMOEJAX_SOURCES="{digest()}"')
    units = {}
    for isa, (lanes, flags) in reversed((PORTABLE | (X86 if x86 else {})).items()):
        set_ = [f"-DMOEJAX_ISA={isa}", f"-DMOEJAX_LANES={lanes}", *flags]
        units[f"kernels_{isa}.o"] = [*FLAGS, *include, *set_, "-c", str(HERE / "kernels.cc")]
    by_instruction_set = ("kernels.cc", "amx.cc")
    ops = [p for p in sources() if p.suffix == ".cc" and p.name not in by_instruction_set]
    for path in ops:
        name = f"{path.parent.name}_{path.stem}.o"
        flags = FLAGS if path.name != "handlers.cc" else (*FLAGS, "-O1")  # computes nothing
        units[name] = [*flags, *include, *define, "-c", str(path)]
    if x86:
        units["amx.o"] = [*FLAGS, *include, *define, *AMX, "-c", str(HERE / "amx.cc")]
    return units


def build(folder: Path = HERE) -> Path:
    """Compiles the library into a folder, in about two minutes on two cores. Of a checkout, a copy
    and the objects are kept in the user's cache. Raises BuildError."""
    compiler, sources_digest = find_compiler(), digest()  # they may change meanwhile
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        objects = compile_units(compiler, translation_units(compiler), Path(work))
        library = link(compiler, objects, folder)
        if (HERE.parents[1] / "setup.py").is_file() and _is_for_here(compiler):
            _keep([*objects, library], sources_digest)
    return library


def _keep(files: Sequence[Path], sources_digest: str) -> None:
    with contextlib.suppress(OSError):  # a home that cannot be written has no cache
        folder = _cache() / sources_digest
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        old = sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in old[: -MOST_KEPT + 1]:
            shutil.rmtree(path, ignore_errors=True)
        new = Path(tempfile.mkdtemp(dir=folder.parent))
        for path in files:
            shutil.copy(path, new)
        shutil.rmtree(folder, ignore_errors=True)
        new.replace(folder)


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "moejax", "cpu")


def kept() -> Path | None:
    """The folder of the user's cache with the library and the objects that `build` made from these
    sources; None: there is none, or others may write into it."""
    folder = _cache() / digest()
    with contextlib.suppress(OSError, RuntimeError):
        own = [folder.stat(), folder.parent.stat()]
        if all(each.st_uid == os.geteuid() and not each.st_mode & 0o022 for each in own):
            return folder
    return None


def compile_units(
    compiler: Sequence[str], units: Mapping[str, Sequence[str]], folder: Path
) -> list[Path]:
    """Compiles the translation units into a folder and returns the objects. Raises BuildError."""
    objects = [folder / name for name in units]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(_run, [*compiler, *told, "-o", str(path)])
            for told, path in zip(units.values(), objects, strict=True)
        ]
    for job in jobs:
        job.result()
    if missing := [path.name for path in objects if not path.is_file()]:
        raise BuildError(f"{shlex.join(compiler)} compiles nothing: it wrote no {missing[0]}")
    return objects


def link(compiler: Sequence[str], objects: Sequence[Path], folder: Path) -> Path:
    """Links the objects and places the library into a folder. Raises BuildError."""
    with tempfile.TemporaryDirectory() as work:
        linked = Path(work) / LIBRARY
        _run([*compiler, "-shared", "-pthread", *map(str, objects), "-o", str(linked)])
        content = linked.read_bytes()
        # Loaders read what the header of the file names, which this is behind.
        linked.write_bytes(content + _seal(content))
        return place(linked, folder)


def _seal(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def is_whole(path: Path) -> bool:
    """Whether a library has the bytes that `link` wrote. Loading one that is cut short ends the
    process by a signal. Raises OSError."""
    raw = path.read_bytes()
    return raw[-64:] == _seal(raw[:-64])


def built(folder: Path) -> Path:
    """Puts a library into a folder: a copy of the one beside the sources or in the user's cache if
    it was compiled from these sources and the compiler compiles for this machine, otherwise a new
    one. Raises BuildError, also without a compiler."""
    return (copy_built(folder) if _is_for_here(find_compiler()) else None) or build(folder)


def copy_built(folder: Path) -> Path | None:
    """Puts a copy of a library of these sources into a folder; None: there is none."""
    for place_of in (HERE, kept()):
        with contextlib.suppress(OSError):
            if place_of and is_built(place_of):
                folder.mkdir(parents=True, exist_ok=True)
                return place(place_of / LIBRARY, folder)
    return None


def is_built(folder: Path) -> bool:
    """Whether a folder has a library of these sources, whole."""
    path = folder / LIBRARY
    return path.is_file() and is_whole(path) and digest().encode() in path.read_bytes()


def place(library: Path, folder: Path) -> Path:
    """Copies a library into a folder, atomically: a process that reads it meanwhile sees the old or
    the new one."""
    part = folder / f".{LIBRARY}.{os.getpid()}"
    shutil.copy(library, part)
    return part.replace(folder / LIBRARY)


def _run(command: list[str]) -> str:
    """Runs a command and returns its output. Raises BuildError with the end of the output."""
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if result.returncode:
        said = result.stderr.strip().splitlines()[-20:] or [f"exit code {result.returncode}"]
        raise BuildError("\n".join([f"{Path(command[0]).name} failed:", *said]))
    return result.stdout


def main() -> int:
    try:
        print(f"built {build()}")
    except BuildError as error:
        print(f"the CPU ops were not built: {error}", file=sys.stderr)
        return 1
    return 0
