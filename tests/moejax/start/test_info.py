"""`moejax info`: sizes of known models, what fits, and the refusals."""

import dataclasses
import json
import re

import jax
import pytest

from host_offload.memory.budget import format_bytes
from moejax.checkpoints.conversion import convert
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.random_model import shape
from moejax.commands import main as cli
from moejax.errors import UserError
from moejax.models.families import FAMILIES
from moejax.sizes import parse_rate
from moejax.start.report.model_info import (
    fit,
    model_info,
    read_headers,
)
from tests.moejax.checkpoints import foreign_trees
from tests.moejax.checkpoints.random_checkpoint import CONFIG, random_tensors, write
from tests.moejax.models import families

GiB = 1 << 30
QWEN = shape("qwen3-30b-a3b")


@pytest.fixture(scope="module")
def qwen():
    return model_info(QWEN)


def test_parameters_of_a_known_model(qwen):
    # Qwen/Qwen3-30B-A3B's model card: 30.5B parameters, 3.3B activated, 29.9B without embeddings.
    assert round(qwen.total_parameters / 1e9, 1) == 30.5
    assert round(qwen.active_parameters / 1e9, 2) == 3.35
    table = qwen.parameters["embedding"]
    assert round((qwen.total_parameters - 2 * table) / 1e9, 1) == 29.9
    assert sum(qwen.bytes.values()) == 2 * qwen.total_parameters
    assert qwen.device_bytes + qwen.versions["dense"]["store_bytes"] == sum(qwen.bytes.values())


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_agrees_with_what_is_loaded(architecture, tmp_path):
    loaded = load_checkpoint(families.write_checkpoint(tmp_path, architecture))
    info, leaves = model_info(loaded.config), jax.tree.leaves(loaded.params)
    assert info.device_bytes == sum(leaf.nbytes for leaf in leaves)
    assert (info.state_bytes > 0) == (
        "state_in" in {key for r in loaded.params["runs"] for key in r}
    )
    assert info.versions["dense"]["store_bytes"] == loaded.store.nbytes
    experts = loaded.store.nbytes // loaded.layout.itemsize
    # Records of experts with biases end in whole rows.
    padding = sum(leaf.size for leaf in leaves) + experts - info.total_parameters
    records = sum(loaded.config.moe_layers) * loaded.config.num_experts
    most = records * loaded.config.hidden_size * loaded.config.expert_bias
    assert 0 <= padding <= most
    idle = 1 - info.experts_per_token / info.experts
    idle_experts = (experts - padding) * idle
    assert info.total_parameters - info.active_parameters == pytest.approx(idle_experts)
    routers = [run.get(key) for run in loaded.params["runs"] for key in ("router", "correction")]
    assert info.parameters["router"] == sum(leaf.size for leaf in routers if leaf is not None)
    shared = any("shared_down" in run for run in loaded.params["runs"])
    assert ("shared experts" in info.parameters) == shared


def test_what_fits(qwen):
    small, large = (fit(QWEN, n * GiB, context=4096) for n in (16, 80))
    assert small.arena_bytes == int((16 * GiB - qwen.device_bytes) * 0.85)
    assert 0.1 < small.resident_share < 0.2
    used = small.resident_experts * qwen.slot_bytes
    assert used + small.kv_tokens * qwen.kv_token_bytes <= small.arena_bytes
    assert large.resident_share == 1
    assert large.sequences == large.kv_tokens // 4096 > small.sequences >= 1


def test_what_does_not_fit(qwen):
    assert "dense part alone" in (fit(QWEN, 2 * GiB).problem or "")
    tight = fit(QWEN, 4 * GiB)
    assert "too small for the KV of 40960 tokens; " in (tight.problem or "")
    tokens = int((tight.problem or "").split("; ")[1].split()[0])
    assert fit(QWEN, 4 * GiB, context=tokens).problem is None
    assert "KV of 40960 tokens" in (fit(QWEN, qwen.device_bytes).problem or "")


def test_headers_of_a_directory_and_of_a_config_alone(tmp_path):
    config = {key: value for key, value in CONFIG.items() if key != "dtype"}
    directory = write(tmp_path / "model", random_tensors(CONFIG), config, shards=2)
    parsed, weights = read_headers(directory)
    assert parsed.dtype == "bfloat16" and weights is not None
    files = list(directory.glob("*.safetensors"))
    assert weights.format == "safetensors" and weights.files == len(files) == 2
    assert weights.bytes == sum(file.stat().st_size for file in files)
    alone, none = read_headers(directory / "config.json")
    assert none is None and dataclasses.replace(alone, dtype="bfloat16") == parsed


def test_weights_that_would_not_load_are_refused(tmp_path):
    tensors = random_tensors(CONFIG)
    lost = tensors.popitem()[0]
    with pytest.raises(UserError, match=lost):
        read_headers(write(tmp_path, tensors))


def test_both_kinds_of_orbax_checkpoints(tmp_path):
    every = CONFIG | {"mlp_only_layers": []}
    tensors = random_tensors(every)
    original = write(tmp_path / "hf", tensors, every)
    config = read_headers(original)[0]

    ours = convert(original, tmp_path / "ours", dtype="float32").directory
    parsed, weights = read_headers(ours)
    assert parsed == dataclasses.replace(config, dtype="float32")
    assert weights is not None and weights.format == "moejax-orbax"
    assert weights.bytes > model_info(parsed).total_parameters * 4

    theirs = foreign_trees.save(tmp_path / "theirs", foreign_trees.hf_tree(tensors), every)
    name_map = foreign_trees.write_map(
        tmp_path, {"rules": [*foreign_trees.HF, *foreign_trees.EXPERTS]}
    )
    parsed, weights = read_headers(theirs, name_map=name_map)
    assert parsed == config and weights is not None and weights.format == "orbax"
    with pytest.raises(UserError, match="needs name_map"):
        read_headers(theirs)
    with pytest.raises(UserError, match="step and name_map are for Orbax checkpoints that other"):
        read_headers(original, step=3)


