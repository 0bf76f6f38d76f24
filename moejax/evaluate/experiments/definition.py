"""A grid as data: what a YAML file or a mapping says, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from host_offload.control.interface import Spec
from host_offload.control.rules import search_of
from host_offload.memory.budget import BudgetError, Share, expert_slots_of, format_bytes
from moejax.errors import UserError, shown, user_errors
from moejax.evaluate.experiments.arms import Arm, arm_of, file_digest
from moejax.evaluate.experiments.conversations.priced import Prices, prices_of, workloads_of
from moejax.evaluate.experiments.conversations.workloads import ConversationWorkload
from moejax.evaluate.experiments.sources.corpus import PARTS, text_path
from moejax.evaluate.experiments.sources.generated import GeneratedRouting, routing_of
from moejax.evaluate.experiments.sources.mixes import Mix, is_version, mix_of
from moejax.models.directory import model_directory
from moejax.models.json_values import MOST_YAML, is_integer, is_number, parse_yaml
from moejax.sizes import parse_expert_budget, parse_rate, parse_size
from moejax.start.decide.start_plan import StartPlan
from moejax.start.option_values import read_transfers
from moejax.start.options import Config, refuse_cache_aware
from moejax.start.report.dry_run import dry_run
from pallas_kernels.option_text import unknown
from pallas_kernels.records import RecordFormat

MODES = ("measured", "simulated", "predicted", "priced")

PRICED = ("priced",)
"""The mode of conversations: the engine's own counts, and times by stated prices."""

DRIVERS = ("device", "host")
"""Those that page by policies; the stream driver has none."""

OPTIONS = (
    *("dtype", "ops", "device", "threads", "max_num_batched_tokens", "tokenizer"),
    *("step", "name_map", "transfers", "store"),
)
"""Options of LLM that a definition may give under `options`, for all of its cells."""

NO_LINK = "none"
"""A link rate: experts move within steps, as fast as memory is."""

OF_A_MODEL = (
    *("model", "texts", "precision", "link_rate", "prompts", "train_prompts", "quality_tokens"),
    *("quality_part", "options"),
)
"""What says nothing of routing without a model."""

OF_TEXTS = (
    *("texts", "routing", "prompts", "train_prompts", "quality_tokens", "quality_part", "costs"),
    "repeats",
)
"""What says nothing of conversations."""

OF_CONVERSATIONS = ("memory", "conversations", "prices")

MEASURE = "measure"
"""Costs of predicted cells: measured before the first of them where none are kept."""

PLACEMENTS = (None, "none", "gpu")
"""Where missed experts may be computed: on the device, which is what there is."""

