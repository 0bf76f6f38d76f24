"""The programs that the engine compiles: functions, argument shapes and donated arguments.

No program needs a buffer to be lowered. So tests lower and inspect the same programs, given
`jax.ShapeDtypeStruct`s, for devices and sizes that a machine does not have.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
    allow,
    recount,
    sample,
    tally,
    update_rows,
)
from moejax.step.step_parts import (
    DECODE_TILE,
    Leaf,
    PageTables,
    PrefillBatch,
    Routing,
    StepShapes,
    StepSpec,
    empty_prefill,
    rows_of_product,
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
from pallas_kernels.sample import greedy, logprobs
from pallas_kernels.stage import Entries, admit_entries

if TYPE_CHECKING:
    from moejax.models.layers import Decoder

STAGES = 8
"""Entries of a stage list, a compiled shape: most transfers ahead of need in one step."""

HAND_OVERS = 32
"""Entries of a list of cells that pass from layer to layer, a compiled shape."""

MOVES = 16
"""Entries of a list of moves within the arena, a compiled shape."""

LANDED = 8
"""Records that one program moves into their cells, a compiled shape. The host spends more time on
each call than on its arguments."""

Kind = (
    Literal["decode", "greedy", "sample", "sample_all", "add_bias", "adjust", "tally", "recount"]
    | Literal["allow"]
    | PrefillKind
    | Literal["place", "swap_out", "swap_in", "move_pages", "regrant", "populate"]
    | Literal["stage", "move", "hand_over", "snapshot", "drain", "load"]
    | Literal["admit", "land", "land_many", "land_packed", "unpack", "shift", "forget"]
    | Literal["seat", "write_maps", "least_address", "logprobs"]
)

STEPS: tuple[Kind, ...] = ("decode", "prefill", "score", "prompt_logprobs")


class ProgramKey(NamedTuple):
    """Names a program. It prints as `prefill_staged`, `decode_pages64@16` or `decode/attend.0`."""

    kind: Kind
    rows: int | None = None
    """Rows of decode and of programs that take its logits, one of the buckets; they compute the
    first rows only, but adjusted logits are of all rows. Chunks of prefill. None: all there are."""
    traced: bool = False
    """A step that returns the trace arrays."""
    forced: bool = False
    """A step with routing as an argument."""
    staged: bool = False
    """A step with a stage list as the last argument."""
    maps: MapSearch | None = None
    """The search of a decode step, whose last argument is the store of expert maps; `write_maps`
    has it too."""
    context: int | None = None
    """Most pages of a sequence in a decode step, which decide how many programs attention has;
    None: the pages of the longest sequence."""
    resident: bool = False
    """A decode step without plans, for when every expert is in a cell."""
    part: str | None = None
    """A part of a step, see layer_programs; None: the whole step."""
    run: int | None = None
    """The run of equal layers that the part belongs to. Of programs that move records, the version
    number; None: 0."""

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
    """Whether prefill is compiled for several numbers of chunks."""

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
        """Returns ProgramKey.rows of programs for so many rows."""
        bucket = self.shapes.bucket(rows)
        return None if bucket == self.shapes.rows else bucket

    def prefill(self, kind: PrefillKind, chunks: int) -> ProgramKey:
        """Returns the smallest prefill step that holds so many chunks. Steps that score targets
        have one size only, since they are given many chunks at once."""
        bucket = self.shapes.prefill(chunks)
        smaller = bucket < self.shapes.prefill_chunks
        if kind != "prefill" or not self.prefill_buckets or not smaller:
            return ProgramKey(kind)
        return ProgramKey(kind, bucket)

    def decode(self, positions: np.ndarray) -> ProgramKey:
        """Returns the smallest decode step that holds these positions int32[R] (−1: an empty
        row)."""
        rows = self.shapes.rows
        if len(self.shapes.buckets) > 1:
            rows = int(np.max(np.flatnonzero(positions >= 0), initial=-1)) + 1
        longest = int(np.max(positions, initial=0))
        return self._decode(rows, longest // self.block_size + 1)

    def _decode(self, rows: int, pages: int) -> ProgramKey:
        """Returns the decode step for so many rows of sequences with at most so many pages."""
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
    """Indices of parameters whose memory the results reuse, such as arena and tables."""
    memory: str | None = None
    """Memory kind of the results: `pinned_host`; None: the device's."""


