from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.implementations import implementations, pick
from pallas_kernels.state_pages import Sequences, Shapes, StatePage, check_state


class DeltaShape(NamedTuple):
    """The heads of a gated delta net. Each key head serves value_heads / key_heads value heads in a
    row."""

    key_heads: int
    value_heads: int
    key_dim: int
    """Values of a head of q and of k."""
    value_dim: int
    taps: int
    """Tokens that the convolution sees, the new one included."""
    each: bool = False
    """Whether every value of a head's key has a decay of its own, as in Kimi delta attention;
    otherwise a head has one."""

    @property
    def decays(self) -> int:
        """Decays of a token."""
        return self.value_heads * self.key_dim if self.each else self.value_heads

    @property
    def columns(self) -> int:
        """Columns of q, k and v together, which the convolution mixes."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state(self, dtype: str) -> Shapes:
        """A layer's state: the delta rule's matrices, then the convolution's last inputs.

        - `dtype`: of the inputs.
        """
        matrices = self.value_heads, self.key_dim, self.value_dim
        return (matrices, "float32"), ((self.taps - 1, self.columns), dtype)


class DeltaHeads(NamedTuple):
    """What the projections made of a layer's tokens."""

    qkv: Float[Array, "T columns"]
    """Heads of q, then of k, then of v, then columns that are not read; by_key_head: of each key
    head q, k, its heads of v and columns that are not read, as many as those of v."""
    beta: Float[Array, "T V"]
    """Before the sigmoid."""
    decay: Float[Array, "T decays"]
    """Before dt_bias and the softplus."""


class DeltaWeights(NamedTuple):
    """Weights, stacked over the run's layers."""

    conv: Float[Array, "L W taps"]
    a_log: Float[Array, "L V"]
    dt_bias: Float[Array, "L decays"]
    stack_layer: Int[Array, ""] | int
    """The layer's index in them."""


@dataclasses.dataclass(frozen=True)
class DeltaOptions:
    """What decides the program, beside shapes."""

    shape: DeltaShape
    page: StatePage
    implementation: str = "xla"
    by_key_head: bool = False
    """The order of columns in qkv."""

    @property
    def least_columns(self) -> int:
        """Columns that qkv has at least."""
        values = self.shape.value_heads * self.shape.value_dim
        return self.shape.columns + values * self.by_key_head


IMPLEMENTATIONS = implementations("gated_delta", ("xla", "pallas", "cpu"))


def gated_delta(
    heads: DeltaHeads,
    weights: DeltaWeights,
    arena: UInt16[Array, "rows D"],
    sequences: Sequences,
    layer: Int[Array, ""] | int,
    options: DeltaOptions,
) -> tuple[Float[Array, "T values"], UInt16[Array, "rows D"]]:
    """Advances the state S [V, dk, dv] of each sequence by its tokens, and reads it:

        q, k, v = silu(conv(qkv)),  q = q / |q| / √dk,  k = k / |k|
        S = exp(−exp(a_log) · softplus(decay + dt_bias)) · S, of each head or of each row
        S = S + k ⊗ (sigmoid(beta) · (v − kᵀ S)),  out = qᵀ S

    in float32 and in this order for each token, so bits depend on the sequence's tokens alone.
    'pallas' advances runs of several tokens by state_kernels.TOKENS at once: there they depend on
    the tokens, and on where such a run begins or ends within TOKENS. The convolution is rounded to
    the inputs' dtype before and after silu, as in transformers.

    - `layer`: counted over layers with state.

    Returns (out, rounded to the inputs' dtype, rows without a new token undefined; arena, updated
    in place when donated). Raises ValueError for shapes that do not fit or an unknown
    implementation.
    """
    shape, page, tokens = options.shape, options.page, heads.qkv.shape[0]
    fits = heads.qkv.shape[1] >= options.least_columns
    if not fits or weights.conv.shape[1:] != (shape.columns, shape.taps):
        raise ValueError(f"qkv {heads.qkv.shape}, conv {weights.conv.shape} for {shape}")
    gates = (tokens, shape.value_heads), (tokens, shape.decays)
    if heads.beta.shape != gates[0] or heads.decay.shape != gates[1]:
        raise ValueError(f"beta {heads.beta.shape}, decay {heads.decay.shape}; they are {gates}")
    if shape.value_heads % shape.key_heads:
        raise ValueError(f"{shape.value_heads} value heads for {shape.key_heads} key heads")
    check_state(shape.state(str(heads.qkv.dtype)), page, tokens, sequences)
    fn = pick("gated_delta", IMPLEMENTATIONS, options.implementation)
    return fn(heads, weights, arena, sequences, layer, options)
