"""Checkpoints made to harm: each is one clear line, and nothing of it runs."""

import json
import logging
import os
import pathlib
import pickle
import shutil
import zipfile

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load as load_bytes
from safetensors.numpy import load_file, save

from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.placement import count_nonfinite
from moejax.checkpoints.safetensors.headers import MOST_HEADER
from moejax.checkpoints.safetensors.shards import find_shards
from moejax.errors import UserError
from moejax.models.config import load_config
from moejax.models.directory import FOLLOW_LINKS, read_json
from moejax.models.json_values import parse_json
from moejax.requests.prompts import PromptEncoder
from moejax.requests.tokenizer import check_vocabulary, load_tokenizer
from tests.moejax.checkpoints.random_checkpoint import (
    CONFIG,
    UP,
    assert_loaded,
    random_tensors,
    write,
)

SINGLE, INDEX, PART = "model.safetensors", "model.safetensors.index.json", "part-0.safetensors"
DEMO = pathlib.Path(__file__).parents[3] / "moejax" / "demo"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return write(tmp_path_factory.mktemp("checkpoint") / "single", random_tensors(CONFIG))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint") / "sharded"
    return write(directory, random_tensors(CONFIG), shards=2)


class Explosive:
    """Whoever unpickles it makes a file `ran` beside the checkpoint."""

    def __init__(self, directory):
        self.mark = str(directory / "ran")

    def __reduce__(self):
        return (open, (self.mark, "w"))


# ---- ways to spoil a checkpoint: each is edit(directory)


def text(name, content):
    """The file holds that text, bytes or JSON value."""

    def edit(directory):
        written = content if isinstance(content, str | bytes) else json.dumps(content)
        (directory / name).write_bytes(
            written if isinstance(written, bytes) else written.encode("utf-8", "surrogatepass")
        )

    return edit


def config(**fields):
    return text("config.json", {**CONFIG, **fields})


def raw_config(field):
    """CONFIG with that JSON text in front."""
    return text("config.json", "{" + field + ", " + json.dumps(CONFIG)[1:])


def instead(name, make):
    def edit(directory):
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return edit


def link(name, target):
    """The file moved to target, relative to the directory, and a link to it left behind."""

    def edit(directory):
        there = directory / target
        there.parent.mkdir(exist_ok=True)
        shutil.move(directory / name, there)
        (directory / name).symlink_to(there)

    return edit


def only(name, content):
    def edit(directory):
        (directory / SINGLE).unlink()
        content(directory / name)

    return edit


def pickled(path, protocol=2):
    path.write_bytes(pickle.dumps(Explosive(path.parent), protocol))


def zipped(path):
    """As torch.save writes."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Explosive(path.parent), 2))


def raw_header(header, length=None, data=True):
    """A file with that header, text or bytes, before the data of a good one."""

    def edit(directory):
        path = directory / SINGLE
        good = path.read_bytes()
        content = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
        size = len(content) if length is None else length
        rest = good[8 + int.from_bytes(good[:8], "little") :] if data else b""
        path.write_bytes(size.to_bytes(8, "little") + content + rest)

    return edit


def header(change, extra=b""):
    """A good file whose header, a dict, was changed."""

    def edit(directory):
        path = directory / SINGLE
        good = path.read_bytes()
        end = 8 + int.from_bytes(good[:8], "little")
        table = json.loads(good[8:end])
        changed = change(table)
        written = json.dumps(table if changed is None else changed).encode()
        path.write_bytes(len(written).to_bytes(8, "little") + written + good[end:] + extra)

    return edit


def entry(**fields):
    """One tensor's entry has these fields; None takes a field away."""

    def change(table):
        table[UP] = {k: v for k, v in {**table[UP], **fields}.items() if v is not None}

    return header(change)


def moved(by):
    """One tensor's data_offsets, moved or changed."""

    def change(table):
        table[UP]["data_offsets"] = by(*table[UP]["data_offsets"])

    return header(change)


def last_moved(directory):
    def change(table):
        last = max(table.values(), key=lambda entry: entry["data_offsets"])
        last["data_offsets"] = [10**9 + offset for offset in last["data_offsets"]]

    header(change)(directory)


def sparse(name, size, start=b""):
    def edit(directory):
        (directory / name).write_bytes(start)
        os.truncate(directory / name, size)

    return edit


