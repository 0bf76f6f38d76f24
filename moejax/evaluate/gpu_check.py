"""Checks everything that only a real GPU can show about correctness (`moejax check-gpu`)."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from host_offload.memory.budget import Share
from moejax.cache import use_compilation_cache
from moejax.checkpoints.random_model import random_model, shape
from moejax.device import select_device
from moejax.errors import UserError, user_errors
from moejax.start.build import start_engine
from moejax.start.kernels import kernel_shape
from moejax.start.options import Config
from moejax.start.whole_step import PATIENCE as STEP_PATIENCE
from moejax.start.whole_step import digest_of_run, step_checks
from pallas_kernels import Ops, resolve_ops
from pallas_kernels.cards import CLASSES, shared_class
from pallas_kernels.triton import is_interpreted
from pallas_kernels.verification import (
    Check,
    Job,
    checks,
    current,
    load_table,
    run_checks,
    unverified,
    why_no_kernels,
)
from pallas_kernels.verification.apart import PATIENCE
from pallas_kernels.verification.table import file_name, write_table


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
    if "kernels" in parts:  # the checks' processes need the memory
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    device = select_device()
    if device.platform != "gpu" and not is_interpreted():
        raise UserError("there is no GPU here; nothing was checked")
    print(f"{device.device_kind}, jax {jax.__version__}, {device.client.platform_version}")
    failures = 0
    if "kernels" in parts:
        job = Job(_cached_checks, (shapes, dtypes, shared_class(device)))
        until = None if minutes is None else time.perf_counter() + 60 * minutes
        failures += check_kernels(device, job, tables, until)
        for dtype, name in itertools.product(dtypes, shapes):
            job = Job(step_checks, (shape(name), dtype, right_ops(device, name, dtype, tables)))
            failures += check_kernels(device, job, tables, until, patience=STEP_PATIENCE)
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
    shapes: Sequence[str],
    dtypes: Sequence[str],
    shared_kib: int = CLASSES[-1],
    versions: Sequence[tuple[tuple[str, str], ...]] = VERSIONS,
) -> list[Check]:
    """Returns the checks of every kernel for these shapes on a class of devices
    (cards.shared_class), the likeliest to be used first: by dtype, then by versions, then by shape.
    """
    found: dict[str, Check] = {}
    for dtype, each, name in itertools.product(dtypes, versions, shapes):
        if dtype != "bfloat16" and "lossless12" in str(each):
            continue
        config = shape(name)
        ops = _ops(dtype, shared_kib)
        kernels = kernel_shape(config, dtype, config.slot_layout(itemsize=2))
        for check in checks(dataclasses.replace(kernels, versions=each), ops):
            found.setdefault(check.key, check)
    return list(found.values())


def right_ops(device: jax.Device, name: str, dtype: str, tables: Path) -> Ops:
    """Returns the ops of a start with a model of this shape, by what the table has."""
    kernels = shape_checks([name], [dtype], shared_class(device), VERSIONS[:1])
    declined = why_no_kernels(kernels, current(device, tables))
    return _ops(dtype, shared_class(device), declined)


def _ops(dtype: str, shared_kib: int, declined: Mapping[str, str] | None = None) -> Ops:
    return resolve_ops(
        "auto", platform="gpu", dtype=dtype, shared_kib=shared_kib, no_kernel=declined
    )


def _cached_checks(*arguments: Any) -> list[Check]:
    """Returns shape_checks in the process that runs them."""
    use_compilation_cache()
    return shape_checks(*arguments)


def check_kernels(
    device: jax.Device,
    job: Job,
    tables: Path,
    until: float | None = None,
    *,
    threads: int | None = None,
    patience: float = PATIENCE,
) -> int:
    """Runs the checks of the job that the device's table in the folder `tables` does not have yet,
    in processes of their own, and writes each outcome to the table. Returns how many failed.

    - `until`: time.perf_counter() after which no check begins.
    - `threads`, `patience`: as in pallas_kernels.verification.run_checks.

    Raises UserError if the table cannot be written, or no process starts.
    """
    path = tables / file_name(device.device_kind)
    wanted = job.checks()
    missing = unverified(wanted, current(device, tables))
    print(f"{len(wanted)} checks, {len(wanted) - len(missing)} of them in {path}", flush=True)
    try:  # entries of other shapes stay; entries of another source or driver do not count
        write_table(path, device, load_table(path), len(missing))
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); --tables names another folder"
        ) from error
    began = last = time.perf_counter()
    failed = done = 0
    with (
        user_errors(),
        contextlib.closing(run_checks(job, missing, device, tables, threads, patience)) as found,
    ):
        while until is None or time.perf_counter() < until:
            if (outcome := next(found, None)) is None:
                break
            seconds, last = time.perf_counter() - last, time.perf_counter()
            if outcome.error is not None:
                print(f"ok    {outcome.key}: {outcome.error:.1e}, {seconds:.1f} s", flush=True)
            else:
                word = "WRONG" if outcome.failed else "LEFT "
                print(f"{word} {outcome.key}: {outcome.why}", flush=True)
            done += outcome.failed or outcome.error is not None
            failed += outcome.failed
    left = len(missing) - done
    took = time.perf_counter() - began
    print(f"{done} checked in {took:.0f} s, {len(load_table(path))} configurations in {path}")
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
        found = digest_of_run(engine, steps)
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
    same = digest_of_run(engine, steps, company=50) == wanted
    print(f"among 50 other requests: bits {'equal' if same else 'DIFFERENT'}")
    failed += not same
    engine.runner.delete()
    return failed
