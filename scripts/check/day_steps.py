"""What a day with a GPU answers: existing commands, in order of value."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

QWEN = ("--shape", "qwen3-30b-a3b")
DEMO = ("--shape", "demo", "--layers", "1")
_DECODE = ("decode", "--json", "--cells")
_TIMES = ("ablate", "scripts/experiments/times.yaml", "--output", "{out}/times", "--quiet")
_PREDICTIONS = (
    *("ablate", "scripts/experiments/speed/predictions.yaml"),
    *("--output", "{out}/predictions", "--quiet"),
)
_VERSIONS = (
    *("ablate", "scripts/experiments/precision/times.yaml"),
    *("--output", "{out}/precision", "--quiet"),
)
_INTERPRETED = (
    "import sys; from pallas_kernels.triton import interpreted; "
    "from moejax.commands.main import main; sys.exit(interpreted()(main)(sys.argv[1:]))"
)
"""moejax with kernels in Pallas's interpreter, as a machine without a GPU runs them."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A command and what it answers. {out} and {scratch} in arguments are folders: what is kept,
    and what is too large to take home."""

    name: str
    answers: str
    command: tuple[str, ...]
    """Arguments of Python, on a GPU."""
    rehearsed: tuple[str, ...]
    """The same command at sizes for a CPU that takes seconds; what has none such only says its
    options or collects its tests."""
    minutes: float = 8.5
    """After which it is ended: a loan's command has ten."""
    expected: float = 4.0
    """Minutes without which it is not begun: a guess until a GPU says it."""
    columns: tuple[str, ...] = ()
    """Fields of its JSON lines that the page shows; none: the end of its output."""
    after: str = ""
    """The step whose files it reads; it begins when that has ended."""
    platforms: str = "cuda,cpu"
    """JAX_PLATFORMS on a GPU, so that none falls back to the CPU; "": as it is."""

    def arguments(self, rehearse: bool, out: Path, scratch: Path) -> list[str]:
        """The whole command."""
        chosen = self.rehearsed if rehearse else self.command
        places = {"{out}": str(out), "{scratch}": str(scratch)}

        def placed(argument: str) -> str:
            for name, folder in places.items():
                argument = argument.replace(name, folder)
            return argument

        return [sys.executable, *map(placed, chosen)]


def _moejax(*arguments: str) -> tuple[str, ...]:
    return ("-m", "moejax", *arguments)


def _script(group: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"scripts.{group}", *arguments)


def _pytest(*arguments: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)


_TABLES = ("--tables", "{out}/cache/moejax/verified")
"""Where a start looks for what was checked."""

_DECODE_COLUMNS = (
    *("batch", "cells_per_layer", "ms_per_step", "ms_per_step_p99", "floor_ms"),
    *("misses_per_step", "link_gb_per_s", "host_ms"),
)

_BITS = (
    "tests/moejax/engine/test_same_bits.py",
    "tests/moejax/engine/test_device_queue.py",
    "tests/moejax/engine/test_stream_queued.py",
)

