"""More short stories: mysteries, fairy tales, seasons, nights."""

from __future__ import annotations

from random import Random

from scripts.texts import words
from scripts.texts.grammar import pick, with_article
from scripts.texts.people import Person, animal, child, grown_up, other_than, relative
from scripts.texts.plots import add_friend, begin
from scripts.texts.story import Story

CLUES = [
    ("crumbs on the carpet", "crumbs"),
    ("a black feather on the windowsill", "feather"),
    ("small muddy footprints on the floor", "prints"),
    ("a grey hair on the chair", "hair"),
    ("a wet trail that led to the cellar", "trail"),
    ("a torn piece of blue cloth on a nail", "cloth"),
]
CULPRITS = {
    "crumbs": ("mouse", "had five tiny children and nothing to give them"),
    "feather": ("crow", "had wanted it for a new nest"),
    "prints": ("hedgehog", "had wanted something nice for the long winter"),
    "hair": ("cat", "had hidden it as a toy for her kittens"),
    "trail": ("otter", "had only wanted to play with it in the water"),
    "cloth": ("raven", "had wanted to give it to a lonely scarecrow"),
}


def mystery(random: Random) -> Story:
    """Something is gone; a clue leads to who has it, and why."""
    story, hero = begin(random, animals=0.15, teller=0.15)
    s = story.slots
    add_friend(story, hero)
    clue, key = pick(random, CLUES)
    s["clue"], (s["culprit"], s["why"]) = clue, CULPRITS[key]
    s["thing"] = thing = pick(
        random,
        [
            "silver spoon",
            "golden button",
            "wool sock",
            "red ribbon",
            "cheese",
            "cake",
            "little bell",
            "glass marble",
            "knitted hat",
            "shiny key",
        ],
    )
    s["a_thing"] = "a cheese" if thing == "cheese" else with_article(thing)
    s["first"] = pick(
        random,
        ["wind", "postman", "neighbour", "milkman", "little brother of {B}".replace("{B}", s["B"])],
    )
    story.one(
        'One {time}, the {thing} of {K} was gone. The evening before, it had still been on the table. "Somebody must have taken it," said {B}. "But who?"',
        '"Where is my {thing}?" cried {K} one {time}. {AB} looked everywhere, in the cupboards and under the beds, but it was not there.',
    )
    story.one(
        '"We need clues," {Asaid}, and took a magnifying glass out of the drawer. First {they} thought of the {first}. But the {first} had not been in the house at all.',
        '"A good detective looks first and thinks afterwards," {Asaid}. {They} looked at the door: it was locked. {They} looked at the window: it was open, just a little.',
    )
    story.one(
        'Then {B} found something: {clue}. "Aha!" {Asaid}. "Now I know whom we are looking for."',
        'And there, near the table, {A} saw it: {clue}. {He} showed it to {B}. "Do you think what I think?" {he} asked. {B} nodded.',
    )
    story.one(
        "That night {they} hid behind the curtain and waited. The clock struck ten, then eleven. At last there was a soft noise, and in came the {culprit}.",
        "Quietly {they} followed the trail, across the yard and behind the shed. And there {they} found the {thing}, and beside it sat the {culprit}.",
    )
    s.update(zip(("Chis", "CHe"), pick(random, (("his", "He"), ("her", "She"))), strict=True))
    story.one(
        '"Please don\'t be angry," said the {culprit}. It turned out that the thief {why}. {AB} looked at each other. "We will find something better for you," {Asaid}, and that is what {they} did.',
        'The {culprit} hung {Chis} head. {CHe} {why}. "You could simply have asked," said {B}. "Next time I will," said the {culprit}.',
    )
    story.one(
        "{K} got the {thing} back, and the case was closed.",
        '"Case solved," {Asaid}, and wrote it down in a little notebook.',
        "After that, whenever something was missing, people came to {Aobj} and {B}."
        if hero.gender != "i"
        else "After that, whenever something was missing, people came to us.",
    )
    story.topics += [
        "a mystery",
        "a detective",
        f"two detectives, {s['both']}",
        "a thief",
        f"a missing {thing}",
    ]
    story.ask("What was missing?", "The {thing} was missing.")
    story.ask("Who had taken it?", "The {culprit} had taken it.")
    story.ask("What clue did they find?", "They found {clue}.")
    return story


