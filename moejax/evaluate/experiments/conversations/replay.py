"""Concurrent conversations through an engine, turn by turn, in counted time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moejax.engine.loop import Engine
from moejax.evaluate.experiments.conversations.workloads import Conversation, ConversationTurn
from moejax.requests.sampling_params import SamplingParams


class VirtualClock:
    """Every step takes step_s; pauses take no time."""

    def __init__(self, step_s: float) -> None:
        self._now, self._step_s = 0.0, step_s

    def now(self) -> float:
        return self._now

    def step(self) -> None:
        self._now += self._step_s

    def wait_until(self, moment: float) -> None:
        self._now = max(self._now, moment)


def replay(
    engine: Engine,
    found: Sequence[Conversation],
    clock: VirtualClock,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Runs the conversations to their end; yields a line per turn as turns finish.

    A turn is added when the one before has finished and its pause has passed. Answers have the
    length that the workload says, whatever the model would end with.
    """
    due = [(each.arrival_s, each.number, 0) for each in found]
    heapq.heapify(due)
    history: dict[int, list[int]] = {each.number: [] for each in found}
    running: dict[int, tuple[ConversationTurn, float, Any]] = {}
    try:
        while due or running:
            while due and due[0][0] <= clock.now():
                moment, number, index = heapq.heappop(due)
                turn = found[number].turns[index]
                if engine.tracer is not None and turn.kind == "shift":
                    engine.tracer.mark(f"session {number} turn {index}: {turn.domain}")
                drawn = np.random.SeedSequence([seed, number, index]).generate_state(1)
                params = SamplingParams(
                    temperature=temperature,
                    max_tokens=turn.max_tokens,
                    ignore_eos=True,
                    seed=int(drawn[0]),
                )
                prompt = [*history[number], *turn.new_tokens]
                request = engine.add(prompt, params, session_id=f"session {number}")
                running[number] = turn, moment, request
            if not running:
                clock.wait_until(due[0][0])
                continue
            engine.step()
            clock.step()
            for number, (turn, moment, request) in [*running.items()]:
                if request.finish_reason is None:
                    continue
                del running[number]
                history[number] = [*request.prompt, *request.output]
                turns = found[number].turns
                if turn.index + 1 < len(turns):
                    after = clock.now() + turns[turn.index + 1].think_s
                    heapq.heappush(due, (after, number, turn.index + 1))
                else:
                    engine.end_session(f"session {number}")
                yield _line(turn, moment, request)
        engine.drain()
    finally:
        engine.abort([request for _, _, request in running.values()])
        engine.drain()


def _line(turn: ConversationTurn, moment: float, request: Any) -> dict[str, Any]:
    times = request.token_times
    return {
        "session": turn.session,
        "turn": turn.index,
        "kind": turn.kind,
        "domain": turn.domain,
        "arrival_s": moment,
        "prompt_tokens": len(request.prompt),
        "cached_tokens": request.cached_tokens,
        "output_tokens": len(request.output),
        "output_token_ids": list(request.output),
        "ttft_s": request.first_token_s - request.arrival_s,
        "tpot_s": float(np.mean(times)) if times else None,
        "preemptions": request.preemptions,
        "recomputed": request.recomputed,
        "missed_routes": request.missed_routes,
    }
