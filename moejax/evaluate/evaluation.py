"""Measures how likely texts are to a model: perplexity by sliding windows."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moejax.checkpoints.conversion import installed_version
from moejax.errors import UserError
from moejax.evaluate.comparison import Units
from moejax.evaluate.token_ids import TokenIds
from moejax.models.model_config import config_digest
from moejax.progress import count_progress
from moejax.serve.generation import run_scores

if TYPE_CHECKING:
    from moejax.serve.llm import LLM

DEFAULT_WINDOW = 2048
"""Tokens of a window, if the model has room for them: what papers on compressed models
mostly use."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Tokens [begin, end) of a text, computed alone from position 0; [first, end) are scored."""

    begin: int
    end: int
    first: int


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """The likelihood of one or more texts."""

    tokens: int
    windows: int
    scored_tokens: int
    """Scored tokens: all but the first of each text, or with stride = window all but the first of
    each window."""
    scored_bytes: int | None
    """Bytes of UTF-8 text of the scored tokens; special tokens have none. None for token ids, whose
    text is unknown."""
    nll: float
    """Sum over the scored tokens of −ln p(token | the window's tokens before it)."""

    @property
    def bits_per_token(self) -> float:
        return self.nll / math.log(2) / self.scored_tokens

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, which is comparable between tokenizers, unlike the other two
        figures (lm-eval's bits_per_byte)."""
        return None if self.scored_bytes is None else self.nll / math.log(2) / self.scored_bytes

    @property
    def perplexity(self) -> float:
        """exp of the mean −ln p: transformers' "Perplexity of fixed-length models"."""
        return float(np.exp(self.nll / self.scored_tokens))


@dataclasses.dataclass(frozen=True)
class TextLikelihood(Likelihood):
    """The likelihood of one text."""

    name: str
    sha256: str
    """SHA-256 of the whole text's UTF-8 bytes, or of the file of token ids."""
    logprobs: np.ndarray = dataclasses.field(repr=False, compare=False)
    """float64[tokens]: ln p of each token, NaN for tokens that are not scored."""
    scored: tuple[Window, ...] = dataclasses.field(default=(), repr=False, compare=False)
    """The windows that scored the tokens."""


@dataclasses.dataclass(frozen=True)
class PerplexityResult:
    """Perplexity of texts, each and all together. Only `run` depends on budgets, policies or the
    other windows."""

    window: int
    stride: int
    limit: int | None
    texts: tuple[TextLikelihood, ...]
    model: Mapping[str, Any] = dataclasses.field(repr=False, compare=False)
    """The result of `model_report`."""
    run: Mapping[str, Any] = dataclasses.field(repr=False, compare=False)
    """The results of `run_report` and `cost_report`."""

    @property
    def total(self) -> Likelihood:
        """The likelihood over the scored tokens of all texts, each counted alike."""
        names = [f.name for f in dataclasses.fields(Likelihood) if f.name != "scored_bytes"]
        nbytes = [text.scored_bytes for text in self.texts if text.scored_bytes is not None]
        return Likelihood(
            **{n: sum(getattr(text, n) for text in self.texts) for n in names},
            scored_bytes=sum(nbytes) if len(nbytes) == len(self.texts) else None,
        )


def check_windows(window: int | None, stride: int | None, limit: int | None) -> None:
    """Raises UserError for values that fit no model; see `perplexity`."""
    if window is not None and window < 2:
        raise UserError(f"window must be at least 2 tokens, got {window}: the first has no context")
    if stride is not None and stride < 1:
        raise UserError(f"stride must be at least 1 token, got {stride}")
    if window is not None and stride is not None and stride > window:
        raise UserError(
            f"stride {stride} is larger than window {window}, so the tokens in between would not "
            f"be scored; a stride is from 1 to the window"
        )
    if limit is not None and limit < 2:
        raise UserError(f"limit must be at least 2 tokens, got {limit}")


def sliding_windows(tokens: int, window: int, stride: int) -> list[Window]:
    """Returns windows over a text of `tokens` tokens, as in transformers' "Perplexity of
    fixed-length models": they begin at multiples of stride, the last one ends with the text, and
    each scores the tokens that the previous one did not reach. A window's first token has no
    context and is not scored, so a window of one token is left out."""
    found, scored = [], 0
    for begin in range(0, tokens, stride):
        end = min(begin + window, tokens)
        first = max(scored, begin + 1)
        if first < end:
            found.append(Window(begin, end, first))
        scored = end
        if end == tokens:
            break
    return found


def perplexity(
    llm: LLM,
    texts: str | TokenIds | Sequence[str | TokenIds] | Mapping[str, str | TokenIds],
    *,
    window: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    progress: bool = False,
) -> PerplexityResult:
    """Scores texts by sliding windows, many windows a prefill step.

    - `texts`: one, several, or several by name; each a text, or documents of token ids, which need
      no tokenizer and have their own windows.
    - `window`: tokens of a window; None: DEFAULT_WINDOW, at most the model's max_model_len.
    - `stride`: tokens from one window's beginning to the next one's; None: half of the window. With
      less than the window, each token but a text's first is scored once, with at least window −
      stride tokens of context if there are so many.
    - `limit`: score only the first tokens of each text.
    - `progress`: show a bar on stderr.

    A text is tokenized whole, with special tokens, like a prompt. Raises UserError for a text
    without tokenizer, an empty text or one of less than two tokens, text that is no Unicode, ids
    outside of the vocabulary, window, stride or limit out of range, and log-probabilities that are
    not finite.
    """
    window, stride, encoded = encode_texts(llm, texts, window, stride, limit)
    windows = [(text, w) for text in encoded for w in text.windows]
    total, before = sum(w.end - w.first for _, w in windows), llm.stats()
    sequences = (text.ids[w.begin : w.end].tolist() for text, w in windows)
    # So many at once as fill two prefill steps, each of which reads an expert once for all of them.
    most, began = 2 * llm.engine.scheduler.prefill_chunks, time.perf_counter()
    with (
        count_progress("scoring", total, 0, progress) as report,
        contextlib.closing(run_scores(llm.engine, sequences, most)) as steps,
    ):
        compiled, compile_s, scored, start = llm.engine.runner.executables(), 0.0, 0, began
        for ended in steps:
            now, found = time.perf_counter(), llm.engine.runner.executables()
            compile_s += now - start if found != compiled else 0.0
            start, compiled = now, found
            for place, scores in ended:
                scored += keep_scores(*windows[place], scores)
            report(scored)
    seconds, found = time.perf_counter() - began, tuple(map(likelihood, encoded))
    run = run_report(llm) | cost_report(seconds, compile_s, encoded, [llm.stats()], [before])
    return PerplexityResult(window, stride, limit, found, model_report(llm), run)


def keep_scores(text: EncodedText, window: Window, scores: np.ndarray) -> int:
    """Keeps a window's scores, of all its tokens but the first; returns how many count."""
    text.logprobs[window.first : window.end] = scores[window.first - window.begin - 1 :]
    return window.end - window.first


def encode_texts(
    llm: LLM,
    texts: str | TokenIds | Sequence[str | TokenIds] | Mapping[str, str | TokenIds],
    window: int | None,
    stride: int | None,
    limit: int | None,
) -> tuple[int, int, list[EncodedText]]:
    """Returns (window, stride, the texts with their windows), none scored. Arguments and errors are
    those of `perplexity`."""
    most = llm.engine.scheduler.max_model_len
    window = min(DEFAULT_WINDOW, most) if window is None else window
    stride = max(window // 2, 1) if stride is None else stride
    check_windows(window, stride, limit)
    if window > most:
        longest = llm.config.max_position_embeddings
        more = f", or max_model_len from {window} on" if window <= longest else ""
        raise UserError(
            f"window {window} is larger than max_model_len {most}: give a window of at most {most}"
            f"{more} (the model has {longest} positions)"
        )
    if isinstance(texts, str | TokenIds):
        texts = [texts]
    if not isinstance(texts, Mapping):
        texts = {f"text {i}": text for i, text in enumerate(texts)}
    if not texts:
        raise UserError("there is no text to score; give at least one")
    encoded = [_encode(llm, name, text, window, stride, limit) for name, text in texts.items()]
    return window, stride, encoded


def result_json(result: PerplexityResult) -> dict[str, Any]:
    """Returns a result as plain data for JSON, with everything that it came from.

    Everything outside of `run` says what was computed: no budget, policy, driver or other window
    changes it, unless `precision` says that it changes bits and mixes versions. `run` says how it
    was computed, and the cost. prefill_tokens is a shape of XLA's matrix products, whose last bits
    depend on it.
    """
    files = [{"name": text.name, "sha256": text.sha256, **_figures(text)} for text in result.texts]
    # Names the texts in their order.
    data = hashlib.sha256("".join(f"{text.sha256}\n" for text in result.texts).encode())
    return {
        "task": "perplexity",
        **result.model,
        "window": result.window,
        "stride": result.stride,
        "limit": result.limit,
        "data": {"sha256": data.hexdigest(), "texts": files},
        "total": _figures(result.total),
        "run": dict(result.run),
    }


_VERSIONS = ("moejax", "jax", "jaxlib", "numpy", "tokenizers")


def model_report(llm: LLM) -> dict[str, Any]:
    """Returns the model and software of an evaluation as plain data for JSON: everything that may
    change a bit of the figures. prefill_tokens is a shape of XLA's matrix products, whose last bits
    depend on it."""
    runner, stats, scheduler = llm.engine.runner, llm.stats(), llm.engine.scheduler
    return {
        "model": {
            "path": llm.model,
            "config_digest": config_digest(llm.config),
            "dtype": llm.dtype,
            "experts": {record.version: record.nbytes for record in runner.layout.records},
            "precision": {
                **llm.plan.settings.precision.report(),
                **{key: stats["precision"][key] for key in ("arithmetic", "quantizers")},
            },
        },
        "versions": {name: installed_version(name) for name in _VERSIONS},
        "device": stats["device"],
        "ops": stats["ops"],
        "cache_aware_routing": stats["cache_aware_routing"],
        "prefill_tokens": scheduler.prefill_chunks * scheduler.chunk,
    }


def run_report(llm: LLM) -> dict[str, Any]:
    """Returns the choices for speed, as plain data for JSON."""
    stats, scheduler = llm.stats(), llm.engine.scheduler
    return {
        **{name: stats[name] for name in ("driver", "eviction", "control")},
        "max_model_len": scheduler.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        **{name: stats[name] for name in ("arena", "kv", "store_bytes", "notes")},
    }


def cost_report(
    seconds: float,
    compile_s: float,
    texts: Sequence[EncodedText],
    after: Sequence[Mapping[str, Any]],
    before: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Returns the cost of scoring these texts: layer-experts that prefill steps needed, bytes over
    the link, rates without compilation.

    - `seconds`, `compile_s`: seconds of the scoring without tokenizing, and of its steps that
      compiled.
    - `after`, `before`: `LLM.stats` of each model that scored.
    """

    def add(part: str, name: str) -> int:
        return sum(one[part][name] for one in after) - sum(one[part][name] for one in before)

    windows = [w for text in texts for w in text.windows]
    computed = sum(w.end - w.begin - 1 for w in windows)
    rate = computed / max(seconds - compile_s, 1e-9)
    counts = {n: add("experts", n) for n in ("activations", "hits", "fills", "read_through")}
    return {
        "seconds": seconds,
        "compile_s": compile_s,
        "computed_tokens": computed,
        "prefill_steps": add("steps", "prefill"),
        **counts,
        "misses": counts["fills"] + counts["read_through"],
        "hit_rate": counts["hits"] / counts["activations"] if counts["activations"] else None,
        **{f"{name}_bytes": add("bytes", name) for name in ("fill", "read_through")},
        "tokens_per_s": rate,
        "scored_tokens_per_s": rate * sum(w.end - w.first for w in windows) / computed,
    }


def text_sha256(text: str | TokenIds) -> str:
    """Returns the value that `TextLikelihood.sha256` will have. Raises UserError for text that is
    no Unicode."""
    if isinstance(text, TokenIds):
        return text.sha256
    try:
        return hashlib.sha256(text.encode()).hexdigest()
    except UnicodeEncodeError as error:
        raise UserError(f"the text is not valid Unicode ({error})") from None


def window_units(result: PerplexityResult) -> list[Units]:
    """Returns the bits of each text's windows, by which two runs over the same windows are
    compared."""
    found = []
    for text in result.texts:
        parts = [(w, -math.fsum(text.logprobs[w.first : w.end])) for w in text.scored]
        keys = [f"{text.sha256[:16]}:{w.begin}-{w.end}:{w.first}" for w, _ in parts]
        sums = [nll / math.log(2) for _, nll in parts]
        found.append(
            Units(text.name, "bits/token", keys, sums, [w.end - w.first for w, _ in parts])
        )
    return found


# ---- pieces


@dataclasses.dataclass(frozen=True)
class EncodedText:
    """A text that is being scored: `logprobs` is filled in window by window."""

    name: str
    sha256: str
    ids: np.ndarray
    nbytes: np.ndarray | None
    """int64[tokens]: bytes of text that each token stands for."""
    windows: list[Window]
    logprobs: np.ndarray = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "logprobs", np.full(len(self.ids), np.nan))


def _encode(
    llm: LLM, name: str, text: str | TokenIds, window: int, stride: int, limit: int | None
) -> EncodedText:
    if isinstance(text, TokenIds):
        return _encode_ids(name, text, llm.config.vocab_size, window, stride, limit)
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise UserError(
            f"{llm.model} has no tokenizer, without which text has no tokens; name a directory "
            f"with its tokenizer.json (--tokenizer DIR), or give token ids (--token-ids FILE)"
        )
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} is not valid Unicode text ({error})") from None
    if not data:
        raise UserError(f"{name} is empty; there is nothing to score")
    encoding = tokenizer(text, return_offsets_mapping=True)
    ids = np.asarray(encoding["input_ids"], np.int32)
    nbytes = _token_bytes(text, np.asarray(encoding["offset_mapping"], np.int64).reshape(-1, 2))
    ids, nbytes = ids[:limit], nbytes[:limit]
    windows = sliding_windows(len(ids), window, stride)
    if not sum(nbytes[w.first : w.end].sum() for w in windows):
        raise _too_short(name, len(ids))
    return EncodedText(name, hashlib.sha256(data).hexdigest(), ids, nbytes, windows)


def _encode_ids(
    name: str, given: TokenIds, vocabulary: int, window: int, stride: int, limit: int | None
) -> EncodedText:
    """Encodes documents one after the other, with no window over two of them."""
    ids = np.concatenate(given.documents)
    bad = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if len(bad):
        raise UserError(
            f"{name}: token {bad[0]} has the id {ids[bad[0]]}, outside of the vocabulary of "
            f"{vocabulary}; were they made for this model, and with this --token-dtype?"
        )
    ids, windows, begin = ids[:limit].astype(np.int32), [], 0
    for document in given.documents:
        tokens = max(min(len(document), len(ids) - begin), 0)
        for w in sliding_windows(tokens, window, stride):
            windows.append(Window(begin + w.begin, begin + w.end, begin + w.first))
        begin += len(document)
    if not windows:
        raise _too_short(name, len(ids))
    return EncodedText(name, given.sha256, ids, None, windows)


def _too_short(name: str, tokens: int) -> UserError:
    return UserError(
        f"{name} is too short to score (tokens: {tokens}); a text needs at least two, since the "
        f"first has no context"
    )


def _token_bytes(text: str, offsets: np.ndarray) -> np.ndarray:
    """Returns UTF-8 bytes of the text for each token, int64[tokens]; their sum is the text's.

    - `offsets`: int64[tokens, 2], characters as the tokenizer reports them. A character in several
      tokens counts for the first of them, text between tokens for the next one. Special tokens that
      the tokenizer added have (0, 0).
    """
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    width = 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)
    until = np.concatenate([[0], np.cumsum(width)])
    ends = np.maximum.accumulate(until[offsets[:, 1]])
    ends[-1:] = until[-1]
    return np.diff(ends, prepend=0)


def likelihood(text: EncodedText) -> TextLikelihood:
    """Returns the likelihood of a text whose windows are all scored. Raises UserError for
    log-probabilities that are not finite."""
    scored = np.zeros(len(text.ids), bool)
    for window in text.windows:
        scored[window.first : window.end] = True
    bad = np.flatnonzero(scored & ~np.isfinite(text.logprobs))
    if len(bad):
        raise UserError(
            f"{text.name}: the model's log-probability of token {bad[0]} is "
            f"{text.logprobs[bad[0]]}; values overflow or weights are damaged, try --dtype float32"
        )
    return TextLikelihood(
        tokens=len(text.ids),
        windows=len(text.windows),
        scored_tokens=int(scored.sum()),
        scored_bytes=None if text.nbytes is None else int(text.nbytes[scored].sum()),
        # Rounded once, in whatever order windows finished or files were named.
        nll=-math.fsum(text.logprobs[scored]),
        name=text.name,
        sha256=text.sha256,
        logprobs=text.logprobs,
        scored=tuple(text.windows),
    )


def _figures(found: Likelihood) -> dict[str, Any]:
    counts = {f.name: getattr(found, f.name) for f in dataclasses.fields(Likelihood)}
    bits = {"bits_per_token": found.bits_per_token, "bits_per_byte": found.bits_per_byte}
    return {**counts, **bits, "perplexity": found.perplexity}
