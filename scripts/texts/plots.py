"""Short stories with a plot of their own: fables, quarrels, fears, lessons, days."""

from __future__ import annotations

from random import Random

from scripts.texts import words
from scripts.texts.grammar import pick, with_article
from scripts.texts.people import Person, animal, child, grown_up, other_than, relative
from scripts.texts.story import Story, introduce

HOMES = words.listed("""a small village, a quiet town, a house beside the river, a narrow street, a house with a blue door,
a green valley, a harbour town, a tall house, a little house at the end of the road, a sunny village, an old mill,
a cottage with a big garden, a small wooden house, a busy city, a village by the lake, a flat on the third floor""")
WILD_HOMES = words.listed("""a big forest, a green meadow, a hollow tree, a burrow under the roots, a quiet valley, a garden,
a wide field, a wood by the river, a cave in the hills, an old barn, a hedge beside the road""")


def begin(
    random: Random, trait: str = "", animals: float = 0.4, teller: float = 0.1, plain: bool = True
) -> tuple[Story, Person]:
    """A story with its hero introduced."""
    story, chance = Story(random), random.random()
    if chance < animals:
        hero = animal(random)
    else:
        hero = child(random, teller=chance > 1 - teller)
    if trait:
        hero = Person(hero.name, hero.noun, hero.gender, trait, hero.is_animal)
    story.cast("A", hero)
    story.slots |= relative(random, hero, "K")
    story.slots["kin"] = story.slots["Knoun"]
    story.slots["Aname_poss"] = f"{hero.name}'s"
    if plain:
        introduce(story, hero, pick(random, WILD_HOMES if hero.is_animal else HOMES))
        story.ask("Where did {Acall} live?", "{Acall} lived {in_home}.")
        story.ask("Who is the story about?", "The story is about {Acall}, {a_hero}.")
    else:
        s = story.slots
        s["time"], s["weather"] = pick(random, words.TIMES), pick(random, words.WEATHER)
        s["a_weather"] = with_article(s["weather"])
    story.topics += [with_article(hero.noun), with_article(f"{hero.trait} {hero.noun}")]
    return story, hero


def add_friend(story: Story, hero: Person, prefix: str = "B", *others: Person) -> Person:
    """A second character of the hero's kind."""
    make = animal if hero.is_animal else child
    friend = other_than(story.random, make, hero, *others)
    story.cast(prefix, friend)
    story.slots[f"a_{prefix}noun"] = with_article(friend.noun)
    story.slots[f"a_{prefix}hero"] = with_article(f"{friend.trait} {friend.noun}")
    story.pair(prefix)
    story.slots[f"{prefix}name_poss"] = f"{friend.name}'s"
    story.slots["both"] = f"{hero.name} and {friend.name}"
    return friend


def sharing(random: Random) -> Story:
    """Two friends want the same thing, and find out how both can have it."""
    story, hero = begin(random)
    s = story.slots
    add_friend(story, hero)
    s["treasure"] = thing = pick(
        random,
        [
            "kite",
            "sledge",
            "swing",
            "drum",
            "toy boat",
            "red ball",
            "wooden horse",
            "picture book",
            "bicycle",
            "skipping rope",
            "wagon",
            "box of crayons",
            "blue balloon",
            "puzzle",
            "little tent",
        ],
    )
    s["a_treasure"] = with_article(thing)
    elder = other_than(random, lambda r: grown_up(r, named=False), hero)
    story.cast("E", elder)
    s["a_elder"], s["elder"] = with_article(elder.noun), elder.noun
    story.one(
        'One {time}, {A} and {his} friend {B} found {a_treasure} [in the grass|under a bench|behind the shed]. "It is mine," {Asaid}. "I saw it first!" "No, it is mine," said {B}. "I picked it up first!"',
        'One {time}, {A} got {a_treasure} as a present. {His} friend {B} came to look at it. "May I have it for a while?" asked {B}. "No," {Asaid}. "It is mine. You could break it."',
        '{A} and {his} friend {B} had saved their money together, coin by coin, until they could buy {a_treasure}. But when they had it, they began to quarrel. "I want to have it first!" {Asaid}. "No, I do!" said {B}.',
    ) if hero.gender != "i" else story.one(
        'One {time}, my friend {B} and I found {a_treasure} [in the grass|under a bench]. "It is mine," I said. "I saw it first!" "No, it is mine," said {B}. "I picked it up first!"',
    )
    story.one(
        "{They} pulled at it from both sides, and {they} shouted, and soon {they} did not speak to each other any more. {B} went home [with tears in {Bhis} eyes|without a word]. {A} stayed behind with the {treasure}, but it was strange: alone, it was no fun at all.",
        "They were so angry that each of them went home by a different way. {A} kept the {treasure}. {He} played with it for an hour, but {he} had nobody to laugh with, and [soon {he} was bored|{his} heart felt heavy].",
    ) if hero.gender != "i" else story.one(
        "We pulled at it from both sides, and we shouted, and soon we did not speak to each other any more. {B} went home without a word. I had the {treasure} for myself, but it was strange: alone, it was no fun at all."
    )
    s.update(A_elder=s["a_elder"].capitalize())
    story.one(
        'The {elder} saw {Aobj} sitting there. "Why so sad?" {Ehe} asked. {A} told {Ehim} everything. The {elder} [smiled|nodded]. "When I share a cake, I have only half of it," {Ehe} said. "But when I share my joy, I have twice as much."',
        '{A_elder} came by and sat down next to {Aobj}. "What a nice {treasure}," {Ehe} said. "But why do you look so unhappy?" "Because {B} is angry with me," {Asaid}. "Then you must choose," said the {elder}. "What would you miss more, the {treasure} or your friend?"',
    )
    story.one(
        '{A} thought about this [all night|for a long time]. Then {he} ran to {Bposs} house. "I am sorry," {he} said. "Let us take turns. You may begin." {B} [smiled|blushed]. "I am sorry too," {Bhe} said. From then on the {treasure} belonged to both, and {they} had more fun with it than ever.',
        '{A} did not have to think for long. {He} took the {treasure} and went to find {B}. "One day it is with you, and one day with me," {he} said. "And on Sundays we both play with it." {B} threw {Bhis} arms around {him}. "That is the best plan in the world!" {Bhe} said.',
    )
    story.maybe(
        0.4,
        "A thing that is shared is worth twice as much.",
        "Toys can be replaced, but friends cannot.",
        "And so they stayed friends." if hero.gender != "i" else "And so we stayed friends.",
    )
    story.topics += ["sharing", f"two friends and {s['a_treasure']}", "a quarrel", s["a_treasure"]]
    story.ask("What did the friends quarrel about?", "They quarrelled about {a_treasure}.")
    story.ask("Who was {Aname_poss} friend?", "{Aname_poss} friend was {B}.")
    story.ask("Who gave {Acall} good advice?", "The {elder} gave {Acall} good advice.")
    return story


