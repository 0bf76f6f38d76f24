"""``moejax train-predictor``: a predictor of experts from a trace, and how good it is."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moejax.commands import add_command, print_table
from moejax.commands.model import add_described, asked
from moejax.errors import UserError, user_errors
from moejax.progress import training_progress
from moejax.start.fields import Description

if TYPE_CHECKING:
    import numpy as np

    from host_offload.policies.prefetch.fitted import Fitted
    from host_offload.policies.prefetch.llapor.llapor_evaluation import LayerReport
    from host_offload.policies.prefetch.llapor.metrics import Quality
    from host_offload.traces.reader import Trace

_EPILOG = """\
TRACE needs the routers' inputs: --trace DIR,arrays=gate_input of generate. Without --test
its first 60% of requests are learned from, the next 20% say when to stop, the last 20% are what the
table is of. What the columns mean: docs/prescope.md.

examples:
  moejax generate --input prompts.jsonl --output out.jsonl --trace run1,arrays=gate_input
  moejax train-predictor run1 learned.safetensors --model demo
  moejax generate "The old house" --driver host --expert-budget 40% \\
      --prefetch learned=learned.safetensors
  moejax train-predictor run1 forest.safetensors --model demo --predictor forest
  moejax generate "The old house" --driver host --expert-budget 40% \\
      --prefetch expertflow=forest.safetensors
