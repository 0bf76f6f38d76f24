"""What a story is made of, and openings that all kinds of stories share."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from scripts.texts import words
from scripts.texts.grammar import fill, pick, with_article
from scripts.texts.people import Person


class Slots(dict[str, str]):
    """Values of slots. A slot that is missing and begins with a capital is that without, with one:
    {The_king} of the_king."""

    def __missing__(self, name: str) -> str:
        lower = name[:1].lower() + name[1:]
        if lower == name:
            raise KeyError(name)
        value = self[lower]
        return value[:1].upper() + value[1:]


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
        self.paragraphs.append(" ".join(text for text in texts if text))

    def one(self, *templates: str) -> None:
        """A paragraph by one of the templates."""
        self.add(pick(self.random, templates))

    def maybe(self, chance: float, *templates: str) -> None:
        """Perhaps a paragraph by one of the templates."""
        if self.random.random() < chance:
            self.one(*templates)

    def cast(self, prefix: str, person: Person) -> None:
        """Gives the character's slots; A's pronouns also without a prefix."""
        self.slots |= person.slots(prefix)
        if prefix == "A":
            he, him, his = (self.slots[f"A{w}"] for w in ("he", "him", "his"))
            self.slots |= {"he": he, "him": him, "his": his}
            self.slots |= {"He": he.capitalize(), "His": his.capitalize()}
            teller = person.gender == "i"
            plural = ("we", "us", "our") if teller else ("they", "them", "their")
            self.slots |= dict(zip(("they", "them", "their"), plural, strict=True))
            self.slots["They"] = plural[0].capitalize()
            self.slots["a_hero"] = with_article(f"{person.trait} {person.noun}")
            self.slots["a_noun"] = with_article(person.noun)

    def pair(self, other: str = "B") -> None:
        """The slot AB, the hero and the other together."""
        a, b = self.slots["A"], self.slots[other]
        self.slots[f"A{other}"] = f"{b} and I" if a == "I" else f"{a} and {b}"

    def ask(self, question: str, answer: str) -> None:
        """A question about the story, with its answer."""
        question, answer = (fill(self.random, text, self.slots) for text in (question, answer))
        self.facts.append((question, answer))

    @property
    def text(self) -> str:
        return "\n\n".join(self.paragraphs)


def introduce(story: Story, hero: Person, home: str) -> None:
    """The first paragraph: who and where. home: 'a small house by the sea'."""
    s, random = story.slots, story.random
    s["home"] = home
    s["time"] = pick(random, words.TIMES)
    s["weather"] = pick(random, words.WEATHER)
    s["a_weather"] = with_article(s["weather"])
    at = "on" if home.startswith(("a farm", "a small farm", "a small island")) else "in"
    s["in_home"] = f"{at} {home}"
    s["In_home"] = (
        s["in_home"].capitalize()
        if hero.name.islower()
        else s["in_home"][:1].upper() + s["in_home"][1:]
    )
    s["by_door"] = pick(random, ["in front of the door", "by the window", "on the doorstep"])
    s["His_name"] = s["His"]
    if hero.gender == "i":
        story.one(
            "When I was [six|seven|eight|nine|ten] years old, I lived {in_home}. Everybody said that I was [a very|quite a|a rather] {Atrait} child.",
            "My name is {Acall}. I live {in_home}, and this is the story of {a_weather} {time} that I shall never forget.",
            "I still remember that {time}. We lived {in_home} then, and I was known as the {Amost} child [of all|far and wide].",
            "Let me tell you what happened to me, {Acall}, one {time}. At that time I lived {in_home}.",
            "Dear diary, my name is {Acall}, and today I have a lot to tell. You know that I live {in_home}, where nothing ever happens. [But listen!|Well, today something did.]",
        )
        return
    story.one(
        "Once upon a time there was {a_hero} named {A}. {A} lived {in_home}.",
        "Once upon a time, {in_home}, there lived {a_hero} called {A}.",
        "There once was {a_hero} whose name was {A}. {He} lived {in_home} and [was liked by everybody|had many friends|knew everybody there].",
        "Long ago, {in_home}, lived {a_noun} named {A}. [Everybody|People] said that there was no {Anoun} as {Atrait} as {A}.",
        "{A} was {a_hero} who lived {in_home}.",
        "{A} lived {in_home}. {He} was {a_hero}, and [there was nothing {he} liked more than a good adventure|{he} was curious about everything in the world|every day {he} hoped that something would happen].",
        "{In_home} lived {a_hero}. {His} name was {A}.",
        "It was {a_weather} {time}. {A}, {a_hero}, who lived {in_home}, sat {by_door} and [looked at the sky|watched the clouds|thought of nothing at all].",
        "On {a_weather} {time}, {A} woke up [early|very early|with the first light]. {He} was {a_hero}, and {he} lived {in_home}.",
        "Not far from here, {in_home}, there lived {a_noun} named {A}, who was very {Atrait}.",
        "This is the story of {A}, {a_hero} who lived {in_home}.",
        "One {time}, something [strange|unusual|wonderful] happened to {A}. {He} was {a_hero} and lived {in_home}[, where nothing ever happened|].",
        "Many years ago, when [wishes still came true|the roads were still made of sand|animals still talked to people], {a_hero} named {A} lived {in_home}.",
        "{His_name} name was {A}, and {he} was the {Amost} {Anoun} you can imagine. {He} lived {in_home}.",
    )
    if random.random() < 0.5:
        describe(story)


HABITS = [
    "Every morning {he} ate {food} for breakfast[ and looked out of the window|, and every evening {he} counted the stars|].",
    "{He} collected {collect}, and [kept them in a box under the bed|knew each of them by name|showed them to everybody who came by].",
    "When {he} was thinking, {he} always [scratched {his} nose|hummed a tune|walked up and down|tugged at {his} ear|closed one eye].",
    "{He} always wore {a_colour} [scarf|cap|hat|coat], even in [summer|bed|the rain].",
    "{He} loved {like} and could not stand {dislike}.",
    "{His} favourite place was {place}, where [nobody could find {him}|it was always quiet|one could hear the wind].",
    "In spring the {flowers} bloomed there, and in winter the snow lay as high as the windowsill.",
    "Around the house grew {flowers} and {flowers2}, and an old {tree} stood in front of it.",
    "Next door lived an old {trade} who [talked to the clouds|snored so loudly that the windows shook|gave {food} to everyone who was hungry|had a wooden leg and a hundred stories].",
    "At night one could hear the {sound}.",
    "It was a place where [everybody knew everybody|the clocks went a little slower than elsewhere|the air smelled of {smell}|one could smell {smell} in every street].",
    "When {he} grew up, {he} wanted to be {a_trade}.",
    "{He} had [three brothers|two sisters|seven cousins|no brothers or sisters], and [there was always noise in the house|the house was never empty|it was never boring].",
    "{He} could [whistle|run|climb|sing|swim|dance] better than anyone else, but [counting|getting up early|waiting|telling jokes|keeping secrets] was hard for {him}.",
    "On the wall of {his} room hung a picture of {a_thing}, and {he} looked at it every night before {he} fell asleep.",
    "On Sundays there was {food}, and on Mondays there was what was left.",
    "{He} had once found {a_thing} in the {tree}, and since then {he} looked up at every tree.",
    "The days there began with the {sound} and ended with the smell of {smell}.",
    "{His} pockets were always full of {collect}.",
    "{He} knew every stone and every {tree} for miles around.",
]
COLLECT = words.listed("""stones, feathers, buttons, shells, stamps, leaves, keys, marbles, pine cones, corks, old coins,
bottle caps, ribbons, acorns, postcards, beetles made of paper, spoons, pebbles, matchboxes, chestnuts""")
LIKES = words.listed("""music, rain, cold mornings, long walks, warm bread, riddles, the smell of books, thunder, snow,
the sound of bells, puddles, good jokes, early mornings, fresh milk, moonlight, stories about pirates, silence, market days""")
PLACES = words.listed("""the roof, the attic, the big stone by the river, the lowest branch of the oak, the bench behind the shed,
the hollow under the hedge, the windowsill, the old boat, the haystack, the top of the hill, the bridge, the woodpile""")
SOUNDS = words.listed("""owls, bells, trains, frogs, waves, wind in the chimney, dogs, crickets, river, foxes, mill wheel,
church bell, nightingale, rain on the roof""")
SMELLS = words.listed("""fresh bread, hay, salt, apples, wood smoke, lavender, fish, coffee, rain, honey, pine trees, soap,
cinnamon, warm earth, roses, paint""")


def plural(noun: str) -> str:
    """'daisies' of 'daisy'."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("x", "s", "ch", "sh")) else f"{noun}s"


