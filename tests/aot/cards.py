"""Every kernel of the steps of known models, compiled for every card: shared memory, registers and
spills; and how long a start's checks compile. Writes a page for each part.

    JAX_PLATFORMS=cpu python -m tests.aot.cards steps records checks --out docs/results

A run that was stopped goes on where it was, with --kept FILE; what --minutes were too few for is
named on the page.

steps: whole steps of MODELS. records: expert_ffn over all formats of records that runs have.
checks: what a start of Qwen3-30B-A3B on an H200 compiles to check its kernels.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import itertools
import json
import math
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax

from moejax.evaluate.gpu_check import VERSIONS
from moejax.models.config import parse_config
from moejax.start.decide.shapes import KERNEL_WAVES, decodes_in_buckets, without_kernel
from moejax.start.kernels import kernel_shapes
from moejax.step.programs import ProgramKey
from pallas_kernels import resolve_ops
from pallas_kernels.cards import shared_class
from pallas_kernels.verification import Check, checks
from pallas_kernels.verification.check import argument_shapes
from tests.aot.aot_h200 import CARDS, Compiled, compile_for, device_of
from tests.aot.ptxas import Kernel, compile_kernels
from tests.moejax.models.test_published_configs import PUBLISHED
from tests.moejax.step.test_constant_memory import PREFILL, STAGED, GiB, abstract_programs
from tests.pallas_kernels.test_expert_ffn_versions_aot import compile_layers

MODELS = ("Qwen3-30B-A3B", "Mixtral-8x7B", "OLMoE-1B-7B", "DeepSeek-V2-Lite")

STEPS = (ProgramKey("decode", 16), STAGED, PREFILL)
"""Decode of 16 rows, decode of 64 with a stage list (its other kernels are those of one without),
prefill of 8192 tokens."""

ARENA_GiB = {"a100": 40, "rtx4090": 14, "h200": 40, "rtx5060ti": 6}
"""Above 4 GiB, where kernels address with 64 bits."""

RECORD_ROWS = ((16, 16), (64, 16), (8192, 64))
"""Tokens and rows of a product that expert_ffn is compiled for."""

OURS = re.compile(
    r"linear|norm_linear|head_linear|rms_norm|layer_norm|kv_write|latent_write|decode_|prefill_"
    r"|route|plan|fill|stage|move|expert_|combine"
)
"""How the names of our kernels begin; all others are XLA's."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One kernel of a program on a card."""

    card: str
    program: str
    kernel: str
    shared_bytes: int
    registers: int
    spill_bytes: int


def compile_step(
    card: str, model: str, key: ProgramKey, max_model_len: int = 4096
) -> tuple[Compiled, dict[str, Kernel]]:
    """A step of a model of PUBLISHED with the ops that run on this card."""
    config = parse_config(PUBLISHED[model].raw)
    ops = resolve_ops(
        "auto",
        platform="gpu",
        dtype="bfloat16",
        no_kernel=without_kernel(config),
        shared_kib=shared_class(device_of(card)),
    )
    programs = abstract_programs(
        config,
        ARENA_GiB[card] * GiB,
        ops=ops,
        waves=KERNEL_WAVES,
        bucketed=decodes_in_buckets(config, ops),
        rows=64,
        max_model_len=max_model_len,
        max_num_batched_tokens=8192,
    )
    program = programs.program(key)
    return compile_kernels(
        program.function,
        *program.args,
        card=card,
        donate_argnums=program.donated,
        host_argnums=tuple(i for i, arg in enumerate(program.args) if arg is programs.stores),
    )


def step_lines(card: str, model: str, key: ProgramKey) -> list[Line]:
    """The lines of compile_step."""
    return _lines(card, f"{model} {key}", lambda: compile_step(card, model, key)[1])


def record_lines(card: str, versions: tuple[tuple[str, str], ...], rows: int, row_tile: int):
    """The lines of expert_ffn over these versions at the size of Qwen3-30B-A3B."""
    names = (cell if cell == held else f"{held} to {cell}" for cell, held in versions)
    program = f"{', '.join(names)}: {rows} tokens"
    return _lines(
        card, program, lambda: compile_layers(versions, rows, row_tile, card=card)[1], "expert_"
    )


