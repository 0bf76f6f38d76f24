import dataclasses
from typing import Any

import numpy as np
import pytest

from moejax.errors import UserError
from moejax.sampling_params import SamplingParams


def test_defaults_are_vllms():
    assert dataclasses.asdict(SamplingParams()) == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "max_tokens": 16,
        "ignore_eos": False,
        "logprobs": None,
    }


def test_the_values_that_mean_off_become_one():
    params = SamplingParams(top_k=-1, seed=-1)
    assert (params.top_k, params.seed) == (0, None)


def test_numpy_numbers_become_python_ones():
    numbers: Any = dict(
        temperature=np.float32(0.5), top_p=1, top_k=np.int64(3), seed=np.uint32(2**32 - 1)
    )
    params = SamplingParams(**numbers)
    assert [type(v) for v in (params.temperature, params.top_p, params.top_k, params.seed)] == [
        float,
        float,
        int,
        int,
    ]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -0.1, r"temperature must be in \[0, 2\], got -0.1"),
        ("temperature", 2.5, r"temperature must be in \[0, 2\]"),
        ("temperature", float("nan"), "temperature must be a finite number, got nan"),
        ("temperature", "1", "temperature must be a number, got '1'"),
        ("temperature", None, "temperature must be a number, got None"),
        ("temperature", True, "temperature must be a number, got True"),
        ("top_p", 0.0, r"top_p must be in \(0, 1\], got 0.0"),
        ("top_p", 1.01, r"top_p must be in \(0, 1\]"),
        ("top_k", -2, r"top_k must be 0 \(disable\), or at least 1, got -2"),
        ("top_k", 1.0, "top_k must be an integer, got 1.0"),
        ("top_k", None, "top_k must be an integer, got None"),
        ("min_p", -0.1, r"min_p must be in \[0, 1\], got -0.1"),
        ("min_p", float("inf"), "min_p must be a finite number"),
        ("seed", 2**32, r"seed must be in \[0, 4294967295\], got 4294967296"),
        ("seed", -2, r"seed must be in \[0, 4294967295\], got -2"),
        ("seed", 0.5, "seed must be an integer, got 0.5"),
        ("max_tokens", 0, "max_tokens must be at least 1, got 0"),
        ("max_tokens", None, "max_tokens must be an integer, got None"),
        ("ignore_eos", 1, "ignore_eos must be True or False, got 1"),
        ("logprobs", -1, r"logprobs must be in \[0, 20\] or None, got -1; 20 is the most"),
        ("logprobs", 21, r"got 21; 20 is the most"),
        ("logprobs", True, "logprobs must be an integer, got True"),
    ],
)
def test_a_bad_value_is_refused(name, value, message):
    with pytest.raises(UserError, match=message):
        SamplingParams(**{name: value})


def test_an_unknown_name_is_refused():
    with pytest.raises(TypeError, match="stop"):
        SamplingParams(stop="x")  # pyright: ignore[reportCallIssue]


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_k = 1  # pyright: ignore[reportAttributeAccessIssue]
