"""Prefill steps in the sizes of known models: time per prefill step beside its floor.

python -m scripts.bench prefill --help says what is measured and how to read the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.checkpoints.random_model import shape
from moejax.costs.rates import best_s, measure_link_rate
from moejax.device import select_device
from moejax.engine.loop import Engine
from moejax.engine.step_work import Step
from moejax.errors import UserError
from moejax.models.config import ModelConfig
from moejax.requests.sampling_params import SamplingParams
from moejax.start.decide.shapes import PREFILL_CHUNK
from moejax.start.options import Config
from moejax.step.executor import Executor
from scripts.parts.bench_engine import (
    add_options,
    check_fits,
    check_names,
    compiled_engine,
    described,
    grant,
    largest,
    no_compilation,
    parse_cells,
    parse_numbers,
    weights_of,
)
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import aligned

LONGEST_PROMPT = 4096
"""Tokens of a prompt where --prompt does not say."""

SQUARE = {"cpu": 1024}
"""Platform → rows and columns of the matrices in measure_matrix_rate; elsewhere 8192."""


DESCRIPTION = f"""\
Prefill steps through the engine's own executable, in the sizes of known models, with random
weights: from handing over the prompts to their first tokens in Python, compilation excluded. A
prefill step computes all prompts layer by layer, so that an expert crosses the link once a layer.
Rows of the table are prompt tokens × cells per layer (experts that a layer keeps in the arena).
Each number of tokens is a start-up shape and has its own engine; cells change by table contents
only, and the bench fails if anything is compiled while it measures. Tokens are split into prompts
of --prompt tokens (default: {LONGEST_PROMPT}, less where the model has fewer positions)."""

EPILOG = """\
columns, each figure beside its floor (the least that the measured rates allow):
  cells      all: every expert has a cell and is in it before the prefill step. Fewer: every cell is
             empty before the prefill step, so each expert that a token asks for crosses the link
  ms         median of the repeats, and best
  floor      max(link, compute), which may overlap: the missed experts' bytes, each once, over the
             link's rate (the fill op alone on the same store), and the products' and attention's
             operations over the matrix rate (a large product by XLA in the run's dtype)
  × floor    median / floor
  tok/s      prompt tokens / median, and / floor
  filled     GB of experts loaded into cells in a prefill step
  read-thr   GB of experts read through, without a cell; a kernel may read them more than once,
             which the floor does not count

examples:
  python -m scripts.bench prefill --tokens 512,2048
  python -m scripts.bench prefill --shape qwen3-30b-a3b --layers 2 --tokens 4096 --cells all,0
  python -m scripts.bench prefill --shape qwen3-30b-a3b --tokens 4096,16384,65536 --json
"""


@dataclasses.dataclass(frozen=True)
class PrefillSample:
    """One prefill step. active, fills, read_through: experts of all layers together."""

    seconds: float
    active: int
    fills: int
    read_through: int


@dataclasses.dataclass(frozen=True)
class Rates:
    """Measured in this run."""

    link: float
    """Bytes per second, of the fill op on the store."""
    matrix: float
    """Operations per second, of a large product in the run's dtype."""


@refusing(MemoryError)
def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    lines = run(args)
    if not args.json:
        print(*table(lines), sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, DESCRIPTION, EPILOG)
    add_options(parser, cells="all,25%,0")
    add = parser.add_argument
    add("--tokens", default="4096", help="prompt tokens of a prefill step (default: %(default)s)")
    add("--prompt", type=int, help="tokens of one prompt; the last one has what is left")
    add("--waves", type=int, help="passes over a layer's experts (default: the engine's)")
    add(
        "--repeats",
        type=int,
        default=5,
        help="timed prefill steps of each row (default: %(default)s)",
    )
    return parser


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each number of tokens and of cells, printed at once with --json."""
    config = shape(args.shape, args.layers)
    sizes = list(dict.fromkeys(parse_numbers(args.tokens, "--tokens", least=1)))
    cells = parse_cells(args.cells, config.num_experts)
    positive(args, "repeats")
    check_names(args)
    lengths = {tokens: prompt_lengths(tokens, args.prompt, config) for tokens in sizes}
    limits = {tokens: _limits(args, config, lengths[tokens], cells) for tokens in sizes}
    device = select_device()
    for tokens in sizes:
        kept = len(lengths[tokens]) * (max(lengths[tokens]) + 1)
        check_fits(args, config, device, max(cells), tokens=kept, prefill=tokens)
    lines = []
    with weights_of(args, config, device) as loaded:
        rates = None
        for tokens in sizes:
            with compiled_engine(args, loaded, device, limits[tokens]) as engine:
                runner = engine.runner
                if rates is None:
                    matrix = measure_matrix_rate(device, loaded.dtype)
                    rates = Rates(measure_link_rate(runner), matrix)
                for count, samples in _measure(args, engine, lengths[tokens], cells):
                    line = measured_line(runner, rates, samples, lengths[tokens], cells=count)
                    lines.append({"shape": args.shape} | line)
                    if args.json:
                        print(json.dumps(lines[-1]), flush=True)
    return lines


def prompt_lengths(tokens: int, longest: int | None, config: ModelConfig) -> list[int]:
    """Splits a prefill step's tokens into prompts of `longest` tokens and the rest.

    longest: None for LONGEST_PROMPT or the most whole chunks that leave a position for the token
    generated. Raises UserError for a length that the model has no positions for.
    """
    positions = config.max_position_embeddings
    if longest is None:
        longest = min(LONGEST_PROMPT, (positions - 1) // PREFILL_CHUNK * PREFILL_CHUNK)
    if not 0 < longest < positions:
        raise UserError(
            f"--prompt must be from 1 to {positions - 1}, the model's positions less one for the "
            f"token generated, got {longest}"
        )
    full, rest = divmod(tokens, longest)
    return [longest] * full + [rest] * (rest > 0)


def _limits(
    args: argparse.Namespace, config: ModelConfig, lengths: list[int], cells: list[int]
) -> Config:
    """Shapes that hold all prompts in one prefill step."""
    return Config.of(
        "",
        enable_prefix_caching=False,
        max_num_seqs=len(lengths),
        max_model_len=max(lengths) + 1,
        max_num_batched_tokens=PREFILL_CHUNK * sum(-(-n // PREFILL_CHUNK) for n in lengths),
        expert_budget=largest(cells, config),
        driver="device" if args.waves is None else f"device,waves={args.waves}",
    )


# ---- measuring


def _measure(
    args: argparse.Namespace, engine: Engine, lengths: list[int], cells: list[int]
) -> list[tuple[int, list[PrefillSample]]]:
    """(cells per layer, samples) of each row of one number of tokens."""
    random, vocabulary = np.random.default_rng(args.seed), engine.runner.config.vocab_size
    prompts = [random.integers(vocabulary, size=length).tolist() for length in lengths]
    grant(engine, max(cells))
    prefill(engine, prompts)  # compiles what has not been
    with no_compilation(engine.runner):
        return [(count, prefill_steps(engine, prompts, count, args.repeats)) for count in cells]


def prefill_steps(
    engine: Engine, prompts: list[list[int]], cells: int, repeats: int
) -> list[PrefillSample]:
    """Prefill steps that find all experts they need (as many cells as experts) or none."""
    resident = cells == engine.runner.config.num_experts
    if resident:
        grant(engine, cells)
        prefill(engine, prompts)
    samples = []
    for _ in range(repeats):
        if not resident:
            grant(engine, 0)
            grant(engine, cells)
        jax.block_until_ready(engine.runner.tables)
        samples.append(prefill(engine, prompts))
    return samples


def prefill(engine: Engine, prompts: list[list[int]]) -> PrefillSample:
    """Runs the prompts through an idle engine, up to their first tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    steps: list[Step] = []
    engine.listener = steps.append
    for prompt in prompts:
        engine.add(prompt, params)
    began = time.perf_counter()
    while not engine.idle:
        engine.step()
    seconds, engine.listener = time.perf_counter() - began, None
    if len(steps) != 1:
        raise RuntimeError(f"the prompts took {len(steps)} steps instead of one prefill step")
    paging = steps[0].output.read().paging
    counts = (int(np.sum(n)) for n in (paging.active, paging.fills, paging.read_through))
    return PrefillSample(seconds, *counts)


def measure_matrix_rate(device: jax.Device, dtype: jax.typing.DTypeLike) -> float:
    """Floating point operations per second of a large square product by XLA, 2·n³ for n rows."""
    n = SQUARE.get(device.platform, 8192)
    a = jax.device_put(np.full((n, n), 0.5, dtype), device)
    product = jax.jit(jnp.matmul)
    rate = 2 * n**3 / best_s(lambda *_: product(a, a), device)
    a.delete()
    return rate


# ---- the report


def prefill_operations(config: ModelConfig, lengths: Sequence[int]) -> int:
    """Floating point operations (a multiplication and an addition are two) that a prefill step over
    prompts of these lengths needs: dense products, each token's experts, causal attention, and the
    LM head on each prompt's last token. Norms, rope and softmax are not counted.
    """
    hidden, tokens = config.hidden_size, sum(lengths)
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    window = config.sliding_window
    attended = sum(
        min(position + 1, window or position + 1)
        for length in lengths
        for position in range(length)
    )
    experts = config.num_experts_per_tok * config.moe_intermediate_size
    operations = 2 * hidden * config.vocab_size * len(lengths)
    for is_moe in config.moe_layers:
        per_token = hidden * (2 * heads + 2 * kv_heads)
        if is_moe:
            per_token += hidden * config.num_experts + 3 * hidden * experts
        else:
            per_token += 3 * hidden * config.intermediate_size
        operations += 2 * per_token * tokens + 4 * heads * attended
    return operations


def measured_line(
    runner: Executor,
    rates: Rates,
    samples: Sequence[PrefillSample],
    lengths: Sequence[int],
    *,
    cells: int,
) -> dict[str, Any]:
    """What a case measured, each figure beside its floor; the fields of the bench's JSON lines.

    cells: per layer. The floor is max(link, compute): the missed
    experts' bytes, each once, at the link's rate; prefill_operations at the matrix rate.
    """
    config, record = runner.config, runner.layout.records[0].nbytes
    tokens, operations = sum(lengths), prefill_operations(config, lengths)
    median = float(np.median([sample.seconds for sample in samples]))
    fills = float(np.mean([sample.fills for sample in samples]))
    read_through = float(np.mean([sample.read_through for sample in samples]))
    floor_link = (fills + read_through) * record / rates.link
    floor_compute = operations / rates.matrix
    floor = max(floor_link, floor_compute)
    return {
        **described(runner),
        "tokens": tokens,
        "prompts": len(lengths),
        "chunk": runner.shapes.chunk,
        "waves": runner.shapes.waves,
        "cells_per_layer": cells,
        "prefill_steps": len(samples),
        "ms": median * 1e3,
        "ms_best": min(sample.seconds for sample in samples) * 1e3,
        "floor_ms": floor * 1e3,
        "floor_link_ms": floor_link * 1e3,
        "floor_compute_ms": floor_compute * 1e3,
        "times_floor": median / floor,
        "tokens_per_s": tokens / median,
        "ceiling_tokens_per_s": tokens / floor,
        "active": float(np.mean([sample.active for sample in samples])),
        "fills": fills,
        "read_through": read_through,
        "filled_gb": fills * record / 1e9,
        "read_through_gb": read_through * record / 1e9,
        "operations": operations,
        "tflops": operations / median / 1e12,
        "matrix_rate_tflops": rates.matrix / 1e12,
        "link_rate_gb_per_s": rates.link / 1e9,
        "compile_s": runner.compiler.compile_s,
    }


COLUMNS = (
    ("tokens", "{tokens}"),
    ("prompts", "{prompts}"),
    ("cells", "{cells_per_layer}"),
    ("ms", "{ms:.1f}"),
    ("best", "{ms_best:.1f}"),
    ("floor", "{floor_ms:.1f}"),
    ("link", "{floor_link_ms:.1f}"),
    ("compute", "{floor_compute_ms:.1f}"),
    ("× floor", "{times_floor:.2f}"),
    ("tok/s", "{tokens_per_s:.0f}"),
    ("ceiling", "{ceiling_tokens_per_s:.0f}"),
    ("filled GB", "{filled_gb:.3f}"),
    ("read-thr GB", "{read_through_gb:.3f}"),
    ("TFLOP/s", "{tflops:.3f}"),
)
"""Heading → how a line is shown under it."""


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of text for people. lines: of one run, measured_line's fields with shape."""
    first = lines[0]
    yield (
        "{shape}, {layers} layers of {experts} experts, {dtype}, on {device}, jax {jax}; "
        "chunks of {chunk} tokens, {waves} wave(s), {prefill_steps} prefill steps a row".format(
            **first
        )
    )
    yield (
        "measured: link {link_rate_gb_per_s:.2f} GB/s, products {matrix_rate_tflops:.3f} TFLOP/s; "
        "floor = max(link, compute)".format(**first)
    )
    yield from aligned(COLUMNS, lines)
