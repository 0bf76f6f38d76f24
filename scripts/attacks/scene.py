"""What an attack is given, and how it calls what it attacks."""

from __future__ import annotations

import dataclasses
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moejax import BudgetError, UserError

if TYPE_CHECKING:
    from moejax import LLM
    from scripts.attacks.engine import Known

LIMIT_S = 10.0
"""A call that takes longer hangs."""

LIMIT = "MOEJAX_ATTACK_LIMIT_S"
"""Environment variable: seconds in its place, however busy the machine is."""

MOST_LINE, MOST_LINES = 1000, 50
"""Characters of a message's line, and its lines."""


def limit_s() -> float:
    """LIMIT_S, and more on a machine whose processors are shared with others."""
    if given := os.environ.get(LIMIT):
        return float(given)
    return LIMIT_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


Refusal = type[BaseException]


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that must not be."""

    what: str
    """`raised`, `slow`, `message`, `memory`, `bits`, `engine`, `lost`, `left`, `outside`, `died` or
    `hung`."""
    text: str


@dataclasses.dataclass
class Scene:
    """One case.

    rng: of this case alone. directory: empty, for its files; removed afterwards. known: requests
    whose answers were recorded. began: told of each call before it starts, so that whoever watches
    from outside knows which one hangs.
    """

    llm: LLM
    known: Known
    rng: random.Random
    directory: Path
    began: Callable[[str], None] = lambda what: None
    faults: list[Fault] = dataclasses.field(default_factory=list)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    """What the attack did, such as kills and refusals."""

    def fault(self, what: str, text: str) -> None:
        self.faults.append(Fault(what, text if len(text) <= 2000 else f"{text[:2000]}…"))

    def call(
        self,
        what: str,
        function: Callable[[], Any],
        refusals: tuple[Refusal, ...] = (UserError, BudgetError),
    ) -> Any:
        """What the function returns or the error that it raises. Anything but one of `refusals`, a
        message that fills the screen and a call that takes long are faults."""
        self.began(what)
        begin = time.perf_counter()
        try:
            result = function()
        except BaseException as error:  # tokenizers panics with a BaseException
            if not isinstance(error, refusals):
                self.fault("raised", f"{what}: {described(error)}")
            else:
                self.check_message(what, str(error))
            result = error
        self.ended(what, begin)
        return result

    def check_message(self, what: str, message: str) -> None:
        """It does not fill the screen."""
        lines = message.split("\n")
        if max(map(len, lines)) > MOST_LINE or len(lines) > MOST_LINES:
            text = f"{what}: a message of {len(message)} characters in {len(lines)} lines"
            self.fault("message", text)

    def ended(self, what: str, begin: float) -> None:
        """What began then, by time.perf_counter(), has ended now."""
        took = time.perf_counter() - begin
        if took > limit_s():
            self.fault("slow", f"{what}: took {took:.1f} s")


def described(error: BaseException) -> str:
    """The error with the place that raised it, in a line."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{Path(f.filename).name}:{f.lineno}" for f in frames[-2:]]
    try:
        text = str(error)
    except Exception:
        text = "(no message)"
    return f"{type(error).__name__}: {text[:300]!s} ({' < '.join(reversed(places))})"
