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
from collections.abc import Callable, Generator, Mapping, Sequence

import jax
import numpy as np

from host_offload.memory.store import ExpertStore, StoreBuilder, aligned_empty
from moejax.checkpoints.loaded_model import (
    LoadedModel,
    check_dtype,
    counted,
    new_store,
    run_dtype,
    warn_nonfinite,
)
from moejax.checkpoints.orbax.layout import DENSE, Leaf, expert_leaf, param_leaves
from moejax.checkpoints.orbax.manifest import (
    MANIFEST,
    Manifest,
    as_bytes,
    file_checksum,
    read_file,
    read_manifest,
)
from moejax.checkpoints.placement import WORKERS, cast, count_nonfinite, in_order
from moejax.checkpoints.safetensors.shards import NUMPY_DTYPES
from moejax.checkpoints.tensors import abstract_params
from moejax.errors import UserError
from moejax.models.config import ModelConfig, load_config
from moejax.models.directory import checkpoint_directory, read_json, require_own_file
from pallas_kernels.records import RecordFormat

_PHASES = ("headers", "allocate", "read")
"""The phases of moejax.start.report.start_times; parameters go to the device while others are
read."""

_AGAIN = "copy the checkpoint again, or convert the original again"


@dataclasses.dataclass(frozen=True)
class StoredCheckpoint:
    """directory's manifest and config, and the layout of the dense experts as they are stored."""

    directory: pathlib.Path
    manifest: Manifest
    config: ModelConfig
    layout: RecordFormat

    @property
    def tree(self) -> pathlib.Path:
        return self.directory / self.manifest.tree

    @functools.cached_property
    def params(self) -> dict[str, Leaf]:
        return param_leaves(self.config, NUMPY_DTYPES[self.manifest.dtype])

    def layout_of(self, version: str) -> RecordFormat:
        """How a version's records are stored. Raises UserError for an unknown version."""
        try:
            return dataclasses.replace(self.layout, version=version, dtype=self.manifest.dtype)
        except ValueError as error:
            raise UserError(f"{self.directory / MANIFEST}: {error}") from None

    def layer(self, version: str, layer: int) -> Leaf:
        """All experts of a MoE layer."""
        layout = self.layout if version == DENSE else self.layout_of(version)
        return expert_leaf(self.config, layout, layer)

    def layers(self, version: str) -> tuple[Leaf, ...]:
        return tuple(self.layer(version, i) for i in range(sum(self.config.moe_layers)))


def load_orbax(
    directory: str | os.PathLike,
    dtype: str = "auto",
    device: jax.Device | None = None,
    progress: Callable[[int, int], None] | None = None,
    versions: Sequence[str] = (DENSE,),
) -> LoadedModel:
    """Loads a checkpoint that `moejax convert` or `moejax quantize` wrote; of its dense version the
    same bits as its source gives.

    Several files are read and their checksums verified at once. Host memory grows by the experts
    and one parameter. versions: those to load of the ones that are there; if one of them is not,
    the dense one, from which it can be made. The rest as in load_checkpoint. Raises UserError
    naming the layer, expert and file that are damaged or missing; shapes, dtypes and the files'
    sizes are checked before the first weight is read.
    """
    check_dtype(dtype)
    marks = [time.perf_counter()]
    stored = open_stored(checkpoint_directory(directory))
    config = dataclasses.replace(stored.config, dtype=stored.manifest.dtype)
    to_name = run_dtype(dtype, str(config.dtype))
    device = jax.devices()[0] if device is None else device
    held = _held(stored, to_name, versions)
    leaves, layers = stored.params, {v: [stored.layer(v, i) for i in held[v]] for v in held}
    check_files(stored, held)
    marks.append(time.perf_counter())

    to = NUMPY_DTYPES[to_name]
    dense = config.expert_layout(to.itemsize)
    expert_bytes = sum(leaf.nbytes for each in layers.values() for leaf in each)
    advance = counted(progress, sum(leaf.nbytes for leaf in leaves.values()) + expert_bytes)

    builders: dict[str, StoreBuilder] = {}
    try:
        for version, numbers in held.items():
            layout = dense
            if version != DENSE:
                layout = dataclasses.replace(dense, version=version, dtype=to_name)
            source = str(stored.directory)
            builders[version] = new_store(config, layout, device, source, len(numbers))
        marks.append(time.perf_counter())
        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            keys = iter(leaves)

            def param(wanted: jax.ShapeDtypeStruct) -> jax.Array:
                key = next(keys)
                weights = read_param(stored, key, wanted.dtype, pool)
                advance(leaves[key].nbytes)
                return jax.block_until_ready(jax.device_put(weights, device))

            params = jax.tree.map(param, abstract_params(config, to))
            for version, builder in builders.items():
                with contextlib.closing(
                    _load_experts(stored, version, held[version], builder, to, pool)
                ) as loaded:
                    for _ in loaded:
                        advance(layers[version][0].chunk_bytes)
        stores = [builder.finish() for builder in builders.values()]
    except BaseException:
        for builder in builders.values():
            builder.delete()  # a traceback that is kept must not keep the store
        raise
    store = ExpertStore(
        {version: store.layouts[version] for version, store in zip(held, stores, strict=True)},
        {version: store.arrays[version] for version, store in zip(held, stores, strict=True)},
        {v: tuple(i) for v, i in held.items() if len(i) < sum(config.moe_layers)},
    )
    warn_nonfinite(str(stored.directory), stored.manifest.nonfinite)
    marks.append(time.perf_counter())
    seconds: dict[str, float] = dict(zip(_PHASES, np.diff(marks).tolist(), strict=True))
    quantizers = {v: name for v, name in stored.manifest.quantizers.items() if v in held}
    return LoadedModel(config, to_name, params, store, dense, seconds, quantizers)


