"""Predictions for the command `speed`: routing, the arms' memory, times from stated costs."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.interface import Policy, routed_counts
from host_offload.control.paging import PagedSpec, version_cells
from host_offload.memory.budget import cells_per_layer
from host_offload.memory.placement import capacity, resident_spec
from host_offload.policies.precision.dynaexq import DynaExq
from host_offload.policies.precision.maps import top_map
from host_offload.simulate.prediction import Prediction, predict
from host_offload.sizing.cost_model import CostModel
from host_offload.traces.generators import routing_generator
from host_offload.traces.reader import Trace, read_trace
from moejax.checkpoints.random_model import expert_layout
from moejax.models.model_config import ModelConfig
from moejax.traces.generated import new_trace, routed_step, routing_header
from scripts.precision.costs import Machine, other_bytes, stated_costs

WARM_SEQUENCES, WARM_TOKENS, WARM_STEPS = 8, 64, 32
"""Other sequences that run first: a prompt each and decode steps, so that caches are full. Their
counts are DynaExq's scores at the start."""

PREFILL = 8192
"""Prompt tokens of a prefill step (moejax's default on a GPU)."""

WAVES = 8
"""Waves of a prefill step, as with kernels."""

VERSIONS = ("dense", "int8", "int4")
MIX = ("dense", "int4")

OFF = "DynaExq off"


@dataclasses.dataclass(frozen=True)
class Settings:
    config: ModelConfig
    machine: Machine
    steps: int
    """Decode steps of each run."""
    interval: str = "512 tokens"
    """DynaExq's: shorter than its own default, or hardly one would end within a run."""
    spares: int = 2
    """DynaExq's, of each version."""
    seed: int = 0

    @property
    def sizes(self) -> tuple[int, int, int]:
        config = self.config
        return sum(config.moe_layers), config.num_experts, config.num_experts_per_tok

    @property
    def dense_bytes(self) -> int:
        """All experts."""
        layers, experts, _ = self.sizes
        return layers * experts * expert_layout(self.config).nbytes


@dataclasses.dataclass(frozen=True)
class Routing:
    ids: np.ndarray
    """int16[tokens, sequences, L, k]"""
    warm: np.ndarray
    """The same of WARM_SEQUENCES others, which run first."""
    scores: np.ndarray
    """float64[L, E]: their counts."""


def route(settings: Settings, sequences: int, tokens: int) -> Routing:
    """Routing with the statistics of Qwen3-30B-A3B, see host_offload.traces.generators."""
    layers, experts, k = settings.sizes
    generator = routing_generator("qwen3-like", layers, experts, k)

    def ids(first: int, last: int, tokens: int) -> np.ndarray:
        steps = generator.steps(last, tokens, settings.seed)
        return np.stack([routed.ids[first:] for routed in steps])

    warm = ids(sequences, sequences + WARM_SEQUENCES, WARM_TOKENS + WARM_STEPS)
    counts = routed_counts(warm.reshape(-1, layers, k), experts)
    return Routing(ids(0, sequences, tokens), warm, counts.astype(np.float64))


@dataclasses.dataclass(frozen=True)
class Run:
    """The routing of one batch and prompt as a trace."""

    trace: Trace
    first: int
    """The first step after the warm sequences'."""
    ends: np.ndarray
    """int[batch]: the prefill step, counted from `first`, that ends each prompt."""


