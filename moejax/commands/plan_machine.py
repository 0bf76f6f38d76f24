"""``moejax plan MODEL --gpu NAME`` predicts the speed of a machine that is not at hand."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from host_offload.memory.budget import format_bytes
from moejax.commands import print_table
from moejax.commands.model import engine_options
from moejax.errors import UserError
from moejax.sizes import parse_expert_budget, parse_rate, parse_size
from moejax.start.fields import Description

if TYPE_CHECKING:
    from moejax.start.report.forecast import Forecast

OF_A_GPU = {
    "gpu": Description(
        "predict the speed of MODEL on this device from published figures: rtx4090, h100, "
        "cpu-ddr5, … (a wrong name lists all)",
        metavar="NAME",
    ),
    "batch": Description("with --gpu: sequences at once (default: 1,8,32)", metavar="N[,N…]"),
    "context": Description(
        "with --gpu: tokens of a sequence (default: 4096, or the model's most)", type=int
    ),
    "prompt_tokens": Description("with --gpu: tokens of a prompt (default: 512)", type=int),
    "host_memory": Description(
        "with --gpu: memory of the host, beyond which experts come from disk (default: enough)",
        metavar="SIZE",
    ),
    "link": Description(
        "with --gpu: stated rate from host memory to the device (default: the card's PCIe)",
        metavar="RATE",
    ),
    "disk": Description("with --gpu: rate of the disk (default: 3.5GB/s)", metavar="RATE"),
}
"""Options of a machine that is not at hand."""

_LISTS = ("expert_budget", "eviction")
"""Options of a run of which a prediction takes several values, by commas."""

_OF_A_RUN = {"memory", "precision", "dtype", *_LISTS}
"""Options of a run that a prediction takes too."""

_EVICTIONS = ("lru", "lfu", "lfru")


def predict(args: argparse.Namespace) -> int:
    lists = {name: getattr(args, name) for name in _LISTS}
    options = engine_options(argparse.Namespace(**{**vars(args), **dict.fromkeys(_LISTS)}))
    options |= {name: text for name, text in lists.items() if text is not None}
    if others := sorted(options.keys() - _OF_A_RUN):
        raise UserError(f"--{others[0].replace('_', '-')} does not go with --gpu")
    if args.model is None:
        raise UserError("--gpu needs a model: moejax plan MODEL --gpu NAME")
    if args.workload is not None and args.batch is not None:
        raise UserError("the batch is the trace's; leave --batch or --trace out")

    from moejax.costs.hardware import find_hardware
    from moejax.costs.workload_plan import open_trace
    from moejax.start.options import Config
    from moejax.start.report.forecast import Machine, forecast
    from moejax.start.report.model_info import read_headers

    name, hardware = find_hardware(args.gpu)
    if args.link is not None:
        hardware = dataclasses.replace(hardware, link=parse_rate(args.link))
    memory = hardware.memory if args.memory is None else parse_size(args.memory)
    if memory is None:
        raise UserError(f"--gpu {args.gpu} needs --memory, what is built in")
    host = None if args.host_memory is None else parse_size(args.host_memory)
    disk = Machine.disk if args.disk is None else parse_rate(args.disk)
    machine = Machine(hardware, memory, host, disk)
    budgets = str(options.pop("expert_budget", "")).split(",")
    evictions = str(options.pop("eviction", "lru")).split(",")
    if unknown := {*evictions} - {*_EVICTIONS}:
        raise UserError(f"--gpu predicts --eviction {', '.join(_EVICTIONS)}, not {min(unknown)}")
    Config.of(args.model, **options)  # checks them
    given: dict[str, Any] = {"context": args.context, "prompt": args.prompt_tokens}
    given |= {"version": args.precision, "evictions": evictions, "dtype": args.dtype}
    if budgets != [""]:
        given["expert_budgets"] = [parse_expert_budget(budget) for budget in budgets]
    given["batches"] = None if args.batch is None else _batches(args.batch)
    given["trace"] = None if args.workload is None else open_trace(args.workload)
    config, weights = read_headers(_model(args.model))
    given["coded"] = None if weights is None else weights.coded
    found = forecast(config, machine, **{k: v for k, v in given.items() if v is not None})
    if args.json:
        rows = [{**dataclasses.asdict(one), "tokens_per_s": one.tokens_per_s} for one in found]
        print(json.dumps(rows, indent=2))
        return 0
    link = f"link {hardware.link / 1e9:.3g} GB/s" if hardware.link else "experts from disk"
    rates = f"{format_bytes(memory)} at {hardware.memory_rate / 1e9:,.0f} GB/s, {link}"
    if host is not None or not hardware.link:
        rates += f", disk {disk / 1e9:.3g} GB/s"
    print(f"{args.model} on {name}: {rates}, as stated")
    columns = (
        "at once",
        "driver",
        "resident",
        "moved a step",
        "ms a token",
        "tokens/s",
        "first token, ms",
    )
    print_table(columns, _rows(found))
    print("\nlikely (low to high). driver device: LRU, or the eviction that it names, in the step;")
    print("least moves as few experts as any could.")
    print("Routing is generated like Qwen3-30B-A3B's unless --trace gives some that was recorded.")
    return 0


def _model(model: str) -> str:
    """Returns the config.json of a directory of JSON files without weights, which a forecast does
    without; else the model."""
    config = pathlib.Path(model) / "config.json"
    beside = config.parent.iterdir() if config.is_file() else ()
    others = [x for x in beside if x.suffix not in (".json", ".md") or "safetensors" in x.name]
    return str(config) if config.is_file() and not others else model


def _rows(found: Sequence[Forecast]) -> Iterator[tuple[str, ...]]:
    for one in found:
        yield (
            str(one.batch),
            one.driver,
            f"{one.resident:.0%}",
            f"{one.moved:,.0f} experts",
            _range(*(1e3 * seconds for seconds in one.step_s)),
            _range(*one.tokens_per_s),
            _range(*(1e3 * seconds for seconds in one.first_token_s)),
        )


def _range(best: float, likely: float, worst: float) -> str:
    low, high = sorted((best, worst))
    return f"{_digits(likely)} ({_digits(low)}–{_digits(high)})"


def _digits(value: float) -> str:
    """Formats three digits, and all of a whole part."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _batches(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise UserError(f"--batch is whole numbers from 1 on, such as 1,8,32, not {text!r}")
    return found
