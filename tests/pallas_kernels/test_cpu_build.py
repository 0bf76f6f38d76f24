"""The library of native CPU ops: how it is built, found, chosen and refused."""

import importlib.metadata
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import resolve_ops
from pallas_kernels.cpu import build, library
from pallas_kernels.linear import LinearOptions, api
from tests.pallas_kernels.contract import NATIVE


def sets_of_linux():
    """The x86 instruction sets that Linux says this CPU has."""
    said = set(Path("/proc/cpuinfo").read_text().split()) if sys.platform == "linux" else set()
    asked = {
        "avx2": "avx2 fma f16c",
        "avx512": "avx512f avx512bw avx512dq avx512vl",
        "avx512bf16": "avx512_bf16 avx512vbmi avx512_vnni",
        "amx": "amx_tile amx_bf16 amx_int8",
    }
    return [*itertools.takewhile(lambda isa: said.issuperset(asked[isa].split()), asked)]


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(build.HERE.parent.parent)} | environment,
    )


@pytest.mark.slow  # .ci/run has that jaxlib on the Python that runs slow tests, and skips nothing
@pytest.mark.skipif(
    importlib.metadata.version("jaxlib") != "0.10.2", reason="jaxlib 0.10.2 has these headers"
)
def test_the_headers_are_those_of_the_oldest_jaxlib():
    """Newer ones are refused by older runtimes; 3.12's suite runs this library on a newer one."""
    theirs = os.path.join(jax.ffi.include_dir(), "xla", "ffi", "api")
    ours = build.HERE / "xla" / "ffi" / "api"
    assert sorted(os.listdir(theirs)) == sorted(path.name for path in ours.iterdir())
    for path in ours.iterdir():
        with open(os.path.join(theirs, path.name)) as file:
            assert file.read() == path.read_text()


