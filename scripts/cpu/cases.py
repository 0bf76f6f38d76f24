"""The calls of each native CPU op that the benches of this folder time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.versions.encoders import encode
from pallas_kernels.expert_ffn.api import expert_ffn
from pallas_kernels.kv_write import KVPage
from pallas_kernels.linear.api import linear
from pallas_kernels.paged_attention import decode_attention
from pallas_kernels.records.format import RecordFormat
from pallas_kernels.records.versions import VersionFormats

SIZES = {"hidden": 2048, "width": 1024, "experts": 64, "context": 512}
HEAD_DIM = 128


class Case(NamedTuple):
    name: str
    nbytes: int
    """What the op has to read."""
    call: Callable[[str], Callable[[int], jax.Array]]
    """Implementation → the call number i of it."""


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def memory_reader(threads: int, nbytes: int = 1 << 27) -> Callable[[], float]:
    """A function that reads so much with so many threads and returns seconds per byte."""
    parts = np.array_split(np.ones(nbytes // 4, np.int32), threads)
    pool = ThreadPoolExecutor(threads)

    def read() -> float:
        return timed(lambda: list(pool.map(np.max, parts))) / nbytes

    return read


def linear_cases(args: argparse.Namespace) -> Iterator[Case]:
    for dtype in ("bfloat16", "float32"):
        layers, outputs = 8 if dtype == "bfloat16" else 4, 3 * args.hidden
        weights = normal((layers, outputs, args.hidden), dtype, args.hidden**-0.5)
        for tokens in (1, 4, 16, 128) if dtype == "bfloat16" else (1,):
            x = normal((tokens, args.hidden), dtype)

            def call(implementation, x=x, weights=weights):
                op = jax.jit(lambda x, w, i: linear(x, w, i, implementation=implementation))
                return lambda i: op(x, weights, np.int32(i % len(weights)))

            yield Case(f"linear {dtype}, {tokens} rows", weights.nbytes // layers, call)


def expert_cases(args: argparse.Namespace) -> Iterator[Case]:
    rng, experts, hidden = np.random.default_rng(0), args.experts, args.hidden
    top_k = min(8, experts)
    dense = np.asarray(normal((experts, 3 * args.width, hidden), "bfloat16", hidden**-0.5))
    for version in ("dense", "int8", "int4", "lossless12"):
        fmt = RecordFormat(version, hidden, args.width, "bfloat16")
        records = dense.view(np.uint16) if version == "dense" else encode(dense, fmt)
        store = jax.device_put(records[None], pinned())
        table = jnp.full((1, experts), -1, jnp.int32)
        for tokens in (1, 8) if version == "dense" else (1,):
            ids = np.stack([np.sort(rng.permutation(experts)[:top_k]) for _ in range(tokens)])
            active = np.unique(ids)
            x = normal((tokens, hidden), "bfloat16")

            def call(implementation, fmt=fmt, store=store, table=table, ids=ids, x=x):
                def op(y, x, ids, arena, store, table, active, count):
                    return expert_ffn(
                        y,
                        x,
                        ids,
                        arena,
                        (store,),
                        0,
                        table,
                        table * 0,
                        active,
                        count,
                        activation="silu",
                        row_tile=min(16, len(x)),
                        formats=(VersionFormats(fmt, fmt),),
                        implementation=implementation,
                    )

                compiled = jax.jit(op)
                y = jnp.zeros((ids.size, hidden), jnp.float32)
                arena = jnp.zeros((fmt.rows, hidden), jnp.uint16)

                def run(i):
                    # Other experts each time, so that no record lies in a cache.
                    other = np.sort((ids + i * top_k) % experts).astype(np.int32)
                    active = np.unique(other).astype(np.int32)
                    listed = np.full(experts, -1, np.int32)
                    listed[: len(active)] = active
                    count = np.int32(len(active))
                    return compiled(y, x, other, arena, store, table, listed, count)

                return run

            yield Case(f"expert_ffn {version}, {tokens} rows", len(active) * fmt.nbytes, call)


def attention_cases(args: argparse.Namespace) -> Iterator[Case]:
    heads, length, layers = args.hidden // HEAD_DIM, args.context, 8
    page = KVPage(16, heads, HEAD_DIM)
    blocks = length // page.block_size
    for tokens in (1, 8):
        rows = tokens * blocks * page.rows_per_layer * layers
        arena = jax.lax.bitcast_convert_type(normal((rows, HEAD_DIM), "bfloat16"), jnp.uint16)
        pages = np.arange(tokens * blocks, dtype=np.int32).reshape(tokens, -1)
        pages *= page.rows_per_layer * layers
        q = normal((tokens, heads, HEAD_DIM), "bfloat16")
        lengths = np.full(tokens, length, np.int32)

        def call(implementation, q=q, arena=arena, pages=pages, lengths=lengths):
            def op(q, arena, pages, lengths, layer):
                return decode_attention(
                    q, arena, pages, lengths, layer, page=page, implementation=implementation
                )

            compiled = jax.jit(op)
            return lambda i: compiled(q, arena, pages, lengths, np.int32(i % layers))

        nbytes = arena.nbytes // layers
        yield Case(f"decode_attention, {tokens} rows of {length}", nbytes, call)


def normal(shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(0), shape, jnp.float32)).astype(dtype)


def pinned() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0], memory_kind="pinned_host")


CASES = {"linear": linear_cases, "experts": expert_cases, "attention": attention_cases}
