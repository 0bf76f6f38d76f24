"""Templates of text: alternatives, slots and capitals.

`[a|b|c]` is one of its alternatives (which may be empty or hold others), `{name}` a slot. The value
of a slot may be a template itself.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from random import Random

Part = str | tuple[str] | list["Part"]
"""Text, a slot, or alternatives: a list of sequences of parts."""

SOUNDS_LIKE_YOU = ("uni", "use", "usu", "eu", "one", "once")


def with_article(noun: str) -> str:
    """'a' or 'an' and the noun: with_article('old boat') = 'an old boat'."""
    if noun.startswith(SOUNDS_LIKE_YOU):
        return f"a {noun}"
    vowel = noun[0].lower() in "aeiou" or noun.startswith(("hour", "honest"))
    return f"{'an' if vowel else 'a'} {noun}"


@functools.cache
def parse(template: str) -> list:
    """The template's parts."""
    found, end = parse_from(template, 0, False)
    if end != len(template):
        raise ValueError(f"unbalanced bracket at {end} of {template!r}")
    return found[0]


def parse_from(text: str, at: int, inside: bool) -> tuple[list, int]:
    """(the alternatives from `at` on, where they end)."""
    alternatives, parts, begin = [], [], at
    while at < len(text):
        sign = text[at]
        if sign in "[]{|":
            if at > begin:
                parts.append(text[begin:at])
            if sign == "[":
                inner, at = parse_from(text, at + 1, True)
                parts.append(inner)
            elif sign == "{":
                end = text.index("}", at)
                parts.append((text[at + 1 : end],))
                at = end
            elif inside and sign == "]":
                return [*alternatives, parts], at
            elif inside:
                alternatives.append(parts)
                parts = []
            else:
                raise ValueError(f"{sign} outside brackets in {text!r}")
            begin = at + 1
        at += 1
    if inside:
        raise ValueError(f"a bracket of {text!r} is not closed")
    if at > begin:
        parts.append(text[begin:at])
    return [parts], at


def write(parts: list, slots: Mapping[str, str], choose, out: list[str]) -> None:
    """Appends the text of parts to out."""
    for part in parts:
        if part.__class__ is str:
            out.append(part)
        elif part.__class__ is tuple:
            value = slots[part[0]]
            if "{" in value or "[" in value:
                write(parse(value), slots, choose, out)
            else:
                out.append(value)
        else:
            write(part[int(choose() * len(part))], slots, choose, out)


def expand(random: Random, template: str, slots: Mapping[str, str]) -> str:
    """The template's text, spaces single."""
    out: list[str] = []
    write(parse(template), slots, random.random, out)
    return " ".join("".join(out).split())


def fill(random: Random, template: str, slots: Mapping[str, str]) -> str:
    """The template's text, spaces single, sentences with capitals."""
    return polish(expand(random, template, slots))


def polish(text: str) -> str:
    """Single spaces, none before a comma or a full stop, and a capital first in each sentence."""
    text = " ".join(text.split())
    text = text.replace(" ,", ",").replace(" .", ".").replace(" !", "!").replace(" ?", "?")
    first = text[1:2].upper() if text[:1] == '"' else ""
    text = f'"{first}{text[2:]}' if first else text[:1].upper() + text[1:]
    for mark in (". ", "! ", "? ", '." ', '!" ', '?" '):
        if mark not in text:
            continue
        pieces = text.split(mark)
        # After a quoted question or exclamation, the sentence goes on: "Who?" she asked.
        goes_on = mark in ('!" ', '?" ')
        for i in range(1, len(pieces)):
            piece = pieces[i]
            if piece[:1] == '"':
                pieces[i] = piece[:1] + piece[1:2].upper() + piece[2:]
            elif not goes_on:
                pieces[i] = piece[:1].upper() + piece[1:]
        text = mark.join(pieces)
    return text


def plural(noun: str) -> str:
    """'daisies' of 'daisy'."""
    if noun == "lavender":
        return "lavender plants"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("x", "s", "ch", "sh")) else f"{noun}s"


class Slots(dict[str, str]):
    """Values of slots. Of one that is missing, others are made: {a_king} is 'a king' and {king_s}
    'kings' of {king}; {King}, {A_king} and {The_king} begin with a capital."""

    def __missing__(self, name: str) -> str:
        if name.startswith("a_"):
            return with_article(self[name[2:]])
        if name.endswith("_s"):
            return plural(self[name[:-2]])
        lower = name[:1].lower() + name[1:]
        if lower == name:
            raise KeyError(name)
        value = self[lower]
        return value[:1].upper() + value[1:]


def pick(random: Random, items: Sequence):
    """One of the items."""
    return items[int(random.random() * len(items))]
