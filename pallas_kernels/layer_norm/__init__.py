"""Layer normalisation (Ba, Kiros and Hinton 2016)."""

from pallas_kernels.layer_norm.api import layer_norm

__all__ = ["layer_norm"]
