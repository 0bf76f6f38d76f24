"""Native expert_ffn from each record format's own codes, beside dense: bytes a second.

python -m scripts.bench formats [FORMAT...] [--tokens 1 8] [--rounds 15] [--arithmetic exact int8]

One layer of experts (OLMoE's by default) of random codes in each format. Rounds draw which experts
the tokens choose; in a round each format computes the same tokens once, in turn, so that what else
the machine does meets all of them alike. Columns: bits of a weight in the record, the median time
for an active expert, the record bytes read a second (median, and the quartiles of all rounds), and
the median over rounds of that rate over dense's rate in the same round.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.errors import UserError
from pallas_kernels.cpu.library import instruction_set, why_not_cpu
from pallas_kernels.expert_ffn import ExpertBatch, ExpertOptions, ExpertPlaces, expert_ffn
from pallas_kernels.records import VERSIONS, RecordFormat
from pallas_kernels.records.encoding import read_name
from pallas_kernels.records.integers import ARITHMETICS
from pallas_kernels.records.versions import VersionFormats
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import aligned

FORMATS = (
    *("int8", "int4", "fp8-128x128-f32", "int8-channel-bf16", "fp4-32-e8m0", "int4-32-bf16"),
    *("int4-128-f16-zero", "fp4-16-e4m3xf32", "q8_0", "q6_k", "q5_k", "q4_k", "q4_0", "iq4_nl"),
)
SCALES = 0x3434
"""Two bytes that are finite in every type of a scale."""

COLUMNS = (
    ("format", "{name}"),
    ("bits", "{bits:.2f}"),
    ("ms/expert", "{ms:.3f}"),
    ("GB/s", "{rate:.2f}"),
    ("quartiles", "{low:.2f}–{high:.2f}"),
    ("of dense", "{share:.0%}"),
)


class Layer:
    """A layer's experts in one format, all read from the store."""

    def __init__(
        self, name: str, arithmetic: str, experts: int, hidden: int, width: int, top_k: int
    ):
        self.format = RecordFormat(name, hidden, width, "bfloat16")
        self.name = name if arithmetic == "exact" else f"{name} {arithmetic}"
        self.bits = self.format.nbytes * 8 / (3 * hidden * width)
        random = np.random.default_rng(0)
        records = np.full((1, experts, self.format.rows, hidden), SCALES, np.uint16)
        for part, (first, rows) in self.format.parts.items():
            if part.endswith(("codes", "highs")):
                drawn = random.integers(0, 1 << 16, (rows, hidden), np.uint16)
                records[0, :, first : first + rows] = drawn & 0xBFBF  # no NaN of e4m3
        self._places = ExpertPlaces(
            (jnp.asarray(records),),
            jnp.int32(0),
            jnp.full((1, experts), -1, jnp.int32),
            jnp.zeros((1, experts), jnp.int32),
        )
        formats = (VersionFormats(self.format, self.format),)
        options = ExpertOptions("silu", 16, formats, "cpu", arithmetic=arithmetic)
        self._arena, self._top_k = jnp.zeros((1, hidden), jnp.uint16), top_k
        self._op = jax.jit(
            lambda y, arena, batch, places: expert_ffn(y, arena, batch, places, options),
            donate_argnums=0,
        )

    def seconds(self, ids: np.ndarray, x: jax.Array) -> float:
        """The time of one call for these tokens."""
        active = np.unique(ids).astype(np.int32)
        listed = np.full(self._places.address.shape[1], -1, np.int32)
        listed[: len(active)] = active
        listed, count, taken = map(jnp.asarray, (listed, np.int32(len(active)), ids))
        batch = ExpertBatch(listed, count, taken, x, None)
        y = jnp.zeros((ids.size, x.shape[1]), jnp.float32).block_until_ready()
        start = time.perf_counter()
        self._op(y, self._arena, batch, self._places).block_until_ready()
        return time.perf_counter() - start


def measured(
    layers: Sequence[Layer], tokens: int, rounds: int, top_k: int
) -> Iterator[dict[str, Any]]:
    """A line of COLUMNS for each layer; the first one is what the others are compared with."""
    random = np.random.default_rng(1)
    experts, hidden = layers[0]._places.address.shape[1], layers[0].format.hidden
    x = jnp.asarray(random.standard_normal((tokens, hidden)), jnp.bfloat16)
    times, active = np.zeros((rounds + 1, len(layers))), np.zeros((rounds + 1, 1))
    for each, mine in enumerate(times):
        ids = np.stack([np.sort(random.permutation(experts)[:top_k]) for _ in range(tokens)])
        active[each] = len(np.unique(ids))
        mine[:] = [layer.seconds(ids.astype(np.int32), x) for layer in layers]
    seconds = (times / active)[1:]  # the first round compiles
    rates = np.array([layer.format.nbytes for layer in layers]) / seconds / 1e9
    for place, layer in enumerate(layers):
        low, rate, high = np.quantile(rates[:, place], [0.25, 0.5, 0.75])
        share = np.median(rates[:, place] / rates[:, 0])
        ms = np.median(seconds[:, place]) * 1e3
        figures = {"ms": ms, "rate": rate, "low": low, "high": high, "share": share}
        yield {"name": layer.name, "bits": layer.bits, **figures}


def is_format(name: str) -> bool:
    return name in VERSIONS or read_name(name) is not None


@refusing()
def main(arguments: Sequence[str]) -> int:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("formats", nargs="*", default=FORMATS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=15)
    choices = {"choices": ARITHMETICS, "default": ["exact"]}
    parser.add_argument("--arithmetic", nargs="+", **choices)
    sizes = {"--experts": 64, "--hidden": 2048, "--width": 1024, "--top-k": 8}
    for name, size in sizes.items():
        parser.add_argument(name, type=int, default=size)
    given = parser.parse_args(arguments)
    positive(given, "rounds", "experts", "hidden", "width", "top_k")
    if reason := why_not_cpu():
        raise UserError(reason)
    if unknown := [name for name in given.formats if not is_format(name)]:
        raise UserError(f"no record format is named {unknown[0]!r}; known: {', '.join(FORMATS)}")
    names = [("dense", "exact"), *itertools.product(given.formats, given.arithmetic)]
    shape = given.experts, given.hidden, given.width, given.top_k
    layers = [Layer(name, arithmetic, *shape) for name, arithmetic in names]
    for tokens in given.tokens:
        print(f"{tokens} tokens, {instruction_set()}")
        print(*aligned(COLUMNS, [*measured(layers, tokens, given.rounds, given.top_k)]), sep="\n")
    return 0
