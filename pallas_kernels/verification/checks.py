"""One check per op and shape: kernel against reference, inputs made on the device."""

from __future__ import annotations

import dataclasses
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
"""Experts in the stores that are made: a kernel's tiles do not depend on how many there are."""


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
    """`run(implementation)` computes the op on inputs fixed by the check; `close` compares."""

    op: str
    key: str
    """Op, shapes and dtype in words: the name of the check in tables."""
    run: Callable[[str], object]
    tolerance: float
    """Of |got − want| / (1 + |want|); 0: exact."""

    def error(self) -> float:
        """Largest deviation of the kernel from the reference, as `tolerance` measures it; infinite
        where one has a NaN that the other has not."""
        got, want = (jax.tree.leaves(self.run(name)) for name in ("pallas", "xla"))
        return max(_deviation(g, w) for g, w in zip(got, want, strict=True))


def checks(shape: ModelShape, ops: Ops, device: jax.Device) -> list[Check]:
    """The checks of every kernel that `ops` would run for a model of this shape."""
    wanted = dataclasses.asdict(ops)
    # Products of equal sizes are one check.
    every = {check.key: check for check in _all(shape, device)}
    return [check for check in every.values() if wanted[check.op] == "pallas"]


def _deviation(result: jax.Array, reference: jax.Array) -> float:
    got, want = np.asarray(result), np.asarray(reference)
    if got.dtype.kind in "iub":
        return 0.0 if np.array_equal(got, want) else float("inf")
    a, b = got.astype(np.float64), want.astype(np.float64)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    return float(np.nanmax(np.abs(a - b) / (1 + np.abs(b)), initial=0.0))


def _all(shape: ModelShape, device: jax.Device) -> Iterator[Check]:
    yield from _dense(shape)
    yield from _paging(shape, device)
    yield from _experts(shape, device)
    yield from _attention(shape)


