"""Text to token ids and back, as a stream.

Importing transformers takes most of a second. So what it makes of a model's files is kept in
moejax's cache, and it is imported for a tokenizer that is not there, and for what only it can do.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moejax.cache import own_directory, read_checked, write_checked
from moejax.errors import UserError, as_user_error
from moejax.models.config import ModelConfig
from moejax.models.directory import read_bounded, read_json, require_own_file
from moejax.models.gguf_header import is_gguf
from moejax.requests.gguf_tokenizer import load_gguf_tokenizer
from moejax.requests.tiktoken_table import TIKTOKEN, has_tiktoken, read_tiktoken

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

_OTHER_FORMATS = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json")

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    TIKTOKEN,
)
"""Files that transformers reads from a directory with tokenizer.json, beside TEMPLATES, and what
stands for tokenizer.json in some."""

TEMPLATES = "additional_chat_templates"
"""A directory of further chat templates."""

MOST_TABLE = 64 * 2**20
"""Most bytes of tokenizer.json. A vocabulary with 260,000 tokens has 35 MB, and reading takes
several times as much memory."""

MOST_IDS = 1 << 20
"""Most tokens of a vocabulary. The largest real ones have 262,144, and reading 3 million took more
than a minute."""

MOST_ADDED = 1 << 16
"""Most added tokens of a tokenizer. Real ones have a few thousand."""

MOST_SMALL_FILE = 8 * 2**20
"""Most bytes of a tokenizer's other files. Large ones have about 100 KB."""

MOST_TOKEN = 10_000
"""Most characters of a token. The longest real ones are runs of some hundred spaces."""

MOST_GROWTH = 100
"""How many times longer a decoder may make a text. It runs in the engine's thread."""

MOST_KEPT = 16
"""Most tokenizers in moejax's cache; large ones have 30 MB."""

_NO_LIMIT = int(1e30)
"""transformers' number for no limit. The engine refuses prompts beyond its max_model_len; a limit
in the tokenizer would only add a warning."""

_PROMPT_CONTEXT = 6
"""Prompt tokens that may affect how the first generated token is written (vLLM's number)."""


class Tokenizer:
    """What the engine needs of a model's tokenizer.

    - `backend`: encodes and decodes.
    - `template`: the default chat template; None without any.
    - `special_tokens`: their names and texts, for the template.
    - `load`: makes transformers' tokenizer of the same files.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        template: str | None,
        special_tokens: Mapping[str, Any],
        load: Callable[[], PreTrainedTokenizerFast],
    ):
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.special_tokens = backend, special_tokens
        self._template, self._load = template, load
        self._whole: PreTrainedTokenizerFast | None = None

    @classmethod
    def of(cls, whole: PreTrainedTokenizerFast) -> Tokenizer:
        """The same as transformers' tokenizer."""
        backend = whole.backend_tokenizer
        backend.encode_special_tokens = whole.split_special_tokens
        found = cls(backend, None, whole.special_tokens_map, lambda: whole)
        found.whole()
        return found

    def whole(self) -> PreTrainedTokenizerFast:
        """transformers' tokenizer. Who changes its chat template changes this one's."""
        if self._whole is None:
            self._whole = self._load()
        return self._whole

    @property
    def chat_template(self) -> str | None:
        """The default chat template; None without any."""
        if self._whole is None or not self._whole.chat_template:
            return self._template if self._whole is None else None
        with contextlib.suppress(ValueError):  # of several, none is the default
            return self._whole.get_chat_template()
        return None

    def get_vocab(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)


def load_tokenizer(directory: str | os.PathLike[str], required: bool = False) -> Tokenizer | None:
    """The tokenizer of a Hugging Face model directory or a GGUF file; None if it has none, unless
    it is required.

    Reads local files only: ``tokenizer.json`` unchanged, with the special tokens and the chat
    template of ``tokenizer_config.json``. Another thread may call it, so that the time of
    importing transformers passes while something compiles.

    No code of the checkpoint runs (``auto_map`` is ignored), and files that are links out of the
    directory are refused (require_own_file). Raises UserError if the files are damaged, of a format
    without ``tokenizer.json`` (but Kimi's tiktoken.model), or missing where they are required.
    """
    directory = Path(directory)
    if is_gguf(directory):
        found = load_gguf_tokenizer(directory)
        return None if found is None else Tokenizer.of(found)
    for name in [*FILES, *directory.glob(f"{TEMPLATES}/*")]:
        if os.path.lexists(directory / name):
            # Reading would load the whole file, holes included.
            most = MOST_TABLE if name == "tokenizer.json" else MOST_SMALL_FILE
            require_own_file(directory / name, directory, most, "a tokenizer")
    if has_tiktoken(directory) and not (directory / "tokenizer.json").exists():
        return _keep(directory)
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
    tokenizer = _keep(directory)
    if (growth := _decoder_growth(tokenizer)) > MOST_GROWTH:
        raise UserError(
            f"{directory}: the decoder in tokenizer.json makes text {growth:.0f} times as long; "
            f"{MOST_GROWTH} times is the most"
        )
    return tokenizer


