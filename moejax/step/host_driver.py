"""The host driver: the layer functions of both steps called one by one from Python.

A layer's attend, route and experts are executables of their own, so that hooks see the routing and
can move experts in between. Whatever crosses from one to the next is behind an
`optimization_barrier` in the device driver's scan too, hence equal bits (contract 1e).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.models.decoder import Decoder
from moejax.models.layers import Tokens
from moejax.step.experts import counts_size
from moejax.step.hooks import Hooks, Transfers
from moejax.step.parts import (
    DECODE_TILE,
    LayerTrace,
    Routing,
    StepOutput,
    decode_output,
    decode_tokens,
    experts_layer,
    prefill_output,
    prefill_tokens,
    route_layer,
)
from moejax.step.programs import STAGES, Program, Programs
from moejax.step.runner import Runner
from moejax.step.trace_arrays import TraceArrays, embedding_array, layer_arrays
from pallas_kernels.stage import Entries, stage

# ---- programs


_NAME = re.compile(
    r"(?P<step>decode(@\d+)?|prefill|score|prompt_logprobs)/"
    r"((?P<part>embed|embedding|experts|output|traced_output)"
    r"|(?P<layer>attend|route|forced_route|observe|feed_forward)\.(?P<run>\d+))"
)


def layer_program(programs: Programs, name: str) -> Program:
    """The program of that name: STEP/PART, or `stage`, one layer's part of a list of transfers.

    STEP: as in Programs.program, without traced, forced and staged. PART: embed, embedding (the
    array of that name), experts, output, traced_output, and for each run r of equal layers
    attend.r, route.r, forced_route.r, observe.r (the layer's arrays) or feed_forward.r. Which
    layer is an argument, its index in the run, for experts and stage over all MoE layers. Raises
    ValueError for another name.
    """
    array = functools.partial(jax.ShapeDtypeStruct, sharding=programs.sharding)
    index = array((), jnp.int32)
    arena, tables, stores = programs.arena, programs.tables, programs.stores
    if name == "stage":
        entries = Entries._make([array((STAGES,), jnp.int32)] * len(Entries._fields))
        args = (arena, tables, stores, index, index, entries, entries.layer)
        function = functools.partial(_stage_layer, ops=programs.ops, formats=programs.formats)
        return Program(function, args, (0, 1))

    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"no program {name!r}")
    step, part, run = match["step"], match["part"] or match["layer"], int(match["run"] or 0)
    decode = step.startswith("decode")
    config, shapes, page, ops = programs.config, programs.shapes, programs.page, programs.ops
    # Of the step's arguments those after state, stores, arena and tables.
    batch = programs.program(step).args[4:]
    rows = int(step.partition("@")[2] or shapes.rows)
    size = rows if decode else shapes.prefill_chunks * shapes.chunk
    leaves, structure = jax.tree.flatten(programs.state)
    params = tuple(leaves)

    def model_of(params) -> Decoder:
        return nnx.merge(programs.graph, jax.tree.unflatten(structure, params))

    def tokens_of(batch) -> Tokens:
        if decode:
            _, positions, block_table = (values[:rows] for values in batch)
            return decode_tokens(positions, block_table, page=page, ops=ops)
        return prefill_tokens(*batch, page=page, ops=ops)

    def embed(params, batch):
        ids = batch[0][:rows] if decode else batch[0].tokens.reshape(-1)
        return model_of(params).embed(ids)

    def attend(params, arena, x, batch, i):
        return model_of(params).runs[run].attend(i, x, arena, tokens_of(batch), page)

    def route(params, x, batch, i, forced=None):
        return route_layer(model_of(params).runs[run], i, x, tokens_of(batch), forced)

    def observe(params, normed, batch, i):
        stack = model_of(params).runs[run]
        return layer_arrays(stack, i, normed, tokens_of(batch), programs.trace_arrays)

    def feed_forward(params, x, batch, i):
        return model_of(params).runs[run].feed_forward(i, x, tokens_of(batch))

    def experts(stores, arena, tables, x, normed, ids, weights, layer):
        return experts_layer(
            config,
            x,
            normed,
            ids,
            weights,
            arena,
            tables,
            stores,
            layer,
            row_tile=min(DECODE_TILE, rows) if decode else shapes.chunk,
            waves=1 if decode else shapes.waves,
            ops=ops,
            formats=programs.formats,
        )

    def output(params, x, batch, traces):
        trace = jax.tree.map(lambda *parts: jnp.stack(parts), *traces)
        if decode:
            return decode_output(model_of(params), x, trace, None)
        return prefill_output(
            model_of(params),
            x,
            batch[0],
            trace,
            None,
            score=step == "score",
            prompt_logprobs=step == "prompt_logprobs",
        )

    x = array((size, config.hidden_size), jax.eval_shape(embed, params, batch).dtype)
    k = config.num_experts_per_tok
    routing = Routing(array((size, k), jnp.int32), array((size, k), jnp.float32))
    counts = array((counts_size(config.num_experts, len(stores)),), jnp.int32)
    if part == "embed":
        return Program(embed, (params, batch), ())
    if part == "attend":
        return Program(attend, (params, arena, x, batch, index), (1, 2))
    if part == "route":
        return Program(route, (params, x, batch, index), (1,))
    if part == "forced_route":
        kind, at, bucket = step.partition("@")
        forced = programs.program(f"{kind}_forced{at}{bucket}").args[-1]
        return Program(route, (params, x, batch, index, forced), (1,))
    if part == "embedding":
        return Program(lambda x: embedding_array(x, programs.trace_arrays), (x,), ())
    if part == "observe":
        return Program(observe, (params, x, batch, index), ())
    if part == "feed_forward":
        return Program(feed_forward, (params, x, batch, index), (1,))
    if part == "experts":
        return Program(experts, (stores, arena, tables, x, x, *routing, index), (1, 2, 3))
    seen = TraceArrays()
    if part == "traced_output":
        widths = {"probs": config.num_experts, "gate_input": config.hidden_size}
        wanted = widths.keys() & programs.trace_arrays
        seen = TraceArrays(**{name: array((size, widths[name]), jnp.float16) for name in wanted})
    traces = (LayerTrace._make((*routing, counts, seen)),) * tables.clock.shape[0]
    return Program(output, (params, x, batch, traces), ())


def _stage_layer(arena, tables, stores, layer, ahead, entries, done, *, ops, formats):
    """The layer's entries. ahead: 1 before the layer's plan, when what the last step used may go;
    its clock is then read as that of the coming reference. done int32[STAGES]: of other layers."""
    tables = tables._replace(clock=tables.clock.at[layer].add(ahead))
    arena, tables, now = stage(
        arena, tables, stores, layer, entries, formats=formats, implementation=ops.stage
    )
    tables = tables._replace(clock=tables.clock.at[layer].add(-ahead))
    return arena, tables, jnp.maximum(done, now)


# ---- the loop


class _Layer(NamedTuple):
    """What the loop needs for one layer, looked up before the first step of its kind."""

    index: jax.Array
    """int32: in its run."""
    moe_layer: int
    """−1: a layer without experts."""
    moe_index: jax.Array | None
    attend: Callable
    route_or_feed_forward: Callable
    observe: Callable | None


class _Executables(NamedTuple):
    """The executables of one kind of step."""

    embed: Callable
    embedding: Callable | None
    layers: tuple[_Layer, ...]
    experts: Callable
    output: Callable


class HostRunner(Runner):
    """A Runner whose steps are calls of layer executables, with hooks in between.

    Without hooks nothing is read back, so the host runs ahead of the device as with the device
    driver. A step is three dispatches a layer. Measured on two CPU cores (jax 0.10.2, 48 layers of
    the demo's size, decode without rows): 180 µs a layer, 45 µs in the device driver's scan; a
    dispatch of nothing is 13 µs, parameters and tables as arguments are 7 to 13 µs more. With hooks
    360 µs.
    """

    driver = "host"

    def __init__(self, model: Decoder, *args, **kwargs):
        self.transfers: list[Transfers] = []
        """What the hooks had carried out in the latest step, in order."""
        self.layer_arrays = TraceArrays()
        """[T, ·] each, of the layer routed last."""
        self._hooks: Hooks | None = None
        self._runs = [(stack.size, stack.is_moe) for stack in model.runs]
        self._bound: dict[tuple[str, str, bool, bool], _Executables] = {}
        super().__init__(model, *args, **kwargs)
        self._params = tuple(jax.tree.leaves(self.state))
        most = max(self.config.num_hidden_layers, 2)
        self._index = jax.device_put([*np.arange(most, dtype=np.int32)], self._sharding)
        self._none_done = jax.device_put(np.zeros(STAGES, np.int32), self._sharding)

    @property
    def hooks(self) -> Hooks | None:
        """Called between a layer's parts from the next step on; None: no hooks."""
        return self._hooks

    @hooks.setter
    def hooks(self, hooks: Hooks | None) -> None:
        self._hooks = hooks
        if hooks is not None:
            self._executable("stage")

    def delete(self, *, given: bool = True) -> None:
        self._bound.clear()
        super().delete(given=given)
        for array in (*self._index, self._none_done):
            array.delete()

    # ---- executables

    def _program(self, name: str) -> Program:
        if name == "stage" or "/" in name:
            return layer_program(self.programs(), name)
        return super()._program(name)

    def prepare_stages(self) -> None:
        self.prepare("stage")

    def _parts(self, step: str) -> list[str]:
        parts = ["embed", "experts", self._output]
        for run, (_, is_moe) in enumerate(self._runs):
            parts += [f"attend.{run}", f"route.{run}" if is_moe else f"feed_forward.{run}"]
            if is_moe and self._observes:
                parts.append(f"observe.{run}")
        if "embedding" in self.trace_arrays:
            parts.append("embedding")
        return [f"{step}/{part}" for part in parts]

    @property
    def _output(self) -> str:
        return "traced_output" if self.trace_arrays else "output"

    @property
    def _observes(self) -> bool:
        """Layers have arrays of their own."""
        return not self.trace_arrays <= {"embedding"}

    def _bind(self, step: str, output: str, forced: bool) -> _Executables:
        """step: decode, decode@N or prefill. output: the same, score or prompt_logprobs."""
        key = (step, output, forced, bool(self.trace_arrays))
        if key in self._bound:
            return self._bound[key]

        def executable(name: str) -> Callable:
            return self._executable(name).result()

        # Ask for all of them first: they compile side by side.
        route = "forced_route" if forced else "route"
        names = [name.replace("/route", f"/{route}") for name in self._parts(step)]
        for name in (*names, f"{output}/{self._output}"):
            self._executable(name)
        layers, moe_layer = [], 0
        for run, (size, is_moe) in enumerate(self._runs):
            attend = executable(f"{step}/attend.{run}")
            second = executable(f"{step}/{route if is_moe else 'feed_forward'}.{run}")
            observes = is_moe and self._observes
            observe = executable(f"{step}/observe.{run}") if observes else None
            for i in range(size):
                layers.append(
                    _Layer(
                        index=self._index[i],
                        moe_layer=moe_layer if is_moe else -1,
                        moe_index=self._index[moe_layer] if is_moe else None,
                        attend=attend,
                        route_or_feed_forward=second,
                        observe=observe,
                    )
                )
                moe_layer += is_moe
        self._bound[key] = _Executables(
            embed=executable(f"{step}/embed"),
            embedding=executable(f"{step}/embedding") if "embedding" in self.trace_arrays else None,
            layers=tuple(layers),
            experts=executable(f"{step}/experts"),
            output=executable(f"{output}/{self._output}"),
        )
        return self._bound[key]

    # ---- steps

    def _step(
        self, kind: str, bucket: str, *args, forced: Routing | None, stages: Entries | None
    ) -> StepOutput:
        step = f"decode{bucket}" if kind == "decode" else "prefill"
        run = self._bind(step, f"{kind}{bucket}", forced is not None)
        params, stores, hooks = self._params, self.stores, self._hooks
        # Once for all layers; what lies on the device already stays as it is.
        batch = jax.device_put(args, self._sharding)
        extra = () if forced is None else (jax.device_put(forced, self._sharding),)
        due = frozenset() if stages is None else frozenset(np.asarray(stages.layer).tolist())
        staged = None if stages is None else self._none_done
        self.transfers, traces = [], []

        x = run.embed(params, batch)
        embedding = None if run.embedding is None else run.embedding(x)
        for layer in run.layers:
            x, self.arena = layer.attend(params, self.arena, x, batch, layer.index)
            if layer.moe_layer < 0:
                x = layer.route_or_feed_forward(params, x, batch, layer.index)
                continue
            if hooks is not None:
                self._carry_out(hooks.before_routing(layer.moe_layer), layer.moe_layer)
            x, normed, ids, weights = layer.route_or_feed_forward(
                params, x, batch, layer.index, *extra
            )
            if layer.observe is not None:
                self.layer_arrays = layer.observe(params, normed, batch, layer.index)
            if hooks is not None:
                ids.copy_to_host_async()
                weights.copy_to_host_async()
                seen = np.asarray(ids), np.asarray(weights)
                self._carry_out(hooks.after_routing(layer.moe_layer, *seen), layer.moe_layer)
                self._carry_out(hooks.before_experts(layer.moe_layer), layer.moe_layer)
            x, self.arena, self.tables, counts = run.experts(
                stores, self.arena, self.tables, x, normed, ids, weights, layer.moe_index
            )
            traces.append(LayerTrace(ids, weights, counts, self.layer_arrays))
            if layer.moe_layer in due:
                staged = self._stage(layer.moe_layer, stages, staged, ahead=False)
        output = run.output(params, x, batch, tuple(traces))
        arrays, self.layer_arrays = output.arrays._replace(embedding=embedding), TraceArrays()
        return output._replace(staged=staged, arrays=arrays)

    def _stage(self, layer: int, entries, done, *, ahead: bool) -> jax.Array:
        self.arena, self.tables, done = self._call(
            "stage",
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
        self.transfers.append(Transfers(given, done))