def three_tasks(random: Random) -> Story:
    """A fairy tale: a ruler, a task, and a simple person's wit."""
    story = Story(random)
    s = story.slots
    hero = (
        child(random)
        if random.random() < 0.6
        else Person((g := grown_up(random)).name, f"young {g.noun}", g.gender, g.trait)
    )
    story.cast("A", hero)
    ruler, rhe, rhis = pick(
        random,
        [
            ("king", "he", "his"),
            ("queen", "she", "her"),
            ("prince", "he", "his"),
            ("princess", "she", "her"),
            ("duke", "he", "his"),
            ("old wizard", "he", "his"),
        ],
    )
    s |= {
        "ruler": ruler,
        "a_ruler": with_article(ruler),
        "rhe": rhe,
        "rHe": rhe.capitalize(),
        "rhis": rhis,
        "rhim": "him" if rhe == "he" else "her",
    }
    task, tried, solved = pick(
        random,
        [
            (
                "bring me something that fills this whole hall and weighs nothing",
                "One brought feathers, another brought smoke, but nothing was right",
                '{A} took a candle from {his} pocket and lit it. "Light," {he} said. It filled the hall to the last corner',
            ),
            (
                "tell me how many stars there are in the sky",
                "The wise men counted for seven nights and began to quarrel",
                '"As many as there are hairs on your donkey," said {A}. "If you do not believe it, count them."',
            ),
            (
                "make me laugh",
                "One danced, another told jokes, a third stood on his head. The {ruler} only yawned",
                "{A} bowed so deeply that a frog jumped out of {his} cap and landed on the crown. First it was quiet. Then the {ruler} laughed until {rhis} stomach hurt",
            ),
            (
                "bring me the most precious thing in the land",
                "One brought gold, another brought pearls, and a third brought a white horse",
                '{A} put a piece of bread and a cup of water on the table. "Without these," {he} said, "all gold is worthless."',
            ),
            (
                "come to me neither by day nor by night, neither on foot nor on horseback",
                "Some came at noon and some at midnight, and all of them were sent home",
                "{A} came at dawn, riding on a goat, so that {his} feet touched the ground",
            ),
            (
                "bring me water in a sieve",
                "They tried it with wax, with cloth and with very fast legs. The water always ran out",
                "{A} waited until winter and brought a sieve full of ice",
            ),
            (
                "find out what I am thinking",
                'One said "of gold", another "of war", and each of them was wrong',
                '"You are thinking that I do not know it," said {A}, and nobody could say that it was not true',
            ),
        ],
    )
    s["trade"] = pick(random, words.WORKERS)
    s["land"] = pick(
        random,
        [
            "beyond the seven hills",
            "by the cold sea",
            "in the south",
            "behind the great forest",
            "where the river ends",
        ],
    )
    s["task"], s["wish"] = (
        task,
        pick(
            random,
            [
                "a garden with a fountain",
                "a cow for {his} mother",
                "a new roof for the school",
                "a ship of {his} own",
                "enough bread for the whole village",
                "nothing at all, only to go home",
                "three days of holiday for everyone",
            ],
        ).replace("{his}", s["his"]),
    )
    s.update(Task=task[0].upper() + task[1:])
    story.one(
        'In a land {land} ruled {a_ruler} who was [very rich and very bored|proud of {rhis} cleverness]. One day {rhe} said, "Whoever can solve my task shall have a wish. Here it is: {task}!"',
        'Once upon a time there was {a_ruler} who loved riddles more than gold. "{Task}!" {rhe} said to everyone who came to the castle. "Then you may wish for whatever you like."',
    )
    story.add(f"From everywhere people came to try. {tried}.")
    s.update(child="daughter" if hero.gender == "f" else "son")
    story.one(
        'At last there came {A}, the {child} of a poor {trade}. The guards laughed when they saw {his} patched coat. "Let {him} in," said the {ruler}.',
        'In a small village lived {A}, {a_hero}, whose father was a poor {trade}. "I will try it too," {he} said, and walked for two days to the castle.',
    )
    story.add(solved + ("" if solved.endswith(('"',)) else "."))
    story.one(
        'The {ruler} was silent for a while. Then {rhe} clapped {rhis} hands. "You have won," {rhe} said. "What do you wish for?" {A} wished for {wish}, and got it.',
        '"That is the answer!" cried the {ruler}, and stood up. "Nobody is as clever as you are. Make your wish!" {A} thought for a moment and wished for {wish}.',
    )
    story.one(
        "And if they have not died, they are still alive today.",
        "The {ruler} often sent for {Aobj} afterwards, when there was something difficult to decide.",
        "They still tell this story there, on long winter evenings.",
        "And everyone lived happily ever after.",
    )
    story.topics += [
        f"{s['a_ruler']}",
        f"{s['a_ruler']} and a task",
        "a fairy tale",
        f"a clever {hero.noun}",
        "a castle",
    ]
    story.ask("What was the task?", "The task was: {Task}.")
    story.ask("Who solved the task?", "{A} solved the task.")
    story.ask("What did {A} wish for?", "{A} wished for {wish}.")
    return story


