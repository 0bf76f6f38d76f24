"""Commands of moejax in processes of their own: killed and resumed with other options, in places
that are full, slow or closed to them, and with hostile files."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from moejax import LLM, SamplingParams
from scripts.attacks.files import DEMO, SINGLE, damage_file, mutated_json
from scripts.attacks.scene import LIMIT_S, Scene, limit_s
from scripts.attacks.trees import map_text, whole
from scripts.attacks.values import pick
from scripts.parts import file_jobs
from scripts.parts.cgroup import in_cgroup

PATIENCE_S, HUNG_S = 180.0, 360.0
"""A command that takes longer hangs; one whose worker hangs, which it may wait for, as well."""
SAY_S = 5.0
"""Seconds between two messages that a command still runs."""
ROOT = Path(__file__).parents[2]
MARK = "MOEJAX_ATTACK"
"""Environment variable of commands, by which the processes that they start are found."""


@dataclasses.dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str


def run(
    scene: Scene,
    what: str,
    command: Sequence[str],
    meanwhile: Callable[[subprocess.Popen], bool] = lambda process: False,
    environment: Mapping[str, str | None] = {},
    patience_s: float = PATIENCE_S,
) -> Done:
    """Runs a command to its end. A crash, an exception's traceback, a long message and a command
    that does not end are faults.

    - `meanwhile`: called again and again; whether it kills the process now.
    - `patience_s`: on a machine without other programs.
    """
    patience_s *= limit_s() / LIMIT_S
    out, err = scene.directory / "stdout", scene.directory / "stderr"
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    given = {**os.environ, "PYTHONPATH": str(ROOT), MARK: mark, **environment}
    given = {name: value for name, value in given.items() if value is not None}
    begin, said, killed = time.monotonic(), 0.0, False
    with out.open("wb") as stdout, err.open("wb") as stderr:
        bound, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))  # the bound is the campaign's own
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=given
        )
        resource.setrlimit(resource.RLIMIT_DATA, (bound, most))
        while process.poll() is None:
            if time.monotonic() - said > SAY_S:
                scene.began(what)
                said = time.monotonic()
            if killed := meanwhile(process):
                break
            if said - begin > patience_s:
                scene.fault("hung", f"{what}: {' '.join(command)}: {err.read_text()[-1000:]}")
                break
            time.sleep(0.002)
        process.kill()
        process.wait()
        end_marked(mark)
    done = Done(process.returncode, _tail(out), _tail(err))
    if done.status < 0 and not killed and not scene.faults:
        scene.fault("died", f"{what}: signal {-done.status}: {done.err[-1500:]}")
    if "Traceback" in done.err:
        scene.fault("raised", f"{what}: {done.err[-1500:]}")
    elif not killed:
        scene.check_message(what, done.err)
    return done


def _tail(path: Path) -> str:
    return path.read_bytes()[-1_000_000:].decode(errors="replace")


def end_marked(mark: str) -> None:
    """Ends what a command has started and left behind, such as a Ray."""
    text = f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text in (path / "environ").read_bytes().split(b"\0"):
                os.kill(int(path.name), signal.SIGKILL)


# ---- jobs that are killed and resumed with other options


@cache
def other_model(directory: Path) -> Path:
    """The demo, of which one weight is different."""
    path = directory / "other-model"
    shutil.copytree(DEMO, path)
    tensors = load_file(path / SINGLE)
    name = next(name for name in tensors if name.endswith("norm.weight"))
    tensors[name] = tensors[name] * 2
    save_file(tensors, path / SINGLE)
    return path


@cache
def same_model(directory: Path) -> Path:
    """The demo at another place."""
    return Path(shutil.copytree(DEMO, directory / "same-model"))


OPTIONS: dict[str, tuple[str, ...]] = {
    "dtype": ("float32", "bfloat16"),
    "generation_config": ("none",),
    "max_model_len": ("240",),
    "memory": ("24MiB",),
    "expert_budget": ("25%", "0", "60%"),
    "kv_budget": ("2MiB",),
    "store": ("shared", "file"),
    "swap_space": ("1MiB",),
    "kv_overflow": ("recompute",),
    "enable_prefix_caching": ("false",),
    "eviction": ("lfu", "fifo", "global-lru"),
    "policy": ("auto",),
    "prefetch": ("random",),
    "placement": ("fiddler,per_token=1ms,startup=1ms,load=1ms",),
    "cache_aware_routing": ("0.1",),
    "precision": ("int8", "int4", "int2", "lossless12", "random", "hobbit", "dynaexq"),
    "cells": ("marginal",),
    "resize": ("peak_headroom",),
    "driver": ("host", "stream"),
    "transfers": ("queue",),
    "device": ("cpu",),
    "threads": ("1",),
    "ops": ("xla", "linear=xla"),
    "arithmetic": ("int8",),
    "max_num_seqs": ("3",),
    "max_num_batched_tokens": ("128",),
    "long_prefill_token_threshold": ("64",),
    "speculative_config": ('{"method": "ngram", "prompt_lookup_min": 1}', '{"method": "mtp"}'),
    "seed": ("0", "7"),
    "temperature": ("0", "0.9"),
    "top_k": ("5",),
    "top_p": ("0.7",),
    "min_p": ("0.2",),
    "max_tokens": ("9",),
}
"""Values of each option that a job may be given."""
MODELS: tuple[Callable[[Path], Path], ...] = (other_model, same_model)
APART = {
    "model": "drawn from MODELS",
    "tokenizer": "drawn from MODELS",
    "trace": "writes a directory, which must be new",
    "kv_dir": "keeps KV of sessions and prompts in a directory, for other processes",
    "step": "of Orbax checkpoints",
    "name_map": "of Orbax checkpoints of other programs",
    "policies": "no flag",
    "progress": "no flag",
}
"""Options of a model that OPTIONS leaves out, and why."""


def draw_options(rng: random.Random, directory: Path) -> tuple[str, ...]:
    """No to two options, and sometimes another model or tokenizer."""
    names = rng.sample(sorted(OPTIONS), pick(rng, (0, 1, 1, 2)))
    given = [_flag(name, pick(rng, OPTIONS[name])) for name in names]
    if rng.random() < 0.2:
        option = pick(rng, ("model", "tokenizer"))
        given.append(f"--{option}={pick(rng, MODELS)(directory)}")
    return tuple(given)


def _flag(name: str, value: str) -> str:
    flag = name.replace("_", "-")
    return f"--no-{flag}" if value == "false" else f"--{flag}={value}"


_UNDISTURBED: dict[tuple[str, ...], list[str] | str] = {}
"""Results, or the refusal, by input and options."""


def undisturbed(scene: Scene, source: Path, options: tuple[str, ...]) -> list[str] | str:
    """The results of a job that nothing disturbs, or the refusal of its options."""
    key = source.name, *options
    if key not in _UNDISTURBED:
        output = scene.directory / "undisturbed.jsonl"
        done = run(scene, f"a job with {options}", file_jobs.command(source, output, *options))
        whole = done.status in (0, 3)
        _UNDISTURBED[key] = file_jobs.results(output) if whole else done.err.strip()
        output.unlink(missing_ok=True)
    return _UNDISTURBED[key]


def kill_after(output: Path, nbytes: int) -> Callable[[subprocess.Popen], bool]:
    """Whether the output has grown by so many bytes."""
    begin = output.stat().st_size if output.exists() else 0
    return lambda process: output.exists() and output.stat().st_size >= begin + nbytes


def attack_resume(scene: Scene, *more: str, environment: Mapping[str, str | None] = {}) -> None:
    """A job is killed and given again with other options: it is refused by name, or gives what it
    gives undisturbed."""
    rng, shared = scene.rng, scene.directory.parents[1]
    source, output = shared / "resume.jsonl", scene.directory / "out.jsonl"
    if not source.exists():
        file_jobs.write_input(source, 24, 0)
    first = pick(rng, ((), (), draw_options(rng, shared)))
    expected = undisturbed(scene, source, first)
    if isinstance(expected, str):
        return  # these options are refused from the beginning
    whole = sum(len(line) for line in expected)
    for options in (first, *(draw_options(rng, shared) for _ in range(3)), first):
        what = f"a job of {first}, resumed with {options}"
        command = file_jobs.command(source, output, *options, *more)
        at = kill_after(output, rng.randrange(1, whole // 4))
        done = run(scene, what, command, at, environment)
        if "timed out during startup" in done.err:  # Ray's own limit, on a busy machine
            scene.counts["Ray did not start"] += 1
            continue
        scene.counts["kills"] += done.status == -signal.SIGKILL
        scene.counts["resumed"] += 1
        scene.counts["refused"] += done.status == 2
        if done.status == 2 and not _is_named(done.err, options):
            scene.fault("message", f"{what}: refused without a name: {done.err[-500:]}")
        if done.status in (0, 3) and file_jobs.results(output) != expected:
            scene.fault("bits", f"{what}: other results than undisturbed")
    done = run(scene, f"a job of {first} at last", file_jobs.command(source, output, *first))
    if done.status not in (0, 3) or file_jobs.results(output) != expected:
        scene.fault("lost", f"a job of {first}, at last: {done.status}: {done.err[-500:]}")


def _is_named(message: str, options: Sequence[str]) -> bool:
    """Whether a refusal names one of the options, or what it decides."""
    names = {option.lstrip("-").partition("=")[0].removeprefix("no-") for option in options}
    names |= {name.replace("-", "_") for name in names} | {"weights", "tokenizer", "defaults"}
    names |= set(itertools.chain(*OPTIONS.values()))
    return any(name in message for name in names if len(name) > 1)


def attack_ray(scene: Scene) -> None:
    """The same on Ray's workers."""
    with ray_folder() as environment:
        attack_resume(
            scene, "--ray=local", "--workers=1", "--cores-per-worker=1", environment=environment
        )


