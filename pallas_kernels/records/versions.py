"""The versions of a run: their formats in cells and in stores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.records.encoding import Encoding
from pallas_kernels.records.format import RecordFormat, encodings_of


class VersionFormats(NamedTuple):
    """The formats of one version. Static and hashable."""

    cell: RecordFormat
    store: RecordFormat
    """The cell's format, or lossless12 if that is dense: then it is decoded during the copy."""
    places: tuple[int, ...] | None = None
    """Each layer's index in this version's store, −1: the store lacks the layer; None: the store
    has every layer, in order."""

    @property
    def in_transit(self) -> bool:
        """Whether records are decoded on their way from the store into a cell."""
        return self.cell != self.store

    def place(self, layer: jax.Array | int) -> jax.Array | int:
        """The layer's index in the store."""
        return layer if self.places is None else jnp.asarray(self.places, jnp.int32)[layer]


Formats = tuple[VersionFormats, ...]
"""By version number, as in tables. If an op's `formats` is None, there is one version, dense in
cell and store."""


READERS = ("fill", "stage", "move", "expert_ffn", "fill_ffn")
"""Ops that take formats."""


def why_no_kernel(versions: Sequence[str], also: str | None = None) -> dict[str, str]:
    """Op → why its kernel does not run with these versions. Kernels read one format for gate and
    up, and codes beside codes only.

    - `also`: what else of the experts only XLA computes; None: nothing.
    """

    def is_read(encodings: list[Encoding]) -> bool:
        gate, up, down = encodings
        alike = gate == up and (up == down or (up.lossy and down.lossy))
        return alike and gate.kernels and down.kernels

    return _unread(versions, also, "no kernel reads", is_read)


def why_no_native(versions: Sequence[str], also: str | None = None) -> dict[str, str]:
    """The same of its native CPU op."""

    def is_read(encodings: list[Encoding]) -> bool:
        return all(encoding.native is not None for encoding in encodings)

    return _unread(versions, also, "no native CPU op reads", is_read)


def _unread(
    versions: Sequence[str],
    also: str | None,
    what: str,
    is_read: Callable[[list[Encoding]], bool],
) -> dict[str, str]:
    found = next((v for v in versions if not is_read([*encodings_of(v).values()])), None)
    if found is not None:
        return dict.fromkeys(READERS, f"{what} records of {found}")
    return dict.fromkeys(READERS if also else (), f"only XLA computes with {also}")


def stored_in_part(formats: Formats | None) -> tuple[int, ...]:
    """Numbers of the versions whose stores lack layers."""
    return tuple(
        number for number, (_, _, places) in enumerate(formats or ()) if places and min(places) < 0
    )


def check_formats(
    formats: Formats | None,
    stores: Sequence[jax.Array],
    layers: int | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> None:
    """Raises ValueError for formats that do not fit the stores uint16[L, E, rows, D].

    - `layers`: L of the tables, if known.
    - `dtype`: of the computation with the weights, if there is one.
    """
    if formats is None:
        return
    if len(formats) != len(stores):
        raise ValueError(f"{len(formats)} formats for {len(stores)} stores")
    for number, (version, store) in enumerate(zip(formats, stores, strict=True)):
        cell, held, places = version
        if held != cell and (
            (cell.version, held.version) != ("dense", "lossless12")
            or dataclasses.replace(held, version=cell.version) != cell
        ):
            raise ValueError(
                f"version {number} is {held.version} in the store and {cell.version} in a cell; "
                "only lossless12 is decoded on the way, into dense records of the same shape"
            )
        if store.shape[2:] != (held.rows, held.hidden):
            raise ValueError(
                f"version {number}: records of {held.version} are [{held.rows}, {held.hidden}], "
                f"the store has {list(store.shape[2:])}"
            )
        if dtype is not None and jnp.dtype(cell.dtype) != dtype:
            raise ValueError(
                f"version {number} decodes to {cell.dtype}, x is {jnp.dtype(dtype).name}"
            )
        if places is not None and max(places, default=-1) >= store.shape[0]:
            raise ValueError(
                f"version {number}: its store has {store.shape[0]} layers, its places name "
                f"{max(places)}"
            )
        if layers is not None and layers != (store.shape[0] if places is None else len(places)):
            raise ValueError(
                f"version {number}: tables of {layers} layers, "
                f"{store.shape[0] if places is None else len(places)} in the store"
            )
