"""Files of a checkpoint that would hang, fill memory or take minutes: each is refused at once."""

import json
import os
import re
import shutil
import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.checkpoints.convert import convert
from moejax.checkpoints.foreign.name_map import ignore_pattern, load_name_map, parse_name_map
from moejax.checkpoints.foreign.name_matching import match_leaves
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.orbax.own import read_expert
from moejax.checkpoints.orbax.tree import Tree
from moejax.checkpoints.safetensors.headers import read_header
from moejax.checkpoints.safetensors.shards import INDEX, SINGLE
from moejax.errors import MOST_LINE, MOST_LINES, UserError, shown
from moejax.models.directory import open_regular, read_bounded
from moejax.models.json_values import MOST_VALUES, MOST_YAML, parse_yaml
from tests.moejax.checkpoints import foreign_trees
from tests.moejax.checkpoints.conversions import copied, rewrite_manifest
from tests.moejax.checkpoints.random_checkpoint import CONFIG, random_tensors, write

ENORMOUS = 200 << 30
"""Bytes of the sparse files, which take none of the disk."""

SECONDS = 60
"""Of a test, on a machine that others use too; alone each takes a few at most."""


@pytest.fixture(autouse=True)
def bounded_time():
    """A test that hangs fails."""

    def fail(*_):
        raise TimeoutError(f"not refused within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write(tmp_path_factory.mktemp("hf") / "model", random_tensors(CONFIG))


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    return convert(source, tmp_path_factory.mktemp("orbax") / "model").directory


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    config = CONFIG | {"mlp_only_layers": [], "num_hidden_layers": 2}
    tree = foreign_trees.maxtext_qwen3(random_tensors(config), config)
    directory = tmp_path_factory.mktemp("foreign") / "tree"
    return foreign_trees.save(directory, tree, config, use_ocdbt=False)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def sparse(path):
    os.truncate(path, ENORMOUS)


def refused(message, call, *args, **options):
    with pytest.raises(UserError, match=message) as caught:
        call(*args, **options)
    assert max(map(len, str(caught.value).split("\n"))) <= MOST_LINE


# ---- files that are none, or without end


@pytest.mark.parametrize(("edit", "message"), [(pipe, "a pipe"), (sparse, "too many for")])
@pytest.mark.parametrize("file", ["0.0", ".zarray"])
def test_chunks_of_another_program(file, edit, message, foreign, tmp_path):
    directory = copied(foreign, tmp_path / "tree")
    edit(directory / "params.params.token_embedder.embedding" / file)
    refused(message, load_checkpoint, directory, name_map="maxtext_qwen3_moe")


def test_a_link_to_nothing_in_a_tree(foreign, tmp_path):
    directory = copied(foreign, tmp_path / "tree")
    (directory / "more").symlink_to("nothing")
    message = "more: cannot be read: No such file"
    refused(message, load_checkpoint, directory, name_map="maxtext_qwen3_moe")


def test_a_loop_of_links_in_a_tree(foreign, tmp_path):
    directory = copied(foreign, tmp_path / "tree")
    (directory / "more").symlink_to("more")
    refused("more: a link in a loop", load_checkpoint, directory, name_map="maxtext_qwen3_moe")


@pytest.mark.slow
def test_a_tree_of_many_files_takes_no_longer_for_each(foreign, tmp_path):
    directory = copied(foreign, tmp_path / "tree")
    (directory / "more").mkdir()
    for i in range(20_000):
        (directory / "more" / str(i)).touch()
    load_checkpoint(directory, name_map="maxtext_qwen3_moe").store.delete()


def test_a_tree_that_nobody_touched_is_read(foreign):
    load_checkpoint(foreign, name_map="maxtext_qwen3_moe").store.delete()


@pytest.mark.parametrize(
    ("edit", "message"), [(pipe, "neither _METADATA"), (sparse, r"_METADATA: \d+ bytes")]
)
def test_the_list_of_leaves(edit, message, foreign, tmp_path):
    directory = copied(foreign, tmp_path / "tree")
    edit(directory / "_METADATA")
    refused(message, load_checkpoint, directory, name_map="maxtext_qwen3_moe")


def test_a_chunk_of_ours_that_is_a_pipe(converted, tmp_path):
    directory = copied(converted, tmp_path / "model")
    pipe(directory / "state/experts.dense.1/c/2/0/0")
    refused("a pipe", read_expert, directory, 1, 2)
    refused("0 bytes, not 768", load_checkpoint, directory)


@pytest.mark.parametrize("file", ["config.json", "state/_METADATA", "moejax.json"])
def test_files_of_ours_without_end(file, converted, tmp_path):
    directory = copied(converted, tmp_path / "model")
    sparse(directory / file)
    refused(f"{ENORMOUS} bytes are too many", load_checkpoint, directory)


def test_numbers_in_our_manifest(converted, tmp_path):
    def overflow(content):
        content["errors"] = {"int4": {"0": [10**400]}}

    def elsewhere(content):
        content["experts"]["lossless12"] = {}
        content["dense_layers"] = {"lossless12": [-1, 0, 10**9]}

    directory = copied(converted, tmp_path / "model")
    rewrite_manifest(directory, overflow)
    refused("not a manifest that moejax wrote", load_checkpoint, directory)
    shutil.copy(converted / "moejax.json", directory / "moejax.json")
    rewrite_manifest(directory, elsewhere)
    load = load_checkpoint
    refused("0 checksums for experts.lossless12.1", load, directory, versions=("lossless12",))


@pytest.mark.parametrize("file", ["README.md", "tokenizer.json", "additional_chat_templates/a"])
@pytest.mark.parametrize(("edit", "message"), [(pipe, "a pipe"), (sparse, "too many for all")])
def test_files_that_are_copied(file, edit, message, source, tmp_path):
    directory = copied(source, tmp_path / "hf")
    (directory / file).parent.mkdir(exist_ok=True)
    (directory / file).write_text("")
    edit(directory / file)
    refused(message, convert, directory, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(("edit", "message"), [(pipe, "a pipe"), (sparse, "for a name map")])
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_name_maps(suffix, edit, message, tmp_path):
    path = tmp_path / f"map.{suffix}"
    path.write_text("{}")
    edit(path)
    refused(message, load_name_map, path)


def test_the_gate_itself(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe")
    assert read_bounded(tmp_path / "file", 5, "a test") == b"12345"
    too_many = "file: 5 bytes are too many for a test; at most 4"
    refused(too_many, read_bounded, tmp_path / "file", 4, "a test")
    for name, what in (("pipe", "a pipe, socket or device"), (".", "a directory")):
        refused(f"{what}, where a file is expected", open_regular, tmp_path / name)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing")


# ---- weights without end: what config.json asks for is compared with the memory before anything


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
    refused("config.json asks for 400.1 GiB of weights in host memory", load_checkpoint, directory)
    monkeypatch.setattr("moejax.checkpoints.convert.require_space", lambda *_: None)
    refused("asks for 200 GiB of weights in host memory", convert, directory, tmp_path / "model")


def test_our_weights_beyond_the_memory(converted, monkeypatch):
    monkeypatch.setattr("moejax.checkpoints.loaded_model.host_available_bytes", lambda: 1000)
    refused("asks for .* of which 1000 B are free", load_checkpoint, converted)


# ---- small files with much work in them


def entries(count):
    return {f"t{i}": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]} for i in range(count)}


def header_file(path, text):
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return path


def test_a_header_of_too_many_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr("moejax.checkpoints.safetensors.headers._MOST_TENSORS", 10)
    path = header_file(tmp_path / SINGLE, json.dumps(entries(11)).encode())
    refused("11 tensors; at most 10 are read of a file", read_header, path)


@pytest.mark.slow
def test_a_header_of_millions_of_tensors(tmp_path):
    """95 MB of empty ones: 63 s once."""
    entry = b'"%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = b"{" + b",".join(entry % i for i in range(1_600_000)) + b"}"
    path = header_file(tmp_path / SINGLE, text)
    refused("about 11200000 values; at most 4000000", read_header, path)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_of_too_many_values(name, source, tmp_path):
    directory = copied(source, tmp_path / "hf")
    if name == INDEX:
        (directory / SINGLE).unlink()
    (directory / name).write_text('{"a": [' + "[]," * MOST_VALUES + "[]]}")
    refused(f"{name}: cannot be read as JSON: about 8000003 values", load_checkpoint, directory)


@pytest.mark.slow
def test_lists_in_a_config_that_are_searched(source, tmp_path):
    directory = copied(source, tmp_path / "hf")
    config = json.dumps(CONFIG | {"num_hidden_layers": 4096, "mlp_only_layers": "LAYERS"})
    text = config.replace('"LAYERS"', f"[{'5000,' * 2_000_000}5000]")
    (directory / "config.json").write_text(text)
    refused("unknown tensor", load_checkpoint, directory)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": [1] * 1001}))
    refused("eos_token_id has 1001 token ids; at most 1000", load_checkpoint, directory)


@pytest.mark.slow
def test_an_index_of_many_files_takes_no_longer_for_each(source, tmp_path):
    directory = copied(source, tmp_path / "hf")
    (directory / SINGLE).unlink()
    owner = {f"t{i}": f"{i:05}.safetensors" for i in range(20_000)}
    text = json.dumps({"z": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    for name in range(2):
        entry = text.replace(b'"z"', f'"t{name}"'.encode())
        header_file(directory / f"{name:05}.safetensors", entry)
    (directory / INDEX).write_text(json.dumps({"weight_map": owner}))
    refused("00002.safetensors: shard missing", load_checkpoint, directory)


# ---- name maps


def bomb(levels=9):
    """A few lines that stand for 10**levels values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for i in range(1, levels):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{bomb()}\nrules: [{{leaf: a, tensor: b, axes: *a8}}]", "aliases .* are not read"),
        ("rules: &r [*r]", "aliases .* are not read"),
        ("- " * 5000, "nested too deeply"),
        ("rules: [{leaf: a, tensor: b, axes: 0x" + "f" * 9000 + "}]", "more than 64 bits"),
        ("rules: !!int ''", "cannot be read as a name map"),
        ("rules: !!timestamp x", "cannot be read as a name map"),
        ("rules: 2020-99-99", "cannot be read as a name map"),
        ("rules: !!python/object/apply:os.system ['true']", "cannot be read as a name map"),
        ("rules: [{leaf: a, tensor: b, axes: [" + "x," * 9000 + "]}]", r"axes must be .*\.\.\.$"),
        ("rules: [{leaf: a, tensor: b, scale: .inf}]", "scale must be a number up to"),
        ("rules: [{leaf: a, tensor: b, scale: .nan}]", "scale must be a number up to"),
        ("rules: [{leaf: '{a}{b}', tensor: 'x{a}{b}'}]", "where does the number in braces end"),
        ("rules: [{leaf: '{a}1', tensor: 'x{a}'}]", "where does the number in braces end"),
        ("rules: [{leaf: " + "a" * 501 + ", tensor: b}]", "leaf must be a path"),
        ("rules: [{leaf: a, tensor: " + "a" * 501 + "}]", "each of at most 500 characters"),
        ("rules: [{leaf: '{a}', tensor: 'x{a*" + "9" * 5000 + "}'}]", "at most 500 characters"),
        ("rules: [{leaf: '{a}', tensor: 'x{a*" + "9" * 99 + "}'}]", r"must name \{a\}, and it"),
        ("rules: [" + "{leaf: a, tensor: b}," * 501 + "]", "501 rules; at most 500"),
        ("root: [" + "a," * 9 + "]\nrules: [{leaf: a, tensor: b}]", "root may be 8 texts"),
        ("ignore: [" + "a," * 501 + "]\nrules: [{leaf: a, tensor: b}]", "ignore may be 500 texts"),
    ],
    ids=range(20),
)  # fmt: skip
def test_a_name_map_with_work_in_it(text, message, tmp_path):
    path = tmp_path / "map.yaml"
    path.write_text(text)
    refused(f"map.yaml: .*{message}", load_name_map, path)


def test_yaml_of_too_many_characters():
    with pytest.raises(ValueError, match="characters of YAML; at most"):
        parse_yaml("a" * (MOST_YAML + 1))


@pytest.mark.parametrize("fields", [{"scale": "1/sqrt(zero)"}, {"scale": "sqrt(huge)"}])
def test_scales_of_fields_that_are_none(fields, foreign, tmp_path):
    directory = copied(foreign, tmp_path / "tree")
    config = json.loads((directory / "config.json").read_text()) | {"zero": 0, "huge": 10**400}
    (directory / "config.json").write_text(json.dumps(config))
    path = tmp_path / "map.json"
    leaf = "params/params/token_embedder/embedding"
    path.write_text(
        json.dumps(
            {
                "ignore": ["params/params/decoder/**"],
                "rules": [{"leaf": leaf, "tensor": "a", **fields}],
            }
        )
    )
    refused("the config's zero is 0|no integer huge", load_checkpoint, directory, name_map=path)


def test_a_leaf_that_stands_for_endless_tensors(foreign, tmp_path):
    """Its shape is a line of text, and names of its axes lift the bound of the config's sizes."""
    directory, names = copied(foreign, tmp_path / "tree"), [str(i) for i in range(5000)]
    path = directory / "params.params.token_embedder.embedding/.zarray"
    sizes = {"shape": [5000] * 3 + [1], "chunks": [1, 1, 1, 1]}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    rule = {"axes": "a b c d -> d", "tensor": "x{a}{b}{c}", "values": dict.fromkeys("abc", names)}
    rule["leaf"] = "params/params/token_embedder/embedding"
    content = {"ignore": ["params/params/decoder/**"], "rules": [rule]}
    (tmp_path / "map.json").write_text(json.dumps(content))
    refused("stacks more tensors", load_checkpoint, directory, name_map=tmp_path / "map.json")


def test_a_config_of_endless_experts(foreign, tmp_path):
    directory = copied(foreign, tmp_path / "tree")
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": 4000, "num_experts": 60000}
    (directory / "config.json").write_text(json.dumps(config))
    refused("experts in all", load_checkpoint, directory, name_map="maxtext_qwen3_moe")


def test_a_leaf_with_other_braces(foreign, tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"rules": [{"leaf": "{a²}", "tensor": "b"}]}))
    refused("rules without a leaf", load_checkpoint, foreign, name_map=path)


def naive(pattern):
    """ignore_pattern as a regular expression that tries everything."""
    kinds = {"**": ".*", "*": "[^/]*"}
    parts = re.split(r"(\*\*|\*)", pattern)
    return re.compile("".join(kinds.get(part, re.escape(part)) for part in parts))


@pytest.mark.slow
@given(st.text("ab/*", max_size=9), st.text("ab/", max_size=9))
def test_ignore_patterns_match_what_they_say(pattern, path):
    assert bool(ignore_pattern(pattern).fullmatch(path)) == bool(naive(pattern).fullmatch(path))


@pytest.mark.parametrize("part", ["**a", "*a", "**a*b", "a**b*"])
def test_ignore_patterns_take_no_time(part):
    pattern, began = ignore_pattern(part * 80 + "c"), time.process_time()
    pattern.fullmatch("ab" * 250)
    pattern.fullmatch("a" * 500)
    assert time.process_time() - began < 1


def test_names_of_leaves_and_their_number(foreign, tmp_path):
    directory = copied(foreign, tmp_path / "tree")
    path = directory / "_METADATA"
    content = json.loads(path.read_text())
    entry = next(iter(content["tree_metadata"].values()))
    long = {**entry, "key_metadata": [{"key": "x" * 10**6, "key_type": 2}]}
    path.write_text(json.dumps({**content, "tree_metadata": {"x": long}}))
    refused("has 1000000 characters", load_checkpoint, directory, name_map="maxtext_qwen3_moe")
    many = {str(i): 0 for i in range(200_001)}
    path.write_text(json.dumps({**content, "tree_metadata": many}))
    refused("200001 leaves; at most", load_checkpoint, directory, name_map="maxtext_qwen3_moe")


def test_too_many_leaves_for_the_rules(tmp_path):
    rules = [{"leaf": f"a{i}", "tensor": f"b{i}"} for i in range(100)]
    leaves = {f"x/{i}": "" for i in range(110_000)}
    tree = Tree(tmp_path, leaves, True, False, {})
    refused("too many for the 100 rules", match_leaves, parse_name_map({"rules": rules}), tree)


# ---- messages


@pytest.mark.parametrize("name", ["x" * 8_000_000, "ä" * 100_000], ids=["long", "wide"])
def test_a_message_is_short_whatever_it_quotes(name, tmp_path):
    table = {name: {"dtype": "I32", "shape": [0], "data_offsets": [0, 0]}}
    path = header_file(tmp_path / SINGLE, json.dumps(table).encode())
    refused("use the model's bfloat16, float16 or float32 checkpoint$", read_header, path)


def test_messages_are_cut_in_the_middle():
    assert str(UserError("short\nlines")) == "short\nlines"
    long = str(UserError("begin " + "x" * 10**6 + " end"))
    assert len(long) == MOST_LINE and long.startswith("begin x") and long.endswith("x end")
    lines = str(UserError("\n".join(map(str, range(1000))))).split("\n")
    assert len(lines) == MOST_LINES + 1 and lines[0] == "0" and lines[-1] == "999"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        ("a\n", r"'a\n'"),
        (1 << 40_000, "an enormous number"),
        ("x" * 99, "'" + "x" * 76 + "..."),
    ],
    ids=["number", "text", "enormous", "long"],
)
def test_values_in_messages(value, text):
    assert shown(value) == text
