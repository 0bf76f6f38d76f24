"""Checks policies before they run, and the decisions that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from host_offload.control.interface import (
    ALWAYS,
    NEEDS,
    WRITES,
    Decision,
    MapRows,
    MapSearch,
    Moment,
    Policy,
    Spec,
    Stage,
    Stages,
    Transition,
)
from host_offload.control.step_record import SEEN, LayerRouting, StepRows
from pallas_kernels.plan.victim import MAX_PRIOR, MAX_WEIGHT


class PolicyError(ValueError):
    """A policy that cannot run, or a decision that cannot be carried out; names the policy."""


_ROUTED = frozenset({Moment.ROUTED, Moment.EXPERTS_BEGIN})
_EMBEDDED = _ROUTED | {Moment.EMBEDDED, Moment.LAYER_BEGIN}
BETWEEN_LAYERS = _EMBEDDED | {Moment.TRANSFER}
STEP_READ = frozenset({Moment.STEP_END, Moment.INTERVAL, Moment.TURN_END})

MOMENTS: Mapping[str, frozenset[Moment]] = {
    "device": frozenset(Moment) - BETWEEN_LAYERS,
    "host": frozenset(Moment),
    "stream": frozenset(),
}
"""The moments of each driver."""

OF_LAYER = ("execute", "load_order")
"""Fields of a Decision on one layer's active experts, set between its routing and its experts."""

_IN_STEP = {
    **{seen: _EMBEDDED for seen, field in SEEN.items() if field in StepRows._fields},
    **{seen: _ROUTED for seen, field in SEEN.items() if field in LayerRouting._fields},
    "counts": _ROUTED,
}
"""The moments inside a step at which fields of an Observation are known, by field."""


def moments_with(field: str) -> frozenset[Moment]:
    """Returns the moments at which an Observation can have the field."""
    if field in _IN_STEP:
        return STEP_READ | _IN_STEP[field]
    if field == "kv_refs":
        return frozenset({Moment.TURN_END})
    return STEP_READ if field in SEEN else frozenset(Moment)


def wants_pool(policy: Any) -> bool:
    """Whether a policy wants the cells of all layers in one pool (its attribute `pool`)."""
    return bool(getattr(policy, "pool", False))


def check_pool(policies: Sequence[Policy], spec: Spec) -> None:
    """Raises PolicyError for policies that cannot run if all cells are one pool."""
    refuse_writes(policies, ("cells",), "cells are of one pool, no layer's own; leave one out")
    if len(spec.version_bytes) > 1 or spec.resident is not None:
        who = next(name_of(policy) for policy in policies if wants_pool(policy))
        raise PolicyError(
            f"policy {who} wants cells of one pool, which hold one version of the experts; leave "
            "out precision, or the pool"
        )


def search_of(policies: Sequence[Policy]) -> MapSearch | None:
    """Returns the search of expert maps that a policy has in its attribute `search`; None if no
    policy has one. At most one policy writes `map_rows`."""
    found = (getattr(policy, "search", None) for policy in policies)
    return next((search for search in found if search is not None), None)


def check_search(policies: Sequence[Policy], driver: str, versions: int = 1) -> None:
    """Raises PolicyError for a policy with a `search` that the steps cannot run.

    - `versions`: number of versions of the experts.
    """
    for policy in policies:
        if search_of([policy]) is None:
            continue
        who = f"policy {name_of(policy)} has steps search expert maps themselves"
        if driver != "device":
            raise PolicyError(
                f"{who}, which driver={driver!r} does not; use driver='device', or "
                "prefetch='expert_map' with driver='host'"
            )
        if versions > 1:
            raise PolicyError(f"{who}, which fetch one version of the experts; leave out precision")


def name_of(policy: Any) -> str:
    """Returns the name of a policy's class, or of the policy that it repeats
    (policies.recorded)."""
    return getattr(policy, "policy_name", type(policy).__name__)


