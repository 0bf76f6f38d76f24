"""Decode steps whose experts stream, beside slot paging and other arms in the same memory.

python -m scripts.transfers stream CELLS.yaml [--only GROUP,…] [--folder DIR] [--output FILE]

CELLS.yaml names the cells of the grid that are measured (scripts/experiments/stream/cells.yaml):
groups of places (batch, context) that have residents, link and arms in common. Random weights in
the sizes of a known model, with a vocabulary of 1,024, since a head weighs twelve times as much in
four layers as in 48; contexts are pages of zeros that are there; routing is drawn, the same in each
arm. An engine of each arm stands alone, so that memory holds it, and decodes all places of its
group; before them one with every expert in place does (compute), where --output has not got it.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple, TextIO

import jax
import numpy as np

from moejax.cache import use_compilation_cache
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.checkpoints.random_model import random_model, shape_fields
from moejax.checkpoints.versions import with_versions
from moejax.device import select_device
from moejax.engine.loop import Engine
from moejax.errors import UserError
from moejax.models.config import parse_config
from moejax.models.json_values import parse_yaml
from moejax.sizes import parse_rate
from moejax.start.build import start_engine
from moejax.start.options import Options
from scripts.disk.random_converted import written
from scripts.parts.commands import new_parser, refuse
from scripts.parts.decode_timing import ROUTINGS, Samples, Sequences, decode, forced_routings

TIERS = ("flux", "flux-direct", "flux-h", "vllm-o")
"""Arms of the stream driver whose residents are in tiers."""

ARMS = ("stream", *TIERS, "paging")

PAGE = 16
"""Tokens of a page, at most."""

WARM = 2
"""Steps before those that are counted, in which what has not been compiled is."""


class Model(NamedTuple):
    """What groups that are measured in a row have in common."""

    shape: str
    layers: int
    store: str
    tiers: bool
    """Experts have a packed version too."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Places of the grid that share their engines."""

    name: str
    places: tuple[tuple[int, int], ...]
    """(batch, context)"""
    residents: int
    """Experts of each layer beside the window."""
    rate: float | None
    arms: tuple[str, ...]
    shape: str = "qwen3-30b-a3b"
    layers: int = 4
    store: str = "memory"
    routing: str = "uniform"
    steps: int = 3

    @property
    def model(self) -> Model:
        packed = bool({*self.arms} & {*TIERS})
        return Model(self.shape, self.layers, self.store, packed)


def read_groups(path: Path) -> list[Group]:
    """The groups of a file. Raises UserError for what there is not."""
    try:
        given = parse_yaml(path.read_text())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is no YAML: {error}") from error
    if not isinstance(given, dict) or not isinstance(given.get("groups"), list):
        raise UserError(f"{path} has no list `groups`")
    return [_group(one, str(path)) for one in given["groups"]]


def _group(given: Mapping, path: str) -> Group:
    try:
        places = tuple((int(batch), int(context)) for batch, context in given["places"])
        found = Group(
            **{"rate": None, **given, "places": places, "arms": tuple(given["arms"])},
        )
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{path}: a group is of {', '.join(_FIELDS)}, not {given!r}") from error
    if found.rate is not None:
        found = dataclasses.replace(found, rate=parse_rate(found.rate))
    for arm in found.arms:
        if arm not in ARMS and not _paging_layers(arm, 2):
            raise UserError(f"{path}: arms are {', '.join(ARMS)} and paging-N, not {arm!r}")
    drawn = [name for name in ROUTINGS if name != "real"]
    if found.routing not in drawn:
        raise UserError(f"{path}: routing is one of {', '.join(drawn)}, not {found.routing!r}")
    if found.store not in ("memory", "file") or found.residents < 0 or found.layers < 3:
        raise UserError(f"{path}: {found.name}: store memory or file, residents 0, layers 3 on")
    if min(found.steps, *(number for place in found.places for number in place)) < 1:
        raise UserError(f"{path}: {found.name}: steps, batches and contexts are positive")
    return found


_FIELDS = tuple(field.name for field in dataclasses.fields(Group))


