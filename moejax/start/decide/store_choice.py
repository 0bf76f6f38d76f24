"""Where weights and arena lie on a CPU. A CPU can read resident experts in the store, so they may
need no cells; and the native library may own the arena's memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from host_offload.memory.store import StoreBuilder
from host_offload.policies.precision.precision_names import CHECKPOINT
from moejax.errors import UserError
from moejax.models.config import load_config
from moejax.models.hub import is_hub_id, model_directory
from moejax.start.choices import Settings
from moejax.start.conflicts import Situation, find_cell_options, refuse_conflicts
from moejax.start.decide.transfers import new_builder
from moejax.step.step_parts import StepSpec, arena_ops


def why_cells(settings: Settings, steps: StepSpec, platform: str) -> str | None:
    """Says, for people, why experts have cells beside the store although all are resident. Returns
    None if they need no cells: the device reads the store like its own memory, and no option moves
    or watches cells."""
    if platform != "cpu":
        return "the store is not in the device's memory"
    if steps.ops.expert_ffn != "cpu":
        return f"op expert_ffn {steps.ops.expert_ffn} does not compute on the store"
    options, precision = settings.options, settings.precision
    if options.memory.store.name == "file":
        return "experts in files are computed in cells, or read through"
    if precision.in_transit:
        return f"precision {precision.name} decodes experts into cells"
    if precision.spares or precision.paged:
        return f"precision {precision.name} moves experts between cells"
    if steps.window:
        return "driver stream computes experts in a window of two layers"
    asked = {
        **find_cell_options(options),
        "transfers": options.transfer.transfers.name == "queue",
    }
    for name, wanted in asked.items():
        if wanted:
            return f"{name} is about cells, and was asked for"
    return None


def explain_donation(steps: StepSpec) -> str | None:
    """Says, for people, why the arena is an array, donated from step to step, although native ops
    touch it. Returns None if the native library owns the arena (StepSpec.owned), or if no native op
    touches it."""
    others = [f"{op} {name}" for op, name in steps.foreign_ops.items()]
    every = arena_ops(steps.config)
    return ", ".join(others) if 0 < len(others) < len(every) else None


def store_builder(settings: Settings, platform: str) -> Callable[..., StoreBuilder]:
    """Returns the builder of the store of these settings. Raises UserError for a store that this
    platform cannot have with any model."""
    refuse_conflicts(Situation(settings, platform))
    return new_builder(settings, platform)


def by_copies(settings: Settings, platform: str) -> Settings | None:
    """Returns the settings with jax's own copies of separate arrays instead of ops that read one
    pinned array, which is slower and has the same bits. None if an option or version excludes
    them, or asked for other transfers."""
    transfer = settings.options.transfer
    if transfer.driver.name != "device" or transfer.transfers.name is not None:
        return None
    moved = dataclasses.replace(
        transfer, driver=dataclasses.replace(transfer.driver, name="host"), transfers="queue"
    )
    options = dataclasses.replace(settings.options, transfer=moved)
    found = dataclasses.replace(settings, options=options)
    try:
        refuse_conflicts(Situation(found, platform))
    except UserError:
        return None
    return found


def estimate_arrays(settings: Settings, layers: int | None = None) -> tuple[int, ...]:
    """Returns the bytes of each array of experts that a start may allocate in pinned memory, in
    that order, by the model's config alone, or those of the cache of experts in files; () if
    neither says it.

    - `layers`: how many layers with experts are loaded; None: the model's.
    """
    store = settings.options.memory.store
    if store.name != "memory":
        return () if store.host_memory is None else (store.host_memory,)
    model = settings.options.model.model
    try:
        found = model_directory(model, config_only=True)
        config = load_config(os.path.dirname(found) if is_hub_id(model) else found)
        itemsize = 4 if settings.options.model.dtype in ("float", "float32") else 2
        own = tuple(config.expert_layers)
        # A version that the checkpoint lacks is made from its own.
        versions = dict.fromkeys((*own, *settings.of_model(*own).versions))
        versions.pop(CHECKPOINT, None)
        records = config.slot_layout(itemsize, tuple(versions)).records
    except ValueError:  # the load says what is wrong
        return ()
    experts = (sum(config.moe_layers) if layers is None else layers) * config.num_experts
    return tuple(record.nbytes * experts for record in records)
