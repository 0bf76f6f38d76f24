"""Loading what `moejax convert` wrote: experts into the pinned store, the rest onto the device.

The arrays are read from Orbax's files directly (orbax/layout.py): an expert is a file of its
record's bytes. Orbax itself can load the checkpoint too, but fills nothing in place and checks
nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from host_offload.memory.device_memory import shares_memory
from host_offload.memory.record_source import RecordFiles
from host_offload.memory.store import (
    ExpertStore,
    StoreBuilder,
    aligned_empty,
)
from host_offload.queue.cached import CachedRecords, CacheSpec
from host_offload.versions.encoders import NUMPY_DTYPES, WORKERS
from moejax.checkpoints.loaded_model import (
    LoadedModel,
    counted,
    new_store,
    require_host_memory,
    run_dtype,
    warn_nonfinite,
)
from moejax.checkpoints.orbax.layout import DENSE, Leaf, StoredModel
from moejax.checkpoints.orbax.manifest import (
    MANIFEST,
    Manifest,
    as_bytes,
    file_checksum,
    read_file,
    read_manifest,
)
from moejax.checkpoints.placement import cast, count_nonfinite, in_order
from moejax.checkpoints.shared_memory import SharedMemory
from moejax.errors import UserError
from moejax.models.config import load_config
from moejax.models.directory import checkpoint_directory, read_json, require_own_file
from pallas_kernels.records.absent import AbsentRecords

_PHASES = ("headers", "allocate", "read")
"""The phases of moejax.engine.statistics.StartTimes; parameters go to the device while others are
read."""

MOST_FILES = 1 << 30
"""Bytes of all files but the chunks; the tokenizer of a large model has 30 MB."""

_AGAIN = "copy the checkpoint again, or convert the original again"


@dataclasses.dataclass(frozen=True)
class StoredCheckpoint(StoredModel):
    """A checkpoint that is there. config: as its config.json has it."""

    manifest: Manifest

    @property
    def tree(self) -> pathlib.Path:
        return self.directory / self.manifest.tree


def load_orbax(
    directory: str | os.PathLike,
    dtype: str = "auto",
    device: jax.Device | None = None,
    progress: Callable[[int, int], None] | None = None,
    versions: Sequence[str] = (DENSE,),
    *,
    in_files: bool = False,
    verify_reads: bool = True,
    cache: CacheSpec | None = None,
    new_builder: Callable[..., StoreBuilder] = StoreBuilder,
    shared: SharedMemory | None = None,
) -> LoadedModel:
    """Loads a checkpoint that `moejax convert` or `moejax quantize` wrote; of its dense version the
    same bits as its source gives.

    Several files are read and their checksums verified at once. Host memory grows by the experts
    and one parameter. versions: those to load of the ones that are there; if one of them is not,
    the dense one, from which it can be made. in_files: experts stay where they are, none of their
    bytes is read, and what cannot be made without reading them is refused. verify_reads: their
    checksums are verified when they are read. cache: of them in pinned memory; None: programs read
    files themselves. The rest as in load_checkpoint.

    Raises UserError naming the layer, expert and file that are damaged or missing; shapes, dtypes
    and the files' sizes are checked before the first weight is read.
    """
    marks = [time.perf_counter()]
    stored = open_stored(checkpoint_directory(directory))
    config = dataclasses.replace(stored.config, dtype=stored.dtype)
    to_name = run_dtype(dtype, stored.dtype)
    device = jax.devices()[0] if device is None else device
    held = _held(stored, to_name, versions)
    if in_files:
        _check_in_files(stored, to_name, versions, held)
    layers = {v: [stored.layers(v)[i] for i in numbers] for v, numbers in held.items()}
    experts = list(itertools.chain(*layers.values()))
    check_files(stored, experts)
    marks.append(time.perf_counter())

    run, to = StoredModel(stored.directory, config, to_name), NUMPY_DTYPES[to_name]
    sizes = [leaf.nbytes for leaf in run.params.values()]
    nbytes = sum(sizes) if shares_memory(device) else max(sizes)
    there = in_files or (shared is not None and shared.filled)
    if cache is not None or not there:
        nbytes += _store_bytes(run, layers, cache)
    require_host_memory(nbytes, str(stored.directory))
    read = itertools.chain(stored.params.values(), () if in_files else experts)
    advance = counted(progress, sum(leaf.nbytes for leaf in read))
    builders: dict[str, StoreBuilder] = {}
    with contextlib.ExitStack() as stack:
        for version, leaves in {} if in_files else layers.items():
            layout, source = run.layout(version), str(stored.directory)
            store = new_store(config, layout, device, source, len(leaves), new_builder, shared)
            builders[version] = stack.enter_context(store)
        marks.append(time.perf_counter())
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(WORKERS))
        params = _load_params(stored, run, device, pool, advance)
        for version, builder in builders.items():
            if there:  # in shared memory
                advance(len(layers[version]) * config.num_experts * layers[version][0].chunk_bytes)
                continue
            loaded = _load_experts(stored, layers[version], builder, to, pool)
            with contextlib.closing(loaded):
                for _ in loaded:
                    advance(layers[version][0].chunk_bytes)
        stores = {version: builder.finish() for version, builder in builders.items()}
    kept = layers if in_files else {}
    files = {v: _files_of(stored, v, leaves, verify_reads) for v, leaves in kept.items()}
    store = ExpertStore(
        {version: run.layout(version) for version in layers},
        {version: store.arrays[version] for version, store in stores.items()}
        | {
            version: AbsentRecords((len(layers[version]), *layers[version][0].shape))
            if cache is None
            else CachedRecords(source, device, cache)
            for version, source in files.items()
        },
        {v: tuple(i) for v, i in held.items() if len(i) < sum(config.moe_layers)},
        files,
    )
    warn_nonfinite(str(stored.directory), stored.manifest.nonfinite)
    marks.append(time.perf_counter())
    seconds: dict[str, float] = dict(zip(_PHASES, np.diff(marks).tolist(), strict=True))
    made = {v: name for v, name in stored.manifest.quantizers.items() if v in held}
    return LoadedModel(config, to_name, params, store, run.layout(), seconds, made)


def _store_bytes(
    run: StoredModel, layers: Mapping[str, Sequence[Leaf]], cache: CacheSpec | None
) -> int:
    """Bytes that these layers of versions have in memory."""
    experts = run.config.num_experts
    every = sum(len(each) * experts * run.layout(v).nbytes for v, each in layers.items())
    return every if cache is None else min(every, cache.bytes)


def _load_params(
    stored: StoredCheckpoint,
    run: StoredModel,
    device: jax.Device,
    pool: concurrent.futures.Executor,
    advance: Callable[[int], None],
) -> Any:
    """LoadedModel.params, in the dtypes of the run's."""

    def param(leaf: Leaf, dtype: np.dtype) -> jax.Array:
        weights = aligned_empty(leaf.shape, dtype)
        chunks = weights if leaf.stacked else weights[None]
        read = functools.partial(_read_as, stored, leaf, leaf.dtype)
        list(pool.map(read, leaf.chunks, chunks))
        advance(leaf.nbytes)
        return jax.block_until_ready(jax.device_put(weights, device))

    return run.params_tree(
        param(leaf, run.params[key].dtype) for key, leaf in stored.params.items()
    )


