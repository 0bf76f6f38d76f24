"""One check per op and shape: kernel against reference, inputs made on the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.combine import combine
from pallas_kernels.dispatch import Ops
from pallas_kernels.expert_ffn import expert_ffn
from pallas_kernels.fill import fill
from pallas_kernels.kv_write import KVPage, kv_write
from pallas_kernels.linear import linear
from pallas_kernels.paged_attention import decode_attention, prefill_attention
from pallas_kernels.plan import Tables, plan
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.route import route
from pallas_kernels.stage import Entries, stage
from pallas_kernels.tolerances import TOLERANCES

EXPERTS_CHECKED = 4
"""Fewest experts in the stores that are made: tiles do not depend on how many there are."""

WIDE_BYTES = (1 << 32) + (1 << 28)
"""Pallas addresses arrays above 4 GiB with 64-bit offsets: another kernel, checked on its own."""


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """What of a model decides the kernels' configurations."""

    hidden: int
    width: int
    experts: int
    top_k: int
    normalize: bool
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    dense_width: int
    """Of layers without experts; 0 where there are none."""
    bias: bool
    block_size: int
    window: int | None
    activation: str
    dtype: str


@dataclasses.dataclass(frozen=True)
class Check:
    """One kernel configuration against the reference."""

    op: str
    key: str
    """Op, shapes and dtype in words: the name of the check in tables."""
    operands: Callable[[], tuple]
    """Makes the inputs, on the device or in pinned host memory, when the check runs."""
    run: Callable[..., object]
    """(implementation, *operands) -> results."""
    tolerance: float
    """Of |got − want| / (1 + |want|); 0: exact."""

    def error(self, device: jax.Device) -> float:
        """Largest deviation of the kernel from the reference, as `tolerance` measures it; infinite
        where one has a NaN that the other has not."""
        with jax.default_device(device):
            operands = self.operands()
            got, want = (
                jax.tree.leaves(jax.jit(functools.partial(self.run, name))(*operands))
                for name in ("pallas", "xla")
            )
            return max(_deviation(g, w) for g, w in zip(got, want, strict=True))


def checks(
    shape: ModelShape, ops: Ops, device: jax.Device, wide_bytes: int = WIDE_BYTES
) -> list[Check]:
    """The checks of every kernel that `ops` would run for a model of this shape. Nothing is
    computed or allocated before a check runs. wide_bytes: size of the arrays that need 64-bit
    offsets."""
    wanted = dataclasses.asdict(ops)
    # Products of equal sizes are one check.
    every = {check.key: check for check in _all(shape, device, wide_bytes)}
    return [check for check in every.values() if wanted[check.op] == "pallas"]


def _deviation(result: jax.Array, reference: jax.Array) -> float:
    got, want = np.asarray(result), np.asarray(reference)
    if got.dtype.kind in "iub":
        return 0.0 if np.array_equal(got, want) else float("inf")
    a, b = got.astype(np.float64), want.astype(np.float64)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    return float(np.nanmax(np.abs(a - b) / (1 + np.abs(b)), initial=0.0))


def _all(shape: ModelShape, device: jax.Device, wide_bytes: int) -> Iterator[Check]:
    yield from _dense(shape)
    yield from _tables_only(shape)
    for least in (0, wide_bytes):
        yield from _records(shape, device, least)
        yield from _attention(shape, least)


def _draw(
    seed: int, shape: tuple[int, ...], dtype: str, scale: float | jax.Array = 1.0
) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(dtype)


def _check(
    op: str,
    what: str,
    dtype: str,
    operands: Callable[[], tuple],
    run: Callable[..., object],
    out: str = "",
) -> Check:
    """out: the result's dtype, if it is not dtype."""
    # Twice the table's: kernel and reference round each for itself. A float32 result only differs
    # by the order of its sum.
    tolerance = 2 * TOLERANCES.get(op, {}).get(dtype, 0.0)
    if "float32" in (out, dtype):
        tolerance = 2e-5
    return Check(op, f"{op} {what} {dtype}", operands, run, tolerance)


