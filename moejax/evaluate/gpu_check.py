"""Checks everything that only a real GPU can show about correctness (`moejax check-gpu`)."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from host_offload.memory.budget import Share
from moejax.cache import use_compilation_cache
from moejax.checkpoints.random_model import random_model, shape
from moejax.device import select_device
from moejax.engine.loop import Engine
from moejax.errors import UserError
from moejax.requests.sampling_params import SamplingParams
from moejax.start.build import start_engine
from moejax.start.kernels import kernel_shape
from moejax.start.options import Config
from pallas_kernels import resolve_ops
from pallas_kernels.cards import CLASSES, shared_class
from pallas_kernels.triton import is_interpreted
from pallas_kernels.verification import (
    Check,
    Unverified,
    checks,
    load_table,
    outcomes,
    write_table,
)
from pallas_kernels.verification.table import entry, file_name, unknown


def check_device(
    parts: Sequence[str],
    *,
    shapes: list[str],
    dtypes: list[str],
    tables: Path,
    minutes: float | None,
    engine_shape: str,
    layers: int | None,
    steps: int,
) -> int:
    """Runs these parts on jax's first device and prints the results. Returns how many checks
    failed.

    - `parts`: `kernels`, with shapes and dtypes as in shape_checks, tables and minutes as in
      check_kernels; `engine`, with engine_shape, layers and steps as in check_engine.

    Raises UserError without a GPU.
    """
    use_compilation_cache()
    device = select_device()
    if device.platform != "gpu" and not is_interpreted():
        raise UserError("there is no GPU here; nothing was checked")
    print(f"{device.device_kind}, jax {jax.__version__}, {device.client.platform_version}")
    failures = 0
    if "kernels" in parts:
        wanted = shape_checks(shapes, dtypes, shared_class(device))
        failures += check_kernels(device, wanted, tables, minutes=minutes)
    if "engine" in parts:
        failures += check_engine(device, engine_shape, layers, steps)
    print("all checks passed" if not failures else f"{failures} checks FAILED")
    return failures


DENSE, INT8, INT4, INT2, LOSSLESS = (
    (name, name) for name in ("dense", "int8", "int4", "int2", "lossless12")
)
IN_TRANSIT = ("dense", "lossless12")
VERSIONS = (
    *((version,) for version in (DENSE, INT8, INT4, INT2, LOSSLESS)),
    *((DENSE, lo) for lo in (INT8, INT4, INT2)),
    *((INT8, INT4), (INT4, INT2), (LOSSLESS, INT4)),
    *((IN_TRANSIT,), (IN_TRANSIT, DENSE), (IN_TRANSIT, INT4)),
)
"""Values of ModelShape.versions in runs: one version, pairs of tiers, lossless12 in transit (with
layers that it cannot hold)."""


def shape_checks(
    shapes: Sequence[str], dtypes: Sequence[str], shared_kib: int = CLASSES[-1]
) -> list[Check]:
    """Returns the checks of every kernel for these shapes on a class of devices
    (cards.shared_class), the likeliest to be used first: by dtype, then by versions, then by shape.
    """
    found: dict[str, Check] = {}
    for dtype, versions, name in itertools.product(dtypes, VERSIONS, shapes):
        if dtype != "bfloat16" and "lossless12" in str(versions):
            continue
        config = shape(name)
        ops = resolve_ops("auto", platform="gpu", dtype=dtype, shared_kib=shared_kib)
        kernels = kernel_shape(config, dtype, config.slot_layout(itemsize=2))
        for check in checks(dataclasses.replace(kernels, versions=versions), ops):
            found.setdefault(check.key, check)
    return list(found.values())


def check_kernels(
    device: jax.Device,
    wanted: Sequence[Check],
    tables: Path,
    *,
    minutes: float | None = None,
    threads: int | None = None,
) -> int:
    """Runs the checks that the device's table in the folder `tables` does not have yet, and writes
    each passed one to the table. Returns how many failed.

    - `minutes`: no check begins later.
    - `threads`: threads that compile at once, as in pallas_kernels.verification.outcomes.

    Raises UserError if the table cannot be written.
    """
    path = tables / file_name(device)
    # Entries of other shapes stay; entries of another source or driver do not count.
    entries = load_table(path)
    missing = unknown(wanted, device, entries)
    print(f"{len(wanted)} checks, {len(wanted) - len(missing)} of them in {path}", flush=True)
    began = time.perf_counter()
    failed = done = 0
    with contextlib.closing(outcomes(missing, device, threads)) as found:
        while minutes is None or time.perf_counter() - began < 60 * minutes:
            last = time.perf_counter()
            if (one := next(found, None)) is None:
                break
            check, result = one
            done += 1
            if isinstance(result, Unverified):
                failed += 1
                entries.pop(check.key, None)
                print(f"WRONG {check.key}: {result}", flush=True)
            else:
                entries[check.key] = entry(check, result, device)
                seconds = time.perf_counter() - last
                print(f"ok    {check.key}: {result:.1e}, {seconds:.1f} s", flush=True)
            try:
                write_table(path, device, entries)
            except OSError as error:
                raise UserError(
                    f"{path} cannot be written ({error.strerror}); --tables names another folder"
                ) from error
    left = len(missing) - done
    took = time.perf_counter() - began
    print(f"{done} checked in {took:.0f} s, {len(entries)} configurations in {path}")
    if left:
        print(f"{left} are left: run it again")
    return failed


def check_engine(device: jax.Device, name: str, layers: int | None, steps: int) -> int:
    """Decodes at four budgets. Returns how many differ from full residency."""
    config = shape(name, layers)
    began = time.perf_counter()
    loaded = random_model(config, device=device)
    # Named, so that experts have cells, whose number changes, on a CPU too.
    options = Config.of(
        name, max_model_len=1024, max_num_seqs=64, expert_budget=Share(1.0), eviction="lru"
    )
    try:
        engine, plan = start_engine(loaded, options, device)
    except UserError as error:
        print(f"the engine does not start: {error}")
        loaded.store.delete()
        return 1
    took = time.perf_counter() - began
    print(f"{name}, {config.num_hidden_layers} layers: {took:.0f} s to start")
    budget = plan.budget
    print("; ".join(budget.notes), engine.runner.ops)
    experts = config.num_experts
    wanted, failed = None, 0
    for cells in (experts, experts // 2, experts // 8, 0):
        began = time.perf_counter()
        engine.set_budget([cells] * config.num_hidden_layers, budget.kv_slots)
        found = _digest(engine, steps)
        wanted = wanted or found
        same, faults = found == wanted, engine.runner.faults()
        failed += not same
        failed += bool(faults)
        print(
            f"{cells} cells a layer: {steps} steps in {time.perf_counter() - began:.1f} s, "
            f"bits {'equal' if same else 'DIFFERENT'}, integrity {faults or 'ok'}",
            flush=True,
        )
    # The same requests among 50 others: decode runs in its larger buckets of rows.
    engine.set_budget([experts] * config.num_hidden_layers, budget.kv_slots)
    same = _digest(engine, steps, company=50) == wanted
    print(f"among 50 other requests: bits {'equal' if same else 'DIFFERENT'}")
    failed += not same
    engine.runner.delete()
    return failed


def _digest(engine: Engine, steps: int, company: int = 0) -> str:
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
