"""Loading a Hugging Face checkpoint: experts into the pinned store, the rest onto the device."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from host_offload.layout import ExpertLayout
from host_offload.store import ExpertStore, StoreBuilder, rows_of
from moejax.checkpoints.directory import checkpoint_directory
from moejax.checkpoints.shards import Shard, damaged, find_shards
from moejax.checkpoints.tensors import (
    ExpertPlace,
    ParamPlace,
    Place,
    expected_tensors,
    layer_params,
    model_params,
    param_shape,
)
from moejax.device import require_pinned_memory
from moejax.errors import UserError
from moejax.models.config import ModelConfig, load_config

DTYPE_NAMES = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
"""What the option dtype may be besides "auto" (vLLM's names) → the run's dtype."""

NUMPY_DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}

_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_WORKERS = min(4, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A checkpoint in memory.

    dtype: the run's, "bfloat16", "float16" or "float32"; config.dtype is the checkpoint's.
    params: jax arrays on the device in the run's dtype, matrices as [out, in]: "embed" [V, D],
    "final_norm" [D], "lm_head" [V, D] (absent if tied) and "runs", one dict for each of config.runs
    with leading axis n, its layers: "input_norm" [n, D], "qkv" [n, (H + 2·KH)·hd, D] (rows of q, k,
    v), "q_norm", "k_norm" [n, hd], "o" [n, D, H·hd], "post_norm" [n, D]; with attention_bias
    "qkv_bias" [n, (H + 2·KH)·hd] and "o_bias" [n, D]; MoE runs "router" [n, E, D]; dense runs
    "gate_up" [n, 2·F, D] and "down" [n, D, F]. store: all experts, version `dense`, laid out as
    layout says.
    """

    config: ModelConfig
    dtype: str
    params: dict[str, Any]
    store: ExpertStore
    layout: ExpertLayout


def load_checkpoint(
    path: str | os.PathLike,
    dtype: str = "auto",
    device: jax.Device | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Loads a local checkpoint directory, shard by shard.

    Host memory grows by the weights, one shard and a few tensors. path: a directory with
    config.json and model.safetensors or an index with shards. dtype: "auto" (the checkpoint's) or
    one of DTYPE_NAMES. device: the first one by default. progress: called with (done, total) bytes
    of tensors read. Raises UserError, naming file and tensor, for whatever is wrong with them; all
    names, shapes and dtypes are checked before the first weight is read.
    """
    directory = checkpoint_directory(path)
    if dtype != "auto" and dtype not in DTYPE_NAMES:
        raise UserError(f"dtype {dtype!r} is unknown; choose auto, {', '.join(DTYPE_NAMES)}")
    config = load_config(directory)
    shards = find_shards(directory)
    places = _check_tensors(config, shards, str(directory))
    if config.tie_word_embeddings:
        _check_tied(shards)
    if config.dtype is None:
        stored = next(s.tensors[_EMBED].dtype for s in shards if _EMBED in s.tensors)
        config = dataclasses.replace(config, dtype=stored)
    run_dtype = str(config.dtype) if dtype == "auto" else DTYPE_NAMES[dtype]
    device = jax.devices()[0] if device is None else device

    to = NUMPY_DTYPES[run_dtype]
    layout = ExpertLayout(config.hidden_size, config.moe_intermediate_size, to.itemsize)
    require_pinned_memory(device, sum(config.moe_layers) * config.num_experts * layout.nbytes)
    params = _empty_params(config, to)
    try:
        builder = StoreBuilder(layout, sum(config.moe_layers), config.num_experts, device)
    except MemoryError as error:
        raise UserError(f"{directory}: {error}") from error
    try:
        done, total = 0, _nbytes(shards, places)
        for shard in shards:
            for nbytes in _load_shard(shard, places, to, params, builder):
                done += nbytes
                if progress is not None:
                    progress(done, total)
        store = builder.finish()
    except BaseException:
        builder.delete()  # a traceback that is kept must not keep the store
        raise
    return LoadedModel(config, run_dtype, _to_device(params, device), store, layout)


def _check_tensors(config: ModelConfig, shards: tuple[Shard, ...], source: str) -> dict[str, Place]:
    """Where each tensor goes; UserError if one is missing, unknown or of the wrong shape."""
    found = {name for shard in shards for name in shard.tensors}
    places = expected_tensors(config, found)
    for shard in shards:
        for name, header in shard.tensors.items():
            if name == _HEAD and config.tie_word_embeddings:
                continue
            if name not in places:
                raise UserError(
                    f"{shard.path}: unknown tensor {name}: {config.architecture} with "
                    "this config.json has none of that name"
                )
            if header.shape != places[name].shape:
                raise UserError(
                    f"{shard.path}: tensor {name} has shape {list(header.shape)}, but "
                    f"config.json asks for {list(places[name].shape)}"
                )
    missing = [name for name in places if name not in found]
    if missing:
        others = f" (and {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise UserError(f"{source}: tensor {missing[0]} is missing{others}")
    return places


def _check_tied(shards: tuple[Shard, ...]) -> None:
    """An lm_head beside tied embeddings is redundant, or UserError: transformers 5 would use it,
    contrary to its config."""
    owner = {name: shard for shard in shards for name in shard.tensors}
    if _HEAD not in owner:
        return
    same = owner[_HEAD].tensors[_HEAD].shape == owner[_EMBED].tensors[_EMBED].shape
    if same:
        with (
            safe_open(owner[_HEAD].path, framework="numpy") as head_file,
            safe_open(owner[_EMBED].path, framework="numpy") as embed_file,
        ):
            head, embed = head_file.get_slice(_HEAD), embed_file.get_slice(_EMBED)
            rows = head.get_shape()[0]
            same = all(
                np.array_equal(
                    head[row : min(row + 4096, rows)], embed[row : min(row + 4096, rows)]
                )
                for row in range(0, rows, 4096)
            )
    if not same:
        raise UserError(
            f"{owner[_HEAD].path}: tensor {_HEAD} differs from {_EMBED}, though "
            "config.json ties them; set tie_word_embeddings to false to use it"
        )


def _nbytes(shards: tuple[Shard, ...], places: dict[str, Place]) -> int:
    return sum(
        math.prod(header.shape) * NUMPY_DTYPES[header.dtype].itemsize
        for shard in shards
        for name, header in shard.tensors.items()
        if name in places
    )


def _empty_params(config: ModelConfig, dtype: np.dtype) -> dict[str, Any]:
    params: dict[str, Any] = {
        key: np.empty(param_shape(parts), dtype) for key, parts in model_params(config).items()
    }
    params["runs"] = [
        {
            key: np.empty((run.count, *param_shape(parts)), dtype)
            for key, parts in layer_params(config, run.moe).items()
        }
        for run in config.runs
    ]
    return params


def _load_shard(
    shard: Shard,
    places: dict[str, Place],
    dtype: np.dtype,
    params: dict[str, Any],
    builder: StoreBuilder,
) -> Iterator[int]:
    """Puts every tensor of a shard in its place; yields the bytes read, piece by piece."""
    try:
        with (
            safe_open(shard.path, framework="numpy") as file,
            concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool,
        ):

            def read(piece: tuple[str, int | None]) -> tuple[Place, int | None, np.ndarray, int]:
                name, expert = piece
                place = places[name]
                tensor = file.get_tensor(name) if expert is None else file.get_slice(name)[expert]
                weights = _converted(tensor, dtype, shard, name)
                if isinstance(place, ExpertPlace):
                    weights = rows_of(weights.T if place.matrix == "down" else weights, dtype)
                return place, expert, weights, tensor.nbytes

            pieces = list(_pieces(shard, places))
            # In groups, so that no more than a group waits in memory.
            for first in range(0, len(pieces), 4 * _WORKERS):
                for place, expert, weights, nbytes in pool.map(
                    read, pieces[first : first + 4 * _WORKERS]
                ):
                    if isinstance(place, ExpertPlace):
                        _put_expert(builder, place, expert, weights)
                    else:
                        _put_param(params, place, weights)
                    yield nbytes
    except (SafetensorError, OSError) as error:
        raise damaged(shard.path, error) from None


def _pieces(shard: Shard, places: dict[str, Place]) -> Iterator[tuple[str, int | None]]:
    """(tensor, expert) to read at once: a whole tensor, or one expert of a stacked one."""
    for name, header in shard.tensors.items():
        place = places.get(name)
        if isinstance(place, ExpertPlace) and place.expert is None:
            yield from ((name, expert) for expert in range(header.shape[0]))
        elif place is not None:
            yield name, None


def _put_expert(
    builder: StoreBuilder, place: ExpertPlace, expert: int | None, rows: np.ndarray
) -> None:
    expert = place.expert if place.expert is not None else expert
    assert expert is not None
    third = builder.layout.rows // 3
    first = {"gate": 0, "gate_up": 0, "up": third, "down": 2 * third}[place.matrix]
    for row in range(0, rows.shape[0], third):  # pieces of one shape: one compilation
        builder.put(place.layer, expert, rows[None, row : row + third], first + row)


def _put_param(params: dict[str, Any], place: ParamPlace, weights: np.ndarray) -> None:
    array = (
        params[place.key]
        if place.run is None
        else params["runs"][place.run][place.key][place.layer]
    )
    array[place.row : place.row + weights.shape[0]] = weights


def _converted(tensor: np.ndarray, dtype: np.dtype, shard: Shard, name: str) -> np.ndarray:
    if tensor.dtype == dtype:
        return tensor
    with np.errstate(over="ignore"):
        converted = tensor.astype(dtype)
    if dtype != np.float32 and not np.array_equal(np.isinf(converted), np.isinf(tensor)):
        raise UserError(
            f"{shard.path}: tensor {name} has values that {dtype.name} cannot hold; "
            "run with dtype float32 or the checkpoint's own"
        )
    return converted


def _to_device(params: Any, device: jax.Device) -> Any:
    """The same tree on the device, each host array released as soon as it has been copied."""
    if isinstance(params, list):
        return [_to_device(item, device) for item in params]
    moved = {}
    for key in list(params):
        value = params.pop(key)
        moved[key] = (
            _to_device(value, device)
            if key == "runs"
            else jax.block_until_ready(jax.device_put(value, device))
        )
    return moved