def _held(
    stored: StoredCheckpoint, dtype: str, versions: Sequence[str]
) -> dict[str, Sequence[int]]:
    """The wanted versions that the checkpoint has, dense first where it is wanted or needed, and
    which MoE layers to load of each. Lossless records are only those of a run in their own dtype; a
    version that lacks layers is taken where it is the only one wanted, and those layers dense."""
    manifest, every = stored.manifest, range(sum(stored.config.moe_layers))
    exact = dtype == manifest.dtype
    if len(versions) == 1 and exact and (lacking := manifest.dense_layers.get(versions[0])):
        return {versions[0]: [i for i in every if i not in lacking], DENSE: list(lacking)}
    taken = [
        version
        for version in dict.fromkeys(versions)
        if version != DENSE
        and version in manifest.experts
        and (exact or stored.layout_of(version).lossy)
        and version not in manifest.dense_layers
    ]
    return dict.fromkeys(taken if len(taken) == len(set(versions)) else [DENSE, *taken], every)


def _load_experts(
    stored: StoredCheckpoint,
    version: str,
    layers: Sequence[int],
    builder: StoreBuilder,
    dtype: np.dtype,
    pool: concurrent.futures.Executor,
) -> Generator[None, None, None]:
    """Fills the store of a version, which has these layers; yields after each expert."""

    def load(at: tuple[int, int]) -> None:
        place, expert = at
        with builder.piece(place, expert, 1, 0, builder.layout.rows) as records:
            read_record(stored, version, layers[place], expert, dtype, records[0])

    places = itertools.product(range(len(layers)), range(stored.config.num_experts))
    return in_order(pool, load, places)


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
    if len(stored.manifest.experts[version].get(layer, ())) != experts:
        raise UserError(
            f"{stored.directory / MANIFEST}: MoE layer {layer} has not {experts} checksums; "
            f"{_AGAIN}"
        )
    record = np.empty(stored.layer(version, layer).shape[1:], np.uint16)
    read_record(stored, version, layer, expert, NUMPY_DTYPES[stored.manifest.dtype], record)
    return record


def open_stored(directory: pathlib.Path) -> StoredCheckpoint:
    """Reads the manifest and verifies every file that is no chunk."""
    manifest = read_manifest(directory / MANIFEST)
    if manifest.dtype not in NUMPY_DTYPES:
        raise UserError(f"{directory / MANIFEST}: dtype {manifest.dtype!r} is unknown")
    for name, expected in manifest.files.items():
        try:
            require_own_file(directory / name, directory)
            found = file_checksum(directory / name)
        except OSError as error:
            raise UserError(f"{directory / name}: {error.strerror}; {_AGAIN}") from None
        if found != expected:
            raise UserError(
                f"{directory / name}: changed or damaged since the conversion (its checksum "
                f"differs); {_AGAIN}"
            )
    config = load_config(directory)
    layout = config.expert_layout(NUMPY_DTYPES[manifest.dtype].itemsize)
    return StoredCheckpoint(directory, manifest, config, layout)


