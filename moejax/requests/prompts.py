"""From prompts, as callers write them, to token ids."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moejax.errors import UserError, as_user_error, shown
from moejax.requests.bounded_process import BoundedProcess
from moejax.requests.request import Prompt
from moejax.requests.tokenizer import is_plain
from pallas_kernels.option_text import unknown

if TYPE_CHECKING:
    from moejax.requests.tokenizer import Tokenizer

EncodedPrompt = tuple[str | None, list[int]]
"""(text, token ids); the text is None for a prompt that was given as token ids."""


QUICK_TEXT = 1 << 15
"""Characters of a text that a plain tokenizer encodes within milliseconds, whatever they are."""


_TEMPLATE_OPTIONS = ("chat_template", "add_generation_prompt", "continue_final_message")
"""Keys beside messages that the function which renders them takes."""

KEYS = ("prompt", "prompt_token_ids", "messages", "chat_template_kwargs", "tools")
"""Keys of a prompt given as a mapping, beside _TEMPLATE_OPTIONS."""

_TEMPLATE_ARGUMENTS = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversations"),
        *("documents", "messages", "return_assistant_tokens_mask", "tools"),
    )
)
"""What the function that renders a template takes itself."""


class PromptEncoder:
    """Encodes prompts to token ids, within limits of time and memory. Any thread may call it.

    - `model`: its name, for messages.
    - `max_model_len`: most tokens of a prompt. Longer prompts are refused; a text that cannot fit,
      whatever its tokens are, is refused before it is encoded.
    """

    def __init__(self, tokenizer: Tokenizer | None, model: str, max_model_len: int) -> None:
        self._tokenizer, self._model, self._max_model_len = tokenizer, model, max_model_len
        self._plain = tokenizer is not None and is_plain(tokenizer)
        self._bounded = None if tokenizer is None else BoundedProcess(tokenizer)
        vocabulary = () if tokenizer is None else tokenizer.get_vocab()
        self._longest = max(map(len, vocabulary), default=1)

    def __call__(self, prompt: Prompt) -> EncodedPrompt:
        """The prompt's text and token ids. Raises UserError for text without a tokenizer, messages
        without a chat template, a mapping with none of the known keys, and prompts that take too
        much time or memory."""
        if isinstance(prompt, Mapping):
            for key in prompt:
                if key not in (known := (*KEYS, *_TEMPLATE_OPTIONS)):
                    raise UserError(unknown("key of a prompt", str(key)[:80], known))
            if prompt.get("prompt_token_ids") is not None:
                return prompt.get("prompt"), self._token_ids(prompt["prompt_token_ids"])
            if prompt.get("messages") is not None:
                text = self._render(prompt)
                return text, self._encode(text, False)
            if prompt.get("prompt") is None:
                raise UserError(
                    "a prompt given as a dict needs 'prompt', 'prompt_token_ids' or 'messages'"
                )
            prompt = prompt["prompt"]
        if not isinstance(prompt, str):
            return None, self._token_ids(prompt)
        if self._tokenizer is None:
            raise UserError(f"{self._model} has no tokenizer; give token ids instead of text")
        return prompt, self._encode(prompt, True)

    def quick(self, prompt: Prompt) -> bool:
        """Whether the prompt is encoded within milliseconds, so that others need not wait."""
        if isinstance(prompt, Mapping):
            if prompt.get("prompt_token_ids") is None and prompt.get("messages") is not None:
                return False
            prompt = prompt.get("prompt") or ""
        return not isinstance(prompt, str) or (self._plain and len(prompt) <= QUICK_TEXT)

    def start(self) -> None:
        """Starts the bounded process, so that the first long prompt does not wait for it."""
        if self._bounded is not None:
            self._bounded.start()

    def interrupt(self) -> None:
        """Ends the encoding in progress; its caller gets a UserError."""
        if self._bounded is not None:
            self._bounded.interrupt()

    def close(self) -> None:
        """Ends the bounded process. Another prompt would start it again."""
        if self._bounded is not None:
            self._bounded.close()

    def _token_ids(self, prompt: Any) -> list[int]:
        try:
            if isinstance(prompt, bytes | bytearray | memoryview):
                raise TypeError
            given = itertools.islice(prompt, self._max_model_len + 1)
            return self._fitting([operator.index(token) for token in given])
        except TypeError:
            raise UserError(
                f"a prompt is text or a list of token ids, not {shown(prompt)}"
            ) from None

    def _fitting(self, ids: list[int]) -> list[int]:
        if len(ids) > self._max_model_len:
            raise UserError(
                f"the prompt has more than {self._max_model_len} tokens; max_model_len is "
                f"{self._max_model_len}"
            )
        return ids

    def _encode(self, text: str, special_tokens: bool) -> list[int]:
        assert self._tokenizer is not None and self._bounded is not None
        most = self._max_model_len * self._longest
        if len(text) > most:
            raise UserError(
                f"the prompt has {len(text)} characters; with a max_model_len of "
                f"{self._max_model_len} tokens, of which the longest has {self._longest} "
                f"characters, {most} is the most"
            )
        with as_user_error(f"the tokenizer of {self._model} fails on this text"):
            if self._plain and len(text) <= QUICK_TEXT:
                ids: Any = self._tokenizer.encode(text, special_tokens)
            else:
                ids = self._bounded.encode(text, special_tokens)
        return self._fitting(ids)

    def _render(self, prompt: Mapping[str, Any]) -> str:
        messages, named = prompt["messages"], prompt.get("chat_template_kwargs") or {}
        given = {name: prompt[name] for name in _TEMPLATE_OPTIONS if prompt.get(name) is not None}
        template = given.setdefault(
            "chat_template", getattr(self._tokenizer, "chat_template", None)
        )
        if self._tokenizer is None or self._bounded is None or not template:
            raise UserError(
                f"{self._model} has no chat template; use generate() with a prompt, or add a "
                "chat_template to its tokenizer_config.json"
            )
        if not isinstance(named, Mapping) or (taken := _TEMPLATE_ARGUMENTS & named.keys()):
            what = f"have {min(taken)!r}" if isinstance(named, Mapping) else f"be {shown(named)}"
            raise UserError(
                f"chat_template_kwargs cannot {what}; it maps names of the chat template to values"
            )
        _check_template_options(given)
        try:
            if not messages:
                raise UserError("there are no messages; provide at least one")
            _refuse_other_media(messages)
            given |= {"tools": prompt["tools"]} if prompt.get("tools") else {}
            named = {"add_generation_prompt": True, **named, **given}
            return self._bounded.render([dict(message) for message in messages], named)
        except Exception as error:
            # Templates refuse messages by raising. A template is a program from the checkpoint,
            # and none of its other errors may end the engine.
            raise UserError(
                f"the chat template of {self._model} refuses these messages: {error}"
            ) from error


def _check_template_options(given: Mapping[str, Any]) -> None:
    for name in ("add_generation_prompt", "continue_final_message"):
        if not isinstance(given.get(name, False), bool):
            raise UserError(f"{name} must be True or False, got {shown(given[name])}")
    if not isinstance(given["chat_template"], str):
        raise UserError(f"chat_template must be text, got {shown(given['chat_template'])}")
    if given.get("continue_final_message") and given.get("add_generation_prompt", True):
        raise UserError(
            "continue_final_message goes on with the last message, where add_generation_prompt "
            "begins a new one; set add_generation_prompt=False"
        )


def _refuse_other_media(messages: Any) -> None:
    """Raises UserError for a part of a message that is no text, for which a template would write a
    placeholder."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
            if kind != "text":
                raise UserError(
                    f"a message has a part of type {shown(kind)}; moejax runs text models, and of "
                    "models of text and images the text part, so every part must be text"
                )


def list_of_prompts(given: Any) -> list[Prompt]:
    """A list of prompts: one prompt (text, ids or a mapping) becomes a list of one. Raises
    UserError for anything else."""
    prompts = given
    if not isinstance(given, str | Mapping | Sequence | np.ndarray) or isinstance(
        given, bytes | bytearray | memoryview
    ):
        raise UserError(f"prompts are text, token ids, or a list of them, not {shown(given)}")
    # Only the first one is looked at, since there may be very many.
    single = isinstance(prompts, str | Mapping) or (
        len(prompts) > 0 and isinstance(prompts[0], int | np.integer)
    )
    return [prompts] if single else list(prompts)


def one_each(name: str, given: Any, count: int, kind: type | tuple[type, ...]) -> list[Any]:
    """A value of `kind` for each of `count` prompts, from one value for all or a list of values.
    Raises UserError for anything else."""
    if isinstance(given, kind):
        return [given] * count
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str):
        raise UserError(f"{name} cannot be {shown(given)}")
    if len(given) != count:
        raise UserError(f"{count} prompts but {len(given)} {name}; give one or {count}")
    values = list(given)
    if not all(isinstance(value, kind) for value in values):
        raise UserError(f"{name} cannot be {shown(given)}")
    return values
