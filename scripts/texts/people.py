"""Characters of the stories and the words that refer to them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from scripts.texts.grammar import pick
from scripts.texts.words import WORDS, read

PRONOUNS = {
    "f": ("she", "her", "her", "herself"),
    "m": ("he", "him", "his", "himself"),
    "i": ("I", "me", "my", "myself"),
}


@dataclass(frozen=True)
class Person:
    """A character. gender: f, m, or i for a story's teller."""

    name: str
    noun: str
    gender: str
    trait: str
    is_animal: bool = False

    def slots(self, prefix: str) -> dict[str, str]:
        """Slots of the prefix A: A (the name, or I), Anoun, Ahe, Ahim, Ahis, Aself, Asaid, ..."""
        he, him, his, himself = PRONOUNS[self.gender]
        superlatives = read("superlatives")
        teller = self.gender == "i"
        subject = "I" if teller else self.name
        said = {
            verb: f"I {verb}" if teller else f"{verb} {self.name}"
            for verb in ("said", "asked", "cried", "thought")
        }
        return {
            prefix: subject,
            f"{prefix}obj": "me" if teller else self.name,
            f"{prefix}poss": "my" if teller else f"{self.name}'s",
            f"{prefix}noun": self.noun,
            f"{prefix}trait": self.trait,
            f"{prefix}he": he,
            f"{prefix}He": he.capitalize(),
            f"{prefix}His": his.capitalize(),
            f"{prefix}most": superlatives.get(self.trait, f"most {self.trait}"),
            f"{prefix}him": him,
            f"{prefix}his": his,
            f"{prefix}self": himself,
            f"{prefix}call": self.name,
            f"{prefix}child": "daughter" if self.gender == "f" else "son",
            **{f"{prefix}{verb}": text for verb, text in said.items()},
        }


def child(random: Random, teller: bool = False, gender: str = "") -> Person:
    """A girl or a boy, now and then one of fairy tales."""
    gender = gender or ("f" if random.random() < 0.5 else "m")
    name = pick(random, WORDS["girls"] if gender == "f" else WORDS["boys"])
    noun = "girl" if gender == "f" else "boy"
    if not teller and random.random() < 0.2:
        noun = pick(random, WORDS["tale_girls"] if gender == "f" else WORDS["tale_boys"])
    return Person(name, noun, "i" if teller else gender, pick(random, WORDS["young_traits"]))


def animal(random: Random, named: bool = True) -> Person:
    """An animal that speaks, with a name or without."""
    noun = pick(random, WORDS["animals"])
    gender = "m" if random.random() < 0.5 else "f"
    if noun in ("hen", "goose", "ladybird"):
        gender = "f"
    name = pick(random, WORDS["pet_names"]) if named else f"the {noun}"
    return Person(name, noun, gender, pick(random, WORDS["young_traits"]), True)


def grown_up(random: Random, named: bool = True) -> Person:
    """A grown-up with a trade: 'Rosa' or 'the old baker'."""
    gender = "f" if random.random() < 0.5 else "m"
    trade = pick(random, WORDS["workers"])
    if trade in ("fisherman", "postman"):
        gender = "m"
    name = pick(random, WORDS["girls"] if gender == "f" else WORDS["boys"])
    return Person(
        name if named else f"the {trade}", trade, gender, pick(random, WORDS["young_traits"])
    )


def other_than(random: Random, make, *known: Person) -> Person:
    """A character by make(random) whose name and noun are not those of the known ones."""
    while True:
        found = make(random)
        same = any(found.name == p.name or found.noun == p.noun for p in known if p.is_animal)
        if not same and all(found.name not in (p.name, f"the {p.noun}") for p in known):
            return found


def relative(random: Random, of: Person, prefix: str = "R") -> dict[str, str]:
    """Slots of a relative of the character: R is 'his grandmother'."""
    noun, gender = pick(random, read("relatives"))
    his = PRONOUNS[of.gender][2]
    he, him, her, herself = PRONOUNS[gender]
    return {
        prefix: f"{his} {noun}",
        f"{prefix}noun": noun,
        f"{prefix}he": he,
        f"{prefix}He": he.capitalize(),
        f"{prefix}him": him,
        f"{prefix}his": her,
        f"{prefix}self": herself,
    }
