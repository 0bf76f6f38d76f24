"""Options with settings of their own: ``NAME,KEY=VALUE…`` as an object. Its fields describe each
setting and how its text is read."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from moejax.sizes import rate, size
from pallas_kernels.option_text import (
    Reader,
    one_of,
    parse_option,
    parse_pairs,
    reads,
    seconds,
    share,
    unknown,
    whole,
    words,
    yes,
)


def setting(help: str, read: Reader, *, default: Any = None) -> Any:
    """Declares a field that users write as KEY=VALUE."""
    return dataclasses.field(default=default, metadata={"help": help, "read": read})


def _readers(kind: type, *names: str) -> dict[str, Reader]:
    """Returns the readers of a class's settings.

    - `names`: take these settings alone; all without names.
    """
    found = {f.name: f.metadata["read"] for f in dataclasses.fields(kind) if f.metadata}
    return {name: found[name] for name in names or found}


def settings_help(kind: type) -> str:
    """Returns the --help-all text of an option with settings."""
    settings = (field for field in dataclasses.fields(kind) if field.metadata)
    return "; ".join(f"{field.name}: {field.metadata['help']}" for field in settings)


@dataclasses.dataclass(frozen=True)
class Store:
    """Where experts are that have no cell: `memory`, `shared` or `file`."""

    name: str
    host_memory: int | None = setting(
        "with file: bytes for parameters and arena together, in place of memory. On a GPU or with "
        "XLA ops, where driver host or stream and transfers queue are needed, bytes of a cache of "
        "experts in pinned host memory",
        size,
    )
    verify: bool = setting(
        "with file: verify each expert's checksum when it is read; false only verifies that the "
        "file is the same one (default: true)",
        yes,
        default=True,
    )


read_store = reads("store", Store, {"memory": {}, "shared": {}, "file": _readers(Store)})


@dataclasses.dataclass(frozen=True)
class Transfers:
    """How experts get to the device: by the step's own `ops`, or a `queue`."""

    name: str | None = None
    """`ops` or `queue`; None: `queue` if experts are in files or stream, else `ops`."""
    chunk_bytes: int | None = setting(
        "with queue: bytes of a piece; an urgent transfer waits for one piece (default: 1MiB; a "
        "matrix of an expert on a GPU and with XLA ops)",
        size,
    )
    threads: int | None = setting(
        "with queue: number of threads; on a GPU and with XLA ops, pieces that are prefetched at "
        "the same time (default: 2, or 4 that read files)",
        whole(1),
    )
    rate: float | None = setting(
        "with queue, on a CPU with native ops: simulate a link of that many bytes a second, such "
        "as 2GB/s",
        rate,
    )
    latency: float | None = setting(
        "with rate: seconds that each piece takes in addition, such as 20us (default: 0)", seconds
    )

    @property
    def stated(self) -> bool:
        """Whether the options state how fast the link is."""
        return self.rate is not None or self.latency is not None


_read_transfers = reads("transfers", Transfers, {"ops": {}, "queue": _readers(Transfers)})


def read_transfers(given: str | Transfers | None) -> Transfers:
    """``ops`` or ``queue,KEY=VALUE…``."""
    return Transfers() if given is None else _read_transfers(given)


@dataclasses.dataclass(frozen=True)
class Driver:
    """What runs the layers of a step: `device`, one executable; `host`, Python with hooks in
    between; `stream`, one executable through which all experts of each layer stream."""

    name: str
    waves: int | None = setting(
        "with device and host: passes over a layer's experts in a prefill step (default: 1 with "
        "XLA ops, 8 with kernels)",
        whole(1),
    )
    tiers: str | None = setting(
        "with stream: keep some experts of each layer resident as lossless12, and either decode "
        "them into the window (flux) or compute with the packed form (flux-direct) (default: none "
        "are packed)",
        one_of("flux", "flux-direct"),
    )
    dense: float = setting(
        "with tiers: share of each layer's experts that is resident and dense", share, default=0.0
    )
    packed: float | None = setting(
        "with tiers: share that is resident and packed (default: so that link and decoding end "
        "together)",
        share,
    )
    by: str = setting(
        "with tiers: shares of each layer's experts (experts), or of the layers, whole layers from "
        "the first on (layers) (default: experts)",
        one_of("experts", "layers"),
        default="experts",
    )
    planner: str | None = setting(
        "with tiers: how FluxMoE's planner moves experts while requests run: one of every layer at "
        "a time (live), as many of one layer (one-layer), or not at all (none) (default: live)",
        one_of("live", "one-layer", "none"),
    )
    interval: int = setting(
        "with tiers: steps between two moves (default: 300, as in the paper's Exp#3)",
        whole(1),
        default=300,
    )

    def __post_init__(self):
        if self.tiers is None:
            for name in ("dense", "packed", "by", "planner", "interval"):
                if getattr(self, name) != getattr(Driver, name):
                    raise ValueError(f"driver {self.name!r}: {name} is of tiers; add tiers=flux")
        if self.by == "layers" and self.planner not in (None, "none"):
            raise ValueError("tiers with by=layers stay as they begin; use planner=none")
        if self.planner is None and self.tiers is not None:
            object.__setattr__(self, "planner", "none" if self.by == "layers" else "live")
        if self.dense + (self.packed or 0.0) > 1:
            raise ValueError(f"dense={self.dense:g} and packed={self.packed:g} are more than all")


read_driver = reads(
    "driver",
    Driver,
    {
        "device": _readers(Driver, "waves"),
        "host": _readers(Driver, "waves"),
        "stream": _readers(Driver, "tiers", "dense", "packed", "by", "planner", "interval"),
    },
)


