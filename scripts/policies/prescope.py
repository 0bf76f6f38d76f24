"""PreScope's evaluation on its two machines, predicted by the event simulation: no GPU, no clock.

python -m scripts.policies prescope [--models Mixtral-8x7B,...] [--batches 1,4,16,64]
    [--machines V100,A100] [--cpu-flops 0.2e12] [--steps 4] [--json]

Decode steps of generated routing (`qwen3-like` of the model's shape) are played by every arm with
the rates below, and a prefill that loads all that is missing comes before 64 of them, for every arm
the same (512 tokens a row). Evidence class: prediction.

Stated: PCIe 3 and 4 × 16 at the paper's 79%; 70% of the GPU's memory and of the host's (6 channels
of DDR4-2933); half of the tensor cores' rate; 300 µs of launches a layer and 30 µs an expert; 32 GB
of which 3 are no arm's; buffers of the prefetch groups (2 of Mixtral's size, 8 of the others); keys
and values of 576 tokens a row, latent where the model's are; LLaPor right for the share of tokens
in the paper's Table 3, gate reuse for that over 1.4 (the paper has 15 to 68.4% between them), both
less with each layer ahead. What the host's cores do with one expert's rows is not printed: it is
fitted to one figure, 2.79 s a step of Mixtral on the V100 at batch 64, unless --cpu-flops says it.

Columns of the first table: tokens a second, prefill included; share of experts in the hot table.
The second: PreScope over each rival at the batches that the paper has, 4 to 64, and without a part
of it, beside the paper's best.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import routed_counts
from host_offload.policies.placement.correlation import successors
from host_offload.policies.placement.presched import PlacementCosts, hot_table
from host_offload.simulate.placement import right_predictions
from host_offload.traces.generators import routing_generator
from moejax.errors import UserError
from scripts.parts.commands import new_parser, refuse
from scripts.parts.text_table import aligned
from scripts.policies.placed_arms import REACH, Work, played

PROMPT, OUTPUT, CONTEXT = 512, 64, 544
"""Tokens of a row; those that a decode step reads on average."""

MEMORY, UNUSABLE = 32e9, 3e9
LAUNCHES, LAUNCH = 300e-6, 30e-6
OF_MEMORY, OF_COMPUTE, OF_LINK = 0.7, 0.5, 0.79
HOST_MEMORY = 140.8e9
PROFILE = 16
"""Sequences whose routing ranks the hot table."""

GATE = 1.4
FAR, NEARER = 0.63, 0.8
"""Far ahead a predictor is right for so many tokens (fitted in arXiv:2510.26730, as cited by a
survey); what it has beyond that shrinks by so much a layer (ours)."""

FITTED = ("Mixtral-8x7B", "V100", 64, 2.79)
"""Which of the paper's latencies says what the CPU does (section 6.2.3)."""

PAPER_BATCH = 4
"""The paper's least batch; a run of smaller ones alone is compared nevertheless."""

COMPARED = {"fate": 264.0, "fiddler": 129.0, "klotski": 141.0, "hybrimoe": 70.8}
"""Rival → PreScope's throughput over it at best, percent."""

UNCOMPARED = ("hybrimoe-code", "fate, cache", "expertflow", "fiddler-code", "llama.cpp", "greedy")

ABLATED = {
    "no hot table": ("DeepSeek-V2-Lite", "V100", 4, -22.2),
    "no PreSched": ("Mixtral-8x7B", "A100", 64, -54.1),
    "no-prediction": ("Moonlight-16B-A3B", "A100", 32, -20.2),
    "no asynchronous loads": ("Mixtral-8x7B", "A100", 64, -49.3),
}
"""Ablation → where the paper has its figure (the GPU of LLaPor's is not said), percent."""


class Model(NamedTuple):
    """Shapes of a model in the paper's Table 2, and sizes of what is not routed, in bytes."""

    layers: int
    experts: int
    top_k: int
    expert: float
    dense: float
    """A layer's attention and shared experts."""
    embeddings: float
    kv: float
    """A token's keys and values."""
    coverage: float
    """Share of tokens that LLaPor is right about (Table 3)."""
    group: int


MODELS = {
    "Mixtral-8x7B": Model(32, 8, 2, 352.3e6, 84e6, 0.52e9, 131072, 0.97, 2),
    "Qwen3-30B-A3B": Model(48, 128, 8, 9.44e6, 38e6, 1.24e9, 98304, 0.97, 8),
    "DeepSeek-V2-Lite": Model(26, 64, 6, 17.3e6, 62e6, 0.98e9, 31104, 0.95, 8),
    "Moonlight-16B-A3B": Model(26, 64, 6, 17.3e6, 62e6, 1.48e9, 31104, 0.98, 8),
}


class Machine(NamedTuple):
    """Peak rates, a second."""

    link: float
    memory: float
    flops: float