STEPS: tuple[Step, ...] = (
    Step(
        "doctor",
        "GPU, driver, jax, memory, link rate, and what is wrong",
        _moejax("doctor", "--json"),
        _moejax("doctor", "--json"),
        minutes=4,
        expected=0.5,
        platforms="",
    ),
    Step(
        "checks",
        "every kernel of Qwen3-30B-A3B against its reference; the first 33 are a dense start's",
        _moejax(
            *("check-gpu", "--kernels", "--shapes", "qwen3-30b-a3b", "--dtypes", "bfloat16"),
            *(*_TABLES, "--minutes", "7.5"),
        ),
        (
            *("-c", _INTERPRETED, "check-gpu", "--kernels", "--shapes", "demo"),
            *("--dtypes", "bfloat16", *_TABLES, "--minutes", "0.05"),
        ),
        expected=1,  # what is cut goes on where it was
    ),
    Step(
        "engine",
        "contract 1 at the size of Qwen3-30B-A3B: four expert budgets, equal bits",
        _moejax("check-gpu", "--engine", "--steps", "50"),
        (
            *("-c", _INTERPRETED, "check-gpu", "--engine", "--engine-shape", "demo"),
            *("--layers", "1", "--steps", "2"),
        ),
    ),
    Step(
        "decode",
        "decode steps beside their floors, and where their time goes, CUDA graphs on",
        _script(
            *("bench", *_DECODE, "all,16,8,4,0", *QWEN, "--batch", "1,8", "--context", "1024"),
            "--profile",
        ),
        _script("bench", *_DECODE, "all,4,0", *DEMO, "--batch", "1", "--steps", "10"),
        columns=_DECODE_COLUMNS,
    ),
    Step(
        "prefill",
        "prefill steps beside their floors",
        _script(
            "bench", "prefill", "--json", *QWEN, "--tokens", "4096,16384", "--cells", "all,16,0"
        ),
        _script(
            *("bench", "prefill", "--json", *DEMO, "--tokens", "128", "--cells", "all,0"),
            *("--repeats", "2"),
        ),
        columns=("tokens", "cells_per_layer", "ms", "floor_ms", "times_floor", "tokens_per_s"),
    ),
    Step(
        "transfers",
        "whether jax's copies run beside kernels, and what the host driver's queue hides of them",
        _script("transfers", "device", "--json"),
        _script(
            *("transfers", "device", "--json", "--rounds", "1", "--experts", "24"),
            *("--steps", "2"),
        ),
        columns=("arm", "median", "q1", "q3"),
    ),
    Step(
        "beside",
        "what a CPU that computes missed experts beside the GPU adds; a recorded placement repeats",
        _script("policies", "beside", "--json"),
        _script(
            *("policies", "beside", "--json", "--shape", "demo", "--layers", "1"),
            *("--batch", "1", "--tokens", "4", "--expert-budget", "40%"),
            *("--ops", "move=xla"),
        ),
        columns=(
            *("arm", "batch", "tokens_per_s", "beside", "together", "gap_ms"),
            *("per_token", "startup", "load", "same", "experts_beside"),
        ),
    ),
    Step(
        "stream",
        "what streaming whole layers hides of their copies, batch 64 of Qwen3-30B-A3B's layers",
        _script("transfers", "stream_device", "--packed", "50%", "--json"),
        _script(
            *("transfers", "stream_device", "--json", "--shape", "demo", "--layers", "3"),
            *("--batch", "2", "--context", "16", "--rounds", "1", "--steps", "1"),
            *("--packed", "50%"),
        ),
        columns=("arm", "median", "q1", "q3"),
    ),
    Step(
        "bits",
        "contract 1's tests on the device, with experts brought by ops, by a queue, and streamed",
        _pytest(*_BITS),
        _pytest(*_BITS, "--collect-only"),
    ),
    Step(
        "load",
        "how fast a checkpoint of Qwen3's layers reaches the device",
        _script("bench", "load", "{scratch}", *QWEN, "--size", "5GiB", "--json"),
        _script(
            *("bench", "load", "{scratch}", "--shape", "demo", "--size", "2MiB"),
            *("--repeats", "1", "--json"),
        ),
        columns=("name", "seconds", "gb_per_s", "compared"),
    ),
    Step(
        "calibrate",
        "costs of steps and moves, as policies and predictions take them",
        _moejax("calibrate", "{scratch}/qwen3-30b-a3b-3", "--max-num-seqs", "32", "--quiet"),
        _moejax(
            *("calibrate", "{scratch}/demo-1", "--max-num-seqs", "1", "--max-model-len", "64"),
            *("--max-num-batched-tokens", "512", "--no-enable-prefix-caching", "--quiet"),
        ),
        after="load",
    ),
    Step(
        "predictions",
        "whether the cost model predicts the device's times, and orders policies as it does",
        _moejax(
            *(*_PREDICTIONS, "--set", "model={scratch}/qwen3-30b-a3b-3", "--set", "batch=[1, 8]"),
            *("--set", "options={tokenizer: moejax/demo}"),
        ),
        _moejax(
            *(*_PREDICTIONS, "--set", "model={scratch}/demo-1", "--set", "batch=1"),
            *("--set", "options={tokenizer: moejax/demo, max_num_batched_tokens: 512}"),
            *("--set", "policies=[lru]", "--set", "budgets=['25%']", "--set", "repeats=1"),
            *("--set", "prompt_tokens=8", "--set", "output_tokens=5"),
        ),
        after="calibrate",  # whose costs are a rehearsal's
    ),
    Step(
        "policies",
        "what each policy adds to a step, tokens equal",
        _moejax(*_TIMES, "--set", "batch=[1, 8]"),
        _moejax(
            *(*_TIMES, "--set", "policies=[lru]", "--set", "batch=1", "--set", "prompt_tokens=8"),
            *("--set", "output_tokens=5", "--set", "repeats=1"),
        ),
    ),
    Step(
        "precision",
        "versions at equal bytes: times to the first token and per token",
        _moejax(*_VERSIONS, "--set", "batch=[1, 8]"),
        _moejax(
            *(*_VERSIONS, "--set", "precision=[int4, dynaexq]", "--set", "batch=1"),
            *("--set", "prompts=1", "--set", "prompt_tokens=8", "--set", "output_tokens=5"),
            *("--set", "repeats=1"),
        ),
    ),
    Step(
        "resizes",
        "what moving the line between experts and KV adds to a step",
        _script("budgets", "steps", *QWEN, "--layers", "8"),
        _script(
            *("budgets", "steps", *DEMO, "--resizes", "1", "--batch", "1"),
            *("--length", "128"),
        ),
    ),
    Step(
        "table2",
        "WiSP's Table 2: cells a layer against whole layers",
        _script("budgets", "table2"),
        _script(
            *("budgets", "table2", *DEMO, "--vocab", "4096", "--cells", "8"),
            *("--steps", "2", "--warmup", "1", "--repeats", "1"),
        ),
    ),
    Step(
        "kernels",
        "the kernels' own tests, compiled for the device",
        _pytest("tests/pallas_kernels"),
        _pytest("tests/pallas_kernels/test_dispatch.py"),
    ),
)
