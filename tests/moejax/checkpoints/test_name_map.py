"""Name maps: trees of other programs become exactly the tensors that they were made from."""

from __future__ import annotations

import time

import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml

from moejax import UserError
from moejax.checkpoints import load
from moejax.checkpoints.foreign.checkpoint import open_mapped
from moejax.checkpoints.foreign.name_map import load_name_map, parse_name_map, shipped_maps
from moejax.checkpoints.load import load_checkpoint
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
            np.testing.assert_array_equal(reader.get_tensor(tensor), expected)
            np.testing.assert_array_equal(reader.get_rows(tensor, 2), expected[2])
            np.testing.assert_array_equal(reader.get_rows(tensor, slice(1, 3)), expected[1:3])


def test_loaded_model_equals_the_tensors(tmp_path):
    tensors = random_tensors(QWEN3)
    tree = maxtext_qwen3(tensors, QWEN3, padding=8)
    tree |= {"step": np.int32(7), "opt_state": [{"mu": tree["params"], "count": np.int32(7)}]}
    directory = save(tmp_path / "state", tree, QWEN3)
    assert_loaded(load_checkpoint(directory, name_map="maxtext_qwen3_moe"), tensors, QWEN3)


# ---- what a map can say


def test_experts_stacked_as_transformers_keeps_them(tmp_path):
    """Gate and up interleaved in one leaf; one expert is read alone."""
    gate_up, down = (f"model.layers.{{}}.mlp.experts.{n}_proj" for n in ("gate_up", "down"))
    tensors = random_tensors(QWEN3, np.float32, {gate_up.format(i) for i in range(2)})
    tree = dict(tensors)
    for i in range(2):
        both = tree.pop(gate_up.format(i))  # [E, 2·I, D]
        tree[f"wi.{i}"] = both.reshape(3, 2, 8, 16).transpose(0, 3, 2, 1).reshape(3, 16, 16)
        tree[f"wo.{i}"] = tree.pop(down.format(i))
    rules = [
        *HF,
        {
            "leaf": "wi/{layer}",
            "axes": "expert in (width matrix) -> expert (matrix width) in",
            "sizes": {"matrix": 2, "width": "moe_intermediate_size"},
            "tensor": gate_up.format("{layer}"),
        },
        {"leaf": "wo/{layer}", "tensor": down.format("{layer}")},
    ]
    directory = save(tmp_path / "tree", hf_tree(tree), QWEN3, use_ocdbt=False)
    _, mapped = open_mapped(directory, None, write_map(tmp_path, {"rules": rules}))
    with mapped.open() as reader:
        for name, expected in tensors.items():
            np.testing.assert_array_equal(reader.get_tensor(name), expected)
        for name in (gate_up.format(1), down.format(1)):
            np.testing.assert_array_equal(reader.get_rows(name, 1), tensors[name][1])


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
            np.testing.assert_array_equal(reader.get_tensor(name), expected)


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
            np.testing.assert_array_equal(reader.get_tensor(name), tensors[name] * factor)


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
        np.testing.assert_array_equal(reader.get_tensor(name), tensors[name])


# ---- what is wrong with a map, and with a tree for it


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A small tree under transformers' own names."""
    directory = tmp_path_factory.mktemp("plain")
    tensors = random_tensors(QWEN3)
    return save(directory / "tree", hf_tree(tensors), QWEN3), tensors


def test_the_map_of_the_same_names(plain, tmp_path):
    directory, tensors = plain
    loaded = load_checkpoint(directory, name_map=write_map(tmp_path, {"rules": [*HF, *EXPERTS]}))
    assert_loaded(loaded, tensors, QWEN3)


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
        ({"rules": [], "config": "x"}, "rules must be a list"),
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
        (changed(1, axes="a b"), "axes must be text like"),
        (changed(1, axes="(a b -> a b"), "axes must be text like"),
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
            r"model.final_norm.weight\).*tensors that the config has not",
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


def test_reading_headers_is_a_phase_of_the_start(plain, tmp_path, monkeypatch):
    def slow(*args):
        time.sleep(0.1)
        return open_mapped(*args)

    monkeypatch.setattr(load, "open_mapped", slow)
    name_map = write_map(tmp_path, {"rules": [*HF, *EXPERTS]})
    assert load_checkpoint(plain[0], name_map=name_map).seconds["headers"] > 0.1


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
