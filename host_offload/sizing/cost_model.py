"""The cost model: what a step takes, from figures that were measured on the machine.

A step's seconds are those of its work with every expert resident, a sum of counts times measured
seconds, and those of the experts that it moves, from tables by how many a layer moves at once.
The engine moves them in the step's own stream, so both add up. moejax.costs.measure measures;
docs/cost_model.md says how, and how well the model predicts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import Costs

FORMAT, VERSION = "moejax-costs", 4

MOVES = ("fill", "read_through", "stage")
"""Ways in which an expert crosses the link: into a cell in time, beside any cell, into a cell ahead
of need."""


class CostError(ValueError):
    """Costs that cannot be read or do not fit what they are asked for; the message says what to
    do."""


class Work(NamedTuple):
    """What a step computes, counts of one step."""

    parts: int
    """Rows with a token (decode), chunks of a prompt (prefill)."""
    spans: int
    """Spans (pallas_kernels.paged_attention.SPAN tokens) that the parts attend to."""
    experts: int
    """Active experts of all layers together."""
    tiles: int
    """Row tiles of experts beyond the first one of each."""


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Seconds of a step in which nothing is moved: `step`, and each other field for each of
    Work's."""

    step: float
    part: float
    span: float
    expert: float
    tile: float

    def seconds(self, work: Work) -> float:
        counts = self.part * work.parts + self.span * work.spans
        return self.step + counts + self.expert * work.experts + self.tile * work.tiles


