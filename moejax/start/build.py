"""From a loaded checkpoint and the user's limits to an engine that can run."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np

from host_offload.control.interface import Policy
from host_offload.control.paging import check_paged
from host_offload.control.transitions import check_resident
from host_offload.memory.arena import SlotArena
from host_offload.memory.budget import Budget, Share, cells_per_layer, resolve_budget
from host_offload.memory.device_memory import FreeMemory, free_memory
from host_offload.memory.kv_cache import KVCache
from host_offload.memory.layout import BLOCK_SIZES, SlotLayout
from host_offload.memory.placement import place
from host_offload.memory.tables import with_contents
from host_offload.policies.precision.names import Precision
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.checkpoints.tensors import layer_params
from moejax.costs import calibration
from moejax.costs.transition_bound import bounded
from moejax.engine.control import control_of
from moejax.engine.loop import Engine, Listener
from moejax.engine.resize import ResidentResizer, Resizer
from moejax.engine.scheduler import Scheduler
from moejax.engine.statistics import Statistics
from moejax.errors import UserError
from moejax.models.config import ModelConfig
from moejax.models.decoder import Decoder
from moejax.start.kernels import verify_kernels
from moejax.start.policies import start_controller
from moejax.start.precision import (
    DENSE,
    dense_layers,
    formats_of,
    note,
    paged_of,
    place_experts,
    resident_of,
    resident_versions,
    spare_slots,
    with_hi_share,
)
from moejax.start.step_memory import divided
from moejax.step.hooks import Hooks
from moejax.step.host_driver import HostRunner
from moejax.step.parts import DECODE_TILE, StepShapes
from moejax.step.runner import Runner
from moejax.step.trace_arrays import TRACE_ARRAYS
from pallas_kernels import Ops, resolve_ops
from pallas_kernels.kv_write import KVPage
from pallas_kernels.paged_attention import SPAN
from pallas_kernels.paged_attention import why_not_pallas as attention_why_not
from pallas_kernels.route import why_not_pallas as route_why_not

log = logging.getLogger("moejax")

PREFILL_CHUNK = 64
"""Prompt tokens computed at once. A start-up shape: it decides bits (contract 1)."""


KV_OVERFLOW = ("swap", "recompute")
"""What happens to KV that makes room: moved to host memory, or dropped and computed again by the
prefill path, which changes the bits of generated tokens' KV."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the user gave; None: decided at start. Sizes in bytes."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    memory: int | None = None
    expert_budget: int | Share | None = None
    kv_budget: int | None = None
    prefill_waves: int | None = None
    swap_space: int = 4 * 2**30
    kv_overflow: str = "swap"
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int | None = None

    def __post_init__(self):
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "prefill_waves",
            "long_prefill_token_threshold",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if self.kv_overflow not in KV_OVERFLOW:
            raise UserError(
                f"kv_overflow is one of {', '.join(KV_OVERFLOW)}, not {self.kv_overflow!r}"
            )

    @property
    def automatic(self) -> bool:
        """The device's memory decides, not numbers."""
        return self.memory is None and None in (self.expert_budget, self.kv_budget)

    def resolve(self, platform: str, longest: int) -> Limits:
        """The limits with every number but the budgets decided. longest: the model's
        max_position_embeddings. Raises UserError when max_model_len exceeds it."""
        seqs, tokens = _DEFAULTS.get(platform, _DEFAULTS["gpu"])
        if self.max_model_len is not None and self.max_model_len > longest:
            raise UserError(
                f"max_model_len {self.max_model_len} is more than the model's "
                f"max_position_embeddings, {longest}; lower it"
            )
        return dataclasses.replace(
            self,
            max_model_len=self.max_model_len or longest,
            max_num_seqs=self.max_num_seqs or seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or tokens,
        )


KERNEL_WAVES = 8
"""Waves of a prefill step with the expert kernel. It reads an expert that has no cell once per 64
rows routed to it, so a prefill step wants cells for all; an eighth of the experts fits where not
all do."""

DRIVERS: dict[str, type[Runner]] = {"device": Runner, "host": HostRunner}
"""Who walks through the layers of a step: one executable, or Python with hooks in between."""


def check_driver(driver: str) -> None:
    """Raises UserError for a driver that does not exist."""
    if driver not in DRIVERS:
        raise UserError(f"driver {driver!r} does not exist; use one of {', '.join(DRIVERS)}")


_DEFAULTS = {"cpu": (16, 2048), "gpu": (64, 8192)}
"""Platform → (max_num_seqs, max_num_batched_tokens)."""


