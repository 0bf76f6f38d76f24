"""Copies experts into cells before they are needed: transfers that the host chose, in the step."""

from pallas_kernels.stage.api import Entries, admit_entries, stage

__all__ = ["Entries", "admit_entries", "stage"]
