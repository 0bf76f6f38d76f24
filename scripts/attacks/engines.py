"""Engines under every combination of stores and transports, over files that change, in forked
processes and one after the other; jobs whose output is taken away."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from moejax import LLM, SamplingParams, UserError
from moejax.requests.request import GenerationRequest
from moejax.serve.batch.job import Job, open_job
from scripts.attacks.engine import LIMITS, Known, check_answer, record
from scripts.attacks.files import DAMAGE, damage_file
from scripts.attacks.lines import check_results, known_line
from scripts.attacks.scene import Scene, limit_s
from scripts.attacks.trees import whole
from scripts.attacks.values import pick

LOSSY = "int8", "int4"
"""Versions of all experts, which have bits of their own."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "store": ("memory", "memory", "shared", "file", "file,verify=false"),
    "driver": (
        *("device", "device", "host", "host", "stream"),
        *("stream,tiers=flux,dense=20%", "stream,tiers=flux-direct,interval=2"),
    ),
    "transfers": (None, "queue", "queue,rate=2GB/s,chunk_bytes=16KiB", "queue,threads=1"),
    "expert_budget": ("0", "25%", "60%", "100%"),
    "kv_budget": ("3MiB", "512KiB", "256KiB"),
    "precision": (None, None, "lossless12", *LOSSY),
    "placement": (None, None, "fiddler", "greedy,per_token=1ms,startup=1ms,load=1ms"),
    "prefetch": (None, "random", "moe-infinity", "fate", "tokens", "layer-streaming", "fluxmoe"),
    "eviction": ("lru", "lfu", "lfru", "fifo", "global-lru"),
    "policy": (None, "auto"),
    "cells": ("uniform", "marginal"),
    "resize": ("none", "none", "peak_headroom", "right_size", "mv_wsa", "joint"),
    "swap_space": ("64MiB", "0"),
}
"""Options that change no bit on one kind of processor, but for LOSSY."""


@cache
def known_of(model: Path, precision: str) -> Known:
    """The known requests with what they give alone in a plain engine of this precision."""
    with LLM(model, **{**LIMITS, "precision": precision}) as llm:
        return record(llm)


def _draw(scene: Scene, **given: Any) -> dict[str, Any]:
    """Three to all of the options, so that not every combination has a conflict."""
    names = scene.rng.sample(sorted(CHOICES), scene.rng.randrange(3, len(CHOICES) + 1))
    drawn = {name: pick(scene.rng, CHOICES[name]) for name in names} | given
    return {name: value for name, value in drawn.items() if value is not None}


def _open(scene: Scene, model: Path, options: dict[str, Any]) -> LLM | None:
    """The engine; None: the options are refused."""
    shown = ", ".join(f"{name}={value}" for name, value in options.items())
    made = scene.call(shown, lambda: LLM(model, **{**LIMITS, **options}))
    scene.counts["opened" if isinstance(made, LLM) else "options refused"] += 1
    return made if isinstance(made, LLM) else None


def _open_some(scene: Scene, model: Path, options: dict[str, Any]) -> LLM:
    """The engine with what is left of the options: most draws have a conflict somewhere, so one
    after the other is taken away until none is refused."""
    while (llm := _open(scene, model, options)) is None:
        del options[pick(scene.rng, sorted(options))]
    return llm


def _answer(scene: Scene, llm: LLM, what: str, *, refusable: bool = False) -> None:
    """The known requests, several times, have the bits that they have alone. So many need more KV
    than small budgets have. refusable: some may fail."""
    known = scene.known
    which = known.sample(scene.rng, 9)
    asked = [known.prompts[i] for i in which], [known.params[i] for i in which]
    outputs = scene.call(what, lambda: llm.generate(*asked))
    for i, output in zip(which, outputs if isinstance(outputs, list) else (), strict=False):
        check_answer(scene, i, output, what)
    if not isinstance(outputs, list) and not refusable:
        scene.fault("lost", f"{what}: refused: {outputs!r:.500}")


