"""Agreement with transformers' Qwen3MoeForCausalLM on random small models, one per branch of the
config, at every prompt position (scoring) and every generated position (decode logits)."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest

from moejax import LLM, SamplingParams
from tests.moejax.transformers_models import logprobs, random_qwen3_moe, save

pytestmark = pytest.mark.torch

TOLERANCE = 1e-4
PROMPT_LENGTHS = (1, 63, 64, 65, 130)
"""Around one and two spans of attention, and one more prompt than there are decode rows."""
GENERATED = 12
"""Greedy tokens; those of the prompts of 63 and 64 tokens begin the next span."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}


@dataclasses.dataclass(frozen=True)
class Case:
    """config: over transformers_models.SMALL. engine: options of LLM beside those in `_run`.
    saved: options of transformers_models.save."""

    config: dict[str, Any]
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    saved: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES = {
    "plain": Case({}, {"expert_budget": "50%"}),
    "biases, odd widths, one KV head, linear rope": Case(
        {
            "attention_bias": True,
            "hidden_size": 96,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 40,
            "moe_intermediate_size": 80,
            "vocab_size": 99,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "rope_parameters": LINEAR,
        },
        {"expert_budget": "0%"},
        {"older_keys": True},
    ),
    "dense layers by list, llama3 rope": Case(
        {
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "num_key_value_heads": 4,
            "rope_parameters": LLAMA3,
            "hidden_act": "gelu",
        },
        {"expert_budget": "25%"},
    ),
    "dense layers by step, yarn rope": Case(
        {
            "decoder_sparse_step": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "rope_parameters": YARN,
            "attention_bias": True,
            "norm_topk_prob": False,
        },
        {"expert_budget": "0%"},
    ),
    "sliding window that skips whole spans": Case(
        {"use_sliding_window": True, "sliding_window": 20, "hidden_act": "relu"},
        {"expert_budget": "50%"},
        {"older_keys": True},
    ),
    "top 1, wide experts, tied": Case(
        {
            "hidden_size": 320,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "moe_intermediate_size": 320,
            "num_experts": 5,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
        },
        {"expert_budget": "50%"},
        {"max_shard_size": "2MB"},
    ),
    "all experts, yarn rope by the older keys": Case(
        {
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "hidden_act": "gelu_new",
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
            "rms_norm_eps": 1e-2,
        },
        {"expert_budget": "50%", "prefill_waves": 2},
        {"older_keys": True},
    ),
    "window of one span, biases, llama3 rope by the older keys": Case(
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
            "norm_topk_prob": False,
            "num_experts_per_tok": 5,
        },
        {"expert_budget": "50%", "eviction": "lfu"},
        {"older_keys": True},
    ),
    "linear rope, small heads, three waves": Case(
        {
            "head_dim": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_experts_per_tok": 3,
            "vocab_size": 257,
            "rope_parameters": LINEAR,
        },
        {"expert_budget": "50%", "prefill_waves": 3},
    ),
    "one expert": Case(
        {
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """What moejax computed for a model. decode[i]: log-probabilities [GENERATED, V] from which
    sequence i's generated tokens were chosen; scores[i]: of all its tokens but the first, by
    prefill."""

    model: Any
    prompts: list[list[int]]
    sequences: list[list[int]]
    decode: list[np.ndarray]
    scores: list[np.ndarray]


def _run(case: Case, directory) -> Run:
    model = random_qwen3_moe(**case.config)
    rng = np.random.default_rng(0)
    vocabulary = model.config.vocab_size
    prompts = [rng.integers(0, vocabulary, n).tolist() for n in PROMPT_LENGTHS]
    logits: dict[str, list[np.ndarray]] = {}

    def record(step):
        for row, request in step.sampled():
            logits.setdefault(request.request_id, []).append(np.asarray(step.output.logits)[row])

    options = {"max_num_seqs": 4, "max_model_len": 256, "max_num_batched_tokens": 256}
    with LLM(
        save(model, directory, **case.saved),
        dtype="float32",
        progress=False,
        listener=record,
        **options | case.engine,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True)
        outputs = llm.generate(prompts, params)
        sequences = [o.prompt_token_ids + o.outputs[0].token_ids for o in outputs]
        scores = llm.score_batch(sequences)
        # The case runs the memory path that it names.
        assert (llm.stats()["experts"]["hits"] == 0) == (case.engine.get("expert_budget") == "0%")
    decode = [_log_softmax(np.stack(logits[o.request_id])) for o in outputs]
    return Run(model, prompts, sequences, decode, scores)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def _errors(run: Run, model: Any) -> tuple[float, float]:
    """The largest difference from the model's log-probabilities: (at generated tokens, over the
    whole vocabulary; of each sequence's own tokens, by scoring)."""
    decode, score = [], []
    for i, (prompt, ids) in enumerate(zip(run.prompts, run.sequences, strict=True)):
        expected = logprobs(model, ids[:-1])
        decode.append(np.abs(run.decode[i] - expected[len(prompt) - 1 :]).max())
        chosen = expected[np.arange(len(ids) - 1), ids[1:]]
        score.append(np.abs(run.scores[i] - chosen).max())
    return max(decode), max(score)


@pytest.fixture(scope="module")
def run(request, tmp_path_factory) -> Run:
    return _run(CASES[request.param], tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("run", CASES, indirect=True)
def test_logprobs_agree_with_transformers(run):
    spread = np.concatenate(run.decode).std(axis=-1)
    assert 1 < spread.mean() < 3, "the random weights are too small, or too large, to tell"
    decode, score = _errors(run, run.model)
    assert decode < TOLERANCE
    assert score < TOLERANCE


FULL = "window of one span, biases, llama3 rope by the older keys"
"""The case whose run is compared with deliberately wrong models."""


def _wrong_theta(model):
    model.model.rotary_emb.inv_freq *= 1.01


def _no_rope_scaling(model):
    rotary = model.model.rotary_emb
    rotary.inv_freq, _ = rotary.compute_default_rope_parameters(model.config)


def _swapped_norms(model):
    attention = model.model.layers[0].self_attn
    attention.q_norm, attention.k_norm = attention.k_norm, attention.q_norm


def _swapped_experts(model):
    up = model.model.layers[1].mlp.experts.gate_up_proj.data
    up[[0, 1]] = up[[1, 0]]


def _swapped_gate_and_up(model):
    experts = model.model.layers[1].mlp.experts
    experts.gate_up_proj.data = experts.gate_up_proj.data.roll(experts.intermediate_dim, dims=1)


def _normalized_weights(model):
    model.model.layers[1].mlp.gate.norm_topk_prob = True


def _one_expert_fewer(model):
    model.model.layers[1].mlp.gate.top_k -= 1


def _longer_window(model):
    model.config.sliding_window += 1


@pytest.mark.parametrize("run", [FULL], indirect=True)
@pytest.mark.parametrize(
    "mutate",
    [
        _wrong_theta,
        _no_rope_scaling,
        _swapped_norms,
        _swapped_experts,
        _swapped_gate_and_up,
        _normalized_weights,
        _one_expert_fewer,
        _longer_window,
    ],
)
def test_wrong_model_is_noticed(run, mutate):
    wrong = copy.deepcopy(run.model)
    mutate(wrong)
    assert min(_errors(run, wrong)) > 1e-3


@pytest.mark.parametrize("run", [FULL], indirect=True)
def test_every_parameter_is_noticed(run):
    wrong = copy.deepcopy(run.model)
    for name, parameter in wrong.named_parameters():
        right = parameter.data
        parameter.data = right.roll(1, dims=0)  # another unit's, or another expert's
        assert min(_errors(run, wrong)) > 1e-3, name
        parameter.data = right
