"""A small network in numpy, and its training: what predicts a layer's experts.

Shapes: N tokens, D inputs, H hidden units, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np


class Network(NamedTuple):
    """Two hidden layers with ReLU and a linear output; all float32."""

    weights1: np.ndarray
    """[D, H]"""
    bias1: np.ndarray
    weights2: np.ndarray
    """[H, H]"""
    bias2: np.ndarray
    weights3: np.ndarray
    """[H, E]"""
    bias3: np.ndarray

    @classmethod
    def drawn(cls, inputs: int, hidden: int, experts: int, rng: np.random.Generator) -> Network:
        """As torch.nn.Linear begins: evenly within ±1/√(inputs of the layer)."""

        def layer(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
            bound = 1 / np.sqrt(rows)
            drawn = (rng.uniform(-bound, bound, size) for size in ((rows, columns), columns))
            weights, bias = (array.astype(np.float32) for array in drawn)
            return weights, bias

        return cls(*layer(inputs, hidden), *layer(hidden, hidden), *layer(hidden, experts))

    def scores(self, x: np.ndarray) -> np.ndarray:
        """float32[N, E] of float32[N, D]."""
        first = np.maximum(x @ self.weights1 + self.bias1, 0)
        second = np.maximum(first @ self.weights2 + self.bias2, 0)
        return second @ self.weights3 + self.bias3


@dataclasses.dataclass(frozen=True)
class Training:
    """How a network is trained: absolute error and Adam, in batches, until the error on a tenth of
    the tokens no longer falls."""

    hidden: int = 128
    rate: float = 1e-3
    dropout: float = 0.1
    """Share of hidden units that are left out of a batch."""
    batch: int = 256
    epochs: int = 200
    """Most passes over the tokens."""
    window: int = 10
    least: float = 0.01
    """It ends where the mean error of the last `window` passes is within this share of that of the
    `window` before them."""
    seed: int = 0

    def trained(self, x: np.ndarray, y: np.ndarray) -> tuple[Network, list[float]]:
        """The network and its error on the tokens left out, by pass. x: float32[N, D], N ≥ 1.
        y: float32[N, E]."""
        rng = np.random.default_rng(self.seed)
        order = rng.permutation(len(x))
        kept = max(len(x) - len(x) // 10, 1)
        rows, left_out = order[:kept], order[kept:] if kept < len(x) else order
        network = Network.drawn(x.shape[1], self.hidden, y.shape[1], rng)
        moments = _Moments.of(network)
        errors: list[float] = []
        while len(errors) < self.epochs and not self._settled(errors):
            for some in self._batches(rng.permutation(rows)):
                gradients = _gradients(network, x[some], y[some], self.dropout, rng)
                network, moments = moments.stepped(network, gradients, self.rate)
            found = network.scores(x[left_out])
            errors.append(float(np.abs(found - y[left_out]).mean()))
        return network, errors

    def _batches(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        for first in range(0, len(rows), self.batch):
            yield rows[first : first + self.batch]

    def _settled(self, errors: list[float]) -> bool:
        if len(errors) < 2 * self.window:
            return False
        before, last = (
            np.mean(part)
            for part in (errors[-2 * self.window : -self.window], errors[-self.window :])
        )
        return bool(abs(before - last) <= self.least * before)


class _Moments(NamedTuple):
    """Adam's (Kingma and Ba 2015, Algorithm 1)."""

    count: int
    first: Network
    second: Network

    @classmethod
    def of(cls, network: Network) -> _Moments:
        zeros = Network(*map(np.zeros_like, network))
        return cls(0, zeros, zeros)

    def stepped(
        self, network: Network, gradients: Network, rate: float
    ) -> tuple[Network, _Moments]:
        count, (beta1, beta2) = self.count + 1, (0.9, 0.999)
        first = [beta1 * m + (1 - beta1) * g for m, g in zip(self.first, gradients, strict=True)]
        second = [
            beta2 * v + (1 - beta2) * g * g for v, g in zip(self.second, gradients, strict=True)
        ]
        size = rate * np.sqrt(1 - beta2**count) / (1 - beta1**count)
        new = [
            (w - size * m / (np.sqrt(v) + 1e-8)).astype(np.float32)
            for w, m, v in zip(network, first, second, strict=True)
        ]
        return Network(*new), _Moments(count, Network(*first), Network(*second))


def _gradients(
    network: Network, x: np.ndarray, y: np.ndarray, dropout: float, rng: np.random.Generator
) -> Network:
    """The gradients of the mean absolute error over a batch."""
    keep = [
        (rng.random((len(x), len(bias))) >= dropout).astype(np.float32) / np.float32(1 - dropout)
        for bias in (network.bias1, network.bias2)
    ]
    first = np.maximum(x @ network.weights1 + network.bias1, 0) * keep[0]
    second = np.maximum(first @ network.weights2 + network.bias2, 0) * keep[1]
    found = second @ network.weights3 + network.bias3
    back3 = np.sign(found - y) / np.float32(y.size)
    back2 = (back3 @ network.weights3.T) * keep[1] * (second > 0)
    back1 = (back2 @ network.weights2.T) * keep[0] * (first > 0)
    return Network(
        *(x.T @ back1, back1.sum(axis=0)),
        *(first.T @ back2, back2.sum(axis=0)),
        *(second.T @ back3, back3.sum(axis=0)),
    )


def stacked(networks: list[Network]) -> dict[str, np.ndarray]:
    """Networks of equal sizes as arrays by field, with an axis in front."""
    return dict(zip(Network._fields, map(np.stack, zip(*networks, strict=True)), strict=True))


def of_layer(arrays: Mapping[str, np.ndarray], layer: int) -> Network:
    return Network(*(arrays[name][layer] for name in Network._fields))
