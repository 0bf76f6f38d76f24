"""Predictions of `moejax plan --gpu` beside what others published. docs/research/benchmarks.md has
the table; here each row is computed again."""

from __future__ import annotations

import pytest

from host_offload.memory.budget import Share
from moejax.costs.hardware import HARDWARE
from moejax.models.config import parse_config
from moejax.start.report.forecast import Forecast, Machine, forecast
from tests.conftest import REPOSITORY
from tests.moejax.models.test_published_configs import FILES

pytestmark = pytest.mark.slow
GIB = 1 << 30


def machine(name: str, gib: int, disk: float = Machine.disk) -> Machine:
    return Machine(HARDWARE[name], gib * GIB, disk=disk)


# What was run; the model's config; the machine; what is asked; published tokens a second.
PUBLISHED = [
    (
        "MoE-Infinity, RTX A5000, batch 1",
        ("Mixtral-8x7B", machine("RTX A5000", 24), {"context": 1024}),
        1 / 0.895,
    ),
    (
        "the same, batch 32",
        ("Mixtral-8x7B", machine("RTX A5000", 24), {"batches": [32], "context": 512}),
        12.579,
    ),
    (
        "WiSP, H100, 16 of 128 cells",
        ("Qwen3-30B-A3B", machine("H100", 94), {"expert_budgets": [Share(0.125)]}),
        13.79,
    ),
    (
        "the same, 64 cells",
        ("Qwen3-30B-A3B", machine("H100", 94), {"expert_budgets": [Share(0.5)]}),
        25.75,
    ),
    (
        "llama.cpp, Ryzen 7950X, Q4_K_M",
        ("Qwen3-30B-A3B", machine("CPU DDR5", 64), {"context": 640, "version": "int4"}),
        27.20,
    ),
    ("the same", ("gpt-oss-20b", machine("CPU DDR5", 64), {"context": 640}), 21.49),
    ("llama.cpp, RTX 3090, `--n-cpu-moe 25`", ("gpt-oss-120b", machine("RTX 3090", 24), {}), 33.14),
    (
        "colibri, 9950X, 123 GB, 1.51 GB/s",
        ("GLM-5", machine("CPU DDR5", 123, disk=1.51e9), {"version": "int4"}),
        0.10,
    ),
    (
        "the same, 8.81 GB/s",
        ("GLM-5", machine("CPU DDR5", 123, disk=8.81e9), {"version": "int4"}),
        0.28,
    ),
    (
        "colibri, AI Max+ 395, 3.27 GB/s",
        ("GLM-5", machine("CPU DDR5", 128, disk=3.27e9), {"version": "int4"}),
        0.16,
    ),
]


def row(run: str, model: str, published: float, found: Forecast) -> str:
    low, likely, high = (f"{rate:.2g}" for rate in found.tokens_per_s)
    ratio = found.tokens_per_s[1] / published
    return f"| {run} | {model} | {published:.3g} | {likely} ({low}–{high}) | {ratio:.2g} |"


@pytest.mark.parametrize(
    ("run", "asked", "published"), PUBLISHED, ids=lambda value: str(value)[:40]
)
def test_the_page_has_the_prediction(run, asked, published):
    model, machine, options = asked
    found = forecast(parse_config(FILES[model], "c"), machine, **{"batches": [1], **options})[0]
    page = (REPOSITORY / "docs" / "research" / "benchmarks.md").read_text()
    assert row(run, model, published, found) in page
