"""What a step costs whose experts are in several versions, from the costs of each version alone.

docs/cost_model.md says how and what is left out. With all experts in one version everything here is
this version's own cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from host_offload.sizing.cost_model import MOVES, CostError, CostModel, StepCost, Work


class VersionCounts(NamedTuple):
    """In which versions one step computed and moved its experts: L layers, V versions. Sums over
    versions are the step's own counts."""

    version: np.ndarray
    """int32[L, E]: the version that each needed expert was computed in; 0 for all others."""
    fills: np.ndarray
    """int64[L, V]: experts moved into a cell, by the version that moved."""
    read_through: np.ndarray
    """int64[L, V]"""
    staged: np.ndarray
    """int64[L, V]"""


def models_of(
    costs: CostModel | Mapping[str, CostModel], sizes: Mapping[str, np.ndarray]
) -> tuple[CostModel, ...]:
    """The cost model of each version of a run, by version number.

    costs: of the run's one version, or by version. sizes: version → int64[L], bytes of an expert,
    in the order of their numbers; empty: one version whose name is not known.

    Raises CostError where a version has no costs, where they are of experts of another size, and
    where models are of different shapes.
    """
    names = list(sizes)
    if isinstance(costs, CostModel):
        if len(names) > 1:
            raise CostError(
                f"the run mixes {' and '.join(names)}, and these costs are of one version; give "
                "those of each, {version: costs}, which `moejax calibrate --precision VERSION` "
                "measures"
            )
        return (costs,)
    if not names:
        if len(costs) != 1:
            raise CostError("the trace does not say its versions; give the costs of one")
        return tuple(costs.values())
    if missing := [name for name in names if name not in costs]:
        raise CostError(
            f"no costs of version {missing[0]}: measure them with `moejax calibrate --precision "
            f"{missing[0]}`, with the same shapes as those of the others"
        )
    found = tuple(costs[name] for name in names)
    for name, model in zip(names, found, strict=True):
        said = np.unique(sizes[name]).tolist()
        if said != [model.expert_bytes]:
            raise CostError(
                f"the costs of {name} are of experts of {model.expert_bytes} bytes, the run's have "
                f"{', '.join(map(str, said))}; calibrate the run's model"
            )
        # The figures of the model and its shapes; of decode the rows that were measured.
        for field in ("layers", "experts", "top_k", "chunk", "row_tile", "decode"):
            one, other = getattr(found[0], field), getattr(model, field)
            if field == "decode":
                one, other = sorted(one), sorted(other)
            if one != other:
                raise CostError(
                    f"the costs of {names[0]} and {name} have different {field}, {one} and "
                    f"{other}; calibrate both with the same options"
                )
    return found


def compute_s(
    models: Sequence[CostModel],
    work: Work,
    experts: np.ndarray,
    tiles: np.ndarray,
    rows: int | None,
) -> float:
    """Seconds of a step that moves nothing. work: without experts and tiles. experts, tiles: int[V]
    of them in each version; without any the costs are those of version 0. rows: as of
    CostModel.step_cost."""
    seconds = fixed_cost(models, work, experts, rows).seconds(work)
    for model, count, beyond in zip(models, experts.tolist(), tiles.tolist(), strict=True):
        cost = model.step_cost(rows)
        seconds += cost.expert * count
        seconds += cost.tile * beyond
    return seconds


def fixed_cost(
    models: Sequence[CostModel], work: Work, experts: np.ndarray, rows: int | None
) -> StepCost:
    """The costs of all that is no expert's, see compute_s."""
    used = [model for model, count in zip(models, experts.tolist(), strict=True) if count]
    costs = [model.step_cost(rows) for model in used or models[:1]]
    return max(costs, key=lambda cost: cost.seconds(work))


def control_s(models: Sequence[CostModel], experts: np.ndarray) -> float:
    """CostModel.control of a step with so many experts (int[V]) in each version."""
    used = [model.control for model, count in zip(models, experts, strict=True) if count]
    return max(used, default=models[0].control)


def list_s(models: Sequence[CostModel], counts: VersionCounts) -> float:
    """Those of a step's list of transfers, whatever is in it; 0 where nothing was staged."""
    staged = counts.staged.sum(axis=0).tolist()
    lists = [model.stage_list for model, some in zip(models, staged, strict=True) if some]
    return max(lists, default=0.0)


def moves_s(models: Sequence[CostModel], counts: VersionCounts, *, prefill: bool) -> np.ndarray:
    """float64[3, L]: seconds that each way of MOVES adds to each layer."""
    found = np.zeros((len(MOVES), len(counts.fills)))
    for seconds, kind, moved in zip(found, MOVES, counts[1:], strict=True):
        of_layer = moved.sum(axis=1)
        share = moved / np.maximum(of_layer, 1)[:, None]
        for model, of_version in zip(models, share.T, strict=True):
            seconds += model.moves_s(kind, of_layer, prefill=prefill) * of_version
    return found


def version_work(
    rows_of: np.ndarray, version: np.ndarray, tile: int, versions: int
) -> tuple[np.ndarray, np.ndarray]:
    """(int64[V] active experts, int64[V] row tiles beyond the first of each) by version. rows_of:
    int[L, E], rows routed to each expert. version: int[L, E]. tile: rows of one."""
    active = rows_of > 0
    beyond = np.where(active, -(-rows_of // tile) - 1, 0)
    chosen = version[active]
    experts = np.bincount(chosen, minlength=versions)
    tiles = np.bincount(chosen, weights=beyond[active], minlength=versions)
    return experts, tiles.astype(np.int64)
