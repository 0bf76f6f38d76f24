"""Reads another program's Orbax tree as the tensors of a Hugging Face checkpoint, by a name map."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from moejax.checkpoints.foreign.name_map import (
    NameMap,
    Rule,
    check_names,
    leaf_pattern,
    load_name_map,
    match_leaves,
    scale_factor,
    shipped_maps,
    tensor_name,
)
from moejax.checkpoints.orbax.steps import CHECKPOINT, Items, Step, find_items
from moejax.checkpoints.orbax.tree import (
    LeafReader,
    Tree,
    TreeLeaf,
    leaf_headers,
    read_tree,
    touched_bytes,
)
from moejax.checkpoints.shards import Header, ReadRows
from moejax.checkpoints.tensors import check_experts, expected_tensors, is_ignored
from moejax.errors import UserError
from moejax.models.config import ModelConfig, load_config, parse_config
from moejax.models.directory import read_json
from moejax.models.json_values import is_integer

_CACHE = 64 << 20
MOST_TENSORS = 1_000_000
"""Most tensors that a map may make of a tree, ignored ones included; the largest models have
100,000."""

Index = tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """Where one tensor's values are in a leaf.

    - `index`: an index or slice for each axis of the leaf.
    - `picks`: axis name → index, for axes that share an axis of the leaf with other axes.
    - `sizes`: axis name → size, for the rule's axes.
    - `scale`: the factor, None for 1.
    - `rows`: rows of the result's first axis; None: all, and no axis is cut.
    - `shape`: the tensor's shape, to which each axis of the result is cut.
    """

    leaf: TreeLeaf
    rule: Rule
    index: Index
    picks: dict[str, int]
    sizes: dict[str, int]
    scale: float | None
    rows: slice | None = None
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class MappedTensors:
    """A TensorFile: the tensors of a tree under the names that transformers' checkpoints use."""

    tree: Tree
    tensors: dict[str, Header]
    parts: dict[str, Part]
    config: Mapping[str, Any]
    """The fields of the model's config.json."""

    @property
    def path(self) -> pathlib.Path:
        return self.tree.directory

    def named(self, name: str) -> str:
        return f"{self.path}: tensor {name}"

    @contextlib.contextmanager
    def open(self) -> Iterator[MappedReader]:
        """Opens the leaves. Its reader raises UserError where the checkpoint is damaged or lacks
        chunks."""
        touched: dict[str, list[int]] = {}
        for part in self.parts.values():
            touched.setdefault(part.leaf.path, []).append(touched_bytes(part.leaf, part.index))
        shared = [max(sizes) for sizes in touched.values() if len(sizes) > 1]
        # Room for two sets of chunks, which two reads may need at once. With less, every slice
        # would decode its chunks again (measured: a hundred times slower).
        yield MappedReader(self, LeafReader(self.tree, max([_CACHE, *(2 * n for n in shared)])))


@dataclasses.dataclass(frozen=True)
class MappedReader:
    """A TensorReader. Several threads may read at once."""

    file: MappedTensors
    leaves: LeafReader

    splits = False

    def rows(self, name: str, index: int | None = None, /) -> ReadRows:
        values = self._read(self.file.parts[name], index)
        matrix = values.reshape(-1, values.shape[-1])

        def copy_rows(first: int, out: np.ndarray) -> None:
            out[:] = matrix[first : first + len(out)]

        return copy_rows

    def _read(self, part: Part, index: int | None) -> np.ndarray:
        """Reads a tensor, or its part at an index of the first axis. Only that part is read where
        the axis is also an axis of the leaf."""
        before, after = part.rule.before, part.rule.after
        axis = None
        if index is not None and part.rows is None:
            if after is None:
                axis = 0
            elif before and after[0] in before and len(after[0]) == 1:
                axis = before.index(after[0])
        if index is None or axis is not None:
            at = part.index
            if axis is not None:
                at = (*at[:axis], index, *at[axis + 1 :])
            return _read(self.leaves, dataclasses.replace(part, index=at))
        return _read(self.leaves, part)[index]


