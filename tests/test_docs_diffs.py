"""The diffs that docs show for a new policy and a new model family: each adds one file, changes one
line elsewhere, and runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from moejax import LLM, SamplingParams

PACKAGES = ("pallas_kernels", "host_offload", "moejax")
GENERATE = """
import json, sys
from moejax import LLM, SamplingParams
def tokens(model, **options):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    limits = dict(max_model_len=128, max_num_seqs=2, max_num_batched_tokens=128, progress=False)
    with LLM(model, **limits, **options) as llm:
        (out,) = llm.generate([PROMPT], params)
        return out.outputs[0].token_ids, llm.stats()
"""
POLICY = """
PROMPT = "The old house"
found, stats = tokens("demo", expert_budget="25%", {option})
assert "{name}" in json.dumps(stats["control"]), stats["control"]
print(json.dumps(list(found)))
"""
FAMILY = """
import pathlib
from tests.moejax.models.families import write_checkpoint
PROMPT = [5, 17, 300, 4, 9]
directory = write_checkpoint(pathlib.Path(sys.argv[1]), "PlainMoeForCausalLM")
found, _ = tokens(directory, expert_budget="25%")
assert len(found) == 8, found
print(json.dumps(list(found)))
"""
RUNS = {
    "host_offload/policies/eviction/random_eviction.py": POLICY.format(
        option='eviction="random"', name="RandomEviction"
    ),
    "host_offload/policies/prefetch/popular.py": POLICY.format(
        option='prefetch="popular"', name="popular"
    ),
    "moejax/models/families/plain_moe.py": FAMILY,
}
"""File that a diff adds → what runs on the tree with it, printing tokens."""


def diffs(text: str) -> list[str]:
    """The diff blocks of a page."""
    return re.findall(r"^```diff\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def changes(diff: str) -> dict[str, tuple[int, int]]:
    """File → (lines added, lines taken away); −1 taken away: the file is new."""
    found, parts = {}, re.split(r"^--- (\S+)\n\+\+\+ b/(\S+)\n", diff, flags=re.MULTILINE)
    for old, path, hunks in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        signs = [line[0] for line in hunks.splitlines() if line]
        taken = -1 if old == "/dev/null" else signs.count("-")
        found[path] = signs.count("+"), taken
    return found


def is_small(diff: str) -> bool:
    """One new file, and at most one line elsewhere, added or changed."""
    new = [path for path, (_, taken) in changes(diff).items() if taken < 0]
    old = [lines for lines in changes(diff).values() if lines[1] >= 0]
    return len(new) == 1 and sum(a for a, _ in old) <= 1 and sum(t for _, t in old) <= 1


@pytest.fixture(scope="module")
def shown(repository) -> dict[str, str]:
    """File that is added → its diff."""
    pages = [repository / "docs" / name for name in ("write_a_policy.md", "add_a_model.md")]
    blocks = [block for page in pages for block in diffs(page.read_text())]
    return {
        path: block for block in blocks for path, (_, taken) in changes(block).items() if taken < 0
    }


@pytest.fixture(scope="module")
def lru_tokens() -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    limits = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 128}
    with LLM("demo", expert_budget="25%", eviction="lru", progress=False, **limits) as llm:
        return list(llm.generate(["The old house"], params)[0].outputs[0].token_ids)


def test_every_diff_is_run(shown):
    assert set(shown) == set(RUNS)


@pytest.mark.parametrize("added", RUNS)
def test_one_file_and_one_line(shown, added):
    assert is_small(shown[added]), changes(shown[added])


def test_more_than_a_line_is_found():
    new = "--- /dev/null\n+++ b/a.py\n@@ -0,0 +1 @@\n+x\n"
    line = "--- a/b.py\n+++ b/b.py\n@@ -1 +1,2 @@\n one\n+two\n"
    assert is_small(new) and is_small(new + line)
    assert not is_small(new + line + "+three\n")
    assert not is_small(new + line + line.replace("b.py", "c.py"))
    assert not is_small(line) and not is_small(new + new.replace("a.py", "d.py"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "added",
    [pytest.param(path, marks=[pytest.mark.nightly] * ("eviction" not in path)) for path in RUNS],
)
def test_the_diff_applies_and_runs(repository, shown, added, lru_tokens, tmp_path):
    copy = tmp_path / "copy"
    for package in PACKAGES:
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(repository / package, copy / package, ignore=left_out)
    subprocess.run(["git", "apply", "-"], cwd=copy, input=shown[added], text=True, check=True)
    assert (copy / added).is_file()

    where = f"import moejax; assert moejax.__file__.startswith({str(copy)!r}), moejax.__file__\n"
    result = subprocess.run(
        [sys.executable, "-c", where + GENERATE + RUNS[added], str(tmp_path / "model")],
        env={**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{repository}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    tokens = json.loads(result.stdout.splitlines()[-1])
    assert tokens == lru_tokens or "families" in added
