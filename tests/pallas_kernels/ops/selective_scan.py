"""selective_scan against a float64 recurrence; states to the bit however steps divide the tokens,
within the rows of a layer that the op owns."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels.selective_scan import ScanInputs, ScanOptions, ScanShape, ScanWeights, api
from pallas_kernels.selective_scan.specs import SPECS, Spec
from pallas_kernels.state_pages import StatePage, state_rows
from tests.pallas_kernels import contract, states
from tests.pallas_kernels.contract import Contract, Mutant, compiled, draw, wide
from tests.pallas_kernels.states import (
    STACK_LAYER,
    check_splits,
    check_steps,
    new_pages,
    one_run,
    stacked,
)

COLUMNS, FIRST_ROW = 30, 2


def options_of(spec, implementation):
    elements = spec.row_values * jnp.dtype(spec.dtype).itemsize // 2
    rows = FIRST_ROW + state_rows(spec.shape.arrays(), elements) + 1  # others' rows at both ends
    page = StatePage(spec.page_rows, elements, rows, FIRST_ROW)
    return ScanOptions(spec.shape, page, implementation, spec.limits)


def case(spec, seed):
    """(inputs and weights by name, arena of poison, pages [sequences, P]) of new sequences."""
    rng, shape = np.random.default_rng(seed), spec.shape
    page, tokens = options_of(spec, "xla").page, sum(spec.lengths)
    rates = (shape.steps, shape.state) if shape.each else (shape.steps,)
    weights = [stacked(rng, *each) for each in (rates, *[rates[:1]] * 2)]
    arena, pages = new_pages(rng, spec, page, COLUMNS)
    inputs = {
        "xbc": draw(rng, (tokens, shape.columns), spec.dtype),
        "dt": draw(rng, (tokens, shape.steps), spec.dtype),
        "weights": ScanWeights(*weights, np.int32(STACK_LAYER)),
    }
    return inputs, arena, pages


def run(spec, implementation, inputs, arena, sequences):
    op = compiled(api.selective_scan, options=options_of(spec, implementation))
    given = ScanInputs(inputs["xbc"], inputs["dt"])
    return op(given, inputs["weights"], arena, sequences, np.int32(spec.layers - 1))


by_steps = functools.partial(states.by_steps, run=run, names=("xbc", "dt"))


def recurrence(spec, inputs):
    """float64[T, values]: the outputs of the same tokens."""
    shape = spec.shape
    a_log, dt_bias, skip = (wide(each[STACK_LAYER]) for each in inputs["weights"][:3])
    rates = -np.exp(a_log if shape.each else np.repeat(a_log, shape.head_dim)[:, None])
    each = lambda x: x if shape.each else np.repeat(x, shape.head_dim)  # noqa: E731
    out, at = [], 0
    for length in spec.lengths:
        state = np.zeros((shape.values, shape.state))
        for t in range(at, at + length):
            x, key, read = np.split(
                wide(inputs["xbc"][t]), (shape.values, (shape.values + shape.columns) // 2)
            )
            key, read = (
                m.reshape(shape.groups, -1).repeat(shape.values // shape.groups, 0)
                for m in (key, read)
            )
            dt = each(np.clip(np.log1p(np.exp(wide(inputs["dt"][t]) + dt_bias)), *spec.limits))
            state = state * np.exp(rates * dt[:, None]) + key * (dt * x)[:, None]
            out.append((state * read).sum(1) + each(skip) * x)
        at += length
    return np.stack(out)


def check(spec, implementation):
    check_steps("selective_scan", spec, implementation, case, by_steps, recurrence)


def bits_of_any_split(implementation):
    """Outputs and states, whatever the steps and the other sequences; nothing else is written."""
    for shape in (ScanShape(4, 16, 2, 8), ScanShape(2, 20, 1, 16, each=True)):
        dtype = contract.dtypes_of_bits(implementation)[0]
        spec = Spec((13, 1, 40), dtype, shape, row_values=32)
        by_token = implementation != "pallas" or shape.each
        pages, states, _ = check_splits(
            spec, implementation, case, by_steps, by_token, ("xbc", "dt")
        )
        page = options_of(spec, implementation).page
        own = (spec.layers - 1) * page.layer_rows + np.arange(FIRST_ROW, page.layer_rows - 1)
        rows = pages[:, own // page.page_rows] + own % page.page_rows
        others = np.delete(states.reshape(-1, page.row_elements), rows.reshape(-1), axis=0)
        assert np.all(others == contract.POISON)


def refused(changed, options):
    spec = Spec((3,), "float32")
    inputs, arena, pages = case(spec, 0)
    inputs |= {name: np.zeros(shape, np.float32) for name, shape in changed.items()}
    where = one_run(pages, 3)
    given = options_of(spec, options.get("implementation", "xla"))
    page = given.page._replace(first_row=options.get("first_row", FIRST_ROW))
    given = dataclasses.replace(given, page=page)
    inputs_of = ScanInputs(inputs["xbc"], inputs["dt"])
    return api.selective_scan(inputs_of, inputs["weights"], arena, where, 0, given)


CONTRACTS = (
    Contract(
        "selective_scan",
        api.IMPLEMENTATIONS,
        SPECS,
        check,
        facts=(bits_of_any_split,),
        mutant=Mutant.in_record("sequences", "start", lambda s: s + 1, Spec((2,), "float32")),
        refused=refused,
        refusals=(
            ({"xbc": (3, 79)}, {}, r"xbc \(3, 79\), dt \(3, 4\)"),
            ({"dt": (3, 5)}, {}, r"xbc \(3, 80\), dt \(3, 5\)"),
            ({}, {"first_row": 4}, "the op's state would be rows 4 to 24 of a layer's 23"),
            ({}, {"implementation": "cuda"}, "op 'selective_scan' has no implementation 'cuda'"),
        ),
    ),
)
