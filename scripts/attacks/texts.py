"""Chat templates and tokenizer files of a stranger."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from moejax.requests.prompts import PromptEncoder
from moejax.requests.tokenizer import load_tokenizer
from scripts.attacks.engine import LIMITS, start
from scripts.attacks.files import DEMO, damage_file, mutated_json, plain_model
from scripts.attacks.scene import Scene
from scripts.attacks.values import TEXTS, nested, pick

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

BODIES = (
    "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ 10**10**8 }}",
    "{{ 7**7**7**2 }}",
    "{{ (10**6)|string * 10**6 }}",
    "{{ lipsum(n=10**7) }}",
    "{{ lipsum(n=300, min=10**4, max=10**5) }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}{{ ns.x|length }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(31) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}{{ ns.x }}",
    "{{ 'a' * 10**10 }}",
    "{{ [0] * 10**10 }}",
    "{{ range(10**12)|list|length }}",
    "{{ range(10**12)|sum }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ '{:>3000000000}'.format(1) }}",
    "{{ 'x'.center(5 * 10**9) }}",
    "{{ 'x'|center(5 * 10**9) }}",
    "{{ ('x' * 10**5)|indent(10**5) }}",
    "{{ 'x' * 10**7 }}",
    "{{ ('a' * 30000 + '!')|wordwrap(1) }}",
    "{{ ('a ' * 10**6)|urlize }}",
    "{{ 'x'.replace('', 'y' * 10**6) * 10**3 }}",
    "{{ 1 << 10**10 }}",
    "{{ (1 << 10**8) // 3 }}",
    "{{ 10**100000 }}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch /tmp/attack-ran') }}",
    "{{ raise_exception('e' * 10**7) }}",
    "{{ raise_exception(messages) }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ strftime_now('%Y' * 10**6) }}",
    "{{ strftime_now('%9999999999d') }}",
    "{{ messages|tojson(indent=10**9) }}",
    "{{ messages.append(messages) }}{{ messages|tojson }}",
    "{{ messages.append(messages) }}{{ messages }}",
    "{% for m in messages %}{% set _ = messages.append(m) %}{% endfor %}",
    "{{ undefined.attribute }}",
    "{{ 1 / 0 }}",
    "{{ '\\ud800' }}",
    "{{ '\\x00' * 100 }}",
    "{% generation %}" + "{% endgeneration %}",
    "{% for i in range(10) %}{% break %}{% endfor %}{{ i }}",
    "{% if %}",
    "{{",
    "{#",
    "",
)


def template(rng: random.Random) -> str:
    """One that does not end, needs all memory, reads what it must not, or is none."""
    draw = rng.random()
    if draw < 0.75:
        body = pick(rng, BODIES)
        return pick(rng, ("", PLAIN)) + body + pick(rng, ("", PLAIN))
    if draw < 0.8:
        return pick(rng, ("x", "{{ x }}", "{% if x %}", " ", "{#")) * pick(rng, (10**5, 10**7))
    if draw < 0.85:
        return "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}"
    if draw < 0.9:
        return "{% if 1 %}" * 5000 + "{% endif %}" * 5000
    cut = rng.randrange(len(PLAIN))
    return PLAIN[:cut] + pick(rng, TEXTS) + PLAIN[cut + rng.randrange(5) :]


def model_with(scene: Scene) -> Path:
    """The demo with its tokenizer."""
    directory = plain_model(scene.directory / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, directory / name)
    return directory


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def attack_templates(scene: Scene) -> None:
    """A chat template is refused, or writes a prompt, in bounded time and memory."""
    rng, directory = scene.rng, model_with(scene)
    text = template(rng)
    if rng.random() < 0.5:
        (directory / "chat_template.jinja").write_bytes(text.encode("utf-8", "surrogatepass"))
    else:
        config = read(directory / "tokenizer_config.json")
        value: Any = text
        if rng.random() < 0.2:
            value = [{"name": "default", "template": text}, {"name": "rag", "template": text}]
        config["chat_template"] = value
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [{"role": "user", "content": pick(rng, ("The old house", "", "x" * 10_000))}]
    shown = f"the template {text[:120]!r}"
    _use(scene, directory, shown, {"messages": messages})


def _use(scene: Scene, directory: Path, shown: str, prompt: Any) -> None:
    """Encodes with the tokenizer alone, or, as that takes seconds, seldom in an LLM."""
    if scene.rng.random() < 0.15:
        llm = scene.call(f"LLM with {shown}", lambda: start({"model": directory}))
        if not isinstance(llm, BaseException):
            with llm:
                scene.call(f"generate with {shown}", lambda: llm.generate([prompt]))
        return
    tokenizer = scene.call(f"load_tokenizer with {shown}", lambda: load_tokenizer(directory))
    if not isinstance(tokenizer, BaseException) and tokenizer is not None:
        encoder = PromptEncoder(tokenizer, "demo", LIMITS["max_model_len"])
        encoder.start()  # imports, which take what the machine gives them
        encoded = scene.call(f"a prompt with {shown}", lambda: encoder(prompt))
        if isinstance(encoded, tuple):
            ids = encoded[1][:1000]
            scene.call(f"decode with {shown}", lambda: tokenizer.decode(ids))


# ---- tokenizers


def _doubling(times: int) -> dict[str, Any]:
    pattern = {"String": "a"}
    one = {"type": "Replace", "pattern": pattern, "content": "aa"}
    return {"type": "Sequence", "normalizers": [one] * times}


NORMALIZERS: tuple[Any, ...] = (
    *(_doubling(10), _doubling(33), _doubling(64)),
    {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 10**6},
    {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
    {"type": "Replace", "pattern": {"Regex": "(?:a|a|aa)*b"}, "content": "a"},
    {"type": "Replace", "pattern": {"Regex": "(" * 5000 + ")" * 5000}, "content": "a"},
    {"type": "Prepend", "prepend": "x" * 10**7},
    {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x" * 1000}] * 10**5},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Precompiled", "precompiled_charsmap": "////////"},
    {"type": "Nothing"},
    *({}, [], None, nested(500)),
)
PRE_TOKENIZERS: tuple[Any, ...] = (
    {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    },
    {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
    {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}] * 10**5},
    {"type": "Metaspace", "replacement": "", "prepend_scheme": "always", "split": True},
)
PROCESSORS: tuple[Any, ...] = (
    {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
    {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 10**5,
        "pair": [],
        "special_tokens": {},
    },
    {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"x": {"id": "x", "ids": [0] * 10**6, "tokens": ["x"] * 10**6}},
    },
)
PADDINGS: tuple[Any, ...] = (
    {
        "strategy": {"Fixed": 10**9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    },
    {
        "strategy": "BatchLongest",
        "direction": "Right",
        "pad_to_multiple_of": 2**62,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    },
)
TRUNCATIONS: tuple[Any, ...] = (
    {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 0},
    {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5},
)
PARTS = {
    "normalizer": NORMALIZERS,
    "pre_tokenizer": PRE_TOKENIZERS,
    "post_processor": PROCESSORS,
    "padding": PADDINGS,
    "truncation": TRUNCATIONS,
}
"""Parts of tokenizer.json → what each is replaced with."""


def _added_tokens(rng: random.Random) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    count, first = pick(rng, ((1, 2**31), (1, 4095), (1, 2**32 - 1), (200_000, 4096), (1, 2**63)))
    content = pick(rng, ("a", "", "\0", "x" * 10**6, "t"))
    return [
        {"id": first + i, "content": f"{content}{i or ''}", **flags, "special": rng.random() < 0.5}
        for i in range(count)
    ]


def attack_tokenizers(scene: Scene) -> None:
    """Tokenizer files are refused, or text becomes tokens in bounded time and memory."""
    rng, directory = scene.rng, model_with(scene)
    path = directory / "tokenizer.json"
    draw = rng.random()
    if draw < 0.45:
        part = pick(rng, (*PARTS, "added_tokens"))
        table = read(path)
        table[part] = _added_tokens(rng) if part == "added_tokens" else pick(rng, PARTS[part])
        path.write_text(json.dumps(table))
        how = f"another {part}"
    elif draw < 0.65:
        names = ("tokenizer.json", "tokenizer_config.json")
        path = directory / pick(rng, names)
        path.write_text(mutated_json(rng, read(path)))
        how = f"a mutated {path.name}"
    else:
        names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
        path = directory / pick(rng, (*names, "added_tokens.json", "chat_template.jinja"))
        if not path.exists():
            path.write_text(pick(rng, ("{}", '{"a": 1}', PLAIN)))
        how = f"{path.name}: {damage_file(rng, path)}"
    text = pick(rng, ("The old house", "a" * 30, "a" * 500 + "!", "a b " * 200))
    _use(scene, directory, how, text)
