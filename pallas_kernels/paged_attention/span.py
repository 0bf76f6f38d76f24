"""The fixed unit of attention's reduction."""

SPAN = 64
"""Tokens reduced at once. Spans go in ascending order, whatever the page size (contract 1b)."""
