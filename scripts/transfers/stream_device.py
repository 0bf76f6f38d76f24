"""What streaming by jax's own copies hides: a step beside its copies alone and its compute alone.

python -m scripts.transfers stream_device [--shape qwen3-30b-a3b] [--layers 4] [--batch 64]
    [--context 1024] [--rounds 5] [--steps 8] [--ops auto] [--packed 50%] [--json]

Random weights in the sizes of a known model. In each round, a block of decode steps:

  compute   driver host, every expert in a cell: the same walk through layers, nothing moves
  device    driver device, every expert in a cell: what walking from Python costs is the difference
  stream    driver stream: every expert of each layer is copied, beside the layer before
  flux-direct  with --packed: the same, but so many experts are packed residents, in their cells
  copies    those copies alone, a layer at a time

Printed are medians of the rounds with their quartiles, in ms, and of ratios; stream / max(compute,
copies) is 1 where copies run beside compute and calls cost nothing, and stream / (compute + copies)
where neither does. On a CPU the command shows that it runs: a copy there is work of the same
processors.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import jax
import numpy as np

from host_offload.queue.pinned import PinnedBuilder, PinnedRecords
from moejax.checkpoints.random_model import random_model, shape
from moejax.device import select_device
from moejax.errors import UserError
from scripts.parts.commands import new_parser, refuse
from scripts.parts.decode_timing import ROUTINGS
from scripts.transfers.streaming.arms import PAGE, Group, arm, sizes_of


def copies(records: PinnedRecords, device: jax.Device) -> float:
    """Seconds that the copies of all layers take, one layer in flight."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    layers, experts = records.shape[:2]
    began = time.perf_counter()
    for layer in range(layers):
        pieces = [piece for e in range(experts) for piece in records.of(layer, e)]
        jax.block_until_ready(jax.device_put(pieces, sharding))
    return time.perf_counter() - began


def measure(
    group: Group, rounds: int, ops: str | None, packed: str | None = None
) -> Iterator[tuple[str, list[float]]]:
    """Name → [median, lower quartile, upper quartile], at the group's one place. packed: share of
    experts that are packed residents in one more arm."""
    device, (place,) = select_device(), group.places
    config = shape(group.shape, group.layers)
    # On a CPU with native ops their own queue would run.
    ops = ops or ("move=xla" if device.platform == "cpu" else "auto")
    every = {"expert_budget": "100%", "eviction": "lru", "ops": ops}
    loaded = random_model(config, device=device)
    separate = random_model(config, device=device, new_builder=PinnedBuilder)
    (records,) = separate.store.arrays.values()
    # The cells of the arena are one half of the window.
    half = config.num_experts * separate.layout.nbytes
    engines = {
        "compute": (loaded, {**every, "driver": "host"}),
        "device": (loaded, {**every, "driver": "device"}),
        "stream": (separate, {"driver": "stream", "ops": ops, "expert_budget": half}),
    }
    if packed is not None:
        tiers = f"flux-direct,packed={packed},planner=none"
        asked = {"driver": "stream", "ops": ops, "expert_budget": "100%", "tiers": tiers}
        engines["flux-direct"] = separate, asked
    sizes, rows = sizes_of([group], config.num_experts), []
    with ExitStack() as stack:
        found = {
            name: stack.enter_context(arm(of, group, sizes, options))
            for name, (of, options) in engines.items()
        }
        for seed in range(rounds + 1):  # the first compiles what has not been
            row = {
                name: float(np.median(one.measure(group, place, seed)["seconds"])) * 1e3
                for name, one in found.items()
            }
            row["copies"] = copies(records, device) * 1e3
            longer, both = max(row["compute"], row["copies"]), row["compute"] + row["copies"]
            row["stream / max(compute, copies)"] = row["stream"] / longer
            row["stream / (compute + copies)"] = row["stream"] / both
            rows.append(row)
    for name in rows[0]:
        middle, *quartiles = np.percentile([row[name] for row in rows[1:]], (50, 25, 75))
        yield name, [float(middle), *map(float, quartiles)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("--shape", default="qwen3-30b-a3b", help="(default: %(default)s)")
    add("--layers", type=int, default=4, help="3 or more (default: %(default)s)")
    add("--batch", type=int, default=64, help="sequences at once (default: %(default)s)")
    add("--context", type=int, default=1024, help="tokens of each (default: %(default)s)")
    add("--routing", default="uniform", help=f"{', '.join(ROUTINGS)} (default: %(default)s)")
    add("--rounds", type=int, default=5, help="(default: %(default)s)")
    add("--steps", type=int, default=8, help="of a block (default: %(default)s)")
    add("--ops", help="(default: auto on a GPU, move=xla on a CPU, so that the arena is an array)")
    add("--packed", metavar="SHARE", help="one more arm with so many packed residents: 50%%")
    add("--json", action="store_true", help="one JSON object an arm")
    args = parser.parse_args(arguments)
    try:
        if args.routing not in ROUTINGS or min(args.rounds, args.steps, args.batch) < 1:
            raise UserError("--rounds, --steps and --batch are positive, --routing one of those")
        if args.context < PAGE or args.layers < 3:
            raise UserError(f"--context is {PAGE} or more, --layers 3")
        group = Group(
            name="device",
            places=((args.batch, args.context),),
            residents=0,
            rate=None,
            arms=(),
            shape=args.shape,
            layers=args.layers,
            routing=args.routing,
            steps=args.steps,
        )
        for name, (middle, low, high) in measure(group, args.rounds, args.ops, args.packed):
            if args.json:
                print(json.dumps({"arm": name, "median": middle, "q1": low, "q3": high}))
            else:
                unit = "" if "/" in name else " ms"
                print(f"{name:<30} {middle:9.3f}{unit}  ({low:.3f} … {high:.3f})")
    except (UserError, ValueError, MemoryError) as error:
        return refuse(__name__, error)
    return 0
