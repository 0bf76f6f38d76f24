"""The device side of the engine: the donated buffers and the compiled executables."""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from host_offload.control.controller import Controller
from host_offload.control.interface import MapRows, MapSearch
from host_offload.control.window import WindowSpec
from host_offload.memory.arena import allocate_arena, own_arena
from host_offload.memory.integrity import count_damaged, describe_faults
from host_offload.memory.placement import Placement
from host_offload.memory.record_source import locate_records
from host_offload.memory.store import ExpertStore
from host_offload.memory.swap import SWAP_PAGES
from host_offload.memory.tables import (
    Entry,
    HandOver,
    HandOvers,
    Move,
    Residency,
    Tables,
    cold_tables,
    empty_tables,
    read_snapshot,
    with_contents,
)
from host_offload.queue.native import NativeQueue, Totals
from host_offload.queue.transfer import Progress, QueueSpec
from host_offload.versions.layer_versions import (
    layer_versions,
    record_bytes,
    version_bytes,
)
from moejax.errors import UserError
from moejax.models.layers import Decoder
from moejax.requests.request import PrefillKind
from moejax.step.hooks import Hooks, LayerTransfers
from moejax.step.map_search import WRITTEN, MapArrays
from moejax.step.parts import (
    PrefillBatch,
    Routing,
    StepOutput,
    StepSpec,
    sums_in_one_order,
)
from moejax.step.programs import HAND_OVERS, MOVES, STAGES, Kind, Program, ProgramKey, Programs
from moejax.step.residency import Completeness
from moejax.step.results import Results
from moejax.step.sampler import truncates_any
from pallas_kernels.cpu.arena import ArenaMemory, TransferFailure
from pallas_kernels.move import Moves
from pallas_kernels.stage import Entries

log = logging.getLogger("moejax")


_OF_CELLS = frozenset({"cell_row", "cell_version", "owner", "address"})
"""Tables that say what is where: nothing may fly while they change."""


ONE_GRAPH = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE"
"""What goes into CUDA graphs: XLA's default, and loops, so that a step is one graph. By default the
host launches one for each turn of the loop over layers."""


def compiler_options(platform: str, key: ProgramKey | None = None) -> dict[str, str | bool]:
    """XLA options of every executable: without them equal programs may round differently. On a GPU
    XLA does not look for values to compute twice in order to save memory: the arena is sized to
    what there is, so that search warns, takes time and finds nothing. key: of a decode step also
    that it is one CUDA graph, unless XLA_FLAGS say what graphs take."""
    options: dict[str, str | bool] = {"xla_allow_excess_precision": False}
    if platform == "gpu":
        options["xla_gpu_autotune_level"] = "0"
        options["xla_disable_hlo_passes"] = "rematerialization"
        graphs = "xla_gpu_enable_command_buffer"
        decodes = key is not None and key.kind == "decode" and key.part is None
        if decodes and graphs not in os.environ.get("XLA_FLAGS", ""):
            options[graphs] = ONE_GRAPH
    return options


