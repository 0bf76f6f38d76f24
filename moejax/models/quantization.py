"""What config.json says of a checkpoint that others quantized: how its matrices lie in the files,
and which record formats hold them as they are. Whatever is not read here is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from moejax.errors import UserError, shown, user_errors
from moejax.models.json_values import is_integer
from pallas_kernels.records.format import encodings_of

KEYS = ("quantization_config", "compression_config")

_ELSE = (
    "use a checkpoint in one of the formats of docs/how-to/quantized_checkpoints.md, or in bfloat16"
)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A format of quantized matrices."""

    layout: str
    """How matrices lie in the files: a key of moejax.checkpoints.quantized_tensors.LAYOUTS."""
    codes: str
    """What codes are, and how many weights share a scale: the first parts of a name of
    pallas_kernels.records.encoding.read_name."""
    scale: str | None = None
    """The name's part that says what a scale is; None: it depends on the dtype of the scales."""
    zeros: bool = False
    """Whether weights that share a scale also share the code that means 0."""
    targets: tuple[str, ...] = ()
    """The modules that config.json names; whether a matrix is in this format, its tensors say."""

    def version(self, scale: str) -> str:
        """The name of the record format.

        - `scale`: the part for scales of their dtype.
        """
        return f"{self.codes}-{self.scale or scale}{'-zero' if self.zeros else ''}"


@dataclasses.dataclass(frozen=True)
class Quantization:
    """The formats of a checkpoint's quantized matrices. Others are as in other checkpoints."""

    method: str
    """quant_method, and the formats within it."""
    schemes: tuple[Scheme, ...]
    versions: tuple[str, ...]
    """The versions of the experts of each MoE layer, or one for all: as config.json lets expect,
    and, when the headers of the tensors are read, as they say."""
    activations: bool = False
    """Its authors mean activations to be quantized too; moejax leaves them as they are."""
    uneven_layers: int = 0
    """How many MoE layers are dense because their experts are in formats that differ by expert."""
    uneven_bytes: int = 0
    """What the experts of those layers take in the files."""


class _Table:
    """A quantization_config, or a table in it; `refuse` makes the error."""

    def __init__(self, values: Any, where: str):
        self.where = where
        if not isinstance(values, dict):
            raise UserError(f"{where} must be an object, not {shown(values)}")
        self.values = values

    def refuse(self, what: str) -> UserError:
        return UserError(f"{self.where}: {what}, which is not supported; {_ELSE}")

    def only(self, key: str, *allowed: Any) -> Any:
        """The value, one of those; the first where it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return allowed[0]
        if not any(value == one and type(value) is type(one) for one in allowed):
            raise self.refuse(f"{key} is {shown(value)}")
        return value

    def group(self, value: Any) -> int:
        """A number of weights that share a scale."""
        if not is_integer(value) or not 1 <= value <= 2**16 or value & (value - 1):
            raise self.refuse(f"weights in groups of {shown(value)}")
        return value

    def inner(self, key: str) -> _Table:
        return _Table(self.values.get(key), f"{self.where}.{key}")


def parse_quantization(raw: dict, dtype: str | None, source: str) -> Quantization | None:
    """The quantization of a parsed config.json; None: it has none. dtype: of the other weights.
    Raises UserError, naming the field, for a format that moejax does not read."""
    for key in KEYS:
        if raw.get(key) is None:
            continue
        table = _Table(raw[key], f"{source}: {key}")
        if raw.get("expert_dtype") is not None:  # of DeepSeek-V4
            table.values = {"expert_dtype": raw["expert_dtype"], **table.values}
        method = table.values.get("quant_method")
        if not isinstance(method, str) or method not in (_OWN, *_METHODS):
            named = shown(method).strip("'") if method else "an unnamed method"
            raise table.refuse(f"the checkpoint is quantized with {named}")
        if method == _OWN:
            return _read_own(table)
        layout, schemes, activations = _METHODS[method](table)
        # The modules of one scheme are all; of several, one may be for experts.
        experts = [one for one in schemes if any("expert" in name for name in one.targets)]
        scale = {"float16": "f16"}.get(dtype or "", "bf16")
        version = (experts or schemes)[0].version(scale)
        named = method if layout == method else f"{method} {layout}"
        return Quantization(named, schemes, (version,), activations)
    return None


def write_quantization(found: Quantization) -> dict[str, Any]:
    """What config.json says of a converted checkpoint whose experts keep their codes."""
    known = {"method": found.method, "activations": found.activations}
    return {"quant_method": _OWN, "versions": [*found.versions], **known}


def _read_own(table: _Table) -> Quantization:
    """What write_quantization wrote."""
    versions, method = table.values.get("versions"), table.values.get("method")
    if not isinstance(versions, list) or not versions or not isinstance(method, str):
        raise table.refuse("versions and method must be a list and a name")
    for version in versions:
        with user_errors(where=f"{table.where}: "):
            encodings_of(str(version))
    activations = table.only("activations", False, True)
    return Quantization(method, (), tuple(versions), activations)


_OWN = "moejax"
"""quant_method of what `moejax convert` wrote."""

_Found = tuple[str, tuple[Scheme, ...], bool]
"""The name of the layout, the schemes, and whether activations are quantized too."""


def _fp8(table: _Table) -> _Found:
    """DeepSeek's: e4m3 with a scale for each block (its section 3.3, arXiv:2412.19437). V4's scales
    have another name, and its experts may be in e2m1 with an e8m0 scale for each 32."""
    table.only("fmt", "e4m3", "float8_e4m3fn")
    static = table.only("activation_scheme", "dynamic", "static") == "static"
    block = table.values.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2:
        raise table.refuse(f"weight_block_size is {shown(block)}, FP8 without blocks")
    out, into = map(table.group, block)
    if static:
        raise table.refuse("activation_scheme is 'static'")
    schemes = [Scheme("fp8", f"fp8-{into}x{out}", "f32")]
    if table.values.get("scale_fmt") == "ue8m0":
        schemes.append(Scheme("fp8-scale", f"fp8-{into}x{out}", "f32"))
    if table.only("expert_dtype", "fp8", "fp4") == "fp4":
        schemes.append(Scheme("mxfp4-scale", "fp4-32", "e8m0", targets=("experts",)))
    return "fp8", tuple(schemes), True


def _mxfp4(table: _Table) -> _Found:
    """gpt-oss' own: stacked experts in e2m1, with an e8m0 scale for each 32 (OCP MX 1.0)."""
    return "mxfp4", (Scheme("mxfp4", "fp4-32", "e8m0"),), False


