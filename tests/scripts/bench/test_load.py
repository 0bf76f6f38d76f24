"""The bench of loading: its lines, and that it writes its checkpoint once."""

from scripts.bench import load as bench_load
from scripts.parts.big_checkpoint import sized
from tests.scripts.runs import json_lines

TINY = ("--shape", "demo", "--size", "1MiB", "--repeats", "1")


def test_lines(tmp_path, capsys):
    lines = {
        line["name"]: line for line in json_lines(capsys, bench_load.main, str(tmp_path), *TINY)
    }
    shards = list(tmp_path.rglob("*.safetensors"))
    assert {line["bytes"] for line in lines.values()} == {sum(s.stat().st_size for s in shards)}
    assert all(line["seconds"] >= line["fastest"] > 0 for line in lines.values())
    for name, other in (("load, cold", "disk, cold"), ("load", "new memory")):
        assert lines[name]["ratio"] == lines[name]["seconds"] / lines[other]["seconds"]
    written = shards[0].stat().st_mtime_ns
    assert bench_load.main([str(tmp_path), *TINY]) == 0
    table = capsys.readouterr().out
    assert "load as float32" in table and "× new memory" in table
    assert shards[0].stat().st_mtime_ns == written


def test_size_is_about_what_was_asked_for():
    assert sized("olmoe", 2 * 2**30).num_hidden_layers == 2
    assert sized("qwen3-30b-a3b", 1).num_hidden_layers == 1
