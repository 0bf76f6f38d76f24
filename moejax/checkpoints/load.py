"""Loads a checkpoint: experts into the pinned store, all other weights onto the device."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from host_offload.memory.bounded_reads import Reads, reading_pool
from host_offload.memory.device_memory import shares_memory
from host_offload.memory.record_source import RecordSource
from host_offload.memory.store import (
    ExpertStore,
    Reading,
    StoreBuilder,
    StoredVersion,
    aligned_empty,
)
from host_offload.queue.cached import CachedRecords, CacheSpec, share_cache
from host_offload.versions.encoders import NUMPY_DTYPES, WORKERS
from moejax.checkpoints.checkpoint import Checkpoint, CheckpointReader, run_tasks, wanted_first
from moejax.checkpoints.loaded_model import (
    LoadedModel,
    count_progress,
    new_store,
    require_host_memory,
    run_dtype,
)
from moejax.checkpoints.orbax.layout import Leaf, StoredModel
from moejax.checkpoints.orbax.manifest import JOURNAL, MANIFEST
from moejax.checkpoints.orbax.own import open_stored
from moejax.checkpoints.orbax.steps import is_orbax
from moejax.checkpoints.read_ahead import pause_reading_ahead
from moejax.checkpoints.shards import INDEX, SINGLE, find_shards
from moejax.checkpoints.shared_memory import SharedMemory, content_of, open_shared
from moejax.checkpoints.tensor_checkpoint import open_tensors
from moejax.checkpoints.tensors import TABLES
from moejax.errors import UserError
from moejax.models.directory import checkpoint_directory
from moejax.models.gguf_header import is_gguf, read_gguf
from moejax.models.next_token import OTHER_METHODS
from pallas_kernels.linear import CodedLayers, CodedWeights
from pallas_kernels.records.absent import AbsentRecords

log = logging.getLogger("moejax")

_ORBAX_FILES = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "checkpoint")
_PHASES = ("headers", "allocate", "read")
"""Fields of moejax.engine.statistics.StartTimes. "read" includes the copy of parameters to the
device, which overlaps with reading."""


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
    coded: bool = False,
    predictor: bool = False,
    behind: bool = False,
) -> LoadedModel:
    """Loads a local checkpoint directory, shard by shard. It needs host memory for the experts, one
    parameter and a few tensors.

    - `path`: a directory with config.json and model.safetensors or an index with shards, an Orbax
      checkpoint, or a GGUF file.
    - `dtype`: "auto" (the checkpoint's) or one of DTYPE_NAMES.
    - `device`: jax's first device by default.
    - `progress`: called with (done, total) bytes of tensors read.
    - `step`: which step of an Orbax checkpoint that another program wrote
      (moejax.checkpoints.orbax.steps.Step).
    - `name_map`: which leaf of such a checkpoint is which tensor: a file, or the name of a shipped
      map (docs/how-to/checkpoints.md).
    - `versions`: the versions of experts to load, or CHECKPOINT for those that the checkpoint is
      quantized to. Where the checkpoint lacks one, the store gets dense, from which
      moejax.checkpoints.versions.with_versions makes the version.
    - `in_files`: experts stay in the files of a safetensors or converted checkpoint, and none of
      their bytes is read. Versions that would have to be made are refused.
    - `verify_reads`: compare experts that are read from files with their checksums, if there are.
    - `cache`: a cache in pinned memory for experts in files; None: native threads read the files.
    - `new_builder`: makes the store, as in new_store.
    - `shared`: experts lie in memory that processes share (LoadedModel.shared), and only the first
      of these processes reads them. Not on a GPU.
    - `coded`: matrices of products that the checkpoint is quantized in stay in its codes
      (Checkpoint.coded_params), which native ops read.
    - `predictor`: load the layer that predicts a further token (moejax.models.next_token) in place
      of the model.
    - `behind`: return when all but experts is read, where that can be: native ops wait for those
      that they need, and ExpertStore.wait for all.

    Raises UserError that names file and tensor, or layer and expert. All names, shapes, dtypes and
    file sizes are checked before the first weight is read.
    """
    marks = [time.perf_counter()]
    directory = checkpoint_directory(path)
    kind = checkpoint_format(directory)
    check_orbax_options(directory, kind, step, name_map)
    if in_files:
        require_records(directory, kind)
    device = jax.devices()[0] if device is None else device
    with contextlib.ExitStack() as failed:
        memory = None
        if shared:
            asked = [kind, dtype, str(step), str(name_map), list(versions), in_files]
            if kind == "gguf":
                inside = (header.path for header in read_gguf(directory))
            else:
                inside = (path for path in directory.rglob("*") if path.is_file())
            memory = open_shared([*asked, *content_of(directory, inside)])
            failed.callback(memory.close)
        opened = _open(directory, kind, step, name_map, predictor)
        run = StoredModel(directory, opened.config, run_dtype(dtype, opened.dtype))
        held = opened.hold(run.dtype, versions)
        laid_out = opened.coded_params(run.dtype) if coded else {}
        files: Mapping[str, RecordSource] = {}
        if in_files:
            try:
                files = opened.record_files(run.dtype, versions, held, verify_reads, cache is None)
            except OSError as error:
                raise UserError(f"{error.filename}: {error.strerror}") from None
        marks.append(time.perf_counter())
        sizes = [
            2 * laid_out[key][1] if key in laid_out else leaf.nbytes
            for key, leaf in run.params.items()
        ]
        reading = {} if memory and memory.filled else held
        _require_room(opened, run, sizes, reading, device, files, cache)
        params, arrays, rest = _read(
            *(opened, run, {} if in_files else held, laid_out, device, progress, marks),
            *(new_builder, memory, behind),
        )
        arrays |= _unread(files, device, cache)
        if memory is not None:
            memory.complete()
        failed.pop_all()
    marks.append(time.perf_counter())
    return LoadedModel(
        run.config,
        run.dtype,
        params,
        _store_of(run, held, arrays, files, rest),
        run.layout(),
        dict(zip(_PHASES, np.diff(marks).tolist(), strict=True)),
        {v: made for v, made in opened.quantizers.items() if v in held},
        memory,
    )


def _open(
    directory: Path,
    kind: str,
    step: int | str | None,
    name_map: str | os.PathLike | None,
    predictor: bool,
) -> Checkpoint:
    if predictor and kind != "safetensors":
        raise UserError(
            f"{directory}: only checkpoints of safetensors files have the layer that predicts a "
            f"further token, and this is {kind}; {OTHER_METHODS}"
        )
    if kind == "moejax-orbax":
        return open_stored(directory)
    return open_tensors(directory, kind, step, name_map, predictor)


def require_predictor(path: str | os.PathLike) -> None:
    """Raises UserError for a checkpoint without a layer that predicts a further token, as
    load_checkpoint does. It reads headers only."""
    directory = checkpoint_directory(path)
    _open(directory, checkpoint_format(directory), None, None, predictor=True)


def _store_of(
    run: StoredModel,
    held: Mapping[str, Sequence[int]],
    arrays: Mapping[str, Any],
    files: Mapping[str, RecordSource],
    reading: Reading | None,
) -> ExpertStore:
    """Makes the store of these arrays. A version may lack layers, or lie in files."""
    every, stored = sum(run.config.moe_layers), {}
    for version, layers in held.items():
        some = tuple(layers) if len(layers) < every else ()
        layout, source = run.layout(version), files.get(version)
        stored[version] = StoredVersion(layout, arrays[version], some, source)
    return ExpertStore(stored, reading)


def _require_room(
    opened: Checkpoint,
    run: StoredModel,
    sizes: Sequence[int],
    held: Mapping[str, Sequence[int]],
    device: jax.Device,
    files: Mapping[str, RecordSource],
    cache: CacheSpec | None,
) -> None:
    """Raises UserError where loading needs more host memory than is free.

    - `sizes`: bytes of each parameter.
    """
    nbytes = sum(sizes) if shares_memory(device) else max(sizes)
    experts = run.config.num_experts
    every = sum(len(each) * experts * run.layout(v).nbytes for v, each in held.items())
    if cache is not None:
        every = min(every, cache.bytes)
    nbytes += every if cache is not None or not files else 0
    require_host_memory(nbytes, str(opened.directory))


def _read(
    opened: Checkpoint,
    run: StoredModel,
    held: Mapping[str, Sequence[int]],
    coded: Mapping[str, tuple[CodedLayers, int]],
    device: jax.Device,
    progress: Callable[[int, int], None] | None,
    marks: list[float],
    new_builder: Callable[..., StoreBuilder],
    memory: SharedMemory | None,
    behind: bool,
) -> tuple[dict[str, Any], dict[str, Any], Reading | None]:
    """Reads the weights. Returns LoadedModel.params, the arrays of ExpertStore by version, and
    ExpertStore.reading.

    - `held`: the result of Checkpoint.hold.
    - `coded`: the result of Checkpoint.coded_params, or none.
    - `marks`: the time at which memory is allocated is appended to this list.
    - `memory`: shared memory for the experts, which another process may have filled already.
    """
    dtype = NUMPY_DTYPES[run.dtype]
    reading = {} if memory is not None and memory.filled else held
    stopped, reads = threading.Event(), Reads()
    with contextlib.ExitStack() as failed, contextlib.ExitStack() as stack:
        builders: dict[str, StoreBuilder] = {}
        for version, layers in held.items():
            sizes = run.layout(version), len(layers), run.config.num_experts
            store = new_store(*sizes, device, str(opened.directory), new_builder, memory)
            builders[version] = failed.enter_context(store)
        marks.append(time.perf_counter())
        total = opened.count_bytes(reading)
        count, left = count_progress(progress, total), total

        def advance(nbytes: int) -> None:
            nonlocal left
            if stopped.is_set():
                raise CancelledError
            left -= nbytes
            count(nbytes)

        # The pool is entered last, so that its threads end before files are closed and memory is
        # freed.
        reader = stack.enter_context(opened.open())
        pool = stack.enter_context(reading_pool(WORKERS, reads))
        params = run.params_tree(
            _read_coded(reader, key, *coded[key], pool, advance, device)
            if key in coded
            else _read_param(reader, key, leaf, pool, advance, device)
            for key, leaf in run.params.items()
        )
        _check_tables(str(opened.directory), params, run.config.num_experts)

        def next_wanted() -> tuple[str, int] | None:
            for version, builder in builders.items():
                if builder.arrivals and (number := builder.arrivals.next_wanted()) is not None:
                    return version, number
            return None

        def read_experts(files: contextlib.ExitStack) -> dict[str, Any]:
            with contextlib.ExitStack() as last, files:
                last.callback(pause_reading_ahead, False)  # when no thread pauses it any more
                tasks = [
                    ((version, layer * run.config.num_experts + expert), task)
                    for version, layers in reading.items()
                    for (layer, expert), task in reader.read_experts(
                        version, layers, builders[version], dtype
                    )
                ]
                lock, ordered = threading.Lock(), wanted_first(tasks, next_wanted)

                def read_next() -> int:
                    with lock:
                        task, urgent = next(ordered)
                        pause_reading_ahead(urgent)
                    return task()

                run_tasks(pool, [read_next] * len(tasks), advance)
            return {v: builder.finish().arrays[v] for v, builder in builders.items()}

        ahead: dict[str, jax.Array] = {}
        if behind and reading and memory is None and new_builder is StoreBuilder:
            made = {version: builder.ahead() for version, builder in builders.items()}
            ahead = {version: array for version, array in made.items() if array is not None}
        if len(ahead) < max(len(builders), 1):
            return params, read_experts(stack.pop_all()), None
        nbytes, whole = sum(array.nbytes for array in ahead.values()), max(left, 1)
        files = stack.pop_all()
        builders_of = failed.pop_all()

        def stop() -> None:
            stopped.set()
            reads.give_up()

    def read_behind() -> None:
        try:
            read_experts(files)
        except BaseException as error:
            rest.done.set_exception(error)
        else:
            rest.done.set_result(None)
            seconds = time.perf_counter() - marks[0]
            log.info("%s: all experts are read, %.2f s after the first", opened.directory, seconds)
        finally:
            for builder in builders.values():  # steps that wait see an error by now
                if builder.arrivals is not None:
                    builder.arrivals.end()

    thread = threading.Thread(target=read_behind, name="moejax-load", daemon=True)
    rest = Reading(Future(), stop, lambda: nbytes * left // whole, builders_of, thread)
    thread.start()
    return params, ahead, rest


def _check_tables(source: str, params: Any, experts: int) -> None:
    """Raises UserError if a table lists an expert that the model does not have."""
    for path, table in jax.tree_util.tree_leaves_with_path(params):
        if getattr(path[-1], "key", None) in TABLES:
            least, most = float(table.min()), float(table.max())
            if not 0 <= least <= most < experts:
                raise UserError(
                    f"{source}: the tables of experts by token (tid2eid) list {least:g} to "
                    f"{most:g}, but the model has experts 0 to {experts - 1}"
                )


def _read_param(
    reader: CheckpointReader,
    key: str,
    leaf: Leaf,
    pool: Executor,
    advance: Callable[[int], None],
    device: jax.Device,
) -> jax.Array:
    weights = aligned_empty(leaf.shape, leaf.dtype)
    chunks = zip(leaf.chunks, weights if leaf.stacked else weights[None], strict=True)
    tasks = (reader.read_param(key, chunk, out) for chunk, out in chunks)
    run_tasks(pool, itertools.chain.from_iterable(tasks), advance)
    return jax.block_until_ready(jax.device_put(weights, device))


def _read_coded(
    reader: CheckpointReader,
    key: str,
    layers: CodedLayers,
    count: int,
    pool: Executor,
    advance: Callable[[int], None],
    device: jax.Device,
) -> CodedWeights:
    elements = aligned_empty((count,), np.dtype(np.uint16))
    tasks = (reader.read_coded(key, i, rows, elements) for i, rows in enumerate(layers))
    run_tasks(pool, itertools.chain.from_iterable(tasks), advance)
    return CodedWeights(jax.block_until_ready(jax.device_put(elements, device)), layers)


def _unread(
    files: Mapping[str, RecordSource], device: jax.Device, cache: CacheSpec | None
) -> dict[str, AbsentRecords | CachedRecords]:
    """The arrays of the store that stand for experts in files."""
    if cache is None:
        return {
            version: AbsentRecords((*source.shape, source.format.rows, source.format.hidden))
            for version, source in files.items()
        }
    shares = share_cache(
        cache, [source.shape[0] * source.format.nbytes for source in files.values()]
    )
    return {
        version: CachedRecords(source, device, share)
        for (version, source), share in zip(files.items(), shares, strict=True)
    }


def checkpoint_format(
    directory: Path,
) -> Literal["safetensors", "moejax-orbax", "orbax", "gguf"]:
    """The format of a checkpoint, found by the names of its files alone.

    Returns "safetensors" for a Hugging Face directory, "moejax-orbax" for what `moejax convert`
    wrote, "orbax" for any other Orbax checkpoint or a directory of its steps, and "gguf" for a GGUF
    file. Raises UserError for an unfinished conversion and for a directory without a known format.
    """
    if is_gguf(directory):
        return "gguf"
    if (directory / MANIFEST).exists():
        return "moejax-orbax"
    if (directory / JOURNAL).exists():
        raise UserError(
            f"{directory}: an unfinished conversion; run the same `moejax convert` again, which "
            "writes what is missing, and load what it makes"
        )
    if (directory / SINGLE).exists() or (directory / INDEX).exists():
        return "safetensors"
    # A root whose only step is unfinished has these files too; its loader raises a better message.
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
    """Raises UserError for a step or name_map with a checkpoint of another format than "orbax".

    - `kind`: the result of checkpoint_format.
    """
    if kind != "orbax" and (step is not None or name_map is not None):
        raise UserError(
            f"{path}: step and name_map are for Orbax checkpoints that other programs wrote, and "
            "this is none; leave them out"
        )


def require_records(path: str | os.PathLike, kind: str) -> None:
    """Raises UserError for a format from which single experts cannot be read.

    - `kind`: the result of checkpoint_format.
    """
    if kind == "orbax":
        raise UserError(
            f"{path}: store='file' reads experts from safetensors files or from what `moejax "
            f"convert` wrote, and this is neither (its format is {kind}); use store='memory'"
        )
