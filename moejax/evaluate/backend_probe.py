"""What jax makes of this machine, as JSON on stdout: `python -m moejax.evaluate.backend_probe`.

A process of its own, so that a driver that hangs or ends the process does not end what asks.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

PROBED_BYTES = 256 << 20
"""Bytes of each transfer that is timed."""

REPEATS = 5


def main() -> int:
    print(json.dumps(probe()))
    return 0


def probe() -> dict[str, Any]:
    """Whatever it finds, without an exception: devices, or the errors that jax gave instead."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage() + _cause(record))
    logging.getLogger("jax._src.xla_bridge").addHandler(handler)
    found: dict[str, Any] = {"devices": [], "said": said}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found["devices"] = [_described(device) for device in jax.devices()]
            device = jax.devices()[0]
            if device.platform == "gpu":
                found["link"] = link_rate(device)
        except Exception as error:  # what jax cannot do here is the answer
            said.append(str(error) or type(error).__name__)
    said += [str(warning.message) for warning in warned if "jax" in str(warning.filename)]
    return found


def link_rate(device: jax.Device) -> float:
    """Bytes a second from pinned host memory to the device, the best of REPEATS."""
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    source = jax.device_put(np.zeros(PROBED_BYTES, np.uint8), pinned)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(jax.device_put(source, SingleDeviceSharding(device)))
        times.append(time.perf_counter() - began)
    return PROBED_BYTES / min(times)


def _described(device: jax.Device) -> dict[str, Any]:
    statistics = device.memory_stats() or {}
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "capability": getattr(device, "compute_capability", None),
        "bytes_limit": statistics.get("bytes_limit"),
        "runtime": device.client.platform_version,
    }


def _cause(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    return f": {error}" if error else ""


if __name__ == "__main__":
    sys.exit(main())
