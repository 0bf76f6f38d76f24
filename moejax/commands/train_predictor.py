"""``moejax train-predictor``: PreScope's predictor from a trace, and how good it is."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moejax.commands import add_command, print_table
from moejax.commands.model import add_described, asked
from moejax.errors import UserError, user_errors
from moejax.start.options import Description

if TYPE_CHECKING:
    import numpy as np

    from host_offload.policies.prefetch.llapor.evaluation import LayerReport
    from host_offload.policies.prefetch.llapor.metrics import Quality

_EPILOG = """\
TRACE needs the routers' inputs: --trace DIR --trace-arrays gate_input of generate. Without --test
its first 60% of requests are learned from, the next 20% say when to stop, the last 20% are what the
table is of. What the columns mean: docs/prescope.md.

examples:
  moejax generate --input prompts.jsonl --output out.jsonl --trace run1 --trace-arrays gate_input
  moejax train-predictor run1 learned.safetensors --model demo
  moejax generate "The old house" --driver host --expert-budget 40% \\
      --prefetch learned=learned.safetensors
"""

_OF_TRAINING = {
    "stride": Description("layers that are looked ahead (default: 1)", type=int, default=1),
    "epochs": Description("most passes over what is learned from (default: 30)", type=int),
    "patience": Description("passes without a better recall until it ends (default: 6)", type=int),
    "width": Description("of the networks (default: 512)", type=int),
    "edge": Description(
        "layers of the input and of the output group (default: an eighth each)", type=int
    ),
    "seed": Description("of the random numbers (default: 0)", type=int),
}
"""Settings of training; those that are not given are its own."""

COLUMNS = (
    *("layer", "group", "recall", "gate", "4 in 6", "gate", "tokens", "gate"),
    *("µs", "KiB"),
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    train = add_command(
        commands,
        "train-predictor",
        _run,
        "train a predictor of experts on a trace, for --prefetch learned=FILE",
        _EPILOG,
        "Train PreScope's predictor (LLaPor), a small network for each layer, on a trace, and "
        "compare\nwhat it predicts with reusing the next layer's gate.",
    )
    train.add_argument("trace", metavar="TRACE", help="a trace with gate inputs")
    train.add_argument("out", metavar="OUT", help="the file of the predictor")
    train.add_argument("--test", metavar="TRACE", help="what to measure it on (default: TRACE)")
    train.add_argument(
        "--model", metavar="MODEL", help="the trace's model, to compare with reusing its gates"
    )
    add_described(train, _OF_TRAINING)
    train.add_argument("--quiet", action="store_true", help="no progress")
    train.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _run(args: argparse.Namespace) -> int:
    given = {name: value for name, value in asked(args, _OF_TRAINING).items() if value is not None}
    stride = given.pop("stride")
    least = {"edge": 0, "seed": 0}
    for name, value in {"stride": stride, **given}.items():
        if value < least.get(name, 1):
            raise UserError(f"--{name} must be at least {least.get(name, 1)}, got {value}")

    if not Path(args.out).absolute().parent.is_dir():  # before minutes of training
        raise UserError(f"{args.out} cannot be written: its folder does not exist")

    import numpy as np

    from host_offload.policies.prefetch.llapor.evaluation import evaluated
    from host_offload.policies.prefetch.llapor.training import Training, fit, split
    from host_offload.traces.reader import read_trace

    with user_errors(ValueError):
        trace = read_trace(args.trace)
        test = trace if args.test is None else read_trace(args.test)
        if test.header.config_digest != trace.header.config_digest:
            raise UserError(f"{args.test} is a trace of another model than {args.trace}")
        learned, left_out, *rest = split(trace, (0.6, 0.2) if args.test is None else (0.75,))
        rows = rest[0] if rest else np.ones(test.tokens, bool)
        router = None if args.model is None else routers_of(args.model, trace.header.config_digest)
        with _progress(not (args.quiet or args.json)) as report:
            policy = fit(
                trace,
                stride=stride,
                training=Training(**given),
                rows=(learned, left_out),
                report=report,
            )
        reports = evaluated(policy, test, rows, router)
    try:
        policy.fitted.write(args.out)
    except OSError as error:
        raise UserError(f"{args.out} cannot be written ({error.strerror})") from error
    if args.json:
        print(json.dumps(_as_json(args, reports, int(rows.sum())), indent=2))
        return 0
    print(f"{args.out}: {policy.fitted.nbytes / 2**20:.1f} MiB; {rows.sum()} tokens tested")
    print_table(COLUMNS, map(_row, reports))
    if router is None:
        print("gate: not compared; name the trace's model with --model")
    return 0


def _progress(shown: bool) -> Any:
    from moejax.progress import training_progress

    return training_progress(shown)


def routers_of(model: str, digest: str) -> np.ndarray:
    """The model's routers. Raises UserError for another model than the trace's."""
    import jax

    from moejax.checkpoints.load import load_checkpoint
    from moejax.models.directory import model_directory
    from moejax.models.model_config import config_digest
    from moejax.start.build import router_weights

    jax.config.update("jax_platforms", "cpu")  # nothing here is worth a GPU's memory
    loaded = load_checkpoint(model_directory(model), "auto", jax.devices("cpu")[0])
    found = config_digest(loaded.config)
    if found != digest:
        raise UserError(
            f"the trace is of another model: its configuration's digest is {digest[:12]}…, that "
            f"of {model} {found[:12]}…"
        )
    return router_weights(loaded)


def _row(report: LayerReport) -> tuple[str, ...]:
    def pair(name: str) -> tuple[str, str]:
        gate = "–" if report.gate is None else f"{getattr(report.gate, name):.1%}"
        return f"{getattr(report.learned, name):.1%}", gate

    return (
        str(report.layer),
        report.group,
        *(text for name in ("recall", "hot", "tokens") for text in pair(name)),
        f"{report.call_us:.0f}",
        f"{report.nbytes / 1024:.0f}",
    )


def _as_json(args: argparse.Namespace, reports: list[LayerReport], tokens: int) -> dict[str, Any]:
    def said(quality: Quality | None) -> dict[str, float] | None:
        return None if quality is None else quality._asdict()

    layers = [{**r._asdict(), "learned": said(r.learned), "gate": said(r.gate)} for r in reports]
    return {"file": args.out, "trace": args.trace, "tokens": tokens, "layers": layers}
