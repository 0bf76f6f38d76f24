"""The bench of peers: which engines a stage has, and what moejax computes for it."""

import pytest

from scripts.bench.peer_engines import MoejaxEngine, Task, answered
from scripts.bench.peers import STAGES, engines_of
from tests.moejax.models.families import write_checkpoint
from tests.pallas_kernels.contract import NATIVE


@pytest.mark.parametrize("stage", STAGES)
def test_integer_products_are_beside_exact_ones_where_weights_are_in_codes(stage):
    exact, *others = engines_of(stage, ("transformers",), "int8")
    own = STAGES[stage][0]
    if stage in ("bf16", "hybrid"):  # moejax refuses it
        assert (exact, *others) == (own, "llama.cpp BF16")
    else:
        assert (exact, *others) == (f"{own} --arithmetic int8", *STAGES[stage])


@NATIVE
@pytest.mark.slow
def test_a_sequence_begins_behind_its_context_whatever_stands_beside_it(tmp_path):
    """States cannot go back: a step between two prompts would advance those of the first."""
    config = {"max_position_embeddings": 512, "vocab_size": 512}
    model = str(write_checkpoint(tmp_path, "Qwen3NextForCausalLM", **config))
    task = Task(model, 512, batch=3, context=64, steps=4, prompt=64)
    engine = MoejaxEngine(task)
    one, several = (
        answered(engine, task, {"what": "check", "batch": batch})["scores"] for batch in (1, 3)
    )
    assert [step[:1] for step in several] == one
    engine.llm.close()
