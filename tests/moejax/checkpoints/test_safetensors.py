"""Safetensors: every bit where it belongs, and each fault or trap is one line that names it."""

from __future__ import annotations

import json
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
from safetensors.numpy import load_file, save, save_file

from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.checkpoints.conversion import convert
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.shards import (
    INDEX,
    MOST_HEADER,
    SINGLE,
    ShardReader,
    find_shards,
    read_header,
)
from moejax.checkpoints.tensor_checkpoint import open_tensors
from moejax.checkpoints.tensor_tasks import count_nonfinite
from moejax.errors import UserError
from moejax.models.config import parse_config
from moejax.models.directory import FOLLOW_LINKS, open_regular, read_bounded
from moejax.models.json_values import MOST_VALUES
from tests.moejax.checkpoints.conversions import copied, read_tensor, refuses
from tests.moejax.checkpoints.random_checkpoint import (
    BF16,
    CONFIG,
    EMBED,
    HEAD,
    UP,
    assert_loaded,
    random_tensors,
    stacked,
    write,
)

PART = "part-0.safetensors"
STACKED = stacked(random_tensors(CONFIG), 3, 3)
TIED = {**CONFIG, "tie_word_embeddings": True}
BIASED = {**TIED, "attention_bias": True, "mlp_only_layers": []}
NO_DTYPE = {key: value for key, value in CONFIG.items() if key != "dtype"}


@pytest.mark.parametrize(
    ("config", "tensors", "held", "dtype"),
    [
        pytest.param(CONFIG, random_tensors(CONFIG), STACKED, "bfloat16", id="stacked experts"),
        pytest.param(BIASED, random_tensors(BIASED), None, "bfloat16", id="biases"),
        pytest.param(
            TIED,
            random_tensors(TIED),
            {**random_tensors(TIED), HEAD: random_tensors(TIED)[EMBED]},
            "bfloat16",
            id="a head that is the embedding",
        ),
        pytest.param(
            NO_DTYPE,
            random_tensors(NO_DTYPE, np.float16),
            None,
            "float16",
            id="dtype of the weights",
        ),
        pytest.param(
            CONFIG, random_tensors(CONFIG, np.float32), None, "bfloat16", id="dtype of the config"
        ),
    ],
)
def test_checkpoints_of_every_kind_arrive(tmp_path, config, tensors, held, dtype):
    loaded = load_checkpoint(write(tmp_path, held or tensors, config, shards=2))
    assert loaded.dtype == dtype and loaded.config == parse_config(config | {"dtype": dtype})
    assert_loaded(loaded, tensors, config)
    opened, array = open_tensors(tmp_path, "safetensors"), loaded.store.arrays["dense"]
    held = opened.hold(dtype, ["dense"])
    source = opened.record_files(dtype, ["dense"], held, True, False)["dense"]
    for key in np.ndindex(source.shape):  # and alone, as they are paged
        record = np.asarray(array[key])
        assert source.holds(*key, record) and not source.holds(*key, record + 1)
    other = min(NUMPY_DTYPES.keys() - {dtype, opened.files[0].tensors[EMBED].dtype})
    refuses("reads experts as they are, and", load_checkpoint, tmp_path, other, in_files=True)


def test_tensors_larger_than_what_is_read_at_once(tmp_path, monkeypatch):
    """Chunks of 16 rows, pieces of 5: every boundary is somewhere."""
    monkeypatch.setattr("moejax.checkpoints.tensor_tasks._CHUNK", 300)
    monkeypatch.setattr("moejax.checkpoints.tensor_tasks._PIECE", 5 * 16 * 2)
    config = {**CONFIG, "hidden_size": 40, "moe_intermediate_size": 7}
    tensors = random_tensors(config)
    assert_loaded(load_checkpoint(write(tmp_path, tensors, config)), tensors, config)


# ---- what is refused


UP_RE = UP.replace(".", r"\.")


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


def tensors(change, file=SINGLE):
    """The file with other tensors: change(name → array)."""

    def edit(directory):
        held = load_file(directory / file)
        change(held)
        save_file(held, directory / file)

    return edit


DEEP = '{"a":' * 100_000
DAMAGED = "damaged or truncated safetensors file"