MACHINES = {"V100": Machine(15.754e9, 900e9, 125e12), "A100": Machine(31.508e9, 1555e9, 312e12)}


class Cell(NamedTuple):
    """One of the grid."""

    model: str
    machine: str
    batch: int


class Routing(NamedTuple):
    """What sequences of a model were routed to."""

    ids: np.ndarray
    """int16[T, N, L, k]"""
    profile: np.ndarray
    """int16[M, L, k]: tokens of other sequences."""


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        models = _known(args.models, MODELS)
        machines = _known(args.machines, MACHINES)
        batches = [int(each) for each in args.batches.split(",")]
        if min(batches) < 1 or args.steps < 2:
            raise UserError("batches are of 1 row and more, --steps is 2 or more")
        most = max(*batches, FITTED[2])
        flops = args.cpu_flops or fitted_flops(args.steps)
        found = {}
        for model in models:
            routing = routed(MODELS[model], most, args.steps)
            for machine in machines:
                for batch in batches:
                    cell = Cell(model, machine, batch)
                    found[cell] = predicted(cell, routing, flops)
    except (UserError, ValueError) as error:
        return refuse(__name__, error)
    if args.json:
        for cell, line in found.items():
            print(json.dumps({**cell._asdict(), "cpu_flops": flops, **line}))
        return 0
    print(f"the CPU: {flops / 1e12:.3f} TFLOP/s of one expert's rows")
    print(*_throughputs(found), sep="\n")
    print()
    print(*_beside_the_paper(found), sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="(%(default)s)")
    parser.add_argument("--machines", default=",".join(MACHINES), help="(%(default)s)")
    parser.add_argument("--batches", default="1,4,16,64", help="rows (%(default)s)")
    parser.add_argument("--cpu-flops", type=float, help="of the CPU, a second")
    parser.add_argument("--steps", type=int, default=4, help="decode steps played (%(default)s)")
    parser.add_argument("--json", action="store_true", help="a JSON line for each cell")
    return parser


def _known(given: str, known: dict[str, Any]) -> list[str]:
    names = given.split(",")
    for name in names:
        if name not in known:
            raise UserError(f"unknown {name!r}; known: {', '.join(known)}")
    return names


def routed(model: Model, rows: int, steps: int) -> Routing:
    """The routing of so many sequences, and of PROFILE others."""
    generator = routing_generator("qwen3-like", model.layers, model.experts, model.top_k)
    ids = np.stack([each.ids for each in generator.steps(rows + PROFILE, max(steps, PROFILE))])
    profile = ids[:, rows:].reshape(-1, model.layers, model.top_k)
    return Routing(ids[:steps, :rows], profile)


def resident_experts(model: Model, batch: int) -> int:
    """How many experts fit beside all else with so many rows."""
    buffers = (2 + 2 * model.group) * model.expert
    kv = batch * (PROMPT + OUTPUT) * model.kv
    left = MEMORY - UNUSABLE - model.layers * model.dense - model.embeddings - kv - buffers
    return min(max(int(left / model.expert), 0), model.layers * model.experts)


def costs_of(model: Model, machine: Machine, batch: int, flops: float) -> PlacementCosts:
    """The times of a decode step's parts."""
    memory = OF_MEMORY * machine.memory
    kv = batch * CONTEXT * model.kv / model.layers
    return PlacementCosts(
        per_token=model.expert / flops,  # 2 operations a weight of 2 bytes
        startup=model.expert / (OF_MEMORY * HOST_MEMORY),
        load=model.expert / (OF_LINK * machine.link),
        accelerator=model.expert / memory + LAUNCH,
        attention=(model.dense + kv) / memory + LAUNCHES,
    )


def prefill_seconds(model: Model, machine: Machine, batch: int, share: float) -> float:
    """All rows' prompts, where a share of the experts is resident and the others are loaded beside
    the computing."""
    tokens = batch * PROMPT
    flops = tokens * (model.top_k * model.expert + model.dense) / (OF_COMPUTE * machine.flops)
    loads = (1 - share) * model.experts * model.expert / (OF_LINK * machine.link)
    return model.layers * (max(flops, loads) + LAUNCHES)


def work_of(model: Model, routing: Routing, batch: int, *, batches: int = 1) -> Work:
    """A cell's work. batches: that are in memory together."""
    ids = routing.ids[:, :batch]
    tokens = np.stack([routed_counts(step, model.experts) for step in ids])
    frequency = routed_counts(routing.profile, model.experts)
    predictions = {
        name: _guessed(ids, right, frequency)
        for name, right in (("learned", model.coverage), ("gate", model.coverage / GATE))
    }
    table = hot_table(frequency, resident_experts(model, batches * batch))
    after = successors(routing.profile, model.experts, model.top_k)
    return Work(tokens, table, predictions, after, model.top_k, model.group)


