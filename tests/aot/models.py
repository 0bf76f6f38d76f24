"""The models whose sizes kernels are compiled at, from their config.json."""

import dataclasses

import pytest


@dataclasses.dataclass(frozen=True)
class Model:
    layers: int
    hidden: int
    width: int
    """Of an expert, I."""
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 128


MODELS = {
    "Qwen3-30B-A3B": Model(48, 2048, 768, 128, 8, 32, 4, 151936),
    "Mixtral-8x7B": Model(32, 4096, 14336, 8, 2, 32, 8, 32000),
    "OLMoE-1B-7B": Model(16, 2048, 1024, 64, 8, 16, 16, 50304),
}
_FIRST, *_OTHERS = MODELS
NAMES = (_FIRST, *(pytest.param(name, marks=pytest.mark.nightly) for name in _OTHERS))
"""Of MODELS, for a test's parameter: .ci/run compiles for one of them."""
DECODE_ROWS = (16, 64)
PREFILL_ROWS = 8192
