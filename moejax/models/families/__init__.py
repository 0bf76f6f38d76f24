"""Every family that this release runs; a new one is a file of its own and a line here."""

from __future__ import annotations

from moejax.models.families import deepseek, mixtral, olmoe, phimoe, qwen2_moe, qwen3_moe
from moejax.models.family import Family

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        qwen3_moe.FAMILY,
        mixtral.FAMILY,
        olmoe.FAMILY,
        qwen2_moe.FAMILY,
        phimoe.FAMILY,
        deepseek.V2,
        deepseek.V3,
    )
}
"""architectures' entry in config.json → the family."""
