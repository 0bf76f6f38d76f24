"""Inputs and outputs of a step, and the parts of a step that both drivers share: its tokens, a
layer's routing, its output."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from host_offload.control.window import PACKED_VERSION
from host_offload.memory.layout import SlotLayout
from host_offload.queue.transfer import QueueSpec
from moejax.errors import UserError
from moejax.models.attention.kind import Rows, StateKind, Tokens
from moejax.models.model_config import ModelConfig
from moejax.requests.sampling_params import MAX_LOGPROBS
from moejax.step.buddies import Buddies, StandIns, stand_ins, substitute
from moejax.step.experts import StepContext, missed_bits
from moejax.step.results import Results, ResultShape
from moejax.step.sampler import update_rows
from pallas_kernels import Ops
from pallas_kernels.option_text import unknown
from pallas_kernels.paged_attention import (
    Chunks,
    decode_attention,
    prefill_attention,
    write_and_attend,
)
from pallas_kernels.records import RecordFormat
from pallas_kernels.records.versions import Formats
from pallas_kernels.sample import choose_likeliest, greedy, logprobs
from pallas_kernels.state_pages import Sequences

if TYPE_CHECKING:
    from moejax.models.layers import Decoder, LayerStack

DECODE_TILE = 16
"""Rows of one matrix product in decode. More rows make more tiles, not larger ones, so a row's bits
do not depend on the number of rows."""


def sums_in_one_order(ops: Ops) -> bool:
    """Whether every product with weights is a native CPU op. Native ops sum up a row in one order
    for any number of rows, so a step can compute only the rows in use."""
    return ops.linear == ops.head_linear == ops.expert_ffn == "cpu"


def rows_of_product(ops: Ops, most: int) -> int:
    """Returns how many rows one matrix product has: `most` where XLA computes one."""
    return 1 if sums_in_one_order(ops) else most


ARENA_OPS = ("paged_attention", "fill", "expert_ffn", "stage", "move")
"""The ops of every model's steps that read or write the arena."""


def arena_ops(config: ModelConfig) -> tuple[str, ...]:
    """Returns ARENA_OPS and the ops that write pages of this model's kinds of attention."""
    kinds = config.attention_kinds
    writes = [kind.ops if isinstance(kind, StateKind) else kind.ops[:1] for kind in kinds]
    return *dict.fromkeys(itertools.chain(*writes)), *ARENA_OPS


Leaf = Any
"""A jax or numpy array, or a jax.ShapeDtypeStruct while a step is lowered."""


@dataclasses.dataclass(frozen=True)
class StepShapes:
    """The start-up shapes. With the model they decide every bit of the outputs."""

    rows: int
    """Decode rows R: `max_num_seqs`, above DECODE_TILE rounded up to whole tiles."""
    chunk: int
    """Prompt tokens computed at once, C; chunks begin at multiples of C in their sequence."""
    prefill_chunks: int
    """Chunks of the largest prefill step, N."""
    blocks: int
    """Pages of the longest sequence, B."""
    state_pages: int = 0
    """Pages of a sequence's state, P."""
    read_pages: int = 0
    """P, in models with state if decode rows of drafts go on from the state of another row."""
    waves: int = 1
    """Passes over a layer's experts in prefill."""
    buckets: tuple[int, ...] = ()
    """Row counts that decode is compiled for, ascending and ending with R; empty: R alone."""
    prefills: tuple[int, ...] = ()
    """Chunk counts that prefill is compiled for, ascending and ending with N; empty: N alone."""
    contexts: tuple[int, ...] = ()
    """Most pages of a sequence that decode is compiled for, ascending and ending with B; empty: B
    alone."""

    def bucket(self, rows: int) -> int:
        """Returns the smallest compiled row count of decode that holds so many rows."""
        return next((b for b in self.buckets if b >= rows), self.rows)

    def prefill(self, chunks: int) -> int:
        """Returns the smallest compiled chunk count of prefill that holds so many chunks."""
        return next((b for b in self.prefills if b >= chunks), self.prefill_chunks)

    def context(self, pages: int) -> int:
        """Returns the smallest compiled page count of decode that is at least `pages`."""
        return next((b for b in self.contexts if b >= pages), self.blocks)


