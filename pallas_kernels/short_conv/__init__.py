"""A short causal convolution of each column, over states in pages."""

from pallas_kernels.short_conv.api import ConvOptions, ConvWeights, short_conv, short_conv_state

__all__ = ["ConvOptions", "ConvWeights", "short_conv", "short_conv_state"]
