"""Everything that waits for a GPU, in order of value: one command for a loan.

python -m scripts.check gpu_day --out DIR [--minutes 40] [--only NAME,…] [--again NAME,…]
python -m scripts.check gpu_day --out DIR --rehearse

Each step is an existing command in a process of its own, ended with all that it started after its
minutes (below ten). Run it again with the same --out for what is left: steps that ended are not run
again, but those named by --again. A step that does not fit into the minutes is left, a shorter one
after it may run. After every step DIR/results.json has commands, statuses and times, DIR/page.md
what the steps printed, DIR/logs all of it; on another machine, go on with a copy of DIR
and --again load, whose checkpoint is in the folder of temporary files.
--rehearse runs small sizes on the CPU, and no figure of it is a GPU's.

Exit status 0 where every step is done, 1 where one is not, 2 for a mistake or without a GPU.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moejax import UserError
from moejax.cache import write_whole
from scripts.parts.commands import new_parser, refusing
from scripts.parts.places import REPOSITORY

SCRATCH = Path(tempfile.gettempdir()) / "moejax-gpu-day"
"""What is too large to take home: the checkpoint of `load`, compiled programs."""

TAIL = 60
"""Lines of output that the page has of a step: a whole table, or the end of what went wrong."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A command and what it answers. {out} in arguments is the folder of results, {scratch} is
    SCRATCH."""

    name: str
    answers: str
    command: tuple[str, ...]
    """Arguments of Python."""
    small: tuple[str, ...] | None
    """Arguments behind them that make it small enough for a CPU; None: it needs a GPU."""
    minutes: float = 8.5
    """The step is ended after so long."""
    expected: float = 4.0
    """The step is not begun with less time left."""


def _moejax(*arguments: str) -> tuple[str, ...]:
    return ("-m", "moejax", *arguments)


def _bench(*arguments: str) -> tuple[str, ...]:
    return ("-m", "scripts.bench", *arguments)


def _grid(name: str, *arguments: str) -> tuple[str, ...]:
    output = ("--output", "{out}/" + name.removesuffix(".yaml").replace("/", "-"), "--quiet")
    return _moejax("ablate", f"scripts/experiments/{name}", *output, *arguments)


def _pytest(*arguments: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)


def _set(*changes: str) -> tuple[str, ...]:
    return tuple(word for change in changes for word in ("--set", change))


QWEN = ("--shape", "qwen3-30b-a3b")
DEMO = ("--shape", "demo", "--layers", "1")
SMALL_GRID = _set("batch=1", "prompt_tokens=8", "output_tokens=5", "repeats=1")
LOADED = "{scratch}/qwen3-30b-a3b-3"
"""Where step `load` writes a checkpoint."""

STEPS: tuple[Step, ...] = (
    Step(
        "doctor",
        "GPU, driver, jax, memory, link rate, and what is wrong",
        _moejax("doctor"),
        (),
        minutes=4,
        expected=0.5,
    ),
    Step(
        "checks",
        "every kernel of Qwen3-30B-A3B against its reference; what is cut goes on where it was",
        _moejax(
            *("check-gpu", "--kernels", "--shapes", "qwen3-30b-a3b", "--dtypes", "bfloat16"),
            *("--tables", "{out}/cache/moejax/verified", "--minutes", "7.5"),
        ),
        None,
        expected=1,
    ),
    Step(
        "engine",
        "contract 1 at the size of Qwen3-30B-A3B: four expert budgets, equal bits",
        _moejax("check-gpu", "--engine", "--steps", "50"),
        None,
    ),
    Step(
        "decode",
        "decode steps beside their floors",
        _bench(
            *("decode", *QWEN, "--cells", "all,16,8,4,0", "--batch", "1,8", "--context", "1024")
        ),
        (*DEMO, "--cells", "all,0", "--batch", "1", "--context", "128", "--steps", "5"),
    ),
    Step(
        "profile",
        "where the time of decode steps goes, CUDA graphs on",
        _bench("decode", *QWEN, "--cells", "all,16", "--context", "1024", "--profile"),
        None,
    ),
    Step(
        "prefill",
        "prefill steps beside their floors",
        _bench("prefill", *QWEN, "--tokens", "4096,16384", "--cells", "all,16,0"),
        (*DEMO, "--tokens", "128", "--cells", "all,0", "--repeats", "2"),
    ),
    Step(
        "bits",
        "contract 1's tests on the device",
        _pytest("tests/moejax/engine", "-k", "same_bits"),
        ("--collect-only",),
    ),
    Step(
        "load",
        "how fast a checkpoint of Qwen3's layers reaches the device",
        _bench("load", "{scratch}", *QWEN, "--size", "5GiB"),
        ("--shape", "demo", "--size", "2MiB", "--repeats", "1"),
    ),
    Step(
        "calibrate",
        "costs of steps and moves, as policies and predictions take them",
        _moejax("calibrate", LOADED, "--max-num-seqs", "32", "--quiet"),
        None,
    ),
    Step(
        "predictions",
        "whether the cost model predicts the device's times, and orders policies as it does",
        _grid(
            "speed/predictions.yaml",
            *_set(f"model={LOADED}", "batch=[1, 8]", "options={tokenizer: moejax/demo}"),
        ),
        None,
    ),
    Step(
        "policies",
        "what each policy adds to a step, tokens equal",
        _grid("times.yaml", *_set("batch=[1, 8]")),
        (*SMALL_GRID, *_set("policies=[lru]")),
    ),
    Step(
        "precision",
        "versions at equal bytes: times to the first token and per token",
        _grid("precision/times.yaml", *_set("batch=[1, 8]")),
        (*SMALL_GRID, *_set("precision=[int4, dynaexq]", "prompts=1")),
    ),
    Step(
        "kernels",
        "the kernels' own tests, compiled for the device",
        _pytest("tests/pallas_kernels"),
        ("--collect-only",),
    ),
)


@refusing(OSError)
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    add, names = parser.add_argument, ", ".join(step.name for step in STEPS)
    add("--out", type=Path, required=True, metavar="DIR", help="of results, those before included")
    add("--minutes", type=float, default=40, help="of this call (default: %(default)g)")
    add("--only", metavar="NAME,…", help=f"of {names}")
    add("--again", metavar="NAME,…", help="runs these anew")
    add("--rehearse", action="store_true", help="small sizes on the CPU")
    args = parser.parse_args(arguments)
    only, again = _named(args.only), _named(args.again)
    if not args.rehearse and not _has_gpu():
        raise UserError("jax has no GPU here; `moejax doctor` says why")
    steps = [step for step in STEPS if not args.rehearse or step.small is not None]
    steps = [step for step in steps if not only or step.name in only]
    out = args.out.resolve()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    results = _results(out, args.rehearse)
    until = time.monotonic() + 60 * args.minutes
    for step in steps:
        ended = results["steps"].get(step.name, {}).get("status") not in (None, "cut")
        room = until - time.monotonic()
        if (ended and step.name not in again) or room < 60 * step.expected:
            continue
        print(f"{step.name}: {step.answers}", flush=True)
        found = _run(step, args.rehearse, out, room)
        print(f"{step.name}: {found['status']}, {found['seconds']:.0f} s", flush=True)
        results["steps"][step.name] = found
        write_whole(out / "results.json", json.dumps(results, indent=1) + "\n")
        write_whole(out / "page.md", "\n".join(_page(results, out)) + "\n")
    done = [results["steps"].get(step.name, {}).get("status") == "done" for step in steps]
    print(f"{out / 'page.md'}: {sum(done)} of {len(done)} done")
    return 0 if all(done) else 1


def _named(text: str | None) -> set[str]:
    """Steps by name. Raises UserError for one that does not exist."""
    names, known = set(text.split(",")) if text else set(), [step.name for step in STEPS]
    if unknown := names - set(known):
        raise UserError(f"there is no step {min(unknown)!r}; there are {', '.join(known)}")
    return names


def _has_gpu() -> bool:
    """Asked in a process of its own, so that this one holds none of the GPU's memory."""
    look = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    return subprocess.run(look, capture_output=True, text=True).stdout.strip() == "gpu"


