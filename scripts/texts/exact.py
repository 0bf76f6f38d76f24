"""Tasks with exact answers: arithmetic in steps, looking up, formats (functions: functions.py)."""

from __future__ import annotations

import json
import re
from random import Random

from scripts.texts.functions import Task, complete_tests, run_function, write_function
from scripts.texts.grammar import pick
from scripts.texts.words import WORDS


def evaluate_steps(random: Random) -> Task:
    """An expression, reduced one operation at a time."""

    def build(depth: int) -> str:
        if depth == 0 or random.random() < 0.2:
            return str(random.randint(1, 20))
        a, b, sign = build(depth - 1), build(depth - 1), pick(random, "+-*")
        return f"({a} {sign} {b})"

    text = build(pick(random, (2, 2, 3)))
    lines, now = [], text
    while found := re.search(r"\((-?\d+) ([+*-]) (-?\d+)\)", now):
        a, sign, b = int(found[1]), found[2], int(found[3])
        value = a + b if sign == "+" else a - b if sign == "-" else a * b
        lines.append(f"{a} {sign} {b} = {value}")
        now = now[: found.start()] + str(value) + now[found.end() :]
    return f"Evaluate {text} step by step.", "\n".join([*lines, f"Answer: {now}"])


def column_sum(random: Random) -> Task:
    """A sum or difference of longer numbers, digit by digit from the right."""
    digits = random.randint(2, 5)
    a, b = (random.randint(10 ** (digits - 1), 10**digits - 1) for _ in "ab")
    lines, carry = [], 0
    for i in range(digits):
        x, y = a // 10**i % 10, b // 10**i % 10
        total = x + y + carry
        lines.append(f"{x} + {y} + {carry} = {total}, write {total % 10}, carry {total // 10}")
        carry = total // 10
    return f"Add {a} and {b} digit by digit.", "\n".join([*lines, f"Answer: {a + b}"])


def long_product(random: Random) -> Task:
    """A product by the parts of one factor."""
    a, b = random.randint(11, 999), random.randint(11, 99)
    tens, ones = b // 10 * 10, b % 10
    lines = [
        f"{a} * {tens} = {a * tens}",
        f"{a} * {ones} = {a * ones}",
        f"{a * tens} + {a * ones} = {a * b}",
    ]
    return f"Multiply {a} by {b} in steps.", "\n".join([*lines, f"Answer: {a * b}"])


def equation(random: Random) -> Task:
    """A linear equation."""
    a, x, b = random.randint(2, 12), random.randint(0, 20), random.randint(1, 50)
    lines = [f"{a} * x = {a * x + b} - {b} = {a * x}", f"x = {a * x} / {a} = {x}"]
    return f"Solve {a} * x + {b} = {a * x + b}.", "\n".join([*lines, f"Answer: {x}"])


def division(random: Random) -> Task:
    """Quotient and remainder."""
    b, q = random.randint(2, 25), random.randint(1, 40)
    r = random.randrange(b)
    a = b * q + r
    return (
        f"Divide {a} by {b} with remainder.",
        f"{b} * {q} = {b * q}\n{a} - {b * q} = {r}\nAnswer: {q} remainder {r}",
    )


COLUMNS = {
    "age": lambda r: str(r.randint(5, 90)),
    "town": lambda r: pick(r, WORDS["towns"]),
    "job": lambda r: pick(r, WORDS["jobs"]),
    "colour": lambda r: pick(r, WORDS["colours"]),
    "pet": lambda r: pick(r, ["dog", "cat", "bird", "fish", "horse", "rabbit", "none"]),
    "score": lambda r: str(r.randint(0, 100)),
    "code": lambda r: "".join(
        pick(r, "ABCDEFGHJKLMNPQRSTUVWXYZ23456789") for _ in range(r.randint(3, 6))
    ),
    "fruit": lambda r: pick(r, WORDS["fruits"]),
}


def make_table(random: Random, rows: int) -> tuple[list[str], list[list[str]]]:
    """(column names, rows), the first column unique names."""
    columns = ["name", *random.sample(list(COLUMNS), random.randint(1, 4))]
    names = random.sample(WORDS["girls"] + WORDS["boys"], rows)
    return columns, [[n, *(COLUMNS[c](random) for c in columns[1:])] for n in names]


def show_table(random: Random, columns: list[str], rows: list[list[str]]) -> str:
    """The table as CSV, in Markdown, or with names at each value."""
    form = random.randrange(3)
    if form == 0:
        return as_csv(columns, rows)
    if form == 1:
        lines = [
            "| " + " | ".join(row) + " |"
            for row in [columns, ["-" * len(c) for c in columns], *rows]
        ]
        return "\n".join(lines)
    return "\n".join(
        ", ".join(f"{c}: {v}" for c, v in zip(columns, row, strict=True)) for row in rows
    )


def lookup(random: Random) -> Task:
    """A question about a given table."""
    columns, rows = make_table(random, random.randint(3, 12))
    text = show_table(random, columns, rows)
    column = random.randrange(1, len(columns))
    row = pick(random, rows)
    kind = random.randrange(5)
    if kind <= 1:
        question, answer = f"What is the {columns[column]} of {row[0]}?", row[column]
    elif kind == 2:
        value = row[column]
        found = [r[0] for r in rows if r[column] == value]
        question, answer = f"Who has {columns[column]} {value}?", ", ".join(found)
    elif kind == 3:
        question, answer = f"Copy the row of {row[0]}.", ", ".join(row)
    else:
        value = row[column]
        question = f"How many rows have {columns[column]} {value}?"
        answer = str(sum(r[column] == value for r in rows))
    return f"{text}\n{question}", answer


