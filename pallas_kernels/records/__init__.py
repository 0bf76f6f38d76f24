"""The layout of an expert's weights in each version, and what they decode to."""

from pallas_kernels.records.format import VERSIONS, RecordFormat
from pallas_kernels.records.reference import decode

__all__ = ["VERSIONS", "RecordFormat", "decode"]
