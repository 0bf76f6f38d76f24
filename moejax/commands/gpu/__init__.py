"""The commands about the GPU itself: whether it can be used, whether kernels are right on it."""
