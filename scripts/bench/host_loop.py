"""What the host does between two steps, and how long it takes: the engine over a fake device.

python -m scripts.bench host_loop [--sequences 256 --layers 48 --experts 128] [--json]

Engine, scheduler, cache of KV pages, statistics, sampler, controller and tracer are the real ones;
the runner returns made-up numpy results at once. So the figures are pure host code: without the
dispatch of executables (65 us each on an H200's machine) and without the copies of results. The
state is steady: all rows decode, pages grow, and for each request that ends another one arrives.

A part's time is its own, without that of parts called from it, so parts add up to the step. `floor`
is a bare loop over the sequences that counts and appends, which any scheduler in Python has.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.memory.arena import SlotArena
from host_offload.memory.kv_cache import KVCache
from host_offload.memory.tables import empty_tables, with_contents
from host_offload.queue.native import Totals
from host_offload.versions.layer_versions import record_bytes, version_bytes
from moejax import SamplingParams, UserError
from moejax.checkpoints.random_model import SHAPES, shape
from moejax.engine.control import control_of, spec_of_engine
from moejax.engine.loop import Engine
from moejax.engine.scheduler import Scheduler
from moejax.engine.statistics import Statistics
from moejax.models.config import ModelConfig
from moejax.requests.request import PrefillKind
from moejax.step.parts import Routing, StepOutput, StepShapes, StepSpec
from moejax.step.programs import ProgramKey
from moejax.step.results import ResultShape
from moejax.traces.tracer import start_trace
from pallas_kernels import resolve_ops
from pallas_kernels.cpu.arena import TransferFailure
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.controllers import start_controller
from scripts.parts.text_table import aligned, show

MODES = ("plain", "control", "trace", "both")
"""What runs beside the engine: nothing, a policy that follows the routing, a tracer."""

TARGET_MS = 1.5
"""The goal for a decode step of 256 sequences without control and trace."""

GPU_STEPS = {"paged 30B model": 20.0, "resident, one sequence": 4.8}
"""Milliseconds that a step takes on an H200, what the host's time is compared with."""

PARTS: tuple[tuple[str, str, str], ...] = (
    # (attribute of the engine, method, part)
    ("scheduler", "next_work", "schedule"),
    ("", "_place", "place"),
    ("", "_device_block_table", "table upload"),
    ("_sampler", "sample", "choose arrays"),
    ("runner", "decode", "device"),
    ("runner", "prefill", "device"),
    ("runner", "sample", "device"),
    ("module", "prefill_batch", "prefill step arrays"),
    ("", "_dispatched", "dispatch"),
    ("", "_read", "read"),
    ("scheduler", "release", "release"),
    ("statistics", "add_step", "statistics"),
    ("module", "step_record", "record"),
    ("module", "page_use", "page use"),
    ("tracer", "after_read", "trace"),
    ("control", "before_step", "control"),
    ("control", "after_dispatch", "control"),
    ("control", "after_read", "control"),
)
"""What is timed. `device` stands for what a real device would do and does not count."""


# ---- the fake device


@dataclasses.dataclass(frozen=True)
class FollowRouting:
    """LRU by the host's own count: the prior of an expert is the step that last used it."""

    moments: frozenset[Moment] = frozenset({Moment.STEP_END})
    needs: frozenset[str] = frozenset({"ids"})
    writes: frozenset[str] = frozenset({"victim_weights", "prior"})
    victim_weights: tuple[int, int, int] = (0, 0, 1)

    def init(self, spec: Spec) -> np.ndarray:
        return np.zeros((spec.layers, spec.experts), np.int32)

    def decide(self, state: np.ndarray, observation: Observation) -> tuple[np.ndarray, Decision]:
        assert observation.ids is not None
        state = state.copy()
        layers = np.broadcast_to(np.arange(len(state))[:, None], observation.ids.shape)
        state[layers, observation.ids] = observation.step + 1
        return state, Decision(prior=state)


