"""Transfers beside compute: what they cost and what they hide."""
