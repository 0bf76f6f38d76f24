"""FluxMoE's stream on a timeline: the order of Algorithm 1, times by hand, and Huffman's code."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from host_offload.simulate.streaming import (
    DECODER,
    HUFFMAN_RATE,
    huffman_bits,
    huffman_share,
    play_stream,
)
from host_offload.simulate.timeline import DEVICE, LINK
from host_offload.sizing.tiers import StorageModel, uniform_placement

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

MODEL = StorageModel(
    layers=6, experts=8, record_bytes=100, host_rate=100.0, packed_rate=400.0, kappa=0.8
)


@pytest.mark.parametrize("layers", [3, 4, 7])
@pytest.mark.parametrize("beside", [True, False])
def test_the_order_of_algorithm_1(layers, beside):
    """Layers that differ: nothing comes before the layer two earlier ended, nothing is computed
    before it came, and each backend does one thing at a time."""
    rng = np.random.default_rng(layers)
    model = dataclasses.replace(MODEL, layers=layers)
    host = rng.integers(0, 9, layers)
    placement = np.stack([np.zeros(layers, int), 8 - host, host], axis=1)
    played = play_stream(model, placement, 1.7, beside=beside, slows=0.001, passes=4)
    loaded, begin, end = (each.ravel() for each in played[:3])
    assert (begin >= loaded).all() and (begin[1:] >= end[:-1]).all()
    for track in (LINK, DECODER, DEVICE):
        mine = [event for event in played.events if event.track == track]
        assert all(a.end <= b.begin + 1e-9 for a, b in itertools.pairwise(mine))
        bring = placement[:, 2 if track == LINK else 1] > 0
        assert track == DEVICE or len(mine) == (4 * bring.sum() if beside or track == LINK else 0)
        if track == DEVICE or not mine:
            continue
        numbers = [n for n in range(4 * layers) if bring[n % layers]]
        for n, event in zip(numbers, mine, strict=True):
            assert event.layer == n % layers and event.end <= begin[n] + 1e-9
            assert n < 2 or event.begin >= end[n - 2] - 1e-9
            assert n < 1 or event.begin <= max(end[n - 2] if n > 1 else 0, loaded[n - 1]) + 1e-9


@pytest.mark.parametrize("layer_s", [0.5, 3.0])
def test_what_a_pass_takes(layer_s):
    """Six packed experts are decoded in 1.5 s, two cross the link in 2 s."""
    placement = uniform_placement(MODEL, 0, 6)
    assert play_stream(MODEL, placement, layer_s).seconds == pytest.approx(6 * max(layer_s, 2.0))
    series = play_stream(MODEL, placement, layer_s, beside=False)
    assert series.seconds == pytest.approx(6 * max(layer_s + 1.5, 2.0))
    # With the paper's own decoder it hides where the slower one does not.
    packed = uniform_placement(MODEL, 0, 8)
    slow = dataclasses.replace(MODEL, packed_rate=200.0)
    assert play_stream(slow, packed, layer_s).seconds == pytest.approx(6 * max(layer_s, 4.0))
    fast = dataclasses.replace(MODEL, packed_rate=HUFFMAN_RATE)
    assert play_stream(fast, packed, layer_s).seconds == pytest.approx(6 * layer_s)
    direct = dataclasses.replace(MODEL, direct=True)
    assert play_stream(direct, packed, layer_s, beside=False).seconds == 6 * layer_s


def test_computing_loses_what_the_decoder_takes():
    """A fifth, while the next layer is decoded: 1.5 of 3 s beside a layer of 3 s."""
    placement = uniform_placement(MODEL, 2, 6)
    played = play_stream(MODEL, placement, 3.0, slows=0.2 / MODEL.packed_rate)
    assert played.seconds == pytest.approx(6 * (1.5 + (3.0 - 0.8 * 1.5)))
    short = play_stream(MODEL, placement, 0.4, slows=0.2 / MODEL.packed_rate)
    assert short.end[-1, -1] - short.begin[-1, -1] == pytest.approx(0.4 / 0.8)
    for wrong in ({"passes": 1}, {"slows": 1 / MODEL.packed_rate}):
        with pytest.raises(ValueError, match="less than all of the device's time"):
            play_stream(MODEL, placement, 1.0, **wrong)


def test_huffman_codes_are_the_shortest():
    """Of all lengths that a prefix code can have (Kraft)."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        counts = rng.integers(1, 40, 5)
        lengths = np.array(
            [of for of in itertools.product(range(1, 5), repeat=5) if sum(0.5**n for n in of) <= 1]
        )
        assert huffman_bits(counts) == pytest.approx((lengths @ counts).min() / counts.sum())
    assert huffman_bits(np.array([0, 8, 4, 2, 2])) == 1.75
    assert huffman_bits(np.array([0, 9])) == 1.0 and huffman_bits(np.zeros(4, int)) == 0.0


def test_a_weights_share_is_its_exponents_code_and_a_byte():
    assert huffman_share(np.arange(1 << 16, dtype=np.uint16)) == 1.0
    one, half = 0x3F80, 0x3F00
    assert huffman_share(np.array([one, half, one | 0x8000, half | 3], np.uint16)) == 9 / 16
    normal = np.random.default_rng(0).normal(size=1 << 16).astype(np.float32)
    bits = (normal.view(np.uint32) >> 16).astype(np.uint16)
    assert 0.65 < huffman_share(bits) < 0.7
