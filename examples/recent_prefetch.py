"""A policy in one file: prefetch the experts that the last few steps used.

    python examples/recent_prefetch.py

docs/extending/write_a_policy.md goes through it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, Stage


@dataclasses.dataclass(frozen=True)
class RecentPrefetch:
    """Wants every expert resident that one of the last `window` steps used, those first that most
    rows were routed to."""

    window: int = 4

    moments: frozenset[Moment] = frozenset({Moment.STEP_END})
    needs: frozenset[str] = frozenset({"counts"})
    writes: frozenset[str] = frozenset({"stages"})

    def init(self, spec: Spec) -> tuple[np.ndarray, ...]:
        """The counts int32[L, E] of the last steps: none yet."""
        return ()

    def decide(
        self, state: tuple[np.ndarray, ...], observation: Observation
    ) -> tuple[tuple[np.ndarray, ...], Decision]:
        state = (*state, observation.counts)[-self.window :]
        total = np.sum(state, axis=0)
        layer, expert = np.nonzero(total)
        order = np.argsort(-total[layer, expert], kind="stable")
        wanted = tuple(Stage(int(layer[i]), int(expert[i]), cause="recent") for i in order)
        return state, Decision(stages=wanted)


if __name__ == "__main__":
    from moejax import LLM, SamplingParams

    with LLM("demo", expert_budget="40%", policies=[RecentPrefetch()], progress=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=64)
        (out,) = llm.generate("The old house", params)
        print(out.outputs[0].text)
        print(llm.stats()["control"]["transfers"])
