"""Orbax trees of other programs: layouts, steps and items, damage, and the maps that give names."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from orbax.checkpoint import v1

from moejax.checkpoints.foreign.mapped_tensors import open_mapped
from moejax.checkpoints.foreign.name_map import (
    ignore_pattern,
    load_name_map,
    match_leaves,
    parse_name_map,
    shipped_maps,
)
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.orbax.steps import find_items, is_orbax
from moejax.checkpoints.orbax.tree import LeafReader, Tree, leaf_headers, read_tree, touched_bytes
from moejax.errors import UserError
from tests.moejax.checkpoints.conversions import copied, read_tensor, refuses
from tests.moejax.checkpoints.foreign_trees import (
    EXPERTS,
    HF,
    hf_tree,
    maxtext_deepseek,
    maxtext_mixtral,
    maxtext_qwen3,
    nnx_qwen3,
    save,
    write_map,
)
from tests.moejax.checkpoints.random_checkpoint import CONFIG, assert_loaded, random_tensors

ONE = CONFIG | {"mlp_only_layers": [], "num_hidden_layers": 1}
QWEN3 = {**CONFIG, "mlp_only_layers": [], "num_hidden_layers": 2}

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 6,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "intermediate_size": 20,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}


# ---- layouts


WIDE = np.arange(240, dtype=np.float32).reshape(4, 6, 10)


def tree_of_every_kind():
    return {
        "net": {
            "wide": jnp.asarray(WIDE),
            "list": [jnp.ones(3, jnp.bfloat16), {"x": jnp.zeros(2)}],
        },
        "dotted.name": jnp.full((2, 2), 7.0, jnp.float16),
        "nothing": {},
        "text": "a note",
        "count": jnp.int32(3),
    }


LAYOUTS = {
    "v0": dict(use_ocdbt=True),
    "v0-files": dict(use_ocdbt=False),
    "v0-zarr3": dict(use_ocdbt=True, use_zarr3=True),
    "v1": None,
    "v1-files": None,
}


@pytest.fixture(scope="module", params=LAYOUTS)
def saved(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("layouts") / request.param
    if LAYOUTS[request.param] is not None:
        return save(directory, tree_of_every_kind(), None, **LAYOUTS[request.param])
    storage = v1.options.ArrayOptions.Saving(use_ocdbt=request.param == "v1")
    options = v1.options.ArrayOptions(saving=storage)
    with v1.Context(array_options=options):
        v1.save(directory, tree_of_every_kind())
    return directory


def test_orbaxs_modules_are_called_as_the_page_says(repository):
    page = (repository / "docs/how-to/checkpoints.md").read_text()
    named = {name: importlib.import_module(name) for name in re.findall(r"`(orbax[\w.]+)`", page)}
    assert named == {"orbax.checkpoint": ocp, "orbax.checkpoint.experimental.v1": v1}


def test_every_layout_is_read(saved):
    (item,) = find_items(saved).items.values()
    assert (item / "manifest.ocdbt").exists() != saved.name.endswith("files")
    tree = read_tree(item)
    assert set(tree.leaves) == {
        "net/wide",
        "net/list/0",
        "net/list/1/x",
        "dotted.name",
        "count",
    }
    leaves = leaf_headers(tree, ["net/wide", "net/list/0", "dotted.name"])
    headers = {path: (leaf.header.dtype, leaf.header.shape) for path, leaf in leaves.items()}
    assert headers == {
        "net/wide": ("float32", (4, 6, 10)),
        "net/list/0": ("bfloat16", (3,)),
        "dotted.name": ("float16", (2, 2)),
    }
    reader, wide = LeafReader(tree, 0), leaves["net/wide"]
    whole, index = (slice(None),) * 3, (slice(None), 2, slice(3, 5))
    np.testing.assert_array_equal(reader.read(wide, whole), WIDE)
    np.testing.assert_array_equal(reader.read(wide, index), WIDE[index])
    assert reader.read(leaves["dotted.name"], (slice(None), slice(None))).dtype == np.float16
    with pytest.raises(UserError, match="leaf count has dtype int32, which is not one of weights"):
        leaf_headers(tree, ["count"])


def test_only_the_touched_chunks_are_read(tmp_path):
    """Chunks of one index each: what is read is what is asked for, and no chunk beside it."""
    arguments = {"wide": ocp.SaveArgs(chunk_byte_size=6 * 10 * 4, shard_axes=(0,))}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(
            tmp_path / "tree",
            args=ocp.args.PyTreeSave({"wide": jnp.asarray(WIDE)}, save_args=arguments),
        )
    tree = read_tree(tmp_path / "tree")
    wide = leaf_headers(tree, ["wide"])["wide"]
    one = (2, slice(None), slice(None))
    assert wide.chunk == (1, 6, 10)
    assert touched_bytes(wide, one) == 240 and touched_bytes(wide, (slice(None),) * 3) == 960
    (tmp_path / "tree" / "wide" / "0.0.0").unlink()
    reader = LeafReader(tree, 1 << 20)
    np.testing.assert_array_equal(reader.read(wide, one), WIDE[one])
    # Orbax itself would give zeros.
    with pytest.raises(UserError, match=r"leaf wide is missing or damaged.*chunk.*is missing"):
        reader.read(wide, (slice(None),) * 3)


@pytest.mark.slow
def test_checkpoints_of_other_meshes_are_read(tmp_path):
    """Written by four devices, two by two; read by one."""
    script = """if True:
        import sys, jax, numpy as np, orbax.checkpoint as ocp
        from jax.sharding import NamedSharding, PartitionSpec as P
        mesh = jax.make_mesh((2, 2), ("a", "b"))
        wide = np.arange(240, dtype=np.float32).reshape(4, 6, 10)
        wide = jax.device_put(wide, NamedSharding(mesh, P("a", "b")))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(sys.argv[1], {"wide": wide})
    """
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    path = tmp_path / "tree"
    subprocess.run([sys.executable, "-c", script, path], env=os.environ | flags, check=True)
    tree = read_tree(path)
    wide = leaf_headers(tree, ["wide"])["wide"]
    assert wide.chunk == (2, 3, 10)
    reader = LeafReader(tree, 0)
    np.testing.assert_array_equal(reader.read(wide, (slice(None),) * 3), WIDE)
    np.testing.assert_array_equal(reader.read(wide, (3, slice(None), 9)), WIDE[3, :, 9])


# ---- steps and items


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Steps 1, 2 and 10 with metrics; the state has parameters, an optimizer and a note."""
    directory = tmp_path_factory.mktemp("run") / "run"
    tensors = random_tensors(ONE)
    options = ocp.CheckpointManagerOptions(best_fn=lambda m: m["loss"], step_prefix="step")
    with ocp.CheckpointManager(directory, options=options) as manager:
        for step, loss in ((1, 3.0), (2, 1.0), (10, 2.0)):
            scaled = {name: t + np.asarray(step, t.dtype) for name, t in tensors.items()}
            state = {"params": hf_tree(scaled), "opt_state": [jnp.ones(2)], "step": step}
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    config=ocp.args.JsonSave(ONE),
                    other=ocp.args.StandardSave({"x": jnp.ones(1)}),
                ),
                metrics={"loss": loss, "chrf": loss},
            )
    return directory, tensors


