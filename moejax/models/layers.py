"""The decoder of every family: embedding, layers over stacked parameters, final norm and head."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from moejax.models.attention.kind import StateKind, Tokens
from moejax.models.attention.mamba import unit_rms
from moejax.models.model_config import SECOND, STREAM_PARAMS, ModelConfig, finishes
from moejax.models.next_token import PREDICTOR_NORMS
from moejax.models.rope import inverse_frequencies
from pallas_kernels import Ops
from pallas_kernels.dispatch import KERNELS
from pallas_kernels.expert_ffn import gated
from pallas_kernels.layer_norm import layer_norm
from pallas_kernels.linear import (
    CodedWeights,
    LinearOptions,
    Norm,
    linear,
    linear_parts,
    linear_with_squares,
    norm_linear,
    norm_linear_parts,
    normalises_within,
    sum_of_parts,
)
from pallas_kernels.paged_attention import NO_WINDOW, PerLayer
from pallas_kernels.plan import Plan, Tables
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.route import (
    NormRouteOptions,
    RouteOperands,
    norm_route_and_list,
    route,
    route_and_list,
    route_and_plan,
    route_scores,
    weigh,
)


def linear_options(ops: Ops, tokens: Tokens | None = None) -> LinearOptions:
    """Options of products: for the tokens' row tiles or, without tokens, for all rows."""
    rows = {} if tokens is None else {"row_tile": tokens.row_tile, "tiles": tokens.tiles}
    return LinearOptions(
        **rows,
        implementation=ops.linear,
        norm_implementation=ops.rms_norm,
        arithmetic=ops.arithmetic,
        shared_kib=ops.shared_kib,
    )


