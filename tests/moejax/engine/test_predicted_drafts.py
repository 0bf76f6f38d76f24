"""Drafts by the checkpoint's own layer that predicts a further token: bits are those of steps
without drafts, and the layer computes what a reference does."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from host_offload.memory.arena import OutOfPages
from moejax import LLM, SamplingParams, UserError
from moejax.checkpoints.conversion import convert
from moejax.checkpoints.load import load_checkpoint
from moejax.engine import predicted_drafts
from moejax.engine.predicted_drafts import PredictedDrafts
from moejax.models.config import parse_config
from moejax.models.next_token import predictor_of
from moejax.start.build import _drafts
from moejax.start.option_values import read_speculation
from moejax.start.options import Config
from moejax.start.report.dry_run import dry_run
from pallas_kernels.linear import CodedWeights
from tests.moejax.engine.scenes import LIMITS, open_llm, same_bits
from tests.moejax.engine.test_drafts import Pair
from tests.moejax.models.families import config_of
from tests.moejax.predictors import published, write_predicted
from tests.moejax.quantized_models import quantize_fp8

MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kv", "more"),
    [
        ("DeepseekV3ForCausalLM", "96KiB", {}),
        ("DeepseekV3ForCausalLM", "96KiB", {"driver": "host", "prefetch": "fate"}),
        pytest.param("Qwen3NextForCausalLM", "512KiB", {}, marks=pytest.mark.nightly),
        pytest.param("Glm4MoeForCausalLM", "160KiB", {}, marks=pytest.mark.nightly),
    ],
)
def test_drafts_of_its_own_layer_change_no_bit(family, kv, more, tmp_path, monkeypatch):
    """With little KV and a third of the experts, sessions, and a layer that runs out of pages. The
    model's steps are those of an engine without drafts, though they return hidden states."""
    model = write_predicted(tmp_path / "m", family)
    options = {"max_num_seqs": 8, "expert_budget": "33%", "kv_budget": kv}
    with open_llm(model, **options) as llm:
        plain = Pair(llm)
    with open_llm(model, **options, **more, speculative_config=MTP) as llm:
        drafts = llm.engine.drafts
        assert isinstance(drafts, PredictedDrafts) and llm.engine.runner.steps.hidden
        pair = Pair(llm)
        assert same_bits(pair.plain, plain.plain)
        before = llm.engine.scheduler.counts["preemptions"]
        assert same_bits(pair.run(drafts), pair.plain)
        said = llm.stats()
        counts = said["speculation"]
        preempted = llm.engine.scheduler.counts["preemptions"] > before
        assert counts["method"] == "mtp" and (preempted or family != "DeepseekV3ForCausalLM")
        assert counts["accepted_tokens"] > 25, counts
        assert counts["drafted_tokens"] - counts["accepted_tokens"] > 5, counts
        drafts.counts.clear()
        hot = SamplingParams(temperature=2.0, seed=1, max_tokens=60, ignore_eos=True)
        llm.generate([[*range(5, 25)]], hot, use_tqdm=False)
        # By the request's seed: of the likeliest tokens a sixteenth would be right.
        assert drafts.counts["accepted"] > 0.15 * drafts.counts["drafted"] > 6, drafts.counts
        allocate, cache = drafts._cache.allocate, drafts._cache
        held = [block for s in drafts._sequences.values() for block in s.blocks]
        assert cache.available == cache.arena.pages - len(held)

        def few(count: int):
            used = sum(len(s.blocks) for s in drafts._sequences.values())
            if used + count > 12:
                raise OutOfPages("an injected limit")
            return allocate(count)

        monkeypatch.setattr(cache, "allocate", few)
        accepted = drafts.counts["accepted"]
        assert same_bits(pair.run(drafts), pair.plain)
        assert drafts.counts["accepted"] > accepted + 10
        _asks_before_the_next_step(llm, monkeypatch)


