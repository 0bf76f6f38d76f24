"""What the contracts of the ops share: their form, compilation, poison, and the comparison.

An op is tested through its `api` with every entry of its table of implementations, so a new
implementation is tested by its entry there. On a machine without a GPU kernels run in Pallas's
interpreters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis
import jax
import jaxlib
import numpy as np
import pytest

from pallas_kernels.cpu.library import why_not_cpu
from pallas_kernels.dispatch import KERNELS
from pallas_kernels.mosaic import UNITS, why_not_mosaic
from pallas_kernels.tolerances import TOLERANCES
from pallas_kernels.triton import interpreted

POISON = 0x7FFF
"""uint16 of memory where nothing valid lies: NaN in bfloat16 and float16, twice in float32."""

SEEDS = (0, 1)

NATIVE = pytest.mark.skipif(why_not_cpu() is not None, reason=f"cpu: {why_not_cpu()}")
"""Tests that need the library of native CPU ops; .ci/run builds it and skips none of them."""


@dataclasses.dataclass(frozen=True, eq=False)
class Mutant:
    """A deliberate mistake around an implementation, which the contract must find.

    change: the arguments that it gives the implementation instead, by their names.
    spec: what the contract finds it with.
    table, of: the implementation, if not the contract's reference.
    """

    change: Callable[[dict], dict]
    spec: Any
    table: dict[str, Callable] | None = None
    of: str = "xla"

    @classmethod
    def in_record(cls, name: str, field: str, change: Callable, *rest: Any) -> Mutant:
        """Of a field of the record, or of the options, that is the argument `name`."""

        def changed(given):
            fields = {field: change(getattr(given[name], field))}
            options = dataclasses.is_dataclass(given[name])
            replace = dataclasses.replace if options else type(given[name])._replace
            return {name: replace(given[name], **fields)}

        return cls(changed, *rest)


@dataclasses.dataclass(frozen=True, eq=False)
class Contract:
    """What every implementation of an op must do.

    name: of the op.
    implementations: the op's own table; a new implementation is tested by its entry there.
    specs: shapes and dtypes, as a rule those of the op's folder.
    check: asserts the contract of (spec, implementation), with `histories` of a history too.
    histories: spec → strategy of histories; examples: how many are drawn.
    facts: each asserts one thing more of an implementation.
    mutant: a mistake that check must find.
    refused: an erroneous call; refusals: its arguments, and the message last.
    """

    name: str
    implementations: dict[str, Callable]
    specs: Sequence
    check: Callable[..., None]
    histories: Callable[[Any], hypothesis.strategies.SearchStrategy] | None = None
    examples: int = 20
    facts: Sequence[Callable[[str], None]] = ()
    mutant: Mutant | None = None
    refused: Callable | None = None
    refusals: Sequence[tuple] = ()

    def run(self, spec: Any, implementation: str, examples: int | None = None) -> None:
        """Asserts the contract of one spec. examples: of histories, drawn the same each time."""
        if self.histories is None:
            self.check(spec, implementation)
            return
        few = hypothesis.settings(max_examples=self.examples)
        if examples is not None:
            options = {"database": None, "derandomize": True, "report_multiple_bugs": False}
            phases = [hypothesis.Phase.generate]
            few = hypothesis.settings(max_examples=examples, phases=phases, **options)

        @few
        @hypothesis.given(self.histories(spec))
        def each(history):
            self.check(spec, implementation, history)

        each()


def takes(implementation: str, spec: Any) -> bool:
    """Whether the implementation takes the spec: kernels have 16-bit operands only, Mosaic's also
    whole tiles, of experts dense ones of three matrices without biases."""
    if implementation == "mosaic":
        coded = getattr(spec, "versions", ()) or getattr(spec, "biases", False)
        takes_jax = why_not_mosaic() is None and not coded and getattr(spec, "gated", True)
        return takes_jax and spec.dtype != "float32" and fitting(implementation, spec) == spec
    return implementation != "pallas" or getattr(spec, "dtype", None) != "float32"


def fitting(implementation: str, spec: Any) -> Any:
    """The spec with widths that the implementation takes: Mosaic's kernels have no masks."""
    if implementation != "mosaic":
        return spec
    unit = UNITS[type(spec).__module__.split(".")[1]]
    widths = {"width", "hidden", "inputs", "outputs"} & {f.name for f in dataclasses.fields(spec)}
    wider = {name: -(-getattr(spec, name) // unit) * unit for name in widths}
    return dataclasses.replace(spec, **wider)


def dtypes_of_bits(implementation: str) -> tuple[str, ...]:
    """Dtypes that facts about bits are asserted in. Of XLA's ops tests/moejax has float32 too."""
    return ("bfloat16",) if implementation in ("xla", *KERNELS) else ("float32", "bfloat16")


def name_of(spec: Any) -> str:
    texts = (str(value).replace(" ", "") for value in dataclasses.astuple(spec))
    return "-".join(text if len(text) < 40 else f"{len(text)}chars" for text in texts)


COUNTS = ("tokens", "lengths", "chunks", "size")
"""Fields of specs that say how many rows there are."""


def differs_in_rows(spec: Any, specs: Sequence) -> bool:
    """Whether an earlier and a later spec are as this one but for their number of rows."""
    rows = {field.name: None for field in dataclasses.fields(spec) if field.name in COUNTS}
    alike = [
        s for s in specs if dataclasses.replace(s, **rows) == dataclasses.replace(spec, **rows)
    ]
    return bool(rows) and spec not in (alike[0], alike[-1])


UNOPTIMIZED: dict[str, bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Options that compile in half of the time. The quick suite has them; where slow tests run too, as
with the oldest jax in .ci/run, ops are compiled as the engine compiles them."""

QUICKLY = UNOPTIMIZED.copy()
"""Those of an interpreted kernel: it is the kernel that is tested, not the code that XLA makes of
the interpreter's loops."""
if jaxlib.__version__.startswith("0.10."):  # jaxlib 0.11 has it no more
    QUICKLY["xla_cpu_use_fusion_emitters"] = False


def implementations_of(static: dict) -> set:
    """Those that static arguments name, themselves or in an op's options."""
    named = (getattr(value, "implementation", None) for value in static.values())
    return {static.get("implementation"), *named}


@functools.cache
def compiled(op: Callable, donate: tuple[str, ...] = (), **static) -> Callable:
    """The op compiled as the engine compiles it; its kernels interpreted where there is no GPU."""

    @functools.wraps(op)  # jax.jit finds the donated arguments by their names
    def traced(*args, **kwargs):
        with contextlib.nullcontext() if _on_gpu() else interpreted():
            return op(*args, **kwargs)

    of_kernel = "pallas" in implementations_of(static) and not _on_gpu()
    quick = UNOPTIMIZED if "MOEJAX_QUICK_TESTS" in os.environ and not _on_gpu() else {}
    return jax.jit(
        functools.partial(traced, **static),
        donate_argnames=donate,
        compiler_options={"xla_allow_excess_precision": False, **(QUICKLY if of_kernel else quick)},
    )


def pinned(array: np.ndarray) -> jax.Array:
    """The array in pinned host memory, where stores lie."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return jax.device_put(array, sharding)


def stored(array: np.ndarray, implementation: str) -> jax.Array:
    """The array where this implementation's tests have stores: pinned host memory, but device
    memory for an interpreted kernel, since jax 0.10's interpreter takes no operand on the host."""
    if implementation in KERNELS and not _on_gpu():
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


def alone(x: np.ndarray, rows: Sequence[int] = (0, 8, 16)) -> Iterator[tuple[int, np.ndarray]]:
    """(row, the array with NaN in all other rows)."""
    for row in rows:
        others = np.full_like(x, np.nan)
        others[row] = x[row]
        yield row, others
