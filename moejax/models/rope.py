"""Rotary position embeddings: their fields in config.json, and their frequencies."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from moejax.errors import UserError
from moejax.models.json_values import is_integer, is_number

LARGEST = 1e30
"""The largest number of a config. A float32 holds it, while JSON's integers have no limit."""

_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    "longrope": ("factor", "attention_factor", "short_mscale", "long_mscale"),
    "proportional": ("factor",),
}
"""Type → the numbers of Rope that it reads, beside theta and the context length."""

ROPE_TYPES = tuple(name for name in _NUMBERS if name != "proportional")

_REFUSED_TYPES = {
    "proportional": "it rotates only a part of each head, which is not implemented",
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """The parameters of one kind of rotary embedding, named as in config.json's rope_parameters.

    Fields that a type does not use keep their defaults.

    - `type`: one of ROPE_TYPES.
    - `original_max_position_embeddings`: the context length before scaling, in tokens.
    - `short_factor`, `long_factor`: one for each pair of values (longrope).
    - `short_mscale`, `long_mscale`: the factor of cosine and sine in place of attention_factor
      (Phi-3.5-MoE).
    - `long`: whether the long factors are used; see for_length.
    - `part`: the share of each head's pairs that is rotated (proportional).
    """

    theta: float = 10_000.0
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    short_mscale: float | None = None
    long_mscale: float | None = None
    long: bool = False
    part: float = 1.0

    def for_length(self, max_model_len: int) -> Rope:
        """The rope of an engine whose sequences have at most `max_model_len` tokens.

        Longrope has one set of factors up to the original context length and another beyond it.
        Keys stay in the pages, so the set cannot change within a sequence. As in vLLM it is chosen
        once, by the longest sequence that the engine allows. transformers chooses by each call's
        longest position. For Phi-3.5-MoE transformers 5.24 takes the short factors for any length
        (with long_mscale beyond the original one), unlike that model's own code.
        """
        longer = max_model_len > self.original_max_position_embeddings
        return dataclasses.replace(self, long=self.type == "longrope" and longer)


def parse_rope(
    raw: dict,
    max_position_embeddings: int,
    source: str = "config.json",
    *,
    theta: float = 10_000.0,
    partial: bool = False,
    proportional: bool = False,
) -> Rope:
    """The Rope of a whole config.json, from the older keys (rope_theta, rope_scaling with "type"
    or "rope_type") and those of transformers 5 (rope_parameters), which may both be present.

    - `raw`: the parsed config.json.
    - `max_position_embeddings`: the original context length, in tokens, if the config names none.
    - `theta`: the family's default.
    - `partial`: whether the family may rotate a part of each head; see rotary_part.
    - `proportional`: whether it may do so by the type of that name.

    Raises UserError, which names source and field, for contradictions, wrong types and values that
    are not implemented.
    """
    new = _table(raw, "rope_parameters", source)
    old = _table(raw, "rope_scaling", source)
    if new and old and {**new, "rope_theta": 0} != {**old, "rope_theta": 0}:
        raise UserError(f"{source}: rope_scaling and rope_parameters contradict each other")
    table = {**old, **new}
    thetas = [t["rope_theta"] for t in (new, old, raw) if t.get("rope_theta") is not None]
    if any(theta != thetas[0] for theta in thetas):
        raise UserError(f"{source}: contradicting values of rope_theta: {thetas}")
    table["rope_theta"] = thetas[0] if thetas else theta
    part = rotary_part(raw, source, 1.0)
    kind = table.get("rope_type", "default")
    proportional = proportional and kind == "proportional"
    if part != 1 and not (partial or proportional):
        raise UserError(
            f"{source}: partial_rotary_factor {part:g} is not implemented for this model: only "
            "whole heads are rotated"
        )
    if kind in ("dynamic", "mrope"):
        # Up to max_position_embeddings, which no engine exceeds, dynamic scaling changes nothing;
        # of text, all three positions of mrope are the same one.
        if table.get("alpha") is not None:
            raise UserError(f"{source}: rope_parameters.alpha is not implemented for this model")
        kind = "default"
    refused = kind in _REFUSED_TYPES and not proportional
    if not isinstance(kind, str) or kind not in _NUMBERS or refused:
        why = _REFUSED_TYPES.get(kind, "unknown") if isinstance(kind, str) else "not a name"
        raise UserError(
            f"{source}: rope type {kind!r} is not supported ({why}); "
            f"supported: {', '.join(ROPE_TYPES)}"
        )
    if proportional:
        factor = _number(table, "factor", source) or 1.0
        return Rope(
            _number(table, "rope_theta", source, above=1.0) or theta, kind, factor, part=part
        )
    fields: dict[str, Any] = {"theta": _number(table, "rope_theta", source, above=1.0)}
    if kind not in ("default", "linear"):  # these types read no length
        original = _original_length(raw, table, max_position_embeddings, source)
        fields["original_max_position_embeddings"] = original
        # A factor of null means the ratio of the context lengths, as in transformers.
        fields["factor"] = max_position_embeddings / original
    return Rope(type=kind, **fields | _scaling(table, kind, source))


def rotary_part(raw: dict, source: str, default: float) -> float:
    """The share of each head's values that is rotated, above 0 and at most 1.

    It is partial_rotary_factor of config.json's rope_parameters or rope_scaling, otherwise of
    config.json itself: transformers writes a default of 0.5 there, beside the value that it reads.
    Raises UserError.
    """
    field = "partial_rotary_factor"
    tables = *(_table(raw, key, source) for key in ("rope_parameters", "rope_scaling")), raw
    value = next((table[field] for table in tables if table.get(field) is not None), default)
    if not is_number(value) or not 0 < value <= 1:
        raise UserError(f"{source}: {field} must be a number above 0, at most 1, not {value!r}")
    return float(value)


def _scaling(table: dict[str, Any], kind: str, source: str) -> dict[str, Any]:
    """The fields of scaling in a table of this type, under Rope's names, without null."""

    def lacks(field: str, what: str = "") -> UserError:
        return UserError(f"{source}: rope type {kind!r} needs rope_parameters.{field}{what}")

    numbers = {name: _number(table, name, source) for name in _NUMBERS[kind]}
    found: dict[str, Any] = {name: n for name, n in numbers.items() if n is not None}
    if kind in ("linear", "llama3"):
        for name in numbers:
            if name not in found:
                raise lacks(name)
    if kind == "llama3" and found["high_freq_factor"] < found["low_freq_factor"]:
        raise UserError(
            f"{source}: rope_parameters.high_freq_factor ({found['high_freq_factor']:g}) must be "
            f"at least low_freq_factor ({found['low_freq_factor']:g})"
        )
    if kind == "yarn":
        if "factor" not in table:
            raise lacks("factor")
        found["truncate"] = table.get("truncate", True)
        if not isinstance(found["truncate"], bool):
            raise UserError(f"{source}: rope_parameters.truncate must be true or false")
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            values = table.get(name)
            if not (isinstance(values, list) and values) or not all(
                is_number(v) and 0 < v <= LARGEST for v in values
            ):
                raise lacks(name, f", a list of numbers above 0, not {values!r}")
            found[name] = tuple(float(v) for v in values)
    return found


def _number(table: dict[str, Any], field: str, source: str, above: float = 0.0) -> float | None:
    """A number of rope_parameters; None if it is null or absent."""
    value = table.get(field)
    if value is None:
        return None
    where, zero = f"{source}: rope_parameters.{field}", field in ("mscale", "mscale_all_dim")
    if not is_number(value):
        raise UserError(f"{where} must be a number, not {value!r}")
    if not (above < value <= LARGEST or (zero and value == 0)):
        bounds = f"above {above:g}, at most {LARGEST:g}{', or 0' if zero else ''}"
        raise UserError(f"{where} must be a number {bounds}, not {value!r}")
    return float(value)


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """The angle per token of each pair of a head's values, and the factor of cosine and sine.

    Pair i is values i and i + head_dim/2, and its angle at position p is p · frequencies[i]
    radians. The formulas are those of transformers' modeling_rope_utils: linear (kaiokendev),
    llama3 (Llama 3.1), yarn (YaRN, arXiv:2309.00071, section 3), longrope (arXiv:2402.13753).

    Returns (frequencies float32[head_dim / 2], attention_factor). Raises ValueError for longrope
    factors of another number of pairs.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # Powers in float64, rounded once: within one unit of torch's float32 pow on every platform.
    periods = (rope.theta ** exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1.0) / periods
    if rope.type == "default":
        return plain, 1.0
    factor = np.float32(rope.factor)
    if rope.type == "proportional":
        rotated = int(rope.part * head_dim // 2)
        return np.where(np.arange(plain.size) < rotated, plain, 0) / factor, 1.0
    if rope.type == "linear":
        return plain / factor, 1.0
    if rope.type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.type == "yarn":
        ramp = _yarn_ramp(rope, head_dim)
        slowed = np.float32(1.0) / (factor * periods)
        return slowed * ramp + plain * (np.float32(1.0) - ramp), _yarn_attention_factor(rope)
    if rope.type == "longrope":
        factors = np.asarray(rope.long_factor if rope.long else rope.short_factor, np.float32)
        if factors.shape != plain.shape:
            raise ValueError(f"{factors.size} longrope factors for {plain.size} pairs of values")
        return np.float32(1.0) / (factors * periods), _longrope_attention_factor(rope)
    raise ValueError(f"unknown rope type {rope.type!r}; known: {', '.join(ROPE_TYPES)}")


def _longrope_attention_factor(rope: Rope) -> float:
    """LongRoPE's factor (arXiv:2402.13753), by transformers' rule for models that state none."""
    mscale = rope.long_mscale if rope.long else rope.short_mscale
    if mscale is not None:
        return mscale
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))


def _llama3(rope: Rope, plain: np.ndarray) -> np.ndarray:
    """Divides the frequencies of long waves by the factor, keeps short ones, and blends between
    them, unless both factors are the same (Llama 4 Scout)."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    turns = rope.original_max_position_embeddings * plain / np.float32(2 * math.pi)
    smooth = np.clip((turns - low) / max(high - low, 1e-12), 0.0, 1.0).astype(np.float32)
    return (1 - smooth) * plain / np.float32(rope.factor) + smooth * plain


def _yarn_ramp(rope: Rope, head_dim: int) -> np.ndarray:
    """float32[head_dim / 2] from 0 (frequency kept) to 1 (divided by the factor)."""

    def pair_that_turns(times: float) -> float:
        period = rope.original_max_position_embeddings / (times * 2 * math.pi)
        return head_dim * math.log(period) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    return np.clip((pairs - np.float32(low)) / np.float32(width), 0, 1).astype(np.float32)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor of scores, which grows with the context length (section 3.4). weight:
    `mscale`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_attention_factor(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor)


def _table(raw: dict, key: str, source: str) -> dict:
    """raw[key] as a new dict, with "type" renamed to "rope_type"."""
    table = raw.get(key)
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise UserError(f"{source}: {key} must be an object, not {table!r}")
    table = dict(table)
    if any(isinstance(value, dict) for value in table.values()):
        raise UserError(f"{source}: {key} differs from layer to layer, which is not implemented")
    older = table.pop("type", None)
    if older is not None and table.setdefault("rope_type", older) != older:
        raise UserError(
            f"{source}: {key} holds contradicting type {older!r} "
            f"and rope_type {table['rope_type']!r}"
        )
    return table


def _original_length(raw: dict, table: dict, max_length: int, source: str) -> int:
    field = "original_max_position_embeddings"
    values = [v for v in (raw.get(field), table.get(field)) if v is not None]
    if any(value != values[0] for value in values):
        raise UserError(f"{source}: contradicting values of {field}: {values}")
    value = values[0] if values else max_length
    if not is_integer(value) or not 1 < value < 2**31:
        raise UserError(f"{source}: {field} must be an integer from 2 to 2^31 - 1, not {value!r}")
    return value
