"""Everything that a start decides, before anything is allocated."""

from __future__ import annotations

import dataclasses
import sys
from typing import NamedTuple

from host_offload.control.interface import Costs, Spec
from host_offload.control.paging import PagedSpec, check_paged
from host_offload.control.rules import gives_away, search_of
from host_offload.control.transitions import check_resident
from host_offload.control.window import WindowSpec
from host_offload.memory.budget import Budget, cells_per_layer, format_bytes, resolve_budget
from host_offload.memory.device_memory import FreeMemory
from host_offload.memory.placement import ResidentSpec
from host_offload.policies.placement.placement_names import deferred
from host_offload.policies.placement.placement_policy import PlacementPolicy
from host_offload.policies.prefetch.fitted import check_fitted
from host_offload.sizing.tiers import StorageModel
from host_offload.traces.schema import TraceError
from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.costs.transition_bound import with_step_bound
from moejax.engine.control import policy_spec
from moejax.errors import UserError, user_errors
from moejax.models.model_config import ModelConfig
from moejax.start.choices import GATED, PACKED_AS, Settings
from moejax.start.conflicts import Situation, refuse_conflicts
from moejax.start.decide.facts import DeviceFacts, ModelFacts
from moejax.start.decide.shapes import (
    KERNEL_WAVES,
    apart,
    decodes_in_buckets,
    is_native,
    ops_in_use,
    prefills_in_buckets,
    step_shapes,
    without_kernel,
    without_native,
)
from moejax.start.decide.split import check_split, start_split
from moejax.start.decide.store_choice import explain_donation, why_cells
from moejax.start.decide.stream import (
    moved_bytes,
    staged_bytes,
    storage_model,
    stream_notes,
    window_of,
)
from moejax.start.decide.transfers import cache_of, queue_of
from moejax.start.kernels import KernelChoice, without_mosaic
from moejax.start.precision import (
    checkpoint_notes,
    expert_budget_of,
    formats_of,
    has_all_versions_of,
    mixed_of,
    note,
    paged_cells,
    resident_versions,
    spare_slots_of,
)
from moejax.step.buddies import read_buddies
from moejax.step.step_parts import TRACE_ARRAYS, SecondProcessor, StepSpec
from moejax.traces.tracer import config_digest
from pallas_kernels import Ops, resolve_ops
from pallas_kernels.cpu.library import DTYPES, why_not_cpu
from pallas_kernels.dispatch import KERNELS
from pallas_kernels.linear.coded import CODED_DTYPES
from pallas_kernels.records.versions import Formats, why_no_kernel, why_no_native

_LIMITS = {"cpu": (16, 2048), "gpu": (64, 8192)}
"""Platform → (max_num_seqs, max_num_batched_tokens)."""


