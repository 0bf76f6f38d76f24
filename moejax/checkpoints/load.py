"""Loading a checkpoint: experts into the pinned store, the rest onto the device."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from host_offload.memory.store import StoreBuilder, aligned_empty
from host_offload.queue.cached import CacheSpec
from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.checkpoints.foreign.checkpoint import open_mapped
from moejax.checkpoints.loaded_model import (
    LoadedModel,
    counted,
    new_store,
    require_host_memory,
    run_dtype,
    warn_nonfinite,
)
from moejax.checkpoints.orbax.manifest import JOURNAL, MANIFEST
from moejax.checkpoints.orbax.own import load_orbax
from moejax.checkpoints.orbax.steps import is_orbax
from moejax.checkpoints.placement import load_file
from moejax.checkpoints.safetensors.shards import INDEX, SINGLE, TensorFile, find_shards
from moejax.checkpoints.shared_memory import SharedMemory, content_of, open_shared
from moejax.checkpoints.tensors import (
    ExpertPlace,
    ParamPlace,
    Place,
    abstract_params,
    check_experts,
    expected_tensors,
    is_ignored,
)
from moejax.errors import UserError, user_errors
from moejax.models.config import ModelConfig, load_config
from moejax.models.directory import checkpoint_directory

_ORBAX_FILES = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "checkpoint")
_PHASES = ("headers", "allocate", "read", "transfer")
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_checkpoint(
    path: str | os.PathLike,
    dtype: str = "auto",
    device: jax.Device | None = None,
    progress: Callable[[int, int], None] | None = None,
    step: int | str | None = None,
    name_map: str | os.PathLike | None = None,
    versions: Sequence[str] = ("dense",),
    *,
    in_files: bool = False,
    verify_reads: bool = True,
    cache: CacheSpec | None = None,
    new_builder: Callable[..., StoreBuilder] = StoreBuilder,
    shared: bool = False,
) -> LoadedModel:
    """Loads a local checkpoint directory, shard by shard.

    Host memory grows by the weights, one shard and a few tensors. path: a directory with
    config.json and model.safetensors or an index with shards, or an Orbax checkpoint. dtype:
    "auto" (the checkpoint's) or one of DTYPE_NAMES. device: the first one by default. progress:
    called with (done, total) bytes of tensors read. step, name_map: of an Orbax checkpoint that
    another program wrote: which step (moejax.checkpoints.orbax.steps.Step), and which leaf is which
    tensor, a file or the name of a shipped map (docs/checkpoints.md). versions: of the experts, in
    the store if the checkpoint has them; if it lacks one, the store has dense, from which
    moejax.checkpoints.versions.with_versions makes it. in_files, verify_reads, cache: experts
    stay in the files of a converted checkpoint, as in load_orbax. new_builder: of the store, as of
    new_store. shared: experts lie in memory that other processes share
    (moejax.checkpoints.shared_memory), LoadedModel.shared, and are read only if none of those has;
    not on a GPU. Raises UserError, naming file and tensor,
    for whatever is wrong with them; all names, shapes and dtypes are checked before the first
    weight is read.
    """
    began = time.perf_counter()
    directory = checkpoint_directory(path)
    kind = checkpoint_format(directory)
    check_orbax_options(directory, kind, step, name_map)
    if in_files:
        require_converted(directory, kind)
    memory = None
    if shared:
        said = [kind, dtype, str(step), str(name_map), list(versions), in_files]
        inside = (path for path in directory.rglob("*") if path.is_file())
        memory = open_shared([*said, *content_of(directory, inside)])
    try:
        if kind == "moejax-orbax":
            loaded = load_orbax(
                directory,
                dtype,
                device,
                progress,
                versions,
                in_files=in_files,
                verify_reads=verify_reads,
                cache=cache,
                new_builder=new_builder,
                shared=memory,
            )
        else:
            config, files = open_tensors(directory, kind, step, name_map)
            source = str(files[0].path if kind == "orbax" else directory)
            headers_s = time.perf_counter() - began
            loaded = load_tensors(
                config, files, dtype, device, progress, source, new_builder, memory
            )
            seconds = loaded.seconds | {"headers": loaded.seconds["headers"] + headers_s}
            loaded = dataclasses.replace(loaded, seconds=seconds)
        if memory is not None:
            memory.complete()
        return dataclasses.replace(loaded, shared=memory)
    except BaseException:
        if memory is not None:
            memory.close()
        raise


def checkpoint_format(
    directory: Path,
) -> Literal["safetensors", "moejax-orbax", "orbax"]:
    """ "safetensors": a Hugging Face directory; "moejax-orbax": written by `moejax convert`;
    "orbax": any other Orbax checkpoint, or a directory of steps of them.

    Reads nothing. Raises UserError for an unfinished conversion and where nothing known is there.
    """
    if (directory / MANIFEST).exists():
        return "moejax-orbax"
    if (directory / JOURNAL).exists():
        raise UserError(
            f"{directory}: an unfinished conversion; run the same `moejax convert` again, which "
            "writes what is missing, and load what it makes"
        )
    if (directory / SINGLE).exists() or (directory / INDEX).exists():
        return "safetensors"
    # A root whose only step is unfinished has these files too: the loader says so better.
    inside = [directory, *(path for path in directory.iterdir() if path.is_dir())]
    files = (path / name for path in inside for name in _ORBAX_FILES)
    if is_orbax(directory) or any(file.exists() for file in files):
        return "orbax"
    find_shards(directory)
    raise AssertionError("find_shards refuses a directory without shards")


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


def require_converted(path: str | os.PathLike, kind: str) -> None:
    """Raises UserError where a checkpoint of that format does not have a file for each expert."""
    if kind != "moejax-orbax":
        raise UserError(
            f"{path}: store='file' reads experts from the files of a converted checkpoint, one "
            f"each, and this is none (its format is {kind}); run `moejax convert {path} DST` once, "
            "and then DST"
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
    config, tensors = open_mapped(directory, step, name_map)
    return config, (tensors,)


def load_tensors(
    config: ModelConfig,
    files: Sequence[TensorFile],
    dtype: str = "auto",
    device: jax.Device | None = None,
    progress: Callable[[int, int], None] | None = None,
    source: str = "",
    new_builder: Callable[..., StoreBuilder] = StoreBuilder,
    shared: SharedMemory | None = None,
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
    wanted = abstract_params(config, to)
    nbytes = sum(math.prod(p.shape) * p.dtype.itemsize for p in jax.tree.leaves(wanted))
    there = shared is not None and shared.filled
    nbytes += 0 if there else sum(config.moe_layers) * config.num_experts * layout.nbytes
    require_host_memory(nbytes, source)
    with user_errors(MemoryError, where=f"{source}: "):
        params = jax.tree.map(lambda p: aligned_empty(p.shape, p.dtype), wanted)
    nonfinite: Counter[str] = Counter()

    def param(place: ParamPlace) -> np.ndarray:
        if place.run is None:
            return params[place.key]
        return params["runs"][place.run][place.key][place.layer]

    with new_store(
        config, layout, device, source, new_builder=new_builder, shared=shared
    ) as builder:
        marks.append(time.perf_counter())
        if there:  # of the experts nothing is read
            places = {n: p for n, p in places.items() if not isinstance(p, ExpertPlace)}
        headers = (file.tensors[name] for file in files for name in file.tensors.keys() & places)
        sizes = (math.prod(h.shape) * NUMPY_DTYPES[h.dtype].itemsize for h in headers)
        advance = counted(progress, sum(sizes))
        for file in files:
            pieces = load_file(file, places, to, param, builder, nonfinite)
            with contextlib.closing(pieces):
                for nbytes in pieces:
                    advance(nbytes)
        store = builder.finish()
    warn_nonfinite(source, nonfinite)
    marks.append(time.perf_counter())
    leaves, tree = jax.tree.flatten(params)
    params.clear()  # each host array goes as soon as it has been copied
    for index, leaf in enumerate(leaves):
        leaves[index] = jax.block_until_ready(jax.device_put(leaf, device))
    marks.append(time.perf_counter())
    seconds: dict[str, float] = dict(zip(_PHASES, np.diff(marks).tolist(), strict=True))
    return LoadedModel(config, to_name, jax.tree.unflatten(tree, leaves), store, layout, seconds)


def plan_tensors(
    config: ModelConfig, files: Sequence[TensorFile], dtype: str, source: str
) -> tuple[ModelConfig, str, dict[str, Place]]:
    """(the config with its dtype decided, the run's dtype, where each tensor goes).

    Reads no weights, but for an lm_head beside tied embeddings. dtype, source and what is raised as
    in load_tensors.
    """
    owner = {name: file for file in files for name in file.tensors}
    check_experts(config, source)
    places = expected_tensors(config, owner)
    for name, file in owner.items():
        shape = file.tensors[name].shape
        if is_ignored(config, name) or (name == _HEAD and config.tie_word_embeddings):
            continue
        if name not in places:
            raise UserError(
                f"{file.path}: unknown tensor {name}: {config.architecture} with "
                "this config.json has none of that name"
            )
        if shape != places[name].shape:
            raise UserError(
                f"{file.path}: tensor {name} has shape {list(shape)}, but "
                f"config.json asks for {list(places[name].shape)}"
            )
    missing = [name for name in places if name not in owner]
    if missing:
        others = f" (and {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise UserError(f"{source}: tensor {missing[0]} is missing{others}")
    if config.tie_word_embeddings and _HEAD in owner:
        _check_tied(owner[_HEAD], owner[_EMBED])
    if config.dtype is None:
        config = dataclasses.replace(config, dtype=owner[_EMBED].tensors[_EMBED].dtype)
    return config, run_dtype(dtype, str(config.dtype)), places


def _check_tied(head: TensorFile, embed: TensorFile) -> None:
    """An lm_head beside tied embeddings is redundant, or UserError: transformers 5 would use it,
    contrary to its config."""
    same = head.tensors[_HEAD].shape == embed.tensors[_EMBED].shape
    if same:
        with head.open() as head_file, embed.open() as embed_file:
            rows = head.tensors[_HEAD].shape[0]
            pieces = [slice(row, min(row + 4096, rows)) for row in range(0, rows, 4096)]
            same = all(
                np.array_equal(head_file.get_rows(_HEAD, at), embed_file.get_rows(_EMBED, at))
                for at in pieces
            )
    if not same:
        raise UserError(
            f"{head.path}: tensor {_HEAD} differs from {_EMBED}, though "
            "config.json ties them; set tie_word_embeddings to false to use it"
        )