def winter_store(random: Random) -> Story:
    """A fable of summer's work and winter's need."""
    story = Story(random)
    s = story.slots
    a = pick(random, ["cricket", "hare", "frog", "sparrow", "butterfly", "fox", "cuckoo"])
    b = pick(random, ["ant", "squirrel", "hamster", "mole", "mouse", "bee", "badger"])
    story.cast("A", Person(f"the {a}", a, pick(random, "fm"), "cheerful", True))
    story.cast("B", Person(f"the {b}", b, pick(random, "fm"), "careful", True))
    s["a_A"], s["a_B"] = with_article(a), with_article(b)
    s["stores"] = pick(
        random, ["nuts", "grains of wheat", "seeds", "dried berries", "beans", "acorns"]
    )
    s["plays"] = pick(
        random,
        ["sang", "danced", "played the fiddle", "slept in the sun", "told jokes to the flowers"],
    )
    s.update(A_A=s["a_A"], His="His" if s["Ahe"] == "he" else "Her")
    story.one(
        'All summer long {A} {plays}, while {B} carried {stores} into {Bhis} house, from morning till night. "Why do you work so hard?" asked {A}. "The sun is shining!" "Because it will not always shine," said {B}.',
        'It was a hot summer. {A_A} {plays} from morning till night. {His} neighbour, {a_B}, gathered {stores} and had no time for anything else. "Come and play!" called {A}. "When the cellar is full," said {B}.',
    )
    story.one(
        "Then autumn came, with wind and rain, and after it winter. Snow covered everything, and {A} found nothing to eat. Hungry and cold, {Ahe} knocked at the door of {B}.",
        "One morning the meadow was white. {A} looked for something to eat, and looked in vain. After three days {Ahe} was so hungry that {Ahe} went to {Bposs} house.",
    )
    end = random.randrange(3)
    story.add(
        [
            '"What did you do all summer?" asked {B}. {A} looked at {Ahis} feet. {B} thought for a while. Then {Bhe} opened the door wide. "Come in," {Bhe} said. "I have enough for two. But in spring you will help me." In spring {A} was up before the sun.',
            '{B} let {Ahim} in and gave {Ahim} a bowl of soup. The evenings were long and dark, and {B} was alone. "Could you make some music?" {Bhe} asked. So {A} earned {Ahis} supper, and never had {B} spent so merry a winter.',
            '"I worked, and you laughed at me," said {B}. "You are right," said {A}. "I was a fool." That was a good answer. {B} filled a sack with {stores} and put it into {Ahis} arms. "Next summer you will fill one for me," {Bhe} said.',
        ][end]
    )
    story.one(
        "Moral: think of winter while the sun is shining.",
        "Whoever can work should work, and whoever can share should share.",
        "Bread is needed in winter, but so is a song.",
        "",
    )
    story.paragraphs = [p for p in story.paragraphs if p]
    story.topics += [
        "a fable",
        "winter",
        "summer and winter",
        f"{s['a_A']} and {s['a_B']}",
        s["a_A"],
        s["a_B"],
        "work",
    ]
    story.ask("Who worked all summer?", "{B} worked all summer.")
    story.ask("What did {B} gather?", "{B} gathered {stores}.")
    story.ask("Who came to the door in winter?", "{A} came to the door in winter.")
    return story


