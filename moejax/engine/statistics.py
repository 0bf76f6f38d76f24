"""What ran, how long it took and what was moved: the numbers behind `LLM.stats()`."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from moejax.requests.request import Request
from moejax.step.experts import Paging

KEPT_TIMES = 100_000
"""Latest times kept for percentiles, so that memory stays flat however long the engine runs."""


def _times() -> deque[float]:
    return deque(maxlen=KEPT_TIMES)


@dataclasses.dataclass
class Statistics:
    """Counters of one engine. record_bytes: bytes of one expert as it crosses the link, by version
    number."""

    record_bytes: tuple[int, ...]
    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: dict[str, int] = dataclasses.field(default_factory=lambda: {"prefill": 0, "decode": 0})
    seconds: dict[str, float] = dataclasses.field(
        default_factory=lambda: {"prefill": 0.0, "decode": 0.0}
    )
    paging: dict[str, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(Paging._fields, 0)
    )
    moved: dict[str, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(("fill", "read_through"), 0)
    )
    """Bytes over the link, by cause."""
    copy_s_per_byte: float | None = None
    """The link's rate for experts, before the first step; None: not measured."""
    first_token_times: deque[float] = dataclasses.field(default_factory=_times)
    token_times: deque[float] = dataclasses.field(default_factory=_times)
    last_read_s: float | None = None

    def add_request(self, request: Request) -> None:
        self.requests += 1
        self.prompt_tokens += len(request.prompt)

    def start(self, now: float) -> None:
        """Work begins after a pause: the next step's time counts from now."""
        self.last_read_s = now

    def add_step(
        self, kind: str, paging: Paging, now: float, demand: np.ndarray | None = None
    ) -> None:
        """kind: prefill or decode. paging: int[L] each. now: when its results were read. demand:
        of StepOutput, with several versions."""
        self.steps[kind] += 1
        # Steps overlap with the reading of the one before: the time between two reads is a step's.
        self.seconds[kind] += now - (self.last_read_s or now)
        self.last_read_s = now
        for name, counts in zip(Paging._fields, paging, strict=True):
            self.paging[name] += int(np.sum(counts))
        moved = demand_bytes(paging, demand, self.record_bytes)
        for name, count in zip(self.moved, moved, strict=True):
            self.moved[name] += count

    def add_token(self, request: Request, now: float) -> None:
        self.generated_tokens += 1
        if request.first_token_s is None:
            request.first_token_s = now
            self.first_token_times.append(now - request.arrival_s)
        else:
            took = now - (request.last_token_s or now)
            self.token_times.append(took)
            request.token_times.append(took)
        request.last_token_s = now

    def summary(self) -> dict:
        """The part of LLM.stats() that requests make: seconds, counts, bytes over the link."""
        wall = sum(self.seconds.values())
        hits, active = self.paging["hits"], self.paging["active"]
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "ttft_s": _summary(self.first_token_times, {"mean": np.mean, "max": np.max}),
            "tpot_s": _summary(
                self.token_times,
                {
                    "mean": np.mean,
                    "p50": lambda times: np.percentile(times, 50),
                    "p99": lambda times: np.percentile(times, 99),
                },
            ),
            "tokens_per_s": self.generated_tokens / wall if wall else None,
            "steps": dict(self.steps),
            "experts": {
                "activations": active,
                "hits": hits,
                "fills": self.paging["fills"],
                "read_through": self.paging["read_through"],
                "hit_rate": hits / active if active else None,
            },
            "bytes": dict(self.moved),
        }


def demand_bytes(
    paging: Paging, demand: np.ndarray | None, record_bytes: Sequence[int]
) -> tuple[int, int]:
    """What the fills of a step and what it read through moved over the link, in bytes. paging,
    demand: of StepOutput, on the host. record_bytes: by version number."""
    if demand is None:
        fills, through = int(np.sum(paging.fills)), int(np.sum(paging.read_through))
        return fills * record_bytes[0], through * record_bytes[0]
    fills, through = np.sum(demand, axis=0, dtype=np.int64) @ np.asarray(record_bytes, np.int64)
    return int(fills), int(through)


def _summary(
    times: Collection[float], functions: Mapping[str, Callable]
) -> dict[str, float | None]:
    """Each function of the times; None where there are none."""
    return {n: float(f(np.asarray(times))) if times else None for n, f in functions.items()}
