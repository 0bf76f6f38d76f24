"""Options that have settings of their own: ``NAME,KEY=VALUE…`` as an object."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from moejax.sizes import rate, size
from pallas_kernels.option_text import (
    Reader,
    one_of,
    parse_pairs,
    reads,
    seconds,
    share,
    threads_of_two,
    whole,
    words,
    yes,
)


@dataclasses.dataclass(frozen=True)
class Store:
    """Where experts are that have no cell."""

    name: str
    """`memory`, all of them in host memory; `shared`, the same in memory that processes share;
    `file`, in the files of a converted checkpoint."""
    host_memory: int | None = None
    """Bytes that parameters and arena take together; on a GPU, or with ops that are not native,
    bytes of the cache of experts."""
    verify: bool = True
    """Each expert's checksum is verified as it is read."""

    def __str__(self) -> str:
        return self.name


read_store = reads(
    "store", Store, {"memory": {}, "shared": {}, "file": {"host_memory": size, "verify": yes}}
)


@dataclasses.dataclass(frozen=True)
class Transfers:
    """How experts get to the device."""

    name: str | None = None
    """`ops`, by the step's own ops in their place; `queue`, beside compute; None: `queue` where
    experts are in files or stream, else `ops`."""
    chunk_bytes: int | None = None
    """What is moved at once: a transfer that is needed now waits for so much."""
    threads: int | None = None
    rate: float | None = None
    """Bytes a second that the link is limited to; None: it is as fast as it is."""
    latency: float | None = None
    """Seconds that each chunk takes beside that."""

    @property
    def stated(self) -> bool:
        """The link is as fast as the options say."""
        return self.rate is not None or self.latency is not None


_QUEUE: dict[str, Reader] = {
    "chunk_bytes": size,
    "threads": whole(1),
    "rate": rate,
    "latency": seconds,
}

_read_transfers = reads("transfers", Transfers, {"ops": {}, "queue": _QUEUE})


def read_transfers(given: str | Transfers | None) -> Transfers:
    """``ops`` or ``queue,KEY=VALUE…``."""
    return Transfers() if given is None else _read_transfers(given)


@dataclasses.dataclass(frozen=True)
class Tiers:
    """Where residents of the stream driver are. Shares are of each layer's experts, or with
    by="layers" of the layers, the first of which are in a tier whole."""

    name: str
    """`flux`: packed residents are decoded into the window; `flux-direct`: computed as they are."""
    dense: float = 0.0
    packed: float | None = None
    """None: as many as are decoded in the time in which the others come over the link."""
    by: str = "experts"
    planner: str = "live"
    """Who moves experts while requests run: FluxMoE's planner, one expert of every layer at a time
    ("live") or as many of one layer ("one-layer"); or nobody ("none")."""
    interval: int = 300
    """Steps between two of its moves; 300: those of the paper's Exp#3."""

    @property
    def direct(self) -> bool:
        """Packed residents are computed as they are."""
        return self.name == "flux-direct"


@dataclasses.dataclass(frozen=True)
class Driver:
    """Who walks through the layers of a step."""

    name: str
    """`device`, one executable; `host`, Python with hooks in between; `stream`, one executable
    through which all experts of each layer stream (docs/stream.md)."""
    waves: int | None = None
    """Passes over a layer's experts in a prefill step; None: 1 with XLA ops, 8 with kernels."""
    threads: tuple[int, int] | None = None
    """Of a placement on a CPU alone: threads of the steps' and of the second processor's experts;
    None: what there are."""
    times: tuple[tuple[str, float], ...] = ()
    """Of such a placement: names of moejax.step.parts.StatedTimes and seconds that they take at
    least."""
    tiers: Tiers | None = None
    """Of `stream`; None: no resident is packed."""

    @property
    def tests_placement(self) -> bool:
        """It says how fast two processors are."""
        return self.threads is not None or bool(self.times)

    def __str__(self) -> str:
        return self.name


_TIMES = ("accelerator", "startup", "per_token", "attention")

_WAVES: dict[str, Reader] = {"waves": whole(1)}

_DRIVERS: dict[str, dict[str, Reader]] = {
    "device": _WAVES,
    "host": {**_WAVES, "threads": threads_of_two, **dict.fromkeys(_TIMES, seconds)},
    "stream": {
        "tiers": one_of("flux", "flux-direct"),
        "dense": share,
        "packed": share,
        "by": one_of("experts", "layers"),
        "planner": one_of("live", "one-layer", "none"),
        "interval": whole(1),
    },
}

DRIVERS = tuple(_DRIVERS)


def _driver(name: str, **settings: Any) -> Driver:
    if name != "stream":
        times = tuple((key, settings.pop(key)) for key in _TIMES if key in settings)
        return Driver(name, times=times, **settings)
    if "tiers" not in settings:
        if settings:
            raise ValueError(f"driver 'stream': {next(iter(settings))} is of tiers; add tiers=flux")
        return Driver(name)
    if settings.get("by") == "layers" and settings.setdefault("planner", "none") != "none":
        raise ValueError("driver 'stream': by=layers stay as they begin; use planner=none")
    tiers = Tiers(settings.pop("tiers"), **settings)
    if tiers.dense + (tiers.packed or 0.0) > 1:
        raise ValueError(f"dense={tiers.dense:g} and packed={tiers.packed:g} are more than all")
    return Driver(name, tiers=tiers)


read_driver = reads("driver", Driver, _DRIVERS, _driver)


@dataclasses.dataclass(frozen=True)
class Recording:
    """A trace to write."""

    directory: str | os.PathLike[str]
    arrays: tuple[str, ...] = ()
    """What it has beside the rest, of moejax.step.parts.TraceArrays."""


def read_recording(given: str | os.PathLike[str] | Recording) -> Recording:
    """``DIR[,arrays=NAME+NAME]``; a directory may have commas in its name."""
    if isinstance(given, Recording):
        return given
    directory, found, arrays = os.fspath(given).rpartition(",arrays=")
    if not found:
        return Recording(given)
    return Recording(directory, **parse_pairs("trace", f"arrays={arrays}", {"arrays": words}))


BOTH_MEMORIES = (
    "host_memory of store='file' is memory and the parameters together; give one of them"
)