EXPERTS, BYTES = "experts", "bytes"
"""What equal budgets are equal in where precisions differ."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One place of the grid; its fields are columns of the records."""

    mode: str
    driver: str
    precision: str
    link_rate: str
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
    link_rate: tuple[str, ...]
    batch: tuple[int, ...]
    prompts: int | None
    train_prompts: int
    prompt_tokens: tuple[int, ...]
    output_tokens: int
    texts: tuple[str, ...]
    routing: tuple[str, ...]
    seeds: tuple[int, ...]
    temperature: float
    modes: tuple[str, ...]
    repeats: int
    quality_tokens: int | None
    quality_part: str
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
    drawn: Mapping[str, GeneratedRouting]
    """Name → routing without a model, in place of texts; empty: texts it is."""
    memory: str | None
    """What experts and KV share, where there are conversations."""
    conversations: Mapping[str, tuple[ConversationWorkload, ...]]
    """Name → what is played in place of texts; empty: texts it is."""
    prices: Prices
    mixes: Mapping[str, Mix]
    """What each precision is, and dense, which others learn with."""

    @property
    def learns(self) -> bool:
        """Something of it learns within the grid, before its runs."""
        return any(each.learns for each in (*self.arms.values(), *self.mixes.values()))

    @property
    def asked(self) -> dict[str, Any]:
        """What decides the records, as plain data: the definition and digests of its files."""
        found = {name: getattr(self, name) for name in _DEFAULTS} | {"texts": self.text_names}
        if self.drawn:
            found = {name: value for name, value in found.items() if name not in OF_A_MODEL}
        if self.conversations:
            found |= {"conversations": [*self.conversations], "prices": vars(self.prices)}
            found = {name: value for name, value in found.items() if name not in OF_TEXTS}
        else:
            found = {name: value for name, value in found.items() if name not in OF_CONVERSATIONS}
        found = {n: list(v) if isinstance(v, tuple) else v for n, v in found.items()}
        files = {name: file_digest(path) for name, path in self.sources.items()}
        for arm in self.arms.values():
            files |= {Path(path).name: digest for path, digest in arm.files}
        for mix in self.mixes.values():
            files |= {path.name: file_digest(path) for path in mix.files}
        if not self.drawn:
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

    def mixed(self, precision: str) -> bool:
        """Whether experts have two versions then: cells are laid out at a start, once for each
        budget, and what lies in them is the precision's to decide."""
        return self.mixes[precision].precision.mixed

    def cells(self) -> Iterator[Cell]:
        """All places of the grid: those of one engine together, and in them those of one text, so
        that policies take turns within each repeat. With two versions of experts there is one
        policy, the baseline."""
        places = self.routing or tuple(self.conversations) or self.texts
        outer = self.modes, DRIVERS, self.precision, self.link_rate, self.batch
        outer = *outer, self.prompt_tokens, places
        for place in itertools.product(*outer, self.seeds, self.budgets, self.policies):
            cell = Cell(*place)
            if self.mixed(cell.precision):
                if (cell.policy, cell.driver) == (self.baseline, DRIVERS[0]):
                    yield cell
            elif cell.driver in self.drivers(self.arms[cell.policy]):
                yield cell

    def engine_options(
        self,
        driver: str,
        precision: str,
        batch: int,
        link_rate: str = NO_LINK,
        budget: str | None = None,
    ) -> Config:
        """Those of the engine of some cells: for prompts of all lengths, with an arena for the
        largest budget; with two versions of experts for that budget."""
        if self.mixed(precision):
            assert budget is not None
            plan, _ = dry_run(self._options(driver, "dense", batch, link_rate, 0))
            expert_bytes = GridSizes.of_plan(plan).expert_bytes(budget)
            return self._options(driver, precision, batch, link_rate, expert_bytes)
        plan, _ = dry_run(self._options(driver, precision, batch, link_rate, 0))
        sizes = GridSizes.of_plan(plan)
        slots = max(
            sizes.expert_slots(budget, arm, self.equal)
            for budget in self.budgets
            for arm in self.arms.values()
        )
        return self._options(driver, precision, batch, link_rate, slots * sizes.slot_bytes)

    def shared_options(self, batch: int) -> Config:
        """Those of the engine of conversations: slots can go from experts to KV and back."""
        options = self._options(DRIVERS[0], self.precision[0], batch, self.link_rate[0], 0)
        # Any policy that moves the line; each run brings its own.
        moves = {"expert_budget": None, "memory": self.memory, "resize": "peak_headroom"}
        return options.replaced(**moves)

    def _options(
        self, driver: str, precision: str, batch: int, link_rate: str, expert_bytes: int
    ) -> Config:
        longest = max(self.prompt_tokens) + self.output_tokens
        transfers = read_transfers(self.options.get("transfers"))
        if link_rate != NO_LINK:
            rate = parse_rate(link_rate)
            transfers = dataclasses.replace(transfers, name="queue", rate=rate)
        return Config.of(
            self.model,
            driver=driver,
            precision=self.mixes[precision].precision,
            max_num_seqs=batch,
            max_model_len=-(-longest // 64) * 64,
            eviction="lru",
            expert_budget=expert_bytes,
            enable_prefix_caching=False,
            progress=False,
            **{**self.options, "transfers": transfers},
        )


@dataclasses.dataclass(frozen=True)
class GridSizes:
    """What budgets are measured with."""

    spec: Spec
    """What policies are told."""
    slot_bytes: int
    """What an expert takes."""
    dense_bytes: int
    """What one takes that is not quantized."""
    record: RecordFormat | None
    """How one lies; None: routing without a model."""

    @classmethod
    def of_plan(cls, plan: StartPlan) -> GridSizes:
        """Those of an engine."""
        spec, layout = plan.spec, plan.steps.layout
        dense = dataclasses.replace(layout.records[0], version="dense")
        return cls(spec, layout.slot_bytes, dense.nbytes, dense)

    def version_bytes(self, version: str) -> int:
        """What all experts take in a version. Raises UserError where there is no model."""
        if self.record is None:
            raise UserError(f"budget {version} is of a model's experts; write a share or bytes")
        return self.experts * dataclasses.replace(self.record, version=version).nbytes

    def expert_bytes(self, budget: str) -> int:
        """Bytes of a budget for precisions of any kind: shares are of the dense experts'. Raises
        UserError for a budget of no expert."""
        if is_version(budget):
            return self.version_bytes(budget)
        given = parse_expert_budget(_number(budget))
        if isinstance(given, Share):
            return int(given.fraction * self.experts * self.dense_bytes)
        return given

    @property
    def experts(self) -> int:
        """In all layers."""
        return self.spec.layers * self.spec.experts

    def expert_slots(self, budget: str, arm: Arm, equal: str | None) -> int:
        """Experts that a budget holds, less what the arm learned. Raises UserError for a budget
        that holds none and is not 0."""
        if is_version(budget):
            given: int | Share = self.version_bytes(budget)
        else:
            given = parse_expert_budget(_number(budget))
        if isinstance(given, Share) and equal == BYTES:
            given = int(given.fraction * self.experts * self.dense_bytes)
        asked_for = given.fraction if isinstance(given, Share) else given
        size = self.slot_bytes
        whole = expert_slots_of(given, self.experts, size)
        if asked_for and not whole:
            percent = f'; did you mean "{given}%"?' if is_integer(given) and given <= 100 else ";"
            raise UserError(
                f"budget {budget} holds no expert: one takes {size} bytes ({format_bytes(size)})"
                f'{percent} write a share such as "25%", at least '
                f"{100 / self.experts:.3g}%, bytes of one expert or more, or 0 for none"
            )
        learned = arm.learned_bytes(self.spec)
        slots = whole - -(-learned // size)
        if slots < 0 or (asked_for and not slots):
            raise UserError(
                f"budget {budget}: what {arm.name} learned takes {learned} bytes of it "
                "and leaves no expert; raise the budget"
            )
        return slots


def read_experiment(
    source: str | os.PathLike[str] | Mapping[str, Any],
    changes: Mapping[str, Any] | None = None,
    home: Path | None = None,
) -> Experiment:
    """The experiment in a YAML file, or in a mapping of the same keys, whose paths are from `home`
    on, by default the working directory; with other values of keys in `changes`. Raises UserError
    for whatever is wrong with it, saying what to write."""
    changes = changes or {}
    if isinstance(source, Mapping):
        return _experiment({**source, **changes}, home or Path.cwd(), "the definition")
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
    return _experiment({**given, **changes}, path.resolve().parent, str(path))


def changes_of(texts: Sequence[str]) -> dict[str, Any]:
    """Keys and values of "KEY=VALUE", the value as in the YAML file. Raises UserError for what is
    written otherwise."""
    found = {}
    for text in texts:
        name, given, value = text.partition("=")
        if not given or not name:
            raise UserError(f"--set {text}: write KEY=VALUE, such as --set repeats=1")
        try:
            found[name] = parse_yaml(value)
        except ValueError as error:
            raise UserError(f"--set {text}: the value is no YAML: {error}") from error
    return found


_DEFAULTS: dict[str, Any] = {
    "model": "demo",
    "policies": None,
    "budgets": None,
    "equal": None,
    "precision": ["dense"],
    "driver": "auto",
    "link_rate": [NO_LINK],
    "batch": [1],
    "prompts": None,
    "train_prompts": 32,
    "prompt_tokens": [512],
    "output_tokens": 128,
    "texts": ["story"],
    "routing": [],
    "seeds": [0],
    "temperature": 1.0,
    "memory": None,
    "conversations": [],
    "prices": {},
    "modes": ["measured"],
    "repeats": 6,
    "quality_tokens": None,
    "quality_part": "test",
    "baseline": None,
    "costs": None,
    "options": {},
}


def _experiment(given: Mapping[str, Any], home: Path, where: str) -> Experiment:
    given = dict(given)
    _check_placement(given.pop("placement", None), where)
    for name in given:
        if name not in _DEFAULTS:
            raise UserError(f"{where}: {unknown('key', str(name), _DEFAULTS)}")
    with user_errors(where=f"{where}: "):
        found = _DEFAULTS | dict(given)
        for name, example in (("policies", "[lru, lfu]"), ("budgets", '["25%", "50%"]')):
            if not found[name]:
                raise UserError(f"{name} are missing; write {name}: {example}")
        talks = found["conversations"] and _list("conversations", found["conversations"], str)
        if talks:
            _check_talks(given)
            found |= {"modes": list(PRICED), "repeats": 1}
        texts = {}
        for text in _list("policies", found["policies"], str):
            texts[text] = arm_of(text, home, shared=bool(talks))
        precision = _list("precision", found["precision"], str)
        routing = found["routing"] and _list("routing", found["routing"], str)
        named = () if routing or talks else _list("texts", found["texts"], str)
        experiment = Experiment(
            model=_text("model", found["model"]),
            policies=tuple(texts),
            budgets=_budgets(found["budgets"]),
            equal=_one_of("equal", found["equal"], (None, EXPERTS, BYTES)),
            precision=precision,
            driver=_one_of("driver", found["driver"], ("auto", *DRIVERS)),
            link_rate=_links(found["link_rate"]),
            batch=_counts("batch", found["batch"]),
            prompts=_count_or_none("prompts", found["prompts"], 1),
            quality_tokens=_count_or_none("quality_tokens", found["quality_tokens"], 2),
            quality_part=_one_of("quality_part", found["quality_part"], tuple(PARTS)),
            train_prompts=_counts("train_prompts", found["train_prompts"], single=True)[0],
            prompt_tokens=_counts("prompt_tokens", found["prompt_tokens"]),
            output_tokens=_counts("output_tokens", found["output_tokens"], single=True)[0],
            texts=tuple(Path(t).stem for t in named),
            routing=tuple(routing),
            seeds=_counts("seeds", found["seeds"], least=0),
            temperature=_temperature(found["temperature"]),
            modes=_modes(found["modes"]),
            repeats=_counts("repeats", found["repeats"], single=True)[0],
            baseline=_text("baseline", found["baseline"] or next(iter(texts))),
            costs=_costs(found["costs"], home),
            options=_options(found["options"]),
            home=home,
            arms=texts,
            sources={Path(t).stem: text_path(t, home) for t in named},
            text_names=named,
            drawn={name: routing_of(name, home) for name in routing},
            memory=None if found["memory"] is None else str(found["memory"]),
            conversations={name: workloads_of(name) for name in talks},
            prices=prices_of(found["prices"]),
            mixes={name: mix_of(name, home) for name in ("dense", *precision)},
        )
        check_experiment(experiment, given)
    return experiment


def _check_placement(value: Any, where: str) -> None:
    """Raises UserError for any place but the device's, where nothing can be compared."""
    for one in value if isinstance(value, list | tuple) else [value]:
        if one not in PLACEMENTS:
            raise UserError(
                f"{where}: placement {shown(one)} is not compared in grids, whose missed experts "
                "the device computes; leave it out, or write placement: gpu"
            )


def check_experiment(experiment: Experiment, given: Mapping[str, Any] | None = None) -> None:
    """Raises UserError for what does not go together. given: the definition itself, None once
    policies have learned."""
    if len(experiment.sources) < len(experiment.texts):
        raise UserError("two texts have the same name; rename one of the files")
    if experiment.baseline not in experiment.arms:
        raise UserError(
            f"baseline {experiment.baseline!r} is none of the policies; write one of "
            f"{', '.join(experiment.policies)}"
        )
    if experiment.prompts is not None and experiment.prompts < max(experiment.batch):
        raise UserError(
            f"prompts: {experiment.prompts} are fewer than a batch of {max(experiment.batch)}; "
            "give at least as many, which then run batch by batch"
        )
    if PRICED[0] in experiment.modes and not experiment.conversations:
        raise UserError("modes: [priced] is of conversations; write measured, simulated, predicted")
    _check_precisions(experiment)
    _check_arms(experiment)
    if experiment.costs not in (None, MEASURE) and not Path(experiment.costs).is_file():
        raise UserError(f"costs: there is no file {experiment.costs}; moejax calibrate makes one")
    if "predicted" in experiment.modes and len(experiment.precision) > 1:
        raise UserError("costs are of one precision; predict one at a time")
    if experiment.drawn:
        _check_drawn(experiment, given or {})
        return
    batch = max(experiment.batch)
    if experiment.conversations:
        with user_errors(BudgetError):
            dry_run(experiment.shared_options(batch))
        return
    for precision in experiment.precision:
        for link in experiment.link_rate:
            for budget in experiment.budgets if experiment.mixed(precision) else (None,):
                with user_errors(BudgetError):
                    dry_run(experiment.engine_options("device", precision, batch, link, budget))


def _check_precisions(experiment: Experiment) -> None:
    shares = [b for b in experiment.budgets if b.endswith("%")]
    if len(experiment.precision) > 1 and shares and experiment.equal is None:
        raise UserError(
            f"budget {shares[0]} of several precisions can mean equal bytes or equally many "
            "experts; write equal: bytes (shares are then of the dense experts' bytes) or equal: "
            "experts"
        )
    mixed = [name for name in experiment.precision if experiment.mixed(name)]
    if mixed and experiment.modes != ("measured",):
        raise UserError(
            f"precision {mixed[0]} holds experts in two versions, which are measured only; write "
            "modes: [measured]"
        )
    if mixed and shares and experiment.equal != BYTES:
        raise UserError(
            f"precision {mixed[0]} holds experts in two versions, so budget {shares[0]} is a share "
            "of bytes; write equal: bytes"
        )
    if mixed and experiment.arms[experiment.baseline].moments:
        raise UserError(
            f"precision {mixed[0]} says what lies where, so the baseline must be an eviction such "
            f"as lru, not {experiment.baseline!r}"
        )


def _check_talks(given: Mapping[str, Any]) -> None:
    """Raises UserError for what says nothing of conversations, or is missing for them."""
    for name in given:
        if name in OF_TEXTS:
            raise UserError(f"conversations have no {name}; leave it out")
    if given.get("memory") is None:
        raise UserError("conversations need a memory for experts and KV; write memory: 4MiB")
    parse_size(str(given["memory"]))
    if given.get("modes", list(PRICED)) not in ("priced", [*PRICED]):
        raise UserError("conversations run on the engine and are priced; write modes: [priced]")
    for name in ("precision", "link_rate"):
        if len(given.get(name, [])) > 1 and not isinstance(given[name], str):
            raise UserError(f"conversations have one {name} a grid; write one")


def _check_arms(experiment: Experiment) -> None:
    for arm in experiment.arms.values():
        if experiment.driver == "device" and arm.needs_host:
            raise UserError(
                f"policy {arm.name!r} looks between layers, which driver: device lacks; write "
                "driver: auto or host"
            )
        # What has to learn first has no policies yet.
        in_step = search_of(arm.policies) is not None or "expert_map_in_step" in arm.learns
        if in_step and (experiment.driver == "host" or arm.needs_host):
            raise UserError(
                f"policy {arm.name!r} has compiled steps decide, which driver: host does not; "
                "write driver: auto, with no policy beside it that looks between layers"
            )
        if experiment.conversations:
            if arm.needs_host or arm.learns or arm.oracle is not None:
                raise UserError(
                    f"policy {arm.name!r} looks between layers or learns, which conversations do "
                    "not have yet; leave it out"
                )
            continue
        if arm.moves_cells and "measured" in experiment.modes:
            raise UserError(
                f"policy {arm.name!r} writes 'cells', and in a grid budgets are the grid's; write "
                "modes: [simulated] or [predicted], where it may move them, or leave it out"
            )


def _check_drawn(experiment: Experiment, given: Mapping[str, Any]) -> None:
    for name in OF_A_MODEL:
        if name in given:
            raise UserError(f"routing is without a model, so {name} say nothing; leave them out")
    if experiment.costs == MEASURE:
        raise UserError("routing is without a model, whose costs could be measured; name a file")
    if "measured" in experiment.modes:
        raise UserError("routing is without a model; write modes: [simulated] or [predicted]")
    for arm in experiment.arms.values():
        if wanted := sorted(arm.simulated_arrays | arm.train_arrays):
            raise UserError(
                f"policy {arm.name!r} needs {wanted[0]}, which routing without a model lacks; "
                "give texts"
            )


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


def _count_or_none(name: str, value: Any, least: int) -> int | None:
    return None if value is None else _counts(name, value, least, single=True)[0]


def _costs(value: Any, home: Path) -> str | None:
    return value if value in (None, MEASURE) else str(home / _text("costs", value))


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
        if not is_version(str(one)):
            parse_expert_budget(one)
    found = tuple(str(one) for one in values)
    if len(set(found)) < len(found):
        raise UserError(f"budgets has one twice: {shown(value)}")
    return found


def _links(value: Any) -> tuple[str, ...]:
    """Rates as text."""
    values = tuple(str(one) for one in (value if isinstance(value, list | tuple) else [value]))
    for one in values:
        if one != NO_LINK:
            parse_rate(one)
    if not values or len(set(values)) < len(values):
        raise UserError(f"link_rate is a list such as [none, 2GB/s], not {shown(value)}")
    return values


def _number(budget: str) -> int | str:
    return int(budget) if budget.isdigit() else budget


def _options(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"options must be a mapping such as dtype: float32, not {shown(value)}")
    refuse_cache_aware(
        value.get("cache_aware_routing"),
        "a grid's cells compare what equal outputs cost; `moejax eval` measures quality",
    )
    for name in value:
        if name not in OPTIONS:
            raise UserError(
                f"options has {shown(name)}, which a grid decides or does not know; it may have "
                f"{', '.join(OPTIONS)}"
            )
    return dict(value)
