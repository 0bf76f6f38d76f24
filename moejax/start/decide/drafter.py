"""The model that drafts, and the device of a start, which has room for both models."""

from __future__ import annotations

import jax

from moejax.device import select_device
from moejax.start.choices import Settings
from moejax.start.decide.shapes import PREFILL_CHUNK
from moejax.start.decide.store_choice import estimate_arrays
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


def _estimate_drafter(options: Config) -> tuple[int, ...]:
    """Returns the bytes of the draft model's arrays of experts, as estimate_arrays does."""
    if (own := drafter_options(options)) is None:
        return ()
    return estimate_arrays(settings_of(own), layers=1 if drafts_itself(options) else None)
