"""Orbax trees of every layout, the choice of steps and items, and what is damaged or hostile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orbax.checkpoint import v1

from moejax import UserError
from moejax.checkpoints.foreign.checkpoint import open_mapped
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.orbax.steps import find_items, is_orbax
from moejax.checkpoints.orbax.tree import LeafReader, leaf_headers, read_tree, touched_bytes
from tests.moejax.checkpoints.foreign_trees import EXPERTS, HF, hf_tree, save, write_map
from tests.moejax.checkpoints.random_checkpoint import CONFIG, random_tensors

CONFIG = CONFIG | {"mlp_only_layers": [], "num_hidden_layers": 1}
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
    tensors = random_tensors(CONFIG)
    options = ocp.CheckpointManagerOptions(best_fn=lambda m: m["loss"], step_prefix="step")
    with ocp.CheckpointManager(directory, options=options) as manager:
        for step, loss in ((1, 3.0), (2, 1.0), (10, 2.0)):
            scaled = {name: t + np.asarray(step, t.dtype) for name, t in tensors.items()}
            state = {"params": hf_tree(scaled), "opt_state": [jnp.ones(2)], "step": step}
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    config=ocp.args.JsonSave(CONFIG),
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
        ("best:loss", 2),
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
        np.testing.assert_array_equal(reader.get_tensor("model.norm.weight"), expected)


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
        ("best", "several metrics are recorded .chrf, loss.; say which one: best:chrf"),
        ("best:bleu", "no step records 'bleu'; recorded: chrf, loss"),
        ("best:chrf", "a low or a high chrf better.* best:chrf:min or best:chrf:max"),
    ],
)
def test_steps_that_cannot_be_chosen(run, step, match):
    with pytest.raises(UserError, match=match):
        find_items(run[0], step)


def test_best_needs_metrics(run, tmp_path):
    shutil.copytree(run[0] / "step_2", tmp_path / "2", ignore=shutil.ignore_patterns("metrics"))
    with pytest.raises(UserError, match="needs metrics, but no step has any: CheckpointManager"):
        find_items(tmp_path, "best")
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
    tree = hf_tree(random_tensors(CONFIG))
    return save(directory / "tree", tree, CONFIG, use_ocdbt=False)


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


def link(copy):
    shutil.move(copy / NORM, copy.parent / "outside")
    (copy / NORM).symlink_to(copy.parent / "outside")


DAMAGE = {
    "no chunk": (lambda c: (c / NORM / "0").unlink(), f"leaf {NORM.replace('.', '/')} is missing"),
    "cut chunk": (lambda c: os.truncate(c / NORM / "0", 9), "is missing or damaged"),
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
    "negative shape": (lambda c: edit_array(c, shape=[-4]), "missing or damaged"),
    "absurd chunks": (lambda c: edit_array(c, chunks=[2**40]), "larger than itself"),
    "no axis": (lambda c: edit_array(c, shape=[], chunks=[]), r"of shape \[\]"),
    "wrong dtype": (lambda c: edit_array(c, dtype="<f8"), "has dtype float64, which is not"),
    "unknown dtype": (lambda c: edit_array(c, dtype="|O"), "missing or damaged"),
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
    "link out": (link, "a link that leaves the checkpoint"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_and_hostile_trees_are_refused(copy, tmp_path, damage):
    do, match = DAMAGE[damage]
    do(copy)
    with pytest.raises(UserError, match=match):
        load_checkpoint(copy, name_map=write_map(tmp_path, {"rules": [*HF, *EXPERTS]}))


def test_files_of_the_hub_cache_are_links(copy, tmp_path):
    tree = tmp_path / "models--some--model" / "snapshots" / "abc" / "params"
    shutil.copytree(copy, tree)
    blobs = tmp_path / "models--some--model" / "blobs"
    blobs.mkdir()
    for number, path in enumerate(p for p in tree.rglob("*") if p.is_file()):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    load_checkpoint(tree, name_map=write_map(tmp_path, {"rules": [*HF, *EXPERTS]}))


def test_an_item_that_is_a_link_out_is_refused(run, tmp_path):
    step = tmp_path / "root" / "2"
    step.mkdir(parents=True)
    (step / "state").symlink_to(run[0] / "step_2" / "state")
    with pytest.raises(UserError, match="a link that leaves"):
        open_mapped(tmp_path / "root", None, write_map(tmp_path, STATE))


# ---- fuzz: whatever the bytes are, it loads or says why not


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fuzz")
    tree = save(directory / "tree", hf_tree(random_tensors(CONFIG)), CONFIG)
    return tree, write_map(directory, {"rules": [*HF, *EXPERTS]})


def read_all(path, name_map):
    """The refusal, or None if all tensors can be read."""
    try:
        _, mapped = open_mapped(path, None, name_map)
        with mapped.open() as reader:
            for name, header in mapped.tensors.items():
                assert reader.get_tensor(name).shape == header.shape
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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@settings(max_examples=40)
@given(st.sampled_from(FILES[:2]), st.data())
def test_changed_fields_are_read_or_refused(fuzzed, file, data):
    """One value anywhere in the metadata becomes any other JSON."""
    directory, name_map = fuzzed
    path = directory / file
    good = path.read_text()
    at = root = json.loads(good)
    while True:
        keys = sorted(at) if isinstance(at, dict) else range(len(at))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(JSON)
    path.write_text(json.dumps(root))
    try:
        message = read_all(directory, name_map)
    finally:
        path.write_text(good)
    assert message is None or str(directory) in message
