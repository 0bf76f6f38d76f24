"""Prefill steps in the sizes of known models: time per prefill step beside its floor.

python -m scripts.bench prefill --help says what is measured and how to read the table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from moejax.checkpoints.random_model import shape
from moejax.costs.rates import measure_link_rate
from moejax.device import select_device
from moejax.engine.loop import Engine
from moejax.errors import UserError
from moejax.models.config import ModelConfig
from moejax.start.decide.shapes import PREFILL_CHUNK
from moejax.start.options import Options
from scripts.bench.prefill_report import Rates, measured_line, table
from scripts.bench.prefill_timing import (
    PrefillSample,
    measure_matrix_rate,
    prefill,
    prefill_steps,
)
from scripts.parts.bench_engine import (
    add_options,
    check_fits,
    check_names,
    compiled_engine,
    grant,
    largest,
    no_compilation,
    parse_cells,
    parse_numbers,
    weights_of,
)
from scripts.parts.commands import new_parser, positive, refusing

LONGEST_PROMPT = 4096
"""Tokens of a prompt where --prompt does not say."""

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
  cells      of all experts (all): resident, they are there before the prefill step. Fewer: paged,
  every
             cell is empty before the prefill step, so each expert that a token asks for crosses the
             link
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
) -> Options:
    """Shapes that hold all prompts in one prefill step."""
    return Options(
        "",
        enable_prefix_caching=False,
        max_num_seqs=len(lengths),
        max_model_len=max(lengths) + 1,
        max_num_batched_tokens=PREFILL_CHUNK * sum(-(-n // PREFILL_CHUNK) for n in lengths),
        expert_budget=largest(cells, config),
        prefill_waves=args.waves,
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
