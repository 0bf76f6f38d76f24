"""Rotary frequencies: agreement with transformers, and clear refusals."""

import numpy as np
import pytest

from moejax.errors import UserError
from moejax.models.rope import Rope, inverse_frequencies, parse_rope

TABLES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "llama3, nothing between (Llama 4 Scout)": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3, length from the config": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn, factor from the lengths": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": None,
        "original_max_position_embeddings": 2048,
    },
    "yarn, everything set": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
        "original_max_position_embeddings": 256,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 4096,
    },
    "yarn, ramp of no width": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 4,
    },
}


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("head_dim", [32, 96])
@pytest.mark.parametrize("name", TABLES)
def test_frequencies_agree_with_transformers(name, head_dim):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

    config = Qwen3MoeConfig(
        head_dim=head_dim, max_position_embeddings=8192, rope_parameters=dict(TABLES[name])
    )
    theirs = Qwen3MoeRotaryEmbedding(config)
    rope = parse_rope({"rope_parameters": TABLES[name]}, 8192)
    frequencies, factor = inverse_frequencies(rope, head_dim)
    assert frequencies.dtype == np.float32 and frequencies.shape == (head_dim // 2,)
    np.testing.assert_allclose(frequencies, theirs.inv_freq.numpy(), rtol=1e-6)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-9)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [1.0 + 0.9 * i for i in range(16)],
}


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("length", [2048, 2049])
@pytest.mark.parametrize(
    "table",
    [
        {},
        {"factor": None},
        {"factor": 0.5},
        {"attention_factor": 1.5},
    ],
    ids=["factor", "factor from the lengths", "small factor", "attention factor"],
)
def test_longrope_agrees_with_transformers(length, table):
    from transformers import Qwen3MoeConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = LONGROPE | table
    config = Qwen3MoeConfig(
        head_dim=32, max_position_embeddings=8192, rope_parameters=dict(parameters)
    )
    theirs, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=length)
    rope = parse_rope({"rope_parameters": parameters}, 8192).for_length(length)
    frequencies, factor = inverse_frequencies(rope, 32)
    np.testing.assert_allclose(frequencies, theirs.numpy(), rtol=1e-6)
    assert factor == pytest.approx(scaling, rel=1e-9)


def test_longrope_is_chosen_by_the_longest_sequence():
    """One set of factors for every position, and with it the factor on cosine and sine."""
    table = LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3, "attention_factor": 9.0}
    rope = parse_rope({"rope_parameters": table}, 8192)
    plain, _ = inverse_frequencies(Rope(theta=1e4), 32)
    for length, name, mscale in ((2048, "short_factor", 1.1), (2049, "long_factor", 1.3)):
        frequencies, factor = inverse_frequencies(rope.for_length(length), 32)
        np.testing.assert_allclose(frequencies, plain / np.float32(LONGROPE[name]), rtol=1e-6)
        assert factor == mscale
    other = Rope(theta=1e4, type="yarn", original_max_position_embeddings=10)
    assert other.for_length(100) == other


def test_older_and_newer_keys_mean_the_same():
    new = {"rope_parameters": TABLES["yarn"]}
    old = {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    }
    outside = {
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "original_max_position_embeddings": 2048,
    }
    expected = parse_rope(new, 8192)
    assert parse_rope(old, 8192) == parse_rope(outside, 8192) == expected
    assert parse_rope({**old, **new}, 8192) == expected
    assert expected.type == "yarn" and expected.theta == 1e6


@pytest.mark.parametrize(
    "table", [{"type": "dynamic", "factor": 4.0}, {"type": "mrope", "mrope_section": [8, 4, 4]}]
)
def test_types_that_are_the_default_within_the_context(table):
    """transformers changes the base of a dynamic rope beyond max_position_embeddings, where no
    engine goes; text has the same position three times."""
    assert parse_rope({"rope_theta": 1e6, "rope_scaling": table}, 8192) == Rope(theta=1e6)


def scaled(**table):
    return {"rope_parameters": {"rope_theta": 1e4, **table}}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (scaled(rope_type="dynamic", alpha=2.0), "rope_parameters.alpha is not implemented"),
        (scaled(rope_type="longrope"), "'longrope' needs .*short_factor"),
        (
            scaled(rope_type="longrope", short_factor=[1.0]),
            "'longrope' needs .*long_factor, a list of numbers above 0, not None",
        ),
        (scaled(rope_type="longrope", short_factor="1"), "short_factor, a list of .* not '1'"),
        (
            scaled(rope_type="longrope", short_factor=[1.0], long_factor=[2.0], short_mscale="x"),
            "short_mscale must be a number",
        ),
        (scaled(rope_type="proportional"), "'proportional' .*part of each head"),
        (scaled(rope_type="xpos"), "'xpos' .*unknown.*supported: default, linear"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor must be a number above 0.* not 0"),
        ({"rope_theta": 1e6, **scaled()}, "contradicting values of rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta must be a number above 1, at most 1e.30"),
        ({"rope_parameters": 7}, "rope_parameters must be an object"),
        (scaled(rope_type="linear"), "'linear' needs rope_parameters.factor"),
        (scaled(rope_type="linear", factor=0), "factor must be a number above 0"),
        (scaled(rope_type="yarn"), "'yarn' needs rope_parameters.factor"),
        (scaled(rope_type="yarn", factor=2.0, truncate=1), "truncate"),
        (scaled(rope_type="yarn", factor=2.0, beta_fast="x"), "beta_fast must be a number"),
        (
            scaled(rope_type="yarn", factor=2.0, mscale_all_dim=-10),
            "mscale_all_dim must be .* or 0",
        ),
        (scaled(**LONGROPE | {"long_factor": [10**400]}), "needs rope_parameters.long_factor"),
        (
            scaled(**LONGROPE | {"original_max_position_embeddings": 1}),
            "original_max_position_embeddings must be an integer from 2",
        ),
        (
            scaled(rope_type="yarn", factor=2.0, original_max_position_embeddings=1.5),
            "original_max_position_embeddings must be an integer from 2",
        ),
        (
            {
                "original_max_position_embeddings": 10,
                **scaled(rope_type="yarn", factor=2.0, original_max_position_embeddings=20),
            },
            "contradicting values of original_max_position_embeddings",
        ),
        (scaled(rope_type="llama3", factor=2.0, low_freq_factor=1.0), "needs .*high_freq_factor"),
        (
            scaled(rope_type="llama3", factor=2.0, low_freq_factor=4.0, high_freq_factor=3.0),
            "high_freq_factor .*at least low_freq_factor",
        ),
        (scaled(type="linear", rope_type="yarn", factor=2.0), "contradicting type 'linear'"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                **scaled(rope_type="linear", factor=3.0),
            },
            "rope_scaling and rope_parameters contradict",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "from layer to layer"),
    ],
)
def test_refusals(raw, message):
    with pytest.raises(UserError, match=f"^some.json: .*{message}"):
        parse_rope(raw, 8192, "some.json")


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (Rope(type="su"), "unknown rope type 'su'"),
        (Rope(type="longrope", short_factor=(1.0, 2.0)), "2 longrope factors for 16 pairs"),
    ],
)
def test_ropes_made_by_hand_are_refused(rope, message):
    with pytest.raises(ValueError, match=message):
        inverse_frequencies(rope, 32)