def index(change):
    def edit(directory):
        owner = json.loads((directory / INDEX).read_text())["weight_map"]
        changed = change(owner)
        (directory / INDEX).write_text(
            json.dumps({"weight_map": owner if changed is None else changed})
        )

    return edit


def placed(file):
    """The index places the first tensor of part 0 in another file."""
    return index(lambda owner: owner.update({next(iter(owner)): file}))


def shards_in_linked_directory(directory):
    outside = directory.parent / "outside"
    outside.mkdir()
    shutil.move(directory / PART, outside / PART)
    (directory / "sub").symlink_to(outside)
    index(lambda owner: {n: f"sub/{f}" if f == PART else f for n, f in owner.items()})(directory)


LONG = "x" * 300 + ".safetensors"
DEEP = '{"a":' * 100_000
DAMAGED = "damaged or truncated safetensors file"

SINGLE_FILE = [
    # what is no file, or not the checkpoint's
    ("directory", instead(SINGLE, pathlib.Path.mkdir), "a directory, where a file is expected"),
    ("pipe", instead(SINGLE, os.mkfifo), "a pipe, socket or device"),
    ("device", instead(SINGLE, lambda p: p.symlink_to("/dev/zero")), "a pipe, socket or device"),
    ("empty", text(SINGLE, ""), "0 bytes are less than its header"),
    ("link out", link(SINGLE, "../secret"), f"a link out of .*{FOLLOW_LINKS}=1"),
    ("link to nothing", instead(SINGLE, lambda p: p.symlink_to("gone")), "a link to nothing"),
    ("loop of links", instead(SINGLE, lambda p: p.symlink_to(p.name)), "cannot be read"),
    ("config link out", link("config.json", "../secret"), "config.json: a link out"),
    ("config pipe", instead("config.json", os.mkfifo), "config.json: a pipe"),
    ("config directory", instead("config.json", pathlib.Path.mkdir), "config.json: a directory"),
    # pickles
    ("bin", only("pytorch_model.bin", pickled), "only PyTorch .bin.*pickles can run code"),
    ("pt", only("model.pt", pickled), "only PyTorch"),
    ("pth", only("consolidated.00.pth", zipped), "only PyTorch"),
    ("ckpt", only("model.ckpt", pickled), "only PyTorch"),
    ("pkl", only("weights.pkl", pickled), "only PyTorch"),
    ("renamed pickle", instead(SINGLE, pickled), "a pickle or zip file under another name"),
    ("renamed pickle 4", instead(SINGLE, lambda p: pickled(p, 4)), "never loads pickles"),
    ("renamed zip", instead(SINGLE, zipped), "a pickle or zip file under another name"),
    # code
    ("foreign code", config(architectures=["Mine"], auto_map={"AutoModel": "mine.M"}), "'Mine'"),
    # the header's length and text
    ("header beyond file", raw_header("{}", 10**6), "less than its header"),
    ("header of 2**63", raw_header("{}", 2**63), "less than its header"),
    (
        "header beyond limit",
        sparse(SINGLE, MOST_HEADER + 100, (MOST_HEADER + 1).to_bytes(8, "little")),
        f"a header of {MOST_HEADER + 1} bytes",
    ),
    ("no object", raw_header("[1]"), "the header is not a JSON object"),
    ("byte order mark", raw_header("\ufeff{}"), "the header is not a JSON object"),
    ("deep header", raw_header(DEEP), "nested too deeply"),
    ("header not UTF-8", raw_header(b'{"\xff": 1}'), f"{DAMAGED} .*utf-8"),
    ("header cut", raw_header('{"a": '), DAMAGED),
    ("NaN in header", raw_header('{"__metadata__": NaN}'), "NaN is not a JSON number"),
    ("tensor twice", raw_header('{"a": 1, "a": 2}'), "the key 'a' is there twice"),
    ("half a character", raw_header('{"\\ud800": 1}'), f"{DAMAGED} .*surrogates"),
    ("escape codes", raw_header('{"\\u001b[31m": 1}'), r"name '\\x1b\[31m' has unprintable"),
    ("metadata", raw_header('{"__metadata__": {"a": 1}}'), "__metadata__ must be an object"),
    ("no tensors", raw_header("{}"), "the tensors end at byte 10 of"),
    ("entry is a list", raw_header('{"a": []}'), "must have dtype, shape and data_offsets"),
    ("unknown field", entry(strides=[1]), "must have dtype, shape and data_offsets alone"),
    ("field missing", entry(shape=None), "must have dtype, shape and data_offsets alone"),
    # shapes
    ("negative", entry(shape=[-8, -16]), r"shape of tensor .* list of numbers, \[-8, -16\]"),
    ("fractional", entry(shape=[8.0, 16]), "must be a list of numbers"),
    ("boolean", entry(shape=[True, 128]), "must be a list of numbers"),
    ("no list", entry(shape="8x16"), "must be a list of numbers, '8x16'"),
    ("2**60", entry(shape=[2**60, 16]), r"needs 36893488147419103232 bytes, its data_offsets"),
    ("overflow", entry(shape=[2**32, 2**32, 8, 16]), "data_offsets are"),
    ("zero", entry(shape=[0, 16]), r"shape \[0, 16\] needs 0 bytes"),
    (
        "zero and no bytes",
        header(lambda t: {**t, "z": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}),
        "unknown tensor z",
    ),
    ("many digits", entry(shape=[10**4000, 1]), r"shape \[1000.*\.\.\. needs 2000"),
    ("more digits", raw_header('{"a": ' + "9" * 5000 + "}"), DAMAGED),
    ("many axes", entry(shape=[1] * 1000 + [8, 16]), "has 1002 axes"),
    # offsets
    ("overlap", moved(lambda a, b: [a - 2, b - 2]), "where the one before ends"),
    ("gap", moved(lambda a, b: [a + 2, b + 2]), "where the one before ends"),
    ("beyond file", last_moved, r"begins at byte 1000\d+, where the one before ends"),
    ("backwards", moved(lambda a, b: [b, a]), "needs 256 bytes"),
    (
        "negative offsets",
        moved(lambda a, b: [-256, 0]),
        "data_offsets of tensor .* list of numbers",
    ),
    ("three offsets", moved(lambda a, b: [a, a, b]), "must be two numbers"),
    ("bytes after the end", header(lambda t: None, extra=b"more"), "the tensors end at byte"),
    # dtypes
    ("dtype 7", entry(dtype=7), "dtype of tensor .* must be a name, 7"),
    ("dtype null", entry(dtype=[]), "must be a name"),
    ("endless dtype", entry(dtype="X" * 10**5), r"has dtype X+\.\.\. \(not a dtype"),
    # config.json
    ("config NaN", raw_config('"rms_norm_eps": NaN'), "NaN is not a JSON number"),
    ("config -Infinity", raw_config('"rope_theta": -Infinity'), "-Infinity is not a JSON number"),
    ("config 1e999", raw_config('"rope_theta": 1e999'), "the number 1e999 is too large"),
    ("config key twice", raw_config('"vocab_size": 24'), "'vocab_size' is there twice"),
    ("config digits", raw_config('"x": ' + "9" * 5000), "cannot be read as JSON"),
    ("config deep", text("config.json", DEEP), "nested too deeply"),
    ("config not UTF-8", text("config.json", b'{"a": "\xff"}'), "cannot be read as JSON.*utf-8"),
    ("config is a list", text("config.json", []), "expected a JSON object, found list"),
    ("config empty", text("config.json", ""), "cannot be read as JSON"),
    ("config 101 MiB", sparse("config.json", 101 * 2**20), "too many for a checkpoint's JSON"),
    ("vocab_size text", config(vocab_size="24"), "vocab_size must be an integer, not '24'"),
    ("hidden_size 16.0", config(hidden_size=16.0), "hidden_size must be an integer, not 16.0"),
    ("layers true", config(num_hidden_layers=True), "num_hidden_layers must be an integer"),
    ("layers -1", config(num_hidden_layers=-1), "num_hidden_layers must be at least 1"),
    ("layers 10**9", config(num_hidden_layers=10**9), "num_hidden_layers must be at most"),
    ("experts 10**12", config(num_experts=10**12), "num_experts must be at most"),
    ("too many experts", config(num_hidden_layers=4000, num_experts=60000), "experts in all"),
    ("hidden_size 2**40", config(hidden_size=2**40), "hidden_size must be at most"),
    ("architectures text", config(architectures="x"), "architectures must be a list"),
    ("architectures nested", config(architectures=[["x"]]), "architectures must be a list"),
    ("rope_theta list", config(rope_theta=[1]), "rope_theta"),
    ("hidden_size 10**400", config(hidden_size=10**400), "hidden_size must be at most"),
    ("rms_norm_eps 10**400", config(rms_norm_eps=10**400), "rms_norm_eps must be a number from"),
    ("eos text", config(eos_token_id="0"), "eos_token_id must be a token id"),
    ("generation config", text("generation_config.json", "[]"), "generation_config.json: expected"),
]

