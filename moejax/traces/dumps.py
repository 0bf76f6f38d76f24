"""Reads routing that other programs recorded: arrays of expert ids [tokens, layers, k].

docs/how-to/traces.md lists the formats. A reader gives the arrays of a file. What a dump does not
say is absent, never guessed.
"""

from __future__ import annotations

import base64
import binascii
import csv
import dataclasses
import io
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moejax.errors import UserError

IDS = ("ids", "routed_experts")
"""Names of the array of expert ids, in files and in JSON objects."""

LOGITS = "router_logits"
"""Name of the array of scores from which the top-k are taken, where a file has no ids."""

PER_TOKEN = ("step", "request", "position", "phase", "user")
"""Names of arrays with a value for each token, all optional."""

PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle")

MIXED = "recorded routing of different shapes or with different things known"

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class RoutedDump:
    """The routing of N tokens in order. A field is None if the dump does not have it."""

    where: str
    """The file, for messages."""
    ids: np.ndarray
    """int[N, L, k], unordered as in the dump; −1: no expert."""
    weights: np.ndarray | None = None
    """float[N, L, k], in the order of ids."""
    step: np.ndarray | None = None
    """int64[N]: which step computed the token."""
    request: np.ndarray | None = None
    """[N], numbers or names. The tokens of a request lie together if there are no steps."""
    position: np.ndarray | None = None
    """int[N]."""
    phase: np.ndarray | None = None
    """int[N]: 0 prompt, 1 generated."""
    user: np.ndarray | None = None
    """[N], numbers or names: a session, a domain; "" for none."""


def read_dump(
    source: str | os.PathLike[str], layers: int | None = None, top_k: int | None = None
) -> RoutedDump:
    """Reads a dump by its suffix: .npy, .npz or .jsonl.

    - `layers`, `top_k`: shape of ids that are bytes without one (SGLang's).

    Raises UserError, with the file and line, for a dump that cannot be read. Pickled objects are
    never loaded.
    """
    path = Path(source)
    if path.is_dir():
        known = "is a trace already" if (path / "trace.json").exists() else "is a directory"
        raise UserError(f"{path} {known}; convert takes a file of {', '.join(_READERS)}")
    if path.suffix in PICKLES:
        raise UserError(
            f"{path}: pickled files can run code when they are read, so moejax does not; save its "
            "arrays as .npz first (docs/how-to/traces.md has the lines for SGLang's recorder)"
        )
    if path.suffix not in _READERS:
        raise UserError(f"{path}: a dump of routing is one of {', '.join(_READERS)} by its name")
    try:
        arrays = _READERS[path.suffix](path, layers, top_k)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not any(name in arrays for name in IDS) and LOGITS in arrays:
        arrays["ids"] = _choose(arrays[LOGITS], top_k, path)
    name = next((name for name in IDS if name in arrays), None)
    if name is None:
        raise UserError(
            f"{path}: no array {' or '.join(IDS)} [tokens, layers, k], nor {LOGITS} "
            f"[tokens, layers, experts]; it has {', '.join(arrays) or 'none'}"
        )
    ids = arrays[name]
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or not ids.size:
        raise UserError(
            f"{path}: ids must be whole numbers [tokens, layers, k], not "
            f"{ids.dtype}{list(ids.shape)}"
        )
    known = {n: arrays[n] for n in PER_TOKEN if n in arrays}
    for n, array in known.items():
        named = n in ("request", "user")
        if array.shape != ids.shape[:1] or array.dtype.kind not in ("iuU" if named else "iub"):
            raise UserError(
                f"{path}: {n} must be whole numbers{' or names' if named else ''} [tokens], not "
                f"{array.dtype}{list(array.shape)}"
            )
    weights = arrays.get("weights")
    if weights is not None and (weights.shape != ids.shape or weights.dtype.kind != "f"):
        raise UserError(
            f"{path}: weights must be numbers {list(ids.shape)} as ids are, not "
            f"{weights.dtype}{list(weights.shape)}"
        )
    return RoutedDump(str(path), ids, weights, **known)


