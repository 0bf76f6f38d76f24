"""What a start would decide by config, headers and device alone. Reads no weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from host_offload.memory.device_memory import FreeMemory
from host_offload.memory.store import ExpertStore, StoredVersion
from host_offload.policies.precision.precision_names import CHECKPOINT
from host_offload.versions.layer_versions import layers_above
from moejax.checkpoints.load import require_predictor, require_records, run_dtype
from moejax.checkpoints.random_model import abstract_params, expert_layout
from moejax.models.config import ModelConfig
from moejax.models.hub import model_directory
from moejax.start.auto import with_auto
from moejax.start.choices import Settings
from moejax.start.decide.drafter import (
    beside_drafter,
    choose_device,
    drafter_options,
    drafts_itself,
)
from moejax.start.decide.facts import ModelFacts, bytes_of, device_facts
from moejax.start.decide.split import find_costs
from moejax.start.decide.start_plan import StartPlan, decide, step_spec
from moejax.start.decide.store_choice import store_builder
from moejax.start.decide.transfers import automatic, reads_codes
from moejax.start.options import Config
from moejax.start.report.model_info import in_codes, read_headers
from moejax.start.settings import settings_of
from moejax.start.tiers import measure_rates


def dry_run(options: Config) -> tuple[StartPlan, tuple[str, ...]]:
    """Returns the plan of LLM.from_config(options), and what the plan assumes. Raises UserError,
    BudgetError or ArenaTooSmall like LLM.from_config, except for errors found in the weights alone.
    """
    settings, own = settings_of(options), drafter_options(options)
    memory = options.memory
    if own is None or (memory.memory is None and memory.store.host_memory is None):
        return _plan_alone(settings)
    drafter, _ = _plan_alone(settings_of(own), drafts_itself(options))
    with beside_drafter(settings, drafter, choose_device(settings).platform) as (beside, notes):
        plan, assumed = _plan_alone(beside)
    return plan, (*assumed, *notes)


def _plan_alone(settings: Settings, predictor: bool = False) -> tuple[StartPlan, tuple[str, ...]]:
    """dry_run of a model without the one that drafts for it.

    - `predictor`: whether the model is the checkpoint's layer that predicts a further token.
    """
    options = settings.options
    where = options.model
    if predictor:
        require_predictor(model_directory(where.model))
    config, weights = read_headers(where.model, where.step, where.name_map, predictor)
    settings = settings.of_model(*config.expert_layers)
    dense_layers = {} if weights is None else weights.dense_layers
    chosen = choose_device(settings)
    model = facts_without_weights(
        config,
        options.model.dtype,
        settings.versions,
        dense_layers.get("lossless12", ()),
        in_files=options.memory.store.name == "file",
        coded=weights.coded if weights and reads_codes(settings, chosen.platform) else {},
    )
    assumed = ["the weights are what config and headers say"]
    if "lossless12" in settings.versions and "lossless12" not in dense_layers:
        assumed.append("no expert overflows lossless12; a layer that has one would stay dense")
    store_builder(settings, chosen.platform)  # which refuses what cannot be
    kind = "moejax-orbax" if weights is None else weights.format
    if options.memory.store.name == "file":
        require_records(options.model.model, kind)
    verified = options.memory.store.verify and kind == "moejax-orbax"
    model = dataclasses.replace(model, verified=verified)
    of_memory = automatic(settings, chosen.platform)
    device = device_facts(chosen, automatic=of_memory)
    if device.memory is not None:
        free = FreeMemory(max(device.memory.free - model.param_bytes, 0))
        device = dataclasses.replace(device, memory=free)
        if of_memory:
            assumed.append(
                f"the device's free memory is as now, less {model.param_bytes} bytes of "
                "parameters; what steps need is not measured, a share is left for it"
            )
    if settings.tiers is not None:
        rates = measure_rates(step_spec(settings, model, device), chosen)
        device = dataclasses.replace(device, rates=rates)
    costs = None
    if settings.needs_costs:
        costs = find_costs(step_spec(settings, model, device))
    return with_auto(decide(settings, model, device, costs)), tuple(assumed)


def facts_without_weights(
    config: ModelConfig,
    dtype: str,
    versions: Sequence[str],
    dense_layers: Sequence[int] = (),
    *,
    in_files: bool = False,
    coded: Mapping[str, dict[str, int]] | None = None,
) -> ModelFacts:
    """Returns ModelFacts of a checkpoint with these versions.

    - `dense_layers`: MoE layers that lossless12 cannot hold.
    - `in_files`: whether experts stay in files.
    - `coded`: Weights.coded, for a run that keeps those matrices so.
    """
    dense, named = expert_layout(config, dtype), run_dtype(dtype, config.dtype or "bfloat16")
    kept, layers = [*versions], {}
    if CHECKPOINT in kept:
        kept[:1] = config.expert_layers
    if {*config.expert_layers} <= {*kept} and len(config.expert_layers) > 1:
        layers = {**config.expert_layers}
    if dense_layers and "lossless12" in kept and "dense" not in kept:
        kept.insert(kept.index("lossless12") + 1, "dense")
        held = (i for i in range(sum(config.moe_layers)) if i not in dense_layers)
        layers = {"lossless12": tuple(held), "dense": tuple(dense_layers)}
    layouts = {
        version: dense
        if version == "dense"
        else dataclasses.replace(dense, version=version, dtype=named)
        for version in kept
    }
    store = ExpertStore(
        {v: StoredVersion(layout, layers=layers.get(v, ())) for v, layout in layouts.items()}
    )
    if CHECKPOINT in versions:
        some = layers_above(store, layouts[kept[-1]])
        if len(some) < sum(config.moe_layers):
            low = StoredVersion(layouts[kept[-1]], layers=some)
            store = ExpertStore(store.versions | {kept[-1]: low})
    count = sum(config.moe_layers) * config.num_experts if in_files else 0
    file_bytes = sum(count * layout.nbytes for layout in store.layouts.values())
    params = abstract_params(config, dtype)
    params = in_codes(params, (coded or {}).get(named, {}))
    return ModelFacts(config, named, store, *bytes_of(params), file_bytes)
