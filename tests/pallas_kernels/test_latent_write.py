"""latent_write against float64: rotated queries, and exactly the right row of the right page."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import KVPage
from pallas_kernels.latent_write import api, pallas_triton, reference
from pallas_kernels.latent_write.specs import SPECS, Spec
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

STACK_LAYER, EPS, COLUMNS = 1, 1e-6, 50
"""COLUMNS: arena row width, which no KV row has, in order to tell the two views apart."""


def case(spec, seed):
    """Inputs of the op by name. Tokens of several sequences, positions up to 5000, every fourth
    row padding; two tokens never share a place."""
    rng = np.random.default_rng(seed)
    page = spec.page
    kv = draw(rng, (spec.tokens, page.head_dim), spec.dtype)
    norm = np.full((3, spec.latent), np.nan, kv.dtype)
    norm[STACK_LAYER] = 1 + draw(rng, spec.latent, "float32", 0.2)
    positions = np.int32(rng.integers(0, 5000, spec.tokens))
    page_rows = spec.layers * page.rows_per_layer + 1
    pages = np.int32(rng.permutation(spec.tokens + 2)[: spec.tokens] * page_rows + 1)
    if spec.tokens > 2:  # two tokens of one sequence in one page
        positions[2] = positions[0] ^ 1
        pages[2] = pages[0]
    padding = np.arange(spec.tokens) % 4 == 3
    pages[padding], positions[padding] = -1, -1
    rows = -(-(spec.tokens + 2) * page_rows // COLUMNS) * COLUMNS
    elements = rows * page.head_dim * kv.itemsize // 2
    return dict(
        kv=kv,
        kv_norm=norm,
        stack_layer=np.int32(STACK_LAYER),
        q_rope=draw(rng, (spec.tokens, spec.heads, spec.rope), spec.dtype),
        positions=positions,
        inverse_frequencies=(10000.0 ** -np.linspace(0, 1, spec.rope // 2)).astype(np.float32),
        arena=np.full((elements // COLUMNS, COLUMNS), POISON, np.uint16),
        pages=pages,
        layer=np.int32(spec.layers - 1),
    )


def run(spec, implementation, inputs, donate=()):
    op = compiled(
        api.latent_write,
        donate=donate,
        page=spec.page,
        attention_factor=spec.attention_factor,
        eps=EPS,
        interleave=spec.interleave,
        implementation=implementation,
    )
    return op(**inputs)


def rotated(spec, inputs, x):
    """x [T, H, P] -> float64: pairs (2i, 2i + 1) or (i, P/2 + i) turned as complex numbers, the
    real parts first; angles are float32 products."""
    x = wide(x)
    half = spec.rope // 2
    if spec.interleave:
        pairs = x[..., ::2] + 1j * x[..., 1::2]
    else:
        pairs = x[..., :half] + 1j * x[..., half:]
    angle = wide(inputs["positions"].astype(np.float32)[:, None] * inputs["inverse_frequencies"])
    turned = pairs * np.exp(1j * angle)[:, None] * spec.attention_factor
    return np.concatenate([turned.real, turned.imag], axis=-1)


def rows_of(page, inputs, t):
    """The KV row of token t."""
    at = inputs["pages"][t] + inputs["layer"] * page.rows_per_layer
    return at + inputs["positions"][t] % page.block_size


def check(spec, implementation):
    for seed in SEEDS:
        inputs, page = case(spec, seed), spec.page
        got_q, got_arena = run(spec, implementation, inputs)
        assert got_q.dtype == spec.dtype
        real = inputs["pages"] >= 0
        want_q = rotated(spec, inputs, inputs["q_rope"])
        close("latent_write", spec.dtype, got_q[real], want_q[real])

        kv = inputs["kv"]
        c = wide(kv[:, : spec.latent])
        c = c / np.sqrt(np.mean(c**2, axis=-1, keepdims=True) + EPS)
        c = c * wide(inputs["kv_norm"][STACK_LAYER])
        key = rotated(spec, inputs, kv[:, None, spec.latent :])[:, 0]
        want = np.concatenate([c, key], axis=-1)
        got = np.asarray(got_arena).reshape(-1, page.head_dim * kv.itemsize // 2).copy()
        for t in np.flatnonzero(real):
            at = rows_of(page, inputs, t)
            close("latent_write", spec.dtype, got[at].view(kv.dtype), want[t])
            got[at] = POISON
        np.testing.assert_array_equal(got, POISON)


@each(api.IMPLEMENTATIONS, SPECS)
def test_contract(spec, implementation):
    check(spec, implementation)


@each(api.IMPLEMENTATIONS, dtypes=("float32", "bfloat16"))
def test_bits_are_independent_of_page_and_neighbours(implementation, dtype):
    """q and the stored row of one token, whatever the other rows, block size, page and layer."""

    def token(spec, inputs, t):
        q, arena = run(spec, implementation, inputs)
        view = np.asarray(arena).reshape(-1, spec.page.head_dim * q.dtype.itemsize // 2)
        return q[t], view[rows_of(spec.page, inputs, t)]

    spec, other = Spec(16, dtype), Spec(16, dtype, block_size=64, layers=2)
    inputs = case(spec, 0)
    for t in (8, 14):
        want_q, want_row = token(spec, inputs, t)
        moved = case(other, 5) | {"kv_norm": inputs["kv_norm"]}
        for name in ("kv", "q_rope", "positions"):
            moved[name][t] = inputs[name][t]
        q, row = token(other, moved, t)
        same_bits(q, want_q)
        np.testing.assert_array_equal(row, want_row)


@each(api.IMPLEMENTATIONS)
def test_updates_a_donated_arena_in_place(implementation):
    spec = Spec(3, "bfloat16")
    inputs = case(spec, 0)
    inputs["arena"] = jnp.array(inputs["arena"])
    address = inputs["arena"].unsafe_buffer_pointer()
    _, arena = run(spec, implementation, inputs, donate=("arena",))
    assert arena.unsafe_buffer_pointer() == address


def mutant(change):
    """reference.latent_write with some arguments changed by name."""
    signature = inspect.signature(reference.latent_write)

    def latent_write(*args, **options):
        changed = dict(zip(signature.parameters, args, strict=False)) | options
        return reference.latent_write(**{**changed, **change(changed)})

    return latent_write


MUTANTS = {
    "row off by one": lambda a: {"pages": jnp.where(a["pages"] < 0, -1, a["pages"] + 1)},
    "layer 0": lambda a: {"layer": 0},
    "padding written": lambda a: {"pages": jnp.maximum(a["pages"], 0)},
    "position off by one": lambda a: {"positions": a["positions"] + 1},
    "unscaled rotation": lambda a: {"attention_factor": 1.0},
    "other pairs": lambda a: {"interleave": not a["interleave"]},
    "other norm": lambda a: {"stack_layer": a["stack_layer"] - 1},
    "eps": lambda a: {"eps": 1e-3},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_contract_catches(name, monkeypatch):
    monkeypatch.setitem(api.IMPLEMENTATIONS, name, mutant(MUTANTS[name]))
    with pytest.raises(AssertionError):
        check(Spec(17, "float32", attention_factor=1.25), name)


@pytest.mark.parametrize(
    ("heads", "latent", "rope", "tile", "warps"),
    [(16, 512, 64, 8, 1), (128, 512, 64, 8, 1), (5, 16, 8, 1, 1), (12, 2048, 64, 4, 4)],
)
def test_configuration(heads, latent, rope, tile, warps):
    config = pallas_triton.configuration(heads, latent, rope, "bfloat16")
    assert config == pallas_triton.Config(tile, warps, num_stages=1)


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"kv": (3, 23)}, {}, r"kv \(3, 23\), kv_norm \(3, 16\), q_rope .* for rows of 16 \+ 8"),
        ({"kv_norm": (3, 24)}, {}, r"kv_norm \(3, 24\)"),
        ({"q_rope": (3, 4, 24)}, {}, r"q_rope \(3, 4, 24\)"),
        ({"inverse_frequencies": (8,)}, {}, "8 frequencies for 8 rotated values"),
        ({}, {"page": KVPage(16, 1, 24)}, "latent_write needs a latent page .*latent=0"),
        ({}, {"page": KVPage(16, 2, 24, 16)}, "latent_write needs a latent page .*kv_heads=2"),
        ({}, {"page": KVPage(16, 1, 24, 17)}, "latent_write needs a latent page .*latent=17"),
        ({}, {"implementation": "cuda"}, "op 'latent_write' has no implementation 'cuda'"),
        ({}, {"implementation": "pallas"}, "'pallas' takes .* not float32; 'xla' takes it"),
    ],
)
def test_refuses(changed, options, message):
    spec = Spec(3, "float32")
    inputs = case(spec, 0) | {name: jnp.zeros(shape) for name, shape in changed.items()}
    fixed = dict(page=spec.page, attention_factor=1.0, eps=EPS, interleave=True)
    with pytest.raises(ValueError, match=message):
        api.latent_write(**inputs, **(fixed | options))
