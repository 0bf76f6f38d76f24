"""Miss curves of references that no trace has."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from host_offload.sizing.miss_curves import MissCurves, gather_curves


def curves_of(references: Iterable[np.ndarray]) -> MissCurves:
    """Curves of references to sets bool[L, E], one after the other, each a step."""
    found = gather_curves(([active], True) for active in references)
    assert found is not None
    return found