STATE = {
    "item": ["params", "state"],
    "root": "params",
    "ignore": ["opt_state/**", "step"],
    "rules": [*HF, *EXPERTS],
}


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (None, 10),
        ("latest", 10),
        (1, 1),
        ("best:loss:min", 2),
        ("best:loss:max", 1),
        ("best:chrf:max", 1),
    ],
)
def test_parameters_of_a_train_state_at_a_step(run, tmp_path, step, expected):
    directory, tensors = run
    assert find_items(directory, step).step == expected
    _, mapped = open_mapped(directory, step, write_map(tmp_path, STATE))
    assert set(mapped.tensors) == set(tensors)
    with mapped.open() as reader:
        norm = tensors["model.norm.weight"]
        expected = norm + np.asarray(expected, norm.dtype)
        np.testing.assert_array_equal(read_tensor(mapped, reader, "model.norm.weight"), expected)


def test_a_step_and_an_item_may_be_given_themselves(run, tmp_path):
    directory, name_map = run[0], write_map(tmp_path, STATE)
    for path in (directory / "step_2", directory / "step_2" / "state"):
        assert is_orbax(path) and find_items(path).step == 2
        assert load_checkpoint(path, name_map=name_map).config.hidden_size == 16
        with pytest.raises(UserError, match="is one checkpoint, so there is no step to choose"):
            load_checkpoint(path, step=2, name_map=name_map)


