"""The numbers that define a model's computation, for every family."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from host_offload.memory.layout import SlotLayout, Window, default_dtype, slot_layout
from moejax.models.attention.grouped_query import GROUPED_QUERY
from moejax.models.attention.kind import AttentionKind, StateKind
from moejax.models.quantization import Quantization
from moejax.models.rope import Rope
from pallas_kernels.expert_ffn import Activation, ClampedSwiGLU
from pallas_kernels.kv_write import KVPage
from pallas_kernels.records import RecordFormat
from pallas_kernels.route import RouteRule
from pallas_kernels.state_pages import StatePage, state_rows


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Attention of a layer, where layers of a model differ: the fields of `ModelConfig` that hold
    for this layer. It is the one place that says what a layer keeps of a sequence."""

    attention: AttentionKind
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: Rope
    rotary_width: int | None = None
    attention_only: bool = False
    hashed: bool = False


@dataclasses.dataclass(frozen=True)
class Streams:
    """Hyper-connections (arXiv:2512.24880): layers keep `count` residual streams, which each layer
    mixes by a matrix that `iterations` of Sinkhorn's make doubly stochastic."""

    count: int
    iterations: int
    eps: float


class PageGroup(NamedTuple):
    """Layers whose keys and values lie in one page, under one block table: equal pages and one
    window."""

    layers: tuple[int, ...]
    """See ModelConfig.page_places."""
    window: Window | None
    row_values: int
    """Values of a KV row."""
    token_values: int
    """Values of a token in all these layers."""


MOST_GROUPS = 12
"""Most groups of pages of a model. Each has a block table, which the device reads."""

SECOND = "second_"
"""Before the parameters of a layer's second attention and of the feed-forward behind it."""

STREAM_PARAMS = "head_streams", "head_base", "head_scale"
"""Parameters beside layers, of models with several residual streams."""

