"""Grids on the embedded model: the engine's counts are the simulator's, nothing compiles twice, and
a grid that was stopped anywhere ends as an undisturbed one."""

import json
import re
import shutil

import jax
import pytest

import moejax
from moejax.errors import UserError
from moejax.evaluate.experiments import grid
from moejax.evaluate.experiments.definition import read_experiment
from moejax.evaluate.experiments.records import RECORDS, UNEQUAL, open_records, require_same

pytestmark = pytest.mark.slow  # counts of engine and simulator, in processes of their own

FAILING = """
import dataclasses
from host_offload.control.interface import Decision, Moment

@dataclasses.dataclass(frozen=True)
class Failing:
    moments: frozenset = frozenset({Moment.STEP_END})
    needs: frozenset = frozenset()
    writes: frozenset = frozenset({"stages"})
    def init(self, spec): return 0
    def decide(self, state, observation):
        if state == 5:
            raise RuntimeError("on purpose")
        return state + 1, Decision()
"""

GRID = {
    "policies": ["lru", "lfu", "fifo", "static", "random", "deepspeed", "failing.py:Failing"],
    "budgets": ["20%", "50%", "0"],
    "texts": ["math"],
    "prompt_tokens": 70,
    "output_tokens": 12,
    "batch": [2],
    "repeats": 2,
    "modes": ["measured", "simulated"],
}


def equal_part(rows):
    """What of records two runs of a definition must agree in."""
    return [{k: v for k, v in row.items() if k not in UNEQUAL} for row in rows]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("grid")
    (home / "failing.py").write_text(FAILING)
    (home / "grid.yaml").write_text(json.dumps(GRID))
    return home


@pytest.fixture(scope="module")
def compilations():
    """Grows by one entry with every compilation of jax."""
    log = []
    event_of = "/jax/core/compile/backend_compile_duration"
    listen = lambda event, _, **__: log.append(event) if event == event_of else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    return log


@pytest.fixture
def found_on_disk():
    """Grows by one entry with every executable that jax finds in its cache on disk."""
    log = []

    def listen(event, **_):
        if event == "/jax/compilation_cache/cache_hits":
            log.append(event)

    jax.monitoring.register_event_listener(listen)
    yield log
    jax.monitoring.unregister_event_listener(listen)


@pytest.fixture(scope="module")
def undisturbed(home, compilations):
    return moejax.ablate(home / "grid.yaml", home / "undisturbed", progress=False)


def test_every_run_has_a_record(undisturbed):
    keys = [(r["mode"], r["policy"], r["budget"], r["repeat"]) for r in undisturbed.rows]
    assert len(set(keys)) == len(keys)
    assert len(undisturbed.of_mode("measured")) == 6 * 3 * 2
    assert len(undisturbed.of_mode("simulated")) == 6 * 3
    # Repeat after repeat, in each the policies by turns.
    measured = [(r["repeat"], r["policy"]) for r in undisturbed.rows if r["mode"] == "measured"]
    assert measured[:2] == [(0, "lru"), (0, "lfu")]
    assert [repeat for repeat, _ in measured] == sorted(repeat for repeat, _ in measured)


def test_the_engine_counts_what_the_simulator_counts(undisturbed):
    assert undisturbed.agreement() == (18, 18)
    ahead = [row for row in undisturbed.of_mode("measured") if row["decode_ahead"]]
    assert {row["policy"] for row in ahead} >= {"random"}
    for row in undisturbed.of_mode("measured"):
        assert row["decode_fills"] + row["decode_read_through"] == row["decode_misses"]
        assert row["decode_steps"] == 11
        if row["budget"] == "0":
            assert row["decode_hits"] == 0
    simulated = {(row["policy"], row["budget"]): row for row in undisturbed.of_mode("simulated")}
    for row in undisturbed.of_mode("measured"):
        other = simulated[row["policy"], row["budget"]]
        assert row["ahead_skipped"] == other["ahead_skipped"]


def test_no_policy_moves_less_than_min(undisturbed):
    least = {row["budget"]: row["decode_misses"] for row in undisturbed.of_mode("bound")}
    assert least["0"] is None  # below the largest step set no bound is claimed
    for row in undisturbed.of_mode("measured"):
        if least[row["budget"]] is not None:
            assert row["decode_misses"] + row["decode_ahead"] >= least[row["budget"]]


