"""head_linear against float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.head_linear import api
from pallas_kernels.head_linear.specs import SPECS, Spec
from tests.pallas_kernels import contract
from tests.pallas_kernels.contract import Contract, Mutant, close, compiled, draw, same_bits, wide

LAYER = 1


def case(spec, seed):
    """x and weights [L, H, n, r]; every layer but LAYER and all rows but the part are poison."""
    rng = np.random.default_rng(seed)
    x = draw(rng, (spec.tokens, spec.heads, spec.inputs), spec.dtype)
    used, columns = spec.outputs, spec.inputs
    if spec.transposed:
        used, columns = columns, used
    rows = spec.before + used + spec.after
    weights = np.full((spec.layers, spec.heads, rows, columns), np.nan, x.dtype)
    part = draw(rng, (spec.heads, used, columns), spec.dtype, spec.inputs**-0.5)
    weights[LAYER, :, spec.before : spec.before + used] = part
    return x, weights


def part_of(spec):
    """The rows of the weights that a product takes; None: all."""
    used = spec.inputs if spec.transposed else spec.outputs
    whole = not spec.before and not spec.after
    return None if whole else (spec.before, spec.before + used)


def run(spec, implementation, x, weights):
    op = compiled(
        api.head_linear,
        implementation=implementation,
        row_tile=spec.row_tile,
        part=part_of(spec),
        transposed=spec.transposed,
    )
    tiles = None if spec.tiles is None else np.int32(spec.tiles)
    return np.asarray(op(x, weights, np.int32(LAYER), tiles=tiles))


def check(spec, implementation):
    for seed in contract.SEEDS:
        x, weights = case(spec, seed)
        needed = spec.tokens if spec.tiles is None else spec.tiles * spec.row_tile
        x[needed:] = np.nan
        got = run(spec, implementation, x, weights)
        assert got.dtype == spec.dtype
        used = wide(weights[LAYER])[:, slice(*(part_of(spec) or (None,)))]
        equation = "tha,hab->thb" if spec.transposed else "tha,hba->thb"
        want = np.einsum(equation, wide(x), used)
        assert got.shape == want.shape
        close("head_linear", spec.dtype, got[:needed], want[:needed])


def bits_of_a_row(implementation):
    """The row tile decides them; T, the other rows and how many are needed do not."""
    for dtype in contract.dtypes_of_bits(implementation):
        spec = Spec(16, dtype, row_tile=16, inputs=200)
        x, weights = case(spec, 0)
        want = run(spec, implementation, x, weights)
        for tokens, tiles in ((16, None), (64, 3)):
            more = dataclasses.replace(spec, tokens=tokens, tiles=tiles)
            many = np.full((tokens, spec.heads, spec.inputs), np.nan, x.dtype)
            at = 0 if tokens == 16 else 16
            many[at + 3] = x[3]
            same_bits(run(more, implementation, many, weights)[at + 3], want[3])


def refused(x, options):
    return api.head_linear(jnp.zeros(x), jnp.zeros((2, 2, 6, 4)), 0, **options)


CONTRACTS = (
    Contract(
        "head_linear",
        api.IMPLEMENTATIONS,
        SPECS,
        check,
        facts=(bits_of_a_row,),
        mutant=Mutant(
            lambda a: {"part": (a["part"][0] - 1, a["part"][1] - 1)},
            Spec(3, "bfloat16", outputs=48, transposed=True, before=1),
        ),
        refused=refused,
        refusals=(
            ((3, 2, 5), {}, r"x is \(3, 2, 5\), the weights need \[T, 2, 4\]"),
            ((3, 4, 2), {}, r"x is \(3, 4, 2\), the weights need"),
            ((3, 2, 4), {"row_tile": 2}, "3 rows are not whole tiles of 2"),
            ((0, 2, 4), {}, "x has no rows; head_linear needs at least one"),
            ((3, 2, 4), {"part": (1, 7)}, r"part \(1, 7\) is not within 6 rows"),
            ((3, 2, 4), {"part": (2, 2)}, r"part \(2, 2\) is not within 6 rows"),
            ((3, 2, 4), {"part": (1, 4), "transposed": True}, r"the weights need \[T, 2, 3\]"),
            ((3, 2, 4), {"implementation": "cuda"}, "op 'head_linear' has no implementation"),
            ((3, 2, 4), {"implementation": "pallas"}, "'pallas' takes .* not float32; 'xla'"),
        ),
    ),
)
