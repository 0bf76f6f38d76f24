"""Programs on disk: found without tracing, the same results, never those of other code."""

import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from moejax.cache import bypass_compilation_cache
from moejax.device import THREADS
from moejax.step import kept_programs
from moejax.step.kept_programs import KeptPrograms
from tests.conftest import REPOSITORY

PROGRAM = """
import json, os, sys

from moejax import LLM, SamplingParams
from moejax.step.executor import Executor
traced, lower = [], Executor.lower
Executor.lower = lambda self, key: traced.append(str(key)) or lower(self, key)
options = {"max_num_seqs": 2, "max_model_len": 64, "progress": False, **json.loads(sys.argv[1])}
with LLM(os.environ["DEMO"], **options) as llm:
    (out,) = llm.generate(["The old house"], SamplingParams(max_tokens=6, temperature=0.7, seed=1))
    llm.engine.runner.wait_compiled(True)
print(json.dumps([out.outputs[0].token_ids, sorted(traced), "flax" in sys.modules]))
"""


def start(home, **options):
    environment = {**os.environ, "XDG_CACHE_HOME": str(home)}
    environment["DEMO"] = str(REPOSITORY / "tests" / "models" / "demo")
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-c", PROGRAM, json.dumps(options)]
    ended = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_second_start_traces_nothing_and_has_the_same_tokens(tmp_path):
    tokens, traced, _ = start(tmp_path)
    files = sorted((tmp_path / "moejax" / "programs").iterdir())
    assert len(files) == len(traced) >= 4
    again = start(tmp_path)
    assert again == [tokens, [], False]
    other, more, _ = start(tmp_path, max_num_seqs=3)
    assert other == tokens and more
    content = files[0].read_bytes()
    files[0].write_bytes(content[:-40])
    damaged, traced, _ = start(tmp_path)
    assert damaged == tokens and len(traced) == 1
    assert start(tmp_path) == again


def test_a_program_is_found_only_by_the_settings_and_the_code_that_it_was_made_of(
    tmp_path, monkeypatch
):
    array = jnp.arange(3.0)
    kept = KeptPrograms(tmp_path, "spec", array, jax.devices()[0])
    with bypass_compilation_cache():
        compiled = jax.jit(lambda x: x + 1).lower(array).compile()
    monkeypatch.setattr(kept_programs, "IMPORTED_AT", 0.0)  # all code is edited since
    kept.keep("key", compiled)
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(kept_programs, "IMPORTED_AT", math.inf)
    kept.keep("key", compiled)
    found = kept.load("key")
    assert found is not None and found(array).tolist() == [1, 2, 3]
    precision = jax.config.values["jax_default_matmul_precision"]
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        assert kept.load("key") is None
    finally:
        jax.config.update("jax_default_matmul_precision", precision)
    for variable in ("XLA_FLAGS", THREADS):
        with monkeypatch.context() as other:
            other.setenv(variable, "1")
            assert kept.load("key") is None
    for other in (("spec", array.astype(jnp.bfloat16)), ("other", array)):
        assert KeptPrograms(tmp_path, *other, jax.devices()[0]).load("key") is None
