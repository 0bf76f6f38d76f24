"""Drafts by the layer of the checkpoint that predicts a further token (multi-token prediction)."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from host_offload.memory.arena import OutOfPages
from host_offload.memory.kv_cache import Block
from moejax.engine.drafts import Drafts
from moejax.engine.loop import Engine
from moejax.engine.sampling import sampling_of
from moejax.engine.step_work import Step
from moejax.requests.request import Request
from moejax.step.step_parts import empty_prefill
from pallas_kernels.rms_norm import rms_norm


@functools.partial(jax.jit, static_argnums=(2, 3))
def _normalise(x: jax.Array, weight: jax.Array, eps: float, offset: int) -> jax.Array:
    """The model's norm of [T, D], by a weight [D] that is stored less `offset`."""
    return rms_norm(x, (weight + offset)[None], 0, eps).astype(x.dtype)


@dataclasses.dataclass(eq=False)
class _Sequence:
    """What the layer knows of a request. It counts positions from the first hidden state that it
    was given, since what the model found in its cache was not computed. Rotary positions are
    relative, so this only shortens what attention sees."""

    first: int
    """Position of the model's first hidden state."""
    done: int = 0
    """Positions whose keys and values are in the blocks."""
    waiting: list[np.ndarray] = dataclasses.field(default_factory=list)
    """Hidden states [D] of the positions that follow."""
    blocks: list[Block] = dataclasses.field(default_factory=list)

    @property
    def end(self) -> int:
        """The model's position whose hidden state comes next."""
        return self.first + self.done + len(self.waiting)

    def go_back(self, position: int) -> None:
        """Forgets hidden states from the model's `position` on, which come again."""
        kept = max(position - self.first, 0)
        del self.waiting[max(kept - self.done, 0) :]
        self.done = min(self.done, kept)


class _Row(NamedTuple):
    """A row of a decode step of the layer."""

    request: Request
    sequence: _Sequence
    position: int
    """In the sequence."""
    token: int
    """The token after the model's position."""
    hidden: np.ndarray


