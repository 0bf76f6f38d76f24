"""The combinations of options, platforms and models that do not work, in one table."""

from __future__ import annotations

import dataclasses

from host_offload.control.rules import gives_away
from host_offload.memory.budget import format_bytes
from host_offload.policies.precision.dynaexq import DynaExq
from host_offload.policies.precision.hobbit import Hobbit
from host_offload.policies.prefetch.oracle import Clairvoyant, Oracle
from host_offload.queue.cached import CacheSpec, least_records
from moejax.errors import UserError
from moejax.start.choices import Settings
from moejax.start.decide.transfers import cache_of, jax_copies
from moejax.start.option_values import Cells
from moejax.start.options import Config
from moejax.step.step_parts import ARENA_OPS, StepSpec
from moejax.step.transports.copies import DEMANDS
from pallas_kernels.cpu.library import why_not_cpu


@dataclasses.dataclass(frozen=True)
class Situation:
    """A start, as far as it is known. An unknown part conflicts with nothing."""

    settings: Settings
    platform: str | None = None
    steps: StepSpec | None = None


def refuse_conflicts(start: Situation) -> None:
    """Raises UserError for the first row of the table that applies."""
    parts = parts_of(start)
    for together, why in CONFLICTS.items():
        if parts.keys() >= {*together}:
            both = " do not go together" if len(together) > 1 else ""
            named = " and ".join(parts[part] for part in together)
            raise UserError(f"{named}{both}: {why}")


def find_cell_options(options: Config) -> dict[str, bool]:
    """Returns, for each option about cells (which experts have one, or how many), whether it was
    given."""
    policy = options.policy
    return {
        "eviction": policy.eviction is not None,
        "prefetch": policy.prefetch is not None,
        "placement": policy.placement is not None,
        "policies": len(policy.policies) > 0,
        "resize": policy.resize != "none",
        "cells": policy.cells != Cells(),
        "trace": options.runtime.trace is not None,
    }


