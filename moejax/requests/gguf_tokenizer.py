"""The tokenizer in a GGUF file's metadata, made by transformers' converter."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from moejax.errors import UserError, shown
from moejax.models.gguf_header import read_gguf

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

MOST_ADDED = 1 << 16
"""Most control and user tokens of a tokenizer, each of which is searched in every text."""

_CONTROL, _USER = 3, 4
"""Types of tokens that are never split."""

_GPT2 = ("gpt-2", "olmo", "phi-2", "mpt")
"""Names of pre-tokenizers that split as GPT-2's, the converter's default."""

_WHOLE_WORDS = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("jina-v5-nano", "tekken"),
)
"""Names of pre-tokenizers with which llama.cpp takes a word that is a token without merging its
parts, and begins with bos by default."""

_NAMES = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id"}
_NAMES["pad"] = "padding_token_id"


def load_gguf_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerFast | None:
    """The tokenizer and chat template in a GGUF file; None if it has none.

    Raises UserError for a kind of tokenizer or pre-tokenizer that is not known.
    """
    header = read_gguf(path)[0]
    given = {
        key.removeprefix("tokenizer."): value
        for key, value in header.metadata.items()
        if key.startswith("tokenizer.")
    }
    if not given.get("ggml.tokens"):
        return None
    where, tokens = header.path, given["ggml.tokens"]
    _check(given, str(where))
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import PreTrainedTokenizerFast

    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import (
            GGUF_TOKENIZER_MAPPING,
            convert_gguf_tokenizer,
        )
    except ImportError:
        raise UserError(
            f"{where}: its tokenizer needs transformers 5.24 or newer: pip install 'moejax[gguf]'"
        ) from None
    names = GGUF_TOKENIZER_MAPPING["tokenizer"]
    table = {name: given[key] for key, name in names.items() if key in given}
    options: dict[str, Any] = {
        f"{name}_token": tokens[given[f"ggml.{key}"]]
        for name, key in _NAMES.items()
        if f"ggml.{key}" in given
    }
    if isinstance(template := given.get("chat_template"), str):
        options["chat_template"] = template
    for end in ("bos", "eos"):
        options[f"add_{end}_token"] = _is_added(end, given)
    try:
        backend, _ = convert_gguf_tokenizer(header.metadata["general.architecture"], table)
        if given["ggml.model"] == "llama":
            _set_spaces(backend, given.get("ggml.add_space_prefix", True))
        elif given.get("ggml.pre") in _WHOLE_WORDS:
            backend.model.ignore_merges = True
        return PreTrainedTokenizerFast(tokenizer_object=backend, **options)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of tokenizers: a bare Exception, or a panic of its code
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{where}: its tokenizer cannot be made ({first_line}); give one with --tokenizer"
        ) from error


def _is_added(end: str, given: dict[str, Any]) -> bool:
    """Whether every text begins with bos, or ends with eos; llama.cpp's default where a file does
    not say."""
    begins = given["ggml.model"] == "llama" or given.get("ggml.pre") in _WHOLE_WORDS
    return given.get(f"ggml.add_{end}_token", end == "bos" and begins)


def _set_spaces(backend: Tokenizer, prefix: bool) -> None:
    """Makes a sentencepiece tokenizer treat spaces as sentencepiece and llama.cpp do.

    transformers' converter ignores add_space_prefix, and drops a space at the beginning of a text.

    - `prefix`: a text begins with a space that is not written, at its start and behind a special
      token.
    """
    from tokenizers import decoders, normalizers

    before = [normalizers.Prepend("▁")] if prefix else []
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )


def _check(given: dict[str, Any], where: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    def refuse(key: str, why: str) -> UserError:
        return UserError(
            f"{where}: tokenizer.{key} {why}; give the model's tokenizer with --tokenizer"
        )

    tokens = given["ggml.tokens"]
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise refuse("ggml.tokens", "must be a list of texts")
    for key, kind in (("ggml.merges", str), ("ggml.scores", float), ("ggml.token_type", int)):
        values = given.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise refuse(key, "has values of another type")
        if values and key != "ggml.merges" and len(values) != len(tokens):
            raise refuse(key, f"has {len(values)} values for {len(tokens)} tokens")
    added = sum(kind in (_CONTROL, _USER) for kind in given.get("ggml.token_type", []))
    if added > MOST_ADDED:
        raise refuse("ggml.token_type", f"has {added} added tokens; at most {MOST_ADDED} are read")
    for key in _NAMES.values():
        number = given.get(f"ggml.{key}", 0)
        if not isinstance(number, int) or not 0 <= number < len(tokens):
            raise refuse(f"ggml.{key}", f"is {shown(number)} of {len(tokens)} tokens")
    for key in ("ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_space_prefix"):
        if not isinstance(value := given.get(key, False), bool):
            raise refuse(key, f"is {shown(value)}, neither true nor false")
    model, pre = given.get("ggml.model"), given.get("ggml.pre", "default")
    if model not in ("gpt2", "llama"):
        raise refuse("ggml.model", f"is {shown(model)}, which is not supported")
    for end in ("bos", "eos"):
        if _is_added(end, given) and f"ggml.{end}_token_id" not in given:
            raise refuse(f"ggml.{end}_token_id", f"is missing, and texts have {end}")
    if model == "gpt2" and pre not in (*GGUF_PRE_TOKENIZER_SPLITS, *_GPT2):
        raise refuse("ggml.pre", f"is {shown(pre)}, a way to split words that is not known here")