class Runner:
    """Owns model, store, arena and tables, and runs steps on them in dispatch order: the
    host_offload.control.control.Device of the engine's Control.

    Nothing here waits for the device: results are jax arrays that the engine reads a step later.
    A step is one executable; HostRunner calls one a layer and part.
    """

    driver = "device"
    transfers: Sequence[LayerTransfers] = ()
    """What was carried out between the layers of the latest step: driver="host" only."""

    window: WindowSpec | None = None
    """Through which experts stream; None: there is none, or not yet, so that no step of a stream
    driver can run."""

    def __init__(
        self,
        model: Decoder,
        store: ExpertStore,
        steps: StepSpec,
        device: jax.Device,
        *,
        slots: int,
        cells: int,
    ):
        """slots: of the arena. cells: C, the tables' bound of cells a layer."""
        self.steps, self.device, self.store, self.slots = steps, device, store, slots
        self.config, self.shapes, self.ops = steps.config, steps.shapes, steps.ops
        self.layout = layout = steps.layout
        self.graph, state = nnx.split(model)
        # Constants that the model made itself may lie on jax's default device.
        self.state = jax.device_put(state, SingleDeviceSharding(device))
        formats = steps.formats
        records = layout.records if formats is None else [version.store for version in formats]
        self._stored = [record.version for record in records]
        self.stores: tuple[Any, ...] = tuple(
            store.versions[version].operand for version in self._stored
        )
        """As programs get them."""
        self._params = tuple(jax.tree.leaves(self.state))
        self._greedy: tuple[jax.Array, jax.Array] | None = None
        """Logits of the step dispatched last, until its tokens are chosen, and the tokens after
        the greedy choice that it made itself."""
        self._sharding = SingleDeviceSharding(device)
        rows, hidden = slots * layout.slot_rows, layout.hidden
        self.memory = own_arena(rows, hidden) if steps.owned else None
        """The arena's, where the native library owns it."""
        self.arena = self.memory.on(device) if self.memory else allocate_arena(rows, hidden, device)
        layers, experts = sum(self.config.moe_layers), self.stores[0].shape[1]
        tables = empty_tables(layers, experts, cells)
        self.layer_versions = layer_versions(formats)
        """Where each layer has one version of its own; None: every version has all layers."""
        if self.layer_versions is not None:
            tables = tables._replace(**self.layer_versions.contents(tables._asdict()))
        self.link_bytes = record_bytes(layout, formats, moved=True)
        self.version_bytes = version_bytes(layout, formats, layers)
        self.tables: Tables = jax.device_put(tables, self._sharding)
        self._completeness = Completeness()
        places = slots * layout.cells_per_slot[0]
        self._all_fit = steps.resident_steps and places >= layers * experts
        """Every expert could be in a cell, and there are steps for when it is."""
        self.queue = self._queue(layers) if steps.queue and steps.owned else None
        """What brings records into cells beside compute, of an owned arena."""
        self.pooled = False
        """Cells go from layer to layer, so that the tables alone say which has how many."""
        self.search: MapSearch | None = None
        """How decode steps search the expert maps; None: they do not."""
        self.maps: MapArrays | None = None
        self.placement: Placement | None = None
        """Where every expert began; None: experts are paged."""
        self.tokens = jax.device_put(np.zeros(self.shapes.rows, np.int32), self._sharding)
        self.results: jax.Array | None = None
        """StepOutput.results of the step dispatched last, with the tokens that were chosen."""
        self.counts: jax.Array | None = None
        """int32[R, V], as of sampler.adjust, from the first request with penalties on."""
        self._began = time.perf_counter()
        self.compile_s = 0.0
        """From the start to when a first request can run."""
        self._executables: dict[ProgramKey, Future] = {}
        # Two threads: tracing holds the interpreter, XLA's compiler does not.
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="moejax-compile")
        self._later = threading.Event()
        """Set where nothing is done in the background but to compile."""
        self._later.set()
        self._needed: list[ProgramKey] = []
        """What every request needs."""
        self._compile_first([(stack.size, stack.is_moe) for stack in model.runs])

    def _queue(self, layers: int) -> NativeQueue:
        """The spec's queue, joined to the arena and the store. Raises ValueError where XLA owns the
        arena."""
        wanted, formats = self.steps.queue, self.steps.formats
        if wanted is None or self.memory is None:
            raise ValueError("a queue of transfers needs an arena that the native CPU ops own")
        if formats is not None and any(version.in_transit for version in formats):
            raise ValueError("a queue of transfers does not decode on the way")
        return self._joined(self.memory, wanted, layers)

    def _joined(self, memory: ArenaMemory, wanted: QueueSpec, layers: int) -> NativeQueue:
        """A queue from the store into an owned arena."""
        queue = NativeQueue(
            threads=wanted.threads,
            chunk_bytes=wanted.chunk_bytes,
            rate=wanted.rate,
            latency=wanted.latency,
        )
        queue.keep_settled(False)
        sources = locate_records(
            [self.store.versions[version].source for version in self._stored],
            [*map(self.store.places, self._stored)],
            layers,
            queue.file_number,
        )
        ahead = queue.cause_number("prefetch")
        memory.attach(queue.handle, sources, ahead=ahead, buffers=wanted.buffers)
        return queue

    def _compile_first(self, runs: list[tuple[int, bool]]) -> None:
        """Begins to compile what the first requests need, then what later ones may, while those
        run. runs: of equal layers, how many and whether they have experts."""
        first = self._bucket(1)
        steps = self._decodes()[0], self._prefills()[0]
        self.need(*(key for step in steps for key in self._calls(step)), ProgramKey("regrant"))
        if self.queue:
            self.need(ProgramKey("drain"))
        by_row = sums_in_one_order(self.steps.ops)
        choices: tuple[Kind, ...] = ("sample",) if by_row else ("sample_all", "sample")
        later = [ProgramKey(kind, rows) for kind in choices for rows in (None, first)]
        steps = *self._prefills(), *self._decodes()
        for key in (*later, *(key for step in steps for key in self._calls(step))):
            self._executable(key)

    def moved_bytes(self) -> dict[str, np.ndarray] | None:
        """Version → int64[L]: bytes of an expert over the link; None where they are a cell's."""
        layers = self.tables.address.shape[0]
        moved = version_bytes(self.layout, self.steps.formats, layers, moved=True)
        same = all(np.array_equal(moved[name], n) for name, n in self.version_bytes.items())
        return None if same else moved

    @classmethod
    def check_hooks(cls, hooks: Hooks | None) -> None:
        """Raises UserError for hooks that this driver cannot call."""
        if hooks is not None and cls.driver != "host":
            raise UserError(
                f"driver {cls.driver!r} runs a step as one executable, which no hook can enter; "
                "use driver='host'"
            )

    # ---- executables

    def _bucket(self, rows: int) -> int | None:
        """ProgramKey.rows of programs for so many rows."""
        bucket = self.shapes.bucket(rows)
        return None if bucket == self.shapes.rows else bucket

    def _decodes(self) -> list[ProgramKey]:
        """A decode step in every bucket, those of the shortest contexts first."""
        buckets = self.shapes.buckets or (self.shapes.rows,)
        contexts = self.shapes.contexts or (self.shapes.blocks,)
        found = [self._decode_key(rows, pages) for pages in contexts for rows in buckets]
        return list(dict.fromkeys(found))

    def _decode_key(self, rows: int, pages: int) -> ProgramKey:
        """The decode step for so many rows, of sequences with so many pages at most."""
        context = self.shapes.context(pages)
        known = None if context == self.shapes.blocks else context
        return ProgramKey("decode", self._bucket(rows), context=known)

    def _prefills(self) -> list[ProgramKey]:
        """A prefill step of every number of chunks, the fewest first."""
        buckets = self.shapes.prefills or (self.shapes.prefill_chunks,)
        return list(dict.fromkeys(self.prefill_key("prefill", chunks) for chunks in buckets))

    def prefill_key(self, kind: PrefillKind, chunks: int) -> ProgramKey:
        """The smallest prefill step that holds so many chunks. What scores targets has one alone,
        as it is given many at once, and so have steps that walk through layers."""
        bucket = self.shapes.prefill(chunks)
        smaller = bucket < self.shapes.prefill_chunks
        if kind != "prefill" or self.driver != "device" or not smaller:
            return ProgramKey(kind)
        return ProgramKey(kind, bucket)

    def decode_key(self, positions: np.ndarray) -> ProgramKey:
        """The smallest decode step that holds these positions int32[R], −1: an empty row."""
        rows = self.shapes.rows
        if len(self.shapes.buckets) > 1:
            rows = int(np.max(np.flatnonzero(positions >= 0), initial=-1)) + 1
        longest = int(np.max(positions, initial=0))
        return self._decode_key(rows, longest // self.layout.page.block_size + 1)

    def _calls(self, step: ProgramKey) -> list[ProgramKey]:
        """The executables that a step calls."""
        return [step._replace(traced=bool(self.steps.trace_arrays))]

    def _program(self, key: ProgramKey) -> Program:
        return self.programs().program(key)

    def _executable(self, key: ProgramKey) -> Future:
        if key not in self._executables:
            # In this thread's context: whether kernels are interpreted is a context variable.
            run = contextvars.copy_context().run
            self._executables[key] = self._pool.submit(run, self._compile, key)
        return self._executables[key]

    def _call(self, key: ProgramKey, *args):
        return self._executable(key).result()(*args)

    def _need_decodes(self, *, staged: bool = False, maps: MapSearch | None = None) -> None:
        """Begins to compile every decode step with these fields of its key. Those of the shortest
        contexts every request needs, the others only when it has grown."""
        steps = self._decodes()
        for step in steps:
            for key in self._calls(step):
                needed = self.need if step.context == steps[0].context else self._executable
                needed(key._replace(staged=staged, maps=maps))

    def wait_compiled(self, everything: bool = False) -> None:
        """Blocks until the executables that every request needs exist. everything: also those that
        compile in the background, and what else is done there."""
        for key in [*self._executables] if everything else self._needed:
            self._executable(key).result()
        if everything:
            self._later.wait()
        self.compile_s = self.compile_s or time.perf_counter() - self._began

    def need(self, *keys: ProgramKey) -> None:
        """Begins to compile what every request will need."""
        for key in keys:
            self._executable(key)
            self._needed.append(key)

    def later(self, work: Iterator[object]) -> None:
        """Does the work in the background after what compiles, an item at a time, until the runner
        is deleted."""
        done = threading.Event()

        def begin() -> None:
            # A context of its own: the other thread may begin before the one before it has ended.
            self._pool.submit(contextvars.copy_context().run, advance)

        def advance() -> None:
            more = False
            try:
                more = next(work, None) is not None
                if more:
                    begin()
            except RuntimeError:  # the pool was shut down meanwhile
                more = False
            finally:
                if not more:
                    done.set()

        self._later = done
        begin()

    def prepare(self, controller: Controller) -> None:
        """Begins to compile what the controller's policies will ask for, and counts it among what
        every request needs."""
        self.keep_settled("progress" in controller.needs)
        staged = controller.stages_transfers
        kinds: list[Kind] = []
        if controller.needs_residency:
            kinds.append("snapshot")
        self.pooled = controller.pool is not None
        if self.pooled:
            kinds.append("hand_over")
        if staged and controller.spec.blocking:
            kinds.append("transfer")
        if staged and controller.spec.resident is not None:
            kinds.append("move")
        if "kv_pages" in controller.writes:
            kinds += "move_pages", "swap_out", "swap_in"
        self.need(*map(ProgramKey, kinds))
        self.hold_maps(controller.search)
        if staged and not controller.spec.blocking:
            self.prepare_stages()

    def hold_maps(self, search: MapSearch | None) -> None:
        """Makes decode steps search an empty store of expert maps, and begins to compile them;
        None: they search no more, and the store is freed."""
        for array in jax.tree.leaves(self.maps):
            array.delete()
        self.search, self.maps = search, None
        if search is None:
            return
        self.maps = jax.tree.map(
            lambda a: jnp.zeros(a.shape, a.dtype, device=self._sharding),
            self.programs().maps(search),
        )
        self.need(ProgramKey("write_maps", maps=search))
        self._need_decodes(maps=search)

    def write_maps(self, rows: MapRows) -> None:
        """Writes rows of the store of expert maps, for the steps to come."""
        key = ProgramKey("write_maps", maps=self.search)
        for i in range(0, len(rows.place), WRITTEN):
            place, *values = (part[i : i + WRITTEN] for part in rows)
            padding = WRITTEN - len(place)
            assert self.search is not None
            place = np.pad(place, (0, padding), constant_values=self.search.capacity)
            values = [np.pad(a, [(0, padding)] + [(0, 0)] * (a.ndim - 1)) for a in values]
            self.maps = self._call(key, self.maps, place, *values)

    def prepare_stages(self) -> None:
        """As prepare, of what steps with stage lists need."""
        for i, step in enumerate(self._prefills()):
            needed = self._executable if i else self.need
            for key in self._calls(step):
                needed(key._replace(staged=True))
        self._need_decodes(staged=True)

    def executables(self) -> tuple[ProgramKey, ...]:
        """What was compiled so far. Budgets, policies and placement add nothing."""
        return tuple(self._executables)

    def _compile(self, key: ProgramKey):
        options = compiler_options(self.device.platform, key)
        return self.lower(key).compile(compiler_options=options)

    def lower(self, key: ProgramKey) -> jax.stages.Lowered:
        """The traced and lowered program, arena and tables donated."""
        program = self._program(key)
        # The ops are written for 32-bit integers, whatever the user set for other code.
        with jax.enable_x64(False):
            return jax.jit(
                program.function,
                donate_argnums=program.donated,
                out_shardings=program.memory and self._sharding.with_memory_kind(program.memory),
            ).lower(*program.args)

    def programs(self) -> Programs:
        buffers = self.state, self.stores, self.arena, self.tables
        return Programs(self.steps, self.graph, *buffers, self._sharding)

    # ---- steps

    def _step(
        self,
        step: ProgramKey,
        args: tuple,
        forced: Routing | None,
        stages: Entries | None,
        hooks: Hooks | None,
    ) -> StepOutput:
        self.check_hooks(hooks)
        key = step._replace(
            traced=bool(self.steps.trace_arrays),
            forced=forced is not None,
            staged=stages is not None,
        )
        extras = [value for value in (forced, stages) if value is not None]
        transfers = stages is not None or self.search is not None
        if not (extras or transfers) and self._is_resident(key):
            key = key._replace(resident=True)
        if self.search is not None and key.kind == "decode":
            key = key._replace(maps=self.search)
            assert self.maps is not None
            extras = [*extras, self.maps]
        before = self.tables
        self.arena, self.tables, output = self._call(
            key, self._params, self.stores, self.arena, self.tables, *args, *extras
        )
        if not transfers:
            self._completeness.stepped(before, self.tables)
        return output

    def _is_resident(self, key: ProgramKey) -> bool:
        """Whether a decode step may take every expert to be in its cell: the host knows that they
        are, and the executable, which compiles in the background, is there."""
        if not self._all_fit or key.kind != "decode":
            return False
        known = self._completeness
        if known.is_complete(self.tables):
            return self._executable(key._replace(resident=True)).done()
        if known.due(self.tables) and self._executable(ProgramKey("least_address")).done():
            known.look(self._call(ProgramKey("least_address"), self.tables), self.tables)
        return False

    def decode(
        self,
        positions: np.ndarray,
        block_table: jax.Array,
        forced: Routing | None = None,
        stages: Entries | None = None,
        hooks: Hooks | None = None,
    ) -> StepOutput:
        """Dispatches a decode step on the current tokens, for as few rows and pages as there is a
        program for. positions int32[R], −1: empty row. stages: programs.STAGES entries. hooks:
        called between a layer's parts, driver="host" only. The results are of that many rows."""
        args, key = (self.tokens, positions, block_table), self.decode_key(positions)
        return self._made(self._step(key, args, forced, stages, hooks))

    def _made(self, output: StepOutput) -> StepOutput:
        self._greedy, self.results = (output.logits, output.tokens), output.results
        return output

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
        """Dispatches a prefill step, of as few chunks as there is a program for. kind: prefill;
        score or prompt_logprobs, which also give the scores of the output. Others as of decode."""
        key = self.prefill_key(kind, int(prefill.count)) if forced is None else ProgramKey(kind)
        if key.rows is not None:
            prefill = prefill.of_chunks(key.rows)
        args = prefill, block_table, self.tokens
        return self._made(self._step(key, args, forced, stages, hooks))

    def sample(self, logits: jax.Array, update: np.ndarray, params: Sequence | None) -> jax.Array:
        """Samples the rows under `update` bool[R], those that the latest step gave logits, and
        makes them the current tokens and those of `results`.

        params: None for greedy, which is there already where the logits are that step's; else
        sampler.sample's arrays after the logits.
        """
        made, self._greedy = self._greedy, None
        if params is None and made is not None and made[0] is logits:
            self.tokens = made[1]
            return self.tokens
        key = ProgramKey(self._choice(params), self._bucket(logits.shape[0]))
        args = logits, self.tokens, update, self.results, *(params or ())
        self.tokens, self.results = self._call(key, *args)
        return self.tokens

    def _choice(self, params: Sequence | None) -> Kind:
        """The least program that makes these choices. Where rows are drawn one after the other,
        each finds out for itself whether it truncates."""
        if params is None:
            return "greedy"
        _, top_k, top_p, *_ = params
        by_row = sums_in_one_order(self.steps.ops)
        return "sample" if by_row or truncates_any(top_k, top_p) else "sample_all"

    def prepare_counts(self) -> None:
        """Begins to compile what requests with penalties need, in the background."""
        for kind in ("recount", "adjust", "tally", "greedy"):
            self._executable(ProgramKey(kind))

    def recount(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Counts the tokens of a row anew; the first call allocates the counts of all rows."""
        if self.counts is None:
            shape = (self.shapes.rows, self.config.vocab_size)
            self.counts = jnp.zeros(shape, jnp.int32, device=self._sharding)
        ids = np.full(self.shapes.blocks * self.layout.page.block_size, -1, np.int32)
        end = len(prompt) + len(output)
        ids[: len(prompt)], ids[len(prompt) : end] = prompt, output
        is_output = np.arange(len(ids)) >= len(prompt)
        self.counts = self._call(ProgramKey("recount"), self.counts, np.int32(row), ids, is_output)

    def tally(self, update: np.ndarray) -> None:
        """Counts the current tokens of the rows under `update` bool[R] as generated."""
        self.counts = self._call(ProgramKey("tally"), self.counts, self.tokens, update)

    def adjust(self, logits: jax.Array, penalties: Sequence | None, biases: Sequence) -> jax.Array:
        """Logits of all rows after biases and penalties.

        penalties: sampler.adjust's arrays after the counts, of which there must be some; None for
        biases alone. biases: its arrays after those.
        """
        bucket = self._bucket(logits.shape[0])
        if penalties is None:
            return self._call(ProgramKey("add_bias", bucket), logits, *biases)
        key = ProgramKey("adjust", bucket)
        return self._call(key, logits, self.counts, *penalties, *biases)

    def token_logprobs(self, logits: jax.Array, tokens: jax.Array):
        key = ProgramKey("logprobs", self._bucket(logits.shape[0]))
        return self._call(key, logits, tokens)

    def place_tokens(self, values: np.ndarray, update: np.ndarray) -> None:
        """Makes values int32[R] the current tokens of the rows under `update` bool[R]."""
        self.tokens = self._call(ProgramKey("place"), update, values, self.tokens)

    # ---- between steps

    def drain(self) -> None:
        """Nothing flies into the arena any more when the steps to come begin, nor during what is
        dispatched next; experts that did not come are absent. Does nothing without a queue."""
        if self.queue is not None:
            drained = self._call(ProgramKey("drain"), self.arena, self.tables)
            self.arena, self.tables = drained

    def failures(self, writes: int) -> list[TransferFailure]:
        """The experts that a step could not compute because their bytes did not come; what was
        computed beside them is wrong. writes: of the step's Results. Each is told once, and absent
        for the steps to come."""
        if self.queue is None or self.memory is None:
            return []
        failed = self.memory.failures(writes)
        if failed:
            self.drain()
        return failed

    @property
    def queue_spec(self) -> QueueSpec | None:
        """The queue as it is; None: there is none."""
        return self.steps.queue

    @property
    def staging_bytes(self) -> int:
        """Device memory of records on their way, beside what programs take."""
        return 0

    def check_results(self, results: Results) -> None:
        """Raises RuntimeError for a step that did what no step of this runner does."""

    def transfer_totals(self) -> Totals | None:
        """What the queue did so far; None: there is none."""
        return None if self.queue is None else self.queue.totals()

    def keep_settled(self, keep: bool) -> None:
        """Whether transfers that settle from now on are kept until `progress` tells of them."""
        if self.queue is not None:
            self.queue.keep_settled(keep)

    def progress(self) -> Progress:
        """What is on its way now, and what has settled since the last call, where that is kept.
        Without a queue nothing is ever on its way."""
        return Progress(0.0, (), ()) if self.queue is None else self.queue.observe()

    def read_pages(self, kv_rows: Sequence[int]) -> list[jax.Array]:
        """Copies the pages at these KV rows, as the steps so far leave them, to pinned host memory.
        Each an array of its own, uint16[page bytes / 2]."""
        pages: list[jax.Array] = []
        for count, (padded,) in _batches(SWAP_PAGES, kv_rows):
            pages += self._call(ProgramKey("swap_out"), self.arena, padded)[:count]
        return pages

    def write_pages(self, pages: Sequence[jax.Array], kv_rows: Sequence[int]) -> None:
        """Copies host pages to these KV rows, for the steps to come."""
        for count, (number, padded) in _batches(SWAP_PAGES, range(len(kv_rows)), kv_rows):
            given = tuple(pages[i] for i in number), padded, np.int32(count)
            self.arena = self._call(ProgramKey("swap_in"), self.arena, *given)

    def move_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the pages at KV rows `sources` to KV rows `targets`, for the steps to come."""
        for _, padded in _batches(SWAP_PAGES, sources, targets):
            self.arena = self._call(ProgramKey("move_pages"), self.arena, *padded)

    def grant_cells(self, cell_row: np.ndarray) -> None:
        """Makes cell_row int32[L, C] the granted cells; residents of cells that stay stay."""
        self.drain()
        self.tables = self._call(ProgramKey("regrant"), self.tables, cell_row)

    def set_tables(self, contents: Mapping[str, np.ndarray]) -> None:
        """Gives tables other contents, for the steps to come; versions as policies see them."""
        if not _OF_CELLS.isdisjoint(contents):
            self.drain()
        if self.layer_versions is not None:
            contents = self.layer_versions.contents(contents)
        self.tables = with_contents(self.tables, contents)

    def forget_experts(self) -> None:
        """Empties all cells, which stay granted, and makes the other tables those of a start."""
        layers, cells = self.tables.cell_row.shape
        cold = cold_tables(np.zeros(layers, np.int32), self.stores[0].shape[1], bound=cells)
        contents = cold._asdict()
        del contents["cell_row"]
        self.set_tables(contents)

    def seen(self, tables: Any) -> Any:
        """Tables of this runner with versions as policies see them."""
        return tables if self.layer_versions is None else self.layer_versions.seen(tables)

    def place(self, placement: Placement) -> None:
        """Copies every expert to where the placement says, and says so in the tables; before the
        first step."""
        self.placement = placement
        self.set_tables(placement.contents)
        places = placement.contents["address"], np.asarray(self.tables.version)
        for layer, (rows, versions) in enumerate(zip(*places, strict=True)):
            self.arena = self._call(
                ProgramKey("populate"), self.arena, self.stores, np.int32(layer), rows, versions
            )
        self.drain()

    def stage_list(self, entries: Sequence[Entry]) -> Entries | None:
        """The list that a step takes, int32[STAGES] each; None for one of nothing."""
        if not entries:
            return None
        if self.layer_versions is not None:
            entries = self.layer_versions.entries(entries)
        lists = np.full((len(Entries._fields), STAGES), -1, np.int32)
        lists[:, : len(entries)] = np.array(entries, np.int32).T
        return Entries._make(lists)

    def transfer(self, entries: Sequence[Entry]) -> np.ndarray:
        """Carries out a list of any layers before the next step; int32[STAGES], 1 for each entry
        that was. Waits for the device."""
        self.arena, self.tables, done = self._call(
            ProgramKey("transfer"), self.arena, self.tables, self.stores, self.stage_list(entries)
        )
        return np.asarray(done)

    def assign(self, layer: int, beside: np.ndarray, order: np.ndarray) -> None:
        """Raises ValueError: these steps have no second processor (PlacedRunner)."""
        raise ValueError("these steps have no second processor; name a placement")

    def carried_out(self) -> np.ndarray:
        """As of transfer, for the list that was carried out last between two layers."""
        return np.asarray(self.transfers[-1].done)

    def move_cells(self, moves: Sequence[Move]) -> None:
        """Moves cells within the arena, with what is in them, for the steps to come. No place is
        both left and taken."""
        self.drain()
        for i in range(0, len(moves), MOVES):
            lists = np.full((len(Moves._fields), MOVES), -1, np.int32)
            part = np.array(moves[i : i + MOVES], np.int32)
            lists[:, : len(part)] = part.T
            self.arena, self.tables, _ = self._call(
                ProgramKey("move"), self.arena, self.tables, Moves._make(lists)
            )

    def hand_over(self, moves: Sequence[HandOver]) -> None:
        """Cells go from layer to layer, for what is dispatched next. What is on its way into one
        still comes, and whoever fills the cell next waits for it, or takes its place."""
        for i in range(0, len(moves), HAND_OVERS):
            lists = np.full((len(HandOver._fields), HAND_OVERS), -1, np.int32)
            part = np.array(moves[i : i + HAND_OVERS], np.int32)
            lists[:, : len(part)] = part.T
            self.tables = self._call(ProgramKey("hand_over"), self.tables, HandOvers._make(lists))

    def snapshot(self) -> Callable[[], Residency]:
        """Copies the tables as the steps so far leave them, versions as policies see them; what it
        returns waits for the copy."""
        copy = self._call(ProgramKey("snapshot"), self.tables)
        copy.copy_to_host_async()
        return lambda: self.seen(read_snapshot(np.asarray(copy), self.tables))

    def faults(self) -> list[str]:
        """Broken invariants of arena, tables and store, in words. Waits for the device."""
        self.drain()
        found = self._call(ProgramKey("integrity"), self.arena, self.tables, self.stores)
        counts = np.asarray(found)
        if self.memory is not None and self.store.files:
            tables, arena = jax.tree.map(np.asarray, self.tables), self.memory.view()
            counts = counts.copy()
            for number, source in enumerate(self.store.files.values()):
                counts[-1] += count_damaged(arena, tables, number, source)
        return describe_faults(counts)

    def compiled(self) -> list[jax.stages.Compiled]:
        """The executables so far. Waits for those under way."""
        return [future.result() for future in self._executables.values()]

    def delete(self, *, given: bool = True) -> None:
        """Frees the arena now, and store and parameters, which it was given."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._executables.clear()
        mine = (self.arena, self.tables, self.tokens, self.counts, self.maps)
        mine = *mine, self.state if given else ()
        try:  # what was donated to a copy that failed is gone
            jax.block_until_ready([a for a in jax.tree.leaves(mine) if not a.is_deleted()])
        except jax.errors.JaxRuntimeError as error:  # said when that step was read
            log.info("the last step had failed: %s", error)
        finally:
            if self.memory is not None:
                for failure in self.memory.failures(int(self.memory.token()[1])):
                    log.warning(
                        "expert %d of layer %d could not be read in a step that nobody read: %s",
                        *(failure.expert, failure.layer, failure.message),
                    )
            for array in jax.tree.leaves(mine):
                array.delete()
            if self.queue is not None:
                self.queue.close()
            if self.memory is not None:
                self.memory.close()
            if given:
                self.store.delete()


def _batches(most: int, *lists: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """So many entries of the lists at a time: how many, and int32[lists, most], in which the last
    one repeats."""
    for i in range(0, len(lists[0]), most):
        part = np.array([values[i : i + most] for values in lists], np.int32)
        yield part.shape[1], np.pad(part, ((0, 0), (0, most - part.shape[1])), mode="edge")
