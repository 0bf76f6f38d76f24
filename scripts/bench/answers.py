"""Quality by exact answers: precisions of experts, with intervals over seeds.

python -m scripts.bench answers [--model DIR] [--precision P ...] [--count 40] [--seeds 5]

Each seed has other held-out tasks of each domain (scripts/texts), the same for every precision. In
a precision, `map=train` keeps the experts high that training texts of all domains select most,
`map=own` those of the domain itself, and `seed=each` draws anew for each seed. DynaExq goes on from
domain to domain. In the place of a precision may stand an option by which dense experts change
outputs, cache_aware_routing=buddies=train or placement=ktransformers,defer=2: --budget of the
experts is resident then. Intervals are 95%, Student's t over the seeds, of shares cut to 0 and 1;
points are paired with the first precision. Perplexity is of the tasks with their right answers;
nothing is deferred in it.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax import LLM, SamplingParams, UserError
from moejax.evaluate.comparison import over_seeds
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import aligned, show
from scripts.texts import chat, exact
from scripts.texts.documents import document, held_out_tasks, is_right
from scripts.texts.score import as_chat

RESEARCH = Path(__file__).parents[2] / "examples/models/research"
MIXED = "hi=int8,lo=int2,hi_share=33%"
"""In the bytes of int4."""
PRECISIONS = (
    *("int4", "dense", "int8", "int2"),
    f"map=train,{MIXED}",
    f"map=own,{MIXED}",
    f"random,seed=each,{MIXED}",
    f"dynaexq,{MIXED},interval=512 tokens,spares=2",
    f"dynaexq,{MIXED},interval=512 tokens,spares=2,margin=0.0",
)
LEARNS = re.compile(r"\b(map|buddies)=(train|own)(?=,|$)")
CHANGING: Mapping[str, Mapping[str, str]] = {
    "cache_aware_routing": {},
    "placement": {"driver": "host", "transfers": "queue"},
}
"""Options by which dense experts change outputs, with what they need beside them."""
COLUMNS = (
    ("precision", "{precision}"),
    ("MB", "{mb:.1f}"),
    ("right", "{right:.1%} [{low:.1%}, {high:.1%}]"),
    ("points over the first", "{over:+.1f} [{over_low:+.1f}, {over_high:+.1f}]"),
    ("perplexity", "{perplexity:.4f}"),
    ("over the first", "{above:+.2%} [{above_low:+.2%}, {above_high:+.2%}]"),
    ("transitions", "{transitions}"),
)


def expert_bytes(llm: LLM) -> int:
    """Returns the bytes that resident experts take; of two versions with the spare cells."""
    spec, budget, steps = llm.plan.spec, llm.plan.budget, llm.plan.steps
    if len(spec.version_bytes) > 1 or steps.favours_residents or steps.second is not None:
        return (budget.slots - budget.kv_slots) * steps.layout.slot_bytes
    (sizes,) = spec.version_bytes.values()
    return spec.experts * int(np.sum(sizes))


def with_traces(precision: str, trace: Callable[[], Path]) -> str:
    """Returns the precision with a trace's path in the place of `train` and `own`."""
    return LEARNS.sub(lambda found: f"{found[1]}={trace()}", precision)


