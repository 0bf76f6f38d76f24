"""Router: softmax over experts, top-k, weights."""

from pallas_kernels.route.api import route

__all__ = ["route"]
