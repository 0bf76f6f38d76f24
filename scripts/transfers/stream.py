"""Decode steps whose experts stream, beside slot paging in the same memory and full residency.

python -m scripts.transfers stream [--shape qwen3-30b-a3b] [--layers 4] [--batch 8,64]
    [--context 1024] [--ratios 0.25,1,4] [--residents 0] [--arms stream,paging] [--routing real]
    [--rounds 5] [--no-handles] [--json]

Random weights in the sizes of a known model; contexts are made by pages that hold nothing. First,
for each batch, two engines that hold every expert in cells take turns:

  plain     driver device: a step reads experts where its tables say
  handles   driver stream, all resident: the same through the page table of the window

Then, with every expert in place, a step is timed (compute), and for each ratio the link gets the
rate at which all experts of all layers take ratio × compute. In turns, all but the first in the
memory of two layers' cells and --residents of each layer:

  compute      every expert in place, no queue
  stream       driver stream: the residents dense
  flux         FluxMoE: residents packed in every layer, as many as the rates balance or fit
  flux-direct  the same, computed as they are packed
  flux-h       FluxMoE-H: the front layers packed whole, as many as fit
  vllm-o       vLLM-O: the front layers dense whole, as many as fit; layer i + 1 comes during i
  paging       driver device: as many cells, shared evenly over layers, LRU; misses pass the link

Printed are medians of the rounds' step times and of their ratios, with quartiles: handles / plain
(bar: 1.03), stream / max(compute, link), each arm / stream; bytes a step over the link and decoded;
and the share of the time in which the link was busy, and that of compute / step. One block a batch
and ratio.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import jax
import numpy as np

from moejax.checkpoints.loaded_model import LoadedModel
from moejax.checkpoints.random_model import shape
from moejax.checkpoints.versions import with_versions
from moejax.device import select_device
from moejax.engine.loop import Engine
from moejax.errors import UserError
from moejax.start.build import start_engine
from moejax.start.options import Options
from scripts.parts.bench_engine import check_fits, parse_numbers, weights_of
from scripts.parts.commands import new_parser, refuse
from scripts.parts.decode_timing import (
    ROUTINGS,
    Samples,
    Sequences,
    decode,
    forced_routings,
    prefill,
)

PROMPT = 16
"""Tokens that are prefilled; the others of a context are pages that nobody wrote."""


@dataclasses.dataclass(frozen=True)
class Block:
    """What a block of steps took."""

    seconds: float
    """A step's, the median."""
    bytes: float
    """Over the link, a step's."""
    busy: float
    """Share of the time with a chunk under way."""
    unpacked: float = 0.0
    """Dense bytes decoded out of packed residents, a step's."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """An engine with sequences that can be decoded again and again."""

    engine: Engine
    sequences: Sequences

    def block(self, args: argparse.Namespace, seed: int) -> Block:
        """So many steps after two others, with the same routing in every arm."""
        runner, samples = self.engine.runner, Samples()
        batch, steps = len(self.sequences.rows), args.steps + 2
        random = np.random.default_rng(seed)
        routings = forced_routings(args.routing, runner, batch, steps, random)
        decode(runner, self.sequences, routings[:2], Samples())
        before = runner.transfer_totals()
        after = dataclasses.replace(self.sequences, context=self.sequences.context + 2)
        decode(runner, after, routings[2:], samples)
        moved, busy, unpacked = 0.0, 0.0, 0.0
        if before is not None and (now := runner.transfer_totals()) is not None:
            came = now.demand_bytes + now.ahead_bytes - before.demand_bytes - before.ahead_bytes
            moved = came / args.steps
            unpacked = (now.unpacked_bytes - before.unpacked_bytes) / args.steps
            busy = (now.busy_seconds - before.busy_seconds) / sum(samples.step_s)
        return Block(float(np.median(samples.step_s)), moved, busy, unpacked)


@contextmanager
def arms(
    loaded: LoadedModel, args: argparse.Namespace, batch: int, wanted: Mapping[str, dict]
) -> Iterator[dict[str, Arm]]:
    """Engines by name, each with these options, and their sequences; all are compiled before any is
    timed."""
    found: dict[str, Arm] = {}
    length = args.context + args.steps + 4
    try:
        for name, options in wanted.items():
            given = Options(
                args.shape,
                max_num_seqs=batch,
                max_model_len=length,
                max_num_batched_tokens=max(64, min(batch, 32) * PROMPT),
                enable_prefix_caching=False,
                **options,
            )
            engine, _ = start_engine(loaded, given, jax.devices()[0])
            engine.runner.wait_compiled(everything=True)
            vocabulary = engine.runner.config.vocab_size
            prompts = np.random.default_rng(0).integers(vocabulary, size=(batch, PROMPT)).tolist()
            _, sequences = prefill(engine, prompts, length - PROMPT - 1)
            found[name] = Arm(engine, dataclasses.replace(sequences, context=args.context))
            found[name].block(args, 0)  # compiles what has not been
        yield found
    finally:
        for arm in found.values():
            arm.engine.runner.delete(given=False)


def rounds(args: argparse.Namespace, found: Mapping[str, Arm]) -> list[dict[str, Block]]:
    """Every arm's block in each round."""
    return [
        {name: arm.block(args, seed) for name, arm in found.items()}
        for seed in range(1, args.rounds + 1)
    ]


