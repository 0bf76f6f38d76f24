"""Ops on arrays: each op is a folder with `api` (checks, dispatch) and `reference` (plain XLA).

The ops know no model and no policy. `OPS` lists them with their implementations; an engine picks
one implementation per op at start-up with `resolve_ops` and says which in its log and statistics.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pallas_kernels.dispatch import OPS, Ops, parse_ops, resolve_ops

__all__ = ["OPS", "Ops", "parse_ops", "resolve_ops"]


def __getattr__(name: str):
    # The command line reads options (pallas_kernels.option_text) before jax is imported.
    if name in __all__:
        return getattr(import_module("pallas_kernels.dispatch"), name)
    raise AttributeError(f"module 'pallas_kernels' has no attribute {name!r}")
