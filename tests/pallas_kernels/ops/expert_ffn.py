"""expert_ffn against float64 on the weights that numpy decodes, from cells and from the store."""

import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import KERNELS
from pallas_kernels.expert_ffn import (
    ClampedSwiGLU,
    ExpertBatch,
    ExpertOptions,
    ExpertPlaces,
    api,
)
from pallas_kernels.expert_ffn.specs import (
    OF_CHECKPOINTS,
    OF_UNEVEN_WIDTHS,
    SPECS,
    VERSIONED,
    Spec,
)
from pallas_kernels.records import RecordFormat, reference
from pallas_kernels.records.encoding import GGUF
from pallas_kernels.records.format import LOSSY, VERSIONS
from pallas_kernels.records.versions import VersionFormats
from tests.host_offload.versions.numpy_decoder import decode
from tests.pallas_kernels import contract
from tests.pallas_kernels.contract import Contract, Mutant, close, compiled, draw, same_bits, wide
from tests.pallas_kernels.encoded import formats, recode, records

LAYER = 1
ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "swish": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_new": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
}
ACTIVATIONS["gelu_pytorch_tanh"] = ACTIVATIONS["gelu_new"]


@dataclasses.dataclass(frozen=True)
class Case:
    """Experts each in the one place where it must be read from; everything else is poison, idle
    experts included."""

    x: np.ndarray
    ids: np.ndarray
    y: np.ndarray
    """What y holds before: nothing that a product gives."""
    weights: np.ndarray
    """[E, 3·I, D]: gate (if there is one), up, down^T; then rows of biases."""
    formats: tuple[VersionFormats, ...] | None
    arena: np.ndarray
    stores: tuple
    address: np.ndarray
    version: np.ndarray

    @property
    def active(self) -> np.ndarray:
        return np.unique(self.ids[self.ids < len(self.weights)])


