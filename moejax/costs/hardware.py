"""Published figures of processors, by which plans are made for machines that are not at hand.

Rates are those that makers state: dense bfloat16 products with float32 sums, memory, and PCIe in
one direction. Runs reach a part of them (moejax.start.report.forecast).
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import NamedTuple

from host_offload.sizing.cost_model import CostModel, StepCost
from moejax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A device as its maker states it."""

    memory: int | None
    """Bytes; None: as much as is built in, see --memory."""
    memory_rate: float
    """Bytes a second."""
    link: float
    """Bytes a second from host memory, one direction; 0: the device computes in host memory."""
    matrix_rate: float
    """Operations a second."""


def _gpu(gigabytes: float, terabytes_s: float, link: float, teraflops: float) -> Hardware:
    return Hardware(int(gigabytes * 2**30), terabytes_s * 1e12, link * 1e9, teraflops * 1e12)


HARDWARE: Mapping[str, Hardware] = {
    "B200": _gpu(180, 8.0, 64, 2250),
    "H200": _gpu(141, 4.8, 64, 989),
    "H100": _gpu(80, 3.35, 64, 989),
    "A100": _gpu(80, 2.0, 32, 312),
    "L40S": _gpu(48, 0.864, 32, 362),
    "L4": _gpu(24, 0.3, 32, 121),
    "A10": _gpu(24, 0.6, 32, 125),
    "RTX PRO 6000": _gpu(96, 1.79, 64, 504),
    "RTX 6000 Ada": _gpu(48, 0.96, 32, 364),
    "RTX A6000": _gpu(48, 0.768, 32, 155),
    "RTX A5000": _gpu(24, 0.768, 32, 111),
    "RTX 5090": _gpu(32, 1.79, 64, 209),
    "RTX 5080": _gpu(16, 0.96, 64, 113),
    "RTX 5070 Ti": _gpu(16, 0.896, 64, 88),
    "RTX 5060 Ti": _gpu(16, 0.448, 32, 47),
    "RTX 4090": _gpu(24, 1.01, 32, 165),
    "RTX 4080": _gpu(16, 0.717, 32, 97),
    "RTX 4070": _gpu(12, 0.504, 32, 58),
    "RTX 4060 Ti": _gpu(16, 0.288, 16, 44),
    "RTX 3090": _gpu(24, 0.936, 32, 71),
    "RTX 3080": _gpu(10, 0.76, 32, 59),
    "RTX 3060": _gpu(12, 0.36, 32, 25),
    "CPU DDR5": Hardware(None, 80e9, 0.0, 1.5e12),
    "CPU DDR4": Hardware(None, 45e9, 0.0, 0.8e12),
}
"""By a part of the device's name (`jax.Device.device_kind`). PCIe has the lanes of the card: 16, or
8 of the 4060 Ti and the 5060 Ti. CPUs have two memory channels and eight cores with AVX-512."""


def hardware_of(device_kind: str) -> Hardware | None:
    """Returns the figures of a jax device; None if its name has none of the table's."""
    known = [name for name in HARDWARE if re.search(rf"\b{name}\b(?! Ti\b)", device_kind)]
    return HARDWARE[max(known, key=len)] if known else None


def find_hardware(name: str) -> tuple[str, Hardware]:
    """Returns a name of the table and its figures, for any spelling (rtx4090, NVIDIA RTX 4090).
    Raises UserError for a name that is not there."""
    spelled = {_plain(known): known for known in HARDWARE}
    wanted = re.sub(r"^(nvidia|geforce)+", "", _plain(name))
    if (found := spelled.get(wanted) or spelled.get("rtx" + wanted)) is not None:
        return found, HARDWARE[found]
    close = difflib.get_close_matches(wanted, spelled, 1)
    hint = f" Did you mean {spelled[close[0]]!r}?" if close else ""
    raise UserError(f"gpu {name!r} is not one of {', '.join(HARDWARE)}.{hint}")


def is_stated(name: str) -> bool:
    """Whether the table has the device."""
    try:
        find_hardware(name)
    except UserError:
        return False
    return True


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


class Reached(NamedTuple):
    """The parts of stated rates that runs reach."""

    memory: float
    link: float
    matrix: float
    layer_s: float
    """Seconds of a layer beside its bytes: launches and the gaps between them."""


LOW, LIKELY, HIGH = (
    Reached(0.6, 0.6, 0.2, 75e-6),
    Reached(0.8, 0.75, 0.4, 50e-6),
    Reached(0.95, 0.85, 0.6, 25e-6),
)
"""An H200 reached 0.87 of its memory's rate, 0.79 of its link's, and 50 µs
(docs/research/benchmarks.md). The range around it is a choice."""

DISK = 3.5e9
"""Bytes a second of a disk, unless they are given."""

CHUNK, TILE = 512, 16
"""Rows of a tile in prefill and in decode steps of stated costs."""


def stated_costs(
    name: str, *, layers: int, experts: int, top_k: int, expert_bytes: int, rows: int
) -> CostModel:
    """Returns the likely costs of a device of the table for routing without a model: experts of two
    bytes a weight and launches, no dense part.

    - `rows`: most rows of a decode step.

    Raises UserError for a device that is not in the table.
    """
    hardware = find_hardware(name)[1]
    link = hardware.link * LIKELY.link if hardware.link else DISK
    read = expert_bytes / (hardware.memory_rate * LIKELY.memory)
    row = expert_bytes / (hardware.matrix_rate * LIKELY.matrix)  # two operations a weight
    move = {"fill": expert_bytes / link, "read": expert_bytes / link}
    step = layers * LIKELY.layer_s
    decode = StepCost(step, 0.0, 0.0, max(read, TILE * row), TILE * row, **move)
    prefill = StepCost(step, 0.0, 0.0, max(read, CHUNK * row), CHUNK * row, **move)
    return CostModel(
        layers=layers,
        experts=experts,
        top_k=top_k,
        expert_bytes=expert_bytes,
        chunk=CHUNK,
        row_tile=TILE,
        decode={rows: decode},
        prefill=prefill,
        control=0.0,
        recompute_per_token=layers * top_k * row,
        kv_swap_per_byte=1 / link,
        link_per_byte=1 / link,
        about={"stated": name},
    )