def _lines(
    card: str, program: str, compiled: Callable[[], dict[str, Kernel]], only: str = ""
) -> list[Line]:
    """The kernels whose names begin so, or one line that says why there are none."""
    try:
        kernels = compiled()
    except jax.errors.JaxRuntimeError as error:
        first = str(error).splitlines()[0]
        return [Line(card, program, f"DOES NOT COMPILE: {first}", 0, 0, 0)]
    return [
        Line(card, program, k.name, k.shared_bytes, k.registers, k.spill_bytes)
        for name, k in sorted(kernels.items())
        if name.startswith(only)
    ]


def start_checks(model: str = MODELS[0]) -> list[Check]:
    """The checks that a start of this model on an H200 makes."""
    config = parse_config(PUBLISHED[model].raw)
    card = device_of("h200")
    ops = resolve_ops(
        "auto",
        platform="gpu",
        dtype="bfloat16",
        no_kernel=without_kernel(config),
        shared_kib=shared_class(card),
    )
    shapes = kernel_shapes(config, "bfloat16", config.slot_layout(itemsize=2))
    return [check for shape in shapes for check in checks(shape, ops)]


def check_seconds(number: int) -> tuple[str, float, float]:
    """Key of one of start_checks, and processor seconds to compile its kernel and its reference."""
    check = start_checks()[number]
    operands = argument_shapes(check)
    host = () if check.stores is None else (int(check.arena is not None),)
    seconds = []
    for name in ("pallas", "xla"):
        began = _processor_seconds()
        compile_for("h200", functools.partial(check.run, name), *operands, host_argnums=host)
        seconds.append(_processor_seconds() - began)
    return check.key, seconds[0], seconds[1]


def _processor_seconds() -> float:
    """What this process and those that it waited for (ptxas) have used so far."""
    return sum(os.times()[:4])


def step_page(lines: Sequence[Line], missing: Sequence[str]) -> str:
    """One table a program: our kernels, a column a card."""
    text = [
        "# Steps on every card",
        "",
        "Each kernel of our own: bytes of shared memory a program, registers a thread, and, where "
        "there are any, bytes spilled. XLA's own kernels are counted. `python -m tests.aot.cards "
        f"steps`, {_where()}.",
        *_left_out(missing),
    ]
    return "\n".join([*text, *_tables(lines)]) + "\n"


def record_page(lines: Sequence[Line], missing: Sequence[str]) -> str:
    """As step_page, of expert_ffn over formats of records."""
    text = [
        "# expert_ffn over every format of records on every card",
        "",
        "Qwen3-30B-A3B: bytes of shared memory a program, registers a thread, bytes spilled. "
        f"`python -m tests.aot.cards records`, {_where()}.",
        *_left_out(missing),
    ]
    return "\n".join([*text, *_tables(lines)]) + "\n"


def _left_out(missing: Sequence[str]) -> list[str]:
    if not missing:
        return []
    return ["", f"**Not compiled in this run** ({len(missing)}): {'; '.join(missing)}."]


def _tables(lines: Sequence[Line]) -> Iterable[str]:
    for program, group in itertools.groupby(lines, key=lambda line: line.program):
        of_program = list(group)
        cards = sorted({line.card for line in of_program}, key=CARDS.index)
        cells = {(line.kernel, line.card): line for line in of_program}
        ours = sorted({line.kernel for line in of_program if OURS.match(line.kernel)})
        yield from ("", f"## {program}", "")
        yield f"| kernel | {' | '.join(map(_heading, cards))} |"
        yield f"|---|{'---|' * len(cards)}"
        for kernel in ours:
            row = (_cell(cells.get((kernel, card))) for card in cards)
            yield f"| {kernel} | {' | '.join(row)} |"
        others = []
        for card in cards:
            own = [x for x in of_program if x.card == card and not OURS.match(x.kernel)]
            broken = [x.kernel for x in own if x.kernel.startswith("DOES NOT")]
            spilled = sum(x.spill_bytes for x in own)
            others.append(broken[0] if broken else f"{len(own)}, {spilled} spilled")
        yield f"| XLA's own | {' | '.join(others)} |"