def snowman(random: Random) -> Story:
    """Something made of snow or sand that cannot last."""
    story, hero = begin(random, animals=0.2, teller=0.15)
    s = story.slots
    s["maker"] = pick(random, ["snowman", "snow bear", "snow castle", "snow horse", "snow dragon"])
    s["nose"], s["hat"] = pick(
        random,
        [
            ("a carrot", "an old pot"),
            ("a pine cone", "a bucket"),
            ("a red pepper", "a straw hat"),
            ("a potato", "a basket"),
        ],
    )
    s["sname"] = pick(
        random, ["Mister Frost", "Flake", "Captain Cold", "Snowball", "Old White", "Sir Icicle"]
    )
    s.update(a_maker=with_article(s["maker"]))
    story.one(
        "One winter morning, everything was white. {A} ran out without breakfast and began to build {a_maker}. {He} rolled one ball, then a second, then a third. It got {nose} for a nose and {hat} for a hat.",
        "At last it had snowed! {A} worked all morning, until {a_maker} stood in front of the house, with {nose} as a nose and {hat} on its head.",
    )
    story.one(
        '"You shall be called {sname}," {Asaid}. Every day after school {he} told {sname} what had happened, and {sname} listened. Nobody can listen as well as {a_maker}.',
        "{A} named it {sname}. In the evening {he} brought it a scarf, so that it would not be cold. {K} smiled and said nothing.",
    )
    story.one(
        'But in March the sun grew warm. {sname} became thinner every day. "Can\'t we put it in the cellar?" {Aasked}. "It would be dark there, and lonely," said {K}.',
        "Then the wind turned. Water dripped from the roof, and {sname} began to lean to one side. {A} put snow on it with both hands, but it was no use.",
    )
    story.one(
        'One morning only {nose} and {hat} were lying in the grass. {A} wept a little. "It has not gone," said {K}. "It has become water, and the water goes into the stream, and to the sea, and up to the clouds. Next winter it will come back."',
        'When {A} came home from school, there was only a puddle. In the puddle one could see the sky. "Look," said {K}, "now it is wearing blue." And where the puddle had been, the first snowdrops came up.',
    )
    s["hat_n"] = s["hat"].split(" ", 1)[1]
    story.one(
        'And when the first flakes fell in December, {A} stood at the window and waved. "Welcome back, {sname}," {he} whispered.',
        "{A} kept the {hat_n} for the next winter.",
    )
    story.topics += [
        "winter",
        "snow",
        s["a_maker"],
        f"{s['a_noun']} and {s['a_maker']}",
        f"{s['a_maker']} called {s['sname']}",
    ]
    story.ask("What did {Acall} build?", "{Acall} built {a_maker}.")
    story.ask("What was the {maker} called?", "It was called {sname}.")
    story.ask("What was its nose made of?", "Its nose was {nose}.")
    return story


def bottle(random: Random) -> Story:
    """A message travels and finds an answer."""
    story, hero = begin(random, animals=0.25, teller=0.2)
    s = story.slots
    friend = other_than(random, child, hero)
    story.cast("B", friend)
    story.pair("B")
    s["both"] = f"{hero.name} and {friend.name}"
    s["carrier"], s["found"] = pick(
        random,
        [
            ("bottle", "washed up on the beach"),
            ("red balloon", "hanging in a bush"),
            ("paper boat", "caught in the reeds"),
            ("old book", "at the bottom of a box at the market"),
            ("tin box", "under the floor of the attic"),
        ],
    )
    s["a_carrier"] = with_article(s["carrier"])
    s["where"] = pick(
        random,
        [
            "an island with only twelve houses",
            "a lighthouse",
            "a town on the other side of the sea",
            "a ship that sails all year",
            "a farm at the foot of a volcano",
            "a village where it never snows",
        ],
    )
    s["asked"] = pick(
        random,
        [
            "What do you see from your window?",
            "Is there anyone out there?",
            "Will you be my friend?",
            "What is the best thing where you live?",
            "Do you have snow?",
        ],
    )
    story.one(
        'One {time}, {A} found {a_carrier} {found}. There was a note in it. "My name is {B}," it said. "I live in {where}. {asked}"',
        '{A} was looking for something quite different when {he} found {a_carrier}, {found}. Inside was a piece of paper with big letters: "Hello! I am {B}, and I live in {where}. {asked}"',
    )
    if s["where"].startswith(("an island", "a lighthouse", "a ship", "a farm")):
        story.paragraphs[-1] = (
            story.paragraphs[-1]
            .replace("I live in an island", "I live on an island")
            .replace("I live in a ship", "I live on a ship")
            .replace("I live in a farm", "I live on a farm")
        )
    story.one(
        "{A} read it three times. Then {he} sat down and wrote an answer. {He} wrote about the {kin} who snored, about the first strawberries, and about the hole in {his} left shoe. It became a very long letter.",
        '"May I answer?" {Aasked}. "You must," said {K}. "A question without an answer is a sad thing." So {A} took {his} best pen and wrote two whole pages.',
    )
    s.update(time2=pick(random, ["Tuesday", "Thursday", "cold evening", "sunny morning"]))
    story.one(
        'Weeks passed, and no answer came. "Perhaps the letter was lost," {Athought}. But one {time2} the postman brought an envelope with a strange stamp. In it was a dried flower, and a letter from {B}.',
        '{He} waited for a month, and then for another one. When {he} had almost stopped waiting, there was a letter with a strange stamp on the table. "Dear {Acall}," it began.',
    )
    s.update(A_has="I have" if hero.gender == "i" else f"{hero.name} has")
    story.one(
        "From then on they wrote to each other every month. And the summer after next, {B} stood at the door, with a suitcase in {Bhis} hand. They knew each other at once."
        if hero.gender != "i"
        else "From then on we wrote to each other every month. And the summer after next, {B} stood at the door, with a suitcase in {Bhis} hand. We knew each other at once.",
        "Today {A_has} a box full of letters. {B} has one too. If one put all the pages one behind the other, they would reach all the way from one house to the other.",
    )
    story.topics += [
        "a letter",
        "a message",
        f"a message in {s['a_carrier']}",
        f"{s['a_noun']} who found {s['a_carrier']}",
        "a pen friend",
    ]
    story.ask("What did {Acall} find?", "{Acall} found {a_carrier}.")
    story.ask("Who had written the note?", "{B} had written the note.")
    story.ask("What did the note ask?", "It asked: {asked}")
    return story


