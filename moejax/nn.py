"""Mixture-of-experts layers for your own Flax NNX model, with experts paged from host memory.

    experts = PagedExperts.from_arrays([(gate, up, down), ...])     # every layer, in pinned memory
    moe = PagedMoE(experts, layer=0, rule=RouteRule(top_k=2), rngs=rngs)
    memory = experts.allocate("25%")                                # the arena, on the device
    y, memory = moe(x, memory)                                      # inside your jit

Your step stays a pure function: it takes `memory`, which is donated, and returns the new one. The
experts are state of the model and not donated. The result has the same bits for every budget.
The layers are for inference and cannot be differentiated. docs/how-to/paged_moe.md is the tutorial.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import SingleDeviceSharding

from host_offload.memory.arena import allocate_arena, place_cells
from host_offload.memory.budget import Share, cells_per_layer, expert_slots_of
from host_offload.memory.layout import BLOCK_SIZES
from host_offload.memory.store import ExpertStore, StoreBuilder
from host_offload.memory.tables import Tables, empty_tables, regrant
from host_offload.policies.eviction.eviction_names import EVICTION
from host_offload.versions.encoders import NUMPY_DTYPES, encode
from moejax.cache import checked_folder
from moejax.checkpoints.loaded_model import DTYPE_NAMES
from moejax.errors import UserError, user_errors
from moejax.sizes import parse_expert_budget
from moejax.step.experts import (
    DeviceMemory,
    ExpertContext,
    Paging,
    add_experts,
    page_and_compute,
    zero_after,
    zero_outputs,
)
from pallas_kernels import OPS, Ops, resolve_ops
from pallas_kernels.cards import shared_class
from pallas_kernels.dispatch import parse_ops
from pallas_kernels.expert_ffn import ACTIVATIONS
from pallas_kernels.linear import LinearOptions, linear_parts
from pallas_kernels.records import RecordFormat
from pallas_kernels.route import RouteRule, route, why_not_pallas
from pallas_kernels.verification import (
    SHIPPED,
    Check,
    Job,
    ModelShape,
    checks,
    current,
    require_verified,
    why_no_kernels,
)

log = logging.getLogger("moejax")

__all__ = ["ExpertMemory", "HostRecords", "PagedExperts", "PagedMoE", "Paging", "RouteRule"]


OPS_USED = ("linear", "route", "plan", "fill", "expert_ffn", "combine")
"""The ops of pallas_kernels.OPS that a layer runs."""

KERNEL_ROW_TILES = (16, 64)
"""Row tiles for which kernels are checked."""


class HostRecords(nnx.Variable):
    """Expert records in pinned host memory. It is a type of its own, so that filters can separate
    it from nnx.Param: records are neither trained nor copied to the device."""


class ExpertMemory(NamedTuple):
    """The part of the experts that is on the device, for all layers of one PagedExperts. Donate it
    to every step, and use the one that the step returns for the next."""

    arena: jax.Array
    """uint16[rows, D]: the cells of all layers, each a record."""
    tables: Tables
    """The tables that map experts to cells."""
    counts: jax.Array
    """int32[L, 4]: sums of Paging's fields since `allocate`."""

    @property
    def paging(self) -> Paging:
        """Counts for each layer since `allocate`, int32[L] each: active = hits + fills +
        read_through. Waits until all steps have run."""
        return Paging(*np.asarray(self.counts).T)


