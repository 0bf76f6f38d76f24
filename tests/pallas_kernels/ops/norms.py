"""rms_norm and layer_norm against float64, rounded where the ops round; squares of tiles."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.layer_norm import api as layer_api
from pallas_kernels.layer_norm.specs import SPECS as LAYER_SPECS
from pallas_kernels.rms_norm import api
from pallas_kernels.rms_norm.specs import SPECS, Spec
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

LAYER, EPS = 1, 1e-6


def case(spec, seed, parameters=1):
    """Rows whose mean is not zero where there are two parameters; other layers' are NaN."""
    rng = np.random.default_rng(seed)
    x = draw(rng, (*spec.rows, spec.width), spec.dtype, spec.scale)
    if parameters == 2:
        x += rng.uniform(-spec.scale, spec.scale, (*spec.rows, 1)).astype(x.dtype)
    made = np.full((parameters, spec.layers, spec.width), np.nan, x.dtype)
    made[:, LAYER] = draw(rng, (parameters, spec.width), spec.dtype)
    return x, *made


def run(implementation, *operands):
    op = api.rms_norm if len(operands) == 2 else layer_api.layer_norm
    return compiled(op, eps=EPS, implementation=implementation)(*operands, np.int32(LAYER))


def normed(x):
    return wide(x) / np.sqrt(np.mean(wide(x) ** 2, axis=-1, keepdims=True) + EPS)


def centered(x, weights, biases):
    deviations = wide(x) - wide(x).mean(axis=-1, keepdims=True)
    scale = np.sqrt(np.mean(deviations**2, axis=-1, keepdims=True) + EPS)
    return deviations / scale * wide(weights[LAYER]) + wide(biases[LAYER])


def check(spec, implementation):
    for seed in contract.SEEDS:
        x, weights = case(spec, seed)
        got = run(implementation, x, weights)
        assert got.dtype == spec.dtype
        close("rms_norm", spec.dtype, got, wide(weights[LAYER]) * normed(x))


def check_layer_norm(spec, implementation):
    for seed in contract.SEEDS:
        operands = case(spec, seed, parameters=2)
        got = run(implementation, *operands)
        assert got.dtype == spec.dtype
        close("layer_norm", spec.dtype, got, centered(*operands))


def rounds_before_the_weight(implementation):
    """As transformers does: 3 · bf16(normed), where normed lies between two bfloat16 values."""
    x, weights = case(fitting(implementation, Spec((64,), "bfloat16")), 0)
    weights[LAYER] = 3
    got = np.asarray(run(implementation, x, weights))
    want = (3 * normed(x).astype(x.dtype).astype(np.float32)).astype(x.dtype)
    once = (3 * normed(x)).astype(x.dtype)
    # A float32 mean may put a value that lies near the middle on the other side, no more.
    assert np.mean(got != want) < 0.01 < np.mean(got != once)


def rounds_once(implementation):
    """layer_norm at the end, so that only a float32 result next to the middle of two differs."""
    operands = case(Spec((64,), "bfloat16"), 0, parameters=2)
    got, want = np.asarray(run(implementation, *operands)), centered(*operands)
    assert np.mean(got != want.astype(got.dtype)) < 0.01


def bits_of_a_row(implementation, parameters=1):
    """They depend on no other row."""
    for dtype in contract.dtypes_of_bits(implementation):
        x, *made = case(fitting(implementation, Spec((17,), dtype)), 0, parameters)
        want = run(implementation, x, *made)
        for row, others in contract.alone(x):
            same_bits(run(implementation, others, *made)[row], want[row])


def bits_of_a_row_of_layer_norm(implementation):
    bits_of_a_row(implementation, parameters=2)


def neighbours_first(values):
    """The sum over the last axis, a power of two."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


SQUARES_SPECS = (
    Spec((3,), "bfloat16", width=512),
    Spec((2,), "float16", width=600),
    Spec((3,), "bfloat16", width=40),
)
"""Whole tiles; the last one not whole; less than one."""


def check_tile_squares(spec, implementation, tile=256):
    """The bits of the one tree."""
    x, _ = case(spec, 0)
    got = compiled(api.tile_squares, tile=tile, implementation=implementation)(x)
    padded = np.pad(x.astype(np.float32), ((0, 0), (0, -spec.width % tile)))
    want = neighbours_first(padded.reshape(len(x), -1, tile) ** 2)
    same_bits(np.asarray(got), want)
    api.check_squares(jnp.asarray(x), got)


def refused(columns, options):
    return api.rms_norm(jnp.zeros((3, columns)), jnp.zeros((2, 4)), 0, EPS, **options)


def refused_layer_norm(columns, biases, options):
    arrays = jnp.zeros((3, columns)), jnp.zeros((2, 4)), jnp.zeros(biases)
    return layer_api.layer_norm(*arrays, 0, EPS, **options)


def refused_squares(shape, dtype="float32", tile=8):
    """Of 40 columns there are 1, 2, 3, 5, … tiles, but not 4."""
    x = jnp.zeros((3, 40), "bfloat16")
    for tiles in (1, 2, 3, 5, 10, 20, 40):
        api.check_squares(x, jnp.zeros((3, tiles), "float32"))
    api.tile_squares(x, tile)
    api.check_squares(x, jnp.zeros(shape, dtype))


CONTRACTS = (
    Contract(
        "rms_norm",
        api.IMPLEMENTATIONS,
        SPECS,
        check,
        facts=(rounds_before_the_weight, bits_of_a_row),
        mutant=Mutant(lambda a: {"eps": 0.0}, Spec((17,), "bfloat16", scale=1e-3)),
        refused=refused,
        refusals=(
            (5, {}, "x has 5 columns, the weights have 4"),
            (4, {"implementation": "cuda"}, "op 'rms_norm' has no implementation 'cuda'"),
            (4, {"implementation": "pallas"}, "not float32; 'xla' takes it"),
            (4, {"implementation": "mosaic"}, "not float32; 'xla'|Mosaic kernels need jax 0.12"),
        ),
    ),
    Contract(
        "layer_norm",
        layer_api.IMPLEMENTATIONS,
        LAYER_SPECS,
        check_layer_norm,
        facts=(rounds_once, bits_of_a_row_of_layer_norm),
        mutant=Mutant(lambda a: {"biases": 0 * a["biases"]}, LAYER_SPECS[0]),
        refused=refused_layer_norm,
        refusals=(
            (5, (2, 4), {}, "x has 5 columns, the weights have 4"),
            (4, (1, 4), {}, r"biases are \(1, 4\), the weights need \(2, 4\)"),
            (4, (2, 4), {"implementation": "cuda"}, "op 'layer_norm' has no implementation"),
            (4, (2, 4), {"implementation": "pallas"}, "not float32; 'xla' takes it"),
        ),
    ),
    Contract(
        "tile_squares",
        api.TILE_SQUARES,
        SQUARES_SPECS,
        check_tile_squares,
        refused=refused_squares,
        refusals=(
            ((3, 2), "bfloat16", "3 rows of 40 columns over a power of 2"),
            ((2, 3), "3 rows of 40 columns over a power of 2"),
            ((3, 4), "3 rows of 40 columns over a power of 2"),
            ((3, 1), "float32", 12, "a tile has a power of 2 of columns, not 12"),
        ),
    ),
)