FEARS = [
    (
        "the dark",
        "dark",
        "When the lamp was put out in the evening, {he} pulled the blanket over {his} head and did not dare to move.",
        '"The dark is only the light resting," said {Kin}. "Come, I will show you." Hand in hand they went out into the night. At first {A} saw nothing. Then {he} saw one star, and ten, and a thousand. An owl called, and the air smelled of [grass|rain].',
        'The next evening {A} put out the lamp {Aself}. Through the window {he} saw the first star. "Good night," {he} said to it, and soon {he} was asleep.',
    ),
    (
        "deep water",
        "water",
        "All the others jumped into the lake and splashed about. Only {A} sat on the shore and said that the water was too cold.",
        '"I was afraid too, once," said {Kin}. "We will begin with our toes." On the first day they went in up to the ankles, on the second up to the knees, and on the third up to the chest. Then {Khe} held one hand under {Aposs} back. "Breathe," {Khe} said. "The water wants to carry you." And it did.',
        'At the end of the summer {A} swam all the way to the raft and back. "The water is not cold at all," {he} told everybody.',
    ),
    (
        "thunderstorms",
        "thunder",
        "At the first thunder {he} ran under the table and held {his} ears shut.",
        '"Let us count," said {Kin}. "When you see the lightning, begin. One, two, three..." The thunder came at five. The next time it came at eight, and then at twelve. "You see?" said {Kin}. "The storm is walking away."',
        "Since then {A} sits by the window when there is a storm, and counts. Sometimes {he} is even a little sorry when it is over.",
    ),
    (
        "dogs",
        "dog",
        "When {he} saw one, {he} crossed the street, even if it was small and asleep.",
        'Next door lived an old dog with a grey nose. "Just sit here with me," said {Kin}. So they sat on the bench, and the dog slept in the sun. The next day they sat a little closer. On the fifth day the dog stood up, came over, and laid its head on {Aposs} knees. It was warm and heavy. Very slowly, {A} put out one hand.',
        'Today {A} walks the old dog every afternoon, and when they meet a child who is afraid, {A} says, "You can just sit here with me."',
    ),
    (
        "high places",
        "height",
        "{He} did not climb trees, and on bridges {he} walked exactly in the middle.",
        '"Look up, not down," said {Kin}. "And only one step at a time." They began with a chair, then a ladder, then the old apple tree. On each branch they rested until {Aposs} knees had stopped shaking.',
        'One {time} {A} sat at the very top of the apple tree. From there {he} could see the river, the church and the blue hills. "So that is what the birds see," {he} said.',
    ),
    (
        "speaking in front of others",
        "speaking",
        "When {he} had to say something and everybody looked at {him}, {he} turned red, and the words hid in {his} throat.",
        '"Tell it to the cat first," said {Kin}. The cat listened very politely. Next day {A} told it to the cat and to {Kin}, and the day after that also to the neighbours. Each time {his} voice was a little louder.',
        "Then the great day came. {A} stood in front of everybody, looked for the cat, found it on the windowsill, and began to speak. When it was over, they all clapped.",
    ),
    (
        "being alone",
        "alone",
        "If nobody was in the room, {he} began to sing loudly or ran to find somebody.",
        '"Let us try it with a clock," said {Kin}. "I will be in the garden until the big hand has moved from one number to the next." {A} watched the hand. It moved. {Kin} came back. The next day it was two numbers, then three. In that time {A} drew a picture, and then {he} forgot to look at the clock.',
        '"Already back?" asked {A} the next time {Kin} came in. "I have not finished my picture yet!"',
    ),
]


def fear(random: Random) -> Story:
    """Somebody is afraid and learns, step by step, not to be."""
    story, hero = begin(random, animals=0.0, teller=0.0)
    s = story.slots
    what, key, shows, lesson, end = pick(random, FEARS)
    s["what"], s["Kin"] = what, f"{s['his']} {s['kin']}"
    story.add(f"There was only one thing {{he}} was afraid of: {{what}}. {shows}")
    story.maybe(
        0.6,
        'The other children laughed. "{A} is a scaredy-cat!" they said. [That made everything worse|{A} went home with a red face].'
        if hero.gender != "i"
        else "The other children laughed. That made everything worse.",
        "{He} was ashamed of it and told nobody. But {K} noticed it, of course.",
    )
    story.add(lesson)
    story.add(end.replace("asked {A}", "{Aasked}"))
    story.maybe(
        0.4,
        "Courage does not mean having no fear. It means being stronger than it.",
        "Every fear grows smaller when you go towards it, step by step.",
    )
    story.topics += ["fear", f"{s['a_noun']} who was afraid of {what}", "courage"]
    story.ask("What was {Acall} afraid of?", "{Acall} was afraid of {what}.")
    story.ask("Who helped {Acall}?", "{Aname_poss} {kin} helped {Acall}.")
    return story


