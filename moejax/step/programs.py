"""What the engine compiles: each program's function, its argument shapes and what it donates.

Nothing here needs a buffer: given `jax.ShapeDtypeStruct`s, the same programs are lowered and
inspected for devices and sizes that the machine at hand does not have.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from host_offload.memory.integrity import count_faults
from host_offload.memory.layout import PageLayout
from host_offload.memory.swap import SWAP_PAGES, move_pages, read_pages, write_pages
from host_offload.memory.tables import Tables, regrant, snapshot
from moejax.models.config import ModelConfig
from moejax.requests.request import PrefillKind
from moejax.requests.sampling_params import MAX_BIASES, MAX_LOGPROBS
from moejax.step.context import DeviceMemory, StepContext
from moejax.step.device_driver import decode_step, prefill_step
from moejax.step.experts import stage_layer
from moejax.step.parts import DECODE_TILE, Leaf, PrefillBatch, Routing, StepShapes
from moejax.step.sampler import add_bias, adjust, greedy, logprobs, recount, sample, tally
from pallas_kernels import Ops
from pallas_kernels.fill import fill
from pallas_kernels.kv_write import KVPage
from pallas_kernels.move import Moves, move
from pallas_kernels.records.versions import Formats
from pallas_kernels.stage import Entries

STAGES = 8
"""Entries of a stage list, a compiled shape: most transfers of one step ahead of need."""

MOVES = 16
"""Entries of a list of moves within the arena, a compiled shape."""

Kind = (
    Literal["decode", "greedy", "sample", "add_bias", "adjust", "tally", "recount", "logprobs"]
    | PrefillKind
    | Literal["place", "swap_out", "swap_in", "move_pages", "regrant", "populate", "transfer"]
    | Literal["stage", "move", "snapshot", "integrity"]
)

STEPS: tuple[Kind, ...] = ("decode", "prefill", "score", "prompt_logprobs")

_BY_ROWS = ("decode", "greedy", "sample", "add_bias", "adjust", "logprobs")


class ProgramKey(NamedTuple):
    """Which program; it prints as `prefill_staged`, `decode@16` or `decode/attend.0`."""

    kind: Kind
    rows: int | None = None
    """The bucket of decode and of what takes its logits: for the first rows only, though adjusted
    logits are of all rows. None: all rows."""
    traced: bool = False
    """A step that gives out the trace arrays."""
    forced: bool = False
    """A step with routing as an argument."""
    staged: bool = False
    """A step with a stage list as the last argument."""
    part: str | None = None
    """Of a step, see layer_programs; None: all of it."""
    run: int | None = None
    """Which run of equal layers the part belongs to."""

    def __str__(self) -> str:
        given = {"traced": self.traced, "forced": self.forced, "staged": self.staged}
        flags = [flag for flag, on in given.items() if on]
        rows = "" if self.rows is None else f"@{self.rows}"
        if self.part is None:
            return "_".join((self.kind, *flags)) + rows
        run = "" if self.run is None else f".{self.run}"
        return f"{self.kind}{rows}/{'_'.join((*flags, self.part))}{run}"


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
    trace_arrays: what traced steps give out beside the rest, of TRACE_ARRAYS.
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

    def program(self, key: ProgramKey) -> Program:
        """Raises ValueError for a key that no whole program has."""
        is_step = key.kind in STEPS
        if (
            key.kind not in _PROGRAMS
            or (key.part, key.run) != (None, None)
            or (key.rows is not None and key.kind not in _BY_ROWS)
            or ((key.traced or key.forced or key.staged) and not is_step)
        ):
            raise ValueError(f"no program {str(key)!r}")
        return _PROGRAMS[key.kind](self, key)

    # ---- arguments

    def array(self, *shape: int, dtype: jax.typing.DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

    def _per_row(self, dtype: jax.typing.DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
        return self.array(self.shapes.rows, dtype=dtype)

    def _logits(self, key: ProgramKey) -> jax.ShapeDtypeStruct:
        rows = key.rows or self.shapes.rows
        return self.array(rows, self.config.vocab_size, dtype=jnp.float32)

    def _biases(self) -> tuple[Leaf, Leaf]:
        shape = (self.shapes.rows, MAX_BIASES)
        return self.array(*shape), self.array(*shape, dtype=jnp.float32)

    def _counts(self) -> jax.ShapeDtypeStruct:
        return self.array(self.shapes.rows, self.config.vocab_size)

    def entries(self) -> Entries:
        return Entries._make([self.array(STAGES)] * len(Entries._fields))

    def routing(self, key: ProgramKey, *layers: int) -> Routing:
        """The routing of one layer, or of as many as given, of the step's tokens."""
        shape = (*layers, self.tokens(key), self.config.num_experts_per_tok)
        return Routing(self.array(*shape), self.array(*shape, dtype=jnp.float32))

    def tokens(self, key: ProgramKey) -> int:
        """How many tokens the step computes, padding included."""
        if key.kind == "decode":
            return key.rows or self.shapes.rows
        return self.shapes.prefill_chunks * self.shapes.chunk

    def batch(self, key: ProgramKey) -> tuple:
        """What a step is given beside model and memory, forced routing and stage list: of decode
        all rows, so that the caller's arrays are the same for every bucket."""
        block_table = self.array(self.shapes.rows, self.shapes.blocks)
        if key.kind == "decode":
            return self._per_row(), self._per_row(), block_table
        chunks = self.shapes.prefill_chunks
        per_chunk, per_token = self.array(chunks), self.array(chunks, self.shapes.chunk)
        prefill = PrefillBatch(
            tokens=per_token,
            row=per_chunk,
            start=per_chunk,
            skip=per_chunk,
            length=per_chunk,
            count=self.array(),
            last=self._per_row(),
            targets=per_token,
        )
        return prefill, block_table

    def context(self, key: ProgramKey, stores: tuple[jax.Array, ...] = ()) -> StepContext:
        """The context of a step, or of what moves experts outside of one. stores: as traced."""
        decode = key.kind == "decode"
        return StepContext(
            stores=stores,
            ops=self.ops,
            activation=self.config.hidden_act,
            row_tile=min(DECODE_TILE, self.tokens(key)) if decode else self.shapes.chunk,
            waves=1 if decode else self.shapes.waves,
            formats=self.formats,
            page=self.page,
            arrays=self.trace_arrays if key.traced else frozenset(),
        )

    # ---- steps

    def _step(self, key: ProgramKey) -> Program:
        def run(state, stores, arena, tables, *args):
            args = list(args)
            stages = args.pop() if key.staged else None
            forced = args.pop() if key.forced else None
            given = nnx.merge(self.graph, state), self.context(key, stores)
            memory = DeviceMemory(arena, tables)
            if key.kind == "decode":
                rows = (values[: self.tokens(key)] for values in args)
                step = functools.partial(decode_step, *given, memory, *rows)
            else:
                step = functools.partial(prefill_step, *given, memory, *args, key.kind)
            memory, output = step(forced=forced, stages=stages)
            return *memory, output

        buffers = self.state, self.stores, self.arena, self.tables
        layers = self.tables.clock.shape[0]
        forced = (self.routing(key, layers),) if key.forced else ()
        staged = (self.entries(),) if key.staged else ()
        return Program(run, (*buffers, *self.batch(key), *forced, *staged), (2, 3))

    # ---- from logits to tokens

    def _greedy(self, key: ProgramKey) -> Program:
        args = self._logits(key), self._per_row(), self._per_row(jnp.bool_)
        return Program(functools.partial(_advance, greedy), args, ())

    def _sample(self, key: ProgramKey) -> Program:
        ints, floats = self._per_row(), self._per_row(jnp.float32)
        params = floats, ints, floats, floats, self._per_row(jnp.uint32), ints
        args = self._logits(key), ints, self._per_row(jnp.bool_), *params
        return Program(functools.partial(_advance, sample), args, ())

    def _add_bias(self, key: ProgramKey) -> Program:
        function = functools.partial(_of_all_rows, add_bias)
        return Program(function, (self._logits(key), *self._biases()), ())

    def _adjust(self, key: ProgramKey) -> Program:
        penalties = (self._per_row(jnp.float32),) * 3
        args = self._logits(key), self._counts(), *penalties, *self._biases()
        return Program(functools.partial(_of_all_rows, adjust), args, ())

    def _tally(self, _: ProgramKey) -> Program:
        return Program(tally, (self._counts(), self._per_row(), self._per_row(jnp.bool_)), (0,))

    def _recount(self, _: ProgramKey) -> Program:
        most = self.shapes.blocks * self.page.block_size
        ids, is_output = self.array(most), self.array(most, dtype=jnp.bool_)
        return Program(recount, (self._counts(), self.array(), ids, is_output), (0,))

    def _logprobs(self, key: ProgramKey) -> Program:
        n = min(MAX_LOGPROBS, self.config.vocab_size)
        function = functools.partial(_of_all_rows, functools.partial(logprobs, n=n))
        return Program(function, (self._logits(key), self._per_row()), ())

    def _place(self, _: ProgramKey) -> Program:
        return Program(_place, (self._per_row(), self._per_row(), self._per_row(jnp.bool_)), ())

    # ---- pages, cells and tables between steps

    def _swap_out(self, _: ProgramKey) -> Program:
        function = functools.partial(read_pages, page=self.page_layout)
        return Program(function, (self.arena, self.array(SWAP_PAGES)), (), memory="pinned_host")

    def _swap_in(self, _: ProgramKey) -> Program:
        function = functools.partial(write_pages, page=self.page_layout)
        pages = (self.host_page(),) * SWAP_PAGES
        return Program(function, (self.arena, pages, self.array(SWAP_PAGES), self.array()), (0,))

    def _move_pages(self, _: ProgramKey) -> Program:
        function = functools.partial(move_pages, page=self.page_layout)
        return Program(function, (self.arena, *[self.array(SWAP_PAGES)] * 2), (0,))

    def _regrant(self, _: ProgramKey) -> Program:
        return Program(regrant, (self.tables, self.array(*self.tables.cell_row.shape)), (0,))

    def _populate(self, _: ProgramKey) -> Program:
        function = functools.partial(_populate, ops=self.ops, formats=self.formats)
        places = [self.array(*self.tables.address.shape[1:])] * 2
        return Program(function, (self.arena, self.stores, self.array(), *places), (0,))

    def _transfer(self, key: ProgramKey) -> Program:
        """A stage list, all layers, outside of a step; as stage."""

        def transfer(arena, tables, stores, entries):
            context = self.context(key, stores)

            def layer(i, carry):
                memory, now = stage_layer(carry[0], i, entries, context)
                return memory, jnp.maximum(carry[1], now)

            start = DeviceMemory(arena, tables), jnp.zeros_like(entries.layer)
            memory, done = jax.lax.fori_loop(0, tables.clock.shape[0], layer, start)
            return *memory, done

        return Program(transfer, (self.arena, self.tables, self.stores, self.entries()), (0, 1))

    def _move(self, _: ProgramKey) -> Program:
        if self.formats is None:
            rows = tuple(store.shape[2] for store in self.stores)
        else:
            rows = tuple(version.cell.rows for version in self.formats)
        moves = Moves._make([self.array(MOVES)] * len(Moves._fields))
        function = functools.partial(move, record_rows=rows, implementation=self.ops.move)
        return Program(function, (self.arena, self.tables, moves), (0, 1))

    def _snapshot(self, _: ProgramKey) -> Program:
        return Program(snapshot, (self.tables,), ())

    def _integrity(self, _: ProgramKey) -> Program:
        function = functools.partial(count_faults, formats=self.formats)
        return Program(function, (self.arena, self.tables, self.stores), ())


