"""Random workloads through the embedded model, every invariant checked, answers against solo runs.

python -m scripts.check fuzz --steps 50000 [--seed 0] [--check-every 4]
                             [--link-rate 4GB/s] [--store both]
                             [--model DIR | --family ARCHITECTURE] [--method mtp]
                             [--driver host]

An episode has a few bursts of requests, each under random conditions (expert and KV budgets,
overflow, swap space, staging, steps that fail). Requests are random: sessions of several turns,
rewritten and queued ones, forks of a session's history, shared documents, n > 1, priorities,
penalties, biases, stop strings, scoring, prompt_logprobs, cancellations at any moment. KV is so
small that requests are preempted all the time. After every engine step the scheduler's pages,
blocks and rows are checked, after every K-th the device's arena, tables and store. When an episode
ends, everything must be free, and some of its requests run again alone, with everything resident:
tokens, text, log-probabilities and reasons must be equal (contract 1; a session's solo run is the
same session alone, its turns in order).

With --link-rate or a --store in files, experts come by a queue beside compute, with random delays,
reads that come short, and transfers that fail: demands end the requests of their step, which are
compared up to there, and no others; prefetches are tried again. --store both: episodes of odd
numbers read experts from files, the others from memory. The last line counts what was put in the
way.

With --driver host most bursts have a prefetch, a placement (not of experts in files) or both, or
stages at random between layers; solo runs have none of them.

--model takes another model than the demo, --family a small random model of that architecture, for
example Qwen3NextForCausalLM, whose layers keep states. --method mtp drafts by the checkpoint's own
layer for it, which the random model then has.

The same seed and the same number of an episode make the same episode, whatever ran before. A
failure prints the command that runs that episode again, and exits with status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np

from host_offload.control.controller import Controller
from host_offload.control.interface import Decision, Moment, Observation, Policy, Spec, Stage
from host_offload.control.rules import BETWEEN_LAYERS, name_of, search_of
from host_offload.memory.tables import empty_tables
from host_offload.policies.eviction.eviction_names import EVICTION
from host_offload.policies.placement.placement_names import placement_policy
from host_offload.policies.placement.rivals import AHEAD, SCHEDULERS
from host_offload.policies.prefetch.expert_map.expert_map_policy import ExpertMap
from host_offload.policies.prefetch.prefetch_names import PREFETCH
from moejax import LLM, SamplingParams, UserError
from moejax.checkpoints.conversion import convert
from moejax.engine.control import control_of, layer_hooks, spec_of_engine
from moejax.engine.drafts import Drafts, NgramDrafts
from moejax.engine.predicted_drafts import PredictedDrafts
from moejax.engine.statistics import kv_stats
from moejax.models.config import load_config
from moejax.models.families import FAMILIES
from moejax.models.hub import model_directory
from moejax.requests.request import Request
from moejax.requests.sampling_params import child_params
from moejax.requests.structured_outputs import StructuredOutputsParams
from moejax.step.step_parts import TRACE_ARRAYS
from pallas_kernels.option_text import unknown
from scripts.check.kv_faults import kv_faults
from scripts.parts.bench_engine import SMALL
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import show
from tests.faults import Faults, inject, injected, use_faulty_library
from tests.moejax.models.families import write_checkpoint
from tests.moejax.predictors import write_predicted

MOST_STEPS = 20_000
"""An episode that takes more has no end."""

STOP_STRINGS = ("e", " a", "th", "ing", ".", "qu", "the old")


class Fault(AssertionError):
    """The engine broke an invariant or answered differently."""


class InjectedFailure(RuntimeError):
    """A step that was made to fail."""


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What a burst of requests finds."""

    overflow: str
    swap_pages: int
    admission: int
    share_chunks: int
    prefix_caching: bool
    stages: bool
    """A policy stages, protects and refuses experts at random."""
    failures: float
    """Share of the steps that fail at their dispatch."""
    cancellations: float
    """Chance at each step that somebody is cancelled."""
    arrivals: float
    """Chance at each step that a request arrives."""
    requests: int
    transfers: Faults | None = None
    """What is put in the way of transfers beside compute."""
    drafts: tuple[int, int, int] | None = None
    """Most tokens of a draft, and the longest and shortest n-grams; None: no drafts."""
    ahead: tuple[Policy, ...] = ()
    """What moves experts between layers."""


DELAYED_S = 10e-6
"""What delays cost a chunk, about: long ones are rare, or a run would do nothing but wait."""


def draw_faults(rng: np.random.Generator) -> Faults:
    """Delays in most bursts, failures in some."""
    delay = float(rng.choice([0.0, 50e-6, 500e-6, 3e-3]))
    errors = float(rng.choice([0.0, 0.0, 3e-5, 3e-4]))
    ahead = float(rng.choice([0.0, 0.02, 0.3]))
    delayed = DELAYED_S / delay if delay else 0.0
    # In some bursts prefetches crawl, so that some are taken back before they begin.
    crawl = float(rng.choice([0.0, 0.0, 0.0, 1.0]))
    return Faults(int(rng.integers(2**31)), delay, errors, 0.2, delayed, ahead, crawl)