def _asks_before_the_next_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without drafts run ahead: what the layer reads of one is asked for before the next one
    is dispatched, and would be behind it otherwise."""
    runner, normalise = llm.engine.runner, predicted_drafts._normalise
    calls, behind = {"asked": 0, "decode": 0}, []

    def ask(*given):
        calls["asked"] += 1
        return normalise(*given)

    def decode(*given, decode=runner.decode, **options):
        behind.append(calls["decode"] - calls["asked"])
        calls["decode"] += 1
        return decode(*given, **options)

    monkeypatch.setattr(predicted_drafts, "_normalise", ask)
    monkeypatch.setattr(runner, "decode", decode)
    monkeypatch.setattr(llm.engine.drafts, "length", lambda requests: 0)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm.generate([[*range(5, 25)]], params, use_tqdm=False)
    assert len(behind) > 10 and {*behind} == {-1}  # the prompt was asked for too


def test_a_model_without_such_a_layer_says_what_works(monkeypatch):
    """Before its weights are read."""
    monkeypatch.setattr(LLM, "_load", None)
    why = r"no layer that predicts a further token .*; use method ngram or draft_model"
    with pytest.raises(UserError, match=why):
        LLM("demo", speculative_config=MTP, progress=False, **LIMITS)


def test_names_are_those_of_vllm_and_other_checkpoints_say_why_not(tmp_path):
    for method in ("mtp", "deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "qwen3_5_mtp"):
        found = read_speculation({"method": method})
        assert (found.method, found.num_speculative_tokens, found.model) == ("mtp", 1, None)
    assert read_speculation(MTP).num_speculative_tokens == 2
    with pytest.raises(UserError, match="this command does not draft by mtp; use method ngram"):
        _drafts(found, parse_config(config_of("DeepseekV3ForCausalLM")), None)
    windows = parse_config(config_of("GptOssForCausalLM"))
    with pytest.raises(UserError, match=r"by GptOss.* are not implemented; use method ngram or"):
        predictor_of(windows, ["model.layers.3.eh_proj.weight"], "m")
    model = write_predicted(tmp_path / "m", "DeepseekV3ForCausalLM")
    given = Config.of(str(model), memory="4MiB", speculative_config=MTP, progress=False, **LIMITS)
    assert dry_run(given)[1][-1] == "the model that drafts takes 243.8 KiB of memory 4 MiB"
    convert(model, tmp_path / "converted")
    given = given.replace_options(model=str(tmp_path / "converted"))
    message = r"only checkpoints of safetensors .* this is moejax-orbax"
    with pytest.raises(UserError, match=message):
        load_checkpoint(tmp_path / "converted", predictor=True)
    with pytest.raises(UserError, match=message):
        dry_run(given)


@pytest.mark.torch
@pytest.mark.slow
def test_its_projection_stays_in_codes(tmp_path):
    """Where the checkpoint has it in FP8, as other matrices of products."""
    from safetensors.torch import load_file, save_file

    model = write_predicted(tmp_path / "m", "DeepseekV3ForCausalLM")
    path, config = model / "model.safetensors", json.loads((model / "config.json").read_text())
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("eh_proj.weight"))
    found, _ = quantize_fp8(tensors.pop(name).float() + 1e-5)  # no block is empty
    save_file(tensors | {name.replace("weight", part): each for part, each in found.items()}, path)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 16]}
    (model / "config.json").write_text(json.dumps(config))
    coded, whole = (
        load_checkpoint(model, predictor=True, coded=coded).params["eh_proj"]
        for coded in (True, False)
    )
    assert isinstance(coded, CodedWeights)
    assert np.array_equal(np.asarray(coded.decode())[0], np.asarray(whole))
    with open_llm(model, speculative_config=MTP, max_num_seqs=8) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        llm.generate([[*range(5, 25)]], params, use_tqdm=False)
        assert llm.stats()["speculation"]["accepted_tokens"] > 4


# ---- against transformers' layers


def _as_saved(model: Any, directory: Any) -> dict[str, Any]:
    from safetensors.torch import load_file

    from tests.moejax.transformers_models import save

    return load_file(save(model, directory) / "model.safetensors")


def _norm(x: Any, weight: Any, eps: float) -> Any:
    import torch

    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mistake"),
    [
        ("DeepseekV3", None),
        ("DeepseekV3", "skips the model's final norm"),
        pytest.param("Glm4Moe", None, marks=pytest.mark.nightly),
        pytest.param("Qwen3Next", None, marks=pytest.mark.nightly),
    ],
)
def test_drafts_are_what_a_reference_predicts(family, mistake, tmp_path, monkeypatch):
    """Two tokens of each draft, after prompts of several chunks and of a few tokens:
    transformers' model gives hidden states, another one, of one layer, reads them."""
    import torch
    from safetensors.torch import save_file

    from tests.moejax.transformers_models import random_model, save

    qwen = family.startswith("Qwen")
    fields: dict[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    if qwen:
        fields["layer_types"] = ["full_attention"]
    model, layer = random_model(family), random_model(family, seed=1, **fields)
    directory = save(model, tmp_path / "m")
    hidden, generator = model.config.hidden_size, torch.Generator().manual_seed(2)
    of_layer = _as_saved(layer, tmp_path / "layer")
    projection = 2 * torch.randn(hidden, 2 * hidden, generator=generator) / (2 * hidden) ** 0.5
    norms = 1 + 0.3 * torch.randn(2, hidden, generator=generator)
    of_layer |= {
        "model.eh_proj.weight": projection,
        "model.enorm.weight": norms[0] - int(qwen),
        "model.hnorm.weight": norms[1] - int(qwen),
    }
    if qwen:
        layer.lm_head, layer.model.embed_tokens = model.lm_head, model.model.embed_tokens
    layers, eps = model.config.num_hidden_layers, model.config.rms_norm_eps
    path = directory / "model.safetensors"
    save_file(_as_saved(model, directory) | published(of_layer, layers, qwen), path)

    @torch.no_grad()
    def reference(tokens: list[int], count: int) -> list[int]:
        states = model.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0]
        following, found = tokens[1:], []
        for _ in range(count):
            embedded = layer.model.embed_tokens(torch.tensor(following))
            parts = _norm(embedded, norms[0], eps), _norm(states, norms[1], eps)
            x = (torch.cat(parts, 1) @ projection.T)[None]
            before: list[Any] = []
            seen = layer.model.norm.register_forward_pre_hook(
                lambda _, given, before=before: before.append(given[0])
            )
            out = layer.model(inputs_embeds=x, use_cache=False).last_hidden_state
            seen.remove()
            found.append(int(layer.lm_head(out)[0, -1].argmax()))
            following = [*following, found[-1]]
            states = torch.cat([states, (out if qwen else before[0])[0, -1:]])
        return found

    if mistake is not None:
        monkeypatch.setattr(predicted_drafts, "_normalise", lambda x, *_: x)
    prompt = np.random.default_rng(4).integers(1, 131, 150).tolist()
    seen: list[tuple[list[int], list[int]]] = []
    with open_llm(directory, speculative_config=MTP, dtype="float32", max_num_seqs=8) as llm:
        drafts = llm.engine.drafts
        assert drafts is not None
        propose = drafts.propose

        def watch(asked, rows):
            given = propose(asked, rows)
            for request, tokens in given.items():
                seen.append((request.prompt + request.output, [*tokens]))
            return given

        monkeypatch.setattr(drafts, "propose", watch)
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        llm.generate([prompt, prompt[:5]], params, use_tqdm=False)
    assert len(seen) > 20 and max(len(tokens) for _, tokens in seen) == 2
    right = [given == reference(tokens, len(given)) for tokens, given in seen]
    assert all(right) if mistake is None else sum(right) < len(right) / 4
