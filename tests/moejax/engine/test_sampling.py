"""Choosing with penalties, biases and log-probabilities: what is called, and what comes out."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from scipy import special

from host_offload.memory.arena import SlotArena
from moejax import LLM, SamplingParams, UserError
from moejax.checkpoints.load import load_checkpoint
from moejax.engine.sampling import TokenSampler, has_penalties
from moejax.models.layers import Decoder
from moejax.requests.request import append_prompt_logprobs
from moejax.start.decide.shapes import step_shapes
from moejax.step.parts import StepSpec, empty_prefill
from moejax.step.programs import ProgramKey
from moejax.step.runner import Runner
from moejax.step.sampler import GREEDY_BELOW
from pallas_kernels import resolve_ops

GREEDY = SamplingParams(temperature=0, max_tokens=100)


@dataclasses.dataclass(eq=False)
class Sequence:
    """What a TokenSampler sees of a request."""

    prompt: list[int]
    params: SamplingParams
    row: int | None = 0
    seed: int = 0
    dispatched: int = 1
    output: list[int] = dataclasses.field(default_factory=list)
    prompt_logprobs: list = dataclasses.field(default_factory=list)
    request_id: str = "7"


# ---- what is called


class CalledRunner:
    """A Runner without a device: it records its calls and chooses token 3 everywhere."""

    def __init__(self, rows=4):
        self.shapes = dataclasses.make_dataclass("Shapes", ["rows"])(rows)
        self.config = dataclasses.make_dataclass("Config", ["vocab_size"])(10)
        self.calls = []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, args))
            return {"adjust": "adjusted", "sample": "tokens", "token_logprobs": "found"}.get(name)

        return call

    def names(self):
        names, self.calls = [name for name, _ in self.calls], []
        return names


def _sample(runner, sampler, *sequences):
    for sequence in sequences:
        sequence.output, sequence.dispatched = [*sequence.output, 3], sequence.dispatched + 1
    result = sampler.sample("logits", sequences)
    return result, runner.names()


def test_a_request_without_extras_is_chosen_as_ever():
    rng, runner = np.random.default_rng(0), CalledRunner(rows=5)
    sampler = TokenSampler(runner, {0})
    for _ in range(20):
        sampled = [
            Sequence(
                prompt=[1] * int(rng.integers(1, 9)),
                params=SamplingParams(
                    temperature=float(rng.choice([0, 0.7])), top_k=int(rng.integers(3)), top_p=0.5
                ),
                row=int(row),
                seed=int(rng.integers(2**32)),
                dispatched=int(rng.integers(1, 5)),
            )
            for row in rng.permutation(5)[: rng.integers(1, 6)]
        ]
        for sequence in sampled:
            sampler.place(sequence)
        assert sampler.sample("logits", sampled) == ("tokens", None)
        ((name, (logits, update, given)),) = runner.calls
        runner.calls = []
        expected = {
            "temperature": np.zeros(5, np.float32),
            "top_k": np.zeros(5, np.int32),
            "top_p": np.ones(5, np.float32),
            "min_p": np.zeros(5, np.float32),
            "seed": np.zeros(5, np.uint32),
            "position": np.zeros(5, np.int32),
        }
        for sequence in sampled:
            for key in ("temperature", "top_k", "top_p", "min_p"):
                expected[key][sequence.row] = getattr(sequence.params, key)
            expected["seed"][sequence.row] = sequence.seed
            expected["position"][sequence.row] = len(sequence.prompt) + sequence.dispatched - 1
        assert (name, logits) == ("sample", "logits")
        assert set(np.flatnonzero(update)) == {s.row for s in sampled}
        if all(s.params.temperature < GREEDY_BELOW for s in sampled):
            assert given is None
            continue
        for found, wanted in zip(given, expected.values(), strict=True):
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(found, wanted)


def test_positions_and_requests_change_from_step_to_step():
    runner = CalledRunner()
    sampler = TokenSampler(runner, {0})
    first, second = (Sequence([1, 2], SamplingParams(), row=r, dispatched=5) for r in (0, 1))

    def position(*sampled):
        sampler.sample("logits", sampled)
        (_, (_, update, params)) = runner.calls.pop()
        return update.tolist(), params[-1].tolist()

    assert position(first) == ([True, False, False, False], [6, 0, 0, 0])
    first.dispatched += 1
    assert position(first) == ([True, False, False, False], [7, 0, 0, 0])
    assert position(first, second) == ([True, True, False, False], [7, 6, 0, 0])
    first.row = 2
    assert position(first, second) == ([False, True, True, False], [0, 6, 7, 0])


def test_only_what_a_request_asks_for_is_launched():
    runner = CalledRunner()
    sampler = TokenSampler(runner, {0})
    plain = Sequence([1], GREEDY, dispatched=0)
    biased = Sequence([1], dataclasses.replace(GREEDY, logit_bias={2: 1}), row=1, dispatched=0)
    penalized = dataclasses.replace(GREEDY, presence_penalty=1, logprobs=3)
    penalized = Sequence([1], penalized, row=2, dispatched=0)
    sampler.place(plain)
    sampler.place(biased)
    assert runner.names() == []
    assert _sample(runner, sampler, plain)[1] == ["sample"]
    assert _sample(runner, sampler, plain, biased)[1] == ["adjust", "sample"]
    sampler.place(penalized)
    assert runner.names() == ["prepare_counts"]
    penalized.output, penalized.dispatched = [], 1
    (tokens, found), names = sampler.sample("logits", [plain, penalized]), runner.names()
    assert names == ["recount", "adjust", "sample", "tally", "token_logprobs"]
    assert (tokens, found) == ("tokens", "found")
    # The row's counts go on by themselves, and the tokens need not be read.
    penalized.dispatched = 2
    sampler.sample("logits", [penalized])
    assert runner.names() == ["adjust", "sample", "tally", "token_logprobs"]


def test_log_probabilities_are_of_the_logits_before_penalties():
    runner = CalledRunner()
    params = dataclasses.replace(GREEDY, repetition_penalty=2.0, logprobs=0)
    TokenSampler(runner, {0}).sample("logits", [Sequence([1], params)])
    called = dict(runner.calls)
    assert called["sample"][0] == "adjusted"
    assert called["token_logprobs"] == ("logits", "tokens")


def test_a_row_is_counted_anew_for_every_request_and_after_it_was_moved_out():
    runner = CalledRunner()
    sampler = TokenSampler(runner, {0})
    params = dataclasses.replace(GREEDY, frequency_penalty=0.5)
    first = Sequence([1, 2], params, row=1)
    sampler.place(first)
    sampler.sample("logits", [first])
    assert runner.calls[1] == ("recount", (1, [1, 2], []))
    other = Sequence([5], params, row=1, request_id="8")
    runner.calls = []
    sampler.sample("logits", [other])
    assert runner.calls[0] == ("recount", (1, [5], []))
    first.row, first.output, first.dispatched = 3, [3, 4], 3
    sampler.place(first)
    runner.calls = []
    sampler.sample("logits", [first])
    assert runner.calls[0] == ("recount", (3, [1, 2], [3, 4]))
    first.dispatched = 5  # token 3 was chosen, token 4 too, neither was read
    sampler.place(first)
    with pytest.raises(
        ValueError, match="request 7 got a row while 4 tokens were dispatched and 2"
    ):
        sampler.sample("logits", [first])


def test_min_tokens_bans_what_would_end_the_sequence():
    runner = CalledRunner()
    sampler = TokenSampler(runner, {0, 9})
    bias = {2: 5.0, 7: 1.0}
    params = dataclasses.replace(GREEDY, min_tokens=2, stop_token_ids=[4, 7], logit_bias=bias)
    sequence = Sequence([1], params, row=2)

    def biases():
        runner.calls = []
        sampler.sample("logits", [sequence])
        ids, values = runner.calls[0][1][2]
        assert (ids[[0, 1, 3]] == -1).all() and ids.shape[0] == 4
        used = ids[2] >= 0
        return list(zip(ids[2][used].tolist(), values[2][used].tolist(), strict=True))

    expected = [(2, 5.0), (7, -np.inf), (0, -np.inf), (4, -np.inf), (9, -np.inf)]
    assert biases() == expected
    sequence.dispatched = 2
    assert biases() == expected
    sequence.dispatched = 3
    assert biases() == [(2, 5.0), (7, 1.0)]


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_token_ids_must_be_in_the_vocabulary(name):
    sampler = TokenSampler(CalledRunner(), {0})
    values = {"logit_bias": {9: 1, 10: 1}, "stop_token_ids": [9, 10]}
    message = f"token id 10 in {name} is outside of the vocabulary of 10"
    with pytest.raises(UserError, match=message):
        sampler.check(SamplingParams(**{name: values[name]}))
    sampler.check(SamplingParams(logit_bias={9: 1}, stop_token_ids=[9]))


def test_too_many_end_of_sequence_tokens_are_refused():
    with pytest.raises(ValueError, match="85 end-of-sequence tokens, at most 84"):
        TokenSampler(CalledRunner(), range(85))


@pytest.mark.slow
def test_company_that_truncates_does_not_change_a_draw(monkeypatch):
    """Steps in which nobody truncates draw without searches, by another executable."""
    chosen, choice = [], Runner._choice

    def noted(self, params):
        chosen.append(choice(self, params))
        return chosen[-1]

    monkeypatch.setattr(Runner, "_choice", noted)
    limits = {"max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 64}
    alone = SamplingParams(temperature=1.0, min_p=0.01, max_tokens=12, seed=5, ignore_eos=True)
    beside = dataclasses.replace(alone, top_k=3, top_p=0.8, max_tokens=4)
    with LLM("demo", ops="xla", progress=False, **limits) as llm:

        def tokens(*params):
            outs = llm.generate([[7, 8, 9]] * len(params), [*params])
            return [out.outputs[0].token_ids for out in outs]

        (want,) = tokens(alone)
        assert chosen == ["sample_all"] * 12
        chosen.clear()
        got, other = tokens(alone, beside)
        assert 3 <= chosen.count("sample") <= 4 and chosen.count("sample_all") >= 8
    assert got == want and other != want[:4]


# ---- what comes out: the embedded model, without an engine


ROWS, LIMIT = 3, 128


@pytest.fixture(scope="module")
def runner(demo_dir):
    device = jax.devices("cpu")[0]
    loaded = load_checkpoint(demo_dir, device=device)
    config = loaded.config
    layout = config.slot_layout(loaded.layout.itemsize)
    ops, limits = (
        resolve_ops("auto", platform="cpu"),
        {"max_model_len": LIMIT, "max_num_batched_tokens": 256},
    )
    shapes = step_shapes(layout, rows=ROWS, waves=1, **limits)
    steps = StepSpec("cpu", "", "device", ops, config, loaded.dtype, layout, shapes)
    model = Decoder(config, loaded.params, ops)
    runner = Runner(model, loaded.store, steps, device, slots=32, cells=config.num_experts)
    yield runner
    runner.delete()


class Loop:
    """An engine's loop without a scheduler: every sequence has a row of its own from the start."""

    def __init__(self, runner, *sequences):
        self.runner, self.sampler, self.sequences = runner, TokenSampler(runner, {0}), sequences
        shapes, layout = runner.shapes, runner.layout
        arena = SlotArena(layout, runner.slots, 1, 1, 1)
        arena.grant_kv_slots(runner.slots)
        self.table = np.zeros((shapes.rows, shapes.blocks), np.int32)
        for row in range(shapes.rows):
            self.table[row] = arena.allocate_pages(shapes.blocks)
        for sequence in sequences:
            self.sampler.place(sequence)

    def prefill(self, kind="prefill"):
        """Returns the step's output; sets every sequence's first logits."""
        shapes = self.runner.shapes
        chunks = [(s, i) for s in self.sequences for i in range(0, len(s.prompt), shapes.chunk)]
        c = shapes.chunk
        prefill = empty_prefill(shapes)._replace(count=np.int32(len(chunks)))
        for i, (sequence, start) in enumerate(chunks):
            part, after = sequence.prompt[start : start + c], sequence.prompt[start + 1 :][:c]
            prefill.row[i], prefill.start[i], prefill.length[i] = sequence.row, start, len(part)
            prefill.tokens[i, : len(part)], prefill.targets[i, : len(after)] = part, after
            prefill.last[sequence.row] = i * c + len(part) - 1
        return self.runner.prefill(prefill, jax.numpy.asarray(self.table), kind=kind)

    def run(self, steps):
        """Greedy text of all sequences. Returns the logits each token was chosen from."""
        output, seen, unread = self.prefill(), [], None
        for step in range(steps):
            if step:
                positions = np.full(self.runner.shapes.rows, -1, np.int32)
                for sequence in self.sequences:
                    positions[sequence.row] = len(sequence.prompt) + step - 1
                output = self.runner.decode(positions, jax.numpy.asarray(self.table))
            for sequence in self.sequences:
                sequence.dispatched = step + 1
            tokens, _ = self.sampler.sample(output.logits, self.sequences)
            self._read(unread)
            unread = tokens
            seen.append(np.asarray(output.logits))
        self._read(unread)
        return seen

    def _read(self, tokens):
        if tokens is not None:
            for sequence in self.sequences:
                sequence.output.append(int(tokens[sequence.row]))


