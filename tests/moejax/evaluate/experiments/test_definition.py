"""What a definition may say, and that each mistake in it is refused with what to write."""

import dataclasses
import itertools
import json
import sys

import numpy as np
import pytest

from host_offload.policies.prefetch.fitted import Fitted
from host_offload.policies.prefetch.llapor import Learned
from moejax.commands.main import main
from moejax.errors import UserError
from moejax.evaluate.experiments.arms import changed_outputs
from moejax.evaluate.experiments.definition import Group, read_experiment
from moejax.evaluate.experiments.example import GRID, write_example
from moejax.evaluate.experiments.grid import ablate, learn, open_results, select_left
from moejax.evaluate.experiments.records import RECORDS, require_same

LEARNER = """
import dataclasses, pathlib
import numpy as np
from helper import SCALE
from mine import Mine

@dataclasses.dataclass(frozen=True)
class Learner(Mine):
    hot: int = -1
    scale: float = SCALE
    file: str = "data.npy"

    def __post_init__(self):
        assert np.load(pathlib.Path(__file__).with_name(self.file)).sum() == 6

def fit(trace, count: int = 1):
    return Learner(count=count, hot=trace.header.experts)
"""

SMALL = {"policies": ["lru", "lfu"], "budgets": ["25%", "50%"]}

MINE = """
import dataclasses
from host_offload.control.interface import Decision, Moment

@dataclasses.dataclass(frozen=True)
class Mine:
    count: int = 1
    victim_weights: tuple = (0, 1, 0)
    moments: frozenset = frozenset()
    needs: frozenset = frozenset()
    writes: frozenset = frozenset({"victim_weights"})
    def init(self, spec): return None
    def decide(self, state, observation): return None, Decision()

class Other: pass

class NoInit(Mine):
    def init(self, spec): return {}["hidden"]

@dataclasses.dataclass(frozen=True)
class Moves(Mine):
    moments: frozenset = frozenset({Moment.STEP_END})
    writes: frozenset = frozenset({"victim_weights", "cells"})
"""


@pytest.fixture
def home(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "math.txt").write_text("1 + 1 = 2. " * 2000)
    return tmp_path


def written(home, text):
    path = home / "grid.yaml"
    path.write_text(text)
    return path


def test_axes_and_defaults(home):
    path = written(home, "policies: [lru, 'mine.py:Mine,count=3']\nbudgets: [25%, 1MiB, 0]\n")
    found = read_experiment(path)
    assert found.arms["mine.py:Mine,count=3"].policies[0].count == 3
    assert (found.model, found.baseline, found.repeats) == ("demo", "lru", 6)
    cells = list(found.cells())
    assert len(cells) == 6
    assert len(set(cells)) == 6
    assert {cell.driver for cell in cells} == {"device"}
    # What policies share the longest stretch of is outermost: they take turns.
    assert [cell.policy for cell in cells[:2]] == ["lru", "mine.py:Mine,count=3"]


def test_a_file_that_changes_is_another_experiment(home):
    path = written(home, "policies: [mine.py:Mine]\nbudgets: [25%]\ntexts: [math.txt]\n")
    before = read_experiment(path).asked
    assert before == read_experiment(path).asked
    (home / "mine.py").write_text(MINE + "\n")
    assert read_experiment(path).asked != before
    (home / "mine.py").write_text(MINE)
    (home / "math.txt").write_text("2 + 2 = 4. " * 2000)
    assert read_experiment(path).asked != before


def test_a_grid_grows_by_repeats_and_policies_and_runs_only_what_is_new(tmp_path):
    small = read_experiment(SMALL | {"repeats": 1})
    with open_results(small, tmp_path / "out") as (_, write):
        for cell, repeat in itertools.chain(*small.runs().values()):
            write(RECORDS, {**vars(cell), "repeat": repeat, "error": None})
    more = read_experiment(SMALL | {"repeats": 2, "policies": ["lru", "lfu", "fifo"]})
    with open_results(more, tmp_path / "out") as (done, _):
        left = itertools.chain(*select_left(more.runs(), done).values())
        new = [(cell.policy, repeat) for cell, repeat in left if cell.mode == "measured"]
    assert sorted(new) == sorted([("lru", 1), ("lfu", 1), ("fifo", 0), ("fifo", 1)] * 2)
    with pytest.raises(UserError, match="repeats was 2 and is 1"):
        require_same(tmp_path / "out", more.asked | {"repeats": 1})