def broken(random: Random) -> Story:
    """Somebody breaks a thing and tells the truth, at last."""
    story, hero = begin(random, animals=0.3)
    s = story.slots
    s["thing"] = thing = pick(
        random,
        [
            "vase",
            "teapot",
            "window",
            "mirror",
            "lamp",
            "bowl",
            "clock",
            "flowerpot",
            "cup",
            "plate",
            "glass bird",
            "picture frame",
        ],
    )
    s["a_thing"], s["colour"] = with_article(thing), pick(random, words.COLOURS)
    s["how"] = pick(
        random,
        [
            "playing ball",
            "dancing on the table",
            "chasing a fly",
            "running through the room",
            "looking for biscuits",
            "playing hide and seek",
        ],
    )
    story.one(
        "One {time}, {A} was {how}, though {he} knew that it was not allowed. Crash! The {colour} {thing} of {his} {kin} fell down and broke into [a hundred|many] pieces. {A} stood still and did not dare to breathe.",
        "{Aposs} {kin} had a beautiful {colour} {thing}. {Khe} loved it very much. But one {time}, when {A} was {how}, there was a crash, and the {thing} lay in pieces on the floor.",
    )
    story.one(
        'Quickly {he} swept up the pieces and hid them [under the bed|behind the cupboard|in a box]. In the evening {his} {kin} asked, "Has anybody seen my {thing}?" "Perhaps it was the cat," {Asaid}. But {he} could not look {Khim} in the eye.',
        '"Who did that?" asked {his} {kin}. "It was the wind," {Asaid} quickly. {His} {kin} looked at the closed window and said nothing. That was worse than any scolding.',
    )
    s.update(kinposs=f"{s['kin']}'s")
    story.one(
        'That night {A} could not sleep. {He} turned to the left and to the right. The lie lay in {his} stomach like a stone. When the moon stood over the roof, {he} got up and knocked at {his} {kinposs} door. "It was me," {he} whispered. "I broke it. I am so sorry."',
        'Supper did not taste good, and the best story was no fun. At last {A} could not bear it any longer. "It was not the cat and not the wind," {he} said, and tears ran down {his} cheeks. "I broke the {thing}."',
    )
    s.update(A_thing=s["a_thing"].capitalize())
    story.one(
        '{Aposs} {kin} took {him} on {Khis} lap. "I know," {Khe} said. "I was only waiting until you were brave enough to tell me. {A_thing} can be glued. Trust is much harder to mend." The next day they glued the pieces together. One can still see the cracks, but {Khe} says that now {Khe} likes the {thing} even more.',
        '{His} {kin} was silent for a while. "The {thing} was dear to me," {Khe} said then, "but you are dearer. Thank you for telling me the truth." From {his} pocket money {A} bought a new one. It was a little crooked and very {colour}, and it got the best place in the house.',
    )
    story.topics += [
        "telling the truth",
        "a lie",
        s["a_thing"],
        f"{s['a_noun']} who broke {s['a_thing']}",
    ]
    story.ask("What did {Acall} break?", "{Acall} broke {a_thing}.")
    story.ask("What colour was the {thing}?", "The {thing} was {colour}.")
    story.ask("Who did the {thing} belong to?", "It belonged to {Aname_poss} {kin}.")
    return story


def seed(random: Random) -> Story:
    """A seed is planted, and patience is learned."""
    story, hero = begin(random, animals=0.4)
    s = story.slots
    s["plant"] = plant = pick(
        random,
        [
            "sunflower",
            "pumpkin plant",
            "bean plant",
            "apple tree",
            "rose",
            "pea plant",
            "strawberry plant",
            "oak",
            "cherry tree",
            "tomato plant",
            "lemon tree",
            "tulip",
        ],
    )
    s["a_plant"] = with_article(plant)
    giver = other_than(random, lambda r: grown_up(r, named=False), hero)
    story.cast("E", giver)
    s["elder"] = giver.noun
    s["a_colour"] = with_article(pick(random, words.COLOURS))
    story.one(
        'One {time}, an old {elder} gave {Aobj} a [tiny|small] seed. "If you take good care of it," {Ehe} said, "it will become something wonderful." {A} planted it in {a_colour} pot and watered it.',
        '"What is in that bag?" {Aasked}. "Seeds," said an old {elder}, and put one into {Aposs} hand. "This one is for you." {A} dug a small hole behind the house, laid the seed in it and covered it with earth.',
    )
    story.one(
        'The next morning {he} ran to look. There was nothing. On the second day there was nothing, and on the third day nothing again. "Nothing is happening!" {Asaid}. {He} wanted to dig up the seed to see whether it was still there. "Wait," said {K}. "It is working where you cannot see it."',
        '{He} sat down beside it and waited. After an hour {he} was bored. After a day {he} was cross. "This seed is broken," {he} said. {K} laughed. "You did not become so big in a day either," {Khe} said.',
    )
    story.one(
        "So {A} waited. {He} watered it every morning, pulled out the weeds, and told it stories. And after [two weeks|twelve days], a green tip pushed through the earth. It was no bigger than a fingernail, but {A} had never seen anything so beautiful.",
        "{A} learned to wait. When it was dry, {he} carried water. When it was cold, {he} covered the earth with straw. One {time} a small green leaf was there. The next day there were two.",
    )
    s.update(Bhis=pick(random, ("his", "her")))
    story.one(
        'It grew and grew. When it had become {a_plant}, as beautiful as in a picture, {A} called everybody {he} knew to come and look. "How did you do it?" they asked. "I waited," {Asaid}, "and watered."',
        'In the end it was {a_plant}, and the most beautiful one far and wide. {A} kept the new seeds in a paper bag, and when a little neighbour came by, {he} put one into {Bhis} hand. "If you take good care of it," {he} said, "it will become something wonderful."',
    )
    story.topics += [
        "a seed",
        "patience",
        "a garden",
        s["a_plant"],
        f"{s['a_noun']} who planted a seed",
    ]
    story.ask("What did the seed become?", "It became {a_plant}.")
    story.ask("Who gave {Acall} the seed?", "The {elder} gave {Acall} the seed.")
    return story


