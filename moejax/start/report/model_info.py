"""Sizes of a model: parameters, bytes of each part, and what fits into a given memory.

This is arithmetic on a config. Of weights it reads at most the headers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from host_offload.memory.budget import ArenaTooSmall, Share, format_bytes, resolve_budget
from host_offload.memory.device_memory import SHARE
from moejax.checkpoints.load import (
    check_orbax_options,
    checkpoint_format,
)
from moejax.checkpoints.orbax.layout import param_key
from moejax.checkpoints.orbax.manifest import MANIFEST, read_manifest
from moejax.checkpoints.random_model import abstract_params, expert_layout
from moejax.checkpoints.tensor_checkpoint import open_tensors
from moejax.errors import UserError
from moejax.models.config import ModelConfig, load_config, parse_config
from moejax.models.directory import checkpoint_directory, read_json
from moejax.models.hub import model_directory
from pallas_kernels.linear.coded import CODED_DTYPES
from pallas_kernels.records import VERSIONS

EXPERTS = "experts"
"""The part that is paged. Every other part stays on the device."""

PARTS = (
    *("embedding", "attention", "norms", "router", "feed-forward", "shared experts"),
    *("output head", EXPERTS),
)
"""The parts in order. A model may lack some."""


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """The sizes of a model in a run's dtype, bytes and counts."""

    architecture: str
    dtype: str
    layers: int
    moe_layers: int
    experts: int
    """Experts of one layer."""
    experts_per_token: int
    parameters: dict[str, int]
    """Counts by part (PARTS)."""
    bytes: dict[str, int]
    """The same parts in the run's dtype."""
    active_parameters: int
    """Parameters without the experts that a token is not routed to. The embedding table counts, as
    in the published figures of models."""
    versions: dict[str, dict[str, int]]
    """For each version that the model can have in this dtype: `record_bytes` of one expert and
    `store_bytes` of all experts, in host memory."""
    own_versions: dict[str, int]
    """Version of experts in the checkpoint, the default of a run → how many MoE layers have it."""
    slot_bytes: int
    page_bytes: int
    page_tokens: int
    pages_per_slot: int
    kv_token_bytes: int
    """KV of one token in all layers."""
    kv_sequence_bytes: int
    """Bytes of the whole pages of a sequence of max_model_len tokens, its state included."""
    state_bytes: int
    """Bytes of the pages of a sequence's state; 0 in models without state."""
    max_model_len: int

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def device_bytes(self) -> int:
        """Everything but the experts."""
        return sum(self.bytes.values()) - self.bytes[EXPERTS]


@dataclasses.dataclass(frozen=True)
class Fit:
    """What a device of `memory` bytes holds. If nothing runs, `problem` says why and the other
    numbers are 0."""

    memory: int
    arena_bytes: int = 0
    """Bytes of the arena that an engine takes: SHARE of what the dense part leaves."""
    resident_experts: int = 0
    resident_share: float = 0.0
    kv_tokens: int = 0
    sequences: int = 0
    """Sequences of the whole context whose KV fits at once."""
    problem: str | None = None


@dataclasses.dataclass(frozen=True)
class Weights:
    """The form of a checkpoint's weights on disk."""

    format: str
    """The format's name in checkpoint_format."""
    files: int
    bytes: int
    quantizers: dict[str, str] = dataclasses.field(default_factory=dict)
    """How each version of the experts besides the dense one was made."""
    dense_layers: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """The MoE layers that each such version lacks; they are dense."""
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    """Tensors that the model does not use, counted by what they belong to."""
    coded: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    """Dtype of a run on a CPU → key → bytes of the matrices that stay in the files' codes."""