@pytest.mark.parametrize(
    ("step", "match"),
    [
        (3, "has no step 3; steps: 1, 2, 10"),
        (-1, "step -1 is unknown; give a number, latest, best"),
        (True, "step True is unknown"),
        ("newest", "step 'newest' is unknown"),
        ("best:loss:low", "step 'best:loss:low' is unknown"),
        ("best:loss", "step 'best:loss' is unknown; .* such as best:loss:min"),
        ("best:bleu:max", "no step records 'bleu'; recorded: chrf, loss"),
    ],
)
def test_steps_that_cannot_be_chosen(run, step, match):
    with pytest.raises(UserError, match=match):
        find_items(run[0], step)


def test_best_needs_metrics(run, tmp_path):
    shutil.copytree(run[0] / "step_2", tmp_path / "2", ignore=shutil.ignore_patterns("metrics"))
    with pytest.raises(UserError, match="no step records 'loss'; recorded: nothing"):
        find_items(tmp_path, "best:loss:min")
    shutil.copytree(tmp_path / "2", tmp_path / "step_2")
    with pytest.raises(UserError, match="step 2 is there twice, as 2 and as step_2"):
        find_items(tmp_path)


def test_unfinished_checkpoints_are_refused(run, tmp_path):
    name = "11.orbax-checkpoint-tmp-5"
    shutil.copytree(run[0] / "step_2", tmp_path / name)
    shutil.copytree(run[0] / "step_2", tmp_path / "2")
    assert find_items(tmp_path).step == 2
    with pytest.raises(UserError, match="unfinished checkpoint"):
        find_items(tmp_path / name)
    (tmp_path / "2" / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": null}')
    with pytest.raises(UserError, match="names no time of commit"):
        find_items(tmp_path)


def test_items_must_be_named_where_there_are_several(run, tmp_path):
    with pytest.raises(UserError, match=r"which item of step 10 .*: other, state\?"):
        open_mapped(run[0], None, write_map(tmp_path, {**STATE, "item": "model"}))
    with pytest.raises(UserError, match="no Orbax checkpoint: neither _METADATA nor steps"):
        find_items(tmp_path)


def test_step_and_map_are_refused_for_other_checkpoints(demo_dir):
    with pytest.raises(UserError, match="step and name_map are for Orbax checkpoints"):
        load_checkpoint(demo_dir, step=3)


# ---- damage


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A loadable tree in a directory per leaf."""
    directory = tmp_path_factory.mktemp("whole")
    tree = hf_tree(random_tensors(ONE))
    return save(directory / "tree", tree, ONE, use_ocdbt=False)


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "tree")


NORM = "model.norm.weight"


def edit_metadata(copy, old, new):
    path = copy / "_METADATA"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def edit_array(copy, **fields):
    path = copy / NORM / ".zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def sparse(path):
    os.truncate(path, 200 << 30)


DAMAGE = {
    "no array": (lambda c: shutil.rmtree(c / NORM), "is missing or damaged"),
    "no chunk, old Orbax": (
        lambda c: (
            (c / NORM / "0").unlink(),
            edit_metadata(c, '"store_array_data_equal_to_fill_value": true, ', ""),
        ),
        "an old Orbax, which left out chunks of zeros.* save it again",
    ),
    "array no JSON": (lambda c: (c / NORM / ".zarray").write_text("{"), "missing or damaged"),
    "absurd shape": (lambda c: edit_array(c, shape=[2**50]), r"\[1125899906842624\]"),
    "absurd chunks": (lambda c: edit_array(c, chunks=[2**40]), "larger than itself"),
    "no axis": (lambda c: edit_array(c, shape=[], chunks=[]), r"of shape \[\]"),
    "wrong dtype": (lambda c: edit_array(c, dtype="<f8"), "has dtype float64, which is not"),
    "pickled objects": (lambda c: edit_array(c, filters=[{"id": "pickle"}]), "missing or damaged"),
    "path upwards": (lambda c: edit_metadata(c, '"norm"', '"../../norm"'), "outside"),
    "absolute path": (lambda c: edit_metadata(c, '"model"', '"/etc"'), "outside"),
    "escape codes": (
        lambda c: edit_metadata(c, '"q_norm"', r'"\u001b[2J"'),
        r"self_attn/\\x1b\[2J/weight' has unprintable characters",
    ),
    "same name twice": (
        lambda c: edit_metadata(c, '"q_norm"', '"k_norm"'),
        "two leaves are called model/layers/0/self_attn/k_norm/weight",
    ),
    "no keys": (lambda c: edit_metadata(c, '"key_metadata"', '"keys"'), "has no key_metadata"),
    "no tree": (lambda c: edit_metadata(c, '"tree_metadata"', '"tree"'), "must be an object"),
    "metadata no JSON": (lambda c: (c / "_METADATA").write_bytes(b"\xff{"), "read as JSON"),
    "link to nothing": (
        lambda c: (c / "more").symlink_to("nothing"),
        "more: cannot be read: No such file",
    ),
    "loop of links": (lambda c: (c / "more").symlink_to("more"), "more: a link in a loop"),
    "list of leaves a pipe": (lambda c: pipe(c / "_METADATA"), "neither _METADATA"),
    "list of leaves without end": (lambda c: sparse(c / "_METADATA"), r"_METADATA: \d+ bytes"),
    "chunk without end": (lambda c: sparse(c / NORM / "0"), "too many for"),
    "array without end": (lambda c: sparse(c / NORM / ".zarray"), "too many for"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_and_hostile_trees_are_refused(copy, tmp_path, damage):
    do, match = DAMAGE[damage]
    do(copy)
    name_map = write_map(tmp_path, {"rules": [*HF, *EXPERTS]})
    refuses(match, load_checkpoint, copy, name_map=name_map)


def test_an_item_that_is_a_link_out_is_refused(run, tmp_path):
    step = tmp_path / "root" / "2"
    step.mkdir(parents=True)
    (step / "state").symlink_to(run[0] / "step_2" / "state")
    with pytest.raises(UserError, match="a link that leaves"):
        open_mapped(tmp_path / "root", None, write_map(tmp_path, STATE))


def test_names_of_leaves_and_their_number(copy, map_of_all):
    path = copy / "_METADATA"
    content = json.loads(path.read_text())
    entry = next(iter(content["tree_metadata"].values()))
    long = {**entry, "key_metadata": [{"key": "x" * 10**6, "key_type": 2}]}
    path.write_text(json.dumps({**content, "tree_metadata": {"x": long}}))
    refuses("has 1000000 characters", load_checkpoint, copy, name_map=map_of_all)
    many = {str(i): 0 for i in range(200_001)}
    path.write_text(json.dumps({**content, "tree_metadata": many}))
    refuses("200001 leaves; at most", load_checkpoint, copy, name_map=map_of_all)


@pytest.fixture
def map_of_all(tmp_path):
    return write_map(tmp_path, {"rules": [*HF, *EXPERTS]})


# ---- fuzz: whatever the bytes are, it loads or says why not


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fuzz")
    tree = save(directory / "tree", hf_tree(random_tensors(ONE)), ONE)
    return tree, write_map(directory, {"rules": [*HF, *EXPERTS]})


def read_all(path, name_map):
    """The refusal, or None if all tensors can be read."""
    try:
        _, mapped = open_mapped(path, None, name_map)
        with mapped.open() as reader:
            for name, header in mapped.tensors.items():
                assert read_tensor(mapped, reader, name).shape == header.shape
    except UserError as error:
        return str(error)


FILES = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "config.json")


@settings(max_examples=40)
@given(st.sampled_from(FILES), st.data())
def test_changed_bytes_are_read_or_refused(fuzzed, file, data):
    directory, name_map = fuzzed
    path = directory / file
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    new = data.draw(st.binary(min_size=0, max_size=4))
    path.write_bytes(good[:at] + new + good[at + data.draw(st.sampled_from((0, 1, 4, 10**9))) :])
    try:
        message = read_all(directory, name_map)
    finally:
        path.write_bytes(good)
    assert message is None or str(directory) in message


# ---- name maps


TREES = {
    "maxtext_qwen3_moe": (maxtext_qwen3, QWEN3),
    "maxtext_mixtral": (maxtext_mixtral, MIXTRAL),
    "maxtext_deepseek": (maxtext_deepseek, DEEPSEEK),
    "nnx_qwen3_moe": (nnx_qwen3, QWEN3),
}


def test_every_shipped_map_is_tested():
    assert set(shipped_maps()) == set(TREES)


@pytest.mark.parametrize("name", TREES)
def test_shipped_maps_read_the_tensors_back(tmp_path, name):
    make, config = TREES[name]
    tensors = random_tensors(config)
    directory = save(tmp_path / "tree", make(tensors, config), config)
    _, mapped = open_mapped(directory, None, name)
    assert set(mapped.tensors) == set(tensors)
    with mapped.open() as reader:
        for tensor, expected in tensors.items():
            header = mapped.tensors[tensor]
            assert header.shape == expected.shape and header.dtype == expected.dtype.name
            np.testing.assert_array_equal(read_tensor(mapped, reader, tensor), expected)
            if expected.ndim > 1:
                row = read_tensor(mapped, reader, tensor, 2)
                np.testing.assert_array_equal(row, expected[2])


def test_loaded_model_equals_the_tensors(tmp_path):
    tensors = random_tensors(QWEN3)
    tree = maxtext_qwen3(tensors, QWEN3, padding=8)
    tree |= {"step": np.int32(7), "opt_state": [{"mu": tree["params"], "count": np.int32(7)}]}
    directory = save(tmp_path / "state", tree, QWEN3)
    assert_loaded(load_checkpoint(directory, name_map="maxtext_qwen3_moe"), tensors, QWEN3)


def test_numbers_may_be_computed(tmp_path):
    """Two stacks of every other layer, as MaxText's cycles of layers are."""
    tensors, rules = random_tensors(MIXTRAL | {"num_hidden_layers": 4}, np.float32), []
    tree = {n: t for n, t in tensors.items() if ".layers." not in n}
    suffixes = {n.split(".", 3)[3] for n in tensors if ".layers." in n}
    for suffix in sorted(suffixes):
        for half in range(2):
            leaf = f"half{half}.{suffix}"
            tree[leaf] = np.stack([tensors[f"model.layers.{i}.{suffix}"] for i in (half, 2 + half)])
            axes = "block a b -> a b" if tree[leaf].ndim == 3 else "block a -> a"
            name = f"model.layers.{{block*num_experts_per_tok+{half}}}.{suffix}"
            rules.append({"leaf": leaf.replace(".", "/"), "axes": axes, "tensor": name})
    rules += [r for r in HF if "{layer}" not in r["leaf"]]
    config = MIXTRAL | {"num_hidden_layers": 4}
    directory = save(tmp_path / "tree", hf_tree(tree), config)
    _, mapped = open_mapped(directory, None, write_map(tmp_path, {"rules": rules}))
    with mapped.open() as reader:
        for name, expected in tensors.items():
            np.testing.assert_array_equal(read_tensor(mapped, reader, name), expected)


@pytest.mark.parametrize(
    ("scale", "factor"), [(3, 3), ("sqrt(head_dim)", 2), ("1/sqrt(head_dim)", 0.5)]
)
def test_values_may_be_scaled(tmp_path, scale, factor):
    # Heads that make no projection square: a square one has to say how it lies.
    config = QWEN3 | {"head_dim": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    tensors = random_tensors(config, np.float32)
    directory = save(tmp_path / "tree", hf_tree(tensors), config)
    rules = [{**rule, "scale": scale} for rule in (*HF, *EXPERTS)]
    _, mapped = open_mapped(directory, None, write_map(tmp_path, {"rules": rules}))
    with mapped.open() as reader:
        for name in ("model.norm.weight", "model.layers.1.self_attn.q_proj.weight"):
            np.testing.assert_array_equal(read_tensor(mapped, reader, name), tensors[name] * factor)


def test_a_square_leaf_says_how_it_lies(tmp_path):
    """Its shape does not tell whether it is transposed."""
    config = QWEN3 | {"head_dim": QWEN3["hidden_size"] // QWEN3["num_attention_heads"]}
    tensors = random_tensors(config)
    directory = save(tmp_path / "tree", hf_tree(tensors), config)
    rules = [*HF, *EXPERTS]
    with pytest.raises(UserError, match=r"_proj.* is square .* write axes"):
        open_mapped(directory, None, write_map(tmp_path, {"rules": rules}))
    square = ("q_proj", "o_proj")
    said = [
        {**rule, "axes": "out in -> out in"} if any(s in rule["leaf"] for s in square) else rule
        for rule in rules
    ]
    _, mapped = open_mapped(directory, None, write_map(tmp_path, {"rules": said}))
    with mapped.open() as reader:
        name = "model.layers.1.self_attn.q_proj.weight"
        np.testing.assert_array_equal(read_tensor(mapped, reader, name), tensors[name])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A small tree under transformers' own names."""
    directory = tmp_path_factory.mktemp("plain")
    tensors = random_tensors(QWEN3)
    return save(directory / "tree", hf_tree(tensors), QWEN3), tensors


def changed(index, **fields):
    rules = [dict(rule) for rule in (*HF, *EXPERTS)]
    rules[index] |= fields
    return {"rules": rules}


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        ([], "expected an object, found list"),
        ({"rule": []}, "unknown field 'rule'; known: item, root"),
        ({"rules": {}}, "rules must be a list"),
        ({**changed(0), "config": "x"}, "config must be an object"),
        ({**changed(0), "item": 3}, "item must be text or a list"),
        ({"rules": ["a"]}, "rule 1: expected an object"),
        (changed(1, leaf=""), "rule 2: leaf must be a path"),
        (changed(1, tensor=[]), r"rule 2 \(model/norm/weight\): tensor must be a name"),
        (changed(1, tensor="model.{layer}.w"), "must name nothing in braces, and it names {layer}"),
        (changed(3, tensor="model.norm"), "must name {layer}, and it names nothing"),
        (changed(3, leaf="a/{layer}/{layer}"), "stands for two"),
        (changed(3, leaf="a/{layer+1}"), "arithmetic belongs into tensor"),
        (changed(1, axes=5), "axes must be text like"),
        (changed(1, axes="a () -> a"), "axes must be text like"),
        (changed(1, axes="a a -> a"), "named twice"),
        (changed(1, axes="a -> a b"), "axis b of the result is not in the leaf"),
        (changed(1, axes="a -> a", sizes={"b": 2}), "sizes names b, which is no axis"),
        (changed(1, axes="a -> a", sizes={"a": 0}), "sizes must be an object"),
        (changed(1, axes="a -> a", values={"a": ["x"]}), "values names a, which is no axis"),
        (changed(1, axes="a -> a", values={"a": [1]}), "values must be lists of names"),
        (changed(1, scale="sqrt(2"), "scale must be a number"),
        (changed(1, crop=1), "crop must be true or false"),
    ],
)
def test_malformed_maps_are_refused(raw, match):
    with pytest.raises(UserError, match=match):
        parse_name_map(raw, "m.yaml")


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (
            changed(1, leaf="model/final_norm/weight"),
            r"(?s)leaves without a rule \(1\):\n  model/norm/weight \(nearest rule: "
            r"model/final_norm/weight\).*rules without a leaf \(1\):\n  model/final_norm/weight "
            r"\(nearest leaf: model/norm/weight\)",
        ),
        (
            changed(1, tensor="model.final_norm.weight"),
            r"(?s)tensors that are missing \(1\):\n  model.norm.weight \(nearest made: "
            r"model.final_norm.weight\).*tensors that the config does not have",
        ),
        (changed(1, tensor="model.embed_tokens.weight"), "holds model.embed_tokens.weight, and"),
        (changed(1, leaf="model/embed_tokens/weight"), "two rules take the leaf model/embed_tok"),
        (changed(1, axes="a b -> a b"), r"shape \[16\], which does not fit the axes \(a\) \(b\)"),
        (changed(1, axes="(a b) -> a b", sizes={"a": 3}), "does not fit the axes"),
        (changed(1, axes="(a b c) -> a b c", sizes={"a": 2}), "sizes for all but one of a, b, c"),
        (changed(1, axes="(a b) -> a b", sizes={"a": "no_field"}), "no integer no_field"),
        (changed(0, axes="a b -> b a"), r"of shape \[16, 24\] from .* asks for \[24, 16\]"),
        (
            changed(0, axes="row a -> a", tensor="model.embed.{row}"),
            "stacks more tensors than the config's 2 layers and 3 experts",
        ),
        (
            changed(
                1, axes="(a b) -> b", sizes={"a": 2}, values={"a": ["x", "y"]}, tensor="model.{a+1}"
            ),
            "a has names, so {a.1} is no number",
        ),
        ({"rules": [{"leaf": "{a²}", "tensor": "b"}]}, "rules without a leaf"),
        ({**changed(1), "root": "params"}, r"leaves without a rule \(39\)"),
        ({**changed(1), "ignore": ["model/norm/*"]}, r"rules without a leaf \(1\)"),
        ({**changed(1), "config": {**QWEN3, "vocab_size": 5}}, "differ in vocab_size; keep one"),
    ],
)
def test_maps_that_do_not_fit_are_refused(plain, tmp_path, raw, match):
    with pytest.raises(UserError, match=match):
        open_mapped(plain[0], None, write_map(tmp_path, raw))