@dataclasses.dataclass(frozen=True)
class StartPlan:
    """The plan that `build` makes an engine from, without further decisions."""

    settings: Settings
    steps: StepSpec
    """Shapes, ops, formats and layout of the compiled steps."""
    max_num_seqs: int
    max_model_len: int
    budget: Budget
    """Slots of the arena, of experts and of KV, with notes on the decisions."""
    cells: tuple[int, ...]
    """Cells of each layer. Empty if every expert is resident in a fixed place (of `mixed`, or in
    the store: steps.in_place), or if cells are of two versions."""
    mixed: ResidentSpec | PagedSpec | None
    """Places of experts that have two versions: every expert resident in one version, or layers
    with cells of both."""
    window: WindowSpec | None
    """Where experts stream through the memory of two layers."""
    storage: StorageModel | None
    """Time that placements take, if experts move between tiers."""
    spec: Spec
    """The engine as policies see it, without the router's weights."""
    admission: int
    """Prompts that a prefill step waits for while others decode."""
    kernels: KernelChoice | None = None
    """Which kernels run, on a GPU."""

    def ops_in_use(self) -> dict[str, str]:
        """Returns the implementation of each op, with the reason where it is not the kernel that
        could run."""
        declined = {} if self.kernels is None else self.kernels.declined
        ops = ops_in_use(self.steps.config, self.steps.ops)
        return {op: f"{n}: {declined[op]}" if op in declined else n for op, n in ops.items()}

    def describe(self) -> dict[str, str]:
        """Returns the decisions, a line for people under each name."""
        budget, steps, size = self.budget, self.steps, self.steps.layout.slot_bytes
        held, page = self.settings.options.memory, steps.layout.page
        cells = "none of their own"
        slots = f"{budget.expert_slots} slots"
        if steps.in_place:
            slots = f"all {budget.in_place} resident in place, in the store: one copy"
        elif self.window is not None:
            dense, packed, _ = self.window.placement.sum(axis=0).tolist()
            cells = (
                f"{self.window.cells}: {dense} dense and {packed} packed residents, the others' "
                "window of two layers"
            )
        elif isinstance(self.mixed, PagedSpec):
            cells = paged_cells(self.mixed, self.settings.precision, steps.layout)
        elif self.cells:
            cells = ", ".join(map(str, self.cells))
        states = f", {page.state_pages} of a sequence's state" if page.state_pages else ""
        memory = "not known"
        if budget.memory is not None:
            free = budget.memory
            memory = f"{format_bytes(free.available)} of {format_bytes(free.free)}"
        versions = [f.store.version for f in steps.formats] if steps.formats else ["dense"]
        config, shapes, dtype = steps.config, steps.shapes, steps.dtype
        ops, block = self.ops_in_use(), steps.layout.page.block_size
        return {
            "device": f"{steps.device_kind}, free for the arena: {memory}",
            "model": f"{sum(config.moe_layers)} layers of {config.num_experts} experts, {dtype}",
            "ops": ", ".join(f"{op} {name}" for op, name in ops.items()),
            "products": name_products(steps),
            "steps": f"driver {steps.driver}, decode rows {', '.join(map(str, shapes.buckets))}, "
            f"contexts up to {', '.join(str(n * block) for n in shapes.contexts)}, "
            f"prefill {', '.join(map(str, shapes.prefills))} chunks of {shapes.chunk} tokens in "
            f"{shapes.waves} waves",
            "sequences": f"{self.max_num_seqs} at once of {self.max_model_len} tokens; a prefill "
            f"step waits for {self.admission}",
            "arena": f"{budget.slots} slots of {size} bytes, {format_bytes(budget.slots * size)}"
            f"{', memory of the native ops' if steps.owned else ''}",
            "experts": f"{slots}, precision {self.settings.precision.name} ({', '.join(versions)})",
            "cells": cells,
            "KV": f"{budget.kv_slots} slots, {budget.pages} pages of {page.block_size} tokens"
            f"{states}; "
            f"{held.kv_overflow} beyond, to {format_bytes(held.swap_space)} of host memory",
            "policies": ", ".join(type(policy).__name__ for policy in self.settings.policies),
        }

    def __str__(self) -> str:
        lines = self.describe()
        width = max(map(len, lines))
        table = [f"{name:<{width}}  {text}" for name, text in lines.items()]
        return "\n".join([*table, *(f"{'note':<{width}}  {text}" for text in self.budget.notes)])


