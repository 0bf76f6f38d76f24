"""Memory that ends, a model that one machine lacks, with a real Ray on this machine; a full disk.

Nodes and drivers that are killed: `python -m scripts.check scale_out`."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moejax import UserError
from moejax.models.directory import model_directory
from moejax.requests.request import GenerationRequest
from moejax.requests.sampling_params import SamplingParams
from moejax.serve.cluster import parts
from moejax.serve.cluster.fleet import Fleet, Scale
from moejax.serve.cluster.ray_cluster import LOCAL, connected, nodes
from scripts.check.scale_out import TwoNodes
from tests.moejax.serve.cluster.test_cluster_job import records, run, single, write

# In `.ci/run`, with a Ray and a disk that are none: test_pool.py, test_cluster_job.py.
pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}


def requests(count: int, tokens: int = 24) -> list[GenerationRequest]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [GenerationRequest([5 + i % 90, 7, 11 + i % 50], params, tag=i) for i in range(count)]


@pytest.fixture(scope="module", autouse=True)
def with_ray():
    pytest.importorskip("ray", reason="needs Ray")


class Starved(Fleet):
    """A worker may take no more memory once 10 results are there."""

    def generate_each(self, requests):
        for i, pair in enumerate(super().generate_each(requests)):
            if i == 10:
                place = next(m.place for m in self._pool._members if m.has)
                resource.prlimit(place.pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))
            yield pair


def test_a_worker_whose_memory_ends():
    said: list[str] = []
    # Of many lengths: what a step needs is made anew.
    asked = [r for n in (24, 60, 120) for r in requests(40, n)]
    with connected(LOCAL, 2), Starved("demo", LIMITS, Scale(LOCAL, 2, 1), said.append) as fleet:
        found = list(fleet.generate_each(asked))
        stats = fleet.stats()
    assert len(found) == 120 and not any(isinstance(out, UserError) for _, out in found)
    assert stats["ended_workers"] >= 1 and any("run again" in text for text in said)


def test_no_memory_to_start_with(monkeypatch):
    """Nobody can start: the job ends, and says why."""
    # Ray's workers take it from the process that starts Ray, as `ulimit -v` does.
    script = (
        "import sys; from tests.moejax.serve.cluster.test_failures import *\n"
        "from moejax.serve.cluster import pool\n"
        "class Small(Fleet):\n"
        "    def generate_each(self, requests):\n"
        "        start = self._pool._new_member\n"
        "        def small(node):\n"
        "            member = start(node)\n"
        "            place = self._pool._ray.get(member.where)\n"
        "            used = int(open(f'/proc/{place.pid}/statm').read().split()[0]) * 4096\n"
        "            resource.prlimit(place.pid, resource.RLIMIT_AS, (used, used))\n"
        "            return member\n"
        "        self._pool._new_member = small\n"
        "        return super().generate_each(requests)\n"
        "with connected(LOCAL, 1), Small('demo', LIMITS, Scale(LOCAL, 1, 1), print) as fleet:\n"
        "    try: list(fleet.generate_each(requests(4)))\n"
        "    except UserError as error: print('ENDED', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert "ENDED no worker could start: worker" in done.stdout, done.stdout + done.stderr
    assert "could not start" in done.stdout


@contextlib.contextmanager
def second_node(address: str, hidden: Path):
    """A node of Ray on which a directory is empty. Skips where this user may not hide one."""
    mounted = f"mount -t tmpfs none {shlex.quote(str(hidden))}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mounted], check=False).returncode:
        pytest.skip("needs the right to mount")
    start = [str(Path(sys.executable).parent / "ray"), "start", f"--address={address}"]
    start += ["--num-cpus=1", "--object-store-memory=100000000", "--block"]
    process = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", f"{mounted} && exec {shlex.join(start)}"],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def test_a_model_that_one_machine_lacks(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(model_directory("demo"), model)
    cluster, said = TwoNodes(second=False), []
    try:
        with second_node(cluster.address, model), connected(cluster.address):
            until = time.monotonic() + 120
            while sum(node.cpus >= 1 for node in nodes()) < 2:
                assert time.monotonic() < until
                time.sleep(0.5)
            with Fleet(str(model), LIMITS, Scale(cluster.address, 2, 1), said.append) as fleet:
                found = list(fleet.generate_each(requests(60)))
                stats = fleet.stats()
    finally:
        cluster.close()
    assert len(found) == 60 and not any(isinstance(out, UserError) for _, out in found)
    assert len(stats["workers"]) == 1
    (text,) = [text for text in said if "could not start" in text]
    assert str(model) in text and "neither model.safetensors nor" in text


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_S", 0.0)
    disk, lines = tmp_path / "disk", [{"id": i, "prompt": f"p{i}"} for i in range(60)]
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)]
    if subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs the right to mount")
    try:
        source = write(tmp_path / "in.jsonl", lines)
        with pytest.raises(UserError, match=r"No space left on device; its parts so far are whole"):
            run(source, disk / "out")
        before = records(disk / "out")
        assert 0 < len(before) < len(lines)
        subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
        run(source, disk / "out")
        assert records(disk / "out") == single(tmp_path, lines)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
