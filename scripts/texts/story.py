"""What a story is made of, and openings that all kinds of stories share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from scripts.texts.grammar import Slots, expand, fill, pick, with_article
from scripts.texts.people import Person
from scripts.texts.words import WORDS, read


@dataclass
class Story:
    """A story under construction. topics: what it can be said to be about ('a brave fox'). facts:
    questions about it with their answers."""

    random: Random
    slots: Slots = field(default_factory=Slots)
    paragraphs: list[str] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)

    def add(self, *templates: str) -> None:
        """A paragraph: of each template its text."""
        texts = [fill(self.random, template, self.slots) for template in templates if template]
        if text := " ".join(text for text in texts if text):
            self.paragraphs.append(text)

    def one(self, templates: Sequence[str]) -> None:
        """A paragraph by one of the templates."""
        self.add(pick(self.random, templates))

    def maybe(self, chance: float, templates: Sequence[str]) -> None:
        """Perhaps a paragraph by one of the templates."""
        if self.random.random() < chance:
            self.one(templates)

    def choose(self, lists: Mapping[str, str | Sequence[Any]]) -> None:
        """Gives slots values. lists: slot -> values, or the name of a list of words; or several
        slots, with commas -> rows of values."""
        for names, values in lists.items():
            found = pick(self.random, WORDS[values] if isinstance(values, str) else values)
            if "," in names:
                self.slots.update(zip(names.split(", "), found, strict=True))
            else:
                self.slots[names] = found

    def cast(self, prefix: str, person: Person) -> None:
        """Gives the character's slots; A's pronouns also without a prefix."""
        self.slots |= person.slots(prefix)
        if prefix == "A":
            for word in ("he", "him", "his", "He", "His"):
                self.slots[word] = self.slots[f"A{word}"]
            plural = ("we", "us", "our") if person.gender == "i" else ("they", "them", "their")
            self.slots.update(zip(("they", "them", "their"), plural, strict=True))
            self.slots["a_hero"] = with_article(f"{person.trait} {person.noun}")
            self.slots["a_noun"] = with_article(person.noun)
        else:
            a, other = self.slots["A"], self.slots[prefix]
            self.slots[f"A{prefix}"] = f"{other} and I" if a == "I" else f"{a} and {other}"

    def end(self, topics: Sequence[str], asks: Sequence[Sequence[str]]) -> None:
        """Adds topics, and questions with their answers, by templates."""
        self.topics += [expand(self.random, topic, self.slots) for topic in topics]
        for question, answer in asks:
            asked = fill(self.random, question, self.slots)
            self.facts.append((asked, fill(self.random, answer, self.slots)))

    @property
    def text(self) -> str:
        return "\n\n".join(self.paragraphs)


def set_weather(story: Story) -> None:
    """Gives the slots of a day."""
    story.choose({"time": "times", "weather": "weather"})


def introduce(story: Story, hero: Person, home: str) -> None:
    """The first paragraph: who and where. home: 'a small house by the sea'."""
    openings = read("openings")
    on = home.startswith(("a farm", "a small farm", "a small island"))
    story.slots |= {"home": home, "in_home": f"{'on' if on else 'in'} {home}"}
    set_weather(story)
    if hero.gender == "i":
        story.one(openings["teller"])
        return
    story.one(openings["hero"])
    if story.random.random() < 0.5:
        describe(story)


def describe(story: Story) -> None:
    """One or two sentences about the hero's ways and home, at the end of the first paragraph."""
    random, openings = story.random, read("openings")
    aside = Story(random, Slots(story.slots))
    aside.choose(openings["choose"])
    for one, other in (("like", "dislike"), ("flower", "flower2")):
        while aside.slots[one] == aside.slots[other]:
            aside.choose({other: openings["choose"][other]})
    for template in random.sample(openings["habits"], pick(random, (1, 1, 2))):
        aside.add(template)
    story.paragraphs[-1] = " ".join([story.paragraphs[-1], *aside.paragraphs])


def titled(story: Story) -> str:
    """The story's text under a title."""
    topic = pick(story.random, story.topics)
    title = pick(story.random, (topic, topic, f"the story of {topic}", f"about {topic}"))
    return f"{title[:1].upper()}{title[1:]}\n\n{story.text}"
