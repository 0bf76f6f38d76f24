"""The process of bounded_process: what it does, one prompt after another."""

from __future__ import annotations

import json
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from moejax.requests.bounded_process import MEMORY, WORK_S


def serve(connection: Connection) -> None:
    """Answers until the other end of the connection is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.send_bytes(b"")  # it stands
    known: dict[str, Any] = {}
    while True:
        try:
            what, new, work = json.loads(connection.recv_bytes())
        except EOFError:
            return
        # If the parent was killed meanwhile, nobody else ends it.
        signal.alarm(int(WORK_S) + 2)
        try:
            if "tokenizer" in new:
                new["tokenizer"] = Tokenizer.from_str(new["tokenizer"])
                new["tokenizer"].no_truncation()
                new["tokenizer"].no_padding()
            known |= new
            reply = json.dumps(
                [_rendered(known, work) if what == "render" else _ids(known, *work), None]
            )
        except BaseException as error:  # a panic of tokenizers is no Exception
            reply = json.dumps([None, (str(error) or type(error).__name__)[:500]])
        signal.alarm(0)
        connection.send_bytes(reply.encode())


def _rendered(known: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    (text,), _ = render_jinja_template(
        conversations=[messages],
        chat_template=known["template"],
        add_generation_prompt=True,
        **known["names"],
    )
    return text


def _ids(known: dict[str, Any], text: str, special_tokens: bool) -> list[int]:
    return known["tokenizer"].encode(text, add_special_tokens=special_tokens).ids


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
