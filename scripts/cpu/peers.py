"""Decode and prefill beside llama.cpp and transformers: the same checkpoint, the same tokens.

python -m scripts.cpu peers [--llama-python PYTHON] [--keep DIR] [--stages bf16,int8,int4]

A random OLMoE (four layers of its true size, 3.8 GB in bfloat16) is written once and read by all:
by moejax and transformers as it is, by llama.cpp as a GGUF file of the same numbers. Each engine is
loaded in a process of its own; they compute in turn, never at once, with as many threads each. A
step is tokens in, logits of the whole vocabulary out, of forced tokens. First the log-probabilities
of the forced tokens must agree, else nothing is timed.

stages:
  bf16    moejax, llama.cpp, transformers
  int8    moejax's experts in int8 beside Q8_0: of experts alone ("experts"), and of attention,
          head and embeddings too, as llama.cpp's users have it ("all")
  int4    the same with int4 and Q4_0

A ratio is the median of the rounds' ratios, with its 95% interval; "processor" is the same of
processor seconds, which other programs disturb less than the clock, though threads that wait in a
loop for others spend them too. A block that takes over --limit seconds is done in one round only.

needs, where a stage has the engine (--llama-python may be another environment's):
  pip install llama-cpp-python==0.3.36 gguf==0.19.0      # compiles for ten minutes
  pip install torch==2.13.0 transformers==5.17.0 accelerate
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from moejax.errors import UserError
from scripts.cpu.engines.checkpoint import OLMOE, write_checkpoint
from scripts.cpu.engines.compare import AGREEMENT, Plan, agreement, measure, table
from scripts.cpu.engines.llama_files import why_not_llama, write_gguf
from scripts.cpu.engines.protocol import Task, Worker
from scripts.parts.commands import new_parser, positive, refusing

STAGES = {
    "bf16": ("moejax", "llama.cpp BF16", "transformers bf16"),
    "int8": ("moejax int8", "llama.cpp Q8_0 experts", "llama.cpp Q8_0 all"),
    "int4": ("moejax int4", "llama.cpp Q4_0 experts", "llama.cpp Q4_0 all"),
}
"""Engines, moejax first."""

MODULES = {"moejax": "moejax_engine", "llama.cpp": "llama_engine", "transformers": "torch_engine"}

TORCH = "pip install torch==2.13.0 transformers==5.17.0 accelerate"


@refusing(RuntimeError)
def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    stages = args.stages.split(",")
    if not set(stages) <= STAGES.keys():
        raise UserError(f"stages are {', '.join(STAGES)}")
    positive(args, "layers", "rounds", "threads", "prompt", "context")
    if missing := missing_for(stages, args.without.split(","), args.llama_python):
        raise UserError(missing)
    with ExitStack() as stack:
        kept = args.keep or stack.enter_context(tempfile.TemporaryDirectory())
        for stage in stages:
            for line in run_stage(args, stage, Path(kept)):
                print(line, flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("--stages", default="bf16", help=f"{', '.join(STAGES)} (default: %(default)s)")
    add("--without", default="", help="engines to leave out: llama.cpp, transformers")
    add("--layers", type=int, default=4, help="of OLMoE's 16 (default: %(default)s)")
    add("--context", type=int, default=128, help="tokens before a decode step (%(default)s)")
    add("--prompt", type=int, default=512, help="tokens of the prefill (default: %(default)s)")
    add("--rounds", type=int, default=7, help="of all engines in turn (default: %(default)s)")
    add("--block", type=float, default=1.0, help="seconds of decode steps a block (%(default)s)")
    add("--limit", type=float, default=12.0, help="of a block to be repeated (%(default)s)")
    add("--threads", type=int, default=2, help="of each engine (default: %(default)s)")
    add("--experts", choices=("store", "resident"), default="store", help="moejax's; see steps")
    add("--llama-python", default=sys.executable, help="interpreter that has llama-cpp-python")
    add("--keep", help="folder that keeps the files, 4 to 12 GB, for the next run")
    add("--json", action="store_true", help="one JSON object a row instead of the tables")
    return parser


def missing_for(stages: Sequence[str], without: Sequence[str], llama_python: str) -> str | None:
    """What has to be installed first, in words."""
    engines = [name for stage in stages for name in engines_of(stage, without)]
    llama = any(name.startswith("llama.cpp") for name in engines)
    if llama and (said := why_not_llama(llama_python)):
        return f"{said}, or --without llama.cpp"
    wanted = any(name.startswith("transformers") for name in engines)
    if wanted and not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        return f"no torch or transformers; run `{TORCH}`, or --without transformers"
    return None


def engines_of(stage: str, without: Sequence[str]) -> list[str]:
    return [name for name in STAGES[stage] if name.split()[0] not in without]


# ---- files and processes


def run_stage(args: argparse.Namespace, stage: str, directory: Path) -> Iterator[str]:
    """The lines that the stage prints: how it ran, agreement, the table."""
    engines = engines_of(stage, args.without.split(","))
    models = {name: model_file(args, name, directory) for name in engines}
    workers: dict[str, Worker] = {}
    said = [f"### {stage}: {args.layers} layers of OLMoE, {args.threads} threads each", ""]
    with ExitStack() as stack:
        for name in engines:
            kind = MODULES[name.split()[0]]
            task = Task(
                str(models[name]),
                OLMOE["vocab_size"],
                context=args.context,
                prompt=args.prompt,
                threads=args.threads,
                resident=args.experts == "resident",
                precision=stage if name.startswith("moejax") and stage != "bf16" else None,
            )
            python = args.llama_python if kind == "llama_engine" else sys.executable
            worker = Worker(name, python, f"scripts.cpu.engines.{kind}", task)
            stack.callback(worker.close)
            workers[name] = worker
        for name, worker in workers.items():
            worker.loaded()
            said.append(f"- {name}: {json.dumps(worker.versions)}; `{worker.shown}`")
        said += ["", *agreement(workers, AGREEMENT[stage]), ""]
        plan = Plan(args.rounds, args.block, args.limit, args.prompt)
        rows = measure(
            plan, workers, progress=lambda what: print(what, file=sys.stderr, flush=True)
        )
    yield from map(json.dumps, rows) if args.json else [*said, *table(rows)]


def model_file(args: argparse.Namespace, name: str, directory: Path) -> Path:
    """What this engine reads, written where it is not there yet."""
    checkpoint = directory / f"olmoe-{args.layers}"
    if not (checkpoint / "model.safetensors.index.json").exists():  # written last
        write_checkpoint(checkpoint, OLMOE | {"num_hidden_layers": args.layers})
    if not name.startswith("llama.cpp"):
        return checkpoint
    whole = directory / f"olmoe-{args.layers}-BF16.gguf"
    write_gguf(args.llama_python, checkpoint, whole)
    kind, *rest = name.split()[1:]
    if kind == "BF16":
        return whole
    path = directory / f"olmoe-{args.layers}-{kind}-{rest[0]}.gguf"
    write_gguf(args.llama_python, whole, path, kind, *rest)
    return path
