"""A grid as data: a YAML file or a mapping, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import importlib.resources
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from host_offload.control.interface import Policy
from host_offload.memory.budget import BudgetError
from host_offload.policies.budget.mv_wsa import MvWsa
from moejax.costs.hardware import is_stated
from moejax.errors import UserError, shown, user_errors
from moejax.evaluate.experiments.arms import Arm, changed_outputs, read_arm
from moejax.evaluate.experiments.policy_file import file_digest
from moejax.evaluate.experiments.sources.conversations import (
    Prices,
    SessionKind,
    read_prices,
    read_sessions,
)
from moejax.evaluate.experiments.sources.generated import GeneratedRouting, read_routing
from moejax.evaluate.experiments.sources.precisions import Mix, read_mix
from moejax.evaluate.experiments.terms import Terms
from moejax.models.json_values import is_integer, is_number, parse_yaml, read_yaml_mapping
from moejax.sizes import parse_expert_budget, parse_rate, parse_size
from moejax.start.decide.start_plan import StartPlan
from moejax.start.option_values import read_transfers
from moejax.start.options import Config, refuse_unequal
from moejax.start.provenance import files_of, weights_of
from moejax.start.report.dry_run import dry_run
from pallas_kernels.option_text import unknown
from pallas_kernels.records.format import VERSIONS

MODES = ("measured", "simulated", "predicted")

PRICED = "priced"
"""The mode of conversations: the engine's own counts, and times by stated prices."""

DRIVERS = ("device", "host")
"""The drivers that page by policies; the stream driver has none."""

MEASURED_PRICES = "measured"
"""In place of prices: the clock of conversations is the engine's own time."""

OPTIONS = (
    *("dtype", "ops", "device", "threads", "max_num_batched_tokens", "tokenizer"),
    *("step", "name_map", "transfers", "store"),
)
"""Options of LLM that a definition may give under `options`, for all of its cells."""

NO_LINK = "none"
"""The link rate of a grid without a link: experts move within steps, as fast as memory is."""

TEXTS = ("story", "math", "code")
"""Texts in the package; moejax/evaluate/experiments/texts/README.md names their sources."""

MEASURE = "measure"
"""The costs of predicted cells are measured before the first such cell, unless they are kept."""

Reader = Callable[[Any], Any]
"""Reads the value of a key. Raises ValueError with the end of a sentence: "must be …"."""


# ---- readers


def _text(value: Any) -> str:
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise ValueError(f"must be text, not {shown(value)}")
    return str(value)


def _whole(least: int = 1) -> Reader:
    def read(value: Any) -> int:
        if not is_integer(value) or value < least:
            raise ValueError(f"must be whole numbers of at least {least}, not {shown(value)}")
        return value

    return read


def _one_of(*known: str) -> Reader:
    def read(value: Any) -> str:
        if value not in known:
            raise ValueError(f"is one of {', '.join(known)}, not {shown(value)}")
        return value

    return read


def _or_none(read: Reader) -> Reader:
    return lambda value: None if value is None else read(value)


def _list_of(read: Reader) -> Reader:
    """Reads a list, or one value of it."""

    def read_all(value: Any) -> tuple[Any, ...]:
        found = tuple(map(read, value if isinstance(value, list | tuple) else [value]))
        if len(set(found)) < len(found):
            raise ValueError(f"has a value twice: {shown(value)}")
        return found

    return read_all


def _as_text(parse: Reader, *words: str) -> Reader:
    """Reads what `parse` reads, or one of the words; kept as text."""

    def read(value: Any) -> str:
        if value not in words:
            parse(value)
        return str(value)

    return read


def _temperature(value: Any) -> float:
    if not is_number(value) or not 0 <= value <= 2:
        raise ValueError(f"must be from 0 to 2, not {shown(value)}")
    return float(value)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping such as dtype: float32, not {shown(value)}")
    return dict(value)


def _options(value: Any) -> dict[str, Any]:
    found = _mapping(value)
    refuse_unequal(
        {"cache_aware_routing": found.get("cache_aware_routing")},
        "a grid's cells compare what equal outputs cost; `moejax eval` measures quality",
    )
    for name in found:
        if name not in OPTIONS:
            raise ValueError(
                f"has {shown(name)}, which a grid decides or does not know; it may have "
                f"{', '.join(OPTIONS)}"
            )
    return found


