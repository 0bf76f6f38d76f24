"""Samples the next tokens of a step's requests from its logits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from moejax.requests.first_check import require_tokens
from moejax.requests.sampling_params import (
    GREEDY_BELOW,
    MAX_BIASES,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

if TYPE_CHECKING:
    from moejax.engine.step_work import Draw
    from moejax.requests.request import Request
    from moejax.step.executor import Executor


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")

_PARAMETERS: dict[str, tuple[type, float]] = {
    "temperature": (np.float32, 0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1),
    "min_p": (np.float32, 0),
    "seed": (np.uint32, 0),
    "repetition_penalty": (np.float32, 1),
    "presence_penalty": (np.float32, 0),
    "frequency_penalty": (np.float32, 0),
    "penalized": (np.bool_, False),
    "biased": (np.bool_, False),
    "logprobs": (np.bool_, False),
}
"""Parameters of requests that are kept by row: their dtype, and the value of rows not in use."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Batch:
    """Sampling parameters of a step's requests, reused while the same requests are in the same
    rows. Arrays have all rows and are never written again, since a step may still read them."""

    places: list[tuple[int, Request, int]]
    """(row, request, drafted tokens before the one that is chosen) of each token."""
    rows: list[int]
    update: np.ndarray
    """bool[R]: the rows in `rows`."""
    sampling: tuple[np.ndarray, ...] | None
    """Arrays of _SAMPLING; None: all requests are greedy."""
    penalties: tuple[np.ndarray, ...] | None
    """Arrays of _PENALTIES; None: all are neutral."""
    penalized: np.ndarray
    """bool[R]: rows with penalties."""
    biased: tuple[tuple[int, Request, int], ...]
    """Places of requests with a logit_bias or min_tokens."""
    logprobs: np.ndarray | None
    """bool[R]: rows whose requests want log-probabilities; None without any."""