def test_without_a_compiler_the_build_says_so(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.main() == 1
    assert capsys.readouterr() == (
        "",
        "the CPU ops were not built: no C++ compiler found (no-such-compiler)\n",
    )


def test_a_build_is_kept_in_the_cache_and_not_beside_the_sources(monkeypatch, tmp_path):
    """With a compiler that writes its own arguments."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n"
        "[ $# = 1 ] && echo x86_64-linux-gnu && exit\n"
        'for path; do :; done\necho "$@" > "$path"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = sorted(path for path in build.HERE.rglob("*") if "__pycache__" not in path.parts)
    assert build.kept() is None
    made = build.build(tmp_path / "out").read_text()
    assert "-shared" in made and "kernels_portable.o" in made and "amx.o" in made
    kept = build.kept()
    assert "-DMOEJAX_LANES=4" in (kept / "kernels_portable.o").read_text()
    assert (kept / build.LIBRARY).read_text() == made
    assert before == sorted(p for p in build.HERE.rglob("*") if "__pycache__" not in p.parts)
    kept.chmod(0o777)
    assert build.kept() is None  # others may have put code there


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho x86_64-linux-gnu\necho 'no space left' >&2\n[ $# = 1 ]\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.BuildError, match=r"c\+\+ failed:\nno space left"):
        build.build(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_missing_library_is_refused_with_the_command_that_mends_it(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "HERE", tmp_path)
    isa, reason = library._load.__wrapped__()
    assert not isa
    assert reason == (
        "the native CPU ops are not built; `python -m pallas_kernels.cpu` builds them"
    )
    monkeypatch.setattr(library, "_load", lambda: ("", reason))
    with pytest.raises(ValueError, match=r"op 'linear': the native CPU ops are not built; `python"):
        resolve_ops("linear=cpu")
    with pytest.raises(ValueError, match="the native CPU ops are not built"):
        api.linear(
            jnp.ones((1, 2)), jnp.ones((1, 3, 2)), 0, None, LinearOptions(implementation="cpu")
        )
    assert set(resolve_ops("auto").chosen().values()) == {"xla"}


def test_no_library_at_all_is_refused(monkeypatch, tmp_path):
    text = b"no library"
    (tmp_path / build.LIBRARY).write_bytes(text + build._seal(text))
    monkeypatch.setattr(library, "HERE", tmp_path)
    assert "do not load" in library._load.__wrapped__()[1]


@NATIVE
@pytest.mark.parametrize("size", [20, 5000, -1, None])
def test_a_library_that_is_damaged_is_refused_before_it_is_loaded(monkeypatch, tmp_path, size):
    whole = bytearray((library.HERE / build.LIBRARY).read_bytes())
    if size is None:
        whole[len(whole) // 2] ^= 1
    (tmp_path / build.LIBRARY).write_bytes(whole[:size])
    monkeypatch.setattr(library, "HERE", tmp_path)
    monkeypatch.setattr(library.ctypes, "CDLL", None)
    assert "are damaged; `python -m pallas_kernels.cpu`" in library._load.__wrapped__()[1]


def test_only_a_library_of_other_sources_is_compiled_again(monkeypatch, tmp_path):
    beside, folder = tmp_path / build.LIBRARY, tmp_path / "new"
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "digest", lambda: "these")
    monkeypatch.setattr(build, "find_compiler", lambda: ["c++"])
    monkeypatch.setattr(build, "_machine", lambda compiler: os.uname().machine)
    monkeypatch.setattr(build, "build", lambda folder: folder / "compiled")
    monkeypatch.setattr(build, "kept", lambda: None)
    monkeypatch.setattr(build, "is_whole", lambda path: True)
    beside.write_text("of other sources")
    assert build.built(folder) == folder / "compiled"
    beside.write_text("of these")
    assert build.built(folder).read_text() == beside.read_text()
    # One that compiles for another processor, such as `zig c++ -target aarch64-linux-gnu`.
    monkeypatch.setattr(build, "_machine", lambda compiler: "another")
    assert build.built(folder) == folder / "compiled"
    # One that compiles for an older system, such as `zig c++ -target x86_64-linux-gnu.2.28`.
    monkeypatch.setattr(build, "_machine", lambda compiler: os.uname().machine)
    monkeypatch.setattr(build, "find_compiler", lambda: ["zig", "c++", "-target", "x86_64"])
    assert build.built(folder) == folder / "compiled"
    monkeypatch.undo()
    assert build._machine(["no-such-compiler", "-target", "aarch64-linux-gnu.2.28"]) == "aarch64"
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError):
        build.built(folder)


def test_a_compiler_may_have_arguments_and_one_that_compiles_nothing_is_named(
    monkeypatch, tmp_path
):
    (tmp_path / "ccache").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "ccache").chmod(0o755)
    source = tmp_path / "empty.cc"
    source.write_text("int one = 1;")
    monkeypatch.setenv("CXX", f"{tmp_path}/ccache c++")
    units = {"empty.o": ["-c", str(source)]}
    (made,) = build.compile_units(build.find_compiler(), units, tmp_path)
    assert made.is_file()
    monkeypatch.setenv("CXX", "/bin/true")
    (tmp_path / "none").mkdir()
    with pytest.raises(build.BuildError, match=r"^/bin/true compiles nothing: it wrote no empty"):
        build.compile_units(build.find_compiler(), units, tmp_path / "none")


@NATIVE
def test_the_released_library_has_no_faults():
    """Its queue fails for no test: only the tests' own library can be told to."""
    released, of_tests = (
        (folder / build.LIBRARY).read_bytes() for folder in (build.HERE, library.HERE)
    )
    for name in (b"an injected error", b"transfers_inject", b"arena_delay"):
        assert name not in released and name in of_tests


@NATIVE
def test_a_library_of_other_sources_is_refused(monkeypatch):
    monkeypatch.setattr(library, "digest", lambda: "another")
    assert "built from other sources" in library._load.__wrapped__()[1]


@pytest.mark.slow
@NATIVE
def test_the_environment_names_the_instruction_set():
    code = "from pallas_kernels.cpu.library import *; print(instruction_set(), why_not_cpu())"
    assert run("-c", code, MOEJAX_CPU_ISA="portable").stdout == "portable None\n"
    refused = run("-c", code, MOEJAX_CPU_ISA="sse9").stdout
    assert refused.startswith("None MOEJAX_CPU_ISA is sse9; this machine runs portable")


@NATIVE
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_this_machine_runs_what_linux_says_that_it_has():
    wanted = ["portable", *(isa for isa in sets_of_linux() if isa != "amx")]
    code = "from pallas_kernels.cpu.library import *; print(why_not_cpu())"
    ran = run("-c", code, MOEJAX_CPU_ISA="sse9").stdout.strip().split(" runs ")[1].split(", ")
    assert [isa for isa in ran if isa != "amx"] == wanted


@NATIVE
@pytest.mark.parametrize(
    ("x", "weights", "message"),
    [
        ("bfloat16", "float32", "op 'linear': x is bfloat16, weights is float32; the native CPU"),
        ("int8", "int8", "x is int8, weights is int8; the native CPU op takes one of bfloat16"),
    ],
)
def test_refuses_other_dtypes(x, weights, message):
    with pytest.raises(ValueError, match=message):
        api.linear(
            jnp.ones((1, 2), x),
            jnp.ones((1, 3, 2), weights),
            0,
            None,
            LinearOptions(implementation="cpu"),
        )


SHARED = (
    "select",
    "arena",
    "arrivals",
    "supply",
    "transfer_queue",
    "transfer_calls",
    "checksums",
    "gguf",
    "transpose",
)
"""What ops are linked with beside the kernels."""


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizer, repository, tmp_path):
    """Kernels of every instruction set that this CPU has, and of AVX-512's width compiled for any
    CPU, over random shapes, built without jax."""
    compiler = build.find_compiler()
    program = tmp_path / "check"
    flags = [*build.FLAGS, "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    flags += ["-I", str(repository), "-DMOEJAX_STAND_INS"]
    flags += ["-DMOEJAX_X86"] if sys.platform == "linux" and os.uname().machine == "x86_64" else []
    units = {path.parent.name: ["-c", str(path)] for path in build.HERE.parent.glob("*/cpu.cc")}
    units |= {name: ["-c", str(build.HERE / f"{name}.cc")] for name in SHARED}
    units["check"] = ["-c", str(repository / "tests/pallas_kernels/cpu_check.cc")]
    kernels = build.PORTABLE | (build.X86 if "-DMOEJAX_X86" in flags else {})
    stand_ins: dict[str, tuple[int, tuple[str, ...]]] = {"wide": (16, ())}
    for isa, (lanes, extra) in (stand_ins | kernels).items():
        define = [f"-DMOEJAX_ISA={isa}", f"-DMOEJAX_LANES={lanes}", *extra]
        units[isa] = [*define, "-c", str(build.HERE / "kernels.cc")]
    if "-DMOEJAX_X86" in flags:
        units["amx"] = [*build.AMX, "-c", str(build.HERE / "amx.cc")]
        for isa in {*build.X86, "amx"}.difference(sets_of_linux()):  # only linked
            units[isa] += ["-O0", "-fno-sanitize=all"]
    compiled = {f"{name}.o": [*flags, *arguments] for name, arguments in reversed(units.items())}
    objects = map(str, build.compile_units(compiler, compiled, tmp_path))
    build._run([*compiler, f"-fsanitize={sanitizer}", "-pthread", *objects, "-o", str(program)])
    for seed in ("1", "2"):
        result = subprocess.run([program, seed, "40"], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr[-3000:]
        assert result.stdout.startswith("ok wide portable")


@pytest.mark.slow
@pytest.mark.nightly
def test_sanitizers_find_nothing_in_integer_products(repository, tmp_path):
    """Of every form that runs here: portable code, AVX2, AVX-512, VNNI and tiles: the same bits."""
    compiler, said = build.find_compiler(), []
    here, forms = sets_of_linux(), ("avx2", "avx512", "avx512bf16")
    sets = build.PORTABLE | {isa: build.X86[isa] for isa in forms if isa in here}
    if "amx" in here:
        lanes, extra = build.X86["avx512bf16"]
        sets["amx"] = lanes, (*extra, "-DMOEJAX_TILES")
    flags = [*build.FLAGS, "-O1", "-g", "-fno-sanitize-recover=all", "-I", str(repository)]
    # Of "undefined" what matters to them: all of it took four times as long to compile.
    sanitizers = "address,bounds,shift,signed-integer-overflow"
    flags += ["-I", str(build.HERE), f"-fsanitize={sanitizers}", "-Wno-unused-function"]
    units = {
        isa: [*flags, f"-DMOEJAX_LANES={lanes}", *extra, str(source)]
        for isa, (lanes, extra) in sets.items()
        for source in [repository / "tests/pallas_kernels/integers_check.cc"]
    }
    for program in build.compile_units(compiler, units, tmp_path):
        result = subprocess.run([program, "1", "200"], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr[-3000:]
        said.append(result.stdout)
    assert said[0].startswith("ok ") and set(said) == {said[0]}