_PROGRAMS: dict[Kind, Callable[[Programs, ProgramKey], Program]] = {
    **dict.fromkeys(STEPS, Programs._step),
    "greedy": Programs._greedy,
    "sample": Programs._sample,
    "add_bias": Programs._add_bias,
    "adjust": Programs._adjust,
    "tally": Programs._tally,
    "recount": Programs._recount,
    "logprobs": Programs._logprobs,
    "place": Programs._place,
    "swap_out": Programs._swap_out,
    "swap_in": Programs._swap_in,
    "move_pages": Programs._move_pages,
    "regrant": Programs._regrant,
    "populate": Programs._populate,
    "transfer": Programs._transfer,
    "move": Programs._move,
    "snapshot": Programs._snapshot,
    "integrity": Programs._integrity,
}


def _populate(
    arena, stores, layer, row, version, *, ops: Ops, formats: Formats | None
) -> jax.Array:
    """The arena with every expert of the layer at row int32[E], in version int32[E]."""
    experts = jnp.arange(row.shape[0])
    listed = experts, row, version, jnp.int32(row.shape[0])
    return fill(arena, stores, layer, *listed, formats=formats, implementation=ops.fill)


def _place(tokens: jax.Array, values: jax.Array, update: jax.Array) -> jax.Array:
    return jnp.where(update, values, tokens)


def _of_all_rows(function: Callable, logits: jax.Array, first: jax.Array, *args) -> Any:
    """function(logits, first, …), the logits padded to the rows of `first`, which are all rows: one
    shape, so one rounding."""
    missing = first.shape[0] - logits.shape[0]
    return function(jnp.pad(logits, ((0, missing), (0, 0))), first, *args)


def _advance(draw: Callable, logits, tokens, update, *params) -> jax.Array:
    """draw(logits, …) for the rows to update, the old tokens for the others."""

    def drawn(logits, tokens, *params):
        return jnp.where(update, draw(logits, *params), tokens)

    return _of_all_rows(drawn, logits, tokens, *params)