def different(random: Random) -> Story:
    """An animal that cannot do what all others of its kind can, and what that is good for."""
    story = Story(random)
    s = story.slots
    kind, cannot, group, can, trouble, saves = pick(
        random,
        [
            (
                "dragon",
                "breathe fire",
                "dragons",
                "blow soap bubbles",
                "One evening a baby dragon fell from the highest rock",
                "A thousand bubbles rose up, and the little one landed on them as softly as on a cloud",
            ),
            (
                "owl",
                "stay awake at night",
                "owls",
                "see everything by day",
                "One bright noon, when all the others were asleep, a fire broke out in the dry grass",
                "{A} saw the smoke at once and woke the whole forest, just in time",
            ),
            (
                "duck",
                "swim",
                "ducks",
                "run faster than a dog",
                "One day a fox crept up to the pond where the ducklings were sleeping on the bank",
                "{A} ran round and round until the fox was dizzy and fell into the water",
            ),
            (
                "elephant",
                "remember anything",
                "elephants",
                "make friends with everyone, again and again",
                "One summer a strange herd came to the river, and the two herds wanted to fight",
                "{A} had forgotten who belonged to which herd, said hello to everybody, and soon nobody knew any more why they were angry",
            ),
            (
                "lion",
                "roar",
                "lions",
                "hum very softly",
                "One night a cub could not sleep because of the thunder, and nobody could comfort it",
                "{A} lay down beside it and hummed, until the cub was asleep, and then the whole pride",
            ),
            (
                "hare",
                "run fast",
                "hares",
                "listen very well",
                "One winter all of them were lost in a snowstorm",
                "{A} heard the bells of the village, far away, and led them home, step by step",
            ),
            (
                "firefly",
                "glow",
                "fireflies",
                "fly without any light",
                "One night the bats came hunting for everything that shone",
                "{A} flew unseen from friend to friend and showed each one the way into the hollow tree",
            ),
            (
                "cat",
                "catch mice",
                "cats",
                "talk with mice",
                "One autumn the granary was nearly empty, and nobody could tell why",
                "{A} asked the mice politely, and they showed {Ahim} the hole in the wall through which the grain was trickling away",
            ),
            (
                "snail",
                "hide in its house",
                "snails",
                "look straight at the world",
                "One day a stone rolled down the hill towards the lettuce bed",
                "All the others had drawn in their heads. {A} was the only one who saw it coming, and called out",
            ),
            (
                "parrot",
                "repeat words",
                "parrots",
                "think of new ones",
                "One day the captain's ship was becalmed, and the sailors were close to tears",
                "{A} told them a story that nobody had ever heard, and it lasted until the wind came back",
            ),
        ],
    )
    hero = Person(pick(random, words.PET_NAMES), kind, pick(random, "fm"), "different", True)
    story.cast("A", hero)
    s |= {
        "kind": kind,
        "a_kind": with_article(kind),
        "cannot": cannot.replace("its", s["his"]),
        "group": group,
        "can": can,
    }
    story.one(
        "{A} was {a_kind}, but not like the others. All {group} could {cannot}. {A} could not.",
        'There was once {a_kind} named {A} who could not {cannot}. "What sort of {kind} are you?" asked the others.',
        "Everybody knows that {group} can {cannot}. Only {A}, the youngest of them, could not do it, as hard as {he} tried.",
    )
    story.one(
        '{He} practised every day, secretly, behind the big stone, but it was no use. What {he} could do was {can}. "And what is that good for?" laughed the others.',
        '"But I can {can}," said {A}. The others only shook their heads. "Nobody needs that," they said, and went away. {A} was often alone.',
    )
    panic = pick(random, ["were helpless", "cried out at the same time", "did not know what to do"])
    alone = kind in ("owl", "snail", "parrot", "cat")
    story.add(f"{trouble}." if alone else f"{trouble}. All the {{group}} {panic}.")
    story.add(f"But {{A}} knew what to do. {saves}." if kind != "snail" else f"{saves}.")
    story.one(
        'After that nobody laughed at {Aobj} any more. "It is good that you are as you are," said the oldest of the {group}.',
        '"How good that you are different," they said to {him}. And {A} was happy, quite as {he} was.',
        "From that day on, the young {group} all wanted to learn to {can}, and {A} became their teacher.",
    )
    story.topics += [
        s["a_kind"],
        f"{s['a_kind']} who could not {s['cannot']}",
        "being different",
        f"{s['a_kind']} named {hero.name}",
    ]
    story.ask("What could {A} not do?", "{A} could not {cannot}.")
    story.ask("What could {A} do?", "{A} could {can}.")
    story.ask("What kind of animal was {A}?", "{A} was {a_kind}.")
    return story


