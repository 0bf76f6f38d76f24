"""``moejax trace`` shows statistics of a trace's routing, and converts dumps of other programs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moejax.commands import add_command, print_table
from moejax.commands.model import CHECKPOINT, add_described, pick_arguments
from moejax.errors import UserError, user_errors
from moejax.start.fields import Description

if TYPE_CHECKING:
    from host_offload.traces.reader import Trace
    from host_offload.traces.statistics import TraceStatistics
    from moejax.models.model_config import ModelConfig

_INFO_EPILOG = """\
Every figure is beside what papers measured of real models, where they did: what holds for a small
model need not hold for a large one, and a trace of another shape proves nothing of it.

examples:
  moejax trace info run1
  moejax trace info run1 --model demo --json
      refuses a trace of another model
"""

_CONVERT_EPILOG = """\
SRC is an array of expert ids [tokens, layers, k] as .npy, or .npz with more columns, or .csv with
token, layer and expert per line, or .jsonl with a request or a response of vLLM or SGLang per line;
docs/how-to/traces.md has them all.
What SRC does not say is absent from DST, never made up.

examples:
  moejax trace convert routed.jsonl qwen.trace --model Qwen3-30B-A3B/config.json --batch 8
  moejax trace convert dump.npz other.trace --experts 64
"""

_OF_A_DUMP = {
    name: Description(text, type=int)
    for name, text in (
        ("experts", "routed experts of a layer, without --model"),
        ("layers", "layers in ids without a shape, dense ones included"),
        ("top_k", "experts of a token in ids without a shape"),
        ("batch", "requests that a step computes, where SRC has no steps (default: 1)"),
        ("prompt_tokens", "first tokens of each request that are prompt, where SRC does not say"),
    )
} | {"dense_layers": Description("first layers without experts", type=int, default=0)}
"""Options that are keyword arguments of convert_trace."""

PAIRS = 20
"""Most pairs of domains shown one by one; --json has all."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    trace = commands.add_parser(
        "trace",
        help="look at routing traces, and convert them",
        description="Look at routing traces (generate --trace DIR), and convert them.",
        allow_abbrev=False,
    )
    actions = trace.add_subparsers(dest="action", metavar="ACTION", required=True)

    text = "show what a trace's routing is like, beside published figures"
    info = add_command(actions, "info", _info, text, _INFO_EPILOG)
    info.add_argument("directory", metavar="DIR", help="a trace")
    _add_model(info, "refuse the trace if it is not of this model")
    info.add_argument("--json", action="store_true", help="one JSON object; shares are 0 … 1")

    text = "make a trace of routing that another program recorded"
    convert = add_command(actions, "convert", _convert, text, _CONVERT_EPILOG)
    convert.add_argument("source", metavar="SRC", help="a .npy, .npz, .csv, .tsv or .jsonl file")
    convert.add_argument("destination", metavar="DST", help="the new trace's directory")
    _add_model(convert, "of this model; gives the number of experts, and checks shapes")
    add_described(convert, _OF_A_DUMP)


# ---- the model of a trace


