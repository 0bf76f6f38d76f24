"""Precisions as definitions name them: one version for all experts, or two that are mixed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from host_offload.control.rules import BETWEEN_LAYERS, check_policies
from host_offload.policies.precision.dynaexq import DynaExq
from host_offload.policies.precision.maps import count_selections, mean_selections
from host_offload.policies.precision.precision_names import (
    MIXED_SETTINGS,
    Precision,
    precision_of,
)
from host_offload.traces.reader import Trace
from moejax.errors import UserError, user_errors
from moejax.evaluate.experiments.policy_file import (
    digests_of,
    file_digest,
    find_class,
    load_module,
    make_policy,
)

VERSION_WRITES = ("transitions", "fill_version")
"""Decisions that change which version an expert has."""


@dataclasses.dataclass(frozen=True)
class Mix:
    """A precision of a grid."""

    name: str
    precision: Precision
    """The precision. Until it has learned, it has as many high experts as afterwards, drawn at
    random."""
    learns: str | None = None
    """What it learns from a trace of the texts' training part: `map` or `scores`."""
    files: tuple[tuple[str, str], ...] = ()
    """Files that it was read from, with their SHA-256."""

    @property
    def needs_host(self) -> bool:
        """Whether its policy looks between layers."""
        return any(policy.moments & BETWEEN_LAYERS for policy in self.precision.policies)

    def teach(self, trace: Trace) -> Mix:
        """Returns this precision with what `trace` teaches. Raises UserError for a trace that
        cannot be used."""
        if self.learns is None:
            return self
        found = self.precision
        with user_errors(where=f"precision {self.name!r}: "):
            if self.learns == "map":
                hot = count_selections(trace)
                found = dataclasses.replace(found, name="map", seed=None, hot=hot)
            else:
                assert isinstance(found.policy, DynaExq)
                scores = mean_selections(trace, found.policy.interval)
                policy = dataclasses.replace(found.policy, scores=scores)
                found = dataclasses.replace(found, policy=policy)
        return dataclasses.replace(self, precision=found, learns=None)


def read_mix(text: str, home: Path) -> Mix:
    """Returns the precision that `text` names, as --precision takes it. With map=train, those
    experts are high that the texts' training part selects most; dynaexq takes scores=train. A
    policy of one's own is FILE.py:CLASS, with its settings and those of a mix (hi, lo, spares …).

    - `home`: where relative files are.

    Raises UserError for other text.
    """
    where, learns, files = f"precision {text!r}: ", None, []
    if text.partition(",")[0].rpartition(":")[0].endswith(".py"):
        return _read_own(text, home, where)

    def find(match: re.Match[str]) -> str:
        files.append((home / match[2]).resolve())
        return f"{match[1]}={files[-1]}"

    asked = re.sub(r"^map=train\b", "random,seed=0", text)
    asked = re.sub(r",scores=train\b", "", asked)
    if asked != text:
        learns = "map" if text.startswith("map") else "scores"
    with user_errors(where=where):
        found = precision_of(re.sub(r"\b(map|scores)=([^,]+)", find, asked))
    if found.mixed and not found.paged and found.hi_share is not None:
        raise UserError(
            f"{where}hi_share and a grid's budgets both say how many experts are high; leave "
            "hi_share out"
        )
    return Mix(text, found, learns, tuple((str(path), file_digest(path)) for path in files))


def _read_own(text: str, home: Path, where: str) -> Mix:
    """Returns the precision of a policy in a file of the user."""
    name, *pairs = text.split(",")
    place, _, class_name = name.rpartition(":")
    ours = [pair for pair in pairs if pair.partition("=")[0] in MIXED_SETTINGS]
    module = load_module((home / place).resolve(), where)
    made = find_class(module, class_name, where)
    with user_errors(where=where):
        mixed = precision_of(",".join(["random", *ours]))
    own = ",".join(pair for pair in pairs if pair not in ours)
    policy, reads = make_policy(name, own, made, where, lambda settings: made(**settings))
    with user_errors(where=where):
        check_policies((policy,), "host")
        if policy.writes.isdisjoint(VERSION_WRITES):
            raise UserError(
                f"{class_name} writes neither of {' and '.join(VERSION_WRITES)}, so that no "
                "version would change; name it under policies"
            )
    spares = mixed.spares if mixed.paged else mixed.spares or 1
    precision = dataclasses.replace(mixed, name=name, seed=None, policy=policy, spares=spares)
    return Mix(text, precision, files=tuple(digests_of(module, reads).items()))
