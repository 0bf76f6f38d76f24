"""Stories of a way: somebody wants something, meets obstacles and reaches the end.

What helps at an obstacle was there before: a thing that was given, an animal that was helped, or a
trait of the hero. So steps of a story depend on one another.
"""

from __future__ import annotations

import re
from random import Random
from typing import NamedTuple

from scripts.texts.grammar import pick, with_article
from scripts.texts.people import Person, animal, child, grown_up, other_than, relative
from scripts.texts.story import Story, introduce
from scripts.texts.words import WORDS, read

RIDDLE = "riddle"
"""The obstacle that is a story of its own."""


class Plan(NamedTuple):
    """steps: (obstacle, which kind of means helps: item, helper or trait). means: which it is."""

    steps: list[tuple[str, str]]
    means: dict[str, str]


def make_plan(random: Random, obstacles: list[str]) -> Plan:
    """One to three obstacles, each overcome by another kind of means."""
    count = pick(random, (1, 1, 2, 2, 2, 3))
    names = random.sample(obstacles, count)
    kinds = random.sample(["item", "helper", "trait"], count)
    steps = list(zip(names, kinds, strict=True))
    means = {
        kind: pick(random, list(read("obstacles")[name][kind]))
        for name, kind in steps
        if name != RIDDLE
    }
    return Plan(steps, means)


def make_hero(random: Random, trait: str, not_noun: str) -> Person:
    """A child, or now and then the teller or an animal with paws."""
    chance = random.random()
    if chance < 0.6:
        hero = child(random, teller=chance < 0.12)
    else:
        hero = animal(random)
        while hero.noun not in WORDS["pawed"] or hero.noun == not_noun:
            hero = animal(random)
    return Person(hero.name, hero.noun, hero.gender, trait, hero.is_animal)


def quest(random: Random) -> Story:
    """A story of a way to a far place."""
    story, texts = Story(random), read("quest")
    land = pick(random, list(texts["lands"].values()))
    goal = pick(random, list(read("goals").values()))
    plan = make_plan(random, land["obstacles"])
    trait = plan.means.get("trait") or pick(random, WORDS["young_traits"])
    hero = make_hero(random, trait, plan.means.get("helper", ""))
    cast_all(story, hero, plan, goal)
    story.slots["far"] = pick(random, land["far"])
    introduce(story, hero, pick(random, land["homes"]))
    if goal.get("at_peace", True):
        story.maybe(0.25, texts["company"])
    story.one(goal["begin"])
    if "item" in plan.means:
        story.one(texts["given"])
    else:
        story.maybe(0.4, texts["sets_out"])
    if "helper" in plan.means:
        meet_helper(story, hero)
    for number, (name, kind) in enumerate(plan.steps):
        if name == RIDDLE:
            meet_riddle(story)
        else:
            meet_obstacle(story, hero, name, kind, plan.means[kind], first=number == 0)
    story.one(goal["arrive"])
    story.one(goal["end"])
    add_moral(story, plan)
    if "helper" in plan.means and random.random() < 0.5:
        story.one(texts["helper_stays"])
    story.end([*goal["topics"], "{a_noun}", "{a_hero}", *place_topics(story)], goal["asks"])
    end(story, plan)
    return story


def place_topics(story: Story) -> list[str]:
    """What a story of a way to a far place is about, whatever its goal."""
    far = story.slots["far"]
    far_noun = re.sub(r"^the (?:top|far end) of ", "", far)
    noun = re.split(r" (?:of|at|under|above|behind|between|on|in|to|that|with) ", far_noun)[0]
    return [far, with_article(noun.removeprefix("the ")), "an adventure"]


def cast_all(story: Story, hero: Person, plan: Plan, goal: dict) -> None:
    """Gives the slots of the hero, a friend (F), a worker (W), relatives (K and X, who gives a
    thing and is not the one who is ill), and of all things."""
    random, texts = story.random, read("quest")
    helper, item = plan.means.get("helper", ""), plan.means.get("item", "")
    story.cast("A", hero)
    story.cast("F", other_than(random, animal, hero, Person("", helper, "m", "", True)))
    story.cast("W", other_than(random, lambda r: grown_up(r, named=False), hero))
    story.choose(texts["choose"])
    story.slots |= relative(random, hero, "K") | relative(random, hero, "X")
    while goal.get("relative_is_ill") and story.slots["Xnoun"] == story.slots["Knoun"]:
        story.slots |= relative(random, hero, "X")
    story.slots |= {
        "helper": helper,
        "thing": item,
        "friend": "friend" if hero.is_animal else "child",
    }
    if item in texts["names_of_things"]:
        story.slots["a_thing"] = texts["names_of_things"][item]


def meet_helper(story: Story, hero: Person) -> None:
    """An animal in trouble is helped and comes along."""
    texts = read("quest")
    is_small = story.slots["helper"] in texts["small_helpers"]
    troubles = [t for t in texts["troubles"] if not is_small or t["of_small"]]
    trouble = pick(story.random, troubles)
    story.slots |= {"state": trouble["state"], "deed": trouble["deed"]}
    story.add(*texts["meets_helper"])


def meet_obstacle(
    story: Story, hero: Person, name: str, kind: str, means: str, first: bool
) -> None:
    """An obstacle and how it is overcome. kind: of the means. first: the first one of the story."""
    obstacle, texts = read("obstacles")[name], read("quest")
    goes_on = "" if first or story.random.random() < 0.5 else pick(story.random, texts["goes_on"])
    meets, solution = (
        pick(story.random, obstacle["meets"]),
        pick(story.random, obstacle[kind][means]),
    )
    story.add(goes_on, meets, pick(story.random, texts["wonders"]), solution)
    if hero.is_animal:
        story.paragraphs[-1] = with_paws(story.paragraphs[-1])
    if kind == "item":
        story.end(
            [], [(f"What helped {{Acall}} {obstacle['ask']}?", "The {thing} helped {Acall}.")]
        )
    elif kind == "helper":
        story.end(
            [], [(f"Who helped {{Acall}} {obstacle['ask']}?", "The {helper} helped {Acall}.")]
        )


def meet_riddle(story: Story) -> None:
    """A keeper asks a riddle."""
    riddle = read("riddles")
    story.choose(riddle["choose"])
    for part in riddle["story"]:
        story.one(part)
    story.end([], riddle["asks"])


def with_paws(text: str) -> str:
    """The text with paws instead of hands."""
    for hand, paw in (("fingers", "paws"), ("hands", "paws"), ("hand ", "paw "), ("hand.", "paw.")):
        text = text.replace(f" {hand}", f" {paw}")
    return text


def add_moral(story: Story, plan: Plan) -> None:
    """Perhaps what is to be learned from what helped."""
    if story.random.random() < 0.4:
        texts = read("quest")
        moral = pick(
            story.random, texts["morals"][pick(story.random, list(plan.means) or ["trait"])]
        )
        story.add(pick(story.random, texts["moral_leads"]) + moral)


def end(story: Story, plan: Plan) -> None:
    """Questions that can be asked about any such story."""
    asks = [
        ("Who is the story about?", "The story is about {Acall}, {a_hero}."),
        ("Where did {Acall} live?", "{Acall} lived {in_home}."),
    ]
    if "helper" in plan.means:
        asks.append(("Which animal went with {Acall}?", "{A_helper} went with {Acall}."))
    if "item" in plan.means:
        asks.append(("What did {Acall} take along?", "{Acall} took along {a_thing}."))
    story.end(["{a_noun} and {a_helper}"] if "helper" in plan.means else [], asks)
