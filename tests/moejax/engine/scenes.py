"""What tests of engines share: limits, small engines, requests, copies that are late or fail."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from moejax import LLM, SamplingParams
from moejax.engine.drafts import Drafts
from moejax.requests.request import Request
from tests.faults import Faults, inject
from tests.moejax.engine_runs import Recorded, mixed_jobs, run

LIMITS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
LINK: dict[str, Any] = {"transfers": "queue,rate=500MB/s,latency=50us,chunk_bytes=16KiB"}
QUEUE: dict[str, Any] = {"transfers": "queue", "driver": "host", "ops": "move=xla"}
"""Copies by jax, as on a GPU: ops that compute are native, one that touches the arena is XLA's, so
that the arena is an array."""
STREAM_QUEUE: dict[str, Any] = {"driver": "stream", "ops": "move=xla"}
LAYERS, EXPERTS, RECORD = 4, 16, 98304
"""Of the demo; the last: bytes of an expert."""
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [[5, 6, 7, 300], list(range(20, 90))]


def open_llm(model: str | Path = "demo", **options) -> LLM:
    return LLM(model, **{"progress": False, **LIMITS, **options})


@functools.cache
def at_rest_twice(precision: str | None = None, memory: int | None = None):
    """What mixed_jobs give twice with every expert resident, or in the versions of a policy."""
    with open_llm(precision=precision, memory=memory, enable_prefix_caching=False) as llm:
        first = run(llm, mixed_jobs(), check=False)
        # Nothing moves where every expert is there.
        return [first, run(llm, mixed_jobs(), check=False) if precision else first]


def at_rest() -> list[Recorded]:
    return at_rest_twice()[0]


def same_bits(ours: Sequence[Recorded], theirs: Sequence[Recorded]) -> bool:
    """Whether the first results are those, all of them where there are as many."""
    return len(ours) > 0 and all(a.same_bits(b) for a, b in zip(ours, theirs, strict=False))


def tokens_of(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    """What each prompt gets alone."""
    return [llm.generate(p, params, use_tqdm=False)[0].outputs[0].token_ids for p in PROMPTS]


def cells_of(llm: LLM) -> list[int]:
    """Cells of each layer, by the tables."""
    return np.sum(np.asarray(llm.engine.runner.tables.cell_row) >= 0, axis=1).tolist()


def forget_residents(llm: LLM) -> None:
    """Every expert is missed once more."""
    tables = llm.engine.runner.tables
    nobody = {name: np.full(getattr(tables, name).shape, -1) for name in ("owner", "address")}
    llm.engine.runner.set_tables(nobody)


class Known(Drafts):
    """Guesses what runs without drafts gave, with mistakes.

    - `answers`: by seed of the request.
    """

    def __init__(self, answers: dict[int, list[int]], mistakes: float = 0.3):
        super().__init__(5, adaptive=False)
        self.answers, self.rng, self.mistakes = answers, np.random.default_rng(0), mistakes

    def propose(self, asked, rows):
        return {request: self._guess(request, most) for request, most in asked.items()}

    def _guess(self, request: Request, most: int) -> list[int]:
        done = len(request.output)
        assert request.params.seed is not None
        tokens = self.answers[request.params.seed][done : done + most]
        wrong = self.rng.random(len(tokens)) < self.mistakes
        return [int(t) ^ int(w) for t, w in zip(tokens, wrong, strict=True)]


# ---- copies


@jax.jit
def _later(trips, *pieces):
    """The same arrays, after a while."""
    x = jax.lax.fori_loop(0, trips, lambda _, x: jnp.sin(x), jnp.ones(256))
    never = (x[0] > 2).astype(jnp.uint16)
    return [piece + never for piece in pieces]


_PUTS: WeakKeyDictionary[Any, Callable] = WeakKeyDictionary()
"""A queue's own put."""


def delay(llm: LLM, seconds: float = 1e-3, share: float = 1.0) -> None:
    """Copies take up to so much longer, a share of them; those by jax all, by a while of roughly
    that."""
    runner = llm.engine.runner
    if runner.transport.queue is not None:
        inject(runner.transport.queue, Faults(seed=1, delay=seconds, delayed=share))
    elif (queue := getattr(runner.transport, "device_queue", None)) is not None:
        put = _PUTS.setdefault(queue, queue.put)
        trips = max(300, round(3e5 * seconds)) if seconds else 0
        queue.put = lambda pieces: _later(trips, *put(pieces))


@contextlib.contextmanager
def failing(llm: LLM, *, ahead_only: bool = False) -> Iterator[None]:
    """No copy of an expert arrives, or none ahead of need."""
    runner = llm.engine.runner
    if runner.transport.queue is not None:
        errors = {"ahead_errors": 1.0} if ahead_only else {"errors": 1.0}
        inject(runner.transport.queue, Faults(seed=1, **errors))
        yield
        inject(runner.transport.queue, Faults())
        return
    queue = runner.transport.device_queue
    put, begin = queue.put, queue._begin

    def broken(pieces):
        raise OSError("memory: an injected error")

    def breaking(ticket, chunks):
        queue.put = put if ahead_only and queue._staged[ticket].transfer.demand else broken
        begin(ticket, chunks)

    queue._begin = breaking
    yield
    queue.put, queue._begin = put, begin


# ---- policies


@dataclasses.dataclass(frozen=True)
class Anyhow:
    """Gives experts to either processor by a number drawn from step and layer, residents too, and
    loads the others in a random order."""

    share: float
    moments: frozenset = frozenset({Moment.EXPERTS_BEGIN})
    needs: frozenset = frozenset({"counts"})
    writes: frozenset = frozenset({"execute", "load_order"})

    def init(self, spec: Spec) -> None:
        return None

    def decide(self, state: None, observation: Observation) -> tuple[None, Decision]:
        assert observation.counts is not None
        active = np.count_nonzero(observation.counts[observation.layer])
        rng = np.random.default_rng([observation.step, observation.layer])
        execute = (rng.random(active) < self.share).astype(np.int8)
        return None, Decision(execute=execute, load_order=rng.permutation(active))


def as_llm(engine) -> Any:
    """What engine_runs takes of an LLM."""
    return SimpleNamespace(engine=engine)
