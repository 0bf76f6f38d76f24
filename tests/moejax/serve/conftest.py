"""One engine for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moejax import LLM

LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}


@pytest.fixture(scope="package")
def llm() -> Iterator[LLM]:
    with LLM("demo", expert_budget="25%", progress=False, **LIMITS) as llm:
        yield llm


@pytest.fixture
def engine_is_free(llm: LLM) -> Iterator[None]:
    """Afterwards nothing runs, and no page is held."""
    yield
    scheduler = llm.engine.scheduler
    assert llm.engine.idle and scheduler.cache.available == scheduler.arena.pages