def _heading(card: str) -> str:
    capability = device_of(card).compute_capability
    return f"{card} (sm_{capability.replace('.', '')}, {shared_class(device_of(card))} KiB)"


def _cell(line: Line | None) -> str:
    if line is None:
        return "–"
    spilled = f", **{line.spill_bytes} spilled**" if line.spill_bytes else ""
    return f"{line.shared_bytes:,} B, {line.registers}{spilled}"


def check_page(found: Sequence[tuple[str, float, float]], wall: float, workers: int) -> str:
    """Seconds of every check, and of all."""
    kernels, references = (sum(line[i] for line in found) for i in (1, 2))
    rows = (f"| {key} | {k:.2f} | {r:.2f} |" for key, k, r in found)
    return "\n".join(
        [
            "# What a start's checks compile",
            "",
            f"The {len(found)} checks of Qwen3-30B-A3B in bfloat16 on an H200, seconds of a core "
            f"to trace, lower and compile: kernels {kernels:.1f}, references {references:.1f}. "
            f"{workers} processes took {wall:.1f} s of wall time, their start included, with the "
            "machine as busy as it was. The operands' own programs and XLA's autotuning, which "
            f"only a GPU has, are not in it. `python -m tests.aot.cards checks`, {_where()}.",
            "",
            "| check | kernel, core s | reference, core s |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _all_lines(
    pool: concurrent.futures.Executor, calls: Sequence[tuple], kept: Path | None, minutes: float
) -> tuple[list[Line], list[str]]:
    """The lines of every (function, *arguments), in order, and the calls that these minutes were
    too few for. kept: JSON lines, one a call."""
    found = {}
    if kept is not None and kept.exists():
        found = dict(json.loads(line) for line in kept.read_text().splitlines())
    names = [" ".join(map(str, (call[0].__name__, *call[1:]))) for call in calls]
    jobs = {
        pool.submit(*call): name
        for name, call in zip(names, calls, strict=True)
        if name not in found and minutes > 0
    }
    try:
        for job in concurrent.futures.as_completed(
            jobs, timeout=None if minutes == math.inf else 60 * minutes
        ):
            found[jobs[job]] = [dataclasses.asdict(line) for line in job.result()]
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps([jobs[job], found[jobs[job]]]) + "\n")
    except TimeoutError:
        for job in jobs:
            job.cancel()
    lines = [Line(**line) for name in names for line in found.get(name, ())]
    return lines, [name.partition(" ")[2] for name in names if name not in found]


def _where() -> str:
    return f"jax {jax.__version__}, {datetime.date.today().isoformat()}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=("steps", "records", "checks"))
    parser.add_argument("--out", type=Path, help="folder for cards_PART.md; default: stdout")
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=CARDS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf, help="default: no end")
    parser.add_argument("--kept", type=Path, help="lines found so far, as JSON: made and gone on")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.workers, mp_context=spawn) as pool:
        for part in args.parts:
            if part == "checks":
                began = time.perf_counter()
                found = list(pool.map(check_seconds, range(len(start_checks()))))
                page = check_page(found, time.perf_counter() - began, args.workers)
            elif part == "steps":
                work = list(itertools.product(args.models, STEPS, args.cards))
                calls = [(step_lines, card, model, key) for model, key, card in work]
                page = step_page(*_all_lines(pool, calls, args.kept, args.minutes))
            else:
                work = list(itertools.product(VERSIONS, RECORD_ROWS, args.cards))
                calls = [(record_lines, card, v, *rows) for v, rows, card in work]
                page = record_page(*_all_lines(pool, calls, args.kept, args.minutes))
            if args.out is None:
                print(page)
            else:
                (args.out / f"cards_{part}.md").write_text(page)
                print(f"wrote {args.out}/cards_{part}.md", flush=True)


if __name__ == "__main__":
    main()
