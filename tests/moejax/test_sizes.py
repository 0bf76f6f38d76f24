import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.memory.budget import Share, format_bytes
from moejax.errors import UserError
from moejax.sizes import parse_expert_budget, parse_size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("6GiB", 6 * 2**30),
        ("512MB", 512 * 10**6),
        ("1.5g", 3 * 2**29),
        ("2KiB", 2048),
        ("3tib", 3 * 2**40),
        (" 7m ", 7 * 2**20),
        (".5k", 512),
        ("1.0001KiB", 1024),
        ("4096", 4096),
        ("0", 0),
        (0, 0),
        (np.int64(5), 5),
    ],
)
def test_sizes(text, count):
    result = parse_size(text)
    assert result == count and type(result) is int


BAD_SIZES = ["", "GiB", "-1", "1.5", "1.5b", "6 Gi", "6GiBs", "1e9", "0x10", "٣", "25%"]


@pytest.mark.parametrize("value", [*BAD_SIZES, -1, 1.5, True, None, b"1G"])
def test_what_is_no_size_is_refused_with_an_example(value):
    with pytest.raises(UserError, match=r'is not a size; .*"6GiB"'):
        parse_size(value)


@pytest.mark.parametrize(
    ("value", "budget"),
    [
        ("25%", Share(0.25)),
        ("0%", Share(0.0)),
        (Share(0.3), Share(0.3)),
        ("6GiB", 6 * 2**30),
        (4096, 4096),
    ],
)
def test_expert_budgets(value, budget):
    assert parse_expert_budget(value) == budget


@pytest.mark.parametrize("value", [0.25, 1.0, "0.25", "-5%", "%", "half", None, True, -1])
def test_what_is_no_expert_budget_is_refused_with_examples(value):
    with pytest.raises(UserError, match=r'is not an expert budget; .*"25%".*"6GiB"'):
        parse_expert_budget(value)


def test_a_share_above_all_experts_is_refused():
    with pytest.raises(UserError, match="'101%' is more than all experts"):
        parse_expert_budget("101%")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1024, "1 KiB"),
        (96 * 1024, "96 KiB"),
        (3 * 2**19, "1.5 MiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


@given(st.integers(0, 2**50))
def test_what_is_printed_can_be_typed(count):
    assert parse_size(format_bytes(count)) == pytest.approx(count, rel=1e-3)