def _numpy(path: Path, layers: int | None, top_k: int | None) -> Arrays:
    try:
        with open(path, "rb") as file:
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return {"ids": found}
            return {name: found[name] for name in found.files}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(
            f"{path} is damaged, cut short or pickled ({error}); write it again with numpy.savez"
        ) from error


def _choose(logits: np.ndarray, top_k: int | None, path: Path) -> np.ndarray:
    """Returns the experts with the highest scores, int64[tokens, layers, k]; of equal ones the
    first."""
    if logits.ndim != 3 or logits.dtype.kind != "f" or not np.isfinite(logits).all():
        raise UserError(
            f"{path}: {LOGITS} must be finite numbers [tokens, layers, experts], not "
            f"{logits.dtype}{list(logits.shape)}"
        )
    if top_k is None or not 1 <= top_k <= logits.shape[2]:
        raise UserError(
            f"{path}: say how many of {logits.shape[2]} experts a token takes (--top-k)"
        )
    return np.argsort(-logits, axis=2, kind="stable")[:, :, :top_k]


def _table(path: Path, layers: int | None, top_k: int | None) -> Arrays:
    """Reads a table with a line for each expert of each token and layer: columns token, layer and
    expert, and any of weight and PER_TOKEN. Tokens are numbered within their request."""
    numbers: dict[str, list[float]] = {}
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        lines = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        columns = [name for name in lines.fieldnames or () if name in _COLUMNS]
        if missing := [name for name in _COLUMNS[:3] if name not in columns]:
            raise UserError(f"{path}: no column {missing[0]}; a table has token, layer and expert")
        numbers = {name: [] for name in columns}
        for line in lines:
            for name, values in numbers.items():
                try:
                    values.append(float(line[name]) if name == "weight" else int(line[name]))
                except (TypeError, ValueError):
                    kind = "number" if name == "weight" else "whole number"
                    raise UserError(
                        f"{path}, line {lines.line_num}: {name} is no {kind}: {line[name]!r:.40}"
                    ) from None
    found = {name: np.asarray(values) for name, values in numbers.items()}
    places = [found[name] for name in ("token", "request", "step") if name in found]
    order = np.lexsort((found["layer"], *places))
    found = {name: values[order] for name, values in found.items()}
    new = np.any([np.diff(place[order], prepend=-1) != 0 for place in places], axis=0)
    tokens, many, depths = int(new.sum()), len(new), np.unique(found["layer"])
    depth = len(depths)
    k, rest = divmod(many, max(tokens * depth, 1))
    layer = found["layer"].reshape(-1, depth, k) if many and not rest else np.zeros(0)
    if not many or rest or (layer != depths[:, None]).any():
        raise UserError(
            f"{path}: {many} lines are not as many experts for each of {tokens} tokens and "
            f"{depth} layers; every token needs a line for each of its experts in every layer"
        )
    arrays = {"ids": found["expert"].reshape(tokens, depth, k)}
    if "weight" in found:
        arrays["weights"] = found["weight"].astype(np.float32).reshape(tokens, depth, k)
    return arrays | {name: found[name][new] for name in PER_TOKEN if name in found}


_COLUMNS = ("token", "layer", "expert", "weight", *PER_TOKEN)


def _json_lines(path: Path, layers: int | None, top_k: int | None) -> Arrays:
    requests: list[Arrays] = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError as error:
                raise UserError(
                    f"{where}: not JSON, perhaps cut short ({error}); remove the line"
                ) from error
            if not isinstance(found, Mapping):
                raise UserError(f"{where}: a line is an object with {' or '.join(IDS)}")
            for request in _requests(found, where, layers, top_k):
                request["request"] = np.full(len(request["ids"]), len(requests))
                requests.append(request)
                one, other = (
                    {n: x.shape[1:] for n, x in r.items()} for r in (requests[0], request)
                )
                if one != other:
                    raise UserError(f"{where}: {MIXED} than the lines before; convert them apart")
    if not requests:
        raise UserError(f"{path} has no routing: it is empty")
    return {name: np.concatenate([r[name] for r in requests]) for name in requests[0]}


