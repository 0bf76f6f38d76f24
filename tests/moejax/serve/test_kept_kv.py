"""KV in a directory: the same bits after a restart, bound to model and options, checked."""

import itertools
import json
import shutil
import signal
import subprocess
import sys

import pytest

from moejax import LLM, SamplingParams, UserError
from moejax.serve import kept_kv
from tests.conftest import DEMO, REPOSITORY
from tests.moejax.engine import scenes

LIMITS = {"progress": False, **scenes.LIMITS}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = [5 + i % 90 for i in range(100)]


def turns(starts, directory, **options):
    """Token ids of three turns of a session and of one prompt twice, over engines that start anew
    after each; cached tokens of each."""
    found, cached, history, llm = [], [], list(LONG), None
    for turn in range(3):
        if llm is None or starts:
            if llm is not None:
                llm.close()
            given = {"kv_dir": directory} if directory else {}
            llm = LLM("demo", **LIMITS, **given, **options)
        for prompt, session in ((history, "one"), ([9, *LONG], None)):
            (out,) = llm.generate([prompt], GREEDY, use_tqdm=False, session_id=session)
            found.append(out.outputs[0].token_ids)
            cached.append(out.metrics.cached_tokens)
        history = [*history, *found[-2], 7 + turn, 8]
    llm.close()
    return found, cached


def test_sessions_and_prefixes_have_the_same_bits_after_a_restart(tmp_path):
    expected = turns(False, None)
    assert turns(True, tmp_path / "kv") == expected
    assert all(expected[1][2:])


def test_sessions_without_room_on_the_device_go_to_host_memory(tmp_path):
    """A KV budget of 18 pages, of which three sessions would have 21."""
    with LLM("demo", **LIMITS) as llm:
        budget = 18 * llm.engine.scheduler.cache.page_bytes
    found = []
    for starts in (False, True):
        options = {"kv_budget": budget, "enable_prefix_caching": False, **LIMITS}
        options |= {"kv_dir": tmp_path} if starts else {}
        llm, answers = LLM("demo", **options), []
        for turn in range(2):
            for name in "abc":
                prompt = [ord(name), *LONG] + [4] * 20 * turn
                out = llm.generate([prompt], GREEDY, use_tqdm=False, session_id=name)[0]
                answers.append((out.outputs[0].token_ids, out.metrics.cached_tokens))
            if starts and not turn:
                llm.close()
                llm = LLM("demo", **options)
                pages = llm.stats()["kv"]["pages"]
                assert pages["session"] + pages["swapped"] == 21 and pages["swapped"] > 0
        llm.close()
        found.append(answers)
    assert found[0] == found[1]


KILLED = """
import json, os, pathlib, signal, sys
from moejax import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
for last in (False, True):
    llm = LLM(sys.argv[2], kv_dir=sys.argv[1], **json.loads(sys.argv[3]))
    llm.generate([[5 + i % (90 - 40 * last) for i in range(100)]], params, use_tqdm=False)
    if last:  # when pages and index are written, and the index is not in its place
        pathlib.Path.replace = lambda self, to: os.kill(os.getpid(), signal.SIGKILL)
    llm.close()
"""


@pytest.mark.slow
def test_a_process_killed_while_it_saves_leaves_what_was_there(tmp_path):
    command = [sys.executable, "-c", KILLED, tmp_path, DEMO, json.dumps(LIMITS)]
    done = subprocess.run(command, cwd=REPOSITORY, timeout=300)
    assert done.returncode == -signal.SIGKILL
    (place,) = tmp_path.iterdir()
    assert len([*place.glob("pages-*")]) == 3  # of which the index names one
    found = []
    for options in ({}, {"kv_dir": tmp_path}):
        with LLM("demo", **options, **LIMITS) as llm:
            (out,) = llm.generate([LONG], GREEDY, use_tqdm=False)
            found.append((out.outputs[0].token_ids, out.num_cached_tokens))
    assert found[0][0] == found[1][0] and (found[0][1], found[1][1]) == (0, 96)
    assert len([*place.glob("pages-*")]) == 1


def files(directory):
    (place,) = directory.iterdir()
    (pages,) = place.glob("pages-*.bin")
    return place / "index.json", pages


@pytest.mark.slow
def test_kv_is_bound_to_the_options_and_the_layout_that_decide_its_bits(tmp_path, monkeypatch):
    def cached(**options):
        with LLM("demo", kv_dir=tmp_path, **LIMITS, **options) as llm:
            return llm.generate([LONG], GREEDY, use_tqdm=False)[0].metrics.cached_tokens

    assert cached() == 0
    assert cached() == cached(expert_budget="25%", seed=3) == 96
    assert cached(dtype="float32") == 0
    monkeypatch.setattr(kept_kv, "_PAGES", "of another moejax")
    assert cached() == 0
    assert len([*tmp_path.iterdir()]) == 3


@pytest.mark.slow
def test_damaged_files_are_refused_by_name(tmp_path):
    with LLM("demo", kv_dir=tmp_path, **LIMITS) as llm:
        llm.generate([LONG], GREEDY, use_tqdm=False)
    size = llm.engine.scheduler.cache.page_bytes
    index, pages = files(tmp_path)
    for path, damage in itertools.product(
        (index, pages), (lambda d: d[:-1], lambda d: d[:50] + b"x" + d[51:])
    ):
        content = path.read_bytes()
        path.write_bytes(damage(content))
        with pytest.raises(UserError, match=f"{path} is damaged or missing; delete {path.parent}"):
            LLM("demo", kv_dir=tmp_path, **LIMITS)
        path.write_bytes(content)
    assert pages.stat().st_size == size * 6
    with LLM("demo", kv_dir=tmp_path, dtype="float32", **LIMITS) as llm:
        llm.generate([LONG], GREEDY, use_tqdm=False)
    (other,) = (place for place in tmp_path.iterdir() if place != index.parent)
    shutil.copytree(other, index.parent, dirs_exist_ok=True)
    with pytest.raises(UserError, match=f"{index} is damaged or missing"):  # another model's
        LLM("demo", kv_dir=tmp_path, **LIMITS)
    with pytest.raises(UserError, match=f"kv_dir='{index}' is no directory that can be written"):
        LLM("demo", kv_dir=index, **LIMITS)
