"""Decode and prefill beside llama.cpp and transformers: the same checkpoint, the same tokens.

python -m scripts.bench peers [--llama-python PYTHON] [--keep DIR] [--stages bf16,int8,int4]

A random OLMoE (four layers of its true size, 3.8 GB in bfloat16) is written once and read by all:
by moejax and transformers as it is, by llama.cpp as a GGUF file of the same numbers, but for the
stages of one file. Each engine is
loaded in a process of its own; they compute in turn, never at once, with as many threads each. A
step is tokens in, logits of the whole vocabulary out, of forced tokens. First the log-probabilities
of the forced tokens must agree, else nothing is timed.

stages:
  bf16    moejax, llama.cpp, transformers
  int8    moejax's experts in int8 beside Q8_0: of experts alone ("experts"), and of attention,
          head and embeddings too, as llama.cpp's users have it ("all")
  int4    the same with int4 and Q4_0
  q8_0, q4_0, q4_k_s, q4_k_m, q6_k, mxfp4
          moejax and llama.cpp, both with the same GGUF file of that type
  hybrid  as bf16, of Qwen3.6-35B-A3B with a smaller vocabulary (two layers are 3.9 GB); every
          fourth layer, of fewer the last, has keys and values, the others have states

--job N measures, instead of steps, whole processes from start to end that load the model and answer
N prompts of 32 to 96 tokens with --answer greedy tokens each: moejax by `LLM.generate`, llama.cpp
by continuous batching, transformers by batches of one length after the other; 32 sequences at once.
`--job 1 --answer 1` is the time to the first token. --cold takes the files out of the page cache
before each process starts.

--memory 50%,25% gives each process so much of its file's bytes, by a control group (the page cache
of what it reads counts, so does the process itself): moejax with `--store file`, llama.cpp by mmap.
Only decode steps and jobs are measured.

--arithmetic int8 adds moejax with it, in front of the exact one, where weights are in codes.

--dense adds, in stages of one GGUF file, moejax with the same model in bfloat16, and to the table
of decode steps, which alone it measures, the bytes that each moejax reads a second (those of
`floor`), beside bfloat16's in the same round. With --experts-only the GGUF file has everything else
in bfloat16 too.

--quality adds, in stages of one GGUF file, how far each engine's distributions and logits are from
those of the same file dequantized to float32 (by moejax).

--model DIR takes a checkpoint in bfloat16 of OLMoE, Qwen3 or Qwen3.5 instead of the random one.
With --text FILE the tokens are those of a text, by its tokenizer.

`floor` is the time of reading the bytes of a step at the memory's measured rate: weights, states,
KV, and the experts that its tokens choose if all are equally likely.
A ratio is the median of the rounds' ratios, with its 95% interval. A block that takes over --limit
seconds is done in one round only.

transformers computes in float32 where the processor has no bfloat16 products (AVX-512): its own are
products one by one there.

needs, where a stage has the engine (--llama-python may be another environment's):
  pip install llama-cpp-python==0.3.36 gguf==0.19.0      # compiles for ten minutes
  pip install torch==2.13.0 transformers==5.17.0 accelerate
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from moejax.errors import UserError
from moejax.evaluate.experiments.records import median_interval
from moejax.requests.tokenizer import load_tokenizer
from scripts.bench.peer_engines import ARCHITECTURES, PROCESS, Task, log_softmax
from scripts.parts.big_checkpoint import write_checkpoint
from scripts.parts.cgroup import drop_pages, memory_group
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.places import REPOSITORY
from scripts.parts.text_table import aligned

STAGES = {
    "bf16": ("moejax", "llama.cpp BF16", "transformers"),
    "int8": ("moejax int8", "llama.cpp Q8_0 experts", "llama.cpp Q8_0 all"),
    "int4": ("moejax int4", "llama.cpp Q4_0 experts", "llama.cpp Q4_0 all"),
    "q8_0": ("moejax Q8_0 all", "llama.cpp Q8_0 all"),
    **{
        kind.lower(): (f"moejax {kind} all", f"llama.cpp {kind} all")
        for kind in ("Q4_0", "Q4_K_S", "Q4_K_M", "Q6_K", "MXFP4")
    },
    "hybrid": ("moejax", "llama.cpp BF16", "transformers"),
}
"""Engines, moejax first."""

AGREEMENT = {
    "bf16": 0.03,
    "hybrid": 0.15,
    **dict.fromkeys(("q8_0", "q4_0", "q4_k_s", "q4_k_m", "q6_k", "mxfp4"), 0.05),
    "int8": 0.1,
    "int4": 0.5,
}
"""Stage → largest median difference of two engines' log-probabilities. Those of the forced tokens
have a standard deviation of 0.9, of `hybrid` 1.9, so engines that compute something else differ by
that. Of `hybrid`, whose random router has 256 near experts, moejax in float32 is 1e-5 from
transformers, and bfloat16 of either engine 0.04 to 0.09."""

OLMOE: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "vocab_size": 50304,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "norm_topk_prob": False,
    "tie_word_embeddings": False,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "pad_token_id": 1,
}
"""config.json of allenai/OLMoE-1B-7B-0924."""

QWEN: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "dtype": "bfloat16",
    "attention_bias": False,
    "attn_output_gate": True,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e7,
        "rope_type": "default",
    },
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 65536,
}
"""config.json of the text model of Qwen3.6-35B-A3B, but for `vocab_size`, which is 248320."""

LLAMA = "pip install llama-cpp-python==0.3.36 gguf==0.19.0"
TORCH = "pip install torch==2.13.0 transformers==5.17.0 accelerate"

COLUMNS = (
    ("case", "{case}"),
    ("engine", "{engine}"),
    ("tok/s", "{tokens_per_s:.1f}"),
    ("ms", "{ms:.1f}"),
    ("floor", "{floor_ms:.1f}"),
    ("rounds", "{rounds}"),
    ("ours ÷ theirs, tok/s", "{ratio:.2f}"),
    ("from", "{low:.2f}"),
    ("to", "{high:.2f}"),
)
LIMITED = (*COLUMNS, ("read, MB a token", "{read_mb:.0f}"), ("peak, GB", "{peak_gb:.2f}"))
"""Columns where memory is limited."""
BESIDE_DENSE = (*COLUMNS, ("GB/s", "{gb_per_s:.2f}"), ("of dense", "{of_dense:.0%}"))
DENSE = "moejax"
"""The engine with the checkpoint's own bfloat16."""


