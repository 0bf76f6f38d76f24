"""Stories of a way: somebody wants something, meets obstacles and reaches the end.

What helps at an obstacle was there before: a thing that was given, an animal that was helped, or a
trait of the hero. So steps of a story depend on one another.
"""

from __future__ import annotations

from random import Random

from scripts.texts import words
from scripts.texts.grammar import fill, pick, with_article
from scripts.texts.people import Person, animal, child, grown_up, other_than, relative
from scripts.texts.story import Story, introduce

LANDS = {
    "forest": {
        "homes": """a small house at the edge of the forest|a village between two forests|a hut under tall pines
|a cottage beside the mill|a hollow oak in the middle of the forest|a quiet village in the woods""",
        "far": """the old oak on the hill|the deep pond behind the mill|the charcoal burner's hut
|the ruined tower|the clearing of the seven stones|the spring under the rocks|the hidden glade|the hunter's lodge""",
        "obstacles": "river dark thorns guard fog hole gate riddle fork rain tree bees",
    },
    "mountain": {
        "homes": """a stone house in the mountains|a village high up in the hills|a farm below the great mountain
|a small hut on a green slope""",
        "far": """the top of the mountain|the cave above the waterfall|the shepherd's hut|the frozen lake
|the old chapel on the ridge|the eagle's nest|the pass between the two peaks""",
        "obstacles": "cliff snow cave fog river wind guard riddle fork hole gate cold",
    },
    "sea": {
        "homes": """a white house by the sea|a fishing village|a harbour town|a small island|a boathouse on the beach""",
        "far": """the lighthouse|the island of birds|the cave under the cliffs|the wreck on the sandbank|the far end of the bay
|the old pier|the rock that looked like a sleeping seal""",
        "obstacles": "cliff fog cave wind rain guard tide gate riddle dark hole birds",
    },
    "town": {
        "homes": """a narrow street in the old town|a tall house near the market square|a flat above the bakery
|a yellow house on Mill Street|a little house beside the railway|a quiet street behind the school""",
        "far": """the clock tower|the railway station|the museum|the old theatre|the garden behind the library|the big park
|the shop at the end of Bridge Lane|the castle above the town""",
        "obstacles": "gate guard crowd rain dark wall riddle fork fog hole wind stairs",
    },
    "farm": {
        "homes": """a farm with a red barn|a small farm by the river|an old farmhouse among the fields|a barn behind the orchard
|a cottage with a kitchen garden""",
        "far": """the windmill|the far meadow|the pond with the water lilies|the neighbours' orchard|the old well
|the market in the next village|the hill with the three birches""",
        "obstacles": "river guard thorns gate hole rain mud fork wall wind bees dark",
    },
}
for _land in LANDS.values():
    for _key in ("homes", "far"):
        _land[_key] = [part.strip() for part in _land[_key].replace("\n", " ").split("|")]
    _land["obstacles"] = _land["obstacles"].split()

