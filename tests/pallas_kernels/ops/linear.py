"""linear against float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.linear import LinearOptions, Norm, api, pallas_triton, sum_of_parts
from pallas_kernels.linear.specs import SPECS, Spec
from pallas_kernels.rms_norm import rms_norm, tile_squares
from tests.pallas_kernels import contract
from tests.pallas_kernels.contract import (
    Contract,
    Mutant,
    close,
    compiled,
    draw,
    fitting,
    same_bits,
    wide,
)

LAYER, EPS = 1, 1e-5


def case(spec, seed):
    """x, weights and bias; every layer but LAYER is poison."""
    rng = np.random.default_rng(seed)
    x = draw(rng, (spec.tokens, spec.inputs), spec.dtype)
    weights = np.full((spec.layers, spec.outputs, spec.inputs), np.nan, x.dtype)
    weights[LAYER] = draw(rng, weights.shape[1:], spec.dtype, spec.inputs**-0.5)
    bias = np.full(weights.shape[:2], np.nan, x.dtype)
    bias[LAYER] = draw(rng, spec.outputs, spec.dtype)
    return x, weights, bias if spec.bias else None


def needed_rows(spec):
    return spec.tokens if spec.tiles is None else spec.tiles * spec.row_tile


def tiles_of(spec):
    return None if spec.tiles is None else np.int32(spec.tiles)


def options_of(spec, implementation):
    """Norm and product by one implementation; tiles are an operand, as in steps."""
    names = dict.fromkeys(("implementation", "norm_implementation"), implementation)
    return LinearOptions(spec.row_tile, **names)


def linear(x, weights, layer, bias, tiles, *, options, out_dtype=None, residual=None):
    options = dataclasses.replace(options, tiles=tiles)
    return api.linear(x, weights, layer, bias, options, out_dtype=out_dtype, residual=residual)


def linear_with_squares(x, weights, layer, bias, tiles, *, options, residual):
    options = dataclasses.replace(options, tiles=tiles)
    return api.linear_with_squares(x, weights, layer, bias, options, residual=residual)


def linear_parts(x, weights, layer, tiles, *, options):
    return api.linear_parts(x, weights, layer, dataclasses.replace(options, tiles=tiles))


def norm_linear(x, factors, squares, weights, layer, bias, tiles, *, options):
    norm, options = Norm(factors, EPS, squares), dataclasses.replace(options, tiles=tiles)
    return api.norm_linear(x, norm, weights, layer, bias, options)


def norm_linear_parts(x, factors, squares, weights, layer, tiles, *, options):
    norm, options = Norm(factors, EPS, squares), dataclasses.replace(options, tiles=tiles)
    return api.norm_linear_parts(x, norm, weights, layer, options)


def run(spec, implementation, x, weights, bias, residual=None):
    options = options_of(spec, implementation)
    op = compiled(linear, options=options, out_dtype=spec.out_dtype)
    more = {} if residual is None else {"residual": residual}
    return np.asarray(op(x, weights, np.int32(LAYER), bias, tiles_of(spec), **more))


def check(spec, implementation):
    for seed in contract.SEEDS:
        x, weights, bias = case(spec, seed)
        needed = needed_rows(spec)
        x[needed:] = np.nan
        got = run(spec, implementation, x, weights, bias)
        out_dtype = spec.out_dtype or spec.dtype
        assert got.dtype == out_dtype
        want = wide(x) @ wide(weights[LAYER]).T + (0 if bias is None else wide(bias[LAYER]))
        close("linear", out_dtype, got[:needed], want[:needed])


RESIDUAL_SPECS = (
    Spec(17, "bfloat16", bias=True),
    Spec(64, "bfloat16", row_tile=16, tiles=3),
    Spec(3, "float16", inputs=200, outputs=4100),
    Spec(128, "bfloat16", inputs=200, outputs=150, row_tile=64),
    Spec(3, "float32"),
)


def check_residual(spec, implementation):
    """The bits of the sum with the rounded product, rounded again."""
    x, weights, bias = case(spec, 0)
    out_dtype = spec.out_dtype or spec.dtype
    residual = draw(np.random.default_rng(1), (spec.tokens, spec.outputs), out_dtype)
    product = run(spec, implementation, x, weights, bias)
    got = run(spec, implementation, x, weights, bias, residual)
    assert got.dtype == out_dtype
    needed = needed_rows(spec)
    want = residual.astype(np.float32) + product.astype(np.float32)
    same_bits(got[:needed], want.astype(out_dtype)[:needed])


SQUARES_SPECS = (
    Spec(3, "bfloat16", row_tile=3),
    Spec(32, "bfloat16", outputs=55, row_tile=16, tiles=1),
    Spec(3, "float16", inputs=200, outputs=4100, bias=True),
    Spec(2, "bfloat16", inputs=32, outputs=16390),
    Spec(3, "float32"),
)
"""Tiles of 16 columns, the last one not whole, and a tile of rows that is not needed; of 32; of
128; what has no kernel."""


def check_squares(spec, implementation):
    """The bits of linear with a residual, and of the one tree over what it stores."""
    x, weights, bias = case(spec, 0)
    residual = draw(np.random.default_rng(1), (spec.tokens, spec.outputs), spec.dtype)
    needed = needed_rows(spec)
    x[needed:] = residual[needed:] = np.nan
    want = run(spec, implementation, x, weights, bias, residual)
    op = compiled(linear_with_squares, options=options_of(spec, implementation))
    got = op(x, weights, np.int32(LAYER), bias, tiles_of(spec), residual=residual)
    out, squares = map(np.asarray, got)
    same_bits(out[:needed], want[:needed])
    columns = api.SQUARES_TILE
    if implementation == "pallas":
        columns = pallas_triton.configuration(16, spec.outputs, spec.dtype).columns
    assert squares.shape == (spec.tokens, -(-spec.outputs // columns))
    same_bits(squares[:needed], squares_of(want[:needed], columns))


NORM_SPECS = (
    Spec(3, "bfloat16", row_tile=3),
    Spec(1, "bfloat16", inputs=2048, outputs=48),
    Spec(4, "float16", inputs=1100, outputs=4100, bias=True),
    Spec(16, "bfloat16", inputs=2048, row_tile=16, tiles=1),
    Spec(9, "bfloat16", inputs=2880, outputs=55),
    Spec(32, "bfloat16", inputs=200, row_tile=16, tiles=1),
    Spec(32, "bfloat16", inputs=600, row_tile=16),
    Spec(48, "bfloat16", inputs=200, row_tile=16, tiles=2),
    Spec(3, "float32", inputs=200, bias=True),
)
"""A row within a chunk, of four chunks, of three of which the last is not whole; a whole tile of
rows; six chunks, the last two pairs not whole; two tiles of rows, the second one not needed, and
both; more rows than are normalised in a product."""


def norm_case(spec):
    """As case, with the norm's factors: rows of different sizes, small ones of which show eps."""
    x, weights, bias = case(spec, 0)
    rng = np.random.default_rng(1)
    x = (wide(x) * 10.0 ** rng.uniform(-4, 1, (spec.tokens, 1))).astype(x.dtype)
    factors = np.full((spec.layers, spec.inputs), np.nan, x.dtype)
    factors[LAYER] = draw(rng, spec.inputs, spec.dtype)
    needed = needed_rows(spec)
    x[needed:] = np.nan
    return x, factors, weights, bias, needed


