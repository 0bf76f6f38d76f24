"""Generated routing whose iterations recur: what expert maps live on, in doses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Spec
from host_offload.policies.prefetch.next_layers import softmax
from host_offload.simulate.simulator import spec_of
from host_offload.traces.generators import choose, routing_generator
from host_offload.traces.reader import Trace, read_trace
from moejax.traces.generated import PRESENT, new_trace, routed_step, routing_header

EXPERT_BYTES = 9 << 20
"""Bytes of an expert of Qwen3-30B-A3B."""


@dataclasses.dataclass(frozen=True)
class Recurring:
    """The scores of `qwen3-like` (host_offload.traces.generators): popularity with its skew and
    noise of variance 1, so that what is published of Qwen3-30B-A3B's routing holds whatever the
    rest: how many experts a batch activates, and, since a sequence goes on as before with
    probability `memory`, how much one token has in common with the next.

    recurrence: the part of the noise's variance that belongs to one of `paths` whole iterations,
    the same in all layers' places whenever it comes again; the token's embedding tells which it is.
    ahead: how much of a layer's gate input is what the next layer will see, 0: its gate says
    nothing ahead. flat: no popularity, so that no frequency helps.
    """

    recurrence: float
    ahead: float
    flat: bool = False
    paths: int = 32
    layers: int = 12
    experts: int = 64
    top_k: int = 8
    hidden: int = 256
    memory: float = 0.72


class _Token(NamedTuple):
    ids: np.ndarray
    weights: np.ndarray
    probabilities: np.ndarray
    gate_input: np.ndarray
    embedding: np.ndarray


def routers(shape: Recurring, seed: int) -> np.ndarray:
    """float32[L, D, E]: columns of length 1, of each layer in directions of their own."""
    rng = np.random.default_rng([seed, 7])
    drawn = rng.standard_normal((shape.layers, shape.hidden, shape.experts))
    return np.linalg.qr(drawn)[0].astype(np.float32)


def tokens(shape: Recurring, count: int, sequence: int, seed: int) -> Iterator[_Token]:
    """The tokens of one sequence."""
    world, rng = np.random.default_rng([seed, 8]), np.random.default_rng([seed, 9, sequence])
    generator = routing_generator("qwen3-like", shape.layers, shape.experts, shape.top_k)
    popularity = 0.0 if shape.flat else generator.popularity(seed)[0]
    places = shape.layers, shape.experts
    templates = world.standard_normal((shape.paths, *places))
    meanings = world.standard_normal((shape.paths, shape.hidden))
    router, path = routers(shape, seed), 0
    own = rng.standard_normal(places)
    for number in range(count):
        if number == 0 or rng.random() > shape.memory:
            path = int(rng.integers(shape.paths))
        fresh = np.sqrt(1 - shape.memory**2)
        own = shape.memory * own + fresh * rng.standard_normal(places)
        mixed = np.sqrt(1 - shape.recurrence) * own + np.sqrt(shape.recurrence) * templates[path]
        scores = (popularity + mixed).astype(np.float32)
        seen = np.einsum("lde,le->ld", router, scores)
        seen[:-1] += shape.ahead * np.einsum("lde,le->ld", router[1:], scores[1:])
        routed = choose(scores, shape.top_k)
        embedding = meanings[path] + 0.1 * rng.standard_normal(shape.hidden)
        yield _Token(*routed, softmax(scores), seen, embedding)


def recurring_trace(
    directory: Path, shape: Recurring, *, sequences: int, prompt: int, output: int, seed: int = 0
) -> tuple[Trace, Spec]:
    """A trace of sequences one after the other, each a prefill step of `prompt` tokens and `output`
    decode steps, with router probabilities, gate inputs and embeddings; and what policies are
    told, with the routers."""
    about = {
        **dataclasses.asdict(shape),
        "driver": "host",
        "seed": seed,
        "version_bytes": {"dense": EXPERT_BYTES},
        "page_bytes": EXPERT_BYTES,
        "page_tokens": 16,
        "slot_bytes": EXPERT_BYTES,
        "slots": shape.layers * shape.experts + 1,
        "shapes": {"blocks": 1},
    }
    header = dataclasses.replace(
        routing_header(shape.layers, shape.experts, shape.top_k, PRESENT, about),
        probabilities=True,
        gate_input=shape.hidden,
        embedding=shape.hidden,
    )
    number = 0
    with new_trace(directory, header) as writer:
        for sequence in range(sequences):
            every = list(tokens(shape, prompt + output, sequence, seed))
            for first, last in [(0, prompt), *((i, i + 1) for i in range(prompt, len(every)))]:
                step = _Token(*map(np.stack, zip(*every[first:last], strict=True)))
                given = routed_step(
                    number,
                    step.ids,
                    weights=step.weights.astype(np.float32),
                    kind="prefill" if last == prompt else "decode",
                    request=np.full(last - first, sequence),
                    position=np.arange(first, last),
                    phase=np.full(last - first, first > 0),
                )
                extra = {name: getattr(step, name) for name in _Token._fields[2:]}
                halves = {name: array.astype(np.float16) for name, array in extra.items()}
                ended = (sequence,) if last == len(every) else ()
                writer.append(given._replace(**halves, finished=ended))
                number += 1
    trace = read_trace(directory)
    return trace, dataclasses.replace(spec_of(trace.header), router=routers(shape, seed))
