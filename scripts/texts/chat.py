"""Conversations: a user's turns and right answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from scripts.texts.grammar import Slots, fill, pick
from scripts.texts.story import Story
from scripts.texts.words import WORDS, read

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"

Turn = tuple[str, str]
"""A question and its answer."""


def render(turns: list[Turn]) -> str:
    """The conversation as the chat template writes it."""
    return "".join(f"{USER}{question}{END}{ASSISTANT}{answer}{END}" for question, answer in turns)


def conversation(random: Random, make_story: Callable[[Random], Story]) -> str:
    """One conversation: a story that is told, one that is asked about, or short questions."""
    chance = random.random()
    if chance < 0.5:
        turns = ask_for_story(random, make_story(random))
    elif chance < 0.72:
        turns = ask_about_story(random, make_story(random))
    else:
        turns = [short_turn(random) for _ in range(pick(random, (1, 1, 2, 3, 4, 6)))]
        if random.random() < 0.06:
            turns += riddle_turns(random)
    return render(turns)


def ask_for_story(random: Random, story: Story) -> list[Turn]:
    """A story is asked for and told, and sometimes asked about."""
    texts, slots = read("chat"), {"topic": pick(random, story.topics)}
    forms = texts["ask_for_any_story" if random.random() < 0.15 else "ask_for_story"]
    turns = [(pick(random, forms).format(**slots), story.text)]
    if random.random() < 0.3:
        turns += random.sample(story.facts, min(len(story.facts), pick(random, (1, 1, 2))))
    if random.random() < 0.15:
        question, answer = texts["thanks"]
        turns.append((fill(random, question, {}), fill(random, answer, {})))
    return turns


def ask_about_story(random: Random, story: Story) -> list[Turn]:
    """A story is given, with questions about it."""
    count = min(len(story.facts), pick(random, (1, 2, 3)))
    (question, answer), *more = random.sample(story.facts, count)
    form = pick(
        random,
        (
            "{s}\n\n{q}",
            "Read this story and answer the question.\n\n{s}\n\n{q}",
            "{q}\n\n{s}",
            "Story: {s}\n\nQuestion: {q}",
        ),
    )
    return [(form.format(s=story.text, q=question), answer), *more]


def short_turn(random: Random) -> Turn:
    """Any short question with its answer."""
    kind = random.random()
    if kind < 0.45:
        return sum_question(random)
    if kind < 0.57:
        return word_problem(random)
    return knowledge(random) if kind < 0.82 else small_talk(random)


def sum_question(random: Random) -> Turn:
    """A sum, difference, product or quotient with its answer."""
    kind = pick(random, "++--**/")
    if kind == "+":
        a, b = random.randint(0, 99), random.randint(0, 99)
        signs, value = ("plus", "+"), a + b
    elif kind == "-":
        a, b = sorted((random.randint(0, 99), random.randint(0, 99)), reverse=True)
        signs, value = ("minus", "-"), a - b
    elif kind == "*":
        a, b = random.randint(0, 12), random.randint(0, 20)
        a, b = (b, a) if random.random() < 0.5 else (a, b)
        signs, value = ("times", "×", "*", "multiplied by"), a * b
    else:
        b, value = random.randint(1, 12), random.randint(0, 12)
        a = b * value
        signs = ("divided by", "/")
    sign = pick(random, signs) if random.random() < 0.5 else signs[0]
    forms = read("chat")["sums"]
    slots = {"sum": f"{a} {sign} {b}", "a": a, "b": b, "sign": signs[0], "value": value}
    asked, answer = pick(random, forms["ask"]), pick(random, forms["answer"])
    return asked.format(**slots), answer.format(**slots)


def last_number(text: str) -> int | None:
    """The last whole number of an answer, which is its result."""
    found = re.findall(r"-?\d+", text)
    return int(found[-1]) if found else None


def word_problem(random: Random) -> Turn:
    """A sum told as a little story, with its answer."""
    name, other = random.sample(WORDS["girls"], 2)
    him = "her"
    if random.random() < 0.5:
        name, him = pick(random, WORDS["boys"]), "him"
    a, b = random.randint(2, 20), random.randint(2, 20)
    few, many = random.randint(2, 9), random.randint(2, 9)
    high, low = max(a, b) + 1, min(a, b)
    values = {
        "a": a,
        "b": b,
        "sum": a + b,
        "high": high,
        "low": low,
        "difference": high - low,
        "few": few,
        "many": many,
        "product": few * many,
    }
    slots = {slot: str(value) for slot, value in values.items()}
    slots |= {"name": name, "him": him, "other": other, "things": pick(random, WORDS["things"])}
    question, answer = pick(random, read("chat")["word_problems"])
    return fill(random, question, slots), fill(random, answer, slots)


def knowledge(random: Random) -> Turn:
    """A question that a child can answer."""
    facts = read("facts")
    shares = [fact.get("share", 1) for fact in facts]
    if random.random() < len(ORDERS) / (len(ORDERS) + sum(shares)):
        return pick(random, ORDERS)(random)
    (fact,) = random.choices(facts, shares)
    x, y = pick(random, fact["pairs"])
    slots = Slots(x=x, y=y)
    return fill(random, fact["ask"], slots), fill(random, fact["answer"], slots)


def neighbour(random: Random, kind: str, row: list[str], at: int) -> Turn:
    """What comes after or before the item of the row at this place."""
    if random.random() < 0.5:
        after = row[(at + 1) % len(row)]
        return f"What {kind} comes after {row[at]}?", f"{after} comes after {row[at]}."
    return f"What {kind} comes before {row[at]}?", f"{row[at - 1]} comes before {row[at]}."


def day_question(random: Random) -> Turn:
    """The day after or before another."""
    return neighbour(random, "day", WORDS["days"], random.randrange(7))


def month_question(random: Random) -> Turn:
    """The month after or before another."""
    return neighbour(random, "month", WORDS["months"], random.randrange(12))


def number_question(random: Random) -> Turn:
    """The number after or before another."""
    return neighbour(random, "number", [str(i) for i in range(101)], random.randint(1, 99))


def compare_question(random: Random) -> Turn:
    """The larger or smaller of two numbers."""
    a, b = random.sample(range(1, 100), 2)
    word, n = ("larger", max(a, b)) if random.random() < 0.5 else ("smaller", min(a, b))
    return f"Which number is {word}, {a} or {b}?", f"{n} is {word}."


def row_question(random: Random) -> Turn:
    """The next number of a row with even steps."""
    a, step = random.randint(1, 20), random.randint(1, 10)
    row = ", ".join(str(a + step * i) for i in range(4))
    return f"Which number comes next: {row}?", f"The next number is {a + 4 * step}."


def spelling_question(random: Random) -> Turn:
    """A number as a word, or back."""
    i = random.randrange(21)
    word = WORDS["numbers"][i]
    if random.random() < 0.5:
        return f"Write {i} as a word.", f"{i} is {word}."
    return f"Write {word} as a number.", f"{word.capitalize()} is {i}."


def parity_question(random: Random) -> Turn:
    """Whether a number is even."""
    n = random.randint(0, 99)
    return f"Is {n} even or odd?", f"{n} is {'odd' if n % 2 else 'even'}."


ORDERS = (
    day_question,
    month_question,
    number_question,
    compare_question,
    row_question,
    spelling_question,
    parity_question,
)


def small_talk(random: Random) -> Turn:
    """A turn of small talk."""
    texts = read("chat")
    slots = Story(random)
    slots.choose(texts["choose"])
    slots.slots["riddle"] = pick_riddle(random)[0]
    question, answer = (fill(random, text, slots.slots) for text in pick(random, texts["talk"]))
    return (question.lower() if random.random() < 0.1 else question), answer


def pick_riddle(random: Random) -> Turn:
    """A riddle with its answer."""
    return pick(random, read("riddles")["choose"]["riddle, answer"])


def riddle_turns(random: Random) -> list[Turn]:
    """A riddle, and its answer, often in the next turn."""
    question, answer = pick_riddle(random)
    if random.random() < 0.5:
        return [(question, f"It is {answer}.")]
    asks = pick(random, ("Tell me a riddle.", "Do you know a riddle?", "Give me a riddle."))
    gives_up = pick(random, ("I don't know.", "What is it?", "I give up.", "Tell me the answer."))
    return [(asks, question), (gives_up, f"It is {answer}.")]
