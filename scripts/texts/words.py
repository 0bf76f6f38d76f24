"""Words of the stories. Each list is one string, words separated by commas."""

from __future__ import annotations


def listed(text: str) -> list[str]:
    """The words of a list."""
    return [word.strip() for word in text.replace("\n", " ").split(",") if word.strip()]


GIRLS = listed("""Anna, Mia, Lily, Clara, Rosa, Nora, Ella, Ruby, Ivy, Hazel, Alice, Emma, Sara, Lucy, Maya, Zoe,
Eva, Ida, Greta, Molly, Daisy, Penny, Tessa, Wendy, Freya, Nina, Olive, Pearl, Amy, Bella, Cora, Dora, Edith,
Fiona, Grace, Hannah, Iris, Jane, Kate, Laura, Martha, Nell, Polly, Rita, Sophie, Tilly, Vera, Willa, Yara, Zara,
Leila, Amina, Priya, Mei, Yuki, Ingrid, Astrid, Carmen, Lucia, Elena, Sofia, Marta, Paula, Julia, Heidi, Lena,
Agnes, Beth, Celia, Della, Esther, Flora, Gemma, Hilda, June, Kira, Lola, Mabel, Opal, Rose, Stella, Thea""")
BOYS = listed("""Tom, Ben, Max, Leo, Sam, Jack, Finn, Oscar, Hugo, Peter, Paul, Daniel, Adam, Noah, Luke, Jonas, Felix,
Anton, Emil, Oliver, Henry, George, Harry, Will, Toby, Ned, Theo, Milo, Ravi, Omar, Kenji, Ali, Ivan, Marco, Luis,
Pablo, Diego, Carlos, Mateo, Bruno, Otto, Karl, Erik, Nils, Lars, Sven, Hans, Fred, Frank, Walter, Arthur, Albert,
Edgar, Simon, Martin, David, Jacob, Joseph, Robin, Colin, Dylan, Evan, Gus, Isaac, Jim, Kit, Liam, Mark, Nick,
Owen, Perry, Rory, Seth, Tim, Victor, Wally, Zack, Amos, Basil, Caleb, Dan, Elias, Gabriel, Ian, Joel""")
PET_NAMES = listed("""Rusty, Pip, Biscuit, Bramble, Pepper, Button, Socks, Nutmeg, Clover, Pebble, Whiskers, Patch,
Dusty, Ginger, Maple, Sunny, Misty, Shadow, Snowy, Bumble, Hopper, Fern, Acorn, Juniper, Poppy, Smoky, Tuft, Velvet,
Amber, Copper, Speckle, Willow, Thistle, Barley, Honey, Moss, Feather, Twig, Marble, Minnow, Rumble, Sprout, Teasel""")
ANIMALS = listed("""fox, rabbit, mouse, hedgehog, squirrel, badger, bear, owl, duck, frog, otter, beaver, mole, deer,
goat, lamb, pony, donkey, pig, cat, kitten, puppy, dog, hen, goose, swan, crow, sparrow, robin, turtle, lizard, hare,
wolf, raccoon, penguin, seal, elephant, monkey, lion, tiger, giraffe, zebra, camel, parrot, koala, panda, ladybird,
snail, cricket, bee, ant, caterpillar, toad, weasel, raven, pigeon, crab, dragon, hamster, goldfish, kangaroo""")
YOUNG_TRAITS = listed("""brave, kind, clever, patient, curious, cheerful, shy, quiet, lively, stubborn, gentle, honest,
dreamy, careful, hopeful, bold, thoughtful, friendly, helpful, restless""")
TALE_GIRLS = listed("""princess, witch, fairy, mermaid, pirate, knight, robot, giant, elf, dwarf, astronaut, wizard's daughter,
shepherdess, explorer, ghost, acrobat, chimney sweep, inventor, dancer""")
TALE_BOYS = listed("""prince, wizard, pirate, knight, robot, giant, elf, dwarf, astronaut, explorer, ghost, acrobat, chimney sweep,
inventor, goblin, clown, drummer, troll, cabin boy, gnome""")
WORKERS = listed("""baker, miller, fisherman, farmer, gardener, carpenter, tailor, shoemaker, clockmaker, blacksmith,
potter, weaver, teacher, doctor, sailor, shepherd, painter, musician, librarian, postman, lighthouse keeper, cook,
beekeeper, woodcutter, ferryman, watchmaker, bookseller, glassblower, candle maker, toymaker, stonemason, basket maker,
nurse, pilot, captain, innkeeper, florist, barber, locksmith, juggler, puppeteer, engineer, inventor, astronomer""")
COLOURS = listed(
    """red, blue, green, yellow, white, black, brown, golden, silver, purple, orange, grey, pink"""
)
SIZES = listed("small, little, tiny, big, large, tall, long, round, heavy, narrow, wide")
TREASURES = listed("""hat, scarf, kite, drum, ring, necklace, watch, music box, teddy bear, doll, toy boat, ball,
flute, violin, book, diary, lantern, compass, umbrella, basket, bracelet, button, marble, feather, key, coin, cup,
teapot, mirror, brush, comb, bell, whistle, locket, purse, glove, boot, shell, spoon, pocket knife, telescope,
puzzle, picture, map, trumpet, spinning top, wooden horse, cushion, blanket, ribbon, paper crown, magnifying glass""")
FOODS = listed("""apple pie, honey cake, bread, cheese, pancakes, vegetable soup, plum jam, cherry tart, biscuits,
porridge, roasted chestnuts, carrot cake, blueberry muffins, noodles, rice pudding, baked potatoes, pear cake,
pumpkin soup, ginger biscuits, lemon cake, strawberry jam, mushroom pie, nut bread, tomato soup, warm rolls,
chocolate cake, fish stew, cinnamon buns, peach pie, walnut cake, corn bread, bean stew""")
FLOWERS = listed("""rose, tulip, daisy, lily, violet, poppy, sunflower, bluebell, snowdrop, daffodil, marigold,
lavender, pansy, primrose, iris, foxglove""")
FRUITS = listed(
    "apple, pear, plum, cherry, peach, orange, strawberry, blackberry, fig, apricot, raspberry, lemon"
)
TREES = listed(
    "oak, birch, pine, willow, chestnut tree, apple tree, maple, beech, pear tree, fir, cherry tree, elm"
)
WEATHER = listed(
    """sunny, windy, cold, warm, cloudy, bright, misty, frosty, rainy, hot, cool, clear, grey, quiet"""
)
TIMES = listed("""morning, afternoon, evening, spring morning, summer day, autumn evening, winter morning,
Monday morning, Saturday afternoon, Sunday morning, autumn day, day in May, day in October, day in early spring""")
GREETINGS = listed("Hello, Good morning, Good day, Hi there, Good evening")
FEELINGS = listed("happy, glad, proud, pleased, content, cheerful, thankful")
SAD = listed("sad, worried, unhappy, upset, miserable, troubled, lonely")