@dataclasses.dataclass(frozen=True)
class SecondProcessor:
    """A processor that computes missed experts in host memory, beside the device that has the arena
    (docs/explanation/prescope.md)."""

    implementation: str
    """The implementation of expert_ffn on it."""
    same_bits: bool = True
    """Its results have the device's bits; if not, outputs depend on the processor that computed
    each expert."""
    defer: int = 0
    """Experts of a token, those of least weight, whose rows it adds a layer later (Processor)."""

    @property
    def keeps_outputs(self) -> bool:
        """Whether outputs are the same wherever an expert is computed."""
        return self.same_bits and not self.defer


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """The settings that compiled steps are made from. With the machine they decide the costs."""

    device_kind: str
    runtime: str
    """Version of the device's platform."""
    driver: str
    ops: Ops
    config: ModelConfig
    dtype: str
    layout: SlotLayout
    shapes: StepShapes
    formats: Formats | None = None
    """The formats of each version, by version number; None: dense alone."""
    in_place: bool = False
    """Every expert is resident in the store, which the device reads like its own memory, and none
    has a cell."""
    store: str = "memory"
    """Where experts without a cell are: "memory", or "file"."""
    queue: QueueSpec | None = None
    """The queue that brings records into cells beside compute; None: ops of the step copy them."""
    trace_arrays: frozenset[str] = frozenset()
    """The TRACE_ARRAYS that every step returns too. Any of them changes the executables."""
    tiers: str = ""
    """How packed residents are used: "flux", decoded into the window; "flux-direct", computed in
    their packed form; empty: no resident is packed."""

    second: SecondProcessor | None = None
    """The processor that computes missed experts beside the device; None without one."""
    cache_aware: float | None = None
    """How much a missing expert's score is lowered where routers choose (`cache_aware_routing`), so
    that outputs depend on residency; None: scores ignore residency."""
    buddies: Buddies | None = None
    """Residents that stand in for missing experts, another form of `cache_aware_routing`; None:
    there are none."""

    drafts: bool = False
    """Whether rows of a decode step may be of one sequence (speculative decoding)."""
    hidden: bool = False
    """Whether steps return hidden states (StepOutput.hidden)."""

    @property
    def awaits_experts(self) -> bool:
        """Whether only native ops read the store: they wait for records that are still being read
        into it."""
        native = self.owned and self.ops.fill == self.ops.expert_ffn == "cpu"
        paged = self.driver == "device" and self.queue is None and self.second is None
        return self.in_place or (native and paged)

    @property
    def favours_residents(self) -> bool:
        """Whether routers look at the tables. They need not if every expert is resident."""
        return self.cache_aware_routing is not None and not self.in_place

    @property
    def cache_aware_routing(self) -> float | str | None:
        """The option of this name; None: routing ignores residency."""
        return self.cache_aware if self.buddies is None else self.buddies.said

    @property
    def resident_steps(self) -> bool:
        """Whether there are decode steps without plans, for when every expert is in a cell of its
        own. They save the launches of plan kernels, and need that only the host can evict."""
        one = self.formats is None or len(self.formats) == 1
        plain = self.driver == "device" and one and self.queue is None
        return (
            self.ops.skips_plans
            and plain
            and not (self.in_place or self.trace_arrays or self.cache_aware or self.buddies)
            and not self.config.routes_apart
        )

    @property
    def cells(self) -> tuple[RecordFormat, ...]:
        """The format of records in cells, by version number."""
        if self.formats is None:
            return self.layout.records
        return tuple(version.cell for version in self.formats)

    @property
    def packed(self) -> RecordFormat | None:
        """The format of packed residents that are decoded into the window; None without any."""
        if self.tiers != "flux" or self.formats is None:
            return None
        return self.formats[PACKED_VERSION].cell

    @property
    def window(self) -> bool:
        """Whether experts stream through a window of two layers (driver="stream")."""
        return self.driver == "stream"

    @property
    def owned(self) -> bool:
        """Whether the library of native CPU ops owns the arena, as it does if every op that touches
        the arena is native. Otherwise the arena is an array, donated from step to step."""
        return not self.foreign_ops

    @property
    def foreign_ops(self) -> dict[str, str]:
        """The implementation of each op that touches the arena and is not native, by op."""
        ops = {op: getattr(self.ops, op) for op in arena_ops(self.config)}
        return {op: name for op, name in ops.items() if name != "cpu"}

    @property
    def separate(self) -> bool:
        """Whether each expert is a pinned array of its own, which jax's copies bring beside compute
        when the host driver asks. This is the queue if the library does not own the arena."""
        return self.queue is not None and not self.owned


