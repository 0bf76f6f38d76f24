"""The contract test of expert_ffn finds deliberate mistakes, in the op and inside its kernels."""

import jax.numpy as jnp
import pytest

from pallas_kernels.expert_ffn import api, few_tokens, many_tokens, reference
from pallas_kernels.expert_ffn.specs import Spec
from pallas_kernels.expert_ffn.tile import GATE, UP
from tests.pallas_kernels.test_expert_ffn import check

pytestmark = pytest.mark.slow


def row_off_by_one(y, x, ids, arena, stores, layer, address, *rest, **options):
    address = jnp.where(address >= 0, address + 1, -1)
    return reference.expert_ffn(y, x, ids, arena, stores, layer, address, *rest, **options)


def store_instead_of_cell(y, x, ids, arena, stores, layer, address, *rest, **options):
    return reference.expert_ffn(y, x, ids, arena, stores, layer, -1 + 0 * address, *rest, **options)


def wrong_layer(y, x, ids, arena, stores, layer, *rest, **options):
    return reference.expert_ffn(y, x, ids, arena, stores, layer - 1, *rest, **options)


def slots_swapped(y, x, ids, *rest, **options):
    out = reference.expert_ffn(y, x, ids, *rest, **options)
    return out.reshape(*ids.shape, -1)[:, ::-1].reshape(y.shape)


def clears_y(y, x, ids, *rest, **options):
    return reference.expert_ffn(jnp.zeros_like(y), x, ids, *rest, **options)


def drops_the_last_expert(*arguments, **options):
    *rest, count = arguments
    return reference.expert_ffn(*rest, count - 1, **options)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "mutant",
    [
        row_off_by_one,
        store_instead_of_cell,
        wrong_layer,
        slots_swapped,
        clears_y,
        drops_the_last_expert,
    ],
)
def test_contract_catches(mutant, monkeypatch):
    monkeypatch.setitem(api.IMPLEMENTATIONS, mutant.__name__, mutant)
    with pytest.raises(AssertionError):
        check(Spec(17, "bfloat16", "padded"), mutant.__name__)


def no_activation(*arguments, activation, **options):
    return reference.expert_ffn(*arguments, activation=lambda x: x, **options)


@pytest.mark.nightly
def test_contract_catches_a_wrong_activation(monkeypatch):
    monkeypatch.setitem(api.IMPLEMENTATIONS, "no_activation", no_activation)
    with pytest.raises(AssertionError):
        check(Spec(3, "bfloat16"), "no_activation")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kernels", "part", "mistake"),
    [
        (few_tokens, "GATE", UP),
        (few_tokens, "DOWN", GATE),
        (
            few_tokens,
            "_gather",
            lambda pairs, rank, first, ids: gather(pairs, rank, first + 1, ids),
        ),
        (many_tokens, "GATE", UP),
        (many_tokens, "DOWN", GATE),
        (many_tokens, "group", lambda *routing: first_pair_left_out(group(*routing))),
    ],
)
def test_contract_catches_a_mistake_in_a_kernel(kernels, part, mistake, monkeypatch):
    name = f"pallas_{kernels.__name__}_{part}"
    monkeypatch.setattr(kernels, part, mistake)
    monkeypatch.setitem(api.IMPLEMENTATIONS, name, api.IMPLEMENTATIONS["pallas"])
    with pytest.raises(AssertionError):
        check(Spec(17, "bfloat16", "padded", row_tile=kernels.ROWS), name)


gather, group = few_tokens._gather, many_tokens.group


def first_pair_left_out(groups):
    return groups._replace(first=groups.first.at[0].add(1))
