"""A grid as data: what a YAML file or a mapping says, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from host_offload.memory.budget import BudgetError, Share, expert_slots_of, format_bytes
from host_offload.policies.precision.names import precision_of
from moejax.errors import UserError, shown, user_errors
from moejax.evaluate.experiments.arms import Arm, arm_of, file_digest
from moejax.evaluate.experiments.corpus import text_path
from moejax.models.directory import model_directory
from moejax.models.json_values import MOST_YAML, is_integer, is_number, parse_yaml
from moejax.sizes import parse_expert_budget
from moejax.start.decide.plan import Plan
from moejax.start.options import DRIVERS, Options
from moejax.start.report.dry_run import dry_run

MODES = ("measured", "simulated", "predicted")

OPTIONS = (
    *("dtype", "ops", "device", "threads", "max_num_batched_tokens", "quantizer", "tokenizer"),
    *("step", "name_map", "link_rate", "link_latency"),
)
"""Options of LLM that a definition may give under `options`, for all of its cells."""

EXPERTS, BYTES = "experts", "bytes"
"""What equal budgets are equal in where precisions differ."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One place of the grid; its fields are columns of the records."""

    mode: str
    driver: str
    precision: str
    batch: int
    prompt_tokens: int
    text: str
    seed: int
    budget: str
    policy: str


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A checked definition. Lists are axes of the grid."""

    model: str
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    equal: str | None
    precision: tuple[str, ...]
    driver: str
    batch: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    output_tokens: int
    texts: tuple[str, ...]
    seeds: tuple[int, ...]
    temperature: float
    modes: tuple[str, ...]
    repeats: int
    baseline: str
    costs: str | None
    options: Mapping[str, Any]
    home: Path
    """From where on paths are meant."""
    arms: Mapping[str, Arm]
    sources: Mapping[str, Path]
    """Text → its file."""
    text_names: tuple[str, ...]
    """Texts as the definition names them."""

    @property
    def asked(self) -> dict[str, Any]:
        """What decides the records, as plain data: the definition and digests of its files."""
        found = {name: getattr(self, name) for name in _DEFAULTS} | {"texts": self.text_names}
        found = {n: list(v) if isinstance(v, tuple) else v for n, v in found.items()}
        files = {name: file_digest(path) for name, path in self.sources.items()}
        for arm in self.arms.values():
            files |= {Path(path).name: digest for path, digest in arm.files}
        config = Path(model_directory(self.model)) / "config.json"
        if config.is_file():
            files["config.json"] = file_digest(config)
        return {**found, "files": dict(sorted(files.items()))}

    def drivers(self, arm: Arm) -> tuple[str, ...]:
        """Who walks through the layers for an arm: the baseline runs with every driver that another
        one needs, since times are compared within a driver."""
        if self.driver != "auto":
            return (self.driver,)
        if arm.needs_host:
            return ("host",)
        others = any(each.needs_host for each in self.arms.values())
        return DRIVERS if others and arm.name == self.baseline else ("device",)

    def cells(self) -> Iterator[Cell]:
        """All places of the grid: those of one engine together, and in them those of one text, so
        that policies take turns within each repeat."""
        outer = self.modes, DRIVERS, self.precision, self.batch, self.prompt_tokens, self.texts
        for place in itertools.product(*outer, self.seeds, self.budgets, self.policies):
            cell = Cell(*place)
            if cell.driver in self.drivers(self.arms[cell.policy]):
                yield cell

    def engine_options(self, driver: str, precision: str, batch: int) -> Options:
        """Those of the engine of some cells: for prompts of all lengths, with an arena for the
        largest budget."""
        plan, _ = dry_run(self._options(driver, precision, batch, 0))
        slots = max(
            self.expert_slots(budget, arm, plan)
            for budget in self.budgets
            for arm in self.arms.values()
        )
        return self._options(driver, precision, batch, slots * plan.steps.layout.slot_bytes)

    def _options(self, driver: str, precision: str, batch: int, expert_bytes: int) -> Options:
        length = -(-(max(self.prompt_tokens) + self.output_tokens) // 64) * 64
        return Options(
            self.model,
            driver=driver,
            precision=precision,
            max_num_seqs=batch,
            max_model_len=length,
            eviction="lru",
            expert_budget=expert_bytes,
            enable_prefix_caching=False,
            progress=False,
            **self.options,
        )

    def expert_slots(self, budget: str, arm: Arm, plan: Plan) -> int:
        """Experts that a budget holds in the plan's precision, less what the arm learned. Raises
        UserError for a budget that holds none and is not 0."""
        spec, layout = plan.spec, plan.steps.layout
        every, given = spec.layers * spec.experts, parse_expert_budget(_number(budget))
        dense = dataclasses.replace(layout.records[0], version="dense").nbytes
        if isinstance(given, Share) and self.equal == BYTES:
            given = int(given.fraction * every * dense)
        asked_for = given.fraction if isinstance(given, Share) else given
        whole = expert_slots_of(given, every, layout.slot_bytes)
        if asked_for and not whole:
            size = layout.slot_bytes
            percent = f'; did you mean "{given}%"?' if is_integer(given) and given <= 100 else ";"
            raise UserError(
                f"budget {budget} holds no expert: one takes {size} bytes ({format_bytes(size)})"
                f'{percent} write a share such as "25%", at least '
                f"{100 / every:.3g}%, bytes of one expert or more, or 0 for none"
            )
        learned = arm.learned_bytes(spec)
        slots = whole - -(-learned // layout.slot_bytes)
        if slots < 0 or (asked_for and not slots):
            raise UserError(
                f"budget {budget}: what {arm.name} learned takes {learned} bytes of it "
                "and leaves no expert; raise the budget"
            )
        return slots


def read_experiment(source: str | os.PathLike[str] | Mapping[str, Any]) -> Experiment:
    """The experiment in a YAML file, or in a mapping of the same keys, whose paths are from the
    working directory on. Raises UserError for whatever is wrong with it, saying what to write."""
    if isinstance(source, Mapping):
        return _experiment(source, Path.cwd(), "the definition")
    path = Path(source)
    try:
        with open(path, "rb") as file:
            given = parse_yaml(file.read(MOST_YAML + 1).decode())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is no YAML: {error}") from error
    if not isinstance(given, dict):
        raise UserError(
            f"{path} must be a mapping such as policies: [lru, lfu], not {shown(given)}"
        )
    return _experiment(given, path.resolve().parent, str(path))


_DEFAULTS: dict[str, Any] = {
    "model": "demo",
    "policies": None,
    "budgets": None,
    "equal": None,
    "precision": ["dense"],
    "driver": "auto",
    "batch": [1],
    "prompt_tokens": [512],
    "output_tokens": 128,
    "texts": ["story"],
    "seeds": [0],
    "temperature": 1.0,
    "modes": ["measured"],
    "repeats": 6,
    "baseline": None,
    "costs": None,
    "options": {},
}


def _experiment(given: Mapping[str, Any], home: Path, where: str) -> Experiment:
    for name in given:
        if name not in _DEFAULTS:
            close = difflib.get_close_matches(str(name), _DEFAULTS, 1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise UserError(
                f"{where}: unknown key {shown(name)}{meant} The keys are {', '.join(_DEFAULTS)}"
            )
    with user_errors(where=f"{where}: "):
        found = _DEFAULTS | dict(given)
        for name, example in (("policies", "[lru, lfu]"), ("budgets", '["25%", "50%"]')):
            if not found[name]:
                raise UserError(f"{name} are missing; write {name}: {example}")
        texts = {}
        for text in _list("policies", found["policies"], str):
            texts[text] = arm_of(text, home)
        experiment = Experiment(
            model=_text("model", found["model"]),
            policies=tuple(texts),
            budgets=_budgets(found["budgets"]),
            equal=_one_of("equal", found["equal"], (None, EXPERTS, BYTES)),
            precision=_list("precision", found["precision"], str),
            driver=_one_of("driver", found["driver"], ("auto", *DRIVERS)),
            batch=_counts("batch", found["batch"]),
            prompt_tokens=_counts("prompt_tokens", found["prompt_tokens"]),
            output_tokens=_counts("output_tokens", found["output_tokens"], single=True)[0],
            texts=tuple(Path(t).stem for t in _list("texts", found["texts"], str)),
            seeds=_counts("seeds", found["seeds"], least=0),
            temperature=_temperature(found["temperature"]),
            modes=_modes(found["modes"]),
            repeats=_counts("repeats", found["repeats"], single=True)[0],
            baseline=_text("baseline", found["baseline"] or next(iter(texts))),
            costs=None if found["costs"] is None else str(home / _text("costs", found["costs"])),
            options=_options(found["options"]),
            home=home,
            arms=texts,
            sources={Path(t).stem: text_path(t, home) for t in _list("texts", found["texts"], str)},
            text_names=_list("texts", found["texts"], str),
        )
        _check(experiment)
    return experiment


def _check(experiment: Experiment) -> None:
    """Raises UserError for what does not go together."""
    if len(experiment.sources) < len(experiment.texts):
        raise UserError("two texts have the same name; rename one of the files")
    if experiment.baseline not in experiment.arms:
        raise UserError(
            f"baseline {experiment.baseline!r} is none of the policies; write one of "
            f"{', '.join(experiment.policies)}"
        )
    shares = [b for b in experiment.budgets if b.endswith("%")]
    if len(experiment.precision) > 1 and shares and experiment.equal is None:
        raise UserError(
            f"budget {shares[0]} of several precisions can mean equal bytes or equally many "
            "experts; write equal: bytes (shares are then of the dense experts' bytes) or equal: "
            "experts"
        )
    for name in experiment.precision:
        if precision_of(name).mixed:
            raise UserError(
                f"precision {name} holds experts in two versions, whose cells are laid out at a "
                "start and not within a grid; write dense, lossless12, int8, int4 or int2"
            )
    if experiment.driver == "device":
        for arm in experiment.arms.values():
            if arm.needs_host:
                raise UserError(
                    f"policy {arm.name!r} looks between layers, which driver: device lacks; write "
                    "driver: auto or host"
                )
    if experiment.costs is not None and not Path(experiment.costs).is_file():
        raise UserError(f"costs: there is no file {experiment.costs}; moejax calibrate makes one")
    if "predicted" in experiment.modes and len(experiment.precision) > 1:
        raise UserError("costs are of one precision; predict one at a time")
    for precision in experiment.precision:
        with user_errors(BudgetError):
            dry_run(experiment.engine_options("device", precision, max(experiment.batch)))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise UserError(f"{name} must be text, not {shown(value)}")
    return str(value)


def _one_of(name: str, value: Any, known: Sequence[Any]) -> Any:
    if value not in known:
        written = ", ".join(str(one) for one in known if one is not None)
        raise UserError(f"{name} is one of {written}, not {shown(value)}")
    return value


def _list(name: str, value: Any, kind: type) -> tuple[Any, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    if not values or not all(isinstance(one, kind) and one for one in values):
        raise UserError(f"{name} must be a list of text, not {shown(value)}")
    if len(set(values)) < len(values):
        raise UserError(f"{name} names something twice: {shown(value)}")
    return tuple(values)


def _counts(name: str, value: Any, least: int = 1, single: bool = False) -> tuple[int, ...]:
    values = [value] if single or not isinstance(value, list | tuple) else value
    if not values or not all(is_integer(one) and one >= least for one in values):
        what = "a whole number" if single else "whole numbers such as [1, 8]"
        raise UserError(f"{name} must be {what} of at least {least}, not {shown(value)}")
    if len(set(values)) < len(values):
        raise UserError(f"{name} has a number twice: {shown(value)}")
    return tuple(values)


def _temperature(value: Any) -> float:
    if not is_number(value) or not 0 <= value <= 2:
        raise UserError(f"temperature must be from 0 to 2, not {shown(value)}")
    return float(value)


def _modes(value: Any) -> tuple[str, ...]:
    modes = _list("modes", value, str)
    for mode in modes:
        _one_of("modes", mode, MODES)
    return modes


def _budgets(value: Any) -> tuple[str, ...]:
    """Budgets as text; a number is bytes."""
    values = value if isinstance(value, list | tuple) else [value]
    for one in values:
        parse_expert_budget(one)
    found = tuple(str(one) for one in values)
    if len(set(found)) < len(found):
        raise UserError(f"budgets has one twice: {shown(value)}")
    return found


def _number(budget: str) -> int | str:
    return int(budget) if budget.isdigit() else budget


def _options(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"options must be a mapping such as dtype: float32, not {shown(value)}")
    for name in value:
        if name not in OPTIONS:
            raise UserError(
                f"options has {shown(name)}, which a grid decides or does not know; it may have "
                f"{', '.join(OPTIONS)}"
            )
    return dict(value)
