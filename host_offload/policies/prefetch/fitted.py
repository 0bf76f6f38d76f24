"""Arrays that a policy learned from a trace, as a value and as a file.

A file is a safetensors file; its metadata say the format, its version, the policy, the model (its
sizes and the digest of its configuration) and the policy's settings as JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from host_offload.control.interface import Policy, Spec
from host_offload.traces.schema import TraceHeader
from pallas_kernels.cpu.rows import Network, network_of

FORMAT = "moejax.policy"
VERSION = 2
_MODEL = ("layers", "experts", "top_k", "hidden")


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Learned arrays, with the model and the policy that they belong to. A frozen value, like the
    policy that holds it. Its nbytes count as memory."""

    policy: str
    config_digest: str
    model: tuple[int, int, int, int]
    """layers, experts, top-k, hidden size; 0: the trace does not say it."""
    settings: str
    """The settings that made the arrays, as JSON."""
    data: bytes
    """The arrays, as safetensors."""
    path: str = dataclasses.field(default="", compare=False)
    """The file that they were read from; empty: none."""

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        arrays = load(self.data)
        for array in arrays.values():
            array.flags.writeable = False
        return arrays

    def of_layer(self, layer: int) -> LayerArrays:
        """A layer's arrays, of arrays named LAYER.NAME; empty without any."""
        return self._by_layer.get(layer) or LayerArrays()

    @functools.cached_property
    def _by_layer(self) -> dict[int, LayerArrays]:
        return {layer: of_layer(self.arrays, layer) for layer in range(self.model[0])}

    @functools.cached_property
    def all_settings(self) -> dict[str, Any]:
        return json.loads(self.settings)

    def setting(self, name: str) -> Any:
        return self.all_settings[name]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def check(self, spec: Spec) -> None:
        """Raises ValueError for a model of other sizes than it was fitted to."""
        found = spec.layers, spec.experts, spec.top_k, spec.hidden
        for name, mine, other in zip(_MODEL, self.model, found, strict=True):
            if mine and mine != other:
                raise ValueError(
                    f"{self.policy} was fitted to a model with {name} {mine}, this one has {other};"
                    " fit it to a trace of this model"
                )

    def array(
        self,
        name: str,
        *shape: int,
        dtypes: Sequence[type] = (np.float32,),
        below: int | None = None,
    ) -> np.ndarray:
        """An array that a policy or the native library indexes without looking.

        - `shape`: that it must have; −1: of any length.
        - `below`: the numbers are places, from 0 to below this.

        Raises ValueError, which names the file, for an array that is missing, of another shape or
        type, or has a number that is not finite or no place.
        """
        where, array = self.path or self.policy, self.arrays.get(name)
        if array is None:
            raise ValueError(f"{where} has no array {name}; fit it again")
        fits = len(shape) == array.ndim and array.dtype in dtypes
        if not fits or any(n not in (-1, m) for n, m in zip(shape, array.shape, strict=True)):
            sizes = ", ".join("any" if n < 0 else str(n) for n in shape)
            kinds = " or ".join(np.dtype(each).name for each in dtypes)
            raise ValueError(
                f"{where}: array {name} is {array.dtype.name}{list(array.shape)} and must be "
                f"{kinds}[{sizes}]; fit it again"
            )
        if not np.isfinite(array).all():
            raise ValueError(f"{where}: array {name} must be of finite numbers; fit it again")
        if below is not None and not ((array >= 0) & (array < below)).all():
            raise ValueError(f"{where}: array {name} must be of 0 … {below - 1}; fit it again")
        return array

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file atomically, replacing an existing one."""
        header = {
            "format": FORMAT,
            "version": str(VERSION),
            "policy": self.policy,
            "config_digest": self.config_digest,
            "model": json.dumps(self.model),
            "settings": self.settings,
        }
        new = Path(f"{os.fspath(path)}.new")
        new.write_bytes(save(dict(self.arrays), header))
        new.replace(path)


class LayerArrays(dict[str, np.ndarray]):
    """A layer's arrays by name."""

    @functools.cached_property
    def network(self) -> Network | None:
        """The network of these arrays by the native library, see network_of."""
        return network_of(self)

    def __reduce__(self) -> tuple:
        return LayerArrays, (dict(self),)  # a network has addresses of this process


def of_layer(arrays: Mapping[str, np.ndarray], layer: int) -> LayerArrays:
    """A layer's arrays, from arrays named LAYER.NAME."""
    prefix = f"{layer}."
    return LayerArrays(
        (name.removeprefix(prefix), array)
        for name, array in arrays.items()
        if name.startswith(prefix)
    )


def fit_of(
    policy: str,
    header: TraceHeader,
    arrays: Mapping[str, np.ndarray],
    settings: Mapping[str, float | str],
) -> Fitted:
    """Makes the Fitted of a policy from a trace with this header.

    - `settings`: fields of the policy on which the arrays depend.
    """
    hidden = int(header.spec.get("hidden", header.gate_input))
    model = header.layers, header.experts, header.top_k, hidden
    data = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    return Fitted(policy, header.config_digest, model, json.dumps(settings), data)


def read_fitted(path: str | os.PathLike[str], policy: str) -> Fitted:
    """Reads a file that Fitted.write wrote. Raises ValueError, which names the file, for another
    kind of file, version or policy."""
    path = Path(path)
    try:
        with safe_open(path, framework="numpy") as file:
            found = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path}: cannot be read as a fitted policy ({error}); give a file that its fit wrote"
        ) from error
    if found.get("format") != FORMAT:
        raise ValueError(f"{path} is not a fitted policy; give a file that the policy's fit wrote")
    if found.get("version") != str(VERSION):
        raise ValueError(
            f"{path}: version {found.get('version')}, this moejax reads {VERSION}; fit it again"
        )
    if found.get("policy") != policy:
        raise ValueError(f"{path} was fitted for {found.get('policy')!r}, not for {policy!r}")
    try:
        layers, experts, top_k, hidden = (int(size) for size in json.loads(found["model"]))
        json.loads(found["settings"])
        model = layers, experts, top_k, hidden
        return Fitted(
            policy, found["config_digest"], model, found["settings"], save(arrays), str(path)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: its header is damaged ({error!r}); fit it again") from error


def learned_bytes(policies: Sequence[Policy], spec: Spec) -> int:
    """Bytes of what policies learned, or may learn in a model of this spec (their `memory`).
    Experts do not get this memory."""
    total = 0
    for policy in policies:
        memory, state = getattr(policy, "memory", None), getattr(policy, "fitted", None)
        if memory is not None:
            total += memory(spec)
        elif state is not None:  # a user's policy may hold anything with nbytes
            total += state.nbytes
    return total


def check_fitted(policies: Sequence[Policy], config_digest: str) -> None:
    """Raises ValueError for a policy that was fitted to another model."""
    for policy in policies:
        state = getattr(policy, "fitted", None)
        if isinstance(state, Fitted) and state.config_digest != config_digest:
            raise ValueError(
                f"{state.policy} was fitted to a model of configuration "
                f"{state.config_digest[:12]}, this one is {config_digest[:12]}; fit it to a trace "
                "of this model"
            )
