"""Options of every command that opens a checkpoint."""

from __future__ import annotations

import argparse


def add_checkpoint_options(group: argparse._ActionsContainer) -> None:
    """--step and --name-map, as of moejax.checkpoints.load.load_checkpoint."""
    group.add_argument(
        "--step",
        type=lambda text: int(text) if text.isdigit() else text,
        metavar="STEP",
        help="of an Orbax checkpoint with steps: latest, best, best:METRIC:min or a number "
        "(default: latest)",
    )
    group.add_argument(
        "--name-map",
        metavar="MAP",
        help="which leaf of an Orbax checkpoint is which tensor: a .yaml or .json file, or the "
        "name of a shipped map (docs/checkpoints.md)",
    )
