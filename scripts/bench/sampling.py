"""What a row of sampling takes, by XLA's ops and natively: milliseconds.

python -m scripts.bench sampling [--rows 16] [--vocabulary 151936] [--rounds 9]

The programs are those of steps on a CPU: XLA's draw one row after the other. Logits are normal, so
that hundreds of tokens are left by top_p 0.95 and top_k 50 cuts many. In a round each program runs
once by XLA and once natively, in turn. Columns: the median time of a row, its quartiles, and the
median of the processor time of all threads, which other programs disturb less.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.errors import UserError
from moejax.step.sampler import adjust, sample, update_rows
from pallas_kernels.cpu.library import instruction_set, why_not_cpu
from pallas_kernels.sample import greedy, logprobs
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import aligned

COLUMNS = (
    ("program", "{name}"),
    ("ops", "{ops}"),
    ("ms/row", "{ms:.3f}"),
    ("quartiles", "{low:.3f}–{high:.3f}"),
    ("processor ms/row", "{processor:.3f}"),
)
CHOICES = {"sampled": (0, 1.0, 0.0), "top-p, top-k": (50, 0.95, 0.0), "min-p": (0, 1.0, 0.05)}
"""Program → top_k, top_p, min_p."""


def programs(rows: int, vocabulary: int) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """(name, ops, a call of it)."""
    random = np.random.default_rng(0)
    logits = jnp.asarray(random.normal(0, 3, (rows, vocabulary)), jnp.float32)
    tokens, update = jnp.zeros(rows, jnp.int32), jnp.ones(rows, bool)
    counts = jnp.asarray(random.integers(0, 3, (rows, vocabulary)), jnp.int32)
    biases = jnp.full((rows, 8), -1, jnp.int32), jnp.zeros((rows, 8), jnp.float32)

    def of(program: Callable, *args: Any) -> Callable[[], Any]:
        compiled = jax.jit(program, compiler_options={"xla_allow_excess_precision": False})
        return functools.partial(compiled, *args)

    choose = functools.partial(update_rows, greedy, by_row=True)
    yield "greedy", "xla", of(choose, logits, tokens, update)
    for name, (top_k, top_p, min_p) in CHOICES.items():
        of_rows = jnp.float32(0.8), jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p)
        params = *(jnp.full(rows, value) for value in of_rows), jnp.arange(rows, dtype=jnp.uint32)
        params = *params, jnp.arange(rows, dtype=jnp.int32)
        by_row = functools.partial(
            update_rows, functools.partial(sample, one_row=True), by_row=True
        )
        yield name, "xla", of(by_row, logits, tokens, update, *params)
        native = functools.partial(
            update_rows, functools.partial(sample, implementation="cpu"), by_row=False
        )
        yield name, "cpu", of(native, logits, tokens, update, *params, update)
    for ops in ("xla", "cpu"):
        likeliest = functools.partial(logprobs, n=20, implementation=ops)
        yield "log-probabilities", ops, of(likeliest, logits, tokens)
    factors = jnp.full(rows, 1.1), jnp.full(rows, 0.5), jnp.full(rows, 0.5)
    yield "penalties", "xla", of(adjust, logits, counts, *factors, *biases)


def measured(rows: int, vocabulary: int, rounds: int) -> Iterator[dict[str, Any]]:
    """A line of COLUMNS for each program."""
    all_programs = [*programs(rows, vocabulary)]
    times = np.zeros((rounds + 1, len(all_programs), 2))
    for mine in times:
        for place, (_, _, call) in enumerate(all_programs):
            start = time.perf_counter(), time.process_time()
            jax.block_until_ready(call())
            mine[place] = time.perf_counter() - start[0], time.process_time() - start[1]
    ms = times[1:] / rows * 1e3  # the first round compiles
    for place, (name, ops, _) in enumerate(all_programs):
        low, middle, high = np.quantile(ms[:, place, 0], [0.25, 0.5, 0.75])
        figures = {"ms": middle, "low": low, "high": high}
        yield {"name": name, "ops": ops, "processor": np.median(ms[:, place, 1]), **figures}


@refusing()
def main(arguments: Sequence[str]) -> int:
    parser = new_parser(__name__, __doc__)
    for name, number in {"--rows": 16, "--vocabulary": 151936, "--rounds": 9}.items():
        parser.add_argument(name, type=int, default=number)
    given = parser.parse_args(arguments)
    positive(given, "rows", "vocabulary", "rounds")
    if reason := why_not_cpu():
        raise UserError(reason)
    print(f"{given.rows} rows of {given.vocabulary} tokens, {instruction_set()}")
    print(*aligned(COLUMNS, [*measured(given.rows, given.vocabulary, given.rounds)]), sep="\n")
    return 0
