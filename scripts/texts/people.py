"""Characters of the stories and the words that refer to them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from scripts.texts import words
from scripts.texts.grammar import pick

PRONOUNS = {
    "f": ("she", "her", "her", "herself"),
    "m": ("he", "him", "his", "himself"),
    "i": ("I", "me", "my", "myself"),
}


SUPERLATIVES = {
    "brave": "bravest",
    "kind": "kindest",
    "clever": "cleverest",
    "shy": "shyest",
    "quiet": "quietest",
    "lively": "liveliest",
    "gentle": "gentlest",
    "bold": "boldest",
    "friendly": "friendliest",
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
        """Slots A (the name), Athe, Anoun, Ahe, Ahim, Ahis, Aself, Asaid, Aasked, Acried, Acall."""
        he, him, his, himself = PRONOUNS[self.gender]
        teller = self.gender == "i"
        subject = "I" if teller else self.name
        said = {
            verb: f"I {verb}" if teller else f"{verb} {self.name}"
            for verb in ("said", "asked", "cried", "answered", "whispered", "thought")
        }
        return {
            prefix: subject,
            f"{prefix}obj": "me" if teller else self.name,
            f"{prefix}poss": "my" if teller else f"{self.name}'s",
            f"{prefix}the": "I" if teller else f"the {self.noun}",
            f"{prefix}noun": self.noun,
            f"{prefix}trait": self.trait,
            f"{prefix}he": he,
            f"{prefix}He": he.capitalize(),
            f"{prefix}His": his.capitalize(),
            f"{prefix}most": SUPERLATIVES.get(self.trait, f"most {self.trait}"),
            f"{prefix}him": him,
            f"{prefix}his": his,
            f"{prefix}self": himself,
            f"{prefix}call": self.name,
            **{f"{prefix}{verb}": text for verb, text in said.items()},
        }


def child(random: Random, teller: bool = False, gender: str = "") -> Person:
    """A girl or a boy, now and then one of fairy tales."""
    gender = gender or ("f" if random.random() < 0.5 else "m")
    name = pick(random, words.GIRLS if gender == "f" else words.BOYS)
    noun = "girl" if gender == "f" else "boy"
    if not teller and random.random() < 0.2:
        noun = pick(random, words.TALE_GIRLS if gender == "f" else words.TALE_BOYS)
    return Person(name, noun, "i" if teller else gender, pick(random, words.YOUNG_TRAITS))


def animal(random: Random, not_noun: str = "", named: bool = True) -> Person:
    """An animal that speaks, with a name or without."""
    noun = pick(random, words.ANIMALS)
    while noun == not_noun:
        noun = pick(random, words.ANIMALS)
    gender = "m" if random.random() < 0.5 else "f"
    if noun in ("hen", "goose", "ladybird"):
        gender = "f"
    name = pick(random, words.PET_NAMES) if named else f"the {noun}"
    return Person(name, noun, gender, pick(random, words.YOUNG_TRAITS), True)


def grown_up(random: Random, named: bool = True) -> Person:
    """A grown-up with a trade: 'Rosa' or 'the old baker'."""
    gender = "f" if random.random() < 0.5 else "m"
    trade = pick(random, words.WORKERS)
    if trade in ("fisherman", "postman"):
        gender = "m"
    name = pick(random, words.GIRLS if gender == "f" else words.BOYS)
    return Person(
        name if named else f"the {trade}", trade, gender, pick(random, words.YOUNG_TRAITS)
    )


def other_than(random: Random, make, *known: Person) -> Person:
    """A character by make(random) whose name and noun are not those of the known ones."""
    while True:
        found = make(random)
        same = any(found.name == p.name or found.noun == p.noun for p in known if p.is_animal)
        if not same and all(found.name not in (p.name, f"the {p.noun}") for p in known):
            return found


def family(random: Random, gender: str = "") -> tuple[str, str]:
    """(a relative, its gender): ('grandmother', 'f')."""
    pairs = [
        ("grandmother", "f"),
        ("grandfather", "m"),
        ("mother", "f"),
        ("father", "m"),
        ("aunt", "f"),
        ("uncle", "m"),
        ("sister", "f"),
        ("brother", "m"),
    ]
    return pick(random, [p for p in pairs if not gender or p[1] == gender])


def relative(random: Random, of: Person, prefix: str = "R") -> dict[str, str]:
    """Slots of a relative of the character: R is 'his grandmother'."""
    noun, gender = family(random)
    his = PRONOUNS[of.gender][2]
    he, him, her, herself = PRONOUNS[gender]
    return {
        prefix: f"{his} {noun}",
        f"{prefix}noun": noun,
        f"{prefix}he": he,
        f"{prefix}him": him,
        f"{prefix}his": her,
        f"{prefix}self": herself,
    }