def step_spec(settings: Settings, model: ModelFacts, device: DeviceFacts) -> StepSpec:
    """Returns what steps are compiled from. Raises UserError for ops that the model or device
    cannot run, and for more tokens than the model has positions."""
    options, config, precision = settings.options, model.config, settings.precision
    seqs, tokens, length = limits_of(settings, model, device)
    config = config.for_length(length)
    packed = () if settings.tiers is None else (PACKED_AS,)
    versions = *resident_versions(precision, model.store), *packed
    layout = config.slot_layout(NUMPY_DTYPES[model.dtype].itemsize, versions, model.dtype)
    formats = formats_of(precision, layout, model.store, packed)
    if formats is not None:  # layers of one version may differ
        versions = tuple(dict.fromkeys(version.cell.version for version in formats))
    with user_errors():
        ops = resolve_ops(
            settings.ops,
            platform=device.platform,
            dtype=model.dtype,
            no_kernel=without_kernel(config)
            | apart(options.transfer.driver.name, formats)
            | why_no_kernel(versions, config.beyond_kernels)
            | dict(device.declined),
            # Residents that the queue unpacks are matrices alone, without biases.
            no_native=why_no_native(versions, config.beyond_packing if packed else None)
            | without_native(config),
            no_mosaic=without_mosaic(config, model.dtype, layout, formats),
            shared_kib=device.shared_kib,
            arithmetic=options.runtime.arithmetic,
        )
    check_arithmetic(ops, formats)
    needs = TRACE_ARRAYS & {need for policy in settings.policies for need in policy.needs}
    if {*GATED} & {*settings.ahead_arms} and not config.routes_apart:
        needs |= {"gate_input"}
    speculation = options.runtime.speculative_config
    drafts = speculation is not None
    predicted = speculation is not None and speculation.method == "mtp"
    favour, buddies = options.policy.cache_aware_routing, None
    if isinstance(favour, str):
        with user_errors(where="cache_aware_routing: "):
            buddies = read_buddies(favour, sum(config.moe_layers), config.num_experts)
    steps = StepSpec(
        device_kind=device.kind,
        runtime=device.runtime,
        driver=options.transfer.driver.name,
        ops=ops,
        config=config,
        dtype=model.dtype,
        layout=layout,
        shapes=step_shapes(
            layout,
            rows=seqs,
            max_model_len=length,
            max_num_batched_tokens=tokens,
            waves=options.transfer.driver.waves
            or (KERNEL_WAVES if ops.expert_ffn in KERNELS else 1),
            bucketed=decodes_in_buckets(config, ops),
            prefill_bucketed=prefills_in_buckets(config, ops),
            native=is_native(config, ops),
            kernels=ops.has_kernels,
            drafts=drafts,
        ),
        formats=formats,
        tiers=options.transfer.driver.tiers or "",
        store="file" if options.memory.store.name == "file" else "memory",
        queue=queue_of(settings),
        second=second_of(settings, ops, model.dtype, device.platform, config),
        trace_arrays=needs | (TRACE_ARRAYS & {*settings.trace_arrays}),
        cache_aware=None if isinstance(favour, str) else favour,
        buddies=buddies,
        drafts=drafts,
        hidden=predicted or bool(config.predicts),
    )
    if config.routes_apart and (needs or search_of(settings.policies) is not None):
        raise UserError(
            f"experts of {config.architecture} read other values than its routers, so there are "
            "no policies for it that look at router inputs; choose another prefetch"
        )
    refuse_conflicts(Situation(settings, device.platform, steps))
    return steps


def check_arithmetic(ops: Ops, formats: Formats | None) -> None:
    """Raises UserError for integer products of experts that have no integers."""
    records = [record for version in formats or () for record in version[:2]]
    if ops.arithmetic == "int8" and not any(
        record.integer_unit(matrix) for record in records for matrix in record.matrices
    ):
        found = " and ".join(dict.fromkeys(record.version for record in records)) or "dense"
        raise UserError(
            f"arithmetic int8 multiplies experts in integer codes, and these, {found}, have none; "
            "add precision int8 or int4, take a quantized checkpoint such as a GGUF file, or leave "
            "arithmetic out"
        )


def second_of(
    settings: Settings, ops: Ops, dtype: str, platform: str, config: ModelConfig
) -> SecondProcessor | None:
    """Returns the second processor that policies give experts to, or None without one. If the
    steps' own expert op is not for a CPU, the second processor runs the native op, or XLA's if the
    native ops are not built or cannot run the model's experts."""
    if not gives_away(settings.policies):
        return None
    own = ops.expert_ffn
    native = (
        why_not_cpu() is None and dtype in DTYPES and "expert_ffn" not in without_native(config)
    )
    name = "cpu" if native else "xla"
    if own == "cpu" or (own, platform) == ("xla", "cpu"):
        name = own
    same = (name, "cpu") == (own, platform)
    given = (p.defer for p in settings.policies if isinstance(p, PlacementPolicy))
    with user_errors(TraceError):
        defer = next(given, deferred(settings.placement))
    return SecondProcessor(name, same_bits=same, defer=defer)


