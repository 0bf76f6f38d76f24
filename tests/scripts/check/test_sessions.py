"""Sessions are replayed turn by turn, in their time, and report what the engine did."""

import itertools
import types

import pytest

from moejax.evaluate.experiments.conversations import replay
from moejax.evaluate.experiments.conversations.workloads import (
    Workload,
    conversations,
    synthetic_corpus,
)
from scripts.check import sessions as replay_sessions
from tests.scripts.runs import json_lines, refusal

SMALL = (
    *("--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "256"),
    *("--sessions", "4", "--turns", "4", "--document-tokens", "80", "--question-tokens", "6"),
    *("--answer-tokens", "6", "--shift-tokens", "10", "--shift-share", "0.3", "--rate", "20"),
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
    engine, clock = FakeEngine(), replay.VirtualClock(0.01)
    lines = list(replay.replay(engine, found, clock))
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


def test_a_wall_clock_waits(monkeypatch):
    slept = []
    monkeypatch.setattr(replay_sessions.time, "sleep", slept.append)
    clock = replay.WallClock()
    clock.wait_until(clock.now() + 5)
    clock.wait_until(clock.now() - 5)
    clock.step()
    assert slept == [pytest.approx(5, abs=0.5), 0.0]


@pytest.mark.nightly
@pytest.mark.slow
def test_swapping_sessions_changes_no_token(capsys, tmp_path):
    *roomy, first = json_lines(capsys, replay_sessions.main, *SMALL)
    trace = tmp_path / "trace"
    tight = ("--kv-budget", "288KiB", "--kv-overflow", "swap", "--expert-budget", "25%")
    *lines, summary = json_lines(
        capsys, replay_sessions.main, *SMALL, *tight, "--trace", str(trace)
    )
    first, summary = first["summary"], summary["summary"]
    assert summary["kv"]["swapped_out_bytes"] > 0 == first["kv"]["swapped_out_bytes"]
    assert (summary["turns"], len(lines)) == (16, 16)

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
    from moejax.traces import read_trace

    found = read_trace(trace)
    generated = sum(len(line["output_token_ids"]) for line in lines)
    assert int((found.array("token.phase") == 1).sum()) == generated - 16
    assert set(found.array("token.user").tolist()) == {0, 1, 2, 3}
    shifts = sum(line["kind"] == "shift" for line in lines)
    assert len(found.marks()) == shifts > 0


@pytest.mark.slow
def test_the_table_names_its_columns(capsys):
    assert replay_sessions.main([*SMALL, "--turns", "2", "--sessions", "2"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[:4] == ["turn", "turns", "prompt", "cached"]
    assert [row.split()[:2] for row in rows[:2]] == [["0", "2"], ["1", "2"]]
    assert rows[2].startswith(("1", "2", "3")) and "tokens/s" in rows[2]
    assert rows[3].startswith("KV: ") and "swapped out" in rows[3]


def test_it_takes_what_moejax_generate_takes(capsys):
    """The engine's options are the command's own."""
    options = ("--memory", "3MiB", "--budget", "fixed", "--resize", "peak_headroom")
    *_, last = json_lines(capsys, replay_sessions.main, *SMALL, *options)
    assert last["summary"]["budget"]["resizes"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--sessions", "0"], "sessions must be at least 1"),
        (["--step-ms", "0"], "--step-ms must be above 0"),
        (["--trace", "/dev/null/trace"], "cannot write the trace in /dev/null/trace"),
        (["--kv-budget", "many"], "not a size"),
        (["--resize", "sometimes"], "unknown resize 'sometimes'"),
    ],
)
def test_a_mistake_is_explained(capsys, args, message):
    assert message in refusal(capsys, replay_sessions.main, *args)


def test_conversations_that_do_not_fit_are_refused(tmp_path):
    llm = types.SimpleNamespace(
        model="m",
        config=types.SimpleNamespace(vocab_size=64),
        engine=types.SimpleNamespace(scheduler=types.SimpleNamespace(max_model_len=200)),
        get_tokenizer=lambda: None,
    )
    workload = Workload(document_tokens=190)
    with pytest.raises(
        replay_sessions.UserError, match=r"comes to \d+ tokens, max_model_len is 200"
    ):
        replay_sessions.make_conversations(llm, workload, None)
    with pytest.raises(replay_sessions.UserError, match="m has no tokenizer; leave out --text"):
        replay_sessions.make_conversations(llm, workload, ["a.txt"])
