"""Which processor computes a missed expert (docs/explanation/prescope.md)."""