SHARDED = [
    ("index escape", placed("../part-0.safetensors"), "not a .safetensors file inside"),
    ("index absolute", placed("/etc/x.safetensors"), "not a .safetensors file inside"),
    ("index hidden escape", placed("a/../../x.safetensors"), "not a .safetensors file inside"),
    ("index NUL", placed("a\0.safetensors"), r"'a\\x00.safetensors', which is not"),
    ("index two lines", placed("a\nb.safetensors"), "which is not a .safetensors file"),
    ("index long name", index(lambda o: dict.fromkeys(o, LONG)), "x.safetensors: shard missing"),
    ("index number", placed(7), "placed in 7, which is not"),
    ("index null", placed(None), "placed in None, which is not"),
    ("index pickle", placed("x.bin"), "which is not a .safetensors file"),
    ("index unprintable", index(lambda o: o.update({"\x1b": PART})), r"tensor '\\x1b' is placed"),
    ("index empty", index(lambda o: {}), "weight_map must be an object"),
    ("index list", index(lambda o: list(o)), "weight_map must be an object"),
    ("index is null", text(INDEX, "null"), "expected a JSON object, found NoneType"),
    ("index no bytes", text(INDEX, ""), "index.json: cannot be read as JSON"),
    (
        "index key twice",
        text(INDEX, f'{{"weight_map": {{"a": "{PART}", "a": "{PART}"}}}}'),
        "the key 'a' is there twice",
    ),
    ("index other spelling", placed(f"./{PART}"), "holds the tensor .*index.json places it in"),
    ("index link out", link(INDEX, "../secret"), "index.json: a link out"),
    ("shard link out", link(PART, "../secret"), "part-0.safetensors: a link out"),
    ("linked directory", shards_in_linked_directory, "sub/part-0.safetensors: a link out"),
    ("shard pickle", instead(PART, pickled), "part-0.safetensors: a pickle"),
    ("shard directory", instead(PART, pathlib.Path.mkdir), "part-0.safetensors: a directory"),
    (
        "tensor in two shards",
        lambda d: (d / PART).write_bytes((d / "part-1.safetensors").read_bytes()),
        "part-0.safetensors: holds the tensor .*places it in part-1",
    ),
]


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [pytest.param("single", *case[1:], id=case[0]) for case in SINGLE_FILE]
    + [pytest.param("sharded", *case[1:], id=case[0]) for case in SHARDED],
)
def test_refused(request, tmp_path, kind, edit, message):
    directory = tmp_path / "checkpoint"
    shutil.copytree(request.getfixturevalue(kind), directory)
    edit(directory)
    with pytest.raises(UserError, match=message) as caught:
        load_checkpoint(directory)
    line = str(caught.value)
    assert line.startswith(str(directory)) and line.isprintable() and len(line) < 1000
    assert not (directory / "ran").exists() and not (tmp_path / "ran").exists()


