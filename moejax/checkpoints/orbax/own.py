"""Reads the checkpoints that `moejax convert` writes: parameters, and experts by version.

It reads Orbax's files directly (orbax/layout.py): each expert is a file with the bytes of its
record. Orbax can load the checkpoint too, but it cannot fill arrays in place and checks nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from host_offload.memory.record_source import RecordFiles
from host_offload.policies.precision.precision_names import CHECKPOINT
from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.checkpoints.checkpoint import Checkpoint, ExpertTask, RecordSink, Task
from moejax.checkpoints.orbax.layout import DENSE, Leaf
from moejax.checkpoints.orbax.manifest import (
    MANIFEST,
    Manifest,
    as_bytes,
    file_checksum,
    read_file,
    read_manifest,
)
from moejax.checkpoints.tensor_tasks import cast
from moejax.errors import UserError
from moejax.models.config import load_config
from moejax.models.directory import checkpoint_directory, read_json, require_own_file

MOST_FILES = 1 << 30
"""Most bytes of all files except the chunks; the tokenizer of a large model has 30 MB."""

_AGAIN = "copy the checkpoint again, or convert the original again"


@dataclasses.dataclass(frozen=True)
class StoredCheckpoint(Checkpoint):
    """A converted checkpoint, which is its own reader. Its dense version has the bits of its
    source."""

    manifest: Manifest

    @property
    def tree(self) -> pathlib.Path:
        """The directory of Orbax's tree."""
        return self.directory / self.manifest.tree

    def hold(self, dtype: str, versions: Sequence[str]) -> dict[str, Sequence[int]]:
        """Chooses the versions that the checkpoint has, and dense first if the run asks for dense
        or for a version that the checkpoint lacks. Lossless records serve only a run in their own
        dtype. A version that lacks layers serves only as the single version of a run, with dense
        records for those layers.

        Returns and raises as Checkpoint.hold.
        """
        manifest, every = self.manifest, range(sum(self.config.moe_layers))
        if self.config.quantization is not None:
            held = self._hold_coded(dtype, versions)
            check_files(self, itertools.chain(*self._leaves(held).values()))
            return held
        exact = dtype == manifest.dtype
        if len(versions) == 1 and exact and (lacking := manifest.dense_layers.get(versions[0])):
            dense = set(lacking).intersection(every)
            held: dict[str, Sequence[int]] = {
                versions[0]: [i for i in every if i not in dense],
                DENSE: sorted(dense),
            }
        else:
            taken = [
                version
                for version in dict.fromkeys(versions)
                if version != DENSE
                and version in manifest.experts
                and (exact or self.layout(version).lossy)
                and version not in manifest.dense_layers
            ]
            whole = len(taken) == len(set(versions))
            held = dict.fromkeys(taken if whole else [DENSE, *taken], every)
        check_files(self, itertools.chain(*self._leaves(held).values()))
        return held

    def _hold_coded(self, dtype: str, versions: Sequence[str]) -> dict[str, Sequence[int]]:
        """The versions of a quantized checkpoint, if CHECKPOINT is asked for."""
        own = self.config.expert_layers
        named = " and ".join(own)
        if CHECKPOINT not in versions:
            raise UserError(
                f"{self.directory}: its experts are in {named} alone; run with precision "
                "checkpoint, or use the checkpoint that it was converted from"
            )
        if len(self.config.moe_versions) != sum(self.config.moe_layers):
            raise UserError(
                f"{self.directory}: config.json names the versions of "
                f"{len(self.config.moe_versions)} MoE layers, and the model has "
                f"{sum(self.config.moe_layers)}; {_AGAIN}"
            )
        if dtype != self.dtype and any("+" in name and DENSE in name for name in own):
            raise UserError(
                f"{self.directory}: some matrices of {named} are in {self.dtype}; run in it"
            )
        return {**own}

    def count_bytes(self, held: Mapping[str, Sequence[int]]) -> int:
        leaves = itertools.chain(self.params.values(), *self._leaves(held).values())
        return sum(leaf.nbytes for leaf in leaves)

    def _leaves(self, held: Mapping[str, Sequence[int]]) -> dict[str, list[Leaf]]:
        every = {version: self.layers(version) for version in held}
        return {version: [every[version][i] for i in layers] for version, layers in held.items()}

    @contextlib.contextmanager
    def open(self) -> Iterator[StoredCheckpoint]:
        yield self

    def read_param(self, key: str, chunk: int, out: np.ndarray) -> Iterator[Task]:
        leaf = self.params[key]

        def read() -> int:
            with _in_dtype(out, leaf.dtype, str(leaf.file(self.tree, chunk))) as weights:
                read_chunk(self, leaf, chunk, weights)
            return leaf.chunk_bytes

        yield read

    def read_experts(
        self, version: str, layers: Sequence[int], sink: RecordSink, dtype: np.dtype
    ) -> Iterator[ExpertTask]:
        leaves = self._leaves({version: layers})[version]
        stored = NUMPY_DTYPES[self.dtype] if version == DENSE else dtype

        def read(layer: int, expert: int) -> int:
            leaf = leaves[layer]
            with sink.piece(layer, expert, 1, 0, sink.layout.rows) as records:
                out = records.reshape(-1).view(dtype)
                with _in_dtype(out, stored, str(leaf.file(self.tree, expert))) as weights:
                    read_chunk(self, leaf, expert, weights)
            return leaf.chunk_bytes

        for layer, leaf in enumerate(leaves):
            for expert in leaf.chunks:
                yield (layer, expert), functools.partial(read, layer, expert)

    def record_files(
        self,
        dtype: str,
        versions: Sequence[str],
        held: Mapping[str, Sequence[int]],
        verify: bool,
        as_stored: bool,
    ) -> dict[str, RecordFiles]:
        """Version → the files of its experts. Arguments and errors are those of
        Checkpoint.record_files."""
        where = f"{self.directory}: store='file' reads experts as they are"
        if dtype != self.dtype:
            raise UserError(
                f"{where}, in {self.dtype}, not {dtype}; leave dtype out, or write another one "
                f"with `moejax convert SRC DST --dtype {dtype}`"
            )
        own = [*versions] == [CHECKPOINT]
        for version in held if own else versions:
            if version not in held:
                raise UserError(
                    f"{where}, and it has no version {version}; write one with `moejax quantize "
                    f"{self.directory} DST --versions {version}`"
                )
        if not own and len(held) > len(set(versions)):
            raise UserError(
                f"{where}, and {versions[0]} lacks MoE layers that only dense holds, which files "
                "cannot mix; use another version or store='memory'"
            )
        leaves = self._leaves(held)
        return {version: self._record_files(version, leaves[version], verify) for version in held}

    def _record_files(self, version: str, leaves: Sequence[Leaf], verify: bool) -> RecordFiles:
        tree = self.tree.resolve()

        def numbers(found: Iterable[Sequence[str]]) -> np.ndarray:
            return np.array([[int(digits, 16) for digits in layer] for layer in found], np.uint64)

        crcs = [self.manifest.crcs_of(leaf) for leaf in leaves]
        every = [len(found) for found in crcs] == [len(leaf.chunks) for leaf in leaves]
        return RecordFiles(
            self.layout(version),
            tuple(tuple(str(leaf.file(tree, e)) for e in leaf.chunks) for leaf in leaves),
            numbers(self.manifest.checksums(leaf) for leaf in leaves),
            numbers(crcs) if every else None,
            verify,
        )


