"""Decode steps with every expert in cells: through the window's page table, and plain, in turn.

python -m scripts.transfers handles --folder DIR [--layers 4] [--batch 8,64] [--context 1024]
    [--rounds 7] [--steps 6] [--json]

Two engines of four layers of Qwen3-30B's shape (stream says more), all of whose experts are
resident, take turns:

  plain     driver device: a step reads experts where its tables say
  handles   driver stream: the same through the page table of the window, remapped in every layer

--folder keeps the experts' files (4.8 GB), so that memory holds both engines; they are read once.
Printed: for each batch the median of the rounds' ratios handles / plain with quartiles (bar: 1.03),
and a step's milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np

from moejax.cache import use_compilation_cache
from moejax.errors import UserError
from scripts.parts.bench_engine import parse_numbers
from scripts.parts.commands import new_parser, refuse
from scripts.transfers.streaming.arms import Arm, Group, arm, load, sizes_of

OPTIONS = {
    "plain": {"expert_budget": "100%", "driver": "device", "eviction": "lru"},
    "handles": {"expert_budget": "100%", "driver": "stream"},
}


def measure(group: Group, folder: Path, rounds: int) -> list[dict]:
    """What of each place of the group is printed."""
    use_compilation_cache(None)
    loaded = load(group, folder)
    sizes = sizes_of([group], loaded.config.num_experts)
    try:
        with ExitStack() as stack:
            engines = {
                name: stack.enter_context(arm(loaded, group, sizes, options))
                for name, options in OPTIONS.items()
            }
            return [of_place(engines, group, place, rounds) for place in group.places]
    finally:
        for array in jax.tree.leaves(loaded.params):
            array.delete()
        loaded.store.delete()


def of_place(engines: dict[str, Arm], group: Group, place: tuple[int, int], rounds: int) -> dict:
    took: dict[str, list[float]] = {name: [] for name in engines}
    for seed in range(rounds):
        names = list(engines) if seed % 2 else list(engines)[::-1]
        for name in names:
            took[name].append(
                float(np.median(engines[name].measure(group, place, seed)["seconds"]))
            )
    ratios = np.array(took["handles"]) / np.array(took["plain"])
    middle, low, high = np.percentile(ratios, (50, 25, 75)).tolist()
    milliseconds = {f"{name}_ms": float(np.median(all_)) * 1e3 for name, all_ in took.items()}
    said = {"batch": place[0], "context": place[1], "rounds": rounds}
    return said | {"handles / plain": [middle, low, high]} | milliseconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("--folder", type=Path, required=True, metavar="DIR", help="of the experts' files")
    add("--shape", default="qwen3-30b-a3b", help="(default: %(default)s)")
    add("--layers", type=int, default=4, help="3 or more (default: %(default)s)")
    add("--batch", default="8,64", help="sequences at once (default: %(default)s)")
    add("--context", type=int, default=1024, help="tokens of each (default: %(default)s)")
    add("--rounds", type=int, default=7, help="(default: %(default)s)")
    add("--steps", type=int, default=6, help="of a round (default: %(default)s)")
    add("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args(arguments)
    try:
        batches = parse_numbers(args.batch, "--batch", least=1)
        if min(args.rounds, args.steps, args.context) < 1 or args.layers < 3:
            raise UserError("--rounds, --steps and --context are positive, --layers 3 or more")
        places = tuple((batch, args.context) for batch in batches)
        group = Group(
            "handles", places, 0, None, (), args.shape, args.layers, "file", steps=args.steps
        )
        for found in measure(group, args.folder, args.rounds):
            print(json.dumps(found) if args.json else _text(found), flush=True)
    except (UserError, ValueError, MemoryError, OSError) as error:
        return refuse(__name__, error)
    return 0


def _text(found: dict) -> str:
    middle, low, high = found["handles / plain"]
    return (
        f"batch {found['batch']}, context {found['context']}: handles / plain {middle:.3f} "
        f"({low:.3f} … {high:.3f}) of {found['rounds']} rounds; {found['handles_ms']:.1f} and "
        f"{found['plain_ms']:.1f} ms"
    )
