"""Whole decode steps of known models beside what memory and multipliers allow.

python -m scripts.cpu steps [--only olmoe,versions,qwen3,deepseek] [--layers N]

Random weights in memory, all experts there, bfloat16. Each round times a block of steps of every
row, with a plain read of memory (numpy's maximum of 512 MiB, so many threads) before and after it,
and the matrix rate: this library's product of 512 rows and torch's in float32, whichever is
faster. A row's figure is the median of the rounds', with its 95% interval.

rows:
  olmoe     OLMoE-1B-7B, all 16 layers (12.9 GB), batch 1, 8, 32
  versions  OLMoE, 4 layers, batch 1, in dense, int8, int4 and lossless12
  qwen3     Qwen3-30B-A3B, 8 of 48 layers, batch 1
  deepseek  DeepSeek-V2-Lite (latent attention), 8 of 27 layers, batch 1

  memory    (bytes that a step must read / its time) / the read rate; "by processor" the same of
            processor seconds, which mean more while other programs run
  roof      max(bytes / read rate, operations / matrix rate) / its time: the larger bound
  of dense  its time / dense's of the same round, beside the ratio of their bytes

--experts store computes every expert where it lies in the store, so that there is one copy of the
weights; --experts resident gives each a cell. --account adds each op's time in a step (jax's
profiler), its bytes and its rate. KV pages hold a computed page's values, not the prompt's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from host_offload.memory.budget import Share, format_bytes
from host_offload.memory.device_memory import host_available_bytes
from moejax.cache import use_compilation_cache
from moejax.checkpoints.random_model import random_model, shape_fields
from moejax.checkpoints.versions import with_versions
from moejax.device import select_device
from moejax.engine.loop import Engine
from moejax.errors import UserError
from moejax.evaluate.experiments.intervals import median_interval
from moejax.models.config import ModelConfig, parse_config
from moejax.requests.request import Request
from moejax.requests.sampling_params import SamplingParams
from moejax.start.build import start_engine
from moejax.start.options import Options
from moejax.start.report.info import model_info
from pallas_kernels.cpu.library import instruction_set, why_not_cpu
from scripts.cpu.cases import memory_reader
from scripts.cpu.engines.checkpoint import OLMOE
from scripts.cpu.products import matrix_rates
from scripts.cpu.step_account import account
from scripts.parts.commands import new_parser, refusing
from scripts.parts.decode_timing import Samples, Sequences, decode, step_bytes

DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "moe_intermediate_size": 1408,
    "intermediate_size": 10944,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "norm_topk_prob": False,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "vocab_size": 102400,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that are measured beside each other."""

    title: str
    raw: dict[str, Any]
    """config.json."""
    layers: int
    batches: tuple[int, ...] = (1,)
    versions: tuple[str, ...] = ("dense",)
    bars: dict[int, float] = dataclasses.field(default_factory=dict)
    """Batch → least share of the roof (batch 1: of memory)."""


GROUPS = {
    "olmoe": Group("OLMoE-1B-7B", OLMOE, 16, (1, 8, 32), bars={1: 0.65, 8: 0.55, 32: 0.55}),
    "versions": Group("OLMoE-1B-7B", OLMOE, 4, versions=("dense", "int8", "int4", "lossless12")),
    "qwen3": Group("Qwen3-30B-A3B", shape_fields("qwen3-30b-a3b"), 8, bars={1: 0.6}),
    "deepseek": Group("DeepSeek-V2-Lite", DEEPSEEK, 8, bars={1: 0.6}),
}

OF_BYTES = 1.15
"""Bar of a version's step: so many times its bytes' ratio to dense's."""

VERDICTS = {True: "met", False: "**missed**", None: "no verdict, the machine is too busy"}
IMPOSSIBLE = 1.1

READ_BYTES = 1 << 29
RESERVE = 2 << 30


