"""Computes the cells of each layer that a budget gives an arm."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from host_offload.control.interface import Spec
from host_offload.memory.budget import Share, cells_per_layer, expert_slots_of, format_bytes
from host_offload.simulate.simulator import spec_of
from host_offload.traces.reader import Trace, TraceError
from moejax.errors import UserError, user_errors
from moejax.evaluate.experiments.arms import Arm
from moejax.sizes import parse_expert_budget
from moejax.start.decide.start_plan import StartPlan
from pallas_kernels.records import RecordFormat
from pallas_kernels.records.format import VERSIONS


def grant_columns(cells: Sequence[int], experts: int, nbytes: int) -> dict[str, int]:
    """Returns columns of a record.

    - `cells`: of each layer.
    - `experts`: experts of a layer.
    - `nbytes`: bytes that the cells take.
    """
    ends = {"cells_least": min(cells), "cells_most": max(cells), "experts": experts}
    return {**ends, "expert_bytes": nbytes, "learned_bytes": 0, "moves_cells": False}


@dataclasses.dataclass(frozen=True)
class Terms:
    """The sizes by which budgets are measured, and what policies are told, with or without an
    engine."""

    spec: Spec
    """The Spec that an engine of all budgets gives its policies."""
    slot_bytes: int
    """Bytes of an expert's slot."""
    record: RecordFormat | None = None
    """The format of an expert's weights; None: routing without a model."""
    kv_bytes: int = 0
    router: np.ndarray | None = None
    """float32[L, D, E]; None: routing without a model."""

    @classmethod
    def of_plan(cls, plan: StartPlan, router: np.ndarray | None = None) -> Terms:
        """Returns the terms of an engine."""
        layout = plan.steps.layout
        kv_bytes = plan.budget.kv_slots * layout.slot_bytes
        return cls(plan.spec, layout.slot_bytes, layout.records[0], kv_bytes, router)

    @classmethod
    def of_trace(cls, trace: Trace) -> Terms:
        """Returns the terms of routing without a model. Raises UserError for a trace that lacks
        what policies are told."""
        with user_errors(TraceError):
            spec = spec_of(trace.header)
        size = max(int(np.max(sizes)) for sizes in spec.version_bytes.values())
        kv_bytes = max(spec.budget_bytes - spec.layers * spec.experts * size, 0)
        return cls(spec, size, kv_bytes=kv_bytes)

    @property
    def experts(self) -> int:
        """Experts in all layers."""
        return self.spec.layers * self.spec.experts

    def budget_bytes(self, budget: str) -> int:
        """Returns the bytes of a budget; a share is of what all experts take when dense. Raises
        UserError for a version if there is no model."""
        if budget in VERSIONS:
            if self.record is None:
                raise UserError(f"budget {budget} is of a model's experts; write a share or bytes")
            return self.experts * dataclasses.replace(self.record, version=budget).nbytes
        given = parse_expert_budget(int(budget) if budget.isdigit() else budget)
        if not isinstance(given, Share):
            return given
        dense = self.record and dataclasses.replace(self.record, version="dense")
        return int(given.fraction * self.experts * (dense.nbytes if dense else self.slot_bytes))

    def slots(self, budget: str, arm: Arm) -> int:
        """Returns the experts that a budget holds, less what the arm learned. Raises UserError for
        a budget other than 0 that holds none."""
        nbytes, size = self.budget_bytes(budget), self.slot_bytes
        whole = expert_slots_of(nbytes, self.experts, size)
        if budget.endswith("%") and (self.record is None or self.record.version == "dense"):
            whole = expert_slots_of(parse_expert_budget(budget), self.experts, size)  # rounded
        if not whole and budget.strip("0%."):
            percent = f'; did you mean "{budget}%"?' if budget.isdigit() and nbytes <= 100 else ";"
            raise UserError(
                f"budget {budget} holds no expert: one takes {size} bytes ({format_bytes(size)})"
                f'{percent} write a share such as "25%", at least '
                f"{100 / self.experts:.3g}%, bytes of one expert or more, or 0 for none"
            )
        learned = arm.learned_bytes(self.spec)
        slots = whole - -(-learned // size)
        if slots < 0 or (whole and not slots):
            raise UserError(
                f"budget {budget}: what {arm.name} learned takes {learned} bytes of it "
                "and leaves no expert; raise the budget"
            )
        return slots

    def grant(self, budget: str, arm: Arm) -> tuple[tuple[int, ...], dict[str, int]]:
        """Returns (each layer's cells of a budget, as even as they can be; the same as columns)."""
        slots = self.slots(budget, arm)
        cells = cells_per_layer(slots, self.spec.layers, self.spec.experts)
        columns = grant_columns(cells, self.spec.experts, slots * self.slot_bytes)
        columns |= {"learned_bytes": arm.learned_bytes(self.spec)}
        return cells, columns | {"moves_cells": arm.moves_cells or arm.pooled}

    def spec_for(self, budget: str, arm: Arm, seed: int) -> Spec:
        """Returns the Spec for the policies of a run: an arena of this budget and the KV, not the
        grid's largest budget. If the policies may move the line between both, the arena is all of
        the memory."""
        needs_router = arm.halved or any("router" in policy.needs for policy in arm.policies)
        held = self.slots(budget, arm) * self.slot_bytes + self.kv_bytes
        return dataclasses.replace(
            self.spec,
            budget_bytes=self.spec.budget_bytes if arm.shared else held,
            seed=seed,
            router=self.router if needs_router else None,
        )
