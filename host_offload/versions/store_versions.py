"""Adds versions of the experts to a store, encoded from its dense version or from the formats of a
checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from host_offload.memory.record_source import read_records
from host_offload.memory.store import ExpertStore, StoreBuilder
from host_offload.versions.encoders import NUMPY_DTYPES, WORKERS, EncodingError, decode, encode
from host_offload.versions.layer_versions import layers_above
from host_offload.versions.quantizers import ScaleRule, rtn, to_float32
from pallas_kernels.records import VERSIONS, RecordFormat
from pallas_kernels.records.format import LOSSY

_BATCH_BYTES = 64 << 20
"""Bytes of dense records encoded at once."""


class VersionError(ValueError):
    """A store cannot get a version; the message says why."""


def add_version(
    store: ExpertStore,
    version: str,
    dtype: str,
    rule: ScaleRule = rtn,
    progress: Callable[[int, int], None] | None = None,
    new_builder: Callable[..., StoreBuilder] = StoreBuilder,
) -> ExpertStore:
    """Returns a store with one more version, which shares the arrays of the others. Where layers
    differ in format, those that take no more bytes than in the version do not get it.

    - `dtype`: the run's.
    - `rule`: chooses the scales of int versions.
    - `progress`: called with (done, total) bytes of records.
    - `new_builder`: makes the array of the version.

    Raises VersionError without a version to make it from, for weights that the version cannot hold,
    and for a version that the store has already; ValueError as RecordFormat does; MemoryError as
    StoreBuilder does.
    """
    places = _places(store, version)
    layers: Sequence[int] = range(len(places))
    if len(dict(places)) > 1:
        layers = layers_above(store, _layout_of(store, version, dtype))
    made, failed = _encoded(store, version, dtype, rule, progress, layers, new_builder=new_builder)
    if made is None:
        layer, (experts, reason) = next(iter(failed.items()))
        named = ", ".join(map(str, experts[:8]))
        raise VersionError(f"{version} cannot hold expert {named} of MoE layer {layer}: {reason}")
    some = tuple(layers) if len(layers) < len(places) else ()
    added = dataclasses.replace(made.versions[version], layers=some)
    return ExpertStore(store.versions | {version: added})


def lossless_where_it_fits(
    store: ExpertStore, dtype: str, progress: Callable[[int, int], None] | None = None
) -> tuple[ExpertStore, dict[int, str]]:
    """Replaces dense by lossless12, except for layers with an expert whose escapes overflow. Those
    layers stay dense, so each layer is in one of two arrays. Other versions stay.

    The dense array of `store` is freed. If a layer overflows, all others are encoded twice, since
    an array cannot shrink.

    - `dtype`, `progress`: as in add_version.

    Returns the store, with lossless12 and dense first, and layer → why it stays dense. Raises
    VersionError where every layer overflows, and as add_version does.
    """
    version = "lossless12"
    count = len(_places(store, version))
    made, failed = _encoded(store, version, dtype, rtn, progress, range(count), every=True)
    others = [version for version in store.versions if version != "dense"]
    if made is not None:
        return ExpertStore(made.versions | store.only(others).versions), {}
    if len(failed) == count:
        raise VersionError(
            f"in every MoE layer an expert has more escapes than {version} has room for, so there "
            "is nothing to gain; use dense"
        )
    why = {
        layer: f"expert {', '.join(map(str, experts[:8]))}: {reason}"
        for layer, (experts, reason) in failed.items()
    }
    fitting = tuple(layer for layer in range(count) if layer not in failed)
    made, _ = _encoded(store, version, dtype, rtn, None, fitting)
    rest, _ = _encoded(store, "dense", dtype, rtn, None, tuple(failed))
    assert made is not None and rest is not None
    parts = {
        version: dataclasses.replace(made.versions[version], layers=fitting),
        "dense": dataclasses.replace(rest.versions["dense"], layers=tuple(failed)),
    }
    return ExpertStore(parts | store.only(others).versions), why


def _places(store: ExpertStore, version: str | None = None) -> list[tuple[str, int]]:
    """Returns for each layer the version that others are made from, dense or else the checkpoint's
    own, and the layer's index in its array. Raises VersionError where the store has `version`
    already, or nothing to make it from."""
    if version in store.layouts:
        raise VersionError(f"the store has version {version} already")
    if "lossless12" in store.layers:
        raise VersionError(
            f"{version} is made from dense, which this store has of {len(store.layers['dense'])} "
            "layers only, those that overflow lossless12"
        )
    whole = [name for name in store.layouts if name not in VERSIONS and name not in store.layers]
    if "dense" in store.layouts and "dense" not in store.layers:
        whole = ["dense"]
    if whole:
        return [(whole[0], layer) for layer in range(store.arrays[whole[0]].shape[0])]
    own = {name: layers for name, layers in store.layers.items() if name not in LOSSY}
    if not own:
        raise VersionError(f"{version} is made from dense, which this store does not have")
    found = {layer: (name, i) for name, layers in own.items() for i, layer in enumerate(layers)}
    return [found[layer] for layer in range(len(found))]


def _layout_of(store: ExpertStore, version: str, dtype: str) -> RecordFormat:
    """Returns the layout that records of the store's experts have in a version."""
    return dataclasses.replace(next(iter(store.layouts.values())), version=version, dtype=dtype)


