"""Which tokens may come next: structured outputs, allowed_token_ids and bad_words.

llguidance (https://github.com/guidance-ai/llguidance) follows a grammar token by token. The sampler
gives tokens that may not come a logit of −inf, so a token depends on logits and rules alone, never
on the budget.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moejax.errors import UserError
from moejax.requests.sampling_params import SamplingParams
from moejax.requests.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from moejax.requests.tokenizer import Tokenizer

_LINES, _LINE = 8, 160
"""Most lines of a message of llguidance, and most characters of each."""

_KEPT = 64
"""Compiled grammars that are kept for later requests."""

_SPACES = r" ?|\n{1,2}[ \t]{0,20}"
"""Whitespace between the parts of JSON, as in llama.cpp. A small model may add more for ever."""


_NOTHING_LEFT = (
    "no token may come next: structured_outputs, allowed_token_ids, bad_words and min_tokens "
    "together leave none"
)


class TokenRules:
    """Says which tokens may come next in one sequence.

    - `matcher`: follows the grammar; None without one.
    - `allowed`: int32[W], bits of the tokens that may come at all.
    - `bad`: token sequences that may not be completed.

    Raises UserError if no token may come.
    """

    words: np.ndarray
    """int32[W]: bit t % 32 of word t // 32 is set if token t may come next. Never written again."""

    def __init__(
        self, matcher: LLMatcher | None, allowed: np.ndarray, bad: Sequence[Sequence[int]]
    ):
        self._matcher, self._allowed, self._bad = matcher, allowed, bad
        self._next([])

    @property
    def waits(self) -> bool:
        """Whether the next token depends on the one before it, which must have been read."""
        return self._matcher is not None or any(len(tokens) > 1 for tokens in self._bad)

    def push(self, token: int, output: Sequence[int]) -> bool:
        """Takes the token that was chosen, the last one of `output`. Returns whether the grammar
        has ended. Raises UserError if nothing may come next, or nothing could come now: min_tokens
        bans the end where the rules allow nothing else."""
        if not self.words[token // 32] & _bit(token):
            raise UserError(_NOTHING_LEFT)
        if self._matcher is not None:
            if not self._matcher.consume_token(token):
                raise UserError(f"structured_outputs: {_shortened(self._matcher.get_error())}")
            if self._matcher.is_stopped():
                return True
        if self.waits:
            self._next(output)
        return False

    def ahead(self, tokens: Sequence[int], output: Sequence[int]) -> list[np.ndarray]:
        """Returns `words` as they would be after each of the tokens, up to the first token that may
        not come, ends the grammar, or leaves nothing that may come."""
        found, now, taken = [], self.words, 0
        try:
            for i, token in enumerate(tokens, 1):
                if not now[token // 32] & _bit(token):
                    break
                if self._matcher is not None:
                    if not self._matcher.consume_token(token):
                        break
                    taken += 1
                    if self._matcher.is_stopped():
                        break
                now = self._words_after([*output, *tokens[:i]]) if self.waits else self.words
                if not now.any():
                    break
                found.append(now)
        finally:
            if self._matcher is not None and taken:
                self._matcher.rollback(taken)
        return found

    def _next(self, output: Sequence[int]) -> None:
        self.words = self._words_after(output)
        if not self.words.any():
            raise UserError(_NOTHING_LEFT)

    def _words_after(self, output: Sequence[int]) -> np.ndarray:
        words = np.full((1, len(self._allowed)), -1, np.int32)
        if self._matcher is not None:
            import llguidance.numpy

            llguidance.numpy.fill_next_token_bitmask(self._matcher, words)
        words[0] &= self._allowed
        for tokens in self._bad:
            before = len(tokens) - 1
            if list(output[len(output) - before :]) == list(tokens[:-1]):
                words[0, tokens[-1] // 32] &= ~_bit(tokens[-1])
        return words[0]


class RuleBook:
    """Makes the rules of sequences, for one model.

    - `tokenizer`: None: only allowed_token_ids are possible.
    - `vocabulary`: of the logits.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocabulary: int,
        eos_token_ids: Iterable[int],
    ):
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._eos_token_ids = [*eos_token_ids]
        self._tokens: Any = None
        """The tokenizer as llguidance has it."""
        self._compiled: dict[StructuredOutputsParams, LLMatcher] = {}
        self._last: tuple[tuple, np.ndarray, list[list[int]]] | None = None
        """allowed_token_ids and bad_words of the last request, and what was made of them."""

    def rules(self, params: SamplingParams) -> TokenRules | None:
        """Returns the rules of a new sequence; None without any. Raises UserError for a grammar
        that cannot be compiled, and for rules that leave no token."""
        wanted = params.structured_outputs
        if wanted is None and params.allowed_token_ids is None and params.bad_words is None:
            return None
        assert isinstance(wanted, StructuredOutputsParams | None)
        matcher = None if wanted is None else self._matcher(wanted)
        # The sequences of a request, thousands perhaps, share them.
        wants = params.allowed_token_ids, params.bad_words
        last = self._last
        if last is None or last[0] != wants:
            last = self._last = wants, self._allowed(params), self._bad(params)
        return TokenRules(matcher, *last[1:])

    def prepare(self, params: SamplingParams) -> None:
        """Does the part of `rules` that takes long, on any thread. Raises UserError as it does."""
        if params.structured_outputs is not None:
            assert isinstance(params.structured_outputs, StructuredOutputsParams)
            self._matcher(params.structured_outputs)

    def _allowed(self, params: SamplingParams) -> np.ndarray:
        """Returns int32[W], the bits of allowed_token_ids."""
        bits = np.zeros(-(-self._vocabulary // 32) * 32, bool)
        ids = params.allowed_token_ids
        bits[slice(self._vocabulary) if ids is None else list(ids)] = True
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)

    def _bad(self, params: SamplingParams) -> list[list[int]]:
        """Returns the tokens of bad_words, of each word at the start of a text and behind a
        space."""
        if params.bad_words is None:
            return []
        if self._tokenizer is None:
            raise UserError("bad_words need a tokenizer, and the model has none")
        texts = (space + word.lstrip() for word in params.bad_words for space in ("", " "))
        found = (self._tokenizer.encode(text, add_special_tokens=False) for text in texts)
        return [tokens for tokens in found if tokens]

    def _matcher(self, wanted: StructuredOutputsParams) -> LLMatcher:
        if (matcher := self._compiled.get(wanted)) is None:
            matcher = self._compile(wanted)
            if len(self._compiled) >= _KEPT:
                self._compiled.pop(next(iter(self._compiled)), None)
            self._compiled[wanted] = matcher
        return matcher.deep_copy()

    def _compile(self, wanted: StructuredOutputsParams) -> LLMatcher:
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise UserError(
                "structured_outputs need llguidance, which is not installed here: pip install "
                "'moejax[serve]'"
            ) from None
        try:
            matcher = LLMatcher(self._read_tokenizer(), _grammar(wanted), log_level=0)
        except ValueError as error:
            raise UserError(f"structured_outputs: {_shortened(str(error))}") from None
        if matcher.is_error():
            raise UserError(f"structured_outputs: {_shortened(matcher.get_error())}")
        return matcher

    def _read_tokenizer(self) -> Any:
        if self._tokens is None:
            import llguidance.hf

            if self._tokenizer is None:
                raise UserError("structured_outputs need a tokenizer, and the model has none")
            self._tokens = llguidance.hf.from_tokenizer(
                self._tokenizer.whole(),
                n_vocab=self._vocabulary,
                eos_token=self._eos_token_ids or None,
            )
        return self._tokens


def _shortened(error: str) -> str:
    """llguidance's message without the middle of long lines and of many: it repeats a grammar."""
    lines = error.strip().splitlines()
    if len(lines) > _LINES:
        lines = [*lines[: _LINES // 2], "…", *lines[-_LINES // 2 :]]
    return "\n".join(n if len(n) <= _LINE else f"{n[: _LINE - 40]} … {n[-40:]}" for n in lines)


def _bit(token: int) -> np.int32:
    return np.array([1 << token % 32], np.uint32).view(np.int32)[0]


def _grammar(wanted: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    if wanted.json is not None or wanted.json_object:
        schema = str(wanted.json or '{"type": "object"}')
        spaces: Any = {"whitespace_pattern": _SPACES}
        return LLMatcher.grammar_from_json_schema(schema, overrides=spaces)
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        words = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        words = words.replace("\x7f", "\\u007f")  # Lark's strings have no control characters
        return LLMatcher.grammar_from_lark(f"start: {words}")
    return LLMatcher.grammar_from_lark(wanted.grammar or "")
