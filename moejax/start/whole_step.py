"""Checks whole steps with kernels, and all checks that a start left for later."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import hashlib
import logging
import math
import threading
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from host_offload.memory.budget import Share
from moejax.cache import checked_folder, use_compilation_cache
from moejax.checkpoints.random_model import random_model
from moejax.engine.loop import Engine
from moejax.models.config import ModelConfig
from moejax.requests.sampling_params import SamplingParams
from moejax.start.build import start_engine
from moejax.start.kernels import (
    KernelChoice,
    choose_kernels,
    kernel_job,
    start_checks,
    step_key,
)
from moejax.start.options import Config
from pallas_kernels import Ops
from pallas_kernels.verification import (
    SHIPPED,
    Job,
    Outcome,
    current,
    load_table,
    run_checks,
    unverified,
)
from pallas_kernels.verification.table import file_name, left_over, write_table

log = logging.getLogger("moejax")

LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 512, "max_num_batched_tokens": 256}
STEPS = 8

PATIENCE = 1200.0
"""Seconds after which a whole step counts as hanging. It compiles all steps of an engine."""


@dataclasses.dataclass(frozen=True)
class StepCheck:
    """Runs the steps of a model of two MoE layers with random weights and a small arena, with and
    without missing experts: bits must be equal, and every expert must be where tables say."""

    key: str
    config: ModelConfig
    dtype: str
    ops: Ops
    tolerance: float = 0.0
    op: str = "step"

    def prepare(self, device: jax.Device) -> RunningStep:
        """Does nothing, since an engine compiles its steps itself."""
        return RunningStep(self, device)


@dataclasses.dataclass(frozen=True)
class RunningStep:
    """A StepCheck on a device."""

    check: StepCheck
    device: jax.Device

    def error(self) -> float:
        """Returns 0.0, or infinity if bits differ or a table is wrong."""
        config = self.check.config
        loaded = random_model(config, self.check.dtype, self.device)
        size = loaded.store.nbytes
        options = Config.of(
            "random",
            dtype=self.check.dtype,
            ops=self.check.ops.chosen(),
            memory=size + (256 << 20),
            expert_budget=Share(1.0),
            eviction="lru",
            **LIMITS,
        )
        engine, plan = start_engine(loaded, options, self.device, check=False)
        try:
            found = set()
            for cells in (config.num_experts, config.num_experts // 4):
                layers = sum(config.moe_layers)
                engine.set_budget([cells] * layers, plan.budget.kv_slots)
                found.add(digest_of_run(engine, STEPS))
                if engine.runner.faults():
                    return math.inf
            return 0.0 if len(found) == 1 else math.inf
        finally:
            engine.runner.delete()


def step_checks(config: ModelConfig, dtype: str, ops: Ops) -> list[StepCheck]:
    """Returns the check of a whole step with these kernels."""
    use_compilation_cache()
    return [StepCheck(step_key(config, dtype, ops), first_layers(config), dtype, ops)]


def first_layers(config: ModelConfig) -> ModelConfig:
    """Returns the config of a model's first layers, with dense experts: to its second MoE layer,
    and to the first layer of each kind."""
    moe = [layer for layer, is_moe in enumerate(config.moe_layers) if is_moe]
    kinds = config.layer_kinds or ()
    count = 1 + max([*moe[:2], *map(kinds.index, kinds)], default=0)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    cut = {
        name: value[:count]
        for name, value in fields.items()
        if isinstance(value, tuple) and (name.endswith("_layers") or name == "layer_kinds")
    }
    return dataclasses.replace(config, num_hidden_layers=count, quantization=None, **cut)


def check_behind(kernels: KernelChoice, device: jax.Device) -> threading.Thread | None:
    """Runs the checks that a start lacked, in processes beside this one, which end with it. They
    count from the next start. Returns the thread that waits for them; None: there are none. Models
    of one process share the thread of the first one."""
    global _running
    if not kernels.waiting:
        if left_over(device.device_kind, checked_folder()) != 0:
            # The next start need leave no memory for checks.
            path = checked_folder() / file_name(device.device_kind)
            with contextlib.suppress(OSError):
                write_table(path, device, load_table(path), 0)
        return None
    if _running is None or not _running.is_alive():
        # In this context, since a context variable says whether kernels are interpreted.
        run = contextvars.copy_context().run
        _running = threading.Thread(target=run, args=(_check, kernels, device), daemon=True)
        _running.start()
    return _running


_running: threading.Thread | None = None


def _check(kernels: KernelChoice, device: jax.Device) -> None:
    """Runs the checks of the kernels, then that of a whole step with those that are right."""
    folder = checked_folder()
    try:
        steps = kernels.specify({})
        wanted = start_checks(steps, kernels.arena_bytes)
        missing = unverified(wanted, current(device, SHIPPED, folder))
        job = Job(kernel_job, (steps, kernels.arena_bytes))
        # Until the whole step was checked, the next start leaves memory for checks too.
        left = _run(run_checks(job, missing, device, folder, later=1))
        known = current(device, SHIPPED, folder)
        steps = choose_kernels(kernels.specify, kernels.asked, known, kernels.arena_bytes).tried
        if steps.ops.has_kernels:
            job = Job(step_checks, (steps.config, steps.dtype, steps.ops))
            keys = [check.key for check in job.checks()]
            _run(run_checks(job, keys, device, folder, patience=PATIENCE, later=left))
    except (OSError, ValueError) as error:
        log.info("kernels were not checked: %s", error)


def _run(outcomes: Iterable[Outcome]) -> int:
    """Reports outcomes. Returns how many checks were left."""
    left = 0
    for outcome in outcomes:
        if outcome.failed:
            log.info("%s; its op runs in XLA", outcome.why)
        elif outcome.error is None:
            left += 1
            log.info("%s; it waits for another start", outcome.why)
    return left


def digest_of_run(engine: Engine, steps: int, company: int = 0) -> str:
    """Returns the sha256 over the logits of every sampled token of a fixed mix of requests.

    - `company`: other requests that run beside them and do not count.
    """
    totals: dict[int, Any] = {}

    def record(step) -> None:
        rows = np.asarray(step.output.logits)
        for row, request in step.sampled():
            if id(request) in totals and request.finish_reason is None:
                totals[id(request)].update(rows[row].tobytes())

    rng = np.random.default_rng(0)
    vocabulary = engine.runner.config.vocab_size
    engine.listener = record
    for length in (1, 17, 64, 65, 200, 300):
        prompt = rng.integers(0, vocabulary, length).tolist()
        params = SamplingParams(temperature=0.8, seed=length, max_tokens=steps, ignore_eos=True)
        totals[id(engine.add(prompt, params))] = hashlib.sha256()
    for _ in range(company):
        prompt = rng.integers(0, vocabulary, 20).tolist()
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True))
    while not engine.idle:
        engine.step()
    engine.listener = None
    return " ".join(total.hexdigest() for total in totals.values())
