"""`moejax verify` passes a right model and finds an error of each kind that is planted in one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import types

import numpy as np
import pytest

from moejax.checkpoints.tensor_checkpoint import open_tensors
from moejax.checkpoints.tensor_tasks import OpenTensor
from moejax.commands import main as cli
from moejax.evaluate.verification import attention, model, reference, words
from moejax.models import layers
from moejax.models.config import load_config
from tests.moejax.models.families import write_checkpoint

pytestmark = pytest.mark.usefixtures("own_programs")  # errors are planted in the engine's code

LAYERS, LOGITS, THEIRS = "layers against float32", "logits of generated", "transformers"
ROUTED = "experts that were chosen"
SPECIAL, TEXT = "special tokens", "text"
SMALL = ["--max-model-len", "128", "--max-num-seqs", "1", "--max-num-batched-tokens", "64"]


def verify(capsys, directory, *options, dtype="float32"):
    """(exit status, check's name → whether it is right)."""
    given = ["verify", str(directory), "--json", "-q", "--tokens", "40", *options]
    status = cli.main([*given, "--dtype", dtype, *SMALL])
    found = json.loads(capsys.readouterr().out)
    assert found["right"] == (status == 0)
    return status, {check["name"]: check["good"] for check in found["checks"]}


def verdict(checks, part):
    (found,) = (good for name, good in checks.items() if part in name)
    return found


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """A random model with biases and a dense layer."""
    directory = tmp_path_factory.mktemp("model")
    fields = {"mlp_only_layers": [1], "attention_bias": True, "model_type": "qwen3_moe"}
    return write_checkpoint(directory, "Qwen3MoeForCausalLM", **fields)


def wrong_rope(monkeypatch):
    right = layers.inverse_frequencies
    monkeypatch.setattr(
        layers,
        "inverse_frequencies",
        lambda rope, dim: right(dataclasses.replace(rope, theta=2 * rope.theta), dim),
    )


def swapped_gate_and_up(monkeypatch):
    right, other = OpenTensor.read_record, {"gate": "up", "up": "gate"}

    def read(self, place, *rest):
        swapped = other.get(place.matrix, place.matrix)
        return right(self, dataclasses.replace(place, matrix=swapped), *rest)

    monkeypatch.setattr(OpenTensor, "read_record", read)


def swapped_in_one_expert(monkeypatch):
    """Less than half of the tokens go to it."""
    right = OpenTensor.read_record

    def read(self, place, *rest):
        if (place.layer, place.expert) == (0, 5):
            other = {"gate": "up", "up": "gate"}.get(place.matrix, place.matrix)
            place = dataclasses.replace(place, matrix=other)
        return right(self, place, *rest)

    monkeypatch.setattr(OpenTensor, "read_record", read)


def missing_bias(monkeypatch):
    right = layers.LayerStack.optional_weight
    monkeypatch.setattr(
        layers.LayerStack,
        "optional_weight",
        lambda self, name: None if name == "qkv_bias" else right(self, name),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        None,
        wrong_rope,
        swapped_in_one_expert,
        *(pytest.param(f, marks=pytest.mark.nightly) for f in (swapped_gate_and_up, missing_bias)),
    ],
    ids=lambda plant: plant and plant.__name__,
)
def test_errors_of_the_engine(capsys, monkeypatch, biased, plant):
    if plant is not None:
        plant(monkeypatch)
    status, checks = verify(capsys, biased)
    right = plant is None
    assert status == (not right)
    assert verdict(checks, LAYERS) is right and verdict(checks, LOGITS) is right
    assert verdict(checks, ROUTED) is True and verdict(checks, "tokenizer") is None


def turned_taps(monkeypatch):
    right = layers.LayerStack.weight

    def weight(self, name):
        return right(self, name)[..., ::-1] if name == "conv" else right(self, name)

    monkeypatch.setattr(layers.LayerStack, "weight", weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "plant"),
    [
        ("LongcatFlash", swapped_gate_and_up),
        *(
            pytest.param(name, plant, marks=pytest.mark.nightly)
            for name, plant in (
                *(("Qwen3Moe", wrong_rope), ("GptOss", wrong_rope), ("DeepseekV3", wrong_rope)),
                *(("Gemma4", wrong_rope), ("NemotronH", turned_taps), ("Phimoe", wrong_rope)),
            )
        ),
    ],
)
def test_errors_of_a_run_in_bfloat16(capsys, monkeypatch, tmp_path, family, plant):
    """A layer of LongCat-Flash has two attentions and three feed-forwards, and random weights
    enlarge what each of them rounds."""
    directory = write_checkpoint(tmp_path, f"{family}ForCausalLM")
    for planted in (None, plant):
        if planted is not None:
            planted(monkeypatch)
        _, checks = verify(capsys, directory, dtype="bfloat16")
        assert verdict(checks, LOGITS) is (planted is None)
        assert verdict(checks, LAYERS) is (planted is None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "plants"),
    [
        ("Qwen3NextForCausalLM", (None, turned_taps)),
        *(
            pytest.param(f"{name}ForCausalLM", (None, plant), marks=pytest.mark.nightly)
            for name, plant in (
                *(("Cohere2Moe", wrong_rope), ("Gemma4", wrong_rope), ("Llama4", wrong_rope)),
                *(("DeepseekV32", wrong_rope), ("GraniteMoeSWA", wrong_rope)),
                *(("Mellum", wrong_rope), ("GptOss", wrong_rope), ("Lfm2Moe", turned_taps)),
                *(("Qwen3_5Moe", turned_taps), ("KimiLinear", turned_taps)),
                *(("GraniteMoeHybrid", turned_taps), ("Jamba", turned_taps)),
                *(("NemotronH", turned_taps), ("Dbrx", wrong_rope), ("LongcatFlash", wrong_rope)),
            )
        ),
    ],
)
def test_layers_of_several_kinds(capsys, monkeypatch, tmp_path, family, plants):
    directory = write_checkpoint(tmp_path, family)
    for plant in plants:
        if plant is not None:
            plant(monkeypatch)
        _, checks = verify(capsys, directory)
        assert verdict(checks, LOGITS) is (plant is None)
        assert verdict(checks, LAYERS) is (plant is None)
        assert verdict(checks, ROUTED) is True


