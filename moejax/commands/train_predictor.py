"""``moejax train-predictor`` fits a prefetch policy to a trace and writes it to a file."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import TYPE_CHECKING

from moejax.commands import add_command
from moejax.errors import UserError, user_errors
from moejax.progress import count_progress
from pallas_kernels.option_text import parse_option

if TYPE_CHECKING:
    import numpy as np

_EPILOG = """\
NAME is a prefetch that learns: learned (PreScope's LLaPor, the default), promoe, expertflow,
coactivation, moe-infinity, expert_map. Its settings are those of its fit
(docs/explanation/policies.md): learned has stride, width, epochs, patience, edge, seed; promoe
stride, hidden, rate, dropout, batch, epochs, seed; expertflow, which needs --model and pip install
'moejax[train]', reach, trees, leaves, seed. learned, promoe and expertflow learn from the routers'
inputs: record the trace with --trace DIR,arrays=gate_input.

examples:
  moejax generate --input prompts.jsonl --output out.jsonl --trace run1,arrays=gate_input
  moejax train-predictor run1 learned.safetensors
  moejax generate "The old house" --driver host --expert-budget 40% \\
      --prefetch learned=learned.safetensors
  moejax train-predictor run1 forest.safetensors --predictor expertflow,trees=10 --model demo
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    train = add_command(
        commands,
        "train-predictor",
        _run,
        "fit a prefetch to a trace, for --prefetch NAME=FILE",
        _EPILOG,
        "Fit a prefetch that learns, such as PreScope's predictor (LLaPor), to a trace, and keep\n"
        "what it learned in a file.",
    )
    train.add_argument("trace", metavar="TRACE", help="what it learns from")
    train.add_argument("out", metavar="OUT", help="the file")
    train.add_argument(
        "--predictor",
        metavar="NAME[,KEY=VALUE…]",
        default="learned",
        help="which prefetch, and its settings (default: learned)",
    )
    train.add_argument(
        "--model", metavar="MODEL", help="the trace's model, where its routers are learned from"
    )
    train.add_argument("--quiet", action="store_true", help="no progress")


def _run(args: argparse.Namespace) -> int:
    from host_offload.policies.prefetch.prefetch_names import PREFETCH
    from host_offload.policies.registry import setting_readers
    from host_offload.traces.reader import read_trace

    fits = PREFETCH.fits
    settings = {name: setting_readers(fit) for name, fit in fits.items()}
    with user_errors(ValueError):
        name, _, given = parse_option("predictor", args.predictor, settings)
        if not Path(args.out).absolute().parent.is_dir():  # before minutes of training
            raise UserError(f"{args.out} cannot be written: its folder does not exist")
        trace, takes = read_trace(args.trace), inspect.signature(fits[name]).parameters
        if "router" in takes:
            if args.model is None:
                raise UserError(f"{name} learns from the model's routers: name it with --model")
            given["router"] = routers_of(args.model, trace.header.config_digest)
        with count_progress("training", None, 0, "report" in takes and not args.quiet) as bar:
            if "report" in takes:
                given["report"] = lambda layer, layers, text: bar(
                    layer, layers, f"layer {layer}, {text}"
                )
            policy = fits[name](trace, **given)
    try:
        policy.fitted.write(args.out)
    except OSError as error:
        raise UserError(f"{args.out} cannot be written ({error.strerror})") from error
    print(f"{args.out}: {policy.fitted.nbytes / 2**20:.1f} MiB; --prefetch {name}={args.out}")
    return 0


def routers_of(model: str, digest: str) -> np.ndarray:
    """Loads the weights of a model's routers.

    - `digest`: the digest of the trace's model.

    Raises UserError for another model.
    """
    import jax

    from moejax.checkpoints.load import load_checkpoint
    from moejax.models.hub import model_directory
    from moejax.models.model_config import config_digest
    from moejax.start.build import router_weights

    jax.config.update("jax_platforms", "cpu")  # the routers need no GPU
    loaded = load_checkpoint(model_directory(model), "auto", jax.devices("cpu")[0])
    found = config_digest(loaded.config)
    if found != digest:
        raise UserError(
            f"the trace is of another model: its configuration's digest is {digest[:12]}…, that "
            f"of {model} {found[:12]}…"
        )
    return router_weights(loaded)
