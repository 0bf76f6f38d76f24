"""Speculative decoding: bits are those of steps without drafts, and it stops where it is slower."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.memory.budget import ArenaTooSmall
from host_offload.policies.precision.dynaexq import DynaExq
from host_offload.policies.precision.hobbit import Hobbit
from host_offload.policies.prefetch.oracle import Oracle
from host_offload.simulate.replay import replay
from host_offload.simulate.simulator import spec_of
from host_offload.traces.reader import TraceError, read_trace
from moejax import LLM, SamplingParams, StructuredOutputsParams, UserError
from moejax.commands.main import main
from moejax.engine import loop, scheduler
from moejax.engine.draft_length import LOSS, WON, Acceptance, DraftLength, prior_ratio
from moejax.engine.drafts import Drafts, NgramDrafts, look_up
from moejax.engine.step_work import Step
from moejax.errors import OutOfKV
from moejax.start.build import _drafts
from moejax.start.option_values import read_speculation
from moejax.start.options import Config
from moejax.start.report.dry_run import dry_run
from moejax.step.step_parts import PageTables, decode_tokens
from pallas_kernels.cpu.arena import TransferFailure
from pallas_kernels.kv_write import KVPage
from tests.moejax.engine.scenes import LIMITS, LINK, Known, at_rest, open_llm, same_bits
from tests.moejax.engine.test_placement import COSTS
from tests.moejax.engine_runs import Faulty, Job, Recorded, mixed_jobs, run
from tests.moejax.models.families import write_checkpoint
from tests.pallas_kernels.contract import NATIVE

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
PLACED = f"{COSTS},load=1ms"
DEFERRED = {**LINK, "driver": "host", "placement": f"ktransformers,{PLACED},defer=2"}
FEW: dict[str, Any] = {"max_num_seqs": 8, "expert_budget": "33%", "kv_budget": "288KiB"}


def jobs_of(vocabulary: int) -> list[Job]:
    """Sessions and shared beginnings, greedy and sampled, with everything that changes a token."""
    rng = np.random.default_rng(2)
    document = rng.integers(1, vocabulary, 70).tolist()
    words = list(range(5, vocabulary, 7))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0, "presence_penalty": 0.8, "logit_bias": {7: 3.0}, "min_tokens": 12},
        {"temperature": 0.8, "allowed_token_ids": words, "stop_token_ids": words[:9]},
    ]
    found = []
    for i in range(12):
        prompt = [*document[: int(rng.integers(1, 71))], *rng.integers(1, vocabulary, 5).tolist()]
        params = SamplingParams(
            seed=i, max_tokens=70 - 4 * i, ignore_eos=i % 2 == 0, **kinds[i % 5]
        )
        session = f"s{i % 2}" if i >= 8 else None
        found.append(Job(tuple(prompt[-40:] if session else prompt), params, i // 6, session))
    return found


class Pair:
    """An engine, and what jobs give without drafts."""

    def __init__(self, llm: LLM):
        self.llm, self.jobs = llm, jobs_of(llm.config.vocab_size)
        self.plain = self.run()
        self.answers = {i: each.tokens for i, each in enumerate(self.plain)}

    def run(self, drafts: Drafts | None = None) -> list[Recorded]:
        self.llm.engine.drafts = drafts
        try:
            return run(self.llm, self.jobs)
        finally:
            for session in [s.session_id for s in self.llm.engine.scheduler.sessions.all]:
                self.llm.end_session(session)


def pairs(model, kv: str) -> Iterator[Pair]:
    """KV is so small that requests are moved out, and a third of the experts has a cell."""
    with open_llm(model, **{**FEW, "kv_budget": kv}, speculative_config=NGRAM) as llm:
        yield Pair(llm)


@pytest.fixture(scope="module")
def demo() -> Iterator[Pair]:
    yield from pairs("demo", FEW["kv_budget"])


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Iterator[Pair]:
    """Convolutions keep a state in some of its layers."""
    yield from pairs(write_checkpoint(tmp_path_factory.mktemp("m"), "Lfm2MoeForCausalLM"), "192KiB")


def test_drafts_change_no_bit(demo):
    drafts = Known(demo.answers)
    before = demo.llm.engine.scheduler.counts["preemptions"]
    assert same_bits(demo.run(drafts), demo.plain)
    counts = drafts.counts
    assert counts["accepted"] > 60 and counts["drafted"] - counts["accepted"] > 30, counts
    assert demo.llm.engine.scheduler.counts["preemptions"] > before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kv"),
    [
        *(("DeepseekV3ForCausalLM", "192KiB"), ("GptOssForCausalLM", "192KiB")),
        ("Qwen3NextForCausalLM", "512KiB"),
        *(
            pytest.param(family, kv, marks=pytest.mark.nightly)
            for family, kv in {
                "DeepseekV32ForCausalLM": "192KiB",
                "Llama4ForCausalLM": "192KiB",
                "GraniteMoeHybridForCausalLM": "512KiB",
                "JambaForCausalLM": "512KiB",
                "KimiLinearForCausalLM": "512KiB",
            }.items()
        ),
    ],
)
def test_latent_pages_windows_chunks_and_states_change_no_bit(family, kv, tmp_path):
    for pair in pairs(write_checkpoint(tmp_path / "m", family), kv):
        drafts = Known(pair.answers)
        assert same_bits(pair.run(drafts), pair.plain)
        right, drafted = drafts.counts["accepted"], drafts.counts["drafted"]
        assert right > 50 and drafted - right > 20, drafts.counts


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "random,paged=true", "expert_budget": "20%"},
        {"precision": "random", "memory": "3MiB"},
    ],
)
def test_versions_that_do_not_change_go_together_with_drafts(options, tmp_path):
    options = {**options, "max_num_seqs": 12, "trace": tmp_path / "t"}
    with open_llm(speculative_config=NGRAM, enable_prefix_caching=False, **options) as llm:
        llm.engine.drafts = None
        plain = run(llm, mixed_jobs())
        for mistakes in (0.1, 0.3, 0.7):
            answers = {i: each.tokens for i, each in enumerate(plain)}
            drafts = llm.engine.drafts = Known(answers, mistakes)
            assert same_bits(run(llm, mixed_jobs()), plain)
            counts = drafts.counts
            assert counts["accepted"] > 20 and counts["drafted"] - counts["accepted"] > 10, counts
        assert (llm.stats()["experts"]["fills"] > 100) == ("memory" not in options)
    replay(read_trace(tmp_path / "t"))


@pytest.mark.slow
def test_states_go_on_from_the_last_right_token(hybrid):
    """With the bits of an engine that knows no drafts."""
    drafts = Known(hybrid.answers)
    assert same_bits(hybrid.run(drafts), hybrid.plain)
    counts = drafts.counts
    assert counts["accepted"] > 60 and counts["drafted"] - counts["accepted"] > 30, counts
    with open_llm(hybrid.llm.model, max_num_seqs=8) as llm:
        assert same_bits(run(llm, hybrid.jobs), hybrid.plain)


MISTAKES = {
    "accepts one too many": (
        "demo",
        loop.Engine,
        "_accept",
        "request.output[-1] != guessed",
        "request.output[-1] != guessed and draft.accepted != 1",
    ),
    "keeps keys of a rejected row": (
        "demo",
        loop.Engine,
        "_accept",
        "return",
        "return setattr(request, 'computed', request.computed + 1)",
    ),
    "is off by one position": (
        "demo",
        loop.Engine,
        "_dispatch_step",
        "draft.request.computed + np",
        "draft.request.computed + 1 + np",
    ),
    "reads other pages": (
        "demo",
        scheduler.Scheduler,
        "share_tables",
        "self.block_table[row] = table",
        "self.block_table[row] = table[::-1]",
    ),
    "leaves the counts of penalties behind": (
        "demo",
        loop.Engine,
        "_place",
        "self._sampler.recount(request)",
        "pass",
    ),
    "keeps the state before the draft": (
        "hybrid",
        loop.Engine,
        "_accept",
        "self.scheduler.take_state(request, state)",
        "pass",
    ),
    "begins each row of a draft from the state before it": (
        "hybrid",
        scheduler.Scheduler,
        "share_tables",
        "table[-2 * pages : -pages] = table[-pages:]",
        "pass",
    ),
    "writes states of a draft to the request's": (
        "hybrid",
        scheduler.Scheduler,
        "share_tables",
        "table[-pages:] = state_rows",
        "pass",
    ),
    "takes rows before the request's": (
        "hybrid",
        scheduler.Scheduler,
        "add_drafts",
        "row > _row(request)",
        "row != _row(request)",
    ),
}


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(name, marks=[] if name == "accepts one too many" else pytest.mark.slow)
        for name in MISTAKES
    ],
)
def test_mistakes_are_found(mistake, request, monkeypatch):
    model, owner, name, right, wrong = MISTAKES[mistake]
    pair = request.getfixturevalue(model)
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert right in source
    namespace = dict(vars(inspect.getmodule(owner)))
    exec(source.replace(right, wrong), namespace)
    monkeypatch.setattr(owner, name, namespace[name])
    try:
        if mistake == "reads other pages":  # and writes to them
            with pytest.raises(Faulty, match="the bytes of a resident expert differ"):
                pair.run(Known(pair.answers))
        else:
            assert not same_bits(pair.run(Known(pair.answers)), pair.plain)
    finally:  # pages and cells may have wrong bytes now
        pair.llm.engine.scheduler.cache.drop_idle()
        pair.llm.engine.runner.forget_experts()


def test_structured_outputs_and_stop_strings_are_drafted(demo):
    params = SamplingParams(
        temperature=0.9,
        seed=1,
        max_tokens=40,
        structured_outputs=StructuredOutputsParams(regex="(the |old |sea ){3,50}"),
        stop=["sea old the"],
        bad_words=["old old"],
        n=2,
    )
    found = []
    for drafts in (None, NgramDrafts(4, 3, 1, adaptive=False)):
        demo.llm.engine.drafts = drafts
        (out,) = demo.llm.generate(["The old man"], params, use_tqdm=False)
        found.append([(each.token_ids, each.text, each.finish_reason) for each in out.outputs])
    assert found[0] == found[1] and drafts is not None and drafts.counts["accepted"] > 5


@pytest.mark.parametrize("model", ["demo", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_a_draft_that_is_never_read_leaves_nothing(model, request, monkeypatch):
    """Its request is aborted after the dispatch, or an expert of the step could not be read."""
    pair: Pair = request.getfixturevalue(model)
    for cut in ("abort", "failed read"):
        with monkeypatch.context() as patch:
            cut_a_draft(pair, cut, patch)
    assert same_bits(pair.run(), pair.plain)


def cut_a_draft(pair: Pair, cut: str, patch: pytest.MonkeyPatch) -> None:
    engine, cut_drafts = pair.llm.engine, []
    failed = [TransferFailure(0, 0, "an injected error")]
    first, second = (engine.add([*job.prompt], job.params) for job in pair.jobs[:2])

    def listen(step: Step) -> None:
        drafts = [draft for draft in step.work.drafts if draft.request is first]
        if drafts and not cut_drafts and len(first.output) > 8:
            cut_drafts.extend(drafts)
            if cut == "abort":
                engine.abort([first])
            else:
                patch.setattr(engine.runner, "failures", lambda writes: failed)

    patch.setattr(engine, "listener", listen)
    patch.setattr(engine, "drafts", Known(pair.answers, mistakes=0.0))
    while not engine.idle:
        engine.step()
    assert [draft.accepted for draft in cut_drafts] == [0] and first.finish_reason == "abort"
    assert 8 < len(first.output) < 50 and first.output == pair.answers[0][: len(first.output)]
    if cut == "abort":
        assert second.output == pair.answers[1]
    else:
        assert "an injected error" in str(first.error) and "an injected" in str(second.error)
    assert engine.scheduler.cache.available == engine.scheduler.arena.pages


@pytest.mark.parametrize("drafts", [False, True])
def test_all_rows_write_their_keys_before_any_row_reads(drafts):
    """A kernel that does both at once has no such order."""
    context: Any = SimpleNamespace(drafts=drafts, row_tile=4, page=KVPage(16, 1, 8))
    tables = PageTables(jnp.zeros((4, 2), jnp.int32), jnp.zeros((4, 0), jnp.int32))
    tokens = decode_tokens(jnp.arange(4), tables, context)
    assert (tokens.write_and_attend is None) == drafts


# ---- guesses, and whether they pay


@pytest.mark.parametrize(
    ("tokens", "longest", "shortest", "guess"),
    [
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], 5, 2, [4, 1, 2, 4]),  # the last of equal matches
        ([1, 2, 3, 9, 5, 2, 4, 1, 2], 5, 1, [3, 9, 5, 2]),  # the longest match
        ([1, 2, 3, 9, 5, 2, 4, 1, 2], 1, 1, [4, 1, 2, 4]),
        ([7, 7, 7], 5, 2, [7, 7, 7, 7]),  # a match that overlaps the end
        ([1, 2, 3, 2], 5, 2, []),
        ([1], 5, 1, []),
    ],
)
def test_guesses_are_what_followed_before(tokens, longest, shortest, guess):
    assert look_up(np.array(tokens, np.int32), longest, shortest, 4).tolist() == guess


class Load:
    """A run of one request whose drafts are right with a probability, token by token. A step with
    a draft of n tokens takes 1 + n·row times as long as one without, times a noise of at most
    1 + noise. There is a draft in a share of the steps. Steps that look for drafts, and the first
    one after them, wait."""

    def __init__(
        self,
        right: float,
        row: float,
        noise: float = 0.0,
        free: bool = True,
        share: float = 1.0,
        wait: float = 0.0,
    ):
        self.rng, self.free, self.share = np.random.default_rng(0), free, share
        self.wait, self.waits, self.speed = wait, False, 1.0
        self.right, self.row, self.noise = right, row, noise
        self.choice = DraftLength(1, (0, 1, 2, 4), Acceptance(0.25 if free else 0.5))
        self.drafted: list[bool] = []

    def accepted(self, most: int) -> int:
        wrong = np.flatnonzero(self.rng.random(most) >= self.right)
        return int(wrong[0]) if len(wrong) else most

    def run(self, tokens: int) -> float:
        """Returns the time over that of steps without drafts, each of 1 s."""
        gave = seconds = 0.0
        while gave < tokens:
            length = self.choice.now if self.rng.random() < self.share else 0
            self.drafted.append(length > 0)
            accepted = self.accepted(length)
            self.waits, waited = self.choice.now > 0, self.waits
            took = 1 + length * self.row + self.wait * (self.waits or waited)
            took *= (1 + self.noise * self.rng.random()) / self.speed
            if self.choice.now:
                self.choice.acceptance.add(accepted, length)
            elif self.free:
                guessed = 4 if self.rng.random() < self.share else 0
                self.choice.acceptance.add(self.accepted(guessed), guessed)
            self.choice.add(1 + accepted, took, float(length > 0))
            gave, seconds = gave + 1 + accepted, seconds + took
        return seconds / (gave * (1 + self.noise / 2))


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("row", [0.0, 0.4, 1.0])
def test_drafts_that_are_never_right_cost_little(row, free):
    """Whether guesses show it beforehand or not."""
    load = Load(0.0, row, free=free)
    assert load.run(64) < 1 + (0.0 if free else (LOSS + 1) / 64) + 1e-9
    assert load.run(1000) < 1.02


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize(("right", "row"), [(0.5, 0.7), (0.7, 0.9), (0.9, 1.0), (0.5, 0.5)])
def test_drafts_that_do_not_pay_cost_little(right, row, free):
    """A row costs more than an estimate before says, so that they must be tried."""
    for noise in (0.0, 0.5):
        load = Load(right, row, noise, free)
        assert load.run(64) < 1.09
        assert load.run(2000) < 1.01


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize(
    ("right", "row", "gain"), [(0.9, 0.1, 2.9), (0.8, 0.3, 1.5), (0.7, 0.2, 1.5)]
)
def test_drafts_that_pay_are_used_soon(right, row, gain, free):
    load = Load(right, row, free=free)
    load.run(24)
    assert any(load.drafted[:12])
    assert load.run(1000) < 1.15 / gain
    noisy = Load(right, row, 0.5, free)
    assert noisy.run(2000) < 1.15 / gain


def test_few_drafts_that_pay_are_used_too():
    """Steps without a guess cost no rows, so that it does not matter how many they are."""
    load = Load(0.9, 0.2, share=0.3)
    assert load.run(1000) < 0.75
    load.right = 0.1
    assert load.run(1000) < 1.02


@pytest.mark.parametrize("share", [0.2, 0.3])
def test_what_steps_wait_to_look_for_drafts_counts(share):
    """Also of steps that find none, where a step with a draft would pay by itself."""
    load = Load(0.8, 0.2, share=share, wait=0.5)
    load.run(200)
    load.drafted.clear()
    assert load.run(2000) < 1.015
    assert Load(0.8, 0.2, share=share).run(1000) < 0.9


@pytest.mark.parametrize(("row", "share", "wait"), [(0.1, 0.5, 0.5), (0.6, 0.4, 0.0)])
def test_how_long_steps_take_is_of_those_with_and_without_a_draft(row, share, wait):
    """The few with one are no disturbed steps."""
    load = Load(1.0, row, share=share, wait=wait)
    load.run(1000)
    assert load.choice.ratio(4) == pytest.approx(1 + wait + share * 4 * row, rel=0.08)


def test_the_step_after_drafts_is_part_of_their_loss():
    """Nothing was prepared for it while they were verified."""
    load = Load(0.0, 0.2, free=False)
    while not load.choice.lost or load.choice.now:
        load.run(1)
    lost = load.choice.lost
    for seconds, more in ((2.5, 1.5), (2.5, -0.01)):
        load.choice.add(1.0, seconds, 0.0)
        lost += more
        assert load.choice.lost == pytest.approx(lost)


def test_a_loss_is_paid_back_more_slowly_each_time():
    """And the step that ends drafts, which nothing was prepared for, is part of it."""
    for wait in (0.0, 1.0):
        load = Load(0.8, 1.2, wait=wait)
        load.run(300)
        assert load.run(1500) < 1.012, wait


def test_drafts_end_and_begin_again_with_the_load():
    load = Load(0.9, 0.2)
    load.run(500)
    assert load.choice.now == 4
    load.right = 0.0
    load.drafted.clear()
    load.run(100)
    assert 0.8 * sum(load.drafted) < LOSS + WON + 0.8 and not load.choice.now
    load.right = 0.9
    load.run(200)
    assert load.choice.now == 4
    load.row = 1.5
    assert load.run(300) < 1.12 and not load.choice.now
    load.row = 0.1  # which nothing but a trial shows
    load.run(3000)
    assert load.choice.now == 4


def test_a_stretch_that_rejects_drafts_ends_none_that_won_more():
    """As the beginning of an answer that then repeats the prompt."""
    load = Load(0.9, 0.2)
    load.run(100)
    for _ in range(5):
        load.right = 0.0
        load.run(8)
        assert load.choice.now == 4
        load.right = 0.9
        load.run(60)


@pytest.mark.parametrize(("right", "row", "best"), [(0.5, 0.3, 1), (0.7, 0.05, 4)])
def test_the_fastest_length_is_found(right, row, best):
    load = Load(right, row)
    load.run(1000)
    assert load.choice.now == best
    load.choice.most = 2
    load.run(500)
    assert load.choice.now <= 2


def test_what_is_said_is_of_lengths_that_have_rows():
    choice = DraftLength(1, (0, 1, 2, 4), Acceptance(0.9))
    assert choice.why().startswith("none; 4 tokens would give ")
    choice.most = 1
    assert choice.why().startswith("none; 1 token would give ")
    assert [*choice.said()["tokens_a_step"]] == [*choice.said()["times_as_long"]] == ["1"]
    choice.now = 1
    assert choice.why().startswith("1 token, ")


def test_a_full_batch_chooses_no_drafts():
    """No row is free for them, however much they would give. With a free row a trial begins."""
    for rows, begins in ((2, False), (4, True)):
        drafts, pair = NgramDrafts(4, 3, 1), [(row, Written()) for row in range(2)]
        work: Any = SimpleNamespace(rows=pair, drafts=(), drafting=0)
        changes = []
        for _ in range(64):
            drafts.acceptance.add(4, 4)
            changes.append(drafts.after_read(work, 1.0, rows))
        assert (drafts.length(2) > 0) == (drafts.why() is not None) == begins
        assert sum(each is not None for each in changes) == begins


def test_another_number_of_requests_changes_no_length():
    """Each has a choice of its own, which a line tells of when it changes."""
    drafts = NgramDrafts(4, 3, 1)
    drafts.length(1)
    drafts.choices[0].now = 4
    for requests in (1, 2, 1, 4, 2, 1):
        pair = [(row, Written()) for row in range(requests)]
        work: Any = SimpleNamespace(rows=pair, drafts=(), drafting=drafts.length(requests))
        assert drafts.after_read(work, None, 4) is None
    assert [drafts.length(requests) for requests in (1, 2)] == [4, 0]


def test_drafts_begin_with_what_an_earlier_run_learned():
    """With few of its guesses and with how long its steps took, but not with what is damaged."""
    first, second, third = (NgramDrafts(most, 3, 1) for most in (4, 4, 2))
    for _ in range(20):
        first.acceptance.add(3, 4)
    first.length(3)
    first.choices[2].extra = {1: 0.5, 4: 0.125}
    kept = json.loads(json.dumps(first.learned()))
    damaged: list[Any] = [{}, [], {**kept, "extra": [1]}, {**kept, "extra": {"2": None}}]
    for wrong in damaged:
        with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
            second.recall(wrong)
    assert second.acceptance.last == [] == second.learned()["guesses"]
    for drafts, extra in ((second, {1: 0.5, 4: 0.125}), (third, {1: 0.5})):
        drafts.recall(kept)
        assert drafts.acceptance.last == [(3, 4)] * 8
        drafts.length(3)
        assert drafts.choices[2].extra == extra
        assert json.loads(json.dumps(drafts.learned())) == kept or drafts is third
    drafts = second
    drafts.length(1)
    assert drafts.choices[0].extra == {}


def test_a_disturbed_step_ends_no_drafts():
    load = Load(0.9, 0.2)
    load.run(100)
    for _ in range(3):
        load.choice.add(4.4, 1000.0, 1.0)
        load.run(100)
        assert load.choice.now == 4 and load.choice.ratio(4) == pytest.approx(1.8, rel=0.01)


def test_a_slow_time_of_the_machine_is_no_loss_of_drafts():
    """Steps without drafts that are as slow say so, soon after drafts ended."""
    load = Load(0.9, 0.2)
    load.run(100)
    assert load.choice.now == 4
    load.speed = 0.2
    load.drafted.clear()
    load.run(60)
    assert not all(load.drafted) and load.choice.now == 4


def test_before_a_measurement_costs_say_how_long_drafts_take():
    costs: Any = SimpleNamespace(step_s={1: 1.0, 8: 1.5, 32: 3.0})
    assert prior_ratio(1, 7, costs) == 1.5 and prior_ratio(8, 3, costs) == 2.0
    assert prior_ratio(1, 7) == 10 / 3 and prior_ratio(16, 1) == 34 / 18
    costs.step_s = {32: 3.0}  # any step is of 32 rows
    assert prior_ratio(1, 7, costs) == 10 / 3


class Written:
    """Tokens of a request."""

    prompt, to_generate = (1, 2, 3, 4, 5, 6), 20

    def __init__(self):
        self.output = [1]

    def tokens(self, start: int, end: int) -> list[int]:
        return [*self.prompt, *self.output][start:end]


def test_guesses_are_judged_without_being_verified():
    acceptance = Acceptance(0.5)
    assert acceptance.expected(2) == 0.75
    for _ in range(31):
        acceptance.add(1, 4)
    assert acceptance.expected(1) > 0.98 > acceptance.expected(4) - acceptance.expected(1) + 0.9
    drafts = NgramDrafts(4, 3, 1)
    request: Any = Written()
    found = []
    for token in [2, 3, 4, 9, 9, 9, 9, 9, 9, 9]:
        request.output.append(token)
        found.append(drafts.judge(request))
    # After 1 come 2, 3, 4 and no 5; after the first 9, which is new, there is no guess.
    assert [each for each in found if each] == [(3, 4), (0, 0), (4, 4)]
    acceptance.add(0, 0)
    assert acceptance.share == pytest.approx(32 / 33)


def test_judging_guesses_takes_a_bounded_share_of_the_time():
    """Where looking for one takes a tenth of a step, one step in twenty judges one."""
    drafts, judged, now = NgramDrafts(4, 3, 1), [], [0.0]

    def judge(request: Any) -> None:
        judged.append(request)
        now[0] += 0.1

    drafts.clock, drafts.judge = lambda: now[0], judge
    work: Any = SimpleNamespace(rows=[(0, Written())], drafts=(), drafting=0)
    for _ in range(200):
        drafts.after_read(work, 1.0, 8)
    assert 9 <= len(judged) <= 11
    drafts.after_read(work, None, 8)  # a time that is not known pays for nothing
    drafts.clock = lambda: 0.0
    for _ in range(30):
        drafts.after_read(work, 1.0, 8)
    assert 20 <= len(judged) <= 41


def test_a_choice_is_by_the_requests_that_decode(demo, monkeypatch):
    """It is learned by them, so others that run, whose prompts are computed, do not count."""
    engine, asked = demo.llm.engine, []
    drafts = NgramDrafts(4, 5, 1, adaptive=False)
    monkeypatch.setattr(drafts, "wanted", lambda requests: bool(asked.append(requests)) or True)
    monkeypatch.setattr(engine, "drafts", drafts)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    first = engine.add([5, 6], params)
    while not first.output:
        engine.step()
    others = [engine.add([7] * 130, params) for _ in range(2)]
    asked.clear()
    while not any(request.dispatched for request in others):
        engine.step()
    assert len(engine.scheduler.running) == 3 and len(asked) > 2 and {*asked} <= {0, 1}
    engine.abort([first, *others])
    engine.drain()


# ---- options


def test_names_are_those_of_vllm(capsys):
    text = json.dumps({**NGRAM, "prompt_lookup_max": 3})
    found = Config.of("demo", speculative_config=text).runtime.speculative_config
    assert found == read_speculation({**NGRAM, "prompt_lookup_max": 3})
    assert found is not None and (found.prompt_lookup_max, found.prompt_lookup_min) == (3, 2)
    for wrong, why in (
        ({"num_speculative_tokens": 4}, "speculative_config names no method; give it as in"),
        ({"method": "eagle"}, "unknown speculative method 'eagle'; known: ngram, draft_model"),
        ({"method": "mtp", "model": "x"}, "unknown key of speculative_config 'model'"),
        ({"method": "draft_model"}, "model is the draft model's directory or name, not None"),
        ({**NGRAM, "model": "x"}, "unknown key of speculative_config 'model'"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens is a whole number"),
        ({**NGRAM, "prompt_lookup_max": 1, "prompt_lookup_min": 2}, "2 is more than prompt_lookup"),
        ("ngram", "is JSON such as"),
    ):
        with pytest.raises(UserError, match=why):
            Config.of("demo", speculative_config=wrong)
    assert main(["generate", "The", "--speculative-config", '{"method": "mtp"}']) == 2
    assert "has no layer that predicts a further token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_num_seqs": 1}, "raise max_num_seqs"),
        (DEFERRED, "which processor computes experts"),
        ({"driver": "stream"}, "however few tokens"),
        *(
            ({"policies": (Oracle(np.ones((1, 4, 16), bool)),), **more}, "drafts change the steps")
            for more in ({}, {"driver": "host"})
        ),
        ({"cache_aware_routing": 0.1}, "which experts are resident"),
        ({"precision": "dynaexq"}, "would change the experts' versions"),
        ({"precision": "dynaexq,paged=true"}, "would change the experts' versions"),
        *(
            (
                {"precision": precision, "policies": (policy,), **more},
                "change the experts' versions",
            )
            for precision, policy, more in (
                ("random", DynaExq(), {}),
                ("random,paged=true", DynaExq(paged=True), {}),
                ("random,paged=true", Hobbit(), {"driver": "host"}),
            )
        ),
        ({"kv_overflow": "recompute"}, "which KV is computed again"),
    ],
)
def test_what_does_not_go_together_with_drafts(options, why):
    with pytest.raises(UserError, match=f"speculative_config.*{why}"):
        LLM("demo", speculative_config=NGRAM, progress=False, **LIMITS | options)


def test_statistics_say_what_was_accepted_and_traces_hold_tokens_of_sequences_alone(tmp_path):
    config = {**NGRAM, "prompt_lookup_min": 1, "adaptive": False}
    params = SamplingParams(temperature=0, max_tokens=60, allowed_token_ids=[300, 301])
    trace = str(tmp_path / "t")
    with open_llm("demo", speculative_config=config, trace=f"{trace},arrays=token", **FEW) as llm:
        (out,) = llm.generate([[5, 300, 301, 300]], params, use_tqdm=False)
        said, steps = llm.stats()["speculation"], llm.stats()["steps"]
        assert llm.plan.steps.drafts
    count = len(out.outputs[0].token_ids)
    assert said["accepted_tokens"] > 5 and 0 < said["acceptance_rate"] <= 1
    assert 1 + steps["decode"] + said["accepted_tokens"] in (count, count + 1)
    assert said["choices"] == []
    position, token = (
        np.concatenate([getattr(step, name) for step in read_trace(trace).step_traces()])
        for name in ("position", "token")
    )
    assert sorted(position.tolist()) == list(range(4 + count - 1))
    assert (
        token[np.argsort(position)].tolist() == [5, 300, 301, 300, *out.outputs[0].token_ids][:-1]
    )


def _change_at_step_8(after_read):
    """After it drafts have another length."""

    def read(drafts: Drafts, *args):
        before = drafts.counts["steps"]
        after_read(drafts, *args)
        return "8 steps had drafts" if before < drafts.counts["steps"] == 8 else None

    return read


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"eviction": "lfu"}, {"policy": "auto"}, {"prefetch": "expert_map_in_step"}),
        *({"driver": "host", "prefetch": each} for each in ("fate", "tokens")),
        {"driver": "host", "placement": f"prescope,{PLACED},predict=gates", **LINK},
        *(
            pytest.param({"driver": "host", **LINK, **more}, marks=pytest.mark.nightly)
            for more in (
                {"policy": "auto", "prefetch": "coactivation", "placement": f"hybrimoe,{PLACED}"},
                *({"prefetch": each} for each in ("expert_map", "moe-infinity", "deepspeed")),
                *({"prefetch": each} for each in ("mixtral-offloading", "layer-streaming")),
            )
        ),
    ],
    ids=str,
)
def test_a_trace_with_rejected_drafts_replays(options, tmp_path, monkeypatch):
    """Their rows moved experts. What they searched maps for is not known. Policies see their
    tokens. Changes of the drafts' length are named."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Known, "after_read", _change_at_step_8(Known.after_read))
    ahead = {"prefetch", "placement"} & options.keys()
    arrays = ",arrays=probs+gate_input+embedding+token" if ahead else ""
    options = {**FEW, **options, "trace": f"{tmp_path / 't'}{arrays}"}
    with open_llm(speculative_config=NGRAM, enable_prefix_caching=False, **options) as llm:
        rest = at_rest()
        drafts = llm.engine.drafts = Known({i: each.tokens for i, each in enumerate(rest)})
        assert same_bits(run(llm, mixed_jobs(), check=False), rest)
        control = llm.engine.control
        router = None if control is None else control.controller.spec.router
    counts = drafts.counts
    assert counts["accepted"] > 60 and counts["drafted"] - counts["accepted"] > 30, counts
    trace = read_trace(tmp_path / "t")
    changed = [line for line in trace.decisions() if "drafts" in line]
    assert [line["drafts"] for line in changed] == ["8 steps had drafts"]
    steps = [*trace.step_traces()]
    assert any(np.any(step.rejected) for step in steps)
    assert not any(np.any(step.rejected) for step in steps if step.kind == "prefill")
    told = dataclasses.replace(spec_of(trace.header), router=router)
    if options.get("prefetch") == "expert_map_in_step":
        with pytest.raises(TraceError, match="record it without speculative_config"):
            replay(trace, spec=told)
    else:
        replay(trace, spec=told)
    if ahead:
        counted = [{int(e) for e in step.draft_ids.ravel()} for step in steps]
        assert counted == [{*np.nonzero(step.rejected)[1].tolist()} for step in steps]
        assert (
            sum(len(step.draft_token) for step in steps) == counts["drafted"] - counts["accepted"]
        )


