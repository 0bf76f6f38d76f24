"""Loading a checkpoint: experts into the pinned store, the rest onto the device."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from host_offload.memory.layout import ExpertLayout
from host_offload.memory.store import ExpertStore, StoreBuilder, aligned_empty
from moejax.checkpoints.directory import checkpoint_directory
from moejax.checkpoints.formats import checkpoint_format
from moejax.checkpoints.params import abstract_params
from moejax.checkpoints.placement import load_file
from moejax.checkpoints.safetensors.shards import NUMPY_DTYPES, TensorFile, find_shards
from moejax.checkpoints.tensors import Place, expected_tensors, is_ignored
from moejax.device import require_pinned_memory
from moejax.errors import UserError
from moejax.models.config import ModelConfig, load_config

log = logging.getLogger("moejax")

DTYPE_NAMES = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
"""What the option dtype may be besides "auto" (vLLM's names) → the run's dtype."""

MOST_EXPERTS = 10**6
"""Of all layers; the largest models have 25,000."""

_PHASES = ("headers", "allocate", "read", "transfer")
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A checkpoint in memory.

    dtype: the run's, "bfloat16", "float16" or "float32"; config.dtype is the checkpoint's.
    params: jax arrays on the device in the run's dtype (a family's wide_params in float32),
    matrices as [out, in]: "embed" [V, D], "final_norm" [D], "lm_head" [V, D] (absent if tied),
    biases where the family has them, and "runs", one dict for each of config.runs with leading axis
    n, its layers. Their names and shapes are the family's layer_params (docs/add_a_model.md), of
    Qwen3-MoE "input_norm" [n, D], "qkv" [n, (H + 2·KH)·hd, D] (rows of q, k, v), "q_norm", "k_norm"
    [n, hd], "o" [n, D, H·hd], "post_norm" [n, D], "router" [n, E, D]. store: all experts, dense
    unless other versions were asked for. layout: of a dense record. seconds: how long the phases of
    loading took, as in moejax.start.start_times. quantizers: how the store's versions besides the
    dense one were made.
    """

    config: ModelConfig
    dtype: str
    params: dict[str, Any]
    store: ExpertStore
    layout: ExpertLayout
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    quantizers: dict[str, str] = dataclasses.field(default_factory=dict)


def load_checkpoint(
    path: str | os.PathLike,
    dtype: str = "auto",
    device: jax.Device | None = None,
    progress: Callable[[int, int], None] | None = None,
    step: int | str | None = None,
    name_map: str | os.PathLike | None = None,
    versions: Sequence[str] = ("dense",),
) -> LoadedModel:
    """Loads a local checkpoint directory, shard by shard.

    Host memory grows by the weights, one shard and a few tensors. path: a directory with
    config.json and model.safetensors or an index with shards, or an Orbax checkpoint. dtype:
    "auto" (the checkpoint's) or one of DTYPE_NAMES. device: the first one by default. progress:
    called with (done, total) bytes of tensors read. step, name_map: of an Orbax checkpoint that
    another program wrote: which step (moejax.checkpoints.orbax.steps.Step), and which leaf is which
    tensor, a file or the name of a shipped map (docs/checkpoints.md). versions: of the experts, in
    the store if the checkpoint has them; if it lacks one, the store has dense, from which
    moejax.checkpoints.versions.with_versions makes it. Raises UserError, naming file and tensor,
    for whatever is wrong with them; all names, shapes and dtypes are checked before the first
    weight is read.
    """
    began = time.perf_counter()
    directory = checkpoint_directory(path)
    kind = checkpoint_format(directory)
    check_orbax_options(directory, kind, step, name_map)
    if kind == "moejax-orbax":
        from moejax.checkpoints.orbax.own import load_orbax

        return load_orbax(directory, dtype, device, progress, versions)
    config, files = open_tensors(directory, kind, step, name_map)
    source = str(files[0].path if kind == "orbax" else directory)
    headers_s = time.perf_counter() - began
    loaded = load_tensors(config, files, dtype, device, progress, source)
    seconds = loaded.seconds | {"headers": loaded.seconds["headers"] + headers_s}
    return dataclasses.replace(loaded, seconds=seconds)


def check_orbax_options(
    path: str | os.PathLike,
    kind: str,
    step: int | str | None,
    name_map: str | os.PathLike | None,
) -> None:
    """Raises UserError for step or name_map where a checkpoint of that format takes none."""
    if kind != "orbax" and (step is not None or name_map is not None):
        raise UserError(
            f"{path}: step and name_map are for Orbax checkpoints that other programs wrote, and "
            "this is none; leave them out"
        )


def open_tensors(
    directory: Path,
    kind: str,
    step: int | str | None,
    name_map: str | os.PathLike | None,
) -> tuple[ModelConfig, Sequence[TensorFile]]:
    """The config of a checkpoint and the files of its tensors, under transformers' names; headers
    only. kind: of checkpoint_format, "safetensors" or "orbax". Raises as load_checkpoint."""
    if kind != "orbax":
        return load_config(directory), find_shards(directory)
    from moejax.checkpoints.foreign.checkpoint import open_mapped

    config, tensors = open_mapped(directory, step, name_map)
    return config, (tensors,)


def load_tensors(
    config: ModelConfig,
    files: Sequence[TensorFile],
    dtype: str = "auto",
    device: jax.Device | None = None,
    progress: Callable[[int, int], None] | None = None,
    source: str = "",
) -> LoadedModel:
    """Loads a model from tensors under the names of transformers' checkpoints.

    files: read one after the other, each tensor once; their headers are checked before the first
    weight is read. source: the checkpoint's path, for messages. The rest and what is raised as in
    load_checkpoint.
    """
    marks = [time.perf_counter()]
    config, to_name, places = plan_tensors(config, files, dtype, source)
    marks.append(time.perf_counter())
    device = jax.devices()[0] if device is None else device
    to = NUMPY_DTYPES[to_name]
    layout = config.expert_layout(to.itemsize)
    try:
        params = jax.tree.map(
            lambda p: aligned_empty(p.shape, p.dtype), abstract_params(config, to)
        )
    except MemoryError as error:
        raise UserError(f"{source}: {error}") from error
    builder = new_store(config, layout, device, source)
    marks.append(time.perf_counter())
    nonfinite: Counter[str] = Counter()
    try:
        done, total = 0, _nbytes(files, places)
        for file in files:
            with contextlib.closing(
                load_file(file, places, to, params, builder, nonfinite)
            ) as pieces:
                for nbytes in pieces:
                    done += nbytes
                    if progress is not None:
                        progress(done, total)
        store = builder.finish()
    except BaseException:
        builder.delete()  # a traceback that is kept must not keep the store
        raise
    warn_nonfinite(source, nonfinite)
    marks.append(time.perf_counter())
    on_device = _to_device(params, device)
    marks.append(time.perf_counter())
    seconds: dict[str, float] = dict(zip(_PHASES, np.diff(marks).tolist(), strict=True))
    return LoadedModel(config, to_name, on_device, store, layout, seconds)


def plan_tensors(
    config: ModelConfig, files: Sequence[TensorFile], dtype: str, source: str
) -> tuple[ModelConfig, str, dict[str, Place]]:
    """(the config with its dtype decided, the run's dtype, where each tensor goes).

    Reads no weights, but for an lm_head beside tied embeddings. dtype, source and what is raised as
    in load_tensors.
    """
    check_dtype(dtype)
    places = check_tensors(config, files, source)
    if config.tie_word_embeddings:
        _check_tied(files)
    if config.dtype is None:
        stored = next(f.tensors[_EMBED].dtype for f in files if _EMBED in f.tensors)
        config = dataclasses.replace(config, dtype=stored)
    return config, run_dtype(dtype, str(config.dtype)), places


def check_dtype(dtype: str) -> None:
    """Raises UserError for a dtype that is neither "auto" nor one of DTYPE_NAMES."""
    if dtype != "auto" and dtype not in DTYPE_NAMES:
        raise UserError(f"dtype {dtype!r} is unknown; choose auto, {', '.join(DTYPE_NAMES)}")


def run_dtype(dtype: str, stored: str) -> str:
    """The run's dtype. dtype: as in load_checkpoint; "auto" is `stored`. Raises UserError."""
    check_dtype(dtype)
    return stored if dtype == "auto" else DTYPE_NAMES[dtype]


def new_store(
    config: ModelConfig,
    layout: ExpertLayout,
    device: jax.Device,
    source: str,
    layers: int | None = None,
) -> StoreBuilder:
    """An empty store for all experts, or for those of so many layers. Raises UserError where the
    device's pinned memory is too small for it. source: the checkpoint's path, for messages."""
    layers = sum(config.moe_layers) if layers is None else layers
    require_pinned_memory(device, layers * config.num_experts * layout.nbytes)
    try:
        return StoreBuilder(layout, layers, config.num_experts, device)
    except MemoryError as error:
        raise UserError(f"{source}: {error}") from error


def check_tensors(
    config: ModelConfig, files: Sequence[TensorFile], source: str
) -> dict[str, Place]:
    """Where each tensor goes; UserError if one is missing, unknown or of the wrong shape."""
    found = {name for file in files for name in file.tensors}
    experts = sum(config.moe_layers) * config.num_experts
    if experts > MOST_EXPERTS:
        raise UserError(
            f"{source}: config.json has {experts} experts in all; at most {MOST_EXPERTS}"
        )
    places = expected_tensors(config, found)
    for file in files:
        for name, header in file.tensors.items():
            if name == _HEAD and config.tie_word_embeddings:
                continue
            if is_ignored(config, name):
                continue
            if name not in places:
                raise UserError(
                    f"{file.path}: unknown tensor {name}: {config.architecture} with "
                    "this config.json has none of that name"
                )
            if header.shape != places[name].shape:
                raise UserError(
                    f"{file.path}: tensor {name} has shape {list(header.shape)}, but "
                    f"config.json asks for {list(places[name].shape)}"
                )
    missing = [name for name in places if name not in found]
    if missing:
        others = f" (and {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise UserError(f"{source}: tensor {missing[0]} is missing{others}")
    return places


def _check_tied(files: Sequence[TensorFile]) -> None:
    """An lm_head beside tied embeddings is redundant, or UserError: transformers 5 would use it,
    contrary to its config."""
    owner = {name: file for file in files for name in file.tensors}
    if _HEAD not in owner:
        return
    same = owner[_HEAD].tensors[_HEAD].shape == owner[_EMBED].tensors[_EMBED].shape
    if same:
        with (
            owner[_HEAD].open() as head_file,
            owner[_EMBED].open() as embed_file,
        ):
            head, embed = head_file.get_slice(_HEAD), embed_file.get_slice(_EMBED)
            rows = owner[_HEAD].tensors[_HEAD].shape[0]
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


def _nbytes(files: Sequence[TensorFile], places: dict[str, Place]) -> int:
    return sum(
        math.prod(header.shape) * NUMPY_DTYPES[header.dtype].itemsize
        for file in files
        for name, header in file.tensors.items()
        if name in places
    )


def warn_nonfinite(source: str, nonfinite: Mapping[str, int]) -> None:
    """Says once that weights are NaN or infinite: such a model loads, and mostly answers NaN."""
    if nonfinite:
        (name, count), others = next(iter(nonfinite.items())), len(nonfinite) - 1
        more = f", and {others} other tensors have such values too" if others else ""
        log.warning("%s: %d values of tensor %s are NaN or infinite%s", source, count, name, more)


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
