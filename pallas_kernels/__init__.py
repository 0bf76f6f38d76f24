"""Ops on arrays: each op is a folder with `api` (checks, dispatch) and `reference` (plain XLA).

The ops know no model and no policy. `OPS` lists them with their implementations; an engine picks
one implementation per op at start-up with `resolve_ops` and says which in its log and statistics.
"""

from pallas_kernels.dispatch import OPS, Ops, parse_ops, resolve_ops

__all__ = ["OPS", "Ops", "parse_ops", "resolve_ops"]
