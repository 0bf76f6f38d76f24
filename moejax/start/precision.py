"""Precision in the engine: stores, formats and the first places of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from host_offload.control.paging import PagedSpec, version_cells
from host_offload.memory.budget import Share, format_bytes
from host_offload.memory.layout import SlotLayout
from host_offload.memory.placement import (
    ResidentSpec,
    capacity,
    resident_spec,
    slots_for,
    slots_up_to,
)
from host_offload.memory.store import ExpertStore
from host_offload.policies.precision.maps import HI, LO
from host_offload.policies.precision.precision_names import CHECKPOINT, Precision
from moejax.costs.transition_bound import describe_step_bound
from moejax.errors import UserError
from moejax.models.config import ModelConfig
from pallas_kernels.linear.coded import CODED_DTYPES
from pallas_kernels.records.versions import Formats, VersionFormats

if TYPE_CHECKING:
    from moejax.engine.loop import Engine

DENSE = Precision("dense")


def resident_versions(precision: Precision, store: ExpertStore) -> tuple[str, ...]:
    """Returns the versions that lie in cells; a slot holds the largest. With lossless12 alone,
    cells of other layers have its size even if some layers stay dense. Beside a second version,
    high cells have the size of the largest high experts in every layer, since layers share them:
    those of the checkpoint's formats, or dense ones, to which lossless12 is decoded on the way."""
    if precision.in_transit:
        return ("dense",)
    if not (store.layers and precision.mixed):
        return stored_versions(precision, store)
    high, low = precision.versions
    if high == CHECKPOINT:
        own = {v: layout.nbytes for v, layout in store.layouts.items() if v != low}
        return (max(own, key=own.__getitem__), low)
    return ("dense", low)


def stored_versions(precision: Precision, store: ExpertStore) -> tuple[str, ...]:
    """Returns the versions of the store, by number."""
    return tuple(store.layouts) if store.layers else precision.versions


def formats_of(
    precision: Precision, layout: SlotLayout, store: ExpertStore, packed: tuple[str, ...] = ()
) -> Formats | None:
    """Returns how each version lies in cells and in its store, or None for dense alone without
    biases and with gates, which is what ops take without formats.

    - `packed`: the version of packed residents.
    """
    plain = layout.records[0].gated and not layout.records[0].biases
    if precision.versions == ("dense",) and not packed and plain:
        return None
    versions = (*stored_versions(precision, store), *packed)
    cells = layout.records * len(versions) if precision.in_transit else layout.records
    if store.layers and precision.mixed:
        high = layout.records[HI]
        cells = tuple(high if v == "lossless12" else store.layouts[v] for v in versions)
    return tuple(
        VersionFormats(record, store.layouts[version], store.places(version))
        for record, version in zip(cells, versions, strict=True)
    )


def has_all_versions_of(precision: Precision, store: ExpertStore, layers: int) -> list[bool]:
    """Returns which layers have all of the precision's versions. The others are smaller as they are
    in the checkpoint than in the low version."""
    low = store.layers.get(precision.versions[LO], ()) if precision.mixed else ()
    return [not low or layer in low for layer in range(layers)]


def expert_budget_of(
    given: int | Share | None,
    precision: Precision,
    layout: SlotLayout,
    experts: int,
    has_all_versions: Sequence[bool],
) -> int | Share | None:
    """Returns the expert budget as given, or the budget that the share of high experts takes. If
    experts are paged, that share takes none.

    - `experts`: experts of a layer.
    - `has_all_versions`: the result of has_all_versions_of.

    Raises UserError if both are given.
    """
    if precision.hi_share is None or precision.paged:
        return given
    if given is not None:
        raise UserError(
            "hi_share and expert_budget both say how many experts are high; give one of them"
        )
    total = len(has_all_versions) * experts
    high = min(round(precision.hi_share * total), sum(has_all_versions) * experts)
    return slots_for(layout, (high, total - high), _spares(precision)) * layout.slot_bytes