def newcomer(random: Random) -> Story:
    """Somebody new is alone, and is asked to play."""
    story, hero = begin(random)
    s = story.slots
    add_friend(story, hero)
    s["origin"] = pick(
        random,
        [
            "another country",
            "the other side of the mountains",
            "a big city",
            "an island far away",
            "the north",
            "the south",
            "a village that nobody knew",
        ],
    )
    s["game"] = pick(
        random,
        [
            "hide and seek",
            "catch",
            "marbles",
            "football",
            "pirates",
            "chess",
            "skipping",
            "knights and dragons",
        ],
    )
    s["skill"] = (
        pick(
            random,
            [
                "fold birds out of paper",
                "whistle like a blackbird",
                "walk on {Bhis} hands",
                "tell stories that nobody had ever heard",
                "juggle with three apples",
                "draw everything {Bhe} saw",
                "play the flute",
                "find every hiding place",
                "build the highest towers",
            ],
        )
        .replace("{Bhis}", s["Bhis"])
        .replace("{Bhe}", s["Bhe"])
    )
    story.one(
        "One {time}, a new {Bnoun} came to live nearby. {BHe} was called {B} and came from {origin}. {B} [spoke very little|did not know anyone] and always stood at the edge when the others played {game}.",
        '"Have you seen the new {Bnoun}?" everybody asked. {B} came from {origin}. Nobody knew what to say to {Bhim}, and so nobody said anything. {B} sat alone [on the wall|under the tree] and watched the others play {game}.',
    )
    s.update(Greeting=pick(random, words.GREETINGS), Ahim_self=s["Aself"])
    story.one(
        '{A} looked over again and again. {He} remembered how it had felt when {he} {Ahim_self} had been new. {He} put the ball down and walked over. "{Greeting}," {he} said. "I am {Acall}. Would you like to play {game} with us?"',
        'At first {A} was too shy to speak to {Bhim}. But then {he} broke {his} cake in two and held out one half. "Would you like some?" {he} asked. "I am {Acall}."',
    )
    story.one(
        "{B} looked up. Then {Bhe} smiled for the first time. It turned out that {Bhe} could {skill}. Soon all the others stood around {Bhim} and wanted to learn it too.",
        '"Yes, please," said {B}, very softly. {They} played until it grew dark. And when everybody was tired, {B} showed what {Bhe} could do: {Bhe} could {skill}!',
    )
    story.one(
        '"Why did you not tell us?" {Aasked}. "Nobody asked me," said {B}. After that day {A} always asked.',
        'On the way home {B} said, "This morning I wanted to go back. Now I want to stay." {A} [nodded|laughed]. "Then see you tomorrow," {he} said.',
        "That was the beginning of a long friendship. Even today, when one of them laughs, the other one is not far away.",
    )
    story.topics += [
        "a new friend",
        "friendship",
        f"a new {s['Bnoun']}",
        f"two friends, {s['both']}",
    ]
    story.ask("Where did {B} come from?", "{B} came from {origin}.")
    story.ask("What could {B} do?", "{B} could {skill}.")
    story.ask("What did the others play?", "They played {game}.")
    return story


def birthday(random: Random) -> Story:
    """Everyone seems to have forgotten a birthday."""
    story, hero = begin(random)
    s = story.slots
    add_friend(story, hero)
    s["food"], s["treasure"] = pick(random, words.FOODS), pick(random, words.TREASURES)
    s["a_treasure"] = with_article(s["treasure"])
    s["age"] = pick(random, ["five", "six", "seven", "eight", "nine", "ten"])
    story.one(
        'It was {Aposs} birthday. {He} was {age} years old today, and {he} jumped out of bed. But in the kitchen there was no cake. "Good morning," said {K}, and went on [sweeping|reading]. Nothing else. Had {Khe} forgotten?',
        'For weeks {A} had been looking forward to this day, for today {he} turned {age}. But nobody sang, and nobody said a word about it. Even {his} best friend {B} only said, "Sorry, I have no time today," and ran off.',
    )
    story.one(
        '{A} went to see {B}. "Do you know what day it is?" {he} asked. "[Tuesday|Thursday|Wednesday], I think," said {B}. "I must go. I have so much to do." {A} walked around all by {Aself} and kicked a pebble along the road.',
        '{A} sat down by the pond and threw stones into the water. "Nobody thinks of me," {he} said to the ducks. The ducks said "Quack", but that was not "Happy birthday".',
    )
    story.one(
        'In the evening {he} went home. The house was quite dark. {A} opened the door, and suddenly there was light everywhere. "Surprise!" cried {K}, {B} and all the others. On the table stood {food} with {age} candles, and next to it lay {a_treasure} with a ribbon around it.',
        'When the sun went down, {A} came home. There was something white on the door, a note: "Come into the garden!" There were lanterns in the trees, and under them stood everybody {he} knew. {B} held {food} in both hands, and {K} held {a_treasure}. "Happy birthday, {Acall}!" they all cried.',
    )
    s.update(Ame="" if hero.gender == "i" else hero.name)
    story.one(
        '"I thought that you had forgotten me," said {Ame}. "We have thought of nothing else all day!" said {B}.',
        '"Now I know why nobody had time," {Asaid}, and {he} laughed until {his} stomach hurt.',
        "It was the best birthday that {A} had ever had, and {he} blew out all the candles with one breath.",
    )
    story.topics += [
        "a birthday",
        "a surprise",
        f"{s['Aname_poss']} birthday",
        f"{s['a_noun']} who had a birthday",
    ]
    story.ask("How old was {Acall}?", "{Acall} was {age} years old.")
    story.ask("What present did {Acall} get?", "{Acall} got {a_treasure}.")
    story.ask("Who was {Aname_poss} best friend?", "{Aname_poss} best friend was {B}.")
    return story


