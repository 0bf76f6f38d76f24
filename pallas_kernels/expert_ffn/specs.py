"""Shapes that tests and benches of expert_ffn share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Spec:
    tokens: int
    dtype: str
    routing: str = "some"
    """Where tokens go: "some" leaves a quarter of the experts idle, "one" sends every token to the
    last expert too, "padded" has padding rows at the end, "none" nothing else."""
    experts: int = 8
    top_k: int = 2
    hidden: int = 32
    width: int = 24
    layers: int = 2
    row_tile: int = 16
    versions: tuple[str | tuple[str, str], ...] = ()
    """Versions of the experts, in turn: a name, or (in a cell, in the store); empty: dense."""
    biases: bool = False
    gated: bool = True


SPECS = (
    *(Spec(tokens, "bfloat16") for tokens in (1, 2, 3, 15, 16, 17, 64, 65, 2048)),
    Spec(1, "float32"),
    Spec(17, "float32", "padded"),
    Spec(65, "float32", "one", row_tile=8),
    Spec(17, "float32", width=10, hidden=40, top_k=3),
    Spec(17, "bfloat16", "one", top_k=1),
    Spec(64, "bfloat16", "padded", experts=3, top_k=3, row_tile=64),
    Spec(1, "bfloat16", row_tile=64),
    Spec(65, "bfloat16", "one", row_tile=64),
    Spec(2048, "bfloat16", row_tile=64),
    Spec(3, "bfloat16", "none"),
    Spec(3, "bfloat16", "none", row_tile=64),
    Spec(33, "bfloat16", "one", experts=16, top_k=4, hidden=192, width=80),
    Spec(33, "bfloat16", "one", experts=16, top_k=4, hidden=192, width=80, row_tile=64),
    Spec(17, "bfloat16", width=10, hidden=40, top_k=3),
    Spec(17, "bfloat16", width=10, hidden=40, top_k=3, row_tile=64),
    Spec(3, "float16"),
    Spec(17, "float16", "padded"),
    Spec(70, "bfloat16", "one", experts=3, hidden=384, width=128, row_tile=64),
)

CODED = (
    *("fp8-128x128-f32", "fp8-64x32-bf16", "fp8-channel-f32", "fp4-32-e8m0"),
    *("int4-32-bf16", "int4-32-bf16-zero", "int4-64-f16-zero", "int8-32-f16-zero", "q8_0"),
    *("fp4-16-e4m3xf32", "fp4-16-e4m3divf32", "int4-32-bf16+int4-32-bf16+int8-32-bf16"),
)
"""Formats of checkpoints that kernels read."""

_FIVE = ("dense", "int8", "int4", "int2", "lossless12")
_PAIRS = (
    *(("dense", lo) for lo in ("int8", "int4", "int2")),
    ("int8", "int4"),
    ("int4", "int2"),
    (("dense", "lossless12"), "int4"),
)

VERSIONED = (
    Spec(3, "bfloat16", hidden=64, width=32, versions=("lossless12", "int4")),
    Spec(17, "bfloat16", "padded", experts=12, top_k=3, versions=_FIVE),
    Spec(65, "bfloat16", experts=8, hidden=256, width=128, row_tile=64, versions=("int4", "int2")),
    *(Spec(3, "bfloat16", hidden=64, width=32, versions=pair) for pair in _PAIRS),
    *(Spec(33, "bfloat16", "one", hidden=64, width=32, versions=(name,)) for name in _FIVE[1:]),
    *(Spec(17, "bfloat16", width=10, hidden=40, row_tile=t, versions=_FIVE) for t in (16, 64)),
    *(Spec(17, "bfloat16", width=320, hidden=96, row_tile=t, versions=_FIVE) for t in (16, 64)),
    *(Spec(17, "bfloat16", width=96, hidden=320, row_tile=t, versions=_FIVE) for t in (16, 64)),
    Spec(65, "bfloat16", "one", experts=5, hidden=512, width=256, row_tile=64, versions=_FIVE),
    Spec(33, "bfloat16", "one", experts=5, hidden=512, width=256, versions=_FIVE),
    *(Spec(17, dtype, versions=_FIVE[:4]) for dtype in ("float16", "float32")),
    Spec(17, "float16", hidden=40, width=10, row_tile=64, versions=_FIVE[:4]),
)
"""A pair of tiers, all versions in one call, other pairs, each alone, in transit, and shapes that
neither groups nor tiles divide."""

OF_CHECKPOINTS = (
    *(Spec(3, "float16", hidden=64, width=32, versions=(name,)) for name in CODED[::3]),
    *(
        Spec(17, "bfloat16", hidden=256, width=128, row_tile=tile, versions=(name,))
        for tile in (16, 64)
        for name in CODED
    ),
    *(Spec(17, "bfloat16", hidden=96, width=80, versions=(name,)) for name in CODED),
)
"""Formats of checkpoints: in float16, of few tokens, of many, with short groups and tiles."""

OF_UNEVEN_WIDTHS = (
    Spec(3, "bfloat16", experts=4, hidden=160, width=144, versions=("fp8-128x128-f32",)),
    Spec(3, "bfloat16", experts=4, hidden=2880, width=96, versions=("fp4-32-e8m0",)),
)
"""Two FP8 blocks in each direction, the second cut off; and gpt-oss' hidden size, no multiple of
512."""
