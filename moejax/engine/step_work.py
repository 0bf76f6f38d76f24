"""The life of a step: the work that the scheduler chose, the dispatched step, and its record."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from host_offload.control.step_record import SEEN, PageUse, StepRecord, StepRows
from host_offload.memory.kv_cache import Block
from moejax.requests.request import Request
from moejax.step.experts import Paging
from moejax.step.results import Results
from moejax.step.step_parts import PrefillBatch, StepOutput, StepShapes, empty_prefill
from moejax.step.walk import LayerTransfers
from pallas_kernels.stage import Entries

if TYPE_CHECKING:
    from moejax.step.executor import Executor

_NONE = np.empty(0)


@dataclasses.dataclass(frozen=True)
class PromptChunk:
    """Tokens [start + skip, start + length) of a request; start is a multiple of the chunk size."""

    request: Request
    row: int
    start: int
    skip: int
    length: int
    samples: bool
    """Whether the request's first token is sampled after the chunk's last token."""
    last: bool
    """Whether the prompt ends in this chunk."""
    read: tuple[Block, ...] = ()
    """Blocks from which the state comes; none: the request's own."""
    copy: tuple[Block, ...] = ()
    """Blocks that get a copy of the state after the chunk."""


class Draw(NamedTuple):
    """A token that a step chooses, from the logits of a row."""

    row: int
    request: Request
    words: np.ndarray | None
    """Which tokens may come, as TokenRules.words; None: any."""
    before: tuple[int, ...] = ()
    """Tokens of a draft between the request's own tokens and the one that is chosen."""


class Guess(NamedTuple):
    """A request's next tokens as they may come."""

    tokens: Sequence[int]
    words: Sequence[np.ndarray | None]
    """Which tokens may come after each of them, see Draw."""


@dataclasses.dataclass(eq=False)
class Draft:
    """Tokens of a guess that a step verifies, each in a row of its own."""

    request: Request
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    words: tuple[np.ndarray | None, ...]
    states: tuple[tuple[Block, ...], ...]
    """For each token the blocks that get the state after it; none in models without state."""
    accepted: int = 0
    """How many first tokens proved right, once the step is read."""

    def draws(self) -> list[Draw]:
        """The tokens that the step chooses after each token of the draft."""
        return [
            Draw(row, self.request, words, self.tokens[: i + 1])
            for i, (row, words) in enumerate(zip(self.rows, self.words, strict=True))
        ]


@dataclasses.dataclass(frozen=True)
class ScheduledWork:
    """The next step: `chunks` for a prefill step, else `rows` for a decode step."""

    chunks: tuple[PromptChunk, ...] = ()
    rows: tuple[tuple[int, Request], ...] = ()
    placed: tuple[Request, ...] = ()
    """Requests that got a row since the step before."""
    published: tuple[Block, ...] = ()
    """Blocks that this step writes and that later steps of other requests may read."""
    drafting: int = 0
    """Most tokens of a draft that were looked for; 0: none were."""
    drafts: tuple[Draft, ...] = ()
    """At most one for each of `rows`."""

    def draws(self) -> list[Draw]:
        """The tokens that the step chooses: those of `sampled`, then those after drafts."""
        own = (Draw(row, r, r.rules and r.rules.words) for row, r in self.sampled())
        return [*own, *(draw for draft in self.drafts for draw in draft.draws())]

    def kept_rows(self) -> list[tuple[int, Request]]:
        """Rows of a decode step whose tokens became part of a sequence, ascending: without those of
        rejected drafts, once the step is read."""
        kept = [(row, d.request) for d in self.drafts for row in d.rows[: d.accepted]]
        return sorted([*self.rows, *kept], key=lambda placed: placed[0])

    def rejected_rows(self) -> list[int]:
        """The rows of drafts that are not among `kept_rows`."""
        return [row for draft in self.drafts for row in draft.rows[draft.accepted :]]

    def sampled(self) -> list[tuple[int, Request]]:
        """The requests that get a token, each with its row."""
        if self.rows:
            return list(self.rows)
        return [(chunk.row, chunk.request) for chunk in self.chunks if chunk.samples]

    def requests(self) -> set[Request]:
        return {r for _, r in self.rows} | {c.request for c in self.chunks}


@dataclasses.dataclass(frozen=True)
class Step:
    """A dispatched step whose results have not been read."""

    number: int
    work: ScheduledWork
    output: StepOutput
    results: jax.Array
    """int32: the step's Results, with the tokens that were chosen."""
    logprobs: tuple | None
    dispatched_s: float
    compiled: bool
    """Whether the step is the first of its executable."""
    positions: np.ndarray
    """int32[R]: positions of the decoded tokens, also of drafts; −1 in other rows."""
    stages: Entries | None
    """The step's list of transfers."""
    between: Sequence[LayerTransfers]
    """Transfers between the step's layers."""
    placed: PlacedRows | None
    """The step's tokens, if it has hooks; else, and if it has drafts, None."""

    @property
    def kind(self) -> str:
        return "prefill" if self.work.chunks else "decode"

    def sampled(self) -> list[tuple[int, Request]]:
        """The requests that got a token, each with the row it had."""
        return self.work.sampled()


