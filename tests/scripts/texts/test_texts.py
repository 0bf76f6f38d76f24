"""Generated texts: the same by seed, right in what they answer, various, and without leftovers."""

from __future__ import annotations

import re
from random import Random

import pytest

from scripts.texts import chat, exact
from scripts.texts.documents import HELD_OUT, document, is_right
from scripts.texts.functions import write_function
from scripts.texts.grammar import fill, parse, polish
from scripts.texts.plots import PLOTS, tell
from scripts.texts.quest import RIDDLE, quest
from scripts.texts.score import content_words
from scripts.texts.tokens import split_book
from scripts.texts.words import read

DOMAINS = ["story", "chat", *exact.DOMAINS]


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_document_is_that_of_its_seed(domain):
    texts = [document(domain, seed) for seed in range(20)]
    assert texts == [document(domain, seed) for seed in range(20)]
    assert len(set(texts)) == 20


def test_stories_have_many_words_and_held_out_ones_are_not_among_those_trained_on():
    trained = {document("story", seed) for seed in range(1000)}
    assert len(content_words(trained)) > 3000
    assert content_words(["The fox's merry-go-round", "It was Anna's, not a fox"]) == {
        *("fox", "merry-go-round")
    }
    assert not any(document("story", HELD_OUT + i) in trained for i in range(200))


def test_templates_choose_fill_and_capitalise():
    assert fill(Random(0), "[{a}|{a}] went home .  then {a} slept.", {"a": "tom"}) == (
        "Tom went home. Then tom slept."
    )
    assert polish('"where?" she asked. he ran.') == '"Where?" she asked. He ran.'
    with pytest.raises(ValueError, match="not closed"):
        parse("[a|b")


@pytest.mark.parametrize("plot", ["quest", *PLOTS])
def test_stories_are_sentences_without_leftovers(plot):
    for seed in range(60):
        text = (quest(Random(seed)) if plot == "quest" else tell(Random(seed), plot)).text
        assert not re.search(r"[{}\[\]|]|  | [,.!?]|\bnone\b", text), text
        assert not re.search(r"\b[Aa] [aeio][a-z]|\b(I's|I is|I has|an? an?|the the)\b", text), text
        for paragraph in text.split("\n\n"):
            assert re.match(r'"?[A-Z]', paragraph) and paragraph[-1] in '.!?"', paragraph
            assert paragraph.count('"') % 2 == 0, paragraph


def test_every_obstacle_of_a_land_is_known():
    lands = read("quest")["lands"].values()
    assert {o for land in lands for o in land["obstacles"]} == {RIDDLE, *read("obstacles")}


def test_answers_about_stories_are_in_the_stories():
    for seed in range(300):
        story = quest(Random(seed))
        for question, answer in story.facts:
            if question.startswith(("Where did", "What did", "What helped", "Who helped")):
                last = answer.rstrip(".").split()[-1]
                thing = answer.split()[1] if answer.startswith("The ") else last
                assert thing.lower() in story.text.lower(), (answer, story.text)


def test_sums_are_right():
    signs = {"plus": "+", "minus": "-", "times": "*", "divided by": "//"}
    for seed in range(500):
        _, answer = chat.sum_question(Random(seed))
        found = re.fullmatch(r"(\d+) (plus|minus|times|divided by) (\d+) is (\d+)\.", answer)
        if found:
            a, sign, b, value = found.groups()
            assert eval(f"{a} {signs[sign]} {b}") == int(value)


def test_arithmetic_is_right_in_each_step():
    for seed in range(500):
        question, answer = exact.task(Random(seed), "arithmetic")
        for left, right in re.findall(r"^([-\d +*]+) = (-?\d+)(?:$|,)", answer, re.MULTILINE):
            assert eval(left) == int(right), (question, answer)


def test_functions_pass_the_tests_that_ask_for_them():
    for seed in range(300):
        question, code = write_function(Random(seed))
        space: dict = {}
        exec(code, space)
        exec(question.split("It must pass:\n")[1], space)


def test_right_answers_are_right_and_others_are_not():
    _, answer = exact.task(Random(1), "arithmetic")
    assert is_right("arithmetic", answer, answer + "\n")
    assert is_right("arithmetic", answer, answer.split("\n")[-1])
    assert not is_right("arithmetic", answer, answer + "0")
    assert not is_right("lookup", "Ann", "Ben")
    assert is_right("sums", "It is 12.", "5 plus 7 is 12.")
    assert not is_right("sums", "It is 12.", "5 plus 7 is 13.")
    assert not is_right("sums", "It is 12.", "I do not know.")


def test_books_become_paragraphs_without_notices_and_headings():
    lines = "A fox\nsaw some grapes, and they hung so high that he could not reach them at all."
    notice = "End of the Project Gutenberg EBook of Fables, a very long notice about its licence."
    text = f"\ufeffTHE FOX\n\n{lines}\n\n    A verse\n\n{lines}\n\n{notice}\n"
    paragraph = " ".join(lines.split())
    assert split_book(text) == [f"{paragraph}\n\n{paragraph}"]
    assert split_book(text, words=3) == [paragraph, paragraph]
