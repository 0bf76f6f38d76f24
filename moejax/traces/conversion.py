"""Makes a trace of routing that another program recorded.

Only what the dump says is written; the rest is named in the header's `absent`. Where the dump does
not say which tokens were computed together, steps are put together by a rule that the header names.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.step_record import StepRecord
from host_offload.traces.reader import KINDS, Trace, read_trace
from moejax.checkpoints.random_model import expert_layout
from moejax.errors import UserError
from moejax.models.model_config import ModelConfig, config_digest
from moejax.traces.dumps import PER_TOKEN, RoutedBlock, read_dump
from moejax.traces.generated_traces import new_trace, routed_step, routing_header

MIXED = "recorded routing of different shapes or with different things known"


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

    config: the model; or experts, the routed experts of a layer, since ids alone do not say.
    layers, top_k: shape of ids that come without one, dense layers included. dense_layers: first
    layers of the dump that are no MoE layers (known with a config; layers whose ids are all −1 are
    left out anyway). batch: requests that a step computes together, where the dump has no steps;
    None: 1.
    prompt_tokens: first tokens of each request that are prompt, where the dump does not say.
    Raises UserError for a dump that is damaged or of another model, and a destination that is not
    new; then nothing is there.
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
    blocks = read_dump(source, layers, top_k)
    first = next(blocks, None)
    if first is None:
        raise UserError(f"{source} has no routing: it is empty")
    moe_layers, k = _kept(first, config, dense_layers)
    known = _known(first, prompt_tokens)
    recorded = first.step is not None
    if recorded and (batch is not None or prompt_tokens is not None):
        raise UserError(f"{source} has steps of its own; batch and prompt_tokens are for others")
    if first.phase is not None and prompt_tokens is not None:
        raise UserError(f"{source} says itself which tokens are prompt; leave out prompt_tokens")
    users: dict[str, int] = {}
    requests: dict[str, int] = {}

    def clean() -> Iterator[RoutedBlock]:
        for block in itertools.chain([first], blocks):
            if _known(block, prompt_tokens) != known or (block.step is not None) != recorded:
                raise UserError(f"{block.where}: {MIXED} than {first.where}; convert them apart")
            yield _numbered(_checked(block, moe_layers, k, size), requests, users)

    present = known | ({"kind"} if "phase" in known else set())
    origin["steps"] = "recorded" if recorded else f"put together of {batch or 1} requests"
    # The dictionary fills while steps are written; the header is written again at the end.
    origin["user_names"] = users
    header = routing_header(len(moe_layers), size, k, present, origin)
    steps = _recorded(clean()) if recorded else _together(clean(), batch or 1, prompt_tokens)
    with new_trace(destination, header) as writer:
        for step in steps:
            writer.append(step)
    return read_trace(destination)


def _kept(
    block: RoutedBlock, config: ModelConfig | None, dense_layers: int
) -> tuple[list[int], int]:
    """What of the first block's shape is routing: (numbers of those of the dump's layers that are
    MoE layers, places that are ever taken)."""
    ids = block.ids
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or not ids.size:
        raise UserError(
            f"{block.where}: ids must be whole numbers [tokens, layers, k], not "
            f"{ids.dtype}{list(ids.shape)}"
        )
    taken = ids >= 0
    layers = [i for i in range(dense_layers, ids.shape[1]) if taken[:, i].any()]
    places = int(taken.any(axis=(0, 1)).sum())
    if config is not None:
        sparse = [i for i, moe in enumerate(config.moe_layers) if moe]
        if ids.shape[1] == len(config.moe_layers):
            layers = sparse
        if len(layers) != len(sparse) or places != config.num_experts_per_tok:
            raise UserError(
                f"{block.where}: routing of {len(layers)} layers, top-{places}; the model has "
                f"{len(sparse)} MoE layers, top-{config.num_experts_per_tok}: it is another one"
            )
    if not layers:
        raise UserError(f"{block.where}: no layer has an expert; every id is negative")
    return layers, places


def _known(block: RoutedBlock, prompt_tokens: int | None) -> frozenset[str]:
    names = {n for n in ("weights", *PER_TOKEN) if getattr(block, n) is not None}
    if block.step is None:
        # A dump without steps is of whole requests, or of one.
        names |= {"request", "position"} | ({"phase"} if prompt_tokens is not None else set())
    return frozenset(names - {"step", "user"})


def _checked(block: RoutedBlock, layers: list[int], k: int, experts: int) -> RoutedBlock:
    """The block with ids ascending, weights in their order, and nothing but routing."""
    ids = block.ids
    if ids.ndim != 3 or ids.shape[1] <= layers[-1] or ids.shape[2] < k:
        raise UserError(f"{block.where}: {MIXED} than the lines before; convert them apart")
    if (ids[:, layers, k:] >= 0).any():
        raise UserError(f"{block.where}: more than {k} experts for a token")
    ids = ids[:, layers, :k]
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
            raise UserError(f"{block.where}: token {token}, layer {layers[layer]} {what}")
    weights = block.weights
    if weights is not None:
        if weights.shape != block.ids.shape or weights.dtype.kind != "f":
            raise UserError(
                f"{block.where}: weights must be numbers {list(block.ids.shape)} as ids are, not "
                f"{weights.dtype}{list(weights.shape)}"
            )
        weights = np.take_along_axis(weights[:, layers, :k], order, axis=-1)
        weights = weights.astype(np.float32)
    if block.phase is not None and not np.isin(block.phase, (0, 1)).all():
        raise UserError(f"{block.where}: phase is 0 (prompt) or 1 (generated)")
    if block.step is not None and (np.diff(block.step.astype(np.int64)) < 0).any():
        raise UserError(f"{block.where}: steps go back; sort the tokens by step")
    return dataclasses.replace(block, ids=ids, weights=weights)


def _numbered(block: RoutedBlock, requests: dict[str, int], users: dict[str, int]) -> RoutedBlock:
    """Requests and users as int32 numbers, by the order in which they come."""

    def numbers(found: np.ndarray | None, known: dict[str, int]) -> np.ndarray | None:
        if found is None:
            return None
        return np.asarray([known.setdefault(str(x), len(known)) for x in found], np.int32)

    user = numbers(block.user, users)
    return dataclasses.replace(block, request=numbers(block.request, requests), user=user)


def _recorded(blocks: Iterator[RoutedBlock]) -> Iterator[StepRecord]:
    """Steps as the dump has them. A step is a prefill if it has any token of a prompt."""
    for block in blocks:
        assert block.step is not None
        starts = np.flatnonzero(np.diff(block.step, prepend=block.step[0] - 1))
        for rows in np.split(np.arange(len(block.ids)), starts[1:]):
            yield _step(int(block.step[rows[0]]), [block.take(rows)])


def _together(
    blocks: Iterator[RoutedBlock], batch: int, prompt_tokens: int | None
) -> Iterator[StepRecord]:
    """Steps of `batch` requests in the order of the dump: their prompts at once, then the next
    token of each that has one. Without phases every token is such a next one."""
    requests = itertools.chain.from_iterable(_by_request(b, prompt_tokens) for b in blocks)
    number = 0
    while group := list(itertools.islice(requests, batch)):
        heads = [int((block.phase == 0).sum()) if block.phase is not None else 0 for block in group]
        if any(heads):
            prompts = zip(group, heads, strict=True)
            yield _step(number, [b.take(np.arange(n)) for b, n in prompts if n])
            number += 1
        for i in range(max(len(b.ids) - n for b, n in zip(group, heads, strict=True))):
            places = [(b, n + i) for b, n in zip(group, heads, strict=True)]
            yield _step(number, [b.take(np.asarray([at])) for b, at in places if at < len(b.ids)])
            number += 1


def _by_request(block: RoutedBlock, prompt_tokens: int | None) -> Iterator[RoutedBlock]:
    """The block's requests, each with numbers, positions and, where they can be known, phases."""
    n = len(block.ids)
    request = np.zeros(n, np.int32) if block.request is None else block.request
    starts = np.flatnonzero(np.diff(request)) + 1
    if len(starts) + 1 > len(np.unique(request)):
        raise UserError(f"{block.where}: a request's tokens are apart; sort them by request")
    for rows in np.split(np.arange(n), starts):
        part = dataclasses.replace(block, request=request).take(rows)
        if part.position is None:
            part = dataclasses.replace(part, position=np.arange(len(rows)))
        if part.phase is None and prompt_tokens is not None:
            part = dataclasses.replace(part, phase=np.arange(len(rows)) >= prompt_tokens)
        if part.phase is not None and (np.diff(part.phase.astype(int)) < 0).any():
            raise UserError(f"{block.where}: a request has prompt tokens after generated ones")
        yield part


def _step(number: int, blocks: list[RoutedBlock]) -> StepRecord:
    """A step of blocks that have the same things known."""
    fields: dict[str, Any] = {}
    for name in ("ids", "weights", "request", "position", "phase"):
        if getattr(blocks[0], name) is not None:
            fields[name] = np.concatenate([getattr(block, name) for block in blocks])
    # Some requests may have a user and others not.
    users = [np.full(len(b.ids), -1) if b.user is None else b.user for b in blocks]
    fields["user"] = np.concatenate(users)
    if "phase" in fields:
        fields["kind"] = KINDS[bool(fields["phase"].all())]
    return routed_step(number, fields.pop("ids"), **fields)
