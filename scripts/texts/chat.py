"""Conversations: a user's turns and right answers."""

from __future__ import annotations

from random import Random

from scripts.texts import words
from scripts.texts.grammar import fill, pick, with_article
from scripts.texts.story import Story

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"

Turns = list[tuple[str, str]]


def render(turns: Turns) -> str:
    """The conversation as the chat template writes it."""
    return "".join(f"{USER}{question}{END}{ASSISTANT}{answer}{END}" for question, answer in turns)


ASKS_STORY = """Tell me a story about {x}.|Write a story about {x}.|Can you tell me a story about {x}?
|Please tell me a story about {x}.|I would like to hear a story about {x}.|Tell me about {x}.|Write a short story about {x}.
|Do you know a story about {x}?|Make up a story about {x}.|Could you write a little story about {x}?|tell me a story about {x}
|A story about {x}, please.""".replace("\n", "").split("|")
ASKS_ANY = """Tell me a story.|Tell me a bedtime story.|Write me a story.|Can you tell me a story?|Do you know a good story?
|Tell me another story.|I cannot sleep. Tell me a story.|Please tell me a short story.|Make up a story for me.""".replace(
    "\n", ""
).split("|")


def ask_for_story(random: Random, story: Story) -> Turns:
    """A story is asked for and told, and sometimes asked about."""
    topic = pick(random, story.topics)
    asked = (
        pick(random, ASKS_ANY)
        if random.random() < 0.15
        else pick(random, ASKS_STORY).format(x=topic)
    )
    turns = [(asked, story.text)]
    if random.random() < 0.3:
        turns += random.sample(story.facts, min(len(story.facts), pick(random, (1, 1, 2))))
    if random.random() < 0.15:
        turns.append(thanks(random))
    return turns


def ask_about_story(random: Random, story: Story) -> Turns:
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


NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty""".split()


def sum_question(random: Random) -> tuple[str, str]:
    """A sum, difference, product or quotient with its answer."""
    kind = pick(random, "++--**/")
    if kind == "+":
        a, b = random.randint(0, 99), random.randint(0, 99)
        words_, answer = ("plus", "+"), a + b
    elif kind == "-":
        a, b = sorted((random.randint(0, 99), random.randint(0, 99)), reverse=True)
        words_, answer = ("minus", "-"), a - b
    elif kind == "*":
        a, b = random.randint(0, 12), random.randint(0, 20)
        a, b = (b, a) if random.random() < 0.5 else (a, b)
        words_, answer = ("times", "×", "*", "multiplied by"), a * b
    else:
        b, answer = random.randint(1, 12), random.randint(0, 12)
        a = b * answer
        words_ = ("divided by", "/")
    sign = pick(random, words_) if random.random() < 0.5 else words_[0]
    form = pick(
        random,
        (
            "What is {e}?",
            "What is {e}?",
            "How much is {e}?",
            "{e} = ?",
            "Calculate {e}.",
            "What's {e}?",
            "Can you tell me what {e} is?",
            "what is {e}",
        ),
    )
    expression = f"{a} {sign} {b}"
    reply = pick(random, ("{a} {w} {b} is {n}.",) * 3 + ("It is {n}.",))
    return form.format(e=expression), reply.format(a=a, w=words_[0], b=b, n=answer)


THINGS = words.listed("""apples, pears, marbles, books, eggs, coins, stamps, flowers, buttons, shells, cookies,
balloons, pencils, stones, cards, oranges, nuts, stickers, plums, toys""")


def word_problem(random: Random) -> tuple[str, str]:
    """A sum told as a little story, with its answer."""
    name, other = random.sample(words.GIRLS, 2)
    he = "she"
    if random.random() < 0.5:
        name, he = pick(random, words.BOYS), "he"
    thing = pick(random, THINGS)
    a, b = random.randint(2, 20), random.randint(2, 20)
    kind = random.randrange(5)
    if kind == 0:
        q, n, e = (
            f"{name} has {a} {thing}. {other} gives {'him' if he == 'he' else 'her'} {b} more. How many {thing} does {name} have now?",
            a + b,
            f"{a} + {b}",
        )
    elif kind == 1:
        a, b = max(a, b) + 1, min(a, b)
        q, n, e = (
            f"{name} has {a} {thing} and gives {b} of them to {other}. How many {thing} does {name} have left?",
            a - b,
            f"{a} - {b}",
        )
    elif kind == 2:
        a, b = random.randint(2, 9), random.randint(2, 9)
        q, n, e = (
            f"There are {a} boxes, and in each box there are {b} {thing}. How many {thing} are there?",
            a * b,
            f"{a} × {b}",
        )
    elif kind == 3:
        b, n = random.randint(2, 9), random.randint(2, 9)
        a = b * n
        q, e = (
            f"{b} children share {a} {thing} equally. How many {thing} does each child get?",
            f"{a} / {b}",
        )
    else:
        a, b = max(a, b) + 1, min(a, b)
        q, n, e = (
            f"{name} has {a} {thing}, and {other} has {b}. How many more {thing} does {name} have than {other}?",
            a - b,
            f"{a} - {b}",
        )
    subject = {
        0: f"{name} has",
        1: f"{name} has",
        2: "There are",
        3: "Each child gets",
        4: f"{name} has",
    }[kind]
    tail = " left" if kind == 1 else f" more {thing} than {other}" if kind == 4 else ""
    noun = "" if kind == 4 else f" {thing}"
    return q, f"{e} = {n}. {subject} {n}{noun}{tail}."


OPPOSITES = words.listed("""hot:cold, big:small, long:short, day:night, happy:sad, old:young, fast:slow, high:low, light:dark,
rich:poor, hard:soft, full:empty, open:closed, early:late, loud:quiet, wet:dry, strong:weak, thick:thin, clean:dirty,
up:down, left:right, good:bad, near:far, wide:narrow, heavy:light, first:last, inside:outside, brave:afraid, true:false,
summer:winter, begin:end, buy:sell, come:go, give:take, laugh:cry, win:lose, question:answer, friend:enemy, above:below""")
CAPITALS = words.listed("""France:Paris, Germany:Berlin, Italy:Rome, Spain:Madrid, Portugal:Lisbon, England:London, Ireland:Dublin,
Austria:Vienna, Greece:Athens, Poland:Warsaw, Norway:Oslo, Sweden:Stockholm, Denmark:Copenhagen, Finland:Helsinki,
Japan:Tokyo, China:Beijing, Egypt:Cairo, Russia:Moscow, Canada:Ottawa, Hungary:Budapest, Belgium:Brussels,
India:New Delhi, Kenya:Nairobi, Peru:Lima, Cuba:Havana, Turkey:Ankara, Mexico:Mexico City, Argentina:Buenos Aires""")
SOUNDS = words.listed("""dog:barks, cat:meows, cow:moos, duck:quacks, lion:roars, sheep:bleats, horse:neighs, pig:grunts,
bee:buzzes, owl:hoots, frog:croaks, wolf:howls, snake:hisses, donkey:brays, mouse:squeaks, crow:caws, hen:clucks""")
LEGS = words.listed("""dog:four, cat:four, bird:two, spider:eight, bee:six, horse:four, snake:no, fish:no, ant:six, human:two,
elephant:four, butterfly:six, duck:two, cow:four, frog:four, mouse:four""")
COLOURED = words.listed("""the sky on a clear day:blue, grass:green, snow:white, a ripe tomato:red, a lemon:yellow, coal:black,
a ripe banana:yellow, chocolate:brown, an orange:orange, milk:white, a frog:green, an elephant:grey, a carrot:orange,
the sun in a picture book:yellow, a crow:black, a flamingo:pink""")
YOUNG = words.listed("""dog:puppy, cat:kitten, cow:calf, horse:foal, sheep:lamb, duck:duckling, hen:chick, bear:cub, goat:kid,
frog:tadpole, pig:piglet, swan:cygnet, deer:fawn, lion:cub, goose:gosling""")
MADE = words.listed("""bread:flour and water, butter:cream, cheese:milk, a window:glass, paper:wood, wine:grapes, jam:fruit and sugar,
an omelette:eggs, a candle:wax, a sweater:wool, a brick:clay, ice:frozen water""")
WHERE = words.listed("""a fish:in the water, a bird:in a nest, a bee:in a hive, a rabbit:in a burrow, a horse:in a stable,
a spider:in a web, a lion:in Africa, a penguin:in the far south, a polar bear:in the far north, a camel:in the desert,
a dog:in a kennel, a king:in a castle, a whale:in the sea, a monkey:in the trees""")
WHO = words.listed("""bakes bread:a baker, catches fish:a fisherman, grows vegetables:a farmer, builds houses:a builder, teaches children:a teacher,
makes clothes:a tailor, mends shoes:a shoemaker, helps sick people:a doctor, flies a plane:a pilot, paints pictures:a painter,
puts out fires:a firefighter, looks after sheep:a shepherd, brings letters:a postman, writes books:a writer,
repairs cars:a mechanic, sells books:a bookseller, cuts hair:a hairdresser, cooks meals:a cook""")
DAYS = words.listed("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
MONTHS = words.listed(
    "January, February, March, April, May, June, July, August, September, October, November, December"
)


def knowledge(random: Random) -> tuple[str, str]:
    """A question that a child can answer."""
    kind = random.randrange(18)
    if kind == 0:
        a, b = pick(random, OPPOSITES).split(":")
        a, b = (a, b) if random.random() < 0.5 or "light" in (a, b) else (b, a)
        return f"What is the opposite of {a}?", f"The opposite of {a} is {b}."
    if kind in (1, 2):
        a, b = pick(random, CAPITALS).split(":")
        return f"What is the capital of {a}?", f"The capital of {a} is {b}."
    if kind == 3:
        a, b = pick(random, SOUNDS).split(":")
        return f"What sound does {with_article(a)} make?", f"{with_article(a).capitalize()} {b}."
    if kind == 4:
        a, b = pick(random, LEGS).split(":")
        return (
            f"How many legs does {with_article(a)} have?",
            f"{with_article(a).capitalize()} has {b} legs.",
        )
    if kind == 5:
        a, b = pick(random, COLOURED).split(":")
        return f"What colour is {a}?", f"{a.capitalize()} is {b}."
    if kind == 6:
        a, b = pick(random, YOUNG).split(":")
        return f"What is a young {a} called?", f"A young {a} is called {with_article(b)}."
    if kind == 7:
        a, b = pick(random, MADE).split(":")
        return f"What is {a} made of?", f"{a.capitalize()} is made of {b}."
    if kind == 8:
        a, b = pick(random, WHERE).split(":")
        return f"Where does {a} live?", f"{a.capitalize()} lives {b}."
    if kind == 9:
        a, b = pick(random, WHO).split(":")
        return f"Who {a}?", f"{b.capitalize()} {a}."
    if kind == 10:
        i = random.randrange(7)
        if random.random() < 0.5:
            return f"What day comes after {DAYS[i]}?", f"{DAYS[(i + 1) % 7]} comes after {DAYS[i]}."
        return f"What day comes before {DAYS[i]}?", f"{DAYS[i - 1]} comes before {DAYS[i]}."
    if kind == 11:
        i = random.randrange(12)
        if random.random() < 0.5:
            return (
                f"What month comes after {MONTHS[i]}?",
                f"{MONTHS[(i + 1) % 12]} comes after {MONTHS[i]}.",
            )
        return f"What month comes before {MONTHS[i]}?", f"{MONTHS[i - 1]} comes before {MONTHS[i]}."
    if kind == 12:
        a, b = random.sample(range(1, 100), 2)
        word, n = ("larger", max(a, b)) if random.random() < 0.5 else ("smaller", min(a, b))
        return f"Which number is {word}, {a} or {b}?", f"{n} is {word}."
    if kind == 13:
        a = random.randint(0, 98)
        if random.random() < 0.5:
            return f"What number comes after {a}?", f"{a + 1} comes after {a}."
        return f"What number comes before {a + 1}?", f"{a} comes before {a + 1}."
    if kind == 14:
        a, step = random.randint(1, 20), random.randint(1, 10)
        row = ", ".join(str(a + step * i) for i in range(4))
        return f"Which number comes next: {row}?", f"The next number is {a + 4 * step}."
    if kind == 15:
        i = random.randrange(21)
        if random.random() < 0.5:
            return f"Write {i} as a word.", f"{i} is {NUMBERS[i]}."
        return f"Write {NUMBERS[i]} as a number.", f"{NUMBERS[i].capitalize()} is {i}."
    if kind == 16:
        n = random.randint(0, 99)
        return f"Is {n} even or odd?", f"{n} is {'odd' if n % 2 else 'even'}."
    questions = words.listed("""How many days are in a week?:There are seven days in a week., How many months are in a year?:There are twelve months in a year.,