@refusing(RuntimeError)
def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    stages = args.stages.split(",")
    if args.text and not args.model:
        raise UserError("--text needs --model, whose tokenizer it is read by")
    if not set(stages) <= STAGES.keys():
        raise UserError(f"stages are {', '.join(STAGES)}")
    positive(args, "layers", "rounds", "threads", "prompt", "context", "answer")
    shares = [share.removesuffix("%") for share in args.memory.split(",")]
    if not all(share.isdecimal() and 0 < int(share) <= 100 for share in shares):
        raise UserError(f"--memory is shares such as 50%,25%, not {args.memory}")
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
    choices, text = ("exact", "int8"), "of another moejax (default: there is none)"
    add("--arithmetic", default="exact", choices=choices, help=text)
    add("--dtype", default="auto", help="of moejax; llama.cpp's is float32 (%(default)s)")
    add("--quality", action="store_true", help="logits beside those of the file in float32")
    add("--dense", action="store_true", help="bytes a second beside those of bfloat16")
    add("--experts-only", action="store_true", help="GGUF files have only experts in codes")
    add("--model", metavar="DIR", help="a checkpoint in bfloat16 (default: a random one)")
    add("--text", metavar="FILE", help="gives the tokens (default: random ones)")
    add("--layers", type=int, default=4, help="of the model's 16 or 40 (default: %(default)s)")
    add("--batch", default="1,8", metavar="N,…", help="of decode steps (default: %(default)s)")
    add("--job", type=int, default=0, metavar="N", help="prompts, instead of steps")
    add("--answer", type=int, default=32, help="tokens of an answer (default: %(default)s)")
    add("--cold", action="store_true", help="a job's files are not in the page cache")
    add("--memory", default="100%", metavar="P%,…", help="limits of each process by its file")
    add("--context", type=int, default=128, help="tokens before a decode step (%(default)s)")
    add("--prompt", type=int, default=512, help="tokens of the prefill (default: %(default)s)")
    add("--rounds", type=int, default=7, help="of all engines in turn (default: %(default)s)")
    add("--block", type=float, default=1.0, help="seconds of decode steps a block (%(default)s)")
    add("--limit", type=float, default=12.0, help="of a block to be repeated (%(default)s)")
    add("--threads", type=int, default=2, help="of each engine (default: %(default)s)")
    add("--llama-python", default=sys.executable, help="interpreter that has llama-cpp-python")
    add("--keep", help="folder that keeps the files, 4 to 12 GB, for the next run")
    add("--json", action="store_true", help="one JSON object a row instead of the tables")
    return parser