def boaster(random: Random) -> Story:
    """A fable: pride and what it leads to."""
    story = Story(random)
    s = story.slots
    proud = animal(random, named=False)
    modest = other_than(random, lambda r: animal(r, named=False), proud)
    story.cast("A", Person(proud.name, proud.noun, proud.gender, "proud", True))
    story.cast("B", Person(modest.name, modest.noun, modest.gender, "modest", True))
    s["a_noun"], s["a_bnoun"] = with_article(proud.noun), with_article(modest.noun)
    s["goal"] = pick(random, ["old oak", "bridge", "mill", "river", "big stone", "well"])
    s["skill"], contest, fails, wins = pick(
        random,
        [
            (
                "fast",
                '"Let us run to the {goal} and back," said {B}.',
                "{A} ran off like the wind. Halfway there, {Ahe} was so sure of {Aself} that {Ahe} lay down in the shade to take a nap, and {Ahe} slept, and slept.",
                "{B} went on at an even pace, without a stop. When {A} woke up, {B} was already sitting by the {goal} and [waving|smiling].",
            ),
            (
                "strong",
                '"Let us see who can open this [old chest|heavy door]," said {B}.',
                "{A} pushed and pulled and kicked until {Ahe} was out of breath. Nothing moved.",
                "{B} looked at it for a while. Then {Bhe} lifted a small hook that nobody had noticed, and it swung open all by itself.",
            ),
            (
                "clever",
                '"Then tell me how many stones lie in this brook," said {B}.',
                "{A} began to count, and counted until evening, and lost count, and began again. {Ahe} grew more and more angry.",
                '"I do not know it either," said {B}. "But I know that I do not know it, and so I had a pleasant day."',
            ),
            (
                "beautiful",
                '"Then come and look into the pond with me," said {B}.',
                "{A} bent over the water to admire {Aself}. {Ahe} bent lower and lower, and splash! {Ahe} fell in head first.",
                '{B} held out a long branch and pulled {Ahim} out. "Now we look alike," {Bhe} said kindly, "wet and muddy, both of us."',
            ),
            (
                "brave",
                '"Then go into the cave where it roars every evening," said {B}.',
                "{A} went three steps into the cave. Something roared, and {Ahe} ran away so fast that {Ahe} lost {Ahis} [hat|scarf].",
                '{B} trembled, but went in with a light. Soon {Bhe} came back. "It is only the wind in a hollow stone," {Bhe} said, and gave {Ahim} back what {Ahe} had lost.',
            ),
        ],
    )
    s.update(A_noun=s["a_noun"].capitalize())
    story.one(
        'There was once {a_noun} who [boasted|said] all day long, "Nobody is as {skill} as I am!" The other animals [were tired of it|rolled their eyes].',
        '{A_noun} and {a_bnoun} lived side by side. Every morning {A} cried, "Look at me! I am the most {skill} animal in the world!"'
        if s["skill"] in ("beautiful",)
        else '{A_noun} and {a_bnoun} lived side by side. Every morning {A} cried, "Look at me! Have you ever seen anybody as {skill} as I am?"',
        "In a [forest|valley|meadow] lived {a_noun} who was very proud of being {skill}. Whoever came by had to listen to it for an hour.",
    )
    story.one(
        f'One {pick(random, words.TIMES)}, {{B}} had heard enough. {contest} {{A}} laughed. "With you? That will be easy!" {{Ahe}} said.',
        f'"Are you quite sure?" asked {{B}} one {pick(random, words.TIMES)}. "Of course!" cried {{A}}. {contest}',
    )
    story.add(fails, wins)
    story.one(
        "After that {A} did not boast any more, or at least not so loudly.",
        '{A} was ashamed. "You have won," {Ahe} said, "and I have learned something."',
        "All the animals laughed, and in the end {A} laughed too. From that day on the two were friends.",
    )
    story.one(
        "Moral: pride comes before a fall.",
        "Moral: whoever talks the most does not always do the most.",
        "The moral of the story is that it is better to be good at something than to say so.",
        "Those who are truly {skill} do not need to say it.",
        "",
    )
    story.paragraphs = [p for p in story.paragraphs if p]
    story.topics += [
        "a fable",
        "pride",
        f"a proud {proud.noun}",
        f"{s['a_noun']} and {s['a_bnoun']}",
        s["a_noun"],
    ]
    story.ask("Who was proud?", "The {Anoun} was proud.")
    story.ask("What was the {Anoun} proud of?", "The {Anoun} was proud of being {skill}.")
    story.ask("Which animals are in the story?", "There are {a_noun} and {a_bnoun} in the story.")
    return story


def learning(random: Random) -> Story:
    """Practice: from bad to good."""
    story, hero = begin(random, animals=0.3)
    s = story.slots
    s["skill"], s["first"], s["second"], s["last"] = pick(
        random,
        [
            (
                "ride a bicycle",
                "{he} fell into the hedge",
                "{he} rode three metres and fell into the flower bed",
                "{he} rode all the way around the square, and the wind blew in {his} face",
            ),
            (
                "play the violin",
                "it sounded like a cat whose tail is caught in the door",
                "the neighbours closed only half of their windows",
                "it was so quiet in the room that one could hear the snow fall outside, and then everyone clapped",
            ),
            (
                "bake bread",
                "it was as hard as a brick",
                "it was soft, but quite black on one side",
                "the crust was golden, and the whole street smelled of it",
            ),
            (
                "whistle",
                "nothing came out but air",
                "it sounded like a leaking kettle",
                "even the blackbird on the roof stopped to listen",
            ),
            (
                "skate",
                "{he} sat on the ice more than {he} stood on it",
                "{he} came as far as the first bend before {he} fell",
                "{he} glided over the lake as if {he} had wings",
            ),
            (
                "draw a horse",
                "it looked like a table with a tail",
                "it looked like a dog, but a friendly one",
                "it looked as if it would jump off the paper",
            ),
            (
                "fly a kite",
                "it crashed into the apple tree",
                "it rose as high as the roof and then dropped like a stone",
                "it stood so high in the sky that it was only a small dot",
            ),
            (
                "swim",
                "{he} swallowed half of the lake",
                "{he} could swim five strokes, and then {he} sank",
                "{he} swam to the other shore and back",
            ),
            (
                "juggle",
                "all three balls rolled under the cupboard",
                "{he} caught two of the three balls",
                "the balls flew in a circle as if by themselves",
            ),
            (
                "build a boat",
                "it sank before {he} had let go of it",
                "it floated, but only upside down",
                "it sailed across the whole pond with its white paper sail",
            ),
        ],
    )
    for key in ("first", "second", "last"):
        s[key] = s[key].replace("{he}", s["he"]).replace("{his}", s["his"])
    story.one(
        'More than anything {A} wanted to {skill}. {K} could do it so well! "It cannot be hard," {Athought}.',
        'One {time}, {A} watched {K} and made up {his} mind. "I want to learn to {skill} too," {he} said.',
    )
    story.one(
        'On the first day {first}. "I shall never learn it!" {Acried}, and {he} stamped {his} foot. "Never is a long time," said {K}. "Try it again tomorrow."',
        '{A} tried it, and {first}. Everybody laughed, and {A} turned red. Only {K} did not laugh. "That is how everyone begins," {Khe} said.',
    )
    s.update(day_time=pick(random, ("morning", "evening", "afternoon")))
    story.one(
        "So {A} tried it again the next day, and the day after that. After a week {second}. That was already a little better. {A} gritted {his} teeth and went on.",
        '{A} practised every {day_time}, even when it rained. After some time {second}. "Do you see?" said {K}. "It is coming."',
    )
    story.one(
        'And then, one {time}, it happened: {last}. "I can do it!" {Acried}. "I really can do it!"',
        "When [spring|summer|winter|autumn] came, {A} could do it: {last}.",
    )
    s.update(onlooker=pick(random, ("boy", "girl")))
    story.one(
        '"How did you learn it so quickly?" asked a small {onlooker}. {A} laughed. "Quickly? First of all I learned to fail," {he} said.',
        "Nobody learns anything in a day. But every day is a step.",
        '"What do you want to learn next?" asked {K}. {A} had already thought of something.',
    )
    story.topics += [
        "learning",
        "practice",
        f"{s['a_noun']} who wanted to {s['skill']}",
        f"learning to {s['skill']}",
    ]
    story.ask("What did {Acall} want to learn?", "{Acall} wanted to learn to {skill}.")
    story.ask("Who taught {Acall}?", "{Aname_poss} {kin} taught {Acall}.")
    return story