def describe(story: Story) -> None:
    """One or two sentences about the hero's ways and home, at the end of the first paragraph."""
    random, s = story.random, Slots(story.slots)
    like, dislike = random.sample(LIKES, 2)
    first, second = random.sample([f for f in words.FLOWERS if f != "lavender"], 2)
    s |= {
        "food": pick(random, words.FOODS),
        "collect": pick(random, COLLECT),
        "a_colour": with_article(pick(random, words.COLOURS)),
        "like": like,
        "dislike": dislike,
        "place": pick(random, PLACES),
        "flowers": plural(first),
        "flowers2": plural(second),
        "tree": pick(random, words.TREES),
        "trade": pick(random, words.WORKERS),
        "a_trade": with_article(pick(random, words.WORKERS)),
        "sound": pick(random, SOUNDS),
        "smell": pick(random, SMELLS),
        "a_thing": with_article(pick(random, words.TREASURES)),
    }
    for template in random.sample(HABITS, pick(random, (1, 1, 2))):
        story.paragraphs[-1] += " " + fill(random, template, s)


def titled(story: Story) -> str:
    """The story's text under a title."""
    topic = pick(story.random, story.topics)
    title = pick(story.random, (topic, topic, f"the story of {topic}", f"about {topic}"))
    return f"{title[:1].upper()}{title[1:]}\n\n{story.text}"
