"""What the engine compiles: each program's function, its argument shapes and what it donates.

Nothing here needs a buffer: given `jax.ShapeDtypeStruct`s, the same programs are lowered and
inspected for devices and sizes that the machine at hand does not have.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from host_offload.control.interface import MapSearch
from host_offload.control.window import PACKED_VERSION
from host_offload.memory.swap import SWAP_PAGES, move_pages, read_pages, write_pages
from host_offload.memory.tables import (
    HandOvers,
    Tables,
    hand_over_cells,
    regrant,
    snapshot,
    without,
)
from host_offload.policies.prefetch.expert_map.map_store import MapStore
from moejax.models.layers import Decoder
from moejax.requests.request import PrefillKind
from moejax.requests.sampling_params import MAX_BIASES, MAX_LOGPROBS
from moejax.step.compiled_step import device_step
from moejax.step.experts import (
    DeviceMemory,
    StepContext,
    load_seated,
    move_clock,
    seat,
    stage_layer,
)
from moejax.step.map_search import WRITTEN, map_shapes, write_rows
from moejax.step.results import ResultShape
from moejax.step.sampler import (
    add_bias,
    adjust,
    greedy,
    logprobs,
    recount,
    sample,
    tally,
    update_rows,
)
from moejax.step.step_parts import (
    Leaf,
    PrefillBatch,
    Routing,
    StepShapes,
    StepSpec,
    decode_tile,
    empty_prefill,
    sums_in_one_order,
)
from pallas_kernels import Ops
from pallas_kernels.cpu.arena import TOKEN, OwnedArena, drain
from pallas_kernels.fill import Fills, fill
from pallas_kernels.kv_write import KVPage
from pallas_kernels.move import Moves, move
from pallas_kernels.records import decode
from pallas_kernels.records.absent import AbsentRecords
from pallas_kernels.records.versions import Formats
from pallas_kernels.stage import Entries, admit_entries

STAGES = 8
"""Entries of a stage list, a compiled shape: most transfers of one step ahead of need."""

HAND_OVERS = 32
"""Entries of a list of cells that go from layer to layer, a compiled shape."""

MOVES = 16
"""Entries of a list of moves within the arena, a compiled shape."""

LANDED = 8
"""Records that one program moves into their cells, a compiled shape: calls cost the host more than
what they say."""

Kind = (
    Literal["decode", "greedy", "sample", "sample_all", "add_bias", "adjust", "tally", "recount"]
    | PrefillKind
    | Literal["place", "swap_out", "swap_in", "move_pages", "regrant", "populate"]
    | Literal["stage", "move", "hand_over", "snapshot", "drain", "load"]
    | Literal["admit", "land", "land_many", "land_packed", "unpack", "shift", "forget"]
    | Literal["seat", "write_maps", "least_address", "logprobs"]
)

STEPS: tuple[Kind, ...] = ("decode", "prefill", "score", "prompt_logprobs")


class ProgramKey(NamedTuple):
    """Which program; it prints as `prefill_staged`, `decode_pages64@16` or `decode/attend.0`."""

    kind: Kind
    rows: int | None = None
    """The bucket of decode and of what takes its logits: for the first rows only, though adjusted
    logits are of all rows. Of prefill its chunks. None: all there are."""
    traced: bool = False
    """A step that gives out the trace arrays."""
    forced: bool = False
    """A step with routing as an argument."""
    staged: bool = False
    """A step with a stage list as the last argument."""
    maps: MapSearch | None = None
    """How a decode step searches expert maps, which are its last argument; also of what writes
    them."""
    context: int | None = None
    """Most pages of a sequence in a decode step, which decide how many programs attention has;
    None: the most there are."""
    resident: bool = False
    """A decode step where every expert is in its cell, so that none is planned."""
    part: str | None = None
    """Which part of a step, see layer_programs; None: all of it."""
    run: int | None = None
    """Which run of equal layers the part belongs to; of a program of records their version number,
    None: 0."""

    def __str__(self) -> str:
        given = {"traced": self.traced, "forced": self.forced, "staged": self.staged}
        given["resident"] = self.resident
        flags = [flag for flag, on in given.items() if on]
        if self.maps is not None:
            flags.append(f"maps{self.maps.capacity}x{self.maps.distance}")
        if self.context is not None:
            flags.append(f"pages{self.context}")
        rows = "" if self.rows is None else f"@{self.rows}"
        run = "" if self.run is None else f".{self.run}"
        if self.part is None:
            return "_".join((self.kind, *flags)) + rows + run
        return f"{self.kind}{rows}/{'_'.join((*flags, self.part))}{run}"


@dataclasses.dataclass(frozen=True)
class StepKeys:
    """The decode and prefill steps of an engine."""

    shapes: StepShapes
    block_size: int
    """Tokens of a KV page."""
    prefill_buckets: bool
    """Whether prefill steps have as many chunks as they need."""

    @property
    def decodes(self) -> list[ProgramKey]:
        """A decode step in every bucket, those of the shortest contexts first."""
        buckets = self.shapes.buckets or (self.shapes.rows,)
        contexts = self.shapes.contexts or (self.shapes.blocks,)
        found = [self._decode(rows, pages) for pages in contexts for rows in buckets]
        return list(dict.fromkeys(found))

    @property
    def prefills(self) -> list[ProgramKey]:
        """A prefill step of every number of chunks, the fewest first."""
        buckets = self.shapes.prefills or (self.shapes.prefill_chunks,)
        return list(dict.fromkeys(self.prefill("prefill", chunks) for chunks in buckets))

    def bucket(self, rows: int) -> int | None:
        """ProgramKey.rows of programs for so many rows."""
        bucket = self.shapes.bucket(rows)
        return None if bucket == self.shapes.rows else bucket

    def prefill(self, kind: PrefillKind, chunks: int) -> ProgramKey:
        """The smallest prefill step that holds so many chunks. What scores targets has one alone,
        as it is given many at once."""
        bucket = self.shapes.prefill(chunks)
        smaller = bucket < self.shapes.prefill_chunks
        if kind != "prefill" or not self.prefill_buckets or not smaller:
            return ProgramKey(kind)
        return ProgramKey(kind, bucket)

    def decode(self, positions: np.ndarray) -> ProgramKey:
        """The smallest decode step that holds these positions int32[R], −1: an empty row."""
        rows = self.shapes.rows
        if len(self.shapes.buckets) > 1:
            rows = int(np.max(np.flatnonzero(positions >= 0), initial=-1)) + 1
        longest = int(np.max(positions, initial=0))
        return self._decode(rows, longest // self.block_size + 1)

    def _decode(self, rows: int, pages: int) -> ProgramKey:
        """The decode step for so many rows, of sequences with so many pages at most."""
        context = self.shapes.context(pages)
        known = None if context == self.shapes.blocks else context
        return ProgramKey("decode", self.bucket(rows), context=known)


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
    """

    steps: StepSpec
    graph: Any
    state: Any
    stores: tuple[Leaf, ...]
    arena: Leaf
    tables: Tables
    sharding: jax.sharding.Sharding | None = None

    @property
    def page(self) -> KVPage:
        """KV pages as the ops know them."""
        return self.steps.config.page(self.steps.layout.page.block_size)

    def program(self, key: ProgramKey) -> Program:
        """Of a whole step, or of what comes between steps or between layers; parts of a step are
        layer_programs.layer_program's. Raises KeyError for another kind."""
        if key.kind in STEPS:
            return self._step(key)
        if key.maps is not None:
            return self._write_maps(key.maps)
        made = self._token_programs(key) | self._memory_programs(key) | self._record_programs(key)
        return made[key.kind]

    @property
    def results(self) -> ResultShape:
        """Where what the host reads of every step is."""
        shapes, layers = self.steps.shapes, self.tables.clock.shape[0]
        routes = max(shapes.rows, shapes.prefill_chunks)
        experts = self.steps.config.num_experts
        return ResultShape(shapes.rows, routes, layers, experts, len(self.stores))

    @property
    def writes(self) -> tuple[Leaf, ...]:
        """What knows the arena's writes so far, where a queue fills it; empty: nobody asks."""
        if self.steps.queue is None:
            return ()
        if isinstance(self.arena, OwnedArena):
            return (self.arena.token,)
        return (
            self.array(*TOKEN.shape, dtype=TOKEN.dtype),
        )  # what CopyTransport.begin_output gives

    @property
    def params(self) -> tuple:
        """The model's arrays, as programs get them: a tree of nnx costs a call more than all its
        other arguments."""
        return tuple(jax.tree.leaves(self.state))

    def model(self, params: Sequence[Any]) -> Decoder:
        """The model of those arrays."""
        return nnx.merge(self.graph, jax.tree.unflatten(jax.tree.structure(self.state), params))

    # ---- arguments

    def array(self, *shape: int, dtype: jax.typing.DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

    def pieces(self, version: int | None = None) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays in which a record is brought; none where experts lie in one array."""
        store = self.stores[version or 0]
        pieces = store.pieces if isinstance(store, AbsentRecords) else ()
        hidden = self.steps.layout.hidden
        return tuple(self.array(rows, hidden, dtype=jnp.uint16) for rows in pieces)

    def entries(self) -> Entries:
        return Entries._make([self.array(STAGES)] * len(Entries._fields))

    def maps(self, search: MapSearch) -> MapStore:
        """The store of expert maps."""
        layers, experts = self.tables.address.shape
        shapes = map_shapes(search, layers, experts, self.steps.config.hidden_size)
        return MapStore(**{n: self.array(*s, dtype=t) for n, (s, t) in shapes.items()})

    def routing(self, key: ProgramKey, *layers: int) -> Routing:
        """The routing of one layer, or of as many as given, of the step's tokens."""
        shape = (*layers, self.tokens(key), self.steps.config.num_experts_per_tok)
        return Routing(self.array(*shape), self.array(*shape, dtype=jnp.float32))

    def tokens(self, key: ProgramKey) -> int:
        """How many tokens the step computes, padding included."""
        if key.kind == "decode":
            return key.rows or self.steps.shapes.rows
        return (key.rows or self.steps.shapes.prefill_chunks) * self.steps.shapes.chunk

    def batch(self, key: ProgramKey) -> tuple:
        """What a step is given beside model and memory, forced routing and stage list: of decode
        all rows, so that the caller's arrays are the same for every bucket; of prefill
        its chunks."""
        rows = self.array(self.steps.shapes.rows)
        block_table = self.array(self.steps.shapes.rows, self.steps.shapes.blocks)
        if key.kind == "decode":
            return rows, rows, block_table
        prefill = empty_prefill(self.steps.shapes)
        if key.rows is not None:
            prefill = prefill.of_chunks(key.rows)
        arrays = (self.array(*values.shape) for values in prefill)
        return PrefillBatch._make(arrays), block_table, rows

    def in_use(self, key: ProgramKey, batch: Sequence[Any]) -> tuple:
        """What the step computes of a batch: the first rows and their first pages, all chunks;
        current tokens are all kept."""
        if key.kind != "decode":
            return tuple(batch)
        tokens, positions, block_table = batch
        rows = self.tokens(key)
        return tokens, positions[:rows], block_table[:rows, : key.context]

    def context(self, key: ProgramKey, stores: tuple[jax.Array, ...] = ()) -> StepContext:
        """The context of a step, or of what moves experts outside of one. stores: as traced."""
        decode = key.kind == "decode"
        return StepContext(
            stores=stores,
            ops=self.steps.ops,
            activation=self.steps.config.hidden_act,
            row_tile=(
                decode_tile(self.steps.ops, self.tokens(key)) if decode else self.steps.shapes.chunk
            ),
            waves=1 if decode else self.steps.shapes.waves,
            formats=self.steps.formats,
            in_place=self.steps.in_place,
            page=self.page,
            window=self.steps.window,
            resident=key.resident,
            packed=self.steps.packed,
            queued=self.steps.queue is not None,
            arrays=self.steps.trace_arrays if key.traced else frozenset(),
            cache_aware=self.steps.cache_aware if self.steps.favours_residents else None,
        )

    # ---- steps

    def _step(self, key: ProgramKey) -> Program:
        def run(params, stores, arena, tables, *args):
            batch = list(args)
            maps = None if key.maps is None else (batch.pop(), key.maps)
            stages = batch.pop() if key.staged else None
            forced = batch.pop() if key.forced else None
            memory, output = device_step(
                self.model(params),
                self.context(key, stores),
                DeviceMemory(arena, tables),
                self.in_use(key, batch),
                key.kind,
                self.results,
                forced=forced,
                stages=stages,
                maps=maps,
            )
            return *memory, output

        buffers = self.params, self.stores, self.arena, self.tables
        layers = self.tables.clock.shape[0]
        forced = (self.routing(key, layers),) if key.forced else ()
        staged = (self.entries(),) if key.staged else ()
        maps = () if key.maps is None else (self.maps(key.maps),)
        return Program(run, (*buffers, *self.batch(key), *forced, *staged, *maps), (2, 3))

    def _write_maps(self, search: MapSearch) -> Program:
        """Other rows of the store of expert maps."""
        layers, experts = self.tables.address.shape
        hidden, half = self.steps.config.hidden_size, jnp.float16
        rows = (
            self.array(WRITTEN, hidden, dtype=half),
            self.array(WRITTEN, layers, experts, dtype=half),
        )
        return Program(write_rows, (self.maps(search), self.array(WRITTEN), *rows), (0,))

    def _token_programs(self, key: ProgramKey) -> dict[Kind, Program]:
        """From logits to tokens."""
        rows, vocabulary, array = self.steps.shapes.rows, self.steps.config.vocab_size, self.array
        ints, flags = array(rows), array(rows, dtype=jnp.bool_)
        floats, seeds = array(rows, dtype=jnp.float32), array(rows, dtype=jnp.uint32)
        logits = array(key.rows or rows, vocabulary, dtype=jnp.float32)
        counts = array(rows, vocabulary)
        biases = array(rows, MAX_BIASES), array(rows, MAX_BIASES, dtype=jnp.float32)
        most = self.steps.shapes.blocks * self.steps.layout.page.block_size
        prompt = array(), array(most), array(most, dtype=jnp.bool_)
        likeliest = functools.partial(logprobs, n=min(MAX_LOGPROBS, vocabulary))

        by_row, shape = sums_in_one_order(self.steps.ops), self.results
        # Its programs have a row each; what else samples are elements by themselves and maxima.
        any_rows = by_row or self.steps.ops.truncates_by_row

        def drawn(function: Callable, *params: Leaf) -> Program:
            def advance(logits, tokens, update, results, *params):
                if not any_rows:
                    logits = _of_all_rows(logits, tokens)
                tokens = update_rows(function, logits, tokens, update, *params, by_row=by_row)
                return tokens, shape.with_tokens(results, tokens)

            return Program(advance, (logits, ints, flags, array(shape.size), *params), ())

        def of_logits(function: Callable, *args: Leaf) -> Program:
            def run(logits, first, *args):
                return function(_of_all_rows(logits, first), first, *args)

            return Program(run, (logits, *args), ())

        of_request = floats, ints, floats, floats, seeds, ints
        searched = {"implementation": self.steps.ops.truncate}
        return {
            "greedy": drawn(greedy),
            "sample": drawn(functools.partial(sample, one_row=by_row, **searched), *of_request),
            "sample_all": drawn(functools.partial(sample, truncates=False), *of_request),
            "add_bias": of_logits(add_bias, *biases),
            "adjust": of_logits(adjust, counts, floats, floats, floats, *biases),
            "logprobs": of_logits(likeliest, ints),
            "tally": Program(tally, (counts, ints, flags), (0,)),
            "recount": Program(recount, (counts, *prompt), (0,)),
            "place": Program(jnp.where, (flags, ints, ints), ()),
        }

    def _memory_programs(self, key: ProgramKey) -> dict[Kind, Program]:
        """What moves and checks pages, cells and tables between steps."""
        arena, tables, stores, array = self.arena, self.tables, self.stores, self.array
        pages, places = array(SWAP_PAGES), array(*tables.address.shape[1:])
        record_rows = tuple(cell.rows for cell in self.steps.cells)
        hand_overs = HandOvers._make([array(HAND_OVERS)] * len(HandOvers._fields))
        moves = Moves._make([array(MOVES)] * len(Moves._fields))
        bind = functools.partial
        read, write, copy = (
            bind(function, page=self.steps.layout.page)
            for function in (read_pages, write_pages, move_pages)
        )
        pinned = self.sharding and self.sharding.with_memory_kind("pinned_host")
        shape = (self.steps.layout.page.nbytes // 2,)
        swapped = (jax.ShapeDtypeStruct(shape, jnp.uint16, sharding=pinned),) * SWAP_PAGES
        populate = bind(_populate, ops=self.steps.ops, formats=self.steps.formats)
        moved = bind(move, record_rows=record_rows, implementation=self.steps.ops.move)

        def load(arena, tables, stores):
            """The first layer, seated in its half of the ring."""
            return load_seated(DeviceMemory(arena, tables), 0, self.context(key, stores)).arena

        return {
            "swap_out": Program(read, (arena, pages), (), memory="pinned_host"),
            "swap_in": Program(write, (arena, swapped, pages, array()), (0,)),
            "move_pages": Program(copy, (arena, pages, pages), (0,)),
            "hand_over": Program(hand_over_cells, (tables, hand_overs), (0,)),
            "regrant": Program(regrant, (tables, array(*tables.cell_row.shape)), (0,)),
            "populate": Program(populate, (arena, stores, array(), places, places), (0,)),
            "move": Program(moved, (arena, tables, moves), (0, 1)),
            "snapshot": Program(snapshot, (tables,), ()),
            "least_address": Program(lambda tables: jnp.min(tables.address), (tables,), ()),
            "drain": Program(_drain, (arena, tables), (0, 1)),
            "load": Program(load, (arena, tables, stores), (0,)),
        }

    def _record_programs(self, key: ProgramKey) -> dict[Kind, Program]:
        """Between the parts of a step's layers."""
        arena, tables, index = self.arena, self.tables, self.array()
        pieces, entries, many = self.pieces(key.run), self.entries(), self.array(LANDED)
        context = self.context(ProgramKey("stage"))

        def stage(arena, tables, stores, layer, ahead, entries, done):
            """One layer's part of a stage list. ahead: see stage_layer. done int32[STAGES]: of
            other layers."""
            given = dataclasses.replace(context, stores=stores)
            memory, now = stage_layer(DeviceMemory(arena, tables), layer, entries, given, ahead)
            return *memory, jnp.maximum(done, now)

        def admit(tables, layer, ahead, entries, done):
            """As stage, without the copies. The last result, int32[3, STAGES]: for the host, each
            entry's expert, version and the arena row of its cell, −1 where it is not carried
            out."""
            tables, row = admit_entries(
                *(move_clock(tables, layer, ahead), layer, entries),
                versions=len(self.stores),
                formats=self.steps.formats,
            )
            tables = move_clock(tables, layer, -ahead)
            now = (row >= 0).astype(jnp.int32)
            return tables, jnp.maximum(done, now), jnp.stack([entries.expert, entries.version, row])

        def land(arena, row, pieces):
            """The arena with a record at a row, and a mark that it was read."""
            for piece in pieces:
                arena = jax.lax.dynamic_update_slice(arena, piece, (row, 0))
                row = row + piece.shape[0]
            return arena, pieces[-1][-1, -1]

        def land_many(arena, rows, records):
            """As land, of several."""
            for i, pieces in enumerate(records):
                arena, mark = land(arena, rows[i], pieces)
            return arena, mark

        def forget(tables, row):
            """Tables in which nobody is in the cell at an arena row."""
            return without(tables, tables.cell_row == row)

        of_list = index, index, entries, entries.layer
        found: dict[Kind, Program] = {
            "stage": Program(stage, (arena, tables, self.stores, *of_list), (0, 1)),
            "admit": Program(admit, (tables, *of_list), (0,)),
            "land": Program(land, (arena, index, pieces), (0,)),
            "land_many": Program(land_many, (arena, many, (pieces,) * LANDED), (0,)),
            "seat": Program(seat, (tables, index, index), (0,)),
            "forget": Program(forget, (tables, index), (0,)),
        }
        if not self.steps.tiers or self.steps.formats is None:
            return found
        cell = self.steps.formats[PACKED_VERSION].cell

        def unpack(arena, sources, rows):
            """The arena in which the packed records from the rows `sources` on are, dense, in the
            cells from `rows` on, and a mark that they are."""
            for i in range(LANDED):
                record = jax.lax.dynamic_slice(arena, (sources[i], 0), (cell.rows, cell.hidden))
                dense = jax.lax.bitcast_convert_type(decode(record, cell), jnp.uint16)
                arena = jax.lax.dynamic_update_slice(arena, dense, (rows[i], 0))
            return arena, record[-1, -1]

        size = self.steps.formats[key.run or 0].cell.rows

        def shift(arena, sources, rows):
            """The arena with records of one version moved, one after the other."""
            for i in range(LANDED):
                record = jax.lax.dynamic_slice(arena, (sources[i], 0), (size, cell.hidden))
                arena = jax.lax.dynamic_update_slice(arena, record, (rows[i], 0))
            return arena

        packed = (self.array(cell.rows, cell.hidden, dtype=jnp.uint16),)
        found["land_packed"] = Program(land, (arena, index, packed), (0,))
        found["unpack"] = Program(unpack, (arena, many, many), (0,))
        found["shift"] = Program(shift, (arena, many, many), (0,))
        return found


def _populate(
    arena, stores, layer, cell_row, version, *, ops: Ops, formats: Formats | None
) -> jax.Array:
    """The arena with every expert of the layer at cell_row int32[E], −1: nowhere, in version
    int32[E]."""
    given = cell_row >= 0
    first = jnp.argsort(~given, stable=True)
    fills = Fills(first, cell_row[first], version[first], jnp.sum(given, dtype=jnp.int32))
    return fill(arena, stores, layer, fills, formats=formats, implementation=ops.fill)


def _drain(arena: OwnedArena, tables: Tables) -> tuple[OwnedArena, Tables]:
    """The arena once nothing flies into it; experts that did not come are absent."""
    arena, failed = drain(arena, tables.cell_row)
    return arena, without(tables, failed > 0)


def _of_all_rows(logits: jax.Array, first: jax.Array) -> jax.Array:
    """The logits padded to the rows of `first`, which are all rows: one shape, so one rounding."""
    return jnp.pad(logits, ((0, first.shape[0] - logits.shape[0]), (0, 0)))