def test_link_out_of_the_hub_cache(tmp_path, single):
    """Of the hub's cache only its blobs are the checkpoint's."""
    cache = tmp_path / "models--some--model"
    directory = cache / "snapshots" / "abc"
    shutil.copytree(single, directory)
    (cache / "refs").mkdir()
    link(SINGLE, "../../refs/secret")(directory)
    with pytest.raises(UserError, match="a link out of the checkpoint's directory"):
        load_checkpoint(directory)


def test_what_is_harmless_is_loaded(tmp_path, sharded, monkeypatch):
    """A false total_size, code that nobody asked for, links within the directory, and links out of
    it for who allows them."""
    directory = tmp_path / "checkpoint"
    shutil.copytree(sharded, directory)
    config(auto_map={"AutoModelForCausalLM": "evil.Model"}, trust_remote_code=True)(directory)
    (directory / "evil.py").write_text(f"open({str(directory / 'ran')!r}, 'w')")
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Explosive(directory)))
    weights = json.loads((directory / INDEX).read_text())["weight_map"]
    text(INDEX, {"metadata": {"total_size": 10**30}, "weight_map": weights})(directory)
    link("part-1.safetensors", "blobs/1")(directory)
    link(PART, "../elsewhere")(directory)
    monkeypatch.setenv(FOLLOW_LINKS, "1")
    assert_loaded(load_checkpoint(directory), random_tensors(CONFIG), CONFIG)
    assert not (directory / "ran").exists()


