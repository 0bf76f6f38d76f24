"""Jobs on several machines: inputs, parts, resumption, refusals. The model is a fake."""

from __future__ import annotations

import errno
import gzip
import json
import os
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from moejax import UserError
from moejax.commands import main as cli
from moejax.serve.batch.job import Job, open_job
from moejax.serve.cluster import part_files as parts_module
from moejax.serve.cluster import ray_cluster
from moejax.serve.cluster.inputs import ClusterInputs
from moejax.serve.cluster.part_files import open_cluster_job
from moejax.start.provenance import decided_by
from tests.moejax.serve.test_batch import FakeLLM

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

LINES = [
    {"id": "a", "prompt": "x"},
    {"id": 17, "prompt": "y", "n": 2},
    {"prompt": "z", "logprobs": 1},
    {"id": "s1", "prompt": "one", "session_id": "s"},
    {"id": "s2", "prompt": "one two", "session_id": "s"},
    {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "w"}},
]


def write(path: Path, lines) -> str:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return str(path)


def run(inputs, output, format="jsonl", model=None, **options):
    paths = [inputs] if isinstance(inputs, str) else inputs
    said: list[str] = []
    job = Job(paths[0], str(output), **options)
    with open_cluster_job(job, paths, format) as work:
        work.run(model or FakeLLM(), warn=said.append)
    return work, said


def records(directory) -> list[dict]:
    """Results without metrics, by their digest."""
    found = []
    for path in sorted(Path(directory).iterdir()):
        if path.suffix == ".jsonl":
            found += path.read_text().splitlines()
        elif path.suffix == ".parquet":
            found += parquet.read_table(path)["result"].to_pylist()
    kept = [{k: v for k, v in json.loads(line).items() if k != "metrics"} for line in found]
    return sorted(kept, key=json.dumps)


def single(tmp_path, lines) -> list[dict]:
    """What the file job of one process writes."""
    output = tmp_path / "single.jsonl"
    with open_job(Job(write(tmp_path / "single", lines), str(output))) as work:
        work.run(FakeLLM())
    kept = [json.loads(line) for line in output.read_text().splitlines()]
    for record in kept:
        record.pop("metrics")
    return sorted(kept, key=json.dumps)


def test_results_are_those_of_a_file_job(tmp_path):
    expected = single(tmp_path, LINES)
    source = write(tmp_path / "in.jsonl", LINES)
    for format in ("jsonl", "parquet"):
        run(source, tmp_path / format, format)
        assert records(tmp_path / format) == expected


def test_many_files_are_read_as_one(tmp_path):
    expected = single(tmp_path, LINES)
    folder = tmp_path / "in"
    (folder / "below").mkdir(parents=True)
    write(folder / "a.jsonl", LINES[:2])
    (folder / "b.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(x) + "\n" for x in LINES[2:5]).encode())
    )
    (folder / "below" / "c.ndjson").write_text(json.dumps(LINES[5]))  # without an end
    (folder / "_SUCCESS").touch()
    (folder / "notes.txt").write_text("no")
    run(str(folder), tmp_path / "out")
    assert records(tmp_path / "out") == expected
    inputs = ClusterInputs([str(folder)])
    assert len(list(inputs.lines())) == 6
    assert inputs.place(5).endswith("b.jsonl.gz, line 3")


def test_rows_of_parquet_are_lines(tmp_path):
    rows = [{"id": f"r{i}", "prompt": f"p{i}", "max_tokens": 4 if i else None} for i in range(300)]
    path = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=70)
    run(str(path), tmp_path / "out", "parquet")
    lines = [{k: v for k, v in row.items() if v is not None} for row in rows]
    assert records(tmp_path / "out") == single(tmp_path, lines)
    table = pyarrow.concat_tables(
        [parquet.read_table(p) for p in sorted((tmp_path / "out").glob("*.parquet"))]
    )
    first = table.to_pylist()[0]
    assert first["text"] == json.loads(first["result"])["text"] and first["error"] is None
    assert first["token_ids"] == [5, 6] and first["completion_tokens"] == 2
    _, said = run(
        [str(path), write(tmp_path / "bad.jsonl", ["{"])], tmp_path / "x", on_error="skip"
    )
    assert said == [f"{tmp_path / 'bad.jsonl'}, line 1: {said[0].split(': ', 1)[1]}"]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_job_goes_on(tmp_path, monkeypatch, format):
    monkeypatch.setattr(parts_module, "PART_S", 0.0)
    source = write(tmp_path / "in.jsonl", LINES)

    class Interrupted(FakeLLM):
        interrupt_after = 3

    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out", format, Interrupted())
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").glob("part-*")}
    assert len(before) == 3
    # Another format goes beside it.
    work, _ = run(source, tmp_path / "out", "jsonl")
    assert work.done == len(LINES) and records(tmp_path / "out") == single(tmp_path, LINES)
    for name, data in before.items():
        assert (tmp_path / "out" / name).read_bytes() == data
    work, _ = run(source, tmp_path / "out", format, model=None)
    assert work.complete and records(tmp_path / "out") == single(tmp_path, LINES)