def prefill_batch(work: ScheduledWork, shapes: StepShapes) -> PrefillBatch:
    """Returns the batch of a prefill step with the work's chunks."""
    prefill = empty_prefill(shapes)._replace(count=np.int32(len(work.chunks)))
    for i, chunk in enumerate(work.chunks):
        request, end = chunk.request, chunk.start + chunk.length
        prefill.tokens[i, : chunk.length] = request.tokens(chunk.start, end)
        prefill.row[i], prefill.start[i] = chunk.row, chunk.start
        prefill.skip[i], prefill.length[i] = chunk.skip, chunk.length
        for pages, blocks in (
            (prefill.read, chunk.read or request.blocks.state),
            (prefill.copy, chunk.copy),
        ):
            if blocks:
                rows: Any = [block.row for block in blocks]
                pages[i] = rows
        if request.targets is not None:
            prefill.targets[i, : chunk.length] = request.targets[chunk.start : end]
        elif request.params.prompt_logprobs is not None:
            following = request.prompt[chunk.start + 1 : end + 1]
            prefill.targets[i, : len(following)] = following
        if chunk.samples:
            prefill.last[chunk.row] = i * shapes.chunk + chunk.length - 1
    return prefill


class PlacedRows(NamedTuple):
    """The tokens of a step, without padding."""

    place: np.ndarray
    """int[N]: index of each token among the step's tokens with padding, ascending."""
    rows: StepRows


def placed_rows(work: ScheduledWork, positions: np.ndarray, shapes: StepShapes) -> PlacedRows:
    """Returns the tokens of the work's step, without those of rejected drafts.

    - `positions`: Step.positions.
    """
    place = _places(work, shapes)
    if work.rows:
        requests, position = [r for _, r in work.kept_rows()], positions[place]
        lengths, phase = [1] * len(place), 1
    else:
        requests, phase = [c.request for c in work.chunks], 0
        lengths = [c.length - c.skip for c in work.chunks]
        before = [c.start - i * shapes.chunk for i, c in enumerate(work.chunks)]
        position = place + np.repeat(before, lengths)
    number = np.array([r.number for r in requests], np.int32)
    user = np.array([-1 if r.session is None else r.session.number for r in requests], np.int32)
    rows = StepRows(
        request=np.repeat(number, lengths),
        user=np.repeat(user, lengths),
        position=position.astype(np.int32),
        phase=np.full(len(place), phase, np.uint8),
        token=np.array(_input_tokens(work, requests, position), np.int32),
        draft_token=np.array([t for d in work.drafts for t in d.tokens[d.accepted :]], np.int32),
    )
    return PlacedRows(place, rows)


def _input_tokens(
    work: ScheduledWork, requests: Sequence[Request], position: np.ndarray
) -> list[int]:
    """Returns the token of each row; −1: its request was aborted before it was known."""
    if not work.rows:
        spans = ((c.request, c.start + c.skip, c.start + c.length) for c in work.chunks)
        return [token for request, *span in spans for token in request.tokens(*span)]
    pairs = zip(requests, position.tolist(), strict=True)
    return [(request.tokens(p, p + 1) or [-1])[0] for request, p in pairs]


def _places(work: ScheduledWork, shapes: StepShapes) -> np.ndarray:
    """Returns PlacedRows.place of the work's step."""
    if work.rows:
        return np.array([row for row, _ in work.kept_rows()])
    chunks = enumerate(work.chunks)
    return np.concatenate([np.arange(c.skip, c.length) + i * shapes.chunk for i, c in chunks])


def routed_ids(step: Step, shapes: StepShapes) -> np.ndarray:
    """Returns StepRecord.ids of a step that was read."""
    place = _places(step.work, shapes) if step.placed is None else step.placed.place
    return np.asarray(step.output.routing.ids).transpose(1, 0, 2)[place].astype(np.int16)


