"""The parameters on the device, as a tree of shapes and dtypes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from moejax.checkpoints.tensors import layer_params, model_params, param_dtype, param_shape
from moejax.models.config import ModelConfig
from moejax.models.family import Parts


def abstract_params(config: ModelConfig, dtype: np.dtype) -> dict[str, Any]:
    """LoadedModel.params as ShapeDtypeStructs. dtype: the run's, of all whose place names none."""

    def leaves(params: dict[str, Parts], *layers: int) -> dict[str, Any]:
        return {
            key: jax.ShapeDtypeStruct(
                (*layers, *param_shape(parts)), np.dtype(param_dtype(config, key) or dtype)
            )
            for key, parts in params.items()
        }

    runs = [leaves(layer_params(config, run.moe), run.count) for run in config.runs]
    return {"runs": runs, **leaves(model_params(config))}