def trade(random: Random) -> Story:
    """A chain of swaps, which ends where it is needed most."""
    story, hero = begin(random, animals=0.3, teller=0.08)
    s = story.slots
    steps = [
        ("an apple", "a hungry {w}", "a button"),
        ("a piece of bread", "a hungry {w}", "a candle"),
        ("a button", "a {w} whose coat was open in the wind", "a ball of string"),
        ("a candle", "a {w} whose cellar was dark", "a ball of string"),
        ("a ball of string", "a {w} whose parcel had come apart", "a pot of paint"),
        ("a ball of string", "a {w} who wanted to fly a kite with the children", "an old umbrella"),
        ("a pot of paint", "a {w} whose door had lost its colour", "a woollen blanket"),
        ("an old umbrella", "a {w} who stood in the rain", "a woollen blanket"),
    ]
    have = pick(random, ["an apple", "a piece of bread"])
    s["start"] = have
    story.one(
        'One {time}, {A} went to market. {He} had no money, only {start}. "I wish I could bring my {kin} something nice," {Athought}.',
        "One {time}, {A} set out with nothing but {start} in {his} pocket. {He} wanted to find a present for {K}.",
    )
    used, people = [], []
    while have != "a woollen blanket":
        _, who, gets = pick(random, [step for step in steps if step[0] == have])
        worker = grown_up(random, named=False)
        while worker.noun in people:
            worker = grown_up(random, named=False)
        people.append(worker.noun)
        noun = worker.noun
        s |= {
            "who": who.replace("a {w}", with_article(noun)).replace("{w}", noun),
            "w": noun,
            "have": have,
            "gets": gets,
            "what": have.split(" ", 1)[1],
        }
        he = "she" if worker.gender == "f" else "he"
        s |= {"whe": he, "wHe": he.capitalize(), "wHis": {"he": "his", "she": "her"}[he]}
        story.one(
            '[Soon|After a while] {he} met {who}. "You can have my {what}," {Asaid}. The {w} was delighted, and gave {him} {gets} for it.',
            '[On the way|At the next corner] {he} saw {who}. {A} gave away the {what} without thinking twice. "Then you must take this," said the {w}, and handed {him} {gets}.',
            'Then came {who}. "Take this," {Asaid}, and held out the {what}. In return {he} got {gets}.',
        )
        used.append((noun, have))
        have = gets
    s.update(Khis2=f"{s['his']} {s['kin']}'s")
    story.one(
        'With the blanket under {his} arm, {A} went home. It was evening, and it had grown cold. {K} was sitting by the window and shivering. {A} laid the blanket around {Khis} shoulders. "How did you know that I was cold?" {Khe} asked. "And where did you get it?" "It was {start} this morning," {Asaid}.',
        'When {he} came home, {A} spread the blanket over {Khis2} bed. "It must have cost a fortune!" said {K}. "No," {Asaid}. "Only {start}, and a few kind words."',
    )
    noun, thing = pick(random, used)
    s |= {"w": noun, "have": thing}
    story.topics += ["a trade", "a present", f"{s['a_noun']} who had only {s['start']}"]
    story.ask("What did {Acall} have at first?", "{Acall} had {start} at first.")
    story.ask("What did {Acall} bring home?", "{Acall} brought home a woollen blanket.")
    story.ask("Who got {have}?", "The {w} got it.")
    return story


def old_house(random: Random) -> Story:
    """An old house and who lives in it."""
    story, hero = begin(random, animals=0.0, teller=0.2, plain=False)
    s = story.slots
    friend = add_friend(story, hero)
    s["street"] = pick(
        random,
        [
            "Mill Street",
            "Church Road",
            "River Lane",
            "Station Road",
            "Garden Street",
            "Hill Road",
            "Bridge Lane",
            "School Lane",
            "Castle Street",
        ],
    )
    elder = other_than(random, grown_up, hero, friend)
    story.cast("E", elder)
    s["elder"], s["a_elder"] = elder.noun, with_article(elder.noun)
    s["room"] = pick(
        random,
        [
            "a hundred clocks, and all of them were ticking",
            "shelves full of books up to the ceiling",
            "puppets that hung on strings from the ceiling",
            "paintings of the sea, one beside the other",
            "cages with open doors, and birds that flew in and out",
            "toy trains that ran from room to room",
            "plants everywhere, so that it looked like a jungle",
            "a grand piano, black and shining",
        ],
    )
    story.one(
        "The old house on {street} had been empty for years. Its windows were [dark|dusty], and its garden was full of [nettles|weeds]. The children said that it was haunted.",
        "At the end of {street} stood an old house. Nobody had lived in it for a long time, or so everyone believed.",
        "The old house at the end of {street} had a red roof with holes in it, a crooked chimney, and a door that [creaked|groaned] in the wind. No one ever went in.",
        "Everyone in town knew the old house on {street}. At night, people said, somebody walked about in it with a lamp.",
    )
    s.update(A_or_me=s["Aobj"])
    story.one(
        'One {time}, {A} and {his} friend {B} stood in front of the gate. "I am not afraid," {Asaid}. "Neither am I," said {B}. But neither of them moved. Then a light went on behind a window on the upper floor.'
        if hero.gender != "i"
        else 'One {time}, my friend {B} and I stood in front of the gate. "I am not afraid," I said. "Neither am I," said {B}. But neither of us moved. Then a light went on behind a window on the upper floor.',
        'One {time}, a ball flew over the wall. It belonged to {A_or_me}, and {B} was watching. "You will never see that again," said {B}. "Of course I will," {Asaid}, and {he} climbed over the wall. {B} came too, because {Bhe} did not want to stay behind alone.',
    )
    story.one(
        "The door was not locked. Inside, it smelled of [dust|apples|wax], and the floor creaked under {their} feet. {They} went up the stairs, step by step. And there, in the last room, {they} saw {room}.",
        '{They} pushed the door open. It was dark, and somewhere something [ticked|rustled]. "Let us go home," whispered {B}. But {A} had already opened the next door. Behind it {they} saw {room}.',
    )
    s.update(Ename=elder.name, His_or=s["EHis"])
    story.one(
        '"Do you like it?" asked a voice. {AB} jumped. In an armchair sat {Ename}, an old {elder} with white hair. "Do not be afraid," {Ehe} said. "I am so glad that somebody has come. In all these years nobody has ever knocked."',
        '"Good evening," said somebody behind {them}. It was an old {elder} with a candle in {Ehis} hand. {His_or} name was {Ename}. "You are my first guests in ten years," {Ehe} said. "Would you like some [cocoa|tea|biscuits]?"',
    )
    story.one(
        'From then on {they} went there every week. {Ename} showed {them} everything {Ehe} had made, and told {them} about it. The children of the town still say that the house is haunted. "Oh yes," says {B} then, and winks.',
        "{They} stayed until supper, and the next day {they} came back with brooms and buckets. Soon the windows of the old house shone again, and there were roses in the garden. And {Ename} was never alone any more.",
    )
    story.topics += [
        "an old house",
        "the old house",
        "a haunted house",
        f"the old house on {s['street']}",
        f"two friends, {s['both']}",
    ]
    story.ask(
        "Where was the old house?",
        "The old house was on {street}."
        if "end of" not in story.paragraphs[0]
        else "The old house was at the end of {street}.",
    )
    story.ask("Who lived in the old house?", "{Ename}, an old {elder}, lived in the old house.")
    story.ask("Who went into the house with {Acall}?", "{B} went into the house with {Acall}.")
    return story


