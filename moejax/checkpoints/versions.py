"""Makes the versions of experts that a run uses and the checkpoint lacks."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence

from host_offload.memory.device_memory import shares_memory
from host_offload.memory.store import StoreBuilder
from host_offload.policies.precision.precision_names import CHECKPOINT
from host_offload.versions.quantizers import QUANTIZERS
from host_offload.versions.store_versions import VersionError, add_version, lossless_where_it_fits
from moejax.checkpoints.load import LoadedModel
from moejax.device import require_pinned_memory
from moejax.errors import NotPinned, UserError, user_errors
from pallas_kernels.records import RecordFormat
from pallas_kernels.records.format import VERSIONS

log = logging.getLogger("moejax")

LOSSLESS = "lossless"
"""The name in place of a quantizer, for a version that keeps all bits."""


def check_versions(layout: RecordFormat, dtype: str, versions: Sequence[str]) -> None:
    """Raises UserError for versions that cannot be made: experts of this size or dtype cannot be in
    the version, moejax only reads it, a version is named twice, or none is named.

    - `layout`: of a dense record.
    - `dtype`: the run's.
    """
    if not versions or len(set(versions)) < len(versions):
        raise UserError(f"name each version once, not {', '.join(versions) or 'none'}")
    for version in versions:
        with user_errors():
            dataclasses.replace(layout, version=version, dtype=dtype)
        if version not in VERSIONS:
            raise UserError(
                f"{version} is a format of checkpoints, which moejax reads and does not make; "
                f"choose {', '.join(VERSIONS)}"
            )


def check_quantizer(name: str) -> None:
    """Raises UserError for an unknown quantizer."""
    if name not in QUANTIZERS:
        raise UserError(f"quantizer {name!r} is unknown; choose {', '.join(QUANTIZERS)}")


def has_versions(loaded: LoadedModel, wanted: Sequence[str]) -> bool:
    """Whether the store is that of with_versions already."""
    return tuple(wanted) in (tuple(loaded.store.arrays), (CHECKPOINT,))


def with_versions(
    loaded: LoadedModel,
    wanted: Sequence[str],
    *,
    quantizer: str = "rtn",
    progress: Callable[[str, int, int], None] | None = None,
    new_builder: Callable[..., StoreBuilder] = StoreBuilder,
) -> LoadedModel:
    """Returns the model with a store of exactly these versions, in this order.

    Versions that the store lacks are encoded from the dense version, which is freed afterwards if
    it is not in `wanted`, or from the checkpoint's own format. With lossless12 and without dense in
    `wanted`, layers with an expert that lossless12 cannot hold stay dense. Each layer is then in
    one of the two arrays (ExpertStore.layers), and the log says which layers stay dense and why.

    - `wanted`: names from pallas_kernels.records.VERSIONS, each once, and CHECKPOINT for what the
      store has; alone, for the store as it is.
    - `quantizer`: how int versions are made, one of QUANTIZERS.
    - `progress`: called with (version, bytes done, total bytes).
    - `new_builder`: makes the arrays of new versions, as in load_checkpoint.

    Raises UserError for unknown names, for a version that cannot be made because the store lacks
    dense or the version cannot hold a weight, and where host memory is too small; NotPinned where
    pinned memory is.
    """
    check_quantizer(quantizer)
    if has_versions(loaded, wanted):
        return loaded
    loaded.store.wait()
    made = [version for version in wanted if version != CHECKPOINT]
    check_versions(loaded.layout, loaded.dtype, made)
    if CHECKPOINT in wanted:
        wanted = [*loaded.store.layouts, *made]
    store, began, quantizers = loaded.store, time.perf_counter(), dict(loaded.quantizers)
    # The version that replaces dense comes last, since the other versions are made from dense.
    replacing = {"lossless12"} if "dense" not in wanted else set()
    for version in sorted(wanted, key=replacing.__contains__):
        if version in store.layouts:
            continue
        layout = dataclasses.replace(loaded.layout, version=version, dtype=loaded.dtype)
        device = next(iter(next(iter(store.arrays.values())).devices()))
        layers, experts = sum(loaded.config.moe_layers), loaded.config.num_experts
        require_pinned_memory(device, store.nbytes + layers * experts * layout.nbytes)
        report = None if progress is None else functools.partial(progress, version)
        try:
            if version in replacing:
                store, dense = lossless_where_it_fits(store, loaded.dtype, report)
                for layer, reason in dense.items():
                    log.warning("lossless12: MoE layer %d stays dense: %s", layer, reason)
            else:
                rule = QUANTIZERS[quantizer]
                store = add_version(store, version, loaded.dtype, rule, report, new_builder)
        except VersionError as error:
            raise UserError(f"{error}; use another version") from None
        except MemoryError as error:
            kind = UserError if shares_memory(device) else NotPinned
            raise kind(str(error)) from error
        if version != "dense":
            quantizers[version] = quantizer if layout.lossy else LOSSLESS
    kept = list(wanted)
    if "lossless12" in store.layers:
        kept.insert(kept.index("lossless12") + 1, "dense")
    seconds = loaded.seconds | {"versions": time.perf_counter() - began}
    return dataclasses.replace(
        loaded,
        store=store.only(kept),
        seconds=seconds,
        quantizers={version: name for version, name in quantizers.items() if version in wanted},
    )