def test_files_that_are_no_maps_are_refused(plain, tmp_path):
    with pytest.raises(UserError, match="no such name map; the package has maxtext_deepseek"):
        load_name_map(tmp_path / "none.yaml")
    with pytest.raises(UserError, match=r"no name map; give a \.yaml, \.yml or \.json file"):
        load_name_map("maxtext_qwen3")
    for name, text in (("a.yaml", "rules: ["), ("b.json", "{"), ("c.yaml", "!!python/name:os.x")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match="cannot be read as a name map"):
            load_name_map(tmp_path / name)
    with pytest.raises(UserError, match=r"needs name_map.*nnx_qwen3_moe.*leaves: lm_head/weight"):
        load_checkpoint(plain[0])


def test_a_map_may_bring_the_config(plain, tmp_path):
    tensors = plain[1]
    directory = save(tmp_path / "tree", hf_tree(tensors), None)
    rules = [*HF, *EXPERTS]
    with pytest.raises(UserError, match=r"no config.json, .* put the model's config.json into"):
        open_mapped(directory, None, write_map(tmp_path, {"rules": rules}))
    path = tmp_path / "map.yaml"
    path.write_text(yaml.safe_dump({"rules": rules, "config": QWEN3}))
    config, mapped = open_mapped(directory, None, path)
    assert config.hidden_size == 16 and set(mapped.tensors) == set(tensors)


