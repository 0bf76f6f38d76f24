"""linear against float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear import api, pallas_triton, sum_of_parts
from pallas_kernels.linear.specs import SPECS, Spec
from pallas_kernels.rms_norm import rms_norm, tile_squares
from tests.pallas_kernels.contract import SEEDS, close, compiled, draw, each, same_bits, wide

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


def run(spec, implementation, x, weights, bias, residual=None):
    options = dict(out_dtype=spec.out_dtype, row_tile=spec.row_tile)
    op = compiled(api.linear, implementation=implementation, **options)
    tiles = None if spec.tiles is None else np.int32(spec.tiles)
    more = {} if residual is None else {"residual": residual}
    return np.asarray(op(x, weights, np.int32(LAYER), bias, tiles=tiles, **more))


def check(spec, implementation):
    for seed in SEEDS:
        x, weights, bias = case(spec, seed)
        needed = spec.tokens if spec.tiles is None else spec.tiles * spec.row_tile
        x[needed:] = np.nan
        got = run(spec, implementation, x, weights, bias)
        out_dtype = spec.out_dtype or spec.dtype
        assert got.dtype == out_dtype
        want = wide(x) @ wide(weights[LAYER]).T + (0 if bias is None else wide(bias[LAYER]))
        close("linear", out_dtype, got[:needed], want[:needed])


@each(api.IMPLEMENTATIONS, SPECS)
def test_contract(spec, implementation):
    check(spec, implementation)


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
    needed = spec.tokens if spec.tiles is None else spec.tiles * spec.row_tile
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
    needed = spec.tokens if spec.tiles is None else spec.tiles * spec.row_tile
    x[needed:] = residual[needed:] = np.nan
    want = run(spec, implementation, x, weights, bias, residual)
    op = compiled(api.linear_with_squares, row_tile=spec.row_tile, implementation=implementation)
    tiles = None if spec.tiles is None else np.int32(spec.tiles)
    got = op(x, weights, np.int32(LAYER), bias, residual=residual, tiles=tiles)
    out, squares = map(np.asarray, got)
    same_bits(out[:needed], want[:needed])
    columns = api.SQUARES_TILE
    if implementation == "pallas":
        columns = pallas_triton.configuration(16, spec.outputs, spec.dtype).columns
    assert squares.shape == (spec.tokens, -(-spec.outputs // columns))
    same_bits(squares[:needed], np.asarray(tile_squares(jnp.asarray(want[:needed]), columns)))


@each(api.IMPLEMENTATIONS, SQUARES_SPECS)
def test_squares_beside_a_product_are_of_what_it_stores(spec, implementation):
    check_squares(spec, implementation)


def halves_first(values):
    wide = values.astype(jnp.float32) ** 2
    while (size := wide.shape[-1]) > 1:
        wide = wide[..., : size // 2] + wide[..., size // 2 :]
    return wide[..., 0]


@pytest.mark.slow
def test_the_contract_of_squares_catches_another_tree(monkeypatch):
    monkeypatch.setattr(pallas_triton, "sum_of_squares", halves_first)
    # Sums of few squares of bfloat16 are exact in any order; jax keeps kernels of known shapes.
    with pytest.raises(AssertionError):
        check_squares(Spec(3, "float16", layers=3), "pallas")


@each(api.IMPLEMENTATIONS, RESIDUAL_SPECS)
def test_a_residual_is_added_to_the_rounded_product(spec, implementation):
    check_residual(spec, implementation)


@each(api.IMPLEMENTATIONS, dtypes=("float32", "bfloat16"))
def test_a_row_is_independent_of_the_others(implementation, dtype):
    spec = Spec(17, dtype)
    x, weights, bias = case(spec, 0)
    want = run(spec, implementation, x, weights, bias)
    for t in (0, 8, 16):
        others = np.full_like(x, np.nan)
        others[t] = x[t]
        same_bits(run(spec, implementation, others, weights, bias)[t], want[t])


@each(api.IMPLEMENTATIONS, dtypes=("float32", "bfloat16"))
def test_a_row_is_independent_of_the_number_of_rows(implementation, dtype):
    """The row tile decides the bits; T, the other tiles and how many are needed do not."""
    spec = Spec(16, dtype, row_tile=16, inputs=200)
    x, weights, bias = case(spec, 0)
    want = run(spec, implementation, x, weights, bias)
    for tokens, tiles in ((64, None), (64, 3), (32, 2)):
        more = dataclasses.replace(spec, tokens=tokens, tiles=tiles)
        many = np.full((tokens, spec.inputs), np.nan, x.dtype)
        many[16:32] = x
        same_bits(run(more, implementation, many, weights, bias)[16:32], want)


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
    needed = spec.tokens if spec.tiles is None else spec.tiles * spec.row_tile
    x[needed:] = np.nan
    return x, factors, weights, bias, needed


def normed(spec, implementation, x, factors, weights, bias, squares=None):
    """(norm_linear, linear of rms_norm)."""
    options, layer = {"row_tile": spec.row_tile}, np.int32(LAYER)
    tiles = None if spec.tiles is None else np.int32(spec.tiles)
    names = {"implementation": implementation, "norm_implementation": implementation}
    op = compiled(api.norm_linear, eps=EPS, **names, **options)
    given = {"weights": weights, "layer": layer, "bias": bias, "squares": squares}
    got = op(x, factors, **given, tiles=tiles)
    norm = compiled(rms_norm, eps=EPS, implementation=implementation)
    rows = np.asarray(norm(x, factors, layer))
    want = compiled(api.linear, implementation=implementation, **options)(
        rows, weights, layer, bias, tiles=tiles
    )
    return np.asarray(got), np.asarray(want)


def check_normed(spec, implementation, tile=None):
    """The bits of both ops. tile: of the squares that are given; None: none are."""
    x, factors, weights, bias, needed = norm_case(spec)
    got, want = normed(spec, implementation, x, factors, weights, bias, squares_of(x, tile))
    assert got.dtype == want.dtype == spec.dtype
    same_bits(got[:needed], want[:needed])


def squares_of(x, tile):
    return None if tile is None else np.asarray(tile_squares(jnp.asarray(x), tile))


def check_normed_by_squares(spec, implementation):
    """Whatever the width of tiles."""
    for tile in (16, 256):
        check_normed(spec, implementation, tile)


@each(api.IMPLEMENTATIONS, NORM_SPECS)
def test_a_product_of_normalised_rows_has_the_bits_of_both_ops(spec, implementation):
    check_normed(spec, implementation)


@each(api.IMPLEMENTATIONS, NORM_SPECS)
def test_squares_that_are_given_change_no_bit(spec, implementation):
    check_normed_by_squares(spec, implementation)


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
    op = compiled(api.linear_parts, implementation=implementation, row_tile=spec.row_tile)
    tiles = None if spec.tiles is None else np.int32(spec.tiles)
    return np.asarray(op(x, weights, np.int32(LAYER), tiles=tiles))


def check_parts(spec, implementation):
    """Each part is the product over its own piece of the depth, and the sum has them in order."""
    x, weights, _ = case(spec, 0)
    needed = spec.tokens if spec.tiles is None else spec.tiles * spec.row_tile
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
        # Rounding grows with the root of the depth; the table's tolerance is of some 2048.
        close("linear", "float32", got[s, :needed], want, max(1, depth / 2048) ** 0.5)
    total = got[0]
    for part in got[1:]:
        total = total + part
    same_bits(np.asarray(sum_of_parts(got))[:needed], total[:needed])


@each(api.IMPLEMENTATIONS, PARTS_SPECS)
def test_parts_are_products_over_pieces_of_the_depth(spec, implementation):
    check_parts(spec, implementation)


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


def check_normed_parts(spec, implementation, tile=None):
    """The bits of both ops, of what is normalised and of its parts; the former by the reference.
    tile: as of check_normed."""
    x, factors, weights, _, needed = norm_case(spec)
    options, layer = {"row_tile": spec.row_tile}, np.int32(LAYER)
    tiles = None if spec.tiles is None else np.int32(spec.tiles)
    names = {"implementation": implementation, "norm_implementation": implementation}
    op = compiled(api.norm_linear_parts, eps=EPS, **names, **options)
    given = {"weights": weights, "layer": layer, "squares": squares_of(x, tile)}
    got = [np.asarray(y) for y in op(x, factors, **given, tiles=tiles)]
    norm = compiled(rms_norm, eps=EPS, implementation=implementation)
    rows = np.asarray(norm(x, factors, layer))
    assert got[0].dtype == spec.dtype and got[1].dtype == np.float32
    same_bits(got[0][:needed], rows[:needed])
    same_bits(got[1][:, :needed], parts(spec, implementation, rows, weights)[:, :needed])
    wanted = wide(x[:needed])
    wanted /= np.sqrt((wanted**2).mean(axis=1, keepdims=True) + EPS)
    close("rms_norm", spec.dtype, got[0][:needed], wanted * wide(factors[LAYER]))


@each(api.IMPLEMENTATIONS, NORM_PARTS_SPECS)
def test_parts_of_normalised_rows_have_the_bits_of_both_ops(spec, implementation):
    check_normed_parts(spec, implementation)


def check_normed_parts_by_squares(spec, implementation):
    """Whatever the width of tiles."""
    for tile in (16, 256):
        check_normed_parts(spec, implementation, tile)


@each(api.IMPLEMENTATIONS, NORM_PARTS_SPECS)
def test_squares_that_are_given_change_no_bit_of_parts(spec, implementation):
    check_normed_parts_by_squares(spec, implementation)


@pytest.mark.slow
@pytest.mark.parametrize("check_given", [check_normed_by_squares, check_normed_parts_by_squares])
def test_squares_are_read_in_place_of_rows(check_given, monkeypatch):
    """Those of another array show."""
    right = squares_of
    monkeypatch.setitem(globals(), "squares_of", lambda x, tile: right(2 * x, tile))
    with pytest.raises(AssertionError):
        check_given(NORM_PARTS_SPECS[0], "pallas")


def next_row_normalised(_scales, *given):
    return jnp.roll(_scales(*given), 1, axis=0)


def test_the_contract_of_normalised_parts_catches_another_rows_scale(monkeypatch):
    broken = functools.partial(next_row_normalised, pallas_triton._scales)
    monkeypatch.setattr(pallas_triton, "_scales", broken)
    spec = dataclasses.replace(NORM_PARTS_SPECS[0], layers=3)  # jax keeps kernels of known shapes
    with pytest.raises(AssertionError):
        check_normed_parts(spec, "pallas")


@pytest.mark.parametrize("op", [api.norm_linear, api.norm_linear_parts])
@pytest.mark.parametrize(("rows", "launches"), [(1, 1), (16, 1), (32, 1), (33, 2)])
def test_few_rows_are_normalised_within_the_product(op, rows, launches):
    array = functools.partial(jnp.zeros, dtype="bfloat16")
    op = functools.partial(
        *(op, array((rows, 256)), array((1, 256)), 1e-6, array((1, 48, 256)), 0),
        implementation="pallas",
        norm_implementation="pallas",
    )
    assert str(jax.make_jaxpr(op)()).count("pallas_call") == launches


def check_parts_of_a_row(implementation, dtype):
    """The bits of a row's parts, whatever the number of rows and the other rows."""
    spec = Spec(16, dtype, inputs=512, outputs=24, row_tile=16)
    x, weights, _ = case(spec, 0)
    want = parts(spec, implementation, x, weights)
    few = dataclasses.replace(spec, tokens=4, row_tile=4)
    same_bits(parts(few, implementation, x[:4], weights), want[:, :4])
    more = dataclasses.replace(spec, tokens=32, tiles=2)
    many = np.full((32, spec.inputs), np.nan, x.dtype)
    many[16 + 3] = x[3]
    same_bits(parts(more, implementation, many, weights)[:, 16 + 3], want[:, 3])