class PageTables(NamedTuple):
    """The KV rows of the pages of the sequences in each row."""

    blocks: jax.Array
    """int32[R, B]; of several groups of pages [G, R, B]."""
    state: jax.Array
    """int32[R, P]: pages of the sequence's state; P = 0 in models without state."""
    read: jax.Array | None = None
    """int32[R, P]: pages from which a decode row's state comes; None: these."""


class PrefillBatch(NamedTuple):
    """Prompt chunks of one prefill step, int32. A sequence's chunks come in ascending order."""

    tokens: Leaf
    """[N, C]: token ids."""
    row: Leaf
    """[N]: the sequence's row in the block table."""
    start: Leaf
    """[N]: position of the chunk's first token, a multiple of C."""
    skip: Leaf
    """[N]: leading tokens of the chunk whose KV is in the pages already. They are computed, but
    their KV is not written."""
    length: Leaf
    """[N]: tokens in the chunk, skipped ones included."""
    count: Leaf
    """Chunks in use."""
    last: Leaf
    """[R]: index of a sequence's last prompt token among the step's N·C tokens; −1: that token is
    not in this step."""
    targets: Leaf
    """[N, C]: tokens whose log-probability scoring asks for; unused otherwise."""
    read: Leaf
    """[N, P]: KV rows of the pages from which a chunk's state comes."""
    copy: Leaf
    """[N, P]: KV rows of pages that get a copy of the state after the chunk; −1: none do."""

    def of_chunks(self, chunks: int) -> PrefillBatch:
        """Returns the first `chunks` chunks, which must hold all tokens."""
        names = ("tokens", "row", "start", "skip", "length", "targets", "read", "copy")
        return self._replace(**{name: getattr(self, name)[:chunks] for name in names})


def empty_prefill(shapes: StepShapes) -> PrefillBatch:
    """Returns a batch without chunks, in numpy arrays to write to."""
    chunks, size = shapes.prefill_chunks, shapes.chunk
    return PrefillBatch(
        tokens=np.zeros((chunks, size), np.int32),
        row=np.zeros(chunks, np.int32),
        start=np.zeros(chunks, np.int32),
        skip=np.zeros(chunks, np.int32),
        length=np.zeros(chunks, np.int32),
        count=np.int32(0),
        last=np.full(shapes.rows, -1, np.int32),
        targets=np.zeros((chunks, size), np.int32),
        read=np.zeros((chunks, shapes.state_pages), np.int32),
        copy=np.full((chunks, shapes.state_pages), -1, np.int32),
    )


class Routing(NamedTuple):
    """Expert ids (ascending for each token, E for padding) and weights of every MoE layer,
    [L, T, K]. A step returns its routing, and may be given a routing to use."""

    ids: Leaf
    weights: Leaf


class PromptLogprobs(NamedTuple):
    """Log-probabilities of a prefill step's targets, by its raw logits: what
    pallas_kernels.sample.logprobs returns, with the n likeliest tokens."""

    chosen: Leaf
    """float32[N, C]: log-probabilities of the targets."""
    rank: Leaf
    """int32[N, C]: 1 for the likeliest."""
    top_ids: Leaf
    """int32[N, C, n]."""
    top: Leaf
    """float32[N, C, n]."""


class TraceArrays(NamedTuple):
    """Arrays that a step returns when asked, else None. They are float16, so values beyond ±65504
    are infinite. The names are those of an Observation's fields."""

    probs: Any = None
    """[L, T, E]: the router's scores of all experts, from which it chooses."""
    gate_input: Any = None
    """[L, T, D]: the router's input, the normalised hidden state."""
    embedding: Any = None
    """[T, D]: embeddings of the step's tokens."""


