"""The bench of peers: which engines a stage has, and what moejax computes for it."""

import subprocess

import numpy as np
import pytest

from moejax.errors import UserError
from scripts.bench.peer_engines import MoejaxEngine, Task, answered
from scripts.bench.peers import STAGES, case_rows, deviation, engines_of
from scripts.parts import cgroup
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


def test_rates_of_coded_weights_are_beside_that_of_bfloat16():
    found = {
        "moejax Q8_0 all": [2.0, 4.0, 2.0],
        "llama.cpp Q8_0 all": [1.0] * 3,
        "moejax": [2.0] * 3,
    }
    rows = case_rows("decode 1", 1, found, 0.5, {"moejax Q8_0 all": 6e9, "moejax": 8e9})
    shares = [(row["gb_per_s"], row["of_dense"]) for row in rows]
    assert shares == [(3, 0.75), (None, None), (4, 1)]
    assert engines_of("q8_0", ("llama.cpp",), dense=True, experts_only=True) == [
        "moejax Q8_0 experts",
        "moejax",
    ]
    assert engines_of("bf16", ("transformers",), dense=True) == ["moejax", "llama.cpp BF16"]


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


def test_logits_are_compared_by_divergence_and_by_the_largest_error():
    even, uneven = np.zeros((1, 2), np.float32), np.log(np.array([[3, 1]], np.float32))
    said = deviation(even, uneven)  # ½ ln(½ ÷ ¾) + ½ ln(½ ÷ ¼) = 0.1438; ln 3 = 1.099
    assert "divergence 1.44e-01 (largest 1.44e-01)" in said and "error 1.099" in said
    assert "100.0% have" in said and "divergence 0.00e+00" in deviation(uneven, uneven + 5)
    assert "divergence 1.31e-01" in deviation(uneven, even)  # not the other way round


def test_a_command_runs_in_its_group_and_a_folder_that_is_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroup, "MEMORY", tmp_path)
    with (
        pytest.raises(UserError, match=r"moejax-x-\d+ has no memory.limit_in_bytes"),
        cgroup.memory_group("x", 5),
    ):
        pass
    assert not [*tmp_path.iterdir()]
    command = [*cgroup.in_cgroup(tmp_path, "limit", "5"), "sh", "-c", "echo $$"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (tmp_path / "cgroup.procs").read_text() == ran.stdout
    assert (tmp_path / "limit").read_text() == "5\n"
