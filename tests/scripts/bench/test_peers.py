"""The bench of peers: which engines a stage has."""

import pytest

from scripts.bench.peers import STAGES, engines_of


@pytest.mark.parametrize("stage", STAGES)
def test_integer_products_are_beside_exact_ones_where_weights_are_in_codes(stage):
    exact, *others = engines_of(stage, ("transformers",), "int8")
    own = STAGES[stage][0]
    if stage in ("bf16", "hybrid"):  # moejax refuses it
        assert (exact, *others) == (own, "llama.cpp BF16")
    else:
        assert (exact, *others) == (f"{own} --arithmetic int8", *STAGES[stage])