class PagedExperts(nnx.Module):
    """The experts of all MoE layers of a model, in pinned host memory.

    An expert computes down(act(gate(x)) · up(x)), and all experts have the same sizes. PagedMoE
    layers share one PagedExperts by reference, so `nnx.split` finds the records once.
    """

    def __init__(self, store: ExpertStore, dtype: str, activation: str = "silu"):
        """Uses the experts of a loaded checkpoint; `from_arrays` takes arrays.

        - `store`: experts in version `dense`, such as LoadedModel.store.
        - `dtype`: of the weights: "bfloat16", "float16" or "float32".
        - `activation`: one of pallas_kernels.expert_ffn.ACTIVATIONS.

        Raises UserError for a dtype that the records cannot have and an unknown activation.
        """
        self.layout = store.layouts["dense"]
        if self.layout.biases:
            raise UserError("PagedExperts computes experts without biases, and these have some")
        self.dtype = _dtype_name(dtype)
        if NUMPY_DTYPES[self.dtype].itemsize != self.layout.itemsize:
            raise UserError(
                f"dtype {self.dtype} is not that of the records, whose values have "
                f"{self.layout.itemsize} bytes"
            )
        if activation not in ACTIVATIONS:
            raise UserError(
                f"activation {activation!r} is unknown; known: {', '.join(ACTIVATIONS)}"
            )
        self.activation = activation
        self.records = HostRecords(store.arrays["dense"])
        """uint16[L, E, rows, D]: the dense records of all experts."""
        self.layers, self.experts = store.arrays["dense"].shape[:2]

    @classmethod
    def from_arrays(
        cls,
        layers: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
        dtype: str = "bfloat16",
        *,
        layout: str | None = None,
        device: jax.Device | None = None,
        activation: str = "silu",
    ) -> PagedExperts:
        """Copies the weights of all layers into pinned host memory, one layer after the other.

        - `layers`: for each layer (gate [E, I, D], up [E, I, D], down [E, D, I]), of any float
          dtype. A lazy sequence needs memory for one layer only.
        - `layout`: "torch", the axes above, or "flax", whose kernels are [E, D, I], [E, D, I] and
          [E, I, D]. None is "torch", but square matrices need a word, since no shape shows it.
        - `dtype`: the dtype that the weights are converted to.
        - `device`: jax's first device by default.
        - `activation`: one of pallas_kernels.expert_ffn.ACTIVATIONS.

        Raises UserError for shapes that differ or do not fit together, square matrices without a
        layout, and if pinned memory does not suffice.
        """
        if layout not in (None, "torch", "flax"):
            raise UserError(f"layout is 'torch' or 'flax', not {layout!r}")
        to = NUMPY_DTYPES[_dtype_name(dtype)]
        if not len(layers):
            raise UserError("there are no layers; give the weights of at least one")
        builder, shape = None, ()
        with user_errors(MemoryError), contextlib.ExitStack() as stack:
            for layer, (gate, up, down) in enumerate(layers):
                found, shape = np.shape(gate), shape or np.shape(gate)
                if (
                    len(found) != 3
                    or np.shape(up) != found
                    or np.shape(down) != (found[0], found[2], found[1])
                ):
                    raise UserError(
                        f"layer {layer}: gate {list(found)}, up {list(np.shape(up))} and down "
                        f"{list(np.shape(down))} must be [E, I, D], [E, I, D] and [E, D, I]"
                    )
                if found != shape:
                    raise UserError(
                        f"layer {layer}: gate is {list(found)}, that of layer 0 {list(shape)}"
                    )
                experts, width, hidden = shape
                if layout == "flax":
                    width, hidden = hidden, width
                elif layout is None and width == hidden:
                    raise UserError(
                        f"matrices of {width} × {hidden} do not show their axes; say "
                        "layout='torch' (gate [E, I, D]) or layout='flax' (gate [E, D, I])"
                    )
                if builder is None:
                    record = RecordFormat("dense", hidden, width, to.name)
                    device = jax.devices()[0] if device is None else device
                    builder = StoreBuilder(record, len(layers), experts, device)
                    stack.callback(builder.close)
                for e in range(experts):
                    rows = [np.asarray(gate[e]), np.asarray(up[e]), np.asarray(down[e]).T]
                    rows = [part.T for part in rows] if layout == "flax" else rows
                    weights = np.concatenate([part.astype(to, copy=False) for part in rows])
                    builder.put(layer, e, encode(weights[None], builder.layout))
            assert builder is not None
            return cls(builder.finish(), to.name, activation)

    @property
    def device(self) -> jax.Device:
        """The device whose pinned host memory holds the records."""
        (device,) = self.records.get_value().sharding.device_set
        return device

    def allocate(self, budget: int | str | Share = "100%", eviction: str = "lru") -> ExpertMemory:
        """Allocates device memory for a part of the experts, empty at first.

        - `budget`: bytes such as "6GiB", or a share such as "25%"; with 0 every expert is read from
          host memory. It is rounded down to whole experts and spread evenly over the layers.
        - `eviction`: "lru", "lfu" or "lfru".

        A step is compiled for one budget; `grant` moves cells between layers without compiling it
        again. Raises UserError for an impossible budget and an unknown eviction.
        """
        budget = parse_expert_budget(budget)
        if eviction not in EVICTION:
            raise UserError(f"eviction {eviction!r} is unknown; known: {', '.join(EVICTION)}")
        hidden = self.layout.hidden
        cell_bytes = self._cell_rows * hidden * 2
        cells = expert_slots_of(budget, self.layers * self.experts, cell_bytes)
        sharding = SingleDeviceSharding(self.device)
        memory = ExpertMemory(
            # A step cannot slice an array of zero rows.
            arena=allocate_arena(max(cells, 1) * self._cell_rows, hidden, self.device),
            tables=jax.device_put(
                empty_tables(self.layers, self.experts, self.experts, EVICTION[eviction]),
                sharding,
            ),
            counts=jnp.zeros((self.layers, len(Paging._fields)), jnp.int32, device=sharding),
        )
        return self.grant(memory, cells_per_layer(cells, self.layers, self.experts))

    def grant(self, memory: ExpertMemory, cells: Sequence[int]) -> ExpertMemory:
        """Changes the number of cells of each layer, between two steps. Experts whose cell stays
        remain resident, and no step is compiled again.

        - `memory`: of the same PagedExperts; do not use it afterwards.
        - `cells`: for each layer, from 0 to the number of experts.

        Returns the new memory. Raises UserError for more cells than a layer has experts or than the
        arena has room for.
        """
        room = memory.arena.shape[0] // self._cell_rows
        if len(cells) != self.layers or any(not 0 <= n <= self.experts for n in cells):
            raise UserError(
                f"cells must be {self.layers} numbers from 0 to {self.experts}, one a layer, not "
                f"{list(cells)}"
            )
        if sum(cells) > room:
            raise UserError(f"{sum(cells)} cells are more than the {room} that the arena holds")
        now = np.asarray(memory.tables.cell_row)
        cell_row = place_cells(now, cells, range(sum(cells)), self._cell_rows)
        placed = jax.device_put(cell_row, memory.tables.cell_row.sharding)
        return memory._replace(tables=_regrant(memory.tables, placed))

    def kernel_shape(self) -> tuple[int, int, int, str, str]:
        """The sizes of an expert, their number, activation and dtype, which decide kernels."""
        layout = self.layout
        return layout.hidden, layout.width, self.experts, self.activation, self.dtype

    @property
    def _cell_rows(self) -> int:
        """Arena rows of a cell: those of a record, rounded up to an even number, since 32-bit views
        need an even first row."""
        return self.layout.rows + self.layout.rows % 2


