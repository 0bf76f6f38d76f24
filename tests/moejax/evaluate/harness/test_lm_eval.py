"""lm-evaluation-harness runs tasks with moejax, from either command line, as with its own model."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import runpy
import sys
import tomllib

import pytest

from moejax import LLM
from moejax.commands.main import main
from moejax.errors import UserError

pytestmark = [pytest.mark.torch, pytest.mark.slow]  # the harness's own model needs torch
TRI = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 256}
LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}

YAML = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
{more}
"""

MORE = {
    "made_choice": """
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{c}}"
doc_to_target: 0
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "made_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{q}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "made_texts": """
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
generation_kwargs: {until: [" and", "."], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, shared):
    """A directory with a task of each kind, of the held-out texts."""
    directory = tmp_path_factory.mktemp("tasks")
    words = (shared / "corpora" / "text.txt").read_text()
    sums = (shared / "corpora" / "math.txt").read_text()
    documents = {
        "made_choice": [
            {"q": words[i : i + 60 + 9 * i], "c": [words[i + 60 + 9 * i :][:20], " the", sums[:30]]}
            for i in (0, 3, 7)
        ],
        "made_rolling": [{"q": words[:900]}, {"q": sums[:60]}],
        "made_texts": [{"q": sums[300 * i :][:80], "a": "x"} for i in range(3)],
    }
    for name, more in MORE.items():
        file = directory / f"{name}.jsonl"
        file.write_text("".join(json.dumps(one) + "\n" for one in documents[name]))
        (directory / f"{name}.yaml").write_text(YAML.format(name=name, file=file, more=more))
    return directory


def answers(samples):
    """What the model said to each document, by task."""
    return {task: [one["resps"] for one in found] for task, found in samples.items()}


@pytest.fixture(scope="module")
def of_transformers(tasks, shared):
    """The harness's own model, in float32, one document at a time."""
    import torch
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = HFLM(
            pretrained=str(shared / "models" / "tri"),
            dtype="float32",
            device="cpu",
            batch_size=1,
            max_length=128,
        )
        model.model.generation_config.max_new_tokens = None  # would go before max_gen_toks
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        return simple_evaluate(model=model, tasks=[*MORE], task_manager=manager, log_samples=True)
    finally:
        torch.set_num_threads(threads)


def test_both_command_lines_agree_with_the_harness_and_with_each_other(
    of_transformers, tasks, shared, tmp_path, capsys, monkeypatch
):
    """A quarter of the experts from the harness's command line, all of them from moejax's."""
    import lm_eval.tasks
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.utils import sanitize_list

    options = ",".join(f"{name}={value}" for name, value in TRI.items())
    pretrained = f"pretrained={shared / 'models' / 'tri'},expert_budget=25%,{options}"
    asked = ["--model", "moejax", "--model_args", pretrained, "--include_path", str(tasks)]
    asked += ["--tasks", ",".join(MORE), "--log_samples", "--output_path", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *asked])
    with_ours = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    with monkeypatch.context() as patch:  # reading all that the harness has takes a minute
        patch.setattr(lm_eval.tasks, "TaskManager", with_ours)
        # 0.4.13 finds no plugins: docs/how-to/evaluation.md names this door.
        runpy.run_module("moejax.evaluate.harness", run_name="__main__")
    capsys.readouterr()
    (file,) = (tmp_path / "out").rglob("results_*.json")
    quarter = json.loads(file.read_text())["results"]
    said = {}
    for name in MORE:
        (file_of_task,) = file.parent.glob(f"samples_{name}_*")
        said[name] = [json.loads(one)["resps"] for one in file_of_task.read_text().splitlines()]

    kept = {}
    monkeypatch.setattr(
        "moejax.evaluate.harness.tasks.simple_evaluate",
        lambda **given: kept.setdefault("found", simple_evaluate(**given)),
    )
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TRI.items()]
    asked = ["eval", str(shared / "models" / "tri"), "--task", f"lm-eval:{','.join(MORE)}"]
    asked += ["--include-path", str(tasks), "--output", str(tmp_path / "whole.jsonl"), "--json"]
    assert main([*asked, *flags]) == 0
    out = capsys.readouterr().out
    whole = json.loads(out)
    assert whole["task"] == f"lm-eval:{','.join(MORE)}" and whole["versions"]["lm_eval"]

    # Every bit the same at both budgets.
    assert json.loads(json.dumps(whole["results"])) == quarter
    in_text = {  # as in the harness's files
        name: sanitize_list(found) for name, found in answers(kept["found"]["samples"]).items()
    }
    assert json.loads(json.dumps(in_text)) == said
    # And as the harness's own model to 1e-3.
    ours, theirs = answers(kept["found"]["samples"]), answers(of_transformers["samples"])
    assert ours["made_texts"] == theirs["made_texts"]
    assert any(resp != [""] for resp in (one[0] for one in ours["made_texts"]))
    for task in ("made_choice", "made_rolling"):
        mine, other = (
            [number for one in given[task] for number in numbers(one)] for given in (ours, theirs)
        )
        assert mine == pytest.approx(other, abs=1e-3) and len(mine) > 1
    for task, figures in of_transformers["results"].items():
        for name, value in figures.items():
            if isinstance(value, float) and "stderr" not in name:
                assert whole["results"][task][name] == pytest.approx(value, rel=1e-3), name
    units = json.loads((tmp_path / "whole.jsonl").read_text())["units"]
    assert [(one["name"], one["figure"], len(one["keys"])) for one in units] == [
        ("made_choice", "acc", 3),
        ("made_choice", "acc_norm", 3),
        ("made_rolling", "bits/word", 2),
        ("made_rolling", "bits/byte", 2),
        ("made_texts", "exact_match", 3),
    ]


