"""The tensors that a checkpoint must hold, and the place of each in parameters or records."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

import jax
import numpy as np

from moejax.errors import UserError
from moejax.models.families import FAMILIES
from moejax.models.family import Family, Parts
from moejax.models.model_config import STREAM_PARAMS, ModelConfig
from moejax.models.next_token import PREDICTOR_NORMS
from pallas_kernels.records.format import MATRICES

MOST_EXPERTS = 10**6
"""Most experts of all layers together; the largest models have 25,000."""


@dataclasses.dataclass(frozen=True)
class ParamPlace:
    """The place of a tensor that becomes rows of a parameter.

    shape: the tensor's. run: index of the run of equal layers; None for a parameter outside of
    layers. key: the parameter's name. layer: position in the run. row: the tensor's first row in
    the parameter, which may have several tensors.
    """

    shape: tuple[int, ...]
    run: int | None
    key: str
    layer: int
    row: int


@dataclasses.dataclass(frozen=True)
class ExpertPlace:
    """The place of a tensor that becomes rows of expert records.

    shape: the tensor's. layer: counted over MoE layers. expert: None for a tensor stacked over all
    experts. matrix: "gate", "up", "down" or "gate_up" (gate rows, then up rows), or one of these
    with "_bias". turned: the tensor is [E, in, out]; `shape` is the file's. interleaved: the
    results of gate and up alternate.
    """

    shape: tuple[int, ...]
    layer: int
    expert: int | None
    matrix: str
    turned: bool = False
    interleaved: bool = False

    @property
    def is_bias(self) -> bool:
        return self.matrix.endswith("_bias")

    @property
    def matrices(self) -> tuple[str, ...]:
        """The matrices, or biases, in the tensor."""
        return {"gate_up": ("gate", "up"), "gate_up_bias": ("gate_bias", "up_bias")}.get(
            self.matrix, (self.matrix,)
        )

    def rows(self, number: int) -> slice:
        """The results of the tensor that are those of matrices[number]."""
        count = len(self.matrices)
        if self.interleaved:
            return slice(number, None, count)
        size = self.shape[-1 if self.turned or self.is_bias else -2] // count
        return slice(number * size, (number + 1) * size)


Place = ParamPlace | ExpertPlace

TABLES = frozenset({"expert_of_token"})
"""Parameters of integers, which float32 holds."""

BLOCKS = "_blocks"
"""After the name of stacked experts, where they are in MXFP4."""


def model_params(config: ModelConfig) -> dict[str, Parts]:
    """The parameters outside of layers, without lm_head where it is tied to embed."""
    table, hidden = (config.vocab_size, config.hidden_size), (config.hidden_size,)
    params: dict[str, Parts] = {
        "embed": (("model.embed_tokens.weight", table),),
        "final_norm": (("model.norm.weight", hidden),),
    }
    if FAMILIES[config.architecture].final_norm_bias:
        params["final_norm_bias"] = (("model.norm.bias", hidden),)
    if not config.tie_word_embeddings:
        params["lm_head"] = (("lm_head.weight", table),)
    if config.lm_head_bias:
        params["lm_head_bias"] = (("lm_head.bias", (config.vocab_size,)),)
    if config.streams is not None:
        count = config.streams.count
        shapes = (count, config.stream_values), (count,), (1,)
        for key, name, shape in zip(STREAM_PARAMS, ("fn", "base", "scale"), shapes, strict=True):
            params[key] = ((f"model.hc_head.hc_{name}", shape),)
    if config.predicts:
        params |= {norm: ((f"model.{norm}.weight", hidden),) for norm in PREDICTOR_NORMS}
        params["eh_proj"] = (("model.eh_proj.weight", (*hidden, 2 * config.hidden_size)),)
    return params


def layer_params(config: ModelConfig, layer: int) -> dict[str, Parts]:
    """The parameters of one layer except its experts, with the whole names of tensors."""
    family = FAMILIES[config.architecture]
    params = family.layer_params(config.of_layer(layer), config.moe_layers[layer])
    return {
        key: tuple((family.full_name(config, layer, name), shape) for name, shape in parts)
        for key, parts in params.items()
    }


def param_shape(parts: Parts) -> tuple[int, ...]:
    """The shape of the parts concatenated along their first axis."""
    return (sum(shape[0] for _, shape in parts), *parts[0][1][1:])


def abstract_params(config: ModelConfig, dtype: np.dtype) -> dict[str, Any]:
    """LoadedModel.params as ShapeDtypeStructs.

    - `dtype`: the run's, for all parameters except the family's wide_params, which are float32.
    """
    wide = FAMILIES[config.architecture].wide_params

    def leaves(params: dict[str, Parts], *layers: int) -> dict[str, Any]:
        return {
            key: jax.ShapeDtypeStruct(
                (*layers, *param_shape(parts)), np.dtype(np.float32) if key in wide else dtype
            )
            for key, parts in params.items()
        }

    runs = [leaves(layer_params(config, run.start), run.count) for run in config.runs]
    return {"runs": runs, **leaves(model_params(config))}


def is_ignored(config: ModelConfig, name: str) -> bool:
    """Whether a checkpoint may hold this tensor although the model does not use it."""
    return FAMILIES[config.architecture].ignores(config, name)


def check_experts(config: ModelConfig, source: str) -> None:
    """Raises UserError for more than MOST_EXPERTS experts.

    - `source`: the checkpoint's path, for the message.
    """
    experts = sum(config.moe_layers) * config.num_experts
    if experts > MOST_EXPERTS:
        raise UserError(
            f"{source}: config.json has {experts} experts in all; at most {MOST_EXPERTS}"
        )


def expected_tensors(config: ModelConfig, found: Container[str]) -> dict[str, Place]:
    """Name → place of every tensor that the checkpoint must hold.

    - `found`: the names that the checkpoint holds. They show for each layer whether its experts are
      separate (``mlp.experts.E.gate_proj.weight``) or stacked (``mlp.experts.gate_up_proj``; the
      family has these names).
    """
    places: dict[str, Place] = {}

    def add(params: dict[str, Parts], run: int | None, layer: int) -> None:
        for key, parts in params.items():
            row = 0
            for name, shape in parts:
                places[name] = ParamPlace(shape, run, key, layer, row)
                row += shape[0]

    add(model_params(config), None, 0)
    family, moe_layer = FAMILIES[config.architecture], 0
    for index, run in enumerate(config.runs):
        for layer in range(run.count):
            add(layer_params(config, run.start + layer), index, layer)
            if run.moe:
                prefix = family.full_name(config, run.start + layer, family.experts)
                places |= _experts(config, found, prefix, moe_layer)
                moe_layer += 1
    return places


def turn_experts(
    config: ModelConfig, places: dict[str, Place], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Place]:
    """The places, of stacked experts by how they lie in the files where the family has both orders.

    gate_up and down lie in the same order, and one of them always shows it: a width cannot be half
    of hidden_size and all of it.

    - `shapes`: tensor → its shape in the files.
    """
    if not FAMILIES[config.architecture].turned:
        return places
    layers: dict[int, list[str]] = {}
    for name, place in places.items():
        if isinstance(place, ExpertPlace) and place.expert is None:
            layers.setdefault(place.layer, []).append(name)
    turned = {}
    for names in layers.values():
        other = {n: (places[n].shape[0], *places[n].shape[:0:-1]) for n in names}
        found = [shapes.get(name) for name in names]
        if found == [other[n] for n in names] != [places[n].shape for n in names]:
            for n in names:
                turned[n] = dataclasses.replace(places[n], shape=other[n], turned=True)
    return places | turned


def _interleaved(
    config: ModelConfig,
    found: Container[str],
    stacked: Mapping[str, tuple[str, tuple[int, int, int]]],
    layer: int,
) -> dict[str, Place]:
    """The places of gpt-oss' stacked experts, as weights [E, in, out] or MXFP4 [E, out, in].

    - `stacked`: name → matrix and shape [E, out, in].
    """
    places: dict[str, Place] = {}
    for name, (matrix, (count, out, into)) in stacked.items():
        alternate = matrix == "gate_up"
        if name + BLOCKS in found:
            name, shape, turned = name + BLOCKS, (count, out, into), False
        else:
            shape, turned = (count, into, out), True
        places[name] = ExpertPlace(shape, layer, None, matrix, turned, alternate)
        if config.expert_bias:
            name = f"{name.removesuffix(BLOCKS)}_bias"
            bias = ExpertPlace((count, out), layer, None, f"{matrix}_bias", False, alternate)
            places[name] = bias
    return places


def _experts(
    config: ModelConfig, found: Container[str], prefix: str, layer: int
) -> dict[str, Place]:
    count, width, hidden = config.num_experts, config.moe_intermediate_size, config.expert_hidden
    family = FAMILIES[config.architecture]
    into = ("up", width) if config.ungated else ("gate_up", 2 * width)
    stacked = {into[0]: (count, into[1], hidden), "down": (count, hidden, width)}
    together = [prefix + name for name in family.stacked]
    first = f"{prefix}0.{_names(family)[0]}.weight"
    if first in found:
        return _separate(config, prefix, layer)
    if len(together) == len(MATRICES):
        return {
            name: ExpertPlace((count, width, hidden), layer, None, matrix, matrix == "down")
            for name, matrix in zip(together, MATRICES, strict=True)
        }
    if family.interleaved:
        return _interleaved(config, found, dict(zip(together, stacked.items(), strict=True)), layer)
    if any(name in found for name in together) or family.matrices is None:
        return {
            name: ExpertPlace(shape, layer, None, matrix)
            for name, (matrix, shape) in zip(together, stacked.items(), strict=True)
        }
    return _separate(config, prefix, layer)


def _separate(config: ModelConfig, prefix: str, layer: int) -> dict[str, Place]:
    """The places of experts that have tensors of their own."""
    width, hidden = config.moe_intermediate_size, config.expert_hidden
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    if config.ungated:
        del shapes["gate"]
    names = dict(zip(shapes, _names(FAMILIES[config.architecture]), strict=True))
    places: dict[str, Place] = {}
    for expert in range(config.num_experts):
        for matrix, shape in shapes.items():
            name = f"{prefix}{expert}.{names[matrix]}"
            places[f"{name}.weight"] = ExpertPlace(shape, layer, expert, matrix)
            if config.expert_bias:
                bias = ExpertPlace(shape[:1], layer, expert, f"{matrix}_bias")
                places[f"{name}.bias"] = bias
    return places


def _names(family: Family) -> tuple[str, ...]:
    """Names of an expert's matrices, also where the family's own are always stacked."""
    return family.matrices or ("gate_proj", "up_proj", "down_proj")


def name_expert(config: ModelConfig, stacked: str, expert: int, matrix: str) -> str:
    """The name, without ".weight", of an expert's matrix in a checkpoint whose experts are
    separate.

    - `stacked`: the name of the tensor that has all experts.
    - `matrix`: "gate", "up" or "down".
    """
    family = FAMILIES[config.architecture]
    names = _names(family)
    return f"{stacked.rpartition('.')[0]}.{expert}.{names[MATRICES[-len(names) :].index(matrix)]}"


def separate_experts(config: ModelConfig) -> set[str]:
    """The names with which expected_tensors takes the experts as separate in every layer."""
    family = FAMILIES[config.architecture]
    name = f"{family.experts}0.{_names(family)[0]}.weight"
    return {family.full_name(config, layer, name) for layer in range(config.num_hidden_layers)}