def test_rates():
    assert parse_rate("25GB/s") == 25 * 10**9 and parse_rate("1.5 GiB / s") == 3 << 29
    for text in ("25GB", "GB/s", "0/s", "1/min", "/s", "5/s/s"):
        with pytest.raises(UserError, match=f"'{text}' is not a rate; write bytes per second"):
            parse_rate(text)


def run(capsys, *arguments):
    status = cli.main(["info", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_the_table(capsys):
    status, out, err = run(capsys, "demo", "--context", 512)
    assert (status, err) == (0, "")
    assert out.startswith("demo: Qwen3MoeForCausalLM in bfloat16 (safetensors, 1 file, ")
    for text in ("experts", "3,145,728", "host", "one expert, dense", "80 GiB", "100.0%"):
        assert text in out
    assert max(map(len, out.splitlines())) <= 80
    status, out, _ = run(capsys, "demo", "--memory", "2600KiB")
    assert status == 0 and "too small for the KV of 1024 tokens; 96 tokens would fit" in out


ROW = 64 * 2
"""Bytes of a row of a record of the hidden size below; each of its parts ends in a whole row."""


def rounded_up(nbytes):
    return -(-nbytes // ROW) * ROW


@pytest.mark.torch
@pytest.mark.parametrize(
    ("version", "nbytes"),
    [
        # A float32 for each block of 32 rows and 16 columns.
        ("fp8-16x32-f32", 2048 + rounded_up(2048 // 512 * 4)),
        # For each 16 weights a bfloat16 and four bits of zero.
        ("int4-16-bf16-zero", 1024 + 2048 // 16 * 2 + rounded_up(2048 // 16 // 2)),
        # A byte for each 32 weights.
        ("fp4-32-e8m0", 1024 + rounded_up(2048 // 32)),
    ],
)
def test_formats_of_quantized_checkpoints_and_bytes_a_weight(version, nbytes, capsys, tmp_path):
    """Of experts with three matrices of 32·64 weights: 6 in each of 2 layers. A record has an even
    number of rows."""
    from tests.moejax.quantized_models import quantized_model

    quantized_model(tmp_path / "model", version)
    capsys.readouterr()
    check_versions(capsys, tmp_path / "model", version, 3 * nbytes + ROW, 3 * 2048, 12)


@pytest.mark.torch
def test_types_of_a_gguf_file_and_bytes_a_weight(capsys, tmp_path):
    """A block of 256 weights has 210 bytes in Q6_K; and in Q4_K 128 of codes, two float16, and 8
    scales and 8 minimums, whose 6 bits take a byte each. One row more makes their number even."""
    from tests.moejax.gguf_models import gguf_model

    path, size = tmp_path / "model.gguf", {"hidden_size": 256, "moe_intermediate_size": 256}
    gguf_model(path, experts="Q4_K", down="Q6_K", num_experts=2, num_experts_per_tok=1, **size)
    capsys.readouterr()
    nbytes = 256 * (148 + 148 + 210 + 2)
    check_versions(capsys, path, "q4_k+q4_k+q6_k", nbytes, 3 * 256 * 256, 4)


def check_versions(capsys, path, version, nbytes, weights, experts):
    status, out, _ = run(capsys, path, "--json")
    assert status == 0
    found = json.loads(out)["versions"][version]
    assert found == {"record_bytes": nbytes, "store_bytes": experts * nbytes}
    (line,) = (row for row in run(capsys, path)[1].splitlines() if row.startswith(f"{version} "))
    cells = re.split(r"\s{2,}", line.strip())
    sizes = format_bytes(nbytes), format_bytes(experts * nbytes)
    assert cells == [
        version,
        sizes[0],
        f"{nbytes / weights / 2:.1%}",
        f"{nbytes / weights:.3g} bytes",
        sizes[1],
        "checkpoint",
    ]


def test_json(capsys):
    status, out, _ = run(capsys, "demo", "--json", "--memory", "4MiB")
    found = json.loads(out)
    assert status == 0 and found["path"] == "demo" and found["weights"]["format"] == "safetensors"
    assert found["host_bytes"]["dense"] == 6 << 20 and found["slot_bytes"] == 96 << 10
    assert found["host_bytes"].keys() == {"dense", "int8", "int4", "int2", "lossless12"}
    assert found["versions"]["int4"] == {"record_bytes": 25600, "store_bytes": 64 * 25600}
    assert found["weights"]["quantizers"] == {}
    (only,) = found["fits"]
    assert only["memory"] == 4 << 20 and 0 < only["resident_share"] < 1


def test_a_gpu_is_asked_for_its_memory(capsys, monkeypatch):
    class GPU:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 9 << 20, "bytes_in_use": 1 << 20}

    monkeypatch.setattr(jax, "devices", lambda: [GPU()])
    (only,) = json.loads(run(capsys, "demo", "--json")[1])["fits"]
    assert only["memory"] == 8 << 20


def test_limits_that_mean_nothing_are_refused():
    for options in (dict(batch=0), dict(context=-1)):
        with pytest.raises(UserError, match=r"must be at least 1, got (0|-1)"):
            fit(QWEN, GiB, **options)