# What is met; then who or what helps: (things), (animals), (traits). Each helps in its own words.
OBSTACLES: dict[
    str, tuple[list[str], dict[str, list[str]], dict[str, list[str]], dict[str, list[str]]]
] = {
    "river": (
        [
            "[Soon|Before long|After a while] {he} came to a [wide|fast|deep] river. The bridge had been [washed away|broken by a storm].",
            "Then the path ended at a river. The water was [cold and fast|high and brown], and there was no [bridge|boat] anywhere.",
            "A [wide|rushing] river [crossed|cut across] the path, and [of the old bridge only two posts were left|the bridge was gone].",
        ],
        {
            "rope": [
                "{A} tied the rope to [a strong tree|a thick trunk] and held on to it while {he} waded through the water. [Wet but safe|Dripping wet], {he} [reached|climbed up] the other bank."
            ],
            "axe": [
                "{A} took the little axe and cut down a [thin|dead] tree, so that it fell across the water. Then {he} walked over it [step by step|with both arms stretched out]."
            ],
        },
        {
            "beaver": [
                '"I can help," said the beaver. {Hhe} gnawed through a tree, and it fell [right|straight] across the river. Now there was a bridge.'
            ],
            "otter": [
                'The otter knew [every stone in|all about] that river. "Follow me, and step where I step," {Hhe} said, and [together {they}|so {they}] crossed at the shallow place.'
            ],
            "swan": [
                'The swan [spread|opened] {Hhis} wings. "Hold on to my neck," {Hhe} said, and {Hhe} [pulled|carried] {Aobj} [safely|gently] to the other side.'
            ],
            "horse": [
                '"Climb on my back," said the horse. {Hhe} was tall and strong, and the water only reached {Hhis} knees.'
            ],
        },
        {
            "clever": [
                "{A} looked at the water and thought. Then {he} rolled [big|flat] stones into the river, one after the other, until there was a path of stones to the other side."
            ],
            "patient": [
                "{A} sat down and waited. [By evening|After some hours], the water had sunk so low that {he} could walk across on the stones."
            ],
        },
    ),
    "dark": (
        [
            "[Little by little|Slowly] it grew dark, and [soon {he} could not see the path any more|under the trees {he} could not see {his} own hand].",
            "Night fell [sooner|earlier] than {he} had thought. There was no moon, and [every shadow looked like a monster|strange sounds came from all sides].",
        ],
        {
            "lantern": [
                "{A} lit the lantern. At once the shadows [jumped back|shrank], and the path lay [clear and yellow|bright] before {him}."
            ],
            "candle": [
                "{A} lit the candle and held one hand around the flame. It was only a small light, but it was enough to see the [next step|path]."
            ],
        },
        {
            "owl": [
                '"The dark is my friend," said the owl. {Hhe} flew ahead from branch to branch and called softly, and {A} followed the call.'
            ],
            "bat": [
                'The bat did not need any light. {Hhe} [fluttered|flew] ahead and said "Left!" and "Right!" until the [worst|darkest part] was over.'
            ],
            "cat": [
                'The cat\'s eyes shone like two green lamps. "Hold my tail," {Hhe} [purred|said], and {Hhe} led {Aobj} through the dark.'
            ],
            "mole": [
                '"Dark? What is dark?" asked the mole, who had never seen the sun for long. {Hhe} took {Aobj} by the hand and found the way without any light.'
            ],
        },
        {
            "brave": [
                "{A} was afraid, but {he} [took a deep breath|held {his} head high] and sang [an old song|every song {he} knew]. With each song the night seemed [less dark|smaller], and so {he} walked on."
            ],
            "patient": [
                "{A} [sat down under|leaned against] a tree and waited. After an hour the moon rose, and everything was [silver|bright]."
            ],
        },
    ),
    "thorns": (
        [
            "Then a hedge of thorns blocked the way. It was [as high as a house|higher than a horse], and [every thorn was as long as a finger|nobody could climb over it].",
            "But the path had not been used for years, and [thorns|brambles] grew across it, thick as a wall.",
        ],
        {
            "gloves": [
                "{A} put on the thick gloves and bent the branches aside, one by one. [Not a single thorn|No thorn] scratched {him}."
            ],
            "garden shears": [
                "With the garden shears {A} cut a tunnel through the thorns, [just|only] big enough to crawl through."
            ],
        },
        {
            "hedgehog": [
                '"Thorns? I wear them every day," laughed the hedgehog, and {Hhe} showed {Aobj} a [secret hole|small passage] under the hedge.'
            ],
            "goat": [
                'The goat\'s eyes [shone|lit up]. "Lunch!" {Hhe} said, and {Hhe} ate a path right through the thorns.'
            ],
            "rabbit": [
                'The rabbit [knew|remembered] an old tunnel. "It is narrow, but it is dry," {Hhe} said, and one behind the other {they} crawled under the thorns.'
            ],
        },
        {
            "careful": [
                "{A} moved very slowly and lifted one branch after another. It took a long time, but {he} came through without a scratch."
            ],
            "stubborn": [
                "{A} did not give up. {A} walked along the hedge, all the way to its end, and there {he} found a [gap|narrow gap]."
            ],
        },
    ),
    "guard": (
        [
            "[A huge dog|A big grey dog] stood in the middle of the [path|way]. It growled and showed its teeth, and it did not let anybody pass.",
            "[Suddenly|Then] an angry goose ran towards {Aobj}. It hissed and beat its wings and would not let {him} through.",
            "There, in the middle of the way, stood a [black|bad-tempered] bull with its head down. It [snorted|stamped] and did not move.",
        ],
        {
            "loaf of bread": [
                "{A} broke a piece from the loaf of bread and held it out. The animal [sniffed|came closer], and ate it, and wanted more. Soon it was as gentle as a lamb and let {him} pass."
            ],
            "bag of apples": [
                "{A} took an apple out of the bag and rolled it along the ground. The animal ate it with pleasure, and while it looked for the next one, {A} walked by."
            ],
        },
        {
            "dog": [
                '"Let me talk to that one," said the dog. The two animals [sniffed at|looked at] each other, and after a moment the way was free. "It was only [lonely|frightened]," {Hhe} explained.'
            ],
            "crow": [
                "The crow flew in circles and [cawed|made such a noise] that the animal [ran after {Hhim}|forgot everything else]. Meanwhile {A} slipped past."
            ],
            "mouse": [
                '"Watch this," whispered the mouse, and {Hhe} ran right between the animal\'s legs. It was so surprised that it jumped aside, and the way was free.'
            ],
        },
        {
            "gentle": [
                "{A} did not run away. {He} stood still and spoke in a low, gentle voice, and little by little the animal grew calm and [lay down|stepped aside]."
            ],
            "brave": [
                "{A} wanted to run away, but {he} looked the animal in the eye and walked on, one step after the other. In the end it was the animal that stepped aside."
            ],
        },
    ),
    "fog": (
        [
            "Then fog came up, white and thick as milk. [In a minute|Soon] {he} could see neither the path nor {his} own feet.",
            "A grey fog rolled [in|over the land], and everything looked the same. {He} did not know any more which way was which.",
        ],
        {
            "compass": [
                '{A} looked at the compass. "North is there," {Athought}, and {he} went on in that direction until the fog was behind {him}.'
            ],
            "whistle": [
                "{A} blew the whistle as loudly as {he} could. Somewhere ahead a [shepherd's|watchman's] horn answered, and {he} walked towards the sound until the fog grew thin."
            ],
        },
        {
            "dog": [
                '"My nose does not need eyes," said the dog. {Hhe} put {Hhis} nose to the ground and led {Aobj} out of the fog.'
            ],
            "goose": [
                'The goose flew up above the fog and called down, "A little to the left! Straight on now!" Soon {they} could see the sun again.'
            ],
            "bat": [
                '"I find my way with my ears," said the bat, and {Hhe} flew ahead, [squeaking softly|calling again and again], until the fog was behind {them}.'
            ],
        },
        {
            "patient": [
                "{A} sat down on a stone and waited, for whoever walks in a fog is soon lost. When the sun came through at last, the path was right in front of {him}."
            ],
            "clever": [
                "{A} listened. Far away a stream was murmuring, and a stream always knows its way down to the valley. {He} followed the sound, and [soon|by and by] the fog was gone."
            ],
        },
    ),
    "hole": (
        [
            "But {he} did not look where {he} was going, and [suddenly|crash] the ground gave way. {He} fell into a deep [hole|pit] with [steep|smooth] walls.",
            "All at once the earth broke under {his} feet, and {he} slid down into a deep hole. The walls were too smooth to climb.",
        ],
        {
            "rope": [
                "{A} threw the rope up until it caught on a root. Then {he} pulled {Aself} out, hand over hand."
            ],
            "spade": [
                "With the spade {A} dug steps into the wall of earth, one above the other, and climbed out as if on a staircase."
            ],
        },
        {
            "horse": [
                'The horse let {Hhis} long tail hang down into the hole. "Hold tight!" {Hhe} called, and {Hhe} pulled {Aobj} out [in one go|with a jerk].'
            ],
            "mole": [
                "There was a scratching in the wall, and out came the mole's pink nose. {Hhe} dug a tunnel that led up to the light, and {A} crawled out."
            ],
            "monkey": [
                'The monkey hung head down from a branch and reached out {Hhis} long arms. "Jump!" {Hhe} called, and with one swing {A} was out of the hole.'
            ],
        },
        {
            "clever": [
                "{A} pushed loose earth and stones into one corner, and stamped on them, and pushed more, until the heap was high enough to climb out."
            ],
            "stubborn": [
                "{A} tried to climb out and slid back. {He} tried again, ten times, twenty times. At the twenty-first time {his} fingers found a root, and {he} was out."
            ],
        },
    ),
    "gate": (
        [
            "A high iron gate closed the way, and a [heavy|rusty] lock hung on it.",
            "But the [gate|door] was locked, and [nobody|no one] answered when {he} knocked.",
        ],
        {
            "little key": [
                "Then {A} remembered the little key. {He} put it into the lock and turned it. It [creaked|clicked], and the lock sprang open."
            ],
            "piece of wire": [
                "{A} bent the piece of wire and moved it about in the lock, [left and right|this way and that], until it clicked and opened."
            ],
        },
        {
            "mouse": [
                "The mouse squeezed through the gap under it, found the key on a nail, and pushed it through to {Aobj}. It was the right one."
            ],
            "squirrel": [
                'The squirrel climbed over in no time and opened the bolt from the inside. "Come in!" {Hhe} said.'
            ],
            "crow": [
                '"I saw where they hide the key," said the crow. {Hhe} flew up to the roof and came back with a key in {Hhis} beak.'
            ],
        },
        {
            "curious": [
                "{A} looked at everything very closely. Behind a loose stone beside it lay a key, covered with dust, and it fitted."
            ],
            "careful": [
                "{A} felt along the bars with {his} fingers, one after the other. The last one was loose, and {he} could [slip|squeeze] through."
            ],
        },
    ),
    "fork": (
        [
            "At [a crossroads|a fork in the road], the signpost had fallen over. Three ways led on, and they all looked the same.",
            "Then the path divided into [two|three], and {he} did not know which way to take.",
        ],
        {
            "old map": [
                "{A} unfolded the old map. There was the crossroads, and a [thin|red] line showed the right way: [left, past the big stone|straight on|to the right, along the wall]."
            ],
            "compass": [
                "{A} took out the compass. {He} had to go [east|west|north|south], so {he} took the path that led that way."
            ],
        },
        {
            "swallow": [
                'The swallow rose high into the air and looked down. "Take the left one," {Hhe} called. "The others [end in a swamp|lead back home]!"'
            ],
            "dog": [
                'The dog sniffed at each path. "Only on this one somebody has walked today," {Hhe} said, and {Hhe} was right.'
            ],
            "crow": [
                'The crow flew a little way along each path. "It must be the one on the right," {Hhe} reported. "[I saw chimney smoke|I saw a light] there."'
            ],
        },
        {
            "clever": [
                "{A} looked at the ground. Only one of the ways had fresh wheel tracks, and somebody who drives a cart knows where the road goes. So {he} took that one."
            ],
            "patient": [
                '{A} sat down and waited until an old woman with a basket came by. "The middle one, dear," she said kindly.'
            ],
        },
    ),
    "rain": (
        [
            "Black clouds came up, and it began to rain, [first a little, then in buckets|harder and harder].",
            "[Suddenly|Then] there was thunder, and rain poured down as if somebody had emptied the sea.",
        ],
        {
            "umbrella": [
                "{A} opened the umbrella and walked on under it, dry as a [fish on the stove|biscuit in its tin], while the drops drummed above {him}."
            ],
            "raincoat": [
                "{A} put on the raincoat and pulled the hood over {his} head. The rain could do nothing to {him} now."
            ],
        },
        {
            "bear": [
                '"There is room in my cave," said the bear. {They} sat [side by side|close together], warm and dry, and told each other stories until the rain was over.'
            ],
            "badger": [
                "The badger showed {Aobj} the door of {Hhis} burrow. Inside, there was [mint tea|warm tea], and when the cups were empty, the rain had stopped."
            ],
            "swan": [
                "The swan held one great white wing over {Aobj} like a roof, and not a drop came through."
            ],
        },
        {
            "cheerful": [
                '{A} only laughed. {He} jumped from puddle to puddle and sang against the thunder. "I can only get wet once," {Athought}.'
            ],
            "clever": [
                "{A} picked a [giant|huge] leaf, as wide as a table, and held it over {his} head. It was as good as an umbrella."
            ],
        },
    ),
    "cliff": (
        [
            "The path ended at a cliff. It went straight up, as smooth as a wall.",
            "Before {him} rose a wall of rock, [higher than a tower|three houses high], and there was no way around it.",
        ],
        {
            "rope": [
                "{A} threw the rope around a rock far above, pulled to see if it would hold, and climbed up."
            ],
            "hammer": [
                "With the hammer {A} knocked small steps into the soft stone and climbed up, slowly and carefully."
            ],
        },
        {
            "goat": [
                '"That? That is a staircase," said the goat. {Hhe} showed {Aobj} where to put each foot, and [soon|before long] {they} stood at the top.'
            ],
            "eagle": [
                "The eagle took {Aobj} gently in {Hhis} claws, beat {Hhis} great wings twice, and set {him} down at the top."
            ],
            "monkey": [
                "The monkey climbed ahead and let down a long vine, and {A} pulled {Aself} up along it."
            ],
        },
        {
            "brave": [
                "{Aposs} heart beat fast, but {he} found a crack for {his} fingers and another for {his} toes. {He} did not look down once until {he} was at the top."
            ],
            "patient": [
                "{A} walked along the foot of the cliff for a long time. At last {he} found a narrow path that [goats|mountain goats] had made."
            ],
        },
    ),
    "cave": (
        [
            "The way led through a cave, and it was as black as a sack inside. [Cold air|A cold wind] came out of it.",
            "Then the path went into [a long tunnel|a cave]. After a few steps, there was no light at all.",
        ],
        {
            "lantern": [
                "{A} lit the lantern, and the walls [glittered|sparkled] like a thousand stars. With the light it was not even far to the other end."
            ],
            "ball of wool": [
                "{A} tied the end of the ball of wool to a rock and let it run through {his} fingers. Twice {he} went the wrong way, and twice the thread led {him} back. Then {he} saw daylight."
            ],
        },
        {
            "bat": [
                '"I live here," said the bat. "Hold on to my voice!" And {Hhe} called softly from the dark until {they} came out at the other end.'
            ],
            "firefly": [
                "The firefly lit {Hhis} little lamp and flew ahead. It was a very small light, but in so much darkness it was [as good as the sun|enough]."
            ],
            "mole": [
                "The mole walked through the dark as other people walk through their kitchen, and {A} held on to {Hhis} soft coat."
            ],
        },
        {
            "brave": [
                "{A} laid one hand on the wall and went in. {His} knees shook, but {he} did not stop until {he} saw a grey spot, and then a bright one, and then the sky."
            ],
            "careful": [
                "{A} felt the ground with {his} foot before each step. Once {he} felt nothing there, and was glad to have been careful. {He} went around the gap and came out safely."
            ],
        },
    ),
    "wind": (
        [
            "The wind grew stronger and stronger, until {he} could hardly [stand|keep on {his} feet].",
            "A storm came up. It pulled at {his} clothes and pushed {him} back two steps for every three.",
        ],
        {
            "rope": [
                "{A} tied {Aself} to [a rock|a post] with the rope and waited. The storm howled for an hour, but it could not carry {him} off."
            ],
            "heavy stone": [
                "{A} put the heavy stone in {his} pocket. Now the wind could pull as it liked, {he} stayed on the ground."
            ],
        },
        {
            "bear": [
                "The bear walked in front, broad as a barn door, and {A} walked behind {Hhim}, where there was no wind at all."
            ],
            "donkey": [
                '"Wind?" said the donkey. "I am more stubborn than any wind." {A} held on to {Hhis} tail, and step by step {they} came through the storm.'
            ],
            "badger": [
                '"Quick, down here!" called the badger, and {they} sat in {Hhis} burrow until the storm had passed.'
            ],
        },
        {
            "stubborn": [
                "{A} bent low, shut {his} eyes and pushed on. The wind was stubborn, but {A} was more stubborn still."
            ],
            "clever": [
                "{A} saw that behind the wall there was hardly any wind. So {he} went along it, bent low, from one shelter to the next."
            ],
        },
    ),
    "snow": (
        [
            "Higher up there was snow, so deep that {he} sank in to {his} [knees|waist] at every step.",
            "It began to snow, in thick soft flakes, and soon [the path was gone|there was no path any more].",
        ],
        {
            "snowshoes": [
                "{A} put on the snowshoes, and now {he} walked on top of the snow as if it were a carpet."
            ],
            "sledge": [
                "{A} sat down on the sledge and pushed off, and it flew over the snow, faster than any horse."
            ],
        },
        {
            "hare": [
                '"Step where I jump," said the hare, who knew where the snow was hard. So {they} crossed the white field in a zigzag.'
            ],
            "bear": [
                "The bear ploughed through the snow like a ship through the waves, and {A} only had to follow in the track."
            ],
            "horse": [
                '"Up with you," said the horse, and {Hhe} trotted through the snow so that it sprayed on both sides.'
            ],
        },
        {
            "stubborn": [
                "{A} counted {his} steps: ten steps, then a rest, and ten steps again. So {he} crossed the snow, slowly, but {he} crossed it."
            ],
            "clever": [
                "{A} broke two wide branches from a fir and tied them under {his} feet. Now {he} did not sink in any more."
            ],
        },
    ),
    "cold": (
        [
            "It grew so cold that {his} breath froze, and {his} fingers would not bend any more.",
            "An icy cold came down from the peaks, and {he} began to shiver from head to foot.",
        ],
        {
            "warm blanket": [
                "{A} wrapped the warm blanket around {his} shoulders, twice around, and soon felt as if {he} were sitting beside a stove."
            ],
            "box of matches": [
                "{A} gathered dry twigs and lit them with the last match but one. The little fire crackled, and {he} warmed {his} hands until they could bend again."
            ],
        },
        {
            "sheep": [
                '"Come close," said the sheep. {Hhis} wool was thick and warm, and after a while {A} did not feel the cold any more.'
            ],
            "bear": ["The bear put {Hhis} big furry arms around {Aobj}. It was as warm as a bed."],
            "dog": [
                "The dog lay down on {Aposs} feet, and the warmth crept from the toes up to the nose."
            ],
        },
        {
            "cheerful": [
                "{A} began to dance. {He} hopped and clapped and sang until {his} cheeks were red and {his} fingers warm."
            ],
            "stubborn": [
                "{A} walked faster and faster, and did not let {Aself} sit down, because {he} knew that in such cold one must keep moving."
            ],
        },
    ),
    "tide": (
        [
            "The way led along the beach, but the tide was coming in, and the waves already reached the rocks.",
            "When {he} looked around, the sea had come up on all sides, and {he} stood on a small island of sand.",
        ],
        {
            "little raft": [
                "{A} pushed the little raft into the water, lay down on it and paddled with both hands to the dry land."
            ],
            "rope": [
                "{A} threw the loop of the rope over a post on the pier and pulled {Aself} through the water to the steps."
            ],
        },
        {
            "seal": [
                '"Hop on," said the seal, and {Hhe} swam to the shore so smoothly that {A} hardly got wet.'
            ],
            "turtle": [
                "The turtle's shell came up beside {Aobj} like a round table. {Hhe} was not fast, but {Hhe} never sank."
            ],
            "seagull": [
                "The seagull called the fishermen, circling above their boat until they understood, and they came and took {Aobj} on board."
            ],
        },
        {
            "patient": [
                "{A} climbed onto the highest rock and waited there. The sea came up, and it stayed, and it went down again, as it always does."
            ],
            "brave": [
                "{A} could swim a little. {He} took a deep breath, jumped in, and swam with all {his} strength until there was sand under {his} feet."
            ],
        },
    ),
    "crowd": (
        [
            "But it was market day. The streets were full of people and carts, and nobody moved [forward or back|at all].",
            "A parade was coming down the street, with drums and flags, and such a crowd that {he} could not get through.",
        ],
        {
            "bell": [
                '{A} rang the bell as hard as {he} could. "Make way, please!" {Acried}. Everybody thought that it was the fire engine and stepped aside.'
            ],
            "old map": [
                "{A} looked at the old map. There was a narrow lane behind the houses that hardly anybody knew, and it was quite empty."
            ],
        },
        {
            "cat": [
                '"We cats go over the roofs," said the cat, and {Hhe} led {Aobj} up a ladder and along the warm tiles, above all the hats.'
            ],
            "pigeon": [
                'The pigeon looked at it all from above. "Second lane on the left is empty!" {Hhe} called.'
            ],
            "donkey": [
                "The donkey brayed so loudly that everybody covered their ears and made room."
            ],
        },
        {
            "friendly": [
                '{A} smiled and said "Excuse me, please" to each person, one after the other. It is strange how far one can get with that. Soon {he} was through.'
            ],
            "patient": [
                "{A} sat down on the steps of the fountain and waited until the last cart had gone by."
            ],
        },
    ),
    "wall": (
        [
            "A high wall stood in the way. It had no door, and it was too smooth to climb.",
            "Then {he} stood before a stone wall, twice as tall as a man.",
        ],
        {
            "rope": [
                "{A} threw the rope over a branch that hung down on the other side, and climbed up, and slid down."
            ],
            "small ladder": [
                "{A} leaned the small ladder against the wall. It was just long enough."
            ],
        },
        {
            "horse": [
                '"Stand on my back," said the horse. From there it was easy to reach the top of the wall.'
            ],
            "cat": [
                'The cat ran along the foot of the wall until {Hhe} found a place where [ivy grew|the stones were loose]. "Here you can climb," {Hhe} said.'
            ],
            "mole": [
                '"Over it? Why not under it?" asked the mole, and {Hhe} dug until there was a tunnel wide enough for two.'
            ],
        },
        {
            "clever": [
                "{A} rolled an empty barrel to the wall, put a box on top of it, and climbed over."
            ],
            "curious": [
                "{A} pushed away the ivy, only to see what was behind it, and found a little wooden door that everyone had forgotten."
            ],
        },
    ),
    "stairs": (
        [
            "Inside there was a staircase with more than three hundred steps, and half of them were [broken|missing].",
            "The stairs were old and rotten, and in the middle a whole piece was missing.",
        ],
        {
            "rope": ["{A} threw the rope around the railing above and swung across the gap."],
            "wooden board": [
                "{A} laid the wooden board over the gap and walked across with careful steps."
            ],
        },
        {
            "cat": [
                'The cat jumped ahead. "This one holds. This one does not," {Hhe} said of each step, and so {they} came to the top.'
            ],
            "crow": [
                "The crow flew up and dropped the end of a long cord that was hanging there. With its help {A} climbed over the gap."
            ],
            "squirrel": [
                "The squirrel ran up and down along the wall until {Hhe} had found a safe way, close to the stones."
            ],
        },
        {
            "careful": [
                "{A} tested every step with one foot before {he} put the other one on it. It took a quarter of an hour, but {he} did not fall."
            ],
            "brave": [
                "{A} took three steps back, ran, and jumped. For a moment there was nothing under {him}. Then {he} landed on the other side."
            ],
        },
    ),
    "mud": (
        [
            "After the rain the field was one single swamp, and {he} sank into the mud to {his} ankles, then to {his} knees.",
            "The road was so muddy that {he} could not pull {his} feet out any more.",
        ],
        {
            "wooden board": [
                "{A} laid the wooden board on the mud and walked along it, then pulled it after {him} and laid it down again, until the ground was dry."
            ],
            "rope": [
                "{A} threw the loop of the rope around a fence post and pulled {Aself} out, and both boots came too."
            ],
        },
        {
            "duck": [
                '"Mud is only thick water," said the duck, and {Hhe} showed {Aobj} where [tufts of grass|flat stones] were hidden under it.'
            ],
            "ox": ["The ox let {Aobj} hold on to {Hhis} horns, and with one pull {A} was free."],
            "frog": [
                '"Hop where I hop," said the frog. From one grassy spot to the next {they} hopped across.'
            ],
        },
        {
            "clever": [
                "{A} broke branches from the bushes and laid them on the mud like a carpet. On those {he} walked across."
            ],
            "cheerful": [
                '{A} laughed, left {his} shoes where they were, and waded through barefoot. "Mud can be washed off," {Athought}.'
            ],
        },
    ),
    "bees": (
        [
            "From a hollow tree came a swarm of bees. They buzzed angrily, and they were everywhere.",
            "{He} had come too close to a bees' nest, and now a black cloud hummed around {his} head.",
        ],
        {
            "warm blanket": [
                "{A} pulled the warm blanket over {his} head and crept on under it until the humming was far behind {him}."
            ],
            "jar of honey": [
                "{A} opened the jar of honey and put it on a stone. Not one of the bees cared about {him} any more."
            ],
        },
        {
            "bear": [
                '"Bees!" said the bear happily. They could not sting through {Hhis} thick fur, and all of them flew after {Hhim} while {A} went on.'
            ],
            "frog": [
                '"Into the pond!" cried the frog. {They} held {their} breath under the water until the bees had gone.'
            ],
        },
        {
            "patient": [
                "{A} stood as still as a tree. The bees buzzed around {him}, found nothing interesting, and flew home."
            ],
            "careful": [
                "{A} took a few slow steps back, without any noise, and walked around the tree in a wide circle."
            ],
        },
    ),
    "birds": (
        [
            "A swarm of gulls came down, screaming, and pecked at {his} head and hands.",
            "The gulls thought that {he} had come for their eggs, and flew at {him} from all sides.",
        ],
        {
            "umbrella": [
                "{A} opened the umbrella and held it over {his} head like a shield. The gulls scolded, but they could not reach {him}."
            ],
            "loaf of bread": [
                "{A} threw crumbs from the loaf of bread as far as {he} could. The gulls rushed after them, and the way was free."
            ],
        },
        {
            "seagull": [
                '"Leave my friend alone!" cried the seagull. The others were ashamed and flew away.'
            ],
            "eagle": [
                "The eagle's shadow passed over the rocks, and in a moment every gull was gone."
            ],
        },
        {
            "gentle": [
                '{A} sat down and kept very still. "I do not want your eggs," {he} said softly. After a while the gulls believed it.'
            ],
            "careful": [
                "{A} saw where the nests were and walked around them in a wide circle. Then the gulls were quiet."
            ],
        },
    ),
    "tree": (
        [
            "A giant tree had fallen across the path, with so many branches that there was no way through or over it.",
            "The storm had thrown a huge tree on the path, and it was too thick to climb.",
        ],
        {
            "saw": [
                "{A} took the saw and cut off one branch, and another, until there was a gap to slip through."
            ],
            "axe": [
                "With the little axe {A} chopped away the branches, one by one. Then {he} climbed over the trunk."
            ],
        },
        {
            "beaver": [
                '"Nice wood," said the beaver. {Hhe} gnawed for a while, and there was a gap, just right to walk through.'
            ],
            "elephant": [
                "The elephant put {Hhis} trunk around the tree and laid it aside as if it were a matchstick."
            ],
            "badger": ["The badger dug a hollow under the trunk, and {they} crawled through it."],
        },
        {
            "curious": [
                "{A} found that the trunk was hollow, and that one could crawl from one end to the other. So {he} went neither over it nor around it, but through it."
            ],
            "stubborn": [
                "{A} pushed and pulled at one branch after another until there was room. {His} hands were sore, but the way was free."
            ],
        },
    ),
}
RIDDLES = [
    ("What has hands but cannot clap?", "a clock"),
    ("What has teeth but cannot bite?", "a comb"),
    ("What has one eye but cannot see?", "a needle"),
    ("What gets wetter the more it dries?", "a towel"),
    ("What goes up but never comes down?", "your age"),
    ("What has a neck but no head?", "a bottle"),
    ("What runs but has no legs?", "a river"),
    ("What is full of holes and still holds water?", "a sponge"),
    ("What has legs but cannot walk?", "a table"),
    ("What grows bigger the more you take away from it?", "a hole"),
    ("What can fill a whole room and still weighs nothing?", "light"),
    ("What can you break without touching it?", "a promise"),
    ("What has leaves but is no tree?", "a book"),
    ("What has a bed but never sleeps?", "a river"),
    ("What follows you all day and leaves you at night?", "your shadow"),
    ("What belongs to you, but other people use it more than you do?", "your name"),
]
KEEPERS = [
    "an old man with a long beard",
    "a woman in a grey cloak",
    "a tall watchman",
    "a tiny man with a green hat",
    "an old woman with bright eyes",
]
THINGS = sorted({thing for o in OBSTACLES.values() for thing in o[1]})
HELPERS = sorted({name for o in OBSTACLES.values() for name in o[2]})

