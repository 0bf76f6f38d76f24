"""gated_delta against a float64 recurrence; states to the bit however steps divide the tokens."""

import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta import DeltaHeads, DeltaOptions, DeltaShape, DeltaWeights, api
from pallas_kernels.gated_delta.specs import SPECS, Spec
from pallas_kernels.state_pages import Sequences, StatePage, state_rows
from tests.pallas_kernels import contract, states
from tests.pallas_kernels.contract import Contract, Mutant, compiled, draw, same_bits, wide
from tests.pallas_kernels.states import (
    STACK_LAYER,
    check_splits,
    check_steps,
    new_pages,
    one_run,
    stacked,
)

COLUMNS = 30


def options_of(spec, implementation):
    elements = spec.row_values * jnp.dtype(spec.dtype).itemsize // 2
    rows = state_rows(spec.shape.state(spec.dtype), elements)
    page = StatePage(spec.page_rows, elements, rows)
    return DeltaOptions(spec.shape, page, implementation, spec.by_key_head)


def columns_of(spec):
    """Where qkv has q, k and v."""
    shape = spec.shape
    if not spec.by_key_head:
        return np.arange(shape.columns)
    each, wide = shape.key_dim, shape.value_heads // shape.key_heads * shape.value_dim
    order = np.arange(options_of(spec, "xla").least_columns).reshape(shape.key_heads, -1)
    ends = np.cumsum([each, each, wide])
    return np.concatenate([part.reshape(-1) for part in np.split(order, ends, axis=1)[:3]])


def case(spec, seed):
    """(heads and weights by name, arena of poison, pages [sequences, P]) of new sequences."""
    rng, shape = np.random.default_rng(seed), spec.shape
    tokens, page = sum(spec.lengths), options_of(spec, "xla").page
    gates = tokens, shape.value_heads
    sizes = (shape.columns, shape.taps), (shape.value_heads,), (shape.decays,)
    weights = [stacked(rng, *each) for each in sizes]
    arena, pages = new_pages(rng, spec, page, COLUMNS)
    inputs = {
        "qkv": draw(rng, (tokens, options_of(spec, "xla").least_columns + 2), spec.dtype),
        "beta": draw(rng, gates, spec.dtype),
        "decay": draw(rng, (tokens, shape.decays), spec.dtype),
        "weights": DeltaWeights(*weights, np.int32(STACK_LAYER)),
    }
    return inputs, arena, pages


def run(spec, implementation, inputs, arena, sequences):
    op = compiled(api.gated_delta, options=options_of(spec, implementation))
    heads = DeltaHeads(inputs["qkv"], inputs["beta"], inputs["decay"])
    return op(heads, inputs["weights"], arena, sequences, np.int32(spec.layers - 1))


NAMES = "qkv", "beta", "decay"

by_steps = functools.partial(states.by_steps, run=run, names=NAMES)


def recurrence(spec, inputs):
    """float64[T, values]: the outputs of the same tokens, by matrices."""
    shape, weights = spec.shape, [wide(each[STACK_LAYER]) for each in inputs["weights"][:3]]
    conv, a_log, dt_bias = weights
    rounded = lambda x: wide(np.asarray(x).astype(jnp.dtype(spec.dtype)))  # noqa: E731
    silu = lambda x: x / (1 + np.exp(-x))  # noqa: E731
    out, at = [], 0
    for length in spec.lengths:
        x = wide(inputs["qkv"][at : at + length, columns_of(spec)])
        x = np.pad(x, ((shape.taps - 1, 0), (0, 0)))
        state = np.zeros((shape.value_heads, shape.key_dim, shape.value_dim))
        for t in range(length):
            mixed = rounded(np.einsum("tc,ct->c", x[t : t + shape.taps], conv))
            mixed = rounded(silu(mixed))
            heads = shape.key_heads * shape.key_dim
            q, k = mixed[: 2 * heads].reshape(2, shape.key_heads, -1)
            q, k = (e / np.sqrt((e**2).sum(1, keepdims=True) + 1e-6) for e in (q, k))
            each = shape.value_heads // shape.key_heads
            q, k = q.repeat(each, 0) / np.sqrt(shape.key_dim), k.repeat(each, 0)
            v = mixed[2 * heads :].reshape(shape.value_heads, -1)
            beta, decay = (wide(inputs[name][at + t]) for name in ("beta", "decay"))
            rates = np.log1p(np.exp(decay + dt_bias)).reshape(shape.value_heads, -1)
            state *= np.exp(-np.exp(a_log)[:, None] * rates)[:, :, None]
            error = (v - np.einsum("hkv,hk->hv", state, k)) / (1 + np.exp(-beta))[:, None]
            state += np.einsum("hk,hv->hkv", k, error)
            out.append(np.einsum("hkv,hk->hv", state, q).reshape(-1))
        at += length
    return np.stack(out)