def rescue_small(random: Random) -> Story:
    """A small creature needs a home for a while."""
    story, hero = begin(random, animals=0.0, teller=0.2)
    s = story.slots
    s["pet"], s["eats"], s["goes"] = pick(
        random,
        [
            ("kitten", "milk", ""),
            ("sparrow", "seeds", "fly"),
            ("hedgehog", "apple slices", "walk"),
            ("puppy", "bread and milk", ""),
            ("swallow", "flies", "fly"),
            ("rabbit", "carrots", ""),
            ("squirrel", "nuts", "climb"),
            ("duckling", "oats", "swim"),
            ("owl", "scraps of meat", "fly"),
            ("tortoise", "lettuce", ""),
            ("blackbird", "worms", "fly"),
            ("lamb", "warm milk", ""),
        ],
    )
    s["a_pet"], s["petname"] = with_article(s["pet"]), pick(random, words.PET_NAMES)
    s["place"] = pick(
        random,
        [
            "under a bush",
            "beside the road",
            "behind the shed",
            "in a cardboard box",
            "under the stairs",
            "in the wet grass",
        ],
    )
    s.update(place_from=f"somewhere {s['place']}")
    story.one(
        "One {time}, {A} heard a weak sound. It came from {place_from}. There {he} found {a_pet}, all alone and wet through. It looked at {him} with round eyes.",
        "On the way home from school {A} saw something move {place}. It was {a_pet}, so small that it fitted into {his} two hands. It was trembling.",
    )
    story.one(
        '{He} wrapped it in {his} scarf and carried it home. "May I keep it?" {he} asked. "Until it is well again," said {K}. "But you must look after it yourself." {A} promised, and called it {petname}.',
        '"Don\'t be afraid," {A} said. "I will take care of you." At home {K} found an old basket, and {they} put it next to the stove. {A} named the {pet} {petname}.',
    )
    story.one(
        "{A} got up early every morning to feed {petname}. It got {eats} and fresh water, and each day it grew a little stronger. In the evenings it slept on {Aposs} knees.",
        "In the first night {petname} did not want to eat. {A} sat beside the basket and waited. Towards morning it took a little of the {eats}, then a little more, and then it fell asleep in {his} hand.",
    )
    if s["goes"]:
        story.one(
            'After three weeks {petname} could {goes} again. "It wants to be free," said {K}. {A} knew that it was true, but {his} throat was tight. {He} took the basket to the [meadow|edge of the wood] and opened it. {petname} looked around once more, and then it was gone.',
            'Then came the day when {petname} sat by the window and looked out, for hours and hours. {A} understood. {He} opened the window wide. "Take care of yourself," {he} said softly.',
        )
        story.one(
            'The next spring {a_pet} sat on the garden wall and looked at {him} as if it knew {him}. "Hello, {petname}," {Asaid}.',
            "{A} was sad for a while. But whenever {he} saw {a_pet} afterwards, {he} waved.",
        )
    else:
        s.update(A_or="I" if hero.gender == "i" else hero.name)
        story.one(
            'After three weeks {petname} was quite well. {A} looked at {K}, and {K} looked at the {pet}, which had fallen asleep on {Khis} slippers. "Well," {Khe} said, "I think it has decided to stay."',
            '{A} put up notes all over town: "Found: {a_pet}." Every day {he} hoped that nobody would come. And nobody came. So {petname} stayed, and nobody was happier about it than {A_or}.',
        )
    story.topics += [
        s["a_pet"],
        f"{s['a_noun']} who found {s['a_pet']}",
        "a lost animal",
        f"{s['a_pet']} named {s['petname']}",
    ]
    story.ask("What did {Acall} find?", "{Acall} found {a_pet}.")
    story.ask("What was the {pet} called?", "The {pet} was called {petname}.")
    story.ask("What did {petname} eat?", "{petname} ate {eats}.")
    return story


