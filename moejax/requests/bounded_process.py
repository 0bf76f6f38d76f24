"""Chat templates and texts, worked on in a process with a bound of time and memory.

A template is a program of the checkpoint's, and a tokenizer's rules are nearly one: a nested range,
a string that doubles or a rule that multiplies the text would take all time and memory of the
engine's process. Here they end a process of their own. It is started at the first use, kept, and
started anew after it was ended.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

from moejax.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

START_S = 120.0
"""Most seconds until the process stands: imports from a slow disk on a busy machine."""

WORK_S = 8.0
"""Most seconds for one prompt."""

MEMORY = 2 << 30
"""Bytes of address space of the process, beside a tokenizer and a text of usual size."""

MOST_ANSWER = 64 << 20
"""Bytes of a rendered text, or of token ids."""


class BoundedProcess:
    """Renders messages and encodes texts as the tokenizer does. For any thread; one prompt at a
    time."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._tokenizer, self._turn = tokenizer, threading.Lock()
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._knows: dict[str, Any] = {}
        self._end: weakref.finalize | None = None

    def start(self) -> None:
        """Starts it, so that the first prompt does not wait for that."""
        with self._turn:
            self._connect()

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The messages as the chat template writes them, the answer's beginning included. Raises
        UserError as encode does, and for what the template refuses."""
        tokenizer = self._tokenizer
        given = {"template": tokenizer.get_chat_template(), "names": tokenizer.special_tokens_map}
        return self._ask("render", given, messages)

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        """The text's token ids. special_tokens: with those that begin and end a text.

        Raises UserError when it takes more time or memory than there is.
        """
        backend = self._knows.get("tokenizer") or self._tokenizer.backend_tokenizer.to_str()
        return self._ask("encode", {"tokenizer": backend}, [text, special_tokens])

    def interrupt(self) -> None:
        """Ends the work in progress, whose caller gets a UserError; the next use starts the process
        anew."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """Ends the process; the next use starts it anew."""
        self.interrupt()
        with self._turn:
            self._stop()

    def _ask(self, what: str, given: dict[str, Any], work: Any) -> Any:
        """given: what it must know, told once."""
        with self._turn:
            try:
                connection = self._connect()
                new = {name: v for name, v in given.items() if self._knows.get(name) != v}
                connection.send_bytes(json.dumps([what, new, work], default=str).encode())
                self._knows |= new
                if not connection.poll(WORK_S):
                    raise UserError(f"it took more than {WORK_S:.0f} seconds")
                answer, error = json.loads(connection.recv_bytes(MOST_ANSWER))
            except (EOFError, OSError) as ended:
                self._stop()
                raise UserError(
                    f"the process for it ended ({ended or 'killed'}); it may use "
                    f"{MEMORY >> 20} MB of memory, and {MOST_ANSWER >> 20} MB for the result"
                ) from None
            except BaseException:  # its answer would be taken for the next one's
                self._stop()
                raise
            if error is not None:
                for name in new:
                    del self._knows[name]  # it may have been what is wrong
                raise UserError(error)
            return answer

    def _connect(self) -> Connection:
        if self._connection is not None and self._process is not None:
            if self._process.poll() is None:
                return self._connection
            self._stop()
        ours, theirs = Pipe()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._knows = {}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the parent's
                env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
            )
        self._connection = ours
        self._end = weakref.finalize(self, _end, self._process, ours)
        if not ours.poll(START_S):
            raise UserError(
                f"the process for chat templates did not start in {START_S:.0f} seconds"
            )
        ours.recv_bytes()
        return ours

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._connection = self._end = None


def _end(process: subprocess.Popen, connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


# ---- in the process


def serve(connection: Connection) -> None:
    """Answers until the other end of the connection is closed."""
    from tokenizers import Tokenizer
    from transformers.utils.chat_template_utils import render_jinja_template

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.send_bytes(b"")  # it stands
    known: dict[str, Any] = {}

    def answer(what: str, new: dict[str, Any], work: Any) -> Any:
        if "tokenizer" in new:
            new["tokenizer"] = Tokenizer.from_str(new["tokenizer"])
            new["tokenizer"].no_truncation()
            new["tokenizer"].no_padding()
        known.update(new)
        if what == "encode":
            text, special_tokens = work
            return known["tokenizer"].encode(text, add_special_tokens=special_tokens).ids
        (text,), _ = render_jinja_template(
            conversations=[work],
            chat_template=known["template"],
            add_generation_prompt=True,
            **known["names"],
        )
        return text

    while True:
        try:
            asked = json.loads(connection.recv_bytes())
        except EOFError:
            return
        # If the parent was killed meanwhile, nobody else ends it.
        signal.alarm(int(WORK_S) + 2)
        try:
            reply = json.dumps([answer(*asked), None])
        except BaseException as error:  # a panic of tokenizers is no Exception
            reply = json.dumps([None, (str(error) or type(error).__name__)[:500]])
        signal.alarm(0)
        connection.send_bytes(reply.encode())


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
