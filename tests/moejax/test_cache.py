"""Compiled executables on disk: damaged ones are made again, and others' are not run."""

import os
import subprocess
import sys

import pytest

from moejax.cache import require_own
from moejax.errors import UserError
from tests.conftest import REPOSITORY

PROGRAM = """
import jax, numpy as np
from moejax.cache import use_compilation_cache
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
use_compilation_cache()
use_compilation_cache()
one = jax.jit(lambda x: x * 3 + 1)(np.arange(5.0))
two = jax.jit(lambda x: x @ x)(np.ones((3, 3)))
assert one.tolist() == [1, 4, 7, 10, 13] and (np.asarray(two) == 3).all()
print(hits.count("/jax/compilation_cache/cache_hits"))
"""


def hits(home) -> int:
    environment = {**os.environ, "XDG_CACHE_HOME": str(home), "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    ended = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return int(ended.stdout)


def truncated(a, b):
    a.write_bytes(a.read_bytes()[:-40])


def emptied(a, b):
    a.write_bytes(b"")


def flipped(a, b):
    data = bytearray(a.read_bytes())
    data[len(data) // 2] ^= 1
    a.write_bytes(data)


def exchanged(a, b):
    other = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(other)


@pytest.mark.slow
def test_a_damaged_entry_is_made_again(tmp_path):
    assert hits(tmp_path) == 0
    entries = sorted((tmp_path / "moejax" / "xla").glob("*-cache"))
    count = hits(tmp_path)
    assert count == len(entries) >= 2
    one, other = entries[:2]
    for damage, lost in ((truncated, 1), (emptied, 1), (flipped, 1), (exchanged, 2)):
        damage(one, other)
        assert hits(tmp_path) == count - lost, damage  # the one damaged before is whole again
        one, other = other, one
    assert hits(tmp_path) == count


def test_a_cache_of_others_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o775)
    with pytest.raises(UserError, match=r"others may write into it; chmod go-w /"):
        require_own(tmp_path)
    require_own(tmp_path, mend=True)
    require_own(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UserError, match="belongs to another user; name another directory"):
        require_own(tmp_path, mend=True)
