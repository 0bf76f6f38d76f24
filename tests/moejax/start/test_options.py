"""One list of options: LLM, AsyncLLM, the command line and --config have the same names, defaults
and values, and refuse the same."""

from __future__ import annotations

import argparse
import inspect
import json
import re

import pytest

from moejax import LLM, AsyncLLM, UserError
from moejax.commands.main import main
from moejax.commands.model import add_model_options, engine_options, read_options
from moejax.serve import llm
from moejax.sizes import Share
from moejax.start.options import OPTIONS, Config
from moejax.start.other_names import OTHER_NAMES


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_model_options(made)
    return made


def test_llm_has_the_names_and_defaults_of_options():
    signature = inspect.signature(LLM)
    assert list(signature.parameters) == [*OPTIONS, "revision"]
    defaults = {p.name: p.default for p in signature.parameters.values() if p.name != "model"}
    assert Config.of("demo", **defaults) == Config.of("demo")
    kinds = {p.kind for p in signature.parameters.values() if p.name != "model"}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


@pytest.fixture
def began(monkeypatch):
    """Options that LLMs began with; nothing starts."""
    seen: list[Config] = []

    def begin(self, options):
        seen.append(options)
        raise InterruptedError

    monkeypatch.setattr(llm.LLM, "_begin", begin)
    return seen


def test_whoever_starts_a_model_passes_every_option_on(began):
    given = {"max_num_seqs": 3, "expert_budget": "25%", "memory": "4MiB", "driver": "host"}
    options = Config.of("demo", **given)
    assert (options.memory.memory, options.memory.expert_budget) == (4 << 20, Share(0.25))
    assert options == Config.of("demo").replace_options(**given)
    for start in (
        lambda: LLM("demo", **given),
        lambda: LLM.from_config(options),
        lambda: AsyncLLM("demo", **given),
        lambda: AsyncLLM(options),
    ):
        with pytest.raises(InterruptedError):
            start()
        assert began.pop() == options


def test_the_command_line_has_every_option_and_shows_those_that_people_use(capsys):
    flags = {action.dest: action for action in parser()._actions}
    shown = {name for name, option in OPTIONS.items() if option.flag}
    assert shown == flags.keys() - {"help", "help_all", "config"}
    assert all(flags[name].help and flags[name].default is None for name in shown)
    assert engine_options(parser().parse_args([])) == {}
    asked = "--max-num-seqs 4 --no-enable-prefix-caching --step 7 --memory 4MiB"
    found = engine_options(parser().parse_args(asked.split()))
    given = {"max_num_seqs": 4, "enable_prefix_caching": False, "step": 7, "memory": "4MiB"}
    assert found == given
    assert sum(option.common for option in OPTIONS.values()) == 15 and len(OPTIONS) <= 37
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main(["generate", flag])
        said = capsys.readouterr().out
        said = said.replace(",", " ")
        named = {name for name in shown if f"\n  --{name.replace('_', '-')} " in said}
        assert named == {n for n in shown if flag == "--help-all" or OPTIONS[n].common}
        assert ("in a mixture" in " ".join(said.split())) == (flag == "--help-all")


def test_a_name_that_there_never_was_is_a_type_error():
    with pytest.raises(TypeError, match="unknown option 'max_seqs', did you mean 'max_num_seqs'"):
        LLM("demo", max_seqs=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_of_other_engines_are_answered_with_what_to_use_here(name, capsys):
    flag = name if name.startswith("-") else f"--{name.replace('_', '-')}"
    if flag != name:
        with pytest.raises(TypeError, match=re.escape(f"unknown option {name!r}; ")):
            LLM("demo", **{name: 1})  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "The old house", flag, "4"])
    spell = {name: "--" + name.replace("_", "-") for name in OPTIONS}
    said = OTHER_NAMES[name].format_map(spell)
    assert f"{flag} 4; {said}\n" in capsys.readouterr().err


def test_one_of_them_in_words():
    with pytest.raises(TypeError, match="'gpu_memory_utilization'; memory is bytes for experts"):
        LLM("demo", gpu_memory_utilization=0.9)  # type: ignore[call-arg]


def test_a_model_that_is_no_path_is_refused():
    with pytest.raises(UserError, match=r"a checkpoint's directory.* not 3"):
        LLM(3)  # type: ignore[arg-type]


def test_a_file_has_options_by_name_and_the_command_line_goes_before_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("policy: {cells: [9, 8, 6, 5]}\nmemory: 4MiB\nruntime:\n  max_num_seqs: 4\n")
    args = parser().parse_args(["--config", str(file), "--memory", "5MiB"])
    found = engine_options(args)
    assert found == {
        "max_num_seqs": 4,
        "memory": "5MiB",
        "cells": [9, 8, 6, 5],
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
    ("cache_aware_routing", "half", "cache_aware_routing must be a number, got 'half'"),
    ("store", "disk", "unknown store 'disk'; known: memory, shared, file"),
    ("enable_prefix_caching", "no", "enable_prefix_caching must be true or false, got 'no'"),
    ("kv_overflow", "drop", "unknown kv_overflow 'drop'; known: swap, recompute"),
    ("driver", "train", "unknown driver 'train'; known: device, host, stream"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSALS)
def test_every_way_refuses_the_same(name, value, message, tmp_path, capsys):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({name: value}))
    given = {name: value}
    ways = (
        lambda: Config.of("demo", **given),
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
        ("max_tokens: 3", "unknown option 'max_tokens'; known: step, name_map, dtype"),
        ("memory: [1]", "is not a size"),
        ("memory: {max_num_seqs: 4}", "unknown option 'max_num_seqs'; known: memory, exper"),
        ("memory: {kv_budget: 4}\nkv_budget: 5", "has kv_budget twice"),
        ("- 1", "must be a mapping of options, not list"),
        ("a: [", "is not valid YAML"),
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