@each({name: f for name, f in api.IMPLEMENTATIONS.items() if name != "xla"}, dtypes=("bfloat16",))
def test_parts_of_a_row_are_independent_of_the_others(implementation, dtype):
    check_parts_of_a_row(implementation, dtype)


def test_how_many_parts_there_are():
    """As many as keep the multiprocessors busy and a row of all parts short."""
    sizes = {(128, 2048): 8, (64, 2048): 16, (8, 4096): 32, (256, 7168): 4, (512, 2048): 2}
    for (outputs, inputs), count in sizes.items():
        found = pallas_triton.parts_of(outputs, inputs, "bfloat16")
        assert found.count == count
        assert count * found.turns * found.tile.depth == inputs
        assert count * max(outputs, 16) <= pallas_triton.PART_VALUES
    assert pallas_triton.parts_of(5120, 2048, "bfloat16").count == 1


def wrong_layer(linear, x, weights, layer, bias, **options):
    return linear(x, weights, layer - 1, bias, **options)


def narrow_sum(linear, x, weights, layer, bias, **options):
    halves = slice(None, 24), slice(24, None)
    return sum(linear(x[:, half], weights[:, :, half], layer, None, **options) for half in halves)


def no_bias(linear, x, weights, layer, bias, **options):
    return linear(x, weights, layer, None, **options)