def open_mapped(
    directory: pathlib.Path, step: Step = None, name_map: str | os.PathLike[str] | None = None
) -> tuple[ModelConfig, MappedTensors]:
    """Opens an Orbax checkpoint of another program; reads headers only.

    - `directory`: a root, a step or an item (see orbax.steps).
    - `step`: which step of a root.
    - `name_map`: a file or the name of a shipped map.

    Returns the model's config and its tensors. Raises UserError for a missing map or config, and as
    find_items, read_tree, load_name_map and map_tensors do.
    """
    items = find_items(directory, step)
    if name_map is None:
        tree = read_tree(next(iter(items.items.values())))
        leaves = list(tree.leaves)
        raise UserError(
            f"{directory}: an Orbax checkpoint that moejax did not write needs name_map, which "
            "says which leaf is which tensor: a .yaml or .json file (docs/how-to/checkpoints.md) "
            f"or one of {', '.join(shipped_maps())}. Its leaves: {', '.join(leaves[:8])}"
            + (f" and {len(leaves) - 8} more" if len(leaves) > 8 else "")
        )
    parsed = load_name_map(name_map)
    tree = read_tree(_item(items, parsed, directory))
    config, fields = _config(items, tree, parsed, directory)
    return config, map_tensors(config, tree, parsed, fields)


def _item(items: Items, name_map: NameMap, directory: pathlib.Path) -> pathlib.Path:
    names = list(items.items)
    chosen = names[0] if len(names) == 1 else next((n for n in name_map.items if n in names), None)
    if chosen is None:
        step = f" of step {items.step}" if items.step is not None else ""
        raise UserError(
            f"{directory}: which item{step} holds the parameters: {', '.join(names)}? Name it in "
            f"the map ({name_map.source}), item: {names[0]}, or give its directory"
        )
    item = items.items[chosen]
    if not item.resolve().is_relative_to(directory.resolve()):
        raise UserError(f"{item}: a link that leaves {directory}; give the directory it points to")
    return item


def _config(
    items: Items, tree: Tree, name_map: NameMap, directory: pathlib.Path
) -> tuple[ModelConfig, dict[str, Any]]:
    """Finds the model's config: in config.json beside or above the tree, in an item or custom
    metadata called config, or in the map.

    Returns the config and the fields it was parsed from. Raises UserError without one, and for two
    that differ.
    """
    found: list[tuple[str, dict[str, Any], pathlib.Path | None]] = []
    for place in items.directories:
        # For an item called config, the JSON handlers of v0 and v1 write the last two paths.
        for name in ("config.json", "config/metadata", "config/data.json"):
            path = place / name
            if path.is_file():
                found.append((str(path), read_json(path), place))
        custom = read_json(place / CHECKPOINT) if (place / CHECKPOINT).is_file() else {}
        for metadata in (custom.get("custom_metadata"), tree.custom):
            config = metadata.get("config") if isinstance(metadata, dict) else None
            if isinstance(config, dict):
                found.append((f"{place}: config in the custom metadata", config, None))
    if name_map.config is not None:
        found.append((f"{name_map.source}: config", name_map.config, None))
    if not found:
        raise UserError(
            f"{directory}: no config.json, so the sizes of the model are unknown; put the model's "
            f"config.json into {items.directories[-1]}, or its fields into the name map under "
            "config"
        )
    source, fields, place = found[0]
    for other, differing, _ in found[1:]:
        if differing != fields:
            keys = sorted(
                str(key) for key in {*fields, *differing} if fields.get(key) != differing.get(key)
            )
            raise UserError(f"{source} and {other} differ in {', '.join(keys[:5])}; keep one")
    if place is not None and source == str(place / "config.json"):
        return load_config(place), fields
    return parse_config(fields, source), fields