TRACE_ARRAYS = frozenset(TraceArrays._fields)
RECORDED_ARRAYS = TRACE_ARRAYS | {"token"}
"""What a trace has on request. Input tokens are known without the step."""


def check_trace_arrays(names: Iterable[str]) -> frozenset[str]:
    """Returns the names as a set. Raises UserError for a name that is none of RECORDED_ARRAYS."""
    given = frozenset(names)
    for name in sorted(given - RECORDED_ARRAYS):
        raise UserError(unknown("array of a trace", name, sorted(RECORDED_ARRAYS)))
    return given


class StepOutput(NamedTuple):
    logits: jax.Array
    """float32[R, V]; rows without a sequence (prefill: without a finished prompt) are
    meaningless."""
    tokens: jax.Array
    """int32[R]: the current tokens, after the greedy choice of every row that gets a token."""
    results: jax.Array
    """int32[shape.size]: the Results that the host reads of every step, `tokens` among them."""
    shape: ResultShape
    routing: Routing
    scores: jax.Array | PromptLogprobs | None
    """float32[N, C], log-probabilities of the targets, of a score step; PromptLogprobs of a
    prompt_logprobs step; else None."""
    staged: jax.Array | None
    """int32[S]: 1 for each entry of the stage list that was carried out."""
    arrays: TraceArrays = TraceArrays()
    placed: np.ndarray | None = None
    """bool[L, E]: experts that a second processor computed; None without one."""
    ahead: jax.Array | None = None
    """int32[·, 4, S]: transfers that the step chose itself (map_search.Lookahead.fetch)."""
    hidden: jax.Array | None = None
    """[T, D]: what the last layer gave for each token, before the final norm, if asked."""

    def read(self) -> Results:
        """Returns the results on the host. Waits for the step."""
        return Results(self.shape, np.asarray(self.results))


class LayerTrace(NamedTuple):
    """Routing, counts and arrays of one or several MoE layers."""

    ids: Leaf
    """int32[..., T, K]."""
    weights: Leaf
    """float32[..., T, K]."""
    counts: Leaf
    """int32[..., counts_size]: see experts.page_and_compute."""
    arrays: TraceArrays = TraceArrays()
    """Without `embedding`, which no single layer has."""

    @classmethod
    def unpacked(cls, rows: jax.Array, arrays: TraceArrays, tokens: int, k: int) -> LayerTrace:
        """Takes records of layers apart.

        - `rows`: int32[L, record_size].
        - `k`: experts a token.
        """
        ids, weights, counts = jnp.split(rows, (tokens * k, 2 * tokens * k), axis=1)
        shape = rows.shape[0], tokens, k
        weights = lax.bitcast_convert_type(weights, jnp.float32)
        return cls(ids.reshape(shape), weights.reshape(shape), counts, arrays)


def step_tokens(batch: tuple, context: StepContext) -> tuple[jax.Array, Tokens]:
    """Returns the ids int32[T] of a step's tokens, and their places.

    - `batch`: see device_step.
    """
    if isinstance(batch[0], PrefillBatch):
        prefill, tables, _ = batch
        ids, places = prefill.tokens.reshape(-1), _prefill_tokens(prefill, tables, context)
    else:
        tokens, positions, tables = batch
        ids = tokens[: positions.shape[0]]
        places = decode_tokens(positions, tables, context)
    return ids, places._replace(ids=ids)


def decode_tokens(positions: jax.Array, tables: PageTables, context: StepContext) -> Tokens:
    """Returns the tokens of a decode step, whose arguments device_step describes."""
    block_table, sequences = tables.blocks, None
    if tables.state.shape[1]:
        new = (positions >= 0).astype(jnp.int32)
        runs = positions, jnp.zeros_like(new), new, _rows_in_use(positions >= 0)
        sequences = Sequences(tables.state, *runs, tables.read)
    valid, row_tile = positions >= 0, context.row_tile
    tiles = jnp.int32(1)  # one tile is in use, or there is no step
    if positions.shape[0] > row_tile:
        tiles = (_rows_in_use(valid) + row_tile - 1) // row_tile
    several = block_table.ndim == 3
    rows = {"lengths": positions + 1} | ({} if several else {"block_table": block_table})
    # Rows of one sequence read each other's keys, so that all are written before any is read.
    both = None if context.drafts else functools.partial(write_and_attend, **rows)
    return Tokens(
        positions=positions,
        valid=valid,
        pages=_pages(block_table, positions, valid, context.page),
        tiles=tiles,
        row_tile=row_tile,
        attention=functools.partial(decode_attention, **rows),
        write_and_attend=both,
        block_tables=block_table if several else None,
        sequences=sequences,
        in_chunks=functools.partial(_decode_in_chunks, positions, context.page.block_size),
        rows=Rows(
            block_table,
            jnp.maximum(positions, 0),
            jnp.zeros_like(positions),
            valid.astype(jnp.int32),
            _rows_in_use(valid),
        ),
    )