def _check_in_files(
    stored: StoredCheckpoint,
    dtype: str,
    versions: Sequence[str],
    held: Mapping[str, Sequence[int]],
) -> None:
    """Raises UserError where experts cannot be computed with as the files hold them."""
    where = f"{stored.directory}: store='file' reads experts as they are"
    if dtype != stored.dtype:
        raise UserError(
            f"{where}, in {stored.dtype}, not {dtype}; leave dtype out, or write another one "
            f"with `moejax convert SRC DST --dtype {dtype}`"
        )
    for version in versions:
        if version not in held:
            raise UserError(
                f"{where}, and it has no version {version}; write one with `moejax quantize "
                f"{stored.directory} DST --versions {version}`"
            )
    if len(held) > len(set(versions)):
        raise UserError(
            f"{where}, and {versions[0]} lacks MoE layers that only dense holds, which files "
            "cannot mix; use another version or store='memory'"
        )


def _files_of(
    stored: StoredCheckpoint, version: str, leaves: Sequence[Leaf], verify: bool
) -> RecordFiles:
    """The files of a version with these layers."""
    tree, manifest = stored.tree.resolve(), stored.manifest

    def numbers(found: Iterable[Sequence[str]]) -> np.ndarray:
        return np.array([[int(digits, 16) for digits in layer] for layer in found], np.uint64)

    crcs = [manifest.crcs_of(leaf) for leaf in leaves]
    every = all(len(found) == len(leaf.chunks) for found, leaf in zip(crcs, leaves, strict=True))
    return RecordFiles(
        stored.layout(version),
        tuple(tuple(str(leaf.file(tree, e)) for e in leaf.chunks) for leaf in leaves),
        numbers(manifest.checksums(leaf) for leaf in leaves),
        numbers(crcs) if every else None,
        verify,
    )


