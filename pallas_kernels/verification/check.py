"""A check compares one kernel configuration with the reference, on inputs made when it runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from pallas_kernels.expert_ffn import Activation
from pallas_kernels.route import RouteRule
from pallas_kernels.tolerances import TOLERANCES

DECODE_ROWS = 16
"""Rows of a product in decode steps with 16 or more rows."""

FEW_ROWS = 1, 2, 4, 8
"""Rows of the smaller decode steps that an engine compiles. Products in tiles of 16 mask the other
rows, which makes other kernels."""

_TOGETHER = {DECODE_ROWS: (DECODE_ROWS, 4), 8: (8, 2, 1)}


def together(rows: int) -> tuple[int, ...]:
    """Rows of the decode steps in one check, `rows` being the most. All FEW_ROWS are in two checks,
    since each check is a compilation."""
    return _TOGETHER.get(rows, (rows,))


class StateShape(NamedTuple):
    """What an op advances in a layer with state."""

    op: str
    sizes: tuple[Any, ...]
    """Of gated_delta: (DeltaShape, by_key_head); of selective_scan: (ScanShape, limits); of
    short_conv: (width, taps, silu)."""


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The sizes and properties of a model that decide the kernels' configurations."""

    hidden: int
    width: int
    experts: int
    rule: RouteRule
    heads: int
    kv_heads: int
    head_dim: int
    products: tuple[tuple[int, int, bool, str], ...]
    """The shapes of `linear`: outputs, inputs, whether there is a bias, the result's dtype."""
    block_size: int
    window: int | None
    """The sliding window of some or all layers; None: no layer has one."""
    activation: Activation
    dtype: str
    qk_norm: bool = True
    """Whether kv_write normalises the heads of queries and keys."""
    latent: int = 0
    """See KVPage.latent."""
    up_projection: tuple[int, int] = (0, 0)
    """Values of a head's key, and of its value, that head_linear computes from the latent."""
    interleave: bool = False
    """See latent_write."""
    sinks: bool = False
    """Whether query heads have sinks."""
    correction: bool = False
    """Whether routers add a correction to the scores they choose by."""
    norm: str = "rms_norm"
    """The op of the norms before attention, experts and logits: rms_norm or layer_norm."""
    other_norms: tuple[int, ...] = ()
    """Widths of rms_norms other than `hidden`: compressed queries, or all heads of q or k."""
    squares: bool = True
    """Whether a layer's last kernel returns squares of its result, for the next layer's first
    product: LayerStack.takes_squares."""
    vocabulary: int = 0
    """Tokens of the vocabulary; 0: nothing is sampled."""
    versions: tuple[tuple[str, str], ...] = (("dense", "dense"),)
    """The versions of experts, by number: in a cell, in the store."""
    biases: bool = False
    """Whether experts have biases."""
    gated: bool = True
    """Whether experts have three matrices; False: two."""
    states: tuple[StateShape, ...] = ()
    """Of a layer with state; (): no layer has one."""
    state_page: tuple[int, int] = (0, 0)
    """KV rows of a page, and uint16 elements of a KV row: see StatePage."""


@dataclasses.dataclass(frozen=True)
class Stores:
    """The stores in pinned host memory that a check reads."""

    layers: int
    """Layers of each store. The records are in the last one; the others are not initialised."""
    records: Callable[[], tuple[jax.Array, ...]]
    """Makes uint16[1, E, rows, D] of each version."""

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """[layers, E, rows, D] of each version."""
        return tuple((self.layers, *r.shape[1:]) for r in jax.eval_shape(self.records))