def test_a_policy_between_layers_brings_the_host_driver_for_the_baseline_too():
    found = read_experiment(SMALL | {"policies": ["lru", "lfu", "layer-streaming"]})
    drivers = {(cell.policy, cell.driver) for cell in found.cells()}
    assert drivers == {
        ("lru", "device"),
        ("lru", "host"),
        ("lfu", "device"),
        ("layer-streaming", "host"),
    }


COSTS = "per_token=20us,startup=50us,load=200us,accelerator=20us,attention=100us"


def test_placements_share_the_engines_that_have_a_second_processor():
    ours = [f"placement={name},{COSTS}" for name in ("dali", "fiddler", "ktransformers,defer=2")]
    found = read_experiment(SMALL | {"policies": ["lru", *ours]})
    assert found.arms[ours[0]].placement.scheduler == "dali"
    engines = {
        (group.driver, group.defer): found.engine_options(group).policy.policies
        for group in found.runs()
    }
    assert {place: len(policies) for place, policies in engines.items()} == {
        ("device", None): 0,
        ("host", None): 0,
        ("host", 0): 1,
        ("host", 2): 1,
    }
    assert engines["host", 2][0].defer == 2


def test_deferral_and_substitution_change_outputs():
    late = changed_outputs(f"learned=train + placement=ktransformers,defer=2,{COSTS}")
    assert "a layer late" in late and "stand in" in changed_outputs("lfu + buddies=train,most=2")
    others = "placement=ktransformers,defer=0", "own.py:Own,defer=2", "lru", "buddies.py:B=train"
    assert not any(map(changed_outputs, others))


def test_a_placement_of_a_grid_predicts_by_networks_beside_it(tmp_path):
    text = f"learned=train,epochs=1 + placement=prescope,{COSTS}"
    arm = read_experiment(SMALL | {"policies": ["lru", text]}).arms[text]
    assert arm.learns == ("learned",) and not arm.placement.looks_ahead
    network = Learned(Fitted("learned", "", (4, 16, 4, 8), "{}", b""))
    _, placed = dataclasses.replace(arm, given=(network, arm.given[1])).policies
    assert placed.learned is network and placed.looks_ahead


