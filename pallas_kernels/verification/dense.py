"""Checks of ops without records and pages: products, norms, sums, route, plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.combine import (
    combine,
    combine_and_count,
    combine_with_squares,
    row_squares,
)
from pallas_kernels.layer_norm import layer_norm
from pallas_kernels.linear import (
    LinearOptions,
    Norm,
    linear,
    linear_parts,
    linear_with_squares,
    norm_linear,
    norm_linear_parts,
    sum_of_parts,
)
from pallas_kernels.linear.pallas_triton import NORMED_ROWS, configuration, parts_of
from pallas_kernels.plan import Tables, plan, plan_routed
from pallas_kernels.plan.record import record_size
from pallas_kernels.rms_norm import rms_norm, tile_squares
from pallas_kernels.route import (
    NormRouteOptions,
    RouteOperands,
    norm_route_and_list,
    route,
    route_and_list,
    route_and_plan,
)
from pallas_kernels.route.normed import routes_last
from pallas_kernels.route.planned import MOST_ROWS, rows_of
from pallas_kernels.verification.check import (
    DECODE_ROWS,
    FEW_ROWS,
    Check,
    ModelShape,
    draw,
    make_check,
    same_rows,
    together,
)

ROUTED_ROWS = *FEW_ROWS, MOST_ROWS
"""Rows of decode steps that one program routes, in one tile."""

ROW_TILES = 8, DECODE_ROWS, 64

MORE_ROWS = 2 * DECODE_ROWS, 33, 4 * DECODE_ROWS
"""Rows of larger decode steps: whole tiles, and a part of a tile."""


def product_rows(row_tile: int) -> tuple[int, ...]:
    """Rows of the products that a check computes in tiles of `row_tile` and less: two whole tiles,
    and each number of few rows."""
    most, *fewer = together(row_tile)
    return (most if most < DECODE_ROWS else 2 * most, *fewer)


def dense_checks(shape: ModelShape, shared_kib: int) -> Iterator[Check]:
    d, dtype = shape.hidden, shape.dtype
    for product in shape.products:
        for row_tile in ROW_TILES:
            yield _product_check(shape, product, row_tile, shared_kib)
        outputs, inputs, bias, out = product
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        of_qkv = (outputs, inputs, out) == (qkv, d, dtype) and not shape.latent
        if of_qkv and shape.norm == "rms_norm":
            yield _normed_check(shape, outputs, bias, shared_kib)
        of_router = (outputs, inputs, out, bias) == (shape.experts, d, "float32", False)
        if of_router and shape.norm == "rms_norm":
            yield _normed_parts_check(shape, shared_kib)

    for op, width in ((shape.norm, d), *(("rms_norm", n) for n in shape.other_norms)):

        def rows(width=width):
            stack = (2, width)
            return draw(0, (33, width), dtype), draw(1, stack, dtype), draw(2, stack, dtype)

        def norm(name, x, weights, biases, op=op):
            if op == "layer_norm":
                return layer_norm(x, weights, biases, jnp.int32(1), 1e-6, implementation=name)
            return rms_norm(x, weights, jnp.int32(1), 1e-6, implementation=name)

        yield make_check(op, f"{width}", dtype, rows, norm)

    top_k = shape.rule.top_k

    def parts():
        weights = jax.nn.softmax(draw(2, (33, top_k), "float32"))
        return draw(0, (33, d), dtype), draw(1, (33, top_k, d), "float32"), weights

    def weighted(name, x, y, weights):
        out, squares, index = combine_with_squares(
            x, y, weights, jnp.ones(1, jnp.int32), implementation=name
        )
        alone = combine(x, y, weights, implementation=name)
        counted, after = combine_and_count(
            x, y, weights, jnp.ones(1, jnp.int32), implementation=name
        )
        uncounted, squares_alone, _ = combine_with_squares(x, y, weights, implementation=name)
        same = (same_rows(again, alone) for again in (out, counted, uncounted))
        return alone, *same, _of(squares, out), same_rows(squares_alone, squares), index, after

    yield make_check("combine", f"{top_k}x{d}", dtype, parts, weighted)


def _product_check(
    shape: ModelShape, product: tuple[int, int, bool, str], row_tile: int, shared_kib: int
) -> Check:
    """Checks linear; also in parts for a router, and with a residual if a layer adds one."""
    (outputs, inputs, bias, out), dtype = product, shape.dtype
    every = product_rows(row_tile)
    residual = (every[0], outputs) if (outputs, out) == (shape.hidden, dtype) else None
    in_parts = (outputs, out, bias) == (shape.experts, "float32", False)

    def operands():
        return (
            draw(0, (every[0], inputs), dtype),
            draw(1, (1, outputs, inputs), dtype, inputs**-0.5),
            jnp.int32(0),
            draw(2, (1, outputs), dtype) if bias else None,
            # Small, since a sum that cancels enlarges the product's own rounding: on an H200
            # normal residuals deviated by 8.8e-3, one bfloat16 step of a product between 2 and 4.
            None if residual is None else draw(3, residual, dtype, 1 / 8),
        )

    def run(name, *operands):
        x, weights, layer, added, residual = operands

        def of(rows):
            options = LinearOptions(min(rows, row_tile), implementation=name, shared_kib=shared_kib)
            few = x[:rows], weights, layer, added, options
            alone = linear(*few, out_dtype=out)
            if in_parts:
                parts = linear_parts(x[:rows], weights, layer, options)
                return alone, sum_of_parts(parts)
            if residual is None:
                return alone
            return alone, _add(few, out, residual[:rows])

        return tuple(of(rows) for rows in every)

    what = f"{outputs}x{inputs} rows {row_tile} bias {bias} out {out} {shared_kib} KiB"
    return make_check("linear", what, dtype, operands, run, out)


def _add(operands: tuple, out_dtype: str, residual) -> tuple:
    """linear with a residual; for decode's rows also whether squares leave it unchanged."""
    out = linear(*operands, out_dtype=out_dtype, residual=residual)
    if operands[-1].row_tile >= 64:
        return (out,)
    again, squares = linear_with_squares(*operands, residual=residual)
    return out, same_rows(again, out), _of(squares, again)


