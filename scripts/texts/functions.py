"""Tasks about small Python functions: write one, say what a call gives, complete its tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from scripts.texts.grammar import pick
from scripts.texts.words import WORDS, read

Task = tuple[str, str]
"""A question and its only right answer."""


class Function(NamedTuple):
    """A function. calls: (a call, its value), as text."""

    name: str
    does: str
    code: str
    calls: list[tuple[str, str]]


def numbers(random: Random, low: int, high: int, largest: int = 20) -> list[int]:
    """From `low` to `high` numbers of 0 to largest."""
    return [random.randint(0, largest) for _ in range(random.randint(low, high))]


def arguments(random: Random, given: str) -> tuple[Any, ...]:
    """Arguments of a kind that templates/functions.yaml names."""
    if given.startswith("up to "):
        return (random.randint(0, int(given.removeprefix("up to "))),)
    if given.startswith("one of "):
        return (pick(random, WORDS[given.removeprefix("one of ")]),)
    kinds: dict[str, Callable[[], tuple[Any, ...]]] = {
        "numbers": lambda: (numbers(random, 3, 6),),
        "few numbers": lambda: (numbers(random, 2, 4),),
        "repeated numbers": lambda: (numbers(random, 6, 6, largest=4),),
        "two numbers": lambda: (random.randint(1, 60), random.randint(1, 60)),
        "three animals": lambda: (" ".join(random.choices(WORDS["animals"], k=3)),),
        "list of fruits": lambda: (random.choices(WORDS["fruits"], k=3),),
    }
    return kinds[given]()


@functools.lru_cache(maxsize=10_000)
def compiled(name: str, code: str) -> Callable[..., Any]:
    """The function that the code, made from our own templates, defines."""
    space: dict[str, Any] = {}
    exec(code, space)
    return space[name]


def make_function(random: Random) -> Function:
    """A function with three calls."""
    about = pick(random, read("functions"))
    n = random.randint(1, 12)
    values = {
        "n": n,
        "m": random.randint(2, 4),
        "c": pick(random, "aeorst"),
        "k": n + random.randint(2, 15),
    }
    name, body = about["name"], about["body"].format(**values).replace("\n", "\n    ")
    code = f"def {name}({about['parameters']}):\n    {body}"
    calls = []
    for _ in range(3):
        given = arguments(random, about["given"])
        value = compiled(name, code)(*given)
        calls.append((f"{name}({', '.join(map(repr, given))})", repr(value)))
    return Function(name, about["does"].format(**values), code, calls)


def write_function(random: Random) -> Task:
    """A function to be written, with tests."""
    made = make_function(random)
    shown = made.calls[: random.randint(1, 3)]
    tests = "\n".join(f"assert {call} == {value}" for call, value in shown)
    return (
        f"Write a Python function {made.name} that {made.does}. It must pass:\n{tests}",
        made.code,
    )


def run_function(random: Random) -> Task:
    """What a call gives."""
    made = make_function(random)
    call, value = made.calls[0]
    return f"{made.code}\nWhat is {call}?", value


def complete_tests(random: Random) -> Task:
    """Right results for given calls, as assertions."""
    made = make_function(random)
    asked = "\n".join(f"assert {call} ==" for call, _ in made.calls)
    answer = "\n".join(f"assert {call} == {value}" for call, value in made.calls)
    return f"Complete the tests:\n{made.code}\n{asked}", answer