def check_policies(policies: Sequence[Policy], driver: str) -> None:
    """Raises PolicyError for policies that cannot run, before anything is loaded.

    It refuses a policy that is not a frozen dataclass, an unknown driver, a moment that the driver
    does not have, unknown names in `needs` or `writes`, a need that none of the policy's moments
    gives, and two policies that write one field.
    """
    if driver not in MOMENTS:
        raise PolicyError(f"unknown driver {driver!r}; known: {', '.join(MOMENTS)}")
    writers: dict[str, str] = {}
    for policy in policies:
        name = check_form(policy)
        _check_names(name, "needs", policy.needs, NEEDS, ALWAYS)
        _check_names(name, "writes", policy.writes, WRITES)
        if not policy.moments and policy.writes - {"victim_weights"}:
            raise PolicyError(
                f"policy {name} writes {', '.join(sorted(policy.writes))} but has no moments, so "
                f"it is never asked; name some, such as Moment.STEP_END"
            )
        for moment in sorted(policy.moments - MOMENTS[driver]):
            can = " or ".join(f"driver={d!r}" for d in MOMENTS if moment in MOMENTS[d])
            raise PolicyError(
                f"policy {name} asks for {moment.name}, which driver={driver!r} lacks; {can} has it"
            )
        for field in sorted(policy.needs):
            given = moments_with(field)
            if policy.moments and not given & policy.moments:
                has = sorted(given & MOMENTS[driver])
                add = f"add one of {', '.join(m.name for m in has)}"
                other = f"driver={driver!r} has none that does; driver='host' has"
                raise PolicyError(
                    f"policy {name} needs {field!r}, which its moments do not have; "
                    f"{add if has else other}"
                )
        for field in sorted(policy.writes - {"note"}):  # each policy's own
            if field in writers:
                raise PolicyError(
                    f"policies {writers[field]} and {name} both write {field!r}; leave one out"
                )
            writers[field] = name
        if wants_pool(policy) and driver != "host":
            raise PolicyError(
                f"policy {name} wants the cells of all layers in one pool, and cells go from layer "
                f"to layer between layers, which driver={driver!r} lacks; driver='host' has it"
            )
        interval = getattr(policy, "interval", None)
        if (Moment.INTERVAL in policy.moments) != (interval is not None):
            raise PolicyError(
                f"policy {name}: the moment INTERVAL and the attribute `interval`, such as "
                f"'4096 tokens', go together"
            )
        if interval is not None:
            parse_interval(interval, name)
        if (of_layer := policy.writes & {*OF_LAYER}) and not policy.moments & _ROUTED:
            raise PolicyError(
                f"policy {name} writes {min(of_layer)!r}, of a layer's experts; add one of ROUTED, "
                "EXPERTS_BEGIN to its moments"
            )
        weights = getattr(policy, "victim_weights", None)
        if weights is not None:
            if "victim_weights" not in policy.writes:
                raise PolicyError(f"policy {name} has victim_weights, which its `writes` lacks")
            check_decision(Decision(victim_weights=np.asarray(weights)), policy, None, "start")


def check_form(policy: Any) -> str:
    """Returns the policy's name. Raises PolicyError unless it is a frozen dataclass with the
    members of the interface."""
    if isinstance(policy, type):
        raise PolicyError(f"{policy.__name__} is a class; give an object, {policy.__name__}()")
    name, params = name_of(policy), getattr(policy, "__dataclass_params__", None)
    if params is None or not params.frozen:
        raise PolicyError(
            f"policy {name} must be decorated with @dataclasses.dataclass(frozen=True)"
        )
    missing = [
        part
        for part in ("moments", "needs", "writes", "init", "decide")
        if not hasattr(policy, part)
    ]
    if missing:
        raise PolicyError(f"policy {name} lacks {', '.join(missing)}")
    for part in ("moments", "needs", "writes"):
        if not isinstance(getattr(policy, part), frozenset):
            raise PolicyError(f"policy {name}: {part} must be a frozenset")
    if wrong := [m for m in policy.moments if not isinstance(m, Moment)]:
        raise PolicyError(
            f"policy {name}: {wrong[0]!r} is no Moment; known: {', '.join(m.name for m in Moment)}"
        )
    return name


def _check_names(
    policy: str,
    part: str,
    names: frozenset[str],
    known: frozenset[str],
    always: frozenset[str] = frozenset(),
) -> None:
    for name in sorted(names, key=str):
        if name in always:
            raise PolicyError(f"policy {policy}: {name!r} is always given; take it out of {part}")
        if name not in known:
            raise PolicyError(
                f"policy {policy}: unknown name {name!r} in {part}; known: "
                f"{', '.join(sorted(known))}"
            )


def refuse_writes(policies: Sequence[Policy], fields: Sequence[str], why: str) -> None:
    """Raises PolicyError for a policy that writes one of the fields.

    - `why`: end of the message, after the policy and the field.
    """
    for policy in policies:
        for field in fields:
            if field in policy.writes:
                raise PolicyError(f"policy {name_of(policy)} writes {field!r}, and {why}")


_UNITS = ("steps", "tokens", "seconds")


def parse_interval(text: str, policy: str) -> tuple[float, str]:
    """Parses "4096 tokens", "16 steps" or "0.5 seconds" into (count, unit). Raises PolicyError for
    another text."""
    number, _, unit = str(text).partition(" ")
    try:
        count = float(number)
    except ValueError:
        count = 0.0
    whole = unit == "seconds" or count.is_integer()
    if unit not in _UNITS or not 0 < count < float("inf") or not whole:
        raise PolicyError(
            f"policy {policy}: interval {text!r} is not a number of {', '.join(_UNITS)}, such as "
            f"'4096 tokens'"
        )
    return count, unit


