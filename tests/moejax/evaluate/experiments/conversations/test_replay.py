"""Conversations are played turn by turn, in their time, and swapping them changes no token."""

import itertools
import types

import pytest

from moejax import LLM
from moejax.evaluate.experiments.conversations.replay import VirtualClock, replay
from moejax.evaluate.experiments.conversations.workloads import (
    Workload,
    conversations,
    synthetic_corpus,
)
from moejax.traces import read_trace

SIZES = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}


TIGHT = {"kv_budget": "288KiB", "kv_overflow": "swap", "expert_budget": "25%"}


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


@pytest.mark.slow
def test_swapping_sessions_changes_no_token(tmp_path):
    workload = Workload(
        sessions=4,
        turns=4,
        document_tokens=80,
        question_tokens=6,
        answer_tokens=6,
        shift_tokens=10,
        shift_share=0.3,
        rate=20.0,
    )

    def played(**options):
        with LLM("demo", progress=False, **SIZES, **options) as llm:
            found = conversations(workload, synthetic_corpus(llm.config.vocab_size, 0))
            return [*replay(llm.engine, found, VirtualClock(0.01))], llm.stats()["kv"]

    roomy, kv = played()
    lines, tight_kv = played(**TIGHT, trace=tmp_path / "trace")
    assert tight_kv["swapped_out_bytes"] > 0 == kv["swapped_out_bytes"]
    assert len(lines) == 16

    def tokens(lines):
        return {(line["session"], line["turn"]): line["output_token_ids"] for line in lines}

    assert tokens(lines) == tokens(roomy)
    for session in range(4):
        mine = [line for line in lines if line["session"] == session]
        assert [line["turn"] for line in mine] == [0, 1, 2, 3]
        for before, line in itertools.pairwise(mine):
            assert line["prompt_tokens"] > before["prompt_tokens"] + before["output_tokens"]
            assert line["cached_tokens"] >= before["prompt_tokens"]
            assert line["ttft_s"] > 0 and not line["recomputed"]
    found = read_trace(tmp_path / "trace")
    generated = sum(len(line["output_token_ids"]) for line in lines)
    assert int((found.array("token.phase") == 1).sum()) == generated - 16
    assert set(found.array("token.user").tolist()) == {0, 1, 2, 3}
    shifts = sum(line["kind"] == "shift" for line in lines)
    assert len(found.marks()) == shifts > 0
