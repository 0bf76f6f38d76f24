"""What a grid compares: policies as a definition names them."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from host_offload.control.interface import Policy, Spec
from host_offload.control.rules import BETWEEN_LAYERS, check_policies, name_of
from host_offload.policies.eviction.names import POLICIES, with_eviction
from host_offload.policies.prefetch.fitted import learned_bytes
from host_offload.policies.prefetch.names import FROM_PATH, PREFETCH, prefetch_policy
from moejax.errors import UserError, as_user_error, user_errors
from moejax.step.parts import TRACE_ARRAYS

BUDGETS = frozenset({"cells", "kv_pages", "max_running", "transitions"})
"""What a policy of a grid may not decide: its engine's arena is that of the largest budget."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One of the things that are compared: a name and its policies, eviction first."""

    name: str
    policies: tuple[Policy, ...]
    files: tuple[tuple[str, str], ...]
    """Files that it was read from, with their SHA-256: another content is another experiment."""

    def learned_bytes(self, spec: Spec) -> int:
        """Bytes of what it learned or may learn, which are memory that experts do not get."""
        return learned_bytes(self.policies, spec)

    @property
    def needs_host(self) -> bool:
        """It looks between layers."""
        return any(policy.moments & BETWEEN_LAYERS for policy in self.policies)

    @property
    def arrays(self) -> frozenset[str]:
        """What steps must give out for it."""
        return TRACE_ARRAYS & {need for policy in self.policies for need in policy.needs}


def arm_of(text: str, home: Path) -> Arm:
    """The arm that `text` names: an eviction, a prefetch (NAME or NAME=PATH) or FILE.py:CLASS, each
    with settings in parentheses if wanted, `mixtral-offloading(count=1)`; several with + between
    them. LRU evicts where none of them does.

    home: where files that are not absolute are. Raises UserError for what is none of these, for
    policies that cannot run together, and for whatever a file of policies raises.
    """
    parts = [part.strip() for part in text.split("+")]
    policies, files = [], {}
    for part in parts:
        policy, read = _policy(part, text, home)
        policies.append(policy)
        files.update(read)
    with user_errors(where=f"policy {text!r}: "):
        _, every = with_eviction(None, policies)
        # With the driver that has all moments: which one runs it is another question.
        check_policies(every, "host")
    for policy in every:
        if moves := sorted(policy.writes & BUDGETS):
            raise UserError(
                f"policy {text!r}: {name_of(policy)} writes {moves[0]!r}, and in a grid budgets "
                "are the grid's; leave it out"
            )
    return Arm(text, every, tuple(files.items()))


def _policy(part: str, whole: str, home: Path) -> tuple[Policy, dict[str, str]]:
    name, settings = _settings(part, whole)
    place, colon, found = name.rpartition(":")
    if colon and place.endswith(".py"):
        path = (home / place).resolve()
        made = _in_file(path, found, whole)
        files = {str(path): file_digest(path)}
        with as_user_error(f"policy {whole!r}: {found}{settings or '()'} fails"):
            return made(**settings), files
    name, given, path = name.partition("=")
    if given and name in FROM_PATH:
        at = (home / path).resolve()
        if settings:
            raise UserError(
                f"policy {whole!r}: what {name} learned has its settings; leave out (…)"
            )
        with user_errors(where=f"policy {whole!r}: "):
            # An oracle's is a directory, whose steps nobody edits.
            files = {str(at): file_digest(at)} if at.is_file() else {str(at): ""}
            return prefetch_policy(f"{name}={at}"), files
    known = POLICIES | PREFETCH
    if given or name not in known:
        with_files = ", ".join(f"{n}=PATH" for n in FROM_PATH)
        raise UserError(
            f"unknown policy {name!r}; write one of {', '.join(known)}, {with_files}, or "
            "FILE.py:CLASS of your own (docs/write_a_policy.md); several together as A + B"
        )
    with as_user_error(f"policy {whole!r}: {name} does not take {settings}"):
        return known[name](**settings), {}


def _settings(part: str, whole: str) -> tuple[str, dict[str, Any]]:
    """(name, keyword arguments) of "NAME" or "NAME(key=value, …)"."""
    name, bracket, rest = part.partition("(")
    if not bracket:
        return name, {}
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        return name.strip(), {str(k.arg): ast.literal_eval(k.value) for k in call.keywords if k.arg}
    except (SyntaxError, ValueError):
        raise UserError(
            f"policy {whole!r}: settings are written as NAME(key=value), with plain values"
        ) from None


def _in_file(path: Path, name: str, whole: str) -> Callable[..., Policy]:
    module = _module(path, whole)
    made = getattr(module, name, None)
    if not isinstance(made, type):
        has = sorted(
            n for n, v in vars(module).items() if isinstance(v, type) and hasattr(v, "decide")
        )
        raise UserError(
            f"policy {whole!r}: {path} has no class {name}; it has {', '.join(has) or 'no policy'}"
        )
    return made


def _module(path: Path, whole: str) -> ModuleType:
    if not path.is_file():
        raise UserError(f"policy {whole!r}: there is no file {path}")
    name = f"moejax_policy_{path.stem}_{file_digest(path)[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        with as_user_error(f"policy {whole!r}: {path} cannot be read"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def file_digest(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits. Raises UserError where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
