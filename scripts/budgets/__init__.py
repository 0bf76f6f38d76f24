"""The line between experts and KV: curves, splits, resizes, WiSP's Table 2."""
