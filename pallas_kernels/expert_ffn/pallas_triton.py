"""expert_ffn as Triton kernels: one pair for few tokens (decode), one for many (prefill)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cards import CLASSES
from pallas_kernels.expert_ffn import few_tokens, many_tokens
from pallas_kernels.expert_ffn.activation import Activation, Gating, gated
from pallas_kernels.expert_ffn.epilogue import Epilogue, combine_behind
from pallas_kernels.expert_ffn.operands import ExpertPlaces
from pallas_kernels.expert_ffn.tile import Memory, Tile, fit
from pallas_kernels.records.format import RecordFormat
from pallas_kernels.records.versions import Formats
from pallas_kernels.triton import scalar

STAGES = {
    99: {"dense": (3, 3, 3, 3), "int": (2, 2, 2, 2), "lossless": (1, 2, 2, 2)},
    163: {"dense": (4, 3, 4, 3), "int": (3, 3, 2, 3), "lossless": (2, 2, 2, 2)},
    227: {"dense": (4, 3, 4, 3), "int": (3, 3, 3, 3), "lossless": (2, 2, 2, 2)},
}
"""Class of GPU → kind of records beside dense → stages of gate_up and down for few tokens, then for
many. On an A100 int4's gate_up for many spills 328 bytes with three stages, none with two."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that decides a kernel's code, beside shapes. rows: of one product."""

    rows: int
    gate_up: Tile
    down: Tile


def configuration(
    hidden: int,
    width: int,
    dtype: jax.typing.DTypeLike,
    row_tile: int,
    versions: Collection[str] = (),
    shared_kib: int = CLASSES[-1],
) -> Config:
    """The tiles for experts of hidden × width; never a function of the number of tokens.

    - `versions`: kinds of records beside dense. Their tiles need memory for codes, several planes
      of x and decoded weights, so fewer are in flight (not measured). The depth of tiles stays, so
      dense and lossless experts keep their bits. With int versions a program of down has twice the
      columns, which share the cost of a tile beside its weights.

    Decode (row_tile < 64) was measured on an H200 with 2048 × 768 in bfloat16. gate_up: 64 columns,
    128 deep, are two loads of 256-byte rows, 36 KiB, three of them in flight; two programs fit a
    multiprocessor. Prefill is not measured. gate_up: 128 columns, so that a row tile is read least
    often, with 8 warps, since the two sums fill the registers of 4; three programs of down fit.

    Raises ValueError for a dtype without 16 bits.
    """
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f'expert_ffn "pallas" takes bfloat16 and float16, not {jnp.dtype(dtype).name} '
            '(its products would be TF32); "xla" takes it'
        )
    kind = "lossless" if "lossless12" in versions else "int" if versions else "dense"
    few_gate_up, few_down, gate_up, down = STAGES[shared_kib][kind]
    if row_tile < many_tokens.ROWS:
        columns = fit(hidden, 128 if kind == "int" else 64)
        return Config(
            few_tokens.ROWS,
            Tile(fit(width, 64), fit(hidden, 128), num_warps=4, num_stages=few_gate_up),
            Tile(columns, fit(width, 128), num_warps=4, num_stages=few_down),
        )
    return Config(
        many_tokens.ROWS,
        Tile(fit(width, 128), fit(hidden, 64), num_warps=8, num_stages=gate_up),
        Tile(fit(hidden, 128), fit(width, 64), num_warps=4, num_stages=down),
    )


def expert_ffn(y, arena, batch, places, options, epilogue: Epilogue | None = None):
    formats = options.formats
    config = configuration_of(batch.x, formats, options.row_tile, options.shared_kib)
    memory = memory_of(arena, places, formats, batch.x.dtype)
    operands = y, memory, batch._replace(active_count=scalar(batch.active_count))
    given = {"formats": formats, "activation": in_kernels(options.activation)}
    given |= {"gate_up": config.gate_up, "down": config.down}
    if config.rows == few_tokens.ROWS:
        return few_tokens.expert_ffn(*operands, epilogue, **given)
    y = many_tokens.expert_ffn(*operands, **given)
    return y if epilogue is None else combine_behind(y, epilogue, "pallas")


def configuration_of(x: jax.Array, formats: Formats, row_tile: int, shared_kib: int) -> Config:
    """The tiles for these tokens [T, D] and formats."""
    versions = {fmt.version for cell, held, _ in formats for fmt in (cell, held)} - {"dense"}
    return configuration(x.shape[1], formats[0].cell.width, x.dtype, row_tile, versions, shared_kib)


def memory_of(
    arena: jax.Array, places: ExpertPlaces, formats: Formats, dtype: jax.typing.DTypeLike
) -> Memory:
    """The operands that say where experts are, for the kernels. dtype: of x."""
    stores, layer, address, version = places
    layers = [layer]
    if any(f.places is not None for f in formats):
        layers += [f.place(layer) for f in formats]

    # Free views. Converted in the kernels instead, weights that several products share would pass
    # through shared memory once more, and with them registers spill (jax 0.11.2).
    def typed(bits: jax.Array, fmt: RecordFormat) -> jax.Array:
        return lax.bitcast_convert_type(bits, dtype) if fmt.version == "dense" else bits

    views = {cell.version == "dense": typed(arena, cell) for cell, _, _ in formats}
    return Memory(
        layer=jnp.concatenate([jnp.asarray(value, jnp.int32).reshape(1) for value in layers]),
        address=address,
        version=version if len(formats) > 1 else None,
        dense=views.get(True),
        coded=views.get(False),
        stores=tuple(
            typed(store, held) for store, (_, held, _) in zip(stores, formats, strict=True)
        ),
    )


def in_kernels(activation: Activation) -> Gating:
    """`gated`, in a form that lowers to Triton."""
    return _gelu_gated if activation == "gelu" else functools.partial(gated, activation)


def _gelu_gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return 0.5 * gate * (1 + _erf(gate * 2**-0.5)) * up


def _erf(x: jax.Array) -> jax.Array:
    """The error function in float32, which Pallas does not lower for Triton: the quotient of
    polynomials that XLA and Eigen use, exact to a few units in the last place."""
    above = (
        -2.72614225801306e-10,
        2.77068142495902e-08,
        -2.10102402082508e-06,
        -5.69250639462346e-05,
        -7.34990630326855e-04,
        -2.95459980854025e-03,
        -1.60960333262415e-02,
    )
    below = (
        -1.45660718464996e-05,
        -2.13374055278905e-04,
        -1.68282697438203e-03,
        -7.37332916720468e-03,
        -1.42647390514189e-02,
    )
    x = jnp.clip(x, -4, 4)
    square = x * x
    return x * _polynomial(square, above) / _polynomial(square, below)


def _polynomial(x: jax.Array, coefficients: tuple[float, ...]) -> jax.Array:
    """Highest power first."""
    total = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total
