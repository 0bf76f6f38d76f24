"""The pages: links lead somewhere, what they name is there, and their diffs apply and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PAGES = ("README.md", "docs/**/*.md", "tests/**/*.md", "examples/*.md")
PACKAGES = ("pallas_kernels", "host_offload", "moejax")


def anchors(page: str) -> set[str]:
    """What links to the headings of a page say, as GitHub makes them."""
    heads = re.findall(r"^#+ +(.*?) *$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links(page: Path) -> list[str]:
    """Links to files and headings that are not there; code and addresses are left alone."""
    text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        place, _, anchor = link.partition("#")
        target = page.parent / place if place else page
        if re.match(r"[a-z]+:", link):
            continue
        there = target.read_text() if target.suffix == ".md" and target.exists() else ""
        # mkdocs build --strict looks up anchors of what is generated.
        generated = "<!-- generate: " in there
        if not target.exists() or (anchor and not generated and anchor not in anchors(there)):
            broken.append(link)
    return broken


def missing_files(page: str) -> set[str]:
    """Files of ours that a page names and that are not there; diffs add theirs."""
    page = re.sub(r"^```diff\n.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    tops = r"(?<![\w/.~-])(?:pallas_kernels|host_offload|moejax|scripts|tests|docs|examples)"
    files = set(re.findall(rf"{tops}/[\w/.-]*\.(?:py|md|yaml)\b", page))
    return {path for path in files if not (REPOSITORY / path).exists()}


def test_what_the_pages_link_and_name_is_there():
    pages = [page for pattern in PAGES for page in REPOSITORY.glob(pattern)]
    assert len(pages) > 20
    # Results name files as they were when something was measured.
    now = [page for page in pages if page.parent.name != "research"]
    found = {page: (broken_links(page), set()) for page in pages}
    found |= {page: (broken_links(page), missing_files(page.read_text())) for page in now}
    programs = [*REPOSITORY.glob("examples/*.py"), *REPOSITORY.glob("examples/*.yaml")]
    assert any("name_maps/" in program.read_text() for program in programs)
    found |= {program: ([], missing_files(program.read_text())) for program in programs}
    assert not {str(page): wrong for page, wrong in found.items() if any(wrong)}


def test_what_is_written_by_hand_can_be_read():
    def words(*patterns: str) -> int:
        pages = [page for pattern in patterns for page in REPOSITORY.glob(pattern)]
        return sum(len(page.read_text().split()) for page in pages)

    assert words("README.md") <= 600 and words("CHANGELOG.md") <= 200
    assert words("README.md", "CHANGELOG.md", "docs/**/*.md") <= 40_000


def test_every_page_has_a_place_in_the_sites_menu():
    menu = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = {str(page.relative_to(REPOSITORY / "docs")) for page in REPOSITORY.glob(PAGES[1])}
    assert pages == set(re.findall(r": (\S+\.md)$", menu, re.MULTILINE))


@pytest.mark.parametrize(
    "text", ["`moejax/gone.py`", "[a](gone.md)", "[a](#gone)", "[a](b.md#gone)"]
)
def test_a_planted_mistake_is_found(text, tmp_path):
    (tmp_path / "b.md").write_text("# Here it is\n")
    (tmp_path / "a.md").write_text(f"[b](b.md#here-it-is) moejax/nn.py {text}")
    page = tmp_path / "a.md"
    assert len(broken_links(page)) + len(missing_files(page.read_text())) == 1


# ---- diffs

START = """
import json, pathlib, sys
from moejax import LLM, SamplingParams
from tests.moejax.models.families import write_checkpoint
def tokens(model, prompt, **options):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    limits = dict(max_model_len=128, max_num_seqs=2, max_num_batched_tokens=128, progress=False)
    with LLM(model, expert_budget="25%", **limits, **options) as llm:
        return llm.generate([prompt], params)[0].outputs[0].token_ids, llm.stats()