def parts_of(start: Situation) -> dict[str, str]:
    """Returns the parts of this start, each with its name in messages."""
    settings, platform = start.settings, start.platform
    options, precision = settings.options, settings.precision
    memory, policy, transfer = options.memory, options.policy, options.transfer
    store, driver, transfers = memory.store, transfer.driver, transfer.transfers
    cells, resize = policy.cells, f"resize={policy.resize}"
    both = store.host_memory is not None and memory.memory is not None
    may_be_cached = transfers.name == "queue" or driver.name == "stream"
    named, mixed = f"precision {precision.name}", precision.mixed
    several = mixed or precision.in_transit
    placed = gives_away(settings.policies)
    sizes = [n for n in ("expert_budget", "kv_budget") if getattr(memory, n) is not None]
    given = {name: name for name, wanted in find_cell_options(options).items() if wanted}
    drafts, seqs = options.runtime.speculative_config, options.runtime.max_num_seqs
    by_miss = isinstance(precision.policy, Hobbit)
    fixed = mixed and not isinstance(precision.policy, DynaExq) and not precision.paged
    changes = any({"transitions", "fill_version"} & each.writes for each in settings.policies)
    beside = "publish=arrival" if precision.publish == "arrival" else ""
    if precision.promotions is not None:
        beside = f"promote={precision.promotions.most}"
    changing = changes and "policies that change versions"
    there: dict[str, str | bool] = {
        "driver=device": driver.name == "device",
        "driver=host": driver.name == "host",
        "driver=stream": driver.name == "stream",
        "store=file": store.name == "file",
        "store=shared": store.name == "shared",
        "speculative_config": drafts is not None,
        "oracle": any(isinstance(each, Oracle | Clairvoyant) for each in settings.policies)
        and "prefetch oracle",
        "max_num_seqs=1": seqs == 1,
        "kv_overflow=recompute": memory.kv_overflow == "recompute",
        "transfers=ops": transfers.name == "ops",
        "cache_aware_routing": policy.cache_aware_routing is not None,
        "chunk_bytes": transfers.chunk_bytes is not None,
        "odd chunk": (transfers.chunk_bytes or 0) % 2 > 0 and "this chunk_bytes",
        "stated link": transfers.stated and "rate and latency of transfers='queue'",
        "gives away": placed and "placement",
        "tiers": driver.tiers is not None and f"tiers={driver.tiers}",
        "not in memory": store.name != "memory" and f"store={store.name}",
        "not dense": (precision.versions != ("dense",) or several) and named,
        "made": (precision.lossy or several or "lossless12" in precision.versions) and named,
        "several versions": several and named,
        "in transit": precision.in_transit and named,
        "lossless12": (precision.in_transit or "lossless12" in precision.versions) and named,
        "two versions": mixed and named,
        "all resident": mixed and not precision.paged and named,
        "paged": mixed and precision.paged and (named if by_miss else f"{named},paged=true"),
        "by miss": by_miss and named,
        "prefetch": any("stages" in each.writes for each in settings.policies) and "prefetch",
        "fixed": fixed and named,
        "versions that change": mixed and (named if precision.policy is not None else changing),
        "arrival": precision.publish == "arrival" and "publish=arrival",
        "beside by ops": beside and transfers.name != "queue" and f"{beside} without a queue",
        "hi_share": mixed and precision.hi_share is not None and "hi_share",
        "costs": settings.needs_costs and "policies or budgets that need costs",
        "resize by misses": policy.resize in ("right_size", "mv_wsa", "joint") and resize,
        "even resize": policy.resize in ("peak_headroom", "right_size", "joint") and resize,
        "uneven": cells.rule != "uniform" and f"cells={cells.rule}",
        "numbers": cells.each is not None and "cells in numbers",
        "split": cells.split is not None and f"cells={cells.rule},split=TRACE",
        "cells trace": cells.trace is not None and f"cells={cells.rule}={cells.trace}",
        "even trace": cells.trace is not None and cells.rule == "uniform" and "cells=uniform=TRACE",
        "sizes": bool(sizes) and " and ".join(sizes),
        "two memories": both and not may_be_cached and "host_memory and memory",
    }
    if platform is not None:
        there |= _parts_of_platform(settings, platform)
        if start.steps is not None:
            there |= _parts_of_steps(settings, platform, start.steps)
    return given | {key: key if text is True else text for key, text in there.items() if text}


def _parts_of_platform(settings: Settings, platform: str) -> dict[str, str | bool]:
    memory, transfer = settings.options.memory, settings.options.transfer
    in_files, copies = memory.store.name == "file", jax_copies(settings, platform)
    where = "on a GPU" if platform != "cpu" else "with ops that are not native"
    what = "driver='stream'" if transfer.driver.name == "stream" else "transfers='queue'"
    asked = {op: settings.ops[op] for op in sorted(ARENA_OPS)}
    foreign = _list_ops({op: name for op, name in asked.items() if name not in ("cpu", "auto")})
    missing = why_not_cpu() if platform == "cpu" else None
    both = memory.store.host_memory is not None and memory.memory is not None
    return {
        "GPU": platform != "cpu" and "a GPU",
        "copies": copies and f"{what} {where}",
        "cached files": in_files and copies and "store='file' through a cache",
        "unsized cache": in_files
        and copies
        and memory.store.host_memory is None
        and "store='file'",
        "files in place": in_files and not copies and "store='file'",
        "no native ops": missing is not None and f"a CPU without native ops ({missing})",
        "foreign ops": foreign,
        "two memories": both and not (in_files and copies) and "host_memory and memory",
    }