def _paging_layers(arm: str, otherwise: int) -> int:
    """Over how many layers an arm's window is shared; 0: of no paging arm."""
    name, _, number = arm.partition("-")
    if name != "paging":
        return 0
    return int(number) if number.isdigit() else otherwise


@dataclasses.dataclass(frozen=True)
class Arm:
    """An engine whose rows decode from any context on, in pages that are given to none of them."""

    engine: Engine
    pages: np.ndarray
    """KV rows of all pages."""

    def sequences(self, batch: int, context: int, steps: int) -> Sequences:
        """The first rows, each with pages of its own."""
        runner, scheduler = self.engine.runner, self.engine.scheduler
        each = -(-(context + WARM + steps) // runner.layout.page.block_size)
        table = np.zeros_like(scheduler.block_table)
        table[:batch, :each] = self.pages[: batch * each].reshape(batch, each)
        on_device = jax.device_put(table, runner.tokens.sharding)
        return Sequences(tuple(range(batch)), context, on_device)

    def measure(self, group: Group, place: tuple[int, int], seed: int) -> dict:
        """Steps at a place after WARM others, with the same routing in every arm."""
        runner, (batch, context) = self.engine.runner, place
        sequences = self.sequences(batch, context, group.steps)
        random = np.random.default_rng(seed)
        routings = forced_routings(group.routing, runner, batch, WARM + group.steps, random)
        decode(runner, sequences, routings[:WARM], Samples())
        before, samples = runner.transfer_totals(), Samples()
        after = dataclasses.replace(sequences, context=context + WARM)
        decode(runner, after, routings[WARM:], samples)
        used = float(np.mean([np.mean(active) for active in samples.active]))
        found = {"seconds": samples.step_s, "used": used}
        now = runner.transfer_totals()
        if before is None or now is None:
            return found
        came = now.demand_bytes + now.ahead_bytes - before.demand_bytes - before.ahead_bytes
        took = sum(samples.step_s)
        return found | {
            "link_mb": came / group.steps / 1e6,
            "link_busy": (now.busy_seconds - before.busy_seconds) / took,
            "waited": (now.wait_seconds - before.wait_seconds) / took,
            "decoded_mb": (now.unpacked_bytes - before.unpacked_bytes) / group.steps / 1e6,
        }


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What every engine of some groups has, so that programs are compiled once for all of them."""

    batch: int
    context: int
    """With the steps after it."""
    tokens: int
    """Least KV that an engine holds."""
    experts: int
    """Most of them that any group has cells for."""


def sizes_of(groups: Sequence[Group], experts: int) -> Sizes:
    """experts: of a layer."""
    places = [(b, c + WARM + group.steps) for group in groups for b, c in group.places]
    return Sizes(
        batch=max(batch for batch, _ in places),
        context=max(context for _, context in places),
        tokens=max(batch * (context + PAGE) for batch, context in places),
        experts=max(_held(group, experts) for group in groups),
    )


def _held(group: Group, experts: int) -> int:
    """Experts in the window of two layers and beside it."""
    kept = min(group.residents, experts)
    return group.layers * kept + 2 * (experts - kept)


@contextmanager
def arm(loaded: LoadedModel, group: Group, sizes: Sizes, options: Mapping) -> Iterator[Arm]:
    """An engine of a group; leaving the context frees it, not the weights. KV gets what a group of
    these sizes leaves."""
    config, slot = loaded.config, loaded.layout.nbytes
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    kv = -(-sizes.tokens * token // slot) + 1
    held = options["expert_budget"]
    left = 0 if isinstance(held, str) else sizes.experts - held // slot
    given = Options(
        group.shape,
        max_num_seqs=sizes.batch,
        max_model_len=sizes.context + 1,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        store=group.store,
        kv_budget=(kv + left) * slot,
        **options,
    )
    engine, _ = start_engine(loaded, given, jax.devices()[0])
    try:
        engine.runner.wait_compiled(everything=True)
        cache = engine.scheduler.cache
        blocks = cache.allocate(cache.available)
        yield Arm(engine, np.array([one.row for one in blocks], np.int32))
    finally:
        engine.runner.delete(given=False)


def arm_options(name: str, loaded: LoadedModel, group: Group) -> dict:
    """Options of an arm in the group's bytes of experts. Raises UserError where they hold no layer
    of an arm that keeps layers whole."""
    layers, experts = sum(loaded.config.moe_layers), loaded.config.num_experts
    slot, kept = loaded.layout.nbytes, min(group.residents, experts)
    if name == "compute":
        return {"expert_budget": "100%"}
    held = _held(group, experts) * slot
    link = {"expert_budget": held, "transfers": "queue"}
    if group.rate is not None:
        link["link_rate"] = group.rate
    if of := _paging_layers(name, layers):
        cells = layers * round(kept + 2 * (experts - kept) / of)
        return {**link, "driver": "device", "eviction": "lru", "expert_budget": cells * slot}
    if name == "stream":
        return {**link, "driver": "stream"}
    if name in ("flux", "flux-direct"):
        return {**link, "driver": "stream", "tiers": f"{name},planner=none"}
    tier, version = ("packed", "lossless12") if name == "flux-h" else ("dense", "dense")
    records = {v: layout.nbytes for v, layout in loaded.store.layouts.items()}
    whole = (held - 2 * experts * slot) // (experts * records[version])
    if not 0 < whole <= layers:
        raise UserError(f"{group.name}: residents leave {name} {whole} whole layers; give more")
    return {**link, "driver": "stream", "tiers": f"flux,by=layers,{tier}={whole / layers}"}


def load(group: Group, folder: Path | None) -> LoadedModel:
    """Random weights, dense, in memory or in the files of a checkpoint that the folder keeps."""
    fields = shape_fields(group.shape, group.layers) | {"vocab_size": 1024, "eos_token_id": 1}
    if group.store == "memory":
        return random_model(parse_config(fields), device=select_device())
    if folder is None:
        raise UserError(f"{group.name} reads files; say with --folder where they are kept")
    path = written(folder, f"stream-{group.shape}-{group.layers}", fields)
    return load_checkpoint(path, in_files=True)


def measure(
    every: Sequence[Group],
    wanted: Sequence[str],
    folder: Path | None,
    tell: Callable[[dict], None],
    rounds: int,
    known: Collection[tuple] = (),
) -> None:
    """Every arm of the wanted groups at every place, and before them compute at all places of each
    model but those in `known`."""
    use_compilation_cache(None)
    known = {*known}
    for model in dict.fromkeys(group.model for group in every if group.name in wanted):
        alike = [group for group in every if group.model == model]
        mine = [group for group in alike if group.name in wanted]
        loaded = load(mine[0], folder)
        sizes = sizes_of(alike, loaded.config.num_experts)
        asked = dict.fromkeys(place for group in mine for place in group.places)
        places = tuple(place for place in asked if (model.shape, model.layers, *place) not in known)
        first = dataclasses.replace(mine[0], name="all", places=places, residents=0, rate=None)
        try:
            if places:
                measure_arm(loaded, first, sizes, "compute", tell, rounds)
                known |= {(model.shape, model.layers, *place) for place in places}
            if model.tiers:
                loaded = with_versions(loaded, ["dense", "lossless12"])
            for group in mine:
                for name in group.arms:
                    measure_arm(loaded, group, sizes, name, tell, rounds)
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
            for place in group.places:
                said = dataclasses.asdict(group)
                del said["places"], said["arms"]
                said |= {"batch": place[0], "context": place[1], "arm": name}
                tell(said | found.measure(group, place, seed))


def measured_compute(path: Path | None) -> set[tuple]:
    """(shape, layers, batch, context) of what a file has of compute already."""
    if path is None or not path.exists():
        return set()
    rows = map(json.loads, path.read_text().splitlines())
    keys = ("shape", "layers", "batch", "context")
    return {tuple(row[key] for key in keys) for row in rows if row["arm"] == "compute"}


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
        known = measured_compute(args.output)
        with nullcontext() if args.output is None else args.output.open("a") as file:

            def tell(row: dict, file: TextIO | None = file) -> None:
                print(json.dumps(row), file=file, flush=True)

            measure(groups, wanted, args.folder, tell, args.rounds, known)
    except (UserError, ValueError, MemoryError, OSError) as error:
        return refuse(__name__, error)
    return 0