def _draw(seed: int, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(dtype)


def _check(op: str, what: str, dtype: str, run: Callable[[str], object], out: str = "") -> Check:
    """out: the result's dtype, if it is not dtype."""
    compiled = {}
    # Twice the table's: kernel and reference round each for itself. A float32 result only differs
    # by the order of its sum.
    tolerance = 2 * TOLERANCES.get(op, {}).get(dtype, 0.0)
    if "float32" in (out, dtype):
        tolerance = 2e-5

    def jitted(implementation: str) -> object:
        fn = compiled.setdefault(implementation, jax.jit(lambda: run(implementation)))
        return fn()

    return Check(op, f"{op} {what} {dtype}", jitted, tolerance)


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

            def product(name, outputs=outputs, inputs=inputs, bias=bias, out=out, tile=row_tile):
                return linear(
                    _draw(0, (2 * tile, inputs), dtype),
                    _draw(1, (1, outputs, inputs), dtype, inputs**-0.5),
                    jnp.int32(0),
                    _draw(2, (1, outputs), dtype) if bias else None,
                    row_tile=tile,
                    out_dtype=out,
                    implementation=name,
                )

            what = f"{outputs}x{inputs} rows {row_tile} bias {bias} out {out}"
            yield _check("linear", what, dtype, product, out)

    def norm(name):
        x, weights = _draw(0, (33, d), dtype), _draw(1, (2, d), dtype)
        return rms_norm(x, weights, jnp.int32(1), 1e-6, implementation=name)

    yield _check("rms_norm", f"{d}", dtype, norm)

    def weighted(name):
        y = _draw(1, (33, shape.top_k, d), "float32")
        weights = jax.nn.softmax(_draw(2, (33, shape.top_k), "float32"))
        return combine(_draw(0, (33, d), dtype), y, weights, implementation=name)

    yield _check("combine", f"{shape.top_k}x{d}", dtype, weighted)


def _paging(shape: ModelShape, device: jax.Device) -> Iterator[Check]:
    experts, k = shape.experts, shape.top_k

    def routed(name):
        logits, valid = _draw(0, (33, experts), "float32", 3.0), jnp.arange(33) % 5 != 0
        arguments = {"top_k": k, "normalize": shape.normalize, "implementation": name}
        return route(logits, valid, **arguments)

    yield _check("route", f"{experts} top {k} normalize {shape.normalize}", "float32", routed)

    for cells in sorted({experts, max(experts // 4, 1)}):

        def planned(name, cells=cells):
            tables, results = _tables(experts, cells), []
            for step in range(6):
                active = jax.random.bernoulli(
                    jax.random.key(step), min(4 * k / experts, 1), (experts,)
                )
                tables, work = plan(tables, jnp.int32(1), active, implementation=name)
                results.append(work)
            return tables, results

        yield _check("plan", f"{experts} experts {cells} cells", "int32", planned)

    rows = 3 * shape.width
    store = _store(rows, shape.hidden, device)

    def filled(name):
        expert, row = jnp.asarray([2, 0, 3, -1]), jnp.asarray([rows, 0, 2 * rows, -1])
        arena = jnp.zeros((4 * rows, shape.hidden), jnp.uint16)
        version, count = jnp.zeros(4, jnp.int32), jnp.int32(3)
        return fill(arena, (store,), jnp.int32(0), expert, row, version, count, implementation=name)

    yield _check("fill", f"{rows}x{shape.hidden}", "uint16", filled)

    def staged(name):
        tables = _tables(EXPERTS_CHECKED, 3, layers=1)
        cell_row = jnp.arange(3, dtype=jnp.int32)[None] * rows
        tables = tables._replace(cell_row=cell_row, clock=jnp.ones(1, jnp.int32))
        layer, expert = jnp.asarray([0, 0, -1, 0]), jnp.asarray([2, 1, 0, 2])
        entries = Entries(layer, expert, jnp.zeros(4, jnp.int32), jnp.asarray([0, 2, 1, 1]))
        entries = Entries._make(field.astype(jnp.int32) for field in entries)
        arena = jnp.zeros((3 * rows, shape.hidden), jnp.uint16)
        return stage(arena, tables, (store,), jnp.int32(0), entries, implementation=name)

    yield _check("stage", f"{rows}x{shape.hidden}", "uint16", staged)


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


def _store(rows: int, hidden: int, device: jax.Device) -> jax.Array:
    """Random records [1, EXPERTS_CHECKED, rows, hidden] in host memory, small values."""
    bits = _draw(7, (1, EXPERTS_CHECKED, rows, hidden), "bfloat16", hidden**-0.5)
    store = jax.lax.bitcast_convert_type(bits, jnp.uint16)
    if device.platform != "gpu":  # the interpreter of jax 0.10 takes no operand on the host
        return jax.device_put(store, device)
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    return jax.device_put(store, sharding)


def _experts(shape: ModelShape, device: jax.Device) -> Iterator[Check]:
    d, rows = shape.hidden, 3 * shape.width
    experts, k = EXPERTS_CHECKED, min(shape.top_k, 2)
    store = _store(rows, d, device)
    for tokens, row_tile in ((33, 16), (192, 64)):

        def computed(name, tokens=tokens, row_tile=row_tile):
            x = _draw(0, (tokens, d), shape.dtype)
            scores = _draw(1, (tokens, experts), "float32")
            ids = jnp.sort(jax.lax.top_k(scores, k)[1], axis=1)
            ids = jnp.where(jnp.arange(tokens)[:, None] % 11 == 10, experts, ids)
            # Expert 1 has no cell: it is read through.
            arena = jnp.concatenate([store[0, e] for e in (2, 0, 3)])
            address = jnp.asarray([[rows, -1, 0, 2 * rows]], jnp.int32)
            return expert_ffn(
                jnp.zeros((tokens * k, d), jnp.float32),
                x,
                ids,
                arena,
                (store,),
                jnp.int32(0),
                address,
                jnp.zeros((1, experts), jnp.int32),
                jnp.arange(experts, dtype=jnp.int32),
                jnp.int32(experts),
                activation=shape.activation,
                row_tile=row_tile,
                implementation=name,
            )

        what = f"{d}x{shape.width} {shape.activation} rows {row_tile}"
        yield _check("expert_ffn", what, shape.dtype, computed)


def _attention(shape: ModelShape) -> Iterator[Check]:
    page = KVPage(shape.block_size, shape.kv_heads, shape.head_dim)
    blocks = 1024 // shape.block_size
    page_rows = 2 * page.rows_per_layer  # two layers, of which the second is used
    table = jax.random.permutation(jax.random.key(3), 4 * blocks).reshape(4, blocks) * page_rows
    table = table.astype(jnp.int32)
    pages = 4 * blocks * page_rows
    kv = f"heads {shape.heads}/{shape.kv_heads}x{shape.head_dim} block {shape.block_size}"

    def arena():
        values = _draw(4, (pages, shape.head_dim), shape.dtype)
        return jax.lax.bitcast_convert_type(values, jnp.uint16)

    def written(name):
        tokens = 33
        columns = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        positions = jnp.arange(tokens, dtype=jnp.int32) * 29
        inverse = 1e4 ** (-jnp.arange(shape.head_dim // 2) / (shape.head_dim // 2))
        blocks_of = table[0][positions // shape.block_size]
        q, result = kv_write(
            _draw(0, (tokens, columns), shape.dtype),
            _draw(1, (2, shape.head_dim), shape.dtype),
            _draw(2, (2, shape.head_dim), shape.dtype),
            jnp.int32(1),
            positions,
            inverse,
            arena(),
            jnp.where(positions % 7 == 6, -1, blocks_of),
            jnp.int32(1),
            page=page,
            attention_factor=1.0,
            eps=1e-6,
            implementation=name,
        )
        return q, jax.lax.bitcast_convert_type(result, jnp.dtype(shape.dtype))

    yield _check("kv_write", kv, shape.dtype, written)

    def decoded(name):
        lengths = jnp.asarray([1, 0, 65, 1000], jnp.int32)
        q = _draw(5, (4, shape.heads, shape.head_dim), shape.dtype)
        arguments = {"page": page, "window": shape.window, "implementation": name}
        return decode_attention(q, arena(), table, lengths, jnp.int32(1), **arguments)

    yield _check("paged_attention", f"decode {kv} window {shape.window}", shape.dtype, decoded)

    def swept(name):
        q = _draw(6, (4 * 64, shape.heads, shape.head_dim), shape.dtype)
        start, length = jnp.asarray([0, 64, 640, 0]), jnp.asarray([64, 64, 17, 1])
        out = prefill_attention(
            q,
            arena(),
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

    yield _check("paged_attention", f"prefill {kv} window {shape.window}", shape.dtype, swept)
