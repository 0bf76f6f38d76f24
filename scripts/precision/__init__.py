"""Versions at equal bytes: predicted speed, and what changed when."""
