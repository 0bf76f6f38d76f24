"""Builds an engine that can run from a loaded checkpoint: probe, decide, build."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np

from host_offload.control.control import Control
from host_offload.control.controller import Controller, Decided, Event
from host_offload.control.rules import search_of
from host_offload.memory.arena import ArenaError, SlotArena
from host_offload.memory.budget import ArenaTooSmall
from host_offload.memory.kv_cache import KVCache
from host_offload.memory.placement import ResidentSpec, place
from host_offload.policies.placement.placement_names import said
from host_offload.policies.placement.placement_policy import PlacementPolicy
from host_offload.simulate.auto import Auto
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.engine.control import control_of
from moejax.engine.drafts import Drafts, NgramDrafts
from moejax.engine.loop import Engine
from moejax.engine.model_drafts import ModelDrafts
from moejax.engine.predicted_drafts import PredictedDrafts
from moejax.engine.residency_planner import ResidencyPlanner
from moejax.engine.resize import ArenaResizer, ResidentResizer
from moejax.engine.scheduler import Scheduler
from moejax.engine.statistics import Statistics
from moejax.errors import UserError, fallbacks, user_errors
from moejax.start.auto import recall_drafts, with_auto
from moejax.start.choices import Settings
from moejax.start.decide.facts import device_facts, facts_of
from moejax.start.decide.start_plan import StartPlan, decide, divide, step_spec
from moejax.start.decide.transfers import add_packed_layout, automatic
from moejax.start.kernels import (
    KernelChoice,
    are_checked,
    choose_kernels,
    known_outcomes,
    native_note,
    verify_kernels,
)
from moejax.start.option_values import Speculation
from moejax.start.options import Config
from moejax.start.probe import find_activation_bytes, step_costs
from moejax.start.settings import settings_of
from moejax.start.tiers import measure_rates
from moejax.step.executor import Executor
from moejax.step.step_parts import StepSpec
from moejax.traces.tracer import Tracer, start_trace

if TYPE_CHECKING:
    from moejax.models.model_config import ModelConfig
    from moejax.requests.tokenizer import Tokenizer

log = logging.getLogger("moejax")


def start_engine(
    loaded: LoadedModel,
    options: Config | Settings,
    device: jax.Device,
    *,
    tokenizer: Callable[[], Tokenizer | None] = lambda: None,
    check: bool = True,
    drafter: Engine | None = None,
) -> tuple[Engine, StartPlan]:
    """Builds the engine of a loaded model and returns it with its plan.

    - `loaded`: a model with the versions of the options' precision
      (moejax.checkpoints.versions.with_versions).
    - `tokenizer`: called when everything is decided.
    - `check`: whether kernels run only if checks found them right on this device.
    - `drafter`: runs the draft model of the options, or the layer that predicts further tokens.

    Raises UserError, BudgetError or ArenaTooSmall. The model is freed if the build fails.
    """
    settings = options if isinstance(options, Settings) else settings_of(options)
    drafts = _drafts(settings.options.runtime.speculative_config, loaded.config, drafter)
    own = loaded.config.expert_layers
    settings = settings.of_model(
        *(own if own.keys() <= loaded.store.layouts.keys() else ("dense",))
    )
    loaded = add_packed_layout(loaded, settings, device.platform)
    if settings.needs_costs or settings.tiers is not None:  # which are measured
        loaded.store.wait()
    most: int | None = None
    while True:
        plan = probe_plan(loaded, settings, device, check=check, most=most)
        try:
            engine = build(plan, loaded, device, tokenizer, drafts)
            break
        except ArenaError as error:
            if not automatic(settings, device.platform):
                raise UserError(f"{error}; lower memory (--memory)") from error
            most = error.nbytes * 7 // 8
            fallbacks.warning("%s\nit is tried again with an eighth less", error)
    rope = plan.steps.config.rope
    if rope.long:
        log.info(
            "longrope: long factors for every prompt, as max_model_len %d is more than the "
            "original context length; %d or less takes the short ones",
            plan.max_model_len,
            rope.original_max_position_embeddings,
        )
    if note := native_note(plan.steps, device.platform):
        log.info(note)
    for note in plan.budget.notes:
        # A user must see without a log what they asked for and do not get.
        log.log(logging.WARNING if ", cut from" in note else logging.INFO, note)
    return engine, plan


def probe_plan(
    loaded: LoadedModel,
    settings: Settings,
    device: jax.Device,
    *,
    check: bool = True,
    most: int | None = None,
) -> StartPlan:
    """Returns the plan of a start on this device. Measures what the plan depends on first: the
    memory that steps need, if nothing else limits the arena, and the costs of steps, if policies
    ask for them.

    - `check`: see start_engine.
    - `most`: see FreeMemory.
    """
    of_memory = automatic(settings, device.platform)
    unread = loaded.store.unread
    model, facts = facts_of(loaded), device_facts(device, automatic=of_memory)
    if (found := facts.memory) is not None:
        found = dataclasses.replace(found, free=max(found.free - unread, 0), most=most)
        facts = dataclasses.replace(facts, memory=found)
    steps = step_spec(settings, model, facts)
    if settings.tiers is not None:
        facts = dataclasses.replace(facts, rates=measure_rates(steps, device))
    experts = steps.config.num_experts
    bound = 2 * experts if steps.window else experts

    def smallest() -> Executor:
        runner = make_runner(steps, loaded, device, slots=1, bound=bound)
        if any({"stages", "transitions"} & policy.writes for policy in settings.policies):
            runner.prepare_stages()
        if (search := search_of(settings.policies)) is not None:
            runner.hold_maps(search)
        return runner

    kernels: KernelChoice | None = None

    def choose_ops(arena_bytes: int) -> None:
        """Chooses the kernels of the steps for an arena of this size."""
        nonlocal facts, steps, kernels
        if not (check and are_checked(device)):
            return
        bare = facts

        def specify(declined: Mapping[str, str]) -> StepSpec:
            return step_spec(settings, model, dataclasses.replace(bare, declined=declined))

        kernels = choose_kernels(specify, settings.ops, known_outcomes(device), arena_bytes)
        facts = dataclasses.replace(facts, declined=kernels.declined)
        steps = specify(kernels.declined)
        verify_kernels(steps, device, arena_bytes)

    budget, memory = None, facts.memory
    try:
        budget = divide(settings, model, facts, steps, memory).budget
    except ArenaTooSmall:
        if memory is None or not of_memory:
            raise
    # Before anything is compiled of them.
    choose_ops(0 if budget is None else budget.slots * steps.layout.slot_bytes)
    if memory is not None and of_memory and (budget is None or budget.cut):
        # Leave exactly what steps need.
        memory = dataclasses.replace(memory, activations=find_activation_bytes(steps, smallest))
        budget = divide(settings, model, facts, steps, memory).budget
        choose_ops(budget.slots * steps.layout.slot_bytes)
    assert budget is not None
    facts, slots = dataclasses.replace(facts, memory=memory), budget.slots
    costs = None
    if settings.needs_costs:
        # Measure each processor alone. A stated link says itself how long a load takes.
        alone = steps
        if steps.second is not None:
            alone = dataclasses.replace(steps, second=None, queue=None)
        costs = step_costs(
            alone, lambda: make_runner(alone, loaded, device, slots=slots, bound=bound)
        )
    plan = dataclasses.replace(decide(settings, model, facts, costs), kernels=kernels)
    return with_auto(plan)


def make_runner(
    steps: StepSpec, loaded: LoadedModel, device: jax.Device, *, slots: int, bound: int
) -> Executor:
    """Makes a runner of these steps.

    - `slots`: slots of its arena.
    - `bound`: most cells of a layer.
    """
    return Executor(
        loaded.params,
        loaded.store,
        steps,
        device,
        slots=slots,
        cells=bound,
    )


def build(
    plan: StartPlan,
    loaded: LoadedModel,
    device: jax.Device,
    tokenizer: Callable[[], Tokenizer | None] = lambda: None,
    drafts: Drafts | None = None,
) -> Engine:
    """Builds the engine of a plan: allocates the arena, places the experts, compiles what a first
    request needs. If this fails, it frees everything that the model holds.

    - `tokenizer`: called while steps compile.
    """
    runner = make_runner(
        plan.steps, loaded, device, slots=plan.budget.slots, bound=plan.spec.cell_bound
    )
    try:
        return _engine(plan, loaded, runner, tokenizer(), drafts)
    except BaseException:
        runner.delete()
        raise


def _engine(
    plan: StartPlan,
    loaded: LoadedModel,
    runner: Executor,
    tokenizer: Tokenizer | None,
    drafts: Drafts | None,
) -> Engine:
    options, spec = plan.settings.options, plan.spec
    arena = SlotArena(
        plan.steps.layout, plan.budget.slots, spec.layers, spec.experts, cells=spec.cell_bound
    )
    arena.grant_kv_slots(plan.budget.kv_slots)
    if not plan.steps.awaits_experts:
        loaded.store.wait()
    _grant(plan, arena, runner)
    cache = KVCache(
        arena, runner.read_pages, runner.write_pages, runner.move_pages, options.memory.swap_space
    )
    scheduler = Scheduler(
        cache,
        plan.steps.shapes,
        plan.max_num_seqs,
        plan.max_model_len,
        overflow=options.memory.kv_overflow,
        prefix_caching=options.memory.enable_prefix_caching,
        prefill_share=options.runtime.long_prefill_token_threshold,
        admission=plan.admission,
    )
    tracer: Tracer | None = None

    def record_event(event: Event) -> None:
        if isinstance(event, Decided) and event.decision.note is not None:
            log.info("policy %s, step %d: %s", event.policy, event.step, event.decision.note)
        if tracer is not None:
            tracer.event(event)

    if drafts is not None:
        drafts.costs = spec.costs
        recall_drafts(plan, drafts)
    control, resizer = _control(plan, loaded, runner, scheduler, record_event)
    runner.wait_compiled()
    loaded.store.check()
    # Last, so that a start that fails leaves no trace directory, which the next one must not find.
    tracer = _tracer(plan, runner)
    return Engine(
        runner,
        scheduler,
        Statistics(runner.link_bytes),
        eos_token_ids=plan.steps.config.eos_token_ids,
        seed=options.runtime.seed,
        control=control,
        resizer=resizer,
        tracer=tracer,
        tokenizer=tokenizer,
        planner=_planner(plan, runner, scheduler),
        drafts=drafts,
    )


def _drafts(
    speculation: Speculation | None, config: ModelConfig, drafter: Engine | None
) -> Drafts | None:
    """Raises UserError for a draft model that does not fit the model."""
    if speculation is None:
        return None
    s = speculation
    if s.method == "ngram":
        lengths = s.num_speculative_tokens, s.prompt_lookup_max, s.prompt_lookup_min
        return NgramDrafts(*lengths, adaptive=s.adaptive)
    if drafter is None:
        why = f"this command does not draft by {s.method}; use method ngram"
        raise UserError(f"speculative_config: {why}")
    if s.model is None:
        return PredictedDrafts(s.num_speculative_tokens, drafter, adaptive=s.adaptive)
    own, needed = drafter.runner.config.vocab_size, config.vocab_size
    if own != needed:
        raise UserError(
            f"speculative_config: the draft model {s.model} has a vocabulary of {own} tokens, the "
            f"model {needed}; use a draft model with the same tokens"
        )
    if drafter.scheduler.page.state_pages:
        raise UserError(
            f"speculative_config: {drafter.runner.config.architecture}, whose attention keeps a "
            "state, cannot go back over its drafts; use another draft model"
        )
    return ModelDrafts(s.num_speculative_tokens, s.model, drafter, adaptive=s.adaptive)


def _grant(plan: StartPlan, arena: SlotArena, runner: Executor) -> None:
    """Gives the layers their cells, or gives every expert its fixed place in the arena or the
    store."""
    mixed = plan.mixed
    if plan.steps.in_place:
        start = np.zeros((plan.spec.layers, plan.spec.experts), np.int32)
        if isinstance(mixed, ResidentSpec):
            start[:] = mixed.start
        runner.set_tables({"fill_version": -1 - start})
    elif plan.window is not None:
        assert runner.stream is not None
        arena.grant_expert_slots(plan.window.slots)
        runner.stream.open(plan.window)
    elif isinstance(mixed, ResidentSpec):
        arena.grant_expert_slots(mixed.slots)
        runner.place(place(mixed))
    elif mixed is not None:
        cell_row, cell_version = arena.grant_versions(mixed.cells.tolist())
        contents = {"cell_row": cell_row, "cell_version": cell_version}
        runner.set_tables({**contents, "fill_version": mixed.fill_version})
    else:
        runner.grant_cells(arena.grant_cells(plan.cells))


def _planner(plan: StartPlan, runner: Executor, scheduler: Scheduler) -> ResidencyPlanner | None:
    """Returns the planner that moves experts between tiers while requests run, or None if the plan
    has none."""
    tiers, storage = plan.settings.tiers, plan.storage
    if tiers is None or storage is None or tiers.planner == "none":
        return None
    staggered = tiers.planner == "live"
    return ResidencyPlanner(runner, scheduler, storage, tiers.interval, staggered)


def _control(
    plan: StartPlan,
    loaded: LoadedModel,
    runner: Executor,
    scheduler: Scheduler,
    listener: Callable[[Event], None],
) -> tuple[Control | None, ArenaResizer]:
    """Returns the control that runs the policies (None without a policy) and the resizer for its
    budgets."""
    spec, policies = plan.spec, plan.settings.policies
    if any("router" in policy.needs for policy in policies):
        spec = dataclasses.replace(spec, router=router_weights(loaded))
    with user_errors():
        controller = Controller(spec, policies, listener=listener)
    resizer = ArenaResizer(runner, scheduler)
    if controller.moments and (transitions := controller.transitions) is not None:
        resizer = ResidentResizer(runner, scheduler, transitions=transitions)
    return control_of(runner, controller, resizer), resizer


def router_weights(loaded: LoadedModel) -> np.ndarray:
    """Returns the router weights of the MoE layers, float32[L, D, E], for policies that need
    `router`."""
    runs = [run["router"] for run in loaded.params["runs"] if "router" in run]
    return np.swapaxes(np.concatenate([np.asarray(run, np.float32) for run in runs]), 1, 2)


def _placement(plan: StartPlan) -> str | None:
    """Describes the placement with every cost that it uses, for a replay."""
    placements = [p for p in plan.settings.policies if isinstance(p, PlacementPolicy)]
    return said(placements[0], plan.spec) if placements else plan.settings.placement


def _tracer(plan: StartPlan, runner: Executor) -> Tracer | None:
    """Returns the tracer that writes every step into the directory that the options name, if they
    name one."""
    settings, options = plan.settings, plan.settings.options
    if options.runtime.trace is None:
        return None
    precision = settings.precision.report()
    if plan.spec.resident is not None:
        precision["start"] = plan.spec.resident.start.tolist()
    auto = next((p for p in settings.policies if isinstance(p, Auto)), None)
    arms = auto is not None and auto.ahead  # then they are auto's
    about = {
        "model": str(options.model.model),
        "eviction": settings.eviction,
        "prefetch": None if arms else options.policy.prefetch,
        "auto": None if auto is None else auto.said,
        "placement": None if arms else _placement(plan),
        "defer": 0 if plan.steps.second is None else plan.steps.second.defer,
        "placement_same_bits": plan.steps.second is None or plan.steps.second.keeps_outputs,
        "cache_aware_routing": plan.steps.cache_aware_routing,
        "precision": precision,
        "budgets": settings.budget_stats(),
    }
    arrays = settings.trace_arrays
    return start_trace(
        options.runtime.trace.directory, runner, plan.spec, settings=about, arrays=arrays
    )
