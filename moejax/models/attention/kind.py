"""The interface of a kind of attention: its page, and the ops that write and read it."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels import Ops
from pallas_kernels.kv_write import KVPage
from pallas_kernels.paged_attention import AttentionOptions, PerLayer
from pallas_kernels.state_pages import Sequences, Shapes


class Rows(NamedTuple):
    """The tokens of a step as N runs of C rows, each of one sequence, of which rows [skip, length)
    are new tokens."""

    table: jax.Array
    """int32[N, B], or [G, N, B] of several groups of pages: KV rows of each run's pages."""
    start: jax.Array
    """int32[N]: position of row 0."""
    skip: jax.Array
    length: jax.Array
    count: jax.Array
    """Runs in use."""


class Tokens(NamedTuple):
    """The tokens of a step: T rows, of which the first `tiles` · row_tile are in use."""

    positions: jax.Array
    """int32[T]: positions within their sequences."""
    valid: jax.Array
    """bool[T]: rows that hold a token."""
    pages: jax.Array
    """int32[T]: KV row of the page that each token is written to; −1: it is not written. Of a model
    with several groups of pages int32[G, T], until of_group chooses one."""
    tiles: jax.Array
    """int32: row tiles in use."""
    row_tile: int
    """Rows of one matrix product."""
    attention: Callable[..., jax.Array]
    """Attention of decode or prefill: (q [T, H, hd], arena, layer=, options=, per_layer=) ->
    [T, H·hd]; of latent pages (q [T, H, latent], arena, q_rope=[T, H, hd − latent], ...) ->
    [T, H·latent]."""
    write_and_attend: Callable[..., tuple[jax.Array, jax.Array, jax.Array | None]] | None = None
    """Decode's kv_write and attention as one op; None: they are two ops."""
    block_tables: jax.Array | None = None
    """int32[G, R, B]: the block table of each group of pages; None: there is one group, whose table
    the ops have."""
    sequences: Sequences | None = None
    """The tokens by sequence, for layers with state; None: the model has none."""
    in_chunks: Callable[[jax.Array, int], Callable[..., jax.Array]] | None = None
    """(a group's block table, tokens of a chunk) -> attention to each query's own chunk."""

    ids: jax.Array | None = None
    """int32[T]: token ids."""
    rows: Rows | None = None
    """Where the tokens are, for attention that reads pages itself."""

    def of_group(self, group: jax.Array | int, factor: int = 1, chunk: int | None = None) -> Tokens:
        """The tokens with the block table and the pages of one group.

        - `factor`: KV rows of the group's layers in one row by which pages are addressed.
        - `chunk`: tokens of the chunks that queries see alone; None: they see all.
        """
        if self.block_tables is None:
            return self
        table, pages = self.block_tables[group], self.pages[group]
        if factor != 1:
            table, pages = table * factor, jnp.where(pages < 0, pages, pages * factor)
        attention, both = self.attention, self.write_and_attend
        if chunk is not None:
            assert self.in_chunks is not None
            attention, both = self.in_chunks(table, chunk), None
        else:
            attention = functools.partial(attention, block_table=table)
            both = both and functools.partial(both, block_table=table)
        return self._replace(
            pages=pages, attention=attention, write_and_attend=both, block_tables=None
        )


OPS = (
    *("kv_write", "latent_write", "head_linear"),
    *("gated_delta", "short_conv", "selective_scan"),
)
"""Ops that only some kinds use."""


class AttentionNumbers(Protocol):
    """The fields of `ModelConfig` that a kind of attention reads."""

    @property
    def num_attention_heads(self) -> int: ...

    @property
    def num_key_value_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def rotary_width(self) -> int | None: ...

    @property
    def rope_interleave(self) -> bool: ...

    @property
    def clip_qkv(self) -> float | None: ...

    @property
    def attention_scale(self) -> float | None: ...

    @property
    def rms_norm_eps(self) -> float: ...


