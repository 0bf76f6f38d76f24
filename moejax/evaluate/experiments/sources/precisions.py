"""Precisions as definitions name them: one version for all experts, or two that are mixed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from host_offload.policies.precision.maps import count_selections, mean_selections
from host_offload.policies.precision.precision_names import Precision, precision_of
from host_offload.traces.reader import Trace
from moejax.errors import UserError, user_errors
from moejax.evaluate.experiments.arms import TRAIN, parse_named


@dataclasses.dataclass(frozen=True)
class Mix:
    """A precision of a grid."""

    name: str
    precision: Precision
    """What it is; until it has learned, one with as many high experts as then, drawn."""
    learns: str | None = None
    """What a trace of the texts' training part says: `map` or `scores`."""
    files: tuple[Path, ...] = ()

    def teach(self, trace: Trace) -> Mix:
        """This precision with what `trace` teaches. Raises UserError for a trace of no use."""
        if self.learns is None:
            return self
        found = self.precision
        with user_errors(where=f"precision {self.name!r}: "):
            if self.learns == "map":
                hot = count_selections(trace)
                found = dataclasses.replace(found, name="map", seed=None, hot=hot)
            else:
                assert found.policy is not None
                scores = mean_selections(trace, found.policy.interval)
                policy = dataclasses.replace(found.policy, scores=scores)
                found = dataclasses.replace(found, policy=policy)
        return dataclasses.replace(self, precision=found, learns=None)


def read_mix(text: str, home: Path) -> Mix:
    """The precision that `text` names, as `--precision` takes it, with settings in parentheses:
    `int8`, `dynaexq(hi="dense", lo="int4", interval="2048 tokens")`, `map=FILE`, `random(seed=1)`;
    map=train has those high that the texts' training part selects most, and dynaexq takes
    scores="train".

    home: where files that are not absolute are. Raises UserError for what is none of these.
    """
    where = f"precision {text!r}"
    name, settings = parse_named(text, where)
    name, _, source = name.partition("=")
    files, learns, pairs = [], None, []
    if source == TRAIN:
        learns, name, source, settings = "map", "random", "", {**settings, "seed": 0}
    for key, value in ({name: source, **settings} if source else settings).items():
        if (key, value) == ("scores", TRAIN):
            learns = key
            continue
        if key in ("map", "scores"):
            files.append((home / str(value)).resolve())
            value = files[-1]
        pairs.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    with user_errors(where=f"{where}: "):
        found = precision_of(",".join(pairs if source else [name, *pairs]))
    if found.mixed and not found.paged and found.hi_share is not None:
        raise UserError(
            f"{where}: hi_share and a grid's budgets both say how many experts are high; leave "
            "hi_share out"
        )
    return Mix(text, found, learns, tuple(files))