TROUBLES = [
    (
        "[caught in a net|caught in an old net]",
        "{A} [knelt down and opened the knots|untied the knots], one after the other, until {the_helper} was free.",
    ),
    (
        "with a thorn in {Hhis} foot",
        "{A} [held the foot gently|spoke softly] and pulled out the thorn [with two fingers|with one quick pull].",
    ),
    (
        "who had not eaten for two days",
        "{A} [shared {his} lunch with {Hhim}|gave {Hhim} half of {his} lunch] at once.",
    ),
    (
        "stuck between two [rocks|roots]",
        "{A} pushed with all {his} strength until the gap was wide enough.",
    ),
    (
        "shivering in the [grass|leaves]",
        "{A} rubbed {Hhim} warm with {his} scarf and waited until {Hhe} felt better.",
    ),
    (
        "who was [so thirsty that {Hhe} could hardly speak|too thirsty to speak]",
        "{A} fetched water from a stream in {his} cap and let {Hhim} drink.",
    ),
    (
        "who had lost {Hhis} way",
        "{A} [listened to {Hhim}|dried {Hhis} tears] and [showed {Hhim} the right road|told {Hhim} not to worry].",
    ),
    (
        "with one leg under a fallen branch",
        "{A} lifted the branch, though it was heavy, and {the_helper} pulled the leg out.",
    ),
]

