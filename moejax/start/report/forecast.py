"""Predicts the speed of a model on a machine that is not at hand, from published figures.

A decode step reads the dense part, the experts that its tokens chose and their KV once, and pays
for launches. Experts that are not resident cross the link, and beyond host memory they come from
disk. The simulator says how many, over a recorded trace or over routing that is generated with the
statistics of Qwen3-30B-A3B. Runs reach unequal parts of stated rates, so each time is a range.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from host_offload.memory.budget import Share, cells_per_layer
from host_offload.simulate.bounds import min_transfers, read_references
from host_offload.simulate.simulator import simulate
from host_offload.traces.generators import routing_generator
from host_offload.traces.reader import Trace, TraceError, read_trace
from host_offload.traces.step_sets import step_counts
from moejax.costs.hardware import DISK, HIGH, LIKELY, LOW, Hardware
from moejax.errors import UserError, user_errors
from moejax.models.config import ModelConfig
from moejax.start.report.model_info import ModelInfo, fit, model_info
from moejax.traces.generated_traces import write_generated_trace

STEPS, COLD, PROMPTS = 96, 16, 512
"""Of generated routing: decode steps, how many of them do not count, and tokens of all prompts,
which fill the cache."""

CONTEXT, PROMPT = 4096, 512
"""Tokens of a sequence and of its prompt, unless they are given."""

SAMPLED = 2048
"""Tokens of a prompt from which the experts that it uses are counted."""

HOST_SHARE = 0.85
"""Part of host memory that experts may take."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """A device, its host and what is asked of them."""

    hardware: Hardware
    memory: int
    """Bytes of the device for the model."""
    host_memory: int | None = None
    """Bytes; None: all experts fit. A CPU has `memory` alone."""
    disk: float = DISK
    """Bytes a second."""


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The predicted speed of `batch` sequences at once. Triples are low, likely and high times."""

    batch: int
    driver: str
    """With another eviction than LRU: `device, NAME`."""
    resident: float
    """Part of the experts in device memory."""
    moved: float
    """Experts that a decode step brings."""
    step_s: tuple[float, float, float]
    first_token_s: tuple[float, float, float]
    """Seconds until all prompts have their first token, with a warm cache."""

    @property
    def tokens_per_s(self) -> tuple[float, float, float]:
        """Low, likely and high rates of generated tokens."""
        high, likely, low = (self.batch / seconds for seconds in self.step_s)
        return low, likely, high


class _Load(NamedTuple):
    """What a step does. Bytes, and operations of matrix products."""

    layers: int
    read: float
    operations: float
    moved: float
    from_disk: float
    overlap: bool = False
    """Whether experts come beside computing."""

    def seconds(self, machine: Machine) -> tuple[float, float, float]:
        rates = machine.hardware
        found = []
        for reached in (HIGH, LIKELY, LOW):
            compute = self.layers * reached.layer_s + max(
                self.read / (rates.memory_rate * reached.memory),
                self.operations / (rates.matrix_rate * reached.matrix),
            )
            moved = self.from_disk / machine.disk
            moved += self.moved / (rates.link * reached.link) if rates.link else 0.0
            found.append(max(compute, moved) if self.overlap else compute + moved)
        best, likely, worst = found
        return best, likely, worst


@user_errors(TraceError)
def forecast(
    config: ModelConfig,
    machine: Machine,
    *,
    batches: Sequence[int] = (1, 8, 32),
    context: int | None = None,
    prompt: int | None = None,
    dtype: str = "auto",
    version: str | None = None,
    expert_budgets: Sequence[int | Share | None] = (None,),
    evictions: Sequence[str] = ("lru",),
    trace: Trace | None = None,
    coded: Mapping[str, dict[str, int]] | None = None,
) -> list[Forecast]:
    """Returns forecasts for each batch and budget: of the driver `device` with each eviction, of
    the same with the least misses that any eviction could have (`least`, Belady's MIN, where layers
    hold the experts of their largest step), and of `stream`, where its window fits.

    - `context`, `prompt`: tokens of a sequence in all and of its prompt; None: CONTEXT and PROMPT,
      as far as the model goes.
    - `version`: of the experts; None: the checkpoint's own.
    - `expert_budgets`: bytes or shares for experts; None: what KV leaves.
    - `evictions`: names of EVICTION.
    - `trace`: recorded routing, whose batch it is then; None: generated.
    - `coded`: as in model_info; only CPUs compute from codes.

    Raises UserError for a memory that is too small, a version that the model cannot have, and a
    trace of another shape or without decode steps.
    """
    coded = None if machine.hardware.link else coded
    info = model_info(config, dtype, coded)
    context = min(CONTEXT, info.max_model_len) if context is None else context
    prompt = min(PROMPT, context) if prompt is None else prompt
    for name, tokens in (("context", context), ("prompt", prompt)):
        if tokens < 1:
            raise UserError(f"{name} must be at least 1 token, got {tokens}")
    if prompt > context:
        raise UserError(f"a prompt of {prompt} tokens is longer than the context, {context}")
    version = version or next(iter(info.own_versions))
    if version not in info.versions:
        raise UserError(f"experts cannot be {version!r} here; choose {', '.join(info.versions)}")
    record = info.versions[version]["record_bytes"]
    if trace is not None:
        batches = (_batch_of(trace, info),)
    found: list[Forecast] = []
    for batch in batches:
        resident = []
        for budget in expert_budgets:
            held = fit(
                config,
                machine.memory,
                dtype=dtype,
                batch=batch,
                context=context,
                version=version,
                expert_budget=budget,
                coded=coded,
            )
            if held.problem is not None:
                raise UserError(f"with {batch} sequences the memory is {held.problem}")
            resident.append(held.resident_experts)
        with tempfile.TemporaryDirectory(prefix="moejax-plan-") as directory:
            routing = trace or _generated(Path(directory) / "routing", info, batch)
            for experts in resident:
                asked = _Asked(batch, context, prompt, record, experts, evictions)
                found += _forecasts(info, machine, asked, routing)
    return found


