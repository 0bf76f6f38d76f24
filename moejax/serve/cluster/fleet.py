"""Models on the workers of a cluster, and LLM.generate_each on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any

from host_offload.memory.budget import format_bytes
from moejax.errors import UserError
from moejax.requests.outputs import RequestOutput
from moejax.requests.request import GenerationRequest
from moejax.serve.async_llm import AsyncLLM
from moejax.serve.cluster.workers import Scale, Worker, Workers, worker_options
from moejax.serve.llm import LLM

ROOMS = 4
"""Requests of a worker, by the rows of its steps: what it does while results go one way and new
requests the other."""


class Generator(Worker):
    """A worker whose pieces of work are lists of requests: one, or all of a session."""

    def _begin(self, llm: LLM) -> int:
        self._async = AsyncLLM(llm)
        shapes = llm.engine.runner.shapes
        return ROOMS * shapes.rows + shapes.prefill_chunks

    async def _work(self, piece: list[GenerationRequest]) -> list[RequestOutput | UserError]:
        found = [await self._generate(asked) for asked in piece]
        session_id = piece[0].session_id
        if session_id is not None and any(isinstance(one, RequestOutput) for one in found):
            await self._async.end_session(session_id)
        return found

    async def _generate(self, asked: GenerationRequest) -> RequestOutput | UserError:
        try:
            return [
                output
                async for output in self._async.generate(
                    asked.prompt,
                    asked.sampling_params,
                    session_id=asked.session_id,
                    priority=asked.priority,
                    last_only=True,
                )
            ][-1]
        except UserError as error:
            return UserError(str(error))

    async def stats(self) -> dict[str, Any]:
        return await self._async.stats()

    async def close(self) -> None:
        await self._async.close()
        await super().close()


class Fleet:
    """An LLM on every worker of a connected cluster, for requests in any number; a context manager,
    which ends the workers.

    - `model`, `options`, `scale`: see worker_options.
    - `turns`: session id → its requests that will come. They are run together, by one worker.
    - `warn`: see Workers.

    A request's output has the bits that one LLM with these options gives it, whatever worker it
    runs on, and however many there are: contract 1.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        scale: Scale,
        turns: Mapping[str, int],
        warn: Callable[[str], None] = lambda text: None,
    ):
        self._workers = Workers(worker_options(Generator, model, options, scale), warn)
        self._turns = dict(turns)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._workers.__exit__(*exception)

    @property
    def generated_tokens(self) -> int:
        """Tokens of all workers."""
        return self._workers.tokens

    def generate_each(
        self, requests: Iterable[GenerationRequest]
    ) -> Iterator[tuple[GenerationRequest, RequestOutput | UserError]]:
        """`LLM.generate_each`. A request that ends workers is yielded with a UserError."""
        for item, found in self._workers.run(self._items(requests), _strip_tags):
            yield from zip(item, found if isinstance(found, list) else repeat(found), strict=False)

    def _items(self, requests: Iterable[GenerationRequest]) -> Iterator[list[GenerationRequest]]:
        """What a worker gets at once: a request, or all of a session."""
        begun: dict[str, list[GenerationRequest]] = {}
        for asked in requests:
            if asked.session_id is None:
                yield [asked]
                continue
            together = begun.setdefault(asked.session_id, [])
            together.append(asked)
            if len(together) == self._turns[asked.session_id]:
                yield begun.pop(asked.session_id)
        yield from begun.values()  # of an input that a bad line ended early

    def end_session(self, session_id: str) -> None:
        """A worker ends a session after its last request."""

    def stats(self) -> dict[str, Any]:
        """`LLM.stats` of each worker that lives, with its place, and how many ended before."""
        return {"workers": self._workers.stats(), "ended_workers": self._workers.ended}


def _strip_tags(item: list[GenerationRequest]) -> list[GenerationRequest]:
    return [dataclasses.replace(asked, tag=None) for asked in item]


def format_fleet(stats: Mapping[str, Any]) -> str:
    """The dict of `Fleet.stats` as aligned lines: a row for each worker, then all together."""
    lines = [
        f"{'worker':<8}{'results':>9}{'tokens/s':>10}{'hits':>7}{'moved':>11}{'start':>9}  host"
    ]
    for worker in stats["workers"]:
        one = worker["stats"]
        hits, moved = one["experts"]["hit_rate"], sum(one["bytes"].values())
        lines.append(
            f"{worker['worker']:<8}{worker['results']:>9}{one['tokens_per_s'] or 0.0:>10.1f}"
            f"{'–' if hits is None else f'{hits:.1%}':>7}{format_bytes(moved):>11}"
            f"{worker['start_s']:>7.2f} s  {worker['host']}"
        )
    ended = f", {stats['ended_workers']} ended before" if stats["ended_workers"] else ""
    tokens = sum(worker["stats"]["generated_tokens"] for worker in stats["workers"])
    lines.append(f"all: {tokens} tokens of {len(stats['workers'])} workers{ended}")
    return "\n".join(lines)