def test_the_config_may_be_custom_metadata(plain, tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        tree = ocp.args.StandardSave(hf_tree(plain[1]))
        manager.save(3, args=tree, custom_metadata={"config": QWEN3})
    name_map = write_map(tmp_path, {"rules": [*HF, *EXPERTS]})
    assert open_mapped(tmp_path / "run", None, name_map)[0].num_hidden_layers == 2


# ---- small maps with much work in them


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
        ("rules: [{leaf: '{a}{b}', tensor: 'x{a}{b}'}]", "where the number ends is ambiguous"),
        ("rules: [{leaf: '{a}1', tensor: 'x{a}'}]", "where the number ends is ambiguous"),
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
    refuses(f"map.yaml: .*{message}", load_name_map, path)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    directory = tmp_path_factory.mktemp("foreign") / "tree"
    return save(directory, maxtext_qwen3(random_tensors(QWEN3), QWEN3), QWEN3, use_ocdbt=False)


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
    refuses("the config's zero is 0|no integer huge", load_checkpoint, directory, name_map=path)


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
    refuses("stacks more tensors", load_checkpoint, directory, name_map=tmp_path / "map.json")


@pytest.mark.parametrize("part", ["**a", "*a", "**a*b", "a**b*"])
def test_ignore_patterns_take_no_time(part):
    pattern, began = ignore_pattern(part * 80 + "c"), time.process_time()
    pattern.fullmatch("ab" * 250)
    pattern.fullmatch("a" * 500)
    assert time.process_time() - began < 1


def test_too_many_leaves_for_the_rules(tmp_path):
    rules = [{"leaf": f"a{i}", "tensor": f"b{i}"} for i in range(100)]
    leaves = {f"x/{i}": "" for i in range(110_000)}
    tree = Tree(tmp_path, leaves, True, False, {})
    refuses("too many for the 100 rules", match_leaves, parse_name_map({"rules": rules}), tree)
