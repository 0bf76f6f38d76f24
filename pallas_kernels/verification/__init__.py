"""Numeric checks of the kernels on the device that will run them.

A tile configuration that compiles can still be wrong, silently. So every configuration that
dispatch may choose for a model is compared with the XLA reference on the device itself, once per
device, jax version and source: the results are in `table`, checked before a model runs.
"""

from pallas_kernels.verification.check import FEW_ROWS, Check, ModelShape
from pallas_kernels.verification.checks import checks
from pallas_kernels.verification.outcomes import Unverified, outcomes
from pallas_kernels.verification.table import (
    load_table,
    require_verified,
    unverified,
    write_table,
)

__all__ = [
    "FEW_ROWS",
    "Check",
    "ModelShape",
    "Unverified",
    "checks",
    "load_table",
    "outcomes",
    "require_verified",
    "unverified",
    "write_table",
]