def read_headers(
    path: str | os.PathLike[str],
    step: int | str | None = None,
    name_map: str | os.PathLike[str] | None = None,
    predictor: bool = False,
) -> tuple[ModelConfig, Weights | None]:
    """Returns the config of a checkpoint and the form of its weights. If the config names no dtype,
    it gets the weights' dtype.

    - `path`: a checkpoint directory of any format, whose tensors must be those that the config asks
      for; or "demo" for the model in the package; or a config.json alone, with None for the
      weights.
    - `step`, `name_map`, `predictor`: as in load_checkpoint.

    Raises UserError like load_checkpoint.
    """
    path = model_directory(path, config_only=True)
    alone = Path(path).name == "config.json" and Path(path).is_file()
    directory = Path(path) if alone else checkpoint_directory(path)
    kind = "config" if alone else checkpoint_format(directory)
    check_orbax_options(path, kind, step, name_map)
    if kind == "config":
        return parse_config(read_json(directory), str(path)), None
    left_out: dict[str, int] = {}
    coded: dict[str, dict[str, int]] = {}
    if kind == "moejax-orbax":
        manifest = read_manifest(directory / MANIFEST)
        config = dataclasses.replace(load_config(directory), dtype=manifest.dtype)
        paths, made = directory.rglob("*"), (manifest.quantizers, manifest.dense_layers)
    else:
        opened = open_tensors(directory, kind, step, name_map, predictor)
        config, files = opened.config, opened.files
        paths = files[0].path.rglob("*") if kind == "orbax" else (file.path for file in files)
        made, left_out = ({}, {}), opened.left_out
        for dtype in CODED_DTYPES:
            found = opened.coded_params(dtype)
            coded[dtype] = {key: 2 * count for key, (_, count) in found.items()}
    sizes = [path.stat().st_size for path in paths if path.is_file()]
    return config, Weights(kind, len(sizes), sum(sizes), *made, left_out, coded)


