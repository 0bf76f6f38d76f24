"""Decode steps whose experts stream, beside slot paging and other arms in the same memory.

python -m scripts.transfers stream CELLS.yaml [--only GROUP,…] [--folder DIR] [--output FILE]

CELLS.yaml names the cells of the grid that are measured (scripts/transfers/streaming/cells.yaml):
groups of places (batch, context) that have residents, link and arms in common. Random weights in
the sizes of a known model, with a vocabulary of 1,024, since a head weighs twelve times as much in
four layers as in 48; contexts are pages of zeros that are there; routing is drawn, the same in each
arm. An engine of each arm stands alone, so that memory holds it, and decodes all places of its
group; before them one with every expert in place does (compute), in each run again, since machines
change their speed. What else --output has is not measured again, so that the same command goes on
where it was ended.
All arms have the same bytes of experts: two layers' cells and `residents` of each layer.

  stream       driver stream: the residents dense
  flux         FluxMoE: residents packed in every layer, as many as the rates balance or fit
  flux-direct  the same, computed as they are packed
  flux-h       FluxMoE-H: the front layers packed whole, as many as fit
  vllm-o       vLLM-O: the front layers dense whole, as many as fit; layer i + 1 comes during i
  paging       driver device: as many cells, shared evenly over layers, LRU; misses pass the link
  paging-48    the same with the cells that each of 48 layers would have: two layers' memory is half
               of four layers, and a 24th of 48

rate: of the link; absent: as fast as threads copy. store: memory, or file, which --folder has or
gets (4.8 GB for four layers of Qwen3-30B's shape); then the disk is the link.

A JSON line for each arm and place, on stdout or at the end of --output: the seconds of every step
after two others, bytes of a step over the link and decoded, and shares of the time in which the
link was busy and in which ops waited for it. `stream_report` reads them.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

import jax

from moejax.cache import use_compilation_cache
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.checkpoints.versions import with_versions
from moejax.errors import UserError
from scripts.parts.commands import new_parser, refuse
from scripts.transfers.streaming.arms import (
    Group,
    Sizes,
    arm,
    arm_options,
    load,
    read_groups,
    sizes_of,
)


def measure(
    every: Sequence[Group],
    wanted: Sequence[str],
    folder: Path | None,
    tell: Callable[[dict], None],
    rounds: int,
    known: Collection[tuple] = (),
) -> None:
    """Every arm of the wanted groups at every place, but what `known` has the `key` of, and before
    them compute at the places of each model that are left."""
    use_compilation_cache(None)
    run = {"began": int(time.time())}
    for model in dict.fromkeys(group.model for group in every if group.name in wanted):
        alike = [group for group in every if group.model == model]
        mine = [group for group in alike if group.name in wanted]
        arms = ((_left(group, name, known), name) for group in mine for name in group.arms)
        todo = [(group, name) for group, name in arms if group.places]
        places = tuple(dict.fromkeys(place for group, _ in todo for place in group.places))
        if not places:
            continue
        first = dataclasses.replace(mine[0], name="all", places=places, residents=0, rate=None)
        loaded = load(mine[0], folder)
        sizes = sizes_of(alike, loaded.config.num_experts)
        try:
            for group, name in ((first, "compute"), *todo):
                if name != "compute" and model.tiers and len(loaded.store.layouts) == 1:
                    loaded = with_versions(loaded, ["dense", "lossless12"])
                measure_arm(loaded, group, sizes, name, lambda row: tell(row | run), rounds)
        finally:
            for array in jax.tree.leaves(loaded.params):
                array.delete()
            loaded.store.delete()


def measure_arm(
    loaded: LoadedModel,
    group: Group,
    sizes: Sizes,
    name: str,
    tell: Callable[[dict], None],
    rounds: int,
) -> None:
    with arm(loaded, group, sizes, arm_options(name, loaded, group)) as found:
        for seed in range(1, rounds + 1):
            pairs = zip(group.places, _said(group, name), strict=True)
            # Wide batches first, which use every expert: cells of an arm that pages are warm then.
            for place, said in sorted(pairs, key=lambda pair: -pair[0][0]):
                tell(said | found.measure(group, place, seed))


def _said(group: Group, name: str) -> list[dict]:
    """What rows of an arm say beside what was measured, for each place."""
    said = dataclasses.asdict(group)
    del said["places"], said["arms"]
    return [said | {"batch": b, "context": c, "arm": name} for b, c in group.places]


def _left(group: Group, name: str, known: Collection[tuple]) -> Group:
    """The group with the places at which this arm is not known."""
    rows = zip(group.places, _said(group, name), strict=True)
    places = tuple(place for place, row in rows if key(row) not in known)
    return dataclasses.replace(group, places=places)


_KEY = ("name", "arm", "shape", "layers", "batch", "context")
_KEY += ("residents", "rate", "store", "routing", "steps")


def key(row: Mapping) -> tuple:
    """What makes two rows measurements of the same thing."""
    return tuple(row[name] for name in _KEY)


def measured(path: Path | None) -> set[tuple]:
    """Keys of what a file has."""
    if path is None or not path.exists():
        return set()
    return {key(json.loads(text)) for text in path.read_text().splitlines()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("cells", type=Path, metavar="CELLS.yaml")
    add("--only", help="names of groups (default: all)")
    add("--rounds", type=int, default=1, help="over the places of an arm (default: %(default)s)")
    add("--folder", type=Path, metavar="DIR", help="of checkpoints, for store: file")
    add("--output", type=Path, metavar="FILE", help="JSON lines are added to it (default: stdout)")
    args = parser.parse_args(arguments)
    try:
        groups = read_groups(args.cells)
        wanted = args.only.split(",") if args.only else [group.name for group in groups]
        if unknown := [name for name in wanted if name not in [g.name for g in groups]]:
            raise UserError(f"{args.cells} has no group {', '.join(unknown)}")
        if args.rounds < 1:
            raise UserError("--rounds is 1 or more")
        known = measured(args.output)
        with nullcontext() if args.output is None else args.output.open("a") as file:

            def tell(row: dict, file: TextIO | None = file) -> None:
                print(json.dumps(row), file=file, flush=True)

            measure(groups, wanted, args.folder, tell, args.rounds, known)
    except (UserError, ValueError, MemoryError, OSError) as error:
        return refuse(__name__, error)
    return 0
