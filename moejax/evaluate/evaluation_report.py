"""What the reports of all evaluations say of the model and of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moejax.checkpoints.conversion import installed_version
from moejax.models.model_config import config_digest

if TYPE_CHECKING:
    from moejax.serve.llm import LLM

_VERSIONS = ("moejax", "jax", "jaxlib", "numpy", "tokenizers")


def model_report(llm: LLM) -> dict[str, Any]:
    """What was evaluated and by what, as plain data for JSON: whatever may change a bit of the
    figures. prefill_tokens is a shape of XLA's matrix products, whose last bits depend on it."""
    runner, stats, scheduler = llm.engine.runner, llm.stats(), llm.engine.scheduler
    return {
        "model": {
            "path": llm.model,
            "config_digest": config_digest(llm.config),
            "dtype": llm.dtype,
            "experts": {record.version: record.nbytes for record in runner.layout.records},
            "precision": {
                **llm.plan.settings.precision.report(),
                "quantizers": stats["precision"]["quantizers"],
            },
        },
        "versions": {name: installed_version(name) for name in _VERSIONS},
        "device": stats["device"],
        "ops": stats["ops"],
        "cache_aware_routing": stats["cache_aware_routing"],
        "prefill_tokens": scheduler.prefill_chunks * scheduler.chunk,
    }


def run_report(llm: LLM) -> dict[str, Any]:
    """What was chosen for speed, as plain data for JSON."""
    stats, scheduler = llm.stats(), llm.engine.scheduler
    return {
        **{name: stats[name] for name in ("driver", "eviction", "control")},
        "max_model_len": scheduler.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        **{name: stats[name] for name in ("arena", "kv", "store_bytes", "notes")},
    }
