"""``moejax verify`` checks that a checkpoint computes here what its authors meant."""

from __future__ import annotations

import argparse
import json

from moejax.commands import add_command, print_table, say
from moejax.commands.model import (
    add_described,
    add_model,
    add_model_options,
    engine_options,
    start_llm,
)
from moejax.errors import UserError
from moejax.start.fields import Description

_DESCRIPTION = """\
Checks that a checkpoint computes on this machine what its authors meant:

tokenizer     texts, special tokens and the chat template, there and back
layers        the engine's hidden states and logits, in prefill and decode, against plain float32
              arithmetic on the files' weights, one layer in memory at a time
text          whether the model expects a text more than its tokens in another order
transformers  the float32 reference against transformers, over the layers that fit into memory,
              where torch is installed

Exit status 1 where something is wrong.
"""

_EPILOG = """\
examples:
  moejax verify demo
  moejax verify /models/Qwen3-30B-A3B --expert-budget 25%
      with the options of the run that is meant
"""

_OPTIONS = {
    "text": Description("a text in the model's language (default: English)", metavar="FILE"),
    "tokens": Description("how many tokens of the text (default: 64)", type=int, default=64),
}


def add_parser(commands: argparse._SubParsersAction) -> None:
    text = "check that a model computes what its authors meant"
    verify = add_command(commands, "verify", _run, text, _EPILOG, _DESCRIPTION)
    add_model(verify)
    add_described(verify, _OPTIONS)
    verify.add_argument("--json", action="store_true", help="one JSON object")
    verify.add_argument("-q", "--quiet", action="store_true", help="no progress")
    add_model_options(verify, without=("trace", "step", "name_map"))


def _run(args: argparse.Namespace) -> int:
    if args.tokens < 2:
        raise UserError(f"--tokens must be at least 2, got {args.tokens}")
    options = engine_options(args)
    if options.get("trace") is not None:
        raise UserError("verify records a trace of its own; leave out `trace`")

    from moejax.evaluate.verification.model import free_text, require_files, verify
    from moejax.models.config import load_config
    from moejax.models.directory import checkpoint_directory
    from moejax.models.hub import model_directory
    from moejax.progress import count_progress

    text = free_text(args.text)
    directory = require_files(checkpoint_directory(model_directory(args.model)))
    layers, quiet = load_config(directory).num_hidden_layers, args.quiet or args.json
    with count_progress("layers", layers, 0, not quiet) as report:
        found = verify(
            lambda **given: start_llm(args, options | given), directory, text, args.tokens, report
        )
        checks = list(found)
    wrong = [check for check in checks if check.good is False]
    if args.json:
        lines = [check._asdict() for check in checks]
        print(json.dumps({"model": args.model, "right": not wrong, "checks": lines}, indent=2))
    else:
        rows = ((check.name, check.verdict, check.said) for check in checks)
        print_table(("check", "result", "what was found"), rows)
    if wrong:
        say(f"{args.model}: {len(wrong)} of {len(checks)} checks found something wrong")
    return 1 if wrong else 0