def write_run(
    directory: Path, settings: Settings, routing: Routing, batch: int, prompt: int
) -> Run:
    """Writes the warm sequences, then prefill steps over `batch` prompts in order, then decode
    steps of all."""
    layers, experts, k = settings.sizes
    every, sequences = np.arange(WARM_SEQUENCES), np.arange(batch)

    def chosen() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, int, bool]]:
        """Yields of each step: routing by position and row, positions, rows, the first request, and
        whether it is a prefill step. The warm ones are requests of their own."""
        warm = np.tile(np.arange(WARM_TOKENS), WARM_SEQUENCES)
        yield routing.warm, warm, np.repeat(every, WARM_TOKENS), batch, True
        for step in range(WARM_STEPS):
            yield routing.warm, np.full(WARM_SEQUENCES, WARM_TOKENS + step), every, batch, False
        for first in range(0, batch * prompt, PREFILL):
            some = np.arange(first, min(first + PREFILL, batch * prompt))
            yield routing.ids, some % prompt, some // prompt, 0, True
        for step in range(settings.steps):
            yield routing.ids, np.full(batch, prompt + step), sequences, 0, False

    present = ("request", "position", "phase", "kind", "rows", "waves", "ids")
    header = routing_header(layers, experts, k, present, {"generator": "qwen3-like"})
    with new_trace(directory, header) as writer:
        for number, (ids, position, rows, first, prefill) in enumerate(chosen()):
            step = routed_step(
                number,
                ids[position, rows],
                request=first + rows,
                position=position,
                phase=np.full(len(rows), not prefill, np.uint8),
                kind="prefill" if prefill else "decode",
            )
            waves = np.full(layers, WAVES if prefill else 1, np.int16)
            writer.append(step._replace(rows=PREFILL if prefill else len(rows), waves=waves))
    return Run(read_trace(directory), 1 + WARM_STEPS, ((sequences + 1) * prompt - 1) // PREFILL)


# ---- arms


@dataclasses.dataclass(frozen=True)
class Plan:
    """How an arm uses its bytes."""

    note: str
    used: int
    """Bytes of cells."""
    versions: tuple[str, ...]
    resident: bool
    """Nothing ever moves on demand."""
    spec: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The spec of a trace's header, for versions that mix."""
    cells: np.ndarray | None = None
    policies: tuple[Policy, ...] = ()

    @property
    def one_resident(self) -> bool:
        return self.resident and len(self.versions) == 1


def plans(settings: Settings, memory: int, scores: np.ndarray) -> dict[str, Plan | None]:
    """What each arm does with so many bytes for experts; None where it cannot run. `DynaExq off` is
    a fixed map, in the same bytes, of what DynaExq begins with."""
    found: dict[str, Plan | None] = {
        "dense, paged": _single(settings, memory, "dense"),
        "int8, static": _single(settings, memory, "int8"),
        "int4, static": _single(settings, memory, "int4"),
    }
    layers, experts, _ = settings.sizes
    layout = settings.config.slot_layout(2, MIX)
    slots = memory // layout.slot_bytes
    used, policy = slots * layout.slot_bytes, DynaExq(scores=scores, interval=settings.interval)

    def mixed(note: str, resident: bool, policies: tuple[Policy, ...], said: Any) -> Plan:
        spec = _spec(settings, slots) | {"resident" if resident else "paged": said}
        return Plan(note, used, MIX, resident, spec, None, policies)

    try:
        high, _ = capacity(layout, slots, layers * experts, settings.spares)
    except ValueError:
        found["DynaExq"] = None
    else:
        start, note = policy.start(layers, experts, high), f"{high / (layers * experts):.0%} high"
        on = resident_spec(layout, slots, start, spares=settings.spares, step_bytes=None)
        fixed = resident_spec(layout, slots, top_map(scores, high), spares=0)
        found["DynaExq"] = mixed(note, True, (policy,), on.said)
        found[OFF] = mixed(f"{note}, fixed", True, (), fixed.said)
    paged = dataclasses.replace(policy, paged=True)
    cells = version_cells(layout, slots, layers, experts)
    start = paged.start(layers, experts, int(cells[:, 0].sum())).astype(np.int8)
    note = f"{cells[:, 0].mean():.0f} + {cells[:, 1].mean():.0f} cells a layer"
    found["DynaExq, paged"] = mixed(note, False, (paged,), PagedSpec(cells, start).said)
    return found


def _single(settings: Settings, memory: int, version: str) -> Plan:
    """All experts in one version: resident, or paged where they do not fit."""
    layers, experts, _ = settings.sizes
    size = settings.config.slot_layout(2, (version,)).slot_bytes
    slots = min(memory // size, layers * experts)
    if slots == layers * experts:
        return Plan("all resident", slots * size, (version,), resident=True)
    cells = np.array(cells_per_layer(slots, layers, experts))
    note = f"{cells.mean():.0f} cells a layer"
    return Plan(note, int(cells.sum()) * size, (version,), resident=False, cells=cells)


def _spec(settings: Settings, slots: int) -> dict[str, Any]:
    """What a trace's header says of an arena of two versions."""
    layout = settings.config.slot_layout(2, MIX)
    return {
        "hidden": settings.config.hidden_size,
        "page_bytes": layout.page.nbytes,
        "page_tokens": layout.page.block_size,
        "slots": slots,
        "slot_bytes": layout.slot_bytes,
        "shapes": {"blocks": 1},
        "seed": 0,
        "driver": "device",
        "cells": [0] * settings.sizes[0],
        "version_bytes": {record.version: record.nbytes for record in layout.records},
    }


def foretold(trace: Trace, arm: Plan, costs: Mapping[str, CostModel], experts: int) -> Prediction:
    if len(arm.versions) == 1:
        cells = experts if arm.cells is None else arm.cells
        return predict(trace, costs[arm.versions[0]], cells=cells)
    header = dataclasses.replace(trace.header, spec={**trace.header.spec, **arm.spec})
    told = dataclasses.replace(trace, header=header)
    return predict(told, {name: costs[name] for name in arm.versions}, policies=arm.policies)


# ---- lines


def predicted(
    settings: Settings,
    batches: Sequence[int],
    prompts: Sequence[int],
    shares: Sequence[float],
) -> Iterator[dict[str, Any]]:
    """A line for each batch, prompt, memory and arm."""
    rows = max(*batches, WARM_SEQUENCES)
    costs = {v: stated_costs(settings.config, settings.machine, v, rows) for v in VERSIONS}
    routing = route(settings, max(batches), max(prompts) + settings.steps)
    for batch, prompt in itertools.product(batches, prompts):
        with tempfile.TemporaryDirectory() as directory:
            run = write_run(Path(directory) / "trace", settings, routing, batch, prompt)
            static: dict[str, dict[str, Any]] = {}
            for share in shares:
                memory = int(share * settings.dense_bytes)
                place = {"batch": batch, "prompt": prompt, "share": share, "memory": memory}
                for arm, made in plans(settings, memory, routing.scores).items():
                    line = {"what": "predicted", **place, "arm": arm}
                    if made is None:
                        yield {**line, "note": "does not fit", "ttft_s": None, "tpot_s": None}
                        continue
                    # A version that is all resident takes the same in any memory.
                    known = static if made.one_resident else {}
                    version = made.versions[0]
                    if version not in known:
                        known[version] = figures(settings, run, made, costs)
                    yield {**line, "note": made.note, "used": made.used, **known[version]}


def figures(
    settings: Settings, run: Run, made: Plan, costs: Mapping[str, CostModel]
) -> dict[str, Any]:
    """What the steps after the warm ones take. Nothing moves where one version is all resident,
    whatever the simulator, which begins empty, counts."""
    found = foretold(run.trace, made, costs, settings.config.num_experts)
    last = run.first + int(run.ends[-1]) + 1
    model, moved = costs[made.versions[0]], found.simulation
    seconds = found.compute_s if made.one_resident else found.seconds
    first_token, decode = np.cumsum(seconds[run.first : last])[run.ends], seconds[last:]
    crossing = moved.transfers * model.expert_bytes if moved.bytes is None else moved.bytes

    def per_step(count: np.ndarray) -> float:
        return 0.0 if made.one_resident else float(count[last:].sum(axis=1).mean())

    read = float(found.active_bytes[last:].mean() + other_bytes(settings.config))
    through = 0 if made.one_resident else int(moved.read_through[run.first : last].sum())
    return {
        "versions": list(made.versions),
        "resident": made.resident,
        "ttft_s": float(first_token.mean()),
        "ttft_last_s": float(first_token[-1]),
        "tpot_s": float(decode.mean()),
        "tpot_p99_s": float(np.percentile(decode, 99)),
        "compute_s": float(found.compute_s[last:].mean()),
        "read_floor_s": read * model.memory_per_byte,
        "link_floor_s": per_step(crossing) * found.link_per_byte,
        "misses": per_step(moved.misses),
        "staged": per_step(moved.staged),
        "prefill_read_through": through,
        "steps": len(decode),
    }
