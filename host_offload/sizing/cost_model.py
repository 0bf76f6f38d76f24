"""The cost model: the time of a run's steps, from figures that were measured on the machine.

A step's seconds are those of its work with every expert resident plus those of the experts that it
moves: sums of counts times measured seconds. CostModel has the figures of experts in one version,
RunCosts adds up those of a run's versions, and host_offload.simulate.prediction.predict gives the
time of a workload under a split and policies. moejax.costs.measure measures the figures;
docs/explanation/cost_model.md says how, and how well the model predicts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import Costs

FORMAT, VERSION = "moejax-costs", 8

MOVES = ("fill", "read_through", "stage")
"""Ways in which an expert crosses the link: into a cell in time, without a cell, and into a cell
ahead of need."""


class CostError(ValueError):
    """Costs that cannot be read or do not fit the question. The message says what to do."""


class Work(NamedTuple):
    """Counts of the work of one step."""

    parts: int
    """Rows with a token (decode), chunks of a prompt (prefill)."""
    spans: float
    """Tokens that the parts attend to, in spans (pallas_kernels.paged_attention.SPAN): whole ones
    in a prefill step."""
    experts: int = 0
    """Active experts of all layers together."""
    tiles: int = 0
    """Row tiles of experts beyond the first one of each."""
    filling: int = 0
    """Layers that move experts into cells."""
    fills: int = 0
    """Experts that those layers move."""
    reading: int = 0
    """Layers that compute experts from the store."""
    reads: int = 0
    """Experts that those layers compute."""


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Seconds of a step: `step`, and each other field for each of Work's."""

    step: float
    part: float
    span: float
    expert: float
    tile: float
    filling: float = 0.0
    fill: float = 0.0
    reading: float = 0.0
    read: float = 0.0

    def seconds(self, work: Work) -> float:
        return float(np.dot([1, *work], dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Figures of one model, device, version of the experts and set of start-up shapes. Seconds and
    bytes."""

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
    """Costs of a decode step, by rows of its executable."""
    prefill: StepCost
    control: float
    """Seconds added to a step whose results policies look at: the copies of tables and routing that
    they see, not what they compute."""
    recompute_per_token: float
    """Seconds of a prefill step a token, with everything resident."""
    kv_swap_per_byte: float
    """Seconds a byte one way, to the host or back (the mean of both)."""
    link_per_byte: float
    """Seconds a byte of a long row of fills without a step around them, the least possible."""
    cpu_expert: tuple[float, float] | None = None
    """Seconds per expert, seconds per token, on the CPU; None: jax has no CPU here."""
    beside_per_byte: float = 0.0
    """Seconds that computing loses by each byte that a queue moves beside it."""
    look: float = 0.0
    """Seconds added to a layer by policies that look between layers: the wait for what they see,
    its copies, and Python, not what they compute. 0 if the driver has no such moments."""
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The machine, device, versions, model, start-up shapes and time of the figures."""

    # ---- steps

    def bucket(self, rows: int) -> int:
        """Returns the rows of the executable that so many token rows run. Raises CostError beyond
        the largest."""
        if rows > (largest := max(self.decode)):
            raise CostError(
                f"costs were measured for decode steps of at most {largest} rows, not {rows}; "
                f"calibrate with max_num_seqs={rows}"
            )
        return min(bucket for bucket in self.decode if bucket >= rows)

    def step_cost(self, rows: int | None) -> StepCost:
        """Returns the costs of a step.

        - `rows`: of a decode executable; None: a prefill step.
        """
        return self.prefill if rows is None else self.decode[self.bucket(rows)]

    def moves_s(self, counts: np.ndarray, rows: int | None) -> np.ndarray:
        """Returns the seconds that moves add to each layer of a step, float64[3, L]. Experts that
        come ahead of need pass the link and hide behind nothing.

        - `counts`: int[3, L], experts that each layer moves in each way of MOVES.
        """
        cost = self.step_cost(rows)
        of_layer = np.array([cost.filling, cost.reading, 0.0])
        of_expert = np.array([cost.fill, cost.read, self.expert_bytes * self.link_per_byte])
        return of_layer[:, None] * (counts > 0) + of_expert[:, None] * counts

    def of_size(self, expert_bytes: int) -> CostModel:
        """Returns the costs with experts of so many bytes: moves by bytes, the rest as it is."""
        share = expert_bytes / self.expert_bytes

        def moved(cost: StepCost) -> StepCost:
            return dataclasses.replace(cost, fill=share * cost.fill, read=share * cost.read)

        decode = {rows: moved(cost) for rows, cost in self.decode.items()}
        prefill = moved(self.prefill)
        return dataclasses.replace(self, expert_bytes=expert_bytes, decode=decode, prefill=prefill)

    # ---- what policies see

    def costs(self) -> Costs:
        """Returns the costs that policies see, with fewer figures: a step's seconds by its rows if
        each row needs its own experts, as far as there are any."""
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
        return Costs(
            fill=np.array([first.filling, first.fill / self.expert_bytes]),
            stage=np.array([0.0, self.link_per_byte]),
            gpu_expert=np.stack([tokens, first.expert + first.tile * beyond], axis=1),
            cpu_expert=np.array(self.cpu_expert or [np.nan, np.nan]),
            step_s=steps,
            attention_s=first.span / self.layers,
            prefill_s_per_token=chunk_s / self.chunk,
            kv_swap_s_per_byte=self.kv_swap_per_byte,
            recompute_s_per_token=self.recompute_per_token,
        )

    # ---- files

    def to_json(self) -> dict[str, Any]:
        """Returns plain data, from which from_json makes the same model, to the last bit."""
        figures = dataclasses.asdict(self)
        about = figures.pop("about")
        found = {"format": FORMAT, "version": VERSION, "about": about, "figures": figures}
        return json.loads(json.dumps(found))

    @classmethod
    def from_json(cls, found: Any) -> CostModel:
        """Makes a model of plain data. Raises CostError for data that is no cost model, of another
        version, or without a figure."""
        if not isinstance(found, Mapping) or found.get("format") != FORMAT:
            raise CostError("not a file of costs")
        if found.get("version") != VERSION:
            raise CostError(
                f"costs of version {found.get('version')}, this moejax reads {VERSION}; calibrate "
                "again"
            )
        try:
            figures = dict(found["figures"])
            decode = figures["decode"].items()
            figures["decode"] = {int(rows): StepCost(**cost) for rows, cost in decode}
            figures["prefill"] = StepCost(**figures["prefill"])
            if figures["cpu_expert"] is not None:
                figures["cpu_expert"] = tuple(map(float, figures["cpu_expert"]))
            return cls(**figures, about=dict(found["about"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CostError(f"fields are missing or unknown ({error})") from error


@dataclasses.dataclass(frozen=True)
class RunCosts:
    """The costs of a run's steps: the cost model of each version of its experts, by version number.
    docs/explanation/cost_model.md says how they add up and what is left out."""

    models: tuple[CostModel, ...]

    @property
    def control(self) -> float:
        return max(model.control for model in self.models)

    @property
    def look(self) -> float:
        return max(model.look for model in self.models)

    def fixed_cost(self, work: Work, rows: int | None, version: np.ndarray) -> StepCost:
        """Returns the costs of everything but experts: the highest among the versions of the active
        experts (int[n])."""
        used = np.unique(version).tolist() or [0]
        costs = [self.models[number].step_cost(rows) for number in used]
        return max(costs, key=lambda cost: cost.seconds(work))

    def products(self, routed: np.ndarray, version: np.ndarray, rows: int | None) -> np.ndarray:
        """Returns the seconds of each expert's products, float64[L, E]; 0 without rows.

        - `routed`: int[L, E], rows of each expert.
        - `version`: int[L, E].
        - `rows`: see CostModel.step_cost.
        """
        found = np.zeros(routed.shape)
        for number, model in enumerate(self.models):
            mine = (routed > 0) & (version == number)
            tile = model.chunk if rows is None else model.row_tile
            cost = model.step_cost(rows)
            found[mine] = cost.expert + cost.tile * (-(-routed[mine] // tile) - 1)
        return found

    def moves_s(self, moved: np.ndarray, rows: int | None) -> np.ndarray:
        """Returns the seconds that each way of MOVES adds to each layer, float64[3, L]. A version
        is charged for its share of what its own figures say about all that the layer moves.

        - `moved`: int[3, L, V], experts of each version.
        """
        of_layer = moved.sum(axis=2)
        share = moved / np.maximum(of_layer, 1)[:, :, None]
        each = [model.moves_s(of_layer, rows) for model in self.models]
        return np.sum(np.stack(each, axis=2) * share, axis=2)


def run_costs(
    costs: CostModel | Mapping[str, CostModel], sizes: Mapping[str, np.ndarray]
) -> RunCosts:
    """Returns the costs of a run.

    - `costs`: of its one version, or by version.
    - `sizes`: int64[L] bytes of an expert by version, in the order of their numbers; empty: one
      version with an unknown name.

    Raises CostError if a version has no costs, if costs are of experts of another size, and if
    models are of different shapes.
    """
    names = list(sizes)
    if isinstance(costs, CostModel):
        if len(names) > 1:
            raise CostError(
                f"the run mixes {' and '.join(names)}, and these costs are of one version; give "
                "those of each, {version: costs}, which `moejax calibrate --precision VERSION` "
                "measures"
            )
        return RunCosts((costs,))
    if not names:
        if len(costs) != 1:
            raise CostError("the trace does not say its versions; give the costs of one")
        return RunCosts(tuple(costs.values()))
    shapes = set()
    for name in names:
        if (model := costs.get(name)) is None:
            raise CostError(
                f"no costs of version {name}: measure them with `moejax calibrate --precision "
                f"{name}`, with the same shapes as those of the others"
            )
        if (said := np.unique(sizes[name]).tolist()) != [model.expert_bytes]:
            raise CostError(
                f"the costs of {name} are of experts of {model.expert_bytes} bytes, the run's have "
                f"{', '.join(map(str, said))}; calibrate the run's model"
            )
        of_model = model.layers, model.experts, model.top_k
        shapes.add((*of_model, model.chunk, model.row_tile, *sorted(model.decode)))
    if len(shapes) > 1:
        raise CostError(
            f"the costs of {' and '.join(names)} are of different shapes; calibrate all with the "
            "same options"
        )
    return RunCosts(tuple(costs[name] for name in names))


def fit_costs(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Fits the seconds of each kind of work by least squares of relative errors; none is below 0.

    - `counts`: [n, kinds], amount of each kind.
    - `seconds`: [n], their measured times.
    """
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