def test_foreign_results_are_refused(tmp_path):
    source, output = write(tmp_path / "in.jsonl", LINES), tmp_path / "out"
    run(source, output)
    with pytest.raises(UserError, match=r"part-00000.jsonl, line 1: .*seed was 0, is 7"):
        run(source, output, seed=7)
    with pytest.raises(UserError, match="another line"):
        run(write(tmp_path / "other.jsonl", LINES[1:]), output)
    part = output / "part-00000.jsonl"
    (output / "part-00001.jsonl").write_bytes(part.read_bytes())
    with pytest.raises(UserError, match=r"part-00001.jsonl, line 1: this result is there twice"):
        run(source, output)
    (output / "part-00001.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="is no result of moejax"):
        run(source, output)
    run(source, output, overwrite=True)
    assert records(output) == single(tmp_path, LINES)
    (output / "mine.txt").touch()
    with pytest.raises(UserError, match=r"has mine.txt, which is no part"):
        run(source, output)


def test_one_process_writes(tmp_path):
    source, output = write(tmp_path / "in.jsonl", LINES), tmp_path / "out"
    job = Job(source, str(output))
    with (
        open_cluster_job(job, [source]),
        pytest.raises(UserError, match="another process is writing"),
        open_cluster_job(job, [source]),
    ):
        pass


def test_a_full_disk_leaves_whole_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(parts_module, "PART_S", 0.0)
    source, output = write(tmp_path / "in.jsonl", LINES), tmp_path / "out"
    fsync, left = os.fsync, iter(range(2))

    def full(descriptor):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"No space left on device; its parts so far are whole"):
            run(source, output)
    assert sorted(p.name for p in output.iterdir()) == [
        ".moejax.lock",
        "part-00000.jsonl",
        "part-00001.jsonl",
    ]
    run(source, output)
    assert records(output) == single(tmp_path, LINES)


def test_what_cannot_be_opened(tmp_path):
    source = write(tmp_path / "in.jsonl", LINES)
    for paths, output, message in (
        ([str(tmp_path / "no")], "out", "cannot open .*no: No such file"),
        ([str(tmp_path / "in.jsonl")] * 2, "out", "is named twice"),
        (["what://x"], "out", "cannot be opened"),
        ([source], "in.jsonl", "is a file, and the output .* is a directory"),
        (["-"], "out", "reads and writes files"),
        ([source], ".", "has in.jsonl, which is no part"),
    ):
        with pytest.raises(UserError, match=message):
            run(paths, tmp_path / output)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no file to read"):
        run([str(tmp_path / "empty")], tmp_path / "out2")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match=r"torn.parquet (is no file of its kind|cannot be read)"):
        run([str(tmp_path / "torn.parquet")], tmp_path / "out3")
    with pytest.raises(UserError, match="'csv' is unknown"):
        run([source], tmp_path / "out4", "csv")


def test_without_ray(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    source = write(tmp_path / "in.jsonl", LINES)
    arguments = ["--input", source, "--output", str(tmp_path / "o"), "--ray", "local"]
    assert cli.main(["generate", *arguments]) == 2
    assert "pip install 'moejax[ray]'" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"moejax\[ray\]"):
        ray_cluster.require_ray()


def test_a_job_that_is_done_starts_nothing(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", LINES)
    made_with = {"sampling": {"max_tokens": 128}, "decided_by": decided_by("demo", {})}
    run(source, tmp_path / "out", **made_with)
    arguments = ["--input", source, "--output", str(tmp_path / "out"), "--ray", "127.0.0.1:1"]
    assert cli.main(["generate", *arguments]) == 0
    assert f"{len(LINES)} results" in capsys.readouterr().err
