"""Experiments as data: `moejax ablate scripts/experiments/NAME.yaml --output DIR`."""
