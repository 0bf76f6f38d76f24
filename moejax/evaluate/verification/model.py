"""Compares a running engine with the reference, layer by layer, and the reference with
transformers."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.memory.device_memory import host_available_bytes
from moejax.checkpoints.load import checkpoint_format
from moejax.checkpoints.tensor_checkpoint import open_tensors
from moejax.errors import UserError
from moejax.evaluate.verification.reference import Followed, Reference, Tensors
from moejax.evaluate.verification.table import Check
from moejax.evaluate.verification.words import check_words
from moejax.models.directory import read_json
from moejax.models.model_config import ModelConfig
from moejax.requests.sampling_params import SamplingParams
from moejax.start.report.model_info import model_info

if TYPE_CHECKING:
    from moejax.serve.llm import LLM

TEXT = """\
The old house stood by the sea. In winter the waves came up to the garden wall, and the people of
the village said that one day the water would take it. But the woman who lived there did not want to
leave. She had been born in the house, and so had her mother, and every morning she walked down to
the beach to see what the night had brought: a piece of wood, a shoe, a bottle without a letter.
"""
GENERATED = 8
"""Tokens that are generated after the text, to check the steps that decode."""

EXACT = 2e-3
"""How far the first layer of a run in float32 may be from the reference, as a share of its values.
Layer n may be sqrt(n) times as far, as errors add up like a random walk. (The engine gives out
hidden states as float16, which alone is 3e-4.)"""

TIMES = 3
"""How many times as far as that a run in another dtype may be as the reference with its values
rounded to this dtype: so a layer of more parts may be farther off, and one that enlarges errors."""

MOST = 0.5
"""How far any run may be. States that have nothing in common are 1.4 times their values apart, and
rounded values may not be finite, as in float16."""

FEW = 4
"""How many times as far as the limit any single token may be. A token's rounding errors are those
of thousands of products, so tokens differ little: in the demo the farthest one is 1.9 times as far
as the middle one (bfloat16). The reference takes the engine's choice of experts, so that no token
is far off for a choice by a hair."""

HAIRS = 0.9
"""The share of tokens that FEW is for where values are rounded and routers are sparsemixers: which
of two experts comes first there, and which others count in the weights, may differ by a hair."""

ORDERED = 0.9
"""A trained model's loss on a text is at most this share of its loss on the same tokens in another
order."""

AGREE = 2e-3
"""Most difference between log-probabilities of the reference and of transformers, both float32."""


def verify(
    start: Callable[..., contextlib.AbstractContextManager[LLM]],
    directory: Path,
    text: str,
    tokens: int,
    report: Callable[..., None],
) -> Iterator[Check]:
    """Yields each check as soon as it is made.

    - `start`: starts the engine on the checkpoint; its keyword is the trace to record.
    - `directory`: a safetensors checkpoint, or a GGUF file.
    - `text`: of some paragraphs, in a language that the model was trained on.
    - `tokens`: how many of the text's tokens are used.
    - `report`: a progress bar's, over the layers.

    Raises UserError for a model without a reference.
    """
    checkpoint = open_tensors(directory, checkpoint_format(directory))
    with contextlib.ExitStack() as stack:
        tensors = Tensors(checkpoint, stack)
        Reference(checkpoint.config, tensors)  # refuses before the weights are read
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        with start(trace=f"{scratch}/trace,arrays=gate_input") as llm:
            tokenizer, config, dtype = llm.get_tokenizer(), llm.config, llm.dtype
            yield from check_words(tokenizer, config, directory)
            ids = _ids(llm, text, tokens)
            sequence, followed, decoded = _run(llm, ids)
        reference = Reference(config, tensors)
        with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
            states, errors, moe = reference.embed(sequence[:-1]), [], 0
            misrouted, count = 0, len(states)
            rounds = None if dtype == "float32" else dtype
            share = HAIRS if rounds and config.scoring_func == "sparsemixer" else 1.0
            states = states if rounds is None else jnp.tile(states, (2, 1))
            layers = reference.layers(states, followed=followed, dtype=rounds)
            for layer, (after, normed, wrong) in enumerate(layers):
                report(layer + 1)
                states, misrouted = after, misrouted + wrong
                if config.moe_layers[layer]:
                    limit = _limit(layer, np.asarray(normed), count)
                    far = _distances(followed.inputs[moe], np.asarray(normed[:count]))
                    errors.append((layer, far, limit))
                    moe += 1
            logits = reference.logits(states, rounds)
            logits, again = logits[:count], logits[count:]
            yield _of_layers(errors, dtype, share)
            yield _of_routing(misrouted, moe * count)
            last = slice(len(ids) - 1, None)
            both = logits[last], again[last]
            yield _of_logits(decoded, *both, config.num_hidden_layers, share)
            if tokenizer is not None:
                yield _of_the_text(reference, logits[: len(ids) - 1], ids)
            yield _of_transformers(reference, directory, ids)


def _ids(llm: LLM, text: str, tokens: int) -> list[int]:
    shapes = llm.engine.runner.shapes
    most = min(tokens, shapes.chunk * shapes.prefill_chunks)
    most = min(most, llm.engine.scheduler.max_model_len - GENERATED)
    if (tokenizer := llm.get_tokenizer()) is None:
        rng = np.random.default_rng(0)
        return rng.integers(0, llm.config.vocab_size, most).tolist()
    ids = tokenizer(text)["input_ids"][:most]
    if len(ids) < 2:
        raise UserError("the text has fewer than two tokens; give a longer one with --text")
    return ids


def _run(llm: LLM, ids: list[int]) -> tuple[list[int], Followed, np.ndarray]:
    """Runs the text and some greedy tokens. Returns (all tokens; the routing of all tokens but the
    last; the logits of the generated tokens)."""
    chunk, count = llm.engine.runner.shapes.chunk, len(ids) + GENERATED - 1
    moe = sum(llm.config.moe_layers)
    hidden = np.full((moe, count, llm.config.hidden_size), np.nan, np.float32)
    chosen = np.zeros((moe, count, llm.config.num_experts_per_tok), np.int32)
    logits: list[np.ndarray] = []

    def listen(step: Any) -> None:
        ids_found = np.asarray(step.output.routing.ids)
        read = np.asarray(step.output.arrays.gate_input, np.float32)
        for into, found in ((chosen, ids_found), (hidden, read)):
            for i, piece in enumerate(step.work.chunks):
                rows = found[:, i * chunk : i * chunk + piece.length]
                into[:, piece.start : piece.start + piece.length] = rows
            for row, _ in step.sampled():
                if not step.work.chunks:
                    into[:, len(ids) + len(logits) - 1] = found[:, row]
        for row, _ in step.sampled():
            logits.append(np.asarray(step.output.logits)[row])

    llm.engine.listener = listen
    params = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True)
    (output,) = llm.generate([ids], params, use_tqdm=False)
    llm.engine.listener = None
    tokens = [*ids, *output.outputs[0].token_ids]
    return tokens, Followed(hidden, chosen), np.stack(logits)


def _distances(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """How far the values of each token [T, N] are from expected ones, as a share of these."""
    far = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return np.where(np.isfinite(far), far, np.inf)


def _limit(layer: int, values: np.ndarray, count: int) -> float:
    """How far a token of a layer may be off. `values`: the reference's of `count` tokens, and, for
    a run that rounds them, again with rounding."""
    limit = EXACT * math.sqrt(layer + 1)
    own, again = values[:count], values[count:]
    if len(again):
        limit = max(limit, TIMES * float(np.median(_distances(again, own))))
    return min(limit, MOST)


def _is_near(far: np.ndarray, limit: float, share: float) -> bool:
    farthest = np.quantile(far, share, method="lower")
    return bool(np.median(far) <= limit and farthest <= FEW * limit)


def _of_layers(
    errors: Sequence[tuple[int, np.ndarray, float]], dtype: str, share: float = 1.0
) -> Check:
    """errors: (layer, distances of its tokens, how far they may be) of each layer; share: see
    HAIRS."""
    name = f"{len(errors)} layers against float32"
    wrong = [error for error in errors if not _is_near(*error[1:], share)]
    if wrong:
        layer, far, limit = wrong[0]
        token, middle = int(far.argmax()), float(np.median(far))
        said = f"layer {layer} is {middle:.2%} off, token {token} {far[token]:.2%}"
        return Check(name, False, f"{said}, of {limit:.2%}; the first of {len(wrong)}")
    layer, far, _ = max(errors, key=lambda one: one[1].max())
    said = f"at most {np.median(far):.2%} off, a token {far.max():.2%}, layer {layer} of {dtype}"
    return Check(name, True, said)


def _of_routing(wrong: int, every: int) -> Check:
    """Whether the engine's experts are those that its routers' inputs ask for."""
    said = f"{every - wrong} of {every} choices are those of the router"
    return Check("experts that were chosen", not wrong, said)


def _of_logits(
    found: np.ndarray, expected: np.ndarray, again: np.ndarray, layers: int, share: float
) -> Check:
    found, expected, again = (x - x.mean(1, keepdims=True) for x in (found, expected, again))
    far = _distances(found, expected)
    same = int((found.argmax(1) == expected.argmax(1)).sum())
    limit = _limit(layers, np.concatenate([expected, again]), len(expected))
    said = f"{np.median(far):.2%} off of {limit:.2%}"
    said = f"{said}, {same} of {len(found)} greedy tokens the same"
    return Check("logits of generated tokens", _is_near(far, limit, share), said)


def _log_probabilities(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64) - logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def _loss(logits: np.ndarray, ids: Sequence[int]) -> float:
    return -float(_log_probabilities(logits)[np.arange(len(ids) - 1), ids[1:]].mean())


def _of_the_text(reference: Reference, logits: np.ndarray, ids: list[int]) -> Check:
    """Compares the text's loss with that of the same tokens in another order. The two are alike for
    another model's tokenizer, and for weights or a rotation that are not the model's."""
    other = np.random.default_rng(0).permutation(ids).tolist()
    loss, shuffled = _loss(logits, ids), _loss(reference.logits_of(other[:-1]), other)
    # e^709 is the largest power that a float holds.
    own, others = (math.exp(min(each, 700)) for each in (loss, shuffled))
    said = f"perplexity {own:.4g}, of its tokens in another order {others:.4g}"
    return Check("text", loss <= ORDERED * shuffled, said)


def _of_transformers(reference: Reference, directory: Path, ids: list[int]) -> Check:
    """Compares the reference, by its own choice of experts, with transformers, over as many layers
    as fit into memory."""
    name = "transformers in float32"
    if (
        importlib.util.find_spec("torch") is None
        or importlib.util.find_spec("transformers") is None
    ):
        return Check(name, None, "torch or transformers is not installed")
    config = reference.config
    if directory.is_file():
        return Check(name, None, "it does not read this file")
    if config.quantization is not None:
        return Check(name, None, f"the files are quantized ({config.quantization.method})")
    layers = _layers_that_fit(reference)
    if not layers:
        return Check(name, None, "not one layer fits into memory")
    logits = reference.logits_of(ids, layers)
    try:
        theirs = _their_logits(reference.config, directory, ids, layers)
    except Exception as error:  # of another library: what it cannot load is not a fault here
        return Check(name, None, f"it cannot load the checkpoint: {_first_line(error)}")
    found = np.abs(_log_probabilities(logits) - _log_probabilities(theirs)).max()
    every = "all" if layers == config.num_hidden_layers else f"the first {layers}"
    return Check(name, bool(found < AGREE), f"{every} layers, log-probabilities {found:.1e} apart")


def _layers_that_fit(reference: Reference) -> int:
    """How many layers transformers can have in memory twice, as it loads them."""
    info, config = model_info(reference.config, "float32"), reference.config
    outside = sum(info.bytes.get(part, 0) for part in ("embedding", "output head"))
    a_layer = (sum(info.bytes.values()) - outside) / config.num_hidden_layers
    fit = (host_available_bytes() / 2 - outside) / a_layer
    return max(0, min(config.num_hidden_layers, int(fit)))


def _their_logits(ours: ModelConfig, directory: Path, ids: list[int], layers: int) -> np.ndarray:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    text = config.get_text_config()
    for key, value in list(vars(text).items()):  # lists of all layers
        if isinstance(value, list) and len(value) == ours.num_hidden_layers:
            setattr(text, key, value[:layers])
    text.num_hidden_layers = layers * ours.attentions  # LongCat-Flash counts these
    names = read_json(directory / "config.json").get("architectures") or [""]
    kind = getattr(transformers, names[0], transformers.AutoModelForCausalLM)
    model = kind.from_pretrained(
        directory, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
    del model
    gc.collect()
    return logits


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:100]


def free_text(path: str | None) -> str:
    """The text of a file; None: TEXT. Raises UserError for a file that cannot be read."""
    if path is None:
        return TEXT
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text: {error}") from error


def require_files(directory: Path) -> Path:
    """The directory or GGUF file. Raises UserError for what is no published file, but was made of
    one."""
    if checkpoint_format(directory) not in ("safetensors", "gguf"):
        raise UserError(
            f"{directory}: verify reads safetensors and GGUF files, as they were published; name "
            "the checkpoint that this one was made of"
        )
    return directory
