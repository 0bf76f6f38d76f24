"""short_conv against float64, and to the bit however steps divide the tokens."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.short_conv import ConvOptions, ConvWeights, api, short_conv_state
from pallas_kernels.short_conv.specs import SPECS, Spec
from pallas_kernels.state_pages import Sequences, StatePage, state_rows
from tests.pallas_kernels import contract
from tests.pallas_kernels.contract import Contract, Mutant, close, compiled, draw, same_bits, wide
from tests.pallas_kernels.states import STACK_LAYER, new_pages, one_run, stacked

COLUMNS = 40


def options_of(spec, implementation):
    elements = spec.row_values * jnp.dtype(spec.dtype).itemsize // 2
    rows = state_rows(short_conv_state(spec.width, spec.taps, spec.dtype), elements)
    return ConvOptions(StatePage(spec.page_rows, elements, rows), implementation, spec.silu)


def by_steps(spec, implementation, inputs, sizes):
    """Runs each sequence in steps of so many tokens. Returns (out, arena)."""
    x, weights, arena, pages = inputs
    op = compiled(api.short_conv, options=options_of(spec, implementation))
    ends, out, most = np.cumsum(spec.lengths), np.zeros_like(x), max(spec.lengths)
    for first in np.cumsum([0, *sizes]):
        size = np.minimum(np.asarray(spec.lengths) - first, sizes[0]).clip(0)
        places = ends - spec.lengths + first
        rows = np.minimum(places[:, None] + np.arange(sizes[0]), len(x) - 1)
        zero = np.zeros(len(ends), np.int32)
        runs = Sequences(pages, zero + np.int32(first), zero, np.int32(size), np.int32(len(ends)))
        got, arena = op(x[rows.reshape(-1)], weights, arena, runs, np.int32(spec.layers - 1))
        got = np.asarray(got).reshape(len(ends), sizes[0], -1)
        for n, count in enumerate(size):
            out[places[n] : places[n] + count] = got[n, :count]
        if first >= most:
            break
    return out, np.asarray(arena)


def case(spec, seed):
    rng, page = np.random.default_rng(seed), options_of(spec, "xla").page
    weights = stacked(rng, spec.width, spec.taps)
    arena, pages = new_pages(rng, spec, page, COLUMNS)
    x = draw(rng, (sum(spec.lengths), spec.width), spec.dtype)
    bias = draw(rng, (2, spec.width), "float32") if spec.silu else None
    given = ConvWeights(weights, np.int32(STACK_LAYER), bias)
    return x, given, arena, pages


def check(spec, implementation):
    for seed in contract.SEEDS:
        inputs = case(spec, seed)
        x, weights = wide(inputs[0]), wide(inputs[1].weights[STACK_LAYER])
        want = []
        for part in np.split(x, np.cumsum(spec.lengths)[:-1]):
            seen = np.pad(part, ((spec.taps - 1, 0), (0, 0)))
            want += [
                np.einsum("tc,ct->c", seen[t : t + spec.taps], weights) for t in range(len(part))
            ]
        want = np.stack(want)
        if spec.silu:
            want += wide(inputs[1].bias[STACK_LAYER])
            want = wide(want.astype(jnp.dtype(spec.dtype)))
            want /= 1 + np.exp(-want)
        got, _ = by_steps(spec, implementation, inputs, [8] * 8)
        close("short_conv", spec.dtype, got, want)


def bits_of_any_split(implementation):
    for dtype in contract.dtypes_of_bits(implementation):
        spec = Spec((13, 30, 1), dtype)
        inputs = case(spec, 0)
        want, states = by_steps(spec, implementation, inputs, [8] * 8)
        for size in (1, 3):
            got, after = by_steps(spec, implementation, inputs, [size] * 40)
            same_bits(got, want)
            same_bits(after, states)


def refused(shape, options):
    x, weights, arena, pages = case(Spec((3,), "float32"), 0)
    runs = one_run(pages, 3)
    given = options_of(Spec((3,), "float32"), options.get("implementation", "xla"))
    return api.short_conv(np.zeros(shape, x.dtype), weights, arena, runs, 0, given)


CONTRACTS = (
    Contract(
        "short_conv",
        api.IMPLEMENTATIONS,
        SPECS,
        check,
        facts=(bits_of_any_split,),
        mutant=Mutant.in_record("sequences", "start", lambda s: s + 1, Spec((2,), "float32")),
        refused=refused,
        refusals=(
            ((3, 41), {}, r"x \(3, 41\), weights \(2, 40, 3\)"),
            ((3, 40), {"implementation": "cuda"}, "op 'short_conv' has no implementation 'cuda'"),
        ),
    ),
)
