"""Texts for training small language models.

python -m scripts.texts show story 5
python -m scripts.texts show chat 48 --words 30 > PROMPTS
python -m scripts.texts tokenizer DIR
python -m scripts.texts tokens DIR --tokenizer DIR --shares story:2,chat:2,python:1 --seconds 60
python -m scripts.texts books DIR --tokenizer DIR aesop.txt grimm.txt
python -m scripts.texts score MODEL sums --count 200 --precision int4
python -m scripts.texts sample MODEL --temperature 0.7
python -m scripts.texts diversity story 2000
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time

from scripts.texts.documents import HELD_OUT, document


def show(args: argparse.Namespace) -> None:
    """Prints documents."""
    texts = (document(args.domain, args.seed + i) for i in range(args.count))
    if args.words is None:
        print("\n\n----\n\n".join(texts))
        return
    for text in texts:
        print(json.dumps({"prompt": " ".join(text.split()[: args.words])}))


def tokenizer(args: argparse.Namespace) -> None:
    """Trains a tokenizer."""
    from scripts.texts.tokens import train_tokenizer

    train_tokenizer(args.out, (path.read_text() for path in args.text))


def tokens(args: argparse.Namespace) -> None:
    """Writes token files until the time is over."""
    from scripts.texts.tokens import Job, write_tokens

    shares = {name: float(s) for name, s in (p.split(":") for p in args.shares.split(","))}
    ends = time.time() + args.seconds
    write_tokens(Job(args.out, args.tokenizer, shares, ends, args.workers, args.packed))


def books(args: argparse.Namespace) -> None:
    """Writes token files of books."""
    from scripts.texts.tokens import write_books

    write_books(args.out, args.tokenizer, args.text)


def score(args: argparse.Namespace) -> None:
    """Measures a model's accuracy on held-out tasks."""
    from scripts.texts import score as scoring

    for precision in args.precision:
        scoring.score(
            args.model, args.domain, args.count, args.max_tokens, precision, args.show_right
        )


def sample(args: argparse.Namespace) -> None:
    """Prints a model's answers to ten prompts."""
    from scripts.texts import score as scoring

    scoring.sample(args.model, args.temperature, args.max_tokens)


def diversity(args: argparse.Namespace) -> None:
    """Counts distinct n-grams of words, and content words."""
    from scripts.texts import score as scoring

    scoring.measure_diversity(args.domain, args.count)


def main(arguments: list[str]) -> None:
    """Runs one command."""
    parser = argparse.ArgumentParser(prog="python -m scripts.texts")
    commands = parser.add_subparsers(required=True)

    def add(run) -> argparse.ArgumentParser:
        command = commands.add_parser(run.__name__, help=run.__doc__)
        command.set_defaults(run=run)
        return command

    command = add(show)
    command.add_argument("domain")
    command.add_argument("count", type=int, nargs="?", default=3)
    command.add_argument("--seed", type=int, default=HELD_OUT)
    command.add_argument(
        "--words", type=int, help="the first words only, as prompts for moejax generate --input"
    )
    command = add(tokenizer)
    command.add_argument("out", type=pathlib.Path)
    command.add_argument("--text", type=pathlib.Path, nargs="*", default=[])
    command = add(tokens)
    command.add_argument("out", type=pathlib.Path)
    command.add_argument("--tokenizer", type=pathlib.Path, required=True)
    command.add_argument("--shares", default="story:1,chat:1")
    command.add_argument("--seconds", type=float, default=60)
    command.add_argument("--workers", type=int, default=1)
    command.add_argument("--packed", action="store_true", help="compress by xz")
    command = add(books)
    command.add_argument("out", type=pathlib.Path)
    command.add_argument("--tokenizer", type=pathlib.Path, required=True)
    command.add_argument("text", type=pathlib.Path, nargs="+")
    command = add(score)
    command.add_argument("model")
    command.add_argument("domain", help="sums, arithmetic, lookup, formats or python")
    command.add_argument("--count", type=int, default=200)
    command.add_argument("--max-tokens", type=int, default=160)
    command.add_argument("--precision", nargs="+", default=["dense"], help="dense int8 int4 int2")
    command.add_argument("--show-right", action="store_true", help="print right answers too")
    command = add(sample)
    command.add_argument("model")
    command.add_argument("--temperature", type=float, default=0.0)
    command.add_argument("--max-tokens", type=int, default=400)
    command = add(diversity)
    command.add_argument("domain")
    command.add_argument("count", type=int, nargs="?", default=2000)
    args = parser.parse_args(arguments)
    args.run(args)


if __name__ == "__main__":
    main(sys.argv[1:])