def _results(out: Path, rehearse: bool) -> dict[str, Any]:
    """The results in the folder so far. Raises UserError for those of another kind."""
    file = out / "results.json"
    if not file.exists():
        return {"rehearsed": rehearse, "steps": {}}
    results = json.loads(file.read_text())
    if results["rehearsed"] != rehearse:
        kind = "a rehearsal" if results["rehearsed"] else "a day with a GPU"
        raise UserError(f"{file} is of {kind}; name another --out")
    return results


def _run(step: Step, rehearse: bool, out: Path, room: float) -> dict[str, Any]:
    """Runs a step to its end or to that of its time. room: seconds that are left."""
    words = [*step.command, *((step.small or ()) if rehearse else ())]
    words = [w.replace("{out}", str(out)).replace("{scratch}", str(SCRATCH)) for w in words]
    limit, began = min(60 * step.minutes, room), time.monotonic()
    with (
        open(out / "logs" / f"{step.name}.out", "w") as stdout,
        open(out / "logs" / f"{step.name}.err", "w") as stderr,
    ):
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=REPOSITORY,
            env=os.environ
            | {
                "JAX_PLATFORMS": "cpu" if rehearse else "cuda,cpu",
                "JAX_COMPILATION_CACHE_DIR": str(SCRATCH / "xla"),
                # Tables of checks and costs are kept, compiled programs need not be.
                "XDG_CACHE_HOME": str(out / "cache"),
                "PYTHONUNBUFFERED": "1",
            },
            stdout=stdout,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = "failed" if process.wait(limit) else "done"
        except subprocess.TimeoutExpired:
            status = "cut" if limit < 60 * step.minutes else "timed out"
        finally:
            if process.returncode is None:
                # With what it started itself: the next step needs the GPU's memory.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return {
        "status": status,
        "seconds": time.monotonic() - began,
        "ended": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *words]),
    }


def _page(results: Mapping[str, Any], out: Path) -> Iterator[str]:
    """Markdown: a table of the steps, and what each printed."""
    found = results["steps"]
    yield "# A day with a GPU" + (": rehearsed on a CPU" if results["rehearsed"] else "")
    yield "\n| step | answers | status | seconds |\n|---|---|---|---|"
    for step in STEPS:
        one = found.get(step.name, {"status": "left", "seconds": 0.0})
        yield f"| {step.name} | {step.answers} | {one['status']} | {one['seconds']:.0f} |"
    for step in STEPS:
        if step.name not in found:
            continue
        yield f"\n## {step.name}: {found[step.name]['status']}\n\n`{found[step.name]['command']}`\n"
        stdout, stderr = (
            (out / "logs" / f"{step.name}.{kind}").read_text(errors="replace").splitlines()[-TAIL:]
            for kind in ("out", "err")
        )
        # What a good step says of its progress is in the logs.
        shown = stdout if stdout and found[step.name]["status"] == "done" else [*stdout, *stderr]
        yield from ("```text", *(line[:300] for line in shown), "```")