# ---- a draft model


@pytest.fixture(scope="module")
def modeled() -> Iterator[LLM]:
    """The demo drafts for itself, so that greedy drafts are right but for prefill's bits."""
    config = {"method": "draft_model", "model": "demo", "num_speculative_tokens": 3}
    with open_llm("demo", max_num_seqs=8, speculative_config=config | {"adaptive": False}) as llm:
        yield llm


@pytest.mark.slow
def test_drafts_of_a_model_change_no_bit(modeled, demo):
    assert same_bits(run(modeled, demo.jobs), demo.plain)
    said, drafts = modeled.stats()["speculation"], modeled.engine.drafts
    assert said["method"] == "draft_model" and said["model"] == "demo"
    assert said["accepted_tokens"] > 30 and said["acceptance_rate"] > 0.5, said
    drafts.propose({}, 0)
    assert drafts.engine.idle and not drafts.engine.scheduler.sessions.all
    assert drafts.engine.statistics.requests > 20


@pytest.mark.slow
def test_a_draft_computes_only_what_came_since(modeled):
    """Sampled tokens are drafted by the request's seed."""
    engine = modeled.engine.drafts.engine
    before, hits = engine.statistics.prompt_tokens, engine.scheduler.counts["session_hit_tokens"]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True)
    counts = modeled.engine.drafts.counts.copy()
    modeled.generate([[*range(5, 105)]], params, use_tqdm=False)
    asked = engine.statistics.prompt_tokens - before
    assert engine.scheduler.counts["session_hit_tokens"] - hits > asked - 100 - 2 * 60 - 64
    drafted, accepted = (
        modeled.engine.drafts.counts[name] - counts[name] for name in ("drafted", "accepted")
    )
    assert accepted > 0.5 * drafted > 10