def _prefill_tokens(prefill: PrefillBatch, tables: PageTables, context: StepContext) -> Tokens:
    block_table, sequences = tables.blocks, None
    if tables.state.shape[1]:
        runs = prefill.start, prefill.skip, prefill.length, prefill.count
        sequences = Sequences(tables.state[prefill.row], *runs, prefill.read, prefill.copy)
    chunks, size = prefill.tokens.shape
    offset = jnp.arange(size)
    positions = (prefill.start[:, None] + offset).reshape(-1)
    in_use = jnp.arange(chunks) < prefill.count
    # Tokens to skip go through the layers, but no expert is fetched for them.
    new = (offset >= prefill.skip[:, None]) & (offset < prefill.length[:, None])
    valid = (new & in_use[:, None]).reshape(-1)
    tiles = prefill.count
    if context.row_tile == 1:  # also tokens of a prefix, whose rows come first
        tiles = _rows_in_use(valid)
    of_tokens = jnp.repeat(block_table[..., prefill.row, :], size, axis=-2)
    several = block_table.ndim == 3
    rows = {} if several else {"block_table": block_table}
    return Tokens(
        positions=positions,
        valid=valid,
        pages=_pages(of_tokens, positions, valid, context.page),
        tiles=tiles,
        row_tile=context.row_tile,
        attention=functools.partial(
            prefill_attention,
            chunks=Chunks(prefill.row, prefill.start, prefill.length, prefill.count),
            **rows,
        ),
        block_tables=block_table if several else None,
        sequences=sequences,
        in_chunks=functools.partial(_prefill_in_chunks, prefill, context.page.block_size),
        rows=Rows(
            block_table[..., prefill.row, :],
            prefill.start,
            prefill.skip,
            prefill.length,
            prefill.count,
        ),
    )


