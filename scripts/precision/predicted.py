"""Predictions for the command `speed`: routing, the arms' memory, times from stated costs."""

from __future__ import annotations

import dataclasses
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
from host_offload.policies.precision.maps import LO, top_map
from host_offload.simulate.prediction import Prediction, predict
from host_offload.sizing.cost_model import CostModel
from host_offload.traces.generators import routing_generator
from host_offload.traces.reader import Trace, read_trace
from host_offload.traces.writer import TraceWriter
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

ARMS = ("dense, paged", "int8, static", "int4, static", "DynaExq", "DynaExq, paged")
"""Arms at each memory. A static one that does not fit is paged, and its line says so."""


@dataclasses.dataclass(frozen=True)
class Settings:
    config: ModelConfig
    machine: Machine
    steps: int
    """Decode steps of each run."""
    interval: str
    step_bytes: int | None
    """Bytes of transitions in a step; None: as the stage list allows (8 experts)."""
    spares: int
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


def write_run(
    directory: Path, settings: Settings, routing: Routing, batch: int, prompt: int
) -> tuple[int, np.ndarray]:
    """Writes a trace: the warm sequences, then prefill steps over `batch` prompts in order, then
    decode steps of all. Returns (steps of the warm part, int[batch]: the prefill step, counted from
    there, that ends each prompt)."""
    layers, experts, k = settings.sizes
    present = ("request", "position", "phase", "kind", "rows", "waves", "ids")
    header = routing_header(layers, experts, k, present, {"generator": "qwen3-like"})
    number = 0

    def append(
        writer: TraceWriter,
        ids: np.ndarray,
        rows: np.ndarray,
        position: np.ndarray,
        kind: str,
        first: int = 0,
    ) -> None:
        nonlocal number
        prefill = kind == "prefill"
        writer.append(
            routed_step(
                number,
                ids[position, rows],
                request=first + rows,
                position=position,
                phase=np.full(len(rows), not prefill, np.uint8),
                kind=kind,
            )._replace(
                rows=PREFILL if prefill else len(rows),
                waves=np.full(layers, WAVES if prefill else 1, np.int16),
            )
        )
        number += 1

    with new_trace(directory, header) as writer:
        # The warm ones are requests of their own.
        every, others = np.arange(WARM_SEQUENCES), {"first": batch}
        rows = np.repeat(every, WARM_TOKENS)
        position = np.tile(np.arange(WARM_TOKENS), WARM_SEQUENCES)
        append(writer, routing.warm, rows, position, "prefill", **others)
        for step in range(WARM_STEPS):
            position = np.full(WARM_SEQUENCES, WARM_TOKENS + step)
            append(writer, routing.warm, every, position, "decode", **others)
        before = number
        tokens = np.arange(batch * prompt)
        for first in range(0, batch * prompt, PREFILL):
            some = tokens[first : first + PREFILL]
            append(writer, routing.ids, some // prompt, some % prompt, "prefill")
        for step in range(settings.steps):
            position = np.full(batch, prompt + step)
            append(writer, routing.ids, np.arange(batch), position, "decode")
    return before, ((np.arange(batch) + 1) * prompt - 1) // PREFILL


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


def plan(settings: Settings, arm: str, memory: int, scores: np.ndarray) -> Plan | None:
    """What an arm does with so many bytes for experts; None where it cannot run."""
    if arm.startswith("DynaExq"):
        return _mixed(settings, memory, scores, paged=arm.endswith("paged"))
    version = arm.split(",")[0]
    layers, experts, _ = settings.sizes
    size = settings.config.slot_layout(2, (version,)).slot_bytes
    slots = memory // size
    if slots >= layers * experts:
        used = layers * experts * size
        return Plan("all resident", used, (version,), resident=True)
    cells = np.array(cells_per_layer(slots, layers, experts))
    note = f"{cells.mean():.0f} cells a layer"
    return Plan(note, int(cells.sum()) * size, (version,), resident=False, cells=cells)


def _mixed(settings: Settings, memory: int, scores: np.ndarray, *, paged: bool) -> Plan | None:
    layers, experts, _ = settings.sizes
    layout = settings.config.slot_layout(2, MIX)
    slots = memory // layout.slot_bytes
    policy = DynaExq(scores=scores, interval=settings.interval, paged=paged)
    spec: dict[str, Any] = {
        "hidden": settings.config.hidden_size,
        "page_bytes": layout.page.nbytes,
        "page_tokens": layout.page.block_size,
        "slots": slots,
        "slot_bytes": layout.slot_bytes,
        "shapes": {"blocks": 1},
        "seed": 0,
        "driver": "device",
        "cells": [0] * layers,
        "version_bytes": {record.version: record.nbytes for record in layout.records},
    }
    if paged:
        cells = version_cells(layout, slots, layers, experts)
        high = int(cells[:, 0].sum())
        start = policy.start(layers, experts, high).astype(np.int8)
        said = PagedSpec(cells, start)
        note = f"{cells[:, 0].mean():.0f} + {cells[:, 1].mean():.0f} cells a layer"
        spec |= {"paged": said.said}
        return Plan(note, slots * layout.slot_bytes, MIX, False, spec, None, (policy,))
    try:
        high, _ = capacity(layout, slots, layers * experts, settings.spares)
    except ValueError:
        return None
    start = policy.start(layers, experts, high)
    resident = resident_spec(
        layout, slots, start, spares=settings.spares, step_bytes=settings.step_bytes
    )
    spec |= {"resident": resident.said}
    note = f"{high / (layers * experts):.0%} high"
    return Plan(note, slots * layout.slot_bytes, MIX, True, spec, None, (policy,))


def off(settings: Settings, arm: Plan, scores: np.ndarray) -> Plan:
    """The same bytes as a fixed map, which has what DynaExq begins with."""
    layers, experts, _ = settings.sizes
    layout = settings.config.slot_layout(2, MIX)
    slots = arm.used // layout.slot_bytes
    high, _ = capacity(layout, slots, layers * experts, settings.spares)
    fixed = resident_spec(layout, slots, top_map(scores, high), spares=0)
    assert int(np.sum(fixed.start != LO)) == high
    return dataclasses.replace(
        arm, spec={**arm.spec, "resident": fixed.said}, policies=(), note=f"{arm.note}, fixed"
    )


def run(
    trace: Trace, arm: Plan, costs: Mapping[str, CostModel], experts: int
) -> tuple[np.ndarray, Prediction]:
    """(float64[T]: seconds of each step, what was predicted)."""
    if len(arm.versions) == 1:
        model = costs[arm.versions[0]]
        cells = experts if arm.cells is None else arm.cells
        found = predict(trace, model, cells=cells)
        return (found.compute_s if arm.resident else found.seconds), found
    header = dataclasses.replace(trace.header, spec={**trace.header.spec, **arm.spec})
    told = dataclasses.replace(trace, header=header)
    found = predict(told, {name: costs[name] for name in arm.versions}, policies=arm.policies)
    return found.seconds, found


# ---- lines


def predicted(
    settings: Settings,
    batches: Sequence[int],
    prompts: Sequence[int],
    shares: Sequence[float],
) -> Iterator[dict[str, Any]]:
    """A line for each batch, prompt, memory and arm, all `predicted`; with DynaExq one more, of the
    fixed map that it is compared with."""
    rows = max(*batches, WARM_SEQUENCES)
    costs = {v: stated_costs(settings.config, settings.machine, v, rows) for v in VERSIONS}
    routing = route(settings, max(batches), max(prompts) + settings.steps)
    experts, others = settings.config.num_experts, other_bytes(settings.config)
    for batch in batches:
        for prompt in prompts:
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "trace"
                before, ends = write_run(path, settings, routing, batch, prompt)
                trace = read_trace(path)
                static: dict[str, dict[str, Any]] = {}
                for share in shares:
                    memory = int(share * settings.dense_bytes)
                    place = {"batch": batch, "prompt": prompt, "share": share, "memory": memory}
                    for arm in ARMS:
                        made = plan(settings, arm, memory, routing.scores)
                        if made is None:
                            none = {"note": "does not fit", "ttft_s": None, "tpot_s": None}
                            yield {"what": "predicted", **place, "arm": arm, **none}
                            continue
                        single = len(made.versions) == 1
                        # Everything resident takes the same in any memory.
                        if single and made.resident and made.versions[0] in static:
                            figures = static[made.versions[0]]
                        else:
                            took, found = run(trace, made, costs, experts)
                            figures = _figures(took, found, before, ends, costs, made, others)
                        if single and made.resident:
                            static[made.versions[0]] = figures
                        line = {**place, "arm": arm, "note": made.note, "used": made.used}
                        yield {**line, **figures}
                        if arm == "DynaExq":
                            fixed = off(settings, made, routing.scores)
                            took, found = run(trace, fixed, costs, experts)
                            figures = _figures(took, found, before, ends, costs, fixed, others)
                            name = {"arm": "DynaExq off", "note": fixed.note, "used": fixed.used}
                            yield {**place, **name, **figures}


def _figures(
    seconds: np.ndarray,
    found: Prediction,
    before: int,
    ends: np.ndarray,
    costs: Mapping[str, CostModel],
    made: Plan,
    others: int,
) -> dict[str, Any]:
    """Figures of the steps after the warm ones. others: bytes of weights that are no expert's."""
    last = before + int(ends[-1]) + 1
    prefill_steps, decode = seconds[before:last], seconds[last:]
    first_token = np.cumsum(prefill_steps)[ends]
    moved = found.simulation
    single = len(made.versions) == 1
    resident = single and made.resident
    none = np.zeros(len(decode))
    if single:
        size = costs[made.versions[0]].expert_bytes
        crossing = moved.transfers[last:].sum(axis=1) * float(size)
    else:
        assert moved.bytes is not None
        crossing = moved.bytes[last:].sum(axis=1).astype(float)
    crossing = none if resident else crossing
    misses = none if resident else moved.misses[last:].sum(axis=1)
    return {
        "what": "predicted",
        "versions": list(made.versions),
        "resident": made.resident,
        "ttft_s": float(first_token.mean()),
        "ttft_last_s": float(first_token[-1]),
        "tpot_s": float(decode.mean()),
        "tpot_p99_s": float(np.percentile(decode, 99)),
        "compute_s": float(found.compute_s[last:].mean()),
        "read_floor_s": float(found.active_bytes[last:].mean() + others)
        * costs[made.versions[0]].memory_per_byte,
        "misses": float(misses.mean()),
        "staged": float(0.0 if resident else moved.staged[last:].sum(axis=1).mean()),
        "link_floor_s": float(crossing.mean()) * found.link_per_byte,
        "prefill_read_through": 0 if resident else int(moved.read_through[before:last].sum()),
        "steps": len(decode),
    }
