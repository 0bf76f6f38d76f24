# ruff: noqa: RUF009  _option is dataclasses.field with a description
"""The options of a model that runs: one list of names, defaults and descriptions.

`moejax.LLM` and `AsyncLLM` take them as keywords, the command line as `--option-name`, and
`--config FILE.yaml` as a mapping of names (moejax.commands.model).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moejax.errors import UserError
from moejax.sizes import Share, parse_duration, parse_expert_budget, parse_rate, parse_size

if TYPE_CHECKING:  # the command line answers before jax is imported
    import jax

    from host_offload.control.interface import Policy
    from host_offload.policies.precision.names import Precision
    from moejax.engine.loop import Listener
    from moejax.step.hooks import Hooks

DRIVERS = ("device", "host", "stream")
"""Who walks through the layers of a step: one executable, Python with hooks in between, or one
executable through which all experts of each layer stream (docs/stream.md)."""

BOTH_MEMORIES = "host_memory is memory and the parameters together; give one of them"

STORES = ("memory", "file", "shared")
"""Where experts are that have no cell: all in host memory, or in the files of a converted
checkpoint, of which the arena is the cache."""

TRANSFERS = ("ops", "queue")
"""Who brings experts: the step's own ops, in their place, or a queue beside compute."""

WITHOUT_A_GPU = "compare policies without a GPU"
"""The group of options that state times which a CPU alone does not have, so that policies can be
compared on it: of a link, and of two processors."""

KV_OVERFLOW = ("swap", "recompute")
"""What happens to KV that makes room: moved to host memory, or dropped and computed again by the
prefill path, which changes the bits of generated tokens' KV."""


@dataclasses.dataclass(frozen=True)
class Description:
    """What is said of an option beside its name and default."""

    help: str
    group: str | None = None
    """One of the command line's groups; None: it has no such option."""
    metavar: str | None = None
    """None: N of a whole number, SIZE of bytes."""
    type: Callable[[str], Any] | None = None
    """How the command line reads it; None: as the field's annotation says (int, float, bool), else
    as text."""
    choices: tuple[str, ...] | None = None
    in_file: bool = True
    """`--config FILE` may have it."""
    default: Any = None
    """What the command line takes where it is not given."""


def _option(
    help: str,
    group: str | None = None,
    *,
    default: Any = None,
    metavar: str | None = None,
    type: Callable[[str], Any] | None = None,
    choices: tuple[str, ...] | None = None,
    in_file: bool = True,
) -> Any:
    """A field of Options with its Description."""
    description = Description(help, group, metavar, type, choices, in_file)
    return dataclasses.field(default=default, metadata={"option": description})


def _step(text: str) -> int | str:
    return int(text) if text.isdigit() else text