SINGLE_FILE = [
    # what is no file, or not the checkpoint's
    ("directory", instead(SINGLE, pathlib.Path.mkdir), "a directory, where a file is expected"),
    ("device", instead(SINGLE, lambda p: p.symlink_to("/dev/zero")), "a pipe, socket or device"),
    ("link out", link(SINGLE, "../secret"), f"a link out of .*{FOLLOW_LINKS}=1"),
    ("link to nothing", instead(SINGLE, lambda p: p.symlink_to("gone")), "a link to nothing"),
    ("config link out", link("config.json", "../secret"), "config.json: a link out"),
    # what is there in place of weights
    (
        "nothing",
        instead(SINGLE, lambda p: None),
        "neither model.safetensors nor .*index.json found$",
    ),
    ("git lfs", text(SINGLE, "version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    # tensors
    ("tensor missing", tensors(lambda t: t.pop(UP)), f"tensor {UP_RE} is missing$"),
    (
        "tensors missing",
        tensors(lambda t: (t.pop(UP), t.pop(HEAD))),
        r"tensor lm_head.weight is missing \(and 1 others\)",
    ),
    ("tensor too many", tensors(lambda t: t.update(x=np.zeros(1, BF16))), "unknown tensor x"),
    ("fewer experts", config(num_experts=2), "unknown tensor|has shape"),
    (
        "shape",
        tensors(lambda t: t.update({UP: t[UP].T.copy()})),
        r"has shape \[16, 8\], but .*8, 16",
    ),
    (
        "int32",
        tensors(lambda t: t.update({UP: t[UP].astype(np.int32)})),
        "has dtype int32, but config.json",
    ),
    ("fp8", entry(dtype="F8_E4M3", shape=[16, 16]), f"tensor {UP_RE} has dtype float8_e4m3fn"),
    (
        "head that is not tied",
        config(tie_word_embeddings=True),
        f"tensor {HEAD} differs from {EMBED}.*tie_word_embeddings",
    ),
    (
        "head of one axis",
        lambda d: [
            change(d)
            for change in (
                config(tie_word_embeddings=True),
                tensors(lambda t: t.update({HEAD: t[HEAD][0].copy()})),
            )
        ],
        f"tensor {HEAD} differs from {EMBED}.*tie_word_embeddings",
    ),
    # pickles
    ("bin", only("pytorch_model.bin", pickled), "only PyTorch .bin.*pickles can run code"),
    ("renamed pickle", instead(SINGLE, pickled), "a pickle or zip file under another name"),
    ("renamed zip", instead(SINGLE, zipped), "a pickle or zip file under another name"),
    # code
    ("foreign code", config(architectures=["Mine"], auto_map={"AutoModel": "mine.M"}), "'Mine'"),
    # the header's length and text
    ("header beyond file", raw_header("{}", 10**6), "less than its header"),
    (
        "header beyond limit",
        sparse(SINGLE, MOST_HEADER + 100, (MOST_HEADER + 1).to_bytes(8, "little")),
        f"a header of {MOST_HEADER + 1} bytes",
    ),
    ("no object", raw_header("[1]"), "the header is not a JSON object"),
    ("byte order mark", raw_header("\ufeff{}"), "the header is not a JSON object"),
    ("deep header", raw_header(DEEP), "nested too deeply"),
    ("header not UTF-8", raw_header(b'{"\xff": 1}'), f"{DAMAGED} .*utf-8"),
    ("half a character", raw_header('{"\\ud800": 1}'), f"{DAMAGED} .*surrogates"),
    ("metadata", raw_header('{"__metadata__": {"a": 1}}'), "__metadata__ must be an object"),
    ("no tensors", raw_header("{}"), "the tensors end at byte 10 of"),
    ("entry is a list", raw_header('{"a": []}'), "must have dtype, shape and data_offsets"),
    ("field missing", entry(shape=None), "must have dtype, shape and data_offsets alone"),
    # shapes
    ("negative", entry(shape=[-8, -16]), r"shape of tensor .* list of numbers, \[-8, -16\]"),
    ("2**60", entry(shape=[2**60, 16]), r"needs 36893488147419103232 bytes, its data_offsets"),
    ("zero", entry(shape=[0, 16]), r"shape \[0, 16\] needs 0 bytes"),
    (
        "zero and no bytes",
        header(lambda t: {**t, "z": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}),
        "unknown tensor z",
    ),
    ("more digits", raw_header('{"a": ' + "9" * 5000 + "}"), DAMAGED),
    ("many axes", entry(shape=[1] * 1000 + [8, 16]), "has 1002 axes"),
    # offsets
    ("overlap", moved(lambda a, b: [a - 2, b - 2]), "where the one before ends"),
    ("gap", moved(lambda a, b: [a + 2, b + 2]), "where the one before ends"),
    ("backwards", moved(lambda a, b: [b, a]), "needs 256 bytes"),
    (
        "negative offsets",
        moved(lambda a, b: [-256, 0]),
        "data_offsets of tensor .* list of numbers",
    ),
    ("bytes after the end", header(lambda t: None, extra=b"more"), "the tensors end at byte"),
    # dtypes
    ("dtype 7", entry(dtype=7), "dtype of tensor .* must be a name, 7"),
    ("endless dtype", entry(dtype="X" * 10**5), r"has dtype X+\.\.\. \(not a dtype"),
    # config.json
    ("config NaN", raw_config('"rms_norm_eps": NaN'), "NaN is not a JSON number"),
    ("config 1e999", raw_config('"rope_theta": 1e999'), "the number 1e999 is too large"),
    ("config key twice", raw_config('"vocab_size": 24'), "'vocab_size' is there twice"),
    ("config not UTF-8", text("config.json", b'{"a": "\xff"}'), "cannot be read as JSON.*utf-8"),
    ("config 101 MiB", sparse("config.json", 101 * 2**20), "too many for a checkpoint's JSON"),
    ("experts 10**12", config(num_experts=10**12), "num_experts must be at most"),
    ("too many experts", config(num_hidden_layers=4000, num_experts=60000), "experts in all"),
    ("hidden_size 2**40", config(hidden_size=2**40), "hidden_size must be at most"),
]

SHARDED = [
    ("shard missing", lambda d: (d / PART).unlink(), "part-0.safetensors: shard missing"),
    (
        "absent tensor",
        index(lambda o: o.update({"extra.weight": PART})),
        "part-0.safetensors: lacks the tensor extra.weight, which .*index.json places",
    ),
    (
        "tensor outside of the index",
        tensors(lambda t: t.update(more=np.zeros(1, BF16)), PART),
        "holds the tensor more, but .* does not know it",
    ),
    ("index escape", placed("../part-0.safetensors"), "not a .safetensors file inside"),
    ("index hidden escape", placed("a/../../x.safetensors"), "not a .safetensors file inside"),
    ("index NUL", placed("a\0.safetensors"), r"'a\\x00.safetensors', which is not"),
    ("index number", placed(7), "placed in 7, which is not"),
    ("index unprintable", index(lambda o: o.update({"\x1b": PART})), r"tensor '\\x1b' is placed"),
    ("index empty", index(lambda o: {}), "weight_map must be an object"),
    ("index no bytes", text(INDEX, ""), "index.json: cannot be read as JSON"),
    ("index other spelling", placed(f"./{PART}"), "holds the tensor .*index.json places it in"),
    ("linked directory", shards_in_linked_directory, "sub/part-0.safetensors: a link out"),
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
            read_tensor(shard, reader, last)

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
    (shard,) = find_shards(tmp_path / "checkpoint")
    name, header = next(iter(shard.tensors.items()))
    reader = ShardReader(shard, os.open(shard.path, os.O_RDONLY))
    os.utime(shard.path, ns=(3, 3))
    with pytest.raises(UserError, match=changed):
        reader.rows(name)(0, np.empty(header.shape, header.dtype))
    os.close(reader.descriptor)
    with pytest.raises(UserError, match=changed):
        load_checkpoint(
            tmp_path / "checkpoint", progress=lambda *_: os.utime(shard.path, ns=(2, 2))
        )


# ---- files that would hang, fill memory or take minutes


def enormous_model(directory):
    """A model whose embeddings are 200 GiB of holes, as its config.json says."""
    config = CONFIG | {"vocab_size": 10**8, "hidden_size": 1074}
    names = ("model.embed_tokens.weight", "lm_head.weight")
    tensors = random_tensors({**config, "vocab_size": 2})
    nbytes = config["vocab_size"] * config["hidden_size"] * 2
    header, at = {}, 0
    for name, tensor in tensors.items():
        large = name in names
        shape = [config["vocab_size"], config["hidden_size"]] if large else list(tensor.shape)
        size = nbytes if large else tensor.nbytes
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(directory / SINGLE, 8 + len(text) + at)
    return directory


def test_weights_beyond_the_memory(tmp_path, monkeypatch):
    directory = enormous_model(tmp_path / "hf")
    refuses("config.json asks for 400.1 GiB of weights in host memory", load_checkpoint, directory)
    monkeypatch.setattr("moejax.checkpoints.conversion.require_space", lambda *_: None)
    refuses("asks for 200 GiB of weights in host memory", convert, directory, tmp_path / "model")


def entries(count):
    return {f"t{i}": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]} for i in range(count)}


def header_file(path, text):
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return path


def test_a_header_of_too_many_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr("moejax.checkpoints.shards._MOST_TENSORS", 10)
    path = header_file(tmp_path / SINGLE, json.dumps(entries(11)).encode())
    refuses("11 tensors; at most 10 are read of a file", read_header, path)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_of_too_many_values(name, sharded, tmp_path):
    directory = copied(sharded, tmp_path / "hf")
    (directory / name).write_text('{"a": [' + "[]," * MOST_VALUES + "[]]}")
    refuses(f"{name}: cannot be read as JSON: about 8000003 values", load_checkpoint, directory)


@pytest.mark.parametrize(
    ("file", "edit", "message"),
    [
        ("README.md", instead("README.md", os.mkfifo), "a pipe"),
        (
            "additional_chat_templates/a",
            sparse("additional_chat_templates/a", 200 << 30),
            "too many for all",
        ),
    ],
)
def test_files_that_are_copied(file, edit, message, single, tmp_path):
    directory = copied(single, tmp_path / "hf")
    (directory / file).parent.mkdir(exist_ok=True)
    edit(directory)
    refuses(message, convert, directory, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_gate_itself(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe")
    assert read_bounded(tmp_path / "file", 5, "a test") == b"12345"
    too_many = "file: 5 bytes are too many for a test; at most 4"
    refuses(too_many, read_bounded, tmp_path / "file", 4, "a test")
    for name, what in (("pipe", "a pipe, socket or device"), (".", "a directory")):
        refuses(f"{what}, where a file is expected", open_regular, tmp_path / name)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing")


# ---- by the thousand


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
        found = {name: read_tensor(shard, reader, name) for name in shard.tensors}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype and found[name].shape == values.shape
        assert found[name].tobytes() == values.tobytes()