def _expected(sequence, logits):
    """Greedy tokens by the formulas in float64, and whether each is clear of the second."""
    params, counts, tokens, clear = sequence.params, {}, [], []
    for step_logits in logits:
        x = step_logits[sequence.row].astype(np.float64)
        for token, bias in params.logit_bias or ():
            x[token] += bias
        if len(tokens) < params.min_tokens:
            x[[0, *params.stop_token_ids]] = -np.inf
        seen = [*{*sequence.prompt, *counts}]
        factor = params.repetition_penalty
        x[seen] = np.where(x[seen] > 0, x[seen] / factor, x[seen] * factor)
        for token, count in counts.items():
            x[token] -= count * params.frequency_penalty + params.presence_penalty
        tokens.append(int(np.argmax(x)))
        clear.append(np.sort(x)[-1] - np.sort(x)[-2] > 1e-4)
        counts[tokens[-1]] = counts.get(tokens[-1], 0) + 1
    return tokens, clear


@pytest.mark.nightly
@pytest.mark.slow
def test_nothing_more_is_compiled_or_allocated_without_the_extras(runner):
    sequences = [Sequence([7, 8, 9], GREEDY), Sequence([5], GREEDY, row=1)]
    Loop(runner, *sequences).run(4)
    assert runner.counts is None
    assert not {"adjust", "add_bias", "tally", "recount", "logprobs"} & {
        *map(str, runner.executables())
    }