def _add_model(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--model", metavar="PATH", help=f"{text}: a checkpoint or a config.json")
    add_described(parser, CHECKPOINT)


def _model_config(args: argparse.Namespace) -> ModelConfig | None:
    """The configuration of --model; None without that option."""
    if args.model is None:
        return None
    from moejax.start.report.model_info import read_headers

    return read_headers(args.model, args.step, args.name_map)[0]


def _open_trace(path: str, args: argparse.Namespace) -> Trace:
    """Reads a trace. Raises TraceError for a damaged one, and UserError for a trace of another
    model than --model."""
    from host_offload.traces.reader import read_trace
    from moejax.models.model_config import config_digest

    trace, config = read_trace(path), _model_config(args)
    if config is None:
        return trace
    header, digest = trace.header, config_digest(config)
    found = header.layers, header.experts, header.top_k
    wanted = sum(config.moe_layers), config.num_experts, config.num_experts_per_tok
    if found != wanted:
        raise UserError(
            f"{path} is of another model: it has {found[0]} MoE layers of {found[1]} experts, "
            f"top-{found[2]}; the model has {wanted[0]} of {wanted[1]}, top-{wanted[2]}"
        )
    if header.config_digest and header.config_digest != digest:
        raise UserError(
            f"{path} is of another model: its configuration's digest is "
            f"{header.config_digest[:12]}…, the model's {digest[:12]}…"
        )
    return trace


# ---- info


def _info(args: argparse.Namespace) -> int:
    from host_offload.traces.reader import TraceError
    from host_offload.traces.statistics import as_json, trace_statistics
    from moejax.traces import published

    with user_errors(TraceError):
        trace = _open_trace(args.directory, args)
        statistics = trace_statistics(trace)
    header = trace.header
    if args.json:
        shape = {"layers": header.layers, "experts": header.experts, "top_k": header.top_k}
        published = [dataclasses.asdict(model) for model in published.MODELS]
        found = {"trace": args.directory, **shape, "complete": trace.complete}
        found |= {"absent": list(header.absent), "spec": header.spec}
        found |= {"statistics": as_json(statistics), "published": published}
        print(json.dumps(found, indent=2))
        return 0
    _print_head(args.directory, trace, statistics)
    models = (f"[{i + 1}]" for i in range(len(published.MODELS)))
    columns = "active of a layer, at batch", "steps", "tokens", "uniform", *models
    print_table(columns, _activation_rows(statistics))
    print(published.ACTIVATED_NOTES)
    print_table(
        ("decode", "trace", "by chance", "published"), _measures(statistics, header.experts)
    )
    print(published.MEASURE_NOTES)
    if len(statistics.domains) > 1:
        columns = "domains", "divergence", "variation", "hot experts shared"
        print_table(columns, _domains(statistics))
        print(published.DOMAIN_NOTES)
    return 0


def _print_head(directory: str, trace: Trace, s: TraceStatistics) -> None:
    from moejax.traces.published import MODELS

    header = trace.header
    shape = f"{header.layers} MoE layers of {header.experts} experts, top-{header.top_k}"
    print(f"{directory}: {shape}")
    kinds = {
        "prefill": s.prefill_steps,
        "decode": s.decode_steps,
        "of unknown kind": s.unknown_steps,
    }
    steps = ", ".join(f"{n} {kind}" for kind, n in kinds.items() if n) or "none"
    requests = "unknown requests" if s.requests is None else f"{s.requests} requests"
    print(f"steps: {steps}; {s.tokens} tokens of {requests}")
    if not trace.complete:
        print("The run was interrupted or is still running. These are the steps written so far.")
    if header.absent:
        print(textwrap.fill(f"absent: {', '.join(header.absent)}", 80, break_on_hyphens=False))
    wanted = header.layers, header.experts, header.top_k
    if model := next((m for m in MODELS if (m.layers, m.experts, m.top_k) == wanted), None):
        print(f"The shape is that of {model.name}.")
    else:
        print(
            "No published model has this shape. Published figures are of other models: what this\n"
            "trace shows need not hold for them."
        )
    if "generator" in header.spec:
        print(f"The routing is synthetic ({header.spec['generator']}): it shows what was put in.")


def _percent(share: float) -> str:
    return "–" if share != share else f"{share:.1%}"


def _activation_rows(s: TraceStatistics) -> Iterator[tuple[str, ...]]:
    from moejax.traces.published import MODELS

    for batch, share in s.activated.items():
        in_steps = s.activated_in_steps.get(batch, float("nan"))
        models = (model.activated[batch] for model in MODELS)
        yield str(batch), *map(_percent, (in_steps, share, s.activated_uniform[batch], *models))


def _measures(s: TraceStatistics, experts: int) -> Iterator[tuple[str, ...]]:
    from moejax.traces import published

    overlap = _percent(s.token_overlap), _percent(s.token_overlap_by_chance)
    yield "experts kept from token to token", *overlap, published.TOKEN_OVERLAP
    yield "from step to step", _percent(s.step_overlap), "", published.STEP_OVERLAP
    most = f"{s.experts_for_90:.1f}, {s.experts_for_90 / experts:.0%}"
    yield "experts with 90% of all routing", most, "90%", published.CONCENTRATION


def _domains(s: TraceStatistics) -> Iterator[tuple[str, ...]]:
    def row(name: str, divergence: float, variation: float, shared: float) -> tuple[str, ...]:
        return name, f"{divergence:.3f}", f"{variation:.3f}", _percent(shared)

    for d in s.distances[:PAIRS]:
        yield row(f"{d.a} – {d.b}", d.divergence, d.variation, d.hot_shared)
    for name, rows in (("all pairs", s.distances), ("halves", s.halves)):
        if rows:
            fields = ("divergence", "variation", "hot_shared")
            means = (sum(getattr(d, field) for d in rows) / len(rows) for field in fields)
            yield row(f"mean of {name}", *means)


# ---- convert


def _convert(args: argparse.Namespace) -> int:
    from moejax.traces.conversion import convert_trace

    config, given = _model_config(args), pick_arguments(args, _OF_A_DUMP)
    done = convert_trace(args.source, args.destination, config=config, **given)
    header = done.header
    kind = "recorded" if header.spec["steps"] == "recorded" else "put together"
    print(
        f"{done.directory}: {done.tokens} tokens, {header.layers} MoE layers, {done.steps} {kind} "
        "steps"
    )
    print(textwrap.fill(f"absent: {', '.join(header.absent)}", 80, break_on_hyphens=False))
    if "step.kind" in header.absent:
        print("A grid over it has to know which tokens are a prompt's: --prompt-tokens N.")
    return 0
