"""Declarative maps from another program's parameter tree to transformers' tensor names.

docs/how-to/checkpoints.md describes the format. A rule names leaves of the tree, how their axes are
rearranged (in einops' notation, Rogozhnikov 2022) and the tensors that they hold.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import importlib.resources
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from moejax.checkpoints.orbax.tree import MOST_NAME, Tree
from moejax.errors import UserError, shown
from moejax.models.directory import read_bounded
from moejax.models.json_values import MOST_YAML, is_number, parse_json, parse_yaml

_SHIPPED = importlib.resources.files("moejax.checkpoints.foreign") / "name_maps"
_FIELDS = ("item", "root", "ignore", "config", "rules")
_RULE_FIELDS = ("leaf", "tensor", "axes", "values", "sizes", "scale", "crop", "optional")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PLACEHOLDER = re.compile(
    r"\{([A-Za-z_]\w*)(?:\*(\d{1,9}|[A-Za-z_]\w*))?(?:\+(\d{1,9}|[A-Za-z_]\w*))?\}", re.ASCII
)
_SCALE = re.compile(r"(1/)?sqrt\((\w+)\)", re.ASCII)
_LARGEST = 1e30
"""The largest scale; a larger one would make float32 weights infinite."""
_SHOWN, _COMPARED = 5, 300
"""Names shown in a message, and names that each of them is compared with to find the nearest."""
_MOST_TRIES = 10_000_000
"""Most matches of a pattern with a path, which take a few seconds."""
MOST_RULES, MOST_ROOTS = 500, 8
"""Most rules and roots of a map. Its texts have at most MOST_NAME characters."""

Groups = tuple[tuple[str, ...], ...]
"""A tuple of axis names for each axis of an array. Several names share one axis of the array, and
the last varies fastest."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule of a name map: how some leaves become tensors.

    - `leaf`: a path pattern with {name} for numbers.
    - `tensors`: name patterns. Several tensors lie one after another along the first axis of the
      result.
    - `before`, `after`: the axes of leaf and result; None: the leaf is not rearranged.
    - `values`: axis → the name that each of its indices stands for.
    - `sizes`: axis → its size, a number or a config field.
    - `scale`: the factor, a number, "sqrt(field)" or "1/sqrt(field)".
    - `crop`: cut each axis of the result to the config's size.
    - `optional`: the rule may match no leaf.
    """

    leaf: str
    tensors: tuple[str, ...]
    before: Groups | None = None
    after: Groups | None = None
    values: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    sizes: dict[str, int | str] = dataclasses.field(default_factory=dict)
    scale: float | str | None = None
    crop: bool = False
    optional: bool = False

    @property
    def unstacked(self) -> tuple[str, ...]:
        """The axes of the leaf that the result lacks: each of their indices is another tensor."""
        left = () if self.before is None else tuple(name for g in self.before for name in g)
        kept = {name for group in self.after or () for name in group}
        return tuple(name for name in left if name not in kept)


@dataclasses.dataclass(frozen=True)
class NameMap:
    """A parsed name map.

    - `source`: the file's name, for messages.
    - `rules`: how leaves become tensors.
    - `items`: names of the item that holds the tree. The first that a step has is used; without
      names, a step's only item is.
    - `roots`: paths above the rules' leaves. The first with a matching leaf below it is used.
    - `ignore`: patterns of paths, from the tree's top, of leaves that are no weights.
    - `config`: the fields of config.json, if the map has them.
    """

    source: str
    rules: tuple[Rule, ...]
    items: tuple[str, ...] = ()
    roots: tuple[str, ...] = ("",)
    ignore: tuple[str, ...] = ()
    config: dict[str, Any] | None = None


def shipped_maps() -> tuple[str, ...]:
    """The names of the maps that moejax ships."""
    return tuple(sorted(f.name[:-5] for f in _SHIPPED.iterdir() if f.name.endswith(".yaml")))


def load_name_map(name_map: str | os.PathLike[str]) -> NameMap:
    """Reads a name map.

    - `name_map`: a .yaml, .yml or .json file, or the name of a shipped map.

    Raises UserError that names file, rule and field.
    """
    shipped = shipped_maps()
    if str(name_map) in shipped:
        text = (_SHIPPED / f"{name_map}.yaml").read_text("utf-8")
        return parse_name_map(parse_yaml(text), str(name_map))
    path = pathlib.Path(name_map).expanduser()
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise UserError(
            f"{name_map}: no name map; give a .yaml, .yml or .json file, or a map of the package: "
            f"{', '.join(shipped)}"
        )
    try:
        text = read_bounded(path, MOST_YAML, "a name map").decode("utf-8")
        raw = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except FileNotFoundError:
        raise UserError(f"{path}: no such name map; the package has {', '.join(shipped)}") from None
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a name map: {error}") from None
    return parse_name_map(raw, str(path))


def parse_name_map(raw: Any, source: str = "name map") -> NameMap:
    """Checks a parsed file and makes a NameMap of it.

    - `raw`: the file's content, as JSON or YAML parses it.
    - `source`: the file's name, for messages.

    Raises UserError that names rule and field.
    """
    _check_fields(raw, _FIELDS, source)
    rules = raw.get("rules")
    if not isinstance(rules, list) or not rules:
        raise UserError(f"{source}: rules must be a list of rules")
    if len(rules) > MOST_RULES:
        raise UserError(f"{source}: {len(rules)} rules; at most {MOST_RULES}")
    config = raw.get("config")
    if config is not None and not isinstance(config, dict):
        raise UserError(f"{source}: config must be an object of config.json's fields")
    return NameMap(
        source,
        tuple(_rule(rule, f"{source}: rule {i}") for i, rule in enumerate(rules, 1)),
        _texts(raw, "item", source),
        tuple(root.strip("/") for root in _texts(raw, "root", source, MOST_ROOTS)) or ("",),
        _texts(raw, "ignore", source),
        config,
    )


def _rule(raw: Any, where: str) -> Rule:
    _check_fields(raw, _RULE_FIELDS, where)
    leaf = raw.get("leaf")
    if not isinstance(leaf, str) or not 0 < len(leaf) <= MOST_NAME:
        raise UserError(f"{where}: leaf must be a path such as decoder/norm/scale")
    where = f"{where} ({leaf})"
    tensors = _texts(raw, "tensor", where)
    if not tensors:
        raise UserError(f"{where}: tensor must be a name or a list of names")
    before, after = _axes(raw["axes"], where) if "axes" in raw else (None, None)
    scale = raw.get("scale")
    named = isinstance(scale, str) and _SCALE.fullmatch(scale)
    if not (scale is None or named or (is_number(scale) and abs(scale) <= _LARGEST)):
        raise UserError(
            f"{where}: scale must be a number up to {_LARGEST:g}, sqrt(field) or 1/sqrt(field)"
        )
    for flag in ("crop", "optional"):
        if not isinstance(raw.get(flag, False), bool):
            raise UserError(f"{where}: {flag} must be true or false")
    rule = Rule(
        leaf,
        tensors,
        before,
        after,
        {axis: tuple(names) for axis, names in _object(raw, "values", list, where).items()},
        _object(raw, "sizes", int | str, where),
        scale,
        raw.get("crop", False),
        raw.get("optional", False),
    )
    _check_names(rule, where)
    return rule


def _check_names(rule: Rule, where: str) -> None:
    captured = [m[1] for m in _PLACEHOLDER.finditer(rule.leaf)]
    known = {*captured, *rule.unstacked}
    if len(known) != len(captured) + len(rule.unstacked):
        raise UserError(f"{where}: a name stands for two axes or numbers")
    if re.search(r"\}[\d{]", rule.leaf):
        raise UserError(
            f"{where}: a digit follows a number in braces, so where the number ends is ambiguous"
        )
    if any(m[2] or m[3] for m in _PLACEHOLDER.finditer(rule.leaf)):
        raise UserError(f"{where}: arithmetic belongs into tensor, not into leaf")
    for tensor in rule.tensors:
        used = {m[1] for m in _PLACEHOLDER.finditer(tensor)}
        if used != known:
            raise UserError(
                f"{where}: tensor {tensor} must name {_braces(known)}, and it names {_braces(used)}"
            )
    axes = {name for group in rule.before or () for name in group}
    for name in rule.sizes:
        if name not in axes:
            raise UserError(f"{where}: sizes names {name}, which is no axis of the leaf")
    for name in rule.values:
        if name not in rule.unstacked:
            raise UserError(f"{where}: values names {name}, which is no axis that tensor names")


def _braces(names: set[str]) -> str:
    return " and ".join(sorted("{" + name + "}" for name in names)) or "nothing in braces"


def _axes(text: Any, where: str) -> tuple[Groups, Groups]:
    """Parses text such as "layer in head dim -> (head dim) in". Returns the axes of the leaf and of
    the result. Raises UserError."""
    example = 'axes must be text like "in layer head dim -> (head dim) in"'
    sides = text.split("->") if isinstance(text, str) and len(text) <= MOST_NAME else []
    if len(sides) != 2:
        raise UserError(f"{where}: {example}, not {shown(text)}")
    groups: list[Groups] = []
    for side in sides:
        tokens = re.findall(r"\([^()]*\)|[^\s()]+|[()]", side)
        parsed = tuple(tuple(token.strip("()").split()) for token in tokens)
        names = [name for group in parsed for name in group]
        if not all(parsed) or not all(_NAME.fullmatch(name) for name in names):
            raise UserError(f"{where}: {example}, not {shown(text)}")
        if len(set(names)) != len(names):
            raise UserError(f"{where}: an axis is named twice in {side.strip()!r}")
        groups.append(parsed)
    before, after = groups
    extra = {n for g in after for n in g} - {n for g in before for n in g}
    if extra:
        raise UserError(f"{where}: axis {sorted(extra)[0]} of the result is not in the leaf")
    return before, after


def _check_fields(raw: Any, known: tuple[str, ...], where: str) -> None:
    if not isinstance(raw, dict):
        raise UserError(f"{where}: expected an object, found {type(raw).__name__}")
    for field in raw:
        if field not in known:
            raise UserError(f"{where}: unknown field {shown(field)}; known: {', '.join(known)}")


def _texts(raw: dict[str, Any], field: str, where: str, most: int = MOST_RULES) -> tuple[str, ...]:
    value = raw.get(field, [])
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise UserError(f"{where}: {field} must be text or a list of texts")
    if len(value) > most or any(len(text) > MOST_NAME for text in value):
        raise UserError(
            f"{where}: {field} may be {most} texts, each of at most {MOST_NAME} characters"
        )
    return tuple(value)


def _object(raw: dict[str, Any], field: str, kind: Any, where: str) -> dict[str, Any]:
    def fits(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        return 0 < value < 1 << 53 if isinstance(value, int) else bool(value)

    value = raw.get(field, {})
    if not isinstance(value, dict) or not all(
        isinstance(axis, str) and fits(item) for axis, item in value.items()
    ):
        raise UserError(f"{where}: {field} must be an object from axes to their {field}")
    if kind is list and not all(isinstance(n, str) for names in value.values() for n in names):
        raise UserError(f"{where}: {field} must be lists of names")
    return value


def leaf_pattern(pattern: str) -> re.Pattern[str]:
    """A rule's leaf as a regular expression with a group for each number. It also matches with
    "/value" at the end, which NNX puts below each variable."""
    parts = re.split(r"\{([A-Za-z_]\w*)\}", pattern, flags=re.ASCII)
    # No digit follows a number, so "++" takes all of its digits, and a failed match never
    # backtracks.
    text = "".join(
        rf"(?P<{part}>\d++)" if number % 2 else re.escape(part) for number, part in enumerate(parts)
    )
    return re.compile(text + "(?:/value)?", re.ASCII)


def ignore_pattern(pattern: str) -> re.Pattern[str]:
    """A regular expression for paths from the tree's top, in which * is any text. The expressions
    of fnmatch never take exponential time."""
    return re.compile(fnmatch.translate(pattern.replace("[", "[[]").replace("?", "[?]")))


def tensor_name(pattern: str, numbers: dict[str, int | str], field: Any) -> str:
    """Fills in the placeholders of a tensor's pattern.

    - `numbers`: placeholder → its number, or its text for an axis with values.
    - `field`: returns the integer of a config field.

    Raises UserError for arithmetic on text.
    """

    def fill(match: re.Match[str]) -> str:
        value = numbers[match[1]]
        if not (match[2] or match[3]):
            return str(value)
        if isinstance(value, str):
            raise UserError(f"tensor {pattern}: {match[1]} has names, so {match[0]} is no number")
        factor, offset = (
            default if text is None else int(text) if text.isdigit() else field(text)
            for text, default in ((match[2], 1), (match[3], 0))
        )
        return str(value * factor + offset)

    return _PLACEHOLDER.sub(fill, pattern)


def scale_factor(scale: float | str | None, field: Any) -> float | None:
    """The number of a rule's scale; None without one.

    - `field`: returns the integer of a config field.

    Raises UserError for a root of 0.
    """
    if not isinstance(scale, str):
        return scale
    match = _SCALE.fullmatch(scale)
    assert match is not None
    value = field(match[2])
    if not value:
        raise UserError(f"the config's {match[2]} is 0, so the map's scale {scale} has no value")
    root = float(value) ** 0.5
    return 1 / root if match[1] else root


def match_leaves(name_map: NameMap, tree: Tree) -> dict[str, tuple[str, Rule]]:
    """Finds the rule of each leaf.

    Returns leaf path → (its path under the map's root, its rule). Raises UserError for leaves
    without a rule that are not ignored, for leaves with two rules, and for rules without a leaf.
    """
    rules = [(leaf_pattern(rule.leaf), rule) for rule in name_map.rules]
    ignored = [ignore_pattern(pattern) for pattern in name_map.ignore]
    if len(tree.leaves) * (len(rules) + len(ignored)) > _MOST_TRIES:
        raise UserError(
            f"{tree.directory}: {len(tree.leaves)} leaves are too many for the {len(rules)} rules "
            f"of {name_map.source}"
        )
    root = _root(name_map, tree, [pattern for pattern, _ in rules])
    matched: dict[str, tuple[str, Rule]] = {}
    unmapped: list[str] = []
    for path in tree.leaves:
        if any(pattern.fullmatch(path) for pattern in ignored):
            continue
        relative = path.removeprefix(root)
        inside = path.startswith(root)
        takers = [rule for pattern, rule in rules if inside and pattern.fullmatch(relative)]
        if len(takers) > 1:
            raise UserError(
                f"{tree.directory}: {name_map.source}: two rules take the leaf {path}: "
                f"{takers[0].leaf} and {takers[1].leaf}"
            )
        if takers:
            matched[path] = (relative, takers[0])
        else:
            unmapped.append(path)
    used = {rule.leaf for _, rule in matched.values()}
    unused = [rule.leaf for rule in name_map.rules if rule.leaf not in used and not rule.optional]
    rules_under_root = [root + rule.leaf for rule in name_map.rules]
    problems = [
        *_list_names("leaves without a rule", unmapped, rules_under_root, "rule"),
        *_list_names("rules without a leaf", unused, [*unmapped, *tree.leaves], "leaf"),
    ]
    if problems:
        raise UserError(
            f"{tree.directory}: the tree does not fit the name map {name_map.source}:\n"
            + "\n".join(problems)
            + "\nCorrect the rules; leaves that are no weights go into the map's ignore list."
        )
    return matched


def check_names(name_map: NameMap, tree: Tree, found: set[str], expected: set[str]) -> None:
    """Raises UserError for tensors that the config asks for and the map does not make, and for
    tensors that the map makes and the config does not have."""
    missing, unknown = sorted(expected - found), sorted(found - expected)
    problems = [
        *_list_names("tensors that are missing", missing, unknown, "made"),
        *_list_names(
            "tensors that the config does not have", unknown, missing or expected, "expected"
        ),
    ]
    if problems:
        raise UserError(
            f"{tree.directory}: with the name map {name_map.source} the tensors are not those of "
            "the config:\n" + "\n".join(problems)
        )


def _root(name_map: NameMap, tree: Tree, patterns: list[re.Pattern[str]]) -> str:
    """The first of the map's roots with a matching leaf below it, with a slash at its end."""
    roots = [f"{root}/" if root else "" for root in name_map.roots]
    for root in roots:
        inside = [path.removeprefix(root) for path in tree.leaves if path.startswith(root)]
        if any(pattern.fullmatch(path) for path in inside for pattern in patterns):
            return root
    return roots[0]


def _list_names(what: str, names: Iterable[str], others: Iterable[str], kind: str) -> list[str]:
    """A heading with the count, then a line for each name with the nearest of `others`. Names that
    differ only in numbers share one line.

    - `what`: the heading.
    - `kind`: what the nearest name is called, such as "rule".
    """
    names = list(names)
    alike = {_skeleton(name): name for name in reversed(names)}
    candidates = {_skeleton(other): other for other in others}
    compared = list(candidates)[:_COMPARED]
    lines = [f"{what} ({len(names)}):"] if names else []
    for skeleton, name in [*reversed(alike.items())][:_SHOWN]:
        near = difflib.get_close_matches(skeleton, compared, n=1, cutoff=0.4)
        lines.append(f"  {name}" + (f" (nearest {kind}: {candidates[near[0]]})" if near else ""))
    if len(alike) > _SHOWN:
        lines.append(f"  … and {len(alike) - _SHOWN} more that differ in more than numbers")
    return lines


def _skeleton(name: str) -> str:
    """The name with # for each number and placeholder, so that names which differ only in these are
    equal."""
    return re.sub(r"\d+|\{\w+\}", "#", name)