def lost_in_town(random: Random) -> Story:
    """A child is lost, keeps calm, and is found."""
    story, hero = begin(random, animals=0.0, teller=0.2)
    s = story.slots
    s["place"], s["point"], s["helper"] = pick(
        random,
        [
            ("market", "the fountain with the stone fish", "greengrocer"),
            ("railway station", "the big clock", "conductor"),
            ("zoo", "the cage of the monkeys", "keeper"),
            ("fair", "the merry-go-round", "balloon seller"),
            ("museum", "the skeleton of the whale", "attendant"),
            ("harbour", "the yellow crane", "fisherman"),
            ("department store", "the moving staircase", "saleswoman"),
            ("park", "the bridge over the pond", "gardener"),
        ],
    )
    s["saw"] = pick(
        random,
        [
            "a man with a dancing dog",
            "a shop window full of toys",
            "a parrot that could speak",
            "a woman who painted faces",
            "a brass band",
            "a tower of sweets",
            "a white rabbit in a basket",
        ],
    )
    s["sign"] = pick(
        random,
        [
            "a green hat with a feather",
            "a red umbrella",
            "a coat with big yellow buttons",
            "a blue scarf",
            "a limp in the left leg",
            "very curly hair",
        ],
    )
    s["a_helper"] = with_article(s["helper"])
    s["A_helper"] = s["a_helper"].capitalize()
    s["phe"] = "she" if s["helper"] == "saleswoman" else "he"
    story.one(
        "One {time}, {A} went to the {place} with {K}. There was so much to see! {A} stopped to look at {saw}, only for a moment. When {he} turned round, {K} was gone.",
        "The {place} was full of people. {A} held on to the hand of {K}. But then {he} saw {saw} and let go. A minute later {he} was all alone among strange legs and bags.",
    )
    story.one(
        '{Aposs} heart beat fast, and tears came to {his} eyes. {He} wanted to run, but where to? Then {he} remembered what {K} had said: "If you ever get lost, stay at {point}. I will find you there."',
        'First {A} wanted to cry. Then {he} thought, "If I run around, and {Khe} runs around, we will never meet." So {he} went to {point} and stayed there.',
    )
    s.update(KHe=s["Khe"].capitalize())
    story.one(
        '{A_helper} noticed {him}. "Are you lost?" {phe} asked. "No," {Asaid}. "I know where I am. But I do not know where my {kin} is. {KHe} has {sign}." The {helper} laughed and lifted {him} up, so that {he} could see over all the heads.',
        '"Whom are you waiting for?" asked {a_helper}. "My {kin}," {Asaid}. "{KHe} has {sign}." "Then I will wait with you," said the {helper}, and gave {him} an apple.',
    )
    story.one(
        'And there it was, far off in the crowd: {sign}! "Here I am!" {Acried}, with all {his} might. {K} came running and pressed {him} so tightly that {he} could hardly breathe.',
        'It was not long before {K} came round the corner, out of breath and quite pale. "There you are," {Khe} said, and for a while nothing else.',
    )
    story.one(
        "On the way home {they} held hands, and neither of {them} let go, not even for {saw}.",
        '"You did everything right," said {K}. "I was a little afraid," {Asaid}. "So was I," said {K}.',
    )
    story.topics += [
        "getting lost",
        f"{s['a_noun']} who got lost",
        f"a day at the {s['place']}",
        f"the {s['place']}",
    ]
    story.ask("Where did {Acall} get lost?", "{Acall} got lost at the {place}.")
    story.ask("Where did {Acall} wait?", "{Acall} waited at {point}.")
    story.ask("What did {Acall} look at?", "{Acall} looked at {saw}.")
    return story


