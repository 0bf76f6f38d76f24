"""Which implementation of each op runs: chosen once, by name, never silently."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from importlib import import_module

from pallas_kernels.cards import CLASSES
from pallas_kernels.cpu.library import DTYPES, why_not_cpu
from pallas_kernels.implementations import no_integers
from pallas_kernels.mosaic import why_not_mosaic
from pallas_kernels.option_text import parse_pairs, unknown
from pallas_kernels.triton import KERNEL_DTYPES, is_interpreted

KERNELS = ("pallas", "mosaic")
"""Implementations that are kernels for GPUs: a kernel runs only where it was checked."""


@dataclasses.dataclass(frozen=True)
class Ops:
    """The chosen implementation of each op, and the class of GPU. A field has the name of the op's
    folder."""

    linear: str
    head_linear: str
    rms_norm: str
    layer_norm: str
    route: str
    plan: str
    fill: str
    stage: str
    move: str
    expert_ffn: str
    fill_ffn: str
    combine: str
    kv_write: str
    latent_write: str
    paged_attention: str
    gated_delta: str
    short_conv: str
    selective_scan: str
    truncate: str
    sample: str
    shared_kib: int = CLASSES[-1]
    """The class of the GPU, by which kernels choose their stages."""
    arithmetic: str = "exact"
    """Of products with weights in codes, one of pallas_kernels.records.integers.ARITHMETICS."""

    def chosen(self) -> dict[str, str]:
        """Op → implementation."""
        return {op: getattr(self, op) for op in OPS}

    def kernels(self) -> list[str]:
        """The ops that are kernels."""
        return [op for op, name in self.chosen().items() if name in KERNELS]

    def are_kernels(self, *ops: str) -> bool:
        """Whether all of these ops are kernels of Triton. The properties below name what follows
        from that."""
        return all(getattr(self, op) == "pallas" for op in ops)

    @property
    def has_kernels(self) -> bool:
        """Whether any op is a kernel."""
        return bool(self.kernels())

    @property
    def fuses_norm_route(self) -> bool:
        """Whether norm_route_and_list may be one launch."""
        return self.are_kernels("linear", "rms_norm", "route")

    @property
    def fuses_route_plan(self) -> bool:
        """Whether route_and_plan may be one launch."""
        return self.are_kernels("route", "plan")

    @property
    def fuses_fill(self) -> bool:
        """Whether missing experts arrive within the launches that compute the others."""
        return self.are_kernels("fill_ffn")

    @property
    def skips_plans(self) -> bool:
        """Whether steps without a plan, where all experts are resident, have fewer launches."""
        return self.are_kernels("route", "plan", "expert_ffn")

    @property
    def ends_layers(self) -> bool:
        """Whether combine increments the layer's index and returns squares in its own launch."""
        return self.are_kernels("combine")

    @property
    def merges_by_counters(self) -> bool:
        """Whether the last program of a launch, found by counters, also does the work of the next
        launch."""
        return self.are_kernels("combine", "expert_ffn")

    @property
    def truncates_by_row(self) -> bool:
        """Whether truncating one row has the same bits with any number of rows."""
        return self.are_kernels("truncate")


MADE_OF = {"fill_ffn": ("fill", "expert_ffn")}
"""Fused op → the ops that it replaces. Its implementation "xla" runs these ops, each by its own
implementation. A name that is given for all ops does not apply to it, since its kernel may not run
a model that theirs run."""

OPS: dict[str, tuple[str, ...]] = {
    field.name: tuple(import_module(f"pallas_kernels.{field.name}.api").IMPLEMENTATIONS)
    for field in dataclasses.fields(Ops)
    if field.name not in ("shared_kib", "arithmetic")
}
"""Every op and the implementations that its `api` lists."""


def parse_ops(ops: str | Mapping[str, str]) -> dict[str, str]:
    """Op → wanted implementation or "auto", for every op.

    - `ops`: "auto"; one implementation, for every op that has it; pairs such as
      "plan=xla,route=pallas"; or a mapping. Ops that are not named are "auto".

    Raises ValueError for an unknown op or implementation, with those that exist.
    """
    if isinstance(ops, str) and "=" in ops:
        ops = parse_pairs("ops", ops, dict.fromkeys(OPS, str))
    if isinstance(ops, Mapping):
        chosen = dict(ops)
    else:
        have = [op for op, names in OPS.items() if ops in names and op not in MADE_OF]
        chosen = dict.fromkeys(have or OPS, ops)
    for op in chosen:
        if op not in OPS:
            raise ValueError(unknown("op", op, OPS))
    for op, name in chosen.items():
        if name != "auto" and name not in OPS[op]:
            raise ValueError(
                f"op {op!r} has no implementation {name!r}; it has {', '.join(OPS[op])}"
            )
    return {op: chosen.get(op, "auto") for op in OPS}


