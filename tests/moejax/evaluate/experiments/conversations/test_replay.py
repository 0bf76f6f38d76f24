"""Conversations are played turn by turn, in their time, and swapping them changes no token."""

import types

import pytest

from moejax.evaluate.experiments.conversations.replay import VirtualClock, replay
from moejax.evaluate.experiments.conversations.workloads import (
    Workload,
    conversations,
    synthetic_corpus,
)


class FakeEngine:
    """Answers each request with its own length after `max_tokens` steps."""

    def __init__(self):
        self.tracer, self.log, self.live, self.steps = None, [], [], 0
        self.ended = []
        self.end_session = self.ended.append

    def add(self, prompt, params, session_id):
        request = types.SimpleNamespace(
            prompt=prompt,
            output=[],
            finish_reason=None,
            arrival_s=0.0,
            first_token_s=1.0,
            token_times=[],
            cached_tokens=0,
            preemptions=0,
            recomputed=False,
            missed_routes=0,
            left=params.max_tokens,
        )
        assert session_id not in [name for name, _ in self.live], "two turns of a session at once"
        self.live.append((session_id, request))
        self.log.append((self.steps, session_id, list(prompt)))
        return request

    def step(self):
        self.steps += 1
        for name, request in [*self.live]:
            request.output.append(len(request.prompt) + len(request.output))
            request.left -= 1
            if not request.left:
                request.finish_reason = "length"
                self.live.remove((name, request))

    def abort(self, requests):
        assert not requests

    def drain(self):
        pass


@pytest.mark.parametrize("rate", [0.5, 50.0])
def test_a_turn_begins_after_the_one_before_and_its_pause(rate):
    workload = Workload(sessions=5, turns=6, rate=rate, think_s=0.7, tool_share=0.5, seed=2)
    found = conversations(workload, synthetic_corpus(64))
    engine, clock = FakeEngine(), VirtualClock(0.01)
    lines = list(replay(engine, found, clock))
    assert len(lines) == 30 and len(set(engine.ended)) == 5
    by_place = {(line["session"], line["turn"]): line for line in lines}
    for session in found:
        history, ready = [], session.arrival_s
        mine = [prompt for _, name, prompt in engine.log if name == f"session {session.number}"]
        for turn, prompt in zip(session.turns, mine, strict=True):
            line = by_place[session.number, turn.index]
            assert prompt == [*history, *turn.new_tokens]
            answer = line["output_token_ids"]
            assert answer == [len(prompt) + i for i in range(turn.max_tokens)]
            history = prompt + answer
            assert line["arrival_s"] >= ready + turn.think_s - 1e-9
            ready = line["arrival_s"] + turn.max_tokens * 0.01  # it ran for so many steps
    # Where sessions overlap they share steps; pauses cost none.
    alone = sum(turn.max_tokens for session in found for turn in session.turns)
    assert engine.steps < alone if rate > 1 else engine.steps <= alone