def map_tensors(config: ModelConfig, tree: Tree, name_map: NameMap, fields: dict) -> MappedTensors:
    """Finds the config's tensors in the tree; reads headers, but no values.

    - `fields`: of config.json, which the map may name. A field that is missing there is taken from
      `config`.

    Raises UserError that lists leaves without a rule, rules without a leaf, and missing or unknown
    tensors, each with the nearest names.
    """

    source = f"{tree.directory}: {name_map.source}"

    def field(name: str) -> int:
        value = fields.get(name)
        value = getattr(config, name, None) if value is None else value
        if not is_integer(value) or not 0 <= value < 1 << 53:
            raise UserError(f"{source}: the config has no integer {name}, which the map names")
        return value

    check_experts(config, source)
    matched = match_leaves(name_map, tree)
    leaves = leaf_headers(tree, list(matched))
    parts: dict[str, Part] = {}
    grouped: list[tuple[str, ...]] = []
    made = 0
    for path, (relative, rule) in matched.items():
        match = leaf_pattern(rule.leaf).fullmatch(relative)
        assert match is not None
        numbers = {name: int(text) for name, text in match.groupdict().items()}
        where = f"{source}: rule {rule.leaf}"
        for names, part in _expand(rule, leaves[path], numbers, field, config, where):
            made += 1
            if made > MOST_TENSORS:
                raise UserError(f"{where}: the map makes more than {MOST_TENSORS} tensors")
            if all(is_ignored(config, name) for name in names):
                continue
            for name in names:
                if name in parts:
                    raise UserError(
                        f"{where}: {path} holds {name}, and {parts[name].leaf.path} does too"
                    )
                parts[name] = part
            grouped.append(names)
    expected = {name: place.shape for name, place in expected_tensors(config, parts).items()}
    if config.tie_word_embeddings and "lm_head.weight" in parts:
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    check_names(name_map, tree, set(parts), set(expected))
    for names in grouped:
        parts |= _place_parts(names, parts[names[0]], [expected[n] for n in names], source)
    tensors = {name: Header(p.leaf.header.dtype, p.shape) for name, p in parts.items()}
    return MappedTensors(tree, tensors, parts, fields)