def spread(values: Sequence[float]) -> list[float]:
    """[median, lower quartile, upper quartile]"""
    return np.percentile(values, (50, 25, 75)).tolist()


def measure(args: argparse.Namespace, batches: Sequence[int], ratios: Sequence[float]):
    config, device = shape(args.shape, args.layers), select_device()
    longest = args.context + args.steps + 4
    experts, layers = config.num_experts, sum(config.moe_layers)
    tokens = max(batches) * longest
    check_fits(args, config, device, 2 * experts, tokens=2 * tokens, prefill=1024)
    with weights_of(args, config, device) as made:
        packed = ["lossless12"] if any(arm in TIERS for arm in args.arms) else []
        loaded = with_versions(made, ["dense", *packed])
        for batch in batches:
            yield from of_batch(loaded, args, batch, ratios, layers, experts)


def of_batch(
    loaded: LoadedModel,
    args: argparse.Namespace,
    batch: int,
    ratios: Sequence[float],
    layers: int,
    experts: int,
) -> Iterator[dict]:
    every = {"expert_budget": "100%"}
    handles = {
        "plain": {**every, "driver": "device", "eviction": "lru"},
        "handles": {**every, "driver": "stream"},
    }
    overhead: list[float] | None = None
    if args.handles:
        with arms(loaded, args, batch, handles) as found:
            pairs = rounds(args, found)
        overhead = spread([one["handles"].seconds / one["plain"].seconds for one in pairs])
    with arms(loaded, args, batch, {"compute": {}}) as found:
        record = found["compute"].engine.runner.link_bytes[0]
        slot = found["compute"].engine.runner.layout.slot_bytes
        compute = spread([one["compute"].seconds for one in rounds(args, found)])[0]
    held = (layers * args.residents + 2 * (experts - args.residents)) * slot
    for ratio in ratios:
        streamed = layers * (experts - args.residents) * record
        rate = layers * experts * record / (ratio * compute)
        link = {"link_rate": rate, "expert_budget": held}
        given = {name: arm_options(name, loaded, held) for name in args.arms}
        wanted = {"compute": {}, **{name: {**link, **given[name]} for name in given}}
        with arms(loaded, args, batch, wanted) as found:
            measured = rounds(args, found)
        yield line(measured, streamed / rate) | {
            "batch": batch,
            "context": args.context,
            "ratio": ratio,
            "link_gb_s": rate / 1e9,
            "experts_mib": held / 2**20,
            **({} if overhead is None else {"handles / plain": overhead}),
        }


TIERS = ("flux", "flux-direct", "flux-h", "vllm-o")
"""Arms of the stream driver whose residents are in tiers."""

ARMS = ("stream", *TIERS, "paging")


def arm_options(name: str, loaded: LoadedModel, held: int) -> dict:
    """Options of an arm in so many bytes of experts, beside the link's. Raises UserError where they
    hold no layer of an arm that keeps layers whole."""
    if name == "paging":
        return {"driver": "device", "eviction": "lru"}
    if name == "stream":
        return {"driver": "stream"}
    if name.startswith("flux-d") or name == "flux":
        return {"driver": "stream", "tiers": f"{name},planner=none"}
    tier, version = ("packed", "lossless12") if name == "flux-h" else ("dense", "dense")
    layers, experts = sum(loaded.config.moe_layers), loaded.config.num_experts
    sizes = {v: layout.nbytes for v, layout in loaded.store.layouts.items()}
    whole = (held - 2 * experts * sizes["dense"]) // (experts * sizes[version])
    if not 0 < whole <= layers:
        raise UserError(f"--residents leaves {name} {whole} whole layers; give more")
    return {"driver": "stream", "tiers": f"flux,by=layers,{tier}={whole / layers}"}


