"""Which kernels a model will run, and whether they were found right on this device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax

from host_offload.memory.layout import SlotLayout
from moejax.cache import cache_root
from moejax.checkpoints.tensors import layer_params, param_shape
from moejax.costs.store import StepSpec
from moejax.errors import user_errors
from moejax.models.config import ModelConfig
from moejax.models.family import Parts
from pallas_kernels.cpu.library import instruction_set, why_not_cpu
from pallas_kernels.records.versions import Formats
from pallas_kernels.verification import ModelShape, checks, require_verified


def verify_kernels(steps: StepSpec, device: jax.Device) -> None:
    """Sees to it that every kernel these steps will run was found right on this device: from the
    package's table, else by running the checks once (seconds, kept in the cache directory).

    Interpreted kernels are not checked. Raises UserError for a configuration that is wrong.
    """
    if device.platform != "gpu":
        return
    with user_errors():
        for shape in kernel_shapes(steps.config, steps.dtype, steps.layout, steps.formats):
            require_verified(checks(shape, steps.ops, device), device, cache_root() / "verified")


def native_note(steps: StepSpec, platform: str) -> str:
    """A line about the native CPU ops for people; empty where there is nothing to say."""
    if "cpu" in dataclasses.astuple(steps.ops):
        return f"native CPU ops with the {instruction_set()} instructions"
    reason = why_not_cpu() if platform == "cpu" else None
    return f"{reason}; all ops run in XLA" if reason else ""


def kernel_shapes(
    config: ModelConfig, dtype: str, layout: SlotLayout, formats: Formats | None = None
) -> tuple[ModelShape, ...]:
    """What of a model decides its kernels' configurations, one for each sliding window. formats: of
    the run's versions; None: one, dense."""
    layers = [layer_params(config, run.moe) for run in config.runs]
    names = {key for params in layers for key in params}
    norms = {key: param_shape(p[key])[0] for p in layers for key in p if key in _OTHER_NORMS}
    # kv_write normalises head by head; otherwise q and k have rms_norms of their own.
    by_head = norms.get("q_norm") == config.head_dim and config.clip_qkv is None
    if by_head:
        norms = {}
    shape = ModelShape(
        hidden=config.hidden_size,
        width=config.moe_intermediate_size,
        experts=config.num_experts,
        rule=config.route_rule,
        heads=config.num_attention_heads,
        kv_heads=config.kv_heads,
        head_dim=config.kv_width,
        products=_products(config, dtype, layers),
        block_size=layout.page.block_size,
        window=None,
        activation=config.hidden_act,
        dtype=dtype,
        latent=config.kv_latent,
        qk_norm=by_head,
        other_norms=tuple(sorted({*norms.values()} - {config.hidden_size})),
        correction="correction" in names,
        norm="layer_norm" if "input_norm_bias" in names else "rms_norm",
    )
    if formats is not None:
        versions = tuple((f.cell.version, f.store.version) for f in formats)
        shape = dataclasses.replace(shape, versions=versions)
    windows = sorted(set(config.windows), key=lambda w: w or 0)
    return tuple(dataclasses.replace(shape, window=window) for window in windows)


_OTHER_NORMS = ("q_norm", "k_norm", "q_a_norm")
_NOT_LINEAR = frozenset({"kv_b"})
_WIDE_RESULT = frozenset({"router", "gate_up", "shared_gate_up", "shared_gate"})
"""Parameters whose products LayerStack asks for in float32."""


def _products(
    config: ModelConfig, dtype: str, layers: Sequence[Mapping[str, Parts]]
) -> tuple[tuple[int, int, bool, str], ...]:
    """As ModelShape.products: those of every layer and of the head."""
    found = {(config.vocab_size, config.hidden_size, config.lm_head_bias, "float32")}
    for params in layers:
        for key, parts in params.items():
            shape = param_shape(parts)
            if len(shape) == 2 and key not in _NOT_LINEAR:
                out = "float32" if key in _WIDE_RESULT else dtype
                found.add((*shape, f"{key}_bias" in params, out))
    return tuple(sorted(found))