class FakeRunner:
    """Stands in for moejax.step.runner.Runner: results of the right shapes, at once."""

    driver, transfers = "device", ()
    placement = layer_versions = formats = None

    def __init__(self, config: ModelConfig, shapes: StepShapes, slots: int, seed: int):
        self.config, self.shapes, self.slots = config, shapes, slots
        self.layout = config.slot_layout(itemsize=2)
        self.steps = StepSpec(
            device_kind="none",
            runtime="",
            driver="device",
            ops=resolve_ops("xla"),
            config=config,
            dtype="bfloat16",
            layout=self.layout,
            shapes=shapes,
        )
        layers, experts = sum(config.moe_layers), config.num_experts
        self.link_bytes = record_bytes(self.layout, None, moved=True)
        self.version_bytes = version_bytes(self.layout, None, layers)
        self.device = jax.devices()[0]
        self.stores = (np.empty((layers, experts)),)
        self.tables = empty_tables(layers, experts, experts)
        self.tokens = jax.device_put(np.zeros(shapes.rows, np.int32), self.device)
        rng = np.random.default_rng(seed)
        self._decoded = [self._output(rng, shapes.rows, shapes.rows) for _ in range(4)]
        chunks = shapes.prefill_chunks
        self._prefilled = self._output(rng, chunks * shapes.chunk, chunks)
        self._count = 0
        self.results = self._prefilled.results

    def moved_bytes(self) -> None:
        return None

    def set_tables(self, contents: Mapping[str, np.ndarray]) -> None:
        self.tables = with_contents(self.tables, contents)

    def failures(self, writes: int) -> list[TransferFailure]:
        return []

    def check_results(self, results: object) -> None:
        pass

    def transfer_totals(self) -> Totals | None:
        return None

    def _output(self, rng: np.random.Generator, tokens: int, routed: int) -> Any:
        layers, experts, k = *self.stores[0].shape, self.config.num_experts_per_tok
        order = np.argsort(rng.random((layers, tokens, experts), np.float32), axis=-1)
        ids = np.sort(order[..., :k], axis=-1).astype(np.int32)
        active = np.full(layers, experts, np.int32)
        shape = ResultShape(
            rows=self.shapes.rows,
            routes=max(self.shapes.rows, self.shapes.prefill_chunks),
            layers=layers,
            experts=experts,
        )
        chosen = rng.integers(0, self.config.vocab_size, shape.rows, np.int32)
        missed_routes = rng.integers(0, layers * k, routed, np.int32)
        bits = rng.integers(0, 2**31, (layers, -(-experts // 32)), np.int32)
        paging = np.stack((active, active // 2, active // 4, active // 4), axis=1)
        counts = np.concatenate((paging, bits), axis=1)
        return StepOutput(
            logits=np.empty((self.shapes.rows, 0), np.float32),  # pyright: ignore
            tokens=chosen,  # pyright: ignore
            results=np.asarray(shape.pack(chosen, missed_routes, counts)),  # pyright: ignore
            shape=shape,
            routing=Routing(ids, rng.random(ids.shape, np.float32)),
            scores=None,
            staged=None,
        )

    def prefill_key(self, kind: PrefillKind, chunks: int) -> ProgramKey:
        return ProgramKey(kind)

    def decode_key(self, positions: np.ndarray) -> ProgramKey:
        return ProgramKey("decode")

    def decode(
        self, positions: np.ndarray, block_table: Any, stages: Any = None, hooks: Any = None
    ) -> StepOutput:
        self._count += 1
        output = self._decoded[self._count % len(self._decoded)]
        self.results = output.results
        return output

    def prefill(
        self, prefill: Any, block_table: Any, *, kind: str, stages: Any = None, hooks: Any = None
    ) -> StepOutput:
        self.results = self._prefilled.results
        return self._prefilled

    def sample(self, logits: Any, update: np.ndarray, params: Any) -> None:
        """The tokens of the results are chosen already."""

    def prepare(self, controller: Any) -> None:
        pass

    def stage_list(self, entries: Any) -> None:
        pass


def make_engine(config: ModelConfig, *, sequences: int, max_model_len: int, seed: int) -> Engine:
    """An engine over a fake device with KV for all sequences, and half of the experts' cells."""
    rows = -(-sequences // 16) * 16
    blocks = -(-max_model_len // 16)
    shapes = StepShapes(rows, 64, 128, blocks)
    layers, experts = sum(config.moe_layers), config.num_experts
    runner = FakeRunner(config, shapes, 0, seed)
    kv_slots = -(-sequences * blocks // runner.layout.pages_per_slot)
    runner.slots = layers * experts // 2 + kv_slots
    arena = SlotArena(runner.layout, runner.slots, layers, experts, experts)
    arena.grant_cells([experts // 2] * layers)
    arena.grant_kv_slots(kv_slots)
    ignored = lambda *rows: None  # noqa: E731
    cache = KVCache(arena, lambda rows: [None] * len(rows), ignored, ignored, 0)
    scheduler = Scheduler(cache, shapes, sequences, max_model_len, admission=max(sequences // 4, 1))
    statistics = Statistics((runner.layout.records[0].nbytes,))
    return Engine(runner, scheduler, statistics, eos_token_ids=(), seed=seed)  # pyright: ignore


class Arrivals:
    """Keeps as many requests in the engine as there are rows, and a quarter more waiting."""

    def __init__(self, engine: Engine, mean_tokens: int, seed: int):
        self.engine, self.rng, self.mean = engine, np.random.default_rng(seed), mean_tokens
        sequences = engine.scheduler.max_num_seqs
        for _ in range(sequences + sequences // 4):
            self.arrive(first=True)

    def arrive(self, first: bool = False) -> None:
        rng = self.rng
        tokens = int(rng.integers(self.mean // 2, self.mean * 3 // 2 + 1))
        if first:  # as if it had begun some time ago
            tokens = int(rng.integers(1, tokens + 1))
        prompt = rng.integers(0, self.engine.runner.config.vocab_size, int(rng.integers(1, 100)))
        params = SamplingParams(max_tokens=max(tokens, 1), temperature=0.8, top_p=0.95)
        self.engine.add(prompt.tolist(), params)


# ---- measuring


class Profile:
    """Times named calls, each without those within it."""

    def __init__(self):
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._within: list[float] = []

    def call(self, part: str, function: Callable, *args, **kwargs):
        self._within.append(0.0)
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            took = time.perf_counter() - began
            self.seconds[part] += took - self._within.pop()
            if self._within:
                self._within[-1] += took

    @contextlib.contextmanager
    def timing(self, engine: Engine) -> Iterator[None]:
        """Has all PARTS of the engine timed."""
        owners: dict[str, Any] = {"": engine, "module": sys.modules["moejax.engine.loop"]}
        wrapped: list[tuple[Any, str, Callable, bool]] = []
        for name, method, part in PARTS:
            owner = owners.get(name) or getattr(engine, name)
            if owner is not None:
                function = getattr(owner, method)
                wrapped.append((owner, method, function, method in vars(owner)))
                setattr(owner, method, functools.partial(self.call, part, function))
        try:
            yield
        finally:
            for owner, method, function, own in wrapped:
                if own:
                    setattr(owner, method, function)
                else:
                    delattr(owner, method)

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call."""
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds


Taken = dict[str, list[dict[str, float]]]
"""Kind of steps → seconds of each one by part, the fake device's left out. `decode`: both it and
the step that it reads are decode steps; `prefill`: all others."""


def measure(engine: Engine, arrivals: Arrivals, steps: int) -> Taken:
    """Runs the engine step by step, timing its parts."""
    profile, before = Profile(), "prefill"
    taken: Taken = {"decode": [], "prefill": []}
    with profile.timing(engine):
        for _ in range(steps):
            touched = profile.call("loop", engine.step)
            parts = profile.take()
            parts.pop("device", None)
            pending = engine._pending
            kind = "prefill" if pending is None else pending.kind
            taken["decode" if before == kind == "decode" else "prefill"].append(parts)
            before = kind
            for request in touched:
                if request.finish_reason is not None:
                    arrivals.arrive()
    return taken


def run(config: ModelConfig, args: argparse.Namespace, mode: str) -> Taken:
    """Steady state in one mode, after a warm-up."""
    engine = make_engine(
        config, sequences=args.sequences, max_model_len=args.max_model_len, seed=args.seed
    )
    runner: Any = engine.runner
    with contextlib.ExitStack() as stack:
        if mode in ("control", "both"):
            policies = [FollowRouting()]
            controller = start_controller(runner, policies, max_model_len=16, seed=args.seed)
            engine.control = control_of(runner, controller)
        if mode in ("trace", "both"):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "trace"
            spec = spec_of_engine(runner, max_model_len=args.max_model_len, seed=args.seed)
            engine.tracer = start_trace(directory, runner, spec, settings={})
            stack.callback(engine.tracer.close)
        arrivals = Arrivals(engine, args.mean_tokens, args.seed)
        measure(engine, arrivals, args.warm_up)
        return measure(engine, arrivals, args.steps)


def floor_s(sequences: int, repeats: int = 200) -> float:
    """Seconds of a bare loop that counts and appends for each sequence, the median."""
    counts = [[0, 0] for _ in range(sequences)]
    outputs: list[list[int]] = [[] for _ in range(sequences)]
    tokens, took = np.zeros(sequences, np.int32), []
    for _ in range(repeats):
        began = time.perf_counter()
        for count, output, token in zip(counts, outputs, tokens.tolist(), strict=True):
            count[0] += 1
            count[1] += 1
            output.append(token)
        took.append(time.perf_counter() - began)
    return float(np.median(took))


# ---- report


def lines(mode: str, taken: Taken, floor: float) -> Iterator[dict[str, Any]]:
    """A line for each part and for each whole step: microseconds and its share of the step."""
    for kind, steps in taken.items():
        names = sorted({name for parts in steps for name in parts})
        seconds = {name: np.array([parts.get(name, 0.0) for parts in steps]) for name in names}
        whole = np.sum([*seconds.values()], axis=0)
        found = sorted(seconds.items(), key=lambda item: -item[1].mean())
        for name, took in (*found, ("step", whole)) if steps else ():
            yield {
                "mode": mode,
                "kind": kind,
                "part": name,
                "mean_us": float(took.mean()) * 1e6,
                "median_us": float(np.median(took)) * 1e6,
                "p99_us": float(np.percentile(took, 99)) * 1e6,
                "share": float(took.mean() / whole.mean()),
                "floor_us": floor * 1e6 if (name, kind) == ("step", "decode") else None,
                "steps": len(steps),
            }


_COLUMNS = (
    ("mode", "{mode}"),
    ("step", "{kind}"),
    ("part", "{part}"),
    ("mean us", "{mean_us:.0f}"),
    ("median", "{median_us:.0f}"),
    ("p99", "{p99_us:.0f}"),
    ("share", "{share:.0%}"),
    ("floor", "{floor_us:.0f}"),
    ("steps", "{steps}"),
)


def report(found: Sequence[dict[str, Any]], sequences: int) -> Iterator[str]:
    yield from aligned(_COLUMNS, found)
    for line in found:
        if (line["mode"], line["kind"], line["part"]) != ("plain", "decode", "step"):
            continue
        took = line["median_us"] / 1e3
        yield f"a decode step of {sequences} sequences: {took:.2f} ms of the host (median)"
        for name, step_ms in GPU_STEPS.items():
            yield f"  {took / step_ms:.1%} of a GPU step of {step_ms} ms ({name}) beside it"
        yield f"  target {TARGET_MS} ms at 256 sequences: {'met' if took < TARGET_MS else 'missed'}"


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    positive(args, "sequences", "steps", "mean_tokens", "experts")
    if args.mean_tokens * 3 // 2 + 100 > args.max_model_len:
        raise UserError(
            f"--max-model-len must be at least {args.mean_tokens * 3 // 2 + 100}: prompts of "
            f"up to 99 tokens and 1.5 times --mean-tokens"
        )
    config = shape(args.shape, args.layers)
    if args.experts < config.num_experts_per_tok:
        raise UserError(f"--experts must be at least {config.num_experts_per_tok}, the top-k")
    config = dataclasses.replace(config, num_experts=args.experts)
    floor = floor_s(args.sequences)
    found = [x for mode in args.modes for x in lines(mode, run(config, args, mode), floor)]
    show(args.json, found, report(found, args.sequences))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("--sequences", type=int, default=256, help="that decode (default: %(default)s)")
    add("--shape", default="qwen3-30b-a3b", help=f"{', '.join(SHAPES)} (default: %(default)s)")
    add("--layers", type=int, help="default: the shape's, 48")
    add("--experts", type=int, default=128, help="a layer (default: %(default)s)")
    add("--max-model-len", type=int, default=1024, help="default: %(default)s")
    add(
        "--mean-tokens",
        type=int,
        default=400,
        help="that a request generates, and about the steps that it stays (default: %(default)s)",
    )
    add("--steps", type=int, default=400, help="to measure in each mode (default: %(default)s)")
    add("--warm-up", type=int, default=60, help="steps before (default: %(default)s)")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    add("--seed", type=int, default=0, help="of everything random (default: 0)")
    add("--json", action="store_true", help="one JSON object per row on stdout, no table")
    return parser
