"""Write texts, train a tokenizer on them, or write token files.

python -m scripts.texts show story 5
python -m scripts.texts tokenizer DIR
python -m scripts.texts tokens DIR --tokenizer DIR --shares story:2,chat:2,python:1 --seconds 60 --workers 12
"""

from __future__ import annotations

import argparse
import json
import lzma
import multiprocessing
import os
import pathlib
import sys
import time
from random import Random

from scripts.texts import chat, exact, plots, plots2
from scripts.texts.quest import quest
from scripts.texts.story import titled
from scripts.texts.grammar import pick

EOT = "<|endoftext|>"
SPECIAL = [EOT, chat.USER, chat.ASSISTANT, chat.END]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}<|end|>"
    "{% elif m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HELD_OUT = 10**9
"""Seeds from here on are for held-out texts; no training text uses them."""
PLOTS = plots.PLOTS + plots2.PLOTS
SHARD = 2000
"""Documents a shard."""


def make_story(random: Random):
    """A story of any kind."""
    return quest(random) if random.random() < 0.35 else pick(random, PLOTS)(random)


def document(domain: str, seed: int) -> str:
    """The document of this domain and seed, without the token that ends it."""
    random = Random(f"{domain} {seed}")
    if domain == "story":
        story = make_story(random)
        return titled(story) if random.random() < 0.15 else story.text
    if domain == "chat":
        return chat.conversation(random, make_story)
    turns = [exact.task(random, domain) for _ in range(random.randint(1, 4))]
    return chat.render(turns)


def load(tokenizer: pathlib.Path):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tokenizer / "tokenizer.json"))


def tokens(encoder, domain: str, first: int, count: int):
    """uint16 array of documents `first` to `first + count`, each ended by token 0."""
    import numpy as np

    texts = [document(domain, seed) for seed in range(first, first + count)]
    ids = []
    for encoding in encoder.encode_batch(texts):
        ids.extend(encoding.ids)
        ids.append(0)
    return np.array(ids, np.uint16)


def work(args) -> None:
    """One worker: shards until the time is over. Worker w of n writes shards w, w + n, ..."""
    import numpy as np

    out, tokenizer, shares, ends, worker, workers, packed = args
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder = load(tokenizer)
    total = sum(shares.values())
    written = dict.fromkeys(shares, 0)
    while time.time() < ends:
        # The domain that is furthest behind its share.
        domain = min(shares, key=lambda d: written[d] / (shares[d] / total))
        number = written[domain] * workers + worker
        written[domain] += 1
        path = out / f"{domain}-{number:05d}.npy{'.xz' if packed else ''}"
        if path.exists():
            continue
        array = tokens(encoder, domain, number * SHARD, SHARD)
        part = path.with_name(f".{path.name}.part")
        with lzma.open(part, "wb") if packed else part.open("wb") as file:
            np.save(file, array)
        part.rename(path)


def write_tokens(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    shares = {n: float(s) for n, s in (p.split(":") for p in args.shares.split(","))}
    ends = time.time() + args.seconds
    jobs = [
        (args.out, args.tokenizer, shares, ends, i, args.workers, args.packed)
        for i in range(args.workers)
    ]
    if args.workers == 1:
        work(jobs[0])
        return
    processes = [multiprocessing.Process(target=work, args=(job,)) for job in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def train_tokenizer(args: argparse.Namespace) -> None:
    """A byte-level BPE of 4096 tokens, digits one by one, with chat tokens 0 to 3."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    counts = {
        "story": 9000,
        "chat": 5000,
        "arithmetic": 400,
        "lookup": 900,
        "formats": 900,
        "python": 900,
    }

    def texts():
        for domain, count in counts.items():
            for seed in range(count):
                text = document(domain, seed)
                for token in SPECIAL:
                    text = text.replace(token, "\n")
                yield text
        for path in args.text:
            yield path.read_text()

    tokenizer.train_from_iterator(texts(), trainer)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"))
    config = {
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOT,
        "pad_token": EOT,
        "unk_token": None,
        "additional_special_tokens": SPECIAL[1:],
        "model_max_length": 1024,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (args.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.texts")
    commands = parser.add_subparsers(required=True)
    show = commands.add_parser("show", help="print documents")
    show.add_argument("domain")
    show.add_argument("count", type=int, nargs="?", default=3)
    show.add_argument("--seed", type=int, default=HELD_OUT)
    show.set_defaults(
        run=lambda a: print(
            "\n\n----\n\n".join(document(a.domain, a.seed + i) for i in range(a.count))
        )
    )
    tokenizer = commands.add_parser("tokenizer", help="train a tokenizer")
    tokenizer.add_argument("out", type=pathlib.Path)
    tokenizer.add_argument("--text", type=pathlib.Path, nargs="*", default=[])
    tokenizer.set_defaults(run=train_tokenizer)
    write = commands.add_parser("tokens", help="write token files")
    write.add_argument("out", type=pathlib.Path)
    write.add_argument("--tokenizer", type=pathlib.Path, required=True)
    write.add_argument("--shares", default="story:1,chat:1")
    write.add_argument("--seconds", type=float, default=60)
    write.add_argument("--workers", type=int, default=1)
    write.add_argument("--packed", action="store_true", help="compress by xz")
    write.set_defaults(run=write_tokens)
    args = parser.parse_args(arguments)
    args.run(args)


if __name__ == "__main__":
    main(sys.argv[1:])
