"""One list of options: LLM, AsyncLLM, the command line and --config have the same names, defaults
and values, and refuse the same."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json

import pytest

from moejax import LLM, AsyncLLM, UserError
from moejax.commands.main import main
from moejax.commands.model import add_model_options, add_options, engine_options, read_options
from moejax.serve import llm
from moejax.sizes import Share
from moejax.start.options import Options, descriptions


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_model_options(made)
    add_options(made, "trace")
    return made


def test_llm_has_the_names_and_defaults_of_options():
    signature = inspect.signature(LLM)
    names = [field.name for field in dataclasses.fields(Options)]
    assert list(signature.parameters) == names
    defaults = {p.name: p.default for p in signature.parameters.values() if p.name != "model"}
    assert Options("demo", **defaults) == Options("demo")
    kinds = {p.kind for p in signature.parameters.values() if p.name != "model"}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


@pytest.fixture
def began(monkeypatch):
    """Options that LLMs began with; nothing starts."""
    seen: list[Options] = []

    def begin(self, options):
        seen.append(options)
        raise InterruptedError

    monkeypatch.setattr(llm.LLM, "_begin", begin)
    return seen


def test_whoever_starts_a_model_passes_every_option_on(began):
    given = {"max_num_seqs": 3, "expert_budget": "25%", "memory": "4MiB", "driver": "host"}
    options = Options("demo", **given)
    assert (options.memory, options.expert_budget) == (4 << 20, Share(0.25))
    for start in (
        lambda: LLM("demo", **given),
        lambda: LLM.from_options(options),
        lambda: AsyncLLM("demo", **given),
        lambda: AsyncLLM(options),
    ):
        with pytest.raises(InterruptedError):
            start()
        assert began.pop() == options


def test_the_command_line_has_every_option_with_a_group():
    flags = {action.dest: action for action in parser()._actions}
    shown = {name for name, option in descriptions().items() if option.group is not None}
    assert shown == flags.keys() - {"help", "config"}
    assert all(flags[name].help and flags[name].default is None for name in shown)
    assert engine_options(parser().parse_args([])) == {}
    asked = "--max-num-seqs 4 --no-enable-prefix-caching --hi-share 0.5 --step 7 --memory 4MiB"
    found = engine_options(parser().parse_args(asked.split()))
    assert found == {
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "hi_share": 0.5,
        "step": 7,
        "memory": "4MiB",
    }


def test_a_model_that_is_no_path_is_refused():
    with pytest.raises(UserError, match=r"a checkpoint's directory.* not 3"):
        LLM(3)  # type: ignore[arg-type]


def test_a_file_has_options_by_name_and_the_command_line_goes_before_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("max_num_seqs: 4\nmemory: 4MiB\ncells: [9, 8, 6, 5]\nprefill_waves: 2\n")
    args = parser().parse_args(["--config", str(file), "--memory", "5MiB"])
    found = engine_options(args)
    assert found == {
        "max_num_seqs": 4,
        "memory": "5MiB",
        "cells": [9, 8, 6, 5],
        "prefill_waves": 2,
    }
    file.write_text('{"expert_budget": 3, "enable_prefix_caching": false}')
    assert read_options(file) == {"expert_budget": 3, "enable_prefix_caching": False}


REFUSALS = [
    ("memory", "lots", "'lots' is not a size"),
    ("kv_budget", "-1MiB", "'-1MiB' is not a size"),
    ("expert_budget", 0.25, "0.25 is not an expert budget"),
    ("expert_budget", "120%", "'120%' is more than all experts"),
    ("max_num_seqs", 0, "max_num_seqs must be at least 1, got 0"),
    ("max_num_seqs", "four", "max_num_seqs must be a whole number, got 'four'"),
    ("hi_share", "half", "hi_share must be a number, got 'half'"),
    ("enable_prefix_caching", "no", "enable_prefix_caching must be true or false, got 'no'"),
    ("kv_overflow", "drop", "kv_overflow is one of swap, recompute, not 'drop'"),
    ("driver", "train", "driver 'train' does not exist; use one of device, host"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSALS)
def test_every_way_refuses_the_same(name, value, message, tmp_path, capsys):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({name: value}))
    given = {name: value}
    ways = (
        lambda: Options("demo", **given),
        lambda: LLM("demo", **given),
        lambda: AsyncLLM("demo", **given),
    )
    for way in ways:
        with pytest.raises(UserError) as caught:
            way()
        assert message in str(caught.value)
    assert main(["generate", "x", "--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert str(file) in said and message in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_tokens: 3", "has the unknown option 'max_tokens'; known: step, name_map, dtype"),
        ("memory: [1]", "is not a size"),
        ("- 1", "must be a mapping of options, not list"),
        ("a: [", "is no YAML"),
        ("memory: &m 1GiB\nkv_budget: *m", "aliases (*name) are not read"),
        (f"cells: [{'1, ' * 100_000}]", "characters of YAML; at most"),
    ],
)
def test_a_file_that_means_nothing_is_refused(text, message, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert main(["generate", "x", "--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert str(file) in said and message in said
    assert main(["generate", "x", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml cannot be read" in capsys.readouterr().err
