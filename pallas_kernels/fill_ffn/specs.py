"""Shapes that tests and checks of fill_ffn share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Spec:
    tokens: int
    hits: int
    """Active experts that already have a cell; the next ones are filled, the rest read through."""
    fills: int
    dtype: str = "bfloat16"
    experts: int = 8
    top_k: int = 2
    hidden: int = 32
    width: int = 24
    layers: int = 2
    versions: tuple[str, ...] = ()
    """Versions of the experts, in turn; empty: dense."""
    biases: bool = False
    gated: bool = True


SPECS = (
    Spec(3, hits=2, fills=2),
    Spec(17, hits=8, fills=0),
    Spec(17, hits=0, fills=8),
    Spec(17, hits=0, fills=0),
    Spec(65, hits=2, fills=3),
    Spec(16, hits=3, fills=3, dtype="float16"),
    Spec(17, hits=1, fills=3, top_k=3, hidden=40, width=10),
    Spec(2, hits=3, fills=4, top_k=4, hidden=1032, width=72, layers=1),
    Spec(0, hits=0, fills=0, experts=4),
    Spec(17, hits=2, fills=4, hidden=64, width=32, versions=("int8", "int4")),
    Spec(5, hits=3, fills=3, hidden=64, width=32, versions=("dense", "dense")),
    Spec(5, hits=2, fills=2, hidden=64, width=32, versions=("fp8-32x16-f32", "fp4-32-e8m0")),
    Spec(17, hits=2, fills=4, hidden=64, width=96, versions=("fp4-32-e8m0",), biases=True),
    Spec(17, hits=2, fills=4, versions=("dense",), biases=True),
    Spec(17, hits=2, fills=4, versions=("dense",), gated=False),
)
"""Some of each, all hits, all filled, all read through, two blocks of tokens, the other dtype,
sizes that tiles do not divide, records of several chunks, no routed token (tokens 0: only padding)
and versions: codes, two that are dense, formats of checkpoints; biases, two matrices."""
