"""Generated routing for the engine (forced) and for simulations (as a trace).

host_offload.traces.generators says how it arises and what it was fitted to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.step_record import StepRecord
from host_offload.traces.generators import RoutedTokens, routing_generator
from host_offload.traces.reader import KINDS as STEP_KINDS
from host_offload.traces.reader import Mark, TraceError, TraceHeader, TraceWriter, require_new
from host_offload.traces.schema import written_columns
from moejax.errors import UserError
from moejax.step.parts import Routing

PRESENT = ("request", "position", "phase", "ids", "weights", "kind")
"""What generated routing has of a trace's columns, besides those that every trace has."""


def forced_routing(
    tokens: RoutedTokens, experts: int, rows: int, places: np.ndarray | None = None
) -> Routing:
    """Routing to force on a step: Runner.decode(forced=) or Runner.prefill(forced=).

    rows: token rows of the step's executable (decode: of its bucket; prefill: chunks times chunk).
    places: int[n], in which row each token stands; None: the first n. Other rows are padding.
    Returns ids int32[L, rows, k] and weights float32[L, rows, k]. Raises UserError where they do
    not fit.
    """
    n, layers, k = tokens.ids.shape
    places = np.arange(n) if places is None else np.asarray(places)
    if places.shape != (n,) or len(np.unique(places)) < n or (n and places.max() >= rows):
        raise UserError(f"{n} routed tokens need {n} different places below {rows}")
    if n and tokens.ids.max() >= experts:
        raise UserError(f"routing names expert {tokens.ids.max()} of {experts}")
    ids = np.full((layers, rows, k), experts, np.int32)
    weights = np.zeros((layers, rows, k), np.float32)
    ids[:, places] = tokens.ids.swapaxes(0, 1)
    weights[:, places] = tokens.weights.swapaxes(0, 1)
    return Routing(ids, weights)


def write_generated_trace(
    directory: str | os.PathLike[str],
    kind: str,
    *,
    layers: int = 48,
    experts: int = 128,
    top_k: int = 8,
    sequences: int = 1,
    tokens: int = 256,
    prompt_tokens: int = 0,
    phase_tokens: int = 64,
    seed: int = 0,
) -> None:
    """Writes a trace of generated routing: a prefill step over the prompts of all sequences, if
    they have any, then a decode step for each further token of all. What only an engine knows
    (times, hits, bytes) is absent. Moments of a change of phase are marked.

    kind: of host_offload.traces.generators.routing_generator. tokens: of a sequence, its prompt
    included. Raises UserError for what cannot be, or a directory that is not new.
    """
    if sequences < 1 or not 0 <= prompt_tokens < tokens:
        raise UserError(
            "generated routing needs at least one sequence, and tokens beyond the prompt; got "
            f"{sequences} sequences of {tokens} tokens, {prompt_tokens} of them prompt"
        )
    try:
        generator = routing_generator(kind, layers, experts, top_k, phase_tokens)
    except ValueError as error:
        raise UserError(str(error)) from error
    origin = {"generator": kind, **dataclasses.asdict(generator), "seed": seed}
    header = routing_header(layers, experts, top_k, PRESENT, origin)
    numbers = np.arange(sequences, dtype=np.int32)
    prompt: list[RoutedTokens] = []
    last_phase = None
    with new_trace(directory, header) as writer:
        for token, routed in enumerate(generator.steps(sequences, tokens, seed)):
            number = max(token - prompt_tokens, -1) + (prompt_tokens > 0)
            if generator.phase_tokens and (phase := generator.phase(token)) != last_phase:
                writer.mark(Mark(number, 0.0, f"phase {phase}"))
                last_phase = phase
            position = np.full(sequences, token, np.int32)
            if token < prompt_tokens:
                prompt.append(routed)
                if token + 1 < prompt_tokens:
                    continue
                ids = np.stack([x.ids for x in prompt], axis=1)
                weights = np.stack([x.weights for x in prompt], axis=1)
                shape = (-1, layers, top_k)
                routed = RoutedTokens(ids.reshape(shape), weights.reshape(shape))
                position = np.tile(np.arange(prompt_tokens, dtype=np.int32), sequences)
            swept = token < prompt_tokens
            writer.append(
                routed_step(
                    number,
                    routed.ids,
                    weights=routed.weights,
                    kind=STEP_KINDS[not swept],
                    request=np.repeat(numbers, prompt_tokens) if swept else numbers,
                    position=position,
                    phase=np.full(len(position), not swept, np.uint8),
                )
            )


def routing_header(
    layers: int, experts: int, top_k: int, present: tuple[str, ...], origin: dict[str, Any]
) -> TraceHeader:
    """The header of a trace that has routing and nothing else. Raises UserError for sizes that
    cannot be.

    present: fields of StepRecord that the steps have, besides ids, user, number and tokens. origin:
    where it is from, kept in `spec`.
    """
    try:
        header = TraceHeader(
            layers=layers,
            experts=experts,
            top_k=top_k,
            config_digest=origin.get("config_digest", ""),
            spec={"layers": layers, "experts": experts, "top_k": top_k, **origin},
            machine={},
            command=sys.argv,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    have = {*present, "ids", "user", "number", "tokens"}
    missing = [name for name in written_columns(header) if name.split(".")[1] not in have]
    return dataclasses.replace(header, absent=tuple(missing))


@contextlib.contextmanager
def new_trace(directory: str | os.PathLike[str], header: TraceHeader) -> Iterator[TraceWriter]:
    """A writer whose trace appears when the block ends, and not at all when it fails. Raises
    UserError for a directory that is not new or cannot be written."""
    path = Path(directory)
    partial = path.with_name(f".{path.name}.partial")
    try:
        require_new(path)
        shutil.rmtree(partial, ignore_errors=True)
        with TraceWriter(partial, header) as writer:
            yield writer
        partial.replace(path)
    except (TraceError, OSError) as error:
        raise UserError(str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def routed_step(
    number: int,
    ids: np.ndarray,
    *,
    request: np.ndarray | None = None,
    user: np.ndarray | None = None,
    position: np.ndarray | None = None,
    phase: np.ndarray | None = None,
    weights: np.ndarray | None = None,
    kind: str | None = None,
    rows: int | None = None,
    waves: np.ndarray | None = None,
    finished: tuple[int, ...] = (),
) -> StepRecord:
    """A step of which only the routing is known: ids int[n, L, k], ascending, and what is given,
    with a row per token where it is an array."""
    unknown: dict[str, Any] = dict.fromkeys(StepRecord._fields)
    return StepRecord(**unknown)._replace(
        number=number,
        ids=ids.astype(np.int16),
        user=np.full(len(ids), -1, np.int32) if user is None else user,
        request=None if request is None else request.astype(np.int32),
        position=None if position is None else position.astype(np.int32),
        phase=None if phase is None else phase.astype(np.uint8),
        weights=weights,
        kind=kind,
        rows=rows,
        waves=waves,
        finished=finished,
    )