PAIRS = {
    "gloves": "a pair of thick gloves",
    "garden shears": "a pair of garden shears",
    "snowshoes": "a pair of snowshoes",
    "axe": "a little axe",
}
PAWED = """fox, rabbit, mouse, hedgehog, squirrel, badger, bear, otter, beaver, mole, hare, raccoon, cat, kitten, puppy,
monkey, hamster, koala, panda, wolf, dog"""
PAWED_NOUNS = words.listed(PAWED)
SMALL_HELPERS = ("firefly", "bat", "swallow", "crow", "pigeon", "seagull")


def make_hero(random: Random, trait: str) -> Person:
    """A child, or now and then the teller or an animal."""
    chance = random.random()
    if chance < 0.12:
        hero = child(random, teller=True)
    elif chance < 0.6:
        hero = child(random)
    else:
        hero = animal(random)
        while hero.noun not in PAWED_NOUNS:
            hero = animal(random)
    return Person(hero.name, hero.noun, hero.gender, trait, hero.is_animal)


def with_paws(text: str) -> str:
    """The text with paws instead of hands."""
    for hand, paw in (("fingers", "paws"), ("hands", "paws"), ("hand ", "paw "), ("hand.", "paw.")):
        text = text.replace(f" {hand}", f" {paw}")
    return text