@dataclasses.dataclass
class Row:
    """One row of the table, ready to be timed."""

    version: str
    batch: int
    engine: Engine
    sequences: Sequences
    samples: Samples = dataclasses.field(default_factory=Samples)
    seconds: list[float] = dataclasses.field(default_factory=list)
    """Median of a step, a round each, as the lists below."""
    processor: list[float] = dataclasses.field(default_factory=list)
    memory: list[float] = dataclasses.field(default_factory=list)
    """Bytes a second, read just before and after."""
    memory_processor: list[float] = dataclasses.field(default_factory=list)
    """Bytes a processor second, likewise."""


@refusing(MemoryError)
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("--only", default=",".join(GROUPS), help="rows (default: all)")
    add("--layers", type=int, help="of each model instead of those above")
    add("--context", type=int, default=512, help="tokens before a step (default: %(default)s)")
    add("--rounds", type=int, default=9, help="of all rows in turn (default: %(default)s)")
    add("--block", type=float, default=1.0, help="seconds of steps a block (%(default)s)")
    add("--threads", type=int, default=2, help="that read memory (default: %(default)s)")
    add("--experts", choices=("store", "resident"), default="store", help="where they are read")
    add("--account", action="store_true", help="also each op's time and rate in a step")
    add("--json", action="store_true", help="one JSON object a row instead of tables")
    args = parser.parse_args(arguments)
    names = args.only.split(",")
    least = min(args.context, args.rounds, args.threads, args.layers or 1)
    if not set(names) <= GROUPS.keys() or least < 1:
        raise UserError(f"rows are {', '.join(GROUPS)}; numbers are positive")
    if reason := why_not_cpu():
        raise UserError(reason)
    use_compilation_cache(None)
    for name in names:
        group = GROUPS[name]
        if args.layers:
            group = dataclasses.replace(group, layers=args.layers)
        for line in run_group(args, group):
            print(line, flush=True)
    return 0


# ---- engines


