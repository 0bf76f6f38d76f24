"""An arena that the native library owns: the ops' bytes, its order, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.memory import device_memory
from host_offload.memory.arena import own_arena
from host_offload.memory.layout import PageLayout
from host_offload.memory.swap import move_pages, read_pages, write_pages
from pallas_kernels.cpu.arena import ArenaMemory, OwnedArena, move_rows, read_rows, write_rows
from pallas_kernels.fill import Fills, fill
from tests.faults import delay_arena
from tests.pallas_kernels.contract import NATIVE, pinned

pytestmark = NATIVE

ERRORS = (ValueError, jax.errors.JaxRuntimeError)
"""Which of them a handler's refusal becomes is jax's choice."""

ROWS, HIDDEN = 64, 16
STORE = np.arange(2 * 3 * 8 * HIDDEN, dtype=np.uint16).reshape(2, 3, 8, HIDDEN)


def ints(*values):
    return np.array(values, np.int32)


@pytest.fixture
def memory():
    memory = ArenaMemory(ROWS, HIDDEN)
    memory.view()[:] = np.arange(ROWS * HIDDEN).reshape(ROWS, HIDDEN)
    yield memory
    memory.close()


def on(memory: ArenaMemory) -> OwnedArena:
    return memory.on(jax.devices()[0])


def filled(arena, *, row=8, expert=2, layer=1, version=0):
    fills = Fills(ints(expert), ints(row), ints(version), np.int32(1))
    return fill(arena, (pinned(STORE), pinned(STORE)), layer, fills, implementation="cpu")


def test_writes_are_where_those_of_an_array_are(memory):
    """Every way to write: between them a token says which comes after which."""
    page = PageLayout(layers=1, rows_per_token=2, row_values=8, itemsize=2, block_size=4)
    assert page.rows * page.row_elements == 4 * HIDDEN
    values = tuple(jnp.full(page.nbytes // 2, n, jnp.uint16) for n in (7, 8))

    def steps(arena):
        arena = filled(arena)
        arena = write_pages(arena, values, ints(0, 8), jnp.int32(1), page)
        arena = move_pages(arena, ints(0, 0), ints(40, 40), page)
        arena = move_rows(arena, ints(8, 9), ints(50, 9), ints(8, 0), width=HIDDEN)
        return arena, read_pages(arena, ints(40, 0), page)

    start = jnp.array(memory.view())
    after, pages = jax.jit(steps)(on(memory))
    jax.block_until_ready(after)
    want = np.array(start)
    want[8:16] = STORE[1, 2]
    want[:4] = 7
    want[20:24], want[50:58] = want[:4], want[8:16]
    np.testing.assert_array_equal(memory.view(), want)
    for got in pages:
        np.testing.assert_array_equal(got, np.full(page.nbytes // 2, 7))
    assert after.token.tolist() == memory.token().tolist() == [memory.handle, 4]
    # The same ops on an array: what a program without the library's memory has.
    array = filled(start)
    array = move_rows(array, ints(8, 9), ints(50, 9), ints(8, 0), width=HIDDEN)
    np.testing.assert_array_equal(np.array(array)[8:16], memory.view()[8:16])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: filled(a, row=57), "fill: entry 0, expert 2 of layer 1, has row 57 of an"),
        (lambda a: filled(a, row=-1), "has row -1"),
        (lambda a: filled(a, expert=3), "expert 3 of layer 1, is not in its version's store"),
        (lambda a: filled(a, layer=2), "of layer 2, is not in its version's store"),
        (lambda a: filled(a, version=2), "has version 2"),
        (
            lambda a: move_rows(a, ints(0), ints(57), ints(8), width=HIDDEN),
            "move: 8 rows from 57 on are not among 64",
        ),
        (
            lambda a: read_rows(a, ints(-1), 8, width=HIDDEN),
            "read: 8 rows from -1 on are not among 64",
        ),
        (
            lambda a: write_rows(a, (jnp.zeros(32, jnp.uint16),), ints(127), 1, width=8),
            "write: 4 rows from 127 on are not among 128",
        ),
    ],
)
def test_a_place_that_is_not_there_is_refused_and_nothing_is_lost(memory, call, message):
    before = memory.view().copy()
    with pytest.raises(ERRORS, match=message):
        jax.block_until_ready(call(on(memory)))
    np.testing.assert_array_equal(memory.view(), before)
    # The next one goes on where that one was.
    jax.block_until_ready(filled(on(memory)))
    np.testing.assert_array_equal(memory.view()[8:16], STORE[1, 2])


def test_a_closed_or_unknown_arena_is_refused():
    memory = ArenaMemory(ROWS, HIDDEN)
    arena, handle = on(memory), memory.handle
    memory.close()
    memory.close()  # twice is fine
    for number in (handle, 0, 2**32 - 1):
        token = jnp.array([number, 0], jnp.uint32)
        with pytest.raises(ERRORS, match=f"fill: there is no arena {number}, or it was closed"):
            jax.block_until_ready(filled(OwnedArena(token, ROWS, HIDDEN)))
    with pytest.raises(ERRORS, match="there is no arena"):
        jax.block_until_ready(read_rows(arena, ints(0), 8, width=HIDDEN))
    wrong = OwnedArena(jnp.zeros(3, jnp.uint32), ROWS, HIDDEN)
    with pytest.raises(ERRORS, match=r"neither uint16\[rows, D\] nor a token"):
        jax.block_until_ready(filled(wrong))
    assert ArenaMemory(ROWS, HIDDEN).handle > handle, "a handle is given twice"


def test_more_memory_than_there_is_is_refused():
    with pytest.raises(MemoryError, match=r"no memory for an arena of .* GiB"):
        ArenaMemory(2**44, HIDDEN)


def test_what_an_arena_was_promised_is_not_free(monkeypatch):
    """Else two engines would each take all memory, and the system end one of them later."""
    monkeypatch.setattr(device_memory, "host_available_bytes", lambda: 2**40)
    cpu, size, row = jax.devices("cpu")[0], 16 << 20, 2048
    before = device_memory.free_memory(cpu).free
    memory = own_arena(size // (2 * row), row)
    assert memory.promised == before - device_memory.free_memory(cpu).free == size
    memory.view()[: size // (4 * row)] = 1
    assert memory.promised == size // 2
    memory.close()
    assert memory.promised == 0 and device_memory.free_memory(cpu).free == before


def test_other_ops_do_not_take_it(memory):
    fills = Fills(*map(jnp.array, (ints(2), ints(8), ints(0))), jnp.int32(1))
    with pytest.raises(TypeError, match="OwnedArena"):
        fill(on(memory), (pinned(STORE),), 1, fills, implementation="xla")


def test_a_read_that_a_write_overtakes_is_found(memory):
    """The read waits for a product that the write does not wait for: XLA, which may run both at
    once, takes them to be of two arenas and copies the token."""

    def late(x):
        for _ in range(4):
            x = jnp.tanh(x @ x)
        return (x[0, :1] > jnp.inf).astype(jnp.int32)

    def step(arena, x, dependent):
        (got,) = read_rows(arena, late(x), 8, width=HIDDEN)
        after = late(got[:1].reshape(1, 1).astype(jnp.float32)) if dependent else 0
        fills = Fills(ints(2) + after, ints(8), ints(0), np.int32(1))
        return fill(arena, (pinned(STORE),), 1, fills, implementation="cpu"), got

    x = jnp.ones((768, 768))
    for dependent in (True, False):
        compiled = jax.jit(lambda *given, d=dependent: step(*given, d), donate_argnums=0)
        program = compiled.lower(on(memory), x).compile()
        assert ("u32[2]{0} copy(" in program.as_text()) == (not dependent)
        delay_arena(memory, 2000)
        if dependent:
            jax.block_until_ready(program(on(memory), x))
        else:
            with pytest.raises(ERRORS, match=r"a (read|write) of the arena is out of order"):
                jax.block_until_ready(program(on(memory), x))
