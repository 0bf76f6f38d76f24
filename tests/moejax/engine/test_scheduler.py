"""Admission, preemption, sharing and sessions, over a model of the device."""

from __future__ import annotations

import numpy as np
import pytest

from host_offload.memory.kv_cache import KVCache
from moejax.engine.prefix_cache import block_keys
from moejax.engine.scheduler import HELD_STEPS
from moejax.engine.statistics import kv_stats
from moejax.errors import UserError
from moejax.requests.sessions import common_prefix
from tests.moejax.engine.scheduler_model import BLOCK, CHUNK, WINDOWS, Device, Turn, run

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

SMALL = {"rows": 8, "prefill_chunks": 4, "max_model_len": 512}


def workload(rng: np.random.Generator, size: int) -> list[Turn]:
    """Sessions, shared beginnings, priorities, cancellations, arrivals."""
    documents = [tuple(rng.integers(1, 97, n).tolist()) for n in (40, 64, 130, 200)]
    turns = []
    for i in range(size):
        session = None if rng.random() < 0.5 else f"s{rng.integers(4)}"
        old = [t for t in turns if t.session == session]
        length = int(rng.integers(1, 40))
        prompt = tuple(rng.integers(1, 97, length).tolist())
        if not old and rng.random() < 0.7:
            prompt = documents[rng.integers(len(documents))] + prompt[: rng.integers(1, length + 1)]
        turns.append(
            Turn(
                prompt,
                max_tokens=int(rng.integers(1, 40)) * (1 + 2 * int(rng.random() < 0.3)),
                session=session if len(old) < 4 else None,
                priority=int(rng.integers(0, 3)),
                arrival=int(rng.integers(0, i // 2 + 1)),
                abort=int(rng.integers(1, 30)) if rng.random() < 0.25 else None,
                rewrite=int(rng.integers(0, 30)) if rng.random() < 0.5 else 0,
                fork=f"s{rng.integers(4)}" if rng.random() < 0.5 else None,
            )
        )
    return turns


# The fork's history holds few generated tokens inside of a block that a later prompt completes.
FORKS = [
    Turn(tuple(range(1, 21)), 5, "s0"),
    Turn(tuple(range(30, 70)), 5, "s0"),
    Turn((70, 71), 9, fork="s0", arrival=30),
    Turn((72, 73), 9, "s0", arrival=40),
]


def alone(turns: list[Turn], outputs: list, windows: tuple = (None,)) -> list[list[int]]:
    """Each request by itself, sessions alone with their turns in order, everything fitting."""
    expected: list[list[int]] = [[] for _ in turns]
    for name in {t.session for t in turns if t.session is not None}:
        of_session = [i for i, t in enumerate(turns) if t.session == name]
        device = Device(pages=512, windows=windows, **SMALL)
        kept = [turns[i] for i in of_session if outputs[i].finish_reason != "abort"]
        done = run(device, [Turn(t.prompt, t.max_tokens, name, rewrite=t.rewrite) for t in kept])
        results = iter(done)
        for i in of_session:
            if outputs[i].finish_reason != "abort":
                expected[i] = next(results).output
    for i, turn in enumerate(turns):
        if turn.session is None:
            device = Device(pages=512, windows=windows, **SMALL)
            prompt = tuple(outputs[i].prompt)
            expected[i] = run(device, [Turn(prompt, turn.max_tokens)])[0].output
    return expected


def check_against_alone(turns: list[Turn], requests: list, windows: tuple = (None,)) -> None:
    expected = alone(turns, requests, windows)
    for turn, request, tokens in zip(turns, requests, expected, strict=True):
        if request.finish_reason == "abort" and turn.session is None:
            assert request.output == tokens[: len(request.output)]
        elif request.finish_reason != "abort":
            assert request.output == tokens


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("seed", range(12))
def test_random_workloads_change_no_token(seed, windows):
    rng = np.random.default_rng(seed)
    turns = workload(rng, 24)
    # 32 pages of 16: one request of the largest kind fits, eight do not.
    given = {"pages": int(rng.integers(32, 50)), "windows": WINDOWS[windows], **SMALL}
    device = Device(admission=1 + seed % 3, **given)
    requests = run(device, turns)
    check_against_alone(turns, requests, WINDOWS[windows])
    stats = kv_stats(device.scheduler)
    for name in [s.session_id for s in device.scheduler.sessions.all]:
        device.scheduler.sessions.end(name)
    assert stats["pages"]["running"] == 0 and device.scheduler.cache.swapped == 0
    assert device.scheduler.cache.available + len(device.spare) == device.scheduler.arena.pages


def test_a_fork_of_a_session_shares_only_what_came_through_the_prefill_path():
    device = Device(pages=64, **SMALL)
    requests = run(device, FORKS)
    check_against_alone(FORKS, requests)
    assert requests[2].cached_tokens == BLOCK and requests[3].cached_tokens > 4 * BLOCK


def test_the_workloads_reach_what_they_are_for():
    totals: dict[str, int] = {}
    for seed in range(6):
        device = Device(pages=32, **SMALL)
        run(device, workload(np.random.default_rng(seed), 24))
        for name, value in kv_stats(device.scheduler).items():
            if isinstance(value, int):
                totals[name] = totals.get(name, 0) + value
    for name in ("preemptions", "prefix_hit_tokens", "session_hit_tokens", "sessions_evicted"):
        assert totals[name] > 0, name


def test_pages_behind_a_window_come_back():
    device = Device(pages=64, windows=WINDOWS["alternating"], **SMALL)
    held = []
    device.add([5] * 300, Turn((), 100, "a"))
    while not device.scheduler.idle:
        device.step()
        held.append([group["pages"] for group in kv_stats(device.scheduler)["page_groups"]])
    whole, windowed = zip(*held, strict=True)
    assert whole[-1] == max(whole) > 18 and max(windowed) == 16, "a step of 4 chunks"
    assert windowed[-1] <= 7, "the session keeps what its next turn reads"
    assert device.scheduler.counts["pages_behind_windows"] >= whole[-1] - 7
    device.scheduler.check(412, 100)  # 32 pages of all tokens, 12 of the window


@pytest.mark.parametrize(
    ("pages", "turns"),
    [
        # The second moves out in the step that writes the state it found.
        (29, [Turn((*range(256),), 3), Turn((*range(256),), 3)]),
        # The second has no room beside the state that it found.
        (10, [Turn((*range(70),), 1), Turn((*range(127),), 1, arrival=9)]),
    ],
    ids=["moved out", "no room"],
)
def test_a_state_that_was_found_is_whole_or_computed_again(pages, turns):
    given = {"rows": 2, "prefill_chunks": 2, "max_model_len": 320, "windows": WINDOWS["state"]}
    check_against_alone(turns, run(Device(pages=pages, **given), turns), WINDOWS["state"])


def test_an_idle_arena_can_be_emptied_of_states():
    device = Device(pages=64, windows=WINDOWS["state"], **SMALL)
    request = device.add([5] * 300, Turn((), 2))
    while not device.scheduler.states:
        device.step()
    stats = kv_stats(device.scheduler)
    assert stats["state_pages"] == WINDOWS["state"].state_pages
    spare = len(device.spare)
    pages = stats["pages"]["running"] + stats["pages"]["cached"] + stats["pages"]["free"]
    assert pages + spare == device.scheduler.arena.pages
    device.abort(request)
    device.scheduler.move_out_all()
    assert device.scheduler.arena.free_pages + spare == device.scheduler.arena.pages


def test_pages_that_are_not_brought_back_are_found(monkeypatch):
    def swap_in(cache, blocks):
        for block in blocks:
            block.row = 0

    monkeypatch.setattr(KVCache, "swap_in", swap_in)
    turns = workload(np.random.default_rng(0), 24)
    device = Device(pages=32, **SMALL)
    with pytest.raises((AssertionError, KeyError, ValueError, RuntimeError)):
        check_against_alone(turns, run(device, turns))


def test_a_session_dropped_by_recompute_says_so():
    device = Device(pages=20, overflow="recompute", **SMALL)
    turns = [
        Turn((5,) * 100, 3, "a"),
        Turn((6,) * 250, 3, arrival=20),
        Turn((7,), 3, "a", arrival=40),
        Turn((8,), 3, "a", arrival=60),  # what follows a recomputed turn says so too
    ]
    assert [r.recomputed for r in run(device, turns)] == [False, False, True, True]


def test_priority_then_arrival():
    device = Device(pages=64, rows=1, prefill_chunks=4, max_model_len=256)
    turns = [Turn((9,) * 5, 2), Turn((8,) * 5, 2), Turn((7,) * 5, 2, priority=-1)]
    order = []
    release = device.scheduler.release
    device.scheduler.release = lambda request: (order.append(request.number), release(request))
    run(device, turns, check=False)
    assert order == [2, 0, 1]


def test_a_long_prompt_is_not_passed_over_and_stalls_nobody():
    device = Device(pages=64, rows=4, prefill_chunks=4, max_model_len=1024)
    short = [Turn((i + 1,) * 10, 60) for i in range(3)]
    long = Turn((50,) * 640, 2, arrival=4)
    later = [Turn((60 + i,) * 10, 30, arrival=5) for i in range(4)]
    requests = run(device, [*short, long, *later])
    number, works = requests[3].number, device.works
    prefill_steps = [w for w in works if w and any(c.request.number == number for c in w.chunks)]
    assert len(prefill_steps) == 10  # one chunk of 64 at a time: a quarter of the prefill step
    first, last = works.index(prefill_steps[0]), works.index(prefill_steps[-1])
    between = works[first:last]
    assert sum(bool(w.rows) for w in between) >= 9  # decode goes on in between
    # Those that came later did not begin before it.
    starts = [i for i, w in enumerate(works) if w and any(r.number > number for r in w.placed)]
    assert starts[0] >= first


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_share_the_prompt_from_the_first_prefill_step_on(caching):
    device = Device(pages=64, prefix_caching=caching, **SMALL)
    run(device, [Turn(tuple(range(1, 60)), 4)] * 4)
    # Three whole blocks of 16 each, for three followers.
    assert kv_stats(device.scheduler)["prefix_hit_tokens"] == caching * 3 * 3 * BLOCK


def test_a_full_swap_space_is_stuck_and_says_so():
    device = Device(pages=12, swap_bytes=0, **SMALL)
    turns = [Turn((1,) * 170, 4, "a"), Turn((2,) * 170, 4, "b", arrival=20)]
    with pytest.raises(RuntimeError, match="stuck"):
        run(device, turns)


def test_sessions_end():
    device = Device(pages=64, **SMALL)
    with pytest.raises(UserError, match="no session 'a'"):
        device.scheduler.sessions.end("a")
    request = device.add([1, 2, 3], Turn((), 3, "a"))
    with pytest.raises(UserError, match="not ended"):
        device.scheduler.sessions.end("a")
    while request.finish_reason is None:
        device.step()
    device.scheduler.sessions.end("a")
    assert device.scheduler.arena.free_pages + len(device.spare) == device.scheduler.arena.pages


def test_admission_waits_for_enough_rows_while_others_decode():
    device = Device(pages=64, rows=4, prefill_chunks=4, max_model_len=256, admission=3)
    turns = [Turn((i + 1,) * 3, 5 + 4 * i) for i in range(4)] + [
        Turn((i + 30,) * 3, 5) for i in range(6)
    ]
    run(device, turns)
    works = [w for w in device.works if w and w.chunks]
    sizes = [len({c.request.number for c in w.chunks}) for w in works]
    assert sizes[0] == 4 and max(sizes[1:]) >= 3 and len(sizes) <= 4


def test_names_of_blocks():
    assert len(block_keys(range(CHUNK + 1), BLOCK)) == CHUNK // BLOCK
    a, b = block_keys([1] * 48, 16), block_keys([1] * 16 + [2] + [1] * 31, 16)
    assert a[0] == b[0] and a[1] != b[1] and a[2] != b[2]
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([], [1]) == 0 and common_prefix([1, 2], [1, 2, 3]) == 2


def test_more_waiting_requests_do_not_begin_later():
    """Held back for a fuller prefill step, but not as long as others run, and not what is
    urgent."""
    for urgent in (0, -1):
        device = Device(pages=600, rows=16, prefill_chunks=8, max_model_len=512, admission=4)
        long = [Turn((i + 1,) * 3, 300) for i in range(13)]
        new = [Turn((40 + i,) * 3, 2, arrival=5, priority=urgent) for i in range(8)]
        run(device, [*long, *new], check=False)
        placed = [{r.number for r in work.placed} if work else set() for work in device.works]
        waited = next(i for i, numbers in enumerate(placed) if 13 in numbers) - 5
        assert waited <= (2 if urgent else HELD_STEPS + 4), waited


def test_a_small_swap_space_lets_no_requests_wait_for_each_other():
    for swap_pages in (0, 1, 3, 8):
        page = device_page_bytes()
        device = Device(pages=20, swap_bytes=swap_pages * page, **SMALL)
        turns = [Turn((i + 1,) * 60, 200) for i in range(4)]
        check_against_alone(turns, run(device, turns))


def device_page_bytes() -> int:
    return Device(pages=20, **SMALL).scheduler.cache.page_bytes


def test_sessions_move_out_as_far_as_there_is_room():
    device = Device(pages=16, swap_bytes=6 * device_page_bytes(), **SMALL)
    turns = [
        Turn((1,) * 150, 2, "old"),
        Turn((2,) * 60, 2, "new", arrival=20),
        Turn((3,) * 60, 2, arrival=40),
    ]
    check_against_alone(turns, run(device, turns))
    assert device.scheduler.cache.swapped > 0


def test_a_turn_preempted_in_its_prompt_says_that_it_was_recomputed():
    seen = False
    for length in (30, 40):
        device = Device(pages=18, overflow="recompute", **SMALL)
        turns = [
            Turn((1,) * 40, 30, "a"),
            Turn((2,) * 150, 3, "a", arrival=42),
            Turn((3,) * length, 150, priority=-1, arrival=42),
            Turn((4,) * length, 80, priority=-1, arrival=42),
        ]
        requests = run(device, turns)
        for turn, request, tokens in zip(turns, requests, alone(turns, requests), strict=True):
            assert request.recomputed or request.output == tokens, turn
            assert request.cached_tokens <= len(request.prompt)
        seen |= requests[1].preemptions > 0 and requests[1].recomputed
    assert seen