def _of(squares: jax.Array, x: jax.Array) -> jax.Array:
    """int32: 1 for rows whose squares equal XLA's tile_squares with as many tiles."""
    tile = pl.next_power_of_2(pl.cdiv(x.shape[1], squares.shape[1]))
    return same_rows(squares, tile_squares(x, tile))


def _squares_between(x: jax.Array) -> jax.Array:
    """tile_squares of x as the router reads them: with the tiles of the output projection."""
    return tile_squares(x, configuration(DECODE_ROWS, x.shape[1], x.dtype).columns)


def _normed_check(shape: ModelShape, outputs: int, bias: bool, shared_kib: int) -> Check:
    """Checks a product that normalises its few rows: its values, and that it has the bits of
    rms_norm and linear, which steps with more rows and prefill run."""
    d, dtype = shape.hidden, shape.dtype

    def operands():
        norm = draw(2, (1, d), dtype)
        weights = draw(1, (1, outputs, d), dtype, d**-0.5)
        return draw(0, (NORMED_ROWS, d), dtype), norm, weights, draw(3, (1, outputs), dtype)

    def run(name, x, norm, weights, biases):
        added, layer = biases if bias else None, jnp.int32(0)

        def of(rows):
            few, options = x[:rows], _few_options(rows, name, shared_kib)
            product = weights, layer, added, options
            got = norm_linear(few, Norm(norm, 1e-6), *product)
            squares = row_squares(few, implementation=name)
            by_squares = norm_linear(few, Norm(norm, 1e-6, squares), *product)
            normed = rms_norm(few, norm, layer, 1e-6, implementation=name)
            alone = linear(normed, *product)
            return got, same_rows(got, alone), same_rows(by_squares, alone)

        return tuple(of(rows) for rows in (*FEW_ROWS, DECODE_ROWS, NORMED_ROWS))

    what = f"normed {outputs}x{d} bias {bias} {shared_kib} KiB"
    return make_check("linear", what, dtype, operands, run, beside=("rms_norm",))


def _few_options(rows: int, name: str, shared_kib: int) -> LinearOptions:
    """Options for decode's rows, with norm and product by one implementation."""
    return LinearOptions(
        min(rows, DECODE_ROWS),
        implementation=name,
        norm_implementation=name,
        shared_kib=shared_kib,
    )


def _normed_parts_check(shape: ModelShape, shared_kib: int) -> Check:
    """Checks the router's product that normalises and writes its few rows: both results, and that
    they have the bits of rms_norm and linear_parts."""
    d, dtype = shape.hidden, shape.dtype

    def operands():
        weights = draw(1, (1, shape.experts, d), dtype, d**-0.5)
        x = draw(0, (NORMED_ROWS, d), dtype)
        return x, draw(2, (1, d), dtype), weights, _squares_between(x)

    def run(name, x, norm, weights, squares):
        def of(rows):
            few, layer = x[:rows], jnp.int32(0)
            product = weights, layer, _few_options(rows, name, shared_kib)
            normed, parts = norm_linear_parts(few, Norm(norm, 1e-6), *product)
            by_squares = norm_linear_parts(few, Norm(norm, 1e-6, squares[:rows]), *product)
            alone = rms_norm(few, norm, layer, 1e-6, implementation=name)
            parts_alone = linear_parts(alone, *product)
            found = ((normed, parts), by_squares)
            same = [
                same_rows(got, wanted).reshape(-1, rows).min(axis=0)  # of all parts
                for pair in found
                for got, wanted in zip(pair, (alone, parts_alone), strict=True)
            ]
            return normed, sum_of_parts(parts), same

        return tuple(of(rows) for rows in (*FEW_ROWS, DECODE_ROWS, NORMED_ROWS))

    what = f"normed parts {shape.experts}x{d} {shared_kib} KiB"
    return make_check("linear", what, dtype, operands, run, beside=("rms_norm",))


