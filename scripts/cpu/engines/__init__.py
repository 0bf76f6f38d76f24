"""Engines that `peers` compares, each in a process of its own that computes when it is told to."""
