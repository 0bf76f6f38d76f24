"""``moejax trace scores``: files for --precision from a trace."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from moejax.commands import add_command
from moejax.commands.trace.model import add_model, check_model, model_config
from moejax.errors import user_errors

if TYPE_CHECKING:
    from host_offload.traces.reader import Trace

_EPILOG = """\
writes, for --precision:
  DIR/map.npy       the experts that the trace selected most are high: map=DIR/map.npy
  DIR/scores.npy    DynaExq's S at the trace's end, to begin with: dynaexq,scores=DIR/scores.npy
and with --model, which has to be the trace's:
  DIR/weights.npy   how much more error each expert's low version makes:
                    dynaexq,scope=error-weighted,weights=DIR/weights.npy
  DIR/weighted-map.npy
                    like map.npy, by selections times error, over all layers
Errors are of the experts' outputs if the trace has their inputs (--trace-arrays gate_input), else
of their weights, which moejax quantize wrote down.

examples:
  moejax trace scores run1 hot --hi-share 0.25
  moejax generate "The old house" --precision map=hot/map.npy
  moejax trace scores run1 hot --model demo --lo int4
"""


def add_parser(actions: argparse._SubParsersAction) -> None:
    text = "write who is used most, for --precision"
    parser = add_command(actions, "scores", _run, text, _EPILOG)
    parser.add_argument("trace", metavar="TRACE", help="a trace")
    parser.add_argument("directory", metavar="DIR", help="of the files")
    parser.add_argument(
        "--hi-share",
        type=float,
        default=0.25,
        metavar="SHARE",
        help="of the experts are high in maps (default: 0.25)",
    )
    parser.add_argument(
        "--alpha",
        type=float,
        metavar="A",
        help="of S, as DynaExq has it (default: the trace's, else 0.5)",
    )
    parser.add_argument(
        "--interval", metavar="N UNIT", help="of S (default: the trace's, else '4096 tokens')"
    )
    for option, default in (("--hi", "dense"), ("--lo", "int4")):
        parser.add_argument(
            option,
            default=default,
            metavar="VERSION",
            help=f"whose errors are compared (default: {default})",
        )
    parser.add_argument(
        "--quantizer",
        default="rtn",
        metavar="NAME",
        help="rtn or mse, of versions that the checkpoint lacks (default: rtn)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead")
    add_model(parser, "also write weights of errors; refuse the trace if it is not of this model")


def _run(args: argparse.Namespace) -> int:
    from host_offload.traces.reader import TraceError, read_trace

    with user_errors(TraceError):
        return _written(args, read_trace(args.trace))


def _written(args: argparse.Namespace, trace: Trace) -> int:
    from moejax.evaluate.expert_scores import error_weights, expert_scores, write_scores

    check_model(args.trace, trace.header, model_config(args))
    recorded = trace.header.spec.get("precision") or {}
    alpha = recorded.get("alpha", 0.5) if args.alpha is None else args.alpha
    interval = args.interval or recorded.get("interval", "4096 tokens")
    found, errors = expert_scores(trace, alpha, interval), None
    if args.model is not None:
        import jax

        from moejax.models.directory import model_directory

        jax.config.update("jax_platforms", "cpu")  # nothing here is worth a GPU's memory
        model, pair = model_directory(args.model), (args.hi, args.lo)
        errors = error_weights(
            model, trace, *pair, args.quantizer, step=args.step, name_map=args.name_map
        )
    files = write_scores(args.directory, found, args.hi_share, errors)
    tokens, of = trace.tokens, None if errors is None else errors.of
    if args.json:
        print(
            json.dumps(
                {
                    "trace": args.trace,
                    "tokens": tokens,
                    "alpha": alpha,
                    "interval": interval,
                    "intervals": found.intervals,
                    "hi_share": args.hi_share,
                    "errors_of": of,
                    "files": [str(file) for file in files],
                },
                indent=2,
            )
        )
        return 0
    print(
        f"{tokens} tokens, intervals of {interval}: {found.intervals}, alpha {alpha:g}"
        + ("" if of is None else f"; errors of {args.lo} by {of}")
    )
    for file in files:
        print(f"  {file}")
    return 0