def attack_combinations(scene: Scene) -> None:
    """Options that change no bit, together: the bits of the plain engine."""
    options, model = _draw(scene), whole(scene.directory.parents[1], "ours")
    llm = _open_some(scene, model, options)
    if (precision := options.get("precision")) in LOSSY:
        scene = dataclasses.replace(scene, known=known_of(model, precision))
        scene.counts["lossy"] += 1
    with llm:
        _answer(scene, llm, f"with {options}")
        scene.counts["preemptions"] += llm.stats()["kv"]["preemptions"]


PRESSED: dict[str, tuple[Any, ...]] = {
    "kv_budget": ("432KiB", "512KiB", "768KiB"),
    "swap_space": ("64MiB", "128KiB"),
    "driver": ("device", "host"),
    "transfers": (None, "queue"),
    "enable_prefix_caching": (True, False),
}


def attack_pressure(scene: Scene) -> None:
    """Long requests of several priorities beside the known ones want many times the KV that there
    is, so that all of them are preempted, swapped out and brought back: the known ones have the
    bits that they have alone."""
    rng, known = scene.rng, scene.known
    options = {name: pick(rng, values) for name, values in PRESSED.items()}
    options = {name: value for name, value in options.items() if value is not None}
    llm = _open(
        scene, whole(scene.directory.parents[1], "ours"), options | {"expert_budget": "50%"}
    )
    if llm is None:
        return
    asked = [
        GenerationRequest(known.prompts[i], known.params[i], priority=rng.randrange(3), tag=i)
        for i in known.sample(rng, 24)
    ]
    asked += [
        GenerationRequest(
            [rng.randrange(1, 4000) for _ in range(rng.randrange(10, 80))],
            SamplingParams(max_tokens=rng.randrange(60, 110), seed=i, ignore_eos=True),
            priority=rng.randrange(3),
        )
        for i in range(24)
    ]
    rng.shuffle(asked)
    what = f"under pressure with {options}"
    with llm:
        for first in range(0, len(asked), 16):
            some = asked[first : first + 16]
            found = scene.call(what, partial(lambda some: [*llm.generate_each(some)], some))
            for request, output in found if isinstance(found, list) else ():
                if request.tag is not None:
                    check_answer(scene, request.tag, output, what)
        kv = llm.stats()["kv"]
    scene.counts["preemptions"] += kv["preemptions"]
    scene.counts["KiB swapped out"] += kv["swapped_out_bytes"] >> 10
    scene.counts["KiB swapped in"] += kv["swapped_in_bytes"] >> 10


# ---- files that change under an engine


def _touch(path: Path) -> None:
    os.utime(path, (1, 1))


