"""Products and networks of a few rows, and searches of expert maps, on the calling thread, by the
native library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pallas_kernels.cpu.library import address_of, bind

FORMS = ("", "gelu", "relu", "sigmoid")
"""What may follow a product, by the library's numbers. GELU is that by tanh."""


def _multiply() -> Callable[..., Any] | None:
    return bind("moejax_multiply_rows", "assasasas", None)


def _run_network() -> Callable[..., Any] | None:
    return bind("moejax_run_network", "aasaasaas", None)


def multiply_few(
    rows: np.ndarray, weights: np.ndarray, bias: np.ndarray | None = None, form: str = ""
) -> np.ndarray:
    """The product of float32 rows [N, D] and float32 or finite float16 weights [D, E], summed in
    float32 in the order of D, with a float32 bias [E] and then one of FORMS. Without the library it
    is numpy's einsum, which sums in the same order and takes up to twice as long."""
    function, halves = _multiply(), weights.dtype == np.float16
    if function is None or not weights.flags.c_contiguous or rows.shape[1] != len(weights):
        found = np.einsum("nd,de->ne", rows, weights.astype(np.float32, copy=False))
        return finish_product(found if bias is None else found + bias, form)
    rows, found = np.ascontiguousarray(rows), np.empty((len(rows), weights.shape[1]), np.float32)
    places = address_of(rows), *rows.shape, address_of(weights), weights.shape[1], address_of(found)
    if bias is not None:
        bias = np.ascontiguousarray(bias, np.float32)
    after = None if bias is None else address_of(bias)
    function(*places, halves, after, FORMS.index(form))
    return found


def finish_product(x: Any, form: str, xp: Any = np) -> Any:
    """One of FORMS of x, in numpy or jax.numpy."""
    if form == "gelu":
        return 0.5 * x * (1 + xp.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))
    if form == "sigmoid":
        return 1 / (1 + xp.exp(-x))
    return x * (x > 0) if form == "relu" else x


def nearest_maps(
    rows: np.ndarray,
    kept: np.ndarray,
    filled: np.ndarray,
    products: np.ndarray | None = None,
    squares: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray] | None:
    """The places of a store of expert maps (map_store.py) with the largest score: by dot products
    of rows float32[N, K], scaled to length 1, and kept float32[C, K], C ≥ 1, or by the cosine of
    probabilities and maps over all layers so far. Returns places int64[N], of equal ones the first,
    and scores float32[N]; None without the library.

    - `filled`: float32[C], 0 for places that are empty.
    - `products`, `squares`: int32[N, C] and int32[N] of the layers before, to which this layer's
      are added, in place.
    - `lengths`: float32[C], of the maps up to this layer.
    """
    function = bind("moejax_nearest_maps", "assasaaaaaa", None)
    if function is None or not kept.flags.c_contiguous or kept.dtype != np.float32:
        return None
    rows = np.ascontiguousarray(rows, np.float32)
    assert rows.shape[1:] == kept.shape[1:] and filled.shape == kept.shape[:1]
    found = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
    given = [None if a is None else address_of(a) for a in (products, squares, lengths)]
    places = address_of(rows), *rows.shape, address_of(kept), len(kept), *given, address_of(filled)
    function(*places, *(address_of(a) for a in found))
    return found


class Network:
    """A network of LLaPor (host_offload/policies/prefetch/llapor.py) as the library reads it.

    - `arrays`: of a layer, by name, which it keeps.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        (inputs, components), (width, self.experts) = arrays["basis"].shape, arrays["output"].shape
        self._arrays = arrays
        linear = ("basis", "input", "output", "inner1", "inner2", "gate")
        names = "mean", *(part for name in linear for part in (name, f"{name}_bias"))
        addresses = (address_of(arrays[name]) if name in arrays else 0 for name in names)
        numbers = inputs, components, self.experts, width, "gate" in arrays
        self._said = np.array([*numbers, *addresses], np.int64)
        self._at = address_of(self._said)

    def __call__(
        self, gate_input: np.ndarray, ids: np.ndarray, weights: np.ndarray, most: int
    ) -> tuple[np.ndarray, list[int]]:
        """Returns scores float32[N, E], and of one row the `most` experts with the largest ones,
        the largest first, equal ones by number; [] of more rows.

        - `gate_input`: float16[N, …, D].
        - `ids`, `weights`: int[N, …, k] and float32[N, …, k], of the experts that were chosen.
        """
        function, rows = _run_network(), len(gate_input)
        assert function is not None
        gate_input = np.ascontiguousarray(gate_input, np.float16)
        ids, weights = (
            np.ascontiguousarray(ids, np.int16),
            np.ascontiguousarray(weights, np.float32),
        )
        scores, best = np.empty((rows, self.experts), np.float32), np.empty(most, np.int64)
        given = address_of(ids), address_of(weights), ids.shape[-1], address_of(scores)
        alone = address_of(best) if rows == 1 else None
        function(self._at, address_of(gate_input), rows, *given, alone, most)
        return scores, best.tolist() if rows == 1 else []


def network_of(arrays: Mapping[str, np.ndarray]) -> Network | None:
    """The network of a layer's arrays; None without the library, and for arrays that it cannot
    read: matrices must be contiguous float16 of matching sizes, vectors float32."""
    if _run_network() is None or "basis" not in arrays:
        return None
    (inputs, components), (width, experts) = arrays["basis"].shape, arrays["output"].shape
    sizes = {"basis": (inputs, components), "input": (components + experts, width)}
    sizes |= {"output": (width, experts)}
    if "gate" in arrays:
        sizes |= {"inner1": (width, width), "inner2": (width, width), "gate": (components, width)}
    vectors = {"mean": (inputs,)}
    vectors |= {f"{name}_bias": size[1:] for name, size in sizes.items() if name != "basis"}
    for kind, named in ((np.float16, sizes), (np.float32, vectors)):
        for name, size in named.items():
            array = arrays[name]
            fits = array.shape == size and array.dtype == kind and array.flags.c_contiguous
            if not fits:
                return None
    return Network(arrays)
