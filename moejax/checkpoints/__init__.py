"""Hugging Face checkpoints on disk: directory, shards, and the tensors in them."""
