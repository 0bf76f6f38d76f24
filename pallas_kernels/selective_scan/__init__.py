"""The recurrence of Mamba-2 (state space duality, arXiv:2405.21060) and of Mamba (selective scan,
arXiv:2312.00752), over states in pages."""

from pallas_kernels.selective_scan.api import (
    ScanInputs,
    ScanOptions,
    ScanShape,
    ScanWeights,
    selective_scan,
)

__all__ = ["ScanInputs", "ScanOptions", "ScanShape", "ScanWeights", "selective_scan"]
