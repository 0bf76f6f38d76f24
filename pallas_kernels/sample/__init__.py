"""From logits to tokens: greedy and truncated sampling, and log-probabilities."""

from pallas_kernels.sample.api import Choices, logprobs, sample
from pallas_kernels.sample.reference import greedy, truncates_any

__all__ = ["Choices", "greedy", "logprobs", "sample", "truncates_any"]
