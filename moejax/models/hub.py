"""Models by name: the one in the package, and those of the Hugging Face hub."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
from typing import Any

from moejax.errors import UserError
from moejax.models import directory

CONFIG = ("config.json", "generation_config.json")
WORDS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")
TEMPLATES = ("chat_template*", "*.jinja")
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
"""Files of weights. consolidated*.safetensors, *.bin and *.gguf would repeat the same weights."""

SPARE_BYTES = 1 << 30
"""Bytes of the disk that a download leaves free."""

_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def model_directory(
    model: str | os.PathLike[str], *, config_only: bool = False
) -> str | os.PathLike[str]:
    """The checkpoint that a user names. "demo" is the one in the package. NAME/NAME[@REVISION] is a
    model of the hub, unless a path has that name. Any other value is a path and returned unchanged.

    - `config_only`: downloads only config.json of a model of the hub.

    Raises UserError as fetch_model.
    """
    if model == "demo":
        config = pathlib.Path(str(directory.EMBEDDED / "config.json"))
        return config.resolve().parent  # an installer may make links
    if not is_hub_id(model):
        return model
    found = fetch_model(str(model), config_only=config_only)
    return found / "config.json" if config_only else found


def is_hub_id(model: str | os.PathLike[str]) -> bool:
    """Whether this is NAME/NAME or NAME/NAME@REVISION, the form of the hub's names, and not a path
    of this machine."""
    found = isinstance(model, str) and _ID.fullmatch(model)
    return bool(found) and not pathlib.Path(str(model)).expanduser().exists()


def fetch_model(hub_id: str, *, config_only: bool = False) -> pathlib.Path:
    """Downloads what a run reads of a hub's model: config, tokenizer, chat template and
    model*.safetensors. Returns the directory in the hub's cache (HF_HOME, HF_HUB_CACHE). Files in
    the cache need no network, and an interrupted download continues.

    - `hub_id`: NAME/NAME, or NAME/NAME@REVISION with a branch, tag or commit.
    - `config_only`: only config.json.

    Raises UserError for an unknown model or revision, a model that needs permission, one without
    safetensors, too little room on the disk, and files that are not in the cache without a network
    (or with HF_HUB_OFFLINE=1).
    """
    import huggingface_hub
    from huggingface_hub import constants

    repository, _, revision = hub_id.partition("@")
    patterns = CONFIG if config_only else (*CONFIG, *WORDS, *TEMPLATES, *WEIGHTS)
    options: dict[str, Any] = {
        "revision": revision or None,
        "allow_patterns": list(patterns),
        "cache_dir": constants.HF_HUB_CACHE,
    }
    try:
        found = huggingface_hub.snapshot_download(repository, local_files_only=True, **options)
        if _is_whole(pathlib.Path(found), config_only):
            return pathlib.Path(found)
    except (OSError, ValueError):  # the cache lacks some or all files
        pass
    try:
        files = huggingface_hub.snapshot_download(repository, dry_run=True, **options)
        _check_files(hub_id, files, config_only)
        missing = sum(file.file_size or 0 for file in files if file.will_download)
        _check_room(hub_id, pathlib.Path(constants.HF_HUB_CACHE), missing)
        found = huggingface_hub.snapshot_download(repository, **options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{hub_id}: no such directory, and as a model of the Hugging Face hub: {_why(error)}"
        ) from error
    return pathlib.Path(found)


def _is_whole(snapshot: pathlib.Path, config_only: bool) -> bool:
    """Whether config.json and, unless config_only, all shards are present."""
    if config_only or not (snapshot / "config.json").is_file():
        return (snapshot / "config.json").is_file()
    index = snapshot / "model.safetensors.index.json"
    if not index.is_file():
        return (snapshot / "model.safetensors").is_file()
    try:
        shards = set(directory.read_json(index)["weight_map"].values())
    except (UserError, KeyError, AttributeError):  # load_checkpoint says what is wrong with it
        return True
    return all((snapshot / str(shard)).is_file() for shard in shards)


def _check_files(hub_id: str, files: Any, config_only: bool) -> None:
    names = [file.filename for file in files]
    if "config.json" not in names:
        raise UserError(f"{hub_id}: this model of the hub has no config.json at its top")
    if not config_only and not any(name.endswith(".safetensors") for name in names):
        raise UserError(
            f"{hub_id}: this model of the hub has no model.safetensors; moejax reads no other "
            "format, look for one whose files are .safetensors"
        )


def _check_room(hub_id: str, cache: pathlib.Path, nbytes: int) -> None:
    there = next(place for place in (cache, *cache.parents) if place.is_dir())
    free = shutil.disk_usage(there).free
    if nbytes > free - SPARE_BYTES:
        raise UserError(
            f"{hub_id}: {nbytes / 1e9:.1f} GB must be downloaded, and {cache} has "
            f"{free / 1e9:.1f} GB free; make room, or set HF_HUB_CACHE to another place"
        )


def _why(error: Exception) -> str:
    """The reason of an error of the hub, in words."""
    from huggingface_hub import errors

    kinds = {
        errors.GatedRepoError: "its authors want to be asked: accept their terms on its page of "
        "the hub, then `hf auth login`",
        errors.RepositoryNotFoundError: "there is none of this name (a private one needs "
        "`hf auth login`)",
        errors.RevisionNotFoundError: "it has no such revision",
        errors.LocalEntryNotFoundError: "not all of it is in the hub's cache, and the hub cannot "
        "be reached (HF_HUB_OFFLINE is set, or there is no network)",
        errors.OfflineModeIsEnabled: "not all of it is in the hub's cache, and HF_HUB_OFFLINE "
        "forbids to download it",
    }
    # An error of planning a snapshot has the hub's answer as its cause.
    because = [error, error.__cause__, error.__context__]
    for kind, text in kinds.items():
        if any(isinstance(one, kind) for one in because):
            return text
    if any(type(one).__name__.startswith("Connect") for one in because):  # of the HTTP library
        return "not all of it is in the hub's cache, and the hub cannot be reached"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"the download ended: {lines[0]}; the same command goes on with it"
