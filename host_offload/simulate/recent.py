"""The last steps of a running engine as a trace, over which policies are predicted from the present
residency on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import Moment, Observation, Policy, Spec
from host_offload.control.paging import PagedSpec
from host_offload.control.step_record import SEEN, LinkUse, StepRecord
from host_offload.memory.tables import Residency, cold_tables
from host_offload.simulate.prediction import predict
from host_offload.simulate.timeline import Link
from host_offload.sizing.cost_model import CostModel
from host_offload.traces.link import LinkTrace
from host_offload.traces.reader import Trace
from host_offload.traces.schema import TraceHeader

ROWS = frozenset({"request", "user", "position", "phase", "ids", "weights", "bucket"})
"""Fields of an Observation that a step of Recent needs; more if policies do."""
PLACES = frozenset({"version", "last_used", "clock", "frequency", "cells"})
"""Fields that tables_of needs."""


@dataclasses.dataclass(frozen=True)
class Recent(Trace):
    """Decode steps in memory."""

    records: tuple[StepRecord, ...] = ()

    @property
    def steps(self) -> int:
        return len(self.records)

    def step_traces(self) -> Iterator[StepRecord]:
        return iter(self.records)

    def link(self) -> Iterator[LinkTrace]:
        """The queue is idle wherever a policy looks."""
        layers = range(self.header.layers)
        moments = Moment.LAYER_BEGIN, Moment.ROUTED, Moment.EXPERTS_BEGIN
        for record, layer, moment in itertools.product(self.records, layers, moments):
            yield LinkTrace(record.number, moment, layer, LinkUse())


class Predicted(NamedTuple):
    """A policy over n decode steps."""

    compute_s: np.ndarray
    """float64[n]"""
    moves_s: np.ndarray
    """float64[n], what experts that move add."""
    tables: Residency
    """After the steps."""


def record_of(seen: Observation) -> StepRecord:
    """Returns a decode step that was observed at its end, as far as the observation shows it."""
    shown = {field: getattr(seen, name) for name, field in SEEN.items()}
    fields: dict[str, Any] = dict.fromkeys(StepRecord._fields)
    return StepRecord(**{**fields, **shown, "number": seen.step, "kind": "decode", "finished": ()})


def tables_of(seen: Observation, cells: np.ndarray | None = None) -> Residency:
    """Returns tables with the residents that an observation shows, in other cells.

    - `cells`: int[L, V], of each version; None: there is one, and the observation shows them.
    """
    cells = seen.cells[:, None] if cells is None else cells
    experts = seen.version.shape[1]
    tables = cold_tables(cells, experts, bound=max(experts, int(cells.sum(axis=1).max())))
    layer, expert = np.nonzero(seen.version >= 0)
    version = seen.version[layer, expert]
    order = np.lexsort((-seen.last_used[layer, expert], version, layer))
    layer, expert, version = layer[order], expert[order], version[order]
    place = layer * cells.shape[1] + version
    number = np.arange(layer.size) - np.searchsorted(place, place)
    cell = number + (np.cumsum(cells, axis=1) - cells)[layer, version]
    fits = number < cells[layer, version]
    layer, expert, version, cell = (a[fits] for a in (layer, expert, version, cell))
    tables.owner[layer, cell] = expert
    tables.address[layer, expert] = tables.cell_row[layer, cell]
    tables.version[layer, expert] = version
    tables.last_used[layer, cell] = seen.last_used[layer, expert]
    tables.clock[:], tables.frequency[:] = seen.clock, seen.frequency
    return tables


def predict_recent(
    records: Sequence[StepRecord],
    policies: Sequence[Policy],
    spec: Spec,
    tables: Residency,
    costs: CostModel | Mapping[str, CostModel],
    link: Link | None,
) -> Predicted:
    """Predicts the steps under these policies.

    - `tables`: before the first step.
    - `costs`: by version if there are several, each of experts of one size.
    """
    first, tables = records[0], tables.copy()
    width = 0 if first.gate_input is None else first.gate_input.shape[2]
    header = TraceHeader(
        spec.layers,
        spec.experts,
        spec.top_k,
        config_digest="",
        spec={},
        machine={},
        command=(),
        created="",
        probabilities=first.probabilities is not None,
        gate_input=width,
        embedding=0 if first.embedding is None else first.embedding.shape[1],
        token=first.token is not None,
        absent=("step.start_s", "step.read_s"),
    )
    trace = Recent(Path("recent"), header, True, (), tuple(records))
    if not isinstance(costs, CostModel):  # layers' sizes may differ
        some, least = spec.has_all_versions, [*costs.values()][-1].expert_bytes
        sizes = {name: np.where(some, of.expert_bytes, least) for name, of in costs.items()}
        spec = dataclasses.replace(spec, version_bytes=sizes, moved_bytes=None)
    versions, granted = range(len(spec.version_bytes)), tables.cell_row >= 0
    each = [np.sum(granted & (tables.cell_version == v), axis=1) for v in versions]
    cells = PagedSpec(np.stack(each, axis=1), tables.fill_version)
    found = predict(
        trace, costs, link=link, policies=policies, spec=spec, cells=cells, tables=tables
    )
    return Predicted(found.compute_s, np.maximum(found.stall_s, 0.0), tables)
