"""expert_ffn over versions, against float64 on the weights that numpy decodes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_ffn import api, reference
from pallas_kernels.expert_ffn import tile as expert_tile
from pallas_kernels.expert_ffn.specs import VERSIONED, Spec
from pallas_kernels.records import RecordFormat, tile
from pallas_kernels.records.format import BITS
from pallas_kernels.records.versions import VersionFormats
from tests.host_offload.versions.numpy_decoder import decode
from tests.pallas_kernels import test_expert_ffn
from tests.pallas_kernels.contract import (
    NATIVE,
    POISON,
    close,
    compiled,
    each,
    same_bits,
    stored,
    wide,
)
from tests.pallas_kernels.encoded import formats, recode, records
from tests.pallas_kernels.test_expert_ffn import ACTIVATIONS, LAYER, Case, case


@dataclasses.dataclass(frozen=True)
class Placed:
    """A case whose experts have versions, each in one place; everything else is poison."""

    case: Case
    formats: tuple
    arena: np.ndarray
    stores: tuple[np.ndarray, ...]
    address: np.ndarray
    version: np.ndarray


def placed(spec: Spec, seed: int, resident=None) -> Placed:
    """Experts in turn of each version, a cell and the store; with `resident`, those in cells."""
    rng = np.random.default_rng(seed)
    of_versions = formats(spec.versions, spec.hidden, spec.width, spec.dtype)
    most = max(f.cell.rows for f in of_versions)
    arena = np.full(((most + 2) * (spec.experts + 1), spec.hidden), POISON, np.uint16)
    layers = (spec.layers, spec.experts)
    stores = tuple(np.full((*layers, f.store.rows, spec.hidden), POISON) for f in of_versions)
    stores = tuple(store.astype(np.uint16) for store in stores)
    address = np.full(layers, 1, np.int32)  # nothing lies at row 1
    version = np.full(layers, len(of_versions) - 1, np.int32)
    address[LAYER], weights = -1, []
    for e in range(spec.experts):
        number = e % len(of_versions)
        version[LAYER, e] = number
        record = records(rng, 1, of_versions[number].store)
        weights.append(decode(record, of_versions[number].store)[0])
        in_cell = e // len(of_versions) % 2 == 0 if resident is None else e in resident
        if in_cell:
            (record,) = recode(record, of_versions[number])
            row = len(arena) - (e + 1) * (most + 2)
            address[LAYER, e], arena[row : row + len(record)] = row, record
        else:
            stores[number][LAYER, e] = record[0]
    plain = case(spec, seed)
    plain = dataclasses.replace(plain, weights=np.stack(weights))
    return Placed(plain, of_versions, arena, stores, address, version)


def run(spec: Spec, implementation: str, p: Placed):
    listed = np.full(spec.experts, -1, np.int32)
    listed[: len(p.case.active)] = p.case.active
    op = compiled(
        api.expert_ffn,
        activation="silu",
        row_tile=spec.row_tile,
        formats=p.formats,
        implementation=implementation,
    )
    return op(
        p.case.y,
        p.case.x,
        p.case.ids,
        p.arena,
        tuple(stored(store, implementation) for store in p.stores),
        np.int32(LAYER),
        p.address,
        p.version,
        listed,
        np.int32(len(p.case.active)),
    )


def check(spec: Spec, implementation: str, seed: int = 0) -> None:
    p = placed(spec, seed)
    got = run(spec, implementation, p)
    flat = p.case.ids.reshape(-1)
    x = wide(p.case.x)[np.arange(len(flat)) // spec.top_k]
    want = wide(p.case.y)
    for e in p.case.active:
        gate, up, down = np.split(wide(p.case.weights[e]), 3)
        mine = flat == e
        hidden = ACTIVATIONS["silu"](x[mine] @ gate.T) * (x[mine] @ up.T)
        want[mine] = wide(hidden.astype(p.case.x.dtype)) @ down
    close("expert_ffn", spec.dtype, got, want)


@each(api.IMPLEMENTATIONS, VERSIONED[:1])
def test_contract(spec, implementation):
    check(spec, implementation)


@pytest.mark.slow
def test_all_versions_in_one_call():
    check(VERSIONED[1], "xla")


@pytest.mark.slow
@pytest.mark.nightly
@each(api.IMPLEMENTATIONS, VERSIONED[1:])
def test_contract_of_other_versions_and_shapes(spec, implementation):
    check(spec, implementation)


@pytest.mark.slow
@pytest.mark.nightly
@each(api.IMPLEMENTATIONS)
@pytest.mark.parametrize("row_tile", [16, 64])
def test_bits_are_independent_of_where_an_expert_lies(implementation, row_tile):
    """Cell or store; in the store also as lossless12."""
    versions = (*BITS, "lossless12", ("dense", "lossless12"))
    spec = Spec(17, "bfloat16", "one", row_tile=row_tile, versions=versions)
    everything = set(range(spec.experts))
    want = run(spec, implementation, placed(spec, 0, everything))
    same_bits(run(spec, implementation, placed(spec, 0, set())), want)
    same_bits(run(spec, implementation, placed(spec, 0, {0, 2, 5, 6})), want)


@pytest.mark.slow
@pytest.mark.nightly
@each(api.IMPLEMENTATIONS)
@pytest.mark.parametrize("row_tile", [16, 64])
def test_a_lossless_expert_has_the_bits_of_a_dense_one(implementation, row_tile):
    spec = Spec(17, "bfloat16", "one", hidden=192, width=80, row_tile=row_tile)
    coded = dataclasses.replace(spec, versions=("lossless12",))
    lossless = placed(coded, 0)
    got = run(coded, implementation, lossless)
    memory = test_expert_ffn.memory(spec, lossless.case, {0, 3})
    same_bits(got, test_expert_ffn.run(spec, implementation, lossless.case, memory))


@NATIVE
@pytest.mark.parametrize("version", ["int8", "int4", "lossless12"])
def test_rows_multiplied_as_they_are_decoded_have_the_bits_of_decoded_ones(version):
    """`cpu` does so for up to four tokens of an expert, where D is a multiple of 512."""
    spec = Spec(300, "bfloat16", "one", hidden=512, width=84, versions=(version,))
    check(dataclasses.replace(spec, tokens=17), "cpu")
    many = placed(spec, 0)
    want = np.asarray(run(spec, "cpu", many)).reshape(300, spec.top_k, -1)
    for first, tokens in ((0, 1), (3, 2), (5, 3), (9, 4), (8, 5), (4, 9), (20, 17), (50, 131)):
        rows = slice(first, first + tokens)
        part = dataclasses.replace(
            many.case,
            x=many.case.x[rows],
            ids=many.case.ids[rows],
            y=np.zeros((tokens * spec.top_k, spec.hidden), np.float32),
        )
        few = dataclasses.replace(many, case=part)
        got = run(dataclasses.replace(spec, tokens=tokens), "cpu", few)
        same_bits(np.asarray(got).reshape(tokens, spec.top_k, -1), want[rows])


@pytest.mark.parametrize(
    ("module", "name", "mistake"),
    [
        (tile, "BLOCK", 16),
        (tile, "_scales", lambda *place: scales(*place[:3], place[3] * 0, *place[4:])),
        (expert_tile, "read_planes", lambda *place: planes_swapped(tile.read_planes(*place))),
    ],
)
@pytest.mark.slow
@pytest.mark.nightly
def test_contract_catches_a_mistake_in_a_kernel(module, name, mistake, monkeypatch):
    monkeypatch.setattr(module, name, mistake)
    monkeypatch.setitem(api.IMPLEMENTATIONS, f"pallas_{name}", api.IMPLEMENTATIONS["pallas"])
    with pytest.raises(AssertionError):
        check(MUTATED, f"pallas_{name}")


MUTATED = Spec(3, "bfloat16", hidden=192, width=96, versions=("int4", "lossless12"))

scales = tile._scales


def planes_swapped(planes):
    return [
        plane._replace(weights=other.weights)
        for plane, other in zip(planes, planes[::-1], strict=True)
    ]


def other_version(*arguments, **options):
    *first, version, active, count = arguments
    return reference.expert_ffn(*first, 1 - version, active, count, **options)


def read_through_only(*arguments, **options):
    *first, address, version, active, count = arguments
    return reference.expert_ffn(*first, address * 0 - 1, version, active, count, **options)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("mutant", [other_version, read_through_only])
def test_contract_catches(mutant, monkeypatch):
    monkeypatch.setitem(api.IMPLEMENTATIONS, mutant.__name__, mutant)
    with pytest.raises(AssertionError):
        check(MUTATED, mutant.__name__)


DENSE = RecordFormat("dense", 8, 2, "bfloat16")
INT4 = RecordFormat("int4", 8, 2, "bfloat16")
WIDER = RecordFormat("int4", 8, 8, "bfloat16")


@pytest.mark.parametrize(
    ("of_versions", "message"),
    [
        ((), "0 formats for 1 stores"),
        (
            (VersionFormats(INT4, DENSE),),
            "version 0 is dense in the store and int4 in a cell; only",
        ),
        ((VersionFormats(WIDER, WIDER),), r"records of int4 are \[10, 8\], the store has \[6, 8\]"),
        (
            (VersionFormats(*[dataclasses.replace(DENSE, dtype="float16")] * 2),),
            "version 0 decodes to float16, x is bfloat16",
        ),
        ((VersionFormats(DENSE, DENSE, (0, 1)),), "its store has 1 layers, its places name 1"),
        ((VersionFormats(DENSE, DENSE, (0, -1)),), "tables of 1 layers, 2 in the store"),
    ],
)
def test_refuses_formats_that_are_not_those_of_the_stores(of_versions, message):
    table = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match=message):
        api.expert_ffn(
            jnp.zeros((6, 8)),
            jnp.zeros((3, 8), jnp.bfloat16),
            jnp.zeros((3, 2), jnp.int32),
            jnp.zeros((9, 8), jnp.uint16),
            (jnp.zeros((1, 4, 6, 8), jnp.uint16),),
            0,
            table,
            table,
            table[0],
            jnp.int32(0),
            activation="silu",
            row_tile=16,
            formats=of_versions,
        )