NOUNS = WORDS["treasures"] + WORDS["animals"] + WORDS["fruits"] + WORDS["flowers"]


def copy_text(random: Random) -> Task:
    """Copying from a given list of words, whole or in parts."""
    items = [pick(random, NOUNS) for _ in range(random.randint(3, 12))]
    line = " ".join(w.replace(" ", "-") for w in items)
    parts = line.split()
    kind = random.randrange(7)
    n = random.randrange(len(parts))
    if kind == 0:
        return f"Repeat: {line}", line
    if kind == 1:
        return f"Reverse the words: {line}", " ".join(reversed(parts))
    if kind == 2:
        return f"What is word {n + 1}? {line}", parts[n]
    if kind == 3:
        return f"Sort the words: {line}", " ".join(sorted(parts))
    if kind == 4:
        return f"How many words? {line}", str(len(parts))
    if kind == 5:
        return f"Write in capitals: {line}", line.upper()
    return f"Spell: {parts[n]}", " ".join(parts[n])


def as_json(columns: list[str], rows: list[list[str]]) -> str:
    """An array of objects."""
    return json.dumps(
        [
            dict(zip(columns, (int(v) if v.isdigit() else v for v in row), strict=True))
            for row in rows
        ]
    )


def as_csv(columns: list[str], rows: list[list[str]]) -> str:
    """Lines, the first with the names."""
    return "\n".join(",".join(row) for row in [columns, *rows])


def as_lisp(columns: list[str], rows: list[list[str]]) -> str:
    """A list of association lists."""

    def value(v: str) -> str:
        return v if v.isdigit() else f'"{v}"'

    def one(row: list[str]) -> str:
        return "(" + " ".join(f"({c} {value(v)})" for c, v in zip(columns, row, strict=True)) + ")"

    return "(" + " ".join(one(row) for row in rows) + ")"


FORMATS = {"JSON": as_json, "CSV": as_csv, "an s-expression": as_lisp}


def translate(random: Random) -> Task:
    """The same records in another format."""
    columns, rows = make_table(random, random.randint(1, 4))
    source, target = random.sample(list(FORMATS), 2)
    return f"Write as {target}:\n{FORMATS[source](columns, rows)}", FORMATS[target](columns, rows)


def prefix(random: Random) -> Task:
    """Infix to s-expression, or back."""

    def build(depth: int) -> tuple[str, str]:
        if depth == 0 or random.random() < 0.2:
            leaf = pick(random, ["x", "y", "z", "a", "b", str(random.randint(0, 20))])
            return leaf, leaf
        (a, la), (b, lb), sign = build(depth - 1), build(depth - 1), pick(random, "+-*/")
        return f"({a} {sign} {b})", f"({sign} {la} {lb})"

    infix, lisp = build(random.randint(1, 3))
    if random.random() < 0.5:
        return f"Write as an s-expression: {infix}", lisp
    return f"Write in infix: {lisp}", infix


REGEX_PARTS = [
    (r"\d", lambda r: str(r.randint(0, 9))),
    (r"\d{2}", lambda r: str(r.randint(10, 99))),
    (r"\d{4}", lambda r: str(r.randint(1000, 9999))),
    ("[a-c]", lambda r: pick(r, "abc")),
    ("[A-Z]", lambda r: chr(65 + r.randrange(26))),
    ("[xyz]+", lambda r: "".join(pick(r, "xyz") for _ in range(r.randint(1, 3)))),
    ("(cat|dog)", lambda r: pick(r, ["cat", "dog"])),
    ("a*", lambda r: "a" * r.randint(0, 3)),
    ("-", lambda r: "-"),
    (":", lambda r: ":"),
    ("b?", lambda r: pick(r, ["", "b"])),
    ("end", lambda r: "end"),
]


def regex(random: Random) -> Task:
    """Whether a text matches a regular expression as a whole, or which of several do."""
    parts = [pick(random, REGEX_PARTS) for _ in range(random.randint(2, 5))]
    pattern = "".join(p for p, _ in parts)

    def sample() -> str:
        text = "".join(make(random) for _, make in parts)
        if text and random.random() < 0.5:
            at = random.randrange(len(text))
            text = text[:at] + pick(random, ["", "a", "7", "Q", "-", "x"]) + text[at + 1 :]
        return text or "a"

    if random.random() < 0.5:
        text = sample()
        return f"Does {pattern} match {text}?", "yes" if re.fullmatch(pattern, text) else "no"
    texts = [sample() for _ in range(random.randint(3, 6))]
    found = [t for t in texts if re.fullmatch(pattern, t)]
    return f"Which match {pattern}? {' '.join(texts)}", " ".join(found) or "none"


DOMAINS = {
    "arithmetic": (evaluate_steps, column_sum, long_product, equation, division),
    "lookup": (lookup, lookup, copy_text),
    "formats": (translate, prefix, regex),
    "python": (write_function, run_function, run_function, complete_tests),
}


def task(random: Random, domain: str) -> Task:
    """A task of the domain."""
    return pick(random, DOMAINS[domain])(random)
