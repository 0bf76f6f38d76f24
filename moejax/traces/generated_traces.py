"""Writes traces of generated routing, and has what all traces without an engine are written with.

host_offload.traces.generators explains how the routing is generated and what it was fitted to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.step_record import COLUMNS, StepRecord
from host_offload.traces.generators import routing_generator
from host_offload.traces.schema import Mark, TraceError, TraceHeader, engine_columns
from host_offload.traces.writer import TraceWriter, require_new
from moejax.errors import UserError, user_errors

PRESENT = ("request", "position", "phase", "ids", "weights", "kind")
"""Columns that generated routing has beyond those of every trace."""


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
    shared: float | None = None,
    seed: int = 0,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Writes a trace of generated routing: a prefill step over the prompts of all sequences, if
    they have any, then a decode step for each further token of all. What only an engine knows
    (times, hits, bytes) is absent. Changes of phase are marked.

    - `kind`: of host_offload.traces.generators.routing_generator.
    - `tokens`: tokens of a sequence, its prompt included.
    - `shared`: of RoutingGenerator; None: the kind's.
    - `about`: what the trace's spec says beside the routing, such as the bytes of an expert.

    Raises UserError for impossible values, and for a directory that is not new.
    """
    if sequences < 1 or not 0 <= prompt_tokens < tokens:
        raise UserError(
            "generated routing needs at least one sequence, and tokens beyond the prompt; got "
            f"{sequences} sequences of {tokens} tokens, {prompt_tokens} of them prompt"
        )
    with user_errors():
        generator = routing_generator(kind, layers, experts, top_k, phase_tokens)
        if shared is not None:
            generator = dataclasses.replace(generator, shared=shared)
    origin = {**dataclasses.asdict(generator), "generator": kind, "seed": seed, **(about or {})}
    header = routing_header(layers, experts, top_k, PRESENT, origin)
    numbers, first = np.arange(sequences), int(prompt_tokens > 0)
    with new_trace(directory, header) as writer:
        for token in range(0, tokens, generator.phase_tokens) if generator.phase_tokens else ():
            step = max(token - prompt_tokens, -1) + first
            writer.mark(Mark(step, 0.0, f"phase {generator.phase(token)}"))
        steps = generator.steps(sequences, tokens, seed)
        if prompt := list(itertools.islice(steps, prompt_tokens)):
            # A sequence's tokens one after the other.
            ids, weights = (np.concatenate(np.stack(x, axis=1)) for x in zip(*prompt, strict=True))
            writer.append(
                routed_step(
                    0,
                    ids,
                    weights=weights,
                    kind="prefill",
                    request=np.repeat(numbers, prompt_tokens),
                    position=np.tile(np.arange(prompt_tokens), sequences),
                    phase=np.zeros(len(ids)),
                )
            )
        for token, routed in enumerate(steps, prompt_tokens):
            writer.append(
                routed_step(
                    token - prompt_tokens + first,
                    routed.ids,
                    weights=routed.weights,
                    kind="decode",
                    request=numbers,
                    position=np.full(sequences, token),
                    phase=np.ones(sequences),
                )
            )


@user_errors()
def routing_header(
    layers: int, experts: int, top_k: int, present: Iterable[str], origin: dict[str, Any]
) -> TraceHeader:
    """Returns the header of a trace that has routing and nothing else.

    - `present`: fields of StepRecord that the steps have, besides ids, user, number and tokens.
    - `origin`: where the routing is from, kept in `spec`.

    Raises UserError for impossible sizes.
    """
    sizes: dict[str, Any] = {"layers": layers, "experts": experts, "top_k": top_k}
    header = TraceHeader(
        **sizes,
        config_digest=origin.get("config_digest", ""),
        spec={**sizes, **origin},
        machine={},
        command=sys.argv,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    have = {*present, "ids", "user", "number", "tokens"}
    missing = [name for name in engine_columns(header) if name.split(".")[1] not in have]
    return dataclasses.replace(header, absent=tuple(missing))


@contextlib.contextmanager
def new_trace(directory: str | os.PathLike[str], header: TraceHeader) -> Iterator[TraceWriter]:
    """Yields a writer whose trace appears when the block ends, and not at all if the block fails.
    Raises UserError for a directory that is not new or cannot be written."""
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
) -> StepRecord:
    """Returns a step of which only the routing and the given fields are known. Given arrays have a
    row per token.

    - `ids`: int[n, L, k], ascending.
    """
    user = np.full(len(ids), -1) if user is None else user
    tokens = {"ids": ids, "request": request, "user": user, "position": position, "phase": phase}
    unknown: dict[str, Any] = dict.fromkeys(StepRecord._fields)
    unknown |= {n: x.astype(COLUMNS[n].dtype) for n, x in tokens.items() if x is not None}
    return StepRecord(**unknown)._replace(number=number, weights=weights, kind=kind, finished=())