def spare_slots_of(
    precision: Precision, layout: SlotLayout, experts: int, has_all_versions: Sequence[bool]
) -> int:
    """Returns the slots that experts can use beyond one each: the spares of both versions. Experts
    need fewer where layers have low ones alone, several in a slot.

    - `experts`: experts of a layer.
    - `has_all_versions`: the result of has_all_versions_of.
    """
    total, high = len(has_all_versions) * experts, sum(has_all_versions) * experts
    if high == total:
        return 2 * precision.spares
    if precision.paged:
        return min(slots_for(layout, (high, total)) - total, 0)
    return min(slots_up_to(layout, high, total, precision.spares) - total, 2 * precision.spares)


def mixed_of(
    precision: Precision,
    layout: SlotLayout,
    slots: int,
    experts: int,
    has_all_versions: Sequence[bool],
) -> ResidentSpec | PagedSpec | None:
    """Returns the first places of the versions, or None with one version: every expert resident in
    one of two versions or, if experts are paged, cells of both in each layer and the version that
    misses fill.

    - `slots`: slots of the arena for experts.
    - `experts`: experts of a layer.
    - `has_all_versions`: the result of has_all_versions_of.

    Raises ValueError, which says what would fit, if the versions do not fit, and for a map of
    another model.
    """
    if not precision.mixed:
        return None
    high, low = layout.records[HI], layout.records[LO]
    if high.nbytes <= low.nbytes:
        raise ValueError(
            f"an expert takes {low.nbytes} bytes in lo={low.version}, and no more than "
            f"{high.nbytes} in {high.version}; take a lo with fewer bits"
        )
    layers = len(has_all_versions)
    if precision.paged:
        cells = version_cells(layout, slots, layers, experts, precision.hi_share, has_all_versions)
        start = precision.start(layers, experts, int(cells[:, HI].sum()), has_all_versions)
        return PagedSpec(cells, start.astype(np.int8))
    total = layers * experts
    if precision.given is not None and not precision.spares:
        start = precision.start(layers, experts, total, has_all_versions)
        return resident_spec(layout, slots, start, spares=0)
    most, _ = capacity(layout, slots, total, _spares(precision))
    most = min(most, sum(has_all_versions) * experts)
    if precision.hi_share is not None:
        # Whole slots may have room for a few more.
        most = min(most, round(precision.hi_share * total))
    start = precision.start(layers, experts, most, has_all_versions)
    resident = resident_spec(layout, slots, start, spares=precision.spares)
    resident = dataclasses.replace(resident, arriving=precision.publish == "arrival")
    if not precision.spares:
        return resident
    return dataclasses.replace(resident, capacity=(most, total))


def _spares(precision: Precision) -> int:
    """Returns the spare cells of each version. A random map has room for as many high experts as
    DynaExq with one spare."""
    return max(precision.spares, 1)


def name_makers(versions: Sequence[str], quantizers: Mapping[str, str]) -> dict[str, str]:
    """Returns how each version was made: rtn or mse, `lossless`; `checkpoint` for dense and for a
    version whose maker the checkpoint does not name."""
    return {version: quantizers.get(version, "checkpoint") for version in versions}


def precision_stats(
    precision: Precision,
    control: Mapping[str, Any] | None,
    engine: Engine,
    quantizers: Mapping[str, str],
) -> dict[str, Any]:
    """Returns the precision that was asked for and the result of its transitions, as plain data:
    how each version was made (name_makers), the arithmetic of products, and for lossless12 how many
    layers stay dense.

    - `control`: Controller.stats.
    - `quantizers`: those of LoadedModel.
    """
    found = {**precision.report(), **((control or {}).get("precision") or {})}
    found["arithmetic"] = engine.runner.steps.ops.arithmetic
    found["quantizers"] = name_makers(precision.versions, quantizers)
    if "lossless12" in precision.versions:
        found["dense_layers"] = len(engine.runner.store.layers.get("dense", ()))
    return found


def paged_cells(paged: PagedSpec, precision: Precision, layout: SlotLayout) -> str:
    """Says, for people, how many cells each version has."""
    names = [record.version for record in layout.records]
    if precision.versions[HI] == CHECKPOINT:  # a layer's own
        names[HI] = CHECKPOINT
    sizes = zip(paged.capacity, names, strict=True)
    return " and ".join(f"{count} {name}" for count, name in sizes)