def step_record(
    step: Step,
    runner: Executor,
    results: Results,
    read_s: float,
    touched: Sequence[Request],
    use: PageUse,
    needs: frozenset[str] | None = None,
) -> StepRecord:
    """Makes the record of a step whose results were read.

    - `read_s`: when they were read, by time.perf_counter.
    - `touched`: requests that got tokens from the step or ended with it.
    - `use`: state of KV, queues and link after it.
    - `needs`: fields of an Observation that are wanted, so that others may be left empty; None:
      all, and what only traces have.
    """
    work, output, shapes = step.work, step.output, runner.shapes
    paging, missed = results.paging, results.missed
    # Copied one by one: the step has ended, and traversing a pytree costs more than the copies.
    ids = np.asarray(output.routing.ids)
    place, placed = step.placed or placed_rows(work, step.positions, shapes)
    weights, moved, rejected, draft_ids = _NONE, _NONE, None, None
    if needs is None or "weights" in needs:
        weights = np.asarray(output.routing.weights).transpose(1, 0, 2)[place]
    if needs is None:
        moved = moved_bytes(step, paging, results.demand, runner.link_bytes)
        rejected = rejected_experts(work, ids, missed.shape)
    if needs is None or "draft_ids" in needs:
        draft_ids = ids.transpose(1, 0, 2)[work.rejected_rows()].astype(np.int16)
    if work.rows:
        rows, waves = output.logits.shape[0], 1
    else:
        rows, waves = ids.shape[1], shapes.waves
    arrays = {}
    for name, given in output.arrays._asdict().items():
        if given is not None:
            array = np.asarray(given)
            by_token = array if name == "embedding" else array.swapaxes(0, 1)
            arrays[SEEN[name]] = by_token[place]
    return StepRecord(
        request=placed.request,
        user=placed.user,
        position=placed.position,
        phase=placed.phase,
        ids=ids.transpose(1, 0, 2)[place].astype(np.int16),
        weights=weights,
        number=step.number,
        kind=step.kind,
        start_s=step.dispatched_s,
        read_s=read_s,
        seconds=0.0,
        rows=rows,
        compiled=step.compiled,
        hits=np.asarray(paging.hits),
        fills=np.asarray(paging.fills),
        read_through=np.asarray(paging.read_through),
        waves=np.full(len(missed), waves, np.int16),
        missed=missed,
        bytes=moved,
        use=np.array([*vars(use).values()]),
        finished=tuple(r.number for r in touched if r.finish_reason is not None),
        staged=None if output.staged is None else np.asarray(output.staged),
        placed=output.placed,
        token=placed.token,
        draft_token=placed.draft_token,
        draft_ids=draft_ids,
        rejected=rejected,
        ahead=entries_ahead(output),
        **arrays,
    )


def rejected_experts(work: ScheduledWork, ids: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns StepRecord.rejected of a step that was read.

    - `ids`: int[L, R, k], what all rows chose.
    - `shape`: layers and experts.
    """
    found = np.zeros(shape, bool)
    if rows := work.rejected_rows():
        chosen = ids[:, rows].reshape(len(ids), -1)
        found[np.arange(len(ids))[:, None], chosen] = True
    return found


def entries_ahead(output: StepOutput) -> np.ndarray | None:
    """Returns int32[n, 4], the transfers that the step chose itself (StepRecord.ahead)."""
    if output.ahead is None:
        return None
    entries = np.asarray(output.ahead).swapaxes(1, 2).reshape(-1, 4)
    return entries[entries[:, 0] >= 0]


def moved_bytes(
    step: Step, paging: Paging, demand: np.ndarray | None, link_bytes: Sequence[int]
) -> np.ndarray:
    """Returns int64[3], bytes over the link: of fills, of experts read through, ahead of need.

    - `paging`, `demand`: fields of Results.
    - `link_bytes`: bytes of an expert over the link, by version number.
    """
    lists, ahead = list(step.between), 0
    if step.stages is not None and step.output.staged is not None:
        lists.append(LayerTransfers(step.stages, step.output.staged))
    for entries, done in lists:
        carried_out = np.asarray(done) > 0
        ahead += sum(link_bytes[v] for v in np.asarray(entries.version)[carried_out].tolist())
    if (chosen := entries_ahead(step.output)) is not None:
        ahead += link_bytes[0] * int(np.sum(chosen[:, 3]))
    fills, through = int(np.sum(paging.fills)), int(np.sum(paging.read_through))
    return np.array([*demand_bytes(fills, through, demand, link_bytes), ahead], np.int64)


def demand_bytes(
    fills: int, read_through: int, demand: np.ndarray | None, record_bytes: Sequence[int]
) -> tuple[int, int]:
    """Returns the bytes over the link of (fills, experts read through) of a step.

    - `demand`: Results.demand, None with one version.
    - `record_bytes`: bytes of an expert, by version number.
    """
    if demand is None:
        return fills * record_bytes[0], read_through * record_bytes[0]
    by_version = np.sum(demand, axis=0, dtype=np.int64) @ np.asarray(record_bytes, np.int64)
    return int(by_version[0]), int(by_version[1])
