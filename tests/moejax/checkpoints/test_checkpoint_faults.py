"""Faults of a checkpoint: one line that names the file and the tensor."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moejax.checkpoints.load import load_checkpoint
from moejax.errors import UserError
from tests.moejax.checkpoints.random_checkpoint import (
    BF16,
    CONFIG,
    HEAD,
    UP,
    assert_loaded,
    random_tensors,
    write,
)


def replaced(name, change):
    def edit(directory):
        tensors = random_tensors(CONFIG)
        tensors[name] = change(tensors[name])
        write(directory, tensors)

    return edit


def without(*names):
    return lambda directory: write(
        directory, {n: t for n, t in random_tensors(CONFIG).items() if n not in names}
    )


def sharded(index=None, then=None):
    def edit(directory):
        write(directory, random_tensors(CONFIG), shards=2, index=index)
        if then is not None:
            then(directory)

    return edit


def truncate(name, size):
    def edit(directory):
        with open(directory / name, "r+b") as file:
            file.truncate(size)

    return edit


def named_only(*names):
    """A directory with config.json and these empty files."""

    def edit(directory):
        (directory / "config.json").write_text(json.dumps(CONFIG))
        for name in names:
            (directory / name).write_text("")

    return edit


def single_then(change):
    def edit(directory):
        write(directory, random_tensors(CONFIG))
        change(directory)

    return edit


def typed(dtype, nbytes):
    """A hand-made file whose one tensor has a dtype that numpy lacks."""

    def edit(directory):
        (directory / "config.json").write_text(json.dumps(CONFIG))
        header = json.dumps(
            {UP: {"dtype": dtype, "shape": [8, 16], "data_offsets": [0, 128 * nbytes]}}
        ).encode()
        (directory / "model.safetensors").write_bytes(
            len(header).to_bytes(8, "little") + header + bytes(128 * nbytes)
        )

    return edit


UP_RE = UP.replace(".", r"\.")
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(named_only(), "neither model.safetensors nor .*index.json found$", id="empty"),
        pytest.param(named_only("pytorch_model.bin"), "only PyTorch .bin.*convert", id="bin"),
        pytest.param(named_only("model-q4.gguf"), "only GGUF", id="gguf"),
        pytest.param(
            named_only("model.safetensors"), "model.safetensors: damaged or trunc", id="void"
        ),
        pytest.param(
            single_then(truncate("model.safetensors", 9000)),
            "model.safetensors: damaged or truncated",
            id="truncated",
        ),
        pytest.param(
            single_then(truncate("model.safetensors", 100)),
            "model.safetensors: damaged or truncated",
            id="header truncated",
        ),
        pytest.param(
            single_then(
                lambda d: (d / "model.safetensors").write_text(
                    "version https://git-lfs.github.com/spec/v1\n"
                )
            ),
            "damaged .*git lfs pull",
            id="lfs",
        ),
        pytest.param(
            sharded(then=truncate("part-1.safetensors", 5000)),
            "part-1.safetensors: damaged or truncated",
            id="shard truncated",
        ),
        pytest.param(
            sharded(then=lambda d: (d / "part-1.safetensors").unlink()),
            "part-1.safetensors: shard missing",
            id="shard missing",
        ),
        pytest.param(
            sharded(index={"extra.weight": "part-1.safetensors"}),
            "part-1.safetensors: lacks the tensor extra.weight, which .*index.json places",
            id="index names an absent tensor",
        ),
        pytest.param(
            sharded(
                then=lambda d: save_file(
                    {**load_file(d / "part-0.safetensors"), **load_file(d / "part-1.safetensors")},
                    d / "part-0.safetensors",
                )
            ),
            "part-0.safetensors: holds the tensor .*index.json places it in part-1",
            id="index names another shard",
        ),
        pytest.param(
            sharded(
                then=lambda d: save_file(
                    {**load_file(d / "part-0.safetensors"), "more": np.zeros(1, BF16)},
                    d / "part-0.safetensors",
                )
            ),
            "holds the tensor more, but .* does not know it",
            id="tensor outside of the index",
        ),
        pytest.param(
            sharded(index={UP: "../outside.safetensors"}),
            "index.json: tensor .*'../outside.safetensors', which is not",
            id="escape",
        ),
        pytest.param(
            sharded(index={UP: "/etc/x.safetensors"}),
            "'/etc/x.safetensors', which is not",
            id="absolute",
        ),
        pytest.param(sharded(index={UP: 3}), "placed in 3, which is not", id="no file name"),
        pytest.param(
            sharded(index={UP: "config.json"}), "'config.json', which is not", id="no shard"
        ),
        pytest.param(
            sharded(then=lambda d: (d / INDEX).write_text("{")),
            "index.json: cannot be read as JSON",
            id="malformed index",
        ),
        pytest.param(
            sharded(then=lambda d: (d / INDEX).write_text("{}")),
            "index.json: weight_map must be an object",
            id="index without map",
        ),
        pytest.param(without(UP), f"tensor {UP_RE} is missing$", id="tensor missing"),
        pytest.param(
            without(UP, HEAD),
            r"tensor lm_head.weight is missing \(and 1 others\)",
            id="tensors missing",
        ),
        pytest.param(
            lambda d: write(d, {**random_tensors(CONFIG), "model.x": np.zeros(1, BF16)}),
            "model.safetensors: unknown tensor model.x",
            id="unknown tensor",
        ),
        pytest.param(
            lambda d: write(d, random_tensors({**CONFIG, "num_experts": 4})),
            "unknown tensor model.layers.0.mlp.experts.3.down_proj.weight|has shape",
            id="E",
        ),
        pytest.param(
            replaced(UP, lambda t: t.T.copy()),
            rf"model.safetensors: tensor {UP_RE} has shape \[16, 8\], but .* \[8, 16\]",
            id="shape",
        ),
        pytest.param(
            replaced(UP, lambda t: t.astype(np.int32)),
            f"tensor {UP_RE} has dtype I32 .*GPTQ",
            id="int32",
        ),
        pytest.param(
            replaced(UP, lambda t: t.astype(np.uint8)), "has dtype U8 .*bitsandbytes", id="uint8"
        ),
        pytest.param(
            replaced(UP, lambda t: t.astype(np.float64)),
            "has dtype F64 .not a dtype of weights",
            id="float64",
        ),
        pytest.param(typed("F8_E4M3", 1), f"tensor {UP_RE} has dtype F8_E4M3 .*FP8", id="fp8"),
    ],
)
def test_faults(tmp_path, edit, message):
    edit(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load_checkpoint(tmp_path)
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


def test_values_beyond_float16(tmp_path):
    tensors = random_tensors(CONFIG)
    tensors[UP][2, 3] = 1e6
    write(tmp_path, tensors)
    with pytest.raises(UserError, match=f"tensor {UP_RE} has values that float16 cannot hold"):
        load_checkpoint(tmp_path, "half")
    assert_loaded(load_checkpoint(tmp_path, "float32"), tensors, CONFIG)
    tensors[UP][2, 3] = np.inf  # what the checkpoint itself holds is kept
    write(tmp_path, tensors)
    assert_loaded(load_checkpoint(tmp_path, "half"), tensors, CONFIG)


def test_values_beyond_bfloat16(tmp_path):
    tensors = random_tensors(CONFIG, np.float32)
    tensors[UP][0, 0] = np.finfo(np.float32).max
    write(tmp_path, tensors)
    with pytest.raises(UserError, match="has values that bfloat16 cannot hold"):
        load_checkpoint(tmp_path)


def test_unknown_dtype_option(tmp_path):
    write(tmp_path, random_tensors(CONFIG))
    with pytest.raises(UserError, match="dtype 'int4' is unknown; choose auto, half"):
        load_checkpoint(tmp_path, "int4")


def test_hub_id():
    with pytest.raises(UserError, match=r"hub id.*downloads nothing"):
        load_checkpoint("Qwen/Qwen3-30B-A3B")


def test_store_beyond_the_machine(tmp_path):
    def refuse(*_):
        raise MemoryError("cannot allocate 99.0 GiB of pinned host memory")

    write(tmp_path, random_tensors(CONFIG))
    with pytest.raises(UserError, match=r"cannot allocate 99\.0 GiB"):
        load_checkpoint(tmp_path, new_builder=refuse)