def table_checks(shape: ModelShape, shared_kib: int) -> Iterator[Check]:
    experts, rule = shape.experts, shape.rule
    cells_checked = sorted({experts, max(experts // 4, 1)})
    parts = parts_of(experts, shape.hidden, shape.dtype).count

    def scores():
        correction = draw(1, (2, experts), "float32") if shape.correction else None
        valid = jnp.arange(MORE_ROWS[-1]) % 5 != 4
        logits = draw(0, (parts, len(valid), experts), "float32", 3.0 * parts**-0.5)
        return logits, valid, correction

    def routed(name, logits, valid, correction):
        def of(rows, logits):
            given = valid[:rows], correction, jnp.int32(1)
            return route(logits[..., :rows, :], *given, rule=rule, implementation=name)

        decoded = [of(rows, logits) for rows in _rows_apart(shape, *cells_checked)]
        return *decoded, of(len(valid), logits[0])  # of prefill's product, which is whole

    what = f"{experts} top {rule.top_k} {rule.scoring} normalize {rule.normalize}"
    if rule.groups > 1:
        what += f" groups {rule.top_groups}/{rule.groups} by {rule.group_score}"
    if rule.scale != 1:
        what += f" scale {rule.scale}"
    if rule.jitter:
        what += f" jitter {rule.jitter}"
    what += " corrected" if shape.correction else ""
    yield make_check("route", what, "float32", scores, routed)

    for rows in (*ROUTED_ROWS, 2 * MOST_ROWS):
        yield _listed_check(shape, what, rows)
    for rows in ROUTED_ROWS:
        if routes_last(rows, experts, shape.hidden, shape.dtype, rule):
            yield _scored_check(shape, what, rows, shared_kib)

    versions = len(shape.versions)

    def references():
        chance = min(4 * rule.top_k / experts, 1.0)
        active = jax.random.bernoulli(jax.random.key(1), chance, (6, experts))
        # of those experts, and of padding
        size = 6, MORE_ROWS[-1], rule.top_k
        ids = jax.random.randint(jax.random.key(2), size, 0, experts)
        ids = jnp.where(jax.vmap(lambda mask, i: mask[i])(active, ids), ids, experts)
        return active, ids, draw(3, ids.shape, "float32")

    for cells in cells_checked:

        def planned(name, active, ids, weights, cells=cells):
            def step(tables, active):
                return plan(tables, jnp.int32(1), active, implementation=name)

            def routed_step(carry, routing):
                (tables, records), (ids, weights) = carry, routing
                operands = tables, jnp.int32(1), ids, weights, records
                tables, records, work = plan_routed(
                    *operands, versions=versions, implementation=name
                )
                return (tables, records), (work, records[1])

            # A scan compiles a kernel once.
            tables = empty_tables(experts, cells)

            def of(rows):
                size = record_size(rows * rule.top_k, experts, versions)
                carry = tables, jnp.zeros((2, size), jnp.int32)
                return jax.lax.scan(routed_step, carry, (ids[:, :rows], weights[:, :rows]))

            planned = [of(rows) for rows in _rows_apart(shape, cells)]
            return jax.lax.scan(step, tables, active), planned

        yield make_check("plan", f"{experts} experts {cells} cells", "int32", references, planned)

        for rows in ROUTED_ROWS:
            if rows_of(rows, cells, experts, rule) is not None:
                yield _planned_check(shape, what, rows, cells)


def _rows_apart(shape: ModelShape, *cells: int) -> list[int]:
    """Rows of decode steps that route and plan in two kernels, for one of these numbers of
    cells."""
    options = shape.experts, shape.rule
    few = (n for n in ROUTED_ROWS if any(rows_of(n, c, *options) is None for c in cells))
    return [*few, *MORE_ROWS]


def _listed_check(shape: ModelShape, what: str, rows: int) -> Check:
    """Checks route with the layer's record and the list of experts. what: describes the rule."""
    experts = shape.experts
    parts = parts_of(experts, shape.hidden, shape.dtype).count

    def scores():
        correction = draw(1, (2, experts), "float32") if shape.correction else None
        logits = draw(0, (parts, rows, experts), "float32", 3.0 * parts**-0.5)
        return logits, jnp.arange(rows) % 5 != 4, correction

    def listed(name, logits, valid, correction):
        records, i = jnp.zeros((2, 2 * rows * shape.rule.top_k), jnp.int32), jnp.int32(1)
        counters = jnp.zeros(1, jnp.int32)
        ids, weights, records, active, count, counters = route_and_list(
            *(logits, RouteOperands(valid, correction, i), records, i, counters),
            rule=shape.rule,
            implementation=name,
        )
        kept, bits = jnp.split(records, 2, axis=1)
        used = jnp.where(jnp.arange(experts) < count, active, -1)
        kept = kept, lax.bitcast_convert_type(bits, jnp.float32)
        return ids, weights, kept, used, count, counters

    name = f"and list {what} {parts} parts rows {rows}"
    # Only steps with kernels for both run it.
    return make_check("route", name, "float32", scores, listed, beside=("plan",))


def _scored_check(shape: ModelShape, what: str, rows: int, shared_kib: int) -> Check:
    """Checks the router's product whose last program routes and lists, with squares and without: it
    must have the bits of the kernels that it replaces, whose values have checks of their own.

    - `what`: describes the rule.
    """
    d, experts, dtype = shape.hidden, shape.experts, shape.dtype

    def operands():
        weights = draw(1, (1, experts, d), dtype, 3 * d**-0.5)
        correction = draw(3, (1, experts), "float32") if shape.correction else None
        x, valid = draw(0, (rows, d), dtype), jnp.arange(rows) % 5 != 4
        return _squares_between(x), x, draw(2, (1, d), dtype), weights, valid, correction

    def scored(name, squares, *operands):
        return [of(name, given, *operands) for given in (squares, None)]

    def of(name, squares, x, norm, weights, valid, correction):
        records = jnp.zeros((2, 2 * rows * shape.rule.top_k), jnp.int32)
        layer, i, counters = jnp.int32(1), jnp.int32(0), jnp.zeros(1, jnp.int32)
        norm, options = Norm(norm, 1e-6, squares), _few_options(rows, name, shared_kib)
        options = dataclasses.replace(options, row_tile=None)
        given = RouteOperands(valid, correction, i), records, layer, counters
        routing = {"rule": shape.rule, "implementation": name}
        both = NormRouteOptions(shape.rule, options, name)
        got = norm_route_and_list(x, norm, weights, *given, options=both)
        normed, parts = norm_linear_parts(x, norm, weights, i, options)
        normed, parts = lax.optimization_barrier((normed, parts))
        alone = normed, *route_and_list(parts, *given, **routing)
        pairs = ((got[n], alone[n]) for n in range(4))
        same = [same_rows(jnp.asarray(mine), jnp.asarray(other)) for mine, other in pairs]
        used, number = (
            jnp.where(jnp.arange(experts) < each[5], each[4], -1) for each in (got, alone)
        )
        return same, (used == number).astype(jnp.int32), got[5] - alone[5], got[6]

    name = f"scored and listed {what} of {d} rows {rows} {shared_kib} KiB"
    return make_check("route", name, dtype, operands, scored, beside=("linear", "rms_norm", "plan"))


def _planned_check(shape: ModelShape, what: str, rows: int, cells: int) -> Check:
    """Checks route and plan as one kernel. what: describes the rule."""
    experts, versions, pairs = shape.experts, len(shape.versions), rows * shape.rule.top_k
    parts = parts_of(experts, shape.hidden, shape.dtype).count

    def steps():
        correction = draw(1, (2, experts), "float32") if shape.correction else None
        logits = draw(0, (6, parts, rows, experts), "float32", 3.0 * parts**-0.5)
        return logits, jnp.arange(6 * rows).reshape(6, rows) % 5 != 0, correction

    def decided(name, logits, valid, correction):
        def step(carry, given):
            (tables, records), (logits, valid) = carry, given
            ids, weights, *carry, work = route_and_plan(
                *(logits, RouteOperands(valid, correction, jnp.int32(1))),
                *(tables, jnp.int32(1), records),
                rule=shape.rule,
                versions=versions,
                implementation=name,
            )
            ids_kept, bits, counts = jnp.split(carry[1][1], (pairs, 2 * pairs))
            kept = jax.lax.bitcast_convert_type(bits, jnp.float32)
            return carry, (ids, weights, work, ids_kept, kept, counts)

        size = record_size(pairs, experts, versions)
        carry = [empty_tables(experts, cells), jnp.zeros((2, size), jnp.int32)]
        (tables, _), decided = jax.lax.scan(step, carry, (logits, valid))
        return tables, decided

    name = f"and plan {what} {parts} parts {cells} cells rows {rows}"
    return make_check("route", name, "float32", steps, decided, beside=("plan",))


def empty_tables(experts: int, cells: int, layers: int = 2) -> Tables:
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
