"""Where weights and arena lie on a CPU: whether experts that are all resident need cells, as it can
read them where they lie in the store, and whose memory the arena is."""

from __future__ import annotations

from moejax.start.settings import Settings
from moejax.step.parts import StepSpec, arena_ops


def why_cells(settings: Settings, steps: StepSpec, platform: str) -> str | None:
    """Why experts that are all resident have cells beside the store, for people; None: they need
    none, as the device reads the store like its own memory and nothing that was asked for moves or
    watches cells."""
    if platform != "cpu":
        return "the store is not in the device's memory"
    if steps.ops.expert_ffn != "cpu":
        return f"op expert_ffn {steps.ops.expert_ffn} does not compute on the store"
    options, precision = settings.options, settings.precision
    if precision.in_transit:
        return f"precision {precision.name} decodes experts into cells"
    if precision.policy is not None or precision.paged:
        return f"precision {precision.name} moves experts between cells"
    asked = {
        "eviction": options.eviction is not None,
        "prefetch": options.prefetch is not None,
        "policies": len(options.policies) > 0,
        "budget": options.budget != "fixed",
        "resize": options.resize != "none",
        "cells": not isinstance(options.cells, str) or options.cells != "uniform",
        "hooks": options.hooks is not None,
        "trace": options.trace is not None,
        "link_rate": options.link_rate is not None,
        "link_latency": options.link_latency is not None,
    }
    for name, wanted in asked.items():
        if wanted:
            return f"{name} is about cells, and was asked for"
    return None


def why_donated(steps: StepSpec) -> str | None:
    """Why the arena is an array, donated from step to step, although native ops touch it, for
    people; None: the native library owns it (StepSpec.owned), or none of its ops touches it."""
    ops = {op: getattr(steps.ops, op) for op in arena_ops(steps.layout.page.latent > 0)}
    others = [f"{op} {name}" for op, name in ops.items() if name != "cpu"]
    return ", ".join(others) if 0 < len(others) < len(ops) else None
