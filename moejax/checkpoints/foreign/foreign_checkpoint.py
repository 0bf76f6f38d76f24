"""Opening an Orbax checkpoint that another program wrote."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from moejax.checkpoints.foreign.mapped_tensors import MappedTensors, map_tensors
from moejax.checkpoints.foreign.name_map import NameMap, load_name_map, shipped_maps
from moejax.checkpoints.orbax.steps import CHECKPOINT, Items, Step, find_items
from moejax.checkpoints.orbax.tree import Tree, read_tree
from moejax.errors import UserError
from moejax.models.config import ModelConfig, load_config, parse_config
from moejax.models.directory import read_json


def open_mapped(
    directory: pathlib.Path, step: Step = None, name_map: str | os.PathLike[str] | None = None
) -> tuple[ModelConfig, MappedTensors]:
    """The model's config and its tensors, of which nothing but headers is read.

    directory: a root, a step or an item, see orbax.steps. name_map: a file or the name of a shipped
    map. Raises UserError.
    """
    items = find_items(directory, step)
    if name_map is None:
        tree = read_tree(next(iter(items.items.values())))
        leaves = list(tree.leaves)
        raise UserError(
            f"{directory}: an Orbax checkpoint that moejax did not write needs name_map, which "
            "says which leaf is which tensor: a .yaml or .json file (docs/checkpoints.md) or one "
            f"of {', '.join(shipped_maps())}. Its leaves: {', '.join(leaves[:8])}"
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
    """The config and its fields: from config.json beside the tree or around it, an item or custom
    metadata called config, or the map; UserError if there is none, or two that differ."""
    found: list[tuple[str, dict[str, Any], pathlib.Path | None]] = []
    for place in items.directories:
        # The last two are what v0's and v1's JSON handlers write for an item called config.
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