@pytest.mark.slow
def test_a_draft_model_writes_what_free_rows_verify(modeled, monkeypatch):
    drafts, seen = modeled.engine.drafts, []
    propose = drafts.propose

    def watch(asked, rows):
        found = propose(asked, rows)
        seen.append((sum(map(len, found.values())), rows, len(asked)))
        return found

    monkeypatch.setattr(drafts, "propose", watch)
    ends = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in range(4, 28, 3)]
    modeled.generate([[*range(5, 25)]] * len(ends), ends, use_tqdm=False)
    assert any(1 < rows < count for _, rows, count in seen), seen
    assert all(tokens < rows + count for tokens, rows, count in seen)


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError, OutOfKV])
def test_drafts_that_fail_leave_no_turn_open(modeled, monkeypatch, error, caplog):
    """They are turned off, unless it was for want of KV, and their requests go on without."""
    drafts, steps = modeled.engine.drafts, itertools.count(1)
    drafter = drafts.engine
    prompt = [[*range(5, 25)]]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (expected,) = modeled.generate(prompt, params, use_tqdm=False)
    step = drafter.step

    def fail():
        if next(steps) == 3:
            raise error("an injected error")
        return step()

    monkeypatch.setattr(drafter, "step", fail)
    for _ in range(2):
        (out,) = modeled.generate(prompt, params, use_tqdm=False)
        assert out.outputs[0].token_ids == expected.outputs[0].token_ids
    assert (used := next(steps)) > 3 and drafter.idle and modeled.engine.idle
    off = modeled.engine.drafts is None
    assert off == (error is RuntimeError) == ("decoding goes on without them" in caplog.text)
    modeled.engine.drafts = drafts
    modeled.generate(prompt, params, use_tqdm=False)
    assert modeled.engine.drafts is drafts and next(steps) > used + 3


