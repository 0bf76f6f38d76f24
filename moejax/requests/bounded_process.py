"""Renders chat templates and encodes texts in a process with limited time and memory.

A chat template is a program from the checkpoint, and a tokenizer's rules are nearly one. A nested
range, a string that doubles or a rule that multiplies the text could use all time and memory of the
engine's process. Here they can only end a separate process. It starts at the first use, stays, and
starts again after it has ended.
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
    from moejax.requests.tokenizer import Tokenizer

START_S = 120.0
"""Most seconds until the process is ready: imports from a slow disk on a busy machine."""

WORK_S = 8.0
"""Most seconds for one prompt."""

MEMORY = 2 << 30
"""Bytes of address space of the process, beyond a tokenizer and a text of usual size."""

MOST_ANSWER = 64 << 20
"""Most bytes of a rendered text, or of token ids."""


class BoundedProcess:
    """Renders messages and encodes texts as the tokenizer does, one prompt at a time. Any thread
    may call it."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._turn = tokenizer, threading.Lock()
        self._process: subprocess.Popen | None = None
        self._interrupted: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._knows: dict[str, Any] = {}
        self._end: weakref.finalize | None = None

    def start(self) -> None:
        """Starts the process, so that the first prompt does not wait for it."""
        with self._turn:
            self._connect()

    def render(self, messages: list[dict[str, Any]], named: dict[str, Any]) -> str:
        """Renders messages by a chat template.

        - `named`: arguments of the function that renders, `chat_template` among them, and more
          names of the template and their values.

        Raises UserError as encode does, and for messages that the template refuses.
        """
        given = {"names": dict(self._tokenizer.special_tokens)}
        return self._ask("render", given, [messages, named])

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        """The token ids of a text.

        - `special_tokens`: add the tokens that begin and end a text.

        Raises UserError if it needs more time or memory than allowed.
        """
        backend = self._knows.get("tokenizer") or self._tokenizer.backend.to_str()
        return self._ask("encode", {"tokenizer": backend}, [text, special_tokens])

    def interrupt(self) -> None:
        """Ends the work in progress; its caller gets a UserError. The next use starts the process
        again."""
        if (process := self._process) is not None:
            self._interrupted = process  # it may look alive for milliseconds
            process.kill()

    def close(self) -> None:
        """Ends the process. The next use starts it again."""
        self.interrupt()
        with self._turn:
            self._stop()

    def _ask(self, what: str, given: dict[str, Any], work: Any) -> Any:
        """Sends work to the process. given: data that the process needs, sent once."""
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
            except BaseException:  # its answer would be taken for that of the next prompt
                self._stop()
                raise
            if error is not None:
                for name in new:
                    del self._knows[name]  # the process may be the cause
                raise UserError(error)
            return answer

    def _connect(self) -> Connection:
        if self._connection is not None and self._process is not None:
            if self._process is not self._interrupted and self._process.poll() is None:
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
                start_new_session=True,  # the parent handles Ctrl-C
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
    connection.send_bytes(b"")  # ready
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
        messages, named = work
        (text,), _ = render_jinja_template(conversations=[messages], **(known["names"] | named))
        return text

    while True:
        try:
            asked = json.loads(connection.recv_bytes())
        except EOFError:
            return
        # If the parent was killed, nothing else ends this process.
        signal.alarm(int(WORK_S) + 2)
        try:
            reply = json.dumps([answer(*asked), None])
        except BaseException as error:  # a panic of tokenizers is not an Exception
            reply = json.dumps([None, (str(error) or type(error).__name__)[:500]])
        signal.alarm(0)
        connection.send_bytes(reply.encode())


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