@dataclasses.dataclass(frozen=True)
class Options:
    """Everything that a model can be started with. Sizes may be given as text ("6GiB", "25%") and
    are bytes (or a Share) afterwards. Raises UserError for a value that can never be."""

    model: str | os.PathLike[str]
    """A Hugging Face or Orbax checkpoint directory, or "demo" for the model in the package
    ("./demo" is a directory)."""
    _: dataclasses.KW_ONLY
    step: int | str | None = _option(
        "of an Orbax checkpoint with steps: latest, best, best:METRIC:min or a number (default: "
        "latest)",
        "checkpoint",
        type=_step,
    )
    name_map: str | os.PathLike[str] | None = _option(
        "which leaf of an Orbax checkpoint is which tensor: a .yaml or .json file, or the name of "
        "a shipped map (docs/checkpoints.md)",
        "checkpoint",
        metavar="MAP",
    )
    dtype: str = _option(
        "bfloat16 or half, float16, float32 or float, auto: the checkpoint's (default: auto)",
        "engine",
        default="auto",
    )
    tokenizer: str | os.PathLike[str] | None = _option(
        "a directory with tokenizer.json, in place of the model's own",
        "checkpoint",
        metavar="DIR",
    )
    seed: int = _option("of requests that bring none", default=0)
    max_model_len: int | None = _option(
        "most tokens of prompt and text together (default: the model's)", "engine"
    )
    max_num_seqs: int | None = _option(
        "sequences that run at once (default: 16 on CPU, 64 on GPU)", "engine"
    )
    max_num_batched_tokens: int | None = _option(
        "most prompt tokens in one prefill step over the model (default: 2048 on CPU, 8192 on GPU)",
        "engine",
    )
    memory: int | None = _option(
        "bytes of the arena, such as 16GiB; any two of it and its parts fix the third; without "
        "numbers everything is held, cut to what fits",
        "memory",
    )
    expert_budget: int | Share | None = _option(
        "what experts get: bytes such as 6GiB, or a share of them such as 25%; 0 is legal; it "
        "decides speed only, the output has the same bits",
        "memory",
        metavar="SIZE|SHARE",
    )
    kv_budget: int | None = _option("bytes that KV gets, such as 2GiB", "memory")
    store: str = _option(
        "where experts are beside the arena: memory, all of them; shared, the same in memory that "
        "other processes of this machine share (CPU only); or file, in the files that `moejax "
        "convert` wrote, read as they are computed (native CPU ops; elsewhere with driver host and "
        "transfers queue, through a cache in pinned host memory of --host-memory); no bit depends "
        "on it (default: memory)",
        "memory",
        default="memory",
        choices=STORES,
    )
    host_memory: int | None = _option(
        "with store file, what parameters and arena take together, such as 4GiB, in place of "
        "--memory; on a GPU, or with ops that are not native, the size of the cache of experts",
        "memory",
    )
    verify_reads: bool = _option(
        "with store file, each expert's checksum is verified as it is read; without, only that its "
        "file is the same: device, inode, size, time (default: it is)",
        "memory",
        default=True,
    )
    budget: str = _option(
        "where the line between experts and KV is: fixed, by the sizes above, or mv_wsa=TRACE, "
        "where it costs least on a trace's requests; see docs/memory.md (default: fixed)",
        "memory",
        default="fixed",
        metavar="NAME[=TRACE]",
    )
    resize: str = _option(
        "whether the line moves while requests run: none, peak_headroom (KV gets its peak and some "
        "headroom), mv_wsa (equal value of a byte on either side), joint (and how many run at "
        "once, for the most tokens a second) (default: none)",
        "memory",
        default="none",
        metavar="NAME",
    )
    cells: str | Sequence[int] = _option(
        "what each layer gets of the experts' share: uniform, marginal or optimal, by the miss "
        "curves of a trace or, without one, live; or a number a layer such as 9,8,8,7 (default: "
        "uniform)",
        "memory",
        default="uniform",
        metavar="NAME[=TRACE]",
    )
    eviction: str | None = _option(
        "which expert makes room: the least recently used, the least frequently used, the smallest "
        "frequency over age, the one that came first, or none of a hot set (of each layer, "
        "or ranked over all) (default: lru)",
        "memory",
        choices=(
            *("lru", "lfu", "lfru", "global-lru", "global-lfu", "global-lfru"),
            *("fifo", "static", "hot-table"),
        ),
    )
    prefetch: str | None = _option(
        "which experts come ahead of need: random with either driver (deepspeed: none, on demand); "
        "expert_map_in_step[=FILE], chosen inside the compiled step, with --driver device; "
        "expert_map, moe-infinity, fate, mixtral-offloading, promoe=FILE, learned=FILE, "
        "learned_online=FILE, expertflow=FILE, coactivation, layer-streaming with --driver host; "
        "=FILE is what a policy's fit learned from a trace, see docs/policies.md (default: none)",
        "memory",
        metavar="NAME[=PATH]",
    )
    placement: str | None = _option(
        "who computes missed experts, with --driver host: prescope (or cross_layer), greedy, "
        "hybrimoe, hybrimoe-code, fiddler, fiddler-code, llama.cpp, fate, klotski, no-prediction, "
        "or recorded=TRACE, as in that run; a second processor, from the store in place, beside "
        "the steps' own (on a GPU add --transfers queue); costs are measured, or stated as "
        "per_token, startup, load, accelerator, attention=TIME; predict=gates, or by "
        "--prefetch learned=FILE, brings experts ahead (docs/prescope.md; default: all are "
        "computed by the steps)",
        "memory",
        metavar="NAME[,KEY=VALUE…]",
    )
    cache_aware_routing: float | None = _option(
        "routers favour experts that are resident: a missing one loses DELTA of its score (0 to 1 "
        "where scores are a softmax or sigmoid) when a layer chooses, not in the weights; fewer "
        "misses, and OTHER OUTPUTS, which depend on budget, policies and what else runs "
        "(docs/prescope.md; default: outputs are those of full residency)",
        "engine",
        metavar="DELTA",
    )
    policies: Sequence[Policy] = _option(
        "more policies, of your own (docs/write_a_policy.md); one that writes victim_weights takes "
        "the place of eviction",
        default=(),
        in_file=False,
    )
    precision: str | Precision | None = _option(
        "the version that experts are in: dense, lossless12 (same bits), int8, int4, int2 (other "
        "bits), or dynaexq, map=FILE, random, which mix two; see docs/precision.md (default: "
        "dense)",
        "precision",
        metavar="NAME[,KEY=VALUE…]",
    )
    hi: str | None = _option("of the hot experts (default: dense)", "precision", metavar="VERSION")
    lo: str | None = _option("of the others (default: int4)", "precision", metavar="VERSION")
    interval: str | None = _option(
        "how often dynaexq decides, in tokens, steps or seconds (default: '4096 tokens')",
        "precision",
        metavar="'N UNIT'",
    )
    hi_share: float | None = _option(
        "share of the experts that are in --hi, 0 to 1 (default: as many as fit)",
        "precision",
        metavar="SHARE",
    )
    quantizer: str = _option(
        "how versions are made that the checkpoint lacks: rtn, mse (default: rtn)",
        "precision",
        default="rtn",
        metavar="NAME",
    )
    transfers: str | None = _option(
        "who brings experts: ops, the step's own, in their place, or queue, beside compute; on a "
        "GPU and with XLA ops that takes driver=host (default: queue with a link_rate, "
        "link_latency or store=file, else ops)",
        "memory",
        choices=TRANSFERS,
    )
    chunk_bytes: int | None = _option(
        "bytes of a transfer that are moved at once, what one that is needed now waits for; of a "
        "queue (default: 1MiB; a matrix of an expert on a GPU and with XLA ops)",
        "memory",
    )
    transfer_threads: int | None = _option(
        "threads that transfers run on; on a GPU and with XLA ops how many pieces of transfers "
        "ahead of need are on their way at once; of a queue (default: 2, or 4 that read files)",
        "memory",
    )
    link_rate: float | None = _option(
        "bytes a second at which experts reach the arena, at most, such as 2GB/s: for experiments "
        "with the ratio of compute to transfers on a CPU with native ops; transfers then run "
        "beside compute, by threads of their own (docs/transfers.md)",
        WITHOUT_A_GPU,
        metavar="RATE",
    )
    link_latency: float | None = _option(
        "what a piece of a transfer takes beside that, such as 20us (default: 0)",
        WITHOUT_A_GPU,
        metavar="TIME",
    )
    placement_test: str | None = _option(
        "for a placement on a CPU alone: threads=A+B of the steps' and the second processor's "
        "experts, and times that these take at least: accelerator=TIME an expert of the steps', "
        "startup=TIME an expert and per_token=TIME a row of the other's (default: what threads "
        "there are, as fast as they go)",
        WITHOUT_A_GPU,
        metavar="KEY=VALUE…",
    )
    driver: str = _option(
        "who walks through the layers: device runs a step as one executable, host calls them from "
        "Python, slower, for policies that look in between, stream brings all experts of each "
        "layer before it runs, in the memory of two layers, for wide batches with long contexts "
        "(docs/stream.md); no bit depends on it (default: device)",
        "engine",
        default="device",
        choices=DRIVERS,
    )
    tiers: str | None = _option(
        "of driver=stream, where residents are: flux, some of each layer packed as lossless12 and "
        "decoded into the window; flux-direct, computed as they are packed; with dense=SHARE, "
        "packed=SHARE (default: so that link and decoding end together), by=layers, planner=live, "
        "one-layer or none, interval=STEPS; see docs/stream.md (default: none are packed)",
        "memory",
        metavar="NAME[,KEY=VALUE…]",
    )
    ops: str | Mapping[str, str] = _option(
        "implementation of the ops: auto (Pallas kernels on a GPU, native ops on a CPU that has "
        "them, else XLA), xla, pallas, cpu, or pairs such as plan=xla,route=pallas (default: auto)",
        "engine",
        default="auto",
    )
    device: str | jax.Device | None = _option(
        "where to run (default: a GPU if there is one)", "engine", choices=("cpu", "gpu")
    )
    threads: int | None = _option(
        "CPU threads of XLA and the native ops, fixed when jax starts (default: one for each CPU "
        "that the process may use)",
        "engine",
    )
    progress: bool = _option(
        "bars on stderr while loading and generating", default=True, in_file=False
    )
    cache_dir: str | os.PathLike[str] | None = _option(
        "XLA's compilation cache (default: jax's own setting if there is one, else "
        "~/.cache/moejax/xla; empty for none)"
    )
    trace: str | os.PathLike[str] | None = _option(
        "write what each step routed, missed and moved into this new directory, for "
        "moejax.traces.read_trace (docs/trace_format.md)",
        "trace",
        metavar="DIR",
    )
    trace_arrays: str | Sequence[str] = _option(
        "what else the trace has of every token, of probs,gate_input,embedding: the router's "
        "scores of all experts, what it saw, the token's embedding; large",
        "trace",
        default=(),
        metavar="NAMES",
    )
    prefill_waves: int | None = _option(
        "passes over a layer's experts in a prefill step; no bit depends on it (default: 1 with "
        "XLA ops, 8 with kernels)"
    )
    swap_space: int = _option(
        "host memory for KV that makes room (default: 4GiB)", "memory", default=4 << 30
    )
    kv_overflow: str = _option(
        "KV that makes room is swapped to host memory, or dropped and computed again, which "
        "changes bits (default: swap)",
        "memory",
        default="swap",
        choices=KV_OVERFLOW,
    )
    enable_prefix_caching: bool = _option(
        "prompts with equal beginnings share KV (default: they do)", "memory", default=True
    )
    long_prefill_token_threshold: int | None = _option(
        "most tokens of one prompt in a prefill step that others wait for (default: a quarter of "
        "it)",
        "engine",
    )
    listener: Listener | None = _option(
        "called with each step after its dispatch, see Engine", in_file=False
    )
    hooks: Hooks | None = _option(
        "called between the parts of every layer (moejax.step.hooks), with driver=host",
        in_file=False,
    )

    def __post_init__(self):
        if not isinstance(self.model, str | os.PathLike):
            raise UserError(
                'model is a checkpoint\'s directory, or "demo" for the one in the package, not '
                f"{self.model!r}"
            )
        for name, parse in _SIZES.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, parse(value))
        for name, description in descriptions().items():
            if (value := getattr(self, name)) is None:
                continue
            if what := _why_not(description, value):
                raise UserError(f"{name} must be {what}, got {value!r}")
            if description.type is int and name != "seed" and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if self.kv_overflow not in KV_OVERFLOW:
            raise UserError(
                f"kv_overflow is one of {', '.join(KV_OVERFLOW)}, not {self.kv_overflow!r}"
            )
        if self.transfers not in (None, *TRANSFERS):
            raise UserError(f"transfers is one of {', '.join(TRANSFERS)}, not {self.transfers!r}")
        if self.store not in STORES:
            raise UserError(f"store is one of {', '.join(STORES)}, not {self.store!r}")
        if self.store != "file":
            if self.host_memory is not None:
                raise UserError(
                    "host_memory is what may be kept of experts in files, and "
                    f"store={self.store!r} keeps all of them; leave it out, or take store='file'"
                )
            if not self.verify_reads:
                raise UserError(
                    "verify_reads is about experts that are read from files; it goes with "
                    "store='file'"
                )
        both = self.host_memory is not None and self.memory is not None
        cached = self.transfers == "queue" or self.driver == "stream"
        if both and not cached:  # there it may be another memory: cache_of
            raise UserError(BOTH_MEMORIES)
        if self.driver not in DRIVERS:
            raise UserError(
                f"driver {self.driver!r} does not exist; use one of {', '.join(DRIVERS)}"
            )


