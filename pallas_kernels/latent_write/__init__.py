"""Normalisation, rotary embedding and the write of latent KV to its pages (MLA)."""

from pallas_kernels.latent_write.api import LatentHeads, latent_write

__all__ = ["LatentHeads", "latent_write"]