# Of each goal: what begins it, how it is found at {far}, how it ends, topics, and questions.
GOALS = [
    {
        "key": "lost",
        "begin": [
            'One {time}, {Aposs} {treasure} was gone. {A} had had it since {he} was very little, and {he} loved it more than anything else. {He} looked under the bed, behind the door and in every [corner|drawer], but {he} could not find it. "[A magpie|A black bird] flew away with something [shiny|in its claws]," said a neighbour. "It flew towards {far}."',
            '{A} owned only one thing that {he} really loved: {a_treasure}, a present from {his} {kin}. But one {time} the wind took it out of {his} hands and carried it off, over the roofs, towards {far}. "I must get it back," {Asaid}.',
        ],
        "why": "to find the lost {treasure}",
        "arrive": [
            "At last {he} reached {far}. And there, [between two stones|in the grass|on a low branch], lay {his} {treasure}, a little [dusty|wet], but [not broken|quite whole]. {A} [pressed|held] it to {his} heart and could not say a word.",
            "Finally {A} stood before {far}. {He} searched for a long time. Then something [glittered|moved] in the [last light|grass]: it was the {treasure}! {A} was so happy that {he} [danced|jumped] on the spot.",
        ],
        "end": [
            "On the way home {he} held the {treasure} [very tightly|with both hands]. From that day on {he} [always put it in a safe place|never let it out of {his} sight].",
            "When {he} was home again, {he} put the {treasure} in its old place. It looked the same as ever, but to {A} it was worth twice as much as before.",
        ],
        "topics": [
            "{a_noun} who lost {a_treasure}",
            "a lost {treasure}",
            "{a_hero} and {a_treasure}",
        ],
        "asks": [
            ("What did {Acall} lose?", "{Acall} lost {a_treasure}."),
            ("Where was the {treasure}?", "The {treasure} was at {far}."),
        ],
    },
    {
        "key": "medicine",
        "begin": [
            'One {time}, {Aposs} {kin} fell ill. {Khe} lay in bed with a hot forehead and did not want to eat. "Only [tea made from|a drink made from] the {colour} {flower} can help," said the [doctor|old healer]. "But it grows only near {far}." "Then I will go and fetch it," {Asaid}.',
            'But {Aposs} {kin} was ill and grew weaker every day. A wise woman said, "Near {far} grows {a_colour} {flower}. Whoever drinks tea made from it gets well." {A} did not [think twice|wait a minute]. {He} packed some bread and set out.',
        ],
        "why": "to find the {colour} {flower} for {his} {kin}",
        "arrive": [
            "And then {he} was there, near {far}. [Among the stones|In the shade] a single {colour} {flower} was in bloom. {A} picked it very carefully and wrapped it in a wet cloth.",
            "At last {A} saw {far} in front of {him}. And all around it, {colour} {flower_s} were growing, as many as stars in the sky. {A} took only one, because one was enough.",
        ],
        "end": [
            'At home {A} made tea from the {flower}. {Aposs} {kin} drank one cup, then another, and slept all night. In the morning {Khe} sat up in bed and said, "I am hungry!" [Never had {A} heard anything more beautiful|{A} laughed and cried at the same time].',
            '{He} ran home as fast as {he} could. {Aposs} {kin} drank the tea, and already the next day {Khe} could stand up again. "You have saved me," {Khe} said, and took {Aobj} in {Khis} arms.',
        ],
        "topics": ["{a_noun} who looked for {a_flower}", "a sick {kin}", "{a_colour} {flower}"],
        "asks": [
            ("Who was ill?", "{Aname_poss} {kin} was ill."),
            ("What did {Acall} look for?", "{Acall} looked for {a_colour} {flower}."),
            ("Where did the {flower} grow?", "It grew near {far}."),
        ],
    },
    {
        "key": "deliver",
        "begin": [
            'One {time}, {Aposs} {kin} put a {parcel} into {his} hands. "Please take this to the {worker} at {far}," {Khe} said. "[It must be there before evening|But be careful with it], and do not open it on the way." {A} promised.',
            '"Who will take this {parcel} to the {worker} at {far}?" asked {Aposs} {kin}. "I will!" {Acried}. {He} had never gone so far alone, and {his} heart beat with joy.',
        ],
        "why": "to take the {parcel} to the {worker} at {far}",
        "arrive": [
            'Just as the sun was going down, {A} came to {far}. The {worker} stood at the door and smiled. "For me?" {Whe} asked, and opened the {parcel}. Inside [was|there was] {a_content}. "That is just what I needed," {Whe} said.',
            'The {worker} was already waiting at {far}. {Whe} [took|opened] the {parcel} and found {a_content} in it. "How did you get here all alone?" {Whe} asked, and {A} told {Whim} everything.',
        ],
        "end": [
            'The {worker} gave {Aobj} [a warm supper|a cup of hot milk] and a coin, and took {him} home in a cart. "I knew that I could rely on you," said {Aposs} {kin}.',
            'Late in the evening {A} was home again. "Well?" asked {Aposs} {kin}. "Delivered," {Asaid}, and {he} felt a little taller than in the morning.',
        ],
        "topics": [
            "{a_noun} who carried a {parcel}",
            "a {parcel} for the {worker}",
            "{a_hero} and the {worker}",
        ],
        "asks": [
            ("Who was the {parcel} for?", "The {parcel} was for the {worker}."),
            ("What was in the {parcel}?", "There was {a_content} in the {parcel}."),
            ("Where did the {worker} wait?", "The {worker} waited at {far}."),
        ],
    },
    {
        "key": "missing",
        "begin": [
            'One {time}, {Aposs} best friend, {a_friend_noun} named {F}, did not come to play. {F} was not at home, and nobody had seen {Fhim} since the day before. In the soft ground {A} found {Fhis} tracks. They led towards {far}. "I must find {Fhim}," {Asaid}.',
            '{A} had a friend, {a_friend_noun} named {F}, and the two did everything together. But one {time} {F} [disappeared|was gone]. "{Fhe} wanted to see {far}," said a sparrow. "{Fhe} has not come back." {A} was frightened, and set out at once.',
        ],
        "why": "to find {his} friend {F}",
        "arrive": [
            'Near {far} {A} heard a weak voice. "Is somebody there?" It was {F}! {Fhe} had hurt {Fhis} leg and could not walk. "I knew that you would come," {Fhe} said. {A} bandaged the leg with {his} scarf and helped {Fhim} up.',
            'And there, at {far}, sat {F}, hungry and tired, but alive. "I lost my way," {Fhe} said in a small voice, "and then I was too afraid to move." {A} put both arms around {Fhim}. "Now there are two of us," {he} said.',
        ],
        "end": [
            "Leaning on each other, the two friends went home, and everybody came out to meet them. Since then {they} have gone on all {their} adventures together.",
            "It was dark when {they} came home. {They} ate three plates of {food} each and fell asleep at the table.",
        ],
        "topics": [
            "{a_noun} who looked for a friend",
            "two friends, {A_F}",
            "{a_friend_noun} who was lost",
        ],
        "asks": [
            ("Who was missing?", "{F}, {a_friend_noun}, was missing."),
            ("Who was {Aname_poss} best friend?", "{Aname_poss} best friend was {F}."),
            ("Where did {Acall} find {F}?", "{Acall} found {F} at {far}."),
        ],
    },
    {
        "key": "treasure",
        "begin": [
            'One {time}, {A} found a [yellow|crumpled] piece of paper in an old {container}. It was a map! A red cross marked a spot near {far}, and beside it somebody had written: "Here lies the best thing in the world." "A treasure!" {Acried}.',
            'In the attic of the house {A} found {a_treasure}, and inside it a note: "Dig at {far}, three steps to the north." {Aposs} eyes grew wide. "A treasure!" {he} whispered.',
        ],
        "why": "to find the treasure",
        "arrive": [
            'At {far} {A} began to dig. After a while {he} struck something hard. It was a wooden box! {He} opened it with trembling fingers. There was no gold in it, only {a_content} and a letter: "The best thing in the world is the way here, and the friends you make on it." First {A} was disappointed. Then {he} [laughed|smiled], because it was true.',
            "When {A} had found the right spot near {far}, {he} dug until {his} arms hurt. Then a chest came to light, full of old [silver coins|gold coins]. They shone as if they had been waiting for the sun.",
        ],
        "end": [
            "{He} took the treasure home and shared it with everybody {he} loved. And the map? {He} drew a new one, and hid it for the next finder.",
            "At home {A} told the story so often that in the end even the [hens|neighbours' cat] knew it by heart.",
        ],
        "topics": [
            "a treasure",
            "a treasure map",
            "{a_noun} who found a map",
            "{a_hero} and a treasure",
        ],
        "asks": [
            ("Where was the treasure?", "The treasure was at {far}."),
            ("What did {Acall} want to find?", "{Acall} wanted to find a treasure."),
        ],
    },
    {
        "key": "noise",
        "begin": [
            'Every night a strange sound came from {far}. It went "[Hoo-oo|Tock, tock, tock|Eeee-oo]", and nobody could sleep. "It is a ghost," said [some|the neighbours]. "It is a monster," said others. "I will go and see," {Asaid}.',
            'For a week, a light had been seen at {far} every night, though nobody lived there. Everyone talked about it, but no one dared to go near. {A} could not stand it any longer. "I want to know what it is," {he} said, and {he} set out.',
        ],
        "why": "to find out what was happening at {far}",
        "arrive": [
            'At {far}, {A} hid behind a [stone|barrel] and waited. At midnight the thing began again. {A} crept closer, and what did {he} see? It was only {a_worker}, who had moved in there and was working by night on a surprise for the whole town: {a_big_thing}. "Please don\'t tell anyone yet," said the {worker}. "It will be ready on Sunday."',
            '{A} came to {far} and looked in. There was no ghost and no monster. There sat a small {young}, all alone, who was trying to call {Yhis} mother and had nothing but an old {treasure} to play with. "Don\'t be afraid," {A} said softly. "You are coming home with me."',
        ],
        "end": [
            "From then on everybody slept well again. And when somebody spoke of ghosts, {A} only smiled.",
            '"And what was it?" asked everyone the next morning. "Nothing to be afraid of," {Asaid}. "Most things are not, when you look at them closely."',
        ],
        "topics": [
            "a strange noise",
            "a mystery",
            "{a_hero} and a ghost that was no ghost",
            "a light in the night",
        ],
        "asks": [
            ("Where did {Acall} want to go?", "{Acall} wanted to go to {far}."),
            ("Was there really a ghost?", "No, there was no ghost."),
        ],
    },
    {
        "key": "feast",
        "begin": [
            "There was going to be a big [feast|party], and everybody was to bring something. {A} wanted to make {food}, as {his} {kin} had taught {him}. But the most important thing was missing: [a pinch of|a spoonful of] {spice}, and that could be found only at {far}. So {A} took a small bag and set out.",
            'The next day was the birthday of {Aposs} {kin}, and {Khe} loved {food} more than anything. "For that I need {spice}," {Athought}. "And the only {spice} for miles around is at {far}." Before the sun was up, {he} was on the way.',
        ],
        "why": "to get {spice} for {his} {food}",
        "arrive": [
            'At {far} an old {worker} [sat in the sun|was just closing {Whis} bag]. "{Spice}?" {Whe} said. "Take as much as you need." {A} filled {his} little bag and thanked {Whim} with all {his} heart.',
            "And there, beside {far}, {A} found what {he} had been looking for: {spice}, as much as {he} could carry. {He} filled the bag to the top.",
        ],
        "end": [
            'In the evening the {food} stood on the table, and everything smelled so good that everybody came running. "I have never eaten anything better," said {Aposs} {kin}, and took a third piece.',
            "{A} cooked and stirred and tasted until everything was ready. When the guests had eaten, not a crumb of the {food} was left, and that was the best praise of all.",
        ],
        "topics": [
            "{food}",
            "a feast",
            "{a_noun} who wanted to make {food}",
            "{a_hero} who cooked for a {kin}",
        ],
        "asks": [
            ("What did {Acall} want to make?", "{Acall} wanted to make {food}."),
            ("What did {Acall} need?", "{Acall} needed {spice}."),
            ("Where was the {spice}?", "The {spice} was at {far}."),
        ],
    },
    {
        "key": "wish",
        "begin": [
            '{A} had one great wish. {He} wanted to see {sight} from {far}, of which {his} {kin} had told {him} so often. "You are still too small," everybody said. But one {time} {A} got up, put on {his} shoes and left.',
            '"Have you ever seen {sight}?" an old {worker} had asked {Aobj}. "From {far} it is more beautiful than anything." After that {A} could think of nothing else. One {time} {he} set out to see it with {his} own eyes.',
        ],
        "why": "to see {sight} from {far}",
        "arrive": [
            "Then {A} stood at {far}, and {he} saw it: {sight}. It was larger and more beautiful than in all the stories. {He} sat down and looked until {his} eyes were quite full.",
            '{He} came to {far} just in time. There it was: {sight}. {A} forgot {his} tired feet. ["So it is true," {he} whispered.|For a long time {he} did not say a word.]',
        ],
        "end": [
            "Even many years later {A} only had to close {his} eyes to see it again.",
            'When {he} came home, everybody asked what it had been like. {A} searched for words. "You have to go there yourselves," {he} said at last. "I will show you the way."',
        ],
        "topics": ["a wish", "{a_noun} with a great wish", "{a_hero} who wanted to see {sight}"],
        "asks": [
            ("What did {Acall} want to see?", "{Acall} wanted to see {sight}."),
            ("Where did {Acall} go?", "{Acall} went to {far}."),
        ],
    },
    {
        "key": "return",
        "begin": [
            'One {time}, {A} found {a_treasure} lying in the [grass|road]. {He} would have liked to keep it. But on the back there was a name: it belonged to the {worker} who lived at {far}. "Somebody is missing it," {Athought}, and {he} decided to take it back.',
            '{A_worker} had stayed for one night in the house and had forgotten {Whis} {treasure}. "{Whe} lives at {far}," said {Aposs} {kin}. "It is too far to go." But {A} had already put on {his} cap. "Not for me," {he} said.',
        ],
        "why": "to give the {treasure} back to the {worker}",
        "arrive": [
            'The {worker} was sitting at {far} with {Whis} head in {Whis} hands. When {Whe} saw the {treasure}, {Whis} whole face lit up. "It was my mother\'s," {Whe} said. "I thought I would never see it again."',
            '{A} knocked at the door at {far}, and the {worker} opened. "My {treasure}!" {Whe} cried. "You have come all this way to bring it to me?" {WHe} did not know whether to laugh or to cry.',
        ],
        "end": [
            '"I have no gold to give you," said the {worker}, "but I will teach you what I know." So {A} learned to [sing|work with wood|read the stars|whistle like a bird], and that was worth more than gold.',
            "{A} went home with empty hands and a full heart. {He} had lost a {treasure} and found a friend.",
        ],
        "topics": [
            "an honest {Anoun}",
            "{a_noun} who found {a_treasure}",
            "{a_hero} and the {worker}",
        ],
        "asks": [
            ("What did {Acall} bring back?", "{Acall} brought back {a_treasure}."),
            ("Who did the {treasure} belong to?", "It belonged to the {worker}."),
            ("Where did the {worker} live?", "The {worker} lived at {far}."),
        ],
    },
]
SIGHTS = [
    "the sunrise over the sea",
    "the first snow on the peaks",
    "the wild geese flying south",
    "the great ships coming home",
    "the stars falling in August",
    "a thousand fireflies dancing",
    "the whole country like a map",
    "the northern lights",
    "the rainbow after the storm",
    "the full moon rising",
    "the herd of white horses",
    "the wide blue sea",
]
SPICES = [
    "cinnamon",
    "honey",
    "vanilla",
    "salt",
    "nutmeg",
    "ginger",
    "wild thyme",
    "sugar",
    "saffron",
    "fresh butter",
    "mint",
    "poppy seed",
]
BIG_THINGS = [
    "a merry-go-round",
    "a hot-air balloon",
    "a puppet theatre",
    "a new bell for the church",
    "a flying machine",
    "a giant kite",
    "a carousel with twelve horses",
    "a clock with dancing figures",
]
PARCELS = ["parcel", "basket", "letter box", "wooden box", "bundle", "sack", "small chest", "bag"]
CONTENTS = [
    "a loaf of bread",
    "a woollen hat",
    "a jar of plum jam",
    "a pair of warm socks",
    "a silver spoon",
    "a small clock",
    "a bunch of dried herbs",
    "a book of songs",
    "a bottle of blue ink",
    "a ball of red wool",
    "a wooden flute",
    "a bag of seeds",
    "a new pair of glasses",
    "a music box",
]
CONTAINERS = ["suitcase", "chest", "clock", "boot", "drawer", "book", "cupboard", "trunk"]
YOUNG = ["wolf cub", "owlet", "fawn", "puppy", "kitten", "bear cub", "fox cub", "foal"]
MORALS = {
    "item": ["A useful thing weighs little when you need it.", "It is good to be prepared."],
    "helper": [
        "A kindness is never lost.",
        "Whoever helps others will be helped.",
        "One good turn deserves another.",
        "Friends make every road shorter.",
    ],
    "trait": [
        "It is not the strongest who get there, but those who do not give up.",
        "Sometimes the best tool is a good heart.",
        "You can do more than you think.",
    ],
}