@dataclasses.dataclass(frozen=True)
class Programs:
    """Makes the programs of one engine. All arrays may be ShapeDtypeStructs.

    - `tree`: the model's parameters, the tree that moejax.checkpoints.load returns.
    - `stores`: uint16[L, E, rows, D] of each version.
    - `arena`: uint16[rows, D].
    - `sharding`: of the arguments that a step gets from the host; None: not decided.
    """

    steps: StepSpec
    tree: Any
    stores: tuple[Leaf, ...]
    arena: Leaf
    tables: Tables
    sharding: jax.sharding.Sharding | None = None

    @property
    def page(self) -> KVPage:
        """The layout of KV pages, as ops take it, of the layers with the most KV heads."""
        pages = [
            self.steps.config.of_layer(run.start).page(self.steps.layout.page.block_size)
            for run in self.steps.config.page_runs
        ]
        return max(pages, key=lambda page: page.kv_heads)

    def program(self, key: ProgramKey) -> Program:
        """Returns the program of a whole step, or one that runs between steps or layers.
        layer_programs.layer_program returns parts of a step. Raises KeyError for another kind."""
        if key.kind in STEPS:
            return self._step(key)
        if key.maps is not None:
            return self._write_maps(key.maps)
        made = self._token_programs(key) | self._memory_programs(key) | self._record_programs(key)
        return made[key.kind]

    @property
    def results(self) -> ResultShape:
        """The layout of the results that the host reads of every step."""
        shapes, layers = self.steps.shapes, self.tables.clock.shape[0]
        routes = max(shapes.rows, shapes.prefill_chunks)
        experts = self.steps.config.num_experts
        return ResultShape(shapes.rows, routes, layers, experts, len(self.stores))

    @property
    def writes(self) -> tuple[Leaf, ...]:
        """The argument with the arena's writes so far, if a queue fills the arena; else empty."""
        if self.steps.queue is None:
            return ()
        if isinstance(self.arena, OwnedArena):
            return (self.arena.token,)
        return (
            self.array(*TOKEN.shape, dtype=TOKEN.dtype),
        )  # what CopyTransport.begin_output gives

    @property
    def params(self) -> tuple:
        """The model's arrays in a flat tuple. A call spends more time on a tree than on all its
        other arguments."""
        return tuple(jax.tree.leaves(self.tree))

    def model(self, params: Sequence[Any]) -> Decoder:
        """Returns the model of those arrays."""
        from moejax.models.layers import Decoder  # flax, which only tracing needs

        tree = jax.tree.unflatten(jax.tree.structure(self.tree), params)
        return Decoder(self.steps.config, tree, self.steps.ops)

    # ---- arguments

    def array(self, *shape: int, dtype: jax.typing.DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

    def pieces(self, version: int | None = None) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the arrays in which a record comes; none if all experts are one array."""
        store = self.stores[version or 0]
        pieces = store.pieces if isinstance(store, AbsentRecords) else ()
        hidden = self.steps.layout.hidden
        return tuple(self.array(rows, hidden, dtype=jnp.uint16) for rows in pieces)

    def entries(self) -> Entries:
        return Entries._make([self.array(STAGES)] * len(Entries._fields))

    def maps(self, search: MapSearch) -> MapStore:
        """Returns the store of expert maps."""
        layers, experts = self.tables.address.shape
        shapes = map_shapes(search, layers, experts, self.steps.config.hidden_size)
        return MapStore(**{n: self.array(*s, dtype=t) for n, (s, t) in shapes.items()})

    def routing(self, key: ProgramKey, *layers: int) -> Routing:
        """Returns the routing of the step's tokens in one layer, or in `layers` layers."""
        shape = (*layers, self.tokens(key), self.steps.config.num_experts_per_tok)
        return Routing(self.array(*shape), self.array(*shape, dtype=jnp.float32))

    def tokens(self, key: ProgramKey) -> int:
        """Returns how many tokens the step computes, padding included."""
        if key.kind == "decode":
            return key.rows or self.steps.shapes.rows
        return (key.rows or self.steps.shapes.prefill_chunks) * self.steps.shapes.chunk

    def batch(self, key: ProgramKey) -> tuple:
        """Returns a step's arguments beside model, memory, forced routing and stage list. Decode
        takes all rows, so that the caller's arrays are the same for every bucket; prefill takes its
        chunks."""
        rows = self.array(self.steps.shapes.rows)
        groups, shapes = self.steps.layout.page.groups, self.steps.shapes
        columns = groups * shapes.blocks + shapes.read_pages + shapes.state_pages
        block_table = self.array(shapes.rows, columns)
        if key.kind == "decode":
            return rows, rows, block_table
        prefill = empty_prefill(self.steps.shapes)
        if key.rows is not None:
            prefill = prefill.of_chunks(key.rows)
        arrays = (self.array(*values.shape) for values in prefill)
        return PrefillBatch._make(arrays), block_table, rows

    def in_use(self, key: ProgramKey, batch: Sequence[Any]) -> tuple:
        """Returns the part of a batch that the step computes: the first rows and their first pages
        of decode, all chunks of prefill. It has all current tokens. The block table becomes
        PageTables."""
        if key.kind != "decode":
            prefill, block_table, tokens = batch
            return prefill, self._tables(block_table), tokens
        tokens, positions, block_table = batch
        rows = self.tokens(key)
        return tokens, positions[:rows], self._tables(block_table[:rows], key.context)

    def _tables(self, block_table: Any, context: int | None = None) -> PageTables:
        """Takes the columns of a block table apart: pages of each group, then of the state that is
        read, if that is another, then of the state."""
        page, blocks = self.steps.layout.page, self.steps.shapes.blocks
        first, read_pages = page.groups * blocks, self.steps.shapes.read_pages
        kv, read, state = jnp.split(block_table, [first, first + read_pages], axis=1)
        if page.groups > 1 or any(window and window.chunked for window in page.windows):
            kv = jnp.swapaxes(kv.reshape(-1, page.groups, blocks), 0, 1)
        return PageTables(kv[..., :context], state, read if read_pages else None)

    def context(self, key: ProgramKey, stores: tuple[jax.Array, ...] = ()) -> StepContext:
        """Returns the context of a step, or of a program that moves experts outside of steps.

        - `stores`: the traced stores.
        """
        decode = key.kind == "decode"
        return StepContext(
            stores=stores,
            ops=self.steps.ops,
            activation=self.steps.config.expert_activation,
            row_tile=rows_of_product(
                self.steps.ops,
                min(DECODE_TILE, self.tokens(key)) if decode else self.steps.shapes.chunk,
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
            buddies=self.steps.buddies if self.steps.favours_residents else None,
            drafts=self.steps.drafts,
            hidden=self.steps.hidden,
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
        """Returns the program that writes rows of the store of expert maps."""
        layers, experts = self.tables.address.shape
        hidden, half = self.steps.config.hidden_size, jnp.float16
        rows = (
            self.array(WRITTEN, hidden, dtype=half),
            self.array(WRITTEN, layers, experts, dtype=half),
        )
        return Program(write_rows, (self.maps(search), self.array(WRITTEN), *rows), (0,))

    def _token_programs(self, key: ProgramKey) -> dict[Kind, Program]:
        """Returns the programs from logits to tokens, by kind."""
        rows, vocabulary, array = self.steps.shapes.rows, self.steps.config.vocab_size, self.array
        ints, flags = array(rows), array(rows, dtype=jnp.bool_)
        floats, seeds = array(rows, dtype=jnp.float32), array(rows, dtype=jnp.uint32)
        logits = array(key.rows or rows, vocabulary, dtype=jnp.float32)
        counts = array(rows, vocabulary)
        biases = array(rows, MAX_BIASES), array(rows, MAX_BIASES, dtype=jnp.float32)
        most = self.steps.shapes.blocks * self.steps.layout.page.block_size
        prompt = array(), array(most), array(most, dtype=jnp.bool_)

        def likeliest(logits, tokens, wanted):
            n = min(MAX_LOGPROBS, vocabulary)
            return logprobs(logits, tokens, n, wanted, implementation=self.steps.ops.sample)

        by_row, shape = sums_in_one_order(self.steps.ops), self.results
        native = self.steps.ops.sample == "cpu"
        # truncate then has one program a row. The rest of sampling is elementwise or a maximum, so
        # no result depends on the number of rows.
        any_rows = by_row or native or self.steps.ops.truncates_by_row

        def drawn(function: Callable, *params: Leaf) -> Program:
            def advance(logits, tokens, update, results, *params):
                if not any_rows:
                    logits = _of_all_rows(logits, tokens)
                one_by_one = by_row and not (native and params)
                if native and params:
                    params = *params, update  # it draws no others
                tokens = update_rows(function, logits, tokens, update, *params, by_row=one_by_one)
                return tokens, shape.with_tokens(results, tokens)

            return Program(advance, (logits, ints, flags, array(shape.size), *params), ())

        def of_logits(function: Callable, *args: Leaf) -> Program:
            def run(logits, first, *args):
                return function(_of_all_rows(logits, first), first, *args)

            return Program(run, (logits, *args), ())

        of_request = floats, ints, floats, floats, seeds, ints
        chosen = {"truncate": self.steps.ops.truncate, "implementation": self.steps.ops.sample}
        by_request = functools.partial(sample, one_row=by_row, **chosen)
        return {
            "greedy": drawn(greedy),
            "sample": drawn(by_request, *of_request),
            "sample_all": drawn(functools.partial(sample, truncates=False), *of_request),
            "add_bias": of_logits(add_bias, *biases),
            "allow": of_logits(allow, array(rows, -(-self.steps.config.vocab_size // 32))),
            "adjust": of_logits(adjust, counts, floats, floats, floats, *biases),
            "logprobs": of_logits(likeliest, ints, flags),
            "tally": Program(tally, (counts, ints, flags), (0,)),
            "recount": Program(recount, (counts, *prompt), (0,)),
            "place": Program(jnp.where, (flags, ints, ints), ()),
        }

    def _memory_programs(self, key: ProgramKey) -> dict[Kind, Program]:
        """Returns the programs that move and check pages, cells and tables between steps."""
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
            """Begins to load the first layer, which has its half of the ring."""
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
        """Returns the programs that run between the parts of a step's layers."""
        arena, tables, index = self.arena, self.tables, self.array()
        pieces, entries, many = self.pieces(key.run), self.entries(), self.array(LANDED)
        context = self.context(ProgramKey("stage"))

        def stage(arena, tables, stores, layer, ahead, entries, done):
            """Carries out one layer's part of a stage list.

            - `ahead`: see stage_layer.
            - `done`: int32[STAGES], 1 for entries that other layers carried out.
            """
            given = dataclasses.replace(context, stores=stores)
            memory, now = stage_layer(DeviceMemory(arena, tables), layer, entries, given, ahead)
            return *memory, jnp.maximum(done, now)

        def admit(tables, layer, ahead, entries, done):
            """Does as `stage`, without the copies. The last result is for the host, int32[3,
            STAGES]: each entry's expert, version and the arena row of its cell; row −1: the entry
            was not carried out."""
            tables, row = admit_entries(
                *(move_clock(tables, layer, ahead), layer, entries),
                versions=len(self.stores),
                formats=self.steps.formats,
            )
            tables = move_clock(tables, layer, -ahead)
            now = (row >= 0).astype(jnp.int32)
            return tables, jnp.maximum(done, now), jnp.stack([entries.expert, entries.version, row])

        def land(arena, row, pieces):
            """Copies a record into the arena at a row. Returns (arena, a value that is ready once
            the record was read)."""
            for piece in pieces:
                arena = jax.lax.dynamic_update_slice(arena, piece, (row, 0))
                row = row + piece.shape[0]
            return arena, pieces[-1][-1, -1]

        def land_many(arena, rows, records):
            """Copies LANDED records as `land` does."""
            for i, pieces in enumerate(records):
                arena, mark = land(arena, rows[i], pieces)
            return arena, mark

        def forget(tables, row):
            """Empties the cell at an arena row. Returns the tables."""
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
            """Decodes the packed records at the arena rows `sources` into the cells at `rows`.
            Returns (arena, a value that is ready once the records were read)."""
            for i in range(LANDED):
                record = jax.lax.dynamic_slice(arena, (sources[i], 0), (cell.rows, cell.hidden))
                dense = jax.lax.bitcast_convert_type(decode(record, cell), jnp.uint16)
                arena = jax.lax.dynamic_update_slice(arena, dense, (rows[i], 0))
            return arena, record[-1, -1]

        size = self.steps.formats[key.run or 0].cell.rows

        def shift(arena, sources, rows):
            """Moves records of one version within the arena, one after the other."""
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
    """Copies experts of a layer into cells. Returns the arena.

    - `cell_row`: int32[E], arena rows; −1: the expert is not copied.
    - `version`: int32[E], version numbers.
    """
    given = cell_row >= 0
    first = jnp.argsort(~given, stable=True)
    fills = Fills(first, cell_row[first], version[first], jnp.sum(given, dtype=jnp.int32))
    return fill(arena, stores, layer, fills, formats=formats, implementation=ops.fill)


def _drain(arena: OwnedArena, tables: Tables) -> tuple[OwnedArena, Tables]:
    """Waits for all transfers into the arena. Returns (arena, tables), where experts that did not
    come are absent."""
    arena, failed = drain(arena, tables.cell_row)
    return arena, without(tables, failed > 0)


def _of_all_rows(logits: jax.Array, first: jax.Array) -> jax.Array:
    """Pads the logits to all rows, as `first` has them. One shape gives one rounding."""
    return jnp.pad(logits, ((0, first.shape[0] - logits.shape[0]), (0, 0)))