def _parts_of_steps(settings: Settings, platform: str, steps: StepSpec) -> dict[str, str | bool]:
    second, copies = steps.second, jax_copies(settings, platform)
    layers, small = sum(steps.config.moe_layers), False
    if copies and (cache := cache_of(settings, platform)) is not None:
        least = _least_cache(steps, layers, cache)
        small = cache.bytes < least and (
            f"host_memory {format_bytes(cache.bytes)} is too small a cache of experts in files: "
            f"{DEMANDS} that a layer waits for and {cache.threads} ahead of need take "
            f"{format_bytes(least)} ({least} bytes)"
        )
    own = second is not None and (not second.same_bits or platform != "cpu") and not steps.separate
    return {
        "foreign ops": _list_ops(steps.foreign_ops),
        "streaming": bool(steps.window) and "driver=stream",
        "native queue": steps.queue is not None and not copies and "transfers='queue'",
        "few layers": layers < 3 and f"a model of {layers} layers",
        "sparsemixer": steps.config.route_rule.scoring == "sparsemixer" and "a sparsemixer router",
        "small cache": small,
        "other memory": own and "placement beside a device with memory of its own",
        "placed outputs": second is not None and not second.keeps_outputs and "placement",
        "pinned placement": second is not None and steps.separate and "placement",
    }