def _decode_in_chunks(positions, block_size, block_table, chunk):
    """Returns attention of decode to each query's own chunk: it counts positions from the chunk's
    beginning, in a block table that begins there."""
    first = jnp.maximum(positions, 0) // chunk * chunk
    table = _blocks_from(block_table, first // block_size, chunk // block_size)
    return functools.partial(decode_attention, block_table=table, lengths=positions - first + 1)


def _prefill_in_chunks(prefill, block_size, block_table, chunk):
    """Returns, as _decode_in_chunks, attention of prefill. Every prompt chunk lies in one chunk."""
    first = prefill.start // chunk * chunk
    rows = block_table[prefill.row]
    table = _blocks_from(rows, first // block_size, chunk // block_size)
    row = jnp.arange(len(first), dtype=jnp.int32)
    chunks = Chunks(row, prefill.start - first, prefill.length, prefill.count)
    return functools.partial(prefill_attention, block_table=table, chunks=chunks)


def _blocks_from(block_table, first, count):
    """Returns int32[R, ·], at most `count` entries of each row from entry first[R] on."""
    columns = jnp.arange(min(count, block_table.shape[1]), dtype=jnp.int32)
    return jnp.take_along_axis(block_table, first[:, None] + columns, axis=1, mode="clip")


def favour_residents(
    address: jax.Array, layer: jax.Array, context: StepContext
) -> jax.Array | StandIns | None:
    """Returns float32[E], added to the scores by which a layer chooses its experts: 0 for experts
    with a cell, −cache_aware for the others; or the layer's StandIns. None if routing ignores
    residency.

    Missing experts lose, rather than residents gain, so that the scores have the bits of full
    residency if no expert is missing. An expert loses its place only to an expert whose score is at
    most cache_aware lower (unless routers also choose among groups).

    - `address`: int32[L, E], of the tables.
    """
    if context.buddies is not None:
        return stand_ins(context.buddies, address, layer)
    if context.cache_aware is None:
        return None
    return jnp.where(address[layer] < 0, jnp.float32(-context.cache_aware), jnp.float32(0))


def route_layer(
    stack: LayerStack,
    i: jax.Array,
    x: jax.Array,
    tokens: Tokens,
    forced: Routing | None,
    favour: jax.Array | StandIns | None = None,
    squares: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Routes a layer by LayerStack.route, or by the forced routing where the router's ids are not
    padding.

    - `favour`: result of favour_residents.
    - `squares`: result of LayerStack.attend.
    """
    scores = None if isinstance(favour, StandIns) else favour
    x, normed, ids, weights = stack.route(i, x, tokens, scores, squares)
    if isinstance(favour, StandIns):
        ids, weights = substitute(ids, weights, favour)
    if forced is not None:
        layer = stack.first_moe_layer + i
        ids, weights = _force_routing(forced, layer, ids, stack.config.num_experts)
    return x, normed, ids, weights


def layer_arrays(
    stack: LayerStack, i: jax.Array, normed: jax.Array, tokens: Tokens, wanted: frozenset[str]
) -> TraceArrays:
    """Returns the wanted arrays of a layer's routing.

    The scores are computed a second time, behind the barrier before the experts. So the routing is
    compiled as without trace arrays, and has the same bits.

    - `normed`: [T, D], input of the router.
    """
    probs = gate_input = None
    with jax.named_scope("observe"):
        if "probs" in wanted:
            scores = stack.router_scores(i, normed, tokens)
            probs = scores[:, : stack.config.num_experts].astype(jnp.float16)
        if "gate_input" in wanted:
            gate_input = normed.astype(jnp.float16)
    return TraceArrays(probs, gate_input)


def embedding_array(x: jax.Array, wanted: frozenset[str]) -> jax.Array | None:
    """Returns the embedded tokens x [T, D] as float16 if "embedding" is wanted, else None."""
    return x.astype(jnp.float16) if "embedding" in wanted else None


def step_output(
    model: Decoder,
    x: jax.Array,
    batch: tuple,
    trace: LayerTrace,
    staged: jax.Array | None,
    kind: str,
    shape: ResultShape,
    writes: tuple[jax.Array, ...] = (),
) -> StepOutput:
    """Computes logits, tokens, scores and results of a step.

    - `x`: [T, D], after the last layer.
    - `batch`, `kind`: see device_step.
    - `trace`: of all MoE layers.
    - `staged`, `shape`: fields of the output.
    - `writes`: uint32[2], like an owned arena's token after all its writes; empty if the results
      need no writes.
    """
    prefill = batch[0] if isinstance(batch[0], PrefillBatch) else None
    ends = x if prefill is None else x[jnp.maximum(prefill.last, 0)]
    logits = model.logits(ends, *_logit_rows(model, ends, batch, prefill))
    read, scores = _TARGETS.get(kind), None
    if prefill is not None and read is not None:
        scores = read(model, x.reshape(*prefill.tokens.shape, -1), prefill)
    missed_routes = _missed_routes(trace.ids, trace.counts, model.config.num_experts)
    if prefill is not None:
        missed_routes = jnp.sum(missed_routes.reshape(prefill.tokens.shape), axis=1)
    tokens = _greedy_tokens(model, logits, batch, prefill)
    return StepOutput(
        logits=logits,
        tokens=tokens,
        results=shape.pack(tokens, missed_routes, trace.counts, _writes(writes)),
        shape=shape,
        routing=Routing(trace.ids, trace.weights),
        scores=scores,
        staged=staged,
        arrays=trace.arrays,
    )


def _writes(tokens: tuple[jax.Array, ...]) -> jax.Array:
    """Returns Results.writes as int32[1] of the same bits."""
    if not tokens:
        return jnp.zeros(1, jnp.int32)
    return lax.bitcast_convert_type(tokens[0][1:], jnp.int32)


def _greedy_tokens(model, logits, batch, prefill):
    """Returns the current tokens int32[R] after the greedy choice of the rows that get a token."""
    current = batch[0] if prefill is None else batch[2]
    update = batch[1] >= 0 if prefill is None else prefill.last >= 0
    # Behind a barrier, so that XLA does not fuse the choice into the computation of the logits.
    logits = lax.optimization_barrier(logits)
    if model.ops.sample == "cpu":  # XLA passes a row six times, in turn
        wanted = update[: logits.shape[0]]  # a walk of layers has all rows
        return choose_likeliest(logits, current, wanted, implementation="cpu")
    return update_rows(greedy, logits, current, update, by_row=sums_in_one_order(model.ops))


def _logit_rows(model, ends, batch, prefill):
    """Returns (rows of one product of the head, products needed; None: all)."""
    if prefill is None and sums_in_one_order(model.ops):
        return 1, _rows_in_use(batch[1] >= 0)
    return min(DECODE_TILE, ends.shape[0]), None


def _rows_in_use(valid):
    """Returns the number, int32, of first rows of a decode step that hold all its tokens."""
    return jnp.max(jnp.where(valid, jnp.arange(valid.shape[0]) + 1, 0))


def _missed_routes(ids, counts, experts):
    """Counts each token's missing experts.

    - `ids`: [L, T, K], the routed experts.
    - `counts`: [L, counts_size], with a bit for each missing expert.

    Returns int32[T].
    """
    # Padding has the id E, which is not missing.
    missed = jnp.pad(missed_bits(counts, experts), ((0, 0), (0, 1)))
    layer = jnp.arange(ids.shape[0])[:, None, None]
    return jnp.sum(missed[layer, ids], axis=(0, 2), dtype=jnp.int32)


def _force_routing(forced, layer, routed, experts):
    """Returns the forced routing of a layer, padded where the router's ids [T, K] are padding."""
    # The ids must depend on the router's, and so on attention: if plan and fill could run before
    # attention has read the arena, XLA would copy the arena (seen on CPU).
    padding = routed == experts
    ids, weights = forced.ids[layer], forced.weights[layer]
    return jnp.where(padding, experts, ids), jnp.where(padding, 0.0, weights)


def _pages(block_table, positions, valid, page):
    """Returns the KV row [T] of each token's page; −1 for tokens that are not valid.

    - `block_table`: [T, B], or [G, T, B] of several groups, whose result is [G, T].
    """
    block = (jnp.maximum(positions, 0) // page.block_size)[:, None]
    if block_table.ndim == 3:
        block = block[None]
    pages = jnp.take_along_axis(block_table, block, axis=-1, mode="clip")[..., 0]
    return jnp.where(valid, pages, -1)


def _score(model, x, prefill):
    """Returns log p(target) at every position of the prefill step, computed chunk by chunk."""

    def part(c, scores):
        logp = jax.nn.log_softmax(model.logits(x[c], x.shape[1]), axis=-1)
        found = jnp.take_along_axis(logp, prefill.targets[c][:, None], axis=1)[:, 0]
        return scores.at[c].set(found)

    return lax.fori_loop(0, prefill.count, part, jnp.zeros(prefill.tokens.shape, jnp.float32))


def _prompt_logprobs(model, x, prefill):
    """Returns PromptLogprobs at every position of the prefill step, computed chunk by chunk."""
    n = min(MAX_LOGPROBS, model.config.vocab_size)

    def part(c, found):
        logits = model.logits(x[c], x.shape[1])
        of_chunk = logprobs(logits, prefill.targets[c], n, implementation=model.ops.sample)
        return PromptLogprobs(*(a.at[c].set(b) for a, b in zip(found, of_chunk, strict=True)))

    shapes = [(*prefill.tokens.shape, *last) for last in ((), (), (n,), (n,))]
    dtypes = (jnp.float32, jnp.int32, jnp.int32, jnp.float32)
    return lax.fori_loop(0, prefill.count, part, PromptLogprobs(*map(jnp.zeros, shapes, dtypes)))


_TARGETS = {"score": _score, "prompt_logprobs": _prompt_logprobs}
"""The function that computes StepOutput.scores, by kind of prefill step."""