def _prices(value: Any) -> Mapping[str, float] | str:
    if value == MEASURED_PRICES:
        return value
    return vars(read_prices(_mapping(value)))


def _key(read: Reader, default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"read": read})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Definition:
    """The keys of a definition; docs/reference/grids.md says what they mean. Tuples are
    axes of the grid."""

    model: str = _key(_text, "demo")
    policies: tuple[str, ...] = _key(_list_of(_text), ())
    budgets: tuple[str, ...] = _key(_list_of(_as_text(parse_expert_budget, *VERSIONS)), ())
    precision: tuple[str, ...] = _key(_list_of(_text), ("dense",))
    driver: str = _key(_one_of("auto", *DRIVERS), "auto")
    link_rate: tuple[str, ...] = _key(_list_of(_as_text(parse_rate, NO_LINK)), (NO_LINK,))
    batch: tuple[int, ...] = _key(_list_of(_whole()), (1,))
    prompts: int | None = _key(_or_none(_whole()), None)
    train_prompts: int = _key(_whole(), 32)
    prompt_tokens: tuple[int, ...] = _key(_list_of(_whole()), (512,))
    output_tokens: int = _key(_whole(), 128)
    texts: tuple[str, ...] = _key(_list_of(_text), ("story",))
    routing: tuple[str, ...] = _key(_list_of(_text), ())
    seeds: tuple[int, ...] = _key(_list_of(_whole(0)), (0,))
    temperature: float = _key(_temperature, 1.0)
    memory: str | None = _key(_or_none(_as_text(parse_size)), None)
    conversations: tuple[str, ...] = _key(_list_of(_text), ())
    prices: Mapping[str, float] | str | None = _key(_or_none(_prices), None)
    modes: tuple[str, ...] = _key(_list_of(_one_of(*MODES)), MODES[:1])
    repeats: int = _key(_whole(), 6)
    quality_tokens: int | None = _key(_or_none(_whole(2)), None)
    baseline: str | None = _key(_or_none(_text), None)
    costs: str | None = _key(_or_none(_text), None)
    options: Mapping[str, Any] = _key(_options, None)


KEYS = {field.name: field for field in dataclasses.fields(Definition)}

MEANINGLESS: Mapping[str, Sequence[str]] = {
    "routing": (
        *("model", "texts", "precision", "prompts", "train_prompts"),
        *("quality_tokens", "options"),
    ),
    "conversations": (
        *("texts", "routing", "prompts", "train_prompts", "quality_tokens", "costs", "repeats"),
        "modes",
    ),
}
"""Keys that have no meaning beside another key."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One place of the grid; its fields are columns of the records."""

    mode: str
    """One of MODES; priced; bound, which is MIN's place; quality, of all texts together."""
    driver: str
    precision: str
    link_rate: str
    batch: int
    prompt_tokens: int
    text: str
    seed: int
    budget: str
    policy: str


Run = tuple[Cell, int]
"""A cell and its repeat. A counted cell, which is not measured, has only repeat 0."""


