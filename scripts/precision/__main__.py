"""Versions at equal bytes: quality, speed, and what changed when."""

from scripts.parts.commands import run

run("precision")
