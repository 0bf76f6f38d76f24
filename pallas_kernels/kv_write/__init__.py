"""Query/key normalisation, rotary embedding and the write of keys and values to their pages."""

from pallas_kernels.kv_write.api import KVPage, KVPlaces, ProjectedHeads, WriteOptions, kv_write

__all__ = ["KVPage", "KVPlaces", "ProjectedHeads", "WriteOptions", "kv_write"]