def limits_of(settings: Settings, model: ModelFacts, device: DeviceFacts) -> tuple[int, int, int]:
    """Returns (max_num_seqs, max_num_batched_tokens, max_model_len), as given or by the platform
    and the model. Raises UserError for a length beyond the model's."""
    options, longest = settings.options, model.config.max_position_embeddings
    seqs, tokens = _LIMITS.get(device.platform, _LIMITS["gpu"])
    if options.model.max_model_len is not None and options.model.max_model_len > longest:
        why = model.config.length_limit
        raise UserError(
            f"max_model_len {options.model.max_model_len} is more than the model's "
            + (
                f"longest sequence, {longest}: {why}"
                if why
                else f"max_position_embeddings, {longest}"
            )
            + "; lower it"
        )
    return (
        options.runtime.max_num_seqs or seqs,
        options.runtime.max_num_batched_tokens or tokens,
        options.model.max_model_len or longest,
    )


class Division(NamedTuple):
    """The arena in slots."""

    budget: Budget
    window: WindowSpec | None
    """Where experts stream through the memory of two layers."""


def divide(
    settings: Settings,
    model: ModelFacts,
    device: DeviceFacts,
    steps: StepSpec,
    memory: FreeMemory | None,
) -> Division:
    """Divides the arena into slots by the given sizes and the memory that may be taken. Raises
    UserError, BudgetError or ArenaTooSmall."""
    options, precision, config = settings.options, settings.precision, steps.config
    moe_layers, experts = sum(config.moe_layers), config.num_experts
    layout, platform = steps.layout, device.platform
    seqs, _, length = limits_of(settings, model, device)
    whole = _arena_bytes(settings, model, platform)
    # Slots of the window, in the part of the arena that KV of every sequence leaves.
    pages = seqs * layout.page.pages(length)
    left = memory.available if whole is None and memory is not None else whole
    if left is not None:
        left -= -(-pages // layout.pages_per_slot) * layout.slot_bytes
    window = window_of(settings, steps, device.rates, left)
    maps = 0
    if (search := search_of(settings.policies)) is not None:
        maps = search.nbytes(moe_layers, experts, config.hidden_size)
    # If the device's memory decides, what steps need is measured and includes staging.
    staged = 0 if window is None else staged_bytes(settings, steps, window)
    why = why_cells(settings, steps, platform)
    has_all_versions = has_all_versions_of(precision, model.store, moe_layers)
    wanted = options.memory.expert_budget if window is None else window.slots * layout.slot_bytes
    budget = resolve_budget(
        layout,
        moe_layers=moe_layers,
        experts=experts,
        max_num_seqs=seqs,
        max_model_len=length,
        available_bytes=sys.maxsize if memory is None else max(memory.available - maps, 0),
        memory=None if whole is None else _subtract_staging(whole, maps, staged),
        expert_budget=expert_budget_of(wanted, precision, layout, experts, has_all_versions),
        kv_budget=options.memory.kv_budget,
        spare_slots=2 * experts
        if settings.tiers is not None
        else spare_slots_of(precision, layout, experts, has_all_versions),
        in_place=why is None,
    )
    notes = [*budget.notes]
    if steps.store == "file":
        notes.append(_file_note(settings, model, budget, steps, platform))
    elif why and platform == "cpu" and budget.expert_slots >= moe_layers * experts:
        notes.append(f"the experts' cells are a second copy beside the store: {why}")
    if maps:
        notes.append(f"expert maps take {format_bytes(maps)} of device memory beside the arena")
    if others := explain_donation(steps):
        notes.append(f"the arena is an array, donated from step to step: {others} is not native")
    return Division(dataclasses.replace(budget, memory=memory, notes=tuple(notes)), window)


def _arena_bytes(settings: Settings, model: ModelFacts, platform: str) -> int | None:
    """Returns the bytes that the options give the arena. Raises UserError if parameters leave it
    nothing."""
    given = settings.options.memory
    held = given.store.host_memory
    if held is None or cache_of(settings, platform) is not None:
        return given.memory
    if held <= model.param_bytes:
        raise UserError(
            f"host_memory {format_bytes(held)} does not hold the parameters beside experts, "
            f"{format_bytes(model.param_bytes)} ({model.param_bytes} bytes); raise it"
        )
    return held - model.param_bytes


def _subtract_staging(whole: int, maps: int, staged: int) -> int:
    """Returns what expert maps and staging leave of a memory for the arena. Raises UserError if
    they leave nothing."""
    if maps + staged < whole:
        return whole - maps - staged
    beside = {"expert maps take": maps, "the next layer's experts take in staging": staged}
    what = " and ".join(
        f"{name} {format_bytes(taken)} of device memory ({taken} bytes)"
        for name, taken in beside.items()
        if taken
    )
    less = ", or lower the maps' capacity" if maps else ""
    raise UserError(f"{what}, and memory is {format_bytes(whole)}; raise it{less}")


def _file_note(
    settings: Settings, model: ModelFacts, budget: Budget, steps: StepSpec, platform: str
) -> str:
    """Says where experts in files are, and how much host memory they take."""
    arena = budget.slots * steps.layout.slot_bytes
    checked = "checksums verified" if model.verified else "checksums NOT verified"
    stay = f"store file: {format_bytes(model.file_bytes)} of experts stay in files ({checked})"
    if (cache := cache_of(settings, platform)) is not None:
        records = int(cache.bytes // moved_bytes(steps).mean())
        pinned = f"{format_bytes(cache.bytes)} of pinned host memory"
        return f"{stay}; {pinned} are a cache of {records} of them"
    return (
        f"{stay}; host memory holds {format_bytes(model.param_bytes)} of parameters and the arena "
        f"of {format_bytes(arena)}, {format_bytes(model.param_bytes + arena)} in all"
    )


def decide(
    settings: Settings, model: ModelFacts, device: DeviceFacts, costs: Costs | None = None
) -> StartPlan:
    """Returns the whole plan of a start. Reads traces and kept costs that options name; touches no
    device.

    - `device`: its memory includes what steps need, if that matters (moejax.start.probe).
    - `costs`: measured costs of these steps, if Settings.needs_costs.

    Raises UserError, BudgetError or ArenaTooSmall.
    """
    precision, policies = settings.precision, settings.policies
    steps = step_spec(settings, model, device)
    budget, window = divide(settings, model, device, steps, device.memory)
    steps = dataclasses.replace(steps, in_place=budget.in_place > 0)
    seqs, _, length = limits_of(settings, model, device)
    moe_layers, experts = sum(steps.config.moe_layers), steps.config.num_experts
    slots = budget.in_place or budget.expert_slots
    with user_errors(where=f"precision {precision.name}: "):
        has_all_versions = has_all_versions_of(precision, model.store, moe_layers)
        mixed = mixed_of(precision, steps.layout, slots, experts, has_all_versions)
        if isinstance(mixed, ResidentSpec):
            check_resident(policies, mixed)
        elif mixed is not None:
            check_paged(policies)
    with user_errors():
        check_fitted(policies, config_digest(steps.config))
    if isinstance(mixed, ResidentSpec):
        mixed = with_step_bound(mixed, precision, steps, device.platform, model.read_bytes)
    notes = [*budget.notes, *_result_notes(steps)]
    if reason := steps.config.length_limit:
        notes.append(
            f"sequences have at most {steps.config.max_position_embeddings} tokens: {reason}"
        )
    dense = model.store.layers.get("dense", ())
    if text := note(precision, mixed, steps.layout, dense):
        notes.append(text)
    notes += checkpoint_notes(
        precision, steps.config, steps.layout, has_all_versions, native=steps.ops.linear == "cpu"
    )
    notes += stream_notes(window, steps, seqs)
    cells: tuple[int, ...] = ()
    if mixed is None and window is None and not steps.in_place:
        cells = cells_per_layer(budget.expert_slots, moe_layers, experts)
    spec = policy_spec(
        steps,
        slots=budget.slots,
        bound=experts if (cut := window or mixed) is None else cut.cell_bound,
        max_model_len=length,
        max_num_seqs=seqs,
        seed=settings.options.runtime.seed,
    )
    split = None
    if window is None and not steps.in_place:
        split = start_split(settings.options, budget, cells, spec, steps, costs)
    if split is not None:
        check_split(spec, steps, split.cells, split.kv_slots)
        cells, notes = split.cells, [*notes, split.note]
        budget = dataclasses.replace(
            budget,
            expert_slots=sum(cells),
            kv_slots=split.kv_slots,
            pages=split.kv_slots * steps.layout.pages_per_slot,
        )
    least = mixed.cells.sum(axis=1).tolist() if isinstance(mixed, PagedSpec) else cells
    return StartPlan(
        settings=settings,
        steps=steps,
        max_num_seqs=seqs,
        max_model_len=length,
        budget=dataclasses.replace(budget, notes=tuple(notes)),
        cells=cells,
        mixed=mixed,
        window=window,
        storage=storage_model(steps, device.rates) if settings.tiers is not None else None,
        spec=dataclasses.replace(
            spec,
            resident=mixed if isinstance(mixed, ResidentSpec) else None,
            capacity=None if mixed is None else mixed.capacity,
            costs=costs,
        ),
        # A prefill step with experts to move costs almost the same for one prompt as for many.
        admission=1 if window is None and min(least, default=experts) >= experts else -(-seqs // 4),
    )


def name_products(steps: StepSpec) -> str:
    """Says which products are of integers, and of what numbers the exact ones are."""
    exact = f"exact, of {steps.dtype} numbers"
    if steps.ops.arithmetic == "exact":
        return exact
    which = "weights" if _multiplies_all_codes(steps) else "experts"
    return f"{steps.ops.arithmetic} with {which} in integer codes, all others {exact}"


def _multiplies_all_codes(steps: StepSpec) -> bool:
    """Whether other matrices than experts are multiplied in their codes too."""
    return steps.ops.linear == "cpu" and steps.dtype in CODED_DTYPES


def _result_notes(steps: StepSpec) -> list[str]:
    """Returns the notes that results must carry about the link and about what changes outputs."""
    notes, queue, second = [], steps.queue, steps.second
    if queue is not None and (queue.rate or queue.latency):
        rate = f"{queue.rate / 1e9:.3g} GB/s" if queue.rate else "unlimited rate"
        notes.append(f"experts pass a link of {rate}, {queue.latency * 1e6:.3g} us, beside compute")
    if second is not None and not second.same_bits:
        notes.append(
            "missed experts that a placement gives to the CPU are computed by another "
            f"implementation ({second.implementation}) with other bits: outputs are a function of "
            "the placement, which a trace records"
        )
    if second is not None and second.defer:
        notes.append(
            f"placement defer={second.defer} CHANGES OUTPUTS: in decode steps as many experts of a "
            "token, if the CPU computes them, are added a layer late, so tokens and logits depend "
            "on which experts are resident; they are not those of full residency"
        )
    if steps.ops.arithmetic != "exact":
        only = advice = ""
        if not _multiplies_all_codes(steps):
            own = "by native ops alone, in bfloat16 and float32"
            only = f" of experts (other matrices stay in codes {own})"
        elif steps.dtype != "float32":
            advice = "; dtype float32 rounds nothing else"
        notes.append(
            f"arithmetic {steps.ops.arithmetic}: in products with weights{only} in integer codes "
            f"activations are rounded to 8 bits; the output has other bits than with exact{advice}"
        )
    if (delta := steps.cache_aware_routing) is not None:
        does = f"a missing expert loses {delta} of its score where routers choose"
        if steps.buddies is not None:
            does = "residents stand in for missing experts"
        notes.append(
            f"cache_aware_routing {delta} CHANGES OUTPUTS: {does}, so tokens and logits depend on "
            "which experts are resident, that is on budget, policies and what else runs; they are "
            "not those of full residency"
        )
    return notes