def engines_of(
    stage: str,
    without: Sequence[str],
    arithmetic: str = "exact",
    *,
    dense: bool = False,
    experts_only: bool = False,
) -> list[str]:
    exact, *others = STAGES[stage]
    one_file = exact.endswith(" all")
    ours = [exact]
    if arithmetic != "exact" and exact != DENSE:
        ours = [f"{exact} --arithmetic {arithmetic}", exact]
    named = ours + [name for name in others if name.split()[0] not in without]
    if one_file and experts_only:
        named = [name.replace(" all", " experts") for name in named]
    return named + [DENSE] * (one_file and dense)


def missing_for(stages: Sequence[str], without: Sequence[str], llama_python: str) -> str | None:
    """What has to be installed first, in words."""
    engines = {name.split()[0] for stage in stages for name in engines_of(stage, without)}
    if "llama.cpp" in engines:
        imports = [llama_python, "-c", "import llama_cpp, gguf"]
        found = subprocess.run(imports, capture_output=True, text=True)
        if found.returncode:
            why = found.stderr.strip().splitlines()[-1]
            return f"{llama_python}: {why}; run `{LLAMA}`, or --without llama.cpp"
    packages = map(importlib.util.find_spec, ("torch", "transformers"))
    if "transformers" in engines and not all(packages):
        return f"no torch or transformers; run `{TORCH}`, or --without transformers"
    return None


def run_stage(args: argparse.Namespace, stage: str, directory: Path) -> Iterator[str]:
    """The lines that the stage prints: how it ran, agreement, the table."""
    tasks: dict[str, Task] = {}
    model, fields = model_of(stage, args.layers, args.model)
    layers = fields["num_hidden_layers"]
    said = [f"{stage}: {layers} layers of {model}, {args.threads} threads each"]
    named, text = directory / f"{model}-{layers}", ""
    if args.text:
        if (tokenizer := load_tokenizer(args.model)) is None:
            raise UserError(f"{args.model} has no tokenizer, which --text needs")
        text = f"{named}-text.npy"
        np.save(text, np.array(tokenizer.encode(Path(args.text).read_text()), np.int32))
    for name in engines_of(
        stage,
        args.without.split(","),
        args.arithmetic,
        dense=args.dense,
        experts_only=args.experts_only,
    ):
        base, _, arithmetic = name.partition(" --arithmetic ")
        tasks[name] = Task(
            str(model_file(args, base, named, fields)),
            fields["vocab_size"],
            batch=32 if args.job else max(map(int, args.batch.split(","))),
            context=args.context,
            prompt=args.prompt,
            threads=args.threads,
            precision=stage if base == f"moejax {stage}" else None,
            arithmetic=arithmetic or "exact",
            dtype="auto" if name == DENSE else args.dtype,
            job=args.job,
            answer=args.answer,
            text=text,
        )
    for share in (int(each.removesuffix("%")) for each in args.memory.split(",")):
        for name, task in tasks.items():
            nbytes = bytes_of(Path(task.model)) * share // 100 if share < 100 else 0
            tasks[name] = dataclasses.replace(task, memory=nbytes)
        if args.job:
            rows = measure_jobs(args, tasks)
        else:
            workers: dict[str, Worker] = {}
            with ExitStack() as stack:
                for name, task in tasks.items():
                    workers[name] = stack.enter_context(worker_of(args, name, task))
                for name, worker in workers.items():
                    said.append(f"{name}: {json.dumps(worker.answer()['versions'])}")
                same = dict(workers)
                if STAGES[stage][0] != DENSE:
                    same.pop(DENSE, None)  # has other weights
                said += agreement(same, AGREEMENT[stage], 4 if share < 100 else None)
                if args.quality and STAGES[stage][0].endswith("all"):
                    said += quality(same)
                rows = measure(args, workers)
        for row in rows:
            row["case"] += f", {share}%" * (share < 100)
        columns = COLUMNS if share == 100 else LIMITED
        if args.dense and share == 100 and not args.job:
            columns = BESIDE_DENSE
        if args.json:
            print(*said, sep="\n", file=sys.stderr)
            yield from map(json.dumps, rows)
        else:
            yield from [*said, *aligned(columns, rows)]
        said = []


