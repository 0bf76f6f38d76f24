"""The line between experts and KV: curves, splits, resizes, WiSP's Table 2."""

from scripts.parts.commands import run

run("budgets")
