"""Where weights and arena lie on a CPU: whether experts that are all resident need cells, as it can
read them where they lie in the store, and whose memory the arena is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from host_offload.memory.store import StoreBuilder
from moejax.errors import UserError
from moejax.start.decide.transfers import cache_of, jax_copies, new_builder
from moejax.start.options import Config
from moejax.start.settings import Settings
from moejax.step.step_parts import StepSpec, arena_ops
from pallas_kernels.cpu.library import why_not_cpu


def about_cells(options: Config) -> dict[str, bool]:
    """Option → whether it was asked for, of those that say which experts have cells or how many."""
    return {
        "eviction": options.policy.eviction is not None,
        "prefetch": options.policy.prefetch is not None,
        "placement": options.policy.placement is not None,
        "policies": len(options.policy.policies) > 0,
        "resize": options.policy.resize != "none",
        "cells": options.policy.cells != "uniform",
    }


def why_cells(settings: Settings, steps: StepSpec, platform: str) -> str | None:
    """Why experts that are all resident have cells beside the store, for people; None: they need
    none, as the device reads the store like its own memory and nothing that was asked for moves or
    watches cells."""
    if platform != "cpu":
        return "the store is not in the device's memory"
    if steps.ops.expert_ffn != "cpu":
        return f"op expert_ffn {steps.ops.expert_ffn} does not compute on the store"
    options, precision = settings.options, settings.precision
    if options.memory.store.name == "file":
        return "experts in files are computed in cells, or read through"
    if precision.in_transit:
        return f"precision {precision.name} decodes experts into cells"
    if precision.policy is not None or precision.paged:
        return f"precision {precision.name} moves experts between cells"
    if steps.window:
        return "driver stream computes experts in a window of two layers"
    asked = {
        **about_cells(options),
        "hooks": options.runtime.hooks is not None,
        "trace": options.runtime.trace is not None,
        "transfers": options.transfer.transfers.name == "queue",
    }
    for name, wanted in asked.items():
        if wanted:
            return f"{name} is about cells, and was asked for"
    return None


def why_donated(steps: StepSpec) -> str | None:
    """Why the arena is an array, donated from step to step, although native ops touch it, for
    people; None: the native library owns it (StepSpec.owned), or none of its ops touches it."""
    others = [f"{op} {name}" for op, name in steps.foreign_ops.items()]
    every = arena_ops(steps.layout.page.latent > 0)
    return ", ".join(others) if 0 < len(others) < len(every) else None


def store_builder(settings: Settings, platform: str) -> Callable[..., StoreBuilder]:
    """What makes the store of these settings. Raises UserError for a store, or transfers out of it,
    that this platform, these ops or what else was asked for cannot have, whatever the model is."""
    _check_store(settings, platform)
    return new_builder(settings, platform)


def _check_store(settings: Settings, platform: str) -> None:
    options, precision = settings.options, settings.precision
    if options.memory.store.name == "shared":
        if platform != "cpu":
            raise UserError(
                "store='shared' is for CPUs: on a GPU experts lie in pinned memory, which is one "
                "process's; use store='memory'"
            )
        if precision.mixed or tuple(precision.versions) != ("dense",):
            raise UserError(
                "store='shared' has the experts as the checkpoint does, dense, not precision "
                f"{precision.name}; leave that out, or use store='memory'"
            )
    if options.memory.store.name != "file":
        return
    if cache_of(settings, platform) is not None:
        if options.transfer.driver.name not in ("host", "stream"):
            raise UserError(
                f"store='file' with {_CACHED} is for driver='host' and driver='stream', not "
                "'device', which cannot wait for a file within a step; use one of those, or "
                "store='memory'"
            )
    elif platform != "cpu":
        raise UserError(
            "store='file' is for a CPU with native ops; on a GPU use store='memory', whose experts "
            f"lie in pinned host memory, or driver='host' and transfers='queue' for {_CACHED}"
        )
    elif reason := why_not_cpu():
        raise UserError(
            f"store='file' needs the native CPU ops: {reason}; without them use driver='host' and "
            f"transfers='queue' for {_CACHED}"
        )
    else:
        every = set(arena_ops(False)) & set(arena_ops(True))
        asked = {op: settings.ops[op] for op in sorted(every)}
        _refuse_others({op: name for op, name in asked.items() if name not in ("cpu", "auto")})
    if precision.in_transit or precision.mixed:
        raise UserError(
            f"store='file' has experts of one version, computed as they lie in the files, not "
            f"precision {precision.name}; use dense, or one of int8, int4, int2 that `moejax "
            "quantize` wrote, or store='memory'"
        )
    if settings.needs_costs:
        raise UserError(
            "store='file': what steps cost there is not measured, and these policies or budgets "
            "need it; leave them out, or use store='memory'"
        )


_CACHED = "a cache of the files in pinned host memory, of host_memory"
"""For people."""


def check_file_steps(settings: Settings, steps: StepSpec, platform: str) -> None:
    """Raises UserError where these steps cannot read the experts of store='file'."""
    if settings.options.memory.store.name == "file" and not jax_copies(settings, platform):
        _refuse_others(steps.foreign_ops)


def _refuse_others(foreign: Mapping[str, str]) -> None:
    if foreign:
        others = ", ".join(f"{op} {name}" for op, name in foreign.items())
        raise UserError(
            f"store='file' needs every op that touches the arena native, and {others} "
            f"is not; use ops='cpu', or store='memory', or driver='host' and transfers='queue' for "
            f"{_CACHED}"
        )