"""
POLICY = """
found, stats = tokens("demo", "The old house", {option})
assert "{name}" in json.dumps(stats["control"]), stats["control"]
assert found == tokens("demo", "The old house", eviction="lru")[0]
"""
FAMILY = """
directory = write_checkpoint(pathlib.Path(sys.argv[1]), "{name}")
assert len(tokens(directory, [5, 17, 300, 4, 9])[0]) == 8
"""
RECORD = """
from host_offload.versions.encoders import decode, encode
from moejax.checkpoints.load import load_checkpoint
from moejax.evaluate.quantization import quantize
from pallas_kernels.records import RecordFormat
import numpy as np
fmt = RecordFormat("e4m3", 64, 40, "float32")
weights = np.random.default_rng(0).standard_normal((2, 120, 64), np.float32)
assert np.abs(decode(encode(weights, fmt), fmt) - weights).max() < 0.15
made = tokens("demo", [5, 17, 300, 4, 9], precision="e4m3")[0]
source = quantize("moejax/demo", sys.argv[1], ["e4m3"]).conversion.directory
assert tokens(source, [5, 17, 300, 4, 9], precision="e4m3")[0] == made
in_memory, in_files = (
    load_checkpoint(source, versions=["e4m3"], in_files=files).store.versions["e4m3"]
    for files in (False, True)
)
record = np.empty(in_memory.array.shape[2:], np.uint16)
in_files.source.read(1, 3, record)
assert np.array_equal(record, np.asarray(in_memory.array)[1, 3])
"""
TRANSPORT = """
import moejax.step.transports.eager as eager
prompt = [5, 17, 300, 4, 9]
assert tokens("demo", prompt, driver="host")[0] == tokens("demo", prompt)[0]
assert eager.EagerTransport.brought > 0
"""
OP = "from pallas_kernels import OPS; assert OPS['combine'][-1] == 'loop'"
RUNS = {
    "host_offload/policies/eviction/random_eviction.py": START
    + POLICY.format(option='eviction="random"', name="RandomEviction"),
    "host_offload/policies/prefetch/popular.py": START
    + POLICY.format(option='prefetch="popular"', name="popular"),
    "moejax/models/families/plain_moe.py": START + FAMILY.format(name="PlainMoeForCausalLM"),
    "moejax/models/families/shared_kv_moe.py": START + FAMILY.format(name="SharedKvMoeForCausalLM"),
    "pallas_kernels/records/e4m3.py": START + RECORD,
    "moejax/step/transports/eager.py": START + TRANSPORT,
    "pallas_kernels/combine/loop.py": OP,
}
"""File that a diff adds → what runs on the tree with it."""
CONTRACTS = {"pallas_kernels/combine/loop.py": ["tests/pallas_kernels/test_contracts.py", "-kloop"]}
"""File that a diff adds → the contract suite that takes it in."""
IN_CI = (
    "host_offload/policies/eviction/random_eviction.py",
    "moejax/models/families/shared_kv_moe.py",
    "moejax/step/transports/eager.py",
    "pallas_kernels/combine/loop.py",
    "pallas_kernels/records/e4m3.py",
)


def changes(diff: str) -> dict[str, tuple[int, int]]:
    """File → (lines added, lines taken away); −1 taken away: the file is new."""
    found, parts = {}, re.split(r"^--- (\S+)\n\+\+\+ b/(\S+)\n", diff, flags=re.MULTILINE)
    for old, path, hunks in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        signs = [line[0] for line in hunks.splitlines() if line]
        taken = -1 if old == "/dev/null" else signs.count("-")
        found[path] = signs.count("+"), taken
    return found


@pytest.fixture(scope="module")
def shown() -> dict[str, str]:
    """File that is added → its diff."""
    names = (
        "write_a_policy.md",
        "add_a_model.md",
        "add_an_op.md",
        "add_a_record_format.md",
        "add_a_transport.md",
    )
    pages = [(REPOSITORY / "docs/extending" / name).read_text() for name in names]
    pattern = re.compile(r"^```diff\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    blocks = [block for page in pages for block in pattern.findall(page)]
    return {file: block for block in blocks for file, n in changes(block).items() if n[1] < 0}


def test_a_diff_is_one_file_and_one_line_elsewhere(shown):
    assert set(shown) == set(RUNS)
    for diff in shown.values():
        old = [lines for lines in changes(diff).values() if lines[1] >= 0]
        assert len(changes(diff)) == len(old) + 1
        assert sum(added for added, _ in old) <= 1 and sum(taken for _, taken in old) <= 1


def test_every_diff_applies_to_this_checkout(shown):
    for diff in shown.values():
        done = subprocess.run(
            ("git", "apply", "--check", "-"),
            cwd=REPOSITORY,
            input=diff,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "added",
    [pytest.param(path, marks=[pytest.mark.nightly] * (path not in IN_CI)) for path in RUNS],
)
def test_the_diff_applies_and_runs(shown, added, tmp_path):
    copy = tmp_path / "copy"
    for package in (*PACKAGES, "tests", "scripts"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, copy / package, ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", copy)
    # Nothing of this repository but what was copied, and not inside of another one.
    settings = {"GIT_CEILING_DIRECTORIES": str(tmp_path), "PYTHONPATH": str(copy)}
    environment = os.environ | settings

    def run(*command: str, **options) -> None:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, **options
        )
        assert done.returncode == 0, done.stdout + done.stderr

    run("git", "apply", "-", input=shown[added])
    where = f"import moejax; assert moejax.__file__.startswith({str(copy)!r}), moejax.__file__\n"
    run(sys.executable, "-c", where + RUNS[added], str(tmp_path / "model"))
    if added in CONTRACTS:
        pytest_ = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
        run(*pytest_, *CONTRACTS[added], "-m", "not nightly")
