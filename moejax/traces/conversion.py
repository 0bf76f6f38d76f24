"""Makes a trace of routing that another program recorded.

It writes only what the dump says; the header's `absent` names the rest. If the dump does not say
which tokens were computed together, a rule that the header names joins them into steps.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.traces.reader import KINDS, Trace, read_trace
from moejax.checkpoints.random_model import expert_layout
from moejax.errors import UserError
from moejax.models.model_config import ModelConfig, config_digest
from moejax.traces.dumps import RoutedDump, read_dump
from moejax.traces.generated_traces import new_trace, routed_step, routing_header


def convert_trace(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    config: ModelConfig | None = None,
    experts: int | None = None,
    layers: int | None = None,
    top_k: int | None = None,
    dense_layers: int = 0,
    batch: int | None = None,
    prompt_tokens: int | None = None,
) -> Trace:
    """Writes the trace `destination` from the dump `source` (moejax.traces.dumps), and opens it.

    - `config`: the model. Otherwise `experts`: routed experts of a layer, which ids alone do not
      say.
    - `layers`, `top_k`: shape of ids that come without one, dense layers included.
    - `dense_layers`: first layers of the dump that are no MoE layers. A config knows them, and
      layers whose ids are all −1 are left out anyway.
    - `batch`: requests that a step computes together, for a dump without steps; None: 1.
    - `prompt_tokens`: first tokens of each request that are prompt, if the dump does not say.

    Raises UserError for a dump that is damaged or of another model, and a destination that is not
    new; then nothing is written.
    """
    size = experts if config is None else config.num_experts
    if size is None or (config is not None and experts is not None):
        raise UserError("give the model, or its number of routed experts, to convert; not both")
    if (batch is not None and batch < 1) or min(dense_layers, prompt_tokens or 0) < 0:
        raise UserError("batch is at least 1, dense_layers and prompt_tokens at least 0")
    origin: dict[str, Any] = {"source": Path(source).name}
    if config is not None:
        origin["config_digest"] = config_digest(config)
        origin["version_bytes"] = {"dense": expert_layout(config).nbytes}
        layers = layers or config.num_hidden_layers
        top_k = top_k or config.num_experts_per_tok
    dump = read_dump(source, layers, top_k)
    recorded = dump.step is not None
    if recorded and (batch is not None or prompt_tokens is not None):
        raise UserError(f"{source} has steps of its own; batch and prompt_tokens are for others")
    if dump.phase is not None and prompt_tokens is not None:
        raise UserError(f"{source} says itself which tokens are prompt; leave out prompt_tokens")
    dump, users = _number_names(_routing_alone(dump, config, dense_layers, size))
    if not recorded:
        dump = _by_request(dump, prompt_tokens)
    fields = ("weights", "request", "position", "phase")
    present = {name for name in fields if getattr(dump, name) is not None}
    present |= {"kind"} if "phase" in present else set()
    origin["steps"] = "recorded" if recorded else f"put together of {batch or 1} requests"
    origin["user_names"] = users
    _, moe_layers, taken = dump.ids.shape
    header = routing_header(moe_layers, size, taken, present, origin)
    steps = _recorded_steps(dump) if recorded else enumerate(_joined_steps(dump, batch or 1))
    with new_trace(destination, header) as writer:
        for number, rows in steps:
            arrays = {n: v[rows] for n, v in vars(dump).items() if isinstance(v, np.ndarray)}
            arrays.pop("step", None)
            kind = KINDS[bool(arrays["phase"].all())] if "phase" in arrays else None
            writer.append(routed_step(number, arrays.pop("ids"), kind=kind, **arrays))
    return read_trace(destination)


def _routing_alone(
    dump: RoutedDump, config: ModelConfig | None, dense_layers: int, experts: int
) -> RoutedDump:
    """Returns the dump with only its MoE layers and taken places, ids ascending and weights in
    their order. Raises UserError for arrays that are no routing of the model."""
    taken = dump.ids >= 0
    layers = [i for i in range(dense_layers, dump.ids.shape[1]) if taken[:, i].any()]
    k = int(taken.any(axis=(0, 1)).sum())
    if config is not None:
        sparse = [i for i, moe in enumerate(config.moe_layers) if moe]
        if dump.ids.shape[1] == len(config.moe_layers):
            layers = sparse
        if len(layers) != len(sparse) or k != config.num_experts_per_tok:
            raise UserError(
                f"{dump.where}: routing of {len(layers)} layers, top-{k}; the model has "
                f"{len(sparse)} MoE layers, top-{config.num_experts_per_tok}: it is another one"
            )
    if not layers:
        raise UserError(f"{dump.where}: no layer has an expert; every id is negative")
    ids = dump.ids[:, layers, :k]
    order = np.argsort(ids, axis=-1, kind="stable")
    ids = np.take_along_axis(ids, order, axis=-1)
    for bad, what in (
        (ids < 0, "has no expert in some place (−1)"),
        (ids >= experts, f"names an expert beyond the model's {experts}: it is another model"),
        (
            np.pad(ids[..., 1:] == ids[..., :-1], ((0, 0), (0, 0), (0, 1))),
            "names an expert twice; a dense layer or a token that was not computed looks so "
            "(--dense-layers leaves first layers out)",
        ),
    ):
        if bad.any():
            token, layer = np.argwhere(bad)[0][:2]
            raise UserError(f"{dump.where}: token {token}, layer {layers[layer]} {what}")
    weights = dump.weights
    if weights is not None:
        weights = np.take_along_axis(weights[:, layers, :k], order, axis=-1).astype(np.float32)
    if dump.phase is not None and not np.isin(dump.phase, (0, 1)).all():
        raise UserError(f"{dump.where}: phase is 0 (prompt) or 1 (generated)")
    if dump.step is not None and (np.diff(dump.step.astype(np.int64)) < 0).any():
        raise UserError(f"{dump.where}: steps go back; sort the tokens by step")
    return dataclasses.replace(dump, ids=ids, weights=weights)


def _number_names(dump: RoutedDump) -> tuple[RoutedDump, dict[str, int]]:
    """Returns the dump with requests and users as int32 numbers, in order of appearance, and the
    users' names."""

    def numbers(found: np.ndarray | None, known: dict[str, int]) -> np.ndarray | None:
        if found is None:
            return None
        each = (known.setdefault(str(x), len(known)) if str(x) else -1 for x in found)
        return np.fromiter(each, np.int32, len(found))

    users: dict[str, int] = {}
    user, request = numbers(dump.user, users), numbers(dump.request, {})
    return dataclasses.replace(dump, request=request, user=user), users