@pytest.mark.slow
def test_penalties_and_biases_follow_the_formulas_and_leave_neighbours_alone(runner):
    prompt = [7, 8, 9]
    alone = Sequence(prompt, GREEDY)
    Loop(runner, alone).run(12)
    params = dataclasses.replace(
        GREEDY,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.7,
        logit_bias={alone.output[1]: -100, 11: 3.5},
    )
    ended = alone.output[0]
    shy = dataclasses.replace(GREEDY, min_tokens=5, stop_token_ids=[ended])
    plain, penalized = Sequence(prompt, GREEDY), Sequence(prompt, params, row=1)
    waiting = Sequence(prompt, shy, row=2)
    logits = Loop(runner, plain, penalized, waiting).run(12)
    assert plain.output == alone.output
    for sequence in (penalized, waiting):
        expected, clear = _expected(sequence, logits)
        assert sequence.output == expected and all(clear)
        assert sequence.output != alone.output
    assert alone.output[1] not in penalized.output
    assert ended not in waiting.output[:5]


def test_a_moved_row_counts_as_if_it_had_stayed(runner):
    params = dataclasses.replace(GREEDY, repetition_penalty=1.2)
    sequence = Sequence([7, 8, 9], params)
    loop = Loop(runner, sequence)
    loop.run(6)
    stayed = np.asarray(runner.counts)[0]
    assert stayed.sum() >= 2 * 6 + 3
    loop.sampler.place(dataclasses.replace(sequence, row=2))
    moved = Sequence([7, 8, 9], params, row=2, dispatched=7, output=sequence.output)
    runner.recount(2, moved.prompt, moved.output)
    np.testing.assert_array_equal(np.asarray(runner.counts)[2], stayed)


