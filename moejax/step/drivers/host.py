"""The host driver: the layer functions of both steps called one by one from Python.

A layer's attend, route and experts are executables of their own, so that hooks see the routing and
can move experts in between. Whatever crosses from one to the next is behind an
`optimization_barrier` in the device driver's scan too, hence equal bits (contract 1e).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from moejax.step.hooks import Hooks, LayerTransfers
from moejax.step.layer_programs import OF_RECORDS, OF_TIERS, layer_program
from moejax.step.parts import LayerTrace, Routing, StepOutput, TraceArrays
from moejax.step.programs import STAGES, Program, ProgramKey
from moejax.step.runner import Runner
from pallas_kernels.stage import Entries

Parts = dict[tuple[str | None, int | None], Callable]
"""(part of a step, run of equal layers) → its executable."""


class _Layer(NamedTuple):
    run: int
    """Which run of equal layers it belongs to."""
    index: jax.Array
    """int32: in its run."""
    moe_layer: int
    """−1: a layer without experts."""


class HostRunner(Runner):
    """A Runner whose steps are calls of layer executables, three a layer, with hooks in between.

    Without hooks nothing is read back, so the host runs ahead of the device as with the device
    driver.
    """

    driver = "host"

    expert_parts: tuple[str, ...] = ("experts",)
    """Parts of a layer's experts."""
    stage_key = ProgramKey("stage")
    """Carries out a layer's part of a stage list."""

    layer_arrays = TraceArrays()
    """[T, ·] each, of the layer routed last."""

    def _compile_first(self, runs: list[tuple[int, bool]]) -> None:
        self.transfers: list[LayerTransfers] = []
        """What the hooks had carried out in the latest step, in order."""
        self._runs = runs
        self._bound: dict[ProgramKey, Parts] = {}
        most = max(self.config.num_hidden_layers, 2)
        self._index = jax.device_put([*np.arange(most, dtype=np.int32)], self._sharding)
        moe_layers = itertools.count()
        self._layers = [
            _Layer(run, self._index[i], next(moe_layers) if is_moe else -1)
            for run, (size, is_moe) in enumerate(runs)
            for i in range(size)
        ]
        self._none_done = jax.device_put(np.zeros(STAGES, np.int32), self._sharding)
        super()._compile_first(runs)

    def delete(self, *, given: bool = True) -> None:
        self._bound.clear()
        super().delete(given=given)
        for array in (*self._index, self._none_done):
            array.delete()

    # ---- executables

    def _program(self, key: ProgramKey) -> Program:
        if key.part is not None or key.kind in (self.stage_key.kind, *OF_RECORDS, *OF_TIERS):
            return layer_program(self.programs(), key)
        return super()._program(key)

    def prepare_stages(self) -> None:
        self.need(self.stage_key)

    def _calls(self, step: ProgramKey) -> list[ProgramKey]:
        parts: list[tuple[str, int | None]] = [("embed", None), ("output", None)]
        parts += [(part, None) for part in self.expert_parts]
        for run, (_, is_moe) in enumerate(self._runs):
            parts += [("attend", run), ("route" if is_moe else "feed_forward", run)]
            if is_moe and not self.steps.trace_arrays <= {"embedding"}:
                parts.append(("observe", run))
        if "embedding" in self.steps.trace_arrays:
            parts.append(("embedding", None))
        return [self._part(step, *part) for part in parts]

    def _part(self, step: ProgramKey, part: str, run: int | None) -> ProgramKey:
        """All prefill steps share their parts but the output."""
        output = part == "output"
        kind = step.kind if output or step.kind == "decode" else "prefill"
        traced, forced = output and bool(self.steps.trace_arrays), step.forced and part == "route"
        context = step.context if part == "attend" else None
        key = ProgramKey(kind, step.rows, traced=traced, forced=forced, part=part, run=run)
        return key._replace(context=context)

    def _bind(self, step: ProgramKey) -> Parts:
        """The executables of a kind of step."""
        step = step._replace(traced=bool(self.steps.trace_arrays))
        if step not in self._bound:
            # Ask for all of them first: they compile side by side.
            asked = [(key, self._executable(key)) for key in self._calls(step)]
            self._bound[step] = {(key.part, key.run): future.result() for key, future in asked}
        return self._bound[step]

    # ---- steps

    def _step(
        self,
        step: ProgramKey,
        args: tuple,
        forced: Routing | None,
        stages: Entries | None,
        hooks: Hooks | None,
    ) -> StepOutput:
        if hooks is not None:
            self._executable(self.stage_key)
        parts = self._bind(step._replace(forced=forced is not None))
        params = self._params
        # Once for all layers; what lies on the device already stays as it is.
        batch = jax.device_put(args, self._sharding)
        extra = () if forced is None else (jax.device_put(forced, self._sharding),)
        due = frozenset() if stages is None else frozenset(np.asarray(stages.layer).tolist())
        staged = None if stages is None else self._none_done
        self.transfers, traces = [], []

        x = parts["embed", None](params, batch)
        embedding = None
        if ("embedding", None) in parts:
            embedding = parts["embedding", None](x)
        if hooks is not None:
            self._carry_out(hooks.after_embedding(embedding), 0)
        for run, index, layer in self._layers:
            x, self.arena = parts["attend", run](params, self.arena, x, batch, index)
            if layer < 0:
                x = parts["feed_forward", run](params, x, batch, index)
                continue
            if hooks is not None:
                self._carry_out(hooks.before_routing(layer), layer)
            residents = (self.tables.address,) if self.steps.favours_residents else ()
            x, normed, ids, weights = parts["route", run](
                *(params, x, batch, index), *residents, *extra
            )
            if ("observe", run) in parts:
                self.layer_arrays = parts["observe", run](params, normed, batch, index)
            if hooks is not None:
                ids.copy_to_host_async()
                weights.copy_to_host_async()
                self._routing(normed)
                seen = np.asarray(ids), np.asarray(weights)
                self._routed()
                self._carry_out(hooks.after_routing(layer, *seen), layer)
                self._carry_out(hooks.before_experts(layer), layer)
            x, counts = self._experts(parts, step, layer, x, normed, Routing(ids, weights))
            traces.append(LayerTrace(ids, weights, counts, self.layer_arrays))
            if layer in due:
                staged = self._stage(layer, stages, staged, ahead=False)
        output = parts["output", None](params, x, batch, tuple(traces), self._writes(), self.tables)
        arrays, self.layer_arrays = output.arrays._replace(embedding=embedding), TraceArrays()
        return output._replace(staged=staged, arrays=arrays)

    def _experts(
        self,
        parts: Parts,
        step: ProgramKey,
        layer: int,
        x: jax.Array,
        normed: jax.Array,
        routing: Routing,
    ) -> tuple[jax.Array, jax.Array]:
        """(x after a MoE layer's experts, its counts). normed: what they compute on."""
        x, self.arena, self.tables, counts = parts["experts", None](
            self.stores, self.arena, self.tables, x, normed, *routing, self._index[layer]
        )
        return x, counts

    def _routing(self, normed: jax.Array) -> None:
        """A layer's routing was dispatched. normed: what its experts will compute on."""

    def _routed(self) -> None:
        """A layer's routing is there, and no hook has seen it."""

    def _writes(self) -> tuple:
        """As of Programs.writes."""
        return (self.arena.token,) if self.queue else ()

    def _stage(self, layer: int, entries, done, *, ahead: bool) -> jax.Array:
        self.arena, self.tables, done = self._call(
            self.stage_key,
            self.arena,
            self.tables,
            self.stores,
            self._index[layer],
            self._index[int(ahead)],
            entries,
            done,
        )
        return done

    def _carry_out(self, entries: Entries | None, current: int) -> None:
        """A hook's entries. current: the layer that is next to compute its experts.

        Raises ValueError for what is no list of entries.
        """
        if entries is None:
            return
        if not isinstance(entries, Entries) or any(
            np.shape(field) != (STAGES,) or np.result_type(field) != np.int32 for field in entries
        ):
            raise ValueError(
                f"a hook returns None or pallas_kernels.stage.Entries of int32[{STAGES}] each "
                f"(layer −1: not used), not {entries!r}"
            )
        layers = sorted(set(np.asarray(entries.layer).tolist()))
        given = jax.device_put(entries, self._sharding)
        done = self._none_done
        for layer in layers:
            if 0 <= layer < len(self.tables.clock):
                done = self._stage(layer, given, done, ahead=layer >= current)
        self.transfers.append(LayerTransfers(given, done))