class PagedMoE(nnx.Module):
    """One Mixture-of-Experts layer: a router, and the experts of one layer of a PagedExperts."""

    def __init__(
        self,
        experts: PagedExperts,
        layer: int,
        rule: RouteRule,
        *,
        router: jax.typing.ArrayLike | None = None,
        rngs: nnx.Rngs | None = None,
        row_tile: int = 16,
        waves: int = 1,
        ops: str | Mapping[str, str] = "auto",
    ):
        """Makes a layer.

        - `experts`, `layer`: which experts; layers are counted over MoE layers.
        - `rule`: how logits become experts and weights.
        - `router`: [E, D], converted to the experts' dtype; None: random weights from
          rngs.params().
        - `row_tile`: rows of one matrix product. This fixed shape decides the bits. Rows of x are
          padded to whole tiles; 64 suits long prompts.
        - `waves`: passes over the experts of a call. With more waves, more of the active experts
          can be filled. The bits stay the same.
        - `ops`: see pallas_kernels.resolve_ops. On a GPU, "auto" takes the kernels that were found
          right on this device, and XLA for other ops, which a warning names. Kernels that are
          named, as with "pallas", are checked now, and later layers go by the results.

        Raises UserError for a layer that does not exist, row_tile or waves below 1, a router of
        another shape, neither router nor rngs, and named kernels that cannot run or fail their
        check.
        """
        if not 0 <= layer < experts.layers:
            raise UserError(f"layer {layer} does not exist; there are {experts.layers}")
        if row_tile < 1 or waves < 1:
            raise UserError(f"row_tile ({row_tile}) and waves ({waves}) must be at least 1")
        shape = (experts.experts, experts.layout.hidden)
        with user_errors():
            rule.check(experts.experts, correction=False)
            self.ops = _choose_ops(experts, rule, row_tile, ops)
        if router is None:
            if rngs is None:
                raise UserError("give the router's weights as router, or rngs to draw them")
            draw = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)
            router = draw(rngs.params(), shape, jnp.dtype(experts.dtype))
        if np.shape(router) != shape:
            raise UserError(f"router is {list(np.shape(router))}, it must be {list(shape)}")
        self.experts, self.layer, self.rule = experts, layer, rule
        self.row_tile, self.waves = row_tile, waves
        weights = jnp.asarray(router, jnp.dtype(experts.dtype))
        self.router = nnx.Param(jax.device_put(weights, SingleDeviceSharding(experts.device)))

    def __call__(
        self, x: jax.Array, memory: ExpertMemory, valid: jax.Array | None = None
    ) -> tuple[jax.Array, ExpertMemory]:
        """The weighted sum of the chosen experts' outputs, [..., D], and the new memory.

        - `x`: [..., D] in the experts' dtype.
        - `memory`: of the same PagedExperts.
        - `valid`: bool[...], the rows that hold a token; the others need no expert and get zeros.
          None: all rows hold one.

        The bits of a row depend on the row, row_tile and the device, not on other rows or on
        memory. Raises ValueError for a shape or dtype that does not fit, or memory of other
        experts, and UserError under grad and vmap.
        """
        experts, hidden = self.experts, self.experts.layout.hidden
        if x.shape[-1] != hidden or x.dtype != jnp.dtype(experts.dtype):
            raise ValueError(
                f"x is {x.dtype}{list(x.shape)}, the experts take {experts.dtype}[..., {hidden}]"
            )
        table = (experts.layers, experts.experts)
        if memory.tables.address.shape != table or memory.arena.shape[1] != hidden:
            raise ValueError("memory is not of these experts; use what their allocate returned")
        valid = jnp.ones(x.shape[:-1], bool) if valid is None else valid
        rows, given = x.reshape(-1, hidden), valid.reshape(-1)
        rows, router = _refuse_transforms((rows, self.router.get_value()))
        count = rows.shape[0]
        padding = -count % self.row_tile
        rows, given = jnp.pad(rows, ((0, padding), (0, 0))), jnp.pad(given, (0, padding))
        with jax.named_scope("route"):
            options = LinearOptions(
                self.row_tile,
                implementation=self.ops.linear,
                shared_kib=self.ops.shared_kib,
            )
            logits = linear_parts(rows, router[None], 0, options)
            ids, weights = route(logits, given, rule=self.rule, implementation=self.ops.route)
            rows, ids, weights = lax.optimization_barrier((rows, ids, weights))
        context = ExpertContext(
            stores=(experts.records.get_value(),),
            ops=self.ops,
            activation=experts.activation,
            row_tile=self.row_tile,
            waves=self.waves,
        )
        device = DeviceMemory(memory.arena, memory.tables)
        y, (arena, tables), counts = page_and_compute(
            zero_outputs(ids.size, hidden), rows, ids, device, jnp.int32(self.layer), context
        )
        # The next layer's plan then waits for y, also where both layers take the same x.
        tables = tables._replace(clock=tables.clock + zero_after(y))
        y = add_experts(jnp.zeros_like(rows), y, weights, self.ops)
        sums = memory.counts.at[self.layer].add(counts[: len(Paging._fields)])
        return y[:count].reshape(x.shape), ExpertMemory(arena, tables, sums)