@pytest.mark.parametrize("name", ["adjust", "add_bias"])
def test_logits_of_fewer_rows_become_those_of_all_rows(runner, name):
    programs, rng = runner.programs(), np.random.default_rng(0)
    program = programs.program(ProgramKey(name, 2))
    logits, *others = (rng.integers(0, 3, a.shape).astype(a.dtype) for a in program.args)
    others[-2][:] = np.arange(others[-2].shape[1])  # ids, each once
    whole = np.concatenate([logits, np.zeros_like(logits[:1])])
    found = jax.jit(program.function)(logits, *others)
    expected = jax.jit(programs.program(ProgramKey(name)).function)(whole, *others)
    np.testing.assert_array_equal(found, expected)
    assert found.shape == (ROWS, runner.config.vocab_size)


@pytest.mark.parametrize(
    "length",
    [pytest.param(70, id="two chunks"), pytest.param(5, id="less", marks=pytest.mark.nightly)],
)
def test_prompt_logprobs(runner, length):
    prompt = np.random.default_rng(1).integers(1, 4096, length).tolist()
    sequence = Sequence(prompt, dataclasses.replace(GREEDY, prompt_logprobs=4), row=1)
    loop = Loop(runner, sequence)
    output = loop.prefill("prompt_logprobs")
    # Generation goes on from the same logits.
    plain = np.asarray(loop.prefill().logits)[1]
    np.testing.assert_array_equal(np.asarray(output.logits)[1].view("u4"), plain.view("u4"))

    scores, chunk = jax.device_get(output.scores), runner.shapes.chunk
    assert scores.top_ids.shape == (runner.shapes.prefill_chunks, chunk, 20)
    for i, start in enumerate(range(0, length, chunk)):
        rows = range(min(chunk, length - 1 - start))
        append_prompt_logprobs(sequence, scores, i, rows)
    assert len(sequence.prompt_logprobs) == length - 1

    for place in {0, 1, 2, 3, length - 7, length - 6, length - 2} & {*range(length)}:
        entry = sequence.prompt_logprobs[place]
        prefix = Sequence(prompt[: place + 1], GREEDY)
        logits = np.asarray(Loop(runner, prefix).prefill().logits)[0].astype(np.float64)
        logp, order = special.log_softmax(logits), np.argsort(-logits, kind="stable")
        assert [t for t, e in entry.items() if e.rank <= 4] == order[:4].tolist()
        token = prompt[place + 1]
        assert order[entry[token].rank - 1] == token
        for t, e in entry.items():
            assert e.logprob == pytest.approx(logp[t], abs=2e-3)


def test_has_penalties():
    assert not has_penalties(SamplingParams(logit_bias={1: 1}, min_tokens=3))
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert has_penalties(SamplingParams(**{name: 0.5}))
