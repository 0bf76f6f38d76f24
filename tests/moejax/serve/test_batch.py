"""File jobs: formats, resumption, refusals. The model is a fake, except at the end."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import re
import resource
import shutil
import sys
import time
from contextlib import contextmanager

import pytest

import moejax
from moejax import SamplingParams, UserError
from moejax.commands import main as cli
from moejax.progress import count_progress
from moejax.requests.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from moejax.requests.request import GenerationRequest
from moejax.serve.batch import result_file
from moejax.serve.batch.job import MOST_MESSAGE, Job, open_job
from moejax.serve.batch.lines import MOST_LINE, derived_seed, read_lines
from tests.moejax.commands.test_summary import STATS


def text_of(prompt) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


def output_of(request: GenerationRequest, history: str = "") -> RequestOutput:
    """A function of the request and of its session so far, as real results are."""
    params = request.sampling_params
    sequences = []
    for index in range(params.n):
        logprobs = None
        if params.logprobs is not None:
            ranked = {5: Logprob(-0.5, 1, "é"), 6: Logprob(float("-inf"), 2, None)}
            logprobs = [{6: ranked[6], 5: ranked[5]}, {6: Logprob(-1.0, 1, "b")}]
        sequences.append(
            CompletionOutput(
                index=index,
                text=f"{text_of(request.prompt)}+{params.seed}{history}",
                token_ids=[5, 6],
                cumulative_logprob=None if logprobs is None else -1.5,
                logprobs=logprobs,
                finish_reason="length",
            )
        )
    return RequestOutput(
        request_id="7",
        prompt=None,
        prompt_token_ids=[1, 2, 3],
        outputs=sequences,
        finished=True,
        metrics=RequestMetrics(10.0, scheduled_s=10.25, first_token_s=10.5, finished_s=12.0),
    )


class FakeLLM:
    """What a job uses of an LLM. Finishes in another order than asked; a few are in flight."""

    interrupt_after: int | None = None
    made = 0

    def __init__(self, model="demo", **options):
        type(self).made += 1
        self.chosen = {"ops": options.get("ops", "those of now")}
        self.generated_tokens = 0
        self.sessions: dict[str, str] = {}
        self.ended: list[str] = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def stats(self):
        return STATS

    def generate_each(self, requests):
        yielded, order = itertools.count(), random.Random(1)
        while batch := [(r, self.answer(r)) for r in itertools.islice(requests, 3)]:
            order.shuffle(batch)
            for pair in batch:
                if next(yielded) == self.interrupt_after:
                    raise KeyboardInterrupt
                yield pair

    def answer(self, request):
        if text_of(request.prompt) == "too long":
            return UserError("prompt (9 tokens) + …; shorten the prompt")
        history = ""
        if request.session_id is not None:
            history = self.sessions.get(request.session_id, "") + f"|{request.prompt}"
            self.sessions[request.session_id] = history
        return output_of(request, history)

    def end_session(self, session_id):
        if self.sessions.pop(session_id, None) is None:
            raise UserError(f"there is no session {session_id!r}")
        self.ended.append(session_id)


@pytest.fixture
def fake(monkeypatch):
    class Fake(FakeLLM):
        made = 0

    monkeypatch.setattr(moejax, "LLM", Fake, raising=False)
    return Fake


def write(path, *lines) -> str:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return str(path)


def run(source, output, **options):
    """Runs a job with a fake model; returns (the open job, what it warned of)."""
    said: list[str] = []
    with open_job(Job(str(source), str(output), **options)) as job:
        job.run(FakeLLM(), warn=said.append)
    return job, said


def records(path) -> dict:
    """id -> record without metrics; every line is whole and every id there once."""
    found = {}
    for raw in path.read_bytes().splitlines(keepends=True):
        assert raw.endswith(b"\n")
        record = json.loads(raw)
        record.pop("metrics", None)
        id = record.get("custom_id", record["id"])
        assert id not in found
        found[id] = record
    return found


def openai(custom_id, body, url="/v1/completions"):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


CHAT = "/v1/chat/completions"
PROMPTS = [{"id": f"p{i}", "prompt": f"prompt {i}"} for i in range(7)]


def only_line(path) -> str:
    (line,) = path.read_text().splitlines()
    head, _, metrics = line.partition(', "metrics": ')
    found = json.loads(metrics[:-1]) | {"created": 0}
    assert {"model", "dtype", "seed"} <= found.pop("job").keys()
    assert found == {
        "created": 0,
        "queue_s": 0.25,
        "ttft_s": 0.5,
        "total_s": 2.0,
        "cached_tokens": 0,
        "preemptions": 0,
        "recomputed": False,
    }
    return head


def test_a_plain_line(tmp_path):
    line = {"id": "a", "prompt": "Fünf 🏚", "seed": 3, "metadata": {"x": 1}}
    run(write(tmp_path / "in", line), tmp_path / "out")
    assert only_line(tmp_path / "out") == (
        '{"id": "a", "request_id": "req_4a", "text": "Fünf 🏚+3", "token_ids": [5, 6], '
        '"finish_reason": "length", "stop_reason": null, '
        '"usage": {"prompt_tokens": 3, "completion_tokens": 2}, "error": null'
    ).replace("req_4a", records(tmp_path / "out")["a"]["request_id"])


def test_log_probabilities_and_several_sequences_of_a_plain_line(tmp_path):
    source = write(
        tmp_path / "in",
        {"id": 1, "prompt": "x", "seed": 3, "logprobs": 1},
        {"id": 2, "prompt": "x", "seed": 3, "n": 2},
    )
    run(source, tmp_path / "out")
    one, two = records(tmp_path / "out").values()
    if one["id"] == 2:
        one, two = two, one
    assert one["cumulative_logprob"] == -1.5
    assert one["logprobs"] == [
        {
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": "é"},
            "6": {"logprob": -9999.0, "rank": 2, "decoded_token": None},
        },
        {"6": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}},
    ]
    assert [o["index"] for o in two["outputs"]] == [0, 1] and "text" not in two
    assert set(two["outputs"][0]) == {"index", "text", "token_ids", "finish_reason", "stop_reason"}
    assert two["usage"] == {"prompt_tokens": 3, "completion_tokens": 4}


def test_an_openai_completion(tmp_path):
    body = {"model": "m", "prompt": "Fünf", "seed": 3, "user": "u", "stream": False}
    run(write(tmp_path / "in", openai("c", body)), tmp_path / "out")
    digest = records(tmp_path / "out")["c"]["response"]["request_id"].removeprefix("req_")
    assert len(digest) == 32
    assert only_line(tmp_path / "out") == (
        '{"id": "batch_req_CUSTOM", "custom_id": "c", "response": {"status_code": 200, '
        '"request_id": "req_REQUEST", "body": {"id": "cmpl-REQUEST", '
        '"object": "text_completion", "created": 0, "model": "m", "choices": [{"index": 0, '
        '"text": "Fünf+3", "logprobs": null, "finish_reason": "length", "stop_reason": null}], '
        '"usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}}, '
        '"error": null'
    ).replace("REQUEST", digest).replace("CUSTOM", "b2b72e9a1d5e40f6bbab23fba07adf70")


def test_an_openai_chat_completion(tmp_path):
    body = {
        "messages": [
            {
                "role": "system",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "user", "content": "Hello"},
        ],
        "max_completion_tokens": 9,
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [],
        "n": 1,
        "stop": None,
    }
    source = write(tmp_path / "in", openai("c", body, CHAT))
    raw = (tmp_path / "in").read_bytes().splitlines()
    (line,) = read_lines(raw, sampling={}, seed=0, made_with=())
    assert line.error is None and line.request is not None
    assert line.request.sampling_params.max_tokens == 9
    assert line.request.sampling_params.logprobs == 2
    assert line.request.prompt == {
        "messages": [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "Hello"}]
    }
    run(source, tmp_path / "out", model="/models/x")
    body = records(tmp_path / "out")["c"]["response"]["body"]
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    assert body["model"] == "/models/x"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant" and "Hello" in choice["message"]["content"]
    five = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    six = {"token": "token_id:6", "logprob": -9999.0, "bytes": list(b"token_id:6")}
    last = {"token": "b", "logprob": -1.0, "bytes": [98]}
    assert choice["logprobs"] == {
        "content": [five | {"top_logprobs": [five, six]}, last | {"top_logprobs": [last]}]
    }


def test_log_probabilities_of_an_openai_completion(tmp_path):
    source = write(tmp_path / "in", openai("c", {"prompt": [1, 2], "logprobs": 2}))
    run(source, tmp_path / "out")
    (choice,) = records(tmp_path / "out")["c"]["response"]["body"]["choices"]
    assert choice["logprobs"] == {
        "tokens": ["é", "b"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"é": -0.5, "token_id:6": -9999.0}, {"b": -1.0}],
        "text_offset": [0, 1],
    }


def test_blank_lines_a_byte_order_mark_and_no_newline_at_the_end(tmp_path):
    source = tmp_path / "in"
    source.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n \n\n{"prompt": "b"}')
    run(source, tmp_path / "out")
    found = records(tmp_path / "out")
    assert {id: r["text"][0] for id, r in found.items()} == {"line-1": "a", "line-4": "b"}


def test_sampling_fields_seeds_and_defaults(tmp_path):
    lines = [
        {"id": "a", "prompt": "x", "temperature": 0.5, "stop": ["\n"], "logit_bias": {"7": -100}},
        {"id": "b", "prompt": "x", "top_k": None, "session_id": "s", "priority": -1},
        {"id": "c", "prompt": "x", "seed": 11},
        {"id": "d", "prompt_token_ids": [4, 5], "seed": -1},
    ]

    def read(*order, seed=0):
        raw = (json.dumps(lines[i]).encode() for i in order)
        sampling = {"temperature": 0.25, "top_k": 5}
        found = list(read_lines(raw, sampling=sampling, seed=seed, made_with=("m",)))
        assert all(line.error is None for line in found)
        return {line.id: line.request for line in found}

    found = read(0, 1, 2, 3)
    assert found["a"].sampling_params == SamplingParams(
        temperature=0.5, top_k=5, stop=["\n"], logit_bias={7: -100}, seed=derived_seed(0, "a")
    )
    assert found["b"].sampling_params.temperature == 0.25
    assert found["b"].sampling_params.top_k == 5
    assert (found["b"].session_id, found["b"].priority) == ("s", -1)
    assert found["c"].sampling_params.seed == 11
    assert found["d"].prompt == [4, 5]
    # Neither the order nor the company matters; the job's seed and the id do.
    assert read(3, 1) == {id: found[id] for id in "db"}
    seeds = {id: request.sampling_params.seed for id, request in found.items()}
    assert len(set(seeds.values())) == 4
    others = {id: r.sampling_params.seed for id, r in read(0, 1, 2, 3, seed=1).items()}
    assert [id for id in "abcd" if seeds[id] == others[id]] == ["c"]


def test_the_lines_before_a_bad_one_are_finished(tmp_path):
    """Three are in flight at a time, so the bad line is found while two run."""
    source, output = write(tmp_path / "in", *PROMPTS[:5], "{", *PROMPTS[5:]), tmp_path / "out"
    said: list[str] = []
    with open_job(Job(source, str(output))) as job:
        with pytest.raises(UserError, match="line 6: not JSON") as caught:
            job.run(FakeLLM(), warn=said.append)
        assert job.done == 5
    assert str(caught.value).endswith(
        f"; 5 results are in {output}: mend the line, and the same command goes on from there"
    )
    assert len(said) == 1 and said[0].endswith("; lines that run are finished first: 2")
    kept = output.read_bytes()
    assert records(output).keys() == {p["id"] for p in PROMPTS[:5]}
    source = write(tmp_path / "in", *PROMPTS)
    run(source, output)
    assert output.read_bytes().startswith(kept)
    run(source, tmp_path / "undisturbed")
    assert records(output) == records(tmp_path / "undisturbed")


def test_cut_within_the_last_line(tmp_path):
    source, output = write(tmp_path / "in", *PROMPTS, "{"), tmp_path / "out"
    run(source, output, on_error="skip")
    undisturbed, whole = records(output), output.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for cut in (*range(1, len(last), 7), len(last) - 1, len(last)):
        output.write_bytes(whole[:-cut])
        job, _ = run(source, output, on_error="skip")
        assert records(output) == undisturbed
        assert output.read_bytes().startswith(whole[: -len(last)]) and job.done == 8


def test_a_session_goes_on_from_its_turns_after_an_end_between_them(tmp_path):
    def turn(session, i, **more):
        return {"id": f"{session}{i}", "prompt": f"turn {i}", "session_id": session, **more}

    lines = [turn(s, i) for i in range(4) for s in "abc"] + [turn("bad", 0, prompt="too long")]
    source, output = write(tmp_path / "in", *lines, *PROMPTS), tmp_path / "out"

    def finish():
        llm = FakeLLM()
        with open_job(Job(source, str(output), on_error="skip")) as job:
            job.run(llm)
        assert llm.sessions == {}
        return sorted(llm.ended)

    assert finish() == ["a", "b", "c"]
    undisturbed, whole = records(output), output.read_text().splitlines(keepends=True)
    assert undisturbed["b3"]["text"].endswith("|turn 0|turn 1|turn 2|turn 3")
    # All of a, some of b, nothing of c: the turns of a need not run again, those of b must.
    kept = [line for line in whole if re.match(r'{"id": "(a.|b0|b1|p.|bad.)"', line)]
    output.write_text("".join(kept))
    assert finish() == ["b", "c"]
    assert records(output) == undisturbed
    assert output.read_text().startswith("".join(kept))


def test_overwrite_starts_anew_but_not_before_the_model_is_there(tmp_path):
    source, output = write(tmp_path / "in", *PROMPTS), tmp_path / "out"
    output.write_text("something else\n")
    with open_job(Job(source, str(output), overwrite=True)):
        pass
    assert output.read_text() == "something else\n"
    run(source, output, overwrite=True)
    assert len(records(output)) == 7
    run(write(tmp_path / "other", PROMPTS[0]), output, overwrite=True)
    assert list(records(output)) == ["p0"]


@pytest.mark.parametrize("content", ["hello", '{"id": "a"}\n'])
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    source, output = write(tmp_path / "in", *PROMPTS), tmp_path / "out"
    output.write_text(content)
    with pytest.raises(UserError, match="line 1, is no result of moejax"):
        run(source, output)
    assert output.read_text() == content


def test_results_of_another_job_are_refused(tmp_path):
    source, output = write(tmp_path / "in", *PROMPTS), tmp_path / "out"
    run(source, output)
    whole = output.read_bytes()
    others = (
        ({"seed": 1}, r"\(seed was 0, is 1\)"),
        ({"model": "other"}, r"\(model was 'demo', is 'other'\)"),
        ({"dtype": "float32"}, r"\(dtype was 'auto', is 'float32'\)"),
        ({"sampling": {"temperature": 0.5}}, r"\(temperature was its default, is 0.5\)"),
    )
    for options, what in others:
        with pytest.raises(UserError, match=r"line 1: the result of 'p\d' does not") as caught:
            run(source, output, **options)
        assert re.search(what, str(caught.value)), caught.value
    changed = write(tmp_path / "other", *PROMPTS[:6], PROMPTS[6] | {"prompt": "another"})
    with pytest.raises(
        UserError, match=r"the result of 'p6' does not belong to .*\(another line\)"
    ):
        run(changed, output)
    assert output.read_bytes() == whole
    output.write_bytes(whole + whole.splitlines(keepends=True)[2])
    with pytest.raises(UserError, match="line 8: this result appears twice"):
        run(source, output)


def test_one_process_at_a_time(tmp_path):
    source, output = write(tmp_path / "in", *PROMPTS), tmp_path / "out"
    with open_job(Job(source, str(output))):
        for overwrite in (False, True):
            with pytest.raises(UserError, match="another process is writing"):
                run(source, output, overwrite=overwrite)
    run(source, output)


def test_files_that_cannot_be_opened(tmp_path):
    source = write(tmp_path / "in", *PROMPTS)
    with pytest.raises(UserError, match=r"cannot open .*missing: No such file"):
        run(tmp_path / "missing", tmp_path / "out")
    with pytest.raises(UserError, match=r"cannot open .*for writing: No such file"):
        run(source, tmp_path / "nowhere" / "out")
    with pytest.raises(UserError, match=r"cannot open .*for writing: Is a directory"):
        run(source, tmp_path)
    with pytest.raises(UserError, match="is both --input and --output"):
        run(source, source, overwrite=True)
    assert len((tmp_path / "in").read_text().splitlines()) == 7


def test_a_full_disk(tmp_path):
    source, output = write(tmp_path / "in", *PROMPTS), tmp_path / "out"
    with pytest.raises(UserError, match=r"cannot write to /dev/full: No space left on device$"):
        run(source, "/dev/full")
    run(source, output)
    undisturbed, size = records(output), output.stat().st_size
    output.unlink()
    # A file size limit takes a part of a line before it refuses the rest, as a disk does.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
    try:
        with pytest.raises(UserError, match="File too large; its results so far are whole"):
            run(source, output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert 0 < len(records(output)) < 7
    run(source, output)
    assert records(output) == undisturbed


def command(*options):
    return cli.main(["generate", *map(str, options)])


def test_a_job_samples_as_its_model_says(fake, tmp_path, demo_dir, monkeypatch):
    model, asked = shutil.copytree(demo_dir, tmp_path / "model"), []
    (model / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 3}')

    def answer(self, request):
        asked.append(request.sampling_params)
        return output_of(request)

    monkeypatch.setattr(fake, "answer", answer)
    files = ("--input", write(tmp_path / "in", *PROMPTS), "--output", tmp_path / "out")
    assert command("--model", model, *files, "--top-k", 7) == 0
    assert {(p.temperature, p.top_k, p.max_tokens) for p in asked} == {(0.5, 7, 128)}


def test_a_job_goes_on_with_what_it_began_with_or_not_at_all(fake, tmp_path, demo_dir, capsys):
    """Results of two precisions, kernels or models in one file would look like those of one."""
    model = shutil.copytree(demo_dir, tmp_path / "model")
    source, out = write(tmp_path / "in", *PROMPTS), tmp_path / "out"

    def job(*options, output=out):
        given = ["--model", str(model), "--input", source, "--output", str(output), *options]
        return cli.main(["generate", *given]), capsys.readouterr().err

    assert job("--precision", "int2")[0] == 0
    half = b"".join(out.read_bytes().splitlines(keepends=True)[:3])
    out.write_bytes(half)
    for options, difference in (
        ([], "precision was 'int2', is its default"),
        (["--precision", "int4"], "precision was 'int2', is 'int4'"),
        (["--precision", "int2", "--ops", "xla"], "ops was its default, is 'xla'"),
    ):
        status, said = job(*options)
        assert status == 2 and difference in said, said
    # What changes no bit may change, also where the model lies.
    model = model.rename(tmp_path / "elsewhere")
    assert job("--precision", "int2", "--expert-budget", "50%")[0] == 0
    out.write_bytes(half)
    config = model / "config.json"
    config.write_text(config.read_text().replace("1e-06", "1e-05"))
    status, said = job("--precision", "int2")
    assert status == 2 and "weights was '" in said and out.read_bytes() == half


def test_a_job_keeps_the_ops_that_its_start_chose(fake, monkeypatch, tmp_path):
    """Kernels that were checked since then would give other bits."""
    source, out, made = write(tmp_path / "in", *PROMPTS), tmp_path / "out", []

    class Chosen(FakeLLM):
        def __init__(self, model="demo", **options):
            super().__init__(model, **options)
            made.append(options.get("ops"))

    monkeypatch.setattr(moejax, "LLM", Chosen, raising=False)
    for overwrite in ((), (), ("--overwrite",)):
        assert cli.main(["generate", "--input", source, "--output", str(out), *overwrite]) == 0
        out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:3]))
    assert made == [None, "those of now", None]


def removed(path):
    path.unlink()


def replaced(path):
    path.rename(path.with_name("old.jsonl"))
    path.write_text("")


def shortened(path):
    os.truncate(path, 7)


NOT_WHOLE = r"out.jsonl has \d+ bytes and not the \d+ that were written: another program"


@pytest.mark.parametrize("after", [2, 4])  # the hole of a cut was filled by the next results
@pytest.mark.parametrize(
    ("interfere", "message"),
    [
        (removed, r"the output was removed or replaced .* 4 results are in (\S+): move that"),
        (replaced, r"out.jsonl was moved to (\S+) while .* 4 results are there: move it back"),
        (shortened, NOT_WHOLE),
    ],
)
def test_an_output_that_others_take_away_is_no_success(
    monkeypatch, tmp_path, capsys, interfere, message, after
):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, *({"id": i, "prompt": str(i)} for i in range(4)))
    run(source, tmp_path / "whole.jsonl")

    class Interfered(FakeLLM):
        def generate_each(self, requests):
            for number, each in enumerate(super().generate_each(requests), 1):
                yield each
                if number == after:
                    interfere(out)

    monkeypatch.setattr(moejax, "LLM", Interfered, raising=False)
    assert cli.main(["generate", "--input", str(source), "--output", str(out)]) == 2
    said = capsys.readouterr().err
    found = re.search(message, said)
    assert found, said
    if found.groups():
        kept = tmp_path / found[1]
        assert records(kept).keys() == records(tmp_path / "whole.jsonl").keys()


def test_exit_status_and_what_is_said(fake, tmp_path, capsys):
    source, output = write(tmp_path / "in", *PROMPTS, "{"), tmp_path / "out"
    files = ("--input", source, "--output", output)
    assert command(*files, "--temperature", "0.5", "--json") == 2
    out, err = capsys.readouterr()
    early, error = err.splitlines()
    assert out == "" and error.startswith(f"moejax: error: {source}, line 8: not JSON")
    assert early.startswith(f"moejax: {source}, line 8: not JSON")
    assert f"; 7 results are in {output}: " in error
    assert command(*files, "--temperature", "0.5", "--on-error", "skip") == 3
    err = capsys.readouterr().err
    assert f"moejax: {source}, line 8: not JSON" in err
    assert (
        "\nmoejax: 8 results" in err and ", 1 errors\n\n" in err and "(--verbose says more)" in err
    )
    assert records(output)["p3"]["text"].startswith("prompt 3+")
    # Done: nothing is loaded, and the status is the same.
    fake.made = 0
    assert command(*files, "--temperature", "0.5", "--quiet") == 3
    assert capsys.readouterr().err == "moejax: 8 results, 8 of them from before, 1 errors\n"
    assert fake.made == 0
    with pytest.raises(SystemExit):
        command("--help-all")
    assert "3 a file is done and some results\n  are errors" in capsys.readouterr().out


def test_ctrl_c_says_how_to_go_on(fake, tmp_path, capsys):
    source, output = write(tmp_path / "in", *PROMPTS), tmp_path / "out"
    files = ("--input", source, "--output", output, "--quiet")
    fake.interrupt_after = 4
    assert command(*files) == 130
    assert capsys.readouterr().err == (
        f"moejax: interrupted; 4 of 7 results are in {output}, and the same command goes on from "
        f"there\n"
    )
    assert len(records(output)) == 4
    fake.interrupt_after = None
    assert command(*files) == 0
    assert len(records(output)) == 7
    fake.interrupt_after = 1
    assert command("--input", source, "--output", "-") == 130
    assert capsys.readouterr().err.endswith("moejax: interrupted\n")


def test_standard_input_and_output(fake, tmp_path, monkeypatch, capsys):
    source = write(tmp_path / "in", *PROMPTS)
    assert command("--input", source, "--output", "-", "--quiet") == 0
    out = capsys.readouterr().out
    assert {json.loads(line)["id"] for line in out.splitlines()} == {p["id"] for p in PROMPTS}

    @contextmanager
    def piped():
        reader, writer = os.pipe()
        # A pipe holds so little without a reader.
        os.write(writer, (tmp_path / "in").read_bytes())
        os.close(writer)
        with os.fdopen(reader, "rb") as binary, io.TextIOWrapper(binary) as text:
            monkeypatch.setattr(sys, "stdin", text)
            yield

    with piped():
        assert command("--input", "-", "--output", tmp_path / "out", "--quiet") == 0
    assert set(records(tmp_path / "out")) == {p["id"] for p in PROMPTS}
    # What can be read only once cannot be compared first; in a file it can.
    with piped():
        assert command("--input", "-", "--output", tmp_path / "out") == 2
    assert "cannot be compared with them beforehand" in capsys.readouterr().err
    assert command("--input", source, "--output", tmp_path / "out", "--quiet") == 0


BAD = [
    ("{", "not JSON: "),
    ("[1]", 'not a JSON object but a list; one is like {"prompt": "The old house"'),
    ('{"prompt": NaN}', "NaN is not JSON"),
    ("[" * 100_000, "nested too deeply"),
    ('{"id": "x", "prompt": "\\ud800"}', "not UTF-8 text"),
    ({"id": ""}, "id must be a string or an integer that is not empty"),
    ({"id": "line-7", "prompt": "x"}, "id 'line-7' is reserved for line 7"),
    ({"id": "x"}, "one of prompt, prompt_token_ids, messages is needed, found none"),
    ({"prompt": "x", "messages": []}, "found prompt and messages"),
    ({"prompt": ["x", "y"]}, "several prompts need a request each"),
    ({"prompt_token_ids": [1, True]}, "prompt_token_ids must be token ids"),
    ({"prompt": "x", "max_tokns": 5}, "'max_tokns' is not supported, did you mean 'max_tokens'"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "token ids are integers, got the keys"),
    ({"prompt": 5}, "prompt must be text or a list, got 5"),
    ({"prompt": "x" * MOST_LINE}, "the line is longer than"),
    ({"prompt": "x", "session_id": 5}, "session_id must be a string"),
    ({"prompt": "x", "priority": "high"}, "priority must be an integer"),
    ({"messages": ["x"]}, 'each of messages must be an object with a "role"'),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts are refused"),
    ({"messages": [{"role": "user", "content": 5}]}, "content of a message must be text, got 5"),
    ({"id": "x", "prompt": "too long"}, "shorten the prompt"),
    ({"id": "a", "prompt": "x"}, "the id 'a' is also that of an earlier line"),
]

BAD_OPENAI = [
    (openai(5, {"prompt": "x"}), "custom_id must be a string that is not empty, got 5"),
    (openai("c", {"prompt": "x"}) | {"x": 1}, "'x' is not supported beside custom_id and body"),
    (openai("c", {"prompt": "x"}) | {"method": "GET"}, 'method must be POST, got "GET"'),
    (openai("c", {"prompt": "x"}, "/v1/embeddings"), "url must be /v1/completions or /v1/chat"),
    (openai("c", "x"), "body must be an object"),
    (openai("c", {"prompt": "x"}, CHAT), "the field 'prompt' is not one of /v1/chat/completions"),
    (openai("c", {"messages": []}), "the field 'messages' is not one of /v1/completions"),
    (openai("c", {"prompt": "x", "id": "d"}), "'id' is not supported in a request"),
    (openai("c", {"prompt": "x", "echo": True}), "the field 'echo' is not supported"),
    (
        openai("c", {"prompt": "x", "max_tokens": 1, "max_completion_tokens": 2}),
        "max_tokens and max_completion_tokens differ",
    ),
    (openai("c", {"messages": [], "logprobs": 5}, CHAT), "logprobs must be true or false"),
    (openai("c", {"messages": [], "top_logprobs": 5}, CHAT), "top_logprobs needs logprobs: true"),
]


@pytest.mark.parametrize(("line", "message"), BAD + BAD_OPENAI)
def test_a_bad_line_ends_the_job_or_gets_an_error(tmp_path, line, message):
    source = write(tmp_path / "in", {"id": "a", "prompt": "x"}, line, {"id": "b", "prompt": "x"})
    with pytest.raises(UserError, match=message.replace("$", r" \(--on-error")) as caught:
        run(source, tmp_path / "out")
    assert str(caught.value).startswith(f"{source}, line 2: ")
    job, said = run(source, tmp_path / "out", on_error="skip")
    assert (job.done, job.errors, len(said)) == (3, 1, 1)
    assert said[0].startswith(f"{source}, line 2: ")
    bad = {id: r for id, r in records(tmp_path / "out").items() if r["error"] is not None}
    ((id, record),) = bad.items()
    assert record["error"] == {
        "code": "invalid_request",
        "message": said[0].partition(", line 2: ")[2],
        "param": None,
        "line": 2,
    }
    if isinstance(line, dict) and "body" in line:
        assert id == ("c" if line.get("custom_id") == "c" else "line-2")
        assert record["response"]["status_code"] == 400
        assert record["response"]["body"]["error"]["type"] == "invalid_request_error"
    else:
        assert id == ("x" if isinstance(line, dict) and line.get("id") == "x" else "line-2")
    # What is bad once is not reported twice.
    before = (tmp_path / "out").read_bytes()
    job, said = run(source, tmp_path / "out", on_error="fail")
    assert (tmp_path / "out").read_bytes() == before and (job.errors, said) == (1, [])


def test_the_progress_bar(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    generated = [1000]
    with count_progress("generating", 8, 3, True, lambda: generated[0]) as report:
        assert "3/8" in capsys.readouterr().err
        generated[0] = 10**9
        report(5)
    err = capsys.readouterr().err
    assert "5/8" in err and re.search(r"[1-9]\d{6,} tokens/s", err)
    with count_progress("generating", 8, 3, False, lambda: 0) as report:
        report(5)
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setattr("moejax.progress.LINE_S", 0.0)
    with count_progress("runs", 98, 3, True) as report:  # no terminal: lines
        report(4)
    assert re.fullmatch(r"runs: 4 of 98, about \d+ min left\n", capsys.readouterr().err)


# ---- with the embedded model


def requests_of(count):
    return [
        GenerationRequest([10 + i], SamplingParams(max_tokens=1 + 5 * i % 13, seed=i), tag=i)
        for i in range(count)
    ]


def test_few_requests_are_in_flight_and_what_ends_the_stream_ends_all(llm):
    pulled, done = [], []

    def stream(count):
        for request in requests_of(count):
            pulled.append(request)
            yield request
        raise UserError("line 21 is bad")

    def play():
        for request, output in llm.generate_each(stream(20), max_in_flight=7):
            assert len(pulled) - len(done) <= 7 and output.finished
            done.append(request.tag)
            llm.generate([3, 4], SamplingParams(max_tokens=2, ignore_eos=True))  # between results

    with pytest.raises(UserError, match="line 21 is bad"):
        play()
    assert done != sorted(done)
    assert llm.engine.scheduler.idle and list(llm.generate_each([])) == []
    with pytest.raises(UserError, match="max_in_flight must be at least 1, got 0"):
        llm.generate_each([], max_in_flight=0)


def test_any_line_is_at_most_an_error_of_its_own(tmp_path, llm):
    digits = b"1" + b"0" * 400
    hostile = {
        "temperature": b'"prompt": "a", "temperature": ' + digits,
        "bias": b'"prompt": "a", "logit_bias": {"5": ' + digits + b"}",
        "biased": b'"prompt": "a", "logit_bias": {"' + digits + b'": 1}',
        "too many digits": b'"prompt": "a", "top_k": ' + digits * 20,
        "nested": b'"prompt": ' + b"[" * 100_000 + b"]" * 100_000,
        "field": b'"' + b"q" * 1_000_000 + b'": 1, "prompt": "a"',
        "spaces": b'"prompt": "' + b" " * 10_000_000 + b'x"',
    }
    lines = [b'{"id": "%s", %s}' % (name.encode(), rest) for name, rest in hostile.items()]
    random.Random(0).shuffle(lines)
    lines = [b'{"id": "first", "prompt": "a"}', *lines, b'{"id": "last", "prompt": "a"}']
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(lines) + b"\n")
    job = Job(str(source), str(output), sampling={"max_tokens": 2}, on_error="skip")
    began, said = time.monotonic(), []
    with open_job(job) as work:
        work.run(llm, warn=said.append)
    assert time.monotonic() - began < 60
    assert all(len(text) < MOST_MESSAGE + 300 for text in said)
    errors = {id: record["error"] for id, record in records(output).items()}
    assert len(errors) == len(lines)
    assert errors.pop("first") is None and errors.pop("last") is None
    # A line that is no JSON has no id of its own.
    assert all(error is not None for error in errors.values()), errors
    assert all(len(error["message"]) <= MOST_MESSAGE + 1 for error in errors.values())


def test_an_output_pipe_that_nobody_reads_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(result_file, "READER_S", 0.2)
    pipe, source = tmp_path / "pipe", tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    os.mkfifo(pipe)
    with (
        pytest.raises(UserError, match="a pipe without a reader"),
        open_job(Job(str(source), str(pipe))),
    ):
        pass
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with open_job(Job(str(source), str(pipe))) as work:
        assert not work.results.regular
    os.close(reader)
