"""Every command: its help, and what it says of a wrong path, number or option: one error in two
lines at most, exit status 2, and nothing is left behind."""

from __future__ import annotations

import argparse
import importlib.util

import numpy as np
import pytest

from moejax.commands import main as cli
from moejax.commands.main import _parser

NO_ADDRESS, NO_ANSWER = (
    ("is no address of Ray", "nothing answers")
    if importlib.util.find_spec("ray")
    else ["Ray, which is not installed here: pip install"] * 2
)
"""What is wrong with --ray ADDRESS; of newer Pythons the test dependencies have no Ray."""

PERPLEXITY = ["eval", "demo", "--task", "perplexity"]
TEXT = [*PERPLEXITY, "--data", "text.txt"]
IDS = ["eval", ".", "--task", "perplexity", "--token-ids", "ids.npy"]
JOB = ["generate", "--input", "in.jsonl", "--output", "out"]
ABLATE = ["ablate", "grid.yaml"]

MISTAKES: dict[str, list[tuple[list[str], str]]] = {
    "chat": [
        (("chat", "--model", "/nowhere"), "/nowhere: no such directory"),
        (("chat", "--max-tokens", "0"), "max_tokens must be"),
        (("chat", "--expert-budget", "25"), "25%"),
    ],
    "serve": [
        (["serve", "--model", "/nowhere", "--port", "0"], "/nowhere: no such directory"),
        (["serve", "--port", "70000"], "--port must be in [0, 65535], got 70000"),
        (["serve", "--host", "nowhere.invalid"], "nowhere.invalid, port 8000, cannot be used"),
        (["serve", "--api-key", ""], "--api-key is empty"),
        (["serve", "--expert-budget", "25"], "25%"),
    ],
    "generate": [
        (["generate"], "the following arguments are required: PROMPT (or --input FILE)"),
        (["generate", "x", "--model", "/no/model"], "/no/model: no such directory"),
        (["generate", "x", "--temperature", "-1"], "temperature must be in [0, 2], got -1.0"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens must be at least 1, got 0"),
        (["generate", "x", "--memory", "lots"], "'lots' is not a size"),
        (["generate", "x", "--expert-budget", "0.25"], "'0.25' is not an expert budget"),
        (["generate", "x", "--top-k", "many"], "invalid int value: 'many'"),
        (["generate", "x", "--eviction", "mru"], "unknown eviction policy 'mru'"),
        (["generate", "x", "--expert-bugdet=25%"], "did you mean '--expert-budget'?"),
        (["generate", "x", "--device", "gpu"], "jax can use no gpu here"),
        ([*JOB, "--timeline", "t.json"], "--timeline goes with a PROMPT"),
        (["generate", "x", *JOB[1:]], "PROMPT and --input exclude each other"),
        (["generate", "--chat", *JOB[1:]], "--chat goes with a PROMPT"),
        (["generate", "x", "--system", "y"], "--system needs --chat"),
        (["generate", "--input", "f"], "--input needs --output FILE"),
        ([*JOB, "--placement", "ktransformers,defer=1"], "and a job could not be resumed"),
        ([*JOB, "--precision", "hobbit"], "precision hobbit makes outputs depend on which experts"),
        ([*JOB, "--precision", "dynaexq"], "precision dynaexq makes outputs depend on which"),
        (["generate", "x", "--overwrite"], "--output, --on-error and --overwrite need --input"),
        ([*JOB, "--on-error", "x"], "invalid choice: 'x'"),
        ([*JOB, "--kv-overflow", "recompute"], "could not be resumed"),
        ([*JOB[:2], "none.jsonl", *JOB[3:]], "cannot open"),
        (["generate", "x", "--ray", "local"], "--ray needs --input"),
        ([*JOB, "--workers", "2"], "need --ray"),
        ([*JOB, "--ray", "nobody"], NO_ADDRESS),
        ([*JOB, "--ray", "127.0.0.1:1"], NO_ANSWER),
        ([*JOB, "--ray", "local", "--workers", "0"], "at least 1"),
        ([*JOB, "--ray", "local", "--trace", "t"], "leave out --trace"),
    ],
    "eval": [
        (["eval", "--data", "x"], "required: MODEL, --task (or --compare A B)"),
        (PERPLEXITY, "needs --data FILE..., or --token-ids FILE..."),
        ([*PERPLEXITY, "--data", "none.txt"], "none.txt cannot be read: No such file"),
        ([*PERPLEXITY, "--data", "empty.txt"], "empty.txt is empty; there is nothing to score"),
        ([*PERPLEXITY, "--data", "ids.npy"], "is not UTF-8 text: byte 0 is 0x93; convert it"),
        ([*TEXT, "text.txt"], "is named twice in --data"),
        ([*TEXT, "--window", "1"], "window must be at least 2 tokens, got 1"),
        ([*TEXT, "--num-fewshot", "0"], "--num-fewshot is of lm-eval's tasks, not of perplexity"),
        (["eval", "demo", "--task", "lm-eval:"], "is neither perplexity nor lm-eval:NAME,..."),
        (["eval", "demo", "--compare", "a", "b"], "--compare reads two files of results"),
        (["eval", "--compare", "/no/a", "/no/b"], "/no/a cannot be read"),
        ([*TEXT, "--workers", "2"], "need --ray"),
        ([*TEXT, "--ray", "what"], NO_ADDRESS),
        (["eval", ".", "--task", "lm-eval:arc", "--ray", "local"], "--ray is for --task perplex"),
        ([*TEXT, "--ray", "local", "--trace", "t"], "--trace"),
        (
            [*IDS, "--every-step", "--step", "3"],
            "--every-step evaluates all steps; leave out --step",
        ),
        ([*IDS, "--until-step", "3"], "--until-step is of --every-step; add that"),
        ([*IDS, "--timeout", "0"], "--timeout is of --every-step; add that"),
    ],
    "ablate": [
        (["ablate"], "name a definition: moejax ablate CONFIG.yaml"),
        ([*ABLATE, "--new", "x"], "leave out the rest"),
        (["ablate", "grid"], "has no suffix; name a directory of results with --output"),
        (["ablate", "none.yaml"], "none.yaml cannot be read"),
        ([*ABLATE, "--workers", "2"], "need --ray"),
        ([*ABLATE, "--ray", "what"], NO_ADDRESS),
        ([*ABLATE, "--ray", "local", "--workers", "0"], "at least 1"),
    ],
    "report": [(["report", "none"], "none is no directory of results; moejax ablate")],
    "info": [
        (["info", "nowhere"], "nowhere: no such directory"),
        (["info", "demo", "--memory", "lots"], "'lots' is not a size"),
        (["info", "demo", "--memory", "1.5"], "'1.5' is not a size"),
        (["info", "demo", "--dtype", "int4"], "dtype 'int4' is unknown"),
        (["info", "demo", "--context", "5000"], "context 5000 is more than the model's 1024"),
    ],
    "convert": [
        (["convert", "/no/model", "out"], "/no/model: no such directory"),
        (["convert", "demo", "text.txt"], "already there; delete it or choose another"),
        (["convert", "demo", "out", "--dtype", "int8"], "dtype 'int8' is unknown; choose auto"),
    ],
    "quantize": [
        (["quantize", "/no/model", "out", "--versions", "int4"], "/no/model: no such directory"),
        (["quantize", "demo", "out", "--versions", "int3"], "unknown expert version 'int3'; known"),
    ],
    "trace": [
        (["trace", "info", "/no/t"], "/no/t is no trace"),
        (["trace", "info", "x", "--jsn"], "did you mean '--json'?\nmoejax trace info --help"),
        (["trace", "convert", "/no/a.npy", "t", "--experts", "4"], "cannot read /no/a.npy"),
        (["trace", "info", "/no/t"], "/no/t is no trace"),
    ],
    "calibrate": [
        (["calibrate", "/no/model"], "/no/model: no such directory"),
        (["calibrate", "demo", "--max-num-seqs", "0"], "max_num_seqs must be at least 1, got 0"),
    ],
    "plan": [
        (["plan"], "name the trace of a workload"),
        (["plan", "--dry-run"], "--dry-run needs a model"),
        (["plan", "--dry-run", "demo", "--output", "x"], "--output goes with a plan from a trace"),
        (["plan", "--dry-run", "demo", "--trace", "t"], "--trace goes with a plan from a trace"),
        (
            ["plan", "--dry-run", "demo", "--timeline", "t.json"],
            "--timeline goes with a plan from a",
        ),
        (["plan", "demo", "--trace", "t", "--memory", "4MiB"], "MODEL goes with --dry-run"),
        (["plan", "--trace", "t", "--memory", "4MiB", "--driver", "host"], "goes with --dry-run"),
        (["plan", "--trace", "t", "--memory", "4MiB", "--cells", "3"], "is uniform or marginal"),
        (["plan", "--trace", "/no/t", "--memory", "3MiB"], "/no/t is no trace"),
        (["plan", "--dry-run", "demo", "--memory", "1KiB"], "arena too small"),
        (["plan", "--dry-run", "demo", "--ops", "tpu"], "tpu"),
    ],
    "train-predictor": [
        (["train-predictor", "/no/t", "out"], "/no/t is no trace"),
        (["train-predictor", "/no/t", "out", "--predictor", "fate"], "unknown predictor 'fate'"),
    ],
    "doctor": [(["doctor", "--nope"], "unrecognized arguments: --nope\nmoejax doctor --help")],
    "check-gpu": [
        (["check-gpu", "--minutes", "0"], "--minutes must be more than 0"),
        (["check-gpu", "--minutes", "nan"], "--minutes must be more than 0"),
        (["check-gpu", "--shapes", "gpt-4"], "no shape is called 'gpt-4'"),
        (["check-gpu", "--kernels"], "there is no GPU here; nothing was checked"),
    ],
    "verify": [
        (["verify", "/no/model"], "/no/model: no such directory"),
        (["verify", "demo", "--tokens", "1"], "--tokens must be at least 2, got 1"),
        (["verify", "demo", "--text", "none.txt"], "none.txt cannot be read as text"),
        (["verify", "demo", "--expert-budget", "25"], "25%"),
    ],
    "": [
        ([], "the following arguments are required: COMMAND"),
        (["invent"], "unknown command 'invent'"),
        (["run", "demo"], "unknown command 'run'; moejax chat is a conversation"),
    ],
}
"""Command → arguments that are wrong, and a part of what is said."""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A directory with a few files, and no kept costs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("The old house stood by the sea. " * 20)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "in.jsonl").write_text('{"prompt": "The old house"}\n')
    (tmp_path / "grid.yaml").write_text('{"policies": ["lru"], "budgets": ["20%"]}')
    np.save(tmp_path / "ids.npy", np.arange(5, 200))
    return tmp_path


def run(*arguments: str) -> int | str | None:
    try:
        return cli.main(arguments)
    except SystemExit as error:
        return error.code


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    return action.choices


def test_every_command_is_here():
    assert set(commands()) == set(MISTAKES) - {""}


@pytest.mark.parametrize(
    ("arguments", "message"), [case for cases in MISTAKES.values() for case in cases]
)
def test_a_mistake_is_said_with_what_to_do(home, capsys, arguments, message):
    before = {*home.iterdir()}
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert message in " ".join(err.split()) or message in err
    assert out == "" and len(err.splitlines()) <= 2 and err.startswith("moejax")
    assert {*home.iterdir()} - {home / "cache", home / "out"} == before


@pytest.mark.parametrize("command", [*MISTAKES][:-1])
def test_help_has_every_option(capsys, command):
    flags = {name for a in commands()[command]._actions for name in a.option_strings}
    assert run(command, "--help-all" if "--help-all" in flags else "--help") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: moejax {command}")
    assert all(name in said for name in flags)
