"""kv_write and latent_write against float64: rotated queries, and exactly the right rows of the
right pages."""

import functools
import operator

import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write import KVPage, KVPlaces, ProjectedHeads, WriteOptions
from pallas_kernels.kv_write import api as kv_api
from pallas_kernels.kv_write.specs import SPECS, Spec
from pallas_kernels.latent_write import LatentHeads
from pallas_kernels.latent_write import api as latent_api
from pallas_kernels.latent_write.specs import SPECS as LATENT_SPECS
from pallas_kernels.latent_write.specs import Spec as LatentSpec
from tests.pallas_kernels import contract
from tests.pallas_kernels.contract import Contract, Mutant, close, compiled, draw, same_bits, wide

STACK_LAYER, EPS, COLUMNS = 1, 1e-6, 50
"""COLUMNS: arena row width, which no KV row has, in order to tell the two views apart."""


def page_of(spec):
    if isinstance(spec, LatentSpec):
        return spec.page
    return KVPage(spec.block_size, spec.kv_heads, spec.head_dim)


def case(spec, seed):
    """Inputs of the op by name. Tokens of several sequences, positions up to 5000, every fourth
    row padding; two tokens never share a place. Other layers' norms are NaN."""
    rng, page = np.random.default_rng(seed), page_of(spec)
    latent = isinstance(spec, LatentSpec)
    columns = page.head_dim if latent else (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    rows = draw(rng, (spec.tokens, columns), spec.dtype)
    norms = np.full((2, 3, spec.latent if latent else spec.head_dim), np.nan, rows.dtype)
    norms[:, STACK_LAYER] = 1 + draw(rng, (2, norms.shape[2]), "float32", 0.2)
    positions = np.int32(rng.integers(0, 5000, spec.tokens))
    page_rows = spec.layers * page.rows_per_layer + 1  # an odd row before each
    pages = np.int32(rng.permutation(spec.tokens + 2)[: spec.tokens] * page_rows + 1)
    if spec.tokens > 2:  # two tokens of one sequence in one page
        positions[2] = positions[0] ^ 1
        pages[2] = pages[0]
    padding = np.arange(spec.tokens) % 4 == 3
    pages[padding], positions[padding] = -1, -1
    kv_rows = -(-(spec.tokens + 2) * page_rows // COLUMNS) * COLUMNS
    elements = kv_rows * page.head_dim * rows.itemsize // 2
    turned = (spec.rope if latent else spec.head_dim) // 2
    if latent:
        q_rope = draw(rng, (spec.tokens, spec.heads, spec.rope), spec.dtype)
        of_op = {"kv": rows, "kv_norm": norms[0], "q_rope": q_rope}
    else:
        of_op = {"qkv": rows, "q_norm": None, "k_norm": None}
        if spec.norms:
            of_op |= {"q_norm": norms[0], "k_norm": norms[1]}
    return of_op | dict(
        stack_layer=np.int32(STACK_LAYER),
        positions=positions,
        inverse_frequencies=(10000.0 ** -np.linspace(0, 1, turned)).astype(np.float32),
        arena=np.full((elements // COLUMNS, COLUMNS), contract.POISON, np.uint16),
        pages=pages,
        layer=np.int32(spec.layers - 1),
    )


def static_of(spec, implementation):
    static = {"page": page_of(spec), "attention_factor": spec.attention_factor, "eps": EPS}
    if isinstance(spec, LatentSpec):
        static["interleave"] = spec.interleave
    return static | {"implementation": implementation}


def op_of(spec):
    return latent_api.latent_write if isinstance(spec, LatentSpec) else kv_api.kv_write


def operands(inputs):
    """The op's arguments, of inputs by name."""
    kind = LatentHeads if "kv" in inputs else ProjectedHeads
    heads, places = (of(*map(inputs.get, of._fields)) for of in (kind, KVPlaces))
    return heads, inputs["arena"], places


def run(spec, implementation, inputs):
    op = compiled(op_of(spec), options=WriteOptions(**static_of(spec, implementation)))
    return op(*operands(inputs))


def rotated(spec, inputs, x, interleave=False):
    """x [T, H, P] -> float64: pairs (2i, 2i + 1) or (i, P/2 + i) turned as complex numbers, the
    real parts first; angles are float32 products."""
    x, half = wide(x), x.shape[-1] // 2
    first, second = (x[..., ::2], x[..., 1::2]) if interleave else (x[..., :half], x[..., half:])
    angle = wide(inputs["positions"].astype(np.float32)[:, None] * inputs["inverse_frequencies"])
    turned = (first + 1j * second) * np.exp(1j * angle)[:, None] * spec.attention_factor
    return np.concatenate([turned.real, turned.imag], axis=-1)


def normed(x, weight):
    """weight: of the norm, None for none."""
    x = wide(x)
    if weight is None:
        return x
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * wide(weight[STACK_LAYER])


def rows_at(spec, inputs, arena, dtype, t):
    """A view of the KV rows of token t."""
    page = page_of(spec)
    view = arena.reshape(-1, page.head_dim * dtype.itemsize // 2)
    at = inputs["pages"][t] + inputs["layer"] * page.rows_per_layer
    at += inputs["positions"][t] % page.block_size
    return view[at :: page.block_size][: page.rows_per_token]


def check_written(spec, implementation, inputs, want_q, want_rows, exact_rows=0):
    """want_rows: of each token; the last `exact_rows` of them are to the bit."""
    got_q, got_arena = run(spec, implementation, inputs)
    op = op_of(spec).__name__
    real = inputs["pages"] >= 0
    assert got_q.dtype == spec.dtype
    close(op, spec.dtype, got_q[real], want_q[real])
    arena = np.array(got_arena)
    for t in np.flatnonzero(real):
        rows = rows_at(spec, inputs, arena, got_q.dtype, t)
        stored, want = rows.view(got_q.dtype), want_rows[t]
        rotates = len(want) - exact_rows
        close(op, spec.dtype, stored[:rotates], wide(want[:rotates]))
        same_bits(stored[rotates:], want[rotates:].astype(stored.dtype))
        rows[:] = contract.POISON
    np.testing.assert_array_equal(arena, contract.POISON)


def check(spec, implementation):
    for seed in contract.SEEDS:
        inputs, heads = case(spec, seed), spec.heads
        qkv = inputs["qkv"].reshape(spec.tokens, -1, spec.head_dim)
        q, k, v = np.split(qkv, [heads, heads + spec.kv_heads], axis=1)
        rotate = functools.partial(rotated, spec, inputs)
        want_q, want_k = rotate(normed(q, inputs["q_norm"])), rotate(normed(k, inputs["k_norm"]))
        rows = np.concatenate([want_k, wide(v)], axis=1)
        check_written(spec, implementation, inputs, want_q, rows, exact_rows=spec.kv_heads)


def check_latent(spec, implementation):
    for seed in contract.SEEDS:
        inputs = case(spec, seed)
        rotate = functools.partial(rotated, spec, inputs, interleave=spec.interleave)
        values, key = np.split(inputs["kv"][:, None], [spec.latent], axis=2)
        rows = np.concatenate([normed(values, inputs["kv_norm"]), rotate(key)], axis=2)
        check_written(spec, implementation, inputs, rotate(inputs["q_rope"]), rows)


def check_bits(make, implementation):
    """q and what is stored of a token, whatever the other rows, block size, page and layer."""

    def token(spec, inputs, t):
        q, arena = run(spec, implementation, inputs)
        return q[t], rows_at(spec, inputs, np.asarray(arena), q.dtype, t)

    for dtype in contract.dtypes_of_bits(implementation):
        spec, other = make(16, dtype), make(16, dtype, block_size=64, layers=2)
        inputs = case(spec, 0)
        for t in (8, 14):
            want_q, want_rows = token(spec, inputs, t)
            moved = case(other, 5)
            moved |= {name: inputs[name] for name in inputs if name.endswith("norm")}
            for name in {"qkv", "kv", "q_rope", "positions"} & inputs.keys():
                moved[name][t] = inputs[name][t]
            q, rows = token(other, moved, t)
            same_bits(q, want_q)
            np.testing.assert_array_equal(rows, want_rows)


def bits_of_a_token(implementation):
    check_bits(Spec, implementation)


def bits_of_a_token_of_latent_pages(implementation):
    check_bits(LatentSpec, implementation)


def refused(changed, options, spec=None):
    spec = spec or Spec(3, "float32")
    inputs = case(spec, 0) | {name: shape and jnp.zeros(shape) for name, shape in changed.items()}
    return op_of(spec)(*operands(inputs), WriteOptions(**static_of(spec, "xla") | options))


def refused_latent(changed, options):
    return refused(changed, options, LatentSpec(3, "float32"))


CONTRACTS = (
    Contract(
        "kv_write",
        kv_api.IMPLEMENTATIONS,
        SPECS,
        check,
        facts=(bits_of_a_token,),
        mutant=Mutant.in_record(
            "places", "pages", lambda p: jnp.maximum(p, 0), Spec(17, "bfloat16")
        ),
        refused=refused,
        refusals=(
            ({"qkv": (3, 64)}, {}, "qkv has 64 columns for 2 KV heads"),
            ({"qkv": (3, 130)}, {}, "qkv has 130 columns for 2 KV heads"),
            ({"inverse_frequencies": (9,)}, {}, "9 frequencies for head_dim 16"),
            ({"k_norm": None}, {}, "give both q_norm and k_norm, or neither"),
            ({}, {"page": KVPage(16, 1, 16, 8)}, "latent_write writes latent pages"),
            ({}, {"implementation": "cuda"}, "op 'kv_write' has no implementation 'cuda'"),
            ({}, {"implementation": "pallas"}, "'pallas' takes 16-bit dtypes, not float32; 'xla'"),
        ),
    ),
    Contract(
        "latent_write",
        latent_api.IMPLEMENTATIONS,
        LATENT_SPECS,
        check_latent,
        facts=(bits_of_a_token_of_latent_pages,),
        mutant=Mutant.in_record("options", "interleave", operator.not_, LatentSpec(17, "bfloat16")),
        refused=refused_latent,
        refusals=(
            ({"kv": (3, 23)}, {}, r"kv \(3, 23\), kv_norm \(3, 16\), q_rope .* for rows of 16"),
            ({"kv_norm": (3, 24)}, {}, r"kv_norm \(3, 24\)"),
            ({"q_rope": (3, 4, 24)}, {}, r"q_rope \(3, 4, 24\)"),
            ({"inverse_frequencies": (8,)}, {}, "8 frequencies for 8 rotated values"),
            ({}, {"page": KVPage(16, 1, 24)}, "latent_write needs a latent page .*latent=0"),
            ({}, {"page": KVPage(16, 2, 24, 16)}, "latent_write needs a latent page .*kv_heads=2"),
            ({}, {"page": KVPage(16, 1, 24, 17)}, "latent_write needs a latent page .*latent=17"),
            ({}, {"implementation": "cuda"}, "op 'latent_write' has no implementation 'cuda'"),
            ({}, {"implementation": "pallas"}, "'pallas' takes .* not float32; 'xla' takes it"),
        ),
    ),
)