def one_tile_too_few(linear, x, weights, layer, bias, *, tiles, **options):
    return linear(x, weights, layer, bias, tiles=tiles - 1, **options)


def last_columns_left_out(linear, x, weights, layer, bias, **options):
    return linear(x[:, :-16], weights[:, :, :-16], layer, bias, **options)


@pytest.mark.nightly
@each(api.IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("mutant", "spec"),
    [
        (wrong_layer, Spec(3, "bfloat16")),
        (narrow_sum, Spec(64, "bfloat16")),
        (no_bias, Spec(3, "bfloat16", bias=True)),
        (one_tile_too_few, Spec(64, "bfloat16", row_tile=16, tiles=3)),
        (last_columns_left_out, Spec(3, "bfloat16", inputs=272)),
    ],
)
def test_contract_catches(mutant, spec, implementation, monkeypatch):
    name = f"{implementation}_{mutant.__name__}"
    broken = functools.partial(mutant, api.IMPLEMENTATIONS[implementation])
    monkeypatch.setitem(api.IMPLEMENTATIONS, name, broken)
    with pytest.raises(AssertionError):
        check(spec, name)


def test_the_row_tile_and_the_sizes_decide_the_configuration():
    """As the docstring says; T is no parameter."""
    decode = functools.partial(pallas_triton.configuration, 16, dtype="bfloat16")
    assert [decode(n).columns for n in (128, 2048, 5120, 151936)] == [16, 16, 32, 128]
    assert {pallas_triton.configuration(t, 40, "float16").rows for t in (1, 16, 63)} == {16}
    assert {pallas_triton.configuration(t, 40, "float16").rows for t in (64, 128)} == {64}


