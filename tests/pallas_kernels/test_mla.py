"""Multi-head latent attention made of the ops: absorbed, over latent pages, in chunks and by token.

Against the equations with keys and values written out (DeepSeek-V2, section 2.1), in float64, and
against transformers' modules.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.head_linear import head_linear
from pallas_kernels.kv_write import KVPage
from pallas_kernels.latent_write import latent_write
from pallas_kernels.paged_attention import decode_attention, prefill_attention
from tests.pallas_kernels.contract import POISON, compiled

HIDDEN, HEADS, NOPE, ROPE, LATENT, VALUE = 64, 4, 12, 8, 16, 10
CHUNK, PROMPT, TOKENS, EPS = 32, 70, 74, 1e-6
PAGE = KVPage(16, 1, LATENT + ROPE, LATENT)
LAYERS, LAYER, COLUMNS = 3, 2, 48


@dataclasses.dataclass(frozen=True)
class Projected:
    """What the dense products before attention give, float32, and the weights of those after."""

    q: np.ndarray
    """[S, H, nope + rope]."""
    kv: np.ndarray
    """[S, latent + rope], not normalised."""
    kv_norm: np.ndarray
    kv_b: np.ndarray
    """[H, nope + value, latent]: the up-projections of keys and of values."""
    inverse_frequencies: np.ndarray
    attention_factor: float
    scale: float
    interleave: bool


def paged(p: Projected) -> np.ndarray:
    """[S, H, value] by the ops: the prompt in chunks, the last of them not full, then tokens."""
    options = dict(page=PAGE, attention_factor=p.attention_factor, eps=EPS, interleave=p.interleave)
    write = compiled(latent_write, donate=("arena",), **options)
    up_keys = compiled(head_linear, row_tile=2, part=(0, NOPE), transposed=True)
    up_values = compiled(head_linear, row_tile=2, part=(NOPE, NOPE + VALUE))
    prefill = compiled(prefill_attention, page=PAGE, scale=p.scale)
    decode = compiled(decode_attention, page=PAGE, scale=p.scale)

    def stacked(weights):  # of the run's layers, the first poison
        return np.stack([np.full_like(weights, np.nan), weights])

    norm = stacked(p.kv_norm)
    kv_b = stacked(p.kv_b)
    blocks = -(-TOKENS // PAGE.block_size)
    table = np.random.default_rng(1).permutation(blocks).astype(np.int32)
    table = table[None] * (LAYERS * PAGE.rows_per_layer)
    elements = blocks * LAYERS * PAGE.rows_per_layer * PAGE.head_dim * 2
    arena = jnp.full((elements // COLUMNS, COLUMNS), POISON, jnp.uint16)
    one, layer = np.int32(1), np.int32(LAYER)
    out = []
    steps = [(first, min(first + CHUNK, PROMPT)) for first in range(0, PROMPT, CHUNK)]
    for first, end in [*steps, *((t, t + 1) for t in range(PROMPT, TOKENS))]:
        rows = CHUNK if first < PROMPT else 2  # a decode step with an empty row
        real = np.arange(rows) < end - first
        take = np.minimum(first + np.arange(rows), end - 1)
        positions = np.where(real, take, -1).astype(np.int32)
        pages = np.where(real, table[0, take // PAGE.block_size], -1).astype(np.int32)
        q_rope, arena = write(
            kv=p.kv[take],
            kv_norm=norm,
            stack_layer=one,
            q_rope=p.q[take][..., NOPE:],
            positions=positions,
            inverse_frequencies=p.inverse_frequencies,
            arena=arena,
            pages=pages,
            layer=layer,
        )
        q = up_keys(p.q[take][..., :NOPE], kv_b, one)
        if first < PROMPT:
            numbers = (np.int32([n]) for n in (0, first, end - first))
            attended = prefill(q, arena, table, *numbers, one, layer, q_rope=q_rope)
        else:
            attended = decode(
                q, arena, np.repeat(table, rows, 0), positions + 1, layer, q_rope=q_rope
            )
        attended = attended.reshape(rows, HEADS, LATENT)
        out.append(np.asarray(up_values(attended, kv_b, one))[: end - first])
    return np.concatenate(out)


def drawn(seed: int = 0, **changed) -> Projected:
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    fields = dict(
        q=normal(TOKENS, HEADS, NOPE + ROPE),
        kv=normal(TOKENS, LATENT + ROPE),
        kv_norm=1 + normal(LATENT, scale=0.2),
        kv_b=normal(HEADS, NOPE + VALUE, LATENT, scale=LATENT**-0.5),
        inverse_frequencies=(1e4 ** -(np.arange(ROPE // 2) / 4)).astype(np.float32),
        attention_factor=1.1,
        scale=0.3,
        interleave=True,
    )
    return Projected(**(fields | changed))


def expanded(p: Projected) -> np.ndarray:
    """[S, H, value] in float64 with the keys and values of every head, equations 41 to 46."""

    def rotated(x):  # [S, n, rope], pairs as complex numbers
        x = x.astype(np.float64)
        first, second = (x[..., ::2], x[..., 1::2]) if p.interleave else np.split(x, 2, axis=-1)
        x = first + 1j * second
        angle = np.arange(TOKENS, dtype=np.float32)[:, None] * p.inverse_frequencies
        x = x * np.exp(1j * angle.astype(np.float64))[:, None] * p.attention_factor
        return np.concatenate([x.real, x.imag], axis=-1)

    c = p.kv[:, :LATENT].astype(np.float64)
    c = c / np.sqrt(np.mean(c**2, axis=-1, keepdims=True) + EPS) * p.kv_norm
    up = np.einsum("sr,hnr->shn", c, p.kv_b.astype(np.float64))
    key = np.repeat(rotated(p.kv[:, None, LATENT:]), HEADS, axis=1)
    keys, values = np.concatenate([up[..., :NOPE], key], axis=-1), up[..., NOPE:]
    queries = np.concatenate([p.q[..., :NOPE], rotated(p.q[..., NOPE:])], axis=-1)
    scores = np.einsum("shk,thk->hst", queries, keys) * p.scale
    scores = np.where(np.tri(TOKENS, dtype=bool), scores, -np.inf)
    mass = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hst,thv->shv", mass / mass.sum(axis=-1, keepdims=True), values)


@pytest.mark.parametrize("interleave", [True, False])
def test_absorbed_is_the_same_as_expanded(interleave):
    p = drawn(interleave=interleave)
    np.testing.assert_allclose(paged(p), expanded(p), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changed", [{"interleave": False}, {"scale": 0.29}, {"attention_factor": 1.0}]
)
def test_the_comparison_catches(changed):
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(paged(drawn(**changed)), expanded(drawn()), atol=1e-3)


YARN = dict(
    rope_type="yarn",
    rope_theta=1e4,
    factor=4.0,
    original_max_position_embeddings=32,
    mscale=0.7,
    mscale_all_dim=1.0,
)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("version", "config"),
    [
        ("V3", {"rope_interleave": True, "q_lora_rank": 24, "rope_parameters": YARN}),
        ("V3", {"rope_interleave": False, "q_lora_rank": None, "attention_bias": True}),
        ("V2", {"q_lora_rank": None}),
        ("V2", {"q_lora_rank": 24, "rope_parameters": YARN}),
    ],
    ids=["V3-yarn", "V3-halves", "V2", "V2-yarn"],
)
def test_transformers(version, config):
    """The whole attention block of float32, its dense products by torch."""
    import torch
    import transformers.models.deepseek_v2.modeling_deepseek_v2 as v2
    import transformers.models.deepseek_v3.modeling_deepseek_v3 as v3

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = {"V2": v2, "V3": v3}[version]
    config = getattr(module, f"Deepseek{version}Config")(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        kv_lora_rank=LATENT,
        v_head_dim=VALUE,
        max_position_embeddings=128,
        **config,
    )
    config._attn_implementation = "eager"
    block = getattr(module, f"Deepseek{version}Attention")(config, 0).eval()
    rotary = getattr(module, f"Deepseek{version}RotaryEmbedding")(config)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            size = parameter.shape[-1] if parameter.ndim == 2 else 25
            torch.nn.init.normal_(parameter, std=size**-0.5)
            parameter += "layernorm" in name
        x = torch.randn(1, TOKENS, HIDDEN)
        position = rotary(x, torch.arange(TOKENS)[None])
        mask = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)[None, None]
        want = block(x, position_embeddings=position, attention_mask=mask)[0][0].numpy()

        if config.q_lora_rank is None:
            q = block.q_proj(x)
        else:
            q = block.q_b_proj(block.q_a_layernorm(block.q_a_proj(x)))
        p = Projected(
            q=q[0].view(TOKENS, HEADS, -1).numpy(),
            kv=block.kv_a_proj_with_mqa(x)[0].numpy(),
            kv_norm=block.kv_a_layernorm.weight.numpy(),
            kv_b=block.kv_b_proj.weight.view(HEADS, NOPE + VALUE, LATENT).numpy(),
            inverse_frequencies=rotary.inv_freq.numpy(),
            attention_factor=rotary.attention_scaling,
            scale=block.scaling,
            interleave=getattr(config, "rope_interleave", True),  # V2's complex numbers are pairs
        )
        attended = torch.from_numpy(paged(p).reshape(TOKENS, -1))
        got = block.o_proj(attended).numpy()
    assert np.std(want) > 0.1
    np.testing.assert_allclose(got, want, atol=2e-5, rtol=2e-5)
