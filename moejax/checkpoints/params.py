"""The parameters on the device, as a tree of shapes and dtypes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from moejax.checkpoints.tensors import ParamPlace, expected_tensors
from moejax.models.config import ModelConfig


def abstract_params(config: ModelConfig, dtype: np.dtype) -> dict[str, Any]:
    """LoadedModel.params as ShapeDtypeStructs. dtype: the run's, of all whose place names none."""
    params: dict[str, Any] = {"runs": [{} for _ in config.runs]}
    for place in expected_tensors(config, ()).values():
        if not isinstance(place, ParamPlace):
            continue
        tree = params if place.run is None else params["runs"][place.run]
        above = tree[place.key].shape[-len(place.shape)] if place.key in tree else 0
        shape = (max(above, place.row + place.shape[0]), *place.shape[1:])
        if place.run is not None:
            shape = (config.runs[place.run].count, *shape)
        tree[place.key] = jax.ShapeDtypeStruct(shape, np.dtype(place.dtype or dtype))
    return params
