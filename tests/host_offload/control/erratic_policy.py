"""A policy whose decisions change with every byte that it observes: two runs that decide alike have
seen alike."""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np

from host_offload.control.interface import NEEDS, Decision, Moment, Observation, Spec, Stage

STEP_MOMENTS = frozenset({Moment.STEP_BEGIN, Moment.STEP_END, Moment.INTERVAL, Moment.TURN_END})


@dataclasses.dataclass(frozen=True)
class Erratic:
    """Sees all that a trace without optional arrays has, and writes all but budgets."""

    moments: frozenset[Moment] = STEP_MOMENTS
    needs: frozenset[str] = NEEDS - {
        *("probs", "gate_input", "embedding", "token", "draft_token", "draft_ids"),
        *("costs", "router"),
    }
    writes: frozenset[str] = frozenset(
        {"victim_weights", "prior", "fill_version", "stages", "pause_stages"}
    )
    interval: str = "3 steps"

    def init(self, spec: Spec) -> tuple[int, int, int, int]:
        """(layers, experts, versions, checksum of what was seen)."""
        return spec.layers, spec.experts, len(spec.version_bytes), 0

    def decide(self, state: tuple[int, int, int, int], observation: Observation):
        layers, experts, versions, seen = state
        for field in dataclasses.fields(Observation):
            value = getattr(observation, field.name)
            if field.name != "seconds":  # the difference of two clocks may round otherwise
                data = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
                seen = zlib.crc32(data, seen)
        rng = np.random.default_rng(seen)
        shape = layers, experts
        choices = {
            "victim_weights": lambda: rng.integers(-3, 4, 3),
            "prior": lambda: rng.integers(-99, 100, shape),
            "fill_version": lambda: rng.choice([-1, *range(versions)], shape, p=_mostly(versions)),
            "pause_stages": lambda: bool(rng.random() < 0.2),
            "stages": lambda: tuple(
                Stage(int(place // experts), int(place % experts), int(rng.integers(versions)))
                for place in rng.permutation(layers * experts)[: rng.integers(20)]
            ),
        }
        decided = {name: make() for name, make in choices.items() if rng.random() < 0.3}
        return (layers, experts, versions, seen), Decision(**decided)


def _mostly(versions: int) -> list[float]:
    return [0.2, *[0.8 / versions] * versions]
