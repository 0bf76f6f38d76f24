"""The line between experts and KV: controllers, curves, steps of a resize, WiSP's Table 2."""
