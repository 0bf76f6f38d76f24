"""What every test shares: the platform, the compilation cache, hypothesis, and the reasons to skip.

Nothing else skips a test, but for NATIVE of tests/pallas_kernels/contract.py, where the native CPU
ops are not built. A test file with the marker `torch` imports torch inside its tests or
fixtures, not at the top, because newer Pythons collect it too.

Environment:
    JAX_PLATFORMS             default cpu
    JAX_COMPILATION_CACHE_DIR default a directory of this user in the system's temporary directory
    MOEJAX_SHARED             the directory with reference models and corpora; default ../shared
    MOEJAX_REQUIRE_AOT        1: a missing CUDA compiler is a failure, not a skip
"""

import contextlib
import functools
import gc
import getpass
import importlib.util
import os
import pickle
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before the first import of jax, here and in the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # see tests/aot/aot_h200.py
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(Path(tempfile.gettempdir()) / f"moejax-tests-xla-{getpass.getuser()}"),
)
# Byte code that must not lie beside modules is kept elsewhere, for the processes of tests.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    os.environ.setdefault(
        "PYTHONPYCACHEPREFIX",
        str(Path(tempfile.gettempdir()) / f"moejax-tests-pyc-{getpass.getuser()}"),
    )
# XLA compilation is the main cost of the suite on two cores; below this time a file costs more.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import hypothesis
import pytest

import moejax.models.directory

REPOSITORY = Path(__file__).resolve().parent.parent
# In this process "demo" is the model of four layers whose shapes the tests were written for. The
# one in the package is that of tests/moejax/test_demo.py, and of processes that tests start.
PACKAGED_DEMO = moejax.models.directory.EMBEDDED
DEMO = moejax.models.directory.EMBEDDED = REPOSITORY / "tests" / "models" / "demo"
SHARED = Path(os.environ.get("MOEJAX_SHARED", REPOSITORY.parent / "shared"))

# --hypothesis-profile chooses another than `random`. No deadline: the first example compiles.
_SLOW_DATA = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile(
    "random", deadline=None, suppress_health_check=_SLOW_DATA, print_blob=True, max_examples=20
)
hypothesis.settings.register_profile("whole", deadline=None, suppress_health_check=_SLOW_DATA)
hypothesis.settings.register_profile(
    "ci", hypothesis.settings.get_profile("random"), derandomize=True
)
hypothesis.settings.load_profile("random")


@functools.cache
def _aot_missing() -> str | None:
    """What the machine lacks to compile for an H200, None if nothing."""
    import jax
    import jax.numpy as jnp

    from tests.aot.aot_h200 import AotUnavailable, compile_for_h200

    try:
        compile_for_h200(jnp.exp, jax.ShapeDtypeStruct((8,), jnp.float32))
    except AotUnavailable as error:
        return str(error)
    return None


def pytest_configure(config: pytest.Config) -> None:
    """The native ops of all tests are the released ones but for faults in the queue, which tests
    inject; the first run compiles them, some seconds."""
    from pallas_kernels.cpu.build import BuildError
    from tests.faults import use_faulty_library

    if not (config.option.markexpr or config.option.hypothesis_profile):
        hypothesis.settings.load_profile("whole")
    if "not slow" in config.option.markexpr:
        os.environ["MOEJAX_QUICK_TESTS"] = "1"  # see tests/pallas_kernels/contract.py
    try:
        use_faulty_library()
    except BuildError as error:
        raise pytest.UsageError(f"tests put faults into the native queue: {error}") from error


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """A quarter of the time of collecting went into Python's search for garbage, and each search
    within a test looked at the 720,000 objects of modules and items again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample",
        metavar="SHARE:SEED",
        help="of the slow tests and their cases run this share, which ones by the seed",
    )


def drawn(item: pytest.Item, share: float, seed: str) -> bool:
    """Whether a test is in the sample. A case is drawn by its parameters, so that those of a
    fixture are used by all tests of a file or by none."""
    case = getattr(item, "callspec", None)
    name = item.nodeid if case is None else case.id
    return zlib.crc32(f"{seed} {name}".encode()) < share * 2**32


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "shared" in getattr(item, "fixturenames", ()):
            item.add_marker("shared")
        longer = item.get_closest_marker("aot") and item.path.parent.name != "aot"
        if item.get_closest_marker("nightly") or longer:
            item.add_marker("slow")  # so that the quick suite is quick
    if sample := config.getoption("--sample"):
        share, _, seed = sample.partition(":")
        kept, gone = [], []
        for item in items:
            runs = not item.get_closest_marker("slow") or drawn(item, float(share), seed)
            (kept if runs else gone).append(item)
        config.hook.pytest_deselected(items=gone)
        items[:] = kept


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("torch"):
        if sys.version_info >= (3, 12):
            pytest.skip("marker torch: parity with transformers' models runs on Python 3.11")
        if importlib.util.find_spec("torch") is None:
            pytest.fail("torch is not installed: pip install '.[test]'", pytrace=False)
    if item.get_closest_marker("browser") and shutil.which("chromium") is None:
        pytest.skip("marker browser: no chromium here")
    if item.get_closest_marker("shared") and not SHARED.is_dir():
        pytest.skip(f"marker shared: no {SHARED}; MOEJAX_SHARED names another place")
    if item.get_closest_marker("aot") and (missing := _aot_missing()):
        if os.environ.get("MOEJAX_REQUIRE_AOT") == "1":
            pytest.fail(f"MOEJAX_REQUIRE_AOT=1, but {missing}", pytrace=False)
        pytest.skip(f"marker aot: {missing}")


MOST_PROGRAMS = 400
"""That stay in a process of tests: each has about 40 memory maps, of which Linux allows 65,530, and
XLA does not survive it where there is none left."""


@pytest.fixture(scope="session", autouse=True)
def shared_programs() -> Iterator[list[bool]]:
    """A program of an engine is compiled when it is called first, and once for all engines of this
    process that have it: they find it as a start finds what the one before kept on disk. Most of
    what engines compile ahead of need, tests never call. Gives whether programs are shared."""
    from moejax.step import compiler
    from moejax.step.executor import Executor
    from moejax.step.kept_programs import KeptPrograms
    from pallas_kernels.triton import is_interpreted

    shares, held = [True], {}

    class Shared(KeptPrograms):
        def load(self, key: Any) -> Any:
            return held.get(self._path(key).name) if shares[-1] else None

        def keep(self, key: Any, compiled: Any) -> None:
            if shares[-1]:
                held[self._path(key).name] = compiled
            if len(held) > MOST_PROGRAMS:
                del held[next(iter(held))]  # the oldest one

    def of(spec: Any, arrays: Any, device: Any) -> Shared | None:
        if is_interpreted():
            return None
        try:
            return Shared(Path(), spec, arrays, device)
        except (TypeError, AttributeError, pickle.PicklingError):
            return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "_compile_ahead", lambda self: None)
        patch.setattr(KeptPrograms, "of", of)
        patch.setattr(compiler, "bypass_compilation_cache", contextlib.nullcontext)
        yield shares


@pytest.fixture
def own_programs(shared_programs: list[bool]) -> Iterator[None]:
    """For tests that change the code which programs are traced from."""
    shared_programs.append(False)
    yield
    shared_programs.pop()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared() -> Path:
    """Reference models and corpora; a test that asks for it gets the marker `shared` by that."""
    return SHARED


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """The tests' model, a Hugging Face directory."""
    return DEMO
