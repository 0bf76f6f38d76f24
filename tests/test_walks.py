"""Five values on their way through the packages: none comes back into a file that passed it on."""

import re

import numpy as np
import pytest
import safetensors

from host_offload.control.interface import Stage, StagedTransfer
from host_offload.memory.budget import Share
from host_offload.memory.tables import Entry
from moejax import LLM, SamplingParams
from pallas_kernels.stage import Entries
from tests.conftest import DEMO, REPOSITORY
from tests.walks import Stop, Walk, follow

PROMPT = (5, 77, 301, 9, 45, 33, 21)
THREE_TOKENS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
LIMITS = dict(max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64)


def start(**options) -> LLM:
    options = {"expert_budget": "37%", "device": "cpu", "progress": False, **LIMITS, **options}
    return LLM(str(DEMO), **options)


def is_integers(value, wanted) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and value.ravel()[: len(wanted)].tolist() == list(wanted)
    numbers = isinstance(value, list | tuple) and all(type(n) is int for n in value)
    return numbers and tuple(value) == tuple(wanted)


def follow_prompt() -> Walk:
    with start() as llm:
        return follow(
            lambda value: is_integers(value, PROMPT),
            lambda: llm.generate([list(PROMPT)], THREE_TOKENS, use_tqdm=False),
        )


def follow_expert_budget() -> Walk:
    def is_it(value):
        text = isinstance(value, str) and value == "37%"
        return text or (isinstance(value, Share) and value == Share(0.37))

    return follow(is_it, lambda: start().close())


def follow_prefetch_decision() -> Walk:
    with start(prefetch="random", expert_budget="50%") as llm:
        return follow(
            lambda value: isinstance(value, Stage | StagedTransfer | Entry | Entries),
            lambda: llm.generate([list(PROMPT)], THREE_TOKENS, use_tqdm=False),
        )


def follow_expert_bytes() -> Walk:
    with safetensors.safe_open(str(DEMO / "model.safetensors"), "np") as tensors:
        gate = tensors.get_tensor("model.layers.2.mlp.experts.3.gate_proj.weight")
    first = gate.view(np.uint16).ravel()[:16].copy()

    def is_it(value):
        if not isinstance(value, np.ndarray) or not value.flags.c_contiguous or value.nbytes % 2:
            return False
        return np.array_equal(value.reshape(-1).view(np.uint16)[:16], first)

    def run():
        with start() as llm:  # which begins before all experts are read
            llm.engine.runner.store.wait()

    return follow(is_it, run)


def follow_token() -> Walk:
    with start() as llm:
        prompts = [[5, 6, 7]]
        (made,) = llm.generate(prompts, THREE_TOKENS, use_tqdm=False)
        token = made.outputs[0].token_ids[-1]
        assert token not in prompts[0]

        def is_it(value):
            if isinstance(value, np.ndarray):
                return value.dtype.kind == "i" and value.size < 8 and token in value
            return isinstance(value, int | np.integer) and value == token

        return follow(is_it, lambda: llm.generate(prompts, THREE_TOKENS, use_tqdm=False))


WALKS = {
    "a prompt": follow_prompt,
    "`expert_budget`": follow_expert_budget,
    "a prefetch decision": follow_prefetch_decision,
    "an expert's bytes": follow_expert_bytes,
    "a finished token": follow_token,
}


def folders_of(walk: Walk) -> list[str]:
    """The folders in the order in which the value came into them."""
    return list(dict.fromkeys("/".join(stop.file.split("/")[:2]) for stop in walk.stops))


def folders_in_docs() -> dict[str, list[str]]:
    """Value → folders, of the table in docs/explanation/architecture.md."""
    page = (REPOSITORY / "docs/explanation/architecture.md").read_text()
    rows = re.findall(r"^\| (.+?) \| ((?:`[\w/.]+`(?: → )?)+) \|$", page, re.MULTILINE)
    return {name: re.findall(r"`([\w/.]+)`", folders) for name, folders in rows}


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKS)
def test_a_value_never_returns_to_a_file(name):
    walk = WALKS[name]()
    assert folders_of(walk) == folders_in_docs()[name]
    assert not walk.returns(), [" → ".join(map(str, chain)) for chain in walk.returns()]
    if name == "an expert's bytes":
        assert len(walk.stops) <= 8


def test_a_return_is_found():
    here, there = Stop("a.py", "f"), Stop("b.py", "g")
    back = (here, there, Stop("a.py", "h"))
    straight = (here, Stop("a.py", "h"), there)
    assert Walk((*back,), frozenset([back, straight])).returns() == {back}
