"""The bench of peers: which engines a stage has, and what moejax computes for it."""

import json
import subprocess

import numpy as np
import pytest

from moejax.errors import UserError
from moejax.requests.tokenizer import load_tokenizer
from scripts.bench.peer_engines import MoejaxEngine, Task, TransformersEngine, answered
from scripts.bench.peers import STAGES, case_rows, deviation, engines_of, main, model_of
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


def test_tokens_are_those_of_a_text(tmp_path):
    np.save(path := tmp_path / "text.npy", np.arange(5000, dtype=np.int32))
    task = Task("", 8192, batch=3, context=60, steps=3, prompt=8, text=str(path))
    assert np.array_equal(task.decoded(), np.arange(3 * 64).reshape(3, 64))
    assert np.array_equal(task.prefilled(), np.arange(1000, 1008))


def test_a_step_is_begun_before_the_last_one_is_read():
    """As moejax generates. As many are timed as without that."""
    happened = []

    class Recorded:
        def start(self, batch):
            assert batch == 1

        def decode(self, tokens, position):
            happened.append(("began", position))
            return lambda: happened.append(("read", position))

    task = Task("", 16, batch=1, context=4, steps=3)
    question = {"what": "decode", "batch": 1, "seconds": 60, "first": 1}
    assert len(answered(Recorded(), task, question)["seconds"]) == 3
    once, (first, *timed) = happened[:2], happened[2:]
    assert once == [("began", 5), ("read", 5)] and first == ("began", 5)
    assert timed[:4] == [("began", 6), ("read", 5), ("began", 4), ("read", 6)]
    assert timed[4:] == [("began", 5), ("read", 4), ("read", 5)]


def test_models_and_texts_that_are_refused(tmp_path, capsys):
    assert main(["--text", "x"]) == 2 and "--text needs --model" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    with pytest.raises(UserError, match="is a mixtral; --model takes olmoe, qwen3_moe"):
        model_of("q8_0", 4, str(tmp_path))


@NATIVE
@pytest.mark.slow
def test_a_given_checkpoint_is_measured_with_a_given_text(demo_dir, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("the model of the experts " * 20)
    given = ["--model", str(demo_dir), "--text", str(tmp_path / "text.txt")]
    few = ["--batch", "2", "--context", "16", "--prompt", "16", "--rounds", "1", "--block", "0.1"]
    alone = ["--without", "llama.cpp,transformers", "--keep", str(tmp_path)]
    assert main([*given, *few, *alone]) == 0
    said = capsys.readouterr().out
    assert f"bf16: 4 layers of {demo_dir.name}" in said and "decode 2  moejax" in said
    ids = np.load(tmp_path / f"{demo_dir.name}-4-text.npy")
    assert (tokenizer := load_tokenizer(demo_dir)) is not None
    assert ids.tolist() == tokenizer.encode((tmp_path / "text.txt").read_text())


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


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.past_key_values.:FutureWarning")
def test_transformers_decodes_batches_of_several_sizes(demo_dir):
    """Every sequence has the context of the first."""
    vocabulary = json.loads((demo_dir / "config.json").read_text())["vocab_size"]
    task = Task(str(demo_dir), vocabulary, batch=3, context=8, steps=2, prompt=8)
    engine = TransformersEngine(task)
    one, *others = (
        answered(engine, task, {"what": "check", "batch": batch})["scores"] for batch in (1, 2, 3)
    )
    for several in others:
        assert [step[0] for step in several] == pytest.approx([step[0] for step in one], abs=0.1)


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