def _held(
    stored: StoredCheckpoint, dtype: str, versions: Sequence[str]
) -> dict[str, Sequence[int]]:
    """The wanted versions that the checkpoint has, dense first where it is wanted or needed, and
    which MoE layers to load of each. Lossless records are only those of a run in their own dtype; a
    version that lacks layers is taken where it is the only one wanted, and those layers dense."""
    manifest, every = stored.manifest, range(sum(stored.config.moe_layers))
    exact = dtype == manifest.dtype
    if len(versions) == 1 and exact and (lacking := manifest.dense_layers.get(versions[0])):
        dense = set(lacking).intersection(every)
        return {versions[0]: [i for i in every if i not in dense], DENSE: sorted(dense)}
    taken = [
        version
        for version in dict.fromkeys(versions)
        if version != DENSE
        and version in manifest.experts
        and (exact or stored.layout(version).lossy)
        and version not in manifest.dense_layers
    ]
    return dict.fromkeys(taken if len(taken) == len(set(versions)) else [DENSE, *taken], every)


def _load_experts(
    stored: StoredCheckpoint,
    leaves: Sequence[Leaf],
    builder: StoreBuilder,
    dtype: np.dtype,
    pool: concurrent.futures.Executor,
) -> Generator[None, None, None]:
    """Fills the store of a version with these layers; yields after each expert."""

    def load(at: tuple[int, int]) -> None:
        place, expert = at
        with builder.piece(place, expert, 1, 0, builder.layout.rows) as records:
            if builder.layout.version == DENSE:
                weights = records.reshape(-1).view(dtype)
                _read_as(stored, leaves[place], NUMPY_DTYPES[stored.dtype], expert, weights)
            else:
                read_chunk(stored, leaves[place], expert, records)

    return in_order(pool, load, itertools.product(range(len(leaves)), leaves[0].chunks))


def read_expert(
    directory: str | os.PathLike, layer: int, expert: int, version: str = DENSE
) -> np.ndarray:
    """One expert's record uint16[rows, D], in the dtype it is stored in; reads no other weights.

    layer: counted over MoE layers. Raises UserError if there is none, or if it is damaged.
    """
    stored = open_stored(checkpoint_directory(directory))
    layers, experts = sum(stored.config.moe_layers), stored.config.num_experts
    if version not in stored.manifest.experts:
        raise UserError(
            f"{stored.directory}: no version {version!r} of experts; there are "
            f"{', '.join(stored.manifest.experts)}"
        )
    if not (0 <= layer < layers and 0 <= expert < experts):
        raise UserError(
            f"{stored.directory}: no expert {expert} in MoE layer {layer}; there are {layers} MoE "
            f"layers of {experts} experts, counted from 0"
        )
    if layer in stored.manifest.dense_layers.get(version, ()):
        raise UserError(
            f"{stored.directory}: MoE layer {layer} is not in {version}, which cannot hold one of "
            "its experts; read the dense one"
        )
    leaf = stored.layers(version)[layer]
    if len(stored.manifest.checksums(leaf)) != experts:
        raise UserError(
            f"{stored.directory / MANIFEST}: MoE layer {layer} has not {experts} checksums; "
            f"{_AGAIN}"
        )
    record = np.empty(leaf.shape[1:], leaf.dtype)
    read_chunk(stored, leaf, expert, record)
    return record


