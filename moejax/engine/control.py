"""Makes the Control of an engine's steps, and hooks that ask policies between layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from host_offload.control.control import Control, Resizer
from host_offload.control.controller import Controller
from host_offload.control.interface import Moment, Spec
from host_offload.control.rules import BETWEEN_LAYERS
from host_offload.control.step_record import SEEN, LayerRouting
from host_offload.versions.layer_versions import version_bytes
from moejax.engine.step_work import PlacedRows
from moejax.step.executor import Executor
from moejax.step.programs import STAGES
from moejax.step.step_parts import StepSpec
from moejax.step.walk import Hooks
from pallas_kernels.stage import Entries

_LATER = {
    Moment.EMBEDDED: (Moment.LAYER_BEGIN, Moment.ROUTED, Moment.EXPERTS_BEGIN),
    Moment.ROUTED: (Moment.EXPERTS_BEGIN,),
}
"""Moments that see what hooks take at an earlier one."""


class LayerHooks:
    """moejax.step.walk.Hooks of one step, for the policies of a Control."""

    def __init__(
        self, control: Control, runner: Executor, needs: frozenset[str], placed: PlacedRows
    ):
        self._control, self._runner, self._needs = control, runner, needs
        self._place, self._rows = placed
        self._routing: LayerRouting | None = None

    def __call__(self, moment: Moment, layer: int, known: Any) -> Entries | None:
        if not any(map(self._control.looks_at, (moment, *_LATER.get(moment, ())))):
            return None
        if moment == Moment.EMBEDDED and "embedding" in self._needs:
            self._rows = self._rows._replace(embedding=np.asarray(known)[self._place])
        if moment == Moment.ROUTED:
            ids, weights = map(self._take_rows, known)
            arrays = {
                SEEN[name]: self._take_rows(array)
                for name, array in self._runner.walk.layer_arrays._asdict().items()
                if name in self._needs and array is not None
            }
            self._routing = LayerRouting(ids.astype(np.int16), weights, **arrays)
        routing = self._routing if moment in (Moment.ROUTED, Moment.EXPERTS_BEGIN) else None
        return self._runner.stage_list(
            self._control.between_layers(moment, layer, self._rows, routing)
        )

    def _take_rows(self, array: Any) -> np.ndarray:
        """Returns [N, 1, ·], the step's tokens out of an array with padding."""
        return np.asarray(array)[self._place, None]


StepHooks = Callable[[PlacedRows], Hooks]
"""Makes the hooks of a step from its tokens."""


def layer_hooks(control: Control, runner: Executor) -> StepHooks | None:
    """Returns the maker of a step's hooks; None if no policy is asked between layers."""
    if control.controller.moments.isdisjoint(BETWEEN_LAYERS):
        return None
    needs = control.controller.needs_at(BETWEEN_LAYERS)
    return functools.partial(LayerHooks, control, runner, needs)


def control_of(
    runner: Executor, controller: Controller, resizer: Resizer | None = None
) -> Control | None:
    """Makes the Control of the runner's steps. Returns None if no policy has a moment, so that
    steps pay nothing. Either way it sets the tables that the policies want from the start."""
    control = Control(runner, controller, resizer)
    return control if controller.moments else None


def spec_of_engine(runner: Executor, *, max_model_len: int, seed: int) -> Spec:
    """Returns policy_spec of an engine whose max_num_seqs is the rows of its runner's steps."""
    return policy_spec(
        runner.steps,
        slots=runner.slots,
        bound=runner.tables.cell_row.shape[1],
        max_model_len=max_model_len,
        max_num_seqs=runner.shapes.rows,
        seed=seed,
    )


def policy_spec(
    steps: StepSpec, *, slots: int, bound: int, max_model_len: int, max_num_seqs: int, seed: int
) -> Spec:
    """Returns the facts that policies get about an engine, without router and costs.

    - `slots`: slots of the arena.
    - `bound`: most cells of a layer.
    """
    config, layout, formats = steps.config, steps.layout, steps.formats
    layers, page, queue = sum(config.moe_layers), layout.page, steps.queue
    longest, page_tokens = page.pages(max_model_len), page.block_size
    if page.windows != (None,):
        page_tokens = max(max_model_len // longest, 1)
    return Spec(
        layers=layers,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        hidden=config.hidden_size,
        page_bytes=page.nbytes,
        page_tokens=page_tokens,
        budget_bytes=slots * layout.slot_bytes,
        slot_bytes=layout.slot_bytes,
        kv_floor_bytes=longest * page.nbytes,
        # The lists of two steps: the running one and the next.
        staging_bytes=2 * STAGES * max(record.nbytes for record in layout.records),
        seed=seed,
        driver=steps.driver,
        version_bytes=version_bytes(layout, formats, layers),
        moved_bytes=version_bytes(layout, formats, layers, moved=True),
        min_cells=np.zeros(layers, np.int32),
        cell_bound=bound,
        stage_entries=STAGES,
        max_num_seqs=max_num_seqs,
        second_processor=steps.second is not None,
        link=(queue.latency, 1 / queue.rate) if queue is not None and queue.rate else None,
    )
