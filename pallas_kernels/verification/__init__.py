"""Numeric checks of the kernels on the device that will run them.

A tile configuration that compiles can still be wrong, silently. So every configuration that
dispatch may choose for a model is compared with the XLA reference on the device itself, once per
device, jax version and source: the results are in `table`, checked before a model runs.
"""

from pallas_kernels.verification.apart import CannotCheck, Job
from pallas_kernels.verification.check import FEW_ROWS, Check, ModelShape
from pallas_kernels.verification.checks import checks
from pallas_kernels.verification.outcomes import Outcome, Unverified, outcomes
from pallas_kernels.verification.table import (
    NOT_CHECKED,
    SHIPPED,
    current,
    load_table,
    require_verified,
    run_checks,
    unverified,
    why_no_kernels,
)

__all__ = [
    "FEW_ROWS",
    "NOT_CHECKED",
    "SHIPPED",
    "CannotCheck",
    "Check",
    "Job",
    "ModelShape",
    "Outcome",
    "Unverified",
    "checks",
    "current",
    "load_table",
    "outcomes",
    "require_verified",
    "run_checks",
    "unverified",
    "why_no_kernels",
]
