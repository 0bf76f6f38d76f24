"""Long runs that look for wrong results."""

from scripts.parts.commands import run

run("check")