def bytes_of(path: Path) -> int:
    """Of a file, or of the files of a folder."""
    return sum(each.stat().st_size for each in (path.iterdir() if path.is_dir() else (path,)))


@contextlib.contextmanager
def worker_of(args: argparse.Namespace, name: str, task: Task) -> Iterator[Worker]:
    """The engine's process, in a control group of its own where the task limits its memory."""
    python, group, peak = sys.executable, [], None
    if name.startswith("llama.cpp"):
        python = args.llama_python
    with ExitStack() as stack:
        if task.memory and name.startswith("moejax"):
            if task.memory <= PROCESS:
                raise UserError(
                    f"{task.memory:,} bytes are less than the {PROCESS:,} of moejax's process "
                    "without a model; give a larger share in --memory, or more --layers"
                )
            with contextlib.closing(Worker(name, python, task)) as compiles:  # which takes more
                compiles.answer()
                if args.job:
                    compiles.ask("job", most=2)
        if task.memory or args.cold:
            drop_pages(Path(task.model))
        if task.memory:
            group, peak = stack.enter_context(memory_group(name.replace(" ", "-"), task.memory))
        yield stack.enter_context(contextlib.closing(Worker(name, python, task, group, peak)))


def model_of(stage: str, layers: int, directory: str | None = None) -> tuple[str, dict[str, Any]]:
    """The name of the stage's model, and its config.json with so many layers; or of the checkpoint
    in a directory."""
    if directory is not None:
        fields = json.loads(Path(directory, "config.json").read_text())
        if fields["model_type"] not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UserError(f"{directory} is a {fields['model_type']}; --model takes {known}")
        return Path(directory).resolve().name, fields
    if stage != "hybrid":
        return "olmoe", OLMOE | {"num_hidden_layers": layers}
    every = min(layers, 4)
    kinds = ["linear_attention" if i % every else "full_attention" for i in range(1, layers + 1)]
    own = {"layer_types": kinds, "full_attention_interval": every}
    return "qwen36", QWEN | {"num_hidden_layers": layers} | own


def model_file(
    args: argparse.Namespace, name: str, checkpoint: Path, fields: Mapping[str, Any]
) -> Path:
    """What this engine reads, written where it is not there yet.

    - `checkpoint`: its folder, and how the names of other files begin.
    - `fields`: of config.json.
    """
    source = checkpoint if args.model is None else Path(args.model)
    if args.model is None:
        write_checkpoint(checkpoint, fields)
    if not name.startswith("llama.cpp") and name.split()[-1] not in ("all", "experts"):
        return source
    whole = checkpoint.with_name(f"{checkpoint.name}-BF16.gguf")
    write_gguf(args.llama_python, source, whole)
    kind, *rest = name.split()[1:]
    if kind == "BF16":
        return whole
    path = checkpoint.with_name(f"{checkpoint.name}-{kind}-{rest[0]}.gguf")
    write_gguf(args.llama_python, whole, path, kind, *rest)
    return path


def write_gguf(python: str, source: Path, path: Path, *options: str) -> None:
    """Has an interpreter with llama.cpp's packages write a GGUF file, unless it is there.
    options: as of peer_engines. Raises RuntimeError."""
    if path.exists():
        return
    part = path.with_suffix(".part")
    command = [python, "-m", "scripts.bench.peer_engines", "gguf", str(source), str(part), *options]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{path.name} cannot be written: {ran.stderr.strip()[-2000:]}")
    part.rename(path)