class _Asked(NamedTuple):
    """A batch of sequences, bytes of an expert, how many experts are resident, and evictions."""

    batch: int
    context: int
    prompt: int
    record: int
    resident: int
    evictions: Sequence[str]


def _forecasts(info: ModelInfo, machine: Machine, asked: _Asked, trace: Trace) -> list[Forecast]:
    batch, context, prompt, record, resident, evictions = asked
    shape = info.moe_layers, info.experts
    every = info.moe_layers * info.experts
    cells = np.array(cells_per_layer(resident, *shape))
    below = _below(machine, record, every, resident)
    held = min(resident + below, every)
    from_disk = 0.0
    if held < every:
        from_disk = _warm_misses(trace, np.array(cells_per_layer(held, *shape)), "lru")
    steps = [step for step in trace.step_traces() if step.kind != "prefill"]
    used_by = [np.count_nonzero(step_counts(step, shape[1])) for step in steps]
    active = float(np.mean(used_by))
    references = read_references(trace, "decode")
    used = info.moe_layers * _used_by_prompt(info, batch * prompt)
    absent = max(used - resident, 0.0)
    beyond = 1 - held / every

    dense, kv = _dense_bytes(info), batch * context * info.kv_token_bytes
    token = 2.0 * info.active_parameters
    decode = _Load(info.layers, dense + active * record + kv, batch * token, 0.0, 0.0)
    prefill = _Load(info.layers, dense + used * record, batch * prompt * token, 0.0, 0.0)

    def bring(load: _Load, experts: float, of_disk: float, overlap: bool = False) -> _Load:
        moved, slow = experts * record, of_disk * record
        return load._replace(moved=moved, from_disk=slow, overlap=overlap)

    def of(driver: str, share: float, moved: float, step: _Load, first: _Load) -> Forecast:
        times = step.seconds(machine), first.seconds(machine)
        return Forecast(batch, driver, share, moved, *times)

    first = bring(prefill, absent, min(absent, beyond * used))
    if resident >= every:
        return [of("device", 1.0, 0.0, decode, prefill)]
    found, missed = [], float(every)
    for eviction in evictions:
        driver = "device" if eviction == "lru" else f"device, {eviction}"
        moved = _warm_misses(trace, cells, eviction)
        missed = min(missed, moved)
        step = bring(decode, moved, min(moved, from_disk))
        found.append(of(driver, resident / every, moved, step, first))
    if (references.largest <= cells).all():  # no bound is claimed below
        least = min(missed, min_transfers(references, cells).sum() / len(steps))
        step = bring(decode, least, min(least, from_disk))
        found.append(of("least", resident / every, least, step, first))
    ring = 2 * info.experts
    if resident >= ring:
        kept = (resident - ring) * info.moe_layers // max(info.moe_layers - 2, 1)
        moved = every - min(kept, every)
        loads = (bring(load, moved, beyond * every, True) for load in (decode, prefill))
        found.append(of("stream", kept / every, moved, *loads))
    return found


def _generated(path: Path, info: ModelInfo, batch: int) -> Trace:
    prompt = -(-PROMPTS // batch)
    write_generated_trace(
        path,
        "qwen3-like",
        layers=info.moe_layers,
        experts=info.experts,
        top_k=info.experts_per_token,
        sequences=batch,
        tokens=prompt + STEPS,
        prompt_tokens=prompt,
    )
    return read_trace(path)


def _batch_of(trace: Trace, info: ModelInfo) -> int:
    """Returns the sequences of a trace's mean decode step."""
    header = trace.header
    of_trace = header.layers, header.experts, header.top_k
    of_model = info.moe_layers, info.experts, info.experts_per_token
    if of_trace != of_model:
        raise UserError(
            "the trace is of {} MoE layers, {} experts and top-{}, ".format(*of_trace)
            + "the model has {}, {} and top-{}".format(*of_model)
        )
    rows = [len(step.ids) for step in trace.step_traces() if step.kind != "prefill"]
    if not rows:
        raise UserError(f"the trace {trace.directory} has no decode steps")
    return max(1, round(float(np.mean(rows))))


def _warm_misses(trace: Trace, cells: np.ndarray, eviction: str) -> float:
    """Returns the experts that a decode step brings once the cache is full."""
    run = simulate(trace, cells=cells.tolist(), eviction=eviction)
    decode = np.flatnonzero(run.kind != 0)
    warm = decode[min(COLD, len(decode) // 3) :]
    return float(run.transfers[warm].sum(axis=1).mean())


def _below(machine: Machine, record: int, every: int, resident: int) -> int:
    """Returns the experts that host memory holds beside those of the device."""
    if not machine.hardware.link:
        return 0
    if machine.host_memory is None:
        return every - resident
    return int(machine.host_memory * HOST_SHARE // record)


def _used_by_prompt(info: ModelInfo, tokens: int) -> float:
    """Returns the experts of a layer that so many tokens of prompts use."""
    generator = routing_generator("qwen3-like", 1, info.experts, info.experts_per_token)
    steps = generator.steps(1, min(tokens, SAMPLED))
    return float(len(np.unique(np.concatenate([step.ids.ravel() for step in steps]))))


def _dense_bytes(info: ModelInfo) -> int:
    """Returns the bytes of the dense part that a step reads: of the embedding table, the rows of
    its tokens, unless it is the output head too."""
    embedding = info.bytes["embedding"] if "output head" in info.bytes else 0
    return info.device_bytes - embedding
