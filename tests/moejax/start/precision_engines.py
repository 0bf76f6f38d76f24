"""Small engines of the demo's shape in two versions, for tests of transitions."""

from __future__ import annotations

import dataclasses

import jax

from host_offload.policies.precision.names import Precision
from moejax.cache import use_compilation_cache
from moejax.checkpoints.random_model import random_model, shape
from moejax.checkpoints.versions import with_versions
from moejax.engine.loop import Engine
from moejax.start.build import start_engine
from moejax.start.options import Options


def start_precision(
    driver: str, precision: Precision, options: Options, *, layers: int, slots: int
) -> Engine:
    """slots: of experts."""
    config = shape("demo", layers=layers)
    loaded = with_versions(random_model(config, "bfloat16"), precision.versions)
    layout = config.slot_layout(2, precision.versions)
    use_compilation_cache(None)
    options = dataclasses.replace(
        options, expert_budget=slots * layout.slot_bytes, precision=precision, driver=driver
    )
    return start_engine(loaded, options, jax.devices()[0])[0]