def quest(random: Random) -> Story:
    """A story of a way to a far place."""
    story = Story(random)
    s = story.slots
    land = LANDS[pick(random, list(LANDS))]
    goal = pick(random, GOALS)
    count = pick(random, (1, 1, 2, 2, 2, 3))
    names = random.sample(land["obstacles"], count)
    kinds = random.sample(["item", "helper", "trait"], count)
    plan = list(zip(names, kinds, strict=True))
    trait = pick(random, words.YOUNG_TRAITS)
    item = helper = ""
    for name, kind in plan:
        if name == "riddle":
            continue
        _, things, helpers, traits = OBSTACLES[name]
        if kind == "item":
            item = pick(random, list(things))
        elif kind == "helper":
            helper = pick(random, list(helpers))
        else:
            trait = pick(random, list(traits))
    hero = make_hero(random, trait)
    while hero.noun == helper:
        hero = make_hero(random, trait)
    story.cast("A", hero)
    far = pick(random, land["far"])
    friend = other_than(random, animal, hero, Person("", helper, "m", "", True))
    story.cast("F", friend)
    worker = other_than(random, lambda r: grown_up(r, named=False), hero)
    story.cast("W", worker)
    kin = relative(random, hero, "K")
    treasure, young = pick(random, words.TREASURES), pick(random, YOUNG)
    s |= kin | {
        "far": far,
        "kin": kin["Knoun"],
        "kinposs": f"{kin['Knoun']}'s",
        "treasure": treasure,
        "a_treasure": with_article(treasure),
        "colour": (colour := pick(random, words.COLOURS)),
        "a_colour": with_article(colour),
        "flower": (flower := pick(random, words.FLOWERS)),
        "a_flower": with_article(flower),
        "flower_s": flower[:-1] + "ies"
        if flower.endswith("y")
        else flower + ("es" if flower.endswith("x") or flower == "iris" else "s"),
        "food": pick(random, words.FOODS),
        "worker": worker.noun,
        "a_worker": with_article(worker.noun),
        "A_worker": with_article(worker.noun).capitalize(),
        "parcel": pick(random, PARCELS),
        "a_content": pick(random, CONTENTS),
        "container": pick(random, CONTAINERS),
        "a_friend_noun": with_article(friend.noun),
        "spice": (spice := pick(random, SPICES)),
        "Spice": spice.capitalize(),
        "sight": pick(random, SIGHTS),
        "a_big_thing": pick(random, BIG_THINGS),
        "young": young,
        "Yhis": pick(random, ("his", "her")),
        "Aname_poss": f"{hero.name}'s",
        "helper": helper,
        "a_helper": with_article(helper) if helper else "",
        "the_helper": f"the {helper}",
        "Hhe": (h := pick(random, (("he", "him", "his"), ("she", "her", "her"))))[0],
        "Hhim": h[1],
        "Hhis": h[2],
        "thing": item,
        "a_thing": PAIRS.get(item, with_article(item)) if item else "",
    }
    s["flower_s"] = {"lily": "lilies", "lavender": "lavender plants"}.get(flower, s["flower_s"])
    story.pair("F")
    s["A_F"] = f"{hero.name} and {friend.name}"
    introduce(story, hero, pick(random, land["homes"]))
    if goal["key"] not in ("missing", "medicine"):
        story.maybe(
            0.25,
            "{He} had [many|a few] friends, but {his} best friend was {his} {kin}, who [told the best stories in the world|knew everything about the stars|could whistle like a blackbird].",
            "In the evenings {he} liked to sit by the [fire|window] and listen to {his} {kin}, who [knew a hundred stories|always had time].",
        )
    story.one(*goal["begin"])
    if item:
        add_giver(story, kin["Knoun"] if goal["key"] == "medicine" else "")
        story.one(
            'Before {A} left, {his} {kin2} gave {him} {a_thing}. "Take this with you," {K2he} said. "[One never knows|You never know] what it may be good for."',
            'In the shed {A} found {a_thing}. "That may be useful," {Athought}, and {he} took it along.',
            "{He} packed {a_thing} into {his} bag, [just in case|because {his} {kin2} had always said that it was good to have one].",
        )
    else:
        story.maybe(
            0.4,
            "{He} put [some bread|an apple|a piece of cheese] in {his} pocket, and off {he} went.",
            "The [sun shone|birds sang|wind was fresh], and {his} steps were light.",
        )
    if helper:
        troubles = TROUBLES[:4:2] + TROUBLES[6:7] if helper in SMALL_HELPERS else TROUBLES
        state, deed = pick(random, troubles)
        s.update(Anoun_or_child="friend" if hero.is_animal else "child")
        story.add(
            pick(
                random,
                [
                    "After a while {he} met {a_helper}",
                    "By the roadside {he} found {a_helper}",
                    "[Not far from home|Half an hour later], {he} saw {a_helper}",
                ],
            )
            + f" {state}.",
            pick(
                random,
                [
                    '"Please help me!" {the_helper} [begged|said].',
                    '"Can you help me?" asked {the_helper}.',
                    "{The_helper} looked at {him} with [big|sad] eyes.",
                    "",
                ],
            ).replace("{The_helper}", "{the_helper}"),
            deed,
            pick(
                random,
                [
                    '"[Thank you|I thank you]! I will not forget this," said {the_helper}. "Let me come with you."',
                    '"You are a good {Anoun_or_child}," said {the_helper}. "From now on I will go with you, wherever you go."',
                    '"How can I thank you?" asked {the_helper}. "Come with me," {Asaid}. So {they} went on together.',
                ],
            ),
        )
    for number, (name, kind) in enumerate(plan):
        if name == "riddle":
            meet_riddle(story)
            continue
        meets, *means = OBSTACLES[name]
        key = {"item": item, "helper": helper, "trait": trait}[kind]
        solution = pick(random, means[("item", "helper", "trait").index(kind)][key])
        between = pick(
            random,
            [
                "",
                "",
                "[What now?|What could {he} do?]",
                '"[Oh no|Oh dear]!" {Acried}.',
                '"What shall I do now?" {Athought}.',
            ],
        )
        link = (
            ""
            if number == 0 or random.random() < 0.5
            else pick(
                random,
                [
                    "[So {he} went on].",
                    "The way went on, [uphill and downhill|past fields and hedges].",
                ],
            )
        )
        story.add(link, pick(random, meets), between, solution)
        if hero.is_animal:
            story.paragraphs[-1] = with_paws(story.paragraphs[-1])
        if kind == "item":
            story.slots.update(The_thing=f"The {item}")
            story.ask(
                f"What helped {{Acall}} {OBSTACLE_ASKS[name]}?", "{The_thing} helped {Acall}."
            )
        elif kind == "helper":
            story.ask(
                f"Who helped {{Acall}} {OBSTACLE_ASKS[name]}?", "The {helper} helped {Acall}."
            )
    story.one(*goal["arrive"])
    story.one(*goal["end"])
    if random.random() < 0.4:
        kind = pick(random, [k for name, k in plan if name != "riddle"] or ["trait"])
        moral = pick(random, MORALS[kind])
        leads = ("", "And so {A} learned: ", "{Aposs} {kin} always said afterwards: ")
        story.add(pick(random, leads) + moral)
    if helper and random.random() < 0.5:
        story.one(
            "And the {helper}? {Hhe} stayed with {Aobj}, and {they} were friends for the rest of {their} lives.",
            "The {helper} got [the softest place by the stove|a big supper] and was never hungry again.",
            "As for the {helper}, {Hhe} comes to visit every Sunday.",
        )
    for topic in goal["topics"]:
        story.topics.append(" ".join(fill_raw(story, topic).split()))
    story.topics += [with_article(hero.noun), with_article(f"{trait} {hero.noun}")]
    if helper:
        story.topics.append(fill_raw(story, "{a_noun} and {a_helper}"))
    for question, answer in goal["asks"]:
        story.ask(question, answer)
    story.ask("Who is the story about?", "The story is about {Acall}, {a_hero}.")
    story.ask("Where did {Acall} live?", "{Acall} lived {in_home}.")
    if helper:
        story.ask(
            "Which animal went with {Acall}?",
            "A {helper} went with {Acall}."
            if helper[0] not in "aeiou"
            else "An {helper} went with {Acall}.",
        )
    if item:
        story.ask("What did {Acall} take along?", "{Acall} took along {a_thing}.")
    return story


