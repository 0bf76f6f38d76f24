"""Every policy over the same routing: misses, times, predictions."""

from scripts.parts.commands import run

run("policies")