def in_codes(params: Any, coded: Mapping[str, int]) -> Any:
    """Returns abstract parameters with those that stay in codes as uint16 of as many bytes."""

    def leaf(path: Any, one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        nbytes = coded.get(param_key(path))
        return one if nbytes is None else jax.ShapeDtypeStruct((nbytes // 2,), np.uint16)

    return jax.tree_util.tree_map_with_path(leaf, params)


def model_info(
    config: ModelConfig, dtype: str = "auto", coded: Mapping[str, dict[str, int]] | None = None
) -> ModelInfo:
    """Returns the sizes of a model.

    - `dtype`: "auto" (the config's) or the run's.
    - `coded`: Weights.coded, for a run that keeps those matrices so.

    Raises UserError for an unknown dtype.
    """
    record, params = expert_layout(config, dtype), abstract_params(config, dtype)
    moe_layers, expert = sum(config.moe_layers), record.values
    if record.biases:
        expert += 2 * record.width + record.hidden
    found: dict[str, list[int]] = {}
    sizes = (coded or {}).get(params["embed"].dtype.name) or dict[str, int]()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        counts = found.setdefault(_part(str(path[-1].key)), [0, 0])
        counts[0] += math.prod(leaf.shape)
        nbytes: int = math.prod(leaf.shape) * leaf.dtype.itemsize
        counts[1] += sizes.get(param_key(path), nbytes)
    stored, versions = moe_layers * config.num_experts, {}
    own = {version: len(layers) for version, layers in config.expert_layers.items()}
    for version in dict.fromkeys((*VERSIONS, *own)):
        # A version may need bfloat16, or a D that is a multiple of something.
        with contextlib.suppress(ValueError):
            one = dataclasses.replace(record, version=version, dtype=params["embed"].dtype.name)
            versions[version] = {"record_bytes": one.nbytes, "store_bytes": stored * one.nbytes}
    found[EXPERTS] = [stored * expert, stored * record.nbytes]
    parameters = {part: found[part][0] for part in PARTS if part in found}
    idle = moe_layers * (config.num_experts - config.num_experts_per_tok) * expert
    slots = config.slot_layout(record.itemsize, (*own,), params["embed"].dtype.name)
    page = slots.page
    return ModelInfo(
        architecture=config.architecture,
        dtype=params["embed"].dtype.name,
        layers=config.num_hidden_layers,
        moe_layers=moe_layers,
        experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        parameters=parameters,
        bytes={part: found[part][1] for part in parameters},
        active_parameters=sum(parameters.values()) - idle,
        versions=versions,
        own_versions=own,
        slot_bytes=slots.slot_bytes,
        page_bytes=page.nbytes,
        page_tokens=page.block_size,
        pages_per_slot=slots.pages_per_slot,
        kv_token_bytes=page.nbytes * (page.windows.count(None) or page.groups) // page.block_size,
        kv_sequence_bytes=page.pages(config.max_position_embeddings) * page.nbytes,
        state_bytes=page.state_pages * page.nbytes,
        max_model_len=config.max_position_embeddings,
    )


def fit(
    config: ModelConfig,
    memory: int,
    *,
    dtype: str = "auto",
    batch: int = 1,
    context: int | None = None,
    version: str | None = None,
    expert_budget: int | Share | None = None,
    coded: Mapping[str, dict[str, int]] | None = None,
) -> Fit:
    """Returns what fits into `memory` bytes of a device: the dense part first, then the arena,
    split like an engine's (host_offload.memory.budget).

    - `batch`: number of sequences.
    - `context`: tokens of each sequence; None: the model's longest.
    - `version`: of the experts; None: the checkpoint's own.
    - `expert_budget`: bytes or a share for experts; None: what KV leaves.
    - `coded`: as in model_info.

    Raises UserError for a batch or context below one, or a context beyond the model's.
    """
    longest = config.max_position_embeddings
    context = longest if context is None else context
    for name, value in (("batch", batch), ("context", context)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    if context > longest:
        raise UserError(f"context {context} is more than the model's {longest} positions; lower it")
    info = model_info(config, dtype, coded)
    itemsize = expert_layout(config, dtype).itemsize
    versions = (*info.own_versions,) if version is None else (version,)
    slots = config.slot_layout(itemsize, versions, info.dtype)
    if memory < info.device_bytes:
        alone = format_bytes(info.device_bytes)
        return Fit(memory, problem=f"too small for the dense part alone, {alone}")
    arena = int((memory - info.device_bytes) * SHARE)
    try:
        budget = resolve_budget(
            slots,
            moe_layers=info.moe_layers,
            experts=info.experts,
            max_num_seqs=batch,
            max_model_len=context,
            available_bytes=arena,
            memory=arena,
            expert_budget=expert_budget,
        )
    except ArenaTooSmall as error:
        fits = error.largest_model_len
        hint = f"; {fits} tokens would fit" if fits else ""
        return Fit(memory, arena, problem=f"too small for the KV of {context} tokens{hint}")
    return Fit(
        memory=memory,
        arena_bytes=arena,
        resident_experts=budget.expert_slots,
        resident_share=budget.expert_slots / (info.moe_layers * info.experts),
        kv_tokens=slots.page.tokens(budget.pages),
        sequences=budget.pages // slots.page.pages(context),
    )


def info_json(info: ModelInfo, weights: Weights | None, fits: list[Fit]) -> dict[str, Any]:
    """Returns everything as one JSON object, sizes in bytes."""
    return {
        "weights": None if weights is None else dataclasses.asdict(weights),
        **dataclasses.asdict(info),
        "total_parameters": info.total_parameters,
        "device_bytes": info.device_bytes,
        "host_bytes": {name: v["store_bytes"] for name, v in info.versions.items()},
        "fits": [dataclasses.asdict(f) for f in fits],
    }


def _part(key: str) -> str:
    """Returns the part that a leaf of LoadedModel.params belongs to, by its key."""
    if key in ("embed", "lm_head", "lm_head_bias"):
        return "embedding" if key == "embed" else "output head"
    if key.startswith("shared"):
        return "shared experts"
    if key in ("router", "correction"):
        return "router"
    if key.startswith(("gate_up", "up", "down", "latent")):
        return "feed-forward"
    return "norms" if "norm" in key else "attention"
