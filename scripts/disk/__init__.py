"""Experts in files: a model larger than the memory that it may take."""
