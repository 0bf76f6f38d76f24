"""What transfers beside compute cost and hide."""

from scripts.parts.commands import run

run("transfers")