def check_decision(decision: Any, policy: Policy, spec: Spec | None, when: str) -> Decision:
    """Checks a decision. Returns it with arrays of the interface's dtypes, and without duplicates.

    - `spec`: None checks only fields that need no spec.
    - `when`: moment for messages, such as "STEP_END of step 7".

    Raises PolicyError for a field that the policy does not write, a wrong type or shape, and a
    value out of range.
    """
    name = name_of(policy)

    def refuse(text: str) -> PolicyError:
        return PolicyError(f"policy {name} at {when}: {text}")

    if not isinstance(decision, Decision):
        raise refuse(f"decide must return (state, Decision), not {type(decision).__name__}")
    set_fields = {field: value for field, value in vars(decision).items() if value is not None}
    if unsaid := sorted(set_fields.keys() - policy.writes):
        raise refuse(f"it set {unsaid[0]!r}, which its `writes` lacks")
    if not set_fields:
        return decision
    found = object.__new__(Decision)  # setting each field of a frozen dataclass takes longer
    found.__dict__.update(vars(decision))
    for field, value in set_fields.items():
        found.__dict__[field] = _CHECKS[field](
            value, spec, lambda text, f=field: refuse(f"{f} {text}")
        )
    return found


Refuse = Callable[[str], PolicyError]


def _array(
    value: Any, shape: tuple[int, ...], low: int, high: int, dtype: type, refuse: Refuse
) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "iu" or array.shape != shape:
        raise refuse(f"must be {dtype.__name__}{list(shape)}, not {array.dtype}{list(array.shape)}")
    if array.size and not (low <= array.min() and array.max() <= high):
        raise refuse(f"must lie in {low}…{high}, not {array.min()}…{array.max()}")
    return array.astype(dtype)


def _victim_weights(value: Any, spec: Spec | None, refuse: Refuse) -> np.ndarray:
    return _array(value, (3,), -MAX_WEIGHT, MAX_WEIGHT, np.int32, refuse)


def _prior(value: Any, spec: Spec, refuse: Refuse) -> np.ndarray:
    shape = spec.layers, spec.experts
    return _array(value, shape, -MAX_PRIOR, MAX_PRIOR, np.int32, refuse)


def _fill_version(value: Any, spec: Spec, refuse: Refuse) -> np.ndarray:
    shape = spec.layers, spec.experts
    versions = len(spec.version_bytes)
    found = _array(value, shape, -versions, versions - 1, np.int8, refuse)
    last = np.where(found >= 0, versions - 1, -versions).astype(np.int8)
    return np.where(spec.has_all_versions[:, None], found, last)


def _cells(value: Any, spec: Spec, refuse: Refuse) -> np.ndarray:
    cells = _array(value, (spec.layers,), 0, spec.cell_bound, np.int32, refuse)
    if np.any(cells < spec.min_cells):
        raise refuse(f"is below min_cells in layer {int(np.argmax(cells < spec.min_cells))}")
    smallest = np.min(list(spec.version_bytes.values()), axis=0)
    room = spec.budget_bytes - spec.kv_floor_bytes
    if (wanted := int(cells @ smallest)) > room:
        raise refuse(f"takes {wanted} bytes; the arena less the least KV has {room}")
    return cells


