"""Weights of products that stay in the codes of their file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.records.format import RecordFormat
from pallas_kernels.records.reference import decode

CODED_DTYPES = "bfloat16", "float32"
"""Dtypes of decoded weights that the native op takes in codes."""


class CodedRows(NamedTuple):
    """Consecutive rows of a matrix: a record of one matrix."""

    format: RecordFormat
    first: int
    """The record's first element of CodedWeights.elements."""


CodedLayers = tuple[tuple[CodedRows, ...], ...]
"""The rows of each layer, in order. Formats may differ between rows and between layers."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class CodedWeights:
    """Weights [layers, out, in] as `linear` takes them, in codes.

    Exact products have the bits of those with the decoded weights. Only the native CPU op computes
    them from the codes; every other implementation decodes first. The arithmetic int8 multiplies
    the codes.
    """

    elements: jax.Array
    """uint16[n]."""
    layers: CodedLayers = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int]:
        first = self.layers[0]
        outputs = sum(rows.format.width for rows in first)
        return len(self.layers), outputs, first[0].format.hidden

    @property
    def dtype(self) -> Any:
        """Of the decoded weights."""
        return jnp.dtype(self.layers[0][0].format.dtype)

    def __getitem__(self, key: Any) -> CodedWeights:
        """All of it, as flax.nnx reads a parameter."""
        if key is not ...:
            raise TypeError("weights in codes have no parts")
        return self

    def decode(self) -> jax.Array:
        """The weights [layers, out, in]."""
        return jnp.stack(
            [
                jnp.concatenate([decode(self.record(rows), rows.format) for rows in layer])
                for layer in self.layers
            ]
        )

    def record(self, rows: CodedRows) -> jax.Array:
        """The record uint16[rows, in] of some rows."""
        fmt = rows.format
        record = self.elements[rows.first : rows.first + fmt.rows * fmt.hidden]
        return record.reshape(fmt.rows, fmt.hidden)


def lay_out(
    layers: Sequence[Sequence[tuple[str, int]]], inputs: int, dtype: str
) -> tuple[CodedLayers, int]:
    """Places the rows of all layers one after the other. Returns them and the number of elements.

    - `layers`: for each layer the version and the number of its rows.

    Raises ValueError for a version that cannot hold rows of `inputs` values.
    """
    placed, end = [], 0
    for layer in layers:
        mine = []
        for version, count in layer:
            fmt = RecordFormat(version, inputs, count, dtype, gated=False, alone=True)
            mine.append(CodedRows(fmt, end))
            end += fmt.rows * inputs
        placed.append(tuple(mine))
    return tuple(placed), end
