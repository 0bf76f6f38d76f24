"""Contract 3 with several versions: no step copies or allocates anything of the arena's size."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from moejax.checkpoints.random_model import shape
from pallas_kernels import resolve_ops
from pallas_kernels.records import RecordFormat
from pallas_kernels.records.versions import VersionFormats
from tests.aot.aot_h200 import compile_for_h200
from tests.moejax.step.test_constant_memory import (
    DECODE,
    PREFILL,
    STAGED,
    GiB,
    MiB,
    abstract_programs,
    compile_here,
    nbytes,
    with_steps,
)

TIERS = ("dense", "int4")
MIXES = (TIERS, (("dense", "lossless12"), "int4"))


def with_versions(programs, versions):
    """The programs of a run of these versions: a name, or (in a cell, in the store)."""
    (dense,) = programs.stores
    layers, experts, rows, hidden = dense.shape
    dtype = jax.tree.leaves(programs.state["embedding"])[0].dtype.name
    size = hidden, rows * 2 // (3 * jnp.dtype(dtype).itemsize), dtype
    formats, stores = [], []
    for version in versions:
        cell, held = (version, version) if isinstance(version, str) else version
        formats.append(VersionFormats(RecordFormat(cell, *size), RecordFormat(held, *size)))
        records = (layers, experts, formats[-1].store.rows, hidden)
        stores.append(jax.ShapeDtypeStruct(records, jnp.uint16))
    programs = dataclasses.replace(programs, stores=tuple(stores))
    return with_steps(programs, formats=tuple(formats))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("versions", "key"),
    [
        (TIERS, STAGED),
        *(
            pytest.param(versions, key, marks=pytest.mark.nightly)
            for versions in MIXES
            for key in (DECODE, PREFILL, PREFILL._replace(staged=True))
        ),
    ],
    ids=str,
)
def test_step_copies_nothing_large(versions, key):
    limits = {"rows": 16, "max_model_len": 1024, "max_num_batched_tokens": 1024}
    config = dataclasses.replace(shape("demo", layers=3))
    programs = with_versions(abstract_programs(config, 32 * MiB, **limits), versions)
    compiled = compile_here(programs, key)
    assert compiled.copies(MiB) == []
    assert compiled.memory.alias_bytes == nbytes((programs.arena, programs.tables))
    assert compiled.memory.temp_bytes < 14 * MiB


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("ops", ["xla", "pallas"])
@pytest.mark.parametrize("versions", MIXES, ids=str)
def test_decode_of_a_large_model_copies_nothing_large(versions, ops):
    chosen = resolve_ops(ops, platform="gpu", dtype="bfloat16")
    limits = {"rows": 64, "max_model_len": 4096, "max_num_batched_tokens": 8192}
    config = shape("qwen3-30b-a3b", layers=3)
    programs = with_versions(abstract_programs(config, 40 * GiB, ops=chosen, **limits), versions)
    program = programs.program(STAGED)
    compiled = compile_for_h200(
        program.function,
        *program.args,
        donate_argnums=program.donated,
        host_argnums=tuple(i for i, arg in enumerate(program.args) if arg is programs.stores),
    )
    # The XLA ops cut out one expert, and one layer's dense weights: at most 20 MiB each.
    assert [size for _, size in compiled.copies(MiB) if size > 20 * MiB] == []
    assert compiled.host_copies(1, to_host=True) == []
    assert compiled.memory.alias_bytes == nbytes((programs.arena, programs.tables))
    # Decoded weights in float32 and the codes they came from.
    assert compiled.memory.temp_bytes < 96 * MiB