"""

_OF_NETWORKS = {
    "stride": Description("layers that are looked ahead (default: 1)", type=int),
    "epochs": Description("most passes over what is learned from (default: 30)", type=int),
    "patience": Description("passes without a better recall until it ends (default: 6)", type=int),
    "width": Description("of the networks (default: 512)", type=int),
    "edge": Description(
        "layers of the input and of the output group (default: an eighth each)", type=int
    ),
}
_OF_FORESTS = {
    "trees": Description("of a forest (default: 20)", type=int),
    "leaves": Description("most of a tree (default: 256)", type=int),
    "reach": Description("most layers that are looked ahead (default: 4)", type=int),
}
_OF_BOTH = {"seed": Description("of the random numbers (default: 0)", type=int)}
_SETTINGS = {"llapor": {**_OF_NETWORKS, **_OF_BOTH}, "forest": {**_OF_FORESTS, **_OF_BOTH}}
"""Predictor → settings of its training; those that are not given are its own."""

_LEAST = {"edge": 0, "seed": 0, "leaves": 2}

COLUMNS = (
    *("layer", "group", "recall", "gate", "4 in 6", "gate", "tokens", "gate"),
    *("µs", "KiB"),
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    train = add_command(
        commands,
        "train-predictor",
        _run,
        "train a predictor of experts on a trace, for --prefetch learned=FILE or expertflow=FILE",
        _EPILOG,
        "Train PreScope's predictor (LLaPor), a small network for each layer, or ExpertFlow's "
        "forests on\na trace, and compare what it predicts with reusing the later layer's gate.",
    )
    train.add_argument("trace", metavar="TRACE", help="a trace with gate inputs")
    train.add_argument("out", metavar="OUT", help="the file of the predictor")
    train.add_argument("--test", metavar="TRACE", help="what to measure it on (default: TRACE)")
    train.add_argument(
        "--model", metavar="MODEL", help="the trace's model, to compare with reusing its gates"
    )
    train.add_argument(
        "--predictor",
        choices=tuple(_SETTINGS),
        default="llapor",
        help="networks for learned=FILE, or random forests for expertflow=FILE, which need --model "
        "and pip install 'moejax[train]' (default: llapor)",
    )
    add_described(train, {**_OF_NETWORKS, **_OF_FORESTS, **_OF_BOTH})
    train.add_argument("--quiet", action="store_true", help="no progress")
    train.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _run(args: argparse.Namespace) -> int:
    given = _given(args)
    if not Path(args.out).absolute().parent.is_dir():  # before minutes of training
        raise UserError(f"{args.out} cannot be written: its folder does not exist")

    import numpy as np

    from host_offload.policies.prefetch.llapor.llapor_training import split
    from host_offload.traces.reader import read_trace

    with user_errors(ValueError):
        trace = read_trace(args.trace)
        test = trace if args.test is None else read_trace(args.test)
        if test.header.config_digest != trace.header.config_digest:
            raise UserError(f"{args.test} is a trace of another model than {args.trace}")
        learned, left_out, *rest = split(trace, (0.6, 0.2) if args.test is None else (0.75,))
        rows = rest[0] if rest else np.ones(test.tokens, bool)
        router = None if args.model is None else routers_of(args.model, trace.header.config_digest)
        train = _networks if args.predictor == "llapor" else _forests
        shown = not (args.quiet or args.json)
        fitted, reports = train(trace, test, (learned, left_out, rows), router, given, shown)
    try:
        fitted.write(args.out)
    except OSError as error:
        raise UserError(f"{args.out} cannot be written ({error.strerror})") from error
    if args.json:
        print(json.dumps(_as_json(args, reports, int(rows.sum())), indent=2))
        return 0
    print(f"{args.out}: {fitted.nbytes / 2**20:.1f} MiB; {rows.sum()} tokens tested")
    print_table(COLUMNS, map(_row, reports))
    if router is None:
        print("gate: not compared; name the trace's model with --model")
    return 0


def _given(args: argparse.Namespace) -> dict[str, int]:
    """The settings that were given. Raises UserError for those of the other predictor, and for
    values that can never be."""
    every = {**_OF_NETWORKS, **_OF_FORESTS, **_OF_BOTH}
    given = {name: value for name, value in asked(args, every).items() if value is not None}
    for name, value in given.items():
        if name not in _SETTINGS[args.predictor]:
            known = ", ".join(f"--{each}" for each in _SETTINGS[args.predictor])
            raise UserError(f"--predictor {args.predictor} has no --{name}; it has {known}")
        if value < _LEAST.get(name, 1):
            raise UserError(f"--{name} must be at least {_LEAST.get(name, 1)}, got {value}")
    if args.predictor == "forest" and args.model is None:
        raise UserError("forests set right what the model's gates say: name it with --model")
    return given


def _networks(
    trace: Trace,
    test: Trace,
    parts: tuple[np.ndarray, np.ndarray, np.ndarray],
    router: np.ndarray | None,
    given: dict[str, int],
    shown: bool,
) -> tuple[Fitted, list[LayerReport]]:
    """What LLaPor learned. parts: bool[tokens], what is learned from and what says when to stop, of
    `trace`, and what it is tested on, of `test`."""
    from host_offload.policies.prefetch.llapor.llapor_evaluation import evaluated
    from host_offload.policies.prefetch.llapor.llapor_training import NetworkTraining, fit

    stride = given.pop("stride", 1)
    with training_progress(shown) as say:

        def report(layer: int, layers: int, epoch: int, recall: float) -> None:
            say(layer, layers, f"epoch {epoch}: recall {recall:.1%}")

        training = NetworkTraining(**given)
        policy = fit(trace, stride=stride, training=training, rows=parts[:2], report=report)
    return policy.fitted, evaluated(policy, test, parts[2], router)


def _forests(
    trace: Trace,
    test: Trace,
    parts: tuple[np.ndarray, np.ndarray, np.ndarray],
    router: np.ndarray | None,
    given: dict[str, int],
    shown: bool,
) -> tuple[Fitted, list[LayerReport]]:
    """What ExpertFlow's forests learned, from the first two parts: nothing says when to stop."""
    from host_offload.policies.prefetch.expertflow.expertflow_evaluation import evaluated
    from host_offload.policies.prefetch.expertflow.expertflow_training import ForestTraining, fit

    assert router is not None
    with training_progress(shown) as say:

        def report(layer: int, layers: int, ahead: int) -> None:
            say(layer, layers, f"{ahead} ahead")

        training = ForestTraining(**given)
        policy = fit(trace, router, training=training, rows=parts[0] | parts[1], report=report)
    return policy.fitted, evaluated(policy, test, parts[2], router)


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