def read_expert(
    directory: str | os.PathLike, layer: int, expert: int, version: str = DENSE
) -> np.ndarray:
    """Reads one expert's record uint16[rows, D], as it is stored, and no other weights.

    - `layer`: counted from 0 over MoE layers.

    Raises UserError for an expert that does not exist or is damaged.
    """
    stored = open_stored(checkpoint_directory(directory))
    lacking = stored.manifest.dense_layers.get(version, ())
    layers = list(stored.layers(version) if version in stored.manifest.experts else ())
    if not (0 <= layer < len(layers) and layer not in lacking and expert in layers[0].chunks):
        raise UserError(
            f"{stored.directory}: no expert {expert} in MoE layer {layer} of version {version!r}; "
            f"there are {sum(stored.config.moe_layers)} MoE layers of {stored.config.num_experts} "
            f"experts, counted from 0, in {', '.join(stored.manifest.experts)}"
            + (f", and it lacks layers {list(lacking)}, read dense ones" if lacking else "")
        )
    leaf = layers[layer]
    if expert >= len(stored.manifest.checksums(leaf)):
        raise UserError(f"{stored.directory / MANIFEST}: no checksum for {leaf.name}; {_AGAIN}")
    record = np.empty(leaf.shape[1:], leaf.dtype)
    read_chunk(stored, leaf, expert, record)
    return record


def open_stored(directory: pathlib.Path) -> StoredCheckpoint:
    """Reads the manifest and verifies every file except the chunks. Raises UserError for a file
    that is missing, damaged or a link out of the directory."""
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
    config = dataclasses.replace(load_config(directory), dtype=manifest.dtype)
    quantizers = manifest.quantizers
    return StoredCheckpoint(directory, config, manifest.dtype, manifest, quantizers=quantizers)


def check_files(stored: StoredCheckpoint, experts: Iterable[Leaf]) -> None:
    """Raises UserError if the parameters or these leaves of experts are not those that config.json
    asks for: their shapes, dtypes, checksums in the manifest, zarr metadata or file sizes."""
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
                raise _damage_error(stored, leaf, chunk, error) from None
            if size != leaf.chunk_bytes:
                raise _damage_error(stored, leaf, chunk, f"{size} bytes, not {leaf.chunk_bytes}")


def _damage_error(
    stored: StoredCheckpoint, leaf: Leaf, chunk: int, error: OSError | str
) -> UserError:
    """The error for a damaged chunk, which names the parameter or expert and the file."""
    kind, _, rest = leaf.name.partition(".")
    named = f"parameter {rest}"
    if kind == "experts":
        version, layer = rest.split(".")
        named = f"expert {chunk} of MoE layer {layer}, version {version}"
    why = error.strerror if isinstance(error, OSError) else error
    return UserError(f"{named} ({leaf.file(stored.tree, chunk)}): {why}; {_AGAIN}")


def read_chunk(stored: StoredCheckpoint, leaf: Leaf, chunk: int, into: np.ndarray) -> None:
    """Fills a contiguous array with a chunk's bytes. Raises UserError if their checksum is not that
    of the manifest."""
    try:
        found = read_file(leaf.file(stored.tree, chunk), as_bytes(into))
    except OSError as error:
        raise _damage_error(stored, leaf, chunk, error) from None
    if found != stored.manifest.checksums(leaf)[chunk]:
        raise _damage_error(stored, leaf, chunk, "damaged (its checksum differs)")


@contextlib.contextmanager
def _in_dtype(out: np.ndarray, dtype: np.dtype, named: str) -> Iterator[np.ndarray]:
    """Yields a contiguous array of `dtype` to be filled with weights. After the `with`, `out` has
    these weights, cast to its own dtype.

    - `named`: the file of the weights, for messages.
    """
    if dtype == out.dtype:
        yield out
        return
    weights = np.empty(out.shape, dtype)
    yield weights
    cast(weights, out, named)
