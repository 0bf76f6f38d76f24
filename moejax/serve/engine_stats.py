"""What an engine ran and what it cost, as plain data."""

from __future__ import annotations

from typing import Any

import jax

from moejax.engine.loop import Engine
from moejax.engine.statistics import arena_stats, kv_stats
from moejax.start.decide.shapes import ops_in_use
from moejax.start.report.start_times import StartTimes


def engine_stats(engine: Engine, start: StartTimes) -> dict[str, Any]:
    """The part of LLM.stats() that the engine knows."""
    runner, seconds = engine.runner, engine.statistics.seconds
    return {
        "jax": jax.__version__,
        "ops": ops_in_use(runner.config, runner.ops),
        "driver": runner.driver,
        "trace_arrays": sorted(runner.trace_arrays),
        "control": None if engine.control is None else engine.control.stats(),
        **engine.statistics.summary(),
        "arena": arena_stats(engine.scheduler, runner.tables),
        "kv": kv_stats(engine.scheduler),
        "store_bytes": runner.store.nbytes,
        "time": {
            **start.report(),
            "compile_s": runner.compile_s,
            "prefill_s": seconds["prefill"],
            "decode_s": seconds["decode"],
            "total_s": start.total_s + sum(seconds.values()),
        },
    }
