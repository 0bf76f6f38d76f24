"""Attention with sinks has the numbers of transformers' gpt-oss."""

import types

import numpy as np
import pytest

from pallas_kernels.kv_write import KVPage
from pallas_kernels.paged_attention import (
    AttentionOptions,
    Chunks,
    PerLayer,
    decode_attention,
    prefill_attention,
)
from tests.pallas_kernels.contract import NATIVE, compiled
from tests.pallas_kernels.paged_kv import lay_out

LENGTH, HEADS, PAGE = 70, 8, KVPage(16, 2, 32)


@pytest.mark.torch
@pytest.mark.parametrize("implementation", ["xla", pytest.param("cpu", marks=NATIVE)])
@pytest.mark.parametrize("window", [None, 20])
def test_attention_with_sinks(implementation, window):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(LENGTH, n, 32)).astype(np.float32) for n in (HEADS, 2, 2))
    sinks = rng.normal(0, 2, HEADS).astype(np.float32)
    want = expected(q, k, v, sinks, window)
    kv = lay_out(rng, [k], [v], PAGE, layers=1, layer=0, max_length=LENGTH)
    windows = None if window is None else np.int32([window])
    given = {"layer": 0, "per_layer": PerLayer(0, sinks[None], windows)}
    options = AttentionOptions(PAGE, None, implementation)
    chunks = Chunks(*(np.int32([n]) for n in (0, 0, LENGTH)), np.int32(1))
    prefill, decode = (
        compiled(op, options=options) for op in (prefill_attention, decode_attention)
    )
    got = prefill(q, kv.arena, kv.block_table, chunks, **given)
    np.testing.assert_allclose(got, want, atol=2e-6)
    got = decode(q[-1:], kv.arena, kv.block_table, np.int32([LENGTH]), **given)
    np.testing.assert_allclose(got, want[-1:], atol=2e-6)


def expected(q, k, v, sinks, window):
    import torch
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    module = types.SimpleNamespace(
        sinks=torch.tensor(sinks), num_key_value_groups=HEADS // 2, training=False
    )
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    seen = (distance >= 0) & (distance < (window or LENGTH))
    mask = torch.tensor(np.where(seen, 0, -np.inf), dtype=torch.float32)[None, None]
    by_head = (torch.tensor(x).transpose(0, 1)[None] for x in (q, k, v))
    return eager_attention_forward(module, *by_head, mask, 32**-0.5)[0].reshape(LENGTH, -1)