@dataclasses.dataclass(frozen=True)
class Target:
    """The device, dtype and model that a backend must run."""

    platform: str
    """The device's, "cpu" or "gpu"."""
    dtype: str
    no_kernel: Mapping[str, str]
    """Op whose kernel this model cannot use → why (its `why_not_pallas`)."""
    no_native: Mapping[str, str]
    """Op whose native CPU op cannot read its input → why."""
    no_mosaic: Mapping[str, str]
    """Op whose Mosaic kernel this model cannot use → why."""


def why_not_native(op: str, target: Target) -> str | None:
    """Why the library of native CPU ops cannot run an op; None: it can."""
    if target.platform != "cpu":
        return "the native CPU ops run on CPUs; here use pallas or auto"
    if reason := why_not_cpu():
        return f"{reason}; or use xla or auto"
    if target.dtype not in DTYPES:
        known = " or ".join(DTYPES)
        return f"the native CPU ops compute in {known}, not {target.dtype}; use xla or auto"
    if op in target.no_native:
        return f"{target.no_native[op]}; use xla or auto"
    return None


def why_not_kernel(op: str, target: Target) -> str | None:
    """Why the Triton-lowered Pallas kernel of an op cannot run; None: it can."""
    return _why_not(target, target.no_kernel.get(op))


def why_not_mosaic_kernel(op: str, target: Target) -> str | None:
    """Why the Mosaic kernel of an op cannot run; None: it can."""
    if reason := why_not_mosaic():
        return f"{reason}; use pallas, xla or auto"
    return _why_not(target, target.no_mosaic.get(op))


def _why_not(target: Target, of_model: str | None) -> str | None:
    if target.platform != "gpu" and not is_interpreted():
        return "Pallas kernels need an NVIDIA GPU; here use xla or auto"
    if target.dtype not in KERNEL_DTYPES:
        known = " or ".join(KERNEL_DTYPES)
        return f"Pallas kernels compute in {known}, not {target.dtype}; use xla or auto"
    return of_model and f"{of_model}; use xla or auto"


WHY_NOT: dict[str, Callable[[str, Target], str | None]] = {
    "pallas": why_not_kernel,
    "mosaic": why_not_mosaic_kernel,
    "cpu": why_not_native,
}
"""Backend → function that says why it cannot run an op. Names not in here, such as "xla", run
everywhere."""

AUTO = {"gpu": ("pallas", "xla"), "cpu": ("cpu", "xla")}
"""Platform → the names that "auto" tries: the first that has the op and can run it. Mosaic kernels
wait for a measurement."""


def resolve_ops(
    ops: str | Mapping[str, str] = "auto",
    *,
    platform: str = "cpu",
    dtype: str = "float32",
    no_kernel: Mapping[str, str] | None = None,
    no_native: Mapping[str, str] | None = None,
    no_mosaic: Mapping[str, str] | None = None,
    shared_kib: int = CLASSES[-1],
    arithmetic: str = "exact",
) -> Ops:
    """Chooses an implementation for each op. With "auto", an op of MADE_OF is a kernel if all ops
    that it replaces are kernels.

    - `ops`: see parse_ops.
    - `platform`, `dtype`, `no_kernel`, `no_native`, `no_mosaic`: see Target.
    - `shared_kib`: the device's `cards.shared_class`.
    - `arithmetic`: see Ops; another one than "exact" is that of XLA's ops and of the native ones.

    Raises ValueError for what parse_ops refuses, for a named backend that cannot run (WHY_NOT), for
    an unknown class, and for an arithmetic that the chosen ops lack.
    """
    if shared_kib not in CLASSES:
        raise ValueError(f"kernels have tables for {CLASSES} KiB a program, not {shared_kib}")

    target = Target(platform, dtype, no_kernel or {}, no_native or {}, no_mosaic or {})

    def why_not(op: str, name: str) -> str | None:
        return WHY_NOT[name](op, target) if name in WHY_NOT else None

    resolved: dict[str, str] = {}
    for op, name in parse_ops(ops).items():
        if name != "auto":
            if reason := why_not(op, name):
                raise ValueError(f"op {op!r}: {reason}")
        elif op in MADE_OF:
            parts = {resolved[part] for part in MADE_OF[op]}
            name = "pallas" if parts == {"pallas"} and op not in target.no_kernel else "xla"
        else:
            able = (n for n in AUTO[target.platform] if n in OPS[op] and why_not(op, n) is None)
            name = next(able, "xla")
        resolved[op] = name
    for op in ("linear", "expert_ffn", "fill_ffn"):
        if arithmetic != "exact" and (platform != "cpu" or resolved[op] in KERNELS):
            on = "" if platform == "cpu" else f" on a {platform.upper()}"
            raise ValueError(no_integers(op, f"{resolved[op]}{on}"))
    return Ops(**resolved, shared_kib=shared_kib, arithmetic=arithmetic)