class Worker:
    """An engine's process. One that dies is a RuntimeError with the end of what it said."""

    def __init__(
        self,
        name: str,
        python: str,
        task: Task,
        group: Sequence[str] = (),
        peak: Path | None = None,
    ):
        self.name, self.task, self._peak = name, task, peak
        self.began = time.perf_counter()
        said, path = tempfile.mkstemp()
        self._said = Path(path)
        command = [*group, python, "-m", "scripts.bench.peer_engines", name.split()[0]]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            [*command, json.dumps(dataclasses.asdict(task))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env=environment | {"OMP_NUM_THREADS": str(task.threads)},
            text=True,
        )
        os.close(said)

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """As of `peer_engines.answered`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() tells what the worker said
            print(json.dumps({"what": what, **fields}), file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Its next answer; the first one has the engine's versions."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        status = self._process.wait()
        last = self._said.read_text().strip()[-2000:]
        raise RuntimeError(f"{self.name} ended with status {status}: {last}")

    def read_bytes(self) -> int:
        """What it has read from disks so far."""
        counts = Path(f"/proc/{self._process.pid}/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in counts if line.startswith("read_bytes"))

    @property
    def peak(self) -> int:
        """The most memory that it took; 0: it has no group that says it."""
        return 0 if self._peak is None else int(self._peak.read_text())

    def close(self) -> None:
        """Ends the process and gives its memory back."""
        self._process.kill()
        self._process.communicate()  # closes the pipes too
        self._said.unlink()


def agreement(workers: Mapping[str, Worker], most: float, steps: int | None = None) -> list[str]:
    """How far the engines' log-probabilities of the forced tokens are from the first one's, in
    words. Raises RuntimeError where the median difference of an engine is over `most`.

    - `steps`: how many are compared; None: all.
    """
    first, *others = workers
    found = {}
    for name, worker in workers.items():
        batch = 1 if name.startswith("transformers") else worker.task.batch
        asked = {} if steps is None else {"steps": steps}
        found[name] = np.array(worker.ask("check", batch=batch, **asked)["scores"])
    lines = []
    for name in others:
        theirs = found[name]
        apart = np.abs(found[first][:, : theirs.shape[1]] - theirs)
        lines.append(
            f"log-probabilities of {theirs.size} forced tokens (standard deviation "
            f"{theirs.std():.2f}), {first} and {name}: median difference {np.median(apart):.4f}, "
            f"99% within {np.percentile(apart, 99):.3f}"
        )
        if not np.median(apart) <= most:
            raise RuntimeError(f"the engines do not compute the same (over {most}): {lines[-1]}")
    return lines


def quality(workers: Mapping[str, Worker]) -> list[str]:
    """How far the engines' logits are from those of the first one's file in float32, in words."""
    task = next(iter(workers.values())).task
    exact = Worker(
        "moejax", sys.executable, dataclasses.replace(task, arithmetic="exact", dtype="float32")
    )
    with contextlib.closing(exact), tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "logits.npy")

        def logits(worker: Worker) -> np.ndarray:
            worker.ask("check", batch=task.batch, logits=str(path))
            return np.load(path)

        exact.answer()
        wanted = logits(exact)
        return [
            f"{name} beside the file in float32: {deviation(wanted, logits(worker))}"
            for name, worker in workers.items()
        ]


def deviation(wanted: np.ndarray, found: np.ndarray) -> str:
    """How far logits [..., V] are from others, in words."""
    first, second = map(log_softmax, (wanted, found))
    divergence = np.sum(np.exp(first) * (first - second), axis=-1)
    same = np.mean(wanted.argmax(-1) == found.argmax(-1))
    return (
        f"KL divergence {divergence.mean():.2e} (largest {divergence.max():.2e}), largest logit "
        f"error {np.abs(found - wanted).max():.3f} of a standard deviation of {wanted.std():.2f}, "
        f"{same:.1%} have the same likeliest token"
    )


def measure(args: argparse.Namespace, workers: Mapping[str, Worker]) -> list[dict[str, Any]]:
    """A row of the table for each case and engine."""
    rows: list[dict[str, Any]] = []
    limited = any(worker.task.memory for worker in workers.values())
    cases = [f"decode {batch}" for batch in args.batch.split(",")]
    for case in cases if args.dense else [*cases, "prefill"]:
        what, _, batch = case.partition(" ")
        if limited and not batch:
            continue
        question = {"batch": int(batch), "seconds": args.block} if batch else {}
        found: dict[str, list[float]] = {name: [] for name in workers}
        steps, before = dict.fromkeys(workers, 0), {}
        slow: set[str] = set()
        for i in range(args.rounds + 1):  # the first one warms up
            for name, worker in workers.items():
                if name in slow:
                    continue
                if i == 1 and limited:
                    before[name] = steps[name], worker.read_bytes()
                # Whoever is slow would meet the first tokens again and again, and their experts.
                seconds = worker.ask(what, **question, first=steps[name])["seconds"]
                steps[name] += len(seconds)  # the first one, untimed, is timed again
                if sum(seconds) > args.limit and not limited:
                    slow.add(name)
                elif i == 0:
                    continue
                found[name].append(float(np.median(seconds)))
        print(f"{case} is done", file=sys.stderr, flush=True)
        tokens = int(batch or args.prompt)
        ours = next(iter(workers.values()))
        floor, nbytes = None, {}
        if not limited:  # whose memory holds no arrays to measure it with
            asked = {"batch": int(batch or 1), "tokens": tokens}
            floor = ours.ask("floor", **asked)["seconds"]
            for name, worker in workers.items() if args.dense else ():
                if name.startswith("moejax"):
                    nbytes[name] = worker.ask("floor", **asked)["bytes"]
        rows += case_rows(case, tokens, found, floor, nbytes)
        for row in rows[-len(workers) :] if limited else ():
            worker, (done, read) = workers[row["engine"]], before[row["engine"]]
            count = (steps[worker.name] - done) * int(batch)
            row["read_mb"] = (worker.read_bytes() - read) / count / 1e6
            row["peak_gb"] = worker.peak / 1e9
    return rows


def measure_jobs(args: argparse.Namespace, tasks: Mapping[str, Task]) -> list[dict[str, Any]]:
    """A row of the table for each engine: seconds from its process's start to its last answer."""
    found: dict[str, list[float]] = {name: [] for name in tasks}
    peaks: dict[str, float] = {}
    for i in range(args.rounds + 1):  # the first one warms up, with a few prompts
        for name, task in tasks.items():
            with worker_of(args, name, task) as worker:
                worker.answer()
                tokens = worker.ask("job", most=args.job if i else 2)["tokens"]
                seconds = time.perf_counter() - worker.began
                peaks[name] = worker.peak / 1e9
            if i:
                found[name].append(seconds)
    rows = case_rows(f"job of {args.job}", tokens, found, None)
    return [row | {"peak_gb": peaks[row["engine"]]} for row in rows]


