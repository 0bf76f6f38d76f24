"""Traces of other programs' routing, and what `moejax trace info` says of a trace."""

import base64
import dataclasses
import io
import itertools
import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from host_offload.traces.reader import TraceError, read_trace
from host_offload.traces.statistics import domain_distance, trace_statistics
from host_offload.traces.writer import TraceWriter
from moejax.commands import main as cli
from moejax.errors import UserError
from moejax.start.report.model_info import read_headers
from moejax.traces.conversion import convert_trace
from moejax.traces.generated_traces import (
    new_trace,
    routed_step,
    routing_header,
    write_generated_trace,
)

LAYERS, E, K, PROMPT, TOKENS = 3, 16, 4, 5, 12


def random_ids(tokens: int, seed: int = 0, layers: int = LAYERS) -> np.ndarray:
    """int16[tokens, layers, K], unordered."""
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(np.arange(E, dtype=np.int16), (tokens, layers, 1)), axis=-1)[
        ..., :K
    ]


def npy(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def bare(array: np.ndarray) -> str:
    return base64.b64encode(array.astype("<i4").tobytes()).decode()


def lines(*objects) -> str:
    return "".join(json.dumps(x) + "\n" for x in objects)


IDS = random_ids(TOKENS)


@dataclasses.dataclass(frozen=True)
class Dump:
    """One request as another program writes it down."""

    name: str
    content: object
    """Text, or arrays of an .npz."""
    options: dict = dataclasses.field(default_factory=dict)

    def write(self, directory):
        path = directory / self.name
        if isinstance(self.content, str):
            path.write_text(self.content)
        elif isinstance(self.content, np.ndarray):
            np.save(path, self.content)
        else:
            np.savez(path, **self.content)
        return path


DUMPS = {
    "npy": Dump("a.npy", IDS, dict(prompt_tokens=PROMPT)),
    "npz": Dump("a.npz", dict(ids=IDS, phase=np.arange(TOKENS) >= PROMPT, note="?")),
    "lists": Dump("a.jsonl", lines(dict(ids=IDS.tolist(), prompt_tokens=PROMPT))),
    "vllm": Dump(
        "a.jsonl",
        lines(
            dict(
                choices=[dict(index=0, routed_experts=npy(IDS))],
                usage=dict(prompt_tokens=PROMPT, completion_tokens=TOKENS - PROMPT + 1),
            )
        ),
    ),
    "sglang": Dump(
        "a.jsonl",
        lines(
            dict(text="…", meta_info=dict(prompt_tokens=PROMPT, routed_experts=bare(IDS))),
        )
        + "\n",
        dict(layers=LAYERS, top_k=K),
    ),
    "table": Dump(
        "a.csv",
        "layer,token,expert,phase\n"
        + "".join(
            f"{layer},{token},{expert},{int(token >= PROMPT)}\n"
            for layer, token in itertools.product(range(LAYERS), range(TOKENS))
            for expert in IDS[token, layer]
        ),
    ),
    "scores": Dump(
        "a.npz",
        dict(
            router_logits=(IDS[..., None] == np.arange(E)).any(axis=-2).astype(np.float32),
            phase=np.arange(TOKENS) >= PROMPT,
        ),
        dict(top_k=K),
    ),
    "dense layer": Dump(
        "a.npy",
        np.concatenate([np.zeros_like(IDS[:, :1]), IDS], axis=1),
        dict(dense_layers=1, prompt_tokens=PROMPT),
    ),
}


@pytest.mark.parametrize("name", DUMPS)
def test_a_dump_becomes_a_trace(tmp_path, name):
    dump = DUMPS[name]
    trace = convert_trace(dump.write(tmp_path), tmp_path / "t", experts=E, **dump.options)
    np.testing.assert_array_equal(trace.array("token.ids"), np.sort(IDS, axis=-1))
    assert trace.array("token.position").tolist() == list(range(TOKENS))
    assert trace.array("token.phase").tolist() == [0] * PROMPT + [1] * (TOKENS - PROMPT)
    assert [s.kind for s in trace.step_traces()] == ["prefill"] + ["decode"] * (TOKENS - PROMPT)
    shape = trace.steps, trace.tokens, trace.header.layers
    assert shape == (1 + TOKENS - PROMPT, TOKENS, LAYERS)
    assert trace.complete and trace.header.spec["steps"] == "put together of 1 requests"


def test_what_a_dump_does_not_say_is_absent(tmp_path, capsys):
    np.save(tmp_path / "a.npy", IDS)
    asked = ["trace", "convert", str(tmp_path / "a.npy"), "--experts", str(E)]
    assert cli.main([*asked, str(tmp_path / "u")]) == 0
    assert "which tokens are a prompt's: --prompt-tokens N" in capsys.readouterr().out
    assert cli.main([*asked, str(tmp_path / "v"), "--prompt-tokens", "2"]) == 0
    assert "--prompt-tokens" not in capsys.readouterr().out
    convert_trace(tmp_path / "a.npy", tmp_path / "t", experts=E)
    trace = read_trace(tmp_path / "t")
    columns = set(load_file(tmp_path / "t" / "chunk-000000.safetensors"))
    written = {name for name in columns if name.startswith(("token", "step"))}
    assert written == {
        "token.ids",
        "token.user",
        "token.request",
        "token.position",
        "step.number",
        "step.tokens",
    }
    step = next(trace.step_traces())
    assert step.kind is step.weights is step.phase is step.seconds is step.missed is None
    with pytest.raises(TraceError, match=r"has no step\.seconds: it was converted or generated"):
        trace.array("step.seconds")
    with pytest.raises(ValueError, match=r"token\.ids cannot be absent"):
        dataclasses.replace(trace.header, absent=("token.ids",))


def test_requests_are_computed_side_by_side(tmp_path):
    lengths, prompts = (9, 7, 8), (4, 0, 3)
    ids = [random_ids(n, seed) for seed, n in enumerate(lengths)]
    weights = [np.random.default_rng(i).random(x.shape).tolist() for i, x in enumerate(ids)]
    text = lines(
        *(
            dict(ids=x.tolist(), prompt_tokens=p, weights=w, domain=d)
            for x, p, w, d in zip(ids, prompts, weights, ("code", "math", "code"), strict=True)
        )
    )
    path = Dump("a.jsonl", text).write(tmp_path)
    convert_trace(path, tmp_path / "t", experts=E, batch=2)
    trace = read_trace(tmp_path / "t")
    found = [(s.kind, s.request.tolist(), s.position.tolist()) for s in trace.step_traces()]
    assert found == [
        ("prefill", [0] * 4, [0, 1, 2, 3]),
        *(("decode", [0, 1], [4 + i, i]) for i in range(5)),
        *(("decode", [1], [i]) for i in (5, 6)),
        ("prefill", [2] * 3, [0, 1, 2]),
        *(("decode", [2], [i]) for i in range(3, 8)),
    ]
    for step in trace.step_traces():
        for request, position, row, given in zip(
            step.request, step.position, step.ids, step.weights, strict=True
        ):
            order = np.argsort(ids[request][position], axis=-1)
            np.testing.assert_array_equal(
                row, np.take_along_axis(ids[request][position], order, axis=-1)
            )
            wanted = np.asarray(weights[request][position], np.float32)
            np.testing.assert_array_equal(given, np.take_along_axis(wanted, order, axis=-1))
    assert trace.array("token.user").tolist() == [
        {0: 0, 1: 1, 2: 0}[r] for _, q, _ in found for r in q
    ]
    assert trace.header.spec["user_names"] == {"code": 0, "math": 1}
    assert trace.header.spec["steps"] == "put together of 2 requests"


def changed(place, value) -> np.ndarray:
    ids = np.sort(IDS, axis=-1)
    ids[place] = value
    return ids


def plain(**fields) -> str:
    return lines({"ids": IDS.tolist(), **fields})


BAD = {
    "pickle": (Dump("a.pt", "x"), {}, "pickled files can run code"),
    "name": (Dump("a.txt", "x"), {}, "is one of .npy, .npz, .jsonl, .csv, .tsv"),
    "column": (Dump("a.csv", "token,layer\n0,0\n"), {}, "no column expert"),
    "cell": (Dump("a.tsv", "token\tlayer\texpert\n0\t0\tx\n"), {}, "line 2: expert is no whole"),
    "hole": (
        Dump("a.csv", "token,layer,expert\n0,0,1\n0,1,1\n1,0,1\n1,0,2\n"),
        {},
        "not as many experts for each of 2 tokens and 2 layers",
    ),
    "no lines": (Dump("a.csv", "token,layer,expert\n"), {}, "0 lines are not"),
    "no k": (Dump("a.npz", dict(router_logits=np.zeros((2, 3, E)))), {}, "--top-k"),
    "nan": (
        Dump("a.npz", dict(router_logits=np.full((2, 3, E), np.nan))),
        dict(top_k=2),
        "must be finite numbers",
    ),
    "no zip": (Dump("a.npz", "PK\x03\x04 cut"), {}, "damaged, cut short or pickled"),
    "no ids": (Dump("a.npz", dict(x=IDS)), {}, r"no array ids or routed_experts"),
    "flat": (Dump("a.npy", IDS[:, 0]), {}, r"\[tokens, layers, k\], not int16\[12, 4\]"),
    "step": (Dump("a.npz", dict(ids=IDS, step=np.arange(3))), {}, r"step must be .* int64\[3\]"),
    "step back": (
        Dump("a.npz", dict(ids=IDS, step=np.arange(TOKENS)[::-1])),
        {},
        "steps go back; sort",
    ),
    "phase back": (
        Dump("a.npz", dict(ids=IDS, phase=np.arange(TOKENS) % 2)),
        {},
        "prompt tokens after generated",
    ),
    "request apart": (
        Dump("a.npz", dict(ids=IDS, request=np.arange(TOKENS) % 2)),
        {},
        "a request's tokens are apart",
    ),
    "twice": (Dump("a.npy", changed((7, 1, 1), IDS.min(axis=-1)[7, 1])), {}, "token 7, layer 1"),
    "beyond": (Dump("a.npy", IDS), dict(experts=8), "beyond the model's 8: it is another model"),
    "none": (Dump("a.npy", changed((2, 0, 0), -1)), {}, r"token 2, layer 0 has no expert"),
    "none at all": (Dump("a.npy", IDS * 0 - 1), {}, "no layer has an expert"),
    "phases": (Dump("a.npz", dict(ids=IDS, phase=np.arange(TOKENS))), {}, "phase is 0 .* or 1"),
    "own phases": (
        Dump("a.npz", dict(ids=IDS, phase=np.ones(TOKENS, int))),
        dict(prompt_tokens=2),
        "says itself which tokens are prompt",
    ),
    "weights": (
        Dump("a.npz", dict(ids=IDS, weights=IDS[:, 0].astype(float))),
        {},
        r"weights must be numbers \[12, 3, 4\]",
    ),
    "empty": (Dump("a.jsonl", "\n"), {}, "it is empty"),
    "list": (Dump("a.jsonl", "[1]\n"), {}, "line 1: a line is an object"),
    "choices": (Dump("a.jsonl", lines(dict(choices=[3]))), {}, "are objects"),
    "no list": (Dump("a.jsonl", lines(dict(choices=5))), {}, "are objects"),
    "meta": (Dump("a.jsonl", lines(dict(ids=[[[1]]], meta_info=3))), {}, "are objects"),
    "number": (Dump("a.jsonl", lines(dict(ids=5))), {}, "ids must be lists"),
    "no axes": (Dump("a.jsonl", lines(dict(ids=npy(np.array(5))))), {}, "ids must be whole numb"),
    "short": (
        Dump("a.jsonl", lines(dict(ids=[[[1]], [[1]]], weights=[[[1.0]]]))),
        {},
        "line 1: weights must have a row for each of 2 tokens",
    ),
    "base64": (Dump("a.jsonl", lines(dict(ids="%"))), {}, "not base64"),
    "cut npy": (Dump("a.jsonl", lines(dict(ids=npy(IDS)[:120]))), {}, "is cut short"),
    "wider": (
        Dump("a.jsonl", plain() + lines(dict(ids=np.sort(IDS)[:, :2].tolist()))),
        {},
        "line 2: recorded routing of different shapes",
    ),
    "cut line": (Dump("a.jsonl", plain() + plain()[:40]), {}, "line 2: not JSON, perhaps cut"),
    "off": (Dump("a.jsonl", lines(dict(choices=[{}]))), {}, "turn their recording on"),
    "ragged": (Dump("a.jsonl", lines(dict(ids=[[[1, 2]], [[1]]]))), {}, "different lengths"),
    "shapeless": (Dump("a.jsonl", lines(dict(ids=bare(IDS)))), {}, "say it with --layers"),
    "other shape": (
        Dump("a.jsonl", lines(dict(ids=bare(IDS)))),
        dict(layers=5, top_k=K),
        "no whole number of tokens of 5 layers",
    ),
    "prompt": (Dump("a.jsonl", plain(prompt_tokens=99)), {}, "prompt_tokens is 99 of 12"),
    "mixed": (Dump("a.jsonl", plain() + plain(prompt_tokens=2)), {}, "convert them apart"),
    "both": (Dump("a.npy", IDS), dict(experts=None), "give the model, or its number"),
    "batch": (Dump("a.npy", IDS), dict(batch=0), "batch is at least 1"),
    "own steps": (
        Dump("a.npz", dict(ids=IDS, step=np.arange(TOKENS))),
        dict(batch=2),
        "has steps of its own",
    ),
    "too many": (Dump("a.npy", IDS), dict(experts=1 << 20), "1…32767 experts"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_dumps_are_refused(tmp_path, name):
    dump, options, message = BAD[name]
    path = dump.write(tmp_path)
    with pytest.raises(UserError, match=message):
        convert_trace(path, tmp_path / "t", **dict(experts=E) | options)
    assert list(tmp_path.iterdir()) == [path]


def random_trace(directory, decode_steps: int = 40, sequences: int = 2, layers: int = 2):
    """Two sequences with a prompt of 3, some of whose steps have one sequence only."""
    rng = np.random.default_rng(1)
    present = ("request", "position", "phase", "kind")
    header = routing_header(layers, E, K, present, {})

    def some(count: int) -> np.ndarray:
        keys = rng.gumbel(size=(count, layers, E)) - np.log(np.arange(1, E + 1))
        return np.sort(np.argsort(-keys, axis=-1)[..., :K], axis=-1)

    position = [3] * sequences
    with new_trace(directory, header) as writer:
        steps = [(np.repeat(np.arange(sequences), 3), np.tile(np.arange(3), sequences), 0)]
        for i in range(decode_steps):
            rows = np.arange(sequences) if i % 5 else np.asarray([i % sequences])
            steps.append((rows, np.asarray([position[r] for r in rows]), 1))
            for row in rows:
                position[row] += 1
        for i, (request, place, phase) in enumerate(steps):
            writer.append(
                routed_step(
                    i,
                    some(len(request)),
                    request=request,
                    position=place,
                    phase=np.full(len(request), phase),
                    kind=("prefill", "decode")[phase],
                )
            )
    return read_trace(directory)


def test_statistics_are_what_a_naive_count_gives(tmp_path):
    trace = random_trace(tmp_path / "t")
    found = trace_statistics(trace)
    steps = list(trace.step_traces())
    layers = trace.header.layers
    tokens = {
        (int(r), int(p)): [set(layer.tolist()) for layer in ids]
        for s in steps
        if s.kind == "decode"
        for r, p, ids in zip(s.request, s.position, s.ids, strict=True)
    }
    pairs = [(tokens[r, p], t) for (r, p1), t in tokens.items() if (r, p := p1 - 1) in tokens]
    kept = [len(a[i] & b[i]) / K for a, b in pairs for i in range(layers)]
    assert found.token_overlap == pytest.approx(np.mean(kept))
    sets = [[set(s.ids[:, i].ravel().tolist()) for i in range(layers)] for s in steps]
    stepped = [
        sum(len(a[i] & b[i]) for i in range(layers)) / sum(map(len, b))
        for a, b in itertools.pairwise(sets[1:])
    ]
    assert found.step_overlap == pytest.approx(np.mean(stepped))
    shares = [
        sum(map(len, x)) / layers / E for s, x in zip(steps, sets, strict=True) if len(s.ids) == 2
    ]
    assert found.activated_in_steps[2] == pytest.approx(np.mean(shares))
    assert found.activated[1] == pytest.approx(K / E)
    counts = np.zeros((layers, E))
    for s in steps:
        for i in range(layers):
            np.add.at(counts[i], s.ids[:, i], 1)
    hottest = np.cumsum(-np.sort(-counts, axis=1), axis=1)
    enough = [np.flatnonzero(sums >= 0.9 * sums[-1])[0] + 1 for sums in hottest]
    assert found.experts_for_90 == np.mean(enough)
    assert (found.prefill_steps, found.decode_steps, found.requests) == (1, 40, 2)


def test_distances_between_domains(tmp_path):
    one = np.asarray([[4, 4, 0, 0], [1, 2, 3, 2]])
    other = np.asarray([[0, 0, 3, 5], [1, 2, 3, 2]])
    same, apart = domain_distance("a", "a", one, one * 3), domain_distance("a", "b", one, other)
    assert (same.divergence, same.variation, same.hot_shared) == (0, 0, 1)
    # Disjoint in the first of two layers, equal in the second.
    assert (apart.variation, apart.hot_shared) == (0.5, 0.5)
    assert apart.divergence == pytest.approx(0.5)

    sizes = dict(layers=2, experts=64, top_k=4, sequences=2, tokens=384, phase_tokens=128)
    write_generated_trace(tmp_path / "t", "phases", **sizes)
    found = trace_statistics(read_trace(tmp_path / "t"))
    assert found.domains == ("phase 0", "phase 1", "phase 2")
    assert {(d.a, d.b) for d in found.distances} == {
        ("phase 0", "phase 1"),
        ("phase 0", "phase 2"),
        ("phase 1", "phase 2"),
    }
    assert min(d.divergence for d in found.distances) > 3 * max(d.divergence for d in found.halves)


@pytest.fixture(scope="module")
def trace_dir(tmp_path_factory):
    """A trace of the demo's shape and configuration, in several chunks."""
    from moejax.models.model_config import config_digest

    config, _ = read_headers("demo")
    layers, experts, k = sum(config.moe_layers), config.num_experts, config.num_experts_per_tok
    origin = {"config_digest": config_digest(config)}
    header = routing_header(layers, experts, k, ("request", "position"), origin)
    directory = tmp_path_factory.mktemp("traces") / "t"
    rng = np.random.default_rng(0)
    with TraceWriter(directory, header, chunk_bytes=2000) as writer:
        for i in range(40):
            ids = np.sort(
                rng.permuted(np.tile(np.arange(experts), (2, layers, 1)), axis=-1)[..., :k]
            )
            fields = dict(request=np.arange(2), position=np.full(2, i))
            writer.append(routed_step(i, ids, **fields))
    return directory


def run(*argv) -> int:
    return cli.main(["trace", *map(str, argv)])


def test_info_shows_figures_beside_published_ones(trace_dir, capsys):
    assert run("info", trace_dir, "--model", "demo") == 0
    text = capsys.readouterr().out
    assert "No published model has this shape" in text
    for word in ("62.0%", "uniform", "Qwen3-30B-A3B", "WiSP", "[3]"):
        assert word in text, word
    assert run("info", trace_dir, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["statistics"]["unknown_steps"] == 40 and found["complete"] is True
    assert found["published"][0]["activated"]["8"] == 0.319
    assert "step.hits" in found["absent"]


def test_info_says_when_the_shape_is_a_published_models(tmp_path, capsys):
    write_generated_trace(tmp_path / "t", "zipf", tokens=3)
    assert run("info", tmp_path / "t") == 0
    text = capsys.readouterr().out
    assert "The shape is that of Qwen3-30B-A3B" in text and "synthetic (zipf)" in text


def test_convert_by_command(tmp_path, capsys):
    config, _ = read_headers("demo")
    ids = random_ids(TOKENS, layers=sum(config.moe_layers))
    np.save(tmp_path / "a.npy", ids)
    arguments = ("--model", "demo", "--prompt-tokens", 4)
    assert run("convert", tmp_path / "a.npy", tmp_path / "t", *arguments) == 0
    assert f"{TOKENS} tokens, 4 MoE layers, 9 put together steps" in capsys.readouterr().out
    assert run("info", tmp_path / "t", "--model", "demo") == 0
    size = 3 * config.moe_intermediate_size * config.hidden_size * 2  # bfloat16
    assert read_trace(tmp_path / "t").header.spec["version_bytes"] == {"dense": size}
    np.save(tmp_path / "b.npy", ids[:, :3])
    assert run("convert", tmp_path / "b.npy", tmp_path / "u", "--model", "demo") == 2
    assert "routing of 3 layers, top-4; the model has 4 MoE layers" in capsys.readouterr().err


def damaged(directory, name, change) -> None:
    path = directory / name
    path.write_bytes(change(path.read_bytes()))


def edited(**fields):
    return lambda raw: json.dumps(json.loads(raw) | fields).encode()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("trace.json", edited(absent=["token.ids"]), "is damaged"),
        ("trace.json", edited(config_digest="ab" * 32), "another model: its configuration's"),
        ("trace.json", edited(experts=17), "another model: it has 4 MoE layers of 17"),
        ("chunk-000001.safetensors", lambda raw: raw[:-8], "000001.* is damaged or cut short"),
    ],
)
def test_info_refuses_bad_traces(trace_dir, tmp_path, capsys, name, change, message):
    shutil.copytree(trace_dir, tmp_path / "t")
    damaged(tmp_path / "t", name, change)
    assert run("info", tmp_path / "t", "--model", "demo") == 2
    assert re.search(message, capsys.readouterr().err)


def test_places_that_cannot_be_read_or_written_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", IDS)
    convert_trace(tmp_path / "a.npy", tmp_path / "t", experts=E)
    for source, target, message in (
        ("b.npy", "u", r"cannot read .*No such file"),
        (".", "u", "is a directory"),
        ("t", "u", "is a trace already"),
        ("a.npy", "t", "a trace is never overwritten"),
    ):
        with pytest.raises(UserError, match=message):
            convert_trace(tmp_path / source, tmp_path / target, experts=E)