class Answers:
    """Runs precisions on the tasks of a model.

    - `folder`: of the traces that maps learn from.
    """

    def __init__(self, args: argparse.Namespace, folder: Path):
        self._args, self._folder = args, folder

    def _trace(self, domains: Sequence[str]) -> Path:
        """Returns a trace of the model's routing of training texts, recorded once."""
        path = self._folder / "-".join(domains)
        if not path.exists():
            texts = [document(domain, i) for domain in domains for i in range(self._args.count)]
            with self._engine("dense", trace=str(path)) as llm:
                tokenizer = llm.get_tokenizer()
                assert tokenizer is not None
                llm.score_batch([tokenizer.encode(text)[: self._args.length] for text in texts])
        return path

    def _engine(self, precision: str, **options: Any) -> LLM:
        budget = None if "hi_share=" in precision else "100%"  # which says it, too
        limits = {"max_num_seqs": 16, "max_model_len": self._args.length, "progress": False}
        given = {"expert_budget": budget, "precision": precision, **limits, **options}
        name, _, value = precision.partition("=")
        if name in CHANGING:
            changing = {"expert_budget": self._args.budget, "precision": "dense", name: value}
            given |= {**changing, **CHANGING[name]}
        return LLM(self._args.model, **given)

    def rows(self, precision: str) -> dict[str, Any]:
        """Returns, by seed and domain, the share of right answers and the bits a token, and what
        the experts take."""
        args = self._args
        learns, by_seed = LEARNS.search(precision), "seed=each" in precision
        by_domain = learns is not None and learns[2] == "own"
        right, bits = np.zeros((2, args.seeds, len(args.domains)))
        megabytes, transitions = 0.0, None
        seeds = [[seed] for seed in range(args.seeds)] if by_seed else [[*range(args.seeds)]]
        domains = [[name] for name in args.domains] if by_domain else [args.domains]
        for some in seeds:
            for names in domains:
                asked = precision.replace("seed=each", f"seed={some[0]}")
                asked = with_traces(asked, lambda names=names: self._trace(names))
                with self._engine(asked) as llm:
                    for seed in some:
                        for name in names:
                            place = seed, args.domains.index(name)
                            right[place], bits[place] = self._run(llm, name, seed)
                    megabytes = expert_bytes(llm) / 1e6
                    said = llm.stats()["precision"] or {}
                    if "promotions" in said:
                        transitions = said["promotions"] + said["demotions"]
        return {"right": right, "bits": bits, "mb": megabytes, "transitions": transitions}

    def _run(self, llm: LLM, domain: str, seed: int) -> tuple[float, float]:
        """Returns (the share of right answers, bits a token of the tasks)."""
        count = self._args.count
        tasks = held_out_tasks(domain, count, seed * count)
        params = SamplingParams(temperature=0, max_tokens=self._args.tokens)
        prompts = [as_chat(question) for question, _ in tasks]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        pairs = zip(tasks, outputs, strict=True)
        right = [is_right(domain, task[1], output.outputs[0].text) for task, output in pairs]
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        ids = [tokenizer.encode(chat.render([task]))[: self._args.length] for task in tasks]
        scores = llm.score_batch(ids)
        total = -sum(float(np.sum(each, dtype=np.float64)) for each in scores)
        return float(np.mean(right)), total / np.log(2) / sum(map(len, scores))


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row of each precision."""
    rows, first = [], None
    with tempfile.TemporaryDirectory() as directory:
        answers = Answers(args, Path(directory))
        for precision in args.precision:
            found = answers.rows(precision)
            first = first or found
            # A seed's share and bits are means over its domains.
            right, bits = found["right"].mean(axis=1), found["bits"].mean(axis=1)
            over = 100 * (right - first["right"].mean(axis=1))
            above = 2.0 ** (bits - first["bits"].mean(axis=1)) - 1
            row = {"precision": precision, "mb": found["mb"], "transitions": found["transitions"]}
            share = np.clip(over_seeds(right.tolist()), 0, 1).tolist()
            row |= dict(zip(("right", "low", "high"), share, strict=True))
            row |= dict(zip(("over", "over_low", "over_high"), over_seeds(over), strict=True))
            row |= dict(zip(("above", "above_low", "above_high"), over_seeds(above), strict=True))
            row["perplexity"] = 2.0 ** float(bits.mean())
            by_domain = found["right"].mean(axis=0).tolist()
            rows.append(row | dict(zip(args.domains, by_domain, strict=True)))
    return rows


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__ or "")
    add = parser.add_argument
    add("--model", default=str(RESEARCH), help="(default: examples/models/research)")
    add("--precision", nargs="+", default=[*PRECISIONS], help="(default: nine)")
    add("--budget", default="50%", help="of options that change outputs (default: 50%%)")
    add("--domains", nargs="+", default=["arithmetic", "python"], help="(default: %(default)s)")
    add("--count", type=int, default=40, help="tasks of a domain and seed (default: %(default)s)")
    add("--seeds", type=int, default=5, help="(default: %(default)s)")
    add("--tokens", type=int, default=160, help="most tokens of an answer (default: %(default)s)")
    add("--length", type=int, default=512, help="most tokens of a task (default: %(default)s)")
    add("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(arguments)
    positive(args, "count", "seeds", "tokens", "length")
    for name in args.domains:
        if name not in exact.DOMAINS:
            raise UserError(f"--domains: {name} is none of {', '.join(exact.DOMAINS)}")
    rows = compare(args)
    columns = (*COLUMNS, *((name, f"{{{name}:.1%}}") for name in args.domains))
    show(args.json, rows, aligned(columns, rows))
    return 0