def _dense(shape: ModelShape) -> Iterator[Check]:
    d, dtype = shape.hidden, shape.dtype
    columns = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    products = [
        (columns, d, shape.bias, dtype),
        (d, shape.heads * shape.head_dim, shape.bias, dtype),
        (shape.experts, d, False, "float32"),
        (shape.vocabulary, d, False, "float32"),
    ]
    if shape.dense_width:
        products += [
            (2 * shape.dense_width, d, False, "float32"),
            (d, shape.dense_width, False, dtype),
        ]
    for outputs, inputs, bias, out in products:
        for row_tile in (16, 64):

            def inputs_of(outputs=outputs, inputs=inputs, bias=bias, tile=row_tile):
                return (
                    _draw(0, (2 * tile, inputs), dtype),
                    _draw(1, (1, outputs, inputs), dtype, inputs**-0.5),
                    jnp.int32(0),
                    _draw(2, (1, outputs), dtype) if bias else None,
                )

            def product(name, *operands, out=out, tile=row_tile):
                return linear(*operands, row_tile=tile, out_dtype=out, implementation=name)

            what = f"{outputs}x{inputs} rows {row_tile} bias {bias} out {out}"
            yield _check("linear", what, dtype, inputs_of, product, out)

    def rows():
        return _draw(0, (33, d), dtype), _draw(1, (2, d), dtype)

    def norm(name, x, weights):
        return rms_norm(x, weights, jnp.int32(1), 1e-6, implementation=name)

    yield _check("rms_norm", f"{d}", dtype, rows, norm)

    def parts():
        weights = jax.nn.softmax(_draw(2, (33, shape.top_k), "float32"))
        return _draw(0, (33, d), dtype), _draw(1, (33, shape.top_k, d), "float32"), weights

    def weighted(name, *operands):
        return combine(*operands, implementation=name)

    yield _check("combine", f"{shape.top_k}x{d}", dtype, parts, weighted)


