"""Models by name: the one in the package, and those of the Hugging Face hub."""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from moejax.errors import UserError
from moejax.models import directory

CONFIG = ("config.json", "generation_config.json")
WORDS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")
TEMPLATES = ("chat_template*", "*.jinja")
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
"""Files of weights. consolidated*.safetensors, *.bin and *.gguf would repeat the same weights."""
GGUF = ("*.gguf",)

SPARE_BYTES = 1 << 30
"""Bytes of the disk that a download leaves free."""

_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?(?::([\w./-]+))?")
_PART = re.compile(r"-\d{5}-of-(\d{5})$")


def model_directory(
    model: str | os.PathLike[str], *, config_only: bool = False
) -> str | os.PathLike[str]:
    """The checkpoint that a user names. "demo" is the one in the package. NAME/NAME[@REVISION] is a
    model of the hub, and with :FILE.gguf or :Q4_K_M one of its GGUF files, unless a path has that
    name. Any other value is a path and returned unchanged.

    - `config_only`: downloads only config.json of a model of the hub.

    Raises UserError as fetch_model and fetch_gguf.
    """
    if model == "demo":
        config = pathlib.Path(str(directory.EMBEDDED / "config.json"))
        return config.resolve().parent  # an installer may make links
    if not is_hub_id(model):
        return model
    if ":" in str(model):
        return fetch_gguf(str(model), cached=config_only)
    found = fetch_model(str(model), config_only=config_only)
    return found / "config.json" if config_only else found


def is_hub_id(model: str | os.PathLike[str]) -> bool:
    """Whether this is NAME/NAME[@REVISION][:GGUF], the form of the hub's names, and not a path of
    this machine."""
    found = isinstance(model, str) and _ID.fullmatch(model)
    return bool(found) and not pathlib.Path(str(model)).expanduser().exists()


def at_revision(model: str | os.PathLike[str], revision: str) -> str:
    """Returns the hub's model at a revision. Raises UserError for another model, and for one whose
    name has a revision."""
    found = is_hub_id(model) and _ID.fullmatch(str(model))
    if not found or found[2] or not _ID.fullmatch(f"{found[1]}@{revision}"):
        raise UserError(
            f"revision {revision!r} is a branch, tag or commit of a model of the hub, NAME/NAME, "
            f"and {str(model)!r} is none" + (" without one" if found else "")
        )
    return f"{found[1]}@{revision}" + (f":{found[3]}" if found[3] else "")


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
    repository, options, _ = _options(hub_id)
    patterns = CONFIG if config_only else (*CONFIG, *WORDS, *TEMPLATES, *WEIGHTS)
    found = _cached(repository, allow_patterns=[*patterns], **options)
    if found is not None and _is_whole(found, config_only):
        return found
    files = _list_files(hub_id, patterns)
    _check_files(hub_id, files, config_only)
    return _download(hub_id, files)


def fetch_gguf(hub_id: str, *, cached: bool = False) -> pathlib.Path:
    """Downloads a GGUF file of a hub's model, or all files of one that is split. Returns the path
    of the first in the hub's cache. Files in the cache need no network.

    - `hub_id`: NAME/NAME[@REVISION]:WHICH, with a file's name, or what llama.cpp's `-hf` takes: how
      the weights are quantized, as in Q4_K_M, with which the file's name or folder ends.
    - `cached`: downloads nothing.

    Raises UserError as fetch_model, for no such file and for several, and with `cached` for one
    that is not in the cache.
    """
    repository, options, which = _options(hub_id)
    if (found := _cached(repository, allow_patterns=[], **options)) is not None:
        names = [path.relative_to(found).as_posix() for path in found.rglob(*GGUF)]
        with contextlib.suppress(UserError):
            return found / _choose_gguf(hub_id, which, names)[0]
    if cached:
        raise UserError(
            f"{hub_id}: not in the hub's cache, and a GGUF file has its config inside; download it "
            "first (any run does)"
        )
    files = _list_files(hub_id, GGUF)
    chosen = _choose_gguf(hub_id, which, [file.filename for file in files])
    return _download(hub_id, [file for file in files if file.filename in chosen]) / chosen[0]


