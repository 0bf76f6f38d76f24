"""Moves experts into cells ahead of need: transfers that the host chose, inside the step."""

from pallas_kernels.stage.api import Entries, admit_entries, stage

__all__ = ["Entries", "admit_entries", "stage"]
