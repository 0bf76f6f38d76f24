"""PreScope's learned predictor (docs/prescope.md)."""