How many hours are in a day?:There are 24 hours in a day., How many minutes are in an hour?:There are 60 minutes in an hour.,
How many seasons are there?:There are four seasons: spring; summer; autumn and winter., What do bees make?:Bees make honey.,
What do cows give us?:Cows give us milk., What do we see with?:We see with our eyes., What do we hear with?:We hear with our ears.,
What falls from the sky in winter?:In winter snow falls from the sky., When do leaves fall from the trees?:Leaves fall in autumn.,
What is the biggest animal in the sea?:The biggest animal in the sea is the blue whale., How many fingers does a hand have?:A hand has five fingers.,
What do plants need to grow?:Plants need water and light and good earth., Where does the sun rise?:The sun rises in the east.,
Where does the sun set?:The sun sets in the west., What can you see in the sky at night?:At night you can see the moon and the stars.,
What is ice?:Ice is frozen water., How many legs does a table have?:Most tables have four legs., What do you use to cut paper?:You use scissors to cut paper.,
What do you wear on your feet?:You wear shoes on your feet., What do you wear on your head?:You wear a hat on your head.,
How many wheels does a bicycle have?:A bicycle has two wheels., How many sides does a triangle have?:A triangle has three sides.,
How many sides does a square have?:A square has four sides., What do you call frozen rain?:Frozen rain is called hail or snow.""")
    question, answer = pick(random, questions).split(":", 1)
    return question, answer.replace(";", ",").replace("summer, autumn", "summer, autumn")


JOKES = [
    "Why did the bicycle fall over? Because it was two-tired.",
    "What do you call a bear without teeth? A gummy bear.",
    "Why can't a nose be twelve inches long? Because then it would be a foot.",
    "What do you call cheese that is not yours? Nacho cheese.",
    "Why did the teacher wear sunglasses? Because her pupils were so bright.",
    "What did one wall say to the other wall? I will meet you at the corner.",
    "Why are fish so clever? Because they live in schools.",
    "What has four wheels and flies? A garbage truck.",
    "Why did the clock go to school? It wanted to be on time.",
    "What did the zero say to the eight? Nice belt!",
]
TALK: list[tuple[str, str]] = [
    (
        "[Hello|Hi|Hey|Good morning|Good evening|Hello there|Hi there][!|.|]",
        "[Hello|Hi|Hello there]! [How can I help you?|What can I do for you?|It is nice to meet you. What shall we talk about?|Would you like to hear a story?]",
    ),
    (
        "[How are you?|How are you today?|How do you do?|How is it going?]",
        "[I am fine, thank you.|Very well, thank you.|I am doing well, thanks.] [And how are you?|How can I help you?|What would you like to do?]",
    ),
    (
        "[Who are you?|What are you?|What is your name?|Tell me about yourself.|Are you a robot?]",
        "I am [demo|Demo], a [very small|small] language model. [I was trained on stories and simple questions.|I like to tell stories.|I can tell stories and answer simple questions.]",
    ),
    (
        "[What can you do?|What do you know?|Can you help me?|What are you good at?|Help!]",
        "I can tell you a story, answer simple questions, and do small sums. [What would you like?|Try me: ask for a story about a brave fox.|What shall we begin with?]",
    ),
    (
        "[Thank you|Thanks|Thank you very much|Thanks a lot|That was nice][!|.|]",
        "[You are welcome!|It was a pleasure.|Any time!] [Would you like to hear another story?|Is there anything else I can do?|]",
    ),
    (
        "[Goodbye|Bye|Good night|See you|See you later|Bye bye][!|.|]",
        "[Goodbye!|Good night!|See you soon!|Bye!] [Sleep well.|Take care.|Come back soon.|Have a nice day.]",
    ),
    ("[Tell me a joke.|Do you know a joke?|Make me laugh.|Another joke, please.]", "{joke}"),
    (
        "[I am sad.|I feel sad today.|I am not happy.|I had a bad day.]",
        "[I am sorry to hear that.|Oh, I am sorry.] [Would you like to hear a story? It may cheer you up.|Sometimes it helps to talk to a friend.|Tomorrow is a new day.]",
    ),
    (
        "[I am happy.|I had a good day.|I am so happy today.|Today is my birthday!]",
        "[That is wonderful!|I am glad to hear that!|How nice!] [What happened?|Tell me more about it.|Enjoy every minute of it.]",
    ),
    (
        "[I am bored.|I have nothing to do.|What should I do?]",
        "[Shall I tell you a story?|You could go outside and look at the clouds.|How about a riddle? {riddle}]",
    ),
    (
        "[I am tired.|I cannot sleep.|I want to sleep.]",
        "[Close your eyes and think of something nice.|Count sheep: one, two, three, four...|Shall I tell you a bedtime story?]",
    ),
    (
        "[I am hungry.|What should I eat?|What can I cook?]",
        "How about {food}? [That always tastes good.|I have heard that it is very good.|]",
    ),
    (
        "[Do you like {food}?|Have you ever eaten {food}?]",
        "I am a language model, so I cannot eat. But {food} [must be delicious|sounds very good]!",
    ),
    (
        "[Do you like animals?|What is your favourite animal?|Which animal do you like best?]",
        "I like {animal_s} [best|very much]. [Which animal do you like?|I know many stories about them.]",
    ),
    (
        "[What is your favourite colour?|Which colour do you like best?]",
        "[I like {colour} best.|My favourite colour is {colour}.] [And yours?|What is yours?]",
    ),
    ("[Tell me a riddle.|Do you know a riddle?|Give me a riddle.]", "{riddle}"),
    (
        "My name is {name}.",
        "[Nice to meet you, {name}!|Hello, {name}!] [What can I do for you?|How are you today?]",
    ),
    (
        "[Are you real?|Are you alive?|Are you human?|Do you have feelings?]",
        "No, I am [only a computer program|a small language model]. [But I like to talk with you.|But I know many stories.]",
    ),
    (
        "[What is the weather like?|Is it raining?|How is the weather today?]",
        "I cannot look out of the window. [But I hope that the sun is shining where you are.|Is it {weather} where you are?]",
    ),
    (
        "[What time is it?|What day is it today?|Where am I?|Where do you live?]",
        "I do not know that. I am only a small language model. [But I can tell you a story.|Is there anything else I can do?]",
    ),
    (
        "[Do you love me?|Do you like me?|Are you my friend?]",
        "[I am glad that you talk with me.|I like talking with you.] [Shall we read a story together?|You can ask me anything.]",
    ),
    ("[Yes.|Yes, please.|Sure.|OK.|Okay]", "[Good!|All right!] What would you like to hear?"),
    (
        "[No.|No, thank you.|Not now.]",
        "[All right.|That is fine.] [Just tell me when you need me.|Perhaps later, then.]",
    ),
    (
        "[You are funny.|You are nice.|You are clever.|I like you.]",
        "[Thank you!|That is very kind of you.] [I like talking with you, too.|You are nice, too.]",
    ),
    (
        "[You are stupid.|That is wrong.|I don't like that.]",
        "I am sorry. I am only a small model, and I make mistakes. [Shall we try again?|What can I do better?]",
    ),
]


def talk_slots(random: Random) -> dict[str, str]:
    from scripts.texts.quest import RIDDLES

    animal = pick(
        random,
        [
            "fox",
            "cat",
            "dog",
            "owl",
            "otter",
            "hedgehog",
            "rabbit",
            "bear",
            "squirrel",
            "horse",
            "penguin",
        ],
    )
    return {
        "joke": pick(random, JOKES),
        "riddle": pick(random, RIDDLES)[0],
        "food": pick(random, words.FOODS),
        "animal_s": f"{animal}es" if animal == "fox" else f"{animal}s",
        "colour": pick(random, words.COLOURS),
        "name": pick(random, words.GIRLS + words.BOYS),
        "weather": pick(random, words.WEATHER),
    }


def small_talk(random: Random) -> tuple[str, str]:
    """A turn of small talk."""
    question, answer = pick(random, TALK)
    slots = talk_slots(random)
    question, answer = fill(random, question, slots), fill(random, answer, slots)
    return (question.lower() if random.random() < 0.1 else question), answer


def thanks(random: Random) -> tuple[str, str]:
    question, answer = TALK[4]
    return fill(random, question, {}), fill(random, answer, {})


def riddle_turns(random: Random) -> Turns:
    """A riddle, and its answer in the next turn."""
    from scripts.texts.quest import RIDDLES

    question, answer = pick(random, RIDDLES)
    if random.random() < 0.5:
        return [
            (
                pick(random, ("Tell me a riddle.", "Do you know a riddle?", "Give me a riddle.")),
                question,
            ),
            (
                pick(random, ("I don't know.", "What is it?", "I give up.", "Tell me the answer.")),
                f"It is {answer}.",
            ),
        ]
    return [(question, f"It is {answer}.")]


def conversation(random: Random, make_story) -> str:
    """One conversation. make_story(random) -> Story."""
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


def short_turn(random: Random) -> tuple[str, str]:
    """Any short question with its answer."""
    kind = random.random()
    if kind < 0.45:
        return sum_question(random)
    if kind < 0.57:
        return word_problem(random)
    return knowledge(random) if kind < 0.82 else small_talk(random)