def fill_raw(story: Story, template: str) -> str:
    """The template's text without a capital."""
    for name, value in story.slots.items():
        template = template.replace(f"{{{name}}}", value)
    return template


def add_giver(story: Story, not_noun: str) -> None:
    """Gives the slots of the relative who gives a thing, who is not the one who is ill."""
    while True:
        found = relative(story.random, Person("", "", "m", ""), "X")
        if found["Xnoun"] != not_noun:
            story.slots |= {"kin2": found["Xnoun"], "K2he": found["Xhe"]}
            return


def meet_riddle(story: Story) -> None:
    """An obstacle of its own: a keeper with a riddle."""
    question, answer = pick(story.random, RIDDLES)
    story.slots |= {"keeper": pick(story.random, KEEPERS), "riddle": question, "answer": answer}
    keeper = story.slots["keeper"]
    story.slots["keeper_he"] = "she" if "woman" in keeper else "he"
    story.slots["the_keeper"] = "the " + next(
        w for w in ("old man", "old woman", "woman", "watchman", "tiny man") if w in keeper
    )
    story.add(
        '[Then|At a bend of the road], {keeper} [stood in the way|sat on a stone and did not let anybody pass]. "First you must solve my riddle," said {the_keeper}. "{riddle}"',
    )
    story.slots.update(The=story.slots["the_keeper"].capitalize(), Answer=answer.capitalize())
    story.one(
        '{A} thought for a while. Then {he} smiled. "It is {answer}," {he} said. "Right!" said {the_keeper}, and let {him} pass.',
        '{A} scratched {his} head. {He} thought of this and of that. "I know it!" {he} cried at last. "It is {answer}!" {The} nodded and stepped aside.',
        '"{Answer}," {A} said at once, because {he} had heard that riddle before. "Nobody has ever been so quick," said {the_keeper}, and {keeper_he} [bowed|made way].',
    )
    story.ask("What was the answer to the riddle?", "The answer was {answer}.")


OBSTACLE_ASKS = {
    "river": "cross the river",
    "dark": "in the dark",
    "thorns": "get past the thorns",
    "guard": "get past the animal",
    "fog": "in the fog",
    "hole": "get out of the hole",
    "gate": "open the lock",
    "fork": "find the right way",
    "rain": "in the rain",
    "cliff": "climb the cliff",
    "cave": "in the dark cave",
    "wind": "in the storm",
    "snow": "cross the snow",
    "cold": "in the cold",
    "tide": "get away from the sea",
    "crowd": "get through the crowd",
    "wall": "get over the wall",
    "stairs": "on the stairs",
    "mud": "get out of the mud",
    "bees": "get away from the bees",
    "birds": "get past the gulls",
    "tree": "get past the fallen tree",
}