class PredictedDrafts(Drafts):
    """Drafts by the checkpoint's own layer, which reads the model's hidden states. It draws by the
    request's seed, as ModelDrafts does.

    Prompts are read in chunks as their hidden states come, the rest when a draft is asked for. A
    draft of several tokens reads the layer's own hidden states.

    - `engine`: of the layer alone (moejax.models.next_token). Its steps are called here, and its
      scheduler has no request.
    """

    method = "mtp"

    def __init__(self, most: int, engine: Engine, *, adaptive: bool = True):
        super().__init__(most, adaptive=adaptive)
        self.engine, self._runner = engine, engine.runner
        self._cache = engine.scheduler.cache
        self._sequences: OrderedDict[Request, _Sequence] = OrderedDict()
        """The longest unused first."""
        self._hidden: dict[int, jax.Array] = {}
        """Step → what it gives the layer, until it is observed."""

    # ---- what the model computed

    def after_dispatch(self, step: Step) -> None:
        assert step.output.hidden is not None
        config, weight = self._runner.config, self._runner.params["model_norm"]
        offset = int(config.unit_offset_norms)
        hidden = _normalise(step.output.hidden, weight, config.rms_norm_eps, offset)
        hidden.copy_to_host_async()
        # A step that could not be read was not observed.
        kept = {number: h for number, h in self._hidden.items() if number == step.number - 1}
        self._hidden = kept | {step.number: hidden}

    def observe(self, step: Step) -> None:
        if (found := self._hidden.pop(step.number, None)) is None:  # drafts came after its dispatch
            return
        hidden = np.asarray(found)
        kept = step.work.kept_rows()
        for row, request in sorted(kept, key=lambda placed: step.positions[placed[0]]):
            self._take(request, int(step.positions[row]), hidden[row : row + 1])
        size = self._runner.shapes.chunk  # the model's too
        for i, chunk in enumerate(step.work.chunks):
            rows = hidden[i * size + chunk.skip : i * size + chunk.length]
            self._take(chunk.request, chunk.start + chunk.skip, rows)
        for request in [r for r in self._sequences if r.finish_reason]:
            self._drop(request)

    def _take(self, request: Request, position: int, hidden: np.ndarray) -> None:
        """Takes hidden states of the model from a position on."""
        if request.finish_reason is not None or request.targets is not None:
            return
        sequence = self._sequences.get(request)
        if sequence is None or not sequence.first <= position <= sequence.end:
            self._drop(request)
            sequence = self._sequences[request] = _Sequence(position)
        self._sequences.move_to_end(request)
        sequence.go_back(position)
        sequence.waiting += [row.copy() for row in hidden]  # a view would keep the whole step
        tokens, chunk = self.histories.tokens(request), self._runner.shapes.chunk
        # The token after the last position may not be known yet.
        while (whole := chunk - sequence.done % chunk) <= len(sequence.waiting) and (
            sequence.first + sequence.done + whole < len(tokens)
        ):
            if not self._prefill(request, sequence, tokens, whole):
                return

    def _drop(self, request: Request) -> None:
        if (sequence := self._sequences.pop(request, None)) is not None:
            self._cache.release(sequence.blocks)

    def _reserve(self, request: Request, sequence: _Sequence, positions: int) -> bool:
        """Gives a sequence pages for so many positions, those of the longest unused if none is
        free. Returns whether there are any; without, the sequence is dropped, and begins anew with
        the next hidden state."""
        if positions > self.engine.scheduler.max_model_len:
            self._drop(request)
            return False
        size = self._cache.arena.layout.page.block_size
        count = -(-positions // size) - len(sequence.blocks)
        while count > 0:
            try:
                sequence.blocks += self._cache.allocate(count)
                break
            except OutOfPages:
                oldest = next(iter(self._sequences))
                self._drop(oldest)
                if oldest is request:
                    return False
        return True

    # ---- what the layer computes

    def propose(self, asked: Mapping[Request, int], rows: int) -> Mapping[Request, Sequence[int]]:
        share = -(-rows // max(len(asked), 1))
        drafts: dict[Request, list[int]] = {}
        last: dict[Request, _Row] = {}
        read: list[_Row] = []
        for request, most in asked.items():
            tokens = self.histories.tokens(request)
            sequence, count = self._sequences.get(request), min(most, share)
            # Without hidden states up to the last token, such as after a step that failed, there is
            # no draft.
            if sequence is None or not sequence.waiting or sequence.end != len(tokens) - 1:
                continue
            self._sequences.move_to_end(request)
            needed = sequence.end - sequence.first + count
            if count < 1 or not self._reserve(request, sequence, needed):
                continue
            ahead = len(sequence.waiting) - 1
            if ahead > self.most and not self._prefill(request, sequence, tokens, ahead):
                continue
            drafts[request] = []
        for request in drafts:
            tokens = self.histories.tokens(request)
            if (sequence := self._sequences.get(request)) is None:  # another one took its pages
                continue
            start = sequence.first + 1
            for hidden in sequence.waiting:
                token = int(tokens[start + sequence.done])
                last[request] = _Row(request, sequence, sequence.done, token, hidden)
                read.append(last[request])
                sequence.done += 1
            sequence.waiting.clear()
        found = self._decode(read)
        while last:
            gave = {request: found[row.sequence] for request, row in last.items()}
            for request, (token, _) in gave.items():
                drafts[request].append(token)
            last = {
                request: _Row(request, row.sequence, row.position + 1, *gave[request])
                for request, row in last.items()
                if len(drafts[request]) < min(asked[request], share)
            }
            found = self._decode([*last.values()])
        return drafts

    def _decode(self, rows: Sequence[_Row]) -> dict[_Sequence, tuple[int, np.ndarray]]:
        """Computes rows, those of a sequence in order. Returns for each sequence the token that is
        drawn after its last row, and the hidden state that goes with it."""
        runner, most = self._runner, self._runner.shapes.rows
        found: dict[_Sequence, tuple[int, np.ndarray]] = {}
        for first in range(0, len(rows), most):
            batch = rows[first : first + most]
            positions, tokens = np.full(most, -1, np.int32), np.zeros(most, np.int32)
            for i, row in enumerate(batch):
                positions[i], tokens[i] = row.position, row.token
            self._set_hidden(0, [row.hidden for row in batch])
            runner.tokens.place(tokens, positions >= 0)
            output = runner.decode(positions, self._tables([row.sequence for row in batch]))
            params = sampling_of([row.request for row in batch], most)
            if params is not None:
                drawn = np.zeros(most, np.int32)  # the model's positions of the tokens
                drawn[: len(batch)] = [r.sequence.first + r.position + 2 for r in batch]
                params = *params, drawn
            chosen = np.asarray(runner.tokens.sample(output.logits, positions >= 0, params))
            hidden = self._own_hidden(output.hidden)
            for i, row in enumerate(batch):
                found[row.sequence] = int(chosen[i]), hidden[i]
        return found

    def _own_hidden(self, hidden: jax.Array | None) -> np.ndarray:
        """What the layer reads at its next position of what it gave itself."""
        config = self._runner.config
        assert hidden is not None
        if config.predicts == "after":
            weight, offset = self._runner.params["final_norm"], int(config.unit_offset_norms)
            hidden = _normalise(hidden, weight, config.rms_norm_eps, offset)
        return np.asarray(hidden)

    def _prefill(
        self, request: Request, sequence: _Sequence, tokens: np.ndarray, count: int
    ) -> bool:
        """Computes keys and values of the first `count` waiting positions. Returns whether there
        were pages for them."""
        if not self._reserve(request, sequence, sequence.done + count):
            return False
        size, end = self._runner.shapes.chunk, sequence.done + count
        while sequence.done < end:
            skip = sequence.done % size
            length = min(size, end - (start := sequence.done - skip))
            new = length - skip
            batch = empty_prefill(self._runner.shapes)._replace(count=np.int32(1))
            batch.start[0], batch.skip[0], batch.length[0] = start, skip, length
            first = sequence.first + 1 + start
            batch.tokens[0, :length] = tokens[first : first + length]
            self._set_hidden(skip, sequence.waiting[:new])
            self._runner.prefill(batch, self._tables([sequence]))
            sequence.done += new
            del sequence.waiting[:new]
        return True

    def _set_hidden(self, first: int, rows: Sequence[np.ndarray]) -> None:
        """Makes these the hidden states of the next step's rows from `first` on."""
        # A new array, as the device may read it where it is, and after the call.
        hidden = np.zeros(self._runner.hidden_shape, rows[0].dtype)
        hidden[first : first + len(rows)] = rows
        self._runner.set_hidden(hidden)

    def _tables(self, sequences: Sequence[_Sequence]) -> jax.Array:
        """The block table of a step with a row for each."""
        table = np.zeros_like(self.engine.scheduler.block_table)
        for row, sequence in zip(table, sequences, strict=False):
            pages: Any = [block.row for block in sequence.blocks]
            row[: len(pages)] = pages
        return jax.device_put(table, self._runner.buffers.sharding)

    def stats(self) -> dict[str, Any]:
        runner = self._runner
        sizes = {"store_bytes": runner.store.nbytes, "arena_bytes": runner.arena.nbytes}
        return {"method": self.method, **sizes, **super().stats()}
