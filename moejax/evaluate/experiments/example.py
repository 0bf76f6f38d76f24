"""An example grid to begin with, and a policy of the user's own for it."""

from __future__ import annotations

from pathlib import Path

from moejax.errors import UserError

GRID = """\
# What is compared: moejax ablate grid.yaml (docs/reference/grids.md has all keys).
policies:                  # yours beside published ones, the first is the baseline
- lru
- mixtral-offloading
- fate
- moe-infinity=train       # it learns from other prompts
- my_policy.py:MyPolicy
driver: host               # of all, since most of them act between layers
budgets: ["37.5%", "75%"]  # shares of the experts, or bytes such as 2MiB
link_rate: 500MB/s         # experts come over a link of this rate
texts: [story, code]       # in the package, or paths of your own
prompt_tokens: 128
output_tokens: 32
batch: 1
modes: [measured, simulated]
"""

POLICY = '''\
"""A policy of my own: docs/extending/write_a_policy.md says what it may see and do."""

import dataclasses

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec, Stage


@dataclasses.dataclass(frozen=True)
class MyPolicy:
    """Wants every expert resident that one of the last `window` steps used."""

    window: int = 4

    moments: frozenset[Moment] = frozenset({Moment.STEP_END})
    needs: frozenset[str] = frozenset({"counts"})
    writes: frozenset[str] = frozenset({"stages"})

    def init(self, spec: Spec) -> tuple[np.ndarray, ...]:
        return ()

    def decide(self, state, observation: Observation):
        state = (*state, observation.counts)[-self.window :]
        total = np.sum(state, axis=0)  # [layers, experts]: rows routed to each
        layer, expert = np.nonzero(total)
        order = np.argsort(-total[layer, expert], kind="stable")
        wanted = tuple(Stage(int(layer[i]), int(expert[i]), cause="mine") for i in order)
        return state, Decision(stages=wanted)
'''


def write_example(directory: Path) -> tuple[Path, Path]:
    """Writes grid.yaml and my_policy.py into a directory; returns their paths. Raises UserError if
    one of them exists already or cannot be written."""
    paths = directory / "grid.yaml", directory / "my_policy.py"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, (GRID, POLICY), strict=True):
            with open(path, "x") as file:
                file.write(text)
    except FileExistsError as error:
        raise UserError(f"{error.filename} is there already; choose another --new") from None
    except OSError as error:
        raise UserError(f"{directory} cannot be written: {error.strerror}") from None
    return paths
