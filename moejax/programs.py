"""What the engine compiles: each program's function, its argument shapes and what it donates.

Nothing here needs a buffer: given `jax.ShapeDtypeStruct`s, the same programs are lowered and
inspected for devices and sizes that the machine at hand does not have.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from host_offload.integrity import count_faults
from host_offload.tables import Tables, regrant
from moejax.models.config import ModelConfig
from moejax.sampler import greedy, logprobs, sample
from moejax.sampling_params import MAX_LOGPROBS
from moejax.step import Leaf, Routing, StepShapes, Sweep, decode_step, prefill_step
from pallas_kernels import Ops
from pallas_kernels.kv_write import KVPage
from pallas_kernels.stage import Entries

STAGES = 8
"""Entries of a stage list, a compiled shape: most transfers of one step ahead of need."""

_EXTRAS = {"forced": "forced", "staged": "stages"}
"""Part of a step's name → the argument it adds."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of jax arrays, ready to be jitted."""

    function: Callable
    args: tuple
    """Arrays or ShapeDtypeStructs, one a parameter."""
    donated: tuple[int, ...]
    """Parameters whose memory the results reuse: arena and tables."""


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of one engine. All arrays may be ShapeDtypeStructs.

    graph, state: of nnx.split(model). stores: per version uint16[L, E, rows, D]. arena
    uint16[rows, D]. sharding: of the arguments that a step gets from the host; None: undecided.
    """

    config: ModelConfig
    graph: Any
    state: Any
    stores: tuple[Leaf, ...]
    arena: Leaf
    tables: Tables
    shapes: StepShapes
    page: KVPage
    ops: Ops
    sharding: jax.sharding.Sharding | None = None

    def program(self, name: str) -> Program:
        """The program of that name: decode, prefill, score, greedy, sample, logprobs, regrant,
        integrity. The steps also with `_forced`, routing as an argument, and `_staged`, a stage
        list as the last one. decode and what takes its logits also with `@N`: for the first N rows
        only. Raises ValueError for another."""
        name, _, bucket = name.partition("@")
        rows, vocabulary = self.shapes.rows, self.config.vocab_size
        used = int(bucket) if bucket else rows
        chunks, size = self.shapes.sweep_chunks, self.shapes.chunk
        array = functools.partial(jax.ShapeDtypeStruct, sharding=self.sharding)
        ints, floats = array((rows,), jnp.int32), array((rows,), jnp.float32)
        flags = array((rows,), jnp.bool_)
        logits = array((used, vocabulary), jnp.float32)
        block_table = array((rows, self.shapes.blocks), jnp.int32)
        buffers = (self.state, self.stores, self.arena, self.tables)
        kind, *extras = name.split("_")

        def extra(tokens: int) -> tuple[Leaf, ...]:
            shape = (self.stores[0].shape[0], tokens, self.config.num_experts_per_tok)
            entries = array((STAGES,), jnp.int32)
            known = {
                "forced": Routing(array(shape, jnp.int32), array(shape, jnp.float32)),
                "staged": Entries._make([entries] * len(Entries._fields)),
            }
            if any(e not in known for e in extras):
                raise ValueError(f"no program {name!r}")
            return tuple(known[e] for e in extras)

        if kind == "decode":
            step = self._bind(_first_rows(decode_step, used), extras)
            return Program(step, (*buffers, ints, ints, block_table, *extra(used)), (2, 3))
        if kind in ("prefill", "score"):
            per_chunk, per_token = array((chunks,), jnp.int32), array((chunks, size), jnp.int32)
            sweep = Sweep(
                tokens=per_token,
                row=per_chunk,
                start=per_chunk,
                length=per_chunk,
                count=array((), jnp.int32),
                last=ints,
                targets=per_token,
            )
            static = {"waves": self.shapes.waves, "score": kind == "score"}
            step = self._bind(prefill_step, extras, **static)
            return Program(step, (*buffers, sweep, block_table, *extra(chunks * size)), (2, 3))
        if name == "greedy":
            return Program(functools.partial(_advance, greedy), (logits, ints, flags), ())
        if name == "sample":
            seeds = array((rows,), jnp.uint32)
            params = (floats, ints, floats, floats, seeds, ints)
            function = functools.partial(_advance, sample)
            return Program(function, (logits, ints, flags, *params), ())
        if name == "logprobs":
            n = min(MAX_LOGPROBS, vocabulary)
            function = functools.partial(_of_all_rows, functools.partial(logprobs, n=n))
            return Program(function, (logits, ints), ())
        if name == "regrant":
            cell_row = array(self.tables.cell_row.shape, jnp.int32)
            return Program(regrant, (self.tables, cell_row), (0,))
        if name == "integrity":
            return Program(count_faults, (self.arena, self.tables, self.stores), ())
        raise ValueError(f"no program {name!r}")

    def _bind(self, step: Callable, extras: Sequence[str], **static) -> Callable:
        """step of the merged model; the last arguments are the extras, by name."""

        def run(state, *args):
            model = nnx.merge(self.graph, state)
            args, last = args[: len(args) - len(extras)], args[len(args) - len(extras) :]
            named = {_EXTRAS[e]: value for e, value in zip(extras, last, strict=True)}
            return step(model, *args, **named, page=self.page, ops=self.ops, **static)

        return run


def _first_rows(step: Callable, rows: int) -> Callable:
    """step on the first rows of tokens, positions and block table; all R rows are passed, so that
    the caller's arrays are the same for every bucket."""

    def run(model, stores, arena, tables, tokens, positions, block_table, **others):
        inputs = (a[:rows] for a in (tokens, positions, block_table))
        return step(model, stores, arena, tables, *inputs, **others)

    return run


def _of_all_rows(function: Callable, logits: jax.Array, tokens: jax.Array, *args) -> Any:
    """function(logits, tokens, …), the logits padded to all rows: one shape, so one rounding."""
    missing = tokens.shape[0] - logits.shape[0]
    return function(jnp.pad(logits, ((0, missing), (0, 0))), tokens, *args)


def _advance(choose: Callable, logits, tokens, update, *params) -> jax.Array:
    """choose(logits, …) for the rows to update, the old tokens for the others."""

    def chosen(logits, tokens, *params):
        return jnp.where(update, choose(logits, *params), tokens)

    return _of_all_rows(chosen, logits, tokens, *params)