class TokenSampler:
    """Samples tokens by the parameters of each request. A request's parameters do not change the
    tokens of others.

    It dispatches programs and reads nothing. The tokens of the step before may not be known yet, so
    the counts for penalties are kept on the device (`TokenState.counts`), from the first request
    that needs them on.

    - `eos_token_ids`: end-of-sequence tokens of the model, which min_tokens bans.
    """

    def __init__(self, runner: Executor, eos_token_ids: Iterable[int]):
        """Raises ValueError for more end-of-sequence tokens than can be banned."""
        self.runner, self.eos_token_ids = runner, frozenset(eos_token_ids)
        room = MAX_BIASES - MAX_LOGIT_BIAS - MAX_STOP_TOKEN_IDS
        if len(self.eos_token_ids) > room:
            raise ValueError(f"{len(self.eos_token_ids)} end-of-sequence tokens, at most {room}")
        self._counted: dict[int, Request] = {}
        self._batch: _Batch | None = None
        count = runner.shapes.rows
        self._parameters = {n: np.full(count, v, t) for n, (t, v) in _PARAMETERS.items()}
        """Parameters of the request that got each row last."""
        self._biases_key: tuple[_Batch, tuple[bool, ...]] | None = None
        self._biases: tuple[np.ndarray, np.ndarray] | None = None
        shape = (count, MAX_BIASES)
        self._no_biases = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)

    def check(self, params: SamplingParams) -> None:
        """Raises UserError for token ids that the model does not have."""
        require_tokens(params, self.runner.config.vocab_size)

    def place(self, request: Request) -> None:
        """Takes the parameters of a request that got a row. Its tokens are counted from scratch
        before its next token is sampled, so they must have been read by then."""
        assert request.row is not None
        self._counted.pop(request.row, None)
        self._batch = None
        for name, value in _values(request).items():
            self._parameters[name][request.row] = value
        if has_penalties(request.params):
            self.runner.tokens.prepare_counts()

    def recount(self, request: Request) -> None:
        """Counts a request's tokens from scratch before its next token is sampled, since it got
        tokens that rows of a draft have chosen."""
        if request.row is not None:
            self._counted.pop(request.row, None)

    def sample(
        self, logits: jax.Array, draws: Sequence[Draw]
    ) -> tuple[jax.Array, tuple[jax.Array, ...] | None]:
        """Samples tokens and makes each the current token of its row.

        - `logits`: float32[R or fewer, V].
        - `draws`: the tokens, in any order. Their requests' `dispatched` counts the token that is
          drawn now, drafts apart.

        Returns (tokens int32[R], pallas_kernels.sample.logprobs of the rows that want them; None if
        no request wants log-probabilities). Log-probabilities are of the logits as given.
        """
        batch, places = self._batch, [(d.row, d.request, len(d.before)) for d in draws]
        if batch is None or batch.places != places:
            batch = self._batch = self._make_batch(places)
        params = batch.sampling
        if params is not None:
            position = np.zeros(len(batch.update), np.int32)
            position[batch.rows] = [len(r.prompt) + r.dispatched + n - 1 for _, r, n in places]
            params = *params, position
        adjusted = self._adjust_logits(logits, batch, draws)
        tokens = self.runner.tokens.sample(adjusted, batch.update, params)
        if batch.penalties is not None:
            self.runner.tokens.tally(batch.penalized)
        if batch.logprobs is None:
            return tokens, None
        return tokens, self.runner.tokens.token_logprobs(logits, tokens, batch.logprobs)

    def _adjust_logits(self, logits: jax.Array, batch: _Batch, draws: Sequence[Draw]) -> jax.Array:
        biases = self._biases_of(batch)
        if batch.penalties is not None or biases is not None:
            self._count(batch, draws)
            biases = biases or self._no_biases
            logits = self.runner.tokens.adjust(logits, batch.penalties, biases)
        ruled = [(draw.row, draw.words) for draw in draws if draw.words is not None]
        if ruled:
            width = -(-self.runner.config.vocab_size // 32)
            words = np.full((len(batch.update), width), -1, np.int32)
            for row, allowed in ruled:
                words[row] = allowed
            logits = self.runner.tokens.allow(logits, words)
        return logits

    def _biases_of(self, batch: _Batch) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns token ids and biases for the next token of all rows; None without any."""
        if not batch.biased:
            return None
        banning = tuple(r.dispatched + n <= r.params.min_tokens for _, r, n in batch.biased)
        if self._biases_key == (batch, banning):
            return self._biases
        ids, values = (array.copy() for array in self._no_biases)
        for (row, request, _), bans in zip(batch.biased, banning, strict=True):
            pairs = dict(request.params.logit_bias or ())
            if bans:
                banned = self.eos_token_ids.union(request.params.stop_token_ids or ())
                pairs |= dict.fromkeys(sorted(banned), -math.inf)
            ids[row, : len(pairs)] = [*pairs]
            values[row, : len(pairs)] = [*pairs.values()]
        self._biases_key = batch, banning
        self._biases = (ids, values) if (ids >= 0).any() else None
        return self._biases

    def _count(self, batch: _Batch, draws: Sequence[Draw]) -> None:
        """Recounts each row with penalties whose counts are not those of its request, and each row
        of a draft."""
        for row, request, _, before in draws:
            # A draft's row may be one that its request had before it was moved out.
            counted = not before and self._counted.get(row) is request
            if counted or not batch.penalized[row]:
                continue
            if len(request.output) != request.dispatched - 1:
                raise ValueError(
                    f"request {request.request_id} got a row while {request.dispatched - 1} tokens "
                    f"were dispatched and {len(request.output)} read"
                )
            self.runner.tokens.recount(row, request.prompt, [*request.output, *before])
            if before:
                self._counted.pop(row, None)
            else:
                self._counted[row] = request

    def _make_batch(self, places: list[tuple[int, Request, int]]) -> _Batch:
        rows = [row for row, _, _ in places]
        # The row of a draft has the parameters of its request's own row.
        own = np.arange(self.runner.shapes.rows)
        of_requests: Any = [request.row for _, request, _ in places]  # all of them run
        own[rows] = of_requests
        used = {name: values[own[rows]] for name, values in self._parameters.items()}
        update = np.zeros(len(own), np.bool_)
        update[rows] = True

        def columns(*names: str) -> tuple[np.ndarray, ...]:
            values = ((self._parameters[name], *_PARAMETERS[name]) for name in names)
            return tuple(np.where(update, mine[own], kind(other)) for mine, kind, other in values)

        sampling = penalties = None
        if not (used["temperature"] < GREEDY_BELOW).all():
            sampling = columns(*_SAMPLING)
        if used["penalized"].any():
            penalties = columns(*_PENALTIES)
        return _Batch(
            places=places,
            rows=rows,
            update=update,
            sampling=sampling,
            penalties=penalties,
            penalized=columns("penalized")[0],
            biased=tuple(places[i] for i in np.flatnonzero(used["biased"])),
            logprobs=columns("logprobs")[0] if used["logprobs"].any() else None,
        )


def sampling_of(requests: Sequence[Request], rows: int) -> tuple[np.ndarray, ...] | None:
    """Returns what sampler.sample takes of so many rows, of which the first are the requests',
    except positions; None if all requests are greedy."""
    if all(request.params.temperature < GREEDY_BELOW for request in requests):
        return None
    values, arrays = [_values(request) for request in requests], []
    for name in _SAMPLING:
        kind, other = _PARAMETERS[name]
        arrays.append(np.full(rows, other, kind))
        arrays[-1][: len(values)] = [each[name] for each in values]
    return tuple(arrays)


def has_penalties(params: SamplingParams) -> bool:
    """Whether tokens must be counted for these parameters."""
    return any(getattr(params, name) != _PARAMETERS[name][1] for name in _PENALTIES)


def _values(request: Request) -> dict[str, float]:
    """Returns the request's values of _PARAMETERS."""
    params = request.params
    return {
        **{name: getattr(params, name) for name in (*_SAMPLING[:-1], *_PENALTIES)},
        "seed": request.seed,
        "penalized": has_penalties(params),
        "biased": params.logit_bias is not None or params.min_tokens > 0,
        "logprobs": params.logprobs is not None,
    }