@jax.custom_jvp
@jax.custom_batching.custom_vmap
def _refuse_transforms(operands: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns its operands, and refuses to be differentiated or batched."""
    return operands


@_refuse_transforms.defjvp
def _refuse_gradient(primals, tangents):
    raise UserError(
        "PagedMoE is for inference and has no gradient, since it changes memory in place; use "
        "jax.lax.stop_gradient on its input, and on its state"
    )


@_refuse_transforms.fun.def_vmap
def _refuse_vmap(size, batched, operands):
    raise UserError(
        "PagedMoE cannot be batched by vmap, since all rows share one memory; give it all rows at "
        "once, x [..., D]"
    )


_regrant = jax.jit(regrant)


def _are_checked(device: jax.Device) -> bool:
    return device.platform == "gpu"


def _choose_ops(
    experts: PagedExperts, rule: RouteRule, row_tile: int, ops: str | Mapping[str, str]
) -> Ops:
    """Returns the ops of a layer, as PagedMoE says. Raises ValueError for named kernels."""
    asked, declined = parse_ops(ops), dict[str, str]()
    if (reason := why_not_pallas(rule)) is not None:
        declined["route"] = reason
    if row_tile not in KERNEL_ROW_TILES:
        reason = f"row_tile is {row_tile}; kernels are checked for {KERNEL_ROW_TILES} rows"
        declined |= dict.fromkeys(OPS, reason)
    found: dict[str, str] = {}
    while True:
        chosen = resolve_ops(
            ops,
            platform=experts.device.platform,
            dtype=experts.dtype,
            no_kernel=declined | found,
            shared_kib=shared_class(experts.device),
        )
        if not _are_checked(experts.device):
            return chosen
        job = Job(kernel_checks, (chosen, *experts.kernel_shape(), rule))
        why = why_no_kernels(job.checks(), current(experts.device, SHIPPED, checked_folder()))
        new = {op: why[op] for op in why if asked[op] == "auto" and op not in found}
        if not new:
            break
        found |= new
    require_verified(job, job.checks(), experts.device, checked_folder())
    if found:
        reason, names = next(iter(found.values())), ", ".join(found)
        _warn(f"in XLA, not as kernels: {names}; {reason}\nops='pallas' checks them now")
    return chosen


@functools.cache
def _warn(message: str) -> None:
    """Logs a warning once: the layers of a model have the same."""
    log.warning("%s", message)


def kernel_checks(
    ops: Ops,
    hidden: int,
    width: int,
    experts: int,
    activation: str,
    dtype: str,
    rule: RouteRule,
) -> list[Check]:
    """The checks for the kernels that layers of these experts run."""
    shape = ModelShape(
        hidden=hidden,
        width=width,
        experts=experts,
        rule=rule,
        # The layer has no attention, and `runs` leaves its checks out.
        heads=1,
        kv_heads=1,
        head_dim=16,
        products=((experts, hidden, False, "float32"),),
        block_size=BLOCK_SIZES[0],
        window=None,
        activation=activation,
        dtype=dtype,
    )

    def runs(check: Check) -> bool:
        """Whether a layer runs the kernel. It runs no kernels that fuse several ops, and none for
        fewer rows than the smallest tile."""
        whole = not check.rows or max(check.rows) >= min(KERNEL_ROW_TILES)
        return check.op in OPS_USED and not check.beside and whole

    return [check for check in checks(shape, ops) if runs(check)]


def _dtype_name(dtype: str) -> str:
    if dtype not in DTYPE_NAMES:
        raise UserError(f"dtype {dtype!r} is unknown; choose {', '.join(DTYPE_NAMES)}")
    return DTYPE_NAMES[dtype]