TYPICAL_TOKENS = 8192
"""Tokens of the sequence for which layers are grouped: pages should waste least of its KV."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive equal layers: `count` layers from layer `start`, all MoE or all dense, and with
    one LayerKind."""

    moe: bool
    start: int
    count: int
    state: bool = False


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The numbers that define the computation, under transformers' names.

    - `moe_layers`: for each layer, whether its MLP is a mixture of experts.
    - `hidden_act`: one of ACTIVATIONS ("swish" is read as "silu").
    - `rms_norm_eps`: of LayerNorms too.
    - `sliding_window`: tokens that each query sees, itself included, in the layers of
      `window_layers` (None: in every layer); None: all tokens.
    - `attention_bias`: whether q, k and v have biases.
    - `clip_qkv`: q, k and v are clipped to ± this.
    - `attention_scale`: factor of scores; None: head_dim^-0.5.
    - `qk_norm`: whether heads of q and k are normalised, in families with that choice.
    - `rotary_width`: how many first values of a head are rotated; None: all.
    - `rope_layers`: for each layer, whether positions rotate q and k; None: in every layer.
    - `rope_interleave`: rotated values are pairs (2i, 2i + 1), not halves.
    - `attention`: the kind of attention, which owns the layout of pages.
    - `unit_offset_norms`: weights of RMSNorms are stored less one.
    - `embedding_multiplier`, `residual_multiplier`: factors of embeddings, and of all that a layer
      adds to its input.
    - `logits_scaling`: divides logits.
    - `shared_width`: intermediate size of the expert that every token uses; 0: there is none.
    - `max_position_embeddings`: tokens of the longest sequence.
    - `length_limit`: why that is less than config.json says; None: it is not.
    - `dtype`: the checkpoint's, one of DTYPES; None: the config does not say, and `load_checkpoint`
      takes it from the weights.
    - `eos_token_ids`: empty if there is none.
    - `scoring_func`: "softmax", "sigmoid" or "sparsemixer". Other fields of routing: see
      pallas_kernels.route.RouteRule.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    moe_layers: tuple[bool, ...]
    attention_bias: bool
    hidden_act: str
    rms_norm_eps: float
    rope: Rope
    sliding_window: int | None
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str | None
    eos_token_ids: tuple[int, ...]
    window_layers: tuple[bool, ...] | None = None
    clip_qkv: float | None = None
    attention_scale: float | None = None
    qk_norm: bool = False
    rotary_width: int | None = None
    rope_interleave: bool = False
    rope_layers: tuple[bool, ...] | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    mlp_bias: bool = False
    lm_head_bias: bool = False
    chunked_window: bool = False
    """Whether queries see the tokens since the last multiple of sliding_window, not the last
    ones."""
    shared_width: int = 0
    attention: AttentionKind = GROUPED_QUERY
    unit_offset_norms: bool = False
    scoring_func: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    group_score: str = "max"
    routed_scaling_factor: float = 1.0
    router_jitter_noise: float = 0.0
    swiglu: ClampedSwiGLU | None = None
    """The gating of routed experts; None: hidden_act of the gate."""
    expert_bias: bool = False
    """Whether gate, up and down of routed experts have biases."""
    length_limit: str | None = None
    logits_cap: float | None = None
    """Logits x become cap · tanh(x / cap)."""
    routes_apart: bool = False
    """Whether experts read other values than the router, or their weights have a factor of each
    expert: then no kernel does both the routing and what follows."""
    mean_norms: bool = False
    """Whether norms subtract the mean, also without biases."""
    mlp_multiplier: float = 1.0
    """Factor of what experts add to a layer's input, the shared one included."""
    parallel: bool = False
    """Whether attention and experts are beside each other, after one norm of the layer's input."""
    weighted_inputs: bool = False
    """Whether routing weights scale the inputs of experts, not their outputs."""
    quantization: Quantization | None = None
    """Of the checkpoint's matrices, as their authors quantized them."""
    layer_kinds: tuple[LayerKind, ...] | None = None
    """The kind of each layer; None: all layers have the model's own fields."""
    attention_only: bool = False
    """Whether the layer has neither experts nor a feed-forward."""
    ungated: bool = False
    """Whether experts and feed-forwards have two matrices, up and down, with a squared ReLU
    between."""
    zero_experts: int = 0
    """Experts after the last one that a router may choose and whose output is their input."""
    second_attention: bool = False
    """Whether a layer has two attentions, each with a feed-forward behind it. Its experts read what
    the first feed-forward reads, and are added at the end."""
    latent_width: int = 0
    """Values that experts read and write, between two projections; 0: those of the layer."""
    predicts: str = ""
    """Of a layer that predicts a further token (moejax.models.next_token): which hidden states of
    its own its next prediction reads, "before" or "after" its final norm; empty: a whole model."""

    shared_swiglu: ClampedSwiGLU | None = None
    """swiglu, of the shared expert."""
    hashed: bool = False
    """Whether a table of token ids chooses the experts, and the router only weighs them."""
    streams: Streams | None = None
    """None: a layer adds to one residual stream."""

    @property
    def stream_values(self) -> int:
        """Values of a token between layers: of all its streams."""
        return self.hidden_size * (self.streams.count if self.streams else 1)

    def of_layer(self, layer: int) -> ModelConfig:
        """The configuration as a layer has it."""
        if self.layer_kinds is None:
            return self
        kind = self.layer_kinds[layer]
        own = {field.name: getattr(kind, field.name) for field in dataclasses.fields(kind)}
        return dataclasses.replace(self, **own)

    def for_length(self, max_model_len: int) -> ModelConfig:
        """The configuration of an engine whose sequences have at most `max_model_len` tokens."""
        kinds = self.layer_kinds and tuple(
            dataclasses.replace(kind, **_for_length(kind, max_model_len))
            for kind in self.layer_kinds
        )
        window = self.sliding_window
        if window is not None and window >= max_model_len:  # it would hide no token
            window = None
        own = _for_length(self, max_model_len)
        return dataclasses.replace(self, **own, layer_kinds=kinds, sliding_window=window)

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """The kinds of attention of the layers, each once."""
        return tuple(dict.fromkeys(self.of_layer(run.start).attention for run in self.runs))

    @property
    def moe_versions(self) -> tuple[str, ...]:
        """The version of each MoE layer's experts in the checkpoint."""
        found = ("dense",) if self.quantization is None else self.quantization.versions
        return found * sum(self.moe_layers) if len(found) == 1 else found

    @property
    def expert_layers(self) -> dict[str, tuple[int, ...]]:
        """Version of experts in the checkpoint → its MoE layers."""
        layers: dict[str, list[int]] = {}
        for layer, version in enumerate(self.moe_versions):
            layers.setdefault(version, []).append(layer)
        return {version: tuple(each) for version, each in layers.items()} or {"dense": ()}

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer."""
        inside = self.window_layers or (True,) * self.num_hidden_layers
        return tuple(self.sliding_window if i else None for i in inside)

    @property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """The layers by the pages that hold their keys and values, see PageLayout.

        Layers of equal pages and one window may be several groups, so that the pages of all groups,
        which have one size, waste least.
        """
        alike: dict[tuple[KVPage, Window | None], list[int]] = {}
        for layer, window in enumerate(self.windows * self.attentions):
            if layer in self.state_layers:
                continue
            seen = None if window is None else Window(window, self.chunked_window)
            own = self.of_layer(layer % self.num_hidden_layers)
            alike.setdefault((own.page(1), seen), []).append(layer)
        for layer in range(self.num_hidden_layers):
            if (page := self.of_layer(layer).attention.far_page(1)) is not None:
                alike.setdefault((page, None), []).append(layer + len(self.windows))
        values = {key: key[0].rows_per_token * key[0].head_dim for key in alike}

        def per_group(size: int) -> dict[tuple[KVPage, Window | None], int]:
            """How many layers a page of `size` values a token holds."""
            return {key: min(size // values[key], len(layers)) for key, layers in alike.items()}

        def cost(size: int) -> tuple[bool, int, int]:
            held = per_group(size)
            groups = {key: -(-len(layers) // held[key]) for key, layers in alike.items()}
            tokens = sum(
                n * min(key[1].tokens if key[1] else TYPICAL_TOKENS, TYPICAL_TOKENS)
                for key, n in groups.items()
            )
            count = sum(groups.values())
            return count > MOST_GROUPS, size * tokens, count

        sizes = {
            values[key] * count
            for key, layers in alike.items()
            for count in range(1, len(layers) + 1)
        }
        least = max(values.values())
        held = per_group(min((size for size in sizes if size >= least), key=cost))
        groups = []
        for (page, window), layers in alike.items():
            # As equal as can be, so that no group is nearly empty.
            count = -(-len(layers) // held[page, window])
            each = -(-len(layers) // count)
            for i in range(0, len(layers), each):
                part = tuple(layers[i : i + each])
                row = page.head_dim, page.rows_per_token * page.head_dim * len(part)
                groups.append(PageGroup(part, window, *row))
        return tuple(groups)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The layers as runs of equal layers, in order."""
        moe = self.moe_layers
        every = (None,) * len(moe)
        # Chunks are taken from the block table once for all layers of a run.
        windows = self.windows if self.chunked_window else every
        kinds = [*zip(moe, self.layer_kinds or every, windows, strict=True)]
        starts = [i for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
        ends = [*starts[1:], len(kinds)]
        return tuple(Run(moe[s], s, e - s) for s, e in zip(starts, ends, strict=True))

    @property
    def state(self) -> StateKind | None:
        """The kind of the layers that keep a state for each sequence and no keys and values; None:
        there are none."""
        kinds = (kind for kind in self.attention_kinds if isinstance(kind, StateKind))
        return next(kinds, None)

    @property
    def page_runs(self) -> tuple[Run, ...]:
        """The runs whose layers have keys and values."""
        return tuple(run for run in self.runs if run.start not in self.state_layers)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers with state."""
        kinds = enumerate(self.layer_kinds or ())
        return tuple(i for i, kind in kinds if isinstance(kind.attention, StateKind))

    @property
    def route_rule(self) -> RouteRule:
        """The rule from router logits to experts and weights, including the residual multiplier."""
        return RouteRule(
            top_k=self.num_experts_per_tok,
            normalize=self.norm_topk_prob,
            scoring=self.scoring_func,
            groups=self.n_group,
            top_groups=self.topk_group,
            group_score=self.group_score,
            scale=self.routed_scaling_factor * self.residual_multiplier,
            jitter=self.router_jitter_noise,
        )

    @property
    def expert_activation(self) -> Activation:
        """The activation of routed experts."""
        return self.swiglu or self.hidden_act

    @property
    def attentions(self) -> int:
        """Attentions of a layer."""
        return 2 if self.second_attention else 1

    @property
    def expert_hidden(self) -> int:
        """Values that an expert reads and writes."""
        return self.latent_width or self.hidden_size

    @property
    def beyond_kernels(self) -> str | None:
        """What of the experts no kernel for a GPU computes; None: nothing."""
        return "experts of latent values" if self.latent_width else None

    @property
    def beyond_packing(self) -> str | None:
        """What of the experts only XLA computes if residents are packed; None: nothing."""
        if self.expert_bias:
            return "biases of experts"
        if self.ungated:
            return "experts of two matrices"
        return None if self.swiglu is None else "a clamped SwiGLU"

    @property
    def rotary_dim(self) -> int:
        """Values of a head that are rotated."""
        return self.attention.rotary_dim(self)

    def page(self, block_size: int) -> KVPage:
        """The layout of a page of `block_size` tokens."""
        return self.attention.page(self, block_size)

    @property
    def far_places(self) -> dict[int, tuple[int, int]]:
        """As page_places, of the pages that layers have beside those of their window."""
        layers = self.num_hidden_layers
        return {
            layer - layers: (number, place)
            for number, group in enumerate(self.page_groups)
            for place, layer in enumerate(group.layers)
            if layer >= layers * self.attentions
        }

    @property
    def page_places(self) -> list[tuple[int, int]]:
        """(group, place among its layers) of each layer's pages; of a layer with state its place
        among these. The second attentions of layers follow all first ones."""
        places = {layer: (0, place) for place, layer in enumerate(self.state_layers)} | {
            layer: (number, place)
            for number, group in enumerate(self.page_groups)
            for place, layer in enumerate(group.layers)
        }
        return [places[layer] for layer in range(self.num_hidden_layers * self.attentions)]

    @property
    def page_row_values(self) -> int:
        """Values of a KV row by which pages of all groups are addressed: whole rows of each."""
        return math.lcm(*(group.row_values for group in self.page_groups))

    @property
    def page_rows(self) -> dict[str, int]:
        """`layers`, `rows_per_token` and `row_values` of PageLayout."""
        groups, row = self.page_groups, self.page_row_values
        layers = len(groups[0].layers) if len(groups) == 1 else 1
        per_token = max(-(-group.token_values // (row * layers)) for group in groups)
        return {"layers": layers, "rows_per_token": per_token, "row_values": row}

    def state_page(self, block_size: int, dtype: str) -> StatePage:
        """Where the state of a sequence lies in pages of `block_size` tokens.

        - `dtype`: the run's.
        """
        assert self.state is not None
        rows, itemsize = self.page_rows, jnp.dtype(dtype).itemsize
        elements = rows["row_values"] * itemsize // 2
        of_page = rows["layers"] * rows["rows_per_token"] * block_size
        layer_rows = sum(state_rows(part, elements) for part in self.state.state(dtype))
        return StatePage(of_page, elements, layer_rows)

    def expert_layout(self, itemsize: int) -> RecordFormat:
        """The dense record of one expert. itemsize: bytes of a weight."""
        dtype = default_dtype(itemsize)
        sizes = self.expert_hidden, self.moe_intermediate_size
        return RecordFormat("dense", *sizes, dtype, self.expert_bias, not self.ungated)

    def slot_layout(
        self,
        itemsize: int,
        versions: Sequence[str] = ("dense",),
        dtype: str | None = None,
    ) -> SlotLayout:
        """The layout of this model's slots.

        - `itemsize`: bytes of a weight.
        - `versions`, `dtype`: see host_offload.memory.layout.slot_layout.
        """
        layout = slot_layout(
            hidden=self.expert_hidden,
            width=self.moe_intermediate_size,
            itemsize=itemsize,
            **self.page_rows,
            versions=versions,
            dtype=dtype,
            biases=self.expert_bias,
            gated=not self.ungated,
            windows=tuple(group.window for group in self.page_groups),
        )
        if self.state is None:
            return layout
        states = self.state_page(layout.page.block_size, default_dtype(itemsize))
        page = dataclasses.replace(layout.page, state_pages=states.pages(len(self.state_layers)))
        return dataclasses.replace(layout, page=page)


def with_state(config: ModelConfig, kind: StateKind, layers: Sequence[bool]) -> ModelConfig:
    """The configuration whose marked layers are of a kind with state."""
    names = [field.name for field in dataclasses.fields(LayerKind)]
    own = LayerKind(**{name: getattr(config, name) for name in names})
    state = dataclasses.replace(own, attention=kind)
    return dataclasses.replace(config, layer_kinds=tuple(state if s else own for s in layers))


def finishes(config: ModelConfig, params: Container[str]) -> bool:
    """Whether `LayerStack.finish` ends layers with these parameters: what experts add is normalised
    first, or projected, or attention is beside them."""
    after = "mlp_out_norm" in params or "latent_out" in params or config.streams is not None
    return config.parallel or ("router" in params and after)


_NEWER = frozenset(
    {"chunked_window", "expert_bias", "layer_kinds", "length_limit", "logits_cap", "rope_layers"}
    | {"mean_norms", "parallel", "routes_apart", "swiglu", "unit_offset_norms", "weighted_inputs"}
    | {"attention_only", "ungated", "latent_width", "zero_experts", "second_attention"}
    | {"predicts", "hashed", "streams", "shared_swiglu"}
)


def _for_length(numbers: Any, max_model_len: int) -> dict[str, Any]:
    return {
        name: getattr(numbers, name).for_length(max_model_len) for name in ("rope", "attention")
    }


def config_digest(config: ModelConfig) -> str:
    """The digest of a model's configuration, however its weights are quantized: SHA-256, in hex, of
    its fields as JSON with sorted keys."""
    fields = dataclasses.asdict(dataclasses.replace(config, quantization=None))
    del fields["quantization"]
    # Fields that older releases had not are left out where a model does not use them.
    for table in (fields, *(fields["layer_kinds"] or ())):
        for key in [key for key in table if key in _NEWER and not table[key]]:
            del table[key]
    # Files of older releases have digests with this name and None for grouped-query attention.
    if fields["mlp_multiplier"] == 1:
        del fields["mlp_multiplier"]
    if fields.get("swiglu", {}).get("shift") == 1:
        del fields["swiglu"]["shift"]
    if fields["rope"]["part"] == 1:
        del fields["rope"]["part"]
    fields["mla"] = fields.pop("attention") or None
    text = json.dumps(fields, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
