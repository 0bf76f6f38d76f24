"""The prefill bench runs, reports every figure beside its floor, and refuses what cannot run."""

import pytest

from moejax.checkpoints.random_model import shape
from moejax.errors import UserError
from scripts.bench import prefill as bench_prefill
from tests.scripts.runs import json_lines, refusal

QUICK = ("--layers", "2", "--repeats", "2", "--prompt", "64", "--waves", "2")


@pytest.mark.slow
def test_tokens_by_cells(capsys):
    args = ("--tokens", "100", "--cells", "all,25%,0")
    found = json_lines(capsys, bench_prefill.main, *QUICK, *args)
    keys = [(line["tokens"], line["prompts"], line["cells_per_layer"]) for line in found]
    assert keys == [(100, 2, c) for c in (16, 4, 0)]
    for line in found:
        assert (line["shape"], line["layers"], line["prefill_steps"], line["waves"]) == (
            "demo",
            2,
            2,
            2,
        )
        assert line["floor_ms"] == max(line["floor_link_ms"], line["floor_compute_ms"]) > 0
        assert line["floor_compute_ms"] > 0 and line["link_rate_gb_per_s"] > 0
        assert line["ms"] >= line["ms_best"] > 0
        assert line["times_floor"] == pytest.approx(line["ms"] / line["floor_ms"])
        assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["ms"] * 1e3)
        assert line["active"] == 2 * 16  # every expert of both layers has tokens
        # Resident: nothing moves. Paged: every active expert crosses the link exactly once.
        resident = line["cells_per_layer"] == 16
        assert line["fills"] + line["read_through"] == (0 if resident else line["active"])
        assert (line["floor_link_ms"] > 0) == (not resident)
        # A wave of 8 experts fills what it can; the second one evicts what the first one used.
        assert line["fills"] == {16: 0, 4: 2 * 2 * 4, 0: 0}[line["cells_per_layer"]]
        assert line["ops"]["expert_ffn"] in ("xla", "cpu")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--shape", "qwen3-30b-a3b", "--layers", "4000"], "use --layers"),
        (["--shape", "olmoe", "--layers", "1", "--tokens", "99999999"], "not even one layer fits"),
        (["--prompt", "1024"], "--prompt must be from 1 to 1023"),
        (["--waves", "0"], "waves='0' is not a whole number, 1 or more"),
        (["--ops", "pallas"], "Pallas kernels need an NVIDIA GPU"),
    ],
)
def test_a_mistake_is_explained(capsys, args, message):
    assert message in refusal(capsys, bench_prefill.main, *args)


def test_tokens_are_split_into_prompts_the_model_has_positions_for():
    demo, qwen = shape("demo"), shape("qwen3-30b-a3b")
    assert bench_prefill.prompt_lengths(2048, None, demo) == [960, 960, 128]
    assert bench_prefill.prompt_lengths(65536, None, qwen) == [4096] * 16
    assert bench_prefill.prompt_lengths(10, 30000, qwen) == [10]
    with pytest.raises(UserError, match="--prompt must be from 1 to 40959"):
        bench_prefill.prompt_lengths(10, 40960, qwen)


def test_operations_are_two_for_each_active_weight_and_attention():
    config = shape("qwen3-30b-a3b")
    attention, router, experts = 2048 * (2 * 4096 + 2 * 512), 2048 * 128, 8 * 3 * 2048 * 768
    layers = 48 * (attention + router + experts)
    assert layers == pytest.approx(2.7e9, rel=0.05)  # "A3B" less embeddings and LM head
    heads = 151936 * 2048
    one = 2 * (layers + heads) + 48 * 4 * 4096
    assert bench_prefill.prefill_operations(config, [1]) == one
    # Attention is quadratic in a prompt, not in a prefill step; each prompt has one LM head row.
    two = 2 * (2 * layers + heads) + 48 * 4 * 4096 * (1 + 2)
    assert bench_prefill.prefill_operations(config, [2]) == two
    assert bench_prefill.prefill_operations(config, [2, 2, 1]) == 2 * two + one
