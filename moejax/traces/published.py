"""Published measurements of real models' routing, to compare small models with.

The numbers are those of the papers. If a paper has no number for something, it stays empty.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """A real model whose routing was measured. Shares are of a layer's routed experts."""

    name: str
    layers: int
    experts: int
    top_k: int
    activated: dict[int, float]
    """Share of experts that a decode step activates, by batch size."""


def _shares(*percent: float) -> dict[int, float]:
    return dict(zip((1, 2, 4, 8, 16, 32), (p / 100 for p in percent), strict=True))


MODELS = (
    PublishedModel("Qwen3-30B-A3B", 48, 128, 8, _shares(6.3, 11.6, 20.1, 31.9, 46.5, 62.0)),
    PublishedModel("Qwen3-Next-80B-A3B", 48, 512, 10, _shares(1.9, 3.7, 6.7, 14.9, 25.4, 39.2)),
    PublishedModel("DeepSeek-V2-Lite", 26, 64, 6, _shares(9.0, 14.9, 23.2, 35.9, 51.7, 67.6)),
)
TOKEN_OVERLAP = "≈ 50% [1]"
STEP_OVERLAP = "44% [2]"
CONCENTRATION = "few hot [3]"
ACTIVATED_NOTES = """\
steps: the trace's decode steps of so many tokens. tokens: so many of the trace's
tokens, if they are independent. uniform: if every expert is as likely.
DynaExq, Table 1: [1] Qwen3-30B-A3B [2] Qwen3-Next-80B-A3B [3] DeepSeek-V2-Lite"""
MEASURE_NOTES = """\
[1] Qwen3-30B-A3B at batch 1: "roughly half" turn over (WiSP, section 4)
[2] LLaDA-MoE between denoising steps; 23% when shuffled (WiSP, appendix G)
[3] heavy-tailed, without a number (DynaExq, Figure 2)"""
DOMAIN_NOTES = """\
divergence: Jensen-Shannon, in bits (Lin, 1991). variation: total variation. Both
0 … 1. Halves of one domain show how much of it is chance. Published: the ten hottest
experts of text, mathematics and code can be disjoint (DynaExq, Figure 2)."""
