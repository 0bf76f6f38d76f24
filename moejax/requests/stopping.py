"""Where a sequence ends, and what of its text can be shown before that is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from moejax.errors import UserError
from moejax.requests.outputs import FinishReason
from moejax.requests.sampling_params import SamplingParams
from moejax.requests.tokenizer import Detokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Finish(NamedTuple):
    """Why a sequence ended."""

    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop token id or stop string that ended it; None for end of sequence and max_tokens."""


def require_tokenizer(params: SamplingParams, tokenizer: PreTrainedTokenizerFast | None) -> None:
    """Raises UserError for stop strings without a tokenizer."""
    if params.stop and tokenizer is None:
        raise UserError("stop strings need a tokenizer, and the model has none; use stop_token_ids")


class Ending:
    """Reads a sequence's tokens one by one, decides after which one it ends, and keeps its text.

    The rules are vLLM's: the end-of-sequence tokens unless ignore_eos, then stop_token_ids, then
    max_tokens, none of the first two below min_tokens; a stop string, looked for only after
    min_tokens tokens, overrules them. If one token completes several stop strings, the first in the
    list of `stop` counts. The text ends before the stop string and leaves out a token that stopped
    it, unless include_stop_str_in_output. Without a tokenizer the text is empty.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Iterable[int],
        tokenizer: PreTrainedTokenizerFast | None,
        prompt_ids: Sequence[int] = (),
    ):
        """Raises UserError for stop strings without a tokenizer."""
        require_tokenizer(params, tokenizer)
        self._stop: tuple[str, ...] = tuple(params.stop or ())
        self._params = params
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_token_ids = frozenset(params.stop_token_ids or ())
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens)
        self._count = 0
        self._undecoded: list[int] = []
        self._text = ""
        self._shown = 0
        self._closed = False
        # A stop string may have begun in the last so many characters.
        hidden = not params.include_stop_str_in_output
        self._hold = max(map(len, self._stop), default=1) - 1 if hidden else 0

    def push(self, token: int) -> Finish | None:
        """Reads the next token; returns why the sequence ends with it, None if it goes on. Nothing
        may follow the end."""
        assert not self._closed
        self._count += 1
        finish = self._finish_by_token(token)
        stopped = finish is not None and finish.finish_reason == "stop"
        if not stopped or self._params.include_stop_str_in_output:
            self._undecoded.append(token)
        if self._stop:
            before = len(self._text)
            self._decode(whole=finish is not None)
            found = self._stop_string(before)
            if found is not None:
                finish = Finish("stop", found)
        if finish is not None:
            self.close()
        return finish

    def close(self) -> None:
        """No token follows: all text is there to be shown. push does it at the end it finds; for
        one that others decide, such as a cancellation. Idempotent."""
        if not self._closed:
            self._decode(whole=True)
            self._closed = True

    @property
    def text(self) -> str:
        """The text so far, as far as it is certain to stay."""
        certain = self._certain()
        return self._text[:certain]

    def stream(self) -> str:
        """What of the text became certain since the last call. All pieces make up the text."""
        certain = self._certain()
        piece = self._text[self._shown : certain]
        self._shown = max(self._shown, certain)
        return piece

    def _certain(self) -> int:
        """Decodes what was read; returns how many characters of the text are certain."""
        if self._closed:
            return len(self._text)
        self._decode(whole=False)
        return max(len(self._text) - self._hold, 0)

    def _finish_by_token(self, token: int) -> Finish | None:
        if self._count >= self._params.min_tokens:
            if token in self._eos:
                return Finish("stop", None)
            if token in self._stop_token_ids:
                return Finish("stop", token)
        return Finish("length", None) if self._count >= self._params.max_tokens else None

    def _decode(self, whole: bool) -> None:
        """Adds to the text what was not decoded. whole: also bytes that are no whole character."""
        if self._detokenizer is None:
            return
        if self._undecoded:
            self._text += self._detokenizer.push(self._undecoded)
            self._undecoded = []
        if whole:
            self._text += self._detokenizer.finish()

    def _stop_string(self, before: int) -> str | None:
        """The stop string that ends in the text from `before` on, and cuts the text there."""
        if self._count <= self._params.min_tokens:
            return None
        for string in self._stop:
            start = self._text.find(string, max(before - len(string) + 1, 0))
            if start >= 0:
                end = start + len(string) if self._params.include_stop_str_in_output else start
                self._text = self._text[:end]
                return string
        return None
