"""The control of an engine's steps, with its layers' moments as hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np

from host_offload.control.control import Control, Resizer
from host_offload.control.controller import Controller
from host_offload.control.interface import Moment, Spec
from host_offload.control.rules import BETWEEN_LAYERS
from host_offload.control.step_record import SEEN, LayerRouting
from host_offload.versions.layer_versions import version_bytes
from moejax.engine.step_work import PlacedRows
from moejax.step.executor import Executor
from moejax.step.hooks import Hooks
from moejax.step.programs import STAGES
from moejax.step.step_parts import StepSpec
from pallas_kernels.stage import Entries


class LayerHooks:
    """moejax.step.hooks.Hooks of one step, for the policies of a Control."""

    def __init__(
        self, control: Control, runner: Executor, needs: frozenset[str], placed: PlacedRows
    ):
        self._control, self._runner, self._needs = control, runner, needs
        self._place, self._rows = placed
        self._routing: LayerRouting | None = None

    def after_embedding(self, embedding: jax.Array | None) -> Entries | None:
        """embedding: float16[T, D]"""
        if embedding is not None and "embedding" in self._needs:
            self._rows = self._rows._replace(embedding=np.asarray(embedding)[self._place])
        return self._ask(Moment.EMBEDDED, -1, None)

    def before_routing(self, layer: int) -> Entries | None:
        return self._ask(Moment.LAYER_BEGIN, layer, None)

    def after_routing(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> Entries | None:
        """ids int32[T, k], the number of experts for padding; weights float32[T, k]."""
        arrays = {
            SEEN[name]: np.asarray(array)[self._place, None]
            for name, array in self._runner.walk.layer_arrays._asdict().items()
            if name in self._needs and array is not None
        }
        ids, weights = ids[self._place, None].astype(np.int16), weights[self._place, None]
        self._routing = LayerRouting(ids, weights, **arrays)
        return self._ask(Moment.ROUTED, layer, self._routing)

    def before_experts(self, layer: int) -> Entries | None:
        return self._ask(Moment.EXPERTS_BEGIN, layer, self._routing)

    def _ask(self, moment: Moment, layer: int, routing: LayerRouting | None) -> Entries | None:
        entries = self._control.between_layers(moment, layer, self._rows, routing)
        return self._runner.stage_list(entries)


StepHooks = Callable[[PlacedRows], Hooks]
"""Makes the hooks of a step with these tokens."""


def layer_hooks(control: Control, runner: Executor) -> StepHooks | None:
    """None where no policy looks between layers."""
    if control.controller.moments.isdisjoint(BETWEEN_LAYERS):
        return None
    needs = control.controller.needs_at(BETWEEN_LAYERS)
    return functools.partial(LayerHooks, control, runner, needs)


def control_of(
    runner: Executor, controller: Controller, resizer: Resizer | None = None
) -> Control | None:
    """The control of the runner's steps; None where no policy is asked anything, so that they cost
    nothing. What the policies want of tables from the start is set either way."""
    control = Control(runner, controller, resizer)
    return control if controller.moments else None


def spec_of_engine(runner: Executor, *, max_model_len: int, seed: int) -> Spec:
    """policy_spec of an engine with as many sequences as its runner's steps have rows."""
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
    """What policies are told of an engine, but for the router and costs. slots: of the arena.
    bound: most cells of a layer."""
    config, layout, formats = steps.config, steps.layout, steps.formats
    layers, page, queue = sum(config.moe_layers), layout.page, steps.queue
    return Spec(
        layers=layers,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        hidden=config.hidden_size,
        page_bytes=page.nbytes,
        page_tokens=page.block_size,
        budget_bytes=slots * layout.slot_bytes,
        slot_bytes=layout.slot_bytes,
        kv_floor_bytes=-(-max_model_len // page.block_size) * page.nbytes,
        # The lists of two steps: one that runs and the next one.
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