def test_forests_without_what_trains_them_are_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UserError, match=r"expertflow=train.*pip install 'moejax\[train\]'"):
        read_experiment(SMALL | {"policies": ["lru", "expertflow=train"]})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"polices": ["lru"]}, "unknown key 'polices', did you mean 'policies'?"),
        ({"policies": []}, "policies are missing; write policies: [lru, lfu]"),
        ({"policies": ["lur"]}, "unknown policy 'lur'; write one of lru,"),
        ({"policies": ["promoe"]}, "promoe=PATH"),
        ({"policies": ["lru + lfu"]}, "both write 'victim_weights'"),
        ({"policies": ["none.py:Mine"]}, "there is no file"),
        ({"policies": ["mine.py:Absent"]}, "has no class Absent; it has Mine"),
        ({"policies": ["mine.py:Other"]}, "must be decorated with @dataclasses"),
        ({"policies": ["mine.py:Mine,nope=1"]}, "has no setting 'nope=1'; known: count=…"),
        ({"policies": ["mine.py:Mine,count=x"]}, "count='x' is not a whole number"),
        ({"policies": ["broken.py:Mine"]}, "broken.py cannot be read (ModuleNotFoundError"),
        ({"policies": ["lfu,nope=1"]}, "lfu has no setting 'nope=1'"),
        ({"policies": ["fate"], "driver": "device"}, "driver: auto or host"),
        ({"policies": ["moepic=train"]}, "has halves of experts, which are simulated with times"),
        ({"policies": ["moepic=train + lfu"]}, "have an LRU cache of their own; name it alone"),
        ({"policies": ["placement=dalii"]}, "unknown placement 'dalii', did you mean 'dali'?"),
        (
            {"policies": ["placement=ktransformers,defer=1"], "modes": ["measured", "simulated"]},
            "changes outputs, and with them the routing, so it is measured only",
        ),
        (
            {"policies": ["lru", "buddies=train"], "modes": ["measured", "simulated"]},
            "changes outputs, and with them the routing, so it is measured only",
        ),
        ({"policies": ["buddies=train", "lru"]}, "so it cannot be the baseline, nor know the run"),
        ({"policies": ["lru", "buddies=train + oracle=run"]}, "nor know the run"),
        ({"policies": ["lru", "buddies=train,share=1"]}, "has no setting 'share=1'"),
        ({"policies": ["lru", "expert_map_in_step"], "driver": "host"}, "write driver: auto, with"),
        (
            {"routing": ["zipf"], "modes": ["simulated"], "policies": ["expert_map_in_step"]},
            "policy 'expert_map_in_step' needs embedding, which routing without a model lacks",
        ),
        ({"policies": ["expert_map_in_step + coactivation"]}, "no policy beside it that looks"),
        ({"policies": ["mine.py:NoInit"]}, "fails at its init at every budget: KeyError: 'hidden'"),
        ({"policies": ["mine.py:Moves"]}, "writes 'cells', and in a grid budgets are the grid's"),
        ({"costs": "none.json"}, "there is no file"),
        ({"costs": "rtx4090"}, "are for routing without a model"),
        (
            {"routing": ["zipf"], "modes": ["simulated"], "link_rate": "1GB/s"},
            "link_rate changes no count of a simulation",
        ),
        ({"prompts": 1, "batch": 2}, "prompts: 1 are fewer than a batch of 2"),
        ({"link_rate": ["none", "none"]}, "link_rate has a value twice"),
        ({"policies": ["promoe=x,a=1"]}, "promoe=PATH, which has its own settings, has no setting"),
        ({"policies": ["promoe=none.npz"]}, "none.npz"),
        ({"policies": ["mine.py:Mine=train"]}, "Mine cannot learn: it needs fit(trace)"),
        ({"policies": ["mine.py:Mine=file"]}, "unknown policy 'mine.py:Mine=file'"),
        ({"policies": ["fate=train"]}, "unknown policy 'fate=train'; write one of"),
        ({"policies": ["expertflow=train,tree=1"]}, "'tree=1', did you mean 'trees'?"),
        ({"routing": ["none"], "modes": "simulated"}, "routing 'none' is none of qwen3-like,"),
        ({"routing": ["zipf,shape=1"]}, "routing 'zipf' has no setting 'shape=1'"),
        ({"routing": ["zipf"]}, "write modes: [simulated] or [predicted]"),
        ({"routing": ["zipf"], "texts": ["math"]}, "texts has no effect beside routing; leave one"),
        (
            {"routing": ["zipf"], "modes": ["simulated"], "policies": ["fate"]},
            "policy 'fate' needs gate_input, which routing without a model lacks",
        ),
        ({"budgets": [25]}, 'did you mean "25%"?'),
        ({"budgets": ["1KiB"]}, "budget 1KiB holds no expert: one takes 98304 bytes (96 KiB)"),
        ({"budgets": ["a lot"]}, "'a lot' is not an expert budget"),
        ({"budgets": ["25%", "25%"]}, "budgets has a value twice"),
        ({"texts": ["none.txt"]}, "there is no text 'none.txt': write one of story, math, code"),
        ({"texts": ["math", "math.txt"]}, "two texts have the same name"),
        ({"batch": [0]}, "batch must be whole numbers of at least 1"),
        ({"seeds": [1, 1]}, "seeds has a value twice"),
        ({"temperature": 3}, "temperature must be from 0 to 2"),
        ({"modes": ["guessed"]}, "modes is one of measured, simulated, predicted"),
        ({"driver": "both"}, "driver is one of auto, device, host"),
        ({"baseline": "fifo"}, "baseline 'fifo' is none of the policies; write one of lru, lfu"),
        (
            {"precision": "dynaexq", "modes": ["predicted"]},
            "whose times are measured only; write modes: [measured, simulated]",
        ),
        (
            {"precision": "dynaexq", "policies": ["random"]},
            "so the baseline must be an eviction such as lru, not 'random'",
        ),
        ({"precision": ["dynaexq,hi=int2"]}, "hi=int2 must have more bytes than lo=int4"),
        ({"precision": ["dynaexq,hi_share=0.5"]}, "leave hi_share out"),
        ({"precision": ["hobbit"], "driver": "device"}, "looks between layers, which driver: dev"),
        ({"precision": ["dynaexq,alfa=0.5"]}, "has no setting 'alfa=0.5'"),
        ({"precision": ["map=none.npy"]}, "none.npy: cannot be read as a map"),
        ({"precision": "dynaexq", "budgets": ["1MiB"]}, "give them more memory"),
        (
            {"precision": ["dense", "int8"], "modes": ["predicted"]},
            "costs are of one precision",
        ),
        (
            {"options": {"expert_budget": "25%"}},
            "options has 'expert_budget', which a grid decides",
        ),
        ({"options": ["float32"]}, "options must be a mapping such as dtype: float32"),
        ({"model": 5}, "model must be text, not 5"),
        ({"texts": [5]}, "texts must be text, not 5"),
        ({"texts": ["math", "math"]}, "has a value twice"),
        ({"model": "/no/such/model"}, "/no/such/model"),
        ({"prompt_tokens": 4096}, "1024"),
    ],
)
def test_mistakes_are_refused_with_what_to_write(home, monkeypatch, change, said):
    monkeypatch.chdir(home)
    with pytest.raises(UserError) as error:
        read_experiment(SMALL | change)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("policies: [lru", "is not valid YAML"),
        ("- lru\n", "must be a mapping such as policies: [lru, lfu]"),
        ("polices: [lru]\n", "grid.yaml: unknown key 'polices'"),
    ],
)
def test_a_file_that_is_no_definition(home, text, said):
    with pytest.raises(UserError) as error:
        read_experiment(written(home, text))
    assert said in str(error.value)


