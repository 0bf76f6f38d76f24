"""Ray itself: found late, connected to, asked what it has."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator
from typing import Any

from moejax.errors import UserError, shown

LOCAL = "local"
"""The address of a Ray that is started here, and ends with this process."""

OBJECT_STORE = 200 << 20
"""Bytes of a local Ray's object store: only requests and results pass through it."""

REACHED_S = 5.0
"""How long a cluster's head may take to accept a connection."""


@dataclasses.dataclass(frozen=True)
class Node:
    """A node of Ray's: usually a machine of the cluster."""

    id: str
    address: str
    cpus: float
    gpus: float


def require_ray() -> Any:
    """The module ray. Raises UserError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        if (error.name or "").split(".")[0] != "ray":
            raise
        raise UserError(
            "jobs on several machines need Ray, which is not installed here: "
            "pip install 'moejax[ray]', on every machine of the cluster"
        ) from None
    return ray


@contextlib.contextmanager
def connect(address: str, cpus: int | None = None) -> Iterator[None]:
    """`open_connection` for a block. Leaves a connection that the process has already as it is."""
    ray = require_ray()
    if ray.is_initialized():
        yield
        return
    open_connection(address, cpus)
    try:
        yield
    finally:
        ray.shutdown()


def open_connection(address: str, cpus: int | None = None) -> None:
    """Connects this process to the Ray at this address ("HOST:PORT", "ray://HOST:PORT", "auto"), or
    to one of its own for LOCAL, with this many CPUs (default: the machine's). One that the process
    has already is used whatever its address.

    Raises UserError for an address at which no Ray answers.
    """
    ray = require_ray()
    if ray.is_initialized():
        return
    said: Any = dict(logging_level="ERROR", log_to_driver=False)
    try:
        if address == LOCAL:
            ray.init(
                "local",
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE,
                **said,
            )
        else:
            _require_answer(address)
            ray.init(address, **said)
    except Exception as error:  # Ray raises bare ones
        if isinstance(error, UserError):
            raise
        why = str(error).strip().split("\n")[0]
        raise UserError(
            f"no Ray at {shown(address)} ({why}); `ray status` on the cluster's head names its "
            f"address, and --ray {LOCAL} starts one on this machine"
        ) from error


def nodes() -> list[Node]:
    """The nodes that are alive."""
    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in require_ray().nodes()
        if node["Alive"]
    ]


def _require_answer(address: str) -> None:
    """Raises UserError for an address that cannot be one, or where nothing listens: Ray itself
    tries for a minute, and ends the process in some versions."""
    if address == "auto":
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and host and port.isdigit()):
        raise UserError(
            f"{shown(address)} is no address of Ray; give HOST:PORT of the cluster's head (6379 if "
            f"nobody chose another), auto on a machine of the cluster, or {LOCAL}"
        )
    try:
        socket.create_connection((host, int(port)), REACHED_S).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"nothing answers at {shown(address)} ({why}); is it the head of a cluster (`ray start "
            f"--head --port=6379`), and can this machine reach it? --ray {LOCAL} needs none"
        ) from error


def own_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def explain_end(error: BaseException) -> str:
    """Why an actor or a task of Ray ended: Ray's first lines, of a Python error the last one."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    of_python = "Traceback" in str(error) or hasattr(error, "cause")
    told = lines[-1:] if of_python else lines[:6]
    return f"{type(error).__name__}: {' '.join(told)[:500]}"