@dataclasses.dataclass(frozen=True)
class Shares:
    """Where a step's seconds lie, which says what transfers can be hidden behind: shares of what is
    not an expert's products, and of these. The defaults are arithmetic, for steps that were not
    looked into. Raises CostError for shares that are none."""

    outside: float = 0.25
    """What of StepCost.step lies before the first layer and after the last one."""
    after: float = 0.0
    """What of the rest of it follows a layer's experts."""
    gate_up: float = 2 / 3
    """What of an expert's products those with gate and up are, which come first."""

    def __post_init__(self):
        for name, value in vars(self).items():
            if not 0 <= value <= 1:
                raise CostError(f"shares.{name} must lie in 0…1, not {value!r}")


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Figures of one model, device and set of start-up shapes. Seconds and bytes.

    A *table* is float64[n, 2]: experts that one layer moves at once in a step, ascending, and
    seconds that they add to the step.
    """

    layers: int
    """MoE layers."""
    experts: int
    top_k: int
    expert_bytes: int
    chunk: int
    """Prompt tokens computed at once; rows of a prefill step's tile."""
    row_tile: int
    """Rows of a decode tile."""
    decode: dict[int, StepCost]
    """By rows of the executable."""
    prefill: StepCost
    fill: np.ndarray
    """Table of experts moved into a cell."""
    read_through: np.ndarray
    """Table of experts computed from the store."""
    stage: np.ndarray
    """Table of experts moved ahead of need."""
    stage_list: float
    """Added by a list of transfers, whatever is in it."""
    control: float
    """Added where policies look at a step's results: the copies of tables and routing that they
    see, not what they compute."""
    prefill_fill: float
    """An expert moved into a cell in a prefill step."""
    prefill_read_through: float
    """An expert computed from the store in a prefill step."""
    recompute_per_token: float
    """A prefill step's seconds with everything resident by its tokens."""
    kv_swap_per_byte: float
    """One way, to the host or back (the mean of both)."""
    memory_per_byte: float
    """Reading or writing the device's memory."""
    link_per_byte: float
    """A long row of fills without a step around them: the least there is."""
    cpu_expert: np.ndarray | None = None
    """float64[2]: seconds per expert, seconds per token, on the CPU; None: jax has no CPU here."""
    beside_per_byte: float = 0.0
    """Lost by computing beside a queue that moves bytes."""
    look: float = 0.0
    """Added by a moment between layers at which policies see a copy of the tables, the first one of
    each layer: the wait for what they see, the copies of it, and Python, not what they compute. 0
    where the driver has no such moments."""
    glance: float = 0.0
    """Added by each other one, at which nothing has changed the tables."""
    hand: float = 0.0
    """Added by each list of transfers that they return there."""
    shares: Shares = Shares()
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the figures are of: machine, device, versions, model, start-up shapes, when."""

    def __post_init__(self):
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise CostError(f"{name} must be a whole number from 1 on, not {value!r}")
        for name in _TABLES:
            _check_table(name, getattr(self, name))
        seconds = {name: getattr(self, name) for name in _SECONDS}
        for kind, cost in (("prefill", self.prefill), *self.decode.items()):
            seconds |= {f"{kind}.{name}": value for name, value in vars(cost).items()}
        if self.cpu_expert is not None:
            seconds |= {f"cpu_expert[{i}]": x for i, x in enumerate(self.cpu_expert.tolist())}
        for name, value in seconds.items():
            if not (math.isfinite(value) and value >= 0):
                raise CostError(f"{name} must be seconds from 0 on, not {value!r}")
        if not self.decode or min(self.decode) < 1:
            raise CostError("decode must have the costs of at least one number of rows")

    # ---- steps

    def bucket(self, rows: int) -> int:
        """The executable that so many token rows run. Raises CostError beyond the largest."""
        for bucket in sorted(self.decode):
            if bucket >= rows:
                return bucket
        raise CostError(
            f"costs were measured for decode steps of at most {max(self.decode)} rows, not {rows}; "
            f"calibrate with max_num_seqs={rows}"
        )

    def step_cost(self, rows: int | None) -> StepCost:
        """The costs of a step that moves nothing. rows: of a decode executable; None: a prefill
        step."""
        return self.prefill if rows is None else self.decode[self.bucket(rows)]

    def moves_s(self, kind: str, counts: np.ndarray, *, prefill: bool) -> np.ndarray:
        """float64[L]: what layers that move so many experts (int[L]) in one of the ways of MOVES
        add to a step; a list's own cost (`stage_list`) is not in it."""
        if kind == "stage":
            return _looked_up(self.stage, counts)
        if prefill:
            return counts * (self.prefill_fill if kind == "fill" else self.prefill_read_through)
        return _looked_up(getattr(self, kind), counts)

    def load_beats_cpu(self) -> float:
        """Tokens of an expert from which a load is done before the CPU, t_io < β·m + C, where a
        row of loads keeps the link busy (PreScope's T_G and T_C of a lone expert but t_g). Infinite
        where a token takes the CPU no time; 0 where a load is always first."""
        startup, per_token = np.full(2, np.nan) if self.cpu_expert is None else self.cpu_expert
        load = float(self.fill[-1, 1] / self.fill[-1, 0])
        return float(max(load - startup, 0.0) / per_token) if per_token else math.inf

    # ---- what policies see

    def costs(self) -> Costs:
        """Fewer figures: lines in place of tables, and a step's seconds by its rows when each row
        needs experts of its own, as far as there are any."""
        steps = {}
        for rows, cost in self.decode.items():
            active = self.layers * min(self.experts, rows * self.top_k)
            pairs = self.layers * rows * self.top_k
            tiles = max(-(-pairs // self.row_tile) - active, 0)
            steps[rows] = cost.seconds(Work(rows, rows, active, tiles))
        first = self.decode[min(self.decode)]
        tokens = np.array([1, self.row_tile, self.row_tile + 1, 2 * self.row_tile], np.float64)
        beyond = np.ceil(tokens / self.row_tile) - 1
        tiles_per_chunk = self.layers * self.top_k
        chunk_s = self.prefill.part + self.prefill.span + self.prefill.tile * tiles_per_chunk
        cpu = np.full(2, np.nan) if self.cpu_expert is None else self.cpu_expert
        return Costs(
            fill=line(self.fill, self.expert_bytes),
            stage=line(self.stage, self.expert_bytes),
            read_through=line(self.read_through, self.expert_bytes),
            gpu_expert=np.stack([tokens, first.expert + first.tile * beyond], axis=1),
            cpu_expert=cpu,
            step_s=steps,
            attention_s=first.span / self.layers,
            prefill_s_per_token=chunk_s / self.chunk,
            kv_swap_s_per_byte=self.kv_swap_per_byte,
            recompute_s_per_token=self.recompute_per_token,
        )

    # ---- files

    def to_json(self) -> dict[str, Any]:
        """Plain data; from_json gives the same model back, to the last bit."""
        figures = {name: getattr(self, name) for name in (*_COUNTS, *_SECONDS)}
        figures |= {name: getattr(self, name).tolist() for name in _TABLES}
        figures["decode"] = {str(rows): vars(cost) for rows, cost in self.decode.items()}
        figures["prefill"] = vars(self.prefill)
        figures["cpu_expert"] = None if self.cpu_expert is None else self.cpu_expert.tolist()
        figures["shares"] = vars(self.shares)
        return {"format": FORMAT, "version": VERSION, "about": self.about, "figures": figures}

    @classmethod
    def from_json(cls, found: Any) -> CostModel:
        """Raises CostError for what is no cost model, of another version, or without a figure."""
        if not isinstance(found, Mapping) or found.get("format") != FORMAT:
            raise CostError("these are no costs of moejax")
        if found.get("version") != VERSION:
            raise CostError(
                f"costs of version {found.get('version')}, this moejax reads {VERSION}; calibrate "
                "again"
            )
        try:
            figures = dict(found["figures"])
            for name in _TABLES:
                figures[name] = np.asarray(figures[name], np.float64)
            figures |= {name: float(figures[name]) for name in _SECONDS}
            decode = figures["decode"].items()
            figures["decode"] = {int(rows): StepCost(**cost) for rows, cost in decode}
            figures["prefill"] = StepCost(**figures["prefill"])
            figures["shares"] = Shares(**figures["shares"])
            if figures["cpu_expert"] is not None:
                figures["cpu_expert"] = np.asarray(figures["cpu_expert"], np.float64).reshape(2)
            return cls(**figures, about=dict(found["about"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise CostError(f"costs without a figure, or with one too many ({error})") from error
        except CostError:
            raise
        except ValueError as error:
            raise CostError(f"costs with a figure that is no number ({error})") from error


def _fields(kind: str) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(CostModel) if f.type == kind)


_COUNTS, _TABLES, _SECONDS = _fields("int"), _fields("np.ndarray"), _fields("float")


def fitted_table(counts: Sequence[float], seconds: Sequence[float]) -> np.ndarray:
    """A table of measured seconds: none below 0, and none below that of fewer experts, which noise
    can make them."""
    order = np.argsort(counts)
    rising = np.maximum.accumulate(np.maximum(np.asarray(seconds, np.float64)[order], 0.0))
    return np.stack([np.asarray(counts, np.float64)[order], rising], axis=1)


def fitted_step(works: Sequence[Work], seconds: Sequence[float]) -> StepCost:
    """The costs that come nearest to measured steps, each weighted by one over its seconds, so that
    relative errors count; least squares with no cost below 0."""
    return StepCost(*_fitted([[1, *work] for work in works], seconds))


def fitted_prefill(
    works: Sequence[Work], moved: Sequence[tuple[int, int]], seconds: Sequence[float]
) -> tuple[StepCost, float, float]:
    """fitted_step's costs of prefill steps that moved so many (into cells, read through) experts;
    also the seconds of one of each."""
    rows = [[1, *work, *moves] for work, moves in zip(works, moved, strict=True)]
    *cost, fill, read_through = _fitted(rows, seconds)
    return StepCost(*cost), fill, read_through


def _fitted(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    scaled = np.array(counts, np.float64) / np.asarray(seconds, np.float64)[:, None]
    kept, found = list(range(scaled.shape[1])), np.zeros(scaled.shape[1])
    while kept:
        found[:] = 0
        found[kept] = np.linalg.lstsq(scaled[:, kept], np.ones(len(scaled)), rcond=None)[0]
        negative = [cost for cost in kept if found[cost] < 0]
        if not negative:
            break
        # The one that would take most from the steps goes first; what no step has takes nothing.
        taken = found * scaled.mean(axis=0)
        kept.remove(min(negative, key=lambda cost: taken[cost]))
    return found.tolist()


def line(table: np.ndarray, expert_bytes: int) -> np.ndarray:
    """float64[2]: latency in seconds and seconds per byte of the straight line nearest to a table,
    neither below 0."""
    nbytes, seconds = table[:, 0] * expert_bytes, table[:, 1]
    slope = 0.0
    if len(table) > 1:
        # Least squares by hand: exactly 0 for what does not rise, which LAPACK's is on some CPUs.
        x, y = nbytes - nbytes.mean(), seconds - seconds.mean()
        slope = float(x @ y / (x @ x))
    latency = float(np.mean(seconds - slope * nbytes))
    if slope <= 0 or latency < 0:
        # Through the origin: all of it goes with the bytes.
        return np.array([0.0, float(nbytes @ seconds / (nbytes @ nbytes))])
    return np.array([latency, slope])


def _looked_up(table: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Seconds of each layer: 0 for none, straight between the table's counts, and beyond the last
    one as from the one before it to it."""
    moved = np.asarray(counts, np.float64)
    x, y = np.concatenate([[0.0], table[:, 0]]), np.concatenate([[0.0], table[:, 1]])
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
    return np.interp(moved, x, y) + slope * np.maximum(moved - x[-1], 0.0)


def _check_table(name: str, table: np.ndarray) -> None:
    good = table.ndim == 2 and table.shape[1] == 2 and len(table) > 0 and np.isfinite(table).all()
    if good:
        more, longer = np.diff(table, axis=0, prepend=np.zeros((1, 2))).T
        good = (more > 0).all() and (longer >= 0).all()
    if not good:
        raise CostError(
            f"{name} must be pairs of (experts, seconds), both ascending from 0 on, not "
            f"{table.tolist()}"
        )