_SIZES: dict[str, Callable[[Any], Any]] = {
    "memory": parse_size,
    "expert_budget": parse_expert_budget,
    "kv_budget": parse_size,
    "host_memory": parse_size,
    "swap_space": parse_size,
    "chunk_bytes": parse_size,
    "link_rate": parse_rate,
    "link_latency": parse_duration,
}


@functools.cache
def descriptions() -> dict[str, Description]:
    """Name → what is said of it, of every option but the model."""
    fields = dataclasses.fields(Options)
    said = {f.name: f.metadata["option"] for f in fields if "option" in f.metadata}
    for name in _SIZES:
        # Numbers that may be written with a unit.
        metavar = said[name].metavar or "SIZE"
        said[name] = dataclasses.replace(said[name], type=str, metavar=metavar)
    return of_fields(Options, said)


def of_fields(
    cls: type, said: Mapping[str, Description], defaults: Any = None
) -> dict[str, Description]:
    """Descriptions of fields of a dataclass, with the type of the field where none is said.
    defaults: an instance that the command line takes them from; None: what is not given is None."""
    kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": bool}
    names = {field.name: str(field.type).partition(" ")[0] for field in dataclasses.fields(cls)}
    return {
        name: dataclasses.replace(
            one, type=one.type or kinds.get(names[name], str), default=getattr(defaults, name, None)
        )
        for name, one in said.items()
    }


def _why_not(description: Description, value: Any) -> str:
    """What a value of this option is, where this one is not; empty: it may be."""
    if description.type is int:
        try:
            operator.index(value)
        except TypeError:
            return "a whole number"
    elif description.type is float and not isinstance(value, int | float):
        return "a number"
    elif description.type is bool and not isinstance(value, bool):
        return "true or false"
    return ""


def refuse_cache_aware(delta: float | None, why: str) -> None:
    """Raises UserError where outputs must not depend on who is resident. why: what follows "and"
    in the message."""
    if delta is not None:
        raise UserError(
            f"cache_aware_routing makes outputs depend on who is resident, and {why}; leave it out"
        )