PREDICTED = (
    *("mtp", "deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp"),
    *("qwen3_next_mtp", "qwen3_5_mtp"),
)
"""Names of the method "mtp" in vLLM. They mean the same: the checkpoint says what its layer is."""


@dataclasses.dataclass(frozen=True)
class Speculation:
    """How tokens are drafted for decode steps to verify, with names as in vLLM."""

    method: str = "ngram"
    """"ngram"; "mtp", the checkpoint's own layer that predicts a further token; "draft_model"."""
    model: str | None = None
    """The model that drafts, of method draft_model."""
    num_speculative_tokens: int = 4
    """Most tokens of a draft."""
    prompt_lookup_max: int = 5
    """Most last tokens that must have occurred before."""
    prompt_lookup_min: int = 2
    """Fewest last tokens that must have occurred before."""
    adaptive: bool = True
    """Whether steps go without drafts where that is measured to be faster."""


def read_speculation(given: str | Mapping[str, Any] | Speculation) -> Speculation:
    """``{"method": "ngram", "num_speculative_tokens": 4, …}`` or ``{"method": "draft_model",
    "model": PATH, …}`` or ``{"method": "mtp", …}``, as a mapping or as JSON."""
    if isinstance(given, Speculation):
        return given
    example = '\'{"method": "ngram", "num_speculative_tokens": 4}\''
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise ValueError(
                f"speculative_config is JSON such as {example}, not {given!r}"
            ) from None
    if not isinstance(given, Mapping):
        raise ValueError(f"speculative_config is a mapping such as {example}, not {given!r}")
    settings = dict(given)
    method = settings.pop("method", None)
    if method is None:
        raise ValueError(f"speculative_config names no method; give it as in {example}")
    if method not in (methods := ("ngram", "draft_model", *PREDICTED)):
        raise ValueError(unknown("speculative method", str(method), methods))
    method = "mtp" if method in PREDICTED else method
    known = {field.name: field.default for field in dataclasses.fields(Speculation)}
    lookup = {"prompt_lookup_max", "prompt_lookup_min"}
    own: set[str] = {"ngram": lookup, "draft_model": {"model"}}.get(method, set())
    if method == "mtp":
        settings = {"num_speculative_tokens": 1, **settings}
    keys = ["method", *own, "num_speculative_tokens", "adaptive"]
    model = settings.get("model")
    if method == "draft_model" and (not isinstance(model, str) or not model):
        raise ValueError(
            f"speculative_config: model is the draft model's directory or name, not {model!r}"
        )
    for name, value in settings.items():
        if name not in keys:
            raise ValueError(unknown("key of speculative_config", name, sorted(keys)))
        if name == "model":
            continue
        if type(value) is not type(known[name]) or value < (1 if name != "adaptive" else 0):
            kind = "true or false" if name == "adaptive" else "a whole number, 1 or more"
            raise ValueError(f"speculative_config: {name} is {kind}, not {value!r}")
    longest = settings.get("prompt_lookup_max", known["prompt_lookup_max"])
    shortest = settings.get("prompt_lookup_min", known["prompt_lookup_min"])
    if "prompt_lookup_min" not in settings:
        shortest = min(shortest, longest)
    elif "prompt_lookup_max" not in settings:
        longest = max(shortest, longest)
    if shortest > longest:
        raise ValueError(
            f"speculative_config: prompt_lookup_min {shortest} is more than prompt_lookup_max "
            f"{longest}"
        )
    settings |= {"prompt_lookup_max": longest, "prompt_lookup_min": shortest}
    return Speculation(method, **settings)


@dataclasses.dataclass(frozen=True)
class Recording:
    """The trace to write."""

    directory: str | os.PathLike[str]
    arrays: tuple[str, ...] = setting(
        "arrays for every token, NAME+NAME of probs, gate_input, embedding and token: the router's "
        "scores of all experts, its input, the token's embedding, the token",
        words,
        default=(),
    )


def read_recording(given: str | os.PathLike[str] | Recording) -> Recording:
    """``DIR[,arrays=NAME+NAME]``; a directory may have commas in its name."""
    if isinstance(given, Recording):
        return given
    directory, found, arrays = os.fspath(given).rpartition(",arrays=")
    if not found:
        return Recording(given)
    return Recording(directory, **parse_pairs("trace", f"arrays={arrays}", _readers(Recording)))


@dataclasses.dataclass(frozen=True)
class Cells:
    """How the layers divide the experts' share."""

    rule: str = "uniform"
    """`uniform` or `marginal`; uniform if numbers are given."""
    trace: str | None = None
    """The trace whose miss curves the rule uses; None: live miss curves."""
    split: str | None = None
    """The trace that decides the split between experts and KV too; None: sizes decide it."""
    each: tuple[int, ...] | None = None
    """Cells of each layer, in numbers."""


_RULES = ("uniform", "marginal")


def read_cells(given: str | Sequence[int] | Cells) -> Cells:
    """``NAME[=TRACE][,split=TRACE]``, or a number a layer."""
    if isinstance(given, Cells):
        return given
    if not isinstance(given, str) or given[:1].isdigit():
        numbers = given.split(",") if isinstance(given, str) else given
        try:
            return Cells(each=tuple(int(n) for n in numbers))
        except (TypeError, ValueError):
            raise ValueError(f"cells are a name or a whole number a layer, not {given!r}") from None
    settings = {rule: {"split": str} for rule in _RULES}
    rule, trace, found = parse_option("cells", given, settings, paths=_RULES)
    return Cells(rule, trace, **found)