def _replace(path: Path) -> None:
    """Another file of the same bytes."""
    shutil.copyfile(path, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def attack_running_files(scene: Scene) -> None:
    """Files of experts change while an engine reads them: its answers are those of before, or it
    fails by name."""
    rng, model = scene.rng, scene.directory / "model"
    shutil.copytree(whole(scene.directory.parents[1], "ours"), model)
    driver = pick(rng, ("device", "host", "stream"))
    llm = _open(scene, model, {"store": "file", "driver": driver, "expert_budget": "25%"})
    if llm is None:
        return
    with llm:
        if rng.random() < 0.5:
            _answer(scene, llm, "before its files change")
        files = sorted((p for p in model.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        path = pick(rng, files[-3:])
        how = pick(rng, (*DAMAGE, "touched", "replaced"))
        change = {"touched": partial(_touch, path), "replaced": partial(_replace, path)}.get(
            how, lambda: damage_file(rng, path)
        )
        timer = threading.Timer(rng.uniform(0, 0.1), change)
        timer.start()
        _answer(scene, llm, f"while {path.name} changes ({how})", refusable=True)
        timer.join()
        _answer(scene, llm, f"after {path.name} changed ({how})", refusable=True)


# ---- forks


def attack_forks(scene: Scene) -> None:
    """A child of a process with an open engine ends, and the parent's engine is whole."""
    rng = scene.rng
    options = {"transfers": pick(rng, ("ops", "queue")), "store": pick(rng, ("memory", "shared"))}
    llm = _open(scene, whole(scene.directory.parents[1], "ours"), options)
    if llm is None:
        return
    with llm:
        _answer(scene, llm, "before a fork")
        ways: dict[str, Callable[[], object]] = {
            "sys.exit": sys.exit,
            "close": llm.close,
            "end": lambda: None,
        }
        way = pick(rng, sorted(ways))
        child = os.fork()
        if not child:
            _run_child(ways[way])
        deadline, status = time.monotonic() + limit_s(), None
        while status is None and time.monotonic() < deadline:
            ended, code = os.waitpid(child, os.WNOHANG)
            status = code if ended else time.sleep(0.01)
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            scene.fault("hung", f"a forked child ({way}, {options}) does not end")
        elif os.WIFSIGNALED(status):
            scene.fault("died", f"a forked child ({way}, {options}): signal {os.WTERMSIG(status)}")
        _answer(scene, llm, f"after a fork ({way}, {options})")


def _run_child(way: Callable[[], object]) -> None:
    """Ends the child as Python does: with its exit functions and finalizers."""
    import atexit

    status = 0
    try:
        way()
    except SystemExit:
        pass
    except BaseException:
        status = 1
    atexit._run_exitfuncs()
    os._exit(status)


# ---- outputs that are taken away


def _remove(output: Path) -> None:
    output.unlink()


def _truncate(output: Path) -> None:
    os.truncate(output, output.stat().st_size // 2)


def _move(output: Path) -> None:
    output.rename(output.with_suffix(".moved"))
    output.write_bytes(b"")


TAKEN = (_remove, _truncate, _move)


def attack_outputs(scene: Scene) -> None:
    """An output that is removed, cut or moved while a job writes it, or that a second job wants:
    the job says so, or its results are whole."""
    rng, known, llm = scene.rng, scene.known, scene.llm
    source, output = scene.directory / "in.jsonl", scene.directory / "out.jsonl"
    which = {f"known-{i}": w for i, w in enumerate(known.sample(rng, 30))}
    lines = [known_line(known, w, name) for name, w in which.items()]
    source.write_bytes(b"\n".join([*lines, b""]))
    job, take = Job(str(source), str(output)), pick(rng, TAKEN)
    taken = threading.Event()

    def watch() -> None:
        size = rng.randrange(1, 20_000)
        while not taken.is_set():
            with suppress(OSError):
                if output.stat().st_size >= size:
                    take(output)
                    taken.set()
            time.sleep(0.001)

    def run_two() -> None:
        with open_job(job) as work:
            second = scene.call("a second job of one output", lambda: open_job(job).__enter__())
            if not isinstance(second, UserError):
                scene.fault("lost", "two jobs write one output")
            work.run(llm)

    if rng.random() < 0.3:
        scene.call("a job beside a second one", run_two)
        check_results(scene, output, len(lines), which)
        return

    def run_one() -> None:
        with open_job(job) as work:
            work.run(llm)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    error = scene.call(f"a job, {take.__name__}", run_one)
    late = not taken.is_set()
    taken.set()
    watcher.join()
    scene.counts[f"{take.__name__}: {'refused' if isinstance(error, UserError) else 'ended'}"] += 1
    if not isinstance(error, UserError) and not late:
        scene.fault("lost", f"a job whose output was taken away ({take.__name__}) ends well")
    if late:
        check_results(scene, output, len(lines), which)


# ---- many engines

MOST_GROWTH = 48 << 20
"""Bytes that 30 engines may leave behind, beside what the first ones compiled."""


def attack_many(scene: Scene) -> None:
    """30 engines, one after the other, leave no memory, descriptor or thread."""
    options = _draw(scene, resize="none", precision=None)
    model = whole(scene.directory.parents[1], "ours")
    sizes: list[tuple[int, int, int]] = []
    for _ in range(30):
        with _open_some(scene, model, options) as llm:
            _answer(scene, llm, f"with {options}, again and again")
        del llm
        sizes.append(held())
    first, last = sizes[4], sizes[-1]
    scene.counts["engines"] += len(sizes)
    if last[0] - first[0] > MOST_GROWTH or last[1] > first[1] + 2 or last[2] > first[2] + 2:
        shown = "bytes, descriptors and threads"
        scene.fault("memory", f"30 engines with {options}: {shown} {first} to {last}")


def held() -> tuple[int, int, int]:
    """Bytes resident, open descriptors and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
    )