def _by_request(dump: RoutedDump, prompt_tokens: int | None) -> RoutedDump:
    """Returns a dump without steps with requests, positions and, if known, phases."""
    n = len(dump.ids)
    request = np.zeros(n, np.int32) if dump.request is None else dump.request
    starts = np.flatnonzero(np.diff(request, prepend=-1))
    if len(starts) > request.max() + 1:
        raise UserError(f"{dump.where}: a request's tokens are apart; sort them by request")
    place = np.arange(n) - np.repeat(starts, np.diff(starts, append=n))
    phase = dump.phase
    if phase is None and prompt_tokens is not None:
        phase = (place >= prompt_tokens).astype(np.uint8)
    if phase is not None and (np.diff(phase.astype(int)) < 0)[np.diff(request) == 0].any():
        raise UserError(f"{dump.where}: a request has prompt tokens after generated ones")
    position = place if dump.position is None else dump.position
    return dataclasses.replace(dump, request=request, position=position, phase=phase)


def _recorded_steps(dump: RoutedDump) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (number, rows) of the dump's own steps. A step is a prefill if it has any token of a
    prompt."""
    assert dump.step is not None
    starts = np.flatnonzero(np.diff(dump.step)) + 1
    for rows in np.split(np.arange(len(dump.ids)), starts):
        yield int(dump.step[rows[0]]), rows


def _joined_steps(dump: RoutedDump, batch: int) -> Iterator[np.ndarray]:
    """Yields the rows of steps of `batch` requests in the order of the dump: all prompts at once,
    then the next token of each request that has one. Without phases every token counts as a next
    token."""
    assert dump.request is not None
    generated = np.ones(len(dump.ids), bool) if dump.phase is None else dump.phase == 1
    rows = np.split(np.arange(len(dump.ids)), np.flatnonzero(np.diff(dump.request)) + 1)
    for first in range(0, len(rows), batch):
        group = rows[first : first + batch]
        prompts = np.concatenate([each[~generated[each]] for each in group])
        if len(prompts):
            yield prompts
        rest = [each[generated[each]] for each in group]
        for i in range(max(map(len, rest))):
            yield np.asarray([each[i] for each in rest if i < len(each)])
