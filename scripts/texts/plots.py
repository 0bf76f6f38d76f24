"""Short stories, each by the file of its plot in templates/plots.

A plot's keys:

hero: how the first character is found: the chance of an animal and of one who tells the story
itself; introduced: whether the story begins with a paragraph about them (yes unless said).
cast: other characters by the prefix of their slots: `friend` (of the hero's kind), `child`,
`elder` (with a trade, without a name), `grown-up`, or an animal of a fable with nouns and a trait.
choose: values of slots (`Story.choose`).
story: paragraphs: `all` of the templates one after the other, or `one` of them; `teller` are those
of a hero who tells the story; chance, if, unless: when there is such a paragraph; swaps: steps of
a chain of trades, [what is given, who gets it, what comes back].
topics, asks: what the story is about; questions with answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from scripts.texts.grammar import expand, pick
from scripts.texts.people import Person, animal, child, grown_up, other_than, relative
from scripts.texts.story import Story, introduce, set_weather
from scripts.texts.words import FOLDER, WORDS, read

PLOTS = sorted(
    path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.glob("plots/*/*.yaml")
)


def tell(random: Random, name: str) -> Story:
    """A story by one of PLOTS."""
    plot, story = read(name), Story(random)
    story.choose(plot.get("choose", {}))
    cast = dict(plot.get("cast", {}))
    if "hero" in plot:
        hero = add_hero(story, **plot["hero"])
    else:
        hero = fable_animal(story, **cast.pop("A"))
        story.cast("A", hero)
        set_weather(story)
    known = [hero]
    for prefix, who in cast.items():
        known.append(find(story, who, known))
        story.cast(prefix, known[-1])
    for part in plot["story"]:
        add_part(story, part, is_teller=hero.gender == "i")
    story.end(plot["topics"], plot["asks"])
    return story


def add_hero(story: Story, animals: float, teller: float, introduced: bool = True) -> Person:
    """The first character, with a relative (K), introduced or not."""
    random, chance = story.random, story.random.random()
    hero = animal(random) if chance < animals else child(random, teller=chance > 1 - teller)
    story.cast("A", hero)
    story.slots |= relative(random, hero, "K")
    if introduced:
        introduce(story, hero, pick(random, WORDS["wild_homes" if hero.is_animal else "homes"]))
        story.end(
            [],
            [
                ("Where did {Acall} live?", "{Acall} lived {in_home}."),
                ("Who is the story about?", "The story is about {Acall}, {a_hero}."),
            ],
        )
    else:
        set_weather(story)
    story.topics += [story.slots["a_noun"], story.slots["a_hero"]]
    return hero


def find(story: Story, who: str | Mapping[str, Any], known: Sequence[Person]) -> Person:
    """A further character, unlike the known ones."""
    make = {
        "friend": animal if known[0].is_animal else child,
        "child": child,
        "grown-up": grown_up,
        "elder": lambda random: grown_up(random, named=False),
    }
    if isinstance(who, str):
        return other_than(story.random, make[who], *known)
    return other_than(story.random, lambda random: fable_animal(story, **who), *known)


def fable_animal(story: Story, trait: str, nouns: Sequence[str] = (), noun: str = "") -> Person:
    """An animal of a fable, 'the fox'. nouns: those it may be. noun: the one it is, with a name."""
    random = story.random
    of_any = animal(random, named=False)
    found = expand(random, noun, story.slots) if noun else pick(random, nouns or [of_any.noun])
    gender = "f" if found in ("hen", "goose") else of_any.gender
    name = pick(random, WORDS["pet_names"]) if noun else f"the {found}"
    return Person(name, found, gender, trait, True)


def add_part(story: Story, part: Mapping[str, Any], is_teller: bool) -> None:
    """The paragraphs of one part of a plot."""
    if "if" in part and not story.slots[part["if"]]:
        return
    if "unless" in part and story.slots[part["unless"]]:
        return
    if story.random.random() >= part.get("chance", 1):
        return
    if "swaps" in part:
        swap(story, part["swaps"], part["one"])
    elif is_teller and "teller" in part:
        story.one(part["teller"])
    elif "one" in part:
        story.one(part["one"])
    else:
        story.add(*part["all"])


def swap(story: Story, swaps: Sequence[Sequence[str]], templates: Sequence[str]) -> None:
    """A paragraph a trade, from the thing in the slot `start` until nobody wants what is left."""
    have, people = story.slots["start"], []
    while steps := [step for step in swaps if step[0] == have]:
        have, who, gets = pick(story.random, steps)
        people.append(other_than(story.random, lambda r: grown_up(r, named=False), *people))
        story.slots |= {"w": people[-1].noun, "who": who, "have": have, "gets": gets}
        story.one(templates)
        have = gets
