"""The model that drafts, and the device of a start, which has room for both models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from host_offload.memory.budget import ArenaTooSmall, format_bytes
from moejax.checkpoints.random_model import abstract_params
from moejax.device import select_device
from moejax.errors import UserError
from moejax.start.choices import Settings
from moejax.start.decide.facts import bytes_of
from moejax.start.decide.shapes import PREFILL_CHUNK
from moejax.start.decide.start_plan import StartPlan
from moejax.start.decide.store_choice import estimate_arrays
from moejax.start.decide.transfers import cache_of
from moejax.start.option_values import Speculation
from moejax.start.options import Config
from moejax.start.settings import settings_of
from pallas_kernels.dispatch import KERNELS


def choose_device(settings: Settings) -> jax.Device:
    """Returns the device of a start. The first call in a process caps pinned memory for this start,
    so whatever may come before one chooses the device here, too. Raises UserError as
    select_device."""
    options = settings.options
    return select_device(
        options.runtime.device,
        options.runtime.threads,
        kernels=bool({"auto", *KERNELS} & {*settings.ops.values()}),
        arrays=(*estimate_arrays(settings), *_estimate_drafter(options)),
        kept=options.memory.swap_space,
    )


def drafts_itself(options: Config) -> bool:
    """Whether a layer of the checkpoint drafts."""
    speculation = options.runtime.speculative_config
    return speculation is not None and speculation.method == "mtp"


def drafter_options(options: Config) -> Config | None:
    """Returns the options of the model that drafts; None if there is none."""
    runtime = options.runtime
    if runtime.speculative_config is None or runtime.speculative_config.method == "ngram":
        return None
    if drafts_itself(options):
        return Config.of(
            options.model.model,
            dtype=options.model.dtype,
            tokenizer=options.model.tokenizer,
            max_model_len=options.model.max_model_len,
            max_num_seqs=runtime.max_num_seqs,
            max_num_batched_tokens=PREFILL_CHUNK,
            device=runtime.device,
            threads=runtime.threads,
            ops=runtime.ops,
            progress=runtime.progress,
            speculative_config=Speculation(),  # so that rows may be of one sequence
        )
    assert runtime.speculative_config.model is not None
    return Config.of(
        runtime.speculative_config.model,
        max_model_len=options.model.max_model_len,
        max_num_seqs=runtime.max_num_seqs,
        max_num_batched_tokens=runtime.max_num_batched_tokens,
        device=runtime.device,
        threads=runtime.threads,
        progress=runtime.progress,
    )


@contextmanager
def beside_drafter(
    settings: Settings, drafter: StartPlan | None, platform: str
) -> Iterator[tuple[Settings, tuple[str, ...]]]:
    """Yields (settings, notes) with what the model that drafts leaves of `memory`, if that is
    given, or of the store's host_memory, if that is no cache's. Raises ArenaTooSmall where that is
    too little, also from the block, and UserError where it leaves nothing of host_memory."""
    memory = settings.options.memory
    held = None if cache_of(settings, platform) else memory.store.host_memory
    given = memory.memory if held is None else held
    if drafter is None or given is None:
        yield settings, ()
        return
    budget, layout = drafter.budget, drafter.steps.layout
    taken = (budget.slots + budget.in_place) * layout.slot_bytes
    name = "memory" if held is None else "host_memory"
    if held is not None:
        taken = budget.slots * layout.slot_bytes + _model_bytes(drafter)
    note = f"the model that drafts takes {format_bytes(taken)} of {name} {format_bytes(given)}"
    if held is not None and held <= taken:
        raise UserError(f"{note}; raise it")
    left = max(given - taken, 1)  # too little for every model, whose refusal says what works
    if held is None:
        memory = dataclasses.replace(memory, memory=left)
    else:
        store = dataclasses.replace(memory.store, host_memory=left)
        memory = dataclasses.replace(memory, store=store)
    options = dataclasses.replace(settings.options, memory=memory)
    try:
        yield dataclasses.replace(settings, options=options), (note,)
    except ArenaTooSmall as error:
        least = error.smallest_bytes
        if options.memory.kv_budget is None and held is None:  # else it is of that
            least += taken
            note = f"{note}; memory of {least} bytes works for both"
        raise ArenaTooSmall(
            f"{note}. Of what is left: {error}", least, error.largest_model_len
        ) from error


def _model_bytes(plan: StartPlan) -> int:
    """Returns the bytes of a model's parameters, as far as they are not in codes, and of its
    experts."""
    _, beside = bytes_of(abstract_params(plan.steps.config, plan.settings.options.model.dtype))
    experts = plan.spec.layers * plan.spec.experts
    return beside + experts * sum(record.nbytes for record in plan.steps.layout.records)


def _estimate_drafter(options: Config) -> tuple[int, ...]:
    """Returns the bytes of the draft model's arrays of experts, as estimate_arrays does."""
    if (own := drafter_options(options)) is None:
        return ()
    return estimate_arrays(settings_of(own), layers=1 if drafts_itself(options) else None)