def check(spec, implementation):
    check_steps("gated_delta", spec, implementation, case, by_steps, recurrence)


def bits_of_any_split(implementation):
    """Outputs and states, whatever the steps and the other sequences; nothing else is written."""
    shapes = DeltaShape(1, 2, 16, 16, 4), DeltaShape(1, 1, 16, 16, 2, each=True)
    for dtype in contract.dtypes_of_bits(implementation):
        for shape in shapes if dtype == "bfloat16" else shapes[:1]:
            spec = Spec((13, 1, 40), dtype, shape, row_values=32)
            pages, all_states, states = check_splits(
                spec, implementation, case, by_steps, implementation != "pallas", NAMES
            )
            page, elements, *_ = options_of(spec, implementation).page
            view, before = states.reshape(-1, elements), all_states.reshape(-1, elements)
            own = (pages[-1][:, None] + np.arange(page)).reshape(-1)
            same_bits(view[own], before[own])
            others = np.delete(view, own, axis=0)
            assert others.size and np.all(others == contract.POISON)


def bits_of_a_copy(implementation):
    """A run leaves a copy of its state in other pages, from which another sequence goes on."""
    spec = Spec((9,), contract.dtypes_of_bits(implementation)[0])
    inputs, arena, pages = case(spec, 0)
    want, _ = by_steps(spec, implementation, inputs, arena, pages, [8, 8])
    arena = np.concatenate([arena, np.full_like(arena, contract.POISON)])
    elements = options_of(spec, implementation).page.row_elements
    copied = pages + arena.size // 2 // elements
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)

    def step(arena, first, size, own, **more):
        given = {name: inputs[name][first : first + size] for name in NAMES}
        where = Sequences(own, zero + first, zero, zero + size, np.int32(1), **more)
        out, arena = run(spec, implementation, inputs | given, arena, where)
        return np.asarray(out), np.array(arena)

    first, arena = step(arena, 0, 8, pages, read=pages, copy=copied)
    same_bits(first, want[:8])
    arena.reshape(-1, elements)[(pages + np.arange(spec.page_rows)[:, None]).reshape(-1)] = 0
    last, arena = step(arena, 8, 1, pages, read=copied, copy=-one[None].repeat(pages.size, 1))
    same_bits(last, want[8:])


def refused(changed, options):
    spec = Spec((3,), "float32")
    inputs, arena, pages = case(spec, 0)
    inputs |= {name: np.zeros(shape, np.float32) for name, shape in changed.items()}
    heads = DeltaHeads(inputs["qkv"], inputs["beta"], inputs["decay"])
    where = one_run(pages, 3)
    given = options_of(spec, options.get("implementation", "xla"))
    return api.gated_delta(heads, inputs["weights"], arena, where, 0, given)


CONTRACTS = (
    Contract(
        "gated_delta",
        api.IMPLEMENTATIONS,
        SPECS,
        check,
        facts=(bits_of_any_split, bits_of_a_copy),
        mutant=Mutant.in_record("sequences", "start", lambda s: s + 1, Spec((2,), "float32")),
        refused=refused,
        refusals=(
            ({"qkv": (3, 79)}, {}, r"qkv \(3, 79\), conv \(2, 80, 4\)"),
            (
                {"beta": (3, 5)},
                {},
                r"beta \(3, 5\), decay \(3, 4\); they are \(\(3, 4\), \(3, 4\)\)",
            ),
            ({}, {"implementation": "cuda"}, "op 'gated_delta' has no implementation 'cuda'"),
        ),
    ),
)