def check_normed(spec, implementation):
    """The bits of both ops, whether squares of tiles of some width are given or not."""
    x, factors, weights, bias, needed = norm_case(spec)
    op = compiled(norm_linear, options=options_of(spec, implementation))
    norm = compiled(rms_norm, eps=EPS, implementation=implementation)
    rows = np.asarray(norm(x, factors, np.int32(LAYER)))
    want = run(spec, implementation, rows, weights, bias)
    for tile in (None, 16, 256):
        given = squares_of(x, tile), weights, np.int32(LAYER), bias, tiles_of(spec)
        got = np.asarray(op(x, factors, *given))
        assert got.dtype == want.dtype == spec.dtype
        same_bits(got[:needed], want[:needed])


def squares_of(x, tile):
    return None if tile is None else np.asarray(compiled(tile_squares, tile=tile)(x))


PARTS_SPECS = (
    Spec(17, "bfloat16", inputs=512, outputs=48),
    Spec(64, "bfloat16", inputs=200, row_tile=16, tiles=3),
    Spec(3, "float16", inputs=7168, outputs=256),
    Spec(2, "bfloat16", inputs=2048, outputs=128),
    Spec(128, "bfloat16", inputs=256, row_tile=64),
    Spec(2, "float32", inputs=256, outputs=16),
)
"""Four parts, the last product masked; two, the last of them not whole; four of seven tiles; eight
of one; prefill's only one; what has no kernel."""


def parts(spec, implementation, x, weights):
    op = compiled(linear_parts, options=options_of(spec, implementation))
    return np.asarray(op(x, weights, np.int32(LAYER), tiles_of(spec)))