def open_stored(directory: pathlib.Path) -> StoredCheckpoint:
    """Reads the manifest and verifies every file that is no chunk."""
    manifest = read_manifest(directory / MANIFEST)
    if manifest.dtype not in NUMPY_DTYPES:
        raise UserError(f"{directory / MANIFEST}: dtype {manifest.dtype!r} is unknown")
    left = MOST_FILES
    for name, expected in manifest.files.items():
        try:
            left -= require_own_file(directory / name, directory, left, "all files but the weights")
            found = file_checksum(directory / name)
        except OSError as error:
            raise UserError(f"{directory / name}: {error.strerror}; {_AGAIN}") from None
        if found != expected:
            raise UserError(
                f"{directory / name}: changed or damaged since the conversion (its checksum "
                f"differs); {_AGAIN}"
            )
    return StoredCheckpoint(directory, load_config(directory), manifest.dtype, manifest)


def check_files(stored: StoredCheckpoint, experts: Iterable[Leaf]) -> None:
    """UserError if the leaves of parameters and these of experts, their metadata or their files'
    sizes are not what config.json asks for."""
    manifest, source = stored.manifest, stored.directory / MANIFEST
    params = stored.params
    for key in params.keys() ^ manifest.params.keys():
        kind = "missing" if key in params else "unknown to this architecture"
        raise UserError(f"{source}: parameter {key} is {kind}; {_AGAIN}")
    for key, leaf in params.items():
        found = manifest.params[key]
        if (found.dtype, found.shape) != (leaf.dtype.name, leaf.shape):
            raise UserError(
                f"{source}: parameter {key} is {found.dtype}{list(found.shape)}, but config.json "
                f"asks for {leaf.dtype.name}{list(leaf.shape)}; {_AGAIN}"
            )
    for leaf in itertools.chain(params.values(), experts):
        found = len(manifest.checksums(leaf))
        if found != len(leaf.chunks):
            raise UserError(f"{source}: {found} checksums for {leaf.name}; {_AGAIN}")
        if read_json(stored.tree / leaf.name / "zarr.json") != leaf.zarr():
            raise UserError(
                f"{stored.tree / leaf.name / 'zarr.json'}: not the array that config.json asks "
                f"for; {_AGAIN}"
            )
        for chunk in leaf.chunks:
            try:
                size = leaf.file(stored.tree, chunk).stat().st_size
            except OSError as error:
                raise _damaged(stored, leaf, chunk, error) from None
            if size != leaf.chunk_bytes:
                raise _damaged(stored, leaf, chunk, f"{size} bytes, not {leaf.chunk_bytes}")


def _damaged(stored: StoredCheckpoint, leaf: Leaf, chunk: int, error: OSError | str) -> UserError:
    """What to raise for a chunk, named as people know it and by its file."""
    kind, _, rest = leaf.name.partition(".")
    named = f"parameter {rest}"
    if kind == "experts":
        version, layer = rest.split(".")
        named = f"expert {chunk} of MoE layer {layer}, version {version}"
    why = error.strerror if isinstance(error, OSError) else error
    return UserError(f"{named} ({leaf.file(stored.tree, chunk)}): {why}; {_AGAIN}")


def read_chunk(stored: StoredCheckpoint, leaf: Leaf, chunk: int, into: np.ndarray) -> None:
    """Fills a contiguous array with a chunk's bytes; UserError if they are not those that were
    written."""
    try:
        found = read_file(leaf.file(stored.tree, chunk), as_bytes(into))
    except OSError as error:
        raise _damaged(stored, leaf, chunk, error) from None
    if found != stored.manifest.checksums(leaf)[chunk]:
        raise _damaged(stored, leaf, chunk, "damaged (its checksum differs)")


def _read_as(
    stored: StoredCheckpoint, leaf: Leaf, dtype: np.dtype, chunk: int, into: np.ndarray
) -> None:
    """Fills a contiguous array, of whatever dtype, with a chunk's weights, which have `dtype`."""
    if dtype == into.dtype:
        return read_chunk(stored, leaf, chunk, into)
    weights = np.empty(into.shape, dtype)
    read_chunk(stored, leaf, chunk, weights)
    cast(weights, into, count_nonfinite(weights), str(leaf.file(stored.tree, chunk)))
