"""Synthetic routing with the statistics of real models: for simulations, and to force on an engine
whose weights are random.

A token's score for an expert is the expert's popularity plus noise; the experts with the top-k
scores are the token's. The noise of a sequence continues from token to token, so that neighbours
share experts. A part of it is common to all layers, so that a layer predicts the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

KINDS = ("qwen3-like", "uniform", "zipf", "phases")

FACTORS = 16
"""Dimensions of the noise that layers have in common."""


class RoutedTokens(NamedTuple):
    """The experts of n tokens: L layers, top-k."""

    ids: np.ndarray
    """int16[n, L, k], ascending."""
    weights: np.ndarray
    """float32[n, L, k], a softmax over the chosen scores: they sum to 1."""


@dataclasses.dataclass(frozen=True)
class RoutingGenerator:
    """Generates scores. Raises ValueError for impossible parameters.

    - `skew`: standard deviation of popularities, quantiles of a normal distribution in an order
      drawn per layer; noise has 1.
    - `memory`: correlation of a sequence's noise from token to token.
    - `shared`: part of the noise's variance that layers have in common.
    - `exponent`: above 0, popularities are Zipf's and noise is Gumbel's, so that an expert of rank
      r is the best with probability ∝ r^-exponent and the others follow without replacement.
    - `phase_tokens`: above 0, after so many tokens popularities move to other experts, in a cycle
      of `phases` with disjoint hot experts.
    """

    layers: int
    experts: int
    top_k: int
    skew: float = 0.0
    memory: float = 0.0
    shared: float = 0.0
    exponent: float = 0.0
    phase_tokens: int = 0
    phases: int = 3

    def __post_init__(self):
        if self.layers < 1 or not 1 <= self.top_k <= self.experts <= np.iinfo(np.int16).max:
            raise ValueError(
                f"routing needs layers ≥ 1 and 1 ≤ top_k ≤ experts ≤ 32767, not {self.layers}, "
                f"{self.top_k} and {self.experts}"
            )
        if self.skew < 0 or self.exponent < 0 or self.phase_tokens < 0 or self.phases < 1:
            raise ValueError("skew, exponent and phase_tokens are at least 0, phases at least 1")
        if not (0 <= self.memory < 1 and 0 <= self.shared <= 1):
            raise ValueError(
                f"memory is in [0, 1) and shared in [0, 1], not {self.memory} and {self.shared}"
            )
        if self.exponent and (self.skew or self.memory or self.shared):
            raise ValueError("Zipf's law (exponent) goes without skew, memory and shared")

    def phase(self, token: int) -> int:
        """Returns the phase of a token of a sequence, by its number: 0 … phases − 1."""
        return token // self.phase_tokens % self.phases if self.phase_tokens else 0

    def popularity(self, seed: int) -> np.ndarray:
        """Returns the popularities that scores get, float32[phases, L, E]."""
        ranks = np.arange(self.experts)
        if self.exponent:
            values = -self.exponent * np.log(ranks + 1.0)
        else:
            quantile = NormalDist().inv_cdf
            values = -self.skew * np.asarray([quantile((r + 0.5) / self.experts) for r in ranks])
        rng = np.random.default_rng([seed, 0])
        order = np.stack([rng.permutation(self.experts) for _ in range(self.layers)])
        shifts = np.arange(self.phases) * self.experts // self.phases
        return values[(order + shifts[:, None, None]) % self.experts].astype(np.float32)

    def steps(self, sequences: int, tokens: int, seed: int = 0) -> Iterator[RoutedTokens]:
        """Yields the next token of every sequence, `tokens` times.

        Sequence b does not depend on the number of sequences, nor its first tokens on its length.
        """
        popularity = self.popularity(seed)
        shape = (self.layers, self.experts)
        factors = np.random.default_rng([seed, 1]).standard_normal(
            (FACTORS, self.layers * self.experts), np.float32
        )
        factors /= np.linalg.norm(factors, axis=0)
        streams = [np.random.default_rng([seed, 2, b]) for b in range(sequences)]
        keep, fresh = self.memory, np.sqrt(1 - self.memory**2, dtype=np.float32)
        own = np.zeros((sequences, *shape), np.float32)
        common = np.zeros((sequences, FACTORS), np.float32)
        for token in range(tokens):
            scores = popularity[self.phase(token)]
            if self.exponent:
                scores = scores + np.stack([rng.gumbel(size=shape) for rng in streams])
            else:
                # The first tokens' noise has the variance of all others.
                new = fresh if token else np.float32(1)
                for b, rng in enumerate(streams):
                    own[b] = keep * own[b] + new * rng.standard_normal(shape, np.float32)
                    common[b] = keep * common[b] + new * rng.standard_normal(FACTORS, np.float32)
                scores = scores + np.sqrt(1 - self.shared, dtype=np.float32) * own
                if self.shared:
                    together = (common @ factors).reshape(own.shape)
                    scores += np.sqrt(self.shared, dtype=np.float32) * together
            yield choose(scores, self.top_k)


def choose(scores: np.ndarray, top_k: int) -> RoutedTokens:
    """Chooses the top-k of scores [..., E]: ids ascending, weights their softmax."""
    cut = scores.shape[-1] - top_k
    ids = np.sort(np.argpartition(scores, cut - 1 if cut else 0, axis=-1)[..., cut:], axis=-1)
    chosen = np.take_along_axis(scores, ids, axis=-1)
    weights = np.exp(chosen - chosen.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return RoutedTokens(ids.astype(np.int16), weights.astype(np.float32))


def routing_generator(
    kind: str, layers: int = 48, experts: int = 128, top_k: int = 8, phase_tokens: int = 64
) -> RoutingGenerator:
    """Returns a generator of one of KINDS, by default of Qwen3-30B-A3B's shape.

    - `qwen3-like`: fitted to what is published of Qwen3-30B-A3B. Of 128 experts a batch of 1, 2, 4,
      8, 16, 32 tokens activates 6.3, 11.6, 20.1, 31.9, 46.5, 62.0% (DynaExq, Table 1), which sets
      skew. About half of a layer's top-8 is carried over to the next token (WiSP, section 4), which
      sets memory. No figure is published for `shared`; it is a choice. The constants are right for
      128 experts and top-8; other shapes get the same distribution of scores.
    - `uniform`: every set of k experts is equally likely, independently for each token.
    - `zipf`: Zipf's law with exponent 1, independently for each token.
    - `phases`: qwen3-like, with other hot experts after every phase_tokens tokens (DynaExq, Figure
      2: the ten hottest experts of text, mathematics and code can be disjoint).

    Raises ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"routing is one of {', '.join(KINDS)}, not {kind!r}")
    generator = RoutingGenerator(layers, experts, top_k)
    if kind == "uniform":
        return generator
    if kind == "zipf":
        return dataclasses.replace(generator, exponent=1.0)
    fitted = dataclasses.replace(generator, skew=0.64, memory=0.72, shared=0.2)
    if kind == "qwen3-like":
        return fitted
    return dataclasses.replace(fitted, phase_tokens=phase_tokens)