def _requests(
    found: Mapping[str, Any], where: str, layers: int | None, top_k: int | None
) -> Iterator[Arrays]:
    """Yields the requests of a line: a plain one, or a response of SGLang (its ids in `meta_info`)
    or of vLLM (in `choices`)."""
    meta, usage = found.get("meta_info") or {}, found.get("usage") or {}
    choices = found.get("choices") or [found]
    objects = (meta, usage, *choices) if isinstance(choices, list) else (None,)
    if not all(isinstance(x, Mapping) for x in objects):
        raise UserError(f"{where}: meta_info, usage and each of the list choices are objects")
    if choices == [found] and any(name in meta for name in IDS):
        choices = [meta]
    count = next((x["prompt_tokens"] for x in (found, meta, usage) if "prompt_tokens" in x), None)
    # Several choices of one response share their prompt, not the rest.
    for choice in choices:
        name = next((name for name in IDS if choice.get(name) is not None), None)
        if name is None:
            raise UserError(
                f"{where}: no {' or '.join(IDS)}; turn their recording on "
                "(--enable-return-routed-experts in vLLM, return_routed_experts in SGLang)"
            )
        ids = _decode(choice[name], where, layers, top_k)
        if ids.ndim == 3 and len(ids) > 1 and ids.shape[2] > 1 and not ids[-1].any():
            # No step computed the last chosen token; some versions give it a row of zeros.
            ids = ids[:-1]
        user = found.get("user", found.get("domain"))
        arrays = {
            "ids": ids,
            "position": np.arange(len(ids)),
            "user": np.full(len(ids), "" if user is None else str(user)),
        }
        if "weights" in choice:
            arrays["weights"] = _array(choice["weights"], "weights", where)
            if len(arrays["weights"]) != len(ids):
                raise UserError(f"{where}: weights must have a row for each of {len(ids)} tokens")
        if count is not None:
            if not (isinstance(count, int) and 0 <= count <= len(ids)):
                raise UserError(
                    f"{where}: prompt_tokens is {count} of {len(ids)} tokens with routing"
                )
            arrays["phase"] = (np.arange(len(ids)) >= count).astype(np.uint8)
        yield arrays


def _decode(found: Any, where: str, layers: int | None, top_k: int | None) -> np.ndarray:
    """Decodes ids that are nested lists, an .npy in base64 (vLLM), or bare int32 in base64
    (SGLang)."""
    if not isinstance(found, str):
        return _array(found, "ids", where)
    try:
        raw = base64.b64decode(found, validate=True)
    except binascii.Error as error:
        raise UserError(f"{where}: the ids are text that is not base64 ({error})") from error
    if raw.startswith(b"\x93NUMPY"):
        try:
            return np.atleast_1d(np.load(io.BytesIO(raw), allow_pickle=False))
        except (ValueError, EOFError) as error:
            raise UserError(f"{where}: the array of ids is cut short ({error})") from error
    if layers is None or top_k is None:
        raise UserError(
            f"{where}: the ids are int32 without a shape; say it with --layers (all of the "
            "model's) and --top-k"
        )
    if len(raw) % (4 * layers * top_k):
        raise UserError(
            f"{where}: {len(raw)} bytes are no whole number of tokens of {layers} layers with "
            f"{top_k} int32 each; correct --layers or --top-k"
        )
    return np.frombuffer(raw, "<i4").reshape(-1, layers, top_k)


def _array(found: Any, name: str, where: str) -> np.ndarray:
    if not isinstance(found, list):
        raise UserError(f"{where}: {name} must be lists [tokens, layers, k], not {found!r:.40}")
    try:
        return np.asarray(found)
    except ValueError as error:
        raise UserError(f"{where}: {name} has rows of different lengths") from error


_READERS: dict[str, Callable[[Path, int | None, int | None], Arrays]] = {
    ".npy": _numpy,
    ".npz": _numpy,
    ".jsonl": _json_lines,
    ".csv": _table,
    ".tsv": _table,
}
"""Reader of each file suffix. reader(path, layers, top_k) returns arrays with a row per token, by
the names of IDS, "weights" and PER_TOKEN; it leaves others out."""
