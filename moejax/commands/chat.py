"""``moejax chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from moejax.commands import add_command, say
from moejax.commands.generate import (
    SAMPLING,
    add_sampling,
    add_template_values,
    format_summary,
    given_sampling,
    template_values,
)
from moejax.commands.model import (
    add_model_option,
    add_model_options,
    engine_options,
    start_llm,
)
from moejax.errors import UserError
from moejax.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from moejax import LLM

MOST = 1024
"""Most tokens of an answer, unless --max-tokens says another number."""

_SAMPLING = SAMPLING | {
    "max_tokens": dataclasses.replace(
        SAMPLING["max_tokens"],
        help=f"most tokens of an answer (default: {MOST}, less where the context ends before)",
    )
}

QUOTE = '"""'
"""Begins and ends a message of several lines."""

SESSION = "chat"
"""The session of all turns, whose KV stays in memory."""

_EPILOG = '''\
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
  a line that ends with \\ goes on in the next one; """ begins and ends several lines
'''


def add_parser(commands: argparse._SubParsersAction) -> None:
    chat = add_command(commands, "chat", _run, "talk to a model in the terminal", _EPILOG)
    add_model_option(chat, positional=True)
    chat.add_argument("--system", metavar="TEXT", help="the system's message")
    add_template_values(chat)
    add_sampling(chat, _SAMPLING)
    add_model_options(chat)
    chat.set_defaults(json=False)
    chat.add_argument("--quiet", action="store_true", help="answers alone, without prompts")


def _run(args: argparse.Namespace) -> int:
    given, values = given_sampling(args), template_values(args)
    with start_llm(args, engine_options(args)) as llm:
        tokenizer = llm.engine.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise UserError(
                f"{args.model} has no chat template; `moejax generate` goes on with a text"
            )
        usual = dataclasses.replace(llm.get_default_sampling_params(), max_tokens=MOST)
        params = dataclasses.replace(usual, **given)
        prompts = not args.quiet and sys.stdin.isatty()
        talk = Talk(llm, params, args.system, values, fits="max_tokens" not in given)
        talk.run(prompts, markdown=not args.quiet and sys.stdout.isatty())
    return 0


class Talk:
    """A conversation.

    - `system`: the system's message.
    - `values`: of names in the chat template.
    - `fits`: reduce max_tokens to what the context has room for.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None = None,
        values: Mapping[str, Any] | None = None,
        fits: bool = False,
    ):
        self._llm, self._params, self._fits = llm, params, fits
        self._values = dict(values or {})
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._first)

    def run(self, prompts: bool, markdown: bool) -> None:
        """Reads messages and writes answers until the end of standard input, /exit, or Ctrl-C at
        the prompt.

        - `prompts`: write a prompt for each message.
        - `markdown`: show answers as what their markdown means.
        """
        if prompts:
            with suppress(ImportError):
                import readline  # noqa: F401  # keys that edit a line
            say("/clear, /stats, /exit; Ctrl-C stops an answer")
        while (message := read_message(prompts)) is not None:
            text, quoted = message
            command = "" if quoted else text
            if command == "/exit":
                return
            if command == "/clear":
                self._messages = list(self._first)
            elif command == "/stats":
                print(format_summary(self._llm.stats()), file=sys.stderr)
            elif command.startswith("/"):
                say(f"{text.split()[0]} is none of /clear, /stats and /exit")
            elif text:
                self._ask(text, MarkdownWriter() if markdown else PlainWriter())

    def _ask(self, text: str, writer: PlainWriter) -> None:
        self._messages.append({"role": "user", "content": text})
        try:
            answer = self.answer(writer)
        except UserError as error:  # such as a conversation longer than max_model_len
            self._messages.pop()
            say(f"{error}; /clear begins anew")
        else:
            self._messages.append({"role": "assistant", "content": answer})

    def answer(self, writer: PlainWriter) -> str:
        """Writes an answer while it is generated; Ctrl-C stops it. Returns its text."""
        prompt = {"messages": list(self._messages), "chat_template_kwargs": self._values}
        params = self._params
        if self._fits:
            room = self._llm.engine.scheduler.max_model_len - len(self._llm.encoder(prompt)[1])
            params = dataclasses.replace(params, max_tokens=min(MOST, room) if room > 0 else None)
        pieces: list[str] = []
        with writer, suppress(KeyboardInterrupt):  # the iterator is closed with its last reference
            for piece in self._llm.stream(prompt, params, session_id=SESSION):
                writer.write(piece)
                pieces.append(piece)
        return "".join(pieces)


def read_message(prompts: bool) -> tuple[str, bool] | None:
    """Reads the next message and whether it was quoted, so that it is no command; None at the end
    of standard input or after Ctrl-C."""
    lines, prompt, quoted = [], "> " if prompts else "", False
    try:
        while True:
            line = input(prompt)
            prompt = ". " if prompts else ""
            if not lines and not quoted and line.startswith(QUOTE):
                line, quoted = line.removeprefix(QUOTE), True
            if quoted and not line.rstrip().endswith(QUOTE):
                lines.append(line)
            elif not quoted and line.endswith("\\"):
                lines.append(line[:-1])
            else:
                last = line.rstrip().removesuffix(QUOTE) if quoted else line
                return "\n".join([*lines, last]).strip(), quoted
    except EOFError:
        left = "\n".join(lines).strip()
        return (left, quoted) if left else None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return None


class PlainWriter:
    """Writes an answer as it comes."""

    def __enter__(self) -> PlainWriter:
        return self

    def write(self, piece: str) -> None:
        print(piece, end="", flush=True)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            print(flush=True)


class MarkdownWriter(PlainWriter):
    """Shows an answer as what its markdown means: each part for good once it is whole, and the
    newest one as far as it came."""

    def __init__(self, console: Console | None = None):
        from rich.console import Console
        from rich.live import Live

        self._console, self._rest = console or Console(highlight=False), ""
        self._live = Live(console=self._console, transient=True, auto_refresh=False)

    def __enter__(self) -> PlainWriter:
        self._live.start()
        return self

    def write(self, piece: str) -> None:
        from rich.markdown import Markdown

        self._rest += piece
        if (end := end_of_parts(self._rest)) > 0:
            self._live.update("", refresh=True)
            self._console.print(Markdown(self._rest[:end]), "")
            self._rest = self._rest[end:]
        self._live.update(Markdown(self._rest), refresh=True)

    def __exit__(self, kind: object, *_: object) -> None:
        from rich.markdown import Markdown

        self._live.update("", refresh=True)
        self._live.stop()
        self._console.print(Markdown(self._rest))


def end_of_parts(text: str) -> int:
    """Returns where the last whole part of a markdown text ends: at an empty line that is in no
    block of code."""
    end = at = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        at += len(line)
        if fence:
            # A block ends with a line of its own sign alone, at least as often as it began.
            rest = line.strip()
            if rest.startswith(fence) and not rest.strip(fence[0]):
                fence = ""
        elif found := re.match(r"\s*(`{3,}(?=[^`]*$)|~{3,})", line):
            fence = found[1]
        elif line == "\n":
            end = at
    return end