def draw_drafts(rng: np.random.Generator) -> tuple[int, int, int] | None:
    """Drafts in most bursts."""
    longest = int(rng.integers(1, 5))
    lengths = int(rng.integers(1, 9)), longest, int(rng.integers(1, longest + 1))
    return lengths if rng.random() < 0.75 else None


BETWEEN = "random stages"
PLACED = "per_token=1us,startup=1us,load=1ms,accelerator=1us,attention=1us"


def draw_ahead(rng: np.random.Generator, placed: bool) -> tuple[Policy, ...]:
    """Draws what moves experts between layers, in most bursts.

    - `placed`: whether there is a second processor.
    """
    plain = {n: made for n, made in PREFETCH.plain.items() if search_of([made()]) is None}
    plain["expert_map"] = functools.partial(ExpertMap, distance=1)  # some models have two layers
    prefetch, drawn = str(rng.choice([BETWEEN, *plain])), rng.random()
    scheduler, seed = str(rng.choice([*SCHEDULERS])), int(rng.integers(2**31))
    predicts = ",predict=gates" if scheduler in AHEAD else ""
    placement = placement_policy(f"{scheduler},{PLACED}{predicts}")
    if drawn < 0.25:
        return ()
    if placed and drawn < 0.5:
        return (placement,)
    if prefetch == BETWEEN:
        moments = BETWEEN_LAYERS | {Moment.STEP_BEGIN, Moment.STEP_END}
        return (RandomStages(seed, frozenset(moments)),)
    found: tuple[Policy, ...] = (plain[prefetch](),)
    alone = placement.writes.isdisjoint(found[0].writes)
    return (*found, placement) if placed and alone and drawn < 0.75 else found


def draw_conditions(rng: np.random.Generator, rows: int) -> Conditions:
    return Conditions(
        overflow="recompute" if rng.random() < 0.25 else "swap",
        swap_pages=10**6 if rng.random() < 0.75 else int(rng.integers(0, 20)),
        admission=int(rng.integers(1, rows + 1)),
        share_chunks=int(rng.integers(1, 3)),
        prefix_caching=bool(rng.random() < 0.9),
        stages=bool(rng.random() < 0.4),
        failures=0.01 if rng.random() < 0.3 else 0.0,
        cancellations=float(rng.choice([0.0, 0.02, 0.1])),
        arrivals=float(rng.choice([0.1, 0.5, 1.0])),
        requests=int(rng.integers(6, 20)),
    )


def draw_budget(rng: np.random.Generator, llm: LLM) -> tuple[list[int], int]:
    """(cells of each layer, KV slots): KV of the longest sequence, or a slot more."""
    arena = llm.engine.scheduler.arena
    layers, experts = arena.cell_row.shape
    cells = rng.integers(0, experts + 1, layers).tolist()
    if rng.random() < 0.3:
        cells = [int(rng.integers(0, experts + 1))] * layers
    return cells, _sequence_slots(llm) + int(rng.random() < 0.3)


