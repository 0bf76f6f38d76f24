"""The device side of the engine: runs steps on arena and tables, in dispatch order."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from host_offload.control.controller import Controller
from host_offload.control.interface import MapRows, MapSearch
from host_offload.control.step_record import LinkUse
from host_offload.control.window import PACKED_VERSION, WindowSpec
from host_offload.memory.integrity import (
    copy_rows,
    count_faults,
    describe_faults,
    has_record,
)
from host_offload.memory.placement import Placement
from host_offload.memory.store import ExpertStore
from host_offload.memory.swap import SWAP_PAGES
from host_offload.memory.tables import (
    Copy,
    Entry,
    HandOver,
    HandOvers,
    Move,
    Residency,
    Tables,
    cold_tables,
    read_snapshot,
    with_contents,
)
from host_offload.versions.encoders import NUMPY_DTYPES
from host_offload.versions.layer_versions import record_bytes, version_bytes
from moejax.errors import UserError
from moejax.models.model_config import finishes
from moejax.requests.request import PrefillKind
from moejax.step.buffers import Buffers
from moejax.step.compiler import Compiler
from moejax.step.copied_stream import CopiedStream
from moejax.step.kept_programs import KeptPrograms
from moejax.step.layer_programs import layer_program
from moejax.step.layer_walk import LayerWalk
from moejax.step.owned_stream import OwnedStream
from moejax.step.processor import Processor
from moejax.step.programs import HAND_OVERS, MOVES, STAGES, Kind, ProgramKey, Programs, StepKeys
from moejax.step.step_parts import PrefillBatch, Routing, StepOutput, StepSpec
from moejax.step.token_state import TokenState
from moejax.step.transports.copies import CopyTransport
from moejax.step.transports.transport import Transport
from moejax.step.walk import CompiledWalk, DeviceMaps, Hooks, StepRequest
from pallas_kernels.cpu.arena import TransferFailure
from pallas_kernels.move import Moves
from pallas_kernels.stage import Entries

_OF_CELLS = frozenset({"cell_row", "cell_version", "owner", "address"})
"""Tables of what is in which cell. No transfer may be under way while they change."""

TRANSPORTS = (
    "moejax.step.transports.copies:CopyTransport",
    "moejax.step.transports.native:NativeTransport",
    "moejax.step.transports.transport:Transport",
)
"""Module and class of each transport; the executor takes the first that serves its steps."""


class Executor:
    """Runs steps on the device. It is the host_offload.control.control.Device of a Control.

    Dispatching a step does not wait for the device: results are jax arrays that the engine reads a
    step later. The executor is made of parts that do not import it, chosen by `steps`:

    - `buffers`: arena and tables. `compiler`: the executables.
    - `walk`: calls one executable a step, or one for each part of a layer.
    - `transport`: brings missing experts into cells.
    - `stream`: the window through which all experts stream; None if experts are paged.
    - `processor`: computes some experts beside the device; None without one.
    - `tokens`: current tokens, and the programs that choose them.

    Arguments:

    - `slots`: slots of the arena.
    - `cells`: C, most cells of a layer.
    """

    def __init__(
        self,
        params: dict[str, Any],
        store: ExpertStore,
        steps: StepSpec,
        device: jax.Device,
        *,
        slots: int,
        cells: int,
    ):
        self.steps, self.device, self.store, self.slots = steps, device, store, slots
        self.config, self.shapes, self.ops = steps.config, steps.shapes, steps.ops
        self.layout = layout = steps.layout
        if steps.config.predicts:
            params = params | {"hidden": np.zeros(self.hidden_shape, NUMPY_DTYPES[steps.dtype])}
        self.params = jax.device_put(params, SingleDeviceSharding(device))
        self.compiler = compiler = Compiler(self.lower, device.platform, self._find_kept)
        self.buffers = buffers = Buffers(steps, store, device, slots=slots, cells=cells)
        layers = buffers.tables.address.shape[0]
        self.link_bytes = record_bytes(layout, steps.formats, moved=True)
        self.version_bytes = version_bytes(layout, steps.formats, layers)
        self.keys = StepKeys(steps.shapes, layout.page.block_size, steps.driver == "device")
        self.tokens = TokenState(steps, compiler, self.keys, buffers.sharding)
        self.pooled = False
        """Whether cells pass from layer to layer, so that only the tables know how many cells each
        layer has."""
        self.arriving = False
        """Whether copies of begin_copies are the only transfers beside the steps. No entry points
        to their cells, so tables of cells may change meanwhile."""
        self.maps: DeviceMaps | None = None
        """The expert maps that decode steps search; None: they search none."""
        self.placement: Placement | None = None
        """Where every expert was placed at the start; None: experts are paged."""
        kinds = (pkgutil.resolve_name(name) for name in TRANSPORTS)
        kind: type[Transport] = next(kind for kind in kinds if kind.serves(steps))
        self.transport = transport = kind(steps, buffers, compiler)
        self.stream: OwnedStream | CopiedStream | None = None
        if steps.window:
            parts = steps, buffers, compiler
            if isinstance(transport, CopyTransport):
                self.stream = CopiedStream(*parts, transport, self.set_tables)
            else:
                self.stream = OwnedStream(*parts, transport, self.set_tables)
        self.processor: Processor | None = None
        if steps.second is not None:
            if steps.second.defer and any(finishes(steps.config, run) for run in params["runs"]):
                raise UserError(
                    "placement defer=N: this model norms or projects what experts add, which "
                    "cannot be added a layer later; leave defer out"
                )
            wanted = *self.keys.decodes, ProgramKey("prefill")
            of = buffers, compiler, transport, self.programs
            self.processor = Processor(*of, wanted, defer=steps.second.defer)
        leaves = tuple(jax.tree.leaves(self.params))
        copied = self.stream if isinstance(self.stream, CopiedStream) else None
        if steps.driver != "host" and copied is None:
            self.walk: CompiledWalk | LayerWalk = CompiledWalk(
                steps, leaves, buffers, compiler, slots
            )
        else:
            runs = [
                (run["o"].shape[0], "router" in run, finishes(steps.config, run))
                for run in params["runs"]
            ]
            self.walk = LayerWalk(
                steps, runs, leaves, buffers, compiler, transport, copied, self.processor
            )
        self._compile_first()
        self._compile_ahead()

    def _compile_first(self) -> None:
        """Begins to compile what the first requests need."""
        steps = self.keys.decodes[0], self.keys.prefills[0]
        keys = (key for step in steps for key in self.walk.calls(step))
        self.compiler.need(*keys, ProgramKey("regrant"))

    def _compile_ahead(self) -> None:
        """Begins to compile what later requests may need, while the first ones run."""
        first = self.keys.bucket(1)
        later = [ProgramKey(kind, rows) for kind in self.tokens.choices for rows in (None, first)]
        steps = *self.keys.prefills, *self.keys.decodes
        for key in (*later, *(key for step in steps for key in self.walk.calls(step))):
            self.compiler.start(key)

    # ---- what it is

    @property
    def arena(self) -> Any:
        """uint16[rows, D], or an OwnedArena."""
        return self.buffers.arena

    @property
    def tables(self) -> Tables:
        return self.buffers.tables

    @tables.setter
    def tables(self, tables: Tables) -> None:
        self.buffers.tables = tables

    @property
    def stores(self) -> tuple[Any, ...]:
        """The store's operands of programs, by version number."""
        return self.buffers.stores

    @property
    def hidden_shape(self) -> tuple[int, int]:
        """The shape of what `set_hidden` takes."""
        shapes = self.shapes
        return max(shapes.rows, shapes.prefill_chunks * shapes.chunk), self.config.hidden_size

    def set_hidden(self, hidden: np.ndarray) -> None:
        """Sets the hidden states that a layer which predicts a further token reads, for the steps
        to come.

        - `hidden`: [·, D] by row of decode, or by token of prefill, in the run's dtype.
        """
        assert isinstance(self.walk, CompiledWalk)
        self.params = self.params | {"hidden": jax.device_put(hidden, self.buffers.sharding)}
        self.walk.params = tuple(jax.tree.leaves(self.params))

    @property
    def driver(self) -> str:
        return self.steps.driver

    @property
    def window(self) -> WindowSpec | None:
        """The window through which experts stream; None without one, or before it is open."""
        return None if self.stream is None else self.stream.window

    @property
    def staging_bytes(self) -> int:
        """Device memory of records on their way, beside the programs' own."""
        return (self.transport if self.stream is None else self.stream).staging_bytes

    def moved_bytes(self) -> dict[str, np.ndarray] | None:
        """Returns version → int64[L], bytes of an expert over the link; None if experts have the
        same size on the link as in a cell."""
        layers = self.tables.address.shape[0]
        moved = version_bytes(self.layout, self.steps.formats, layers, moved=True)
        same = all(np.array_equal(moved[name], n) for name, n in self.version_bytes.items())
        return None if same else moved

    # ---- executables

    def programs(self) -> Programs:
        buffers = self.buffers
        arrays = self.params, buffers.stores, buffers.arena, buffers.tables
        return Programs(self.steps, *arrays, buffers.sharding)

    def _find_kept(self) -> KeptPrograms | None:
        programs = self.programs()
        arrays = programs.params, programs.stores, programs.arena, programs.tables
        return KeptPrograms.of((self.steps, str(programs.sharding)), arrays, self.device)

    def lower(self, key: ProgramKey) -> jax.stages.Lowered:
        """Traces and lowers a program that donates arena and tables."""
        programs = self.programs()
        program = layer_program(programs, key) if key.part else programs.program(key)
        sharding = self.buffers.sharding
        # The ops are written for 32-bit integers; the user may have set 64 bits for other code.
        with jax.enable_x64(False):
            return jax.jit(
                program.function,
                donate_argnums=program.donated,
                out_shardings=program.memory and sharding.with_memory_kind(program.memory),
            ).lower(*program.args)

    def executables(self) -> tuple[ProgramKey, ...]:
        """The programs that are compiled or compiling."""
        return self.compiler.keys

    def wait_compiled(self, everything: bool = False) -> None:
        """Blocks as Compiler.wait does, and also for the second processor's programs."""
        self.compiler.wait(everything)
        if self.processor is not None:
            self.processor.wait()

    def prepare(self, controller: Controller) -> None:
        """Begins to compile what the controller's policies will ask for. `wait_compiled` waits for
        these programs too."""
        staged = controller.stages_transfers
        kinds: list[Kind] = []
        if controller.needs_residency:
            kinds.append("snapshot")
        search = controller.search
        self.pooled = controller.pool is not None or (search is not None and search.pooled)
        self.arriving = controller.arriving is not None
        if controller.pool is not None:
            kinds.append("hand_over")
        if staged and controller.spec.resident is not None:
            kinds.append("move")
        if "kv_pages" in controller.writes:
            kinds += "move_pages", "swap_out", "swap_in"
        self.compiler.need(*map(ProgramKey, kinds))
        self.hold_maps(controller.search)
        if staged:
            self.prepare_stages()

    def prepare_stages(self) -> None:
        """Begins to compile the programs of steps with stage lists."""
        first, *others = self.keys.prefills
        self.compiler.need(*self.walk.calls(first, staged=True))
        for step in others:
            for key in self.walk.calls(step, staged=True):
                self.compiler.start(key)
        self._need_decodes(staged=True)

    def _need_decodes(self, *, staged: bool = False, maps: DeviceMaps | None = None) -> None:
        """Begins to compile every decode step. Every request needs those of the shortest contexts,
        and the others only once its context has grown."""
        steps = self.keys.decodes
        for step in steps:
            needed = step.context == steps[0].context
            for key in self.walk.calls(step, staged=staged, maps=maps):
                (self.compiler.need if needed else self.compiler.start)(key)

    def hold_maps(self, search: MapSearch | None) -> None:
        """Makes decode steps search a new, empty store of expert maps, and begins to compile them.

        - `search`: None ends the search and frees the store.
        """
        if self.maps is not None:
            self.maps.delete()
            self.maps = None
        if search is not None:
            shapes = self.programs().maps(search)
            self.maps = DeviceMaps(search, shapes, self.compiler, self.buffers.sharding)
            self._need_decodes(maps=self.maps)

    def write_maps(self, rows: MapRows) -> None:
        """Writes rows of the store of expert maps, for the steps to come."""
        assert self.maps is not None
        self.maps.write(rows)

    # ---- steps

    def decode(
        self,
        positions: np.ndarray,
        block_table: jax.Array,
        forced: Routing | None = None,
        stages: Entries | None = None,
        hooks: Hooks | None = None,
    ) -> StepOutput:
        """Dispatches a decode step on the current tokens, by the smallest program that holds its
        rows and pages. The results have as many rows as that program.

        - `positions`: int32[R]; −1: an empty row.
        - `block_table`: int32[R, B], KV rows of the sequences' pages.
        - `stages`: programs.STAGES entries.
        - `hooks`: called between a layer's parts, by a walk of layers only.
        """
        args, key = (self.tokens.tokens, positions, block_table), self.keys.decode(positions)
        request = StepRequest(key, args, forced, stages, hooks, self.maps)
        return self.tokens.follow(self.walk.run(request))

    def prefill(
        self,
        prefill: PrefillBatch,
        block_table: jax.Array,
        *,
        kind: PrefillKind = "prefill",
        forced: Routing | None = None,
        stages: Entries | None = None,
        hooks: Hooks | None = None,
    ) -> StepOutput:
        """Dispatches a prefill step, by the smallest program that holds its chunks.

        - `kind`: prefill, or score or prompt_logprobs, whose output has scores too.
        - `block_table`, `forced`, `stages`, `hooks`: see `decode`.
        """
        key = self.keys.prefill(kind, int(prefill.count)) if forced is None else ProgramKey(kind)
        if key.rows is not None:
            prefill = prefill.of_chunks(key.rows)
        args = prefill, block_table, self.tokens.tokens
        request = StepRequest(key, args, forced, stages, hooks, self.maps)
        return self.tokens.follow(self.walk.run(request))

    def failures(self, writes: int) -> list[TransferFailure]:
        """Returns the experts that a step could not compute, see Transport.failures."""
        return self.transport.failures(writes)

    def link_use(self) -> LinkUse:
        """The present state of the queue of transfers and of the second processor."""
        found = LinkUse()
        if (totals := self.transport.totals()) is not None:
            came, busy = totals.demands + totals.ahead, round(totals.busy_seconds * 1e6)
            found = LinkUse(totals.flying, totals.bytes_left, came, totals.failed, busy)
        if self.processor is None:
            return found
        second = self.processor.totals
        return found._replace(
            second_experts=second.experts,
            second_rows=second.rows,
            second_us=round(second.seconds * 1e6),
        )

    def assign(self, layer: int, beside: np.ndarray, order: np.ndarray) -> None:
        """Gives experts of a layer to the second processor, see
        host_offload.control.control.Device. Raises ValueError if there is none."""
        if self.processor is None:
            raise ValueError("these steps have no second processor; name a placement")
        self.processor.assign(layer, beside, order)

    def carried_out(self) -> np.ndarray:
        """Returns int32[STAGES], 1 for each entry of the last list between layers that was carried
        out."""
        return np.asarray(self.walk.transfers[-1].done)

    # ---- pages, between steps

    def read_pages(self, kv_rows: Sequence[int]) -> list[jax.Array]:
        """Copies pages, as the steps so far leave them, to pinned host memory.

        - `kv_rows`: KV rows of the pages.

        Returns one array uint16[page bytes / 2] a page.
        """
        pages: list[jax.Array] = []
        for count, (padded,) in _batches(SWAP_PAGES, kv_rows):
            pages += self.compiler.call(ProgramKey("swap_out"), self.arena, padded)[:count]
        return pages

    def write_pages(self, pages: Sequence[jax.Array], kv_rows: Sequence[int]) -> None:
        """Copies host pages to these KV rows, for the steps to come."""
        for count, (number, padded) in _batches(SWAP_PAGES, range(len(kv_rows)), kv_rows):
            given = tuple(pages[i] for i in number), padded, np.int32(count)
            self._change_arena("swap_in", *given)

    def host_pages(self, pages: Sequence[np.ndarray]) -> list[jax.Array]:
        """Copies pages, uint16[page bytes / 2] each, to where read_pages has its results."""
        place = self.buffers.sharding.with_memory_kind("pinned_host")
        return [jax.device_put(page, place) for page in pages]

    def move_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the pages at KV rows `sources` to KV rows `targets`, for the steps to come."""
        for _, padded in _batches(SWAP_PAGES, sources, targets):
            self._change_arena("move_pages", *padded)

    def _change_arena(self, kind: Kind, *args: Any) -> None:
        self.buffers.arena = self.compiler.call(ProgramKey(kind), self.arena, *args)

    # ---- cells, between steps

    def grant_cells(self, cell_row: np.ndarray) -> None:
        """Makes cell_row int32[L, C] the granted cells. An expert in a cell that remains granted
        stays resident."""
        self.transport.drain()
        self.tables = self.compiler.call(ProgramKey("regrant"), self.tables, cell_row)

    def set_tables(self, contents: Mapping[str, np.ndarray]) -> None:
        """Replaces contents of the tables, for the steps to come. Versions are numbered as policies
        number them."""
        if not (self.arriving or _OF_CELLS.isdisjoint(contents)):
            self.transport.drain()
        if self.buffers.layer_versions is not None:
            contents = self.buffers.layer_versions.contents(contents)
        self.tables = with_contents(self.tables, contents)

    def forget_experts(self) -> None:
        """Empties all cells, which stay granted, and resets the other tables to a cold start."""
        layers, cells = self.tables.cell_row.shape
        cold = cold_tables(np.zeros(layers, np.int32), self.config.num_experts, bound=cells)
        contents = cold._asdict()
        del contents["cell_row"]
        self.set_tables(contents)

    def seen(self, tables: Any) -> Any:
        """Returns tables of this executor with versions numbered as policies number them."""
        versions = self.buffers.layer_versions
        return tables if versions is None else versions.seen(tables)

    def place(self, placement: Placement) -> None:
        """Copies every expert to its place and sets the tables accordingly, before the first
        step."""
        self.placement = placement
        if self.arriving:  # copies of an earlier run
            self.transport.drain()
            jax.block_until_ready(self.tables)
            self.transport.ended_copies()
            self.arriving = False
        self.set_tables(placement.contents)
        versions = np.asarray(self.tables.version)
        self.transport.populate(placement.contents["address"], versions)
        self.transport.drain()

    def stage_list(self, entries: Sequence[Entry]) -> Entries | None:
        """Returns the entries as a step takes them, int32[STAGES] a field; None without entries."""
        if not entries:
            return None
        if self.buffers.layer_versions is not None:
            entries = self.buffers.layer_versions.entries(entries)
        return Entries._make(_pad_rows(entries, len(Entries._fields), STAGES))

    def move_cells(self, moves: Sequence[Move]) -> None:
        """Moves cells and their contents within the arena, for the steps to come. The old and the
        new places must be disjoint."""
        if not self.arriving:
            self.transport.drain()
        for i in range(0, len(moves), MOVES):
            lists = Moves._make(_pad_rows(moves[i : i + MOVES], len(Moves._fields), MOVES))
            self.buffers.arena, self.tables, _ = self.compiler.call(
                ProgramKey("move"), self.arena, self.tables, lists
            )

    def begin_copies(self, copies: Sequence[Copy]) -> None:
        """Begins to copy records beside the steps to come."""
        if self.buffers.layer_versions is not None:
            copies = self.buffers.layer_versions.entries(copies)
        self.transport.begin_copies(copies)

    def ended_copies(self) -> dict[tuple[int, int], bool]:
        """See host_offload.control.control.Device."""
        return self.transport.ended_copies()

    def hand_over(self, moves: Sequence[HandOver]) -> None:
        """Passes cells from layer to layer, for the programs dispatched next. A record on its way
        into such a cell still comes: the next fill of the cell waits for it, or replaces it."""
        for i in range(0, len(moves), HAND_OVERS):
            part = moves[i : i + HAND_OVERS]
            lists = HandOvers._make(_pad_rows(part, len(HandOver._fields), HAND_OVERS))
            self.tables = self.compiler.call(ProgramKey("hand_over"), self.tables, lists)

    def snapshot(self) -> Callable[[], Residency]:
        """Begins to copy the tables, as the steps so far leave them, to the host. Returns a
        function that waits for the copy and returns it, with versions as policies number them."""
        copy = self.compiler.call(ProgramKey("snapshot"), self.tables)
        copy.copy_to_host_async()
        return lambda: self.seen(read_snapshot(np.asarray(copy), self.tables))

    def look(self) -> Residency:
        """The tables as the steps so far leave them; waits for these."""
        return self.snapshot()()

    def faults(self) -> list[str]:
        """Describes broken invariants of arena, tables and store. Waits for the device."""
        self.transport.drain()
        copy = np.asarray(self.compiler.call(ProgramKey("snapshot"), self.tables))
        jax.block_until_ready(self.arena)
        sizes = [cell.rows for cell in self.steps.cells]
        counts = count_faults(read_snapshot(copy, self.tables), sizes, self._is_intact)
        return describe_faults(counts)

    def _is_intact(self, layer: int, expert: int, version: int, row: int) -> bool:
        """Whether the arena has the expert's record at this row."""
        buffers, rows = self.buffers, self.steps.cells[version].rows
        if buffers.memory is not None:
            record = buffers.memory.view()[row : row + rows]
        else:
            record = np.asarray(copy_rows(self.arena, row, rows))
        made = bool(self.steps.tiers) and version == PACKED_VERSION  # the store has no packed ones
        if made and isinstance(self.stream, CopiedStream):
            return np.array_equal(record, self.stream.pack(layer, expert))
        lies = None if self.steps.formats is None else self.steps.formats[version]
        source = self.store.versions[buffers.stored[version]].source
        return has_record(record, source, layer, expert, lies)

    def delete(self, *, given: bool = True) -> None:
        """Frees the arena.

        - `given`: also frees the store and the model's parameters.
        """
        if given:
            self.store.stop()  # first, since steps may wait for what is read
        if self.processor is not None:
            self.processor.stop()
        self.compiler.close()
        self.walk.delete()
        state, memory = self.tokens, self.buffers.memory
        tokens = None if isinstance(state.tokens, np.ndarray) else state.tokens
        others: tuple = tokens, state.counts, self.maps and self.maps.arrays
        try:
            self.buffers.delete(*others, self.params if given else ())
        finally:
            self.transport.close()
            if memory is not None:
                memory.close()
            if given:
                self.store.delete()


def _pad_rows(rows: Sequence[Sequence[int]], fields: int, most: int) -> np.ndarray:
    """Returns the rows as int32[fields, most], padded with −1."""
    lists = np.full((fields, most), -1, np.int32)
    lists[:, : len(rows)] = np.array(rows, np.int32).T
    return lists


def _batches(most: int, *lists: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the entries of the lists in batches: (how many, int32[lists, most]). The last entry
    repeats as padding."""
    for i in range(0, len(lists[0]), most):
        part = np.array([values[i : i + most] for values in lists], np.int32)
        yield part.shape[1], np.pad(part, ((0, 0), (0, most - part.shape[1])), mode="edge")