def _keep(directory: Path) -> Tokenizer:
    """Returns the tokenizer from the cache, or makes it and keeps it there."""
    cache, load = own_directory("tokenizers"), functools.partial(_load_whole, directory)
    path = None if cache is None else cache / _digest_of(directory)
    if path is not None and (found := read_checked(path)) is not None:
        from tokenizers import Tokenizer as Backend

        backend, template, special_tokens = json.loads(found)
        return Tokenizer(Backend.from_str(backend), template, special_tokens, load)
    tokenizer = Tokenizer.of(load())
    parts = [tokenizer.backend.to_str(), tokenizer.chat_template, dict(tokenizer.special_tokens)]
    # What is not in the backend's text stays out.
    if path is not None and not tokenizer.backend.encode_special_tokens:
        with contextlib.suppress(OSError, TypeError):  # the next start loads it again
            write_checked(path, json.dumps(parts).encode(), MOST_KEPT)
    return tokenizer


def _digest_of(directory: Path) -> str:
    """A digest of the files of a tokenizer, and of what reads them."""
    digest = hashlib.sha256(b"1")  # the version of what is kept
    for name in ("transformers", "tokenizers"):
        digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    for path in sorted([*(directory / name for name in FILES), *directory.glob(f"{TEMPLATES}/*")]):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _load_whole(directory: Path) -> PreTrainedTokenizerFast:
    # Otherwise transformers advises on stderr to install PyTorch, which is not needed here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import PreTrainedTokenizerFast

    try:
        # AutoTokenizer would rebuild the tokenizer from its class's own rules, or ask to run
        # the checkpoint's code (auto_map); the file is what the model was trained with. It is
        # named, since tokenizer_config.json may name another one, anywhere.
        with tempfile.TemporaryDirectory(prefix="moejax-tokenizer-") as folder:
            table = directory / "tokenizer.json"
            if not table.exists():
                table = Path(folder, table.name)
                read_tiktoken(directory).save(str(table))
            return PreTrainedTokenizerFast.from_pretrained(
                directory,
                local_files_only=True,
                model_max_length=_NO_LIMIT,
                tokenizer_file=str(table),
                trust_remote_code=False,
            )
    except UserError:
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of tokenizers: a bare Exception, or a panic of its code
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"the tokenizer files in {directory} cannot be read ({first_line}); "
            f"copy tokenizer.json and tokenizer_config.json again from the model's source"
        ) from error


def check_vocabulary(
    tokenizer: Tokenizer | None, config: ModelConfig, directory: str | os.PathLike
) -> Tokenizer | None:
    """Returns the tokenizer. Raises UserError for ids without an embedding in the model, and for a
    token whose text would fill memory.

    Fewer ids than vocab_size are normal, since tables of embeddings are padded.
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
    """Raises UserError for more than MOST_IDS tokens, and for more than MOST_ADDED added tokens,
    each of which is searched in every text. Raises it too for a precompiled map of characters that
    claims to be longer than it is: tokenizers would allocate that memory and end the process."""
    raw = read_bounded(path, MOST_TABLE, "a tokenizer")
    # A token of a vocabulary has a colon or a bracket, and a merge, of which there are two a token,
    # a bracket.
    if raw.count(b":") > MOST_IDS or raw.count(b"[") > 4 * MOST_IDS:
        raise UserError(f"{path}: more than {MOST_IDS} tokens; no tokenizer has so many")
    many = raw.count(b'"content"') > MOST_ADDED
    # Letters of a name may be written as escapes.
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
        with contextlib.suppress(TypeError, ValueError):  # tokenizers refuses invalid base64
            data = base64.b64decode(given or "")
        if int.from_bytes(data[:4], "little") > max(len(data) - 4, 0):
            raise UserError(f"{path}: its precompiled_charsmap is damaged; download it again")


def is_plain(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer's rules encode a text in time and memory proportional to its length: no
    normalizer that multiplies text, no pattern with a repeated group, which may take exponential
    time, and no template that repeats or adds many tokens."""
    backend = tokenizer.backend
    every = backend.normalizer, backend.pre_tokenizer, backend.post_processor
    parts = [part.__getstate__() for part in every if part]
    rules = [rule for part in parts for rule in _rules(json.loads(part))]
    return all(map(_is_plain_rule, rules))


def _decoder_growth(tokenizer: Tokenizer) -> float:
    """How many times longer the decoder's replacements may make a text."""
    decoder, growth = tokenizer.backend.decoder, 1.0
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
"""Most characters of a template of special tokens that counts as small."""


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
    """Turns a growing list of token ids into text that never changes afterwards.

    An incomplete character is held until all its bytes are there, or until `finish`. With a
    byte-level tokenizer (Qwen, OLMoE, GPT) the pieces together equal ``tokenizer.decode(ids,
    skip_special_tokens)`` of all ids. A tokenizer that strips the first token's space
    (SentencePiece) needs prompt_ids to keep the space after the prompt. The method is that of
    vLLM's detokenize_incrementally, which compares two decodings of the last few tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ):
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        # Already decoded, kept only for its effect on the text after it.
        self._context = list(prompt_ids[-_PROMPT_CONTEXT:])
        self._context_length = len(self._decode(self._context))
        self._pending: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        """Adds token ids. Returns the text that became certain, possibly empty."""
        self._pending += map(int, token_ids)
        text = self._decode(self._context + self._pending)
        # A replacement character at the end may be the start of an incomplete character.
        if text.endswith("\ufffd") or len(text) <= self._context_length:
            return ""
        piece = text[self._context_length :]
        self._context, self._pending = self._pending, []
        self._context_length = len(self._decode(self._context))
        return piece

    def finish(self) -> str:
        """Returns the held text: a replacement character for each broken sequence of bytes."""
        text = self._decode(self._context + self._pending)
        piece = text[self._context_length :]
        self._context, self._pending, self._context_length = [], [], 0
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        with as_user_error("the tokenizer fails on these tokens"):
            return self._tokenizer.decode(token_ids, self._skip_special_tokens)
