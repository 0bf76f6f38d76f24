"""A real Ray on this machine, with the embedded model. MOEJAX_RAY names one that runs already."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest

from moejax import LLM
from moejax.requests.sampling_params import SamplingParams
from moejax.serve.batch.job import Job, open_job
from moejax.serve.cluster.fleet import Fleet, format_fleet
from moejax.serve.cluster.ray_cluster import LOCAL, connect
from moejax.serve.cluster.workers import Scale
from scripts.parts import file_jobs

pytestmark = [
    pytest.mark.slow,  # one version of Ray is the same with any jax
    # Ray's own processes and what they leave open are not ours.
    pytest.mark.filterwarnings("ignore"),
]

LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def ray():
    pytest.importorskip("ray", reason="needs Ray")
    with connect(os.environ.get("MOEJAX_RAY", LOCAL), 2):
        yield os.environ.get("MOEJAX_RAY", LOCAL)


class Killing(Fleet):
    """Ends a worker with SIGKILL once 20 results are there."""

    def generate_each(self, requests):
        for i, pair in enumerate(super().generate_each(requests)):
            if i == 20:
                beat = next(m.beat for m in self._workers._members if m.tasks and m.beat)
                os.kill(beat.pid, signal.SIGKILL)
            yield pair


def test_two_workers_give_the_results_of_one_process(ray, tmp_path, demo_dir):
    """Also where one of them is killed. Lines of both forms, turns of sessions, bad ones."""
    source = tmp_path / "in.jsonl"
    file_jobs.write_input(source, 60, 3)
    job = Job(str(source), str(tmp_path / "one"), sampling={"max_tokens": 64}, on_error="skip")
    with LLM(demo_dir, progress=False, **LIMITS) as llm, open_job(job) as work:
        work.run(llm)
    job, said = dataclasses.replace(job, output=str(tmp_path / "many")), []
    with (
        open_job(job) as work,
        Killing(str(demo_dir), LIMITS, Scale(ray, 2, 1), work.turns, said.append) as fleet,
    ):
        work.run(fleet)
        stats = fleet.stats()
    assert stats["ended_workers"] == 1 and "run again" in said[0]
    assert file_jobs.results(tmp_path / "many") == file_jobs.results(tmp_path / "one")
    assert len(file_jobs.results(tmp_path / "many")) == 60
    assert "1 ended before" in format_fleet(stats)
    kinds = {(w["stats"]["store"]["kind"], w["stats"]["store_bytes"]) for w in stats["workers"]}
    assert kinds == {("shared", 6 << 20)}


@pytest.mark.nightly
def test_a_dataset(ray):
    import moejax.ray

    rows = [{"prompt": f"The old house {i}", "max_tokens": 8, "mine": i} for i in range(20)]
    rows.append({"prompt": "x", "max_tokens": -1, "mine": 20})
    found = moejax.ray.generate(
        rows, "demo", SamplingParams(temperature=0.7), workers=2, cores_per_worker=1,
        batch_size=4, **LIMITS,
    ).take_all()  # fmt: skip
    assert sorted(row["mine"] for row in found) == list(range(21))
    by = {row["mine"]: row for row in found}
    assert "max_tokens" in by[20]["error"] and by[20]["text"] is None
    again = moejax.ray.generate(
        rows[:7], "demo", SamplingParams(temperature=0.7), workers=1, cores_per_worker=1, **LIMITS
    ).take_all()
    assert {r["mine"]: r["token_ids"] for r in again} == {i: by[i]["token_ids"] for i in range(7)}
