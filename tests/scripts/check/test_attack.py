"""The attack finds a planted defect of every kind, repeats by its seed, and finds nothing else."""

import dataclasses
import json
import tempfile

import pytest

from moejax import SamplingParams
from moejax.serve.batch.result_file import ResultFile
from moejax.start.options import OPTIONS
from scripts.attacks import engine, engines, lines, programs, scene, worker
from scripts.check import attack
from tests.scripts.check import plants

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax


@pytest.fixture(scope="module")
def target():
    with engine.start({}) as llm:
        yield llm, engine.record(llm)


@pytest.fixture
def run(target, tmp_path, monkeypatch):
    """Runs `attack(scene)` as a case; returns what broke, by `what`."""

    def case(function, llm=None, known=None):
        kind = worker.kind_of(0, 0)
        monkeypatch.setitem(worker.KINDS, kind, (worker.KINDS[kind][0], function))
        found = worker.run_case(llm or target[0], known or target[1], 0, 0, tmp_path)
        return {fault.what: fault.text for fault in found}

    return case


def generate(scene):
    """Known requests through LLM.generate."""
    known, which = scene.known, [0, 1]
    prompts, params = ([each[i] for i in which] for each in (known.prompts, known.params))
    outputs = scene.call("generate", lambda: scene.llm.generate(prompts, params))
    if isinstance(outputs, list):
        for i, output in zip(which, outputs, strict=True):
            engine.check_answer(scene, i, output, "generate")


def job(scene):
    source, output = scene.directory / "in.jsonl", scene.directory / "out.jsonl"
    which = {f"known-{i}": i for i in range(4)}
    text = [lines.known_line(scene.known, i, name) for name, i in which.items()]
    source.write_bytes(b"\n".join([*text, b"{", b""]))
    lines.run_job(scene, lines.Job(str(source), str(output), on_error="skip"), "a job")
    lines.check_results(scene, output, 5, which)


# ---- nothing is found where nothing is planted


def test_a_whole_engine_has_no_fault(run):
    assert run(generate) == {}
    assert run(job) == {}
    assert (
        run(lambda scene: scene.call("refused", lambda: engine.start({"kv_budget": "1KiB"}))) == {}
    )


def test_a_job_is_resumed_with_every_option():
    """A new option must be drawn, or be left out for a reason."""
    assert not OPTIONS.keys() - programs.OPTIONS.keys() - programs.APART.keys()


# ---- planted defects


def test_finds_an_error_that_is_no_refusal(run, target, monkeypatch):
    def unchecked(prompts, params, **given):
        raise OverflowError("Python int too large to convert to C long")

    def attacked(scene):
        with monkeypatch.context() as planted:
            planted.setattr(target[0], "generate", unchecked)
            generate(scene)

    assert "OverflowError" in run(attacked)["raised"]


def test_finds_a_lost_line(run, monkeypatch):
    append, count = ResultFile.append, iter(range(100))

    def forgetful(results, line):
        if next(count) != 2:
            append(results, line)

    monkeypatch.setattr(ResultFile, "append", forgetful)
    assert "of 5 lines" in run(job)["lost"]


def test_finds_an_output_that_is_taken_away(run, monkeypatch):
    assert run(engines.attack_outputs) == {}
    monkeypatch.setattr(engines, "TAKEN", (engines._truncate,))
    monkeypatch.setattr(ResultFile, "_check_place", lambda results: None)
    assert "ends well" in run(engines.attack_outputs)["lost"]


def test_finds_another_bit(run, target):
    answers = [list(each) for each in target[1].answers]
    token, logprob = answers[1][-1]
    answers[1][-1] = (token, logprob + 2**-20)
    known = dataclasses.replace(target[1], answers=tuple(answers))
    assert "log-probabilities" in run(generate, known=known)["bits"]


def test_finds_what_is_left_in_the_engine(run, target):
    llm = target[0]

    def leave(scene):
        llm.engine.add([1, 2, 3], SamplingParams(max_tokens=3))

    assert "1 requests are left" in run(leave)["engine"]
    llm.engine.abort([*llm.engine.scheduler.waiting])


def test_finds_a_file_that_is_left(run, tmp_path):
    def leave(scene):
        tempfile.mkstemp(dir=tmp_path)

    assert "a temporary file" in run(leave)["left"]
    assert not [*tmp_path.iterdir()]


def test_finds_a_slow_call(run, monkeypatch):
    monkeypatch.setattr(scene, "limit_s", lambda: 0.0)
    assert "took" in run(generate)["slow"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("plant", "what", "text"),
    [
        (plants.hang, "hung", "a call that hangs"),
        (plants.death, "died", "a call that aborts"),
        (plants.resident, "memory", "MiB resident"),
        (plants.wrong_type, "raised", "OverflowError"),
    ],
)
def test_finds_it_from_outside(plant, what, text, tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "limit_s", lambda: 10.0)
    watched = worker.Worker(None, tmp_path / "worker", plant)
    try:
        found = watched.run(0, 0)
        assert found[0].what == what, found
        assert text in found[0].text
    finally:
        watched.close()


# ---- cases


# ---- the command


def test_command(tmp_path, capsys):
    report = tmp_path / "report.jsonl"
    arguments = ["--seed", "7", "--case", "3", "--report", str(report)]
    status, shown = attack.main(arguments, plants.nothing), capsys.readouterr().out
    assert status == 0, shown
    assert "0 of 1 cases" in shown
    (line,) = map(json.loads, report.read_text().splitlines())
    assert (line["seed"], line["case"], line["faults"]) == (7, 3, [])
    assert line["kind"] == worker.kind_of(7, 3)


@pytest.mark.nightly
def test_five_minutes():
    assert attack.main(["--minutes", "5", "--seed", "1"]) == 0