def _options(hub_id: str) -> tuple[str, dict[str, Any], str]:
    """The repository, options of snapshot_download, and the GGUF file that is meant."""
    from huggingface_hub import constants

    found = _ID.fullmatch(hub_id)
    assert found is not None, "is_hub_id"
    repository, revision, which = found.groups()
    return repository, {"revision": revision, "cache_dir": constants.HF_HUB_CACHE}, which or ""


def _cached(repository: str, **options: Any) -> pathlib.Path | None:
    """The directory in the hub's cache, which may lack files; None: there is none."""
    import huggingface_hub

    try:
        found = huggingface_hub.snapshot_download(repository, local_files_only=True, **options)
    except (OSError, ValueError):
        return None
    return pathlib.Path(found)


def _list_files(hub_id: str, patterns: Sequence[str]) -> list[Any]:
    """The hub's files with these names."""
    import huggingface_hub

    repository, options, _ = _options(hub_id)
    with _hub_errors(hub_id):
        return huggingface_hub.snapshot_download(
            repository, dry_run=True, allow_patterns=[*patterns], **options
        )


def _download(hub_id: str, files: Sequence[Any]) -> pathlib.Path:
    """Downloads files of _list_files. Returns the directory."""
    import huggingface_hub

    repository, options, _ = _options(hub_id)
    missing = sum(file.file_size or 0 for file in files if file.will_download)
    _check_room(hub_id, pathlib.Path(options["cache_dir"]), missing)
    names = [glob.escape(file.filename) for file in files]
    with _hub_errors(hub_id):
        found = huggingface_hub.snapshot_download(repository, allow_patterns=names, **options)
    return pathlib.Path(found)


@contextlib.contextmanager
def _hub_errors(hub_id: str) -> Iterator[None]:
    """Raises the hub's errors as UserError."""
    try:
        yield
    except Exception as error:
        raise UserError(
            f"{hub_id}: no such directory, and as a model of the Hugging Face hub: {_why(error)}"
        ) from error


def _choose_gguf(hub_id: str, which: str, names: Sequence[str]) -> list[str]:
    """The names of the files that `which` means, in order."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if "mmproj" not in name:  # of images
            models.setdefault(_PART.sub("", name.removesuffix(".gguf")), []).append(name)
    if which.endswith(".gguf"):
        wanted = re.compile(re.escape(_PART.sub("", which.removesuffix(".gguf"))))
    else:
        wanted = re.compile(rf"(.*[-._/])?{re.escape(which)}(/[^/]*)?", re.IGNORECASE)
    found = [files for model, files in models.items() if wanted.fullmatch(model)]
    if len(found) != 1:
        known = ", ".join(f"{hub_id.rpartition(':')[0]}:{files[0]}" for files in models.values())
        raise UserError(
            f"{hub_id}: {len(found) or 'no'} GGUF files of the hub's model are {which}; "
            f"name one: {known or 'it has none'}"
        )
    (files,) = found
    part = _PART.search(files[0].removesuffix(".gguf"))
    if part is not None and len(files) != int(part[1]):
        raise UserError(f"{hub_id}: {len(files)} of {int(part[1])} files of {files[0]} are there")
    return files


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


def _check_files(hub_id: str, files: Sequence[Any], config_only: bool) -> None:
    names, lacks = [file.filename for file in files], None
    if "config.json" not in names:
        lacks = "config.json at its top"
    elif not config_only and not any(name.endswith(".safetensors") for name in names):
        lacks = "model.safetensors"
    if lacks is not None:
        others = [file.filename for file in _list_files(hub_id, GGUF)]
        look = (
            f"name one of its GGUF files, as in {hub_id}:{others[0]}"
            if others
            else ("look for one whose files are .safetensors or .gguf")
        )
        raise UserError(f"{hub_id}: this model of the hub has no {lacks}; {look}")


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
