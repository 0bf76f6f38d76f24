"""What one request, and all together, may take."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request

from moejax.requests.outputs import RequestOutput
from moejax.serve.http.openai_requests import Refusal

MOST_BODY = 8 * 2**20
"""Most bytes of a request's body. It is read on the event loop, which all requests share."""

BODY_S = 60.0
"""Most seconds in which a body must come."""


@dataclasses.dataclass
class Limits:
    """Limits of a server, and what counts towards them.

    - `requests`: most requests at once, running and waiting; one with `n` sequences counts as n.
    - `seconds`: most seconds of one request, waiting included; None: any number.
    """

    requests: int = 1024
    seconds: float | None = None
    now: int = dataclasses.field(default=0, init=False)
    """Sequences that run or wait."""

    async def within(
        self, outputs: AsyncGenerator[RequestOutput, None], sequences: int = 1
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields a request's outputs. Raises Refusal with status 400 if it alone has too many
        sequences, 503 if there are too many requests, and 504 if its time is over, which cancels
        it."""
        if sequences > self.requests:
            raise Refusal(400, f"n is {sequences}, the most here is {self.requests}", "n")
        if self.now + sequences > self.requests:
            raise Refusal(503, f"{self.requests} requests run or wait, the most here; try later")
        loop = asyncio.get_running_loop()
        until = None if self.seconds is None else loop.time() + self.seconds
        self.now += sequences
        try:
            async with aclosing(outputs):
                finished = False
                while not finished:
                    left = None if until is None else until - loop.time()
                    output = await asyncio.wait_for(anext(outputs), left)
                    finished = output.finished
                    yield output
        except TimeoutError:
            if until is None or loop.time() < until:  # the request's own
                raise
            raise Refusal(504, f"the answer took more than {self.seconds:g} s, the most") from None
        finally:
            self.now -= sequences


async def read_body(request: Request) -> bytes:
    """Reads a JSON body. Raises Refusal for another type, and for too many bytes or seconds."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Pages of other sites may make a browser send other types, without asking first.
        raise Refusal(415, "the header Content-Type must be application/json")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > MOST_BODY:
                    raise Refusal(
                        413, f"the body is longer than {MOST_BODY} bytes, the most that is read"
                    )
                parts.append(part)
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {BODY_S:g} s") from None
    return b"".join(parts)
