"""Reads a model's config.json without transformers. Every field is honoured or refused by name."""

from __future__ import annotations

import dataclasses
import os
import pathlib

from host_offload.policies.precision.precision_names import CHECKPOINT
from moejax.errors import UserError, shown, user_errors
from moejax.models.directory import checkpoint_directory, read_json
from moejax.models.families import FAMILIES
from moejax.models.family import Family, Fields, token_ids
from moejax.models.gguf_config import config_fields, quantization_of
from moejax.models.gguf_header import is_gguf, read_gguf
from moejax.models.model_config import ModelConfig
from moejax.models.quantization import KEYS, parse_quantization


def load_config(directory: str | os.PathLike) -> ModelConfig:
    """Reads config.json, and end-of-sequence ids of generation_config.json if it has any.

    - `directory`: a local Hugging Face checkpoint, or a GGUF file.

    Raises UserError, which names file and field.
    """
    path = checkpoint_directory(directory)
    if is_gguf(path):
        return _load_gguf_config(path)
    config = parse_config(read_json(path / "config.json"), str(path / "config.json"))
    generation = path / "generation_config.json"
    if generation.exists():
        ids = token_ids(read_json(generation).get("eos_token_id"), str(generation))
        if ids:
            config = dataclasses.replace(config, eos_token_ids=ids)
    return config


def record_version(directory: str | os.PathLike) -> str:
    """CHECKPOINT for a checkpoint whose config.json or GGUF file says that its weights are
    quantized, else "dense". Raises UserError as load_config, for those that do."""
    path = pathlib.Path(directory).expanduser() / "config.json"
    if not is_gguf(directory):
        if not path.is_file():
            return "dense"
        raw = read_json(path)
        inner = raw.get("text_config")
        tables = (raw, inner) if isinstance(inner, dict) else (raw,)
        if not any(table.get(key) for table in tables for key in KEYS):
            return "dense"
    return "dense" if load_config(directory).quantization is None else CHECKPOINT


def _load_gguf_config(path: pathlib.Path) -> ModelConfig:
    headers = read_gguf(path)
    config = parse_config(config_fields(headers), str(path))
    layers = [layer for layer, moe in enumerate(config.moe_layers) if moe]
    return dataclasses.replace(config, quantization=quantization_of(headers, layers))


def parse_config(raw: dict, source: str = "config.json") -> ModelConfig:
    """The ModelConfig of a parsed config.json, with the defaults of its family's config class.

    Of a wrapper of several models it is the text model's, which text_config describes. Accepts
    the older key names (torch_dtype, rope_theta, rope_scaling) and those of transformers 5
    (dtype, rope_parameters). Keys that transformers does not read for a model are ignored. Keys
    that would change the computation are refused.

    - `source`: the file's name, for messages.

    Raises UserError.
    """
    if not isinstance(raw, dict):
        raise UserError(f"{source}: expected a JSON object, found {type(raw).__name__}")
    family = _family(raw, source)
    if family.text_types:
        raw, source = _text_config(family, raw, source)
    fields = Fields(raw, source)
    quantization = parse_quantization(raw, fields.dtype(), source)
    _refuse_other_computations(raw, source, family.reads)
    config = dataclasses.replace(family.parse(fields), quantization=quantization)
    moe = config.of_layer(config.moe_layers.index(True))
    correction = "correction" in family.layer_params(moe, True)
    with user_errors(where=f"{source}: the router's fields do not fit together: "):
        config.route_rule.check(config.num_experts, correction=correction)
    for run in config.runs:
        _check_rope(config.of_layer(run.start), source)
    return config


def _check_rope(config: ModelConfig, source: str) -> None:
    rope, pairs = config.rope, config.rotary_dim // 2
    if config.rope_layers is not None and rope.type in ("yarn", "longrope"):
        raise UserError(
            f"{source}: rope type {rope.type!r} is not implemented for models with layers without "
            "positions"
        )
    for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if rope.type == "longrope" and len(factors) != pairs:
            raise UserError(
                f"{source}: rope_parameters.{name} must have one number for each of {pairs} pairs "
                f"of rotated values, not {len(factors)}"
            )


_OF_WRAPPER = (*KEYS, "dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
"""Fields that a wrapper may state itself, and that then hold for its text model."""


def _text_config(family: Family, raw: dict, source: str) -> tuple[dict, str]:
    """(the text model's config.json, its name for messages), of a wrapper's."""
    text = {} if raw.get("text_config") is None else raw["text_config"]
    if not isinstance(text, dict):
        raise UserError(f"{source}: text_config must be an object, not {shown(text)}")
    kind = text.get("model_type", family.text_types[0])
    if kind not in family.text_types:
        supported = " or ".join(map(repr, family.text_types))
        raise UserError(
            f"{source}: text_config.model_type {shown(kind)} is not supported for "
            f"{family.architecture}, only {supported}"
        )
    own = {key: raw[key] for key in _OF_WRAPPER if raw.get(key) is not None}
    if own.keys() & {"dtype", "torch_dtype"}:
        text = {key: v for key, v in text.items() if key not in ("dtype", "torch_dtype")}
    # transformers ties a wrapper's head by the wrapper's own field alone.
    return {**text, "tie_word_embeddings": family.tied, **own}, f"{source}: text_config"


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
    known = {alias: f for f in FAMILIES.values() for alias in f.aliases} | FAMILIES
    for found, table in ((names and names[0], known), (kind, kinds)):
        if found is not None and (not isinstance(found, str) or found not in table):
            raise UserError(
                f"{source}: architecture {found!r} is not supported; supported: {supported}"
            )
    family = known[names[0]] if names else kinds[str(kind)]
    if names and kind is not None and names[0] in kinds[kind].aliases:
        family = kinds[kind]  # of several with that alias
    if kind is not None and kinds[kind] is not family:
        raise UserError(
            f"{source}: model_type {kind!r} contradicts the architecture {family.architecture}"
        )
    return family


def _refuse_other_computations(raw: dict, source: str, read: frozenset[str]) -> None:
    """Refuses keys that transformers reads for any model and that would change the computation.

    - `read`: those that the family reads.
    """
    for key, plain in (
        ("is_causal", True),
        ("is_encoder_decoder", False),
        ("attention_chunk_size", None),
        ("num_kv_shared_layers", 0),
        ("kv_sharing_modes", None),
        ("per_layer_config", {}),
    ):
        value = raw.get(key)
        if value is not None and value != plain and key not in read:
            raise UserError(f"{source}: {key} {value!r} is not implemented")
