"""The steps of known models compiled for every card of tests/aot: what does not fit a card's shared
memory does not compile. expert_ffn over every format of records: test_expert_ffn_versions_aot.py.

`python -m tests.aot.cards` writes the same compilations down as tables.
"""

from __future__ import annotations

import itertools

import pytest

from pallas_kernels.cards import shared_class
from tests.aot.aot_h200 import CARDS, device_of
from tests.aot.cards import MODELS, OURS, STEPS, compile_step
from tests.moejax.step.test_constant_memory import STAGED, MiB

pytestmark = pytest.mark.aot

ALWAYS = {(MODELS[0], STAGED, "rtx4090")}
"""Those that .ci/run compiles: the card with the least shared memory. Prefill steps it compiles for
an H200 alone (test_kernel_steps)."""

SPILLED = {"expert_gate_up": 64, "expert_gate_up_hits": 64, "prefill_attention": 64}
"""Most bytes that kernels may spill with 99 KiB; all others, and larger classes, none. A block of
64 rows fills the registers with three stages on compute capability 8.9, OLMoE's heads on both."""


@pytest.mark.parametrize(
    ("model", "key", "card"),
    [
        pytest.param(*step, marks=[pytest.mark.nightly] * (step not in ALWAYS))
        for step in itertools.product(MODELS, STEPS, CARDS)
    ],
    ids=str,
)
def test_a_step_compiles_for_a_card(model, key, card):
    compiled, kernels = compile_step(card, model, key)
    own = {name: kernel for name, kernel in kernels.items() if OURS.match(name)}
    assert {"linear", "rms_norm", "fill", "combine"} <= own.keys()
    assert "route_plan" in own or {"route", "plan"} <= own.keys()
    kib = shared_class(device_of(card))
    for name, kernel in own.items():
        assert kernel.shared_bytes <= kib * 1024, name
        assert kernel.spill_bytes <= (SPILLED.get(name, 0) if kib == 99 else 0), name
    assert compiled.host_copies(1, to_host=True) == []
    # References, of latent attention, cut out layers' weights: as of test_families.
    if {"decode_attention_split", "prefill_attention"} & kernels.keys():
        assert compiled.copies(MiB) == []
