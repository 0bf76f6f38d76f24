"""From logits to tokens: greedy and truncated sampling, and log-probabilities."""

from pallas_kernels.sample.api import Choices, choose_likeliest, logprobs, sample
from pallas_kernels.sample.reference import greedy, truncates_any

__all__ = ["Choices", "choose_likeliest", "greedy", "logprobs", "sample", "truncates_any"]
