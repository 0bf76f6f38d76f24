"""Options of every command that runs a model: those of moejax.LLM."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moejax.commands.options.checkpoint import add_checkpoint_options
from moejax.sizes import parse_expert_budget, parse_size

_ENGINE_OPTIONS = (
    "memory",
    "expert_budget",
    "kv_budget",
    "budget",
    "resize",
    "cells",
    "step",
    "name_map",
    "dtype",
    "device",
    "ops",
    "driver",
    "eviction",
    "prefetch",
    "precision",
    "hi",
    "lo",
    "interval",
    "hi_share",
    "quantizer",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "swap_space",
    "kv_overflow",
    "enable_prefix_caching",
    "trace",
    "trace_arrays",
)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of LLM. Raises UserError for what is no size or budget."""
    for name, parse in (
        ("memory", parse_size),
        ("expert_budget", parse_expert_budget),
        ("kv_budget", parse_size),
    ):
        if getattr(args, name) is not None:
            parse(getattr(args, name))
    options = {name: getattr(args, name) for name in _ENGINE_OPTIONS}
    # What was not given keeps the file's value or the library's default.
    given = {name: value for name, value in options.items() if value is not None}
    if getattr(args, "config", None) is None:
        return given
    from moejax.costs.workload_plan import read_options

    return {**read_options(args.config), **given}


@contextmanager
def notes_unsaid() -> Iterator[None]:
    """The summary has every note; a warning would only say it twice."""
    log = logging.getLogger("moejax")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def add_trace_options(group: argparse._ArgumentGroup) -> None:
    """--trace and --trace-arrays."""
    group.add_argument(
        "--trace",
        metavar="DIR",
        help="write what each step routed, missed and moved into this new directory, for "
        "moejax.traces.read_trace",
    )
    group.add_argument(
        "--trace-arrays",
        metavar="NAMES",
        help="what else the trace has of every token, of probs,gate_input,embedding: the router's "
        "scores of all experts, what it saw, the token's embedding; large",
    )


def add_memory_options(group: argparse._ArgumentGroup) -> None:
    """--memory and its parts, and what makes room in them."""
    group.add_argument(
        "--config",
        metavar="FILE",
        help="options in a file that `moejax plan --output FILE` wrote; those that are given here "
        "go before it",
    )
    group.add_argument("--memory", metavar="SIZE", help="bytes of the arena, such as 16GiB")
    group.add_argument(
        "--expert-budget",
        metavar="SIZE|SHARE",
        help="what experts get: bytes such as 6GiB, or a share of them such as 25%%; 0 is legal",
    )
    group.add_argument("--kv-budget", metavar="SIZE", help="bytes that KV gets, such as 2GiB")
    group.add_argument(
        "--budget",
        metavar="NAME[=TRACE]",
        help="where the line between experts and KV is: fixed, by the sizes above, or mv_wsa=TRACE,"
        " where it costs least on a trace's requests; see docs/memory.md (default: fixed)",
    )
    group.add_argument(
        "--resize",
        metavar="NAME",
        help="whether the line moves while requests run: none, peak_headroom (KV gets its peak and "
        "some headroom), mv_wsa (equal value of a byte on either side), joint (and how many run at "
        "once, for the most tokens a second) (default: none)",
    )
    group.add_argument(
        "--cells",
        metavar="NAME[=TRACE]",
        help="what each layer gets of the experts' share: uniform, marginal or optimal, by the "
        "miss curves of a trace or, without one, live; or a number a layer such as 9,8,8,7 "
        "(default: uniform)",
    )
    group.add_argument(
        "--swap-space", metavar="SIZE", help="host memory for KV that makes room (default: 4GiB)"
    )
    group.add_argument(
        "--kv-overflow",
        choices=("swap", "recompute"),
        help="KV that makes room is swapped to host memory, or dropped and computed again, which "
        "changes bits (default: swap)",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="prompts with equal beginnings share KV (default: they do)",
    )
    group.add_argument(
        "--eviction",
        choices=("lru", "lfu", "lfru", "fifo", "static"),
        help="which expert makes room: the least recently used, the least frequently used, the "
        "smallest frequency over age, the one that came first, or none of a hot set (default: lru)",
    )
    group.add_argument(
        "--prefetch",
        metavar="NAME[=PATH]",
        help="which experts come ahead of need: random and moe-infinity with either driver; fate, "
        "mixtral-offloading, promoe=FILE, coactivation and layer-streaming with --driver host; "
        "=FILE is what a policy's fit learned from a trace, see docs/policies.md (default: none)",
    )


def add_precision_options(group: argparse._ArgumentGroup) -> None:
    """--precision and what it mixes."""
    group.add_argument(
        "--precision",
        metavar="NAME[,KEY=VALUE…]",
        help="the version that experts are in: dense, lossless12 (same bits), int8, int4, int2 "
        "(other bits), or dynaexq, map=FILE, random, which mix two; see docs/precision.md "
        "(default: dense)",
    )
    group.add_argument("--hi", metavar="VERSION", help="of the hot experts (default: dense)")
    group.add_argument("--lo", metavar="VERSION", help="of the others (default: int4)")
    group.add_argument(
        "--hi-share",
        type=float,
        metavar="SHARE",
        help="share of the experts that are in --hi, 0 to 1 (default: as many as fit)",
    )
    group.add_argument(
        "--interval",
        metavar="'N UNIT'",
        help="how often dynaexq decides, in tokens, steps or seconds (default: '4096 tokens')",
    )
    group.add_argument(
        "--quantizer",
        metavar="NAME",
        help="how versions are made that the checkpoint lacks: rtn, mse (default: rtn)",
    )


def add_engine_options(group: argparse._ArgumentGroup) -> None:
    """Which checkpoint and device, and the shapes of steps."""
    add_checkpoint_options(group)
    group.add_argument(
        "--dtype", metavar="DTYPE", help="bfloat16, float16, float32, auto (default: auto)"
    )
    group.add_argument(
        "--device", choices=("cpu", "gpu"), help="where to run (default: a GPU if there is one)"
    )
    group.add_argument(
        "--ops",
        metavar="OPS",
        help="implementation of the ops: auto (Pallas kernels on a GPU, else XLA), xla, pallas, or "
        "pairs such as plan=xla,route=pallas (default: auto)",
    )
    group.add_argument(
        "--driver",
        choices=("device", "host"),
        help="who walks through the layers: device runs a step as one executable, host calls them "
        "from Python, slower, for policies that look in between (default: device)",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="most tokens of prompt and text together (default: the model's)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="sequences that run at once (default: 16 on CPU, 64 on GPU)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="most prompt tokens in one prefill step over the model",
    )
    group.add_argument(
        "--long-prefill-token-threshold",
        type=int,
        metavar="N",
        help="most tokens of one prompt in a prefill step that others wait for "
        "(default: a quarter of it)",
    )
