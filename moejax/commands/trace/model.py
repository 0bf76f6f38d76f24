"""--model of the trace commands: which model a trace has to be of."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from moejax.commands.model import add_options
from moejax.errors import UserError

if TYPE_CHECKING:
    from host_offload.traces.reader import TraceHeader
    from moejax.models.model_config import ModelConfig


def add_model(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--model", metavar="PATH", help=f"{text}: a checkpoint or a config.json")
    add_options(parser, "checkpoint")


def model_config(args: argparse.Namespace) -> ModelConfig | None:
    """The configuration of --model; None without it."""
    if args.model is None:
        return None
    from moejax.start.report.info import read_headers

    return read_headers(args.model, args.step, args.name_map)[0]


def check_model(directory: str, header: TraceHeader, config: ModelConfig | None) -> None:
    """Raises UserError for a trace of another model."""
    if config is None:
        return
    from moejax.models.model_config import config_digest

    found = header.layers, header.experts, header.top_k
    wanted = sum(config.moe_layers), config.num_experts, config.num_experts_per_tok
    if found != wanted:
        raise UserError(
            f"{directory} is of another model: it has {found[0]} MoE layers of {found[1]} experts, "
            f"top-{found[2]}; the model has {wanted[0]} of {wanted[1]}, top-{wanted[2]}"
        )
    if header.config_digest and header.config_digest != config_digest(config):
        raise UserError(
            f"{directory} is of another model: its configuration's digest is "
            f"{header.config_digest[:12]}…, the model's {config_digest(config)[:12]}…"
        )
