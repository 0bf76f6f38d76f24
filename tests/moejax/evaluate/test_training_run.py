"""A training run of MaxText, as its user evaluates it, quantizes it and serves the result."""

from __future__ import annotations

import json
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.flax import load_file

from moejax.checkpoints.load import load_checkpoint
from moejax.commands.main import main
from tests.moejax.checkpoints.foreign_trees import maxtext_qwen3

pytestmark = pytest.mark.slow
MAP = ("--name-map", "maxtext_qwen3_moe")
LIMITS = ("--max-model-len=128", "--max-num-seqs=2", "--max-num-batched-tokens=128")

TASK = """\
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{c}}}}"
doc_to_target: 1
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, demo_dir):
    """Steps 1 and 1200 of CheckpointManager; config.json and the tokenizer are in the root."""
    root = tmp_path_factory.mktemp("runs") / "7"
    config = json.loads((demo_dir / "config.json").read_text())
    tensors = load_file(demo_dir / "model.safetensors")
    with ocp.CheckpointManager(root) as manager:
        for step in (1, 1200):
            tree = maxtext_qwen3({n: t * (step > 1) for n, t in tensors.items()}, config)
            manager.save(step, args=ocp.args.StandardSave(tree | {"step": step}))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_dir / name, root)
    return root


def said(capsys, *args):
    """What a command prints."""
    assert main([str(arg) for arg in args]) == 0
    return capsys.readouterr().out


def test_a_run_is_quantized_and_converted(run, demo_dir, tmp_path, capsys):
    """One copy writes the text of the trained weights in int4; the other has their bytes."""
    said(capsys, "quantize", run, tmp_path / "q", "--versions", "int4", *MAP, "--step", "1200")
    said(capsys, "convert", run, tmp_path / "c", *MAP)  # the latest step
    asked = ("generate", "The old house", "--max-tokens=8", "--temperature=0", "--quiet", *LIMITS)
    asked += ("--precision", "int4", "--model")
    text = said(capsys, *asked, tmp_path / "q")
    assert text == said(capsys, *asked, demo_dir) and len(text) > 20
    copy, trained = (load_checkpoint(model) for model in (tmp_path / "c", demo_dir))
    for version, array in trained.store.arrays.items():
        np.testing.assert_array_equal(np.asarray(copy.store.arrays[version]), np.asarray(array))


@pytest.mark.torch
def test_a_local_task_of_lm_eval_on_a_step(run, demo_dir, tmp_path, capsys, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    file = tmp_path / "local_choice.jsonl"
    file.write_text(
        "".join(
            json.dumps({"q": q, "c": [" zzz zzz", " the road.", " of of of"]}) + "\n"
            for q in ("The old house stood at the end of", "They went down", "She looked along")
        )
    )
    (tmp_path / "local_choice.yaml").write_text(TASK.format(file=file))
    asked = ("--task", "lm-eval:local_choice", "--include-path", tmp_path, "--json", *LIMITS)
    of_step, of_model = (
        json.loads(said(capsys, "eval", model, *asked, *more))["results"]["local_choice"]
        for model, more in ((run, (*MAP, "--step", "1200")), (demo_dir, ()))
    )
    assert of_step == of_model and of_step["acc,none"] == 1
