"""The native CPU ops beside what else computes the same."""
