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

from host_offload.memory.integrity import count_faults
from host_offload.memory.layout import PageLayout
from host_offload.memory.swap import SWAP_PAGES, move_pages, read_pages, write_pages
from host_offload.memory.tables import Tables, regrant, snapshot
from moejax.models.config import ModelConfig
from moejax.requests.sampling_params import MAX_BIASES, MAX_LOGPROBS
from moejax.step.device_driver import decode_step, prefill_step
from moejax.step.parts import Leaf, PrefillBatch, Routing, StepShapes
from moejax.step.sampler import add_bias, adjust, greedy, logprobs, recount, sample, tally
from pallas_kernels import Ops
from pallas_kernels.fill import fill
from pallas_kernels.kv_write import KVPage
from pallas_kernels.move import Moves, move
from pallas_kernels.records.versions import Formats
from pallas_kernels.stage import Entries, stage

STAGES = 8
"""Entries of a stage list, a compiled shape: most transfers of one step ahead of need."""

MOVES = 16
"""Entries of a list of moves within the arena, a compiled shape."""

_EXTRAS = {"forced": "forced", "staged": "stages"}
"""Part of a step's name → the argument it adds."""

_TRACED = "traced"


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of jax arrays, ready to be jitted."""

    function: Callable
    args: tuple
    """Arrays or ShapeDtypeStructs, one a parameter."""
    donated: tuple[int, ...]
    """Parameters whose memory the results reuse: arena and tables."""
    memory: str | None = None
    """Memory of the results: `pinned_host`; None: the device's."""


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of one engine. All arrays may be ShapeDtypeStructs.

    graph, state: of nnx.split(model). stores: per version uint16[L, E, rows, D]. arena
    uint16[rows, D]. sharding: of the arguments that a step gets from the host; None: undecided.
    formats: of the stores' versions; None: one, dense.
    trace_arrays: what steps called `_traced` give out beside the rest, of TRACE_ARRAYS.
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
    formats: Formats | None = None
    sharding: jax.sharding.Sharding | None = None
    trace_arrays: frozenset[str] = frozenset()

    @property
    def page_layout(self) -> PageLayout:
        """A page over all layers, in the dtype of the model."""
        return PageLayout(
            layers=self.config.num_hidden_layers,
            kv_heads=self.page.kv_heads,
            head_dim=self.page.head_dim,
            itemsize=jax.tree.leaves(self.state["embedding"])[0].dtype.itemsize,
            block_size=self.page.block_size,
            latent=self.page.latent,
        )

    def host_page(self) -> jax.ShapeDtypeStruct:
        """A page as it is swapped out."""
        sharding = None if self.sharding is None else self.sharding.with_memory_kind("pinned_host")
        shape = (self.page_layout.nbytes // 2,)
        return jax.ShapeDtypeStruct(shape, jnp.uint16, sharding=sharding)

    def program(self, name: str) -> Program:
        """The program of that name: decode, prefill, score, prompt_logprobs, add_bias, adjust,
        greedy, sample, tally, recount, logprobs, place, swap_out, swap_in, move_pages, regrant,
        populate, transfer, move, snapshot, integrity. The steps also with `_traced`, which gives
        out the trace arrays, then `_forced`, routing as an argument, and `_staged`, a stage list as
        the last one. decode and what takes its logits also with `@N`: for the first N rows only;
        adjusted logits are of all rows. Raises ValueError for another."""
        name, _, bucket = name.partition("@")
        rows, vocabulary = self.shapes.rows, self.config.vocab_size
        used = int(bucket) if bucket else rows
        chunks, size = self.shapes.prefill_chunks, self.shapes.chunk
        array = functools.partial(jax.ShapeDtypeStruct, sharding=self.sharding)
        ints, floats = array((rows,), jnp.int32), array((rows,), jnp.float32)
        flags = array((rows,), jnp.bool_)
        logits = array((used, vocabulary), jnp.float32)
        block_table = array((rows, self.shapes.blocks), jnp.int32)
        buffers = (self.state, self.stores, self.arena, self.tables)
        kind, *extras = name.replace("prompt_logprobs", "prompt").split("_")
        arrays = self.trace_arrays if _TRACED in extras else frozenset[str]()
        extras = [e for e in extras if e != _TRACED]

        def extra(tokens: int) -> tuple[Leaf, ...]:
            shape = (self.tables.clock.shape[0], tokens, self.config.num_experts_per_tok)
            entries = array((STAGES,), jnp.int32)
            known = {
                "forced": Routing(array(shape, jnp.int32), array(shape, jnp.float32)),
                "staged": Entries._make([entries] * len(Entries._fields)),
            }
            if any(e not in known for e in extras):
                raise ValueError(f"no program {name!r}")
            return tuple(known[e] for e in extras)

        if kind == "decode":
            step = self._bind(_first_rows(decode_step, used), extras, arrays=arrays)
            return Program(step, (*buffers, ints, ints, block_table, *extra(used)), (2, 3))
        if kind in ("prefill", "score", "prompt"):
            per_chunk, per_token = array((chunks,), jnp.int32), array((chunks, size), jnp.int32)
            prefill = PrefillBatch(
                tokens=per_token,
                row=per_chunk,
                start=per_chunk,
                skip=per_chunk,
                length=per_chunk,
                count=array((), jnp.int32),
                last=ints,
                targets=per_token,
            )
            static = {"score": kind == "score", "prompt_logprobs": kind == "prompt"}
            static |= {"waves": self.shapes.waves, "arrays": arrays}
            step = self._bind(prefill_step, extras, **static)
            return Program(step, (*buffers, prefill, block_table, *extra(chunks * size)), (2, 3))
        if name == "greedy":
            return Program(functools.partial(_advance, greedy), (logits, ints, flags), ())
        if name == "sample":
            seeds = array((rows,), jnp.uint32)
            params = (floats, ints, floats, floats, seeds, ints)
            function = functools.partial(_advance, sample)
            return Program(function, (logits, ints, flags, *params), ())
        counts = array((rows, vocabulary), jnp.int32)
        biases = (array((rows, MAX_BIASES), jnp.int32), array((rows, MAX_BIASES), jnp.float32))
        if name == "add_bias":
            return Program(functools.partial(_of_all_rows, add_bias), (logits, *biases), ())
        if name == "adjust":
            function = functools.partial(_of_all_rows, adjust)
            return Program(function, (logits, counts, floats, floats, floats, *biases), ())
        if name == "tally":
            return Program(tally, (counts, ints, flags), (0,))
        if name == "recount":
            most = self.shapes.blocks * self.page.block_size
            row, ids = array((), jnp.int32), array((most,), jnp.int32)
            return Program(recount, (counts, row, ids, array((most,), jnp.bool_)), (0,))
        if name == "logprobs":
            n = min(MAX_LOGPROBS, vocabulary)
            function = functools.partial(_of_all_rows, functools.partial(logprobs, n=n))
            return Program(function, (logits, ints), ())
        if name == "place":
            return Program(_place, (ints, ints, flags), ())
        if name in ("swap_out", "swap_in"):
            layout, rows = self.page_layout, array((SWAP_PAGES,), jnp.int32)
            if name == "swap_out":
                function = functools.partial(read_pages, page=layout)
                return Program(function, (self.arena, rows), (), memory="pinned_host")
            pages = (self.host_page(),) * SWAP_PAGES
            function = functools.partial(write_pages, page=layout)
            return Program(function, (self.arena, pages, rows, array((), jnp.int32)), (0,))
        if name == "move_pages":
            rows = array((SWAP_PAGES,), jnp.int32)
            function = functools.partial(move_pages, page=self.page_layout)
            return Program(function, (self.arena, rows, rows), (0,))
        if name == "regrant":
            cell_row = array(self.tables.cell_row.shape, jnp.int32)
            return Program(regrant, (self.tables, cell_row), (0,))
        if name == "populate":
            layer, experts = array((), jnp.int32), self.tables.address.shape[1:]
            function = functools.partial(_populate, ops=self.ops, formats=self.formats)
            places = array(experts, jnp.int32), array(experts, jnp.int32)
            return Program(function, (self.arena, self.stores, layer, *places), (0,))
        if name == "transfer":
            entries = Entries._make([array((STAGES,), jnp.int32)] * len(Entries._fields))
            function = functools.partial(_transfer, ops=self.ops, formats=self.formats)
            return Program(function, (self.arena, self.tables, self.stores, entries), (0, 1))
        if name == "move":
            entries = array((MOVES,), jnp.int32)
            moves = Moves._make([entries] * len(Moves._fields))
            if self.formats is None:
                rows = tuple(store.shape[2] for store in self.stores)
            else:
                rows = tuple(version.cell.rows for version in self.formats)
            function = functools.partial(move, record_rows=rows, implementation=self.ops.move)
            return Program(function, (self.arena, self.tables, moves), (0, 1))
        if name == "snapshot":
            return Program(snapshot, (self.tables,), ())
        if name == "integrity":
            function = functools.partial(count_faults, formats=self.formats)
            return Program(function, (self.arena, self.tables, self.stores), ())
        raise ValueError(f"no program {name!r}")

    def _bind(self, step: Callable, extras: Sequence[str], **static) -> Callable:
        """step of the merged model; the last arguments are the extras, by name."""

        def run(state, *args):
            model = nnx.merge(self.graph, state)
            args, last = args[: len(args) - len(extras)], args[len(args) - len(extras) :]
            named = {_EXTRAS[e]: value for e, value in zip(extras, last, strict=True)}
            options = {"page": self.page, "ops": self.ops, "formats": self.formats, **static}
            return step(model, *args, **named, **options)

        return run


def _populate(
    arena, stores, layer, row, version, *, ops: Ops, formats: Formats | None
) -> jax.Array:
    """The arena with every expert of the layer at row int32[E], in version int32[E]."""
    experts = jnp.arange(row.shape[0])
    listed = experts, row, version, jnp.int32(row.shape[0])
    return fill(arena, stores, layer, *listed, formats=formats, implementation=ops.fill)


def _transfer(arena, tables, stores, entries, *, ops: Ops, formats: Formats | None):
    """A stage list, all layers, outside of a step; as stage."""

    def layer(i, carry):
        arena, tables, done = carry
        arena, tables, now = stage(
            arena, tables, stores, i, entries, formats=formats, implementation=ops.stage
        )
        return arena, tables, jnp.maximum(done, now)

    start = arena, tables, jnp.zeros_like(entries.layer)
    return jax.lax.fori_loop(0, tables.clock.shape[0], layer, start)


def _place(tokens: jax.Array, values: jax.Array, update: jax.Array) -> jax.Array:
    return jnp.where(update, values, tokens)


def _first_rows(step: Callable, rows: int) -> Callable:
    """step on the first rows of tokens, positions and block table; all R rows are passed, so that
    the caller's arrays are the same for every bucket."""

    def run(model, stores, arena, tables, tokens, positions, block_table, **others):
        inputs = (a[:rows] for a in (tokens, positions, block_table))
        return step(model, stores, arena, tables, *inputs, **others)

    return run


def _of_all_rows(function: Callable, logits: jax.Array, first: jax.Array, *args) -> Any:
    """function(logits, first, …), the logits padded to the rows of `first`, which are all rows: one
    shape, so one rounding."""
    missing = first.shape[0] - logits.shape[0]
    return function(jnp.pad(logits, ((0, missing), (0, 0))), first, *args)


def _advance(choose: Callable, logits, tokens, update, *params) -> jax.Array:
    """choose(logits, …) for the rows to update, the old tokens for the others."""

    def chosen(logits, tokens, *params):
        return jnp.where(update, choose(logits, *params), tokens)

    return _of_all_rows(chosen, logits, tokens, *params)
