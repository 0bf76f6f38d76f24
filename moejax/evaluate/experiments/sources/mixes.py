"""Precisions as definitions name them: one version for all experts, or two that are mixed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.interface import routed_counts
from host_offload.policies.precision.precision_names import Precision, precision_of
from host_offload.traces.reader import Trace
from moejax.errors import UserError, user_errors
from moejax.evaluate.experiments.sources.named import named
from pallas_kernels.records.format import VERSIONS

TRAIN = "train"


@dataclasses.dataclass(frozen=True)
class Mix:
    """A precision of a grid."""

    name: str
    precision: Precision
    """What it is; until it has learned, one with as many high experts as then, drawn."""
    learns: frozenset[str] = frozenset()
    """What a trace of the texts' training part says: `map`, `scores`."""
    files: tuple[Path, ...] = ()

    def taught(self, trace: Trace) -> Mix:
        """This precision with what `trace` teaches. Raises UserError for a trace of no use."""
        if not self.learns:
            return self
        counts = np.zeros((trace.header.layers, trace.header.experts))
        for step in trace.step_traces():
            counts += routed_counts(step.ids, trace.header.experts)
        found = self.precision
        with user_errors(where=f"precision {self.name!r}: "):
            if "map" in self.learns:
                found = dataclasses.replace(
                    found, name="map", seed=None, hot=counts, hot_per_layer=True
                )
            else:
                assert found.policy is not None
                policy = dataclasses.replace(found.policy, scores=counts)
                found = dataclasses.replace(found, policy=policy)
        return dataclasses.replace(self, precision=found, learns=frozenset())


def mix_of(text: str, home: Path) -> Mix:
    """The precision that `text` names, as `--precision` takes it, with settings in parentheses:
    `int8`, `dynaexq(hi="dense", lo="int4", interval="2048 tokens")`, `map=FILE`, `random(seed=1)`;
    map=train has those high that the texts' training part selects most, and dynaexq takes
    scores="train".

    home: where files that are not absolute are. Raises UserError for what is none of these.
    """
    where = f"precision {text!r}"
    name, settings = named(text, where)
    name, _, source = name.partition("=")
    files, learns = [], set()
    if source == TRAIN:
        learns = {"map"}
        name, source = "random", ""
        settings |= {"seed": 0}
    for key in ("scores", "weights"):
        if key in settings:
            value = settings.pop(key)
            if value == TRAIN and key == "scores":
                learns.add(key)
            else:
                settings[key] = str(_file(files, home, value))
    if source:
        source = str(_file(files, home, source))
    written = {k: str(v).lower() if isinstance(v, bool) else v for k, v in settings.items()}
    asked = [f"{name}={source}" if source else name, *(f"{k}={v}" for k, v in written.items())]
    with user_errors(where=f"{where}: "):
        found = precision_of(",".join(asked))
    if found.mixed and not found.paged and found.hi_share is not None:
        raise UserError(
            f"{where}: hi_share and a grid's budgets both say how many experts are high; leave "
            "hi_share out"
        )
    return Mix(text, found, frozenset(learns), tuple(files))


def _file(files: list[Path], home: Path, given: Any) -> Path:
    path = (home / str(given)).resolve()
    files.append(path)
    return path


def is_version(budget: str) -> bool:
    """Whether a budget is what all experts take in a version."""
    return budget in VERSIONS
