"""Shapes that tests and benches of the two attention ops share."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.kv_write import KVPage

EDGES = (0, 1, 63, 64, 65, 15, 16, 17, 127, 128, 129, 2, 31, 32, 33, 190, 192)
"""Lengths around the ends of pages and spans; 0 is an empty row."""

LONG = (2400, 257, 2049, 0, 255, 256, 511)
"""Lengths around the ends of the kernel's splits of 256 tokens, and of eight of them."""


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    lengths: tuple[int, ...]
    """The length of each row; there are T of them."""
    dtype: str
    block_size: int = 16
    window: int | None = None
    sinks: bool = False
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 2
    max_length: int = 192
    latent: int = 0
    scale: float | None = None

    @property
    def page(self) -> KVPage:
        return KVPage(self.block_size, self.kv_heads, self.head_dim, self.latent)


@dataclasses.dataclass(frozen=True)
class PrefillSpec:
    chunks: tuple[tuple[int, int], ...]
    """(start, real tokens) of each chunk of the prefill step, every chunk of another sequence."""
    size: int
    """Rows of a chunk."""
    dtype: str
    block_size: int = 16
    window: int | None = None
    sinks: bool = False
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 2
    max_length: int = 192
    latent: int = 0
    scale: float | None = None

    @property
    def page(self) -> KVPage:
        return KVPage(self.block_size, self.kv_heads, self.head_dim, self.latent)


def _rows(count: int) -> tuple[int, ...]:
    return tuple(EDGES[i % len(EDGES)] for i in range(4, count + 4))


DECODE_SPECS = (
    *(DecodeSpec(_rows(tokens), "bfloat16") for tokens in (1, 2, 3)),
    DecodeSpec(EDGES[:9], "bfloat16", scale=0.4),
    *(DecodeSpec(_rows(tokens), "bfloat16") for tokens in (15, 16, 64, 65)),
    DecodeSpec(EDGES, "bfloat16", block_size=32),
    DecodeSpec(EDGES, "bfloat16", block_size=64, heads=3, kv_heads=1),
    DecodeSpec(EDGES, "float32", window=20),
    DecodeSpec(EDGES, "float32", block_size=32, window=64, heads=2),
    DecodeSpec(EDGES, "float32", window=1),
    DecodeSpec(EDGES, "float16", block_size=64, head_dim=24),
    DecodeSpec(EDGES[:7], "bfloat16", heads=20, kv_heads=1, head_dim=6),
    DecodeSpec(LONG, "bfloat16", heads=2, kv_heads=1, max_length=2400),
    DecodeSpec(LONG, "float16", window=300, heads=2, kv_heads=1, max_length=2400),
    DecodeSpec(EDGES, "float32", sinks=True),
    DecodeSpec(EDGES[:9], "bfloat16", window=20, sinks=True, heads=8, head_dim=64),
    DecodeSpec(LONG, "bfloat16", sinks=True, heads=2, kv_heads=1, max_length=2400),
)

PREFILL_SPECS = (
    PrefillSpec(((0, 1), (7, 1), (191, 1)), 1, "float32"),
    PrefillSpec(((0, 2), (64, 1)), 2, "bfloat16"),
    PrefillSpec(((0, 3), (63, 3)), 3, "bfloat16"),
    PrefillSpec(((0, 15), (60, 7)), 15, "bfloat16"),
    PrefillSpec(((0, 16), (48, 16), (64, 5), (176, 16)), 16, "bfloat16", scale=0.4),
    PrefillSpec(((0, 17), (51, 17), (119, 2)), 17, "float32", block_size=32, window=20),
    PrefillSpec(((0, 64), (64, 33), (128, 64)), 64, "bfloat16", block_size=64, window=64),
    PrefillSpec(((0, 64), (64, 1), (128, 64)), 64, "float16", heads=3, kv_heads=1),
    PrefillSpec(((0, 65), (65, 65), (130, 40)), 65, "float32", block_size=32),
    PrefillSpec(((0, 16), (96, 16)), 16, "float32", window=1),
    PrefillSpec(((0, 65), (65, 64), (130, 40)), 65, "bfloat16", heads=5, kv_heads=1, head_dim=6),
    PrefillSpec(((0, 65), (130, 40)), 65, "float32", sinks=True),
    PrefillSpec(((0, 64), (100, 33)), 64, "bfloat16", window=20, sinks=True, heads=8, head_dim=64),
)

_SMALL: dict[str, Any] = dict(kv_heads=1, head_dim=18, latent=16, scale=0.3)
_LITE: dict[str, Any] = dict(kv_heads=1, heads=16, head_dim=576, latent=512, scale=0.1)

LATENT_DECODE_SPECS = (
    DecodeSpec(EDGES, "bfloat16", block_size=32, window=20, **_SMALL),
    DecodeSpec(EDGES, "float32", kv_heads=1, head_dim=24, latent=16, scale=0.3),
    DecodeSpec(EDGES[:4], "bfloat16", block_size=64, **_LITE),
    DecodeSpec(LONG, "bfloat16", max_length=2400, sinks=True, **_SMALL),
    DecodeSpec(
        EDGES[:7], "float16", heads=20, kv_heads=1, head_dim=206, latent=200, scale=0.2, window=40
    ),
)
"""Latent pages; the sizes of DeepSeek-V2-Lite, and more heads than a tile has with masked parts."""

LATENT_PREFILL_SPECS = (
    PrefillSpec(((0, 64), (64, 33)), 64, "bfloat16", block_size=32, window=20, **_SMALL),
    PrefillSpec(
        ((0, 16), (48, 16), (64, 5)), 16, "float32", kv_heads=1, head_dim=24, latent=16, scale=0.3
    ),
    PrefillSpec(((0, 17), (51, 17), (119, 2)), 17, "bfloat16", sinks=True, **_LITE),
    PrefillSpec(
        ((0, 65), (65, 40)), 65, "float16", heads=5, kv_heads=1, head_dim=206, latent=200, scale=0.2
    ),
)
"""The same as LATENT_DECODE_SPECS, for prefill."""
