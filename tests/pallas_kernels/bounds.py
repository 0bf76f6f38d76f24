"""Accesses outside an array, which the GPU carries out and Pallas's interpreter hides.

The interpreter pads an array to what a slice reaches, so a kernel that forgets a mask passes, while
on the GPU its store lands in the next row. Here such an access leaves poison that tests see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src.state.indexing import NDIndexer
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """plgpu.load and plgpu.store of kernels traced in this context poison what they read, or what
    they write and the first element of where they write, if any unmasked element lies outside."""
    load, store = plgpu.load, plgpu.store

    def checked_load(ref, *, mask=None, other=None, **options):
        values = load(ref, mask=mask, other=other, **options)
        return jnp.where(_outside(ref, mask), _poison(values.dtype), values)

    def checked_store(ref, values, *, mask=None, **options):
        poison, outside = _poison(ref.dtype), _outside(ref, mask)
        values = jnp.where(outside, poison, jnp.broadcast_to(values, ref.shape)).astype(ref.dtype)
        store(ref, values, mask=mask, **options)
        if (indexer := _indexer(ref)) is not None:  # values may lie outside altogether
            first = ref.ref.at[tuple(pl.ds(0, 1) for _ in indexer.shape)]
            store(first, jnp.full(first.shape, poison), mask=jnp.full(first.shape, outside))

    with mock.patch.multiple(plgpu, load=checked_load, store=checked_store):
        yield


def _poison(dtype) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.full((), jnp.nan, dtype)
    return jnp.full((), True if dtype == jnp.bool_ else jnp.iinfo(dtype).max, dtype)


def _indexer(ref) -> NDIndexer | None:
    """What is read or written of the array; None: all of it."""
    transforms = getattr(ref, "transforms", ())
    if not transforms:
        return None
    (indexer,) = transforms
    return indexer if isinstance(indexer, NDIndexer) else None


def _outside(ref, mask) -> jax.Array:
    """bool: whether an element where mask is true lies outside of the array."""
    indexer = _indexer(ref)
    if indexer is None:
        return jnp.zeros((), bool)
    shape = indexer.get_indexer_shape()
    integers = len(indexer.int_indexer_shape)  # their axes come first, then one for each slice
    outside, axis = jnp.zeros(shape, bool), integers
    for index, size in zip(indexer.indices, indexer.shape, strict=True):
        if isinstance(index, pl.Slice):
            at = index.start + index.stride * jnp.arange(index.size)
            at = at.reshape(-1, *(1 for _ in shape[axis + 1 :]))
            axis += 1
        else:
            at = jnp.broadcast_to(jnp.asarray(index), indexer.int_indexer_shape)
            at = at.reshape(at.shape + (1,) * (len(shape) - integers))
        outside |= (at < 0) | (at >= size)
    return jnp.any(outside if mask is None else outside & mask)
