"""Every option of a model that runs, in five groups. A field is an option: its name is the keyword
of `moejax.LLM` and AsyncLLM, the flag of the command line and the key of `--config FILE.yaml`; its
type, default, help text, and whether another value changes output bits, are said here and nowhere
else."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moejax.errors import UserError, user_errors
from moejax.models.hub import at_revision
from moejax.sizes import Share, parse_expert_budget, parse_size
from moejax.start.fields import Option, Read, changes_bits, group, optional, options_of, same_bits
from moejax.start.option_values import (
    Cells,
    Driver,
    Recording,
    Speculation,
    Store,
    Transfers,
    read_cells,
    read_driver,
    read_recording,
    read_speculation,
    read_store,
    read_transfers,
    settings_help,
)
from moejax.start.other_names import use_instead
from pallas_kernels.option_text import unknown

if TYPE_CHECKING:  # the command line answers before jax is imported
    import jax

    from host_offload.control.interface import Policy
    from host_offload.policies.precision.precision_names import Precision


def _model(value: str | os.PathLike[str]) -> str | os.PathLike[str]:
    if not isinstance(value, str | os.PathLike):
        raise UserError(
            'model is a checkpoint\'s directory, or "demo" for the one in the package, not '
            f"{value!r}"
        )
    return value


def _step(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _word(option: str, *known: str) -> Callable[[str], str]:
    """Reads an option that is one of these words."""

    def read(value: str) -> str:
        if value not in known:
            raise UserError(unknown(option, value, known))
        return value

    return read


def _favour(value: float | str) -> float | str:
    if isinstance(value, str):
        if value.startswith("buddies"):
            return value
        with contextlib.suppress(ValueError):
            value = float(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UserError(f"cache_aware_routing must be a number, got {value!r}; or buddies=TRACE")
    if not 0 <= value < math.inf:
        raise UserError(
            "cache_aware_routing is how much of its score a missing expert loses, a number from 0 "
            f"up such as 0.05, not {value}"
        )
    return value


@group
class ModelOptions:
    """Which model, and how it is read."""

    model: str | os.PathLike[str] = changes_bits(
        'a Hugging Face or Orbax checkpoint directory, or "demo" for the model in the package '
        '("./demo" is a directory)',
        convert=_model,
        common=True,
        in_file=False,  # a command names it
        kw_only=False,
    )
    step: int | str | None = changes_bits(
        "step of an Orbax checkpoint: latest, a number, or best:METRIC:min or :max (default: "
        "latest)",
        default=None,
        type=_step,
    )
    name_map: str | os.PathLike[str] | None = changes_bits(
        "for an Orbax checkpoint of another program, which leaf is which tensor: a .yaml or .json "
        "file, or the name of a map that comes with moejax (docs/how-to/checkpoints.md)",
        default=None,
        metavar="MAP",
    )
    dtype: str = changes_bits(
        "data type of the weights: bfloat16, float16 (half), float32 (float), or auto, the "
        "checkpoint's (default: auto)",
        default="auto",
        common=True,
    )
    tokenizer: str | os.PathLike[str] | None = changes_bits(
        "directory of another tokenizer.json than the model's",
        default=None,
        common=True,
        metavar="DIR",
    )
    generation_config: str = changes_bits(
        "sampling defaults of requests that state none: auto, the model's generation_config.json; "
        "or none, those of SamplingParams (default: auto, as in vLLM)",
        default="auto",
        convert=_word("generation_config", "auto", "none"),
    )
    max_model_len: int | None = changes_bits(  # of models with longrope
        "most tokens of prompt and text together (default: the model's)",
        default=None,
        common=True,
    )


@group
class MemoryOptions:
    """What is held where, and how much of it."""

    memory: Read[int | str | None, int | None] = same_bits(
        "bytes of the arena, which holds experts and KV, such as 16GiB; any two of memory, "
        "expert_budget and kv_budget fix the third (default: everything, cut to what fits)",
        default=None,
        convert=optional(parse_size),
        common=True,
        metavar="SIZE",
    )
    expert_budget: Read[int | str | Share | None, int | Share | None] = same_bits(
        "memory for experts: bytes such as 6GiB, or a share of all experts such as 25%; 0 is "
        "legal; it changes speed, never the output",
        default=None,
        convert=optional(parse_expert_budget),
        common=True,
        metavar="SIZE|SHARE",
    )
    kv_budget: Read[int | str | None, int | None] = same_bits(
        "memory for KV, such as 2GiB",
        default=None,
        convert=optional(parse_size),
        common=True,
        metavar="SIZE",
    )
    store: Read[str | Store, Store] = same_bits(
        "where all experts are kept: memory; shared, memory that processes of this machine share "
        "(CPU only); or file, the checkpoint's own files, read when an expert is needed "
        "(default: memory)",
        settings=settings_help(Store),
        default="memory",
        convert=read_store,
        common=True,
    )
    swap_space: Read[int | str, int] = same_bits(
        "host memory for KV that had to leave the device (default: 4GiB)",
        default="4GiB",
        convert=parse_size,
        metavar="SIZE",
    )
    kv_overflow: str = changes_bits(
        "what happens to KV that has to leave the device: swap to host memory, or recompute "
        "later, which changes bits (default: swap)",
        default="swap",
        convert=_word("kv_overflow", "swap", "recompute"),
    )
    kv_dir: str | None = same_bits(
        "directory in which sessions and cached beginnings of prompts outlive the process: what it "
        "holds at its end, the next start of the same model and options finds (default: none)",
        default=None,
        metavar="DIR",
    )
    enable_prefix_caching: bool = same_bits(
        "prompts with the same beginning share KV (default: they do)",
        default=True,
    )


@group
class PolicyOptions:
    """Which experts are resident, in which version, and which processor computes the others."""

    eviction: str | None = same_bits(
        "which expert is evicted: the least recently used (lru), the least frequently used (lfu), "
        "the one with the smallest frequency over age (lfru), the oldest (fifo); global-lru, "
        "global-lfu and global-lfru rank the experts of all layers together; static and hot-table "
        "keep a hot set, per layer or over all layers (default: lru)",
        default=None,
    )
    prefetch: str | None = same_bits(
        "which experts are fetched before they are needed. With either driver: random, or "
        "deepspeed (none); with --driver device: expert_map_in_step[=FILE]; with --driver host: "
        "expert_map, moe-infinity, fate, mixtral-offloading, coactivation, tokens, "
        "layer-streaming, fluxmoe, promoe=FILE, learned=FILE, learned_online=FILE, "
        "expertflow=FILE. FILE is what `moejax train-predictor` wrote "
        "(docs/explanation/policies.md; default: none)",
        default=None,
        common=True,
        metavar="NAME[=PATH]",
    )
    placement: str | None = changes_bits(  # where the second processor has another implementation
        "with --driver host, the rule by which a CPU computes missed experts from host memory: "
        "prescope, greedy, hybrimoe, hybrimoe-code, fiddler, fiddler-code, llama.cpp, fate, "
        "klotski, dali, ktransformers, no-prediction, or recorded=TRACE, as in that run; on a GPU "
        "add --transfers queue. Costs are measured, or stated as per_token, startup, load, "
        "accelerator, attention=TIME; predict=gates or --prefetch learned=FILE also prefetches; "
        "defer=N adds N experts of a token that the CPU computes a layer late: OTHER OUTPUTS "
        "(docs/explanation/prescope.md; default: none, the device computes all)",
        default=None,
    )
    cache_aware_routing: float | str | None = changes_bits(
        "routers prefer resident experts: a missing expert's score is lowered by DELTA (0 to 1) "
        "when a layer chooses; or, with buddies=TRACE, residents that the trace's tokens chose "
        "with it stand in for a missing expert. Fewer misses, but OTHER OUTPUTS, which depend on "
        "budget, policies and other requests (docs/explanation/prescope.md; default: off)",
        default=None,
        convert=optional(_favour),
        type=str,
        metavar="DELTA",
    )
    policy: str | None = same_bits(
        "auto: while requests run, the engine prices evictions by predicted times, corrected by "
        "measured ones, and changes to a cheaper one (docs/explanation/policies.md; default: none, "
        "what the other options say)",
        default=None,
        convert=optional(_word("policy", "auto")),
    )
    policies: Sequence[Policy] = changes_bits(
        "policies of your own (docs/extending/write_a_policy.md); one that writes victim_weights "
        "replaces eviction",
        default=(),
        in_file=False,
    )
    precision: str | Precision | None = changes_bits(
        "the version of the experts: checkpoint (dense, or as it was quantized), dense, lossless12 "
        "(same bits), int8, int4, int2 (other bits), or a mixture of two: dynaexq, hobbit, "
        "map=FILE or TRACE, random (docs/how-to/precision.md; default: checkpoint)",
        settings="quantizer: rtn or mse, which makes versions that the checkpoint lacks (default: "
        "rtn); hi: in a mixture, the version of hot experts (default: dense); lo: the version of "
        "the others (default: int4); hi_share: share of hot experts (default: as many as fit); "
        "interval: how often dynaexq decides, N tokens, steps or seconds (default: 4096 tokens)",
        default=None,
        common=True,
    )
    cells: Read[str | Sequence[int] | Cells, Cells] = same_bits(
        "how the experts' memory is shared over layers: uniform; marginal, where a cell saves most "
        "misses, by a trace or live; or a number for each layer such as 9,8,8,7. split=TRACE also "
        "splits memory between experts and KV by that trace (docs/how-to/memory.md; default: "
        "uniform)",
        default="uniform",
        convert=read_cells,
        metavar="NAME[=TRACE][,split=TRACE]",
    )
    resize: str = same_bits(
        "whether memory moves between experts and KV while requests run: none; peak_headroom, KV "
        "gets its recent peak and 10%; right_size, experts get what earlier turns of the running "
        "users needed; mv_wsa, a byte is worth the same to both; joint, also chooses how many "
        "sequences run, for the most tokens a second (default: none)",
        default="none",
        convert=_word("resize", "none", "peak_headroom", "right_size", "mv_wsa", "joint"),
    )


@group
class TransferOptions:
    """How a step runs through the layers, and how experts get to the device meanwhile."""

    driver: Read[str | Driver, Driver] = same_bits(
        "what runs the layers: device, one executable for a step; host, a Python loop, slower, for "
        "policies that act between layers; stream, which brings all experts of a layer before it "
        "runs, in the memory of two layers, for wide batches with long contexts "
        "(docs/explanation/stream.md; default: device)",
        settings=settings_help(Driver),
        default="device",
        convert=read_driver,
        common=True,
    )
    transfers: Read[str | Transfers | None, Transfers] = same_bits(
        "what moves experts: ops, the step itself; or queue, threads beside compute, which on a "
        "GPU and with XLA ops needs driver host (docs/explanation/transfers.md; default: queue "
        "with store file and driver stream, else ops)",
        settings=settings_help(Transfers),
        default=None,
        convert=read_transfers,
    )


@group
class RuntimeOptions:
    """The device and its ops, how many requests run at once, and what is recorded."""

    device: str | jax.Device | None = changes_bits(
        "where to run: cpu, gpu (default: a GPU if there is one)",
        default=None,
        common=True,
    )
    threads: int | None = changes_bits(  # XLA compiles for them
        "CPU threads of XLA and the native ops, fixed when jax starts (default: one for each CPU "
        "that the process may use)",
        default=None,
        common=True,
    )
    ops: str | Mapping[str, str] = changes_bits(
        "implementation of the ops: auto (Pallas kernels on a GPU, native ops on a CPU that has "
        "them, else XLA), xla, pallas, cpu, or some by name: plan=xla,route=pallas (default: auto)",
        default="auto",
    )
    arithmetic: str = changes_bits(
        "products with weights in codes: exact, of the decoded weights; or int8, on a CPU, of "
        "activations rounded to 8 bits as llama.cpp does, in groups of 32, faster and with other "
        "bits (docs/how-to/precision.md; default: exact)",
        default="exact",
        convert=_word("arithmetic", "exact", "int8"),
    )
    max_num_seqs: int | None = changes_bits(  # a shape that XLA compiles for
        "sequences that run at once (default: 16 on CPU, 64 on GPU)",
        default=None,
        common=True,
    )
    max_num_batched_tokens: int | None = changes_bits(  # as max_num_seqs
        "most prompt tokens in one prefill step (default: 2048 on CPU, 8192 on GPU)",
        default=None,
        common=True,
    )
    long_prefill_token_threshold: int | None = same_bits(
        "most tokens of one prompt in a prefill step while other prompts wait (default: a quarter "
        "of max_num_batched_tokens)",
        default=None,
    )
    speculative_config: Read[str | Mapping[str, Any] | Speculation | None, Speculation | None] = (
        same_bits(
            "guess the next tokens and verify them in rows of a decode step that no request uses: "
            '\'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, '
            '"prompt_lookup_min": 2}\' guesses what followed the last 2 to 5 tokens before, '
            '\'{"method": "draft_model", "model": MODEL}\' what a smaller model would write, '
            '\'{"method": "mtp"}\' what the checkpoint\'s own layer for it predicts; all '
            "stop where that is not faster (docs/explanation/engine.md; default: off)",
            default=None,
            convert=optional(read_speculation),
            metavar="JSON",
        )
    )
    seed: int = changes_bits(
        "seed of requests that have none",
        default=0,
        flag=False,  # the sampling option of `moejax generate`
    )
    trace: Read[str | os.PathLike[str] | Recording | None, Recording | None] = same_bits(
        "record what each step routed, missed and moved in this new directory, for "
        "moejax.traces.read_trace (docs/reference/trace_format.md)",
        settings=settings_help(Recording),
        default=None,
        convert=optional(read_recording),
        metavar="DIR[,arrays=NAME+NAME]",
    )
    progress: bool = same_bits(
        "show progress bars on stderr while loading and generating",
        default=True,
        in_file=False,
    )


@group
class Keywords(RuntimeOptions, TransferOptions, PolicyOptions, MemoryOptions, ModelOptions):
    """The options as keywords of one call, for signatures."""

    revision: str | None = changes_bits(
        "branch, tag or commit of a model of the hub, as in NAME/NAME@REVISION",
        default=None,
        in_file=False,  # the model's name has it
    )


GROUPS: dict[str, type] = {
    "model": ModelOptions,
    "memory": MemoryOptions,
    "policy": PolicyOptions,
    "transfer": TransferOptions,
    "runtime": RuntimeOptions,
}

OPTIONS: dict[str, Option] = {
    name: one for kind in GROUPS.values() for name, one in options_of(kind).items()
}


@dataclasses.dataclass(frozen=True)
class Config:
    """All options of a model that runs. Raises UserError for a value that can never be."""

    model: ModelOptions
    memory: MemoryOptions = dataclasses.field(default_factory=MemoryOptions)
    policy: PolicyOptions = dataclasses.field(default_factory=PolicyOptions)
    transfer: TransferOptions = dataclasses.field(default_factory=TransferOptions)
    runtime: RuntimeOptions = dataclasses.field(default_factory=RuntimeOptions)

    @classmethod
    def of(cls, model: str | os.PathLike[str], **given: Any) -> Config:
        """The options of LLM(model, KEYWORD=…). Raises TypeError for one that there is not."""
        revision = given.pop("revision", None)
        for name in given:
            if name not in OPTIONS:
                raise TypeError(unknown_option(name))
        given["model"] = model if revision is None else at_revision(model, revision)
        return cls(**{place: kind(**_of(kind, given)) for place, kind in GROUPS.items()})

    def replace_options(self, **given: Any) -> Config:
        """Returns the same options with these replaced."""
        return Config(
            **{
                place: dataclasses.replace(getattr(self, place), **_of(kind, given))
                for place, kind in GROUPS.items()
            }
        )


def _of(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a group."""
    return {name: value for name, value in given.items() if name in options_of(kind)}


def unknown_option(name: str, known: Mapping[str, Option] = OPTIONS) -> str:
    """Returns the message for an unknown option.

    - `known`: the options that exist.
    """
    if instead := use_instead(name):
        return f"unknown option {name!r}{instead}"
    return unknown("option", name, [key for key, one in known.items() if one.in_file])


def refuse_unequal(policy: Mapping[str, Any], why: str) -> None:
    """Raises UserError for options by which outputs depend on which experts are resident:
    cache-aware routing, a placement that adds experts a layer late, versions that change.

    - `policy`: the options given, by name.
    - `why`: what follows "and" in the message.
    """
    from host_offload.policies.placement.placement_names import deferred
    from host_offload.policies.precision.precision_names import precision_of

    makes = f"makes outputs depend on which experts are resident, and {why}; leave"
    if policy.get("cache_aware_routing") is not None:
        raise UserError(f"cache_aware_routing {makes} it out")
    with user_errors(ValueError):
        deferring = deferred(policy.get("placement")) > 0
        precision = precision_of(policy.get("precision"))
    if deferring:
        raise UserError(f"placement defer=N {makes} defer out")
    if precision.policy is not None:
        raise UserError(f"precision {precision.name} {makes} it out")