@pytest.mark.parametrize(
    ("x", "bias", "options", "message"),
    [
        (
            *((3, 4), None, {"residual": np.zeros((3, 4), np.float32)}),
            r"residual is float32 \(3, 4\), the result float32 \(3, 6\)",
        ),
        (
            *((3, 4), None, {"residual": np.zeros((3, 6), np.float16)}),
            "residual is float16 .* the result float32",
        ),
        ((3, 5), None, {}, "x has 5 columns, the weights have 4"),
        ((3, 4), (2, 7), {}, r"bias is \(2, 7\), the weights need \(2, 6\)"),
        ((3, 4), None, {"row_tile": 2}, "3 rows are not whole tiles of 2"),
        ((3, 4), None, {"implementation": "cuda"}, "op 'linear' has no implementation 'cuda'"),
        ((3, 4), None, {"implementation": "pallas"}, "not float32; 'xla' takes it"),
    ],
)
def test_refuses(x, bias, options, message):
    bias = None if bias is None else jnp.zeros(bias)
    with pytest.raises(ValueError, match=message):
        api.linear(jnp.zeros(x), jnp.zeros((2, 6, 4)), 0, bias, **options)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_refuses_parts_of_shapes_that_do_not_fit(implementation):
    with pytest.raises(ValueError, match="x has 5 columns, the weights have 4"):
        api.linear_parts(jnp.zeros((3, 5)), jnp.zeros((2, 6, 4)), 0, implementation=implementation)
    with pytest.raises(ValueError, match="3 rows are not whole tiles of 2"):
        api.linear_parts(
            *(jnp.zeros((3, 4)), jnp.zeros((2, 6, 4)), 0),
            row_tile=2,
            implementation=implementation,
        )


@pytest.mark.parametrize("op", [api.norm_linear, api.norm_linear_parts])
def test_refuses_a_norm_that_does_not_fit(op):
    operands = jnp.zeros((3, 4)), jnp.zeros((2, 5)), EPS, jnp.zeros((2, 6, 4)), 0
    with pytest.raises(ValueError, match="x has 4 columns, the norm has 5"):
        op(*operands)
    x, weights = jnp.zeros((3, 4), "bfloat16"), jnp.zeros((2, 6, 4), "bfloat16")
    names = dict.fromkeys(("implementation", "norm_implementation"), "pallas")
    with pytest.raises(ValueError, match="not float32; 'xla' takes it"):
        op(x, jnp.zeros((2, 4)), EPS, weights, 0, **names)
    with pytest.raises(ValueError, match="3 rows are not whole tiles of 2"):
        op(x, jnp.zeros((2, 4), x.dtype), EPS, weights, 0, row_tile=2, **names)
    with pytest.raises(ValueError, match=r"squares are float32 \(2, 1\), but x is \(3, 4\)"):
        op(x, jnp.zeros((2, 4), x.dtype), EPS, weights, 0, squares=jnp.zeros((2, 1)), **names)
