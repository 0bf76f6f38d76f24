"""Sampling parameters: vLLM's defaults, what they become, and each refusal."""

import dataclasses
import itertools
import json
from typing import Any

import numpy as np
import pytest

from moejax.errors import UserError
from moejax.requests.generation_config import sampling_defaults
from moejax.requests.sampling_params import SamplingParams, child_params


def test_defaults_are_vllms():
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": None,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "ignore_eos": False,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "logprobs": None,
        "prompt_logprobs": None,
        "allowed_token_ids": None,
        "bad_words": None,
        "structured_outputs": None,
    }


def test_the_values_that_mean_off_become_one():
    params = SamplingParams(top_k=-1, seed=-1, logit_bias={}, stop=[], stop_token_ids=[])
    assert params == SamplingParams()


def test_lists_and_mappings_become_hashable():
    given: Any = dict(stop=["b", "a"], stop_token_ids=np.array([3, 1, 3]), logit_bias={7: 1, 2: 5})
    params = SamplingParams(**given)
    assert params.stop == ("b", "a")
    assert params.stop_token_ids == (3, 1)
    assert params.logit_bias == ((2, 5.0), (7, 1.0))
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert hash(params) == hash(dataclasses.replace(params))
    assert dataclasses.replace(params) == params


def test_biases_are_clamped_and_may_have_json_keys():
    given: Any = {"12": 1000, 3: -1000.0, np.int32(5): 0}
    assert SamplingParams(logit_bias=given).logit_bias == ((3, -100.0), (5, 0.0), (12, 100.0))


def test_a_sequence_of_n_has_a_seed_of_its_own():
    params = SamplingParams(n=3, seed=2**32 - 2, prompt_logprobs=2, stop="x")
    children = [child_params(params, i) for i in range(3)]
    assert [c.seed for c in children] == [2**32 - 2, 2**32 - 1, 0]
    assert [c.prompt_logprobs for c in children] == [2, None, None]
    assert all(c.n == 1 and c.stop == ("x",) for c in children)
    assert child_params(SamplingParams(n=3), 2) == SamplingParams()


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
        ("temperature", float("nan"), "temperature must be a finite number, got nan"),
        ("temperature", "1", "temperature must be a number, got '1'"),
        ("temperature", True, "temperature must be a number, got True"),
        ("top_p", 0.0, r"top_p must be in \(0, 1\], got 0.0"),
        ("top_k", -2, r"top_k must be 0 \(disable\), or at least 1, got -2"),
        ("top_k", 1.0, "top_k must be an integer, got 1.0"),
        ("min_p", -0.1, r"min_p must be in \[0, 1\], got -0.1"),
        ("seed", 2**32, r"seed must be in \[0, 4294967295\], got 4294967296"),
        ("max_tokens", 0, "max_tokens must be at least 1, got 0"),
        ("ignore_eos", 1, "ignore_eos must be True or False, got 1"),
        ("logprobs", -1, r"logprobs must be in \[0, 20\] or None, got -1; 20 is the most"),
        ("logprobs", 21, r"got 21; 20 is the most"),
        ("prompt_logprobs", 21, r"prompt_logprobs must be in \[0, 20\] or None, got 21"),
        ("n", 0, "n must be at least 1, got 0"),
        ("n", 16385, "n must be at most 16384, got 16385"),
        ("repetition_penalty", 0.0, "repetition_penalty must be greater than zero, got 0.0"),
        ("presence_penalty", 2.1, r"presence_penalty must be in \[-2, 2\], got 2.1"),
        ("frequency_penalty", -2.1, r"frequency_penalty must be in \[-2, 2\], got -2.1"),
        ("min_tokens", -1, "min_tokens must be greater than or equal to 0, got -1"),
        ("min_tokens", 17, "min_tokens must be less than or equal to max_tokens=16, got 17"),
        ("include_stop_str_in_output", 0, "include_stop_str_in_output must be True or False"),
        ("stop", 7, "stop must be a string or a list of strings, got 7"),
        ("stop", ["a", 7], "stop must be a string or a list of strings, got 7 in it"),
        ("stop", "", "stop cannot contain an empty string"),
        ("stop_token_ids", 7, "stop_token_ids must be a list of token ids, got 7"),
        ("stop_token_ids", [1, "2"], "each of stop_token_ids must be an integer, got '2'"),
        ("stop_token_ids", [-1], "stop_token_ids must be token ids of 0 or more, got -1"),
        ("stop_token_ids", range(129), "at most 128 stop_token_ids are possible, got 129"),
        ("stop_token_ids", range(2**40), "stop_token_ids has more than 65536 values"),
        ("stop", itertools.repeat("a"), "stop has more than 65536 values"),
        ("logit_bias", range(2**40), "logit_bias has more than 65536 values"),
        ("logit_bias", [1, 2], r"logit_bias must map token ids to numbers, got \[1, 2\]"),
        ("logit_bias", {"a": 1}, "a token id in logit_bias must be an integer, got 'a'"),
        ("logit_bias", {-1: 1}, "a token id in logit_bias must be 0 or more, got -1"),
        ("logit_bias", {1: "x"}, r"logit_bias\[1\] must be a number, got 'x'"),
        ("logit_bias", {1: float("nan")}, r"logit_bias\[1\] must be a finite number, got nan"),
        ("logit_bias", dict.fromkeys(range(301), 1), "at most 300 logit_bias tokens"),
    ],
)
def test_a_bad_value_is_refused(name, value, message):
    with pytest.raises(UserError, match=message):
        SamplingParams(**{name: value})


def test_more_than_one_sequence_needs_randomness():
    with pytest.raises(UserError, match="n must be 1 when using greedy sampling, got 2"):
        SamplingParams(n=2, temperature=0)


def test_an_unknown_name_is_refused():
    for name, words in {
        "temprature": "did you mean 'temperature'",
        "best_of": "n is how many",
        "max_new_tokens": "max_tokens is most",
        "zzz": "SamplingParams has no field 'zzz'$",
    }.items():
        with pytest.raises(TypeError, match=words):
            SamplingParams(**{name: 2})


def test_a_models_sampling_defaults(tmp_path):
    assert sampling_defaults(tmp_path, "auto") == {}
    file = tmp_path / "generation_config.json"
    stated = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    file.write_text(json.dumps({**stated, "min_p": None, "do_sample": True, "max_new_tokens": 9}))
    assert sampling_defaults(tmp_path, "auto") == stated
    assert sampling_defaults(tmp_path, "none") == {}
    file.write_text('{"top_p": 0}')
    with pytest.raises(UserError, match=r"config.json: top_p must be in .*, got 0.*=\"none\""):
        sampling_defaults(tmp_path, "auto")
