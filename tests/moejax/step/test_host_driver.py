"""driver="host": every output of the device driver to the bit (contract 1e), and hooks. Requests'
bits are in test_same_bits.py, memory in test_constant_memory.py."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import moejax.models.layers
import moejax.step.experts
from host_offload.control.interface import Moment
from moejax import LLM
from moejax.step import compiler, layer_walk
from moejax.step.compiler import compiler_options
from moejax.step.programs import STAGES
from moejax.step.step_parts import StepOutput
from pallas_kernels.stage import Entries
from tests.moejax.engine.scenes import EXPERTS, LAYERS
from tests.moejax.engine.test_same_bits import (
    POOL,
    full_residency,
    make_llm,
)
from tests.moejax.engine_runs import Job, run, set_budget

KV_SLOTS = 11
"""What the experts leave of these limits' arena where all are resident."""


@pytest.fixture(
    scope="module", params=[pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"]
)
def drivers(request):
    """(device, host): the demo model under both drivers."""
    with (
        make_llm(request.param) as device,
        make_llm(request.param, driver="host") as host,
    ):
        yield device, host


@pytest.fixture(scope="module")
def host(drivers):
    return drivers[1]


@pytest.fixture(scope="module")
def solo(drivers):
    """The first requests of the pool alone under the device driver, everything resident."""
    set_budget(drivers[0], *full_residency(drivers[0]))
    return [run(drivers[0], [job])[0] for job in POOL[:9]]


@pytest.fixture
def hooked(host):
    """Gives the engine's next steps hooks, as policies that look between layers do."""

    def use(hooks):
        host.engine.hooks = lambda _: hooks
        return host.engine.runner

    yield use
    host.engine.hooks = None


def entries(*moves: tuple[int, int, int]) -> Entries:
    """Of (layer, expert, cell) each, padded with unused ones."""
    rows = [*moves, *[(-1, -1, -1)] * (STAGES - len(moves))]
    layer, expert, cell = np.asarray(rows, np.int32).T
    return Entries._make((layer, expert, np.zeros(STAGES, np.int32), cell))


def random_entries(rng: np.random.Generator) -> Entries:
    layer, cell = rng.integers(-1, LAYERS, STAGES), rng.integers(0, 9, STAGES)
    draws = (layer, rng.integers(0, EXPERTS, STAGES), 0 * layer, cell)
    return Entries._make(values.astype(np.int32) for values in draws)


def cold_start(llm: LLM, cells: list[int]) -> None:
    """Budgets, with nothing left of earlier runs: residents, and the tokens of unused rows, whose
    logits mean nothing but are compared."""
    state = llm.engine.runner.tokens
    tokens = state.tokens
    state.tokens = jax.device_put(np.zeros(tokens.shape, np.int32), tokens.sharding)
    set_budget(llm, [0] * LAYERS, KV_SLOTS)
    set_budget(llm, cells, KV_SLOTS)


def outputs_of(llm: LLM, jobs, monkeypatch, given: Callable[..., dict] = dict) -> list[StepOutput]:
    """Every output of every step as numpy. given: more arguments of a step."""
    outputs = []
    with monkeypatch.context() as patch:
        for kind in ("decode", "prefill"):
            step = getattr(llm.engine.runner, kind)

            def recording(*args, step=step, **kwargs):
                outputs.append(step(*args, **(kwargs | given())))
                return outputs[-1]

            patch.setattr(llm.engine.runner, kind, recording)
        # Rows in the order of arrival, whatever ran before.
        llm.engine.scheduler.free_rows.sort()
        run(llm, jobs)
    return [jax.tree.map(np.asarray, output) for output in outputs]


def assert_same_outputs(found: list[StepOutput], wanted: list[StepOutput]) -> None:
    """Bit for bit, every field: logits and scores, routing, paging, what was missed and staged.
    Rows without a sequence and tokens without a place mean nothing, and are equal all the same."""
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert x.dtype == y.dtype and x.shape == y.shape
            assert x.tobytes() == y.tobytes()


def sometimes_staged() -> Callable[[], dict]:
    rng = np.random.default_rng(3)
    return lambda: {"stages": random_entries(rng)} if rng.random() < 0.7 else {}


# ---- bits


def test_every_output_of_a_step_is_the_same(drivers, monkeypatch):
    """Also beside transfers that the host chose, and of scores."""
    jobs = [Job(job.prompt, job.params, i) for i, job in enumerate(POOL[:7])]
    found = []
    for llm in drivers:
        cold_start(llm, [5, 2, 0, 9])
        found.append(outputs_of(llm, jobs, monkeypatch, sometimes_staged()))
    assert_same_outputs(found[1], found[0])
    assert sum(int(o.staged.sum()) for o in found[1] if o.staged is not None) > 0
    tokens = list(POOL[9].prompt)
    a, b = (llm.score(tokens) for llm in drivers)
    assert a.tobytes() == b.tobytes() and len(a) == len(tokens) - 1


@pytest.mark.slow
def test_recorded_routing_gives_the_same_bits_and_another_is_used(drivers, monkeypatch):
    jobs = [Job(job.prompt, job.params, i) for i, job in enumerate(POOL[:5])]
    for llm in drivers:
        cold_start(llm, [5, 2, 0, 9])
    free = outputs_of(drivers[0], jobs, monkeypatch)
    for llm in drivers:
        cold_start(llm, [5, 2, 0, 9])
        left = iter([o.routing for o in free])
        forced = outputs_of(llm, jobs, monkeypatch, lambda left=left: {"forced": next(left)})
        assert_same_outputs(forced, free)

        changed = [o.routing._replace(ids=np.sort((o.routing.ids + 1) % EXPERTS)) for o in free]
        left = iter(changed)
        other = outputs_of(llm, jobs[:1], monkeypatch, lambda left=left: {"forced": next(left)})
        used = free[0].routing.ids < EXPERTS
        np.testing.assert_array_equal(other[0].routing.ids[used], changed[0].ids[used])
        assert (other[0].routing.ids[~used] == EXPERTS).all()  # padding stays padding
        assert (other[0].logits[0] != free[0].logits[0]).any()


@pytest.mark.slow
def test_wrong_layer_index_is_found(host, solo, monkeypatch):
    set_budget(host, *full_residency(host))
    assert run(host, POOL[3:4])[0].same_bits(solo[3])
    with monkeypatch.context() as patch:
        first, second, *others = host.engine.runner.walk._layers
        swapped = second._replace(moe_layer=first.moe_layer)
        patch.setattr(host.engine.runner.walk, "_layers", [first, swapped, *others])
        assert not run(host, POOL[3:4], check=False)[0].same_bits(solo[3])


@pytest.mark.nightly
@pytest.mark.usefixtures("own_programs")
def test_missing_barriers_are_found(monkeypatch):
    """Where XLA may keep more precision than a border has, a scan and separate executables differ,
    unless there are barriers. Either guard is enough on CPU; the engine has both."""

    def recorded(options):
        monkeypatch.setattr(compiler, "compiler_options", lambda platform, key=None: options)
        found = []
        for driver in ("device", "host"):
            with make_llm("bfloat16", driver=driver) as llm:
                found.append(run(llm, POOL[:6], check=False))
        return [a.same_bits(b) for a, b in zip(*found, strict=True)]

    excess = {"xla_allow_excess_precision": True}
    assert all(recorded(excess))
    for module in (moejax.models.layers, moejax.step.experts):
        lax = SimpleNamespace(**{**vars(module.lax), "optimization_barrier": lambda x: x})
        monkeypatch.setattr(module, "lax", lax)
    assert all(recorded(compiler_options("cpu")))
    assert not any(recorded(excess))


# ---- hooks


class Recorder:
    """Hooks that write down what they are called with. raises: (number of the call, an error)."""

    def __init__(self, raises: tuple[int, BaseException] | None = None):
        self.calls: list[tuple] = []
        self.raises = raises

    def __call__(self, *call) -> None:
        self.calls.append(call)
        if self.raises and len(self.calls) == self.raises[0]:
            raise self.raises[1]


ORDER = (Moment.LAYER_BEGIN, Moment.ROUTED, Moment.EXPERTS_BEGIN)


def test_hooks_come_in_order_and_see_the_routing(host, hooked, monkeypatch):
    recorder = Recorder()
    set_budget(host, [3] * LAYERS, KV_SLOTS)
    hooked(recorder)
    outputs = outputs_of(host, POOL[3:5], monkeypatch)
    step = [(what, layer) for layer in range(LAYERS) for what in ORDER]
    expected = [(Moment.EMBEDDED, -1), *step] * len(outputs)
    assert [call[:2] for call in recorder.calls] == expected
    seen = [known for _, _, known in recorder.calls if known is not None]
    wanted = [(o.routing.ids[n], o.routing.weights[n]) for o in outputs for n in range(LAYERS)]
    for (ids, weights), (step_ids, step_weights) in zip(seen, wanted, strict=True):
        assert ids.dtype == np.int32 and weights.dtype == np.float32
        np.testing.assert_array_equal(ids, step_ids)
        np.testing.assert_array_equal(weights, step_weights)
    assert any((ids < EXPERTS).any() for ids, _ in seen)


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.slow), 3 * LAYERS + 2])
def test_a_hook_that_raises_ends_its_step_and_nothing_else(host, solo, hooked, number):
    set_budget(host, [3] * LAYERS, KV_SLOTS)
    for error in (RuntimeError("a hook"), KeyboardInterrupt()):
        hooked(Recorder((number, error)))
        with pytest.raises(type(error)):
            host.generate([list(POOL[3].prompt)] * 2, POOL[3].params)
        assert host.engine.idle and host.engine.runner.faults() == []
    hooked(None)
    assert run(host, POOL[3:4])[0].same_bits(solo[3])


def test_without_hooks_nothing_is_read_back_and_nothing_compiles_again(host, hooked, monkeypatch):
    hooked(Recorder())
    run(host, POOL[:2])
    before = host.engine.runner.executables()
    parts = ("embed", "attend.0", "route.0", "experts", "output")
    wanted = {f"{s}/{part}" for s in ("decode", "prefill") for part in parts}
    assert wanted <= {*map(str, before)}
    set_budget(host, [1, 0, 16, 3], 9, "lfu")
    hooked(None)
    run(host, POOL[:4])
    assert host.engine.runner.executables() == before
    # Only numpy reads an array back.
    monkeypatch.setattr(layer_walk, "np", SimpleNamespace())
    run(host, POOL[:2])
