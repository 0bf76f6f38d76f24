"""The native CPU ops beside what else computes the same."""

from scripts.parts.commands import run

run("cpu")
