"""matplotlib, which only plots need."""

from typing import Any

from moejax import UserError


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files. Raises UserError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(
            "plots need matplotlib: pip install matplotlib; or leave them out with --no-plots"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt
