"""The expert store: every expert of every MoE layer, as records in pinned host memory."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from host_offload.layout import ExpertLayout


@dataclasses.dataclass(frozen=True)
class ExpertStore:
    """All experts by version, ready to be passed to jit as parameters.

    layouts: version → its record's layout. arrays: version → uint16[L, E, rows, D] in `pinned_host`
    memory of one device, L counted over MoE layers, rows and D as in the layout. Readers must not
    donate the arrays.
    """

    layouts: dict[str, ExpertLayout]
    arrays: dict[str, jax.Array]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(array.nbytes for array in self.arrays.values())

    def delete(self) -> None:
        """Frees the arrays now, whoever else refers to them."""
        for array in self.arrays.values():
            array.delete()


class StoreBuilder:
    """Fills a store piece by piece; host memory is the store and the pieces in flight.

    The array is allocated once, without passing through device memory, and every `put` updates it
    in place (donation). Pieces may come in any order, each row exactly once: `finish` raises where
    one is missing, because on a GPU fresh memory holds whatever was there before.
    """

    def __init__(self, layout: ExpertLayout, layers: int, experts: int, device: jax.Device):
        """layers, experts: L and E. Raises MemoryError if the device's pinned host memory cannot
        hold the array."""
        self.layout = layout
        self._sharding = SingleDeviceSharding(device, memory_kind="pinned_host")
        shape = (layers, experts, layout.rows, layout.hidden)
        allocate = jax.jit(lambda: jax.lax.empty(shape, jnp.uint16), out_shardings=self._sharding)
        try:
            self._array: jax.Array | None = jax.block_until_ready(allocate())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            gib = layers * experts * layout.nbytes / 2**30
            raise MemoryError(
                f"cannot allocate {gib:.1f} GiB of pinned host memory for the expert store; "
                "on a GPU the environment variable XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, set before "
                "jax starts, raises the limit of 64 GB"
            ) from error
        self._written = np.zeros((layers, experts, layout.rows), bool)

    def put(self, layer: int, first_expert: int, records: np.ndarray, first_row: int = 0) -> None:
        """Writes a piece: rows first_row … first_row + r − 1 of n consecutive experts.

        layer: counted over MoE layers. records: uint16[n, r, D], r = rows for whole records. Each
        new shape of records compiles once. Raises ValueError for a piece that lies outside of the
        store, overlaps rows already written, or comes after finish.
        """
        if self._array is None:
            raise ValueError("the store is finished; build another one")
        layers, experts, rows, hidden = self._array.shape
        if records.dtype != np.uint16 or records.ndim != 3 or records.shape[2] != hidden:
            raise ValueError(
                f"records must be uint16[n, r, {hidden}], not {records.dtype}{list(records.shape)}"
            )
        n, r = records.shape[:2]
        # Checked here because XLA clamps an update that lies outside instead of refusing it.
        inside = (
            0 <= layer < layers and 0 <= first_expert <= experts - n and 0 <= first_row <= rows - r
        )
        if not inside:
            raise ValueError(
                f"layer {layer}, experts {first_expert}+{n}, rows {first_row}+{r} lie "
                f"outside of the store [{layers}, {experts}, {rows}]"
            )
        piece = np.s_[layer, first_expert : first_expert + n, first_row : first_row + r]
        if self._written[piece].any():
            raise ValueError(
                f"layer {layer}, experts {first_expert}+{n}, rows {first_row}+{r}: written twice"
            )
        self._array = _updater(self._sharding)(
            self._array, records[None], layer, first_expert, first_row
        )
        self._written[piece] = True

    def finish(self) -> ExpertStore:
        """The filled store; the builder is used up. Raises ValueError if a row is missing."""
        if self._array is None:
            raise ValueError("the store is finished; build another one")
        missing = np.argwhere(~self._written)
        if missing.size:
            layer, expert, row = missing[0]
            raise ValueError(
                f"{len(missing)} rows were never written, "
                f"first: layer {layer}, expert {expert}, row {row}"
            )
        array, self._array = jax.block_until_ready(self._array), None
        return ExpertStore({self.layout.version: self.layout}, {self.layout.version: array})

    def delete(self) -> None:
        """Frees the array of a store that will not be finished."""
        if self._array is not None:
            self._array.delete()
            self._array = None


def update(
    store: jax.Array,
    records: jax.Array,
    layer: jax.Array | int,
    expert: jax.Array | int,
    row: jax.Array | int,
) -> jax.Array:
    """store with records[1, n, r, D] written at [layer, expert, row, 0]; in place if donated."""
    # Not Space.Host: on CPU a pinned_host array is typed as device memory while tracing.
    records = jax.device_put(records, jax.typeof(store).memory_space)
    start = [jnp.asarray(i, jnp.int32) for i in (layer, expert, row, 0)]
    return jax.lax.dynamic_update_slice(store, records, start)


@functools.cache
def _updater(sharding: SingleDeviceSharding):
    return jax.jit(update, donate_argnums=0, out_shardings=sharding)


def rows_of(weights: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Weight rows [n, D] as arena rows uint16[n · itemsize / 2, D] of the run's dtype.

    Arena rows of 16-bit types are the weights' own bits; a float32 row becomes two arena rows.
    """
    width, weights = weights.shape[1], weights.astype(dtype, copy=False)
    if weights.itemsize == 2:
        weights = weights.view(np.uint16)  # before the copy: numpy copies its own types faster
    return np.ascontiguousarray(weights).view(np.uint16).reshape(-1, width)


def record_of(gate: np.ndarray, up: np.ndarray, down: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The dense record uint16[rows, D] of one expert: gate rows, up rows, down^T rows.

    gate, up: [I, D]; down: [D, I]; any float dtype, converted to dtype (float32, float16 or
    ml_dtypes' bfloat16).
    """
    return np.concatenate([rows_of(part, dtype) for part in (gate, up, down.T)])
