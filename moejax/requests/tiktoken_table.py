"""tokenizer.json's content of a tiktoken.model, as Kimi's checkpoints have it. How text is split is
in their code, which does not run, so it stands here."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING

from moejax.errors import UserError
from moejax.models.directory import read_bounded, read_json

if TYPE_CHECKING:
    import tokenizers

TIKTOKEN = "tiktoken.model"
MOST_BYTES = 8 * 2**20
_CLASS = "TikTokenTokenizer"
"""tokenizer_class of Kimi-K2, K2.5, Kimi-Linear and Moonlight."""

_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (
    rf"[\p{{L{letter}}}{rest}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]"
    for letter, rest in (("u", r"\p{Lt}"), ("l", ""))
)
_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_RESERVED = 256
"""Special tokens after the vocabulary. Those without a name are reserved."""


def has_tiktoken(directory: Path) -> bool:
    """Whether the tokenizer's rules are known without the checkpoint's code."""
    config = directory / "tokenizer_config.json"
    if not (directory / TIKTOKEN).is_file() or not config.is_file():
        return False
    return read_json(config).get("tokenizer_class") == _CLASS


def read_tiktoken(directory: Path) -> tokenizers.Tokenizer:
    """Reads tiktoken.model and the special tokens of tokenizer_config.json. Raises UserError for a
    damaged file."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ranks = _read_ranks(directory / TIKTOKEN)
    letters = bytes_to_unicode()
    text = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(text[first], text[second]) for first, second in known]
    vocabulary = {text[token]: rank for token, rank in ranks.items()}
    found = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=True))
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    found.decoder = decoders.ByteLevel()
    named = _names(directory / "tokenizer_config.json")
    after = range(len(ranks), len(ranks) + _RESERVED)
    special = (named.get(i, f"<|reserved_token_{i}|>") for i in after)
    found.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    return found


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Token → its id: lines of base64 and number."""
    ranks: dict[bytes, int] = {}
    try:
        for line in read_bounded(path, MOST_BYTES, "a tokenizer").splitlines():
            if line.strip():
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError as error:
        raise UserError(f"{path}: cannot be read as a tiktoken file: {error}") from error
    if sorted(ranks.values()) != [*range(len(ranks))] or b"" in ranks:
        raise UserError(f"{path}: ids of tokens must be 0, 1, 2 and so on, each once")
    return ranks


def _names(path: Path) -> dict[int, str]:
    """Id → text of the special tokens."""
    added = read_json(path).get("added_tokens_decoder") or {}
    names = {}
    for key, token in added.items() if isinstance(added, dict) else ():
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or not key.isdecimal() or len(key) > 9:
            raise UserError(f"{path}: added_tokens_decoder must have a text for each id")
        names[int(key)] = content
    return names
