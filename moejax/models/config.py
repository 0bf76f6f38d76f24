"""Reads a model's config.json without transformers. Every field is honoured or refused by name."""

from __future__ import annotations

import dataclasses
import os
import pathlib

from moejax.errors import UserError, user_errors
from moejax.models.directory import checkpoint_directory, read_json
from moejax.models.families import FAMILIES
from moejax.models.family import Family, Fields, token_ids
from moejax.models.model_config import ModelConfig
from moejax.models.quantization import KEYS, parse_quantization


def load_config(directory: str | os.PathLike) -> ModelConfig:
    """Reads config.json, and end-of-sequence ids of generation_config.json if it has any.

    - `directory`: a local Hugging Face checkpoint.

    Raises UserError, which names file and field.
    """
    path = checkpoint_directory(directory)
    config = parse_config(read_json(path / "config.json"), str(path / "config.json"))
    generation = path / "generation_config.json"
    if generation.exists():
        ids = token_ids(read_json(generation).get("eos_token_id"), str(generation))
        if ids:
            config = dataclasses.replace(config, eos_token_ids=ids)
    return config


def record_version(directory: str | os.PathLike) -> str:
    """The version that the experts of a checkpoint are in, "dense" unless its config.json names a
    quantization. Raises UserError as load_config, for those that do."""
    path = pathlib.Path(directory).expanduser() / "config.json"
    if not path.is_file() or not any(read_json(path).get(key) for key in KEYS):
        return "dense"
    quantization = load_config(directory).quantization
    return "dense" if quantization is None else quantization.version


def parse_config(raw: dict, source: str = "config.json") -> ModelConfig:
    """The ModelConfig of a parsed config.json, with the defaults of its family's config class.

    Accepts the older key names (torch_dtype, rope_theta, rope_scaling) and those of transformers 5
    (dtype, rope_parameters). Keys that transformers does not read for a model are ignored. Keys
    that would change the computation are refused.

    - `source`: the file's name, for messages.

    Raises UserError.
    """
    if not isinstance(raw, dict):
        raise UserError(f"{source}: expected a JSON object, found {type(raw).__name__}")
    family = _family(raw, source)
    fields = Fields(raw, source)
    quantization = parse_quantization(raw, fields.dtype(), source)
    _refuse_other_computations(raw, source)
    config = dataclasses.replace(family.parse(fields), quantization=quantization)
    correction = "correction" in family.layer_params(config, True)
    with user_errors(where=f"{source}: the router's fields do not fit together: "):
        config.route_rule.check(config.num_experts, correction=correction)
    _refuse_scaled_part(config, source)
    rope, pairs = config.rope, config.rotary_dim // 2
    for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if rope.type == "longrope" and len(factors) != pairs:
            raise UserError(
                f"{source}: rope_parameters.{name} must have one number for each of {pairs} pairs "
                f"of rotated values, not {len(factors)}"
            )
    return config


def _refuse_scaled_part(config: ModelConfig, source: str) -> None:
    """Refuses a factor on cosine and sine, which would also scale values that are not rotated."""
    rope = config.rope
    if config.rotary_width is None or rope.type not in ("yarn", "longrope"):
        return
    raise UserError(
        f"{source}: rope type {rope.type!r} is not implemented for heads of which only a part is "
        "rotated (partial_rotary_factor); supported there: default, linear, llama3"
    )


def _family(raw: dict, source: str) -> Family:
    kinds = {
        kind: family
        for family in FAMILIES.values()
        for kind in (family.model_type, *family.other_types)
    }
    supported = ", ".join(FAMILIES)
    kind, names = raw.get("model_type"), raw.get("architectures")
    if names is not None and not (
        isinstance(names, list) and names and all(isinstance(n, str) for n in names)
    ):
        raise UserError(f"{source}: architectures must be a list of names, not {names!r}")
    if names is None and kind is None:
        raise UserError(
            f"{source}: names neither architectures nor model_type; supported: {supported}"
        )
    known = FAMILIES | {alias: f for f in FAMILIES.values() for alias in f.aliases}
    for found, table in ((names and names[0], known), (kind, kinds)):
        if found is not None and (not isinstance(found, str) or found not in table):
            raise UserError(
                f"{source}: architecture {found!r} is not supported; supported: {supported}"
            )
    family = known[names[0]] if names else kinds[str(kind)]
    if kind is not None and kinds[kind] is not family:
        raise UserError(
            f"{source}: model_type {kind!r} contradicts the architecture {family.architecture}"
        )
    return family


def _refuse_other_computations(raw: dict, source: str) -> None:
    """Refuses keys that transformers reads for any model and that would change the computation."""
    for key, plain in (
        ("is_causal", True),
        ("is_encoder_decoder", False),
        ("attention_chunk_size", None),
        ("num_kv_shared_layers", 0),
        ("kv_sharing_modes", None),
        ("per_layer_config", {}),
    ):
        value = raw.get(key)
        if value is not None and value != plain:
            raise UserError(f"{source}: {key} {value!r} is not implemented")
