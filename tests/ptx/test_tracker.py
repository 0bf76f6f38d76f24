"""What Recent leaves to ranges of bytes, against the tracker asked about every access."""

import numpy as np
import pytest

from tests.ptx.tracker import EPOCH, FIRST_LANE, Access, Recent

PROGRAMS, THREADS, STRIDE, SIZE = 3, 64, 2048, 4
BLOCK = THREADS * SIZE


class Exact(Recent):
    """Forgets nothing at barriers and asks about each access."""

    def barrier(self, free, live):
        pass

    def _add(self, new, same=None):
        if not self.accesses:
            self._put_down(new)
            return "", np.zeros(0, bool)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Access, "met_by", lambda *_: True)
            return super()._add(new, same)


def history(seed: int, recent: Recent) -> tuple[list[str], bool]:
    """What is said of random accesses up to the first fault; whether a tracker was never asked."""
    rng = np.random.default_rng(seed)
    lanes = np.arange(PROGRAMS * THREADS)
    stamps = lanes.astype(np.int64) + FIRST_LANE
    live = np.ones(PROGRAMS, bool)
    copies: list[tuple[Access, np.ndarray, int]] = []
    said = []

    def access(kind: str, some: np.ndarray, block: int, turn=0, copy=None) -> Access:
        within = block * BLOCK + (some + turn) % THREADS * SIZE
        low, high = int(within.min()), int(within.max()) + SIZE
        first = within + some // THREADS * STRIDE
        return Access(kind, first, stamps[some], SIZE, low, high, copy=copy)

    for block in range(6):
        assert recent.write(access("write", lanes, block))[0] == ""
    for _ in range(80):
        what = rng.choice(["read", "write", "copy", *["land", "barrier"] * 2, "end"])
        block, turn = int(rng.integers(6)), int(rng.choice([*[0] * 12, 1, 32]))
        some = lanes[live[lanes // THREADS]]
        if rng.random() < 0.3:  # some programs only, or threads of the first warp
            some = some[some // THREADS == some[0] // THREADS]
            some = some[some % THREADS < (32 if rng.random() < 0.5 else THREADS)]
        if what == "barrier":
            free = live & ((rng.random() < 0.7) | (rng.random(PROGRAMS) < 0.5))
            stamps = stamps + (np.repeat(free, THREADS).astype(np.int64) << EPOCH)
            recent.barrier(free, live)
        elif what == "end":
            if rng.random() < 0.05 and live.sum() > 1:
                live = live.copy()
                live[int(np.flatnonzero(live)[-1])] = False
        elif what == "land" and copies:
            copy, of, turned = copies.pop(0)
            if of.size > 1 and rng.random() < 0.3:
                half = of.size // 2
                copies.insert(0, (copy, of[half:], turned))
                of = of[:half]
            recent.land(access("landed", of, int(copy.low // BLOCK), turned, copy))
        elif what in ("read", "write", "copy"):
            new = access(what, some, block, turn)
            if what == "copy":
                new.under_way = some.size
                copies.append((new, some, turn))
            wrong, bad = (recent.read if what == "read" else recent.write)(new)
            said.append(f"{what} {block}: {wrong} {bad.sum()}")
            if wrong:
                break
    return said, not recent.tracker.written.any()


@pytest.mark.parametrize("most", [3, 512])
def test_ranges_find_what_the_tracker_finds(monkeypatch, most):
    monkeypatch.setattr(Recent, "MOST", most)
    found, unasked = set(), 0
    for seed in range(200):
        of_ranges, never = history(seed, Recent(PROGRAMS, STRIDE, SIZE, THREADS))
        exact, _ = history(seed, Exact(PROGRAMS, STRIDE, SIZE, THREADS))
        assert of_ranges == exact, seed
        found.add(exact[-1].split(": ")[1].rstrip(" 0123456789"))
        unasked += never
    assert len(found - {""}) == 5, found
    assert unasked > 0 or most == 3


def test_shared_memory_that_some_programs_have_not_written():
    recent = Recent(2, STRIDE, SIZE, THREADS)
    lanes = np.arange(THREADS)
    stamps = lanes.astype(np.int64) + FIRST_LANE

    def access(kind: str, program: int) -> Access:
        return Access(kind, lanes * SIZE + program * STRIDE, stamps, SIZE, 0, BLOCK)

    recent.write(access("write", 0))
    assert recent.read(access("read", 0))[0] == ""
    said, bad = recent.read(access("read", 1))
    assert said == "reads shared memory that nobody wrote"
    assert bad.all()
