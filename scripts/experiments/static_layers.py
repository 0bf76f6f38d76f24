"""Static layer offload."""

from __future__ import annotations

import dataclasses

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, Stage


@dataclasses.dataclass(frozen=True)
class StaticLayers:
    """As many whole layers in device memory as there are cells for, the others never cached: what
    vLLM does with `--cpu-offload-gb` (WiSP, section 5.2, "static offload";
    docs/explanation/policies.md). vLLM offloads from the first layer on, so the last ones are
    resident. What is left over of a layer's cells stays unused. It writes `cells`, which KV may
    defer.
    """

    moments: frozenset[Moment] = frozenset({Moment.STEP_BEGIN})
    needs: frozenset[str] = frozenset({"cells"})
    writes: frozenset[str] = frozenset({"cells", "fill_version", "stages"})

    def init(self, spec: Spec) -> tuple[int, int]:
        """(experts of a layer, whole layers so far: none decided)."""
        if spec.cell_bound < spec.experts:
            raise ValueError(
                f"a layer can have {spec.cell_bound} cells and has {spec.experts} experts, so none "
                "can be whole"
            )
        return spec.experts, -1

    def decide(self, state: tuple[int, int], seen: Observation) -> tuple[tuple[int, int], Decision]:
        experts, before = state
        layers = len(seen.cells)
        whole = int(seen.cells.sum()) // experts
        if whole == before:
            return state, Decision()
        resident = np.arange(layers) >= layers - whole
        stages = (
            Stage(layer, e, cause="static")
            for layer in range(layers - whole, layers)
            for e in range(experts)
        )
        return (experts, whole), Decision(
            cells=np.where(resident, experts, 0),
            fill_version=np.repeat(np.where(resident, 0, -1)[:, None], experts, axis=1),
            stages=tuple(stages),
        )