def _kv_pages(value: Any, spec: Spec, refuse: Refuse) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise refuse(f"must be an integer, not {value!r}")
    least, most = -(-spec.kv_floor_bytes // spec.page_bytes), spec.budget_bytes // spec.page_bytes
    if not least <= value <= most:
        raise refuse(f"must lie in {least}…{most}, not {value}")
    return int(value)


def _max_running(value: Any, spec: Spec, refuse: Refuse) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise refuse(f"must be an integer of at least 1, not {value!r}")
    return int(value)


def _pause(value: Any, spec: Spec, refuse: Refuse) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise refuse(f"must be True or False, not {value!r}")
    return bool(value)


def _note(value: Any, spec: Spec | None, refuse: Refuse) -> str:
    if not isinstance(value, str) or "\n" in value:
        raise refuse(f"must be one line of text, not {value!r}")
    return value


def _of_active(most: int, dtype: type) -> Callable[[Any, Spec, Refuse], np.ndarray]:
    """Returns the check of a field with a value from 0 to `most` for each active expert."""
    return lambda value, _, refuse: _array(value, np.shape(value)[:1], 0, most, dtype, refuse)


def gives_away(policies: Sequence[Policy]) -> bool:
    """Whether a policy gives missed experts to a second processor."""
    return any("execute" in policy.writes for policy in policies)


def check_second_processor(policies: Sequence[Policy], spec: Spec) -> None:
    """Raises PolicyError for a policy that gives experts away if there is no second processor."""
    if not spec.second_processor:
        refuse_writes(policies, OF_LAYER, "there is no second processor; name a placement")


def _queue(kind: type) -> Callable[[Any, Spec, Refuse], tuple]:
    def check(value: Any, spec: Spec, refuse: Refuse) -> tuple:
        if not isinstance(value, tuple | list) or isinstance(value, kind):
            raise refuse(f"must be a tuple of {kind.__name__}, not {type(value).__name__}")
        limits = spec.layers, spec.experts, len(spec.version_bytes)
        if isinstance(value, Stages):
            if kind is Stage and _fits(value.columns, limits):
                return value
        elif _is_plain(value, kind, limits):
            return tuple(value)
        entries: dict[tuple[int, int], Any] = {}
        for entry in value:
            if not isinstance(entry, kind):
                raise refuse(f"has {entry!r}, which is no {kind.__name__}")
            # Plain integers, because numpy's would make events unfit for JSON.
            layer, expert, version = (_index(x, refuse) for x in entry[:3])
            place = layer, expert, version
            for x, limit, what in zip(place, limits, ("layer", "expert", "version"), strict=True):
                if not 0 <= x < limit:
                    raise refuse(f"has {what} {x}, which must lie in 0…{limit - 1}")
            if kind is Stage and not isinstance(entry[3], str):
                raise refuse(f"has the cause {entry[3]!r}, which must be a string")
            # The first one named has the priority.
            entries.setdefault((layer, expert), kind(*place, *entry[3:]))
        return tuple(entries.values())

    return check


_of_versions = _queue(Transition)


def _transitions(value: Any, spec: Spec, refuse: Refuse) -> tuple:
    has_all_versions = spec.has_all_versions
    return tuple(
        entry for entry in _of_versions(value, spec, refuse) if has_all_versions[entry.layer]
    )


def _fits(columns: np.ndarray, limits: tuple[int, int, int]) -> bool:
    """Whether layers, experts and versions int[n, 3] lie in the limits and no expert is twice."""
    if not len(columns):
        return True
    inside = columns.min() >= 0 and (columns.max(axis=0) < limits).all()
    places = columns[:, 0] * limits[1] + columns[:, 1]
    return bool(inside) and len({*places.tolist()}) == len(columns)


def _is_plain(queue: Sequence, kind: type, limits: tuple[int, int, int]) -> bool:
    """Whether a queue is valid as it is, tested without a loop over thousands of entries."""
    if set(map(type, queue)) != {kind}:
        return False
    layers, experts, _ = columns = [[entry[i] for entry in queue] for i in range(3)]
    return (
        set().union(*(map(type, column) for column in columns)) == {int}
        and min(map(min, columns)) >= 0
        and all(max(c) < limit for c, limit in zip(columns, limits, strict=True))
        and (kind is not Stage or {type(entry.cause) for entry in queue} == {str})
        and len(set(zip(layers, experts, strict=True))) == len(queue)
    )


def _index(value: Any, refuse: Refuse) -> int:
    if not isinstance(value, int | np.integer):
        raise refuse(f"has {value!r} where an integer belongs")
    return int(value)


def _map_rows(value: Any, spec: Spec, refuse: Refuse) -> MapRows:
    if not isinstance(value, MapRows):
        raise refuse(f"must be a MapRows, not {type(value).__name__}")
    n = len(value.place)
    shapes = (n,), (n, spec.hidden), (n, spec.layers, spec.experts)
    if tuple(part.shape for part in value) != shapes:
        raise refuse(f"must be of shapes {shapes}, not {tuple(part.shape for part in value)}")
    place, embeddings, maps = value
    if len(np.unique(place)) < n or (n and place.min() < 0):
        raise refuse("names a place twice, or one below 0")
    return MapRows(place.astype(np.int32), embeddings.astype(np.float16), maps.astype(np.float16))


_CHECKS: dict[str, Callable[..., Any]] = {
    "map_rows": _map_rows,
    "note": _note,
    "victim_weights": _victim_weights,
    "prior": _prior,
    "fill_version": _fill_version,
    "stages": _queue(Stage),
    "transitions": _transitions,
    "pause_stages": _pause,
    "cells": _cells,
    "kv_pages": _kv_pages,
    "max_running": _max_running,
    "execute": _of_active(1, np.int8),
    "load_order": _of_active(np.iinfo(np.int16).max, np.int16),
}