@dataclasses.dataclass(frozen=True)
class Check:
    """Compares one kernel configuration with the reference."""

    op: str
    key: str
    """Op, shapes and dtype in words: the name of the check in tables."""
    operands: Callable[[], tuple]
    """Makes the inputs in device memory, inside a jit, when the check runs."""
    run: Callable[..., object]
    """(implementation, arena, stores, *operands) -> results, without `arena` or `stores` where the
    check has none."""
    tolerance: float
    """The largest |got − want| / (1 + |want|) that passes; 0: exact."""
    arena: Callable[[], jax.Array] | None = None
    """Makes the array that the op changes in place, like `operands`. Each implementation gets a new
    one, donated, and returns it as its first result, so nothing is copied. None: there is none."""
    seen: Callable[[jax.Array], jax.Array] | None = None
    """The part of the changed arena that is compared; None: all of it."""
    stores: Stores | None = None
    wide: bool | None = None
    """Whether arena and stores are addressed with 64 bits, which makes another kernel; None: there
    is no arena and no store."""
    rows: tuple[int, ...] = ()
    """Rows of the decode steps that run its kernels; (): the kernels do not depend on rows."""
    beside: tuple[str, ...] = ()
    """Other ops that are fused into this kernel: it runs only if they run as kernels too."""
    implementation: str = "pallas"
    """Of the kernel."""

    def of_mosaic(self) -> Check:
        """The check of the op's Mosaic kernel."""
        return dataclasses.replace(self, key=f"{self.key} mosaic", implementation="mosaic")

    def prepare(self, device: jax.Device) -> Prepared:
        """See `prepare`."""
        return prepare(self, device)

    def error(self, device: jax.Device) -> float:
        """The largest deviation of the kernel from the reference, as `tolerance` measures it;
        infinite if only one of them has a NaN."""
        return prepare(self, device).error()


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A check whose programs are compiled. None has run, and nothing is allocated."""

    check: Check
    device: jax.Device
    programs: Mapping[str, Callable[..., Any]]
    """Compiled `operands`, `arena` and `seen`, and `run` of each implementation."""

    def error(self) -> float:
        """See Check.error. The device holds one arena at a time."""
        check, programs = self.check, self.programs
        operands = programs["operands"]()
        if check.stores is not None:
            records = programs["records"]()
            layers = check.stores.layers
            operands = (tuple(pinned_store(r, layers, self.device) for r in records), *operands)
        found = []
        for name in (check.implementation, "xla"):
            if check.arena is None:
                results = programs[name](*operands)
            else:
                changed, *results = programs[name](programs["arena"](), *operands)
                results = [programs["seen"](changed), results]
                del changed
            found.append([np.asarray(leaf) for leaf in jax.tree.leaves(results)])
            del results
        return max(deviation(got, want) for got, want in zip(*found, strict=True))


def prepare(check: Check, device: jax.Device) -> Prepared:
    """Compiles a check's programs. Several threads may do so at once: tracing holds Python's lock,
    XLA's compiler does not."""
    here = SingleDeviceSharding(device)

    def compiled(function: Callable, *args: Any, donated: tuple[int, ...] = ()) -> Any:
        placed: dict[str, Any] = {} if args else {"out_shardings": here}
        lowered = jax.jit(function, donate_argnums=donated, **placed).lower(*args)
        return lowered.compile(compiler_options=_compiler_options(device.platform))

    programs = {"operands": compiled(check.operands)}
    args = argument_shapes(check, here)
    if check.stores is not None:
        programs["records"] = compiled(check.stores.records)
    if check.arena is not None:
        programs["arena"] = compiled(check.arena)
        programs["seen"] = compiled(check.seen or (lambda arena: arena), args[0])
    donated = () if check.arena is None else (0,)
    for name in (check.implementation, "xla"):
        programs[name] = compiled(functools.partial(check.run, name), *args, donated=donated)
    return Prepared(check, device, programs)


def argument_shapes(check: Check, sharding: jax.sharding.Sharding | None = None) -> tuple:
    """jax.ShapeDtypeStructs of `run`'s arguments after the implementation.

    - `sharding`: of arrays in device memory; stores have the same with pinned memory. None: none.
    """

    def shapes(make: Callable) -> Any:
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
            jax.eval_shape(make),
        )

    args = shapes(check.operands)
    if check.stores is not None:
        pinned = sharding
        if sharding is not None and _pins(sharding):
            pinned = sharding.with_memory_kind("pinned_host")
        stores = check.stores.shapes()
        args = (
            tuple(jax.ShapeDtypeStruct(s, jnp.uint16, sharding=pinned) for s in stores),
            *args,
        )
    return args if check.arena is None else (shapes(check.arena), *args)


