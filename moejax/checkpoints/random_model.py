"""Random weights in the sizes of known models, for benchmarks and tests where only sizes matter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from host_offload.memory.device_memory import shares_memory
from host_offload.memory.store import StoreBuilder
from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.checkpoints import tensors
from moejax.checkpoints.loaded_model import LoadedModel, new_store, run_dtype
from moejax.errors import UserError
from moejax.models.config import ModelConfig, parse_config
from pallas_kernels.records import RecordFormat

_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
SHAPES: dict[str, dict[str, int]] = {
    name: dict(zip(_SIZES, sizes, strict=True))
    for name, sizes in {
        "demo": (4, 128, 128, 16, 4, 4, 2, 32, 4096, 1024),
        "qwen3-30b-a3b": (48, 2048, 768, 128, 8, 32, 4, 128, 151936, 40960),
        "mixtral-8x7b": (32, 4096, 14336, 8, 2, 32, 8, 128, 32000, 32768),
        "olmoe": (16, 2048, 1024, 64, 8, 16, 16, 128, 50304, 4096),
    }.items()
}
"""Model → its sizes, from its config.json."""

SPREAD = 0.02
"""Standard deviation of the weights, except those of norms, which are all 1."""

_BLOCK = 1 << 22
"""How many random values are drawn; every weight is one of them."""


def shape(name: str, layers: int | None = None) -> ModelConfig:
    """The config of a Qwen3-MoE model with the sizes of another model. Only the sizes are equal:
    Mixtral and OLMoE differ from Qwen3-MoE in norms, rope and router.

    - `name`: one of SHAPES.
    - `layers`: the number of layers; None: as many as the model has.

    Raises UserError for an unknown name and for fewer than one layer.
    """
    return parse_config(shape_fields(name, layers), name)


def shape_fields(name: str, layers: int | None = None) -> dict[str, Any]:
    """The fields of config.json for `shape`, with the same arguments and errors."""
    if name not in SHAPES:
        raise UserError(f"shape {name!r} is unknown; choose {', '.join(SHAPES)}")
    if layers is not None and layers < 1:
        raise UserError(f"layers must be at least 1, got {layers}")
    sizes = SHAPES[name] | ({} if layers is None else {"num_hidden_layers": layers})
    return {"model_type": "qwen3_moe", "norm_topk_prob": True, "dtype": "bfloat16", **sizes}


def expert_layout(config: ModelConfig, dtype: str = "auto") -> RecordFormat:
    """The format of a dense record.

    - `dtype`: as in random_model.
    """
    return config.expert_layout(NUMPY_DTYPES[_run_dtype(config, dtype)].itemsize)


def abstract_params(config: ModelConfig, dtype: str = "auto") -> dict[str, Any]:
    """LoadedModel.params as ShapeDtypeStructs.

    - `dtype`: as in random_model.
    """
    return tensors.abstract_params(config, NUMPY_DTYPES[_run_dtype(config, dtype)])


def random_model(
    config: ModelConfig,
    dtype: str = "auto",
    device: jax.Device | None = None,
    seed: int = 0,
    *,
    new_builder: Callable[..., StoreBuilder] = StoreBuilder,
) -> LoadedModel:
    """Makes a model with random weights, as load_checkpoint would return it. The same arguments
    give the same weights.

    All weights come from one block of _BLOCK normal values, each array and expert from another
    place in it, so that gigabytes take seconds.

    - `dtype`: "auto" (the config's) or one of DTYPE_NAMES.
    - `device`: jax's first device by default.
    - `new_builder`: as in new_store.

    Raises UserError for an unknown dtype, and as new_store does.
    """
    to_name = _run_dtype(config, dtype)
    device = jax.devices()[0] if device is None else device
    generator = np.random.default_rng(seed)
    block = (generator.standard_normal(_BLOCK, np.float32) * SPREAD).astype(NUMPY_DTYPES[to_name])
    layout = expert_layout(config, dtype)
    bits = block.view(np.uint16)
    sizes = layout, sum(config.moe_layers), config.num_experts
    with new_store(*sizes, device, "random weights", new_builder) as builder:
        # A GPU cuts the records of a layer, since the host would take a minute for 50 GiB.
        make = None if shares_memory(device) else _device_records(bits, layout, device)
        for layer in range(sum(config.moe_layers)):
            # A float32 is two uint16, so an odd start would mix the halves of two values.
            starts = generator.integers(bits.size // 2, size=config.num_experts) * 2
            if make is not None:
                builder.put(layer, 0, make(starts.astype(np.int32)))
                continue
            for expert, start in enumerate(starts):
                piece = _piece(bits, int(start), (1, layout.rows, layout.hidden))
                builder.put(layer, expert, piece)
        store = builder.finish()

    def fill(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if str(path[-1].key).endswith("norm"):
            values = np.ones(leaf.shape, leaf.dtype)
        elif path[-1].key in tensors.TABLES:  # of experts, for each token different ones
            rows, experts = np.indices(leaf.shape[1:])
            values = np.broadcast_to((rows + experts) % config.num_experts, leaf.shape)
            values = values.astype(leaf.dtype)
        else:
            values = _piece(block, int(generator.integers(_BLOCK)), leaf.shape)
        return jax.block_until_ready(jax.device_put(values, device))

    weights = jax.tree_util.tree_map_with_path(fill, abstract_params(config, dtype))
    config = dataclasses.replace(config, dtype=config.dtype or to_name)
    return LoadedModel(config, to_name, weights, store, layout)


def _run_dtype(config: ModelConfig, dtype: str) -> str:
    return run_dtype(dtype, config.dtype or "bfloat16")


def _device_records(
    bits: np.ndarray, layout: RecordFormat, device: jax.Device
) -> Callable[[np.ndarray], jax.Array]:
    """Returns a function that cuts n records, uint16[n, rows, D], on the device, as _piece does.
    Its argument is where each record starts in `bits`, int32[n]."""
    size = layout.rows * layout.hidden
    around = jax.device_put(np.tile(bits, 1 + -(-size // bits.size)), device)

    @jax.jit
    def records(starts: jax.Array) -> jax.Array:
        cut = jax.vmap(lambda start: jax.lax.dynamic_slice(around, (start,), (size,)))(starts)
        return cut.reshape(-1, layout.rows, layout.hidden)

    return lambda starts: records(jax.device_put(starts, device))


def _piece(block: np.ndarray, start: int, shape: tuple[int, ...]) -> np.ndarray:
    """Fills an array of that shape from the block, beginning at `start`. At the end of the block it
    continues at the block's begin."""
    values = np.empty(math.prod(shape), block.dtype)
    first = min(block.size - start, values.size)
    values[:first] = block[start : start + first]
    for at in range(first, values.size, block.size):
        values[at : at + block.size] = block[: values.size - at]
    return values.reshape(shape)