@dataclasses.dataclass(frozen=True)
class Group:
    """The cells of one engine, which agree in these fields."""

    driver: str
    precision: str
    link_rate: str
    batch: int
    arrays: frozenset[str]
    """Arrays that its steps output for policies; such steps are compiled apart, and slower."""
    defer: int | None = None
    """Experts of a token that a second processor may add a layer late; None: there is no second
    processor."""
    buddies: str | None = None
    """The option by which residents stand in for missing experts; None: none do."""
    budget: str | None = None
    """The budget of experts in two versions, for which each start lays out cells; None: any."""
    run: Run | None = None
    """The one run of this engine with two versions, since no contents of tables restore the layout
    of a start."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Definition):
    """A checked definition, with the objects that its names stand for."""

    home: Path
    """The directory that relative paths begin at."""
    arms: Mapping[str, Arm]
    read_arms: Mapping[str, Arm]
    """The arms before they learn. Drawn routing teaches them at each place again."""
    mixes: Mapping[str, Mix]
    """Each precision, and dense, with which other precisions learn."""
    sources: Mapping[str, Path]
    """The file of each text, by its name in cells."""
    drawn: Mapping[str, GeneratedRouting]
    """Routing without a model by name, in place of texts; empty: the grid has texts."""
    sessions: Mapping[str, tuple[SessionKind, ...]]
    """Conversations by name, in place of texts; empty: the grid has texts."""

    @property
    def learns(self) -> bool:
        """Whether a policy or a precision learns within the grid, before its runs."""
        return any(each.learns for each in (*self.arms.values(), *self.mixes.values()))

    @property
    def costs_are_stated(self) -> bool:
        """Whether `costs` names a device instead of a file."""
        return self.costs is not None and is_stated(self.costs)

    @property
    def stated_prices(self) -> Prices | None:
        """The prices of conversations; None: their times are measured."""
        return None if isinstance(self.prices, str) else Prices(**(self.prices or {}))

    @property
    def asked(self) -> dict[str, Any]:
        """What decides the records, as plain data: the definition, and digests of its files."""
        found = {name: getattr(self, name) for name in KEYS}
        found = {n: list(v) if isinstance(v, tuple) else v for n, v in found.items()}
        files = {name: file_digest(path) for name, path in self.sources.items()}
        for arm in self.arms.values():
            files |= {Path(path).name: digest for path, digest in arm.files}
        for mix in self.mixes.values():
            files |= {Path(path).name: digest for path, digest in mix.files}
        if not self.drawn:
            files |= files_of(self.options)
            weights = weights_of(self.model, self.options.get("step"))
            files |= {} if weights is None else {"weights": weights}
        return {**found, "files": dict(sorted(files.items()))}

    def arm_of(self, cell: Cell) -> Arm:
        """The cell's arm; the arm of MIN has no policies."""
        return self.arms.get(cell.policy) or Arm(cell.policy)

    def drivers(self, arm: Arm) -> tuple[str, ...]:
        """The drivers that an arm runs with. The baseline runs with every driver that another arm
        needs, since times are compared within a driver."""
        if self.driver != "auto":
            return (self.driver,)
        if arm.needs_host:
            return ("host",)
        return DRIVERS if self._needs_host and arm.name == self.baseline else ("device",)

    @property
    def _needs_host(self) -> bool:
        """Whether a policy or a precision looks between layers."""
        arms = any(each.needs_host for each in self.arms.values())
        return arms or any(self.mixes[name].needs_host for name in self.precision)

    def is_mixed(self, precision: str) -> bool:
        """Whether experts have two versions with this precision. Then each start lays out cells for
        one budget, and the precision decides what lies in them."""
        return self.mixes[precision].precision.mixed

    def cells(self) -> Iterator[Cell]:
        """Yields all places of the grid: those of one engine together, and within them those of one
        text, so that policies alternate within each repeat. With two versions of experts there is
        one policy, the baseline."""
        places = self.routing or self.conversations or tuple(self.sources)
        outer = (
            (PRICED,) if self.conversations else self.modes,
            DRIVERS,
            self.precision,
            self.link_rate,
            self.batch,
        )
        outer = *outer, self.prompt_tokens, places
        for place in itertools.product(*outer, self.seeds, self.budgets, self.policies):
            cell = Cell(*place)
            if self.is_mixed(precision := cell.precision):
                drivers = self.drivers(self.arms[str(self.baseline)])
                if self.mixes[precision].needs_host:
                    drivers = ("host",)
                if cell.policy == self.baseline and cell.driver in drivers:
                    yield cell
            elif cell.driver in self.drivers(self.arms[cell.policy]):
                yield cell

    def runs(self) -> dict[Group, list[Run]]:
        """Returns all runs, by their engine, in the order in which they run: quality and MIN of
        each place, then repeat after repeat, with alternating policies."""
        found: dict[Group, list[Run]] = {}
        extra: set[Any] = set()
        for cell in self.cells():
            mixed = self.is_mixed(cell.precision)
            repeats = self.repeats if cell.mode == "measured" else 1
            runs = [(cell, repeat) for repeat in range(repeats)]
            group, stand_in = self._group_of(cell), self.arms[cell.policy].substitutes
            bound = dataclasses.replace(cell, mode="bound", policy="MIN", driver="device")
            # Where residents stand in, the routing is no other arm's. The baseline has the bound.
            if not mixed and not stand_in and cell.mode != PRICED:
                runs += [(bound, 0)] if bound not in extra else []
                extra.add(bound)
            # No budget changes quality but that of two versions, or of what stands in.
            same = {"text": "all", "policy": cell.policy if stand_in else "any"}
            same["budget"] = cell.budget if mixed or stand_in else "any"
            scored = cell.precision, *same.values()
            if self.quality_tokens is not None and scored not in extra:
                runs.append((dataclasses.replace(cell, mode="quality", **same), 0))
            extra.add(scored)
            for run in runs:
                place = group
                if mixed and run[0].mode == "simulated":
                    place = dataclasses.replace(group, precision="dense")
                elif mixed:
                    place = dataclasses.replace(group, budget=cell.budget, run=run)
                found.setdefault(place, []).append(run)
        for runs in found.values():
            runs.sort(key=lambda run: (_ORDER.index(run[0].mode), run[1]))  # stable
        return found

    def _group_of(self, cell: Cell) -> Group:
        arm, measured = self.arms[cell.policy], cell.mode == "measured"
        arrays = arm.arrays if measured else arm.simulated_arrays
        defer = arm.placement.defer if measured and arm.placement is not None else None
        of_cell = cell.driver, cell.precision, cell.link_rate, cell.batch
        return Group(*of_cell, arrays, defer, arm.substitution)

    def engine_options(self, group: Group) -> Config:
        """Returns the options of the group's engine: for prompts of all lengths, with an arena for
        the largest budget; with two versions of experts for that budget; for conversations with
        slots that can move from experts to KV and back."""
        if self.conversations:
            # Any policy that moves the line; each run brings its own.
            moves = {"expert_budget": None, "memory": self.memory, "resize": "peak_headroom"}
            return self._options(group, 0).replace_options(**moves)
        plain = "dense" if group.budget else group.precision
        same = {"defer": None, "buddies": None}
        plan, _ = dry_run(self._options(dataclasses.replace(group, precision=plain, **same), 0))
        terms = Terms.of_plan(plan)
        if group.budget:
            return self._options(group, terms.budget_bytes(group.budget))
        arms = self.arms.values()
        slots = max(terms.slots(budget, arm) for budget in self.budgets for arm in arms)
        return self._options(group, slots * terms.slot_bytes)

    def mixed_plan(self, cell: Cell) -> StartPlan:
        """Returns the plan of a start of a cell with two versions of experts."""
        arrays: frozenset[str] = frozenset()
        of_cell = cell.precision, cell.link_rate, cell.batch, arrays
        group = Group(cell.driver, *of_cell, budget=cell.budget)
        return dry_run(self.engine_options(group))[0]

    def _options(self, group: Group, expert_bytes: int) -> Config:
        longest = max(self.prompt_tokens) + self.output_tokens
        transfers = read_transfers(self.options.get("transfers"))
        if group.link_rate != NO_LINK:
            rate = parse_rate(group.link_rate)
            transfers = dataclasses.replace(transfers, name="queue", rate=rate)
        return Config.of(
            self.model,
            driver=group.driver,
            precision=self.mixes[group.precision].precision,
            max_num_seqs=group.batch,
            max_model_len=-(-longest // 64) * 64,
            eviction="lru",
            expert_budget=expert_bytes,
            policies=self._placements(group),
            cache_aware_routing=group.buddies,
            enable_prefix_caching=False,
            progress=False,
            **{**self.options, "transfers": transfers},
        )

    def _placements(self, group: Group) -> tuple[Policy, ...]:
        """Returns a placement of the group, by which the engine gets its second processor; one that
        needs costs, if there is one, so that they are measured."""
        every = (arm.placement for arm in self.arms.values())
        ours = [one for one in every if one is not None and one.defer == group.defer]
        ours.sort(key=lambda one: "costs" not in one.needs)  # stable
        return tuple(dataclasses.replace(one, predict="") for one in ours[:1])


_ORDER = ("quality", "bound", *MODES, PRICED)


# ---- reading


def read_experiment(
    source: str | os.PathLike[str] | Mapping[str, Any],
    changes: Mapping[str, Any] | None = None,
    home: Path | None = None,
) -> Experiment:
    """Reads the experiment in a YAML file, or in a mapping of the same keys.

    - `changes`: other values of keys.
    - `home`: where a mapping's relative paths begin; None: the working directory.

    Raises UserError for any error in it, saying what to write.
    """
    where = "the definition"
    if not isinstance(source, Mapping):
        where, home = str(source), Path(source).resolve().parent
        source = read_yaml_mapping(source, "such as policies: [lru, lfu]")
    with user_errors(where=f"{where}: "):
        found = _experiment({**source, **(changes or {})}, home or Path.cwd())
        check_experiment(found)
    return found


def read_changes(texts: Sequence[str]) -> dict[str, Any]:
    """Reads keys and values of "KEY=VALUE", the value as in the YAML file. Raises UserError for
    other forms."""
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


def _experiment(given: Mapping[str, Any], home: Path) -> Experiment:
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in KEYS:
            raise UserError(unknown("key", str(name), KEYS))
        with user_errors(where=f"{name} "):
            found[name] = KEYS[name].metadata["read"](value)
    for name, example in (("policies", "[lru, lfu]"), ("budgets", '["25%", "50%"]')):
        if not found.get(name):
            raise UserError(f"{name} are missing; write {name}: {example}")
    talks, routing = found.get("conversations", ()), found.get("routing", ())
    texts = () if talks or routing else found.get("texts", KEYS["texts"].default)
    if found.get("costs") not in (None, MEASURE) and not is_stated(found["costs"]):
        found["costs"] = str(home / found["costs"])
    found["options"] = found.get("options", {})
    found["baseline"] = found.get("baseline") or found["policies"][0]
    sources = {Path(text).stem: text_path(text, home) for text in texts}
    if len(sources) < len(texts):
        raise UserError("two texts have the same name; rename one of the files")
    precision = ("dense", *found.get("precision", ()))
    arms = {name: read_arm(name, home, shared=bool(talks)) for name in found["policies"]}
    return Experiment(
        **found,
        home=home,
        arms=arms,
        read_arms=arms,
        mixes={name: read_mix(name, home) for name in precision},
        sources=sources,
        drawn={name: read_routing(name, home) for name in routing},
        sessions={name: read_sessions(name) for name in talks},
    )


def text_path(name: str, home: Path) -> Path:
    """Returns the file of a text: one of TEXTS, or a path, from `home` unless it is absolute.
    Raises UserError if there is none."""
    if name in TEXTS:
        package = importlib.resources.files("moejax.evaluate.experiments")
        return Path(str(package / "texts" / f"{name}.txt"))
    path = (home / name).resolve()
    if not path.is_file():
        raise UserError(
            f"there is no text {name!r}: write one of {', '.join(TEXTS)}, or the path of a file "
            f"(looked for {path})"
        )
    return path


# ---- what does not go together


def check_experiment(asked: Experiment) -> None:
    """Raises UserError for keys that contradict each other. Called again when policies have
    learned."""
    for one, others in MEANINGLESS.items():
        for name in others if getattr(asked, one) else ():
            if (getattr(asked, name) or KEYS[name].default) != KEYS[name].default:
                raise UserError(f"{name} has no effect beside {one}; leave one of them out")
    for is_wrong, message in _conflicts(asked):
        if is_wrong:
            raise UserError(message)
    if not asked.drawn:
        # One plan for each engine but for what policies ask of its steps.
        plain = {"run": None, "arrays": frozenset(), "defer": None, "buddies": None}
        groups = {
            dataclasses.replace(group, **plain, driver=group.driver if group.budget else DRIVERS[0])
            for group in asked.runs()
        }
        for group in sorted(groups, key=str):
            if group.batch == max(asked.batch):
                with user_errors(BudgetError):
                    plan, _ = dry_run(asked.engine_options(group))
                if not asked.is_mixed(group.precision):
                    _try_policies(asked, Terms.of_plan(plan))


def _try_policies(asked: Experiment, terms: Terms) -> None:
    """Raises UserError for a policy whose init fails at every budget, since none of its runs could
    have a result. What needs the model's routers or costs is not tried."""
    for arm in asked.arms.values():
        for policy in arm.policies:
            if not {"router", "costs"}.isdisjoint(policy.needs):
                continue
            errors = []
            for budget in asked.budgets:
                try:
                    policy.init(terms.spec_for(budget, arm, asked.seeds[0]))
                except Exception as error:
                    errors.append(error)
            if len(errors) == len(asked.budgets):
                raise UserError(
                    f"policy {arm.name!r} fails at its init at every budget: "
                    f"{type(errors[0]).__name__}: {errors[0]}"
                ) from errors[0]


def _conflicts(asked: Experiment) -> Iterator[tuple[object, str]]:
    """Yields (whether two keys contradict each other, the message)."""
    yield (
        asked.baseline not in asked.arms,
        f"baseline {asked.baseline!r} is none of the policies; write one of "
        f"{', '.join(asked.policies)}",
    )
    yield (
        asked.prompts and asked.prompts < max(asked.batch),
        f"prompts: {asked.prompts} are fewer than a batch of {max(asked.batch)}; give at least as "
        "many, which then run batch by batch",
    )
    yield (
        asked.costs not in (None, MEASURE)
        and not asked.costs_are_stated
        and not Path(str(asked.costs)).is_file(),
        f"costs: there is no file {asked.costs}; moejax calibrate makes one, and a device such as "
        "rtx4090 has stated ones",
    )
    yield (
        asked.costs_are_stated and not asked.routing,
        f"costs: those of {asked.costs} are for routing without a model; name a file",
    )
    yield (
        asked.routing and asked.link_rate != (NO_LINK,) and "predicted" not in asked.modes,
        "link_rate changes no count of a simulation; write modes: [predicted]",
    )
    yield (
        "predicted" in asked.modes and len(asked.precision) > 1,
        "costs are of one precision; predict one at a time",
    )
    yield (
        asked.conversations and asked.memory is None,
        "conversations need a memory for experts and KV; write memory: 4MiB",
    )
    yield (
        asked.conversations and len(asked.precision) * len(asked.link_rate) > 1,
        "conversations have one precision and one link_rate a grid; write one",
    )
    yield (
        asked.routing and "measured" in asked.modes,
        "routing is without a model; write modes: [simulated] or [predicted]",
    )
    yield (
        asked.routing and asked.costs == MEASURE,
        "routing is without a model, whose costs could be measured; name a file",
    )
    for name in filter(asked.is_mixed, asked.precision):
        two = f"precision {name} holds experts in two versions"
        yield (
            "predicted" in asked.modes,
            f"{two}, whose times are measured only; write modes: [measured, simulated]",
        )
        yield (
            any(policy.moments for policy in asked.arms[str(asked.baseline)].policies),
            f"{two} and says what lies where, so the baseline must be an eviction such as lru, not "
            f"{asked.baseline!r}",
        )
        yield (
            asked.driver == "device" and asked.mixes[name].needs_host,
            f"precision {name} looks between layers, which driver: device lacks; write driver: "
            "auto or host",
        )
    for arm in asked.arms.values():
        where = f"policy {arm.name!r}"
        yield (
            asked.stated_prices is None and any(isinstance(p, MvWsa) for p in arm.policies),
            f"{where} weighs experts against KV by prices; write prices, or use peak_headroom",
        )
        yield (
            asked.driver == "device" and arm.needs_host,
            f"{where} looks between layers, which driver: device lacks; write driver: auto or host",
        )
        yield (
            arm.halved and {*asked.modes} != {"predicted"},
            f"{where} has halves of experts, which are simulated with times alone; write modes: "
            "[predicted]",
        )
        changes = f"{where} changes outputs, and with them the routing, so it"
        yield (
            changed_outputs(arm.name) and {*asked.modes} != {"measured"},
            f"{changes} is measured only; write modes: [measured], or leave it out",
        )
        yield (
            arm.substitutes and (arm.knows_run or arm.name == asked.baseline),
            f"{changes} cannot be the baseline, nor know the run; name an eviction such as lru",
        )
        yield (
            arm.in_step and (asked.driver == "host" or arm.needs_host),
            f"{where} has compiled steps decide, which driver: host does not; write driver: auto, "
            "with no policy beside it that looks between layers",
        )
        yield (
            asked.conversations and (arm.needs_host or arm.learns or arm.knows_run),
            f"{where} looks between layers or learns, which conversations do not have yet; leave "
            "it out",
        )
        yield (
            arm.moves_cells and not asked.conversations and "measured" in asked.modes,
            f"{where} writes 'cells', and in a grid budgets are the grid's; write modes: "
            "[simulated] or [predicted], where it may move them, or leave it out",
        )
        for wanted in sorted(arm.simulated_arrays | arm.train_arrays):
            said = f"{where} needs {wanted}, which routing without a model lacks; give texts"
            yield asked.routing, said