def check_files(stored: StoredCheckpoint, held: Mapping[str, Sequence[int]]) -> None:
    """UserError if leaves of parameters and of these layers by version, their metadata or their
    files' sizes are not what config.json asks for."""
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
    pieces = [(leaf, manifest.params[key].checksums) for key, leaf in params.items()]
    for version, layers in held.items():
        written = manifest.experts.get(version, {})
        pieces += [(stored.layer(version, i), written.get(i, ())) for i in layers]
    for leaf, found in pieces:
        if len(found) != len(leaf.chunks):
            raise UserError(f"{source}: {len(found)} checksums for {leaf.name}; {_AGAIN}")
        if read_json(stored.tree / leaf.name / "zarr.json") != leaf.zarr():
            raise UserError(
                f"{stored.tree / leaf.name / 'zarr.json'}: not the array that config.json asks "
                f"for; {_AGAIN}"
            )
        for index, name in enumerate(leaf.chunks):
            path = stored.tree / leaf.name / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise UserError(
                    f"{_named(path, leaf, index)}: {error.strerror}; {_AGAIN}"
                ) from None
            if size != leaf.chunk_bytes:
                raise UserError(
                    f"{_named(path, leaf, index)}: {size} bytes, not {leaf.chunk_bytes}; {_AGAIN}"
                )


def _named(path: pathlib.Path, leaf: Leaf, index: int) -> str:
    """A chunk as people know it, and its file."""
    kind, _, rest = leaf.name.partition(".")
    if kind == "experts":
        version, layer = rest.split(".")
        return f"expert {index} of MoE layer {layer}, version {version} ({path})"
    return f"parameter {rest} ({path})"


def _read_chunk(
    tree: pathlib.Path, leaf: Leaf, index: int, expected: str, into: np.ndarray
) -> None:
    """Fills a contiguous array with a chunk; UserError if it is not the one that was written."""
    path = tree / leaf.name / leaf.chunk(index)
    try:
        found = read_file(path, as_bytes(into))
    except OSError as error:
        raise UserError(f"{_named(path, leaf, index)}: {error.strerror}; {_AGAIN}") from None
    if found != expected:
        raise UserError(f"{_named(path, leaf, index)}: damaged (its checksum differs); {_AGAIN}")


def read_param(
    stored: StoredCheckpoint, key: str, dtype: np.dtype, pool: concurrent.futures.Executor
) -> np.ndarray:
    """A whole parameter in that dtype."""
    leaf = stored.params[key]
    weights = aligned_empty(leaf.shape, leaf.dtype)
    chunks = weights if leaf.stacked else weights[None]
    checksums = stored.manifest.params[key].checksums

    def read(index: int) -> None:
        _read_chunk(stored.tree, leaf, index, checksums[index], chunks[index])

    list(pool.map(read, range(len(checksums))))
    if leaf.dtype == dtype:
        return weights
    converted = aligned_empty(leaf.shape, dtype)
    cast(weights, converted, count_nonfinite(weights), str(stored.tree / leaf.name))
    return converted


def read_record(
    stored: StoredCheckpoint,
    version: str,
    layer: int,
    expert: int,
    dtype: np.dtype,
    into: np.ndarray,
) -> None:
    """Fills uint16 rows with an expert's record, of the dense version in that dtype."""
    leaf = stored.layer(version, layer)
    of, expected = NUMPY_DTYPES[stored.manifest.dtype], stored.manifest.experts[version][layer]
    same = version != DENSE or of == dtype
    record = into if same else np.empty(leaf.shape[1:], np.uint16)
    _read_chunk(stored.tree, leaf, expert, expected[expert], record)
    if not same:
        weights = record.reshape(-1).view(of)
        where = str(stored.tree / leaf.name / leaf.chunk(expert))
        cast(weights, into.reshape(-1).view(dtype), count_nonfinite(weights), where)