@pytest.mark.slow
def test_experts_that_the_router_did_not_ask_for(capsys, biased):
    given = "--cache-aware-routing", "0.5", "--expert-budget", "25%"
    status, checks = verify(capsys, biased, *given)
    assert status == 1 and verdict(checks, ROUTED) is False


@pytest.mark.torch
@pytest.mark.slow
def test_an_error_that_engine_and_reference_share_is_found_by_transformers(
    capsys, monkeypatch, biased
):
    wrong_rope(monkeypatch)
    monkeypatch.setattr(attention, "inverse_frequencies", layers.inverse_frequencies)
    status, checks = verify(capsys, biased)
    assert status == 1 and verdict(checks, LAYERS) is True and verdict(checks, THEIRS) is False


@pytest.mark.slow
def test_a_shifted_tokenizer(capsys, demo_dir, tmp_path):
    shifted = shutil.copytree(demo_dir, tmp_path / "demo")
    table = json.loads((shifted / "tokenizer.json").read_text())
    words, added = table["model"]["vocab"], table["added_tokens"]
    table["model"]["vocab"] = {word: (i + 1) % len(words) for word, i in words.items()}
    for token in added:
        token["id"] = (token["id"] + 1) % len(words)
    (shifted / "tokenizer.json").write_text(json.dumps(table))
    status, checks = verify(capsys, shifted)
    assert status == 1
    assert [name for name, good in checks.items() if good is False] == [SPECIAL, TEXT]


@pytest.mark.slow
def test_the_table_of_a_right_model(capsys):
    assert cli.main(["verify", "demo", "-q", "--tokens", "40", *SMALL]) == 0
    out, err = capsys.readouterr()
    assert "moejax: " not in err
    lines = out.splitlines()
    assert lines[1].split() == ["check", "result", "what", "was", "found"]
    assert len(lines) >= 9 and "WRONG" not in out
    # The chat template, which this demo has not, and transformers without torch.
    assert sum("not checked" in line for line in lines) <= 2


def test_transformers_gets_the_layers_that_fit(monkeypatch, biased):
    opened = open_tensors(biased, "safetensors")
    with contextlib.ExitStack() as stack:
        found = reference.Reference(opened.config, reference.Tensors(opened, stack))
    assert model._layers_that_fit(found) == 3
    monkeypatch.setattr(model, "host_available_bytes", lambda: 1_600_000)
    assert model._layers_that_fit(found) in (1, 2)
    monkeypatch.setattr(model, "host_available_bytes", lambda: 0)
    assert model._layers_that_fit(found) == 0


def test_a_hidden_state_that_is_not_finite_is_wrong():
    right = np.ones((3, 4), np.float32)
    wrong = right.copy()
    wrong[0, 0] = np.nan
    assert not model._distances(right, right).any()
    assert model._of_layers([(0, model._distances(wrong, right), 1.0)], "float32").good is False


@pytest.mark.parametrize("rounded", [np.inf, -1.0])
def test_rounding_that_ruins_the_reference_does_not_excuse_the_run(rounded):
    right = np.ones((3, 4), np.float32)
    again = np.full_like(right, rounded)
    limit = model._limit(0, np.concatenate([right, again]), len(right))
    far = model._distances(again, right)
    assert model._of_layers([(0, far, limit)], "float16").good is False


@pytest.mark.parametrize(("share", "good"), [(1.0, False), (model.HAIRS, True)])
def test_few_tokens_of_a_sparsemixer_may_differ_by_a_hair(share, good):
    far = np.array([0.01] * 19 + [0.9])
    assert model._of_layers([(0, far, 0.02)], "bfloat16", share).good is good
    assert model._of_layers([(0, np.full(20, 0.03), 0.02)], "bfloat16", share).good is False


def test_a_choice_with_an_expert_twice_is_wrong(biased):
    opened = open_tensors(biased, "safetensors")
    with contextlib.ExitStack() as stack:
        found = reference.Reference(opened.config, reference.Tensors(opened, stack))
    logits = np.array([[3.0, 2, 1, 0]] * 3)
    assert found._wrong(logits, {}, np.array([[0, 1], [1, 0], [0, 0]])) == 1
    assert found._wrong(logits, {}, np.array([[0, 1], [0, 2], [1, 1]])) == 2


def test_a_text_of_no_probability_is_wrong():
    logits = np.array([[1e4, 0.0]])
    other = types.SimpleNamespace(logits_of=lambda ids: logits)
    assert model._of_the_text(other, logits, [0, 1]).good is False


def test_an_added_token_without_a_number_is_a_fault(demo_dir, tmp_path):
    copied = shutil.copytree(demo_dir, tmp_path / "demo")
    table = {"added_tokens_decoder": {"one": {"content": "<eos>"}}}
    (copied / "tokenizer_config.json").write_text(json.dumps(table))
    tokenizer = types.SimpleNamespace(
        convert_tokens_to_ids=lambda text: 1,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    check = words._special_ids(tokenizer, load_config(copied), copied)
    assert check.good is False and check.said == "'<eos>' is 1, not one"
