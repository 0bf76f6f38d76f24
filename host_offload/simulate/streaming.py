"""FluxMoE's stream on a timeline (section 4.2, Algorithm 1): the link and a decoder bring a layer's
experts into the window while the device computes the layer before."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from host_offload.control.window import HOST, PACKED
from host_offload.simulate.timeline import DEVICE, LINK, TimelineEvent
from host_offload.sizing.tiers import StorageModel

DECODER = "decoder"
"""The track of decompression, where it runs beside computing."""

HUFFMAN_RATE = 2e11
"""Dense bytes a second of the paper's decoder, which it gives as hundreds of GB/s a GPU."""


class StreamedPasses(NamedTuple):
    """N layers in P passes, in seconds from the start."""

    loaded: np.ndarray
    """float64[P, N]: when all of a layer's streaming experts are in the window."""
    begin: np.ndarray
    """float64[P, N]: when a layer begins, with its decoding if that is not beside computing."""
    end: np.ndarray
    """float64[P, N]"""
    events: tuple[TimelineEvent, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the last pass."""
        return float(self.end[-1, -1] - self.end[-2, -1])


def play_stream(
    model: StorageModel,
    placement: np.ndarray,
    layer_s: float,
    *,
    beside: bool = True,
    slows: float = 0.0,
    passes: int = 3,
) -> StreamedPasses:
    """Plays passes over all layers, the first one into an empty window.

    - `model`: the rates of link and decoder. StorageModel(packed_rate=HUFFMAN_RATE,
      kappa=huffman_share(weights)) is the paper's.
    - `placement`: int64[L, 3], experts of each layer in each tier.
    - `layer_s`: seconds of computing a layer.
    - `beside`: whether packed experts are decoded beside computing, as in the paper; False: by the
      device, before it computes their layer.
    - `slows`: seconds that computing loses by each dense byte that is decoded beside it.
    - `passes`: at least 2.

    Raises ValueError for fewer passes, and for a decoder that leaves no time to compute.
    """
    loss = slows * model.packed_rate
    if passes < 2 or not 0 <= loss < 1:
        raise ValueError(
            f"a stream has two passes or more, not {passes}, and a decoder that takes less than "
            f"all of the device's time, not {loss:.0%}"
        )
    layers, count = model.layers, model.layers * passes
    link = placement[:, HOST] * model.record_bytes / model.host_rate
    decode = np.zeros(layers)
    if model.packed_rate and not model.direct:
        decode = placement[:, PACKED] * model.record_bytes / model.packed_rate
    loaded, begin, end = np.zeros((3, count))
    events: list[TimelineEvent] = []
    link_free = decoder_free = 0.0

    def event(track: str, name: str, first: float, last: float, layer: int) -> None:
        if last > first:
            events.append(TimelineEvent(track, name, first, last, layer))

    for n in range(count):
        layer = n % layers
        # The window holds two layers: this one gets the memory of the one two before it.
        room = end[n - 2] if n > 1 else 0.0
        first = max(room, link_free)
        link_free = first + link[layer]
        event(LINK, f"layer {layer}", first, link_free, layer)
        if beside:
            first = max(room, decoder_free)
            decoder_free = first + decode[layer]
            event(DECODER, f"layer {layer}", first, decoder_free, layer)
        loaded[n] = max(link_free, decoder_free)
        begin[n] = max(end[n - 1] if n else 0.0, loaded[n])
        if beside:
            # The next layer is decoded from the end of the one before on, which this one follows.
            decoded = max(end[n - 1] if n else 0.0, decoder_free) + decode[(layer + 1) % layers]
            end[n] = begin[n] + _computing(layer_s, decoded - begin[n], loss)
        else:
            event(DEVICE, f"decode {layer}", begin[n], begin[n] + decode[layer], layer)
            end[n] = begin[n] + decode[layer] + layer_s
        event(DEVICE, f"layer {layer}", end[n] - layer_s if not beside else begin[n], end[n], layer)
    shape = passes, layers
    loaded, begin, end = (times.reshape(shape) for times in (loaded, begin, end))
    return StreamedPasses(loaded, begin, end, tuple(events))


def _computing(work: float, shared: float, loss: float) -> float:
    """Returns the seconds of so much work, if a share `loss` of the first `shared` seconds is
    lost."""
    shared = max(shared, 0.0)
    alone = work - (1 - loss) * shared
    return shared + alone if alone > 0 else work / (1 - loss)


def huffman_bits(counts: np.ndarray) -> float:
    """Returns the mean bits of a symbol in Huffman's code.

    - `counts`: int[n], how often each symbol occurs.
    """
    heap = counts[counts > 0].tolist()
    if len(heap) < 2:
        return float(len(heap))
    heapq.heapify(heap)
    bits = 0
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        bits += both
        heapq.heappush(heap, both)
    return bits / float(counts.sum())


def huffman_share(weights: np.ndarray) -> float:
    """Returns κ of the paper's compression (section 4.3): the bytes of bfloat16 weights with
    Huffman-coded exponents, and signs and mantissas as they are, over the dense bytes.

    - `weights`: uint16, the bits.
    """
    counts = np.bincount(((weights >> 7) & 0xFF).ravel(), minlength=256)
    return (8 + huffman_bits(counts)) / 16
