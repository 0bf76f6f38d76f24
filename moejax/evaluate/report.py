"""A result of `moejax eval` as plain data: the figures and all that they came from."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

from moejax.checkpoints.convert import installed_version
from moejax.evaluate.evaluation import Likelihood, PerplexityResult, TextLikelihood
from moejax.models.model_config import config_digest
from moejax.serve.llm import LLM

_VERSIONS = ("moejax", "jax", "jaxlib", "numpy", "tokenizers")


def result_json(llm: LLM, result: PerplexityResult) -> dict[str, Any]:
    """A result as plain data for JSON, with all that it came from.

    Everything outside of `run` says what was computed: no budget, policy, driver or other window
    changes it, unless `precision` says that it changes bits and mixes versions. `run` says how, and
    what it cost. prefill_tokens is a shape of XLA's matrix products, whose last bits depend on it.
    """
    runner, stats = llm.engine.runner, llm.stats()
    files = [{"name": text.name, "sha256": text.sha256, **_figures(text)} for text in result.texts]
    scheduler, cost = llm.engine.scheduler, result.cost
    return {
        "task": "perplexity",
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
        "prefill_tokens": scheduler.prefill_chunks * scheduler.chunk,
        "window": result.window,
        "stride": result.stride,
        "limit": result.limit,
        "data": {"sha256": _data_digest(result.texts), "texts": files},
        "total": _figures(result.total),
        "run": {
            "driver": stats["driver"],
            "eviction": stats["eviction"],
            "control": stats["control"],
            "max_model_len": scheduler.max_model_len,
            "max_num_seqs": scheduler.max_num_seqs,
            "arena": stats["arena"],
            "kv": stats["kv"],
            "store_bytes": stats["store_bytes"],
            **dataclasses.asdict(cost),
            "misses": cost.fills + cost.read_through,
            "hit_rate": cost.hits / cost.activations if cost.activations else None,
            "tokens_per_s": cost.tokens_per_s,
            "scored_tokens_per_s": cost.tokens_per_s
            * (result.total.scored_tokens / cost.computed_tokens),
            "notes": stats["notes"],
        },
    }


def _figures(found: Likelihood) -> dict[str, Any]:
    counts = {f.name: getattr(found, f.name) for f in dataclasses.fields(Likelihood)}
    bits = {"bits_per_token": found.bits_per_token, "bits_per_byte": found.bits_per_byte}
    return {**counts, **bits, "perplexity": found.perplexity}


def _data_digest(texts: Sequence[TextLikelihood]) -> str:
    """Names the texts in their order: SHA-256 of their digests, a line each."""
    return hashlib.sha256("".join(f"{text.sha256}\n" for text in texts).encode()).hexdigest()
