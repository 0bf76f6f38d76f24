"""PagedMoE: same bits whatever has room, the numbers of a dense layer, no copy of the arena."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import paged_moe_in_your_model as example
from moejax import nn as layers
from moejax.cache import checked_folder
from moejax.checkpoints.load import load_checkpoint
from moejax.errors import UserError
from moejax.nn import (
    OPS_USED,
    HostRecords,
    PagedExperts,
    PagedMoE,
    RouteRule,
    kernel_checks,
)
from moejax.step.compiler import compiler_options
from pallas_kernels import dispatch, resolve_ops
from pallas_kernels.triton import interpreted
from pallas_kernels.verification import NOT_CHECKED, table
from tests.hlo import read_executable
from tests.host_offload.memory.dense_records import record_of
from tests.memory_faults import memory_faults

L, E, D, WIDTH, ROWS = 2, 16, 64, 96, 5
RULE = RouteRule(top_k=2, normalize=True)


def weights(experts=E, hidden=D, width=WIDTH, layers=L):
    draw = np.random.default_rng(0).normal
    shapes = ((experts, width, hidden), (experts, width, hidden), (experts, hidden, width))
    return [tuple(draw(0, 0.2, s).astype(np.float32) for s in shapes) for _ in range(layers)]


class Parallel(nnx.Module):
    """Two layers on one x: nothing but the arena makes one wait for the other."""

    def __init__(self, experts, **options):
        rngs = nnx.Rngs(0)
        self.moes = nnx.List([PagedMoE(experts, i, RULE, rngs=rngs, **options) for i in range(L)])

    def __call__(self, x, memory, valid=None):
        outputs = []
        for moe in self.moes:
            y, memory = moe(x, memory, valid)
            outputs.append(y)
        return jnp.stack(outputs), memory


def compiled_model(model, memory, rows=ROWS, compile=None):
    """(executable, (records, params)) of the model on x [rows, D]."""
    graph, *state = nnx.split(model, HostRecords, ...)

    def step(records, params, memory, x, valid):
        return nnx.merge(graph, records, params)(x, memory, valid)

    dtype = jnp.dtype(model.moes[0].experts.dtype)
    x = jax.ShapeDtypeStruct((rows, model.moes[0].experts.layout.hidden), dtype)
    args = (*state, memory, x, jax.ShapeDtypeStruct((rows,), bool))
    if compile is not None:
        return compile(step, *args)
    lowered = jax.jit(step, donate_argnums=2).lower(*args)
    return lowered.compile(compiler_options=compiler_options("cpu")), state


@pytest.fixture(scope="module")
def experts():
    return PagedExperts.from_arrays(weights(), "float32")


@pytest.fixture(scope="module")
def model(experts):
    return Parallel(experts)


@pytest.fixture(scope="module")
def compiled(experts, model):
    return compiled_model(model, experts.allocate())


def inputs(steps, seed=1, rows=ROWS):
    return list(jax.random.normal(jax.random.key(seed), (steps, rows, D)))


def run(compiled, memory, xs, valid=None):
    """An executable cannot be compiled again, so what runs through one here recompiled nothing."""
    step, state = compiled
    outputs = []
    for x in xs:
        mask = np.ones(x.shape[0], bool) if valid is None else valid
        y, memory = step(*state, memory, x, mask)
        outputs.append(np.asarray(y))
    return np.stack(outputs), memory


@pytest.fixture(scope="module")
def resident(experts, compiled):
    return run(compiled, experts.allocate(), inputs(3))[0]


def dense(model, layers, x):
    """What the layers compute, written the usual way."""
    outputs = []
    for moe, (gate, up, down) in zip(model.moes, layers, strict=True):
        probabilities = jax.nn.softmax(x @ moe.router.get_value().T)
        top, ids = jax.lax.top_k(probabilities, RULE.top_k)
        top = top / jnp.sum(top, axis=-1, keepdims=True)
        inner = jax.nn.silu(jnp.einsum("td,tkid->tki", x, gate[ids])) * jnp.einsum(
            "td,tkid->tki", x, up[ids]
        )
        outputs.append(jnp.einsum("tki,tkdi,tk->td", inner, down[ids], top))
    return jnp.stack(outputs)


def test_equals_a_dense_layer(model, resident):
    for x, y in zip(inputs(3), resident, strict=True):
        np.testing.assert_allclose(y, dense(model, weights(), x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cells", [(0, 0), (1, 0), (3, 16), (16, 2)])
def test_the_same_bits_for_any_cells(experts, compiled, resident, cells):
    memory = experts.grant(experts.allocate(), cells)
    found, memory = run(compiled, memory, inputs(3))
    np.testing.assert_array_equal(found, resident)
    paging = memory.paging
    np.testing.assert_array_equal(paging.active, paging.hits + paging.fills + paging.read_through)
    assert (paging.read_through[np.array(cells) == 0] > 0).all()
    assert (paging.hits[np.array(cells) == 0] == 0).all()
    assert faults(experts, memory) == 0


def faults(experts, memory):
    return sum(memory_faults(memory.arena, memory.tables, (experts.records.get_value(),)))


def test_cells_move_while_it_runs(experts, compiled, resident):
    """Between two steps; what stays where it was stays resident."""
    memory, xs = experts.allocate(), inputs(3)
    for i, cells in enumerate([(16, 16), (4, 16), (16, 0)]):
        before = np.asarray(memory.tables.address)
        memory = experts.grant(memory, cells)
        after = np.asarray(memory.tables.address)
        assert ((after == before) | (after == -1)).all()
        granted = np.asarray(memory.tables.cell_row)
        assert tuple(np.sum(granted >= 0, axis=1)) == cells
        found, memory = run(compiled, memory, xs[i : i + 1])
        np.testing.assert_array_equal(found[0], resident[i])
        assert faults(experts, memory) == 0
    assert (after[0] >= 0).any()


def test_the_arena_is_updated_in_place(experts, compiled):
    memory = experts.allocate()
    program = read_executable(compiled[0])
    assert program.copies(experts.layout.nbytes + 1) == []
    donated = sum(leaf.nbytes for leaf in jax.tree.leaves(memory))
    assert program.memory.alias_bytes == donated
    assert program.memory.temp_bytes < memory.arena.nbytes // 4


# ---- weights


def test_records_are_those_of_a_checkpoint(demo_dir):
    loaded = load_checkpoint(demo_dir)
    experts = PagedExperts(loaded.store, loaded.dtype)
    assert (experts.layers, experts.experts) == (4, 16) and experts.layout == loaded.layout
    assert experts.records.get_value() is loaded.store.arrays["dense"]


def test_arrays_become_records_one_layer_at_a_time():
    class Layers:
        alive = 0

        def __len__(self):
            return L

        def __getitem__(self, i):
            if i >= L:
                raise IndexError
            return weights()[i]

    made = PagedExperts.from_arrays(Layers(), "bfloat16")
    records = np.asarray(made.records.get_value())
    assert made.records.get_value().sharding.memory_kind == "pinned_host"
    for layer, (gate, up, down) in enumerate(weights()):
        wanted = record_of(gate[3], up[3], down[3], np.dtype("bfloat16"))
        np.testing.assert_array_equal(records[layer, 3], wanted)


def test_the_records_are_state_once(experts, model):
    _, records, params = nnx.split(model, HostRecords, ...)
    assert len(jax.tree.leaves(records)) == 1
    assert (
        all(leaf.shape == (E, D) for leaf in jax.tree.leaves(params))
        and len(jax.tree.leaves(params)) == L
    )


# ---- kernels


def test_the_kernels_of_a_layer_are_checked(experts):
    ops = resolve_ops("auto", platform="gpu", dtype="bfloat16")
    half = PagedExperts.from_arrays(weights(), "bfloat16")
    checked = kernel_checks(ops, *half.kernel_shape(), RULE)
    assert {check.op for check in checked} == set(OPS_USED)
    assert all(f"{E}x{D} " in check.key for check in checked if check.op == "linear")
    assert kernel_checks(resolve_ops("xla"), *half.kernel_shape(), RULE) == []


@pytest.fixture
def as_on_gpu(monkeypatch, tmp_path):
    monkeypatch.setitem(dispatch.AUTO, "cpu", ("pallas", "xla"))
    monkeypatch.setattr(layers, "_are_checked", lambda device: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with interpreted():
        yield


def test_a_layer_takes_the_kernels_that_were_found_right(as_on_gpu, monkeypatch, caplog):
    half = PagedExperts.from_arrays(weights(), "bfloat16")

    def ops_of(ops="auto", row_tile=16):
        layer = PagedMoE(half, 0, RULE, rngs=nnx.Rngs(0), ops=ops, row_tile=row_tile)
        return {op: name for op, name in layer.ops.chosen().items() if op in OPS_USED}

    layers._warn.cache_clear()
    for _ in range(2):  # which the log says once
        assert set(ops_of().values()) == {"xla"}
    (message,) = caplog.messages
    assert NOT_CHECKED in message
    wanted = kernel_checks(resolve_ops("auto", dtype="bfloat16"), *half.kernel_shape(), RULE)
    platform = half.device.client.platform_version
    known = {
        check.key: table.Entry(None, table.digest(), platform, "it deviates by 1")
        if check.op == "combine"
        else table.Entry(0.0, table.digest(), platform, "")
        for check in wanted
    }
    checked_folder().mkdir(parents=True, exist_ok=True)
    path = checked_folder() / table.file_name(half.device.device_kind)
    table.write_table(path, half.device, known, 0)
    assert ops_of() == {**dict.fromkeys(OPS_USED, "pallas"), "combine": "xla"}
    assert caplog.messages[-1].startswith("in XLA, not as kernels: combine; it deviates by 1")
    assert set(ops_of(row_tile=8).values()) == {"xla"}
    # What is named is checked, and refused if it is wrong.
    ran = []

    def refuse(job, *_):
        ran.extend(check.op for check in job.checks())
        raise ValueError("it deviates by 1")

    monkeypatch.setattr(layers, "require_verified", refuse)
    with pytest.raises(UserError, match="it deviates by 1"):
        ops_of("pallas")
    assert "combine" in ran


# ---- the example


@pytest.mark.slow
def test_the_example(capsys):
    example.main(["--budget", "25%", "--length", "6"])
    out = capsys.readouterr().out
    assert "0.56 of 2.25 MiB of experts on the device" in out
    assert "none for the others: the same tokens" in out and "read_through" in out


# ---- refusals


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda e: e.allocate("half"), "'half' is not an expert budget"),
        (lambda e: e.allocate(eviction="mru"), "eviction 'mru' is unknown; known: lru"),
        (lambda e: e.grant(e.allocate(0), [1, 1]), "2 cells are more than the 1 that the arena"),
        (lambda e: e.grant(e.allocate(), [1]), "cells must be 2 numbers from 0 to 16"),
        (lambda e: e.grant(e.allocate(), [17, 0]), "cells must be 2 numbers from 0 to 16"),
        (lambda e: PagedMoE(e, 2, RULE, rngs=nnx.Rngs(0)), "layer 2 does not exist; there are 2"),
        (lambda e: PagedMoE(e, 0, RULE), "give the router's weights as router, or rngs"),
        (lambda e: PagedMoE(e, 0, RULE, router=np.ones((D, E))), r"must be \[16, 64\]"),
        (lambda e: PagedMoE(e, 0, RouteRule(top_k=17), rngs=nnx.Rngs(0)), "there are 16 experts"),
        (lambda e: PagedMoE(e, 0, RULE, rngs=nnx.Rngs(0), row_tile=0), "must be at least 1"),
        (lambda e: PagedMoE(e, 0, RULE, rngs=nnx.Rngs(0), waves=0), "must be at least 1"),
        (lambda e: PagedMoE(e, 0, RULE, rngs=nnx.Rngs(0), ops="plan=pallas"), "need an NVIDIA GPU"),
        (lambda e: PagedExperts(_store(e), "bfloat16"), "bfloat16 is not that of the records"),
        (lambda e: PagedExperts(_store(e), "int8"), "dtype 'int8' is unknown"),
        (lambda e: PagedExperts(_store(e), "float32", "tanh"), "activation 'tanh' is unknown"),
        (lambda e: PagedExperts.from_arrays([]), "there are no layers"),
    ],
)
def test_refusals(experts, make, match):
    with pytest.raises(UserError, match=match):
        make(experts)


def _store(experts):
    from host_offload.memory.store import ExpertStore, StoredVersion

    held = StoredVersion(experts.layout, experts.records.get_value())
    return ExpertStore({"dense": held})


def test_kernels_have_row_tiles_that_were_checked():
    half = PagedExperts.from_arrays(weights(), "bfloat16")
    with interpreted(), pytest.raises(UserError, match=r"row_tile is 8; .* \(16, 64\) rows"):
        PagedMoE(half, 0, RULE, rngs=nnx.Rngs(0), row_tile=8, ops="plan=pallas")


def test_weights_that_do_not_fit_are_refused():
    (gate, up, down), other = weights()[0], weights(width=32, layers=1)[0]
    with pytest.raises(UserError, match=r"layer 0: gate \[16, 96, 64\], up .* must be \[E, I, D\]"):
        PagedExperts.from_arrays([(gate, up, gate)])
    with pytest.raises(UserError, match=r"layer 1: gate is \[16, 32, 64\], that of layer 0"):
        PagedExperts.from_arrays([(gate, up, down), other])


def test_flax_kernels_are_turned_and_square_ones_need_a_word(experts):
    turned = [tuple(np.swapaxes(part, 1, 2) for part in layer) for layer in weights()]
    flax = PagedExperts.from_arrays(turned, "float32", layout="flax")
    mine, theirs = (np.asarray(each.records.get_value()) for each in (experts, flax))
    np.testing.assert_array_equal(mine, theirs)
    square = weights(hidden=64, width=64)
    with pytest.raises(UserError, match="do not show their axes; say layout="):
        PagedExperts.from_arrays(square)
    PagedExperts.from_arrays(square, layout="torch")
    with pytest.raises(UserError, match="layout is 'torch' or 'flax', not 'jax'"):
        PagedExperts.from_arrays(square, layout="jax")


def test_gradients_and_vmap_are_refused_in_a_sentence(experts):
    moe = PagedMoE(experts, 0, RULE, rngs=nnx.Rngs(0))
    memory, x = experts.allocate("25%"), jnp.ones((4, D))
    with pytest.raises(UserError, match="is for inference and has no gradient"):
        jax.grad(lambda x: moe(x, memory)[0].sum())(x)
    with pytest.raises(UserError, match="is for inference and has no gradient"):
        nnx.grad(lambda moe: moe(x, memory)[0].sum())(moe)
    with pytest.raises(UserError, match="cannot be batched by vmap"):
        jax.vmap(lambda x: moe(x, memory)[0])(x[:, None])
    frozen = jax.grad(lambda x: (x * moe(jax.lax.stop_gradient(x), memory)[0]).sum())(x)
    np.testing.assert_array_equal(frozen, moe(x, memory)[0])


def test_a_host_that_is_too_small_is_refused(monkeypatch):
    def refuse(*_):
        raise MemoryError("cannot allocate 9 GiB of pinned host memory")

    monkeypatch.setattr("moejax.nn.StoreBuilder", refuse)
    with pytest.raises(UserError, match="cannot allocate 9 GiB of pinned host memory"):
        PagedExperts.from_arrays(weights())


def test_inputs_that_do_not_fit_are_refused(experts, model):
    memory, moe = experts.allocate(), model.moes[0]
    with pytest.raises(
        ValueError, match=r"x is float32\[5, 32\], the experts take float32\[..., 64"
    ):
        moe(jnp.zeros((ROWS, 32)), memory)
    with pytest.raises(ValueError, match=r"x is bfloat16\[5, 64\]"):
        moe(jnp.zeros((ROWS, D), jnp.bfloat16), memory)
    other = PagedExperts.from_arrays(weights(experts=4), "float32").allocate()
    with pytest.raises(ValueError, match="memory is not of these experts"):
        moe(jnp.zeros((ROWS, D)), other)
