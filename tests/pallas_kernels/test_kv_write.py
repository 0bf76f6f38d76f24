"""kv_write against float64: rotated queries, and exactly the right rows of the right pages."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import api, pallas_triton, reference
from pallas_kernels.kv_write.specs import SPECS, Spec
from tests.pallas_kernels.contract import (
    POISON,
    SEEDS,
    close,
    compiled,
    draw,
    each,
    same_bits,
    wide,
)

STACK_LAYER, EPS, COLUMNS = 1, 1e-6, 48
"""COLUMNS: arena row width, which no KV row has, in order to tell the two views apart."""


def page_of(spec):
    return api.KVPage(spec.block_size, spec.kv_heads, spec.head_dim)


def arena_rows(spec, pages):
    """KV rows of an arena with so many pages and an odd row before each, whole arena rows."""
    rows = pages * (spec.layers * page_of(spec).rows_per_layer + 1)
    return -(-rows // COLUMNS) * COLUMNS


def case(spec, seed):
    """Inputs of the op by name. Tokens of several sequences, positions up to 5000, every fourth
    row padding; two tokens never share a place."""
    rng = np.random.default_rng(seed)
    qkv = draw(rng, (spec.tokens, (spec.heads + 2 * spec.kv_heads) * spec.head_dim), spec.dtype)
    norms = np.full((2, 3, spec.head_dim), np.nan, qkv.dtype)
    norms[:, STACK_LAYER] = 1 + draw(rng, (2, spec.head_dim), "float32", 0.2)
    positions = np.int32(rng.integers(0, 5000, spec.tokens))
    page_rows = spec.layers * page_of(spec).rows_per_layer + 1
    pages = np.int32(rng.permutation(spec.tokens + 2)[: spec.tokens] * page_rows + 1)
    if spec.tokens > 2:  # two tokens of one sequence in one page
        positions[2] = positions[0] ^ 1
        pages[2] = pages[0]
    padding = np.arange(spec.tokens) % 4 == 3
    pages[padding], positions[padding] = -1, -1
    elements = arena_rows(spec, spec.tokens + 2) * spec.head_dim * qkv.itemsize // 2
    return dict(
        qkv=qkv,
        q_norm=norms[0] if spec.norms else None,
        k_norm=norms[1] if spec.norms else None,
        stack_layer=np.int32(STACK_LAYER),
        positions=positions,
        inverse_frequencies=(10000.0 ** -np.linspace(0, 1, spec.head_dim // 2)).astype(np.float32),
        arena=np.full((elements // COLUMNS, COLUMNS), POISON, np.uint16),
        pages=pages,
        layer=np.int32(spec.layers - 1),
    )


def run(spec, implementation, inputs):
    op = compiled(
        api.kv_write,
        page=page_of(spec),
        attention_factor=spec.attention_factor,
        eps=EPS,
        implementation=implementation,
    )
    return op(**inputs)


def normed_and_rotated(x, weight, positions, frequencies, factor):
    """x [T, H, hd] -> float64, as apply_rotary_pos_emb; angles are float32 products. weight: of the
    norm, None for none."""
    x = wide(x)
    if weight is not None:
        x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * wide(weight[STACK_LAYER])
    angle = wide(positions.astype(np.float32)[:, None] * frequencies)
    angle = np.concatenate([angle, angle], axis=1)[:, None]
    half = x.shape[-1] // 2
    turned = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return (x * np.cos(angle) + turned * np.sin(angle)) * factor


def check(spec, implementation):
    for seed in SEEDS:
        inputs = case(spec, seed)
        got_q, got_arena = run(spec, implementation, inputs)
        assert got_q.dtype == spec.dtype
        heads, page = spec.heads, page_of(spec)
        qkv = inputs["qkv"].reshape(spec.tokens, -1, spec.head_dim)
        q, k, v = np.split(qkv, [heads, heads + spec.kv_heads], axis=1)
        rotate = functools.partial(
            normed_and_rotated,
            positions=inputs["positions"],
            frequencies=inputs["inverse_frequencies"],
            factor=spec.attention_factor,
        )
        real = inputs["pages"] >= 0
        want_q = rotate(q, inputs["q_norm"])
        want_k = rotate(k, inputs["k_norm"])
        close("kv_write", spec.dtype, got_q[real], want_q[real])

        row_elements = spec.head_dim * qkv.itemsize // 2
        got = np.asarray(got_arena).reshape(-1, row_elements).copy()
        for t in np.flatnonzero(real):
            at = inputs["pages"][t] + inputs["layer"] * page.rows_per_layer
            at += inputs["positions"][t] % page.block_size * 2 * spec.kv_heads
            stored = got[at : at + 2 * spec.kv_heads].view(qkv.dtype)
            close("kv_write", spec.dtype, stored[: spec.kv_heads], want_k[t])
            same_bits(stored[spec.kv_heads :], v[t])
            got[at : at + 2 * spec.kv_heads] = POISON
        np.testing.assert_array_equal(got, POISON)


@each(api.IMPLEMENTATIONS, SPECS)
def test_contract(spec, implementation):
    check(spec, implementation)


@each(api.IMPLEMENTATIONS, dtypes=("float32", "bfloat16"))
def test_bits_are_independent_of_page_and_neighbours(implementation, dtype):
    """q and the stored k of one token, whatever the other rows, block size, page and layer."""

    def token(spec, inputs, t):
        q, arena = run(spec, implementation, inputs)
        page = page_of(spec)
        view = np.asarray(arena).reshape(-1, spec.head_dim * q.dtype.itemsize // 2)
        at = inputs["pages"][t] + inputs["layer"] * page.rows_per_layer
        at += inputs["positions"][t] % page.block_size * page.rows_per_token
        return q[t], view[at : at + page.rows_per_token]

    spec = Spec(16, dtype)
    inputs = case(spec, 0)
    for t in (0, 8, 14):
        want_q, want_kv = token(spec, inputs, t)
        other = Spec(16, dtype, block_size=64, layers=2)
        moved = case(other, 5)
        for name in ("q_norm", "k_norm"):
            moved[name] = inputs[name]
        for name in ("qkv", "positions"):
            moved[name][t] = inputs[name][t]
        if t == 0:
            moved["pages"][2] = -1
        q, kv = token(other, moved, t)
        same_bits(q, want_q)
        np.testing.assert_array_equal(kv, want_kv)


@each(api.IMPLEMENTATIONS)
def test_updates_a_donated_arena_in_place(implementation):
    spec = Spec(3, "bfloat16")
    inputs = case(spec, 0)
    inputs["arena"] = jnp.array(inputs["arena"])
    address = inputs["arena"].unsafe_buffer_pointer()
    op = compiled(
        api.kv_write,
        donate=("arena",),
        page=page_of(spec),
        attention_factor=1.0,
        eps=EPS,
        implementation=implementation,
    )
    assert op(**inputs)[1].unsafe_buffer_pointer() == address


def mutant(change):
    """reference.kv_write with some arguments changed by name."""

    def kv_write(
        qkv, q_norm, k_norm, stack_layer, positions, freqs, arena, pages, layer, **options
    ):
        names = dict(stack_layer=stack_layer, positions=positions, pages=pages, layer=layer)
        changed = dict(qkv=qkv, q_norm=q_norm, k_norm=k_norm, arena=arena, **names)
        changed = {**changed, "inverse_frequencies": freqs, **options}
        return reference.kv_write(**{**changed, **change(changed)})

    return kv_write


MUTANTS = {
    "row off by one": lambda a: {"pages": jnp.where(a["pages"] < 0, -1, a["pages"] + 1)},
    "layer 0": lambda a: {"layer": 0},
    "padding written": lambda a: {"pages": jnp.maximum(a["pages"], 0)},
    "position off by one": lambda a: {"positions": a["positions"] + 1},
    "unscaled rotation": lambda a: {"attention_factor": 1.0},
    "k and v swapped": lambda a: {
        "qkv": jnp.concatenate([a["qkv"][:, :64], a["qkv"][:, 96:], a["qkv"][:, 64:96]], axis=1)
    },
}


@pytest.mark.nightly
def test_contract_catches_a_norm_that_is_not_there(monkeypatch):
    ones = mutant(lambda a: dict.fromkeys(("q_norm", "k_norm"), jnp.ones((3, 16))))
    monkeypatch.setitem(api.IMPLEMENTATIONS, "norm of ones", ones)
    with pytest.raises(AssertionError):
        check(Spec(17, "float32", norms=False), "norm of ones")


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_contract_catches(name, monkeypatch):
    monkeypatch.setitem(api.IMPLEMENTATIONS, name, mutant(MUTANTS[name]))
    with pytest.raises(AssertionError):
        check(Spec(17, "float32", attention_factor=1.25), name)


@pytest.mark.nightly
def test_contract_catches_a_tile_of_q_and_k_heads(monkeypatch):
    config = pallas_triton.Config(heads=4, num_warps=1, num_stages=1)
    monkeypatch.setattr(pallas_triton, "configuration", lambda *_: config)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "wide tile", pallas_triton.kv_write)
    with pytest.raises(AssertionError):
        check(Spec(17, "bfloat16", heads=2, kv_heads=1), "wide tile")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "tile", "warps"),
    [(32, 4, 128, 4, 1), (32, 8, 128, 8, 2), (16, 16, 128, 8, 2), (6, 3, 40, 1, 1)],
)
def test_configuration(heads, kv_heads, head_dim, tile, warps):
    config = pallas_triton.configuration(heads, kv_heads, head_dim, "bfloat16")
    assert config == pallas_triton.Config(tile, warps, num_stages=1)


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"qkv": (3, 64)}, {}, "qkv has 64 columns for 2 KV heads"),
        ({"qkv": (3, 130)}, {}, "qkv has 130 columns for 2 KV heads"),
        ({"inverse_frequencies": (9,)}, {}, "9 frequencies for head_dim 16"),
        ({"k_norm": None}, {}, "q_norm and k_norm are both given or both None"),
        ({}, {"page": api.KVPage(16, 1, 16, 8)}, "latent_write writes latent pages"),
        ({}, {"implementation": "cuda"}, "op 'kv_write' has no implementation 'cuda'"),
        ({}, {"implementation": "pallas"}, "'pallas' takes 16-bit dtypes, not float32; 'xla'"),
    ],
)
def test_refuses(changed, options, message):
    spec = Spec(3, "float32")
    inputs = case(spec, 0) | {name: shape and jnp.zeros(shape) for name, shape in changed.items()}
    fixed = dict(page=page_of(spec), attention_factor=1.0, eps=EPS)
    with pytest.raises(ValueError, match=message):
        api.kv_write(**inputs, **(fixed | options))
