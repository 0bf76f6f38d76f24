"""``moejax chat``: standard input is a conversation."""

import io
import json
import re
import shutil

import pytest
from rich.console import Console

from moejax import LLM, SamplingParams
from moejax.commands import chat
from moejax.commands.main import main
from tests.conftest import PACKAGED_DEMO

MODEL = str(PACKAGED_DEMO)
LIMITS = {"device": "cpu", "max_num_seqs": 1, "max_num_batched_tokens": 256, "max_model_len": 512}
OPTIONS = ("--model", MODEL, "--temperature", "0", "--max-tokens", "24")
OPTIONS += tuple(f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items())
SUM = "What is 3 times 14?\n"


@pytest.fixture
def talk(monkeypatch, capsys):
    def run(text: str, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        status = main(["chat", "--quiet", *OPTIONS, *options])
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, progress=False, **LIMITS) as llm:
        yield llm


@pytest.fixture(scope="module")
def answer(llm):
    params = SamplingParams(temperature=0, max_tokens=24)
    messages = [{"role": "user", "content": SUM.rstrip()}]
    return f"{llm.chat(messages, params)[0].outputs[0].text}\n"


def test_every_answer_is_to_the_conversation_so_far(talk, llm):
    status, out, err = talk("What is 3 times 14?\nAnd 2 plus 2?\n", "--expert-budget", "25%")
    assert (status, err) == (0, "")
    messages = []
    params = SamplingParams(temperature=0, max_tokens=24)
    for line in ("What is 3 times 14?", "And 2 plus 2?"):
        messages.append({"role": "user", "content": line})
        answer = llm.chat(messages, params)[0].outputs[0].text
        messages.append({"role": "assistant", "content": answer})
    assert out == "".join(f"{m['content']}\n" for m in messages if m["role"] == "assistant")
    assert "42" in out


def test_generate_answers_one_message(answer, capsys):
    assert main(["generate", "What is 3 times 14?", "--chat", "--quiet", *OPTIONS]) == 0
    assert capsys.readouterr().out == answer


def test_commands_within_a_conversation(talk, answer):
    lines = ["word " * 600, SUM.rstrip(), "/clear", "What is \\", "3 times 14?", "/stats"]
    _, out, err = talk("\n".join([*lines, "/what now", "/exit", SUM]))
    assert "/clear begins anew" in err  # after what was too long
    assert out.startswith(answer) and out.count("\n") >= 2 * answer.count("\n")
    assert "hit rate" in err and "/what is none of /clear, /stats and /exit" in err


def test_an_answer_ends_with_the_context_unless_a_number_was_given(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 3 times 14?\n"))
    few = [option for option in OPTIONS if option not in ("--max-tokens", "24")]
    assert main(["chat", "--quiet", *few, "--max-model-len", "64"]) == 0
    out, err = capsys.readouterr()
    assert "42" in out and err == ""


def test_ctrl_c_stops_an_answer_and_keeps_what_came(capsys):
    class Interrupted:
        def stream(self, prompt, params, session_id):
            yield "Once "
            yield "upon"
            raise KeyboardInterrupt

    talk = chat.Talk(Interrupted(), SamplingParams())  # type: ignore[arg-type]
    assert talk.answer(chat.PlainWriter()) == "Once upon"
    assert capsys.readouterr().out == "Once upon\n"


def test_an_answer_is_shown_as_markdown_whole_and_in_order():
    text = "# Plan\n\nIt is **bold**.\n\n```python\na = 1\n\nb = 2\n```\n\n1. one\n2. two\n\nend"
    shown = []
    for size in (1, 7, len(text)):
        out = io.StringIO()
        writer = chat.MarkdownWriter(Console(file=out, width=60, force_terminal=False))
        with writer:
            for at in range(0, len(text), size):
                writer.write(text[at : at + size])
        shown.append(out.getvalue())
        words = " ".join(re.findall(r"\w+", out.getvalue()))
        assert words == "Plan It is bold a 1 b 2 1 one 2 two end"
    assert "**" not in shown[0] and "```" not in shown[0]


@pytest.mark.parametrize("fence", ["````", "~~~~~", "  ````"])
def test_a_block_of_code_may_hold_fences_and_empty_lines(fence):
    block = f"{fence}md\n```python\n\na\n```\n\n~~~\n\n"
    assert chat.end_of_parts(f"one\n\n{block}") == len("one\n\n")
    whole = f"{block}{fence}\n\n"
    whole += "```inline``` code\n\n"
    assert chat.end_of_parts(f"{whole}b") == len(whole)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("one\n", ("one", False)),
        ("one\\\ntwo\n", ("one\ntwo", False)),
        ('"""one\n\ntwo"""\n', ("one\n\ntwo", True)),
        ('"""one"""\n', ("one", True)),
        ('"""/exit\n"""\n', ("/exit", True)),
        ('"""one\n', ("one", True)),
        ("", None),
    ],
)
def test_messages_of_several_lines(monkeypatch, typed, message):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert chat.read_message(prompts=False) == message


def test_values_reach_the_chat_template(tmp_path, talk, answer):
    """A template that switches thinking off, as Qwen's does."""
    model = shutil.copytree(PACKAGED_DEMO, tmp_path / "model")
    file = model / "tokenizer_config.json"
    config = json.loads(file.read_text())
    off = "{% if enable_thinking is false %}3 times 14 is{% endif %}"
    file.write_text(json.dumps(config | {"chat_template": config["chat_template"] + off}))
    options = ("--model", str(model), "--chat-template-kwargs", '{"enable_thinking": false}')
    assert talk(SUM, *options)[1] != answer
    status, _, err = talk(SUM, "--chat-template-kwargs", "5")
    assert status == 2 and "--chat-template-kwargs is a JSON object, not 5" in err


def test_a_model_without_a_chat_template_is_refused(tmp_path, talk):
    plain = shutil.copytree(PACKAGED_DEMO, tmp_path / "plain")
    (plain / "tokenizer_config.json").unlink()
    status, _, err = talk("hello\n", "--model", str(plain))
    assert status == 2 and "has no chat template; `moejax generate`" in err
