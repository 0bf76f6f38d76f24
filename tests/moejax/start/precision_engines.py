"""Small engines of the demo's shape in two versions, and jobs for them."""

from __future__ import annotations

import jax

from host_offload.policies.precision.precision_names import Precision
from moejax import SamplingParams
from moejax.cache import use_compilation_cache
from moejax.checkpoints.random_model import random_model, shape
from moejax.checkpoints.versions import with_versions
from moejax.engine.loop import Engine
from moejax.start.build import start_engine
from moejax.start.decide.start_plan import StartPlan
from moejax.start.options import Config
from tests.moejax.engine_runs import Job

LAYERS, EXPERTS = 2, 16

LIMITS = Config.of(
    "demo",
    max_model_len=192,
    max_num_seqs=3,
    max_num_batched_tokens=192,
    # A shared prefix was computed in the versions of an earlier run.
    enable_prefix_caching=False,
)

GREEDY = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)

JOBS = [
    Job(tuple(range(7 * i + 5, 7 * i + 25 + 30 * i)), GREEDY, arrival=(0, 3, 9)[i])
    for i in range(3)
]


def start_precision(
    driver: str, precision: Precision, options: Config, *, layers: int, slots: int
) -> Engine:
    """slots: of experts."""
    return start_planned(driver, precision, options, layers=layers, slots=slots)[0]


def start_planned(
    driver: str, precision: Precision, options: Config, *, layers: int, slots: int
) -> tuple[Engine, StartPlan]:
    """The same, with what was decided."""
    config = shape("demo", layers=layers)
    loaded = with_versions(random_model(config, "bfloat16"), precision.versions)
    layout = config.slot_layout(2, precision.versions)
    use_compilation_cache()
    options = options.replace_options(
        expert_budget=slots * layout.slot_bytes, precision=precision, driver=driver
    )
    return start_engine(loaded, options, jax.devices()[0])
