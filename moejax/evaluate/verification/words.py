"""Checks of a checkpoint's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from moejax.evaluate.verification.table import Check
from moejax.models.config import ModelConfig
from moejax.models.directory import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEXTS = (
    "The old house stood by the sea.",
    "def f(x):\n    return x ** 2  # squared\n",
    "Zażółć gęślą jaźń; naïve café; Привет, мир",
    "日本語と中文, 한국어 😀",
    "1234567890 3.14159 -42\t\n\n  two spaces",
)
MESSAGES = [{"role": "user", "content": "How many ducks swim on the pond?"}]


def check_words(
    tokenizer: PreTrainedTokenizerFast | None, config: ModelConfig, directory: Path
) -> Iterator[Check]:
    """Yields the checks; one that says so where there is no tokenizer."""
    if tokenizer is None:
        yield Check("tokenizer", None, "the checkpoint has none; its text is not checked")
        return
    texts = [text for text in TEXTS if not _comes_back(tokenizer, text)]
    said = f"{len(TEXTS) - len(texts)} of {len(TEXTS)} texts come back"
    yield Check("text → tokens → text", not texts, said + (f", not {texts[0]!r}" if texts else ""))
    yield _special_ids(tokenizer, config, directory)
    if not tokenizer.chat_template:
        yield Check("chat template", None, "the tokenizer has none")
        return
    try:
        asked = _render(tokenizer, True)
        whole = _render(tokenizer, False)
    except Exception as error:  # a template is a program from the checkpoint
        yield Check("chat template", False, f"refuses a message: {error}")
        return
    good = MESSAGES[0]["content"] in asked and _comes_back(tokenizer, asked)
    good = good and asked.startswith(whole.rstrip())
    yield Check(
        "chat template", good, f"a message becomes {len(tokenizer(asked).input_ids)} tokens"
    )


def _comes_back(tokenizer: PreTrainedTokenizerFast, text: str) -> bool:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return found in (text, " " + text)  # SentencePiece begins a text with a space


def _render(tokenizer: PreTrainedTokenizerFast, prompt: bool) -> str:
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompt)
    assert isinstance(text, str)
    return text


def _special_ids(tokenizer: PreTrainedTokenizerFast, config: ModelConfig, directory: Path) -> Check:
    """Compares ids in the tokenizer with those that the checkpoint's other files state."""
    faults = []
    path = directory / "tokenizer_config.json"
    added = read_json(path).get("added_tokens_decoder", {}) if path.exists() else {}
    for number, token in added.items() if isinstance(added, dict) else ():
        text = token.get("content") if isinstance(token, dict) else None
        if isinstance(text, str) and str(found := tokenizer.convert_tokens_to_ids(text)) != number:
            faults.append(f"{text!r} is {found}, not {number}")
    path = directory / "config.json"
    raw = read_json(path) if path.exists() else {}
    inner = raw.get("text_config")
    text = inner if isinstance(inner, dict) else {}
    stated = {
        name: raw.get(f"{name}_token_id", text.get(f"{name}_token_id")) for name in ("bos", "pad")
    }
    ends = tokenizer.eos_token_id
    known = {*config.eos_token_ids, *_ids(raw.get("eos_token_id"))}
    if ends is not None and known and ends not in known:
        faults.append(f"the end of text is {ends} in the tokenizer, {sorted(known)} in the configs")
    for name, wanted in stated.items():
        found = getattr(tokenizer, f"{name}_token_id")
        if None not in (found, wanted) and found != wanted and found not in known:
            faults.append(f"{name} is {found} in the tokenizer, {wanted} in config.json")
    said = faults[0] if faults else f"{len(added)} added tokens, end of text {ends}"
    return Check("special tokens", not faults, said)


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int)]
