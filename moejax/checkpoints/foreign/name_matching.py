"""Which rule of a name map each leaf takes, and what to say when leaves and rules do not agree."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from moejax.checkpoints.foreign.name_map import NameMap, Rule, ignore_pattern, leaf_pattern
from moejax.checkpoints.orbax.tree import Tree
from moejax.errors import UserError

_SHOWN, _COMPARED = 5, 300
"""Names in a message, and those that each is compared with for the nearest."""
_MOST_TRIES = 10_000_000
"""Patterns times paths, a few seconds."""


def match_leaves(name_map: NameMap, tree: Tree) -> dict[str, tuple[str, Rule]]:
    """Leaf path → its path under the map's root, and its rule.

    Raises UserError for leaves that no rule takes and that are not ignored, and for rules that
    take none.
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
    problems = [
        *_listed(
            "leaves without a rule", unmapped, [rule.leaf for rule in name_map.rules], "rule", root
        ),
        *_listed("rules without a leaf", unused, [*unmapped, *tree.leaves], "leaf", "", root),
    ]
    if problems:
        raise UserError(
            f"{tree.directory}: the tree does not fit the name map {name_map.source}:\n"
            + "\n".join(problems)
            + "\nCorrect the rules; leaves that are no weights go into the map's ignore list."
        )
    return matched


def check_names(name_map: NameMap, tree: Tree, found: set[str], expected: set[str]) -> None:
    """UserError for tensors that the config asks for and the map does not make, and the reverse."""
    missing, unknown = sorted(expected - found), sorted(found - expected)
    problems = [
        *_listed("tensors that are missing", missing, unknown, "made", ""),
        *_listed("tensors that the config has not", unknown, missing or expected, "expected", ""),
    ]
    if problems:
        raise UserError(
            f"{tree.directory}: with the name map {name_map.source} the tensors are not those of "
            "the config:\n" + "\n".join(problems)
        )


def _root(name_map: NameMap, tree: Tree, patterns: list[re.Pattern[str]]) -> str:
    """The path above the rules' leaves, with its slash: the first root under which a leaf is."""
    roots = [f"{root}/" if root else "" for root in name_map.roots]
    for root in roots:
        for path in tree.leaves:
            if path.startswith(root) and any(
                p.fullmatch(path.removeprefix(root)) for p in patterns
            ):
                return root
    return roots[0]


def _listed(
    what: str, names: list[str], others: Iterable[str], kind: str, root: str, strip: str = ""
) -> list[str]:
    """One line per name with the nearest of the others; names that differ in numbers only count
    as one."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(_skeleton(name), name)
    alike = list(first.values())
    if not alike:
        return []
    candidates = {_skeleton(o.removeprefix(strip)): o for o in reversed(list(others))}
    compared = list(candidates)[-_COMPARED:]
    lines = [f"{what} ({len(names)}):"]
    for name in alike[:_SHOWN]:
        near = difflib.get_close_matches(
            _skeleton(name.removeprefix(root)), compared, n=1, cutoff=0.4
        )
        lines.append(f"  {name}" + (f" (nearest {kind}: {candidates[near[0]]})" if near else ""))
    if len(alike) > _SHOWN:
        lines.append(f"  … and {len(alike) - _SHOWN} more that differ in more than numbers")
    return lines


def _skeleton(name: str) -> str:
    """The name without numbers and placeholders, which say nothing about likeness."""
    return re.sub(r"\d+|\{\w+\}", "#", name)
