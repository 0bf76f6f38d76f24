"""`moejax generate` and what every command shares: what goes where, exit status, interrupts."""

import io
import json
import re
import shutil
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

import moejax
from moejax.commands import main as cli
from moejax.requests.sampling_params import SamplingParams
from moejax.requests.tokenizer import load_tokenizer
from tests.conftest import PACKAGED_DEMO
from tests.moejax.commands.test_summary import STATS
from tests.moejax.engine.scenes import LIMITS, open_llm


class FakeLLM:
    """What the command line uses of `moejax.LLM`."""

    pieces: tuple = (" old", " house")
    raises: BaseException | None = None
    tokenizer: object = "a tokenizer"

    calls: dict

    def __init__(self, model, **options):
        type(self).calls = {"model": model, "options": options, "closed": False}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.calls["closed"] = True

    def stream(self, prompt, sampling_params):
        self.calls |= {"prompt": prompt, "params": sampling_params}
        yield from self.pieces
        if self.raises:
            raise self.raises

    def get_default_sampling_params(self):
        return SamplingParams(top_k=20, temperature=0.6)

    @property
    def engine(self):
        return SimpleNamespace(tokenizer=self.tokenizer)

    def stats(self):
        return STATS


@pytest.fixture
def fake(monkeypatch):
    class LLM(FakeLLM):
        pass

    monkeypatch.setattr(moejax, "LLM", LLM, raising=False)
    return LLM


