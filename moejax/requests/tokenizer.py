"""Text to token ids and back, as a stream.

transformers is imported when a tokenizer is loaded, not before: it takes about a second, and token
ids alone do not need it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moejax.errors import UserError, as_user_error
from moejax.models.config import ModelConfig
from moejax.models.directory import read_bounded, read_json, require_own_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_OTHER_FORMATS = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json")

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""What transformers reads of a directory with tokenizer.json, besides TEMPLATES."""

TEMPLATES = "additional_chat_templates"
"""A directory of further chat templates."""

MOST_TABLE = 64 * 2**20
"""Bytes of tokenizer.json; those of vocabularies with 260,000 tokens have 35 MB, and reading takes
several times as much memory."""

MOST_ADDED = 1 << 16
"""Added tokens of a tokenizer; real ones have some thousands."""

MOST_SMALL_FILE = 8 * 2**20
"""Bytes of a tokenizer's file besides tokenizer.json; large ones have some 100 KB."""

MOST_TOKEN = 10_000
"""Characters of a token; the longest of real vocabularies are runs of some hundred spaces."""

MOST_GROWTH = 100
"""How many times as long a decoder may make a text; it works in the engine's thread."""

_NO_LIMIT = int(1e30)
"""transformers' own figure for no limit. The engine refuses long prompts with its max_model_len; a
limit in the tokenizer would only add a warning."""

_PROMPT_CONTEXT = 6
"""Prompt tokens that may bear on how the first generated one is written (vLLM's number)."""


def load_tokenizer(
    directory: str | os.PathLike[str], required: bool = False
) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a Hugging Face model directory; None if it has none, unless it is required.

    Reads local files only: ``tokenizer.json`` as it stands, with the special tokens and the chat
    template of ``tokenizer_config.json``. Safe to call from another thread, so that the second it
    takes to import transformers can pass while something compiles.

    No code of the checkpoint runs (``auto_map`` is ignored), and files that are links out of the
    directory are refused (require_own_file). Raises UserError if the files are damaged, of a format
    without ``tokenizer.json``, or missing where they are required.
    """
    directory = Path(directory)
    for name in [*FILES, *directory.glob(f"{TEMPLATES}/*")]:
        if os.path.lexists(directory / name):
            # All of it would be read, holes too.
            most = MOST_TABLE if name == "tokenizer.json" else MOST_SMALL_FILE
            require_own_file(directory / name, directory, most, "a tokenizer")
    if not (directory / "tokenizer.json").exists():
        others = [name for name in _OTHER_FORMATS if (directory / name).is_file()]
        if not others and required:
            raise UserError(f"{directory}: no tokenizer there; it needs a tokenizer.json")
        if not others:
            return None
        raise UserError(
            f"{directory} has {', '.join(others)} but no tokenizer.json; write one with "
            f"transformers: AutoTokenizer.from_pretrained({str(directory)!r})"
            f".save_pretrained({str(directory)!r})"
        )
    _check_table(directory / "tokenizer.json")
    # Else it advises on stderr to install PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import PreTrainedTokenizerFast

    try:
        # AutoTokenizer would rebuild the tokenizer from its class's own rules, or ask to run
        # the checkpoint's code (auto_map); the file is what the model was trained with. It is
        # named, since tokenizer_config.json may name another one, anywhere.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            directory,
            local_files_only=True,
            model_max_length=_NO_LIMIT,
            tokenizer_file=str(directory / "tokenizer.json"),
            trust_remote_code=False,
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of tokenizers: a bare Exception, or a panic of its code
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"the tokenizer files in {directory} cannot be read ({first_line}); "
            f"copy tokenizer.json and tokenizer_config.json again from the model's source"
        ) from error
    if (growth := _decoder_growth(tokenizer)) > MOST_GROWTH:
        raise UserError(
            f"{directory}: the decoder in tokenizer.json makes text {growth:.0f} times as long; "
            f"{MOST_GROWTH} times is the most"
        )
    return tokenizer


def check_vocabulary(
    tokenizer: PreTrainedTokenizerFast | None, config: ModelConfig, directory: str | os.PathLike
) -> PreTrainedTokenizerFast | None:
    """The tokenizer; UserError if it has ids that the model has no embedding for, or a token that
    would fill memory with its text.

    Fewer ids than vocab_size are normal: tables of embeddings are padded.
    """
    ids = {} if tokenizer is None else tokenizer.get_vocab()
    if (longest := max(map(len, ids), default=0)) > MOST_TOKEN:
        raise UserError(
            f"{directory}: tokenizer.json has a token of {longest} characters; {MOST_TOKEN} is the "
            "most"
        )
    token = max(ids, key=ids.__getitem__, default="")
    if ids and ids[token] >= config.vocab_size:
        raise UserError(
            f"{directory}: tokenizer.json has token {token!a} with id {ids[token]}, but "
            f"config.json has vocab_size {config.vocab_size}; they are of different models"
        )
    return tokenizer


def _check_table(path: Path) -> None:
    """Raises UserError for more than MOST_ADDED added tokens, each of which is looked for in every
    text, and for a precompiled map of characters that says it is longer than it is: tokenizers
    takes its word, and ends the process where there is no such memory."""
    raw = read_bounded(path, MOST_TABLE, "a tokenizer")
    many = raw.count(b'"content"') > MOST_ADDED
    # A name may be written with escapes of its letters.
    if not many and b"recompiled" not in raw and not re.search(rb"\\u00[4-7]", raw):
        return
    table = read_json(path)
    if isinstance(added := table.get("added_tokens"), list) and len(added) > MOST_ADDED:
        raise UserError(f"{path}: {len(added)} added tokens; at most {MOST_ADDED} are read")
    parts = [table.get("normalizer")]
    while parts:
        part = parts.pop()
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        given = part.get("precompiled_charsmap") if isinstance(part, dict) else None
        data = b""
        with contextlib.suppress(TypeError, ValueError):  # tokenizers refuses what is no base64
            data = base64.b64decode(given or "")
        if int.from_bytes(data[:4], "little") > max(len(data) - 4, 0):
            raise UserError(f"{path}: its precompiled_charsmap is damaged; download it again")


def is_plain(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether encoding a text takes memory and time in proportion to its length, as the rules of
    the tokenizer say: no normalizer that multiplies text, no pattern with a repeated group, which
    may take exponential time, and no template that repeats its tokens or adds many."""
    backend = tokenizer.backend_tokenizer
    every = backend.normalizer, backend.pre_tokenizer, backend.post_processor
    parts = [part.__getstate__() for part in every if part]
    rules = [rule for part in parts for rule in _rules(json.loads(part))]
    return all(map(_is_plain_rule, rules))


