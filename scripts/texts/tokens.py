"""A tokenizer trained on the texts, and files of their tokens."""

from __future__ import annotations

import json
import lzma
import multiprocessing
import os
import pathlib
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.texts import chat
from scripts.texts.documents import document

EOT = "<|endoftext|>"
SPECIAL = [EOT, chat.USER, chat.ASSISTANT, chat.END]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}<|end|>"
    "{% elif m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DOCUMENTS = {
    "story": 9000,
    "chat": 5000,
    "arithmetic": 400,
    "lookup": 900,
    "formats": 900,
    "python": 900,
}
"""How many documents of each domain a tokenizer is trained on."""
SHARD = 2000
"""Documents a file of tokens."""


def train_tokenizer(out: pathlib.Path, extra: Iterable[str] = ()) -> None:
    """Writes a byte-level BPE of 4096 tokens, digits one by one, with chat tokens 0 to 3.

    extra: texts to train it on beside the generated ones.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        for domain, count in DOCUMENTS.items():
            for seed in range(count):
                text = document(domain, seed)
                for token in SPECIAL:
                    text = text.replace(token, "\n")
                yield text
        yield from extra

    tokenizer.train_from_iterator(texts(), trainer)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
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
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode(encoder: Tokenizer, domain: str, first: int, count: int) -> np.ndarray:
    """uint16 tokens of documents `first` to `first + count`, each ended by token 0."""
    texts = [document(domain, seed) for seed in range(first, first + count)]
    ids: list[int] = []
    for encoding in encoder.encode_batch(texts):
        ids += [*encoding.ids, 0]
    return np.array(ids, np.uint16)


def split_book(text: str, words: int = 250) -> list[str]:
    """Pieces of about `words` words, at ends of paragraphs, of a book from Project Gutenberg;
    without its notices, headings and verses."""
    text = re.split(r"End of (?:the )?Project Gutenberg|Source: http", text.lstrip("\ufeff"))[0]
    for typed, plain in zip("‘’“”_", ("'", "'", '"', '"', ""), strict=True):
        text = text.replace(typed, plain)
    pieces: list[list[str]] = [[]]
    for paragraph in re.split(r"\n\s*\n", text):
        plain = " ".join(paragraph.split())
        if paragraph.startswith("    ") or len(plain) < 60 or "[" in plain or plain.isupper():
            continue
        if sum(len(p.split()) for p in pieces[-1]) > words:
            pieces.append([])
        pieces[-1].append(plain)
    return ["\n\n".join(piece) for piece in pieces if piece]


def write_books(out: pathlib.Path, tokenizer: pathlib.Path, books: Iterable[pathlib.Path]) -> None:
    """Writes a token file `book-NAME.npy` of each book, whose pieces end with token 0."""
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    out.mkdir(parents=True, exist_ok=True)
    for path in books:
        encodings = encoder.encode_batch(split_book(path.read_text()))
        ids = [token for encoding in encodings for token in (*encoding.ids, 0)]
        np.save(out / f"book-{path.stem}.npy", np.array(ids, np.uint16))


@dataclass(frozen=True)
class Job:
    """What is written where. shares: of the documents, by domain. ends: the time.time() of the end.
    packed: whether files are compressed."""

    out: pathlib.Path
    tokenizer: pathlib.Path
    shares: dict[str, float]
    ends: float
    workers: int
    packed: bool


def write_tokens(job: Job) -> None:
    """Writes token files by several processes until the job's time is over."""
    job.out.mkdir(parents=True, exist_ok=True)
    if job.workers == 1:
        write_shards(job, 0)
        return
    processes = [
        multiprocessing.Process(target=write_shards, args=(job, worker))
        for worker in range(job.workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def write_shards(job: Job, worker: int) -> None:
    """Writes files worker, worker + workers, ... of each domain, those that exist left out."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder = Tokenizer.from_file(str(job.tokenizer / "tokenizer.json"))
    written = dict.fromkeys(job.shares, 0)
    while time.time() < job.ends:
        domain = min(job.shares, key=lambda d: written[d] / job.shares[d])  # furthest behind
        number = written[domain] * job.workers + worker
        written[domain] += 1
        path = job.out / f"{domain}-{number:05d}.npy{'.xz' if job.packed else ''}"
        if path.exists():
            continue
        part = path.with_name(f".{path.name}.part")
        with lzma.open(part, "wb") if job.packed else part.open("wb") as file:
            np.save(file, encode(encoder, domain, number * SHARD, SHARD))
        part.rename(path)
