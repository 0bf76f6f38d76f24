"""Timing decode steps on a running engine, with the model's own routing or a forced one."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.traces.generators import routing_generator
from moejax.engine.loop import Engine
from moejax.models.config import ModelConfig
from moejax.requests.request import Request
from moejax.requests.sampling_params import SamplingParams
from moejax.step.executor import Executor
from moejax.step.experts import Paging
from moejax.step.step_parts import Routing

ROUTINGS = ("real", "uniform", "zipf", "qwen3-like")


@dataclasses.dataclass
class Samples:
    """What the repeats of a case measured, step by step."""

    step_s: list[float] = dataclasses.field(default_factory=list)
    """Seconds between the results of two steps."""
    host_s: list[float] = dataclasses.field(default_factory=list)
    """Seconds from having a result in Python to having dispatched the next step."""
    active: list[np.ndarray] = dataclasses.field(default_factory=list)
    """int[L] a step, as the two below."""
    fills: list[np.ndarray] = dataclasses.field(default_factory=list)
    read_through: list[np.ndarray] = dataclasses.field(default_factory=list)

    def add(self, step_s: float, paging: Paging) -> None:
        self.step_s.append(step_s)
        self.active.append(np.asarray(paging.active))
        self.fills.append(np.asarray(paging.fills))
        self.read_through.append(np.asarray(paging.read_through))


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Prefilled sequences in the engine, ready to be decoded from position `context`."""

    rows: tuple[int, ...]
    context: int
    block_table: jax.Array


def forced_routings(
    kind: str, runner: Executor, batch: int, steps: int, random: np.random.Generator
) -> list[Routing | None]:
    """Routing of each decode step of `batch` sequences in the first rows; None each for real.

    Ids int32[L, R, K], ascending and distinct, R the rows that run, and equal weights. kind: of
    host_offload.traces.generators.
    """
    if kind == "real":
        return [None] * steps
    layers, experts = runner.stores[0].shape[:2]
    rows, k = runner.shapes.bucket(batch), runner.config.num_experts_per_tok
    generator = routing_generator(kind, layers, experts, k)
    found = generator.steps(rows, steps, seed=int(random.integers(1 << 31)))
    every = (step.ids.transpose(1, 0, 2).astype(np.int32) for step in found)
    return [Routing(ids, np.full(ids.shape, 1 / k, np.float32)) for ids in every]


def prefill(
    engine: Engine, prompts: list[list[int]], steps: int
) -> tuple[list[Request], Sequences]:
    """Runs the prompts' prefill through the engine, with pages for `steps` tokens more."""
    params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
    requests = [engine.add(prompt, params) for prompt in prompts]
    # The engine would decode the first ones beside the last: states cannot go back.
    with mock.patch.object(engine.scheduler, "_decode_rows", return_value=[]):
        while not all(request.output for request in requests):
            engine.step()
    for request in requests:
        tokens = len(request.prompt) + request.to_generate - 1
        blocks = -(-tokens // engine.scheduler.block_size)
        if not engine.scheduler.extend(request, blocks - len(request.blocks)):
            raise RuntimeError(f"the KV budget has no room for {len(requests)} sequences")
    rows = tuple(request.row for request in requests if request.row is not None)
    table = jax.device_put(engine.scheduler.block_table.copy(), engine.runner.buffers.sharding)
    return requests, Sequences(rows, len(prompts[0]), table)


def step_bytes(runner: Executor, active: float, *, batch: int, context: int) -> dict[str, float]:
    """Bytes that a decode step must read, by what they are; states are also written.

    active: experts over all layers. context: tokens that each of `batch` sequences attends to, at
    least. Of embeddings that are not the head too a step reads the rows of its tokens only, which
    are not counted. Experts have the checkpoint's mean record where formats differ by layer, else
    the first of the runner's versions.
    """
    config, page, records = runner.config, runner.layout.page, runner.layout.records
    held = [len(layers) for layers in config.expert_layers.values()]
    counts = held if len(held) == len(records) else [1, *[0] * (len(records) - 1)]
    head = config.vocab_size * config.hidden_size * page.itemsize
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.params))
    if not config.tie_word_embeddings:
        weights -= head
    return {
        "experts": active * float(np.average([each.nbytes for each in records], weights=counts)),
        "attention and other weights": weights - head,
        "head": head,
        "KV": batch * context * page.nbytes / page.block_size,
        "states": 2 * batch * state_bytes(config, runner.steps.dtype),
    }


def state_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of a sequence's states."""
    if config.state is None:
        return 0
    arrays = itertools.chain(*config.state.state(dtype))
    each = sum(math.prod(shape) * jnp.dtype(kind).itemsize for shape, kind in arrays)
    return len(config.state_layers) * each


def decode(
    runner: Executor, sequences: Sequences, routings: list[Routing | None], samples: Samples
) -> None:
    """A decode step for each routing, from the sequences' context on, as the engine runs them:
    step t is dispatched before t − 1 is read."""
    steps = len(routings)
    rows = list(sequences.rows)
    update = np.zeros(runner.shapes.rows, bool)
    update[rows] = True
    previous = None
    last_read = began = time.perf_counter()
    for step in range(steps + 1):
        current = None
        if step < steps:
            positions = np.full(runner.shapes.rows, -1, np.int32)
            positions[rows] = sequences.context + step
            output = runner.decode(positions, sequences.block_table, routings[step])
            runner.tokens.sample(output.logits, update, None)
            current = output
        dispatched = time.perf_counter()
        if previous is not None:
            results = previous.read()
            assert results.tokens.shape == update.shape
            now = time.perf_counter()
            samples.add(now - last_read, results.paging)
            last_read = now
        if current is not None:
            samples.host_s.append(dispatched - began)
        previous, began = current, last_read