def test_failures_are_rows_and_the_others_go_on(undisturbed):
    assert len(undisturbed.failures) == 3 * 2 + 3
    for row in undisturbed.failures:
        assert row["policy"] == "failing.py:Failing"
        assert row["error"].startswith("RuntimeError: on purpose (in policy Failing at STEP_END")
    (line,) = [
        line
        for line in undisturbed.summary()
        if line["error"] and (line["mode"], line["budget"]) == ("measured", "50%")
    ]
    assert line["runs"] == 0
    assert "9 of" in next(iter(undisturbed.notes()))


def test_one_start_compiles_for_all_cells(undisturbed):
    (session,) = undisturbed.sessions
    assert session["batch"] == 2
    assert {row["compiled"] for row in undisturbed.of_mode("measured")} == {0}


def test_an_end_anywhere_changes_nothing(
    undisturbed, home, compilations, own_programs, found_on_disk, monkeypatch, capsys
):
    """The file of records cut at any byte is what kill -9 leaves. The rest finds its executables in
    the cache, and says in a log how far it is."""
    monkeypatch.setattr("moejax.progress.LINE_S", 0.0)
    whole = (undisturbed.directory / RECORDS).read_bytes()
    target = home / "cut"
    moejax.ablate  # noqa: B018  loaded
    target.mkdir()
    for name in ("experiment.json", "sessions.jsonl"):
        (target / name).write_bytes((undisturbed.directory / name).read_bytes())
    (target / RECORDS).write_bytes(whole[: int(len(whole) * 0.6)])
    found = moejax.ablate(home / "grid.yaml", target)
    assert equal_part(found.rows) == equal_part(undisturbed.rows)
    assert len(found.sessions) == 2
    assert found_on_disk
    *_, last = re.findall(
        r"^runs: (\d+) of (\d+), about \d+ min left$", capsys.readouterr().err, re.M
    )
    assert last == (str(len(found.rows)), str(len(found.rows)))
    # A grid that is done starts nothing.
    before = len(compilations)
    again = moejax.ablate(home / "grid.yaml", target, progress=False)
    assert again.rows == found.rows
    assert len(again.sessions) == 2
    assert len(compilations) == before


def test_another_definition_is_refused_by_name(undisturbed, home, monkeypatch):
    other = home / "other.yaml"
    other.write_text(json.dumps(GRID | {"budgets": ["30%"], "output_tokens": 13}))
    with pytest.raises(UserError) as error:
        moejax.ablate(other, undisturbed.directory, progress=False)
    assert "budgets was ['20%', '50%', '0'] and is ['30%']" in str(error.value)
    assert "output_tokens was 12 and is 13" in str(error.value)
    monkeypatch.setattr(grid, "DEFAULTS", 0)
    with pytest.raises(UserError, match=r"defaults was \d+ and is 0\. Give"):
        moejax.ablate(home / "grid.yaml", undisturbed.directory, progress=False)


def test_a_grid_goes_on_with_the_same_weights_only(tmp_path, demo_dir):
    model = shutil.copytree(demo_dir, tmp_path / "model")
    given = {"model": str(model), "policies": ["lru"], "budgets": ["50%"], "prompt_tokens": 8}
    require_same(tmp_path / "out", read_experiment(given).asked)
    require_same(tmp_path / "out", read_experiment(given).asked)
    with open_records(tmp_path / "out" / "records.jsonl") as records:
        records.append({"error": None})
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2] + b"xy")
    with pytest.raises(UserError, match=r"changed since then: weights"):
        require_same(tmp_path / "out", read_experiment(given).asked)


def test_a_text_without_room_for_a_prompt_is_a_mistake(home, tmp_path):
    (tmp_path / "short.txt").write_text("Too short. " * 20)
    given = GRID | {"texts": [str(tmp_path / "short.txt")], "policies": ["lru"]}
    with pytest.raises(UserError, match="give a longer text or fewer prompt_tokens"):
        moejax.ablate(given, tmp_path / "out", progress=False)


@pytest.mark.parametrize("text", ["not json\n", "[1]\n"])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / "records.jsonl"
    path.write_text(text)
    with (
        pytest.raises(UserError, match=r"records\.jsonl, line 1, is no record"),
        open_records(path),
    ):
        pass
