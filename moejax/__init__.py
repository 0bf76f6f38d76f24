"""moejax runs Mixture-of-Experts models that are larger than the GPU's memory, in JAX. The output
has the same bits as if everything fitted.

    from moejax import LLM, SamplingParams

    with LLM("demo", expert_budget="25%") as llm:
        for out in llm.generate(["The old house"], SamplingParams(max_tokens=64)):
            print(out.outputs[0].text)
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from host_offload.memory.budget import ArenaTooSmall, BudgetError
    from moejax.errors import UserError
    from moejax.evaluate.experiments.grid import ablate
    from moejax.requests.outputs import CompletionOutput, Logprob, RequestOutput
    from moejax.requests.sampling_params import SamplingParams
    from moejax.requests.structured_outputs import StructuredOutputsParams
    from moejax.serve.async_llm import AsyncLLM
    from moejax.serve.engine_thread import EngineDeadError
    from moejax.serve.llm import LLM

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
    "StructuredOutputsParams",
    "UserError",
    "ablate",
]

_HOMES = {
    "LLM": "moejax.serve.llm",
    "ablate": "moejax.evaluate.experiments.grid",
    "AsyncLLM": "moejax.serve.async_llm",
    "EngineDeadError": "moejax.serve.engine_thread",
    "SamplingParams": "moejax.requests.sampling_params",
    "RequestOutput": "moejax.requests.outputs",
    "StructuredOutputsParams": "moejax.requests.structured_outputs",
    "CompletionOutput": "moejax.requests.outputs",
    "Logprob": "moejax.requests.outputs",
    "UserError": "moejax.errors",
    "BudgetError": "host_offload.memory.budget",
    "ArenaTooSmall": "host_offload.memory.budget",
}


def __getattr__(name: str):
    # jax takes a second to import; `moejax --help` should not wait for it.
    if name == "__version__":
        return metadata.version("moejax")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'moejax' has no attribute {name!r}")