def _tables_only(shape: ModelShape) -> Iterator[Check]:
    experts, k = shape.experts, shape.top_k

    def scores():
        return _draw(0, (33, experts), "float32", 3.0), jnp.arange(33) % 5 != 0

    def routed(name, logits, valid):
        arguments = {"top_k": k, "normalize": shape.normalize, "implementation": name}
        return route(logits, valid, **arguments)

    what = f"{experts} top {k} normalize {shape.normalize}"
    yield _check("route", what, "float32", scores, routed)

    def references():
        chance = min(4 * k / experts, 1)
        return (jax.random.bernoulli(jax.random.key(1), chance, (6, experts)),)

    for cells in sorted({experts, max(experts // 4, 1)}):

        def planned(name, active, cells=cells):
            tables, results = _tables(experts, cells), []
            for step in range(6):
                tables, work = plan(tables, jnp.int32(1), active[step], implementation=name)
                results.append(work)
            return tables, results

        yield _check("plan", f"{experts} experts {cells} cells", "int32", references, planned)


def _tables(experts: int, cells: int, layers: int = 2) -> Tables:
    def full(columns, value):
        return jnp.full((layers, columns), value, jnp.int32)

    return Tables(
        cell_row=jnp.broadcast_to(jnp.arange(cells, dtype=jnp.int32) * 8, (layers, cells)),
        cell_version=full(cells, 0),
        owner=full(cells, -1),
        last_used=full(cells, 0),
        address=full(experts, -1),
        version=full(experts, 0),
        frequency=full(experts, 0),
        fill_version=full(experts, 0),
        prior=full(experts, 0),
        clock=jnp.zeros(layers, jnp.int32),
        victim_weights=jnp.asarray([1, 1, 0], jnp.int32),
    )


def _records(shape: ModelShape, device: jax.Device, least: int) -> Iterator[Check]:
    """fill, stage and expert_ffn on a store and an arena of at least so many bytes, the records at
    their ends."""
    rows, d = 3 * shape.width, shape.hidden
    experts = max(EXPERTS_CHECKED, shape.top_k)
    record = rows * d * 2
    layers = max(1, -(-least // (experts * record)))
    cells = max(3, -(-least // record))
    layer, first = jnp.int32(layers - 1), (cells - 3) * rows
    what = f"{rows}x{d}{' offsets 64' if least else ''}"
    # Gate and up sum over D, down over I.
    scale = jnp.repeat(jnp.asarray([d**-0.5, d**-0.5, shape.width**-0.5]), shape.width)[:, None]

    def bits():
        values = _draw(7, (1, experts, rows, d), shape.dtype, scale)
        return jax.lax.bitcast_convert_type(values, jnp.uint16)

    def store(records):
        return _pinned(records, layers, device)

    def empty():
        return jnp.zeros((cells * rows, d), jnp.uint16)

    def filled(name, store, arena):
        expert, row = jnp.asarray([2, 0, 3, -1]), first + jnp.asarray([rows, 0, 2 * rows, -1])
        version, count = jnp.zeros(4, jnp.int32), jnp.int32(3)
        arena = fill(arena, (store,), layer, expert, row, version, count, implementation=name)
        return arena[first:]

    yield _check("fill", what, "uint16", lambda: (store(bits()), empty()), filled)

    def staged(name, store, arena):
        tables = _tables(experts, 3, layers)
        cell_row = first + jnp.arange(3, dtype=jnp.int32) * rows
        tables = tables._replace(
            cell_row=jnp.broadcast_to(cell_row, (layers, 3)), clock=jnp.ones(layers, jnp.int32)
        )
        fields = ([layers - 1, layers - 1, -1, layers - 1], [2, 1, 0, 2], [0] * 4, [0, 2, 1, 1])
        entries = Entries._make(jnp.asarray(field, jnp.int32) for field in fields)
        arena, *results = stage(arena, tables, (store,), layer, entries, implementation=name)
        return arena[first:], results

    yield _check("stage", what, "uint16", lambda: (store(bits()), empty()), staged)

    k = min(shape.top_k, experts)
    for tokens, row_tile in ((16, 16), (32, 16), (64, 16), (192, 64)):

        def inputs_of(tokens=tokens):
            records = bits()
            # Expert 1 has no cell: it is read through.
            arena = empty()
            for cell, expert in enumerate((2, 0, 3)):
                place = (first + cell * rows, 0)
                arena = jax.lax.dynamic_update_slice(arena, records[0, expert], place)
            ids = jnp.sort(jax.lax.top_k(_draw(1, (tokens, experts), "float32"), k)[1], axis=1)
            ids = jnp.where(jnp.arange(tokens)[:, None] % 11 == 10, experts, ids)
            return store(records), arena, _draw(0, (tokens, d), shape.dtype), ids

        def computed(name, store, arena, x, ids, row_tile=row_tile):
            address = jnp.full((layers, experts), -1, jnp.int32)
            for cell, expert in enumerate((2, 0, 3)):
                address = address.at[layer, expert].set(first + cell * rows)
            return expert_ffn(
                jnp.zeros((ids.size, d), jnp.float32),
                x,
                ids,
                arena,
                (store,),
                layer,
                address,
                jnp.zeros((layers, experts), jnp.int32),
                jnp.arange(experts, dtype=jnp.int32),
                jnp.int32(experts),
                activation=shape.activation,
                row_tile=row_tile,
                implementation=name,
            )

        full = f"{what} {shape.activation} top {k} tokens {tokens} rows {row_tile}"
        yield _check("expert_ffn", full, shape.dtype, inputs_of, computed)


def _pinned(records: jax.Array, layers: int, device: jax.Device) -> jax.Array:
    """A store [layers, E, rows, D] in pinned host memory, the records [1, E, rows, D] its last
    layer; the others hold what was there."""
    shape = (layers, *records.shape[1:])
    if device.platform != "gpu":  # the interpreter of jax 0.10 takes no operand on the host
        return jnp.zeros(shape, jnp.uint16).at[-1:].set(records)
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    allocate = jax.jit(lambda: jax.lax.empty(shape, jnp.uint16), out_shardings=sharding)

    def write(store, records):
        records = jax.device_put(records, jax.typeof(store).memory_space)
        return jax.lax.dynamic_update_slice(store, records, (layers - 1, 0, 0, 0))

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)(allocate(), records)


def _attention(shape: ModelShape, least: int) -> Iterator[Check]:
    """kv_write and attention on an arena of at least so many bytes, the pages at its end."""
    page = KVPage(shape.block_size, shape.kv_heads, shape.head_dim)
    blocks = 1024 // shape.block_size
    page_rows = 2 * page.rows_per_layer  # two layers, of which the second is used
    used = 4 * blocks * page_rows
    unused = max(0, -(-least // (2 * shape.head_dim)) - used)
    kv = f"heads {shape.heads}/{shape.kv_heads}x{shape.head_dim} block {shape.block_size}"
    kv += " offsets 64" if least else ""

    def table():
        pages = jax.random.permutation(jax.random.key(3), 4 * blocks).reshape(4, blocks)
        return (unused + pages * page_rows).astype(jnp.int32)

    def arena():
        values = _draw(4, (used, shape.head_dim), shape.dtype)
        bits = jax.lax.bitcast_convert_type(values, jnp.uint16)
        whole = jnp.zeros((unused + used, shape.head_dim), jnp.uint16)
        return jax.lax.dynamic_update_slice(whole, bits, (unused, 0))

    def tokens():
        columns = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        inverse = 1e4 ** (-jnp.arange(shape.head_dim // 2) / (shape.head_dim // 2))
        norms = (_draw(i, (2, shape.head_dim), shape.dtype) for i in (1, 2))
        return _draw(0, (33, columns), shape.dtype), *norms, inverse, arena(), table()

    def written(name, qkv, q_norm, k_norm, inverse, arena, table):
        positions = jnp.arange(33, dtype=jnp.int32) * 29
        pages = jnp.where(positions % 7 == 6, -1, table[0][positions // shape.block_size])
        q, result = kv_write(
            qkv,
            q_norm,
            k_norm,
            jnp.int32(1),
            positions,
            inverse,
            arena,
            pages,
            jnp.int32(1),
            page=page,
            attention_factor=1.0,
            eps=1e-6,
            implementation=name,
        )
        return q, jax.lax.bitcast_convert_type(result[unused:], jnp.dtype(shape.dtype))

    yield _check("kv_write", kv, shape.dtype, tokens, written)

    def queries(count: int):
        return lambda: (
            _draw(5, (count, shape.heads, shape.head_dim), shape.dtype),
            arena(),
            table(),
        )

    def decoded(name, q, arena, table):
        lengths = jnp.asarray([1, 0, 65, 1000], jnp.int32)
        arguments = {"page": page, "window": shape.window, "implementation": name}
        return decode_attention(q, arena, table, lengths, jnp.int32(1), **arguments)

    what = f"decode {kv} window {shape.window}"
    yield _check("paged_attention", what, shape.dtype, queries(4), decoded)

    def swept(name, q, arena, table):
        start, length = jnp.asarray([0, 64, 640, 0]), jnp.asarray([64, 64, 17, 1])
        out = prefill_attention(
            q,
            arena,
            table,
            jnp.asarray([0, 0, 2, 3]),
            start,
            length,
            jnp.int32(4),
            jnp.int32(1),
            page=page,
            window=shape.window,
            implementation=name,
        )
        real = (jnp.arange(64) < length[:, None]).reshape(-1)
        return jnp.where(real[:, None], out, 0)

    what = f"prefill {kv} window {shape.window}"
    yield _check("paged_attention", what, shape.dtype, queries(4 * 64), swept)
