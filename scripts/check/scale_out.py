"""Jobs on Ray's workers, with the embedded model: equal, and killed at random.

    python -m scripts.check scale_out [--prompts 2000] [--kills 20] [--seed 0] [--only PART ...]
        [--address HOST:PORT]

1. equal: a job of --prompts lines, of both forms, with sessions and bad ones, runs in one process
   and on 1, 2 and 4 workers of a local Ray. Results, sorted by id and without `metrics`, must be
   the same bytes.
2. kills: a cluster of two nodes (ray.cluster_utils) runs the job, and workers, the driver and a
   node are ended with SIGKILL at --kills random times; the same command is given again until it is
   done. Nothing may be lost, twice or different. --address: on a Ray that runs on this machine
   already; then no node is ended.
3. grid: `moejax ablate --ray` on such a cluster, disturbed in the same way, half as often: the
   records of one process.

Exits with status 1 if one of them fails. Needs Ray.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moejax.evaluate.experiments.records import UNEQUAL, read_results
from moejax.serve.cluster.ray_cluster import require_ray
from scripts.parts.commands import new_parser
from scripts.parts.file_jobs import command, results, run, write_input

PARTS = ("equal", "kills", "grid")


def cluster_command(source: Path, output: Path, address: str, workers: int) -> list[str]:
    options = (f"--ray={address}", f"--workers={workers}", "--cores-per-worker=1")
    return command(source, output, *options)


def check_equal(directory: Path, prompts: int, seed: int) -> bool:
    source, one = directory / "input.jsonl", directory / "one.jsonl"
    write_input(source, prompts, seed)
    run(command(source, one))
    expected, good = results(one), True
    for workers in (1, 2, 4):
        output, began = directory / f"workers{workers}", time.perf_counter()
        run(cluster_command(source, output, "local", workers))
        seconds = time.perf_counter() - began
        found = results(output)
        same = found == expected
        good &= same
        print(
            f"{workers} workers: {len(found)} results in {seconds:.1f} s, "
            + ("equal to one process" if same else "✗ NOT equal to one process"),
            flush=True,
        )
    return good


def _in_time(start: Callable[[], Any]) -> Any:
    """What starts a node: Ray gives it 30 seconds, which a machine with other work may not keep."""
    for left in (3, 2, 1, 0):
        try:
            return start()
        except Exception as error:  # Ray raises bare ones
            if not left or "imed out" not in str(error):
                raise
    raise AssertionError


class TwoNodes:
    """A cluster of two nodes on this machine, with one worker's CPUs each. second: whether that is
    there from the beginning."""

    def __init__(self, second: bool = True) -> None:
        from ray.cluster_utils import Cluster

        of_each = {"num_cpus": 1, "object_store_memory": 100 << 20}
        self._of_each = of_each
        self._cluster = _in_time(lambda: Cluster(initialize_head=True, head_node_args=of_each))
        self._second = None
        if second:
            self.restore()
        self.address = str(self._cluster.address)

    def restore(self) -> None:
        """The second node, where it is missing. Called in the main thread, as Ray wants it."""
        if self._second is None:
            self._second = _in_time(lambda: self._cluster.add_node(**self._of_each))

    def kill(self) -> None:
        """Ends the second node as a power cut would, its workers with it."""
        if self._second is not None:
            self._cluster.remove_node(self._second, allow_graceful=False)
            self._second = None

    def close(self) -> None:
        self._cluster.shutdown()


_WORKERS = (b"ray::Generator", b"ray::run_part")


def workers_of_ray() -> list[int]:
    """Processes of workers, which Ray names by their class."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if any(name in (path / "cmdline").read_bytes() for name in _WORKERS):
                found.append(int(path.name))
        except OSError:
            continue
    return found


class Kills:
    """Kills that are still to be made, and the cluster on which they are. Kinds by turns: a worker,
    the driver, a node, a worker; without a cluster of its own no node."""

    def __init__(self, kills: int, seed: int, cluster: TwoNodes | None):
        kinds = ["worker", "driver", *(["node", "worker"] if cluster else [])]
        self.left = [kinds[i % len(kinds)] for i in range(kills)]
        self.made: dict[str, int] = dict.fromkeys(kinds, 0)
        self._draw, self._cluster = random.Random(seed), cluster
        self._restore_at = 0.0

    def disturb(self, process: subprocess.Popen) -> None:
        """Ends something at random times, starting included, until the job has ended."""
        following = time.monotonic() + self._draw.uniform(2.0, 8.0)
        while process.poll() is None:
            time.sleep(0.05)
            now = time.monotonic()
            if self._cluster is not None and now > self._restore_at:
                self._cluster.restore()
            live = workers_of_ray()
            if now < following or not self.left or not live:
                continue
            kind = self.left.pop(0)
            self.made[kind] += 1
            if kind == "driver":
                process.kill()
            elif kind == "node" and self._cluster is not None:
                self._cluster.kill()
                self._restore_at = now + 5.0
            else:
                os.kill(self._draw.choice(live), signal.SIGKILL)
            following = now + self._draw.uniform(0.2, 6.0)


