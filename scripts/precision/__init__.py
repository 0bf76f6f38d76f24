"""Versions at equal bytes: quality, speed, and what changed when."""