def _expand(
    rule: Rule,
    leaf: TreeLeaf,
    numbers: dict[str, int],
    field: Callable[[str], int],
    config: ModelConfig,
    where: str,
) -> Iterator[tuple[tuple[str, ...], Part]]:
    """Yields the tensors that a rule finds in a leaf, as (names, part), in the order of the leaf's
    chunks.

    - `numbers`: placeholder of the rule's leaf → its number in this leaf.
    - `field`: returns the integer of a config field.
    - `where`: begins the messages.
    """
    shape = leaf.header.shape
    scale = scale_factor(rule.scale, field)
    sizes = _sizes(rule, shape, field, where) if rule.before is not None else {}
    ranges = [range(sizes[axis]) for axis in rule.unstacked]
    most = config.num_hidden_layers * config.num_experts * math.prod(map(len, rule.values.values()))
    if math.prod(map(len, ranges)) > min(most, MOST_TENSORS):
        raise UserError(
            f"{where}: the leaf {leaf.path} of shape {list(shape)} stacks more tensors than the "
            f"config's {config.num_hidden_layers} layers and {config.num_experts} experts have"
        )
    alone = {g[0]: dim for dim, g in enumerate(rule.before or []) if len(g) == 1}

    def chunks(indices: tuple[int, ...]) -> list[int]:
        pairs = zip(rule.unstacked, indices, strict=True)
        return [i // leaf.chunk[alone[axis]] for axis, i in pairs if axis in alone]

    for indices in sorted(itertools.product(*ranges), key=chunks):
        at = dict(zip(rule.unstacked, indices, strict=True))
        index: list[int | slice] = [slice(None)] * len(shape)
        for axis, i in at.items():
            if axis in alone:
                index[alone[axis]] = i
        labels = {a: rule.values[a][i] if a in rule.values else i for a, i in at.items()}
        names = tuple(tensor_name(t, {**numbers, **labels}, field) for t in rule.tensors)
        picks = {axis: i for axis, i in at.items() if axis not in alone}
        yield names, Part(leaf, rule, tuple(index), picks, sizes, scale)


def _sizes(
    rule: Rule, shape: tuple[int, ...], field: Callable[[str], int], where: str
) -> dict[str, int]:
    """The size of each axis of a rule. In each group of axes, one size may follow from the leaf's
    shape. Raises UserError for a shape that does not fit."""
    assert rule.before is not None
    sizes = {axis: len(names) for axis, names in rule.values.items()}
    for axis, size in rule.sizes.items():
        sizes[axis] = max(1, field(size)) if isinstance(size, str) else size
    wrong = UserError(
        f"{where}: the leaf has shape {list(shape)}, which does not fit the axes "
        f"{' '.join('(' + ' '.join(g) + ')' for g in rule.before)}"
        + (f" with sizes {sizes}" if sizes else "")
    )
    if len(shape) != len(rule.before):
        raise wrong
    for group, total in zip(rule.before, shape, strict=True):
        unknown = [axis for axis in group if axis not in sizes]
        if len(unknown) > 1:
            raise UserError(f"{where}: give sizes for all but one of {', '.join(group)}")
        known = math.prod(sizes[axis] for axis in group if axis in sizes)
        if unknown and known and total % known == 0:
            sizes[unknown[0]] = total // known
        if math.prod(sizes.get(axis, -1) for axis in group) != total:
            raise wrong
    return sizes


def _place_parts(
    names: tuple[str, ...], part: Part, shapes: list[tuple[int, ...]], source: str
) -> dict[str, Part]:
    """Cuts a part into the tensors that lie one after another in it.

    - `names`, `shapes`: the tensors and the shapes that the config asks for, in order.
    - `source`: begins the messages.

    Returns name → part. Raises UserError where the part's size is not that of the shapes.
    """
    rule = part.rule
    result = (
        part.leaf.header.shape
        if rule.after is None
        else tuple(math.prod(part.sizes[axis] for axis in group) for group in rule.after)
    )
    wanted = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    fits = len(result) == len(wanted) and all(
        have == want or (rule.crop and have > want)
        for have, want in zip(result, wanted, strict=True)
    )
    if not fits or any(shape[1:] != shapes[0][1:] for shape in shapes):
        raise UserError(
            f"{source}: rule {rule.leaf} makes {', '.join(names)} of shape {list(result)} from the "
            f"leaf {part.leaf.path} {list(part.leaf.header.shape)}, but the config asks for "
            f"{list(wanted)}"
        )
    if rule.before is None and len(result) == 2 and result[0] == result[1]:
        raise UserError(
            f"{source}: rule {rule.leaf}: the leaf {part.leaf.path} is square "
            f"{list(result)}, so its shape does not tell whether it is transposed; write axes: "
            '"in out -> out in" if it is, as in Flax, else "out in -> out in"'
        )
    if len(names) == 1 and result == wanted:
        return {names[0]: dataclasses.replace(part, shape=result)}
    placed, row = {}, 0
    for name, shape in zip(names, shapes, strict=True):
        rows = slice(row, row + shape[0])
        placed[name] = dataclasses.replace(part, rows=rows, shape=shape)
        row += shape[0]
    return placed


def _read(leaves: LeafReader, part: Part) -> np.ndarray:
    """Reads the values of a part and brings them into the shape of the tensor."""
    values, rule = leaves.read(part.leaf, part.index), part.rule
    if rule.before is not None and rule.after is not None:
        # An axis with an integer index is gone. The others become one axis per name.
        groups = [
            g for g, at in zip(rule.before, part.index, strict=True) if not isinstance(at, int)
        ]
        axes = [axis for group in groups for axis in group]
        sizes = {g[0]: n for g, n in zip(groups, values.shape, strict=True) if len(g) == 1}
        values = values.reshape([{**part.sizes, **sizes}[axis] for axis in axes])
        values = values[tuple(part.picks.get(axis, slice(None)) for axis in axes)]
        axes = [axis for axis in axes if axis not in part.picks]
        kept = [tuple(a for a in group if a in axes) for group in rule.after]
        kept = [group for group in kept if group]
        shape = [math.prod(values.shape[axes.index(a)] for a in group) for group in kept]
        order = [axes.index(axis) for group in kept for axis in group]
        values = values.transpose(order).reshape(shape)
    if part.rows is not None:
        values = values[part.rows][tuple(slice(0, n) for n in part.shape)]
    if part.scale is not None:
        # MaxText's own conversion multiplies in float32 too.
        values = (values.astype(np.float32) * np.float32(part.scale)).astype(values.dtype)
    return values
