"""The safetensors files of a checkpoint and the tensors that their headers announce."""

from __future__ import annotations

import dataclasses
import pathlib

from safetensors import SafetensorError, safe_open

from moejax.checkpoints.directory import read_json
from moejax.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

FLOAT_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""safetensors' name → numpy's, of the dtypes a checkpoint may hold."""


@dataclasses.dataclass(frozen=True)
class Header:
    """One tensor as its shard announces it: dtype is one of FLOAT_DTYPES' values."""

    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Shard:
    """One safetensors file and the headers of its tensors, by name."""

    path: pathlib.Path
    tensors: dict[str, Header]


def find_shards(directory: pathlib.Path) -> tuple[Shard, ...]:
    """The shards of a checkpoint: model.safetensors, or the files that the index names.

    Reads headers only. Raises UserError, naming file and tensor, where a shard is missing or
    damaged, index and shards disagree, or a dtype is not one of FLOAT_DTYPES.
    """
    if (directory / SINGLE).exists():
        return (_read_header(directory / SINGLE),)
    if not (directory / INDEX).exists():
        raise UserError(_nothing_found(directory))
    owner = _read_index(directory / INDEX)
    shards = []
    for file in sorted(set(owner.values())):
        path = directory / file
        if not path.exists():
            raise UserError(f"{path}: shard missing, though {INDEX} names it; download it again")
        shard = _read_header(path)
        for name in shard.tensors:
            if owner.get(name) != file:
                elsewhere = f"places it in {owner[name]}" if name in owner else "does not know it"
                raise UserError(f"{path}: holds the tensor {name}, but {INDEX} {elsewhere}")
        shards.append(shard)
        absent = [n for n, f in owner.items() if f == file and n not in shard.tensors]
        if absent:
            raise UserError(f"{path}: lacks the tensor {absent[0]}, which {INDEX} places there")
    return tuple(shards)


def damaged(path: pathlib.Path, error: Exception) -> UserError:
    """The error for a file that the safetensors library cannot read."""
    return UserError(
        f"{path}: damaged or truncated safetensors file ({error}); download it again "
        "(if it is a Git LFS pointer of a few hundred bytes: git lfs pull)"
    )


def _read_header(path: pathlib.Path) -> Shard:
    tensors = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping: it has keys() but no iterator)
                tensor = file.get_slice(name)
                dtype, shape = str(tensor.get_dtype()), tuple(tensor.get_shape())
                tensors[name] = Header(_float_dtype(path, name, dtype), shape)
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from None
    return Shard(path, tensors)


def _float_dtype(path: pathlib.Path, name: str, dtype: str) -> str:
    if dtype in FLOAT_DTYPES:
        return FLOAT_DTYPES[dtype]
    if dtype.startswith("F8"):
        why = "the checkpoint is quantized to FP8"
    elif dtype.startswith(("I", "U")):
        why = "packed integers, as in GPTQ, AWQ or bitsandbytes checkpoints"
    else:
        why = "not a dtype of weights that moejax reads"
    raise UserError(
        f"{path}: tensor {name} has dtype {dtype} ({why}), which is not supported; use "
        "the model's bfloat16, float16 or float32 checkpoint"
    )


def _read_index(path: pathlib.Path) -> dict[str, str]:
    """Tensor name → file name, each a plain path inside the checkpoint's directory."""
    owner = read_json(path).get("weight_map")
    if not isinstance(owner, dict) or not owner:
        raise UserError(f"{path}: weight_map must be an object of tensor names and file names")
    for name, file in owner.items():
        # Only the text is checked: the hub's cache keeps its files as links out of the directory.
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or (pathlib.PurePath(file).is_absolute() or ".." in pathlib.PurePath(file).parts)
        ):
            raise UserError(
                f"{path}: tensor {name} is placed in {file!r}, which is not a "
                ".safetensors file inside the checkpoint's directory"
            )
    return owner


def _nothing_found(directory: pathlib.Path) -> str:
    wanted = f"neither {SINGLE} nor {INDEX} found"
    if any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
        return (
            f"{directory}: {wanted}, only PyTorch .bin or .pth files, which moejax does not read; "
            "convert them: transformers' from_pretrained, then save_pretrained"
        )
    if any(directory.glob("*.gguf")):
        return (
            f"{directory}: {wanted}, only GGUF files, which moejax does not read; "
            "use the model's safetensors checkpoint"
        )
    return f"{directory}: {wanted}"
