"""Does the cost model predict what the engine then takes, and does it order policies likewise?

python -m scripts.policies predictions DIR [--models demo,tri,wide] [--repeats 5]
    [--links none,2GB/s]

For each model: calibrates, then runs held-out configurations (batch × prompt × policy × cells ×
link) in engines, one of each link rate, in rounds that alternate, and predicts each from a trace of
its routing. Nothing of these runs is used for the calibration, which has no link. The first round
compiles and writes the traces and is not timed. A run begins with nothing resident; simulated and
measured misses must be equal. link: "none" has no queue, experts move within steps.

Writes DIR/predictions.jsonl and DIR/predictions.md. A step's time is that from result to result.
Errors are of decode steps: of a run's p50 and p99 over its steps, a step's time being its median
over the repeats (what the work takes), and of the p99 of all single times, which has the machine's
noise too. Kendall's tau compares the order of policies and cells by mean step time within a model,
batch and prompt; "told apart" leaves out pairs whose 95% intervals of the measured mean overlap.
The step error is of a configuration's mean decode step: its median and its worst.

wide: random weights, 2 layers of 32 experts of 3 MB, and steps of at most 2 rows, so that a miss is
not lost beside an expert's products even on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import shutil
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from host_offload.policies.eviction.names import with_eviction
from host_offload.policies.prefetch.names import with_prefetch
from host_offload.simulate.bounds import stall_bound
from host_offload.simulate.prediction import Prediction, predict
from host_offload.simulate.timeline import Link
from host_offload.sizing.cost_model import CostModel
from host_offload.traces.reader import read_trace
from moejax import SamplingParams, UserError
from moejax.cache import use_compilation_cache
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.checkpoints.random_model import random_model
from moejax.costs.measure import calibrate
from moejax.device import select_device
from moejax.engine.control import spec_of_engine
from moejax.engine.loop import Engine
from moejax.models.config import parse_config
from moejax.sizes import parse_rate
from moejax.start.build import start_engine
from moejax.start.options import Options
from moejax.traces.tracer import start_trace
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.intervals import bootstrap
from scripts.parts.places import DEMO, TRI
from scripts.parts.text_table import markdown

WIDE = dict(
    model_type="qwen3_moe",
    norm_topk_prob=True,
    dtype="float32",
    num_hidden_layers=2,
    hidden_size=512,
    moe_intermediate_size=512,
    num_experts=32,
    num_experts_per_tok=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=4096,
    max_position_embeddings=1024,
)
POLICIES = ("lru", "lfu", "lru + random")
WORKLOADS = ((1, 24), (8, 24), (4, 200))
"""(batch, prompt tokens)"""
WIDE_WORKLOADS = ((1, 24), (2, 24), (2, 200))
SHARES = (0.25, 0.75)
"""Cells by a layer's experts."""
LONGEST = 768
NO_LINK = "none"


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A held-out run."""

    model: str
    batch: int
    prompt: int
    policy: str
    cells: int
    link: str = NO_LINK

    @property
    def place(self) -> str:
        name, link = self.policy.replace(" + ", "-"), self.link.replace("/", "-")
        # Not a checkpoint's folder, which is elsewhere.
        model = Path(self.model).name
        return f"{model}-{self.batch}x{self.prompt}-{name}-{self.cells}-{link}"

    @property
    def eviction(self) -> str:
        return self.policy.split(" + ")[0]

    @property
    def prefetch(self) -> str | None:
        return self.policy.split(" + ")[1] if " + " in self.policy else None

    @property
    def queue(self) -> Link | None:
        """What the simulator knows the link by."""
        return None if self.link == NO_LINK else Link(parse_rate(self.link))


@dataclasses.dataclass
class Timed:
    """What the repeats of a configuration took: seconds[repeat][step]."""

    decode: list[list[float]] = dataclasses.field(default_factory=list)
    total: list[float] = dataclasses.field(default_factory=list)
    compiled_steps: int = 0
    moved: int = 0
    """Misses of the first repeat."""


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    args.directory.mkdir(parents=True, exist_ok=True)
    if min(args.repeats, args.tokens) < 2:
        raise UserError("--repeats and --tokens must be at least 2")
    positive(args, "configurations")
    for link in {*args.links.split(",")} - {NO_LINK}:
        parse_rate(link)
    lines = [line for name in args.models.split(",") for line in check(args, name)]
    text = report(lines)
    with open(args.directory / "predictions.jsonl", "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    (args.directory / "predictions.md").write_text(text)
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="of traces and results")
    has_tri = TRI.is_dir()
    models = "demo,tri,wide" if has_tri else "demo,wide"
    parser.add_argument("--models", default=models, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds (%(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="of a sequence (%(default)s)")
    add = parser.add_argument
    links = "of engines with a queue, by commas; none: without one (%(default)s)"
    parser.add_argument("--links", default=NO_LINK, metavar="RATES", help=links)
    known = "by commas, an eviction and perhaps a prefetch each (%(default)s)"
    add("--policies", default=",".join(POLICIES), help=known)
    add("--configurations", type=int, metavar="N", help="the first N of each model (default: all)")
    add(
        "--longest",
        type=int,
        default=LONGEST,
        help="tokens that sequences have room for, also "
        "those that are calibrated with (%(default)s)",
    )
    parser.add_argument("--driver", default="device", help="device or host (%(default)s)")
    return parser


# ---- running


def check(args: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    """A line for each held-out configuration of a model."""
    links = args.links.split(",")
    policies = args.policies.split(",")
    chosen = list(itertools.islice(held_out(name, 1, links, policies), args.configurations))
    if (least := max(each.prompt for each in chosen) + args.tokens) > args.longest:
        raise UserError(f"--longest must be at least {least}, got {args.longest}")
    batch = max(each.batch for each in chosen)
    with engines_of(args, name, batch, {NO_LINK, *links}) as engines:
        runner = engines[NO_LINK].runner
        model = calibrate(runner)
        found = held_out(name, runner.config.num_experts, links, policies)
        configurations = list(itertools.islice(found, args.configurations))
        timed = {each: Timed() for each in configurations}
        prompts = np.random.default_rng(7).integers(
            runner.config.vocab_size, size=(runner.shapes.rows, args.longest)
        )
        for repeat in range(args.repeats + 1):
            for each in configurations:
                trace = args.directory / each.place if repeat == 0 else None
                run(engines[each.link], each, prompts, args.tokens, timed[each], trace)
        began = time.perf_counter()
        foretold = {each: predicted_of(args, each, model) for each in configurations}
        seconds = time.perf_counter() - began
        print(f"{name}: {len(configurations)} configurations predicted in {seconds:.1f} s")
        for each, predicted in foretold.items():
            misses = int(predicted.simulation.misses.sum())
            if misses != timed[each].moved:
                raise RuntimeError(f"{each}: {misses} misses simulated, {timed[each].moved} real")
            yield line_of(each, timed[each], predicted, model, engines[each.link])


def predicted_of(args: argparse.Namespace, each: Configuration, model: CostModel) -> Prediction:
    trace = read_trace(args.directory / each.place)
    return predict(
        trace,
        model,
        link=each.queue,
        cells=each.cells,
        eviction=each.eviction,
        prefetch=each.prefetch,
    )


def held_out(
    name: str,
    experts: int,
    links: Sequence[str] = (NO_LINK,),
    policies: Sequence[str] = POLICIES,
) -> Iterator[Configuration]:
    workloads = WIDE_WORKLOADS if name == "wide" else WORKLOADS
    for (batch, prompt), share in itertools.product(workloads, SHARES):
        for policy, link in itertools.product(policies, links):
            yield Configuration(name, batch, prompt, policy, round(share * experts), link)


@contextmanager
def engines_of(
    args: argparse.Namespace, name: str, batch: int, links: Collection[str]
) -> Iterator[dict[str, Engine]]:
    """An engine of each link rate with room for all experts and the KV of the largest batch."""
    use_compilation_cache(None)
    device = select_device()
    loaded = load(name, device)
    options = Options(
        name,
        eviction="lru",  # with cells
        driver=args.driver,
        max_num_seqs=batch,
        max_model_len=min(args.longest, loaded.config.max_position_embeddings),
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
    )
    engines: dict[str, Engine] = {}
    try:
        for link in sorted(links):
            rated = {} if link == NO_LINK else {"link_rate": link}
            engines[link], _ = start_engine(loaded, dataclasses.replace(options, **rated), device)
            engines[link].runner.wait_compiled(everything=True)
        yield engines
    finally:
        for engine in engines.values():
            engine.runner.delete()


def load(name: str, device: jax.Device) -> LoadedModel:
    if name == "wide":
        return random_model(parse_config(WIDE, "wide"), "float32", device)
    places = {"demo": DEMO, "tri": TRI}
    return load_checkpoint(places.get(name, Path(name)), "auto", device)


def run(
    engine: Engine,
    each: Configuration,
    prompts: np.ndarray,
    tokens: int,
    timed: Timed,
    trace: Path | None,
) -> None:
    """One run from a cold start. trace: write one there, and do not time."""
    cold(engine, each)
    if trace is not None:
        shutil.rmtree(trace, ignore_errors=True)
        spec = spec_of_engine(engine.runner, max_model_len=engine.scheduler.max_model_len, seed=0)
        settings = {"eviction": each.eviction}
        engine.tracer = start_trace(trace, engine.runner, spec, settings=settings)
    before = dict(engine.statistics.paging)
    engine.events, kinds, compiled = deque(), {}, []

    def listen(step: Any) -> None:
        kinds[step.number] = step.kind
        compiled.append(step.compiled)

    engine.listener = listen
    jax.block_until_ready(engine.runner.tables)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    for prompt in prompts[: each.batch, : each.prompt].tolist():
        engine.add(prompt, params)
    while not engine.idle:
        engine.step()
    engine.listener = None
    reads = [(e.step, e.seconds) for e in engine.events if e.what == "read"]
    if engine.tracer is not None:
        engine.tracer.close()
        engine.tracer = None
        timed.compiled_steps = sum(compiled)
        after = engine.statistics.paging
        timed.moved = sum(after[n] - before[n] for n in ("fills", "read_through"))
        return
    times = zip(reads, [began, *(seconds for _, seconds in reads)], strict=False)
    timed.decode.append([s - last for (n, s), last in times if kinds[n] == "decode"])
    timed.total.append(reads[-1][1] - began)


def cold(engine: Engine, each: Configuration) -> None:
    """Nothing resident, no uses counted, policies without memory of the run before."""
    spec = spec_of_engine(engine.runner, max_model_len=engine.scheduler.max_model_len, seed=0)
    _, policies = with_eviction(each.eviction, with_prefetch(each.prefetch, ()))
    engine.begin_anew(spec, policies, [each.cells] * spec.layers)


# ---- results


def line_of(
    each: Configuration, timed: Timed, predicted: Prediction, model: CostModel, engine: Engine
) -> dict[str, Any]:
    times = np.array(timed.decode)  # [repeats, steps]
    of_step = np.median(times, axis=0)
    means = times.mean(axis=1)
    decode = predicted.of_kind("decode")
    measured = {
        "p50": np.percentile(of_step, 50),
        "p99": np.percentile(of_step, 99),
        "p99_raw": np.percentile(times, 99),
        "mean": np.median(means),
        "total": np.median(timed.total),
    }
    foretold = {
        "p50": np.percentile(predicted.seconds[decode], 50),
        "p99": np.percentile(predicted.seconds[decode], 99),
        "p99_raw": np.percentile(predicted.seconds[decode], 99),
        "mean": predicted.mean_s(),
        "total": predicted.seconds.sum(),
    }
    return {
        "date": datetime.date.today().isoformat(),
        "device": "CPU" if engine.runner.device.platform == "cpu" else model.about["device"],
        **dataclasses.asdict(each),
        "steps": int(decode.sum()),
        "repeats": len(timed.decode),
        "compiled_steps": timed.compiled_steps,
        "misses_per_step": float(predicted.simulation.misses[decode].sum() / decode.sum()),
        "staged_per_step": float(predicted.simulation.staged[decode].sum() / decode.sum()),
        "measured_ms": {name: float(value) * 1e3 for name, value in measured.items()},
        "predicted_ms": {name: float(value) * 1e3 for name, value in foretold.items()},
        "mean_interval_ms": [bound * 1e3 for bound in bootstrap(means)],
        "stall_share": predicted.stall_share,
        "stall_bound_share": stall_bound_share(predicted),
    }


def stall_bound_share(predicted: Prediction) -> float:
    """What of its `stall_share` no overlap of the link with computing could hide, see
    bounds.stall_bound: the same bytes at the link's rate, less the time in which steps compute,
    over the time that both then take."""
    compute = float(predicted.compute_s.sum())
    least = stall_bound(predicted.bytes, compute, seconds_per_byte=predicted.link_per_byte)
    return least / (compute + least)


def errors(lines: Sequence[dict[str, Any]], figure: str) -> np.ndarray:
    """(predicted − measured) / measured"""
    measured = np.array([line["measured_ms"][figure] for line in lines])
    return np.array([line["predicted_ms"][figure] for line in lines]) / measured - 1


def kendall(lines: Sequence[dict[str, Any]], *, apart: bool) -> tuple[float, int]:
    """(Kendall's tau-a of mean step times, pairs) within each model, batch and prompt. apart: only
    pairs whose measured intervals do not overlap. nan without pairs."""
    score = pairs = 0
    for one, other in itertools.combinations(lines, 2):
        if any(one[name] != other[name] for name in ("model", "batch", "prompt")):
            continue
        (low, high), (lower, higher) = one["mean_interval_ms"], other["mean_interval_ms"]
        if apart and low <= higher and lower <= high:
            continue
        signs = [
            np.sign(one[kind]["mean"] - other[kind]["mean"])
            for kind in ("measured_ms", "predicted_ms")
        ]
        score, pairs = score + int(signs[0] * signs[1]), pairs + 1
    return (score / pairs if pairs else float("nan")), pairs


COLUMNS = (
    *(
        (n, "{" + n + "}")
        for n in ("device", "model", "batch", "prompt", "policy", "cells", "link")
    ),
    ("misses", "{misses_per_step:.1f}"),
    *(("p50 ms", "{measured_ms[p50]:.2f}"), ("predicted", "{predicted_ms[p50]:.2f}")),
    *(("p99 ms", "{measured_ms[p99]:.2f}"), ("predicted", "{predicted_ms[p99]:.2f}")),
    ("raw p99", "{measured_ms[p99_raw]:.2f}"),
    *(("mean ms", "{measured_ms[mean]:.2f}"), ("predicted", "{predicted_ms[mean]:.2f}")),
    *(("stall", "{stall_share:.0%}"), ("bound", "{stall_bound_share:.0%}")),
)
_ERRORS = {"p50": "p50", "p99": "p99", "p99_raw": "raw p99", "total": "whole run"}
SUMMARY = (
    *(("of", "{of}"), ("configurations", "{count}")),
    *(
        column
        for name, said in _ERRORS.items()
        for column in ((f"{said}: MAPE", f"{{{name}:.1%}}"), ("worst", f"{{{name}_worst:+.1%}}"))
    ),
    *(
        ("tau", "{tau[0]:.2f} of {tau[1]} pairs"),
        ("told apart", "{apart[0]:.2f} of {apart[1]} pairs"),
    ),
    *(("step: median", "{step:.1%}"), ("worst", "{mean_worst:+.1%}")),
)


def summary(of: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of SUMMARY."""
    off = {name: errors(lines, name) for name in (*_ERRORS, "mean")}
    return {
        "of": of,
        "count": len(lines),
        **{name: np.mean(np.abs(values)) for name, values in off.items()},
        **{f"{name}_worst": v[np.argmax(np.abs(v))] for name, v in off.items()},
        "step": np.median(np.abs(off["mean"])),
        "tau": kendall(lines, apart=False),
        "apart": kendall(lines, apart=True),
    }


def report(lines: Sequence[dict[str, Any]]) -> str:
    """A table of all configurations, then errors and orders by model."""
    models = list(dict.fromkeys(line["model"] for line in lines))
    parts = [summary(name, [x for x in lines if x["model"] == name]) for name in models]
    parts += [summary("all", lines)] if len(models) > 1 else []
    text = [*markdown(COLUMNS, lines), "", *markdown(SUMMARY, parts)]
    compiled = sum(line["compiled_steps"] for line in lines)
    text += [
        "",
        f"{len(lines)} held-out configurations, {lines[0]['repeats']} interleaved repeats each; "
        f"{compiled} steps that compiled were left out. Device: "
        f"{', '.join(dict.fromkeys(line['device'] for line in lines))}.",
    ]
    return "\n".join(text) + "\n"