class AttentionLayer(Protocol):
    """The run of layers that calls a kind: `LayerStack`, which has the weights."""

    config: Any
    """AttentionNumbers."""
    ops: Ops
    weights: Any
    attention_factor: float

    def frequencies(self, i) -> jax.Array: ...
    def page_layer(self, i) -> jax.Array: ...
    def near_layer(self, i) -> tuple[jax.Array | int, jax.Array, int]: ...
    def far_layer(self, i) -> tuple[jax.Array, jax.Array, int]: ...
    def weight(self, name: str) -> jax.Array: ...
    def optional_weight(self, name: str) -> jax.Array | None: ...
    def per_layer(self, i: jax.Array) -> PerLayer: ...
    def linear(self, x, name: str, i, tokens: Tokens, out_dtype=None) -> jax.Array: ...
    def norm(self, x, name: str, i, eps: float | None = None) -> jax.Array: ...
    def norm_linear(
        self, x, norm_name: str, name: str, i, tokens: Tokens, squares=None
    ) -> jax.Array: ...


class AttentionKind(Protocol):
    """A kind of attention: a frozen dataclass with the numbers that only this kind has."""

    @property
    def ops(self) -> tuple[str, ...]:
        """Ops that only this kind uses; the one that writes pages comes first."""
        ...

    @property
    def products(self) -> tuple[str, ...]:
        """The matrix products among `ops`."""
        ...

    @property
    def takes_squares(self) -> bool:
        """Whether the first product normalises x itself and can read its tile_squares."""
        ...

    xla_only: ClassVar[Mapping[str, str]]
    """Op that only XLA computes here → what of it."""

    def for_length(self, max_model_len: int) -> AttentionKind:
        """The kind that computes the same for sequences of at most so many tokens."""
        ...

    def page(self, config: AttentionNumbers, block_size: int) -> KVPage:
        """The layout of a page of `block_size` tokens."""
        ...

    def far_page(self, block_size: int) -> KVPage | None:
        """The layout of further pages, for what a layer keeps of all tokens beside the keys and
        values of its window; None: there are none."""
        ...

    def kernel_shape(self) -> dict[str, Any]:
        """Fields of verification.ModelShape that only this kind has."""
        ...

    def rotary_dim(self, config: AttentionNumbers) -> int:
        """Values of a head that are rotated."""
        ...

    def attend(
        self,
        stack: AttentionLayer,
        i: jax.Array,
        x: jax.Array,
        arena: jax.Array,
        tokens: Tokens,
        page: KVPage,
        squares: jax.Array | None,
        counters: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Attention of layer i of the stack over x [T, D]. Returns (output of the heads, before the
        output projection; arena with the tokens' rows written; counters)."""
        ...


class StateKind(abc.ABC):
    """A kind of layer that keeps a state for each sequence in place of keys and values: an
    AttentionKind without a page of its own, and a frozen dataclass. `ops` are those that advance
    states."""

    products = ()
    takes_squares = True
    xla_only: ClassVar[Mapping[str, str]] = {}

    def for_length(self, max_model_len: int) -> StateKind:
        return self

    @abc.abstractmethod
    def state(self, dtype: str) -> tuple[Shapes, ...]:
        """The arrays of a layer's state, for inputs of this dtype, by the op that advances them."""

    def page(self, config: AttentionNumbers, block_size: int) -> KVPage:
        raise ValueError("a layer with state has no keys and values")

    def far_page(self, block_size: int) -> None:
        return None

    @abc.abstractmethod
    def kernel_shape(self) -> dict[str, Any]:
        """`states` of verification.ModelShape."""

    def rotary_dim(self, config: AttentionNumbers) -> int:
        return config.rotary_width or config.head_dim


def attention_options(stack: AttentionLayer, page: KVPage) -> AttentionOptions:
    """Options by which the stack's layers read a page."""
    scale, ops = stack.config.attention_scale, stack.ops
    return AttentionOptions(page, scale, ops.paged_attention, ops.shared_kib)