def _decoder_growth(tokenizer: PreTrainedTokenizerFast) -> float:
    """How many times as long text may become by the decoder's replacements."""
    decoder, growth = tokenizer.backend_tokenizer.decoder, 1.0
    for rule in [] if decoder is None else _rules(json.loads(decoder.__getstate__())):
        if rule["type"] == "Replace":
            growth *= max(1, len(rule["content"]) / max(1, len(rule["pattern"].get("String", ""))))
    return growth


_PLAIN_RULES = frozenset(
    (
        *("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents"),
        *("BertNormalizer", "ByteLevel", "Metaspace", "Digits", "Punctuation", "UnicodeScripts"),
        *("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "CharDelimiterSplit"),
        *("BertProcessing", "RobertaProcessing"),
    )
)
"""Types of normalizers, pre-tokenizers and post-processors without parameters that matter."""

_MOST_TEMPLATE = 1 << 14
"""Characters of a template of special tokens that adds few."""


def _rules(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if part["type"] != "Sequence":
        yield part
    for name in ("normalizers", "pretokenizers", "decoders", "processors"):
        for each in part.get(name, ()):
            yield from _rules(each)


def _is_plain_rule(rule: dict[str, Any]) -> bool:
    if rule["type"] == "Prepend":
        return len(rule["prepend"]) <= 64
    if rule["type"] in ("Replace", "Split"):
        pattern = rule["pattern"]
        longer = len(rule.get("content", "")) > len(pattern.get("String", ""))
        if longer or not pattern.get("String", "-"):
            return False
        return re.search(r"\)[*+{]", pattern.get("Regex", "")) is None
    if rule["type"] == "TemplateProcessing":
        repeated = sum("Sequence" in piece for piece in rule["single"]) > 1
        return not repeated and len(json.dumps(rule)) <= _MOST_TEMPLATE
    return rule["type"] in _PLAIN_RULES


class Detokenizer:
    """Turns a growing list of token ids into text that is never taken back.

    A character whose bytes are not all there yet is held until they are, or until `finish`. With a
    byte-level tokenizer (Qwen, OLMoE, GPT) the pieces together equal
    ``tokenizer.decode(ids, skip_special_tokens)`` of all ids; one that strips the first token's
    space (SentencePiece) needs prompt_ids to keep the space after the prompt. Method: vLLM's
    detokenize_incrementally, which compares two decodings of the last few tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ):
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        # Decoded before, and only there for what it does to the text after it.
        self._context = list(prompt_ids[-_PROMPT_CONTEXT:])
        self._context_length = len(self._decode(self._context))
        self._pending: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        """Add token ids; returns the text that became certain, possibly empty."""
        self._pending += map(int, token_ids)
        text = self._decode(self._context + self._pending)
        # A replacement character at the end may be the start of a character still to come.
        if text.endswith("\ufffd") or len(text) <= self._context_length:
            return ""
        piece = text[self._context_length :]
        self._context, self._pending = self._pending, []
        self._context_length = len(self._decode(self._context))
        return piece

    def finish(self) -> str:
        """What was still held: a replacement character for each broken sequence of bytes."""
        text = self._decode(self._context + self._pending)
        piece = text[self._context_length :]
        self._context, self._pending, self._context_length = [], [], 0
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        with as_user_error("the tokenizer fails on these tokens"):
            text = self._tokenizer.decode(
                token_ids,
                skip_special_tokens=self._skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        assert isinstance(text, str)
        return text