def _compressed_tensors(table: _Table) -> _Found:
    """Of a scheme for each group of modules (the compressed-tensors library)."""
    for other in ("sparsity_config", "moe_sparsity_config", "transform_config"):
        table.only(other, {})
    if table.values.get("kv_cache_scheme") is not None:
        raise table.refuse("kv_cache_scheme quantizes KV")
    groups = table.inner("config_groups")
    schemes = []
    for name in groups.values:
        group = groups.inner(name)
        format_ = group.values.get("format") or table.values.get("format")
        scheme = _compressed_group(group.inner("weights"), format_)
        if isinstance(targets := group.values.get("targets"), list):
            scheme = dataclasses.replace(scheme, targets=tuple(map(str, targets)))
        schemes.append(scheme)
    if not schemes:
        raise groups.refuse("it names no group of modules")
    inputs = [groups.inner(name).values.get("input_activations") for name in groups.values]
    layouts = " and ".join(dict.fromkeys(scheme.layout for scheme in schemes))
    return layouts, tuple(schemes), any(inputs)


def _compressed_group(weights: _Table, format_: Any) -> Scheme:
    """The scheme of a group of modules."""
    if not isinstance(format_, str) or format_ not in _COMPRESSED:
        raise weights.refuse(f"the format is {shown(format_)}")
    kind, sizes = _COMPRESSED[format_]
    weights.only("type", kind)
    bits = weights.only("num_bits", *sizes)
    weights.only("dynamic", False)
    symmetric = weights.only("symmetric", True, *([False] if kind == "int" else []))
    weights.only("actorder", None, False, "weight", "static")
    strategy = weights.values.get("strategy")
    if strategy == "channel":
        group = "channel"
    elif strategy == "group" or (strategy, format_) == ("tensor_group", "nvfp4-pack-quantized"):
        group = f"{weights.group(weights.values.get('group_size'))}"
    elif strategy == "block" and isinstance(block := weights.values.get("block_structure"), list):
        if len(block) != 2:
            raise weights.refuse(f"block_structure is {shown(block)}")
        out, into = map(weights.group, block)
        group = f"{into}x{out}"
    else:
        raise weights.refuse(f"strategy is {shown(strategy)}")
    size, scale = _FLOAT4.get(format_, (group, None))
    if group != size:
        raise weights.refuse(f"{format_} in groups of {group}")
    codes = "fp" if kind == "float" else "int"
    return Scheme(format_, f"{codes}{bits}-{group}", scale, zeros=not symmetric)


def _awq(table: _Table) -> _Found:
    """AutoAWQ's (arXiv:2306.00978)."""
    version = table.values.get("version")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise table.refuse(f"version is {shown(version)}")
    table.only("zero_point", True)
    bits = table.only("bits", 4)
    group = table.group(table.values.get("group_size"))
    return "awq", (Scheme("awq", f"int{bits}-{group}", zeros=True),), False


def _gptq(table: _Table) -> _Found:
    """AutoGPTQ's and GPTQModel's (arXiv:2210.17323)."""
    bits, size = table.only("bits", 4, 8), table.values.get("group_size")
    group = "channel" if size == -1 else f"{table.group(size)}"
    # Whether columns are ordered, g_idx says.
    table.only("desc_act", False, True)
    symmetric = table.only("sym", True, False)
    layout = table.only("checkpoint_format", "gptq", "gptq_v2")
    dynamic = table.values.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(name.startswith("-:") for name in dynamic):
        raise table.refuse("dynamic has other settings for some modules")
    return layout, (Scheme(layout, f"int{bits}-{group}", zeros=not symmetric),), False


def _modelopt(table: _Table) -> _Found:
    """NVIDIA's NVFP4."""
    algorithm = table.values.get("quant_algo")
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        raise table.refuse(f"quant_algo is {shown(algorithm)}")
    table.only("group_size", 16)
    return "NVFP4", (Scheme("modelopt", "fp4-16", "e4m3xf32"),), algorithm == "NVFP4"


_FLOAT4 = {
    "mxfp4-pack-quantized": ("32", "e8m0"),
    "nvfp4-pack-quantized": ("16", "e4m3divf32"),
}
"""Format with codes of four bits that are floats → its groups, and what its scales are."""


_COMPRESSED: dict[str, tuple[str, tuple[int, ...]]] = {
    "pack-quantized": ("int", (8, 4)),
    "int-quantized": ("int", (8,)),
    "float-quantized": ("float", (8,)),
    "mxfp4-pack-quantized": ("float", (4,)),
    "nvfp4-pack-quantized": ("float", (4,)),
}
"""Format of compressed-tensors → what its codes are, and bits that they may have."""

_METHODS: dict[str, Callable[[_Table], _Found]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "modelopt": _modelopt,
}