@contextlib.contextmanager
def ray_folder() -> Iterator[dict[str, str | None]]:
    """The environment with a directory of Ray's own, which a driver that is killed leaves. The path
    of a socket in it may have 107 characters, so TMPDIR's is too long."""
    path = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    try:
        yield {"RAY_TMPDIR": path}
    finally:
        shutil.rmtree(path, ignore_errors=True)


def attack_hung_workers(scene: Scene) -> None:
    """One of a Ray job's two workers is stopped while it works: the job says which one hangs, and
    has its results."""
    rng, shared = scene.rng, scene.directory.parents[1]
    source, output = shared / "hung.jsonl", scene.directory / "out.jsonl"
    if not source.exists():
        file_jobs.write_input(source, 120, 2)
    expected = undisturbed(scene, source, ())
    assert isinstance(expected, list), expected
    at = rng.randrange(1, sum(map(len, expected)) // 4)
    stopped: list[int] = []

    def stop(process: subprocess.Popen) -> bool:
        if not stopped and output.exists() and output.stat().st_size >= at:
            workers = sorted(_workers_of(process))
            if workers:
                stopped.append(pick(rng, workers))
                os.kill(stopped[0], signal.SIGSTOP)
        return False

    more = ("--ray=local", "--workers=2", "--cores-per-worker=1")
    command = file_jobs.command(source, output, *more)
    with ray_folder() as environment:
        done = run(scene, "a job whose worker hangs", command, stop, environment, HUNG_S)
    scene.counts["workers stopped"] += len(stopped)
    scene.counts[f"exit {done.status}"] += 1
    if done.status not in (0, 3) or file_jobs.results(output) != expected:
        scene.fault("lost", f"a job whose worker hangs: {done.status}: {done.err[-800:]}")
    elif stopped and "does not answer" in done.err:
        scene.counts["workers named as hung"] += 1


def _workers_of(process: subprocess.Popen) -> Iterator[int]:
    """The processes of a command's actors that have a model."""
    with contextlib.suppress(OSError, StopIteration):  # it has ended
        own = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        mark = next(each for each in own if each.startswith(f"{MARK}=".encode()))
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if not (path / "cmdline").read_bytes().startswith(b"ray::Generator"):
                    continue
                # The actor's title has overwritten its environment; its raylet has one.
                raylet = (path / "stat").read_text().rpartition(")")[2].split()[1]
                if mark in Path(f"/proc/{raylet}/environ").read_bytes().split(b"\0"):
                    yield int(path.name)


# ---- places


def _inside(*mounts: str) -> list[str]:
    """The beginning of a command that runs with these mounts of its own."""
    script = " && ".join([*mounts, 'exec "$@"'])
    return ["unshare", "-m", "sh", "-c", script, "sh"]


def _tmpfs(directory: str, options: str) -> str:
    return f"mount -t tmpfs -o {options} tmpfs {directory}"


def _slow(source: Path) -> list[str]:
    """The beginning of a command whose input comes a line at a time."""
    script = f'while read -r l; do printf "%s\\n" "$l"; sleep 0.3; done < {source} | exec "$@"'
    return ["sh", "-c", script, "sh"]


def _disk_of(path: Path) -> str:
    """The device, "major:minor", that a file lies on."""
    device = path.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def attack_places(scene: Scene) -> None:
    """A job where /dev/shm is full, /tmp closed, the disk full or slow, memory scarce, or the user
    another one: it has its results, or is refused in a message, and goes on elsewhere."""
    rng, shared = scene.rng, scene.directory.parents[1]
    source = shared / "places.jsonl"
    if not source.exists():
        file_jobs.write_input(source, 7, 1, bad=False)  # no session, which a pipe cannot have
    folder = scene.directory / "out"
    folder.mkdir()
    output, options = folder / "out.jsonl", pick(rng, ((), ("--store=shared",)))
    groups = {
        "a memory cgroup": Path("/sys/fs/cgroup/memory") / f"moejax-attack-{os.getpid()}",
        "a slow disk": Path("/sys/fs/cgroup/blkio") / f"moejax-attack-{os.getpid()}",
    }
    most = pick(rng, (64, 256, 400, 600)) * 1_000_000
    full = pick(rng, ("1k", "64k", "1m", "4m"))
    places: dict[str, list[str]] = {
        "a full /dev/shm": _inside(_tmpfs("/dev/shm", f"size={full}")),
        "a read-only /dev/shm": _inside(_tmpfs("/dev/shm", "ro")),
        "a noexec /tmp": _inside(f"mount --bind {scene.directory} {scene.directory}", "true"),
        "a full disk": _inside(_tmpfs(str(folder), f"size={pick(rng, ('4k', '8k'))}")),
        "a slow input": _slow(source),
        "few descriptors": ["prlimit", f"--nofile={pick(rng, (64, 128))}"],
        "a limit of file sizes": ["prlimit", f"--fsize={pick(rng, (2500, 4000))}"],
        # Who may read all, so that Python and the model are found, and owns nothing.
        "another user": [
            *("setpriv", "--reuid=65534", "--clear-groups"),
            *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
        ],
        "a memory cgroup": in_cgroup(groups["a memory cgroup"], "memory.limit_in_bytes", str(most)),
        # Native threads read past the page cache, so every expert comes at this rate.
        "a slow disk": in_cgroup(
            groups["a slow disk"],
            "blkio.throttle.read_bps_device",
            f"{_disk_of(shared)} {pick(rng, (16, 64)) << 20}",
        ),
    }
    place = pick(rng, sorted(places))
    if place == "a slow disk":
        model = whole(scene.directory.parents[1], "ours")
        options = (f"--model={model}", "--store=file", "--expert-budget=25%", "--max-tokens=6")
    expected = undisturbed(scene, source, options)
    command = file_jobs.command(source, output, *options)
    if place == "a slow input":
        command = [word.replace(f"--input={source}", "--input=-") for word in command]
    if place == "a noexec /tmp":
        places[place] = _inside(_tmpfs(os.environ["TMPDIR"], "noexec"))
        command = [word.replace(str(output), str(shared / "noexec.jsonl")) for word in command]
        output = shared / "noexec.jsonl"
    home = {"HOME": str(folder)} if place == "another user" else {}
    if home and rng.random() < 0.7:
        os.chown(folder, 65534, -1)
    if group := groups.get(place):
        group.mkdir(exist_ok=True)
    before = len(scene.faults)
    done = run(scene, f"a job in {place}", places[place] + command, environment=home)
    if group:
        with contextlib.suppress(OSError):
            group.rmdir()
    if place == "a memory cgroup" and done.status == -signal.SIGKILL:  # by the kernel
        del scene.faults[before:]
    scene.counts[f"{place}: exit {done.status}"] += 1
    if done.status in (0, 3) and place != "a full disk":
        if file_jobs.results(output) != expected:
            scene.fault("bits", f"a job in {place}: other results")
    elif done.status in (0, 3):
        scene.fault("lost", "a job on a full disk ends well")
    elif not done.err.strip() and done.status != -signal.SIGKILL:
        scene.fault("message", f"a job in {place}: exit status {done.status} without a word")
    output.unlink(missing_ok=True)


# ---- caches


def attack_caches(scene: Scene) -> None:
    """A damaged cache of compiled steps costs time, and is whole after one start."""
    rng, shared = scene.rng, scene.directory.parents[1]
    whole, home = shared / "cache", scene.directory / "cache"
    environment = {"XDG_CACHE_HOME": str(home), "JAX_COMPILATION_CACHE_DIR": None}
    command = [sys.executable, "-m", "moejax", "generate", "The old house", "--quiet"]
    command += ["--max-tokens=4", "--temperature=0", *file_jobs.LIMITS]
    if not whole.exists():
        run(scene, "a start without a cache", command, environment=environment)
        shutil.copytree(home, whole)
    else:
        shutil.copytree(whole, home)
    paths = sorted(path for path in home.rglob("*") if path.is_file() and path.stat().st_size > 99)
    if rng.random() < 0.3:
        one, other = rng.sample(paths, 2)
        text = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(text)
    else:
        for path in rng.sample(paths, min(len(paths), pick(rng, (1, 3)))):
            damage_file(rng, path)
    found = [run(scene, "a start with a damaged cache", command, environment=environment)]
    found += [run(scene, "the next start", command, environment=environment)]
    for done in found:
        if done.status or done.out != found[0].out:
            scene.fault(
                "bits", f"a damaged cache: {done.status}, {done.out!r:.200}, {done.err:.800}"
            )
        if "warn" in done.err.lower() or "error" in done.err.lower():
            scene.fault("message", f"a damaged cache: {done.err[:800]}")


# ---- files of other commands

GRID: dict[str, Any] = {
    "policies": ["lru", "fifo"],
    "budgets": ["25%"],
    "texts": ["story"],
    "batch": [1],
    "prompts": 1,
    "prompt_tokens": 8,
    "output_tokens": 2,
    "modes": ["simulated"],
    "seeds": [0],
    "repeats": 1,
}
TASK: dict[str, Any] = {
    "task": "mine",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": "/dev/null"},
    "output_type": "loglikelihood",
    "doc_to_text": "{{text}}",
    "doc_to_target": "x",
    "metric_list": [{"metric": "acc"}],
}


@cache
def whole_trace(directory: Path) -> Path:
    """A trace of the demo, made once."""
    path = directory / "trace"
    with LLM("demo", max_model_len=64, max_num_seqs=1, trace=path, progress=False) as llm:
        llm.generate("The old house", SamplingParams(max_tokens=3))
    return path


def attack_files(scene: Scene) -> None:
    """A hostile grid, task, trace or configuration is refused in a message, or used."""
    rng, directory = scene.rng, scene.directory
    kind = pick(rng, ("grid", "task", "trace", "config", "long"))
    moejax = [sys.executable, "-m", "moejax"]
    path = directory / f"{kind}.yaml"
    if kind == "trace":
        trace = Path(shutil.copytree(whole_trace(directory.parents[1]), directory / "trace"))
        target = pick(rng, sorted(path for path in trace.rglob("*") if path.is_file()))
        how = f"{target.name}: {damage_file(rng, target)}"
        verb = pick(rng, (("trace", "info"), ("plan", "--trace")))
        command = [*moejax, *verb, str(trace)]
    else:
        text = (
            map_text(rng)[0]
            if rng.random() < 0.5
            else mutated_json(
                rng,
                json.loads(
                    json.dumps(
                        GRID
                        if kind == "grid"
                        else TASK
                        if kind == "task"
                        else {"seed": 1, "store": "file"}
                    )
                ),
            )
        )
        how = repr(text[:80])
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        command = {
            "grid": [*moejax, "ablate", str(path), "--output", str(directory / "grid")],
            "task": [
                *moejax,
                "eval",
                "demo",
                "--task",
                "lm-eval:mine",
                "--limit",
                "2",
                "--include-path",
                str(directory),
            ],
            "config": [*moejax, "plan", "--config", str(path)],
            "long": [*moejax, "generate", f"--prompt-file={path}", "--max-tokens=1"],
        }[kind]
        if kind == "long":
            path.write_text('{"prompt": "a", "max_tokens": 1, "temperature": 0}\n' * 100_000)
            command = file_jobs.command(path, directory / "out.jsonl")
            run(
                scene,
                "a job of 100,000 lines, killed",
                command,
                kill_after(directory / "out.jsonl", rng.randrange(1, 1_000_000)),
            )
            return
    done = run(scene, f"a {kind}, {how}", command)
    if done.status not in (0, 2, 3):
        scene.fault("raised", f"a {kind}, {how}: exit status {done.status}: {done.err[-800:]}")
