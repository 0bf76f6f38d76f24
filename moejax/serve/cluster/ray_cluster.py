"""Imports Ray when it is needed, connects to it, and asks what the cluster has."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator
from typing import Any

from moejax.errors import UserError, shown

LOCAL = "local"
"""The address of a Ray that this process starts and ends."""

OBJECT_STORE = 200 << 20
"""Bytes of a local Ray's object store: only requests and results pass through it."""

REACHED_S = 5.0
"""Seconds that a cluster's head may take to accept a connection."""


@dataclasses.dataclass(frozen=True)
class Node:
    """A node of Ray, usually one machine of the cluster."""

    id: str
    address: str
    cpus: float
    gpus: float


def require_ray() -> Any:
    """Returns the module ray. Raises UserError if Ray is not installed."""
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
    """Holds `open_connection` for a block. A connection that the process already has stays open."""
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
    """Connects this process to a Ray. If the process already has a connection, uses that, whatever
    its address.

    - `address`: "HOST:PORT", "ray://HOST:PORT", "auto", or LOCAL for a Ray of this process.
    - `cpus`: CPUs of a local Ray; None: the machine's.

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
    """Returns the nodes that are alive."""
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
    """Raises UserError for an impossible address, or one where nothing listens. Ray itself tries
    for a minute, and some of its versions end the process."""
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
    """Returns the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def explain_end(error: BaseException) -> str:
    """Returns why an actor or a task of Ray ended: the first lines of Ray's message, or the last
    line of a Python error."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    of_python = "Traceback" in str(error) or hasattr(error, "cause")
    told = lines[-1:] if of_python else lines[:6]
    return f"{type(error).__name__}: {' '.join(told)[:500]}"
