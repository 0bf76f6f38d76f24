"""Speculative decoding beside decoding without drafts: tokens a second, by task, requests, budget.

python -m scripts.bench drafts --model DIR [--links 1GB/s,4GB/s] [--llama-python PYTHON]

Each cell runs the same requests by turns without drafts, with drafts in every step, and with drafts
where the engine measures that they pay. The tokens must be equal. A ratio is the median over the
rounds of a pair of the same round. `again` is undrafted once more: what the machine adds by itself.

Tasks: `edit` gives a text and asks for it again, `chat` asks a question, `story` goes on with a
text. Greedy, with the end of the sequence ignored. A cell is shown as soon as it was measured; with
100% of the experts no link matters, and there is one row.

--counted counts steps and the experts that they move instead, which are the same in every run and
on a busy machine: all rounds from a cold cache on, with ratios of the time that steps of STEP_S,
ROW_S a row, LOOK_S before drafts and the link take, by which adaptive drafts then choose, too.

--llama-python names an interpreter with llama-cpp-python: rows of one request then have its prompt
lookup too, on a GGUF file of the same weights (OLMoE, Qwen3): its tokens a second without drafts,
what lookup makes of them, and what of that moejax has where drafts pay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from moejax import LLM, SamplingParams, UserError
from moejax.engine.drafts import Drafts, NgramDrafts
from moejax.engine.step_work import ScheduledWork
from moejax.requests.outputs import RequestOutput
from moejax.start.option_values import Speculation
from scripts.bench.peer_engines import Task
from scripts.bench.peers import Worker, write_gguf
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import running

TEXT = """The harbour was quiet when the boat came in. Two men tied it to the wall and carried the
nets up the steps. The older one counted the fish, wrote the number in a small book, and put the
book back in his coat. The younger one looked at the sky. There would be rain before the evening."""
QUESTIONS = (
    "What is a good way to learn a language?",
    "Why is the sky blue?",
    "How do I make bread?",
    "Which animals sleep in winter?",
)


def prompts_of(task: str, count: int) -> list[str]:
    """Returns so many prompts, no two of them equal."""
    if task == "chat":
        questions = (QUESTIONS[i % len(QUESTIONS)] for i in range(count))
        return [f"Question {i}: {text}\nAnswer:" for i, text in enumerate(questions)]
    texts = [f"{i}. {TEXT}" for i in range(count)]
    if task == "story":
        return texts
    return [f"{text}\n\nThe same text again:\n\n{text[:80]}" for text in texts]


def ways() -> dict[str, Drafts | None]:
    """Returns the drafts of an engine by name: without, always, where they pay."""
    s = Speculation()
    lengths = s.num_speculative_tokens, s.prompt_lookup_max, s.prompt_lookup_min
    return {
        "plain": None,
        "always": NgramDrafts(*lengths, adaptive=False),
        "adaptive": NgramDrafts(*lengths),
    }


STEP_S, ROW_S, LOOK_S = 4e-3, 1e-3, 1e-3
"""Of a step, of each row with a token, and of a wait for the tokens that drafts follow."""


def counting(llm: LLM, drafts: Drafts | None) -> tuple[Drafts, Counter[str]]:
    """Returns drafts that take counted seconds for measured ones, and what they count: seconds,
    decode steps, experts moved and their bytes.

    - `drafts`: None: drafts of no tokens.
    """
    drafts = drafts or NgramDrafts(0, 1, 1, adaptive=False)
    after_read, statistics = drafts.after_read, llm.engine.statistics
    queue, found = llm.engine.runner.steps.queue, Counter[str]()
    seen: Counter[str] = Counter()

    def moved() -> dict[str, int]:
        experts = statistics.paging["fills"] + statistics.paging["read_through"]
        return {"experts": experts, "MB": sum(statistics.moved.values())}

    def after_step(work: ScheduledWork, seconds: float | None, rows: int) -> None:
        new = Counter(moved())
        new.subtract(seen)
        seen.update(new)
        used = len(work.rows) + sum(len(draft.tokens) for draft in work.drafts)
        taken = STEP_S + ROW_S * used + LOOK_S * (work.drafting > 0)
        taken += new["MB"] / queue.rate if queue else 0.0
        if used:
            found.update(new | {"steps": 1, "seconds": taken})
        after_read(work, taken, rows)

    seen.update(moved())
    drafts.after_read, drafts.clock = after_step, lambda: 0.0
    return drafts, found


def count(llm: LLM, prompts: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Returns the counts of one cell. Raises UserError if tokens differ."""
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    found: dict[str, Counter[str]] = {}
    answers: list[list[Sequence[int]]] = []
    for name, drafts in ways().items():
        llm.engine.runner.forget_experts()
        llm.engine.drafts, found[name] = counting(llm, drafts)
        for _ in range(args.rounds + 1):
            outputs: list[RequestOutput] = llm.generate(prompts, params, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
    if any(answer != answers[0] for answer in answers):
        raise UserError("drafts changed a token")
    plain = found["plain"]
    return {
        **{name: plain["seconds"] / found[name]["seconds"] for name in ("always", "adaptive")},
        **{
            f"{kind} {name}": counts[kind] / 1e6 if kind == "MB" else counts[kind]
            for name, counts in found.items()
            for kind in ("steps", "experts", "MB")
        },
    }


def measure(
    llm: LLM, prompts: list[str], args: argparse.Namespace, llama: Worker | None
) -> dict[str, Any]:
    """Runs one cell. Returns tokens a second and ratios. Raises UserError if tokens differ.
    llama: is asked by turns too."""
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    drafts = {**ways(), "again": None}
    names = list(drafts)
    theirs = {"llama": 0, "lookup": Speculation().num_speculative_tokens} if llama else {}
    found: dict[str, list[float]] = {name: [] for name in [*drafts, *theirs]}
    for turn in range(args.rounds + 1):
        answers: list[list[Sequence[int]]] = []
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            llm.engine.drafts = drafts[name]
            began = time.perf_counter()
            outputs: list[RequestOutput] = llm.generate(prompts, params, use_tqdm=False)
            found[name].append(time.perf_counter() - began)
            answers.append([output.outputs[0].token_ids for output in outputs])
        if any(answer != answers[0] for answer in answers):
            raise UserError("drafts changed a token")
        for name, drafted in theirs.items():
            assert llama is not None
            prompt = list(outputs[0].prompt_token_ids)
            said = llama.ask("generate", prompt=prompt, count=args.tokens, drafted=drafted)
            found[name].append(said["seconds"])
    # The first round warms up, and lets the engine measure which way is faster.
    seconds = {name: np.array(times[1:]) for name, times in found.items()}
    tokens = len(prompts) * args.tokens
    always = drafts["always"]
    assert always is not None
    drafted = always.counts["drafted"]
    return {
        "plain": tokens / float(np.median(seconds["plain"])),
        **{
            name: float(np.median(seconds["plain"] / seconds[name]))
            for name in ("always", "adaptive", "again")
        },
        "accepted": always.counts["accepted"] / drafted if drafted else 0.0,
        **peer_rates(seconds, tokens),
    }


def peer_rates(seconds: dict[str, np.ndarray], tokens: int) -> dict[str, float | None]:
    """llama.cpp's tokens a second, what lookup makes of them, and moejax's with drafts where they
    pay, of those."""
    if "llama" not in seconds:
        return dict.fromkeys(("llama", "lookup", "ours"))
    return {
        "llama": tokens / float(np.median(seconds["llama"])),
        "lookup": float(np.median(seconds["llama"] / seconds["lookup"])),
        "ours": float(np.median(seconds["lookup"] / seconds["adaptive"])),
    }


def llama_of(stack: ExitStack, model: str, python: str) -> Worker:
    """A process with llama.cpp that has this checkpoint's weights, until the stack ends."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    path = folder / "model.gguf"
    write_gguf(python, Path(model), path)
    fields = json.loads(Path(model, "config.json").read_text())
    worker = Worker("llama.cpp", python, Task(str(path), fields["vocab_size"], batch=1))
    stack.callback(worker.close)
    worker.answer()
    return worker


def cells(args: argparse.Namespace, llama: Worker | None) -> Iterator[dict[str, Any]]:
    """Yields the rows: budgets × links × tasks × requests."""
    batches, links = [int(n) for n in args.requests.split(",")], args.links.split(",")
    chosen = set(args.cells.split(",")) if args.cells else None
    for budget in args.budgets.split(","):
        for link in [None] if budget == "100%" or links == [""] else links:
            every = itertools.product(("edit", "chat", "story"), batches)
            mine = [
                (task, requests)
                for task, requests in every
                if chosen is None or f"{budget}:{link or ''}:{task}:{requests}" in chosen
            ]
            if not mine:
                continue
            with LLM(
                args.model,
                expert_budget=budget,
                transfers=link and f"queue,rate={link}",
                max_num_seqs=2 * max(batches),
                max_model_len=512,
                speculative_config=Speculation(),
                progress=False,
            ) as llm:
                for task, requests in mine:
                    cell = {"budget": budget, "link": link, "task": task, "requests": requests}
                    prompts = prompts_of(task, requests)
                    if args.counted:
                        yield cell | count(llm, prompts, args)
                    else:
                        yield cell | measure(llm, prompts, args, llama if requests == 1 else None)


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    positive(args, "tokens", "rounds")
    names = ("budget", "link", "task", "requests")
    ratios = [(name, f"{{{name}:.2f}}×") for name in ("always", "adaptive")]
    llamas = (
        ("llama.cpp", "{llama:.0f}"),
        ("lookup", "{lookup:.2f}×"),
        ("ours ÷ lookup", "{ours:.2f}"),
    )
    columns = [(name, f"{{{name}}}") for name in names]
    if args.counted:
        kinds = itertools.product(("steps", "experts", "MB"), ways())
        columns += [*ratios, *((f"{kind} {way}", f"{{{kind} {way}:.0f}}") for kind, way in kinds)]
    else:
        columns += [("tokens/s", "{plain:.0f}"), *ratios, ("again", "{again:.2f}×")]
        columns += [("accepted", "{accepted:.0%}")]
        columns += llamas if args.llama_python else ()
    with ExitStack() as stack:
        llama = llama_of(stack, args.model, args.llama_python) if args.llama_python else None
        rows = cells(args, llama)
        for line in map(json.dumps, rows) if args.json else running(columns, rows):
            print(line, flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("--model", default="demo", help="(default: %(default)s)")
    add("--requests", default="1,4,16", metavar="N,…", help="at once (default: %(default)s)")
    add("--budgets", default="100%,50%,25%", metavar="SHARE,…", help="(default: %(default)s)")
    add("--links", default="", metavar="RATE,…", help="simulated (default: steps copy themselves)")
    add("--cells", metavar="BUDGET:LINK:TASK:N,…", help="only these of them")
    add("--llama-python", metavar="PYTHON", help="interpreter that has llama-cpp-python")
    add("--tokens", type=int, default=64, help="of an answer (default: %(default)s)")
    add("--rounds", type=int, default=3, help="that count (default: %(default)s)")
    add("--counted", action="store_true", help="count steps and experts: for a busy machine")
    add("--json", action="store_true", help="one JSON object a cell")
    return parser
