"""A Ray in this process: actors that do what a test says, on nodes that a test takes away."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from moejax.serve.cluster.ray_cluster import Node
from moejax.serve.cluster.worker import Outcome, Started, WorkerPlace


class RayError(Exception):
    """The base of what Ray raises."""


class Die(Exception):
    """Raised by a test's work: the worker ends."""


class Reference:
    """A result that may not be there yet."""

    def __init__(self, make: Callable[[], Any]):
        self.make = make


class Method:
    """A method of an actor, with Ray's `remote`."""

    def __init__(self, function: Callable[..., Reference]):
        self.remote = function


class Actor:
    """A worker. One task a `take`, by the test's `work(actor, payload)`."""

    def __init__(self, ray: FakeRay, options: dict[str, Any]):
        self.ray, self.options = ray, options
        self.number = next(ray.numbers)
        self.node = ray.place(self)
        self.dead = self.closed = False
        self.inbox: list[tuple[int, Any]] = []
        self.seen: list[Any] = []
        self.ended_sessions: list[str] = []
        for name in ("where", "start", "put", "take", "end_session", "stats", "close"):
            setattr(self, name, Method(getattr(self, f"_{name}")))
        ray.actors.append(self)

    def _alive(self, make: Callable[[], Any]) -> Reference:
        def value() -> Any:
            if self.dead or self.node not in {node.id for node in self.ray.alive}:
                raise RayError("The actor died unexpectedly.\nThe worker was killed.")
            return make()

        return Reference(value)

    def _where(self) -> Reference:
        return self._alive(
            lambda: WorkerPlace(self.node, "10.0.0.1", 1000 + self.number, self.node)
        )

    def _start(self, model: str, options: object) -> Reference:
        return self._alive(lambda: self.ray.start(self) or Started(self.ray.room, 0.5))

    def _put(self, tasks: list[tuple[int, Any]]) -> None:
        self.inbox += tasks

    def _take(self) -> Reference:
        return self._alive(self._work)

    def _work(self) -> tuple[list[Outcome], int]:
        if not self.inbox:
            return [], len(self.seen)
        number, payload = self.inbox[0]
        self.seen.append(payload)
        try:
            outcome = self.ray.work(self, payload)
        except Die:
            self.dead = True
            raise RayError("The actor died unexpectedly.") from None
        if isinstance(outcome, list):  # pieces; Die among them: the worker ends behind them
            parts = [Outcome(number, piece, part=True) for piece in outcome if piece is not Die]
            self.dead = Die in outcome
            del self.inbox[0]
            return [*parts, *([] if self.dead else [Outcome(number)])], len(self.seen)
        del self.inbox[0]
        if not isinstance(outcome, Outcome):
            outcome = Outcome(number, value=outcome)
        return [Outcome(number, outcome.value, outcome.error, outcome.broken)], len(self.seen)

    def _end_session(self, session_id: str) -> None:
        self.ended_sessions.append(session_id)

    def _stats(self) -> Reference:
        return self._alive(dict)

    def _close(self) -> Reference:
        self.closed = True
        return self._alive(lambda: None)


class FakeRay:
    """What the pool uses of the module ray. work: of an actor and a payload, a result."""

    def __init__(self, work: Callable[[Actor, Any], Any], nodes: int = 1, room: int = 4):
        self.work, self.room = work, room
        self.alive = [Node(f"n{i}", f"10.0.0.{i}", 4.0, 0.0) for i in range(nodes)]
        self.actors: list[Actor] = []
        self.numbers = itertools.count(1)
        self.start: Callable[[Actor], Any] = lambda actor: None
        self.exceptions = type("exceptions", (), {"RayError": RayError})

    def place(self, actor: Actor) -> str:
        said = actor.options.get("label_selector", {}).get("ray.io/node-id", "!in()")
        named = [node.id for node in self.alive if node.id in said]
        good = [node.id for node in self.alive if node.id not in named]
        if not said.startswith("!"):
            good = named
        return good[actor.number % len(good)]

    def remote(self, kind: type) -> Any:
        def options(**given: Any) -> Any:
            return type("Made", (), {"remote": staticmethod(lambda: Actor(self, given))})

        return type("Remote", (), {"options": staticmethod(options)})

    def wait(self, references: list[Reference], num_returns: int, timeout: float) -> Any:
        return references[:num_returns], []

    def get(self, reference: Reference, timeout: float | None = None) -> Any:
        return reference.make()

    def kill(self, actor: Actor, no_restart: bool) -> None:
        actor.dead = True
