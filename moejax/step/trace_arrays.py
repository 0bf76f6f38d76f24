"""The optional arrays of a step: what the routers saw and scored, for traces and policies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.errors import UserError
from moejax.models.layers import LayerStack, Tokens


class TraceArrays(NamedTuple):
    """What a step gives out when asked; None: not asked for. All float16: beyond ±65504 infinite.
    The names are those of an Observation's fields."""

    probs: Any = None
    """[L, T, E]: the router's scores of all experts, from which it chooses."""
    gate_input: Any = None
    """[L, T, D]: what the router saw, the normalised hidden state."""
    embedding: Any = None
    """[T, D]: of the tokens fed in."""


TRACE_ARRAYS = frozenset(TraceArrays._fields)


def parse_trace_arrays(names: str | Iterable[str]) -> frozenset[str]:
    """The arrays named, "probs,gate_input" or one by one. Raises UserError for another name."""
    given = [n.strip() for n in names.split(",")] if isinstance(names, str) else [*names]
    for name in given:
        if name not in TRACE_ARRAYS:
            known = ", ".join(TraceArrays._fields)
            raise UserError(f"trace_arrays has no array {name!r}; it has {known}")
    return frozenset(given)


def layer_arrays(
    stack: LayerStack, i: jax.Array, normed: jax.Array, tokens: Tokens, wanted: frozenset[str]
) -> TraceArrays:
    """What is wanted of a layer's routing. normed [T, D]: what it gave to the experts.

    The scores are computed once more, behind the border to the experts: the routing itself is
    compiled as it is without, and so has the same bits.
    """
    probs = gate_input = None
    with jax.named_scope("observe"):
        if "probs" in wanted:
            probs = stack.router_scores(i, normed, tokens).astype(jnp.float16)
        if "gate_input" in wanted:
            gate_input = normed.astype(jnp.float16)
    return TraceArrays(probs, gate_input)


def embedding_array(x: jax.Array, wanted: frozenset[str]) -> jax.Array | None:
    """The embedded tokens x [T, D], if they are wanted."""
    return x.astype(jnp.float16) if "embedding" in wanted else None
