"""moejax: Mixture-of-Experts models larger than the GPU's memory, in JAX, with the same output
bits as if everything fitted.

    from moejax import LLM, SamplingParams

    with LLM("demo", expert_budget="25%") as llm:
        for out in llm.generate(["The old house"], SamplingParams(max_tokens=64)):
            print(out.outputs[0].text)
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from host_offload.budget import ArenaTooSmall, BudgetError
    from moejax.async_llm import AsyncLLM
    from moejax.engine_thread import EngineDeadError
    from moejax.errors import UserError
    from moejax.llm import LLM
    from moejax.outputs import CompletionOutput, Logprob, RequestOutput
    from moejax.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "ArenaTooSmall",
    "AsyncLLM",
    "BudgetError",
    "CompletionOutput",
    "EngineDeadError",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "UserError",
]

_HOMES = {
    "LLM": "moejax.llm",
    "AsyncLLM": "moejax.async_llm",
    "EngineDeadError": "moejax.engine_thread",
    "SamplingParams": "moejax.sampling_params",
    "RequestOutput": "moejax.outputs",
    "CompletionOutput": "moejax.outputs",
    "Logprob": "moejax.outputs",
    "UserError": "moejax.errors",
    "BudgetError": "host_offload.budget",
    "ArenaTooSmall": "host_offload.budget",
}


def __getattr__(name: str):
    # jax takes a second to import; `moejax --help` should not wait for it.
    if name == "__version__":
        return metadata.version("moejax")
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'moejax' has no attribute {name!r}")
