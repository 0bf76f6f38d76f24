"""What can be wrong with a request, found with config and tokenizer alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing

from moejax.errors import UserError, shown
from moejax.models.config import load_config
from moejax.models.hub import model_directory
from moejax.requests.prompts import PromptEncoder
from moejax.requests.request import Prompt
from moejax.requests.sampling_params import SamplingParams
from moejax.requests.tokenizer import Tokenizer, load_tokenizer


def require_room(prompt_tokens: int, to_generate: int | None, max_model_len: int) -> None:
    """Raises UserError for a request that is longer than max_model_len. to_generate: max_tokens."""
    if to_generate is None:
        if prompt_tokens >= max_model_len:
            raise UserError(
                f"the prompt has {prompt_tokens} tokens and leaves no room for an answer, "
                f"max_model_len is {max_model_len}; shorten the prompt or raise max_model_len"
            )
        return
    total = prompt_tokens + to_generate
    if total > max_model_len:
        raise UserError(
            f"prompt ({prompt_tokens} tokens) + max_tokens ({to_generate}) is "
            f"{total} tokens, max_model_len is {max_model_len}; shorten the prompt, lower "
            f"max_tokens or raise max_model_len"
        )


def require_tokens(params: SamplingParams, vocabulary: int) -> None:
    """Raises UserError for token ids that the model does not have."""
    biased = dict(params.logit_bias or ())
    for name, ids in (
        ("logit_bias", biased),
        ("stop_token_ids", params.stop_token_ids or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    ):
        bad = [token for token in ids if token >= vocabulary]
        if bad:
            token = shown(bad[0])
            raise UserError(
                f"token id {token} in {name} is outside of the vocabulary of {vocabulary}"
            )


def require_tokenizer(tokenizer: Tokenizer | None, model: str | os.PathLike[str]) -> Tokenizer:
    """Raises UserError where a command's model has none."""
    if tokenizer is None:
        raise UserError(
            f"{model} has no tokenizer, which the command line needs; name a directory with its "
            "tokenizer.json (--tokenizer DIR), or pass token ids to moejax.LLM.generate in Python"
        )
    return tokenizer


def check_first(
    model: str | os.PathLike[str],
    prompt: Prompt,
    params: SamplingParams,
    max_model_len: int | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> Prompt:
    """Checks a command's request before the model's weights are read, which may take minutes.
    Returns the prompt, messages as token ids, since rendering takes a process of its own.

    - `max_model_len`, `tokenizer`: the options.

    Raises UserError as `LLM.generate` does. What is wrong with the model is left to its start.
    """
    try:
        directory = model_directory(model)
        config = load_config(directory)
        known = load_tokenizer(directory if tokenizer is None else tokenizer, tokenizer is not None)
    except (UserError, OSError):
        return prompt
    require_tokens(params, config.vocab_size)
    known = require_tokenizer(known, model)
    longest = max_model_len or config.max_position_embeddings
    with closing(PromptEncoder(known, str(model), longest)) as encoder:
        _, ids = encoder(prompt)
    require_room(len(ids), params.max_tokens, longest)
    return ids if isinstance(prompt, Mapping) else prompt