def note(
    precision: Precision,
    mixed: ResidentSpec | PagedSpec | None,
    layout: SlotLayout,
    dense: Sequence[int] = (),
) -> str:
    """Returns a line for people about the precision, or "" with dense experts.

    - `dense`: the MoE layers that stay dense since an expert overflows lossless12.
    """
    bits = "the output has other bits than with dense experts" if precision.lossy else "same bits"
    named = ", ".join(map(str, dense))
    if dense and precision.mixed:
        bits = f"MoE layers {named} stay dense, so high cells are as large as dense ones; {bits}"
    if isinstance(mixed, PagedSpec):
        return (
            f"precision {precision.name}: paged, {paged_cells(mixed, precision, layout)} cells for "
            f"{mixed.fill_version.size} experts; {bits}"
        )
    if precision.of_checkpoint:
        return ""  # checkpoint_notes says more
    if mixed is None:
        who = f"all experts but those of MoE layers {named}, dense" if dense else "all experts"
        return "" if precision == DENSE else f"precision {precision.name}: {who}; {bits}"
    high, low = (record.version for record in layout.records)
    high = f"in {high}" if precision.versions[HI] != CHECKPOINT else "as in the checkpoint"
    return (
        f"precision {precision.name}: {mixed.capacity[HI]} of {mixed.start.size} "
        f"experts at most {high}, the others in {low}; {bits}"
        f"{describe_step_bound(mixed, layout)}"
    )


def checkpoint_notes(
    precision: Precision,
    config: ModelConfig,
    layout: SlotLayout,
    has_all_versions: Sequence[bool],
    *,
    native: bool,
) -> list[str]:
    """Returns lines for people on how a checkpoint that its authors quantized is run, none for
    other checkpoints.

    - `has_all_versions`: the result of has_all_versions_of.
    - `native`: whether the native op computes products.
    """
    own = config.quantization
    if own is None:
        return []
    dtype, held = layout.records[0].dtype, config.expert_layers
    rest = f"other {own.method} matrices are dequantized to {dtype} at load"
    if native and dtype in CODED_DTYPES:
        rest += ", but for those that only products read, which stay in their codes"
    if own.activations:
        rest += f"; activations stay {dtype}, though the authors quantize them too"
    if own.uneven_layers and not {"dense", CHECKPOINT}.isdisjoint(precision.versions):
        record = dataclasses.replace(layout.records[0], version="dense")
        dense = own.uneven_layers * config.num_experts * record.nbytes
        rest = (
            f"experts of {own.uneven_layers} of {sum(config.moe_layers)} MoE layers are in formats "
            f"that differ by expert, so they are dequantized to {dtype} and take "
            f"{format_bytes(dense)}, in the file {format_bytes(own.uneven_bytes)}; {rest}"
        )
    if precision.mixed and precision.versions[HI] in held:
        return [f"high experts are as the checkpoint has them; {rest}"]
    if precision.mixed and precision.versions[HI] == CHECKPOINT:
        formats = " and ".join(f"{v} in {len(layers)} layers" for v, layers in held.items())
        high, low = layout.records
        if alone := ", ".join(str(layer) for layer, has in enumerate(has_all_versions) if not has):
            rest = (
                f"experts of MoE layers {alone} take no more bytes so than in {low.version}: all "
                f"stay so, in low cells; {rest}"
            )
        return [
            f"high experts are as the checkpoint has them, {formats}, in cells of {high.nbytes} "
            f"bytes, the largest; {rest}"
        ]
    if not precision.of_checkpoint:
        coded = " and ".join(version for version in held if version != "dense")
        how = f"the checkpoint's experts, {coded}, are dequantized to {dtype}; " if coded else ""
        return [how + rest]
    formats = []
    for version, layers in held.items():
        record = next(record for record in layout.records if record.version == version)
        bits = 8 * record.nbytes / record.values
        some = f" in {len(layers)} of {sum(config.moe_layers)} layers" if len(held) > 1 else ""
        formats.append(f"{version}, {bits:.3g} bits a weight{some}")
    return [
        "experts are paged and computed from as the checkpoint has them, "
        f"{' and '.join(formats)}; {rest}"
    ]