def check_parts(spec, implementation):
    """Each part is the product over its own piece of the depth, and the sum has them in order."""
    x, weights, _ = case(spec, 0)
    needed = needed_rows(spec)
    x[needed:] = np.nan
    got = parts(spec, implementation, x, weights)
    assert got.dtype == np.float32 and got.shape[1:] == (spec.tokens, spec.outputs)
    count, depth = 1, spec.inputs
    if implementation == "pallas" and spec.row_tile != 64:
        found = pallas_triton.parts_of(spec.outputs, spec.inputs, spec.dtype)
        count, depth = found.count, found.turns * found.tile.depth
        assert count > 1
    assert len(got) == count
    for s in range(count):
        piece = slice(s * depth, (s + 1) * depth)
        want = wide(x[:needed, piece]) @ wide(weights[LAYER][:, piece]).T
        # Tensor cores round towards zero, so it grows with the depth: 2.2e-6 at 1,792 (H200).
        close("linear", "float32", got[s, :needed], want, max(1, depth / 1024))
    total = got[0]
    for part in got[1:]:
        total = total + part
    same_bits(np.asarray(compiled(sum_of_parts)(got))[:needed], total[:needed])


NORM_PARTS_SPECS = (
    Spec(3, "bfloat16", inputs=512, outputs=48),
    Spec(16, "bfloat16", inputs=2048, outputs=128, row_tile=16, tiles=1),
    Spec(1, "float16", inputs=1800, outputs=256),
    Spec(9, "bfloat16", inputs=2500, outputs=55),
    Spec(4, "bfloat16", inputs=512, outputs=1100),
    Spec(32, "bfloat16", inputs=512, row_tile=16),
    Spec(32, "bfloat16", inputs=256, row_tile=16, tiles=1),
    Spec(64, "bfloat16", inputs=512, row_tile=16, tiles=3),
    Spec(3, "float32", inputs=256, outputs=16),
)
"""Three tiles of columns, of which one writes what is normalised; a whole tile of rows; a part of
several turns, the last of them not whole; parts and columns not whole; one part; two tiles of rows,
and the second one not needed; more rows than are normalised in a product; what has no kernel."""


def check_normed_parts(spec, implementation):
    """The bits of both ops, of what is normalised and of its parts; as check_normed."""
    x, factors, weights, _, needed = norm_case(spec)
    op = compiled(norm_linear_parts, options=options_of(spec, implementation))
    norm = compiled(rms_norm, eps=EPS, implementation=implementation)
    rows = np.asarray(norm(x, factors, np.int32(LAYER)))
    want = parts(spec, implementation, rows, weights)
    for tile in (None, 16, 256):
        given = squares_of(x, tile), weights, np.int32(LAYER), tiles_of(spec)
        got = [np.asarray(y) for y in op(x, factors, *given)]
        assert got[0].dtype == spec.dtype and got[1].dtype == np.float32
        same_bits(got[0][:needed], rows[:needed])
        same_bits(got[1][:, :needed], want[:, :needed])


def bits_of_a_row(implementation):
    """The row tile decides them; T, the other rows and how many are needed do not."""
    for dtype in contract.dtypes_of_bits(implementation):
        spec = fitting(implementation, Spec(16, dtype, row_tile=16, inputs=200))
        x, weights, bias = case(spec, 0)
        want = run(spec, implementation, x, weights, bias)
        for row, others in contract.alone(x, (0, 8, 15)):
            same_bits(run(spec, implementation, others, weights, bias)[row], want[row])
        for tokens, tiles in ((64, None), (64, 3), (32, 2)):
            more = dataclasses.replace(spec, tokens=tokens, tiles=tiles)
            many = np.full((tokens, spec.inputs), np.nan, x.dtype)
            many[16:32] = x
            same_bits(run(more, implementation, many, weights, bias)[16:32], want)


def bits_of_a_row_in_parts(implementation):
    """As bits_of_a_row, of each part."""
    spec = fitting(implementation, Spec(16, "bfloat16", inputs=512, outputs=24, row_tile=16))
    x, weights, _ = case(spec, 0)
    want = parts(spec, implementation, x, weights)
    if implementation == "pallas":  # another tile of rows is another program
        few = dataclasses.replace(spec, tokens=4, row_tile=4)
        same_bits(parts(few, implementation, x[:4], weights), want[:, :4])
    more = dataclasses.replace(spec, tokens=32, tiles=2)
    many = np.full((32, spec.inputs), np.nan, x.dtype)
    many[16 + 3] = x[3]
    same_bits(parts(more, implementation, many, weights)[:, 16 + 3], want[:, 3])


