"""Experts in files: a model larger than the memory that it may take."""

from scripts.parts.commands import run

run("disk")