def test_shares_are_of_the_dense_bytes_so_a_smaller_version_has_more_cells():
    found = read_experiment(SMALL | {"precision": ["dense", "int8"], "budgets": ["25%"]})
    groups = [Group("device", p, "none", 1, frozenset()) for p in found.precision]
    dense, int8 = (int(found.engine_options(g).memory.expert_budget) for g in groups)
    assert dense == 16 * 98304
    assert 0.9 * dense < int8 <= dense  # whole experts, so a little less than the bytes


def test_the_example_can_be_read(tmp_path, capsys):
    assert main(["ablate", "--new", str(tmp_path / "mine")]) == 0
    said = capsys.readouterr().out
    grid = tmp_path / "mine" / "grid.yaml"
    assert str(grid) in said and "my_policy.py" in said
    found = read_experiment(grid)
    assert "my_policy.py:MyPolicy" in found.arms
    assert grid.read_text() == GRID
    with pytest.raises(UserError, match=r"grid\.yaml is there already; choose another --new"):
        write_example(tmp_path / "mine")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        write_example(tmp_path / "file" / "below")


def test_with_two_versions_there_is_one_policy():
    given = {"precision": ["dense", "dynaexq"], "budgets": ["60%"]}
    found = read_experiment(SMALL | given)
    cells = [(cell.precision, cell.policy) for cell in found.cells()]
    assert cells == [("dense", "lru"), ("dense", "lfu"), ("dynaexq", "lru")]


def test_a_precision_that_the_host_drives_has_the_baseline_beside_it():
    given = SMALL | {"precision": ["dense", "dynaexq", "hobbit"], "budgets": ["60%"]}
    places = [(c.driver, c.precision, c.policy) for c in read_experiment(given).cells()]
    both = [("dense", "lru"), ("dynaexq", "lru")]
    assert [p for p in places if p[0] == "device"] == [
        ("device", *place) for place in (both[0], ("dense", "lfu"), both[1])
    ]
    assert [p for p in places if p[0] == "host"] == [
        ("host", *place) for place in (*both, ("hobbit", "lru"))
    ]
    forced = read_experiment(given | {"driver": "host"})
    assert {c.driver for c in forced.cells()} == {"host"}
    assert {c.precision for c in forced.cells()} == {*given["precision"]}