def refused(x, bias, options):
    options = dict(options)
    bias = None if bias is None else jnp.zeros(bias)
    linear = {name: options.pop(name) for name in ("row_tile", "implementation") if name in options}
    operands = jnp.zeros(x), jnp.zeros((2, 6, 4)), 0, bias, LinearOptions(**linear)
    return api.linear(*operands, **options)


def refused_parts(columns, row_tile, implementation):
    x, weights = jnp.zeros((3, columns)), jnp.zeros((2, 6, 4))
    options = LinearOptions(row_tile, implementation=implementation)
    return api.linear_parts(x, weights, 0, options)


def refused_norm(op, factors, options):
    """x is bfloat16 [3, 4], as the weights and as factors of that size are."""
    options = dict(options)
    x, weights = jnp.zeros((3, 4), "bfloat16"), jnp.zeros((2, 6, 4), "bfloat16")
    names = dict.fromkeys(("implementation", "norm_implementation"), "pallas")
    norm = Norm(factors, EPS, options.pop("squares", None))
    return op(x, norm, weights, 0, options=LinearOptions(**names, **options))


FACTORS = jnp.zeros((2, 4), "bfloat16")
NORM_REFUSALS = (
    (jnp.zeros((2, 5)), {}, "x has 4 columns, the norm has 5"),
    (jnp.zeros((2, 4)), {}, "not float32; 'xla' takes it"),
    (FACTORS, {"row_tile": 2}, "3 rows are not whole tiles of 2"),
    (FACTORS, {"squares": jnp.zeros((2, 1))}, r"squares are float32 \(2, 1\), but x is \(3, 4\)"),
)


CONTRACTS = (
    Contract(
        "linear",
        api.IMPLEMENTATIONS,
        SPECS,
        check,
        facts=(bits_of_a_row,),
        mutant=Mutant(lambda a: {"bias": None}, Spec(3, "bfloat16", bias=True)),
        refused=refused,
        refusals=(
            (
                *((3, 4), None, {"residual": np.zeros((3, 4), np.float32)}),
                r"residual is float32 \(3, 4\), the result float32 \(3, 6\)",
            ),
            (
                *((3, 4), None, {"residual": np.zeros((3, 6), np.float16)}),
                "residual is float16 .* the result float32",
            ),
            ((3, 5), None, {}, "x has 5 columns, the weights have 4"),
            ((0, 4), None, {}, "x has no rows; linear needs at least one"),
            ((3, 4), (2, 7), {}, r"bias is \(2, 7\), the weights need \(2, 6\)"),
            ((3, 4), None, {"row_tile": 2}, "3 rows are not whole tiles of 2"),
            ((3, 4), None, {"implementation": "cuda"}, "op 'linear' has no implementation 'cuda'"),
            ((3, 4), None, {"implementation": "pallas"}, "not float32; 'xla' takes it"),
            (
                *((3, 4), None, {"implementation": "mosaic"}),
                "not float32; 'xla' takes it|Mosaic kernels need jax 0.12",
            ),
        ),
    ),
    Contract("linear with a residual", api.IMPLEMENTATIONS, RESIDUAL_SPECS, check_residual),
    Contract("linear_with_squares", api.IMPLEMENTATIONS, SQUARES_SPECS, check_squares),
    Contract(
        "linear_parts",
        api.IMPLEMENTATIONS,
        PARTS_SPECS,
        check_parts,
        facts=(bits_of_a_row_in_parts,),
        refused=refused_parts,
        refusals=tuple(
            (*given, implementation, message)
            for implementation in ("xla", "pallas")
            for *given, message in (
                (5, 3, "x has 5 columns, the weights have 4"),
                (4, 2, "3 rows are not whole tiles of 2"),
            )
        ),
    ),
    Contract(
        "norm_linear",
        api.IMPLEMENTATIONS,
        NORM_SPECS,
        check_normed,
        refused=refused_norm,
        refusals=[(api.norm_linear, *rest) for rest in NORM_REFUSALS],
    ),
    Contract(
        "norm_linear_parts",
        api.IMPLEMENTATIONS,
        NORM_PARTS_SPECS,
        check_normed_parts,
        refused=refused_norm,
        refusals=[(api.norm_linear_parts, *rest) for rest in NORM_REFUSALS],
    ),
)