def _least_cache(steps: StepSpec, layers: int, cache: CacheSpec) -> int:
    """The fewest bytes of a cache of which every version's share holds the records that must be
    there at once."""
    formats = steps.formats or ()
    counts = [len([i for i in f.places or range(layers) if i >= 0]) for f in formats] or [layers]
    sizes = [f.store.nbytes for f in formats] or [steps.layout.records[0].nbytes]
    every = sum(n * size for n, size in zip(counts, sizes, strict=True))
    return least_records(DEMANDS, cache) * max(-(-every // n) for n in counts)


def _list_ops(ops: dict[str, str]) -> str:
    return ", ".join(f"{op} {name}" for op, name in ops.items())


_CACHE = "driver='host' and transfers='queue' for a cache of the files in pinned host memory"
_QUANTIZED = "int8, int4, int2 that `moejax quantize` wrote"
_UNMEASURED = "what steps cost there is not measured; leave those out, or use"
_STATED = "per_token=TIME,startup=TIME,load=TIME,accelerator=TIME,attention=TIME"

CONFLICTS: dict[tuple[str, ...], str] = {
    # ---- options
    ("two memories",): "both are of parameters and arena together; give one of them",
    ("numbers", "resize"): "such cells stay as they are; leave out resize, or name cells",
    ("split", "sizes"): "split says what both get; leave out one",
    ("split", "cells trace"): "split shares its cells by its own trace; leave out one",
    ("even trace",): "it needs no trace; leave it out",
    ("even resize", "uneven"): "it gives every layer as many cells; leave out cells, or take "
    "resize=mv_wsa",
    ("paged", "resize"): "cells of two versions are laid out once, at the start; leave out one",
    ("fixed", "resize"): "its versions are fixed, so experts have no slot to give; leave out one",
    ("hi_share", "resize"): "it fixes how many experts are high, and with that the slots; leave "
    "out one",
    ("two versions", "resize by misses"): "every expert is resident, so nothing is missed; use "
    "resize=peak_headroom",
    ("by miss", "prefetch"): "it decides what a miss brings, and a prefetch would bring other "
    "experts in few bits; leave out one",
    ("two versions", "cells"): "experts of all layers share its cells, or each layer has cells of "
    "both versions; leave out cells",
    ("gives away", "store=file"): "it computes experts where they lie in memory; take "
    "store='memory'",
    ("gives away", "lossless12"): "it computes records as they lie, one version of all layers; "
    "leave out one",
    (
        "gives away",
        "all resident",
    ): "every expert is resident, so nothing is missed; add paged=true",
    ("cache_aware_routing", "driver=stream"): "all experts are there when a layer is routed; take "
    "driver='device' or 'host'",
    ("beside by ops",): "the queue brings new versions beside the steps; add "
    "transfers='queue' (--transfers queue)",
    ("tiers", "not dense"): "tiers pack dense experts; leave out one",
    ("tiers", "not in memory"): "tiers pack experts of a store in memory; leave out one",
    ("tiers", "odd chunk"): "whole values are decoded; use an even chunk_bytes",
    ("transfers=ops", "driver=stream"): "a queue loads its layers; leave out transfers",
    ("transfers=ops", "store=file"): "a queue reads files; leave out transfers, or take "
    "store='memory'",
    (
        "store=shared",
        "made",
    ): "processes share experts as the checkpoint has them; use store='memory'",
    ("driver=stream", "several versions"): "experts stream in one version, as they lie in the "
    "store; name one, or use driver='device'",
    **{
        ("driver=stream", name): f"it brings every expert of each layer, so {name} says nothing; "
        "leave it out, or use driver='device'"
        for name in ("eviction", "prefetch", "placement", "policies", "resize", "cells", "trace")
    },
    ("speculative_config", "max_num_seqs=1"): "drafts take rows of the decode batch that no "
    "request uses; raise max_num_seqs",
    **{
        ("speculative_config", name): f"{why}; leave out one"
        for name, why in {
            "oracle": "it repeats a run, and drafts change the steps",
            "placed outputs": "rejected tokens would change which processor computes experts, and "
            "with that outputs",
            "driver=stream": "a step brings every expert, however few tokens it has",
            "cache_aware_routing": "rejected tokens would change which experts are resident, and "
            "with that outputs",
            "versions that change": "rejected tokens would change the experts' versions, and with "
            "that outputs",
            "kv_overflow=recompute": "drafts would change which KV is computed again, and with "
            "that outputs",
        }.items()
    },
    # ---- and a platform
    ("store=shared", "GPU"): "experts lie in pinned memory there, which is one process's; use "
    "store='memory'",
    ("unsized cache",): "it is read through a cache in pinned host memory: say how large, "
    "store='file,host_memory=SIZE' (--store file,host_memory=16GiB)",
    ("cached files", "driver=device"): "a step cannot wait for a file; use driver='host' or "
    "'stream', or store='memory'",
    ("files in place", "GPU"): f"native CPU ops read them; use store='memory', or {_CACHE}",
    ("files in place", "no native ops"): f"those read them; use {_CACHE}",
    ("files in place", "foreign ops"): f"use ops='cpu', or store='memory', or {_CACHE}",
    ("copies", "store=shared"): "it has pinned arrays of its own; use store='memory'",
    ("copies", "driver=device"): "it works between the parts of a layer, and driver='device' runs "
    "as one executable: use driver='host', or transfers='ops'",
    ("copies", "stated link"): "jax's copies pass the link as it is; leave them out",
    ("copies", "lossless12"): "it does not decode experts on their way, nor has layers of another "
    "version; use transfers='ops'",
    ("store=file", "several versions"): f"files have one version; use dense, or one of {_QUANTIZED}"
    ", or store='memory'",
    ("store=file", "costs"): f"{_UNMEASURED} store='memory'",
    (
        "copies",
        "costs",
    ): f"{_UNMEASURED} transfers='ops' (a placement takes stated ones: {_STATED})",
    # ---- and steps
    ("cache_aware_routing", "sparsemixer"): "such a router chooses by logits and weighs by what it "
    "chose; leave it out",
    ("streaming", "few layers"): "two layers are held, so nothing would stream; use "
    "driver='device'",
    ("small cache",): "raise it",
    ("native queue", "foreign ops"): "native CPU ops wait for transfers; use ops='cpu' (`python -m "
    "pallas_kernels.cpu` builds them), or leave one out",
    ("native queue", "in transit"): "it does not decode experts on their way; leave out one",
    ("other memory",): "it computes experts of pinned arrays: add transfers='queue' (--transfers "
    "queue), or leave out placement",
    ("pinned placement", "chunk_bytes"): "it computes a record in one piece; leave chunk_bytes out",
}
"""Parts that exclude each other, or a single part that can never work, with the reason and what to
write instead."""