def _encoded(
    store: ExpertStore,
    version: str,
    dtype: str,
    rule: ScaleRule,
    progress: Callable[[int, int], None] | None,
    layers: Sequence[int],
    *,
    every: bool = False,
    new_builder: Callable[..., StoreBuilder] = StoreBuilder,
) -> tuple[ExpertStore | None, dict[int, tuple[list[int], str]]]:
    """Encodes these layers, in order, into a store of one version.

    - `every`: look for failures in all layers; else stop at the first.

    Returns the store and {}. If the version cannot hold some experts, returns None and layer →
    (these experts, why).
    """
    layout, array = _layout_of(store, version, dtype), next(iter(store.arrays.values()))
    failed: dict[int, tuple[list[int], str]] = {}
    experts, device = array.shape[1], next(iter(array.devices()))
    weight_bytes = layout.weight_rows * layout.hidden * NUMPY_DTYPES[dtype].itemsize
    done, total = 0, len(layers) * experts * weight_bytes
    with contextlib.closing(new_builder(layout, len(layers), experts, device)) as builder:
        for layer, first, weights in dense_weights(store, dtype, layers=layers):
            place = layers.index(layer)
            try:
                with builder.piece(place, first, len(weights), 0, layout.rows) as records:
                    encode(weights, layout, rule, records)
            except EncodingError as error:
                before = failed.get(layer, ([], error.reason))
                failed[layer] = [*before[0], *(first + e for e in error.experts)], before[1]
                if not every:
                    break
            done += weights.nbytes
            if progress is not None:
                progress(done, total)
        return None if failed else builder.finish(), failed


def dense_weights(
    store: ExpertStore, dtype: str, layers: Sequence[int] | None = None
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields (layer, first expert, weights as encode takes them) of all experts, in order.
    Each piece has as many experts as fit in 64 MiB, and at least one for each thread.

    - `dtype`: the run's.
    - `layers`: which layers; None: all.
    """
    places = _places(store)
    for layer in range(len(places)) if layers is None else layers:
        source, place = places[layer]
        layout, array = store.layouts[source], store.arrays[source]
        experts, batch = array.shape[1], max(WORKERS, _BATCH_BYTES // layout.nbytes)
        for first in range(0, experts, batch):
            records = read_records(array, place, first, min(batch, experts - first))
            weights = (
                as_weights(records, layout, dtype) if source == "dense" else decode(records, layout)
            )
            yield layer, first, weights


def as_weights(records: np.ndarray, layout: RecordFormat, dtype: str) -> np.ndarray:
    """Views dense records uint16[n, rows, D] as weights [n, layout.weight_rows, D] of `dtype`,
    without a copy."""
    shape = (len(records), layout.weight_rows, layout.hidden)
    return records.reshape(len(records), -1).view(NUMPY_DTYPES[dtype]).reshape(shape)


def relative_error(weights: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    """The relative error ‖W − Ŵ‖ / ‖W‖ (Frobenius) of each expert, float64[n]. It is 0 where W is
    0, and NaN where W is not finite and Ŵ has other bits.

    - `weights`, `decoded`: W and Ŵ, [n, 3·I, D].
    """
    errors = np.zeros(len(weights))
    for i, (w, d) in enumerate(zip(weights, decoded, strict=True)):
        if not np.array_equal(as_bits(w), as_bits(d)):
            wide = to_float32(w)
            norm = np.linalg.norm(wide)
            with np.errstate(invalid="ignore"):
                errors[i] = np.linalg.norm(wide - to_float32(d)) / norm if norm else 0.0
    return errors


def as_bits(weights: np.ndarray) -> np.ndarray:
    """Views weights as unsigned integers of the same size, without a copy."""
    return weights.view(np.dtype(f"uint{8 * weights.itemsize}"))
