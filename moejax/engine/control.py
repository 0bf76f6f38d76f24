"""The control of an engine's steps, with its layers' moments as hooks."""

from __future__ import annotations

import numpy as np

from host_offload.control.control import Control, Resizer
from host_offload.control.controller import Controller
from host_offload.control.interface import Moment, Spec
from host_offload.control.rules import BETWEEN_LAYERS
from host_offload.control.step_record import SEEN, LayerRouting
from host_offload.versions.layer_versions import version_bytes
from moejax.step.host_driver import HostRunner
from moejax.step.parts import StepSpec
from moejax.step.programs import STAGES
from moejax.step.runner import Runner
from pallas_kernels.stage import Entries


class LayerHooks:
    """moejax.step.hooks.Hooks for the policies of a Control."""

    def __init__(self, control: Control, runner: HostRunner):
        self._control, self._runner = control, runner
        needs = control.controller.needs_at(frozenset({Moment.ROUTED, Moment.EXPERTS_BEGIN}))
        self._arrays = [name for name in runner.layer_arrays._fields if name in needs]
        self._routing: LayerRouting | None = None

    def before_routing(self, layer: int) -> Entries | None:
        return self._ask(Moment.LAYER_BEGIN, layer, None)

    def after_routing(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> Entries | None:
        """ids int32[T, k], the number of experts for padding; weights float32[T, k]."""
        rows = ids[:, 0] < self._control.controller.spec.experts
        arrays = {
            SEEN[name]: np.asarray(getattr(self._runner.layer_arrays, name))[rows, None]
            for name in self._arrays
        }
        ids, weights = ids[rows, None].astype(np.int16), weights[rows, None]
        self._routing = LayerRouting(ids, weights, **arrays)
        return self._ask(Moment.ROUTED, layer, self._routing)

    def before_experts(self, layer: int) -> Entries | None:
        return self._ask(Moment.EXPERTS_BEGIN, layer, self._routing)

    def _ask(self, moment: Moment, layer: int, routing: LayerRouting | None) -> Entries | None:
        return self._runner.stage_list(self._control.between_layers(moment, layer, routing))


def layer_hooks(control: Control, runner: Runner) -> LayerHooks | None:
    """None where no policy looks between layers."""
    if control.controller.moments.isdisjoint(BETWEEN_LAYERS):
        return None
    assert isinstance(runner, HostRunner), "check_policies knows the driver"
    return LayerHooks(control, runner)


def control_of(
    runner: Runner, controller: Controller, resizer: Resizer | None = None
) -> Control | None:
    """The control of the runner's steps; None where no policy is asked anything, so that they cost
    nothing. What the policies want of tables from the start is set either way."""
    control = Control(runner, controller, resizer)
    return control if controller.moments else None


def spec_of_engine(runner: Runner, *, max_model_len: int, seed: int) -> Spec:
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
    layers, page = sum(config.moe_layers), layout.page
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
    )