def case_rows(
    case: str,
    tokens: int,
    found: Mapping[str, Sequence[float]],
    floor: float | None,
    read: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """A row for each engine. tokens: of a step. found: seconds of a step, by round. floor: seconds
    of reading what a step needs, None if nobody counts that. read: bytes of a step, of engines that
    have a rate beside that of DENSE. ratio: tokens a second of the first engine over those of this
    one."""
    ours, rows = next(iter(found.values())), []
    for name, theirs in found.items():
        median = float(np.median(theirs))
        ratio = low = high = None
        if len(theirs) != len(ours):
            ratio = median / float(np.median(ours))
        elif theirs is not ours:
            ratios = np.divide(theirs, ours).tolist()
            ratio = float(np.median(ratios))
            if len(ratios) > 5:
                low, high = median_interval(ratios)
        rate = share = None
        if read and name in read:
            rate = read[name] / median
            if DENSE in read and len(theirs) == len(found[DENSE]):
                each = np.divide(found[DENSE], theirs) * read[name] / read[DENSE]
                share = float(np.median(each))
        rows.append(
            {
                "case": case,
                "engine": name,
                "ms": 1e3 * median,
                "floor_ms": None if floor is None else 1e3 * floor,
                "tokens_per_s": tokens / median,
                "rounds": len(theirs),
                "ratio": ratio,
                "low": low,
                "high": high,
                "gb_per_s": None if rate is None else rate / 1e9,
                "of_dense": share,
                "read_mb": None,
                "peak_gb": None,
            }
        )
    return rows