TALKS = {
    "policies": ["lru", "mv_wsa"],
    "memory": "4MiB",
    "budgets": ["25%"],
    "conversations": ["turns,sessions=2,turns=2"],
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"texts": ["math"]}, "texts has no effect beside conversations; leave one"),
        ({"memory": None}, "conversations need a memory for experts and KV; write memory: 4MiB"),
        ({"memory": "much"}, "'much' is not a size"),
        ({"modes": ["simulated"]}, "modes has no effect beside conversations"),
        ({"conversations": ["talks,turns=2"]}, "unknown kind 'talks'; known: turns"),
        ({"conversations": ["turns,seed=2"]}, "kind 'turns' has no setting 'seed=2'"),
        ({"conversations": ["turns,turns=0"]}, "turns must be a number above 0, got 0"),
        ({"conversations": ["turns,turns=a"]}, "turns='a' is not a whole number"),
        ({"prices": {"miss_ms": -1}}, "prices are numbers of decode_ms, prefill_ms, miss_ms"),
        ({"prices": "measured"}, "policy 'mv_wsa' weighs experts against KV by prices"),
        ({"policies": ["lru", "fate"]}, "which conversations do not have yet"),
        ({"policies": ["mv_wsa,gamma=1"]}, "mv_wsa has no setting 'gamma=1'"),
        (
            {"precision": ["dense", "int8"]},
            "conversations have one precision and one link_rate a grid",
        ),
        ({"memory": "1KiB"}, "1 KiB"),
    ],
)
def test_conversations_that_cannot_be(change, said):
    with pytest.raises(UserError) as error:
        read_experiment(TALKS | change)
    assert said in str(error.value)


def test_conversations_can_be_written_again():
    found = read_experiment(TALKS)
    written = {name: value for name, value in found.asked.items() if name != "files"}
    assert read_experiment(written).asked == found.asked
    assert {cell.mode for cell in found.cells()} == {"priced"}
    with pytest.raises(UserError, match="unknown policy 'mv_wsa'"):
        read_experiment(SMALL | {"policies": ["mv_wsa"]})


def test_a_policy_of_ones_own_learns_and_is_bound_to_all_its_files(home):
    (home / "learner.py").write_text(LEARNER)
    (home / "helper.py").write_text("from deeper import SCALE\n")
    (home / "deeper.py").write_text("SCALE = 2.0\n")
    np.save(home / "data.npy", np.arange(4))
    policies = ["lru", "learner.py:Learner=train,count=3", "learner.py:Learner"]
    grid = {"policies": policies, "routing": ["zipf,layers=2,experts=8,top_k=2"]}
    grid |= {"budgets": ["50%"], "modes": ["simulated"], "prompt_tokens": 8, "output_tokens": 4}
    (home / "grid.yaml").write_text(json.dumps(grid))
    files = {"learner.py", "mine.py", "helper.py", "deeper.py", "data.npy"}
    assert read_experiment(home / "grid.yaml").asked["files"].keys() == files

    taught = learn(read_experiment(home / "grid.yaml"), home / "traces").arms[policies[1]].policies
    assert (taught[0].count, taught[0].hot, taught[0].scale) == (3, 8, 2.0)
    assert not ablate(home / "grid.yaml", home / "out", progress=False).failures
    for change in ("deeper.py", "data.npy"):
        before = (home / change).read_bytes()
        if change == "data.npy":
            np.save(home / change, np.array([1, 5]))
        else:
            (home / change).write_text("SCALE = 2.0  # or not\n")
        with pytest.raises(UserError, match=f"another experiment: changed since then: {change}\\."):
            ablate(home / "grid.yaml", home / "out", progress=False)
        (home / change).write_bytes(before)
    ablate(home / "grid.yaml", home / "out", progress=False)