def start_engine(
    loaded: LoadedModel,
    limits: Limits,
    *,
    eviction: str = "lru",
    policies: Sequence[Policy] = (),
    precision: Precision = DENSE,
    driver: str = "device",
    trace_arrays: Collection[str] = (),
    ops: Mapping[str, str],
    device: jax.Device,
    seed: int,
    listener: Listener | None,
    hooks: Hooks | None = None,
) -> tuple[Engine, Budget]:
    """Decides shapes and budgets, allocates the arena, compiles what a first request needs.

    limits: as given. eviction: of host_offload.policies.eviction.names.EVICTION, until one of the
    policies changes the weights. precision: loaded has its versions (precision.with_precision),
    policies its policy. driver: of DRIVERS. trace_arrays: of TRACE_ARRAYS, what steps give out
    beside what the policies need. ops: of parse_ops. hooks: of the host
    driver. Raises UserError, BudgetError or ArenaTooSmall.
    """
    DRIVERS[driver].check_hooks(hooks)
    config = loaded.config
    try:
        resolved = resolve_ops(
            ops, platform=device.platform, dtype=loaded.dtype, no_kernel=without_kernel(config)
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    limits = limits.resolve(device.platform, config.max_position_embeddings)
    assert limits.max_model_len and limits.max_num_seqs and limits.max_num_batched_tokens
    config = dataclasses.replace(config, rope=config.rope.for_length(limits.max_model_len))
    if config.rope.long:
        log.info(
            "longrope: long factors for every prompt, as max_model_len %d is more than the "
            "original context length; %d or less takes the short ones",
            limits.max_model_len,
            config.rope.original_max_position_embeddings,
        )
    in_cells = resident_versions(precision, loaded.store)
    layout = config.slot_layout(loaded.layout.itemsize, in_cells, loaded.dtype)
    formats = formats_of(precision, layout, loaded.store)
    verify_kernels(config, loaded.dtype, layout, resolved, device, formats)
    moe_layers, experts = sum(config.moe_layers), config.num_experts
    limits = with_hi_share(limits, precision, layout, moe_layers * experts)
    seqs, length = limits.max_num_seqs, limits.max_model_len
    assert seqs and length and limits.max_num_batched_tokens
    shapes = step_shapes(
        layout,
        rows=seqs,
        max_model_len=length,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        waves=limits.prefill_waves or (KERNEL_WAVES if resolved.expert_ffn == "pallas" else 1),
        bucketed=decodes_in_buckets(config, resolved),
    )

    def make_runner(slots: int, cells: int) -> Runner:
        return DRIVERS[driver](
            Decoder(config, loaded.params, resolved),
            loaded.store,
            layout,
            shapes,
            slots=slots,
            cells=cells,
            eviction=eviction,
            ops=resolved,
            device=device,
            trace_arrays=TRACE_ARRAYS & {*trace_arrays, *(n for p in policies for n in p.needs)},
            formats=formats,
        )

    def make_measured() -> Runner:
        """The smallest, with the programs that the policies will ask for."""
        smallest = make_runner(1, experts)
        if any({"stages", "transitions"} & policy.writes for policy in policies):
            smallest.prepare_stages()
        return smallest

    def divide(memory: FreeMemory | None) -> Budget:
        budget = resolve_budget(
            layout,
            moe_layers=moe_layers,
            experts=experts,
            max_num_seqs=seqs,
            max_model_len=length,
            available_bytes=sys.maxsize if memory is None else memory.available,
            memory=limits.memory,
            expert_budget=limits.expert_budget,
            kv_budget=limits.kv_budget,
            spare_slots=spare_slots(precision),
        )
        return dataclasses.replace(budget, memory=memory)

    budget = divided(
        divide,
        _free_memory(device, limits),
        make_measured,
        automatic=limits.automatic,
    )
    try:
        resident = resident_of(precision, layout, budget.expert_slots, moe_layers, experts)
        paged = paged_of(precision, layout, budget.expert_slots, moe_layers, experts)
        if resident is not None:
            check_resident(policies, resident)
        if paged is not None:
            check_paged(policies)
    except ValueError as error:
        raise UserError(f"precision {precision.name}: {error}") from error
    mixed = resident or paged
    columns = experts if mixed is None else mixed.cell_bound
    arena = SlotArena(layout, budget.slots, moe_layers, experts, cells=columns)
    arena.grant_kv_slots(budget.kv_slots)
    runner = make_runner(budget.slots, columns)
    if resident is not None:
        resident = bounded(resident, precision, runner, loaded.params)
    if text := note(precision, resident, layout, paged, dense_layers(loaded.store)):
        budget = dataclasses.replace(budget, notes=(*budget.notes, text))
    try:
        costly = any("costs" in policy.needs for policy in policies)
        controller = start_controller(
            runner,
            policies,
            max_model_len=length,
            max_num_seqs=seqs,
            seed=seed,
            resident=resident,
            paged=paged,
            routers=[run["router"] for run in loaded.params["runs"] if "router" in run],
            costs=calibration.costs_for(runner) if costly else None,
        )
    except BaseException as error:
        runner.delete()
        if isinstance(error, ValueError):
            raise UserError(str(error)) from error
        raise
    if paged is not None:
        cells = tuple(np.minimum(paged.cells.sum(axis=1), experts).tolist())
    else:
        cells = () if resident else cells_per_layer(budget.expert_slots, moe_layers, experts)
    scheduler = Scheduler(
        KVCache(arena, runner.read_pages, runner.write_pages, runner.move_pages, limits.swap_space),
        shapes,
        seqs,
        length,
        overflow=limits.kv_overflow,
        prefix_caching=limits.enable_prefix_caching,
        prefill_share=limits.long_prefill_token_threshold,
        # A prefill step with experts to move costs almost the same for one prompt as for many.
        admission=1 if min(cells, default=experts) == experts else -(-seqs // 4),
    )
    transitions = controller.transitions if controller.asks else None
    if transitions is None:
        resizer = Resizer(runner, scheduler)
    else:
        resizer = ResidentResizer(runner, scheduler, transitions=transitions)
    try:
        engine = Engine(
            runner,
            scheduler,
            Statistics(runner.link_bytes),
            eos_token_ids=config.eos_token_ids,
            seed=seed,
            listener=listener,
            control=control_of(runner, controller, resizer),
            resizer=resizer,
            hooks=hooks,
        )
        if paged is not None:
            cell_row, cell_version = arena.grant_versions(paged.cells.tolist())
            contents = {"cell_row": cell_row, "cell_version": cell_version}
            contents |= {"fill_version": paged.fill_version}
            if runner.layer_versions is not None:
                contents = runner.layer_versions.contents(contents)
            runner.tables = with_contents(runner.tables, contents)
        elif resident is None:
            runner.grant_cells(arena.grant_cells(cells))
        else:
            arena.grant_expert_slots(resident.slots)
            engine.statistics.copy_s_per_byte = place_experts(runner, place(resident))
        runner.wait_compiled()
    except BaseException:
        runner.delete()
        raise
    return engine, budget


def _free_memory(device: jax.Device, limits: Limits) -> FreeMemory | None:
    """What the device says it has; where it says nothing, None if the user gave a limit."""
    try:
        return free_memory(device)
    except RuntimeError as error:
        if limits.automatic:
            raise UserError(str(error)) from error
        return None


def step_shapes(
    layout: SlotLayout,
    *,
    rows: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    waves: int,
    bucketed: bool = False,
) -> StepShapes:
    """The start-up shapes for these limits. Attention reads whole spans, so the block table is
    whole spans wide; a prefill step is at least one chunk and no more than all prompts can fill.
    bucketed: decode is also compiled for fewer rows, since a kernel's grid is static."""
    spans = -(-max_model_len // SPAN)
    chunks = min(max_num_batched_tokens // PREFILL_CHUNK, rows * -(-max_model_len // PREFILL_CHUNK))
    if rows > DECODE_TILE or bucketed:
        rows = -(-rows // DECODE_TILE) * DECODE_TILE
    buckets = [rows]
    while bucketed and buckets[0] > DECODE_TILE:
        buckets.insert(0, -(-buckets[0] // (2 * DECODE_TILE)) * DECODE_TILE)
    return StepShapes(
        rows=rows,
        buckets=tuple(buckets),
        chunk=PREFILL_CHUNK,
        prefill_chunks=max(chunks, 1),
        blocks=spans * (SPAN // layout.page.block_size),
        waves=waves,
    )


def without_kernel(config: ModelConfig) -> dict[str, str]:
    """The ops whose Pallas kernel this model cannot use, and why; the reference runs instead, as
    the log and `stats` say."""
    page = KVPage(BLOCK_SIZES[0], config.kv_heads, config.kv_width, config.kv_latent)
    reasons = {
        "route": route_why_not(config.route_rule),
        "paged_attention": attention_why_not(page),
    }
    return {op: reason for op, reason in reasons.items() if reason is not None}


def decodes_in_buckets(config: ModelConfig, ops: Ops) -> bool:
    """Whether decode is compiled for fewer rows too: where kernels compute every product. Those of
    XLA are held to one number of rows (contract 1e): in another program the same product is fused
    with other neighbours."""
    products = {ops.linear, ops.expert_ffn, ops.paged_attention}
    return (products | {ops.head_linear} if config.mla else products) == {"pallas"}


def ops_in_use(config: ModelConfig, ops: Ops) -> dict[str, str]:
    """Op → implementation, of the ops that this model's steps have."""
    names = {key for run in config.runs for key in layer_params(config, run.moe)}
    unused = {"kv_write"} if config.mla else {"latent_write", "head_linear"}
    if "input_norm_bias" not in names:
        unused.add("layer_norm")
    elif not any(name in names for name in ("q_norm", "q_a_norm")):
        unused.add("rms_norm")
    return {op: name for op, name in dataclasses.asdict(ops).items() if op not in unused}
