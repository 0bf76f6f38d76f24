"""Which processor computes a missed expert (docs/prescope.md)."""