def numbers(value):
    """Every number in nested lists, also those that the harness wrote as text."""
    if isinstance(value, list | tuple):
        return [number for one in value for number in numbers(one)]
    return [float(value)]


@pytest.fixture(scope="module")
def lm():
    from moejax.evaluate.harness.harness_model import MoejaxLM

    with LLM("demo", progress=False, **LIMITS) as llm:
        yield MoejaxLM(llm)


def request(kind, *arguments):
    from lm_eval.api.instance import Instance

    return Instance(kind, {}, arguments, 0)


def test_long_contexts_are_cut_from_the_left(lm):
    text = "one two three four five six seven eight nine ten " * 60
    kwargs = {"max_gen_toks": 8}
    room = lm.max_length - 8
    ids = lm.tok_encode(text)
    assert len(ids) > room
    (found,) = lm.generate_until([request("g", text, kwargs)], disable_tqdm=True)
    (twin,) = lm.generate_until([request("g", lm.tokenizer.decode(ids[-room:]), kwargs)], True)
    assert found == twin
    ((likely, _),) = lm.loglikelihood([request("l", text, "eleven")], disable_tqdm=True)
    assert likely < 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beams": 4}, r"no argument num_beams=4 of generation; a task may give until"),
        ({"max_gen_toks": 256}, "max_gen_toks 256 leaves no room for a prompt in a max_model_len"),
    ],
)
def test_arguments_that_the_engine_has_not_are_refused(lm, kwargs, message):
    with pytest.raises(UserError, match=message):
        lm.generate_until([request("g", "The", kwargs)], disable_tqdm=True)
    assert lm.llm.engine.idle


def test_a_continuation_without_room_for_context_is_refused(lm):
    with pytest.raises(UserError, match="leaves no room for context in a max_model_len of 256"):
        lm.loglikelihood([request("l", "The", " old house" * 300)], disable_tqdm=True)
    assert lm.llm.engine.idle


def test_chats_are_written_by_the_template_and_without_system_where_it_refuses_them(
    lm, monkeypatch
):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    monkeypatch.setattr(lm.tokenizer, "chat_template", None)
    with pytest.raises(UserError, match="demo has no chat template"):
        lm.apply_chat_template(messages)
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    monkeypatch.setattr(lm.tokenizer, "chat_template", template)
    assert lm.apply_chat_template(messages) == "<system>Be short.<user>Hi<assistant>"
    answer = [*messages, {"role": "assistant", "content": "He"}]
    assert lm.apply_chat_template(answer, False) == "<system>Be short.<user>Hi<assistant>He"
    assert lm.chat_template(True) == template
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    monkeypatch.setattr(lm.tokenizer, "chat_template", refusing + template)
    assert lm.apply_chat_template(messages) == "<user>Hi<assistant>"
    assert re.fullmatch(r"[^/]+", lm.tokenizer_name)


def test_the_harness_finds_the_model_by_its_entry_point(repository):
    """As its releases after 0.4.13 do: an entry point in place of the class, loaded when asked."""
    from lm_eval.api.registry import Registry

    from moejax.evaluate.harness.harness_model import MoejaxLM

    declared = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    value = declared["entry-points"]["lm_eval.models"]["moejax"]
    models = Registry("model")
    models.register(
        "moejax", target=importlib.metadata.EntryPoint("moejax", value, "lm_eval.models")
    )
    assert models.get("moejax") is MoejaxLM


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"expert_bugdet": "25%"}, "model_args of moejax: .*expert_bugdet"),
        ({"dtype": "float7"}, "dtype"),
        ({"device": "tpu"}, "jax can use no tpu here"),
    ],
)
def test_model_args_that_are_wrong_are_refused(arguments, message):
    from moejax.evaluate.harness.harness_model import MoejaxLM

    with pytest.raises(UserError, match=message):
        MoejaxLM("demo", device=arguments.pop("device", "cuda:0"), **arguments)


def test_an_llm_has_its_options_already_and_needs_a_tokenizer(lm, monkeypatch):
    from moejax.evaluate.harness.harness_model import MoejaxLM

    with pytest.raises(UserError, match="an LLM has its options already"):
        MoejaxLM(lm.llm, max_length=64)
    monkeypatch.setattr(lm.llm.engine, "tokenizer", None)
    with pytest.raises(UserError, match="demo has no tokenizer, and the harness's tasks are text"):
        MoejaxLM(lm.llm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "lm-eval:no_such_task"], "lm-eval has no task no_such_task"),
        (["--task", "lm-eval:arc_easy", "--include-path", "/no"], "/no is no directory with files"),
        (
            ["--task", "lm-eval:arc_easy", "--window", "3"],
            "--window is of perplexity, not of tasks",
        ),
    ],
)
def test_tasks_that_are_not_there_are_refused_before_anything_loads(
    capsys, monkeypatch, options, message
):
    from moejax.evaluate.harness import tasks

    few = functools.partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", few)
    assert main(["eval", "/no/model", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_task_without_its_data_is_refused_by_name(tmp_path):
    from moejax.evaluate.harness.tasks import task_manager

    text = "task: mine\ndataset_path: json\ndataset_kwargs: {data_files: /no/file.json}\n"
    text += "output_type: loglikelihood\ndoc_to_text: x\ndoc_to_target: x\n"
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(
        UserError, match=r"lm-eval cannot load the task mine: .FileNotFoundError: Unable"
    ):
        task_manager(["mine"], tmp_path).load(["mine"])