def rainy_day(random: Random) -> Story:
    """A dull day becomes a good one by imagination."""
    story, hero = begin(random, animals=0.2, teller=0.15)
    s = story.slots
    add_friend(story, hero)
    s["vessel"], s["where"], s["danger"], s["land"] = pick(
        random,
        [
            ("ship", "sea", "a whale as big as an island", "the land of oranges"),
            ("rocket", "sky", "a swarm of falling stars", "the moon"),
            ("train", "desert", "a sandstorm", "the city of golden roofs"),
            ("submarine", "deep sea", "an octopus with green eyes", "the palace of the sea king"),
            ("balloon", "clouds", "a thunderstorm with a bad temper", "the castle in the air"),
            ("sledge", "white north", "three polar bears", "the house of the winter"),
        ],
    )
    s["from"] = pick(
        random,
        [
            "the kitchen table and two chairs",
            "a big cardboard box",
            "the old sofa and a broom",
            "the laundry basket and a sheet",
            "four cushions and an umbrella",
        ],
    )
    story.one(
        'It had been raining for three days. {AB} lay on the floor and were bored. "There is nothing to do," said {B}. "Nothing at all."',
        "Rain ran down the windows, and nobody was allowed to go out. {AB} had already played every game they knew, twice.",
    ) if hero.gender != "i" else story.one(
        'It had been raining for three days. {B} and I lay on the floor and were bored. "There is nothing to do," said {B}. "Nothing at all."'
    )
    story.one(
        '{A} looked at {from}. Then {he} jumped up. "That is not what you think it is," {he} said. "That is a {vessel}!" "Where does it go?" asked {B}. "To {land}, of course. All aboard!"',
        '"Look," {A} said, and built something from {from}. "What is it?" asked {B}. "A {vessel}. It leaves for {land} in one minute." {B} ran to fetch {Bhis} hat.',
    )
    s.update(Danger=s["danger"].capitalize(), A_or="I" if hero.gender == "i" else hero.name)
    story.one(
        'And off they went, out into the {where}. There were waves of blankets and mountains of pillows. Suddenly {B} cried, "Watch out! {Danger}!" {A} turned the wheel with all {his} strength, and they slipped past, just in time.',
        'The {vessel} shook and hummed. In the middle of the {where}, {danger} came straight towards them. "What shall we do?" cried {A_or}. "Sing!" said {B}, and they sang so loudly that it turned around.',
    )
    if hero.gender == "i":
        story.paragraphs[-1] = (
            story.paragraphs[-1]
            .replace("off they went", "off we went")
            .replace("and they ", "and we ")
            .replace("towards them", "towards us")
            .replace("cried I", "I cried")
        )
    s["food"] = pick(random, words.FOODS)
    if hero.gender == "i":
        story.add(
            'We had just landed at {land} when a voice called, "Supper is ready!" It was {K}. "And the rain has stopped." {B} and I looked at each other. "Already?" we said.'
        )
    else:
        story.one(
            'They had just landed at {land} when a voice called, "Supper is ready!" It was {K}. "And the rain has stopped." {AB} looked at each other. "Already?" they said.',
            'When {K} came in with {food}, {Khe} stopped at the door. "Where have you been?" {Khe} asked. "Far away," said {B}. "May we sail again tomorrow, even if the sun shines?"',
        )
    story.topics += [
        "a rainy day",
        "imagination",
        f"a {s['vessel']}",
        f"a journey to {s['land']}",
        f"two friends, {s['both']}",
    ]
    story.ask("What did they build?", "They built a {vessel}.")
    story.ask("Where did they want to go?", "They wanted to go to {land}.")
    story.ask("Who played with {Acall}?", "{B} played with {Acall}.")
    return story


def trick(random: Random) -> Story:
    """A fable: somebody small saves itself by wit."""
    story = Story(random)
    s = story.slots
    hunter = pick(random, ["fox", "wolf", "cat", "hawk", "bear", "snake", "lion", "tiger"])
    prey = pick(
        random,
        [
            a
            for a in [
                "mouse",
                "hen",
                "rabbit",
                "sparrow",
                "frog",
                "lamb",
                "goose",
                "squirrel",
                "duck",
                "cricket",
            ]
        ],
    )
    story.cast(
        "A",
        Person(
            f"the {prey}",
            prey,
            pick(random, "fm") if prey not in ("hen", "goose") else "f",
            "clever",
            True,
        ),
    )
    story.cast("B", Person(f"the {hunter}", hunter, pick(random, "fm"), "hungry", True))
    s["a_prey"], s["a_hunter"] = with_article(prey), with_article(hunter)
    s["weather"] = pick(random, words.WEATHER)
    s.update(w=s["weather"])
    story.one(
        'A hungry {Bnoun} caught {a_prey} one {w} morning. "Now I will eat you," said {B}.',
        'One {w} day, {a_prey} was looking for food and did not notice {a_hunter} that had crept up. Snap! {B} held {Ahim} fast. "At last, my dinner," {Bhe} said.',
        "{B} was hungry. {BHe} had not eaten since the day before. Then {Bhe} saw {a_prey}, and with one leap {Bhe} had caught {Ahim}.",
    )
    story.one(
        '"Very well," said {A}. "But everyone says that you have a beautiful voice. Let me hear you sing once before I die." {B} was flattered. {BHe} opened {Bhis} mouth to sing, and in the same moment {A} [slipped away|was gone].',
        '"Do as you like," said {A}. "But I am [thin and bony|very small]. My brother is three times as fat as I am, and he will come by here any minute." {B} thought about it. "Then I will wait for your brother," {Bhe} said, and let {Ahim} go. {BHe} is still waiting today.',
        '"What a pity that you are going to eat me without salt," said {A}. "Where I come from, even beggars eat with salt." {B} did not want to be worse than a beggar. "Wait here," {Bhe} said, and ran to fetch some. When {Bhe} came back, there was nobody left to salt.',
        '"Of course," said {A}. "But a fine {Bnoun} like you surely washes {Bhis} face before a meal?" {B} was ashamed and began to wash. When {Bhe} had finished, {A} was sitting high up in a tree. Since then {Bhe} has always washed after meals.',
        '"You are right to eat me," said {A}. "I only wonder how {a_hunter} as great as you can fit into that small hole over there. My mother says that it is impossible." "Impossible?" said {B}. "I will show you!" {BHe} pushed {Bhis} head into the hole, and stuck. {A} wished {Bhim} a good day and went home.',
    )
    story.one(
        "Wit is stronger than teeth.",
        "Moral: do not listen to flattery when you are hungry.",
        "A clever head is worth more than sharp claws.",
        "{A} told this story to {Ahis} children, and they told it to theirs.",
        "From then on {A} looked around twice before {Ahe} went out.",
    )
    story.topics += [
        "a fable",
        f"{s['a_prey']} and {s['a_hunter']}",
        f"a clever {prey}",
        f"a hungry {hunter}",
        s["a_prey"],
        s["a_hunter"],
    ]
    story.ask("Who caught the {Anoun}?", "{B} caught {A}.")
    story.ask("Did the {Bnoun} eat the {Anoun}?", "No, the {Anoun} got away.")
    story.ask("Which animals are in the story?", "There are {a_prey} and {a_hunter} in the story.")
    return story


PLOTS = [
    sharing,
    fear,
    broken,
    seed,
    newcomer,
    birthday,
    boaster,
    learning,
    trade,
    old_house,
    rescue_small,
    rainy_day,
    trick,
]
