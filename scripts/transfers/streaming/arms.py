"""Engines whose experts stream, or are paged in the same memory, at places of a grid."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.checkpoints.random_model import random_model, shape_fields
from moejax.device import select_device
from moejax.engine.loop import Engine
from moejax.errors import UserError
from moejax.models.config import parse_config
from moejax.models.json_values import parse_yaml
from moejax.sizes import parse_rate
from moejax.start.build import start_engine
from moejax.start.options import Options
from scripts.disk.random_converted import written
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
        if before is None or now is None or now.wait_seconds is None or before.wait_seconds is None:
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
