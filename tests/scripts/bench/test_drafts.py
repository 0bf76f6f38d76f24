import numpy as np
import pytest

from moejax import SamplingParams
from moejax.engine.drafts import Drafts
from moejax.engine.snapshot import RoutingCounts, choices_of, snapshot
from scripts.bench import drafts
from tests.moejax.engine.scenes import LINK, open_llm
from tests.scripts.runs import json_lines


@pytest.mark.slow
def test_each_cell_has_rates_of_equal_tokens(capsys):
    given = ["--tokens", "8", "--rounds", "1", "--requests", "2", "--budgets", "50%"]
    rows = json_lines(capsys, drafts.main, *given)
    assert [row["task"] for row in rows] == ["edit", "chat", "story"]
    assert all(row["plain"] > 0 and row["always"] > 0 < row["adaptive"] for row in rows)
    assert all(row["again"] > 0 for row in rows)
    assert any(row["accepted"] for row in rows)


def test_rates_beside_lookup_are_of_the_same_rounds():
    times = {"llama": [2.0, 4.0], "lookup": [1.0, 2.0], "adaptive": [0.5, 4.0], "plain": [1.0, 1.0]}
    seconds = {name: np.array(values) for name, values in times.items()}
    assert drafts.peer_rates(seconds, 6) == {"llama": 2.0, "lookup": 2.0, "ours": 1.25}
    assert set(drafts.peer_rates({"plain": seconds["plain"]}, 6).values()) == {None}


class Told(Drafts):
    """Guesses an answer that is known, each token wrong with a probability. Nothing judges them
    beforehand."""

    def __init__(self, answer: list[int], wrong: float):
        super().__init__(4)
        self.answer, self.wrong, self.rng = answer, wrong, np.random.default_rng(0)

    def propose(self, asked, rows):
        found = {}
        for request, most in asked.items():
            tokens = self.answer[(done := len(request.output)) : done + most]
            found[request] = [t ^ int(self.rng.random() < self.wrong) for t in tokens]
        return found


@pytest.mark.slow
def test_adaptive_drafts_cost_little_and_are_used_soon():
    """By counts: where none is right, where most are, and where all are."""
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    config = {"method": "ngram", "num_speculative_tokens": 4}
    with open_llm(
        max_num_seqs=8, expert_budget="50%", kv_budget="1MiB", speculative_config=config, **LINK
    ) as llm:

        def run(told: Drafts | None):
            llm.engine.runner.forget_experts()
            llm.engine.drafts, counts = drafts.counting(llm, told)
            (output,) = llm.generate([[5, 6, 7, 300]], params, use_tqdm=False)
            return output.outputs[0].token_ids, counts

        answer, plain = run(None)
        assert plain["steps"] == 119 and plain["experts"] > 0 < plain["MB"]
        ratios = {}
        for wrong in (1.0, 0.5, 0.0):
            tokens, counts = run(Told(answer, wrong))
            assert tokens == answer
            ratios[wrong] = counts["seconds"] / plain["seconds"]
        assert ratios[1.0] < 1.04 and ratios[0.5] < 1.05 and ratios[0.0] < 0.75, ratios
        (said,) = choices_of(llm.engine)
        assert said.startswith("drafts of up to 1 requests at once: 4 tokens, ")
        assert llm.explain().notes[-1] == said
        assert snapshot(llm.engine, RoutingCounts(llm.engine))["policy"] == said