def rivals(random: Random) -> Story:
    """Two who cannot stand each other must work together."""
    story = Story(random)
    s = story.slots
    make = animal if random.random() < 0.6 else child
    a = make(random)
    b = other_than(random, make, a)
    story.cast("A", a)
    story.cast("B", b)
    story.pair("B")
    s["a_B"] = with_article(b.noun)
    s["side"] = pick(
        random,
        [
            "opposite sides of the river",
            "the same street, in houses that stood face to face",
            "two hills that looked at each other",
            "the same tree, one above and one below",
            "both ends of a long bridge",
        ],
    )
    if not a.is_animal and "tree" in s["side"]:
        s["side"] = "the same house, one above and one below"
    s["reason"] = pick(
        random,
        [
            "a stolen pear",
            "a word that nobody remembered",
            "who had the louder voice",
            "a fence that was one foot too far to the left",
            "a borrowed ladder",
            "whose garden was more beautiful",
        ],
    )
    story.one(
        '{A} and {B} lived on {side}, and they could not stand each other. It had begun with {reason}. If {A} said "good morning", {B} said that it was evening.',
        "Nobody knew exactly why {A} and {B} were enemies. Some said that it was because of {reason}. They lived on {side}, and each of them looked the other way when they met.",
    )
    if "the same" in s["side"]:
        story.paragraphs[-1] = (
            story.paragraphs[-1]
            .replace("lived on the same", "lived in the same")
            .replace("lived on the same tree", "lived in the same tree")
        )
    if "both ends" in s["side"]:
        story.paragraphs[-1] = story.paragraphs[-1].replace(
            "lived on both ends", "lived at both ends"
        )
    s["weather"] = pick(random, ["a flood", "a storm", "a fire", "a snowstorm"])
    story.add(
        {
            "a flood": "Then came the great rain. The river rose over its banks, and in the night a flood carried away fences and bridges. In the morning {A} was sitting on a roof, and who was sitting on the same roof? {B}.",
            "a storm": "Then came a storm such as nobody had ever seen. It tore off roofs and threw down trees. {A} fled into an old cellar. Somebody was already there: {B}.",
            "a fire": "One night a fire broke out. {A} ran to the well and pulled at the rope, but the bucket was too heavy for one. Then a second pair of arms took hold of it. They belonged to {B}.",
            "a snowstorm": "In January there was a snowstorm that lasted for three days. {A} still had wood, but nothing to eat. {B} still had food, but no wood.",
        }[s["weather"]]
    )
    story.one(
        'For a long time neither of them spoke. "If we do nothing, it will end badly for both of us," said {A} at last. "For once you are right," said {B}.',
        'They looked at each other. "We can go on quarrelling tomorrow," said {B}. "Today we need each other."',
    )
    story.add(
        {
            "a flood": "So they broke off a few boards, {A} tied them together and {B} made an oar. On their raft they rowed from roof to roof and saved [an old goat|three hens|a whole family of mice] and each other.",
            "a storm": "So they piled stones against the door, {A} from the left and {B} from the right, and held it shut together, with their backs, all night long.",
            "a fire": "So {A} pulled and {B} poured, bucket after bucket, until the last spark was out. Their faces were so black that they could hardly be told apart.",
            "a snowstorm": "So they dug a path from door to door, {A} from one end and {B} from the other. When they met in the middle, they cooked a soup together, and it was the best soup of their lives.",
        }[s["weather"]]
    )
    story.one(
        'When it was over, they sat down side by side. "Why were we enemies, really?" asked {A}. {B} thought hard. "I have forgotten," {Bhe} said, and they both began to laugh.',
        'The next morning {B} said "good morning" first. "Yes," said {A}. "It is one."',
        "They still quarrel today, but only for fun, and only after breakfast, which they have together.",
    )
    story.topics += [
        "two enemies",
        "a quarrel",
        s["weather"],
        f"two neighbours, {a.name} and {b.name}",
        f"{s['a_noun']} and {s['a_B']}",
    ]
    story.ask("Who could not stand each other?", "{A} and {B} could not stand each other.")
    s.update(Weather=s["weather"].capitalize())
    story.ask("What brought them together?", "{Weather} brought them together.")
    return story