@pytest.mark.slow
def test_memory_counts_the_model_that_drafts():
    """And where it leaves too little, the message says how much of it works."""
    config = {"method": "draft_model", "model": "demo"}
    given: dict[str, Any] = {"progress": False, "speculative_config": config, **LIMITS}
    works = r"of memory 1 MiB; memory of \d+ bytes works for both"
    with pytest.raises(ArenaTooSmall, match=works):
        open_llm(memory="1MiB", speculative_config=config)
    with pytest.raises(ArenaTooSmall, match=works) as found:
        dry_run(Config.of("demo", memory="1MiB", **given))
    memory = found.value.smallest_bytes
    assert f" of {memory} bytes works" in str(found.value)
    with open_llm(memory=memory, speculative_config=config) as llm:
        dry, _ = dry_run(Config.of("demo", memory=memory, **given))
        assert dry.budget.notes == llm.plan.budget.notes
        assert llm._drafter is not None
        held = [
            (each.plan.budget.slots + each.plan.budget.in_place) * each.plan.steps.layout.slot_bytes
            for each in (llm, llm._drafter)
        ]
        assert min(held) > 0 and sum(held) == memory
        assert any("the model that drafts takes" in note for note in llm.explain().notes)


@pytest.mark.parametrize(("vocabulary", "states"), [(512, 0), (4096, 1)])
def test_a_draft_model_that_does_not_fit_is_refused(vocabulary, states):
    config = SimpleNamespace(vocab_size=vocabulary, architecture="Lfm2Moe")
    drafter: Any = SimpleNamespace(runner=SimpleNamespace(config=config))
    drafter.scheduler = SimpleNamespace(page=SimpleNamespace(state_pages=states))
    model: Any = SimpleNamespace(vocab_size=4096)
    why = "Lfm2Moe.* cannot go back over its drafts" if states else "vocabulary of 512.*model 4096"
    with pytest.raises(UserError, match=f"speculative_config: .*{why}"):
        _drafts(read_speculation({"method": "draft_model", "model": "m"}), model, drafter)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fields", "why"),
    [
        ("Qwen3MoeForCausalLM", {"vocab_size": 512}, r"has a vocabulary of 512 tokens.*model 4096"),
        ("Lfm2MoeForCausalLM", {"vocab_size": 4096}, "cannot go back over its drafts"),
    ],
)
def test_draft_models_that_do_not_fit_are_refused(family, fields, why, tmp_path):
    model = write_checkpoint(tmp_path / "m", family, **fields)
    config = {"method": "draft_model", "model": str(model)}
    with pytest.raises(UserError, match=f"speculative_config: .*{why}"):
        LLM("demo", speculative_config=config, progress=False, **LIMITS)
