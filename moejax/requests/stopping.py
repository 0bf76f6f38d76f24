"""Decides where a sequence ends, and which part of its text is certain before that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from moejax.errors import UserError
from moejax.requests.outputs import FinishReason
from moejax.requests.sampling_params import SamplingParams
from moejax.requests.tokenizer import Detokenizer

if TYPE_CHECKING:
    from moejax.requests.tokenizer import Tokenizer


class Finish(NamedTuple):
    """Why a sequence ended."""

    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop token id or stop string that ended it; None for end of sequence and max_tokens."""


def require_tokenizer(params: SamplingParams, tokenizer: Tokenizer | None) -> None:
    """Raises UserError for stop strings without a tokenizer."""
    if params.stop and tokenizer is None:
        raise UserError("stop strings need a tokenizer, and the model has none; use stop_token_ids")


class Ending:
    """Reads a sequence's tokens one by one, decides where it ends, and keeps its text.

    The rules are vLLM's. End-of-sequence tokens (unless ignore_eos) come first, then
    stop_token_ids, then max_tokens; the first two count only after min_tokens tokens. A stop string
    overrules them, also only after min_tokens tokens. If one token completes several stop strings,
    the first one in `stop` counts. The text ends before the stop string, and without the stop
    token, unless include_stop_str_in_output. Without a tokenizer the text is empty.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Iterable[int],
        tokenizer: Tokenizer | None,
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
        # A stop string may begin within this many last characters.
        hidden = not params.include_stop_str_in_output
        self._hold = max(map(len, self._stop), default=1) - 1 if hidden else 0

    def push(self, token: int) -> Finish | None:
        """Reads the next token. Returns why the sequence ends with it; None: it continues. Must not
        be called after the end."""
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
        """Declares that no token follows, so that all text is certain. push does so at the end that
        it finds; call this for another end, such as a cancellation. Idempotent."""
        if not self._closed:
            self._decode(whole=True)
            self._closed = True

    @property
    def text(self) -> str:
        """The certain text so far."""
        certain = self._certain()
        return self._text[:certain]

    def stream(self) -> str:
        """The text that became certain since the last call. All pieces together are the text."""
        certain = self._certain()
        piece = self._text[self._shown : certain]
        self._shown = max(self._shown, certain)
        return piece

    def _certain(self) -> int:
        """Decodes what was read. Returns how many characters of the text are certain."""
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
        most = self._params.max_tokens
        return Finish("length", None) if most is not None and self._count >= most else None

    def _decode(self, whole: bool) -> None:
        """Decodes the rest. whole: also bytes that do not form a whole character."""
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
