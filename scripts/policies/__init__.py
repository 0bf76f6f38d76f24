"""Every policy over the same routing: misses, times, predictions."""