def night(random: Random) -> Story:
    """A bedtime story: everything goes to sleep, one after the other."""
    story, hero = begin(random, animals=0.5, teller=0.0, plain=False)
    s = story.slots
    s["a_hero"] = with_article(
        f"{pick(random, ['little', 'small', 'sleepy', 'wide-awake'])} {hero.noun}"
    )
    s["ask"] = pick(
        random,
        [
            "where the sun goes at night",
            "who puts out the stars in the morning",
            "whether the moon ever sleeps",
            "what the dark is made of",
            "where dreams come from",
        ],
    )
    s["answer"] = {
        "where the sun goes at night": "It goes to the other side of the world, to wake the children there",
        "who puts out the stars in the morning": "Nobody does. The day is only so bright that we cannot see them any more",
        "whether the moon ever sleeps": "Once a month it draws the curtain quite shut, and then it sleeps",
        "what the dark is made of": "Of all the shadows of the day, which have lain down to rest",
        "where dreams come from": "From everything that you have seen by day and not yet thought to the end",
    }[s["ask"]]
    first, second, third = random.sample(
        [
            "a hedgehog, who was rolling himself up into a ball",
            "an old horse, who slept standing",
            "a row of hens on their perch",
            "a cat, who was just getting up",
            "the river, which murmured in its sleep",
            "a bat, who wished {him} a good morning",
            "the mill, whose wheel stood still",
            "two swans with their heads under their wings",
            "an owl, who was having breakfast",
            "a snail, who had closed her door",
        ],
        3,
    )
    s |= {
        "one": first.replace("{him}", s["him"]),
        "two": second.replace("{him}", s["him"]),
        "three": third.replace("{him}", s["him"]),
    }
    story.one(
        "It was late, and {A}, {a_hero}, could not sleep. {He} wanted to know {ask}.",
        '"Go to sleep now," said {K}. But {A}, {a_hero}, had a question. {He} wanted to know {ask}. So {he} climbed out of bed and went out into the night.',
        'Every evening {A} wanted to know {ask}, and every evening {K} said, "I will tell you tomorrow." {A} was {a_hero}, and one night {he} did not want to wait any longer.',
    )
    story.add(
        pick(
            random,
            ["[First|At the garden gate] {he} met {one}.", "Under the trees {he} met {one}."],
        ),
        '"Do you know {ask}?" {he} asked. "[I never thought about it|I am too tired to think|No]," was the answer. "[Good night|Sleep well]!"',
    )
    story.add(
        "Then {he} came to {two}. {A} tiptoed past, so as not to wake anybody.",
        "[And by the water|Behind the hill] there was {three}. [Everything was quiet|Even the wind had lain down].",
    )
    story.add(
        "At last {A} was so tired that {he} sat down in the grass. There {K} found {him} and wrapped {him} in a blanket.",
        '"Do you want to know it now?" {Khe} asked. "{answer}."',
    )
    story.one(
        "But {A} did not hear it any more. {He} was asleep. Good night.",
        '"Oh," said {A}, and yawned. The last thing {he} saw was a star. Then {he} slept until morning.',
        "{A} nodded. {His} eyes were already closed. And now you close yours too.",
    )
    story.topics += [
        "the night",
        "a bedtime story",
        "the moon and the stars",
        f"{s['a_noun']} who could not sleep",
        "going to sleep",
    ]
    story.ask("What did {Acall} want to know?", "{Acall} wanted to know {ask}.")
    story.ask("Who found {Acall}?", "{Aname_poss} {kin} found {Ahim}.")
    return story


PLOTS = [
    mystery,
    three_tasks,
    winter_store,
    snowman,
    bottle,
    different,
    lost_in_town,
    rivals,
    night,
]
