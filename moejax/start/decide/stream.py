"""The memory of the stream driver, and when streaming pays."""

from __future__ import annotations

import math

import numpy as np

from host_offload.control.window import (
    DENSE,
    HOST,
    PACKED,
    PACKED_VERSION,
    PAYS_FROM,
    WindowSpec,
    tiers_of,
)
from host_offload.memory.budget import Share, expert_slots_of, format_bytes
from host_offload.sizing.tiers import StorageModel, uniform_placement
from host_offload.versions.layer_versions import version_bytes
from moejax.errors import UserError
from moejax.start.choices import Settings
from moejax.start.option_values import Driver
from moejax.start.tiers import TierRates
from moejax.step.step_parts import StepSpec


def window_of(
    settings: Settings, steps: StepSpec, rates: TierRates | None, kv_leaves: int | None
) -> WindowSpec | None:
    """Returns the window of these steps, or None if experts do not stream. Without tiers, what
    expert_budget gives beyond two layers keeps experts resident, equally many in each layer. With
    tiers, which name the resident experts themselves, expert_budget is a limit.

    - `rates`: rates of the backends, if tiers need them.
    - `kv_leaves`: bytes of the arena beside KV of every sequence; None: nothing limits them.

    Raises UserError for a budget that the window, or what tiers name, does not fit into.
    """
    if not steps.window:
        return None
    layers, experts = sum(steps.config.moe_layers), steps.config.num_experts
    budget, size = settings.options.memory.expert_budget, steps.layout.slot_bytes
    halves = halves_of(steps)
    given = None
    if budget is not None:
        # A share is of the model's experts; bytes may hold the window beside all of them.
        most = layers if isinstance(budget, Share) else layers + halves
        given = expert_slots_of(budget, most * experts, size) * size
        least = halves * experts * size
        if given < least:
            what = "two layers" if halves == 2 else "a layer, beside the next one in staging,"
            raise UserError(
                f"driver=stream holds {what} of experts, {format_bytes(least)} "
                f"({least} bytes), and expert_budget gives "
                f"{format_bytes(given)}; raise it, leave it out, or use driver='device'"
            )
    if settings.tiers is not None:
        model = storage_model(steps, rates)
        if kv_leaves is not None and halves == 1 and settings.tiers.planner != "none":
            kv_leaves -= experts * size  # staging, see staged_bytes
        placement = start_placement(settings.tiers, model, given, kv_leaves)
        return window_at(placement, steps)
    resident = 0 if given is None else (given // size - halves * experts) // (layers - halves)
    resident = min(resident, experts)
    return window_at(np.tile([resident, 0, experts - resident], (layers, 1)), steps)


def window_at(placement: np.ndarray, steps: StepSpec) -> WindowSpec:
    """Returns the window with so many experts of each layer in each tier.

    - `placement`: int64[L, 3].
    """
    layout, formats = steps.layout, steps.formats
    packed = formats[PACKED_VERSION].cell.rows if steps.tiers and formats is not None else 0
    direct = steps.tiers == "flux-direct"
    if packed or formats is None:
        largest = layout.records[0].rows
    else:  # formats may differ by layer, and cells pass from layer to layer
        largest = max(version.cell.rows for version in formats)
    rows = layout.slot_rows, largest, packed
    return WindowSpec(tiers_of(placement), *rows, direct=direct, halves=halves_of(steps))


def halves_of(steps: StepSpec) -> int:
    """Returns how many halves of the ring are cells of the arena. The other one is staging."""
    return 1 if steps.separate else 2


def storage_model(steps: StepSpec, rates: TierRates | None) -> StorageModel:
    """Returns the model of the time that placements of these steps take. Raises UserError without
    rates."""
    if rates is None or steps.formats is None:
        raise UserError("the rates of tiers are measured at a start; there are none here")
    dense, packed = (version.cell.nbytes for version in steps.formats)
    return StorageModel(
        layers=sum(steps.config.moe_layers),
        experts=steps.config.num_experts,
        record_bytes=dense,
        host_rate=rates.host,
        packed_rate=rates.packed,
        kappa=packed / dense,
        direct=steps.tiers == "flux-direct",
        halves=halves_of(steps),
    )


def staged_bytes(settings: Settings, steps: StepSpec, window: WindowSpec) -> int:
    """Returns the bytes beside the arena in which the next layer waits. If residents move, they are
    those of a layer without residents."""
    rows = window.staged_rows
    if settings.tiers is not None and settings.tiers.planner != "none":
        rows = (2 - window.halves) * window.experts * window.record_rows
    return rows * steps.layout.hidden * 2


def start_placement(
    tiers: Driver, model: StorageModel, budget: int | None, kv_leaves: int | None
) -> np.ndarray:
    """Returns where experts begin, int64[L, 3]. Given shares are met; otherwise as many experts are
    packed, by the rates, as the budget and KV leave room for.

    - `budget`: bytes for residents and the model's halves of the ring.
    - `kv_leaves`: bytes for residents and both halves.

    Raises UserError if the experts do not fit into the budget.
    """
    if tiers.by == "layers":
        dense = round(tiers.dense * model.layers)
        packed = round((tiers.packed or 0.0) * model.layers)
        tier = np.full(model.layers, HOST)
        tier[: dense + packed], tier[:dense] = PACKED, DENSE
        placement = np.eye(3, dtype=np.int64)[tier] * model.experts
    else:
        dense = round(tiers.dense * model.experts)
        packed = round((tiers.packed or 0.0) * model.experts)
        if tiers.packed is None:
            packed = model.balance(model.experts - dense)
            rooms = ((budget, model.halves), (kv_leaves, 2))
            limits = [(room, of) for room, of in rooms if room is not None]

            def fits(packed: int) -> bool:
                given = uniform_placement(model, dense, packed)
                return all(model.experts_bytes(given, of) <= room for room, of in limits)

            packed = next(n for n in range(packed, -1, -1) if n == 0 or fits(n))
        placement = uniform_placement(model, dense, min(packed, model.experts - dense))
    if budget is not None and (taken := model.experts_bytes(placement)) > budget:
        raise UserError(
            f"tiers {tiers.tiers} with dense={tiers.dense:g} and packed={tiers.packed or 0:g} take "
            f"{format_bytes(taken)} ({taken} bytes), and expert_budget is {format_bytes(budget)}; "
            "lower them, or raise it"
        )
    return placement


def stream_notes(window: WindowSpec | None, steps: StepSpec, rows: int) -> list[str]:
    """Describes the window, and says if it is too small for a batch of so many rows."""
    if window is None:
        return []
    row, moved = steps.layout.hidden * 2, int(window.placement[:, HOST] @ moved_bytes(steps))
    dense, packed, every = window.placement.sum(axis=0).tolist()
    kept = [
        f"{n / window.layers:g} {name}" for n, name in ((dense, "dense"), (packed, "packed")) if n
    ]
    resident = f" and of {' and '.join(kept)} residents in each" if kept else ""
    where = "two layers"
    if window.halves == 1:
        staged = format_bytes(window.staged_rows * row)
        where = f"one layer and staging ({staged}) beside the arena for the next one"
    notes = [
        f"driver stream: all {window.experts} experts of a layer are there before it runs, in "
        f"{window.cells} cells ({format_bytes(window.rows * row)}) of {where}{resident}; a "
        f"step moves {every} experts, {format_bytes(moved)}, beside compute"
    ]
    if packed and not window.direct:
        notes[0] += f", and decodes {packed}"
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


def moved_bytes(steps: StepSpec) -> np.ndarray:
    """Returns the bytes of an expert of each layer over the link, int64[L]; of several versions,
    those of the first one."""
    layers = sum(steps.config.moe_layers)
    return next(iter(version_bytes(steps.layout, steps.formats, layers, moved=True).values()))


def used_experts(experts: int, k: int, rows: int) -> float:
    """Returns the expected number of experts of a layer that so many rows use, if each row uses k
    of them and all are equally likely."""
    return experts * (1 - (1 - k / experts) ** rows)