def check_kills(directory: Path, prompts: int, kills: int, seed: int, address: str | None) -> bool:
    """Jobs one after the other, each to its end, until all kills were made."""
    require_ray()
    source, one = directory / "in.jsonl", directory / "one.jsonl"
    write_input(source, prompts, seed)
    run(command(source, one))
    expected, cluster = results(one), None if address else TwoNodes()
    disturbance, good, jobs, runs = Kills(kills, seed, cluster), True, 0, 0
    try:
        where = str(address if cluster is None else cluster.address)
        while good and (disturbance.left or not jobs):
            output, before = directory / f"killed{jobs}", dict(disturbance.made)
            arguments = cluster_command(source, output, where, 2)
            jobs, began = jobs + 1, time.perf_counter()
            runs += (times := _until_done(arguments, disturbance, 3 * kills + 3))
            found = results(output)
            good = found == expected
            met = {kind: count - before[kind] for kind, count in disturbance.made.items()}
            print(
                f"job {jobs}: {len(found)} results in {time.perf_counter() - began:.0f} s, {times} "
                f"runs, killed {met}: "
                + ("equal to the undisturbed run" if good else "✗ NOT equal to the undisturbed"),
                flush=True,
            )
    finally:
        if cluster is not None:
            cluster.close()
    print(f"kills: {disturbance.made}; {jobs} jobs, {runs} runs, {len(disturbance.left)} left")
    return good and not disturbance.left


_GRID = """
policies: [lru, lfu, fifo, random, "deepspeed"]
budgets: ["20%", "50%"]
texts: [math, story]
prompt_tokens: 70
output_tokens: 16
batch: [1, 4]
repeats: 4
modes: [measured, simulated]
"""


def check_grid(directory: Path, kills: int, seed: int) -> bool:
    """A grid in one process, and on a cluster of two nodes, killed."""
    require_ray()
    (directory / "grid.yaml").write_text(_GRID)
    ablate = [sys.executable, "-m", "moejax", "ablate", str(directory / "grid.yaml"), "--quiet"]
    run([*ablate, f"--output={directory / 'one'}"])
    cluster, began = TwoNodes(), time.perf_counter()
    try:
        disturbance = Kills(kills, seed, cluster)
        where = (f"--ray={cluster.address}", "--workers=2", f"--output={directory / 'many'}")
        runs = _until_done([*ablate, *where], disturbance, 3 * kills + 3)
    finally:
        cluster.close()
    one, many = (
        sorted(
            json.dumps({name: value for name, value in row.items() if name not in UNEQUAL})
            for row in read_results(directory / name).rows
        )
        for name in ("one", "many")
    )
    print(
        f"{len(many)} records in {time.perf_counter() - began:.0f} s, kills: {disturbance.made}, "
        f"{len(disturbance.left)} came too late, {runs} runs: "
        + ("equal to one process" if one == many else "✗ NOT equal to one process")
    )
    return one == many


def _until_done(arguments: list[str], disturbance: Kills, most: int) -> int:
    """Gives the command until it ends by itself; returns how often that was. What it says where it
    ends with an error is shown, and it is given again, at most so often."""
    for times in range(1, most + 1):
        process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        lines: list[str] = []
        reader = threading.Thread(target=lines.extend, args=(process.stderr,))  # never blocks
        reader.start()
        disturbance.disturb(process)
        reader.join()
        if process.returncode in (0, 3):
            return times
        if process.returncode != -signal.SIGKILL:
            said = [line for line in lines if line.startswith("moejax:")] or lines
            print(f"exit status {process.returncode}: " + "".join(said[-5:]), flush=True)
    return most


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("--prompts", type=int, default=2000, help="default: 2000")
    parser.add_argument("--kills", type=int, default=20, help="default: 20")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and kills (default: 0)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--address", help="of a Ray on this machine, for kills")
    args = parser.parse_args(arguments)
    good = True
    with tempfile.TemporaryDirectory() as name:
        if "equal" in args.only:
            good &= check_equal(Path(name), args.prompts, args.seed)
        if "kills" in args.only:
            good &= check_kills(Path(name), args.prompts, args.kills, args.seed, args.address)
        if "grid" in args.only:
            good &= check_grid(Path(name), args.kills // 2, args.seed)
    return 0 if good else 1
