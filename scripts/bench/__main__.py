"""Times of one thing at a time, each beside its floor."""

from scripts.parts.commands import run

run("bench")