def _sequence_slots(llm: LLM) -> int:
    """KV slots that the longest sequence needs."""
    scheduler = llm.engine.scheduler
    pages = scheduler.pages_for(scheduler.max_model_len, 1)
    return -(-pages // scheduler.arena.layout.pages_per_slot)


# ---- a policy that does what it likes


VICTIMS = ((1, 0, 0), (0, 0, 1), (-1, 0, 0))
"""Who makes room: the oldest, anyone, the youngest, which may still be on its way."""


@dataclasses.dataclass(frozen=True)
class RandomStages:
    """Stages random experts, with random victims, priors and refusals, and moves the budgets while
    requests run: bits must not depend on it."""

    seed: int
    moments: frozenset[Moment] = frozenset({Moment.STEP_BEGIN})
    needs: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset(
        {"stages", "victim_weights", "prior", "fill_version", "cells", "kv_pages"}
    )

    def init(self, spec: Spec) -> tuple[int, int, int, int]:
        return 0, spec.layers, spec.experts, spec.kv_floor_bytes // spec.page_bytes

    def decide(
        self, state: tuple[int, int, int, int], observation: Observation
    ) -> tuple[tuple[int, int, int, int], Decision]:
        count, layers, experts, least = state
        rng, shape = np.random.default_rng([self.seed, count]), (layers, experts)
        draws = zip(rng.integers(layers, size=16), rng.integers(experts, size=16), strict=True)
        decision = Decision(stages=tuple(Stage(int(a), int(b)) for a, b in dict.fromkeys(draws)))
        if count % 16 == 0:
            decision = dataclasses.replace(
                decision,
                victim_weights=np.array(VICTIMS[rng.integers(len(VICTIMS))], np.int32),
                prior=rng.integers(0, 1000, shape).astype(np.int32),
                fill_version=-(rng.random(shape) < 0.2).astype(np.int8),
                cells=rng.integers(0, experts + 1, layers).astype(np.int32),
                kv_pages=least + int(rng.integers(0, 7)),
            )
        return (count + 1, layers, experts, least), decision


@dataclasses.dataclass(frozen=True)
class NeedsAll:
    """Decides nothing, and has steps give all that a policy may look at."""

    moments: frozenset[Moment] = frozenset({Moment.EMBEDDED, Moment.ROUTED})
    needs: frozenset[str] = TRACE_ARRAYS | {"router"}
    writes: frozenset[str] = frozenset()

    def init(self, spec: Spec) -> None:
        return None

    def decide(self, state: None, observation: Observation) -> tuple[None, Decision]:
        return state, Decision()


# ---- requests


@dataclasses.dataclass
class Talk:
    """A session."""

    name: str
    said: list[int] = dataclasses.field(default_factory=list)
    """Prompt and answer of the last turn that ended."""
    turns: list[Request] = dataclasses.field(default_factory=list)

    @property
    def busy(self) -> bool:
        return any(turn.finish_reason is None for turn in self.turns)


class Workload:
    """Draws requests and gives them to the engine."""

    def __init__(self, llm: LLM, rng: np.random.Generator, counts: Counter[str]):
        self.llm, self.rng, self.counts = llm, rng, counts
        self.vocabulary, self.room = llm.config.vocab_size, llm.engine.scheduler.max_model_len
        self.documents = [self._words(n) for n in (30, 48, 64, 100)]
        self.talks: list[Talk] = []
        self.ended: list[Talk] = []
        self.alone: list[Request] = []
        self._named = 0
        self._rules = rng.spawn(1)[0]

    def _words(self, count: int) -> list[int]:
        return self.rng.integers(1, self.vocabulary, count).tolist()

    def everyone(self) -> list[Request]:
        talks = [*self.ended, *self.talks]
        return [*self.alone, *(turn for talk in talks for turn in talk.turns)]

    def live(self) -> list[Request]:
        return [request for request in self.everyone() if request.finish_reason is None]

    def settle(self, touched: Sequence[Request]) -> None:
        """Takes note of the turns that ended: others go on from them."""
        ended = {id(r) for r in touched if r.finish_reason in ("stop", "length")}
        for talk in self.talks:
            for turn in talk.turns:
                if id(turn) in ended:
                    talk.said = turn.prompt + turn.output

    def arrive(self) -> None:
        """One request arrives, or several of one prompt."""
        draw = self.rng.random()
        if draw < 0.45:
            self._turn()
        elif draw < 0.53:
            self._score()
        elif draw < 0.57:
            self._refused()
        else:
            self._prompt()

    def _opening(self) -> list[int]:
        """Documents make prompts begin alike, at borders of blocks and within."""
        words = self._words(int(self.rng.integers(1, 25)))
        if self.rng.random() < 0.4:
            return words
        document = self.documents[self.rng.integers(len(self.documents))]
        cut = len(document) if self.rng.random() < 0.6 else int(self.rng.integers(1, len(document)))
        return document[:cut] + words

    def _add(self, prompt: list[int], params: SamplingParams, **given) -> Request:
        request = self.llm.engine.add(
            prompt, params, priority=int(self.rng.integers(0, 3)), **given
        )
        self.counts["requests"] += 1
        return request

    def _prompt(self) -> None:
        prompt = self._opening()
        if self.talks and self.rng.random() < 0.3:  # goes on from a session without being its turn
            fork = self.talks[self.rng.integers(len(self.talks))].said
            prompt = [*fork[: self.room - 30], *prompt[:20]]
            self.counts["forks"] += bool(fork)
        params = self._params(len(prompt))
        if self.rng.random() < 0.1:
            params = dataclasses.replace(params, prompt_logprobs=int(self.rng.integers(0, 4)))
            self.counts["prompt_logprobs"] += 1
        each = [child_params(params, i) for i in range(params.n)]
        self.counts["siblings"] += params.n - 1
        self.alone += [self._add(prompt, child) for child in each]

    def _score(self) -> None:
        tokens = [*self._opening(), *self._words(2)]
        self.alone.append(self._add(tokens[:-1], SamplingParams(), targets=tokens[1:]))
        self.counts["scores"] += 1

    def _turn(self) -> None:
        free = [talk for talk in self.talks if len(talk.turns) < 6]
        if not free or (len(self.talks) < 4 and self.rng.random() < 0.4):
            self._named += 1
            free = [Talk(f"s{self._named}")]
            self.talks += free
        talk = free[self.rng.integers(len(free))]
        said = talk.said
        if talk.busy:
            # The answer it waits for is not known: its prompt goes on from what is.
            self.counts["queued turns"] += 1
        elif said and self.rng.random() < 0.35:
            said = said[: -int(self.rng.integers(1, min(len(said), 40) + 1))]
            self.counts["rewritten turns"] += 1
        prompt = said + (self._words(int(self.rng.integers(1, 20))) if said else self._opening())
        if len(prompt) > self.room - 4:
            prompt = self._opening()
        params = dataclasses.replace(self._params(len(prompt)), n=1)
        talk.turns.append(self._add(prompt, params, session_id=talk.name))
        self.counts["turns"] += 1

    def _refused(self) -> None:
        """What could never run is refused and leaves nothing behind."""
        prompt, params = self._opening(), SamplingParams(max_tokens=3)
        wrong = [
            ([], params),
            ([*prompt, self.vocabulary], params),
            (prompt, SamplingParams(max_tokens=self.room)),
            (prompt, SamplingParams(logit_bias={self.vocabulary: 1.0})),
        ][self.rng.integers(4)]
        try:
            self.llm.engine.add(*wrong)
        except UserError:
            self.counts["refusals"] += 1
        else:
            raise Fault(f"{wrong[1]} was not refused")

    def _params(self, length: int) -> SamplingParams:
        def maybe(chance: float, value: Any) -> Any:
            return value if self.rng.random() < chance else None

        rng = self.rng
        wanted = int(rng.integers(1, 20)) if rng.random() < 0.4 else int(rng.integers(30, 110))
        tokens = max(min(wanted, self.room - length), 1)
        sampled = rng.random() < 0.6
        choice: dict[str, Any] = {"temperature": 0}
        if sampled:
            choice = {
                "temperature": 0.9,
                "top_p": 0.95,
                "top_k": int(rng.integers(0, 50)),
                "min_p": 0.01 * int(rng.integers(0, 3)),
                "n": int(rng.integers(2, 4)) if rng.random() < 0.15 else 1,
            }
        if rng.random() < 0.25:
            choice |= {
                "repetition_penalty": 1.2,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.1 * int(rng.integers(0, 5)),
            }
            self.counts["penalties"] += 1
        bias = maybe(0.15, {int(t): 4.0 for t in rng.integers(1, self.vocabulary, 3)})
        stop = maybe(0.25, [str(s) for s in rng.choice(STOP_STRINGS, 2, replace=False)])
        stop_ids = maybe(0.1, rng.integers(1, self.vocabulary, 100).tolist())
        logprobs = maybe(0.15, int(rng.integers(0, 4)))
        self.counts["biases"] += bias is not None
        self.counts["stop strings"] += stop is not None
        self.counts["logprobs"] += logprobs is not None
        given: dict[str, Any] = dict(
            max_tokens=tokens,
            min_tokens=int(rng.integers(0, tokens + 1)) if rng.random() < 0.2 else 0,
            seed=int(rng.integers(2**31)),
            ignore_eos=bool(rng.random() < 0.5),
            logit_bias=bias,
            stop=stop,
            stop_token_ids=stop_ids,
            logprobs=logprobs,
            **choice,
        )
        return SamplingParams(**given | self._token_rules())

    def _token_rules(self) -> dict[str, Any]:
        """Rules by which few tokens may come, so that drafts are often right."""
        rng, draw = self._rules, self._rules.random()
        if draw < 0.5:
            return {}
        self.counts["token rules"] += 1
        if draw < 0.6:
            word = str(rng.choice(STOP_STRINGS))
            pattern = StructuredOutputsParams(regex=f"({word}|a|b c){{1,200}}")
            return {"structured_outputs": pattern, "stop": None, "min_tokens": 0}
        few = rng.integers(1, self.vocabulary, int(rng.integers(1, 4))).tolist()
        return {"allowed_token_ids": few} | ({"bad_words": ["the old"]} if draw < 0.7 else {})

    def cancel(self) -> None:
        """Cancels somebody who waits, runs, or stands behind the turn of a session."""
        if not (live := self.live()):
            return
        request = live[self.rng.integers(len(live))]
        state = "waiting" if request.scheduled_s is None else "moved out"
        state = "running" if request.row is not None else state
        self.llm.engine.abort([request])
        self.counts[f"cancelled {state}"] += 1

    def end_sessions(self, chance: float) -> bool:
        """Ends some of the sessions that have no turn; returns whether there was one to end."""
        ended = [t for t in self.talks if not t.busy and self.rng.random() < chance]
        for talk in ended:
            self.llm.end_session(talk.name)
            self.talks.remove(talk)
        self.ended += ended
        self.counts["ended sessions"] += len(ended)
        return bool(ended)


# ---- an episode


@dataclasses.dataclass(frozen=True)
class Episode:
    """One of a run. Its number and the seed make it; nothing before it matters."""

    seed: int
    number: int
    steps: int
    """Steps of the workload."""
    solo_steps: int
    counts: Counter[str]


def run_episode(llm: LLM, seed: int, number: int, *, check_every: int = 1) -> Episode:
    """Runs an episode to its end and compares a sample of its requests with solo runs.

    check_every: steps from one check of the device's tables and bytes to the next; the scheduler's
    are checked after every step. Raises Fault.
    """
    rng, counts = np.random.default_rng([seed, number]), Counter[str]()
    engine = llm.engine
    reset(llm, *draw_budget(rng, llm), eviction=str(rng.choice(["lru", "lfu", "lfru"])))
    before, workload, steps = _totals(llm), Workload(llm, rng, counts), 0
    for burst in range(int(rng.integers(2, 5))):
        if burst:
            workload.end_sessions(0.3)
            move_budget(llm, rng, counts)
        conditions = draw_conditions(rng, engine.scheduler.max_num_seqs)
        if (
            engine.runner.transport.queue is not None
        ):  # draws of its own: without a queue all is as it was
            drawn = draw_faults(np.random.default_rng([seed, number, burst]))
            conditions = dataclasses.replace(conditions, transfers=drawn)
        drawn = draw_drafts(np.random.default_rng([seed, number, burst, 1]))
        conditions = dataclasses.replace(conditions, drafts=drawn)
        if engine.runner.steps.driver == "host":
            drawn = np.random.default_rng([seed, number, burst, 2])
            ahead = draw_ahead(drawn, engine.runner.steps.second is not None)
            conditions = dataclasses.replace(conditions, ahead=ahead, stages=not ahead)
            counts.update(f"bursts with {name_of(policy)}" for policy in ahead)
        apply(llm, conditions, seed=int(rng.integers(2**31)))
        arriving = conditions.requests
        with failing(llm, rng, conditions.failures):
            while arriving or not engine.idle:
                if arriving and rng.random() < conditions.arrivals:
                    workload.arrive()
                    arriving -= 1
                if rng.random() < conditions.cancellations:
                    workload.cancel()
                if rng.random() < 0.01:
                    workload.end_sessions(0.5)
                step(workload)
                steps += 1
                control = engine.control
                counts["budgets moved meanwhile"] += bool(control and control.resized)
                check(llm, device=steps % check_every == 0)
                if steps > MOST_STEPS:
                    raise Fault(f"{len(workload.live())} requests have not ended")
        engine.drain()
        if conditions.drafts is not None and engine.drafts is None:
            raise Fault("drafts failed and were turned off; the log says where")
        if engine.drafts is not None:
            counts.update({f"drafts: {name}": n for name, n in engine.drafts.counts.items()})
        if engine.control is not None:
            transfers = engine.control.controller.stats()["transfers"].values()
            counts["staged transfers"] += sum(each["done"] for each in transfers)
            counts["budgets deferred"] += engine.control.controller.stats()["budget_deferred"]
    workload.end_sessions(1.0)
    check(llm, device=True)
    check_all_free(llm)
    counts.update({name: n - before[name] for name, n in _totals(llm).items()})
    counts["recomputed"] += sum(r.recomputed for r in workload.everyone())
    counts["ended by a failed transfer"] += sum(
        request.error is not None for request in workload.everyone()
    )
    for request in workload.everyone():
        counts[f"ended by {request.finish_reason}"] += 1
    counts["stopped by a string"] += sum(
        isinstance(r.stop_reason, str) for r in workload.everyone()
    )
    return Episode(seed, number, steps, compare(llm, workload, rng), counts)


def reset(llm: LLM, cells: list[int], kv_slots: int, *, eviction: str = "lru") -> None:
    """Empties pages, cells and tables, so that nothing of before is left, and sets the budgets."""
    engine, runner, arena = llm.engine, llm.engine.runner, llm.engine.scheduler.arena
    layers, experts = arena.cell_row.shape
    engine.set_budget([0] * layers, 0)
    tables = empty_tables(layers, experts, experts, EVICTION[eviction])
    runner.tables = jax.device_put(tables, runner.buffers.sharding)
    engine.set_budget(cells, kv_slots)


_OWN: WeakKeyDictionary[LLM, tuple[Drafts | None, np.ndarray | None]] = WeakKeyDictionary()
"""The drafts with which an engine started, and its routers, where policies see them."""


def apply(llm: LLM, conditions: Conditions, seed: int) -> None:
    """Sets what an idle engine's next requests find, none of it a shape."""
    engine, scheduler = llm.engine, llm.engine.scheduler
    if llm not in _OWN:
        router = None if engine.control is None else engine.control.controller.spec.router
        _OWN[llm] = engine.drafts, router
    engine.control = engine.hooks = None
    lengths, (own, router) = conditions.drafts, _OWN[llm]
    engine.drafts = None if lengths is None else NgramDrafts(*lengths, adaptive=False)
    if lengths is not None and isinstance(own, PredictedDrafts):
        own.counts.clear()
        engine.drafts = own
    if (queue := engine.runner.transport.queue) is not None:
        inject(queue, conditions.transfers or Faults())
    if policies := (RandomStages(seed),) if conditions.stages else conditions.ahead:
        spec = spec_of_engine(engine.runner, max_model_len=scheduler.max_model_len, seed=seed)
        controller = Controller(dataclasses.replace(spec, router=router), policies)
        engine.control = control_of(engine.runner, controller, engine.resizer)
        if engine.control is not None:
            engine.hooks = layer_hooks(engine.control, engine.runner)
    scheduler.overflow = scheduler.sessions.overflow = conditions.overflow
    scheduler.admission = conditions.admission
    scheduler.prefixes.enabled = conditions.prefix_caching
    scheduler.share_chunks = conditions.share_chunks
    scheduler.cache.swap_bytes = conditions.swap_pages * scheduler.cache.page_bytes


def move_budget(llm: LLM, rng: np.random.Generator, counts: Counter[str]) -> None:
    """Other budgets for an idle engine; refused, and unchanged, where sessions' pages are in the
    way and cannot be moved out."""
    arena, cells_and_slots = llm.engine.scheduler.arena, draw_budget(rng, llm)
    before = arena.slot_class.copy()
    try:
        llm.engine.set_budget(*cells_and_slots)
        counts["budgets moved"] += 1
    except ValueError as error:
        if "hold live pages" not in str(error):
            raise
        counts["budgets refused"] += 1
        if not np.array_equal(arena.slot_class, before):
            raise Fault("a budget that was refused changed the arena") from error


def step(workload: Workload) -> None:
    """An engine step, and what ended with it."""
    engine, counts = workload.llm.engine, workload.counts
    try:
        workload.settle(engine.step())
    except InjectedFailure:
        counts["failed steps"] += 1
        workload.settle(workload.everyone())
    except UserError as error:
        if "raise swap_space" not in str(error):
            raise
        counts["stuck for swap space"] += 1
        if not workload.end_sessions(1.0):
            workload.cancel()


@contextlib.contextmanager
def failing(llm: LLM, rng: np.random.Generator, chance: float) -> Iterator[None]:
    """Has steps fail at random, before or after the device got them."""
    runner = llm.engine.runner

    def fallible(method: Callable) -> Callable:
        def call(*args, **kwargs):
            if rng.random() < chance:
                raise InjectedFailure(method.__name__)
            return method(*args, **kwargs)

        return call

    names = {"decode": runner, "prefill": runner, "sample": runner.tokens, "place": runner.tokens}
    for name, owner in names.items() if chance else ():
        setattr(owner, name, fallible(getattr(owner, name)))
    try:
        yield
    finally:
        for name, owner in names.items() if chance else ():
            delattr(owner, name)


def check(llm: LLM, *, device: bool) -> None:
    faults = kv_faults(llm.engine.scheduler)
    if device:
        faults += llm.engine.runner.faults()
    if faults:
        raise Fault("; ".join(faults))


def check_all_free(llm: LLM) -> None:
    """After the last session everything is free again."""
    scheduler = llm.engine.scheduler
    cache, pages = scheduler.cache, scheduler.arena.pages
    if cache.available != pages or cache.swapped:
        raise Fault(f"{cache.available} of {pages} pages free, {cache.swapped} swapped out")
    if scheduler.sessions.all or scheduler.waiting or scheduler.running:
        raise Fault("sessions or requests are left")


def _totals(llm: LLM) -> dict[str, int]:
    """Counters of what the engine did, by names for people."""
    engine, cache = llm.engine, llm.engine.scheduler.cache
    totals, queue = engine.runner.transport.totals(), engine.runner.transport.queue
    queued = {}
    if totals is not None and queue is not None:
        faults = dataclasses.asdict(injected(queue))
        queued = {
            "demands that came": totals.demands,
            "prefetches that came": totals.ahead,
            "prefetches that came late": totals.late,
            "transfers cancelled": totals.cancelled,
            "transfers failed": totals.failed,
            "prefetches tried again": totals.retried,
            **{f"injected {name.replace('_', ' ')}": n for name, n in faults.items()},
            "waits for transfers": totals.waits,
        }
    stats = kv_stats(engine.scheduler)
    names = ("preemptions", "prefix_hit_tokens", "session_hit_tokens", "sessions_evicted")
    return {
        **queued,
        **{name.replace("_", " "): stats[name] for name in names},
        "pages swapped out": cache.swapped_out,
        "pages swapped in": cache.swapped_in,
        "cached pages dropped": cache.dropped,
        "prefill steps": engine.statistics.steps["prefill"],
        "decode steps": engine.statistics.steps["decode"],
        "expert hits": engine.statistics.paging["hits"],
        "expert fills": engine.statistics.paging["fills"],
        "experts read through": engine.statistics.paging["read_through"],
    }


# ---- solo runs

ALONE = Conditions("swap", 10**6, 1, 2, False, False, 0.0, 0.0, 0.0, 1)


def compare(llm: LLM, workload: Workload, rng: np.random.Generator) -> int:
    """Runs some of the requests again, each alone with everything resident; returns the steps.

    Raises Fault where one differs, or where a turn is not marked as recomputed after one that is.
    """
    scheduler = llm.engine.scheduler
    layers, experts = scheduler.arena.cell_row.shape
    apply(llm, ALONE, seed=0)
    reset(llm, [experts] * layers, scheduler.arena.slots - layers * experts)
    alone = [r for r in workload.alone if not r.recomputed]
    groups = [[alone[i]] for i in rng.permutation(len(alone))[:4]]
    talks = [*workload.ended, *workload.talks]
    for i in rng.permutation(len(talks))[:1]:
        kept = [turn for turn in talks[i].turns if turn.finish_reason != "abort"]
        marked = [turn.recomputed for turn in kept]
        if marked != sorted(marked):
            raise Fault(f"session {talks[i].name}: recomputed, by turns: {marked}")
        groups.append([turn for turn in kept if not turn.recomputed])
    steps = 0
    for group in groups:
        session = None if group and group[0].session is None else "alone"
        try:
            for request in group:
                again, took = run_alone(llm, request, session)
                steps += took
                workload.counts["compared"] += 1
                workload.counts["compared tokens"] += len(request.output)
                if (difference := differs(request, again)) is not None:
                    raise Fault(f"request {request.number} differs from its solo run: {difference}")
        finally:
            if group and session is not None:
                llm.end_session(session)
    return steps


def run_alone(llm: LLM, request: Request, session: str | None) -> tuple[Request, int]:
    params = dataclasses.replace(request.params, seed=request.seed)
    again = llm.engine.add(request.prompt, params, request.targets, session_id=session)
    steps = 0
    while not llm.engine.idle:
        llm.engine.step()
        steps += 1
    return again, steps


def differs(request: Request, alone: Request) -> str | None:
    """What of the two is not equal, None if all is. An aborted one is the other's beginning."""
    aborted = request.finish_reason == "abort"
    for name in ("output", "logprobs", "prompt_logprobs", "scores"):
        got, want = getattr(request, name), getattr(alone, name)
        if aborted:
            want = want[: len(got)]
        if got != want:
            at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
            return f"{name} at {at}, {len(got)} and {len(want)} of them"
    if not aborted:
        for name in ("finish_reason", "stop_reason"):
            if getattr(request, name) != getattr(alone, name):
                return f"{name}: {getattr(request, name)} and {getattr(alone, name)}"
        if request.ending.text != alone.ending.text:
            return f"text: {request.ending.text!r} and {alone.ending.text!r}"
    return None


# ---- the command


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    positive(args, "steps", "check_every")
    use_faulty_library()
    with contextlib.ExitStack() as stack:
        return run([stack.enter_context(llm) for llm in opened(args, stack)], args)


def opened(args: argparse.Namespace, stack: contextlib.ExitStack) -> Iterator[LLM]:
    """An engine for each store. stack: of what must stay while they run."""
    queue = f"queue,chunk_bytes={args.chunk_bytes},threads={args.transfer_threads}"
    for name, value in (("rate", args.link_rate), ("latency", args.link_latency)):
        queue += "" if value is None else f",{name}={value}"
    stated = args.link_rate is not None or args.link_latency is not None
    transfers, drafts = queue if stated else None, {"method": args.method, "adaptive": False}
    given = {"dtype": args.dtype, "transfers": transfers, "speculative_config": drafts, **SMALL}
    placed: dict[str, Any] = {}
    if args.driver == "host":
        given |= {"driver": "host", "policies": (NeedsAll(),)}
        placed = {"placement": f"prescope,{PLACED}"}
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moejax-fuzz-")))
    model = Path(model_directory(args.model))
    if args.family is not None:
        write = write_checkpoint if args.method == "ngram" else write_predicted
        model = random_family(folder / "family", args.family, model, write)
    if args.store in ("memory", "both"):
        yield LLM(model, **given, **placed)
    if args.store in ("file", "both"):
        converted = convert(model, folder / "converted").directory
        yield LLM(str(converted), store="file", **{**given, "transfers": queue})


def random_family(
    directory: Path, architecture: str, words: Path, write: Callable[..., Path]
) -> Path:
    """Writes a small random checkpoint. words: a directory whose tokenizer it gets."""
    if architecture not in FAMILIES:
        raise UserError(unknown("architecture", architecture, FAMILIES))
    vocabulary = load_config(words).vocab_size
    write(directory, architecture, vocab_size=vocabulary)
    for path in words.glob("*token*.json"):
        shutil.copy(path, directory)
    return directory


def run(llms: Sequence[LLM], args: argparse.Namespace) -> int:
    counts, steps, solo, began = Counter[str](), 0, 0, time.perf_counter()
    number, shown = args.episode or 0, began
    first = number
    while steps < args.steps:
        try:
            llm = llms[number % len(llms)]
            episode = run_episode(llm, args.seed, number, check_every=args.check_every)
        except Exception:
            traceback.print_exc()
            print(
                f"episode {number} failed; run it again with: python -m scripts.check fuzz "
                f"--seed {args.seed} --episode {number} --check-every 1 {asked(args)}",
                file=sys.stderr,
            )
            return 1
        counts.update(episode.counts)
        steps, solo, number = steps + episode.steps, solo + episode.solo_steps, number + 1
        now = time.perf_counter()
        if now - shown > args.progress_s:
            shown = now
            rate = (steps + solo) / (now - began)
            print(
                f"{steps} steps, {number - first} episodes, {rate:.0f} steps/s",
                file=sys.stderr,
                flush=True,
            )
        if args.episode is not None:
            break
    seconds = time.perf_counter() - began
    summary = {
        "seed": args.seed,
        "episodes": number - first,
        "steps": steps,
        "solo_steps": solo,
        "check_every": args.check_every,
        "seconds": round(seconds, 1),
        "steps_per_s": round((steps + solo) / seconds, 1),
        "counts": dict(sorted(counts.items())),
    }
    width = max(map(len, counts))
    text = [f"{name:<{width}}  {count}" for name, count in sorted(counts.items())]
    text += [
        in_the_way(counts),
        f"no fault in {steps} steps of {number - first} episodes (and {solo} steps of solo runs) "
        f"in {seconds:.0f} s; the device checked every {args.check_every} steps",
    ]
    show(args.json, [summary], text)
    return 0


def asked(args: argparse.Namespace) -> str:
    """The options that decide what an episode is, as they are written."""
    names = (
        "model",
        "family",
        "method",
        "driver",
        "dtype",
        "store",
        "link_rate",
        "link_latency",
        "chunk_bytes",
        "transfer_threads",
    )
    given = ((name, getattr(args, name)) for name in names)
    return " ".join(f"--{name.replace('_', '-')} {v}" for name, v in given if v is not None)


def in_the_way(counts: Counter[str]) -> str:
    """What was put in the way of steps, in a line."""
    cancelled = ("cancelled running", "cancelled waiting", "cancelled moved out")
    found = {
        "delays": counts["injected delays"],
        "errors": counts["injected errors"],
        "short reads": counts["injected short reads"],
        "requests cancelled": sum(counts[name] for name in cancelled),
        "transfers cancelled": counts["transfers cancelled"],
        "prefetches tried again": counts["prefetches tried again"],
        "steps failed": counts["failed steps"],
        "resizes": counts["budgets moved"] + counts["budgets moved meanwhile"],
        "preemptions": counts["preemptions"],
    }
    return "in the way: " + ", ".join(f"{n} {name}" for name, n in found.items())


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("--steps", type=int, default=2000, help="at least so many (default: %(default)s)")
    add("--seed", type=int, default=0, help="of everything random (default: 0)")
    add("--episode", type=int, help="run this one only")
    add(
        "--check-every",
        type=int,
        default=4,
        metavar="K",
        help="check the device's tables and bytes every K steps (default: %(default)s)",
    )
    add("--model", default="demo", metavar="DIR", help="(default: %(default)s)")
    add("--family", metavar="ARCHITECTURE", help="of a small random model (default: --model)")
    add("--method", choices=("ngram", "mtp"), default="ngram", help="of drafts (default: ngram)")
    add("--driver", choices=("device", "host"), default="device", help="(default: device)")
    add("--dtype", default="auto", help="of the model (default: the checkpoint's, bfloat16)")
    add(
        "--store",
        choices=("memory", "file", "both"),
        default="memory",
        help="of experts; both: of episodes of even and odd numbers (default: %(default)s)",
    )
    add("--link-rate", metavar="RATE", help="of transfers beside compute (default: there are none)")
    add("--link-latency", metavar="TIME", help="of them (default: 0)")
    add("--chunk-bytes", default="16KiB", metavar="SIZE", help="of them (default: %(default)s)")
    add("--transfer-threads", type=int, default=2, help="of them (default: %(default)s)")
    add("--progress-s", type=float, default=10.0, help="between lines (default: %(default)s)")
    add("--json", action="store_true", help="the summary as a JSON line")
    return parser
