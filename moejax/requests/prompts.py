"""Prompts as callers write them, and as token ids."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moejax.errors import UserError, as_user_error
from moejax.requests.request import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EncodedPrompt = tuple[str | None, list[int]]
"""The text, None for a prompt that was given as token ids, and the ids."""


def encode_prompt(
    prompt: Prompt, tokenizer: PreTrainedTokenizerFast | None, model: str
) -> EncodedPrompt:
    """Text and token ids of one prompt. model: its name, for messages.

    Raises UserError for text without a tokenizer, messages without a chat template, and a mapping
    that has none of them.
    """
    if isinstance(prompt, Mapping):
        if prompt.get("prompt_token_ids") is not None:
            return prompt.get("prompt"), _token_ids(prompt["prompt_token_ids"])
        if prompt.get("messages") is not None:
            return None, _encode_chat(prompt["messages"], tokenizer, model)
        if prompt.get("prompt") is None:
            raise UserError(
                "a prompt given as a dict needs 'prompt', 'prompt_token_ids' or 'messages'"
            )
        prompt = prompt["prompt"]
    if not isinstance(prompt, str):
        return None, _token_ids(prompt)
    if tokenizer is None:
        raise UserError(f"{model} has no tokenizer; give token ids instead of text")
    with as_user_error("the tokenizer fails on this text"):
        return prompt, tokenizer(prompt)["input_ids"]


def _token_ids(prompt: Any) -> list[int]:
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise UserError(f"a prompt is text or a list of token ids, not {prompt!r:.80}") from None


def _encode_chat(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerFast | None, model: str
) -> list[int]:
    if tokenizer is None or not tokenizer.chat_template:
        raise UserError(
            f"{model} has no chat template; use generate() with a prompt, or add a "
            "chat_template to its tokenizer_config.json"
        )
    conversation: Any = [dict(message) for message in messages]
    try:
        ids: Any = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:
        # Templates refuse what they do not know by raising; but it is the checkpoint's program,
        # and what else it does wrong, in its sandbox, is not the engine's to die of.
        raise UserError(f"the chat template of {model} refuses these messages: {error}") from error
    return ids


def list_of_prompts(given: Any) -> list[Prompt]:
    """One prompt, text, ids or a mapping, as a list of one; several as they are. Raises UserError
    for anything else."""
    prompts = given
    if not isinstance(given, str | Mapping | Sequence | np.ndarray):
        raise UserError(f"prompts are text, token ids, or a list of them, not {given!r:.80}")
    single = isinstance(prompts, str | Mapping) or (
        len(prompts) > 0 and all(isinstance(p, int | np.integer) for p in prompts)
    )
    return [prompts] if single else list(prompts)


def one_each(name: str, given: Any, count: int, kind: type | tuple[type, ...]) -> list[Any]:
    """A value of that kind for each of `count` prompts, from one for all or one each. Raises
    UserError for anything else."""
    if isinstance(given, kind):
        return [given] * count
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str):
        raise UserError(f"{name} cannot be {given!r}")
    values = list(given)
    if len(values) != count:
        raise UserError(f"{count} prompts but {len(values)} {name}; give one or {count}")
    if not all(isinstance(value, kind) for value in values):
        raise UserError(f"{name} cannot be {given!r}")
    return values