class LayerStack(nnx.Module):
    """A run of consecutive equal layers. Parameters have a leading axis over the run's layers.

    The parameters decide what is computed: norms of q and k, biases, LayerNorm instead of RMSNorm,
    latent attention, a shared expert. Methods take `i`, the layer's index in the run, and pass
    whole stacks to the ops, so a scan over i copies nothing if the ops are kernels. `first_layer`
    counts all layers, `first_moe_layer` only layers with experts.

    Layers of a run may have pages in several groups.

    - `params`: the run's arrays as moejax.checkpoints.load returns them, weights in [out, in]
      order.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict[str, jax.Array],
        *,
        first_layer: int,
        first_moe_layer: int,
        ops: Ops,
    ):
        self.config, self.ops = config, ops
        self.first_moe_layer = first_moe_layer
        second = {n.removeprefix(SECOND): p for n, p in params.items() if n.startswith(SECOND)}
        params = {n: p for n, p in params.items() if not n.startswith(SECOND)}
        behind = first_layer + config.num_hidden_layers
        self.second = (
            LayerStack(config, second, first_layer=behind, first_moe_layer=0, ops=ops)
            if second
            else None
        )
        """The second attentions of the layers, with the feed-forwards behind them."""
        self.is_moe = "router" in params
        self.size = params["o"].shape[0]
        params = {
            name: _norm_weights(config, array) if name in UNIT_OFFSET else array
            for name, array in params.items()
        }
        self.weights = nnx.Dict({name: nnx.Param(array) for name, array in params.items()})
        frequencies, self.attention_factor = inverse_frequencies(config.rope, config.rotary_dim)
        if config.rotary_width is not None:  # values that are not rotated have angle 0
            frequencies = np.pad(frequencies, (0, config.head_dim // 2 - frequencies.size))
        if config.rope_layers is not None:
            rotated = config.rope_layers[first_layer : first_layer + self.size]
            frequencies = np.asarray(rotated, np.float32)[:, None] * frequencies
        self.inverse_frequencies = np.asarray(frequencies, np.float32)
        places = config.page_places[first_layer : first_layer + self.size]
        self.group, self.first_in_page = places[0]
        follow = [(self.group, self.first_in_page + i) for i in range(self.size)]
        self.places = None if places == follow else np.array(places, np.int32)
        """int32[layers, 2]: (group, place) of each layer's pages; None: they follow the first."""
        far = [config.far_places.get(first_layer + n) for n in range(self.size)]
        self.far_places = None if None in far else np.array(far, np.int32)
        """As places, of the layers' further pages; None: they have none."""
        self.has_state = isinstance(config.attention, StateKind)
        if not self.has_state:
            self.page_factor = config.page_row_values // config.page(1).head_dim
            self.row_values = config.page_row_values
        windows = config.windows[first_layer : first_layer + self.size]
        numbers = [NO_WINDOW if window is None else window for window in windows]
        masked = any(windows) and not config.chunked_window
        self.chunk = windows[0] if config.chunked_window else None
        self.windows = np.array(numbers, np.int32) if masked else None

    def frequencies(self, i) -> jax.Array:
        """The angle per token of each pair of a head's values, [head_dim / 2]."""
        every = jnp.asarray(self.inverse_frequencies)
        return every if every.ndim == 1 else every[i]

    def page_layer(self, i) -> jax.Array:
        """The place of layer i among the layers of its page."""
        return self.first_in_page + i if self.places is None else jnp.asarray(self.places)[i, 1]

    def far_layer(self, i) -> tuple[jax.Array, jax.Array, int]:
        """(group, place in its pages, KV rows in one row by which pages are addressed) of layer i's
        further pages."""
        page = self.config.attention.far_page(1)
        assert self.far_places is not None and page is not None
        group, place = jnp.asarray(self.far_places)[i]
        return group, place, self.row_values // page.head_dim

    def near_layer(self, i) -> tuple[jax.Array | int, jax.Array, int]:
        """As far_layer, of its first pages."""
        group = self.group if self.places is None else jnp.asarray(self.places)[i, 0]
        return group, self.page_layer(i), self.page_factor

    def _in_pages(self, i, tokens: Tokens) -> Tokens:
        """The tokens with the pages of layer i."""
        group = self.group if self.places is None else jnp.asarray(self.places)[i, 0]
        return tokens.of_group(group, self.page_factor, self.chunk)

    def weight(self, name: str) -> jax.Array:
        return self.weights[name][...]

    def optional_weight(self, name: str) -> jax.Array | None:
        return self.weights[name][...] if name in self.weights else None

    def per_layer(self, i: jax.Array) -> PerLayer:
        """What attention of layer i reads beside pages."""
        windows = None if self.windows is None else jnp.asarray(self.windows)
        return PerLayer(i, self.optional_weight("sinks"), windows)

    def gives_squares(self, rows: int) -> bool:
        """Whether the router's product normalises this many rows of x itself. Then the `squares` of
        x that attend returns save its programs from reading the rows."""
        within = normalises_within(rows, linear_options(self.ops))
        made = self.config.residual_multiplier == 1 and self.ops.ends_layers
        plain = "post_norm" in self.weights and "post_norm_bias" not in self.weights
        alone = not self.finishes and self.second is None
        return self.is_moe and within and made and plain and alone

    @property
    def finishes(self) -> bool:
        """See `model_config.finishes`."""
        return finishes(self.config, self.weights)

    @property
    def mlp_norm(self) -> str:
        """The norm of what the router, or the feed-forward, reads."""
        return "input_norm" if self.config.parallel else "post_norm"

    def takes_squares(self, rows: int) -> bool:
        """The same as gives_squares for attention's first product, for which attend takes squares
        of x."""
        return self.gives_squares(rows) and self.config.attention.takes_squares

    def _product_operands(self, name, i, tokens):
        """Weights, layer index, bias and options of a product."""
        bias = self.optional_weight(f"{name}_bias")
        return self.weight(name), i, bias, linear_options(self.ops, tokens)

    def linear(self, x, name, i, tokens, out_dtype=None, residual=None):
        operands = self._product_operands(name, i, tokens)
        return linear(x, *operands, out_dtype=out_dtype, residual=residual)

    def _plus(self, x, y, name, i, tokens, out_norm=None):
        """x plus the product of y: one op if the model has nothing between them."""
        if out_norm is not None and out_norm in self.weights:
            return x + self._scale_added(self.norm(self.linear(y, name, i, tokens), out_norm, i))
        if self.config.residual_multiplier == 1:
            return self.linear(y, name, i, tokens, residual=x)
        return x + self._scale_added(self.linear(y, name, i, tokens))

    def _plus_with_squares(self, x, y, name, i, tokens):
        """(_plus without a factor, its tile_squares)."""
        return linear_with_squares(y, *self._product_operands(name, i, tokens), residual=x)

    def norm(self, x, name, i, eps=None):
        """Normalised x; x itself in a model without that norm."""
        if name not in self.weights:
            return x
        eps = self.config.rms_norm_eps if eps is None else eps
        weight, bias = self.weight(name), self.optional_weight(f"{name}_bias")
        if self.config.mean_norms:
            bias = jnp.zeros_like(weight)
        return norm(x, weight, bias, i, eps, self.ops)

    def norm_linear(self, x, norm_name, name, i, tokens, squares=None):
        """The product of normalised x, if nothing else reads the normalised values."""
        if not self._has_rms_norm(norm_name):
            return self.linear(self.norm(x, norm_name, i), name, i, tokens)
        norm = Norm(self.weight(norm_name), self.config.rms_norm_eps, squares)
        return norm_linear(x, norm, *self._product_operands(name, i, tokens))

    def _has_rms_norm(self, name: str) -> bool:
        """Whether products can compute the norm: there is one, and it is no LayerNorm."""
        mean = self.config.mean_norms or f"{name}_bias" in self.weights
        return name in self.weights and not mean

    def _scale_added(self, y):
        """Scales what a layer adds to its input. For routed experts the weights have the factor."""
        return scale(y, self.config.residual_multiplier)

    def attend(
        self,
        i: jax.Array,
        x: jax.Array,
        arena: jax.Array,
        tokens: Tokens,
        block_size: int,
        squares: jax.Array | None = None,
        counters: jax.Array | None = None,
        with_squares: bool = False,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
        """Adds attention to x [T, D] and writes the tokens' keys and values to their pages.

        - `block_size`: tokens of a page.
        - `squares`: tile_squares of x, if the stack takes them.
        - `counters`: see write_and_attend.
        - `with_squares`: return squares of the sum; see gives_squares.

        Returns (x, arena, squares of the new x or None, counters). With a second attention x is
        [T, 2·D], for `route`: after the first attention, and after all but the experts.
        """
        every = tokens
        with jax.named_scope("attend"):
            if self.has_state:
                page: Any = self.config.state_page(block_size, str(x.dtype))
            else:
                page, tokens = self.config.page(block_size), self._in_pages(i, tokens)
            mixing = None
            if self.config.streams is None:
                given = i, x, arena, tokens, page, squares, counters
            else:
                read, mixing = self._mixing(i, x, "attention", every)
                given = i, read, arena, tokens, page, None, counters
            attended, arena, counters = self.config.attention.attend(self, *given)
            if mixing is not None:
                x, squares = self._mix(x, self.linear(attended, "o", i, tokens), mixing), None
            elif with_squares:
                x, squares = self._plus_with_squares(x, attended, "o", i, tokens)
            else:
                x = self._plus(x, attended, "o", i, tokens, "attention_out_norm")
                squares = None
            # Values between a layer's parts are always rounded here (contract 1e).
            x, squares = lax.optimization_barrier((x, squares))
            if self.second is not None:
                end = self.feed_forward(i, x, every)
                end, arena, *_ = self.second.attend(i, end, arena, every, block_size)
                x = jnp.concatenate([x, self.second.feed_forward(i, end, every)], axis=1)
            return x, arena, squares, counters

    def route(
        self,
        i: jax.Array,
        x: jax.Array,
        tokens: Tokens,
        favour: jax.Array | None = None,
        squares: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Routes x [T, D].

        - `favour`: float32[E], added to the scores for the choice, not for the weights, beside the
          model's correction; None: nothing.
        - `squares`: of x, as attend returns them, here and below.

        Returns (what the experts add to: x plus its shared expert if there is one, without x if the
        layer `finishes`; normalised x; ids [T, K] ascending; weights [T, K]).
        """
        with jax.named_scope("route"):
            x, normed, logits = self._score(i, x, tokens, squares)
            if "expert_of_token" in self.weights:
                ids, weights = self._weigh_listed(i, sum_of_parts(logits), tokens)
                return lax.optimization_barrier((x, normed, ids, weights))
            correction, row = self._correction(), i
            if favour is not None:
                favour = jnp.pad(favour, (0, self.config.zero_experts))
                own = 0.0 if correction is None else correction[i].astype(jnp.float32)
                correction, row = (own + favour)[None], 0
            ids, weights = route(
                logits,
                tokens.valid,
                correction,
                row,
                rule=self.config.route_rule,
                implementation=self.ops.route,
            )
            x, ids, weights = self._plus_inputs(x, normed, ids, weights)
            normed, weights = self._weigh(i, normed, ids, weights, tokens)
            return lax.optimization_barrier((x, normed, ids, weights))

    def _weigh_listed(self, i, logits, tokens):
        """ids and weights of the experts that the table lists for each token."""
        table = self.weight("expert_of_token")
        listed = table[i, tokens.ids].astype(jnp.int32)
        # As in _force_routing, ids must depend on attention, or XLA copies the arena.
        listed = jnp.where(logits[:, :1] > -jnp.inf, listed, 0)
        return weigh(logits, listed, tokens.valid, rule=self.config.route_rule)

    def _mixing(self, i, x, part, tokens):
        """What a part of the layer reads of the streams x [T, N·D], [T, D], and (factors of its
        output for each stream, [T, N]; the matrix that mixes streams, [T, N, N])."""
        streams = self.config.streams
        assert streams is not None
        count, eps = streams.count, streams.eps
        options = linear_options(self.ops, tokens)
        factors = stream_factors(x, self.weight(f"{part}_streams"), i, options, self.config)
        factors = factors * jnp.repeat(
            self.weight(f"{part}_scale")[i], np.array([count, count, count**2]), axis=0
        )
        factors = factors + self.weight(f"{part}_base")[i]
        read, out, mixed = jnp.split(factors, (count, 2 * count), axis=1)
        read, out = jax.nn.sigmoid(read) + eps, 2 * jax.nn.sigmoid(out)
        mixed = jax.nn.softmax(mixed.reshape(-1, count, count), axis=2) + eps

        def scaled(mixed, axis):
            return mixed / (jnp.sum(mixed, axis=axis, keepdims=True) + eps)

        mixed = lax.fori_loop(  # unrolled it would take long to compile
            1, streams.iterations, lambda _, m: scaled(scaled(m, 2), 1), scaled(mixed, 1)
        )
        return lax.optimization_barrier((sum_streams(x, read), (out, mixed)))

    def _mix(self, x, added, mixing):
        """The streams after a part that gave `added` [T, D]."""
        out, mixed = mixing
        count = out.shape[1]
        each = [y.astype(jnp.float32) for y in jnp.split(x, count, axis=1)]
        added = added.astype(jnp.float32)
        new = []
        for k in range(count):
            total = added * out[:, k, None]
            for j in range(count):
                total = total + each[j] * mixed[:, j, k, None]
            new.append(total.astype(x.dtype))
        return jnp.concatenate(new, axis=1)

    def _plus_inputs(self, x, normed, ids, weights):
        """(x with the outputs of chosen zero_experts, ids and weights without these)."""
        if not self.config.zero_experts:
            return x, ids, weights
        experts = self.config.num_experts
        own = jnp.sum(jnp.where(ids >= experts, weights, 0.0), axis=1, keepdims=True)
        x = x + (normed.astype(jnp.float32) * own).astype(x.dtype)
        return x, jnp.minimum(ids, experts), jnp.where(ids < experts, weights, 0.0)

    def _weigh(self, i, normed, ids, weights, tokens):
        """(inputs of the experts [T, D], weights of their outputs [T, K]), by the router's."""
        experts = self.config.num_experts
        if "expert_scale" in self.weights:
            each = self.weight("expert_scale")[i].astype(weights.dtype)
            weights = weights * each[jnp.minimum(ids, experts - 1)]
        if self.config.weighted_inputs:
            normed = normed * weights.astype(normed.dtype)
            weights = (ids < experts).astype(weights.dtype)
        if "latent_in" in self.weights:
            normed = self.linear(normed, "latent_in", i, tokens)
        return normed, weights

    def route_and_plan(
        self,
        i: jax.Array,
        x: jax.Array,
        tokens: Tokens,
        tables: Tables,
        records: jax.Array,
        versions: int,
        squares: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, Tables, jax.Array, Plan]:
        """(x, normed, ids, weights) as `route` returns them, then the tables, records and plan that
        the op returns. Kernels do all of it in one launch if the rows are few."""
        with jax.named_scope("route"):
            x, normed, logits = lax.optimization_barrier(self._score(i, x, tokens, squares))
            routed = route_and_plan(
                *(logits, RouteOperands(tokens.valid, self._correction(), i)),
                *(tables, self.first_moe_layer + i, records),
                rule=self.config.route_rule,
                versions=versions,
                implementation=self.ops.route,
            )
            return x, normed, *routed

    def route_and_list(
        self,
        i: jax.Array,
        x: jax.Array,
        tokens: Tokens,
        records: jax.Array,
        squares: jax.Array | None = None,
        counters: jax.Array | None = None,
    ) -> tuple[Any, ...]:
        """(x, normed, ids, weights) as `route` returns them, then the records, the list of experts,
        its length and the counters that the op returns."""
        with jax.named_scope("route"):
            operands = RouteOperands(tokens.valid, self._correction(), i)
            kept = operands, records, self.first_moe_layer + i, counters
            rule, name = self.config.route_rule, self.ops.route
            plain = self._has_rms_norm("post_norm") and "router_bias" not in self.weights
            alone = not self.finishes and self.second is None
            if not plain or not alone or not self.ops.fuses_norm_route:
                scored = self._score(i, x, tokens, squares)
                x, normed, logits = lax.optimization_barrier(scored)
                return x, normed, *route_and_list(logits, *kept, rule=rule, implementation=name)
            options = NormRouteOptions(rule, linear_options(self.ops, tokens), name)
            router = self._post_norm(squares), self.weight("router")
            normed, *routed = norm_route_and_list(x, *router, *kept, options=options)
            if "shared_down" in self.weights:
                x = self._plus_shared_expert(i, x, normed, tokens)
            return lax.optimization_barrier((x, normed, *routed))

    def _score(self, i, x, tokens, squares):
        """(what the experts add to: x plus its shared expert if there is one, normalised x, router
        logits in parts)."""
        if self.config.streams is not None:
            x, _ = self._mixing(i, x, "mlp", tokens)
        x, after = (x, x) if self.second is None else jnp.split(x, 2, axis=1)
        if "router_norm" in self.weights:
            normed = self.norm(x, "post_norm", i)
            logits = self._router_logits(i, self.norm(x, "router_norm", i), tokens)
            logits = logits * x.shape[1] ** -0.5
        elif not self._has_rms_norm(self.mlp_norm):
            normed = self.norm(x, self.mlp_norm, i)
            logits = self._router_logits(i, normed, tokens)
        else:
            router = self.weight("router"), i, linear_options(self.ops, tokens)
            normed, logits = norm_linear_parts(x, self._post_norm(squares), *router)
            logits = self._plus_router_bias(i, logits)
        if self.finishes:  # finish adds x
            after = jnp.zeros((len(x), self.config.expert_hidden), x.dtype)
        apart = "shared_norm" in self.weights or "latent_out" in self.weights
        if "shared_down" in self.weights and not apart:
            after = self._plus_shared_expert(i, after, normed, tokens)
        return after, normed, logits

    def finish(self, i: jax.Array, x: jax.Array, out: jax.Array, tokens: Tokens) -> jax.Array:
        """The layer's result, if it `finishes`.

        - `x`: [T, D] before the experts.
        - `out`: [T, config.expert_hidden], the sum of the routed experts and the shared one, unless
          that has norms of its own or routed ones are latent.
        """
        with jax.named_scope("finish"):
            if self.config.streams is not None:
                _, mixing = self._mixing(i, x, "mlp", tokens)
                return lax.optimization_barrier(self._mix(x, out, mixing))
            if "latent_out" in self.weights:
                out = self.linear(out, "latent_out", i, tokens)
                if "shared_down" in self.weights:
                    normed = self.norm(x, self.mlp_norm, i)
                    out = self._plus_shared_expert(i, out, normed, tokens)
            if "shared_norm" in self.weights:
                hidden = self._gate(self.norm(x, "shared_norm", i), "shared_", i, tokens)
                shared = self.linear(hidden, "shared_down", i, tokens)
                out = self.norm(out, "experts_out_norm", i)
                out = out + self.norm(shared, "shared_out_norm", i)
            factor = self.config.mlp_multiplier if self.is_moe else 1.0
            added = scale(self.norm(out, "mlp_out_norm", i), factor)
            x = x + self._scale_added(added)
            if "layer_scale" in self.weights:
                x = x * self.weight("layer_scale")[i].astype(x.dtype)
            return lax.optimization_barrier(x)

    def _post_norm(self, squares):
        return Norm(self.weight(self.mlp_norm), self.config.rms_norm_eps, squares)

    def _correction(self):
        """[L, E], of tensors [E] or [1, E]."""
        correction = self.optional_weight("correction")
        return None if correction is None else correction.reshape(len(correction), -1)

    def router_input(self, i: jax.Array, x: jax.Array, tokens: Tokens) -> jax.Array:
        """What the router of layer i reads, [T, D], where experts read something else.

        - `x`: as attend returns it.
        """
        x = x if self.second is None else jnp.split(x, 2, axis=1)[0]
        if self.config.streams is not None:
            x, _ = self._mixing(i, x, "mlp", tokens)
        if "router_norm" in self.weights:
            return scale(self.norm(x, "router_norm", i), x.shape[1] ** -0.5)
        return self.norm(x, self.mlp_norm, i)

    def router_scores(self, i: jax.Array, normed: jax.Array, tokens: Tokens) -> jax.Array:
        """The router's scores float32[T, E] for normed [T, D], which route returned."""
        logits = sum_of_parts(self._router_logits(i, normed, tokens))
        return route_scores(logits, self.config.route_rule)

    def _router_logits(self, i, normed, tokens):
        """Router logits in parts, float32[S, T, E]."""
        parts = linear_parts(normed, self.weight("router"), i, linear_options(self.ops, tokens))
        return self._plus_router_bias(i, parts)

    def _plus_router_bias(self, i, parts):
        """The parts of router logits, with the bias in the first one."""
        bias = self.optional_weight("router_bias")
        return parts if bias is None else parts.at[0].add(bias[i].astype(parts.dtype))

    def _plus_shared_expert(self, i, x, normed, tokens):
        """x plus the expert that every token uses. In Qwen2-MoE it has a gate."""
        with jax.named_scope("shared_expert"):
            hidden = self._gate(normed, "shared_", i, tokens)
            if "shared_gate" not in self.weights:
                return self._plus(x, hidden, "shared_down", i, tokens)
            out = self.linear(hidden, "shared_down", i, tokens)
            gate = self.linear(normed, "shared_gate", i, tokens, out_dtype=jnp.float32)
            return x + self._scale_added((jax.nn.sigmoid(gate) * out).astype(out.dtype))

    def feed_forward(self, i: jax.Array, x: jax.Array, tokens: Tokens) -> jax.Array:
        """x [T, D] plus the feed-forward of a layer without experts; without x if `finish` adds
        it."""
        if self.config.attention_only:
            return x
        with jax.named_scope("feed_forward"):
            normed = self.norm(x, self.mlp_norm, i)
            hidden = self._gate(normed, "", i, tokens)
            if self.finishes:
                return lax.optimization_barrier(self.linear(hidden, "down", i, tokens))
            out = self._plus(x, hidden, "down", i, tokens, "mlp_out_norm")
            return lax.optimization_barrier(out)

    def _gate(self, normed, key, i, tokens):
        """What goes into the product with `down`: the activated gate times up."""
        if self.config.ungated:
            up = self.linear(normed, f"{key}up", i, tokens, out_dtype=jnp.float32)
            return (jax.nn.relu(up) * up).astype(normed.dtype)
        gate_up = self.linear(normed, f"{key}gate_up", i, tokens, out_dtype=jnp.float32)
        gate, up = jnp.split(gate_up, 2, axis=-1)
        activation = self.config.shared_swiglu or self.config.hidden_act
        return gated(activation, gate, up).astype(normed.dtype)


def stream_factors(x, weights, layer, options: LinearOptions, config: ModelConfig) -> jax.Array:
    """float32[T, M], the product of the normalised streams x [T, N·D] with weights float32
    [L, M, N·D]."""
    wide = unit_rms(x.astype(jnp.float32), config.rms_norm_eps, options.norm_implementation)
    if options.implementation in KERNELS:  # these take no float32
        options = dataclasses.replace(options, implementation="xla")
    return linear(wide, weights, layer, None, options)


def sum_streams(x: jax.Array, factors: jax.Array) -> jax.Array:
    """The streams x [T, N·D] times factors [T, N], added: [T, D]."""
    each = jnp.split(x.astype(jnp.float32), factors.shape[1], axis=1)
    total = each[0] * factors[:, :1]
    for n, stream in enumerate(each[1:], 1):
        total = total + stream * factors[:, n, None]
    return total.astype(x.dtype)


def scale(x: jax.Array, factor: float) -> jax.Array:
    """x times a factor that x's dtype may not represent, rounded once."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def norm(
    x: jax.Array,
    weights: jax.Array,
    biases: jax.Array | None,
    layer: jax.Array | int,
    eps: float,
    ops: Ops,
) -> jax.Array:
    """RMSNorm over the last axis, or LayerNorm if there are biases; both [L, D]."""
    if biases is None:
        return rms_norm(x, weights, layer, eps, implementation=ops.rms_norm)
    return layer_norm(x, weights, biases, layer, eps, implementation=ops.layer_norm)


class Decoder(nnx.Module):
    """The dense part of a model. Routed experts are in the store and the arena.

    - `params`: the tree that moejax.checkpoints.load returns.
    - `ops`: the implementation of each op.
    """

    def __init__(self, config: ModelConfig, params: dict[str, Any], ops: Ops):
        self.config, self.ops = config, ops
        self.embedding = nnx.Param(params["embed"])
        self.final_norm = nnx.Param(_norm_weights(config, params["final_norm"]))
        self.final_norm_bias = _param(params, "final_norm_bias")
        self.lm_head = _param(params, "lm_head")
        self.lm_head_bias = _param(params, "lm_head_bias")
        self.stream_params = nnx.List(
            [nnx.Param(params[name]) for name in STREAM_PARAMS if name in params]
        )
        """What makes one of the last layer's streams."""
        self.hidden = _param(params, "hidden")
        """[·, D], what a layer that predicts a further token reads for each row beside embeddings,
        without further norms than its own."""
        self.projection = _param(params, "eh_proj")
        read = PREDICTOR_NORMS[:2] if config.predicts else ()
        self.norms = nnx.List([nnx.Param(_norm_weights(config, params[name])) for name in read])
        runs, moe_layer = [], 0
        for run, of_run in zip(config.runs, params["runs"], strict=True):
            stack = LayerStack(
                config.of_layer(run.start),
                of_run,
                first_layer=run.start,
                first_moe_layer=moe_layer,
                ops=ops,
            )
            runs.append(stack)
            moe_layer += stack.size if stack.is_moe else 0
        self.runs = nnx.List(runs)

    def embed(self, tokens: jax.Array, places: Tokens | None = None) -> jax.Array:
        """What the first layer reads [..., D] of tokens int32[...]: their embeddings, and in a
        layer that predicts a further token the hidden states beside them.

        - `places`: the tokens' places.
        """
        x, factor = self.embedding[...][tokens], self.config.embedding_multiplier
        # A barrier between parts, so that no layer's sum is fused with this product.
        x = x if factor == 1 else lax.optimization_barrier(scale(x, factor))
        if self.config.streams is not None:
            return jnp.tile(x, self.config.streams.count)
        if self.hidden is None or self.projection is None:
            return x
        parts = x, self.hidden[...][: len(x)]
        normed = [
            norm(part, weight[...][None], None, 0, self.config.rms_norm_eps, self.ops)
            for part, weight in zip(parts, self.norms, strict=True)
        ]
        both = jnp.concatenate(normed, axis=1)
        options = linear_options(self.ops, places)
        projection = _one_layer(self.projection)
        return lax.optimization_barrier(linear(both, projection, 0, None, options))

    def logits(self, x: jax.Array, row_tile: int, tiles: jax.Array | None = None) -> jax.Array:
        """float32 logits [T, V] of hidden states [T, D] after the last layer.

        - `row_tile`, `tiles`: see linear.
        """
        with jax.named_scope("logits"):
            options = dataclasses.replace(linear_options(self.ops), row_tile=row_tile, tiles=tiles)
            if self.config.streams is not None:
                x = self._one_stream(x, options)
            weight, bias = self.final_norm[...][None], self.final_norm_bias
            bias = None if bias is None else bias[...][None]
            if self.config.mean_norms:
                bias = jnp.zeros_like(weight)
            x = norm(x, weight, bias, 0, self.config.rms_norm_eps, self.ops)
            head = self.embedding if self.lm_head is None else self.lm_head
            bias = None if self.lm_head_bias is None else self.lm_head_bias[...][None]
            logits = linear(x, _one_layer(head), 0, bias, options, out_dtype=jnp.float32)
            scaling, cap = self.config.logits_scaling, self.config.logits_cap
            logits = logits if scaling == 1 else logits / scaling
            return logits if cap is None else jnp.tanh(logits / cap) * cap

    def _one_stream(self, x, options):
        weights, base, factor = (each[...] for each in self.stream_params)
        assert self.config.streams is not None
        factors = stream_factors(x, weights[None], 0, options, self.config) * factor + base
        factors = jax.nn.sigmoid(factors) + self.config.streams.eps
        return lax.optimization_barrier(sum_streams(x, factors))


UNIT_OFFSET = frozenset({"input_norm", "post_norm", "q_norm", "k_norm"})
"""Parameters of layers that are stored less one in models with unit_offset_norms."""


def _norm_weights(config: ModelConfig, stored: jax.Array) -> jax.Array:
    return stored + 1 if config.unit_offset_norms else stored


def _one_layer(param: nnx.Param) -> Any:
    """Returns a matrix [out, in] as `linear` reads it, [1, out, in]. Codes have that axis."""
    matrix = param[...]
    return matrix if isinstance(matrix, CodedWeights) else matrix[None]


def _param(params: dict[str, Any], key: str) -> nnx.Param | None:
    return nnx.Param(params[key]) if key in params else None
