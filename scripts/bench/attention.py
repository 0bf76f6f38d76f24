"""Native attention over long contexts, beside the machine's rates.

python -m scripts.bench attention [--tokens 4000 16000 32000] [--rounds 5] [--program decode]

One sequence, four layers of 32 query and 4 KV heads of 128 in bfloat16, pages of 64 tokens. Decode
is one query in every layer, its steps dispatched ahead of each other as `generate` does; its rate
is the KV's bytes over the time, beside the memory's read rate. Prefill is one chunk of 512 queries
at the end of the context; its rate is four operations a query, seen key, head and value over the
time, beside the rate of a large product by XLA, which has all instruction sets of the machine
whatever MOEJAX_CPU_ISA names. Columns: the median time of all layers, its quartiles, the processor
time of all threads, the rate, that of the machine measured before each round, and the share of a
round with its quartiles.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.memory.arena import own_arena
from moejax.costs.rates import measure_memory_rate
from moejax.errors import UserError
from pallas_kernels.cpu.arena import ArenaMemory
from pallas_kernels.cpu.library import instruction_set, why_not_cpu
from pallas_kernels.kv_write import KVPage
from pallas_kernels.paged_attention import (
    AttentionOptions,
    Chunks,
    decode_attention,
    prefill_attention,
)
from scripts.bench.prefill import measure_matrix_rate
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import aligned

LAYERS, HEADS, KV_HEADS, HEAD_DIM, CHUNK = 4, 32, 4, 128, 512
STEPS = 32  # of decode, dispatched at once
BLOCK_S = 0.25  # seconds of a round, at least: as long as the machine's rate takes
PAGE = KVPage(64, KV_HEADS, HEAD_DIM)
COLUMNS = (
    ("program", "{name}"),
    ("tokens", "{tokens}"),
    ("ms", "{ms:.2f}"),
    ("quartiles", "{low:.2f}–{high:.2f}"),
    ("processor ms", "{processor:.2f}"),
    ("rate", "{rate:.1f}"),
    ("machine", "{machine:.1f} {unit}"),
    ("share", "{share:.0%}"),
    ("quartiles", "{least:.0%}–{most:.0%}"),
)


def programs(tokens: int) -> tuple[ArenaMemory, Callable[[], Any], Callable[[], Any]]:
    """(the KV's memory, which must outlive them; STEPS of decode, prefill) at the end of a context
    of so many tokens."""
    random = np.random.default_rng(0)
    blocks = -(-tokens // PAGE.block_size)
    rows = LAYERS * PAGE.rows_per_layer
    drawn = random.standard_normal((blocks * rows, HEAD_DIM), np.float32)
    memory = own_arena(blocks * rows, HEAD_DIM)  # in huge pages, as an engine's
    memory.view()[:] = jax.lax.bitcast_convert_type(jnp.asarray(drawn, jnp.bfloat16), jnp.uint16)
    table = jnp.asarray(random.permutation(blocks) * rows, jnp.int32)[None]
    options = AttentionOptions(PAGE, implementation="cpu")

    @jax.jit
    def decode(q, arena, table):
        lengths = jnp.full(1, tokens, jnp.int32)
        for layer in range(LAYERS):
            out = decode_attention(q, arena, table, lengths, layer, options)
            q = q + out.reshape(q.shape)  # so that layers run one after the other
        return q

    @jax.jit
    def prefill(q, arena, table):
        size = min(CHUNK, tokens)
        row, start, length = (jnp.full(1, value, jnp.int32) for value in (0, tokens - size, size))
        chunks = Chunks(row, start, length, jnp.int32(1))
        for layer in range(LAYERS):
            out = prefill_attention(q, arena, table, chunks, layer, options)
            q = q + out.reshape(q.shape)
        return q

    def queries(count: int) -> jax.Array:
        return jnp.asarray(random.standard_normal((count, HEADS, HEAD_DIM)), jnp.bfloat16)

    one, many = queries(1), queries(min(CHUNK, tokens))
    # Once, as an engine does: it takes 0.4 ms.
    arena = memory.on(jax.devices()[0])

    def steps():
        q = one
        for _ in range(STEPS):
            q = decode(q, arena, table)
        return q

    return memory, steps, lambda: prefill(many, arena, table)


def memory_rate() -> float:
    """Bytes that memory gives in a second now."""
    measure_memory_rate.cache_clear()
    return measure_memory_rate(jax.devices()[0])


def measured(tokens: int, rounds: int, wanted: str | None) -> Iterator[dict[str, Any]]:
    """A line of COLUMNS for decode and one for prefill, or for the one that is wanted."""
    size = min(CHUNK, tokens)
    nbytes = LAYERS * tokens * 2 * KV_HEADS * HEAD_DIM * 2
    seen = size * (tokens - size) + size * (size + 1) // 2
    operations = LAYERS * seen * HEADS * HEAD_DIM * 4
    matrix_rate = functools.partial(measure_matrix_rate, jax.devices()[0], jnp.bfloat16)
    work = (
        ("decode", STEPS, nbytes, memory_rate, "GB/s"),
        ("prefill", 1, operations, matrix_rate, "GFLOP/s"),
    )
    _memory, *calls = programs(tokens)
    for call, (name, steps, amount, can, unit) in zip(calls, work, strict=True):
        if wanted not in (None, name):
            continue
        jax.block_until_ready(call())
        began = time.perf_counter()
        jax.block_until_ready(call())
        times_called = int(BLOCK_S / (time.perf_counter() - began)) + 1
        times = np.zeros((rounds, 3))
        for mine in times:
            machine, start = can(), (time.perf_counter(), time.process_time())
            for _ in range(times_called):
                jax.block_until_ready(call())
            taken = time.perf_counter() - start[0], time.process_time() - start[1]
            mine[:] = machine, *(seconds / (times_called * steps) for seconds in taken)
        machine, seconds, processor = times.T
        low, middle, high = np.quantile(seconds, [0.25, 0.5, 0.75]) * 1e3
        least, share, most = np.quantile(amount / seconds / machine, [0.25, 0.5, 0.75])
        yield {
            "name": name,
            "tokens": tokens,
            "ms": middle,
            "low": low,
            "high": high,
            "processor": np.median(processor) * 1e3,
            "rate": amount / middle / 1e6,
            "machine": np.median(machine) / 1e9,
            "unit": unit,
            "share": share,
            "least": least,
            "most": most,
        }


@refusing()
def main(arguments: Sequence[str]) -> int:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4000, 16000, 32000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--program", choices=["decode", "prefill"], help="this one alone")
    given = parser.parse_args(arguments)
    positive(given, "rounds")
    if reason := why_not_cpu():
        raise UserError(reason)
    lines = [line for n in given.tokens for line in measured(n, given.rounds, given.program)]
    print(instruction_set(), *aligned(COLUMNS, lines), sep="\n")
    return 0
