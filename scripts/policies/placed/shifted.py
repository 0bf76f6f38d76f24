"""Whether networks that go on learning predict better where the text has changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from host_offload.policies.prefetch.llapor.metrics import quality
from host_offload.policies.prefetch.llapor.network import of_layer, scores
from host_offload.policies.prefetch.llapor.online import Seen, Tuner, Tuning
from host_offload.policies.prefetch.llapor.policy import Learned
from host_offload.policies.prefetch.llapor.training import samples
from host_offload.traces.reader import Trace
from moejax.errors import UserError

PARTS = 4
"""How many parts of a trace's steps, in their order, are looked at."""


def recalls(policy: Learned, trace: Trace, tuning: Tuning) -> Iterator[dict[str, Any]]:
    """A line for each part of the trace's steps: recall of the file's networks, and of those that
    learned from all steps before in rounds that take no time, the best that a run could have; mean
    over the layers. Raises UserError for a trace of another model."""
    header, fitted = trace.header, policy.fitted
    if header.config_digest != fitted.config_digest or not header.gate_input:
        raise UserError(
            f"{trace.directory} is of another model than the networks, or has no gate inputs "
            "(--trace-arrays gate_input)"
        )
    stride, layers = int(fitted.setting("stride")), header.layers
    found = [samples(trace, layer, stride) for layer in range(layers - stride)]
    last = [samples(trace, layer, 0) for layer in range(layers - stride, layers)]
    tuner = Tuner(fitted.arrays, stride, tuning)
    said: dict[str, list[list[np.ndarray]]] = {"frozen": [], "learning": []}
    for step in range(trace.steps):
        tuner.wait()
        tuner.swap()
        here = [some.of(some.step == step) for some in (*found, *last)]
        for name, arrays in (("frozen", fitted.arrays), ("learning", tuner.arrays)):
            said[name].append([_said(arrays, layer, here[layer]) for layer in range(len(found))])
        for layer, some in enumerate(here):
            tuner.see(layer, layers, Seen(some.gate_input, some.ids, some.weights))
    for part, steps in enumerate(np.array_split(np.arange(trace.steps), PARTS)):
        line: dict[str, Any] = {"part": part + 1, "steps": len(steps)}
        for name, of_steps in said.items():
            each = []
            for layer, some in enumerate(found):
                rows = some.of(np.isin(some.step, steps))
                best = np.concatenate([of_steps[step][layer] for step in steps])
                each.append(quality(best, rows.later, rows.step).recall)
            line[name] = float(np.mean(each))
        line["rows"] = len(rows.step)
        yield line


def _said(arrays: Mapping[str, np.ndarray], layer: int, some: Any) -> np.ndarray:
    return scores(of_layer(arrays, layer), some.gate_input, some.ids, some.weights)