def _guessed(ids: np.ndarray, right: float, frequency: np.ndarray) -> np.ndarray:
    """int[T, L, REACH, E]: rows of predictions that are right for a share of tokens, and else name
    an expert by its frequency."""
    steps, rows, layers, k = ids.shape
    random = np.random.default_rng(0)
    experts = frequency.shape[1]
    found = right_predictions(np.zeros((steps, layers, experts), np.int64), REACH)
    for d in range(1, min(REACH, layers - 1) + 1):
        share = FAR + (right - FAR) * NEARER ** (d - 1) if right > FAR else right
        for layer in range(layers - d):
            named = random.choice(
                experts,
                (steps, rows, k),
                p=(frequency[layer + d] + 1) / np.sum(frequency[layer + d] + 1),
            )
            kept = random.random((steps, rows, k)) < share
            said = np.where(kept, ids[:, :, layer + d], named)
            for step in range(steps):
                found[step, layer, d - 1] = np.bincount(said[step].ravel(), minlength=experts)
    return found


def predicted(cell: Cell, routing: Routing, flops: float) -> dict[str, Any]:
    """A cell's line: tokens a second and seconds of a step by arm, the share of residents."""
    model, machine = MODELS[cell.model], MACHINES[cell.machine]
    work = work_of(model, routing, cell.batch)
    costs = costs_of(model, machine, cell.batch, flops)
    line: dict[str, Any] = {"tokens_s": {}, "step_s": {}}
    ablated = [name for name, place in ABLATED.items() if place[:3] == cell]
    for name in ("prescope", *COMPARED, *UNCOMPARED, *ablated):
        batches = 2 if name == "klotski" else 1
        own = work if batches == 1 else work_of(model, routing, cell.batch, batches=2)
        predictor = "gate" if name in ("fate", "fate, cache", "hybrimoe") else "learned"
        step = played(name, predictor, own, costs, draws=2)["step_us"] * 1e-6
        rows, share = batches * cell.batch, float(own.resident.mean())
        whole = prefill_seconds(model, machine, rows, share) + OUTPUT * step
        line["tokens_s"][name] = rows * OUTPUT / whole
        line["step_s"][name] = step
    line["resident"] = float(work.resident.mean())
    return line


def fitted_flops(steps: int) -> float:
    """The rate of the CPU with which PreScope's step takes what the paper has in FITTED."""
    name, machine, batch, wanted = FITTED
    model = MODELS[name]
    work = work_of(model, routed(model, batch, steps), batch)
    low, high = 0.02e12, 5e12
    for _ in range(12):
        middle = (low * high) ** 0.5
        costs = costs_of(model, MACHINES[machine], batch, middle)
        slow = played("prescope", "learned", work, costs)["step_us"] * 1e-6 > wanted
        low, high = (middle, high) if slow else (low, middle)
    return (low * high) ** 0.5


def _throughputs(found: dict[Cell, dict[str, Any]]) -> Iterator[str]:
    names = ("prescope", *COMPARED, *UNCOMPARED)
    columns = [("model", "{cell.model}"), ("GPU", "{cell.machine}"), ("batch", "{cell.batch}")]
    columns += [("resident", "{resident:.0%}"), ("step s", "{step_s[prescope]:.3f}")]
    columns += [(name, f"{{tokens_s[{name}]:.1f}}") for name in names]
    yield from aligned(columns, [{"cell": cell, **line} for cell, line in found.items()])


def _beside_the_paper(found: dict[Cell, dict[str, Any]]) -> Iterator[str]:
    lines = []
    for name in (*COMPARED, *UNCOMPARED):
        gains = {
            cell: 100 * (line["tokens_s"]["prescope"] / line["tokens_s"][name] - 1)
            for cell, line in found.items()
            if cell.batch >= PAPER_BATCH or all(c.batch < PAPER_BATCH for c in found)
        }
        best = max(gains, key=gains.__getitem__)
        lines.append(
            {
                "name": f"over {name}",
                "paper": f"{COMPARED[name]:+.1f}%" if name in COMPARED else "",
                "here": f"{gains[best]:+.1f}%",
                "where": f"{best.model} {best.machine} {best.batch}",
                "median": f"{np.median([*gains.values()]):+.1f}%",
                "worst": f"{min(gains.values()):+.1f}%",
            }
        )
    for name, (model, machine, batch, paper) in ABLATED.items():
        if (line := found.get(Cell(model, machine, batch))) is None:
            continue
        change = 100 * (line["tokens_s"][name] / line["tokens_s"]["prescope"] - 1)
        lines.append(
            {
                "name": name,
                "paper": f"{paper:+.1f}%",
                "here": f"{change:+.1f}%",
                "where": f"{model} {machine} {batch}",
                "median": "",
                "worst": "",
            }
        )
    titles = ("name", "paper", "here", "where", "median", "worst")
    heads = ("PreScope", "paper", "here", "at", "median", "worst")
    yield from aligned([(h, f"{{{t}}}") for h, t in zip(heads, titles, strict=True)], lines)