def line(measured: Sequence[Mapping[str, Block]], link: float) -> dict:
    """What rounds come to. link: seconds that a pass of the window takes on the link."""

    def of(value: Callable[[Mapping[str, Block]], float]) -> list[float]:
        return spread([value(one) for one in measured])

    found: dict = {
        f"{name}_ms": of(lambda one, n=name: one[n].seconds * 1e3) for name in measured[0]
    }
    found["link_ms"] = link * 1e3
    found["stream / max(compute, link)"] = of(
        lambda one: one["stream"].seconds / max(one["compute"].seconds, link)
    )
    for name in [name for name in measured[0] if name != "compute"]:
        if name != "stream":
            ratio = of(lambda one, n=name: one[n].seconds / one["stream"].seconds)
            found[f"{name} / stream"] = ratio
        found[f"{name}_mb"] = of(lambda one, n=name: one[n].bytes / 1e6)
        if any(one[name].unpacked for one in measured):
            found[f"{name}_decoded_mb"] = of(lambda one, n=name: one[n].unpacked / 1e6)
        found[f"{name}_link_busy"] = of(lambda one, n=name: one[n].busy)
        found[f"{name}_compute_busy"] = of(
            lambda one, n=name: one["compute"].seconds / one[n].seconds
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("--shape", default="qwen3-30b-a3b", help="(default: %(default)s)")
    add("--layers", type=int, default=4, help="3 or more (default: %(default)s)")
    add("--batch", default="8,64", help="sequences at once (default: %(default)s)")
    add("--context", type=int, default=1024, help="tokens of each (default: %(default)s)")
    add("--ratios", default="0.25,1,4", help="of loading to computing (default: %(default)s)")
    add("--residents", type=int, default=0, help="experts kept in each layer (default: 0)")
    add("--arms", default="stream,paging", help=f"{', '.join(ARMS)} (default: %(default)s)")
    add("--no-handles", dest="handles", action="store_false", help="leave out the first two")
    add("--routing", default="real", help=f"{', '.join(ROUTINGS)} (default: %(default)s)")
    add("--rounds", type=int, default=5, help="(default: %(default)s)")
    add("--steps", type=int, default=8, help="of a block (default: %(default)s)")
    add("--dtype", default="auto", help="auto (bfloat16), bfloat16, float16 or float32")
    add("--seed", type=int, default=0, help="of the weights (default: 0)")
    add("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args(arguments)
    try:
        batches = parse_numbers(args.batch, "--batch", least=1)
        try:
            ratios = [float(part) for part in args.ratios.split(",")]
        except ValueError:
            raise UserError(f"--ratios takes numbers with commas, not {args.ratios!r}") from None
        args.arms = args.arms.split(",")
        if not {"stream"} <= {*args.arms} <= {*ARMS}:
            raise UserError(f"--arms are stream and others of {', '.join(ARMS)}")
        if min(ratios) <= 0 or args.routing not in ROUTINGS or min(args.rounds, args.steps) < 1:
            raise UserError("--ratios, --rounds and --steps are positive, --routing one of those")
        if args.context < PROMPT or args.layers < 3 or args.residents < 0:
            raise UserError(f"--context is {PROMPT} or more, --layers 3, --residents 0")
        for found in measure(args, batches, ratios):
            show(found, args.json)
    except (UserError, ValueError, MemoryError) as error:
        return refuse(__name__, error)
    return 0


def show(found: Mapping, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found), flush=True)
        return
    print(
        f"batch {found['batch']}, context {found['context']}, loading {found['ratio']:g} × "
        f"computing ({found['link_gb_s']:.2f} GB/s), experts {found['experts_mib']:.0f} MiB"
    )
    for name, value in found.items():
        if isinstance(value, list):
            middle, low, high = value
            print(f"  {name:<28} {middle:9.3f}  ({low:.3f} … {high:.3f})")
    print(flush=True)