def run_group(args: argparse.Namespace, group: Group) -> Iterator[str]:
    config = parse_config(group.raw | {"num_hidden_layers": group.layers}, group.title)
    check_memory(args, group, config)
    with ExitStack() as stack:
        rows = []
        for version in group.versions:
            began = time.perf_counter()
            engine = new_engine(args, group, config, version)
            stack.callback(engine.runner.delete)
            rows += [
                Row(version, batch, engine, sequences)
                for batch, sequences in contexts(args, engine, group.batches).items()
            ]
            print(f"{version}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        matrices = measure(args, rows)
        lines = [line_of(args, group, row, rows, matrices) for row in rows]
        if args.json:
            yield from map(json.dumps, lines)
            return
        yield from table(args, group, lines)
        for row in rows if args.account else ():
            yield from ("", f"{row.version}, batch {row.batch}:", "")
            yield from account(row.engine, row.sequences, row.batch, args.context)


def check_memory(args: argparse.Namespace, group: Group, config: ModelConfig) -> None:
    """Raises UserError where the engines of the group do not fit at once."""
    info = model_info(config)
    # While a version is made its dense one is there too.
    stores = [info.versions[version].store_bytes for version in group.versions]
    kept = sum(stores) * (2 if args.experts == "resident" else 1)
    made = info.versions["dense"].store_bytes if len(stores) > 1 else 0
    heads = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    kv = 4 * heads * max(group.batches) * (args.context + MOST_STEPS)
    need = kept + made + (info.device_bytes + kv) * len(stores) + RESERVE
    if need > host_available_bytes():
        raise UserError(
            f"{group.title} with {group.layers} layers needs {format_bytes(need)} of memory, "
            f"{format_bytes(host_available_bytes())} are free: give fewer --layers"
        )


def new_engine(args: argparse.Namespace, group: Group, config: ModelConfig, version: str) -> Engine:
    device = select_device()
    loaded = with_versions(random_model(config, device=device), [version])
    rows, steps = max(group.batches), 2 + MOST_STEPS
    options = Options(
        group.title,
        precision=None if version == "dense" else version,
        enable_prefix_caching=False,
        max_num_seqs=rows,
        max_model_len=args.context + steps,
        max_num_batched_tokens=max(16 * rows, 64),
        expert_budget=0 if args.experts == "store" else Share(1.0),
        # Named, so that each expert has a cell where all have: else they stay in the store.
        eviction=None if args.experts == "store" else "lru",
    )
    engine, _ = start_engine(loaded, options, device)
    engine.runner.wait_compiled(everything=True)
    return engine


MOST_STEPS = 64
"""Steps that a block has at most."""


def contexts(
    args: argparse.Namespace, engine: Engine, batches: Sequence[int]
) -> dict[int, Sequences]:
    """Batch → that many sequences with pages of their own for the context and the steps after it.

    Only the first page of each sequence is computed; the others hold copies of it, since what KV
    says does not change the time and a prompt of the largest batch takes minutes.
    """
    scheduler, runner = engine.scheduler, engine.runner
    size, random = runner.layout.page.block_size, np.random.default_rng(0)
    steps = args.context + MOST_STEPS - size
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    prompts = random.integers(runner.config.vocab_size, size=(max(batches), size)).tolist()
    requests: list[Request] = [engine.add(prompt, params) for prompt in prompts]
    while not all(request.output for request in requests):
        engine.step()
    for request in requests:
        pages = scheduler.pages_for(len(request.prompt), request.to_generate)
        if not scheduler.extend(request, pages - len(request.blocks)):
            raise UserError(f"the KV budget has no room for {len(requests)} sequences")
        first, *others = (block.row for block in request.blocks if block.row is not None)
        runner.write_pages(runner.read_pages([first]) * len(others), others)
    table = jax.device_put(scheduler.block_table.copy(), runner.tokens.sharding)
    rows = [request.row for request in requests if request.row is not None]
    return {batch: Sequences(tuple(rows[:batch]), args.context, table) for batch in batches}


# ---- measuring


def measure(args: argparse.Namespace, rows: list[Row]) -> list[float]:
    """Times all rows in turn; returns the matrix rate of each round, operations a second."""
    read, matrix = memory_reader(args.threads, READ_BYTES), matrix_rates(args.threads)
    counts = {}
    for i, row in enumerate(rows):
        first = block(row, 2)[0]
        counts[i] = int(np.clip(args.block / first, 2, MOST_STEPS))
    rates = []
    for _ in range(args.rounds):
        rates.append(matrix())
        before = read_rates(read)
        for i, row in enumerate(rows):
            seconds, processor = block(row, counts[i])
            after = read_rates(read)
            row.seconds.append(seconds)
            row.processor.append(processor)
            row.memory.append((before[0] + after[0]) / 2)
            row.memory_processor.append((before[1] + after[1]) / 2)
            before = after
    return rates


def read_rates(read: Callable[[], float]) -> tuple[float, float]:
    """Bytes a second, and a processor second, of the fastest of some reads: a roof. A single one
    after seconds of idling waits for pages, threads and the interpreter's lock."""
    before = time.process_time()
    seconds = [read() for _ in range(_READS)]
    return 1 / min(seconds), READ_BYTES * _READS / (time.process_time() - before)


_READS = 8


def block(row: Row, steps: int) -> tuple[float, float]:
    """Seconds of the median step and processor seconds of one."""
    samples, before = Samples(), time.process_time()
    decode(row.engine.runner, row.sequences, [None] * steps, samples)
    row.samples.active[:] = samples.active
    return float(np.median(samples.step_s)), (time.process_time() - before) / steps


def line_of(
    args: argparse.Namespace, group: Group, row: Row, rows: Sequence[Row], matrices: list[float]
) -> dict[str, Any]:
    """The fields of a row of the table."""
    runner, seconds = row.engine.runner, np.array(row.seconds)
    nbytes, operations = work(row, args.context)
    share = nbytes / seconds / np.array(row.memory)
    compute = operations / seconds / np.array(matrices)
    line: dict[str, Any] = {"model": group.title, "layers": group.layers, "version": row.version}
    line |= {"batch": row.batch, "context": args.context, "gb": nbytes / 1e9}
    line |= {"gflop": operations / 1e9, "ms": 1e3 * float(np.median(seconds))}
    line |= {"processor_ms": 1e3 * float(np.median(row.processor))}
    line |= {"memory_gb_s": float(np.median(row.memory)) / 1e9, "memory": spread(share)}
    processor_share = nbytes / np.array(row.processor) / np.array(row.memory_processor)
    line |= {"memory_processor": float(np.median(processor_share))}
    line |= {"matrix_gflop_s": float(np.median(matrices)) / 1e9}
    line |= {"roof": spread(np.maximum(share, compute)), "experts": args.experts}
    line |= {"active": float(np.mean(np.sum(row.samples.active, axis=1)))}
    line |= {"ops": runner.ops.chosen(), "isa": instruction_set(), "load": os.getloadavg()[0]}
    if bar := group.bars.get(row.batch):
        figure = line["memory" if row.batch == 1 else "roof"][0]
        # Faster than memory: other programs disturbed the plain read more than the step.
        line |= {"bar": f"≥ {bar:.0%}", "met": None if figure > IMPOSSIBLE else figure >= bar}
    dense = rows[0]
    if row is not dense and row.version != "dense":
        ratio = spread(seconds / np.array(dense.seconds))
        line |= {"of_dense": ratio, "of_bytes": nbytes / work(dense, args.context)[0]}
        line |= {"of_processor": float(np.median(np.divide(row.processor, dense.processor)))}
        most = OF_BYTES * line["of_bytes"]
        line |= {"bar": f"≤ {most:.2f} of dense", "met": ratio[0] <= most}
    return line


def work(row: Row, context: int) -> tuple[float, float]:
    """Bytes that a step must read, and multiplications and additions of its products with weights,
    and of attention where KV is not latent."""
    runner, config = row.engine.runner, row.engine.runner.config
    active = float(np.mean(np.sum(row.samples.active, axis=1)))
    read = step_bytes(runner, active, batch=row.batch, context=context)
    page = runner.layout.page
    dense = (read["attention and other weights"] + read["head"]) / page.itemsize
    record = runner.layout.records[0]
    routed = sum(config.moe_layers) * config.num_experts_per_tok * 3 * record.width * record.hidden
    keys = 0
    if config.mla is None:
        keys = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * context
    return sum(read.values()), 2.0 * row.batch * (dense + routed + keys)


def spread(values: np.ndarray) -> tuple[float, float, float]:
    """Median and its 95% interval; the range with fewer than six."""
    found = values.tolist()
    low, high = median_interval(found) if len(found) > 5 else (min(found), max(found))
    return float(np.median(values)), low, high


def table(args: argparse.Namespace, group: Group, lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of Markdown."""
    first = lines[0]
    yield (
        f"### {group.title}, {group.layers} layers, context {args.context}, bfloat16, experts in "
        f"{'the store' if args.experts == 'store' else 'cells'}"
    )
    yield ""
    headings = ["version", "batch", "experts read", "GB a step", "GFLOP", "ms", "processor ms"]
    headings += ["memory", "by processor", "roof", "of dense", "bytes'", "bar"]
    yield "| " + " | ".join(headings) + " |"
    yield "|" + "---|" * len(headings)

    def shown(value: tuple[float, float, float] | None, how: str) -> str:
        return "" if value is None else "{} [{}, {}]".format(*(format(v, how) for v in value))

    for line in lines:
        cells = [line["version"], str(line["batch"]), f"{line['active']:.0f}", f"{line['gb']:.2f}"]
        cells += [f"{line['gflop']:.1f}", f"{line['ms']:.1f}", f"{line['processor_ms']:.0f}"]
        cells += [shown(line["memory"], ".0%")]
        cells += [f"{line['memory_processor']:.0%}", shown(line["roof"], ".0%")]
        ratio = shown(line.get("of_dense"), ".2f")
        cells.append(ratio and f"{ratio}, processor {line['of_processor']:.2f}")
        cells.append(f"{line['of_bytes']:.2f}" if "of_bytes" in line else "")
        bar = line.get("bar")
        cells.append(f"{bar}: {VERDICTS[line['met']]}" if bar else "")
        yield "| " + " | ".join(cells) + " |"
    yield ""
    yield (
        f"Memory {first['memory_gb_s']:.1f} GB/s ({args.threads} threads), matrix "
        f"{first['matrix_gflop_s']:.0f} GFLOP/s; {instruction_set()}; {args.rounds} rounds; load "
        f"{os.getloadavg()[0]:.1f}."
    )
