"""What the stream driver needs, what goes with it, and when it pays."""

from __future__ import annotations

import math

import numpy as np

from host_offload.control.window import PAYS_FROM, WindowSpec, window_slots
from host_offload.memory.budget import expert_slots_of, format_bytes
from moejax.errors import UserError
from moejax.start.decide.residency import about_cells
from moejax.start.settings import Settings
from moejax.step.parts import StepSpec


def check_stream(settings: Settings, steps: StepSpec, platform: str) -> None:
    """Raises UserError where driver="stream" cannot run, or what else was asked for says nothing
    with it."""
    if not steps.window:
        return
    others = [f"{op} {name}" for op, name in steps.foreign_ops.items()]
    if platform != "cpu" or others:
        why = f"this is a {platform}" if platform != "cpu" else f"{', '.join(others)} is not native"
        raise UserError(
            f"driver=stream needs ops=cpu here; {why}: use device='cpu' and ops='cpu' (`python "
            "-m pallas_kernels.cpu` builds them), or driver='device'"
        )
    options, precision = settings.options, settings.precision
    if precision.mixed or precision.in_transit:
        raise UserError(
            f"driver=stream has experts of one version, as they lie in the store, not precision "
            f"{precision.name}; leave it out, name one version, or use driver='device'"
        )
    asked = {
        **about_cells(options),
        "prefill_waves": (options.prefill_waves or 1) > 1,
        "trace": options.trace is not None,
    }
    for name, wanted in asked.items():
        if wanted:
            raise UserError(
                f"driver=stream brings every expert of each layer, in the memory of two layers, so "
                f"{name} says nothing; leave {name} out, or use driver='device'"
            )
    layers = sum(steps.config.moe_layers)
    if layers < 3:
        raise UserError(
            f"driver=stream holds two layers of experts, and this model has {layers}: nothing "
            "would stream; use driver='device'"
        )


def window_of(settings: Settings, steps: StepSpec) -> WindowSpec | None:
    """The window of these steps; None: experts do not stream. What expert_budget gives beyond two
    layers keeps experts resident, as many in each layer. Raises UserError for one that the window
    does not fit into."""
    if not steps.window:
        return None
    layers, experts = sum(steps.config.moe_layers), steps.config.num_experts
    budget, size, resident = settings.options.expert_budget, steps.layout.slot_bytes, 0
    least = window_slots(layers, experts, 0)
    if budget is not None:
        slots = expert_slots_of(budget, layers * experts, size)
        if slots < least:
            raise UserError(
                f"driver=stream holds two layers of experts, {format_bytes(least * size)} "
                f"({least * size} bytes), and expert_budget gives "
                f"{format_bytes(slots * size)}; raise it, leave it out, or use driver='device'"
            )
        resident = min((slots - least) // (layers - 2), experts)
    # Nothing says which are worth more, where all of a layer are there before it runs.
    first = np.broadcast_to(np.arange(experts) < resident, (layers, experts))
    return WindowSpec(first, steps.layout.slot_rows)


def stream_notes(window: WindowSpec | None, steps: StepSpec, rows: int) -> list[str]:
    """What the window is and, where a batch of so many rows is too small for it, that it is."""
    if window is None:
        return []
    record = steps.layout.records[0].nbytes
    every = window.layers * window.streamed
    kept = window.experts - window.streamed
    resident = f" and of {kept} residents in each" if kept else ""
    notes = [
        f"driver stream: all {window.experts} experts of a layer are there before it runs, in "
        f"{window.slots} cells ({format_bytes(window.slots * record)}) of two layers{resident}; a "
        f"step moves {every} experts, {format_bytes(every * record)}, beside compute"
    ]
    k = steps.config.num_experts_per_tok
    used = used_experts(window.experts, k, rows)
    if every and used < PAYS_FROM * window.experts:
        enough = math.ceil(math.log(1 - PAYS_FROM) / math.log(1 - k / window.experts))
        notes.append(
            f"driver stream: {rows} sequences at once use about {used:.0f} of a layer's "
            f"{window.experts} experts and all are moved; it pays from about {enough} on "
            "(max_num_seqs), below that driver=device moves less"
        )
    return notes


def used_experts(experts: int, k: int, rows: int) -> float:
    """Experts of a layer that so many rows use, each k of them, all as likely."""
    return experts * (1 - (1 - k / experts) ** rows)