def pinned_store(records: jax.Array, layers: int, device: jax.Device) -> jax.Array:
    """A store [layers, E, rows, D] in pinned host memory with the records [1, E, rows, D] as its
    last layer. The other layers are not initialised."""
    shape = (layers, *records.shape[1:])
    sharding = SingleDeviceSharding(device)
    if not _pins(sharding):
        return jnp.zeros(shape, jnp.uint16).at[-1:].set(records)
    return _write_last(_allocate(shape, sharding.with_memory_kind("pinned_host")), records)


def _pins(sharding: jax.sharding.Sharding) -> bool:
    """Whether stores are in pinned memory. The interpreter of jax 0.10 takes no operand there."""
    (device,) = sharding.device_set
    return device.platform == "gpu"


def _allocate(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.jit(lambda: jax.lax.empty(shape, jnp.uint16), out_shardings=sharding)()


def _write_last(store: jax.Array, records: jax.Array) -> jax.Array:
    def write(store, records):
        records = jax.device_put(records, jax.typeof(store).memory_space)
        return jax.lax.dynamic_update_slice(store, records, (store.shape[0] - 1, 0, 0, 0))

    return jax.jit(write, donate_argnums=0, out_shardings=store.sharding)(store, records)


def _compiler_options(platform: str) -> dict[str, str | bool]:
    """XLA options: equal rounding in both programs, no tuning of the reference's products, and no
    search for values to compute twice, since arenas take most of the memory."""
    options: dict[str, str | bool] = {"xla_allow_excess_precision": False}
    if platform == "gpu":
        options["xla_gpu_autotune_level"] = "0"
        options["xla_disable_hlo_passes"] = "rematerialization"
    return options


def deviation(got: np.ndarray, want: np.ndarray) -> float:
    if got.dtype.kind in "iub":
        return 0.0 if np.array_equal(got, want) else float("inf")
    a, b = got.astype(np.float64), want.astype(np.float64)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    return float(np.nanmax(np.abs(a - b) / (1 + np.abs(b)), initial=0.0))


def behind(arena: jax.Array, made: jax.Array, name: str) -> jax.Array:
    """The arena, made to depend on `made`, float[R, C], which was computed from it. Otherwise XLA
    would copy the whole arena for a reference that changes it again. Kernels change it in place."""
    if name != "xla":
        return arena
    zero = (made[:1, :1] > jnp.inf).astype(arena.dtype)
    return jax.lax.dynamic_update_slice(arena, arena[:1, :1] | zero, (0, 0))


def draw(
    seed: int, shape: tuple[int, ...], dtype: str, scale: float | jax.Array = 1.0
) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(dtype)


def make_check(
    op: str,
    what: str,
    dtype: str,
    operands: Callable[[], tuple],
    run: Callable[..., object],
    out: str = "",
    *,
    arena: Callable[[], jax.Array] | None = None,
    seen: Callable[[jax.Array], jax.Array] | None = None,
    stores: Stores | None = None,
    wide: bool | None = None,
    rows: tuple[int, ...] = (),
    beside: tuple[str, ...] = (),
) -> Check:
    """Makes a check. out: the result's dtype, if it is not dtype. Other arguments: see Check."""
    # Twice the tolerance, since kernel and reference both round. A float32 result differs only by
    # the order of its sum.
    tolerance = 2 * TOLERANCES.get(op, {}).get(dtype, 0.0)
    if "float32" in (out, dtype):
        tolerance = 2e-5
    key = f"{op} {what} {dtype}"
    return Check(op, key, operands, run, tolerance, arena, seen, stores, wide, rows, beside)


def same_rows(got: jax.Array, wanted: jax.Array) -> jax.Array:
    """int32: 1 for rows in which both have the same bits."""
    bits = {2: jnp.uint16, 4: jnp.uint32}[got.dtype.itemsize]
    equal = jnp.equal(*(jax.lax.bitcast_convert_type(y, bits) for y in (got, wanted)))
    return equal.astype(jnp.int32).min(axis=-1)