def routing(spec, rng) -> np.ndarray:
    busy = spec.experts - (spec.experts // 4 if spec.routing == "some" else 0)
    ids = np.stack([np.sort(rng.permutation(busy)[: spec.top_k]) for _ in range(spec.tokens)])
    ids = np.int32(ids)
    if spec.routing == "one":
        ids[:, -1] = spec.experts - 1
        others = [rng.permutation(spec.experts - 1)[: spec.top_k - 1] for _ in ids]
        ids[:, :-1] = np.sort(np.reshape(others, (spec.tokens, -1)), axis=1)
    if spec.routing == "padded":
        ids[spec.tokens * 2 // 3 :] = spec.experts
    if spec.routing == "none":
        ids[:] = spec.experts
    return ids


def case(spec, seed, resident=None, spare_rows=0) -> Case:
    """Experts in turn of each version, those of `resident` in cells, by default half of each."""
    rng = np.random.default_rng(seed)
    ids = routing(spec, rng)
    sizes = spec.hidden, spec.width, spec.dtype
    more = {"biases": spec.biases, "gated": spec.gated}
    of_versions = formats(spec.versions or ("dense",), *sizes, **more)
    step = max(f.cell.rows for f in of_versions) + (2 if spec.width % 128 else 8)
    arena = np.full(
        (step * (spec.experts + 1) + spare_rows, spec.hidden), contract.POISON, np.uint16
    )
    layers = spec.layers, spec.experts
    shapes = ((*layers, f.store.rows, spec.hidden) for f in of_versions)
    stores = tuple(np.full(shape, contract.POISON, np.uint16) for shape in shapes)
    address = np.full(layers, 1, np.int32)  # nothing lies at row 1
    version = np.full(layers, len(of_versions) - 1, np.int32)
    address[LAYER], weights = -1, []
    for e in range(spec.experts):
        number = version[LAYER, e] = e % len(of_versions)
        record = records(rng, 1, of_versions[number].store)
        weights.append(decoded(record, of_versions[number].store))
        in_cell = e // len(of_versions) % 2 == 0 if resident is None else e in resident
        if in_cell:
            row = address[LAYER, e] = len(arena) - (e + 1) * step  # descending, unlike the ids
        if e in ids and in_cell:
            (cell,) = recode(record, of_versions[number])
            arena[row : row + len(cell)] = cell
        elif e in ids:
            stores[number][LAYER, e] = record[0]
    return Case(
        draw(rng, (spec.tokens, spec.hidden), spec.dtype),
        ids,
        rng.uniform(50, 60, (spec.tokens * spec.top_k, spec.hidden)).astype(np.float32),
        np.stack(weights),
        of_versions if spec.versions else None,
        *(arena, stores, address, version),
    )


def decoded(record, fmt):
    """By numpy; what others' formats mean, XLA says."""
    known = {*VERSIONS} >= {*fmt.version.split("+")}
    return decode(record, fmt)[0] if known else np.asarray(reference.decode(record[0], fmt))


def run(
    spec,
    implementation,
    c,
    active=None,
    y=None,
    activation="silu",
    pairs=None,
    arithmetic="exact",
):
    active = c.active if active is None else active
    listed = np.full(spec.experts, -1, np.int32)
    listed[: len(active)] = active
    plan = activation, spec.row_tile, c.formats, implementation
    options = ExpertOptions(*plan, arithmetic=arithmetic)
    op = compiled(api.expert_ffn, options=options)
    stores = tuple(contract.stored(store, implementation) for store in c.stores)
    batch = ExpertBatch(listed, np.int32(len(active)), c.ids, c.x, pairs)
    places = ExpertPlaces(stores, np.int32(LAYER), c.address, c.version)
    return op(c.y if y is None else y, c.arena, batch, places)


def check(spec, implementation, activation="silu"):
    few = spec.versions or implementation == "mosaic"  # whose interpreters take seconds
    for seed in contract.SEEDS[: 1 if few else 2]:
        c = case(spec, seed)
        got = run(spec, implementation, c, activation=activation)
        assert got.dtype == jnp.float32
        flat = c.ids.reshape(-1)
        x = wide(c.x)[np.arange(len(flat)) // spec.top_k]
        want = wide(c.y)
        for e in c.active:
            mine = flat == e
            want[mine] = ffn(spec, c.weights[e], x[mine], c.x.dtype, activation)
        close("expert_ffn", spec.dtype, got, want)
        same_bits(np.asarray(got)[flat == spec.experts], c.y[flat == spec.experts])


def ffn(spec, weights, x, dtype, activation):
    """float64[T, D] of an expert."""
    count = 3 if spec.gated else 2
    *gate, up, down = np.split(wide(weights)[: count * spec.width], count)
    gate = gate[0] if spec.gated else up
    gate, up = x @ gate.T, x @ up.T
    biases = np.zeros(spec.hidden)
    if spec.biases:
        rows = wide(weights)[count * spec.width :]
        one = -(-spec.width // spec.hidden)
        *of_gate, of_up, biases = np.split(rows, [one, 2 * one][: count - 1])
        of_gate = of_gate[0] if spec.gated else of_up
        gate += of_gate.reshape(-1)[: spec.width]
        up += of_up.reshape(-1)[: spec.width]
    return wide(gated(activation, gate, up).astype(dtype)) @ down + biases


def gated(activation, gate, up):
    if isinstance(activation, str):
        return ACTIVATIONS[activation](gate) * up
    gate, up = np.minimum(gate, CLAMPED.limit), np.clip(up, -CLAMPED.limit, CLAMPED.limit)
    return (up + 1) * gate / (1 + np.exp(-CLAMPED.alpha * gate))


CLAMPED = ClampedSwiGLU(1.5, 1.702)
"""gpt-oss' gating, with a limit that these values reach."""


def check_clamped(spec, implementation):
    check(spec, implementation, CLAMPED)


def check_squared(spec, implementation):
    """Where gate is up, a ReLU makes a square."""
    check(spec, implementation, "relu")


def activations(implementation):
    for name in api.ACTIVATIONS:
        check(contract.fitting(implementation, Spec(3, "float16")), implementation, name)


def on_bits(implementation, **more):
    """Specs of what asserts bits: few tokens (tiles of 16 rows) and many (of 64)."""
    for dtype, row_tile in itertools.product(contract.dtypes_of_bits(implementation), (16, 64)):
        spec = Spec(17, dtype, "one", row_tile=row_tile, **more)
        yield contract.fitting(implementation, spec)


def bits_wherever_an_expert_lies(implementation):
    """Cell, another cell of a larger arena, or the store; in the store also as lossless12."""
    versions = (*LOSSY, "lossless12", ("dense", "lossless12"))
    coded = Spec(17, "bfloat16", "one", versions=versions)
    coded = coded, dataclasses.replace(coded, row_tile=64)
    for spec in (*on_bits(implementation), *coded[: 2 * (implementation != "mosaic")]):
        want = run(spec, implementation, case(spec, 0, ()))
        same_bits(run(spec, implementation, case(spec, 0, range(spec.experts))), want)
        same_bits(run(spec, implementation, case(spec, 0, {0, 3, 7}, spare_rows=40)), want)


def a_lossless_expert_has_the_bits_of_a_dense_one(implementation):
    for row_tile in (16, 64):
        spec = Spec(17, "bfloat16", "one", hidden=192, width=80, row_tile=row_tile)
        dense, lossless = (
            dataclasses.replace(spec, versions=(version,)) for version in ("dense", "lossless12")
        )
        c = case(lossless, 0)
        record = c.weights.view(np.uint16)
        store = np.broadcast_to(record, (spec.layers, *record.shape))
        address = np.full_like(c.address, -1)
        plain = dataclasses.replace(c, stores=(store,), address=address, formats=None)
        same_bits(run(lossless, implementation, c), run(dense, implementation, plain))


OTHERS = (
    *GGUF,
    *("fp8-128x128-f32", "fp8-channel-f32", "fp4-32-e8m0", "fp4-16-e4m3xf32", "fp4-16-e4m3divf32"),
    *("int8-channel-bf16", "int4-32-bf16", "int4-128-f16-zero", "int4-32-bf16-zero"),
    *("int8-64-f16-zero", "int4-64-f32-zero", "q6_k+q4_k+q8_0", "q4_k+iq4_nl+q5_0"),
)
"""Formats of checkpoints."""


def check_codes(spec, implementation):
    """Codes have the bits of their decoded weights, of few tokens and of many."""
    c = case(spec, 0, resident=())
    record = c.weights.view(np.uint16).reshape(spec.experts, -1, spec.hidden)
    dense = np.broadcast_to(record, (spec.layers, *record.shape))
    plain = dataclasses.replace(c, stores=(dense,), formats=None)
    for tokens in (1, 5, 40):
        part = dataclasses.replace(spec, tokens=tokens)
        few, same = (
            dataclasses.replace(each, x=c.x[:tokens], ids=c.ids[:tokens], y=c.y[: 2 * tokens])
            for each in (c, plain)
        )
        same_bits(run(part, implementation, few), run(part, implementation, same))


def codes_of_uneven_widths(implementation):
    for spec in OF_UNEVEN_WIDTHS:
        check_codes(dataclasses.replace(spec, tokens=40), implementation)


def bits_in_waves(implementation):
    """Which share the sort of their pairs, where there is one. Rows of other waves' experts keep
    what they hold."""
    for spec in on_bits(implementation):
        c = case(spec, 0)
        options = {"row_tile": spec.row_tile, "implementation": implementation}
        pairs = api.sorted_pairs(c.ids, spec.experts, **options)
        assert (pairs is not None) == (implementation in KERNELS and spec.row_tile == 64)
        want, y = run(spec, implementation, c), c.y
        for shared, first, end in ((None, 0, 1), (None, 1, 1), (pairs, 1, 5), (pairs, 5, 8)):
            before, part = y, c.active[first:end]
            y = run(spec, implementation, c, active=part, y=y, pairs=shared)
            others = ~np.isin(c.ids.reshape(-1), part)
            same_bits(np.asarray(y)[others], np.asarray(before)[others])
        same_bits(y, want)


def bits_of_a_row(implementation):
    """They depend on no other row and not on how many there are."""
    for spec in on_bits(implementation):
        c = case(spec, 0)
        want = np.asarray(run(spec, implementation, c)).reshape(17, spec.top_k, -1)
        for t, x in contract.alone(c.x):  # the others go elsewhere
            ids = np.zeros_like(c.ids) + np.arange(spec.top_k, dtype=np.int32)
            ids[t] = c.ids[t]
            others = dataclasses.replace(c, x=x, ids=ids)
            got = run(spec, implementation, others, active=c.active)
            same_bits(np.asarray(got).reshape(17, spec.top_k, -1)[t], want[t])
            for tokens in (1, 65):
                rows = np.full(tokens, t)
                check_rows(dataclasses.replace(spec, tokens=tokens), implementation, c, rows, want)


def check_rows(spec, implementation, c, rows, want):
    """Tokens of these rows of a case have the bits that they have among the others."""
    y = np.zeros((len(rows) * spec.top_k, spec.hidden), np.float32)
    part = dataclasses.replace(c, x=c.x[rows], ids=c.ids[rows], y=y)
    got = np.asarray(run(spec, implementation, part)).reshape(len(rows), spec.top_k, -1)
    same_bits(got, want[rows])


def check_as_decoded(spec, implementation):
    """Rows multiplied as they are decoded have the bits of decoded ones: `cpu` multiplies so for up
    to four tokens of an expert, where D is a multiple of 512."""
    check(dataclasses.replace(spec, tokens=17), implementation)
    c = case(spec, 0)
    want = np.asarray(run(spec, implementation, c)).reshape(spec.tokens, spec.top_k, -1)
    for first, tokens in ((0, 1), (3, 2), (5, 3), (9, 4), (8, 5), (4, 9), (20, 17), (50, 131)):
        few = dataclasses.replace(spec, tokens=tokens)
        check_rows(few, implementation, c, first + np.arange(tokens), want)


OF_GPT_OSS: Any = {"hidden": 64, "width": 160, "versions": ("fp4-32-e8m0", "dense"), "biases": True}
"""Biases that take several rows, the last one in part."""

DECODED = Spec(300, "bfloat16", "one", hidden=512, width=84)


def refused(y=(6, 8), arena=(9, 8), versions=None, dtype="bfloat16", **options):
    table = jnp.zeros((1, 4), jnp.int32)
    rows = jnp.zeros((3, 2), jnp.int32), jnp.zeros((3, 8), dtype)
    places = ExpertPlaces((jnp.zeros((1, 4, 6, 8), jnp.uint16),), 0, table, table)
    if versions is not None:
        options["formats"] = tuple(VersionFormats(*given) for given in versions)
    batch, options = ExpertBatch(table[0], 0, *rows), {"activation": "silu"} | options
    given = jnp.zeros(y), jnp.zeros(arena, jnp.uint16), batch, places
    return api.expert_ffn(*given, ExpertOptions(row_tile=16, **options))


DENSE = RecordFormat("dense", 8, 2, "bfloat16")
INT4 = RecordFormat("int4", 8, 2, "bfloat16")
WIDER = RecordFormat("int4", 8, 8, "bfloat16")
FLOAT16 = dataclasses.replace(DENSE, dtype="float16")

CONTRACTS = (
    Contract(
        "expert_ffn",
        api.IMPLEMENTATIONS,
        SPECS,
        check,
        facts=(
            activations,
            bits_wherever_an_expert_lies,
            bits_in_waves,
            bits_of_a_row,
        ),
        mutant=Mutant.in_record(
            "places",
            "address",
            lambda a: jnp.where(a < 0, -1, a + 1),
            Spec(17, "bfloat16", "padded"),
        ),
        refused=lambda options: refused(**options),
        refusals=(
            ({"y": (5, 8)}, r"x \(3, 8\), ids \(3, 2\) and y \(5, 8\) do not fit together"),
            ({"y": (6, 7)}, r"x \(3, 8\), ids \(3, 2\) and y \(6, 7\) do not fit together"),
            ({"arena": (9, 7)}, "arena rows have 7 elements, x has 8 columns"),
            ({"activation": "tanh"}, "unknown activation 'tanh'; known: silu"),
            ({"implementation": "cuda"}, "op 'expert_ffn' has no implementation"),
            (
                {"implementation": "pallas", "dtype": "float32"},
                "bfloat16 and float16, not float32 ",
            ),
            ({"implementation": "mosaic"}, "multiples of 128, not 8; 'xla'|Mosaic .* jax 0.12"),
            (
                {"implementation": "mosaic", "activation": ClampedSwiGLU(1, 1)},
                "its Mosaic kernels do not clamp; 'xla' takes it",
            ),
            (
                {"implementation": "cpu", "activation": ClampedSwiGLU(1, 1, 0)},
                "no shift but 1, .*; 'xla' takes it",
            ),
        ),
    ),
    Contract(
        "expert_ffn over versions",
        {name: api.IMPLEMENTATIONS[name] for name in ("xla", "pallas", "cpu")},
        VERSIONED,
        check,
        facts=(a_lossless_expert_has_the_bits_of_a_dense_one,),
        mutant=Mutant.in_record(
            "places", "version", lambda v: 1 - v, VERSIONED[0], api.IMPLEMENTATIONS
        ),
        refused=lambda *versions: refused(versions=versions),
        refusals=(
            ("0 formats for 1 stores",),
            ((INT4, DENSE), "version 0 is dense in the store and int4 in a cell; only"),
            ((WIDER, WIDER), r"records of int4 are \[10, 8\], the store has \[6, 8\]"),
            ((FLOAT16, FLOAT16), "version 0 decodes to float16, x is bfloat16"),
            ((DENSE, DENSE, (0, 1)), "its store has 1 layers, its places name 1"),
            ((DENSE, DENSE, (0, -1)), "tables of 1 layers, 2 in the store"),
        ),
    ),
    Contract(
        "expert_ffn of checkpoints' formats",
        {"pallas": api.IMPLEMENTATIONS["pallas"]},
        OF_CHECKPOINTS,
        check,
    ),
    Contract(
        "expert_ffn with biases and a clamped SwiGLU",
        {name: api.IMPLEMENTATIONS[name] for name in ("xla", "pallas", "cpu")},
        [
            Spec(17, "float32", width=100, hidden=40, versions=("dense",), biases=True),
            Spec(3, "bfloat16", "one", versions=("int8", "lossless12", "int4"), biases=True),
            Spec(9, "bfloat16", versions=("fp4-32-e8m0", ("dense", "lossless12")), biases=True),
            *(Spec(33, "bfloat16", "one", row_tile=tile, **OF_GPT_OSS) for tile in (16, 64)),
        ],
        check_clamped,
    ),
    Contract(
        "expert_ffn of two matrices",
        {name: api.IMPLEMENTATIONS[name] for name in ("xla", "pallas", "cpu")},
        [
            Spec(17, "float32", width=100, hidden=40, versions=("dense",), gated=False),
            Spec(3, "bfloat16", "one", versions=("int8", "lossless12", "int4"), gated=False),
            Spec(9, "bfloat16", versions=(("dense", "lossless12"),), biases=True, gated=False),
            Spec(33, "bfloat16", "one", row_tile=64, versions=("dense", "int4"), gated=False),
        ],
        check_squared,
    ),
    Contract(
        "expert_ffn of few tokens over versions",
        {"cpu": api.IMPLEMENTATIONS["cpu"]},
        [dataclasses.replace(DECODED, versions=(v,)) for v in ("int4", "int8", "lossless12")],
        check_as_decoded,
    ),
    Contract(
        "expert_ffn of checkpoints' codes",
        {"cpu": api.IMPLEMENTATIONS["cpu"]},
        [
            Spec(40, dtype, "one", hidden=hidden, width=width, versions=(version,))
            for version in OTHERS
            for dtype, hidden, width in (("bfloat16", 512, 96), ("bfloat16", 80, 45))
        ]
        + [Spec(40, "float32", hidden=96, width=40, versions=(v,)) for v in ("q5_k", "q6_k")],
        check_codes,
    ),
    Contract(
        "expert_ffn of widths that no block divides",
        {name: api.IMPLEMENTATIONS[name] for name in ("xla", "cpu")},
        OF_UNEVEN_WIDTHS,
        check,
        facts=(codes_of_uneven_widths,),
    ),
)