def test_text_goes_to_stdout_and_the_summary_to_stderr(fake, capsys):
    assert cli.main(["generate", "The"]) == 0
    out, err = capsys.readouterr()
    assert out == " old house\n"
    assert err == (
        "\n3 + 128 tokens; first after 51.2 ms, then 2.51 ms each; hit rate 75.0%, 48 MiB moved "
        "(--verbose says more)\n"
    )
    assert cli.main(["generate", "The", "--verbose"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("\ntokens   3 prompt, 128 generated") and err.endswith(
        "experts (1.5 MiB)\n"
    )
    assert fake.calls == {
        "model": "demo",
        "options": {"progress": True},
        "closed": True,
        "prompt": "The",
        "params": SamplingParams(top_k=20, temperature=0.6, max_tokens=128),
    }


def test_options_reach_the_engine_and_the_request(fake):
    options = (
        "--model /m --max-tokens 5 --temperature 0 --top-k 7 --top-p 0.9 --min-p 0.1 --seed 3 "
        "--ignore-eos --memory 16GiB --quiet"
    )
    assert cli.main(["generate", "x", *options.split()]) == 0
    assert fake.calls["model"] == "/m"
    assert fake.calls["options"] == {"progress": False, "memory": "16GiB"}
    assert fake.calls["params"] == SamplingParams(
        temperature=0, top_k=7, top_p=0.9, min_p=0.1, seed=3, max_tokens=5, ignore_eos=True
    )


def test_a_chat_is_messages_in_place_of_a_prompt(fake, tmp_path):
    model = shutil.copytree(PACKAGED_DEMO, tmp_path / "model")
    template = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}{{ more }}"
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    options = ["--chat", "--system", "Be short.", "--chat-template-kwargs", '{"more": 5}']
    assert cli.main(["generate", "x", "--model", str(model), *options]) == 0
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    assert tokenizer.decode(fake.calls["prompt"]) == "system=Be short.;user=x;5"


def test_json_is_one_object_on_stderr(fake, capsys):
    assert cli.main(["generate", "The", "--json"]) == 0
    out, err = capsys.readouterr()
    assert out == " old house\n"
    assert json.loads(err) == STATS
    assert fake.calls["options"] == {"progress": False}


@pytest.mark.parametrize(
    ("pieces", "text"), [((), "\n"), (("a\n",), "a\n"), (("a\n", ""), "a\n"), (("", "a"), "a\n")]
)
def test_stdout_ends_with_one_newline(fake, capsys, pieces, text):
    fake.pieces = pieces
    assert cli.main(["generate", "The", "--quiet"]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(("text", "prompt"), [("a\nb\n", "a\nb"), ("a\n\n", "a\n"), ("é", "é")])
def test_a_dash_reads_standard_input(fake, monkeypatch, text, prompt):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8"))
    assert cli.main(["generate", "-"]) == 0
    assert fake.calls["prompt"] == prompt


def test_a_prompt_that_is_not_text_is_refused(fake, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8"))
    for argument in ("-", "\udcff"):
        assert cli.main(["generate", argument]) == 2
        assert "moejax: error: the prompt is not valid UTF-8" in capsys.readouterr().err


def test_a_programs_mistake_keeps_its_traceback(fake):
    fake.raises = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["generate", "The"])
    assert fake.calls["closed"]


def test_a_model_without_tokenizer_is_refused(fake, capsys):
    fake.tokenizer = None
    assert cli.main(["generate", "The", "--model", "/m"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("moejax: error: /m has no tokenizer, which")
    assert "name a directory with its tokenizer.json (--tokenizer DIR)" in said


def test_ctrl_c_keeps_the_text_so_far(fake, capsys):
    fake.raises = KeyboardInterrupt()
    assert cli.main(["generate", "The"]) == 130
    assert capsys.readouterr() == (" old house\n", "moejax: interrupted\n")
    assert fake.calls["closed"]


def _run(
    *arguments,
    code="import sys, moejax.commands.main; sys.exit(moejax.commands.main.main())",
    **options,
):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def test_a_closed_stdout_ends_quietly():
    code = """
        import os, sys, moejax, moejax.commands.main
        from tests.moejax.commands.test_cli import FakeLLM
        moejax.LLM = type("LLM", (FakeLLM,), {"pieces": ("x" * 1000,) * 1000})
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
        sys.exit(moejax.commands.main.main(["generate", "The"]))
    """
    result = _run(code=code)
    assert (result.returncode, result.stderr) == (141, "")


def test_version(monkeypatch, capsys):
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"1.2.3 of {name}")
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == "moejax 1.2.3 of moejax\n"


def test_a_mistyped_command_is_answered_with_the_nearest(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["generat", "x"])
    assert "unknown command 'generat', did you mean 'generate'?; known: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", "generate", "chat", "serve"])
def test_help_is_a_page_and_help_all_has_every_option(command, capsys):
    shown = []
    for flag in ("--help", "--help-all") if command else ("--help",):
        with pytest.raises(SystemExit):
            cli.main([*command.split(), flag])
        shown.append(capsys.readouterr().out)
    assert len(shown[0].splitlines()) <= 66  # a printed page's lines
    assert not command or ("--swap-space" in shown[1] and "--swap-space" not in shown[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-tokens", "5000"], "max_model_len is 1024; shorten the prompt, lower max_tokens"),
        (["--chat"], "demo has no chat template"),
        (["--sampling", '{"allowed_token_ids": [9999]}'], "9999 in allowed_token_ids is outside"),
        (["--max-model-len", "64"], "+ max_tokens (128) is"),
    ],
)
def test_a_request_is_checked_before_weights_are_read(monkeypatch, capsys, options, words):
    monkeypatch.setattr(moejax, "LLM", None, raising=False)
    assert cli.main(["generate", "The old house", *options]) == 2
    assert words in capsys.readouterr().err


def test_a_tokenizer_is_looked_for_before_weights_are_read(monkeypatch, capsys, demo_dir, tmp_path):
    monkeypatch.setattr(moejax, "LLM", None, raising=False)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(demo_dir / name, tmp_path)
    assert cli.main(["generate", "The", "--model", str(tmp_path)]) == 2
    assert f"moejax: error: {tmp_path} has no tokenizer, which" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "never"),
    [
        ("main(['generate', '--help'])", {"jax", "numpy", "flax", "rich"}),
        pytest.param(
            "from moejax import LLM, SamplingParams",
            {"tokenizers", "orbax"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_light_stays_light(code, never):
    code = f"""
        import sys
        from moejax.commands.main import main
        try:
            {code}
        finally:
            heavy = {{"torch", "transformers", *{never}}} & set(sys.modules)
            assert not heavy, heavy
    """
    result = _run(code=code)
    assert (result.returncode, result.stderr) == (0, "")


def test_several_texts_with_their_tokens(capsys):
    """--n, --logprobs, --stop and --sampling say what LLM.generate says."""
    asked = ["--max-tokens", "9", "--n", "2", "--logprobs", "2", "--stop", "zzz", "--stop", ","]
    asked += ["--seed", "4", "--sampling", '{"bad_words": [" the"], "seed": 3}']
    small = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    assert cli.main(["generate", "The old house", *asked, *small, "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    with open_llm() as llm:
        params = SamplingParams(
            max_tokens=9, n=2, logprobs=2, stop=["zzz", ","], bad_words=[" the"], seed=4
        )
        outputs = llm.generate(["The old house"], params, use_tqdm=False)[0].outputs
    assert [line for line in lines if line.startswith("==")] == ["== 1 of 2", "== 2 of 2"]
    tokens = [line for line in lines if re.match(r" +-?\d+\.\d{4}  '", line)]
    assert len(tokens) == sum(len(one.token_ids) for one in outputs)
    first = outputs[0].logprobs[0][outputs[0].token_ids[0]]
    assert tokens[0].split()[0] == f"{first.logprob:.4f}" and repr(first.decoded_token) in tokens[0]
    assert "\n".join(lines).startswith(f"== 1 of 2\n{outputs[0].text}\n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "--sampling is no JSON ("),
        ("[1]", "--sampling is a JSON object, not "),
        ('{"bad_word": 1}', "--sampling: unknown field 'bad_word', did you mean 'bad_words'?"),
    ],
)
def test_wrong_fields_of_sampling_are_refused(capsys, given, message):
    assert cli.main(["generate", "The", "--sampling", given]) == 2
    assert capsys.readouterr().err.startswith(f"moejax: error: {message}")


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_model_may_stand_without_its_option(command):
    parse = cli._parser().parse_args
    found = [parse([command, *given]).model for given in ([], ["m"], ["--model", "m"])]
    assert found == ["demo", "m", "m"]


def test_an_import_takes_no_dialect_of_gpus_along():
    command = [sys.executable, "-c", "import sys; from moejax import LLM; print(*sys.modules)"]
    modules = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "jax" in modules
    assert not {"jax._src.pallas.triton", "jax._src.pallas.mosaic_gpu.core"} & {*modules}
