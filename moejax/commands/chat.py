"""``moejax chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING

from moejax.commands import add_command, say
from moejax.commands.generate import SAMPLING, add_sampling, format_summary, given_sampling
from moejax.commands.model import (
    add_model_option,
    add_model_options,
    engine_options,
    start_llm,
)
from moejax.errors import UserError
from moejax.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from moejax import LLM

MOST = 1024
"""Most tokens of an answer, unless --max-tokens says another number."""

_SAMPLING = SAMPLING | {
    "max_tokens": dataclasses.replace(
        SAMPLING["max_tokens"],
        help=f"most tokens of an answer (default: {MOST}, less where the context ends before)",
    )
}

SESSION = "chat"
"""The session of all turns, whose KV stays in memory."""

_EPILOG = """\
examples:
  moejax chat
      with the embedded model
  moejax chat Qwen/Qwen3-30B-A3B --memory 16GiB --system "Answer in one sentence."
      with a model of the Hugging Face hub, in 16 GiB of device memory
  echo "What is 3 times 14?" | moejax chat --quiet
      a line of standard input is a message

within the conversation:
  /clear          forget it and begin anew
  /stats          what ran and what it cost
  /exit, Ctrl-D   end
  Ctrl-C          stop the answer; at the prompt, end
  a line that ends with \\ goes on in the next one
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    chat = add_command(commands, "chat", _run, "talk to a model in the terminal", _EPILOG)
    add_model_option(chat, positional=True)
    chat.add_argument("--system", metavar="TEXT", help="the system's message")
    add_sampling(chat, _SAMPLING)
    add_model_options(chat)
    chat.set_defaults(json=False)
    chat.add_argument("--quiet", action="store_true", help="answers alone, without prompts")


def _run(args: argparse.Namespace) -> int:
    given = given_sampling(args)
    with start_llm(args, engine_options(args)) as llm:
        tokenizer = llm.engine.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise UserError(
                f"{args.model} has no chat template; `moejax generate` goes on with a text"
            )
        usual = dataclasses.replace(llm.get_default_sampling_params(), max_tokens=MOST)
        params = dataclasses.replace(usual, **given)
        prompts = not args.quiet and sys.stdin.isatty()
        _talk(llm, params, args.system, prompts, fits="max_tokens" not in given)
    return 0


def _talk(llm: LLM, params: SamplingParams, system: str | None, prompts: bool, fits: bool) -> None:
    """Reads messages and writes answers until the end of standard input, /exit, or Ctrl-C at the
    prompt.

    - `system`: the system's message.
    - `prompts`: write a prompt for each message.
    - `fits`: reduce max_tokens to what the context has room for.
    """
    first = [] if system is None else [{"role": "system", "content": system}]
    messages = list(first)
    if prompts:
        say("/clear, /stats, /exit; Ctrl-C stops an answer")
    while (text := _read_message(prompts)) is not None:
        if text == "/exit":
            return
        if text == "/clear":
            messages = list(first)
        elif text == "/stats":
            print(format_summary(llm.stats()), file=sys.stderr)
        elif text.startswith("/"):
            say(f"{text.split()[0]} is none of /clear, /stats and /exit")
        elif text:
            messages.append({"role": "user", "content": text})
            try:
                answer = _answer(llm, messages, _fit(llm, messages, params) if fits else params)
            except UserError as error:  # such as a conversation longer than max_model_len
                messages.pop()
                say(f"{error}; /clear begins anew")
            else:
                messages.append({"role": "assistant", "content": answer})


def _read_message(prompts: bool) -> str | None:
    """Reads the next message; None at the end of standard input or after Ctrl-C."""
    lines, prompt = [], "> " if prompts else ""
    try:
        while True:
            line = input(prompt)
            if not line.endswith("\\"):
                return "\n".join([*lines, line]).strip()
            lines.append(line[:-1])
            prompt = ". " if prompts else ""
    except EOFError:
        return "\n".join(lines).strip() or None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return None


def _fit(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> SamplingParams:
    """The params with max_tokens reduced to what the context has room for."""
    _, prompt = llm.encoder({"messages": list(messages)})
    room = llm.engine.scheduler.max_model_len - len(prompt)
    return dataclasses.replace(params, max_tokens=max(1, min(params.max_tokens, room)))


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Writes an answer while it is generated; Ctrl-C stops it. Returns the written text."""
    pieces: list[str] = []
    try:
        for piece in llm.stream({"messages": list(messages)}, params, session_id=SESSION):
            print(piece, end="", flush=True)
            pieces.append(piece)
    except KeyboardInterrupt:  # the iterator is closed with its last reference
        pass
    print(flush=True)
    return "".join(pieces)