# ---- weights


@pytest.mark.parametrize("dtype", ["auto", "float32", "half"])
def test_values_that_are_not_finite_are_loaded_with_one_warning(tmp_path, caplog, dtype):
    tensors = random_tensors(CONFIG)
    tensors["model.norm.weight"][3] = np.inf
    tensors[UP][1, :5] = np.nan
    tensors[UP][2, 0] = -np.inf
    down = UP.replace("up", "down")
    tensors[down][0, 0] = -np.nan
    write(tmp_path, tensors)
    with caplog.at_level(logging.WARNING, "moejax"):
        loaded = load_checkpoint(tmp_path, dtype)
    assert_loaded(loaded, tensors, CONFIG)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: 1 values of tensor {down} are NaN or infinite, and 2 other tensors have "
        "such values too"
    ]


def test_finite_weights_are_not_warned_of(single, caplog):
    load_checkpoint(single).store.delete()
    assert not caplog.records


@pytest.mark.parametrize("dtype", NUMPY_DTYPES.values(), ids=str)
def test_every_value_is_told_from_nan_and_infinity(dtype):
    if dtype.itemsize == 2:
        values = np.arange(2**16, dtype=np.uint16).view(dtype)
    else:
        edges = [0, 1, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF]
        values = np.array(edges + [e | 1 << 31 for e in edges], np.uint32).view(dtype)
    for value in [*values[:: max(1, len(values) // 4096)], *values[-4096:]]:
        alone = np.array([0, value, -1], dtype)
        with np.errstate(invalid="ignore"):  # a signalling NaN
            expected = np.count_nonzero(~np.isfinite(alone))
        assert count_nonfinite(alone) == expected, value
    with np.errstate(invalid="ignore"):
        assert count_nonfinite(values) == np.count_nonzero(~np.isfinite(values)) > 0


def test_disk_that_fails(single, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    before = {id(array) for array in jax.live_arrays()}
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(UserError, match=r"model.safetensors: cannot be read: Input/output error$"):
        load_checkpoint(single)
    assert not [a for a in jax.live_arrays() if id(a) not in before and not a.is_deleted()]


def test_file_that_becomes_shorter(tmp_path, single):
    shutil.copytree(single, tmp_path / "checkpoint")
    (shard,) = find_shards(tmp_path / "checkpoint")
    last = max(shard.begins, key=shard.begins.__getitem__)

    def cut_and_read():
        with shard.open() as reader:
            os.truncate(shard.path, shard.path.stat().st_size - 4)
            reader.get_tensor(last)

    with pytest.raises(UserError, match=f"ends within tensor {last}"):
        cut_and_read()
    shard.path.unlink()
    with pytest.raises(UserError, match="cannot be read: No such file"), shard.open():
        pass


def test_file_that_is_written_to(tmp_path, single):
    """Its header may be another one by now, and half of the values too."""
    changed = "model.safetensors: was written to while moejax read it"
    shutil.copytree(single, tmp_path / "checkpoint")
    (shard,) = find_shards(tmp_path / "checkpoint")
    with pytest.raises(UserError, match=changed), shard.open():
        os.utime(shard.path, ns=(1, 1))
    with pytest.raises(UserError, match=changed), shard.open():
        raise AssertionError("it was opened")
    with pytest.raises(UserError, match=changed):
        load_checkpoint(
            tmp_path / "checkpoint", progress=lambda *_: os.utime(shard.path, ns=(2, 2))
        )


def test_slices_of_a_shard(single):
    (shard,) = find_shards(single)
    expected = load_file(single / SINGLE)[UP]
    with shard.open() as reader:
        for wanted in (0, -1, slice(2, 5), slice(None), slice(6, 100), slice(3, 3)):
            np.testing.assert_array_equal(reader.get_rows(UP, wanted), expected[wanted])


# ---- tokenizers


def tokenizer_directory(tmp_path, **settings):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path / name)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return tmp_path


def test_tokenizer_runs_no_code_and_reads_no_other_file(tmp_path):
    """Neither auto_map nor a file named elsewhere counts."""
    other = tmp_path / "tokenizer.1.0.json"
    other.write_text((DEMO / "tokenizer.json").read_text().replace("house", "mouse"))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    tokenizer_directory(
        tmp_path,
        auto_map={"AutoTokenizer": ["evil.Slow", "evil.Fast"]},
        tokenizer_class="Evil",
        trust_remote_code=True,
        fast_tokenizer_files=[other.name],
        tokenizer_file=str(other),
        vocab_file="/etc/hostname",
    )
    tokenizer, plain = load_tokenizer(tmp_path), load_tokenizer(DEMO)
    assert tokenizer is not None and plain is not None
    assert tokenizer.get_vocab() == plain.get_vocab()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("tokenizer.json", link, "tokenizer.json: a link out"),
        ("tokenizer_config.json", link, "tokenizer_config.json: a link out"),
        ("tokenizer.json", lambda name, _: instead(name, os.mkfifo), "tokenizer.json: a pipe"),
        (
            "special_tokens_map.json",
            lambda name, _: instead(name, pathlib.Path.mkdir),
            "special_tokens_map.json: a directory",
        ),
    ],
)
def test_tokenizer_files_that_are_refused(tmp_path, name, edit, message):
    (tmp_path / "inner").mkdir()
    directory = tokenizer_directory(tmp_path / "inner")
    edit(name, "../secret")(directory)
    with pytest.raises(UserError, match=message):
        load_tokenizer(directory)


@pytest.fixture(scope="module")
def encoder():
    """One whose process, which takes two seconds to start, is all templates'."""
    encoder = PromptEncoder(load_tokenizer(DEMO), "DIR", 256)
    yield encoder
    encoder.close()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(messages) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{% if %}",
        "{% include '/etc/hostname' %}",
    ],
)
def test_chat_template_stays_in_its_sandbox(template, encoder):
    encoder._tokenizer.chat_template = template
    prompt = {"messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(UserError, match="the chat template of DIR refuses these messages"):
        encoder(prompt)


def test_tokenizer_of_another_model():
    tokenizer, config = load_tokenizer(DEMO), load_config(DEMO)
    assert tokenizer is not None
    assert check_vocabulary(tokenizer, config, DEMO) is tokenizer
    assert check_vocabulary(None, config, DEMO) is None
    tokenizer.add_tokens(["<more>"])
    grown = max(tokenizer.get_vocab().values())
    assert grown >= config.vocab_size
    with pytest.raises(UserError, match=f"token '<more>' with id {grown}, but config.json has voc"):
        check_vocabulary(tokenizer, config, DEMO)


# ---- JSON and headers, by the thousand

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
@settings(max_examples=50, deadline=None)
def test_good_json_is_read_as_it_is(value):
    assert parse_json(json.dumps(value)) == value


def test_json_with_nan_for_who_wants_it(tmp_path):
    (tmp_path / "x.json").write_text('{"loss": NaN, "most": 1e999}')
    assert np.isnan(read_json(tmp_path / "x.json", nan=True)["loss"])


GOOD = save({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float16)})
LENGTH = int.from_bytes(GOOD[:8], "little")


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_mutated_files_load_what_they_announce_or_are_refused(tmp_path_factory, data):
    """Bytes changed, inserted or cut: a UserError, or what the safetensors library reads."""
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(len(content), LENGTH + 16) - 1))
        kind = data.draw(st.sampled_from(["set", "insert", "cut", "digit"]))
        if kind == "set":
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "digit":
            digits = [i for i, byte in enumerate(content[:LENGTH]) if chr(byte).isdigit()]
            content[data.draw(st.sampled_from(digits or [8]))] = data.draw(st.sampled_from(b"0129"))
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        else:
            del content[at : at + data.draw(st.integers(1, 8))]
        content = content or bytearray(b"\0")
    directory = tmp_path_factory.getbasetemp() / "mutated"
    directory.mkdir(exist_ok=True)
    (directory / SINGLE).write_bytes(content)
    refusal = None
    try:
        (shard,) = find_shards(directory)
    except UserError as error:
        refusal = str(error)
    if refusal is not None:
        assert refusal.startswith(str(directory)) and refusal.isprintable()
        return
    try:
        expected = load_bytes(bytes(content))
    except SafetensorError as error:
        pytest.fail(f"accepted what safetensors refuses: {error}")
    with shard.open() as reader:
        found = {name: reader.get_tensor(name) for name in shard.tensors}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype and found[name].shape == values.shape
        assert found[name].tobytes() == values.tobytes()
