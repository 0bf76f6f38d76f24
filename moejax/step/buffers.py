"""The memory that steps change in place, and the store that fills it."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from host_offload.memory.arena import allocate_arena, own_arena
from host_offload.memory.store import ExpertStore
from host_offload.memory.tables import Tables, empty_tables
from host_offload.versions.layer_versions import layer_versions
from moejax.step.step_parts import StepSpec

log = logging.getLogger("moejax")


class Buffers:
    """Holds arena and tables, which each step donates to the next one, and the store.

    - `slots`: slots of the arena.
    - `cells`: most cells of a layer.
    """

    def __init__(
        self, steps: StepSpec, store: ExpertStore, device: jax.Device, *, slots: int, cells: int
    ):
        self.store, self.device = store, device
        self.sharding = SingleDeviceSharding(device)
        layout, formats, config = steps.layout, steps.formats, steps.config
        records = layout.records if formats is None else [version.store for version in formats]
        self.stored = [record.version for record in records]
        """The store's name of each version, by version number."""
        self.stores: tuple[Any, ...] = tuple(store.versions[name].operand for name in self.stored)
        """The store's operands of programs, by version number."""
        self._most = max(config.num_hidden_layers, steps.shapes.waves)
        rows = slots * layout.slot_rows
        self.memory = own_arena(rows, layout.hidden) if steps.owned else None
        """The arena's memory, if the native library owns it."""
        self.arena: Any = (
            self.memory.on(device) if self.memory else allocate_arena(rows, layout.hidden, device)
        )
        tables = empty_tables(sum(config.moe_layers), config.num_experts, cells)
        self.layer_versions = layer_versions(formats)
        """The version of each layer, if layers differ; None: every version has all layers."""
        if self.layer_versions is not None:
            tables = tables._replace(**self.layer_versions.contents(tables._asdict()))
        self.tables: Tables = jax.device_put(tables, self.sharding)

    @functools.cached_property
    def numbers(self) -> list[jax.Array]:
        """The int32 numbers 0, 1, ... on the device, for programs that take the number of a layer
        or of a wave. An argument on the device costs a call less time."""
        most = max(self._most, 2)
        return jax.device_put([*np.arange(most, dtype=np.int32)], self.sharding)

    def delete(self, *others: Any) -> None:
        """Frees the arena, the tables and `others`, after the steps that use them."""
        mine = self.arena, self.tables, self.__dict__.pop("numbers", ()), others
        try:  # an array that was donated to a copy that failed is gone
            jax.block_until_ready([a for a in jax.tree.leaves(mine) if not a.is_deleted()])
        except jax.errors.JaxRuntimeError as error:  # reading that step raised it already
            log.info("the last step had failed: %s", error)
        finally:
            if self.memory is not None:
                for failure in self.memory.failures(int(self.memory.token()[1])):
                    log.warning(
                        "expert %d of layer %d could not be read in a step without results: %s",
                        *(failure.expert, failure.layer, failure.message),
                    )
            for array in jax.tree.leaves(mine):
                array.delete()
