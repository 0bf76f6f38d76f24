"""What the contract tests of the ops share: compilation, poison, and the comparison.

An op is tested through its `api` with every entry of its IMPLEMENTATIONS, so a new implementation
is tested by its entry there. A deliberate mistake (a mutant) is one more entry, of its own name.
On a machine without a GPU the kernels of "pallas" run in Pallas's interpreter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import jax
import jaxlib
import numpy as np
import pytest

from pallas_kernels.cpu.library import why_not_cpu
from pallas_kernels.tolerances import TOLERANCES
from pallas_kernels.triton import interpreted
from tests.pallas_kernels import bounds

POISON = 0x7FFF
"""uint16 of memory where nothing valid lies: NaN in bfloat16 and float16, twice in float32."""

SEEDS = (0, 1)

NATIVE = pytest.mark.skipif(why_not_cpu() is not None, reason=f"cpu: {why_not_cpu()}")
"""Tests that need the library of native CPU ops; .ci/run builds it and skips none of them."""


INTERPRETED_SPECS = 1
"""Specs of an op that .ci/run interprets its kernels with; `pytest` without a marker takes all."""

QUICK_SPECS = 3
"""Specs of an op that the quick suite tests it with."""

COUNTS = ("tokens", "lengths", "chunks", "size")
"""Fields of specs that say how many rows there are."""


def each(
    implementations: Mapping[str, Callable],
    specs: Sequence = (),
    dtypes: Sequence = (),
    *,
    mutants: bool = False,
    quick: int = QUICK_SPECS,
):
    """Parametrises a test by implementation and, where given, by spec and by dtype.

    Kernels take 16-bit operands only, so "pallas" gets neither specs of float32 nor that dtype. Its
    cases are slow, since interpreted kernels compile slowly; the quick suite has each kernel in
    the engine (test_kernels_in_engine). So are an op's specs after the first `quick`. mutants: the
    test watches other tests: slow, and nightly where interpreted.

    Each spec and dtype is a program that XLA compiles for a second or two, so of the reference
    "xla" some are nightly: specs whose number of rows alone differs from that of an earlier and of
    a later one (native ops take them all, and tests of bits compare numbers of rows), and float32
    where another dtype is tested too, as in test_same_bits.
    """
    axes = {"implementation": list(implementations), "spec": list(specs), "dtype": list(dtypes)}
    axes = {name: values for name, values in axes.items() if values}
    cases = []
    for values in itertools.product(*axes.values()):
        case = dict(zip(axes, values, strict=True))
        interpreted_kernel, spec = case["implementation"] == "pallas", case.get("spec")
        if interpreted_kernel and "float32" in (case.get("dtype"), getattr(spec, "dtype", None)):
            continue
        name = "-".join(value if isinstance(value, str) else _name(value) for value in values)
        place = 0 if spec is None else list(specs).index(spec)
        of_bits = spec is None and "dtype" in case
        reference = case["implementation"] == "xla"
        slow = interpreted_kernel or mutants or place >= quick
        marks = [pytest.mark.slow] if slow else []
        if case["implementation"] == "cpu":
            marks.append(NATIVE)
        left_out = of_bits and case["dtype"] == "float32" if spec is None else _between(spec, specs)
        if reference and left_out:
            marks.append(pytest.mark.nightly)
        if interpreted_kernel and (mutants or of_bits or place >= INTERPRETED_SPECS):
            marks.append(pytest.mark.nightly)
        cases.append(pytest.param(*values, id=name, marks=marks))
    return pytest.mark.parametrize(list(axes), cases)


def _between(spec, specs: Sequence) -> bool:
    """Whether an earlier and a later spec are as this one but for their number of rows."""
    rows = {field.name: None for field in dataclasses.fields(spec) if field.name in COUNTS}
    alike = [
        s for s in specs if dataclasses.replace(s, **rows) == dataclasses.replace(spec, **rows)
    ]
    return bool(rows) and spec not in (alike[0], alike[-1])


def _name(spec) -> str:
    texts = (str(value).replace(" ", "") for value in dataclasses.astuple(spec))
    return "-".join(text if len(text) < 40 else f"{len(text)}chars" for text in texts)


QUICKLY: dict[str, bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Options that compile an interpreted kernel in half of the time. It is the kernel that is tested
then, not the code that XLA makes of the interpreter's loops."""
if jaxlib.__version__.startswith("0.10."):  # jaxlib 0.11 has it no more
    QUICKLY["xla_cpu_use_fusion_emitters"] = False


@functools.cache
def compiled(op: Callable, donate: tuple[str, ...] = (), **static) -> Callable:
    """The op compiled as the engine compiles it; its kernels interpreted where there is no GPU."""

    @functools.wraps(op)  # jax.jit finds the donated arguments by their names
    def traced(*args, **kwargs):
        with contextlib.ExitStack() as stack:
            if not _on_gpu():
                stack.enter_context(interpreted())
                stack.enter_context(bounds.checked())
            return op(*args, **kwargs)

    of_kernel = str(static.get("implementation", "")).startswith("pallas") and not _on_gpu()
    return jax.jit(
        functools.partial(traced, **static),
        donate_argnames=donate,
        compiler_options={"xla_allow_excess_precision": False, **(QUICKLY if of_kernel else {})},
    )


def pinned(array: np.ndarray) -> jax.Array:
    """The array in pinned host memory, where stores lie."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return jax.device_put(array, sharding)


def stored(array: np.ndarray, implementation: str) -> jax.Array:
    """The array where this implementation's tests have stores: pinned host memory, but device
    memory for an interpreted kernel, since jax 0.10's interpreter takes no operand on the host."""
    if implementation.startswith("pallas") and not _on_gpu():
        return jax.device_put(array)
    return pinned(array)


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def bits(array) -> np.ndarray:
    """An array's bits, for comparisons that tell signed zeros and NaNs apart."""
    array = np.ascontiguousarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def same_bits(got, want) -> None:
    np.testing.assert_array_equal(bits(got), bits(want), strict=True)


def as_rows(values: np.ndarray, columns: int) -> np.ndarray:
    """Values as rows of uint16, as they lie in an arena."""
    return np.ascontiguousarray(values).view(np.uint16).reshape(-1, columns)


def close(op: str, dtype: str, got, want: np.ndarray, times: float = 1) -> None:
    """got within so many times the table's tolerance of want, float64; a NaN is never right."""
    assert got.shape == want.shape and np.all(np.isfinite(want))
    tolerance = TOLERANCES[op][dtype] * times
    np.testing.assert_allclose(
        np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance, equal_nan=False
    )


def wide(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, np.float64)


def draw(rng: np.random.Generator, shape, dtype: str, scale: float = 1.0) -> np.ndarray:
    """Normal values, rounded to the dtype."""
    return (scale * rng.standard_normal(shape)).astype(jax.numpy.dtype(dtype))
