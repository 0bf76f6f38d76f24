"""Small engines of the demo's shape in two versions, for tests of transitions."""

from __future__ import annotations

import dataclasses

import jax

from host_offload.policies.precision.names import Precision
from moejax.cache import use_compilation_cache
from moejax.checkpoints.random_model import random_model, shape
from moejax.engine.loop import Engine
from moejax.start.build import Limits, start_engine
from moejax.start.precision import with_precision
from pallas_kernels import parse_ops


def start_precision(
    driver: str, precision: Precision, limits: Limits, *, layers: int, slots: int
) -> Engine:
    """slots: of experts."""
    config = shape("demo", layers=layers)
    loaded = with_precision(random_model(config, "bfloat16"), precision)
    layout = config.slot_layout(2, precision.versions)
    use_compilation_cache(None)
    engine, _ = start_engine(
        loaded,
        dataclasses.replace(limits, expert_budget=slots * layout.slot_bytes),
        policies=precision.policies,
        precision=precision,
        driver=driver,
        ops=parse_ops("auto"),
        device=jax.devices()[0],
        seed=0,
        listener=None,
    )
    return engine
